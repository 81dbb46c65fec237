"""Operations that no node expresses: calls that StableHLO's interpreter evaluates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against_jax import agree, calls, normal, program, run
from jax import lax

from tilewright.dtype import F4E2M1FN, F32, S4, S32
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import load, stablehlo
from tilewright.frontends.stablehlo.call import CALLABLE, INTERPRETED
from tilewright.frontends.stablehlo.module import mlir_type
from tilewright.ir.arrays import to_numpy
from tilewright.ir.ops import Call
from tilewright.ir.text import parse, print_with_literals
from tilewright.ir.types import TensorType


def _f32(shape: list[int], seed: int) -> np.ndarray:
    return normal(F32, shape, seed)


def _scatter(x: object, i: object) -> object:
    return x.at[i].add(2.0), x.at[:, np.array([1, 3])].set(2.0)  # type: ignore[attr-defined]


def _called(x: np.ndarray, i: np.ndarray) -> dict[str, tuple[object, tuple[np.ndarray, ...]]]:
    image, kernel = _f32([1, 4, 6, 6], 1), _f32([4, 2, 3, 3], 2)
    return {
        "sort": (lambda x: (lax.sort(x, dimension=1), jnp.argsort(x, 0), lax.top_k(x, 2)), (x,)),
        "reduce": (lambda x: (x.argmax(1), x.argmin(0)), (x,)),
        "scatter": (_scatter, (x, i)),
        "convolution": (lambda a, k: lax.conv_general_dilated(a, k, (2, 2), "SAME", feature_group_count=2), (image, kernel)),
        "select_and_scatter": (
            jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()),
            (x,),
        ),
        "popcnt": (lambda i: lax.population_count(i), (i,)),
        "count_leading_zeros": (lambda i: lax.clz(i), (i,)),
        "bitcast_convert": (lambda x: (lax.bitcast_convert_type(x, jnp.int32), lax.bitcast_convert_type(x, jnp.int8)), (x,)),
        "reduce_precision": (lambda x: (lax.reduce_precision(x, 5, 10), lax.reduce_precision(x, 8, 7)), (x,)),
        "reduce_window": (
            lambda x: lax.reduce_window(x, np.float32(0), lambda a, b: a + 0.5 * b, (2, 2), (1, 1), "VALID"),
            (x,),
        ),
    }


@pytest.mark.parametrize("target", _called(np.zeros((5, 7), np.float32), np.zeros(3, np.int32)))
def test_other_operations_are_calls_that_agree_with_jax(target: str) -> None:
    x = _f32([5, 7], 12)
    x[1, 2], x[3, 4] = np.nan, -0.0
    if target in ("reduce_window", "convolution", "select_and_scatter"):
        x = np.nan_to_num(x)
    f, args = _called(x, np.array([1, 3, 1], np.int32))[target]
    graph = agree(f, *args, ulps=4, depth=4)["stablehlo"]  # type: ignore[arg-type]
    assert {c.target for c in calls(graph)} == {f"stablehlo.{target}"}
    assert any(
        f"stablehlo.{target} (" in note and ("reference interpreter" in note) == (target in INTERPRETED) for note in graph.notes
    )
    for call in calls(graph):
        assert call.library == "stablehlo"
        assert load(call.payload).outputs  # it stands alone


TEXTS = {
    "map": """%r = "stablehlo.map"(%x, %x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %0 = stablehlo.multiply %a, %b : tensor<f32>
    %1 = stablehlo.add %0, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) {dimensions = array<i64: 0, 1>} : (tensor<3x3xf32>, tensor<3x3xf32>) -> tensor<3x3xf32>""",
    "triangular_solve": """%r = "stablehlo.triangular_solve"(%x, %x) {left_side = true, lower = true, unit_diagonal = true,
  transpose_a = #stablehlo<transpose NO_TRANSPOSE>} : (tensor<3x3xf32>, tensor<3x3xf32>) -> tensor<3x3xf32>""",
}


@pytest.mark.parametrize("target", TEXTS)
def test_calls_that_jax_does_not_write_agree_with_numpy(target: str) -> None:
    t = TensorType(F32, (3, 3))
    x = _f32([3, 3], 13)
    (got,) = run(load(program(TEXTS[target], {"x": t}, {"r": t})), x)
    lower = np.tril(x, -1) + np.eye(3, dtype=np.float32)
    wanted = x * x + x if target == "map" else np.linalg.solve(lower.astype(np.float64), x.astype(np.float64))
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_4_bit_shifts_are_called_too() -> None:
    t = TensorType(S4, (16,))
    lines = [f"%r{i} = stablehlo.{op} %x, %y : {mlir_type(t)}" for i, op in enumerate(("shift_left", "shift_right_logical"))]
    graph = load(program("\n".join(lines), {"x": t, "y": t}, {"r0": t, "r1": t}))
    x = np.arange(-8, 8).astype(S4.to_numpy())
    y = np.full(16, 1).astype(S4.to_numpy())
    left, right = run(graph, x, y)
    codes = np.arange(-8, 8)
    assert left.tolist() == [((c << 1) + 8) % 16 - 8 for c in codes]
    assert right.tolist() == [((c & 15) >> 1) for c in codes]
    assert len(calls(graph)) == 2


CODES = np.arange(16, dtype=np.uint8)
SIGNED = (CODES ^ 8).view(np.int8) - 8
PAIRS = CODES[0::2] | CODES[1::2] << 4
FOURS = CODES.view(F4E2M1FN.to_numpy())  # ml_dtypes keeps a code in the low bits of a byte


@pytest.mark.parametrize(
    ("source", "target", "given", "expected"),
    [
        ("16xf4E2M1FN", "16xui4", FOURS, CODES),
        ("16xf4E2M1FN", "16xi4", FOURS, SIGNED),
        ("16xui4", "16xf4E2M1FN", CODES, FOURS),
        ("16xi4", "16xf4E2M1FN", SIGNED, FOURS),
        ("8x2xf4E2M1FN", "8xui8", FOURS.reshape(8, 2), PAIRS),
        ("8xui8", "8x2xf4E2M1FN", PAIRS, FOURS.reshape(8, 2)),
        ("2x8xf4E2M1FN", "2xi32", FOURS.reshape(2, 8), np.array([0x76543210, 0xFEDCBA98], np.uint32).view(np.int32)),
        ("16xi4", "16xui4", SIGNED, CODES),
    ],
)
def test_4_bit_floats_keep_their_bits(source: str, target: str, given: np.ndarray, expected: np.ndarray) -> None:
    cast = f"stablehlo.bitcast_convert %x : (tensor<{source}>) -> tensor<{target}>"
    text = f"func.func @main(%x: tensor<{source}>) -> tensor<{target}> {{\n%r = {cast}\nreturn %r : tensor<{target}>\n}}"
    graph = load(text)
    types = [n.type.dtype.to_numpy() for n in (*graph.inputs, *graph.outputs)]
    (found,) = run(graph, given.astype(types[0]))
    bits = [x.astype(types[1]).view(np.uint8) for x in (to_numpy(found, graph.outputs[0].dtype), expected)]
    np.testing.assert_array_equal(*bits)


def test_the_note_says_why_it_is_a_call() -> None:
    t = TensorType(F32, (4,))
    graph = load(program(f"%r = stablehlo.reduce_precision %x, format = e5m10 : {mlir_type(t)}", {"x": t}, {"r": t}))
    assert any(note.endswith("is evaluated by torch: it keeps 5 and 10 bits of f32") for note in graph.notes), graph.notes


def test_every_operation_that_may_be_called_is_tried_here() -> None:
    tried = {*_called(np.zeros((5, 7), np.float32), np.zeros(3, np.int32)), *TEXTS, "shift_left", "shift_right_logical"}
    elsewhere = {
        "shift_right_arithmetic",
        "cholesky",
        "fft",
    }  # with the elementwise operators, and beside XLA
    assert CALLABLE - tried == elsewhere


def test_a_call_survives_the_textual_form_and_runs_from_it() -> None:
    x = _f32([4, 5], 14)
    graph = agree(lambda x: (x.argmax(1), lax.sort(x, dimension=0)), x)["stablehlo"]
    text, literals = print_with_literals(graph)
    again = parse(text, literals)
    assert all(a is b for a, b in zip(graph.outputs, again.outputs, strict=True))


def test_a_payload_from_elsewhere_is_checked_before_it_runs() -> None:
    t = TensorType(S32, (2,))
    x = torch.tensor([1, 2], dtype=torch.int32)

    def call(body: str) -> Call:
        return Call("stablehlo", "stablehlo.sort", program(body, {"x": t}, {"r": t}), (t,))

    with pytest.raises(UnsupportedError, match=r"custom_call in a region cannot be interpreted \(stablehlo.sort\)"):
        stablehlo.evaluate_call(call("%r = stablehlo.custom_call @abort(%x) : (tensor<2xi32>) -> tensor<2xi32>"), [x])
    with pytest.raises(UnsupportedError, match="an integer division"):
        stablehlo.evaluate_call(call("%r = stablehlo.divide %x, %x : tensor<2xi32>"), [x])
    recursive = call("%r = func.call @f(%x) : (tensor<2xi32>) -> tensor<2xi32>").payload + (
        "func.func private @f(%x: tensor<2xi32>) -> tensor<2xi32> {\n%r = func.call @f(%x) : (tensor<2xi32>) -> tensor<2xi32>\n"
        "return %r : tensor<2xi32>\n}\n"
    )
    with pytest.raises(UnsupportedError, match="function 'f' calls itself"):
        stablehlo.evaluate_call(Call("stablehlo", "stablehlo.sort", recursive, (t,)), [x])
    with pytest.raises(InputError, match="2 values for a payload that takes 1"):
        stablehlo.evaluate_call(call("%r = stablehlo.not %x : tensor<2xi32>"), [x, x])
    with pytest.raises(InputError, match="no main"):
        stablehlo.evaluate_call(Call("stablehlo", "stablehlo.sort", "module {}", (t,)), [x])
    with pytest.raises(InputError, match=r"a payload that takes s32\[2\] is given another value"):
        stablehlo.evaluate_call(call("%r = stablehlo.not %x : tensor<2xi32>"), [x.reshape(1, 2)])
