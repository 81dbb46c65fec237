"""Generated Hopper gemms, compiled with no GPU at hand: the products, copies and stores that were meant, nothing spilled."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from gated import gated, of_ranges
from ptx import emulate
from ptx.memory import Global
from w4_problems import posed

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, S8, U8
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.target import Target
from tilewright.ir.build import const, convert, input_, map_, reshape, slice_, transpose
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.notation import parse
from tilewright.ir.ops import Acc, Gemm, Param, Quantize
from tilewright.schedule.candidate import Schedule
from tilewright.schedule.cost import predict
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

pytest.importorskip("triton")

from tilewright.candidates.triton.hopper import ptx
from tilewright.candidates.triton.hopper.gemm.candidate import CANDIDATE
from tilewright.candidates.triton.hopper.gemm.epilogue import write
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.run import compiled
from tilewright.candidates.triton.hopper.gemm.space import exchange_bytes, tile_configs
from tilewright.candidates.triton.hopper.gemm.spec import spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.runtime import module as modules
from tilewright.candidates.triton.runtime.module import assembly, needs
from tilewright.candidates.triton.runtime.versions import whole_views
from tilewright.schedule.candidate import Unsupported, plan_for, refusal

H200 = Target("NVIDIA H200", CHIP, "cuda", 132, features=frozenset({"cuda", "sm_90"}))
WHOLE = TileConfig(
    128, 256, 128, 4, 16, pingpong=False, deferred_store=False, vector_store=False, multicast=False, blocks=128, stream_k=0
)


def problem(line):
    return problem_of(parse(line).outputs[0])


def heads():
    """One product for Q, K and V: each with a scale of its own, split into heads; K transposed."""
    batch, tokens, width, count = 2, 384, 768, 12
    src = [input_("x", S8, (batch, tokens, width)), input_("w", S8, (width, 3 * width))]
    lhs, rhs = (Node(Param(i, s.tensor)) for i, s in enumerate(src))
    acc = Node(Acc(Gemm(S8.accumulator, lhs, rhs, (lhs,)).acc_type))
    stores = []
    for i in range(3):
        x = map_("multiply", convert(slice_(acc, 2, i * width, (i + 1) * width), F32), const(0.01 + i, F32))
        x = Node(Quantize(S8), x, const(0.5, F32)) if i != 1 else convert(x, BF16)
        x = reshape(x, (batch, tokens, count, width // count))
        stores.append(transpose(x, (0, 2, 3, 1) if i == 1 else (0, 2, 1, 3)))
    return problem_of(Node(Gemm(S8.accumulator, lhs, rhs, tuple(stores)), *src))


def alike_heads(batch=2, tokens=384, width=768, count=12, *, joined=False):
    """The same without scales, K as Q and V are: each with a bias of its own, or, if `joined`, with a range of one for all."""
    src = [input_("x", S8, (batch, tokens, width)), input_("w", S8, (width, 3 * width))]
    src += [input_("bias", F16, (3 * width,))] if joined else [input_(f"bias{i}", F16, (width,)) for i in range(3)]
    params = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    acc = Node(Acc(Gemm(S8.accumulator, params[0], params[1], (params[0],)).acc_type))
    stores = []
    for i in range(3):
        x = map_("multiply", convert(slice_(acc, 2, i * width, (i + 1) * width), F32), const(0.01, F32))
        bias = slice_(params[2], 0, i * width, (i + 1) * width) if joined else params[2 + i]
        x = convert(map_("add", x, convert(bias, F32)), F16)
        stores.append(transpose(reshape(x, (batch, tokens, count, width // count)), (0, 2, 1, 3)))
    return problem_of(Node(Gemm(S8.accumulator, params[0], params[1], tuple(stores)), *src))


def layer(dtype, width, function=None, out=None, rows=(64, 384), depth=768, between=F16):
    """A product of a layer of BERT, with constant scales: bias, then a function and codes, or a residual, of type `between`."""
    lhs, rhs, scale, bias, residual = (
        input_(name, kind, shape)
        for name, kind, shape in (
            ("x", dtype, (*rows, depth)),
            ("w", dtype, (depth, width)),
            ("scale", F32, (width,)),
            ("bias", F16, (width,)),
            ("residual", F16, (*rows, width)),
        )
    )
    src = [lhs, rhs, scale, bias, *([residual] if function is None else [])]
    params = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    acc = Node(Acc(Gemm(dtype.accumulator, params[0], params[1], (params[0],)).acc_type))
    x = map_("multiply", map_("multiply", convert(acc, F32), const(0.01, F32)), params[2])
    x = convert(map_("add", x, convert(params[3], F32)), between)
    if function is None:
        x = map_("add", x, params[4])
    else:
        x = Node(Quantize(out), convert(map_(function, x), F32), const(0.03, F32))
    p = problem_of(Node(Gemm(dtype.accumulator, params[0], params[1], (x,)), *src))
    return replace(p, weights=(False, True, True, True, False)[: len(src)])


def machine_code(p, point):
    kernel = compiled(spec_of(plan_of(p, H200), point)).kernel
    return kernel, assembly(kernel)


MOST_INSTRUCTIONS = (
    7000  # of 16 bytes: a tile took four times as long where those of both warpgroups did not fit the SM's cache
)

# What is multiplied, the point, instructions that must be there (patterns).
CASES = {
    "bf16, deferred": (
        "bf16[8192,8192] @ bf16[8192,8192]^T -> bf16",
        replace(WHOLE, deferred_store=True),
        ["HGMMA.64x256x16.F32.BF16", "UTMALDG.2D", "UTMASTG.2D"],
    ),
    "bf16, all other layouts": (
        "bf16[1000,776]^T @ bf16[1000,520] -> f32",
        WHOLE,
        ["HGMMA.64x256x16.F32.BF16", "UTMALDG.2D", "UTMASTG.2D"],
    ),
    "f16, 160 columns, bias and gelu": (
        "f16[3072,3072] @ f16[768,3072]^T + bias, gelu_tanh -> f16",
        replace(WHOLE, tile_n=160, num_stages=4 if whole_views() else 5),
        ["HGMMA.64x160x16.F32", "UTMASTG.2D", "MUFU.RCP", "MUFU.EX2"],
    ),
    "s8, batched": (
        "s8[16,1024,1024] @ s8[16,1024,1024]^T -> s8",
        replace(WHOLE, tile_m=256, tile_n=128),
        ["IGMMA.64x128x32.S8.S8", "UTMASTG"],
    ),
    "s8, widest": ("s8[8192,8192] @ s8[8192,8192]^T -> s8", WHOLE, ["IGMMA.64x256x32.S8.S8", "UTMASTG.2D"]),
    "u8, requantised": (
        "u8[1000,512] zero_point @ s8[768,512]^T scale=channel -> s8 scale=tensor",
        replace(WHOLE, tile_n=192),
        ["IGMMA.64x192x32.U8.S8", "UTMASTG.2D"],
    ),
    "fp8, scales, multicast": (
        "f8e4m3fn[8192,8192] scale=channel @ f8e4m3fn[8192,8192]^T scale=channel -> bf16",
        replace(WHOLE, deferred_store=True, multicast=True),
        ["QGMMA.64x256x32.F32.E4M3.E4M3", r"UTMALDG.2D.MULTICAST", "UTMASTG.2D"],
    ),
    "fp8, mixed, fp8 out": (
        "f8e5m2[1000,512] @ f8e4m3fn[512,512]^T -> f8e4m3fn scale=tensor",
        replace(WHOLE, tile_n=128, num_stages=6),
        ["QGMMA.64x128x32.F32.E5M2.E4M3", "UTMASTG.2D"],
    ),
    "fp8, scales by blocks": (
        "f8e4m3fn[4096,7168] block=1x128 @ f8e4m3fn[4096,7168]^T block=128x128 -> bf16",
        replace(WHOLE, tile_n=128, num_stages=6),
        ["QGMMA.64x128x32.F32.E4M3.E4M3", "FFMA", "UTMASTG.2D"],
    ),
    "bf16, residual, stream-K": (
        "bf16[512,4096] @ bf16[4096,1024] + bias + residual, relu -> bf16",
        replace(WHOLE, tile_n=128, num_stages=6, stream_k=32, blocks=132),
        ["HGMMA.64x128x16.F32.BF16", "ATOMG", "UTMASTG.2D"],
    ),
    "bf16, cluster split-K": (
        "bf16[1000,4096] @ bf16[4096,1024] + bias, gelu_tanh -> bf16",
        replace(WHOLE, tile_n=192, num_stages=4, split_k=3),
        ["HGMMA.64x192x16.F32.BF16", "STS.128", "UBLKCP", "LDS.128", "UTMASTG.2D"],
    ),
    "s8, cluster split-K": (
        "s8[64,4096] scale=tensor @ s8[1024,4096]^T scale=channel -> s8 scale=tensor",
        replace(WHOLE, tile_n=128, num_stages=6, split_k=2),
        ["IGMMA.64x128x32.S8.S8", "STS.128", "UBLKCP", "LDS.128", "UTMASTG.2D"],
    ),
    "fp8, gelu, fp8 out, ping-pong": (
        layer(F8E4M3FN, 3072, "gelu", F8E4M3FN),
        replace(WHOLE, tile_n=192, pingpong=True, vector_store=True),
        ["QGMMA.64x192x32", "MUFU.EX2.F16", "F2FP.SATFINITE.E4M3.F16", "UTMASTG.2D"],
    ),
    "s8, gelu by tanh, s8 out, ping-pong, multicast": (
        layer(S8, 3072, "gelu_tanh", S8),
        replace(WHOLE, tile_n=128, num_stages=6, pingpong=True, multicast=True, vector_store=True, blocks=132),
        ["IGMMA.64x128x32", "MUFU.EX2.F16", "HFMA2", r"UTMALDG.2D.MULTICAST", "UTMASTG.2D"],
    ),
    "s8, gelu of f32, s8 out, ping-pong": (
        layer(S8, 3072, "gelu", S8, between=F32),
        replace(WHOLE, tile_n=192, pingpong=True, vector_store=True),
        ["IGMMA.64x192x32", "MUFU.EX2 ", "I2IP.S8.S32.SAT", "UTMASTG.2D"],
    ),
    "fp8, gelu of f32, fp8 out, ping-pong": (
        layer(F8E4M3FN, 3072, "gelu", F8E4M3FN, between=F32),
        replace(WHOLE, tile_n=192, pingpong=True, vector_store=True),
        ["QGMMA.64x192x32", "MUFU.EX2 ", "F2FP.SATFINITE.E4M3.F32", "UTMASTG.2D"],
    ),
    "fp8, residual by TMA": (
        layer(F8E4M3FN, 768),
        replace(WHOLE, tile_n=192),
        ["QGMMA.64x192x32", "LDSM", "STSM", "UTMASTG.2D"],
    ),
    "s8, heads, shared epilogue": (
        alike_heads(),
        replace(WHOLE, tile_n=192),
        ["IGMMA.64x192x32.S8.S8", "UTMASTG.4D"],
    ),
    "s8, heads of Q, K and V": (heads(), replace(WHOLE, tile_n=128, num_stages=6), ["IGMMA.64x128x32.S8.S8", "UTMASTG.4D"]),
}


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", CASES)
def test_machine_code_is_what_was_meant(name):
    what, point, wanted = CASES[name]
    kernel, sass = machine_code(problem(what) if isinstance(what, str) else what, point)
    for pattern in wanted:
        assert re.search(pattern.replace(".", r"\."), sass), pattern
    found = needs(kernel)
    assert found.spills == 0
    assert found.shared_bytes <= CHIP.shared_bytes
    assert not re.search(r"\b(STL|LDL)\b", sass)
    assert sum(map(len, kernel.asm.values())) < 2 << 20  # no text is kept that nobody reads
    instructions = len(re.findall(r"(?m)^\s+/\*[0-9a-f]{4,5}\*/\s+[@A-Z]", sass))
    assert instructions < MOST_INSTRUCTIONS, instructions
    if point.multicast:  # told of a free stage, the other block need not wait until memory has settled
        assert sass.count("MEMBAR.ALL.GPU") <= 1


def test_nothing_is_read_before_the_kernel_ahead_has_ended():
    """Warps that load wait for it, and those that multiply wait for the loads; but scales by blocks are read beforehand."""
    for name, readers in (("bf16, deferred", 1), ("fp8, scales by blocks", 3)):
        what, point, _ = CASES[name]
        kernel, _ = machine_code(problem(what), point)
        waits = kernel.asm["ptx"].count("griddepcontrol.wait")
        assert waits == readers, (name, waits)


@pytest.mark.parametrize(
    "line",
    [
        "bf16[8192,8192] @ bf16[8192,8192]^T -> bf16",
        "f8e4m3fn[128,8192] scale=channel @ f8e4m3fn[10240,8192]^T scale=channel -> bf16",
        "s8[16,1024,1024] @ s8[16,1024,1024]^T -> s8",
        "bf16[1000,4096] @ bf16[4096,776] + bias -> bf16",
        "bf16[128,4096] @ bf16[4096,4096]^T + bias -> bf16",
    ],
)
def test_every_point_fits_shared_memory_and_keeps_all_processors_at_work(line):
    p = problem(line)
    plan = plan_of(p, H200)
    found = tile_configs(plan)
    assert found
    for point in found:
        config = spec_of(plan, point).config
        assert config.stage_bytes * config.num_stages + config.store_bytes < CHIP.shared_bytes
        assert point.blocks <= H200.cores
        assert point.blocks % config.cluster == 0
        if point.split_k > 1:  # what the cluster's blocks send lies in the ring, and there is one tile for each cluster
            assert exchange_bytes(point) <= config.num_stages * config.stage_bytes
            assert plan.tiles(point) * point.split_k == point.blocks
    times = [predict(CANDIDATE, p, s, H200) for s in plan_for(CANDIDATE, p, H200).schedules()]
    assert times[0] == min(times) > max(p.ops / 1979e6, p.bytes / 4800e3)  # no product is faster than the chip


def test_shares_of_k_are_worked_out_in_32_bits():
    p = problem("bf16[1408,16777216] @ bf16[1408,16777216]^T -> bf16")
    plan = plan_of(p, H200)
    found = tile_configs(plan)
    assert found
    for x in found:
        workers = x.blocks // 2 if x.multicast else x.blocks
        assert x.stream_k * -(-plan.K // plan.tile_k) * workers < 1 << 31


REFUSED = {
    "f32[64,64] @ f32[64,64] -> f32": "no f32 x f32 product",
    "bf16[64,64] @ s8[64,64] scale=channel -> bf16": "stored as it is multiplied",
    "bf16[0,64] @ bf16[64,64] -> bf16": "empty",
    "s8[2147483600,64] @ s8[64,64] -> s8": "not counted in 31 bits",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_it_cannot_do_it_refuses_in_words(line):
    assert REFUSED[line] in (refusal(CANDIDATE, problem(line), H200) or "")


def test_other_architectures_are_refused():
    other = replace(H200, features=frozenset({"cuda", "sm_80"}))
    assert "Hopper" in (refusal(CANDIDATE, problem("bf16[64,64] @ bf16[64,64] -> bf16"), other) or "")


@pytest.mark.parametrize(
    "rewrite",
    [
        ptx.widest_products,
        lambda t: ptx.multicast(t, 1),
        lambda t: ptx.narrowed(t, 192),
        lambda t: ptx.unsigned(t, True, False),
        lambda t: ptx.split(t, 2, 2, (4, 4)),
    ],
)
def test_a_text_that_is_not_as_expected_is_not_rewritten(rewrite):
    with pytest.raises(ptx.UnexpectedPtx):
        rewrite(".visible .entry gemm()\n.reqntid 384\n{\n// %bb.0:\n\tret;\n}\n")


def test_what_another_thread_compiles_meanwhile_is_not_rewritten(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    text = f"{modules.IMPORTS}\n\n@triton.jit\ndef f(p0):\n    tl.store(p0, 1)\n"

    def plain(number):
        function = modules.module(text.replace("1)", f"{number})")).f
        return "rewritten" in modules.compiled(function, {"p0": "*i32"}, modules.Arch("cuda", 90, 32)).asm["ptx"]

    with ptx.rewriting(lambda t: f"{t}\n// rewritten\n"), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(plain, 1).result()
        assert plain(2)
    assert not plain(3)


def test_a_store_that_tma_cannot_write_goes_by_addresses():
    _, sass = machine_code(problem("bf16[100,64] @ bf16[64,25] -> bf16"), replace(WHOLE, tile_m=64, tile_n=64))
    assert "UTMASTG" not in sass
    assert "STG" in sass


def test_stores_that_are_alike_have_one_code():
    specs = []
    for p in (heads(), alike_heads(), alike_heads(joined=True)):
        plan = plan_of(p, H200)
        specs.append(spec_of(plan, replace(WHOLE, tile_n=192)))
    assert [len(x.config.subtile_n) for x in specs] == [3, 1, 1]
    assert [line.strip() for line in write(specs[2]).text.split("\n") if line.strip().startswith("s0 = ")] == [
        "s0 = p2",
        "s0 = p2 + 768",
        "s0 = p2 + 1536",
    ]


def test_a_tile_that_ends_in_two_stores_is_written_by_both():
    p = alike_heads()
    for tile_n, shared in ((256, True), (224, False)):
        assert spec_of(plan_of(p, H200), replace(WHOLE, tile_n=tile_n, num_stages=3)).config.shared_epilogue is shared


def test_the_source_file_stands_for_problems_of_all_extents():
    """Code depends on extents only where a tile may end beyond them, or a store takes some of the columns."""
    texts = {write(spec_of(plan_of(p, H200), WHOLE)).text for p in map(problem, SAME_TEXT)}
    assert len(texts) == 1


SAME_TEXT = [f"bf16[{m},{k}] @ bf16[{n},{k}]^T -> bf16" for m, n, k in ((512, 512, 640), (1024, 2048, 256))]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("dtype", "width"), [(F8E4M3FN, 768), (S8, 384)])
def test_a_barrier_waits_for_as_many_bytes_as_are_copied(dtype, width):
    """The operand comes while the product is worked out, by any tile: a kernel that waits for more bytes never ends."""
    p = layer(dtype, width, rows=(4, 333), depth=256)
    plan = plan_of(p, H200)
    seen = set()
    for point in tile_configs(replace(plan, target=replace(H200, cores=4))):
        spec = spec_of(plan, point)
        store, config = spec.stores[0], spec.config
        kind = store.columns, config.pingpong
        if not config.aux_load or kind in seen:
            continue
        _, view = store.aux
        text = compiled(spec).kernel.asm["ptx"]
        expected = [int(n) for n in re.findall(r"mbarrier\.arrive\.expect_tx\S* _, \[%r\d+\], (\d+);", text)]
        copies = len(re.findall(r"cp\.async\.bulk\.tensor\S*mbarrier::complete_tx", text))
        right = config.tile_n // config.right_rows // (2 if config.multicast else 1)
        own = config.left_boxes + right  # for which one barrier waits
        assert sum(expected) - config.stage_bytes == (copies - own) * math.prod(view.box) * 2 > 0
        seen.add(kind)
    assert {32, 64} <= {columns for columns, _ in seen}


def test_with_scales_by_blocks_no_copy_brings_what_is_added():
    """Their tiles ask for none: what stands where it would come to is not the residual."""
    p = problem("f8e4m3fn[130,512] block=1x128 @ f8e4m3fn[256,512]^T block=128x128 + residual:bf16 -> bf16")
    plan = plan_of(p, H200)
    found = [spec_of(plan, point) for point in tile_configs(plan)]
    assert found
    for spec in found:
        assert "gl.load(p4 + " in write(spec).text
        assert not spec.config.aux_load


@pytest.mark.parametrize(
    "line",
    [
        "bf16[20,128] @ f8e4m3fn[72,128]^T group=64 -> bf16",
        "f16[20,64] @ f8e4m3fn[72,64]^T scale=channel -> f16",
        "bf16[20,64] @ f4e2m1fn[72,64]^T group=32 -> bf16",
        "f16[20,64] @ f4e2m1fn[72,64]^T group=16 -> f16",
    ],
)
def test_weights_of_few_bits_that_are_floats(line):
    p = posed(line)
    sources = random_sources(p)
    schedule = next(iter(plan_for(CANDIDATE, p, H200).schedules()))
    assert check(p, expect(p, sources), emulate(CANDIDATE, p, schedule, sources)) is None


def test_gate_and_up_meet_in_the_registers_of_one_tile():
    p = gated(BF16, (4096,), 4096, 14336)
    point = tile_configs(plan_of(p, H200))[0]
    assert point.pingpong and point.tile_n == 192
    kernel, sass = machine_code(p, point)
    assert "HGMMA.64x192x16.F32.BF16" in sass and needs(kernel).spills == 0
    assert sass.count("UTMASTG") == 2 * 96 // 32  # both warpgroups: subtiles of 32 columns, of 96 a tile


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize(
    "line", ["f8e4m3fn[300,256] @ f8e4m3fn[256,251] * 0.5 + bias -> f32", "s8[130,128] @ s8[128,51] -> s32",
             "f16[2,70,128] @ f16[128,77] + bias, relu -> f16"],
)  # fmt: skip
def test_lanes_store_neighbours_where_tma_cannot_store(line, pingpong):
    p = problem(line)
    point = replace(WHOLE, tile_n=64, blocks=2, num_stages=3, pingpong=pingpong)
    sources = random_sources(p)
    assert check(p, expect(p, sources), emulate(CANDIDATE, p, Schedule.of_point(point), sources)) is None
    assert "UTMASTG" not in machine_code(p, point)[1]


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("line", "tile_m", "tile_n", "shared"),
    [
        ("f8e4m3fn[200,64] @ f8e4m3fn[64,577] -> f32", 128, 192, 0),
        ("s8[3,100,64] @ s8[3,64,67] -> s32", 64, 64, 0),
        ("bf16[70,512] @ bf16[512,101] + bias -> f32", 64, 128, 2),
        ("bf16[130,64] @ bf16[64,1] -> f32", 128, 64, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", [{"apart": True}, {"late": True}, {"seed": 2}], ids=str)
def test_words_of_rows_that_begin_anywhere_are_stored_by_lines(line, tile_m, tile_n, shared, how, monkeypatch):
    p, plain, stored = problem(line), Global.write, list[np.ndarray]()

    def write(self, addresses, words):
        stored.append(addresses)
        plain(self, addresses, words)

    monkeypatch.setattr(Global, "write", write)
    tile = replace(
        WHOLE, tile_m=tile_m, tile_n=tile_n, tile_k=64 if "bf16" in line else 128, num_stages=3, blocks=2, stream_k=shared
    )
    tile = replace(tile, pingpong=tile_n == 192)
    sources = random_sources(p)
    assert check(p, expect(p, sources), emulate(CANDIDATE, p, Schedule.of_point(tile), sources, **how)) is None
    if tile_n == 192:
        assert spec_of(plan_of(p, H200), tile).config.store_pitch == (577,)
    if tile_n == 192 and "apart" in how:  # a warp at a time
        assert sum(map(len, stored)) == 200 * 577
        assert all(len(set(x // 128)) == 1 for x in stored)
        assert len(stored) <= 200 * (4 * 6 + 4)  # of a row four tiles, six lines and a bit each
        broken = sum(len(x) * 4 - 32 * len(set(x // 32)) != 0 for x in stored)
        assert broken <= 200 * 4 * 2


@pytest.mark.parametrize("out", [S8, U8, F8E4M3FN])
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh"])
def test_codes_of_a_function_of_f32(function, out):
    p = layer(S8, 64, function, out, rows=(130,), depth=128, between=F32)
    sources = random_sources(p)
    x = sources[0]
    x[:3], x[3:5] = 127, -128  # large values of both signs
    given = emulate(CANDIDATE, p, Schedule.of_point(replace(WHOLE, tile_n=64, blocks=2)), sources)
    assert check(p, expect(p, sources), given) is None


@pytest.mark.thin(3)
@pytest.mark.parametrize(("tile_n", "multicast"), [(192, True), (192, False), (128, False)])
def test_a_tile_reads_as_many_columns_of_both_halves(tile_n, multicast):
    p = gated(F16, (300,), 128, 200)
    point = replace(WHOLE, tile_n=tile_n, multicast=multicast, blocks=4)
    assert plan_of(p, H200).tiles(point) == -(-300 // (256 if multicast else 128)) * -(-200 // (tile_n // 2))
    sources = random_sources(p)
    assert check(p, expect(p, sources), emulate(CANDIDATE, p, Schedule.of_point(point), sources)) is None


def test_halves_that_blocks_scale_are_refused():
    p = problem("f8e4m3fn[130,256] block=1x128 @ f8e4m3fn[256,256]^T block=128x128 -> bf16")
    (store,) = p.op.stores
    left, right = (
        substitute((store,), {n: slice_(n, -1, i * 128, i * 128 + 128) for n in toposort((store,)) if isinstance(n.op, Acc)})
        for i in range(2)
    )
    halved = replace(p, op=replace(p.op, stores=(map_("multiply", map_("silu", *left), *right),)))
    with pytest.raises(Unsupported, match="scales by blocks of both halves of the columns"):
        plan_of(halved, H200)


def test_alike_stores_of_both_halves_read_no_memory_for_the_right_one():
    wide = of_ranges(512, 512, 512, ((0, 256), (256, 512)))
    plan = plan_of(wide, H200)
    spec = spec_of(plan, tile_configs(plan)[0])
    assert spec.config.shared_epilogue and not re.search(r"\bp\d", write(spec).text)
