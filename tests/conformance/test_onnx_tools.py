"""Tiny transformers as onnxruntime's tools write them: none refused that onnxruntime runs, none with another result.

An onnxruntime session that saves a quantised model fuses its operators into ones that look results up in tables, a code off
here and there; such a file is also compared with onnxruntime's result of the file it was made from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import ort_tool_files as files
import pytest
from onnx_models import ours, read, theirs

import tilewright
from tilewright.compiler import optimise
from tilewright.errors import UnsupportedError

pytestmark = pytest.mark.conformance

CLOSE = 5e-3  # relative, Frobenius; f16
# onnxruntime adds quantised tensors with scales folded beforehand: two sums in 2,000 on a tie are the next code, and a norm
# behind them makes more of it.
CLOSE_CODES = 2e-2
COMPILED = ("f32", "f16-io32", "dynamic-s8", "qdq-u8s8", "qoperator-u8s8", "w4", "w4-level4", "fused", "fused-heads")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tools")


def written(model: str, variant: str, folder: Path) -> str:
    try:
        return str(files.write(model, variant, folder))
    except Exception as error:  # whatever the tools raise
        pytest.skip(f"the tool cannot write it: {type(error).__name__}")


def fed(path: str, model: str) -> files.Feeds:
    """The model's inputs, those that the file has, in its types."""
    kinds = {i.name: i.type.tensor_type.elem_type for i in onnx.load(path).graph.input}
    half = onnx.TensorProto.FLOAT16
    given = files.feeds(model)
    return {k: v.astype(np.float16) if kinds[k] == half else v for k, v in given.items() if k in kinds}


def apart(got: np.ndarray, wanted: np.ndarray) -> float:
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def expected(path: str, feeds: files.Feeds) -> np.ndarray:
    try:
        return theirs(path, feeds)[0]
    except Exception as error:  # whatever onnxruntime raises
        pytest.skip(f"onnxruntime cannot run it: {type(error).__name__}")


@pytest.mark.parametrize("variant", files.VARIANTS)
@pytest.mark.parametrize("model", files.MODELS)
def test_read_and_right(model, variant, folder):
    path = written(model, variant, folder)
    feeds = fed(path, model)
    wanted = expected(path, feeds)
    try:
        graph = optimise(read(path))
    except UnsupportedError as error:
        if "com.microsoft.nchwc" in str(error) and variant.endswith("-all"):
            pytest.skip("convolutions laid out for the machine that wrote the file")
        raise
    got = ours(graph, feeds)[0]
    error = apart(got, wanted)
    if error > CLOSE and variant.startswith(("qdq", "qoperator")) and variant.endswith(("-extended", "-all")):
        error = apart(got, expected(written(model, variant.rpartition("-")[0], folder), feeds))
    assert error <= (CLOSE_CODES if variant.startswith("qoperator") else CLOSE)


@pytest.mark.parametrize("variant", COMPILED)
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_compiled_and_right(model, variant, folder):
    path = written(model, variant, folder)
    feeds = fed(path, model)
    program = tilewright.compile(path, budget_s=0, cache=False)
    got = program(*(feeds[name] for name in program.input_types))
    assert apart(np.asarray(got), expected(path, feeds)) <= CLOSE_CODES
