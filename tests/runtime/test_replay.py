"""Steps as graphs, with a recorder that stands for CUDA's: it runs the steps again into the same memory when replayed."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.dtype import F32, OPAQUE
from tilewright.errors import UnsupportedError
from tilewright.ir.build import input_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call
from tilewright.ir.types import TensorType
from tilewright.runtime.arrays import copy_over
from tilewright.runtime.partition import Part
from tilewright.runtime.replay import MOST_FAILED, SWITCH, UNTRIED, Bound, OnDevice, Replay, results_last
from tilewright.runtime.steps import OF_OPAQUE, OUTSIDE, library_step, why_alone


class Recorder:
    """Records as a CUDA graph does: a step marked `waits` spoils the graph. Memory that a step left is written again."""

    def __init__(self, *state):
        self.capturing, self.attempts, self.state, self.bytes = False, 0, state, 0

    def __call__(self, run):
        self.attempts += 1
        self.capturing = True
        before = [t.clone() for t in self.state]
        try:
            values = run()
        finally:
            self.capturing = False
            for t, was in zip(self.state, before, strict=True):
                t.copy_(was)  # a graph that is captured does not run
        kept = list(values)

        def replay():
            for into, value in zip(kept, run(), strict=True):
                if isinstance(into, torch.Tensor) and into is not value:
                    with torch.inference_mode():  # a graph asks torch for nothing
                        into.copy_(value)

        return values, replay


def waits(recorder, f):
    """A step that cannot be captured."""

    def run(values):
        if recorder.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return f(values)

    return run


# slots: 0 x, 1 y, 2 weight, 3 x @ w, 4 relu, 5 sorted, 6 sorted + y, 7 times two
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def chain(recorder, alone=None):
    return [
        Bound("product", lambda v: [v[0] @ v[1]], [0, 2], [3], []),
        Bound("relu", lambda v: [v[0].relu()], [3], [4], [3]),
        Bound("sort", waits(recorder, lambda v: [v[0].sort(-1).values]), [4], [5], [4], alone),
        Bound("add", lambda v: [v[0] + v[1]], [5, 1], [6], []),
        Bound("twice", lambda v: [v[0] * 2], [6], [7], [6]),
    ]


def wanted(x, y):
    s = (x @ WEIGHT).relu().sort(-1).values
    return [s, (s + y) * 2]


def made(recorder, x, y, alone=None, outputs=(5, 7)):
    return Replay(chain(recorder, alone), [None, None, WEIGHT, *[None] * 5], [(0, x), (1, y)], outputs, recorder)


def same(got, want):
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("alone", [None, "it is a call"])
def test_a_step_that_cannot_be_captured_runs_between_two_graphs(alone):
    recorder = Recorder()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    replay = made(recorder, x, y, alone)
    assert replay.graphs == 2
    assert replay.alone == {2: alone or "operation not permitted when stream is capturing"}
    assert recorder.attempts == (2 if alone else 3)
    for _ in range(3):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        assert same(replay([x, y]), wanted(x, y))


def test_the_last_step_writes_large_results_where_the_caller_keeps_them():
    recorder = Recorder()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    steps = results_last(chain(recorder), {5, 7}, [1 << 30] * 5)
    why = "a graph would have its results of 1074 MB copied"
    assert [s.alone for s in steps] == [None] * 4 + [why]  # what another step reads stays in the graph
    steps[2] = replace(steps[2], run=lambda v: [v[0].sort(-1).values])
    replay = Replay(steps, [None, None, WEIGHT, *[None] * 5], [(0, x), (1, y)], (5, 7), recorder)
    assert replay.graphs == 1 and replay.alone == {4: why}
    first = replay([x, y])
    kept = [t.clone() for t in first]
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    assert same(replay([a, b]), wanted(a, b)) and same(first, kept) and same(kept, wanted(x, y))


@pytest.mark.parametrize(
    ("outputs", "sizes", "alone"),
    [({7}, [1 << 30] * 4 + [1 << 20], []), ({5}, [1 << 30] * 5, []), ({6, 7}, [1 << 30] * 5, [3, 4])],
    ids=["small", "no result", "two"],
)
def test_which_steps_are_left_out_of_a_graph_for_their_results(outputs, sizes, alone):
    steps = results_last(chain(Recorder()), outputs, sizes)
    assert [i for i, s in enumerate(steps) if s.alone] == alone
    assert not any(s.alone for s in results_last(steps[:2], {3, 4}, [1 << 30] * 2))


def test_results_are_the_callers_own_and_inputs_are_left_alone():
    recorder = Recorder()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    replay = made(recorder, x, y, outputs=(5, 7, 0))
    before = x.clone(), y.clone()
    first = replay([x, y])
    kept = [t.clone() for t in first]
    for t in first[:2]:
        t.fill_(float("nan"))
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    second = replay([a, b])
    assert same(second[:2], wanted(a, b)) and second[2] is a
    assert same(replay([x, y])[:2], kept[:2])
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_inputs_of_any_strides_are_read():
    recorder = Recorder()
    x, y = torch.randn(4, 3).t(), torch.randn(6, 8)[::2, ::2]
    replay = made(recorder, x.contiguous(), y)
    assert same(replay([x, y]), wanted(x, y))


def test_an_error_of_a_step_that_runs_alone_reaches_the_caller():
    recorder = Recorder()

    def fails(values):
        raise ValueError("an index out of range")

    steps = [Bound("pick", fails, [0], [1], [], "a call")]
    with pytest.raises(ValueError, match="index out of range"):
        Replay(steps, [None, None], [(0, torch.ones(2, 2))], [1], recorder)


def test_memory_that_runs_out_is_no_property_of_a_step():
    recorder = Recorder()

    def fails(values):
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        Replay([Bound("big", fails, [0], [1], [])], [None, None], [(0, torch.ones(2, 2))], [1], recorder)


def test_a_view_that_a_step_alone_gives_of_a_graphs_memory_is_the_callers_own_too():
    recorder, x = Recorder(), torch.randn(3, 4)
    steps = [
        Bound("twice", lambda v: [v[0] * 2], [0], [1], []),
        Bound("view", lambda v: [v[0].reshape(-1)], [1], [2], [1], "a call"),
    ]
    replay = Replay(steps, [None] * 3, [(0, x)], [2], recorder)
    (got,) = replay([x])
    replay([x + 1])
    assert torch.equal(got, 2 * x.reshape(-1))


def test_graphs_made_in_inference_mode_serve_calls_outside_of_it():
    recorder, (x, y) = Recorder(), torch.randn(2, 3, 4)
    with torch.inference_mode():
        replay = made(recorder, x, y)
        assert same(replay([x, y]), wanted(x, y))
    with torch.no_grad():
        assert same(replay([y, x]), wanted(y, x))


def test_memory_for_what_is_read_from_outside_is_counted():
    x, y = torch.randn(2, 3, 4)
    assert made(Recorder(), x, y).copied_bytes == sum(t.nbytes for t in (x, x, y))  # what is sorted alone is copied, too


@pytest.mark.parametrize(("count", "attempts"), [(2, 3), (6, 4)])
def test_operations_that_spoil_captures_are_not_tried_for_ever(count, attempts):
    recorder, x = Recorder(), torch.randint(-9, 9, (3, 4))
    steps = [Bound("relu", lambda v: [v[0].relu()], [0], [1], [])]
    steps += [
        Bound(f"sort {i}", waits(recorder, lambda v: [v[0] + 1]), [i], [i + 1], [], doubtful=True) for i in range(1, count + 1)
    ]
    steps.append(Bound("twice", lambda v: [v[0] * 2], [count + 1], [count + 2], []))
    replay = Replay(steps, [None] * (count + 3), [(0, x)], [count + 2], recorder)
    assert [*replay.alone] == [*range(1, count + 1)] and recorder.attempts == attempts + 1
    assert [why == UNTRIED for why in replay.alone.values()] == [i >= MOST_FAILED for i in range(count)]
    assert same(replay([-x]), [((-x).relu() + count) * 2])


def test_steps_that_are_never_captured_spoil_no_capture():
    recorder, x = Recorder(), torch.ones(3, 4)
    steps = [Bound(f"call {i}", lambda v: [v[0] + 1], [i], [i + 1], [], "a call", doubtful=True) for i in range(MOST_FAILED)]
    steps += [
        Bound(f"add {i}", f if i % 2 else waits(recorder, f), [i], [i + 1], [], doubtful=True)
        for i, f in enumerate([lambda v: [v[0] + 1]] * 8, MOST_FAILED)
    ]
    steps.append(Bound("call", steps[0].run, [11], [12], [], "a call", doubtful=True))
    replay = Replay(steps, [None] * 13, [(0, x)], [12], recorder)
    found = [replay.alone.get(i) for i in range(12)]
    assert found.count("a call") == 4 and found.count(UNTRIED) == 2 and found.count(None) == 3
    assert recorder.attempts == 2 * MOST_FAILED and same(replay([x]), [x + 12])


def counting(alone=None):
    """Slots: 0 x, 1 a counter, 2 x + the counter, 3 the counter's next value, 4 a view of what it was."""
    return [
        Bound("add", lambda v: [v[0] + v[1]], [0, 1], [2], []),
        Bound("view", lambda v: [v[0][None]], [1], [4], []),
        Bound("next", lambda v: [v[0] + 1], [1], [3], [], alone),
    ]


@pytest.mark.parametrize(
    ("results", "alone", "keeps"), [([2], None, True), ([2, 4], None, False), ([2, 1], None, False), ([2], "a call", False)]
)
def test_new_values_of_state_are_copied_in_the_last_graph(results, alone, keeps):
    counter = torch.tensor([10])
    replay = Replay(
        counting(alone), [None, counter, *[None] * 3], [(0, torch.tensor([5]))], [*results, 3], Recorder(counter), [counter]
    )
    assert replay.keeps == keeps
    got, expected = replay.first, 15
    for x in (6, 7):
        assert got[0] == expected and len(got) == len(results) + (not keeps)
        if not keeps:
            counter.copy_(got[-1])
        expected = x + int(counter)
        got = replay([torch.tensor([x])])
    assert got[0] == 7 + 12 and counter == (13 if keeps else 12)


def test_a_state_whose_new_value_lies_elsewhere_in_each_call_is_not_copied_in_a_graph():
    """The caller's own input, and what a step by itself made: a graph would go on to read the first call's memory."""
    state = torch.zeros(2), torch.zeros(2)
    steps = [
        Bound("alone", lambda v: [v[0] + 5], [0], [3], [], "a call"),
        Bound("twice", lambda v: [v[0] * 2], [0], [4], []),
    ]
    for slots in ([3], [1], [3, 1]):
        start = [None, None, *[None] * 3]
        x = torch.ones(2)
        replay = Replay(steps, start, [(0, x), (1, 3 * x)], [4, *slots], Recorder(*state), state[: len(slots)])
        got = replay([2 * x, 4 * x])
        assert not replay.keeps and got[0].tolist() == [4, 4]
        assert [t.tolist() for t in got[1:]] == [{3: [7, 7], 1: [4, 4]}[s] for s in slots]


def on_device(monkeypatch, recorder, steps, cache, **given):
    """Call a program whose slots are 0 x, 1 the cache, 2, 3: as one on a device is called."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stands([], "stream"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Stands([], "event"))
    monkeypatch.setattr("tilewright.runtime.replay.CudaGraphs", lambda device: recorder)
    device = OnDevice("cuda:0", steps, [None, cache, None, None], [0], [3], state=[cache], **given)

    def call(x):
        got = device([x])
        if got is None:
            values = [x, cache, None, None]
            for step in steps:
                step(values)
            got = [values[3]]
        return got

    return device, call


def adds(values):
    values[1].add_(values[0])
    return [values[1]]


@pytest.mark.parametrize("alone", ["a call", None])
def test_a_cache_is_written_once_where_memory_for_a_graph_runs_out_or_no_step_is_captured(monkeypatch, alone):
    recorder, cache = Recorder(), torch.zeros(1)

    def large(values):
        if recorder.capturing:
            raise torch.OutOfMemoryError("no room\nat all") if alone else RuntimeError("it waits")
        return [values[0] * 2]

    write = adds if alone else waits(recorder, adds)
    steps = [Bound("write", write, [0, 1], [2], [], alone), Bound("large", large, [2], [3], [])]
    device, call = on_device(monkeypatch, recorder, steps, cache)
    for n in range(1, 5):
        assert call(torch.ones(1))[0] == 2 * n and cache == n
    no_step = "no step can be part of a CUDA graph (write: operation not permitted when stream is capturing)"
    assert device.words == f"step by step: {'no room' if alone else no_step}"


def test_state_that_a_graph_writes_is_of_another_version(monkeypatch):
    """torch sees no write of a graph's, and programs tell by the version that a buffer changed which they packed."""
    recorder, cache = Recorder(), torch.zeros(1)
    steps = [Bound("write", adds, [0, 1], [2], []), Bound("twice", lambda v: [v[0] * 2], [2], [3], [])]
    device, call = on_device(monkeypatch, recorder, steps, cache)
    call(torch.ones(1)), call(torch.ones(1))
    device._replay._pieces = [lambda values: None]
    before = cache._version
    call(torch.ones(1))
    assert cache._version == before + 1


def test_what_fails_behind_a_write_is_not_run_again(monkeypatch):
    recorder, cache = Recorder(), torch.zeros(1)

    def fails(values):
        if len(calls) == 2:
            raise RuntimeError("a launch failed")
        return [values[0] * 2]

    steps = [Bound("write", adds, [0, 1], [2], [], "a call"), Bound("fails", fails, [2], [3], [], "a call")]
    device, call = on_device(monkeypatch, recorder, steps, cache)
    calls = [1]
    call(torch.ones(1))
    calls.append(2)
    with pytest.raises(RuntimeError, match="a launch failed"):
        call(torch.ones(1))
    assert cache == 2 and device.words == "step by step: a launch failed"


class Stands:
    """A stand-in for a stream or an event, which notes what is asked of it."""

    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits")

    def record(self, stream):
        self.notes.append(f"recorded on {stream.name}")


def test_a_call_whose_step_fails_is_waited_for_like_any_other(monkeypatch):
    notes = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stands(notes, "stream"))
    device = OnDevice("cuda:0", chain(Recorder()), [], [], [])
    device._done = Stands(notes, "event")

    def fails(inputs):
        notes.append("half of it runs")
        raise ValueError("an index out of range")

    device._replay = fails
    with pytest.raises(ValueError, match="index out of range"):
        device([])
    assert notes == ["stream waits", "half of it runs", "recorded on stream"]


def test_new_values_of_state_are_results_where_memory_for_their_graph_runs_out():
    """Memory runs out at the end of the capture, once the copies over state are in it."""
    counter = torch.tensor([10])

    def record(run):
        run()
        counter.fill_(10)  # a graph that is captured does not run
        raise torch.OutOfMemoryError("no memory for a graph")

    replay = Replay(counting(), [None, counter, *[None] * 3], [(0, torch.tensor([5]))], [2, 3], record, [counter])
    assert replay.short == "no memory for a graph" and not replay.keeps
    assert [t.tolist() for t in replay.first] == [[15], [11]] and counter == 10  # which the caller copies


def test_a_call_that_is_captured_runs_once(monkeypatch):
    counter, notes = torch.tensor([10]), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stands(notes, "stream"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Stands(notes, "event"))
    monkeypatch.setattr("tilewright.runtime.replay.CudaGraphs", lambda device: Recorder(counter))
    met = set()
    device = OnDevice("cuda:0", counting(), [None, counter, *[None] * 3], [0], [2, 3], copied=[counter], met=met)
    assert device([torch.tensor([5])]) is None  # the caller runs the steps
    for n in range(3):
        assert [t.tolist() for t in device([torch.tensor([5])])] == [[15 + n]] and counter == 11 + n
    over_another = OnDevice("cuda:0", counting(), [None, counter, *[None] * 3], [0], [2, 3], copied=[counter], met=met)
    assert [t.tolist() for t in over_another([torch.tensor([5])])] == [[18]] and counter == 14  # at the first call
    elsewhere = OnDevice("cuda:0", counting(), [None, counter, *[None] * 3], [0], [2, 3], copied=[counter], met=met)
    with ThreadPoolExecutor() as pool:  # a thread in which libraries have no handles yet
        assert pool.submit(elsewhere, [torch.tensor([5])]).result() is None


def test_why_there_is_no_graph(monkeypatch):
    steps = chain(Recorder())
    assert OnDevice("cuda:0", steps[:1], [], [], []).words == "step by step: a CUDA graph of one step would save nothing"
    assert OnDevice("cuda:0", steps, [], [], []).words == "step by step until the second call"
    assert OnDevice("cuda:0", steps, [], [], [], allowed=False).words == "step by step: it is part of another program"
    monkeypatch.setenv(SWITCH, "0")
    device = OnDevice("cuda:0", steps, [], [], [])
    assert device.words == f"step by step: {SWITCH} is 0"
    assert device([]) is None


TYPE, ANY = TensorType(F32, (2, 2)), TensorType(OPAQUE, ())
GPU = SimpleNamespace(kind="cuda", device="meta")


def call_step(target, *types, library="torch", rest="", given=TYPE):
    """The step of a call of one operand."""
    x = input_("x", given.dtype, given.shape)
    node = Node(Call(library, target, f'{{"args":[{{"tensor":0}}{rest}],"kwargs":{{}}}}', types or (TYPE,)), x)
    return library_step(Graph("g", (x,), (node,), ("y",)), Part("call", (node,), (x,), (node,)), GPU, None)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (call_step("aten.argmax.default"), None),
        (call_step("aten.argmax.default", library="onnx"), OUTSIDE),
        (call_step("aten.nonzero.default", ANY), OF_OPAQUE),
        (call_step("aten.sum.default", given=ANY), OF_OPAQUE),  # of as many as there are in that call
        (call_step("aten.bernoulli.default"), "it draws random numbers"),
        (call_step("aten.linalg_inv_ex.default", TYPE), "torch may compute a part of it on the CPU"),
        (call_step("aten._fft_r2c.default"), "torch may compute a part of it on the CPU, or free its plan"),
        (call_step("tilewright.as_traced.default"), "its code is not torch's own"),
        (call_step("aten.roll.default", rest=',[{"extent":0}]'), "it reads a number from a tensor"),
    ],
)
def test_which_calls_are_never_part_of_a_graph(step, why):
    found = why_alone(step, GPU)
    assert found == why if why is None else found.startswith(why)
    assert why_alone(step, SimpleNamespace(kind="cpu")) == OUTSIDE


@pytest.mark.parametrize("library", ["torch", "onnx"])
def test_what_is_computed_on_the_cpu_is_refused_where_a_graph_is_captured(library, monkeypatch):
    step, capturing = call_step("aten.relu.default", library=library), [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with pytest.raises(UnsupportedError, match="computes on the CPU, which no CUDA graph does again"):
        step.run([torch.ones(2, 2)])
    capturing[0] = False
    if library == "torch":
        assert step.run([torch.ones(2, 2)])[0].is_meta


def test_arrays_that_may_overlap_are_written_in_order(monkeypatch):
    memory, together = torch.zeros(6), []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *given: together.append(given))
    copy_over([memory[:4], memory[2:]], [torch.ones(4), torch.full((4,), 2.0)])
    assert memory.tolist() == [1, 1, 2, 2, 2, 2] and not together
    copy_over([memory, torch.zeros(1)], [torch.ones(6), torch.ones(1)])
    assert together


def test_a_copy_of_a_program_on_a_device_begins_anew(monkeypatch):
    program = tilewright.compile(torch.nn.Linear(4, 4), example_inputs=(torch.ones(2, 4),), device="cpu", budget_s=0)
    program._on_device = OnDevice("cuda:0", chain(Recorder()), [], [], [])  # it has a lock, an event and graphs
    program._kernels = program.steps, program._program, program._on_device
    program._met.add(1)
    other = copy.deepcopy(program)
    assert other._on_device is None and not other._met and program._met  # as it is on a CPU
