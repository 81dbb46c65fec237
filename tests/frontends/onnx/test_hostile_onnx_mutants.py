"""Mutations of a small ONNX model, of its bytes and contents: little work, a graph or a typed error, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import BOOL, FLOAT, INT64, model, value
from work import counting

from tilewright.errors import TilewrightError
from tilewright.frontends import onnx as frontend
from tilewright.ir.verify import verify


def seed_model() -> onnx.ModelProto:
    """A little of everything: products, quantisation, shape arithmetic, a function, a loop, operators left to calls."""
    rng = np.random.default_rng(0)
    body = helper.make_graph(
        [helper.make_node("Add", ["acc", "step"], ["acc2"]), helper.make_node("Identity", ["c"], ["c2"])],
        "body",
        [value("i", INT64, []), value("c", BOOL, []), value("acc", FLOAT, [2])],
        [value("c2", BOOL, []), value("acc2", FLOAT, [2])],
    )
    twice = helper.make_function(
        "f", "Twice", ["p"], ["q"], [helper.make_node("Add", ["p", "p"], ["q"])], [helper.make_opsetid("", 21)]
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Shape", ["d"], ["sh"]),
        helper.make_node("Gather", ["sh", "i0"], ["g"]),
        helper.make_node("Unsqueeze", ["g", "ax"], ["gu"]),
        helper.make_node("Concat", ["gu", "m1"], ["ns"], axis=0),
        helper.make_node("Reshape", ["d", "ns"], ["r"]),
        helper.make_node("Gemm", ["r", "w2"], ["gm"], transB=1, alpha=0.5),
        helper.make_node("Softmax", ["gm"], ["sm"], axis=-1),
        helper.make_node("TopK", ["sm", "k"], ["tv", "ti"]),
        helper.make_node("Slice", ["sm", "st", "en"], ["sl"]),
        helper.make_node("LayerNormalization", ["gm", "lw"], ["ln"]),
        helper.make_node("Twice", ["ln"], ["tw"], domain="f"),
        helper.make_node("Loop", ["trip", "", "init"], ["fin"], body=body),
        helper.make_node("NonZero", ["r"], ["nz"]),
        helper.make_node("Split", ["gm"], ["s1", "s2"], axis=1, num_outputs=2),
        helper.make_node("Pad", ["s1", "pads"], ["pd"]),
        helper.make_node("Einsum", ["x", "w"], ["es"], equation="ij,jk->ik"),
        helper.make_node("Cast", ["es"], ["ca"], to=TensorProto.FLOAT8E4M3FN),
    ]
    whole = {
        k: np.array(v, np.int64) for k, v in {"i0": 0, "ax": [0], "m1": [-1], "k": [2], "st": [0, 1], "en": [2, 3]}.items()
    }
    whole |= {"trip": np.array(3, np.int64), "pads": np.array([0, 1, 1, 0], np.int64)}
    shapes = {"w": (4, 6), "w2": (4, 6), "lw": (4,), "init": (2,), "step": (2,)}
    constants = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()} | whole
    constants |= {"s": np.array(0.1, np.float32), "z": np.array(3, np.int8)}
    outputs = dict.fromkeys(("sl", "tw", "tv", "fin", "pd"), FLOAT) | {"ca": TensorProto.FLOAT8E4M3FN, "nz": INT64}
    x = {"x": np.zeros((3, 4), np.float32)}
    return model(nodes, x, outputs, constants, domains={"f": 1}, functions=[twice])


def mutated(data: bytes, draw: random.Random) -> bytes:
    b = bytearray(data)
    kind = draw.random()
    at = draw.randrange(len(b))
    if kind < 0.6:
        for _ in range(draw.choice([1, 1, 2, 4])):
            b[draw.randrange(len(b))] = draw.choice([0, 1, 2, 127, 128, 255, draw.randrange(256)])
    elif kind < 0.7:
        del b[at:]
    elif kind < 0.8:
        b[at:at] = draw.randbytes(draw.randrange(1, 9))
    elif kind < 0.9:
        del b[at : at + draw.randrange(1, 9)]
    else:
        b[at:at] = b[draw.randrange(len(b)) :][:64]
    return bytes(b)


HUGE = [-1, -(1 << 63), (1 << 63) - 1, 1 << 31, 1 << 40, 0, 1, 3, 7, -5]


def rewritten(m: onnx.ModelProto, draw: random.Random) -> bytes:
    """A mutation that parses: extents, types, attributes, edges."""
    m = onnx.ModelProto.FromString(m.SerializeToString())
    node, tensor = draw.choice(m.graph.node), draw.choice(m.graph.initializer)
    match draw.randrange(9):
        case 0:
            tensor.dims.append(draw.choice(HUGE))
        case 1:
            tensor.data_type = draw.randrange(32)
        case 2:
            tensor.raw_data = tensor.raw_data[: draw.randrange(len(tensor.raw_data) + 1)]
        case 3 if node.input:
            node.input[draw.randrange(len(node.input))] = draw.choice([o for n in m.graph.node for o in n.output])
        case 4:
            node.op_type = draw.choice([n.op_type for n in m.graph.node] + ["If", "Scan", "Attention", "Constant"])
        case 5 if node.attribute:
            attribute = draw.choice(node.attribute)
            attribute.i, attribute.type = draw.choice(HUGE), draw.choice([attribute.type, draw.randrange(15)])
        case 6:
            name = draw.choice(["axis", "axes", "perm", "to", "block_size", "pads", "num_outputs", "keepdims"])
            number = draw.choice(HUGE)
            node.attribute.append(helper.make_attribute(name, draw.choice([number, [number, 1], 0.5, "s"])))
        case 7:
            size = draw.choice([(), (1,), (2,), (4,)])
            tensor.CopyFrom(numpy_helper.from_array(np.full(size, draw.choice(HUGE), np.int64), tensor.name))
        case _:
            m.opset_import[0].version = draw.choice([1, 6, 9, 11, 13, 18, 23, 99, 0, -1, 1 << 40])
    return m.SerializeToString()


@pytest.mark.parametrize("seed", range(4))
def test_mutants_give_a_graph_or_a_typed_error(tmp_path, seed):
    draw = random.Random(seed)
    original = seed_model()
    data = original.SerializeToString()
    verify(frontend.load(original))
    outcomes = {"read": 0, "refused": 0}
    for i in range(120):
        path = tmp_path / "m.onnx"
        path.write_bytes(mutated(data, draw) if i % 2 else rewritten(original, draw))
        with counting() as calls:
            try:
                verify(frontend.load(path))
                outcomes["read"] += 1
            except TilewrightError as error:
                assert str(error).count("\n") <= 1, error
                outcomes["refused"] += 1
        assert calls.count < 200_000
    assert min(outcomes.values()) > 10, outcomes
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]  # nothing written
