"""Products of several rows at once, on AMX tiles and in NEON registers: exact for every pair of signs and every edge, the same
on any number of threads.

Each case runs with emulated instructions wherever the tests do, and with AMX where the processor has it; there, random problems
between guard pages follow.
"""

from dataclasses import replace

import pytest
import torch
from emulated import emulated
from gated import gated

from tests.candidates.llvm.test_random import run_child
from tilewright.candidates.llvm.gemm import candidate as gemm
from tilewright.candidates.llvm.gemm.dots import choose
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.runtime import run as _run
from tilewright.candidates.llvm.runtime.engine import host
from tilewright.dtype import BF16, S8
from tilewright.hardware.detect import chips, cpu
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.expected import expect
from tilewright.schedule.measure import examine
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources

AMX, I8MM = (next(c for c in chips() if c.name == name) for name in ("x86_64_amx", "aarch64_i8mm"))
HAVE = cpu().chip is AMX
native = pytest.mark.skipif(not HAVE, reason="this processor has no AMX, or the system does not give it to us")
RANGES = {"s8": (-128, 128), "u8": (0, 256), "s4": (-8, 8), "u4": (0, 16)}
# M, N, K around the edges of tiles (16 or 2 rows, 64 or 8 bytes of K) and blocks of two by two, and many of both
SHAPES = [
    (1, 1, 1), (1, 300, 256), (3, 16, 64), (5, 3, 9), (15, 17, 63), (16, 32, 65), (17, 33, 127), (31, 15, 128), (32, 31, 4),
    (33, 1, 192), (48, 64, 3), (65, 96, 130), (97, 80, 1024), (160, 200, 333),
]  # fmt: skip


@pytest.fixture(params=["emulated AMX", pytest.param("native AMX", marks=native), "emulated NEON"])
def target(request, monkeypatch):
    """A processor with such products whose kernels run here."""
    monkeypatch.setattr(_run, "ONE_THREAD_OPS", -1)
    how, which = request.param.split()
    if how == "emulated":
        monkeypatch.setattr(gemm, "source_of", lambda nest: emulated(GemmWriter(nest).write(), *host()))
    return replace(cpu(), chip=AMX if which == "AMX" else I8MM)


def values(dtype, shape):
    if dtype == "bf16":  # so small that every sum of products is an f32
        return torch.randint(-64, 65, shape).to(torch.bfloat16)
    kept = torch.int8 if dtype[0] == "s" else torch.uint8
    data = torch.randint(*RANGES[dtype], shape)
    low, high = RANGES[dtype]
    data[torch.rand(shape) < 0.2] = low
    data[torch.rand(shape) < 0.2] = high - 1
    return data.to(kept)


def check(target, lhs, rhs, shape, *, batch=1, along=False, constant=False, most_threads=3):
    """One product, exact, on one thread and more."""
    m, n, k = shape
    lead = (batch,) if batch > 1 else ()
    a, b = values(lhs, (*lead, m, k)), values(rhs, (*lead, n, k) if along else (*lead, k, n))
    text = [f"{t}[{','.join(map(str, x.shape))}]" for t, x in ((lhs, a), (rhs, b))]
    (node,) = parse(f"{text[0]} @ {text[1]}{'^T' if along else ''}").outputs
    problem = problem_of(node)
    problem = Problem(problem.op, problem.types, (False, constant))
    assert refusal(gemm.CANDIDATE, problem, target) is None
    schedule = next(iter(plan_for(gemm.CANDIDATE, problem, target).schedules()))
    assert choose(problem.lhs.dtype, problem.rhs.dtype, problem.acc.dtype, target.chip).dot.tile > 1
    run = plan_for(gemm.CANDIDATE, problem, target).build(schedule).prepare({1: b} if constant else {})
    wanted = a.double() @ (b.mT if along else b).double()
    for threads in range(1, most_threads + 1):
        torch.set_num_threads(threads)
        (result,) = run([a, b])
        assert torch.equal(result.double(), wanted), f"{text} on {threads} threads"


@pytest.mark.parametrize("rhs", ["s8", "u8"])
@pytest.mark.parametrize("lhs", ["s8", "u8"])
def test_every_pair_of_signs_is_exact_at_every_edge(target, lhs, rhs):
    for i, shape in enumerate(SHAPES):
        check(target, lhs, rhs, shape, along=i % 2 == 0, constant=i % 3 == 0)


def test_bf16_is_exact_where_f32_is(target):
    for i, shape in enumerate(SHAPES):
        check(target, "bf16", "bf16", shape, along=i % 2 == 0, constant=i % 3 == 0)


@pytest.mark.parametrize(("lhs", "rhs"), [("s8", "s4"), ("u4", "s8"), ("u4", "u4")])
def test_four_bit_codes(target, lhs, rhs):
    check(target, lhs, rhs, (33, 50, 128))
    check(target, lhs, rhs, (40, 20, 70), along=True)


@pytest.mark.parametrize("dtype", ["s8", "bf16"])
def test_several_passes_over_k_add_up(target, dtype):
    check(target, dtype, dtype, (50, 70, 9001))
    check(target, dtype, dtype, (33, 40, 8192), along=True)


@pytest.mark.parametrize("dtype", ["s8", "bf16"])
def test_many_matrices_one_to_eight_threads(target, dtype):
    check(target, dtype, dtype, (37, 45, 100), batch=16, most_threads=8)
    check(target, dtype, dtype, (200, 150, 96), most_threads=8)
    check(target, dtype, dtype, (70, 40, 64), batch=3, along=True, most_threads=8)


@pytest.mark.parametrize("dtype", [S8, BF16])
def test_both_halves_of_the_columns_meet_in_a_store(target, dtype):
    problem = gated(dtype, (37,), 72, 40, scaled=True)
    sources = random_sources(problem)
    schedule = next(iter(plan_for(gemm.CANDIDATE, problem, target).schedules()))
    run = (
        plan_for(gemm.CANDIDATE, problem, target)
        .build(schedule)
        .prepare({i: t for i, t in enumerate(sources) if problem.weights[i]})
    )
    assert examine(problem, expect(problem, sources), run, sources) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_filled_up_takes_no_part(target, value):
    """An infinity in the last row and at the end of K reaches its own row and column, and nothing else."""
    (node,) = parse("bf16[17,33] @ bf16[33,18]").outputs
    problem = problem_of(node)
    schedule = next(iter(plan_for(gemm.CANDIDATE, problem, target).schedules()))
    run = plan_for(gemm.CANDIDATE, problem, target).build(schedule).prepare({})
    a, b = torch.ones(17, 33, dtype=torch.bfloat16), torch.ones(33, 18, dtype=torch.bfloat16)
    a[16, 32] = b[32, 17] = value
    (result,) = run([a, b])
    wanted = torch.full((17, 18), 33.0)
    wanted[16, :], wanted[:, 17] = value, value
    assert torch.equal(result.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


@native
@pytest.mark.parametrize("start", range(4))
def test_random_problems_between_guard_pages_on_one_to_eight_threads(start):
    assert run_child(300 + start, 250, threads=(tuple(range(1, 9)),)) > 100


@native
def test_random_problems_without_tiles_on_the_same_processor():
    assert run_child(310, 250, "x86_64_avx512_bf16") > 100
