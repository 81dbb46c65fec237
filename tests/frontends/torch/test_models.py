"""Whole models read from PyTorch against torch: transformers, an MLP, convolutions, quantised layers, the nvFuser example."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from against_torch import Case, agree, compare, read
from click.testing import CliRunner
from torch import nn

import nvfuser_linear
from tilewright.frontends import LoadOptions
from tilewright.frontends import torch as frontend
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.ops import Attention, Call, Dequantize, Gemm, Quantize
from tilewright.ir.verify import verify

TOKENS = torch.randint(0, 100, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 7, dtype=torch.int64)
MASK[1, 4:] = 0
SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def count(graph: Graph) -> Counter[type]:
    return Counter(type(n.op) for n in graph.nodes())


def bert(attention: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    return transformers.BertModel(transformers.BertConfig(**SMALL, attn_implementation=attention))


def gpt2(attention: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **tokens, attn_implementation=attention, use_cache=False)
    )


def llama(attention: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, attn_implementation=attention, use_cache=False)
    return transformers.LlamaForCausalLM(config)


# The products of two layers; an eager attention is two more, sdpa one attention.
LINEARS = {bert: 13, gpt2: 9, llama: 15}
NAMES = {
    bert: ("encoder.layer.1.attention.self.query linear", ("last_hidden_state", "pooler_output")),
    gpt2: ("transformer.h.1.attn.c_attn addmm", ("logits",)),
    llama: ("model.layers.1.self_attn.q_proj linear", ("logits",)),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", LINEARS)
def test_a_transformer_is_read_whole(model: Callable[[str], nn.Module], attention: str) -> None:
    torch.manual_seed(0)
    module = model(attention).eval()
    inputs = {"input_ids": TOKENS, "attention_mask": MASK}
    graph = verify(frontend.load(module, LoadOptions(example_inputs=inputs)))
    found = count(graph)
    assert found[Call] == 0
    assert (found[Attention], found[Gemm]) == ((2, LINEARS[model]) if attention == "sdpa" else (0, LINEARS[model] + 4))
    name, outputs = NAMES[model]
    assert name in {graph.origin(n) for n in graph.nodes() if isinstance(n.op, Gemm)}
    assert graph.output_names == outputs
    compare(graph, module, inputs, ulps=16, depth=16)
    # Not only on the inputs it was traced with.
    other = {"input_ids": TOKENS.flip(1), "attention_mask": torch.ones_like(MASK)}
    compare(graph, module, other, ulps=16, depth=16)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) with a residual (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swiglu_mlp(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    graph = agree(SwiGLU(48, 128).to(dtype).eval(), torch.randn(3, 5, 48).to(dtype), ulps=4, depth=4)
    assert count(graph)[Gemm] == 3


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(2)),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1)).log_softmax(-1)


def test_convolutions_are_left_to_torch_and_said_to_be() -> None:
    torch.manual_seed(0)
    net = ConvNet()
    net(torch.randn(8, 3, 14, 14))  # gives the batch norm statistics other than 0 and 1
    left = ["aten._adaptive_avg_pool2d.default", "aten.convolution.default", "aten.max_pool2d_with_indices.default"]
    graph = agree(net.eval(), torch.randn(2, 3, 14, 14), ulps=8, depth=8, calls=left)
    assert [note for note in graph.notes if "features.4" in note] == [
        "features.4 convolution: aten.convolution.default is not modelled and is left to torch"
    ]
    assert len(graph.notes) == sum(isinstance(n.op, Call) for n in graph.nodes()) == 4


class QuantizedLinear(nn.Module):
    """An int8 linear as export-based quantisation writes it: activation per tensor, weight per channel, result per tensor."""

    def __init__(self) -> None:
        super().__init__()
        importlib.import_module("torch.ao.quantization.fx._decomposed")
        self.register_buffer("weight", torch.randint(-127, 128, (11, 37), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(11) * 0.02 + 0.001)
        self.register_buffer("zeros", torch.zeros(11, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        q = ops.quantize_per_tensor(x, 0.03, 5, -128, 127, torch.int8)
        x = ops.dequantize_per_tensor(q, 0.03, 5, -128, 127, torch.int8)
        w = ops.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        y = F.linear(x, w, self.bias)
        q = ops.quantize_per_tensor(y, 0.11, 0, -128, 127, torch.int8)
        return ops.dequantize_per_tensor(q, 0.11, 0, -128, 127, torch.int8)


def test_an_int8_linear_keeps_its_quantisation() -> None:
    torch.manual_seed(0)
    graph = agree(QuantizedLinear().eval(), torch.randn(13, 37) * 2, ulps=2)
    found = count(graph)
    assert (found[Quantize], found[Dequantize], found[Gemm], found[Call]) == (2, 3, 1, 0)


def _quantized() -> dict[str, Case]:
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    q = torch.ops.quantized_decomposed
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1)) * 4
    codes = torch.randint(-8, 8, (6, 8), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    unsigned = torch.randint(0, 256, (6, 5, 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    scale, zero = torch.tensor([0.25]), torch.tensor([3])
    rows, row_zeros = torch.rand(5) + 0.25, torch.arange(5)
    tokens, token_zeros = torch.rand(6, 5, 1) + 0.25, torch.arange(30).reshape(6, 5, 1)
    groups, group_zeros = torch.rand(6, 2) + 0.25, torch.arange(12, dtype=torch.int32).reshape(6, 2) - 6
    s8, u8, f32 = torch.int8, torch.uint8, torch.float32
    return {
        "u8": (lambda a: q.quantize_per_tensor(a, 0.05, 131, 0, 255, u8), (x,)),
        "a narrow range": (lambda a: q.quantize_per_tensor(a, 0.5, 0, -8, 7, s8), (x,)),
        "bf16": (lambda a: q.quantize_per_tensor(a, 0.25, 3, -128, 127, s8), (x.bfloat16(),)),
        "tensor scale": (lambda a, s, z: q.quantize_per_tensor.tensor(a, s, z, -128, 127, s8), (x, scale, zero)),
        "tensor scale back": (lambda a, s, z: q.dequantize_per_tensor.tensor(a, s, z, 0, 255, u8), (unsigned, scale, zero)),
        "back to bf16": (
            lambda a: q.dequantize_per_tensor(a, 0.25, 128, 0, 255, u8, out_dtype=torch.bfloat16),
            (unsigned,),
        ),
        "per channel": (lambda a, s, z: q.quantize_per_channel(a, s, z, 1, -128, 127, s8), (x, rows, row_zeros)),
        "per channel back": (lambda a, s, z: q.dequantize_per_channel(a, s, z, -2, 0, 255, u8), (unsigned, rows, row_zeros)),
        "per token": (lambda a, s, z: q.quantize_per_token(a, s, z, 0, 255, u8), (x, tokens, token_zeros)),
        "per token back": (lambda a, s, z: q.dequantize_per_token(a, s, z, 0, 255, u8, f32), (unsigned, tokens, token_zeros)),
        "per group": (
            lambda a, s, z: q.quantize_per_channel_group(a, s, z, -8, 7, s8, 4),
            (x[:, 0], groups, group_zeros),
        ),
        "per group back": (
            lambda a, s, z: q.dequantize_per_channel_group(a, s, z, -8, 7, s8, 4, f32),
            (codes, groups, group_zeros),
        ),
    }


QUANTIZED = _quantized()


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_quantised_decomposed_operator(name: str) -> None:
    f, args = QUANTIZED[name]
    graph = read(f, *args)
    assert count(graph)[Call] == 0 and count(graph)[Quantize] + count(graph)[Dequantize] == 1
    (given,) = evaluate(graph, args)
    wanted = f(*args)
    assert given.dtype == wanted.dtype
    off = (given.double() - wanted.double()).abs()
    if wanted.dtype.is_floating_point:
        # bf16: torch rounds the product from bf16 operands, dequantize from f32 ones.
        assert (off <= 4 * torch.finfo(wanted.dtype).eps * wanted.double().abs()).all()
    else:
        assert off.max() <= 1 and (off > 0).float().mean() < 0.01


def test_codes_multiplied_as_codes() -> None:
    """The dynamic quantisation of a linear, spelt with `_int_mm`."""
    torch.manual_seed(0)
    w = torch.randint(-128, 128, (37, 16), dtype=torch.int8)

    def program(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 127
        return torch._int_mm((x / scale).round().clamp(-128, 127).to(torch.int8), w) * scale

    agree(program, torch.randn(32, 37))


@pytest.mark.parametrize("layout", nvfuser_linear.LAYOUTS)
def test_the_example_is_one_gemm_in_every_layout(layout: str) -> None:
    size = (14, 22, 29)
    for epilogue, dtype, batch in (("bias-gelu", "bf16", 0), ("bias-relu", "f16", 3), ("cast", "f16", 0)):
        program = nvfuser_linear.module(epilogue, dtype, layout, size, batch)
        step = torch.finfo(nvfuser_linear.DTYPES[dtype]).eps / torch.finfo(torch.float32).eps if epilogue == "cast" else 1
        inputs = nvfuser_linear.example_inputs(dtype, layout, size, batch)
        graph = agree(program, *inputs, ulps=3 * step, depth=step)
        assert count(graph)[Gemm] == 1


def test_the_example_prints_what_became_of_each() -> None:
    result = CliRunner().invoke(nvfuser_linear.main, ["--epilogue", "bias-gelu", "--size", "16", "64", "32"])
    assert result.exit_code == 0, result.output
    assert "bf16  TN bias-gelu  steps 1  by " in result.output
    refused = CliRunner().invoke(nvfuser_linear.main, ["--epilogue", "relu", "--size", "16", "64", "32", "--device", "cuda:99"])
    assert refused.exit_code == 2 and "error: " in refused.output


def test_a_cache_that_grows_is_results_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).eval()
    graph = read(model, torch.arange(6)[None])
    assert graph.output_names == ("logits", "past_key_values.key_cache.0", "past_key_values.value_cache.0")
    ids = torch.tensor([[5, 1, 60, 2, 2, 9]])
    with torch.no_grad():
        wanted = model(ids)
    layer = wanted.past_key_values.layers[0]
    for got, meant in zip(evaluate(graph, [ids]), (wanted.logits, layer.keys, layer.values), strict=True):
        torch.testing.assert_close(got, meant, atol=1e-5, rtol=1e-4)
