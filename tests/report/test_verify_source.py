"""`verify --source`: what a front end misreads is seen by the source's own library."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import tilewright.cli.verbs as cli
from tilewright.cli.given import Given
from tilewright.ir.build import map_

HLO = """HloModule m
ENTRY main {
  x = f32[8,16] parameter(0)
  w = f32[16,4] parameter(1)
  ROOT dot = f32[8,4] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "m.hlo").write_text(HLO)
    (tmp_path / "bare.hlo").write_text(HLO.split("\n", 1)[1])  # no HloModule line, which XLA's own parser wants
    w = helper.make_tensor("w", TensorProto.FLOAT, [16, 4], np.linspace(-1, 1, 64))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [8, 16]), ("y", [8, 4])))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "m", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    return tmp_path


def verify(path, *flags):
    return CliRunner().invoke(cli.cli, ["verify", str(path), "--source", "--budget=0", "--no-cache", *flags])


@pytest.mark.thin(2)
@pytest.mark.parametrize(("file", "library"), [("m.onnx", "onnxruntime"), ("m.hlo", "xla"), ("bare.hlo", "xla")])
def test_the_sources_own_library_agrees(files, file, library):
    result = verify(files / file, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["verified"], result.output
    assert report["source"] == f"the source's own library, {library}, ran the program, too"
    assert report["end_to_end"][-1]["name"] == f"the whole program by {library}"
    assert 0 <= report["end_to_end"][-1]["error"] < 1e-6 and len(report["end_to_end"]) == 2


def test_a_misread_program_is_seen(files, monkeypatch):
    """The oracle agrees with a front end that negates every result; onnxruntime does not."""
    real = Given.load

    def misread(given):
        graph = real(given)
        return replace(graph, outputs=tuple(map_("negate", n) for n in graph.outputs))

    monkeypatch.setattr(Given, "load", misread)
    result = verify(files / "m.onnx")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 1 and "the whole program by onnxruntime" in words and "32 of 32 numbers differ" in words


def test_a_model_that_is_quantised_here_has_no_such_library(files):
    result = verify(files / "m.onnx", "--int8")
    assert result.exit_code != 0 and "--source compares the program as it is written" in str(result.exception) + result.output
