"""Verify first, then time. Nothing that fails its check is ever timed.

Random data, never zeros; sources in more than one layout, results in memory that held NaN; times from rounds in which
kernels take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from tilewright.hardware.load import Meter, Sample, Threads, free_cores
from tilewright.hardware.target import Target
from tilewright.ir.literal import bits_of
from tilewright.ir.ops.functions import BITS_TYPE, by_bits
from tilewright.schedule.candidate import Runner
from tilewright.schedule.capture import CudaGraphs
from tilewright.schedule.expected import Expected, check
from tilewright.schedule.guard import Watch, guarded, intact, otherwise_laid_out, poison, with_wide_strides
from tilewright.schedule.problem import AnyProblem, FusionProblem
from tilewright.schedule.race import Laps, Race, scatter
from tilewright.schedule.record import Reason
from tilewright.threads import count, limited

HOPELESS = 8  # times as long as the fastest in its first call: not timed any further
SHORT_S, AGAIN = 0.03, 2  # a first call shorter than this may have been slow by chance, and is made so many times more
LEAST_ROUNDS, MOST_ROUNDS = 3, 200  # of a race
LAST_CACHE_BYTES = 8 << 20  # where the machine reports less, or nothing
REPEATS = 3  # calls more that must give the same bits: a race between threads rarely shows in one
SPAN_US = 200.0  # between two events of a GPU, so that the few µs that they take themselves show little
MOST_TOGETHER = 100  # calls between them: those of several such spans fit into the queue of launches
CYCLES_PER_US = 2000  # of a GPU's clock, at most
SLACK = 1.5  # on the time for which a GPU is kept busy while the host queues calls, as that time varies
RECORD_US = 10.0  # of the host, about what it takes to record two events
MOST_AHEAD_US = 20000.0
KEEPS = "only in memory that held other data in an earlier call: it keeps results"
LATE = 2  # times that a call is timed again because the device waited for the host
SLOW_S, SLOWER = 0.25, 5.0  # a run that takes so long, and so many times that of the fastest kernel, is not examined further


@dataclass(frozen=True)
class Fault:
    """The reason why a kernel is not trusted: its kind, and a sentence."""

    kind: Reason
    why: str


@dataclass
class Pace:
    """The time that a run takes of the fastest kernel that passed."""

    fastest_s: float = math.inf


def examine(
    problem: AnyProblem,
    expected: Expected,
    runner: Runner,
    sources: Sequence[torch.Tensor],
    *,
    exactly: bool = False,
    dense: bool = False,
    counts: Sequence[int] = (),
    watched: bool = True,
    pulse: Callable[[], None] = lambda: None,
    pace: Pace | None = None,
) -> Fault | None:
    """None if a runner may be trusted with `sources`, else the reason why not. Sources that it writes are put right again.

    It runs on other data first; then on `sources` laid out in memory otherwise, as a program's views will hand them over;
    written over the other data, so that a result kept from an earlier call shows, by whatever it was kept; with rows more than
    2^31 bytes apart, where offsets of 32 bits end; and REPEATS times as they are, where a race between threads shows. What it
    gave before must still stand, its sources be untouched, and so the memory beside them and beside its results. Memory for
    results and scratch holds NaN before each run.

    Args:
        problem, expected, runner: the problem, the results it must have, and the kernel's runner.
        sources: made by `guard.guarded`, or weights.
        exactly: its results may not depend on the number of threads, to the last bit.
        dense: it is only ever given dense sources.
        counts: numbers of threads for the repetitions in turn; as many as there are now by default.
        watched: put what it asks of torch into `guard.Watch`, whose first use in a process takes a second.
        pulse: called after each run: a sign of life.
        pace: time of the kernels examined before, on the same sources; one that is far slower is refused after three runs.
    """
    tables = problem.large_tables if isinstance(problem, FusionProblem) else {}
    seen = [i for i in range(len(sources)) if i not in tables]  # a table is neither copied nor read whole

    def of(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sources that a kernel may not write, of a table its first and last rows alone."""
        ends = [part for i, rows in tables.items() for part in (given[i][:rows], given[i][-rows:])]
        return [*(given[i] for i in seen), *ends]

    device = str(sources[0].device) if sources else "cpu"
    outputs = [(t.shape, t.dtype.to_torch()) for t in problem.outputs]
    watch, own = Watch(), Threads()
    pace, took_s = pace or Pace(), list[float]()

    def run(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        poison(outputs, device)
        results: list[Sequence[torch.Tensor]] = []

        def call() -> None:
            with watch if watched else nullcontext():
                results.append(runner(given))
            synchronize(device)

        took = own.timed(call)
        took_s.append(took.own_s)  # what others take of the cores is not held against it
        pulse()
        return results[0]

    def variant(f: Callable[[list[torch.Tensor]], Iterable[torch.Tensor | None]]) -> list[torch.Tensor]:
        """The sources in other memory; weights stay what they are, since runners were prepared with them."""
        made = iter(f([t for t, weight in zip(sources, problem.weights, strict=True) if not weight]))
        others = [None if weight else next(made) for weight in problem.weights]
        return [t if m is None else m for t, m in zip(sources, others, strict=True)]

    before = [t.clone() for t in of(sources)]

    def fault() -> Fault | None:
        others = variant(lambda given: [guarded(other_data(t)) for t in given])
        first = run(others)
        kept = [t.clone() for t in first]
        laid_out = variant(partial(map, guarded if dense else otherwise_laid_out))
        why = check(problem, expected, run(laid_out))
        if why is not None:
            plain = check(problem, expected, run(sources))
            return Fault("wrong", why if plain is not None else f"{why} (only when its sources are not contiguous)")
        overwrite(others, sources)
        again = run(others)
        if min(took_s) > max(SLOW_S, SLOWER * pace.fastest_s):
            ratio = min(took_s) / pace.fastest_s
            return Fault("slower", f"slower: a run took {min(took_s) * 1e3:.0f} ms, {ratio:.1f} times the fastest so far")
        why = check(problem, expected, again)
        if why is not None:
            plain = check(problem, expected, run(sources))
            return Fault("wrong", why if plain is not None else f"{why} ({KEEPS})")
        if not all(all_same(before, of(given)) for given in (sources, others, laid_out)):
            return Fault("failed", "it writes its sources")
        right = [t.clone() for t in again]
        far = list(sources) if dense else variant(with_wide_strides)
        if any(a is not b for a, b in zip(far, sources, strict=True)):
            results = run(far)
            why = None if all_same(right, results) else check(problem, expected, results)
            if why is not None:
                return Fault("wrong", f"{why} (only when its sources reach past 2^31 bytes)")
        del far
        for repeat in range(REPEATS):
            with limited(counts[repeat % len(counts)] if counts else None, gathered=True, of_torch=free_cores()):
                results = run(sources)
            if not all_same(right, results):
                if exactly:
                    return Fault("failed", "it gave other results when it ran again: a race, or memory that it does not write")
                why = check(problem, expected, results)
                if why is not None:
                    return Fault("wrong", f"{why} (only when it ran again)")
        overwrite(others, variant(partial(map, other_data)))  # what it gave may be a view of them
        if not all_same(kept, first):
            return Fault("failed", "a result changed when it ran again: it gives memory that it writes later")
        if not all_same(before, of(sources)):
            return Fault("failed", "it writes its sources")
        if not watch.intact():
            return Fault("failed", "it writes beside its results")
        if not all(intact(t) for t, weight in zip((*others, *laid_out), problem.weights * 2, strict=True) if not weight):
            return Fault("failed", "it writes beside its sources")
        pace.fastest_s = min(pace.fastest_s, *took_s)
        return None

    try:
        return fault()
    finally:
        for t, was in zip(of(sources), before, strict=True):
            if not _same(t, was):
                t.copy_(was)


def overwrite(memory: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Write sources to memory that a runner was given before, where it is not their own."""
    for t, given in zip(memory, sources, strict=True):
        if t is not given:
            t.copy_(given)


def other_data(t: torch.Tensor) -> torch.Tensor:
    """The same elements in reverse order."""
    return by_bits(lambda t: t.flip(0), t.reshape(-1)).reshape(t.shape)


def all_same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Tell whether two lists hold the same tensors, to the bit."""
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors of one type have the same bits, those of NaN too."""
    kind = BITS_TYPE[a.itemsize]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class Cold:
    """Puts weights out of the caches, as the other layers of a large program do, and leaves what a call is given in them.

    One copy of the weights serves: reading as much again as the last cache holds twice displaces it.
    """

    def __init__(self, target: Target, sources: Sequence[torch.Tensor], weights: Sequence[bool]) -> None:
        self._given = [t for t, weight in zip(sources, weights, strict=True) if not weight]
        self._other = torch.ones(2 * last_cache_bytes(target) // 4, dtype=torch.float32, device=target.device)

    def __call__(self) -> None:
        self._other.sum()  # in f32: torch adds up integers twenty times slower than memory is read, at the cost of rounds
        for t in self._given:
            raw = bits_of(t)
            whole = raw.numel() // 4 * 4
            raw[:whole].view(torch.float32).sum()
            raw[whole:].sum()


def last_cache_bytes(target: Target) -> int:
    """The bytes of the target's largest cache, at least `LAST_CACHE_BYTES`."""
    return max([LAST_CACHE_BYTES, *(size for name, size in target.caches_bytes.items() if name.startswith("L"))])


def synchronize(device: str) -> None:
    """Wait for the device's work; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def time_interleaved(
    runs: Sequence[Callable[[], object]],
    device: str,
    *,
    budget_s: float,
    at: Callable[[int], None] = lambda i: None,
    before: Callable[[], None] | None = None,
) -> Race:
    """The race of some runs, by their place: rounds that take each in turn, within a budget for all together, and the load
    meanwhile. Times are the clock's on a CPU; a GPU's own events there (`busy_us`), with as many calls between two of them as
    `calls_per_sample` says.

    A run slower than the best by far stops taking part after the first round, so a hopeless candidate costs one call (or three,
    if short: one alone may have met an interruption). `at` is told which run comes next; `before` is called before each,
    untimed, and then each call is timed alone.
    """
    ahead: list[float | None] = [None] * len(runs)
    calls = [1] * len(runs)
    meter, own = Meter(device, count()), Threads()

    def once(i: int) -> Sample:
        at(i)
        if device == "cpu":
            if before is not None:
                before()
            return own.timed(runs[i])
        us, host_us = busy_us(runs[i], device, calls=calls[i], ahead_us=ahead[i] or 0.0, before=before)
        ahead[i] = min(host_us, ahead[i] or host_us)
        if before is None:
            calls[i] = calls_per_sample(us)
        return Sample(us / 1e6, us / 1e6, 0.0)

    first = [once(i) for i in range(len(runs))]
    own.refresh()  # the first calls may have started some
    best = min(s.own_s for s in first)
    for i in [*range(len(runs))] * AGAIN:
        if HOPELESS * best < first[i].own_s < SHORT_S:
            first[i] = min(first[i], once(i), key=lambda s: s.own_s)
    racing = [i for i in range(len(runs)) if first[i].own_s <= HOPELESS * best]
    laps: list[list[Sample]] = [[] for _ in runs]
    start = time.perf_counter()
    for done in range(MOST_ROUNDS):
        for i in (*racing[done % len(racing) :], *racing[: done % len(racing)]):
            laps[i].append(once(i))
        meter.look()
        if done + 1 >= LEAST_ROUNDS and time.perf_counter() - start > budget_s:
            break
    noise = meter.load().noise
    exact = device != "cpu" or count() == 1
    race = Race({i: Laps.of(taken or [first[i]]) for i, taken in enumerate(laps)}, noise, exact)
    fastest = race.laps[min(race.laps, key=race.us)].wall_us
    return race if noise else replace(race, noise=scatter("calls of one kernel", fastest))


def busy_us(
    run: Callable[[], object],
    device: str,
    *,
    calls: int = 1,
    ahead_us: float = 0.0,
    before: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """The time in µs that a call kept a GPU busy, by its own events around `calls` of them, and that launching one took the
    host.

    `before` is called first, untimed; then the device idles for `ahead_us` a call (MOST_AHEAD_US at most), so that it never
    waits for a host that launches more slowly than it works: as in a CUDA graph. If it had to wait nevertheless, as what
    `ahead_us` says is of another call, all is done again with more time, LATE times at most.
    """
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for event in (start, end):
            event.record()  # which makes it
        ahead = min(SLACK * (calls * ahead_us + RECORD_US), MOST_AHEAD_US) if ahead_us > 0 else 0.0
        again = LATE
        while True:
            if before is not None:
                before()
            if ahead > 0:  # last, for the host may take longer to ask for what comes before than the device to do it
                torch.cuda._sleep(int(ahead * CYCLES_PER_US))  # pyright: ignore[reportPrivateUsage]
            start.record()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            launched = time.perf_counter() - began
            end.record()
            late = 0 < ahead < MOST_AHEAD_US and start.query()
            torch.cuda.synchronize(device)
            if not late or not again:
                break
            again, ahead = again - 1, min(2 * ahead, MOST_AHEAD_US)
    return 1e3 * start.elapsed_time(end) / calls, 1e6 * launched / calls


def calls_per_sample(us: float, span_us: float = SPAN_US) -> int:
    """The number of calls of so many µs between two events of a GPU: they keep it busy for a span of time."""
    return max(1, min(MOST_TOGETHER, math.ceil(span_us / max(us, 1.0))))


def repeated(run: Callable[[], object], calls: int, device: str) -> Callable[[], None] | None:
    """A CUDA graph of `calls` calls; None if they cannot be captured."""

    def several() -> None:
        for _ in range(calls):
            run()

    try:
        return CudaGraphs(device)(several)[1]
    except Exception:  # whatever an operation raises that waits for the host
        return None
