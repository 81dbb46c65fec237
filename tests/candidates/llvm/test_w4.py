"""Generated kernels for 4-bit weights: right within the oracle's bounds, and the same at any number of threads."""

import re
from dataclasses import replace

import pytest
import torch
from w4_problems import posed, side_by_side

from tests.candidates.llvm.test_targets import answers, functions, innermost_loops, strangers
from tilewright.candidates.llvm.w4 import candidate as w4
from tilewright.hardware.detect import chips, detect
from tilewright.schedule.candidate import Runner, plan_for, refusal
from tilewright.schedule.expected import expect
from tilewright.schedule.measure import examine
from tilewright.schedule.problem import Problem
from tilewright.schedule.sample import random_sources

CPU = detect("cpu")


def built(problem: Problem, sources: list[torch.Tensor]) -> list[Runner]:
    """The runners of all schedules."""
    plan = plan_for(w4.CANDIDATE, problem, CPU)
    weights = {i: t for i, t in enumerate(sources) if problem.weights[i]}
    return [plan.build(s).prepare(weights) for s in plan.schedules()]


@pytest.mark.parametrize(
    "line",
    [
        "f32[1,64] @ s4[64,64]^T group=64",
        "f32[1,8192] @ u4[200,8192]^T group=128 zero_point",
        "f32[16,8192] @ s4[384,8192]^T group=64",
        "f32[37,1024] @ u4[1024,77] group=32, relu",
        "f32[37,1000] @ s4[77,1000]^T group=48 zero_point + bias, gelu",
        "f16[20,200] @ u4[130,200]^T group=24 zero_point -> f16",
        "f16[3,200] @ u4[130,200]^T group=8 zero_point + bias -> f16",
        "bf16[1,256] @ s4[48,256]^T group=64 -> bf16",
        "bf16[16,8192] @ s4[384,8192]^T group=64 -> bf16",
        "bf16[40,2,96] @ u4[33,96]^T group=32 -> bf16",
        "bf16[1,1024] @ u4[100,1024]^T group=64 zero_point -> bf16",
        "bf16[5,112] @ s4[112,17] group=16 + bias -> bf16",
        "bf16[5,120] @ s4[120,17] group=8 -> bf16",
        "~bf16[1,256] @ s4[48,256]^T group=64 -> bf16",
        "~bf16[16,8192] @ s4[384,8192]^T group=64 -> bf16",
        "~bf16[5,120] @ s4[120,17] group=8 -> bf16",
        "~bf16[37,1000] @ s4[1000,77] group=40, relu",
        "~bf16[40,2,96] @ u4[33,96]^T group=32 -> bf16",
        "~bf16[3,200] @ u4[130,200]^T group=8 zero_point + bias -> bf16",
        "~f16[3,200] @ s4[130,200]^T group=8 + bias -> f16",
        # 8-bit activations: without a scale, one, one a row, one a group; zero points on either side
        "s8[1,64] @ s4[64,64]^T group=64",
        "s8[1,8192] group=64 @ u4[200,8192]^T group=64 zero_point",
        "s8[16,8192] scale=channel @ s4[384,8192]^T group=64",
        "s8[37,1024] scale=tensor zero_point @ u4[1024,77] group=32",
        "u8[3,200] scale=channel zero_point @ u4[130,200]^T group=8 zero_point + bias",
        "u8[3,200] group=40 zero_point @ s4[130,200]^T group=40",
        "u8[5,200] group=8 zero_point @ u4[130,200]^T group=40 zero_point -> bf16",
        "s8[17,520] group=128 @ s4[130,520]^T group=32 zero_point, silu -> s8 scale=tensor",
        "s8[6,2,264] group=264 @ s4[33,264]^T group=264",
        "s8[12,264] @ s4[33,264]^T group=512",
        "u8[9,264] scale=tensor @ u4[33,264]^T group=16",
    ],
)
def test_results_are_the_oracles_at_any_number_of_threads(line):
    problem = posed(line)
    sources = random_sources(problem)
    for run in built(problem, sources):
        assert examine(problem, expect(problem, sources), run, sources) is None
        results = []
        for threads in (1, 2, 5, 8):
            torch.set_num_threads(threads)
            results.append(run(sources)[0].clone())
        assert all(torch.equal(results[0], r) for r in results[1:])


@pytest.mark.skipif("avx2" not in CPU.features, reason="the processor has no AVX2")
@pytest.mark.parametrize("rows", [1, 7, 20])
def test_floats_of_4_bits_are_decoded_without_an_instruction_that_looks_them_up(rows):
    problem = posed(f"f32[{rows},200] @ f4e2m1fn[60,200]^T group=40")
    sources = random_sources(problem)
    sources[1] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).repeat(750).reshape(60, 200)
    sources[1] = sources[1].to(torch.float8_e4m3fn)
    plan = plan_for(w4.CANDIDATE, problem, replace(CPU, chip=next(c for c in chips() if c.name == "x86_64_avx2")))
    assert plan.nest.dot.lanes == 8
    weights = {i: t for i, t in enumerate(sources) if problem.weights[i]}
    for schedule in plan.schedules():
        run = plan.build(schedule).prepare(weights)
        assert examine(problem, expect(problem, sources), run, sources) is None


@pytest.mark.parametrize(
    "line", ["bf16[5,64] @ u4[64,64]^T group=32 zero_point", "s8[5,64] @ s4[64,64]^T group=64", "f32[5,64] @ s4[64,64] group=8"]
)
def test_weights_of_siblings_are_taken_as_one(line):
    problem = side_by_side(posed(line))
    sources = random_sources(problem)
    for run in built(problem, sources):
        assert examine(problem, expect(problem, sources), run, sources) is None


@pytest.mark.parametrize(
    ("line", "constant", "why"),
    [
        ("f32[4,64] @ s4[64,64]^T group=64", False, "not constant"),
        ("f32[4,64] @ s8[64,64]^T group=64", True, "not codes of 4 bits"),
        ("f32[4,60] @ s4[64,60]^T group=60", True, "multiple of 8"),
        ("s8[4,65] @ s4[64,65]^T group=8", True, "multiple of 8"),
    ],
)
def test_what_it_does_not_do_it_refuses(line, constant, why):
    assert why in str(refusal(w4.CANDIDATE, posed(line, constant), CPU))


def instruction(line: str) -> str:
    problem = posed(line)
    (schedule,) = plan_for(w4.CANDIDATE, problem, CPU).schedules()
    return dict(schedule.knobs)["instruction"]


@pytest.mark.skipif("avx512_vnni" not in CPU.chip.requires, reason="the processor has no vpdpbusd")
@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("s8[4,64] @ s4[64,64]^T group=64", True),
        ("u8[4,64] group=32 zero_point @ s4[64,64]^T group=64", True),
        ("f32[4,64] @ s4[64,64]^T group=64", False),
        ("s8[4,96] group=32 @ s4[64,96]^T group=48", False),  # the groups do not lie in one another
    ],
)
def test_codes_are_multiplied_by_codes_where_both_operands_are(line, codes):
    assert instruction(line).startswith("vpdpbusd") == codes


@pytest.mark.parametrize("lhs", ["s8", "u8"])
@pytest.mark.parametrize("rhs", ["s4", "u4"])
def test_sums_of_the_extreme_codes_are_exact(lhs, rhs):
    """Scales of 1 leave integers that f32 holds: every product of the largest magnitudes is there, to the last unit."""
    problem = posed(f"{lhs}[4,2048] scale=channel zero_point @ {rhs}[34,2048]^T group=1024 zero_point")
    low, high = (-128, 127) if lhs == "s8" else (0, 255)
    least, most = (-8, 7) if rhs == "s4" else (0, 15)
    signed, coded = (t.dtype.to_torch() for t in (problem.types[0], problem.types[3]))
    a = torch.tensor([low, high, low, high], dtype=signed)[:, None].repeat(1, 2048)
    za = torch.tensor([high, low, low, high], dtype=signed)[:, None]
    b = torch.tensor([least, most] * 17, dtype=coded)[:, None].repeat(1, 2048)
    zb = torch.tensor([[least, most], [most, least]] * 17, dtype=coded)[:34]
    sources = [a, torch.ones(4, 1), za, b, torch.ones(34, 2), zb]
    wanted = (a.long() - za) @ (b.long() - zb.long().repeat_interleave(1024, 1)).t()
    assert wanted.abs().max() == 1024 * 255 * 15
    for run in built(problem, sources):
        assert torch.equal(run(sources)[0].long(), wanted)


FMA = "vfmadd(132|213|231)ps"
DOTS = {  # by chip: what multiplies codes by codes, and f32 by decoded weights
    "x86_64_avx2": (FMA, FMA),
    "x86_64_avx_vnni": ("vpdpbusd", FMA),
    "x86_64_avx512": (FMA, FMA),
    "x86_64_avx512_vnni": ("vpdpbusd", FMA),
    "x86_64_avx512_bf16": ("vpdpbusd", FMA),
    "x86_64_amx": ("vpdpbusd", FMA),
    "aarch64_dotprod": ("sdot", None),
    "aarch64_bf16": ("sdot", None),
}
LINES = {
    "s8[1,512] group=64 @ s4[256,512]^T group=64": 0,
    "s8[7,512] scale=channel @ s4[256,512]^T group=64": 0,
    "s8[16,512] group=64 zero_point @ u4[250,512]^T group=64 zero_point + bias, gelu": 0,
    "f32[1,512] @ s4[256,512]^T group=64": 1,
    "f32[16,512] @ u4[256,512]^T group=64 zero_point": 1,
}
PAIRED = ("~bf16[1,512] @ s4[256,512]^T group=64", "~bf16[16,512] @ u4[250,512]^T group=64 + bias, gelu -> bf16")


def test_inner_loops_are_the_intended_instruction_without_spills():
    asked = [(chip, line) for chip, wanted in DOTS.items() for line, which in LINES.items() if wanted[which]]
    asked += [("x86_64_avx512_bf16", line) for line in PAIRED]
    for (chip, line), made in answers(asked).items():
        wanted = "vdpbf16ps" if line in PAIRED else DOTS[chip][LINES[line]]
        assert strangers(made["assembly"]) == set(), (chip, line)
        micro = [(name, lines) for name, lines in functions(made["assembly"]) if name.startswith("micro_")]
        assert micro, (chip, line)
        for name, lines in micro:
            rows = int(name.split("_")[1])
            of_8 = 4 if line in PAIRED else 2 if "dp" in wanted or "sdot" in wanted else 8
            word = of_8 * rows * made["nv"]  # to multiply 8 of K
            dots = [[x for x in loop if re.match(rf"(\{{vex\}}\s+)?{wanted}\b", x)] for loop in innermost_loops(lines)]
            assert word in [len(d) for d in dots], f"{chip}: {line}: {name}: {[len(d) for d in dots]}"
            loop = innermost_loops(lines)[[len(d) for d in dots].index(word)]
            spilled = [x for x in loop if re.search(r"[re]sp\b|\bsp\b|\[x29", x)]
            assert not spilled, f"{chip}: {line}: {name}: {spilled}"


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 64, 1000])
@pytest.mark.parametrize(("chip", "lookup"), [("x86_64_avx2", False), ("x86_64_zen1", False), ("x86_64_avx512", True)])
def test_many_rows_decode_a_panel_once(rows, chip, lookup):
    """64 x 256 x 768 on Zen 1: 1,030 us where each tile decodes, 717 where a panel is decoded first, 668 in f32."""
    problem = posed(f"f32[{rows},512] @ s4[256,512]^T group=32")
    target = replace(CPU, chip=next(c for c in chips() if c.name == chip), caches_bytes={})
    plan = plan_for(w4.CANDIDATE, problem, target)
    first, *others = plan.schedules()
    decoded = bool(dict(first.knobs).get("decoded", False))
    assert decoded == (rows > 16 and not lookup) == bool(others)
    nest = plan.nest_of(first)
    assert nest.prefetch_distance == 0  # a panel that a thread has just decoded is in its cache
    if decoded:  # each code is met by as many rows as a cache holds, and activations are read where they lie
        assert nest.nc_panels == 1 and nest.blocks.mc >= min(rows, 60) and not nest.blocks.pack_lhs
        code = str(w4.writer_of(nest).write().text("x86-64-v3", ""))
        micro = code[code.index("@micro_") :]
        assert "uitofp" in code and "uitofp" not in micro[: micro.index("ret void")]
