"""The trace that `perf --trace` writes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from cli_programs import FAST, block, install_ceilings, install_fake_library, invoke, write

from tilewright.report.measure.trace_events import CALLS, TRACKS


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


def test_a_trace_has_a_slice_for_each_step_of_each_call(tmp_path: Path) -> None:
    path = write(tmp_path, block())
    result = invoke("perf", path, "--trace", tmp_path / "t.json", "--json", "-n", 1, *FAST)
    assert result.exit_code == 0, result.output
    steps = json.loads(result.stdout)["steps"]
    trace = json.loads((tmp_path / "t.json").read_text())
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"} and trace["otherData"]["program"] == path
    events = trace["traceEvents"]
    for e in events:  # as the trace event format has it
        assert set(e) == {"name", "ph", "pid", "tid", "args"} | ({"cat", "ts", "dur"} if e["ph"] == "X" else set())
        assert e["ph"] in ("M", "X") and type(e["pid"]) is type(e["tid"]) is int and isinstance(e["name"], str) and e["name"]
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == dict(enumerate(TRACKS))
    by_track = {t: [e for e in events if e["ph"] == "X" and e["tid"] == t] for t in tracks}
    for slices in by_track.values():
        assert slices
        for a, b in pairwise(slices):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6  # one after the other, none over another
    calls, shown = by_track.values()
    assert calls[0]["ts"] == 0 and {e["cat"] for e in events if e["ph"] == "X"} == {"call"} | {s["kind"] for s in steps}
    assert [e["name"] for e in shown] == [s["name"] for s in steps] * CALLS
    assert [e["cat"] for e in shown] == [s["kind"] for s in steps] * CALLS
    assert [e["args"]["candidate"] for e in shown] == [s["candidate"] for s in steps] * CALLS
    assert len(calls) == CALLS
    for i, call in enumerate(calls):
        mine = shown[i * len(steps) : (i + 1) * len(steps)]
        assert call["ts"] <= mine[0]["ts"] and mine[-1]["ts"] + mine[-1]["dur"] <= call["ts"] + call["dur"] + 1e-6
    product = next(e for e in shown if e["cat"] == "gemm")
    assert product["args"]["gflops"] == pytest.approx(product["args"]["ops"] / product["dur"] / 1e3, rel=0.01, abs=2e-3)


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    result = invoke("perf", write(tmp_path, block()), "--trace", tmp_path / "no" / "t.json", "-n", 1, *FAST)
    assert result.exit_code == 2 and "cannot be written" in result.output
