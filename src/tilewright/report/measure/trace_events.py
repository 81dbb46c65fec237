"""Timed calls of a program, step by step, as trace events: the JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewright.files import write_whole
from tilewright.report.explain.names import step_names
from tilewright.report.schema import Perf, encoded
from tilewright.report.words import travel_words
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

CALLS = 3
PROCESS = 1
TRACKS = ("calls", "steps")  # a track's thread is its place here


@dataclass(frozen=True)
class Span:
    """Something that took time: when it began, in seconds, and how long it lasted, in µs."""

    name: str
    began_s: float
    us: float


def traced(program: Executable, inputs: Sequence[torch.Tensor], calls: int = CALLS) -> list[list[Span]]:
    """A span for each step of each of several calls, one call after another, each waited for.

    On a GPU steps are placed by its own events, relative to the beginning of the call on the host.
    """
    program.run(inputs)  # warm
    return [(_on_gpu if program.target.kind == "cuda" else _on_cpu)(program, inputs) for _ in range(calls)]


def _on_cpu(program: Executable, inputs: Sequence[torch.Tensor]) -> list[Span]:
    marks: list[float] = []

    def mark(step: Step, values: list[Value]) -> None:
        marks.append(time.perf_counter())

    program.run(inputs, mark)
    marks.append(time.perf_counter())
    return [
        Span(name, begin, 1e6 * (end - begin)) for name, begin, end in zip(step_names(program), marks, marks[1:], strict=False)
    ]


def _on_gpu(program: Executable, inputs: Sequence[torch.Tensor]) -> list[Span]:
    marks: list[torch.cuda.Event] = []

    def mark(*_: object) -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    with torch.cuda.device(program.target.device):
        torch.cuda.synchronize()
        start = time.perf_counter()
        program.run(inputs, mark)
        mark()
        torch.cuda.synchronize()
    at = [marks[0].elapsed_time(m) for m in marks]  # ms
    return [
        Span(name, start + begin / 1e3, 1e3 * (end - begin))
        for name, begin, end in zip(step_names(program), at, at[1:], strict=False)
    ]


def write_trace(path: Path, report: Perf, calls: Sequence[Sequence[Span]]) -> None:
    """Write the trace of a program; it begins with the first call.

    Args:
        path: the .json file to write.
        report: the program's report; a step's slice carries its figures on the step.
        calls: the spans of each call, from `traced`.

    Raises:
        InputError: the file cannot be written.
    """
    origin = min((s.began_s for call in calls for s in call), default=0.0)
    events: list[dict[str, Any]] = [_named("process_name", 0, f"{report.program} on {report.target}")]
    events += [_named("thread_name", i, name) for i, name in enumerate(TRACKS)]
    for i, call in enumerate(calls, start=1):
        if call:
            whole = Span(f"call {i}", call[0].began_s, 1e6 * (call[-1].began_s - call[0].began_s) + call[-1].us)
            events.append(_slice(whole, 0, origin, "call", {"steps": len(call)}))
        for number, (span, row) in enumerate(zip(call, report.steps, strict=True)):
            said: dict[str, Any] = {
                "problem": row.problem,
                "candidate": row.candidate,
                "schedule": row.schedule or "default",
                "limit_us": row.limit_us,
                "median_us": row.time_us,
                "bytes": row.bytes,
            }
            if row.ops and span.us > 0:
                said |= {"ops": row.ops, "gflops": round(row.ops / span.us / 1e3, 3)}
            met = [t for t in report.traffic if t.number == number]
            if met:
                said["between ranks"] = [travel_words(t) for t in met]
                said |= {"sent_bytes": row.sent_bytes, "exposed_us": met[0].exposed_us, "hidden_us": met[0].hidden_us}
            events.append(_slice(span, 1, origin, row.kind, said))
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"program": report.program, "target": report.target},
        "traceEvents": events,
    }
    write_whole(path, encoded(document))


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": thread, "args": {"name": name}}


def _slice(span: Span, thread: int, origin: float, category: str, args: dict[str, Any]) -> dict[str, Any]:
    begin_ns = round(1e9 * (span.began_s - origin))  # whole, so that what follows at once does not overlap by a rounding
    end_ns = max(round(1e9 * (span.began_s - origin) + 1e3 * span.us), begin_ns)
    at = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return {"name": span.name or category, "cat": category, "ph": "X", **at, "pid": PROCESS, "tid": thread, "args": args}
