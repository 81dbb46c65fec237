"""Models of transformers through `torch.compile(backend="tilewright")`: random shapes, training, generating; against eager."""

import copy
import gc
from pathlib import Path

import pytest
import torch
import transformers
from tiny_decoder import DECODER
from torch._dynamo.utils import counters
from transformers import CompileConfig

import tilewright
from tilewright import dynamo
from tilewright.schedule import cache as schedule_cache

pytestmark = pytest.mark.conformance

NOW = {"budget_s": 0, "met": 1}
ENCODER = {k: v for k, v in DECODER.items() if k in ("hidden_size", "intermediate_size", "num_hidden_layers")}
WHISPER = {
    "vocab_size": 128,
    "d_model": 64,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **{
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    },
}


def ids(batch, length):
    return torch.randint(3, 128, (batch, length))


def decoded(batch, length):
    return {"input_ids": ids(batch, length), "use_cache": False}


def both(batch, length):
    return {"input_ids": ids(batch, length), "decoder_input_ids": ids(batch, 2 + length // 2), "use_cache": False}


MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, decoded),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}, decoded),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 16, "sliding_window": 8}, decoded),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 8}, decoded),
    "bert": (
        "BertModel",
        "BertConfig",
        {**ENCODER, "vocab_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64},
        lambda batch, length: {"input_ids": ids(batch, length)},
    ),
    "vit": (
        "ViTModel",
        "ViTConfig",
        {**ENCODER, "num_attention_heads": 4, "image_size": 16, "patch_size": 4},
        lambda batch, _: {"pixel_values": torch.randn(batch, 3, 16, 16)},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 128,
            "d_model": 64,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "d_kv": 16,
            "decoder_start_token_id": 0,
        },
        both,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        lambda batch, length: {
            "input_features": torch.randn(batch, 16, 64),
            "decoder_input_ids": ids(batch, length),
            "use_cache": False,
        },
    ),
}


LAYERS = {"intermediate_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**LAYERS, "vocab_size": 128, "max_position_embeddings": 66, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def padded(batch, length):
    mask = torch.arange(length) < torch.randint(1 + length // 2, length + 1, (batch, 1))
    return {"input_ids": ids(batch, length), "attention_mask": mask.long()}


def pictures(batch, length):
    tokens = torch.cat([ids(batch, length - 1), torch.full((batch, 1), 2)], 1)
    return {"input_ids": tokens, "pixel_values": torch.randn(batch, 3, 16, 16)}


# Those that nobody asked for: other kinds of positions, of attention, of norms, and two towers.
MODELS |= {
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT, decoded),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, decoded),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 16, "sliding_window": 8}, decoded),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER, decoded),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT, padded),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 128, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        padded,
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": {**LAYERS, "image_size": 16, "patch_size": 4}, "projection_dim": 32},
        pictures,
    ),
}


@pytest.fixture(scope="module")
def decisions(tmp_path_factory):
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(autouse=True)
def decided_once(monkeypatch, decisions: Path, no_memory_of_other_tests):
    dynamo.register()
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(decisions))
    monkeypatch.setattr("tilewright.compiler.user_cache", schedule_cache.user_cache)
    torch._dynamo.reset()
    counters.clear()
    gc.collect()  # `graphs()` are those of one test
    torch.manual_seed(0)


def made(name):
    model, config, sizes, inputs = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval(), inputs


@pytest.mark.parametrize("name", MODELS)
def test_twenty_random_shapes(name):
    model, inputs = made(name)
    f = torch.compile(model, backend="tilewright", dynamic=True, options=NOW)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(20):
            batch, length = (int(torch.randint(2, most, (), generator=draw)) for most in (6, 24))
            given = inputs(batch, length)
            wanted, got = model(**given), f(**given)
            for key in ("logits", "last_hidden_state", "pooler_output", "logits_per_text"):
                if wanted.get(key) is not None:
                    torch.testing.assert_close(got[key], wanted[key], rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] <= 3
    assert sum(g.compiled for g in dynamo.graphs()) <= 3
    latest = dynamo.graphs()[-1]
    assert latest.why is None and any(s.part.kind == "gemm" for s in latest.programs[0].steps)


def test_three_steps_of_an_optimiser():
    model, _ = made("llama")
    other = copy.deepcopy(model)
    f = torch.compile(other, backend="tilewright", dynamic=True, options=NOW)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for length in (9, 16, 12):
        tokens = ids(2, length)
        for m in (model, f):
            m(tokens, labels=tokens).loss.backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()


@pytest.mark.parametrize(
    ("name", "scheme"), [("llama", None), ("llama", "w4g64"), ("qwen3", None), ("gemma3", None), ("mistral", None)]
)
def test_generates_eagers_tokens(name, scheme):
    model, _ = made(name)
    if scheme is not None:
        tilewright.quantize_(model, scheme)
    config = CompileConfig(backend="tilewright", mode=None, options={"budget_s": 0})
    config._compile_all_devices = True  # on a CPU, too
    for length in (7, 7, 12):
        prompt = ids(2, length)
        wanted = model.generate(prompt, max_new_tokens=12, do_sample=False)
        got = model.generate(prompt, max_new_tokens=12, do_sample=False, cache_implementation="static", compile_config=config)
        assert torch.equal(got, wanted)
    assert any(len(p.state) for g in dynamo.graphs() for p in g.programs)


@pytest.mark.parametrize("scheme", [None, "w4g64"])
def test_generates_with_a_growing_cache(scheme):
    """A `DynamicCache`: each token meets other lengths, for which nothing is read anew."""
    model, _ = made("llama")
    if scheme is not None:
        tilewright.quantize_(model, scheme)
    f = copy.copy(model)
    f.forward = torch.compile(model.forward, backend="tilewright", dynamic=True, options=NOW)
    for length in (7, 5):
        prompt = ids(2, length)
        wanted, got = (m.generate(prompt, max_new_tokens=8, do_sample=False) for m in (model, f))
        assert torch.equal(got, wanted)
    assert all(g.why is None and g.concrete is None for g in dynamo.graphs())
    assert sum(g.compiled for g in dynamo.graphs()) <= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_as_near_to_f32_as_eagers(dtype):
    model, inputs = made("llama")
    half = copy.deepcopy(model).to(dtype)
    f = torch.compile(half, backend="tilewright", dynamic=True, options=NOW)
    with torch.no_grad():
        for batch, length in ((2, 9), (3, 17), (5, 4)):
            given = inputs(batch, length)
            wanted, eager, got = (m(**given).logits for m in (model, half, f))
            assert got.dtype == dtype
            ours, theirs = ((x.float() - wanted).abs().max() for x in (got, eager))
            assert ours <= 1.5 * theirs
    assert sum(g.compiled for g in dynamo.graphs()) == 1
