"""Candidates that crash, hang or never finish compiling cost themselves alone; nothing outlives the process that asked."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dropped import dropped
from paths import python_path

from tilewright.dtype import F32, from_torch
from tilewright.hardware.detect import detect
from tilewright.hardware.load import Doing, Had, stopped, threads_of
from tilewright.ir.build import const, input_
from tilewright.ir.literal import Literal, bits_of
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.ir.types import TensorType
from tilewright.schedule import ahead as ahead_module
from tilewright.schedule import bench as bench_module
from tilewright.schedule import fork_server as fork_server_module
from tilewright.schedule import search as search_module
from tilewright.schedule import space
from tilewright.schedule import worker as worker_module
from tilewright.schedule.buckets import PackingVariants
from tilewright.schedule.candidate import discover, plan_for
from tilewright.schedule.fork_server import SWITCH, fork_server
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import search
from tilewright.schedule.worker import pickled

CPU = detect("cpu")
COST_S = 8.0  # 4 until it is killed, a new process, the others; 5 where nothing else runs
BUSY = ", while other programs had the processors"  # which may be so where tests run


counter = iter(range(100))


@pytest.fixture
def drop(tmp_path):
    """Drop a fake candidate into a folder of its own; `build` and `run` are what it does before it does right."""
    return partial(dropped, tmp_path)


@pytest.fixture(autouse=True)
def worker(monkeypatch):
    """These tests are about the worker: have it, have it started, and have it stay."""
    monkeypatch.delenv(SWITCH, raising=False)
    for patience in ("IDLE_S", "UNUSED_S"):
        monkeypatch.setattr(fork_server_module, patience, 600.0)
    began = fork_server()
    with began.lock:
        began.ensure_worker()
    return began


def problem(n=12):
    return problem_of(parse(f"f32[9,17] @ f32[17,{n}]").outputs[0])


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(seen, within_s=20.0):
    ends = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < ends
        time.sleep(0.02)


def gone(pid, within_s=10.0):
    ends = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < ends:
        time.sleep(0.02)
    return not alive(pid)


def test_kernels_are_built_and_run_elsewhere_and_the_winner_here(drop, tmp_path):
    seen = tmp_path / "pids"
    note = f"open({str(seen)!r}, 'a').write(f'{{os.getpid()}}\\n')"
    d = search(problem(), CPU, budget_s=0.02, candidates=[drop(note)])
    assert d.measured and d.verified and d.time_us > 0
    assert set(seen.read_text().split()) and str(os.getpid()) not in seen.read_text().split()
    a, b = torch.randn(9, 17), torch.randn(17, 12)
    assert torch.equal(d.kernel.prepare({})([a, b])[0], a @ b)
    assert str(os.getpid()) in seen.read_text().split()


def test_what_a_worker_does_beforehand_is_a_check(monkeypatch):
    found, real = [], bench_module.examine
    monkeypatch.setattr(bench_module, "examine", lambda *args, **how: found.append(real(*args, **how)))
    worker_module._Host._warm(SimpleNamespace(_pulse=lambda: None), problem(), CPU, worker_module.settings_here())
    assert found == [None]


def test_a_worker_that_died_of_what_it_did_beforehand_is_replaced(drop, worker):
    worker_module.warm(problem(), CPU)
    os.kill(worker._pid, signal.SIGKILL)
    assert search(problem(53), CPU, budget_s=0.02, candidates=[drop()]).measured


def test_a_worker_that_was_told_to_set_up_a_gpu_is_the_one_that_searches(drop, worker, monkeypatch):
    """Has it do so where there is no such device, too, and once; nobody waits for it, nor for one that another thread has."""
    none, sent = replace(CPU, kind="cuda", index=17), []
    monkeypatch.setattr(worker_module, "pickled", lambda message: sent.append(message[0]) or pickled(message))
    for _ in range(2):
        worker_module.warm(problem(), none)
    pid = worker._pid
    assert sent == ["warm"] and worker.warmed is worker.worker
    assert search(problem(52), CPU, budget_s=0.02, candidates=[drop()]).measured and worker._pid == pid
    with worker.lock:
        other = threading.Thread(target=worker_module.warm, args=(problem(), none))
        other.start()
        other.join(20)
        assert not other.is_alive()
    worker.end_worker()
    monkeypatch.setattr(worker, "ready", lambda within_s: False)
    worker_module.warm(problem(), none)
    assert worker.worker is None


@pytest.mark.parametrize("line", ["f32[9,17] @ f32[17,12] + bias, gelu -> f16", "s8[9,17] @ s8[17,12] -> s32"])
def test_a_bench_rehearses_without_a_fault(line, monkeypatch):
    """Passes what it takes for right through its own check, to the end."""
    found, real = [], bench_module.examine
    monkeypatch.setattr(bench_module, "examine", lambda *args, **how: found.append(real(*args, **how)))
    bench_module.Bench(problem_of(parse(line).outputs[0]), CPU, {}, watched=True).rehearse()
    assert found == [None]


def test_a_part_of_a_candidate_is_found_there_too(drop, tmp_path):
    seen = tmp_path / "pids"
    real = drop(f"open({str(seen)!r}, 'a').write(f'{{os.getpid()}}\\n')")
    d = search(problem(51), CPU, budget_s=0.02, candidates=[PackingVariants.of(real)])
    assert d.measured and d.kernel.candidate == real.name
    assert seen.read_text() and str(os.getpid()) not in seen.read_text().split()


class Awake:
    """Seconds that pass while this process is not stopped."""

    def __enter__(self):
        self.seconds, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()
        return self

    def _count(self):
        before = time.monotonic()
        while not self._over.wait(0.02):
            now = time.monotonic()
            self.seconds, before = self.seconds + min(now - before, 0.2), now

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


LOST = {
    "hangs in a call": ({"run": "while True: pass"}, "no answer in 4 s: killed"),
    "hangs in C": ({"run": "ctypes.pythonapi.pause()"}, "no answer in 4 s: killed"),
    "never compiles": ({"build": "while True: pass"}, "no answer in 4 s: killed"),
    "reads what is not mapped": ({"run": "ctypes.string_at(8)"}, "crashed: SIGSEGV"),
    "aborts as LLVM does": (
        {"build": "sys.stderr.write('LLVM ERROR: Cannot select: t1\\n'); sys.stderr.flush(); os.abort()"},
        "crashed: SIGABRT (LLVM ERROR: Cannot select: t1)",
    ),
    "is killed": ({"run": "os.kill(os.getpid(), signal.SIGKILL)"}, "crashed: SIGKILL (out of memory?)"),
    "exits": ({"run": "os._exit(3)"}, "crashed: its process ended with status 3"),
    "crashes once it is timed": ({"run": "if len(calls) > 9: ctypes.string_at(8)"}, "crashed: SIGSEGV"),
}


@pytest.mark.parametrize("how", LOST)
def test_one_that_does_not_come_back_costs_itself_alone(drop, how):
    """Its patience and little more; it is refused, and not tried again."""
    what, why = LOST[how]
    before, sound, bad = drop(preference=19), drop(preference=30), drop(points=3, **what)
    posed = problem(20 + list(LOST).index(how))
    with Awake() as took:
        d = search(posed, CPU, budget_s=0.3, candidates=[bad, sound, before])  # all are timed on a busy machine, too
    assert d.kernel.candidate in (before.name, sound.name) and d.measured
    lost = [r for r in d.rejected if r.candidate.startswith(bad.name) and r.kind in ("lost", "starved")]
    assert len(lost) == 1 and (lost[0].why == why or lost[0].kind == "starved")
    assert took.seconds < COST_S * (fork_server_module.PATIENCE if lost[0].kind == "starved" else 1)
    with Awake() as took:
        again = search(posed, CPU, budget_s=0.02, candidates=[bad, sound, before])
    if lost[0].kind == "lost":  # else the machine was to blame, and it was tried again
        assert [r.why for r in again.rejected if r.candidate == bad.name] == [why] and took.seconds < 2.0


def test_a_slow_candidate_that_shows_life_is_not_killed(drop, monkeypatch):
    monkeypatch.setattr("tilewright.schedule.worker.LIMIT_S", 0.6)
    slow = drop("if len(calls) < 5: time.sleep(0.4)")
    assert search(problem(40), CPU, budget_s=0.02, candidates=[slow]).kernel.candidate == slow.name


def one(state="R", ran=0.0, waited=0.0):
    return {1: Doing(state, ran, waited)}


@pytest.mark.parametrize(
    ("doing", "starved"),
    [
        (lambda t: one("R", t), False),  # it computes all the time
        (lambda t: one("S"), False),  # it sleeps, and wants nothing
        (lambda t: {}, False),  # nobody knows
        (lambda t: one("R", t / 4, 3 * t / 4), True),  # it would compute, and has a quarter of a processor
        (lambda t: one("R"), True),  # it is in the queue all the time: Linux counts its waiting once it has a core
        (lambda t: one("R", t // 1 / 4, 3 * (t // 1) / 4), True),  # it has a core for a quarter of each second
        # So have its other threads, while the first one waits for them: two that have half a core each are no whole one.
        (lambda t: {1: Doing("S", 0.0, 0.0), 2: Doing("R", t / 2, t / 2), 3: Doing("R", t / 2, t / 2)}, True),
        (lambda t: {1: Doing("S", 0.0, 0.0), 2: Doing("R", t, 0.0), 3: Doing("R", t / 2, t / 2)}, False),
    ],
)
def test_one_that_starved_is_given_more_time_and_not_called_crashed_or_hung(drop, monkeypatch, doing, starved):
    """The machine is to blame; the candidate is out of this search, and the next one tries it again."""
    monkeypatch.setattr("tilewright.schedule.worker.LIMIT_S", 0.9)
    monkeypatch.setattr("tilewright.hardware.load.threads_of", lambda pid: doing(time.monotonic()))
    bad, told = drop("while True: pass"), []
    posed = problem(60 + next(counter))
    d = search(posed, CPU, budget_s=0.02, candidates=[bad, drop(preference=30)], lost=lambda *lost: told.append(lost))
    (lost,) = (r for r in d.rejected if r.kind in ("lost", "starved"))
    assert lost.kind == ("starved" if starved else "lost")
    assert lost.why == (f"no answer in 2 s: killed{BUSY}" if starved else "no answer in 1 s: killed")
    assert told == ([] if starved else [(bad.name, lost.why)])
    remembered = [name for p, _, name in space.LOST if p == posed]
    assert remembered == ([] if starved else [bad.name])


@pytest.mark.parametrize("what", [{"run": "if len(calls) > 9: time.sleep(9)"}, {"build": "time.sleep(9)"}])
def test_one_that_starves_is_not_remembered_wherever_it_is_killed(drop, monkeypatch, what):
    monkeypatch.setattr("tilewright.schedule.worker.LIMIT_S", 0.4)
    monkeypatch.setattr("tilewright.hardware.load.threads_of", lambda pid: one("R"))
    bad, told = drop(preference=10, **what), []
    posed = problem(60 + next(counter))
    d = search(posed, CPU, budget_s=0.02, candidates=[bad, drop(preference=30)], lost=lambda *lost: told.append(lost))
    assert [r.kind for r in d.rejected if r.candidate == bad.name] == ["starved"] and told == []


def test_what_threads_do_is_read_off_the_system():
    had = Had(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            wait_for(lambda: threads_of(os.getpid()).get(child.pid, Doing("", 0.0, 0.0)).ran_s > 0.02)
            before = threads_of(os.getpid())[threading.get_native_id()]
            ends = time.thread_time() + 0.1
            while time.thread_time() < ends:
                pass
            now = threads_of(os.getpid())[threading.get_native_id()]
            child.send_signal(signal.SIGSTOP)
            wait_for(lambda: stopped(child.pid))
        finally:
            child.kill()
    assert 0.05 < now.ran_s - before.ran_s < 60 and now.waited_s >= before.waited_s and now.state == "R"
    assert 0.05 < had.look(60.0) <= 60.0
    assert threads_of(1 << 30) == {} and not stopped(1 << 30) and Had(1 << 30).look(3.0) == 3.0


def test_a_candidate_that_searches_for_what_it_is_made_of_shows_life_meanwhile(drop, monkeypatch):
    """Each piece takes most of the time that a kernel may be silent for."""
    monkeypatch.setattr("tilewright.schedule.worker.LIMIT_S", 1.5)
    pieces = """
        from tilewright.hardware.detect import detect
        from tilewright.ir.notation import parse
        from tilewright.schedule.problem import problem_of
        from tilewright.schedule.search import search
        piece = problem_of(parse("f32[9,17] @ f32[17,90]").outputs[0])
        for _ in range(4):
            time.sleep(1.0)
            search(piece, detect("cpu"), budget_s=0.01)
    """
    made_of = drop(build=pieces)
    assert search(problem(90), CPU, budget_s=0.02, candidates=[made_of]).kernel.candidate == made_of.name


def test_out_of_memory_is_a_sentence(drop):
    d = search(problem(41), CPU, budget_s=0.02, candidates=[drop("torch.empty(1 << 60)"), drop()])
    assert any(r.why.startswith("failed: ") and "allocate" in r.why for r in d.rejected) and not any(
        r.kind == "lost" for r in d.rejected
    )


def test_weights_reach_the_worker_with_their_values(drop):
    """Large ones through memory that is mapped, small ones in the message; the sum of each is asked for."""
    for rows, columns in ((300, 200), (7, 3)):
        weight = torch.randn(rows, columns)
        posed = problem_of(gemm(input_("a", F32, (5, rows)), const(weight)))
        check = f"assert abs(float(s[1].double().sum()) - {float(weight.double().sum())!r}) < 1e-9, 'other weights'"
        d = search(posed, CPU, budget_s=0.02, candidates=[drop(check)], weights={1: weight})
        assert d.measured and not d.rejected
        with pytest.raises(Exception, match="other weights"):
            search(posed, CPU, budget_s=0.02, candidates=[drop(check)], weights={1: weight + 1})


def test_the_worker_has_the_parents_threads_and_leaves_them(drop):
    counts = (1, 2, torch.get_num_threads())  # a crowded machine checks and races on one
    check = f"assert torch.get_num_threads() in {counts}, torch.get_num_threads()"
    d = search(problem(42), CPU, budget_s=0.02, candidates=[drop(check)])
    assert not d.rejected


def test_an_interrupt_kills_the_worker_and_the_next_search_has_another(drop, worker, monkeypatch):
    first = worker._pid
    monkeypatch.setattr("tilewright.hardware.load.threads_of", lambda pid: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        search(problem(43), CPU, budget_s=0.02, candidates=[drop("time.sleep(60)")])
    assert gone(first)
    monkeypatch.undo()
    assert search(problem(44), CPU, budget_s=0.02, candidates=[drop()]).measured


def test_processes_that_nobody_uses_end_and_start_again(drop, worker, monkeypatch):
    monkeypatch.setattr(fork_server_module, "IDLE_S", 0.1)
    pids = worker._process.pid, worker._pid
    used = fork_server_module.used_fork_server()
    assert search(problem(48), CPU, budget_s=0.02, candidates=[drop()]).measured
    time.sleep(0.5)
    assert used is worker and all(map(alive, pids))  # a search came to its end, another use has not
    used.leave()
    assert all(map(gone, pids))
    assert fork_server() is not worker
    assert search(problem(49), CPU, budget_s=0.02, candidates=[drop()]).measured


def test_a_fork_server_that_is_started_and_not_used_ends_and_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(fork_server_module, "_known", None)
    monkeypatch.setattr(fork_server_module, "UNUSED_S", 0.1)
    descriptors = []
    for _ in range(3):
        process = fork_server()._process
        assert gone(process.pid)
        process.wait()
        with fork_server_module._starting:  # it has ended, the object too
            gc.collect()
            descriptors.append(len([*Path("/proc/self/fd").iterdir()]))
    assert len(set(descriptors)) == 1


def test_whether_a_fork_server_is_up_is_waited_for_no_longer_than_told(worker):
    assert worker_module.ready(0.0)  # it has a worker
    other = fork_server_module.ForkServer()
    try:
        assert not other.ready(0.0)  # no interpreter has started yet
        assert other.ready(60.0) and other.ready(0.0)
        other.ensure_worker()
    finally:
        other.stop()
    assert other.ready(0.0)  # asking it tells


def test_one_that_is_not_up_yet_is_not_waited_for(monkeypatch):
    """It could not hear that it is to end before it has imported torch; who exits would wait for two seconds."""
    done, process = [], (server := fork_server_module.ForkServer())._process
    for name in ("kill", "wait"):
        inner = getattr(process, name)
        monkeypatch.setattr(process, name, lambda *given, name=name, inner=inner: (done.append(name), inner(*given)))
    server.stop()
    assert done == ["kill", "wait"] and process.returncode == -signal.SIGKILL


def test_an_interrupt_while_the_end_is_waited_for_is_no_traceback(monkeypatch):
    server = fork_server_module.ForkServer()
    process = server._process
    monkeypatch.setattr(fork_server_module, "_known", server)
    with monkeypatch.context() as patch:
        patch.setattr(process, "wait", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt()))
        fork_server_module._end()
    assert process.wait(60) == -signal.SIGKILL


def test_a_fork_server_that_was_killed_is_replaced(drop, worker):
    os.kill(worker._process.pid, signal.SIGKILL)
    assert gone(worker._pid)  # the worker dies with it
    assert search(problem(45), CPU, budget_s=0.02, candidates=[drop()]).measured
    assert search(problem(46), CPU, budget_s=0.02, candidates=[drop()]).measured
    assert fork_server() is not worker


def test_without_a_worker_the_search_goes_on_here_with_one_line(drop, monkeypatch, caplog):
    monkeypatch.setattr(fork_server_module, "_known", None)
    monkeypatch.setattr("tilewright.errors._said", set())
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for n in (47, 48):
        d = search(problem(n), CPU, budget_s=0.02, candidates=[drop(f"assert os.getpid() == {os.getpid()}")])
        assert d.measured and not d.rejected
    (said,) = caplog.messages
    assert said.startswith("no worker process: ")


def test_weights_that_find_no_room_are_tried_here(drop, monkeypatch, caplog):
    def full(name, size_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilewright.schedule.worker.memory_file", full)
    monkeypatch.setattr("tilewright.errors._said", set())
    weight = torch.randn(300, 200)
    posed = problem_of(gemm(input_("a", F32, (7, 300)), const(weight)))
    d = search(posed, CPU, budget_s=0.01, candidates=[drop(f"assert os.getpid() == {os.getpid()}")], weights={1: weight})
    assert d.measured and not d.rejected
    assert "cannot have the weights of" in caplog.text


@pytest.mark.parametrize("place", ["a path object", "no temporary folder"])
def test_a_fork_server_starts_or_is_done_without(drop, monkeypatch, place):
    def nowhere(*_):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(fork_server_module, "_known", None)
    if place == "a path object":
        monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
        began = fork_server()
        began.ensure_worker()
        began.stop()
    else:
        monkeypatch.setattr(fork_server_module.tempfile, "TemporaryFile", nowhere)
        assert search(problem(52), CPU, budget_s=0.01, candidates=[drop()]).measured


ORPHAN = """
import os, sys, time
from tilewright.schedule.fork_server import used_fork_server
n = used_fork_server()  # which is not given up where importing takes its time
n.ensure_worker()
print(n._process.pid, n._pid, flush=True)
{end}
"""


FORKED = """
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_nothing_outlives_its_parent_though_a_fork_of_it_lives():
    env = {k: v for k, v in os.environ.items() if k != SWITCH}
    code = ORPHAN.format(end=FORKED)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        pids = [int(p) for p in parent.stdout.readline().split()]
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            assert all(gone(p) for p in pids) and alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_parent_that_ignores_the_end_of_its_children_has_workers():
    """And that is inherited: worker after worker, each killed."""
    again = "n.end_worker(); n.ensure_worker(); print(n.end_worker(), n._process.poll(), flush=True)"
    code = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)" + ORPHAN.format(end=again)
    env = {k: v for k, v in os.environ.items() if k != SWITCH}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.stdout.splitlines()[1:] == [f"{int(signal.SIGKILL)} None"], done.stderr


def test_nothing_outlives_a_parent_that_ends():
    env = {k: v for k, v in os.environ.items() if k != SWITCH}
    done = subprocess.run([sys.executable, "-c", ORPHAN.format(end="")], capture_output=True, text=True, env=env, check=True)
    pids = [int(p) for p in done.stdout.split()]
    assert len(pids) == 2 and all(gone(p) for p in pids)


STARTED = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "600"])
Path({to!r}).with_suffix(".draft").write_text(str(child.pid))
Path({to!r}).with_suffix(".draft").replace({to!r})
"""


class Does:
    """A message that does as a text says where it is read."""

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return exec, (self.text,)


def started(path, within_s=60.0):
    """The process that `STARTED` started, once it has."""
    ends = time.monotonic() + within_s
    while not path.exists() and time.monotonic() < ends:
        time.sleep(0.02)
    return int(path.read_text())


@pytest.mark.parametrize(("then", "why"), [("time.sleep(600)", "no answer in 1 s: killed"), ("os._exit(3)", "crashed: ")])
def test_what_a_lost_candidate_started_ends_with_it(drop, tmp_path, monkeypatch, then, why):
    """An assembler that a compiler waits for is such a process."""
    monkeypatch.setattr("tilewright.schedule.worker.LIMIT_S", 0.6)
    bad = drop(build=STARTED.format(to=str(tmp_path / "pid")) + then)
    d = search(problem(53 + len(then)), CPU, budget_s=0.02, candidates=[bad, drop()])
    assert [r.why.startswith(why) for r in d.rejected if r.candidate.startswith(bad.name)] == [True], d.rejected
    assert gone(started(tmp_path / "pid"))


def test_what_an_interrupted_search_started_ends_with_it(drop, tmp_path, monkeypatch):
    def doing(pid):
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr("tilewright.hardware.load.threads_of", doing)
    with pytest.raises(KeyboardInterrupt):
        search(problem(54), CPU, candidates=[drop(build=STARTED.format(to=str(tmp_path / "pid")) + "time.sleep(600)")])
    assert gone(started(tmp_path / "pid"))


def test_what_an_assistant_started_ends_with_it(tmp_path, monkeypatch):
    def work_off(compile_workers, messages, unanswered, *_):
        first = next(compile_workers)
        first.send_bytes(messages[0][1])
        unanswered.add(first)
        started(tmp_path / "pid")
        raise KeyboardInterrupt

    slow = pickle.dumps(Does(STARTED.format(to=str(tmp_path / "pid")) + "time.sleep(600)"))
    monkeypatch.setattr(ahead_module, "jobs_for", lambda problems, target: [(None, "slow", 0)])
    monkeypatch.setattr(ahead_module, "_message", lambda *_: slow)
    monkeypatch.setattr(ahead_module, "_work_off", work_off)
    with pytest.raises(KeyboardInterrupt):
        ahead_module.compile_ahead([], CPU)
    assert gone(started(tmp_path / "pid"))


BOTH = """
import pickle
from tests.schedule.test_worker import Does
n = used_fork_server()
_, compile_worker = n.compile_worker()
for connection, text in ((n.worker, {first!r}), (compile_worker, {second!r})):
    connection.send_bytes(pickle.dumps(Does(text)))
time.sleep(600)
"""


def test_nothing_outlives_a_parent_that_is_killed(tmp_path):
    """Its processes, and what they started, end without a word."""
    paths = [tmp_path / "first", tmp_path / "second"]
    first, second = (STARTED.format(to=str(p)) + "time.sleep(600)" for p in paths)
    env = {k: v for k, v in os.environ.items() if k != SWITCH}
    env["PYTHONPATH"] = python_path()
    code = ORPHAN.format(end=BOTH.format(first=first, second=second))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        pids = [int(p) for p in parent.stdout.readline().split()] + [started(p) for p in paths]
        assert len(pids) == 4 and all(alive(p) for p in pids)
        parent.kill()
        parent.wait(60)
    assert all(gone(p) for p in pids)


def test_memory_shared_with_the_worker_is_given_back(drop):
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    weight = torch.randn(300, 200)
    posed = problem_of(gemm(input_("a", F32, (5, 300)), const(weight)))
    for _ in range(3):
        search(posed, CPU, budget_s=0.01, candidates=[drop()], weights={1: weight})
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_real_candidates_are_all_found_there():
    d = search(problem(50), CPU, budget_s=0.05)
    assert d.measured and d.kernel.candidate in {c.name for c in discover()}
    assert not [r for r in d.rejected if r.why.startswith("failed") or r.kind == "lost"]
    assert search_module.TIE_BAND < 0.1


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64])
def test_weights_that_torch_does_not_read_back_reach_another_process(codes: torch.dtype) -> None:
    weight = torch.randn(6, 5).abs().mul(9).to(codes)
    whole = pickle.loads(pickled(Literal(TensorType(from_torch(codes), (6, 5)), weight, "w"))).tensor()
    part, one = pickle.loads(pickled([weight[::2, 1:4], weight[0, 0]]))
    for got, want in ((whole, weight), (part, weight[::2, 1:4]), (one, weight[0, 0])):
        assert got.dtype is codes and torch.equal(bits_of(got), bits_of(want))


@pytest.mark.skipif("amx_int8" not in CPU.features, reason="no AMX that this process may use")
def test_workers_may_use_the_tiles_that_this_process_may(worker):
    """Linux grants AMX's tiles to a process that asks, and to those it forks from then on: not to one that it starts."""
    with worker.lock:
        worker.end_worker()
    fork_server_module.fork_server()
    line = problem_of(parse("s8[64,64] @ s8[64,64] -> s32").outputs[0])
    (generated,) = [c for c in discover() if c.name == "llvm"]
    schedule = next(iter(plan_for(generated, line, CPU).schedules()))
    assert dict(schedule.knobs)["instruction"] == "tdpbssd"
    hosted = worker_module.hosted(line, CPU, {}, [generated], cold=False)
    assert hosted is not None
    try:
        assert hosted.attempt(0, generated, schedule).why is None
    finally:
        hosted.close()
