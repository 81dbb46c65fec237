"""Words of reports: work and limits, words for folded operations, reasons, tables, progress."""

from __future__ import annotations

import dataclasses
import io
import re
import statistics
import sys
from collections.abc import Callable

import msgspec
import pytest
from cli_programs import block, install_fake_library
from rich.console import Console

import tilewright
from tilewright.dtype import BF16, F16, F32, S8, S64
from tilewright.hardware.detect import detect
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, slice_, transpose
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.notation import parse
from tilewright.ir.ops import Acc, Attention, Call, Concat, Dequantize, Gather, LayerNorm, Quantize, gemm
from tilewright.ir.types import TensorType
from tilewright.report import schema
from tilewright.report.explain.explain import account, explain_program
from tilewright.report.explain.findings import Reasons, fallback, unfused
from tilewright.report.measure.inputs import make_feeds
from tilewright.report.measure.perf import measure, rest_words
from tilewright.report.measure.timing import Rounds, Times, device_us, wall_us
from tilewright.report.measure.work import Work, describe, work_of
from tilewright.report.text.advice_text import saved_words
from tilewright.report.text.console import console, printed, progress
from tilewright.report.text.explain_text import headline, short_sections
from tilewright.report.text.other_tables import print_gemm
from tilewright.report.text.perf_table import print_perf
from tilewright.report.text.tables import table
from tilewright.report.words import above_words, count, listing, percent, small, us
from tilewright.runtime.executable import Executable
from tilewright.schedule import expected
from tilewright.schedule.problem import problem_of


def compiled(*outputs: Node, origins: dict[Node, str] | None = None) -> Executable:
    inputs = tuple(n for n in toposort(outputs) if n.op.name == "input")
    names = tuple(f"y{i}" for i in range(len(outputs)))
    return tilewright.compile(Graph("g", inputs, outputs, names, origins or {}), budget_s=0)


def test_work_of_a_product_is_its_arithmetic_and_least_traffic() -> None:
    program = tilewright.compile(parse("bf16[2,4,8] @ bf16[8,16] + bias -> bf16"), budget_s=0)
    (step,) = program.steps
    assert work_of(step) == Work(2 * 2 * 4 * 8 * 16, 2 * (2 * 4 * 8 + 8 * 16 + 16 + 2 * 4 * 16), BF16)
    codes = tilewright.compile(parse("f16[4,64] @ s4[64,8] group=32"), budget_s=0)
    assert work_of(codes.steps[0]).dtype is F16


@pytest.mark.parametrize(
    ("memory", "noise", "why"),
    [
        (True, "", "the data stayed in a cache"),
        (False, "", "the kernel beats the library that set the peak"),
        (True, "9 tasks", "this was measured too low on a busy machine"),
        (False, "9 tasks", "this was measured too low on a busy machine"),
    ],
)
def test_a_share_above_its_limit_has_the_reason_that_holds(memory: bool, noise: str, why: str) -> None:
    program = tilewright.compile(parse("f32[64,96] @ f32[96,32] + bias"), budget_s=0)
    (product,) = explain_program(program, "g").products
    chosen = msgspec.structs.replace(product.chosen, time_us=2.0, recalled=False)
    for limit_us, reached, said in ((5.0, "250%", f": {why}"), (1.0, "50%", "")):
        timed = msgspec.structs.replace(product, chosen=chosen, measured=True, limit_us=limit_us, memory_bound=memory)
        assert headline(timed, noise).endswith(f" is {limit_us} µs, {reached} of it reached{said}")
    assert above_words([False, True], "") == "the data stayed in a cache, or the kernel beats the library that set the peak"


def test_some_elements_are_compared_where_the_time_is_too_short_for_all() -> None:
    graph = parse("f32[64,96] @ f32[96,32] + bias")
    program = tilewright.compile(graph, budget_s=0)
    feeds = make_feeds(graph)
    whole = account(program, "g", feeds)
    assert whole.verified and whole.sampled is None and whole.bound > 0
    some = account(program, "g", feeds, ends=0.0)
    assert some.verified and some.sampled is not None and 8 <= some.sampled <= 256
    said = " ".join(printed(lambda out: print_gemm(out, some)).split())
    assert (
        f"{some.sampled} elements of each result on random data, drawn once it had run: the budget had no time for all" in said
    )
    (step,) = program.steps
    program.swap((dataclasses.replace(step, run=lambda values: [t + 1 for t in step.run(values)]),))
    wrong = account(program, "g", feeds, ends=0.0)
    assert not wrong.verified and re.match(r"result 0 is wrong at \[\d+, \d+\]: ", wrong.why or "")
    assert step.decision is not None
    unverified = dataclasses.replace(step.decision, verified=False)
    program.swap((dataclasses.replace(step, decision=unverified),))
    assert account(program, "g", feeds, ends=0.0).sampled is None, "all, where that was never done"


def test_how_long_comparing_takes_follows_from_the_pace_of_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(parse("f32[64,512] @ f32[512,256]").outputs[0])
    ticks = iter([0.0, 9.0, 10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(expected.time, "perf_counter", lambda: next(ticks))
    operations = 2 * (2 * 64 * 512 * 256) + 64 * 256 * expected.OPS_AN_ELEMENT
    assert expected.expected_s(problem) == pytest.approx(2.0 * operations / (2 * 128 * 512 * 512))


def test_what_is_folded_within_an_attention_is_said() -> None:
    def coded(x: Node, scale: float) -> Node:
        s = const(scale, F32)
        return Node(Dequantize(F32), Node(Quantize(S8), x, s), s)

    def folded(attention: Attention) -> str:
        program = compiled(Node(attention, *(input_(n, F32, (1, 2, 8, 16)) for n in "qkv")))
        assert [s.part.kind for s in program.steps] == ["attention"]
        (product,) = explain_program(program, "g").products
        assert set(product.inside) == {r for r in ("scores", "weights") if getattr(attention, r) is not None}
        for title in (w.capitalize() for w in product.inside):
            assert f"   {title} " in str(program.explain(everything=True))
        return " ".join(dict(short_sections(product)).get("Folded", []))

    acc = Node(Acc(TensorType(F32, (1, 2, 8, 8))))
    once = "quantise to s8, dequantise"
    assert folded(Attention(0.25)) == ""
    assert folded(Attention(0.25, scores=coded(acc, 0.1))) == f"scores: {once}"
    assert folded(Attention(0.25, scores=coded(acc, 0.1), weights=coded(acc, 0.01))) == f"scores and weights: {once}"
    capped = map_("multiply", map_("tanh", map_("multiply", acc, const(0.02, F32))), const(50.0, F32))
    result = Node(Quantize(S8), Node(Acc(TensorType(F32, (1, 2, 8, 16)))), const(0.05, F32))
    both = Attention(0.25, scores=capped, weights=coded(acc, 0.01), stores=(result,))
    assert folded(both) == f"scores: * 0.02, tanh, * 50 weights: {once} result: quantise to s8"


def test_work_of_a_fusion_reads_what_it_picks_and_writes_each_memory_once() -> None:
    table, ids = input_("table", F32, (1000, 8)), input_("ids", S64, (5,))
    (step,) = compiled(map_("sine", Node(Gather(0), table, ids))).steps
    assert work_of(step) == Work(0, 5 * 8 + 4 * 5 * 8 + 4 * 5 * 8, F32)
    x = input_("x", F32, (100, 8))
    part = slice_(reshape(x, (800,)), 0, 0, 10)
    (step,) = compiled(map_("cosine", part)).steps
    assert work_of(step).bytes == 4 * (10 + 10)
    (step,) = compiled(transpose(x, (1, 0))).steps
    assert step.part.kind == "view" and work_of(step).bytes == 0
    wave = map_("sine", x)
    (step,) = compiled(wave, transpose(wave, (1, 0))).steps
    assert work_of(step).bytes == 2 * 4 * 800


def test_limits_come_from_the_ceilings_and_say_which_binds() -> None:
    from dataclasses import replace

    target = replace(detect("cpu"), peak_gops={"f32": 2.0}, read_gbps=4.0)
    assert Work(4000, 4000, F32).limit_us(target) == 2.0 and not Work(4000, 4000, F32).memory_bound(target)
    assert Work(4000, 16000, F32).limit_us(target) == 4.0 and Work(4000, 16000, F32).memory_bound(target)
    unmeasured = replace(target, peak_gops={}, read_gbps=0.0)
    assert Work(4000, 4000, F32).limit_us(unmeasured) == 0.0


def test_regions_are_described_by_what_they_do() -> None:
    x = input_("x", F32, (4, 4))
    value = x
    for fn in ("sine", "sine", "cosine", "tan", "sinh", "cosh", "cbrt", "floor", "ceil"):
        value = map_(fn, value)
    (step,) = compiled(value).steps
    assert describe(step) == "sine x2, cosine, tan, sinh, cosh, cbrt, 2 more -> f32[4,4]"


def the_product(program: Executable) -> schema.Product:
    (product,) = explain_program(program, "g").products
    return product


def test_every_kind_of_operand_has_words() -> None:
    product = the_product(tilewright.compile(parse("f16[16,512] @ s4[384,512]^T group=64 zero_point -> f16"), budget_s=0))
    assert product.operands == [
        "left: f16[16,512] (input a)",
        "right: s4[384,512] (input b), dequantised to f16 with one scale a group of 64 and a zero point, transposed",
    ]
    assert product.accumulates == "f32[16,384], sums of 512 products"
    assert [s.steps for s in product.stores] == [["convert to f16"]]
    x, w, v = input_("x", F32, (2, 4, 6)), input_("w", BF16, (6, 10)), input_("v", BF16, (6, 10))
    right = convert(slice_(Node(Concat(0), w, v), 0, 0, 6), F32)
    product = the_product(compiled(gemm(reshape(x, (8, 6)), right)))
    assert product.operands[0] == "left: f32[2,4,6] (input x), seen as [8,6]"
    assert "converted to f32" in product.operands[1]


def test_every_kind_of_store_has_words() -> None:
    x, w, b = input_("x", S8, (4, 8)), input_("w", S8, (8, 6)), input_("b", F32, (6,))
    s = input_("s", F32, (6,))
    value = map_("add", map_("multiply", convert(gemm(x, w), F32), const(0.5, F32)), b)
    value = map_("maximum", map_("subtract", const(1.0, F32), value), const(0.25, F32))
    codes = Node(Quantize(S8), value, s)
    product = the_product(compiled(transpose(codes, (1, 0))))
    (store,) = product.stores
    assert store.steps[:5] == ["convert to f32", "* 0.5", "+ f32[6] (input b)", "1 - it", "maximum with 0.25"]
    assert store.steps[5] == "quantise to s8 with one scale a column"
    assert store.writes == "s8[6,4], written where the program wants it (transposed)"
    product = the_product(compiled(convert(gemm(x, w), S8)))
    assert product.stores[0].steps == ["convert to s8, wrapping"]
    product = the_product(compiled(convert(gemm(x, w), S8, "saturate")))
    assert product.stores[0].steps == ["convert to s8, saturating"]


def test_an_expression_that_is_no_chain_is_written_out() -> None:
    x, w = input_("x", F32, (4, 8)), input_("w", F32, (8, 6))
    product = gemm(x, w)
    found = the_product(compiled(map_("multiply", product, map_("sine", product))))
    assert found.stores[0].steps == ["multiply(acc, sine(acc))"]


def test_attention_has_words() -> None:
    q, k, v = (input_(n, F32, (1, 2, 5, 8)) for n in "qkv")
    product = the_product(compiled(Node(Attention(0.25, "upper"), q, k, v)))
    assert product.kind == "attention" and product.accumulates == "f32[1,2,5,8], softmax(0.25 q k^T) v, causal (upper)"
    assert product.operands == [f"{n}: f32[1,2,5,8] (input {n})" for n in "qkv"]
    assert the_product(compiled(Node(Attention(1.0), q, k, v))).accumulates == "f32[1,2,5,8], softmax(q k^T) v"


def test_joined_products_are_named_by_what_they_give() -> None:
    import torch

    x = input_("x", F32, (4, 8))
    first, second = (gemm(x, const(torch.randn(8, n))) for n in (6, 5))
    program = compiled(first, second, origins={first: "net/q", second: "net/k"})
    (step,) = program.steps
    assert step.name == "net/q, net/k"
    product = the_product(program)
    assert [s.steps for s in product.stores] == [["take columns 0:6"], ["take columns 6:11"]]
    assert "a constant" in product.operands[1] and "side by side" in product.operands[1]


def reasons_for(program: Executable) -> list[schema.Finding]:
    return unfused(program, Reasons(program), {0: 1.5})


def test_why_something_is_unfused() -> None:
    x, s = input_("x", F32, (4, 8)), input_("s", F32, ())
    (found,) = reasons_for(compiled(Node(Quantize(S8), x, s), origins={}))
    assert found.cost_us == 1.5
    assert found.why == "it reads an input of the program, and no product stands before or after it"
    w = input_("w", F32, (8, 8))
    quantised = Node(Dequantize(F32), Node(Quantize(S8), x, s), s)
    (found,) = reasons_for(compiled(gemm(quantised, w)))
    assert found.op == "quantize -> s8[4,8]"
    assert found.why == (
        "it reads an input of the program, and the gemm after it leaves it: operands are read through some operations, but "
        "quantize is no view, dequantisation or widening cast"
    )
    product = gemm(x, w)
    (found,) = reasons_for(compiled(Node(Concat(0), product, x), Node(Concat(0), x, product)))
    assert found.op == "concat x2 -> f32[8,8], f32[8,8]", "two regions that do the same are one step"
    assert found.why == "no rule writes part of a concat: a gemm's stores are whole tensors"
    opaque = Node(Call("fake_library", "Frobnicate", "{}", (TensorType(F32, (4, 8)),)), x)
    (found,) = reasons_for(compiled(Node(Concat(0), opaque, x)))
    assert found.why == "it follows Frobnicate, which has no epilogue to hold it"


def test_what_is_not_folded_has_its_rule_and_its_cost() -> None:
    x, w = input_("x", F32, (4, 8)), input_("w", F32, (8, 8))
    product = gemm(x, w)
    beside = Node(Concat(0), map_("tanh", product), x)
    program = compiled(product, beside)
    ceilings = dataclasses.replace(program.target, read_gbps=1.0, copy_gbps=1.0)
    (found,) = explain_program(program, "g", ceilings).products
    (tanh,) = found.beside
    assert tanh.where == "after it, tanh" and tanh.cost_us == pytest.approx(2 * 4 * 8 * 4 / 1e3)
    assert tanh.why == "absorb elementwise into store: 2 operations read the gemm"
    assert explain_program(program, "g").products[0].beside[0].cost_us is None


def test_the_rules_behind_each_product_are_its_own() -> None:
    x, w, v = input_("x", F32, (4, 8)), input_("w", F32, (8, 8)), input_("v", F32, (8, 6))
    first = map_("tanh", map_("add", gemm(x, transpose(w, (1, 0))), x))
    one, two = explain_program(compiled(map_("exponential", gemm(first, v))), "g").products
    assert one.rules == ["absorb elementwise into store x2", "read operand through views and casts"]
    assert two.rules == ["absorb elementwise into store"]
    (alone,) = explain_program(compiled(gemm(x, w)), "g").products
    assert alone.rules == []


def test_near_misses_are_found_again_by_the_name_in_the_source() -> None:
    x, w = input_("x", F32, (1, 8)), input_("w", F32, (8, 1))
    product = gemm(x, w)
    wide = map_("add", broadcast(product, (4, 6)), input_("y", F32, (4, 6)))
    program = compiled(wide, origins={wide: "net/Add"})
    (found,) = explain_program(program, "g").products
    assert [f.where for f in found.beside] == ["after it, add net/Add"]
    assert "it broadcasts the gemm from [1, 1] to [4, 6]" in found.beside[0].why


def test_what_fell_back(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    program = tilewright.compile(block(), budget_s=0)
    found = fallback(program, dict.fromkeys(range(len(program.steps)), 2.0))
    assert [(f.op, f.where, f.cost_us) for f in found] == [("Frobnicate", "net/Frobnicate", 2.0), ("note", "block", None)]
    assert found[0].why == "no operation of the graph expresses it; fake_library runs it"
    program = tilewright.compile(parse("s32[4,8] @ s32[8,4]"), budget_s=0)
    (found,) = fallback(program, {})
    assert found.op == "s32[4,8] @ s32[8,4]" and found.cost_us is None
    assert found.why.startswith("no kernel takes it (") and "torch._int_mm multiplies s8 by s8, not s32 by s32" in found.why


def test_the_schema_is_what_was_promised() -> None:
    def names(struct: type[msgspec.Struct]) -> list[str]:
        return [f.name for f in msgspec.structs.fields(struct)]

    assert names(schema.Perf) == [
        "noise",
        "limits_noise",
        "program",
        "target",
        "total_us",
        "verified",
        "steps",
        "unfused",
        "fallback",
        "inputs",
        "steps_per_layer",
        "quantized",
        "attribution",
        "summary",
        "against",
        "choices",
        "made",
        "counts",
        "groups",
        "layers",
        "advice",
        "total_low_us",
        "total_high_us",
        "steps_us",
        "in_place_us",
        "rest",
        "traffic",
    ]
    promised = (
        "name kind problem candidate schedule time_us ops bytes limit_us peak_fraction rejected chosen sent_bytes between_us "
        "low_us high_us"
    )
    assert names(schema.Step) == promised.split()
    assert names(schema.Rejected) == ["candidate", "why", "kind", "schedule"]
    assert names(schema.Finding) == ["op", "where", "why", "cost_us"]


def test_numbers() -> None:
    assert [us(x) for x in (0, 0.04, 12345.678)] == ["0.0", "0.0", "12,345.7"]
    assert [percent(x) for x in (0, 0.1234, 0.9999, 1.5)] == ["0.0", "12.3", "100", "150"]
    assert [small(x) for x in (0, 1.234e-7, 5)] == ["0", "1.23e-07", "5.00e+00"]
    assert [count(n, "step") for n in (0, 1, 1234)] == ["0 steps", "1 step", "1,234 steps"]
    assert listing(list("abcde"), 3) == "a, b, c and 2 more" and listing(["a"]) == "a"


def of(*us: float) -> Times:
    return Times(list(us))


@pytest.mark.parametrize(
    ("in_place", "kind", "noisy", "words"),
    [
        (130.0, "cpu", False, "30.0 for data that other steps have put out of the caches, 20.0 in Python between the steps"),
        (100.0, "cpu", False, "50.0 in Python between the steps"),
        (90.0, "cpu", False, "50.0 in Python between the steps"),
        (151.0, "cpu", False, "50.0 for data that other steps have put out of the caches"),
        (None, "cuda", False, "what lies between the steps, and data that other steps have put out of the caches"),
        (130.0, "cpu", True, "a busy machine does not let its parts be told apart"),
    ],
)
def test_what_a_call_takes_beside_its_steps_is_said(in_place: float | None, kind: str, noisy: bool, words: str) -> None:
    whole, steps = of(148.0, 149.0, 150.0, 151.0, 152.0), [of(40.0), of(60.0)]
    assert rest_words(whole, steps, in_place, kind, noisy=noisy) == words
    assert rest_words(whole, steps[:1], in_place, kind) == ""


def test_steps_that_add_up_to_more_than_a_call_are_said_to_and_why() -> None:
    whole, more = of(98.0, 99.0, 100.0, 101.0, 102.0), [of(60.0), of(80.0)]
    assert (
        rest_words(whole, more, 99.0, "cpu")
        == "steps one by one take longer: a call wakes threads once, and has no Python between generated kernels"
    )
    then = "steps one by one take longer: in a call the next one begins before the last one ends"
    assert rest_words(whole, more, None, "cuda") == then
    assert rest_words(whole, [of(60.0), of(41.0)], 99.0, "cpu") == "within the spread of single calls"
    busier = "the steps, timed one by one, took longer than the program: the machine was busier while they were timed"
    assert rest_words(whole, more, 99.0, "cpu", noisy=True) == busier


def test_the_rest_of_a_call_is_what_the_report_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers add up, and the table has it between both sums."""
    a, w = input_("a", F32, (64, 256)), input_("w", F32, (256, 256))
    program = compiled(gemm(map_("tanh", gemm(Node(LayerNorm(1, 1e-5), a), w)), w))
    monkeypatch.setenv("COLUMNS", "150")
    report = program.perf(iterations=3) if isinstance(program, tilewright.Program) else None
    assert report is not None
    facts = report.facts
    assert facts.steps_us == pytest.approx(sum(s.time_us for s in facts.steps), abs=0.01) and facts.in_place_us > 0
    assert facts.total_low_us <= facts.total_us <= facts.total_high_us
    assert all(s.low_us <= s.time_us <= s.high_us for s in facts.steps)
    rest = facts.total_us - facts.steps_us
    row = f"Rest {f'{us(rest)} µs' if rest > 0 else 'none'} {facts.rest}"
    assert facts.rest and row in " ".join(str(report).split())


def test_steps_that_took_longer_than_the_whole_leave_no_rest_and_noise_leaves_per_cent() -> None:
    """Neither a negative rest nor microseconds that another run would have otherwise; and one number of one run."""
    a, w = input_("a", F32, (64, 256)), input_("w", F32, (256, 256))
    program = compiled(gemm(map_("tanh", gemm(Node(LayerNorm(1, 1e-5), a), w)), w))
    measured = measure(program, "g", make_feeds(program.source), program.target, iterations=1, within_s=1.0)
    steps_us = sum(s.time_us for s in measured.report.steps)
    advice = schema.Advice(
        kind="k", title="t", where=["n"], steps=[0], why="w", change="c", saves_us=steps_us / 20, basis="of this run"
    )
    report = msgspec.structs.replace(
        measured.report, noise="others have the cores", total_us=steps_us / 2, rest="why", advice=[advice]
    )
    out = Console(file=io.StringIO(), width=150)
    print_perf(out, dataclasses.replace(measured, report=report, whole=of(steps_us / 2)))
    assert isinstance(out.file, io.StringIO)
    said = " ".join(out.file.getvalue().split())
    assert "Rest none why" in said and "1. t: saves about 5.0 % of all steps, of this run" in said
    assert f"Whole program {us(steps_us / 2)} µs 1 run Sum" in said
    for group in (g for g in report.groups if len(g.steps) == 1 and g.median_us):
        assert f" {us(group.median_us or 0.0)} {percent(group.share or 0.0)} " in said


@pytest.mark.parametrize(
    ("saves_us", "total_us", "noise", "words"),
    [
        (50.0, 1000.0, "", "50.0 µs (5.0 % of all steps)"),
        (50.0, 1000.0, "busy", "5.0 % of all steps"),
        (50.0, 0.0, "", "50.0 µs"),
        (50.0, 0.0, "busy", ""),
        (None, 1000.0, "", ""),
    ],
)
def test_what_advice_saves_is_in_per_cent_alone_where_times_are_not_reliable(
    saves_us: float | None, total_us: float, noise: str, words: str
) -> None:
    assert saved_words(saves_us, total_us, noise) == words


def test_quartiles_of_few_times_are_the_outermost() -> None:
    assert of(3.0).quartiles_us is None and of(3.0, 1.0).quartiles_us == (1.0, 3.0)
    assert of(5.0, 1.0, 2.0, 3.0, 4.0).quartiles_us == (2.0, 4.0)


def on_the_device(run: Callable[[], object], device: str, rounds: Rounds) -> list[float]:
    times = device_us(run, device, rounds)
    assert times.calls == 1 and times.median_us == statistics.median(times.us)
    return times.us


@pytest.mark.parametrize("time_runs", [wall_us, on_the_device])
def test_rounds_are_counted_and_budgeted(time_runs: Callable[..., list[float]]) -> None:
    calls: list[int] = []
    times = time_runs(lambda: calls.append(1), "cpu", Rounds.of(7, 100.0))
    assert len(times) == 7 and len(calls) == 9 and all(t > 0 for t in times)
    assert len(time_runs(lambda: None, "cpu", Rounds.of(None, 0.0))) == 5
    assert len(time_runs(lambda: None, "cpu", Rounds.of(None, 60.0))) == 100


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_progress_is_drawn_on_a_terminal_in_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("[bold].onnx") as show:
        show(1, 2, "s8[16,1024] @ s8[16,1024]^T")
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "[bold].onnx" in drawn and "0:00:0" in drawn and ("s8[16,1024] @" in drawn or columns < 80)
    shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", drawn)
    assert max(len(line.strip()) for line in re.split("[\r\n]", shown)) <= columns


def test_compiling_tells_which_kernel_it_is_choosing() -> None:
    x, w = input_("x", F32, (4, 8)), input_("w", F32, (8, 8))
    value = Node(LayerNorm(1, 1e-5), gemm(x, w))
    graph = Graph("g", (x, w), (gemm(value, w), gemm(value, transpose(w, (1, 0)))), ("y", "z"))
    told: list[tuple[int, int, str]] = []
    tilewright.compile(graph, budget_s=0, progress=lambda *what: told.append(what))
    plain, turned = "f32[4,8] @ f32[8,8]", "f32[4,8] @ f32[8,8]^T"
    norm = "layer_norm -> f32[4,8]"
    assert sorted(told, key=lambda t: t[0]) == told and [t[:2] for t in told] == [(0, 3), (1, 3), (2, 3)]
    assert {t[2] for t in told} == {plain, norm, turned}


def test_names_that_are_no_text_are_found_in_tuples_too():
    assert schema.encoded({"a\udc80": ("b\udcff", ["c"]), "d": 1.5}) == b'{"a?":["b?",["c"]],"d":1.5}'


@pytest.mark.parametrize(("file", "padded"), [(io.StringIO(), False), (Terminal(), True)])
def test_lines_end_in_spaces_on_terminals_alone(file: io.StringIO, padded: bool) -> None:
    filled = table(("name", "left"), ("text", "left"))
    filled.add_row("a", "longer than its title")
    filled.add_row("b  c", "x")
    out = console(file)
    out.print(filled)
    out.print("x  ", end="")
    out.print("y")
    lines = file.getvalue().splitlines()
    assert any(line.endswith(" ") for line in lines) is padded
    assert any("b  c" in line for line in lines) and lines[-1].rstrip() == "x  y", "spaces within a line stay"
