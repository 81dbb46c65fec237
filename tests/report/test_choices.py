"""Choices for people: labels taken apart, predictions beside measurements, who does what."""

from __future__ import annotations

import msgspec
import pytest

from tilewright.report.explain.choices import attribution, attribution_words, mispredictions, off_by, parted
from tilewright.report.schema import Choice, Refusal, Rejected, Step
from tilewright.report.text.explain_text import how, refusals
from tilewright.schedule.candidate import Schedule


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule.of(compute="f32"),
        Schedule.of(instruction="vpdpbusd zmm", mr=6, pack_lhs=False, pack_per_thread=True),
        Schedule.of(at="epilogue", by="llvm, reference"),
        Schedule(),
    ],
)
def test_a_label_is_taken_apart_into_the_point_it_names(schedule: Schedule) -> None:
    label = f"llvm ({schedule})" if schedule.knobs else "llvm"
    assert parted(label) == ("llvm", schedule)


def test_predictions_that_are_wrong_by_more_than_twice_are_said() -> None:
    assert off_by(100.0, 199.0) is None and off_by(None, 1.0) is None and off_by(1.0, None) is None
    assert off_by(100.0, 300.0) == 3.0 == off_by(300.0, 100.0)
    chosen = Choice("llvm", "default", 100.0, 310.0)
    rejected = [Refusal("aten", "slower", 250.0, "", 100.0), Refusal("onednn", "slower", 150.0, "", 100.0)]
    assert mispredictions(chosen, rejected) == [
        "llvm (chosen): 310.0 µs predicted, 100.0 µs measured, 3.1 times as fast",
        "aten: 100.0 µs predicted, 250.0 µs measured, 2.5 times as long",
    ]
    assert (
        how(chosen, True) == "100.0 µs (310.0 predicted: wrong by a factor of 3.1), the fastest that agrees with the reference"
    )
    assert how(chosen, True, tied=True).endswith("as fast as any that agrees with the reference")
    assert refusals([*rejected, Refusal("sdpa", "no attention", None)], chosen) == [
        "onednn: 150.0 µs (100.0 predicted), 1.50 times as long",
        "aten: 250.0 µs (100.0 predicted: wrong by a factor of 2.5), 2.50 times as long",
        "sdpa: no attention",
    ]


def test_other_points_of_the_chosen_candidate_are_told_by_what_differs() -> None:
    chosen = Choice("llvm", "instruction=vfmadd231ps zmm mr=14 nr=32 pack_lhs=false", 100.0, None)
    labels = [
        "llvm (instruction=vfmadd231ps zmm mr=13 nr=32 pack_lhs=true)",
        "llvm (instruction=vfmadd231ps zmm mr=14 nr=32 pack_lhs=false)",
        "split (mr=13)",
        "llvm",
    ]
    assert refusals([Refusal(label, f"because {i}", None) for i, label in enumerate(labels)], chosen) == [
        "llvm with mr=13 pack_lhs=true: because 0",
        f"{labels[1]}: because 1",
        "split (mr=13): because 2",
        "llvm: because 3",
    ]


def step(kind: str, candidate: str, *rejected: tuple[str, str]) -> Step:
    return Step("s", kind, "p", candidate, "", 1.0, 1, 1, 1.0, 1.0, [Rejected(*r) for r in rejected])


def test_a_line_says_who_does_the_products_and_why_a_library_does_some() -> None:
    steps = [
        *[step("gemm", "llvm")] * 3,
        step("gemm", "onednn", ("llvm (mr=6)", "slower: 2.0 µs, 1.20 times the winner"), ("llvm_w4", "no codes")),
        step("gemm", "aten", ("llvm_w4", "no codes"), ("llvm", "no kernel for f64")),
        step("norm", "llvm_norm"),
        step("view", "torch"),
    ]
    assert attribution(steps) == {"gemm": {"llvm": 3, "onednn": 1, "aten": 1}, "other": {"llvm_norm": 1}}
    assert attribution_words(steps) == [
        "5 matrix products: 3 by llvm, 1 by onednn, 1 by aten. onednn where the generated kernel is slower: 2.0 µs, 1.20 times "
        "the winner. aten where llvm says: no kernel for f64.",
        "1 other step: by llvm_norm.",
    ]
    assert msgspec.json.encode(attribution(steps))
