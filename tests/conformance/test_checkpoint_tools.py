"""Tiny models that each tool quantises and saves itself: what is read gives the logits of the weights that the tool's own code
dequantises, and those weights bit for bit.

Each tool needs an environment of its own beside this package's dependencies and pytest, as their versions of torch differ:
`pip install gptqmodel`, `pip install autoawq`, `pip install llmcompressor`, and `pip install .[formats]` for torchao and GGUF.
Tests of tools that are not installed are skipped.
"""

import functools
import os
import warnings

import pytest
import torch

import tilewright
from tilewright.integrations.transformers import accelerate_

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.conformance

IDS = torch.tensor([[3, 14, 15, 92, 6, 5, 35]])
SIZES = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(dtype=torch.float32):
    transformers.set_seed(0)
    config = transformers.LlamaConfig(**SIZES, **TOKENS, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).eval().to(dtype)


@pytest.fixture
def folder(tmp_path):
    """The float model, with a tokenizer of 96 words."""
    from tokenizers import Tokenizer, models

    llama().save_pretrained(tmp_path / "float")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w3"))
    special = {"unk_token": "w3", "pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path / "float")
    return tmp_path


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


ROUNDED = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # logits of weights that are in f32 here


def check(path, theirs, bound=None):
    """Compare what is read with the weights by the tool, as floats by the names of layers."""
    checkpoint = tilewright.read_checkpoint(path)
    assert set(theirs) == set(checkpoint.layers) and len(theirs) >= 7
    for name, weight in theirs.items():
        assert torch.equal(checkpoint.weight(name).dequantize(weight.dtype), weight), name
    reference, model = llama(), llama()
    plain = {name: checkpoint.tensor(name).float() for name in checkpoint.plain}
    for each in (reference, model):
        each.load_state_dict(plain, strict=False)
    with torch.no_grad():
        for name, weight in theirs.items():
            reference.get_submodule(name).weight.copy_(weight)
    report = tilewright.quantize_(model, checkpoint)
    assert set(report.layers) == set(theirs) and not report.unused
    wanted = logits(reference)
    bound = bound or max(ROUNDED[weight.dtype] for weight in theirs.values())
    assert float((logits(model) - wanted).norm() / wanted.norm()) < bound


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptqmodel(folder, bits, ordered):
    gptqmodel = pytest.importorskip("gptqmodel")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its loader takes two, of which it has one a pair of cores
    path, backend = str(folder / "gptq"), gptqmodel.BACKEND.TORCH
    config = gptqmodel.QuantizeConfig(bits=bits, group_size=32, desc_act=ordered)
    model = gptqmodel.GPTQModel.load(str(folder / "float"), config, device="cpu", backend=backend)
    drawn = torch.randint(3, 96, (16, 64), generator=torch.Generator().manual_seed(0))
    model.quantize([{"input_ids": row.tolist(), "attention_mask": [1] * 64} for row in drawn], batch_size=1)
    model.save(path)
    loaded = gptqmodel.GPTQModel.load(path, device="cpu", backend=backend, dtype=torch.float16).model  # as its scales are
    theirs = {n: m.dequantize_weight().t() for n, m in loaded.named_modules() if hasattr(m, "dequantize_weight")}
    check(path, theirs)
    for name in accelerate_(loaded).layers:
        assert torch.equal(loaded.get_submodule(name).weight.dequantize(theirs[name].dtype), theirs[name])


def test_autoawq(folder):
    """Its own search and files, on a CPU."""
    awq = pytest.importorskip("awq")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    transformers.AutoModelForCausalLM.from_pretrained(folder / "float").half().save_pretrained(folder / "float")
    model = awq.AutoAWQForCausalLM.from_pretrained(str(folder / "float"), device_map="cpu")
    drawn = torch.randint(3, 96, (16, 64), generator=torch.Generator().manual_seed(0)).tolist()
    asked = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "float")
    model.quantize(tokenizer, quant_config=asked, calib_data=drawn, max_calib_seq_len=64)
    model.save_quantized(str(folder / "awq"))
    loaded = model.model
    layers = {n: m for n, m in loaded.named_modules() if isinstance(m, WQLinear_GEMM)}
    theirs = {n: dequantize_gemm(m.qweight, m.qzeros, m.scales, 4, 32).t() for n, m in layers.items()}
    check(folder / "awq", theirs)
    assert taken_over(lambda: loaded.float(), theirs) < ROUNDED[torch.float16]


QUANTISED_INPUTS = ("W8A8", "FP8_DYNAMIC")
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "NVFP4A16")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_llm_compressor(folder, scheme):
    compressor = pytest.importorskip("llmcompressor")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "float", dtype=torch.bfloat16)
    compressor.oneshot(model=model, recipe=quantization(scheme))
    model.save_pretrained(folder / scheme, save_compressed=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / scheme)
    logits(loaded)  # makes floats of its weights
    check(
        folder / scheme,
        {n: m.weight.detach() for n, m in linears(loaded).items()},
        0.05 if scheme in QUANTISED_INPUTS else None,
    )


def taken_over(load, theirs):
    """The error of logits once `accelerate_` has taken over the layers, with the same weights, against those weights in f32."""
    model, reference = load(), llama()
    report = accelerate_(model)
    assert set(report.layers) == set(theirs) and not report.skipped
    for name, weight in theirs.items():
        assert torch.equal(model.get_submodule(name).weight.dequantize(weight.dtype), weight), name
    plain = {n: p.detach().float() for n, p in model.named_parameters() if n in dict(reference.named_parameters())}
    reference.load_state_dict(plain, strict=False)
    with torch.no_grad():
        for name, weight in theirs.items():
            reference.get_submodule(name).weight.copy_(weight)
    wanted = logits(reference)
    return float((logits(model) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W4A16", "W8A8"])
def test_llm_compressors_searches(folder, scheme, monkeypatch):
    """AWQ's scales and GPTQ's rounding, found by the tool itself on a CPU, where it pins memory as for a GPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    compressor = pytest.importorskip("llmcompressor")
    datasets = pytest.importorskip("datasets")
    if scheme == "W4A16_ASYM":
        from llmcompressor.modifiers.transform.awq import AWQModifier

        recipe = [AWQModifier(), quantization(scheme)]
    else:
        from llmcompressor.modifiers.gptq import GPTQModifier

        recipe = GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "float", dtype=torch.bfloat16)
    drawn = torch.randint(3, 96, (16, 64), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": drawn.tolist(), "attention_mask": torch.ones_like(drawn).tolist()}
    compressor.oneshot(
        model=model, recipe=recipe, dataset=datasets.Dataset.from_dict(rows), max_seq_length=64, num_calibration_samples=16
    )
    model.save_pretrained(folder / scheme, save_compressed=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / scheme)
    logits(loaded)
    theirs = {n: m.weight.detach() for n, m in linears(loaded).items()}
    check(folder / scheme, theirs, 0.05 if scheme in QUANTISED_INPUTS else None)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, folder / scheme)
    assert taken_over(load, theirs) < (0.05 if scheme in QUANTISED_INPUTS else ROUNDED[torch.bfloat16] * 3)


def quantization(scheme):
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_torchao(folder, name):
    quantization = pytest.importorskip("torchao.quantization")
    warnings.simplefilter("ignore")
    asked = transformers.TorchAoConfig(getattr(quantization, name)())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "float", quantization_config=asked, dtype=torch.bfloat16)
    model.save_pretrained(folder / name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    theirs = {n: m.weight.dequantize() for n, m in linears(loaded).items()}
    check(folder / name, theirs)
    assert taken_over(lambda: loaded, theirs) < ROUNDED[torch.bfloat16] * 3


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf(folder, kind):
    """Written by the `gguf` package; transformers reads and dequantises it."""
    gguf = pytest.importorskip("gguf")
    model, of = llama(), getattr(gguf.GGMLQuantizationType, kind)
    config = model.config
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        heads = next((n for own, n in (("q_proj", 4), ("k_proj", 2)) if own in name), None)
        if heads:  # as convert_hf_to_gguf.py turns them
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        own = names.get_name(name, try_suffixes=(".weight",))
        plain = value.dim() == 1 or "embed_tokens" in name
        data = value.numpy() if plain else gguf.quants.quantize(value.numpy(), of)
        writer.add_tensor(own, data, raw_dtype=None if plain else of)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf", dtype=torch.float32)
    theirs = {n: m.weight.detach() for n, m in loaded.named_modules() if isinstance(m, torch.nn.Linear)}
    check(folder / "m.gguf", theirs)
