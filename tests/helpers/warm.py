"""Programs in processes of their own, which begin with torch imported: to import it takes longer than most of them do.

A process that imported torch, and does nothing else, forks one for each program. Environment, folder, path, arguments and
streams are the program's own, and so is every other module: ours, and those of its path. Programs that look at what is
imported, or at what Python reads when it starts, need `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

Code = tuple[CodeType, dict[str, Any]]  # and the names of the module that it runs in


class Program:
    """A program that runs; its standard error goes with its output if `together`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str | Path | None, given: str, together: bool
    ):
        self.returncode: int | None = None
        self._out = self._err = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        if not together:
            self._err = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._in = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._in.write(given)
        self._in.seek(0)
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(server())
        asked = json.dumps([list(command), dict(environment), str(folder or Path.cwd())]).encode()
        socket.send_fds(self._line, [len(asked).to_bytes(4, "little")], [f.fileno() for f in (self._in, self._out, self._err)])
        self._line.sendall(asked)
        self.pid = int.from_bytes(self._received(), "little")

    def _received(self) -> bytes:
        content = self._line.recv(4)
        assert len(content) == 4, "the process that forks programs has ended"
        return content

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; negative is the signal that ended it."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = int.from_bytes(self._received(), "little", signed=True)
            except (TimeoutError, BlockingIOError):  # the latter of a time of 0
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0, *self.said()) from None
        return self.returncode

    def said(self) -> tuple[str, str]:
        """Everything that it wrote up to now, to standard output and to standard error."""
        for file in (self._out, self._err):
            file.seek(0)
        return self._out.read(), "" if self._err is self._out else self._err.read()

    def kill(self) -> None:
        """Kill it, if it has not ended, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; give what it wrote. One that has not ended in time is killed."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.said()


def start(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    given: str = "",
    together: bool = False,
) -> Program:
    """Start what `python` would with the words of `command`: `-c` and a program, or a file; then its arguments. Its
    standard input is `given`."""
    return Program(command, os.environ if env is None else env, cwd, given, together)


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    given: str = "",
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does with its output captured."""
    program = start(command, env, cwd, given)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(list(command), program.returncode or 0, out, err)


@functools.cache
def server() -> str:
    """The socket of the process that forks: one for a process of tests, with which it ends."""
    kept = tempfile.TemporaryDirectory(prefix="warm-")
    at = f"{kept.name}/socket"
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, __file__, at], env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.communicate()  # its input ends
        kept.cleanup()

    atexit.register(end)
    return at


def serve(at: str) -> Code:
    """Fork a process for each program that is asked for, until standard input ends; return in each of them, with its code."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(at)
    listener.listen(64)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as events:
        for source in (listener, sys.stdin, woken):
            events.register(source, selectors.EVENT_READ)
        os.write(1, b"ready\n")
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    for pid in running:
                        os.killpg(pid, signal.SIGKILL)
                    sys.exit()
                elif key.fileobj is woken:
                    os.read(woken, 4096)
                    for pid in list(running):
                        ended, status = os.waitpid(pid, os.WNOHANG)
                        if ended:
                            with contextlib.suppress(OSError), running.pop(pid) as line:
                                line.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
                else:
                    line, _ = listener.accept()
                    head, streams, _, _ = socket.recv_fds(line, 4, 3)
                    content = b""
                    while len(content) < int.from_bytes(head, "little"):
                        content += line.recv(1 << 16)
                    pid = os.fork()
                    if not pid:
                        os.setsid()
                        line.sendall(os.getpid().to_bytes(4, "little"))
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for other in (line, listener, *running.values()):
                            other.close()
                        os.close(woken)
                        os.close(wake)
                        return program_of(streams, *json.loads(content))
                    running[pid] = line
                    for stream in streams:
                        os.close(stream)


def program_of(streams: Sequence[int], command: list[str], environment: dict[str, str], folder: str) -> Code:
    """Make this process one that was started with a command, an environment and a folder; give its code."""
    for i, stream in enumerate(streams):
        os.dup2(stream, i)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.modules["__main__"] = main = ModuleType("__main__")
    first, *words = command
    if first == "-c":
        text, *words = words
        file, at = "<string>", ""
    else:
        text, file, at = Path(first).read_text(), first, str(Path(first).parent)
        main.__file__ = first
    sys.argv = [first, *words]
    sys.path[:] = [at, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    return compile(text, file, "exec"), vars(main)


if __name__ == "__main__":
    for module in ("torch", "torch._dynamo", "torch.export._trace"):
        importlib.import_module(module)

    gc.freeze()  # else each would copy what it inherits when it counts references to it
    exec(*serve(sys.argv[1]))
