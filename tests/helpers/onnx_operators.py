"""Random models of one ONNX operator: types, operator sets, attributes, extents of 0, 1 and primes, and special values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx_models import FLOAT, model

EXTENTS = (0, 1, 1, 2, 3, 5, 7)
FLOATS = (np.float32, np.float32, np.float64, np.float16)
SIGNED = (np.int8, np.int16, np.int32, np.int64)
UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)
INTEGERS = SIGNED + UNSIGNED
NUMBERS = FLOATS + INTEGERS
Random = np.random.Generator
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Drawn:
    """A model of one node and what to feed it.

    Attributes:
        exact: results are compared to the last bit.
        steps: of f32 arithmetic behind an element, which set the tolerance.
    """

    model: onnx.ModelProto
    feeds: Arrays
    exact: bool = False
    steps: int = 8


@dataclass
class Node:
    """A node as a generator fills it in.

    Attributes:
        inputs: value, or None where absent; those in `constant` are initializers.
    """

    op: str
    inputs: list[np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    constant: set[int] = field(default_factory=set)
    outputs: int = 1
    out: Any = None
    exact: bool = False
    steps: int = 8


Generator = Callable[[Random, int], Node]
OPERATORS: dict[str, tuple[tuple[int, ...], Generator]] = {}


def _operators(names: Sequence[str] | str, opsets: Sequence[int]) -> Callable[[Callable[..., Node]], Callable[..., Node]]:
    def register(f: Callable[..., Node]) -> Callable[..., Node]:
        for name in [names] if isinstance(names, str) else names:
            OPERATORS[name] = (tuple(opsets), lambda r, opset, name=name: f(name, r, opset))
        return f

    return register


def draw(op: str, seed: int) -> Drawn:
    """Case number `seed` of an operator."""
    r = np.random.default_rng([sum(map(ord, op)) * 7919 + len(op), seed])
    opsets, generator = OPERATORS[op]
    opset = int(r.choice(opsets))
    n = generator(r, opset)
    names = [f"x{i}" if v is not None else "" for i, v in enumerate(n.inputs)]
    while names and not names[-1]:
        names.pop()
    given = {f"x{i}": np.asarray(v) for i, v in enumerate(n.inputs) if v is not None}
    constants = {k: v for i, (k, v) in enumerate(given.items()) if int(k[1:]) in n.constant}
    feeds = {k: v for k, v in given.items() if k not in constants}
    results = [f"y{i}" for i in range(n.outputs)]
    node = helper.make_node(n.op, names, results, name="node", **n.attributes)
    first = next((v for v in n.inputs if v is not None), None)
    kinds = n.out if isinstance(n.out, list) else [n.out] * n.outputs
    default = FLOAT if first is None else helper.np_dtype_to_tensor_dtype(first.dtype)
    outputs = {
        y: default if k is None else k if isinstance(k, int) else helper.np_dtype_to_tensor_dtype(np.dtype(k))
        for y, k in zip(results, kinds, strict=True)
    }
    return Drawn(model([node], feeds, outputs, constants, opset=opset), feeds, n.exact, n.steps)


def shape_of(r: Random, rank: int | None = None, extents: Sequence[int] = EXTENTS) -> tuple[int, ...]:
    rank = int(r.integers(0, 5)) if rank is None else rank
    return tuple(int(r.choice(extents)) for _ in range(rank))


def full(r: Random, *rank: int) -> tuple[int, ...]:
    """A shape without an extent of 0."""
    return shape_of(r, rank[0] if rank else int(r.integers(1, 5)), EXTENTS[1:])


def broadcastable(r: Random, shape: Sequence[int]) -> tuple[int, ...]:
    cut = int(r.integers(0, len(shape) + 1)) if r.random() < 0.4 else 0
    return tuple(d if r.random() < 0.75 else 1 for d in shape[cut:])


def values(r: Random, dtype: Any, shape: Sequence[int], *, tame: bool = False) -> np.ndarray:
    """Elements over the whole range of a type, special ones among them; of a float, normal ones if tame."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64))
    if dtype.kind == "b":
        return np.asarray(r.random(tuple(shape)) < 0.5)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if tame:
            return r.integers(max(limits.min, -9), 10, tuple(shape)).astype(dtype)
        x = r.integers(limits.min, limits.max, tuple(shape), dtype=dtype, endpoint=True)
        special: list[Any] = [limits.min, limits.max, 0, 1]
    else:
        x = np.asarray(r.standard_normal(tuple(shape)) * 3).astype(dtype)
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 1.0, -1.0, 60000.0, 1e-7]
        if tame:
            return x
    flat = x.reshape(-1)
    for i in r.integers(0, max(size, 1), size // 3):
        flat[i] = special[int(r.integers(0, len(special)))]
    return x


_LATEST = (13, 18, 21, 23)
_ALL = (7, 9, 11, 13, 18, 21, 23)


@_operators(["Abs", "Neg", "Ceil", "Floor", "Sqrt", "Exp", "Log", "Sigmoid", "Tanh", "Relu", "Reciprocal"], (6, *_ALL))
def _unary(op: str, r: Random, opset: int) -> Node:
    kinds = FLOATS + (SIGNED if op in ("Abs", "Neg") or (op == "Relu" and opset >= 14) else ())
    return Node(op, [values(r, r.choice(kinds), shape_of(r))], exact=op in ("Abs", "Neg", "Ceil", "Floor", "Relu"))


@_operators(["Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Softplus", "Softsign", "Elu", "Selu"], (7, 9, 13, 22))
def _more_unary(op: str, r: Random, opset: int) -> Node:
    return Node(op, [values(r, r.choice((np.float32, np.float64, np.float16)), shape_of(r))])


@_operators(["Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Erf", "Sign", "IsNaN"], (9, 13, 20, 22))
def _nine_unary(op: str, r: Random, opset: int) -> Node:
    kinds = {"Sign": NUMBERS, "Erf": (np.float32,)}.get(op, FLOATS)  # onnxruntime's erf of f64 is one of f32
    x = values(r, r.choice(kinds), shape_of(r))
    if op == "Sign" and x.dtype.kind == "f":  # onnxruntime gives 0 or NaN for a NaN, by type
        x = np.where(np.isnan(x), 1, x).astype(x.dtype)
    return Node(op, [x], out=bool if op == "IsNaN" else None)


@_operators(["Swish"], (24,))
@_operators(["Round", "HardSwish", "Mish", "Celu", "Gelu", "IsInf"], (20, 22))
def _late_unary(op: str, r: Random, opset: int) -> Node:
    more: dict[str, Any] = {}
    if op == "Gelu":
        more["approximate"] = str(r.choice(["none", "tanh"]))
    if op == "IsInf":
        more = {"detect_negative": int(r.integers(0, 2)), "detect_positive": int(r.integers(0, 2))}
    if op in ("Celu", "Swish"):
        more["alpha"] = float(r.choice([0.5, 1.0, 2.0]))
    return Node(op, [values(r, np.float32, shape_of(r))], more, out=bool if op == "IsInf" else None)


@_operators(["LeakyRelu", "HardSigmoid", "ThresholdedRelu"], (10, 13, 16, 22))
def _sloped(op: str, r: Random, opset: int) -> Node:
    more = {"alpha": float(r.choice([0.01, 0.3, 1.5]))} if r.random() < 0.7 else {}
    return Node(op, [values(r, r.choice(FLOATS), shape_of(r))], more)


@_operators(["Mod"], (10, 13, 21))
@_operators(["Add", "Sub", "Mul", "Div", "Max", "Min"], (*_ALL[1:], 12))
def _arithmetic(op: str, r: Random, opset: int) -> Node:
    kinds = NUMBERS if opset >= 12 else (np.float32, np.float64, np.int32, np.int64)
    dtype = r.choice(kinds)
    shape = shape_of(r)
    pair = [shape, broadcastable(r, shape)]
    if r.random() < 0.5:
        pair.reverse()
    x = [values(r, dtype, s) for s in pair]
    more: dict[str, Any] = {}
    if op == "Mod":
        wide = np.dtype(dtype).itemsize == 8  # which onnxruntime's fmod takes through f64
        more["fmod"] = 1 if np.dtype(dtype).kind == "f" else 0 if wide else int(r.integers(0, 2))
    if op in ("Div", "Mod") and np.dtype(dtype).kind in "iu":
        x[1] = np.where(x[1] == 0, 1, x[1]).astype(dtype)
        if np.dtype(dtype).kind == "i":
            x[1] = np.where(x[1] == -1, 1, x[1]).astype(dtype)
    return Node(op, list(x), more, steps=1)


@_operators(["Equal", "Greater", "Less"], _ALL)
@_operators(["GreaterOrEqual", "LessOrEqual"], (12, 16, 23))
def _comparison(op: str, r: Random, opset: int) -> Node:
    dtype = r.choice(NUMBERS)
    shape = shape_of(r)
    x = [values(r, dtype, shape), values(r, dtype, broadcastable(r, shape))]
    return Node(op, list(x), out=bool)


@_operators(["And", "Or", "Xor"], (7, 13, 23))
def _logical(op: str, r: Random, opset: int) -> Node:
    shape = shape_of(r)
    return Node(op, [values(r, bool, shape), values(r, bool, broadcastable(r, shape))])


@_operators(["BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"], (18, 23))
def _bits(op: str, r: Random, opset: int) -> Node:
    shape = shape_of(r)
    dtype = r.choice((np.uint8, np.uint32, np.uint64) if op == "BitShift" else INTEGERS)
    x = [values(r, dtype, shape), values(r, dtype, broadcastable(r, shape))]
    more: dict[str, Any] = {}
    if op == "BitShift":
        x[1] = (x[1] % (8 * np.dtype(dtype).itemsize)).astype(dtype)
        more["direction"] = str(r.choice(["LEFT", "RIGHT"]))
    return Node(op, list(x), more)


@_operators("Pow", (7, 12, 13, 15))
def _pow(op: str, r: Random, opset: int) -> Node:
    kinds = (np.float32, np.float64) if opset < 12 else (np.float32, np.float64, np.int32, np.int64)
    base, exponent = r.choice(kinds), r.choice(kinds)
    exponent = base if opset < 12 else exponent
    shape = shape_of(r)
    by = values(r, exponent, broadcastable(r, shape), tame=True)
    if np.dtype(base).kind == "i":
        by = np.round(np.abs(by) % 4).astype(exponent)
    return Node(op, [values(r, base, shape, tame=np.dtype(base).kind == "i"), by], steps=64)


@_operators("Where", (9, 16))
def _where(op: str, r: Random, opset: int) -> Node:
    shape, dtype = shape_of(r), r.choice((np.float32, np.int64, np.uint8, np.int32))
    x = [values(r, k, s) for k, s in ((bool, broadcastable(r, shape)), (dtype, shape), (dtype, broadcastable(r, shape)))]
    return Node(op, list(x), out=dtype)


@_operators(["Sum", "Mean"], (8, 13))
def _variadic(op: str, r: Random, opset: int) -> Node:
    shape, dtype = shape_of(r), np.float32
    return Node(op, [values(r, dtype, broadcastable(r, shape), tame=True) for _ in range(int(r.integers(1, 4)))])


@_operators("Clip", (6, 11, 12, 13))
def _clip(op: str, r: Random, opset: int) -> Node:
    dtype = r.choice((np.float32, np.float64, np.int8, np.uint8, np.int64, np.uint64, np.int32)) if opset >= 12 else np.float32
    x = values(r, dtype, shape_of(r))
    if np.dtype(dtype).kind == "f":  # without a bound onnxruntime takes the largest number for it, onnx and torch none
        x = np.where(np.isinf(x), 0, x).astype(dtype)
    if opset < 11:
        return Node(op, [x], {k: float(v) for k, v in (("min", -1.0), ("max", 1.5)) if r.random() < 0.6})
    low, high = (values(r, dtype, (), tame=True) if r.random() < 0.7 else None for _ in range(2))
    return Node(op, [x, low, high], constant={1, 2} if r.random() < 0.5 else set())


_CAST = (np.float32, np.float64, np.float16, *INTEGERS, bool)


@_operators("Cast", (9, 13, 19, 21, 23))
def _cast(op: str, r: Random, opset: int) -> Node:
    source, target = r.choice(np.array(_CAST, object)), r.choice(np.array(_CAST, object))
    x = values(r, source, shape_of(r))
    if np.dtype(source).kind == "f" and np.dtype(target).kind in "iu":  # past the range ONNX leaves it open
        limits = np.iinfo(target)
        x = (
            np.nan_to_num(x, nan=0.0, posinf=1.0, neginf=0.0)
            .clip(max(limits.min, -30000), min(limits.max, 30000))
            .astype(source)
        )
    return Node(op, [x], {"to": helper.np_dtype_to_tensor_dtype(np.dtype(target))}, out=target)


@_operators(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"], (7, 11, 12, 13, 18, 20))
@_operators(["ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"], (7, 11, 13, 18))
def _reduce(op: str, r: Random, opset: int) -> Node:
    shape = shape_of(r) if op in ("ReduceSum", "ReduceProd") else full(r)
    rank = len(shape)
    kinds: tuple[Any, ...] = (np.float32, np.float64, np.int32)
    if op in ("ReduceMax", "ReduceMin"):
        kinds += (np.int8, np.uint8, np.int64) if opset >= 12 else ()
    dtype = r.choice(kinds if op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd") else (np.float32, np.float64))
    x = values(r, dtype, shape, tame=True)
    if op == "ReduceProd" and dtype is np.int32:
        # A product beyond 32 bits: onnx says nothing of it, and onnxruntime converts one of f64 to s32, which C++ leaves open.
        x.reshape(-1)[:] = [np.clip(v, -3, 3) if i < 16 else np.sign(v) for i, v in enumerate(x.reshape(-1))]
    if op == "ReduceLogSum":
        x = np.abs(x)
    axes = [int(a) for a in r.permutation(rank)[: int(r.integers(0, rank + 1))]]
    if 0 not in shape:  # where onnxruntime gives another shape for an axis counted from the back
        axes = [a - rank if r.random() < 0.4 and opset >= 11 else a for a in axes]
    more: dict[str, Any] = {"keepdims": int(r.integers(0, 2))} if r.random() < 0.8 else {}
    as_input = opset >= (13 if op == "ReduceSum" else 18)
    if not as_input:
        return Node(op, [x], {**more, **({"axes": axes} if axes else {})})
    if r.random() < 0.5:
        more["noop_with_empty_axes"] = int(r.integers(0, 2))
    given = np.array(axes, np.int64) if axes or r.random() < 0.5 else None
    return Node(op, [x, given], more, constant={1})


@_operators(["ArgMax", "ArgMin"], (7, 11, 12, 13))
def _arg(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    dtype = r.choice((np.float32, np.float64, np.int32, np.int8, np.uint8) if opset >= 13 else (np.float32, np.int32))
    x = values(r, dtype, shape, tame=True)
    low = 0 if opset < 11 else -len(shape)
    more = {"axis": int(r.integers(low, len(shape))), "keepdims": int(r.integers(0, 2))}
    if opset >= 12:
        more["select_last_index"] = int(r.integers(0, 2))
    return Node(op, [np.round(x).astype(dtype)], more, out=np.int64)


@_operators(["Softmax", "LogSoftmax", "Hardmax"], (7, 11, 13))
def _softmax(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    x = values(r, r.choice((np.float32, np.float64)) if op != "Hardmax" else np.float32, shape, tame=True)
    low = 0 if opset < 11 else -len(shape)
    return Node(op, [x], {"axis": int(r.integers(low, len(shape)))} if r.random() < 0.8 or len(shape) == 1 else {})


@_operators("CumSum", (11, 14))
def _cumsum(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    x = values(r, r.choice((np.float32, np.float64, np.int32, np.int64)), shape, tame=True)
    axis = np.array(int(r.integers(-len(shape), len(shape))), r.choice((np.int32, np.int64)))
    return Node(op, [x, axis], {"exclusive": int(r.integers(0, 2)), "reverse": int(r.integers(0, 2))}, {1})


@_operators("TopK", (7, 10, 11))
def _topk(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    low = 0 if opset < 11 else -len(shape)
    axis = int(r.integers(low, len(shape)))
    k = int(r.integers(1, shape[axis] + 1))
    x = values(r, np.float32, shape, tame=True)
    if opset < 10:
        return Node(op, [x], {"axis": axis, "k": k}, outputs=2, out=[None, np.int64])
    more = {"axis": axis, **({"largest": int(r.integers(0, 2))} if opset >= 11 else {})}
    return Node(op, [x, np.array([k], np.int64)], more, {1}, outputs=2, out=[None, np.int64])


@_operators(["Gather", "GatherElements"], (11, 13))
def _gather(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    rank = len(shape)
    axis = int(r.integers(-rank, rank))
    n = shape[axis]
    picked = shape_of(r, int(r.integers(0, 3))) if op == "Gather" else tuple(int(r.integers(1, d + 1)) for d in shape)
    index = r.integers(-n, n, picked).astype(r.choice((np.int32, np.int64)))
    return Node(op, [values(r, r.choice(NUMBERS), shape), index], {"axis": axis}, exact=True)


@_operators("GatherND", (11, 12, 13))
def _gather_nd(op: str, r: Random, opset: int) -> Node:
    shape = full(r, int(r.integers(2, 4)))
    batch = int(r.integers(0, 2)) if opset >= 12 else 0
    depth = int(r.integers(1, len(shape) - batch + 1))
    outer = (*shape[:batch], *full(r, 1))
    index = np.stack([r.integers(-d, d, outer) for d in shape[batch : batch + depth]], -1).astype(np.int64)
    return Node(op, [values(r, np.float32, shape), index], {"batch_dims": batch} if opset >= 12 else {}, exact=True)


@_operators(["ScatterElements", "ScatterND"], (11, 13, 16, 18))
def _scatter(op: str, r: Random, opset: int) -> Node:
    shape = full(r, int(r.integers(1, 4)))
    axis = int(r.integers(0, len(shape)))
    if op == "ScatterElements":
        index = np.argsort(r.random(shape), axis=axis).astype(np.int64)
        x = [values(r, np.float32, shape, tame=True), index, values(r, np.float32, shape, tame=True)]
        more: dict[str, Any] = {"axis": axis}
    else:
        count = int(r.integers(1, shape[0] + 1))
        index = r.permutation(shape[0])[:count].reshape(count, 1).astype(np.int64)
        x = [values(r, np.float32, shape, tame=True), index, values(r, np.float32, (count, *shape[1:]), tame=True)]
        more = {}
    if opset >= 18 and r.random() < 0.6:
        more["reduction"] = str(r.choice(["add", "mul", "max", "min", "none"]))
    return Node(op, list(x), more)


@_operators("Slice", (7, 10, 11, 13))
def _slice(op: str, r: Random, opset: int) -> Node:
    shape = shape_of(r, int(r.integers(1, 5)))
    rank = len(shape)
    axes = [int(a) for a in r.permutation(rank)[: int(r.integers(1, rank + 1))]]
    starts = [int(r.integers(-9, 9)) for _ in axes]
    ends = [int(r.choice([-9, -2, 0, 1, 3, 9, 2**31 - 1, -(2**31)])) for _ in axes]
    x = values(r, r.choice((np.float32, np.int64, np.uint8)), shape)
    if opset < 10:
        ends = [max(e, -9) for e in ends]
        return Node(op, [x], {"starts": starts, "ends": ends, "axes": axes}, exact=True)
    steps = [int(r.choice([1, 1, 2, 3, -1, -2])) if r.random() < 0.7 else 1 for _ in axes]
    # backwards to a huge end is nothing to onnx, and all to onnxruntime
    ends = [e if s > 0 else min(e, 9) for e, s in zip(ends, steps, strict=True)]
    given: list[np.ndarray | None] = [np.array(v, np.int64) for v in (starts, ends)]
    given.append(np.array([a - rank if opset >= 11 and r.random() < 0.4 else a for a in axes], np.int64))
    given.append(np.array(steps, np.int64) if set(steps) != {1} or r.random() < 0.5 else None)
    return Node(op, [x, *given], {}, {1, 2, 3, 4}, exact=True)


@_operators("Split", (7, 11, 13, 18))
def _split(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    axis = int(r.integers(0 if opset < 11 else -len(shape), len(shape)))
    n = shape[axis]
    parts = int(r.integers(1, n + 1))
    cuts = sorted(int(c) for c in r.integers(0, n + 1, parts - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    x = values(r, r.choice((np.float32, np.int64)), shape)
    if opset < 13:
        return Node(op, [x], {"axis": axis, "split": sizes}, outputs=parts, exact=True)
    if opset >= 18 and r.random() < 0.5 and -(-n // parts) * (parts - 1) < n:
        return Node(op, [x], {"axis": axis, "num_outputs": parts}, outputs=parts, exact=True)
    return Node(op, [x, np.array(sizes, np.int64)], {"axis": axis}, {1}, outputs=parts, exact=True)


@_operators("Concat", (7, 11, 13))
def _concat(op: str, r: Random, opset: int) -> Node:
    shape = list(shape_of(r, int(r.integers(1, 4))))
    axis = int(r.integers(0 if opset < 11 else -len(shape), len(shape)))
    parts: list[np.ndarray | None] = []
    for _ in range(int(r.integers(1, 4))):
        shape[axis] = int(r.choice(EXTENTS))
        parts.append(values(r, np.float32, shape))
    return Node(op, parts, {"axis": axis}, exact=True)


@_operators("Pad", (7, 11, 13, 18, 19, 21))
def _pad(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    mode = str(r.choice(["constant", "edge", "reflect", *(["wrap"] if opset >= 19 else [])]))
    low = -1 if mode == "constant" and min(shape) > 2 else 0
    top = [3 if mode in ("constant", "edge") else max(d - 1, 0) for d in shape]
    pads = [int(r.integers(low, min(t, 3) + 1)) for t in (*top, *top)]
    dtype = r.choice((np.float32, np.int64, np.int32)) if opset >= 11 else np.float32
    x = values(r, dtype, shape)
    if opset < 11:
        return Node(op, [x], {"pads": pads, "mode": mode, **({"value": 2.5} if r.random() < 0.5 else {})}, exact=True)
    value = values(r, dtype, (), tame=True) if r.random() < 0.5 and mode == "constant" else None
    return Node(op, [x, np.array(pads, np.int64), value], {"mode": mode}, {1, 2}, exact=True)


@_operators(["Squeeze", "Unsqueeze"], (7, 11, 13, 21))
def _squeeze(op: str, r: Random, opset: int) -> Node:
    shape = list(shape_of(r, int(r.integers(1, 4))))
    ones = [i for i in range(len(shape)) if r.random() < 0.5] or [0]
    if op == "Squeeze":
        for i in ones:
            shape[i] = 1
    axes = [a - len(shape) if opset >= 11 and op == "Squeeze" and r.random() < 0.4 else a for a in ones]
    x = values(r, np.float32, shape)
    if opset < 13:
        return Node(op, [x], {"axes": axes}, exact=True)
    return Node(op, [x, np.array(axes, np.int64)], {}, {1}, exact=True)


@_operators(["Transpose", "Flatten", "Shape", "Size", "Identity"], (7, 11, 13, 21))
def _views(op: str, r: Random, opset: int) -> Node:
    shape = shape_of(r) if op != "Flatten" else shape_of(r, int(r.integers(1, 5)))
    more: dict[str, Any] = {}
    if op == "Transpose" and shape and r.random() < 0.8:
        more["perm"] = [int(p) for p in r.permutation(len(shape))]
    if op == "Flatten":
        more["axis"] = int(r.integers(0 if opset < 11 else -len(shape), len(shape) + 1))
    if op == "Shape" and opset >= 15:
        more = {"start": int(r.integers(-5, 6)), "end": int(r.integers(-5, 6))}
    return Node(op, [values(r, r.choice(NUMBERS), shape)], more, out=np.int64 if op in ("Shape", "Size") else None, exact=True)


@_operators(["Expand", "Tile", "Reshape"], (8, 13, 21))
def _repeats(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    if op == "Expand":
        target = np.array([d if r.random() < 0.5 else 1 for d in shape], np.int64)
        shape = tuple(d if r.random() < 0.6 else 1 for d in shape)
    elif op == "Tile":
        target = r.integers(0, 4, len(shape)).astype(np.int64)
    else:
        order = r.permutation(shape)
        order[int(r.integers(0, len(order)))] = -1
        target = order.astype(np.int64)
    return Node(op, [values(r, r.choice((np.float32, np.int64)), shape), target], {}, {1}, exact=True)


@_operators(["Trilu", "EyeLike"], (14, 22))
def _triangles(op: str, r: Random, opset: int) -> Node:
    if op == "EyeLike":
        return Node(op, [values(r, r.choice((np.float32, np.int32)), shape_of(r, 2))], {"k": int(r.integers(-4, 5))})
    x = values(r, r.choice((np.float32, np.int64, bool)), shape_of(r, int(r.integers(2, 5))))
    k = np.array(int(r.integers(-5, 6)), np.int64) if r.random() < 0.6 else None
    return Node(op, [x, k], {"upper": int(r.integers(0, 2))}, {1}, exact=True)


@_operators("OneHot", (9, 11))
def _one_hot(op: str, r: Random, opset: int) -> Node:
    index = r.integers(-6, 7, full(r, int(r.integers(1, 4)))).astype(np.int64)
    depth = int(r.integers(1, 7))
    axis = int(r.integers(-index.ndim - 1, index.ndim + 1))
    return Node(op, [index, np.array(depth, np.int64), values(r, np.float32, (2,), tame=True)], {"axis": axis}, {1}, out=FLOAT)


@_operators("Range", (11,))
def _range(op: str, r: Random, opset: int) -> Node:
    dtype = r.choice((np.float32, np.float64, np.int32, np.int64))
    start, stop, step = r.integers(-20, 21, 3).astype(dtype)
    step = step if step else dtype(1)
    if np.dtype(dtype).kind == "f":
        step = dtype(step * dtype(0.3))
    return Node(op, [np.array(v, dtype) for v in (start, stop, step)], {}, {0, 1, 2}, steps=256)


@_operators(["DepthToSpace", "SpaceToDepth"], (7, 11, 13))
def _blocks(op: str, r: Random, opset: int) -> Node:
    b = int(r.integers(1, 4))
    n, c, h, w = full(r, 4)
    shape = (n, c * b * b, h, w) if op == "DepthToSpace" else (n, c, h * b, w * b)
    more: dict[str, Any] = {"blocksize": b}
    if op == "DepthToSpace" and opset >= 11:
        more["mode"] = str(r.choice(["DCR", "CRD"]))
    return Node(op, [values(r, np.float32, shape)], more, exact=True)


@_operators("MatMul", (7, 9, 13))
def _matmul(op: str, r: Random, opset: int) -> Node:
    m, k, n = shape_of(r, 3)
    k = max(k, 1)
    batch = shape_of(r, int(r.integers(0, 3)), (1, 2, 3))
    a, b = (*batch, m, k), (*broadcastable(r, batch), k, n)
    if r.random() < 0.15:
        a = (k,)
    if r.random() < 0.15:
        b = (k,)
    dtype = r.choice((np.float32, np.float64, np.int32, np.int64)) if opset >= 9 else np.float32
    return Node(op, [values(r, dtype, s, tame=True) for s in (a, b)], steps=64)


@_operators("Gemm", (7, 9, 11, 13))
def _gemm(op: str, r: Random, opset: int) -> Node:
    m, k, n = full(r, 3)
    ta, tb = int(r.integers(0, 2)), int(r.integers(0, 2))
    x: list[np.ndarray | None] = [
        values(r, np.float32, (k, m) if ta else (m, k), tame=True),
        values(r, np.float32, (n, k) if tb else (k, n), tame=True),
    ]
    if r.random() < 0.7 or opset < 11:
        x.append(values(r, np.float32, [(n,), (m, n), (1, n), (m, 1), ()][int(r.integers(0, 5))], tame=True))
    more = {"transA": ta, "transB": tb, "alpha": float(r.choice([1.0, 0.5])), "beta": float(r.choice([1.0, 0.0, 2.0]))}
    return Node(op, x, more, steps=64)


@_operators(["QuantizeLinear", "DequantizeLinear"], (10, 13, 19, 21, 23))
def _quantize(op: str, r: Random, opset: int) -> Node:
    shape = full(r, int(r.integers(1, 4)))
    kinds = (np.uint8, np.int8) if opset < 21 else (np.uint8, np.int8, np.uint16, np.int16)
    dtype = r.choice(kinds)
    axis = int(r.integers(0, len(shape)))
    many = opset >= 13 and r.random() < 0.5
    size = (shape[axis],) if many else ()
    scale = np.asarray(r.uniform(0.01, 1.0, size), np.float32)
    zero = values(r, dtype, size) if r.random() < 0.7 or dtype is not np.uint8 else None
    more = {"axis": axis} if many else {}
    if op == "QuantizeLinear":
        x = values(r, np.float32, shape)
        return Node(op, [np.nan_to_num(x, nan=0.0), scale, zero], more, out=dtype)
    return Node(op, [values(r, dtype, shape), scale, zero], more, out=FLOAT)


@_operators(["DynamicQuantizeLinear"], (11,))
def _dynamic(op: str, r: Random, opset: int) -> Node:
    return Node(op, [values(r, np.float32, full(r), tame=True)], outputs=3, out=[np.uint8, FLOAT, np.uint8])


@_operators("MatMulInteger", (10,))
def _matmul_integer(op: str, r: Random, opset: int) -> Node:
    m, k, n = full(r, 3)
    b = r.choice((np.uint8, np.int8))
    x: list[np.ndarray | None] = [values(r, np.uint8, (m, k)), values(r, b, (k, n))]
    if r.random() < 0.7:
        x.append(values(r, np.uint8, ()))
        x.append(values(r, b, (n,) if r.random() < 0.5 else ()) if r.random() < 0.6 else None)
    return Node(op, x, out=np.int32)


@_operators(["LayerNormalization", "RMSNormalization"], (23,))
def _norms(op: str, r: Random, opset: int) -> Node:
    shape = full(r)
    axis = int(r.integers(-len(shape), len(shape)))
    x = [values(r, np.float32, shape, tame=True), values(r, np.float32, shape[axis:], tame=True)]
    if op == "LayerNormalization" and r.random() < 0.6:
        x.append(values(r, np.float32, shape[axis:], tame=True))
    return Node(op, list(x), {"axis": axis, "epsilon": 1e-3}, steps=512)


@_operators(["BatchNormalization", "InstanceNormalization", "LpNormalization", "LRN"], (9, 13, 15, 22))
def _more_norms(op: str, r: Random, opset: int) -> Node:
    shape = full(r, 4 if op == "LRN" else int(r.integers(3, 5)))
    x = values(r, np.float32, shape, tame=True)
    c = shape[1]
    if op == "BatchNormalization":
        rest = [values(r, np.float32, (c,), tame=True) for _ in range(3)] + [np.asarray(r.uniform(0.1, 2, c), np.float32)]
        return Node(op, [x, *rest], {"epsilon": 1e-3}, steps=64)
    if op == "InstanceNormalization":
        return Node(op, [x, *(values(r, np.float32, (c,), tame=True) for _ in range(2))], {"epsilon": 1e-2}, steps=512)
    if op == "LpNormalization":
        return Node(op, [x], {"axis": int(r.integers(-len(shape), len(shape))), "p": int(r.integers(1, 3))}, steps=64)
    return Node(op, [x], {"size": int(r.choice([1, 3, 5]))}, steps=64)


@_operators(["MaxPool", "AveragePool", "LpPool"], (8, 10, 11, 12, 19, 22))
def _pools(op: str, r: Random, opset: int) -> Node:
    n, c = full(r, 2)
    spatial = int(r.integers(1, 3))
    shape = (n, c, *(int(r.integers(4, 9)) for _ in range(spatial)))
    more: dict[str, Any] = {"kernel_shape": [int(r.integers(1, 4)) for _ in range(spatial)]}
    if r.random() < 0.6:
        more["strides"] = [int(r.integers(1, 4)) for _ in range(spatial)]
    if r.random() < 0.5:
        more["pads"] = [int(r.integers(0, k)) for k in (*more["kernel_shape"], *more["kernel_shape"])]
    elif r.random() < 0.4:
        more["auto_pad"] = str(r.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
        more.pop("strides", None)  # longer than a window, onnxruntime refuses them
    if opset >= 10 and op != "LpPool" and r.random() < 0.4 and "auto_pad" not in more:
        more["ceil_mode"] = 1
    if op == "AveragePool":
        more["count_include_pad"] = int(r.integers(0, 2))
    if opset >= (10 if op == "MaxPool" else 19) and op != "LpPool" and r.random() < 0.3 and "auto_pad" not in more:
        more["dilations"] = [1 if k > 2 else 2 for k in more["kernel_shape"]]
    return Node(op, [values(r, np.float32, shape, tame=True)], more, steps=64)


@_operators(["GlobalAveragePool", "GlobalMaxPool"], (7, 22))
def _global(op: str, r: Random, opset: int) -> Node:
    return Node(op, [values(r, np.float32, full(r, int(r.integers(3, 6))), tame=True)], steps=64)


@_operators("Conv", (7, 11, 22))
def _conv(op: str, r: Random, opset: int) -> Node:
    n, c, m = full(r, 3)
    group = int(r.choice([1, 1, 2]))
    spatial = int(r.integers(1, 3))
    kernel = [int(r.integers(1, 4)) for _ in range(spatial)]
    x = values(r, np.float32, (n, c * group, *(int(r.integers(5, 9)) for _ in range(spatial))), tame=True)
    w = values(r, np.float32, (m * group, c, *kernel), tame=True)
    more: dict[str, Any] = {"group": group, "strides": [int(r.integers(1, 3)) for _ in range(spatial)]}
    if r.random() < 0.5:
        more["pads"] = [int(r.integers(0, 3)) for _ in range(2 * spatial)]
    elif r.random() < 0.5:
        more["auto_pad"] = str(r.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    if r.random() < 0.3 and "auto_pad" not in more:
        more["dilations"] = [2 if k < 3 else 1 for k in kernel]
    bias = values(r, np.float32, (m * group,), tame=True) if r.random() < 0.5 else None
    return Node(op, [x, w, bias], more, {1, 2}, steps=256)


@_operators("Resize", (10, 11, 13, 18, 19))
def _resize(op: str, r: Random, opset: int) -> Node:
    shape = full(r, 4)
    x = values(r, np.float32, shape, tame=True)
    scales = np.array([1, 1, *(float(r.choice([0.5, 1.0, 1.5, 2.0, 3.0])) for _ in range(2))], np.float32)
    mode = str(r.choice(["nearest", "linear"]))
    if opset == 10:
        return Node(op, [x, scales], {"mode": mode}, {1}, steps=64)
    more: dict[str, Any] = {"mode": str(r.choice([mode, "cubic"]))}
    more["coordinate_transformation_mode"] = str(r.choice(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]))
    if r.random() < 0.2:  # an axis that ends with one element
        scales[int(r.integers(2, 4))] = np.float32(0.3)
        x = x[:, :, :3, :3]
    if more["mode"] == "nearest":
        more["nearest_mode"] = str(r.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]))
    return Node(op, [x, np.zeros(0, np.float32), scales], more, {1, 2}, steps=256)


@_operators(["LSTM", "GRU", "RNN"], (7, 14, 22))
def _recurrent(op: str, r: Random, opset: int) -> Node:
    s, b, i, h = full(r, 4)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    x = [values(r, np.float32, t, tame=True) for t in ((s, b, i), (1, gates * h, i), (1, gates * h, h), (1, 2 * gates * h))]
    more: dict[str, Any] = {"hidden_size": h}
    if op == "GRU":
        more["linear_before_reset"] = int(r.integers(0, 2))
    return Node(op, list(x), more, {1, 2, 3}, outputs=2, steps=512)
