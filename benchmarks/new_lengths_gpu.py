"""First calls of new lengths on a GPU: BERT from ONNX with open batch and length, and a Llama by torch.compile.

    python benchmarks/new_lengths_gpu.py [--device cuda] [--shapes 40] [--tokens 8192] [--layers 4] [--budget 20]
                                         [--width 1024] [--warm 6] [--each] [--model bert.onnx] [--json FILE]

Both programs leave batch and length open. They are called at random shapes, drawn by their logarithms; the first `--warm` stand
for those that a server has seen, and are left out of the table, but for the kernels that they build. The first call of a shape
is the longest of its first three, since torch runs torch.compile's graphs itself when a shape is met, and they are captured
later. Printed are its seconds (median, longest, and how many took a tenth of a second more than a later call), the milliseconds
of a later call at the same shapes, how many kernels were compiled by then, how many while the others were called, and how often
the program was read. `--each` builds kernels for each shape, as programs on GPUs did before extents could be their arguments.
The largest error is beside onnxruntime and eager torch, over the largest result.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from any_length import BATCH, LENGTH, exported
from torch_compile import model_of, synchronize

WAIT_S = 0.1
FIRST, LATER = 3, 5  # calls of a shape


def shapes_of(count: int, tokens: int, seed: int) -> list[tuple[int, int]]:
    """Different random shapes of so many tokens at most."""
    rng, found = random.Random(seed), dict[tuple[int, int], None]()
    while len(found) < count:
        batch, length = (round(low * (high / low) ** rng.random()) for low, high in (BATCH, LENGTH))
        if batch * length <= tokens:
            found[batch, length] = None
    return list(found)


def counted_builds() -> list[float]:
    """The seconds of each kernel that is compiled from now on."""
    from tilewright.candidates.triton.runtime import module

    real, taken = module.compiled, list[float]()

    def compiled(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        made = real(*args, **options)
        taken.append(time.perf_counter() - began)
        return made

    module.compiled = compiled
    return taken


def for_each_shape() -> None:
    """Have kernels built for each shape."""
    from tilewright.ranged import RangedCodes

    RangedCodes.decision = lambda *_: None  # pyright: ignore


def called(
    call: Callable[[tuple[int, int]], torch.Tensor],
    right: Callable[[tuple[int, int]], torch.Tensor],
    shapes: Sequence[tuple[int, int]],
    warm: int,
    builds: list[float],
    read: Callable[[], int],
    device: str,
) -> dict[str, float]:
    """Measure first and later calls at shapes, the first so many left out."""
    firsts, later, error = list[float](), list[float](), 0.0
    before, at_warm = len(builds), 0
    for i, shape in enumerate(shapes):
        if i == warm:
            at_warm = len(builds)
        times = list[float]()
        found = torch.empty(0)
        for _ in range(FIRST + LATER):
            synchronize(device)
            began = time.perf_counter()
            found = call(shape)
            synchronize(device)
            times.append(time.perf_counter() - began)
        wanted = right(shape).float()
        error = max(error, float((found.float() - wanted).abs().max() / wanted.abs().max()))
        if i >= warm:
            firsts.append(max(times[:FIRST]))
            later.append(statistics.median(times[FIRST:]))
    waits = sum(first - time_s > WAIT_S for first, time_s in zip(firsts, later, strict=True))
    return {
        "first_median_s": statistics.median(firsts),
        "first_longest_s": max(firsts),
        "waits": waits,
        "later_ms": statistics.median(later) * 1e3,
        "built_warm": at_warm - before,
        "built": len(builds) - at_warm,
        "read": read(),
        "error": error,
    }


def bert(path: Path, layers: int, device: str, budget: float) -> tuple[Callable[..., torch.Tensor], Callable[..., Any], Any]:
    """A BERT from ONNX in 16 bits: calls of it, right results, and how often it was read."""
    import onnxruntime

    import tilewright

    if not path.exists():
        exported(path, layers)
    program = tilewright.compile(
        path, dims={"batch": BATCH, "length": LENGTH}, budget_s=budget, half="f16", device=device, cache=False
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def given(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
        ids = torch.randint(0, 28996, shape, generator=draw)
        ends = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=draw)
        return {"input_ids": ids, "attention_mask": (torch.arange(shape[1]) < ends).to(torch.int64)}

    def call(shape: tuple[int, int]) -> torch.Tensor:
        found = program(**{name: t.to(device) for name, t in given(shape).items()})
        assert isinstance(found, torch.Tensor)
        return found

    def right(shape: tuple[int, int]) -> torch.Tensor:
        (found,) = session.run(None, {name: t.numpy() for name, t in given(shape).items()})
        return torch.from_numpy(found).to(device)

    return call, right, lambda: program.compiled


def llama(layers: int, width: int, device: str, budget: float) -> tuple[Callable[..., torch.Tensor], Callable[..., Any], Any]:
    """A Llama in bf16 through torch.compile(dynamic=True), read without a cache."""
    import tilewright.dynamo

    tilewright.dynamo.register()  # where the package is not installed

    model = model_of(layers, width, 32000, 2 * LENGTH[1], torch.bfloat16, device)
    options = {"budget_s": budget, "background": False}
    compiled: Any = torch.compile(model, backend="tilewright", dynamic=True, options=options)

    def by(of: Any) -> Callable[[tuple[int, int]], torch.Tensor]:
        def call(shape: tuple[int, int]) -> torch.Tensor:
            draw = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
            ids = torch.randint(3, 32000, shape, generator=draw).to(device)
            with torch.no_grad():
                return of(ids, use_cache=False).logits

        return call

    return by(compiled), by(model), lambda: torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--shapes", default=40, show_default=True)
@click.option("--tokens", default=8192, show_default=True, help="Most of them in a call.")
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=1024, show_default=True, help="Of the Llama.")
@click.option("--budget", default=20.0, show_default=True, help="Seconds of each compile.")
@click.option("--warm", default=6, show_default=True, help="Shapes that are left out of the table.")
@click.option("--each", is_flag=True, help="Build kernels for each shape.")
@click.option("--only", type=click.Choice(["bert", "llama"]), help="One of the programs alone.")
@click.option("--model", type=click.Path(path_type=Path), help="Where the exported BERT is kept; made if it is not there.")
@click.option("--json", "as_json", type=click.Path(path_type=Path), help="Write the numbers to a file, too.")
def main(
    device: str,
    shapes: int,
    tokens: int,
    layers: int,
    width: int,
    budget: float,
    warm: int,
    each: bool,
    only: str | None,
    model: Path | None,
    as_json: Path | None,
) -> None:
    """Print what first calls of new lengths cost on a GPU."""
    if each:
        for_each_shape()
    builds, drawn, rows = counted_builds(), shapes_of(shapes, tokens, 0), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bert.onnx") if model is None else model
        if only != "llama":
            call, right, read = bert(path, layers, device, budget)
            rows["BERT from ONNX, f16"] = called(call, right, drawn, warm, builds, read, device)
        if only != "bert":
            call, right, read = llama(layers, width, device, budget)
            rows["Llama, bf16, torch.compile"] = called(call, right, drawn, warm, builds, read, device)
    table = Table(title=f"{shapes - warm} new shapes of at most {tokens} tokens" + (", kernels for each" if each else ""))
    for name in ("program", "first: median s", "longest s", "waits", "later ms", "built before", "built", "read", "error"):
        table.add_column(name, justify="left" if name == "program" else "right")
    for name, r in rows.items():
        times = [f"{r['first_median_s']:.3f}", f"{r['first_longest_s']:.2f}", f"{r['waits']:.0f}", f"{r['later_ms']:.2f}"]
        table.add_row(name, *times, f"{r['built_warm']:.0f}", f"{r['built']:.0f}", f"{r['read']:.0f}", f"{r['error']:.1e}")
    Console(width=140).print(table)
    if as_json is not None:
        as_json.write_text(json.dumps(rows, indent=1), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
