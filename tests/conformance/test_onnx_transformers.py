"""BERT-base and DistilGPT2 at their real size, as exported, against onnxruntime: f32, int8 tensor by tensor, and memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from onnx_models import native, ours, read, theirs
from transformer_exports import exported, feeds, quantised_agreement

pytestmark = pytest.mark.conformance

SIZES = {"bert": {}, "gpt2": {"n_layer": 6}}
EXPORTS = {
    "bert-20": {"opset": 20},
    "bert-23": {"opset": 23},
    "gpt2-20": {"opset": 20},
    "gpt2-23": {"opset": 23},
    "gpt2-20-dynamic": {"opset": 20, "dynamic": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


def path_of(folder: Path, name: str) -> str:
    config = SIZES[name.split("-", 1)[0]]
    return exported(folder, name, dynamo=True, config=config, shape=(2, 16), external=True, **EXPORTS[name])


@pytest.mark.parametrize("name", EXPORTS)
def test_agrees_with_onnxruntime(name, folder):
    path = path_of(folder, name)
    x = feeds(2, 16, 1000)
    graph = read(path, input_dims={k: v.shape for k, v in x.items()})
    assert native(graph), graph.notes
    np.testing.assert_allclose(ours(graph, x)[0], theirs(path, x)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["bert-20", "gpt2-20"])
def test_int8_tensor_by_tensor(name, folder):
    agreement = quantised_agreement(path_of(folder, name), folder, feeds(2, 16, 1000))
    assert len(agreement) > 40
    assert agreement[0] == (1.0, 0)
    assert all(worst <= 1 for _, worst in agreement)
    assert min(same for same, _ in agreement) > 0.99


def test_loading_bert_adds_no_copy_of_its_weights(folder):
    path = path_of(folder, "bert-20")
    program = f"""
        from pathlib import Path
        import tilewright.frontends.onnx as frontend, onnx
        frontend._require_onnx()
        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        before = resident()
        graph = frontend.load({path!r})
        print(resident() - before, sum(n.type.size_bytes for n in graph.nodes() if n.op.name == "const"))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    grown, weights = (int(word) for word in done.stdout.split())
    assert weights > 400e6
    assert grown < 40e6
