"""ATen's elementwise operators: arithmetic, functions, comparisons, selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from tilewright.dtype import F16, PRED
from tilewright.frontends.torch.registry import Operand, Scalar, Site, aten
from tilewright.frontends.torch.types import common_dtype, converted, mapped, mapped_wide, rounded
from tilewright.ir.build import broadcast, map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Select

Rounding = Literal["trunc", "floor"]

# Functions of a float; an integer operand is converted to the result's float type first.
_FLOAT_FUNCTIONS = {
    "acos": "acos",
    "acosh": "acosh",
    "asin": "asin",
    "asinh": "asinh",
    "atan": "atan",
    "atanh": "atanh",
    "cos": "cosine",
    "cosh": "cosh",
    "erf": "erf",
    "erfc": "erfc",
    "exp": "exponential",
    "expm1": "exponential_minus_one",
    "log": "log",
    "log1p": "log_plus_one",
    "rsqrt": "rsqrt",
    "sigmoid": "logistic",
    "silu": "silu",
    "sin": "sine",
    "sinh": "sinh",
    "sqrt": "sqrt",
    "tan": "tan",
    "tanh": "tanh",
}
_SAME_TYPE_FUNCTIONS = {"abs": "abs", "neg": "negate", "relu": "relu"}
_ROUNDINGS = {"ceil": "ceil", "floor": "floor", "round": "round_half_even", "trunc": "trunc"}
_COMPARISONS = {
    "eq": "equal",
    "ge": "greater_equal",
    "gt": "greater",
    "le": "less_equal",
    "lt": "less",
    "ne": "not_equal",
}
# Tests of a float, and the comparison of an integer with itself that says the same.
_TESTS = {"isnan": ("is_nan", "not_equal"), "isinf": ("is_inf", "not_equal"), "isfinite": ("is_finite", "equal")}
_LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}
_BINARY = {
    "atan2": ("atan2", ("default",)),
    "bitwise_and": ("and", ("Tensor", "Scalar", "Scalar_Tensor")),
    "bitwise_left_shift": ("shift_left", ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    "bitwise_or": ("or", ("Tensor", "Scalar", "Scalar_Tensor")),
    "bitwise_xor": ("xor", ("Tensor", "Scalar", "Scalar_Tensor")),
    "fmod": ("remainder", ("Tensor", "Scalar")),
    "__lshift__": ("shift_left", ("Tensor", "Scalar")),
    "maximum": ("maximum", ("default",)),
    "minimum": ("minimum", ("default",)),
}


def _select(pred: Node, on_true: Node, on_false: Node) -> Node:
    return Node(Select(), pred, on_true, on_false)


def _register_unary() -> None:
    def function(fn: str) -> Callable[[Site, Node], Node]:
        return lambda site, self: mapped(fn, site.dtype, self)

    def rounding(fn: str) -> Callable[[Site, Node], Node]:
        return lambda _, self: map_(fn, self) if self.dtype.is_float else self

    def test(of_float: str, of_integer: str) -> Callable[[Site, Node], Node]:
        return lambda _, self: map_(of_float, self) if self.dtype.is_float else map_(of_integer, self, self)

    aten("logical_not.default")(lambda _, self: mapped("not", PRED, self))  # whether it is zero
    aten("bitwise_not.default")(lambda _, self: map_("not", self))
    for name, fns in _TESTS.items():
        aten(f"{name}.default")(test(*fns))
    for name, fn in {**_FLOAT_FUNCTIONS, **_SAME_TYPE_FUNCTIONS}.items():
        aten(f"{name}.default")(function(fn))
    for name, fn in _ROUNDINGS.items():
        aten(f"{name}.default")(rounding(fn))


def _register_binary() -> None:
    def in_result_type(fn: str) -> Callable[[Site, Operand, Operand], Node]:
        return lambda site, self, other: mapped(fn, site.dtype, self, other)

    def in_common_type(fn: str) -> Callable[[Site, Operand, Operand], Node]:
        return lambda _, self, other: mapped(fn, common_dtype(self, other), self, other)

    def of_truth(fn: str) -> Callable[[Site, Node, Node], Node]:
        return lambda _, self, other: mapped(fn, PRED, self, other)

    for name, (fn, overloads) in _BINARY.items():
        aten(*(f"{name}.{overload}" for overload in overloads))(in_result_type(fn))
    for name, fn in _COMPARISONS.items():
        aten(f"{name}.Tensor", f"{name}.Scalar")(in_common_type(fn))
    for name, fn in _LOGICAL.items():
        aten(f"{name}.default")(of_truth(fn))


_register_unary()
_register_binary()


@aten("bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "bitwise_right_shift.Scalar_Tensor")
@aten("__rshift__.Tensor", "__rshift__.Scalar")
def shift_right(site: Site, self: Operand, other: Operand) -> Node:
    """self's bits moved down by other: zeros come in above an unsigned number, the sign above a signed one."""
    fn = "shift_right_logical" if site.dtype.kind == "uint" else "shift_right_arithmetic"
    return mapped(fn, site.dtype, self, other)


@aten("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(site: Site, self: Operand, other: Operand) -> Node:
    """The remainder of the quotient rounded down, with other's sign; a zero of floats has self's."""
    d = site.compute_dtype
    if d.is_integer:
        return mapped("modulo", d, self, other)
    a, b = converted(converted(self, site.dtype), d), converted(converted(other, site.dtype), d)
    rest, zero = map_("remainder", a, b), converted(0, d)
    crossed = map_("and", map_("not_equal", rest, zero), map_("not_equal", map_("less", rest, zero), map_("less", b, zero)))
    return converted(_select(crossed, map_("add", rest, b), rest), site.dtype)


@aten("add.Tensor", "add.Scalar")
def add(site: Site, self: Operand, other: Operand, alpha: Scalar = 1) -> Node:
    """self + alpha * other."""
    return _sum(site, "add", self, other, alpha)


@aten("sub.Tensor", "sub.Scalar")
def sub(site: Site, self: Operand, other: Operand, alpha: Scalar = 1) -> Node:
    """self - alpha * other."""
    return _sum(site, "subtract", self, other, alpha)


@aten("rsub.Tensor", "rsub.Scalar")
def rsub(site: Site, self: Node, other: Operand, alpha: Scalar = 1) -> Node:
    """other - alpha * self."""
    return _sum(site, "subtract", other, self, alpha)


def _sum(site: Site, fn: str, left: Operand, right: Operand, alpha: Scalar) -> Node:
    if alpha == 1:
        return mapped(fn, site.dtype, left, right)
    wide = site.compute_dtype
    # As a whole: the product is not rounded to a narrow float before the sum, though alpha is.
    scaled = mapped("multiply", wide, converted(right, site.dtype), rounded(alpha, site.dtype))
    return converted(mapped(fn, wide, converted(left, site.dtype), scaled), site.dtype)


@aten("mul.Tensor", "mul.Scalar")
def mul(site: Site, self: Operand, other: Operand) -> Node:
    """self * other."""
    return mapped_wide("multiply", site.dtype, self, other)


@aten("div.Tensor", "div.Scalar")
def div(site: Site, self: Operand, other: Operand) -> Node:
    """self / other, a float even of integers."""
    return mapped_wide("divide", site.dtype, self, other)


@aten("reciprocal.default")
def reciprocal(site: Site, self: Node) -> Node:
    """1 / self."""
    return mapped("divide", site.dtype, 1, self)


@aten("div.Tensor_mode", "div.Scalar_mode")
def div_mode(site: Site, self: Operand, other: Operand, *, rounding_mode: Rounding | None = None) -> Node:
    """self / other, rounded toward zero or down."""
    if rounding_mode is None:
        return div(site, self, other)
    if rounding_mode == "floor":
        return floor_divide(site, self, other)
    quotient = mapped("divide", site.compute_dtype, self, other)
    return converted(map_("trunc", quotient), site.dtype) if site.dtype.is_float else quotient


@aten("floor_divide.default", "floor_divide.Scalar")
def floor_divide(site: Site, self: Operand, other: Operand) -> Node:
    """The quotient rounded down; of floats from the exact remainder, as Python's `//`, so that it is right at whole numbers.

    A zero divisor gives what a division gives (integers: -1; torch raises).
    """
    d = site.compute_dtype
    a, b = converted(converted(self, site.dtype), d), converted(converted(other, site.dtype), d)
    remainder = map_("remainder", a, b)
    zero = converted(0, d)
    inexact = map_("not_equal", remainder, zero)
    crossed = map_("not_equal", map_("less", remainder, zero), map_("less", b, zero))
    below = map_("and", inexact, crossed)
    if d.is_integer:
        quotient = map_("divide", a, b)
        return _select(below, map_("subtract", quotient, converted(1, d)), quotient)
    near = map_("divide", map_("subtract", a, remainder), b)
    near = _select(below, map_("subtract", near, converted(1, d)), near)
    down = map_("floor", near)
    off = map_("greater", map_("subtract", near, down), converted(0.5, d))
    whole = _select(off, map_("add", down, converted(1, d)), down)
    whole = _select(map_("equal", near, zero), map_("multiply", map_("divide", a, b), zero), whole)  # a zero has its sign
    return converted(_select(map_("equal", b, zero), map_("divide", a, b), whole), site.dtype)


@aten("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def pow_(site: Site, self: Operand, exponent: Operand) -> Node:
    """self ** exponent; a half is a square root but of f16, which differs at -inf and -0."""
    if site.dtype.is_float and site.dtype is not F16 and exponent in (0.5, -0.5):
        return mapped("sqrt" if exponent == 0.5 else "rsqrt", site.dtype, self)
    return mapped("power", site.dtype, self, exponent)


@aten("frac.default")
def frac(site: Site, self: Node) -> Node:
    """Fraction behind the point, with self's sign; 0 of whole numbers, of -0 too."""
    return map_("subtract", self, map_("trunc", self))


@aten("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other")
def xlogy(site: Site, self: Operand, other: Operand) -> Node:
    """self * log(other), 0 where self is 0 and other a number."""
    d = site.compute_dtype
    x, y = converted(converted(self, site.dtype), d), converted(converted(other, site.dtype), d)
    product = map_("multiply", x, map_("log", y))
    nothing = map_("and", map_("equal", x, converted(0, d)), map_("not", map_("is_nan", y)))
    return converted(_select(nothing, converted(0, d), product), site.dtype)


@aten("lerp.Tensor", "lerp.Scalar")
def lerp(site: Site, self: Node, end: Node, weight: Operand) -> Node:
    """The point between self (at 0) and end (at 1), reckoned from the nearer one."""
    d = site.compute_dtype
    a, b = converted(self, d), converted(end, d)
    way = map_("subtract", b, a)
    if not isinstance(weight, Node):
        if abs(weight) < 0.5:
            return converted(map_("add", a, mapped("multiply", d, way, weight)), site.dtype)
        return converted(map_("subtract", b, mapped("multiply", d, way, 1 - weight)), site.dtype)
    w = converted(weight, d)
    near = map_("add", a, map_("multiply", w, way))
    far = map_("subtract", b, map_("multiply", way, map_("subtract", converted(1, d), w)))
    return converted(_select(map_("less", map_("abs", w), converted(0.5, d)), near, far), site.dtype)


@aten("native_dropout_backward.default")
def dropout_backward(site: Site, grad_output: Node, mask: Node, scale: Scalar) -> Node:
    """grad * mask * scale: integers are multiplied by the mask as such."""
    return mapped("multiply", site.dtype, mapped("multiply", grad_output.dtype, grad_output, mask), scale)


@aten("exp2.default")
def exp2(site: Site, self: Node) -> Node:
    """2 ** self."""
    return mapped("power", site.dtype, 2, self)


@aten("sign.default")
def sign(site: Site, self: Node) -> Node:
    """-1, 0 or 1; unlike StableHLO's sign, 0 for NaN and for -0."""
    if self.dtype is PRED:
        return self
    zero = converted(0, self.dtype)
    above, below = map_("greater", self, zero), map_("less", self, zero)
    return map_("subtract", converted(above, self.dtype), converted(below, self.dtype))


@aten("gelu.default")
def gelu(site: Site, self: Node, *, approximate: str = "none") -> Node:
    """x * Phi(x), by erf or by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return mapped("gelu_tanh" if approximate == "tanh" else "gelu", site.dtype, self)


@aten("leaky_relu.default")
def leaky_relu(site: Site, self: Node, negative_slope: Scalar = 0.01) -> Node:
    """x above 0, else x * slope."""
    d = site.compute_dtype
    x = converted(self, d)
    return converted(_select(map_("greater", x, converted(0, d)), x, mapped("multiply", d, x, negative_slope)), site.dtype)


@aten("elu.default")
def elu(site: Site, self: Node, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> Node:
    """scale * (x above 0, else alpha * (exp(input_scale * x) - 1))."""
    d = site.compute_dtype
    x = converted(self, d)
    below = map_("exponential_minus_one", mapped("multiply", d, x, input_scale))
    below = mapped("multiply", d, below, alpha * scale)
    return converted(_select(map_("greater", x, converted(0, d)), mapped("multiply", d, x, scale), below), site.dtype)


@aten("clamp.default", "clamp.Tensor")
def clamp(site: Site, self: Node, min: Operand | None = None, max: Operand | None = None) -> Node:
    """min(max(x, low), high): the upper bound wins where they cross, and NaN stays, as does a zero at a bound of zero."""
    if min is not None and max is not None and not (site.dtype.is_float and (_is_zero(min, 1) or _is_zero(max, -1))):
        return mapped("clamp", site.dtype, min, self, max)
    x = converted(self, site.dtype)
    if min is not None:
        x = map_("relu", x) if x.dtype.is_float and _is_zero(min, 1) else mapped("maximum", x.dtype, x, min)
    if max is None:
        return x
    if x.dtype.is_float and _is_zero(max, -1):
        return map_("negate", map_("relu", map_("negate", x)))
    return mapped("minimum", x.dtype, x, max)


@aten("hardtanh.default")
def hardtanh(site: Site, self: Node, min_val: Scalar = -1, max_val: Scalar = 1) -> Node:
    """`clamp` between two numbers; an export leaves out those that are the operator's own."""
    return clamp(site, self, min_val, max_val)


def _is_zero(x: Operand, sign: int) -> bool:
    """Tell whether x is the number 0 of that sign, which `maximum` (0) and `minimum` (-0) prefer to a zero of the other."""
    return not isinstance(x, Node) and x == 0 and math.copysign(1, x) == sign


@aten("where.self")
def where(site: Site, condition: Node, self: Operand, other: Operand) -> Node:
    """self where the condition is true, else other."""
    return _select(converted(condition, PRED), converted(self, site.dtype), converted(other, site.dtype))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(site: Site, self: Node, mask: Node, value: Operand) -> Node:
    """The value where the mask is true, else self."""
    return _select(mask, converted(value, site.dtype), self)


@aten("copy.default")
def copy(site: Site, self: Node, src: Node, non_blocking: bool = False) -> Node:
    """src in the type and shape of self."""
    return broadcast(converted(src, site.dtype), site.out.shape)
