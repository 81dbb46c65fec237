"""Elementwise arithmetic read as a polynomial, so that one comparison of coefficients recognises every way to write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.dtype import F32, F64, DType
from tilewright.ir.constant import scalar_value
from tilewright.ir.graph import Node
from tilewright.ir.ops import Convert, Map

Polynomial = Mapping[tuple[int, ...], float]
"""Coefficient of each monomial, which is given by the exponents of the variables."""

ARITHMETIC = ("add", "subtract", "multiply", "divide", "negate", "power")
MAX_DEGREE = 4
MAX_NODES = 16


def arithmetic(node: Node) -> bool:
    """Tell whether `node` adds, multiplies or raises floats to a power, or rounds them to another float of 16 bits or more."""
    if isinstance(node.op, Convert):
        return all(d.is_float and d.bits >= 16 for d in (node.dtype, node.src[0].dtype))
    return isinstance(node.op, Map) and node.op.fn in ARITHMETIC and node.dtype.is_float


def polynomial(root: Node, variables: Sequence[Node], inside: list[Node], max_nodes: int = MAX_NODES) -> Polynomial | None:
    """`root` as a polynomial in `variables`, or None if it is none (of degree 4 and `max_nodes` operations at most).

    All have one shape; constants are numbers; rounding is not part of the polynomial. The nodes that stand between the
    variables and the root, the root included, are added to `inside`.
    """
    reader = _Reader(variables, max_nodes)
    try:
        found = reader.read(root)
    except _NoPolynomialError:
        return None
    inside.extend(reader.inside)
    return found


def agree(found: Polynomial, ideal: Polynomial, tolerance: float) -> bool:
    """Tell whether the monomials are the same and each coefficient is within `tolerance` of the ideal one, relative to it."""
    return found.keys() == ideal.keys() and all(abs(found[k] - ideal[k]) <= tolerance * abs(ideal[k]) for k in ideal)


def rounding_tolerance(dtype: DType) -> float:
    """The relative error that rounding may give a constant of type `dtype`, or the product of two: two of its epsilons.

    A constant of an f64 program is often an f32 one made wider, so f64 is given f32's tolerance.
    """
    return 2 * (F32 if dtype is F64 else dtype).epsilon


class _NoPolynomialError(Exception):
    """Something on the way is neither arithmetic nor a variable nor a number."""


class _Reader:
    def __init__(self, variables: Sequence[Node], max_nodes: int) -> None:
        self.inside: list[Node] = []
        self._max_nodes = max_nodes
        self._shape = variables[0].shape
        self._one = (0,) * len(variables)
        self._known: dict[Node, Polynomial] = {}
        for i, v in enumerate(variables):
            self._known[v] = {tuple(int(i == j) for j in range(len(variables))): 1.0}

    def read(self, node: Node) -> Polynomial:
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = self._read(node)
        return found

    def _read(self, node: Node) -> Polynomial:
        value = scalar_value(node)
        if value is not None:
            return {self._one: float(value)} if value else {}
        if not arithmetic(node) or node.shape != self._shape or len(self.inside) >= self._max_nodes:
            raise _NoPolynomialError
        self.inside.append(node)
        args = [self.read(s) for s in node.src]
        return self._apply(node.op.fn, args) if isinstance(node.op, Map) else args[0]

    def _apply(self, fn: str, args: list[Polynomial]) -> Polynomial:
        if fn == "negate":
            return _scaled(args[0], -1.0)
        a, b = args
        if fn == "add":
            return _sum(a, b)
        if fn == "subtract":
            return _sum(a, _scaled(b, -1.0))
        if fn == "multiply":
            return _product(a, b)
        number = b.get(self._one)
        if number is None or len(b) > 1:
            raise _NoPolynomialError
        if fn == "divide":
            return _scaled(a, 1.0 / number)
        return self._power(a, number)

    def _power(self, base: Polynomial, exponent: float) -> Polynomial:
        if exponent not in range(1, MAX_DEGREE + 1):
            raise _NoPolynomialError
        result: Polynomial = {self._one: 1.0}
        for _ in range(int(exponent)):
            result = _product(result, base)
        return result


def _scaled(a: Polynomial, factor: float) -> Polynomial:
    return {k: c * factor for k, c in a.items()}


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    total = {k: a.get(k, 0.0) + b.get(k, 0.0) for k in (*a, *b)}
    return {k: c for k, c in total.items() if c}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    total: dict[tuple[int, ...], float] = {}
    for ka, ca in a.items():
        for kb, cb in b.items():
            k = tuple(i + j for i, j in zip(ka, kb, strict=True))
            if sum(k) > MAX_DEGREE:
                raise _NoPolynomialError
            total[k] = total.get(k, 0.0) + ca * cb
    return {k: c for k, c in total.items() if c}
