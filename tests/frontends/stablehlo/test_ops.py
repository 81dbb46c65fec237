"""Elementwise operators, conversions, reductions and constants of StableHLO, on every element type."""

from __future__ import annotations

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against_jax import agree, calls, close, program, run, sample, to_torch, xla
from jax import lax

from tilewright.dtype import BF16, BY_NAME, F4E2M1FN, F32, OPAQUE, PRED, DType
from tilewright.errors import InputError
from tilewright.frontends import load
from tilewright.frontends.stablehlo.module import mlir_type
from tilewright.ir.types import TensorType

TYPES = [d for d in BY_NAME.values() if d is not OPAQUE]
ULPS = {"f32": 32.0, "f64": 64.0}  # XLA approximates transcendental functions; narrower results are rounded once more


WORDS = re.compile(r"\w+")
UNARY = WORDS.findall(
    "abs cbrt ceil cosine count_leading_zeros exponential exponential_minus_one floor is_finite log log_plus_one logistic "
    "negate not popcnt round_nearest_afz round_nearest_even rsqrt sign sine sqrt tan tanh"
)
BINARY = WORDS.findall(
    "add and atan2 divide maximum minimum multiply or remainder shift_left shift_right_arithmetic shift_right_logical "
    "subtract xor power"
)
COMPARISONS = ["EQ", "NE", "LT", "LE", "GT", "GE"]
ROUNDED = set(
    WORDS.findall("atan2 cbrt cosine exponential exponential_minus_one log log_plus_one logistic power rsqrt sine tan tanh")
)


def _parses(text: str) -> bool:
    try:
        load(text)
    except InputError:
        return False
    return True


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_elementwise_operators_are_those_of_xla(dtype: DType) -> None:
    t, pred = TensorType(dtype, (48,)), TensorType(PRED, (48,))
    lines: dict[str, tuple[str, TensorType]] = {}
    for op in UNARY:
        out = pred if op == "is_finite" else t
        lines[op] = (f"stablehlo.{op} %x : ({mlir_type(t)}) -> {mlir_type(out)}", out)
    for op in BINARY:
        lines[op] = (f"stablehlo.{op} %x, %{'small' if op == 'power' else 'y'} : {mlir_type(t)}", t)
    orders = ["", ", TOTALORDER"] if dtype.is_float and "fnuz" not in dtype.name else [""]
    for direction, order in itertools.product(COMPARISONS, orders):
        compare = f"stablehlo.compare {direction}, %x, %y{order} : ({mlir_type(t)}, {mlir_type(t)}) -> {mlir_type(pred)}"
        lines[f"{direction}{order}"] = (compare, pred)
    lines["clamp"] = (f"stablehlo.clamp %small, %x, %y : {mlir_type(t)}", t)
    arguments = {"x": t, "y": t, "small": t}
    kept = {n: line for n, line in lines.items() if _parses(program(f"%r = {line[0]}", arguments, {"r": line[1]}))}
    if dtype.bits == 4:
        kept.pop("popcnt", None)  # XLA counts the bits of the byte that carries a code
    if dtype.is_float and dtype.bits == 8:
        kept = {n: line for n, line in kept.items() if n not in ROUNDED}  # XLA rounds twice on the way to 8 bits
    x, y = sample(dtype, (48,), 1), np.random.default_rng(2).permutation(sample(dtype, (48,), 3))
    small = sample(dtype, (48,), 4)
    if dtype.is_integer:
        small = np.abs(small.astype(np.int64) % 5).astype(small.dtype)
    body = "\n".join(f"%r{i} = {line}" for i, (line, _) in enumerate(kept.values()))
    text = program(body, arguments, {f"r{i}": out for i, (_, out) in enumerate(kept.values())})
    wanted, got = xla(text, x, y, small), run(load(text), x, y, small)
    for name, w, g in zip(kept, wanted, got, strict=True):
        close(g, w, ulps=ULPS.get(dtype.name, 4.0) if name in ROUNDED else 2.0, what=f"{name} {dtype}")
    assert len(kept) > 12


@pytest.mark.parametrize("source", TYPES, ids=lambda d: d.name)
def test_conversions_are_those_of_xla_bit_for_bit(source: DType) -> None:
    t = TensorType(source, (64,))
    results = {f"r{i}": TensorType(d, (64,)) for i, d in enumerate(TYPES)}
    body = "\n".join(f"%{n} = stablehlo.convert %x : ({mlir_type(t)}) -> {mlir_type(r)}" for n, r in results.items())
    text = program(body, {"x": t}, results)
    x = sample(source, (64,))
    if source is F4E2M1FN:  # whose 6 jaxlib 0.10 makes the largest integer, as if it were an infinity
        x = x.astype(np.float32).clip(-4, 4).astype(x.dtype)
    for target, w, g in zip(TYPES, xla(text, x), run(load(text), x), strict=True):
        close(g, w, what=f"{source} to {target}")


def test_functions_of_chlo_are_those_of_xla() -> None:
    rng = np.random.default_rng(11)
    x = rng.uniform(-0.95, 0.95, (40,)).astype(np.float32)
    names = ["acos", "asin", "asinh", "atan", "atanh", "cosh", "erf", "erfc", "sinh", "tan", "square"]
    graph = agree(lambda x: [getattr(lax, n)(x) for n in names], x, ulps=16, depth=2)["stablehlo"]
    assert not calls(graph)
    odd = np.array([1, np.inf, -np.inf, np.nan], np.float32)
    agree(lambda x: (jnp.isinf(x), jnp.isposinf(x), jnp.isneginf(x), jnp.isnan(x), lax.acosh(abs(x) + 1)), odd)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("count", [1, 7, 200])
def test_constants_of_every_type_keep_their_bits(dtype: DType, count: int) -> None:
    values = sample(dtype, (count,), count)
    tensor = to_torch(values)
    if dtype.bits == 4 and dtype.is_integer:
        written = ", ".join(str(int(v)) for v in values)
        body = f"%r = stablehlo.constant dense<[{written}]> : {mlir_type(TensorType(dtype, (count,)))}"
    else:
        raw = values.tobytes() if dtype is not PRED else np.packbits(values, bitorder="little").tobytes()
        hexadecimal = (
            f'"0x{raw.hex().upper()}"' if dtype is not PRED else f"[{', '.join(str(bool(v)).lower() for v in values)}]"
        )
        body = f"%r = stablehlo.constant dense<{hexadecimal}> : {mlir_type(TensorType(dtype, (count,)))}"
    # Printed again by jaxlib, a list of numbers up to 100 elements and hexadecimal past that.
    (got,) = run(load(program(body, {}, {"r": TensorType(dtype, (count,))})))
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    assert torch.equal(got.contiguous().view(width), tensor.contiguous().view(width))


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_a_repeated_constant_is_one_element_broadcast(dtype: DType) -> None:
    one = "true" if dtype is PRED else "1.0" if dtype.is_float else "1"
    t = TensorType(dtype, (1000, 1000, 1000, 1000))
    graph = load(program(f"%r = stablehlo.constant dense<{one}> : {mlir_type(t)}", {}, {"r": t}))
    assert [n.op.name for n in graph.nodes()] == ["const", "broadcast"]
    assert graph.nodes()[0].op.data.scalar() == 1  # type: ignore[attr-defined]


def test_empty_and_resource_constants_are_read() -> None:
    empty = TensorType(BF16, (0, 3))
    (got,) = run(load(program(f"%r = stablehlo.constant dense<> : {mlir_type(empty)}", {}, {"r": empty})))
    assert got.shape == (0, 3)
    t = TensorType(F32, (2, 2))
    body = program(f"%r = stablehlo.constant dense_resource<blob> : {mlir_type(t)}", {}, {"r": t})
    data = np.array([[1, 2], [3, 4]], np.float32)
    resources = '{-#\n  dialect_resources: {\n    builtin: {\n      blob: "0x04000000%s"\n    }\n  }\n#-}\n'
    (got,) = run(load(body + resources % data.tobytes().hex()))
    np.testing.assert_array_equal(got.numpy(), data)
    with pytest.raises(InputError, match=r"has 12 bytes of data \(stablehlo.constant at line 2\)"):
        load(body + resources % data.tobytes()[:12].hex())
    with pytest.raises(InputError, match=r"constant '__elided__' was left out.*\n  try: print the module without eliding"):
        load(body.replace("blob", "__elided__"))
