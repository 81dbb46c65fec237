"""Activations: the arithmetic that exporters and XLA write for gelu, silu, logistic, relu and clamp becomes that function.

A product such as 0.5 * x * (1 + erf(x / sqrt(2))) is read as a polynomial in x and E = erf(…), so that any order, grouping and
distribution of it is one case. A constant may differ from its ideal value by what rounding it to the type explains
(`rounding_tolerance`); further off, the rule says so and leaves the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tilewright.ir.build import convert, map_
from tilewright.ir.constant import scalar_like, scalar_value, scaling, unrounded
from tilewright.ir.graph import Node
from tilewright.ir.ops import Map
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.ir.polynomial import Polynomial, agree, arithmetic, polynomial, rounding_tolerance
from tilewright.ir.shown import op_name

ARGUMENT_OFF = 0.02  # a constant this near its ideal value was meant to be it
DEPTH = 3  # operations from an activation's last to its inner function, at most
CANDIDATES = 10  # values looked at for x, and operations that make the inner function's argument of it, at most


@dataclass(frozen=True)
class Form:
    """One way to write an activation: `outer`, in x and E, where E = `inner` of `argument`, in x."""

    result: str
    inner: str
    argument: Polynomial
    outer: Polynomial


_HALF_ROOT = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2 / math.pi)  # Hendrycks and Gimpel 2016 (arXiv 1606.08415), as is 0.044715
_TANH_ARGUMENT = {(1,): _TANH_SCALE, (3,): 0.044715 * _TANH_SCALE}
_HALF_X_TIMES_ONE_PLUS_E = {(1, 0): 0.5, (1, 1): 0.5}

_WRITTEN = (
    Form("gelu", "erf", {(1,): _HALF_ROOT}, _HALF_X_TIMES_ONE_PLUS_E),
    Form("gelu", "erfc", {(1,): -_HALF_ROOT}, {(1, 1): 0.5}),
    Form("gelu_tanh", "tanh", _TANH_ARGUMENT, _HALF_X_TIMES_ONE_PLUS_E),
    Form("gelu_tanh", "logistic", {k: 2 * c for k, c in _TANH_ARGUMENT.items()}, {(1, 1): 1.0}),
    Form("silu", "logistic", {(1,): 1.0}, {(1, 1): 1.0}),
    Form("silu", "tanh", {(1,): 0.5}, _HALF_X_TIMES_ONE_PLUS_E),
    Form("logistic", "tanh", {(1,): 0.5}, {(0, 0): 0.5, (0, 1): 0.5}),
)


def _mirrored(form: Form) -> Form:
    """The same of -x under an odd function: erf(-u) is -erf(u)."""
    argument = {k: -c for k, c in form.argument.items()}
    return Form(form.result, form.inner, argument, {(x, e): c * (-1) ** e for (x, e), c in form.outer.items()})


FORMS = (*_WRITTEN, *(_mirrored(f) for f in _WRITTEN if f.inner in ("erf", "tanh")))
_INNER = frozenset(f.inner for f in FORMS)
_RESULTS = frozenset(f.result for f in FORMS)


@rule(Pat(Map, where=lambda n: arithmetic(n) and len(n.src) == 2), stage="recognise")
def arithmetic_around_erf_or_tanh_is_an_activation(m: Match) -> Node | None:
    """0.5 * x * (1 + erf(x / sqrt(2))) -> gelu(x), and the other `FORMS`; a constant factor is left over as a factor.

    Where: float x; nothing else reads what stands in between; every constant within two epsilons of the narrowest type there.
    Exact: no: the function is evaluated in one go, without rounding what stands in between, and with the ideal constants.
    Sources: Hendrycks and Gimpel 2016 (arXiv 1606.08415); Elfwing et al. 2017 (arXiv 1702.03118).
    """
    for inner in _inner_functions(m.node):
        for reading in _readings(inner):
            found = _matched(m, inner, reading)
            if found is not None or m.refusal is not None:
                return found
    return None


def _inner_functions(root: Node) -> list[Node]:
    """The functions at most `DEPTH` operations under the root that some form is built around, nearest first."""
    found: dict[Node, None] = {}
    level = [root]
    for _ in range(DEPTH):
        below = [unrounded(s) for n in level for s in n.src if s.shape == root.shape]
        found.update(dict.fromkeys(s for s in below if isinstance(s.op, Map) and s.op.fn in _INNER))
        level = [s for s in dict.fromkeys(below) if isinstance(s.op, Map) and arithmetic(s)]
    return list(found)


@dataclass(frozen=True)
class Reading:
    """An inner function's argument as a polynomial in x that some forms have, or nearly; `inside` is what it is made by."""

    x: Node
    argument: Polynomial
    inside: list[Node]
    near: list[Form]


_READINGS: WeakKeyDictionary[Node, list[Reading]] = WeakKeyDictionary()


def _readings(inner: Node) -> list[Reading]:
    """The readings of an inner function, for each value x that its argument may be computed from."""
    found = _READINGS.get(inner)
    if found is None:
        found = _READINGS[inner] = [r for x in _variables(inner.src[0]) if (r := _reading(inner, x)) is not None]
    return found


def _reading(inner: Node, x: Node) -> Reading | None:
    assert isinstance(inner.op, Map)
    inside: list[Node] = []
    argument = polynomial(inner.src[0], [x], inside, CANDIDATES)
    if argument is None:
        return None
    near = [f for f in FORMS if f.inner == inner.op.fn and agree(argument, f.argument, ARGUMENT_OFF)]
    return Reading(x, argument, inside, near) if near else None


def _variables(argument: Node) -> Iterator[Node]:
    """Yield candidates for x: values that the argument is computed from by arithmetic."""
    queue, seen = [argument], {argument}
    while queue and len(seen) <= CANDIDATES:
        node = queue.pop(0)
        yield node
        if arithmetic(node):
            fresh = [s for s in dict.fromkeys(node.src) if s not in seen and s.shape == argument.shape]
            seen.update(fresh)
            queue.extend(s for s in fresh if scalar_value(s) is None)


def _matched(m: Match, inner: Node, reading: Reading) -> Node | None:
    """The activation of x that the matched node is, times what is left over; None if it is none, with or without refusal."""
    x, argument = reading.x, reading.argument
    inside: list[Node] = [inner, *reading.inside]
    outer = polynomial(m.node, [x, inner], inside)
    if outer is None:
        return None
    tolerance = max(rounding_tolerance(n.dtype) for n in (m.node, *inside))
    for form in reading.near:
        if outer.keys() != form.outer.keys():
            continue
        factor = next(outer[k] / c for k, c in form.outer.items())
        if not agree({k: c / factor for k, c in outer.items()}, form.outer, tolerance):
            continue
        if agree(argument, form.argument, tolerance):
            return _replaced(m, form, x, inside, factor, tolerance)
        m.refuse(f"its constant {argument[(1,)]:.7g} is not {form.result}'s {form.argument[(1,)]:.7g}")
    return None


def _replaced(m: Match, form: Form, x: Node, inside: list[Node], factor: float, tolerance: float) -> Node | None:
    outside = m.read_outside(n for n in inside if n not in (x, m.node))
    if outside is not None:
        m.refuse(f"the {op_name(outside)} inside this {form.result} is also read elsewhere")
        return None
    wide = max(x.dtype, m.node.dtype, key=lambda d: d.bits)
    result = convert(map_(form.result, convert(x, wide)), m.node.dtype)
    return result if abs(factor - 1) <= tolerance else map_("multiply", result, scalar_like(factor, m.node))


@rule(Pat(Map, where=lambda n: getattr(n.op, "fn", "") == "divide" and n.dtype.is_float), stage="recognise")
def one_plus_exp_of_minus_x_divides_as_logistic(m: Match) -> Node | None:
    """a / (1 + exp(-x)) -> a * logistic(x); 1 / (1 + exp(-x)) -> logistic(x)

    Where: float x; nothing else reads the sum or the exponential. Exact: no: the sum and the exponential are not rounded to
    x's type, and where exp(-x) overflows the quotient 0 may come out as the tiny number it is.
    """
    dividend, divisor = m.node.src
    if m.node.shape != divisor.shape or not arithmetic(divisor):
        return None
    for exponential in divisor.src:
        if not isinstance(exponential.op, Map) or exponential.op.fn != "exponential":
            continue
        x = _negated(exponential.src[0])
        if x is None or dividend is divisor or polynomial(divisor, [exponential], []) != {(0,): 1.0, (1,): 1.0}:
            return None
        outside = m.read_outside((divisor, exponential))
        if outside is not None:
            m.refuse(f"the {op_name(outside)} inside this logistic is also read elsewhere")
            return None
        gate = map_("logistic", x)
        return gate if scalar_value(dividend) == 1 else map_("multiply", dividend, gate)
    return None


def _negated(node: Node) -> Node | None:
    """x, if `node` is -x."""
    for x in dict.fromkeys(node.src):
        if x.shape == node.shape and scalar_value(x) is None and polynomial(node, [x], []) == {(1,): -1.0}:
            return x
    return None


@rule(Pat(Map, where=lambda n: getattr(n.op, "fn", "") in ("multiply", "divide")), stage="recognise")
def factor_left_over_from_an_activation_is_undone(m: Match) -> Node | None:
    """(activation(x) * a) * b -> activation(x), with a * b = 1; a quotient by a number likewise

    Where: a and b are powers of two. Exact: yes, unless the first product overflows or underflows. An exporter that writes the
    0.5 of a gelu last leaves the gelu times two.
    """
    outer = scaling(m.node)
    inner = scaling(m.node.src[outer[0]]) if outer is not None else None
    if outer is None or inner is None or outer[1] * inner[1] != 1 or math.frexp(inner[1])[0] not in (0.5, -0.5):
        return None
    whole = m.node.src[outer[0]].src[inner[0]]
    return whole if op_name(whole) in _RESULTS else None


@rule(Pat(Map, where=lambda n: getattr(n.op, "fn", "") == "maximum" and n.dtype.is_signed), stage="unfuse")
def maximum_with_zero_is_relu(m: Match) -> Node | None:
    """maximum(x, 0) -> relu(x)

    Where: signed x, either side; not -0.0. Once a bound from above has made a clamp of it. Exact: yes, NaN stays NaN in both;
    of 0.0 and -0.0 either may be given.
    """
    found = _with_number(m.node)
    return map_("relu", found[0]) if found is not None and found[1] == 0 and math.copysign(1, found[1]) > 0 else None


@rule(Pat(Map, where=lambda n: getattr(n.op, "fn", "") in ("maximum", "minimum", "relu")), stage="recognise")
def bounds_on_both_sides_are_a_clamp(m: Match) -> Node | None:
    """minimum(maximum(x, a), b) | maximum(minimum(x, b), a) | minimum(relu(x), b) | relu(minimum(x, b)) -> clamp(a, x, b)

    Where: numbers a <= b; nothing else reads the inner bound; relu is one of integers, as of floats it keeps the -0 that clamp
    does not. Exact: yes; both give b where x is above, and keep NaN.
    """
    outer = _bound(m.node)
    inner = _bound(outer[0]) if outer is not None else None
    if outer is None or inner is None or {outer[1], inner[1]} != {"maximum", "minimum"}:
        return None
    low, high = (outer[2], inner[2]) if outer[1] == "maximum" else (inner[2], outer[2])
    dtype = m.node.dtype
    if (low <= dtype.min and dtype.is_integer) or (high >= dtype.max and dtype.is_integer) or math.inf in (-low, high):
        return None  # the bound that changes nothing is dropped instead
    if low > high:
        m.refuse(f"its lower bound {low:g} is above its upper bound {high:g}")
        return None
    if m.read_outside((outer[0],)) is not None:
        m.refuse(f"the {op_name(outer[0])} inside this clamp is also read elsewhere")
        return None
    x = inner[0]
    return map_("clamp", scalar_like(low, x), x, scalar_like(high, x))


def _with_number(node: Node) -> tuple[Node, float] | None:
    """The other operand and the number, of a commuting function with one; the operand has the result's shape."""
    for x, number in (node.src, reversed(node.src)):
        value = scalar_value(number)
        if value is not None and x.shape == node.shape and scalar_value(x) is None:
            return x, value
    return None


def _bound(node: Node) -> tuple[Node, str, float] | None:
    """The value that is bounded, and by which function and number."""
    if not isinstance(node.op, Map):
        return None
    if node.op.fn == "relu" and node.dtype.is_integer:
        return node.src[0], "maximum", 0
    found = _with_number(node) if node.op.fn in ("maximum", "minimum") else None
    return None if found is None else (found[0], node.op.fn, found[1])
