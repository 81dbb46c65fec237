"""Processes that this one starts: their end with it, their answers, and how they ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import IO, Any, Literal

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>: the signal a process gets when its parent ends


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, on Linux; elsewhere nothing does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answers(mode: Literal["w", "wb"]) -> IO[Any]:
    """Standard output for answers alone: what a library prints there from now on goes to standard error."""
    opened = os.fdopen(os.dup(1), mode)
    os.dup2(2, 1)
    return opened


def ending(exitcode: int) -> str:
    """The end of a process in words, from `Popen.returncode`: "was ended by SIGKILL" or "ended with status 3"."""
    return f"was ended by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with status {exitcode}"
