"""Files that appear whole or not at all, JSON that may be damaged, folders that nobody else could have written to, and locks
between processes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

from tilewright.errors import InputError

SAVED = ".twp"  # ends the names of compiled programs
NAMED_BYTES = 100  # of a file's name that its draft's name starts with: names end at 255
ASKS_S = 0.05  # between two looks at a lock that another process holds


T = TypeVar("T")


class NotJSONError(ValueError):
    """A text that is no JSON of the type asked for; its message says where it goes wrong."""


def decoded(content: bytes | str, type_: type[T]) -> T:
    """The value of a JSON text from outside, of a type that msgspec knows; `object` for any.

    Raises:
        NotJSONError: it is no JSON, holds a broken string, is nested too deeply, or is of another type.
    """
    import msgspec  # which `--help` has no use for

    try:
        return msgspec.json.decode(content, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotJSONError(str(error)) from None


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A draft of `path`, to be written in the block and put in its place at the end; if the block fails nothing changes.

    A link is written through. What is no regular file (a device, a pipe) stays what it is: the draft is copied into it.

    Raises:
        InputError: the folder is not there or cannot be written, or `path` is a folder or a file that must not be written.
    """
    with _sentences(path):
        there = _seen(path)
        if there is not None and not stat.S_ISREG(there.st_mode):
            with tempfile.TemporaryDirectory() as folder:
                draft = Path(folder, "draft")
                yield draft
                with draft.open("rb") as written, path.open("wb") as into:
                    shutil.copyfileobj(written, into)
            return
        with _draft(path) as draft:
            yield draft
            if there is not None:
                with contextlib.suppress(PermissionError):  # a file system without modes
                    draft.chmod(stat.S_IMODE(there.st_mode))
            draft.replace(os.path.realpath(path))


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
    with _sentences(path):
        there = _seen(path)
        if there is None or stat.S_ISREG(there.st_mode):
            with _draft(path) as draft:
                draft.touch()


def foreign(path: Path) -> str | None:
    """The reason, as the end of a sentence, why a folder or file of this user could hold what someone else wrote; None if it
    could not.

    It must be this user's own, writable by nobody else, and no link. What is not there is nobody's.
    """
    try:
        there = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(there.st_mode):
        return "is a link"
    if hasattr(os, "getuid") and there.st_uid != os.getuid():
        return "is another user's"
    return "can be written by other users" if there.st_mode & 0o022 else None


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that is this user's alone; no link is followed.

    Raises:
        OSError: it cannot be opened, or somebody else could have written it.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    there = os.fstat(descriptor)
    if hasattr(os, "getuid") and (there.st_uid != os.getuid() or there.st_mode & 0o022 or not stat.S_ISREG(there.st_mode)):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "could have been written by someone else", str(path))
    return descriptor


def read_own(path: Path) -> bytes:
    """The contents of a file that is this user's alone.

    Raises:
        OSError: as `open_own`.
    """
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write_own(path: Path, contents: bytes) -> None:
    """Write a file that only this user can read: all of it appears under `path`, or nothing changes.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # readable by the owner alone
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(contents)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def lock(descriptor: int) -> bool:
    """Take the lock of an open file for as long as the descriptor is open; False if another process or descriptor has it.

    It is the operating system's, and ends with the process that holds it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # as Windows says it
        return False
    return True


@contextlib.contextmanager
def alone(path: Path, wait_s: float) -> Generator[bool]:
    """Hold a file's lock; the file is made where it is not there. False if another process had it for all of `wait_s`.

    Raises:
        OSError: it cannot be opened, somebody else could have written it, or the file system has no locks.
    """
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        ends = time.monotonic() + wait_s
        while not (held := lock(descriptor)) and time.monotonic() < ends:
            time.sleep(ASKS_S)
        yield held
    finally:
        os.close(descriptor)


def _seen(path: Path) -> os.stat_result | None:
    """The status of what is there, links followed; None if nothing is. Not opened: a pipe's reader would take that for all."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(there.st_mode):
        raise InputError("cannot be written: Is a directory", where=str(path), hint="the name of a file in it")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return there


@contextlib.contextmanager
def _draft(path: Path) -> Generator[Path]:
    """A name beside the file itself, where `path` may be a link to it; no file of that name is left."""
    final = Path(os.path.realpath(path))
    start = os.fsdecode(os.fsencode(final.name)[:NAMED_BYTES])
    draft = final.with_name(f".{start}.{os.getpid()}.{secrets.token_hex(8)}.tmp")  # several threads may write one file
    try:
        yield draft
    finally:
        with contextlib.suppress(OSError):  # where a folder is a file, say
            draft.unlink()


@contextlib.contextmanager
def _sentences(path: Path) -> Generator[None]:
    """Errors of the system as ours."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "another place, or free some" if full else "a folder that is there and that you may write to"
        raise InputError(f"cannot be written: {error.strerror}", where=str(path), hint=hint) from error


def cache_folder() -> Path:
    """The folder of what is kept: $TILEWRIGHT_CACHE, or the user's cache directory. Made owner-only.

    Raises:
        OSError: it cannot be made, or somebody else could have written to it: it is a link, another user's, or open to others.
    """
    import platformdirs  # not by a command that only prints its help

    given = os.environ.get("TILEWRIGHT_CACHE")
    folder = Path(given) if given else Path(platformdirs.user_cache_dir("tilewright", appauthor=False))
    if folder.parts[:1] == ("~",):
        raise FileNotFoundError("this user has no home folder; TILEWRIGHT_CACHE names another one")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (why := foreign(folder)) is not None:
        raise PermissionError(errno.EPERM, f"it {why}", str(folder))
    return folder
