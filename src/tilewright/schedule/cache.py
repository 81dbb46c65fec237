"""Decisions kept on disk, for every process of one user: an SQLite file that holds data only.

A record is found by everything that its choice depended on (`Key`): change one field and it is not found. It carries that key,
and a checksum over both, so a damaged record is no record. A file that is damaged as a whole is set aside and another begun.

What `put` acknowledged survives the death of its process at any moment (`kill -9` included): the write-ahead log belongs to the
operating system by then. A power cut may take the last records with it, never the file: commits are not waited for on the
medium (`synchronous=NORMAL`), since a lost record costs one measurement.

Only one process measures a problem at a time (`alone`): the lock is the operating system's and ends with the process that holds
it. The log needs memory shared between processes, and the lock needs one kernel. So nothing is kept on a network file system,
nor on one that is full or cannot be written. Nor is anything kept in a folder that is a link, another user's, or open to
others' writing: its files could be anybody's, and the log is replayed unasked. In each case one line on standard error says so,
and everything goes on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

from tilewright.errors import say
from tilewright.files import cache_folder, foreign, lock, open_own
from tilewright.schedule.record import Kept, Key, Lost, Record, Table, Verdict, checked, with_checksum

BUSY_S = 20.0
NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|glusterfs|gpfs|lustre|ncpfs|nfs4?|orangefs|smb3|smbfs"
    r"|fuse\.(ceph|gcsfuse|glusterfs|rclone|s3fs|sshfs)"
)
MOUNTS = Path("/proc/self/mountinfo")
# What an SQLite error says about the disk, not about the file's content.
_OF_THE_DISK = frozenset(
    {
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOLFS,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)

# Of the files that SQLite keeps for one database: itself, its log, the log's index, and a journal of older times.
_SUFFIXES = ("", "-wal", "-shm", "-journal")

T = TypeVar("T")


class _UnusableError(Exception):
    """No file can be kept there: a sentence why."""


class Cache:
    """The records in one folder. Threads and processes may share it; no method raises for what the disk does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: tuple[int, sqlite3.Connection] | None = None  # by which process
        self._generation = 0
        self._guard = threading.RLock()
        self._unusable: str | None = None
        self._inherited: list[sqlite3.Connection] = []

    def get(self, key: Key) -> Record | None:
        """The record under a key."""
        return self._found("decisions", key.digest(), Record)

    def put(self, record: Record) -> bool:
        """Keep a record in place of what was there; True once it is kept."""
        return self._keep("decisions", record)

    def records(self) -> list[Record]:
        """Every record that is whole."""
        rows = self._do(lambda c: c.execute("SELECT key, value FROM decisions").fetchall(), [])
        return [r for digest, value in rows if (r := checked(value, digest, Record)) is not None]

    def verdict(self, digest: bytes) -> Verdict | None:
        """The verdict of a digest."""
        return self._found("verdicts", digest, Verdict)

    def vouch(self, verdict: Verdict) -> bool:
        """Keep a verdict; True once it is kept."""
        return self._keep("verdicts", verdict)

    def withdraw(self, digest: bytes) -> None:
        """Forget a verdict."""
        self._do(lambda c: c.execute("DELETE FROM verdicts WHERE key = ?", (digest,)).rowcount, 0)

    def table(self, key: Key) -> Table | None:
        """The table over rows under a key."""
        return self._found("tables", key.digest(), Table)

    def put_table(self, table: Table) -> bool:
        """Keep a table in place of what was there; True once it is kept."""
        return self._keep("tables", table)

    def _found(self, where: str, digest: bytes, type_: type[Kept]) -> Kept | None:
        rows = self._do(lambda c: c.execute(f"SELECT value FROM {where} WHERE key = ?", (digest,)).fetchall(), [])
        return checked(rows[0][0], digest, type_) if rows else None

    def _keep(self, where: str, content: Record | Verdict | Table) -> bool:
        row = (content.digest(), with_checksum(content))
        return self._do(lambda c: c.execute(f"INSERT OR REPLACE INTO {where} VALUES (?, ?)", row).rowcount == 1, False)

    def keep_lost(self, lost: Lost) -> bool:
        """Keep a candidate that did not come back in place of what was there on the same candidate; True once it is kept."""
        row = (lost.key.digest(), lost.candidate, with_checksum(lost))
        return self._do(lambda c: c.execute("INSERT OR REPLACE INTO refused VALUES (?, ?, ?)", row).rowcount == 1, False)

    def evict_lost(self, lost: Lost) -> None:
        """Forget a candidate that did not come back."""
        row = (lost.key.digest(), lost.candidate)
        self._do(lambda c: c.execute("DELETE FROM refused WHERE key = ? AND candidate = ?", row).rowcount, 0)

    def lost(self, key: Key | None = None) -> list[Lost]:
        """Every candidate that did not come back and whose record is whole, or those under a key."""
        digest = None if key is None else key.digest()
        which = "SELECT key, value FROM refused WHERE ?1 IS NULL OR key = ?1"
        rows = self._do(lambda c: c.execute(which, (digest,)).fetchall(), [])
        return [r for found, value in rows if (r := checked(value, found, Lost)) is not None]

    def clear(self) -> int:
        """Forget every record, lost candidate, verdict and table, and delete files set aside; how many records there were."""

        def emptied(connection: sqlite3.Connection) -> int:
            count = connection.execute("DELETE FROM decisions").rowcount
            for other in ("refused", "verdicts", "tables"):
                connection.execute(f"DELETE FROM {other}")
            with contextlib.suppress(sqlite3.OperationalError):  # another process reads: the space is used again later
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return count

        count = self._do(emptied, 0)
        with self._guard, contextlib.suppress(OSError):
            if self._open is not None:
                self._delete_before(self._generation)
        return count

    @property
    def file(self) -> Path | None:
        """The file of the records, None if none can be kept."""
        return self._do(lambda c: self._path(self._generation), None)

    @property
    def unusable(self) -> str | None:
        """The sentence why nothing is kept, None if records are."""
        return self._unusable

    def bytes(self) -> int:
        """The bytes on disk of the records, their log and files set aside."""
        with contextlib.suppress(OSError):
            return sum(p.stat().st_size for p in self.folder.glob("decisions-*"))
        return 0

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        with self._guard:
            if self._open is not None and self._open[0] == os.getpid():
                with contextlib.suppress(sqlite3.Error):
                    self._open[1].close()
            self._open = None

    @contextlib.contextmanager
    def alone(self, key: Key, wait_s: float, there: Callable[[], bool] | None = None) -> Generator[bool]:
        """Hold what no other process and thread may hold for this key; True if so.

        False if another one had it for all of `wait_s`, if it is not to be had at all, or as soon as there is a record (or
        whatever else `there` looks for); a provisional one that is there already is none.
        """
        found = self.get(key) if there is None else None
        wanting = (None, found) if found is not None and found.provisional else (None,)
        there = there or (lambda: self.get(key) not in wanting)
        descriptor = None
        with contextlib.suppress(OSError):
            folder = self.folder / "locks"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if foreign(self.folder) is None and foreign(folder) is None:
                descriptor = open_own(folder / key.digest()[:1].hex(), os.O_RDWR | os.O_CREAT)
        if descriptor is None:
            yield False
            return
        try:
            # Who waited may come just after the one before let go: its record is looked for behind the lock, too.
            yield _locked(descriptor, wait_s, there) and not there()
        finally:
            os.close(descriptor)  # and the lock with it

    def _do(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """The result of `work` on the open database, or `otherwise` if the disk has none of it."""
        with self._guard:
            for _ in range(3):
                if self._unusable is not None:
                    break
                try:
                    return work(self._connection())
                except _UnusableError as why:
                    self._stop(str(why))
                except OSError as error:
                    self._stop(f"{error.filename or self.folder}: {error.strerror or error}")
                except sqlite3.Error as error:
                    self._failed(error)
                except UnicodeDecodeError as error:  # SQLite's own message, which quotes a damaged name
                    self._failed(sqlite3.DatabaseError(str(error)))
            return otherwise

    def _failed(self, error: sqlite3.Error) -> None:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            self._stop(f"{self.folder}: another process has held the file for {BUSY_S:.0f} s")
        elif code & 0xFF in _OF_THE_DISK and code != sqlite3.SQLITE_IOERR_SHORT_READ:
            self._stop(f"{self.folder}: {error}")
        else:
            self._set_aside(error)

    def _stop(self, why: str) -> None:
        self._unusable = why
        self.close()
        say(f"decisions are not kept: {why}")

    def _connection(self) -> sqlite3.Connection:
        if self._open is not None:
            process, connection = self._open
            if process == os.getpid() and not self._path(self._generation + 1).exists():
                return connection
            if process != os.getpid():  # a fork: closing it here would drop the parent's locks
                self._inherited.append(connection)
                self._open = None
            self.close()
        made_now = not self.folder.exists()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if made_now:
            self.folder.chmod(0o700)
        self._check_owned(self.folder)
        kind = file_system(self.folder)
        if NETWORK.fullmatch(kind):
            raise _UnusableError(f"{self.folder} is on a network file system ({kind}); TILEWRIGHT_CACHE names another folder")
        with self._opening():
            self._generation = max(self._generations(), default=0)
            self._open = (os.getpid(), self._connected(self._path(self._generation)))
        return self._open[1]

    def _connected(self, path: Path) -> sqlite3.Connection:
        with contextlib.suppress(FileExistsError):  # never opened by hand if it is there: closing it would drop SQLite's locks
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        for suffix in _SUFFIXES:  # SQLite opens all of them by their names, and replays what the log says
            self._check_owned(Path(f"{path}{suffix}"))
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise _UnusableError(f"{self.folder} has no memory that processes share, which a write-ahead log needs")
            for setting in ("synchronous = NORMAL", "trusted_schema = OFF", "cell_size_check = ON"):
                connection.execute(f"PRAGMA {setting}")
            for name in ("decisions", "verdicts", "tables"):
                connection.execute(f"CREATE TABLE IF NOT EXISTS {name} (key BLOB PRIMARY KEY, value BLOB NOT NULL)")
            columns = "key BLOB, candidate TEXT, value BLOB NOT NULL, PRIMARY KEY (key, candidate)"
            connection.execute(f"CREATE TABLE IF NOT EXISTS refused ({columns})")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_owned(self, path: Path) -> None:
        if (why := foreign(path)) is not None:
            raise _UnusableError(f"{path} {why}; TILEWRIGHT_CACHE names another folder")

    @contextlib.contextmanager
    def _opening(self) -> Generator[None]:
        """One process at a time opens the file or sets it aside: two that turn the log on at once would fail."""
        descriptor = open_own(self.folder / "opening", os.O_RDWR | os.O_CREAT)
        try:
            if not _locked(descriptor, BUSY_S, lambda: False):
                raise _UnusableError(f"{self.folder}: another process has been opening the file for {BUSY_S:.0f} s")
            yield
        finally:
            os.close(descriptor)

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Go on with another file. The damaged one stays under its name: other processes may have it open."""
        damaged = self._generation
        self.close()
        try:
            with self._opening():
                if max(self._generations(), default=0) == damaged:
                    os.close(os.open(self._path(damaged + 1), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                    self._delete_before(damaged)
        except (_UnusableError, OSError) as why:
            self._stop(str(why))
            return
        say(f"{self._path(damaged)} is damaged ({error}): it is set aside, and decisions are kept anew")

    def _generations(self) -> list[int]:
        names = (p.stem.removeprefix("decisions-") for p in self.folder.glob("decisions-*.sqlite"))
        return [int(n) for n in names if n.isdecimal()]

    def _path(self, generation: int) -> Path:
        return self.folder / f"decisions-{generation}.sqlite"

    def _delete_before(self, generation: int) -> None:
        for number in self._generations():
            if number < generation:
                for suffix in _SUFFIXES:
                    Path(f"{self._path(number)}{suffix}").unlink(missing_ok=True)


def _locked(descriptor: int, wait_s: float, enough: Callable[[], bool]) -> bool:
    """Lock a file within a time, unless waiting has become pointless."""
    end, pause = time.monotonic() + wait_s, 0.002
    while True:
        try:
            if lock(descriptor):
                return True
        except OSError:  # no locks there
            return False
        if time.monotonic() >= end or enough():
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def file_system(folder: Path) -> str:
    """The kind of file system a folder is on, as Linux names it; "" where that is not known."""
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
        where = folder.resolve()
    except OSError:
        return ""
    found = (0, "")
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 5:
            continue
        mount = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        if where.is_relative_to(mount) and len(mount.parts) >= found[0]:
            found = (len(mount.parts), right.split()[0])
    return found[1]


def user_cache() -> Cache | None:
    """The cache in the user's folder; None, said once, where there can be no such folder."""
    try:
        return _cache_in(cache_folder())
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
        other = "" if "TILEWRIGHT_CACHE" in why else "; TILEWRIGHT_CACHE names another folder"
        say(f"decisions are not kept: {why}{other}")
        return None


@functools.cache
def _cache_in(folder: Path) -> Cache:
    return Cache(folder)
