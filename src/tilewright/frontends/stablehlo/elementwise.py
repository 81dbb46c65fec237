"""Elementwise operations, constants and conversions of StableHLO, CHLO and MHLO."""

from __future__ import annotations

from tilewright.dtype import BF16, F32, PRED, DType
from tilewright.frontends.stablehlo.module import elements, is_splat, mlir_type
from tilewright.frontends.stablehlo.order import total_order
from tilewright.frontends.stablehlo.registry import Site, Value, lowers
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, convert, map_, reshape
from tilewright.ir.graph import Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import FUNCTIONS, Const, Iota, Select
from tilewright.ir.ops.elementwise import Overflow
from tilewright.ir.types import TensorType

# The graph's functions bear the names that StableHLO and CHLO give them, but for these.
_RENAMED = {"round_nearest_afz": "round_half_away", "round_nearest_even": "round_half_even"}
STANDS_FOR = "tilewright.stands_for"
"""Attribute of an operation that stands for an elementwise one of this name while Shardy partitions the program."""
_COMPARISONS = {
    "EQ": "equal",
    "NE": "not_equal",
    "LT": "less",
    "LE": "less_equal",
    "GT": "greater",
    "GE": "greater_equal",
}


@lowers(*(f"{dialect}.{name}" for dialect in ("stablehlo", "chlo") for name in (*FUNCTIONS, *_RENAMED)))
def _function(site: Site) -> Value:
    """`op a, b -> map fn="op"`; a scalar bound of clamp broadcasts."""
    name = site.op.string(STANDS_FOR, site.op.name.partition(".")[2])
    if name not in FUNCTIONS and name not in _RENAMED:
        raise site.refuse(f"there is no function {name!r}")
    args = site.nodes
    if name.startswith("shift_") and not _shiftable(name, args[0].dtype):
        raise Unmodelled(f"it shifts {args[0].dtype}")
    if name == "clamp" and args[1].dtype is PRED:
        return map_("minimum", map_("maximum", args[1], args[0]), args[2])
    return map_(_RENAMED.get(name, name), *args)


def _shiftable(name: str, dtype: DType) -> bool:
    """Tell whether a shift may be done in the type's storage: not of 4-bit codes, nor a sign-filling one of an unsigned
    type."""
    return dtype.bits > 4 and not (name == "shift_right_arithmetic" and dtype.kind == "uint")


@lowers("chlo.square")
def _square(site: Site) -> Value:
    (x,) = site.nodes
    return map_("multiply", x, x)


@lowers("stablehlo.compare")
def _compare(site: Site) -> Value:
    """A total order of floats tells -0 from 0 and NaNs apart: that of their bits, read as integers."""
    a, b = site.nodes
    direction = site.op.keyword("comparison_direction")
    if a.dtype.is_float and site.op.keyword("compare_type") == "TOTALORDER":
        source, pred = mlir_type(a.tensor), mlir_type(site.out)
        lines = total_order("%out", "%a", "%b", direction, source)
        text = f"func.func @main(%a: {source}, %b: {source}) -> {pred} {{\n{lines}\nreturn %out : {pred}\n}}"
        (result,) = site.reader.expand(text, [a, b], site.op)
        return result
    return map_(_COMPARISONS[direction], a, b)


@lowers("stablehlo.select")
def _select(site: Site) -> Value:
    return Node(Select(), *site.nodes)


@lowers("stablehlo.convert", "stablehlo.real", "mhlo.convert")
def _convert(site: Site) -> Value:
    (x,) = site.nodes
    return convert(x, site.out.dtype, overflow_to(site.out.dtype))


@lowers("stablehlo.imag")
def _imag(site: Site) -> Value:
    """Imaginary part of real numbers: zeros."""
    return broadcast(const(0, site.out.dtype), site.out.shape)


def overflow_to(dtype: DType) -> Overflow:
    """XLA's rule past the range of `dtype`: an 8-bit float becomes infinite or NaN, integers keep their low bits."""
    return "ieee" if dtype.is_float and dtype.bits == 8 else "wrap"


@lowers("stablehlo.reduce_precision")
def _reduce_precision(site: Site) -> Value:
    """Rounding f32 to 8 exponent and 7 mantissa bits is what a round trip through bf16 does."""
    (x,) = site.nodes
    kept = (site.op.integer("exponent_bits"), site.op.integer("mantissa_bits"))
    if x.dtype is F32 and kept == (8, 23):
        return x
    if x.dtype is F32 and kept == (8, 7):
        return convert(convert(x, BF16), F32)
    raise Unmodelled(f"it keeps {kept[0]} and {kept[1]} bits of {x.dtype}")


@lowers("stablehlo.constant", "chlo.constant", "mhlo.constant")
def _constant(site: Site) -> Value:
    out = site.out
    attribute = site.op.attribute("value")
    value = elements(attribute, out, site.reader.asm, site.op.where)
    if not is_splat(attribute):
        return Node(Const(Literal(out, value, site.op.place.name)))
    return broadcast(Node(Const(Literal(TensorType(out.dtype, ()), value))), out.shape)


@lowers("chlo.constant_like")
def _constant_like(site: Site) -> Value:
    out = site.out
    return broadcast(const(site.op.number("value"), out.dtype), out.shape)


@lowers("stablehlo.iota", "stablehlo.dynamic_iota")
def _iota(site: Site) -> Value:
    return Node(Iota(site.out.dtype, site.out.shape, site.op.integer("iota_dimension")))


@lowers("stablehlo.batch_norm_inference")
def _batch_norm(site: Site) -> Value:
    """(x - mean) / sqrt(variance + epsilon) * scale + offset along one axis (Ioffe and Szegedy 2015, arXiv 1502.03167)."""
    x, scale, offset, mean, variance = site.nodes
    axis = site.op.integer("feature_index")
    shape = tuple(d if a == axis else 1 for a, d in enumerate(x.shape))

    def laid(v: Node) -> Node:
        return reshape(v, shape)

    epsilon = const(site.op.number("epsilon"), x.dtype)
    deviation = map_("sqrt", map_("add", laid(variance), epsilon))
    normal = map_("divide", map_("subtract", x, laid(mean)), deviation)
    return map_("add", map_("multiply", normal, laid(scale)), laid(offset))


def elementwise_target(target: str, operands: int) -> str | None:
    """The function that a custom call like `mhlo.erf` names, if the graph has it, of so many operands."""
    dialect, _, name = target.partition(".")
    return name if dialect in ("mhlo", "chlo") and name in FUNCTIONS and FUNCTIONS[name].arity == operands else None
