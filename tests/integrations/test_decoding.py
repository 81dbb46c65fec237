"""`decode` in `generate`: tokens are those of transformers' own loop, whichever loop it takes."""

from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from transformers import (
    CompileConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteriaList,
    set_seed,
)
from transformers.cache_utils import StaticLayer

import tilewright
import tilewright.dynamo
from tilewright.integrations import _decoding
from tilewright.integrations.transformers import decode

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
PROMPTS = torch.randint(3, 96, (3, 7), generator=torch.Generator().manual_seed(0))


def model_of(kind="llama"):
    set_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=256))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=1)
    return model.eval()


MODEL = model_of()


@pytest.fixture
def own_loop(monkeypatch):
    """Count how often the loop here did the work."""
    done, inner = [], _decoding._decoded
    monkeypatch.setattr(_decoding, "_decoded", lambda *given: done.append(1) or inner(*given))
    return done


def generated(model, prompts=PROMPTS, *, by=decode, **given):
    config = CompileConfig(backend="tilewright", options={"budget_s": 0, "background": False})
    given = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"} | given
    return model.generate(prompts, compile_config=config, custom_generate=by, **given)


def expected(model, prompts=PROMPTS, **given):
    return model.generate(prompts, **({"max_new_tokens": 12, "do_sample": False} | given))


@pytest.mark.parametrize(("kind", "batch"), [("llama", 1), ("gpt2", 3)])
def test_tokens_are_those_of_the_loop_of_transformers(kind, batch, own_loop):
    model = model_of(kind)
    assert torch.equal(generated(model, PROMPTS[:batch]), expected(model, PROMPTS[:batch])) and own_loop


def test_a_cache_serves_the_next_sequence_of_its_sizes(own_loop, monkeypatch):
    model, seen, kept = model_of(), [], _decoding._caches
    step = _decoding._step
    monkeypatch.setattr(_decoding, "_compiled", lambda *_: lambda *given: seen.append(given[1]) or step(*given))
    for prompts in (PROMPTS[:1], PROMPTS[1:2], PROMPTS[2:]):
        assert torch.equal(generated(model, prompts), expected(model, prompts))
    assert len({id(cache) for cache in seen}) == 1 and seen[0] in kept[model].values()
    assert torch.equal(generated(model, max_new_tokens=20), expected(model, max_new_tokens=20)) and seen[-1] is not seen[0]
    monkeypatch.setattr(_decoding, "KEPT_BYTES", 1000)
    assert torch.equal(generated(model, max_new_tokens=30), expected(model, max_new_tokens=30))
    assert seen[-1] not in kept[model].values() and len(kept[model]) == 2


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_cache_that_was_made_in_another_mode_is_left_alone(mode, own_loop):
    model = model_of("gpt2")  # whose keys and values are of one type under autocast
    with mode():
        generated(model)
    assert torch.equal(generated(model), expected(model)) and len(own_loop) == 2


def test_a_cache_is_not_kept_where_others_would_have_to_wait_for_it_or_empty_more(monkeypatch):
    """Another stream, another placing, and layers that keep more than keys and values."""

    class More(StaticLayer):
        pass

    def kept(cache):
        _decoding._keep(model, cache, 3)
        return _decoding._caches.get(model, {}).values()

    model, streams = model_of(), [1, 2]
    cache, more = (StaticCache(config=model.config, max_cache_len=8) for _ in range(2))
    more.layers = [More(8)]
    assert not kept(more) and cache in kept(cache)
    model.hf_device_map = {"": 0}
    assert _decoding._cache(model, more, 3) is more
    del model.hf_device_map
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=streams[0]))
    monkeypatch.setattr(type(model), "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    other = StaticCache(config=model.config, max_cache_len=8)
    assert cache in kept(cache) and _decoding._cache(model, other, 3) is cache
    assert cache in kept(cache)
    streams.pop(0)
    assert _decoding._cache(model, other, 3) is other


def test_sequences_end_where_they_end_and_are_padded(own_loop):
    """Each at another token, all of them, none, at the first one; also where there are more than a step was compiled for."""
    whole, made = expected(MODEL), len(tilewright.dynamo.graphs())
    at = [whole[0, 9].item(), whole[1, 12].item(), whole[2, 8].item()]
    assert torch.equal(generated(MODEL), whole)
    graphs = len(tilewright.dynamo.graphs())
    for ends in (at, at[:1], whole[0, 7].item(), whole[:, 7].tolist(), [95] * 3):
        assert torch.equal(generated(MODEL, eos_token_id=ends), expected(MODEL, eos_token_id=ends))
    assert len(tilewright.dynamo.graphs()) == graphs <= made + 1
    many = [*range(80, 96), at[0]]
    assert torch.equal(generated(MODEL, eos_token_id=many), expected(MODEL, eos_token_id=many))
    assert len(own_loop) == 7


@pytest.mark.parametrize("count", [1, 2])
def test_few_tokens(count, own_loop):
    assert torch.equal(generated(MODEL, max_new_tokens=count), expected(MODEL, max_new_tokens=count)) and own_loop


def test_a_quantised_model_decodes(own_loop):
    model = model_of()
    tilewright.quantize_(model, "w8")
    assert torch.equal(generated(model), expected(model)) and own_loop


@torch._dynamo.config.patch(recompile_limit=2)  # pytest's monkeypatch leaves it deleted
def test_more_lengths_than_dynamo_compiles_one_function_for():
    made, model = len(tilewright.dynamo.graphs()), model_of()
    for count in range(3, 7):
        length = {"max_new_tokens": count}
        assert torch.equal(generated(model, PROMPTS[:1], **length), expected(model, PROMPTS[:1], **length))
    assert len(tilewright.dynamo.graphs()) >= made + 3


def test_looks_that_come_late_change_no_token(monkeypatch):
    """A GPU has it so: it hears so many tokens late that all are over."""

    class Late:
        def __init__(self, device):
            self.heard = []

        def __call__(self, over):
            self.heard.append(bool(over.all()))
            return self.heard[-5] if len(self.heard) >= 5 else False

    monkeypatch.setattr(_decoding, "_Look", Late)
    ends = expected(MODEL)[:, 9].tolist()
    assert torch.equal(generated(MODEL, eos_token_id=ends), expected(MODEL, eos_token_id=ends))


TWICE = StoppingCriteriaList([MaxLengthCriteria(15), MaxLengthCriteria(12)])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"do_sample": True}, "it is no greedy search"),
        ({"num_beams": 3, "num_return_sequences": 2}, "it is no greedy search"),
        (
            {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(15), MaxLengthCriteria(12)])},
            "there is no prompt, or several ends of one kind",
        ),
        ({"repetition_penalty": 1.5}, "it asks RepetitionPenaltyLogitsProcessor about each token"),
        ({"max_time": 100.0}, "it asks MaxTimeCriteria about each token"),
        ({"return_dict_in_generate": True}, "somebody follows each token"),
        ({"cache_implementation": None}, 'the cache is not one that generate made with cache_implementation="static"'),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]] + [[1] * 7] * 2)}, "the prompt is padded"),
        ({"past_key_values": "own", "cache_implementation": None}, "the cache is not one that generate made"),
    ],
)
def test_what_it_does_not_know_the_loop_of_transformers_does(given, why, own_loop, monkeypatch):
    def run(by):
        set_seed(1)
        own = {"past_key_values": StaticCache(config=MODEL.config, max_cache_len=32)} if "past_key_values" in given else {}
        found = generated(MODEL, by=by, disable_compile=True, **(given | own))
        return found if isinstance(found, torch.Tensor) else found.sequences

    said = []
    monkeypatch.setattr(_decoding, "say", said.append)
    found = run(decode)
    assert said[0].startswith(f"decode leaves LlamaForCausalLM to the loop of transformers: {why}")
    assert torch.equal(found, run(None)) and not own_loop
