"""Everything that a library call needs around it: operands evaluated before it, stores after it.

Libraries multiply plain matrices, so views, casts and dequantisations of an operand run first (once, if it is a weight) and the
epilogue runs afterwards, op by op on torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import partial
from typing import Any, cast

import torch

from tilewright.dtype import BF16, F16, F32, DType
from tilewright.hardware.target import DeviceKind, Target
from tilewright.ir.anchor import acc_of
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Acc, Convert, Dequantize, Param, Slice
from tilewright.schedule.candidate import GEMM, Candidate, FixedPlan, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.packed import packed_once
from tilewright.schedule.problem import Problem

Side = Callable[[Sequence[torch.Tensor]], torch.Tensor]
Form = Callable[[torch.Tensor], torch.Tensor]
Finish = Callable[[torch.Tensor, Sequence[torch.Tensor]], list[torch.Tensor]]


def side(root: Node, weights: Mapping[int, torch.Tensor], finish: Form = lambda t: t, form: Hashable = None) -> Side:
    """A function from the gemm's sources to an operand; evaluated now, once, when it depends on weights alone. `form` says what
    `finish` makes of it: where it is given, kernels for other rows share what was made of one weight's codes."""
    params = [n for n in toposort((root,)) if isinstance(n.op, Param)]
    indices = [cast("Param", n.op).index for n in params]

    def evaluate(sources: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> torch.Tensor:
        if root in params:
            return finish(sources[indices[0]])
        bound = {n: sources[i] for n, i in zip(params, indices, strict=True)}
        return finish(cast("torch.Tensor", evaluate_nodes((root,), bound)[0]))

    if all(i in weights for i in indices):
        shared = form is not None and _decoded(root)
        read = [weights[i] for i in indices]
        ready = packed_once(read, ("library", root, form), lambda: evaluate(weights)) if shared else evaluate(weights)
        return lambda sources: ready
    return evaluate


def stores(problem: Problem, product_dtype: DType) -> Finish:
    """A function from the gemm's product to its results; the product is in the accumulator's type or already in
    `product_dtype`.

    The latter is only right when every store converts acc to it first (`Problem.first_conversion`).
    """
    acc = acc_of(problem.node)
    roots: Sequence[Node] = problem.op.stores
    if product_dtype is not problem.acc.dtype:
        given = Node(Acc(problem.acc.with_dtype(product_dtype)))
        converted = [n for n in toposort(roots) if isinstance(n.op, Convert) and n.dtype is product_dtype]
        # convert(slice(acc)) is slice(convert(acc)).
        moved = {n: substitute((n.src[0],), {acc: given})[0] for n in converted if _is_slice_of(n.src[0], acc)}
        roots, acc = substitute(roots, moved), given
    return rest_of(roots, acc)


def rest_of(roots: Sequence[Node], given: Node) -> Finish:
    """A function to expressions' values from the value of one node in them, which a library computed."""
    params = [(n, n.op.index) for n in toposort(roots) if isinstance(n.op, Param)]
    if all(r is given for r in roots):
        return lambda value, sources: [value] * len(roots)

    def evaluate(value: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        bound: dict[Node, object] = {n: sources[i] for n, i in params}
        bound[given] = value
        return cast("list[torch.Tensor]", evaluate_nodes(roots, bound))

    return evaluate


def kernel_of_call(
    candidate: str,
    schedule: Schedule,
    problem: Problem,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    lhs: Form = lambda t: t,
    rhs: Form = lambda t: t,
    form: Hashable = None,
    product_dtype: DType | None = None,
    **resources: Any,
) -> Kernel:
    """The kernel that evaluates the operands, multiplies them by one call, and gives the product to the stores.

    Args:
        candidate, schedule, problem: whose it is.
        multiply: the call, of operands as `lhs` and `rhs` bring them into form; it gives the accumulator's shape.
        lhs, rhs: applied to an operand, once if it depends on weights alone.
        form: see `side`.
        product_dtype: see `stores`; the accumulator's type if not said.
        resources: other attributes of the kernel.
    """
    finish = stores(problem, product_dtype or problem.acc.dtype)

    def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
        left, right = side(problem.op.lhs, weights, lhs, form), side(problem.op.rhs, weights, rhs, form)

        def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return finish(multiply(left(sources), right(sources)), sources)

        return run

    return Kernel(candidate, schedule, prepare, **resources)


def candidate_of_call(
    name: str,
    multiply: Callable[..., torch.Tensor],
    points: Sequence[Mapping[str, int | str | bool]],
    devices: Set[DeviceKind],
    *,
    dtypes: Sequence[DType] = (F32, F16, BF16),
    preference: int = 5,
) -> Candidate:
    """A candidate of a function that multiplies matrices: `multiply(a, b, **point)`, of [M, K] and [K, N] in any strides, gives
    the product [M, N] in f32. Operands' casts and the epilogue are torch's, before it and after.

    Args:
        name: what reports call it.
        multiply: the function; what its module says of itself describes the candidate.
        points: the arguments that it may be called with, best guess first.
        devices: kinds of device whose tensors it takes.
        dtypes: types that both operands may have.
        preference: below 10 for one that makes code of its own; orders candidates where nothing is measured.
    """

    def plan(problem: Problem, target: Target) -> FixedPlan | Refusal:
        a, b, acc = problem.lhs.dtype, problem.rhs.dtype, problem.acc
        if a is not b or a not in dtypes or acc.dtype is not F32 or acc.rank != 2:
            types = ", ".join(d.name for d in dtypes)
            return Refusal(f"it multiplies two matrices of one type ({types}) into f32, not {a} and {b} into {acc}")

        def build(schedule: Schedule) -> Kernel:
            return kernel_of_call(name, schedule, problem, partial(multiply, **dict(schedule.knobs)))

        return FixedPlan([Schedule.of(**point) for point in points], build)

    plan.__module__ = multiply.__module__
    return Candidate(name, GEMM, frozenset(devices), preference, plan)


def _is_slice_of(node: Node, acc: Node) -> bool:
    while isinstance(node.op, Slice):
        node = node.src[0]
    return node is acc


def flat(t: torch.Tensor, batch: Sequence[int]) -> torch.Tensor:
    """[*batch, rows, columns] as [product of batch, rows, columns], broadcast over `batch`."""
    return t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:])


def releasable(problem: Problem) -> frozenset[int]:
    """Weights that are not read again once operands that depend on them alone are made."""
    made, read = set[int](), set[int]()
    for root in (problem.op.lhs, problem.op.rhs, *problem.op.stores):
        indices = {n.op.index for n in toposort((root,)) if isinstance(n.op, Param)}
        once = root not in problem.op.stores and _decoded(root) and all(problem.weights[i] for i in indices)
        (made if once else read).update(indices)
    return frozenset(made - read)


def _decoded(root: Node) -> bool:
    """An operand has memory of its own: it was made of codes."""
    return any(isinstance(n.op, Dequantize) for n in toposort((root,)))


def one_matrix(problem: Problem) -> bool:
    """Tell whether the right operand is one matrix for all batches, so that the batches are more rows of one product."""
    return len(problem.op.rhs.shape) == 2
