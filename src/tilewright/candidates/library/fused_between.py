"""torch's products fused with a gather or a scatter between the GPUs of one host, over memory that they reach of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from tilewright.candidates.library._around import side
from tilewright.dtype import BF16, F16, F32
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.mesh import team
from tilewright.ir.ops import Acc, AllGather, Collective, Convert, Param, ReduceScatter
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Inapplicable, Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.problem import AnyProblem, Problem, collectives_of

PROBE_BYTES = 1 << 12  # of memory by which is seen whether GPUs reach each other's; torch has its own for the values


@dataclass(frozen=True)
class Plan:
    """A product with one operation between ranks, before or behind it.

    Attributes:
        problem: what is done.
        between: the operation, with what it is of.
        lhs: the left operand that this rank has.
    """

    problem: Problem
    between: Node
    lhs: Node

    def schedules(self) -> tuple[Schedule, ...]:
        return (Schedule(),)

    def pieces(self) -> list[AnyProblem]:
        """None: the library multiplies."""
        return []

    def pieces_with(self, weights: Mapping[int, torch.Tensor]) -> list[tuple[AnyProblem, dict[int, torch.Tensor]]]:
        return []

    def of_pieces(self, schedule: Schedule, chosen: Sequence[tuple[str, Schedule]]) -> Schedule:
        return schedule

    def overlapped(self, schedule: Schedule) -> int:
        """The number of parts of which one is multiplied while another one travels: each rank's."""
        return cast("Collective", self.between.op).ranks

    def offers(self, schedule: Schedule) -> bool:
        return not schedule.knobs

    def build(self, schedule: Schedule) -> Kernel:
        return Kernel(CANDIDATE.name, schedule, self._prepare)

    def _prepare(self, weights: Mapping[int, torch.Tensor]) -> Runner:
        op = cast("Collective", self.between.op)
        group = team().symmetric(op.over, PROBE_BYTES).group
        lhs, rhs = side(self.lhs, weights), side(self.problem.op.rhs, weights)
        ops: Any = torch.ops.symm_mem

        def gathered(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            _, results = ops.fused_all_gather_matmul(lhs(sources), [rhs(sources)], 0, group, return_A=False)
            return list(results)

        def scattered(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [ops.fused_matmul_reduce_scatter(lhs(sources), rhs(sources), "sum", 0, group)]

        return gathered if isinstance(op, AllGather) else scattered


def plan(problem: Problem, target: Target) -> Plan:
    """The plan of a plain product in 16 bits whose rows are gathered before it or scattered behind it.

    Raises:
        Inapplicable: it is another product.
        Unsupported: the reason why there is none.
    """
    op, between = problem.op, collectives_of(problem)
    if op.lhs.dtype not in (BF16, F16) or op.rhs.dtype is not op.lhs.dtype or op.acc_dtype is not F32:
        raise Inapplicable("no product in bf16 or f16")
    if len(between) != 1 or len(op.stores) != 1 or len(op.acc_type.shape) != 2 or any(0 in t.shape for t in problem.types):
        raise Unsupported("one operation between ranks, one result, two axes")
    (met,), (store,) = between, op.stores
    plain = store
    if isinstance(met.op, ReduceScatter) and store is met and (met.op.fn, met.op.axis) == ("add", 0):
        plain, lhs = met.src[0], op.lhs
    elif isinstance(met.op, AllGather) and op.lhs is met and met.op.axis == 0 and isinstance(met.src[0].op, Param):
        lhs = met.src[0]
    else:
        raise Unsupported("rows gathered of a source, or sums scattered by rows, with nothing behind them")
    if not (isinstance(plain.op, Convert) and isinstance(plain.src[0].op, Acc) and plain.dtype is op.lhs.dtype):
        raise Unsupported("the sums are stored in the operands' type alone")
    return Plan(problem, met, lhs)


CANDIDATE = Candidate("torch_fused", GEMM, GPU, 45, plan, ranks="several")
