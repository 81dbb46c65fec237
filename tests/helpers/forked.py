"""Running what may crash, hang or fill memory: cases in forked children, with what became of each."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilewright.errors import TilewrightError

# Events of Python's audit hook that no reader of a program has a use for.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")


@dataclass
class Outcome:
    """The outcome of one case: right, typed, wrong, untyped, crash or hang; with a sentence."""

    kind: str
    what: str = ""
    opened: list[str] = field(default_factory=list)


class WrongError(AssertionError):
    """A result that is not what it should be."""


def outcomes(
    cases: Sequence[Callable[[], object]],
    *,
    seconds: float = 30.0,
    memory: int = 4 << 30,
    allowed: Callable[[str, bool], bool] = lambda path, writes: True,
) -> Iterator[Outcome]:
    """Run each case in a forked child, many to a child; a child that dies or hangs is that case's outcome, and another goes on.

    Args:
        cases: each returns if all was right, and raises what it raises otherwise.
        seconds: for one case.
        memory: bytes of address space beyond what this process has.
        allowed: whether a case may open a path (and write to it); what it may not is an outcome "file".
    """
    at = 0
    while at < len(cases):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _work(cases[at:], writer, memory, allowed)
        os.close(writer)
        died = ""
        while at < len(cases):
            found = _received(reader, seconds)
            if isinstance(found, str):
                died = found
                break
            at += 1
            yield found
        if died == "hang":
            os.kill(child, signal.SIGKILL)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        if died:
            at += 1
            yield Outcome("hang", f"over {seconds:.0f} s") if died == "hang" else Outcome("crash", f"wait status {status}")


def _received(reader: int, seconds: float) -> Outcome | str:
    end = time.monotonic() + seconds
    content = b""
    need = 4
    while len(content) < need:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return "hang"
        more = os.read(reader, need - len(content))
        if not more:
            return "died"
        content += more
        if len(content) == 4:
            need = 4 + struct.unpack("<I", content)[0]
    kind, _, what = content[4:].decode(errors="replace").partition("\0")
    return Outcome(kind, what)


def _work(cases: Sequence[Callable[[], object]], writer: int, memory: int, allowed: Callable[[str, bool], bool]) -> None:
    touched: list[str] = []
    watching = False

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal watching
        if not watching:
            return
        if event == "open":
            path, _, flags = (*arguments, None, None, None)[:3]
            writes = bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if isinstance(path, (str, bytes)):
                watching = False
                if not allowed(os.fsdecode(path), writes):
                    touched.append(f"{os.fsdecode(path)} ({'written' if writes else 'read'})")
                watching = True
        elif event.startswith(FORBIDDEN) and arguments[:1] != (sys.executable,):  # HLO's parser has a process of its own
            touched.append(event)

    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        sys.addaudithook(hook)
        with contextlib.suppress(OSError, ValueError):
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + memory, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for case in cases:
            touched.clear()
            watching = True
            kind, what = "right", ""
            try:
                case()
            except TilewrightError as error:
                kind, what = "typed", str(error)
            except WrongError as error:
                kind, what = "wrong", str(error)
            except MemoryError as error:
                kind, what = "memory", str(error)
            except BaseException as error:
                frames = traceback.extract_tb(error.__traceback__)
                last = next((f for f in reversed(frames) if "tilewright" in f.filename), frames[-1])
                kind, what = "untyped", f"{type(error).__name__}: {str(error)[:160]} at {last.filename}:{last.lineno}"
            watching = False
            if touched:
                kind, what = "file", ", ".join(touched)
            content = f"{kind}\0{what}".encode(errors="replace")
            os.write(writer, struct.pack("<I", len(content)) + content)
    finally:
        os._exit(0)
