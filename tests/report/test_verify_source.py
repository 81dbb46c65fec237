"""`verify --source`: what a front end misreads is seen by the source's own library."""

import io
import json
from dataclasses import replace

import msgspec
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper
from rich.console import Console

import tilewright.cli.verbs as cli
from tilewright.cli import against
from tilewright.cli.given import Given
from tilewright.ir.build import map_
from tilewright.report.schema import Verify
from tilewright.report.text.other_tables import print_verify
from tilewright.report.words import count

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
    out = Console(file=io.StringIO(), width=150)
    print_verify(out, msgspec.json.decode(result.stdout, type=Verify))
    text, outputs = " ".join(out.file.getvalue().split()), len(report["end_to_end"]) - 1
    assert f"and {count(outputs, 'output')} agree with the oracle" in text, "the library's row is none of them"
    assert "output the whole program" not in text
    assert result.exit_code == 0 and report["verified"], result.output
    assert report["source"] == f"the source's own library, {library}, ran the program, too"
    assert report["end_to_end"][-1]["name"] == f"the whole program by {library}"
    assert 0 <= report["end_to_end"][-1]["error"] < 1e-6 and len(report["end_to_end"]) == 2


def test_a_library_has_as_long_as_the_budget(files, monkeypatch):
    monkeypatch.setattr(against, "LEAST_READY_S", 0.01)
    result = verify(files / "m.hlo", "--json", "--budget=0.02")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["verified"], result.output
    why = "xla: no answer in 0 s; a larger --budget gives it more"
    assert report["source"] == f"no library of the source's own ran the program ({why})"


def test_a_quantised_program_may_differ_by_what_its_codes_allow(tmp_path):
    """A rounding that falls the other way is a whole code: 1 of 127, not one of f32; integers of integers are equal."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [8, 16]) for n in "xy")
    scale, zero = helper.make_tensor("s", TensorProto.FLOAT, [], [0.05]), helper.make_tensor("z", TensorProto.INT8, [], [0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "m", [x], [y], [scale, zero])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    row = json.loads(verify(tmp_path / "m.onnx", "--json").stdout)["end_to_end"][-1]
    assert row["ok"] and row["bound"] == pytest.approx(16 / 127) and row["error"] < 1e-6
    whole = onnx.load(tmp_path / "m.onnx")
    del whole.graph.node[1]
    whole.graph.node[0].output[0], whole.graph.output[0].type.tensor_type.elem_type = "y", TensorProto.INT8
    whole.graph.input[0].type.tensor_type.elem_type = TensorProto.INT8
    whole.graph.node[0].CopyFrom(helper.make_node("Neg", ["x"], ["y"]))
    onnx.save(whole, tmp_path / "n.onnx")
    row = json.loads(verify(tmp_path / "n.onnx", "--json").stdout)["end_to_end"][-1]
    assert row["ok"] and row["bound"] == row["error"] == 0


def test_a_misread_program_is_seen(files, monkeypatch):
    """The oracle agrees with a front end that negates every result; onnxruntime does not."""
    real = Given.load

    def misread(given, **how):
        graph = real(given, **how)
        return replace(graph, outputs=tuple(map_("negate", n) for n in graph.outputs))

    monkeypatch.setattr(Given, "load", misread)
    result = verify(files / "m.onnx")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 1 and "the whole program by onnxruntime" in words and "32 of 32 numbers differ" in words


def test_a_model_that_is_quantised_here_has_no_such_library(files):
    result = verify(files / "m.onnx", "--int8")
    assert result.exit_code != 0 and "--source compares the program as it is written" in str(result.exception) + result.output
