"""What tests of generated gemms on a device share: random gemms, kernels compiled side by side, results in guarded memory."""

import functools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from hypothesis import HealthCheck, Phase, given, seed, settings

from random_carriers import gemms
from tilewright.hardware.detect import detect
from tilewright.schedule.bench import Bench
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
        if len(found) < count and candidate.refuse(problem, device()) is None:
            found.append(problem)

    draw()
    assert len(found) == count
    return found


def compile_one(case):
    """Fill Triton's cache, in a process of its own."""
    candidate, problem, schedule, target = case
    candidate.build(problem, schedule, target)


def assert_right(candidate, cases):
    """Problems and points of a candidate agree with the oracle."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, [(candidate, p, s, device()) for p, s in cases]))
    wrong = []
    for key, (problem, schedule) in enumerate(cases):
        attempt = Bench(problem, device(), {}).attempt(key, candidate, schedule)
        if attempt.why is not None:
            wrong.append(f"{problem} ({schedule}): {attempt.why}")
    assert not wrong, "\n".join(wrong)
