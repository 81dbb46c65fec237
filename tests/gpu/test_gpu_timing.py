"""Timing of a GPU whose clock is ours: what events take must not show in what a call is said to take."""

import contextlib
import io
import types

import pytest
from rich.console import Console

import tilewright
from tilewright.ir.notation import parse
from tilewright.report.measure import perf
from tilewright.report.measure.inputs import make_feeds
from tilewright.report.measure.timing import RESTS, SPAN_US, Rounds, Times, device_us
from tilewright.report.text import perf_table
from tilewright.schedule import measure
from tilewright.schedule.measure import MOST_TOGETHER, time_interleaved

EVENT_US = 4.8  # what a pair of events adds, and how long after another a kernel begins, about as seen on an H200
LAUNCH_US = 0.5


class FakeGpu:
    """Stands for torch.cuda and for the host's clock: a launch takes the host `host_us`, and work follows work."""

    def __init__(self, monkeypatch, host_us=12.0, record_us=0.0):
        self.host_us, self.record_us, self.host, self.busy_until = host_us, record_us, 0.0, 0.0
        self.spans, self.recorded = [], None
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                gpu.host += gpu.record_us
                self.at = gpu.work(EVENT_US / 2)

            def query(self):
                return self.at <= gpu.host

            def elapsed_time(self, end):
                gpu.spans.append(end.at - self.at)
                return (end.at - self.at + EVENT_US / 2) / 1e3

        cuda = types.SimpleNamespace(
            device=lambda device: contextlib.nullcontext(),
            Event=Event,
            _sleep=lambda cycles: self.work(cycles / measure.CYCLES_PER_US),
            synchronize=lambda device: setattr(self, "host", max(self.host, self.busy_until)),
        )
        monkeypatch.setattr(measure, "CudaGraphs", lambda device: self.capture)
        monkeypatch.setattr(measure, "torch", types.SimpleNamespace(cuda=cuda, get_num_threads=lambda: 1))
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.host / 1e6)

    def capture(self, several):
        self.recorded = []
        try:
            several()
            us = sum(self.recorded)
        finally:
            self.recorded = None

        def replay():
            self.host += self.host_us
            self.work(us)

        return None, replay

    def work(self, us):
        """Add work behind what the device has; it begins no sooner than it is launched."""
        self.busy_until = max(self.busy_until, self.host) + us
        return self.busy_until

    def kernel(self, us, waits=False):
        """A call: `waits` for the device, so that it cannot be captured."""

        def run():
            run.calls += 1
            if self.recorded is not None:
                if waits:
                    raise RuntimeError("operation not permitted when stream is capturing")
                self.recorded.append(us)
                return
            self.host += self.host_us
            self.work(us + LAUNCH_US)

        run.calls = 0
        return run


@pytest.mark.parametrize("us", [2.0, 25.0, 150.0, 5000.0])
def test_a_call_is_as_long_as_many_in_a_row_are(monkeypatch, us):
    gpu = FakeGpu(monkeypatch)
    times = device_us(gpu.kernel(us), "cuda", Rounds.of(7, 0.0))
    assert len(times.us) == 7 and not times.replayed
    events_us = EVENT_US / min(MOST_TOGETHER, max(SPAN_US / (us + 2), 1))
    assert us + LAUNCH_US <= times.median_us <= us + LAUNCH_US + events_us + 1e-6
    assert (times.calls == 1) == (us >= SPAN_US)
    assert min(gpu.spans[-7:]) >= min(SPAN_US, MOST_TOGETHER * us)


def test_a_kernel_within_a_program_is_timed_as_it_is_launched_there(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    kernel, long = gpu.kernel(25.0), gpu.kernel(5000.0)
    times = device_us(kernel, "cuda", Rounds.of(7, 0.0), captured=True)
    assert times.replayed and times.calls >= SPAN_US / 30 and times.median_us == pytest.approx(25.0, rel=0.01)
    assert not device_us(long, "cuda", Rounds.of(7, 0.0), captured=True).replayed, "one call is long enough"
    waits = device_us(gpu.kernel(25.0, waits=True), "cuda", Rounds.of(7, 0.0), captured=True)
    assert not waits.replayed and waits.median_us == pytest.approx(25.0 + LAUNCH_US, rel=0.01)


def test_where_time_is_short_a_gpu_rests_between_three_timings_and_not_behind_them(monkeypatch):
    gpu, slept = FakeGpu(monkeypatch), []
    monkeypatch.setattr(measure.time, "sleep", lambda s: slept.append(1e6 * s) or setattr(gpu, "host", gpu.host + 1e6 * s))
    times = device_us(gpu.kernel(100.0), "cuda", Rounds.of(None, 1e-3), captured=True)
    assert times.replayed and times.calls == 3 and times.us == pytest.approx([100.0] * 3, rel=0.02)
    assert slept == pytest.approx([0.0, *[RESTS * 300.0] * 2], rel=0.02)
    slept.clear()
    late = device_us(gpu.kernel(100.0), "cuda", Rounds.of(None, 1e-9), captured=True)  # it took over ten times its time
    assert len(late.us) == 1 and slept == [0.0]


def test_candidates_are_told_apart_by_their_kernels_alone(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    fast, slow = gpu.kernel(5.0), gpu.kernel(7.0)
    times = time_interleaved([fast, slow], "cuda", budget_s=0.0)
    assert times.us(1) / times.us(0) == pytest.approx(1.4, rel=0.03)
    assert fast.calls > slow.calls > 3


def test_what_is_cold_is_timed_call_by_call(monkeypatch):
    gpu, happened = FakeGpu(monkeypatch), []
    kernel = gpu.kernel(5.0)

    def run():
        happened.append("run")
        kernel()

    time_interleaved([run], "cuda", budget_s=0.0, before=lambda: happened.append("cold"))
    assert happened == ["cold", "run"] * (len(happened) // 2)


def test_what_comes_before_a_cold_call_takes_the_host_longer_than_the_device(monkeypatch):
    gpu = FakeGpu(monkeypatch)

    def before():
        gpu.host += 100.0
        gpu.work(3.0)

    runs = [gpu.kernel(5.0), gpu.kernel(7.0)]
    race = time_interleaved(runs, "cuda", budget_s=0.0, before=before)
    assert [race.us(i) for i in (0, 1)] == [pytest.approx(us + EVENT_US + LAUNCH_US) for us in (5, 7)]


def test_a_cold_call_is_timed_again_if_the_device_waited_for_the_host(monkeypatch):
    gpu = FakeGpu(monkeypatch, host_us=8.0, record_us=15.0)
    first, then = gpu.kernel(2.0), gpu.kernel(4.0)
    runs = [gpu.kernel(5.0), lambda: (first(), then())]
    race = time_interleaved(runs, "cuda", budget_s=0.0, before=lambda: gpu.work(3.0))
    assert (race.us(0), race.us(1)) == (
        pytest.approx(5.0 + EVENT_US + LAUNCH_US),
        pytest.approx(6.0 + EVENT_US + 2 * LAUNCH_US),
    )


def test_the_report_says_how_many_calls_were_timed_together():
    graph = parse("f32[8,16] @ f32[16,8]")
    program, feeds = tilewright.compile(graph, budget_s=0, cache=False), make_feeds(graph)
    shown, asked = [], []
    for times in (Times([24.0, 25.0, 26.0]), Times([24.0, 25.0, 26.0], 40, replayed=True)):
        timer = lambda *given, times=times, captured: asked.append(captured) or times  # noqa: E731
        measured = perf.measure(program, "product", feeds, program.target, timer=timer)
        out = io.StringIO()
        perf_table.print_perf(Console(file=out, width=200), measured)
        shown.append((measured.report.summary, out.getvalue()))
    (alone, alone_table), (many, many_table) = shown
    assert not any("in a row" in s for s in alone) and "median of 3 runs, 24.0 to 26.0" in alone_table
    how = "up to 40 calls in a row, 1 of 1 replayed as a CUDA graph, and pauses between."
    assert many[-2:] == [f"Timed between two events of the GPU: {what} {how}" for what in ("the whole program", "steps")]
    assert "median of 3 timings of 40 calls in a row" in many_table
    assert asked == [True] * 4, "a program of one kernel is that kernel"
