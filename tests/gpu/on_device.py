"""Helpers for tests of generated gemms on a device: random gemms, kernels compiled side by side, results in guarded memory."""

import functools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_anchors import gemms

from tilewright.hardware.detect import detect
from tilewright.schedule.bench import Bench
from tilewright.schedule.candidate import discover, plan_for, refusal
from tilewright.schedule.problem import problem_of


@functools.cache
def device():
    return detect("cuda")


def drawn(candidate, count: int, number: int, most: int) -> list:
    """The first random gemms of a seed's `number` that have a kernel, of `most` that are drawn."""
    found = []

    @seed(number)
    @settings(max_examples=most, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(gemms())
    def draw(node):
        problem = problem_of(node)
        if len(found) < count and refusal(candidate, problem, device()) is None:
            found.append(problem)

    draw()
    assert len(found) == count
    return found


def compile_one(case):
    """Fill Triton's cache, in a process of its own."""
    name, problem, schedule, target = case
    candidate = next(c for c in discover() if c.name == name)  # which cannot be pickled
    plan_for(candidate, problem, target).build(schedule)


def assert_right(candidate, cases):
    """Problems and points of a candidate agree with the oracle."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, [(candidate.name, p, s, device()) for p, s in cases]))
    wrong = []
    for key, (problem, schedule) in enumerate(cases):
        attempt = Bench(problem, device(), {}).attempt(key, candidate, schedule)
        if attempt.why is not None:
            wrong.append(f"{problem} ({schedule}): {attempt.why}")
    assert not wrong, "\n".join(wrong)


def random_sources(problem):
    return [torch.randn(t.shape, device="cuda").to(t.dtype.to_torch()) for t in problem.types]


def assert_the_same_every_time(candidate, problem, schedule):
    """Parts of K are added up in the same order on every run."""
    run = plan_for(candidate, problem, device()).build(schedule).prepare({})
    sources = random_sources(problem)
    (first,) = run(sources)
    for _ in range(20):
        assert torch.equal(run(sources)[0], first)


def assert_follows_its_stream(candidate, problem, schedule):
    """A kernel of a @ b + bias runs on the current stream, and can be captured in a graph."""
    run = plan_for(candidate, problem, device()).build(schedule).prepare({})
    sources = random_sources(problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        sources[0].neg_()
        (turned,) = run(sources)
    torch.cuda.synchronize()
    a, b, bias = (t.float() for t in sources)
    torch.testing.assert_close(turned.float(), a @ b + bias, rtol=2e-2, atol=2e-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = run(sources)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, turned)
