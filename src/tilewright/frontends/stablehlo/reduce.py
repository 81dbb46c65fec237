"""Reductions: over axes, and over sliding windows, by one associative function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from tilewright.dtype import PRED, DType
from tilewright.frontends.stablehlo.module import Block
from tilewright.frontends.stablehlo.registry import Site, Value, lowers
from tilewright.frontends.stablehlo.shape import pad
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import map_, reduce_, slice_
from tilewright.ir.extent import bounds_of, is_open
from tilewright.ir.graph import Node
from tilewright.ir.ops import Const
from tilewright.ir.ops.collective import Fn
from tilewright.ir.ops.norm import Reduction

ASSOCIATIVE: dict[str, Fn] = {
    "stablehlo.add": "add",
    "stablehlo.multiply": "multiply",
    "stablehlo.maximum": "maximum",
    "stablehlo.minimum": "minimum",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}


@lowers("stablehlo.reduce")
def _reduce(site: Site) -> Value:
    """`reduce x, init, f -> f(reduce fn=f, init)`; the last step is dropped where init is f's identity.

    Several operands are several reductions where none looks at another; where they do (argmax), it is a call.
    """
    half = len(site.nodes) // 2
    axes = tuple(sorted(site.op.ints("dimensions")))
    functions = [_combiner(site.op.block(), i, half, site) for i in range(half)]
    results: list[Value] = []
    for fn, x, start in zip(functions, site.nodes[:half], site.nodes[half:], strict=True):
        if fn is None:
            raise Unmodelled("it reduces by a function of its own")
        reduced = reduce_(fn, x, axes) if axes else x
        results.append(reduced if _is_identity(start, fn) else map_(fn, reduced, start))
    return results[0] if half == 1 else results


def _combiner(block: Block, index: int, half: int, site: Site) -> Reduction | None:
    """The associative function that gives result `index` from the two arguments it belongs to, if that is all it does.

    Conversions to a wider float and back around it are allowed: a float reduction is computed wide here anyway.
    """
    operations = block.operations()
    last = operations[-1]
    arguments = block.arguments
    made = {r: op for op in operations[:-1] for r in op.results}
    if len(operations) == 2 and half == 1 and operations[0].name == "func.call":
        call = operations[0]
        if call.operands == arguments and last.operands == call.results:
            return _combiner(site.reader.function(call.string("callee"), call.where).block(), 0, 1, site)
    root = _unconverted(last.operands[index], made)
    op = made.get(root)
    if op is None or op.name not in ASSOCIATIVE:
        return None
    reads = [_unconverted(v, made) for v in op.operands]
    wanted = [arguments[index], arguments[half + index]]
    return ASSOCIATIVE[op.name] if reads in (wanted, wanted[::-1]) else None


def _unconverted(value: Any, made: dict[Any, Any]) -> Any:
    """The value before conversions between floats."""
    while (op := made.get(value)) is not None and op.name == "stablehlo.convert":
        source = op.operands[0]
        if not all(str(v.type.element_type).startswith(("f", "bf")) for v in (value, source)):
            break
        value = source
    return value


def _identity(fn: str, dtype: DType) -> float | int | bool:
    if dtype is PRED:
        return fn in ("and", "multiply", "minimum")
    if fn in ("maximum", "minimum"):
        sign = -1 if fn == "maximum" else 1
        return sign * math.inf if dtype.is_float else int(dtype.min if fn == "maximum" else dtype.max)
    ones = -1 if dtype.kind == "int" else int(dtype.max)
    return {"add": 0, "or": 0, "multiply": 1, "and": ones}[fn]


def _is_identity(start: Node, fn: str) -> bool:
    value = start.op.data.scalar() if isinstance(start.op, Const) else None
    return value is not None and value == _identity(fn, start.dtype)


@lowers("stablehlo.reduce_window")
def _reduce_window(site: Site) -> Value:
    """Windows of one associative function, whose init is its identity, axis by axis (pooling, running sums).

    A window of n is built from windows of powers of two: w[2k][i] = f(w[k][i], w[k][i + k]), about log2(n) steps an axis.
    """
    if len(site.nodes) != 2:
        raise Unmodelled("windows of several operands")
    x, start = site.nodes
    fn = _combiner(site.op.block(), 0, 1, site)
    if fn is None or not _is_identity(start, fn):
        raise Unmodelled("its windows are reduced by a function of its own, or from another start")
    rank = len(x.shape)
    ones = (1,) * rank
    names = "window_dimensions", "window_strides", "base_dilations", "window_dilations"
    sizes, steps, spread, gaps = (site.op.ints(name, ones) for name in names)
    return _windows(x, start, fn, sizes, steps, spread, gaps, site.op.ints("padding", (0, 0) * rank))


@lowers("stablehlo.dynamic_reduce_window")
def _dynamic_reduce_window(site: Site) -> Value:
    """The same with sizes that follow from open extents, a custom call that names its function, as JAX exports it. A window
    that is open is as long as its axis: a running sum."""
    x, start, *told = site.nodes
    (name,) = site.op.attribute("called_computations")
    fn = _combiner(site.reader.function(str(name.value), site.op.where).block(), 0, 1, site)
    numbers = [site.extents(n) for n in told]
    if fn is None or not _is_identity(start, fn) or len(numbers) != 5 or None in numbers:
        raise site.refuse("windows of a function of its own, from another start, or of sizes that only a call knows")
    sizes, steps, spread, gaps, padding = (cast("list[int]", n) for n in numbers)
    for axis in [a for a, size in enumerate(sizes) if is_open((size,))]:
        low, high, n = padding[2 * axis], padding[2 * axis + 1], x.shape[axis]
        plain = steps[axis] == spread[axis] == gaps[axis] == 1
        if not plain or sizes[axis] != n or (low, high) not in ((n - 1, 0), (0, n - 1)):
            raise site.refuse(f"windows of {sizes[axis]} elements, padded by {low} and {high}, along an axis of {n}")
        x = _running(x, start, fn, axis, backwards=high == n - 1)
        sizes[axis], padding[2 * axis], padding[2 * axis + 1] = 1, 0, 0
    return _windows(x, start, fn, sizes, steps, spread, gaps, padding)


def _windows(
    x: Node,
    start: Node,
    fn: Reduction,
    sizes: Sequence[int],
    steps: Sequence[int],
    spread: Sequence[int],
    gaps: Sequence[int],
    padding: Sequence[int],
) -> Node:
    """Windows over x, padded, with so many places between its elements."""
    x = pad(x, start, padding[0::2], padding[1::2], tuple(d - 1 for d in spread))
    for axis in range(len(x.shape)):
        x = _slid(x, fn, axis, sizes[axis], gaps[axis])
        x = slice_(x, axis, 0, x.shape[axis], steps[axis])
    return x


def _running(x: Node, start: Node, fn: Reduction, axis: int, backwards: bool) -> Node:
    """f over all elements up to each along an axis, or from each on; each step joins twice as many (Hillis and Steele, CACM 29,
    1986). There are as many steps as the axis may ever take."""
    none, length = [0] * len(x.shape), 1
    while length < bounds_of(x.shape[axis])[1]:
        by = [length if a == axis else 0 for a in range(len(x.shape))]
        less = [-n for n in by]
        x = map_(fn, x, pad(x, start, less if backwards else by, by if backwards else less, none))
        length *= 2
    return x


def _slid(x: Node, fn: Reduction, axis: int, size: int, gap: int) -> Node:
    """f over every window of `size` elements, `gap` apart, along one axis."""
    reach = max(x.shape[axis] - (size - 1) * gap, 0)
    if not reach:
        return slice_(x, axis, 0, 0)
    total: Node | None = None
    done, length, power = 0, 1, x
    while done < size:
        if size & length:
            part = slice_(power, axis, done * gap, done * gap + reach)
            total = part if total is None else map_(fn, total, part)
            done += length
        if done < size:
            extent = power.shape[axis] - length * gap
            power = map_(fn, slice_(power, axis, 0, extent), slice_(power, axis, length * gap, length * gap + extent))
            length *= 2
    return cast("Node", total)
