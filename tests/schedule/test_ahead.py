"""Machine code made before it is searched for, by processes beside the worker. No GPU is needed to compile for one."""

import os
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import warm
from paths import python_path

from tilewright import compiler
from tilewright.dtype import F32
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import const, input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.schedule import ahead, budget
from tilewright.schedule.candidate import Schedule, planned
from tilewright.schedule.fork_server import SWITCH, fork_server
from tilewright.schedule.problem import problem_of
from tilewright.schedule.worker import pickled, settings_here

H200 = Target("NVIDIA H200", CHIP, "cuda", 132, features=frozenset({"cuda", "sm_90"}))
LINE = "f16[128,128] @ f16[128,128] -> f32"


def test_kernels_are_in_the_compilers_cache_before_they_are_built(tmp_path):
    pytest.importorskip("triton")
    program = f"""
        from pathlib import Path
        from tests.candidates.triton.hopper.test_gemm import H200
        from tilewright.ir.notation import parse
        from tilewright.schedule import ahead
        from tilewright.schedule.candidate import discover, plan_for
        from tilewright.schedule.problem import problem_of

        ahead.DEPTH = ahead.POINTS = 1
        problem, cache = problem_of(parse({LINE!r}).outputs[0]), Path({str(tmp_path)!r})
        assert {{name for _, name, _ in ahead.jobs_for([problem], H200)}} == {{"hopper", "triton"}}
        assert ahead.compile_ahead([problem], H200) == 2
        made = sorted(cache.rglob("*.cubin"))
        assert len(made) == 2
        for candidate in discover():
            if candidate.name in ("hopper", "triton"):
                plan = plan_for(candidate, problem, H200)
                plan.compile(next(iter(plan.schedules())))
        assert sorted(cache.rglob("*.cubin")) == made
        hopper = plan_for(next(c for c in discover() if c.name == "hopper"), problem, H200)
        last = list(hopper.schedules())[-1]
        assert ahead.compile_ahead([], H200, chosen=[(problem, "hopper", last)]) == 1
        assert len(list(cache.rglob("*.cubin"))) == 3
        hopper.compile(last)
        assert len(list(cache.rglob("*.cubin"))) == 3
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", SWITCH: "1"}
    environment["PYTHONPATH"] = python_path()
    done = warm.run(["-c", textwrap.dedent(program)], environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_a_problem_is_taken_apart_to_is_compiled_too():
    whole = problem_of(parse("f16[64,64] @ f16[64,64] + bias, relu -> f16").outputs[0])
    jobs = ahead.jobs_for([whole], H200)
    assert [(p == whole, at) for p, _, at in jobs] == [
        *[(True, at) for at in range(ahead.DEPTH) for _ in range(2)],
        *[(False, 0)] * 3,
        *[(True, at) for at in range(ahead.DEPTH, ahead.POINTS) for _ in range(2)],
    ]
    assert {name for p, name, at in jobs if p == whole and at == ahead.POINTS - 1} == {"hopper", "triton"}
    assert {(p.kind, name) for p, name, _ in jobs if p != whole} == {
        ("gemm", "hopper"), ("gemm", "triton"), ("fusion", "triton_norm")
    }  # fmt: skip
    assert not ahead.jobs_for([whole], detect("cpu"))


def test_all_that_competes_from_the_start_is_compiled_before_pieces():
    """A search comes to pieces last, so one problem's do not keep another one waiting."""
    lines = ("f16[64,64] @ f16[64,64] + bias, relu -> f16", "f16[64,96] @ f16[96,64] + bias, relu -> f16")
    wholes = [problem_of(parse(line).outputs[0]) for line in lines]
    jobs = ahead.jobs_for(wholes, H200)
    own = 2 * 2 * ahead.DEPTH
    assert all(p in wholes and at < ahead.DEPTH for p, _, at in jobs[:own])
    assert {at for p, _, at in jobs[own:] if p not in wholes} == {0}
    assert len(jobs) == len(set(jobs)) and all(at >= ahead.DEPTH for p, _, at in jobs[own:] if p in wholes)


def test_layers_that_differ_in_scales_are_compiled_once_and_nothing_where_nothing_is_measured(monkeypatch):
    asked = []
    monkeypatch.setattr(budget, "Ahead", lambda p, target, *, within_s, chosen, most: asked.append((p, within_s, chosen)))
    given, w = input_("x", F32, (8, 8)), input_("w", F32, (8, 8))
    value = given
    for scale in (0.3, 0.7):
        value = map_("multiply", gemm(value, w), const(scale, F32))
    graph = compiler.optimise(Graph("layers", (given, w), (value,), ("y",)))
    compiler.chooser(graph, H200, 1.0, None)
    compiler.chooser(graph, H200, 0.0, None)
    compiler.chooser(graph, detect("cpu"), 1.0, None)
    ((problems, within_s, chosen),) = asked
    assert [p.kind for p in problems] == ["gemm"] and 0.6 < within_s <= 1 and not chosen


def test_a_search_waits_for_its_own_machine_code_alone(monkeypatch):
    """The first problem's code is there while the second one's is still being made; once all is chosen nobody goes on."""
    lines = ("f32[8,16] @ f32[16,8] -> f32", "f32[8,24] @ f32[24,8] -> f32")
    first, second = (problem_of(parse(line).outputs[0]) for line in lines)
    target, order, go_on, stopped = replace(detect("cpu"), kind="cuda"), [], threading.Event(), threading.Event()

    def compile_ahead(problems, target, *, done, over, **_):
        done(first)
        order.append(f"waits for {list(problems).index(second) + 1}")
        assert go_on.wait(60)
        done(second)
        while not over():
            time.sleep(0.01)
        stopped.set()

    def progress(done, total, what):
        order.append(what)
        if done == 1 and what.startswith("compiling"):
            go_on.set()

    monkeypatch.setattr(ahead, "compile_ahead", compile_ahead)
    monkeypatch.setattr(budget, "search", lambda p, *_, **__: order.append(p) or Mock(checked_s=0.0))
    shared = budget.BudgetedChooser({first: 1, second: 1}, target, 20.0, cold=False, progress=progress)
    for problem in (first, second):
        shared(problem, {})
    assert order[1:] == [str(first), first, str(second), "compiling what will be tried first", second]
    assert stopped.wait(60)


def test_what_is_compiled_first_is_chosen_first(monkeypatch):
    """The heaviest problem's code takes the longest: the others go ahead, and nobody waits once there is none."""
    lines = [f"f32[8,16] @ f32[16,{n}] -> f32" for n in (32, 24, 8)]
    heavy, middle, light = problems = [problem_of(parse(line).outputs[0]) for line in lines]
    target, go_on, began = replace(detect("cpu"), kind="cuda"), threading.Event(), threading.Event()

    def compile_ahead(problems, target, *, done, over, **_):
        began.set()
        time.sleep(0.05)
        done(light)
        assert go_on.wait(60)
        done(heavy)
        done(middle)

    monkeypatch.setattr(ahead, "compile_ahead", compile_ahead)
    shared = budget.BudgetedChooser(dict.fromkeys(problems, 1), target, 20.0, cold=False)
    assert began.wait(60) and shared.turn([heavy, middle, light]) == 2
    threading.Timer(0.05, go_on.set).start()
    assert shared.turn([heavy, middle]) == 0 and go_on.is_set()
    assert budget.BudgetedChooser(dict.fromkeys(problems, 1), detect("cpu"), 1.0, cold=False).turn(problems) == 0
    go_on.clear()
    late = budget.BudgetedChooser(dict.fromkeys(problems, 1), target, 0.2, cold=False)
    assert late.turn([heavy, middle]) == 0 and not go_on.is_set()
    go_on.set()


def test_pieces_that_are_still_compiled_come_later_or_not_at_all(monkeypatch):
    """Problems that are taken apart are chosen behind those that are not; with little time they are not taken apart."""
    lines = ("f32[8,16] @ f32[16,8] + bias, gelu -> f32", "f32[8,24] @ f32[24,8] -> f32")
    apart, plain = problems = [problem_of(parse(line).outputs[0]) for line in lines]
    target, go_on, began, given = replace(detect("cpu"), kind="cuda"), threading.Event(), threading.Event(), {}
    monkeypatch.setattr(ahead, "planned", lambda c, p, _: planned(c, p, detect("cpu")))

    def compile_ahead(problems, target, *, done, over, **_):
        for problem in problems:
            done(problem)
        began.set()
        assert go_on.wait(60)

    monkeypatch.setattr(ahead, "compile_ahead", compile_ahead)
    monkeypatch.setattr(budget, "search", lambda p, *_, candidates, **__: given.update({p: candidates}) or Mock(checked_s=0.0))
    alone = budget.BudgetedChooser(dict.fromkeys(problems, 1), target, 2.0, cold=False)
    assert began.wait(60) and alone.turn(problems) == 0  # for pieces that nobody compiles nobody waits
    monkeypatch.setattr(ahead, "_able", list)
    began.clear()
    shared = budget.BudgetedChooser(dict.fromkeys(problems, 1), target, 2.0, cold=False)
    assert began.wait(60) and shared.turn(problems) == 1 and shared.turn([apart]) == 0
    for problem in problems:
        shared(problem, {})
    (split,) = (c for c in given[apart] if c.name == "split")
    assert planned(split, apart, target).why == budget.LATER and given[plain] is None
    patient = budget.BudgetedChooser(dict.fromkeys(problems, 1), target, 60.0, cold=False)
    patient(apart, {})
    assert given[apart] is None
    late = budget.BudgetedChooser(dict.fromkeys(problems, 1), target, 0.01, cold=False)
    time.sleep(0.02)
    late(apart, {})
    assert late.late == 1 and given[apart] is None  # what is built is the first that does
    go_on.set()
    while shared._ahead.unready(apart):  # pyright: ignore
        time.sleep(0.01)
    assert shared.turn(problems) == 0


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)


def test_compile_workers_work_beside_the_worker_and_end_when_they_are_let_go(processes):
    known = fork_server()
    with known.lock:
        known.ensure_worker()
        worker, (pid, compile_worker) = known.worker, known.compile_worker()
        other, second = known.compile_worker()
    assert known.worker is worker and len({pid, other}) == 2
    problem = problem_of(parse(LINE).outputs[0])
    message = pickled(("compile", problem, detect("cpu"), settings_here(), "no such candidate", 0))
    for each in (compile_worker, second):
        each.send_bytes(message)
        assert each.poll(60) and each.recv_bytes()
        each.close()
    with known.lock:
        assert known.worker is worker
        known.end_worker()
        known.ensure_worker()  # the fork server goes on, and has buried them
    ends = time.monotonic() + 10  # it sees by itself that nobody is at the other end any more
    while _lives(pid) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid):
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_who_does_not_answer_is_ended(processes, monkeypatch):
    killed, jobs = [], [(None, "slow", 0), (None, "slow", 1)]
    monkeypatch.setattr(ahead, "jobs_for", lambda problems, target: jobs)
    monkeypatch.setattr(ahead, "_work_off", lambda found, messages, unanswered, *_: unanswered.update([*found][:1]))
    monkeypatch.setattr(ahead, "end_group", killed.append)
    made, inner = {}, ahead._compile_workers
    monkeypatch.setattr(
        ahead, "_compile_workers", lambda known, count: (one for one in [*inner(known, count)] if not made.update([one]))
    )
    assert ahead.compile_ahead([], detect("cpu")) == 2
    assert killed == list(made.values())[:1]


@pytest.mark.parametrize(("cores", "asked"), [(1, 5), (6, 6), (64, 9)])
def test_points_that_come_later_are_for_processes_that_are_left(cores, asked, monkeypatch):
    jobs = [(None, "any", at) for at in (0, 0, 0, 1, 1, 2, 2, 3, 3)]
    monkeypatch.setattr(ahead, "jobs_for", lambda problems, target: jobs)
    monkeypatch.setattr(ahead, "usable", lambda: cores)
    monkeypatch.setattr(ahead, "used_fork_server", Mock)
    monkeypatch.setattr(ahead, "_compile_workers", lambda known, count: ((Mock(), i) for i in range(count)))
    done = []
    monkeypatch.setattr(ahead, "_work_off", lambda found, messages, *_: done.append((len([*found]), len(messages))))
    assert ahead.compile_ahead([], detect("cpu")) == asked
    assert done == [(min(cores, asked, 16), asked)]


def test_it_is_told_what_was_compiled_and_what_failed(processes, monkeypatch):
    """The one no compile worker can be told of, the other names a candidate that there is not."""
    first, second = (problem_of(parse(line).outputs[0]) for line in (LINE, "f16[64,64] @ f16[64,64] -> f32"))
    monkeypatch.setattr(ahead, "jobs_for", lambda problems, target: [(p, "no such candidate", 0) for p in problems])
    told = []
    assert ahead.compile_ahead([first, second], detect("cpu"), done=told.append) == 2
    assert sorted(told, key=str) == sorted([first, second], key=str)


def test_of_points_that_are_named_each_is_waited_for_by_itself(monkeypatch):
    """One is made, the other is not; a problem of which one is named waits for both."""
    problem = problem_of(parse(LINE).outputs[0])
    first, second = ((problem, "hopper", Schedule.of(tile_m=m)) for m in (64, 128))
    go_on, told = threading.Event(), []

    def work_off(started, messages, unanswered, within_s, done, over):
        (one, _), (other, _) = messages
        told.append((one, other))
        for what in one:
            if what != problem:
                done(what)
        assert go_on.wait(60)

    monkeypatch.setattr(ahead, "used_fork_server", Mock)
    monkeypatch.setattr(ahead, "_compile_workers", lambda known, count: iter(()))
    monkeypatch.setattr(ahead, "_work_off", work_off)
    begun = ahead.Ahead([], H200, chosen=[first, second], most=3)
    begun.wait_for_any(60)
    assert told == [([problem, first], [problem, second])]
    assert not begun.waits(first) and begun.waits(second) and begun.waits(problem)
    go_on.set()
    begun.wait(problem, 60)
    assert not begun.waits((problem, "hopper", Schedule()))  # nobody makes it


def test_where_no_process_may_be_started_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr(ahead, "jobs_for", lambda problems, target: [(None, "any", 0)])
    assert ahead.compile_ahead([], detect("cpu")) == 0


def test_a_problem_that_no_process_can_be_told_of_is_left_to_its_search(monkeypatch):
    def told(message):
        raise RecursionError

    monkeypatch.setattr(ahead, "jobs_for", lambda problems, target: [(None, "any", 0)])
    monkeypatch.setattr(ahead, "pickled", told)
    assert ahead.compile_ahead([], detect("cpu")) == 0


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(processes, monkeypatch):
    def interrupted(count):
        raise KeyboardInterrupt

    first = fork_server()
    monkeypatch.setattr(first, "_hear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.compile_worker()
    assert fork_server() is not first
