"""Steps as graphs, with a recorder that stands for CUDA's: it runs the steps again into the same memory when replayed."""

from dataclasses import replace

import pytest
import torch

from tilewright.runtime.replay import SWITCH, Bound, OnDevice, Replay, results_last


class Recorder:
    """Records as a CUDA graph does: a step marked `waits` spoils the graph. Memory that a step left is written again."""

    def __init__(self):
        self.capturing, self.attempts = False, 0

    def __call__(self, run):
        self.attempts += 1
        self.capturing = True
        try:
            values = run()
        finally:
            self.capturing = False
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


class Stands:
    """For a stream or an event: notes what is asked of it."""

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


def test_why_there_is_no_graph(monkeypatch):
    steps = chain(Recorder())
    assert OnDevice("cuda:0", steps[:1], [], [], []).words == "step by step: a CUDA graph of one step would save nothing"
    assert OnDevice("cuda:0", steps, [], [], []).words == "step by step until the second call"
    assert OnDevice("cuda:0", steps, [], [], [], allowed=False).words == "step by step: it is part of another program"
    monkeypatch.setenv(SWITCH, "0")
    device = OnDevice("cuda:0", steps, [], [], [])
    assert device.words == f"step by step: {SWITCH} is 0"
    assert device([]) is None
