"""Complex numbers in StableHLO: pairs of real tensors, against XLA and NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against_jax import calls, gemms, text, to_torch
from jax import lax

import tilewright
from tilewright.compiler import optimise
from tilewright.errors import UnsupportedError
from tilewright.frontends import load
from tilewright.ir.evaluate import evaluate


def numbers(shape: tuple[int, ...], seed: int, kind: type = np.complex64) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(kind)


def as_pairs(value: object) -> torch.Tensor:
    array = np.asarray(value)
    return torch.view_as_real(torch.from_numpy(array.copy())) if np.iscomplexobj(array) else to_torch(array)


X, Y, R = numbers((3, 5), 1), numbers((3, 5), 2), np.random.default_rng(3).standard_normal((3, 5)).astype(np.float32)
INDICES = np.array([3, 1], np.int32)
FUNCTIONS = {
    "arithmetic": (lambda x, y: (x + y, x - y, x * y, x / y, -x), (X, Y)),
    "parts": (lambda x, y: (x.real, x.imag, jnp.abs(x), jnp.conj(y), jnp.angle(x)), (X, Y)),
    "exponentials": (lambda x: (jnp.exp(x), jnp.log(x), jnp.sqrt(x), lax.rsqrt(x), jnp.tanh(x), jnp.sin(x), jnp.cos(x)), (X,)),
    "more": (lambda x, y: (x**y, jnp.expm1(x), jnp.log1p(x), jnp.cosh(x), jnp.arcsin(x), jnp.sign(x)), (X, Y)),
    "comparisons": (lambda x, y: (x == y, x != y, jnp.where(x.real > 0, x, y)), (X, X.copy())),
    "conversions": (lambda x, r: (r.astype(jnp.complex64), lax.complex(r, r) * x, x.astype(jnp.complex64)), (X, R)),
    "views": (lambda x: (x.T, x.reshape(5, 3), x[1:, ::2], jnp.flip(x, 1), jnp.pad(x, 1), jnp.concatenate([x, x])), (X,)),
    "reductions": (lambda x: (x.sum(0), x.prod(1), jnp.cumsum(x, 0), x.mean()), (X,)),
    "picks": (
        lambda x, i: (x[:, i], x.at[:, i].add(2j), lax.dynamic_slice(x, (0, i[0]), (2, 2))),
        (X, np.array([3, 1], np.int32)),
    ),
    "transforms": (lambda x, r: (jnp.fft.fft(x), jnp.fft.ifft2(x), jnp.fft.rfft(r), jnp.fft.irfft(x, 8)), (X, R)),
    "sorts": (lambda x: jnp.sort(x, 1), (X,)),
    "convolutions": (lambda x, y: lax.conv(x[None], y[:, :, None], (1,), "VALID"), (X, numbers((2, 3), 4))),
    "wide": (lambda x: (x * x, jnp.exp(x), jnp.abs(x)), (numbers((4,), 5, np.complex128),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_functions_agree_with_xla(name: str) -> None:
    f, args = FUNCTIONS[name]
    with jax.enable_x64(name == "wide"):
        wanted = jax.tree.leaves(jax.jit(f)(*args))  # type: ignore[arg-type]
        program = text("stablehlo", f, *args)  # type: ignore[arg-type]
    graph = load(program)
    for read in (graph, optimise(graph)):
        result = evaluate(read, [as_pairs(a) for a in args])
        for got, want in zip(result, wanted, strict=True):
            assert isinstance(got, torch.Tensor)
            torch.testing.assert_close(got, as_pairs(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("real", [(False, False), (True, False), (False, True)])
def test_a_complex_product_is_one_real_one(real: tuple[bool, bool]) -> None:
    a, b = numbers((2, 7, 5), 1), numbers((2, 5, 3), 2)
    a, b = (v.real.copy() if r else v for v, r in zip((a, b), real, strict=True))
    f = lambda a, b: lax.dot_general(a.astype(jnp.complex64), b.astype(jnp.complex64), (((2,), (1,)), ((0,), (0,))))  # noqa: E731
    graph = load(text("stablehlo", f, a, b))
    assert len(gemms(graph)) == 1
    assert not calls(graph)
    (got,) = evaluate(graph, [as_pairs(a), as_pairs(b)])
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(torch.view_as_complex(got.contiguous()).numpy(), a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shapes", [((4, 5), (5, 3)), ((5,), (5, 3)), ((4, 5), (5,)), ((5,), (5,))])
def test_a_plain_product_of_complex_numbers_is_one_real_one(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = numbers(shapes[0], 1), numbers(shapes[1], 2)
    types = [f"tensor<{''.join(f'{d}x' for d in s)}complex<f32>>" for s in (*shapes, (a @ b).shape)]
    graph = load(
        f"func.func @main(%a: {types[0]}, %b: {types[1]}) -> {types[2]} {{\n"
        f"%c = stablehlo.dot %a, %b : ({types[0]}, {types[1]}) -> {types[2]}\nreturn %c : {types[2]}\n}}"
    )
    assert len(gemms(graph)) == 1
    (got,) = evaluate(graph, [as_pairs(a), as_pairs(b)])
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(torch.view_as_complex(got.contiguous()).numpy(), a @ b, rtol=1e-5, atol=1e-5)


def test_an_absolute_value_neither_overflows_nor_vanishes() -> None:
    x = np.array(
        [3e38 + 1e38j, 1e-30 + 1e-30j, 0, complex(-np.inf, np.nan), complex(np.nan, 1), complex(0.0, -2)], np.complex64
    )
    (got,) = evaluate(load(text("stablehlo", jnp.abs, x)), [as_pairs(x)])
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(got.numpy(), np.abs(x), rtol=1e-6)


def test_complex_tensors_go_in_as_they_are() -> None:
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    compiled = tilewright.compile(text("stablehlo", lambda x, y: x * y, X, Y), budget_s=0, cache=False)
    got = compiled(x, y)
    torch.testing.assert_close(torch.view_as_complex(got), x * y)
    assert any("complex in its source" in note for note in load(text("stablehlo", jnp.negative, X)).notes)


def test_what_has_no_complex_meaning_says_so() -> None:
    program = """func.func @main(%x: tensor<2xcomplex<f32>>) -> tensor<2xcomplex<f32>> {
      %r = stablehlo.custom_call @mhlo.erf(%x) : (tensor<2xcomplex<f32>>) -> tensor<2xcomplex<f32>>
      return %r : tensor<2xcomplex<f32>>
    }"""
    with pytest.raises(UnsupportedError, match="no meaning for complex numbers"):
        load(program)
