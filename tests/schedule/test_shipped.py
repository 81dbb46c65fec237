"""Decisions that come with the package: used where they fit, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from benchmarks import ship
from click.testing import CliRunner
from ptx import H200

from tilewright import compiler
from tilewright.dtype import F32
from tilewright.errors import InputError
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, input_
from tilewright.ir.graph import Graph
from tilewright.ir.ops import gemm
from tilewright.schedule import bench, budget, tuning_database
from tilewright.schedule import shipped as module
from tilewright.schedule.cache import Cache
from tilewright.schedule.candidate import Schedule, plan_for
from tilewright.schedule.key import digest_of
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import search
from tilewright.schedule.shipped import DIGITS, Shipped, add, measured, read
from tilewright.schedule.tuning_database import TuningDatabase

CPU = detect("cpu")
X, W = input_("x", F32, (8, 32)), const(torch.ones(32, 16))
PROBLEM = problem_of(gemm(X, W))


def points(name="llvm"):
    own = next(c for c in tuning_database.discover() if c.name == name)
    return list(plan_for(own, PROBLEM, CPU).schedules())


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file of this chip in a folder of its own, which nobody has read."""
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return tmp_path / f"{CPU.chip.name}.json"


@pytest.fixture
def counts(monkeypatch):
    """The searches for the program, and the kernels that were verified."""
    found = {"searched": 0, "verified": 0}
    for where, name, what in ((budget, "search", "searched"), (bench, "examine", "verified")):
        inner = getattr(where, name)

        def counted(*given, inner=inner, what=what, **how):
            found[what] += 1
            return inner(*given, **how)

        monkeypatch.setattr(where, name, counted)
    return found


def decided(known: TuningDatabase, budget_s=0.02):
    program = compiler.compile(Graph("g", (X,), (gemm(X, W),), ("y",)), budget_s=budget_s, cache=known)
    return program.steps[0].decision


def entry(known, schedule, *, candidate="llvm", text=None, cold=False, budget="long"):
    made = tuning_database.repeat(PROBLEM, CPU, candidate, schedule, {}).kernel.text
    digest = known.key_of(PROBLEM, 1.0).problem[:DIGITS]
    return Shipped(digest, cold, budget, candidate, schedule.knobs, 12.5, made[:DIGITS] if text is None else text)


def test_what_fits_is_built_and_verified_once_and_neither_searched_nor_timed(file, counts, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "0")
    point = points()[-1]  # the last that a search would have come to
    known = TuningDatabase(CPU, Cache(tmp_path / "cache"))
    add(file, known.key_of(PROBLEM, 1.0), [entry(known, point)])
    counts["verified"] = 0
    for budget_s in (0.02, 0, 1.5):
        found = decided(known, budget_s)
        assert (found.kernel.candidate, found.kernel.schedule, found.time_us) == ("llvm", point, 12.5)
        assert found.measured and found.recalled and found.verified
    assert counts == {"searched": 0, "verified": 1}
    assert decided(TuningDatabase(CPU, Cache(tmp_path / "cache"))).kernel.schedule == point
    assert counts == {"searched": 0, "verified": 1}
    assert decided(TuningDatabase(CPU, None)).kernel.schedule == point
    assert counts == {"searched": 0, "verified": 2}  # where nothing is kept


def test_what_was_built_once_is_not_compiled_again_wherever_its_weights_were(file, counts, tmp_path):
    known = TuningDatabase(CPU, Cache(tmp_path / "cache"))
    add(file, known.key_of(PROBLEM, 1.0), [entry(known, points()[-1], cold=True)])
    point = (PROBLEM, "llvm", points()[-1])
    assert known.to_build([PROBLEM]) == [point]
    assert decided(known, 0).kernel.schedule == points()[-1]
    other = TuningDatabase(CPU, Cache(tmp_path / "cache"))  # as another process has it
    assert other.to_build([PROBLEM]) == [] and decided(other, 0).kernel.schedule == points()[-1]
    assert not counts["searched"]
    assert not decided(TuningDatabase(CPU, Cache(tmp_path / "cache"))).recalled  # who measures asks where weights were


def test_a_program_kept_depends_on_what_was_measured_wherever_weights_were(tmp_path):
    known = TuningDatabase(CPU, Cache(tmp_path / "cache"))
    before = known.standing([digest_of(PROBLEM)])
    found = search(PROBLEM, CPU, budget_s=0.01)
    known.of_program(cold=True)
    known.keep(found, 1.0)
    known.of_program(cold=False)
    assert decided(known, 0).kernel.schedule == found.kernel.schedule
    assert known.holds(found) and known.standing([digest_of(PROBLEM)]) != before


def test_the_user_s_own_decision_comes_first(file, counts, tmp_path):
    known = TuningDatabase(CPU, Cache(tmp_path / "cache"))
    own = decided(known)
    assert counts["searched"] == 1
    other = next(s for s in points() if s != own.kernel.schedule)
    add(file, known.key_of(PROBLEM, 1.0), [entry(known, other)])
    assert decided(known, 0).kernel.schedule == own.kernel.schedule and counts["searched"] == 1


@pytest.mark.parametrize(
    "change",
    [{"chip": "other"}, {"processor": "x"}, {"cores": 99}, {"threads": 99}, {"numerics": "x"}, {"alignment_bytes": 1}],
)
def test_each_thing_of_the_key_counts(file, counts, change):
    known = TuningDatabase(CPU, None)
    add(file, msgspec.structs.replace(known.key_of(PROBLEM, 1.0), **change), [entry(known, points()[-1])])
    assert not decided(known).recalled and counts["searched"] == 1


@pytest.mark.parametrize("change", [{"driver": "x"}, {"toolkit": "x"}, {"libraries": "x"}, {"tilewright": "x"}])
def test_a_generated_kernel_is_known_by_its_text(file, counts, change):
    known = TuningDatabase(CPU, None)
    key = msgspec.structs.replace(known.key_of(PROBLEM, 1.0), **change)
    add(file, key, [entry(known, points()[-1])])
    assert decided(known).recalled and not counts["searched"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"text": "0" * DIGITS}, id="another text"),
        pytest.param({"budget": "short"}, id="less time than was asked for"),
        pytest.param({"cold": True}, id="weights from memory"),
    ],
)
def test_what_does_not_fit_is_searched_for(file, counts, how):
    known = TuningDatabase(CPU, None)
    add(file, known.key_of(PROBLEM, 1.0), [entry(known, points()[-1], **how)])
    assert not decided(known, 1.5).recalled and counts["searched"] == 1


def test_of_another_text_its_point_is_the_first_where_nothing_is_measured(file, counts, tmp_path, monkeypatch):
    """The kernels were changed since: its time says nothing, but that its point was the fastest is more than a model knows."""
    monkeypatch.setenv("TILEWRIGHT_RECHECK", "0")
    known = TuningDatabase(CPU, Cache(tmp_path / "cache"))
    point = points()[-1]
    add(file, known.key_of(PROBLEM, 1.0), [entry(known, point, text="0" * DIGITS)])
    counts["verified"] = 0
    assert known.to_build([PROBLEM]) == [(PROBLEM, "llvm", point)]
    for _ in "process", "another":
        found = decided(TuningDatabase(CPU, Cache(tmp_path / "cache")), 0)
        assert found.kernel.schedule == point and found.verified
        assert not found.measured and not found.recalled and found.time_us is None
        assert counts == {"searched": 0, "verified": 1}
        assert known.to_build([PROBLEM]) == []  # what was chosen in view of it is kept
    assert decided(known, 1.5).measured and counts["searched"] == 1, "with time to measure it is searched"


def test_of_another_text_a_point_that_is_offered_no_more_is_none(file, counts, monkeypatch):
    known = TuningDatabase(CPU, None)
    add(file, known.key_of(PROBLEM, 1.0), [entry(known, points()[-1], text="0" * DIGITS)])
    monkeypatch.setattr(tuning_database, "offered", lambda *given: False)
    assert decided(known, 0).kernel.schedule != points()[-1] and counts["searched"] == 1


def test_where_nothing_is_measured_it_does_not_count_where_weights_were(file, counts):
    known = TuningDatabase(CPU, None)
    add(file, known.key_of(PROBLEM, 1.0), [entry(known, points()[-1], cold=True)])
    assert decided(known, 0).recalled and not counts["searched"]


@pytest.mark.parametrize(("libraries", "used"), [(None, True), ("torch 1.0", False)])
def test_a_library_s_call_needs_its_libraries(file, counts, libraries, used):
    known = TuningDatabase(CPU, None)
    key = known.key_of(PROBLEM, 1.0)
    key = key if libraries is None else msgspec.structs.replace(key, libraries=libraries)
    add(file, key, [entry(known, points("aten")[0], candidate="aten")])
    assert decided(known).recalled is used
    assert (counts["searched"] == 0) is used


def test_a_point_that_nobody_can_build_is_none(file, counts):
    known = TuningDatabase(CPU, None)
    forged = msgspec.structs.replace(entry(known, points()[-1]), knobs=(("mr", 100_000),))
    gone = msgspec.structs.replace(forged, candidate="nobody", budget="short")
    add(file, known.key_of(PROBLEM, 1.0), [forged, gone])
    assert not decided(known).recalled and counts["searched"] == 1


def test_what_is_measured_anew_replaces_what_was_there(file):
    known = TuningDatabase(CPU, None)
    key, one = known.key_of(PROBLEM, 1.0), entry(known, points()[0])
    older = msgspec.structs.replace(key, tilewright="0.0.1")
    add(file, older, [one, msgspec.structs.replace(one, problem="p")])
    assert measured(file, older) == {one.place, ("p", False, "long")} and measured(file, key) == set()
    add(file, key, [msgspec.structs.replace(one, time_us=1.0), msgspec.structs.replace(one, budget="short")])
    assert measured(file, key) == {one.place, (one.problem, False, "short")} and measured(file, older) == {("p", False, "long")}
    assert sorted(d.time_us for g in read(file) for d in g.decisions) == [1.0, 12.5, 12.5]
    assert {g.tilewright for g in read(file)} == {"0.0.1", key.tilewright}


@pytest.mark.parametrize("content", [b"", b"{}", b'{"tilewright_shipped":2,"groups":[]}', b"\xff"])
def test_a_damaged_file_is_said_and_done_without(file, counts, content, caplog, monkeypatch):
    monkeypatch.setattr("tilewright.errors._said", set())
    file.write_bytes(content)
    with pytest.raises(InputError, match="no shipped decisions"):
        read(file)
    assert not decided(TuningDatabase(CPU, None)).recalled and counts["searched"] == 1
    assert "decisions that came with the package are not used" in caplog.text


def test_each_file_of_the_package_reads():
    folder = Path(module.__file__).parent / "shipped_decisions"
    for file in folder.glob("*.json"):
        assert all(g.key.chip == file.stem and g.decisions for g in read(file))


def test_what_is_measured_of_a_layer_serves_models_that_no_cache_holds(file, counts, tmp_path, monkeypatch):
    def quick(problem, target, **how):
        return replace(search(problem, target, budget_s=0.02, cold=how["cold"]), provisional="", time_us=3.0)

    monkeypatch.setattr(ship, "FAMILIES", {"tiny": [(512, 256, True)]})
    monkeypatch.setattr(ship, "search", quick)
    given = ["--family", "tiny", "--rows", "2", "--scheme", "w4g32", "--scheme", "float", "-o", str(file)]
    monkeypatch.setattr(ship.main.params[3].type, "choices", ("tiny",))
    done = CliRunner().invoke(ship.main, given, catch_exceptions=False)
    assert "2 measured" in done.output
    assert "0 measured" in CliRunner().invoke(ship.main, given, catch_exceptions=False).output, "nothing is left"
    module._fitting.cache_clear()
    module._groups.cache_clear()
    known = TuningDatabase(CPU, None)
    known.of_program(cold=True)
    for problem in ship.problems(CPU, ["tiny"], ["w4g32", "float"], ["bf16"], [2], 1e12):
        found = known.find(problem, {}, 1.5)
        assert found is not None and found.recalled and found.time_us == 3.0


def test_those_for_an_h200_are_of_the_problems_that_layers_pose(monkeypatch):
    """Each point is one that its candidate offers still: else a file is of no use to anybody."""
    pytest.importorskip("triton")
    chip = replace(H200, caches_bytes={"L2": 62914560, "shared": 232448})
    monkeypatch.setattr("tilewright.linear.kernels.detect", lambda device: chip)
    folder = Path(module.__file__).parent / "shipped_decisions"
    kept = {d.problem: d for g in read(folder / "nvidia_h200.json") for d in g.decisions}
    posed = list(ship.problems(chip, ["llama3-8b"], ["w4g64"], ["bf16"], [1, 16], 1e12))
    assert len(posed) == 12
    for problem in posed:
        d = kept[digest_of(problem)[:DIGITS]]
        assert tuning_database.offered(problem, chip, d.candidate, Schedule(d.knobs)), problem


def test_what_came_with_the_package_is_compiled_ahead_until_it_is_built(file, counts, tmp_path):
    known = TuningDatabase(CPU, Cache(tmp_path / "cache"))
    add(file, known.key_of(PROBLEM, 1.0), [entry(known, points()[-1])])
    assert known.to_build([PROBLEM]) == [(PROBLEM, "llvm", points()[-1])]
    assert decided(known, 0).recalled
    assert known.to_build([PROBLEM]) == [] and known.known(PROBLEM, 1.5)
    assert TuningDatabase(CPU, None, family="llvm").to_build([PROBLEM]) == []  # of part of the candidates nothing is shipped
