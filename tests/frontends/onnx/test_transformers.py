"""Small BERT and GPT-2 models, as exporters write them, against onnxruntime: in f32 and quantised to int8."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from onnx_models import native, ours, read, theirs
from transformer_exports import exported, feeds, quantised_agreement

EXPORTS = {
    "bert-20": {"dynamo": True, "opset": 20},
    "bert-23": {"dynamo": True, "opset": 23},
    "gpt2-20": {"dynamo": True, "opset": 20},
    "gpt2-23": {"dynamo": True, "opset": 23},
    "bert-17-torchscript": {"dynamo": False, "opset": 17, "attention": "eager", "dynamic": True},
    "gpt2-13-torchscript": {"dynamo": False, "opset": 13, "attention": "eager", "dynamic": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", EXPORTS)
def test_agrees_with_onnxruntime_without_a_call(name, folder):
    path = exported(folder, name, **EXPORTS[name])
    for batch, length in [(2, 7), (1, 1), (3, 5)] if "dynamic" in EXPORTS[name] else [(2, 7)]:
        x = feeds(batch, length)
        graph = read(path, input_dims={k: v.shape for k, v in x.items()} if "dynamic" in EXPORTS[name] else {})
        assert native(graph), graph.notes
        np.testing.assert_allclose(ours(graph, x)[0], theirs(path, x)[0], rtol=1e-4, atol=1e-5)


def test_attention_and_gelu_are_read_as_what_they_are(folder):
    ops = Counter(n.op.name for n in read(exported(folder, "bert-23", **EXPORTS["bert-23"])).nodes())
    assert ops["attention"] == 2
    assert ops["gemm"] == 2 * 6  # q, k, v, output, two of the feed-forward; the products inside attention are its own
    assert ops["layer_norm"] == 5
    ops = Counter(n.op.name for n in read(exported(folder, "bert-20", **EXPORTS["bert-20"])).nodes())
    assert ops["attention"] == 0
    assert ops["softmax"] == 2
    assert ops["gemm"] == 2 * 8


@pytest.mark.parametrize("name", ["bert-20", "gpt2-20"])
def test_int8_tensor_by_tensor(name, folder):
    agreement = quantised_agreement(exported(folder, name, **EXPORTS[name]), folder, feeds(2, 7))
    assert len(agreement) > 20
    assert agreement[0] == (1.0, 0)
    assert all(worst <= 1 for _, worst in agreement)
    assert min(same for same, _ in agreement) > 0.99
