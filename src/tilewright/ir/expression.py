"""Expressions inside an operation: leaves `param` and `acc`, and how they are moved in, renumbered, and normalised.

Folding is substitution. These functions are all that rules need to fold something into a gemm (or an attention) or to take it
out again; none of them follows the uses of a node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.dtype import BF16, F16, F32, DType
from tilewright.ir.build import broadcast, reshape, slice_, transpose
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import (
    Acc,
    Collective,
    Const,
    Convert,
    Dequantize,
    Gemm,
    Map,
    Param,
    Quantize,
    Reduce,
    Reshape,
    Select,
    Slice,
    Transpose,
)
from tilewright.ir.types import Shape, reshape_groups

ELEMENTWISE = (Map, Select, Convert, Quantize, Dequantize)
REARRANGE = (Reshape, Transpose)
# Functions of an instruction or two, that may be computed once more rather than kept.
QUICK = frozenset({
    "abs", "add", "and", "clamp", "divide", "equal", "greater", "greater_equal", "is_nan", "less", "less_equal", "maximum",
    "minimum", "multiply", "negate", "not", "not_equal", "or", "relu", "subtract", "xor",
})  # fmt: skip


class Sources:
    """The sources of an operation under construction, each once; gives the `param` that stands for one."""

    nodes: list[Node]

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes = list(nodes)

    def param(self, node: Node) -> Node:
        """The param for `node`, which becomes a source if it is none yet. A one-element constant stands for itself."""
        return node if isinstance(node.op, Const) and node.tensor.elements == 1 else self.add(node)

    def add(self, node: Node) -> Node:
        """The param for `node`, whatever it is."""
        if node not in self.nodes:
            self.nodes.append(node)
        return Node(Param(self.nodes.index(node), node.tensor))

    def rebase(self, roots: Sequence[Node], src: Sequence[Node]) -> list[Node]:
        """Expressions over the sources `src`, rewritten over these sources."""
        moved = {n: self.param(src[n.op.index]) for n in toposort(roots) if isinstance(n.op, Param)}
        return substitute(roots, moved)


REDUCED_PRECISION_SAFE = frozenset({"gelu"})  # of which kernels have a form for values that are rounded to 16 bits at once
ROUNDED_AT_ONCE = 2.0**-14  # the rounding to bf16 itself: up to 2^-9; to f16, up to 2^-11
REDUCED_PRECISION_SAFE_TO_8_BITS = frozenset({"gelu", "gelu_tanh"})  # and for values that are quantised to 8 bits at once
QUANTISED_AT_ONCE = 2.0**-8  # the rounding to f8e4m3fn itself: up to 2^-4; to s8, up to 2^-8 of the largest value


def make_gemm(acc_dtype: DType, lhs: Node, rhs: Node, stores: Sequence[Node], src: Sequence[Node]) -> Node:
    """A gemm whose sources are just those its expressions use, in the order they use them: one spelling a meaning."""
    used = Sources()
    roots = used.rebase([lhs, rhs, *stores], src)
    return Node(Gemm(acc_dtype, roots[0], roots[1], tuple(roots[2:])), *used.nodes)


def outside(root: Node, src: Sequence[Node]) -> Node:
    """An expression over `param`s as a node of the graph."""
    return substitute((root,), {n: src[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param)})[0]


def depends_on_acc(roots: Sequence[Node], also: Collection[Node] = ()) -> set[Node]:
    """The nodes of expressions that depend on acc, or on what else holds sums."""
    found: set[Node] = set()
    for n in toposort(roots):
        if isinstance(n.op, Acc) or n in also or any(s in found for s in n.src):
            found.add(n)
    return found


def linear_in(n: Node, held: Collection[int]) -> bool:
    """Tell whether an operation on sums is the sum of the operation on their summands, which these of its sources hold,
    roundings aside. Integers wrap alike. An 8-bit float has too few digits and too small a range for summands, which may be far
    larger than their sum."""
    op, first = n.op, n.src[min(held)]
    if isinstance(op, Map):
        return {
            "negate": True,
            "add": len(held) == len(n.src),
            "subtract": len(held) == len(n.src),
            "multiply": len(held) == 1,
            "divide": [*held] == [0] and n.dtype.is_float,
        }.get(op.fn, False)
    if isinstance(op, Convert):
        wraps = op.overflow == "wrap" and n.dtype.is_integer and first.dtype.is_integer
        rounds = n.dtype.is_float and first.dtype.is_float and n.dtype.bits >= 16
        return rounds or (wraps and n.dtype.bits <= first.dtype.bits)
    return isinstance(op, (Reshape, Transpose, Slice)) or (isinstance(op, Reduce) and op.fn == "add")


def linear_in_acc(root: Node) -> bool:
    """Tell whether sums of what an expression makes of summands in acc are what it makes of their sum; operations between ranks
    are taken to be."""
    dependent = depends_on_acc((root,))
    for n in toposort((root,)):
        held = [i for i, s in enumerate(n.src) if s in dependent]
        if held and not isinstance(n.op, Collective) and not linear_in(n, held):
            return False
    return True


def rounds_to_16_bits(n: Node) -> bool:
    """Tell whether a node only rounds the f32 value of a function in `REDUCED_PRECISION_SAFE` to bf16 or f16. A kernel may
    compute that value to `ROUNDED_AT_ONCE` of it: a thirty-second or an eighth of what the rounding may change."""
    function = n.src[0].op if isinstance(n.op, Convert) else None
    known = isinstance(function, Map) and function.fn in REDUCED_PRECISION_SAFE
    return known and n.dtype in (BF16, F16) and n.src[0].dtype is F32


def rounded_at_once(*roots: Node) -> dict[Node, DType]:
    """The values in expressions computed together that nothing reads but such roundings, and the type of theirs; bf16, which
    reaches further down, where there are both."""
    order = toposort(roots)
    read = {s for n in order if not rounds_to_16_bits(n) for s in n.src} | {*roots}
    found: dict[Node, DType] = {}
    for n in order:
        if rounds_to_16_bits(n) and n.src[0] not in read:
            found[n.src[0]] = BF16 if found.get(n.src[0], n.dtype) is BF16 else n.dtype
    return found


def quantised_to_8_bits(n: Node) -> Node | None:
    """The function in `REDUCED_PRECISION_SAFE_TO_8_BITS` whose value, widened or as it is, a node quantises to 8 bits. A kernel
    may compute it to `QUANTISED_AT_ONCE` of it beside the roundings of the function's own type: a sixteenth of what quantising
    may change."""
    if not isinstance(n.op, Quantize) or n.dtype.bits != 8:
        return None
    value = n.src[0]
    while isinstance(value.op, Convert) and value.dtype is F32 and value.src[0].dtype.is_float:
        value = value.src[0]
    return value if isinstance(value.op, Map) and value.op.fn in REDUCED_PRECISION_SAFE_TO_8_BITS else None


def quantised_at_once(*roots: Node) -> dict[Node, Node]:
    """The functions in expressions computed together whose value nothing reads but one such quantisation, by that."""
    order = toposort(roots)
    readers: dict[Node, list[Node]] = {}
    for n in order:
        for s in n.src:
            readers.setdefault(s, []).append(n)
    found: dict[Node, Node] = {}
    for n in order:
        function, value = quantised_to_8_bits(n), n.src[0] if n.src else n
        if function is None:
            continue
        while value is not function and len(readers[value]) == 1 and value not in roots:
            value = value.src[0]
        if value is function and len(readers[value]) == 1 and value not in roots:
            found[n] = function
    return found


@dataclass(frozen=True)
class Rearrangement:
    """A reshape or transpose of any value of shape `before`."""

    op: Reshape | Transpose
    before: Shape
    after: Shape


def views_outward(root: Node) -> Node:
    """The expression with reshapes and transposes of the accumulator moved to its root: how the result is written.

    map(view(x), s) -> view(map(x, unview(s))), for every elementwise operation. Exact: elementwise operations do not see
    where an element stands. A side input that cannot be unviewed, or two operands under different views, stay as they are.
    """
    dependent = depends_on_acc((root,))
    core: dict[Node, tuple[Node, tuple[Rearrangement, ...]]] = {}  # value without its views; the views, inner first
    for n in toposort((root,)):
        if n not in dependent:
            core[n] = (n, ())
        elif isinstance(n.op, REARRANGE):
            inner, views = core[n.src[0]]
            core[n] = (inner, _further(views, Rearrangement(n.op, n.src[0].shape, n.shape)))
        elif isinstance(n.op, ELEMENTWISE):
            core[n] = _under_views(n, dependent, core)
        else:
            core[n] = (n.with_src([with_views(*core[s]) for s in n.src]), ())
    return with_views(*core[root])


def _further(views: tuple[Rearrangement, ...], last: Rearrangement) -> tuple[Rearrangement, ...]:
    """Views followed by one more: two of a kind are one, and one that changes nothing is none."""
    if views and type(views[-1].op) is type(last.op):
        *rest, before = views
        op: Reshape | Transpose = last.op
        if isinstance(op, Transpose) and isinstance(before.op, Transpose):
            op = Transpose(tuple(before.op.perm[p] for p in op.perm))
        views, last = tuple(rest), Rearrangement(op, before.before, last.after)
    still = last.before == last.after if isinstance(last.op, Reshape) else list(last.op.perm) == list(range(len(last.before)))
    return views if still else (*views, last)


def _under_views(
    n: Node, dependent: set[Node], core: Mapping[Node, tuple[Node, tuple[Rearrangement, ...]]]
) -> tuple[Node, tuple[Rearrangement, ...]]:
    chains = {core[s][1] for s in n.src if s in dependent}
    views = next(iter(chains)) if len(chains) == 1 else ()
    blocked = isinstance(n.op, (Quantize, Dequantize)) and n.op.block is not None
    if views and not blocked and all(s not in dependent or s.shape == n.shape for s in n.src):
        src: list[Node] = []
        for s in n.src:
            inner = core[s][0] if s in dependent else unview(s, views)
            if inner is None:
                break
            src.append(inner)
        else:
            return Node(n.op, *src), views
    return n.with_src([with_views(*core[s]) for s in n.src]), ()


def with_views(node: Node, views: Iterable[Node | Rearrangement]) -> Node:
    """A node seen through views, the innermost first."""
    for view in views:
        node = Node(view.op, node)
    return node


def unview(side: Node, views: Sequence[Rearrangement]) -> Node | None:
    """The view of `side` that broadcasts against a value as `side` broadcasts against that value under `views`; None if none
    does."""
    if side.tensor.elements == 1:
        return reshape(side, ()) if views else side
    for v in reversed(views):
        rank = len(v.after)
        side = reshape(side, (1,) * (rank - len(side.shape)) + side.shape)
        if isinstance(v.op, Transpose):
            inverse = sorted(range(rank), key=v.op.perm.__getitem__)
            side = transpose(side, inverse)
            continue
        found = before_reshape(side, v.before, v.after)
        if found is None:
            return None
        side = found
    return side


def before_reshape(side: Node, before: Shape, after: Shape) -> Node | None:
    """`side`, which broadcasts to `after`, as it broadcasts to `before`: each group of axes that the reshape splits or merges
    is either not varied over at all, or repeated to its full extent first. None where an extent is zero."""
    groups = reshape_groups(before, after)
    if groups is None:
        return None
    full = list(side.shape)
    result: list[int] = []
    for old, new in groups:
        varies = any(side.shape[a] != 1 for a in new)
        if varies and len(old) > 1 and len(new) == 1:
            result.extend(before[a] for a in old)
        elif varies:
            for a in new:
                full[a] = after[a]
            result.extend(before[a] for a in old)
        else:
            result.extend(1 for _ in old)
    return reshape(broadcast(side, full), result)


def slice_columns(root: Node, start: int, stop: int, columns: int, acc: Node) -> Node | None:
    """An elementwise expression over acc [..., columns], restricted to columns start…stop; acc itself is not narrowed but
    sliced. None where the expression rearranges acc."""
    memo: dict[Node, Node] = {}
    dependent = depends_on_acc((root,))
    for n in toposort((root,)):
        if n is acc:
            memo[n] = slice_(n, -1, start, stop)
        elif n in dependent:
            if not isinstance(n.op, ELEMENTWISE) or n.shape[-1:] != (columns,):
                return None
            if isinstance(n.op, (Quantize, Dequantize)) and n.op.block is not None:
                return None
            memo[n] = Node(n.op, *(memo[s] for s in n.src))
        elif n.shape and n.shape[-1] == columns and columns != 1:
            memo[n] = slice_(n, -1, start, stop)
        else:
            memo[n] = n
    return memo[root]
