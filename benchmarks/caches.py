"""Attention of one query over caches of keys and values as serving engines keep them: codes with scales, blocks with a table.

    python benchmarks/caches.py [--shape 1,32,8,4096,128] [--device cuda] [--budget 10] [--only s8] [--rounds 15]

A shape is batch, heads of queries, heads of keys, keys, columns of a head. A cache holds bf16, or codes (s8, f8e4m3fn) with an
f32 scale for each head or for each token of a head; whole, or in blocks of 16 tokens of which a table picks some. Each is one
torch module, compiled as a user would; torch runs the same module beside it. The limit is each byte that is read, once, at the
machine's measured rate. Several copies take turns, so that no cache of the processor holds them. Results are compared with
attention in f32.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import click
import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewright
from tilewright.hardware.ceilings import with_ceilings
from tilewright.hardware.detect import detect
from tilewright.schedule.candidate import labelled

DEFAULTS = ("1,32,8,4096,128", "16,32,8,4096,128")
BLOCK = 16  # tokens
CODES = {"bf16": torch.bfloat16, "s8": torch.int8, "f8e4m3fn": torch.float8_e4m3fn}
BEYOND_CACHE = 256 << 20  # bytes of all copies
CALLS = 12  # of a graph
ERROR = 2e-2  # relative, in norm


@dataclass(frozen=True)
class Form:
    """A cache's form: the type of its elements, what has a scale ("head", "token", or "" for nothing), in blocks or whole."""

    codes: str
    scales: str
    paged: bool

    def __str__(self) -> str:
        """The form in words."""
        return f"{self.codes}{f', a scale for each {self.scales}' * bool(self.scales)}{', paged' * self.paged}"


KINDS = [("bf16", ""), *itertools.product(("s8", "f8e4m3fn"), ("head", "token"))]
FORMS = [Form(*kind, paged) for kind, paged in itertools.product(KINDS, (False, True))]


class Decode(torch.nn.Module):
    """One query of each head over a cache of a form; `wide` computes in f32."""

    def __init__(self, form: Form, shape: tuple[int, ...], *, wide: bool = False) -> None:
        super().__init__()
        self.form, self.shape, self.wide = form, shape, wide

    def operand(self, cache: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Keys or values as [batch, heads of keys, keys, columns] in bf16."""
        batch, _, heads, keys, _ = self.shape
        if self.form.paged and self.form.scales == "token":
            scale = scale[table]
        x = cache[table] if self.form.paged else cache
        x = x.float() * scale[..., None] if self.form.scales else x
        x = x.reshape(batch, keys, heads, -1).transpose(1, 2)
        return x.float() if self.wide else x.to(torch.bfloat16)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ks: torch.Tensor, vs: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """The attention, [batch, heads, 1, columns]."""
        q = q.float() if self.wide else q
        return scaled_dot_product_attention(q, self.operand(k, ks, table), self.operand(v, vs, table), enable_gqa=True)

    def sources(self, device: str) -> tuple[torch.Tensor, ...]:
        """Random queries, caches and scales, and a table without order in which no block comes twice."""
        batch, heads, few, keys, columns = self.shape
        blocks = batch * keys // BLOCK
        lies = (blocks, BLOCK, few) if self.form.paged else (batch, keys, few)
        caches = [torch.randn(*lies, columns, device=device) for _ in "kv"]
        if self.form.codes == "s8":
            caches = [(x * 40).round().clamp(-127, 127) for x in caches]
        caches = [x.to(CODES[self.form.codes]) for x in caches]
        scaled = (few,) if self.form.scales == "head" else lies
        scales = [torch.rand(scaled, device=device) / (40 if self.form.codes == "s8" else 1) for _ in "kv"]
        table = torch.randperm(blocks, device=device).reshape(batch, keys // BLOCK)
        return torch.randn(batch, heads, 1, columns, device=device).bfloat16(), *caches, *scales, table

    def read_bytes(self, sources: tuple[torch.Tensor, ...]) -> int:
        """Bytes of what the form reads, each once, and of the result."""
        q, k, v, ks, vs, table = sources
        read = [q, q, k, v, *[ks, vs] * bool(self.form.scales), *[table] * self.form.paged]
        return sum(t.nbytes for t in read)


def timed(calls: Callable[[int], object], device: str, rounds: int) -> float:
    """Median in microseconds of a call, which is given its number."""
    if device == "cuda":
        from gpu import captured, replay_us

        graph = captured(lambda: [calls(i) for i in range(CALLS)], 1)
        return statistics.median([replay_us(graph, CALLS) for _ in range(rounds + 2)][2:])
    found = list[float]()
    for i in range(rounds + 2):
        start = time.perf_counter()
        calls(i)
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found[2:])


@click.command()
@click.option(
    "--shape", "shapes", multiple=True, default=DEFAULTS, show_default=True, help="batch,heads,key heads,keys,columns"
)
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--budget", "budget_s", default=10.0, show_default=True, help="Seconds in which each is compiled.")
@click.option("--only", default="", help="Forms whose words contain this.")
@click.option("--rounds", default=15, show_default=True)
def main(shapes: tuple[str, ...], device: str, budget_s: float, only: str, rounds: int) -> None:
    """Time attention of one query over caches of codes and blocks."""
    target = with_ceilings(detect(device))
    for text in shapes:
        shape = tuple(map(int, text.split(",")))
        print(
            f"\n{text}\n| cache | MB | limit us | us | torch us | error | kernel |\n|---|--:|--:|--:|--:|--:|---|", flush=True
        )
        for form in (f for f in FORMS if only in str(f)):
            module = Decode(form, shape).eval()
            first = module.sources(device)
            read = module.read_bytes(first)
            copies = [first, *(module.sources(device) for _ in range(min(CALLS, -(-BEYOND_CACHE // read)) - 1))]
            program = tilewright.compile(module, example_inputs=first, device=device, budget_s=budget_s)
            wanted = Decode(form, shape, wide=True)(*first)
            error = float((torch.as_tensor(program(*first)).float() - wanted).norm() / wanted.norm())
            if not error < ERROR:
                raise SystemExit(f"{form}: relative error {error:.1e}")
            chosen = [labelled(s.decision.kernel.candidate, s.decision.kernel.schedule) for s in program.steps if s.decision]
            ours = timed(lambda i, p=program, c=copies: p(*c[i % len(c)]), device, rounds)
            torchs = timed(lambda i, m=module, c=copies: m(*c[i % len(c)]), device, rounds)
            limit = read / target.read_gbps / 1e3
            print(
                f"| {form} | {read / 1e6:.1f} | {limit:.1f} | {ours:.1f} | {torchs:.1f} | {error:.0e} | {'; '.join(chosen)} |",
                flush=True,
            )


if __name__ == "__main__":
    with torch.no_grad():
        main()
