"""A candidate that crashed or hung in one process is not tried by the next: it is refused with the sentence how, on the day."""

import json
import re
import time
from datetime import UTC, datetime

import msgspec
import pytest
import torch
from cli_programs import invoke, write
from dropped import dropped
from short_shares import shorten
from torture_cache import KEY

from tilewright import compiler
from tilewright.dtype import F32
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, input_
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.schedule import cache as cache_module
from tilewright.schedule import search as search_module
from tilewright.schedule import space
from tilewright.schedule import tuning_database as database
from tilewright.schedule.cache import Cache
from tilewright.schedule.candidate import discover
from tilewright.schedule.fork_server import SWITCH
from tilewright.schedule.record import Key, Lost
from tilewright.schedule.tuning_database import TuningDatabase

SIGSEGV = "ctypes.string_at(8)"
BUDGET_S = 20.0  # of which one problem takes a thousandth


def day(kept):
    """The day the one refusal kept was made, which need not be the day it is read: a suite may run over midnight."""
    (remembered,) = kept.lost()
    return datetime.fromtimestamp(remembered.made_s, UTC).date()


def sentence(kept):
    return f"crashed: SIGSEGV, on {day(kept)}; not tried again unless `tilewright tune --retry` asks for it"


def refusal(candidate="llvm", **changed):
    return Lost(msgspec.structs.replace(KEY, **changed), "f32[1]", candidate, "crashed: SIGSEGV", 1e9)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache in a folder of its own; what this process has seen crash is forgotten, as the next one has not seen it."""
    cache = Cache(tmp_path / "cache")
    shorten(monkeypatch)
    for module in (compiler, cache_module):
        monkeypatch.setattr(module, "user_cache", lambda: cache)
    monkeypatch.setattr(space, "LOST", {})
    monkeypatch.setattr(search_module, "LOST", space.LOST)
    monkeypatch.delenv(SWITCH, raising=False)
    yield cache
    cache.close()


@pytest.fixture
def candidates(tmp_path, monkeypatch):
    """The candidates that are found: a sound one and whatever a test adds."""
    found = [dropped(tmp_path, preference=30)]
    for module in (search_module, database):
        monkeypatch.setattr(module, "discover", lambda **_: found)
    return found


def graph(seed=0, rows=9):
    x = input_("x", F32, (rows, 17))
    weight = const(torch.randn(17, 12, generator=torch.Generator().manual_seed(seed)))
    return Graph("g", (x,), (gemm(x, weight),), ("y",))


def problem(rows):
    (decision,) = (s.decision for s in compiler.compile(graph(rows=rows), budget_s=0, cache=False).steps if s.decision)
    return decision.problem


def compiled(**how):
    """The decision of a new process."""
    space.LOST.clear()
    (decision,) = (s.decision for s in compiler.compile(graph(), **{"budget_s": BUDGET_S, **how}).steps if s.decision)
    return decision


def test_refusals_are_kept_by_key_and_candidate(tmp_path):
    cache = Cache(tmp_path)
    assert cache.keep_lost(refusal()) and cache.keep_lost(refusal("aten")) and cache.keep_lost(refusal(problem="other"))
    assert {r.candidate for r in cache.lost(KEY)} == {"llvm", "aten"} and len(cache.lost()) == 3
    for name in Key.__struct_fields__:
        value = getattr(KEY, name)
        other = msgspec.structs.replace(KEY, **{name: value + 1 if isinstance(value, int) else f"{value}'"})
        assert cache.lost(other) == [], name
    assert cache.keep_lost(msgspec.structs.replace(refusal(), why="no answer in 4 s: killed"))
    assert {r.why for r in cache.lost(KEY) if r.candidate == "llvm"} == {"no answer in 4 s: killed"}
    cache.evict_lost(refusal("aten"))
    assert [r.candidate for r in cache.lost(KEY)] == ["llvm"]
    cache._connection().execute("UPDATE refused SET value = zeroblob(100) WHERE key = ?", (KEY.digest(),))
    assert [r.key.problem for r in cache.lost()] == ["other"]
    assert cache.clear() == 0 and cache.lost() == []


def test_what_crashed_is_not_tried_by_the_next_process(kept, candidates, tmp_path):
    seen, elsewhere = tmp_path / "seen", problem(rows=10)
    bad = dropped(tmp_path, f"open({str(seen)!r}, 'a').write('x'); {SIGSEGV}", points=3)
    candidates.insert(0, bad)
    first = compiled()
    (lost,) = (r for r in first.rejected if r.kind == "lost")
    assert str(lost) == f"{bad.name} (point=0)" and lost.why == "crashed: SIGSEGV"
    (remembered,) = kept.lost()
    assert (remembered.candidate, remembered.why) == (bad.name, "crashed: SIGSEGV")
    assert abs(remembered.made_s - time.time()) < 600 and remembered.problem == str(first.problem)
    runs = seen.read_text()
    for how in ({"budget_s": 100.0}, {"budget_s": 1e-9}):  # a longer search; none, in this very process
        kept._connection().execute("DELETE FROM decisions")
        again = compiled(**how)
        assert [r.why for r in again.rejected if r.candidate == bad.name] == [sentence(kept)]
        assert again.kernel.candidate == candidates[1].name and seen.read_text() == runs
    assert TuningDatabase(detect("cpu"), kept).candidates(first.problem) is not None
    assert TuningDatabase(detect("cpu"), kept).candidates(elsewhere) is None


def test_it_is_kept_before_the_search_is_over(kept, candidates, tmp_path, monkeypatch):
    """An interruption right after the crash does not lose it."""
    candidates.insert(0, dropped(tmp_path, SIGSEGV))
    monkeypatch.setattr(search_module._Search, "_timed", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        compiled()
    assert len(kept.lost()) == 1 and kept.records() == []


def test_only_a_retry_tries_it_again(kept, candidates, tmp_path):
    mended = tmp_path / "mended"
    candidates.insert(0, dropped(tmp_path, f"if not os.path.exists({str(mended)!r}): {SIGSEGV}", preference=1))
    compiled()
    assert compiled().recalled
    still = compiled(cache=TuningDatabase(detect("cpu"), kept, retry=True))
    assert not still.recalled and any(r.kind == "lost" for r in still.rejected) and len(kept.lost()) == 1
    mended.touch()
    assert compiled().recalled and len(kept.lost()) == 1
    now = compiled(cache=TuningDatabase(detect("cpu"), kept, retry=True))
    assert not now.recalled and not any(r.kind == "lost" for r in now.rejected) and kept.lost() == []
    assert compiled(cache=TuningDatabase(detect("cpu"), kept, retry=True)).recalled


def test_a_choice_that_crashed_since_is_not_read_back(kept, candidates):
    (made,) = (compiled().kernel.candidate,)
    assert compiled().recalled
    TuningDatabase(detect("cpu"), kept).lost(compiled().problem, made, "crashed: SIGILL")
    candidates.append(next(c for c in discover() if c.name == "aten"))
    found = compiled()
    assert not found.recalled and found.kernel.candidate == "aten"


def test_explain_prints_the_sentence_and_the_cache_lists_it(kept, tmp_path):
    program = write(tmp_path, parse("f32[4,32] @ f32[32,16] + bias"))
    assert invoke("tune", program, "--budget", "0").exit_code == 0
    (problem,) = {
        s.decision.problem for s in compiler.compile(parse("f32[4,32] @ f32[32,16] + bias"), budget_s=0).steps if s.decision
    }
    kept.clear()
    TuningDatabase(detect("cpu"), kept).lost(problem, "aten", "crashed: SIGSEGV")
    said = " ".join(invoke("explain", program, "--budget", "0").stdout.split())
    assert f"aten: {sentence(kept)}" in said
    (listed,) = json.loads(invoke("cache", "info", "--json").stdout)["refused"]
    assert listed["candidate"] == "aten" and listed["why"] == "crashed: SIGSEGV" and listed["problem"] == str(problem)
    assert re.fullmatch(rf"{day(kept)}T.*\+00:00", listed["when"])
    said = " ".join(invoke("cache", "info").stdout.split())
    assert f"Crashed or hung aten on {problem}" in said and "crashed: SIGSEGV" in said
    result = invoke("tune", program, "--budget", "3", "--retry", "--json")
    assert result.exit_code == 0 and kept.lost() == []
