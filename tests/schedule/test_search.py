"""Choosing a kernel: who is considered, who survives, who wins, and what is said of the rest."""

from dataclasses import replace

import pytest
import torch
from fake_candidate import DEFAULT, Fake
from races import steady

from tilewright.compiler import chooser, compile
from tilewright.deadline import OverrunError
from tilewright.dtype import F32, S8
from tilewright.errors import InputError, UnsupportedError
from tilewright.hardware.detect import chips, detect
from tilewright.ir.build import const, input_
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.schedule import bench
from tilewright.schedule import search as search_module
from tilewright.schedule.budget import EVENLY, FIRST_CHECKS, LONGEST_S
from tilewright.schedule.candidate import CPU as ONLY_CPU
from tilewright.schedule.candidate import (
    GEMM,
    LAST_RESORT,
    Candidate,
    Kernel,
    Refusal,
    Schedule,
    Unsupported,
    concerns,
    discover,
    plan_for,
    planned,
    refusal,
)
from tilewright.schedule.cost import Phase, Work, clock_ghz, library_work
from tilewright.schedule.problem import problem_of
from tilewright.schedule.search import search

CPU = detect("cpu")
BF16_CHIP = next(c for c in chips() if c.name == "x86_64_avx512_bf16")
PROBLEM = problem_of(parse("f32[8,16] @ f32[16,12]").outputs[0])


REFERENCE = next(c for c in discover() if c.name == "reference")


@pytest.fixture
def times(monkeypatch):
    """Fixed times, in µs, for the runs that are timed, in their order; records how often timing was asked for."""

    def give(*values):
        asked = []

        def timed(runs, device, *, budget_s, at, before=None):
            assert len(runs) == len(values)
            asked.append((device, budget_s))
            for run in runs:
                run()
            return steady(values)

        monkeypatch.setattr(bench, "time_interleaved", timed)
        return asked

    return give


def whys(decision):
    return {str(r): r.why for r in decision.rejected}


def test_the_fastest_that_agrees_wins_and_the_rest_have_reasons(times):
    times(20.0, 10.0)
    slow, fast = Fake("slow"), Fake("fast")
    wrong = Fake("wrong", lambda s: [s[0] @ s[1] + 1])
    no = Fake("no", refuse="it is Tuesday")
    d = search(PROBLEM, CPU, candidates=[slow, fast, wrong, no, REFERENCE])
    assert d.kernel.candidate == "fast" and d.time_us == 10.0 and d.measured and d.verified
    reasons = whys(d)
    assert reasons["slow"] == "slower: 20.0 µs, 2.00 times the winner"
    assert reasons["wrong"].startswith("the result is wrong: 96 of 96 elements differ, first at [0, 0]: ")
    assert reasons["no"] == "it is Tuesday" and reasons["reference"] == "not timed: a verified kernel exists"
    assert [r.time_us for r in d.rejected if r.candidate == "slow"] == [20.0]
    assert wrong.calls <= 3 and no.builds == 0


def test_a_reference_that_fails_on_random_data_is_taken_and_not_called_verified(monkeypatch):
    def fails(problem, sources, roundoff):
        raise ValueError("no such row")

    monkeypatch.setattr(bench, "expect", fails)
    last = Fake("last", ValueError("no such row"), preference=LAST_RESORT)
    d = search(PROBLEM, CPU, budget_s=0, candidates=[Fake("fast"), last])
    assert d.kernel.candidate == "last" and not d.verified and not d.measured
    assert whys(d)["fast"] == "its results cannot be checked: no such row"
    assert search(PROBLEM, CPU, budget_s=0, candidates=[Fake("fast"), REFERENCE]).verified  # it runs, and is its own witness


def test_ties_go_to_the_earlier_and_the_choice_repeats(times):
    for _ in range(3):
        times(103.0, 100.0, 150.0)
        d = search(PROBLEM, CPU, candidates=[Fake("first"), Fake("second"), Fake("third")])
        assert d.kernel.candidate == "first" and d.time_us == 103.0
        assert whys(d)["second"] == "a tie; the earlier one is kept"
    times(103.1, 100.0, 150.0)
    d = search(PROBLEM, CPU, candidates=[Fake("first"), Fake("second"), Fake("third")])
    assert d.kernel.candidate == "second"


def test_of_one_candidate_the_point_it_ranked_first_is_kept_unless_another_is_clearly_faster(times):
    points = (Schedule.of(point=0), Schedule.of(point=1))
    for us, chosen in ((104.9, 0), (105.1, 1), (98.0, 0)):
        times(us, 100.0, 103.1)
        d = search(PROBLEM, CPU, candidates=[Fake("deep", schedules=points), Fake("other", preference=40)])
        assert d.kernel.candidate == "deep" and d.kernel.schedule["point"] == chosen
    times(104.9, 104.0, 100.0)  # the points' band does not bring back a candidate that lost
    assert search(PROBLEM, CPU, candidates=[Fake("deep", schedules=points), Fake("other")]).kernel.candidate == "other"


def test_a_later_point_must_win_twice(monkeypatch):
    """A lucky time in one duel is not enough."""
    lucky = []

    def us(who):
        if who == 3 and not lucky:
            lucky.append(who)
            return 5.0
        return 10.0

    Pace(monkeypatch, us)
    fake = Fake("deep", schedules=[Schedule.of(point=i) for i in range(6)])
    d = search(PROBLEM, CPU, budget_s=1000.0, candidates=[fake])
    assert lucky and d.kernel.schedule["point"] == 0
    assert whys(d)["deep (point=3)"] == "a tie; the earlier one is kept"


def test_preference_orders_candidates_and_their_schedules_keep_their_order(times):
    times(1.0, 1.0, 1.0)
    points = (Schedule.of(tile_m=64), Schedule.of(tile_m=128))
    d = search(PROBLEM, CPU, candidates=[Fake("late", preference=40), Fake("early", preference=5, schedules=points)])
    assert d.kernel.candidate == "early" and d.kernel.schedule["tile_m"] == 64
    assert [str(r) for r in d.rejected] == ["early (tile_m=128)", "late"]


@pytest.mark.parametrize(
    ("broken", "label", "why"),
    [
        ({"run": IndexError("off by one")}, "broken", "failed: off by one"),
        ({"run": AssertionError()}, "broken", "failed: AssertionError"),
        ({"run": MemoryError("no room")}, "broken", "failed: no room"),
        ({"run": ZeroDivisionError("line one\nline two")}, "broken", "failed: line one"),
        ({"prepare": KeyError("weight")}, "broken", "failed: 'weight'"),
        ({"build": TypeError("no such tile")}, "broken", "failed to build: no such tile"),
        ({"schedules": AttributeError("no cores")}, "broken", "failed to consider it: no cores"),
        ({"refuse": RuntimeError("cannot say")}, "broken", "failed to consider it: cannot say"),
        ({"run": lambda s: []}, "broken", "gave 0 results, 1 wanted"),
        ({"run": lambda s: [(s[0] @ s[1]).double()]}, "broken", "the result is torch.float64[8, 12], f32[8,12] wanted"),
        ({"run": lambda s: None}, "broken", "failed: "),
        ({"build": RuntimeError("x"), "schedules": (Schedule.of(mr=4),)}, "broken (mr=4)", "failed to build: x"),
    ],
)
def test_a_broken_candidate_is_out_of_the_race_and_nothing_else(times, broken, label, why):
    times(1.0)
    d = search(PROBLEM, CPU, candidates=[Fake("broken", preference=1, **broken), Fake("sound"), REFERENCE])
    assert d.kernel.candidate == "sound"
    assert whys(d)[label].startswith(why)


def test_an_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        search(PROBLEM, CPU, candidates=[Fake("slow", KeyboardInterrupt())])


def test_the_reference_alone_wins_by_default(times):
    times(500.0)
    d = search(PROBLEM, CPU, candidates=[Fake("wrong", lambda s: [torch.zeros(8, 12)]), REFERENCE])
    assert d.kernel.candidate == "reference" and d.verified and list(whys(d)) == ["wrong"]


def test_when_nothing_runs_it_says_why():
    last = Fake("last", RuntimeError("no more"), preference=LAST_RESORT)
    with pytest.raises(UnsupportedError, match=r"nothing can run f32\[8,16\] @ f32\[16,12\]: wrong: .* last: failed: no more"):
        search(PROBLEM, CPU, candidates=[Fake("wrong", lambda s: [torch.zeros(8, 12)]), last])
    with pytest.raises(UnsupportedError, match="no candidate was given"):
        search(PROBLEM, CPU, candidates=[])


def test_no_budget_takes_the_first_verified_untimed(times):
    asked = times()
    wrong, right, other = (
        Fake("wrong", lambda s: [s[0] @ s[1] * 2], 1),
        Fake("right", preference=2),
        Fake("other", preference=3),
    )
    d = search(PROBLEM, CPU, budget_s=0, candidates=[other, right, wrong, REFERENCE])
    assert d.kernel.candidate == "right" and d.time_us is None and not d.measured and d.verified
    assert not asked and other.calls == 0
    untried = "not tried: an earlier candidate passed, and nothing was timed"
    assert whys(d)["other"] == whys(d)["reference"] == untried and "wrong" in whys(d)


@pytest.mark.parametrize(("expected_us", "tried"), [(1.0, "generated"), (1e6, "library")])
def test_no_budget_takes_a_library_where_a_kernel_is_expected_to_take_far_longer(expected_us, tried):
    class Modelled(Fake):
        def work(self, schedule):
            return Work((Phase(expected_us * clock_ghz(CPU) * 1e3),))

    generated = Modelled("generated", preference=0)
    decision = search(PROBLEM, CPU, budget_s=0, candidates=[Fake("library", preference=30), generated])
    assert decision.kernel.candidate == tried and decision.time_us is None
    if tried == "library":
        assert "library is expected to take" in whys(decision)["generated"] and generated.builds == 0


def test_a_cost_model_that_breaks_is_no_reason_to_end(times):
    class Broken(Fake):
        def work(self, schedule):
            raise KeyError("no such unit")

    generated, library = Broken("generated", preference=0), Fake("library", preference=30)
    assert search(PROBLEM, CPU, budget_s=0, candidates=[library, generated]).kernel.candidate == "generated"


@pytest.mark.parametrize(
    "line", ["f32[1,2048] @ s8[2048,2048]", "bf16[1,2048] @ f8e4m3fn[2048,2048]", "f16[1,2048] @ f16[2048,2048]"]
)
def test_nothing_is_foreseen_of_a_library_that_converts_operands(line):
    assert library_work(problem_of(parse(line).outputs[0]), replace(CPU, chip=BF16_CHIP)) is None


def test_a_space_that_breaks_while_its_cost_is_asked_is_told_and_left(times):
    def broken():
        raise ArithmeticError("no first point")
        yield

    class Broken(Fake):
        def schedules(self):
            return broken()

    decision = search(PROBLEM, CPU, budget_s=0, candidates=[Broken("generated", preference=0), Fake("library")])
    assert decision.kernel.candidate == "library" and "no first point" in whys(decision)["generated"]


def endless(built=None):
    """Points without end, best guess first; notes how many were asked for."""
    for i in range(100_000):
        if built is not None:
            built.append(i)
        yield Schedule.of(point=i)


class Pace:
    """Times, in µs, by the label of what runs; whoever takes part in a timing is noted."""

    def __init__(self, monkeypatch, us):
        self.rounds = []
        attempts = {}
        attempt = bench.Bench.attempt

        def noted(self_, key, candidate, schedule):
            attempts[key] = schedule["point"] if schedule.knobs else candidate.name
            return attempt(self_, key, candidate, schedule)

        def times(self_, keys, budget_s):
            self.rounds.append([attempts[k] for k in keys])
            return steady(
                {k: us(attempts[k]) * len(self.rounds) for k in keys}
            )  # each round on a slower machine than the one before

        monkeypatch.setattr(bench.Bench, "attempt", noted)
        monkeypatch.setattr(bench.Bench, "times", times)


def test_a_few_points_compete_and_the_rest_is_one_sentence(monkeypatch):
    pace = Pace(monkeypatch, lambda who: 10.0)
    fake = Fake("deep", schedules=[Schedule.of(point=i) for i in range(1000)])
    d = search(PROBLEM, CPU, budget_s=1e-9, candidates=[fake, Fake("other"), REFERENCE], depth=3)
    assert pace.rounds == [[0, 1, 2, "other"]] and fake.builds == 3
    assert d.kernel.schedule["point"] == 0
    assert [r.why for r in d.rejected if str(r) == "deep"] == ["997 more points ranked below were not tried"]
    search(PROBLEM, CPU, budget_s=1e-9, candidates=[fake])
    assert fake.builds == 3 + search_module.DEPTH


class Picky(Fake):
    """Builds some of its points alone."""

    def __init__(self, name, buildable, count):
        super().__init__(name, schedules=[Schedule.of(point=i) for i in range(count)])
        self._buildable = buildable

    def build(self, schedule):
        if schedule["point"] not in self._buildable:
            self.builds += 1
            raise RuntimeError("no room in the registers")
        return super().build(schedule)


def test_points_that_cannot_be_built_are_made_up_for_by_later_ones(monkeypatch):
    pace = Pace(monkeypatch, lambda who: 10.0)
    fake = Picky("picky", {2, 4}, 50)
    d = search(PROBLEM, CPU, budget_s=1e-9, candidates=[fake, REFERENCE], depth=2)
    assert pace.rounds == [[2, 4]] and fake.builds == 5 and d.kernel.schedule["point"] == 2
    assert sum("failed to build: no room" in r.why for r in d.rejected) == 3
    never = Picky("never", set(), 50)
    d = search(PROBLEM, CPU, budget_s=0, candidates=[never, REFERENCE], depth=1)
    assert never.builds == 1 + search_module.UNBUILT and d.kernel.candidate == "reference"
    few = Picky("few", {1}, 2)
    assert search(PROBLEM, CPU, budget_s=0, candidates=[few, REFERENCE]).kernel.schedule["point"] == 1


def test_no_budget_builds_one_point_of_an_endless_space():
    asked = []
    fake, later = Fake("deep"), Fake("later", preference=40)
    fake._schedules = endless(asked)
    d = search(PROBLEM, CPU, budget_s=0, candidates=[fake, later, REFERENCE], depth=50)
    assert fake.builds == 1 and later.builds == 0 and d.kernel.schedule["point"] == 0 and not d.measured
    assert whys(d)["deep"] == "no more of its settings were tried" and len(asked) == 1, "nor counted"


class Ranked(Fake):
    """A candidate that compiles its points to rank them, as those for GPUs do."""

    def compile(self, schedule):
        raise AssertionError("nobody asked for it")


@pytest.mark.parametrize("budget_s", [0, 1e-9])
def test_points_that_are_ranked_by_compiling_them_are_not_counted(budget_s):
    asked = []
    fake = Ranked("deep")
    fake._schedules = endless(asked)
    d = search(PROBLEM, CPU, budget_s=budget_s, candidates=[fake, REFERENCE], depth=1)
    assert fake.builds == len(asked) == 1 and d.kernel.schedule["point"] == 0
    assert whys(d)["deep"] == "no more of its settings were tried"


def test_what_is_left_of_the_budget_goes_to_more_points_of_the_fastest(monkeypatch):
    """The best point is the seventh; each comes alone against the winner, on the first race's scale."""
    pace = Pace(monkeypatch, lambda who: 50.0 if who == "slow" else 20.0 - who if who <= 6 else 30.0)
    fake = Fake("deep", schedules=[Schedule.of(point=i) for i in range(1000)])
    slow = Fake("slow", schedules=DEFAULT)
    d = search(PROBLEM, CPU, budget_s=1000.0, candidates=[slow, fake], depth=2)
    assert d.kernel.schedule["point"] == 6 and d.time_us == pytest.approx(14.0)
    assert pace.rounds[:5] == [["slow", 0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]
    assert fake.builds == 7 + search_module.PATIENCE
    assert whys(d)["deep (point=1)"] == "slower: 19.0 µs, 1.36 times the winner"
    assert whys(d)["deep"] == f"{1000 - fake.builds} more points ranked below were not tried"


def test_a_used_up_or_broken_space_ends_the_deepening(monkeypatch):
    Pace(monkeypatch, lambda who: 10.0)

    def breaks():
        yield Schedule.of(point=0)
        yield Schedule.of(point=1)
        raise RuntimeError("no more sizes")

    fake = Fake("deep")
    fake._schedules = breaks()
    d = search(
        PROBLEM, CPU, budget_s=1000.0, candidates=[fake, Fake("three", schedules=[Schedule.of(point=i) for i in range(3)])]
    )
    assert whys(d)["deep"] == "failed to consider it: no more sizes" and fake.builds == 2
    assert "three (point=2)" in whys(d) and "three" not in whys(d)


def test_only_candidates_of_the_problems_kind_compete(times):
    times(1.0)
    elsewhere = Fake("elsewhere")
    elsewhere.kinds = frozenset({"attention"})
    d = search(PROBLEM, CPU, candidates=[elsewhere, Fake("here")])
    assert d.kernel.candidate == "here" and elsewhere.builds == 0 and "elsewhere" not in whys(d)


@pytest.mark.parametrize(("kind", "generator"), [("cpu", "llvm"), ("cuda", "triton")])
def test_nobody_hears_of_candidates_for_other_devices(kind, generator):
    """Each is asked whether it is for the device before it is asked about the problem: no sentence says that it is not."""
    target = replace(CPU, kind=kind)
    asked = {c.name for c in discover() if concerns(c, PROBLEM, target)}
    assert {"reference", "aten", "split", generator} <= asked
    assert ("onednn" in asked, "llvm_w4" in asked) == (kind == "cpu", kind == "cpu")
    assert ("scaled_mm" in asked, "hopper" in asked) == (kind == "cuda", kind == "cuda")


def test_only_candidates_for_the_device_compete(times):
    times(1.0)
    elsewhere = Fake("elsewhere")
    elsewhere.devices = frozenset({"cuda"})
    d = search(PROBLEM, CPU, candidates=[elsewhere, Fake("here")])
    assert d.kernel.candidate == "here" and elsewhere.builds == 0 and "elsewhere" not in whys(d)


def test_given_weights_are_what_it_measures_with(times):
    times(1.0)
    seen = []
    weight = torch.full((16, 12), 3.0)
    node = gemm(input_("a", F32, (8, 16)), const(weight))

    class Watching(Fake):
        def build(self, schedule):
            def prepare(weights):
                seen.append(dict(weights))
                return lambda s: [s[0] @ s[1]]

            return Kernel(self.name, schedule, prepare)

    search(problem_of(node), CPU, candidates=[Watching("watching")], weights={1: weight})
    assert list(seen[0]) == [1] and seen[0][1] is weight


def test_really_measured():
    """Nothing faked: a deliberately slow kernel loses to a library."""

    def slow(sources):
        total = torch.zeros(8, 12)
        for k in range(16):
            total += sources[0][:, k : k + 1] * sources[1][k]
        return [total]

    d = search(PROBLEM, CPU, budget_s=0.05, candidates=[Fake("slow", slow, 1), Fake("library")])
    assert d.kernel.candidate == "library" and d.time_us > 0 and whys(d)["slow"].startswith("slower: ")


def test_one_decision_for_equal_problems_and_a_fair_share_of_time(monkeypatch):
    w1, w2 = const(torch.randn(8, 8)), const(torch.randn(8, 8))
    x = input_("x", F32, (4, 8))
    a, b = gemm(x, w1), gemm(x, w2)
    c = gemm(a, const(torch.randn(8, 3)))
    graph = Graph("g", (x,), (b, c), ("b", "c"))
    budgets, shown = [], []

    def counted(problem, target, *, budget_s, weights, **how):
        budgets.append(budget_s)
        return search(problem, target, budget_s=0, weights=weights)

    monkeypatch.setattr("tilewright.schedule.budget.search", counted)
    monkeypatch.setattr("tilewright.schedule.budget.time.monotonic", lambda: 0.0)
    monkeypatch.setattr("tilewright.schedule.budget.BudgetedChooser._checks_s", lambda self: 0.0)
    decide = chooser(graph, CPU, 1.0, lambda *now: shown.append(now))
    one, two, three = (decide(problem_of(n), {1: n.src[1].op.data.tensor()}) for n in (a, b, c))
    assert one is two and one is not three
    heavy, light = decide.weight(problem_of(a)), decide.weight(problem_of(c))
    assert heavy > 2 * light > 0  # two steps pose it
    first = EVENLY / 2 + (1 - EVENLY) * heavy / (heavy + light)
    assert budgets == pytest.approx([first, 1.0], rel=1e-3)  # nobody took time here
    assert shown == [(0, 2, "f32[4,8] @ f32[8,8]"), (1, 2, "f32[4,8] @ f32[8,3]")]
    chooser(graph, CPU, 15.0, None)(problem_of(a), {1: w1.op.data.tensor()})
    assert budgets[-1] == LONGEST_S
    # The first problem's check, with all that a process does first, says that the others' would take all the time there is.
    monkeypatch.setattr("tilewright.schedule.budget.BudgetedChooser._checks_s", lambda self: 60.0 if self._known else 0.0)
    decide = chooser(graph, CPU, 1.0, None)
    decide(problem_of(a), {1: w1.op.data.tensor()})
    decide(problem_of(c), {1: c.src[1].op.data.tensor()})
    assert budgets[-1] == pytest.approx(FIRST_CHECKS, rel=1e-3)


def test_schedules_print_their_knobs():
    schedule = Schedule.of(tile_m=128, swap_ab=True, order="mnk")
    assert str(schedule) == "tile_m=128 swap_ab=true order=mnk" and schedule["order"] == "mnk"
    assert str(Schedule()) == "default" and hash(schedule) == hash(Schedule.of(tile_m=128, swap_ab=True, order="mnk"))


def test_compile_refuses_what_it_cannot_place():
    x = input_("x", S8, (2, 2))
    graph = Graph("g", (x,), (gemm(x, x),), ("y",))
    with pytest.raises(InputError, match="unknown device 'tpu'"):
        compile(graph, device="tpu")
    with pytest.raises(InputError, match="nothing here reads type int"):
        compile(3)


def test_a_plan_is_made_once_for_a_search_and_all_that_follows(monkeypatch):
    Pace(monkeypatch, lambda who: 10.0)
    asked = []

    class Counted(Fake):
        def plan(self, problem, target):
            asked.append((problem, target))
            return super().plan(problem, target)

    fake = Counted("counted", schedules=[Schedule.of(point=i) for i in range(9)])
    d = search(PROBLEM, CPU, budget_s=1e-9, candidates=[fake, REFERENCE], depth=4)
    assert d.kernel.candidate == "counted" and fake.builds >= 4
    search(PROBLEM, CPU, budget_s=0, candidates=[fake])
    plan_for(fake, PROBLEM, CPU)
    assert asked == [(PROBLEM, CPU)]


def test_a_precision_that_torch_does_not_put_in_a_word_is_the_highest(monkeypatch):
    def mixed():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert search(problem_of(parse("f32[4,8] @ f32[8,4]").outputs[0]), CPU, budget_s=0).verified


def test_an_overrun_of_another_candidate_is_not_kept_as_a_plan():
    """A plan that asks for another's, which has no time left, is made again when there is."""
    late = [True]

    def slow(problem, target):
        if late[0]:
            raise OverrunError("its time is over")
        return Refusal("never")

    inner = Candidate("inner", GEMM, ONLY_CPU, 50, slow)
    outer = Candidate("outer", GEMM, ONLY_CPU, 50, lambda problem, target: Refusal(refusal(inner, problem, target) or ""))
    problem = problem_of(parse("f32[4,8] @ f32[8,4]").outputs[0])
    assert planned(outer, problem, CPU).why.startswith("it was still considering the problem after")
    late[0] = False
    assert planned(outer, problem, CPU) == Refusal("never")


def test_what_is_raised_while_a_plan_is_made_is_a_refusal():
    class Raises(Fake):
        def plan(self, problem, target):
            raise Unsupported("it has no such thing")

    assert planned(Raises("raises"), PROBLEM, CPU) == Refusal("it has no such thing")
    with pytest.raises(UnsupportedError, match=r"raises: it has no such thing"):
        plan_for(Raises("raises"), PROBLEM, CPU)
