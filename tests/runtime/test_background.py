"""A search behind a program: kernels planted as better take the place of the first ones, wholly, between calls."""

import copy
import logging
import os
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import warm

from tilewright import compiler
from tilewright.dtype import F32
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, input_
from tilewright.ir.graph import Graph
from tilewright.ir.ops import gemm
from tilewright.ir.pattern import Trace
from tilewright.program import Program
from tilewright.runtime import background
from tilewright.runtime.prepare import prepare
from tilewright.schedule import budget
from tilewright.schedule.cache import Cache
from tilewright.schedule.candidate import Kernel, Schedule
from tilewright.schedule.search import Decision
from tilewright.schedule.tuning_database import TuningDatabase

CPU = detect("cpu")
PATIENCE_S = 60.0


def graph(*columns):
    """One product after the other: f32[4,8] @ f32[8,n0] @ f32[n0,n1] ..."""
    x = y = input_("x", F32, (4, 8))
    for n in columns:
        y = gemm(y, const(torch.ones(y.shape[-1], n)))
    return Graph("g", (x,), (y,), ("y",))


def planted(problem, value, before=lambda: None):
    """A decision for a kernel that gives one value everywhere."""

    def run(sources):
        before()
        return [torch.full(t.shape, value) for t in problem.outputs]

    kernel = Kernel(f"planted {value}", Schedule(), lambda weights: run, packed_bytes=1)
    return Decision(problem, kernel, 1.0, (), True, True)


class Planted:
    """A chooser of planted kernels: what their products give is their number of columns."""

    def __init__(self, seen, hold=None):
        self.seen, self.hold = seen, hold

    def weight(self, problem):
        return problem.N

    def __call__(self, problem, weights):
        self.seen.append(problem.N)
        if self.hold is not None:
            assert self.hold.wait(PATIENCE_S)
        return planted(problem, float(problem.N))


@pytest.fixture
def program():
    return compiler.compile(graph(5, 9, 7), budget_s=0, cache=False)


def test_better_kernels_take_the_place_of_the_first_ones_the_heaviest_first(program):
    x, seen = torch.ones(4, 8), []
    first = program(x)
    assert first.unique().tolist() == [8 * 5 * 9.0] and program.wait() and program.search is None
    program.search_on(lambda: Planted(seen))
    assert program.wait(PATIENCE_S) and seen == [9, 7, 5]
    assert program(x).unique().tolist() == [7.0] and program.packed_bytes == 3
    assert [s.decision.kernel.candidate for s in program.steps] == ["planted 5.0", "planted 9.0", "planted 7.0"]
    assert str(program.search) == "over: 3 of 3 problems done, 3 with another kernel than at first"
    assert repr(program.search) == f"<search behind a program, {program.search}>"


def test_a_call_runs_wholly_with_the_kernels_that_it_began_with(program):
    """The first of three kernels is held while all are replaced: the call goes on with the second and third as they were."""
    x, reached, go, order = torch.ones(4, 8), threading.Event(), threading.Event(), []

    def steps(name, hold=False):
        def before(i):
            order.append((name, i))
            if hold and i == 0:
                reached.set()
                assert go.wait(PATIENCE_S)

        made = []
        for i, step in enumerate(program.steps):
            decision = planted(step.decision.problem, float(i), lambda i=i: before(i))
            made.append(replace(step, run=decision.kernel.prepare({}), decision=decision))
        return tuple(made)

    program.swap(steps("old", hold=True))
    caller = threading.Thread(target=program, args=(x,))
    caller.start()
    assert reached.wait(PATIENCE_S)
    program.swap(steps("new"))
    program(x)
    go.set()
    caller.join(PATIENCE_S)
    assert order == [("old", 0), ("new", 0), ("new", 1), ("new", 2), ("old", 1), ("old", 2)]


def test_problems_are_chosen_in_the_order_that_is_said():
    """Given the heaviest first, those that are left."""
    seen, given, made = [], [], graph(5, 9, 7, 11)
    chooser = Planted(seen)

    def turn(problems):
        given.append([p.N for p in problems])
        return len(given) % len(problems)

    program = prepare(made, compiler.optimise(made), CPU, Trace(), chooser, made=Program, first=chooser.weight, turn=turn)
    assert given == [[11, 9, 7, 5], [11, 7, 5], [11, 7], [11]] and seen == [9, 5, 7, 11]
    assert [s.decision.problem.N for s in program.steps] == [5, 9, 7, 11]


def test_a_copy_has_the_same_kernels_though_these_hold_what_has_no_copy(program):
    def locked(kernel):
        return replace(kernel, prepare=partial(lambda lock, weights: kernel.prepare(weights), threading.RLock()))

    program.change(lambda s: replace(s, decision=replace(s.decision, kernel=locked(s.decision.kernel))))
    other = copy.deepcopy(program)
    assert [s.decision.kernel for s in other.steps] == [s.decision.kernel for s in program.steps]
    assert torch.equal(other(torch.ones(4, 8)), program(torch.ones(4, 8)))


class Heaviest(Planted):
    """A chooser that measures the heaviest problem alone."""

    def __call__(self, problem, weights):
        return replace(super().__call__(problem, weights), measured=problem.N == 9)


def test_a_step_that_changes_while_others_are_packed_stays_changed(program, monkeypatch):
    real = background.kernel_step

    def packed(*args):
        program.change(lambda s: replace(s, name="changed", run=lambda v: s.run(v)) if s is program.steps[0] else s)
        return real(*args)

    monkeypatch.setattr(background, "kernel_step", packed)
    program.search_on(lambda: Heaviest([]))
    assert program.wait(PATIENCE_S)
    assert [s.name == "changed" for s in program.steps] == [True, False, False]
    assert program.steps[1].decision.kernel.candidate == "planted 9.0"


def test_no_time_is_noted_of_a_kernel_that_a_step_has_no_more(program, monkeypatch):
    own, other = program.steps[1].decision, planted(program.steps[1].decision.problem, 2.0)
    real = background._same

    def same(a, b):
        answer = real(a, b)
        if program.steps[1].decision is own:  # given up by now
            program.change(lambda s: replace(s, decision=other, run=other.kernel.prepare({})) if s.decision is own else s)
        return answer

    class Timed(Heaviest):
        def __call__(self, problem, weights):
            return replace(own if problem.N == 9 else super().__call__(problem, weights), measured=problem.N == 9, time_us=1.0)

    monkeypatch.setattr(background, "_same", same)
    program.search_on(lambda: Timed([]))
    assert program.wait(PATIENCE_S)
    assert program.steps[1].decision is other


def test_what_was_not_measured_replaces_nothing_and_the_same_kernel_runs_on(program):
    before = [s.run for s in program.steps]

    class Same(Planted):
        def __call__(self, problem, weights):
            own = next(s.decision for s in program.steps if s.decision.problem == problem)
            return (
                replace(own, time_us=3.0, measured=True) if problem.N == 9 else replace(planted(problem, 0.0), measured=False)
            )

    program.search_on(lambda: Same([]))
    assert program.wait(PATIENCE_S) and [s.run for s in program.steps] == before
    assert [s.decision.time_us for s in program.steps] == [None, 3.0, None]
    assert str(program.search).endswith("3 of 3 problems done, 0 with another kernel than at first")


def test_wait_raises_what_ended_the_search_and_the_program_runs_on(program, caplog):
    class Failing(Planted):
        def __call__(self, problem, weights):
            if problem.N == 7:
                raise RuntimeError("no more of it")
            return super().__call__(problem, weights)

    with caplog.at_level(logging.WARNING, "tilewright"):
        program.search_on(lambda: Failing([]))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no more of it"):
                program.wait(PATIENCE_S)
    assert caplog.messages == ["the search in the background failed: RuntimeError: no more of it"]
    assert str(program.search) == "failed: RuntimeError: no more of it"
    assert program(torch.ones(4, 8)).unique().tolist() == [9 * 9.0]  # nines, times a matrix of ones
    assert [s.decision.kernel.candidate for s in program.steps][1] == "planted 9.0"


def test_weights_are_dropped_once_the_search_has_stopped(program):
    hold, seen = threading.Event(), []
    program.search_on(lambda: Planted(seen, hold))
    assert not program.wait(0) and str(program.search).startswith("searching: 0 of ")
    threading.Timer(0.05, hold.set).start()
    program.drop_weights()
    assert str(program.search) == "stopped: 1 of 3 problems done, 1 with another kernel than at first" and seen == [9]
    other = copy.deepcopy(program)
    assert other.search is None and other.wait()
    assert torch.equal(other(torch.ones(4, 8)), program(torch.ones(4, 8)))


def test_compile_returns_what_a_budget_of_0_takes_and_keeps_what_is_found(monkeypatch, tmp_path):
    asked, real, hold = [], budget.search, threading.Event()

    def search(problem, target, **how):
        asked.append(how["budget_s"])
        if how["budget_s"] > 0:
            assert hold.wait(PATIENCE_S)
            return replace(real(problem, target, **{**how, "budget_s": 0}), time_us=2.0, measured=True)
        return real(problem, target, **how)

    monkeypatch.setattr(budget, "search", search)
    kept = Cache(tmp_path)
    program = compiler.compile(graph(5), budget_s=30.0, cache=TuningDatabase(CPU, kept), background=True)
    assert asked[0] == 0 and not any(s.decision.measured for s in program.steps)
    hold.set()
    assert program.wait(PATIENCE_S) and len(asked) == 2 and asked[1] > 0
    assert [s.decision.time_us for s in program.steps] == [2.0] and [r.time_us for r in kept.records() if r.time_us] == [2.0]
    assert compiler.compile(graph(5), budget_s=0, cache=False, background=True).search is None


def test_searches_end_together_and_what_fails_then_is_not_reported(monkeypatch, caplog):
    """Several programs' searches have one span at the process's end; their worker may be gone before they are."""
    monkeypatch.setattr(background, "ENDS_S", 0.2)
    monkeypatch.setattr(background, "_all", weakref.WeakSet())
    go, programs, waits = threading.Event(), [], []

    class Gone(Planted):
        def __call__(self, problem, weights):
            assert go.wait(PATIENCE_S)
            raise AttributeError("no worker")

    for _ in range(3):
        programs.append(compiler.compile(graph(5), budget_s=0, cache=False))
        programs[-1].search_on(lambda: Gone([]))
    stop = background.Background.stop
    monkeypatch.setattr(background.Background, "stop", lambda b, within_s: (waits.append(within_s), stop(b, within_s)))
    background._end()
    assert waits[:3] == [0] * 3 and sum(waits) <= 0.2 * 2, "the last two wait for what the first left, which is next to nothing"
    go.set()
    assert all(p.wait(PATIENCE_S) for p in programs) and caplog.messages == []
    assert {str(p.search) for p in programs} == {"stopped: 0 of 1 problem done, 0 with another kernel than at first"}


SCRIPT = """
import torch, tilewright
from tilewright.ir.notation import parse
program = tilewright.compile(parse("f32[64,64] @ f32[64,64]"), budget_s=600, background=True)
print("up", flush=True)
"""


def test_the_search_ends_with_the_process(tmp_path):
    """A real process, that ends while its search is under way: it leaves nobody behind."""
    env = {**os.environ, "TILEWRIGHT_CACHE": str(tmp_path / "cache")}
    done = warm.run(["-c", SCRIPT], env, timeout=120)
    assert (done.returncode, done.stdout) == (0, "up\n"), done.stderr
    assert "Traceback" not in done.stderr and "failed" not in done.stderr, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_fork_works_behind_its_own_calls():
    """The thread of the process that it came from is not there, though that had work left."""
    held = threading.Event()
    background.behind(held.wait)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        background.behind(lambda: os.write(write, b"done"))
        background.wait_behind()
        os._exit(0)
    held.set()
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 4) == b"done"
    os.close(read)
    background.wait_behind()
