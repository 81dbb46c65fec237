"""Records of a program's problems as one JSON file, to be taken elsewhere. Data alone: what reads it builds and checks anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tilewright.errors import InputError
from tilewright.schedule.record import Record

VERSION = 1


class Exported(msgspec.Struct, frozen=True):
    """What the file holds: the format's version, the machine in words, the records."""

    tilewright_records: Literal[1]
    machine: str
    records: tuple[Record, ...]


def require_writable(path: Path) -> None:
    """See that `write_records` will find what it needs, before the work whose result it writes.

    Raises:
        InputError: the folder is not there or cannot be written, or `path` is one itself.
    """
    if path.is_dir():
        raise InputError("cannot be written: Is a directory", where=str(path))
    draft = _draft(path)
    try:
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from error


def write_records(path: Path, machine: str, records: Sequence[Record]) -> None:
    """Write the file; it appears whole or not at all.

    Raises:
        InputError: the folder is not there or cannot be written.
    """
    draft = _draft(path)
    try:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(Exported(VERSION, machine, tuple(records))), indent=1))
        draft.replace(path)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


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
