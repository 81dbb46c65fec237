"""Programs without end, of strangers: limits in the library, a process with limits on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from cli_programs import FAST, invoke
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import tilewright
from tilewright.dtype import F32
from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.frontends import MOST_OPERATIONS, LoadOptions, load, untrusted
from tilewright.ir.build import broadcast, input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.text import print_graph

STRANGE = LoadOptions(untrusted=True)


def model(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], y: onnx.ValueInfoProto, *held: onnx.TensorProto):
    graph = helper.make_graph(nodes, "g", inputs, [y], list(held))
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def floats(name: str, *shape: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def endless_loop() -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Add", ["a", "a"], ["b"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            floats("a", 2),
        ],
        [helper.make_tensor_value_info("d", TensorProto.BOOL, []), floats("b", 2)],
    )
    return model([helper.make_node("Loop", ["", "", "x"], ["y"], body=body)], [floats("x", 2)], floats("y", 2))


def cyclic_tree() -> onnx.ModelProto:
    tree = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=[0, 0],
        nodes_nodeids=[0, 1],
        nodes_featureids=[0, 0],
        nodes_modes=["BRANCH_LEQ", "BRANCH_LEQ"],
        nodes_values=[1e30, 1e30],
        nodes_truenodeids=[1, 0],
        nodes_falsenodeids=[1, 0],
        target_treeids=[0],
        target_nodeids=[0],
        target_ids=[0],
        target_weights=[1.0],
    )
    return model([tree], [floats("x", 1, 2)], floats("y", 1, 1))


def catastrophic() -> onnx.ModelProto:
    text = numpy_helper.from_array(np.array(["a" * 64 + "!"], dtype=object), "s")
    match = helper.make_node("RegexFullMatch", ["s"], ["m"], pattern="(a+)+$")
    cast = helper.make_node("Cast", ["m"], ["f"], to=TensorProto.FLOAT)
    return model([match, cast, helper.make_node("Add", ["x", "f"], ["y"])], [floats("x", 1)], floats("y", 1), text)


def nested(depth: int) -> str:
    t = "tensor<2xf32>"
    call = f"%0 = func.call @f{{0}}(%a) : ({t}) -> {t}\n%1 = func.call @f{{0}}(%0) : ({t}) -> {t}\nreturn %1 : {t}\n}}}}\n"
    functions = [f"func.func private @f{i}(%a: {t}) -> {t} {{\n" + call.format(i + 1) for i in range(depth)]
    last = f"func.func private @f{depth}(%a: {t}) -> {t} {{\n%0 = stablehlo.tanh %a : {t}\nreturn %0 : {t}\n}}\n"
    main = f"func.func public @main(%a: {t}) -> {t} {{\n" + call.format(0)
    return "".join([main, *functions, last])


ENDLESS = {"a loop": endless_loop, "a cyclic tree": cyclic_tree, "a catastrophic expression": catastrophic}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_an_interpreter_runs_is_refused(name: str) -> None:
    with pytest.raises(TilewrightError, match="whose time nothing bounds"):
        tilewright.compile(ENDLESS[name](), budget_s=0, untrusted=True)
    assert not untrusted()


def test_functions_that_double_end_early() -> None:
    with pytest.raises(InputError, match=f"more than {MOST_OPERATIONS} operations"):
        load(nested(40), STRANGE)
    assert load(nested(6), STRANGE).outputs


def test_values_and_operations_are_counted() -> None:
    x = input_("x", F32, (1,))
    large = print_graph(Graph("g", (x,), (broadcast(x, (1 << 32,)),), ("y",)))
    with pytest.raises(InputError, match=r"values of 16\.0 GiB, and an untrusted program may have 8"):
        load(large, STRANGE)
    assert load(large).outputs
    long = x
    for _ in range(MOST_OPERATIONS):
        long = map_("tanh", long)
    with pytest.raises(InputError, match="operations, and an untrusted program may have"):
        load(print_graph(Graph("g", (x,), (long,), ("y",))), STRANGE)


def test_a_module_is_code_and_calls_are_not_allowed_at_once() -> None:
    with pytest.raises(UnsupportedError, match="a module is code"):
        tilewright.compile(nn.Linear(2, 2), example_inputs=(torch.ones(1, 2),), untrusted=True)
    with pytest.raises(InputError, match="exclude each other"):
        load(Path("x.tw"), LoadOptions(untrusted=True, allow_calls=True))


def test_the_command_line_ends_what_does_not(tmp_path: Path) -> None:
    program = tmp_path / "loop.onnx"
    program.write_bytes(endless_loop().SerializeToString())
    result = invoke("run", program, *FAST, "--untrusted", "--time-limit", "8")
    assert result.exit_code == 2 and "was not done within 8 s" in result.stderr and "--time-limit" in result.stderr
    result = invoke("read", program, "--untrusted", "--time-limit", "100")
    assert result.exit_code == 0 and "Loop" in result.stdout
    result = invoke("read", program, "--untrusted", "--memory-limit", "0.5")
    assert result.exit_code not in (0, 70)
    assert invoke("read", program, "--time-limit", "9").exit_code == 2


@pytest.mark.conformance
@pytest.mark.parametrize("name", ENDLESS)
def test_every_one_of_them_ends(name: str, tmp_path: Path) -> None:
    program = tmp_path / "p.onnx"
    program.write_bytes(ENDLESS[name]().SerializeToString())
    result = invoke("run", program, *FAST, "--untrusted", "--time-limit", "15")
    assert result.exit_code == 2, result.output
