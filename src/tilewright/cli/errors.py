"""Failures of the command line: one or two lines and an exit code, never a traceback unless asked for."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator
from types import FrameType
from typing import Any, NoReturn

import click

from tilewright.cli.ranks import PEER, tell
from tilewright.errors import LOGGER, PeerError, TilewrightError, visible

BEGAN = "tilewright.began"  # of a command's context: when the command began, by `time.monotonic`
DIFFERS = 1
BAD_INPUT = 2
BUG = 70
UNWRITTEN = 120  # as Python has it: what was printed could not be written as it ended
INTERRUPTED = 130
CLOSED_PIPE = 141
_TRACEBACK = "tilewright.traceback"
_TOLD = "tilewright.told"  # of a command's context: what Ctrl-C ended was said
NO_SPACE = "no space left where the output goes\n  try: another place, or free some"
# What torch says when memory runs out, in place of a MemoryError.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA out of memory", "failed to map segment")


class Group(click.Group):
    """Verbs in the order they are defined; every error of a verb ends here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> object:
        ctx.meta[BEGAN] = time.monotonic()
        try:
            with log_shown():
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except click.ClickException as error:
            vars(error)["message"] = visible(error.message)
            raise
        except (click.exceptions.Exit, click.Abort):
            raise
        except PeerError as error:
            _say(ctx, str(error))
            _end_at_once(PEER)
        except TilewrightError as error:
            _say(ctx, str(error))
            ctx.exit(BAD_INPUT)
        except KeyboardInterrupt:
            if not ctx.meta.get(_TOLD):
                interrupted("interrupted")
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            _discard_output()
            ctx.exit(CLOSED_PIPE)
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                _discard_output()
                _say(ctx, NO_SPACE)
                ctx.exit(BAD_INPUT)
            if isinstance(error, MemoryError) or any(said in str(error) for said in _OUT_OF_MEMORY):
                _say(ctx, "out of memory\n  try: smaller shapes (--batch, --input-dim), or another --device")
                ctx.exit(BAD_INPUT)
            said = (str(error).splitlines() or [""])[0]
            _say(
                ctx,
                f"{type(error).__name__}: {said}\n  this is a bug in Tilewright: please report it with what --traceback shows",
            )
            ctx.exit(BUG)


def interrupted(said: str) -> None:
    """Say how far a command had come that Ctrl-C ends: once, on a line of its own."""
    meta = click.get_current_context().find_root().meta
    if meta.get(_TOLD):
        return
    meta[_TOLD] = True
    begun = "\n" if sys.stderr.isatty() else ""  # a terminal shows ^C
    click.echo(f"{begun}{visible(said)}", err=True)


class _OnStandardError(logging.Handler):
    """A handler that writes where standard error is now: a progress bar puts a stream of its own there while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            click.echo(f"tilewright: {visible(record.getMessage())}", err=True)


@contextlib.contextmanager
def log_shown() -> Generator[None]:
    """Show what the package logs as lines on standard error, while a verb runs."""
    handler, before = _OnStandardError(logging.INFO), (LOGGER.level, LOGGER.propagate)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a library that sets up the root logger would have each line shown twice
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before[0])
        LOGGER.propagate = before[1]


@contextlib.contextmanager
def output_may_end() -> Generator[None]:
    """Exit with a sentence where standard output takes no more: what is printed before a verb runs, a page of help, too."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        click.echo(f"error: {NO_SPACE}", err=True)
        sys.exit(BAD_INPUT)


def end_imports_at_once() -> None:
    """Have Ctrl-C end the process while torch is imported: of an exception in the middle torch makes an abort, or goes on with
    parts missing. Later it raises KeyboardInterrupt, as ever."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        with contextlib.suppress(OSError):  # standard error is closed
            os.write(2, b"\n")
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


def leave(code: int) -> None:
    """End the process as Python does: threads joined, functions at exit called, output written. But its objects, with torch a
    million, are the system's to clear away: taking them apart takes a third of a second. Return where somebody watches Python,
    who may have something to say at its end."""
    monitoring: Any = getattr(sys, "monitoring", None)  # since 3.12
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    if sys.flags.inspect or sys.getprofile() or sys.gettrace() or any(tools):
        return
    getattr(threading, "_shutdown")()  # noqa: B009 - typeshed does not declare it
    getattr(atexit, "_run_exitfuncs")()  # noqa: B009
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or UNWRITTEN
    os._exit(code)


def _discard_output() -> None:
    """Point standard output at nothing, so that what its buffer still holds does not fail once more when Python exits."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_at_once(code: int) -> NoReturn:
    """End the process without waiting for threads that wait for other ranks."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def _say(ctx: click.Context, message: str) -> None:
    if ctx.meta.get(_TRACEBACK):
        click.echo(visible(traceback.format_exc()), err=True, nl=False)
    tell(visible(message))


def _remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_TRACEBACK] = True


traceback_option = click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_remember,
    help="Show where an error comes from.",
)
