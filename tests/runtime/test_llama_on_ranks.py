"""A tiny Llama of transformers, placed by its own `tp_plan`, on ranks over gloo: eager's logits, and `generate`'s tokens."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
import torch
from ranks import job

NEW, LONGEST, HEADS = 12, 32, 4
PROMPT = [3, 14, 15, 9]


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=HEADS)).eval().requires_grad_(False)


class Logits(torch.nn.Module):
    """The model without a cache, with its plan."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.model, self.tp_plan = of, {f"model.{name}": style for name, style in of.tp_plan.items()}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def generating(rank: int) -> object:
    """The largest distance of logits from eager's; whether `generate` gives its tokens, and a loop with a cache does, of which
    each rank holds its heads; what is in this rank's cache, and how many all-reduces there are."""
    from transformers import GenerationConfig
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache
    from transformers.modeling_outputs import CausalLMOutput

    import tilewright

    mesh, eager, whole = f"tp={os.environ['WORLD_SIZE']}", model(), len(PROMPT) + NEW
    ask = {"max_new_tokens": NEW, "do_sample": False}
    wanted = eager.generate(torch.tensor([PROMPT]), **ask)[0].tolist()
    ids = torch.randint(0, 64, (1, whole), generator=torch.Generator().manual_seed(1))
    program: Any = tilewright.compile(Logits(model()).eval(), mesh=mesh, plan="auto", example_inputs=(ids,), budget_s=0)
    off = float((program(ids) - eager(ids).logits).abs().max())

    def forward(input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        count = input_ids.shape[1]  # what stands behind them changes no logits
        padded = torch.nn.functional.pad(input_ids, (0, whole - count))
        return CausalLMOutput(logits=cast("Any", program(padded)[:, :count]))

    theirs = model()
    theirs.forward = forward
    generated = theirs.generate(torch.tensor([PROMPT]), use_cache=False, **ask)[0].tolist()

    cached = model()
    cached.generation_config = GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        max_length=LONGEST,
        cache_config={"batch_size": 1, "max_cache_len": LONGEST, "device": "cpu"},
    )
    exportable: Any = TorchExportableModuleWithStaticCache(cached)
    exportable.tp_plan = {f"model.{name}": style for name, style in cached.tp_plan.items()}
    example = {"input_ids": torch.tensor([[5]]), "cache_position": torch.tensor([0])}
    step: Any = tilewright.compile(exportable, mesh=mesh, plan="auto", example_inputs=example, budget_s=0)
    tokens = [*PROMPT]
    for i in range(whole - 1):
        logits = step(input_ids=torch.tensor([[tokens[i]]]), cache_position=torch.tensor([i]))
        tokens += [int(logits[0, -1].argmax())] if i >= len(PROMPT) - 1 else []
    held = sorted({tuple(t.shape) for name, t in step.state.items() if "cache" in name})
    sums = [t.operation for t in program.explain().facts.traffic if t.operation.startswith("all_reduce")]
    return [off, generated == wanted, tokens == wanted, held, len(sums)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.conformance)])
def test_a_llama_by_its_own_plan_generates_eagers_tokens(count):
    for off, generated, cached, held, sums in cast("list[Any]", job(generating, count).answers()):
        assert off < 1e-5
        assert generated and cached
        assert held == [[1, HEADS // count, LONGEST, 4]]
        assert sums == 4  # two for each layer
