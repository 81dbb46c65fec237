"""Times of the kernels in a CUDA graph, as CUPTI sees them; who does the steps of a compiled program, and who was slower."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tilewright.runtime.executable import Executable

REPLAYS = 20


def kernels_of(replay: Callable[[], object], title: str) -> Table:
    """A row for each kernel, by name, blocks and threads: how often a replay has it, its own time, and how long after its
    beginning the next one begins (they overlap where one is launched early), medians in microseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return table_of(events, REPLAYS, title)


def table_of(events: Sequence[Mapping[str, Any]], replays: int, title: str) -> Table:
    """The same, of a trace's events."""
    ran = sorted((e for e in events if str(e.get("cat", "")) in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])
    own: dict[tuple[str, str, str], list[float]] = {}
    until: dict[tuple[str, str, str], list[float]] = {}
    for event, after in zip(ran, [*ran[1:], None], strict=True):
        size = [str(event.get("args", {}).get(name, "")) for name in ("grid", "block", "registers per thread")]
        key = (str(event["name"])[:60], " x ".join(size[:2]), size[2])
        own.setdefault(key, []).append(event["dur"])
        if after is not None:
            until.setdefault(key, []).append(after["ts"] - event["ts"])
    table = Table("kernel", "blocks x threads", "registers", "a step", "µs", "to the next", "in all", title=title)
    in_all = {key: statistics.median(until.get(key, [0.0])) * len(own[key]) / replays for key in own}
    for key in sorted(own, key=in_all.__getitem__, reverse=True):
        times = (statistics.median(own[key]), statistics.median(until.get(key, [0.0])), in_all[key])
        table.add_row(*key, f"{len(own[key]) / replays:g}", *(f"{t:.2f}" for t in times))
    return table


def choices_of(program: Executable) -> Table:
    """A row for each problem that the program's steps pose: how many do, who was chosen, and the others that were timed."""
    counts = Counter(s.decision.problem if s.decision is not None else s.part.kind for s in program.steps)
    table = Table("steps", "problem", "by", "µs", "next to it", title=program.launched)
    chosen = {s.decision.problem: s.decision for s in program.steps if s.decision is not None}
    for problem, count in counts.items():
        if isinstance(problem, str):
            table.add_row(str(count), problem, "", "", "")
            continue
        d = chosen[problem]
        timed = sorted((r.time_us, str(r)) for r in d.rejected if r.time_us is not None)[:3]
        others = "\n".join(f"{us:.2f} {name}" for us, name in timed)
        us = "" if d.time_us is None else f"{d.time_us:.2f}"
        table.add_row(str(count), str(problem)[:90], f"{d.kernel.candidate} {d.kernel.schedule}", us, others)
    return table
