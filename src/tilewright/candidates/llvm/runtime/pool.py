"""The thread pool of generated kernels, `pool.ll`: one for the whole process, beside torch's."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from string import Template

from tilewright import processors, threads

MOST = 512  # helpers
SPIN_NS = 3_000  # that anyone waits before others may have the core
IDLE_NS = 300_000  # that one waits who leaves the core to others: longer than a program's steps are apart
GAP_NS = 100_000  # away from the core while waiting: others had it
DISTURBED_NS = 20_000_000  # that they are believed to want it after that
WAIT_NS = 200_000  # for a helper, and most of the call: it lost its core in a task
MEETING_NS = 3_000_000  # until operands are packed: a time slice, more than packing takes that has begun
GATHER_NS = 5_000_000  # for helpers, where all are to take part
HOLD_NS, LONGEST_HOLD_NS = 5_000_000, 1_000_000_000  # with fewer helpers, after a loss
# Linux, asm/unistd_64.h and asm-generic/unistd.h; a pause is what a processor has for loops that wait.
FUTEX = {"x86_64": 202, "aarch64": 98}
PAUSE = {"x86_64": ("llvm.x86.sse2.pause", "", ""), "aarch64": ("llvm.aarch64.hint", "i32", "i32 1")}
LIBRARY = (
    "clock_gettime", "sched_yield", "syscall", "pthread_create", "pthread_detach", "pthread_sigmask", "sigfillset",
    "pthread_key_create", "pthread_getspecific", "pthread_setspecific",
)  # fmt: skip


def why_not() -> str | None:
    """None if the pool can be had here, else the sentence why not."""
    if sys.platform != "linux" or platform.machine() not in FUTEX:
        return f"generated kernels have no threads on {platform.system()} {platform.machine()}"
    return None


def text() -> str:
    """The pool as LLVM IR for the machine at hand."""
    machine = platform.machine()
    numbers = {name: str(value) for name, value in globals().items() if isinstance(value, int) and name.isupper()}
    pause, types, values = PAUSE[machine]
    given = numbers | {"FUTEX": str(FUTEX[machine]), "PAUSE": f"call void @{pause}({values})", "POSTED": "2"}
    given["DECLARE_PAUSE"] = f"declare void @{pause}({types})"
    return Template(Path(__file__).with_suffix(".ll").read_text()).substitute(given)


def start(address: Callable[[str], int]) -> None:
    """Make the pool ready, whose functions are at these addresses, once a process. Processes that share their time by a quota
    lose what they wait without work: they sleep at once."""

    def function(name: str, count: int) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(address(f"tilewright_{name}"))

    function("setup", 2)(processors.usable(), 0 if processors.quota() is not None else IDLE_NS)
    say = function("say", 2)
    threads.tell(lambda count, gathered: say(count, GATHER_NS * gathered), function("crowded", 0))
    os.register_at_fork(after_in_child=function("forked", 0))
