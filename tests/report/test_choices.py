"""Choices for people: predictions beside measurements, who does what."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tilewright.ir.notation import parse
from tilewright.report.explain.choices import (
    attribution,
    attribution_words,
    chosen_of,
    mispredictions,
    off_by,
    provisional_words,
    rejected_of,
    why_not_generated,
)
from tilewright.report.schema import Choice, Product, Rejected, RejectedChoice, Step
from tilewright.report.text.explain_text import how, lost_sections, nearest, refusals, short_sections
from tilewright.schedule.candidate import Kernel, Schedule
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import WAITS, Decision
from tilewright.schedule.search import Rejected as Rejection


def test_predictions_that_are_wrong_by_more_than_twice_are_said() -> None:
    assert off_by(100.0, 199.0) is None and off_by(None, 1.0) is None and off_by(1.0, None) is None
    assert off_by(100.0, 300.0) == 3.0 == off_by(300.0, 100.0)
    chosen = Choice("llvm", "default", 100.0, 310.0)
    rejected = [
        RejectedChoice("aten", "slower", 250.0, "", 100.0, "slower"),
        RejectedChoice("onednn", "slower", 150.0, "", 100.0, "slower"),
    ]
    assert mispredictions(chosen, rejected) == [
        "llvm (chosen): 310.0 µs predicted, 100.0 µs measured, 3.1 times as fast",
        "aten: 100.0 µs predicted, 250.0 µs measured, 2.5 times as long",
    ]
    assert (
        how(chosen, True) == "100.0 µs (310.0 predicted: wrong by a factor of 3.1), the fastest that agrees with the reference"
    )
    assert how(chosen, True, tied=True).endswith("as fast as any that agrees with the reference")
    assert refusals([*rejected, RejectedChoice("sdpa", "no attention", None, "", None, "refused")], chosen) == [
        "onednn: 150.0 µs (100.0 predicted), 1.50 times as long",
        "aten: 250.0 µs (100.0 predicted: wrong by a factor of 2.5), 2.50 times as long",
        "sdpa: no attention",
    ]


def test_the_cost_model_is_not_blamed_for_noise() -> None:
    chosen = Choice("llvm", "default", 24.6, 7919.0, provisional="9 runnable tasks on 2 cores")
    rejected = [
        RejectedChoice("aten", "slower", 250.0, "", 1.0, "slower"),
        RejectedChoice("onednn", "tie", 20.0, "", 1.0, "tie"),
    ]
    assert mispredictions(chosen, rejected) == []
    assert how(chosen, True) == "24.6 µs on a busy machine (7,919.0 predicted), where none was seen to be faster"
    assert refusals(rejected, chosen) == [
        "onednn: 20.0 µs (1.0 predicted), not told apart on a busy machine: the earlier one is kept",
        "aten: 250.0 µs (1.0 predicted), 10.16 times as long",
    ]
    waiting = RejectedChoice("split", WAITS, 21.0, "", None, "tie")
    assert refusals([waiting], chosen) == [f"split: 21.0 µs, {WAITS}"]


def test_one_that_cannot_be_told_apart_stands_under_another_title_than_slower_ones() -> None:
    rejected = [
        RejectedChoice("onednn", "tie", 99.0, "", None, "tie"),
        RejectedChoice("aten", "slower", 250.0, "", None, "slower"),
        RejectedChoice("sdpa", "no attention", None, "", None, "refused"),
        RejectedChoice("split", "not tried: the time for choosing was over", None, "", None, "untried"),
        RejectedChoice(
            "int_mm", "no answer in 8 s: killed, while other programs had the processors", None, "", None, "starved"
        ),
    ]
    product = Product(["p"], "gemm", "p", [], "", [], [], [], Choice("llvm", "default", 100.0), True, rejected)
    short = dict(short_sections(product))
    assert short["As fast"] == ["onednn 99.0 µs (0.99 times)"] and short["Slower"] == ["aten 250.0 µs (2.50 times)"]
    waiting = RejectedChoice("split", WAITS, 80.0, "", None, "tie")
    waited = dict(short_sections(msgspec.structs.replace(product, rejected=[waiting])))
    assert waited["As fast"] == ["split 80.0 µs (0.80 times), but its threads wait for each other"]
    whole = dict(lost_sections(rejected, product.chosen))
    assert list(whole) == ["Was as fast", "Was slower", "Could not", "Was not tried"]
    assert "Could not" in short and "int_mm" not in str(short), "other programs kept it from its time"
    assert len(whole["Could not"]) == 1 and "int_mm: no answer in 8 s" in whole["Was not tried"][1]
    assert whole["Was not tried"][0] == "split: the time for choosing was over"
    assert whole["Was as fast"] == ["onednn: 99.0 µs, a tie: the earlier one is kept"]


def test_choices_made_in_noise_are_counted_by_problem() -> None:
    def decision(columns: int, noise: str = "") -> Decision:
        problem = problem_of(parse(f"f32[8,16] @ f32[16,{columns}]").outputs[0])
        kernel = Kernel("llvm", Schedule(), prepare=lambda weights: lambda sources: sources)
        return Decision(problem, kernel, 1.0, (), True, True, provisional=noise)

    noise = "9 runnable tasks on 2 cores"
    again = f"made on a busy machine ({noise}), and will be made again when it is quiet"
    assert provisional_words([decision(8), decision(9)]) == ""
    assert provisional_words([decision(8, noise), decision(8, noise)]) == f"the choice was {again}"
    assert provisional_words([decision(8, noise), decision(9)]) == f"1 of 2 choices was {again}"
    assert provisional_words([decision(8, noise), decision(9, noise), decision(10)]) == f"2 of 3 choices were {again}"
    scaled = [replace(decision(8, noise), problem=problem_of(parse(f"f32[8,16] @ f32[16,8] * {n}").outputs[0])) for n in (2, 3)]
    said = f"2 of 2 choices (one for each problem; those with other constants count apart) were {again}"
    assert provisional_words(scaled) == said, "more than the different steps, whose numbers do not count"


def test_other_points_of_the_chosen_candidate_are_told_by_what_differs() -> None:
    fma = "vfmadd231ps zmm"
    points = [
        ("llvm", Schedule.of(instruction=fma, mr=13, nr=32, pack_lhs=True)),
        ("llvm", Schedule.of(instruction=fma, mr=14, nr=32, pack_lhs=False)),
        ("split", Schedule.of(mr=13)),
        ("llvm", Schedule()),
    ]
    problem = problem_of(parse("f32[8,16] @ f32[16,8]").outputs[0])
    kernel = Kernel(*points[1], prepare=lambda weights: lambda sources: sources)
    rejected = tuple(Rejection(name, "unbuilt", f"because {i}", point) for i, (name, point) in enumerate(points))
    decision = Decision(problem, kernel, 100.0, rejected, True, True)
    assert refusals(rejected_of(decision), chosen_of(decision)) == [
        "llvm with mr=13 pack_lhs=true: because 0",
        f"llvm ({points[1][1]}): because 1",
        "split (mr=13): because 2",
        "llvm: because 3",
    ]


def test_the_reason_is_that_of_the_generated_point_that_came_nearest() -> None:
    """Its ratio is the one that the list of slower ones has, not that of a point upon which the search came earlier."""
    problem = problem_of(parse("f32[8,16] @ f32[16,8]").outputs[0])
    kernel = Kernel("aten", Schedule(), prepare=lambda weights: lambda sources: sources)
    rejected = tuple(
        Rejection("llvm", "slower", f"slower: {us:,.1f} µs, {us / 2626.9:.2f} times the winner", Schedule.of(mr=mr), us)
        for mr, us in ((6, 2785.8), (8, 2691.5))
    )
    decision = Decision(problem, kernel, 2626.9, rejected, True, True)
    assert why_not_generated(decision, "cpu") == "the generated kernel is slower: 2,691.5 µs, 1.02 times the winner"
    account = Product(["p"], "gemm", "p", [], "", [], [], [], chosen_of(decision), True, rejected_of(decision))
    assert nearest(account)[1] == ["llvm 2,691.5 µs (1.02 times)"]


def step(kind: str, candidate: str, *rejected: Rejected) -> Step:
    return Step("s", kind, "p", candidate, "", 1.0, 1, 1, 1.0, 1.0, list(rejected))


def test_a_line_says_who_does_the_products_and_why_a_library_does_some() -> None:
    no_codes = Rejected("llvm_w4", "no codes", "refused")
    steps = [
        *[step("gemm", "llvm")] * 3,
        step("gemm", "onednn", Rejected("llvm", "slower: 2.0 µs, 1.20 times the winner", "slower", "mr=6"), no_codes),
        step("gemm", "aten", no_codes, Rejected("llvm", "no kernel for f64", "refused")),
        step("norm", "llvm_norm"),
        step("view", "torch"),
    ]
    assert attribution(steps) == {"gemm": {"llvm": 3, "onednn": 1, "aten": 1}, "other": {"llvm_norm": 1}}
    assert attribution_words(steps, "cpu") == [
        "5 matrix products: 3 by llvm, 1 by onednn, 1 by aten. onednn where the generated kernel is slower: 2.0 µs, 1.20 times "
        "the winner. aten where llvm says: no kernel for f64.",
        "1 other step: by llvm_norm.",
    ]
    assert msgspec.json.encode(attribution(steps))
