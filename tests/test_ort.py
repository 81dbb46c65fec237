"""`tilewright.ort.InferenceSession` beside onnxruntime's own session on the same models, and the compiled ONNX backend."""

import copy
import functools
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx_models import model, one, value
from onnx_node_suite import outcomes
from transformer_exports import exported, feeds, quiet

import tilewright.onnx_backend
import tilewright.ort
from tilewright import any_shape
from tilewright.errors import InputError, UnsupportedError
from tilewright.ort import InferenceSession, OrtValue, RunOptions, SessionOptions

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


def test_what_comes_first_is_no_part_of_the_first_call():
    ours, theirs = both(dense())
    assert (ours.program.made, ours.program.compiled) == (1, 1)
    agree(ours, theirs, {"x": floats(16, 24)})
    assert ours.program.made == 1


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


def test_a_transformer_at_many_shapes_from_several_threads(tmp_path):
    path = exported(tmp_path, "bert-any", dynamo=False, opset=17, dynamic=True)
    ours = InferenceSession(path, budget_s=1, cache=False)  # measured where no dim says how far it goes, but the model does
    theirs = onnxruntime.InferenceSession(path)
    shapes = [(b, n) for b in (1, 3) for n in (5, 16, 31)] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda s: ours.run(None, feeds(*s))[0], shapes))
    for shape, y in zip(shapes, found, strict=True):
        wanted = theirs.run(None, feeds(*shape))[0]
        np.testing.assert_allclose(y, wanted, rtol=2e-4, atol=2e-4 * np.abs(wanted).max())
    assert ours.program.compiled == 1


def test_a_decoder_with_cached_keys_goes_on_from_none(tmp_path):
    path, names = str(tmp_path / "decoder.onnx"), ["input_ids", "attention_mask", "keys", "values"]
    dynamic = {"input_ids": {0: "batch", 1: "seq"}, "attention_mask": {0: "batch", 1: "total"}}
    held = {n: {0: "batch", 2: "past"} for n in names[2:]}
    with quiet():
        example = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64), *torch.randn(2, 2, 4, 5, 16)
        outputs = ["logits", "new_keys", "new_values"]
        torch.onnx.export(
            Decoder(), example, path, dynamo=False, input_names=names, output_names=outputs, dynamic_axes=dynamic | held
        )
    ours, theirs = both(path)
    ids, past = np.array([[1, 2, 3, 4]]), [np.zeros((1, 4, 0, 16), np.float32)] * 2
    for total in range(4, 9):
        feed = dict(zip(names, (ids, np.ones((1, total), np.int64), *past), strict=True))
        agree(ours, theirs, feed, rtol=1e-4)
        logits, *past = ours.run(None, feed)
        ids = logits[:, -1:].argmax(-1)
    assert ours.program.compiled == 1


class Decoder(torch.nn.Module):
    """GPT-2 of one layer, with its keys and values as arguments and results."""

    def __init__(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0)
        self.model = GPT2LMHeadModel(config).eval()

    def forward(self, input_ids, attention_mask, keys, values):
        from transformers import DynamicCache

        cache = DynamicCache()
        cache.update(keys, values, 0)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return out.logits, cache.layers[0].keys, cache.layers[0].values


def test_numbers_and_lists_become_arrays_of_the_inputs_type():
    m = model([helper.make_node("Mul", ["x", "s"], ["y"])], [value("x", 1, (2, 2)), value("s", 1, ())], {"y": 1})
    ours = InferenceSession(m, budget_s=0)
    np.testing.assert_array_equal(ours.run(None, {"x": [[1, 2], [3, 4]], "s": 2})[0], np.float32([[2, 4], [6, 8]]))
    np.testing.assert_array_equal(ours.run(None, {"x": torch.ones(2, 2), "s": np.float32(3)})[0], np.full((2, 2), 3.0))


def view(kind):
    """The same numbers in an array that is not laid out as kernels want them."""
    x = floats(5, 24)
    whole = np.zeros((7, 50), np.float32)
    if kind == "offset":
        whole[1:6, 3:27] = x
        return whole[1:6, 3:27]
    if kind == "every second":
        whole[1:6, :48:2] = x
        return whole[1:6, :48:2]
    if kind == "unaligned":
        held = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
        held[:] = x
        return held
    if kind == "read-only":
        x.flags.writeable = False
        return x
    return {"transposed": x.T.copy().T, "backwards": x[::-1, ::-1], "repeated": np.broadcast_to(x[:1], x.shape)}[kind]


@pytest.mark.parametrize("kind", ["offset", "every second", "unaligned", "read-only", "transposed", "backwards", "repeated"])
def test_views_are_read_as_the_numbers_that_they_are(kind):
    ours, theirs = both(dense(5))
    agree(ours, theirs, {"x": view(kind)})


def test_numbers_in_the_other_byte_order_are_read():
    x = floats(5, 24)
    ours = InferenceSession(dense(5), budget_s=0)
    np.testing.assert_array_equal(ours.run(["y"], {"x": x.astype(">f4")})[0], ours.run(["y"], {"x": x})[0])


def test_bfloat16_goes_through():
    x = floats(3, 4).astype(ml_dtypes.bfloat16)
    m = model([helper.make_node("Add", ["x", "x"], ["y"])], [value("x", TensorProto.BFLOAT16, ("n", 4))], {"y": 16})
    (y,) = InferenceSession(m, budget_s=0).run(None, {"x": x})
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y, x + x)
    held = OrtValue.ortvalue_from_numpy(x)
    assert (held.element_type(), held.shape()) == (TensorProto.BFLOAT16, [3, 4])
    np.testing.assert_array_equal(held.numpy(), x)
    again = OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(np.uint16), TensorProto.BFLOAT16)
    np.testing.assert_array_equal(again.numpy(), x)
    with pytest.raises(InputError, match="4 bytes an element, bf16 has 2"):
        OrtValue.ortvalue_from_numpy_with_onnx_type(floats(2), TensorProto.BFLOAT16)


def test_an_input_of_unknown_rank_takes_any():
    m = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", 1, None)], {"y": 1})
    ours, theirs = both(m)
    for shape in ((3,), (2, 5), ()):
        agree(ours, theirs, {"x": np.asarray(floats(*shape))})


def test_initializers_that_are_inputs_may_be_fed():
    m = dense("rows")
    m.graph.input.append(value("b", 1, (40,)))
    ours, theirs = both(m)
    assert [i.name for i in ours.get_overridable_initializers()] == ["b"]
    for rows in (2, 5):
        agree(ours, theirs, {"x": floats(rows, 24)})
        agree(ours, theirs, {"x": floats(rows, 24), "b": floats(40)})
    agree(ours, theirs, {"x": floats(2, 24)})


def words():
    m = one("Identity", {"x": np.array([["a", "b"]])}, out=TensorProto.STRING)
    m.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    return m


@pytest.mark.parametrize(
    "given",
    [
        np.array([["this", "ist"]]),
        np.array([["this", "ist"]], object),
        np.array([[b"this", b"ist"]], "S8"),
        np.array([[b"must", b"have"]], np.void),
        np.array([["Olá", "여보세요"]]),
        [["this", "ist"]],
    ],
)
def test_strings_of_any_kind_come_back_as_objects(given):
    ours, theirs = both(words())
    found, wanted = ours.run(None, {"x": given})[0], theirs.run(None, {"x": given})[0]
    assert (found.dtype, found.tolist()) == (wanted.dtype, wanted.tolist())
    if isinstance(given, np.ndarray):
        held = OrtValue.ortvalue_from_numpy(given)
        assert (held.data_type(), held.element_type(), held.shape()) == ("tensor(string)", TensorProto.STRING, [1, 2])
        assert held.numpy().tolist() == ours.run(None, {"x": held})[0].tolist() == wanted.tolist()


def test_what_is_no_string_is_refused():
    ours = InferenceSession(words(), budget_s=0)
    with pytest.raises(InputError, match="float32 given, strings wanted"):
        ours.run(None, {"x": floats(1, 2)})
    with pytest.raises(InputError, match="bytes that are no UTF-8"):
        ours.run(None, {"x": np.array([[b"\xff", b"a"]])})


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
    with pytest.raises(InputError, match=r"Required inputs \(\['x'\]\) are missing"):
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
    binding.clear_binding_outputs()
    with pytest.raises(RuntimeError, match="no output is bound"):
        ours.run_with_iobinding(binding)


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        (lambda b: b.bind_cpu_input("z", floats(2, 24)), r"no input is called 'z' \(IOBinding\)\n  try: one of x"),
        (lambda b: b.bind_cpu_input("x", 3), r"an argument of type int \(input 'x'\)"),
        (lambda b: b.bind_output("z"), r"no output is called 'z' \(IOBinding\)\n  try: one of top, y"),
        (lambda b: b.bind_output(3), "no output is called 3"),
        (lambda b: b.bind_input("x", "cpu", 0, np.float32, "ab", 64), r"\['a', 'b'\] is no shape \(input 'x'\)"),
        (lambda b: b.bind_input("x", "cpu", 0, np.float32, [-2, 24], 64), r"\[-2, 24\] is no shape \(input 'x'\)"),
        (lambda b: b.bind_input("x", "cpu", 0, np.float32, [2, 24], 0), r"0 is no address \(input 'x'\)"),
        (lambda b: b.bind_output("y", "cpu", 0, np.float32, [2, 8], "y"), r"'y' is no address \(output 'y'\)"),
    ],
)
def test_wrong_bindings_have_sentences(bind, message):
    with pytest.raises(InputError, match=message):
        bind(InferenceSession(dense(2), budget_s=0).io_binding())


def test_bounds_of_open_extents_may_be_given():
    ours = InferenceSession(dense(), budget_s=0, dims={"rows": (1, 8)})
    assert ours.program.dims["rows"].high == 8
    theirs = onnxruntime.InferenceSession(dense().SerializeToString())
    for rows in (3, 20):  # the second lies outside, and is compiled for itself
        assert ours.run(["y"], {"x": floats(rows, 24)})[0].shape == theirs.run(["y"], {"x": floats(rows, 24)})[0].shape
    assert len(ours._kept) == 1
    fixed = InferenceSession(dense(), budget_s=0, input_dims={"x": (2, 24)})
    assert fixed.run(["y"], {"x": floats(2, 24)})[0].shape == (2, 8)
    with pytest.raises(InputError, match=r"shape \[3, 24\] given, f32\[2,24\] wanted"):
        fixed.run(["y"], {"x": floats(3, 24)})


def test_a_shape_that_is_met_often_gets_kernels_of_its_own_behind_the_calls(monkeypatch):
    """Calls that find their program at once are counted, too."""
    monkeypatch.setattr(any_shape, "MET", 5)
    ours = InferenceSession(dense(), background=True, budget_s=2)
    ours.program.at(rows=7).wait()
    for _ in range(7):
        ours.run(None, {"x": floats(7, 24)})
    assert [*ours.program._special] == [(("rows", 7),)]
    monkeypatch.setattr(any_shape, "MET", 1 << 30)
    for rows in range(8, 8 + any_shape.KEPT + 1):  # of so many the first is made anew
        ours.program.at(rows=rows)
    ours.run(None, {"x": floats(7, 24)})
    assert next(r for r in ours._ready.values()).program is ours.program.at(rows=7)


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
    for kind in (OrtValue, onnxruntime.OrtValue):  # both stand over the array's own memory
        held, doubled = kind.ortvalue_from_numpy(x), 2 * x
        held.update_inplace(doubled)
        np.testing.assert_array_equal(held.numpy(), doubled)
        np.testing.assert_array_equal(x, doubled)
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
    assert "Required inputs (['x']) are missing" in seen[1][2]


@pytest.mark.parametrize(
    ("names", "feed", "message"),
    [
        (["z"], {"x": np.zeros((2, 24), np.float32)}, "no output is called 'z'"),
        (None, {}, r"Required inputs \(\['x'\]\) are missing"),
        (None, {"x": np.zeros((2, 24), np.float32), "w": np.zeros((24, 40), np.float32)}, "input 'w' is unknown"),
        ("y", {"x": np.zeros((2, 24), np.float32)}, "a name, not a list of names"),
        (None, [np.zeros((2, 24), np.float32)], "an argument of type list"),
        (None, {"x": np.zeros((2, 24))}, "f64"),
        (None, {"x": np.zeros((2, 23), np.float32)}, "23"),
        (None, {"x": np.zeros((2, 3, 24), np.float32)}, "3 extents given, the model has 2"),
        (
            3,
            {"x": np.zeros((2, 24), np.float32)},
            r"type int \(output_names\)\n  try: \['y', 'top'\], or None for all",
        ),
        ([["y"]], {"x": np.zeros((2, 24), np.float32)}, r"no output is called \['y'\]"),
        (None, {"x": [[1, 2], [3]]}, r"a list is no tensor\(float\): setting an array element with a sequence"),
        (None, {"x": [["a"] * 24]}, r"a list is no tensor\(float\): could not convert"),
        (None, {"x": None}, r"a NoneType is no array \(input 'x'\)\n  try: tensor\(float\)"),
        (None, {"x": "abc"}, "a str is no array"),
    ],
)
def test_wrong_feeds_have_sentences(names, feed, message):
    with pytest.raises(InputError, match=message):
        InferenceSession(dense(), budget_s=0).run(names, feed)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"providers": "CPUExecutionProvider"}, r"a name, not a list of names \(providers\)"),
        ({"providers": 3}, r"an argument of type int \(providers\)"),
        ({"providers": [None]}, r"None is no provider \(providers\)\n  try: \"CPUExecutionProvider\", or"),
        ({"providers": [("CPUExecutionProvider",)]}, r"\('CPUExecutionProvider',\) is no provider"),
        ({"provider_options": 3}, r"an argument of type int \(provider_options\)"),
        ({"provider_options": ["x"]}, r"an argument of type str \(provider_options\)"),
        ({"budget_s": "x"}, r"an argument of type str \(budget_s\)"),
        ({"dims": {"row": (1, 8)}}, r"axis 0 \('rows'\) has no size"),
        ({"provider_options": [{"device_id": "x"}]}, r"device_id=x \(provider_options\)\n  try: the number of a device"),
        ({"sess_options": 3}, r"an argument of type int \(sess_options\)"),
        ({"sess_options": SessionOptions(intra_op_num_threads=-1)}, "threads=-1 is no number of threads"),
        ({"nonsense": 3}, r"no option is called 'nonsense' \(InferenceSession\)\n  try: an option of tilewright.compile"),
    ],
)
def test_wrong_arguments_of_a_session_have_sentences(given, message):
    with pytest.raises(InputError, match=message):
        InferenceSession(dense(), **{"budget_s": 0, **given})


def test_a_session_is_neither_pickled_nor_copied():
    session = InferenceSession(dense(2), budget_s=0)
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UnsupportedError, match=r"a session is neither pickled nor copied[^$]*try: another"):
            use(session)


def test_values_of_something_else_have_sentences():
    held = OrtValue.ortvalue_from_numpy(floats(2))
    for make, message in (
        (lambda: OrtValue.ortvalue_from_numpy(3), "an argument of type int .OrtValue.ortvalue_from_numpy"),
        (lambda: held.update_inplace(3), "an argument of type int .OrtValue.update_inplace"),
        (lambda: OrtValue.ortvalue_from_shape_and_type((-1, 2), np.float32), r"\[-1, 2\] is no shape"),
        (lambda: OrtValue.ortvalue_from_shape_and_type((1, 2), "foo"), r"'foo' is no element type \(element_type\)"),
        (lambda: InferenceSession(dense(2), budget_s=0).set_providers([3]), "3 is no provider"),
        (lambda: SessionOptions().add_initializer("w", 3), r"an argument of type int \(initializer 'w'\)"),
        (lambda: InferenceSession(dense(2), budget_s=0).run_with_ort_values(None, 3), r"type int \(input_dict_ort_values\)"),
        (lambda: InferenceSession(dense(2), budget_s=0).run_async(None, {}, None, None), r"type NoneType \(callback\)"),
        (lambda: SessionOptions().add_free_dimension_override_by_name("rows", "3"), r"'3' is no extent \(rows\)"),
        (lambda: SessionOptions().add_free_dimension_override_by_denotation("BATCH", -1), r"-1 is no extent \(BATCH\)"),
    ):
        with pytest.raises(InputError, match=message):
            make()


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
        for closed_or_open in (m, dense("N")):  # one whose extents are open has no program before its first call
            with pytest.raises(InputError, match="no CUDA device"):
                InferenceSession(closed_or_open, providers=[("CUDAExecutionProvider", {"device_id": 1})], budget_s=0)


def test_session_options_give_the_number_of_threads():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = InferenceSession(dense(2), options, budget_s=0)
    assert session.program.threads == 1
    assert session.get_session_options() is options


def test_options_give_extents_numbers():
    m = dense("rows")
    m.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    named, denoted = SessionOptions(), SessionOptions()
    named.add_free_dimension_override_by_name("rows", 4)
    denoted.add_free_dimension_override_by_denotation("DATA_BATCH", 4)
    for options in (named, denoted):
        session = InferenceSession(m, options, budget_s=0)
        assert session.get_inputs()[0].shape == [4, 24]
        assert session.run(["y"], {"x": floats(4, 24)})[0].shape == (4, 8)
        with pytest.raises(InputError, match="wanted"):
            session.run(None, {"x": floats(5, 24)})
    assert m.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "rows"


def test_options_give_initializers(tmp_path):
    m, x, w = dense(3), floats(3, 24), floats(24, 40)
    options, theirs = SessionOptions(), onnxruntime.SessionOptions()
    options.add_initializer("w", OrtValue.ortvalue_from_numpy(w))
    held = onnxruntime.OrtValue.ortvalue_from_numpy(w)
    theirs.add_initializer("w", held)
    wanted = onnxruntime.InferenceSession(m.SerializeToString(), theirs).run(None, {"x": x})
    np.testing.assert_allclose(InferenceSession(m, options, budget_s=0).run(None, {"x": x})[0], wanted[0], rtol=1e-4, atol=1e-4)
    onnx.save_model(m, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    for take in (False, True):
        options = SessionOptions()
        options.add_initializer("w", OrtValue.ortvalue_from_numpy(w))
        if take:
            content = (tmp_path / "m.bin").read_bytes()
            (tmp_path / "m.bin").unlink()
            options.add_external_initializers_from_files_in_memory(["m.bin"], [content], [len(content)])
        found = InferenceSession(tmp_path / "m.onnx", options, budget_s=0).run(None, {"x": x})
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-4)


def test_options_are_kept_by_key_and_what_cannot_be_is_refused(caplog, tmp_path):
    options, run = SessionOptions(), RunOptions()
    options.add_session_config_entry("a", "1")
    run.add_run_config_entry("b", "2")
    assert (options.get_session_config_entry("a"), run.get_run_config_entry("b")) == ("1", "2")
    for kind in (ValueError, RuntimeError, InputError):
        with pytest.raises(kind, match="SessionOptions does not have configuration with key: none"):
            options.get_session_config_entry("none")
    with pytest.raises(InputError, match="RunOptions does not have configuration with key: none"):
        run.get_run_config_entry("none")
    with pytest.raises(UnsupportedError, match="adapters are not read"):
        run.add_active_adapter(None)
    with pytest.raises(UnsupportedError, match="libraries of custom operators are not run"):
        options.register_custom_ops_library("lib.so")
    options.optimized_model_filepath = str(tmp_path / "m.onnx")
    assert InferenceSession(dense(2), options, budget_s=0).run(["y"], {"x": floats(2, 24)}, run)[0].shape == (2, 8)
    assert "optimized_model_filepath: no model is written" in caplog.text


def test_names_and_defaults_are_onnxruntimes():
    theirs, ours = onnxruntime.SessionOptions(), SessionOptions()
    wanted = {k: getattr(theirs, k) for k in dir(theirs) if not k.startswith("_") and not callable(getattr(theirs, k))}
    assert {k: getattr(ours, k) for k in wanted} == {k: getattr(v, "value", v) for k, v in wanted.items()}
    for kind in ("GraphOptimizationLevel", "ExecutionMode"):
        found, wanted = getattr(tilewright.ort, kind), getattr(onnxruntime, kind)
        assert {n: int(v) for n, v in found.__members__.items()} == {n: v.value for n, v in wanted.__members__.items()}
    assert tilewright.ort.get_available_providers()[-1] == tilewright.ort.get_all_providers()[-1] == "CPUExecutionProvider"
    assert tilewright.ort.get_device() == ("GPU" if torch.cuda.is_available() else "CPU")


def test_options_in_a_models_metadata_count_where_the_environment_says_so(monkeypatch):
    m = dense(2)
    m.metadata_props.add(key="ort_config", value='{"session_options": {"intra_op_num_threads": 1, "inter_op_num_threads": 5}}')
    assert InferenceSession(m, budget_s=0).get_session_options() == SessionOptions()
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    session = InferenceSession(m, budget_s=0)
    assert session.get_session_options() == SessionOptions(intra_op_num_threads=1, inter_op_num_threads=5)
    assert session.program.threads == 1
    m.metadata_props[0].value = "[]"
    with pytest.raises(InputError, match="no options of a session"):
        InferenceSession(m, budget_s=0)


def test_a_profile_has_a_line_for_each_run(tmp_path):
    options = SessionOptions(enable_profiling=True, profile_file_prefix=str(tmp_path / "times"))
    session = InferenceSession(dense(2), options, budget_s=0)
    for _ in range(3):
        session.run(None, {"x": floats(2, 24)})
    path = session.end_profiling()
    events = json.loads(Path(path).read_text())
    assert [e["name"] for e in events] == ["session_initialization", "model_run", "model_run", "model_run"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["ph"] == "X" for e in events)
    assert str(session.get_profiling_start_time_ns()) in path
    assert InferenceSession(dense(2), budget_s=0).end_profiling() == ""


def test_providers_may_be_set_later():
    session = InferenceSession(dense(2), budget_s=0)
    before = session.program
    session.set_providers(["CPUExecutionProvider"])
    assert session.program is before
    with pytest.raises(RuntimeError, match="Unknown Provider Type: Other"):
        session.set_providers(["Other"])


def test_a_value_is_what_numpy_and_dlpack_read():
    x = floats(2, 3)
    held = OrtValue.ortvalue_from_numpy(x)
    assert np.asarray(held).ctypes.data == held.data_ptr() == x.ctypes.data
    assert np.asarray(held, np.float64).dtype == np.float64
    flags = OrtValue.from_dlpack(OrtValue.ortvalue_from_numpy(np.array([True, False])))
    assert (flags.data_type(), flags.numpy().tolist()) == ("tensor(bool)", [True, False])
    assert OrtValue.from_dlpack(held).data_ptr() == held.data_ptr()
    held.update_inplace(OrtValue.ortvalue_from_numpy(x * 2))
    assert OrtValue([x, x]).data_type() == "seq(tensor(float))"
    with pytest.raises(InputError, match="list is no tensor"):
        OrtValue([x]).data_ptr()


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
    both_of = [floats(2, 3), floats(2, 3)]
    add = helper.make_node("Add", ["a", "b"], ["c"])
    np.testing.assert_array_equal(backend.run_node(add, both_of, budget_s=0)[0], both_of[0] + both_of[1])
    np.testing.assert_array_equal(backend.Backend.run_node(add, both_of, opset_version=14)[0], both_of[0] + both_of[1])
    assert not backend.supports_device(3)
    for use, message in (
        (lambda: backend.prepare(3), r"an argument of type int \(model\)"),
        (lambda: backend.run_model(m, 3), r"an argument of type int \(inputs\)"),
        (lambda: backend.run_node(3, []), r"an argument of type int \(node\)"),
        (lambda: backend.run_node(add, 3), r"an argument of type int \(inputs\)"),
        (lambda: backend.run_node(add, both_of[:1]), r"2 inputs wanted, 1 given \(Add node\)"),
    ):
        with pytest.raises(InputError, match=message):
            use()
    with pytest.raises(InputError, match="no device 'TPU'"):
        backend.prepare(m, "TPU")
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    prepared = backend.prepare(m, budget_s=0)
    for rows in (1, 4):
        assert prepared.run([floats(rows, 3)])[0].shape == (rows, 3)


def test_a_model_whose_dims_must_be_equal_is_compiled_for_each_shape():
    nodes = [helper.make_node("Add", ["x", "z"], ["y"])]
    inputs = [value(name, TensorProto.FLOAT, (dim, 4)) for name, dim in (("x", "b"), ("z", "d"))]
    ours, theirs = both(model(nodes, inputs, {"y": TensorProto.FLOAT}))
    for rows in (3, 5):
        agree(ours, theirs, {"x": floats(rows, 4), "z": floats(rows, 4)})
