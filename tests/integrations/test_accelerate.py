"""Layers that other tools loaded.

Their own classes are taken where the packages are installed (`pip install .[formats]`; gptqmodel and autoawq in environments of
their own); elsewhere classes of the same names with the same tensors, as their sources have them: GPTQModel 7.7
(nn_modules/qlinear), AutoAWQ 0.2.9 (modules/linear/gemm.py), compressed-tensors 0.20 (compressors).
"""

import types
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed
from transformers.integrations.finegrained_fp8 import FP8Linear
from weight_layouts import dense, drawn, words

import tilewright
from tilewright.errors import InputError
from tilewright.integrations.transformers import TilewrightConfig, accelerate_, savable_

IDS = torch.tensor([[3, 14, 15, 92, 6, 5, 35]])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Stored(torch.nn.Module):
    """A module with buffers of these names."""

    def __init__(self, bias=None, **tensors):
        super().__init__()
        for name, value in {**tensors, "bias": bias}.items():
            self.register_buffer(name, value)


class TorchLinear(Stored):
    format = 1

    def qzero_format(self):
        return self.format


class MarlinLinear(Stored):
    pass


class WQLinear_GEMM(Stored):  # noqa: N801 - AutoAWQ's name
    pass


def in_words(fields):
    """4-bit fields [rows, n], AWQ's order within words."""
    whole = fields.reshape(fields.shape[0], -1, 8)[..., AWQ_ORDER]
    return words(whole.flatten(1), 4)


def placed(layer):
    return torch.nn.ModuleDict({"up": layer, "norm": torch.nn.LayerNorm(8)})


def taken(layer):
    """The layer that takes another's place."""
    model = placed(layer)
    report = accelerate_(model)
    assert list(report.layers) == ["up"] and not report.skipped, report
    assert isinstance(model["up"], tilewright.Linear)
    return model["up"], report


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq(bits, version, shuffled):
    codes, zeros, scales = drawn(0, 24, 128, 32, bits)
    at = torch.arange(128) // 32
    at = at[torch.randperm(128)] if shuffled else at
    stored = words((zeros - int(version == 1)).t(), bits)
    bias = torch.randn(24).half()
    layer = TorchLinear(bias, qweight=words(codes, bits).t(), qzeros=stored, scales=scales.t(), g_idx=at.int())
    layer.format = version
    new, report = taken(layer)
    wanted = dense(codes, zeros, scales, 32, at)
    assert torch.equal(new.weight.dequantize(), wanted) and torch.equal(new.bias, bias)
    assert report.layers["up"] == f"w{bits}g32z" and report.bytes_before > report.bytes_after // 2
    x = torch.randn(3, 128).half()
    assert layer_error(new(x).float(), torch.nn.functional.linear(x.float(), wanted, bias.float())) < 2e-3


def test_awq():
    codes, zeros, scales = drawn(1, 24, 64, 32, 4)
    layer = WQLinear_GEMM(qweight=in_words(codes.t()), qzeros=in_words(zeros.t()), scales=scales.t())
    new, _ = taken(layer)
    assert torch.equal(new.weight.dequantize(), dense(codes, zeros, scales, 32)) and new.bias is None


class Scheme:
    """A stand-in for compressed-tensors' QuantizationScheme."""

    def __init__(self, **said):
        self.said = said

    def model_dump(self, mode="python"):
        return self.said


def compressed(scheme, **tensors):
    layer = torch.nn.Linear(64, 24, bias=False)
    del layer.weight
    for name, value in tensors.items():
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
    layer.quantization_scheme = scheme
    return layer


def test_compressed_tensors_in_words():
    codes, zeros, scales = drawn(2, 24, 64, 32, 4)
    zeros = torch.full_like(zeros, 8)
    shape = torch.tensor([24, 64])
    new, report = taken(compressed(Scheme(), weight_packed=words(codes, 4), weight_scale=scales, weight_shape=shape))
    assert torch.equal(new.weight.dequantize(), dense(codes, zeros, scales, 32)) and report.layers["up"] == "w4g32"


@pytest.mark.parametrize("strategy", ["token", "tensor"])
def test_compressed_tensors_with_activations_in_8_bits(strategy):
    codes, scale = torch.randint(-128, 128, (24, 64), dtype=torch.int8), torch.rand(24, 1)
    asked = {"num_bits": 8, "strategy": strategy, "dynamic": True, "type": "int"}
    new, report = taken(compressed(Scheme(input_activations=asked), weight=codes, weight_scale=scale))
    assert torch.equal(new.weight.dequantize(), codes * scale)
    assert report.layers["up"] == ("a8w8" if strategy == "token" else "w8")


def test_floats_in_blocks_of_transformers():
    layer = FP8Linear(256, 128, block_size=(128, 128))
    layer.weight.data = torch.randn(128, 256).to(torch.float8_e4m3fn)
    layer.weight_scale_inv.data = torch.rand(1, 2)
    wanted = layer.weight.float() * layer.weight_scale_inv.repeat_interleave(128, dim=1)
    new, report = taken(layer)
    assert torch.equal(new.weight.dequantize(), wanted) and report.layers["up"] == "f8g128"


def test_layers_that_stay_are_named_with_the_reason():
    codes, zeros, scales = drawn(0, 24, 128, 32, 4)
    marlin = MarlinLinear(qweight=words(codes, 4).t(), qzeros=words(zeros.t(), 4), scales=scales.t())
    decompressed = torch.nn.Linear(64, 24)
    decompressed.quantization_scheme = Scheme()
    lost = compressed(Scheme(), weight=torch.zeros(24, 64, dtype=torch.int8))
    meta = TorchLinear(qweight=words(codes, 4).t(), qzeros=words(zeros.t(), 4), scales=scales.t()).to("meta")
    adapted = TorchLinear(qweight=words(codes, 4).t(), qzeros=words(zeros.t(), 4), scales=scales.t())
    adapted.adapter = types.SimpleNamespace()
    model = torch.nn.ModuleDict({"a": marlin, "b": decompressed, "c": lost, "d": meta, "e": adapted})
    report = accelerate_(model)
    assert not report.layers and set(report.skipped) == set("abcde")
    for name, why in {
        "a": "a MarlinLinear, whose words may be in the order of its own kernel",
        "b": "its weight is in floats again: take it over before its first call",
        "c": "weight without weight_scale",
        "d": "its tensors have no data yet",
        "e": "a TorchLinear with an adapter",
    }.items():
        assert why in report.skipped[name]


def test_what_cannot_be_taken_over():
    with pytest.raises(
        InputError, match=r"(?s)the model holds no layer that another tool quantised.*try: a model that GPTQModel"
    ):
        accelerate_(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    codes, zeros, scales = drawn(0, 24, 64, 32, 4)
    layer = WQLinear_GEMM(qweight=in_words(codes.t()), qzeros=in_words(zeros.t()), scales=scales.t())
    with pytest.raises(InputError, match="a quantised layer cannot be replaced in itself"):
        accelerate_(layer)
    with pytest.raises(InputError, match=r"an argument of type str \(model\)"):
        accelerate_("model")


def test_a_layer_in_two_places_stays_one():
    codes, zeros, scales = drawn(0, 24, 64, 32, 4)
    layer = WQLinear_GEMM(qweight=in_words(codes.t()), qzeros=in_words(zeros.t()), scales=scales.t())
    model = torch.nn.ModuleDict({"a": layer, "b": layer})
    report = accelerate_(model, threads=1)
    assert set(report.layers) == {"a", "b"} and model["a"] is model["b"] and model["a"].threads == 1


def test_quantize_leaves_such_layers_and_says_who_takes_them_over():
    model = placed(compressed(Scheme(), weight_packed=torch.zeros(24, 8, dtype=torch.int32)))
    assert "accelerate_ takes it over" in tilewright.quantize_(model).skipped["up"]


def test_quantize_leaves_layers_whose_inputs_accelerate_moves():
    model = placed(torch.nn.Linear(64, 24))
    model["up"]._hf_hook = object()
    assert tilewright.quantize_(model).skipped == {"up": "accelerate moves its inputs by a hook, which would be lost"}


def test_accelerate_s_own_hooks_stay():
    hooks = pytest.importorskip("accelerate.hooks")
    model = placed(torch.nn.Linear(64, 24))
    hooks.add_hook_to_module(model["up"], hooks.AlignDevicesHook(execution_device="cpu"))
    assert "accelerate moves" in tilewright.quantize_(model).skipped["up"]


def llama():
    set_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_a_model_that_was_taken_over_is_saved_and_read(tmp_path):
    model = llama()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                weight = tilewright.pack(child.weight, "u4", group_size=32, zero_point=True)
                words_, zeros = words(weight.codes.int(), 4).t(), words(weight.zero_points.int().t() - 1, 4)
                setattr(module, name, TorchLinear(qweight=words_, qzeros=zeros, scales=weight.scales.t()))
    report = accelerate_(model)
    assert len(report.layers) == 7 and "lm_head.weight" in report.left
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))


def of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    warnings.simplefilter("ignore")
    return quantization


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_torchao_s_own_layers(name):
    quantization = of_torchao()
    model = llama().to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, name)())
    theirs = {n: m.weight.dequantize() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert set(tilewright.quantize_(model, "w8").skipped) == set(theirs)
    wanted = logits(model)
    report = accelerate_(model)
    assert set(report.layers) == set(theirs)
    for layer, weight in theirs.items():
        assert torch.equal(model.get_submodule(layer).weight.dequantize(torch.bfloat16), weight)
    assert float((logits(model) - wanted).norm() / wanted.norm()) < 0.02


SCHEMES = ("W4A16", "W8A16", "W8A8", "FP8_DYNAMIC", "MXFP4A16", "NVFP4A16")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_own_layers(scheme):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    model, plain = placed(torch.nn.Linear(256, 24, bias=True)), torch.nn.Linear(256, 24)
    config = QuantizationConfig(config_groups={"g": preset_name_to_scheme(scheme, ["Linear"])})
    assert isinstance(config.config_groups["g"], QuantizationScheme)
    apply_quantization_config(model, config)
    layer = model["up"]
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    group = getattr(config.config_groups["g"].weights, "group_size", None) or 256
    largest = layer.weight.detach().reshape(24, -1, group).abs().amax(2)
    args = config.config_groups["g"].weights
    kind = str(getattr(args.type, "value", args.type)), args.num_bits
    top = {("int", 4): 7.5, ("int", 8): 127.5, ("float", 8): 448.0, ("float", 4): 6.0}[kind]
    with torch.no_grad():
        if "MXFP4" in scheme:
            layer.weight_scale.copy_(torch.exp2(torch.ceil(torch.log2(largest / top))))
        elif "NVFP4" in scheme:
            layer.weight_global_scale.fill_(float(448 * 6 / largest.max()))
            layer.weight_scale.copy_(
                (largest / top * layer.weight_global_scale).to(torch.float8_e4m3fn).to(layer.weight_scale.dtype)
            )
        else:
            layer.weight_scale.copy_(largest / top)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    report = accelerate_(model)
    assert list(report.layers) == ["up"], report
    assert layer_error(model["up"].weight.dequantize(), plain.weight.detach()) < (0.2 if "4" in scheme else 0.03)


def layer_error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


def test_gptqmodel_s_own_layers():
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear as Theirs

    for bits in (4, 8):
        plain = torch.nn.Linear(128, 64).half()
        layer = Theirs(bits=bits, group_size=32, sym=False, desc_act=False, in_features=128, out_features=64, bias=True)
        weight = tilewright.pack(plain.weight, f"u{bits}", group_size=32, zero_point=True)
        index = (torch.arange(128) // 32).int()
        layer.pack(plain, weight.scales.half(), weight.zero_points.int(), g_idx=index)
        from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.post_init()
        wanted, x = layer.dequantize_weight().t(), torch.randn(3, 128).half()
        result = layer(x)
        new, _ = taken(layer)
        assert torch.equal(new.weight.dequantize(torch.float16), wanted)
        torch.testing.assert_close(new(x), result, rtol=1e-2, atol=1e-2)


def test_autoawq_s_own_layers():
    gemm = pytest.importorskip("awq.modules.linear.gemm")
    from awq.utils.packing_utils import dequantize_gemm

    plain = torch.nn.Linear(128, 64).half()
    weight = tilewright.pack(plain.weight, "u4", group_size=32, zero_point=True)
    plain.weight.data = weight.dequantize(torch.float16)
    scales, zeros = weight.scales.t().contiguous(), weight.zero_points.t().contiguous()
    layer = gemm.WQLinear_GEMM.from_linear(plain, 4, 32, scales=scales, zeros=zeros)
    wanted = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, 32).t()
    new, _ = taken(layer)
    assert torch.equal(new.weight.dequantize(torch.float16), wanted) and torch.equal(new.bias, plain.bias)


def test_a_configuration_of_ours_for_a_model_of_another_tool(tmp_path):
    """Saved layers say how they are quantised; the argument must be of the same class."""
    model = llama()
    tilewright.quantize_(model, "w8")
    savable_(model).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TilewrightConfig("w4g64"))
    assert again.config.quantization_config.scheme == "mixed" and again.lm_head.scheme == "w8"
