"""Choices for people: predictions beside measurements, who does what."""

from __future__ import annotations

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
)
from tilewright.report.schema import Choice, Rejected, RejectedChoice, Step
from tilewright.report.text.explain_text import how, refusals
from tilewright.schedule.candidate import Kernel, Schedule
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import Decision
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
