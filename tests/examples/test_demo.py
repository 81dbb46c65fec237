"""The demo says what is wrong with its arguments before minutes of work, and which of its times are not reliable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import demo
from demo import Row, Turn
from tilewright.hardware.load import Load, Meter


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--only", "nothing"],
            "none of xla_s8, xla_s32, mixed_input, linear_gelu, bert, bert_int8, distilgpt2 starts with 'nothing'",
        ),
        (["--only", "bert", "--only", ":"], "starts with ':'"),
        (["--json", "none/rows.json"], "cannot be written: No such file or directory (none/rows.json)"),
        (["--out", "file/models"], "Not a directory: 'file/models'"),
    ],
)
def test_arguments_that_cannot_be(given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(demo, "run_program", never)
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = CliRunner().invoke(demo.main, given)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


BUSY = "9 runnable tasks on 4 cores, other processes had 3.0 of 4 cores"


def test_rounds_in_noise_are_taken_again() -> None:
    ours = iter([Turn(90.0, BUSY), Turn(10.0), Turn(80.0), Turn(11.0), Turn(12.0)])
    theirs = iter([Turn(20.0), Turn(21.0), Turn(70.0, BUSY), Turn(22.0), Turn(23.0)])
    assert demo.in_turns(lambda: next(ours), lambda: next(theirs)) == (Turn(11.0), Turn(22.0))


def test_rounds_end_though_the_noise_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WITHIN_S", 0.0)
    ours, theirs = iter([Turn(30.0, BUSY), Turn(10.0), Turn(20.0)]), iter([Turn(1.0), Turn(2.0), Turn(3.0)])
    assert demo.in_turns(lambda: next(ours), lambda: next(theirs)) == (Turn(20.0, BUSY), Turn(2.0))


def test_a_peer_that_cannot_run_is_asked_once() -> None:
    asked: list[None] = []
    assert demo.in_turns(lambda: Turn(10.0), lambda: asked.append(None)) == (Turn(10.0), None)
    assert len(asked) == 1


def test_a_turn_has_the_noise_that_perf_would_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "load", lambda self: Load(cores=4, of_cores=4, threads=1, runnable=9.0, others=3.5))
    assert demo.timed(lambda: None, seconds=0.0).noise == "9 runnable tasks on 4 cores, other processes had 3.5 of 4 cores"


def row(name: str, noise: str = "", limits_noise: str = "") -> Row:
    return Row(name, name, True, 1, 2000.0, 1000.0, "peer", 3000.0, noise=noise, limits_noise=limits_noise)


def shown(rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    monkeypatch.setattr(demo, "run_program", lambda program, *_: rows[program.key])
    only = [word for key in rows for word in ("--only", key)]
    result = CliRunner().invoke(demo.main, [*only, *more])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_table_taken_in_noise_says_so_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"xla_s8": row("xla_s8"), "linear_gelu": row("linear_gelu", BUSY)}
    file = tmp_path / "rows.json"
    said = shown(rows, monkeypatch, "--out", str(tmp_path), "--json", str(file))
    words = f"Times are not reliable: {BUSY}. 1 of 2 rows, marked ~, were taken in noise. Run it again when"
    assert " ".join(said.split()).startswith(words)
    quiet, noisy = (next(line for line in said.splitlines() if key in line) for key in ("xla_s8 ", "linear_gelu "))
    assert "~" not in quiet and noisy.count("~ ") == 3
    assert f"linear_gelu: {BUSY}" in said
    assert [r["noise"] for r in json.loads(file.read_text())] == ["", BUSY]


def test_a_table_taken_in_quiet_says_nothing_of_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown({"xla_s8": row("xla_s8")}, monkeypatch, "--out", str(tmp_path))
    assert said.lstrip().startswith("Tilewright on") and "~" not in said and "reliable" not in said


def test_limits_measured_in_noise_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown({"xla_s8": row("xla_s8", BUSY, "7 runnable tasks")}, monkeypatch, "--out", str(tmp_path))
    words = " ".join(said.split())
    assert "Limits are not reliable, nor what was reached of them" in words and "All rows were taken in noise. Run it" in words
