"""What one process worked out, the next ones take over: decisions, verdicts on kernels, machine code, tables over rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import HELPERS

WORK = ("compiled", "verified", "expected", "timed", "searched")


def started(folder, *words, recheck="0"):
    own = {**os.environ, "TILEWRIGHT_CACHE": str(folder), "TILEWRIGHT_RECHECK": recheck, "TILEWRIGHT_WORKER": "0"}
    script = [sys.executable, str(HELPERS / "counted_process.py"), *map(str, words)]
    return subprocess.Popen(script, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.parametrize("words", [("linear", 1, 5), ("program", 4), ("program", 4, 4)])
def test_nothing_is_worked_out_twice(tmp_path, words):
    first = ended(started(tmp_path, *words))
    assert first["done"]["verified"] and first["done"]["compiled"] and first["done"]["searched"]
    second = ended(started(tmp_path, *words))
    assert {w: second["done"].get(w, 0) for w in WORK} == dict.fromkeys(WORK, 0)
    assert second["found"] == first["found"]


def test_a_sample_is_verified_again(tmp_path):
    first = ended(started(tmp_path, "linear", 1, 5))
    second = ended(started(tmp_path, "linear", 1, 5, recheck="1"))
    assert second["done"]["verified"] == first["done"]["verified"] and not second["done"].get("compiled")
    assert second["found"] == first["found"]


def test_three_processes_that_start_at_once_work_out_each_problem_once(tmp_path):
    rows = (1, 2, 3, 4, 5)
    alone = ended(started(tmp_path / "alone", "linear", *rows))
    together = [ended(p) for p in [started(tmp_path / "together", "linear", *rows) for _ in range(3)]]
    for what in ("verified", "searched"):
        assert sum(t["done"].get(what, 0) for t in together) == alone["done"][what], together
    assert all(t["found"] == alone["found"] for t in together)
