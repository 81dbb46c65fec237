"""Contenders that take turns: medians over rounds, ratios round by round.

Each contender but one lives in a process of its own, so that no library shares its threads with another. Its process is stopped
while it is not asked anything: threads that spin after their work would slow the contender whose turn it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tilewright import children

if TYPE_CHECKING:
    import numpy as np

# One that is this many times slower than the best in the first two rounds keeps those figures and sits the others out.
OUTCLASSED = 3.0
PREPARED_S = 600.0  # a contender that is not ready by then, or whose turn lasts longer, is out; where nothing else is said
SILENT = "no answer in"
READY = "ready"  # the answer of one that is, and what there is to say of it behind a tab


class Contender(Protocol):
    """Somebody who takes turns.

    Attributes:
        name: its name.
        note: what it says of how it prepared, "" if nothing.
    """

    name: str
    note: str

    def take(self, case: Any, result: Path | None = None) -> str | None:
        """None once it has run the case, else why it cannot. The result, if asked for, is written as .npy of float64."""
        ...

    def turn(self, warm_s: float, timed_s: float, least: int) -> float:
        """Median seconds of a call, of at least `least` calls that take `timed_s` together, after warming for `warm_s`."""
        ...


class Here:
    """The contender in this process, which is ready: others are held while it runs, it waits while they do."""

    name: str
    note: str

    def __init__(self, name: str, run: Callable[[], Any]) -> None:
        self.name, self.note = name, ""
        self._run = run

    def take(self, case: Any, result: Path | None = None) -> str | None:
        answer = self._run()
        if result is not None:
            save(answer, result)
        return None

    def turn(self, warm_s: float, timed_s: float, least: int) -> float:
        return timed(self._run, warm_s, timed_s, least)


class Process:
    """A contender behind a command that ends in `serve`."""

    name: str
    note: str

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], prepared_s: float | None = None
    ) -> None:
        """Start it. One that does not answer for `prepared_s` seconds (`PREPARED_S`) is ended."""
        self.name, self.note = name, ""
        self._prepared_s = PREPARED_S if prepared_s is None else prepared_s
        self._command = list(command)
        self._environment = {**os.environ, **environment}
        self._child = self._started()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environment,
        )

    def take(self, case: Any, result: Path | None = None) -> str | None:
        """See `Contender`; `case` is anything that JSON holds."""
        answer = self._ask("case", json.dumps(case), str(result or ""))
        if not answer:
            ended = self._end()
            self._child = self._started()
            return ended
        word, _, self.note = answer.partition("\t")
        return None if word == READY else answer

    def turn(self, warm_s: float, timed_s: float, least: int) -> float:
        answer = self._ask("go", str(warm_s), str(timed_s), str(least))
        return float(answer or "nan")

    def stop(self) -> None:
        """End the process, held or not."""
        self._end()

    def _end(self) -> str:
        """End the process, and say how it ended, or that it had to be ended."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(0.1) if self._child.stdout is not None and self._closed else None
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if code is None:
            return f"{SILENT} {self._prepared_s:.0f} s"
        return f"its process {children.ending(code)}"

    _closed = False

    def _ask(self, *words: str) -> str:
        """The answer, empty if there is none. Until the next question the process is held."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._closed = False
        try:
            self._child.send_signal(signal.SIGCONT)
            self._child.stdin.write("\t".join(words) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._closed = True
            return ""
        answered, _, _ = select.select([self._child.stdout], [], [], self._prepared_s)
        if not answered:
            return ""
        answer = self._child.stdout.readline().rstrip("\n")
        self._closed = not answer
        if answer:
            self._child.send_signal(signal.SIGSTOP)
        return answer


def compete(
    contenders: Sequence[Contender],
    case: Any,
    *,
    rounds: int,
    enough: int = 0,
    within_s: float = math.inf,
    warm_s: float = 0.03,
    timed_s: float = 0.06,
    least: int = 3,
    results: Path | None = None,
    keep: Iterable[str] = (),
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds by contender and round, and why the others did not take part.

    Args:
        contenders: prepared one after another, in this order: what one chooses by measuring must not meet another at work.
        case: the argument of each one's `take`.
        rounds: turns of each.
        enough, within_s: after so many rounds none begins that would end later than so many seconds from now on.
        warm_s, timed_s, least: see `Contender.turn`; warming goes before each turn.
        results: a folder for each contender's result, `<name>.npy`.
        keep: names of those that take part in all rounds however slow.
        progress: called before each preparation and turn with how many are done, how many there are, and whose it is.
    """
    ready, refused = list[Contender](), dict[str, str]()
    ends, longest_s = time.monotonic() + within_s, 0.0
    total = len(contenders) * (rounds + 1)
    done = 0

    def tell(name: str) -> None:
        nonlocal done
        if progress is not None:
            progress(min(done, total), total, name)
        done += 1

    for contender in contenders:
        tell(contender.name)
        why = contender.take(case, results / f"{contender.name}.npy" if results is not None else None)
        if why is None:
            ready.append(contender)
        else:
            refused[contender.name] = why
    times: dict[str, list[float]] = {c.name: [] for c in ready}
    order = random.Random(0)
    for i in range(rounds):
        began = time.monotonic()
        if i >= enough and began + longest_s > ends:
            break
        for contender in order.sample(ready, len(ready)):
            tell(contender.name)
            seconds = contender.turn(warm_s, timed_s, least)
            if seconds == seconds:
                times[contender.name].append(seconds)
            else:
                refused[contender.name] = "it stopped answering while it was timed"
                ready.remove(contender)
                del times[contender.name]
        longest_s = max(longest_s, time.monotonic() - began)
        if i == 1:
            bar = OUTCLASSED * min((min(t) for t in times.values()), default=0.0)
            ready = [c for c in ready if min(times[c.name]) <= bar or c.name in keep]
    return times, refused


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median ratio of their times to ours, over the rounds that both ran: how many times faster we are."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=False))


def serve(prepare: Callable[[Any], Callable[[], Any]], pick: Callable[[Any], Any] = lambda result: result) -> None:
    """Answer as a `Process` until standard input ends.

    Args:
        prepare: makes of a case what runs it once; if it raises, this contender is out, with the error's own words. What it
            says in an attribute `note` of that is told (`Contender.note`).
        pick: what of a result is written.
    """
    children.die_with_parent()  # a run that is killed leaves nobody at work beside the next one
    answers = children.answers("w")
    run: Callable[[], Any] | None = None
    for line in sys.stdin:
        word, *rest = line.rstrip("\n").split("\t")
        if word == "case":
            run = None  # the last case's memory goes before the next one's comes
            try:
                run = prepare(json.loads(rest[0]))
                result = run()
                if rest[1]:
                    save(pick(result), Path(rest[1]))
                answer = f"{READY}\t{note}" if (note := getattr(run, "note", "")) else READY
            except Exception as why:
                answer = " ".join(((str(why).splitlines() or [""])[0] or type(why).__name__).split())
        else:
            assert run is not None
            answer = str(timed(run, float(rest[0]), float(rest[1]), int(rest[2])))
        print(answer, file=answers, flush=True)


def timed(run: Callable[[], Any], warm_s: float, timed_s: float, least: int) -> float:
    """Median seconds of a call; see `Contender.turn`."""
    began = time.perf_counter()
    while time.perf_counter() - began < warm_s:
        run()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < least or time.perf_counter() - began < timed_s:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def save(result: Any, path: Path) -> None:
    """Write a result as .npy of float64; several as one flat array."""
    import numpy as np

    if isinstance(result, (list, tuple)):
        parts = [_doubles(r) for r in cast("Sequence[object]", result)]
        np.save(path, parts[0] if len(parts) == 1 else np.concatenate([p.reshape(-1) for p in parts]))
    else:
        np.save(path, _doubles(result))


def _doubles(result: Any) -> np.ndarray:
    import numpy as np

    if hasattr(result, "cpu"):
        return result.detach().cpu().double().numpy()
    return np.asarray(result).astype(np.float64)
