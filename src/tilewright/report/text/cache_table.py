"""The records of `cache info`, in sections."""

from __future__ import annotations

from rich.console import Console

from tilewright.report.schema import CacheInfo
from tilewright.report.text.tables import line, section

MOST = 8  # chips, and versions, that are listed one by one


def print_cache(out: Console, report: CacheInfo) -> None:
    """Print what is kept, and where."""
    if report.path is None:
        line(out, f"Decisions are not kept: {report.unusable}.")
        return
    section(out, "Decisions", [f"{report.records:,} in {report.bytes / 1024:,.0f} KiB: {report.path}"])
    for title, counted in (("By chip", report.by_chip), ("By version", report.by_version)):
        lines = [f"{number:,}  {name}" for name, number in counted.items()]
        others = [f"{sum([*counted.values()][MOST:]):,}  {len(lines) - MOST} others"] if len(lines) > MOST else []
        section(out, title, lines[:MOST] + others)
    if report.oldest is not None:
        section(out, "Made", [f"{report.oldest} to {report.newest}"])
    section(out, "Crashed or hung", [f"{r.candidate} on {r.problem}, {r.when}: {r.why}" for r in report.refused])
    if report.programs:
        section(out, "Programs", [f"{report.programs:,} in {report.programs_bytes / 2**20:,.0f} MiB"])
