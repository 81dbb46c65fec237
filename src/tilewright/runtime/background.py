"""A search that goes on behind a program that runs already: better kernels take the place of its first ones between calls."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast
from weakref import WeakSet

from tilewright import deadline
from tilewright.errors import LOGGER, counted
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Posed, Step, kernel_step
from tilewright.schedule.chooser import Chooser
from tilewright.schedule.measure import synchronize
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import Decision
from tilewright.schedule.worker import begin
from tilewright.threads import limited

if TYPE_CHECKING:
    from tilewright.ir.graph import Node, Value

ALLOWED_S = 60.0  # for candidates that take long to refuse, together
ENDS_S = 3.0  # at the process's end, for the problems under way


class Background:
    """A thread that chooses kernels for a program's problems, the heaviest first, and puts them in place.

    The kernels are tried in the worker process, as by any search. A call of the program runs wholly with the kernels that it
    began with. The thread ends with the process, once the problem under way is decided.
    """

    def __init__(self, program: Executable, ready: Mapping[Node, Value], chooser: Callable[[], Chooser]) -> None:
        """A search for `program`, whose constants are `ready`; `chooser` is called in the thread, when its time begins."""
        self._program, self._ready, self._chooser = program, ready, chooser
        self._over, self._error = threading.Event(), cast("BaseException | None", None)
        self._done = self._total = self._replaced = 0
        self._thread = threading.Thread(target=self._work, name="tilewright search", daemon=True)
        _all.add(self)
        begin()
        atexit.unregister(_end)
        atexit.register(_end)  # last, and so called before the worker is ended
        self._thread.start()

    def __str__(self) -> str:
        """One line: how many problems are done, and how many have another kernel."""
        if self._error is not None:
            return f"failed: {type(self._error).__name__}: {self._error}"
        how = "searching" if self._thread.is_alive() else "stopped" if self._done < self._total else "over"
        problems = f"{self._done} of {counted(self._total, 'problem')} done"
        return f"{how}: {problems}, {self._replaced} with another kernel than at first"

    def __repr__(self) -> str:
        return f"<search behind a program, {self}>"

    @property
    def goes_on(self) -> bool:
        """Tell whether the search is under way."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the search is over, for so long at most; tell whether it is.

        Raises:
            BaseException: whatever ended the search.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self, within_s: float | None = None) -> None:
        """End the search after the problem under way, and wait for that, for so long at most."""
        self._over.set()
        self._thread.join(within_s)

    def _work(self) -> None:
        try:
            with limited(self._program.threads):
                self._search()
        except BaseException as error:  # told by `wait`
            if self._over.is_set():  # nobody waits for what is under way, whose worker may be gone
                return
            self._error = error
            LOGGER.warning("the search in the background failed: %s: %s", type(error).__name__, error)
        finally:
            self._ready = {}

    def _search(self) -> None:
        posed: dict[AnyProblem, list[tuple[int, Posed]]] = {}
        for i, step in enumerate(self._program.steps):
            if step.decision is not None:
                one = Posed.of(step.part, self._ready)
                posed.setdefault(one.problem, []).append((i, one))
        self._total = len(posed)
        with deadline.allowing(ALLOWED_S):
            decide = self._chooser()
            for problem in sorted(posed, key=decide.weight, reverse=True):
                if self._over.is_set():
                    return
                self._place(posed[problem], decide(problem, posed[problem][0][1].weights))
                self._done += 1

    def _place(self, posed: list[tuple[int, Posed]], decision: Decision) -> None:
        """Give the steps that pose one problem the kernel that was chosen for it, if it was measured."""
        if not decision.measured:
            return
        program, made = self._program, dict[int, Step | None]()
        for i, one in posed:
            before = program.steps[i].decision
            assert before is not None
            same = _same(before, decision)
            made[id(one.part)] = None if same else kernel_step(program.graph, one, self._ready, decision)
        replaced = any(made.values())
        if replaced:
            synchronize(program.target.device)  # what packing put on this thread's stream is there for any other

        def changed(step: Step) -> Step:
            new = made.get(id(step.part), step)
            if new is None and step.decision is not None and _same(step.decision, decision):  # as it may be no more
                return replace(step, decision=decision)
            return new or step

        program.change(changed)
        self._replaced += replaced


def _same(a: Decision, b: Decision) -> bool:
    """Tell whether two decisions are for one kernel: of the same point, and not one for ranges and one for a shape."""
    one, other = a.kernel, b.kernel
    return one is other or (one.candidate, one.schedule, one.text) == (other.candidate, other.schedule, other.text)


_all = WeakSet[Background]()
_queue: deque[Callable[[], None]] = deque()
_queued = threading.Lock()
_worker: threading.Thread | None = None
LOW = 10  # by which the thread that works behind calls gives way to others (nice)


def behind(work: Callable[[], None]) -> None:
    """Do something in a thread of low priority, after what it was given before; nothing that is left at the process's end."""
    global _worker
    with _queued:
        _queue.append(work)
        if _worker is None:
            atexit.unregister(_end)
            atexit.register(_end)
            _worker = threading.Thread(target=_work_behind, name="tilewright checks", daemon=True)
            _worker.start()


def wait_behind() -> None:
    """Wait until all is done that was given to `behind`."""
    thread = _worker
    if thread is not None:
        thread.join()


def _forked() -> None:
    """A fork has no thread behind its calls yet."""
    global _worker, _queued
    _worker, _queued = None, threading.Lock()
    _queue.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _work_behind() -> None:
    global _worker
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW)
    while True:
        with _queued:
            if not _queue:
                _worker = None
                return
            work = _queue.popleft()
        work()


def _end() -> None:
    """End the searches with the process, while they have a worker: all within `ENDS_S`."""
    searches, ends, thread = list(_all), time.monotonic() + ENDS_S, _worker
    _queue.clear()
    for each in searches:
        each.stop(0)
    for each in searches:
        each.stop(max(0.0, ends - time.monotonic()))
    if thread is not None:
        thread.join(max(0.0, ends - time.monotonic()))
