"""Complex numbers: each value is a pair of real ones, through every operation.

Operations that move or pick elements, and those linear in the parts, are done to each part. A product of matrices is one real
product of operands side by side. Functions that mix the parts in other ways are torch's, as calls.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.frontends.stablehlo.dot import Pair, dot_dimensions, product
from tilewright.frontends.stablehlo.module import complex_elements, component
from tilewright.frontends.stablehlo.registry import Complex, Lowering, Site, Value
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, convert, map_, reshape, slice_
from tilewright.ir.graph import Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Concat, Const, Iota, Reshape, Select, Slice
from tilewright.ir.types import TensorType

# Done to each part by the lowering that real numbers have.
_BY_PART = frozenset(
    {
        *("add", "bitcast", "broadcast", "broadcast_in_dim", "concatenate", "dynamic_broadcast_in_dim", "dynamic_gather"),
        *("dynamic_iota", "dynamic_pad", "dynamic_reshape", "dynamic_slice", "dynamic_update_slice", "gather", "negate", "pad"),
        *("real_dynamic_slice", "reduce", "reduce_window", "reshape", "reverse", "select", "slice", "subtract", "transpose"),
    }
)
_OF_SUMS = ("reduce", "reduce_window")


def is_complex(site: Site) -> bool:
    """Tell whether an operand or a result holds complex numbers."""
    return any(isinstance(v, Complex) for v in site.values) or any(component(r.type) for r in site.op.results)


def lower_complex(site: Site, real: Lowering | None) -> Value:
    """Meaning of the operation; `real` lowers it for real numbers, and for any where it looks at no element.

    Raises:
        Unmodelled: it has no meaning on complex numbers here, or none at all.
    """
    dialect, _, name = site.op.name.partition(".")
    if dialect in ("stablehlo", "mhlo"):
        if name in _LOWERINGS:
            return _LOWERINGS[name](site)
        if name in _BY_PART and real is not None:
            if name in _OF_SUMS and any(o.name != "stablehlo.add" for o in site.op.block().operations()[:-1]):
                raise Unmodelled("it combines complex numbers by more than a sum")
            return _by_part(site, real)
        if any(isinstance(v, Complex) for v in site.values) and name in _ELEMENTWISE:
            raise Unmodelled("it is a function of complex numbers")
    if real is None or name in _ELEMENTWISE:
        raise Unmodelled("")
    return real(site)


# Real lowerings of these take no pairs: calls instead.
_ELEMENTWISE = frozenset(
    {
        *("cbrt", "cosine", "divide", "exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "power"),
        *("rsqrt", "sign", "sine", "sqrt", "tan", "tanh", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh"),
        *("atan2", "conj", "is_inf", "maximum", "minimum", "square", "constant_like", "batch_norm_inference"),
    }
)


def _by_part(site: Site, real: Lowering) -> Value:
    found: list[list[Value]] = []
    outs = [group[0] for group in site.carried]
    for which in ("re", "im"):
        values = [getattr(v, which) if isinstance(v, Complex) else v for v in site.values]
        value = real(Site(site.op, values, site.reader, outs))
        found.append(value if isinstance(value, list) else [value])  # type: ignore[list-item]
    pairs: list[Value] = [Complex(a, b) for a, b in zip(*found, strict=True) if isinstance(a, Node) and isinstance(b, Node)]
    return pairs[0] if len(site.op.results) == 1 else pairs


def parts(x: Node) -> Complex:
    """[..., 2] taken apart."""
    shape = x.shape[:-1]
    return Complex(reshape(slice_(x, -1, 0, 1), shape), reshape(slice_(x, -1, 1, 2), shape))


def joined(z: Complex) -> Node:
    """A complex value as [..., 2], which `torch.view_as_complex` reads."""
    cuts = [n.src[0] if isinstance(n.op, Reshape) else n for n in (z.re, z.im)]
    whole = cuts[0].src[0] if isinstance(cuts[0].op, Slice) else None
    if whole is not None and whole.shape == (*z.shape, 2) and parts(whole) == z:
        return whole
    return Node(Concat(len(z.shape)), reshape(z.re, (*z.shape, 1)), reshape(z.im, (*z.shape, 1)))


def pair(v: Value) -> Complex:
    """A value as a complex one: a real one has no imaginary part."""
    if isinstance(v, Node):
        return Complex(v, broadcast(const(0, v.dtype), v.shape))
    assert isinstance(v, Complex)
    return v


def _constant(site: Site) -> Value:
    out = _component(site)
    re, im = complex_elements(site.op, out)
    scalar = TensorType(out.dtype, ())
    made = [Node(Const(Literal(scalar if x.dim() < len(out.shape) else out, x))) for x in (re, im)]
    return Complex(*(broadcast(n, out.shape) for n in made))


def _component(site: Site) -> TensorType:
    return site.carried[0][0]


def _multiply(site: Site) -> Value:
    a, b = (pair(v) for v in site.values)
    return Complex(
        map_("subtract", map_("multiply", a.re, b.re), map_("multiply", a.im, b.im)),
        map_("add", map_("multiply", a.re, b.im), map_("multiply", a.im, b.re)),
    )


def _abs(site: Site) -> Value:
    """The larger part times sqrt(1 + the parts' ratio squared), which neither overflows nor underflows on the way."""
    z = pair(site.values[0])
    sizes = [map_("abs", x) for x in (z.re, z.im)]
    large, small = map_("maximum", *sizes), map_("minimum", *sizes)
    zero, one = const(0.0, z.re.dtype), const(1.0, z.re.dtype)
    ratio = Node(Select(), map_("equal", large, zero), broadcast(zero, z.shape), map_("divide", small, large))
    length = map_("multiply", large, map_("sqrt", map_("add", one, map_("multiply", ratio, ratio))))
    endless = map_("or", map_("is_inf", z.re), map_("is_inf", z.im))
    return Node(Select(), endless, broadcast(const(float("inf"), z.re.dtype), z.shape), length)


def _compare(site: Site) -> Value:
    a, b = (pair(v) for v in site.values)
    fn, both = ("equal", "and") if site.op.keyword("comparison_direction") == "EQ" else ("not_equal", "or")
    return map_(both, map_(fn, a.re, b.re), map_(fn, a.im, b.im))


def _convert(site: Site) -> Value:
    z, out = pair(site.values[0]), _component(site)
    if len(site.carried[0]) == 1:
        return convert(z.re, out.dtype)
    return Complex(convert(z.re, out.dtype), convert(z.im, out.dtype))


def _iota(site: Site) -> Value:
    out = _component(site)
    return pair(Node(Iota(out.dtype, out.shape, site.op.integer("iota_dimension"))))


def _dot(site: Site) -> Value:
    """Rank 1 or 2 each: the last axis of a is contracted with the first of b."""
    a = site.values[0]
    first = a.re if isinstance(a, Complex) else a
    assert isinstance(first, Node)
    return _product(site, ([], []), ([len(first.shape) - 1], [0]))


def _dot_general(site: Site) -> Value:
    return _product(site, *dot_dimensions(site))


def _product(site: Site, batch: Pair, contracted: Pair) -> Value:
    """One real product: of [re, im] along a contracted axis by [[re, im], [-im, re]], the parts of the result side by side."""
    a, b = site.values
    out = _component(site).dtype

    def times(x: Node, y: Node) -> Node:
        return product(x, y, batch, contracted, out, None)

    if isinstance(a, Complex) and isinstance(b, Complex):
        if not contracted[0]:
            return Complex(
                map_("subtract", times(a.re, b.re), times(a.im, b.im)), map_("add", times(a.re, b.im), times(a.im, b.re))
            )
        left, right = contracted[0][0], contracted[1][0]
        whole = Node(Concat(left), a.re, a.im)
        re, im = Node(Concat(right), b.re, map_("negate", b.im)), Node(Concat(right), b.im, b.re)
        return parts(times(whole, joined(Complex(re, im))))
    if isinstance(b, Complex):
        assert isinstance(a, Node)
        return parts(times(a, joined(b)))
    assert isinstance(a, Complex)
    assert isinstance(b, Node)
    return Complex(times(a.re, b), times(a.im, b))


_LOWERINGS: dict[str, Callable[[Site], Value]] = {
    "abs": _abs,
    "compare": _compare,
    "complex": lambda site: Complex(*site.nodes),
    "constant": _constant,
    "convert": _convert,
    "dot": _dot,
    "dot_general": _dot_general,
    "imag": lambda site: pair(site.values[0]).im,
    "dynamic_iota": _iota,
    "iota": _iota,
    "multiply": _multiply,
    "real": lambda site: pair(site.values[0]).re,
}
