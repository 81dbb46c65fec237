"""StableHLO text: programs as JAX writes them, names and notes, shapes to be bound."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import jax_models
import numpy as np
import pytest
from against_jax import agree, close, gemms, normal, program, run
from jax import export, lax

from tilewright.dtype import F32, S8, S32
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.ir.ops import Input
from tilewright.ir.types import TensorType


@pytest.mark.parametrize("exact", [True, False])
def test_a_transformer_block_agrees_with_jax(exact: bool) -> None:
    def block(p: dict[str, object], x: object) -> object:
        return jax_models.transformer_block(p, x, exact=exact)

    graphs = agree(block, *jax_models.block_inputs(), kinds=("stablehlo", "named"), ulps=4, depth=8)
    counts = Counter(n.op.name for n in graphs["named"].nodes())
    assert counts["gemm"] == 6
    assert counts["call"] == 0
    assert graphs["stablehlo"].outputs[0].op == graphs["named"].outputs[0].op
    labels = [n.op.label for n in graphs["named"].inputs if isinstance(n.op, Input)]
    assert labels[0] == "p['down']"
    assert labels[-1] == "x"
    assert graphs["named"].output_names == ("result",)
    assert "dot_general" in graphs["named"].origin(next(n for n in graphs["named"].nodes() if n.op.name == "gemm"))


def test_an_mlp_agrees_with_jax() -> None:
    agree(jax_models.mlp, *jax_models.mlp_inputs(), ulps=8, depth=2)


def test_a_quantised_dot_agrees_with_jax_bit_for_bit() -> None:
    graph = agree(jax_models.quantised_dot, *jax_models.quantised_inputs())["stablehlo"]
    assert [(g.lhs.dtype, g.rhs.dtype, g.acc_dtype) for g in gemms(graph)] == [(S8, S8, S32)]


def test_gradients_scans_and_custom_rules_agree_with_jax() -> None:
    rng = np.random.default_rng(8)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((5, 7), (7, 4)))
    agree(jax.grad(lambda w, x: (jax.nn.gelu(x @ w) ** 2).sum()), w, x, ulps=8, depth=4)
    agree(lambda x: lax.associative_scan(jnp.multiply, x), x, ulps=4)
    agree(lambda x: (jax.nn.relu6(x), jnp.var(x, 0), jax.nn.logsumexp(x, 1), jnp.quantile(x, 0.3, axis=1)), x, ulps=8, depth=2)
    agree(lambda x, w: jnp.einsum("ab,bc,dc->ad", x, w, x[:3, :4]), x, w, ulps=4, depth=4)
    groups = np.array([2, 3], np.int32)
    agree(lax.ragged_dot, x, rng.standard_normal((2, 7, 3)).astype(np.float32), groups, ulps=4, depth=4)


@pytest.mark.parametrize("special", ["lgamma", "digamma", "erf_inv", "bessel_i1e", "zeta", "polygamma", "igammac_free"])
def test_special_functions_are_their_own_decompositions(special: str) -> None:
    x = np.abs(np.random.default_rng(9).standard_normal((3, 5)).astype(np.float32)) % 0.9 + 0.05
    two = {"zeta": lax.zeta, "polygamma": lambda a, b: lax.polygamma(jnp.float32(1) + 0 * a, b), "igammac_free": lax.nextafter}
    if special in two:
        agree(two[special], x + 1.5, x, ulps=64, depth=4)
    else:
        agree(getattr(lax, special), x, ulps=64, depth=4)


def test_arguments_are_called_as_the_text_calls_them() -> None:
    t = TensorType(F32, (2,))
    text = program("%s = stablehlo.add %left, %2 : tensor<2xf32>", {"left": t, "2": t}, {"s": t})
    graph = load(text)
    assert [n.op.label for n in graph.inputs if isinstance(n.op, Input)] == ["left", "arg1"]
    assert graph.output_names == ("result",)
    assert graph.origin(graph.outputs[0]) == "add line 2"
    twice = text.replace("%left: tensor<2xf32>", '%left: tensor<2xf32> loc("x")').replace(
        "%2: tensor<2xf32>", '%2: tensor<2xf32> loc("x")'
    )
    assert [n.op.label for n in load(twice).inputs if isinstance(n.op, Input)] == ["x", "x.1"]


def test_open_extents_are_bound_by_name_or_batch() -> None:
    params, x = jax_models.block_inputs()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape("b, 9, 32"), np.float32)

    def block(p: dict[str, object], x: object) -> object:
        return jax_models.transformer_block(p, x, exact=True)

    text = export.export(jax.jit(block))(shapes, symbolic).mlir_module()
    wanted = np.asarray(jax.jit(block)(params, x))
    for options in (LoadOptions(batch=2), LoadOptions(input_dims={"x": (2, 9, 32)})):
        close(run(load(text, options), *jax.tree.leaves((params, x)))[0], wanted, ulps=4, depth=8)
    with pytest.raises(UnsupportedError, match=r"input 'x' is tensor<\?x9x32xf32>, whose extents are open.*\n.*--batch"):
        load(text)
    with pytest.raises(InputError, match=r"dimensions \[2, 8, 32\] do not fit input 'x'"):
        load(text, LoadOptions(input_dims={"x": (2, 8, 32)}))
    with pytest.raises(InputError, match=r"given for 'ids', which is no input.*\n  try: its inputs are p\['down'\]"):
        load(text, LoadOptions(input_dims={"ids": (2, 9)}))
    m, k = export.symbolic_shape("m, k")
    matmul = export.export(jax.jit(lambda a, b: a @ b))
    product = matmul(*(jax.ShapeDtypeStruct(s, np.float32) for s in ((m, k), (k, 5)))).mlir_module()
    with pytest.raises(UnsupportedError, match="its shapes cannot be bound: contracting dimension sizes must match"):
        load(product, LoadOptions(input_dims={"a": (3, 4), "b": (6, 5)}))


def test_composites_optimisation_barriers_and_shardings_are_looked_through() -> None:
    text = """module @wrapped {
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(%a: tensor<4xf32> {mhlo.sharding = "{devices=[2]<=[2]}"}) -> tensor<4xf32> {
    %0 = stablehlo.custom_call @Sharding(%a) {mhlo.sharding = "{devices=[2]<=[2]}"} : (tensor<4xf32>) -> tensor<4xf32>
    %1 = sdy.sharding_constraint %0 <@mesh, [{"x"}]> : tensor<4xf32>
    %2:2 = stablehlo.optimization_barrier %1, %a : tensor<4xf32>, tensor<4xf32>
    %3 = stablehlo.composite "vendor.twice" %2#0 {decomposition = @twice} : (tensor<4xf32>) -> tensor<4xf32>
    %4 = stablehlo.custom_call @mhlo.erf(%3) : (tensor<4xf32>) -> tensor<4xf32>
    return %4 : tensor<4xf32>
  }
  func.func private @twice(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %x, %x : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""
    graph = load(text)
    assert [getattr(n.op, "fn", n.op.name) for n in graph.nodes()] == ["input", "add", "erf"]
    assert graph.name == "wrapped"
    assert "'a' is sharded" in graph.notes[0]
    assert "Sharding (1), sdy.sharding_constraint (1)" in graph.notes[1]


def test_operations_that_older_and_dynamic_programs_hold_are_read() -> None:
    x, v = TensorType(F32, (4, 3)), TensorType(F32, (3,))
    body = """%shape = stablehlo.constant dense<[4, 3]> : tensor<2xi32>
%repeated = stablehlo.dynamic_broadcast_in_dim %v, %shape, dims = [1] : (tensor<3xf32>, tensor<2xi32>) -> tensor<4x3xf32>
%flat = stablehlo.dynamic_reshape %x, %shape : (tensor<4x3xf32>, tensor<2xi32>) -> tensor<4x3xf32>
%rows = stablehlo.dynamic_iota %shape, dim = 0 : (tensor<2xi32>) -> tensor<4x3xf32>
%more = stablehlo.broadcast %v, sizes = [4] : (tensor<3xf32>) -> tensor<4x3xf32>
%extent = stablehlo.get_dimension_size %x, dim = 1 : (tensor<4x3xf32>) -> tensor<i32>
%pair = stablehlo.tuple %repeated, %more : tuple<tensor<4x3xf32>, tensor<4x3xf32>>
%second = stablehlo.get_tuple_element %pair[1] : (tuple<tensor<4x3xf32>, tensor<4x3xf32>>) -> tensor<4x3xf32>
%sum0 = stablehlo.add %repeated, %second : tensor<4x3xf32>
%sum1 = stablehlo.add %flat, %rows : tensor<4x3xf32>
%normal = "stablehlo.batch_norm_inference"(%x, %v, %v, %v, %v) {epsilon = 0.5 : f32, feature_index = 1 : i64} :
  (tensor<4x3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>) -> tensor<4x3xf32>
%like = "chlo.constant_like"(%x) {value = 2.5 : f32} : (tensor<4x3xf32>) -> tensor<4x3xf32>"""
    results = {"sum0": x, "sum1": x, "normal": x, "like": x, "extent": TensorType(S32, ())}
    a, b = normal(F32, (4, 3), 1), abs(normal(F32, (3,), 2))
    doubled, ramp, normed, like, extent = run(load(program(body, {"x": x, "v": v}, results)), a, b)
    np.testing.assert_array_equal(doubled.numpy(), np.broadcast_to(2 * b, (4, 3)))
    np.testing.assert_array_equal(ramp.numpy(), a + np.arange(4, dtype=np.float32)[:, None])
    np.testing.assert_allclose(normed.numpy(), (a - b) / np.sqrt(b + 0.5) * b + b, rtol=1e-6, atol=1e-6)
    assert like.unique().tolist() == [2.5]
    assert extent.item() == 3


def test_quantised_types_are_read_as_plain_arithmetic() -> None:
    program = """
    func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %q = stablehlo.uniform_quantize %x : (tensor<4xf32>) -> tensor<4x!quant.uniform<i8:f32, 0.5:-1>>
      %s = stablehlo.add %q, %q : tensor<4x!quant.uniform<i8:f32, 0.5:-1>>
      %r = stablehlo.uniform_dequantize %s : (tensor<4x!quant.uniform<i8:f32, 0.5:-1>>) -> tensor<4xf32>
      return %r : tensor<4xf32>
    }"""
    (got,) = run(load(program), np.array([1.0, -2.2, 0.3, 400.0], np.float32))
    np.testing.assert_array_equal(got.numpy(), [2.0, -4.0, 1.0, 64.0])
