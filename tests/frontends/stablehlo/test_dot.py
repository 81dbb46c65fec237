"""Products in StableHLO: every choice of dimensions, every element type."""

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
import pytest
import torch
from against_jax import close, gemms, normal, program, run, xla
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from jax import lax

from tilewright.dtype import BF16, BY_NAME, F8E4M3FN, F16, F32, F64, OPAQUE, PRED, S4, S8, S32, U8, DType, from_numpy
from tilewright.frontends import load
from tilewright.frontends.stablehlo.module import mlir_type
from tilewright.ir.types import TensorType

TYPES = [d for d in BY_NAME.values() if d is not OPAQUE]
FLOATS = [d for d in TYPES if d.is_float]
INTEGERS = [d for d in TYPES if d.is_integer]


def _assignments(rank: int, batch: int, contracted: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    chosen = itertools.permutations(range(rank), batch + contracted)
    return [(c[:batch], c[batch:]) for c in chosen]


def dot_text(
    a: TensorType, b: TensorType, out: TensorType, batch: list[list[int]], inner: list[list[int]], more: str = ""
) -> str:
    dims = f"batching_dims = {batch[0]} x {batch[1]}, contracting_dims = {inner[0]} x {inner[1]}{more}"
    body = f"%d = stablehlo.dot_general %a, %b, {dims} : ({mlir_type(a)}, {mlir_type(b)}) -> {mlir_type(out)}"
    return program(body, {"a": a, "b": b}, {"d": out})


@pytest.mark.parametrize("batch", [0, 1, 2, 3])
def test_every_choice_of_batch_and_contracting_dimensions_is_einsum(batch: int) -> None:
    """All ordered choices on two operands of rank 3: integers, so that the comparison is exact."""
    rng = np.random.default_rng(batch)
    shared, rows, columns = [2, 3, 5], [2, 3, 4], [3, 2, 6]
    tried = 0
    for contracted in range(4 - batch):
        both = _assignments(3, batch, contracted)
        for (lb, lc), (rb, rc) in itertools.product(both, both):
            left, right = list(rows), list(columns)
            lhs, rhs = ["x", "y", "z"], ["u", "v", "w"]
            for k, (i, j) in enumerate(zip((*lb, *lc), (*rb, *rc), strict=True)):
                left[i] = right[j] = shared[k]
                lhs[i] = rhs[j] = "abc"[k]
            out = [*(lhs[i] for i in lb), *(s for s in lhs if s in "xyz"), *(s for s in rhs if s in "uvw")]
            a = rng.integers(-128, 128, left, dtype=np.int8)
            b = rng.integers(-128, 128, right, dtype=np.int8)
            wanted = np.einsum(f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}", a.astype(np.int64), b.astype(np.int64))
            types = TensorType(S8, a.shape), TensorType(S8, b.shape), TensorType(S32, wanted.shape)
            graph = load(dot_text(*types, [list(lb), list(rb)], [list(lc), list(rc)]))
            assert torch.equal(run(graph, a, b)[0], torch.from_numpy(np.asarray(wanted, np.int32)))
            tried += 1
    assert tried == {0: 1 + 9 + 36 + 36, 1: 9 + 36 + 36, 2: 36 + 36, 3: 36}[batch]


@st.composite
def products(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, object, str | None]:
    """Operands, dimension numbers and preferred type of a dot_general that JAX accepts."""
    counts = [draw(st.integers(0, 2)) for _ in range(4)]
    extents = [[draw(st.sampled_from([0, 1, 1, 2, 3, 5, 7])) for _ in range(n)] for n in counts]
    batch, inner, rows, columns = extents
    left = draw(st.permutations(range(len(batch + inner + rows))))
    right = draw(st.permutations(range(len(batch + inner + columns))))
    shapes = [[0] * len(left), [0] * len(right)]
    for places, shape, sizes in ((left, shapes[0], batch + inner + rows), (right, shapes[1], batch + inner + columns)):
        for place, size in zip(places, sizes, strict=True):
            shape[place] = size
    nb, nc = len(batch), len(inner)
    numbers = ((tuple(left[nb : nb + nc]), tuple(right[nb : nb + nc])), (tuple(left[:nb]), tuple(right[:nb])))
    family = draw(st.sampled_from(["integer", "mixed signs", "float", "mixed floats"]))
    if family == "integer":
        a = b = draw(st.sampled_from([*INTEGERS, PRED]))
        wider = [d.name for d in INTEGERS if d.kind == a.kind and d.bits >= a.bits > 4]
    elif family == "mixed signs":
        a, b, wider = S8, U8, ["s32", "s16"]
    elif family == "float":
        a = b = draw(st.sampled_from([d for d in FLOATS if d.name != "f8e5m2fnuz"]))
        wider = ["f32", "f64"] if a is not F64 else ["f64"]
    else:
        a, b, wider = F8E4M3FN, BY_NAME["f8e5m2"], ["f32", "bf16"]
    preferred = draw(st.sampled_from([None, *wider])) if family in ("integer", "float") else draw(st.sampled_from(wider))
    seed = draw(st.integers(0, 2**31))
    operands = [normal(d, shape, seed + i) for i, (d, shape) in enumerate(zip((a, b), shapes, strict=True))]
    return operands[0], operands[1], numbers, preferred


@settings(max_examples=40)
@given(products())
def test_any_dot_general_agrees_with_jax(case: tuple[np.ndarray, np.ndarray, object, str | None]) -> None:
    a, b, numbers, preferred = case
    wanted_type = BY_NAME[preferred].to_numpy() if preferred else None

    def f(x: object, y: object) -> object:
        return lax.dot_general(x, y, numbers, preferred_element_type=wanted_type)  # type: ignore[arg-type]

    with jax.enable_x64(True):
        lowered = jax.jit(f).lower(a, b)
        try:
            wanted = np.asarray(jax.jit(f)(a, b))
        except jax.errors.JaxRuntimeError:  # a product that XLA has no code for on this machine
            reject()
        sizes = (
            np.asarray(jax.jit(f)(*(np.abs(v.astype(np.float64)) for v in (a, b)))) if wanted.dtype.kind not in "biu" else None
        )
    graph = load(lowered.as_text())
    (got,) = run(graph, a, b)
    logical = from_numpy(wanted.dtype)
    if not logical.is_float:
        close(got, wanted)
        return
    k = int(np.prod([a.shape[i] for i in numbers[0][0]]))  # type: ignore[index]
    step = F64.epsilon if logical is F64 or from_numpy(a.dtype) is F64 else F32.epsilon
    assert got.dtype == logical.to_torch()
    error = np.abs(got.to(torch.float64).numpy() - wanted.astype(np.float64))
    assert sizes is not None
    assert (error <= 2 * logical.epsilon * np.abs(wanted.astype(np.float64)) + (k + 1) * step * sizes.astype(np.float64)).all()


ACCUMULATORS = [
    (S8, S8, S8, S8),
    (S8, S8, S32, S32),
    (S8, U8, S32, S32),
    (S4, S4, S32, S32),
    (BF16, BF16, BF16, F32),
    (F16, F16, F16, F32),
    (F16, F16, F32, F32),
    (F8E4M3FN, F8E4M3FN, F8E4M3FN, F32),
    (F32, F32, F64, F64),
    (F64, F64, F64, F64),
    (S8, F32, F32, F32),
    (PRED, PRED, PRED, S32),
]


@pytest.mark.parametrize(("a", "b", "out", "acc"), ACCUMULATORS, ids=lambda d: d.name)
def test_the_accumulator_is_exact_or_wide(a: DType, b: DType, out: DType, acc: DType) -> None:
    shapes = (3, 9), (9, 4)
    types = [TensorType(d, s) for d, s in zip((a, b, out), (*shapes, (3, 4)), strict=True)]
    text = dot_text(*types, [[], []], [[1], [0]])
    graph = load(text)
    assert [g.acc_dtype for g in gemms(graph)] == [acc]
    x, y = (normal(d, s, i) for i, (d, s) in enumerate(zip((a, b), shapes, strict=True)))
    if a is S4:  # XLA's CPU compiler stops at 4-bit operands that it would have to widen
        wanted = x.astype(np.int32) @ y.astype(np.int32)
    else:
        (wanted,) = xla(text, x, y)
    close(run(graph, x, y)[0], wanted, ulps=2, depth=2)


def test_an_8_bit_float_product_past_its_range_is_nan_as_in_xla() -> None:
    t = TensorType(F8E4M3FN, (1, 4))
    text = dot_text(t, TensorType(F8E4M3FN, (4, 1)), TensorType(F8E4M3FN, (1, 1)), [[], []], [[1], [0]])
    x = np.full((1, 4), 400, F8E4M3FN.to_numpy())
    (got,) = run(load(text), x, x.reshape(4, 1))
    assert torch.isnan(got.float()).all()
    assert np.isnan(xla(text, x, x.reshape(4, 1))[0].astype(np.float32)).all()


def test_precision_is_never_lowered_and_what_would_allow_it_is_noted() -> None:
    a, b, out = (TensorType(F32, s) for s in ((8, 1024), (1024, 8), (8, 8)))
    how = (
        ", precision = [DEFAULT, DEFAULT], algorithm = <lhs_precision_type = tf32, rhs_precision_type = tf32, "
        "accumulation_type = f32, lhs_component_count = 1, rhs_component_count = 1, num_primitive_operations = 1, "
        "allow_imprecise_accumulation = false>"
    )
    graph = load(dot_text(a, b, out, [[], []], [[1], [0]], how))
    (note,) = graph.notes
    assert re.search(r"may be rounded to tf32; here they keep f32", note)
    x, y = (np.random.default_rng(i).standard_normal(t.shape).astype(np.float32) for i, t in enumerate((a, b)))
    wanted = x.astype(np.float64) @ y.astype(np.float64)
    assert np.abs(run(graph, x, y)[0].numpy() - wanted).max() < 1e-4  # tf32 is off by 1e-2 here
    double = how.replace("tf32", "f64").replace("accumulation_type = f32", "accumulation_type = f64")
    graph = load(dot_text(a, b, out, [[], []], [[1], [0]], double))
    assert [g.acc_dtype for g in gemms(graph)] == [F64]
    assert graph.notes == ()
