"""Kernels that compute operands while packing and side inputs while storing, and the steps they are timed against."""

import random
from dataclasses import replace

import pytest
import torch
from computed_problems import problem, prologues, sides

from tilewright.candidates import split
from tilewright.candidates.llvm.gemm import candidate as llvm_gemm
from tilewright.dtype import BF16, F16, F32, S8
from tilewright.hardware.detect import chips, detect
from tilewright.hardware.target import Target
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import Refusal, discover, plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import search

HOST = detect("cpu")
SHAPES = [(1, 1, 1), (1, 7, 3), (5, 1, 17), (13, 31, 2), (67, 17, 33), (32, 128, 64), (3, 257, 97)]


def some(candidate, p, count, seed):
    """The first points of a space, and others."""
    points = list(plan_for(candidate, p, HOST).schedules())
    return points[:1] + random.Random(seed).sample(points[1:], min(count, len(points) - 1))


def assert_right(kernel, p, sources):
    got = kernel.prepare({})(sources)
    why = check(p, expect(p, sources), got)
    assert why is None, f"{p} by {kernel.schedule}: {why}"


def cases():
    for d in (F32, BF16, F16, S8):
        names = list(prologues(d, 2, 2))
        for i, name in enumerate(names):
            yield d, name, None if d is S8 else list(sides(d, 2, 2))[i % 6], names[(i + 1) % len(names)] if i % 2 else None


@pytest.mark.thin(2)
@pytest.mark.parametrize(("d", "name", "side", "right"), list(cases()), ids=str)
def test_what_is_computed_while_packing_is_right_at_every_edge(d, name, side, right):
    shapes = random.Random(f"{d}{name}").sample(SHAPES, 2)
    for m, k, n in shapes:
        p = problem(d, name, m, k, n, side, right)
        assert any(not isinstance(r.op, Param) for r in (p.op.lhs, p.op.rhs))
        if refusal(llvm_gemm.CANDIDATE, p, HOST) is not None:
            assert d in (F16, BF16, S8)  # whose instructions a machine may lack
            continue
        sources = random_sources(p)
        for schedule in some(llvm_gemm.CANDIDATE, p, 1, f"{d}{name}{m}"):
            assert_right(plan_for(llvm_gemm.CANDIDATE, p, HOST).build(schedule), p, sources)


def test_nan_and_infinity_pass_through():
    for name in ("relu", "silu", "masked", "exponential"):
        p = problem(F32, name, 9, 33, 20)
        sources = random_sources(p)
        for i, t in enumerate(sources):
            if t.is_floating_point():
                t.view(-1)[i::37] = torch.tensor([float("nan"), float("inf"), -float("inf")][i % 3])
        kernel = plan_for(llvm_gemm.CANDIDATE, p, HOST).build(next(iter(plan_for(llvm_gemm.CANDIDATE, p, HOST).schedules())))
        assert_right(kernel, p, sources)


@pytest.mark.parametrize("way", ["operands", "epilogue"])
def test_steps_of_their_own_are_offered_and_right(way):
    p = problem(F32, "silu", 33, 47, 20, "beta", "relu")
    schedule = next(s for s in plan_for(split.CANDIDATE, p, HOST).schedules() if s["at"] == way)
    kernel = plan_for(split.CANDIDATE, p, HOST).build(schedule)
    assert_right(kernel, p, random_sources(p))
    if way == "operands":
        assert kernel.schedule["by"].count(",") == 2  # two operands and the product
        assert plan_for(split.CANDIDATE, p, HOST).offers(kernel.schedule)
        assert_right(plan_for(split.CANDIDATE, p, HOST).build(kernel.schedule), p, random_sources(p))


def test_a_weight_that_the_product_has_packed_is_not_read_again():
    p = problem(F32, "silu", 8, 47, 20)
    p = replace(p, weights=tuple(t.shape == (47, 20) for t in p.types))
    sources = random_sources(p)
    kernel = plan_for(split.CANDIDATE, p, HOST).build(next(iter(plan_for(split.CANDIDATE, p, HOST).schedules())))
    run = kernel.prepare({i: sources[i] for i, w in enumerate(p.weights) if w})
    assert kernel.releasable or "llvm" not in str(kernel.schedule["by"]).split(", ")[-1:]
    got = run([None if i in kernel.releasable else t for i, t in enumerate(sources)])
    assert check(p, expect(p, sources), got) is None


def test_both_forms_are_timed():
    p = problem(F32, "silu", 64, 64, 64)
    decision = search(p, HOST, budget_s=0.3)
    named = {decision.kernel.candidate, *(r.candidate for r in decision.rejected if r.time_us is not None)}
    assert {"llvm", "split"} <= named


def test_unmeasured_a_cpu_packs_and_a_gpu_weighs():
    """Few rows compute their operand where it is read; of many rows each tile would, and a step of its own is cheaper."""
    pytest.importorskip("triton")
    assert plan_for(split.CANDIDATE, problem(F32, "silu", 512, 512, 512), HOST).leading() is None
    h100 = next(c for c in chips() if c.name == "nvidia_h100")
    gpu = Target(h100.name, h100, "cuda", h100.sms, features=h100.requires)
    large = plan_for(split.CANDIDATE, problem(BF16, "silu", 8192, 8192, 8192), gpu).leading()
    assert large is not None and large["at"] == "operands" and "hopper" in str(large["by"])
    assert plan_for(split.CANDIDATE, problem(BF16, "silu", 16, 4096, 4096), gpu).leading() is None
    codes = plan_for(split.CANDIDATE, problem(S8, "masked", 512, 4096, 1024), gpu).leading()  # bytes that do not lie along K
    assert codes is not None and "hopper" in str(codes["by"])


def test_unmeasured_what_no_kernel_computes_is_a_step_of_its_own(monkeypatch):
    p = problem(F32, "silu", 33, 47, 20)
    llvm = llvm_gemm.CANDIDATE
    narrow = replace(llvm, plan=lambda q, t: Refusal("it has no vectors") if q == p else llvm.plan(q, t))
    found = [narrow if c is llvm else c for c in discover()]
    monkeypatch.setattr(split, "discover", lambda: found)
    decision = search(p, HOST, budget_s=0, candidates=found)
    assert decision.kernel.candidate == "split" and decision.kernel.schedule["by"].endswith("llvm") and decision.verified


def test_a_dropped_prologue_shows():
    """The bounds let no kernel pass that leaves the function out or rounds its value to fewer bits."""
    p = problem(F32, "silu", 33, 64, 20)
    sources = random_sources(p)
    expected = expect(p, sources)
    x, y, b = sources
    assert check(p, expected, [(torch.nn.functional.silu(x) * y) @ b]) is None
    for wrong in (x * y, (torch.nn.functional.silu(x) * y).bfloat16().float(), torch.nn.functional.silu(x.half()).float() * y):
        assert check(p, expected, [wrong @ b]) is not None
