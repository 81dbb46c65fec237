"""The look that all reports share: plain tables, numbers to the right, units in the headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tilewright.report.schema import Finding, Input
from tilewright.report.words import listing, us

Align = Literal["left", "right"]
TABLE_WIDTH = 64  # the widest table needs as much for its titles and numbers


class _Table(Table):
    """A table; where it is too wide for the console, a block of labelled lines for each row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= TABLE_WIDTH:
            yield from super().__rich_console__(console, options)
            return
        label_width = max(len(str(column.header)) for column in self.columns)
        for i, row in enumerate(zip(*(column.cells for column in self.columns), strict=True)):
            if i:
                yield Text("")
            block = Table.grid(padding=(0, 2))
            block.add_column(no_wrap=True, style="bold", width=label_width)
            block.add_column(overflow="fold")
            for column, cell in zip(self.columns, row, strict=True):
                if str(cell):
                    block.add_row(column.header, cell)
            yield block


def noise_line(out: Console, noise: str, limits_noise: str = "") -> None:
    """Print that times are not reliable, and why; the same of limits. Nothing where they are."""
    for said in noise_words(noise, limits_noise):
        line(out, said, style="bold yellow")


def noise_words(noise: str, limits_noise: str) -> list[str]:
    """The sentences why times, and limits, are not reliable."""
    said = [f"Times are not reliable: {noise}."] if noise else []
    if limits_noise:
        said.append(
            f"Limits are not reliable, nor what was reached of them: rates were measured on a busy machine ({limits_noise}), "
            "and will be measured again when it is quiet."
        )
    return said


def table(*headers: tuple[str, Align]) -> Table:
    """An empty table; right-aligned columns hold numbers and never wrap."""
    made = _Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for title, align in headers:
        number = align == "right"
        made.add_column(title, justify=align, no_wrap=number, overflow="fold")
    return made


def heading(out: Console, text: str) -> None:
    """A blank line and a title."""
    out.print()
    out.print(Text(text, style="bold"))


def line(out: Console, text: str, *, indent: int = 0, style: str = "") -> None:
    """A paragraph, wrapped under its own indentation."""
    out.print(Padding(Text(printable(text), style=style), (0, 0, 0, indent), expand=False))


def printable(text: str) -> str:
    """The text of a file or of a program that crashed, without control characters that would move the cursor or colour the
    terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def hanging(label: str, text: str) -> RenderableType:
    """A label, and beside it a paragraph that wraps clear of the label."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(printable(text)))
    return grid


def findings(out: Console, title: str, found: Sequence[Finding], nothing: str) -> None:
    """A list of findings, the costly ones first, those alike together; or the sentence that there are none."""
    if not found:
        line(out, nothing)
        return
    heading(out, title)
    for op, times, why, cost, places in alike(found):
        head = Text(f"  {times}{op}" if op != "note" else "  note", style="bold")
        out.print(head.append("" if cost is None else f", {us(cost)} µs", style="not bold"))
        line(out, f"at {places}", indent=4, style="dim")
        line(out, why, indent=4)


def alike(found: Sequence[Finding]) -> Iterator[tuple[str, str, str, float | None, str]]:
    """Findings, costly ones first, those alike as one: what, how often ("3 x "), why, the cost in µs if known, and where."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for f in sorted(found, key=lambda f: -(f.cost_us or 0.0)):
        groups.setdefault((f.op, f.why), []).append(f)
    for (op, why), group in groups.items():
        costs = [f.cost_us for f in group if f.cost_us is not None]
        times = f"{len(group)} x " if len(group) > 1 else ""
        yield op, times, why, sum(costs) if costs else None, listing(list(dict.fromkeys(f.where for f in group)))


def input_lines(out: Console, inputs: Sequence[Input]) -> None:
    """Print what the program was run on; filled inputs stand out."""
    if not inputs:
        return
    heading(out, "Inputs")
    made = table(("name", "left"), ("type", "left"), ("data", "left"))
    for i in inputs:
        data = Text(f"{i.data} (filled)", style="yellow") if i.filled else Text(i.data)
        made.add_row(Text(i.name), Text(i.type), data)
    out.print(made)
    if any(i.filled for i in inputs):
        line(out, "Filled inputs flatter a measurement: kernels run faster and cooler on constant data.", style="yellow")


def section(out: Console, title: str, lines: Sequence[str]) -> None:
    """Print a title and its lines beside it."""
    for i, text in enumerate(lines):
        out.print(hanging(f"   {title if not i else '':<21}", text))
