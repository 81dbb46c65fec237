"""StableHLO with extents left open: programs that `jax.export` wrote for symbolic shapes beside JAX, and texts with bounds."""

import numpy as np
import pytest

from tilewright.any_shape import AnyShape
from tilewright.compiler import compile
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.ir.dims import Dim

jax = pytest.importorskip("jax")
jnp, export = jax.numpy, pytest.importorskip("jax.export")

_rng = np.random.default_rng(3)
WEIGHT = _rng.standard_normal((8, 16)).astype(np.float32)
SMALL = {"b": (1, 8), "s": (1, 64)}


def mlp(x):
    return jax.nn.softmax(jax.nn.gelu(x @ WEIGHT), axis=-1)


def attended(x, mask):
    batch, length, _ = x.shape
    q = (x @ WEIGHT).reshape(batch, length, 2, 8).transpose(0, 2, 1, 3)
    scores = jnp.where(mask[:, None, None, :], q @ q.swapaxes(-1, -2), -1e9)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    heads = jax.nn.softmax(scores, -1) @ q
    return heads.transpose(0, 2, 1, 3).reshape(batch, length, 16) + jnp.arange(length, dtype=jnp.float32)[None, :, None]


def exported(function, *given, constraints=()):
    """The `Exported` of a function for arguments written as shapes and types: ("(b, s, 8)", "float32")."""
    scope = export.SymbolicScope(constraints)
    types = [jax.ShapeDtypeStruct(export.symbolic_shape(shape[1:-1], scope=scope), dtype) for shape, dtype in given]
    return export.export(jax.jit(function))(*types)


def arrays(given, values):
    rng = np.random.default_rng(11)
    for shape, dtype in given:
        extents = eval(shape, {}, dict(values))
        if dtype == "bool":
            made = rng.random(extents) < 0.7
            made[:, 0] = True
            yield made
        elif dtype == "int32":
            yield rng.integers(0, 8, extents).astype(dtype)
        else:
            yield rng.standard_normal(extents).astype(dtype)


CASES = {
    "mlp": (mlp, [("(b, s, 8)", "float32")], SMALL, [{"b": 2, "s": 5}, {"b": 1, "s": 1}, {"b": 8, "s": 64}]),
    "attention": (attended, [("(b, s, 8)", "float32"), ("(b, s)", "bool")], SMALL, [{"b": 2, "s": 5}, {"b": 3, "s": 33}]),
    "slice": (lambda x: x[1:] * 2, [("(a, 4)", "float32")], {"a": (2, 64)}, [{"a": 2}, {"a": 9}]),
    "last": (lambda x: x[:, -1], [("(b, s, 8)", "float32")], SMALL, [{"b": 2, "s": 5}, {"b": 1, "s": 9}]),
    "pairs": (lambda x: x.reshape(-1, 2, 4).sum(1), [("(2*a, 4)", "float32")], {"a": (1, 64)}, [{"a": 2}, {"a": 9}]),
    "sum": (
        lambda x, y: x * x.shape[0] + y.sum(),
        [("(a + c, 4)", "float32"), ("(a,)", "float32")],
        {"a": 8, "c": 8},
        [{"a": 2, "c": 3}],
    ),
    "concat": (
        lambda x, y: jnp.concatenate([x, y], 0) @ WEIGHT[:4],
        [("(a, 4)", "float32"), ("(c, 4)", "float32")],
        {"a": (1, 64), "c": (1, 64)},
        [{"a": 2, "c": 3}, {"a": 9, "c": 1}],
    ),
    "norm": (
        lambda x: (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5),
        [("(b, s)", "float32")],
        SMALL,
        [{"b": 2, "s": 5}, {"b": 3, "s": 64}],
    ),
    "index": (lambda i: jnp.asarray(WEIGHT)[i], [("(b, s)", "int32")], SMALL, [{"b": 2, "s": 5}, {"b": 3, "s": 64}]),
    "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 0))), [("(a, 4)", "float32")], {"a": (1, 64)}, [{"a": 3}, {"a": 9}]),
    "argmax": (lambda x: jnp.argmax(x, 0), [("(a, 4)", "float32")], {"a": (1, 64)}, [{"a": 3}, {"a": 1}]),
    "sort": (lambda x: jnp.sort(x, 0), [("(a, 4)", "float32")], {"a": (1, 64)}, [{"a": 3}, {"a": 9}]),
    "top": (lambda x: jax.lax.top_k(x.T, 1)[1], [("(a, 4)", "float32")], {"a": (1, 64)}, [{"a": 3}, {"a": 9}]),
    "roll": (lambda x: jnp.roll(x, 2, 0), [("(a, 4)", "float32")], {"a": (3, 64)}, [{"a": 3}, {"a": 9}]),
    "from data": (
        lambda x, i: jax.lax.dynamic_slice(x, (i[0], 0), (x.shape[0] - 1, 4)),
        [("(a, 4)", "float32"), ("(1,)", "int32")],
        {"a": (2, 64)},
        [{"a": 2}, {"a": 9}],
    ),
    "from the end": (
        lambda x: jax.lax.dynamic_update_slice(x, x[:1], (x.shape[0] - 1, 0)),
        [("(a, 4)", "float32")],
        {"a": (2, 64)},
        [{"a": 2}, {"a": 9}],
    ),
    "running sum": (lambda x: jnp.cumsum(x, 0), [("(a, 4)", "float32")], {"a": (1, 64)}, [{"a": n} for n in (1, 2, 9, 64)]),
    "running product from the end": (
        lambda x: jax.lax.cumprod(x, 0, reverse=True),
        [("(a, 4)", "float32")],
        {"a": (1, 64)},
        [{"a": 1}, {"a": 17}],
    ),
    "largest so far, of a batch": (
        lambda x: jax.lax.cummax(x, 1),
        [("(b, s)", "int32")],
        {"b": 4, "s": 300},
        [{"b": 1, "s": 3}, {"b": 3, "s": 257}],
    ),
    "flip": (lambda x: x[::-1], [("(a, 4)", "float32")], {"a": (1, 64)}, [{"a": 3}, {"a": 1}]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_jax_exports_for_symbolic_shapes_is_compiled_once_and_right(name):
    function, given, dims, shapes = CASES[name]
    program = compile(exported(function, *given), dims=dims, budget_s=0)
    assert isinstance(program, AnyShape)
    assert set(program.dims) == set(dims)
    for values in shapes:
        args = list(arrays(given, values))
        np.testing.assert_allclose(np.asarray(program(*args)), np.asarray(function(*args)), rtol=2e-4, atol=2e-4)
    assert program.compiled == 1


def test_windows_as_long_as_half_of_an_axis_are_refused():
    def halves(x):
        n = x.shape[0]
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (n // 2,), (1,), "VALID")

    with pytest.raises(UnsupportedError, match=r"windows of .* elements, padded by 0 and 0, along an axis of"):
        compile(exported(halves, ("(a,)", "float32"), constraints=("a >= 4",)), dims={"a": (4, 64)}, budget_s=0)


def test_a_constraint_that_bounds_do_not_keep_is_named():
    given = ("(a, 4)", "float32")
    even = exported(lambda x: x.reshape(x.shape[0] // 2, 8), given, constraints=("mod(a, 2) == 0",))
    program = compile(even, dims={"a": (2, 64, 2)}, budget_s=0)
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.testing.assert_array_equal(np.asarray(program(x)), x.reshape(3, 8))
    with pytest.raises(InputError, match=r"(?s)2\*floordiv\(a, 2\) == a.*bounds that the program allows"):
        load(even, LoadOptions(dims={"a": (1, 64)}))


TEXT = """
func.func @main(%x: tensor<?x8xf32{bounds}>, %w: tensor<8x4xf32>) -> tensor<?x4xf32> {{
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<?x8xf32{bounds}>, tensor<8x4xf32>) -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}}
"""


def test_an_axis_without_a_name_is_called_after_its_input_and_has_the_bound_of_its_type():
    bounded = TEXT.format(bounds=", #stablehlo.bounds<64, ?>")
    graph = load(bounded, LoadOptions(dims=True))
    assert str(graph.outputs[0].type) == "f32[x_0,4]"
    assert compile(bounded, dims=True, budget_s=0).dims == {"x_0": Dim("x_0", 1, 64)}
    with pytest.raises(InputError, match="may be more than 64, the bound in the program"):
        load(bounded, LoadOptions(dims={"x.0": (1, 65)}))
    rows = compile(TEXT.format(bounds=""), dims={"x.0": Dim("rows", 1, 16)}, budget_s=0)
    x, w = _rng.standard_normal((5, 8)).astype(np.float32), _rng.standard_normal((8, 4)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(rows(x, w)), x @ w, rtol=1e-4, atol=1e-5)


def test_what_stays_open_without_bounds_is_named():
    text = TEXT.format(bounds="")
    with pytest.raises(InputError, match=r"no bounds are given for 'x\.0'"):
        load(text, LoadOptions(dims={"y.0": (1, 4)}))
    with pytest.raises(UnsupportedError, match=r"or bounds: --dim \(dims=…\)"):
        load(text)
    graph = load(text, LoadOptions(dims={"y.0": (1, 4)}, input_dims={"x": (3, 8)}))
    assert str(graph.outputs[0].type) == "f32[3,4]"
    with pytest.raises(InputError, match="do not fit input 'x'"):
        load(text, LoadOptions(dims={"y.0": (1, 4)}, input_dims={"x": (3, 9)}))
    with pytest.raises(UnsupportedError, match="known only at run time"):
        load(
            exported(lambda x: jax.lax.conv(x, np.ones((4, 2, 3), np.float32), (1,), "VALID"), ("(b, 2, 9)", "float32")),
            LoadOptions(dims=SMALL),
        )
