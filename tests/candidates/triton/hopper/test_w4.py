"""Gemms with weights of few bits on Hopper, with no GPU at hand: packed and back, the text run by a machine of arrays, and the
machine code that was meant."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from gated import of_halves
from ptx import run
from spills import most_spilled
from w4_problems import posed, side_by_side

from tilewright.compiler import compile
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, S4, S8, U4, U8
from tilewright.frontends import LoadOptions, load
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gemm, Param
from tilewright.ir.types import TensorType
from tilewright.rules.calibrate import calibrate, quantize, scheme
from tilewright.schedule.expected import expect
from tilewright.schedule.problem import Problem
from tilewright.schedule.sample import random_sources

pytest.importorskip("triton")

from tilewright.candidates.triton.hopper.gemm.run import compiled as compiled_gemm
from tilewright.candidates.triton.hopper.w4 import tiles
from tilewright.candidates.triton.hopper.w4.candidate import CANDIDATE, FewRows
from tilewright.candidates.triton.hopper.w4.convert import byte_factor, dequantize_to_bytes
from tilewright.candidates.triton.hopper.w4.kernel_config import KernelConfig, TileConfig
from tilewright.candidates.triton.hopper.w4.pack import bias, packed, packed_weights, places
from tilewright.candidates.triton.hopper.w4.plan import BLOCK, PackedGemm, plan_of
from tilewright.candidates.triton.hopper.w4.space import configs
from tilewright.candidates.triton.runtime.module import assembly, needs
from tilewright.schedule.candidate import plan_for, refusal

H200 = Target("NVIDIA H200", CHIP, "cuda", 132, features=frozenset({"cuda", "sm_90"}))


def tile_config(words):
    """A configuration in words, as a schedule is shown: `mma.sync` and a cluster a row tile unless they say otherwise."""
    given = {name: int(value or 1) for name, _, value in (word.partition("=") for word in words.split())}
    flags = {name: bool(given.pop(name, False)) for name in ("wgmma", "launch_early")}
    return TileConfig(**{"clusters": 0, **given, **flags})


@pytest.mark.parametrize("cores", [1, 4, 9])
def test_few_multiprocessors_hold_few_clusters(cores):
    few = replace(H200, cores=cores)
    for rows in (1, 16, 64):
        found = configs(plan_of(posed(f"f16[{rows},1024] @ s4[1024,1024]^T group=64")), few)
        assert found and all(p.cluster * p.warps <= 16 * cores for p in found)


def unpacked(words, rows, kind, operand):
    """The codes [rows, K] that `packed` packed."""
    m64, k64 = words.shape[:2]
    mask = (1 << kind.bits) - 1
    if kind.bits == 4:
        steps = words.reshape(m64, k64, 4, 8, 4, 4)
        found = {(h, kk): steps for h, kk, _ in places(4, operand)}
        at = {(h, kk): bit for h, kk, bit in places(4, operand)}
    else:
        steps = words.transpose(3, 4).reshape(m64, k64, 4, 8, 4, 4, 2)
        found = {(h, kk): steps[..., kk] for h in (0, 1) for kk in (0, 1)}
        at = {(h, kk): 8 * h for h, kk in found}
    v = torch.empty(m64, k64, 4, 8, 4, 4, 2, 2, 2, dtype=torch.int32, device=words.device)
    for (h, kk), word in found.items():
        for p in (0, 1):
            v[..., h, kk, p] = ((word.long() & 0xFFFFFFFF) * (1 + (1 << 32)) >> (at[h, kk] + 16 * p)) & mask
    v = v.permute(0, 2, 6, 3, 1, 5, 7, 4, 8)  # m64 warp h g k64 step half t pair
    v = v.movedim(6, 8) if operand.bits == 8 else v
    v = v.reshape(m64 * BLOCK, k64 * BLOCK)[:rows]
    v = v - bias(kind, operand)
    if kind.kind != "uint":  # what was stored as it was comes back from its lowest bits
        half = 1 << (kind.bits - 1)
        v = ((v + half) & mask) - half
    return v.to(kind.to_torch())


@pytest.mark.parametrize("operand", [F16, BF16, F8E4M3FN])
@pytest.mark.parametrize("kind", [S4, U4, S8, U8])
def test_codes_are_packed_and_back(kind, operand):
    codes = torch.randint(int(kind.min), int(kind.max) + 1, (300, 192)).to(kind.to_torch())
    words = packed(codes, kind, operand)
    assert words.numel() * 32 == 512 * 192 * kind.bits
    assert torch.equal(unpacked(words, 300, kind, operand), codes)


def test_a_word_is_what_a_lane_multiplies_of_sixteen_columns():
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[16 + 3, 32 + 2 * 2 + 9] = 15  # row 3 of the second warp's; step 2, the right half, second of lane 3 * 4 + 2
    words = packed(codes, U4, BF16)
    assert words.nonzero().tolist() == [[0, 0, 1, 0, 3 * 4 + 2, 2]]
    assert words[0, 0, 1, 0, 14, 2].item() & 0xFFFFFFFF == 15 << 8 + 16


def test_a_word_for_an_operand_of_8_bits_holds_four_neighbours():
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[16 + 8 + 3, 32 + 4 * 2 : 32 + 4 * 3] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    words = packed(codes, U4, S8)
    assert words.nonzero().tolist() == [[0, 0, 1, 0, 3 * 4 + 2, 2]]
    assert words[0, 0, 1, 0, 14, 2].item() >> 2 == 0x04030201  # of row g + 8; those of row g are 4 bits up


def test_weights_are_packed_once_until_somebody_writes_to_them():
    plan = plan_of(posed("f16[8,256] @ s4[64,256]^T group=128"))
    assert isinstance(plan, PackedGemm)
    codes, scales = torch.randint(-8, 8, (64, 256), dtype=torch.int8), torch.rand(64, 2).half()
    first = packed_weights([codes, scales], plan.weights, F16)
    assert packed_weights([codes, scales], plan.weights, F16)[0] is first[0]
    assert first[1].shape == (16, 1, 8, 4)  # 256 rows, two to a word; a scale for each 64 columns
    scales[0, 0] = 7.0
    again = packed_weights([codes, scales], plan.weights, F16)
    assert again[0] is not first[0]
    assert again[1].view(torch.float16).view(16, 8, 4, 2)[0, 0, :, 0].tolist() == [7.0, 7.0, scales[0, 1], scales[0, 1]]


# What is multiplied, and how: narrow and wide, clusters, warps that share K, several tiles to a warp, K that does not come out
# even, rows and columns that fill nothing.
EMULATED = [
    ("~f16[16,512] @ s4[128,512]^T group=64 -> f16", tile_config("cluster=2 row_warps=2 k_warps=4 warp_tiles=2")),
    ("~f16[3,512] @ s4[100,512]^T group=64 + bias, silu -> f32", tile_config("cluster=2 row_warps=4 k_warps=2 warp_tiles=1")),
    ("f16[5,512] @ u4[128,512]^T group=32 zero_point -> f16", tile_config("cluster=1 row_warps=4 k_warps=4 warp_tiles=1")),
    ("~f16[1,512] @ u4[512,64] group=32 zero_point -> f16", tile_config("cluster=1 row_warps=2 k_warps=4 warp_tiles=1")),
    ("bf16[12,448] @ u4[448,64] group=64 zero_point -> f32", tile_config("cluster=2 row_warps=4 k_warps=2 warp_tiles=1")),
    ("~bf16[2,9,256] @ s4[300,256]^T group=128 * residual -> f32", tile_config("cluster=4 row_warps=8 k_warps=1 warp_tiles=2")),
    ("~f16[16,512] @ s4[128,512]^T group=128 -> f16", tile_config("wgmma cluster=4 row_warps=4 k_warps=2 warp_tiles=1")),
    ("f16[30,512] @ s4[128,512]^T group=32 -> f16", tile_config("wgmma cluster=4 row_warps=8 k_warps=1 warp_tiles=1")),
    (
        "~bf16[60,320] @ u4[320,200] group=32 zero_point -> f32",
        tile_config("wgmma cluster=2 row_warps=4 k_warps=2 warp_tiles=1"),
    ),
    (
        "~f16[20,1024] @ s4[128,1024]^T group=64 -> f16",
        tile_config("wgmma cluster=2 row_warps=4 k_warps=2 warp_tiles=1 k_chunks=4"),
    ),
    ("~f16[16,1088] @ s4[128,1088]^T group=64 -> f16", tile_config("cluster=2 row_warps=2 k_warps=4 warp_tiles=1 k_chunks=3")),
    # more rows in a tile than are packed
    ("~f16[2,512] @ u4[200,512]^T group=64 zero_point -> f16", tile_config("cluster=2 row_warps=8 k_warps=1 warp_tiles=4")),
    # clusters that have several row tiles, not all as many
    ("~f16[16,512] @ s4[320,512]^T group=64 -> f16", tile_config("clusters=3 cluster=2 row_warps=4 k_warps=2 warp_tiles=1")),
    (
        "f16[9,512] @ u4[288,512]^T group=32 zero_point + bias -> f16",
        tile_config("clusters=2 cluster=1 row_warps=2 k_warps=4 warp_tiles=1"),
    ),
    (
        "~bf16[30,512] @ s4[512,512]^T group=128 -> f32",
        tile_config("wgmma clusters=2 cluster=4 row_warps=4 k_warps=2 warp_tiles=1"),
    ),
    (
        "~f16[24,512] @ s8[640,512]^T group=64 -> f16",
        tile_config("wgmma clusters=2 cluster=2 row_warps=8 k_warps=1 warp_tiles=1"),
    ),
    (
        "f16[16,256] @ u8[64,256]^T group=64 zero_point -> f16",
        tile_config("wgmma cluster=1 row_warps=4 k_warps=2 warp_tiles=1"),
    ),
    ("f16[16,256] @ s8[64,256]^T scale=channel -> f16", tile_config("cluster=1 row_warps=2 k_warps=4 warp_tiles=2")),
    ("bf16[4,256] @ s8[64,256]^T group=64 -> f32", tile_config("cluster=1 row_warps=2 k_warps=4 warp_tiles=2")),
]
# Blocks of K in a loop, products by `wgmma` under way while codes are made halves and while sums are scaled; the same again and
# again for several row tiles.
EMULATED += [
    (
        "~f16[16,1024] @ s4[128,1024]^T group=64 -> f16",
        tile_config("wgmma cluster=2 row_warps=4 k_warps=2 warp_tiles=1 unroll=4 in_flight=1 launch_early"),
    ),
    (
        "~f16[12,2048] @ u4[250,2048]^T group=32 zero_point + bias -> f16",
        tile_config("wgmma cluster=4 row_warps=8 k_warps=1 warp_tiles=1 k_chunks=2 unroll=4 in_flight=2 launch_early"),
    ),
    (
        "bf16[40,1024] @ u4[128,1024]^T group=64 zero_point -> bf16",
        tile_config("wgmma cluster=1 row_warps=4 k_warps=2 warp_tiles=1 k_chunks=2 unroll=4 in_flight=2"),
    ),
    ("~f16[5,2048] @ s8[200,2048]^T group=64 -> f16", tile_config("cluster=2 row_warps=2 k_warps=4 warp_tiles=2 launch_early")),
    (
        "~bf16[20,2048] @ s8[64,2048]^T scale=channel -> f32",
        tile_config("wgmma cluster=1 row_warps=4 k_warps=2 warp_tiles=1 k_chunks=4 unroll=4 in_flight=1"),
    ),
    (
        "~f16[16,1024] @ u4[640,1024]^T group=32 zero_point + bias -> f16",
        tile_config("wgmma clusters=2 cluster=2 row_warps=4 k_warps=2 warp_tiles=1 unroll=2 in_flight=1"),
    ),
]
# The other operand in 8 bits, made f16 where it lies in shared memory: in chunks, and where K does not come out even.
EMULATED += [
    (
        "s8[3,512] scale=channel @ s4[100,512]^T group=64 + bias -> f16",
        tile_config("cluster=2 row_warps=4 k_warps=2 warp_tiles=1"),
    ),
    (
        "u8[9,320] scale=tensor @ u4[64,320]^T group=32 zero_point -> f32",
        tile_config("wgmma cluster=2 row_warps=4 k_warps=2 warp_tiles=1"),
    ),
    (
        "f8e4m3fn[12,1024] scale=channel @ u4[120,1024]^T group=32 zero_point -> f16",
        tile_config("wgmma cluster=2 row_warps=4 k_warps=2 warp_tiles=1 k_chunks=2 unroll=2 in_flight=2 launch_early"),
    ),
    (
        "f8e5m2[20,512] scale=channel @ s8[64,512]^T group=64 -> f16",
        tile_config("wgmma cluster=1 row_warps=4 k_warps=2 warp_tiles=1 k_chunks=4"),
    ),
    (
        "s8[8,512] scale=channel @ s4[320,512]^T group=64 -> f16",
        tile_config("clusters=3 cluster=2 row_warps=4 k_warps=2 warp_tiles=1"),
    ),
    # integers, whose sums are exact
    ("s8[5,512] @ s4[72,512]^T -> s32", tile_config("cluster=2 row_warps=2 k_warps=4 warp_tiles=1")),
    (
        "u8[9,512] scale=channel @ u4[512,40] scale=channel -> f16",
        tile_config("wgmma cluster=1 row_warps=4 k_warps=2 warp_tiles=1"),
    ),
]
NUMPY = {torch.int8: np.int8, torch.uint8: np.uint8, torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8}
NUMPY |= {torch.float16: np.float16, torch.bfloat16: np.int16, torch.int32: np.int32, torch.float32: np.float32}


def configured(problem, tile):
    """A problem's plan and configuration, as many clusters as there are row tiles if none is said."""
    plan = plan_of(problem)
    config = KernelConfig.of(plan, tile)
    return plan, config if tile.clusters else replace(config, clusters=config.row_tiles)


def built(problem, tile):
    """A problem's kernel."""
    plan, config = configured(problem, tile)
    return FewRows(problem, H200, plan).machine_code(config)


@pytest.mark.thin(3)
@pytest.mark.parametrize(("line", "point"), EMULATED, ids=[f"{line} {i}" for i, (line, _) in enumerate(EMULATED)])
def test_the_text_gives_what_the_oracle_gives(line, point):
    emulate(posed(line), point)


def test_weights_of_siblings_are_taken_as_one():
    line = "f16[5,512] @ u4[128,512]^T group=32 zero_point -> f16"
    emulate(side_by_side(posed(line)), dict(EMULATED)[line])


# Both halves of the columns in one store: narrow and wide, halves that are no multiple of 8 rows, blocks that finish eight
# columns, warps that share K, several row tiles.
GATED = [
    ("~f16[3,512] @ s4[200,512]^T group=64 -> f32", tile_config("cluster=4 row_warps=4 k_warps=2 warp_tiles=1")),
    ("f16[1,512] @ u4[198,512]^T group=32 zero_point -> f32", tile_config("cluster=1 row_warps=4 k_warps=2 warp_tiles=1")),
    ("bf16[17,512] @ s8[512,96] scale=channel -> f32", tile_config("cluster=2 row_warps=2 k_warps=4 warp_tiles=2")),
    ("~f16[33,512] @ s4[260,512]^T group=128 -> f32", tile_config("wgmma cluster=4 row_warps=8 k_warps=1 warp_tiles=1")),
    (
        "~f16[16,512] @ u4[600,512]^T group=64 zero_point -> f32",
        tile_config("clusters=3 cluster=2 row_warps=4 k_warps=2 warp_tiles=1"),
    ),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("line", "point"), GATED, ids=[line for line, _ in GATED])
def test_both_halves_of_the_columns_meet_in_a_store(line, point):
    emulate(of_halves(posed(line), out=F16), point)


def test_a_weight_packed_by_halves_is_not_taken_for_the_same_weight_packed_in_order():
    apart = posed("f16[8,256] @ s4[64,256]^T group=64 -> f32")
    plans = plan_of(apart), plan_of(of_halves(apart))
    sources = [torch.randint(-8, 8, (64, 256), dtype=torch.int8), torch.rand(64, 4).half()]
    codes, scales = zip(*(packed_weights(sources, plan.weights, F16) for plan in plans), strict=True)
    found = [unpacked(words, 64, S4, F16) for words in codes]
    assert torch.equal(found[0], sources[0]) and not torch.equal(*scales)
    assert torch.equal(found[1], sources[0].view(2, 4, 8, 256).transpose(0, 1).reshape(64, 256))


def test_both_halves_take_no_more_registers():
    problem = of_halves(posed("~f16[16,8192] @ s4[3584,8192]^T group=64 -> f32"), out=F16)
    kernel = built(problem, FEW).kernel
    assert needs(kernel).spills <= most_spilled("both halves") and needs(kernel).registers <= FEW.registers
    assert "100 rows are many for stores that read both halves" in str(
        refusal(CANDIDATE, of_halves(posed("f16[100,256] @ s4[64,256]^T group=64 -> f32")), H200)
    )


def test_the_largest_sums_of_integers_are_exact():
    def most(t):
        return torch.full(t.shape, int(t.dtype.min) or int(t.dtype.max), dtype=t.dtype.to_torch())

    for line, point in EMULATED[-2:]:
        problem = posed(line)
        drawn = random_sources(problem)
        emulate(problem, point, [s if t.dtype.is_float else most(t) for t, s in zip(problem.types, drawn, strict=True)])


def test_what_codes_are_too_large_by_is_taken_off_exactly():
    """A sum of the other operand that takes all three of its parts, times weights of zero."""
    problem = posed("~f16[1,512] @ s4[128,512]^T group=64 -> f16")
    x, codes, scales = random_sources(problem)
    x.zero_()[0, :3] = torch.tensor([2048, 1, 2.0**-12])
    emulate(problem, tile_config("cluster=2 row_warps=2 k_warps=4 warp_tiles=2"), [x, codes.zero_(), scales.fill_(1)])


def test_both_halves_meet_where_the_other_operand_has_8_bits():
    line = "s8[9,512] scale=channel @ s4[96,512]^T group=64 -> f32"
    emulate(of_halves(posed(line), out=F16), tile_config("cluster=2 row_warps=2 k_warps=4 warp_tiles=1"))


def test_halves_of_siblings_with_a_residual_meet_in_two_stores():
    problem = side_by_side(of_halves(posed("bf16[5,256] @ s4[128,256]^T group=64 -> f32"), out=F16))
    (store,) = problem.op.stores
    beside = Node(Param(len(problem.types), TensorType(F32, store.shape)))
    stores = store, map_("add", convert(store, F32), beside)
    op = replace(problem.op, stores=stores)
    emulate(
        Problem(op, (*problem.types, beside.tensor), (*problem.weights, False)),
        tile_config("cluster=2 row_warps=2 k_warps=4 warp_tiles=1"),
    )


def emulate(problem, point, sources=None, how=None):
    """Run a problem's kernel at a point, on random sources if none are given, and compare."""
    plan, config = configured(problem, point)
    w = plan.weights
    sources = sources or random_sources(problem)
    unset = [float("nan") if t.dtype.is_float else -1 for t in problem.outputs]
    results = [torch.full(t.shape, u, dtype=t.dtype.to_torch()) for t, u in zip(problem.outputs, unset, strict=True)]
    packed_ones = packed_weights(w.values(dict(enumerate(sources))), w, plan.operand)
    named = dict(zip(("codes", "scales", "zeros"), packed_ones, strict=False)) | {"x": sources[plan.x].contiguous()}
    named |= {f"p{i}": t.contiguous() for i, t in enumerate(sources)} | {f"o{i}": t for i, t in enumerate(results)}
    made = built(problem, point)
    kernel = made.kernel
    given = [*(named[n].data_ptr() for n in made.names), *made.numbers]
    run(kernel.asm["ptx"], (config.grid,), given, kernel.metadata.shared, how)
    expected = expect(problem, sources)
    for result, low, high in zip(results, expected.low, expected.high, strict=True):
        inside = (result.double() >= low.double()) & (result.double() <= high.double())
        assert inside.all(), f"{int((~inside).sum())} of {result.numel()}"


FEW = tile_config("cluster=4 row_warps=4 k_warps=4 warp_tiles=2")
# The line, the point, instructions and how many of them there are.
CASES = {
    "one row": (
        "~f16[1,8192] @ s4[3584,8192]^T group=64 -> f16",
        FEW,
        {"HMMA.16816.F32": 72, "HMMA.1684.F32.TF32": 8, "LDG.E.NA.128": 16},
    ),
    "sixteen rows": (
        "~f16[16,8192] @ s4[3584,8192]^T group=64 -> f16",
        FEW,
        {"HMMA.16816.F32": 144, "HMMA.1684.F32.TF32": 16, "LDG.E.NA.128": 16},
    ),
    "sixteen rows, rounded, with zero points and a bias": (
        "bf16[16,8192] @ u4[3584,8192]^T group=128 zero_point + bias -> bf16",
        FEW,
        {"HMMA.16816.F32.BF16": 128, "HMUL2.BF16_V2": 256},
    ),
    "forty rows": (
        "~f16[40,8192] @ s4[3584,8192]^T group=64 -> f16",
        tile_config("wgmma cluster=8 row_warps=4 k_warps=2 warp_tiles=1 occupancy=2"),
        {"HGMMA.64x64x16.F32": 32, "LDG.E.NA.128": 8},
    ),
    "many columns": (
        "~f16[16,8192] @ s4[28672,8192]^T group=64 -> f16",
        tile_config("clusters=64 cluster=2 row_warps=2 k_warps=8 warp_tiles=2"),
        {"HMMA.16816.F32": 160, "LDG.E.NA.128": 24},
    ),
}


def test_machine_code_is_loaded_for_each_device():
    line, point, _ = CASES["forty rows"]
    problem = posed(line)
    plan, config = configured(problem, point)
    kernels = (FewRows(problem, replace(H200, index=i), plan).machine_code(config).kernel for i in (0, 0, 1))
    first, again, other = kernels
    assert first is again and first is not other


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", CASES)
def test_machine_code_is_what_was_meant(name):
    line, point, wanted = CASES[name]
    problem = posed(line)
    _, config = configured(problem, point)
    kernel = built(problem, point).kernel
    text = assembly(kernel)
    for instruction, count in wanted.items():
        found = len(re.findall(rf"\b{re.escape(instruction)}\b", text))
        assert found == count, f"{instruction}: {found}"
    codes = 2 * 16 * config.warp_blocks * point.warp_tiles  # of a lane: five integer operations make eight of them halves
    assert len(re.findall(r"\bLOP3\b", text)) >= codes // 2
    assert needs(kernel).registers <= point.registers
    assert needs(kernel).spills <= (96 if point.wgmma or config.persistent else most_spilled(name))
    assert "ACQBULK" in text and "UCGABAR_WAIT" in text and text.count("BAR.SYNC") <= 4
    before = text[: text.index("ACQBULK")]
    assert len(re.findall(r"LDG\.E\.NA\.128", before)) == config.early_prefetch


@pytest.mark.thin(3)
@pytest.mark.parametrize(("rows", "outs"), [(32, 3584), (64, 3584), (16, 28672)])
def test_products_by_wgmma_do_not_wait_for_each_other(rows, outs):
    """ptxas lets each end before the next one starts where it thinks registers do not suffice, and says nothing."""
    line = f"~f16[{rows},8192] @ s4[{outs},8192]^T group=64 -> f16"
    problem = posed(line)
    config = next(c for c in configs(plan_of(problem), H200) if c.unroll)
    kernel = FewRows(problem, H200, plan_of(problem)).machine_code(config).kernel
    text = assembly(kernel)
    products = len(re.findall(r"\bHGMMA\b", text))
    assert products and len(re.findall(r"\bWARPGROUP.DEPBAR\b", text)) == products // 4
    assert needs(kernel).spills <= 32


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("line", "tile"),
    [
        ("f16[1024,4096] @ s4[4096,4096]^T group=64 -> f16", (128, 256)),
        ("bf16[100,2048] @ u4[1024,2048]^T group=32 zero_point + bias -> bf16", (128, 128)),
    ],
)
def test_many_rows_meet_halves_that_the_multiplying_warps_made(line, tile):
    problem = posed(line)
    schedule = next(
        s for s in plan_for(CANDIDATE, problem, H200).schedules() if {("tile_m", tile[0]), ("tile_n", tile[1])} <= {*s.knobs}
    )
    kernel = plan_for(CANDIDATE, problem, H200).build(schedule)
    assert kernel.spills == 0 and kernel.packed_bytes < 0.7 * problem.N * problem.K
    assert kernel.releasable == frozenset(i for i, weight in enumerate(problem.weights) if weight)


def test_words_of_many_rows_come_by_tma_and_not_through_registers():
    problem = posed("f16[1024,4096] @ s4[4096,4096]^T group=64 -> f16")
    large = tiles.tiles_of(problem, H200, plan_of(problem))
    assert large is not None
    ptx = compiled_gemm(large.spec(next(t for t in large.tiles if not t.stream_k))).kernel.asm["ptx"]
    assert "ld.global" not in ptx and "cp.async.bulk.tensor.3d.shared" in ptx


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("line", "products", "knobs"),
    [
        ("s8[1024,4096] scale=channel @ s4[4096,4096]^T group=128 -> f16", "IGMMA.64x128x32.S8.S8", {}),
        ("f8e4m3fn[512,4096] @ u4[4096,4096]^T group=64 zero_point + bias -> bf16", "QGMMA.64x128x32.F32.E4M3.E4M3", {}),
        ("u8[1000,4096] scale=tensor @ s8[4096,4096]^T group=256 -> f16", "IGMMA.64x128x32.S8.U8", {}),
        ("f8e5m2[512,4096] scale=channel @ s4[4096,4096]^T group=128 -> f16", "QGMMA.64x128x32.F32.E4M3.E5M2", {}),
        (
            "f8e4m3fn[1024,4096] scale=channel @ s4[4096,4096]^T group=128 -> f16",
            "QGMMA.64x128x32.F32.E4M3.E4M3",
            {"tile_n": 256},
        ),
        (
            "f8e4m3fn[1024,4096] scale=channel @ s4[4096,4096]^T group=128 -> f16",
            "QGMMA.64x128x32.F32.E4M3.E4M3",
            {"expanded": True},
        ),
    ],
)
def test_many_rows_of_bytes_meet_bytes_and_sums_of_a_group_are_scaled(line, products, knobs, monkeypatch):
    """Words of the next step come while this one is multiplied, and ptxas lets products of a step follow one another."""
    problem = posed(line)
    large = tiles.tiles_of(problem, H200, plan_of(problem))
    assert large is not None
    for name in ("MOST_TRIED", "FEWER_TRIED"):
        monkeypatch.setattr(tiles, name, 1000)
    chosen = {"tile_n": 128, "expanded": None, "multicast": False} | knobs
    tile = next(t for t in large.tiles if all(getattr(t, k) == v for k, v in chosen.items()) and not t.stream_k)
    spec = large.spec(tile)
    built = compiled_gemm(spec)
    text = assembly(built.kernel)
    groups, halves = 128 // spec.config.promote, tile.tile_n // 128
    wanted = {products: 8 * halves, "FFMA": 128 * groups * halves, "WARPGROUP.DEPBAR.LE": 2 * groups * halves}
    wanted |= {"WARPGROUP.ARRIVE": 4 * halves, "I2FP.F32.S32": 128 * halves if spec.weights.operand.is_integer else 0}
    for instruction, count in wanted.items():
        assert len(re.findall(rf"\b{re.escape(instruction)}\b", text)) == count, instruction
    assert needs(built.kernel).spills <= (most_spilled("bytes in 256 columns") if halves == 2 else 0)
    loop = text[text.index("WARPGROUP.ARRIVE") : text.index("WARPGROUP.DEPBAR.LE")]
    assert ("LDS.128" in loop) == (groups == halves == 1)  # of a step of several sums, words come under the last of them


@pytest.mark.parametrize(
    ("operand", "rows", "outs", "k", "columns"),
    [
        ("s8", 64, 4096, 4096, 64),
        ("s8", 256, 1024, 8192, 64),
        ("s8", 1024, 4096, 4096, 256),
        ("f8e4m3fn", 4096, 1024, 8192, 256),
    ],
)
def test_the_fastest_of_measured_kernels_of_bytes_comes_first(operand, rows, outs, k, columns):
    """Codes as bytes, for floats, come later: they take more memory."""
    problem = posed(f"{operand}[{rows},{k}] scale=channel @ s4[{outs},{k}]^T group=128 -> f16")
    first, *others = (dict(s.knobs) for s in plan_for(CANDIDATE, problem, H200).schedules())
    assert first["tile_n"] == columns and not first["multicast"] and "expanded" not in first
    assert any("expanded" in s for s in others) == (operand != "s8")


def integers(text, given):
    """Results of a statement of operations on whole registers, of what it is given."""
    text = text.replace("\n", " ")
    outs = min(given)
    regs = {f"${i}": v for i, v in given.items()}

    def value(o):
        return regs[o] if o in regs else np.uint32(int(o, 0))

    def turned(a, b, n):
        wide = (a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)) << np.uint64(n)
        return (wide >> np.uint64(32)).astype(np.uint32)

    def looked_up(a, b, c, table):
        found = np.zeros_like(a)
        for i in range(8):
            if int(table) >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return found

    def chosen(a, b, pick):
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        found = np.zeros_like(a)
        for i in range(4):
            digit = int(pick) >> 4 * i & 15
            byte = (both >> np.uint64(8 * (digit & 7)) & np.uint64(255)).astype(np.uint32)
            found |= ((byte >> 7) * np.uint32(255) if digit & 8 else byte) << np.uint32(8 * i)
        return found

    do = {
        "mov": lambda a: a,
        "shf": turned,
        "shl": np.left_shift,
        "shr": np.right_shift,
        "and": np.bitwise_and,
        "xor": np.bitwise_xor,
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "lop3": looked_up,
        "prmt": chosen,
    }
    for line in text.strip("{} ").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            name, rest = line.strip().split(" ", 1)
            out, *operands = [o.strip() for o in rest.split(",")]
            shape = given[outs].shape
            regs[out] = np.broadcast_to(do[name.split(".")[0]](*map(value, operands)), shape)
    return [regs[f"${i}"] for i in range(outs)]


def numbers_in(words, operand):
    """A block [64, 64] that fragments hold: words of each row half and step, then of each lane."""
    numbers = torch.from_numpy(words.copy().view(np.int8 if operand is S8 else np.uint8).reshape(2, 4, 4, 8, 4, 4))
    numbers = numbers if operand is S8 else numbers.view(torch.float8_e4m3fn)
    return numbers.double().permute(2, 0, 3, 1, 4, 5).reshape(64, 64)  # warp, half, g; word, t, byte


@pytest.mark.parametrize(
    ("operand", "kind", "zeros"),
    [(S8, S8, False), *((x, w, z) for x in (S8, F8E4M3FN) for w, z in ((S4, False), (U4, False), (U4, True), (S4, True)))],
)
@pytest.mark.parametrize("sub", [32, 64])
def test_bytes_that_are_made_of_codes_are_what_a_lane_multiplies(operand, kind, zeros, sub):
    """Words of a block, as they are packed, to numbers where the fragments of two steps of 32 columns have them (PTX ISA 9.0,
    9.7.15.5.1, figures of A in registers for 8-bit types), less their zero points."""
    codes = torch.randint(int(kind.min), int(kind.max) + 1, (256, 64)).to(kind.to_torch())
    zero = torch.randint(int(kind.min), int(kind.max) + 1, (256, 64 // sub)).to(kind.to_torch())
    line = f"{operand}[17,64] @ {kind}[256,64]^T group={sub}{' zero_point' * zeros} -> f16"
    plan = plan_of(posed(line))
    assert isinstance(plan, PackedGemm), plan
    scales = torch.rand(256, 64 // sub)
    words, _, *points = packed_weights([codes, scales, *[zero] * zeros], plan.weights, operand)
    lanes = words[0].numpy().view(np.uint32).reshape(4, -1, 32, 4).transpose(0, 2, 1, 3).reshape(128, -1)
    given = {8 + i: lanes[:, i] for i in range(lanes.shape[1])}
    if zeros:  # of lane g, t the words of rows g and g + 8, one a group
        own = points[0].numpy().view(np.uint32).transpose(0, 2, 1, 3).reshape(-1, 8, 64 // sub)[:4]
        own = np.repeat(own.reshape(32, -1), 4, axis=0)
        given |= {12 + i: own[:, i * 16 // sub] for i in range(4)}
    asm = dequantize_to_bytes(operand, kind, zeros=zeros, scale_k=sub)
    found = np.stack(integers(asm.text, given))  # [row half and word, lane]
    want = codes[:64].double() - (zero[:64].double().repeat_interleave(sub, 1) if zeros else 0)
    times = byte_factor(operand, kind, zeros=zeros)
    assert torch.equal(numbers_in(found, operand) * times, want)
    if kind.bits == 4 and operand is F8E4M3FN:  # the same bytes made once, but for their highest bit
        (expanded,) = packed_weights([codes, scales, *[zero] * zeros], plan.weights, operand, expanded=True)[:1]
        words = expanded[0].numpy().view(np.uint32).reshape(4, 2, 32, 4).transpose(1, 3, 0, 2).reshape(8, 128)
        assert torch.equal(numbers_in(words ^ np.uint32(0x80808080), operand) * times, want)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("f32[4,64] @ s4[64,64]^T group=64", "f16, bf16 or codes"),
        ("f8e4m3fnuz[4,64] scale=tensor @ s4[64,64]^T group=64", "f16, bf16 or codes"),
        ("s8[4,64] scale=tensor zero_point @ s4[64,64]^T group=64", "zero points"),
        ("f16[4,64] @ f16[64,64]^T", "not integer codes of 4 or 8 bits"),
        ("f16[4,96] @ s4[64,96]^T group=32", "no multiple of 64"),
        ("f16[4,128] @ s4[64,128]^T group=16", "other than 32 or a multiple of 64"),
        ("bf16[4,128] @ u8[64,128]^T group=64 zero_point", "an 8-bit code and a zero point"),
        ("s8[4,32768] @ s4[64,32768]^T -> s32", "f32 does not hold every sum of 32768 products of s8 and s4"),
        ("s8[4,128] @ s16[64,128]^T -> s32", "not one matrix of codes of 4 or 8 bits"),
        ("f16[128,4]^T @ s4[64,128]^T group=64", "do not follow one another"),
    ],
)
def test_what_it_does_not_do_it_refuses(line, why):
    assert why in str(refusal(CANDIDATE, posed(line), H200))


def test_codes_are_read_through_conversions_that_keep_them():
    problem = posed("s8[4,64] @ s4[64,64] -> s32")
    for kind, wide, kept in ((S4, S8, True), (U4, S8, True), (U4, U8, True), (S4, U8, False)):
        codes = Node(Param(1, TensorType(kind, (64, 64))))
        seen = convert(codes, wide)
        plan = plan_of(replace(problem, op=replace(problem.op, rhs=seen)))
        assert plan.weights.codes is (codes if kept else seen)


def test_weights_must_be_constant_and_the_device_a_hopper():
    line = "f16[4,64] @ s4[64,64]^T group=64"
    assert "not constant" in str(refusal(CANDIDATE, posed(line, constant=False), H200))
    assert "sm_90" in str(refusal(CANDIDATE, posed(line), replace(H200, features=frozenset({"cuda", "sm_80"}))))


def test_every_point_of_the_shapes_of_llama_fits():
    for n, k in ((4096, 4096), (4096, 14336), (1024, 8192), (57344, 8192), (8192, 28672), (3584, 8192)):
        for m in (1, 4, 16, 17, 64):
            problem = posed(f"f16[{m},{k}] @ s4[{n},{k}]^T group=64")
            plan, found = plan_of(problem), configs(plan_of(problem), H200)  # not `schedules`, which compiles the first of them
            assert found
            assert all(c.shared_bytes <= CHIP.shared_bytes for c in found)
            assert all(KernelConfig.of(plan, c.schedule().point(TileConfig)) == c for c in found)


def test_weights_that_were_joined_are_packed_as_one():
    """Q, K and V of a model whose weights were made codes: one problem, of which this candidate takes the joined matrix."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(256, n, bias=False) for n in (128, 64, 64)).half().eval()

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return tuple(layer(x) for layer in self.layers)

    x = torch.randn(7, 256).half()
    graph = load(Heads(), LoadOptions({}, None, (x,)))
    coded, _ = quantize(graph, scheme("w4"), calibrate(graph, [{graph.inputs[0].op.label: x}]))
    (step,) = compile(coded, budget_s=0).steps
    problem = step.decision.problem
    assert refusal(CANDIDATE, problem, H200) is None
    weights = plan_of(problem).weights
    assert weights.rounded and weights.scales is F16 and len(weights.sources) == 6
    (node,) = (n for n in step.part.nodes if isinstance(n.op, Gemm))
    given = {i: node.src[i].op.data.tensor() for i in weights.sources}
    codes, scales = weights.values(given)
    back = codes.T.float().view(256, 4, 64) * scales.T.float()[:, :, None]
    want = torch.cat([layer.weight.float() for layer in layers])
    assert (back.view(256, 256) - want).abs().max() < 1.01 / 16 / 7 / 2 + 1e-4
