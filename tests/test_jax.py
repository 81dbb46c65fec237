"""`tilewright.jax.jit`: functions of JAX that XLA calls back, beside what XLA itself gives."""

import os
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import warm
from jax_models import quantised_mlp
from paths import ROOT

import tilewright.jax as twjax
from tilewright.errors import InputError, UnsupportedError
from tilewright.jax import ffi


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def codes(seed, *shape, dtype=jnp.int8, low=-128, high=128):
    return jax.random.randint(jax.random.key(seed), shape, low, high).astype(dtype)


def same(ours, theirs, rtol=2e-5):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(b.dtype, jnp.floating):
            scale = float(jnp.abs(jnp.nan_to_num(b.astype(jnp.float32), posinf=0, neginf=0)).max(initial=0)) + 1e-30
            np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=rtol, atol=rtol * scale)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kept", [jnp.int8, jnp.int32])
def test_the_product_of_issue_7117_is_xlas(kept):
    def product(a, b):
        return jnp.einsum("bij,bkj->bik", a, b, preferred_element_type=kept).astype(jnp.int8)

    a, b = codes(0, 3, 64, 96), codes(1, 3, 80, 96)
    same(jax.jit(twjax.jit(product, budget_s=0))(a, b), jax.jit(product)(a, b))


def test_a_quantised_mlp_within_jit_is_xlas():
    mlp = quantised_mlp()
    compiled = twjax.jit(mlp, budget_s=0)
    x = normal(9, 33, 64)
    same(jax.jit(lambda x: compiled(x + 1) * 2)(x), jax.jit(lambda x: mlp(x + 1) * 2)(x), rtol=1e-4)
    assert len(compiled.programs) == 1
    assert sum(s.part.kind == "gemm" for s in compiled.programs[0].steps) == 2


def test_trees_names_and_static_arguments():
    @twjax.jit(budget_s=0, static_argnames=("times", "how"))
    def f(tree, *, times, how="tanh"):
        return {"y": getattr(jnp, how)(tree["a"] @ tree["b"][0]) * times, "none": None}, tree["b"][1].sum()

    tree = {"a": normal(0, 5, 7), "b": (normal(1, 7, 3), jnp.arange(4))}
    for times in (2, 3):
        same(f(tree, times=times), f.__wrapped__(tree, times=times))
    same(f(tree, times=2, how="sin"), f.__wrapped__(tree, times=2, how="sin"))
    f(tree, times=2)
    assert len(f.programs) == 3, "one program for each set of static arguments"


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int16", "uint8", "bool"]
)
def test_element_types_pass_both_ways(dtype):
    def f(x):
        return x[::-1], x.astype(jnp.float32).sum(-1)

    x = codes(3, 6, 5, low=0, high=2) if dtype == "bool" else codes(3, 6, 5, low=0 if dtype[0] == "u" else -8, high=8)
    x = x.astype(dtype)
    same(twjax.jit(f, budget_s=0)(x), f(x))


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (8, 0), (13, 1)])
def test_empty_and_odd_shapes(shape):
    def f(x):
        return x @ jnp.ones((shape[1], 3)), x.sum()

    x = normal(0, *shape)
    same(twjax.jit(f, budget_s=0)(x), f(x))


def test_nan_and_infinity_pass():
    def f(x):
        return x * 2, jnp.max(x)

    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0])
    same(twjax.jit(f, budget_s=0)(x), f(x))


def test_vmap_compiles_the_mapped_function_and_scan_calls_it():
    mlp = quantised_mlp(5, 16, 32)
    compiled = twjax.jit(mlp, budget_s=0)
    x = normal(1, 4, 3, 16)
    same(jax.vmap(compiled)(x), jax.vmap(mlp)(x), rtol=1e-4)
    same(jax.vmap(compiled, in_axes=1)(x), jax.vmap(mlp, in_axes=1)(x), rtol=1e-4)
    one, other = (jax.lax.scan(lambda c, x, g=g: (c + 1, g(x)), 0, x) for g in (compiled, mlp))
    same(one, other, rtol=1e-4)


def test_what_it_is_called_with_is_left_as_it_was():
    compiled = twjax.jit(lambda x: (x, x + 1, x), budget_s=0)
    x = normal(0, 8, 8)
    before = np.array(x)
    first, _, again = compiled(x)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(first, before)
    np.testing.assert_array_equal(again, before)


def test_a_derivative_is_refused_with_a_sentence():
    compiled = twjax.jit(quantised_mlp(), budget_s=0)
    with pytest.raises(UnsupportedError, match=r"tilewright\.jax\.jit computes no derivatives"):
        jax.grad(lambda x: compiled(x).sum())(normal(0, 2, 64))
    around = jax.grad(lambda x: (compiled(jax.lax.stop_gradient(x)) * x.sum()).sum())(normal(0, 2, 64))
    assert bool(jnp.isfinite(around).all()), "what follows the hint works"


def test_wrong_arguments_have_sentences():
    with pytest.raises(InputError, match="int is no function"):
        twjax.jit(3)
    with pytest.raises(InputError, match="no kernels for JAX's platform 'tpu'"):
        twjax.jit(jnp.tanh, platform="tpu")


@pytest.mark.parametrize(
    ("named", "message"),
    [({"program": "nothing"}, "no program nothing was compiled in this process"), ({}, "without its attribute 'program'")],
)
def test_calls_of_no_program_end_in_xlas_error(named, message):
    ffi.register(jax.ffi, "cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.ffi.ffi_call(ffi.TARGET, jax.ShapeDtypeStruct((2,), jnp.float32))(jnp.ones(2), **named).block_until_ready()


def test_a_call_with_other_shapes_ends_in_xlas_error():
    compiled = twjax.jit(lambda x: x @ x, budget_s=0)
    compiled(normal(0, 4, 4))
    key = next(k for k, p in ffi._programs.items() if p.program is compiled.programs[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"operands of shapes .*\(5, 5\).* compiled for .*\(4, 4\)"):
        kind = jax.ShapeDtypeStruct((5, 5), jnp.float32)
        jax.ffi.ffi_call(ffi.TARGET, kind)(normal(0, 5, 5), program=key).block_until_ready()


def test_a_failure_within_the_program_ends_in_xlas_error(monkeypatch):
    compiled = twjax.jit(lambda x: x * 3, budget_s=0)
    compiled(normal(0, 4))
    monkeypatch.setattr(type(compiled.programs[0]), "run", lambda *_: 1 / 0)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="ZeroDivisionError"):  # a ValueError on JAX's fast path
        compiled(normal(0, 4)).block_until_ready()


def test_shards_of_two_devices_each_run_the_program():
    """Shards lie on two devices of the host, in a process of its own: their number is settled when JAX starts."""
    program = """
        import jax, jax.numpy as jnp, numpy as np, tilewright.jax
        from jax.sharding import Mesh, PartitionSpec as P
        w = np.random.default_rng(0).standard_normal((16, 8), np.float32)
        f = tilewright.jax.jit(lambda x: jnp.tanh(x @ w), budget_s=0)
        mesh = Mesh(np.array(jax.devices()), ("d",))
        x = jax.random.normal(jax.random.key(0), (6, 16))
        mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
        np.testing.assert_allclose(mapped(x), jnp.tanh(x @ w), rtol=1e-4, atol=1e-5)
        print(len(jax.devices()), len(f.programs), f.programs[0])
    """
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT / "src")}
    done = warm.run(["-c", textwrap.dedent(program)], env)
    assert done.returncode == 0, done.stderr
    assert "2 1" in done.stdout
    assert "f32[3,16]" in done.stdout


def test_buffers_that_are_used_again_are_read_again():
    """More sets of buffers than are kept, and memory that JAX gives to other arrays."""
    compiled = twjax.jit(lambda x, y: (x * 2 + y, y.sum()), budget_s=0)
    kept = []
    for i in range(3 * ffi._Callee.MOST):
        x, y = jnp.full((4, 3), i, jnp.float32), jnp.arange(3) * 1.0 + i
        found, total = compiled(x, y)
        np.testing.assert_array_equal(found, np.full((4, 3), 2 * i) + np.arange(3) + i)
        assert float(total) == 3 + 3 * i
        if i % 3 == 0:
            kept.append((i, found))
    for i, found in kept:
        np.testing.assert_array_equal(found, np.full((4, 3), 2 * i) + np.arange(3) + i)


def test_threads_that_call_at_once_get_their_own_results():
    from concurrent.futures import ThreadPoolExecutor

    compiled = twjax.jit(lambda x: x @ x.T, budget_s=0)
    given = [normal(i, 24, 24) for i in range(16)]
    compiled(given[0])
    with ThreadPoolExecutor(4) as pool:
        for x, found in zip(given, pool.map(compiled, given), strict=True):
            same(found, x @ x.T, rtol=1e-4)
