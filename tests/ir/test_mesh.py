"""Meshes, placements, and programs for one rank run on every rank of a simulated mesh."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from values import ALL, from_numpy, specials

from tilewright.dtype import BF16, F8E4M3FN, F32, F64, S8, S32, DType
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.constant import constant_value
from tilewright.ir.evaluate import evaluate, evaluate_mesh
from tilewright.ir.graph import Graph, Node, Op
from tilewright.ir.mesh import Mesh, Placement, split_feeds
from tilewright.ir.ops import Acc, AllGather, AllReduce, AllToAll, Gemm, Own, Param, Place, ReduceScatter, gemm
from tilewright.ir.ops.rounding import to_float
from tilewright.ir.text import parse, print_graph
from tilewright.ir.types import TensorType
from tilewright.ir.verify import mesh_axes, verify

MESHES = [Mesh.parse(t) for t in ("tp=1", "tp=4", "dp=2,tp=3", "dp=2,tp=2,pp=2", "dp=1,tp=5")]
TP4 = Mesh.parse("tp=4")


def run(ops: list[Op], mesh: Mesh, values: list[torch.Tensor], dtype: DType) -> list[torch.Tensor]:
    """Operations, one after the other, on every rank's own value."""
    x = y = input_("x", dtype, tuple(values[0].shape))
    for op in ops:
        y = Node(op, y)
    graph = verify(Graph("one", (x,), (y,), ("y",)))
    assert parse(print_graph(graph)).outputs == graph.outputs
    return [outputs[0] for outputs in evaluate_mesh(graph, [{"x": v} for v in values], mesh)]


def over(mesh: Mesh, names: tuple[str, ...]) -> dict[str, tuple]:
    sizes = dict(mesh.axes)
    return {"over": names, "sizes": tuple(sizes[n] for n in names)}


def subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    names = [n for n, _ in mesh.axes]
    return [p for k in range(1, len(names) + 1) for p in itertools.permutations(names, k)]


def grid(mesh: Mesh) -> np.ndarray:
    return np.arange(mesh.size).reshape([s for _, s in mesh.axes])


def groups(mesh: Mesh, names: tuple[str, ...]) -> list[list[int]]:
    """The groups along some axes, by NumPy: those axes last, in the order given."""
    at = [n for n, _ in mesh.axes]
    moved = grid(mesh).transpose([i for i, n in enumerate(at) if n not in names] + [at.index(n) for n in names])
    return moved.reshape(-1, math.prod(dict(mesh.axes)[n] for n in names)).tolist()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_are_those_of_a_grid_of_ranks(mesh):
    assert Mesh.parse(str(mesh)) == mesh and mesh.size == grid(mesh).size
    for names in subsets(mesh):
        assert sorted({mesh.group(r, names) for r in range(mesh.size)}) == sorted(map(tuple, groups(mesh, names)))
        for group in groups(mesh, names):
            assert [mesh.index(r, names) for r in group] == [*range(mesh.ranks_of(names))]


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("tp", "no mesh: 'tp'"),
        ("tp=x", "no mesh"),
        ("tp=0", "one rank or more"),
        ("tp=2,tp=2", "distinct identifiers"),
        ("=4", "distinct identifiers"),
    ],
)
def test_what_is_no_mesh_is_refused(text, pattern):
    with pytest.raises(InputError, match=pattern):
        Mesh.parse(text)


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_move_between_ranks_with_their_bits(mesh, dtype):
    rng = np.random.default_rng(len(str(mesh)))
    for names in subsets(mesh):
        n, how = mesh.ranks_of(names), over(mesh, names)
        values = [from_numpy(rng.choice(specials(dtype), (n, 2, 2 * n)), dtype) for _ in range(mesh.size)]
        gathered = run([AllGather(**how, axis=1)], mesh, values, dtype)
        own = run([Own(**how, axis=2)], mesh, values, dtype)
        turned = run([AllToAll(**how, split=0, join=2)], mesh, values, dtype)
        for group in groups(mesh, names):
            for i, rank in enumerate(group):
                assert same(gathered[rank], torch.cat([values[r].view(torch.uint8) for r in group], 1).view(values[0].dtype))
                assert same(own[rank], values[rank][:, :, 2 * i : 2 * i + 2])
                wanted = torch.cat([values[r][i : i + 1].contiguous().view(torch.uint8) for r in group], 2)
                assert same(turned[rank], wanted.view(values[0].dtype))


@pytest.mark.thin(5)
@pytest.mark.parametrize("dtype", [F8E4M3FN, BF16, F32, F64, S8, S32], ids=str)
@pytest.mark.parametrize("fn", ["add", "maximum", "multiply"])
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_reductions_round_once_and_are_the_same_on_every_rank(mesh, fn, dtype):
    rng = np.random.default_rng(5)
    for names in subsets(mesh):
        n, how = mesh.ranks_of(names), over(mesh, names)
        values = [from_numpy(rng.integers(-4, 5, (3, 2 * n)).astype(dtype.to_numpy()), dtype) for _ in range(mesh.size)]
        whole = run([AllReduce(**how, fn=fn)], mesh, values, dtype)
        parts = run([ReduceScatter(**how, fn=fn, axis=1)], mesh, values, dtype)
        own = run([AllReduce(**how, fn=fn), Own(**how, axis=1)], mesh, values, dtype)
        assert all(same(a, b) for a, b in zip(parts, own, strict=True))
        for group in groups(mesh, names):
            exact = torch.stack([values[r].to(torch.float64) for r in group])
            wanted = {"add": exact.sum(0), "maximum": exact.amax(0), "multiply": exact.prod(0)}[fn]
            assert all(same(whole[r], whole[group[0]]) for r in group)
            if dtype.is_integer:
                wanted = (wanted.to(torch.int64) + 2 ** (dtype.bits - 1)) % 2**dtype.bits - 2 ** (dtype.bits - 1)
                assert torch.equal(whole[group[0]].to(torch.int64), wanted)
            else:
                wanted = to_float(wanted, dtype).to(torch.float64)
                assert torch.allclose(whole[group[0]].to(torch.float64), wanted, rtol=0, atol=0, equal_nan=True)


@st.composite
def placed(draw):
    mesh = draw(st.sampled_from(MESHES))
    names = draw(st.permutations([n for n, _ in mesh.axes]))
    used = names[: draw(st.integers(0, len(names)))]
    splits: list[list[str]] = [[], [], []]
    partial = []
    for name in used:
        where = draw(st.integers(0, 3))
        (splits[where] if where < 3 else partial).append(name)
    placement = Placement(tuple(tuple(s) for s in splits), tuple(partial))
    shape = [mesh.ranks_of(s) * draw(st.integers(0, 3)) for s in placement.splits]
    return mesh, placement, shape


@settings(max_examples=60, deadline=None)
@given(placed())
def test_joining_undoes_splitting(case):
    mesh, placement, shape = case
    x = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    parts = placement.split(x, mesh)
    assert all(p.shape == placement.local_shape(shape, mesh) for p in parts)
    assert torch.equal(placement.joined(parts, mesh), x)


def test_one_element_is_joined_whatever_its_stride():
    x = torch.arange(4.0).reshape(2, 2)[:1, ::2][:, :1]
    assert torch.equal(Placement.whole(2).joined([x, x.clone()], Mesh.parse("tp=2")), torch.zeros(1, 1))


def test_what_ranks_cannot_hold_is_refused():
    rows = Placement((("tp",), ()))
    with pytest.raises(UnsupportedError, match=r"4 ranks do not divide an extent of 6 \(placement \[tp, \]\)"):
        rows.split(torch.zeros(6, 2), TP4)
    with pytest.raises(TypeMismatchError, match="is of 2 axes, the tensor"):
        rows.split(torch.zeros(4), TP4)
    with pytest.raises(TypeMismatchError, match=r"a mesh axis is used twice: \[tp, tp\]"):
        Placement((("tp",), ("tp",)))
    with pytest.raises(InputError, match="has no axis 'dp'"):
        Placement((("dp",),)).split(torch.zeros(4), TP4)
    with pytest.raises(TypeMismatchError, match="3 parts on a mesh of 4 ranks"):
        rows.joined([torch.zeros(1, 2)] * 3, TP4)
    with pytest.raises(TypeMismatchError, match="ranks 0 and 2 hold other values of one part"):
        Placement.whole(1).joined([torch.zeros(1), torch.zeros(1), -torch.zeros(1), torch.zeros(1)], TP4)
    with pytest.raises(UnsupportedError, match=r"do not divide .*input 'x'"):
        split_feeds({"x": torch.zeros(6, 2)}, {"x": rows}, TP4)


def mlp(mesh: Mesh, rows: int, width: int, hidden: int, *, scattered: bool) -> tuple[Graph, Graph, dict[str, Placement]]:
    """Two products with a gelu between them: the program of all ranks, that of one, and how its inputs lie.

    As Megatron has it: the first weight by columns, the second by rows; behind it an all-reduce, or rows that are gathered
    before and scattered after, in the gemms' own expressions.
    """
    tp = mesh.ranks_of(["tp"])
    x, r = (input_(n, F32, (rows, width)) for n in "xr")
    w, v = input_("w", F32, (width, hidden)), input_("v", F32, (hidden, width))
    y = map_("add", gemm(map_("tanh", gemm(x, w)), v), r)
    whole = Graph("mlp", (x, w, v, r), (y,), ("y",))
    how = over(mesh, ("tp",))
    w, v = input_("w", F32, (width, hidden // tp)), input_("v", F32, (hidden // tp, width))
    placements = {"w": Placement(((), ("tp",))), "v": Placement((("tp",), ()))}
    if not scattered:
        y = map_("add", Node(AllReduce(**how), gemm(map_("tanh", gemm(x, w)), v)), r)
        return whole, Graph("mlp", (x, w, v, r), (y,), ("y",)), placements
    x, r = (input_(n, F32, (rows // tp, width)) for n in "xr")
    placements |= {n: Placement((("tp",), ())) for n in "xr"}
    gathered = Node(AllGather(**how), Node(Param(0, x.tensor)))
    acc = Node(Acc(TensorType(F32, (rows, hidden // tp))))
    first = Node(Gemm(F32, gathered, Node(Param(1, w.tensor)), (map_("tanh", acc),)), x, w)
    total = Node(ReduceScatter(**how), Node(Acc(TensorType(F32, (rows, width)))))
    store = map_("add", total, Node(Param(2, r.tensor)))
    second = Node(Gemm(F32, Node(Param(0, first.tensor)), Node(Param(1, v.tensor)), (store,)), first, v, r)
    return whole, Graph("mlp", (x, w, v, r), (second,), ("y",)), placements


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("mesh", ["tp=1", "tp=4", "dp=2,tp=4", "tp=64"])
def test_ranks_together_compute_what_one_program_does(mesh, scattered):
    """joined(local(split(inputs))) = global(inputs), integers in floats to the bit."""
    mesh = Mesh.parse(mesh)
    whole, local, placements = mlp(mesh, 64, 6, 128, scattered=scattered)
    verify(local)
    assert mesh_axes(local.outputs) == {"tp": mesh.ranks_of(["tp"])}
    rng = torch.Generator().manual_seed(3)
    feeds = {n.op.label: torch.randn(n.shape, generator=rng) for n in whole.inputs}
    (wanted,) = evaluate(whole, feeds, float64=True)
    parts = [o for (o,) in evaluate_mesh(local, split_feeds(feeds, placements, mesh), mesh, float64=True)]
    found = (placements["x"] if scattered else Placement.whole(2)).joined(parts, mesh)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert parse(print_graph(local)).outputs == local.outputs
    wrong = split_feeds(feeds, placements, mesh)
    wrong[0]["v"] = torch.zeros_like(wrong[0]["v"])
    parts = [o for (o,) in evaluate_mesh(local, wrong, mesh, float64=True)]
    if (
        mesh.ranks_of(["dp"] if "dp" in str(mesh) else []) == 1
    ):  # else another replica gives other values, which joining refuses
        assert not torch.allclose((placements["x"] if scattered else Placement.whole(2)).joined(parts, mesh), wanted, atol=1e-3)


def test_a_part_of_a_constant_is_a_constant_of_which_rules_do_not_know_the_value():
    part = Node(Own(("tp",), (4,), axis=0), const(torch.arange(8.0)))
    assert part.constant and constant_value(part) is None
    assert not Node(AllGather(("tp",), (4,)), part).constant
    x = input_("x", F32, (2,))
    parts = evaluate_mesh(Graph("g", (x,), (map_("add", x, part),), ("y",)), [{"x": torch.zeros(2)}] * 4, TP4)
    assert torch.cat([p for (p,) in parts]).tolist() == [*range(8)]


def test_narrow_values_travel_as_they_are():
    """A sum of partial products in bf16 is rounded by each rank, and once more."""
    x = input_("x", F32, (2,))
    graph = Graph("g", (x,), (convert(Node(AllReduce(("tp",), (4,)), convert(x, BF16)), F32),), ("y",))
    given = [torch.tensor([1 + 2**-9, 256.0]), torch.tensor([0.0, 1.0]), torch.zeros(2), torch.zeros(2)]
    (found,) = evaluate_mesh(graph, [{"x": v} for v in given], TP4)[2]
    assert found.tolist() == [1.0, 256.0]  # 257 lies halfway, and ties to even


def test_a_graph_says_how_its_tensors_lie():
    x = input_("x", F32, (8, 6))
    y = Node(Place(((), ("tp",))), map_("tanh", Node(Place((("dp",), ())), x)))
    whole = verify(Graph("g", (x,), (y,), ("y",), mesh=Mesh.parse("dp=2,tp=3")))
    assert not whole.local and parse(print_graph(whole)) == whole and parse(print_graph(whole)).mesh == whole.mesh
    assert torch.equal(evaluate(whole, {"x": torch.ones(8, 6)})[0], torch.ones(8, 6).tanh())
    rows, columns = Placement((("dp",), ())), Placement(((), ("tp",)), ("dp",))
    part = input_("x", F32, (4, 6))
    local = verify(replace(whole, inputs=(part,), outputs=(map_("tanh", part),), placements=(rows, columns)))
    back = parse(print_graph(local))
    assert local.local and back.placements == (rows, columns) and back.outputs == local.outputs


def test_a_graph_whose_tensors_cannot_lie_so_is_refused():
    x = input_("x", F32, (8, 6))
    mesh = Mesh.parse("tp=4")

    def graph(y: Node, **how: object) -> Graph:
        return Graph("g", (x,), (y,), ("y",), **how)  # type: ignore[arg-type]

    rows, flat = Placement((("tp",), ())), Placement(((),))
    with pytest.raises(TypeMismatchError, match=r"no mesh axis 'tp' \(place\)\n.*Graph.mesh names its axes"):
        verify(graph(Node(Place(rows.splits), x)))
    with pytest.raises(TypeMismatchError, match=r"no mesh axis 'dp' [^~]*the mesh is tp=4"):
        verify(graph(Node(Place((("dp",), ())), x), mesh=mesh))
    with pytest.raises(TypeMismatchError, match="is of 1 axes"):
        Node(Place(((),)), x)
    with pytest.raises(UnsupportedError, match="4 ranks do not divide an extent of 6"):
        verify(graph(Node(Place(((), ("tp",))), x), mesh=mesh))
    with pytest.raises(TypeMismatchError, match="places whole tensors"):
        verify(graph(Node(Place(rows.splits), x), mesh=mesh, placements=(rows, rows)))
    with pytest.raises(TypeMismatchError, match="1 placements of 1 inputs and 1 outputs"):
        verify(graph(x, mesh=mesh, placements=(rows,)))
    with pytest.raises(TypeMismatchError, match=r"the placement \[\] is not of"):
        verify(graph(x, mesh=mesh, placements=(rows, flat)))
    with pytest.raises(TypeMismatchError, match="an operation is over tp=2, on a mesh of tp=4"):
        verify(graph(Node(AllReduce(("tp",), (2,)), x), mesh=mesh))
    local = print_graph(graph(x, mesh=mesh, placements=(rows, rows)))
    for wrong, pattern in [
        (local.replace("partial=[]", 'partial=["tp"]'), r"a mesh axis is used twice.*line"),
        (local.replace("  part", "  // part"), "placements are wanted of every input and output"),
        (local.replace('"tp=4"', '"tp"'), "no mesh"),
    ]:
        with pytest.raises(InputError, match=pattern):
            parse(wrong)


def reduced(x: Node, **how: object) -> Graph:
    return Graph("g", (x,), (Node(AllReduce(**{"over": ("tp",), "sizes": (4,), **how}), x),), ("y",))  # type: ignore[arg-type]


def test_what_cannot_be_run_is_said():
    x = input_("x", F32, (2,))
    feeds = [{"x": torch.ones(2)}] * 4
    with pytest.raises(UnsupportedError, match="a collective operation needs its peers"):
        evaluate(reduced(x), feeds[0])
    with pytest.raises(UnsupportedError, match="all_reduce is over tp=4, on a mesh of tp=2"):
        evaluate_mesh(reduced(x), feeds[:2], Mesh.parse("tp=2"))
    with pytest.raises(InputError, match="3 feeds for a mesh of 4 ranks"):
        evaluate_mesh(reduced(x), feeds[:3], TP4)
    with pytest.raises(InputError, match=r"no value for input 'x' \(g, rank 2\)"):
        evaluate_mesh(reduced(x), [*feeds[:2], {}, feeds[0]], TP4)
    with pytest.raises(InputError, match=r"shape \[3\] given, f32\[2\] wanted \(input 'x', rank 1\)"):
        evaluate_mesh(reduced(x), [feeds[0], {"x": torch.ones(3)}, *feeds[:2]], TP4)
    with pytest.raises(TypeMismatchError, match="4 ranks do not divide axis 0"):
        Node(Own(("tp",), (4,)), x)
    with pytest.raises(TypeMismatchError, match=r"all_reduce over \['tp'\] of sizes \[\]"):
        AllReduce(("tp",), ())
    with pytest.raises(TypeMismatchError, match="1 or more"):
        AllReduce(("tp",), (0,))
    two = Node(AllReduce(("tp",), (2,)), reduced(x).outputs[0])
    with pytest.raises(TypeMismatchError, match="mesh axis 'tp' has 4 ranks and 2"):
        verify(Graph("g", (x,), (two,), ("y",)))


def test_ranks_that_miss_each_other_end():
    """A rank that fails, and ranks that run collectives in another order, end all the others."""
    from tilewright.ir.mesh import simulate, team

    def one_fails(rank: int) -> object:
        if rank == 3:
            raise InputError("no more", where="rank 3")
        return team().exchange(torch.ones(1), ["tp"], sum)

    with pytest.raises(InputError, match="no more"):
        simulate(TP4, one_fails)
    mesh = Mesh.parse("a=2,b=2")

    def crossed(rank: int) -> object:
        order = ["a", "b"] if rank % 3 else ["b", "a"]
        return [team().exchange(torch.ones(1), [name], sum) for name in order]

    with pytest.raises(UnsupportedError, match="ranks wait for each other for ever"):
        simulate(mesh, crossed)
    with pytest.raises(UnsupportedError, match="ranks wait for each other for ever"):
        simulate(TP4, lambda rank: rank or team().exchange(torch.ones(1), ["tp"], sum))
    assert [*map(float, simulate(mesh, lambda rank: team().exchange(torch.tensor(float(rank)), ["b", "a"], sum)))] == [6.0] * 4


def test_collectives_in_expressions_leave_two_gemms():
    _, local, _ = mlp(TP4, 8, 6, 16, scattered=True)
    assert [type(n.op) for n in local.nodes() if n.src] == [Gemm, Gemm]
