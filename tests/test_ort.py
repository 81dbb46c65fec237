"""`tilewright.ort.InferenceSession` beside onnxruntime's own session on the same models, and the compiled ONNX backend."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx_models import model, one, value
from onnx_node_suite import outcomes
from transformer_exports import exported, feeds

import tilewright.onnx_backend
from tilewright.errors import InputError
from tilewright.ort import InferenceSession, OrtValue

rng = np.random.default_rng(5)


def floats(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def both(source, **options):
    raw = source.SerializeToString() if isinstance(source, onnx.ModelProto) else source
    theirs = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
    return InferenceSession(raw, providers=["CPUExecutionProvider"], budget_s=0, **options), theirs


def agree(ours, theirs, feed, names=None, rtol=1e-5):
    found, wanted = ours.run(names, feed), theirs.run(names, feed)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert type(a) is type(b)
        if isinstance(b, np.ndarray) and b.dtype != object:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=1e-9))
        else:
            np.testing.assert_equal(a, b)


def dense(rows="rows"):
    """Two products with a gelu between them; the number of rows is open."""
    constants = {"w": floats(24, 40), "b": floats(40), "v": floats(40, 8)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["i"]),
        helper.make_node("Relu", ["i"], ["j"]),
        helper.make_node("MatMul", ["j", "v"], ["y"]),
        helper.make_node("ReduceMax", ["j"], ["top"], keepdims=0),
    ]
    outputs = {"y": TensorProto.FLOAT, "top": TensorProto.FLOAT}
    return model(nodes, [value("x", TensorProto.FLOAT, (rows, 24))], outputs, constants)


def test_arguments_and_metadata_are_told_as_onnxruntime_tells_them():
    m = dense()
    m.producer_name, m.domain, m.doc_string, m.graph.doc_string = "someone", "here", "a model", "a graph"
    m.metadata_props.add(key="k", value="v")
    shaped = model(
        [helper.make_node("Identity", [n], [f"{n}_out"]) for n in ("a", "b", "c")],
        [
            value("a", TensorProto.INT64, ("batch", 3, None)),
            value("b", TensorProto.BFLOAT16, ()),
            helper.make_tensor_sequence_value_info("c", TensorProto.STRING, None),
        ],
        {"a_out": TensorProto.INT64, "b_out": TensorProto.BFLOAT16},
    )
    shaped.graph.output.append(helper.make_tensor_sequence_value_info("c_out", TensorProto.STRING, None))
    for source in (m, shaped):
        ours, theirs = both(source)
        for of in ("get_inputs", "get_outputs", "get_overridable_initializers"):
            found, wanted = ([(i.name, i.type, i.shape) for i in getattr(s, of)()] for s in (ours, theirs))
            assert found == wanted
        fields = ["producer_name", "graph_name", "domain", "description", "graph_description", "version", "custom_metadata_map"]
        assert [getattr(ours.get_modelmeta(), f) for f in fields] == [getattr(theirs.get_modelmeta(), f) for f in fields]
        assert ours.get_providers() == theirs.get_providers() == ["CPUExecutionProvider"]


def test_open_extents_are_compiled_once():
    ours, theirs = both(dense())
    for rows in (1, 7, 64, 7, 33, 128):
        agree(ours, theirs, {"x": floats(rows, 24)})
    assert ours.program.compiled == 1
    agree(ours, theirs, {"x": floats(0, 24)}, ["y"])  # beyond the dim's bounds: a program of its own


def test_results_by_name_in_the_order_asked_for():
    ours, theirs = both(dense(3))
    x = floats(3, 24)
    for names in (None, [], ["top"], ["top", "y"], ["y"]):
        agree(ours, theirs, {"x": x}, names)
    first = ours.run(["y"], {"x": x})[0]
    kept = first.copy()
    ours.run(["y"], {"x": x * 2})
    np.testing.assert_array_equal(first, kept)
    first[:] = 0
    agree(ours, theirs, {"x": x}, ["y"])


def test_a_transformer_at_many_shapes(tmp_path):
    ours, theirs = both(exported(tmp_path, "bert-any", dynamo=False, opset=17, dynamic=True))
    for batch, length in ((1, 5), (2, 16), (3, 31), (4, 9)):
        agree(ours, theirs, feeds(batch, length), rtol=2e-4)
    assert ours.program.compiled == 1


def test_numbers_and_lists_become_arrays_of_the_inputs_type():
    m = model([helper.make_node("Mul", ["x", "s"], ["y"])], [value("x", 1, (2, 2)), value("s", 1, ())], {"y": 1})
    ours = InferenceSession(m, budget_s=0)
    np.testing.assert_array_equal(ours.run(None, {"x": [[1, 2], [3, 4]], "s": 2})[0], np.float32([[2, 4], [6, 8]]))
    np.testing.assert_array_equal(ours.run(None, {"x": torch.ones(2, 2), "s": np.float32(3)})[0], np.full((2, 2), 3.0))


def test_strings_and_sequences_pass():
    lengths = one("StringConcat", {"x": np.array(["a", "b"]), "y": np.array(["c", "d"])}, out=TensorProto.STRING)
    for i in lengths.graph.input:
        i.type.tensor_type.elem_type = TensorProto.STRING
    lengths.opset_import[0].version = 20
    ours, theirs = both(lengths)
    feed = {"x": np.array(["a", "b"], object), "y": np.array(["c", "d"], object)}
    assert ours.run(None, feed)[0].tolist() == theirs.run(None, feed)[0].tolist() == ["ac", "bd"]


def test_bindings_read_and_write_the_memory_bound():
    ours, theirs = both(dense(5))
    x = floats(5, 24)
    wanted = theirs.run(None, {"x": x})
    for session in (ours, theirs):
        y = np.zeros((5, 8), np.float32)
        binding = session.io_binding()
        binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
        binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
        binding.bind_output("top")
        for scale in (1, 3):
            x *= scale
            session.run_with_iobinding(binding)
        np.testing.assert_allclose(y, session.run(["y"], {"x": x})[0], rtol=1e-5)
        found = binding.copy_outputs_to_cpu()
        assert [f.shape for f in found] == [(5, 8), ()]
        np.testing.assert_allclose(found[0], y, rtol=1e-6)
        assert [v.data_type() for v in binding.get_outputs()] == ["tensor(float)"] * 2
        x /= 3
    binding = ours.io_binding()
    binding.bind_cpu_input("x", x)
    place = OrtValue.ortvalue_from_shape_and_type((5, 8), np.float32)
    binding.bind_ortvalue_output("y", place)
    ours.run_with_iobinding(binding)
    np.testing.assert_allclose(place.numpy(), wanted[0], rtol=1e-4, atol=1e-4)
    binding.clear_binding_outputs()
    assert binding.get_outputs() == []
    binding.clear_binding_inputs()
    binding.bind_output("y")
    with pytest.raises(InputError, match="no value for 'x'"):
        ours.run_with_iobinding(binding)


def test_memory_bound_for_something_else_is_refused():
    ours = InferenceSession(dense(5), budget_s=0)
    binding = ours.io_binding()
    binding.bind_cpu_input("x", floats(5, 24))
    binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_shape_and_type((5, 7), np.float32))
    with pytest.raises(InputError, match=r"float32\[5, 8\] into memory for torch.float32\[5, 7\]"):
        ours.run_with_iobinding(binding)
    with pytest.raises(InputError, match="an address without shape and element type"):
        binding.bind_output("y", buffer_ptr=64)
    with pytest.raises(InputError, match="the memory of a ndarray cannot be written"):
        binding.bind_ortvalue_output("y", np.zeros(3))
    with pytest.raises(InputError, match="no device 'tpu'"):
        binding.bind_output("y", "tpu")


def test_values_stay_values():
    ours = InferenceSession(dense(4), budget_s=0)
    x = floats(4, 24)
    given = OrtValue.ortvalue_from_numpy(x)
    (y,) = ours.run_with_ort_values(["y"], {"x": given})
    np.testing.assert_array_equal(y.numpy(), ours.run(["y"], {"x": x})[0])
    assert (y.shape(), y.element_type(), y.device_name()) == ([4, 8], TensorProto.FLOAT, "cpu")
    assert y.is_tensor() and y.has_value() and not y.is_tensor_sequence() and not y.is_sparse_tensor()
    assert y.tensor_size_in_bytes() == 4 * 8 * 4
    np.testing.assert_array_equal(np.from_dlpack(y), y.numpy())
    (again,) = ours.run_with_ort_values(["y"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)})
    np.testing.assert_array_equal(again.numpy(), y.numpy())
    given.update_inplace(2 * x)
    np.testing.assert_array_equal(given.numpy(), 2 * x)
    with pytest.raises(InputError, match="into memory for"):
        given.update_inplace(x[:2])


def test_runs_from_threads_and_in_the_background_of_the_caller():
    ours, theirs = both(dense())
    given = [floats(n, 24) for n in (1, 2, 3, 4) * 4]
    with ThreadPoolExecutor(4) as pool:
        for x, found in zip(given, pool.map(lambda x: ours.run(["y"], {"x": x})[0], given), strict=True):
            np.testing.assert_allclose(found, theirs.run(["y"], {"x": x})[0], rtol=1e-4, atol=1e-4)
    done, seen = threading.Event(), []
    ours.run_async(["y"], {"x": given[0]}, lambda *got: (seen.append(got), done.set()), "mine")
    assert done.wait(60)
    assert (seen[0][1:], len(seen[0][0])) == (("mine", ""), 1)
    done.clear()
    ours.run_async(["y"], {}, lambda *got: (seen.append(got), done.set()), None)
    assert done.wait(60)
    assert "no value for 'x'" in seen[1][2]


@pytest.mark.parametrize(
    ("names", "feed", "message"),
    [
        (["z"], {"x": np.zeros((2, 24), np.float32)}, "no output is called 'z'"),
        (None, {}, "no value for 'x'"),
        (None, {"x": np.zeros((2, 24), np.float32), "w": np.zeros((24, 40), np.float32)}, "input 'w' is unknown"),
        (None, {"x": np.zeros((2, 24))}, "f64"),
        (None, {"x": np.zeros((2, 23), np.float32)}, "23"),
        (None, {"x": np.zeros((2, 3, 24), np.float32)}, "3 extents given, the model has 2"),
    ],
)
def test_wrong_feeds_have_sentences(names, feed, message):
    with pytest.raises(InputError, match=message):
        InferenceSession(dense(), budget_s=0).run(names, feed)


def test_providers_choose_the_device(caplog):
    m = dense(2)
    with pytest.raises(InputError, match="no kernels for AzureExecutionProvider"):
        InferenceSession(m, providers=["AzureExecutionProvider"])
    session = InferenceSession(m, providers=["AzureExecutionProvider", ("CPUExecutionProvider", {})], budget_s=0)
    assert "AzureExecutionProvider is passed over" in caplog.text
    assert session.get_provider_options() == {"CPUExecutionProvider": {}}
    if not torch.cuda.is_available():
        session = InferenceSession(m, providers=["CUDAExecutionProvider", "CPUExecutionProvider"], budget_s=0)
        assert session.get_providers() == ["CPUExecutionProvider"]
        with pytest.raises(InputError, match="no CUDA device"):
            InferenceSession(m, providers=[("CUDAExecutionProvider", {"device_id": 1})], budget_s=0)


def test_session_options_give_the_number_of_threads():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = InferenceSession(dense(2), options, budget_s=0)
    assert session.program.threads == 1
    assert session.get_session_options() is options


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="path_or_bytes"):
        InferenceSession(3)
    with pytest.raises(InputError, match="the bytes given"):
        InferenceSession(b"nonsense")
    with pytest.raises(InputError, match="cannot open"):
        InferenceSession(tmp_path / "none.onnx")


def test_every_fortieth_of_onnxs_node_tests_passes_compiled():
    prepare = functools.partial(tilewright.onnx_backend.prepare, budget_s=0, cache=False)
    found = outcomes(prepare=prepare, every=40)
    assert len(found) > 40
    assert [o for o in found if o.status == "fail" and "reference evaluator" not in o.reason and "draws" not in o.reason] == []


def test_the_compiled_backend_is_onnxs_own_interface():
    backend = tilewright.onnx_backend
    assert backend.supports_device("CPU")
    assert backend.supports_device("CUDA") == torch.cuda.is_available()
    assert not backend.supports_device("TPU")
    x = floats(2, 3)
    m = one("Relu", {"x": x})
    np.testing.assert_array_equal(backend.run_model(m, [x], budget_s=0)[0], np.maximum(x, 0))
    with pytest.raises(InputError, match="no device 'TPU'"):
        backend.prepare(m, "TPU")
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    prepared = backend.prepare(m, budget_s=0)
    for rows in (1, 4):
        assert prepared.run([floats(rows, 3)])[0].shape == (rows, 3)
