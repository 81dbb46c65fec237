"""How generated GPU kernels are called, with stand-ins for what CUDA says: streams, captures, devices."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from test_hopper import WHOLE, problem
from tilewright.candidates.triton import _hopper_run
from tilewright.candidates.triton._call import SPARE, Counters
from tilewright.candidates.triton._hopper_plan import plan_of
from tilewright.candidates.triton._hopper_space import form_of
from tilewright.candidates.triton.hopper import compiled


class Cuda:
    """What torch says of CUDA."""

    def __init__(self, monkeypatch):
        self.stream, self.capturing, self.device = 1, False, 0
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "device", self.on)

    @property
    def cuda_stream(self):
        return self.stream

    def synchronize(self):
        pass

    @contextmanager
    def on(self, index):
        before, self.device = self.device, index
        yield
        self.device = before


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def test_calls_on_one_stream_share_counters_and_captured_ones_share_none(cuda):
    counters = Counters(5, torch.device("cpu"))
    first = counters.take()
    assert counters.take() is first
    cuda.stream = 2
    taken = [first, counters.take()]
    cuda.capturing = True
    taken += [counters.take() for _ in range(SPARE + 2)]
    assert len({t.data_ptr() for t in taken}) == len(taken)
    assert all(t.numel() >= 5 and not t.any() and t.data_ptr() % 16 == 0 for t in taken)


def test_what_a_graph_counts_with_outlives_the_call(cuda):
    """The graph knows it by its address alone."""
    counters, cuda.capturing = Counters(1 << 16, torch.device("cpu")), True
    taken = [counters.take().data_ptr() for _ in range(SPARE)]
    others = [torch.full((1 << 16,), 7, dtype=torch.int32) for _ in range(2 * SPARE)]
    held = range(counters._made.data_ptr(), counters._made.data_ptr() + counters._made.nbytes)
    assert all(t in held for t in taken) and not any(t.data_ptr() in held for t in others)


def started(monkeypatch, p, names, weights, start):
    """A runner whose kernel is a function of its arguments."""
    plan = plan_of(p)
    monkeypatch.setattr(_hopper_run, "expanded", lambda *_: start)
    monkeypatch.setattr(_hopper_run.Tma, "at", lambda self, address: [address])
    kernel = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=[None] * 3))
    return _hopper_run.runner(p, plan, form_of(p, plan, WHOLE), kernel, names, 1, 0, weights, torch.device("cpu"))


def test_a_hopper_kernel_starts_on_its_own_device(cuda, monkeypatch):
    on = []
    p = problem("bf16[256,128] @ bf16[128,256] -> bf16")
    run = started(monkeypatch, p, [], {}, lambda arguments: on.append(cuda.device))
    sources = [torch.zeros(t.shape, dtype=torch.bfloat16) for t in p.types]
    run(sources)
    cuda.device = 1
    run(sources)
    assert on == [0, 0] and cuda.device == 1


def test_weights_that_do_not_lie_densely_are_copied_once(cuda, monkeypatch):
    addresses = []
    p = replace(problem("bf16[256,128] @ bf16[128,256] + bias -> bf16"), weights=(False, True, True))
    x, w, b = torch.randn(256, 128).bfloat16(), torch.randn(256, 128).bfloat16().t(), torch.randn(512).bfloat16()[::2]
    sources = [x, w, b]
    assert not any(t.is_contiguous() for t in sources[1:])
    run = started(monkeypatch, p, ["p2"], dict(enumerate(sources)), lambda given: addresses.append((given[1], given[3])))
    held = [run(sources) for _ in range(3)]
    assert len(held) == 3 and len(set(addresses)) == 1


def test_machine_code_is_loaded_for_each_device():
    p = problem("bf16[256,128] @ bf16[128,256] -> bf16")
    plan, types = plan_of(p), tuple(t.dtype for t in p.types)
    form = form_of(p, plan, WHOLE)
    first, again, other = (compiled(form, types, device).kernel for device in (0, 0, 1))
    assert first is again and first is not other
