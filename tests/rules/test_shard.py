"""Placing: joined(local(split(inputs))) = global(inputs), for random programs and placements; what travels for known ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from meshes import assert_agree, collectives, on, placed, placed_programs, run
from rule_checks import arithmetic

from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, F16, F32, S8, S32
from tilewright.errors import InputError, UnsupportedError
from tilewright.ir.build import const, convert, input_, map_, reduce_, reshape, transpose
from tilewright.ir.dims import Dim, Scope
from tilewright.ir.evaluate import evaluate, evaluate_mesh
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Attention,
    Dequantize,
    Gather,
    Gemm,
    Input,
    LayerNorm,
    Own,
    Quantize,
    Softmax,
    Write,
    gemm,
)
from tilewright.ir.text import parse, print_graph
from tilewright.rules.shard import localise, moves


def check(graph: Graph, feeds: Mapping[str, torch.Tensor] | None = None, rtol: float = 0.0) -> Graph:
    """The local program, whose ranks together give what the whole one does."""
    local = localise(graph)
    assert parse(print_graph(local)).placements == local.placements
    generator = torch.Generator().manual_seed(0)
    if feeds is None:
        feeds = {label_of(n): torch.randn(n.shape, generator=generator).to(n.dtype.to_torch()) for n in graph.inputs}
    for wanted, found in zip(evaluate(graph, feeds, float64=True), run(local, feeds), strict=True):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol, equal_nan=True)
    return local


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=placed_programs())
def test_random_programs_lie_anyhow(case):
    """Sums of integers keep every bit; ranks round sums of floats each for itself, which no jump then makes larger."""
    whole, feeds = case
    local = localise(whole)
    for wanted, found in zip(evaluate(whole, feeds, float64=True), run(local, feeds), strict=True):
        assert_agree(local, wanted, found)
    assert arithmetic(local) <= arithmetic(whole)


def product(lhs: str, rhs: str, result: str | None = None, *, mesh: str = "tp=4", m: int = 16, dtype=F32) -> Graph:
    """x [m, 32] @ w [32, 64], with the mesh axes that split both axes of each."""
    x, w = input_("x", dtype, (m, 32)), input_("w", dtype, (32, 64))
    y = gemm(placed(x, *lhs.split(",")), placed(w, *rhs.split(",")))
    return on(mesh, y if result is None else placed(y, *result.split(",")))


TABLE = [
    # lhs M split, rhs whole: no collective; result M split
    ("tp,", ",", None, [], "tp,"),
    # rhs N split, lhs whole; lhs M split, too, and the cheaper of both is gathered
    (",", ",tp", None, [], ",tp"),
    ("tp,", ",tp", None, ["all_gather"], ",tp"),
    # K split in both: partial sums
    (",tp", "tp,", None, ["all_reduce"], ","),
    (",tp", "tp,", "tp,", ["reduce_scatter"], "tp,"),
    (",tp", "tp,", ",tp", ["reduce_scatter"], ",tp"),
    # K split in one: the other one's part is there already
    (",tp", ",", None, ["all_reduce"], ","),
    (",", "tp,", None, ["all_reduce"], ","),
]


@pytest.mark.parametrize(("lhs", "rhs", "result", "travels", "lies"), TABLE)
def test_the_table_of_products(lhs, rhs, result, travels, lies):
    local = check(product(lhs, rhs, result), rtol=1e-5)
    assert collectives(local) == travels and local.placements[2] == Placement(tuple((s,) if s else () for s in lies.split(",")))
    (one,) = [n for n in local.nodes() if isinstance(n.op, Gemm)]
    assert 4 * one.tensor.elements * one.op.lhs.shape[-1] == 16 * 32 * 64


def test_a_large_activation_stays_and_the_weight_is_gathered():
    (gathered,) = [n for n in check(product("tp,", ",tp", m=256), rtol=1e-5).nodes() if isinstance(n.op, AllGather)]
    assert label_of(gathered.src[0]) == "w"


def test_two_mesh_axes_one_after_the_other():
    local = check(product("dp,tp", "tp,", mesh="dp=2,tp=4"), rtol=1e-5)
    assert collectives(local) == ["all_reduce"] and local.placements[2] == Placement((("dp",), ()))
    local = check(product("dp,", ",tp", "dp*tp,", mesh="dp=2,tp=4"), rtol=1e-5)
    assert collectives(local) == ["all_to_all"]
    local = check(product(",dp*tp", "dp*tp,", "dp,", mesh="dp=2,tp=4"), rtol=1e-5)
    assert collectives(local) == ["all_reduce", "reduce_scatter"]


def test_integers_are_exact_and_wrap():
    x, w = input_("x", S8, (16, 32)), input_("w", S8, (32, 64))
    y = gemm(placed(x, "", "tp"), placed(w, "tp", ""), acc_dtype=S32)
    feeds = {n: torch.randint(-128, 128, s, dtype=torch.int8) for n, s in (("x", (16, 32)), ("w", (32, 64)))}
    local = check(on("tp=8", y, convert(y, S8), convert(y, S8, "saturate")), feeds)
    assert collectives(local) == ["all_reduce"]
    narrow = check(on("tp=8", convert(y, S8)), feeds)
    (sum_,) = [n for n in narrow.nodes() if isinstance(n.op, AllReduce)]
    assert sum_.dtype is S8  # modulo 256 each, and so together
    clamped = check(on("tp=8", convert(y, S8, "saturate")), feeds)
    (sum_,) = [n for n in clamped.nodes() if isinstance(n.op, AllReduce)]
    assert sum_.dtype is S32


def test_summands_beyond_f16_have_a_finite_sum_in_it():
    """Two ranks' sums are 81,920 and -73,728, and f16 ends at 65,504."""
    x, w = input_("x", F16, (4, 128)), input_("w", F16, (128, 8))
    whole = on("tp=2", convert(gemm(placed(x, "", "tp"), placed(w, "tp", "")), F16))
    feeds = {"x": torch.full((4, 128), 32.0, dtype=torch.float16), "w": torch.full((128, 8), 40.0, dtype=torch.float16)}
    feeds["w"][64:] = -36.0
    assert torch.isinf(feeds["x"][:, :64] @ feeds["w"][:64]).all()
    local = localise(whole)
    for graph in (local, optimise(local)):
        (y,) = run(graph, feeds)
        assert (y == 32 * 64 * (40 - 36)).all()


def test_summands_travel_as_narrow_as_the_program_has_them():
    """Linear operations alone stand between a product and its reduction; a bias, and what is read twice, stand behind it."""
    x, w = input_("x", F32, (16, 32)), input_("w", F32, (32, 64))
    scale, bias = input_("scale", F32, (16, 1)), input_("bias", BF16, (64,))
    acc = gemm(placed(x, "", "tp"), placed(w, "tp", ""))
    y = map_("add", convert(map_("multiply", acc, scale), BF16), bias)
    local = check(on("tp=4", y), rtol=3e-2)
    (sum_,) = [n for n in local.nodes() if isinstance(n.op, AllReduce)]
    assert sum_.dtype is BF16 and sum_.src[0].op.name == "convert"
    half = check(on("tp=4", convert(map_("multiply", acc, scale), F16)), rtol=3e-3)
    (sum_,) = [n for n in half.nodes() if isinstance(n.op, AllReduce)]
    assert sum_.dtype is F32
    twice = check(on("tp=4", convert(acc, BF16), map_("tanh", acc)), rtol=3e-2)
    assert [n.dtype for n in twice.nodes() if isinstance(n.op, AllReduce)] == [F32]
    both = map_("add", acc, gemm(placed(map_("tanh", x), "", "tp"), placed(w, "tp", "")))
    assert collectives(check(on("tp=4", both), rtol=1e-5)) == ["all_reduce"]


@pytest.mark.parametrize("to", [F8E4M3FN, F8E5M2])
def test_summands_that_cancel_are_added_before_they_become_8_bit_floats(to):
    """Each rank's product is about 10^5 and their sum 1: a summand in 8 bits would be an infinity or NaN."""
    x, w = input_("x", F32, (4, 8)), input_("w", F32, (8, 4))
    graph = on("tp=2", placed(convert(gemm(placed(x, "", "tp"), placed(w, "tp", "")), to), "", ""))
    half = torch.randint(1, 9, (4, 4)) * 32.0
    feeds = {"x": torch.cat([half, -half], 1), "w": torch.full((8, 4), 128.0)}
    feeds["x"][:, -1] += 1 / 128
    (wanted,), (found,) = evaluate(graph, feeds, float64=True), run(localise(graph), feeds, float64=False)
    assert wanted.float().eq(1).all() and found.float().eq(1).all()


def test_heads_are_shared_out():
    """QKV by columns, attention by heads, the output projection by rows: one all-reduce, caches of keys by heads."""
    rows, heads, width = 8, 4, 16
    x = input_("x", F32, (1, rows, heads * width))
    w, o = (const(torch.randn(heads * width, heads * width) / 8) for _ in range(2))
    cache = Node(Input("cache", input_("c", F32, (1, 32, heads, width)).tensor, mutable=True))
    at = input_("at", S32, (rows,))
    q = reshape(gemm(x, placed(w, "", "tp")), (1, rows, heads, width))
    k = reshape(gemm(map_("tanh", x), placed(w, "", "tp")), (1, rows, heads, width))
    written = Node(Write(1), cache, at, k)
    keys = transpose(written, (0, 2, 1, 3))
    y = Node(Attention(0.25), transpose(q, (0, 2, 1, 3)), keys, keys)
    y = gemm(reshape(transpose(y, (0, 2, 1, 3)), (1, rows, heads * width)), placed(o, "tp", ""))
    graph = on("tp=4", y, written)
    state = (torch.randn(1, 32, heads, width),)
    graph = replace(graph, inputs=(*(n for n in graph.inputs if n is not cache), cache), state=state)
    local = localise(graph)
    assert collectives(local) == ["all_reduce"]
    assert local.inputs[-1].shape == (1, 32, 1, width) and local.placements[-1] == local.placements[2]
    feeds = {"x": torch.randn(1, rows, heads * width), "at": torch.arange(rows, dtype=torch.int32) + 3}
    for found, wanted in zip(run(local, feeds), evaluate(graph, feeds, float64=True), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


ROWS = [
    ("norm", lambda x: Node(LayerNorm(1, 1e-6, center=False), x), ("tp", ""), []),
    ("norm", lambda x: Node(LayerNorm(1, 1e-6), x), ("", "tp"), ["all_gather"]),
    ("softmax", lambda x: Node(Softmax(1), x), ("tp", ""), []),
    ("sum", lambda x: map_("tanh", reduce_("add", x, [1])), ("", "tp"), ["all_reduce"]),
    ("largest", lambda x: reduce_("maximum", x, [1], keepdims=True), ("", "tp"), ["all_reduce"]),
    ("mean", lambda x: reduce_("mean", x, [1]), ("", "tp"), ["all_gather"]),
    ("rows", lambda x: Node(Gather(0), x, const(torch.tensor([3, 0, 5]))), ("", "tp"), []),
    ("heads", lambda x: reshape(x, (8, 4, 4)), ("", "tp"), []),
    ("merged", lambda x: reshape(x, (128,)), ("tp", ""), []),
    ("inner", lambda x: reshape(x, (128,)), ("", "tp"), ["all_gather"]),
    ("moved", lambda x: placed(x, "", "tp"), ("tp", ""), ["all_to_all"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "splits", "travels"), ROWS, ids=[r[0] for r in ROWS])
def test_operations_share_out_what_they_can(name, make, splits, travels):
    assert collectives(check(on("tp=4", make(placed(input_("x", F32, (8, 16)), *splits))), rtol=1e-6)) == travels


def test_a_row_quantised_in_parts_exchanges_its_largest_value():
    x = placed(input_("x", F32, (8, 64)), "", "tp")
    scale = map_("divide", reduce_("maximum", map_("abs", x), [1], keepdims=True), const(127.0, F32))
    codes = Node(Quantize(S8), x, scale)
    local = check(on("tp=4", codes))
    (largest,) = [n for n in local.nodes() if isinstance(n.op, AllReduce)]
    assert largest.op.fn == "maximum" and largest.shape == (8, 1)


def test_blocks_that_share_a_scale_stay_together():
    x, scale = input_("x", S8, (8, 64)), input_("s", F32, (8, 4))
    feeds = {"x": torch.randint(-128, 128, (8, 64), dtype=torch.int8), "s": torch.rand(8, 4)}
    y = Node(Dequantize(F32, (1, 16)), placed(x, "", "tp"), scale)
    assert collectives(check(on("tp=4", y), feeds)) == []
    assert collectives(check(on("tp=8", y), feeds)) == ["all_gather"]  # 8 codes each would part a block of 16


def test_partial_sums_are_given_and_kept():
    x = placed(input_("x", F32, (8, 16)), "", "", partial="tp")
    assert collectives(check(on("tp=4", placed(map_("negate", x), "", "", partial="tp")), rtol=1e-6)) == []
    assert collectives(check(on("tp=4", map_("tanh", x)), rtol=1e-6)) == ["all_reduce"]
    with pytest.raises(UnsupportedError, match="values that are no summands over 'tp' are placed as partial"):
        localise(on("tp=4", placed(map_("tanh", x), "", "", partial="tp")))


@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=3", "a=2,b=2,c=2"])
def test_values_move_between_any_two_placements(mesh):
    """Every pair of placements of a matrix; each rank ends with its part, and what stays split is not gathered."""
    mesh, shape = Mesh.parse(mesh), (24, 24)
    names = [n for n, _ in mesh.axes]
    ways = [Placement(((), ()))]
    for name in names:
        ways += [Placement(tuple((*s, name) if a == i else s for a, s in enumerate(p.splits))) for p in ways for i in (0, 1)]
    x = torch.arange(math.prod(shape)).reshape(shape)
    for now, to in itertools.product(ways, ways):
        part = y = input_("x", S32, now.local_shape(shape, mesh))
        for op in moves(now, to, shape, mesh):
            y = Node(op, y)
        feeds = [{"x": p.to(torch.int32)} for p in now.split(x, mesh)]
        found = [r for (r,) in evaluate_mesh(Graph("g", (part,), (y,), ("y",)), feeds, mesh)] if y is not part else None
        parts = to.split(x.to(torch.int32), mesh)
        assert all(map(torch.equal, found or [f["x"] for f in feeds], parts)), f"{now} to {to}"
        if all(a == b[: len(a)] for a, b in zip(now.splits, to.splits, strict=True)):
            assert all(isinstance(op, Own) for op in moves(now, to, shape, mesh))
    (one,) = moves(Placement((("b",), ())), Placement(((), ("b",))), shape, Mesh.parse("a=2,b=2"))
    assert isinstance(one, AllToAll)


def test_what_cannot_be_placed_is_said():
    x = input_("x", F32, (6, 8))
    with pytest.raises(InputError, match="the graph has no mesh"):
        localise(replace(on("tp=2", map_("tanh", x)), mesh=None))
    with pytest.raises(InputError, match="is the program of one rank already"):
        localise(localise(on("tp=2", map_("tanh", x))))
    with pytest.raises(InputError, match="all_reduce stands in a program over whole tensors"):
        localise(on("tp=2", Node(AllReduce(("tp",), (2,)), x)))
    with pytest.raises(UnsupportedError, match=r"4 ranks do not divide an extent of 6.*\n.*pad the axis to a multiple of 4"):
        localise(on("tp=4", placed(map_("tanh", x), "tp", "")))
    rows = Scope().extent(Dim("rows", 1, 64))
    with pytest.raises(UnsupportedError, match="extents are open"):
        localise(on("tp=2", map_("tanh", input_("x", F32, (rows, 8)))))
