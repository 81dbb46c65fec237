"""`--untrusted`: a verb in a process of its own, with limits on time and memory.

That process reads and runs the program, and interprets the operations that nothing else knows. The first process learns only
how it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import click

from tilewright.errors import UnsupportedError

SUPERVISED = "TILEWRIGHT_SUPERVISED"  # this is the process of its own: bytes of address space, seconds of all processors
SECONDS, GIB = 120.0, 16.0


def supervise(verb: str, args: Sequence[str], seconds: float, gib: float) -> int:
    """Run a verb again, in a process of its own; the exit code that it ends with.

    Raises:
        UnsupportedError: it took more time, or the process was ended by a signal.
    """
    command = [sys.executable, "-m", "tilewright", verb, *args]
    environment = {**os.environ, SUPERVISED: f"{int(gib * 2**30)} {int(seconds * (os.cpu_count() or 1)) + 1}"}
    pipes = [None if _is_file(stream) else subprocess.PIPE for stream in (sys.stdout, sys.stderr)]
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=pipes[0], stderr=pipes[1], start_new_session=True
    )
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        hint = "--time-limit, if it is worth waiting for"
        raise UnsupportedError(f"the program was not done within {seconds:.0f} s", where="--untrusted", hint=hint) from None
    finally:
        with contextlib.suppress(OSError):  # with all that it started
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for text, err_too in ((out, False), (err, True)):
        if text:
            click.echo(text.decode(errors="replace"), nl=False, err=err_too)
    if child.returncode < 0:
        what = f"the program ended its process ({signal.Signals(-child.returncode).name})"
        raise UnsupportedError(what, where="--untrusted", hint="--memory-limit, if it is memory that it lacks")
    return child.returncode


def limit_this_process() -> None:
    """Have this process keep to the memory and time that it was given, if it is one of its own: also once nobody watches."""
    given = os.environ.get(SUPERVISED)
    if not given:
        return
    import resource

    for what, most in zip((resource.RLIMIT_AS, resource.RLIMIT_CPU), given.split(), strict=True):
        resource.setrlimit(what, (int(most), int(most)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def is_supervised() -> bool:
    """Tell whether this process is one of its own for an untrusted program."""
    return SUPERVISED in os.environ


def _is_file(stream: IO[str]) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError):
        return False
