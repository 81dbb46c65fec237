"""Problems as a candidate sees them: of a gemm its extents, operands, accumulator and stores, and which sources are weights;
likewise of an attention, and of a fusion of other operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Literal

from tilewright.dtype import DType
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import (
    VIEWS,
    Acc,
    Attention,
    Broadcast,
    Collective,
    Const,
    Convert,
    Dequantize,
    Gather,
    Gemm,
    Map,
    Param,
    Reshape,
    Slice,
    Transpose,
    Write,
)
from tilewright.ir.ops.attention import pairs_seen
from tilewright.ir.ranges import Range
from tilewright.ir.shown import show_fusion, show_gemm
from tilewright.ir.types import Shape, TensorType

LARGE_TABLE_BYTES = 16 << 20
TABLE_END_BYTES = 1 << 20

ProblemKind = Literal["gemm", "attention", "fusion"]


@dataclass(frozen=True)
class Operand:
    """One side of the product, read off its expression.

    Attributes:
        source: index of the gemm's source it is made from; None when the expression has several (a general prologue).
        stored: type of that source in memory (of the operand itself for a general prologue).
        dtype: type it is multiplied in.
        shape: [*batch, rows, columns] as multiplied.
        views: the reshapes, transposes, slices and broadcasts between source and operand, from the source outward.
        dequantize: the dequantisation on the way, if any.
        plain: nothing but views lie between source and operand.
        transposed: the last two axes are the source's, exchanged, and nothing else is rearranged.
    """

    source: int | None
    stored: TensorType
    dtype: DType
    shape: Shape
    views: tuple[Node, ...]
    dequantize: Node | None
    plain: bool
    transposed: bool


def read_operand(root: Node) -> Operand:
    """The operand that an expression over `param`s describes."""
    views: list[Node] = []
    dequantize: Node | None = None
    plain = True
    node = root
    while node.src:
        if isinstance(node.op, VIEWS):
            views.append(node)
        elif isinstance(node.op, Dequantize) and dequantize is None:
            dequantize, plain = node, False
        elif isinstance(node.op, Convert):
            plain = False
        else:
            break
        node = node.src[0]
    views.reverse()
    if not isinstance(node.op, Param):
        return Operand(None, root.tensor, root.dtype, root.shape, (), None, False, False)
    return Operand(
        node.op.index, node.tensor, root.dtype, root.shape, tuple(views), dequantize, plain, _is_swap(node.shape, views)
    )


def _is_swap(shape: Shape, views: list[Node]) -> bool:
    rank = len(shape)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    return len(views) == 1 and isinstance(views[0].op, Transpose) and views[0].op.perm == swap


@dataclass(frozen=True)
class Problem:
    """A gemm and the types of its sources. Hashable; equal problems are interchangeable.

    Attributes:
        op: the gemm (operand and store expressions inside).
        types: types of the sources.
        weights: flags of the sources that are constant and may be repacked once.
    """

    op: Gemm
    types: tuple[TensorType, ...]
    weights: tuple[bool, ...]

    kind: ClassVar[ProblemKind] = "gemm"

    @cached_property
    def batch(self) -> int:
        """Product of the batch extents."""
        return math.prod(self.acc.shape[:-2])

    @cached_property
    def acc(self) -> TensorType:
        return self.op.acc_type

    @property
    def M(self) -> int:  # noqa: N802
        return self.acc.shape[-2]

    @property
    def N(self) -> int:  # noqa: N802
        return self.acc.shape[-1]

    @property
    def K(self) -> int:  # noqa: N802
        return self.op.lhs.shape[-1]

    @cached_property
    def lhs(self) -> Operand:
        return read_operand(self.op.lhs)

    @cached_property
    def rhs(self) -> Operand:
        return read_operand(self.op.rhs)

    @cached_property
    def outputs(self) -> tuple[TensorType, ...]:
        """The types of the results, one a store."""
        return tuple(s.tensor for s in self.op.stores)

    @cached_property
    def node(self) -> Node:
        """The gemm over stand-in sources, for evaluation."""
        return Node(self.op, *(Node(Param(i, t)) for i, t in enumerate(self.types)))

    @property
    def ops(self) -> int:
        """Arithmetic of the product: 2 * batch * M * N * K (a multiply and an add each)."""
        return 2 * self.batch * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        """The least memory traffic: every source read once, every result written once."""
        return sum(t.size_bytes for t in (*self.types, *self.outputs))

    def constant(self, root: Node) -> bool:
        """Tell whether an expression reads no sources but weights."""
        return all(self.weights[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param))

    def first_conversion(self) -> DType | None:
        """The one type to which every store first converts acc, acc's own type if all use it as it is, else None."""
        nodes = toposort(self.op.stores)
        raw = {n for n in nodes if isinstance(n.op, Acc)}
        raw |= {n for n in nodes if isinstance(n.op, Slice) and n.src[0] in raw}
        readers = [n for n in nodes if n not in raw and any(s in raw for s in n.src)]
        kinds = {n.dtype if isinstance(n.op, Convert) and n.op.overflow == "wrap" else None for n in readers}
        if any(s in raw for s in self.op.stores):
            kinds.add(None)
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        return kind if kind is not None and kind.is_float == self.acc.dtype.is_float else self.acc.dtype

    def __str__(self) -> str:
        return show_gemm(self.op)


@dataclass(frozen=True)
class AttentionProblem:
    """An attention and the types of its sources; the attributes mean what they mean for a gemm's `Problem`."""

    op: Attention
    types: tuple[TensorType, ...]
    weights: tuple[bool, ...]

    kind: ClassVar[ProblemKind] = "attention"

    @cached_property
    def acc(self) -> TensorType:
        return self.op.result_type(self.types)

    @cached_property
    def operands(self) -> tuple[TensorType, ...]:
        """Types of q, k, v and maybe the mask, as they enter the products."""
        return self.op.operand_types(self.types)

    @cached_property
    def outputs(self) -> tuple[TensorType, ...]:
        """The types of the results, one a store; of the accumulator without any."""
        return tuple(s.tensor for s in self.op.stores) or (self.acc,)

    @cached_property
    def node(self) -> Node:
        """The attention over stand-in sources, for evaluation."""
        return Node(self.op, *(Node(Param(i, t)) for i, t in enumerate(self.types)))

    @property
    def ops(self) -> int:
        """Arithmetic of the two products: 2 B H (D + Dv) for each pair of a query and a key that causality leaves."""
        q, k, v = self.operands[:3]
        pairs = pairs_seen(self.op.causal, q.shape[2], k.shape[2])
        return 2 * math.prod(q.shape[:2]) * pairs * (q.shape[3] + v.shape[3])

    @property
    def bytes(self) -> int:
        """The bytes of all sources and results."""
        return sum(t.size_bytes for t in (*self.types, *self.outputs))

    def __str__(self) -> str:
        q, k, v = self.operands[:3]
        mask = f" mask {self.operands[3]}" if len(self.operands) == 4 else ""
        causal = "" if self.op.causal == "no" else f" causal={self.op.causal}"
        stored = [s.tensor for s in self.op.stores if s.tensor != self.acc]
        result = f" -> {', '.join(map(str, stored))}" if stored else ""
        return f"attention q {q} k {k} v {v}{mask}{causal}{result}"


@dataclass(frozen=True)
class Destination:
    """The slice of a larger array that a result is written to: from `start` on along `axis`, all of the other axes.

    Attributes:
        shape: extents of the whole array.
    """

    shape: Shape
    axis: int
    start: int

    def ranges(self, extent: int) -> tuple[Range, ...]:
        """The elements of each axis that the slice takes, for a result of `extent` elements along `axis`."""
        own = Range(self.start, extent)
        return tuple(own if a == self.axis else Range.whole(d) for a, d in enumerate(self.shape))


@dataclass(frozen=True)
class FusionProblem:
    """A fusion of operations between products: expressions over `param`s, one a result, of any operations but products and
    calls.

    All constants are sources, numbers too, so that the norms of two layers are one problem.

    Attributes:
        roots: the results.
        types: types of the sources.
        weights: flags of the sources that are constant.
        destinations: for each result the array in which a program will have it, if that is not its own; none are where this is
            empty. A kernel may write it there (`Kernel.place`).
    """

    roots: tuple[Node, ...]
    types: tuple[TensorType, ...]
    weights: tuple[bool, ...]
    destinations: tuple[Destination | None, ...] = ()

    kind: ClassVar[ProblemKind] = "fusion"

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of the expressions, sources first."""
        return tuple(toposort(self.roots))

    @cached_property
    def outputs(self) -> tuple[TensorType, ...]:
        return tuple(r.tensor for r in self.roots)

    @cached_property
    def large_tables(self) -> dict[int, int]:
        """Constants of more than LARGE_TABLE_BYTES of which slices along the first axis are picked and nothing else read, by
        source index: of so many slices at either end something is picked when a kernel is examined, and of no others."""
        readers: dict[Node, list[Node]] = {}
        for n in self.nodes:
            for i, s in enumerate(n.src):
                readers.setdefault(s, []).append(n)
                if i > 0 or not isinstance(n.op, Gather) or n.op.axis != 0:
                    readers[s].append(s)  # read as something else than a table
        found: dict[int, int] = {}
        for n, by in readers.items():
            if not isinstance(n.op, Param) or not self.weights[n.op.index] or n in self.roots or n in by:
                continue
            size, extent = n.tensor.size_bytes, n.shape[0] if n.shape else 1
            rows = max(1, TABLE_END_BYTES * extent // max(size, 1))
            if size > LARGE_TABLE_BYTES and 2 * rows < extent:
                found[n.op.index] = rows
        return found

    @cached_property
    def only_views(self) -> bool:
        """Say whether nothing is computed and nothing need move."""
        return all(isinstance(n.op, (*VIEWS, Param)) for n in self.nodes)

    @property
    def bytes(self) -> int:
        """The bytes of all sources and results."""
        return sum(t.size_bytes for t in (*self.types, *self.outputs))

    def __str__(self) -> str:
        return show_fusion(self.nodes, self.outputs)


AnchorProblem = Problem | AttentionProblem
AnyProblem = AnchorProblem | FusionProblem


@lru_cache(4096)
def collectives_of(problem: AnyProblem) -> tuple[Node, ...]:
    """The operations between ranks in a problem's expressions, each after those it depends on."""
    roots = problem.roots if isinstance(problem, FusionProblem) else problem.op.region_roots()
    return tuple(n for n in toposort(roots) if isinstance(n.op, Collective))


def params_of(problem: AnchorProblem) -> list[Node]:
    """The leaves that stand for the sources, in all expressions of a gemm or attention and around it."""
    node = problem.node
    return [n for n in toposort((*node.op.region_roots(), *node.src)) if isinstance(n.op, Param)]


def problem_of(node: Node) -> AnchorProblem:
    """The problem that a gemm or attention node poses."""
    types, weights = tuple(s.tensor for s in node.src), tuple(s.constant for s in node.src)
    if isinstance(node.op, Attention):
        return AttentionProblem(node.op, types, weights)
    assert isinstance(node.op, Gemm)
    return Problem(node.op, types, weights)


def fusion_of(inputs: Sequence[Node], outputs: Sequence[Node]) -> tuple[FusionProblem, tuple[Node, ...]]:
    """The problem of computing `outputs` from `inputs` (tensors both), and the inputs in the order of its sources.

    That is the order in which the expressions come to them: equal fusions are equal problems wherever they stand. Of an output
    that is a write, what is written is computed. Constants are sources, so that fusions which differ in them alone are one
    problem, but an exponent is part of the expression: a square is one product, a power that nothing is known of a hundred
    instructions.
    """
    destinations = tuple(destination_of(n) for n in outputs)
    outputs = [n if at is None else n.src[2] for n, at in zip(outputs, destinations, strict=True)]
    stand_in = {s: Node(Param(i, s.tensor)) for i, s in enumerate(inputs)}
    roots = substitute(outputs, stand_in)
    exponents = {n: inputs[n.op.index] for n in _exponents(roots) if isinstance(n.op, Param)}
    roots = substitute(roots, {n: s for n, s in exponents.items() if isinstance(s.op, Const) and s.tensor.elements == 1})
    order = [n for n in toposort(roots) if isinstance(n.op, Param)]
    sources = tuple(inputs[n.op.index] for n in order if isinstance(n.op, Param))
    roots = substitute(roots, {n: Node(Param(i, n.tensor)) for i, n in enumerate(order)})
    types, weights = tuple(s.tensor for s in sources), tuple(s.constant for s in sources)
    return FusionProblem(tuple(roots), types, weights, destinations if any(destinations) else ()), sources


def _exponents(roots: Sequence[Node]) -> set[Node]:
    """The exponents of powers, below views."""
    found: set[Node] = set()
    for n in toposort(roots):
        if isinstance(n.op, Map) and n.op.fn == "power":
            exponent = n.src[1]
            while isinstance(exponent.op, (Broadcast, Reshape)):
                exponent = exponent.src[0]
            found.add(exponent)
    return found


def destination_of(n: Node) -> Destination | None:
    """The part of a state array that a write fills: constant positions in it, one after the other; None for any other node."""
    if not isinstance(n.op, Write) or isinstance(n.src[0].op, Write) or not isinstance(n.src[1].op, Const):
        return None
    positions = [int(p) for p in n.src[1].op.data.tensor().tolist()]
    inside = bool(positions) and positions[0] >= 0 and positions[-1] < n.shape[n.op.axis]
    follow = inside and positions == list(range(positions[0], positions[0] + len(positions)))
    return Destination(n.shape, n.op.axis, positions[0]) if follow else None
