"""Attention of few queries whose keys are split over programs, run by the PTX machine: results, orders, workspace, sizes."""

import math

import pytest
import torch
from attentions import attention
from ptx import H200, Fault, emulate, emulating
from ptx.machine import How

from tests.candidates.triton.test_attention import flash
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED, S8, S32, S64
from tilewright.ir.build import broadcast, convert, input_, map_, reshape, slice_, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Acc, Attention, Gather, Param
from tilewright.ir.types import TensorType
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

pytest.importorskip("triton")

from tilewright.candidates.triton.attention.candidate import CANDIDATE, shared_bytes
from tilewright.candidates.triton.attention.kernel import TileConfig
from tilewright.candidates.triton.runtime.module import Arch, assembly, needs
from tilewright.schedule.candidate import Leading, Schedule, plan_for


def tile(split_kv, tile_n=16, tile_m=16, warps=4, stages=3, precision="ieee", early=True):
    return Schedule.of_point(TileConfig(tile_m, tile_n, warps, stages, "online", precision, split_kv, early))


def run(node, schedule, sources=None, **how):
    problem = problem_of(node)
    sources = random_sources(problem) if sources is None else sources
    return problem, sources, emulate(CANDIDATE, problem, schedule, sources, **how)


def right(node, schedule, sources=None, **how):
    problem, sources, results = run(node, schedule, sources, **how)
    why = check(problem, expect(problem, sources), results)
    assert why is None, f"{problem} {schedule}: {why}"
    return sources, results


@pytest.mark.parametrize(("keys", "parts"), [(1, 1), (17, 2), (131, 3), (131, 9), (256, 16)], ids=lambda x: str(x))
def test_any_number_of_keys_in_any_number_of_parts(keys, parts):
    right(attention((2, 4, 4, 1, keys, 16, 16), BF16), tile(parts))


def test_parts_that_do_not_fit_into_registers_together():
    """Sixteen rows of 128 columns: four parts at a time."""
    right(attention((1, 16, 16, 1, 176, 16, 128), BF16), tile(11))


def test_a_query_that_is_an_expression():
    """A rotary embedding leaves such a query: it is not as it lies in memory."""
    shape = (1, 4, 2, 2, 70, 16, 16)
    plain = attention(shape, F16)
    q, *others = plain.op.operands or [Node(Param(i, s.tensor)) for i, s in enumerate(plain.src)]
    right(Node(Attention(0.125, operands=(map_("tanh", q), *others)), *plain.src), tile(3))


@pytest.mark.thin(2)
@pytest.mark.parametrize("causal", ["no", "upper", "lower"])
@pytest.mark.parametrize(("queries", "tile_m"), [(3, 16), (7, 32), (9, 16)])
def test_queries_of_heads_that_share_keys_are_rows_of_one_tile(causal, queries, tile_m):
    """Nine queries of four heads take three tiles of 16 rows."""
    right(attention((2, 4, 4, queries, 70, 16, 32), F16, causal=causal), tile(3, tile_m=tile_m))


def test_as_torch_computes_it():
    shape = (2, 8, 4, 3, 133, 32, 32)
    (q, k, v), (got,) = right(attention(shape, F16), tile(4))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.125, enable_gqa=True)
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("dtype", "precision"), [(F32, "ieee"), (F32, "tf32x3"), (F16, "ieee")], ids=str)
def test_types(dtype, precision):
    right(attention((1, 2, 2, 1, 50, 20, 12), dtype), tile(3, precision=precision))


@pytest.mark.thin(2)
@pytest.mark.parametrize("mask", [PRED, F32, BF16], ids=str)
@pytest.mark.parametrize("spread", [(0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 1, 1)], ids=str)
def test_masks(mask, spread):
    shape = (2, 4, 2, 3, 70, 16, 16)
    extents = (shape[0], shape[1], shape[3], shape[4])
    given = tuple(d if full else 1 for d, full in zip(extents, spread, strict=True))
    right(attention(shape, F16, mask=(mask, given)), tile(3))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("hidden", [range(32), range(32, 96), range(96), range(5, 96)], ids=str)
def test_a_length_hides_whole_parts_or_all_of_them(zero, hidden):
    """A cache of fixed size is masked so, by its length; rows that see nothing are zeros or NaN."""
    node = attention((1, 2, 2, 1, 96, 16, 16), F16, mask=(PRED, (1, 1, 1, 96)), zero_masked_rows=zero)
    sources = random_sources(problem_of(node))
    sources[3] = torch.ones(1, 1, 1, 96, dtype=torch.bool)
    sources[3][..., list(hidden)] = False
    _, _, (got,) = run(node, tile(3), sources)
    q, k, v, mask = sources
    scores = (q.float() @ k.float().mT * 0.125).masked_fill(~mask, -math.inf)
    wanted = torch.softmax(scores, -1) @ v.float()
    wanted = wanted.nan_to_num(0.0) if zero else wanted
    torch.testing.assert_close(got.float(), wanted, rtol=3e-3, atol=3e-3, equal_nan=True)


@pytest.mark.parametrize("hidden", [range(32, 96), range(96)], ids=str)
def test_of_rows_that_see_nothing_weights_may_be_equal(hidden):
    node = attention((1, 4, 2, 1, 96, 16, 16), F16, mask=(PRED, (1, 1, 1, 96)), equal_masked_rows=True)
    sources = random_sources(problem_of(node))
    sources[3] = torch.ones(1, 1, 1, 96, dtype=torch.bool)
    sources[3][..., list(hidden)] = False
    right(node, tile(3), sources)


@pytest.mark.thin(2)
@pytest.mark.parametrize("what", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_what_is_no_number_stays_where_the_oracle_has_it(what, of):
    node = attention((1, 2, 1, 1, 64, 16, 16), F32, mask=(PRED, (1, 1, 1, 64)))
    sources = random_sources(problem_of(node))
    sources[3] = torch.arange(64).reshape(1, 1, 1, 64) < 50
    sources["qkv".index(of)][0, 1, 0, 3] = what
    _, _, (got,) = run(node, tile(4), sources)
    (wanted,) = evaluate_nodes((node,), dict(zip(node.src, sources, strict=True)))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


def cached(codes, dtype, scales, shape=(2, 4, 2, 1, 70, 16, 16)):
    """Keys and values as codes in a cache [B, T, H, D], dequantised by scales of an own shape."""
    batch, heads, group, queries, keys, depth, width = shape
    fewer = heads // group
    src = [input_("q", dtype, (batch, heads, queries, depth))]
    src += [input_(n, codes, (batch, keys, fewer, d)) for n, d in (("k", depth), ("v", width))]
    src += [input_(f"{n}_scale", F32, scales(batch, keys, fewer)) for n in "kv"]
    q, k, v, ks, vs = (Node(Param(i, s.tensor)) for i, s in enumerate(src))

    def operand(x, scale):
        wide = map_("multiply", convert(x, F32), broadcast(scale, x.shape))
        return transpose(convert(wide, dtype), (0, 2, 1, 3))

    return Node(Attention(0.125, operands=(q, operand(k, ks), operand(v, vs))), *src)


@pytest.mark.parametrize("codes", [S8, F8E4M3FN], ids=str)
@pytest.mark.parametrize(
    "scales",
    [lambda b, t, h: (1, 1, h, 1), lambda b, t, h: (b, t, h, 1), lambda b, t, h: (b, t, 1, 1)],
    ids=["head", "head and token", "token"],
)
def test_caches_of_codes_with_their_scales(codes, scales):
    right(cached(codes, BF16, scales), tile(3))


@pytest.mark.parametrize(
    "schedule", [tile(3), Schedule.of_point(TileConfig(16, 16, 4, 2, "online", "ieee"))], ids=["split", "whole"]
)
@pytest.mark.parametrize("codes", [S8, F8E4M3FN], ids=str)
def test_caches_as_programs_write_them(codes, schedule):
    """convert(convert(codes) * scale), with a scale for each token narrowed on the way, after all rules."""
    q = input_("q", BF16, (2, 4, 1, 16))
    k, v = (input_(n, codes, (2, 2, 70, 16)) for n in "kv")
    scales = [input_(f"{n}s", F32, (2, 2, 70, 1)) for n in "kv"]
    wide = map_("multiply", convert(k, BF16), broadcast(convert(scales[0], BF16), k.shape))
    at_once = convert(map_("multiply", convert(v, F32), broadcast(scales[1], v.shape)), BF16)
    graph = optimise(Graph("cache", (q, k, v, *scales), (Node(Attention(0.25), q, wide, at_once),), ("y",)))
    (node,) = (n for n in graph.nodes() if n.src)
    assert isinstance(node.op, Attention) and {s.dtype for s in node.src} == {BF16, codes, F32}
    right(node, schedule)


def test_a_cache_that_lies_by_tokens_is_read_where_it_is():
    """[B, S, H, D], as many models keep it; a part of a longer one."""
    whole = input_("cache", F16, (2, 80, 2, 2, 32))
    q = input_("q", F16, (2, 4, 1, 32))
    leaf, query = Node(Param(1, whole.tensor)), Node(Param(0, q.tensor))
    k, v = (transpose(reshape(slice_(slice_(leaf, 2, i, i + 1), 1, 0, 73), (2, 73, 2, 32)), (0, 2, 1, 3)) for i in range(2))
    right(Node(Attention(0.2, operands=(query, k, v)), q, whole), tile(4))


def paged(dtype=BF16, codes=None, table=S64, wraps=True, mask=True, blocks=20, each=16, picked=5):
    """Blocks of tokens of a cache, picked by a table, as serving engines keep keys and values; of codes with scales by tokens,
    in blocks, too."""
    batch, heads, key_heads, depth, keys = 2, 4, 2, 16, each * picked
    src = [input_("q", dtype, (batch, heads, 1, depth))]
    src += [input_(n, codes or dtype, (blocks, each, key_heads, depth)) for n in "kv"]
    src += [input_("table", table, (batch, picked)), input_("shown", PRED, (batch, 1, 1, keys))]
    src += [input_("scale", F32, (blocks, each, key_heads, 1))] * (codes is not None)
    q, k, v, index, shown, *scale = (Node(Param(i, s.tensor)) for i, s in enumerate(src))

    def operand(cache):
        x = reshape(Node(Gather(0, wraps=wraps), cache, index), (batch, keys, key_heads, depth))
        if codes is not None:
            by = reshape(Node(Gather(0, wraps=wraps), scale[0], index), (batch, keys, key_heads, 1))
            x = convert(map_("multiply", convert(x, F32), broadcast(by, x.shape)), dtype)
        return transpose(x, (0, 2, 1, 3))

    return Node(Attention(0.25, operands=(q, operand(k), operand(v), shown)), *src)


@pytest.mark.parametrize(
    "schedule",
    [tile(2, tile_n=32), tile(3, tile_n=64), Schedule.of_point(TileConfig(16, 16, 4, 2, "online", "ieee"))],
    ids=["split", "tiles of four blocks", "whole"],
)
def test_a_paged_cache_is_read_by_its_table(schedule):
    right(paged(), schedule)


@pytest.mark.parametrize(("codes", "table", "wraps"), [(S8, S32, True), (F8E4M3FN, S64, False)], ids=str)
def test_a_paged_cache_of_codes(codes, table, wraps):
    right(paged(codes=codes, table=table, wraps=wraps, each=8, picked=9), tile(3))


def test_a_table_counts_from_the_end_and_ends_the_program_where_it_says_no_block():
    node = paged()
    sources = random_sources(problem_of(node))
    sources[3][0, 1] = -3
    right(node, tile(2, tile_n=32), sources)
    for wrong in (20, -21):
        sources[3][0, 1] = wrong
        with pytest.raises(Fault, match="trap"):
            run(node, tile(2, tile_n=32), sources)


def test_blocks_come_by_asynchronous_copies():
    plan = plan_for(CANDIDATE, problem_of(paged(blocks=300, picked=128)), H200)
    kernel = plan.machine_code(next(iter(plan.schedules()))).kernel
    assert "LDGSTS.E.BYPASS.128" in assembly(kernel) and needs(kernel).spills == 0


def test_stores_are_expressions():
    shape = (2, 4, 4, 1, 40, 16, 16)
    plain = attention(shape, F16)
    acc = Node(Acc(TensorType(F16, (2, 4, 1, 16))))
    stores = (reshape(transpose(acc, (0, 2, 1, 3)), (2, 64)), map_("tanh", acc))
    right(Node(Attention(0.125, stores=stores), *plain.src), tile(2))


def test_the_next_kernel_may_start_beside_this_one_or_after_it():
    node = attention((1, 4, 4, 1, 50, 16, 16), F16)
    right(node, tile(2, early=None))
    plan = plan_for(CANDIDATE, problem_of(node), H200)
    waits = [plan.machine_code(tile(2, early=e)).kernel.asm["ptx"].count("griddepcontrol.wait") for e in (None, True)]
    assert waits == [0, 1]


@pytest.mark.parametrize("how", [{"seed": 1}, {"seed": 2}, {"late": True}], ids=str)
def test_results_are_the_same_in_any_order(how):
    node = attention((1, 4, 4, 1, 100, 16, 16), F16)
    problem, sources, first = run(node, tile(5, tile_n=32))
    assert check(problem, expect(problem, sources), first) is None
    _, _, again = run(node, tile(5, tile_n=32), sources, **how)
    assert torch.equal(first[0], again[0])


def test_counters_are_zero_again_for_the_next_call():
    problem = problem_of(attention((2, 4, 2, 1, 64, 16, 16), F16))
    plan = plan_for(CANDIDATE, problem, H200)
    with emulating(How()):
        call = plan.build(tile(4)).prepare({})
        for _ in range(2):
            sources = random_sources(problem)
            assert check(problem, expect(problem, sources), call(sources)) is None


def test_all_threads_have_left_their_part_before_it_is_counted():
    plan = plan_for(CANDIDATE, problem_of(attention((1, 4, 4, 1, 100, 16, 16), F16)), H200)
    before, _ = plan.machine_code(tile(2, tile_n=32)).kernel.asm["ptx"].split("atom.global.gpu.acq_rel.add.u32")
    assert before.rindex("bar.sync") > before.rindex("st.global")


# -- sizes


def decoding(batch=1, heads=32, group=4, queries=1, keys=4096, depth=128, dtype=BF16, **more):
    return problem_of(attention((batch, heads, group, queries, keys, depth, depth), dtype, **more))


@pytest.mark.parametrize(
    ("problem", "programs"),
    [(decoding(), 128), (decoding(keys=32768), 128), (decoding(4), 128), (decoding(9), 216), (decoding(queries=4), 128)],
    ids=["one", "long", "batch of 4", "batch of 9", "drafts"],
)
def test_parts_fill_the_machine_once_and_come_first(problem, programs):
    """Nine times eight heads would leave half of it idle, two of them on an SM do not."""
    plan = plan_for(CANDIDATE, problem, H200)
    first = next(iter(plan.schedules()))
    heads, point = problem.operands[1].shape[0] * problem.operands[1].shape[1], first.point(TileConfig)
    assert heads * point.split_kv == programs
    assert isinstance(plan, Leading) and plan.leading() == first


def test_where_a_program_for_each_head_fills_the_machine_the_kernel_made_for_many_queries_leads():
    plan = plan_for(CANDIDATE, decoding(16), H200)
    assert next(iter(plan.schedules())).point(TileConfig).split_kv == 1
    assert isinstance(plan, Leading) and plan.leading() is None


def test_programs_that_leave_room_on_an_sm_are_not_followed_early():
    """The next call's would lie two by two on some SMs."""
    for schedule in plan_for(CANDIDATE, decoding(), H200).schedules():
        point = schedule.point(TileConfig)
        room = (227 << 10) // shared_bytes(plan_for(CANDIDATE, decoding(), H200).heads, 16, point.tile_n, point.num_stages)
        assert point.launch_early is (True if 8 * (point.split_kv + 1) > 132 * min(room, 3) or room == 1 else None)


@pytest.mark.parametrize("given", [decoding(), problem_of(paged(blocks=300, picked=256))], ids=["whole", "paged"])
def test_shared_memory_is_what_triton_takes(given):
    plan = plan_for(CANDIDATE, given, H200)
    for point in {(p.tile_n, p.num_stages): p for p in (s.point(TileConfig) for s in plan.schedules())}.values():
        taken = needs(plan.machine_code(Schedule.of_point(point)).kernel).shared_bytes
        foreseen = shared_bytes(plan.heads, point.tile_m, point.tile_n, point.num_stages)
        assert taken <= foreseen <= taken + (12 << 10), point


@pytest.mark.parametrize(
    "problem",
    [decoding(batch=64), decoding(keys=200), decoding(queries=512), flash(), flash(extents=(1, 12, 384, 384))],
    ids=["many heads", "few keys", "many queries", "prefill", "prefill of one"],
)
def test_what_fills_the_machine_anyway_is_left_whole(problem):
    plan = plan_for(CANDIDATE, problem, H200)
    assert not any("split_kv" in dict(s.knobs) for s in plan.schedules())
    assert isinstance(plan, Leading) and plan.leading() is None


def test_keys_come_by_asynchronous_copies_once_for_all_queries_that_share_them():
    plan = plan_for(CANDIDATE, decoding(keys=32768), H200)
    first = next(iter(plan.schedules()))
    kernel = plan.machine_code(first).kernel
    code, found = assembly(kernel), needs(kernel)
    assert found.spills == 0 and found.shared_bytes <= 227 << 10 and found.registers <= 168
    assert "LDGSTS.E.BYPASS.128" in code and "HMMA.16816.F32.BF16" in code
    assert Arch("cuda", 90, 32) == plan.arch


def test_nothing_is_waited_for_before_the_first_tiles_are_asked_for_nor_before_all_parts_are():
    """Queries come with the keys; sums of all parts are asked for before the first of their maxima is there."""
    plan = plan_for(CANDIDATE, decoding(), H200)
    first = next(iter(plan.schedules()))
    machine_code = assembly(plan.machine_code(first).kernel)
    copies, rest = machine_code.split("LDGSTS", 1)
    assert "LDG." not in copies and rest.index("DEPBAR.LE") > rest.rindex("LDGSTS", 0, rest.index("HMMA"))
    combination = machine_code.split("ATOMG", 1)[1]
    loads, exponentials = combination.split("MUFU.EX2", 1)
    assert loads.count("LDG.E.128") == int(first["split_kv"]) == 16 and "LDG" not in exponentials
    assert "SHFL" not in combination.split("EXIT", 1)[1] and "STS" not in combination.split("EXIT", 1)[1]
