"""The load of the machine: what other processes take of the cores, or of the GPU, on which this one measures.

Linux says all of it (proc(5)); NVML says what other processes do with a GPU, where its Python module is installed. What a
system does not say counts as quiet.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.processors import affine
from tilewright.threads import count, limited

PROC = Path("/proc")
TICK_S = 0.01  # of the counters in /proc/stat
FEW_TICKS_S = 0.1
CROWDED = 0.25  # cores' worth of other processes beyond those that are left free
SHARED = 0.1  # cores' worth of other processes that can keep a thread from its core
WAITING, STOLEN = 0.05, 0.05  # shares of time
CROWDED_WAITING, CROWDED_TASKS = 0.3, 2.0  # share of time, and runnable tasks a core
SLOWED = 1.3  # a fixed piece of work takes this many times as long as it did at best
GPU_OTHERS = 5  # percent of a GPU's time
SPINS = 2000
LOOKS, BETWEEN_S = 3, 0.001  # at what is runnable: threads of torch that still spin after their work are gone by the last
HOLDS_S = 1.0  # for which what was seen is believed
LOOK_S = 0.002  # between two looks
MOST_THREADS = 64  # whose files are held open
MOST_SEEN = 1024  # threads of a process and its children: torch and onnxruntime start one a core each
STOPPED = frozenset("Tt")  # states of a process

_fastest_spin_s = float("inf")
_free = -float("inf"), 1  # when it was looked, and what was seen


@dataclass(frozen=True)
class Sample:
    """One call of something in this process.

    Attributes:
        wall_s: its time by the clock.
        own_s: its time but for what threads waited for a core; at least the CPU time of the thread that worked longest, at most
            `wall_s`.
        waited_s: time that threads were ready to run and waited for a core, all together.
    """

    wall_s: float
    own_s: float
    waited_s: float


class Threads:
    """The threads of this process, and the counters that the system keeps for each."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Find threads that came since."""
        with contextlib.suppress(OSError):
            for folder in (PROC / "self" / "task").iterdir():
                if int(folder.name) not in self._known and len(self._known) < MOST_THREADS:
                    self._known[int(folder.name)] = os.open(folder / "schedstat", os.O_RDONLY)

    def __del__(self) -> None:
        for fd in self._known.values():
            os.close(fd)

    def waited_s(self) -> float:
        """Seconds that all threads have waited for a core since they began (schedstat's second number)."""
        total = 0
        for tid, fd in list(self._known.items()):
            try:
                total += int(os.pread(fd, 96, 0).split()[1])
            except (OSError, IndexError, ValueError):  # it ended
                os.close(self._known.pop(tid))
        return total / 1e9

    def busy_s(self) -> dict[int, float]:
        """CPU time by thread."""
        found: dict[int, float] = {}
        for tid in self._known:
            with contextlib.suppress(OSError):
                found[tid] = time.clock_gettime_ns(~tid << 3 | 6) / 1e9  # Linux, include/linux/posix-timers_types.h
        return found

    def timed(self, run: Callable[[], object]) -> Sample:
        """One call."""
        waited, busy = self.waited_s(), self.busy_s()
        start = time.perf_counter()
        run()
        wall = time.perf_counter() - start
        after = self.busy_s()
        worked = max((after[t] - busy[t] for t in after if t in busy), default=wall)
        waited = max(0.0, self.waited_s() - waited)
        return Sample(wall, min(wall, max(worked, wall - waited)), waited)


class Had:
    """Time that a process and those that it started had of the processors, as a watcher from outside sees it: what passed but
    for what their threads waited for a core. Sleeping of one's own accord is no waiting."""

    def __init__(self, pid: int) -> None:
        """Begin to watch a process."""
        self._pid = pid
        self._known = {tid: (now, 0.0) for tid, now in threads_of(pid).items()}

    def look(self, passed_s: float) -> float:
        """Seconds that it had of the last `passed_s`; at least the CPU time of the thread that worked longest."""
        known, held_s, worked_s = dict[int, tuple[Doing, float]](), 0.0, 0.0
        for tid, now in threads_of(self._pid).items():
            before, queued_s = self._known.get(tid, (Doing(now.state, 0.0, 0.0), 0.0))
            if now.state == "R" and now == before:  # in the queue: its waiting is counted once it has a core
                held_s += passed_s
                known[tid] = now, queued_s + passed_s
                continue
            held_s += max(0.0, now.waited_s - before.waited_s - queued_s)
            worked_s = max(worked_s, now.ran_s - before.ran_s)
            known[tid] = now, 0.0
        self._known = known
        return min(passed_s, max(worked_s, passed_s - held_s))


@dataclass(frozen=True)
class Doing:
    """A thread as Linux sees it: its state ("R" runs or would run, "T" and "t" are stopped), and the seconds that it ran, and
    waited for a core, since it began."""

    state: str
    ran_s: float
    waited_s: float


def threads_of(pid: int) -> dict[int, Doing]:
    """The threads of a process and of those that it started, by number; none where the system does not say."""
    found, pids = dict[int, Doing](), [pid]
    while pids and len(found) < MOST_SEEN:
        folder = PROC / str(pids.pop()) / "task"
        with contextlib.suppress(OSError):
            for task in list(folder.iterdir())[: MOST_SEEN - len(found)]:
                with contextlib.suppress(OSError, IndexError, ValueError):  # it ended, or there is no such file
                    ran, waited, *_ = map(int, (task / "schedstat").read_text().split())
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    found[int(task.name)] = Doing(state, ran / 1e9, waited / 1e9)
                    pids += map(int, (task / "children").read_text().split())
    return found


def stopped(pid: int) -> bool:
    """Tell whether a process is stopped, as by Ctrl-Z; not where the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in STOPPED
    return False


@dataclass(frozen=True)
class Load:
    """The load over a span of time.

    Attributes:
        cores: cores that this process may use.
        threads: those that it means to use.
        runnable: tasks of the whole machine that ran or waited for a core, on average; 0 where unknown.
        of_cores: cores of the whole machine.
        others: cores' worth of time that other processes had of those that this one may use.
        waiting: share of the time in which threads of this process were ready to run and had no core.
        stolen: share of the cores' time that the hypervisor gave to other machines.
        slowed: median time of a fixed piece of work over its least; more than 1 where the clock fell or a core is shared.
        gpu: sentence on other processes that use the GPU, or on its clock; "" if there are none.
    """

    cores: int = 1
    threads: int = 1
    runnable: float = 0.0
    of_cores: int = 1
    others: float = 0.0
    waiting: float = 0.0
    stolen: float = 0.0
    slowed: float = 1.0
    gpu: str = ""

    @property
    def crowded(self) -> bool:
        """Tell whether threads that wait for each other spend most of their time so: each waits for a core of its own."""
        return self.waiting > CROWDED_WAITING or self.runnable > CROWDED_TASKS * self.of_cores

    @property
    def noise(self) -> str:
        """The words why times taken meanwhile are not reliable; "" if they are."""
        said: list[str] = []
        shared = self.others > SHARED  # else it is this process's own threads that wait for each other
        if shared and self.runnable > self.of_cores + 0.5:
            cores = "core" if self.of_cores == 1 else "cores"
            said.append(f"{self.runnable:.0f} runnable tasks on {self.of_cores} {cores}")
        if self.others > self.cores - min(self.threads, self.cores) + CROWDED:
            said.append(f"other processes had {self.others:.1f} of {self.cores} cores")
        if shared and self.waiting > WAITING:
            said.append(f"this one waited for a core {self.waiting:.0%} of the time")
        if self.stolen > STOLEN:
            said.append(f"the hypervisor took {self.stolen:.0%} of the cores' time")
        if self.slowed > SLOWED:
            said.append(f"the cores ran at {1 / self.slowed:.0%} of their speed")
        return ", ".join([*said, *([self.gpu] if self.gpu else [])])


class Meter:
    """Watches the load from when it is made; `look` now and then, and ask for `load` in the end."""

    def __init__(self, device: str, threads: int) -> None:
        self._device, self._count = device, threads
        self._threads = Threads()
        self._runnable, self._spins = list[int](), list[float]()
        self._looked = 0.0
        self._began = self._counters()
        self.look()

    def look(self) -> None:
        """Count what is runnable, and do a fixed piece of work; nothing if that was done a moment ago."""
        now = time.perf_counter()
        if now - self._looked < LOOK_S and self._runnable:
            return
        self._looked = now
        self._runnable.append(runnable())
        self._spins.append(spin_s())

    def load(self) -> Load:
        """The load until now."""
        if self._device != "cpu":  # whose own events say how long it worked, whatever its host does
            return Load(gpu=gpu_noise(self._device))
        self.look()
        self._threads.refresh()
        (at, busy, stolen, own, waited), began = self._counters(), self._began
        elapsed, cores = max(at - began[0], 1e-6), len(affine())
        own_s, waited_s = own - began[3], max(0.0, waited - began[4])
        others_s = busy - began[1] - own_s - TICK_S * cores  # a tick of each core may be charged to the wrong side
        ready_s, tasks = max(own_s + waited_s, elapsed / 4), statistics.fmean(self._runnable)
        # In a few ticks nobody is seen to work: then tasks beyond the threads of torch and of the kernels are others'.
        others = others_s / elapsed if elapsed > FEW_TICKS_S else min(cores, tasks - 2 * self._count)
        return Load(
            cores=cores,
            threads=self._count,
            runnable=tasks,
            of_cores=os.cpu_count() or 1,
            others=max(0.0, others),
            waiting=min(1.0, waited_s / ready_s),
            stolen=max(0.0, (stolen - began[2] - TICK_S * cores) / (elapsed * cores)),
            slowed=statistics.median(self._spins) / _fastest_spin_s if _fastest_spin_s else 1.0,  # where the clock is coarse
        )

    def _counters(self) -> tuple[float, float, float, float, float]:
        busy, stolen = cores_busy_s()
        return time.perf_counter(), busy, stolen, time.process_time(), self._threads.waited_s()


def load_now(device: str, threads: int, seconds: float = 0.06) -> Load:
    """The load at present, from a short look during which this thread sleeps most of the time."""
    meter, ends = Meter(device, threads), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        time.sleep(seconds / 12)
        meter.look()
    return meter.load()


@contextlib.contextmanager
def uncrowded() -> Generator[None]:
    """A context for torch's work on the host, in which it uses no more threads than there are cores free: at each barrier all
    would wait for the one whose core another process has. Kernels have as many as before."""
    with limited(None, of_torch=free_cores()) if count() > 1 else contextlib.nullcontext():
        yield


def free_cores() -> int:
    """Cores of this process that no other task wants at present, at least 1."""
    global _free
    looked, found = _free
    now = time.monotonic()
    if now > looked + HOLDS_S:
        cores, tasks, looks = os.cpu_count() or 1, runnable(), 1
        while 1 < tasks <= CROWDED_TASKS * cores and looks < LOOKS:
            time.sleep(BETWEEN_S)
            tasks, looks = min(tasks, runnable()), looks + 1
        found = max(1, min(len(affine()), cores - max(0, tasks - 1)))  # this thread is one of them
        _free = time.monotonic(), found
    return found


def runnable() -> int:
    """Tasks of the whole machine that run or wait for a core, this thread among them; 0 where unknown."""
    try:
        return int((PROC / "loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 0


def cores_busy_s() -> tuple[float, float]:
    """Seconds since the start of the machine that the cores which this process may use were busy, and that were stolen from
    them; zeros where unknown."""
    mine, busy, stolen = {f"cpu{i}" for i in affine()}, 0, 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in (PROC / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name in mine:
                user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
                busy += user + nice + system + irq + softirq + steal
                stolen += steal
    return busy * TICK_S, stolen * TICK_S


def spin_s() -> float:
    """CPU time of a fixed piece of work, the better of two: the first may find caches cold."""
    global _fastest_spin_s
    took: list[float] = []
    for _ in range(2):
        start = time.thread_time()
        for _ in range(SPINS):
            pass
        took.append(time.thread_time() - start)
    _fastest_spin_s = min(_fastest_spin_s, *took)
    return min(took)


def gpu_noise(device: str) -> str:
    """The words on other processes that keep a GPU busy, or on a clock that heat or power brake; "" if neither is so, or not
    known."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(_physical(device))
        since = int((time.time() - 1.0) * 1e6)
        used = {p.pid: p.smUtil for p in nvml.nvmlDeviceGetProcessUtilization(handle, since)}
        others = {pid: share for pid, share in used.items() if share >= GPU_OTHERS and pid not in _ancestors()}
        if os.getpid() not in used:  # numbers of another name space, as in a container, say nothing of who is who
            others.clear()
        braked = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & nvml.nvmlClocksThrottleReasonHwSlowdown
    except Exception:  # no such module, driver, permission or sample
        return ""
    if others:
        count = "another process" if len(others) == 1 else f"{len(others)} other processes"
        return f"{count} used {min(100, sum(others.values()))} % of the GPU"
    return "the GPU's clock is braked by heat or power" if braked else ""


def _ancestors() -> list[int]:
    """Numbers of this process, its parent and so on: a worker's are what started it, and the program that asks for kernels."""
    found = [os.getpid()]
    with contextlib.suppress(OSError, IndexError, ValueError):
        while found[-1] > 1:
            found.append(int((PROC / str(found[-1]) / "stat").read_text().rpartition(")")[2].split()[1]))
    return found


def _physical(device: str) -> int:
    """The number by which NVML knows a device."""
    index = int(device.partition(":")[2] or 0)
    shown = [s.strip() for s in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if s.strip()]
    return int(shown[index]) if shown else index
