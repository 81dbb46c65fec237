"""Tiny models that each tool quantises and saves itself: what is read gives the logits of the weights that the tool's own code
dequantises, and those weights bit for bit.

Each tool needs an environment of its own beside this package's dependencies and pytest, as their versions of torch differ:
`pip install gptqmodel`, `pip install autoawq`, `pip install llmcompressor`, and `pip install .[formats]` for torchao and GGUF.
Tests of tools that are not installed are skipped.
"""

import os
import warnings

import pytest
import torch
from safetensors.torch import save_file

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
    """The layers and files of AutoAWQ, filled by rounding to the nearest: its search wants a GPU."""
    gemm = pytest.importorskip("awq.modules.linear.gemm")
    from awq.utils.packing_utils import dequantize_gemm

    model, theirs, tensors = llama(torch.float16), {}, {}
    for name, linear in linears(model).items():
        weight = tilewright.pack(linear.weight, "u4", group_size=32, zero_point=True)
        scales, zeros = weight.scales.t().contiguous(), weight.zero_points.t().contiguous()
        linear.weight.data = weight.dequantize(torch.float16)
        made = gemm.WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales, zeros=zeros)
        theirs[name] = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, 32).t()
        tensors |= {f"{name}.{n}": t.contiguous() for n, t in made.state_dict().items()}
    tensors |= {n: t for n, t in model.state_dict().items() if n.rpartition(".")[0] not in theirs}
    save_file(tensors, folder / "model.safetensors")
    check(folder / "model.safetensors", theirs)


QUANTISED_INPUTS = ("W8A8", "FP8_DYNAMIC")
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "NVFP4A16")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_llm_compressor(folder, scheme):
    compressor = pytest.importorskip("llmcompressor")
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "float", dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    compressor.oneshot(model=model, recipe=recipe)
    model.save_pretrained(folder / scheme, save_compressed=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / scheme)
    logits(loaded)  # makes floats of its weights
    check(
        folder / scheme,
        {n: m.weight.detach() for n, m in linears(loaded).items()},
        0.05 if scheme in QUANTISED_INPUTS else None,
    )


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_torchao(folder, name):
    quantization = pytest.importorskip("torchao.quantization")
    warnings.simplefilter("ignore")
    asked = transformers.TorchAoConfig(getattr(quantization, name)())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "float", quantization_config=asked, dtype=torch.bfloat16)
    model.save_pretrained(folder / name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    check(folder / name, {n: m.weight.dequantize() for n, m in linears(loaded).items()})


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
