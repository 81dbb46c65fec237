"""oneDNN with the weight reordered once into its own layout (torch's mkldnn operators); CPU, f32 and bf16, constant rhs.

A bias and one activation it does itself, on the f32 accumulator, before it rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tilewright.candidates.library._around import Side, rest_of, side, stores
from tilewright.dtype import BF16, F32
from tilewright.hardware.target import Target
from tilewright.ir.anchor import acc_of
from tilewright.ir.expression import REARRANGE
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Convert, Map, Param
from tilewright.schedule.candidate import CPU, GEMM, Candidate, FixedPlan, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.problem import Problem

# Function of `map` -> oneDNN's post-op and its algorithm, as torch's `_linear_pointwise` names them.
ACTIVATIONS = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
    "logistic": ("sigmoid", ""),
}


@dataclass(frozen=True)
class PostOps:
    """The part of a store that the library computes.

    Attributes:
        done: the node of the store that the library's result stands for.
        bias: expression of [N] values that it adds, None for none.
        attr, algorithm: its activation.
    """

    done: Node
    bias: Node | None = None
    attr: str = "none"
    algorithm: str = ""


def read_post_ops(problem: Problem) -> PostOps:
    """The longest beginning of a single store that oneDNN computes: [+ bias][, activation][, rounding to the operands' type].

    What it gives is `done`, in the operands' type: for 16-bit operands the rounding must be part of it, or else nothing is.
    """
    acc = acc_of(problem.node)
    nothing = PostOps(acc)
    if len(problem.op.stores) != 1:
        return nothing
    readers: dict[Node, list[Node]] = {}
    for n in toposort(problem.op.stores):
        for s in n.src:
            readers.setdefault(s, []).append(n)

    def only_reader(n: Node) -> Node | None:
        found = readers.get(n, [])
        return found[0] if len(found) == 1 and n is not problem.op.stores[0] else None

    node, found = acc, nothing
    reader = only_reader(node)
    if reader is not None and isinstance(reader.op, Map) and reader.op.fn == "add":
        side = next((s for s in reader.src if s is not node), None)
        if side is not None and _is_row(side, problem.N, problem.lhs.dtype.bits):
            node, found = reader, PostOps(reader, side)
            reader = only_reader(node)
    if reader is not None and isinstance(reader.op, Map) and reader.op.fn in ACTIVATIONS:
        node, found = reader, PostOps(reader, found.bias, *ACTIVATIONS[reader.op.fn])
        reader = only_reader(node)
    if problem.lhs.dtype is problem.acc.dtype:
        return found
    if reader is None or not isinstance(reader.op, Convert):
        return nothing
    if reader.op.dtype is not problem.lhs.dtype or reader.op.overflow != "wrap":
        return nothing
    return PostOps(reader, found.bias, found.attr, found.algorithm)


def _is_row(side: Node, columns: int, bits: int) -> bool:
    """Tell whether a side input is one value a column, made by casts and views from a source that has no more than `bits`: the
    library takes the bias in the operands' type, and a wider one would lose precision."""
    if side.shape[-1:] != (columns,) or side.tensor.elements != columns:
        return False
    while isinstance(side.op, (Convert, *REARRANGE)):
        side = side.src[0]
    return isinstance(side.op, Param) and side.dtype.is_float and side.dtype.bits <= bits


def _build(problem: Problem, post: PostOps, schedule: Schedule) -> Kernel:
    given, rows, columns = problem.lhs.dtype, problem.batch * problem.M, problem.N
    fused = "post" in dict(schedule.knobs)
    finish = rest_of(problem.op.stores, post.done) if fused else stores(problem, given)
    attr, algorithm = (post.attr, post.algorithm) if fused else ("none", "")
    linear = torch.ops.mkldnn._linear_pointwise

    def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
        lhs = side(problem.op.lhs, weights)
        matrix = side(problem.op.rhs, weights)(())
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), rows)
        bias: Side | None = None
        if fused and post.bias is not None:
            bias = side(post.bias, weights, lambda t: t.reshape(columns).to(given.to_torch()))

        def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            value = linear(lhs(sources).contiguous(), packed, bias and bias(sources), attr, [], algorithm)
            return finish(value, sources)

        return run

    return Kernel(CANDIDATE.name, schedule, prepare, packed_bytes=given.size_bytes(problem.K * problem.N))


def plan(problem: Problem, target: Target) -> FixedPlan | Refusal:
    """Take f32 and bf16 products by a constant right operand whose stores oneDNN's post-ops can do; else a refusal."""
    if not torch.backends.mkldnn.is_available():
        return Refusal("this torch was built without oneDNN")
    pair = {problem.lhs.dtype, problem.rhs.dtype}
    if pair not in ({F32}, {BF16}) or problem.acc.dtype is not F32:
        return Refusal(
            f"oneDNN's prepacked linear takes f32 or bf16, not {problem.lhs.dtype} x {problem.rhs.dtype}", "inapplicable"
        )
    post = read_post_ops(problem)
    if pair == {BF16} and post.done.dtype is not BF16 and problem.first_conversion() is not BF16:
        return Refusal("oneDNN's prepacked bf16 linear rounds to bf16, and a store reads the f32 accumulator")
    if pair == {BF16} and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Refusal("oneDNN's prepacked bf16 linear takes AVX-512, which this processor lacks")
    if len(problem.op.rhs.shape) != 2 or not problem.constant(problem.op.rhs):
        return Refusal("the right operand is not one constant matrix, so there is nothing to pack once")
    if not problem.M or not problem.N or not problem.K:
        return Refusal("an extent is zero")
    points = [Schedule.of(prepacked=True)]
    does = [word for word, given in (("bias", post.bias is not None), (post.attr, post.attr != "none")) if given]
    if does:
        fused = Schedule.of(prepacked=True, post="+".join(does))
        points = [fused, *points] if pair == {F32} or problem.first_conversion() is BF16 else [fused]
    return FixedPlan(points, partial(_build, problem, post))


CANDIDATE = Candidate("onednn", GEMM, CPU, 10, plan)
