"""Programs for ranges on an emulated H200: few kernels for many shapes, and results that are right at odd lengths."""

from __future__ import annotations

import random

import pytest
import torch
from ptx import H200, How, emulating

from tilewright import compiler
from tilewright.candidates.triton.runtime import module
from tilewright.frontends import LoadOptions, load
from tilewright.ir.graph import Graph
from tilewright.schedule import bench

transformers = pytest.importorskip("transformers")
BATCH, LENGTH, SIZE = (1, 64), (1, 512), 64
ODD = [(1, 1), (1, 2), (1, 17), (1, 127), (2, 128), (1, 129)]


class _Logits(torch.nn.Module):
    """A transformer's first result."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        more = {"use_cache": False} if attention_mask is None else {"attention_mask": attention_mask}
        return self.model(input_ids=input_ids, **more)[0]


def _model(kind: str, layers: int, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": SIZE, "intermediate_size": 2 * SIZE, "num_hidden_layers": layers}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, attn_implementation="sdpa")
        return _Logits(transformers.LlamaForCausalLM(config).eval().to(dtype)).eval()
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=512)
    return _Logits(transformers.BertModel(config, add_pooling_layer=False).eval().to(dtype)).eval()


def _arguments(kind: str, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(batch * 1000 + length)
    ids = torch.randint(0, 100, (batch, length), generator=made)
    if kind == "llama":
        return (ids,)
    ends = torch.randint(1, length + 1, (batch, 1), generator=made)
    return ids, (torch.arange(length) < ends).to(torch.int64)


def _graph(model: torch.nn.Module, kind: str) -> Graph:
    """The model with batch and length open."""
    example = _arguments(kind, 2, 16)
    batch, length = (torch.export.Dim(n, min=low, max=high) for n, (low, high) in (("batch", BATCH), ("length", LENGTH)))
    with torch.no_grad():
        exported = torch.export.export(model, example, dynamic_shapes=tuple({0: batch, 1: length} for _ in example))
    return load(exported, LoadOptions(dims=True))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kernels that Triton compiles in this test. Nothing but the results of calls is compared: kernels pass each check."""
    built: list[object] = []
    real = module.compiled

    def compiled(*args: object, **options: object) -> object:
        built.append(args)
        return real(*args, **options)

    module._machine_code.cache_clear()
    monkeypatch.setattr(module, "compiled", compiled)
    monkeypatch.setattr(compiler, "detect", lambda *_, **__: H200)
    monkeypatch.setattr(bench.Bench, "verify", lambda *_: None)
    monkeypatch.setattr(bench.Bench, "expect", lambda *_: None)
    return built


# With the most kernels that the first shape may build, and all 26 others together.
@pytest.mark.thin(3)
@pytest.mark.parametrize(("kind", "dtype", "first", "others"), [
    ("llama", torch.bfloat16, 8, 8), ("bert", torch.bfloat16, 8, 10), ("bert", torch.float32, 8, 14),
])  # fmt: skip
def test_a_new_shape_builds_kernels_where_it_begins_a_regime_alone(kind, dtype, first, others, builds):
    graph, rng = _graph(_model(kind, 2, dtype), kind), random.Random(1)
    shapes = [*ODD, *((rng.randint(1, 8), rng.randint(1, 256)) for _ in range(20))]
    with emulating(How()):
        program = compiler.compile(graph, dims=True, budget_s=0, device="cuda", cache=False)
        assert 0 < len(builds) <= first
        before = len(builds)
        for batch, length in shapes:
            program.at(**dict(zip(program.dims, (batch, length), strict=True)))
        assert len(builds) - before <= others
        settled = len(builds)
        for batch, length in [(3, 93), (1, 101), (7, 201), (5, 77)]:
            made = program.at(**dict(zip(program.dims, (batch, length), strict=True)))
            assert any(s.decision is not None and s.decision.kernel.registers for s in made.steps)
        assert len(builds) == settled
    assert program.compiled == 1


@pytest.mark.conformance
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_results_are_right_at_odd_lengths(kind, builds):
    model = _model(kind, 1, torch.bfloat16)
    graph = _graph(model, kind)
    with emulating(How()):
        program = compiler.compile(graph, dims=True, budget_s=0, device="cuda", cache=False)
        for batch, length in [(1, 1), (2, 17), (1, 129)]:
            given = _arguments(kind, batch, length)
            found = program(*given)
            with torch.no_grad():
                wanted = model(*given).float()
            assert isinstance(found, torch.Tensor)
            assert (found.float() - wanted).abs().max() <= 0.03 * wanted.abs().max()
