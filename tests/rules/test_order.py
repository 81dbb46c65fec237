"""The rules of a stage in any order give one graph, for the examples: HLO, linear layers, and whole small models."""

import functools

import pytest
import torch
from paths import EXAMPLES
from rule_checks import assert_no_growth, gemms, kinds, results, staged

import models
from nvfuser_linear import EPILOGUES, Linear
from tilewright.frontends import LoadOptions, load
from tilewright.ir.ops import Attention
from tilewright.rules.calibrate import calibrate, quantize, scheme
from tilewright.runtime.partition import partition

CONFIG = {
    "bert": {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    "distilgpt2": {"vocab_size": 97, "n_embd": 32, "n_head": 4},
}


def one_graph(before, orders=3):
    after = staged(before)
    for seed in range(orders):
        assert staged(before, shuffle=seed).outputs == after.outputs, f"order {seed} gives another graph"
    return after


def tokens(graph):
    """Ids that every vocabulary has, and a mask that hides the end of the second sequence."""
    drawn = {n.op.label: torch.arange(16).reshape(n.shape).to(n.dtype.to_torch()) for n in graph.inputs}
    return drawn | {"attention_mask": (torch.arange(8) < torch.tensor([[8], [5]])).to(drawn["attention_mask"].dtype)}


def test_both_hlo_modules_are_one_graph_in_every_order():
    narrow, wide = (load(EXAMPLES / f"xla_7117_{name}.hlo", LoadOptions()) for name in ("s8", "s32_convert"))
    first, second = one_graph(narrow, 8), one_graph(wide, 8)
    (a,), (b,) = gemms(first), gemms(second)
    assert a.op == b.op and [s.tensor for s in a.src] == [s.tensor for s in b.src]


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ["TT", "NN"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_linear_layers(epilogue, layout):
    module = Linear(epilogue, torch.bfloat16, layout, 8, 12, 0)
    x = torch.randn((6, 12) if layout[0] == "T" else (12, 6), dtype=torch.bfloat16)
    before = load(module, LoadOptions(example_inputs=(x,)))
    after = one_graph(before, 4)
    assert kinds(after) == ["gemm"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """A model of two layers, read; each variant written once."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def read(name: str, variant: str):
        return load(
            models.write_model(name, variant, folder, batch=2, sequence=8, layers=2, config=CONFIG[name]), LoadOptions()
        )

    return read


@pytest.mark.thin(2)
@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize("name", CONFIG)
def test_small_models(written, name, variant):
    before = written(name, variant)
    after = one_graph(before)
    assert sum(isinstance(n.op, Attention) for n in after.nodes()) == 2
    assert_no_growth(before, after, bytes_too=False)
    if variant == "f32":
        (a,), (b,) = (results(g, tokens(before)) for g in (before, after))
        assert (a - b).abs().max() <= 1e-4 * a.abs().max()
    else:
        assert not [p for p in partition(after) if p.unfused]


@pytest.mark.parametrize("to", ["int8", "fp8", "w4"])
@pytest.mark.parametrize("name", CONFIG)
def test_small_models_quantised_here(written, name, to):
    graph = written(name, "f32")
    coded, _ = quantize(graph, scheme(to, group=16), calibrate(graph, [tokens(graph)]))
    after = one_graph(coded)
    assert not [p for p in partition(after) if p.unfused]
