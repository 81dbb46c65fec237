"""One product for any number of rows: families, crossovers, packings, and the program that serves them."""

import itertools
import json
import re
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from ptx import H200
from w4_problems import posed as w4_problem

import tilewright
from tilewright.cli.verbs import cli
from tilewright.dtype import F32
from tilewright.errors import InputError, UnsupportedError
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, input_, map_, reshape
from tilewright.ir.graph import Graph, substitute
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.schedule import buckets as module
from tilewright.schedule.buckets import Bucket, PackingVariants, bucketed
from tilewright.schedule.candidate import Kernel, Refusal, Schedule, plan_for, refusal
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.search import Decision, Rejected

CPU = detect("cpu")


class Fake:
    """Takes `start + slope * rows` µs with a packing of `nr`, if that is given."""

    kinds = frozenset({"gemm"})
    devices = frozenset({"cpu"})
    ranks = "one"
    preference = 5
    package = ""
    packing_knobs = ("nr",)

    def __init__(self, name, packings, most=10**9, packed=0):
        self.name, self.packings, self.most, self.packed = name, packings, most, packed

    def plan(self, problem, target):
        return FakePlan(self, problem.M) if self.most >= problem.M else Refusal("too many rows")


@dataclass(frozen=True)
class FakePlan:
    of: Fake
    rows: int

    def schedules(self):
        for nr in self.of.packings:
            yield Schedule.of(mr=min(4, self.rows), nr=nr) if nr else Schedule()

    def build(self, schedule):
        packed = self.of.packed or 100 * dict(schedule.knobs).get("nr", 0)
        return Kernel(self.of.name, schedule, lambda weights: None, packed_bytes=packed)


def posed(rows):
    problem = problem_of(parse(f"f32[{rows},8] @ f32[8,4]").outputs[0])
    assert isinstance(problem, Problem)
    return Problem(problem.op, problem.types, (False, True)), {}


def timed_by(model, monkeypatch):
    """The search as a table of times: family name -> (start, slope)."""
    races = []

    def search(problem, target, *, budget_s, candidates, weights, cold, within_s):
        found = []
        for family in candidates:
            if refusal(family, problem, target) is None:
                start, slope = model[family.name]
                schedule = next(iter(plan_for(family, problem, target).schedules()), None)
                if schedule is not None:
                    found.append((start + slope * problem.M, family, schedule))
        found.sort(key=lambda f: f[0])
        (us, best, schedule), *others = found
        races.append((problem.M, [f.name for _, f, _ in found]))
        rejected = tuple(Rejected(f.name, "slower", "slower", s, t) for t, f, s in others)
        return Decision(problem, plan_for(best, problem, target).build(schedule), us, rejected, True, True)

    monkeypatch.setattr(module, "search", search)
    return races


def spans(table):
    return [(r.first, r.last, r.family.name) for r in table.buckets]


PADDED = {"some": lambda rows: max(rows, 8), "whole": lambda rows: -(-rows // 16) * 16, "two": lambda rows: 2 * rows + 1}


@pytest.mark.parametrize("padded", PADDED.values(), ids=PADDED)
def test_rows_that_do_not_grow_evenly_are_taken(padded):
    """The graph fills them up, as a server does, or has others besides."""

    def graph_at(rows):
        x = input_("x", F32, (padded(rows), 16))
        return Graph("g", (x,), (gemm(x, const(torch.eye(16))),), ("y",))

    program = tilewright.compile_rows(graph_at, last=64, budget_s=0.2, cache=False)
    given = torch.randn(program.at(rows=24).input_types["x"].shape)
    torch.testing.assert_close(program(given), given)


def test_inputs_are_as_many_for_every_number_of_rows():
    def graph_at(rows):
        x = [input_(n, F32, (rows, 16)) for n in "xy"[: 1 + (rows > 4)]]
        return Graph("g", tuple(x), (gemm(x[0], const(torch.eye(16))),), ("y",))

    with pytest.raises(InputError, match="1 inputs for 1 rows, and 2 for 64"):
        tilewright.compile_rows(graph_at, last=64, budget_s=0.2, cache=False)


def test_crossovers_are_found_by_bisection(monkeypatch):
    races = timed_by({"a nr=4": (10, 2), "b": (200, 1)}, monkeypatch)
    table = bucketed(posed, CPU, last=1000, candidates=[Fake("a", [4]), Fake("b", [0])])
    # b is 5 % faster from 10 + 2 m > 1.05 (200 + m) on
    assert spans(table) == [(1, 210, "a nr=4"), (211, 1000, "b")]
    assert table.packings == {"a nr=4": 400}
    assert len(races) <= 12 + 10 + 4
    assert table.at(210).family.name == "a nr=4" and table.at(211).family.name == "b"
    assert [m for m in table.measured if m.bit_count() == 1] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize(("budget_s", "raced"), [(1000.0, 11 + 7), (20.0, 12), (9.0, 8), (1.0, 2), (1e-3, 2)])
def test_a_table_is_made_within_its_time(monkeypatch, budget_s, raced):
    """Each race takes a second for each family, and no more than it is given but for the first of them. With less time fewer
    numbers of rows race, the ends always; all rows are served, from where they would be with more time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    races = timed_by({"a nr=4": (10, 2), "b": (200, 1)}, monkeypatch)
    timed = module.search

    def slow(problem, target, **how):
        assert how["budget_s"] <= how["within_s"] <= budget_s
        now[0] += max(1.0, min(how["within_s"], len(how["candidates"])))
        return timed(problem, target, **how)

    monkeypatch.setattr(module, "search", slow)
    table = bucketed(posed, CPU, last=1000, budget_s=budget_s, candidates=[Fake("a", [4]), Fake("b", [0])])
    assert now[0] - 1000.0 <= max(budget_s, 2.0) + 2.0  # two kernels more: one under way, one for an end that nobody won
    assert {1, 1000} <= set(table.measured) and len(table.measured) == raced and list(table.measured) == sorted(table.measured)
    (_, end, one), (start, _, two) = spans(table)
    assert (one, two) == ("a nr=4", "b") and start == end + 1
    assert [m for m, _ in races][:2] == [1, 1000]
    assert end == 210  # where times grow evenly, those of the ends say as much


def test_packings_that_did_not_race_everywhere_may_serve_there(monkeypatch):
    """Each number of rows has time for one packing alone, another one each time. None serves all rows by itself."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def search(problem, target, *, candidates, **how):
        now[0] += 1.0
        able = [c for c in candidates if refusal(c, problem, target) is None]
        family = able[problem.M % len(able)]
        kernel = plan_for(family, problem, target).build(next(iter(plan_for(family, problem, target).schedules())))
        return Decision(problem, kernel, 1.0 + problem.M, (), True, True)

    monkeypatch.setattr(module, "search", search)
    few, all_rows = Fake("few", [4], most=16), Fake("all", [8, 16])
    table = bucketed(posed, CPU, last=64, budget_s=9.0, candidates=[few, all_rows])
    assert table.buckets[0].first == 1 and table.buckets[-1].last == 64
    assert all(one.last + 1 == two.first for one, two in itertools.pairwise(table.buckets))


def test_who_is_far_slower_at_both_neighbours_does_not_race(monkeypatch):
    races = timed_by({"a nr=4": (1, 1), "b": (1, 3), "c": (9, 1.5)}, monkeypatch)
    contenders = [Fake("a", [4]), Fake("b", [0]), Fake("c", [0])]
    table = bucketed(posed, CPU, last=64, candidates=contenders)
    assert spans(table) == [(1, 64, "a nr=4")]
    raced = dict(races[:7])
    assert len(raced[1]) == len(raced[64]) == 3 and len(raced[8]) == 3  # c is near the fastest at 64, b at 1
    assert "b" not in raced[16] and "b" not in raced[32] and "c" in raced[32]


def test_one_packing_unless_a_second_is_worth_it(monkeypatch):
    timed_by({"a nr=4": (10, 2), "a nr=8": (10.2, 2), "a nr=16": (9.9, 2.01)}, monkeypatch)
    table = bucketed(posed, CPU, last=64, candidates=[Fake("a", [4, 8, 16])])
    assert len(table.buckets) == 1 and len(table.packings) == 1


@pytest.mark.parametrize(("packed", "count"), [(0, 3), (700, 2)])
def test_packings_that_are_worth_it_take_twice_the_largest_at_most(monkeypatch, packed, count):
    """Three packings of 4, 8 and 16 columns' bytes fit in twice those of 16; three of equal size do not."""
    timed_by({"a nr=4": (1, 4), "a nr=8": (60, 1), "a nr=16": (20, 2)}, monkeypatch)
    table = bucketed(posed, CPU, last=4096, candidates=[Fake("a", [4, 8, 16], packed=packed)])
    sizes = [packed or 100 * int(n.split("=")[1]) for n in table.packings]
    assert len(sizes) == count and [*table.packings.values()] == sizes and sum(sizes) <= 2 * (packed or 1600)
    assert {n for _, _, n in spans(table)} == set(table.packings)
    assert [s for s, _, _ in spans(table)][1:] == [e + 1 for _, e, _ in spans(table)][:-1]


def test_a_family_that_refuses_many_rows_serves_few(monkeypatch):
    timed_by({"a nr=4": (1, 1), "b": (100, 2)}, monkeypatch)
    table = bucketed(posed, CPU, last=100, candidates=[Fake("a", [4], most=37), Fake("b", [0])])
    assert spans(table) == [(1, 37, "a nr=4"), (38, 100, "b")]


def test_packings_that_depend_on_the_rows_take_no_part(monkeypatch):
    timed_by({"a": (0, 1), "b": (100, 2)}, monkeypatch)
    always = Fake("a", [0], packed=7)
    assert spans(bucketed(posed, CPU, last=10, candidates=[always, Fake("b", [0])])) == [(1, 10, "a")]
    one = Fake("a", [0], packed=7)
    one.packing_knobs = None
    assert spans(bucketed(posed, CPU, last=10, candidates=[one, Fake("b", [0])])) == [(1, 10, "b")]


def test_generated_kernels_and_the_library_may_serve_4_bit_weights_on_a_hopper(monkeypatch):
    pytest.importorskip("triton")
    took = {"hopper_w4": (1, 1), "aten compute=f16": (50, 0.5), "hopper widened=True": (90, 0.5), "triton": (999, 9)}

    def at(rows):
        return w4_problem(f"f16[{rows},1024] @ s4[1024,1024]^T group=64 -> f16"), {}

    def times(race, rows, families):
        able = [f.name for f in families if f.name in took and next(iter(plan_for(f, at(rows)[0], H200).schedules()), None)]
        race.measured[rows] = {n: took[n][0] + took[n][1] * rows for n in able}
        return race.measured[rows]

    monkeypatch.setattr(module._Race, "times", times)
    monkeypatch.setattr(module._Race, "packed_bytes", lambda race, rows, family: 0 if family.name == "triton" else 100)
    monkeypatch.setattr(module._Race, "bucket", lambda race, *place: Bucket(*place, None, None))
    table = bucketed(at, H200, first=64, last=256)
    assert spans(table) == [(64, 108, "hopper_w4"), (109, 256, "aten compute=f16")]


def test_ranges_and_rows_that_nothing_serves(monkeypatch):
    timed_by({"a nr=4": (1, 1)}, monkeypatch)
    table = bucketed(posed, CPU, first=3, last=9, candidates=[Fake("a", [4])])
    assert spans(table) == [(3, 9, "a nr=4")] and sorted(table.measured) == [3, 4, 8, 9]
    with pytest.raises(InputError, match="10 rows are outside the table, 3 to 9"):
        table.at(10)
    with pytest.raises(InputError, match="no rows from 5 to 4"):
        bucketed(posed, CPU, first=5, last=4)
    for none in (0, -1, float("nan")):
        with pytest.raises(InputError, match=r"a table over the rows is measured, and .* seconds are none"):
            bucketed(posed, CPU, last=9, budget_s=none, candidates=[Fake("a", [4])])


def test_a_family_is_a_candidate_of_one_packing():
    family = PackingVariants.of(Fake("a", [4, 8]), (("nr", 8),))
    problem, _ = posed(3)
    assert family.name == "a nr=8"
    assert [s["nr"] for s in plan_for(family, problem, CPU).schedules()] == [8]
    assert plan_for(family, problem, CPU).build(Schedule.of(nr=8)).packed_bytes == 800


def test_weights_that_no_cache_holds_come_from_memory_when_families_race(monkeypatch):
    colds = []

    def search(problem, target, *, cold, **how):
        colds.append(cold)
        kernel = plan_for(how["candidates"][0], problem, target).build(Schedule.of(nr=4))
        return Decision(problem, kernel, 1.0, (), True, True)

    monkeypatch.setattr(module, "search", search)
    for most, cold in ((128, False), (127, True)):  # bytes: the weight's are 8 x 4 x 4
        monkeypatch.setattr(module, "last_cache_bytes", lambda target, most=most: most)
        bucketed(lambda m: (posed(m)[0], {1: torch.ones(8, 4)}), CPU, last=2, candidates=[Fake("a", [4])])
        assert set(colds) == {cold}
        colds.clear()


WEIGHT, BIAS = torch.randn(96, 128), torch.randn(128)


def graph_at(rows, text="f32[{},96] @ f32[96,128] + bias, gelu"):
    graph = parse(text.format(rows))
    kept = {graph.inputs[1]: const(WEIGHT), graph.inputs[2]: const(BIAS)}
    return Graph("linear", graph.inputs[:1], tuple(substitute(graph.outputs, kept)), graph.output_names)


def test_a_program_for_any_number_of_rows():
    asked = []
    program = tilewright.compile_rows(lambda rows: asked.append(rows) or graph_at(rows), last=40, budget_s=2)
    for rows in (1, 2, 3, 17, 39, 40, 17):
        x = torch.randn(rows, 96)
        wanted = torch.nn.functional.gelu(x @ WEIGHT + BIAS)
        torch.testing.assert_close(program(x), wanted, rtol=1e-4, atol=1e-4)
    assert program.at(17) is program.at(17)
    assert len(asked) == len({*asked}) and {1, 2, 3, 17, 39, 40} <= {*asked}  # it may take a second to read it once
    assert isinstance(program(np.ones((2, 96), np.float32)), np.ndarray)
    assert len(program.table.packings) <= 2
    with pytest.raises(InputError, match=r"axis 0 is 41, outside rows 1\.\.40"):
        program(torch.randn(41, 96))
    with pytest.raises(InputError, match=r"rows = 41 is outside rows 1\.\.40"):
        program.at(41)
    with pytest.raises(InputError, match="no value for input 'a'"):
        program()
    with pytest.raises(InputError, match=r"shape \[\] given, f32\[rows,96\] wanted"):
        program(torch.tensor(1.0))


def test_a_graph_of_open_rows_is_read_once_for_each_way_in_which_it_decides_by_them():
    asked = []

    def at(rows):
        asked.append(rows)
        x = input_("x", F32, (2, rows, 96))
        product = gemm(reshape(x, (2 * rows, 96)), const(WEIGHT))
        return Graph("open", (x,), (map_("tanh" if rows <= 32 else "relu", product),), ("y",))

    program = tilewright.compile_rows(at, last=64, dims=True, budget_s=0.2)
    for rows in (1, 3, 32, 33, 64):
        x = torch.randn(2, rows, 96)
        wanted = torch.tanh(x @ WEIGHT) if rows <= 32 else torch.relu(x @ WEIGHT)
        torch.testing.assert_close(program(x), wanted.reshape(-1, 128), rtol=1e-4, atol=1e-4)
    assert len(asked) == program.compiled == 2 and program.made == 5
    assert str(program.input_types["x"]) == "f32[2,rows,96]"
    by_number = tilewright.compile_rows(at, last=4, budget_s=0.1)
    assert by_number(x[:, :3]).shape == (6, 128) and str(by_number.input_types["x"]) == "f32[2,rows,96]"


def test_programs_that_no_table_is_made_for():
    with pytest.raises(InputError, match="no input changes with the number of rows"):
        tilewright.compile_rows(lambda rows: graph_at(4), last=8, budget_s=1)
    for first, last, hint in (
        (8, 8, "tilewright.compile, for one number"),
        (9, 8, "such as first=1"),
        (0, 8, "such as first=1"),
    ):
        with pytest.raises(InputError, match=rf"no range of rows from {first} to {last}\n.*{hint}"):
            tilewright.compile_rows(graph_at, first=first, last=last, budget_s=1)
    with pytest.raises(InputError, match=r"is measured, and 0 seconds are none\n.*budget_s=60"):
        tilewright.compile_rows(graph_at, last=8, budget_s=0)
    with pytest.raises(InputError, match=r"an argument of type NoneType \(graph_at\)\n  try: a function from a number of rows"):
        tilewright.compile_rows(None, last=8)
    with pytest.raises(InputError, match=r"an argument of type str \(graph_at\(1\)\)"):
        tilewright.compile_rows(lambda rows: "model.onnx", last=8)

    def two(rows):
        graph = graph_at(rows)
        again = parse(f"f32[{rows},128] @ f32[128,7]")
        outputs = substitute(again.outputs, {again.inputs[0]: graph.outputs[0], again.inputs[1]: const(torch.randn(128, 7))})
        return Graph("two", graph.inputs, tuple(outputs), ("y",))

    with pytest.raises(UnsupportedError, match="2 products"):
        tilewright.compile_rows(two, last=8, budget_s=1)


def test_the_command_line_prints_the_table():
    line = "f32[1..5,32] @ f32[32,48] + bias"
    said = CliRunner().invoke(cli, ["gemm", line, "--budget", "1"])
    assert said.exit_code == 0, said.output
    assert re.search(r"^ *1(?: to \d)? ", said.stdout, re.MULTILINE), said.stdout
    report = json.loads(CliRunner().invoke(cli, ["gemm", line, "--budget", "1", "--json"]).stdout)
    assert report["ranges"][0]["first"]["rows"] == 1 and report["ranges"][-1]["last"]["rows"] == 5
    assert {"1", "5"} <= set(report["measured_us"]) <= set("12345")  # a busy machine finds no time for more


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("f32[1..8,32] @ f32[32,1..4]", "two ranges"),
        ("f32[8..1,32] @ f32[32,4]", "no range from 8 to 1"),
        ("f32[4,1..8] @ f32[1..8,4]", "the range changes 'b', which is a weight"),
    ],
)
def test_ranges_that_are_no_rows(line, why):
    said = CliRunner().invoke(cli, ["gemm", line])
    assert said.exit_code == 2 and why in said.output


@pytest.mark.parametrize("options", [["--perf"], ["--weights"], ["--no-cache"], ["-n", "3"], ["--all"]])
def test_options_that_say_nothing_about_a_range_are_refused(options):
    said = CliRunner().invoke(cli, ["gemm", "f32[1..8,32] @ f32[32,4]", *options])
    assert said.exit_code == 2 and "says nothing about a range of rows" in said.output
    assert (options[0] if options[0] != "-n" else "--iterations") in said.output
