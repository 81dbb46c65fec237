"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from tilewright.errors import InputError


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A draft beside `path`, to be written in the block and put in its place at the end; if the block fails nothing changes.

    Raises:
        InputError: the folder is not there or cannot be written, or `path` is one itself.
    """
    with _draft(path) as draft:
        yield draft
        draft.replace(path)


def write_whole(path: Path, contents: bytes) -> None:
    """Write a file: either all of it appears under `path` or nothing changes.

    Raises:
        InputError: as `whole_file`.
    """
    with whole_file(path) as draft:
        draft.write_bytes(contents)


def require_writable(path: Path) -> None:
    """See that a file can be written, before the work whose result it is to hold.

    Raises:
        InputError: as `whole_file`.
    """
    with _draft(path) as draft:
        draft.touch()


@contextlib.contextmanager
def _draft(path: Path) -> Generator[Path]:
    if path.is_dir():
        raise InputError("cannot be written: Is a directory", where=str(path), hint="the name of a file in it")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
    except OSError as error:
        hint = "a folder that is there and that you may write to"
        raise InputError(f"cannot be written: {error.strerror}", where=str(path), hint=hint) from error
    finally:
        with contextlib.suppress(OSError):  # where a folder is a file, say
            draft.unlink()
