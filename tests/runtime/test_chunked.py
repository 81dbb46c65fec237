"""Products in pieces beside the team's own operations between ranks: processes over gloo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from ranks import job

from tilewright.candidates import chunked, sequential
from tilewright.dtype import BF16, F32
from tilewright.hardware.detect import cpu
from tilewright.ir.build import convert, input_, map_, swap_last
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Acc, AllGather, AllReduce, Gemm, LayerNorm, Param, ReduceScatter, gemm
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Kernel, Schedule
from tilewright.schedule.problem import Problem

ROWS = 24


def problems(ranks: int) -> dict[str, Problem]:
    """A product whose rows are gathered, and some behind which sums are reduced, a residual and a norm behind them."""
    over: Any = {"over": ("tp",), "sizes": (ranks,)}
    x, w = Node(Param(0, TensorType(BF16, (ROWS, 32)))), Node(Param(1, TensorType(BF16, (16, 32))))
    own = Node(Param(0, TensorType(BF16, (ROWS // ranks, 32))))
    plain = convert(Node(Acc(TensorType(F32, (ROWS, 16)))), BF16)
    gathered = Gemm(F32, Node(AllGather(**over, axis=0), own), swap_last(w), (plain,))
    found = {"gather": Problem(gathered, (own.tensor, w.tensor), (False, True))}
    for name, total in (("scatter", Node(ReduceScatter(**over, axis=0), plain)), ("reduce", Node(AllReduce(**over), plain))):
        types = [x.tensor, w.tensor, total.tensor, TensorType(F32, (16,))]
        y = map_("add", total, Node(Param(2, types[2])))
        normed = convert(Node(LayerNorm(1, 1e-5, False), convert(y, F32), Node(Param(3, types[3]))), BF16)
        for then, stores in (("alone", (total,)), ("norm", (y, normed, total))):
            count = 2 if then == "alone" else 4
            weights = (False, True, False, True)
            found[f"{name} {then}"] = Problem(Gemm(F32, x, swap_last(w), stores), tuple(types[:count]), weights[:count])
    return found


def compared(rank: int, ranks: int) -> object:
    """Collect how far results are from those of operations one after the other, of two calls, and the points there were."""
    from tilewright.runtime.team import team_of

    team = team_of(f"tp={ranks}", "cpu")
    found: dict[str, float] = {}
    with team.working():
        for name, problem in problems(ranks).items():
            sources: list[torch.Tensor] = []
            for i, t in enumerate(problem.types):
                drawn = torch.Generator().manual_seed(i + (i < 2) * 9 * rank)
                sources.append(torch.randn(t.shape, generator=drawn).to(t.dtype.to_torch()))
            weights = {i: s for i, s in enumerate(sources) if problem.weights[i]}
            plain, cut = sequential.plan(problem, cpu()), chunked.plan(problem, cpu())
            by_reference = [("reference", Schedule())]
            whole = plain.of_pieces(Schedule.of(reduce="library"), by_reference * len(plain.pieces()))
            run = plain.build(whole).prepare(weights)
            for point in cut.schedules():
                kernel = cut.build(cut.of_pieces(point, by_reference * len(cut.pieces())))
                assert cut.offers(kernel.schedule)
                own = kernel.prepare(weights)
                off = 0.0
                for turn in (1, -1):
                    given = [s if problem.weights[i] else turn * s for i, s in enumerate(sources)]
                    pairs = zip(own(given), run(given), strict=True)
                    off = max(off, *(float((a.float() - b.float()).abs().max()) for a, b in pairs))
                found[f"{name}: {point}"] = off
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_by_the_team_s_own_operations_give_what_the_plain_way_does(ranks):
    for found in cast("list[dict[str, float]]", job(compared, ranks, ranks).answers()):
        assert len(found) == 7 and max(found.values()) <= 0.26, found  # sums of bf16 up to 32, rounded in another order
        assert found["gather: via=library chunks=2"] == 0


def built_on_one(rank: int) -> object:
    """Compile where a kernel that meets others in `prepare` is built on the first rank alone."""
    import tilewright
    from tilewright.ir.mesh import team
    from tilewright.runtime.team import ProcessTeam

    build = sequential.Plan.build

    def half(self: sequential.Plan, schedule: Schedule) -> Kernel:
        kernel = build(self, schedule)
        if schedule["reduce"] != "library":
            return kernel
        if rank == 1:
            raise ValueError("no room here")

        def prepare(weights: Any) -> Any:
            cast("ProcessTeam", team()).peers.gathered(0, int, "memory")
            return kernel.prepare(weights)

        return replace(kernel, prepare=prepare)

    sequential.Plan.build = half  # type: ignore[method-assign]
    x, w = input_("x", F32, (8, 16)), input_("w", F32, (16, 24))
    local = Graph("row_parallel", (x, w), (Node(AllReduce(("tp",), (2,)), gemm(x, w)),), ("y",))
    program = tilewright.compile(local, mesh="tp=2", budget_s=0)
    (step,) = (s for s in program.steps if s.decision is not None)
    return [str(step.decision.kernel.schedule), [r.why for r in step.decision.rejected]]


def test_a_kernel_that_one_rank_has_not_is_refused_on_all():
    for schedule, rejected in cast("list[Any]", job(built_on_one, 2).answers()):
        assert (
            schedule.startswith("reduce=ranks") and "rank 1: failed to build" in rejected[0] and "no room here" in rejected[0]
        )
