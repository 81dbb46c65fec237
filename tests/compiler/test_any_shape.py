"""Programs for ranges: an encoder layer from ONNX with open batch and length, beside onnxruntime."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from in_threads import in_threads
from onnx import TensorProto, helper
from onnx_models import model, theirs, value

import tilewright
from tilewright import any_shape, deadline, ranged
from tilewright.any_shape import AnyShape
from tilewright.candidates.llvm.runtime import engine
from tilewright.compiler import compile
from tilewright.dtype import F32
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.ir.build import input_, slice_
from tilewright.ir.dims import Dim, Scope
from tilewright.ir.graph import Graph
from tilewright.runtime import background
from tilewright.schedule import chooser, packed, search, space, tuning_database
from tilewright.schedule.cache import Cache
from tilewright.schedule.candidate import plan_for
from tilewright.schedule.problem import Problem

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
    ahead = program.made
    assert ahead == 1  # of the middle
    for batch, length in SHAPES:
        given = arrays(batch, length)
        found = program(**given)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, theirs(onnx_model, given)[0], rtol=1e-4, atol=1e-4)
    assert (program.compiled, program.made - ahead) == (1, len(SHAPES))
    program(*arrays(5, 33).values())
    assert program.made - ahead == len(SHAPES)
    one = program.at(batch=2, length=16)
    concrete = compile(onnx_model, input_dims={"x": (2, 16, HIDDEN), "mask": (2, 16)}, budget_s=0)
    assert len(one.steps) == len(concrete.steps)
    assert one.source.outputs[0].type == concrete.source.outputs[0].type
    assert "batch 1..8, length 1..64" in repr(program)


def test_instances_near_each_other_are_cut_into_the_same_parts(monkeypatch):
    """The nodes that run together are found for one shape, and again far from it."""
    cut, onnx_model = [], encoder()
    real = any_shape.parts_for
    monkeypatch.setattr(any_shape, "parts_for", lambda graph, target: (cut.append(graph), real(graph, target))[1])
    program = compile(onnx_model, dims={"batch": (1, 8), "length": Dim("length", 1, 256)}, budget_s=0)
    for batch, length in ((2, 5), (3, 7), (2, 31), (8, 6)):
        given = arrays(batch, length)
        np.testing.assert_allclose(program(**given), theirs(onnx_model, given)[0], rtol=1e-4, atol=1e-4)
        of_shape = compile(onnx_model, input_dims={"x": (batch, length, HIDDEN), "mask": (batch, length)}, budget_s=0)
        parts = [s.part for s in program.at(batch=batch, length=length).steps]
        assert [(p.kind, [n.type for n in p.outputs]) for p in parts] == [
            (s.part.kind, [n.type for n in s.part.outputs]) for s in of_shape.steps
        ]
    assert len(cut) == 1
    program.at(batch=2, length=200)
    assert len(cut) == 2
    program.at(batch=1, length=1)
    assert len(cut) == 3


def rows_of_a_product(monkeypatch):
    """A program of one large product for 1 to 4,096 rows, and the rows that its kernels were checked with so far."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    onnx_model = model(nodes, [value("x", TensorProto.FLOAT, ["n", 64])], {"y": TensorProto.FLOAT}, {"w": weights(64, 96)})
    checked = []
    for module in (ranged, tuning_database):

        def counted(problem, *args, real=module.search, **kwargs):
            if isinstance(problem, Problem):  # not what is left behind the calls of other tests
                checked.append(problem.M)
            return real(problem, *args, **kwargs)

        monkeypatch.setattr(module, "search", counted)
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "1")  # what an earlier process checked, too
    return onnx_model, compile(onnx_model, dims={"n": (1, 4096)}, budget_s=0), checked


def test_a_code_is_checked_at_few_rows_before_a_call_and_as_called_behind_it(monkeypatch):
    onnx_model, program, checked = rows_of_a_product(monkeypatch)
    background.wait_behind()
    checked.clear()
    for rows in (4000, 3500, 3000, 2600, 2500):
        x = weights(rows, 64)
        np.testing.assert_allclose(program(x), theirs(onnx_model, {"x": x})[0], rtol=1e-4, atol=1e-4)
    background.wait_behind()
    assert len(checked) <= 1 + ranged.CHECKED
    assert min(checked) < 1000
    assert 4000 in checked


def generated():
    return next(c for c in any_shape.discover() if c.name == "llvm")


def test_what_an_earlier_process_checked_is_not_checked_again(monkeypatch, tmp_path):
    monkeypatch.setattr("tilewright.compiler.user_cache", lambda: Cache(tmp_path))
    _, program, checked = rows_of_a_product(monkeypatch)
    program.at(n=4000)
    background.wait_behind()
    assert checked
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "0")
    checked.clear()
    again = compile(program.source, dims=True, budget_s=0)
    one = again.at(n=4000)
    background.wait_behind()
    assert not checked
    assert one.steps[0].decision.elsewhere == ""


def spoilt_for_many_rows(monkeypatch, spoil):
    """A program whose code for ranges is wrong for more than 1,000 rows alone, and the checks that wait behind its calls."""
    made_by = generated()

    def spoilt(problem, target, schedule):
        made = made_by.ranged(problem, target, schedule)

        def kernel(problem, values):
            found = made(problem, values)
            if values["n"] <= 1000:
                return found

            def prepare(constants):
                runner = found.prepare(constants)
                return lambda sources: [spoil(t) for t in runner(sources)]

            return replace(found, prepare=prepare)

        return kernel

    others = [replace(c, ranged=spoilt) if c.name == "llvm" else c for c in any_shape.discover()]
    for module in (any_shape, chooser, search, space):
        monkeypatch.setattr(module, "discover", lambda **_: others)
    onnx_model, program, _ = rows_of_a_product(monkeypatch)
    waiting = []
    monkeypatch.setattr(ranged, "behind", waiting.append)
    return onnx_model, program, waiting


def one_element_more(t):
    t[1717, 13] += 1
    return t


def test_a_code_that_is_wrong_behind_the_calls_serves_no_shape_any_more(monkeypatch, caplog):
    """One wrong element of 384,000 is found where all are looked at; programs that somebody holds have other kernels then."""
    onnx_model, program, waiting = spoilt_for_many_rows(monkeypatch, one_element_more)
    x, key = weights(4000, 64), (("n", 4000),)
    small, large = program.at(n=16), program.at(n=4000)
    with caplog.at_level("WARNING", "tilewright"):
        large(x)
        assert not caplog.text
        program._special[key] = large.steps  # put aside, as for a shape that has kernels of its own
        for check in waiting:
            check()
    assert "a kernel for ranges is given up, results of earlier calls may be wrong" in caplog.text
    wanted = theirs(onnx_model, {"x": x})[0]
    np.testing.assert_allclose(large(x), wanted, rtol=1e-4, atol=1e-4)
    large.swap(program._special[key])
    np.testing.assert_allclose(large(x), wanted, rtol=1e-4, atol=1e-4)
    assert program.at(n=4000) is large
    assert large.steps[0].decision.elsewhere == ""
    assert program.at(n=16) is small
    given = {"x": weights(900, 64)}
    np.testing.assert_allclose(program(**given), theirs(onnx_model, given)[0], rtol=1e-4, atol=1e-4)


def test_a_first_call_far_from_what_was_checked_gives_no_wrong_result(monkeypatch, caplog):
    onnx_model, program, waiting = spoilt_for_many_rows(monkeypatch, lambda t: t + 1)
    x = weights(4000, 64)
    with caplog.at_level("WARNING", "tilewright"):
        found = program(x)
    np.testing.assert_allclose(found, theirs(onnx_model, {"x": x})[0], rtol=1e-4, atol=1e-4)
    assert "and a result of the reference taken in place of its: f32[4000,64] @ f32[64,96]: result 0 is wrong at" in caplog.text
    for check in waiting:
        check()
    np.testing.assert_allclose(program(x), found, rtol=1e-4, atol=1e-4)


def test_a_report_says_at_which_shapes_a_code_was_checked(monkeypatch):
    _, program, _ = rows_of_a_product(monkeypatch)
    background.wait_behind()
    waiting = []
    monkeypatch.setattr(ranged, "behind", waiting.append)
    one = program.at(n=4000)
    assert one.steps[0].decision.elsewhere.startswith("at f32[")
    assert "elements" not in one.steps[0].decision.elsewhere
    assert not one._in_chains  # its results are looked at
    one(weights(4000, 64))
    assert one.steps[0].decision.elsewhere.endswith("; some elements of a call at its own") and one._in_chains
    assert "predicted), checked at f32[" in " ".join(str(one.explain()).split())
    assert "The kernel serves several shapes, and all elements were checked at others" in str(one.perf())
    for check in waiting:
        check()
    assert one.steps[0].decision.elsewhere == ""
    assert "checked at" not in str(one.explain())


def measured_product():
    """A product of open rows, as ONNX and compiled, measured in the middle of its range: that serves the shapes near it."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    onnx_model = model(nodes, [value("x", TensorProto.FLOAT, ["n", 64])], {"y": TensorProto.FLOAT}, {"w": weights(64, 96)})
    program = compile(onnx_model, dims={"n": (1, 256)}, budget_s=0.5, background=True)
    program.at(n=16).wait()
    return onnx_model, program


def test_a_shape_that_is_called_often_is_given_kernels_of_its_own_behind_the_calls(monkeypatch):
    """They win every race here; the shape that was called longest ago has the ones for ranges back."""
    monkeypatch.setattr(any_shape, "SPECIAL", 1)
    onnx_model, program = measured_product()
    real = chooser.search

    def won_by_the_last(problem, target, *, candidates, **kwargs):
        found = real(problem, target, candidates=candidates, **kwargs)
        if len(candidates) < 2:
            return found
        assert [c.name.rpartition(" for ")[2] for c in candidates] == ["ranges", "one shape"]
        return replace(found, rejected=(search.Rejected(candidates[0].name, "slower", "slower"),), measured=True, time_us=1.0)

    monkeypatch.setattr(chooser, "search", won_by_the_last)
    kernels = {}
    for rows in (40, 90):
        given = {"x": weights(rows, 64)}
        wanted = theirs(onnx_model, given)[0]
        program(**given)
        before = program.at(n=rows).steps[0].decision.kernel
        for _ in range(any_shape.MET):
            np.testing.assert_allclose(program(**given), wanted, rtol=1e-4, atol=1e-4)
        program.at(n=rows).wait()
        np.testing.assert_allclose(program(**given), wanted, rtol=1e-4, atol=1e-4)
        kernels[rows] = before, program.at(n=rows).steps[0].decision.kernel
    first, last = kernels[40], kernels[90]
    assert last[1] is not last[0]
    assert program.at(n=90).steps[0].decision.kernel is last[1]
    assert first[1] is not first[0]
    assert program.at(n=40).steps[0].decision.kernel is first[0]


def without_ranges(monkeypatch):
    """Candidates as on a GPU, where no code is for ranges."""
    for module in (any_shape, chooser, search, space):
        found = [replace(c, ranged=None) for c in module.discover()]
        monkeypatch.setattr(module, "discover", lambda found=found, **_: found)


def test_a_shape_that_is_called_often_is_measured_where_no_code_is_for_ranges(monkeypatch):
    """Until then it takes the point of a shape near."""
    without_ranges(monkeypatch)
    onnx_model, program = measured_product()
    given = {"x": weights(40, 64)}
    wanted = theirs(onnx_model, given)[0]
    program(**given)
    assert not program.at(n=40).steps[0].decision.measured
    for _ in range(any_shape.MET):
        np.testing.assert_allclose(program(**given), wanted, rtol=1e-4, atol=1e-4)
    program.at(n=40).wait()
    np.testing.assert_allclose(program(**given), wanted, rtol=1e-4, atol=1e-4)
    now = program.at(n=40).steps[0].decision
    assert now.measured
    assert now.time_us > 0


def test_two_points_for_one_shape_race_as_in_any_search(monkeypatch):
    without_ranges(monkeypatch)
    _, program = measured_product()
    before = program.at(n=40).steps[0].decision
    problem = before.problem
    schedules = plan_for(generated(), problem, program.target).schedules()
    other = next(s for s in schedules if s != before.kernel.schedule)
    found = tuning_database.repeat(problem, program.target, "llvm", other, {})
    raced, real = [], chooser.search

    def noted(problem, target, *, candidates, **how):
        raced.append([next(iter(plan_for(c, problem, target).schedules())) for c in candidates])
        return real(problem, target, candidates=candidates, **how)

    monkeypatch.setattr(chooser, "search", noted)
    choice = chooser.Raced(lambda problem, weights: found, {problem: before}, (), program.target)
    won = choice(problem, {})
    assert raced == [[before.kernel.schedule, other]]
    assert won.kernel in (before.kernel, found.kernel)
    assert won.measured
    same = replace(found, measured=True, time_us=3.0)
    assert chooser.Raced(lambda problem, weights: same, {problem: found}, (), program.target)(problem, {}) is same
    assert not chooser.Raced(lambda problem, weights: found, {problem: same}, (), program.target)(problem, {}).measured


def test_a_kernel_for_ranges_stays_where_it_wins_the_race(monkeypatch):
    _, program = measured_product()
    real = chooser.search

    def won_by_the_first(problem, target, *, candidates, **kwargs):
        found = real(problem, target, candidates=candidates, **kwargs)
        if len(candidates) < 2:
            return found
        return replace(found, rejected=(search.Rejected(candidates[1].name, "slower", "slower"),), measured=True, time_us=1.0)

    monkeypatch.setattr(chooser, "search", won_by_the_first)
    given = {"x": weights(40, 64)}
    program(**given)
    before = program.at(n=40).steps[0].decision.kernel
    for _ in range(any_shape.MET):
        program(**given)
    program.at(n=40).wait()
    assert program.at(n=40).steps[0].decision.kernel is before
    assert program.at(n=40).steps[0].decision.time_us == 1.0


def test_a_program_for_ranges_is_neither_pickled_nor_copied():
    program = compile(encoder(), dims={"batch": (1, 8), "length": (1, 64)}, budget_s=0)
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UnsupportedError, match=r"is neither pickled nor copied[^$]*program\.at\(batch=\d+, length=\d+\)"):
            use(program)
    one, given = program.at(batch=2, length=7), arrays(2, 7)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(one))(**given), program(**given))
    assert "Whole program" in str(program.perf(batch=2, length=7))


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
    in_threads(4, lambda _: found.append(program(**given)))
    assert program.made == 1
    assert len(found) == 4
    assert all((f == found[0]).all() for f in found)


def test_a_shape_is_measured_for_as_long_as_is_asked_for_it():
    """Whatever time compiling had."""
    program = compile(encoder(), dims={"batch": (1, 8), "length": (2, 64)}, budget_s=0)
    measured = [s.decision.measured for s in program.measured(0.5, batch=2, length=4).steps if s.decision is not None]
    assert any(measured) and not any(s.decision.measured for s in program.at(batch=3, length=11).steps if s.decision)


def test_what_does_not_fit_is_refused(monkeypatch):
    program = compile(encoder(), dims={"batch": (1, 8), "length": (2, 64)}, budget_s=0)
    given = arrays(3, 11)
    with monkeypatch.context() as patched:
        patched.setattr(any_shape, "values_for", lambda *_: pytest.fail("worked out what two axes say"))
        assert program(given["x"], given["mask"]).shape[:2] == (3, 11) and program.made == 1
    with pytest.raises(InputError, match=r"axis 0 is 9, outside batch 1\.\.8"):
        program(**arrays(9, 9))
    with pytest.raises(InputError, match=r"axis 1 is 1, outside length 2\.\.64"):
        program(**arrays(2, 1))
    with pytest.raises(InputError, match="axis 1 is 8, and length is 11 here"):
        program(given["x"], given["mask"][:, :8])
    with pytest.raises(InputError, match="no value for input 'mask'"):
        program(given["x"])
    with pytest.raises(InputError, match="wanted"):
        program(given["x"][0], given["mask"])
    with pytest.raises(InputError, match="no value for dim 'length'"):
        program.at(batch=2)
    with pytest.raises(InputError, match=r"3 values for 2 dims \(.*\)\n  try: there are batch, length"):
        program.at(3, 11, 1)
    assert program.at(3, 11) is program.at(3, length=11) is program.at(length=11, batch=3)
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


def test_a_budget_that_is_over_leaves_no_shape_to_the_reference(monkeypatch):
    """Nor those near it: what the cost model names first is built in place of what is there at once."""
    monkeypatch.setattr(deadline.Budget, "over", lambda self: True)
    monkeypatch.setattr(deadline.Budget, "left_s", lambda self: 0.0)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    onnx_model = model(nodes, [value("x", TensorProto.FLOAT, ["n", 64])], {"y": TensorProto.FLOAT}, {"w": weights(64, 96)})
    program = compile(onnx_model, dims={"n": (1, 64)}, budget_s=1)
    for rows in (8, 5, 60):
        given = {"x": weights(rows, 64)}
        np.testing.assert_allclose(program(**given), theirs(onnx_model, given)[0], rtol=1e-4, atol=1e-4)
        assert [s.decision.kernel.candidate for s in program.at(n=rows).steps] == ["llvm"]
