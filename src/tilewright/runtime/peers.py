"""Ranks' knowledge of each other, by a store that rank 0 keeps: signs of life, failures, and small values they exchange.

A thread of each rank says every quarter of a second that it lives and where it is, and looks at the others. Nothing here is a
collective operation: it works however the ranks stand, and when one of them is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from tilewright.errors import PeerError, visible

T = TypeVar("T")

BEAT_S = 0.25  # between two signs of life
SILENT_S = 4.0  # without one, and a rank is taken for gone
SILENT_AFTER_BREAK_S = 1.0  # the same once a connection broke
NAMING_S = 3.0  # after a connection broke, to find out which rank is gone
CONTROL_S = 600.0  # to wait for a rank that lives and works on something of its own: searching, reading a file
FIRST_POLL_S, LAST_POLL_S = 0.0005, 0.02
LEAVING_S = 3.0  # for which rank 0 keeps the store at its end, until the others have left
LONGEST = 2000  # characters of a sentence that is told


class State(msgspec.Struct, array_like=True):
    """One rank, as it says itself.

    Attributes:
        beats: signs of life so far.
        meetings: collective operations that it came to so far.
        place: where it is, in words.
        failed: the sentence that ended it; "" while it runs.
        left: it is done, and comes to no further collective operation.
    """

    beats: int = 0
    meetings: int = 0
    place: str = ""
    failed: str = ""
    left: bool = False


@dataclass
class _Seen:
    """The last that was heard of a rank, and when."""

    state: State
    at_s: float


class Peers:
    """One rank's look at all of them.

    Attributes:
        rank: this one.
        count: how many there are.
        own: what the others are told of this one.
    """

    rank: int
    count: int
    own: State

    def __init__(self, connect: Callable[[], TCPStore], rank: int, count: int) -> None:
        """`connect` opens a connection to the store: one for this thread and one for the other, since a connection is held
        while it waits."""
        self.rank, self.count, self.own = rank, count, State()
        self._store, self._beating = connect(), connect()
        self._beating.set_timeout(timedelta(seconds=LEAVING_S / 2))
        self._turn, self._broken, self._stop = 0, "", threading.Event()
        self._keys = [f"beat/{r}" for r in range(count)]
        self._say(self._store)
        now = time.monotonic()
        self._seen = [_Seen(State(), now) for _ in range(count)]
        self._thread = threading.Thread(target=self._beat, name="signs of life", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def _say(self, store: TCPStore) -> None:
        store.set(self._keys[self.rank], json_of(self.own))

    def _beat(self) -> None:
        """Say that this rank lives, and look at the others, until it leaves."""
        try:
            self._beating.wait(self._keys, timedelta(seconds=CONTROL_S))
            while not self._stop.wait(BEAT_S):
                self.own.beats += 1
                self._say(self._beating)
                now = time.monotonic()
                for seen, said in zip(self._seen, self._beating.multi_get(self._keys), strict=True):
                    state = msgspec.json.decode(said, type=State)
                    if state != seen.state:
                        seen.state, seen.at_s = state, now
        except (RuntimeError, msgspec.MsgspecError):
            if not self._stop.is_set():
                self._broken = "" if self.rank == 0 else "rank 0, which keeps what ranks know of each other, is gone"

    def state(self, rank: int) -> State:
        """The last that was heard of a rank."""
        return self._seen[rank].state

    def fault(self, silent_s: float = SILENT_S) -> str:
        """The sentence why another rank will not come any more; "" while all live."""
        for r, seen in enumerate(self._seen):
            if seen.state.failed and r != self.rank:
                return seen.state.failed
        now = time.monotonic()
        silent = [(now - s.at_s, r) for r, s in enumerate(self._seen) if r != self.rank and not s.state.left]
        longest_s, rank = max(silent, default=(0.0, 0))
        if longest_s > silent_s:
            here = f"; rank {self.rank} waits at {self.own.place}" if self.own.place else ""
            return f"rank {rank} is gone: nothing was heard of it for {longest_s:.1f} s{here}"
        return self._broken

    def after_break(self) -> str:
        """The sentence on which rank is gone, where a connection broke."""
        until = time.monotonic() + NAMING_S
        while not (found := self.fault(SILENT_AFTER_BREAK_S)) and time.monotonic() < until:
            left = [r for r in range(self.count) if self.state(r).left]
            if left:
                return f"rank {left[0]} has ended"
            time.sleep(BEAT_S / 2)
        return found

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank ends, and why."""
        at = f" at {self.own.place}" if self.own.place else ""
        said = f"rank {self.rank} failed{at}: {type(error).__name__}: {first_line(error)}"
        what = error.what if isinstance(error, PeerError) else said
        self.own.failed = self.own.failed or visible(what)[:LONGEST]
        with contextlib.suppress(RuntimeError):
            self._say(self._store)

    @contextlib.contextmanager
    def telling(self) -> Generator[None]:
        """A context whose errors the others are told of."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def gathered(self, value: T, kind: type[T], what: str, within_s: float = CONTROL_S) -> list[T]:
        """The values that all ranks give, by rank: data that JSON holds. All call it, in the same order.

        Raises:
            PeerError: a rank failed, is gone, or did not come within `within_s` seconds.
        """
        self._turn += 1
        keys = [f"turn/{self._turn}/{r}" for r in range(self.count)]
        try:
            self._store.set(keys[self.rank], json_of((what, value)))
            self._await(keys, what, within_s)
            found = [msgspec.json.decode(v, type=tuple[str, kind]) for v in self._store.multi_get(keys)]
            if self._turn > 1:  # all came to this turn, so nobody reads the last one any more
                self._store.delete_key(f"turn/{self._turn - 1}/{self.rank}")
        except RuntimeError as error:  # the store is gone
            raise PeerError(self.after_break() or f"the ranks' store does not answer: {first_line(error)}") from error
        except msgspec.ValidationError as error:
            raise PeerError(f"ranks run other programs: {first_line(error)}", where=what) from error
        for r, (theirs, _) in enumerate(found):
            if theirs != what:
                raise PeerError(f"rank {r} is at {theirs}, rank {self.rank} at {what}", hint="run the same program everywhere")
        return [v for _, v in found]

    def _await(self, keys: Sequence[str], what: str, within_s: float) -> None:
        """Wait until all keys are there."""
        until, poll_s, missing = time.monotonic() + within_s, FIRST_POLL_S, list(keys)
        while missing := [k for k in missing if not self._store.check([k])]:
            if why := self.fault():
                raise PeerError(why)
            if time.monotonic() > until:
                raise PeerError(f"rank {missing[0].rpartition('/')[2]} did not reach {what} in {within_s:g} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LAST_POLL_S)

    def agree(self, facts: dict[str, str], what: str) -> None:
        """See that all ranks have the same facts, which are words by name.

        Raises:
            PeerError: they have not: the same sentence on every rank.
        """
        first, *others = self.gathered(facts, dict[str, str], what)
        for r, theirs in enumerate(others, 1):
            for name in [*first, *(n for n in theirs if n not in first)]:
                if first.get(name) != theirs.get(name):
                    here, there = (shown.get(name, "nothing") for shown in (first, theirs))
                    hint = "the same machine, versions, settings and program on every rank"
                    raise PeerError(f"ranks differ in {name}: {here} on rank 0, {there} on rank {r}", hint=hint)

    def leave(self, *, together: bool = False) -> None:
        """Say that this rank is done; rank 0, which keeps the store, waits a little until all others are or have failed; if
        they leave `together`, until all have left."""
        atexit.unregister(self.leave)
        if self._stop.is_set():
            return
        until = time.monotonic() + LEAVING_S
        with contextlib.suppress(RuntimeError):
            self.own.left = True
            self._say(self._store)
            while self.rank == 0 and time.monotonic() < until:  # also if it failed: the others are to read why
                states = [self.state(r) for r in range(1, self.count)]
                others = [s for s in states if not s.left and (together or not s.failed)]
                if not others or (not together and self.fault(SILENT_AFTER_BREAK_S)):
                    break
                time.sleep(BEAT_S / 5)
        self._stop.set()
        self._thread.join(LEAVING_S)  # before Python ends: a thread that comes back to it from C++ then aborts the process


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def json_of(value: object) -> str:
    """A value as JSON text."""
    return msgspec.json.encode(value).decode()
