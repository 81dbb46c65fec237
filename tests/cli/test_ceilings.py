"""Ceilings that a program's own products exceed: `perf` and `explain` say so and go on with better ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_programs import FAST, invoke, write

from tilewright import compiler
from tilewright.hardware import ceilings
from tilewright.hardware.load import Load
from tilewright.hardware.target import Target
from tilewright.ir.notation import parse
from tilewright.report.measure import work
from tilewright.report.measure.work import rates_seen

LINE = "f32[128,512] @ f32[512,256]"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """A machine whose f32 ceiling was kept far too low; measured again it is a thousand times any other's."""
    rates: list[float] = [1e-3]

    def measure(target: Target, key: str) -> ceilings.Record:
        rates.append(1e6)
        return ceilings.Record(key, {"f32": 1e6, "s8": 1.0}, 10.0, 8.0)

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "_measure", measure)
    monkeypatch.setattr(work, "TOLD_US", 0.0)
    from tilewright.hardware.detect import detect

    target = detect("cpu")
    ceilings._save(ceilings.Record(ceilings._key(target), {"f32": 1e-3, "s8": 1.0}, 10.0, 8.0), "cpu")
    return rates


@pytest.mark.parametrize("verb", [("perf", "-n", "2", *FAST), ("explain", "--budget", "0.2")])
def test_it_is_said_and_measured_again_once(kept: list[float], tmp_path: Path, verb: tuple[str, ...]) -> None:
    """`perf` has its own times; `explain` those that decided."""
    name, *options = verb
    program = write(tmp_path, parse(LINE))
    first = invoke(name, program, *options, "--json")
    assert first.exit_code == 0, first.output
    assert "note: the ceiling of f32 was measured too low, 0.0 Gop/s: a kernel reached " in first.stderr
    assert first.stderr.rstrip().endswith("measured again it is 1,000,000.0, and 1,000,000.0 is kept") and kept == [1e-3, 1e6]
    found = json.loads(first.stdout)
    (step,) = found["steps"] if name == "perf" else found["products"]
    assert step["limit_us"] < 1000  # at the old ceiling it was half a minute
    again = invoke(name, program, *options, "--json")
    assert again.exit_code == 0 and again.stderr == "" and len(kept) == 2


@pytest.mark.parametrize("verb", [("perf", "-n", "2", *FAST), ("explain", "--budget", "0.2")])
def test_limits_by_rates_of_a_busy_machine_are_said_not_to_be_reliable(
    kept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    """Once, and in JSON; where the rates were measured in quiet nothing is said."""
    from tilewright.hardware.detect import detect

    monkeypatch.setattr(work, "TOLD_US", float("inf"))
    name, *options = verb
    program, target = write(tmp_path, parse(LINE)), detect("cpu")
    assert "Limits are not" not in invoke(name, program, *options).stdout
    assert json.loads(invoke(name, program, *options, "--json").stdout)["limits_noise"] == ""
    monkeypatch.setattr(ceilings, "load_now", lambda device, threads: Load(of_cores=4, runnable=9.0, others=0.2))
    record = ceilings.Record(ceilings._key(target), {"f32": 1e-3, "s8": 1.0}, 10.0, 8.0, "9 runnable tasks on 4 cores")
    ceilings._save(record, "cpu")
    words = " ".join(invoke(name, program, *options).stdout.split())
    said = "Limits are not reliable, nor what was reached of them: rates were measured on a busy machine (9 runnable tasks on 4"
    assert words.count(said) == 1 and words.count("will be measured again when it is quiet") == 1
    found = json.loads(invoke(name, program, *options, "--json").stdout)
    assert found["limits_noise"] == "9 runnable tasks on 4 cores"
    above = "Above 100 % of the limit: this was measured too low on a busy machine."
    for more in ((), ("-v",)) if name == "perf" else ():
        text = " ".join(invoke(name, program, *options, *more).stdout.split())
        assert above in text and "the data stayed in a cache" not in text


def test_where_the_time_is_over_the_machine_is_not_measured_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A report then has no limits, and nothing is kept."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    program, page = write(tmp_path, parse(LINE)), tmp_path / "page.html"
    monkeypatch.setattr(work, "limit", lambda: None)
    for verb in ("perf", "explain"):
        told = invoke(verb, program, "--budget", "0.001", "--json", *(("--html", str(page)) if verb == "perf" else ()))
        assert told.exit_code == 0, told.output
        assert "`tilewright devices` measures and keeps them" in told.stderr
        with monkeypatch.context() as patch:
            patch.setattr(work, "limit", lambda: 3)
            threaded = invoke(verb, program, "--budget", "0.001").stderr
        assert "`tilewright devices --threads 3` measures and keeps them" in threaded
        found = json.loads(told.stdout)
        (step,) = found["steps"] if verb == "perf" else found["products"]
        assert not step["limit_us"] and found["groups"][0]["limit_us"] is None and found["groups"][0]["peak_fraction"] is None
        text = invoke(verb, program, "--budget", "0.001")
        assert text.exit_code == 0 and "the limit of this" not in text.stdout and "Sum of limits" not in text.stdout
    assert "not measured" in page.read_text() and not list((tmp_path / "cache").glob("ceilings-*.json"))


def test_what_is_kept_serves_where_there_is_no_time_to_measure_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tilewright import deadline
    from tilewright.hardware.detect import detect

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    target = detect("cpu")
    ceilings._save(ceilings.Record(ceilings._key(target), {"f32": 50.0, "s8": 1.0}, 10.0, 8.0, "9 runnable tasks"), "cpu")
    monkeypatch.setattr(ceilings, "load_now", lambda device, threads: Load())
    with deadline.until(0.0):
        kept = ceilings.with_ceilings(target)
        assert kept.peak_gops == {"f32": 50.0, "s8": 1.0} and kept.noise
        raised, (said,) = ceilings.corrected(kept, {"f32": 90.0})
        assert raised.peak_gops == {"f32": 90.0, "s8": 1.0} and raised.noise
        assert (
            said
            == "the ceiling of f32 was measured too low, 50.0 Gop/s: a kernel reached 90.0; no time is left, and 90.0 is kept"
        )
        assert ceilings.with_ceilings(target) == raised
        with pytest.raises(deadline.OverrunError):
            ceilings.with_ceilings(target, remeasure=True)


def test_rates_are_those_of_whole_products_that_take_long_enough() -> None:
    program = compiler.compile(parse(LINE), budget_s=0, cache=False)
    (step,) = program.steps
    ops = 2 * 128 * 512 * 256
    target = replace(program.target, peak_gops={"f32": 1.0})
    assert rates_seen([step, step], [100.0, 50.0], target) == {"f32": pytest.approx(ops / 50.0 / 1e3)}
    assert rates_seen([step], [19.9], target) == {} == rates_seen([step], [None], target)
    assert rates_seen([step], [100.0], replace(target, peak_gops={})) == {}
    rounding = replace(step, decision=replace(step.decision, kernel=replace(step.decision.kernel, roundoff=2.0**-8)))
    assert rates_seen([rounding], [100.0], target) == {}
    attention = compiler.compile(one_attention(), budget_s=0, cache=False)
    others = [s for s in attention.steps if s.part.kind != "gemm"]
    assert others and rates_seen(others, [100.0] * len(others), target) == {}


def one_attention():
    from tilewright.dtype import F32
    from tilewright.ir.build import input_
    from tilewright.ir.graph import Graph, Node
    from tilewright.ir.ops import Attention

    q = [input_(n, F32, (1, 2, 16, 8)) for n in "qkv"]
    return Graph("g", tuple(q), (Node(Attention(0.5), *q),), ("y",))
