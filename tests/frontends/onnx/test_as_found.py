"""Models as exporters, tools and hubs leave them: what onnxruntime takes, though the format or its checker would not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from cli_programs import invoke
from onnx import TensorProto, helper
from onnx_models import BOOL, FLOAT, agrees, model, native, ours, read, tame, theirs, value

import tilewright
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load


def test_nodes_out_of_order_are_sorted():
    x = {"x": tame(2, 3)}
    nodes = [
        helper.make_node("Add", ["b", "a"], ["y"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Neg", ["x"], ["a"]),
    ]
    agrees(model(nodes, x, {"y": FLOAT}), x)


def test_nodes_that_only_a_branch_reads_come_before_it():
    x = {"x": tame(2, 3)}
    branch = helper.make_graph([helper.make_node("Abs", ["late"], ["r"])], "b", [], [value("r", FLOAT, [2, 3])])
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
        helper.make_node("Exp", ["x"], ["late"]),
    ]
    agrees(model(nodes, x, {"y": FLOAT}, {"c": np.array(True)}), x)


def test_an_extent_of_minus_one_is_open():
    m = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", FLOAT, [-1, 8])], {"y": FLOAT})
    assert read(m, input_dims={"x": (4, 8)}).inputs[0].shape == (4, 8)
    assert read(m, batch=3).inputs[0].shape == (3, 8)
    with pytest.raises(InputError, match="axis 0 has no size") as caught:
        read(m)
    assert "--input-dim @x 1 8 (or" in str(caught.value)


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("bik,bkj->bij", (1, 3, 5), (2, 5, 4)),
        ("bik,bkj->bij", (2, 3, 5), (1, 5, 4)),
        ("bik,bkj->bij", (2, 3, 1), (2, 5, 4)),
        ("ij,ij->", (1, 4), (3, 1)),
        ("...ij,...jk->...ik", (1, 3, 4), (2, 4, 5)),
        ("i,i->i", (1,), (1,)),
    ],
)
def test_an_einsum_repeats_axes_of_one(equation, a, b):
    x = {"a": tame(*a), "b": tame(*b)}
    agrees(model([helper.make_node("Einsum", ["a", "b"], ["y"], equation=equation)], x, {"y": FLOAT}), x)


def two_ways(shape=(), dtype=BOOL):
    """y = relu(x) @ w where the input `flag` says so, else x @ w."""
    w = np.eye(3, dtype=np.float32)
    ways = []
    for first in (helper.make_node("Relu", ["x"], ["t"]), helper.make_node("Identity", ["x"], ["t"])):
        nodes = [first, helper.make_node("MatMul", ["t", "w"], ["r"])]
        ways.append(helper.make_graph(nodes, "b", [], [value("r", FLOAT, [2, 3])]))
    nodes = [helper.make_node("If", ["flag"], ["y"], name="way", then_branch=ways[0], else_branch=ways[1])]
    return model(nodes, [value("x", FLOAT, [2, 3]), value("flag", dtype, shape)], {"y": FLOAT}, {"w": w})


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("flag", [True, False])
def test_a_fixed_input_decides_an_if(flag, shape):
    m, x = two_ways(shape), tame(2, 3)
    graph = load(m, LoadOptions(fixed={"flag": flag}))
    assert [n.op.label for n in graph.inputs] == ["x"]
    assert native(graph)
    wanted = theirs(m, {"x": x, "flag": np.full(shape, flag)})[0]
    np.testing.assert_allclose(ours(graph, {"x": x})[0], wanted, rtol=1e-6)
    compiled = tilewright.compile(m, fixed={"flag": flag}, budget_s=0, cache=False)
    np.testing.assert_allclose(compiled(x), wanted, rtol=1e-6)


def test_an_if_on_an_input_says_how_to_have_one_branch():
    notes = " ".join(load(two_ways()).notes)
    assert "its condition depends on 1 input ('flag'); a plan for one branch: --fix flag=true (fixed=" in notes


def test_what_cannot_be_fixed():
    m = two_ways()
    with pytest.raises(InputError, match="no input is called 'flug'") as caught:
        load(m, LoadOptions(fixed={"flug": True}))
    assert "'x', 'flag'" in str(caught.value)
    with pytest.raises(InputError, match=r"only an input of one element can be fixed, this is f32\[2,3\]"):
        load(m, LoadOptions(fixed={"x": 1.0}))
    with pytest.raises(InputError, match="3 is no value of pred"):
        load(m, LoadOptions(fixed={"flag": 3}))
    with pytest.raises(InputError, match="fixed value of 'flag'"):
        LoadOptions(fixed={"flag": "yes"})
    hlo = "HloModule m\nENTRY e {\n  ROOT p = f32[] parameter(0)\n}\n"
    name = load(hlo).inputs[0].op.label
    with pytest.raises(InputError, match="cannot be fixed here"):
        load(hlo, LoadOptions(fixed={name: 1.0}))


def test_fix_on_the_command_line(tmp_path):
    onnx.save(two_ways(), tmp_path / "m.onnx")
    result = invoke("read", tmp_path / "m.onnx", "--fix", "flag=false")
    assert result.exit_code == 0
    assert "call" not in result.output
    assert "flag" not in result.output
    for wrong in ("flag", "flag=maybe", "=1"):
        result = invoke("read", tmp_path / "m.onnx", "--fix", wrong)
        assert "is no NAME=VALUE with true, false or a number" in " ".join(result.output.split())


def test_inputs_give_open_axes_their_sizes(tmp_path):
    m = model(
        [helper.make_node("Add", ["x", "z"], ["y"])],
        [value("x", FLOAT, ["n", 3]), value("z", FLOAT, ["n", None])],
        {"y": FLOAT},
    )
    onnx.save(m, tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", x=tame(5, 3), z=tame(5, 1))
    result = invoke("run", tmp_path / "m.onnx", "--inputs", tmp_path / "in.npz", "--output", tmp_path / "o.npz", "--budget", 0)
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "o.npz")["y"].shape == (5, 3)


def external(folder, file="weights.data"):
    """A model in `folder` whose weight lies in `file` beside it."""
    w = tame(3, 4)
    m = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": tame(2, 3)}, {"y": FLOAT})
    tensor = m.graph.initializer.add(name="w", dims=w.shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=file)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(m, folder / "model.onnx")
    return folder / "model.onnx", w


def weight(graph):
    return next(n.op.data.tensor().numpy() for n in graph.nodes() if n.op.name == "const")


def test_links_that_stay_in_the_models_tree_are_followed(tmp_path):
    path, w = external(tmp_path / "m")
    (tmp_path / "m" / "data").mkdir()
    (tmp_path / "m" / "data" / "real").write_bytes(w.tobytes())
    (tmp_path / "m" / "weights.data").symlink_to("data/real")
    np.testing.assert_array_equal(weight(load(path)), w)


def test_the_hugging_face_cache_is_read(tmp_path):
    repository = tmp_path / "models--a--b"
    blobs = repository / "blobs"
    path, w = external(repository / "snapshots" / "0123" / "onnx")
    blobs.mkdir()
    (blobs / "aaa").write_bytes(path.read_bytes())
    (blobs / "bbb").write_bytes(w.tobytes())
    path.unlink()
    path.symlink_to("../../../blobs/aaa")
    (path.parent / "weights.data").symlink_to("../../../blobs/bbb")
    np.testing.assert_array_equal(weight(load(path)), w)


@pytest.mark.parametrize("through", ["file", "folder", "blobs"])
def test_links_that_leave_the_tree_need_a_flag(tmp_path, through):
    outside = tmp_path / "outside"
    outside.mkdir()
    if through == "file":
        path, w = external(tmp_path / "m")
        (path.parent / "weights.data").symlink_to(outside / "secret")
    elif through == "folder":
        path, w = external(tmp_path / "m", "sub/secret")
        (path.parent / "sub").symlink_to(outside, target_is_directory=True)
    else:
        path, w = external(tmp_path / "snapshots" / "1", "secret")
        (tmp_path / "blobs").symlink_to(outside, target_is_directory=True)
        (path.parent / "secret").symlink_to(tmp_path / "blobs" / "secret")
    (outside / "secret").write_bytes(w.tobytes())
    with pytest.raises(InputError, match="a symbolic link that leaves the model's folder") as caught:
        load(path)
    assert "--follow-links" in str(caught.value)
    np.testing.assert_array_equal(weight(load(path, LoadOptions(follow_links=True))), w)
    assert tilewright.compile(path, follow_links=True, budget_s=0, cache=False).source.outputs
    assert invoke("read", path).exit_code != 0
    assert invoke("read", path, "--follow-links").exit_code == 0


def test_a_loop_of_links_is_refused(tmp_path):
    path, _ = external(tmp_path / "m")
    (path.parent / "weights.data").symlink_to("weights.data")
    with pytest.raises(InputError, match="symbolic link"):
        load(path)


@pytest.mark.parametrize("name", ["model.ONNX", "model.pb", "model"])
def test_models_under_other_names(tmp_path, name):
    x = {"x": tame(2, 3)}
    m = model([helper.make_node("Relu", ["x"], ["y"])], x, {"y": FLOAT})
    (tmp_path / name).write_bytes(m.SerializeToString())
    np.testing.assert_array_equal(ours(load(tmp_path / name), x)[0], theirs(m, x)[0])


def test_another_protobuf_is_no_model(tmp_path):
    (tmp_path / "frozen.pb").write_bytes(b"\x0a\x10\x0a\x01x\x12\x0bPlaceholder")
    with pytest.raises(InputError, match="nothing here reads"):
        load(tmp_path / "frozen.pb")


def test_git_lfs_pointers_are_named(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    (tmp_path / "m.onnx").write_bytes(pointer)
    with pytest.raises(InputError, match="a git-lfs pointer, not the model it stands for") as caught:
        load(tmp_path / "m.onnx")
    assert "git lfs pull" in str(caught.value)
    path, _ = external(tmp_path / "with_data")
    (path.parent / "weights.data").write_bytes(pointer[:40])
    with pytest.raises(InputError, match=r"'weights\.data' is a git-lfs pointer"):
        load(path)


def test_another_batch_needs_another_compilation():
    m = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["n", 8])], {"y": FLOAT})
    program = tilewright.compile(m, batch=2, budget_s=0, cache=False)
    with pytest.raises(tilewright.TilewrightError, match=r"shape \[3, 8\] given, f32\[2,8\] wanted") as caught:
        program(torch.zeros(3, 8))
    assert "compile another with these (batch=, input_dims=)" in str(caught.value)


def test_an_operator_set_that_onnx_has_not_yet_is_named():
    m = model([helper.make_node("SimplifiedNothing", ["x"], ["y"])], {"x": tame(2)}, {"y": FLOAT})
    with pytest.raises(UnsupportedError, match="no operator 'SimplifiedNothing' in ONNX's operator set 21"):
        read(m)
