"""Somebody else's functions beside ours: who is right, what is wrong with those that are not, and how long each takes."""

import functools
import importlib.util
import itertools
import re
import time

import pytest
import torch
from installed import run
from racers import LOST, PROBLEM, STOP, WRONG, at_work_behind, in_columns, jittering, remembering_until_written, slow, sound

import tilewright
from tilewright import racing
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.report.measure.inputs import make_feeds
from tilewright.schedule.candidate import Schedule
from tilewright.schedule.contest import ContestBench, contender

ADDMM, CLOCK = torch.addmm, time.perf_counter
race = functools.partial(tilewright.race, budget_s=0, race_s=0.05)


def rows(report):
    return {c.name: c for c in report.facts.contenders}


@functools.cache
def hostile():
    """One race for all: what one does to inputs, memory or results must not fall back on who comes after it."""
    right = [jittering, slow, in_columns, remembering_until_written, sound]  # after all that are wrong
    return race(PROBLEM, [*WRONG, *right])


def test_right_ones_are_timed_beside_ours():
    found = rows(hostile())
    assert next(iter(found)) == "tilewright"
    for name in ("tilewright", "sound", "jittering", "in_columns", "slow", "remembering_until_written"):
        row = found[name]
        assert row.right and row.why is None and 0 <= row.error <= row.bound and row.measure == "element"
        assert 0 < row.low_us <= row.median_us <= row.high_us and row.peak_fraction >= 0
    assert found["tilewright"].ratio == 1 and found["slow"].ratio > 1 and found["slow"].median_us > 20_000
    once = ["it is so much slower than the fastest that it ran once"]
    assert found["slow"].notes == (once if found["slow"].rounds == 1 else [])  # others may have had the core
    assert found["remembering_until_written"].median_us > 2000
    assert "its results are not the same to the last bit when it is called again" in found["jittering"].notes
    assert found["in_columns"].notes[0].startswith("its result is right, but not dense")
    assert found["sound"].notes == (once if found["sound"].rounds == 1 else [])
    assert max(found[name].rounds for name in ("tilewright", "sound", "jittering", "in_columns")) > 2


def test_nearly_all_elements_are_others_in_each_call_that_is_timed():
    """One that works out anew what a few changed elements change was the fastest of a race, beyond what arithmetic allows."""
    given = []

    def noting(a, b, bias):
        given.append([t.clone() for t in (a, b, bias)])
        return sound(a, b, bias)

    program = tilewright.compile(parse(PROBLEM), budget_s=0)
    contest, _ = racing._contest(program, make_feeds(program.source), PROBLEM)
    bench = ContestBench(contest, program.target, {}, watched=True)
    assert bench.attempt(0, contender("noting", noting), Schedule()).fault is None
    examined = len(given)
    bench.times([0], 0.01)
    timed = given[examined:]
    assert len(timed) > 3
    for before, after in itertools.pairwise(timed):
        for was, t, value in zip(before, after, contest.values, strict=True):
            assert (was != t).float().mean() > 0.8  # few are equal, of a random input
            torch.testing.assert_close(t.flatten().sort().values, value.flatten().sort().values, rtol=0, atol=0)


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_one_is_out_with_a_sentence(function):
    row = rows(hostile())[function.__name__]
    assert not row.right and row.median_us is None and row.ratio is None
    assert re.match(WRONG[function], row.why), row.why
    assert torch.addmm is ADDMM and time.perf_counter is CLOCK, "what it replaced is put back"


def test_one_that_leaves_threads_at_work_is_out():
    try:
        found = rows(race(PROBLEM, [at_work_behind, sound]))
    finally:
        STOP.set()
    assert found["at_work_behind"].why == "it leaves threads at work when it comes back, which slow down what comes after it"
    assert found["tilewright"].right and found["sound"].right


def test_the_table_says_by_how_much_and_why_ours_is_what_it_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    found, said = rows(hostile()), str(hostile())
    assert found["one_element_off"].error == pytest.approx(1, rel=1e-3) and found["one_element_off"].bound < 1e-3
    assert found["not_a_number"].error == float("inf")
    for words in (
        "contender",
        "median µs",
        "of peak %",
        "one_element_off",
        "is out: the result is wrong",
        "Done by",
        "Was not tried",
    ):
        assert words in said
    assert re.search(r"is the fastest: [\d.]+ µs, where|cannot be told apart from", said)
    facts = hostile().facts  # the sentence has the numbers of the table: medians, and ratios of rounds
    best = next(c for c in facts.contenders if c.name == facts.fastest)
    assert f"{best.median_us:,.1f} µs" in facts.verdict
    for longer in re.findall(r"takes ([\d.]+) times as long", facts.verdict):
        second = next(c for c in facts.contenders if f"where {c.name} takes" in facts.verdict)
        assert facts.fastest != "tilewright" or float(longer) == pytest.approx(second.ratio, abs=0.006)
    assert hostile().facts.products[0].chosen.candidate == "llvm" and hostile().facts.limit_us > 0
    assert "<pre>" in hostile()._repr_html_() and "one_element_off" in hostile().to_json()
    assert hostile().facts.notes == [
        "all ran in this process, where nothing ends one that does not come back: processes of their own are switched off"
    ]


HOSTED = """
import tilewright
from racers import {names}, PROBLEM
r = tilewright.race(PROBLEM, [{names}], budget_s=0, race_s=0.3, limit_s=1)
for c in r.facts.contenders:
    print(c.name, c.right, c.why)
print(r.facts.notes)
"""


def test_one_that_does_not_come_back_is_out_and_the_others_race(tmp_path):
    names = [*(f.__name__ for f in LOST), "sound"]
    out, _ = run(HOSTED.format(names=", ".join(names)), TILEWRIGHT_WORKER="1", TILEWRIGHT_CACHE=str(tmp_path))
    lines = out.splitlines()
    assert lines[0] == "tilewright True None" and lines[-2:] == ["sound True None", "[]"]
    for line, (function, why) in zip(lines[1:], LOST.items(), strict=False):
        assert re.fullmatch(f"{function.__name__} False {why}.*", line), line


IN_A_SCRIPT = """
import sys
import torch, tilewright
w = torch.randn(8, 4)
def mine(x):
    return x @ w
def hanging(x):
    while True: pass
class Linear(torch.nn.Module):
    def forward(self, x):
        return x @ w
r = tilewright.race(Linear(), {functions}, example_inputs=(torch.randn(3, 8),), budget_s=0, race_s=0.1, limit_s=1)
print([(c.name, c.right) for c in r.facts.contenders], r.facts.notes)
"""


@pytest.mark.skipif(importlib.util.find_spec("cloudpickle") is None, reason="needs cloudpickle")
def test_functions_of_a_script_run_in_another_process_with_cloudpickle(tmp_path):
    program = IN_A_SCRIPT.format(functions="{'mine': mine, 'lambda': lambda x: mine(x), 'hanging': hanging}")
    out, _ = run(program, TILEWRIGHT_WORKER="1", TILEWRIGHT_CACHE=str(tmp_path))
    assert out.strip() == "[('tilewright', True), ('mine', True), ('lambda', True), ('hanging', False)] []"


def test_functions_of_a_script_run_here_without_cloudpickle(tmp_path):
    program = "import sys; sys.modules['cloudpickle'] = None\n" + IN_A_SCRIPT.format(functions="[mine]")
    program = program.replace(
        "sys.modules['cloudpickle'] = None",
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *p: None if n == 'cloudpickle' else f(n, *p)",
    )
    out, _ = run(program, TILEWRIGHT_WORKER="1", TILEWRIGHT_CACHE=str(tmp_path))
    assert out.startswith("[('tilewright', True), ('mine', True)] ['all ran in this process")
    assert "mine is of no module that another process could import, and cloudpickle is not installed" in out


def test_one_that_arrives_nowhere_else_runs_here(tmp_path):
    """A module that is there under its name in this process alone."""
    program = """
import sys, types
import torch, tilewright
sys.modules["only_here"] = module = types.ModuleType("only_here")
exec("def mine(a, b):\\n    return a @ b", vars(module))
r = tilewright.race("f32[4,8] @ f32[8,4]", [module.mine], budget_s=0, race_s=0.1)
print([(c.name, c.right) for c in r.facts.contenders], r.facts.notes)
"""
    out, _ = run(program, TILEWRIGHT_WORKER="1", TILEWRIGHT_CACHE=str(tmp_path))
    assert out.startswith("[('tilewright', True), ('mine', True)]") and "all ran in this process" in out
    assert "it cannot be had in another process: No module named 'only_here'" in out


def test_a_module_of_several_steps_is_judged_by_its_root_mean_square():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 16)).eval()

    def changed(by):
        return lambda x: module(x) * by

    def one_off(x):
        y = module(x).clone()
        y[1, 1] += 1
        return y

    functions = {"eager": module, "near": changed(1.0005), "far": changed(1.01), "one off": one_off}
    found = rows(race(module, functions, example_inputs=(torch.randn(8, 24),)))
    assert [name for name, row in found.items() if row.right] == ["tilewright", "eager", "near"]
    assert found["near"].error == pytest.approx(5e-4, rel=1e-2) and found["near"].measure == "root mean square"
    assert found["far"].why.startswith("the result is wrong: its elements differ by")
    assert found["one off"].why.startswith("the result is wrong: 1 of 128 elements differ, first at [1, 1]")


@pytest.mark.parametrize(
    ("problem", "function", "off"),
    [
        ("s8[5,7] @ s8[7,3]", lambda a, b: a.int() @ b.int(), lambda a, b: (a.int() @ b.int()) + 1),
        ("s8[5,7] @ s8[7,3] -> s8", lambda a, b: (a.int() @ b.int()).to(torch.int8), lambda a, b: a[:, :3] * 2),
        ("f64[1,3] @ f64[3,1]", lambda a, b: a @ b, lambda a, b: (a.float() @ b.float()).double()),
        ("bf16[17,33] @ bf16[33,9] -> bf16", lambda a, b: a @ b, lambda a, b: (a @ b) * 1.02),
        ("f32[0,4] @ f32[4,3]", lambda a, b: a @ b, lambda a, b: (a @ b)[:, :1]),
    ],
)
def test_types_and_extents(problem, function, off):
    found = rows(race(problem, {"right": function, "off": off}))
    assert [row.right for row in found.values()] == [True, True, False], [row.why for row in found.values()]


def test_several_results_and_a_graph():
    """An input that a program gives back may be given back by a function, too."""
    graph = parse("f32[6,8] @ f32[8,4]")
    graph = Graph(graph.name, graph.inputs, (*graph.outputs, graph.inputs[0]), ("product", "a"))
    functions = {
        "right": lambda a, b: (a @ b, a.clone()),
        "same memory": lambda a, b: [a @ b, a],
        "swapped": lambda a, b: (a, a @ b),
    }
    found = rows(race(graph, functions))
    assert [row.right for row in found.values()] == [True, True, True, False], [row.why for row in found.values()]


def test_given_inputs_are_what_they_are():
    seen = []

    def spy(a, b):
        seen.append(a.clone())
        return a @ b

    a = torch.arange(12.0).reshape(3, 4)
    assert rows(race("f32[3,4] @ f32[4,2]", [spy], inputs={"a": a}))["spy"].right
    assert any(torch.equal(a, s) for s in seen)


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x @ x.t() + self.calls


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (("f32[3,4] @ f32[4,2]", []), InputError, "no function is given"),
        (("f32[3,4] @ f32[4,2]", 3), InputError, "an argument of type int"),
        (("f32[3,4] @ f32[4,2]", [3]), InputError, "'int' is a int, and no function"),
        (("f32[3,4] @ f32[4,2]", [sound, sound]), InputError, "two contenders are called 'sound'"),
        (("f32[3,4] @ f32[4,2]", {"tilewright": sound}), InputError, "two contenders are called 'tilewright'"),
        (("f32[3,4] @ f32[5,2]", [sound]), tilewright.TilewrightError, "4|5"),
        (("f32[3,4] @ what", [sound]), InputError, "column"),
        (("no_such_file.onnx", [sound]), InputError, "no such file"),
    ],
)
def test_what_is_no_race_is_said(given, error, said):
    with pytest.raises(error, match=said):
        race(*given)


@pytest.mark.parametrize("name", ["race_s", "limit_s"])
def test_times_are_checked(name):
    for wrong, said in ((0, "0 seconds"), (float("nan"), "nan seconds"), ("1", "an argument of type str")):
        with pytest.raises(InputError, match=said):
            tilewright.race(PROBLEM, [sound], **{name: wrong})


def test_a_problem_with_state_is_refused():
    with pytest.raises(UnsupportedError, match="the problem keeps state between calls, and functions have none"):
        race(Counter(), [sound], example_inputs=(torch.randn(3, 3),))


def test_a_problem_with_open_extents_is_refused():
    rows = torch.export.Dim("rows", min=2, max=16)
    exported = torch.export.export(torch.nn.Linear(8, 4), (torch.randn(3, 8),), dynamic_shapes=({0: rows},))
    graph = tilewright.load(exported, LoadOptions(dims=True))
    with pytest.raises(UnsupportedError, match="the problem leaves extents open, and functions race at one shape"):
        race(graph, [sound])
