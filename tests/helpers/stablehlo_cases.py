"""Random StableHLO programs of one operation each, over types, ranks, attributes and special values.

`CASES` maps an operation to a function of a generator of random numbers that writes one program: its body, its arguments with
their values, its results and how far they may be from XLA's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from against_jax import program, sample

from tilewright.dtype import (
    BF16,
    BY_NAME,
    F4E2M1FN,
    F8E4M3FN,
    F8E5M2,
    F16,
    F32,
    F64,
    OPAQUE,
    PRED,
    S4,
    S8,
    S16,
    S32,
    S64,
    U4,
    U8,
    U16,
    U32,
    U64,
    DType,
)
from tilewright.frontends.stablehlo.module import mlir_type
from tilewright.ir.types import TensorType


@dataclass
class Case:
    """One program.

    Attributes:
        body: lines of `main`.
        given: its arguments, by name.
        results: types of what it returns, by name.
        ulps: of a result's own value that it may differ by.
        depth: of the largest value of a result that any may differ by, in steps of the result's type.
    """

    body: str
    given: dict[str, tuple[DType, np.ndarray]]
    results: dict[str, TensorType]
    ulps: float = 0.0
    depth: float = 0.0

    @property
    def text(self) -> str:
        """The module."""
        return program(self.body, {n: TensorType(d, a.shape) for n, (d, a) in self.given.items()}, self.results)

    @property
    def arrays(self) -> list[np.ndarray]:
        """Values of the arguments."""
        return [a for _, a in self.given.values()]


case = Case


def merged(cases: list[Case]) -> Case:
    """Several programs as one that returns all their results, in order."""
    body: list[str] = []
    given: dict[str, tuple[DType, np.ndarray]] = {}
    results: dict[str, TensorType] = {}
    for i, c in enumerate(cases):
        body.append(re.sub(r"%(\w+)", rf"%\g<1>_{i}", c.body))
        given.update({f"{n}_{i}": v for n, v in c.given.items()})
        results.update({f"{n}_{i}": t for n, t in c.results.items()})
    return Case("\n".join(body), given, results)


def integers(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    return [int(v) for v in rng.integers(low, high, count, endpoint=True)]


def moderate(dtype: DType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Numbers whose products can be summed: normal floats, integers of the whole range."""
    if dtype.is_float:
        return rng.standard_normal(shape).astype(np.float32).astype(dtype.to_numpy())
    return sample(dtype, shape, int(rng.integers(1 << 30)))


def pick(rng: np.random.Generator, of: list) -> object:  # type: ignore[type-arg]
    return of[int(rng.integers(len(of)))]


CONVOLVED = [
    (F32, F32, F32),
    (F64, F64, F64),
    (BF16, BF16, BF16),
    (BF16, BF16, F32),
    (F16, F16, F16),
    (F16, F16, F32),
    (F8E4M3FN, F8E4M3FN, F32),
    (F8E5M2, F8E5M2, F32),
    (S8, S8, S32),
    (U8, U8, S32),
    (S8, S8, F32),
    (S8, S8, S8),
    (S16, S16, S32),
    (S32, S32, S32),
    (S64, S64, S64),
]


def convolution(rng: np.random.Generator) -> Case:
    lhs, rhs, out = pick(rng, CONVOLVED)  # type: ignore[misc]
    rank = int(rng.integers(0, 4))
    feature_groups, batch_groups = pick(rng, [(1, 1), (1, 1), (2, 1), (3, 1), (1, 2)])  # type: ignore[misc]
    batch, channels = batch_groups * int(rng.integers(1, 3)), int(rng.integers(1, 4))
    made = feature_groups * batch_groups * int(rng.integers(1, 3))
    window, extents = integers(rng, 1, 3, rank), integers(rng, 1, 7, rank)
    stride, dilate, spread = (integers(rng, 1, 3, rank) for _ in range(3))
    flip = integers(rng, 0, 1, rank)
    reach = [(w - 1) * d + 1 for w, d in zip(window, dilate, strict=True)]
    span = [(e - 1) * s + 1 for e, s in zip(extents, spread, strict=True)]
    low, high = [], []
    for r, s in zip(reach, span, strict=True):
        a, b = integers(rng, -1, 3, 2)
        if s + a + b < max(r, 1) or s + min(a, 0) + min(b, 0) < 1:
            a, b = r, r
        low.append(a)
        high.append(b)
    shape = [(s + a + b - r) // t + 1 for s, a, b, r, t in zip(span, low, high, reach, stride, strict=True)]
    orders = [list(rng.permutation(rank + 2)) for _ in range(3)]

    def placed(names: list[str], order: list[int], values: list[int]) -> tuple[str, tuple[int, ...]]:
        at = [names[i] for i in order]
        return "[" + ", ".join(at) + "]", tuple(values[i] for i in order)

    space = [str(i) for i in range(rank)]
    ln, ls = placed(["b", "f", *space], orders[0], [batch, channels * feature_groups, *extents])
    rn, rs = placed(["o", "i", *space], orders[1], [made, channels, *window])
    on, os_ = placed(["b", "f", *space], orders[2], [batch // batch_groups, made, *shape])
    pads = "[" + ", ".join(f"[{a}, {b}]" for a, b in zip(low, high, strict=True)) + "]"
    flips = ", ".join("true" if f else "false" for f in flip)
    tx, tk, to = TensorType(lhs, ls), TensorType(rhs, rs), TensorType(out, os_)
    body = (
        f"%r = stablehlo.convolution(%x, %k) dim_numbers = {ln}x{rn}->{on}, window = {{stride = {stride}, pad = {pads}, "
        f"lhs_dilate = {spread}, rhs_dilate = {dilate}, reverse = [{flips}]}} {{batch_group_count = {batch_groups} : i64, "
        f"feature_group_count = {feature_groups} : i64}} : ({mlir_type(tx)}, {mlir_type(tk)}) -> {mlir_type(to)}"
    )
    x, k = moderate(lhs, ls, rng), moderate(rhs, rs, rng)
    return case(body, {"x": (lhs, x), "k": (rhs, k)}, {"r": to}, ulps=2, depth=4)


def triangular_solve(rng: np.random.Generator) -> Case:
    dtype = pick(rng, [F32, F64])
    batch = tuple(integers(rng, 1, 3, int(rng.integers(0, 3))))
    n, m = integers(rng, 1, 6, 2)
    left, lower, unit = (bool(v) for v in integers(rng, 0, 1, 3))
    how = pick(rng, ["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"])
    a = (*batch, n, n)
    b = (*batch, n, m) if left else (*batch, m, n)
    ta, tb = TensorType(dtype, a), TensorType(dtype, b)  # type: ignore[arg-type]
    words = {True: "true", False: "false"}
    body = (
        f'%r = "stablehlo.triangular_solve"(%x, %k) {{left_side = {words[left]}, lower = {words[lower]}, '
        f"unit_diagonal = {words[unit]}, transpose_a = #stablehlo<transpose {how}>}} "
        f": ({mlir_type(ta)}, {mlir_type(tb)}) -> {mlir_type(tb)}"
    )
    x = rng.standard_normal(a) * 0.3 + 2 * np.eye(n)
    given = {"x": (dtype, x.astype(dtype.to_numpy())), "k": (dtype, rng.standard_normal(b).astype(dtype.to_numpy()))}  # type: ignore[attr-defined]
    return case(body, given, {"r": tb}, ulps=64, depth=64)  # type: ignore[arg-type]


INTEGERS = [S8, S16, S32, S64, U8, U16, U32, U64]
FLOATS = [BF16, F16, F32, F64]
UNARY_FLOAT = (
    *("cbrt", "ceil", "cosine", "exponential", "exponential_minus_one", "floor", "log", "log_plus_one", "logistic"),
    *("round_nearest_afz", "round_nearest_even", "rsqrt", "sine", "sqrt", "tan", "tanh"),
)
EXACT = frozenset(
    {
        *("abs", "negate", "sign", "not", "floor", "ceil", "round_nearest_afz", "round_nearest_even", "popcnt", "sqrt"),
        *("count_leading_zeros", "add", "subtract", "multiply", "maximum", "minimum", "and", "or", "xor", "divide"),
        *("shift_left", "shift_right_arithmetic", "shift_right_logical", "remainder"),
    }
)
MOVES = ("transpose", "reverse", "slice", "pad", "concatenate", "broadcast_in_dim", "reshape", "iota", "update", "cut")


def shape_of(rng: np.random.Generator, low: int = 0, high: int = 3, empty: bool = True) -> tuple[int, ...]:
    extents = [0, 1, 2, 3, 5, 7, 11] if empty and rng.random() < 0.1 else [1, 2, 3, 5, 7, 11]
    return tuple(int(rng.choice(extents)) for _ in range(int(rng.integers(low, high + 1))))


def values(dtype: DType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """The whole range with its corners, in random order."""
    array = sample(dtype, shape, int(rng.integers(1 << 30)))
    return rng.permutation(array.reshape(-1)).reshape(shape)


def unary(rng: np.random.Generator) -> Case:
    dtype = pick(rng, [*INTEGERS, *FLOATS, *FLOATS, *FLOATS, PRED])
    assert isinstance(dtype, DType)
    if dtype.is_float:
        names = [*UNARY_FLOAT, "abs", "negate", "sign"]
    elif dtype is PRED:
        names = ["not"]
    else:
        names = ["not", "popcnt", "count_leading_zeros", "negate", *(["abs", "sign"] if dtype.is_signed else [])]
    name = str(pick(rng, names))
    t = TensorType(dtype, shape_of(rng))
    x = values(dtype, t.shape, rng)
    if name in ("sine", "cosine", "tan"):
        x = np.clip(x, -1e3, 1e3).astype(x.dtype)
    body = f"%r = stablehlo.{name} %x : {mlir_type(t)}"
    return Case(body, {"x": (dtype, x)}, {"r": t}, ulps=0 if name in EXACT - {"sqrt"} else 16, depth=0)


def binary(rng: np.random.Generator) -> Case:
    dtype = pick(rng, [*INTEGERS, *INTEGERS, *FLOATS, *FLOATS, PRED])
    assert isinstance(dtype, DType)
    names = ["add", "multiply", "maximum", "minimum"]
    if dtype.is_float:
        names += ["subtract", "divide", "remainder", "power", "atan2"]
    elif dtype is PRED:
        names += ["and", "or", "xor"]
    else:
        names += ["subtract", "divide", "remainder", "power", "and", "or", "xor"]
        names += ["shift_left", "shift_right_arithmetic", "shift_right_logical"]
    name = str(pick(rng, names))
    t = TensorType(dtype, shape_of(rng))
    x, y = values(dtype, t.shape, rng), values(dtype, t.shape, rng)
    if name == "power":
        y = np.clip(y.astype(np.float64), 0 if dtype.is_integer else -4, 5).astype(y.dtype)
        x = np.clip(x.astype(np.float64), 0 if not dtype.is_signed else -9, 9).astype(x.dtype)
    if name == "remainder" and dtype.is_float:
        x, y = (np.clip(v.astype(np.float64), -300, 300).astype(v.dtype) for v in (x, y))
    body = f"%r = stablehlo.{name} %x, %k : {mlir_type(t)}"
    ulps = 0 if name in EXACT or dtype.is_integer else 32
    return Case(body, {"x": (dtype, x), "k": (dtype, y)}, {"r": t}, ulps=ulps + (dtype in (BF16, F16)))


def compare(rng: np.random.Generator) -> Case:
    dtype = pick(rng, [*INTEGERS, *FLOATS, PRED])
    assert isinstance(dtype, DType)
    kinds = ["FLOAT", "TOTALORDER"] if dtype.is_float else ["SIGNED" if dtype.is_signed else "UNSIGNED"]
    shape = shape_of(rng)
    t, p = TensorType(dtype, shape), TensorType(PRED, shape)
    x = values(dtype, shape, rng)
    y = np.where(rng.random(shape) < 0.3, x, values(dtype, shape, rng)).astype(x.dtype)
    how = f"{pick(rng, ['EQ', 'NE', 'LT', 'LE', 'GT', 'GE'])}, %x, %k, {pick(rng, kinds)}"
    body = f"%r = stablehlo.compare {how} : ({mlir_type(t)}, {mlir_type(t)}) -> {mlir_type(p)}"
    return Case(body, {"x": (dtype, x), "k": (dtype, y)}, {"r": p})


def converted(rng: np.random.Generator) -> Case:
    every = [d for d in BY_NAME.values() if d is not OPAQUE and d not in (S4, U4)]
    source, target = pick(rng, every), pick(rng, every)
    assert isinstance(source, DType)
    assert isinstance(target, DType)
    shape = shape_of(rng)
    a, b = TensorType(source, shape), TensorType(target, shape)
    x = values(source, shape, rng)
    if source.is_float and target.is_integer:  # past the range, and of NaN, XLA's result is its own affair
        wide = np.nan_to_num(x.astype(np.float64), posinf=100, neginf=-100)
        most = 4.0 if source is F4E2M1FN else 100.0  # XLA takes its largest, 6, for the integer's largest, which it rounds to 6
        x = np.clip(wide, max(-most, float(target.min)), min(most, float(target.max))).astype(x.dtype)
    body = f"%r = stablehlo.convert %x : ({mlir_type(a)}) -> {mlir_type(b)}"
    return Case(body, {"x": (source, x)}, {"r": b})


def selected(rng: np.random.Generator) -> Case:
    dtype = pick(rng, [*INTEGERS, *FLOATS, PRED])
    assert isinstance(dtype, DType)
    shape = shape_of(rng)
    t = TensorType(dtype, shape)
    x, y = values(dtype, shape, rng), values(dtype, shape, rng)
    if rng.random() < 0.5 or dtype is PRED:
        scalar = rng.random() < 0.3
        p = values(PRED, () if scalar else shape, rng)
        body = f"%r = stablehlo.select %p, %x, %k : {mlir_type(TensorType(PRED, p.shape))}, {mlir_type(t)}"
        return Case(body, {"p": (PRED, p), "x": (dtype, x), "k": (dtype, y)}, {"r": t})
    low, high = (() if rng.random() < 0.3 else shape for _ in range(2))
    a, b = values(dtype, low, rng), values(dtype, high, rng)
    types = ", ".join(mlir_type(TensorType(dtype, s)) for s in (low, shape, high))
    body = f"%r = stablehlo.clamp %a, %x, %b : ({types}) -> {mlir_type(t)}"
    if dtype.is_float:
        a, b = np.nan_to_num(a), np.nan_to_num(b)
    return Case(body, {"a": (dtype, a), "x": (dtype, x), "b": (dtype, b)}, {"r": t})


def moved(rng: np.random.Generator) -> Case:
    """Views, cuts and joins."""
    dtype = pick(rng, [*INTEGERS, *FLOATS, PRED])
    assert isinstance(dtype, DType)
    shape = shape_of(rng, 1, 4, empty=False)
    rank = len(shape)
    t = TensorType(dtype, shape)
    x = values(dtype, shape, rng)
    given = {"x": (dtype, x)}
    name = pick(rng, list(MOVES))
    if name == "transpose":
        perm = [int(v) for v in rng.permutation(rank)]
        out = tuple(shape[p] for p in perm)
        body = f"stablehlo.transpose %x, dims = {perm} : ({mlir_type(t)}) -> "
    elif name == "reverse":
        axes = sorted(int(v) for v in rng.permutation(rank)[: int(rng.integers(1, rank + 1))])
        return Case(f"%r = stablehlo.reverse %x, dims = {axes} : {mlir_type(t)}", given, {"r": t})
    elif name == "slice":
        start = [int(rng.integers(0, d)) for d in shape]
        stop = [int(rng.integers(s, d + 1)) for s, d in zip(start, shape, strict=True)]
        step = integers(rng, 1, 3, rank)
        out = tuple(-(-(b - a) // s) for a, b, s in zip(start, stop, step, strict=True))
        cuts = ", ".join(f"{a}:{b}:{s}" for a, b, s in zip(start, stop, step, strict=True))
        body = f"stablehlo.slice %x [{cuts}] : ({mlir_type(t)}) -> "
    elif name == "pad":
        inner = integers(rng, 0, 2, rank)
        span = [d + (d - 1) * i for d, i in zip(shape, inner, strict=True)]
        low = [int(rng.integers(-min(2, d - 1), 4)) for d in span]
        high = [int(rng.integers(-min(2, max(d + min(w, 0) - 1, 0)), 4)) for d, w in zip(span, low, strict=True)]
        out = tuple(d + a + b for d, a, b in zip(span, low, high, strict=True))
        given["v"] = (dtype, values(dtype, (), rng))
        ends = f"low = {low}, high = {high}, interior = {inner}"
        body = f"stablehlo.pad %x, %v, {ends} : ({mlir_type(t)}, {mlir_type(TensorType(dtype, ()))}) -> "
    elif name == "concatenate":
        axis = int(rng.integers(rank))
        other = tuple(int(rng.integers(0, 4)) if a == axis else d for a, d in enumerate(shape))
        given["k"] = (dtype, values(dtype, other, rng))
        out = tuple(d + other[a] if a == axis else d for a, d in enumerate(shape))
        types = f"{mlir_type(t)}, {mlir_type(TensorType(dtype, other))}"
        body = f"stablehlo.concatenate %x, %k, dim = {axis} : ({types}) -> "
    elif name == "broadcast_in_dim":
        whole = rank + int(rng.integers(0, 3))
        dims = [int(v) for v in rng.permutation(whole)[:rank]]
        result = [int(rng.integers(1, 4)) for _ in range(whole)]
        for d, extent in zip(dims, shape, strict=True):
            result[d] = extent if extent > 1 else result[d]
        out = tuple(result)
        body = f"stablehlo.broadcast_in_dim %x, dims = {dims} : ({mlir_type(t)}) -> "
    elif name == "reshape":
        out = tuple(int(v) for v in rng.permutation([*shape, 1]))
        body = f"stablehlo.reshape %x : ({mlir_type(t)}) -> "
    elif name == "iota":
        if dtype is PRED:
            dtype = S32
        t = TensorType(dtype, shape)
        return Case(f"%r = stablehlo.iota dim = {int(rng.integers(rank))} : {mlir_type(t)}", {}, {"r": t})
    else:
        index = pick(rng, [S32, S64, U8])
        assert isinstance(index, DType)
        size = tuple(int(rng.integers(1, d + 1)) for d in shape)
        least = -3 if index is not U8 else 0
        at = [np.asarray(rng.integers(least, d + 3), index.to_numpy()) for d in shape]
        starts = {f"i{a}": (index, v) for a, v in enumerate(at)}
        names, kinds = ", ".join(f"%{n}" for n in starts), ", ".join([mlir_type(TensorType(index, ()))] * rank)
        small = TensorType(dtype, size)
        if name == "cut":
            out = size
            body = f"stablehlo.dynamic_slice %x, {names}, sizes = {list(size)} : ({mlir_type(t)}, {kinds}) -> "
        else:
            out = shape
            given["k"] = (dtype, values(dtype, size, rng))
            body = f"stablehlo.dynamic_update_slice %x, %k, {names} : ({mlir_type(t)}, {mlir_type(small)}, {kinds}) -> "
        given |= starts
    result_type = TensorType(dtype, out)
    return Case(f"%r = {body}{mlir_type(result_type)}", given, {"r": result_type})


def identity(name: str, dtype: DType) -> float | int | bool:
    """The operand with which a function leaves the other one as it is."""
    if dtype is PRED:
        return name == "and"
    ones = -1 if dtype.is_signed else int(dtype.max)
    return {"add": 0, "multiply": 1, "or": 0, "xor": 0, "and": ones, "maximum": dtype.lowest, "minimum": dtype.highest}[name]


def reduced(rng: np.random.Generator) -> Case:
    dtype = pick(rng, [*INTEGERS, *FLOATS, PRED])
    assert isinstance(dtype, DType)
    names = ["add", "multiply", "maximum", "minimum"]
    names = ["and", "or"] if dtype is PRED else names + ([] if dtype.is_float else ["and", "or", "xor"])
    name = pick(rng, names)
    shape = shape_of(rng, 1, 4)
    axes = sorted(int(v) for v in rng.permutation(len(shape))[: int(rng.integers(1, len(shape) + 1))])
    out = TensorType(dtype, tuple(d for a, d in enumerate(shape) if a not in axes))
    t, s = TensorType(dtype, shape), TensorType(dtype, ())
    x = moderate(dtype, shape, rng)
    v = np.asarray(identity(str(name), dtype), dtype.to_numpy())  # of any other, XLA reads what it likes
    how = f"applies stablehlo.{name} across dimensions = {axes}"
    body = f"%r = stablehlo.reduce(%x init: %v) {how} : ({mlir_type(t)}, {mlir_type(s)}) -> {mlir_type(out)}"
    loose = dtype.is_float and name in ("add", "multiply")
    return Case(body, {"x": (dtype, x), "v": (dtype, v)}, {"r": out}, ulps=64 if loose else 0, depth=64 if loose else 0)


def bits(rng: np.random.Generator) -> Case:
    if rng.random() < 0.5:
        dtype = pick(rng, [F32, F64, F16, BF16])
        assert isinstance(dtype, DType)
        most = {F32: (8, 23), F64: (11, 52), F16: (5, 10), BF16: (8, 7)}[dtype]
        t = TensorType(dtype, shape_of(rng))
        e, m = int(rng.integers(2, most[0] + 1)), int(rng.integers(1, most[1] + 1))
        body = f"%r = stablehlo.reduce_precision %x, format = e{e}m{m} : {mlir_type(t)}"
        return Case(body, {"x": (dtype, values(dtype, t.shape, rng))}, {"r": t})
    a, b = pick(rng, [S8, U8, S16, U16, S32, U32, S64, U64, F32, F64]), pick(rng, [S8, U8, S16, U16, S32, U32, S64, U64])
    assert isinstance(a, DType)
    assert isinstance(b, DType)
    shape = shape_of(rng, 1, 3, empty=False)
    if b.bits > a.bits:
        shape = (*shape, b.bits // a.bits)
        out = shape[:-1]
    else:
        out = (*shape, a.bits // b.bits) if a.bits > b.bits else shape
    x = values(a, shape, rng)
    body = f"%r = stablehlo.bitcast_convert %x : ({mlir_type(TensorType(a, shape))}) -> {mlir_type(TensorType(b, out))}"
    return Case(body, {"x": (a, np.nan_to_num(x) if a.is_float else x)}, {"r": TensorType(b, out)})


def sorted_(rng: np.random.Generator) -> Case:
    dtype = pick(rng, [*INTEGERS, F32, F64])
    assert isinstance(dtype, DType)
    t = TensorType(dtype, shape_of(rng, 1, 3))
    axis = int(rng.integers(len(t.shape)))
    s, how = mlir_type(TensorType(dtype, ())), pick(rng, ["LT", "GT"])
    body = (
        f'%r = "stablehlo.sort"(%x) ({{\n^bb0(%a: {s}, %b: {s}):\n%c = stablehlo.compare {how}, %a, %b : ({s}, {s}) -> '
        f"tensor<i1>\nstablehlo.return %c : tensor<i1>\n}}) {{dimension = {axis} : i64, is_stable = true}} "
        f": ({mlir_type(t)}) -> {mlir_type(t)}"
    )
    return Case(body, {"x": (dtype, moderate(dtype, t.shape, rng))}, {"r": t})


def windows(rng: np.random.Generator) -> Case:
    dtype = pick(rng, [*INTEGERS, *FLOATS])
    assert isinstance(dtype, DType)
    shape = shape_of(rng, 1, 3, empty=False)
    name = pick(rng, ["add", "maximum", "minimum", "multiply"])
    rank = len(shape)
    size, step = integers(rng, 1, 3, rank), integers(rng, 1, 3, rank)
    spread, gap = integers(rng, 1, 2, rank), integers(rng, 1, 2, rank)
    reach = [(w - 1) * g + 1 for w, g in zip(size, gap, strict=True)]
    low, high = integers(rng, 0, 2, rank), integers(rng, 0, 2, rank)
    span = [(d - 1) * s + 1 + a + b for d, s, a, b in zip(shape, spread, low, high, strict=True)]
    out = TensorType(dtype, tuple((d - r) // s + 1 if d >= r else 0 for d, r, s in zip(span, reach, step, strict=True)))
    t, s = TensorType(dtype, shape), mlir_type(TensorType(dtype, ()))
    v = np.asarray(identity(str(name), dtype), dtype.to_numpy())
    pads = "[" + ", ".join(f"[{a}, {b}]" for a, b in zip(low, high, strict=True)) + "]"
    body = (
        f'%r = "stablehlo.reduce_window"(%x, %v) ({{\n^bb0(%a: {s}, %b: {s}):\n%c = stablehlo.{name} %a, %b : {s}\n'
        f"stablehlo.return %c : {s}\n}}) {{window_dimensions = array<i64: {str(size)[1:-1]}>, window_strides = array<i64: "
        f"{str(step)[1:-1]}>, base_dilations = array<i64: {str(spread)[1:-1]}>, window_dilations = "
        f"array<i64: {str(gap)[1:-1]}>, padding = dense<{pads}> : tensor<{rank}x2xi64>}} "
        f": ({mlir_type(t)}, {s}) -> {mlir_type(out)}"
    )
    loose = dtype.is_float and name in ("add", "multiply")
    given = {"x": (dtype, moderate(dtype, shape, rng)), "v": (dtype, v)}
    return Case(body, given, {"r": out}, ulps=32 * loose, depth=32 * loose)


PRODUCTS = [*CONVOLVED, (F16, BF16, F32), (U8, S8, S32), (F8E4M3FN, F8E5M2, F32), (BF16, F32, F32), (F8E4M3FN, BF16, BF16)]


def product(rng: np.random.Generator) -> Case:
    """dot_general over any number of batch, contracted and free axes, in any order."""
    lhs, rhs, out = pick(rng, PRODUCTS)  # type: ignore[misc]
    counts = [int(v) for v in rng.choice([0, 1, 1, 2], 4)]
    extents = [0, 1, 2, 3, 5, 17] if rng.random() < 0.1 else [1, 2, 3, 5, 17]
    batch, inner, rows, columns = ([int(v) for v in rng.choice(extents, n)] for n in counts)

    def laid_out(free: list[int]) -> tuple[tuple[int, ...], list[int], list[int]]:
        sizes = [*batch, *inner, *free]
        order = [int(v) for v in rng.permutation(len(sizes))]
        at = [order.index(i) for i in range(len(sizes))]
        return tuple(sizes[i] for i in order), at[: len(batch)], at[len(batch) : len(batch) + len(inner)]

    ls, lb, lc = laid_out(rows)
    rs, rb, rc = laid_out(columns)
    free = [d for i, d in enumerate(ls) if i not in lb + lc], [d for i, d in enumerate(rs) if i not in rb + rc]
    tx, tk, to = TensorType(lhs, ls), TensorType(rhs, rs), TensorType(out, (*batch, *free[0], *free[1]))
    body = (
        f"%r = stablehlo.dot_general %x, %k, batching_dims = {lb} x {rb}, contracting_dims = {lc} x {rc} "
        f": ({mlir_type(tx)}, {mlir_type(tk)}) -> {mlir_type(to)}"
    )
    return case(body, {"x": (lhs, moderate(lhs, ls, rng)), "k": (rhs, moderate(rhs, rs, rng))}, {"r": to}, ulps=2, depth=4)


def picked(rng: np.random.Generator) -> Case:
    """A gather of windows from any axes, indices past the ends among them."""
    dtype, index = pick(rng, [*INTEGERS, *FLOATS, PRED]), pick(rng, [S32, S64, U32, S8])
    assert isinstance(dtype, DType)
    assert isinstance(index, DType)
    shape = shape_of(rng, 1, 4, empty=False)
    rank = len(shape)
    mapped = [int(v) for v in rng.permutation(rank)[: int(rng.integers(1, rank + 1))]]
    sizes = [1 if rng.random() < 0.4 else int(rng.integers(1, d + 1)) for d in shape]
    collapsed = sorted(d for d in range(rank) if sizes[d] == 1 and rng.random() < 0.6)
    batch = shape_of(rng, 0, 2, empty=False)
    window = [sizes[d] for d in range(rank) if d not in collapsed]
    places = sorted(int(v) for v in rng.permutation(len(batch) + len(window))[: len(window)])
    out: list[int] = []
    rest, inner = list(batch), list(window)
    for i in range(len(batch) + len(window)):
        out.append(inner.pop(0) if i in places else rest.pop(0))
    at = int(rng.integers(len(batch) + 1))
    starts = (*batch[:at], len(mapped), *batch[at:])
    low = -3 if index.is_signed else 0
    k = rng.integers(low, max(shape) + 3, starts).astype(index.to_numpy())
    tx, tk, to = TensorType(dtype, shape), TensorType(index, starts), TensorType(dtype, tuple(out))
    body = (
        f'%r = "stablehlo.gather"(%x, %k) {{dimension_numbers = #stablehlo.gather<offset_dims = {places}, '
        f"collapsed_slice_dims = {collapsed}, start_index_map = {mapped}, index_vector_dim = {at}>, "
        f"slice_sizes = array<i64: {str(sizes)[1:-1]}>, indices_are_sorted = false}} "
        f": ({mlir_type(tx)}, {mlir_type(tk)}) -> {mlir_type(to)}"
    )
    return Case(body, {"x": (dtype, values(dtype, shape, rng)), "k": (index, k)}, {"r": to})


CASES: dict[str, Callable[[np.random.Generator], Case]] = {
    "binary": binary,
    "bits": bits,
    "compare": compare,
    "convert": converted,
    "convolution": convolution,
    "dot_general": product,
    "gather": picked,
    "move": moved,
    "reduce": reduced,
    "select": selected,
    "sort": sorted_,
    "triangular_solve": triangular_solve,
    "unary": unary,
    "window": windows,
}
