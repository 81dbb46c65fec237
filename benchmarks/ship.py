"""Make the decisions that come with the package for the chip at hand (`schedule/shipped.py`).

    python benchmarks/ship.py [--device cuda] [--seconds 280] [--each 1.0] [--family llama3-8b]… [--scheme w4g64]…
                              [--dtype bf16]… [--rows 1 --rows 2 …] [--most-ops 2e12] [--model bert.onnx]… [-o FILE]

The linear layers of Llama 3 and 3.2, Qwen 2.5 and 3, Mixtral, BERT and GPT-2, with weights of few bits as `tilewright.Linear`
has them (`--scheme w4g64`) or as floats (`--scheme float`), by 1 to 8,192 rows, and the problems of model files. What the file
has already for this version of the code is left out, so that the program can be run again until nothing is left: it stops after
`--seconds`. Numbers of rows come in the order in which they are given, few before many if none are. What is measured while
other programs are busy is left out. Weights come from memory, as they do in a model, which no cache holds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch
from torch.nn.utils import skip_init

import tilewright
from tilewright.compiler import optimise
from tilewright.dtype import dtype as named
from tilewright.frontends import LoadOptions
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.ops import Const
from tilewright.ir.pattern import Trace
from tilewright.linear.kernels import constants_of, graph_at
from tilewright.runtime.partition import decided, parts_for
from tilewright.schedule.ahead import Ahead
from tilewright.schedule.measure import last_cache_bytes
from tilewright.schedule.problem import AnyProblem, Problem
from tilewright.schedule.search import Decision, search
from tilewright.schedule.shipped import DIGITS, FOLDER, Place, Shipped, add, measured
from tilewright.schedule.tuning_database import TuningDatabase

# [in, out] of each layer, and whether it has a bias.
FAMILIES: dict[str, list[tuple[int, int, bool]]] = {
    # Apart and joined; Mixtral 8x7B has the layers of Llama 3 8B, a matrix for each expert.
    "llama3-8b": [*[(4096, n, False) for n in (4096, 1024, 14336, 6144, 28672)], (14336, 4096, False)],
    "mixtral": [*[(4096, n, False) for n in (4096, 1024, 14336)], (14336, 4096, False)],
    "qwen3-8b": [*[(4096, n, False) for n in (4096, 1024, 12288)], (12288, 4096, False)],
    "qwen2.5-7b": [(3584, 3584, True), (3584, 512, True), (3584, 3584, False), (3584, 18944, False), (18944, 3584, False)],
    "llama3.2-1b": [*[(2048, n, False) for n in (2048, 512, 8192, 3072, 16384)], (8192, 2048, False)],
    "llama3.2-3b": [*[(3072, n, False) for n in (3072, 1024, 8192)], (8192, 3072, False)],
    "qwen2.5-0.5b": [(896, 896, True), (896, 128, True), (896, 4864, False), (4864, 896, False)],
    "qwen2.5-1.5b": [(1536, 1536, True), (1536, 256, True), (1536, 8960, False), (8960, 1536, False)],
    "bert-base": [(768, 768, True), (768, 3072, True), (3072, 768, True), (768, 2304, True)],
    "bert-large": [(1024, 1024, True), (1024, 4096, True), (4096, 1024, True)],
    "gpt2": [(768, 2304, True), (768, 768, True), (768, 3072, True), (3072, 768, True)],
    "llama3-70b": [*[(8192, n, False) for n in (8192, 1024, 28672, 10240, 57344)], (28672, 8192, False)],
}
ROWS = tuple(1 << i for i in range(14))
TOGETHER = 16  # problems that are compiled for at once


@click.command()
@click.option("--device", default="cpu")
@click.option("--seconds", default=280.0)
@click.option("--each", default=1.0, help="Seconds for measuring a problem.")
@click.option("--family", "families", multiple=True, type=click.Choice(list(FAMILIES)))
@click.option("--scheme", "schemes", multiple=True, default=("w4g64",))
@click.option("--dtype", "dtypes", multiple=True, default=("bf16",), help="Of activations and of float weights.")
@click.option("--rows", multiple=True, type=click.IntRange(1, 8192))
@click.option("--most-ops", default=2e12, help="Multiplications and additions of a problem, at most.")
@click.option("--model", "models", multiple=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path))
def main(
    device: str,
    seconds: float,
    each: float,
    families: Sequence[str],
    schemes: Sequence[str],
    dtypes: Sequence[str],
    rows: Sequence[int],
    most_ops: float,
    models: Sequence[Path],
    output: Path | None,
) -> None:
    """Measure until the time is over, and add what was found to the file."""
    until, target = time.monotonic() + seconds, detect(device)
    file = output or FOLDER / f"{target.chip.name}.json"
    file.parent.mkdir(exist_ok=True)
    database = TuningDatabase(target, None)
    seen, done = set[AnyProblem](), 0
    left = (
        p
        for p in problems(target, families or list(FAMILIES), schemes, dtypes, rows or ROWS, most_ops)
        if p not in seen and not seen.add(p) and place(p, database, each) not in measured(file, database.key_of(p, each))
    )
    some, ahead = following(left, target, until)
    while some and time.monotonic() < until:
        coming = following(left, target, until)  # compiled while these are measured
        found: list[Shipped] = []
        for problem in some:
            if time.monotonic() > until:
                break
            if ahead is not None:
                ahead.wait(problem, max(0.0, until - time.monotonic()))
            decision = search(problem, target, budget_s=each, cold=True, within_s=max(5.0, 5 * each))
            new = entries(decision, database, each, cold=True)
            click.echo(f"{problem}: {decision.kernel.candidate}, {decision.provisional or decision.time_us}")
            found, done = found + new, done + len(new)
        if found:
            add(file, database.key_of(some[0], each), found)
        some, ahead = coming
    for model in models:
        if time.monotonic() > until:
            break
        budget_s = until - time.monotonic()
        program = tilewright.compile(model, device=device, budget_s=budget_s, cache=database)
        decisions = {s.decision.problem: s.decision for s in program.steps if s.decision is not None}
        weights = {n for n in program.graph.nodes() if isinstance(n.op, Const)}
        cold = sum(n.tensor.size_bytes for n in weights) > last_cache_bytes(target)
        found = [e for d in decisions.values() for e in entries(d, database, budget_s / max(len(decisions), 1), cold=cold)]
        if decisions:
            add(file, database.key_of(next(iter(decisions)), budget_s), found)
        click.echo(f"{model.name}: {len(decisions)} problems")
    click.echo(f"{done} measured; {file}: {file.stat().st_size if file.exists() else 0:,} bytes")


def following(left: Iterator[AnyProblem], target: Target, until: float) -> tuple[list[AnyProblem], Ahead | None]:
    """The next problems, and on a GPU what makes their machine code meanwhile."""
    some = list(itertools.islice(left, 1 if target.kind == "cpu" else TOGETHER))
    ahead = Ahead(some, target, within_s=max(1.0, until - time.monotonic())) if some and target.kind != "cpu" else None
    return some, ahead


def place(problem: AnyProblem, database: TuningDatabase, each: float) -> Place:
    """The key by which the decision on a layer's problem is found."""
    key = database.key_of(problem, each)
    return key.problem[:DIGITS], True, key.budget


def entries(decision: Decision, database: TuningDatabase, each: float, *, cold: bool) -> list[Shipped]:
    """A decision as it is shipped; nothing if it was not measured, or while others kept the machine busy."""
    if decision.time_us is None or decision.provisional:
        return []
    key, kernel = database.key_of(decision.problem, each), decision.kernel
    us = round(decision.time_us, 2)
    knobs, text = kernel.schedule.knobs, kernel.text[:DIGITS]
    return [Shipped(key.problem[:DIGITS], cold, key.budget, kernel.candidate, knobs, us, text)]


def problems(
    target: Target,
    families: Sequence[str],
    schemes: Sequence[str],
    dtypes: Sequence[str],
    rows: Sequence[int],
    most_ops: float,
) -> Iterator[AnyProblem]:
    """The problems of the layers, those first that are asked for most."""
    for count, family, scheme, dtype in itertools.product(rows, families, schemes, dtypes):
        for inner, out, biased in dict.fromkeys(FAMILIES[family]):
            if 2.0 * count * inner * out <= most_ops:
                yield from _posed(target, scheme, dtype, count, inner, out, biased=biased)


def _posed(target: Target, scheme: str, dtype: str, rows: int, inner: int, out: int, *, biased: bool) -> Iterator[AnyProblem]:
    kind = named(dtype).to_torch()
    if scheme == "float":
        module = skip_init(torch.nn.Linear, inner, out, bias=biased, dtype=kind).eval()
        graph = tilewright.load(module, LoadOptions(example_inputs=(torch.empty(rows, inner, dtype=kind),)))
    else:
        model = torch.nn.Sequential(torch.nn.Linear(256, 8, bias=biased, dtype=kind))
        tilewright.quantize_(model, scheme)
        (layer,) = model
        assert isinstance(layer, tilewright.Linear)
        form = replace(layer.kernels(None).signature, shape=(out, inner), device=target.device)
        form = form if "g" in scheme else replace(form, group_size=inner)
        graph = graph_at(form, constants_of(form, lambda name: torch.empty(0)))(rows)
    for part in parts_for(optimise(graph, Trace()), target):
        if decided(part) and isinstance(problem := part.posed[0], Problem):
            yield problem


if __name__ == "__main__":
    main()
