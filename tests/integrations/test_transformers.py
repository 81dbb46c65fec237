"""Tiny models that are made on the spot, through `from_pretrained` and `save_pretrained`."""

import json
import shutil

import pytest
import torch
import warm
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)
from transformers.modeling_utils import get_total_byte_count
from transformers.quantizers.auto import AutoHfQuantizer

import tilewright
from tilewright.errors import InputError, TypeMismatchError
from tilewright.integrations.transformers import TilewrightConfig, savable_

IDS = torch.tensor([[3, 14, 15, 92, 6, 5, 35]])


def llama(tied=False, bias=False):
    set_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": bias, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    if bias:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
    return model


def gpt2():
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32)).eval()


def t5():
    set_seed(0)
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


@torch.no_grad()
def logits(model):
    return model(IDS, decoder_input_ids=IDS).logits if model.config.is_encoder_decoder else model(IDS).logits


def quantised(model):
    return {name for name, module in model.named_modules() if isinstance(module, tilewright.Linear)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A quantised model that was saved."""
    path = tmp_path_factory.mktemp("models")
    llama().save_pretrained(path / "float")
    model = LlamaForCausalLM.from_pretrained(path / "float", quantization_config=TilewrightConfig("w4g32"))
    model.save_pretrained(path / "w4")
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (llama, "w4g32"),
        (lambda: llama(tied=True), "w8"),
        (lambda: llama(bias=True), "a8w4g64z"),
        (llama, "f8"),
        (gpt2, "w4g64"),
        (t5, "w8g32"),
    ],
    ids=["llama", "tied", "bias", "f8", "gpt2", "t5"],
)
def test_weights_are_quantised_as_they_are_loaded_and_saved_as_they_are(make, scheme, dtype, tmp_path):
    """The result is `quantize_`'s, and what is saved gives it again, bit for bit."""
    model = make()
    model.save_pretrained(tmp_path / "float")
    kind = type(model)
    wanted = kind.from_pretrained(tmp_path / "float", dtype=dtype)
    report = tilewright.quantize_(wanted, scheme)
    loaded = kind.from_pretrained(tmp_path / "float", dtype=dtype, quantization_config=TilewrightConfig(scheme))
    assert quantised(loaded) == set(report.layers) and loaded.dtype is dtype
    assert torch.equal(logits(loaded), logits(wanted))
    loaded.save_pretrained(tmp_path / "saved")
    again, info = kind.from_pretrained(tmp_path / "saved", dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert again.config.quantization_config.scheme == scheme and quantised(again) == quantised(loaded)
    assert torch.equal(logits(again), logits(loaded))
    again.save_pretrained(tmp_path / "twice")
    first, second = (load_file(tmp_path / f / "model.safetensors") for f in ("saved", "twice"))
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    if scheme == "w4g32":
        assert (tmp_path / "saved/model.safetensors").stat().st_size < (tmp_path / "float/model.safetensors").stat().st_size


def test_a_saved_model_generates_and_is_made_float_again(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "w4")
    wanted = logits(model)
    one = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert one.shape == (1, 11)
    names = quantised(model)
    assert "lm_head" in names
    model.dequantize()
    assert not quantised(model) and not hasattr(model.config, "quantization_config")
    torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)


def test_layers_of_other_classes_are_made_float_again(tmp_path):
    gpt2().save_pretrained(tmp_path / "float")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "float", quantization_config=TilewrightConfig("w8"))
    wanted = logits(model)
    model.dequantize()
    torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model)) and type(again.transformer.h[0].mlp.c_fc).__name__ == "Conv1D"


def test_a_model_without_the_head_is_read_from_the_same_folder(folder):
    whole = AutoModelForCausalLM.from_pretrained(folder / "w4")
    base, info = LlamaModel.from_pretrained(folder / "w4", output_loading_info=True)
    assert set(info["unexpected_keys"]) <= {"lm_head.packed", "lm_head.scales", "lm_head.weight"} and not info["missing_keys"]
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, whole.model(IDS).last_hidden_state)


def test_layers_that_are_named_stay_in_float(folder, tmp_path):
    config = TilewrightConfig("w8", modules_to_not_convert=["lm_head", "model.layers.0", "mlp.up_proj"])
    model = AutoModelForCausalLM.from_pretrained(folder / "float", quantization_config=config)
    left = {n for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert left == {"lm_head", "model.layers.1.mlp.up_proj"} | {n for n in left if n.startswith("model.layers.0.")}
    assert len(quantised(model)) == 6
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.quantization_config.modules_to_not_convert == config.modules_to_not_convert
    assert torch.equal(logits(again), logits(model))


def test_models_that_were_quantised_otherwise_are_saved_too(tmp_path):
    model = llama(tied=True)
    tilewright.quantize_(model, "w4g32", filter=lambda name, _: "up_proj" not in name)
    tilewright.quantize_(model, "w8")
    savable_(model).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.model.layers[0].mlp.up_proj.scheme == "w8" and again.lm_head.scheme == "w4g32"


@pytest.mark.parametrize("placed", ["cpu", {"": "cpu"}, "auto"])
def test_a_device_map_is_heeded(folder, placed):
    pytest.importorskip("accelerate")
    new = AutoModelForCausalLM.from_pretrained(
        folder / "float", device_map=placed, quantization_config=TilewrightConfig("w4g32")
    )
    old = AutoModelForCausalLM.from_pretrained(folder / "w4", device_map=placed)
    assert torch.equal(logits(new), logits(old)) and {p.device.type for p in old.state_dict().values()} == {"cpu"}


def test_bytes_are_counted_for_a_device_map_of_gpus(folder):
    """transformers asks every name of the state dict for a parameter or a buffer before it loads onto a GPU."""
    config = AutoConfig.from_pretrained(folder / "w4")
    quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        quantizer.preprocess_model(model, checkpoint_files=[str(folder / "w4/model.safetensors")])
    held = get_total_byte_count(model, dict.fromkeys(model.state_dict(), "cuda"), quantizer)["cuda"]
    read = load_file(folder / "w4/model.safetensors")
    assert held == sum(t.nbytes for n, t in read.items() if not (n.endswith(".weight") and t.dtype is torch.uint8))


def test_a_scheme_that_there_is_not():
    with pytest.raises(InputError, match=r"no scheme 'int4'\n  try: w4g32, w4g64"):
        TilewrightConfig("int4")
    with pytest.raises(InputError, match=r"a configuration with bits, group\n  try: TilewrightConfig"):
        TilewrightConfig("w4g64", bits=4, group=64)
    with pytest.raises(InputError, match=r"an argument of type int \(scheme\)"):
        TilewrightConfig(4)


def test_what_cannot_be_loaded(folder, tmp_path):
    new = {"quantization_config": TilewrightConfig("mixed")}
    with pytest.raises(InputError, match=r"the scheme 'mixed' says nothing of how to quantise"):
        LlamaForCausalLM.from_pretrained(folder / "float", **new)
    with pytest.raises(InputError, match=r"the model holds no tilewright\.Linear\n  try: tilewright\.quantize_"):
        savable_(llama())
    with pytest.raises(InputError, match="a model of transformers"):
        savable_(torch.nn.Linear(2, 2))
    disk = AutoHfQuantizer.from_config(TilewrightConfig("w8"), pre_quantized=False)
    with pytest.raises(InputError, match="quantised layers that stay on a disk"):
        disk.validate_environment(device_map={"": "disk"})


def broken(folder, path, change):
    """A copy of the folder with its tensors changed."""
    shutil.copytree(folder / "w4", path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_broken_folders_are_refused(folder, tmp_path):
    name = "model.layers.0.mlp.up_proj"

    def text(value):
        return torch.tensor(list(value.encode()), dtype=torch.uint8)

    cases = {
        r"a quantised layer without 'scales' \(model.layers.0.mlp.up_proj\)": lambda t: t.pop(f"{name}.scales"),
        "a quantised layer without 'weight'": lambda t: t.pop(f"{name}.weight"),
        "'s5 bits' is no meaning of a quantised layer's tensors": lambda t: t.update({f"{name}.weight": text("s5 bits")}),
    }
    for i, (message, change) in enumerate(cases.items()):
        with pytest.raises(InputError, match=message):
            LlamaForCausalLM.from_pretrained(broken(folder, tmp_path / str(i), change))
    half = {f"{name}.packed": torch.zeros(48, 32, dtype=torch.uint8), f"{name}.scales": torch.ones(48, 2)}
    with pytest.raises(TypeMismatchError, match=r"a weight of shape \[48, 64\] for a layer of \[96, 64\]"):
        LlamaForCausalLM.from_pretrained(broken(folder, tmp_path / "half", lambda t: t.update(half)))
    with pytest.raises(InputError, match=r"the files hold a quantised linear layer where the model has a Embedding"):
        other = {f"model.embed_tokens.{n}": torch.zeros(2, 2, dtype=torch.uint8) for n in ("packed", "scales")}
        LlamaForCausalLM.from_pretrained(broken(folder, tmp_path / "other", lambda t: t.update(other)))
    shutil.copytree(folder / "w4", tmp_path / "bin")
    (tmp_path / "bin/model.safetensors").unlink()
    torch.save({}, tmp_path / "bin/pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is no safetensors file"):
        LlamaForCausalLM.from_pretrained(tmp_path / "bin")


def test_without_our_method_a_folder_is_refused(folder, tmp_path):
    """Users who have not imported it are told that shapes differ, and get no model with weights drawn at random."""
    shutil.copytree(folder / "w4", tmp_path / "w4")
    path = tmp_path / "w4/config.json"
    said = json.loads(path.read_text())
    said["quantization_config"]["quant_method"] = "not-imported"
    path.write_text(json.dumps(said))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        LlamaForCausalLM.from_pretrained(tmp_path / "w4")


def test_without_transformers_the_sentence_says_what_to_install():
    program = """
import sys
sys.modules["transformers"] = None
try:
    import tilewright.integrations.transformers
except Exception as error:
    print(type(error).__name__, error)
"""
    done = warm.run(["-c", program], timeout=120)
    assert "InputError no transformers that quantised models work with" in done.stdout and "pip install" in done.stdout
