"""Layer norm and RMS norm from the arithmetic that exporters and XLA write for them.

Small rules that meet. The product of y and 1 / sqrt(mean(y**2) + epsilon) is an RMS norm of y. An RMS norm of x - mean(x) is a
layer norm of x. A vector that multiplies or shifts either is its scale or its bias. A norm computed in f32 between casts is the
norm of the value before the casts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.dtype import BF16, F16, F32, DType
from tilewright.ir.build import const, convert, map_
from tilewright.ir.constant import is_rounding, scalar_value, unrounded
from tilewright.ir.graph import Node
from tilewright.ir.ops import Broadcast, Convert, LayerNorm, Map, Reshape
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.rules._row_statistics import RowReader, Spread, function_of, spans_rows
from tilewright.rules.casts import before_cast

MAX_FACTORS = 8


def _float_map(*names: str) -> Pat:
    return Pat(Map, where=lambda n: function_of(n) in names and n.dtype.is_float)


@rule(_float_map("multiply", "divide"), stage="recognise")
def dividing_by_root_mean_square_is_a_norm(m: Match) -> Node | None:
    """y * rsqrt(mean(y**2) + epsilon) -> layer_norm(y, center=false); other factors are left over as factors

    y / sqrt(…), y * (1 / sqrt(…)), y * (rsqrt(…) * s) and power(…, -0.5) likewise; the mean may be a sum divided by the count.
    With mean(x**2) - mean(x)**2 under the root and y = x - mean(x): -> layer_norm(x).
    Where: over the last axes; nothing else reads what stands in between. Exact: no: the norm is computed in f32, without
    rounding in between, and from the deviations rather than from a difference of squares, which cancels.
    Sources: Zhang and Sennrich 2019 (arXiv 1910.07467); Ba et al. 2016 (arXiv 1607.06450).
    """
    inside: list[Node] = []
    numerators, denominators = _factors(m, inside)
    for factors, power in ((numerators, -0.5), (denominators, 0.5)):
        for factor in factors:
            reader = RowReader()
            spread = reader.spread(factor)
            if reader.why is not None:
                m.refuse(reader.why)
            if spread is None or spread.power != power:
                continue
            for y in numerators:
                subject = _normalised(spread, y)
                if subject is None or y.shape != m.node.shape or not spans_rows(factor, y.shape, spread.axes):
                    continue
                taken = [*inside, *reader.passed, *subject.inside]
                left = _without(numerators, y, *([factor] if factors is numerators else []))
                under = _without(denominators, *([factor] if factors is denominators else []))
                norm = None if any(f in taken for f in (*left, *under)) else _norm(m, taken, spread, subject)
                return None if norm is None else _with_factors(norm, left, under)
    return None


def _without(factors: Sequence[Node], *used: Node) -> list[Node]:
    """The factors but for one occurrence of each that is used, and but for ones."""
    left = list(factors)
    for u in used:
        left.remove(u)
    return [f for f in left if scalar_value(f) != 1]


def _factors(m: Match, inside: list[Node]) -> tuple[list[Node], list[Node]]:
    """The factors and the divisors of the matched node, through products that nothing else reads."""
    numerators: list[Node] = []
    denominators: list[Node] = []
    stack = [(m.node, numerators, denominators)]
    while stack:
        node, up, down = stack.pop()
        product = function_of(node) in ("multiply", "divide") and len(numerators) + len(denominators) + len(stack) < MAX_FACTORS
        if product and (node is m.node or m.users.only(node)):
            inside.append(node)
            second = (node.src[1], up, down) if function_of(node) == "multiply" else (node.src[1], down, up)
            stack.extend((second, (node.src[0], up, down)))
        elif unrounded(node) is not node and m.users.only(node):
            inside.append(node)
            stack.append((node.src[0], up, down))
        else:
            up.append(node)
    return numerators, denominators


@dataclass(frozen=True)
class _Subject:
    """The input of a norm, whether its mean is subtracted, and the nodes that are then no longer needed."""

    x: Node
    centred: bool
    inside: list[Node]


def _normalised(spread: Spread, y: Node) -> _Subject | None:
    """The subject, if the deviation is that of y: y is what was squared, or both are x - mean(x), rounded differently maybe, or
    y is, and the variance is a difference of squares of x."""
    if not spread.difference and unrounded(y) is spread.y:
        return _Subject(y, False, [])
    own = _centred(y, spread.axes)
    squared = _Subject(spread.y, True, []) if spread.difference else _centred(spread.y, spread.axes)
    if own is None or squared is None or unrounded(own.x) is not unrounded(squared.x):
        return None
    return _Subject(own.x, True, [*own.inside, *squared.inside])


def _centred(y: Node, axes: tuple[int, ...]) -> _Subject | None:
    """x, if y is x - mean(x) over these axes."""
    reader = RowReader()
    difference = reader.wide(y)
    if function_of(difference) != "subtract":
        return None
    mean = reader.mean(difference.src[1])
    x = difference.src[0]
    if mean is None or mean.x is not unrounded(x) or mean.axes != axes or x.shape != difference.shape:
        return None
    if not spans_rows(difference.src[1], x.shape, axes):
        return None
    return _Subject(x, True, [difference, *reader.passed])


def _norm(m: Match, inside: Iterable[Node], spread: Spread, subject: _Subject) -> Node | None:
    """The norm without scale, of the matched node's type; None if it may not stand for what is inside."""
    rank = len(m.node.shape)
    axis = spread.axes[0] if spread.axes else rank
    if spread.axes != tuple(range(axis, rank)) or axis == rank:
        m.refuse(f"it normalises over axes {list(spread.axes)} of {rank}, which are not the last")
        return None
    outside = m.read_outside(n for n in inside if n is not m.node)
    if outside is not None:
        m.refuse(f"the {function_of(outside) or outside.op.name} inside this norm is also read elsewhere")
        return None
    x = _typed(subject.x, m.node.dtype)
    return Node(LayerNorm(axis, spread.epsilon, center=subject.centred), x)


def _typed(x: Node, dtype: DType) -> Node:
    """x as `dtype`, from as early as it is known."""
    return x if x.dtype is dtype else convert(unrounded(x), dtype)


def _with_factors(norm: Node, numerators: list[Node], denominators: list[Node]) -> Node:
    """The norm times what is left of the product: vectors first, which are a scale."""
    for factor in sorted(numerators, key=lambda f: (scalar_value(f) is not None, len(f.shape), f.tensor.elements)):
        norm = map_("multiply", norm, _typed(factor, norm.dtype))
    for factor in denominators:
        norm = map_("divide", norm, _typed(factor, norm.dtype))
    return norm


@rule(Pat(LayerNorm, where=lambda n: function_of(unrounded(n.src[0])) == "subtract"), stage="recognise")
def norm_of_what_is_centred_centres_it(m: Match) -> Node | None:
    """layer_norm(x - mean(x), center=false) -> layer_norm(x)

    Where: the mean is over the normalised axes; only the norm reads the difference, only the difference reads the mean.
    Exact: no, but for rounding the difference to x's type, which the norm does not.
    """
    op, y = m.node.op, m.node.src[0]
    assert isinstance(op, LayerNorm)
    subject = None if op.center else _centred(y, tuple(range(op.axis % len(y.shape), len(y.shape))))
    if subject is None:
        return None
    differences = [y] if y not in subject.inside else []
    if m.read_outside([*differences, *subject.inside]) is not None:
        m.refuse("the mean or what it is taken from is also read elsewhere")
        return None
    return Node(LayerNorm(op.axis, op.epsilon), _typed(subject.x, m.node.dtype), *m.node.src[1:])


@rule(_float_map("multiply"), stage="recognise")
def vector_times_norm_is_its_scale(m: Match) -> Node | None:
    """layer_norm(x) * s -> layer_norm(x, s)

    Where: the norm has no scale yet and nothing else reads it; s is of its type and varies over normalised axes only.
    Exact: yes in f32 and f64; in a narrower type the norm is no longer rounded before it is scaled.
    """
    found = _norm_and_vector(m, 1)
    return None if found is None else Node(found[0].op, *found[0].src, found[1])


@rule(_float_map("add"), stage="recognise")
def vector_added_to_norm_is_its_bias(m: Match) -> Node | None:
    """layer_norm(x, s) + b -> layer_norm(x, s, b); layer_norm(x) + b -> layer_norm(x, 1, b)

    Where: the norm has no bias yet and nothing else reads it; b is of its type and varies over normalised axes only.
    Exact: yes in f32 and f64; in a narrower type the norm is no longer rounded before it is shifted.
    """
    found = _norm_and_vector(m, 2)
    if found is None:
        return None
    norm, bias = found
    scale = norm.src[1] if len(norm.src) == 2 else const(1, norm.dtype)
    return Node(norm.op, norm.src[0], scale, bias)


def _norm_and_vector(m: Match, sources: int) -> tuple[Node, Node] | None:
    """The norm of at most `sources` sources that the matched node reads alone, and the vector beside it."""
    for norm, beside in (m.node.src, reversed(m.node.src)):
        op, vector = norm.op, _vector(beside)
        if not isinstance(op, LayerNorm) or len(norm.src) > sources or norm.shape != m.node.shape:
            continue
        if not _along_rows(vector, norm, op.axis % len(norm.shape)):
            continue
        if not m.users.only(norm):
            m.refuse("the norm is also read without it")
            return None
        return norm, vector
    return None


def _vector(node: Node) -> Node:
    """The value before it was repeated and given leading axes."""
    while isinstance(node.op, (Broadcast, Reshape)):
        inner = node.src[0]
        if isinstance(node.op, Reshape) and node.shape != (1,) * (len(node.shape) - len(inner.shape)) + inner.shape:
            break
        node = inner
    return node


def _along_rows(vector: Node, norm: Node, axis: int) -> bool:
    """Tell whether `vector` is more than a number and varies over the axes from `axis` on only."""
    outer = len(vector.shape) - (len(norm.shape) - axis)
    return vector.tensor.elements > 1 and all(d == 1 for d in vector.shape[: max(outer, 0)]) and vector is not norm


@rule(_float_map("add"), stage="recognise")
def shift_of_a_norm_spread_out_is_gathered(m: Match) -> Node | None:
    """x * a + (b - mean(x) * a) -> (x - mean(x)) * a + b

    Where: nothing else reads the products and the difference. Exact: no, the order of roundings changes. TensorFlow writes
    batch and layer norm this way; gathered, the other rules see the norm.
    """
    for scaled, shift in (m.node.src, reversed(m.node.src)):
        if function_of(scaled) != "multiply" or function_of(shift) != "subtract" or function_of(shift.src[1]) != "multiply":
            continue
        for x, a in (scaled.src, reversed(scaled.src)):
            for mean, again in (shift.src[1].src, reversed(shift.src[1].src)):
                found = RowReader().mean(mean) if again is a else None
                if found is None or found.x is not unrounded(x) or not spans_rows(mean, x.shape, found.axes):
                    continue
                if x.shape != m.node.shape or m.read_outside((scaled, shift, shift.src[1])) is not None:
                    return None
                return map_("add", map_("multiply", map_("subtract", x, mean), a), shift.src[0])
    return None


@rule(Pat(Convert, (Pat(LayerNorm, name="norm"),), where=is_rounding), stage="recognise")
def norm_between_casts_is_the_norm_of_what_is_cast(m: Match) -> Node | None:
    """convert(layer_norm(convert(x, f32), …), t) -> layer_norm(x, …), with x of type t

    Where: t is f16 or bf16, and scale and bias, if any, were converted from t too; nothing else reads the f32 norm;
    the outer cast does not saturate. Exact: yes, a norm is computed in f32 and rounded once to its type.
    """
    norm = m["norm"]
    narrow = [before_cast(s, m.node.dtype) for s in norm.src]
    if m.node.dtype not in (F16, BF16) or norm.dtype is not F32 or narrow[0] is None:
        return None
    if any(s is None for s in narrow):
        m.refuse(f"its scale or bias is {norm.dtype}, its result {m.node.dtype}")
        return None
    if not m.users.only(norm):
        m.refuse(f"the norm is also read in {norm.dtype}")
        return None
    return Node(norm.op, *(s for s in narrow if s is not None))
