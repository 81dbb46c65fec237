"""Programs for ranges: an encoder layer from ONNX with open batch and length, beside onnxruntime."""

import threading

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx_models import model, theirs, value

import tilewright
from tilewright import any_shape
from tilewright.any_shape import AnyShape
from tilewright.candidates.llvm.runtime import engine
from tilewright.compiler import compile
from tilewright.dtype import F32
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.ir.build import input_, slice_
from tilewright.ir.dims import Dim, Scope
from tilewright.ir.graph import Graph
from tilewright.schedule import packed

HIDDEN, HEADS = 16, 2
_rng = np.random.default_rng(5)


def weights(*shape):
    return _rng.standard_normal(shape).astype(np.float32) / 4


def encoder(length="length"):
    """A layer as exporters write it: heads by Shape, Gather, Concat and Reshape; a mask of lengths; a norm; places by Range."""
    n = helper.make_node
    nodes = [
        n("Shape", ["x"], ["shape"]),
        n("Gather", ["shape", "zero"], ["batch"], axis=0),
        n("Gather", ["shape", "one"], ["len"], axis=0),
        n("Range", ["zero0", "len", "one0"], ["places"]),
        n("Cast", ["places"], ["places32"], to=TensorProto.FLOAT),
        n("Unsqueeze", ["places32", "last"], ["column"]),
        n("Add", ["x", "column"], ["placed"]),
        n("Unsqueeze", ["len", "zeros"], ["len1"]),
        n("Unsqueeze", ["batch", "zeros"], ["batch1"]),
        n("Concat", ["batch1", "len1", "heads", "minus"], ["apart"], axis=0),
        n("Concat", ["batch1", "len1", "hidden"], ["together"], axis=0),
        *(
            node
            for p in "qkv"
            for node in (
                n("MatMul", ["placed", f"w{p}"], [f"m{p}"]),
                n("Reshape", [f"m{p}", "apart"], [f"r{p}"]),
                n("Transpose", [f"r{p}"], [p], perm=[0, 2, 3, 1] if p == "k" else [0, 2, 1, 3]),
            )
        ),
        n("MatMul", ["q", "k"], ["scores"]),
        n("Unsqueeze", ["mask", "middle"], ["mask4"]),
        n("Where", ["mask4", "scores", "low"], ["masked"]),
        n("Softmax", ["masked"], ["weights"], axis=-1),
        n("MatMul", ["weights", "v"], ["heads_out"]),
        n("Transpose", ["heads_out"], ["turned"], perm=[0, 2, 1, 3]),
        n("Reshape", ["turned", "together"], ["joined"]),
        n("MatMul", ["joined", "wo"], ["out"]),
        n("Add", ["out", "x"], ["sum"]),
        n("LayerNormalization", ["sum", "scale"], ["y"], axis=-1),
    ]
    whole = {"zero": 0, "one": 1, "zero0": 0, "one0": 1}
    constants = {k: np.array(v, np.int64) for k, v in whole.items()}
    constants |= {k: np.array([v], np.int64) for k, v in (("zeros", 0), ("last", -1), ("heads", HEADS), ("minus", -1))}
    constants |= {"hidden": np.array([HIDDEN], np.int64), "middle": np.array([1, 2], np.int64)}
    constants |= {"low": np.array(-1e30, np.float32), "scale": weights(HIDDEN)}
    constants |= {f"w{p}": weights(HIDDEN, HIDDEN) for p in "qkvo"}
    inputs = [value("x", TensorProto.FLOAT, ["batch", length, HIDDEN]), value("mask", TensorProto.BOOL, ["batch", length])]
    return model(nodes, inputs, {"y": TensorProto.FLOAT}, constants)


def arrays(batch, length, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((batch, length)) < 0.7
    mask[:, 0] = True
    return {"x": rng.standard_normal((batch, length, HIDDEN)).astype(np.float32), "mask": mask}


SHAPES = ((1, 1), (1, 7), (3, 1), (2, 16), (5, 33), (2, 31))


def test_one_compile_serves_every_shape_as_onnxruntime_does():
    onnx_model = encoder()
    program = compile(onnx_model, dims={"batch": (1, 8), "length": Dim("length", 1, 64)}, budget_s=0)
    assert isinstance(program, AnyShape)
    assert program.dims == {"batch": Dim("batch", 1, 8), "length": Dim("length", 1, 64)}
    for batch, length in SHAPES:
        given = arrays(batch, length)
        found = program(**given)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, theirs(onnx_model, given)[0], rtol=1e-4, atol=1e-4)
    assert (program.compiled, program.made) == (1, len(SHAPES))
    program(*arrays(5, 33).values())
    assert program.made == len(SHAPES)
    one = program.at(batch=2, length=16)
    concrete = compile(onnx_model, input_dims={"x": (2, 16, HIDDEN), "mask": (2, 16)}, budget_s=0)
    assert len(one.steps) == len(concrete.steps)
    assert one.source.outputs[0].type == concrete.source.outputs[0].type
    assert "batch 1..8, length 1..64" in repr(program)


def test_instances_near_each_other_are_cut_into_the_same_parts(monkeypatch):
    """Which nodes run together is found out for one shape, and again far from it."""
    cut, onnx_model = [], encoder()
    real = any_shape.parts_for
    monkeypatch.setattr(any_shape, "parts_for", lambda graph, target: (cut.append(graph), real(graph, target))[1])
    program = compile(onnx_model, dims={"batch": (1, 8), "length": Dim("length", 1, 64)}, budget_s=0)
    for batch, length in ((2, 5), (3, 7), (2, 31), (8, 6)):
        given = arrays(batch, length)
        np.testing.assert_allclose(program(**given), theirs(onnx_model, given)[0], rtol=1e-4, atol=1e-4)
        of_shape = compile(onnx_model, input_dims={"x": (batch, length, HIDDEN), "mask": (batch, length)}, budget_s=0)
        parts = [s.part for s in program.at(batch=batch, length=length).steps]
        assert [(p.kind, [n.type for n in p.outputs]) for p in parts] == [
            (s.part.kind, [n.type for n in s.part.outputs]) for s in of_shape.steps
        ]
    assert len(cut) == 1
    program.at(batch=2, length=64)
    assert len(cut) == 2
    program.at(batch=1, length=1)
    assert len(cut) == 3


def test_a_program_for_ranges_says_how_one_for_a_shape_is_saved(tmp_path):
    program = compile(encoder(), dims={"batch": (1, 8), "length": (1, 64)}, budget_s=0)
    with pytest.raises(UnsupportedError, match=r"with open extents is not saved[^$]*program\.at\(batch=\d+, length=\d+\)"):
        program.save(tmp_path / "open.twp")
    program.at(batch=2, length=7).save(tmp_path / "one.twp")
    given = arrays(2, 7)
    np.testing.assert_array_equal(tilewright.load_program(tmp_path / "one.twp")(**given), program(**given))


@pytest.mark.parametrize(
    ("nodes", "rows"),
    [
        ([("Max", ["s", "two"], ["m"])], (5, 1, 2)),
        ([("Equal", ["s", "four"], ["g"]), ("Where", ["g", "one", "s"], ["m"])], (5, 4, 1)),
        (None, (5, 1)),
    ],
    ids=["max", "where", "squeeze"],
)
def test_what_a_program_asks_of_its_extents_is_not_taken_for_granted(nodes, rows):
    """A shape for which its own comparisons come out otherwise is read anew, 1 too; of a rule's, 1 is no case of its own."""
    n = helper.make_node
    if nodes is None:
        made = [n("Squeeze", ["x"], ["y"])]
    else:
        made = [n("Shape", ["x"], ["s"], end=1), *(n(*node) for node in nodes)]
        made += [n("Concat", ["m", "four"], ["sh"], axis=0), n("ConstantOfShape", ["sh"], ["y"])]
    constants = {k: np.array([v], np.int64) for k, v in (("one", 1), ("two", 2), ("four", 4))}
    onnx_model = model(made, [value("x", TensorProto.FLOAT, ["b", 8])], {"y": TensorProto.FLOAT}, constants)
    program = compile(onnx_model, dims={"b": (1, 64)}, budget_s=0)
    for b in rows:
        given = {"x": weights(b, 8)}
        np.testing.assert_array_equal(program(**given), theirs(onnx_model, given)[0])


def test_a_constant_of_open_extents_is_packed_for_each():
    """Means over the rows so far: a triangle that is as large as the batch."""

    class Means(torch.nn.Module):
        def forward(self, x):
            return torch.tril(torch.ones(x.shape[0], x.shape[0])) @ x

    program = compile(Means(), example_inputs=(torch.randn(4, 8),), dims={"x.0": (1, 512)}, budget_s=0)
    for rows in (3, 1, 16, 300, 64, 10):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(program(x), x.cumsum(0), rtol=1e-4, atol=1e-4)


def test_all_instances_share_one_packing(monkeypatch):
    made = []
    once = packed.all_packed_once

    def counted(sources, form, count, pack):
        return once(sources, form, count, lambda: made.append(form) or pack())

    monkeypatch.setattr(packed, "all_packed_once", counted)
    program = compile(encoder(), dims={"batch": (1, 8), "length": (1, 64)}, budget_s=0)
    program(**arrays(2, 5))
    first = len(made)
    program(**arrays(3, 20))
    program(**arrays(8, 64))
    assert first > 0
    assert len(made) == first


def test_what_was_measured_serves_shapes_near_it():
    onnx_model = encoder()
    program = compile(onnx_model, dims={"batch": (2, 4), "length": (8, 32)}, budget_s=2)
    made = program.made  # of the middle, and of others as far as there was time
    assert program.compiled == 1
    assert made >= 1
    given = arrays(3, 19)
    np.testing.assert_allclose(program(**given), theirs(onnx_model, given)[0], rtol=1e-4, atol=1e-4)
    assert program.made == made + 1
    for before, now in zip(
        program.at(**Scope(program.dims).within(0.5)).steps, program.at(batch=3, length=19).steps, strict=True
    ):
        if before.decision is not None and before.decision.measured:
            assert before.decision.kernel.candidate == now.decision.kernel.candidate


def test_a_shape_like_others_compiles_nothing_and_its_program_is_saved_and_read(monkeypatch, tmp_path):
    onnx_model = encoder()
    program = compile(onnx_model, dims={"batch": (1, 8), "length": (1, 64)}, budget_s=0)
    for batch, length in ((2, 30), (3, 24), (4, 18), (3, 19), (5, 20), (2, 60)):
        program(**arrays(batch, length))
    with monkeypatch.context() as patched:
        patched.setattr(engine, "object_code", lambda text: pytest.fail("compiled"))
        for batch, length in ((3, 21), (4, 17), (2, 37), (5, 19)):
            given = arrays(batch, length)
            np.testing.assert_allclose(program(**given), theirs(onnx_model, given)[0], rtol=1e-4, atol=1e-4)
    one, given = program.at(batch=3, length=21), arrays(3, 21)
    one.save(tmp_path / "one.twp")
    np.testing.assert_array_equal(tilewright.load_program(tmp_path / "one.twp")(**given), one(**given))


def test_a_shape_for_which_rules_decide_otherwise_is_compiled_anew_and_so_are_none_like_it():
    n = helper.make_node
    nodes = [n("Slice", ["x", "zero", "ten", "axis"], ["y"])]
    constants = {"zero": np.array([0], np.int64), "ten": np.array([10], np.int64), "axis": np.array([0], np.int64)}
    first = model(nodes, [value("x", TensorProto.FLOAT, ["n", 4])], {"y": TensorProto.FLOAT}, constants)
    program = compile(first, dims={"n": (1, 64)}, budget_s=0)
    for rows in (40, 11, 3, 4, 9, 10, 50):
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        np.testing.assert_array_equal(program(x), x[:10])
    assert program.compiled == 2
    assert len(program.guards) == 2


def test_calls_from_several_threads_make_one_instance():
    program = compile(encoder(), dims=True, budget_s=0)
    given, found = arrays(2, 9), []
    threads = [threading.Thread(target=lambda: found.append(program(**given))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert program.made == 1
    assert len(found) == 4
    assert all((f == found[0]).all() for f in found)


def test_what_does_not_fit_is_refused():
    program = compile(encoder(), dims={"batch": (1, 8), "length": (2, 64)}, budget_s=0)
    given = arrays(2, 9)
    with pytest.raises(InputError, match=r"axis 0 is 9, outside batch 1\.\.8"):
        program(**arrays(9, 9))
    with pytest.raises(InputError, match=r"axis 1 is 1, outside length 2\.\.64"):
        program(**arrays(2, 1))
    with pytest.raises(InputError, match="axis 1 is 8, and length is 9 here"):
        program(given["x"], given["mask"][:, :8])
    with pytest.raises(InputError, match="no value for input 'mask'"):
        program(given["x"])
    with pytest.raises(InputError, match="wanted"):
        program(given["x"][0], given["mask"])
    with pytest.raises(InputError, match="no value for dim 'length'"):
        program.at(batch=2)
    with pytest.raises(InputError, match="batch = 0 is outside"):
        program.at(batch=0, length=4)
    with pytest.raises(InputError, match="has no size"):
        compile(encoder(), dims={"batch": (1, 8)}, budget_s=0)
    with pytest.raises(UnsupportedError, match="extents are open"):
        quantization = tilewright.Quantization(tilewright.scheme("int8"), [arrays(2, 9)])
        compile(encoder(), dims=True, quantize=quantization, budget_s=0)


def test_names_that_texts_do_not_have_are_spelt_for_them():
    graph = load(encoder("token count"), LoadOptions(dims={"batch": (1, 8), "token count": (1, 64)}))
    assert str(graph.inputs[0].type) == "f32[batch,token_count,16]"
    sums = load(encoder("past + new"), LoadOptions(dims={"batch": (1, 8), "past": (0, 8), "new": (1, 8)}))
    assert str(sums.inputs[1].type) == "pred[batch,new + past]"


def test_a_graph_is_taken_with_its_dims():
    scope = Scope()
    x = input_("x", F32, (scope.extent(Dim("n", 2, 9)), 3))
    program = compile(Graph("g", (x,), (slice_(x, 0, 1, x.shape[0]),), ("y",)), dims=True, budget_s=0)
    assert torch.equal(program(torch.arange(12.0).reshape(4, 3)), torch.arange(12.0).reshape(4, 3)[1:])


def test_shapes_to_measure_lie_within_the_ranges():
    scope = Scope({"a": Dim("a", 1, 64), "b": Dim("b", 8, 512, 8)})
    assert scope.within(0.5) == {"a": 8, "b": 64}
    assert scope.within(0.0) == {"a": 1, "b": 8}
    assert scope.within(1.0) == {"a": 64, "b": 512}
    unbounded = Scope({"a": Dim("a", 1), "b": Dim("b", 300)})
    assert unbounded.within(0.5) == {"a": 16, "b": 300}
