"""Time for choosing: by the clock, within one problem as over all of them, and what Ctrl-C leaves."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import click
import pytest
import torch
from cli_programs import write
from fake_candidate import Fake

import tilewright
from tilewright import compiler, deadline, errors
from tilewright.cli.compile import ends_of, left_of
from tilewright.cli.errors import BEGAN
from tilewright.dtype import F32, S8
from tilewright.hardware import ceilings
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.report.measure.timing import Rounds, wall_us
from tilewright.rules import calibrate as calibration
from tilewright.schedule import budget, measure, tuning_database
from tilewright.schedule import search as search_module
from tilewright.schedule.cache import Cache
from tilewright.schedule.candidate import Schedule
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import Interruption, search
from tilewright.schedule.space import Space
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


def test_once_all_time_is_over_not_even_the_first_library_is_tried(clock):
    def candidates():
        return [slow(clock, "ours", preference=1), slow(clock, "library", preference=30)]

    d = search(PROBLEM, CPU, budget_s=5.0, candidates=candidates(), within_s=1.0)  # of this problem alone
    assert d.measured and not whys(d).get("library", "").startswith("not tried")
    began, ends = clock[0], clock[0] + 2.0
    d = search(PROBLEM, CPU, budget_s=5.0, candidates=candidates(), within_s=1.0, over=lambda: clock[0] > ends)
    one_s = clock[0] - began
    assert d.kernel.candidate == "ours" and d.verified and whys(d)["library"] == "not tried: the time for choosing was over"
    began = clock[0]
    search(PROBLEM, CPU, budget_s=0, candidates=candidates())
    assert one_s == clock[0] - began


def test_the_points_left_are_counted_while_there_is_time(clock):
    def points(count):
        for i in range(count):
            pulled.append(i)
            clock[0] += 0.001
            yield Schedule.of(point=i)

    pulled = []
    assert Space(None, None, points(2500)).left(clock[0] + 10.0) == (2500, True)
    pulled.clear()
    assert Space(None, None, points(2500)).left(clock[0] + 1.5) == (2000, False) and len(pulled) == 2000
    d = search(PROBLEM, CPU, budget_s=5.0, candidates=[slow(clock, "deep", points=5000)], within_s=1.0)
    assert whys(d)["deep"] == "at least 1,000 more points ranked below were not tried"


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


@pytest.mark.parametrize("times", [1, 20])
def test_what_is_worth_most_is_chosen_first_and_gets_most(clock, monkeypatch, tmp_path, times):
    """A program whose last step is the heaviest, with time to search one problem: that one. The others take the first kernel
    that passes its check, however late it is."""
    real, asked = budget.search, []

    def costly(problem, target, **how):
        asked.append((problem.N, how["budget_s"]))
        clock[0] += 0.1 + times * how["budget_s"]
        return replace(real(problem, target, **{**how, "budget_s": 0}), checked_s=0.1)

    monkeypatch.setattr(budget, "search", costly)
    program = compiler.compile(apart(3, 5, 4096), budget_s=2.0, cache=TuningDatabase(CPU, Cache(tmp_path)))
    columns, shares = zip(*asked, strict=True)
    assert shares[0] > 1.0 and columns == (4096, 5, 3) and (times == 1 or not any(shares[1:]))
    assert [s.decision.kernel.candidate for s in program.steps] == ["llvm"] * 3
    assert len([*Cache(tmp_path).records()]) == 3


@pytest.mark.parametrize("budget_s", [0.01, 1.0, 10.0, 0.0])
def test_no_budget_gives_a_worse_program_than_none(clock, monkeypatch, tmp_path, caplog, budget_s):
    """Fifteen problems of which each kernel takes 2 s to be checked, measured or not. Those that are left once the time is over
    take what a budget of 0 takes, one check each; they are kept for as little time, and the next compile searches them."""
    real, asked = budget.search, []

    def costly(problem, target, **how):
        decision = real(problem, target, **{**how, "budget_s": 0})
        clock[0] += 2.0 + how["budget_s"]
        asked.append((problem.N, how["budget_s"]))
        return replace(decision, time_us=1.0, measured=True, checked_s=2.0) if how["budget_s"] else decision

    monkeypatch.setattr(budget, "search", costly)
    monkeypatch.setattr(errors, "_said", set())
    began, cache = clock[0], Cache(tmp_path)
    graph = apart(*range(16, 256, 16))
    program = compiler.compile(graph, budget_s=budget_s, cache=TuningDatabase(CPU, cache))
    assert [s.decision.kernel.candidate for s in program.steps] == ["llvm"] * 15 and len(asked) == 15
    assert clock[0] - began <= 30.0 + 1.2 * budget_s
    unmeasured = sum(s.decision.time_us is None for s in program.steps)
    said = re.search(r"g: the time was over before (\d+) problems? (was|were) measured, and the first kernel", caplog.text)
    late = int(said[1]) if said else 0
    assert program.finished == (not late) and late <= unmeasured and len([*cache.records()]) == 15
    assert bool(late) == bool(budget_s) and (budget_s or unmeasured == 15)
    first = {n for n, share in asked if share}
    asked.clear()
    compiler.compile(graph, budget_s=100.0, cache=TuningDatabase(CPU, cache))
    assert {n for n, _ in asked} >= {*range(16, 256, 16)} - first


def test_earlier_choices_serve_where_the_time_is_over(clock, monkeypatch, tmp_path, caplog):
    """Choices of 1 s are made again with 60, of which the first problem takes all: the others' are read back, and
    nothing is said of first kernels."""
    real, takes = budget.search, 0.1

    def costly(problem, target, **how):
        clock[0] += takes
        return replace(real(problem, target, **{**how, "budget_s": 0}), time_us=1.0, measured=True, checked_s=0.1)

    monkeypatch.setattr(budget, "search", costly)
    graph = apart(3, 5, 4096)
    first = compiler.compile(graph, budget_s=1.0, cache=TuningDatabase(CPU, Cache(tmp_path)))
    takes = 100.0
    second = compiler.compile(graph, budget_s=60.0, cache=TuningDatabase(CPU, Cache(tmp_path)))
    assert sorted(s.decision.recalled for s in second.steps) == [False, True, True]
    assert first.finished and not second.finished and "the time was over" not in caplog.text


def test_who_works_on_a_problem_is_waited_for_as_long_as_there_is_time(clock, monkeypatch, tmp_path):
    real, waits = budget.search, []
    monkeypatch.setattr(budget, "search", lambda *given, **how: real(*given, **{**how, "budget_s": 0}))

    class Held(Cache):
        @contextlib.contextmanager
        def alone(self, key, wait_s, there=None):
            waits.append(wait_s)
            clock[0] += wait_s
            yield False

    for budget_s, expected in ((1.0, [1.0, 0.0]), (100.0, [30.0, 30.0]), (0.0, [30.0, 30.0])):
        waits.clear()
        compiler.compile(apart(3, 5), budget_s=budget_s, cache=TuningDatabase(CPU, Held(tmp_path / str(budget_s))))
        assert waits == pytest.approx(expected, abs=1e-6)


def test_a_gpus_code_is_made_by_several_processes_once_the_time_is_over(clock, monkeypatch):
    """Code is made for what is tried first alone, of the problems that are left, the heaviest first."""
    begun, waited = [], []

    class Ahead:
        def __init__(self, problems, target, *, within_s=None, first=False, chosen=(), most=16):
            begun.append(([p.N for p in problems], within_s, first))

        def unready(self, problem):
            return []

        def waits(self, problem):
            return True

        def wait(self, problem, within_s):
            waited.append(within_s)
            clock[0] += min(within_s, 0.5)

        def stop(self):
            begun.append("stop")

    def chosen(problem, target, **how):
        clock[0] += 4.0
        return SimpleNamespace(problem=problem, kernel=SimpleNamespace(text="", parts=()), measured=False, checked_s=1.0)

    monkeypatch.setattr(budget, "Ahead", Ahead)
    monkeypatch.setattr(budget, "search", chosen)
    problems = {problem_of(n): 1 for n in apart(16, 32, 48).outputs}
    gpu = replace(CPU, kind="cuda")
    decide = budget.BudgetedChooser(problems, gpu, 5.0, cold=False)
    for problem in sorted(problems, key=decide.weight, reverse=True):
        decide(problem, {})
    assert begun == [([48, 32, 16], 5.0, False), "stop", ([16], None, True), "stop"]
    assert waited[0] == pytest.approx(2.5) and waited[-1] == budget.LIMIT_S and decide.late == 1


def test_reading_and_rules_count(clock, monkeypatch, tmp_path):
    """Time that they take is not there for searching; and it does not keep anything from being chosen."""
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
    """Calibration ends after the batch under way, with what was seen until then; without a budget it takes them all."""
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


def test_a_used_up_budget_is_not_one_of_0(clock):
    """A budget of 0 would leave nothing out. Half a second of ten is left, then none."""
    with click.Context(click.Command("perf")) as context:
        context.meta[BEGAN] = clock[0]
        clock[0] += 9.5
        assert left_of(10.0) == pytest.approx(0.5) and left_of(0.0) == 0 and ends_of(0.0) == math.inf
        assert 0 < left_of(10.0, 2.0) < 0.01
        clock[0] += 50.0
        assert 0 < left_of(10.0) < 0.01 and ends_of(10.0) < clock[0]


@pytest.mark.parametrize(("takes_s", "count", "calls"), [(0.001, 5, 7), (0.3, 4, 5), (5.0, 1, 1)])
def test_what_is_far_slower_than_there_is_time_is_timed_less_often(clock, takes_s, count, calls):
    """Five times at least, within ten times the time there is; a call that takes longer than that is its own warm-up."""
    seen = []

    def run():
        seen.append(clock[0])
        clock[0] += takes_s

    times = wall_us(run, "cpu", Rounds.of(None, 0.1 if takes_s > 0.01 else 0.001))
    assert times == pytest.approx([1e6 * takes_s] * count) and len(seen) == calls
    assert len(wall_us(run, "cpu", Rounds.of(3, 0.1))) == 3  # as asked for


@pytest.mark.parametrize(("left_s", "calls"), [(math.inf, 9), (0.045, 5), (-1.0, 1)])
def test_past_the_time_the_machine_is_measured_no_more(clock, left_s, calls):
    seen = []

    def run():
        seen.append(clock[0])
        clock[0] += 0.01

    late = pytest.raises(deadline.OverrunError) if left_s < math.inf else contextlib.nullcontext()
    with deadline.until(clock[0] + left_s), late:
        assert ceilings._best_seconds(run, "cpu") > 0
    assert len(seen) == calls
