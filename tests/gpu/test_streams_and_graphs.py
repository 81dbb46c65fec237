"""Generated kernels and programs on several streams, in several graphs and threads at once, and on a device that is not the
current one."""

import gc
import threading

import pytest
import torch
from on_device import device

import tilewright
from tilewright.candidates.triton.gemm import candidate as triton_gemm
from tilewright.candidates.triton.hopper.gemm import candidate as hopper
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.runtime.replay import Bound, CudaGraphs, Replay
from tilewright.schedule.bench import Bench
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.problem import problem_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PARTS = {"triton": (triton_gemm.CANDIDATE, "split_k", 1), "hopper": (hopper.CANDIDATE, "stream_k", 0)}


def in_parts(name, on):
    """A product whose parts along K are counted, and a point of that kind."""
    candidate, knob, none = PARTS[name]
    problem = problem_of(parse("bf16[256,8192] @ bf16[8192,512] -> f32").outputs[0])
    why = refusal(candidate, problem, on)
    if why is not None:
        pytest.skip(why)
    return candidate, problem, next(s for s in plan_for(candidate, problem, on).schedules() if s[knob] > none)


@pytest.mark.parametrize("name", PARTS)
def test_graphs_of_one_kernel_share_nothing_that_they_count_with(name):
    candidate, problem, schedule = in_parts(name, device())
    run = plan_for(candidate, problem, device()).build(schedule).prepare({})
    sources = [torch.randn(t.shape, device="cuda").bfloat16() for t in problem.types]
    graphs = []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (got,) = run(sources)
        graphs.append((graph, got))
    for graph, got in reversed(graphs):  # none counts on an earlier one
        got.zero_()
        graph.replay()
    (wanted,) = run(sources)
    assert all(torch.equal(got, wanted) for _, got in graphs)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(100):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        (beside,) = run(sources)
    torch.cuda.synchronize()
    assert torch.equal(beside, wanted) and all(torch.equal(got, wanted) for _, got in graphs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
@pytest.mark.parametrize("name", PARTS)
def test_a_kernel_runs_on_each_device_whichever_is_current(name):
    for index in (0, 1):
        target = detect(f"cuda:{index}")
        candidate, problem, schedule = in_parts(name, target)
        assert Bench(problem, target, {}).attempt(0, candidate, schedule).why is None
    assert torch.cuda.current_device() == 0


def program():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.LayerNorm(512), torch.nn.Linear(512, 256)).half().eval()
    given = torch.randn(64, 256).half()
    return tilewright.compile(module, example_inputs=(given,), device="cuda", budget_s=0.2), module.cuda()


def close(got, wanted):
    torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_graphs_made_in_inference_mode_serve_calls_outside_of_it():
    ours, module = program()
    x, y = torch.randn(2, 64, 256, device="cuda").half()
    with torch.inference_mode():
        for _ in range(3):
            close(ours(x), module(x))
    with torch.no_grad():
        close(ours(y), module(y))
    assert "CUDA graph" in ours.launched


def test_programs_over_caches_that_are_made_anew_are_captured_at_once(monkeypatch):
    """A cache for each call of `generate`, with counters that every step counts up."""
    from tilewright.dynamo import register

    register()
    captures, capture = [], CudaGraphs.__call__
    monkeypatch.setattr(CudaGraphs, "__call__", lambda self, run: captures.append(1) or capture(self, run))
    first, second = torch.randn(2, 256, 256, device="cuda", dtype=torch.float16) / 16

    def step(x, cache, count):
        cache.copy_(torch.tanh(cache + x @ first))
        count.add_(1)
        return torch.relu(cache @ second) * count

    torch._dynamo.reset()
    ours = torch.compile(step, backend="tilewright", options={"budget_s": 0, "background": False})
    for lengths in (4, 1, 5):  # one call alone is captured where kernels have run in a graph
        caches = torch.zeros(64, 256, device="cuda", dtype=torch.float16), torch.zeros(1, device="cuda", dtype=torch.int64)
        others = [t.clone() for t in caches]
        for _ in range(lengths):
            x = torch.randn(64, 256, device="cuda").half()
            close(ours(x, *caches), step(x, *others))
        close(caches[0], others[0])
        assert int(caches[1]) == int(others[1]) == lengths
    assert len(captures) == 3


def test_two_programs_are_captured_at_once():
    programs = [program() for _ in range(2)]
    errors, meet = [], threading.Barrier(2)

    def work(ours, module):
        try:
            x = torch.randn(64, 256, device="cuda").half()
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                ours(x)
                meet.wait()
                for _ in range(20):
                    got = ours(x)
                close(got, module(x))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
            meet.abort()

    threads = [threading.Thread(target=work, args=p) for p in programs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert all("CUDA graph" in ours.launched for ours, _ in programs)


def test_memory_of_a_capture_that_failed_is_given_back():
    size = 64 << 20

    def held():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def waits(values):
        values[0].sum().item()
        return [values[0] + 1]

    steps = [
        Bound("large", lambda v: [v[0].expand(size).clone()], [0], [1], []),
        Bound("waits", waits, [1], [2], [1]),
        Bound("sum", lambda v: [v[0].sum().reshape(1)], [2], [3], [2]),
    ]
    torch.cuda.CUDAGraph()
    before = held()
    x = torch.ones(1, device="cuda")
    replay = Replay(steps, [None] * 4, [(0, x)], [3], CudaGraphs("cuda:0"))
    assert list(replay.alone) == [1] and replay.graphs == 2
    (got,) = replay([x])
    assert got.item() == 2 * size
    del replay, got
    assert held() - before < 4 * size
