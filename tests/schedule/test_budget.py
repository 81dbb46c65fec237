"""Time for choosing: by the clock, within one problem as over all of them, and what Ctrl-C leaves."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from cli_programs import write
from fake_candidate import Fake

import tilewright
from tilewright import compiler
from tilewright.dtype import F32, S8
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.rules import calibrate as calibration
from tilewright.schedule import budget, measure, tuning_database
from tilewright.schedule import search as search_module
from tilewright.schedule.cache import Cache
from tilewright.schedule.candidate import Schedule
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import Interruption, search
from tilewright.schedule.tuning_database import TuningDatabase

CPU = detect("cpu")
PROBLEM = problem_of(parse("f32[8,16] @ f32[16,12]").outputs[0])


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when a test says so, on both of Python's clocks."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def slow(clock, name, seconds=1.0, points=20, kind=Fake, **how):
    """A candidate each of whose calls takes so long."""

    def run(sources):
        clock[0] += seconds
        return [sources[0] @ sources[1]]

    return kind(name, run, schedules=[Schedule.of(point=i) for i in range(points)], **how)


def whys(decision):
    return {str(r): r.why for r in decision.rejected}


@pytest.mark.parametrize("within_s", [20.0, 60.0, 200.0])
def test_one_slow_problem_ends_by_the_clock(clock, within_s):
    """Each call takes a second, a check eight of them: what would not fit is not tried, and what was checked is still timed."""
    began = clock[0]
    candidates = [slow(clock, n, preference=20 + i) for i, n in enumerate("abcdefgh")]
    d = search(PROBLEM, CPU, budget_s=0.5, candidates=candidates, within_s=within_s)
    took = clock[0] - began
    assert within_s / 3 < took <= 1.1 * within_s and d.measured and d.verified
    untried = [r for r in d.rejected if r.why == "not tried: the time for choosing was over"]
    assert bool(untried) == (within_s < 200)
    began = clock[0]
    search(PROBLEM, CPU, budget_s=0.5, candidates=candidates)
    assert clock[0] - began > 100


def test_looking_further_ends_by_the_clock(clock):
    began = clock[0]
    d = search(PROBLEM, CPU, budget_s=1000.0, candidates=[slow(clock, "deep", points=1000)], within_s=300.0)
    assert 200 < clock[0] - began <= 330 and d.measured
    assert "more points ranked below were not tried" in whys(d)["deep"]


class Foremost(Fake):
    """A candidate that expects one of its points to be the best of all."""

    def leading(self):
        return self._schedules[3]

    def offers(self, schedule):
        return schedule in self._schedules


def test_what_leads_is_built_first_for_time_may_be_over_then(clock):
    candidates = [slow(clock, "a", preference=10), slow(clock, "b", 0.5, kind=Foremost, preference=30)]
    for budget_s in (0, 5.0):
        d = search(PROBLEM, CPU, budget_s=budget_s, candidates=candidates, within_s=1.0)
        assert (d.kernel.candidate, d.kernel.schedule) == ("b", Schedule.of(point=3)) and not d.measured
    d = search(PROBLEM, CPU, budget_s=5.0, candidates=candidates)
    assert d.kernel.candidate == "b" and d.measured
    assert sum(r.schedule == Schedule.of(point=3) for r in d.rejected if r.candidate == "b") == 0


def test_without_time_one_is_checked_and_none_is_timed(clock):
    d = search(PROBLEM, CPU, budget_s=5.0, candidates=[slow(clock, "a"), slow(clock, "b")], within_s=1.0)
    assert d.kernel.candidate == "a" and d.verified and not d.measured and d.time_us is None
    assert whys(d)["b"] == "not tried: the time for choosing was over"


def test_what_was_checked_too_late_to_be_timed_says_so(clock, monkeypatch):
    """A check that takes longer than the ones before it, by a kernel that is examined to the end."""
    monkeypatch.setattr(measure, "SLOWER", float("inf"))
    first, late = slow(clock, "first", 0.01, points=1), slow(clock, "late", 10.0, points=1)
    d = search(PROBLEM, CPU, budget_s=5.0, candidates=[first, late], within_s=30.0)
    assert d.kernel.candidate == "first" and not d.measured
    assert whys(d)["late (point=0)"] == "not timed: the time for choosing was over"


def products(*columns):
    x = input_("x", S8, (4, 8))
    outputs = tuple(gemm(x, const(torch.ones(8, n, dtype=torch.int8))) for n in columns)
    return Graph("g", (x,), outputs, tuple(f"y{n}" for n in columns))


def apart(*columns):
    """Products with an input each, which no rule joins."""
    inputs = [input_(f"x{n}", S8, (4, 8)) for n in columns]
    outputs = [gemm(x, const(torch.ones(8, n, dtype=torch.int8))) for x, n in zip(inputs, columns, strict=True)]
    return Graph("g", tuple(inputs), tuple(outputs), tuple(f"y{n}" for n in columns))


@pytest.mark.parametrize("checking_s", [0.0, 0.3, 1.0, 1.7])
def test_all_problems_end_by_the_clock(clock, monkeypatch, tmp_path, checking_s):
    """Each takes as long to be checked, measured or not; twenty end within a tenth of the time given, and the first of them are
    measured."""
    real, shares, limits = budget.search, [], []

    def costly(problem, target, **how):
        share, within = how["budget_s"], how.get("within_s") or 0.0
        shares.append(share)
        limits.append(within)
        clock[0] += max(checking_s, min(checking_s + share, within))
        return replace(real(problem, target, **{**how, "budget_s": 0}), checked_s=checking_s)

    monkeypatch.setattr(budget, "search", costly)
    graph, began = products(*range(1, 21)), clock[0]
    decide = compiler.chooser(graph, CPU, 40.0, None, TuningDatabase(CPU, Cache(tmp_path)))
    for n in reversed(graph.outputs):
        decide(problem_of(n), {1: n.src[1].op.data.tensor()})
    assert 36 <= clock[0] - began <= 44 and len(shares) == 20
    assert 19.9 < limits[0] <= 20.0 and max(limits) <= 40.0 and 2.0 < shares[0] <= 4.0 and sum(s > 0 for s in shares) >= 3


@pytest.mark.parametrize(("times", "others"), [(2, "llvm"), (20, "reference")])
def test_what_is_worth_most_is_chosen_first_and_gets_most(clock, monkeypatch, tmp_path, times, others):
    """A program whose last step is the heaviest, with time to search one problem: that one. The others take the first kernel
    that passes its check, or the reference where searching the one took far longer than it was given; that is not kept."""
    real, asked = budget.search, []

    def costly(problem, target, **how):
        asked.append((problem.N, how["budget_s"]))
        clock[0] += 0.1 + times * how["budget_s"]
        return replace(real(problem, target, **{**how, "budget_s": 0}), checked_s=0.1)

    monkeypatch.setattr(budget, "search", costly)
    program = compiler.compile(apart(3, 5, 4096), budget_s=2.0, cache=TuningDatabase(CPU, Cache(tmp_path)))
    columns, shares = zip(*asked, strict=True)
    assert shares[0] > 1.0 and not any(shares[1:])
    assert columns == ((4096, 5, 3) if others == "llvm" else (4096,))  # the reference is not even checked
    assert [s.decision.kernel.candidate for s in program.steps] == [others, others, "llvm"]
    assert len([*Cache(tmp_path).records()]) == (3 if others == "llvm" else 1)


def test_the_least_that_gives_a_good_program_ends_by_the_clock_too(clock, monkeypatch, tmp_path, caplog):
    """Fifteen problems of which each kernel takes 2 s to be checked, measured or not, where the time is for six: then libraries
    serve, which take 0.2 s each, then the reference. All end within a fifth more and one kernel."""
    real, asked, took_s = budget.search, [], {"llvm": 2.0, "int_mm": 0.2}

    def costly(problem, target, **how):
        decision = real(problem, target, **{**how, "budget_s": 0})
        clock[0] += took_s[decision.kernel.candidate]
        asked.append(decision.kernel.candidate)
        return replace(decision, checked_s=took_s[decision.kernel.candidate])

    monkeypatch.setattr(budget, "search", costly)
    began, cache = clock[0], Cache(tmp_path)
    graph = apart(*range(16, 256, 16))
    program = compiler.compile(graph, budget_s=10.0, cache=TuningDatabase(CPU, cache))
    assert 10.0 < clock[0] - began <= 1.2 * 10.0 + 2.0
    kinds = [s.decision.kernel.candidate for s in reversed(program.steps)]  # the heaviest first
    assert kinds == sorted(kinds, key=["llvm", "int_mm", "reference"].index) and len(set(kinds)) == 3
    assert asked == [k for k in kinds if k != "reference"]
    untried = [r for s in program.steps for r in s.decision.rejected if r.candidate == "llvm" and r.why == budget.OVER]
    assert len(untried) == 15 - asked.count("llvm")
    assert f"the time was over (budget_s=10): {len(untried)} problems run on a library or operation by" in caplog.text
    assert len([*cache.records()]) == asked.count("llvm")
    x = torch.ones(4, 8, dtype=torch.int8)
    assert all(torch.equal(y, torch.full_like(y, 8)) for y in program(*[x] * 15))
    asked.clear()
    compiler.compile(graph, budget_s=100.0, cache=TuningDatabase(CPU, cache))
    assert set(asked) == {"llvm"} and len(asked) >= len(untried)


def test_a_short_budget_is_no_worse_than_none(clock, monkeypatch):
    """Reading alone may take a second: for what follows the least that gives a good program, 5 s are given."""
    real = budget.search

    def costly(problem, target, **how):
        clock[0] += 1.0
        return real(problem, target, **{**how, "budget_s": 0})

    monkeypatch.setattr(budget, "search", costly)
    for budget_s in (0.0, 0.01):
        program = compiler.compile(apart(3, 5, 7), budget_s=budget_s, cache=False)
        assert [s.decision.kernel.candidate for s in program.steps] == ["llvm"] * 3


def test_reading_and_rules_count(clock, monkeypatch, tmp_path):
    """What they take is not there for searching; and it does not keep anything from being chosen."""
    real, shares = budget.search, []

    def counted(problem, target, **how):
        shares.append(how["budget_s"])
        return real(problem, target, **{**how, "budget_s": 0})

    def slowly(*given, **how):
        clock[0] += takes_s.pop()
        return optimise(*given, **how)

    optimise, takes_s = compiler.optimise, [11.0, 9.0, 7.0, 0.0]
    monkeypatch.setattr(budget, "search", counted)
    monkeypatch.setattr(compiler, "optimise", slowly)
    while takes_s:
        compiler.compile(products(3), budget_s=10.0, cache=False)
    assert shares == pytest.approx([2.0, 2.0, 1.0, 0.0], abs=1e-6)


def test_a_worker_that_is_not_up_in_time_is_done_without(clock, monkeypatch):
    """Waiting for it would take the budget of a small program."""
    real, shares, waits = budget.search, [], []
    monkeypatch.setattr(budget, "ready", lambda seconds: waits.append(seconds))
    monkeypatch.setattr(budget, "search", lambda *given, **how: shares.append(how["budget_s"]) or real(*given, **how))
    program = compiler.compile(products(3), budget_s=1.0, cache=False)
    assert shares == [0] and waits == pytest.approx([1.0]) and not program.steps[0].decision.measured


def test_calibration_ends_when_the_time_is_over(clock, monkeypatch, caplog):
    """After the batch under way, with what was seen until then; without a budget it takes them all."""
    evaluate, search, seen = calibration.evaluate, budget.search, []
    monkeypatch.setattr(budget, "search", lambda *given, **how: search(*given, **{**how, "budget_s": 0}))

    def slowly(graph, batch, **how):
        seen.append(batch)
        clock[0] += 3.0
        return evaluate(graph, batch, **how)

    monkeypatch.setattr(calibration, "evaluate", slowly)
    x = input_("x", F32, (4, 64))
    graph = Graph("g", (x,), (gemm(x, const(torch.ones(64, 32))),), ("y",))
    batches = [{"x": torch.randn(4, 64)} for _ in range(5)]
    how = tilewright.Quantization(tilewright.scheme("int8"), batches)
    for budget_s, count in ((0.0, 5), (7.0, 3), (1.0, 1), (100.0, 5)):
        seen.clear()
        compiler.compile(graph, budget_s=budget_s, quantize=how, cache=False)
        assert len(seen) == count
        assert (f"calibrated with {count} of 5 batches, as the time was over" in caplog.text) == (count < 5)
        caplog.clear()


def scaled(*scales):
    """One product a layer, each with a scale of its own."""
    inputs = [input_(f"x{i}", F32, (4, 8)) for i in range(len(scales))]
    outputs = [
        map_("multiply", gemm(x, const(torch.ones(8, 3))), const(torch.tensor(s))) for x, s in zip(inputs, scales, strict=True)
    ]
    return Graph("layers", tuple(inputs), tuple(outputs), tuple(f"y{i}" for i in range(len(scales))))


@pytest.mark.parametrize("same_text", [True, False])
@pytest.mark.parametrize(
    ("scales", "other", "checked"),
    [((1.5, 2.5, 3.5, 0.25), 0, 1), ((1.5, 2.5, -3.5, 1e-9), 0, 3), ((1.5, 2.5, 3.5, 0.0), 1, 2), ((-1.5, 2.5, 3.5), 0, 2)],
)
def test_layers_that_differ_in_scales_share_a_check(monkeypatch, scales, other, checked, same_text):
    """One is searched, and those are checked that are generated as another text. Where no text tells, one more is checked for
    its own scale, besides those whose scale code may be written for. All of them compute with their own."""
    if not same_text:
        monkeypatch.setattr(budget, "generated", lambda kernel: False)
    again, asked = budget.repeat, []
    monkeypatch.setattr(budget, "repeat", lambda *given: asked.append(given) or again(*given))
    program = compiler.compile(scaled(*scales), budget_s=0, cache=False)
    x = torch.randn(4, 8)
    for y, scale in zip(program(*[x] * len(scales)), scales, strict=True):
        torch.testing.assert_close(y, (x @ torch.ones(8, 3)) * scale)
    assert len(asked) == (other if same_text else checked) and len({s.decision.kernel.candidate for s in program.steps}) == 1


def test_time_to_check_those_that_are_alike_is_kept_back(clock, monkeypatch, tmp_path):
    """Two are measured, each with time left to check it and one more; six are built, and are the text that was checked."""
    real, shares = budget.search, []

    def measured(problem, target, **how):
        shares.append(how["budget_s"])
        clock[0] += 1.0 + how["budget_s"]
        return replace(real(problem, target, **{**how, "budget_s": 0}), checked_s=1.0)

    def checked(problem, target, candidate, schedule, weights):
        clock[0] += 1.0
        return replace(again(problem, target, candidate, schedule, weights), checked_s=1.0)

    again = tuning_database.repeat
    monkeypatch.setattr(budget, "search", measured)
    monkeypatch.setattr(tuning_database, "repeat", checked)
    inputs = [input_(f"x{i}", F32, (4, 8)) for i in range(8)]
    weights = [const(torch.ones(8, 3 if i < 3 else 5)) for i in range(8)]
    scales = [const(torch.tensor(1.5 + i)) for i in range(8)]
    outputs = [map_("multiply", gemm(x, w), s) for x, w, s in zip(inputs, weights, scales, strict=True)]
    graph = compiler.optimise(Graph("g", tuple(inputs), tuple(outputs), tuple(f"y{i}" for i in range(8))))
    began = clock[0]
    decide = compiler.chooser(graph, CPU, 7.0, None, TuningDatabase(CPU, Cache(tmp_path)))
    for n in graph.outputs:
        decide(problem_of(n), {1: n.src[1].op.data.tensor()})
    assert len(shares) == 2 and 0 < shares[0] <= 2.0 and clock[0] - began == pytest.approx(6.0)
    assert shares[1] == pytest.approx(7.0 - (1.0 + shares[0]) - 2 * 1.0)


def test_an_interruption_keeps_the_best_of_the_problem_under_way(clock, monkeypatch, tmp_path):
    def stopped(self, winner):
        clock[0] += 0.5
        raise KeyboardInterrupt

    monkeypatch.setattr(search_module._Search, "_deepened", stopped)
    with pytest.raises(Interruption) as stop:
        search(PROBLEM, CPU, budget_s=5.0, candidates=[slow(clock, "a", 0.3), slow(clock, "b", 0.1)])
    assert stop.value.decision.kernel.candidate == "b" and stop.value.decision.measured
    cache = Cache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile(products(3), budget_s=100.0, cache=TuningDatabase(CPU, cache))
    (kept,) = cache.records()
    assert kept.key.budget == "short" and kept.time_us >= 0  # no more than it had


SCRIPT = """
import sys
from tilewright.cli.verbs import main
from tilewright.schedule import search
deepened = search._Search._deepened
def told(self, winner):
    sys.stdout.write("deepening\\n")
    sys.stdout.flush()
    while True:  # as long as there is something to try
        deepened(self, winner)
search._Search._deepened = told
sys.argv = ["tilewright", "tune", {program!r}, "--budget", "60"]
main()
"""


def test_ctrl_c_keeps_the_best_so_far(tmp_path):
    """A real SIGINT while the only problem of a program is searched."""
    x, w = input_("x", F32, (64, 64)), input_("w", F32, (64, 64))
    program = write(tmp_path, Graph("one", (x, w), (gemm(x, w),), ("y",)))
    env = {**os.environ, "TILEWRIGHT_CACHE": str(tmp_path / "cache")}
    script = SCRIPT.format(program=program)
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as p:
        assert p.stdout.readline() == "deepening\n", p.stderr.read()
        p.send_signal(signal.SIGINT)
        _, said = p.communicate(timeout=300)
    assert p.returncode == 130 and "1 choice is kept" in said, said
    (kept,) = Cache(tmp_path / "cache").records()
    assert kept.time_us > 0 and kept.problem == "f32[64,64] @ f32[64,64]"
