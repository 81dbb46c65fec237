"""Plans and calls of generated gemms: what candidates that share the dense nest have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright import threads
from tilewright.candidates.llvm.expressions.vector import check
from tilewright.candidates.llvm.gemm.dots import Choice
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, PREFETCHED, Blocks, Nest
from tilewright.candidates.llvm.gemm.space import ONE_THREAD_OPS
from tilewright.candidates.llvm.runtime.calls import Call, bound
from tilewright.candidates.llvm.runtime.scratch import maker
from tilewright.hardware.target import Target
from tilewright.ir.artefact import Kind
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Map, Param, Select
from tilewright.lowering.access import Access, of_operand
from tilewright.schedule.candidate import Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.problem import Problem
from tilewright.schedule.recipe import CallShape, Parts, Prepared, describe

UNSIZED = Blocks("", 1, 1, 1, 1, 1, pack_lhs=True)


@dataclass(frozen=True)
class NestPlan:
    """A gemm as a nest whose sizes are not chosen yet.

    Attributes:
        problem, target: what is done, and where.
        nest: the nest, with `UNSIZED` blocks.
        outside: expressions of the left and of the right operand that torch evaluates first; None for one whose sources the
            kernel reads itself.
        in_place: the left operand may be read where it lies.
        beside: what else kernels read: scales and zero points of the left operand's codes.
    """

    problem: Problem
    target: Target
    nest: Nest
    outside: tuple[Node | None, Node | None]
    in_place: bool
    beside: tuple[Access, ...] = ()

    def kernel(
        self, name: str, schedule: Schedule, nest: Nest, prepare: Callable[[Mapping[int, torch.Tensor]], Runner]
    ) -> Kernel:
        """A kernel of a nest."""
        left, right = self.outside
        outside = [node for node in (left, None if nest.constant else right) if node is not None]
        read = self._pointers() | _params(outside)
        return Kernel(
            name,
            schedule,
            prepare,
            workspace_bytes=nest.scratch(threads.count()),
            packed_bytes=nest.packed_rhs_bytes if nest.constant else 0,
            releasable=frozenset(i for i, weight in enumerate(self.problem.weights) if weight and i not in read),
        )

    def _pointers(self) -> set[int]:
        """The indices of the arguments that a kernel reads: sources, and behind them operands that torch evaluates."""
        return _params([a.root for a in (self.nest.lhs, self.nest.rhs, *self.nest.stores, *self.beside)])

    def runner(self, nest: Nest, call: Callable[..., None], packed: torch.Tensor, given: tuple[int, ...]) -> Runner:
        """A function that runs a kernel on sources; `packed` holds a constant right operand as the kernel reads it, and is kept
        alive; `given` is that of its `Source`."""
        count = len(self.problem.types)
        left, right = self.outside[0], None if nest.constant else self.outside[1]
        outside = [i for i, node in ((count, left), (count + 1, right)) if node is not None]
        read = [*sorted(self._pointers() & set(range(count))), *outside]
        alone, one = nest.scratch(1), self.problem.ops <= ONE_THREAD_OPS
        weight, size = (packed, nest.packed_rhs_bytes) if nest.constant else (None, 0)
        results, each = tuple(map(Kind.of, self.problem.outputs)), nest.scratch(2) - alone
        shape = CallShape(nest.pointers, tuple(read), count + 2, results, alone, each, one, size, given)
        needs = Call(call, shape, weight)
        return behind(needs, left, right, nest.k_contiguous) if outside else bound(needs)


def packed_memory(nest: Nest) -> torch.Tensor:
    """Memory for a packed right operand from a cache line on: u8, zero where nothing is packed, since it may be saved."""
    made = maker((nest.packed_rhs_bytes + CACHE_LINE,), torch.uint8)()
    made[:CACHE_LINE].zero_()
    made[nest.packed_rhs_bytes - PREFETCHED :].zero_()
    return made


def behind(call: Call, left: Node | None, right: Node | None, k_last: bool) -> Runner:
    """A runner of a call whose last two sources are the operands: those of which an expression is given, evaluated by torch."""
    run, none = bound(call), torch.empty(0)

    def evaluated(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lhs = operand(left, sources, False) if left is not None else none
        rhs = operand(right, sources, k_last) if right is not None else none
        return run((*sources, lhs, rhs))

    def recipe(parts: Parts) -> Prepared:
        lhs, rhs = (parts.text((root,)) if root is not None else "" for root in (left, right))
        return Prepared(lhs, rhs, k_last, call.called(parts))

    return describe(evaluated, recipe)


def side_of(root: Node, index: int, *, columns_last: bool, outside: bool) -> tuple[Access, Node | None]:
    """Find where an operand's elements lie, and the expression that torch evaluates first (`NestPlan.outside`)."""
    if not outside:
        try:
            check((root,))
            return of_operand(root, columns_last=columns_last), None
        except Unsupported:
            if any(isinstance(n.op, (Map, Select)) for n in toposort((root,))):
                raise  # a step of its own has kernels of its own
    shape = root.shape if columns_last else (*root.shape[:-2], root.shape[-1], root.shape[-2])
    stand_in = Node(Param(index, replace(root.tensor, shape=shape)))
    return of_operand(stand_in, columns_last=True), root


def lies_right(access: Access, problem: Problem, choice: Choice, rows: int) -> bool:
    """Tell whether a kernel may read the left operand where it lies: plain rows of the instruction's type, K contiguous."""
    codes = problem.lhs.dtype.bits == 4 and choice.dot.lhs.bits == 8  # kept one to a byte
    if choice.dot.rows > 1:
        return False  # rows take turns
    step = choice.dot.k * choice.dot.steps  # of K, that is read at once
    if not problem.lhs.plain or (problem.lhs.dtype is not choice.dot.lhs and not codes) or problem.K % step:
        return False
    leaf = next(n for n in toposort((access.root,)) if isinstance(n.op, Param))
    place = access.of_leaf(leaf)
    columns = [(t.extent, t.inner, t.stride) for t in place.columns]
    if columns != [(problem.K, 1, 1)] or len(place.rows) not in (1, 2) or place.rows[0].inner != 1:
        return False
    first, *outer = place.rows
    total = problem.batch * problem.M
    if outer:
        return first.extent == rows and outer[0].inner == rows and rows * outer[0].extent == total
    return first.extent == total


def _params(roots: Sequence[Node]) -> set[int]:
    return {n.op.index for n in toposort(roots) if isinstance(n.op, Param)}


def operand(root: Node, sources: Mapping[int, torch.Tensor] | Sequence[torch.Tensor], k_contiguous: bool) -> torch.Tensor:
    """An operand that torch evaluates, dense, with K last if `k_contiguous`."""
    params = [n for n in toposort((root,)) if isinstance(n.op, Param)]
    values = {n: sources[n.op.index] for n in params if isinstance(n.op, Param)}
    value = evaluate_nodes((root,), values)[0]
    assert isinstance(value, torch.Tensor)
    return (value.transpose(-1, -2) if k_contiguous else value).contiguous()
