"""The cache of decisions: what makes a record one's own, what becomes of it, and what is done without one."""

from __future__ import annotations

import math
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from paths import HELPERS
from short_shares import shorten
from torture_cache import KEY, record

from tilewright import compiler, threads
from tilewright.dtype import BF16, F32
from tilewright.errors import UnsupportedError
from tilewright.hardware.detect import detect
from tilewright.hardware.load import Load
from tilewright.ir.build import const, input_, map_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Attention, gemm
from tilewright.runtime.partition import decided, partition
from tilewright.schedule import bench, budget
from tilewright.schedule import cache as cache_module
from tilewright.schedule import key as key_module
from tilewright.schedule import tuning_database as database
from tilewright.schedule.bench import Bench
from tilewright.schedule.cache import Cache, file_system, user_cache
from tilewright.schedule.candidate import Schedule, concerns, kernel_of, plan_for, refusal
from tilewright.schedule.key import budgets_for, circumstances, digest_of, text_of
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.race import Race
from tilewright.schedule.record import Key, RejectedRecord
from tilewright.schedule.tuning_database import TuningDatabase

CPU = detect("cpu")
BUDGET_S = 20.0  # of which one problem takes a thousandth
QUIET = TuningDatabase._quiet  # which tests have no part of otherwise


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache in a folder of its own, which programs are compiled with."""
    cache = Cache(tmp_path / "cache")
    shorten(monkeypatch)
    monkeypatch.setattr(compiler, "user_cache", lambda: cache)
    monkeypatch.setattr("tilewright.errors._said", set())
    yield cache
    cache.close()


@pytest.fixture
def searches(monkeypatch):
    """The problems that were searched with time to measure."""
    seen: list[str] = []
    search = budget.search

    def counted(problem, target, **how):
        if how["budget_s"] > 0:
            seen.append(str(problem))
        return search(problem, target, **how)

    monkeypatch.setattr(budget, "search", counted)
    return seen


def program(*scales: float) -> Graph:
    """Products that differ in a number alone, one after the other."""
    x = input_("x", F32, (8, 32))
    y = x
    for i, scale in enumerate(scales):
        weight = const(torch.randn(32, 32, generator=torch.Generator().manual_seed(i)))
        y = map_("multiply", gemm(y, weight), const(torch.tensor(scale)))
    return Graph("g", (x,), (y,), ("y",))


def decisions(executable):
    return [s.decision for s in executable.steps if s.decision is not None]


def test_it_survives_many_writers_kills_and_flipped_bytes():
    done = subprocess.run([sys.executable, HELPERS / "torture_cache.py", "--small"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["8", "24", "100"]


def test_each_field_of_the_key_changed_alone_is_a_miss(tmp_path):
    cache = Cache(tmp_path)
    made = record("0")
    assert cache.put(made) and cache.get(KEY) == made
    for name in Key.__struct_fields__:
        value = getattr(KEY, name)
        other = msgspec.structs.replace(KEY, **{name: value + 1 if isinstance(value, int) else f"{value}'"})
        assert cache.get(other) is None, name
    assert cache.get(KEY) == made


def test_each_thing_that_a_choice_depends_on_is_in_the_key(monkeypatch):
    """Change what a field is made of where it comes from, and see the field change, and no other."""

    def fields():
        for made in (key_module._libraries, key_module.code_version, key_module._driver):
            made.cache_clear()
        return msgspec.structs.asdict(circumstances(target, excess_precision=excess))

    target, excess, real = replace(CPU, kind="cuda"), False, key_module.version
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    before = fields()
    changed = {}
    for what, new in {
        "chip": replace(target, chip=replace(target.chip, name="other")),
        "name": replace(target, name="other"),
        "features": replace(target, features=target.features | {"other"}),
        "caches": replace(target, caches_bytes={**target.caches_bytes, "L9": 1}),
        "cores": replace(target, cores=99),
        "kind": replace(target, kind="cpu"),
    }.items():
        old, target = target, new
        changed[what] = {k for k, v in fields().items() if v != before[k]}
        target = old
    excess = True
    changed["excess"] = {k for k, v in fields().items() if v != before[k]}
    excess = False
    for what, patch in {
        "threads": lambda m: m.setattr(threads, "count", lambda: 99),  # of a GPU's host
        "driver": lambda m: m.setattr(key_module, "DRIVERS", (Path(__file__),)),
        "toolkit": lambda m: m.setattr(torch.version, "cuda", "14.0"),
        "torch": lambda m: m.setattr(torch, "__version__", "9.9"),
        "built": lambda m: m.setattr(torch.__config__, "show", lambda: "other"),
        "llvmlite": lambda m: m.setattr(key_module, "version", lambda p: p * (p == "llvmlite") or real(p)),
        "plug_ins": lambda m: m.setattr(key_module.plug_ins, "packages", lambda: "some-package 1.0 0123"),
        "onednn": lambda m: m.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        "mkl": lambda m: m.setenv("MKL_CBWR", "COMPATIBLE"),
        "verbose": lambda m: m.setenv("ONEDNN_VERBOSE", "1"),
        "version": lambda m: m.setattr(key_module, "version", lambda p: p * (p == "tilewright") or real(p)),
        "code": lambda m: m.setattr(key_module, "CHOOSING", ("candidates",)),
        "precision": lambda m: m.setattr(torch, "get_float32_matmul_precision", lambda: "medium"),
    }.items():
        with monkeypatch.context() as m:
            patch(m)
            changed[what] = {k for k, v in fields().items() if v != before[k]}
    assert fields() == before
    target = replace(target, kind="cpu")
    monkeypatch.setattr(threads, "count", lambda: 99)
    assert fields()["threads"] == 99
    assert changed == {
        "chip": {"chip"},
        **{name: {"processor"} for name in ("name", "features", "caches")},
        "cores": {"cores"},
        "kind": {"alignment_bytes", "toolkit", "threads"} | ({"driver"} if before["driver"] else set()),
        "threads": set(),
        "driver": {"driver"},
        "toolkit": {"toolkit"},
        **{name: {"libraries"} for name in ("torch", "built", "llvmlite", "plug_ins", "onednn", "mkl")},
        "verbose": set(),
        **{name: {"tilewright"} for name in ("version", "code")},
        **{name: {"numerics"} for name in ("excess", "precision")},
    }


def test_a_search_takes_what_had_as_much_time():
    assert budgets_for(2.0) == ("long",)
    assert budgets_for(0.1) == ("long", "short") and budgets_for(0) == ("long", "short", "none")


def test_the_text_of_a_problem_is_all_of_it_but_numbers():
    def text(scale=2.0, fn="relu", shape=(4, 8), dtype=F32, weight=True):
        x = input_("x", dtype, shape)
        w = const(torch.ones(8, 3).to(dtype.to_torch())) if weight else input_("w", dtype, (8, 3))
        y = map_(fn, map_("multiply", gemm(x, w, acc_dtype=F32), const(torch.tensor(scale))))
        parts = partition(compiler.optimise(Graph("g", (x,) if weight else (x, w), (y,), ("y",))))
        (problem,) = (p.posed[0] for p in parts if decided(p))
        return text_of(problem)

    assert text(2.0) == text(3.0)
    others = [text(), text(fn="tanh"), text(shape=(5, 8)), text(dtype=BF16), text(weight=False)]
    assert len(set(others)) == len(others)
    one, other = (problem_of(gemm(input_("x", F32, (4, 8)), input_("w", F32, (8, 3)))) for _ in range(2))
    assert digest_of(one) == digest_of(other)
    assert isinstance(one, Problem) and digest_of(replace(one, weights=(False, True))) != digest_of(one)


def test_constants_inside_a_problem_count_bit_by_bit():
    def with_table(values):
        inner = problem_of(gemm(input_("x", F32, (4, 8)), input_("w", F32, (8, 20))))
        (store,) = inner.op.stores
        return replace(inner, op=replace(inner.op, stores=(map_("add", store, const(torch.tensor(values))),)))

    zeros = [0.0] * 20
    nan = torch.tensor([float("nan")]).view(torch.int32).add(1).view(torch.float32).item()
    tables = [zeros, [-0.0, *zeros[1:]], [1.0, *zeros[1:]], [*zeros[1:], 1.0], [float("nan"), *zeros[1:]]]
    assert len({digest_of(with_table(t)) for t in tables}) == len(tables), nan
    assert digest_of(with_table(zeros)) == digest_of(with_table(list(zeros)))


def test_attentions_differ_by_their_own_numbers():
    q = [input_(n, F32, (1, 2, 16, 8)) for n in "qkv"]
    ops = [Attention(0.5), Attention(0.25), Attention(0.5, "upper"), Attention(0.5, "lower"), Attention(0.5, "upper", True)]
    assert len({digest_of(problem_of(Node(op, *q))) for op in ops}) == len(ops)


def test_what_was_measured_is_read_back_checked_and_not_timed_again(kept, searches):
    first = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S))
    assert len(searches) == 1 and not any(d.recalled for d in first)
    second = decisions(compiler.compile(program(3.0), budget_s=BUDGET_S))  # another number: the same record
    assert len(searches) == 1 and all(d.recalled and d.measured and d.verified for d in second)
    for a, b in zip(first, second, strict=True):
        assert (a.kernel.candidate, a.kernel.schedule, a.time_us) == (b.kernel.candidate, b.kernel.schedule, b.time_us)
        assert a.rejected == b.rejected
    third = decisions(compiler.compile(program(2.0), budget_s=0))
    assert all(d.recalled for d in third)
    fourth = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S, cache=False))
    assert len(searches) == 2 and not any(d.recalled for d in fourth)
    compiler.compile(program(2.0), budget_s=100.0)  # a search with more time than that one had
    assert len(searches) == 3
    compiler.compile(program(2.0), budget_s=BUDGET_S, excess_precision=True)
    assert len(searches) == 4


def test_a_choice_made_in_noise_is_used_and_raced_again_when_it_is_quiet(kept, searches, monkeypatch):
    noise, times = ["3 runnable tasks on 2 cores"], Bench.times
    monkeypatch.setattr(Bench, "times", lambda *given: Race(times(*given).laps, noise[0]))
    loads = [Load(of_cores=2, runnable=9.0, others=0.2), Load(of_cores=2)]
    monkeypatch.setattr(database, "load_now", lambda device, threads: loads[0])
    monkeypatch.setattr(database, "LOOKED_S", -1.0)
    monkeypatch.setattr(database, "TOGETHER_S", -60.0)  # as long after that one as if this began a minute later
    monkeypatch.setattr(TuningDatabase, "_quiet", QUIET)

    def compiled(budget_s=BUDGET_S):
        (found,) = decisions(compiler.compile(program(2.0), budget_s=budget_s))
        return found

    assert compiled().provisional == noise[0] and len(searches) == 1
    assert kept.records()[0].provisional == noise[0]
    again = compiled()
    assert again.recalled and again.measured and again.provisional == noise[0] and len(searches) == 1
    loads.pop(0)
    assert compiled(0).provisional == noise[0] and len(searches) == 1, "no time to race again"
    assert not compiled().recalled and len(searches) == 2, "quiet, so that it seemed; then it was not"
    assert kept.records()[0].provisional == noise[0]
    noise[0] = ""
    settled = compiled()
    assert not settled.recalled and not settled.provisional and len(searches) == 3
    assert compiled().recalled and len(searches) == 3 and kept.records()[0].provisional == ""


@pytest.mark.parametrize(("made", "searched"), [(-60.0, 1), (-1.0, 0), (1.0, 0)])
def test_processes_that_start_at_once_take_what_one_of_them_chose_in_noise(kept, searches, monkeypatch, made, searched):
    """They disturb each other's races, and each sees a quiet machine while it waits for another one."""
    compiler.compile(program(2.0), budget_s=BUDGET_S)
    (record,) = kept.records()
    kept.put(msgspec.structs.replace(record, provisional="3 runnable tasks on 2 cores", made_s=time.time() + made))
    monkeypatch.setattr(TuningDatabase, "_quiet", lambda self: True)
    (found,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S))
    assert len(searches) == 1 + searched and found.recalled is not bool(searched)


def test_the_second_of_two_processes_waits_for_what_replaces_a_provisional_record(tmp_path):
    one, two = Cache(tmp_path), Cache(tmp_path)
    assert one.put(msgspec.structs.replace(record("0"), provisional="3 runnable tasks on 2 cores"))
    with one.alone(KEY, 1) as held:
        assert held
        threading.Timer(0.2, lambda: one.put(record("0"))).start()
        with two.alone(KEY, 60) as too:
            assert not too and two.get(KEY) == record("0")


def test_a_record_that_does_not_hold_is_ignored(kept, searches):
    (good,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S))
    (made,) = kept.records()
    for candidate, knobs in (("nobody", made.knobs), (made.candidate, (("no", "such point"),)), ("reference", ())):
        kept.put(msgspec.structs.replace(made, candidate=candidate, knobs=knobs))
        before = len(searches)
        (found,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S))
        if candidate != "reference" and not (candidate == made.candidate and not made.knobs):
            assert len(searches) == before + 1 and not found.recalled
            assert kept.records()[0].candidate == found.kernel.candidate
    assert good.verified


def clearing(run, sources):
    """The results of a kernel that zeroes the first of its sources."""
    results = [t.clone() for t in run(sources)]
    sources[0].zero_()
    return results


WRONG = {
    "zeros": lambda run, sources: [torch.zeros_like(t) for t in run(sources)],
    "of another type": lambda run, sources: [t.double() for t in run(sources)],
    "of another shape": lambda run, sources: [t.reshape(4, 64) for t in run(sources)],
    "too few": lambda run, sources: [],
    "too many": lambda run, sources: [*run(sources), torch.zeros(1)],
    "and its sources written": clearing,
}


@pytest.mark.parametrize("results", WRONG)
def test_a_kernel_that_fails_its_check_today_is_ignored(kept, searches, monkeypatch, caplog, results):
    def made(*given):
        kernel = kernel_of(*given)
        return replace(kernel, prepare=lambda weights: partial(WRONG[results], kernel.prepare(weights)))

    compiler.compile(program(2.0), budget_s=BUDGET_S)
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "1")
    with monkeypatch.context() as m:
        m.setattr(database, "kernel_of", made)
        m.setattr(database, "search", failing)  # which checks it as a whole
        (found,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S))
    assert len(searches) == 2 and found.verified and not found.recalled
    assert "passed its check on f32[8,32] @ f32[32,32] * 2 before and fails it now: another kernel is chosen" in caplog.text


def test_a_kernel_of_which_no_elements_can_be_looked_at_is_checked_as_a_whole(kept, searches, monkeypatch, caplog):
    compiler.compile(program(2.0), budget_s=BUDGET_S)
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "1")
    monkeypatch.setattr(database, "spot_check", lambda *_: 1 / 0)
    repeated = []
    repeat = database.repeat
    monkeypatch.setattr(database, "repeat", lambda problem, *a, **k: repeated.append(problem) or repeat(problem, *a, **k))
    (found,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S))
    assert repeated == [found.problem] and found.recalled and len(searches) == 1 and "fails" not in caplog.text


@pytest.fixture
def examined(monkeypatch):
    """The problems whose kernels were verified."""
    seen: list[str] = []
    examine, spot_check = bench.examine, database.spot_check
    monkeypatch.setattr(bench, "examine", lambda problem, *a, **k: seen.append(str(problem)) or examine(problem, *a, **k))
    monkeypatch.setattr(database, "spot_check", lambda problem, *a: seen.append(str(problem)) or spot_check(problem, *a))
    return seen


def test_what_was_verified_is_not_verified_again_but_for_a_sample(kept, examined, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "0")
    compiler.compile(program(2.0), budget_s=BUDGET_S)
    before = len(examined)
    assert before
    for _ in range(2):
        assert decisions(compiler.compile(program(2.0), budget_s=0))[0].verified
    assert len(examined) == before
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "1")
    compiler.compile(program(2.0), budget_s=0)
    assert len(examined) == before + 1
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "no number")  # as if it were 1
    compiler.compile(program(2.0), budget_s=0)
    assert len(examined) == before + 2


def test_the_sample_is_a_share_drawn_by_key(monkeypatch):
    monkeypatch.setattr(database, "_rechecking_s", 0.0)  # what other tests of this process took
    drawn = [database._drawn(i.to_bytes(2)) for i in range(4000)]
    assert 100 < sum(drawn) < 320 and drawn == [database._drawn(i.to_bytes(2)) for i in range(4000)]
    monkeypatch.setattr(database, "_rechecking_s", database.RECHECKING_S)
    assert not any(database._drawn(i.to_bytes(2)) for i in range(4000))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: replace(d, kernel=replace(d.kernel, text="another")),
        lambda d: replace(d, kernel=replace(d.kernel, schedule=Schedule.of(mr=1))),
        lambda d: replace(d, kernel=replace(d.kernel, candidate="another")),
        lambda d: replace(d, problem=problem_of(gemm(input_("x", F32, (9, 32)), input_("w", F32, (32, 32))))),
    ],
)
def test_a_verdict_holds_for_one_kernel(kept, change):
    problem = problem_of(gemm(input_("x", F32, (8, 32)), input_("w", F32, (32, 32))))
    decision = database.repeat(problem, CPU, "llvm", next(iter(_llvm(problem).schedules())), {})
    known = TuningDatabase(CPU, kept)
    assert decision.kernel.text
    known.vouch(decision)
    for one, there in ((decision, True), (change(decision), False)):
        digest = known._verdict(one.problem, one.kernel).digest()
        assert (kept.verdict(digest) is not None) is there


def _llvm(problem):
    return plan_for(next(c for c in database.discover() if c.name == "llvm"), problem, CPU)


@pytest.mark.parametrize(("text", "parts", "shared"), [("t", (), True), ("", (), False), ("t", (("gemm", "onednn"),), False)])
def test_numbers_count_where_the_text_does_not_tell_them(kept, text, parts, shared):
    """One verdict serves a text that takes numbers as arguments; a library's call is verified for its own numbers."""
    one, other = (problems(program(scale))[0] for scale in (2.0, 3.0))
    kernel = replace(_llvm(one).build(next(iter(_llvm(one).schedules()))), text=text, parts=parts)
    known = TuningDatabase(CPU, kept)
    assert (known._verdict(one, kernel).digest() == known._verdict(other, kernel).digest()) is shared


def problems(graph):
    return [p.posed[0] for p in partition(compiler.optimise(graph)) if decided(p)]


def test_what_nobody_measured_is_kept_for_those_who_do_not_measure(kept, searches):
    (first,) = decisions(compiler.compile(program(2.0), budget_s=0))
    (made,) = kept.records()
    assert made.time_us is None and made.key.budget == "none" and not first.measured
    (again,) = decisions(compiler.compile(program(2.0), budget_s=0))
    assert not again.measured and not again.recalled and again.rejected == first.rejected
    assert again.kernel.schedule == first.kernel.schedule
    (timed,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S))
    assert timed.measured and len(searches) == 1 and len(kept.records()) == 2
    assert decisions(compiler.compile(program(2.0), budget_s=0))[0].recalled


def test_who_waited_for_a_lock_finds_what_the_one_before_left(tmp_path):
    one, two = Cache(tmp_path), Cache(tmp_path)
    assert one.put(record("0"))
    with two.alone(KEY, 1) as held:  # the lock is free
        assert not held


def failing(problem, target, **how):
    raise UnsupportedError("differs from the reference")


def test_a_hint_is_timed_with_the_rest_or_taken_where_it_was_made(kept, searches, tmp_path):
    compiler.compile(program(2.0), budget_s=BUDGET_S)
    (made,) = kept.records()
    kept.clear()
    (found,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S, cache=TuningDatabase(CPU, kept, hints=[made])))
    assert len(searches) == 1 and found.recalled and found.kernel.candidate == made.candidate
    (taken,) = kept.records()
    assert (taken.key, taken.knobs, taken.time_us) == (made.key, made.knobs, found.time_us)
    kept.clear()
    claims = RejectedRecord("\x1b[31mother", "slower: 9 µs", 9.0)
    lies = msgspec.structs.replace(made, time_us=1e-3, rejected=(claims,), problem="\x1b[2J", made_s=0.0)
    (found,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S, cache=TuningDatabase(CPU, kept, hints=[lies])))
    (taken,) = kept.records()
    assert len(searches) == 1 and found.recalled and found.measured and found.time_us == taken.time_us > 1e-2
    assert taken.rejected == found.rejected == () and taken.problem == made.problem and taken.made_s >= made.made_s
    kept.clear()
    (found,) = decisions(compiler.compile(program(2.0), budget_s=0, cache=TuningDatabase(CPU, kept, hints=[lies])))
    assert found.recalled and found.time_us is None and not found.measured and kept.records() == []
    kept.clear()
    elsewhere = msgspec.structs.replace(made, key=msgspec.structs.replace(made.key, chip="other"))
    (found,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S, cache=TuningDatabase(CPU, kept, hints=[elsewhere])))
    assert len(searches) == 2 and not found.recalled
    kept.clear()
    forged = msgspec.structs.replace(made, knobs=(("mr", 100_000),))
    (found,) = decisions(compiler.compile(program(2.0), budget_s=BUDGET_S, cache=TuningDatabase(CPU, kept, hints=[forged])))
    assert len(searches) == 3 and not found.recalled and found.kernel.schedule != Schedule(forged.knobs)


def test_a_hinted_point_comes_first_and_a_foreign_one_never(kept):
    problem = problem_of(gemm(input_("x", F32, (8, 32)), input_("w", F32, (32, 32))))
    target = CPU
    own = next(c for c in database.discover() if concerns(c, problem, target) and refusal(c, problem, target) is None)
    points = list(plan_for(own, problem, target).schedules())

    def first(knobs):
        key = msgspec.structs.replace(KEY, problem=digest_of(problem))
        hint = msgspec.structs.replace(record("0"), key=key, candidate=own.name, knobs=knobs)
        found = TuningDatabase(target, None, hints=[hint]).candidates(problem)
        return list(plan_for(next(c for c in found if c.name == own.name), problem, target).schedules())

    assert first(points[-1].knobs)[0] == points[-1] and {*first(points[-1].knobs)} == {*points}
    assert first((("mr", 12345),)) == points
    assert TuningDatabase(target, None, hints=[record("other")]).candidates(problem) is None


def test_one_process_measures_and_others_wait_for_a_while(tmp_path, monkeypatch):
    one, two = Cache(tmp_path), Cache(tmp_path)
    now_s, kept_s = 0.0, math.inf

    def sleep(seconds):
        nonlocal now_s
        now_s += seconds
        if now_s >= kept_s:
            one.put(record("0"))

    monkeypatch.setattr(cache_module, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    with one.alone(KEY, 1) as held:
        assert held
        with two.alone(KEY, 0.2) as too:
            assert not too
        assert 0.2 <= now_s < 0.4
        now_s, kept_s = 0.0, 0.2
        with two.alone(KEY, 60) as too:
            assert not too and two.get(KEY) == record("0")
        assert 0.2 <= now_s < 0.4
    one.clear()
    with two.alone(KEY, 1) as held:
        assert held


def test_files_are_the_owners_alone(tmp_path):
    cache = Cache(tmp_path / "new")
    cache.put(record("0"))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "new").iterdir()}
    assert set(modes.values()) == {0o600} and {"decisions-0.sqlite", "decisions-0.sqlite-wal"} <= set(modes)
    cache.close()
    (tmp_path / "new" / "decisions-0.sqlite").chmod(0o622)
    assert Cache(tmp_path / "new").get(KEY) is None


def planted_link(folder, name, to):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(to)


PLANTED = {
    "a folder that all may write to": (lambda f, out: f.chmod(0o777), "x can be written by other users"),
    "a folder that the group may write to": (lambda f, out: f.chmod(0o770), "x can be written by other users"),
    "a log that others may write": (
        lambda f, out: (f / "decisions-0.sqlite-wal").chmod(0o666),
        "-wal can be written by other users",
    ),
    "an index of the log that others may write": (lambda f, out: (f / "decisions-0.sqlite-shm").chmod(0o662), "-shm can be"),
    "another database by a link": (lambda f, out: planted_link(f, "decisions-0.sqlite", out / "other"), "sqlite is a link"),
    "a new file by a link": (lambda f, out: planted_link(f, "opening", out / "made"), "opening"),
    "a log by a link": (lambda f, out: planted_link(f, "decisions-0.sqlite-wal", out / "made"), "-wal is a link"),
    "a journal by a link": (lambda f, out: planted_link(f, "decisions-0.sqlite-journal", out / "made"), "-journal is a link"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_others_could_have_planted_is_not_used_and_said_once(tmp_path, kept, caplog, name):
    plant, said = PLANTED[name]
    folder, out = tmp_path / "x", tmp_path / "out"
    out.mkdir()
    (out / "other").write_bytes(b"")
    before = Cache(folder)
    assert before.put(record("0"))
    for suffix in ("-wal", "-shm"):  # which a process that was killed leaves
        content = (folder / f"decisions-0.sqlite{suffix}").read_bytes()
        (folder / f"kept{suffix}").write_bytes(content)
    before.close()
    for suffix in ("-wal", "-shm"):
        (folder / f"kept{suffix}").rename(folder / f"decisions-0.sqlite{suffix}")
        (folder / f"decisions-0.sqlite{suffix}").chmod(0o600)
    plant(folder, out)
    unusable(Cache(folder), caplog, said)
    assert sorted(p.name for p in out.iterdir()) == ["other"] and (out / "other").read_bytes() == b""


def test_a_folder_that_is_a_link_is_not_used(tmp_path, kept, caplog, monkeypatch):
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "x").symlink_to(tmp_path / "there")
    unusable(Cache(tmp_path / "x"), caplog, "x is a link")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "x"))
    assert user_cache() is None
    (line,) = lines_of(caplog)
    assert "it is a link" in line and list((tmp_path / "there").iterdir()) == []


def lines_of(caplog):
    lines = [r.getMessage() for r in caplog.records if r.name == "tilewright" and r.levelname == "WARNING"]
    caplog.clear()
    return lines


def unusable(cache, caplog, reason):
    assert cache.get(KEY) is None and not cache.put(record("0")) and cache.records() == [] and cache.clear() == 0
    assert cache.file is None
    (line,) = lines_of(caplog)
    assert line.startswith("decisions are not kept: ") and reason in line and reason in (cache.unusable or "")


def test_a_folder_that_cannot_be_is_done_without_and_said_once(tmp_path, kept, caplog):
    (tmp_path / "file").touch()
    unusable(Cache(tmp_path / "file" / "cache"), caplog, "Not a directory")


def test_a_network_file_system_is_done_without(tmp_path, kept, caplog, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {tmp_path}/net rw shared:1 - nfs4 server:/net rw\n"
        f"3 2 8:2 / {tmp_path}/net/local\\040disk rw - xfs /dev/sdb rw\nodd\n"
    )
    monkeypatch.setattr(cache_module, "MOUNTS", mounts)
    assert file_system(tmp_path) == "ext4" and file_system(tmp_path / "net" / "x") == "nfs4"
    assert file_system(tmp_path / "net" / "local disk" / "x") == "xfs"
    unusable(Cache(tmp_path / "net" / "cache"), caplog, "network file system (nfs4)")
    monkeypatch.setattr(cache_module, "MOUNTS", tmp_path / "none")
    assert file_system(tmp_path) == "" and Cache(tmp_path / "here").put(record("0"))


def test_where_the_log_cannot_be_on_it_is_done_without(tmp_path, kept, caplog, monkeypatch):
    class Rollback(cache_module.sqlite3.Connection):
        def execute(self, sql, *values):
            return super().execute("SELECT 'delete'" if "journal_mode" in sql else sql, *values)

    connect = cache_module.sqlite3.connect
    monkeypatch.setattr(cache_module.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Rollback))
    unusable(Cache(tmp_path / "x"), caplog, "write-ahead log")


def test_a_full_disk_is_done_without(tmp_path, kept, caplog):
    cache = Cache(tmp_path / "x")
    assert cache.put(record("0"))
    cache._connection().execute("PRAGMA max_page_count = 4")
    kept_ones = 1
    while cache.put(record(f"{kept_ones}" * 400)):
        kept_ones += 1
    assert kept_ones < 50
    (line,) = lines_of(caplog)
    assert "decisions are not kept" in line and "full" in line
    assert Cache(tmp_path / "x").get(KEY) == record("0")


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_someone_else_is_done_without(tmp_path):
    Cache(tmp_path / "x").put(record("0"))
    for folder in (tmp_path / "x", *(tmp_path / "x").parents):
        if folder.is_relative_to(tmp_path.parent.parent):
            folder.chmod(0o755)
    code = (
        f"import os, sys, pathlib; sys.path.insert(0, {str(HELPERS)!r}); from torture_cache import *\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"c = Cache(pathlib.Path({str(tmp_path / 'x')!r})); print(c.get(KEY), c.put(record('1')), c.get(KEY))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["None", "False", "None"], done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["decisions are not kept"]


def test_no_home_is_done_without(monkeypatch, kept, caplog, tmp_path):
    monkeypatch.delenv("TILEWRIGHT_CACHE", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *a, **k: "~/.cache/x")
    monkeypatch.chdir(tmp_path)
    assert user_cache() is None and user_cache() is None
    (line,) = lines_of(caplog)
    assert "home" in line and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_done_without(monkeypatch, kept, caplog, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    assert user_cache() is None
    (line,) = lines_of(caplog)
    assert str(tmp_path / "file") in line and line.endswith("; TILEWRIGHT_CACHE names another folder")


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to be read as one" * 30, b"SQLite format 3\0" * 40]
)
def test_a_file_that_is_no_database_is_set_aside(tmp_path, kept, caplog, content):
    file = tmp_path / "decisions-0.sqlite"
    file.touch(mode=0o600)
    file.write_bytes(content)
    cache, other = Cache(tmp_path), Cache(tmp_path)
    assert cache.get(KEY) is None and cache.put(record("0")) and cache.get(KEY) == record("0") == other.get(KEY)
    assert file.read_bytes() == content and cache.file == tmp_path / "decisions-1.sqlite"
    (line,) = lines_of(caplog)
    assert "decisions-0.sqlite is damaged" in line and "set aside" in line
    assert cache.clear() == 1 and not file.exists() and other.get(KEY) is None


@pytest.mark.parametrize("name", [b"refused", b"decisions"])
def test_a_damaged_name_that_no_message_can_quote_is_damage(tmp_path, kept, caplog, name):
    cache = Cache(tmp_path)
    assert cache.put(record("0"))
    cache.close()
    file = tmp_path / "decisions-0.sqlite"
    file.write_bytes(file.read_bytes().replace(b"CREATE TABLE " + name, b"CREATE \xf5ABLE " + name))
    assert cache.get(KEY) in (None, record("0")) and cache.put(record("1")) and record("1") in cache.records()
    assert cache.unusable is None


def test_a_process_notices_that_another_one_set_the_file_aside(tmp_path, kept):
    cache, other = Cache(tmp_path), Cache(tmp_path)
    assert cache.put(record("0")) and other.get(KEY) == record("0")
    (tmp_path / "decisions-1.sqlite").touch(mode=0o600)
    assert other.get(KEY) is None and other.put(record("1"))
    assert cache.get(KEY) is None and cache.records() == [record("1")]


def test_a_forked_child_has_a_connection_of_its_own(tmp_path):
    code = (
        f"import os, sys, pathlib; sys.path.insert(0, {str(HELPERS)!r}); from torture_cache import *\n"
        f"c = Cache(pathlib.Path({str(tmp_path)!r})); c.put(record('0'))\n"
        "def work(n): assert c.get(KEY) and c.put(record(str(n + 1)))\n"
        "codes = ended(children(3, work)); c.put(record('9'))\n"
        "print(codes, len(c.records()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[0, 0, 0] 5\n", done.stderr


def test_what_there_was_no_time_to_measure_serves_those_who_have_no_more(kept):
    problem = problem_of(gemm(input_("x", F32, (8, 32)), input_("w", F32, (32, 32))))
    decision = database.repeat(problem, CPU, "llvm", next(iter(_llvm(problem).schedules())), {})
    assert decision.time_us is None
    known, tuning = TuningDatabase(CPU, kept), TuningDatabase(CPU, kept, finish=True)
    known.keep(decision, 0.5)
    known.keep(decision, 0.1)
    assert known.known(problem, 0.5) and known.known(problem, 0) and not known.known(problem, 0.6)
    assert tuning.known(problem, 0) and not tuning.known(problem, 0.5)
    found = known.find(problem, {}, 0.5)
    assert not found.measured and not found.recalled and found.kernel.schedule == decision.kernel.schedule


def test_the_sample_ends_when_it_has_taken_its_time(kept, examined, monkeypatch):
    monkeypatch.setattr(database, "RECHECKED", 1.0)
    monkeypatch.setattr(database, "_rechecking_s", 0.0)
    compiler.compile(program(2.0), budget_s=BUDGET_S)
    before = len(examined)
    compiler.compile(program(2.0), budget_s=0)
    assert len(examined) == before + 1 and database._rechecking_s > 0
    monkeypatch.setattr(database, "_rechecking_s", database.RECHECKING_S)
    compiler.compile(program(2.0), budget_s=0)
    assert len(examined) == before + 1
