"""The CPU's space of sizes and the model that ranks it: legal points are right kernels, what they should cost makes sense."""

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest
from work import counting

from tilewright.candidates.llvm.gemm import candidate as gemm
from tilewright.candidates.llvm.gemm.dots import choose
from tilewright.candidates.llvm.gemm.space import Points, Product, _Model, legal, ranked, space, work
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F32, S8, S32
from tilewright.hardware.detect import chips, detect
from tilewright.hardware.target import Target
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import concerns, discover, plan_for, refusal
from tilewright.schedule.cost import Phase, Work, library_work, predict, predict_us
from tilewright.schedule.expected import expect
from tilewright.schedule.measure import examine
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

CACHES = {"L1d": 32 << 10, "L2": 1 << 20, "L3": 32 << 20}
KINDS = [
    (c.name, t)
    for c in chips()
    if c.kind == "cpu"
    for t in (F32, BF16, S8)
    if choose(t, t, S32 if t is S8 else F32, c) is not None
]


def machine(name, cores=2, **more):
    return Target(name, next(c for c in chips() if c.name == name), "cpu", cores, caches_bytes=CACHES, **more)


def product(name, dtype, rows, columns, depth, *, batch=1, constant=True, in_place=True):
    dot = choose(dtype, dtype, S32 if dtype is S8 else F32, machine(name).chip).dot
    return Product(dot, batch, rows, columns, depth, constant, in_place, lhs_row=depth * dtype.bits // 8)


def problem(line):
    return problem_of(optimise(parse(line)).outputs[0])


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_every_chip_has_a_space_of_legal_points(name, dtype):
    target = machine(name)
    for rows, columns, depth in ((1, 1, 1), (1, 4096, 4096), (7, 333, 129), (128, 768, 768), (1000, 10, 30000)):
        for constant in (True, False):
            p = product(name, dtype, rows, columns, depth, constant=constant)
            points = space(p, target)
            assert len(points) and legal(points, p, target).all()
            best = next(ranked(p, target))
            assert legal(Points.of(best, p.dot), p, target).all()
            assert 1 <= best.mr <= min(rows, p.dot.most_rows(best.nr // p.dot.lanes)) and not (
                constant and best.pack_per_thread
            )
            assert np.isfinite(predict_us(work(p, points, target), target)).all()


@pytest.mark.parametrize(("columns", "depth"), [(256, 256), (768, 256), (1000, 256), (256, 1024)])
def test_a_core_that_loads_half_a_vector_at_a_time_gets_tall_tiles(columns, depth):
    """Zen: wide tiles of two rows read more of the right operand than they multiply; 6 x 16 is 5 to 25 % quicker."""
    best = next(ranked(product("x86_64_zen1", F32, 64, columns, depth), machine("x86_64_zen1")))
    assert (best.mr, best.nr) in {(5, 16), (6, 16)} and not best.pack_lhs


def test_what_is_illegal_is_said_to_be():
    target = machine("x86_64_avx512_bf16")
    p = product("x86_64_avx512_bf16", F32, 100, 100, 1000, in_place=False)
    best = Points.of(next(ranked(p, target)), p.dot)
    for wrong in (
        {"mr": 0}, {"mr": 15, "nv": 2}, {"nv": 9}, {"mc_panels": 0}, {"mc_panels": 101}, {"nc_panels": 0},
        {"nc_panels": 99}, {"kc": 100}, {"kc": 16},
        {"pack_lhs": False}, {"pack_per_thread": True},
    ):  # fmt: skip
        assert not legal(replace(best, **{k: np.array([v]) for k, v in wrong.items()}), p, target).any(), wrong


LINES = (
    "f32[33,70] @ f32[70,50] + bias, gelu -> f32",
    "bf16[40,512] @ bf16[512,49] -> bf16",
    "s8[37,515] @ s8[515,65] * scale + bias -> s8 scale=tensor",
    "f32[3,20,64] @ f32[3,24,64]^T",
)


@pytest.mark.parametrize("line", LINES)
def test_points_drawn_from_the_space_are_right_kernels(line):
    """Legal means that a kernel is generated, and that it is right: corners of the space too."""
    posed, target = problem(line), detect("cpu")
    if refusal(gemm.CANDIDATE, posed, target) is not None:
        pytest.skip("no kernels are generated here")
    schedules = list(plan_for(gemm.CANDIDATE, posed, target).schedules())
    assert len(set(schedules)) == len(schedules) > 20
    sources = random_sources(posed)
    expected = expect(posed, sources)
    for schedule in random.Random(line).sample(schedules, 6):
        runner = plan_for(gemm.CANDIDATE, posed, target).build(schedule).prepare({})
        assert examine(posed, expected, runner, sources) is None, str(schedule)


def test_thousands_are_ranked_at_once():
    p = product("x86_64_avx512_bf16", S8, 1024, 4096, 4096)
    target = machine("x86_64_avx512_bf16")
    points = space(p, target)
    assert len(points) > 5000
    with counting() as calls:
        next(ranked(p, target))
    assert calls.count < len(points)


def simulated(blocks, p, cores):
    """The share of all tiles that the busiest thread gets, each taking the next task as soon as it is free."""
    panels, together = -(-p.N // blocks.nr), blocks.nc // blocks.nr
    across = [min(together, panels - i) for i in range(0, panels, together)]
    down = [min(blocks.mc, p.M - i) for i in range(0, p.M, blocks.mc)]
    tasks = [a * d for a in across for d in down] * p.batch
    ends = [0] * cores
    for each in tasks:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends) / sum(tasks)


@pytest.mark.parametrize("cores", [2, 3, 8, 64])
def test_the_slowest_thread_is_foreseen(cores):
    target = machine("x86_64_avx512_bf16", cores)
    errors = []
    for shape in ((128, 768, 768), (127, 1000, 300), (19, 2816, 512), (1024, 4096, 256)):
        p = product("x86_64_avx512_bf16", F32, *shape)
        points = space(p, target)
        points = points.at(np.random.default_rng(0).permutation(len(points))[:200])
        foreseen = np.broadcast_to(_Model(p, points, target).makespan(), (len(points),))
        for share, blocks in zip(foreseen, points.blocks(p), strict=True):
            errors.append(abs(share / simulated(blocks, p, cores) - 1))
    assert np.mean(errors) < 0.1 and np.quantile(errors, 0.95) < 0.3


def test_predictions_keep_to_the_machine():
    """Never below what the unit or the memory allows, and more work is never less time."""
    target = replace(machine("x86_64_avx512_bf16"), peak_gops={"f32": 230.0, "bf16": 460.0, "s8": 920.0}, read_gbps=40.0)
    for rows, columns, depth in ((1, 4096, 8192), (64, 1024, 1024), (1024, 1024, 1024)):
        p = product("x86_64_avx512_bf16", F32, rows, columns, depth)
        us = predict_us(work(p, space(p, target), target), target)
        assert us.min() > 2 * rows * columns * depth / 230e3
        assert us.min() > columns * depth * 4 / 40e3 or columns * depth * 4 < CACHES["L3"]
        longer = replace(p, K=2 * depth, lhs_row=2 * p.lhs_row)
        assert predict_us(work(longer, space(longer, target), target), target).min() > 1.3 * us.min()


def test_a_phase_takes_its_slowest_resource_and_some_of_the_others():
    target = replace(machine("x86_64_avx512_bf16"), peak_gops={"s8": 2 * 128 * 4.0}, read_gbps=10.0)  # 4 GHz
    nothing = predict_us(Work((Phase(),)), target)
    compute = predict_us(Work((Phase(cycles=4e6),)), target) - nothing
    memory = predict_us(Work((Phase(reads={"memory": 5e6}),)), target) - nothing
    assert compute == pytest.approx(1000) and memory == pytest.approx(500)
    both = predict_us(Work((Phase(cycles=4e6, reads={"memory": 5e6}),)), target) - nothing
    assert 1000 < both < 1200
    apart = predict_us(Work((Phase(cycles=4e6), Phase(reads={"memory": 5e6})), barriers=1), target) - nothing
    assert apart > 1500


GPU = Target("NVIDIA H200", next(c for c in chips() if c.name == "nvidia_h200"), "cuda", 132)


def test_libraries_on_a_gpu_run_in_waves_of_its_sms():
    one, more = (predict_us(library_work(problem(f"bf16[{128 * m},8192] @ bf16[8192,128]"), GPU), GPU) for m in (132, 133))
    assert 1.5 * one < more < 2.1 * one
    square = predict_us(library_work(problem("bf16[8192,8192] @ bf16[8192,8192] -> bf16"), GPU), GPU)
    assert 1400 < square < 2000, "1100 GFLOP at about 700 TFLOP/s"
    assert library_work(problem("f32[1,8] @ f32[8,8]"), replace(GPU, cores=0)) is None


def test_every_candidate_is_asked_what_it_expects():
    target, posed = detect("cpu"), problem("f32[64,512] @ f32[512,512] + bias -> f32")
    found = {}
    for c in discover():
        if concerns(c, posed, target) and refusal(c, posed, target) is None:
            found[c.name] = predict(c, posed, next(iter(plan_for(c, posed, target).schedules())), target)
    assert found["reference"] is None and found["aten"] > 0
    assert found.get("llvm", 1.0) > 0
    ops = posed.ops
    assert ops / 1e3 / 3000 < found["aten"] < 1e6
