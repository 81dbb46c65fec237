"""Kernels of several ranks that store into each other's memory, run together by the PTX machine: ranks in one address space,
launches in turns drawn by lot."""

import torch
from fusions import by_row, norm
from ptx import H200, emulating, together
from ptx.machine import How
from w4_problems import posed

from tilewright.candidates.triton.push_rows.virtual import VirtualRanks
from tilewright.dtype import F8E4M3FN, F32
from tilewright.ir.build import convert, map_
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node
from tilewright.ir.mesh import Mesh, in_team, simulate
from tilewright.ir.ops import AllReduce, Param, ReduceScatter
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import plan_for
from tilewright.schedule.expected import check, expect_on_mesh
from tilewright.schedule.problem import Problem
from tilewright.schedule.sample import random_sources


def summed(line, ranks, *, scatter=False, then="norm", constant=True):
    """A line's product in bf16, its sums over ranks, a residual, and a norm that is quantised by row."""
    local = posed(line, constant)
    (store,) = local.op.stores
    op = ReduceScatter(("tp",), (ranks,), axis=0) if scatter else AllReduce(("tp",), (ranks,))
    total = Node(op, store)
    count, types = len(local.types), list(local.types)
    if then:
        types += [total.tensor, TensorType(F32, (1,) if then == "add" else total.shape[-1:])]
    stores = [total]
    if then:
        stores = [map_("add", total, Node(Param(count, types[count])))]
    if then == "norm":
        y = norm(convert(stores[0], F32), Node(Param(count + 1, types[count + 1])), center=False)
        stores += by_row(y, F8E4M3FN)
    sources = [Node(Param(i, t)) for i, t in enumerate(types)]
    made = make_gemm(local.op.acc_dtype, local.op.lhs, local.op.rhs, stores, sources)
    weights = [*local.weights, *(False, True)][: len(types)]
    order = [sources.index(s) for s in made.src]
    return Problem(made.op, tuple(types[i] for i in order), tuple(weights[i] for i in order))


late = []  # of each run, the ranks that were waited for in vain


def results(candidate, problem, ranks, schedule, calls=1, seed=None, limit_s=5.0, target=H200, turns=(1, 1, 3, 40), **how):
    """Each rank's results of each call, with its sources, run together: in turns drawn by lot, if there is a seed."""
    mesh = Mesh.parse(f"tp={ranks}")
    space = VirtualRanks(mesh, "cpu", limit_s)
    given = simulate(mesh, lambda r: random_sources(problem, seed=17 + r))
    streams, found, kept = [], [[] for _ in range(ranks)], []
    with emulating(How(seed=seed, **how)) as driver:
        empty = torch.empty

        def holding(*args, **kwargs):  # what a call allocates lives until its launches have run
            kept.append(empty(*args, **kwargs))
            return kept[-1]

        torch.empty = holding
        try:
            for r in range(ranks):
                driver.queue = []
                with in_team(space.member(r)):
                    kernel = plan_for(candidate, problem, target).build(schedule)
                    run = kernel.prepare({i: given[r][i] for i, w in enumerate(problem.weights) if w})
                    for call in range(calls):
                        sources = turned(problem, given[r], call)
                        kept += [run, sources]
                        found[r].append((sources, list(run(sources))))
                streams.append(driver.queue)
        finally:
            torch.empty = empty
        together(streams, seed or 0, turns)
    late.append(space.late())
    return found


def turned(problem, sources, call):
    """Other data for each call: what is no weight, moved along."""
    return [t if w else t.roll(call, 0).roll(call, -1) for t, w in zip(sources, problem.weights, strict=True)]


def right(candidate, problem, ranks, schedule, calls=1, seed=None, **how):
    """All results are right, and those that all ranks hold the same bits."""
    found, mesh = results(candidate, problem, ranks, schedule, calls, seed, **how), Mesh.parse(f"tp={ranks}")
    assert late[-1] == [0] * ranks
    whys = []
    for call in range(calls):
        for r in range(ranks):
            _, expected = expect_on_mesh(problem, lambda rank, call=call: found[rank][call][0], mesh, r)
            why = check(problem, expected, found[r][call][1])
            whys += [f"call {call}, rank {r}: {why}"] if why else []
    assert not whys, whys[0]
    return found
