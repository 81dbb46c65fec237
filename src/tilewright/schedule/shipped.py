"""Decisions that come with the package: measured once for a chip, read by everybody who has one, under the user's own.

A decision is used where its key fits exactly: the chip with its caches, features, cores and threads, what may be rounded how,
the problem. The version of the code counts by what it generates: a kernel whose text is another one than the text that was
measured is not that decision, and a library's call only with the libraries that it was measured with. It is verified on the
machine, once, like any kernel. Driver and toolkit do not count. Of a kernel whose text is another one, the point alone is
taken, by those who measure nothing. Each chip has a file, written by `benchmarks/ship.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tilewright.errors import InputError, say
from tilewright.files import NotJSONError, decoded, write_whole
from tilewright.schedule.record import Key, Knobs, Text

FOLDER = Path(__file__).parent / "shipped_decisions"
DIGITS = 32  # of the digests of problems and texts that are kept
# Of a key, what stands in each decision, what does not count, and what counts for library calls alone.
_WORDS = ("budget", "problem", "family", "driver", "toolkit", "tilewright", "libraries")
_ELSEWHERE = {"cold": False} | dict.fromkeys(_WORDS, "")

Place = tuple[str, bool, str]  # the problem, `cold`, and the class of budget
Digest = Annotated[str, msgspec.Meta(max_length=DIGITS)]


class Shipped(msgspec.Struct, frozen=True, array_like=True):
    """One decision.

    Attributes:
        problem: the first digits of its text's digest.
        cold, budget: as in a `Key`.
        candidate, knobs, time_us: what was chosen, and its time in µs.
        text: the first digits of the digest of the kernel's generated texts; "" for a library's call.
    """

    problem: Digest
    cold: bool
    budget: Text
    candidate: Text
    knobs: Knobs
    time_us: Annotated[float, msgspec.Meta(ge=0)]
    text: Digest

    @property
    def place(self) -> Place:
        """The key that finds it."""
        return self.problem, self.cold, self.budget


class Group(msgspec.Struct, frozen=True):
    """Decisions of one chip and setting: their common key, and the libraries and the version of the code that they were made
    with."""

    key: Key
    libraries: str
    tilewright: str
    decisions: tuple[Shipped, ...]


class ShippedFile(msgspec.Struct, frozen=True):
    """The contents of a file: the format's version, the groups."""

    tilewright_shipped: Literal[1]
    groups: tuple[Group, ...]


def common(key: Key) -> Key:
    """The part of a key that all decisions share that were made with the same chip and settings."""
    return msgspec.structs.replace(key, **_ELSEWHERE)


def shipped(key: Key) -> Mapping[Place, Shipped]:
    """The decisions that fit a key but for the problem."""
    return _fitting(FOLDER, common(key), key.libraries)


@lru_cache(64)
def _fitting(folder: Path, key: Key, libraries: str) -> dict[Place, Shipped]:
    fitting = [g for g in _groups(folder / f"{key.chip}.json") if g.key == key]
    found = [d for g in fitting for d in g.decisions if d.text or g.libraries == libraries]
    return {d.place: d for d in found}


@lru_cache(8)
def _groups(file: Path) -> tuple[Group, ...]:
    try:
        return read(file)
    except FileNotFoundError:
        return ()
    except InputError as error:
        say(f"decisions that came with the package are not used: {error}")
        return ()


def read(file: Path) -> tuple[Group, ...]:
    """The groups of a file.

    Raises:
        InputError: it holds something else.
        FileNotFoundError: there is none.
    """
    try:
        return decoded(file.read_bytes(), ShippedFile).groups
    except NotJSONError as error:
        hint = "a file that benchmarks/ship.py wrote"
        raise InputError(f"no shipped decisions: {error}", where=str(file), hint=hint) from error


def measured(file: Path, key: Key) -> set[Place]:
    """The decisions of a file that were measured with these libraries and this version of the code.

    Raises:
        InputError: the file holds something else.
    """
    return {d.place for g in _read_if_there(file) if _same(g, key) for d in g.decisions}


def add(file: Path, key: Key, decisions: Iterable[Shipped]) -> None:
    """Add decisions to a file, in place of those of the same problems, whatever version made them. It appears whole or not at
    all.

    Raises:
        InputError: the file holds something else, or cannot be written.
    """
    groups, own = _read_if_there(file), common(key)
    merged = {d.place: d for d in (*(d for g in groups if _same(g, key) for d in g.decisions), *decisions)}
    others: list[Group] = []
    for g in groups:
        left = tuple(d for d in g.decisions if g.key != own or d.place not in merged)
        others += [msgspec.structs.replace(g, decisions=left)] if left else []
    ordered = tuple(sorted(merged.values(), key=lambda d: d.place))
    content = ShippedFile(1, (*others, Group(own, key.libraries, key.tilewright, ordered)))
    write_whole(file, msgspec.json.encode(content).replace(b'],["', b'],\n["') + b"\n")


def _read_if_there(file: Path) -> tuple[Group, ...]:
    try:
        return read(file)
    except FileNotFoundError:
        return ()


def _same(group: Group, key: Key) -> bool:
    return group.key == common(key) and (group.libraries, group.tilewright) == (key.libraries, key.tilewright)
