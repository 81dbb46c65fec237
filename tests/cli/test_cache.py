"""`tune`, and `cache info|clear`."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from cli_programs import invoke, write
from rich.console import Console
from short_shares import shorten
from torture_cache import KEY, record

from tilewright import compiler
from tilewright.dtype import F32
from tilewright.ir.build import input_
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.report.schema import CacheInfo
from tilewright.report.text.cache_table import print_cache
from tilewright.runtime import program_folder
from tilewright.schedule import cache as cache_module
from tilewright.schedule import tuning_database
from tilewright.schedule.cache import Cache
from tilewright.schedule.record import Exported, Lost, read_records

LINE = "f32[4,32] @ f32[32,16] + bias"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    shorten(monkeypatch)
    cache = Cache(tmp_path / "cache")
    for module in (compiler, cache_module):
        monkeypatch.setattr(module, "user_cache", lambda: cache)
    yield cache
    cache.close()


@pytest.fixture
def program(tmp_path: Path) -> str:
    return write(tmp_path, parse(LINE))


def tune(program, *options):
    result = invoke("tune", program, "--budget", "100", "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_tune_keeps_what_every_verb_reads_back(kept, program, tmp_path):
    first = tune(program)
    assert [p["how"] for p in first["problems"]] == ["measured"] and first["cache"] == str(kept.file)
    assert first["problems"][0]["problem"].startswith("f32[4,32] @ f32[32,16]") and first["problems"][0]["steps"] == 1
    second = tune(program)
    assert [p["how"] for p in second["problems"]] == ["read back"]
    assert [p["time_us"] for p in first["problems"]] == [p["time_us"] for p in second["problems"]]
    explained = json.loads(invoke("explain", program, "--budget", "100", "--json").stdout)
    assert explained["products"][0]["chosen"]["recalled"] is True
    assert "read back" in " ".join(invoke("explain", program, "--budget", "100").stdout.split())
    assert [p["how"] for p in tune(program, "--no-cache")["problems"]] == ["measured"]
    text = " ".join(invoke("tune", program, "--budget", "100").stdout.split())
    assert "1 problem in" in text and "1 read back" in text and "Kept in" in text


def test_more_time_than_usual_is_taken_where_a_search_had_less(kept, program, monkeypatch):
    monkeypatch.setattr(tuning_database, "ORDINARY_S", 0.06)  # which a thousandth of 60 is not quite

    def how(verb, budget):
        found = json.loads(invoke(verb, program, "--budget", budget, "--json").stdout)
        return found["problems"][0]["how"] if verb == "tune" else found["products"][0]["chosen"]["recalled"]

    assert [how("tune", "60"), how("tune", "70"), how("tune", "60"), how("tune", "70")] == ["measured"] * 2 + ["read back"] * 2
    assert not how("explain", "300") and how("explain", "300") and how("explain", "20")


def test_perf_says_which_choices_were_read_back(kept, tmp_path):
    """A line says so by default, and each step in --json: of two products one is known, and then both, and then nothing is."""
    shapes = ((4, 32, 16), (6, 32, 8))
    pairs = [(input_(f"a{m}", F32, (m, k)), input_(f"b{m}", F32, (k, n))) for m, k, n in shapes]
    known = write(tmp_path, Graph("one", pairs[0], (gemm(*pairs[0]),), ("y",)))
    both = write(tmp_path, Graph("two", (*pairs[0], *pairs[1]), tuple(gemm(*p) for p in pairs), ("y", "z")))

    def perf(program, *options):
        result = invoke("perf", program, "-n", "1", *options)
        assert result.exit_code == 0, result.output
        found = json.loads(invoke("perf", program, "-n", "1", "--json", *options).stdout) if options else None
        return " ".join(result.stdout.split()), found

    tune(known)
    said, found = perf(both, "--budget", "0")
    assert "2 choices: 1 read back from the cache, 1 not measured: the first kernel that agrees with the" in said
    assert found["choices"] == {"read back": 1, "not measured": 1}
    assert {s["chosen"] for s in found["steps"] if s["kind"] == "gemm"} == {"read back", "not measured"}
    said, _ = perf(both, "--budget", "100")
    assert "2 choices: 1 read back from the cache, 1 measured now." in said
    said, found = perf(both, "--budget", "100")
    assert "2 choices: 2 read back from the cache." in said and found["choices"] == {"read back": 2}
    assert found["summary"][-1] == "2 choices: 2 read back from the cache."
    said, found = perf(both, "--budget", "100", "--no-cache")
    assert "2 choices: 2 measured now." in said and {s["chosen"] for s in found["steps"]} <= {"measured", "not measured"}


def test_what_was_not_measured_is_kept_as_that(kept, program):
    assert [p["how"] for p in tune(program, "--budget", "0")["problems"]] == ["not measured"]
    assert [r.time_us for r in kept.records()] == [None]


def test_what_is_exported_is_taken_where_it_was_made(kept, program, tmp_path):
    file = tmp_path / "choices.json"
    made = tune(program, "--export", file)
    assert made["exported"] == str(file)
    assert list(read_records(file)) == kept.records()
    kept.clear()
    assert [p["how"] for p in tune(program, "--import", file)["problems"]] == ["read back"]
    (written,), (taken,) = read_records(file), kept.records()
    assert (written.key, written.candidate, written.knobs) == (taken.key, taken.candidate, taken.knobs)
    kept.clear()
    elsewhere = [msgspec.structs.replace(r, key=msgspec.structs.replace(r.key, chip="other")) for r in read_records(file)]
    file.write_bytes(msgspec.json.encode(Exported(1, "elsewhere", tuple(elsewhere))))
    assert [p["how"] for p in tune(program, "--import", file)["problems"]] == ["measured"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"tilewright_records": 2, "machine": "", "records": []}',
        b'{"tilewright_records": 1, "machine": "", "records": [{"candidate": 3}]}',
        msgspec.json.encode(Exported(1, "", (msgspec.structs.replace(record("0"), made_s=1e300),))),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(kept, program, tmp_path, content):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    result = invoke("tune", program, "--import", file)
    assert result.exit_code == 2 and "bad.json" in result.output and "tune --export" in result.output


def test_files_that_cannot_be_read_or_written_are_named(kept, program, tmp_path):
    result = invoke("tune", program, "--import", tmp_path / "none.json")
    assert result.exit_code == 2 and "No such file" in result.output and "none.json" in result.output
    for place in (tmp_path / "no" / "x.json", tmp_path):
        result = invoke("tune", program, "--export", place)
        assert result.exit_code == 2 and "cannot be written" in result.output
        assert kept.records() == []  # said before anything was measured
    assert not list(tmp_path.glob(".*.tmp"))


def test_what_is_shown_of_the_cache_moves_no_cursor(kept):
    kept.keep_lost(Lost(KEY, "f32[\x1b[2J]", "llvm", "crashed: \x1b[31mred\a", 1e9))
    kept.put(msgspec.structs.replace(record("0"), made_s=1e300))  # no record: there is no such day
    said = invoke("cache", "info", env={"COLUMNS": "200"})
    assert said.exit_code == 0 and "\x1b" not in said.stdout and "crashed:  [31mred" in " ".join(said.stdout.split("\n"))
    assert "0 in" in said.stdout


def test_cache_info_counts_and_clear_forgets(kept, program):
    tune(program)
    (made,) = kept.records()
    found = json.loads(invoke("cache", "info", "--json").stdout)
    assert found["records"] == 1 and found["bytes"] > 0 and found["path"] == str(kept.file) and found["unusable"] is None
    assert found["by_chip"] == {made.key.chip: 1} and found["by_version"] == {made.key.tilewright: 1}
    assert found["oldest"] == found["newest"] and found["oldest"].endswith("+00:00")
    assert str(made.key.chip) in invoke("cache", "info").stdout
    assert invoke("cache", "clear").exit_code == 1 and len(kept.records()) == 1  # nobody said anything
    said = invoke("cache", "clear", typed="n\n")
    assert said.exit_code == 0 and said.stdout.endswith("kept\n") and len(kept.records()) == 1
    assert invoke("cache", "clear", "--yes").stdout == "forgot 1 choice\n" and kept.records() == []
    assert json.loads(invoke("cache", "info", "--json").stdout)["oldest"] is None


def test_versions_beyond_the_most_common_are_one_line():
    versions = {f"0.1.0 {i:012x}": 20 - i for i in range(10)}
    found = CacheInfo("here", None, 155, 0, {"a chip": 155}, versions, None, None)
    with io.StringIO() as text:
        print_cache(Console(file=text, width=160), found)
        said = text.getvalue()
    assert len(re.findall("0.1.0", said)) == 8 and "23  2 others" in said and "others" not in said.split("By version")[0]


def test_the_programs_of_the_user_are_out_of_the_tests_reach(kept):
    assert program_folder.kept_programs() == [] and program_folder.clear() == 0
    with pytest.raises(FileNotFoundError, match="set no TILEWRIGHT_CACHE"):
        program_folder.folder()


def test_without_a_folder_it_says_so(kept, program, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    nowhere = Cache(tmp_path / "file" / "x")
    for module in (compiler, cache_module):
        monkeypatch.setattr(module, "user_cache", lambda: nowhere)
    assert tune(program)["cache"] is None
    assert "Not a directory" in invoke("cache", "info").stdout


def test_what_cannot_be_forgotten_is_no_success(kept, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache_module, "user_cache", lambda: Cache(tmp_path / "file" / "x"))
    for _ in range(2):
        result = invoke("cache", "clear", "--yes")
        assert result.exit_code == 2 and result.stdout == ""
        assert "choices cannot be forgotten" in result.stderr and "Not a directory" in result.stderr
    monkeypatch.setattr(cache_module, "user_cache", lambda: None)
    assert invoke("cache", "clear", "--yes").exit_code == 2


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(cache_module, "say", said.append)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert cache_module.user_cache() is None
    assert said == [f"decisions are not kept: {tmp_path / 'file'}: File exists; TILEWRIGHT_CACHE names another folder"]


def test_an_interruption_keeps_what_was_decided(tmp_path):
    w = input_("w", F32, (64, 64))
    inputs = [input_(f"x{n}", F32, (n, 64)) for n in range(100, 140)]
    names = tuple(f"y{n}" for n in range(100, 140))
    program = write(tmp_path, Graph("many", (w, *inputs), tuple(gemm(x, w) for x in inputs), names))
    env = {**os.environ, "TILEWRIGHT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tilewright", "tune", program, "--budget", "50"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    cache = Cache(tmp_path / "cache")
    while len(cache.records()) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "choices are kept" in said, said
    assert 2 <= len(cache.records()) < 40
    assert f"{len(cache.records())} choices are kept" in said
