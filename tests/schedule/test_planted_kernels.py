"""Broken machine code in a whole search: every planted kernel is built and run in the worker, and none is ever timed."""

from dataclasses import replace

import pytest
import torch
from planted_kernels import MISTAKES, Broken

from tilewright.candidates.llvm.runtime.engine import available
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import discover
from tilewright.schedule.fork_server import SWITCH
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import search
from tilewright.schedule.worker import HostedBench, address

CPU = detect("cpu")
WHY = {
    "bad_tail": "elements differ",
    "bad_index": "elements differ",
    "missing_store": "elements differ",
    "stale_output": "elements differ",
    "nan_through_beta_0": "elements differ",
    "race": ("it gave other results when it ran again", "elements differ"),
    # What lies 4 GiB before the right place is another mapping, or none.
    "offsets_of_32_bits": ("(only when its sources reach past 2^31 bytes)", "crashed: SIGSEGV"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Each as a module of its own in a folder, where the worker finds them too."""
    folder = tmp_path_factory.mktemp("planted")
    plans = {name: (5, f"Broken({name!r}, problem, target)") for name in MISTAKES}
    for name, offset in (("offsets_of_32_bits", "i32"), ("offsets_of_64_bits", "i64")):
        plans[name] = 6, f"Strided({name!r}, problem, target, {offset!r})"
    for name, (preference, plan) in plans.items():
        (folder / f"{name}.py").write_text(
            "from planted_kernels import Broken, Strided\n"
            "from tilewright.schedule.candidate import CPU, GEMM, Candidate\n"
            f"def plan(problem, target):\n    return {plan}\n"
            f"CANDIDATE = Candidate({name!r}, GEMM, CPU, {preference}, plan)\n"
        )
    found = {c.name: c for c in discover([folder])}
    return [found[name] for name in (*WHY, "sound", "offsets_of_64_bits")]


@pytest.fixture
def timed(monkeypatch):
    """Names of the candidates that the worker was asked to time."""
    seen, names, attempt, times = set(), {}, HostedBench.attempt, HostedBench.times

    def attempted(self, key, candidate, schedule):
        names[key] = candidate.name
        return attempt(self, key, candidate, schedule)

    def asked(self, keys, budget_s):
        seen.update(names[k] for k in keys)
        return times(self, keys, budget_s)

    monkeypatch.setattr(HostedBench, "attempt", attempted)
    monkeypatch.setattr(HostedBench, "times", asked)
    return seen


@pytest.mark.skipif(available() is not None, reason="no kernels are generated here")
def test_broken_machine_code_is_refused_before_it_is_timed(planted, timed, monkeypatch, request):
    """Each stands beside what it was made from, unbroken, which passes: so it is the mistake that is found."""
    monkeypatch.delenv(SWITCH, raising=False)
    problem = problem_of(parse("f32[512,1100] @ f32[1100,145]").outputs[0])
    generated = [c for c in planted if "offsets" not in c.name]
    assert all(address(c) is not None for c in planted) and {*WHY} - {"offsets_of_32_bits"} == {*MISTAKES} - {"sound"}
    torch.set_num_threads(2)  # one alone does not race
    target = replace(CPU, cores=2)
    for _ in range(20):  # where others keep the processors busy, threads that race may happen to take turns
        timed.clear()
        decision = search(problem, target, budget_s=0.05, candidates=generated)
        whys = refusals(decision)
        if "race" in whys:
            break
    for name, why in WHY.items():
        if "offsets" not in name:
            parts = (why,) if isinstance(why, str) else why
            assert any(part in whys[name] for part in parts), (name, whys[name])
    assert decision.kernel.candidate == "sound" and decision.measured and decision.verified
    assert timed == {"sound"}


@pytest.mark.skipif(available() is not None, reason="no kernels are generated here")
def test_offsets_that_are_too_narrow_are_refused_before_they_are_timed(planted, timed, monkeypatch):
    """A small problem: kernels that take one element after another are not far slower than the fastest, whatever else runs."""
    monkeypatch.delenv(SWITCH, raising=False)
    problem = problem_of(parse("f32[33,65] @ f32[65,17]").outputs[0])
    decision = search(problem, CPU, budget_s=0.05, candidates=[c for c in planted if "offsets" in c.name])
    why = refusals(decision)["offsets_of_32_bits"]
    assert any(part in why for part in WHY["offsets_of_32_bits"]), why
    assert decision.kernel.candidate == "offsets_of_64_bits" and decision.measured and decision.verified
    assert timed == {"offsets_of_64_bits"}


def refusals(decision):
    """Reasons why candidates that were not timed were refused, by name."""
    return {r.candidate: r.why for r in decision.rejected if r.time_us is None}


def test_a_mistake_is_one_small_change():
    """The texts differ where they should: a pattern that no longer fits the generator fails here, not silently."""
    problem = problem_of(parse("f32[512,1100] @ f32[1100,145]").outputs[0])
    from tilewright.candidates.llvm.gemm.candidate import source_of

    plan = Broken("sound", problem, CPU)
    (schedule,) = plan.schedules()
    text = source_of(plan.sound.nest_of(schedule)).text
    for name, mistake in MISTAKES.items():
        lines, before = mistake(text, problem.N).splitlines(), text.splitlines()
        assert (len({*lines} ^ {*before}) == 0) == (name == "sound"), name
