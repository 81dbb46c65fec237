"""Plain Triton gemms without a GPU: the machine code they become on every architecture, legal points, and who is refused."""

import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from computed_problems import problem as computed
from gated import CASES

from tilewright.candidates.triton.gemm import candidate as triton_gemm
from tilewright.candidates.triton.gemm.space import shared_bytes
from tilewright.candidates.triton.runtime import module as modules
from tilewright.compiler import optimise
from tilewright.dtype import F16, F32
from tilewright.hardware.detect import chips
from tilewright.hardware.target import Target
from tilewright.ir.build import const, convert, input_, map_, reshape, slice_, transpose
from tilewright.ir.graph import Graph, Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Acc, Gemm, Param, Reduce, gemm
from tilewright.ir.types import TensorType
from tilewright.lowering.access import of_operand
from tilewright.schedule.candidate import Schedule, Unsupported, plan_for, refusal
from tilewright.schedule.cost import predict
from tilewright.schedule.problem import Problem, problem_of

CHIPS = {c.name: c for c in chips()}
HALF = "f16[512,1024] @ f16[1024,768] + bias, gelu -> f16"
BYTES = "s8[512,1024] @ s8[768,1024]^T * scale -> s8"
FP8 = "f8e4m3fn[512,1024] scale=tensor @ f8e4m3fn[768,1024]^T scale=channel -> bf16"
# The instructions that must make up the loop: NVIDIA's as nvdisasm spells them, AMD's as its assembler does.
INTENDED = {
    "nvidia_a100": {HALF: r"HMMA\.16816\.F32 ", BYTES: r"IMMA\.16832\.S8\.S8", FP8: r"HMMA\.16816\.F32 "},
    "nvidia_l4": {FP8: r"QMMA\.16832\.F32\.E4M3\.E4M3"},
    "nvidia_h100": {
        HALF: r"HGMMA\.64x\d+x16\.F32 ",
        BYTES: r"IGMMA\.64x\d+x32\.S8\.S8",
        FP8: r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3",
    },
    "nvidia_b200": {HALF: r"UTCHMMA", FP8: r"UTCQMMA"},
    "nvidia_rtx5090": {FP8: r"QMMA\.16832\.F32\.E4M3\.E4M3"},
    "amd_mi300x": {HALF: r"v_mfma_f32_\d+x\d+x\d+_f16", BYTES: r"v_mfma_i32_\d+x\d+x\d+_i8"},
    "amd_mi355": {FP8: r"v_mfma_(scale_)?f32_\d+x\d+x\d+_f8f6f4"},
}


def target(chip: str) -> Target:
    c = CHIPS[chip]
    return Target(c.name, c, "cuda", c.sms or 100, features=c.requires)


def problem(line: str) -> Problem:
    return problem_of(parse(line).outputs[0])


def machine_code(line: str, at: Target, point=None):
    """Compile the first point of the space, or another one."""
    plan = plan_for(triton_gemm.CANDIDATE, problem(line), at)
    return plan.machine_code(replace(plan.spec, point=point or first_point(plan))).kernel


def first_point(plan):
    return next(iter(plan.schedules())).point(triton_gemm.TileConfig)


@pytest.mark.thin(2)
@pytest.mark.parametrize(("chip", "line"), [(c, x) for c, lines in INTENDED.items() for x in lines])
def test_the_first_point_becomes_the_instructions_meant_without_spills(chip, line):
    compiled = machine_code(line, target(chip))
    needs = modules.needs(compiled)
    assert re.search(INTENDED[chip][line], modules.assembly(compiled))
    assert needs.spills == 0
    assert 0 < needs.shared_bytes <= CHIPS[chip].shared_bytes


def test_a_quantised_result_is_stored_as_the_bytes_it_is():
    """ptxas takes the low byte of a float sum, stored as it is, for a conversion."""
    line = "bf16[64,64] @ bf16[64,64] -> s8 scale=tensor"
    for chip in ("nvidia_a100", "nvidia_h100"):
        assert "F2IP" not in modules.assembly(machine_code(line, target(chip)))


def test_every_legal_point_has_room_and_an_expected_time():
    at = target("nvidia_h100")
    for line in (HALF, BYTES, FP8, "f32[300,200] @ f32[200,100]", "bf16[1,8192] @ s8[3584,8192]^T scale=channel -> bf16"):
        p = problem(line)
        plan = plan_for(triton_gemm.CANDIDATE, p, at)
        times, dot = [], plan.spec.dot
        for schedule in plan.schedules():
            point = schedule.point(triton_gemm.TileConfig)
            assert set(Schedule.of_point(point).knobs) < set(schedule.knobs) or Schedule.of_point(point) == schedule
            stage = (point.tile_m + point.tile_n) * point.tile_k * dot.operand.bits // 8
            assert point.num_stages * stage <= CHIPS["nvidia_h100"].shared_bytes
            times.append(predict(triton_gemm.CANDIDATE, p, schedule, at))
        assert len(times) > 20
        assert times == sorted(times)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("kind", "name", "right"), [(F16, "silu", None), (F16, "narrowed", None), (F16, "relu", "silu")], ids=str
)
def test_all_that_an_operand_is_computed_from_has_room(kind, name, right):
    """Triton takes no more shared memory than is counted, of the deepest pipeline that is offered and of the first."""
    at, p = target("nvidia_h200"), computed(kind, name, 512, 4096, 1024, None, right)
    plan, arch = plan_for(triton_gemm.CANDIDATE, p, at), modules.arch_of(at)
    points = [s.point(triton_gemm.TileConfig) for s in plan.schedules()]
    spec = plan.spec
    for point in {points[0], max(points, key=lambda q: shared_bytes(spec, q, arch))}:
        kernel = plan.machine_code(replace(spec, point=point)).kernel
        counted = shared_bytes(spec, point, arch)
        assert modules.needs(kernel).shared_bytes <= counted <= CHIPS["nvidia_h200"].shared_bytes


def test_bytes_that_do_not_lie_along_k_are_expected_to_take_longer():
    """Measured on an H200: 493 us for 4096^3 in s8, and ten times that with them as the dot's first operand."""
    at = target("nvidia_h200")
    lines = ("s8[4096,4096] @ s8[4096,4096] -> s32", "s8[4096,4096] @ s8[4096,4096]^T -> s32")
    across, along = (problem(line) for line in lines)
    first, last = (
        predict(triton_gemm.CANDIDATE, p, next(iter(plan_for(triton_gemm.CANDIDATE, p, at).schedules())), at)
        for p in (across, along)
    )
    assert first > 2 * last
    assert not any(s["swap_ab"] for s in list(plan_for(triton_gemm.CANDIDATE, across, at).schedules())[:20])


def test_parts_of_k_are_used_where_tiles_do_not_fill_the_chip():
    at = target("nvidia_h100")

    def parts(line):
        return next(iter(plan_for(triton_gemm.CANDIDATE, problem(line), at).schedules()))["split_k"]

    assert parts("bf16[64,16384] @ bf16[16384,256] -> bf16") > 1
    assert parts("bf16[4096,512] @ bf16[512,4096] -> bf16") == 1


def test_several_stores_of_one_product_compile_on_every_generation():
    line = "s8[96,256] @ s8[256,192] * scale -> f16"
    for chip in ("nvidia_a100", "amd_mi300x"):
        first = first_point(plan_for(triton_gemm.CANDIDATE, problem(line), target(chip)))
        for point in (replace(first, split_k=2), replace(first, tile_m=16, tile_n=64, swap_ab=True)):
            assert modules.needs(machine_code(line, target(chip), point)).registers > 0


def test_halves_of_the_columns_meet_after_parts_of_k():
    """A tile's sums become two of half its columns in a branch."""
    at = target("nvidia_a100")
    p = next(iter(CASES.values()))()
    for point in (
        triton_gemm.TileConfig(64, 32, 32, 4, 2, split_k=2),
        triton_gemm.TileConfig(32, 64, 32, 4, 2, split_k=2, swap_ab=True),
    ):
        plan = plan_for(triton_gemm.CANDIDATE, p, at)
        kernel = plan.machine_code(replace(plan.spec, point=point)).kernel
        assert modules.needs(kernel).spills == 0


def test_operands_computed_on_the_way_and_the_largest_compile():
    at = target("nvidia_h100")
    y = map_("multiply", gemm(input_("a", F16, (256, 512)), input_("b", F16, (512, 384))), const(0.5))
    kept = (convert(y, F16), Node(Reduce("maximum", (0, 1)), map_("abs", y)))
    graph = optimise(Graph("g", y.src[0].src, kept, ("out", "amax")))
    largest = problem_of(next(n for n in graph.nodes() if isinstance(n.op, Gemm)))
    for p in (largest, computed(F16, "silu", 256, 512, 384, "beta")):
        plan = plan_for(triton_gemm.CANDIDATE, p, at)
        for parts in (1, 2):
            spec = replace(plan.spec, point=replace(first_point(plan), split_k=parts))
            needs = modules.needs(plan.machine_code(spec).kernel)
            assert needs.spills == 0 and needs.registers > 0


@pytest.mark.parametrize(
    ("line", "chip", "why"),
    [
        ("f32[0,8] @ f32[8,5] -> f32", "nvidia_h100", "an extent is 0"),
        ("f64[33,65] @ f64[65,17]", "nvidia_h100", "add up in f32 or s32, not f64"),
        ("s16[33,65] @ s16[65,17] -> s32", "nvidia_h100", "integers of 8 bits"),
        ("s8[4,131072] @ s8[131072,4] -> s32", "nvidia_h100", "does not wrap"),
        ("u8[4,131000] @ u8[131000,4] -> s32", "nvidia_h100", "does not wrap"),  # 2^17 with the last step's zeros
        ("f16[2147483600,16] @ f16[16,16]", "nvidia_h100", "not counted in 31 bits"),
        ("f16[4,8] @ f16[8,4]", "nvidia_v100", "Triton does not compile for"),
        ("f16[4,8] @ f16[8,4]", "nvidia_t4", "no matrix unit before sm_80"),
    ],
)
def test_what_has_no_kernel_is_refused_with_a_sentence(line, chip, why):
    assert why in refusal(triton_gemm.CANDIDATE, problem(line), target(chip))


def test_f32_is_rounded_to_tf32_only_where_torch_is_told_so_and_then_it_is_said(monkeypatch):
    at, p = target("nvidia_a100"), problem("f32[256,256] @ f32[256,256]")
    before = next(iter(plan_for(triton_gemm.CANDIDATE, p, at).schedules()))
    assert before["precision"] == "ieee"
    assert "FFMA" in modules.assembly(machine_code("f32[256,256] @ f32[256,256]", at))
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
    schedule = next(iter(plan_for(triton_gemm.CANDIDATE, p, at).schedules()))
    assert schedule["precision"] == "tf32"
    assert plan_for(triton_gemm.CANDIDATE, p, at).build(schedule).roundoff == 2.0**-10
    assert re.search(r"HMMA\.1688\.F32\.TF32", modules.assembly(machine_code("f32[256,256] @ f32[256,256]", at)))


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(modules, "installed", lambda: False)
    with pytest.raises(Unsupported, match=r"pip install tilewright\[gpu\]"):
        triton_gemm.CANDIDATE.plan(problem(HALF), target("nvidia_h100"))


def test_steps_along_k_that_are_far_apart_are_counted_in_64_bits():
    rows = (1 << 25) - 32
    types = TensorType(F16, (4, rows, 64)), TensorType(F16, (256, 32))
    params = [Node(Param(i, t)) for i, t in enumerate(types)]
    lhs = reshape(transpose(params[0], (1, 0, 2)), (rows, 256))
    acc = Node(Acc(TensorType(F32, (rows, 32))))
    p = problem_of(Node(Gemm(F32, lhs, params[1], (acc,)), *(input_(f"x{i}", t.dtype, t.shape) for i, t in enumerate(types))))
    at, point = target("nvidia_a100"), triton_gemm.TileConfig(32, 32, 64, 4, 2)
    plan = plan_for(triton_gemm.CANDIDATE, p, at)
    code = plan.machine_code(replace(plan.spec, point=point)).kernel.asm["ttir"]
    assert f"constant {rows * 64} : i64" in code and f"{rows * 64} : i32" not in code


def test_a_kernels_text_can_be_shown_and_equal_texts_are_one_module():
    text = f"{modules.IMPORTS}\n\n@triton.jit\ndef f(p0):\n    tl.store(p0, 1)\n"
    made = modules.module(text)
    assert modules.module(str(text)) is made
    assert made.f.src.startswith("def f(p0)")


def laid_out(root, weight):
    other = of_operand(Node(Param(1, root.tensor)), columns_last=False)
    return triton_gemm.operands_outside({7: root}, other, {0: weight})[7]


def test_weights_made_in_inference_mode_are_laid_out_anew_each_time():
    """Nothing tells whether they were written since."""
    root = map_("negate", Node(Param(0, TensorType(F32, (3, 4)))))
    with torch.inference_mode():
        weight = torch.randn(3, 4)
        assert torch.equal(laid_out(root, weight), -weight)
        weight.add_(1)
        assert torch.equal(laid_out(root, weight), -weight)


@pytest.mark.parametrize("view", [False, True])
def test_what_is_laid_out_lives_no_longer_than_its_weight(view):
    param = Node(Param(0, TensorType(F32, (4, 6))))
    root = reshape(slice_(param, 0, 1, 3), (3, 4)) if view else map_("negate", param)
    weight = torch.randn(4, 6)
    wanted = weight[1:3].reshape(3, 4).clone() if view else -weight
    got, gone = laid_out(root, weight), weakref.ref(weight)
    assert torch.equal(got, wanted)
    del weight, got
    gc.collect()
    assert gone() is None
