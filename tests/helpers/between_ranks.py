"""Products with operations between ranks in one address space: problems by a line, launches and copies run in turns."""

import pytest
import torch
from fusions import by_row, norm
from ptx import Fault, emulating, together
from ptx.machine import How
from ptx.streams import Lane
from w4_problems import posed

from tilewright.candidates.triton.push_rows.virtual import VirtualRanks
from tilewright.candidates.triton.runtime import copies
from tilewright.dtype import F8E4M3FN, F32
from tilewright.ir.build import convert, map_
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node, substitute
from tilewright.ir.mesh import Mesh, in_team, simulate
from tilewright.ir.ops import AllGather, AllReduce, Param, ReduceScatter
from tilewright.ir.types import TensorType
from tilewright.schedule.expected import check, expect_on_mesh
from tilewright.schedule.problem import Problem
from tilewright.schedule.sample import random_sources


def between(line, ranks, op, then="", constant=True):
    """A line's product with rows gathered before it, or sums reduced behind it and, if said, a residual (`add`), and a norm
    that is quantised by row (`norm`). If it is `constant`, its right operand is."""
    local = posed(line, constant)
    types, (lhs, stores) = list(local.types), (local.op.lhs, list(local.op.stores))
    over = {"over": ("tp",), "sizes": (ranks,)}
    if op == "gather":
        rows = local.M
        for i, t in enumerate(types):
            if t.shape and t.shape[0] == rows and not local.weights[i]:
                types[i] = t.with_shape((rows // ranks, *t.shape[1:]))
                whole = Node(AllGather(**over, axis=0), Node(Param(i, types[i])))
                lhs, *stores = substitute((lhs, *stores), {Node(Param(i, t)): whole})
    else:
        (store,) = stores
        total = Node(ReduceScatter(**over, axis=0) if op == "scatter" else AllReduce(**over), store)
        stores = [total]
        if then:
            types += [total.tensor, TensorType(F32, total.shape[-1:])]
            stores = [map_("add", total, Node(Param(len(types) - 2, types[-2])))]
        if then == "norm":
            y = norm(convert(stores[0], F32), Node(Param(len(types) - 1, types[-1])), center=False)
            stores += by_row(y, F8E4M3FN)
    sources = [Node(Param(i, t)) for i, t in enumerate(types)]
    made = make_gemm(local.op.acc_dtype, lhs, local.op.rhs, stores, sources)
    weights = [*local.weights, False, True][: len(types)]
    order = [sources.index(s) for s in made.src]
    return Problem(made.op, tuple(types[i] for i in order), tuple(weights[i] for i in order))


def summed(line, ranks, *, scatter=False, then="norm", constant=True):
    """A line's product whose sums all ranks get, or each its rows, and what follows."""
    return between(line, ranks, "scatter" if scatter else "reduce", then, constant)


def posed_by(plan):
    """The problem of a plan."""
    return plan.summed.problem if hasattr(plan, "summed") else plan.problem


late = []  # of each run, the ranks that were waited for in vain


class Spoil:
    """An end of results between two replays of a graph."""

    def __init__(self, calls):
        self.calls = calls

    def rounds(self):
        for _, made in self.calls:
            for t in made:
                t.view(torch.uint8).fill_(255)
        yield


def results(plan, ranks, schedule, calls=1, seed=None, limit_s=5.0, turns=(1, 1, 3, 40), replays=1, **how):
    """Each rank's results of each call of a plan's kernel, with its sources, run together: in turns drawn by lot, of so many
    rounds. A seed draws the order of warps, too. With `replays` all calls are made so often, as a graph makes them."""
    problem = posed_by(plan)
    mesh = Mesh.parse(f"tp={ranks}")
    space = VirtualRanks(mesh, "cpu", limit_s)
    given = simulate(mesh, lambda r: random_sources(problem, seed=17 + r))
    streams, found, kept = [], [[] for _ in range(ranks)], []
    with emulating(How(seed=seed, **how)) as driver, pytest.MonkeyPatch.context() as m:
        empty = torch.empty

        def holding(*args, **kwargs):  # what a call allocates lives until its launches have run
            kept.append(empty(*args, **kwargs))
            return kept[-1]

        def lane(device):
            made = Lane(driver)
            streams.append(made.queue)
            return made

        m.setattr(torch, "empty", holding)
        m.setattr(copies, "lane", lane)
        for r in range(ranks):
            driver.queue = []
            with in_team(space.member(r)):
                run = plan.build(schedule).prepare({i: given[r][i] for i, w in enumerate(problem.weights) if w})
                for call in range(calls):
                    turned = zip(given[r], problem.weights, strict=True)  # other data for each call
                    sources = [t if w else t.roll(call, 0).roll(call, -1) for t, w in turned]
                    kept += [run, sources]
                    found[r].append((sources, list(run(sources))))
            streams.append([*driver.queue, *[Spoil(found[r]), *driver.queue] * (replays - 1)])
        m.setattr(torch, "empty", empty)
        together(streams, seed or 0, turns)
    late.append(space.late())
    return found


def right(plan, ranks, schedule, calls=1, seed=None, **how):
    """All results are right."""
    problem = posed_by(plan)
    found, mesh = results(plan, ranks, schedule, calls, seed, **how), Mesh.parse(f"tp={ranks}")
    assert late[-1] == [0] * ranks
    whys = []
    for call in range(calls):
        for r in range(ranks):
            _, expected = expect_on_mesh(problem, lambda rank, call=call: found[rank][call][0], mesh, r)
            why = check(problem, expected, found[r][call][1])
            whys += [f"call {call}, rank {r}: {why}"] if why else []
    assert not whys, whys[0]
    return found


def found_wrong(plan, ranks, schedule, calls, most=8, most_steps=40_000, **how):
    """Tell whether some order shows that results are wrong, or that a kernel or a stream waits for ever."""
    for seed in range(most):
        try:
            right(plan, ranks, schedule, calls, seed, most_steps=most_steps, **how)
        except (AssertionError, Fault):
            return True
    return False
