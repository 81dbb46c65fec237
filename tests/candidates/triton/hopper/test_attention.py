"""Attention that holds whole rows of scores: which it takes, in which sizes, and its machine code (no GPU at hand)."""

import re
from dataclasses import replace

import pytest
import torch
from attentions import attention
from ptx import H200, emulate, emulating
from ptx.machine import How
from spills import most_spilled

from tests.candidates.triton.test_attention import bert, flash
from tests.candidates.triton.test_normalization import gpu
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED, S8, S64
from tilewright.ir.build import const, convert, input_, map_, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Attention, Dequantize, Param, Quantize
from tilewright.ir.types import TensorType
from tilewright.schedule.problem import problem_of

pytest.importorskip("triton")

from tilewright.candidates.triton.attention.candidate import CANDIDATE as TRITON
from tilewright.candidates.triton.hopper.attention import candidate as hopper_attention
from tilewright.candidates.triton.hopper.attention.candidate import points, registers, shared_bytes
from tilewright.candidates.triton.hopper.attention.kernel import TileConfig, config_of, padded
from tilewright.candidates.triton.runtime.module import assembly, needs
from tilewright.schedule.candidate import Schedule, plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.sample import random_sources

TWO_BLOCKS = (228 << 10) // 2 - 1024  # bytes of shared memory that a block may have where two share a multiprocessor


def coded(codes=F8E4M3FN, dtype=F16, tokens=384, causal="no", values=True, scale=1.0, batch=64, heads=12, given=None):
    """Queries, keys and, if `values`, values given as codes; a quantised result, its heads side by side."""
    depth = 64
    shape = (batch, heads, tokens, depth)
    kinds = [given] * 3 if given else [codes, codes, codes if values else dtype]
    src = [input_(name, kind, shape) for name, kind in zip("qkv", kinds, strict=True)]
    leaves = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    operands = [Node(Dequantize(dtype), n, const(0.05, F32)) if n.dtype is codes else n for n in leaves]
    acc = Node(Acc(TensorType(dtype, shape)))
    store = transpose(Node(Quantize(codes), acc, const(0.01, F32)), (0, 2, 1, 3))
    store = reshape(store, (batch, tokens, heads * depth))
    return problem_of(Node(Attention(scale, causal, True, tuple(operands), stores=(store,)), *src))


def of_two_sources(keys=1000):
    """Keys are a sum, and too many for registers."""
    src = [input_(n, F16, (1, 2, t, 64)) for n, t in (("q", 100), ("k", keys), ("v", keys), ("more", keys))]
    q, k, v, more = (Node(Param(i, s.tensor)) for i, s in enumerate(src))
    return problem_of(Node(Attention(0.125, operands=(q, map_("add", k, more), v)), *src))


def kernel_of(problem, tile):
    heads = hopper_attention.supported_heads(problem)
    return heads, hopper_attention.Plan(problem, gpu(), heads, ()).machine_code(tile).kernel


def code_of(problem, ones):
    _, kernel = kernel_of(problem, TileConfig("whole_rows", 1, ones))
    return assembly(kernel), needs(kernel)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("problem", "first", "ones"),
    [
        (flash(mask=PRED), "HGMMA.64x128x16.F32", False),
        (coded(causal="upper", tokens=128), "QGMMA.64x128x32.F32.E4M3.E4M3", True),
    ],
    ids=["f16, a mask", "f8e4m3fn, causal"],
)
def test_both_products_are_warpgroup_instructions_and_two_blocks_share_a_multiprocessor(problem, first, ones):
    code, found = code_of(problem, ones)
    assert first in code and "HGMMA.64x64x16.F32" in code and "HMMA.16816" not in code
    assert 2 * code.count("WARPGROUP.ARRIVE") < code.count("GMMA.64x")  # else each waits for the one before
    assert found.registers <= 255 and found.spills <= 256 and found.shared_bytes <= TWO_BLOCKS


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (flash(F32), "the matrix unit takes f16 or bf16 here"),
        (bert(S8, 128), "its scores or weights are changed on the way"),
        (coded(S8), "queries and keys are multiplied as f16, bf16 or both as one 8-bit float"),
        (coded(scale=-1.0), "its scale is not positive"),
        (coded(tokens=448), "all scores of 448 keys do not fit into registers beside 64 columns"),
        (flash(depth=256), "all scores of 384 keys do not fit into registers beside 256 columns"),
        (flash(depth=20), "rows of its queries do not lie in pieces of 16 bytes"),
        (of_two_sources(), "its keys are worked out from other values"),
        (
            problem_of(
                Node(Attention(1.0, "lower"), *(input_(n, F16, (1, 1, t, 64)) for n, t in (("q", 9), ("k", 8), ("v", 8))))
            ),
            "causality hides all keys from some queries",
        ),
    ],
)
def test_refusals(problem, why):
    assert refusal(hopper_attention.CANDIDATE, problem, gpu()) == why
    assert refusal(hopper_attention.CANDIDATE, flash(), gpu()) is None
    assert "Hopper" in refusal(hopper_attention.CANDIDATE, flash(), gpu("sm_80"))


def test_tiles_of_queries_see_as_many_keys_as_causality_lets_them():
    heads, tile = hopper_attention.supported_heads(flash()), TileConfig("whole_rows", 1, ones=False)
    assert padded(300) == 320 and padded(64) == 64
    assert registers(heads) == (384 + 64) // 2
    assert config_of(heads, tile).seen == (384,) * 6
    assert config_of(replace(heads, causal="upper"), tile).seen == (64, 128, 192, 256, 320, 384)
    assert config_of(replace(heads, causal="lower", queries=100), tile).seen == (348, 384)


def test_a_head_is_shared_among_blocks_where_heads_are_few_and_blocks_are_persistent_where_they_are_many():
    def first(batch):
        src = (input_(n, BF16, (batch, 12, 384, 64)) for n in "qkv")
        return next(iter(plan_for(hopper_attention.CANDIDATE, problem_of(Node(Attention(0.125), *src)), gpu()).schedules()))

    assert dict(first(1).knobs) == {"kernel": "whole_rows", "splits": 6, "ones": False}
    assert first(64) == Schedule.of(kernel="flash", num_stages=4, groups=3, pingpong=True, overlapped=False, on_demand=True)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("problem", "code8"),
    [(flash(mask=PRED, extents=(64, 12, 128, 128)), None), (coded(S8, BF16, tokens=130, causal="upper", given=BF16), "HFMA2")],
    ids=["a mask", "causal, s8 codes"],
)
def test_persistent_blocks_are_fed_by_tma_and_hold_all_in_registers(problem, code8):
    tile = TileConfig("persistent", ones=True)
    heads, kernel = kernel_of(problem, tile)
    code, found = assembly(kernel), needs(kernel)
    assert "UTMALDG" in code and "HGMMA.64x128x16.F32" in code and "HGMMA.64x64x16.F32" in code
    assert "USETMAXREG" in code and found.spills == 0
    assert found.shared_bytes <= shared_bytes(heads, tile) <= 227 << 10
    assert code8 is None or (code8 in code and "F2I" not in code)  # conversions would take the exponentials' unit


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (flash(mask=PRED, extents=(64, 12, 384, 700)), TileConfig("flash", None, None, 4, 3, pingpong=True, overlapped=False)),
        (
            coded(S8, BF16, tokens=1000, causal="upper", given=BF16),
            TileConfig("flash", None, None, 4, 2, pingpong=False, overlapped=True),
        ),
    ],
    ids=["a mask", "causal, s8 codes"],
)
def test_any_number_of_keys_passes_through_shared_memory(problem, tile):
    heads, kernel = kernel_of(problem, tile)
    assert tile in points(heads, 132, 227 << 10)
    code, found = assembly(kernel), needs(kernel)
    assert "UTMALDG" in code and "HGMMA.64x128x16.F32" in code and "HGMMA.64x64x16.F32" in code
    assert found.spills <= most_spilled("attention with a mask" if heads.mask is not None else "")
    assert found.shared_bytes <= 227 << 10
    assert code.count("MUFU.EX2") < 400  # two chunks for each warpgroup, not all of them one after the other
    if tile.overlapped:  # exponentials stand before the wait for the products that are asked for before them
        last = code.rindex("HGMMA.64x128x16")
        waits = [m.start() for m in re.finditer(r"WARPGROUP\.DEPBAR", code[last:])]
        assert code[last + waits[0] : last + waits[1]].count("MUFU.EX2") >= 64


def test_point_and_schedule_name_one_another():
    heads = hopper_attention.supported_heads(flash())
    found = points(heads, 132, 227 << 10)
    assert TileConfig("persistent", ones=True) in found and len(found) == 18
    assert [Schedule.of_point(p).point(TileConfig) for p in found] == found


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (flash(extents=(64, 12, 64, 64)), "a warpgroup has no tile"),
        (coded(tokens=128), "values have to become floats"),
        (flash(depth=128, extents=(64, 12, 192, 192)), "two heads do not fit into shared memory"),
    ],
)
def test_no_blocks_are_persistent_where(problem, why):
    assert not any(p.kernel == "persistent" for p in points(hopper_attention.supported_heads(problem), 132, 227 << 10)), why


@pytest.mark.thin(2)
@pytest.mark.parametrize(("causal", "queries", "tiles"), [("upper", 384, 6), ("lower", 33, 1), ("lower", 130, 3)])
def test_every_tile_that_causality_cuts_compares_positions(causal, queries, tiles):
    """The last tile does so, too: it sees all keys but for its own queries' followers. Nothing else compares any."""
    src = [input_(n, F16, (1, 2, t, 64)) for n, t in (("q", queries), ("k", 384), ("v", 384))]
    problem = problem_of(Node(Attention(0.125, causal), *src))
    heads, kernel = kernel_of(problem, TileConfig("whole_rows", 1, ones=False))
    text, seen = kernel.asm["ttgir"], config_of(heads, TileConfig("whole_rows", 1, ones=False)).seen
    shift = 384 - queries if causal == "lower" else 0
    cut = {  # of each run of tiles, the chunks that its first query does not see whole
        (padded(seen[t]), start)
        for t in range(tiles)
        for start in range(0, seen[t], 128)
        if t * 64 + shift < min(start + 128, padded(seen[t])) - 1
    }
    assert text.count("arith.cmpi sge") == len(cut) >= 1


@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("candidate", [TRITON, hopper_attention.CANDIDATE], ids=lambda c: c.name)
def test_a_row_hidden_by_the_least_number_of_f32_has_equal_weights(candidate, queries):
    p = problem_of(attention((2, 2, 1, 64, 128, 64, 64), F16, mask=(F32, (2, 1, queries, 128))))
    q, k, v = (torch.randn(2, 2, n, 64).half() for n in (64, 128, 128))
    mask = torch.zeros(2, 1, queries, 128)
    mask[0, ..., 40:] = mask[1] = torch.finfo(torch.float32).min
    mask[1, ..., :7] = -torch.inf
    wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, scale=0.125)
    kinds = {}
    for s in plan_for(candidate, p, H200).schedules():
        kinds.setdefault(dict(s.knobs).get("kernel"), s)
    for s in kinds.values():
        (given,) = emulate(candidate, p, s, [q, k, v, mask], fenced_copies=candidate is not TRITON)
        torch.testing.assert_close(given.float(), wanted, rtol=2e-3, atol=2e-3)


def test_chunks_that_an_added_mask_leaves_alone_are_not_masked():
    """Some of one head's three chunks of keys are left alone, some get a bias, some are hidden by it."""
    p = problem_of(attention((3, 2, 1, 64, 384, 64, 64), F16, mask=(F32, (3, 1, 1, 384))))
    q, k, v = (torch.randn(3, 2, n, 64).half() for n in (64, 384, 384))
    mask = torch.zeros(3, 1, 1, 384)
    mask[0, ..., 140:], mask[1, ..., 300:], mask[2, ..., :200] = torch.finfo(torch.float32).min, -torch.inf, torch.randn(200)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, scale=0.125)
    ring = [s for s in plan_for(hopper_attention.CANDIDATE, p, H200).schedules() if s["kernel"] == "flash"]
    for s in ring:
        (given,) = emulate(hopper_attention.CANDIDATE, p, s, [q, k, v, mask])
        torch.testing.assert_close(given.float(), wanted, rtol=2e-3, atol=2e-3)
    assert {s["overlapped"] for s in ring} == {False, True}


def equal_rows(causal, tokens=(200, 300), extents=(3, 1, 1, 300), group=1):
    """A problem and its sources: of three batches one sees its first keys, one no key, and one its last keys."""
    queries, keys = tokens
    shape = (3, 2, group, queries, keys, 64, 64)
    p = problem_of(attention(shape, F16, mask=(PRED, extents), causal=causal, equal_masked_rows=True))
    shown = torch.zeros(3, 1, 1, keys, dtype=torch.bool)
    shown[0, ..., : keys * 2 // 5] = shown[2, ..., 70:] = True
    sources = random_sources(p)
    sources[3] = shown.expand(extents).clone()
    return p, sources


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("candidate", "causal", "point"),
    [
        (hopper_attention.CANDIDATE, "no", TileConfig("flash", None, None, 4, 3, pingpong=True, overlapped=False)),
        (hopper_attention.CANDIDATE, "upper", TileConfig("flash", None, None, 2, 2, pingpong=True, overlapped=True)),
        (hopper_attention.CANDIDATE, "lower", TileConfig("flash", None, None, 3, 2, pingpong=False, overlapped=False)),
        (hopper_attention.CANDIDATE, "no", TileConfig("persistent", ones=True)),
        (hopper_attention.CANDIDATE, "no", TileConfig("whole_rows", 2, ones=False)),
        (TRITON, "no", None),
        (TRITON, "upper", None),
    ],
    ids=["three groups", "overlapped, upper", "lower", "persistent", "whole rows", "plain", "plain, upper"],
)
def test_rows_that_see_nothing_have_equal_weights_where_the_graph_says_so(candidate, causal, point):
    p, sources = equal_rows(causal)
    schedule = next(iter(plan_for(candidate, p, H200).schedules())) if point is None else Schedule.of_point(point)
    results = emulate(candidate, p, schedule, sources, fenced_copies=candidate is not TRITON)
    assert check(p, expect(p, sources), results) is None
    if causal != "lower":  # which counts places from the last key
        mean = sources[2][2].float().mean(1, keepdim=True).expand(2, 70, 64)
        assert causal == "no" or torch.allclose(results[0][2, :, :70].float(), mean, atol=2e-3)
        assert torch.allclose(results[0][1].float(), sources[2][1].float().mean(1, keepdim=True).expand(2, 200, 64), atol=2e-3)


def test_a_mask_of_each_query_may_leave_rows_equal_weights():
    p, sources = equal_rows("no", extents=(3, 1, 200, 300))
    sources[3][2, :, 5] = False
    for s in (TileConfig("whole_rows", 2, ones=True), TileConfig("persistent", ones=True)):
        results = emulate(hopper_attention.CANDIDATE, p, Schedule.of_point(s), sources)
        assert check(p, expect(p, sources), results) is None


def test_kernels_that_leave_out_what_causality_hides_are_not_offered_where_it_may_have_weight():
    p, _ = equal_rows("upper")
    assert {s["kernel"] for s in plan_for(hopper_attention.CANDIDATE, p, H200).schedules()} == {"flash"}
    p, _ = equal_rows("upper", extents=(3, 1, 200, 300))
    why = "rows that see nothing have equal weights, for keys that causality hides, too"
    assert refusal(hopper_attention.CANDIDATE, p, gpu()) == why


@pytest.mark.thin(3)
@pytest.mark.parametrize("causal", ["no", "upper"])
@pytest.mark.parametrize(("how", "masked"), [({"seed": 1}, True), ({"late": True}, True), ({"late": True}, False)], ids=str)
def test_blocks_take_items_as_they_come_to_them(causal, how, masked):
    """Two blocks share nine parts of queries of three sequences, whose keys a mask of integers may show. Such
    kernels come first, where blocks have several parts each."""
    src = [input_(n, F16, (3, 1, t, 64)) for n, t in (("q", 350), ("k", 300), ("v", 300))]
    src += [input_("m", S64, (3, 300))] * masked
    q, k, v, *m = (Node(Param(i, s.tensor)) for i, s in enumerate(src))
    operands = (q, k, v, *(reshape(convert(each, PRED), (3, 1, 1, 300)) for each in m))
    p = problem_of(Node(Attention(0.125, causal, True, operands), *src))
    sources = random_sources(p)
    if masked:
        sources[3] = (torch.arange(300) < torch.tensor([[120], [0], [290]])).long()
    plan = plan_for(hopper_attention.CANDIDATE, p, replace(H200, cores=2))
    (tile,) = (t for t in plan.tiles if t.on_demand)
    assert tile is next(t for t in plan.tiles if t.kernel == "flash")
    assert not any(t.on_demand for t in plan_for(hopper_attention.CANDIDATE, p, H200).tiles)
    schedule = Schedule.of_point(replace(tile, num_stages=3, groups=2))
    with emulating(How(**how)):
        call = plan.build(schedule).prepare({})
        for _ in range(2):  # the counter is zero again
            assert check(p, expect(p, sources), call(sources)) is None
