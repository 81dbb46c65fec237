"""One decoding step of a Llama-style model with 4-bit weights, beside the same step in bf16.

    python benchmarks/llama_decode.py [--layers 8] [--width 4096] [--batch 1 --batch 16] [--context 1024] [--scheme w4g64]
                                      [--device cuda] [--rounds 30] [--compiled / --no-compiled]
                                      [--tuned / --no-tuned] [--whole / --no-whole] [--budget 30] [--kernels]
                                      [--json FILE]

Layers of Llama 3 8B's proportions with random weights: RMS norm, joined Q, K and V, rotation, a cache of keys and values that
is full, attention with grouped queries, SwiGLU with joined gate and up; no embedding and no vocabulary. On a GPU each contender
is one CUDA graph, and graphs replay in turn; "compiled" ones went through torch.compile first, a layer at a time, the "whole"
one through tilewright.compile. `rest` is the same step without its matrix products. Results are checked against the model with
the dequantised weights before any is timed. `--kernels` also prints what each kernel of the whole one takes.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import _inductor
from torch.nn import functional

import tilewright
from kernels import choices_of, kernels_of

COUNT, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)
HEAD = 128
PER_GROUP = 4  # query heads that share one of keys and values, as 32 do 8 in Llama 3 8B
MLP = 3.5
BASE = 500_000.0  # of the rotation's angles (Llama 3)
LIMIT = 2e-2  # relative error in norm: bf16 rounds some twenty values on the way through a layer


class Layer(torch.nn.Module):
    """One decoder layer for one new token a sequence."""

    def __init__(self, width: int, batch: int, context: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.shared = max(1, self.heads // PER_GROUP)
        inner = int(MLP * width)
        self.qkv = torch.nn.Linear(width, (self.heads + 2 * self.shared) * HEAD, bias=False)
        self.out = torch.nn.Linear(self.heads * HEAD, width, bias=False)
        self.gate_up = torch.nn.Linear(width, 2 * inner, bias=False)
        self.down = torch.nn.Linear(inner, width, bias=False)
        self.before = torch.nn.RMSNorm(width)
        self.between = torch.nn.RMSNorm(width)
        self.register_buffer("cache", torch.randn(2, batch, self.shared, context, HEAD))  # of keys, and of values
        angles = (context - 1) / BASE ** (torch.arange(0, HEAD, 2) / HEAD)
        self.register_buffer("cos", torch.cos(angles).repeat(2))
        self.register_buffer("sin", torch.sin(angles).repeat(2))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return x * self.cos + torch.cat((-other, one), -1) * self.sin

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what goes on, and what is still to be added to it: the next layer adds it where it reads both for its norm."""
        x = x + more
        batch, last = x.shape[0], self.cache.shape[3] - 1
        heads = self.qkv(self.before(x)).view(batch, self.heads + 2 * self.shared, HEAD)
        q, k, v = heads.split([self.heads, self.shared, self.shared], 1)
        self.cache[:, :, :, last] = torch.stack((self.rotated(k), v))
        keys, values = self.cache
        attended = functional.scaled_dot_product_attention(
            self.rotated(q)[:, :, None], keys, values, enable_gqa=self.heads != self.shared
        )
        x = x + self.out(attended.reshape(batch, -1))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x, self.down(functional.silu(gate) * up)


class Model(torch.nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int, width: int, batch: int, context: int, device: str) -> None:
        super().__init__()
        with torch.device(device):
            self.layers = torch.nn.ModuleList([Layer(width, batch, context) for _ in range(layers)])
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = torch.zeros_like(x)
        for layer in self.layers:
            x, more = layer(x, more)
        return x + more


@torch.library.custom_op("benchmark::no_product", mutates_args=())
def no_product(x: torch.Tensor, width: int) -> torch.Tensor:
    """Stand in for a product: memory of the result's shape, and nothing computed; what makes x cannot be left out."""
    return x.new_empty((*x.shape[:-1], width))


@no_product.register_fake
def _(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width))


class NoProduct(torch.nn.Module):
    """A linear layer that multiplies nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return no_product(x, self.width)


def without_products(model: Model) -> Model:
    """A copy of the model that shares its memory and multiplies nothing."""
    held = {id(p): p for p in (*model.parameters(), *model.buffers())}
    rest = copy.deepcopy(model, held)
    for layer in rest.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(layer, name, NoProduct(getattr(layer, name).out_features))
    return rest


def dequantised(model: Model) -> Model:
    """The model with its quantised weights as bf16 matrices."""
    made = copy.deepcopy(model, {id(p): p for p in (*model.parameters(), *model.buffers())})
    for layer in made.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            weight = getattr(layer, name).weight.dequantize(torch.bfloat16)
            plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            setattr(layer, name, plain)
    return made


def compiled(model: Model, tuned: bool) -> Model:
    """The same model, each layer through torch.compile; `tuned`: torch tries more sizes for its own kernels, and has them begin
    while the ones before them end where a GPU can."""
    made = copy.deepcopy(model, {id(p): p for p in (*model.parameters(), *model.buffers())})
    wanted = ("triton.enable_pdl", "coordinate_descent_tuning") if tuned and torch.cuda.is_available() else ()
    options = {name: True for name in wanted if name in _inductor.list_options()}
    for layer in made.layers:
        layer.compile(fullgraph=True, dynamic=False, options=options)
    return made


@dataclass
class Row:
    """A contender's times at one batch, in microseconds a step."""

    batch: int
    contender: str
    us: float
    rest_us: float | None
    ratio: float  # of bf16 eager to it
    by: str


Step = Callable[[torch.Tensor], object]


def launched(model: Step, x: torch.Tensor) -> Callable[[], object]:
    """A step as it is timed: a CUDA graph, or the plain call on a CPU."""
    if x.device.type != "cuda":
        return lambda: model(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
    return graph.replay


def taken(contenders: Sequence[Callable[[], object]], device: str, rounds: int) -> list[float]:
    """Microseconds each takes at the median, in turns."""
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds + 2):
        for run, found in zip(contenders, times, strict=True):
            if device == "cpu":
                began = time.perf_counter()
                run()
                us = 1e6 * (time.perf_counter() - began)
            else:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                run()
                first.record()
                for _ in range(5):
                    run()
                last.record()
                last.synchronize()
                us = 1e3 * first.elapsed_time(last) / 5
            if turn >= 2:
                found.append(us)
    return [statistics.median(t) for t in times]


def measured(
    layers: int,
    width: int,
    batch: int,
    context: int,
    scheme: str,
    device: str,
    rounds: int,
    fused: bool,
    tuned: bool,
    budget_s: float | None,
    kernels: bool,
) -> list[Row]:
    """The contenders at one batch; the one that is compiled as a whole if there is a budget for it.

    Raises:
        SystemExit: a result is wrong.
    """
    torch.manual_seed(0)
    plain = Model(layers, width, batch, context, device).eval()
    x = torch.randn(batch, width, device=device, dtype=torch.bfloat16)
    quantised = copy.deepcopy(plain)
    tilewright.quantize_(quantised, scheme)
    expected = dequantised(quantised)(x).double()
    models: dict[str, Step] = {"bf16 eager": plain, f"{scheme} eager": quantised}
    if fused:
        models |= {"bf16 compiled": compiled(plain, tuned), f"{scheme} compiled": compiled(quantised, tuned)}
    whole = None
    if budget_s is not None:
        given = {"example_inputs": (x,), "device": device, "budget_s": budget_s}
        whole = tilewright.compile(quantised, **given, excess_precision=True)  # as the layers have it by themselves, and torch
        models[f"{scheme} whole"] = whole
    for name, model in models.items():
        if name.startswith(scheme):
            off = float((model(x).double() - expected).norm() / expected.norm())
            if not off < LIMIT:
                raise SystemExit(f"{name}: relative error {off:.1e}")
    del expected
    rests = {"eager": without_products(plain)} | ({"compiled": compiled(without_products(plain), tuned)} if fused else {})
    runs = [launched(m, x) for m in (*models.values(), *rests.values())]
    if not rounds:
        return []
    us = dict(zip((*models, *rests), taken(runs, device, rounds), strict=True))
    if kernels and whole is not None:
        console = Console(width=150)
        console.print(choices_of(whole))
        if device != "cpu":
            console.print(kernels_of(runs[list(models).index(f"{scheme} whole")], f"{scheme} whole at batch {batch}"))
    linears = [m for m in quantised.modules() if isinstance(m, tilewright.Linear)]
    by = dict.fromkeys(models, "torch")
    by |= {n: _names(who for m in linears for who in m.candidates(torch.bfloat16).values()) for n in by if n.startswith(scheme)}
    if whole is not None:
        gemms = [s.decision for s in whole.steps if s.part.kind == "gemm" and s.decision is not None]
        by[f"{scheme} whole"] = _names(d.kernel.candidate for d in gemms)
    eager_us = us["bf16 eager"]
    return [Row(batch, n, us[n], us.get(n.split()[-1]), eager_us / us[n], by[n]) for n in models]


def _names(found: Iterable[str]) -> str:
    return ", ".join(sorted(set(found)))


@click.command()
@click.option("--layers", default=8, type=POSITIVE, show_default=True)
@click.option("--width", default=4096, type=POSITIVE, show_default=True, help=f"A multiple of {HEAD}.")
@click.option("--batch", "batches", multiple=True, type=POSITIVE, default=(1, 16), show_default=True)
@click.option("--context", default=1024, type=POSITIVE, show_default=True, help="Tokens in the cache.")
@click.option("--scheme", default="w4g64", show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option(
    "--rounds", default=30, type=click.IntRange(min=0), show_default=True, help="0 compiles and checks, and times nothing."
)
@click.option("--compiled/--no-compiled", "fused", default=True, show_default=True)
@click.option(
    "--tuned/--no-tuned", default=True, show_default=True, help="torch.compile takes its time, and dependent launches."
)
@click.option(
    "--whole/--no-whole", default=True, show_default=True, help="The quantised model compiled as a whole, by Tilewright."
)
@click.option("--budget", "budget_s", default=30.0, show_default=True, help="Seconds for measuring its kernels.")
@click.option("--kernels/--no-kernels", default=False, show_default=True, help="What each kernel of the whole one takes.")
@click.option("--json", "file", type=click.Path(dir_okay=False), help="Write the figures there, too.")
@torch.no_grad()
def main(
    layers: int,
    width: int,
    batches: Sequence[int],
    context: int,
    scheme: str,
    device: str,
    rounds: int,
    fused: bool,
    tuned: bool,
    whole: bool,
    budget_s: float,
    kernels: bool,
    file: str | None,
) -> None:
    """Time one decoding step."""
    if width % HEAD:
        raise click.BadParameter(f"{width} is no multiple of {HEAD}", param_hint="--width")
    given = (context, scheme, device, rounds, fused, tuned, budget_s if whole else None, kernels)
    rows = [r for b in batches for r in measured(layers, width, b, *given)]
    table = Table("batch", "", "µs a step", "of that, rest", "x bf16 eager", "products by", title=f"{layers} layers of {width}")
    for r in rows:
        rest = "" if r.rest_us is None else f"{r.rest_us:.1f}"
        table.add_row(str(r.batch), r.contender, f"{r.us:.1f}", rest, f"{r.ratio:.2f}", r.by)
    if rows:
        Console(width=110 if not sys.stdout.isatty() else None).print(table)
    if file is not None:
        Path(file).write_text(json.dumps([asdict(r) for r in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
