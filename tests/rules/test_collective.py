"""Rules for what travels between ranks: the same results, no more bytes and no more work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from meshes import assert_agree, collectives, on, placed, placed_programs, run
from rule_checks import arithmetic, staged

from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F32, S8, U8, DType
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import const, convert, input_, map_, reduce_, reshape, transpose
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.ops import (
    Acc,
    AllGather,
    AllReduce,
    AllToAll,
    Attention,
    Dequantize,
    Gemm,
    LayerNorm,
    Own,
    Param,
    Place,
    Quantize,
    ReduceScatter,
    gemm,
)
from tilewright.ir.pattern import Trace
from tilewright.ir.types import TensorType
from tilewright.ir.verify import verify
from tilewright.rules import collective
from tilewright.rules.collective import sequence_parallel, why_outside, wire_bytes
from tilewright.rules.shard import localise

HOW = (("tp",), (4,))


def travels(graph: Graph) -> list[tuple[str, str, bool]]:
    """List what travels: the operation, its type, and whether a product carries it."""
    return [(n.op.name, str(n.type), n is not carrier) for n, carrier, _ in collective.collectives(graph)]


def folded(graph: Graph, feeds: dict[str, torch.Tensor] | None = None, rtol: float = 1e-5) -> tuple[Graph, Trace]:
    """The program of one rank after all rules, which means the same, multiplies no more and sends no more."""
    local, trace = localise(graph), Trace()
    after = optimise(local, trace)
    generator = torch.Generator().manual_seed(1)
    feeds = feeds or {label_of(n): torch.randn(n.shape, generator=generator).to(n.dtype.to_torch()) for n in graph.inputs}
    for wanted, found in zip(evaluate(graph, feeds, float64=True), run(after, feeds), strict=True):
        torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=rtol, atol=rtol * float(wanted.double().abs().max()))
    assert wire_bytes(after) <= wire_bytes(local) and arithmetic(after) <= arithmetic(local)
    return after, trace


def outside(graph: Graph, trace: Trace) -> list[str]:
    """Reasons why operations between ranks stand outside products."""
    return list(why_outside(graph, trace).values())


def local_of(x: Node, y: Node, given: Placement, left: Placement) -> Graph:
    """A program for one rank, as a reader might give it."""
    return verify(Graph("g", (x,), (y,), ("y",), mesh=Mesh.parse("tp=4"), placements=(given, left)))


ROWS, WHOLE = Placement((("tp",), ())), Placement(((), ()))


def test_the_own_part_is_taken_before_it_travels():
    x = input_("x", F32, (8, 8))
    sums = Node(AllReduce(*HOW), x)
    part = Node(Own(*HOW, axis=1), sums)
    after = staged(local_of(x, part, Placement(((), ()), ("tp",)), Placement(((), ("tp",)))), "canonical")
    assert after.outputs == (Node(ReduceScatter(*HOW, axis=1), x),)
    both = Graph("g", (x,), (part, sums), ("a", "b"))
    assert staged(both, "canonical").outputs == both.outputs
    gathered = Node(AllGather(*HOW), input_("x", F32, (2, 8)))
    small = gathered.src[0]
    assert staged(local_of(small, Node(Own(*HOW), gathered), ROWS, ROWS), "canonical").outputs == (small,)
    turned = staged(local_of(small, Node(Own(*HOW, axis=1), gathered), ROWS, Placement(((), ("tp",)))), "canonical")
    assert travels(turned) == [("all_to_all", "f32[8,2]", False)]
    data = {"x": torch.arange(64.0).reshape(8, 8)}
    assert torch.equal(run(turned, data)[0], data["x"])
    again = staged(local_of(x, Node(AllGather(*HOW), Node(Own(*HOW), x)), WHOLE, WHOLE), "canonical")
    assert again.outputs == (x,)


@pytest.mark.parametrize("op", [AllGather, AllReduce, AllToAll, Own, ReduceScatter])
def test_one_rank_alone_exchanges_nothing(op):
    """Nor over several such axes; where one of two has more ranks, values travel."""
    x = input_("x", F32, (8, 8))
    for how, left in (((("tp",), (1,)), False), ((("dp", "tp"), (1, 1)), False), ((("dp", "tp"), (1, 2)), True)):
        (after,) = staged(Graph("g", (x,), (Node(op(*how), x),), ("y",)), "canonical").outputs
        assert (after != x) == left


def dynamic(x: Node, to: DType = F8E4M3FN) -> tuple[Node, Node]:
    """Codes of rows and their scales, which the largest magnitudes give."""
    largest = reduce_("maximum", map_("abs", x), [1], keepdims=True)
    scale = map_("divide", largest, const(448.0 if to.is_float else 127.0, F32))
    return Node(Quantize(to), x, scale), scale


@pytest.mark.parametrize("to", [F8E4M3FN, S8], ids=str)
def test_codes_travel_and_not_floats(to):
    """norm, quantisation by rows, product: rows are gathered as codes of 8 bits with a scale each, inside the product."""
    m, k, n = 16, 64, 32
    x, w = input_("x", BF16, (m, k)), const(torch.randn(k, n) / 8)
    codes, scale = dynamic(convert(Node(LayerNorm(1, 1e-5, center=False), placed(x, "tp", "")), F32), to)
    wcodes, wscale = Node(Quantize(to), w, const(0.01, F32)), const(torch.full((1, n), 0.01))
    a, b = Node(Dequantize(F32), codes, scale), Node(Dequantize(F32), wcodes, wscale)
    after, trace = folded(on("tp=4", gemm(a, placed(b, "", "tp"), out_dtype=BF16)), rtol=4e-2)
    assert sorted(travels(after)) == [("all_gather", "f32[16,1]", True), ("all_gather", f"{to}[16,64]", True)]
    assert wire_bytes(after) == 3 * (m // 4) * (k + 4) and why_outside(after, trace) == {}
    (product,) = [n for n in after.nodes() if isinstance(n.op, Gemm)]
    assert product.op.lhs.dtype is to and all(s.shape[0] in (4, k) or s.constant for s in product.src)
    assert [n.shape for n in after.nodes() if isinstance(n.op, LayerNorm)] == [(4, 64)]


def test_what_is_narrowed_is_narrowed_before_it_is_gathered():
    x, r = input_("x", F32, (16, 8)), input_("r", F32, (16, 8))
    y = convert(map_("add", map_("tanh", placed(placed(x, "tp", ""), "", "")), r), BF16)
    after, trace = folded(on("tp=4", map_("negate", y)), rtol=1e-2)
    assert travels(after) == [("all_gather", "bf16[16,8]", False)]
    assert outside(after, trace) == ["it leaves the program"]
    assert all(n.shape == (4, 8) for n in after.nodes() if n.op.name in ("map", "convert"))


def test_what_would_send_more_is_left():
    x = placed(placed(input_("x", BF16, (16, 8)), "tp", ""), "", "")
    for y in (convert(x, F32), reduce_("add", x, [0])):
        local = localise(on("tp=4", y))
        assert staged(local, "wire").outputs == local.outputs
    both = localise(on("tp=4", map_("tanh", x), map_("exponential", x)))  # one gather serves both
    assert len(travels(staged(both, "wire"))) == 1
    weights = input_("w", BF16, (16, 8))
    split = placed(weights, "", "tp")  # each rank adds something else
    local = localise(on("tp=4", map_("add", x, split)))
    assert wire_bytes(staged(local, "wire")) <= wire_bytes(local)
    data = {"x": torch.randn(16, 8).bfloat16(), "w": torch.randn(16, 8).bfloat16()}
    assert torch.equal(run(staged(local, "wire"), data)[0], data["x"] + data["w"])


def test_a_value_that_differs_by_rank_does_not_move_before_a_gather():
    x = input_("x", F32, (2, 8))
    y = map_("multiply", Node(AllGather(*HOW), x), Node(Own(*HOW, axis=1), const(torch.arange(32.0).reshape(1, 32))))
    local = local_of(x, y, ROWS, Placement(((), ()), ("tp",)))
    assert staged(local, "wire").outputs == local.outputs


def test_what_is_widened_is_widened_behind_the_gather():
    codes, scales = input_("x", S8, (16, 8)), input_("s", F32, (16, 1))
    wide = Node(Dequantize(F32), placed(codes, "tp", ""), placed(scales, "tp", ""))
    feeds = {"x": torch.randint(-128, 128, (16, 8), dtype=torch.int8), "s": torch.rand(16, 1)}
    after, _ = folded(on("tp=4", placed(wide, "", "")), feeds, rtol=0)
    assert sorted(travels(after)) == [("all_gather", "f32[16,1]", False), ("all_gather", "s8[16,8]", False)]
    one = Node(Dequantize(F32), placed(codes, "tp", ""), const(0.5, F32))
    after, _ = folded(on("tp=4", placed(one, "", "")), {"x": feeds["x"]}, rtol=0)
    assert travels(after) == [("all_gather", "s8[16,8]", False)]
    few = Node(Dequantize(F32), placed(input_("x", S8, (16, 2)), "tp", ""), placed(scales, "tp", ""))
    after, _ = folded(on("tp=4", placed(few, "", "")), {"x": feeds["x"][:, :2].clone(), "s": feeds["s"]}, rtol=0)
    assert len(travels(after)) == 2  # 6 bytes a row in place of 8
    twice = localise(on("tp=4", placed(wide, "", ""), map_("abs", wide)))
    assert travels(staged(twice, "wire")) == [("all_gather", "f32[16,8]", False)]


def attention_layer(x: Node, heads: int, kv: int, hidden: int, dtype: DType = F32) -> Node:
    """One decoder layer of Llama under Megatron's plan: QKV, gate and up by columns, o and down by rows."""
    rows, width = x.shape
    depth = width // heads
    generator = torch.Generator().manual_seed(rows + width)

    def linear(x: Node, k: int, n: int, *split: str) -> Node:
        weight = (torch.randn(k, n, generator=generator) / math.sqrt(k)).to(dtype.to_torch())
        return gemm(x, placed(const(weight), *split), out_dtype=dtype)

    def by_heads(x: Node, count: int) -> Node:
        return transpose(reshape(x, (1, rows, count, depth)), (0, 2, 1, 3))

    def norm(x: Node) -> Node:
        return Node(LayerNorm(1, 1e-5, center=False), x, const(torch.ones(width, dtype=dtype.to_torch())))

    n = norm(x)
    q, k, v = (by_heads(linear(n, width, h * depth, "", "tp"), h) for h in (heads, kv, kv))
    a = Node(Attention(1 / math.sqrt(depth), "upper"), q, k, v)
    h = map_("add", linear(reshape(transpose(a, (0, 2, 1, 3)), (rows, width)), width, width, "tp", ""), x)
    n = norm(h)
    gated = map_("multiply", map_("silu", linear(n, width, hidden, "", "tp")), linear(n, width, hidden, "", "tp"))
    return map_("add", linear(gated, hidden, width, "tp", ""), h)


def unplaced(graph: Graph) -> Graph:
    """The program for one device."""
    made: dict[Node, Node] = {}
    for n in graph.nodes():
        made[n] = made[n.src[0]] if isinstance(n.op, Place) else n.with_src([made[s] for s in n.src])
    return replace(graph, outputs=tuple(made[o] for o in graph.outputs), mesh=None)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_llama_layer_has_two_all_reduces(dtype):
    x = input_("x", dtype, (32, 64))
    graph = on("tp=4", attention_layer(x, 8, 4, 128, dtype))
    after, trace = folded(graph, rtol=1e-5 if dtype is F32 else 5e-2)
    assert travels(after) == [("all_reduce", f"{dtype}[32,64]", True)] * 2 and why_outside(after, trace) == {}
    alone = optimise(unplaced(graph))
    products = [[n for n in g.nodes() if isinstance(n.op, Gemm)] for g in (alone, after)]
    assert len(products[0]) == len(products[1]) == 4 and arithmetic(alone) == 4 * arithmetic(after)
    # Q, K and V; o, with the norm behind it; gate and up; down
    assert [[s.op.name for s in n.op.stores] for n in products[1][1:]] == [["map", "layer_norm"], ["map"], ["map"]]
    assert len(products[1][0].op.stores) == 3
    for n in products[1][1::2]:  # the residual is added behind the reduction
        assert isinstance(n.op.stores[0].src[0].op, AllReduce)


def test_norms_and_codes_of_several_layers_are_stored_by_products():
    """Each reduction's residual, norm and codes by row are its product's; the first norm alone has no product before it."""
    x, scales = input_("x", BF16, (16, 64)), []
    for n in range(3):
        up, down = (const((torch.randn(64, 64, generator=torch.Generator().manual_seed(n + i)) / 8).bfloat16()) for i in (0, 9))
        codes, scale = dynamic(convert(Node(LayerNorm(1, 1e-5, center=False), x, const(torch.ones(64).bfloat16())), F32))
        wide = gemm(Node(Dequantize(BF16), codes, scale), placed(up, "", "tp"), out_dtype=BF16)
        x = map_("add", gemm(wide, placed(down, "tp", ""), out_dtype=BF16), x)
        scales.append(scale)
    after, trace = folded(on("tp=4", x, scales[-1]), rtol=5e-2)
    assert travels(after) == [("all_reduce", "bf16[16,64]", True)] * 3 and why_outside(after, trace) == {}
    stores = [[s.op.name for s in n.op.stores] for n in after.nodes() if isinstance(n.op, Gemm)]
    assert [sorted(names) for names in stores[1::2]] == [["map", "map", "quantize"]] * 2 + [["map"]]
    assert len([n for n in after.nodes() if isinstance(n.op, LayerNorm)]) == 1


def test_what_waits_for_another_product_is_not_stored_by_a_reduction():
    """Two products that each add the other's sums behind their norm: neither can be first."""
    x = input_("x", F32, (16, 32))
    w = [input_(name, F32, (32, 64)) for name in "ab"]
    sums = [gemm(placed(x, "", "tp"), placed(n, "tp", "")) for n in w]
    norms = [Node(LayerNorm(1, 1e-5, center=False), s) for s in sums]
    crossed = [map_("add", norms[0], map_("tanh", sums[1])), map_("add", norms[1], map_("tanh", sums[0]))]
    after, _ = folded(on("tp=4", *crossed), rtol=1e-5)
    assert [carried for _, _, carried in travels(after)] == [True, True]
    stores = [[s.op.name for s in n.op.stores] for n in after.nodes() if isinstance(n.op, Gemm)]
    assert [sorted(names) for names in stores] == [["layer_norm", "map"]] * 2
    after, _ = folded(row_parallel(lambda y: reduce_("add", map_("tanh", y), [0], keepdims=True)))
    assert [s.op.name for n in after.nodes() if isinstance(n.op, Gemm) for s in n.op.stores] == ["map"]  # rows are mixed


def test_a_llama_layer_with_its_rows_shared_out():
    """Two gathers and two reduce-scatters, of as many bytes, all carried; norms and residuals on a rank's rows alone."""
    x = input_("x", F32, (32, 64))
    whole = localise(on("tp=4", placed(attention_layer(placed(x, "tp", ""), 8, 4, 128), "tp", "")))
    after = optimise(whole)
    assert sorted(travels(after)) == [("all_gather", "f32[32,64]", True)] * 2 + [("reduce_scatter", "f32[8,64]", True)] * 2
    assert all(n.shape == (8, 64) for n in after.nodes() if isinstance(n.op, LayerNorm))
    assert len([n for n in after.nodes() if isinstance(n.op, Gemm)]) == 4
    graph = on("tp=4", attention_layer(x, 8, 4, 128))
    local = localise(graph)
    shared = sequence_parallel(local)
    assert collectives(local) == ["all_reduce"] * 2
    assert sorted(n for n, _, _ in travels(shared)) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert wire_bytes(shared) == wire_bytes(local)
    feeds = {"x": torch.randn(32, 64)}
    for g in (shared, optimise(shared)):
        torch.testing.assert_close(run(g, feeds)[0], evaluate(graph, feeds, float64=True)[0], rtol=1e-5, atol=1e-5)
    assert [n.shape for n in shared.nodes() if isinstance(n.op, LayerNorm)] == [(32, 64), (8, 64)]


def test_rows_that_ranks_cannot_share_out_are_left():
    x, w = input_("x", F32, (6, 32)), input_("w", F32, (32, 8))
    local = localise(on("tp=4", Node(LayerNorm(1, 1e-5), gemm(placed(x, "", "tp"), placed(w, "tp", "")))))
    assert sequence_parallel(local) is local and sequence_parallel(on("tp=4", x)).local is False
    sums = localise(on("tp=4", gemm(placed(x, "", "tp"), placed(w, "tp", ""))))
    assert sequence_parallel(sums) is sums  # nothing is computed behind it


def row_parallel(tail, dtype: DType = F32, m: int = 16) -> Graph:
    x, w = input_("x", dtype, (m, 32)), input_("w", dtype, (32, 64))
    return on("tp=4", tail(gemm(placed(x, "", "tp"), placed(w, "tp", ""), out_dtype=dtype)))


TAILS = {
    "bias": lambda y: map_("add", y, input_("bias", F32, (64,))),
    "gelu": lambda y: map_("gelu", map_("add", y, input_("bias", F32, (64,)))),
    "residual": lambda y: map_("add", y, input_("r", F32, (16, 64))),
    "quantised": lambda y: Node(Quantize(S8), y, const(0.5, F32)),
    "rows": lambda y: placed(map_("relu", map_("add", y, input_("r", F32, (16, 64)))), "tp", ""),
    "turned": lambda y: transpose(map_("relu", y), (1, 0)),
}


@pytest.mark.parametrize("name", TAILS)
def test_what_follows_a_reduction_folds_as_it_does_without_one(name):
    graph = row_parallel(TAILS[name])
    after, trace = folded(graph, rtol=1e-5)
    assert [carried for _, _, carried in travels(after)] == [True] and why_outside(after, trace) == {}
    assert [n.op.name for n in after.nodes() if n.src and n.op.name not in ("own", "place")] == ["gemm"]


def test_what_stays_outside_is_said():
    x, w = input_("x", F32, (16, 32)), input_("w", F32, (32, 64))
    sums = gemm(placed(x, "", "tp"), placed(w, "tp", ""))
    total = reduce_("add", map_("abs", placed(x, "", "tp")), [1], keepdims=True)
    after, trace = folded(on("tp=4", map_("add", total, const(1.0, F32))))
    assert outside(after, trace) == ["what it reduces is no product's, but reduce"]
    rows = placed(placed(x, "tp", ""), "", "")
    after, trace = folded(on("tp=4", gemm(rows, placed(w, "", "tp")), reduce_("add", rows, [0])))
    assert outside(after, trace) == ["2 operations read what is gathered"]
    after, trace = folded(on("tp=4", map_("maximum", sums, const(0.0, F32)), placed(map_("tanh", sums), "tp", "")))
    assert [carried for _, _, carried in travels(after)] == [True]
    turned = placed(placed(x, "tp", ""), "", "tp")
    after, trace = folded(on("tp=4", turned))
    assert outside(after, trace) == ["no operand or store is read through an exchange of parts"]
    u = input_("u", U8, (16, 32))
    a = Node(Dequantize(F32), placed(u, "", "tp"), const(0.5, F32), const(torch.tensor(3, dtype=torch.uint8), U8))
    b = Node(Dequantize(F32), placed(input_("v", S8, (32, 64)), "tp", ""), const(0.5, F32))
    feeds = {"u": torch.randint(0, 256, (16, 32), dtype=torch.uint8), "v": torch.randint(-128, 128, (32, 64), dtype=torch.int8)}
    after, trace = folded(on("tp=4", gemm(a, b)), feeds)
    assert outside(after, trace) == ["its store adds to the sums of each rank, or is no linear function of them"]


def test_a_store_that_is_not_linear_below_its_reduction_is_refused():
    """A bias that every rank adds, or a function of each rank's sums, is another program."""
    acc, bias = Node(Acc(TensorType(F32, (8, 8)))), Node(Param(2, TensorType(F32, (8,))))
    x, w, b = (input_(n, F32, s) for n, s in (("x", (8, 8)), ("w", (8, 8)), ("b", (8,))))
    lhs, rhs = Node(Param(0, x.tensor)), Node(Param(1, w.tensor))
    for below in (
        map_("add", acc, bias),
        map_("relu", acc),
        map_("multiply", acc, acc),
        convert(acc, S8),
        Node(Quantize(S8), acc, const(1.0)),
    ):
        with pytest.raises(TypeMismatchError, match="between acc and its all_reduce stands what is not linear"):
            verify(Graph("g", (x, w, b), (Node(Gemm(F32, lhs, rhs, (Node(AllReduce(*HOW), below),)), x, w, b),), ("y",)))
    for below in (acc, convert(map_("multiply", acc, bias), BF16), reshape(acc, (64,)), map_("negate", acc)):
        verify(Graph("g", (x, w, b), (Node(Gemm(F32, lhs, rhs, (Node(AllReduce(*HOW), below),)), x, w, b),), ("y",)))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=placed_programs())
def test_random_programs_keep_what_they_mean(case):
    """Rules, and rows shared out, leave the same results, no more bytes, no more products."""
    whole, feeds = case
    local, trace = localise(whole), Trace()
    after, shared = optimise(local, trace), sequence_parallel(local)
    for made in (after, shared):
        for wanted, found in zip(run(local, feeds), run(made, feeds), strict=True):
            assert_agree(local, wanted, found)
        assert wire_bytes(made) <= wire_bytes(local) and arithmetic(made) <= arithmetic(local)
    assert all(why and n in after.nodes() for n, why in why_outside(after, trace).items())
