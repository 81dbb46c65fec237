"""Machine code of the points that searches will try first, made by several processes at once.

A kernel for a GPU takes seconds to compile, on one of the machine's cores; a search tries one after another. Machine code made
here stays in the compiler's own cache on the disk, where the candidate's `build` finds it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from tilewright.hardware.target import Target
from tilewright.schedule.candidate import MetaPlan, Plan, Precompiled, Refusal, Schedule, concerns, discover, planned
from tilewright.schedule.fork_server import ForkServer, UnavailableError, end_group, used_fork_server
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import DEPTH
from tilewright.schedule.worker import UNTOLD, pickled, settings_here

POINTS = DEPTH + 2  # of a candidate's space: those that compete from the start and, if processes are left, what comes next
MOST_PROCESSES = 16
LIMIT_S = 60.0  # for one kernel

Job = tuple[AnyProblem, str, int | Schedule]  # a candidate's point, or the number of the one that it offers


def jobs_for(problems: Sequence[AnyProblem], target: Target) -> list[tuple[AnyProblem, str, int]]:
    """Problem, candidate and which of its points, first points first; of pieces to which problems are taken apart no others."""
    plans = {p: _plans(p, target) for p in problems}
    pieces = [p for found in plans.values() for plan in found.values() if isinstance(plan, MetaPlan) for p in plan.pieces()]
    wanted = [(p, found, POINTS) for p, found in plans.items()]
    wanted += [(p, _plans(p, target), 1) for p in dict.fromkeys(pieces)]
    able = [(p, [n for n, plan in found.items() if isinstance(plan, Precompiled)], points) for p, found, points in wanted]
    return [(p, name, at) for at in range(POINTS) for p, names, points in able if at < points for name in names]


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
    done: Callable[[AnyProblem], None] = lambda problem: None,
) -> int:
    """Compile for problems that are about to be searched; how many points processes were found for.

    Nothing that fails is told: it fails again in the search.

    Args:
        problems: the problems.
        target: the machine to compile for.
        within_s: seconds by the clock, after which what is not ready is left to the searches.
        first: only what is tried first where nothing is measured.
        chosen: points beside these, for other problems.
        done: called with a problem whenever a point of it was compiled, or failed.
    """
    processes, jobs = min(os.cpu_count() or 1, MOST_PROCESSES), jobs_for(problems, target)
    if first:
        leading = {p: (p, name, at) for p, name, at in reversed(jobs)}
        jobs = [leading[p] for p in dict.fromkeys(problems) if p in leading]
    wanted: list[Job] = [*chosen, *jobs[: max(processes, sum(at < DEPTH for *_, at in jobs))]]
    told = [(problem, _message(problem, target, name, at)) for problem, name, at in wanted]
    messages = [(problem, m) for problem, m in told if m is not None]
    if not messages:
        return 0
    try:
        known = used_fork_server()
    except UnavailableError:
        return 0
    compile_workers, unanswered = dict[Connection, int](), set[Connection]()
    try:
        compile_workers = _compile_workers(known, min(processes, len(messages)))
        _work_off(list(compile_workers), messages, unanswered, within_s, done)
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


def _compile_workers(known: ForkServer, count: int) -> dict[Connection, int]:
    """Up to `count` compile workers, as many as can be started, with their process ids."""
    found: dict[Connection, int] = {}
    with contextlib.suppress(UnavailableError):
        for _ in range(count):
            with known.lock:
                pid, connection = known.compile_worker()
            found[connection] = pid
    return found


def _work_off(
    compile_workers: Sequence[Connection],
    messages: Sequence[tuple[AnyProblem, bytes]],
    unanswered: set[Connection],
    within_s: float | None,
    done: Callable[[AnyProblem], None],
) -> None:
    """Have each job done by whoever is free; `unanswered` are those at work. Who takes too long is given nothing any more."""
    until = math.inf if within_s is None else time.monotonic() + within_s
    left, busy = iter(messages), dict[Connection, tuple[AnyProblem, float]]()

    def give(compile_worker: Connection) -> None:
        """Give a compile worker something to do, if there is something."""
        given = next(left, None)
        if given is not None:
            unanswered.add(compile_worker)
            with contextlib.suppress(OSError):
                compile_worker.send_bytes(given[1])
                busy[compile_worker] = given[0], time.monotonic()

    for each in compile_workers:
        give(each)
    while busy and (now := time.monotonic()) < until:
        for late in [c for c, (_, since) in busy.items() if now - since > LIMIT_S]:
            done(busy.pop(late)[0])
        for ready in wait(list(busy), min(1.0, until - now)):
            assert isinstance(ready, Connection)
            done(busy.pop(ready)[0])
            with contextlib.suppress(OSError, EOFError):
                ready.recv_bytes()
                unanswered.discard(ready)
                give(ready)
