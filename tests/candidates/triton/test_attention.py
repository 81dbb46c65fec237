"""Generated GPU attention, compiled with no GPU at hand: for every architecture, on the matrix unit, without spills."""

import re

import pytest

from tests.candidates.triton.test_normalization import ARCHES, gpu
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED, S8
from tilewright.ir.build import const, input_, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Attention, Dequantize, Param, Quantize
from tilewright.ir.types import TensorType
from tilewright.schedule.problem import problem_of

pytest.importorskip("triton")

from tilewright.candidates.triton.attention import candidate as attention
from tilewright.candidates.triton.attention.heads import heads_of
from tilewright.candidates.triton.runtime.module import Arch, assembly, exact_fp8, needs
from tilewright.schedule.candidate import plan_for, refusal


def flash(dtype=F16, depth=64, causal="no", group=1, mask=None, extents=(64, 12, 384, 384)):
    batch, heads, queries, keys = extents
    src = [input_("q", dtype, (batch, heads, queries, depth))]
    src += [input_(name, dtype, (batch, heads // group, keys, depth)) for name in "kv"]
    if mask is not None:
        src.append(input_("m", mask, (batch, 1, 1, keys)))
    return problem_of(Node(Attention(depth**-0.5, causal), *src))


def bert(dtype, tokens=384):
    """A quantised model's attention: codes in, scores and weights rounded, codes out as the next product reads them."""
    batch, heads, depth = 64, 12, 64
    given = TensorType(dtype, (batch, heads, tokens, depth))
    src = [input_(name, dtype, given.shape) for name in "qkv"] + [input_("m", F32, (batch, 1, 1, tokens))]
    operands = [Node(Dequantize(F32), Node(Param(i, given)), const(0.01, F32)) for i in range(3)]
    operands.append(Node(Param(3, src[3].tensor)))
    inner = Node(Acc(TensorType(F32, (batch, heads, tokens, tokens))))

    def rounded(scale):
        return Node(Dequantize(F32), Node(Quantize(dtype), inner, const(scale, F32)), const(scale, F32))

    acc = Node(Acc(TensorType(F32, given.shape)))
    store = transpose(Node(Quantize(dtype), acc, const(0.01, F32)), (0, 2, 1, 3))
    store = reshape(store, (batch, tokens, heads * depth))
    return problem_of(Node(Attention(1.0, "no", True, tuple(operands), rounded(0.1), rounded(0.005), (store,)), *src))


USUAL = {
    "f16": lambda: flash(),
    "bf16 128 causal, shared keys": lambda: flash(BF16, 128, "upper", 4),
    "f16, a mask": lambda: flash(mask=PRED),
    "s8": lambda: bert(S8),
    "f8e4m3fn": lambda: bert(F8E4M3FN),
}


def built(problem, arch, at=0):
    target = gpu()
    plan = attention.Plan(problem, target, arch, heads_of(problem, exact_fp8(arch)))
    points = list(plan.schedules())
    return plan.machine_code(points[at]).kernel, points[at]


# every architecture with one of them, and one of each kind of architecture with every one that it multiplies as it is
COMPILED = [("f16, a mask", arch) for arch in ARCHES]
COMPILED += [(name, ARCHES[i]) for i in (0, 2, 5) for name in USUAL if name != "f16, a mask" and (i == 2 or "f8" not in name)]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("name", "arch"), COMPILED, ids=lambda x: x if isinstance(x, str) else str(x.name))
def test_usual_attentions_compile_without_spills(name, arch):
    kernel, point = built(USUAL[name](), arch)
    found = needs(kernel)
    assert found.spills == 0, (point, found)
    assert found.shared_bytes <= (164 if arch.backend == "cuda" and arch.capability == 80 else 227) << 10


@pytest.mark.parametrize(("name", "shape"), [("f16", "F32"), ("bf16 128 causal, shared keys", "F32.BF16"), ("s8", "F32")])
def test_on_hopper_both_products_are_warpgroup_instructions(name, shape):
    code = assembly(built(USUAL[name](), Arch("cuda", 90, 32))[0])
    assert re.search(rf"HGMMA\.64x\d+x16\.{re.escape(shape)}", code)
    assert "HMMA.16816" not in code and "LDL" not in code and "STL" not in code


def test_f32_is_three_products_of_the_matrix_unit_or_exact():
    heads = heads_of(flash(F32), frozenset())
    points = list(attention._points(heads, Arch("cuda", 90, 32), 227 << 10))
    assert {p.precision for p in points} == {"tf32x3", "ieee"}
    assert {p.precision for p in attention._points(heads, Arch("cuda", 75, 32), 64 << 10)} == {"ieee"}
    assert "HGMMA" in assembly(built(flash(F32), Arch("cuda", 90, 32))[0])


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (flash(depth=320), "a head of 320 columns does not fit into registers"),
        (problem_of(Node(Attention(1.0), *(input_(n, F16, (1, 1, 0, 8)) for n in "qkv"))), "an extent is zero"),
    ],
)
def test_refusals(problem, why):
    assert refusal(attention.CANDIDATE, problem, gpu()) == why
    assert refusal(attention.CANDIDATE, flash(), gpu()) is None


def test_points_fit_the_problem():
    """A query alone takes the smallest tile; scores that are rounded are held where they fit, else worked out twice."""
    one = problem_of(Node(Attention(1.0), *(input_(n, F16, (4, 8, t, 64)) for n, t in (("q", 1), ("k", 4000), ("v", 4000)))))
    assert {p["tile_m"] for p in plan_for(attention.CANDIDATE, one, gpu()).schedules()} == {16}
    assert {p["scores"] for p in plan_for(attention.CANDIDATE, bert(S8), gpu()).schedules()} == {"twice"}
    assert {p["scores"] for p in plan_for(attention.CANDIDATE, bert(S8, 128), gpu()).schedules()} == {"held", "twice"}
    assert {p["scores"] for p in plan_for(attention.CANDIDATE, flash(), gpu()).schedules()} == {"online"}
