"""Slices, gathers, windows and other movements of elements, as JAX writes them."""

from __future__ import annotations

import numpy as np
import pytest
from against_jax import agree, calls, close, normal, program, run, xla
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tilewright.dtype import BY_NAME, F4E2M1FN, F32, OPAQUE, S64, DType
from tilewright.errors import UnsupportedError
from tilewright.frontends import load
from tilewright.frontends.stablehlo.module import mlir_type
from tilewright.ir.types import TensorType

TYPES = [d for d in BY_NAME.values() if d is not OPAQUE]
FLOATS = [d for d in TYPES if d.is_float]


def _f32(shape: list[int], seed: int) -> np.ndarray:
    return normal(F32, shape, seed)


EXTENTS = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@settings(max_examples=15)
@given(EXTENTS, st.data())
def test_slices_and_updates_at_run_time_are_those_of_jax(shape: list[int], data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(0 if d > 3 else 1, d)) for d in shape]
    kind = data.draw(st.sampled_from([np.int32, np.int8, np.uint8, np.uint32]))
    lowest = -3 if np.issubdtype(kind, np.signedinteger) else 0
    starts = [np.asarray(data.draw(st.integers(lowest, 7)), kind) for _ in shape]
    x, u = _f32(shape, 1), _f32(sizes, 2)

    def f(x: object, u: object, *i: object) -> object:
        fixed = [int(s) for s in starts]
        return (
            lax.dynamic_slice(x, i, sizes),
            lax.dynamic_update_slice(x, u, i),
            lax.dynamic_slice(x, fixed, sizes),
            lax.dynamic_update_slice(x, u, fixed),
        )

    agree(f, x, u, *starts)


@settings(max_examples=15)
@given(EXTENTS, st.data())
def test_gathers_are_those_of_jax(shape: list[int], data: st.DataObject) -> None:
    rank = len(shape)
    axes = data.draw(st.permutations(range(rank)))
    count = data.draw(st.integers(1, rank))
    along = data.draw(st.integers(0, rank - count))
    mapped, batching = list(axes[:count]), sorted(axes[count : count + along])
    sizes = [1 if d in batching else data.draw(st.integers(1, shape[d])) for d in range(rank)]
    collapsed = [d for d in range(rank) if d not in batching and sizes[d] == 1 and data.draw(st.booleans())]
    batch = [data.draw(st.integers(1, 4)) for _ in range(along + data.draw(st.integers(0, 2)))]
    carrying = list(data.draw(st.permutations(range(len(batch)))))[:along]
    for d, axis in zip(batching, carrying, strict=True):
        batch[axis] = shape[d]
    offsets = rank - len(collapsed) - along
    places = sorted(data.draw(st.permutations(range(offsets + len(batch))))[:offsets])
    numbers = lax.GatherDimensionNumbers(tuple(places), tuple(collapsed), tuple(mapped), tuple(batching), tuple(carrying))
    indices = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-2, 7, (*batch, count)).astype(np.int32)
    graph = agree(lambda x, i: lax.gather(x, i, numbers, sizes, mode="clip"), _f32(shape, 3), indices)["stablehlo"]
    assert not calls(graph)


@settings(max_examples=8)  # XLA compiles each, which takes most of the time
@given(EXTENTS, st.data())
def test_windows_padding_reversal_and_broadcasts_are_those_of_jax(shape: list[int], data: st.DataObject) -> None:
    def per_axis(low: int, high: int) -> list[int]:
        return [data.draw(st.integers(low, high)) for _ in shape]

    window, step, spread, gap = per_axis(1, 5), per_axis(1, 2), per_axis(1, 2), per_axis(1, 2)
    margins = list(zip(per_axis(0, 2), per_axis(0, 2), strict=True))
    f, start = data.draw(st.sampled_from([(lax.add, 0.0), (lax.max, -np.inf), (lax.min, np.inf), (lax.mul, 1.0)]))
    crop = [(max(-1, 1 - d), 1, i) for d, i in zip(shape, per_axis(0, 2), strict=True)]
    extra = data.draw(st.integers(0, 2))
    dims = sorted(data.draw(st.permutations(range(len(shape) + extra)))[: len(shape)])
    large = [3] * (len(shape) + extra)
    for d, extent in zip(dims, shape, strict=True):
        large[d] = extent
    x = _f32(shape, 4)

    def moved(x: object) -> object:
        return (
            lax.pad(x, np.float32(7), crop),
            lax.rev(x, tuple(range(0, len(shape), 2))),
            lax.broadcast_in_dim(x, large, dims),
            lax.concatenate([x, x], 0),  # type: ignore[list-item]
        )

    agree(moved, x)
    x = np.rint(4 * x) if f is lax.add else x  # sums of integers are exact in any order, also where they cancel
    windowed = agree(
        lambda x: lax.reduce_window(x, np.float32(start), f, window, step, margins, spread, gap), x, ulps=8, depth=2
    )
    assert not calls(windowed["stablehlo"])


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_reductions_start_from_any_value_and_are_those_of_xla(dtype: DType) -> None:
    t, out, scalar = TensorType(dtype, (3, 4, 5)), TensorType(dtype, (4,)), TensorType(dtype, ())
    ops = ["add", "maximum", "minimum", "multiply", *([] if dtype.is_float else ["and", "or"])]
    lines = [
        f"%r{i} = stablehlo.reduce(%x init: %i) applies stablehlo.{op} across dimensions = [0, 2] : "
        f"({mlir_type(t)}, {mlir_type(scalar)}) -> {mlir_type(out)}"
        for i, op in enumerate(ops)
    ]
    text = program("\n".join(lines), {"x": t, "i": scalar}, {f"r{i}": out for i in range(len(ops))})
    x, start = normal(dtype, [3, 4, 5], 5), np.asarray(normal(dtype, [4], 6)[1])
    for op, w, g in zip(ops, xla(text, x, start), run(load(text), x, start), strict=True):
        if dtype.is_float and dtype.bits <= 16 and op in ("add", "multiply"):
            continue  # XLA rounds after every step; see the next test
        close(g, w, ulps=16, depth=4, what=op)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.bits <= 16], ids=lambda d: d.name)
def test_narrow_reductions_are_rounded_once(dtype: DType) -> None:
    t, scalar = TensorType(dtype, (64,)), TensorType(dtype, ())
    line = (
        f"%z = stablehlo.constant dense<0.0> : {mlir_type(scalar)}\n%r = stablehlo.reduce(%x init: %z) applies stablehlo.add "
        f"across dimensions = [0] : ({mlir_type(t)}, {mlir_type(scalar)}) -> {mlir_type(scalar)}"
    )
    x = normal(dtype, [64], 7)
    (got,) = run(load(program(line, {"x": t}, {"r": scalar})), x)
    wanted = x.astype(np.float64).sum()
    if dtype is F4E2M1FN:
        wanted = wanted.clip(dtype.min, dtype.max)
    assert abs(float(got) - wanted) <= dtype.epsilon * abs(wanted)


def test_a_reduction_that_widens_inside_is_one_reduction() -> None:
    text = """func.func @main(%x: tensor<4x6xbf16>) -> tensor<4xbf16> {
  %z = stablehlo.constant dense<0.0> : tensor<bf16>
  %r = "stablehlo.reduce"(%x, %z) ({
  ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
    %0 = stablehlo.convert %a : (tensor<bf16>) -> tensor<f32>
    %1 = stablehlo.convert %b : (tensor<bf16>) -> tensor<f32>
    %2 = stablehlo.add %0, %1 : tensor<f32>
    %3 = stablehlo.convert %2 : (tensor<f32>) -> tensor<bf16>
    stablehlo.return %3 : tensor<bf16>
  }) {dimensions = array<i64: 1>} : (tensor<4x6xbf16>, tensor<bf16>) -> tensor<4xbf16>
  return %r : tensor<4xbf16>
}
"""
    assert [n.op.name for n in load(text).nodes()] == ["input", "reduce"]


def test_widths_that_constants_make_are_read() -> None:
    def widths(*names: str) -> str:
        given = {"a": [1, 0], "b": [3, 5], "c": [1, 2]}
        return "\n".join(f"%{n} = stablehlo.constant dense<{given[n]}> : tensor<2xi64>" for n in names)

    w, t = "tensor<2xi64>", "tensor<3x5xf32>"
    cut = f"%r = stablehlo.real_dynamic_slice %x, %a, %b, %c : ({t}, {w}, {w}, {w}) -> tensor<2x3xf32>"
    fill = f"%r = stablehlo.dynamic_pad %x, %v, %a, %b, %c : ({t}, tensor<f32>, {w}, {w}, {w}) -> tensor<9x18xf32>"
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    text = program(f"{widths('a', 'b', 'c')}\n{cut}", {"x": TensorType(F32, (3, 5))}, {"r": TensorType(F32, (2, 3))})
    (got,) = run(load(text), x)
    assert got.tolist() == x[1:3, 0:5:2].tolist()
    given = {"x": TensorType(F32, (3, 5)), "v": TensorType(F32, ())}
    text = program(f"{widths('a', 'b', 'c')}\n{fill}", given, {"r": TensorType(F32, (9, 18))})
    (got,) = run(load(text), x, np.float32(-1))
    np.testing.assert_array_equal(got.numpy(), np.asarray(lax.pad(x, np.float32(-1), [(1, 3, 1), (0, 5, 2)])))
    takes = {"x": TensorType(F32, (3, 5)), **{n: TensorType(S64, (2,)) for n in "abc"}}
    with pytest.raises(UnsupportedError, match=r"its widths are known only at run time .*\n  try: make them constants"):
        load(program(cut, takes, {"r": TensorType(F32, (2, 3))}))
