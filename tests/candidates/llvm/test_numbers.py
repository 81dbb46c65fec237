"""Numbers that are data of a problem: calls pass them, so that problems which differ in them alone share text and machine code,
and each computes with its own."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tests.candidates.llvm.test_ranged import Code
from tilewright.candidates.llvm.attention.kernel import AttentionWriter
from tilewright.candidates.llvm.expressions.vector import data_of
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.runtime import engine
from tilewright.dtype import BF16, F8E4M3FN, F32, S8, S32, U8
from tilewright.hardware.detect import chips, detect
from tilewright.ir.build import broadcast, const, convert, input_, map_
from tilewright.ir.dims import Dim
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Acc, Dequantize, Param, Quantize, gemm
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import discover, kernel_of, plan_for
from tilewright.schedule.expected import check, expect
from tilewright.schedule.key import text_of
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

pytestmark = pytest.mark.skipif(engine.available() is not None, reason="no kernels for this processor")
CPU = detect("cpu")
LLVM = next(c for c in discover() if c.name == "llvm")
NAN, INF = float("nan"), float("inf")
ALIKE = [0.3, -0.3, 3e-7, 1e4, 7.25e-3]  # what no code is written for
ODD = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 0.125, 1e-42, 2.0**-126, 1e-38, 3e38, -3e38, INF, -INF, NAN]


def f32(value):
    return const(torch.tensor(value))


def scaled(scale, how="multiply", rows=5):
    """s8 x s8, in f32 with a number: an epilogue in registers."""
    x, w = input_("x", S8, (rows, 64)), input_("w", S8, (64, 48))
    return map_(how, convert(gemm(x, w, acc_dtype=S32), F32), f32(scale))


def coded(scale, zero=None, out=S8, back=True):
    """A product whose result is quantised, and dequantised again: an epilogue that reads tiles."""
    x, w = input_("x", F32, (5, 40)), input_("w", F32, (40, 33))
    sides = [f32(scale)] if zero is None else [f32(scale), const(torch.tensor(zero, dtype=out.to_torch()))]
    codes = Node(Quantize(out), gemm(x, w), *sides)
    return map_("gelu", Node(Dequantize(F32), codes, *sides)) if back else codes


def problem(node):
    (found,) = tilewright.compiler.optimise(Graph("g", inputs_of(node), (node,), ("y",))).outputs
    return problem_of(found)


def inputs_of(node):
    return tuple(sorted({n for n in Graph("g", (), (node,), ("y",)).nodes() if not n.src and n.op.name == "input"}, key=str))


def built(posed):
    plan = plan_for(LLVM, posed, CPU)
    schedule = next(iter(plan.schedules()))
    return kernel_of(plan, schedule), GemmWriter(plan.nest_of(schedule)).write()


def assert_right(posed, kernel):
    sources = random_sources(posed)
    weights = {i: t for i, t in enumerate(sources) if posed.weights[i]}
    results = kernel.prepare(weights)(sources)
    wrong = check(posed, expect(posed, sources), results)
    assert wrong is None, wrong


@pytest.mark.parametrize(
    "make",
    [scaled, coded, lambda s: coded(s, 3), lambda s: coded(s, 200, U8), lambda s: coded(s, None, F8E4M3FN)],
    ids=["scaled", "s8", "s8 from 3", "u8 from 200", "f8e4m3fn"],
)
def test_problems_that_differ_in_numbers_share_a_text_and_a_build(make, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    parsed, builds = engine._parsed, []
    monkeypatch.setattr(engine, "_parsed", lambda text, *to: builds.append(text) or parsed(text, *to))
    ordinary = [0.3, 7.25e-3, 11.0]
    made = [(p, *built(p)) for p in (problem(make(s)) for s in ordinary)]
    assert len({text_of(p) for p, *_ in made}) == 1
    assert len({k.text for _, k, _ in made}) == 1 and sum("@micro_" in text for text in builds) == 1
    assert len({tuple(m.given.values()) for *_, m in made}) == 3
    for posed, kernel, _ in made * 2:  # in turns: each has its own numbers
        assert_right(posed, kernel)


@pytest.mark.parametrize("how", ["multiply", "divide", "add", "maximum"])
@pytest.mark.parametrize("scale", [*ALIKE, *ODD])
def test_any_number_gives_what_it_means(scale, how):
    posed = problem(scaled(scale, how))
    if posed.kind == "gemm":
        assert_right(posed, built(posed)[0])


@pytest.mark.parametrize(("zero", "out"), [(None, S8), (-7, S8), (0, S8), (1, U8), (255, U8)])
@pytest.mark.parametrize("scale", [*ALIKE, *ODD])
def test_codes_of_any_scale_are_right(scale, zero, out):
    for back in (True, False):
        posed = problem(coded(scale, zero, out, back))
        if posed.kind == "gemm":
            assert_right(posed, built(posed)[0])


@pytest.mark.parametrize("odd", [0.0, 1.0, -1.0, INF, NAN])
def test_a_number_that_code_is_written_for_is_in_the_text(odd):
    """Numbers other than 0, 1 and the infinities do not decide what the code is; these may."""
    acc = Node(Acc(TensorType(F32, (4, 8))))
    texts = {built(posed_with(acc, scale))[0].text for scale in (0.3, odd)}
    assert len(texts) == 2


def posed_with(acc, scale):
    """A product times a number that no rule has seen."""
    x, w = input_("x", F32, (4, 16)), input_("w", F32, (16, 8))
    posed = problem_of(gemm(x, w))
    assert posed.acc == acc.tensor
    return replace(posed, op=replace(posed.op, stores=(map_("multiply", acc, broadcast(f32(scale), (4, 8))),)))


@pytest.mark.parametrize("power", range(-126, 127, 28))
def test_dividing_by_a_power_of_two_is_multiplying_by_its_inverse(power):
    """Both are exact; a division takes ten times as long."""
    acc = Node(Acc(TensorType(F32, (4, 8))))
    posed = posed_with(acc, 0.3)
    quotient = map_("divide", acc, broadcast(f32(2.0**power), (4, 8)))
    kernel, module = built(replace(posed, op=replace(posed.op, stores=(quotient,))))
    assert not any("fdiv" in f for f in module.functions)
    sources = [torch.randn(4, 16), torch.randn(16, 8)]
    times = map_("multiply", acc, broadcast(f32(2.0**-power), (4, 8)))
    other = built(replace(posed, op=replace(posed.op, stores=(times,))))[0]
    assert torch.equal(kernel.prepare({})(sources)[0], other.prepare({})(sources)[0])


def test_which_constants_are_data():
    x = Node(Param(0, TensorType(F32, (4, 8))))
    scale, zero = f32(0.3), const(torch.tensor(5, dtype=torch.int8))
    codes = Node(Dequantize(F32), Node(Quantize(S8), x, scale, zero), scale, zero)
    assert data_of((codes,)) == {scale, zero}
    assert data_of((map_("add", x, broadcast(scale, (4, 8))),)) == {scale}
    assert not data_of((map_("power", x, broadcast(scale, (4, 8))),)), "code is written for exponents"
    both = map_("power", map_("multiply", x, broadcast(scale, (4, 8))), broadcast(scale, (4, 8)))
    assert not data_of((both,))
    whole = const(torch.tensor(5, dtype=torch.int32))
    assert not data_of((map_("multiply", convert(x, S32), broadcast(whole, (4, 8))),)), "a divisor or a mask, for all one knows"
    narrow = const(torch.tensor(0.3, dtype=torch.bfloat16))
    assert not data_of((map_("multiply", convert(x, BF16), broadcast(narrow, (4, 8))),))


def test_numbers_of_two_results_are_two_even_where_they_are_equal():
    """Zero points of 8 bits often are: problems would have different texts by chance."""

    def module(*zeros):
        acc, side = Node(Acc(TensorType(F32, (4, 8)))), Node(Param(2, TensorType(F32, (4, 8))))
        posed = posed_with(acc, 0.3)
        sides = [(f32(0.25 + i), const(torch.tensor(z, dtype=torch.uint8))) for i, z in enumerate(zeros)]
        values = [acc, map_("add", acc, side)]
        stores = tuple(Node(Quantize(U8), x, *s) for x, s in zip(values, sides, strict=True))
        types = (*posed.types, side.tensor)
        return built(replace(posed, op=replace(posed.op, stores=stores), types=types, weights=(False,) * 3))[1]

    assert module(80, 80).functions == module(80, 90).functions == module(3, 4).functions


def test_layers_of_a_program_compute_with_their_own_numbers(monkeypatch, tmp_path):
    """Their texts are one, their verdict is one, and each step says its own scale."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    scales = [0.011, 0.023, 0.007, 0.031]
    x = y = input_("x", S8, (6, 64))
    weights = torch.randint(-128, 128, (len(scales), 64, 64), dtype=torch.int8)
    for scale, weight in zip(scales, weights, strict=True):
        y = Node(Quantize(S8), map_("multiply", convert(gemm(y, const(weight), acc_dtype=S32), F32), f32(scale)), f32(2.5))
    program = tilewright.compile(Graph("layers", (x,), (y,), ("y",)), budget_s=0)
    assert len({s.decision.kernel.text for s in program.steps}) == 1 < len({s.decision.problem for s in program.steps})
    given = torch.randint(-128, 128, (6, 64), dtype=torch.int8)
    want = given
    for scale, weight in zip(scales, weights, strict=True):
        sums = (want.long() @ weight.long()).float() * torch.tensor(scale)
        want = torch.round(sums / 2.5).clamp(-128, 127).to(torch.int8)
    assert torch.equal(program(given), want) and torch.equal(program(given), want)
    told = str(program.explain(everything=True))
    assert "4 of them, alike but for constants" in told and "* c" in told and "* 0.011" not in told
    assert all(f"* {scale} " in repr(step) for scale, step in zip(scales, program.steps, strict=True))
    program.save(tmp_path / "layers.twp")
    again = tilewright.load_program(tmp_path / "layers.twp")
    assert torch.equal(again(given), want)


def test_attention_of_other_scales_has_the_same_text():
    from tilewright.candidates.llvm.attention import candidate as attention
    from tilewright.ir.ops import Attention

    def posed(scale):
        q, k, v = (Node(Dequantize(F32), input_(n, S8, (1, 2, 9, 16)), f32(scale * (1 + i))) for i, n in enumerate("qkv"))
        return problem(Node(Quantize(S8), Node(Attention(0.25), q, k, v), f32(scale / 3)))

    found = [posed(s) for s in (0.02, 0.05)]
    assert [p.kind for p in found] == ["attention"] * 2
    modules = [AttentionWriter(attention.attention_nest(p, CPU)).write() for p in found]
    assert modules[0].functions == modules[1].functions and modules[0].given != modules[1].given
    candidate = next(c for c in discover() if c.name == "llvm_attention")
    for p in found:
        plan = plan_for(candidate, p, CPU)
        assert_right(p, kernel_of(plan, next(iter(plan.schedules()))))


def test_a_kernel_with_open_extents_is_given_them_beside_the_numbers():
    def scaled_by(scale, rows):
        x, w = input_("x", S8, (rows, 64)), input_("w", S8, (64, 48))
        acc = Node(Acc(gemm(x, w, acc_dtype=S32).tensor))
        codes = Node(Quantize(S8), map_("multiply", convert(acc, F32), broadcast(f32(scale), acc.shape)), f32(2.5))
        return problem_of(Node(replace(gemm(x, w, acc_dtype=S32).op, stores=(codes,)), x, w))

    texts = set()
    for scale in (0.3, 7.25e-3):
        code = Code(LLVM, CPU, partial(scaled_by, scale), rows=Dim("rows", 1, 4096))
        for rows in (500, 77, 1024):
            posed, kernel = code.at(rows=rows)
            assert_right(posed, kernel)
            texts.add(kernel_of(SimpleNamespace(build=lambda _, kernel=kernel: kernel), None).text)
        assert len(code.codes) == 1
    assert len(texts) == 1


def test_a_saved_call_whose_numbers_do_not_fit_is_an_error():
    from tilewright.candidates.llvm.runtime.calls import restored
    from tilewright.errors import InputError
    from tilewright.ir.artefact import Kind
    from tilewright.schedule.recipe import Called

    result = (Kind.of(TensorType(F32, (2,))),)
    for pointers, given, said in (
        (4, (1,), "does not fit its step"),
        (5, (1,), "machine code of a saved call is missing"),
        (4, (), "machine code of a saved call is missing"),
    ):
        called = Called(pointers, (0,), 1, result, 0, 0, True, 0, given, code="code", packed="")
        with pytest.raises(InputError, match=said):
            restored(called, {}, lambda _: torch.empty(0), 1)


def test_vectors_of_three_registers_are_passed_from_block_to_block_as_registers():
    """A bias is read before the loop over rows; LLVM would pass 48 lanes on one by one."""
    x, w, bias = input_("x", F32, (40, 64)), input_("w", F32, (64, 96)), input_("b", F32, (96,))
    posed = problem(Node(Quantize(S8), map_("gelu", map_("add", gemm(x, w), broadcast(bias, (40, 96)))), f32(0.3)))
    zen = next(c for c in chips() if c.name == "x86_64_avx512_bf16")
    plan = plan_for(LLVM, posed, replace(CPU, chip=zen))
    schedule = next(s for s in plan.schedules() if s["nr"] == 48)
    text = GemmWriter(plan.nest_of(schedule)).write().text("znver4", "")
    shown = engine.assembly(text, "x86_64-unknown-linux-gnu", "znver4", "")
    assert "store_0:" in shown and shown.count("vinsertps") == 0
    own = plan_for(LLVM, posed, CPU)
    for schedule in [s for s in own.schedules() if s["nr"] % 32][:2]:
        assert_right(posed, kernel_of(own, schedule))
