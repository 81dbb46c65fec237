"""Races on a machine that is never quiet: what noise makes does not win, and what it hides is left to the cost model."""

import math
import random

import pytest
import torch
from fake_candidate import Fake
from races import StillMeter, steady

from tilewright import threads
from tilewright.hardware import load as load_module
from tilewright.hardware.detect import detect
from tilewright.hardware.load import Load, Sample
from tilewright.ir.notation import parse
from tilewright.schedule import bench, measure
from tilewright.schedule import race as race_module
from tilewright.schedule import search as search_module
from tilewright.schedule.candidate import Kernel
from tilewright.schedule.cost import Phase, Work, clock_ghz
from tilewright.schedule.measure import time_interleaved
from tilewright.schedule.problem import problem_of
from tilewright.schedule.race import Laps, Race, by_chance, low_quartile
from tilewright.schedule.search import search

CPU = detect("cpu")
PROBLEM = problem_of(parse("f32[8,16] @ f32[16,12]").outputs[0])
BUSY = Load(cores=2, threads=2, runnable=18.0, of_cores=2, others=1.6, waiting=0.8)
NOISE = "18 runnable tasks on 2 cores, other processes had 1.6 of 2 cores, this one waited for a core 80% of the time"


def laps(*samples):
    """Laps of (wall, own, waited) in µs."""
    return Laps.of([Sample(*(x / 1e6 for x in s)) for s in samples])


def test_a_low_quartile_is_the_least_of_a_few_and_robust_of_many():
    assert low_quartile([3.0]) == 3.0 and low_quartile([5.0, 3.0, 9.0]) == 3.0
    assert low_quartile([1.0, *[10.0] * 20]) == 10.0


def test_chance_wins_rarely_all_the_time():
    assert by_chance(5, 5) == 1 / 32 and by_chance(0, 7) == 1.0 and by_chance(9, 10) == pytest.approx(11 / 1024)


def test_a_winner_must_win_in_most_rounds():
    """Its low quartile is the better one, by a third of its rounds."""
    lucky = laps(*[(50, 50, 0)] * 3, *[(120, 120, 0)] * 6)
    steady_one = laps(*[(100, 100, 0)] * 9)
    race = Race({0: lucky, 1: steady_one})
    assert race.us(0) == 50 and not race.beats(0, 1, 0.03) and not race.beats(1, 0, 0.03)
    assert Race({0: laps(*[(90, 90, 0)] * 9), 1: steady_one}).beats(0, 1, 0.03)
    assert not Race({0: laps(*[(98, 98, 0)] * 9), 1: steady_one}).beats(0, 1, 0.03)


def test_a_noisy_contender_does_not_win():
    """Four in five of its calls meet other processes; when none does, it is twice as slow. Its median is far the better one."""
    drawn = random.Random(1)
    victim = laps(*[(100 + drawn.expovariate(1 / 5000), 100, 5000) for _ in range(16)], *[(100, 100, 0)] * 4)
    spared = laps(*[(200 + drawn.random(), 200, 0) for _ in range(20)])
    race = Race({0: victim, 1: spared}, NOISE)
    assert race.beats(0, 1, 0.03) and not race.beats(1, 0, 0.03) and race.us(0) < race.us(1)


def test_of_clean_calls_the_clock_counts_and_else_what_is_left_without_waiting():
    few, many = [(900, 100, 800)] * 5 + [(110, 100, 0)] * 4, [(900, 100, 800)] * 5 + [(110, 100, 0)] * 5
    assert Race({0: laps(*few)}, NOISE).us(0) == 100
    assert Race({0: laps(*many)}, NOISE).us(0) == pytest.approx(110)
    assert Race({0: laps(*few)}).us(0) == pytest.approx(110), "a quiet machine's clock is believed"


def test_where_times_are_noise_a_few_rounds_show_nothing_but_a_large_difference():
    one, other, far = laps(*[(100, 100, 0)] * 3), laps(*[(120, 120, 0)] * 3), laps(*[(200, 200, 0)] * 3)
    quiet, noisy = Race({0: one, 1: other, 2: far}), Race({0: one, 1: other, 2: far}, NOISE)
    assert quiet.beats(0, 1, 0.03) and not noisy.beats(0, 1, 0.03) and noisy.beats(0, 2, 0.03)
    more = Race({0: laps(*[(100, 100, 0)] * 6), 1: laps(*[(120, 120, 0)] * 6)}, NOISE)
    assert more.beats(0, 1, 0.03)


def test_one_that_sat_out_is_beaten_by_what_it_took_once():
    race = Race({0: laps(*[(100, 100, 0)] * 5), 1: laps((900, 900, 0)), 2: Laps()}, NOISE)
    assert race.beats(0, 1, 0.03) and race.us(2) == math.inf and race.beats(0, 2, 0.03) and not race.beats(2, 0, 0.03)


def test_the_words_on_a_load():
    assert BUSY.noise == NOISE and Load().noise == "" and Load(cores=4, threads=1, others=3.0).noise == ""
    assert Load(cores=4, threads=1, others=3.5).noise == "other processes had 3.5 of 4 cores"
    assert Load(of_cores=1, runnable=3.0, others=0.2).noise == "3 runnable tasks on 1 core"
    assert Load(of_cores=4, runnable=7.0, waiting=0.07).noise == "", "torch's threads and the kernels' own wait for each other"
    assert (
        Load(stolen=0.3, slowed=2.0).noise == "the hypervisor took 30% of the cores' time, the cores ran at 50% of their speed"
    )
    assert Load(gpu="another process used 40 % of the GPU").noise == "another process used 40 % of the GPU"


@pytest.fixture
def planted(monkeypatch):
    """A load, and times that a clock says: samples by run and round."""

    def give(load, samples):
        class Planted:
            def __init__(self, *_):
                pass

            def look(self):
                pass

            def load(self):
                return load

            def refresh(self):
                pass

            def timed(self, run):
                return Sample(*(x / 1e6 for x in samples[run]()))

        monkeypatch.setattr(measure, "Meter", Planted)
        monkeypatch.setattr(measure, "Threads", Planted)

    return give


def test_a_race_takes_turns_and_says_what_the_load_was(planted):
    order = []

    def one():
        order.append("one")
        return 100, 100, 0

    def other():
        order.append("other")
        return 5000, 110, 4890

    planted(BUSY, {one: one, other: other})
    race = time_interleaved([one, other], "cpu", budget_s=0.0)
    assert race.noise == NOISE and order == ["one", "other", "one", "other", "other", "one", "one", "other"]
    assert race.us(1) == pytest.approx(110) and race.laps[1].wall_us == pytest.approx((5000,) * 3)


def test_times_that_lie_far_apart_are_noise_though_the_machine_seems_quiet(planted, monkeypatch):
    drawn = iter([100, 100, 300, 100, 300, 100, 300, 100, 300] * 9)
    run = lambda: None  # noqa: E731
    planted(Load(), {run: lambda: (next(drawn),) * 2 + (0,)})
    monkeypatch.setattr(race_module, "SPREAD", 2.0)
    monkeypatch.setattr(measure, "LEAST_ROUNDS", 8)
    assert time_interleaved([run], "cpu", budget_s=0.0).noise == ("calls of one kernel took from 100.0 to 300.0 µs")
    planted(Load(), {run: lambda: (100, 100, 0)})
    assert time_interleaved([run], "cpu", budget_s=0.0).noise == ""


def test_on_a_busy_machine_two_threads_are_one_for_the_race(monkeypatch, request):
    """And where there are too many for that, only calls count in which none waited."""
    torch.set_num_threads(2)
    counts = []

    class Counting(Fake):
        def build(self, schedule):
            return Kernel(
                self.name, schedule, lambda weights: lambda s: counts.append(torch.get_num_threads()) or [s[0] @ s[1]]
            )

    def raced(load, few):
        monkeypatch.setattr(bench, "Meter", StillMeter(load))
        monkeypatch.setattr(measure, "Meter", StillMeter(load))
        monkeypatch.setattr(bench, "FEW_THREADS", few)
        made = bench.Bench(PROBLEM, CPU, {})
        assert made.attempt(7, Counting("counting"), search_module.Schedule()).fault is None
        counts.clear()
        return made.times([7], 0.0)

    race = raced(BUSY, 4)
    assert race.exact and race.noise == f"{NOISE}; kernels raced on one thread"
    on_all = counts.index(2)  # how much the fastest gains
    assert set(counts[:on_all]) == {1} and set(counts[on_all:]) == {2}
    assert torch.get_num_threads() == 2
    race = raced(BUSY, 1)
    assert set(counts) == {2} and not race.exact and race.noise == NOISE
    assert set(counts) == {2} and raced(Load(), 4).noise == ""
    monkeypatch.setattr(bench, "Meter", StillMeter(BUSY))
    assert bench.Bench(PROBLEM, CPU, {}).times([], 0.0).laps == {}


def test_a_crowded_machine_checks_on_one_thread_and_repeats_on_all(monkeypatch, request):
    """Two threads would wait for two cores at each barrier of torch's operations."""
    monkeypatch.setattr(load_module, "free_cores", lambda: 8)
    monkeypatch.setattr(measure, "free_cores", lambda: 8)
    torch.set_num_threads(2)
    counts, asked = [], []
    expect = bench.expect
    monkeypatch.setattr(bench, "expect", lambda *given: asked.append(torch.get_num_threads()) or expect(*given))

    class Counting(Fake):
        def build(self, schedule):
            return Kernel(
                self.name, schedule, lambda weights: lambda s: counts.append(torch.get_num_threads()) or [s[0] @ s[1]]
            )

    for load, count in ((BUSY, 1), (Load(cores=2, threads=2, others=1.0), 2), (Load(), 2)):
        monkeypatch.setattr(bench, "Meter", StillMeter(load))
        counts.clear()
        asked.clear()
        assert bench.Bench(PROBLEM, CPU, {}).attempt(7, Counting("counting"), search_module.Schedule()).fault is None
        assert asked == [count] and counts == [count] * (len(counts) - 3) + [2] * 3 and torch.get_num_threads() == 2
    for module in (load_module, measure):
        monkeypatch.setattr(module, "free_cores", lambda: 1)
    asked.clear()
    counts.clear()
    assert bench.Bench(PROBLEM, CPU, {}).attempt(7, Counting("counting"), search_module.Schedule()).fault is None
    assert asked == [1] and set(counts) == {1} and torch.get_num_threads() == 2


def test_threads_that_wait_for_each_other_are_compared_where_none_waited_alone():
    slow, fast = [(4000, 4000, 0)] * 4, [(300, 300, 0)] * 8
    race = Race({0: laps(*fast), 1: laps(*slow, *[(4000, 4000, 900)] * 4)}, NOISE, exact=False)
    assert not race.beats(0, 1, 0.03) and Race(race.laps, NOISE).beats(0, 1, 0.03)
    assert Race({0: laps(*fast), 1: laps(*slow, *slow)}, NOISE, exact=False).beats(0, 1, 0.03)


class Modelled(Fake):
    """A generated kernel that is expected to take so many µs."""

    expected_us = 1.0

    def work(self, schedule):
        return Work((Phase(self.expected_us * clock_ghz(CPU) * 1e3),))


def test_what_is_not_told_apart_goes_to_the_cost_models_order(monkeypatch):
    """The second one seems 10 % faster in three rounds: in quiet it wins, in noise the order stands. Where the cost model
    expects a library to be far faster, that one comes first."""
    for noise, expected_us, chosen in (("", 1.0, "library"), (NOISE, 1.0, "generated"), (NOISE, 1e6, "library")):
        monkeypatch.setattr(bench.Bench, "times", lambda self, keys, budget_s, n=noise: steady({0: 100.0, 1: 90.0}, n))
        generated = Modelled("generated", preference=0)
        generated.expected_us = expected_us
        d = search(PROBLEM, CPU, candidates=[generated, Fake("library", preference=30)])
        assert d.kernel.candidate == chosen and d.provisional == noise
    monkeypatch.setattr(bench.Bench, "times", lambda self, keys, budget_s: steady({0: 100.0, 1: 50.0}, NOISE))
    d = search(PROBLEM, CPU, candidates=[Modelled("generated", preference=0), Fake("library", preference=30)])
    assert d.kernel.candidate == "library" and d.provisional == NOISE and d.time_us == 50.0


@pytest.mark.parametrize("preference", [10, 20, 50], ids=["onednn", "aten", "split"])
def test_in_noise_what_waits_for_other_threads_must_be_far_faster(monkeypatch, preference):
    """Kernels race there on one thread, which waits for nobody; with several a library loses what it seems to win."""
    for noise, count, us, chosen in (
        (NOISE, 2, 85.0, "generated"),
        (NOISE, 2, 70.0, "library"),
        (NOISE, 1, 85.0, "library"),
        ("", 2, 85.0, "library"),
    ):
        times = {k: laps(*[(one, one, 0)] * 9) for k, one in enumerate((100.0, us))}
        monkeypatch.setattr(bench.Bench, "times", lambda self, keys, budget_s, of=times, n=noise: Race(of, n))
        torch.set_num_threads(count)
        with threads.limited(count):
            d = search(PROBLEM, CPU, candidates=[Modelled("generated", preference=0), Fake("library", preference=preference)])
        assert (d.kernel.candidate, d.provisional) == (chosen, noise), (noise, count, us)
        (lost,) = [r for r in d.rejected if r.candidate in ("generated", "library")]
        assert lost.kind == ("tie" if chosen == "generated" else "slower")
        assert (lost.why == search_module.WAITS) is (chosen == "generated")


def test_no_more_points_are_tried_in_noise(monkeypatch):
    monkeypatch.setattr(bench.Bench, "times", lambda self, keys, budget_s: steady(dict.fromkeys(keys, 100.0), NOISE))
    deep = Fake("deep", schedules=[search_module.Schedule.of(point=i) for i in range(9)])
    assert search(PROBLEM, CPU, budget_s=1000.0, candidates=[deep]).provisional == NOISE and deep.builds == 2


def test_a_library_is_timed_however_late_it_is(monkeypatch):
    timed = []

    def times(self, keys, budget_s):
        timed.extend(keys)
        return steady({k: 10.0 + k for k in keys})

    monkeypatch.setattr(bench.Bench, "times", times)
    points = [search_module.Schedule.of(point=i) for i in range(3)]
    generated, another = Fake("generated", preference=0, schedules=points), Fake("another", preference=5)
    library, second = Fake("library", preference=10, schedules=points), Fake("second", preference=20)
    d = search(PROBLEM, CPU, budget_s=5.0, within_s=0.0, candidates=[generated, another, library, second])
    assert len(timed) == 2 and (generated.builds, another.builds, library.builds, second.builds) == (1, 0, 1, 0)
    assert d.measured and 11.0 in [r.time_us for r in d.rejected if r.candidate == "library"]


def test_a_kernel_that_waits_for_a_core_is_not_called_slower(monkeypatch):
    """Its runs take a second by the clock, and a millisecond of its own."""
    walls = []

    class Waiting(measure.Threads):
        def timed(self, run):
            run()
            walls.append(1.0)
            return Sample(1.0, 0.001, 0.999)

    monkeypatch.setattr(measure, "Threads", Waiting)
    sources = [torch.randn(8, 16), torch.randn(16, 12)]
    expected = bench.expect(PROBLEM, sources, Fake("f").build(None).roundoff)
    pace = measure.Pace(0.001)
    assert measure.examine(PROBLEM, expected, lambda s: [s[0] @ s[1]], sources, pace=pace, watched=False) is None and walls
