"""The console that reports are printed on: a terminal in its own width and colours, a pipe in plain text too wide to wrap."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from tilewright.errors import visible

PIPE_WIDTH = 160
PADDING = re.compile(r" +(?=\n)")
NARROWEST = 32  # nothing readable fits in less: a narrower terminal wraps the lines
WIDE = 120
LABEL_WIDTH = 56
AROUND_LABEL = 36  # columns: spinner, bar, clock and what is between


class _Console(Console):
    """A console that leaves a closed pipe to the command line, as any other printing does, and shows what has no shape of its
    own as what it is: no name in a report steers the terminal."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(visible(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = _seen(renderable)
        yield from super().render(renderable, options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Unpadded:
    """A file that is no terminal, written without the spaces by which tables fill their lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = file.encoding  # which the console asks for

    def write(self, text: str, /) -> int:
        self._file.write(PADDING.sub("", text))
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    def isatty(self) -> bool:
        return False


def _seen(text: Text) -> Text:
    """A text, its styles where they are, with a mark for each character that has no shape."""
    shown = text.copy()
    shown.plain = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.plain)
    return shown


def console(file: TextIO | None = None) -> Console:
    """The console on standard output; on a file of the same width if one is given. Only a terminal's lines end in spaces."""
    fixed = PIPE_WIDTH if not sys.stdout.isatty() and "COLUMNS" not in os.environ else None
    if file is not None and fixed is None:
        fixed = shutil.get_terminal_size().columns
    onto = sys.stdout if file is None else file
    if not onto.isatty():
        file = cast("TextIO", _Unpadded(onto))
    out = _Console(file=file, width=fixed, markup=False, highlight=False, emoji=False)
    if out.width < NARROWEST:
        out.width = NARROWEST
    return out


def printed(show: Callable[[Console], None]) -> str:
    """Output of a console as plain text."""
    text = io.StringIO()
    show(console(text))
    return text.getvalue().rstrip("\n")


class _Left(ProgressColumn):
    """A progress column with the time that is left of `within_s` seconds."""

    def __init__(self, within_s: float) -> None:
        super().__init__()
        self._within_s = within_s

    def render(self, task: Task) -> Text:
        seconds = max(0, math.ceil(self._within_s - (task.elapsed or 0.0)))
        return Text(f"{seconds // 60}:{seconds % 60:02d} left", style="progress.remaining")


@contextlib.contextmanager
def progress(what: str, within_s: float | None = None) -> Generator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, a terminal, while something long runs.

    The function given takes how many are done, how many there are, and what comes next. The bar shows what is left of
    `within_s`, if given, else how long it has been.
    """
    width = shutil.get_terminal_size().columns - len(what) - AROUND_LABEL
    label = Column(width=max(1, min(LABEL_WIDTH, width)), no_wrap=True, overflow="ellipsis")
    clock = TimeElapsedColumn() if within_s is None else _Left(within_s)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), clock)
    bar = Progress(
        *columns,
        TextColumn("{task.fields[next]}", table_column=label, markup=False),
        console=_Console(stderr=True, markup=False, highlight=False),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None, next="")

        def show(done: int, total: int, following: str) -> None:
            bar.update(task, completed=done, total=total, next=following)

        yield show
