"""A second process takes over what the first worked out: decisions, verdicts on kernels, machine code, tables over rows."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
import warm
from paths import HELPERS
from ptx import H200
from races import StillMeter

from tilewright.dtype import F32
from tilewright.hardware.detect import detect
from tilewright.hardware.load import Load
from tilewright.ir.build import input_
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.schedule import bench, measure
from tilewright.schedule.buckets import bucketed, recalled, recorded
from tilewright.schedule.cache import Cache
from tilewright.schedule.candidate import kernel_of, plan_for
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import Decision
from tilewright.schedule.tuning_database import TuningDatabase

WORK = ("compiled", "verified", "expected", "timed", "searched")


def started(folder, *words, recheck="0"):
    own = {**os.environ, "TILEWRIGHT_CACHE": str(folder), "TILEWRIGHT_RECHECK": recheck, "TILEWRIGHT_WORKER": "0"}
    return warm.start([str(HELPERS / "counted_process.py"), *map(str, words)], own)


def ended(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.parametrize("words", [("program", 4, 4), ("rows", 1, 3, 8), ("tuned", 1, 3)])
def test_nothing_is_worked_out_twice(tmp_path, words):
    first = ended(started(tmp_path, *words))
    assert first["done"]["verified"] and first["done"]["compiled"] and first["done"]["searched"]
    second = ended(started(tmp_path, *words))
    assert {w: second["done"].get(w, 0) for w in WORK} == dict.fromkeys(WORK, 0)
    assert second["found"] == first["found"]


def test_three_processes_that_start_at_once_work_out_each_problem_once(tmp_path):
    rows = (1, 2, 3, 4, 5)
    together = [ended(p) for p in [started(tmp_path, "linear", *rows) for _ in range(3)]]
    for what in ("verified", "searched"):
        assert sum(t["done"].get(what, 0) for t in together) == len(rows), together
    assert all(t["found"] == together[0]["found"] for t in together)
    later = ended(started(tmp_path, "linear", *rows, recheck="1"))  # the sample is all of them
    assert later["done"]["verified"] == len(rows) and not later["done"].get("compiled")
    assert later["found"] == together[0]["found"]


def test_three_commands_that_start_at_once_compile_a_file_once_between_them(tmp_path):
    file, columns = tmp_path / "products.hlo", (16, 24, 40)
    lines = ["HloModule m", "ENTRY e {", "x = f32[4,32] parameter(0)"]
    for i, n in enumerate(columns):
        lines += [f"w{i} = f32[32,{n}] parameter({i + 1})"]
        lines += [f"d{i} = f32[4,{n}] dot(x, w{i}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"]
    made = ", ".join(f"d{i}" for i in range(len(columns)))
    lines += [f"ROOT t = ({', '.join(f'f32[4,{n}]' for n in columns)}) tuple({made})", "}"]
    file.write_text("\n".join(lines))
    words = tmp_path / "cache", "explain", file, "--budget", "0"
    together = [ended(p) for p in [started(*words) for _ in range(3)]]
    total = Counter[str]()
    for each in together:
        total.update(each["done"])
    assert total["searched"] == len(columns) and (total["measured"], total["kept"]) == (1, 1), together
    assert total["verified"] >= len(columns) == len(together[0]["found"])
    assert all(t["found"] == together[0]["found"] for t in together)
    later = ended(started(*words))
    assert later["found"] == together[0]["found"] and not later["done"], "read back whole"


def test_a_table_needs_as_much_time_and_all_of_its_candidates(tmp_path, monkeypatch):
    target, cache = detect("cpu"), Cache(tmp_path)
    known = TuningDatabase(target, cache)

    def posed(rows):
        return problem_of(gemm(input_("x", F32, (rows, 32)), input_("w", F32, (32, 16)))), {}

    table = bucketed(posed, target, first=1, last=4, budget_s=0.05)
    key = known.key_of_rows(1, 4, [posed(1)[0], posed(4)[0]])
    assert known.key_of_rows(1, 8, [posed(1)[0], posed(4)[0]]) != key != known.key_of_rows(1, 4, [posed(1)[0], posed(3)[0]])
    stored = recorded(table, key, 2.0)
    known.keep_rows(stored)
    assert known.rows(key, 2.0) == stored == known.rows(key, 0.0) and known.rows(key, 2.1) is None
    known.keep_rows(msgspec.structs.replace(stored, budget_s=1.0))  # less time than the one that is there had
    assert known.rows(key, 2.0) == stored
    noisy = msgspec.structs.replace(stored, budget_s=3.0, provisional="9 runnable tasks on 2 cores")
    known.keep_rows(noisy)  # more time, and times that are not reliable
    assert known.rows(key, 2.0) == stored
    found = recalled(stored, lambda rows: posed(rows)[0], target)

    def shown(table):
        own = [(b, b.family.name, b.family.candidate, b.family.order) for b in table.buckets]
        return [(b.first, b.last, *f, b.at_first.time_us, b.at_last.kernel.schedule) for b, *f in own]

    assert shown(found) == shown(table)
    assert found.packings == table.packings and found.measured == table.measured
    gone = [msgspec.structs.replace(b, candidate="nobody") for b in stored.buckets]
    assert recalled(msgspec.structs.replace(stored, buckets=tuple(gone)), lambda rows: posed(rows)[0], target) is None
    cache.clear()
    assert known.rows(key, 0.0) is None
    known.keep_rows(noisy)
    assert known.rows(key, 2.0) == noisy
    assert recalled(noisy, lambda rows: posed(rows)[0], target).provisional == noisy.provisional
    monkeypatch.setattr(TuningDatabase, "_quiet", lambda self: True)
    assert known.rows(key, 2.0) == noisy, "by a process that began with this one"
    known.keep_rows(noisy := msgspec.structs.replace(noisy, budget_s=4.0, made_s=noisy.made_s - 60))
    assert known.rows(key, 2.0) is None and known.rows(key, 0.0) == noisy, "measured again where there is time"
    known.keep_rows(stored)
    assert known.rows(key, 2.0) == stored


def test_a_table_is_as_reliable_as_the_races_that_it_was_made_by(monkeypatch):
    def posed(rows):
        return problem_of(gemm(input_("x", F32, (rows, 32)), input_("w", F32, (32, 16)))), {}

    for load in (Load(), Load(of_cores=2, runnable=9.0, others=0.2)):
        for module in (measure, bench):
            monkeypatch.setattr(module, "Meter", StillMeter(load))
        table = bucketed(posed, detect("cpu"), first=1, last=2, budget_s=0.05)
        assert table.provisional.startswith(load.noise) and bool(table.provisional) == bool(load.noise)


def test_a_gpu_s_kernels_come_from_machine_code_on_the_disk(tmp_path, monkeypatch):
    """The decision on a layer for Hopper read back: its point alone is built, from Triton's cache; nothing is ranked."""
    pytest.importorskip("triton")
    from tilewright.candidates.triton.hopper.w4 import candidate as w4
    from tilewright.candidates.triton.runtime import module

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "0")
    problem = problem_of(parse("bf16[4,256] @ s4[256,256]^T group=64 -> bf16").outputs[0])
    problem = replace(problem, weights=tuple(i > 0 for i in range(len(problem.types))))
    plan = plan_for(w4.CANDIDATE, problem, H200)
    kernel = kernel_of(plan, next(iter(plan.schedules())))
    made = sorted((tmp_path / "triton").rglob("*.cubin"))
    known = TuningDatabase(H200, Cache(tmp_path / "cache"))
    known.keep(Decision(problem, kernel, None, (), False, True), 0)
    assert made and kernel.text

    module._machine_code.cache_clear()  # as in another process
    monkeypatch.setattr(type(plan), "schedules", None)
    monkeypatch.setattr("tilewright.schedule.tuning_database.repeat", None)
    again = TuningDatabase(H200, Cache(tmp_path / "cache")).find(problem, {}, 0)
    assert again.verified and again.kernel.schedule == kernel.schedule and again.kernel.text == kernel.text
    assert again.kernel.registers == kernel.registers
    assert sorted((tmp_path / "triton").rglob("*.cubin")) == made
