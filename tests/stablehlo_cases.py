"""Random StableHLO programs of one operation each, over types, ranks, attributes and special values.

`CASES` maps an operation to a function of a generator of random numbers that writes one program: its body, its arguments with
their values, its results and how far they may be from XLA's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from against_jax import program, sample
from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, F16, F32, F64, S8, S16, S32, S64, U8, DType
from tilewright.frontends._stablehlo_module import mlir_type
from tilewright.ir.types import TensorType


@dataclass
class Case:
    """One program.

    Attributes:
        text: the module.
        arrays: its arguments.
        ulps: of a result's own value that it may differ by.
        depth: of the largest value of a result that any may differ by, in steps of the result's type.
    """

    text: str
    arrays: list[np.ndarray]
    ulps: float = 0.0
    depth: float = 0.0


def case(body: str, given: dict[str, tuple[DType, np.ndarray]], results: dict[str, TensorType], **bounds: float) -> Case:
    takes = {n: TensorType(d, a.shape) for n, (d, a) in given.items()}
    return Case(program(body, takes, results), [a for _, a in given.values()], **bounds)


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


CASES: dict[str, Callable[[np.random.Generator], Case]] = {
    "convolution": convolution,
    "triangular_solve": triangular_solve,
}
