"""XLA's scaled-dot: operands with scales by blocks, against NumPy on ml_dtypes' own numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from against_jax import sample, to_torch

import tilewright
from tilewright.compiler import optimise
from tilewright.dtype import dtype
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import load
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Dequantize, Gather, Gemm

# Of each: types of the operands and scales, shapes of the same, the result's, axes.
ROWS = "lhs_contracting_dims={1}, rhs_contracting_dims={1}"
BATCHED = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2},\n    rhs_contracting_dims={2}"
E8M0 = "f8e8m0fnu"
CASES = {
    "mx fp8": ("f8e4m3fn", "f8e5m2", E8M0, E8M0, (5, 96), (7, 96), (5, 3), (7, 3), "f32", ROWS, "mk,nk->mn"),
    "batched": ("f8e5m2", "f8e4m3fn", E8M0, E8M0, (2, 3, 64), (2, 7, 64), (2, 3, 2), (2, 7, 2), "f32", BATCHED, "bmk,bnk->bmn"),
    "one side": ("bf16", "f8e4m3fn", "", E8M0, (3, 64), (7, 64), (), (7, 2), "bf16", ROWS, "mk,nk->mn"),
    "float scales": ("f8e4m3fn", "s8", "bf16", "f32", (3, 32), (5, 32), (3, 2), (1, 32), "f32", ROWS, "mk,nk->mn"),
    "wide": ("f32", "f16", E8M0, "f16", (3, 10), (5, 10), (1, 5), (5, 2), "f32", ROWS, "mk,nk->mn"),
    "of powers": (E8M0, "f8e4m3fn", E8M0, E8M0, (3, 10), (5, 10), (3, 2), (1, 2), "f32", ROWS, "mk,nk->mn"),
}
# Where a scaled operand or the result is rounded; numbers of 8 bits times powers of two are not.
ROUNDED = {"one side": 2.0**-8, "float scales": 2.0**-8, "wide": 2.0**-11}


def text(name: str) -> str:
    *types, a, b, s, t, out, axes, equation = CASES[name]
    rows = {"m": a[-2], "n": b[-2], "b": a[0]}
    lines, operands, given = [], [], 0
    for label, kind, shape in zip(("a", "b", "s", "t"), types, (a, b, s, t), strict=True):
        extents = ",".join(map(str, shape))
        lines.append(f"  {label} = {kind or 'bf16'}[{extents}] " + (f"parameter({given})" if kind else "constant(1)"))
        given += bool(kind)
        operands.append(f"%{label}")
    shape = ",".join(str(rows[x]) for x in equation.partition("->")[2])
    lines.append(f'  ROOT r = {out}[{shape}] scaled-dot({", ".join(operands)}), {axes}, metadata={{op_name="x"}}')
    return "HloModule m\nENTRY e {\n" + "\n".join(lines) + "\n}\n"


def values(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Ordinary numbers; powers of two about 1."""
    rng = np.random.default_rng(seed)
    if kind == E8M0:
        return rng.integers(120, 134, shape, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    if kind == "s8":
        return sample(dtype(kind), shape, seed)
    return rng.standard_normal(shape).astype(dtype(kind).to_numpy())


def repeated(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    wide = scale.astype(np.float64)
    for axis, extent in enumerate(shape):
        wide = wide.repeat(extent // wide.shape[axis], axis)
    return wide


def carried(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.uint8)) if array.dtype == ml_dtypes.float8_e8m0fnu else to_torch(array)


def wanted(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    _, _, s_kind, t_kind, a, b, *_, equation = CASES[name]
    left = list(arrays)
    x, y = left.pop(0).astype(np.float64), left.pop(0).astype(np.float64)
    x = x * repeated(left.pop(0), a) if s_kind else x
    y = y * repeated(left.pop(0), b) if t_kind else y
    return np.einsum(equation, x, y)


def close(name: str, given: torch.Tensor, numbers: np.ndarray) -> bool:
    step = ROUNDED.get(name, 1e-6)
    return bool(np.abs(given.double().numpy() - numbers).max() <= step * np.abs(numbers).max())


@pytest.mark.parametrize("name", CASES)
def test_scaled_operands_are_multiplied(name: str) -> None:
    graph = load(text(name))
    kinds = [k for k in CASES[name][:4] if k]
    shapes = [s for s, k in zip(CASES[name][4:8], CASES[name][:4], strict=True) if k]
    arrays = [values(k, s, i) for i, (k, s) in enumerate(zip(kinds, shapes, strict=True))]
    assert close(name, evaluate(graph, [carried(a) for a in arrays])[0], wanted(name, arrays))
    module = tilewright.compile(graph, budget_s=0)
    assert close(name, module(*[carried(a) for a in arrays]), wanted(name, arrays))


@pytest.mark.parametrize("name", ["mx fp8", "batched"])
def test_scales_by_blocks_are_read_by_the_product(name: str) -> None:
    graph = optimise(load(text(name)))
    assert [type(n.op) for n in graph.nodes() if isinstance(n.op, (Gemm, Dequantize, Gather))] == [Gather, Gather, Gemm]
    (product,) = (n.op for n in graph.nodes() if isinstance(n.op, Gemm))
    read = [n.op for n in toposort((product.lhs, product.rhs)) if isinstance(n.op, Dequantize)]
    assert len(read) == 2 and all(max(op.block) == 32 for op in read)


def test_every_scale_is_its_power_of_two() -> None:
    bits = np.arange(256, dtype=np.uint8)
    graph = load("ENTRY e {\n  a = f8e8m0fnu[256] parameter(0)\n  ROOT r = f32[256] convert(a)\n}\n")
    assert any("its bits are taken here" in note for note in graph.notes)
    found = evaluate(graph, [torch.from_numpy(bits)])[0].numpy()
    assert np.array_equal(found, bits.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), equal_nan=True)


def test_scales_are_moved_and_written_out() -> None:
    graph = load(
        "ENTRY e {\n  a = f8e4m3fn[2,4] parameter(0)\n  s = f8e8m0fnu[2,2] constant({{0.5, 4}, {1, nan}})\n"
        "  t = f8e8m0fnu[2,2] transpose(s), dimensions={1,0}\n  one = f8e8m0fnu[] constant(2)\n"
        "  two = f8e8m0fnu[2,2] broadcast(one), dimensions={}\n"
        "  ROOT r = f32[2,2] scaled-dot(a, a, t, two), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n}\n"
    )
    a = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8.0]])
    (found,) = evaluate(graph, [a.to(torch.float8_e4m3fn)])
    scaled = a * torch.tensor([[0.5, 0.5, 1, 1], [4, 4, torch.nan, torch.nan]])
    assert torch.equal(found[0], (scaled @ (2 * a).T)[0]) and found[1].isnan().all()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("f8e8m0fnu[4] multiply(a, a)", r"f8e8m0fnu is read as the scales of a product alone .*multiply"),
        ("f8e8m0fnu[4] convert(b)", r"f8e8m0fnu is read as the scales of a product alone .*convert"),
        ("f8e8m0fnu[4] bitcast-convert(c)", r"f8e8m0fnu is read as the scales of a product alone .*bitcast_convert"),
    ],
)
def test_what_computes_with_scales_is_refused(line: str, words: str) -> None:
    program = "a = f8e8m0fnu[4] parameter(0)\n  b = f32[4] parameter(1)\n  c = s8[4] parameter(2)\n"
    with pytest.raises(UnsupportedError, match=words):
        load(f"ENTRY e {{\n  {program}  r = {line}\n  ROOT s = f32[4] convert(r)\n}}\n")


def test_places_in_messages_are_the_texts_own() -> None:
    program = text("batched").replace("\n}\n", "\n  q = f32[2] nonsense(a)\n}\n")
    with pytest.raises(InputError, match=r"line 9"):
        load(program)
