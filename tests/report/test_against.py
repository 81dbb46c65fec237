"""`perf --against`: others beside us, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cli_programs import FAST, install_ceilings, invoke, write

from tilewright.cli.against import Case, beside_s, torch_peer
from tilewright.cli.given import Given
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.report.measure import rounds
from tilewright.report.measure.rounds import Here, Process, compete, ratio

CONTENDER = """
import os, sys, time
from tilewright.report.measure.rounds import serve

def prepare(case):
    if case["how"] == "refuses":
        raise ValueError("it cannot\\ndo this")
    if case["how"] == "dies":
        os.kill(os.getpid(), 9)
    if case["how"] == "prints":
        print("noise")
    if case["how"] == "hangs":
        time.sleep(60)
    def run():
        time.sleep(case["seconds"])
        return [[1.0, 2.0], [3.0]] if case["how"] == "several" else [1.0, 2.0]
    return run

serve(prepare)
"""


def contender(tmp_path: Path, name: str = "other") -> Process:
    (tmp_path / "contender.py").write_text(CONTENDER)
    return Process(name, [sys.executable, str(tmp_path / "contender.py")], {})


def test_turns_are_timed_and_held_in_between(tmp_path: Path) -> None:
    other = contender(tmp_path)
    try:
        assert other.take({"how": "prints", "seconds": 0.002}, tmp_path / "r.npy") is None
        assert 0.002 <= other.turn(0.0, 0.01, 3) < 1.0
        deadline = time.monotonic() + 10
        state = ""
        while state != "T" and time.monotonic() < deadline:  # a signal is taken when the process runs next
            state = Path(f"/proc/{other._child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T"  # stopped until it is asked again
        assert other.turn(0.0, 0.01, 3) >= 0.002
    finally:
        other.stop()
    assert other._child.poll() is not None


@pytest.mark.parametrize(("how", "why"), [("refuses", "it cannot"), ("dies", "its process was ended by SIGKILL")])
def test_one_that_cannot_is_named_with_its_reason_and_the_others_go_on(tmp_path: Path, how: str, why: str) -> None:
    bad = contender(tmp_path, "bad")
    try:
        times, refused = compete([bad, Here("us", lambda: [1.0])], {"how": how, "seconds": 0}, rounds=2, timed_s=0.001)
        assert refused == {"bad": why} and len(times["us"]) == 2
        assert bad.take({"how": "fine", "seconds": 0}) is None  # and can be asked for another case
    finally:
        bad.stop()


def test_one_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PREPARED_S", 1.0)
    other = contender(tmp_path)
    try:
        assert other.take({"how": "hangs", "seconds": 0}) == "no answer in 1 s"
    finally:
        other.stop()


def test_one_has_as_long_as_it_is_given_and_says_what_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "contender.py").write_text(CONTENDER.replace("    return run", "    run.note = 'half of it'\n    return run"))
    given = {"how": "fine", "seconds": 0.0}
    other = Process("other", [sys.executable, str(tmp_path / "contender.py")], {}, 60.0)
    hasty = Process("hasty", [sys.executable, str(tmp_path / "contender.py")], {}, 0.3)
    try:
        assert other.take(given, tmp_path / "r.npy") is None and other.note == "half of it"
        assert hasty.take({"how": "hangs", "seconds": 0.0}) == "no answer in 0 s"
    finally:
        other.stop()
        hasty.stop()


def test_contenders_end_with_who_asks(tmp_path: Path) -> None:
    """Killed without a word, the parent leaves no process behind, not even a held one."""
    (tmp_path / "contender.py").write_text(CONTENDER)
    parent = f"""
import sys, time
from tilewright.report.measure.rounds import Process
p = Process("other", [sys.executable, {str(tmp_path / "contender.py")!r}], {{}})
p.take({{"how": "fine", "seconds": 0}})
print(p._child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        asker.kill()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it lives on")


def test_a_slow_one_sits_out_and_the_ratio_is_of_common_rounds() -> None:
    slow, fast = Here("slow", lambda: time.sleep(0.02)), Here("fast", lambda: time.sleep(0.001))
    times, refused = compete([slow, fast], {}, rounds=4, warm_s=0, timed_s=0.001, least=1)
    assert not refused and len(times["slow"]) == 2 and len(times["fast"]) == 4
    assert ratio([1.0, 2.0, 4.0], [2.0, 8.0]) == 3.0


def test_torch_runs_the_program_and_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_ceilings(monkeypatch)
    graph = parse("f32[8,64] @ f32[64,32] + bias, relu")
    path = write(tmp_path, Graph("small", graph.inputs, graph.outputs, graph.output_names))
    monkeypatch.setattr("tilewright.cli.against.ROUNDS", 2)
    monkeypatch.setattr("tilewright.cli.against.TIMED_S", 0.005)
    result = invoke("perf", path, "--against", "torch,onnxruntime,xla", "--json", "-n", 1, *FAST)
    assert result.exit_code == 0, result.output
    torch_, onnxruntime, xla = json.loads(result.stdout)["against"]
    assert torch_["name"] == "torch" and torch_["why"] is None and torch_["time_us"] > 0
    assert all(p["what"] and "Raises" not in p["what"] and "\n" not in p["what"] for p in (torch_, onnxruntime, xla))
    assert torch_["ratio"] > 0 and torch_["difference"] < 1e-5
    assert onnxruntime["why"] == "it reads ONNX files alone" and onnxruntime["time_us"] is None
    assert xla["why"] == "it reads HLO and StableHLO alone"


def test_a_budget_bounds_the_preparing_of_peers_and_what_is_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not ready in its share is out; torch's takes kernels unmeasured once its share is over."""
    install_ceilings(monkeypatch)
    graph = parse("f32[8,64] @ f32[64,32] + bias, relu")
    path = write(tmp_path, Graph("small", graph.inputs, graph.outputs, graph.output_names))
    monkeypatch.setattr("tilewright.cli.against.LEAST_READY_S", 0.05)
    result = invoke("perf", path, "--against", "torch", "--json", "-n", 1, "--budget", "0.1")
    assert result.exit_code == 0, result.output
    (peer,) = json.loads(result.stdout)["against"]
    assert peer["why"] == "no answer in 0 s; a larger --budget gives it more" and peer["time_us"] is None
    given = Given(file=Path(path), batch=None, input_dims={}, inputs=None, fill0=(), fill1=(), seed=0)
    run = torch_peer(Case(given, "cpu", 1, ready_s=0.0))
    assert getattr(run, "note", "").startswith("the time was over: 1 of 1 problems by the first kernel, not the fastest")
    assert torch.isfinite(torch.as_tensor(run()[0])).all()
    assert getattr(torch_peer(Case(given, "cpu", 1)), "note", None) == ""


def test_an_unknown_peer_is_an_error() -> None:
    result = invoke("perf", "x.hlo", "--against", "cublas")
    assert result.exit_code == 2 and "'cublas' is none of torch, onnxruntime, xla" in result.output
    result = invoke("perf", "x.hlo", "--against", "")
    assert result.exit_code == 2 and "name some of torch, onnxruntime, xla" in result.output


@pytest.mark.slow
def test_xla_compiles_the_same_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    install_ceilings(monkeypatch)
    monkeypatch.setattr("tilewright.cli.against.ROUNDS", 2)
    monkeypatch.setattr("tilewright.cli.against.TIMED_S", 0.005)
    text = """HloModule m
ENTRY e {
  a = s8[16,32]{1,0} parameter(0)
  b = s8[32,8]{1,0} parameter(1)
  ROOT d = s8[16,8]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    (tmp_path / "m.hlo").write_text(text)
    result = invoke("perf", tmp_path / "m.hlo", "--against", "xla", "-n", 1, *FAST)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "Beside others" in words and "xla" in words and "equal" in words


def test_no_round_begins_once_the_time_is_over_but_the_least():
    one, other = Here("one", lambda: None), Here("other", lambda: None)
    times, _ = compete([one, other], {}, rounds=9, enough=3, within_s=0.0, warm_s=0, timed_s=0.001, least=1)
    assert {name: len(t) for name, t in times.items()} == {"one": 3, "other": 3}


def test_others_have_half_of_a_small_budget_and_of_a_large_one_what_they_take():
    assert beside_s(2.0, ["torch"]) == 1.0
    assert beside_s(100.0, ["torch"]) == beside_s(200.0, ["torch"]) < 20
