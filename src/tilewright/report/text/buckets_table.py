"""The table of `gemm` for a product whose rows are a range."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.text import Text

from tilewright.hardware.ceilings import with_ceilings
from tilewright.hardware.target import Target
from tilewright.report.text.tables import Align, heading, line, noise_line, table
from tilewright.schedule.buckets import Buckets
from tilewright.schedule.search import Decision


class End(msgspec.Struct, frozen=True):
    """One end of a bucket: rows, the kernel's schedule, its time and the limit there in µs."""

    rows: int
    schedule: str
    time_us: float | None
    limit_us: float


class Range(msgspec.Struct, frozen=True):
    """Rows `first` to `last` and who serves them."""

    family: str
    first: End
    last: End


class Rows(msgspec.Struct, frozen=True):
    """A table over the rows of one product.

    Attributes:
        program: the product.
        target: the machine.
        ranges: in order, without gaps.
        packed_bytes: bytes of the packed weight, by the family that packs it.
        measured_us: times of the families that raced, by rows.
        noise: why these are not reliable, "" if they are.
    """

    program: str
    target: str
    ranges: list[Range]
    packed_bytes: dict[str, int]
    measured_us: dict[int, dict[str, float]]
    noise: str = ""


def describe_rows(buckets: Buckets, target: Target, name: str) -> Rows:
    """The table as data."""
    ceilings = with_ceilings(target)

    def end(rows: int, decision: Decision) -> End:
        problem = decision.problem
        ops = getattr(problem, "ops", 0)
        lhs = getattr(problem, "lhs", None)
        limit = ceilings.limit_us(ops, problem.bytes, lhs.dtype) if lhs is not None else 0.0
        return End(rows, str(decision.kernel.schedule), decision.time_us, limit)

    ranges = [Range(r.family.name, end(r.first, r.at_first), end(r.last, r.at_last)) for r in buckets.buckets]
    measured = {m: dict(times) for m, times in sorted(buckets.measured.items())}
    return Rows(name, target.name, ranges, dict(buckets.packings), measured, buckets.provisional)


def print_rows(out: Console, report: Rows) -> None:
    """Print the ranges, the packings' memory, and the race at each number of rows."""
    noise_line(out, report.noise)
    line(out, f"{report.program} on {report.target}", style="bold")
    made = table(
        ("rows", "right"),
        ("kernel", "left"),
        ("µs at the first", "right"),
        ("µs at the last", "right"),
        ("limit µs there", "right"),
    )
    for r in report.ranges:
        rows = f"{r.first.rows:,} to {r.last.rows:,}" if r.first.rows != r.last.rows else f"{r.first.rows:,}"
        made.add_row(rows, Text(r.family), _us(r.first.time_us), _us(r.last.time_us), _us(r.last.limit_us or None))
    out.print(made)
    for family, size in report.packed_bytes.items():
        line(out, f"{family} packs the weight once for all its rows: {size / 1e6:.1f} MB.")
    heading(out, "Measured, µs")
    names = list(dict.fromkeys(n for times in report.measured_us.values() for n in times))
    columns: list[tuple[str, Align]] = [(n, "right") for n in ("rows", *names)]
    made = table(*columns)
    for rows, times in report.measured_us.items():
        made.add_row(f"{rows:,}", *(_us(times.get(n)) for n in names))
    out.print(made)


def _us(x: float | None) -> str:
    return "" if x is None else f"{x:,.1f}"
