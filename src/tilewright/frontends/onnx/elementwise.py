"""ONNX's elementwise operators, casts and selections."""

from __future__ import annotations

from tilewright.dtype import F32, F64, PRED, S32, DType
from tilewright.frontends.onnx.node import Converter, OpNode, converts
from tilewright.frontends.onnx.tensors import element_type
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, convert, map_, reshape
from tilewright.ir.graph import Node
from tilewright.ir.ops import Select
from tilewright.ir.types import broadcast_shapes

# operator: (function of `map`, first and last version of the operator with this meaning)
_DIRECT = {
    "Abs": ("abs", 6, 13),
    "Acos": ("acos", 7, 22),
    "Acosh": ("acosh", 9, 22),
    "Add": ("add", 7, 14),
    "And": ("and", 7, 7),
    "Asin": ("asin", 7, 22),
    "Asinh": ("asinh", 9, 22),
    "Atan": ("atan", 7, 22),
    "Atanh": ("atanh", 9, 22),
    "BitwiseAnd": ("and", 18, 18),
    "BitwiseNot": ("not", 18, 18),
    "BitwiseOr": ("or", 18, 18),
    "BitwiseXor": ("xor", 18, 18),
    "Ceil": ("ceil", 6, 13),
    "Cos": ("cosine", 7, 22),
    "Cosh": ("cosh", 9, 22),
    "Div": ("divide", 7, 14),
    "Equal": ("equal", 7, 19),
    "Erf": ("erf", 9, 13),
    "Exp": ("exponential", 6, 13),
    "Floor": ("floor", 6, 13),
    "Greater": ("greater", 7, 13),
    "GreaterOrEqual": ("greater_equal", 12, 16),
    "IsNaN": ("is_nan", 9, 20),
    "Less": ("less", 7, 13),
    "LessOrEqual": ("less_equal", 12, 16),
    "Log": ("log", 6, 13),
    "Mul": ("multiply", 7, 14),
    "Neg": ("negate", 6, 13),
    "Not": ("not", 1, 1),
    "Or": ("or", 7, 7),
    "Relu": ("relu", 6, 14),
    "Round": ("round_half_even", 11, 22),
    "Sigmoid": ("logistic", 6, 13),
    "Sign": ("sign", 9, 13),
    "Sin": ("sine", 7, 22),
    "Sinh": ("sinh", 9, 22),
    "Sqrt": ("sqrt", 6, 13),
    "Sub": ("subtract", 7, 14),
    "Tan": ("tan", 7, 22),
    "Tanh": ("tanh", 6, 13),
    "Xor": ("xor", 7, 7),
}


# Of these, versions before 7 repeat the second operand along axes of the first only where `broadcast` says so.
_LAID_ALONG = frozenset({"Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Sub", "Xor"})


def _direct(function: str) -> Converter:
    return lambda op: map_(function, *(op.input(i) for i in range(len(op.sources))))


def _laid_along(op: OpNode, x: Node, y: Node) -> Node:
    """y as versions before 7 lay it over x: the same shape, or axes of x from `axis` on (its last ones by default)."""
    if not op.integer("broadcast", 0):
        if x.shape != y.shape:
            raise op.malformed(f"{op.op_type} of {x.type} and {y.type} without broadcast=1")
        return y
    axis = op.integer("axis", len(x.shape) - len(y.shape))
    axis += len(x.shape) if axis < 0 else 0
    if not 0 <= axis <= len(x.shape) - len(y.shape):
        raise op.malformed(f"{op.op_type} of {x.type} and {y.type} from axis {axis}")
    return reshape(y, (*y.shape, *[1] * (len(x.shape) - axis - len(y.shape))))


def _direct_laid_along(function: str) -> Converter:
    return lambda op: map_(function, op.input(0), _laid_along(op, op.input(0), op.input(1)))


for _name, (_function, _since, _until) in _DIRECT.items():
    converts(_name, 1 if _since == 6 else _since, _until)(_direct(_function))
    if _name in _LAID_ALONG:
        converts(_name, 1, 6)(_direct_laid_along(_function))


def _folded(function: str) -> Converter:
    def convert_all(op: OpNode) -> Node:
        total = op.input(0)
        for i in range(1, len(op.sources)):
            total = map_(function, total, op.input(i))
        return total

    return convert_all


converts("Max", 1, 13)(_folded("maximum"))
converts("Min", 1, 13)(_folded("minimum"))
converts("Sum", 1, 13)(_folded("add"))


@converts("Mean", 1, 13)
def _mean(op: OpNode) -> Node:
    total = _folded("add")(op)
    assert isinstance(total, Node)
    return map_("divide", total, const(len(op.sources), total.dtype))


@converts("Reciprocal", 1, 13)
def _reciprocal(op: OpNode) -> Node:
    x = op.input(0)
    return map_("divide", const(1, x.dtype), x)


@converts("Softplus", 1, 22)
def _softplus(op: OpNode) -> Node:
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), which does not overflow."""
    x = op.input(0)
    tail = map_("log_plus_one", map_("exponential", map_("negate", map_("abs", x))))
    return map_("add", map_("relu", x), tail)


@converts("Gelu", 20, 20)
def _gelu(op: OpNode) -> Node:
    form = op.text("approximate", "none")
    if form not in ("none", "tanh"):
        raise Unmodelled(f"approximate={form!r}")
    return map_("gelu" if form == "none" else "gelu_tanh", op.input(0))


_F32_HUNDREDTH = 0.009999999776482582  # attributes are f32, their defaults too


@converts("LeakyRelu", 1, 16)
def _leaky_relu(op: OpNode) -> Node:
    return leaky_relu(op.input(0), const(op.real("alpha", _F32_HUNDREDTH), op.input(0).dtype))


@converts("PRelu", 7, 16)
def _prelu(op: OpNode) -> Node:
    return leaky_relu(op.input(0), op.input(1))


def leaky_relu(x: Node, slope: Node) -> Node:
    """x, times the slope where it is below 0."""
    return Node(Select(), map_("less", x, const(0, x.dtype)), map_("multiply", x, slope), x)


@converts("Celu", 12, 28)
def _celu(op: OpNode) -> Node:
    """max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0)."""
    x = op.input(0)
    alpha, zero = const(op.real("alpha", 1.0), x.dtype), const(0, x.dtype)
    bent = map_("multiply", alpha, map_("exponential_minus_one", map_("divide", x, alpha)))
    return map_("add", map_("relu", x), map_("minimum", bent, zero))


_F32_FIFTH = 0.20000000298023224


@converts("HardSigmoid", 1, 22)
def _hard_sigmoid(op: OpNode) -> Node:
    return hard_sigmoid(op.input(0), op.real("alpha", _F32_FIFTH), op.real("beta", 0.5))


def hard_sigmoid(x: Node, alpha: float, beta: float) -> Node:
    """alpha * x + beta between 0 and 1."""
    line = map_("add", map_("multiply", x, const(alpha, x.dtype)), const(beta, x.dtype))
    return map_("clamp", const(0, x.dtype), line, const(1, x.dtype))


@converts("Swish", 24, 24)
def _swish(op: OpNode) -> Node:
    return swish(op.input(0), op.real("alpha", 1.0))


def swish(x: Node, alpha: float) -> Node:
    """x * logistic(alpha * x)."""
    if alpha == 1.0:
        return map_("silu", x)
    return map_("multiply", x, map_("logistic", map_("multiply", x, const(alpha, x.dtype))))


@converts("Clip", 1, 13)
def _clip(op: OpNode) -> Node:
    x = op.input(0)
    low, high = op.optional(1), op.optional(2)
    if low is None and op.has("min"):
        low = const(op.real("min"), x.dtype)
    if high is None and op.has("max"):
        high = const(op.real("max"), x.dtype)
    x = x if low is None else map_("maximum", x, low)
    return x if high is None else map_("minimum", x, high)


@converts("Mod", 10, 28)
def _mod(op: OpNode) -> Node:
    return map_("remainder" if op.integer("fmod", 0) else "modulo", op.input(0), op.input(1))


@converts("BitShift", 11, 28)
def _bit_shift(op: OpNode) -> Node:
    x, by = op.input(0), op.input(1)
    direction = op.text("direction")
    if direction not in ("LEFT", "RIGHT"):
        raise Unmodelled(f"direction={direction!r}")
    if direction == "LEFT":
        return map_("shift_left", x, by)
    return map_("shift_right_arithmetic" if x.dtype.kind == "int" else "shift_right_logical", x, by)


@converts("Pow", 1, 15)
def _pow(op: OpNode) -> Node:
    """The result has the base's type; a fractional exponent of an integer is taken in f64."""
    base, exponent = op.input(0), op.input(1)
    if op.version < 7:
        exponent = _laid_along(op, base, exponent)
    if base.dtype.is_integer and (exponent.dtype.is_float or exponent.dtype.kind == "int"):
        if exponent.dtype.is_integer and base.dtype.bits > 32:
            return map_("power", base, convert(exponent, base.dtype))
        return convert(map_("power", convert(base, F64), convert(exponent, F64)), base.dtype)
    if base.dtype is F32 and exponent.dtype in (F64,):
        return convert(map_("power", convert(base, F64), exponent), F32)
    return map_("power", base, convert(exponent, base.dtype))


@converts("IsInf", 10, 20)
def _is_inf(op: OpNode) -> Node:
    x = op.input(0)
    negative, positive = op.integer("detect_negative", 1), op.integer("detect_positive", 1)
    infinite = map_("is_inf", x)
    zero = const(0, x.dtype)
    if not positive:
        infinite = map_("and", infinite, map_("less", x, zero))
    if not negative:
        infinite = map_("and", infinite, map_("greater", x, zero))
    return infinite


@converts("Where", 9, 16)
def _where(op: OpNode) -> Node:
    return Node(Select(), op.input(0), op.input(1), op.input(2))


@converts("Cast", 6, 28)
def _cast(op: OpNode) -> Node:
    return cast_to(op, op.input(0), element_type(op.integer("to"), op.where))


@converts("CastLike", 15, 25)
def _cast_like(op: OpNode) -> Node:
    return cast_to(op, op.input(0), op.input(1).dtype)


def cast_to(op: OpNode, x: Node, target: DType) -> Node:
    """ONNX's cast: integers wrap; to an 8-bit float `saturate` decides; to pred, anything but 0 is true.

    A float past the range of a 4-bit integer wraps too, as in onnx's own tests; past a wider one it saturates (ONNX leaves
    that open).

    Raises:
        Unmodelled: Tilewright lacks the type.
    """
    if target.kind == "opaque":
        raise Unmodelled("it casts to a type that Tilewright lacks")
    if target.is_float and target.bits == 8:
        return convert(x, target, "saturate" if op.integer("saturate", 1) else "ieee")
    wraps = x.dtype.is_float and target.is_integer and target.bits == 4
    return convert(convert(x, S32) if wraps else x, target)


@converts("Dropout", 7, 22)
def _dropout(op: OpNode) -> list[Node | None]:
    """The identity, unless it is asked to train."""
    training = op.optional(2)
    if training is not None:
        value = op.known(training)
        if value is None or bool(value.any()):
            raise Unmodelled("it is told to train, or may be")
    x = op.input(0)
    return [x, broadcast(const(True, PRED), x.shape) if op.wants(1) else None]


@converts("Identity", 1, 25)
def _identity(op: OpNode) -> Node:
    return op.input(0)


@converts("Expand", 8, 13)
def _expand(op: OpNode) -> Node:
    x = op.input(0)
    shape = tuple(op.known_ints(1))
    return broadcast(x, broadcast_shapes(x.shape, shape, where=op.where))
