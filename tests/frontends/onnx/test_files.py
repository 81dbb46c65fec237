"""An ONNX model's weights: mapped, in the file that has them, until something uses them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_models import FLOAT, model, one, ours, read, value

from tilewright.frontends.onnx.wire import CUT_BYTES, strip_weights

rng = np.random.default_rng(3)
X = {"x": rng.standard_normal((2, 64)).astype(np.float32)}


def weights(graph):
    return {n.op.data.label: n.op.data for n in graph.nodes() if n.op.name == "const"}


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("columns", [1, 7, 200])
def test_weights_are_the_same_wherever_they_are(tmp_path, external, columns):
    w, b = rng.standard_normal((64, columns)).astype(np.float32), rng.standard_normal(columns).astype(np.float32)
    m = one("Gemm", X, {"w": w, "b": b})
    path = tmp_path / "m.onnx"
    onnx.save(m, path, save_as_external_data=external, location="m.bin", size_threshold=0)
    graph = read(str(path))
    np.testing.assert_array_equal(weights(graph)["w"].tensor().numpy(), w)
    np.testing.assert_allclose(ours(graph, X)[0], X["x"] @ w + b, rtol=1e-4, atol=1e-4)
    assert graph.name == "m"
    assert graph.origins[next(n for n in graph.nodes() if n.op.name == "const")] in ("w", "b")


NUMPY = "float32 float64 float16 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool"
NARROW = "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz int4 uint4"
TYPED = {
    "float32": "float_data",
    "float64": "double_data",
    "int64": "int64_data",
    "uint32": "uint64_data",
    "uint64": "uint64_data",
}


@pytest.mark.parametrize("name", [*NUMPY.split(), *NARROW.split()])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 7), (61, 83)])
def test_every_element_type_in_every_place(tmp_path, name, shape):
    dtype = np.dtype(getattr(ml_dtypes, name) if name in NARROW.split() else name)
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    if name in ("int4", "uint4", "bool"):
        array = np.asarray(rng.integers(-8 if name == "int4" else 0, 8, shape)).astype(dtype)
    else:
        array = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype).reshape(shape)
    m = model([helper.make_node("Identity", ["w"], ["y"])], {}, {"y": kind})
    tensor = m.graph.initializer.add()
    for place in ("raw", "typed"):
        if place == "raw":
            tensor.CopyFrom(numpy_helper.from_array(array, "w"))
        elif name in NUMPY.split() and name != "float16":
            array = np.nan_to_num(array) if dtype.kind == "f" else array  # a NaN's bits would not survive as a number
            tensor.CopyFrom(onnx.TensorProto(name="w", data_type=kind, dims=shape))
            getattr(tensor, TYPED.get(name, "int32_data")).extend(
                (array.astype(int) if name == "bool" else array).reshape(-1).tolist()
            )
        (tmp_path / "m.onnx").write_bytes(m.SerializeToString())
        got = ours(read(str(tmp_path / "m.onnx")), {})[0]
        assert got.dtype == dtype
        assert got.shape == shape
        assert got.tobytes() == array.tobytes()


def test_several_tensors_of_one_data_file_share_one_mapping(tmp_path):
    parts = {f"w{i}": rng.standard_normal((64, 3)).astype(np.float32) for i in range(3)}
    nodes = [helper.make_node("Concat", list(parts), ["w"], axis=1), helper.make_node("MatMul", ["x", "w"], ["y"])]
    onnx.save(model(nodes, X, {"y": FLOAT}, parts), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    found = weights(read(str(tmp_path / "m.onnx")))
    for name, array in parts.items():
        np.testing.assert_array_equal(found[name].tensor().numpy(), array)
    starts = {d.tensor().untyped_storage().data_ptr() for d in found.values()}
    assert max(starts) - min(starts) < 1 << 20


def test_an_input_with_a_default_is_that_constant():
    m = one("Add", {"x": X["x"]}, {"w": np.ones(64, np.float32)})
    m.graph.input.append(value("w", np.ones(64, np.float32)))
    assert [n.op.label for n in read(m).inputs] == ["x"]


def test_loading_copies_no_weight(tmp_path):
    """Resident memory grows by far less than the weights, in a process of its own."""
    size = 32 << 20
    w = np.zeros((1024, size // 4096), np.float32)
    x = {"x": np.zeros((1, 1024), np.float32)}
    onnx.save(one("Relu", x), tmp_path / "warm.onnx")
    onnx.save(one("MatMul", x, {"w": w}), tmp_path / "embedded.onnx")
    onnx.save(one("MatMul", x, {"w": w}), tmp_path / "external.onnx", save_as_external_data=True)
    program = f"""
        from pathlib import Path
        import tilewright.frontends.onnx as frontend
        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        graphs = [frontend.load({str(tmp_path / "warm.onnx")!r})]
        for name in ("embedded", "external"):
            before = resident()
            graphs.append(frontend.load({str(tmp_path)!r} + f"/{{name}}.onnx"))
            weight = next(n for n in graphs[-1].nodes() if n.op.name == "const")
            if name == "external":  # its offset is a multiple of the element size, so using it copies nothing either
                assert weight.op.data.tensor().shape == (1024, {size // 4096})
            print(resident() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert max(int(line) for line in done.stdout.split()) < size // 8


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stripping_keeps_all_but_the_large_weights(data):
    m = onnx.ModelProto(ir_version=10)
    m.opset_import.add(version=data.draw(st.integers(1, 1 << 40)))
    sizes = data.draw(st.lists(st.sampled_from([0, 1, CUT_BYTES - 1, CUT_BYTES, CUT_BYTES + 5]), max_size=4))
    for i, size in enumerate(sizes):
        m.graph.initializer.add(name=f"w{i}", data_type=TensorProto.UINT8, dims=[size], raw_data=bytes([i + 1]) * size)
    m.graph.node.add(op_type="Relu", input=["w0"], output=["y"]).attribute.add(name="alpha", type=1, f=0.5)
    m.producer_name = "p" * data.draw(st.integers(0, 300))
    serialised = m.SerializeToString()
    stripped = strip_weights(memoryview(serialised))
    light = onnx.ModelProto.FromString(bytes(stripped.model))
    spans = stripped.spans or (None,) * len(sizes)
    for i, (size, span) in enumerate(zip(sizes, spans, strict=True)):
        assert (span is not None) == (size >= CUT_BYTES)
        if span:
            assert serialised[slice(*span)] == bytes([i + 1]) * size
            light.graph.initializer[i].raw_data = serialised[slice(*span)]
    assert light == m


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_stripping_what_is_no_model_leaves_it_alone(data):
    stripped = strip_weights(memoryview(data))
    assert bytes(stripped.model) == data
    assert stripped.spans == ()


def test_models_past_protobufs_two_gigabytes_in_spirit(tmp_path):
    """Only what is left after stripping is parsed: a wire-valid file with weights protobuf never sees."""
    m = one("MatMul", X, {"w": np.ones((64, 1 << 14), np.float32)})
    serialised = m.SerializeToString()
    stripped = strip_weights(memoryview(serialised))
    assert len(stripped.model) < 1000 < len(serialised)
    (tmp_path / "m.onnx").write_bytes(serialised)
    np.testing.assert_allclose(ours(read(str(tmp_path / "m.onnx")), X)[0][:, 0], X["x"].sum(1), rtol=1e-4, atol=1e-4)
