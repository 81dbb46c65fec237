"""Numbers of a problem are arguments of its GPU kernel: problems that differ in them alone have one machine code."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from ptx import emulate

from tests.candidates.triton.hopper.test_attention import coded
from tests.candidates.triton.hopper.test_gemm import H200, WHOLE, layer
from tilewright.candidates.triton.attention.heads import heads_of
from tilewright.candidates.triton.attention.kernel import TileConfig as AttentionTile
from tilewright.candidates.triton.attention.kernel import kernel_text as attention_text
from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.gemm import candidate as gemm
from tilewright.candidates.triton.gemm.kernel import TileConfig, write
from tilewright.candidates.triton.hopper.attention import candidate as hopper_attention
from tilewright.candidates.triton.hopper.attention.kernel import TileConfig as HopperTile
from tilewright.candidates.triton.hopper.attention.kernel import kernel_text as hopper_attention_text
from tilewright.candidates.triton.hopper.gemm import candidate as hopper_gemm
from tilewright.candidates.triton.hopper.gemm.epilogue import write as write_hopper
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.run import compiled
from tilewright.candidates.triton.hopper.gemm.spec import spec_of
from tilewright.candidates.triton.runtime.module import assembly, needs
from tilewright.dtype import F8E4M3FN, F16, F32, S8, S32, U8
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Dequantize, Gemm, Param, Quantize
from tilewright.schedule.candidate import Schedule, plan_for
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

STEPS = {
    "scales": lambda x, s, z: map_("multiply", map_("multiply", x, const(s, F32)), const(s / 3, F32)),
    "silu": lambda x, s, z: map_("silu", map_("multiply", x, const(s, F32))),
    "gelu of f16": lambda x, s, z: convert(map_("gelu", convert(map_("multiply", x, const(s, F32)), F16)), F32),
    "clamp": lambda x, s, z: map_("clamp", const(-s, F32), map_("divide", x, const(s * 7, F32)), const(s * 9, F32)),
    "codes on the way": lambda x, s, z: Node(
        Dequantize(F32), Node(Quantize(U8), x, const(s, F32), const(z, U8)), const(s, F32), const(z, U8)
    ),
    "f16": lambda x, s, z: convert(map_("multiply", convert(x, F16), const(s, F16)), F32),
}


def product(step, scale, zero, dtype=S8, out=S8):
    """A product with constant scales, a step, and codes."""
    src = [input_("x", dtype, (256, 512)), input_("w", dtype, (512, 384)), input_("bias", F32, (384,))]
    params = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    acc = Node(Acc(Gemm(dtype.accumulator, params[0], params[1], (params[0],)).acc_type))
    x = map_("add", map_("multiply", convert(acc, F32), const(scale / 5, F32)), params[2])
    x = STEPS[step](x, scale, zero)
    x = Node(Quantize(out), x, const(scale / 2, F32), *([const(zero - 100, S8)] if out is S8 else []))
    return problem_of(Node(Gemm(dtype.accumulator, params[0], params[1], (x,)), *src))


def hopper_text(p, point=WHOLE):
    return write_hopper(spec_of(plan_of(p, H200), point))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("out", [S8, F8E4M3FN], ids=str)
def test_other_numbers_are_the_same_text(step, out):
    some, others = product(step, 0.03, 117, out=out), product(step, 0.0417, 93, out=out)
    for text in (
        hopper_text,
        lambda p: write(replace(plan_for(gemm.CANDIDATE, p, H200).spec, point=TileConfig(64, 64, 64, 4, 2))),
    ):
        a, b = text(some), text(others)
        assert a.text == b.text
        assert a.numbers.keys() == b.numbers.keys() and a.signature == b.signature
        assert all(x != y for x, y in zip(a.numbers.values(), b.numbers.values(), strict=True)), "each of them differs"
        assert not re.search(r"0\.0[34]|\b(117|93|0\.006)\b", a.text)


ODD = [0.0, -0.0, -1.0, 0.5, -0.3, 1e-42, -(2.0**-126), 3e38, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("scale", ODD)
def test_any_number_gives_what_it_means(scale):
    """It is a factor, a divisor and a bound, each of them an argument or, where less is to be done, a literal."""
    src = [input_("x", S8, (130, 64)), input_("w", S8, (64, 64))]
    params = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    acc = convert(Node(Acc(Gemm(S32, *params, (params[0],)).acc_type)), F32)
    number = const(scale, F32)
    stores = tuple(map_(how, acc, number) for how in ("multiply", "divide", "maximum"))
    p = problem_of(Node(Gemm(S32, *params, stores), *src))
    sources = random_sources(p)
    point = Schedule.of_point(replace(WHOLE, tile_n=64, blocks=2))
    assert check(p, expect(p, sources), emulate(hopper_gemm.CANDIDATE, p, point, sources)) is None


def test_what_less_is_done_with_is_written_as_it_is():
    plain = hopper_text(product("scales", 3.0, 101)).text  # a factor of 1, a zero point of 1
    assert plain != hopper_text(product("scales", 3.5, 110)).text


def test_attention_of_other_codes_is_the_same_text():
    def with_scales(scale):
        p = coded()
        operands = [Node(n.op, n.src[0], const(scale, F32)) for n in p.op.operands]
        return replace(p, op=replace(p.op, operands=tuple(operands)))

    some, others = with_scales(0.05), with_scales(0.07)
    for text in (
        lambda p: hopper_attention_text(hopper_attention.supported_heads(p), HopperTile("whole_rows", 1, True)),
        lambda p: attention_text(heads_of(p, frozenset({"f8e4m3fn"})), AttentionTile(64, 64, 4, 2, "online", "ieee"), set()),
    ):
        a, b = text(some), text(others)
        assert a.text == b.text and a.numbers != b.numbers


def test_numbers_of_attention_come_in_the_order_of_their_use():
    """ptxas spilled elsewhere with another order: fp8 codes in 384 tokens took 2 to 5 % longer on an H200."""
    numbers = hopper_attention_text(hopper_attention.supported_heads(coded()), HopperTile("whole_rows", 1, False)).numbers
    opposite, factor, of_values, of_codes = numbers.values()
    assert opposite == -factor < 0 and (of_values, of_codes) == (pytest.approx(0.05), pytest.approx(100.0))


def test_machine_code_is_made_once():
    kernels = [compiled(spec_of(plan_of(p, H200), WHOLE)) for p in (product("silu", scale, 90) for scale in (0.03, 0.05))]
    assert kernels[0].kernel is kernels[1].kernel
    assert kernels[0].numbers != kernels[1].numbers
    plans = [plan_for(gemm.CANDIDATE, product("silu", scale, 90), H200) for scale in (0.03, 0.05)]
    products = [plan.machine_code(replace(plan.spec, point=TileConfig(64, 64, 64, 4, 2))) for plan in plans]
    assert products[0].kernel is products[1].kernel


def count(p, point):
    """Instructions of a kernel, and of those the ones that read memory."""
    kernel = compiled(spec_of(plan_of(p, H200), point)).kernel
    assert needs(kernel).spills == 0
    code = assembly(kernel)
    return len(re.findall(r"(?m)^\s+/\*[0-9a-f]{4,5}\*/\s+[@A-Z]", code)), code.count("LDG"), code.count("LDS")


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("p", "point"),
    [
        (product("silu", 0.03, 117), replace(WHOLE, tile_n=128, num_stages=6)),
        (layer(F8E4M3FN, 3072, "gelu", F8E4M3FN), replace(WHOLE, tile_n=192, pingpong=True, vector_store=True)),
    ],
)
def test_an_instruction_takes_them_as_it_takes_a_literal(p, point, monkeypatch):
    """Both warpgroups read them from the bank of constants."""
    instructions, *reading = count(p, point)
    monkeypatch.setattr(Text, "number", lambda self, key, value: repr(value))
    literally, *reading_then = count(p, point)
    assert instructions <= literally + 32 and reading == reading_then, (instructions, literally)
