"""Records of a program's problems as one JSON file, to be taken elsewhere. Data alone: what reads it builds and checks anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tilewright.errors import InputError
from tilewright.files import write_whole
from tilewright.schedule.record import Record

VERSION = 1


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
        return msgspec.json.decode(path.read_bytes(), type=Exported).records
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), hint="a file of `tune --export`") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"no records: {error}", where=str(path), hint="a file of `tune --export`") from error
