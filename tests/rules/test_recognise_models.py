"""Recognition in what exporters and JAX really write: every norm, activation and attention, in any of their dialects."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against_jax import run, text
from jax_models import block_inputs, transformer_block
from onnx_models import ours, read, theirs
from rule_checks import assert_close, assert_no_growth, staged
from transformer_exports import NAMES, SMALL, exported, feeds, quiet

from tilewright.dtype import BF16, F32, PRED
from tilewright.frontends import LoadOptions, load
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Attention, LayerNorm, Map

SPELT_OUT = {"softmax", "is_nan", "erf", "erfc", "tanh", "exponential", "rsqrt", "sqrt", "power", "mean", "logistic"}


def functions(graph: Graph) -> Counter[str]:
    return Counter(n.op.fn if isinstance(n.op, Map) else getattr(n.op, "fn", n.op.name) for n in graph.nodes())


def assert_all_said(graph: Graph, **wanted: int) -> None:
    """So many of each operation, and nothing left of what spells them."""
    found = functions(graph)
    assert {name: found[name] for name in wanted} == wanted
    assert not SPELT_OUT & found.keys(), SPELT_OUT & found.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


EXPORTS: dict[str, dict[str, Any]] = {
    "dynamo 20": {"dynamo": True, "opset": 20},
    "dynamo 20, eager": {"dynamo": True, "opset": 20, "attention": "eager"},
    "dynamo 23": {"dynamo": True, "opset": 23},
    "torchscript 14": {"dynamo": False, "opset": 14},
    "torchscript 11, eager": {"dynamo": False, "opset": 11, "attention": "eager"},
    "torchscript 14, dynamic": {"dynamo": False, "opset": 14, "dynamic": True},
}
OFTEN = {("bert", "dynamo 20"), ("bert", "torchscript 14"), ("gpt2", "dynamo 23"), ("gpt2", "torchscript 11, eager")}


def _rare(kind: str, how: str) -> Any:
    """The exporters take seconds each: some of the combinations are for the long suite."""
    return pytest.param(kind, how, marks=[] if (kind, how) in OFTEN else [pytest.mark.conformance])


@pytest.mark.thin(2)
@pytest.mark.parametrize(("kind", "how"), [_rare(kind, how) for kind in ("bert", "gpt2") for how in EXPORTS])
def test_transformers_exported_by_torch(folder: Path, kind: str, how: str):
    path = exported(folder, f"{kind}-{how.replace(' ', '').replace(',', '-')}", **EXPORTS[how])
    dims = dict.fromkeys(NAMES, (2, 7)) if EXPORTS[how].get("dynamic") else {}
    before = read(path, input_dims=dims) if dims else read(path)
    after = staged(before, "recognise")
    assert_all_said(after, attention=2, layer_norm=5, **{"gelu" if kind == "bert" else "gelu_tanh": 2})
    assert_no_growth(before, after, bytes_too=False)
    x = feeds(2, 7)
    for got, wanted in zip(ours(after, x), theirs(path, x), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert staged(before, "recognise", shuffle=3).outputs == after.outputs


@pytest.mark.parametrize(("attention", "padded"), [("sdpa", True), ("sdpa", False), ("eager", False)])
def test_gpt2_as_torch_exports_it_is_causal(attention: str, padded: bool):
    """Its mask is made of positions, which without padding are read from a table for each line of the batch."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(**{**SMALL["gpt2"], "n_layer": 1}, attn_implementation=attention, use_cache=False)
    torch.manual_seed(0)
    model = GPT2Model(config).eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.model(ids, attention_mask=mask).last_hidden_state

    given = [torch.from_numpy(x) for x in feeds(3, 9).values()][: 2 if padded else 1]
    before = load(Hidden().eval(), LoadOptions({}, None, tuple(given)))
    after = staged(before, "recognise")
    (found,) = (n for n in after.nodes() if isinstance(n.op, Attention))
    assert isinstance(found.op, Attention) and found.op.causal == "upper"
    assert len(found.src) == 3 + padded and (not padded or found.src[3].shape == (3, 1, 1, 9))
    (got,) = evaluate(after, given)
    torch.testing.assert_close(got, Hidden()(*given), atol=1e-5, rtol=1e-5)


def test_bloom_is_causal_beside_its_slopes():
    """Its bias is a slope for each head times the key's position; six heads take their slopes of two rows of powers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(hidden_size=48, n_layer=1, n_head=6, vocab_size=64)
    model, ids = transformers.BloomModel(config).eval(), torch.arange(2 * 9).reshape(2, 9)
    graph = load(model, LoadOptions(example_inputs={"input_ids": ids, "use_cache": False}))
    after = staged(graph, "recognise")
    (found,) = (n for n in after.nodes() if isinstance(n.op, Attention))
    assert found.op.causal == "upper" and found.src[3].shape == (1, 6, 1, 9)
    with torch.no_grad():
        torch.testing.assert_close(evaluate(after, [ids])[0], model(ids, use_cache=False)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize("opset", [20, 23])
def test_llama_with_grouped_queries(folder: Path, opset: int):
    """RMS norms, silu, and keys repeated for two queries each."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 100}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    torch.manual_seed(0)
    model = LlamaModel(config).eval()
    path, x = folder / f"llama-{opset}.onnx", feeds(2, 7)
    with quiet(), torch.no_grad():
        example = {k: torch.from_numpy(v) for k, v in x.items()}
        more = {"dynamo": True, "external_data": False, "verbose": False, "output_names": ["out"]}
        torch.onnx.export(model, (), path, kwargs=example, opset_version=opset, **more)
    before = read(str(path))
    after = staged(before, "recognise")
    assert_all_said(after, attention=2, layer_norm=5, silu=2)
    for node in after.nodes():
        if isinstance(node.op, Attention):
            assert [s.shape[1] for s in node.src[:3]] == [4, 2, 2]
        assert not isinstance(node.op, LayerNorm) or len(node.src) == 2
    for got, wanted in zip(ours(after, x), theirs(str(path), x), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("name", "variant"), [("bert", "int8"), ("bert", "fp8"), ("distilgpt2", "int8-asymmetric"), ("distilgpt2", "fp8-fnuz")]
)
def test_quantised_models_keep_every_rounding(folder: Path, name: str, variant: str):
    """Pairs on the scores and on the softmax go into the attention, those on its operands stay before it; bit for bit."""
    from models import write_model

    kind = {"bert": "bert", "distilgpt2": "gpt2"}[name]
    config = {k: v for k, v in SMALL[kind].items() if k not in ("num_hidden_layers", "n_layer")}
    path = write_model(name, variant, folder, batch=2, sequence=16, layers=2, config=config)
    before = load(str(path), LoadOptions())
    after = staged(before, "recognise")
    assert_all_said(after, attention=2, layer_norm=5, **{"gelu" if kind == "bert" else "gelu_tanh": 2})
    for node in after.nodes():
        if isinstance(node.op, Attention):
            assert node.op.scores is not None and node.op.weights is not None and node.op.equal_masked_rows
            assert node.op.causal == ("no" if kind == "bert" else "upper") and node.src[3].dtype is PRED
            assert all(s.op.name == "dequantize" for s in node.src[:3])
    x = feeds(2, 16)
    for a, b in zip(ours(before, x), ours(after, x), strict=True):
        np.testing.assert_array_equal(a, b)


# JAX.

KINDS = ["stablehlo", "hlo", "optimised"]


def both(kind: str, f: Callable[..., Any], *args: Any) -> tuple[Graph, Graph]:
    before = load(text(kind, f, *args), LoadOptions())
    after = staged(before, "recognise")
    assert staged(before, "recognise", shuffle=1).outputs == after.outputs
    assert_no_growth(before, after, bytes_too=False)
    return before, after


def flat(args: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [True, False])
def test_transformer_block_in_jax(kind: str, exact: bool):
    inputs = block_inputs()

    def f(*args: Any) -> Any:
        return transformer_block(*args, exact=exact)

    _, after = both(kind, f, *inputs)
    assert_all_said(after, attention=1, layer_norm=2, **{"gelu" if exact else "gelu_tanh": 1})
    (node,) = (n for n in after.nodes() if isinstance(n.op, Attention))
    assert node.op.causal == "upper" and len(node.src) == 3
    assert all(len(n.src) == 3 for n in after.nodes() if isinstance(n.op, LayerNorm))
    (got,) = run(after, *flat(inputs))
    np.testing.assert_allclose(got.numpy(), np.asarray(jax.jit(f)(*inputs)), rtol=2e-5, atol=2e-6)


def qkv(dtype: Any, heads: int = 4, kv_heads: int = 2, tokens: int = 5, keys: int = 7) -> list[Any]:
    rng = np.random.default_rng(3)
    shapes = ((2, tokens, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8))
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def one_attention(graph: Graph) -> Node:
    (node,) = (n for n in graph.nodes() if isinstance(n.op, Attention))
    assert not SPELT_OUT & functions(graph).keys()
    return node


_dice = np.random.default_rng(1)
DPA: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # options, and arrays given at run time
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "scaled": ({"scale": 0.3}, {}),
    "mask": ({}, {"mask": _dice.random((2, 1, 5, 7)) > 0.3}),
    "bias": ({}, {"bias": _dice.standard_normal((1, 4, 5, 7))}),
    "bias, causal": ({"is_causal": True}, {"bias": _dice.standard_normal((1, 1, 5, 7))}),
    "lengths": ({}, {"key_value_seq_lengths": np.array([4, 7], np.int32)}),
    "window": ({"local_window_size": (2, 1)}, {}),
}


@functools.cache
def attention_of_jax(case: str, dtype: str) -> tuple[Callable[..., Any], list[Any], np.ndarray[Any, Any]]:
    """One of them, what it is called with, and what it gives."""
    options, arrays = DPA[case]
    arguments = [*qkv(dtype), *(jnp.asarray(v, dtype) if k == "bias" else v for k, v in arrays.items())]

    def f(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, **options, **dict(zip(arrays, more, strict=True)))

    return f, arguments, np.asarray(jax.jit(f)(*arguments)).astype(np.float32)


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", DPA)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dot_product_attention_of_jax(kind: str, case: str, dtype: str):
    """Grouped queries among the rows of the product, heads behind the sequence, masks in five dimensions."""
    f, arguments, wanted = attention_of_jax(case, dtype)
    before, after = both(kind, f, *arguments)
    node = one_attention(after)
    assert [s.shape[1] for s in node.src[1:3]] == [2, 2]
    assert node.op.scale == pytest.approx(0.3 if case == "scaled" else 8**-0.5, rel=BF16.epsilon)
    assert node.op.causal == ("upper" if case == "causal" else "no")
    assert_close(before, after, 2e-6 if before.inputs[0].dtype is F32 else 4 * BF16.epsilon)
    (got,) = run(after, *arguments)
    np.testing.assert_allclose(got.float().numpy(), wanted, atol=2e-6 if dtype == "float32" else 0.03)


def layer_norm_by_moments(x: Any, scale: Any, bias: Any) -> Any:
    """A layer norm as Flax writes it."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (x * x).mean(-1, keepdims=True) - mean * mean)
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale) + bias


def layer_norm_by_var(x: Any, scale: Any, bias: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * scale + bias


def rms_norm(x: Any, scale: Any, bias: Any) -> Any:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return normal.astype(x.dtype) * scale + bias


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [layer_norm_by_moments, layer_norm_by_var, rms_norm])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_in_jax(kind: str, norm: Callable[..., Any], dtype: str):
    rng = np.random.default_rng(4)
    args = [jnp.asarray(rng.standard_normal(s), dtype) for s in ((3, 5, 24), (24,), (24,))]
    before, after = both(kind, norm, *args)
    assert functions(after)["layer_norm"] == 1 and not SPELT_OUT & functions(after).keys()
    (out,) = after.outputs
    assert isinstance(out.op, LayerNorm) and len(out.src) == 3 and out.op.center == (norm is not rms_norm)
    assert_close(before, after, 1e-5 if dtype == "float32" else 4 * BF16.epsilon)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "clamp": jax.nn.relu6,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_in_jax(kind: str, name: str, dtype: str):
    # Past 31 columns XLA's CPU compiler turns sums into trees of windows.
    x = jnp.asarray(np.random.default_rng(5).standard_normal((6, 24)) * 3, dtype)
    before, after = both(kind, ACTIVATIONS[name], x)
    (out,) = staged(after, "unfuse").outputs
    found = out.op.fn if isinstance(out.op, Map) else {False: "softmax", True: "log_softmax"}[out.op.log]  # type: ignore[attr-defined]
    assert found == name and before.inputs[0] in out.src
    assert_close(before, after, 1e-6 if dtype == "float32" else 4 * BF16.epsilon)
