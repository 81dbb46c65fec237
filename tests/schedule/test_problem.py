"""Problems of gemms, attentions and fusions, read off their expressions."""

import pytest
import torch

from tilewright.dtype import BF16, F16, F32, F64, S4, S8, S32
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Acc, Attention, Convert, Dequantize, Gemm, LayerNorm, Param, Quantize, gemm
from tilewright.ir.ops.attention import Causal, causal_shift, pairs_seen
from tilewright.ir.types import TensorType
from tilewright.schedule.problem import AttentionProblem, Problem, fusion_of, problem_of, read_operand


def posed(text):
    return problem_of(parse(text).outputs[0])


def test_extents_work_and_traffic():
    p = posed("bf16[2,1,48,64] @ s4[3,32,64]^T group=16 + bias, gelu -> bf16")
    assert (p.kind, p.batch, p.M, p.N, p.K) == ("gemm", 6, 48, 32, 64)
    assert p.acc == TensorType(F32, (2, 3, 48, 32)) and p.outputs == (TensorType(BF16, (2, 3, 48, 32)),)
    assert p.ops == 2 * 6 * 48 * 32 * 64
    assert p.bytes == 2 * 48 * 64 * 2 + 3 * 32 * 64 // 2 + 3 * 32 * 4 * 2 + 32 * 2 + 6 * 48 * 32 * 2
    assert str(p) == "bf16[2,1,48,64] @ s4[3,32,64]^T group=16 + bias:bf16, gelu -> bf16"
    assert p.weights == (False,) * 4


@pytest.mark.parametrize("text", ["f32[0,5] @ f32[5,6]", "f32[4,0] @ f32[0,6]", "s8[0,3,0] @ s8[0,0]"])
def test_empty_problems_have_numbers_too(text):
    p = posed(text)
    assert p.ops == 0 and p.bytes >= 0 and str(p) == text


def test_equal_problems_are_equal_wherever_they_stand():
    a, b = input_("a", F32, (4, 8)), input_("b", F32, (8, 2))
    other = gemm(input_("x", F32, (4, 8)), input_("y", F32, (8, 2)))
    assert problem_of(gemm(a, b)) == problem_of(other) and hash(problem_of(gemm(a, b))) == hash(problem_of(other))
    weighted = problem_of(gemm(a, const([[0.0] * 2] * 8, F32)))
    assert weighted != problem_of(other) and weighted.weights == (False, True)
    folded = problem_of(gemm(a, swap_last(const([[0.0] * 8] * 2, F32))))
    assert folded.weights == (False, True)


P = Node(Param(3, TensorType(S8, (2, 6, 4))))


def test_a_plain_operand():
    o = read_operand(P)
    assert (o.source, o.stored, o.dtype, o.shape) == (3, P.tensor, S8, (2, 6, 4))
    assert o.plain and not o.transposed and o.views == () and o.dequantize is None


def test_a_transposed_operand():
    o = read_operand(swap_last(P))
    assert o.plain and o.transposed and o.shape == (2, 4, 6) and [v.op.name for v in o.views] == ["transpose"]
    rearranged = read_operand(transpose(P, (1, 0, 2)))
    assert rearranged.plain and not rearranged.transposed


def test_views_are_listed_from_the_source_outward():
    o = read_operand(slice_(broadcast(reshape(swap_last(P), (1, 2, 24)), (5, 2, 24)), 0, 1, 3))
    assert [v.op.name for v in o.views] == ["transpose", "reshape", "broadcast", "slice"]
    assert o.plain and not o.transposed and o.source == 3 and o.stored is P.tensor


def test_a_dequantised_operand():
    scale = Node(Param(0, TensorType(F32, ())))
    d = Node(Dequantize(BF16), P, scale)
    o = read_operand(swap_last(d))
    assert o.dequantize is d and not o.plain and o.dtype is BF16 and o.stored.dtype is S8 and o.transposed
    assert [v.op.name for v in o.views] == ["transpose"]


def test_a_converted_operand_is_not_plain():
    o = read_operand(convert(P, F16))
    assert o.source == 3 and not o.plain and o.dequantize is None and o.dtype is F16


def test_a_general_prologue_has_no_one_source():
    for root in (
        map_("add", P, Node(Param(4, P.tensor))),
        swap_last(map_("abs", P)),
        Node(Dequantize(F32), Node(Dequantize(F32), P, const(1.0, F32)), const(1.0, F32)),
    ):
        o = read_operand(root)
        assert o.source is None and not o.plain and o.stored == root.tensor and o.views == ()


A, B = Node(Param(0, TensorType(BF16, (3, 8)))), Node(Param(1, TensorType(BF16, (8, 4))))
ACC = Node(Acc(TensorType(F32, (3, 4))))


@pytest.mark.parametrize(
    ("stores", "wanted"),
    [
        ([ACC], F32),
        ([convert(ACC, BF16)], BF16),
        ([map_("tanh", convert(ACC, BF16))], BF16),
        ([map_("tanh", ACC)], F32),
        ([convert(map_("tanh", ACC), BF16)], F32),
        ([convert(ACC, BF16), convert(ACC, F16)], F32),
        ([convert(ACC, BF16), map_("tanh", convert(ACC, BF16))], BF16),
        ([convert(ACC, BF16), ACC], F32),
        ([map_("add", convert(convert(ACC, BF16), F32), ACC)], F32),
        ([convert(slice_(ACC, -1, 0, 1), BF16), convert(slice_(ACC, -1, 1, 4), BF16)], BF16),
        ([convert(slice_(ACC, -1, 0, 1), BF16), slice_(ACC, -1, 1, 4)], F32),
        ([Node(Convert(BF16, "saturate"), ACC)], F32),
        ([convert(ACC, S8)], F32),
        ([convert(ACC, F64)], F64),
        ([A], F32),
    ],
)
def test_the_first_conversion(stores, wanted):
    op = Gemm(F32, A, B, tuple(stores))
    assert Problem(op, (A.tensor, B.tensor), (False, False)).first_conversion() is wanted


def test_integers_have_their_first_conversion_too():
    assert posed("s8[2,3] @ s8[3,4] -> s8").first_conversion() is S8
    assert posed("s8[2,3] @ s8[3,4] -> f16").first_conversion() is S32
    assert posed("s8[2,3] @ s4[3,4]").first_conversion() is S32
    assert posed("s8[2,3] @ s4[3,4]").rhs.dtype is S4


def test_attention_is_a_problem_too():
    q, k, v = (input_(name, F32, (2, heads, t, 8)) for name, heads, t in (("q", 4, 5), ("k", 2, 7), ("v", 2, 7)))
    mask = input_("mask", F32, (5, 7))
    p = problem_of(Node(Attention(0.5, "lower"), q, k, v, mask))
    assert isinstance(p, AttentionProblem) and p.kind == "attention"
    assert p.ops == 2 * (2 * 4) * (3 + 4 + 5 + 6 + 7) * 16 and p.bytes == 4 * (320 + 224 + 224 + 35 + 320)
    assert p.outputs == (TensorType(F32, (2, 4, 5, 8)),) and p.weights == (False,) * 4
    assert str(p).startswith("attention q f32[2,4,5,8] k f32[2,2,7,8] v f32[2,2,7,8] mask f32[5,7] causal=lower")


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 10), (10, 3), (1, 5), (5, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize("causal", ["no", "upper", "lower"])
def test_pairs_that_causality_leaves(causal: Causal, queries: int, keys: int):
    seen = torch.ones(queries, keys)
    seen = seen if causal == "no" else seen.tril(causal_shift(causal, queries, keys))
    assert pairs_seen(causal, queries, keys) == int(seen.sum())


def test_a_fusion_is_the_same_problem_wherever_it_stands():
    def posed(x, scale, other):
        total = map_("add", x, other)
        y = Node(LayerNorm(1, 1e-5), total, scale)
        roots = (y, Node(Quantize(S8), y, const(0.5, F32)))
        return fusion_of([other, scale, x, roots[1].src[1]], roots)

    a, b = input_("a", F32, (4, 8)), input_("b", F32, (4, 8))
    first, sources = posed(a, const([1.0] * 8, F32), b)
    again, others = posed(b, const([2.0] * 8, F32), a)
    assert first == again and hash(first) == hash(again) and first.kind == "fusion"
    assert (
        [s.op.name for s in sources] == ["input", "input", "const", "const"] and sources[:2] == (a, b) and others[:2] == (b, a)
    )
    assert first.weights == (False, False, True, True) and [str(t) for t in first.outputs] == ["f32[4,8]", "s8[4,8]"]
    assert str(first) == "add, layer_norm, quantize -> f32[4,8], s8[4,8]" and not first.only_views
    assert first.bytes == 4 * (32 + 32 + 8 + 1) + 4 * 32 + 32
    other, _ = posed(a, const([1.0] * 8, F32), input_("c", F32, (4, 1)))
    assert other != first
    moved, _ = fusion_of([a], [reshape(a, (8, 4))])
    assert moved.only_views


def test_an_exponent_is_part_of_its_fusion():
    x, two, scale = input_("x", F32, (4, 8)), const(2.0, F32), const(0.5, F32)
    power = map_("multiply", map_("power", x, broadcast(two, (4, 8))), scale)
    problem, sources = fusion_of([scale, two, x], [power])
    assert sources == (x, scale) and len(problem.types) == 2 and str(problem) == "power, multiply -> f32[4,8]"
    assert problem != fusion_of([scale, x, const(3.0, F32)], [map_("multiply", map_("power", x, const(3.0, F32)), scale)])[0]
    computed = input_("n", F32, (8,))
    assert fusion_of([x, computed], [map_("power", x, computed)])[1] == (x, computed)
