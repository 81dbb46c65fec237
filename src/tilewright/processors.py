"""Processors that this process may use."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@cache
def usable() -> int:
    """Processors that this process may keep busy: those of its affinity, but no more than its control group's quota of time."""
    share = quota()
    count = len(affine())
    return count if share is None else max(1, min(count, math.floor(share)))


def affine() -> set[int]:
    """The processors of this process's affinity, by number."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def quota(of: Path = Path("/proc/self/cgroup"), at: Path = CGROUPS) -> float | None:
    """Processors' worth of time that the control groups of this process grant it, the least of all levels; None if any amount.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst (cpu.cfs_quota_us).
    """
    shares: list[float] = []
    for line in file_text(of).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        unified = number == "0" and not controllers
        if not unified and "cpu" not in controllers.split(","):
            continue
        roots = [at, at / "unified"] if unified else [at / controllers, at / "cpu"]
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for root in roots:
            for depth in range(len(parts) + 1):  # of a container, the path may name what only its host sees
                folder = root.joinpath(*parts[:depth])
                granted = file_text(folder / "cpu.max").split() if unified else []
                granted = granted or [file_text(folder / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period")]
                if len(granted) == 2 and granted[0].isdigit() and granted[1].isdigit() and int(granted[1]):
                    shares.append(int(granted[0]) / int(granted[1]))
    return min(shares, default=None)


def file_text(path: Path) -> str:
    """The contents of a file of the system; nothing where it cannot be read. It may name files that are called anything."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
