"""The plain way between ranks: what of it may be overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from tilewright.candidates import sequential
from tilewright.dtype import F32
from tilewright.hardware.detect import detect
from tilewright.ir.build import reshape, swap_last
from tilewright.ir.graph import Node
from tilewright.ir.mesh import in_team
from tilewright.ir.ops import Acc, AllReduce, Gemm, Param
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Schedule, discover
from tilewright.schedule.problem import Problem
from tilewright.schedule.search import search

ACC = Node(Acc(TensorType(F32, (8, 6))))
SUM = Node(AllReduce(("tp",), (2,)), ACC)


class Doubling:
    """A team of two ranks that have the same values; sums are made where they may be."""

    def __init__(self) -> None:
        self.overwritten: list[bool] = []

    def run(self, node: Node, value: torch.Tensor, *, overwritten: bool = False) -> torch.Tensor:
        self.overwritten.append(overwritten)
        return value.mul_(2) if overwritten else value * 2


@pytest.mark.parametrize(
    ("stores", "overwritten"),
    [
        ([SUM], True),
        ([SUM, ACC], False),  # the sums of this rank are a result, too
        ([SUM, reshape(ACC, (4, 12))], False),  # of which torch gives a view
    ],
)
def test_sums_are_made_where_the_product_left_its_only_result(stores: Sequence[Node], overwritten: bool) -> None:
    lhs, rhs, target = TensorType(F32, (8, 16)), TensorType(F32, (6, 16)), detect("cpu")
    op = Gemm(F32, Node(Param(0, lhs)), swap_last(Node(Param(1, rhs))), tuple(stores))
    plan = sequential.plan(Problem(op, (lhs, rhs), (False, True)), target)
    torchs = [c for c in discover(kind="cpu") if c.name == "aten"]
    aten = search(plan.pieces()[0], target, budget_s=0, candidates=torchs).kernel
    schedule = plan.of_pieces(Schedule.of(reduce="library"), [(aten.candidate, aten.schedule)])
    x, w = torch.randn(8, 16), torch.randn(6, 16)
    team = Doubling()
    with in_team(cast("Any", team)):
        total, *others = plan.build(schedule).prepare({1: w})([x, w])
    assert team.overwritten == [overwritten]
    torch.testing.assert_close(total, 2 * x @ w.T)
    for other in others:
        torch.testing.assert_close(other.reshape(8, 6), x @ w.T)
