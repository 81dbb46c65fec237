"""Findings: what is left to the reference, or refused as wrong, is said."""

import dataclasses

import pytest
import torch

import tilewright
from tilewright.candidates import split as split_module
from tilewright.ir.notation import parse
from tilewright.report.explain.findings import fallback
from tilewright.schedule import search as search_module
from tilewright.schedule.candidate import LAST_RESORT
from tilewright.schedule.search import Rejected, search


class Layer(torch.nn.Module):
    def forward(self, x, w, b):
        return torch.tanh(x @ w + b)


def compiled():
    given = torch.randn(8, 16), torch.randn(16, 8), torch.randn(8)
    return tilewright.compile(Layer(), example_inputs=given, budget_s=0, cache=False)


@pytest.fixture
def only_split(monkeypatch):
    """A search that knows the candidate that takes gemms apart, and the reference."""
    found = [c for c in search_module.discover() if c.name == "split" or c.preference >= LAST_RESORT]
    for module in (search_module, split_module):
        monkeypatch.setattr(module, "discover", lambda *a: found)
    assert search is search_module.search


def test_a_part_that_the_reference_does_is_no_secret(only_split):
    program = compiled()
    (step,) = program.steps
    assert step.decision.kernel.candidate == "split"
    assert dict(step.decision.kernel.parts) == {"gemm": "reference", "fusion": "reference"}
    assert any(f.why.startswith("split leaves its product and epilogue to the reference") for f in fallback(program, {}))


def test_kernels_that_were_called_wrong_are_told_of():
    program = compiled()
    (step,) = program.steps
    assert fallback(program, {}) == []
    wrong = Rejected("fast", "wrong", "the result is wrong: 3 of 64 elements differ, first at [0, 0]: 1 for 2")
    object.__setattr__(step.decision, "rejected", (wrong, Rejected("slow", "slower", "slower: 3.0 µs", time_us=3.0)))
    (found,) = fallback(program, {})
    assert found.why.startswith(
        "kernels were refused that gave other results than the reference; report this (fast: the result is"
    )
    assert "slow" not in found.why


def test_what_was_not_tried_refused_nothing():
    """A product on the reference: who refused it and who was not tried are told apart."""
    program = compiled()
    (step,) = program.steps
    last = next(c.name for c in search_module.discover() if c.preference >= LAST_RESORT)
    object.__setattr__(step.decision.kernel, "candidate", last)
    refused, late = Rejected("split", "refused", "an extent is zero"), Rejected("llvm", "untried", search_module.OVER)
    for rejected, why in (
        ((), "no kernel takes it"),
        ((refused,), "no kernel takes it (split: an extent is zero)"),
        ((late,), f"no kernel was tried; llvm: {search_module.OVER}"),
        ((refused, late), f"no kernel that was tried takes it (split: an extent is zero); llvm: {search_module.OVER}"),
    ):
        object.__setattr__(step.decision, "rejected", rejected)
        (found,) = fallback(program, {})
        assert found.why == why


def test_one_that_did_not_come_back_gave_no_other_results_and_one_that_starved_did_nothing():
    program = compiled()
    (step,) = program.steps
    starved = Rejected("split", "starved", "no answer in 8 s: killed, while other programs had the processors")
    object.__setattr__(step.decision, "rejected", (starved,))
    assert fallback(program, {}) == []
    object.__setattr__(step.decision, "rejected", (starved, Rejected("fast", "lost", "no answer in 4 s: killed")))
    (found,) = fallback(program, {})
    assert found.why == "kernels were refused that crashed or hung; report this (fast: no answer in 4 s: killed)"


def test_a_refused_kernel_stands_under_no_heading_that_says_fell_back() -> None:
    program = tilewright.compile(parse("f32[64,96] @ f32[96,32] + bias"), budget_s=0)
    (step,) = program.steps
    assert step.decision is not None
    decision = dataclasses.replace(step.decision, rejected=(Rejected("split", "lost", "no answer in 6 s: killed"),))
    program.swap((dataclasses.replace(step, decision=decision),))
    said = str(program.explain())
    assert "nothing fell back" in said and "Worth knowing" in said and "Fell back" not in said
    assert "kernels were refused that crashed or hung; report this (split: no answer in 6 s: killed)" in " ".join(said.split())
