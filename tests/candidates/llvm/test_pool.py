"""The thread pool of generated kernels: who takes part, who is waited for, forks, ends, and threads that call at once."""

import re
import threading
import time
from pathlib import Path

import pytest
import torch
import warm

from tilewright import threads
from tilewright.candidates.llvm.expressions.text import Function, Module
from tilewright.candidates.llvm.runtime import engine, pool
from tilewright.candidates.llvm.runtime.calls import write_entries

pytestmark = pytest.mark.skipif(engine.available() is not None, reason="no generated kernels")
WORK = 20_000  # steps of a task: some microseconds


def counted(tasks, *, packing=0, together=False):
    """A kernel (results, threads): each task adds 1 to its s32 and stores its thread's number behind all of them, once every
    one of `packing` tasks before them is finished; a task that finds one unfinished adds 1,000,000. `together`: no task ends
    before all have begun."""
    module = Module()
    f = Function(module, "worker", [("ptr", "arguments"), ("i64", "thread")])
    memory = f.load("ptr", "%arguments", 8)
    first, second, finished = (f.at("%arguments", 64 * i) for i in (1, 2, 3))
    packed = f.at(memory, 8 * tasks)

    def work(one, place):
        with f.loop(0, WORK, 1, [("i32", "0")]) as loop:
            loop.next = [f.v(f'call i32 asm sideeffect "", "=r,0"(i32 {loop.carried[0]})')]
        f.v(f"atomicrmw add ptr {place}, i32 {one} monotonic")

    if packing:
        with f.tasks(first, packing, finished) as task:
            work("1", f.at(packed, f.mul(task, 4)))
        f.meet(finished, packing)
    with f.tasks(second, tasks) as task:
        if together:
            f.v(f"atomicrmw add ptr {finished}, i32 1 monotonic")
            f.jump("wait")
            f.label("wait")
            begun = f.v(f"load atomic i32, ptr {finished} monotonic, align 4")
            f.do(f"br i1 {f.v(f'icmp eq i32 {begun}, {tasks}')}, label %all, label %wait")
            f.label("all")
        work("1", f.at(memory, f.mul(task, 4)))
        number = f.v("trunc i64 %thread to i32")
        f.store("i32", number, f.at(memory, f.add(4 * tasks, f.mul(task, 4))), 4)
        with f.loop(0, packing) as loop:
            value = f.load("i32", f.at(packed, f.mul(loop.index, 4)), 4)
            with f.when(f.v(f"icmp ne i32 {value}, 1")):
                f.v(f"atomicrmw add ptr {f.at(memory, f.mul(task, 4))}, i32 1000000 monotonic")
    f.finish()
    write_entries(module, 1, 3)
    return engine.function(module.text(*engine.host()))


def called(kernel, tasks, count, packing=0):
    """The number of times that each task was done, and the threads that did any."""
    memory = torch.zeros(2 * tasks + packing, dtype=torch.int32)
    kernel(memory.data_ptr(), count)
    done, by = memory[: 2 * tasks].view(2, tasks)
    return done.tolist(), set(by.tolist())


def test_every_thread_takes_part_and_has_a_number_of_its_own(monkeypatch):
    monkeypatch.setattr(pool, "GATHER_NS", 100_000_000_000)
    with threads.limited(4, gathered=True):
        assert called(counted(4, together=True), 4, 4) == ([1] * 4, {0, 1, 2, 3})


@pytest.mark.parametrize("count", [1, 2, 3, 9, 64, 600])
def test_every_task_is_done_once_however_many_threads(count):
    kernel = counted(200, packing=40)
    for gathered in (False, True):
        with threads.limited(count, gathered=gathered):
            done, by = called(kernel, 200, count, 40)
        assert done == [1] * 200 and max(by) < count


def test_nobody_waits_for_helpers_that_find_no_core():
    """All on one processor, where a helper cannot run until the caller lets go of it."""
    script = """
import os, sys, time
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
sys.path[:0] = [FOLDER, HELPERS]
from test_pool import called, counted
kernel = counted(50, packing=20)
for _ in range(200):
    assert called(kernel, 50, 8, 20)[0] == [1] * 50
"""
    child(script)


# What glibc says where Python, before 3.14, ends a daemon thread inside of C++ (python/cpython#87135).
ENDED_IN_CPP = "terminate called without an active exception\n"


def child(script: str, timeout: float = 120) -> None:
    here = Path(__file__)
    names = {"FOLDER": str(here.parent), "HELPERS": str(here.parents[2] / "helpers")}
    for name, value in names.items():
        script = script.replace(name, repr(value))
    ran = warm.run(["-c", script], timeout=timeout)
    assert ran.returncode == 0 or ("daemon" in script and ran.stderr == ENDED_IN_CPP), ran.stderr


def test_many_threads_call_at_once():
    kernel = counted(60, packing=30)
    wrong = []

    def repeat(count):
        for _ in range(100):
            done, by = called(kernel, 60, count, 30)
            if done != [1] * 60 or max(by) >= count:
                wrong.append((count, done, by))

    callers = [threading.Thread(target=repeat, args=(1 + i % 4,)) for i in range(12)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_fork_has_helpers_of_its_own_and_so_has_its_parent():
    child("""
import os, sys
sys.path[:0] = [FOLDER, HELPERS]
from test_pool import called, counted
from tilewright import threads
from tilewright.candidates.llvm.runtime import pool
pool.GATHER_NS = 100_000_000_000
kernel = counted(4, together=True)
def helped():
    with threads.limited(4, gathered=True):
        return called(kernel, 4, 4) == ([1] * 4, {0, 1, 2, 3})
for generation in range(3):
    assert helped()
    forked = os.fork()
    if forked:
        assert helped()
        assert os.waitpid(forked, 0)[1] == 0
        break
""")


def test_a_fork_while_another_thread_multiplies():
    child("""
import os, sys, threading
sys.path[:0] = [FOLDER, HELPERS]
from test_pool import called, counted
kernel, over = counted(400), threading.Event()
called(kernel, 400, 4)  # what torch initialises in a first call (its statics) no child could wait for
def multiply():
    while not over.is_set():
        called(kernel, 400, 4)
other = threading.Thread(target=multiply)
other.start()
try:
    for _ in range(20):
        forked = os.fork()
        if not forked:
            os._exit(called(kernel, 400, 4)[0] != [1] * 400)
        assert os.waitpid(forked, 0)[1] == 0
finally:
    over.set()
    other.join()
""")


def test_a_process_ends_while_helpers_wait_or_work():
    for count in (2, 5):
        child(f"""
import sys, threading
sys.path[:0] = [FOLDER, HELPERS]
from test_pool import called, counted
kernel = counted(4000)
threading.Thread(target=lambda: [called(kernel, 4000, {count}) for _ in range(1000)], daemon=True).start()
called(kernel, 4000, {count})
""")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux lists threads")
def test_helpers_leave_signals_to_the_program():
    before = set(Path("/proc/self/task").iterdir())
    with threads.limited(8, gathered=True):
        called(counted(512), 512, 8)
    new = [task / "status" for task in set(Path("/proc/self/task").iterdir()) - before]
    for status in new:
        (blocked,) = (int(line.split()[1], 16) for line in status.read_text().splitlines() if line.startswith("SigBlk"))
        assert blocked >> 1 & 1 and blocked >> 14 & 1, "SIGINT and SIGTERM"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux lists threads")
def test_helpers_that_nobody_asks_use_no_processor():
    with threads.limited(4, gathered=True):
        called(counted(256), 256, 4)

    def helpers():
        """State and switches of the threads that leave signals to the program, by number."""
        tasks = [dict(re.findall(r"(\w+):\s*(\w+)", (t / "status").read_text())) for t in Path("/proc/self/task").iterdir()]
        counts = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        return {t["Pid"]: [t[c] for c in counts] for t in tasks if int(t["SigBlk"], 16) >> 14 & 1}

    before = helpers()
    assert before
    for _ in range(100):  # they look around for a while first
        time.sleep(0.3)
        after = helpers()
        if after == before and {state for state, *_ in after.values()} == {"S"}:
            break
        before = after
    else:
        raise AssertionError(f"they do not rest: {before}")
