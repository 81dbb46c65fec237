"""Inputs that programs are run on: domains of random data, fills, archives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_programs import block

from tilewright.dtype import BF16, BY_NAME, F32, PRED, S4, S8, S32, S64, U8, DType
from tilewright.errors import InputError
from tilewright.ir.build import const, convert, input_, map_, reshape, slice_, transpose
from tilewright.ir.graph import Graph, Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Call, Concat, Dequantize, Gather, Quantize, Select, gemm
from tilewright.ir.types import TensorType
from tilewright.report.measure.domains import Domain, domains
from tilewright.report.measure.inputs import check_memory, make_feeds, read_npz, write_npz


def program(*outputs: Node, inputs: tuple[Node, ...]) -> Graph:
    return Graph("g", inputs, outputs, tuple(f"o{i}" for i in range(len(outputs))))


def test_indices_stay_within_the_smallest_thing_they_pick_from() -> None:
    ids = input_("ids", S64, (3, 4))
    large, small = input_("large", F32, (50, 8)), input_("small", F32, (8, 7))
    moved = transpose(reshape(convert(ids, S32), (4, 3)), (1, 0))
    clipped = Node(Select(), map_("less", moved, const(0, S32)), const(0, S32), moved)
    graph = program(Node(Gather(0), large, clipped), Node(Gather(1), small, slice_(ids, 0, 0, 1)), inputs=(ids, large, small))
    found = domains(graph)
    assert found[ids] == Domain("index", 7) and str(found[ids]) == "random indices 0 to 6"
    assert found[large] == found[small] == Domain()
    drawn = {f.shown.name: f.value for f in make_feeds(graph)}["ids"]
    assert drawn.dtype == torch.int64 and int(drawn.min()) >= 0 and int(drawn.max()) < 7 and len(drawn.unique()) > 2


def test_elementwise_gathers_pick_along_their_axis_and_ids_may_be_joined() -> None:
    a, b = input_("a", S32, (2, 3)), input_("b", S32, (2, 1))
    x = input_("x", F32, (2, 9))
    graph = program(Node(Gather(1, elementwise=True), x, Node(Concat(1), a, b)), inputs=(a, b, x))
    assert domains(graph)[a] == domains(graph)[b] == Domain("index", 9)


def test_masks_are_compared_converted_or_handed_on() -> None:
    a, b, c = (input_(n, S64, (6, 20)) for n in "abc")
    opaque = Node(Call("nobody", "Op", "{}", (TensorType(F32, (2,)),)), c)
    graph = program(map_("equal", a, const(0, S64)), convert(b, F32), opaque, inputs=(a, b, c))
    assert set(domains(graph).values()) == {Domain("mask")}
    for feed in make_feeds(graph):
        assert feed.shown.data == "random padding mask of 0 and 1"
        rows = feed.value
        assert bool((rows[:, 1:] <= rows[:, :-1]).all()), "ones, then zeros"
        assert bool((rows.sum(1) >= 10).all()) and len(rows.sum(1).unique()) > 1


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
def test_masks_of_any_shape(shape: tuple[int, ...]) -> None:
    mask = input_("mask", S32, shape)
    (feed,) = make_feeds(program(convert(mask, F32), inputs=(mask,)))
    assert tuple(feed.value.shape) == shape and feed.value.dtype == torch.int32
    assert set(feed.value.reshape(-1).tolist()) <= {1}


def test_integers_that_stay_integers_take_their_full_range() -> None:
    a, b = input_("a", S32, (40, 50)), input_("b", S8, (40, 50))
    graph = program(map_("add", a, a), map_("add", b, b), gemm(b, transpose(b, (1, 0))), inputs=(a, b))
    assert set(domains(graph).values()) == {Domain()}
    wide, narrow = (f.value for f in make_feeds(graph))
    assert int(wide.abs().max()) > 1 << 30
    assert int(narrow.min()) == -128 and int(narrow.max()) == 127


def test_scales_are_positive_wherever_they_stand() -> None:
    x, s = input_("x", F32, (4, 4)), input_("s", F32, (4,))
    q, t = input_("q", S8, (4, 4)), input_("t", BF16, ())
    graph = program(
        Node(Quantize(S8), x, reshape(s, (4, 1))),
        Node(Dequantize(F32), q, convert(t, F32)),
        map_("negate", x),
        inputs=(x, s, q, t),
    )
    found = domains(graph)
    assert found[s] == found[t] == Domain("positive") and found[x] == Domain()
    values = {f.shown.name: f.value for f in make_feeds(graph)}
    assert bool((values["s"] > 0).all()) and float(values["t"]) > 0 and bool((values["x"] < 0).any())


def test_scales_inside_a_gemm_are_positive_and_sized() -> None:
    graph = parse("f16[8,64] @ s4[32,64]^T group=16 + bias -> s8 scale=tensor")
    feeds = {f.shown.name: f for f in make_feeds(graph)}
    assert feeds["a"].shown.data == "random" and feeds["b"].shown.data == "random"
    for name in ("b_scale", "out_scale"):
        assert feeds[name].shown.data == "random, sized to what it meets"
        assert bool((feeds[name].value > 0).all())
    assert set(feeds["b"].value.unique().tolist()) == set(range(-8, 8))


@pytest.mark.parametrize("d", [d for d in BY_NAME.values() if d.kind != "opaque"], ids=str)
def test_fills_are_of_every_type(d: DType) -> None:
    x, y = input_("x", d, (2, 3)), input_("y", d, (2, 3))
    feeds = make_feeds(program(x, y, inputs=(x, y)), fill0=["x"], fill1=["y"])
    for feed, wanted, data in zip(feeds, (0, 1), ("zeros", "ones"), strict=True):
        assert feed.value.dtype == d.to_torch() and feed.shown.filled and feed.shown.data == data
        assert feed.value.double().unique().tolist() == [wanted]


def test_random_data_is_repeatable_and_never_constant() -> None:
    for d in (F32, S8, U8, S4, PRED, BF16):
        x = input_("x", d, (64,))
        graph = program(x, inputs=(x,))
        first, again, other = (make_feeds(graph, seed=s)[0].value for s in (0, 0, 1))
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert len(first.double().unique()) > 1


def test_names_are_checked() -> None:
    with pytest.raises(InputError, match=r"no input is called 'nope'\n  try: one of ids, mask"):
        make_feeds(block(), given={"nope": 1})
    with pytest.raises(InputError, match=r"no input is called 'x'\n  try: there are none"):
        make_feeds(program(const([1.0]), inputs=()), fill0=["x"])
    with pytest.raises(InputError, match="'x' is to be filled with 0 and with something else"):
        make_feeds(block(), fill0=["x"], fill1=["x"])
    with pytest.raises(InputError, match="'x' is to be filled with 1 and with something else"):
        make_feeds(block(), fill1=["x"], given={"x": 1})


def test_values_beyond_any_memory_are_refused_before_anything_runs() -> None:
    check_memory(block())
    x = input_("x", F32, (1 << 22, 1))
    said = r"its values and their check need 524,288 GiB at least and the machine has [\d,]+ GiB \(g\)"
    with pytest.raises(InputError, match=said):
        check_memory(program(gemm(x, transpose(x, (1, 0))), inputs=(x,)))


def test_archives_keep_every_type(tmp_path: Path) -> None:
    inputs = tuple(input_(d.name, d, (2, 3)) for d in BY_NAME.values() if d.kind != "opaque" and d.bits != 4)
    graph = program(*inputs, inputs=inputs)
    wanted = {n.dtype.name: np.arange(6).reshape(2, 3).astype(n.dtype.to_numpy()) for n in inputs}
    write_npz(tmp_path / "x.npz", wanted)
    found = read_npz(tmp_path / "x.npz", graph)
    assert list(found) == list(wanted)
    for name, array in found.items():
        assert isinstance(array, np.ndarray) and array.dtype == wanted[name].dtype
        np.testing.assert_array_equal(array.astype(np.float64), wanted[name].astype(np.float64))
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.npz").write_text("old")

    def full(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.lib.format.write_array", full)
    with pytest.raises(InputError, match=r"cannot be written: No space left on device \(.*x\.npz\)"):
        write_npz(tmp_path / "x.npz", {"x": np.zeros(3)})
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.npz", "old")]
