"""Prologues: views, widening casts and dequantisation in every form before a product are read where it is multiplied."""

import pytest
import torch
from onnx_models import read
from rule_checks import (
    assert_close,
    assert_exact,
    assert_no_growth,
    assert_order_is_free,
    fired,
    gemms,
    graph_of,
    kinds,
    results,
    same_bits,
    staged,
    steps,
    traffic,
)

from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F16, F32, PRED, S4, S8, S32, S64, U4, U8
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Attention, Concat, Dequantize, Gather, LayerNorm, Map, gemm
from tilewright.ir.ops.functions import narrow_integer
from tilewright.schedule.problem import problem_of

OPERAND = "read_operand_through_views_and_casts"
SIDE = "read_side_inputs_unbroadcast"
M, N, K = 6, 8, 12


def codes(dtype, shape, seed=0):
    """Random codes of the type's whole range."""
    g = torch.Generator().manual_seed(seed)
    if dtype.is_integer:
        wide = torch.randint(int(dtype.min), int(dtype.max) + 1, shape, generator=g, dtype=torch.int64)
        return narrow_integer(wide, dtype)
    return (torch.randn(shape, generator=g) * 2).to(dtype.to_torch())


def one_gemm(before):
    """The one step that everything becomes, checked; it reads no more than what is stored."""
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["gemm"], kinds(after)
    assert_no_growth(before, after)
    assert_exact(before, after)
    return gemms(after)[0]


VIEWS = {
    "transposed": (lambda a: swap_last(a), (K, M)),
    "reshaped": (lambda a: reshape(a, (M, K)), (2, 3, K)),
    "heads": (lambda a: reshape(transpose(a, (0, 2, 1)), (M, K)), (M, 4, 3)),
    "part": (lambda a: slice_(a, 1, 2, 2 + K), (M, 20)),
    "rows": (lambda a: slice_(a, 0, 1, 1 + M), (9, K)),
    "broadcast": (lambda a: broadcast(a, (M, K)), (1, K)),
    "part of a transposed part": (lambda a: slice_(swap_last(slice_(a, 0, 1, 1 + K)), 0, 0, M), (K + 2, 7)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_either_operand_are_how_it_is_read(name):
    view, shape = VIEWS[name]
    left = graph_of(gemm(view(input_("a", F32, shape)), input_("b", F32, (K, N))))
    node = one_gemm(left)
    assert node.src[0].op.name == "input" and fired(left, OPERAND) >= 1
    right = graph_of(gemm(input_("b", F32, (N, K)), swap_last(view(input_("a", F32, shape)))))
    node = one_gemm(right)
    assert all(s.op.name == "input" for s in node.src)


CASTS = [(F16, F32), (BF16, F32), (S8, F16), (S8, F32), (S4, F16), (U4, BF16), (U8, F16), (F8E4M3FN, BF16), (F8E5M2, F16)]


@pytest.mark.parametrize(("stored", "wide"), CASTS, ids=lambda d: str(d))
def test_widening_casts_are_read_narrow(stored, wide):
    a = input_("a", wide, (M, K))
    before = graph_of(gemm(a, convert(const(codes(stored, (K, N)), stored), wide), out_dtype=wide))
    node = one_gemm(before)
    assert node.src[1].dtype is stored
    computed = graph_of(gemm(a, convert(input_("b", stored, (K, N)), wide), out_dtype=wide))
    assert one_gemm(computed).src[1].dtype is stored
    assert traffic(optimise(computed)) < traffic(computed)


@pytest.mark.parametrize(("stored", "narrow"), [(F32, F16), (F32, BF16), (S32, F16), (S32, S8)], ids=lambda d: str(d))
def test_narrowing_casts_stay_where_they_are(stored, narrow):
    """The narrow copy is smaller to read: what becomes of it is up to the last stage."""
    before = graph_of(gemm(convert(input_("a", stored, (M, K)), narrow), input_("b", narrow, (K, N))))
    after = staged(before, "prologue")
    assert fired(before, OPERAND) == 0 and len(kinds(after)) == 2
    assert gemms(after)[0].src[0].dtype is narrow


def test_other_readers_keep_the_wide_copy():
    wide = convert(input_("a", F16, (M, K)), F32)
    before = graph_of(gemm(wide, input_("b", F32, (K, N))), wide)
    after = optimise(before)
    assert gemms(after)[0].src[0].dtype is F16 and after.outputs[1] == wide
    assert_exact(before, after)


def test_a_store_reads_an_operand_as_the_product_does():
    """A residual that is the operand: through the same cast, with no second copy."""
    x = convert(input_("x", F16, (M, M)), F32)
    node = one_gemm(graph_of(map_("add", gemm(x, input_("b", F32, (M, M))), x)))
    assert [s.dtype for s in node.src] == [F16, F32]


def test_a_slice_that_a_store_reads_too_stays():
    """The product could cut it, but the store would have to cut it once more."""
    x = slice_(input_("x", F32, (M + 2, M)), 0, 0, M)
    before = graph_of(map_("add", gemm(x, input_("b", F32, (M, M))), x))
    after = assert_order_is_free(before, orders=4)
    assert x in after.nodes()
    assert_exact(before, after)


# Weights alone are quantised: by tensor, column, or groups of K, with and without zero points


@pytest.mark.parametrize("turned", [False, True], ids=["[K, N]", "[N, K]"])
@pytest.mark.parametrize("shifted", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("stored", "activation"), [(S4, F16), (U4, F16), (S8, F16), (U8, BF16), (S4, F32), (S8, BF16)], ids=lambda d: str(d)
)
def test_weight_only_quantisation(stored, activation, group, shifted, turned):
    k, n = 160, 8  # the last group of 64 and of 128 is cut short
    axis = 1 if turned else 0
    shape = (n, k) if turned else (k, n)
    scales = tuple(1 if group == 0 and a == axis else -(-d // (group if a == axis else 1)) for a, d in enumerate(shape))
    block = tuple(group if a == axis else 1 for a in range(2)) if group else None
    extra = [const(codes(stored, scales, 1), stored)] if shifted else []
    scale = const(torch.rand(scales, generator=torch.Generator().manual_seed(2)) * 0.1)
    w = Node(Dequantize(activation, block), const(codes(stored, shape), stored), scale, *extra)
    before = graph_of(gemm(input_("a", activation, (5, k)), swap_last(w) if turned else w, out_dtype=activation))
    node = one_gemm(before)
    right = problem_of(node).rhs
    assert node.src[right.source].dtype is stored and right.transposed is turned
    assert node.op.acc_dtype is F32 and node.dtype is activation


def test_a_weight_of_matmulnbits_is_read_in_its_groups():
    """The packing of ONNX's MatMulNBits ends in the same operand as a blocked DequantizeLinear's."""
    from onnx import TensorProto, helper, numpy_helper

    k, n, group = 64, 8, 32
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (n, k // group, group // 2), generator=g, dtype=torch.uint8)
    scales = torch.rand((n, k // group), generator=g)
    zeros = torch.randint(0, 256, (n, k // group // 2), generator=g, dtype=torch.uint8)
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s", "z"], ["y"], domain="com.microsoft", K=k, N=n, bits=4, block_size=group
    )
    graph = helper.make_graph(
        [node],
        "nbits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (5, k))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (5, n))],
        [numpy_helper.from_array(t.numpy(), name) for name, t in (("w", packed), ("s", scales), ("z", zeros))],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    before = read(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    after = optimise(before)
    assert kinds(after) == ["gemm"]
    assert_exact(before, after)
    w = torch.stack([packed & 15, packed >> 4], -1).reshape(n, k).double()
    z = torch.stack([zeros & 15, zeros >> 4], -1).reshape(n, -1).double()
    wanted = (w - z.repeat_interleave(group, 1)) * scales.double().repeat_interleave(group, 1)
    x = torch.randn(5, k)
    (got,) = results(after, {"x": x})
    assert torch.allclose(got.double(), x.double() @ wanted.T, rtol=1e-5)


@pytest.mark.parametrize(
    ("left", "right", "to"), [(S4, F16, F16), (S8, F16, F16), (F8E4M3FN, BF16, BF16), (F8E4M3FNUZ, F16, F16), (S8, BF16, BF16)]
)
def test_a_quantised_left_operand_is_read_as_codes(left, right, to):
    a = Node(Dequantize(to), input_("a", left, (M, K)), const(0.05, F32))
    node = one_gemm(graph_of(gemm(a, input_("b", right, (K, N)), out_dtype=to)))
    assert [s.dtype for s in node.src] == [left, right]


def test_attention_reads_what_is_stored():
    q, k, v = (input_(n, S8, (2, 6, 4, 8)) for n in "qkv")
    wide = [transpose(Node(Dequantize(F32), t, const(0.02, F32)), (0, 2, 1, 3)) for t in (q, k, v)]
    before = graph_of(Node(Attention(0.25), *wide))
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["attention"] and after.outputs[0].src == (q, k, v)
    assert_no_growth(before, after)
    assert_exact(before, after)


@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (7,), (1, 1, 5, 7)], ids=str)
def test_a_mask_of_integers_that_is_one_row_for_all_queries_is_read_as_it_lies(shape):
    q, k, v = (input_(n, F32, (2, 3, rows, 8)) for n, rows in (("q", 5), ("k", 7), ("v", 7)))
    given = input_("mask", S64, shape)
    before = graph_of(Node(Attention(0.3, zero_masked_rows=True), q, k, v, convert(given, PRED)))
    after = optimise(before)
    (found,) = (n for n in after.nodes() if isinstance(n.op, Attention))
    assert (found.src[3] is given) == (shape[-2:-1] in ((), (1,)))
    assert_close(before, after, 1e-5)


def paged(pick, queries=1):
    q, k, v = (input_(n, F32, s) for n, s in (("q", (2, 4, queries, 8)), ("k", (9, 3, 2, 8)), ("v", (9, 3, 2, 8))))
    table, shown = input_("table", S64, (2, 5)), input_("shown", PRED, (2, 1, 1, 15))
    k, v = (transpose(reshape(pick(cache, table), (2, 15, 2, 8)), (0, 2, 1, 3)) for cache in (k, v))
    return graph_of(Node(Attention(0.3), q, k, v, shown))


@pytest.mark.parametrize(
    "pick",
    [lambda cache, table: Node(Gather(0), cache, table), lambda cache, table: Node(Gather(0), cache, reshape(table, (10,)))],
    ids=["cache[table]", "index_select"],
)
def test_a_paged_cache_is_read_where_it_lies_by_few_queries(pick):
    before = paged(pick)
    after = optimise(before)
    (found,) = (n for n in after.nodes() if n.src)
    assert isinstance(found.op, Attention) and {s.shape for s in found.src} >= {(9, 3, 2, 8), (2, 5)}
    generator = torch.Generator().manual_seed(0)
    feeds = {n.op.label: torch.randn(n.shape, generator=generator) for n in before.inputs if n.dtype is F32}
    feeds |= {"table": torch.randint(-9, 9, (2, 5), generator=generator), "shown": torch.rand(2, 1, 1, 15) > 0.3}
    (a,), (b,) = (evaluate(g, feeds) for g in (before, after))
    torch.testing.assert_close(a, b)
    assert any(isinstance(n.op, Gather) for n in optimise(paged(pick, queries=33)).nodes())  # many read the same blocks


def test_what_computes_a_cache_stays_before_its_table():
    """The kernel picks from memory alone."""
    after = optimise(paged(lambda cache, table: Node(Gather(0), map_("tanh", cache), table)))
    assert any(isinstance(n.op, Map) for n in after.nodes())


def test_what_computes_is_no_prologue():
    """A norm, a concat are steps of their own: reading them in the product would do their work again and again."""
    x = input_("x", F32, (M, K))
    for made in (
        map_("tanh", Node(LayerNorm(1, 1e-5), x, const(torch.ones(K)), const(torch.zeros(K)))),
        Node(LayerNorm(1, 1e-5), x, const(torch.ones(K)), const(torch.zeros(K))),
        Node(Concat(0), x, input_("y", F32, (2, K))),
    ):
        before = graph_of(gemm(made, input_("b", F32, (K, N))))
        after = optimise(before)
        assert fired(before, OPERAND) == 0 and len(steps(after)) == 2 and made in after.nodes()


# Side inputs


def test_a_bias_stays_a_vector_however_it_is_written():
    a, b, bias = input_("a", F32, (M, K)), input_("b", F32, (K, N)), input_("bias", F16, (N,))
    for written in (
        broadcast(reshape(convert(bias, F32), (1, N)), (M, N)),
        convert(broadcast(bias, (M, N)), F32),
        swap_last(broadcast(reshape(convert(bias, F32), (N, 1)), (N, M))),
    ):
        node = one_gemm(graph_of(map_("add", gemm(a, b), written)))
        assert node.src[2] is bias


def test_a_residual_that_arrives_as_codes_is_read_as_codes():
    a, b = input_("a", F32, (M, K)), input_("b", F32, (K, N))
    residual = input_("r", S8, (M, N))
    node = one_gemm(graph_of(map_("add", gemm(a, b), Node(Dequantize(F32), residual, const(0.1, F32)))))
    assert node.src[2] is residual


def test_a_side_input_that_is_cut_out_or_narrowed_stays():
    a, b = input_("a", F32, (M, K)), input_("b", F32, (K, N))
    part = slice_(input_("r", F32, (M, N + 3)), 1, 0, N)
    before = graph_of(map_("add", gemm(a, b), part))
    assert part in staged(before, "epilogue", "prologue").nodes() and fired(before, SIDE) == 0
    narrowed = convert(input_("r", F32, (M, N)), F16)
    low = gemm(input_("a", F16, (M, K)), input_("b", F16, (K, N)), out_dtype=F16)
    assert narrowed in staged(graph_of(map_("add", low, narrowed)), "epilogue", "prologue").nodes()


def test_nan_and_infinity_among_codes():
    """An 8-bit float operand keeps its NaN and infinities."""
    x = torch.tensor([[float("inf"), 1.0], [float("nan"), 2.0], [3.0, -float("inf")]]).to(torch.float8_e5m2)
    a = Node(Dequantize(F16), input_("a", F8E5M2, (3, 2)), const(0.5, F32))
    before = graph_of(gemm(a, input_("b", F16, (2, 2)), out_dtype=F16))
    feeds = {"a": x, "b": torch.ones(2, 2).half()}
    (wanted,), (got,) = results(before, feeds), results(optimise(before), feeds)
    assert same_bits(got, wanted) and got[1].isnan().all() and got[0].isinf().all()


def test_only_what_is_used_remains_a_source():
    """Folding leaves no source behind that no expression reads."""
    x = input_("x", F16, (2, 3, K))
    wide = reshape(convert(x, F32), (M, K))
    before = graph_of(gemm(wide, swap_last(wide)))
    node = one_gemm(before)
    assert node.src == (x,)
    assert all(n.op.name in ("param", "convert", "reshape", "transpose") for n in toposort((node.op.lhs, node.op.rhs)))


def test_the_stage_alone_does_it():
    before = graph_of(gemm(convert(input_("a", F16, (M, K)), F32), input_("b", F32, (K, N))))
    assert kinds(staged(before, "prologue")) == ["gemm"]
