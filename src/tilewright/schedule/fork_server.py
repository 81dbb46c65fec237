"""Processes for work that may never come back.

Three of them, and sometimes more. The *parent* asks. Its one child, the *fork server*, has imported torch and the candidates
and does nothing but fork. So the third, the *worker*, which does the work, is replaced within milliseconds after a crash or a
hang. Beside it there may be *compile workers*, which compile. The fork server runs no parallel operation and touches no GPU, so
that forking it is sound. It is no fork of the parent, whose threads and `__main__` it must not inherit, but a fresh interpreter
with the parent's path and environment.

The fork server ends when it was not used for `IDLE_S`, and when the parent's end of its socket closes, however the parent
ended; the worker is killed when the fork server ends. Workers and compile workers are killed with the processes that they
started, such as an assembler: each leads a process group.
Messages are pickles between a process and its own children; nothing else ever reads them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any, cast

from tilewright import children
from tilewright.hardware.load import Had, stopped

START_S = 60.0  # for the fork server to import torch
UNUSED_S = 20.0  # after which one that was started and is not used ends
IDLE_S = 5.0  # after which the processes, 400 MB in size, end; the next search starts them again, in 2 seconds
SLICE_S = 0.05
HAD = 0.6  # of the time that a worker was given: less, and the machine is to blame for its silence
SPINS = "1000"  # some microseconds
PATIENCE = 2  # times the limit, for a worker that other programs keep from its processors
SWITCH = "TILEWRIGHT_WORKER"  # 0: everything in the process that asks
PULSE, KEY = 0, 8  # places of two numbers in the memory that parent and worker share

Serve = Callable[[Connection, mmap.mmap], None]


def _environment() -> dict[str, str]:
    """The environment of processes that measure. There GNU's OpenMP threads, which are torch's, do not spin for milliseconds
    after an operation: a generated kernel that is timed next would find their cores taken."""
    said = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    return {**os.environ} if said else {**os.environ, "GOMP_SPINCOUNT": SPINS}


class DiedError(Exception):
    """The worker is gone; the message says how.

    `contended`: it was killed for its silence, but other programs had the processors for much of that time.
    """

    def __init__(self, why: str, *, contended: bool = False) -> None:
        super().__init__(why)
        self.contended = contended


class UnavailableError(Exception):
    """No worker can be had, or this cannot be sent to one."""


def memory_file(name: str, size_bytes: int) -> int:
    """A descriptor of a file without a name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.truncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def end_group(pid: int) -> None:
    """Kill a worker of either kind, and what it started."""
    with contextlib.suppress(OSError):  # all of them are gone
        os.killpg(pid, signal.SIGKILL)


class ForkServer:
    """The parent's side of the two processes below it.

    Attributes:
        lock: held by who uses the worker.
        worker: the connection to it; None while there is none.
        ended: whether both processes were stopped, for good.
    """

    owner: int
    lock: threading.RLock
    ended: bool

    def __init__(self) -> None:
        if os.name != "posix" or not sys.executable:
            raise UnavailableError("no worker process: there is no Python to start here; kernels are tried in this process")
        self.owner, self.lock, self.worker = os.getpid(), threading.RLock(), cast("Connection | None", None)
        self.warmed: Connection | None = None
        self._pid, self._users, self.ended = 0, 0, False
        self._timer: threading.Timer | None = None
        self._greeting, self._greeted = threading.Lock(), False
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self._shared_fd = memory_file("shared", mmap.PAGESIZE)
        self._shared = mmap.mmap(self._shared_fd, mmap.PAGESIZE)
        self._control, theirs = socket.socketpair()
        path = f"import sys; sys.path[:] = {json.dumps([str(p) for p in sys.path])}"
        code = f"{path}; from tilewright.schedule.worker import main; main({theirs.fileno()})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the parent's to hear
                env=_environment(),
            )
        except OSError as error:
            raise UnavailableError(f"no worker process: {error}; kernels are tried in this process") from None
        finally:
            theirs.close()

    def leave(self) -> None:
        """End a use that `used_fork_server` began."""
        with _starting:
            self._users -= 1
            self.end_unless_used(IDLE_S)

    def end_unless_used(self, within_s: float) -> None:
        """Stop after so many seconds if nobody uses this by then. Called with `_starting` held."""

        def end() -> None:
            with _starting:
                if self._timer is timer and not self._users:
                    self.stop()

        self._timer = timer = threading.Timer(within_s, end)
        timer.daemon = True
        timer.start()

    def ready(self, within_s: float) -> bool:
        """Tell whether it is up, having waited for that for so long at most; also of one that has ended, as asking it says."""
        with self._greeting:
            try:
                if not self._greeted and select.select([self._control], [], [], max(0.0, within_s))[0]:
                    self._control.recv(1)
                    self._greeted = True
            except (OSError, ValueError):  # it was stopped meanwhile
                return True
            return self._greeted

    def number(self, at: int) -> int:
        """The integer of 64 bits at byte `at` of the memory shared with the server."""
        return int(struct.unpack_from("q", self._shared, at)[0])

    def ensure_worker(self) -> None:
        """Have a worker.

        Raises:
            UnavailableError: it could not be started.
        """
        if self.worker is None:
            self._pid, self.worker = self._forked(b"f")

    def compile_worker(self) -> tuple[int, Connection]:
        """Start one more process that does what a worker does; its id and connection. It ends when the connection is closed.

        Raises:
            UnavailableError: it could not be started.
        """
        return self._forked(b"a")

    def _forked(self, word: bytes) -> tuple[int, Connection]:
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [word], [theirs.fileno(), self._shared_fd])
            pid = struct.unpack("q", self._hear(8))[0]
        except (OSError, EOFError):
            ours.close()
            self.stop()
            raise UnavailableError(
                f"no worker process: {self._last_words() or 'it ended at once'}; kernels are tried in this process"
            ) from None
        except BaseException:  # its answer would be taken for that to the next question
            ours.close()
            self.stop()
            raise
        finally:
            theirs.close()
        if pid < 0:
            ours.close()
            raise UnavailableError("no worker process: it cannot fork; kernels are tried in this process")
        return pid, Connection(ours.detach())

    def _hear(self, count: int) -> bytes:
        """An answer of the fork server."""
        if not self.ready(START_S):
            raise TimeoutError
        self._control.settimeout(START_S)
        heard = b""
        while len(heard) < count:
            more = self._control.recv(count - len(heard))
            if not more:
                raise EOFError
            heard += more
        return heard

    def ask(self, request: bytes, limit_s: float | None, fd: int | None = None) -> Any:
        """The worker's answer.

        Raises:
            DiedError: there is none: it is gone, or gave no sign of life for so long and was killed.
        """
        assert self.worker is not None
        try:
            self.worker.send_bytes(request)
            if fd is not None:
                with socket.socket(fileno=os.dup(self.worker.fileno())) as s:
                    socket.send_fds(s, [b"x"], [fd])
            self._wait(limit_s)
            answer, healthy = pickle.loads(self.worker.recv_bytes())
        except (EOFError, ConnectionError):
            raise DiedError(self._how_it_ended()) from None
        except BaseException:
            self.end_worker()
            raise
        if not healthy:
            self.end_worker()
        return answer

    def _wait(self, limit_s: float | None) -> None:
        """Wait until there is an answer. Time in which processes are stopped, or the machine sleeps, does not count."""
        assert self.worker is not None
        waited, had, pulse, before, progress = 0.0, 0.0, self.number(PULSE), time.monotonic(), Had(self._pid)
        while not self.worker.poll(SLICE_S):
            now = time.monotonic()
            passed, before = min(now - before, 2 * SLICE_S), now
            had_now = progress.look(passed)
            if not stopped(self._pid):
                waited += passed
                had += had_now
            if self.number(PULSE) != pulse:
                waited, had, pulse = 0.0, 0.0, self.number(PULSE)
            if limit_s is not None and (had > limit_s or waited > PATIENCE * limit_s):
                self.end_worker()
                contended = had < HAD * waited
                busy = ", while other programs had the processors" if contended else ""
                given_s = waited if contended else limit_s
                raise DiedError(f"no answer in {given_s:.0f} s: killed{busy}", contended=contended)

    def end_worker(self) -> int:
        """Kill the worker, if there is one; how it ended, as `os.waitpid` says."""
        if self.worker is None:
            return 0
        end_group(self._pid)  # before it sees its end closed, and ends by itself
        self.worker.close()
        self.worker = None
        with contextlib.suppress(OSError, EOFError):
            self._control.sendall(b"w")
            return int(struct.unpack("q", self._hear(8))[0])
        return 0

    def _how_it_ended(self) -> str:
        """The sentence on a worker that closed its end."""
        assert self.worker is not None
        self.worker.close()
        self.worker = None
        try:
            self._control.sendall(b"w")
            status = int(struct.unpack("q", self._hear(8))[0])
        except (OSError, EOFError):
            end_group(self._pid)
            self.stop()
            return "crashed, and took the process that starts others along"
        if os.WIFSIGNALED(status):
            how = signal.Signals(os.WTERMSIG(status)).name
            how += " (out of memory?)" if how == "SIGKILL" else ""
        else:
            how = f"its process ended with status {os.waitstatus_to_exitcode(status)}"
        words = self._last_words()
        return f"crashed: {how}{f' ({words})' if words else ''}"

    def _last_words(self) -> str:
        """The last line that came on standard error, and forget it."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        self._said.seek(0)
        self._said.truncate()
        return lines[-1].strip()[:120] if lines else ""

    def forsake(self) -> None:
        """Close what a process that is not the owner inherited."""
        with contextlib.suppress(OSError):
            self._control.close()
            if self.worker is not None:
                self.worker.close()

    def stop(self) -> None:
        """End both processes."""
        global _known
        if self.owner != os.getpid():
            return
        if _known is self:
            _known = None
        if self.ended:
            return
        self.ended = True
        self._control.close()  # which it hears
        os.close(self._shared_fd)
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        if not self._greeted:  # it still imports, has no worker, and would hear nothing for seconds
            self._process.kill()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        except BaseException:  # Ctrl-C
            self._process.kill()
            raise


_known: ForkServer | None = None
_starting = threading.Lock()


def _part() -> None:
    """Let go of the sockets, in a fork of the parent: the fork server ends, and the worker hears, when nobody holds them."""
    global _starting
    _starting = threading.Lock()  # which another thread of the parent may have held
    if _known is not None:
        _known.forsake()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_part)

in_worker: bool = False


def fork_server() -> ForkServer:
    """The one of this process; a fork of it does not use its parent's. It may end before it is used: `used_fork_server`.

    Raises:
        UnavailableError: there can be none.
    """
    with _starting:
        return _current()


def used_fork_server() -> ForkServer:
    """The same, which now goes on at least until `leave` is called."""
    with _starting:
        known = _current()
        known._users += 1  # pyright: ignore[reportPrivateUsage]
        return known


def _current() -> ForkServer:
    global _known
    if in_worker or os.environ.get(SWITCH) == "0":
        raise UnavailableError("")
    if _known is None or _known.owner != os.getpid() or _known.ended:
        try:
            _known = ForkServer()
        except OSError as error:
            raise UnavailableError(f"no worker process: {error}; kernels are tried in this process") from None
        _known.end_unless_used(UNUSED_S)
    return _known


@atexit.register
def _end() -> None:
    with contextlib.suppress(KeyboardInterrupt):  # the process ends anyway
        if _known is not None:
            _known.stop()


_signs: list[Callable[[], None]] = []


def pulse() -> None:
    """Say that the work goes on that a worker was asked for, where it takes long though no call of a kernel does. Does nothing
    elsewhere."""
    for sign in _signs:
        sign()


def pulse_by(sign: Callable[[], None]) -> None:
    """Have `pulse` give this sign of life, in a worker."""
    _signs[:] = [sign]


def fork_server_main(fd: int, serve: Serve) -> None:
    """The fork server: fork a worker for each `f`, a compile worker for each `a`, say how the last worker ended for each `w`,
    end with the parent."""
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who inherits that it is ignored has no children to wait for
    me, child, compile_workers = os.getpid(), 0, list[int]()
    with contextlib.suppress(OSError):  # it is not waited for any more
        control.sendall(b"r")  # ready
    while True:
        word, fds, _, _ = socket.recv_fds(control, 1, 2)
        compile_workers = [pid for pid in compile_workers if os.waitpid(pid, os.WNOHANG)[0] == 0]
        for pid in [] if word else compile_workers:
            end_group(pid)
        if child and word in (b"", b"f"):
            end_group(child)
        status = 0
        if child and word != b"a":
            status = os.waitpid(child, 0)[1]
            end_group(child)  # what one that crashed had started
            child = 0
        if not word:
            os._exit(0)
        if word == b"w":
            control.sendall(struct.pack("q", status))
            continue
        try:
            made = os.fork()
        except OSError:
            made = -1
        if made == 0:
            control.close()
            _live(me, serve, *fds)
        with contextlib.suppress(OSError):  # by both: the parent may kill it before it has run
            os.setpgid(made, made)
        for each in fds:
            os.close(each)
        if word != b"a":
            child = max(made, 0)
        elif made > 0:
            compile_workers.append(made)
        control.sendall(struct.pack("q", made))


def _live(parent: int, serve: Serve, fd: int, shared_fd: int) -> None:
    """A worker, until it is killed or its parent is gone."""
    global in_worker
    in_worker = True
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    children.die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    try:
        serve(Connection(fd), mmap.mmap(shared_fd, mmap.PAGESIZE))
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)
