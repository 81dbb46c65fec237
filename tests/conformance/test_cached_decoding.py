"""Cached decoding of transformers: its own export modules and caches, against the greedy tokens of eager's `generate`."""

import pytest
import torch
import transformers
from tiny_decoder import DECODER
from transformers import DynamicCache, GenerationConfig
from transformers.integrations import executorch

import tilewright

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore")]

MODELS = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 8},
    "Mistral": {"sliding_window": 8},
}
NEW, LONGEST = 12, 32


def made(name, scheme=None):
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(**DECODER, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    if scheme is not None:
        tilewright.quantize_(model, scheme)
    prompt = torch.randint(3, 128, (1, 7))
    return model, prompt, model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0].tolist()


def with_static_cache(model):
    model.generation_config = GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        max_length=LONGEST,
        cache_config={"batch_size": 1, "max_cache_len": LONGEST, "device": "cpu"},
    )
    return model


def decoded(program, prompt):
    """Greedy tokens of a program of one token and its position, which keeps the cache."""
    tokens = prompt[0].tolist()
    for i in range(prompt.shape[1] + NEW - 1):
        logits = program(input_ids=torch.tensor([[tokens[i]]]), cache_position=torch.tensor([i]))
        if i >= prompt.shape[1] - 1:
            tokens.append(int(logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("scheme", [None, "w4g64"])
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_decoder_gives_eagers_tokens(name, scheme):
    """`TorchExportableModuleForDecoderOnlyLM`, which holds a static cache, or one of several kinds of layers."""
    model, prompt, wanted = made(name, scheme)
    exportable = executorch.TorchExportableModuleForDecoderOnlyLM(with_static_cache(model))
    exported = exportable.export(input_ids=torch.tensor([[5]]), cache_position=torch.tensor([0]))
    program = tilewright.compile(exported, budget_s=0)
    assert len(program.state) == 6 and any(s.part.kind == "gemm" for s in program.steps)
    assert decoded(program, prompt) == wanted
    assert decoded(program, prompt) == wanted  # from position 0 again, over what the cache holds now


@pytest.mark.parametrize("scheme", [None, "w4g64"])
def test_a_module_with_a_static_cache_gives_eagers_tokens(scheme):
    model, prompt, wanted = made("Llama", scheme)
    module = executorch.TorchExportableModuleWithStaticCache(with_static_cache(model))
    example = {"input_ids": torch.tensor([[5]]), "cache_position": torch.tensor([0])}
    assert decoded(tilewright.compile(module, example_inputs=example, budget_s=0), prompt) == wanted


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_of_any_length(name):
    model, _, _ = made(name)
    exportable = executorch.TorchExportableModuleForDecoderOnlyLM(with_static_cache(model))
    length = torch.export.Dim("length", min=2, max=LONGEST - 1)
    exported = exportable.export(
        input_ids=torch.tensor([[5, 6, 7]]),
        cache_position=torch.arange(3),
        dynamic_shapes={"input_ids": {1: length}, "cache_position": {0: length}},
    )
    program = tilewright.compile(exported, dims=True, budget_s=0)
    first = program.made  # the instance in the middle of the range
    for n in (7, 2, 13):
        ids = torch.randint(3, 128, (1, n))
        got = program(input_ids=ids, cache_position=torch.arange(n))
        torch.testing.assert_close(got, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert program.compiled == 1 and program.made == first + 3


@pytest.mark.parametrize("scheme", [None, "w4g64"])
def test_a_growing_cache_is_taken_and_given_back(scheme):
    """A `DynamicCache` among the inputs: what it holds are inputs and results by name."""
    model, prompt, wanted = made("Llama", scheme)
    cache = DynamicCache(config=model.config)
    model(prompt, past_key_values=cache)
    token, length = torch.tensor([wanted[prompt.shape[1] :][:1]]), prompt.shape[1]
    held = {"key": [layer.keys for layer in cache.layers], "value": [layer.values for layer in cache.layers]}
    given = {f"past_key_values_{kind}_cache_{i}": t.clone() for kind, ts in held.items() for i, t in enumerate(ts)}
    example = {"input_ids": token, "past_key_values": cache, "use_cache": True}
    program = tilewright.compile(model, example_inputs=example, budget_s=0)
    logits, *grown = program(input_ids=token, **given)
    assert int(logits[0, -1].argmax()) == wanted[length + 1]
    assert all(t.shape == (1, 2, length + 1, 16) for t in grown) and len(grown) == 4
    for before, after in zip(given.values(), grown, strict=True):
        assert torch.equal(after[:, :, :length], before)
