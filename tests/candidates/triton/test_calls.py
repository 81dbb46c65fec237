"""Calls of generated GPU kernels, with stand-ins for what CUDA says: streams, captures, devices."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from ptx import H200 as HERE

from tests.candidates.triton.hopper.test_gemm import WHOLE, problem
from tilewright.candidates.triton.hopper.gemm import run as _hopper_run
from tilewright.candidates.triton.hopper.gemm import tma
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.run import compiled
from tilewright.candidates.triton.hopper.gemm.spec import spec_of
from tilewright.candidates.triton.hopper.gemm.tma import TmaView
from tilewright.candidates.triton.runtime import launch
from tilewright.candidates.triton.runtime.launch import SPARE, Counters, Start, caller, maker, pointers
from tilewright.candidates.triton.runtime.module import Built
from tilewright.dtype import F16, S8
from tilewright.hardware.detect import detect
from tilewright.ir.types import TensorType
from tilewright.schedule.guard import preparing


class Cuda:
    """Answers in torch's place to what is asked of CUDA."""

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


def test_counters_of_many_kernels_are_cleared_together(cuda, monkeypatch):
    monkeypatch.setattr(launch, "_zeroed", {})
    several = [Counters(n, torch.device("cpu")) for n in (1, 5, 132, launch.AT_ONCE, 4)]
    held = [range(c._made.data_ptr(), c._made.data_ptr() + c._made.nbytes) for c in several]
    assert all(a.stop <= b.start or b.stop <= a.start for i, a in enumerate(held) for b in held[:i])
    assert len({c._made.untyped_storage().data_ptr() for c in several}) == 3, (
        "one for small ones, one for the large, and the rest"
    )
    assert not any(c._made.any() for c in several) and all(r.start % 16 == 0 for r in held)


def test_what_a_graph_counts_with_outlives_the_call(cuda):
    """The graph knows it by its address alone."""
    counters, cuda.capturing = Counters(1 << 16, torch.device("cpu")), True
    taken = [counters.take().data_ptr() for _ in range(SPARE)]
    others = [torch.full((1 << 16,), 7, dtype=torch.int32) for _ in range(2 * SPARE)]
    held = range(counters._made.data_ptr(), counters._made.data_ptr() + counters._made.nbytes)
    assert all(t in held for t in taken) and not any(t.data_ptr() in held for t in others)


def started(monkeypatch, p, weights, start):
    """A runner whose kernel is a function of its arguments."""
    plan = plan_of(p, HERE)
    begin = lambda *_, numbers: Start(lambda *given: start([*given, *numbers]), lambda parts: None)  # noqa: E731
    monkeypatch.setattr(_hopper_run, "launcher", begin)
    monkeypatch.setattr(TmaView, "map", lambda self, meta: None)
    monkeypatch.setattr(tma, "_made", lambda m, address: [address])
    kernel = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=[None] * 3))
    return _hopper_run.runner(spec_of(plan, replace(WHOLE, blocks=1)), Built(kernel, (0.5, -3)), weights)


def test_a_hopper_kernel_starts_on_its_own_device(cuda, monkeypatch):
    on = []
    p = problem("bf16[256,128] @ bf16[128,256] -> bf16")
    run = started(monkeypatch, p, {}, lambda arguments: on.append(cuda.device))
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
    run = started(monkeypatch, p, dict(enumerate(sources)), lambda given: addresses.append((given[1], given[3])))
    held = [run(sources) for _ in range(3)]
    assert len(held) == 3 and len(set(addresses)) == 1


def test_every_argument_of_a_hopper_kernel_has_its_place(cuda, monkeypatch):
    calls = []
    p = problem("bf16[256,128] @ bf16[128,256] + bias -> bf16")
    run = started(monkeypatch, p, {}, calls.append)
    x, w, b = torch.randn(256, 128).bfloat16(), torch.randn(128, 256).bfloat16(), torch.randn(256).bfloat16()
    moved, spread = torch.randn(256 * 128 + 1).bfloat16()[1:].view(256, 128), torch.randn(512).bfloat16()[::2]
    results = [run(sources)[0] for sources in ([x, w, b], [moved, w, b], [x, w, spread], [x, w, b])]
    pointers = [[t.data_ptr() for t in (x, w, result, b)] for result in results]
    assert all(call[4:] == [1, 256, 256, 128, 0.5, -3] for call in calls), "batch, M, N, K, numbers"
    assert [call[:4] == wanted for call, wanted in zip(calls, pointers, strict=True)] == [True, False, False, True]
    assert calls[1][1:4] == pointers[1][1:] and calls[1][0] not in (moved.data_ptr(), x.data_ptr()), "a copy on an even address"
    assert calls[2][:3] == pointers[2][:3] and calls[2][3] not in (spread.data_ptr(), b.data_ptr()), "a dense copy"


def test_machine_code_is_loaded_for_each_device():
    p = problem("bf16[256,128] @ bf16[128,256] -> bf16")
    targets = [replace(HERE, index=device) for device in (0, 0, 1)]
    first, again, other = (compiled(spec_of(plan_of(p, target), WHOLE)).kernel for target in targets)
    assert first is again and first is not other


def test_a_kernel_is_given_what_it_reads_and_what_it_writes(cuda):
    started = []
    target = replace(detect("cpu"), index=0)
    types = [TensorType(F16, (3, 5)), TensorType(S8, (2, 0))]
    w = torch.randn(4, 6).t()
    start = Start(lambda *given: started.append((cuda.device, given)), lambda parts: None)
    given = [*pointers("source", [1, 2, 0]), *pointers("result", [0, 1])]
    run = caller(start, given, 3, types, {2: w}, target)
    x, flipped, moved = torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(17)[1:].view(4, 4)
    cuda.device = 1
    kept = [run([x, x, w]), run([flipped, x, w]), run([x, moved, w])]
    assert cuda.device == 1 and [device for device, _ in started] == [0, 0, 0]
    taken = [p for _, p in started]
    assert taken[0][0] == taken[0][2] == taken[1][0] == taken[2][2] == x.data_ptr()
    assert taken[1][2] != flipped.data_ptr() and taken[2][0] != moved.data_ptr(), "copied: not dense, not aligned"
    assert len({p[1] for p in taken}) == 1 and taken[0][1] != w.data_ptr(), "copied once"
    assert [p[3] for p in taken] == [results[0].data_ptr() for results in kept]
    assert all([(t.dtype, t.shape) for t in r] == [(torch.float16, (3, 5)), (torch.int8, (2, 0))] for r in kept)


def test_memory_is_asked_of_torch_where_a_kernel_is_examined(monkeypatch):
    quick = []
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", lambda *asked: quick.append(asked) or torch.empty(1))
    types = [TensorType(F16, (3, 5))]
    with preparing():
        watched = maker(types, "meta")
    assert watched()[0].shape == (3, 5) and not quick
    maker(types, "cuda:0")()
    assert quick == [((3, 5), (5, 1), torch.float16)]
