"""Operands and side inputs that are computed: by the product that reads them, against a step of their own before it.

    OMP_NUM_THREADS=1 python benchmarks/computed.py [--device cpu] [--turns 15] [--type bf16]

Both forms are searched for, verified, and timed in turns in one process; a line gives the least of each, in microseconds, since
what else runs only adds to them, and their ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from tilewright.candidates import split
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F32, PRED, S8, DType
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import Gemm, Input, Reduce, Select, gemm
from tilewright.schedule.candidate import Kernel, Refusal, Runner, discover
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import search

SHAPES = {
    "cpu": ((1, 2048, 2048), (16, 1024, 2048), (128, 1024, 1024), (512, 512, 512)),
    "cuda": ((16, 4096, 4096), (1024, 4096, 1024), (4096, 4096, 4096)),
}


def prologues(d: DType, m: int, k: int) -> dict[str, Node]:
    x = input_("x", d, (m, k))
    if d is S8:
        return {"mask": Node(Select(), input_("p", PRED, (m, k)), x, const(0, d)), "relu": map_("maximum", x, const(0, d))}
    found = {"silu * up": map_("multiply", map_("silu", x), input_("y", d, (m, k))), "relu": map_("relu", x)}
    return found | ({"f32 to bf16": convert(input_("wide", F32, (m, k)), BF16)} if d is BF16 else {})


def cases(d: DType, m: int, k: int, n: int) -> dict[str, tuple[Node, ...]]:
    b, out = (
        const(torch.randn(k, n).to(d.to_torch()) if d.is_float else torch.randint(-128, 128, (k, n), dtype=torch.int8), d),
        None,
    )
    found = {name: (gemm(a, b, out_dtype=d if d is BF16 else out),) for name, a in prologues(d, m, k).items()}
    if d.is_float:
        product = gemm(input_("x", d, (m, k)), b)
        scaled = map_("add", product, convert(map_("multiply", input_("c", d, (m, n)), const(0.5, d)), F32))
        found["AB + beta C"] = (convert(scaled, d),)
        found["amax"] = (convert(product, d), Node(Reduce("maximum", (0, 1)), map_("abs", product)))
    return found


def posed(outputs: Sequence[Node]) -> Problem:
    inputs = tuple(n for n in toposort(outputs) if isinstance(n.op, Input))
    graph = optimise(Graph("g", inputs, tuple(outputs), tuple(f"out{i}" for i in range(len(outputs)))))
    (node,) = (n for n in graph.nodes() if isinstance(n.op, Gemm))
    return problem_of(node)


def first_way(problem: Problem, target: Target) -> split.Plan | Refusal:
    """Steps of their own alone, of one kind."""
    plan = split.plan(problem, target)
    return plan if isinstance(plan, Refusal) else replace(plan, ways=plan.ways[:1])


APART = replace(split.CANDIDATE, plan=first_way)


def timed(run: Runner, sources: Sequence[torch.Tensor], cuda: bool) -> float:
    """Microseconds of a call: on one thread those that it ran, so that others on the machine matter less."""
    clock = time.perf_counter if cuda or torch.get_num_threads() > 1 else time.process_time
    count = 1
    while True:
        begin = clock()
        for _ in range(count):
            run(sources)
        if cuda:
            torch.cuda.synchronize()
        spent = clock() - begin
        if spent > 5e-3:
            return spent / count * 1e6
        count *= 2


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cpu")
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--type", choices=["f32", "bf16", "s8"], help="of the operands; all if not given")
    given = options.parse_args()
    target = detect(given.device)
    generated = [c for c in discover() if c.name in ("llvm", "triton", "hopper")]
    print(f"{'problem':12} {'type':5} {'M x K x N':>16} {'in it':>9} {'apart':>9} {'apart / in it':>13}   pieces")
    for d in (d for d in (F32, BF16, S8) if given.type in (None, d.name)):
        for m, k, n in SHAPES[target.kind]:
            for name, outputs in cases(d, m, k, n).items():
                problem = posed(outputs)
                with torch.device(target.device):
                    sources = random_sources(problem)
                weights = {i: sources[i] for i, w in enumerate(problem.weights) if w}
                kernels: list[Kernel] = [
                    search(problem, target, budget_s=0.5, candidates=c, weights=weights).kernel for c in (generated, [APART])
                ]
                runs = [kernel.prepare(weights) for kernel in kernels]
                turns: list[list[float]] = [[], []]
                for _ in range(given.turns):
                    for kept, run in zip(turns, runs, strict=True):
                        kept.append(timed(run, sources, target.kind == "cuda"))
                fused, apart = map(min, turns)
                by = kernels[1].schedule["by"]
                print(
                    f"{name:12} {d.name:5} {f'{m} x {k} x {n}':>16} {fused:9.1f} {apart:9.1f} {apart / fused:13.2f}   {by}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
