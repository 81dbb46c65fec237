"""Records of decisions: the key that a choice depends on, the choice, candidates that never came back, kernels that were
verified, and tables over rows; as stored bytes, and as one JSON file to be taken elsewhere. Data alone: what reads it builds
the kernels anew."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from tilewright.errors import InputError
from tilewright.files import NotJSONError, decoded, write_whole

VERSION = 1  # of the JSON file
Reason = Literal[
    "refused", "inapplicable", "unbuilt", "unchecked", "failed", "wrong", "lost", "starved", "slower", "tie", "untried"
]
"""The kinds of reason for which a candidate, or a point of its space, is not chosen.

    refused: its plan refuses the problem, or could not be made.
    inapplicable: it is for problems of another type.
    unbuilt: the point could not be built.
    unchecked: the oracle gives no results on random data.
    failed: it raised, or it breaks a rule of kernels (it writes its sources, or gives other bits when it runs again).
    wrong: its results differ from the oracle's.
    lost: it crashed or hung; it is not tried again on this problem.
    starved: it did not come back in its time, most of which other programs had; the next search tries it again.
    slower, tie: it was timed; a tie goes to the one that comes first.
    untried: it was not built, or not timed.
"""


class Key(msgspec.Struct, frozen=True):
    """The circumstances that a choice depends on.

    Attributes:
        chip: data file that the machine matched.
        processor: its marketing name, features and caches.
        cores, threads: the machine's cores, and the threads that kernels share; 0 threads on a GPU.
        driver, toolkit: versions, of a GPU.
        libraries: versions of those that compile kernels or are candidates, variables of the environment that steer them, and
            packages that plug in.
        tilewright: version, and a digest of the code that makes and chooses kernels.
        numerics: settings of what may be rounded how.
        alignment_bytes: alignment of the sources that were timed.
        cold: weights came from memory, as those of a program larger than the caches.
        budget: class of time that a search had.
        problem: digest of its text; of a verdict on a library's kernel, with the numbers in it.
        family: the part of the candidates that the choice was made among; "" for all.
    """

    chip: str
    processor: str
    cores: int
    threads: int
    driver: str
    toolkit: str
    libraries: str
    tilewright: str
    numerics: str
    alignment_bytes: int
    cold: bool
    budget: str
    problem: str
    family: str = ""

    def digest(self) -> bytes:
        """The SHA-256 digest under which a record is stored."""
        return hashlib.sha256(msgspec.json.encode(self)).digest()


Time = Annotated[float, msgspec.Meta(ge=0)]
Moment = Annotated[float, msgspec.Meta(ge=0, lt=32503680000)]  # seconds since 1970, before the year 3000
LONGEST = 4000  # characters of a sentence that is kept
Text = Annotated[str, msgspec.Meta(max_length=LONGEST)]
Knobs = tuple[tuple[Text, bool | int | str], ...]


class RejectedRecord(msgspec.Struct, frozen=True):
    """A candidate that was not chosen, or a point of its space (`knobs`): the sentence why, and its time if it was timed.

    Files of earlier versions have neither knobs nor a kind, and the knobs in parentheses behind the candidate's name.
    """

    candidate: Text
    why: Text
    time_us: Time | None
    knobs: Knobs = ()
    kind: Reason = "untried"


class Choice(msgspec.Struct, frozen=True):
    """The part of a decision that all who write it down share (`choice.py`).

    Attributes:
        candidate, knobs: what was chosen, and the point of its space.
        time_us: its time; None if nothing was timed.
        rejected: the others.
        provisional: why the times are not reliable, "" if they are.
    """

    candidate: Text
    knobs: Knobs
    time_us: Time | None
    rejected: tuple[RejectedRecord, ...]
    provisional: Text = ""


class Record(Choice, frozen=True, kw_only=True):
    """One decision: the choice, the problem as people read it, when it was made, and the seconds that its search might
    take (`asked_s`)."""

    key: Key
    problem: str
    made_s: Moment
    asked_s: Time = 0.0

    def digest(self) -> bytes:
        """The digest under which it is stored."""
        return self.key.digest()


class Lost(msgspec.Struct, frozen=True):
    """A candidate that did not come back from a problem: the sentence how, and when. Its key is that of every budget."""

    key: Key
    problem: str
    candidate: Text
    why: Text
    made_s: Moment

    def digest(self) -> bytes:
        """The digest under which it is stored, beside the candidate's name."""
        return self.key.digest()


class Verdict(msgspec.Struct, frozen=True):
    """A kernel that agreed with the oracle, and all that this rests on: the circumstances (its key is that of every budget),
    the candidate and the point of its space, the digest of the texts that it was generated as."""

    key: Key
    candidate: Text
    knobs: Knobs
    text: str
    made_s: Moment

    def digest(self) -> bytes:
        """The digest of all but the moment."""
        return hashlib.sha256(msgspec.json.encode((self.key, self.candidate, self.knobs, self.text))).digest()


class End(msgspec.Struct, frozen=True):
    """The kernel at one end of a bucket: the point of its candidate's space, and its time."""

    knobs: Knobs
    time_us: Time | None


class Range(msgspec.Struct, frozen=True):
    """One bucket of a table: its rows, the candidate that serves them, the knobs by which it packs, the kernels at its ends."""

    first: int
    last: int
    candidate: Text
    order: Knobs
    at_first: End
    at_last: End


class Table(msgspec.Struct, frozen=True):
    """A table of the kernels that serve ranges of rows.

    It holds the seconds that were given for measuring, the buckets, the bytes of packed weight and the times in µs by rows,
    both by the name of what raced. Its key is that of every budget, its problem's digest that of the first and of the last
    number of rows. `provisional`: why the times are not reliable, "" if they are."""

    key: Key
    budget_s: Annotated[float, msgspec.Meta(ge=0)]
    buckets: tuple[Range, ...]
    packings: dict[Text, int]
    measured: dict[int, dict[Text, Time]]
    made_s: Moment
    provisional: Text = ""

    def digest(self) -> bytes:
        """The digest under which it is stored."""
        return self.key.digest()


Kept = TypeVar("Kept", Record, Lost, Verdict, Table)


def with_checksum(content: Record | Lost | Verdict | Table) -> bytes:
    """The bytes that are stored: a SHA-256 digest, then the record as JSON."""
    encoded = msgspec.json.encode(content)
    return hashlib.sha256(encoded).digest() + encoded


def checked(value: object, digest: bytes, type_: type[Kept]) -> Kept | None:
    """The record in stored bytes; None if a bit of them changed, or if it stands under another key than its own."""
    if not isinstance(value, bytes) or hashlib.sha256(value[32:]).digest() != value[:32]:
        return None
    try:
        found = decoded(value[32:], type_)
    except NotJSONError:
        return None
    return found if found.digest() == digest else None


class Exported(msgspec.Struct, frozen=True):
    """The contents of the file: the format's version, the machine in words, the records."""

    tilewright_records: Literal[1]
    machine: str
    records: tuple[Record, ...]


def write_records(path: Path, machine: str, records: Sequence[Record]) -> None:
    """Write the file; it appears whole or not at all.

    Raises:
        InputError: the folder is not there or cannot be written.
    """
    content = msgspec.json.encode(Exported(VERSION, machine, tuple(records)))
    write_whole(path, msgspec.json.format(content, indent=1))


def read_records(path: Path) -> tuple[Record, ...]:
    """The records of such a file.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    try:
        return decoded(path.read_bytes(), Exported).records
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), hint="a file of `tune --export`") from error
    except NotJSONError as error:
        raise InputError(f"no records: {error}", where=str(path), hint="a file of `tune --export`") from error
