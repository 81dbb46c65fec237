"""Machine code of the points that searches will try first, made by several processes at once.

A kernel for a GPU takes seconds to compile, on one of the machine's cores; a search tries one after another. Machine code made
here stays in the compiler's own cache on the disk, where the candidate's `build` finds it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import copy_context
from multiprocessing.connection import Connection, wait

from tilewright.hardware.target import Target
from tilewright.processors import usable
from tilewright.schedule.candidate import MetaPlan, Plan, Precompiled, Refusal, Schedule, concerns, discover, planned
from tilewright.schedule.fork_server import ForkServer, UnavailableError, end_group, used_fork_server
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import DEPTH
from tilewright.schedule.worker import UNTOLD, pickled, settings_here

POINTS = DEPTH + 2  # of a candidate's space: those that compete from the start and, if processes are left, what comes next
MOST_PROCESSES = 16
LIMIT_S = 60.0  # for one kernel
LOOK_S = 0.2  # between two looks at whether the rest is wanted still

Job = tuple[AnyProblem, str, int | Schedule]  # a candidate's point, or the number of the one that it offers


def jobs_for(problems: Sequence[AnyProblem], target: Target) -> list[tuple[AnyProblem, str, int]]:
    """Problem, candidate and which of its points: what competes from the start, problem by problem; then the first points of
    the pieces to which they are taken apart, which searches come to last; then what comes next in each problem's spaces."""
    plans = {p: _plans(p, target) for p in problems}
    jobs = dict.fromkeys((p, name, at) for p, found in plans.items() for at in range(DEPTH) for name in _able(found))
    pieces = [p for found in plans.values() for plan in found.values() if isinstance(plan, MetaPlan) for p in plan.pieces()]
    jobs |= dict.fromkeys((p, name, 0) for p in dict.fromkeys(pieces) for name in _able(_plans(p, target)))
    jobs |= dict.fromkeys((p, name, at) for at in range(DEPTH, POINTS) for p, found in plans.items() for name in _able(found))
    return list(jobs)


def _able(plans: Mapping[str, Plan]) -> list[str]:
    """The candidates whose machine code can be made beforehand."""
    return [name for name, plan in plans.items() if isinstance(plan, Precompiled)]


def _plans(problem: AnyProblem, target: Target) -> dict[str, Plan]:
    """The plans for a problem, by candidate."""
    found: dict[str, Plan] = {}
    for c in discover():
        with contextlib.suppress(Exception):  # the search says what it is
            plan = planned(c, problem, target) if concerns(c, problem, target) else Refusal("")
            if not isinstance(plan, Refusal):
                found[c.name] = plan
    return found


def compile_ahead(
    problems: Sequence[AnyProblem],
    target: Target,
    *,
    within_s: float | None = None,
    first: bool = False,
    chosen: Sequence[Job] = (),
    done: Callable[[AnyProblem | Job], None] = lambda what: None,
    over: Callable[[], bool] = lambda: False,
    most: int = MOST_PROCESSES,
) -> int:
    """Compile for problems that are about to be searched; how many points processes were found for.

    Nothing that fails is told: it fails again in the search.

    Args:
        problems: the problems.
        target: the machine to compile for.
        within_s: seconds by the clock, after which what is not ready is left to the searches.
        first: only what is tried first where nothing is measured.
        chosen: points beside these, for other problems.
        done: called with a problem once what competes from the start was compiled for it, or failed; and with each of `chosen`.
        over: asked again and again; once it says so, what is not ready is left to the searches.
        most: processes.
    """
    processes, jobs = min(usable(), most), jobs_for(problems, target)
    if first:
        leading = {p: (p, name, at) for p, name, at in reversed(jobs)}
        jobs = [leading[p] for p in dict.fromkeys(problems) if p in leading]
    wanted: list[Job] = [*chosen, *jobs[: max(processes, sum(at < DEPTH for *_, at in jobs))]]
    messages: list[tuple[Sequence[AnyProblem | Job], bytes]] = []
    for at, job in enumerate(wanted):
        waits = [*([job[0]] if job[2] not in range(DEPTH, POINTS) else []), *([job] if at < len(chosen) else [])]
        if (m := _message(job[0], target, *job[1:])) is not None:
            messages.append((waits, m))
    for what in {*problems, *chosen}.difference(what for waits, _ in messages for what in waits):
        done(what)
    if not messages:
        return 0
    try:
        known = used_fork_server()
    except UnavailableError:
        return 0
    compile_workers, unanswered = dict[Connection, int](), set[Connection]()

    def begun() -> Generator[Connection]:
        with contextlib.closing(_compile_workers(known, min(processes, len(messages)))) as started:
            for connection, pid in started:
                compile_workers[connection] = pid
                yield connection

    try:
        with contextlib.closing(begun()) as started:
            _work_off(started, messages, unanswered, within_s, done, over)
    finally:
        for each, pid in compile_workers.items():
            each.close()
            if each in unanswered:
                end_group(pid)
        known.leave()
    return len(messages) if compile_workers else 0


def _message(problem: AnyProblem, target: Target, name: str, at: int | Schedule) -> bytes | None:
    """The message that has a compile worker compile a point; None if the problem cannot be pickled."""
    with contextlib.suppress(*UNTOLD):
        return pickled(("compile", problem, target, settings_here(), name, at))
    return None


def _compile_workers(known: ForkServer, count: int) -> Generator[tuple[Connection, int]]:
    """Up to `count` compile workers, as many as can be started, with their process ids. Each takes a while to fork, and can be
    given work before the next one; no search has the fork server in between."""
    with contextlib.suppress(UnavailableError), known.lock:
        for _ in range(count):
            pid, connection = known.compile_worker()
            yield connection, pid


def _work_off(
    compile_workers: Iterable[Connection],
    messages: Sequence[tuple[Sequence[AnyProblem | Job], bytes]],
    unanswered: set[Connection],
    within_s: float | None,
    done: Callable[[AnyProblem | Job], None],
    over: Callable[[], bool],
) -> None:
    """Have each job done by whoever is free; `unanswered` are those at work. Who takes too long is given nothing any more.
    With each message stand those who wait for it: who is told once all of theirs are done."""
    until = math.inf if within_s is None else time.monotonic() + within_s
    left, busy = iter(messages), dict[Connection, tuple[Sequence[AnyProblem | Job], float]]()
    waiting = Counter(what for waits, _ in messages for what in waits)

    def give(compile_worker: Connection) -> None:
        """Give a compile worker something to do, if there is something."""
        given = next(left, None)
        if given is not None:
            unanswered.add(compile_worker)
            with contextlib.suppress(OSError):
                compile_worker.send_bytes(given[1])
                busy[compile_worker] = given[0], time.monotonic()

    def answered(compile_worker: Connection) -> None:
        waits, _ = busy.pop(compile_worker)
        for what in waits:
            waiting[what] -= 1
            if not waiting[what]:
                done(what)

    for each in compile_workers:
        give(each)
    while busy and (now := time.monotonic()) < until and not over():
        for late in [c for c, (_, since) in busy.items() if now - since > LIMIT_S]:
            answered(late)
        for ready in wait(list(busy), min(LOOK_S, until - now)):
            assert isinstance(ready, Connection)
            answered(ready)
            with contextlib.suppress(OSError, EOFError):
                ready.recv_bytes()
                unanswered.discard(ready)
                give(ready)


class Ahead:
    """Machine code that processes make while this one goes on: it waits for a problem's before it searches for the problem.

    Each process that makes some leaves a core to whoever searches.
    """

    def __init__(
        self,
        problems: Sequence[AnyProblem],
        target: Target,
        *,
        within_s: float | None = None,
        first: bool = False,
        chosen: Sequence[Job] = (),
        most: int = MOST_PROCESSES,
    ) -> None:
        """Begin; the arguments are those of `compile_ahead`."""
        waited: list[AnyProblem | Job] = [*(p for p, *_ in chosen), *chosen, *problems]
        self._done = {what: threading.Event() for what in waited}
        self._over, self._ended, self._any, self._target = False, False, threading.Event(), target
        self._ready = set[AnyProblem | Job]()  # those compiled for, pieces among them
        self._meta = dict[AnyProblem, dict[str, Sequence[AnyProblem]]]()  # a problem's pieces, by candidate
        most = max(1, min(usable() - 1, MOST_PROCESSES - 1, most))

        def done(what: AnyProblem | Job) -> None:
            self._ready.add(what)
            if what in self._done:
                self._done[what].set()
            self._any.set()

        def work() -> None:
            try:
                compile_ahead(
                    problems,
                    target,
                    within_s=within_s,
                    first=first,
                    chosen=chosen,
                    done=done,
                    over=lambda: self._over,
                    most=most,
                )
            finally:
                self._ended = True
                for event in (*self._done.values(), self._any):
                    event.set()

        threading.Thread(target=copy_context().run, args=(work,), name="tilewright compile", daemon=True).start()

    def waits(self, what: AnyProblem | Job) -> bool:
        """Tell whether what competes for a problem, or one of the points `chosen`, is still being made."""
        return what in self._done and not self._done[what].is_set()

    def unready(self, problem: AnyProblem) -> list[str]:
        """The candidates of a problem that take it apart into problems for which machine code is still being made."""
        if problem not in self._done or self._ended:
            return []
        if problem not in self._meta:
            metas = {name: plan for name, plan in _plans(problem, self._target).items() if isinstance(plan, MetaPlan)}
            self._meta[problem] = {
                name: [piece for piece in plan.pieces() if _able(_plans(piece, self._target))] for name, plan in metas.items()
            }
        return [name for name, pieces in self._meta[problem].items() if not self._ready.issuperset(pieces)]

    def wait(self, problem: AnyProblem, within_s: float = LIMIT_S) -> None:
        """Wait until what competes from the start for a problem is compiled, or failed; for one not begun not at all."""
        if problem in self._done:
            self._done[problem].wait(within_s)

    def wait_for_any(self, within_s: float) -> None:
        """Wait until a problem is compiled that was not when this was called the last time."""
        self._any.wait(within_s)
        self._any.clear()

    def stop(self) -> None:
        """Leave the rest to the searches."""
        self._over = True
