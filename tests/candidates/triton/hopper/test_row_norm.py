"""Norms of rows that blocks of a cluster have columns of: right in every type, late and in any order of warps; planted faults
are found; what cannot be is refused in words."""

import re
from dataclasses import replace

import pytest
import torch
from ptx import H200, Deadlock, Fault, emulate

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, S8
from tilewright.ir.build import const, convert, input_, map_, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Gemm, LayerNorm, Param, Quantize
from tilewright.schedule.candidate import Schedule, Unsupported
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

pytest.importorskip("triton")

from tilewright.candidates.triton.hopper import ptx
from tilewright.candidates.triton.hopper.fast_math import inverts
from tilewright.candidates.triton.hopper.gemm.candidate import CANDIDATE
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.run import compiled
from tilewright.candidates.triton.hopper.gemm.space import tile_configs
from tilewright.candidates.triton.hopper.gemm.spec import spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.runtime.module import assembly, needs

POINT = TileConfig(
    128, 64, 128, 3, 16, pingpong=False, deferred_store=False, vector_store=False, multicast=False, blocks=4, stream_k=0,
    row_blocks=2,
)  # fmt: skip
MOST_INSTRUCTIONS = 7000  # of both warpgroups, as in test_gemm.py


def layer(
    dtype, rows=(150,), width=128, depth=160, between=F16, *, codes=None, kept=False, norm=True, center=True, residual=True,
    scale=0.0271,
):  # fmt: skip
    """A product with scales of columns, a bias and a residual; its norm, codes of that, and maybe what is normalised."""
    shapes = [(dtype, (*rows, depth)), (dtype, (depth, width)), (F32, (width,)), (F16, (width,))]
    shapes += [(between, (width,)), (between, (width,)), *([(between, (*rows, width))] if residual else [])]
    src = [input_(f"x{i}", kind, shape) for i, (kind, shape) in enumerate(shapes)]
    p = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    acc = Node(Acc(Gemm(dtype.accumulator, p[0], p[1], (p[0],)).acc_type))
    x = map_("multiply", map_("multiply", convert(acc, F32), const(0.01, F32)), p[2])
    x = convert(map_("add", x, convert(p[3], F32)), between)
    x = map_("add", x, p[6]) if residual else x
    y = Node(LayerNorm(len(rows), 1e-5, center=center), x, *p[4 : 6 if center else 5])
    stores = [x] * kept + [y] * norm
    stores += [] if codes is None else [Node(Quantize(codes), convert(y, F32), const(scale, F32))]
    posed = problem_of(Node(Gemm(dtype.accumulator, p[0], p[1], tuple(stores)), *src))
    return replace(posed, weights=tuple(0 < i < 6 for i in range(len(src))))


def assert_right(p, point, sources=None, **how):
    sources = random_sources(p) if sources is None else sources
    assert check(p, expect(p, sources), emulate(CANDIDATE, p, Schedule.of_point(point), sources, **how)) is None


CASES = {
    "fp8, its codes": (layer(F8E4M3FN, codes=F8E4M3FN), POINT),
    "fp8, rows of a vector": (layer(F8E4M3FN, codes=F8E4M3FN), replace(POINT, vector_store=True)),
    "fp8, codes alone, a batch": (layer(F8E4M3FN, (3, 67), codes=F8E4M3FN, norm=False), replace(POINT, blocks=2)),
    "s8, its codes": (layer(S8, codes=S8), POINT),
    "s8, codes alone, rows of a vector": (layer(S8, codes=S8, norm=False), replace(POINT, vector_store=True)),
    "f16": (layer(F16), replace(POINT, tile_k=64)),
    "f16, root mean square": (layer(F16, center=False), replace(POINT, tile_k=64)),
    "bf16, and what is normalised": (layer(BF16, between=BF16, kept=True), replace(POINT, tile_k=64)),
    "f32 between": (layer(F8E4M3FN, between=F32, kept=True, codes=F8E4M3FN), POINT),
    "codes of what is normalised": (layer(F8E4M3FN, kept=True, norm=False, codes=F8E4M3FN), POINT),
    "no residual": (layer(F8E4M3FN, residual=False), POINT),
    "three blocks": (layer(F8E4M3FN, width=288), replace(POINT, tile_n=96, row_blocks=3, blocks=3)),
    "four blocks of 64 rows": (layer(F8E4M3FN, width=256), replace(POINT, tile_m=64, row_blocks=4, blocks=8)),
    "eight blocks": (layer(F8E4M3FN, width=512, codes=F8E4M3FN), replace(POINT, row_blocks=8, blocks=8)),
    "one block": (layer(F8E4M3FN), replace(POINT, tile_n=128, row_blocks=1)),
    "every other tile": (layer(F8E4M3FN, (300,), codes=F8E4M3FN), replace(POINT, tile_m=64, pingpong=True)),
    "rows of a scale for which the inverse is not exact": (layer(F8E4M3FN, codes=F8E4M3FN, scale=0.03), POINT),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_normalised(name):
    p, point = CASES[name]
    assert_right(p, point, late=True, seed=1)


@pytest.mark.parametrize("seed", [None, 2, 3])
def test_any_order_of_warps_gives_the_same(seed):
    p, point = layer(F8E4M3FN, (520,), codes=F8E4M3FN), replace(POINT, blocks=2)  # five tiles, one after the other
    assert_right(p, point, seed=seed)
    assert_right(p, point, seed=seed, late=True)


def test_all_blocks_take_the_same_numbers():
    """Rows that repeat themselves: every block has the same columns, and gives the same bits."""
    p = layer(F16, width=192, residual=False)
    sources = random_sources(p)
    for i in range(1, 6):
        own = sources[i][..., :64]
        sources[i] = torch.cat([own] * 3, -1).contiguous()
    (y,) = emulate(CANDIDATE, p, Schedule.of_point(replace(POINT, tile_k=64, row_blocks=3, blocks=6)), sources)
    assert torch.equal(y[:, :64], y[:, 64:128]) and torch.equal(y[:, :64], y[:, 128:])
    assert check(p, expect(p, sources), [y]) is None


def test_deviations_far_from_zero_are_not_lost():
    p = layer(F16, between=F32)
    sources = random_sources(p)
    sources[6] += 3000
    assert_right(p, replace(POINT, tile_k=64), sources)


def test_infinities_and_nan_make_rows_of_nan():
    p = layer(F8E4M3FN, codes=F8E4M3FN)
    sources = random_sources(p)
    sources[6][3, 5], sources[6][70, 100], sources[6][149, 0] = float("inf"), float("nan"), -float("inf")
    assert_right(p, POINT, sources)
    p = layer(S8, codes=S8)
    sources = random_sources(p)
    sources[6][3, 5], sources[6][149, 100] = float("inf"), float("nan")
    assert_right(p, POINT, sources)


WAITS = re.compile(r"\{\s*\.reg \.pred \w*complete;\s*\w*waitLoop:.*?\}\s*", re.S)


def late_fault(change, **how):
    """What the machine says of a kernel changed so."""
    p = layer(F8E4M3FN, (520,), codes=F8E4M3FN)
    with pytest.raises((Fault, Deadlock, AssertionError)) as found:
        assert_right(p, replace(POINT, blocks=2), change=change, **how)
    return str(found.value)


def once(pattern, by, text):
    changed, count = re.subn(pattern, by, text, flags=re.S)
    assert count, pattern
    return changed


def slow(text, after=r"// %bb\.0:[^\n]*\n"):
    """The second block of a cluster goes on long after the first one."""
    lines = [
        ".reg .b32 %late;", ".reg .pred %now;", "mov.u32 %late, %cluster_ctarank;", "mul.lo.u32 %late, %late, 20000;", "AGAIN:",
        "setp.eq.u32 %now, %late, 0;", "@%now bra SET_UP;", "sub.u32 %late, %late, 1;", "bra.uni AGAIN;", "SET_UP:",
    ]  # fmt: skip
    return once(f"({after})", "".join([r"\1", *(f"\t{x}\n" for x in lines)]), text)


def unmet(text):
    """Blocks of a cluster do not meet."""
    return once(r"\tbarrier\.cluster\.(arrive|wait)\.\w+\.aligned;", "", text)


def hasty(text):
    """None waits for the numbers of the others."""
    at = text.index("st.async")
    while at >= 0:
        wait = WAITS.search(text, at)
        text = text[: wait.start()] + text[wait.end() :]
        at = text.find("st.async", text.find("ld.shared.v4.f32", at))
    return text


def test_blocks_that_do_not_meet_are_found():
    """One that starts long after the other has no barriers yet when that tells it."""
    p = layer(F8E4M3FN, (520,), codes=F8E4M3FN)
    assert_right(p, replace(POINT, blocks=2), change=slow)
    assert "a copy tells no barrier" in late_fault(lambda text: unmet(slow(text)))


def test_numbers_that_are_not_waited_for_are_found():
    assert "where a copy is under way" in late_fault(hasty, late=True)
    assert late_fault(hasty, seed=1)


def test_a_block_that_ends_before_others_have_told_it_is_found():
    met = r"\tbarrier\.cluster\.wait\.acquire\.aligned;\n"
    assert_right(layer(F8E4M3FN, (520,), codes=F8E4M3FN), replace(POINT, blocks=2), change=lambda text: slow(text, met))
    assert "which has ended" in late_fault(lambda text: hasty(slow(text, met)))


def test_numbers_that_nobody_tells_are_missed():
    """Each block tells itself alone."""

    def change(text):
        own = "{ .reg .pred q; .reg .b32 own; mov.u32 own, %cluster_ctarank; setp.eq.u32 q, to, own; and.pred p, p, q; }"
        return once(r"(setp\.lt\.u32 p, to, 2;)", rf"\1 {own}", text)

    assert "bytes are missing" in late_fault(change)


def test_one_barrier_for_all_tiles_is_found():
    """With the numbers of each tile at the same place, a block overwrites what another one has not read."""

    def change(text):
        return once(r"(add\.u32 here, here, %r\d+;)", r"\1 and.b32 here, here, -1025;", text)

    assert late_fault(change, late=True, seed=1)


def test_the_text_must_be_as_expected():
    with pytest.raises(ptx.UnexpectedPtx, match="not marked"):
        ptx.exchanged(
            compiled(spec_of(plan_of(layer(F8E4M3FN), H200), replace(POINT, tile_n=128, row_blocks=1))).kernel.asm["ptx"], 2, 2
        )


WIDE = replace(POINT, tile_n=256, row_blocks=3, blocks=117)
MEANT = {  # the products and stores of BERT's layers; registers of a thread, 240 for those that multiply
    "fp8": (layer(F8E4M3FN, (64, 384), 768, 768, codes=F8E4M3FN), WIDE, ["QGMMA.64x256x32", "F2FP.SATFINITE.E4M3"]),
    "fp8, rows of a vector": (
        layer(F8E4M3FN, (64, 384), 768, 768, codes=F8E4M3FN), replace(WIDE, vector_store=True), ["QGMMA.64x256x32"],
    ),
    "fp8, every other tile": (
        layer(F8E4M3FN, (64, 384), 768, 768, codes=F8E4M3FN), replace(WIDE, tile_m=64, pingpong=True), ["QGMMA.64x256x32"],
    ),
    "s8, rows of a vector": (
        layer(S8, (64, 384), 768, 3072, codes=S8), replace(WIDE, vector_store=True), ["IGMMA.64x256x32", "I2IP.S8.S32.SAT"],
    ),
    "f16, 192 columns": (
        layer(F16, (64, 384), 768, 768), replace(WIDE, tile_n=192, tile_k=64, row_blocks=4, blocks=112), ["HGMMA.64x192x16"],
    ),
    "f16, codes and what is normalised": (
        layer(F16, (64, 384), 768, 768, kept=True, norm=False, codes=F8E4M3FN), replace(WIDE, tile_k=64), ["HGMMA.64x256x16"],
    ),
}  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", MEANT)
def test_machine_code_is_what_was_meant(name):
    p, point, wanted = MEANT[name]
    kernel = compiled(spec_of(plan_of(p, H200), point)).kernel
    sass, found = assembly(kernel), needs(kernel)
    for pattern in [*wanted, "STAS.128", "LDS.128", "UTMALDG.2D", "UTMASTG.2D", "MUFU.RSQ"]:
        assert re.search(pattern.replace(".", r"\."), sass), pattern
    assert found.spills == 0 and found.registers == 168 and found.shared_bytes <= H200.chip.shared_bytes
    assert len(re.findall(r"(?m)^\s+/\*[0-9a-f]{4,5}\*/\s+[@A-Z]", sass)) < MOST_INSTRUCTIONS


def test_every_point_has_whole_rows_and_fits_shared_memory():
    for p in (
        layer(F8E4M3FN, (64, 384), 768, 768, codes=F8E4M3FN),
        layer(F16, (5000,), 1024, kept=True),
        layer(S8, (40,), 384),
    ):
        plan = plan_of(p, H200)
        found = tile_configs(plan)
        assert found
        for point in found:
            config = spec_of(plan, point).config
            assert point.row_blocks * point.tile_n == p.N and point.blocks % point.row_blocks == 0
            used = point.num_stages * config.stage_bytes + config.store_bytes + config.statistics_bytes
            assert used < H200.chip.shared_bytes and point.num_stages >= 2
            assert point.blocks // point.row_blocks <= plan.tiles(point)


def rewritten(p, change):
    return replace(p, op=replace(p.op, stores=tuple(change(s) for s in p.op.stores)))


def test_what_it_cannot_do_it_refuses_in_words():
    p = layer(F16)
    (store,) = p.op.stores
    norm, acc = store.op, Node(Acc(p.op.acc_type))
    other = Node(replace(norm, epsilon=1e-3), *store.src)
    turned = Node(LayerNorm(1, 1e-5), transpose(convert(acc, F16), (1, 0)))
    cases = {
        "several norms": lambda s: map_("add", s, other),
        "a norm over more than the last axis": lambda s: Node(replace(norm, axis=0), *s.src),
        "a norm of f64": lambda s: Node(LayerNorm(1, 1e-5), convert(acc, F64)),
        "not rows of the product|not cover|range": lambda s: turned,
        "not rows of the product": lambda s: Node(LayerNorm(1, 1e-5), reshape(convert(acc, F16), (300, 64))),
        "scale of a norm is computed from the product": lambda s: Node(norm, s.src[0], convert(acc, F16)),
        "reads the sums in two ways": lambda s: map_("add", s, convert(acc, F16)),
    }
    for words, change in cases.items():
        with pytest.raises(Unsupported, match=words):
            plan_of(rewritten(p, change), H200)


def test_rows_of_odd_lengths_have_no_tile():
    with pytest.raises(Unsupported, match="no tile fits"):
        CANDIDATE.plan(layer(F16, width=760), H200)


def test_the_inverse_of_a_scale_is_taken_where_it_gives_the_same_codes():
    def codes(scale, to=F8E4M3FN, kind=F16):
        return Node(Quantize(to), convert(input_("y", kind, (4, 8)), F32), const(scale, F32))

    assert inverts(codes(0.029)) and inverts(codes(0.05, S8)) and inverts(codes(0.029, kind=BF16))
    assert not inverts(codes(0.03)) and not inverts(codes(0.029, S8)) and not inverts(codes(0.029, kind=F32))
    assert not inverts(codes(1e-40))
