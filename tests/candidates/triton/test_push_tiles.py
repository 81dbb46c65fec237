"""Products whose epilogue stores tiles into the memory of the ranks that own their rows: ranks in one address space, launches
in turns."""

import dataclasses
import re
import weakref
from itertools import product

import pytest
import torch
from between_ranks import found_wrong as some_order_is_wrong
from between_ranks import late, results, right, summed
from ptx import H200, emulating
from ptx.machine import MOST_STEPS, How

from tilewright.lowering.pieces import chosen_of, joined

pytest.importorskip("triton")

from tilewright.candidates.triton.expressions import chunks as chunks_module
from tilewright.candidates.triton.expressions import exchange
from tilewright.candidates.triton.expressions.chunks import Chunks
from tilewright.candidates.triton.hopper.gemm import epilogue
from tilewright.candidates.triton.hopper.gemm.plan import Matrix
from tilewright.candidates.triton.hopper.gemm.run import compiled
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.push_rows.virtual import VirtualRanks
from tilewright.candidates.triton.push_tiles import timeline
from tilewright.candidates.triton.push_tiles.candidate import CANDIDATE, Way
from tilewright.candidates.triton.push_tiles.sums import Adders
from tilewright.candidates.triton.push_tiles.timeline import expected_us
from tilewright.candidates.triton.runtime import launch
from tilewright.candidates.triton.runtime.module import assembly, needs
from tilewright.dtype import BF16 as BF16_TYPE
from tilewright.hardware.target import PeerLink
from tilewright.ir.mesh import Mesh, in_team
from tilewright.schedule.candidate import Schedule, plan_for, refusal
from tilewright.schedule.sample import random_sources

LIMIT_S = 4e-4  # to wait for a rank: of the machine, whose clock counts steps

TURNS = (1, 20)  # rounds of a rank, one of which may come to be a call ahead
FEW = dataclasses.replace(H200, cores=2)
BF16 = "bf16[128,64] @ bf16[128,64]^T -> bf16"
FORMS = {"scattered": (True, 0), "two shots": (False, 2), "one shot": (False, 0)}  # whether rows are shared out; adders


def point(problem, chunks=2, blocks=2, adders=2, paced=False, **knobs):
    """A small tile, with the first kernel behind."""
    plan, way = plan_for(CANDIDATE, problem, FEW), Way(chunks, 0, adders, paced)
    form = plan.form(way)
    tile = TileConfig(64, 64, form.gemm.tile_k, 3, 16, False, False, False, False, blocks, 0)
    own = Schedule.of_point(dataclasses.replace(tile, **knobs), **vars(way))
    return joined(Schedule(), [("hopper", own), (form.tail.name, next(iter(form.tail.plan.schedules())))])


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("line", "ranks", "how", "knobs"),
    [
        ("bf16[192,64] @ bf16[72,64]^T -> bf16", 2, {"scatter": True, "then": ""}, {}),
        ("bf16[256,64] @ bf16[64,64]^T -> bf16", 4, {"scatter": True, "then": "add"}, {"blocks": 1}),
        ("bf16[256,64] @ bf16[64,64]^T -> bf16", 2, {}, {}),
        ("f16[96,64] @ f16[64,64]^T -> f16", 3, {"then": "add"}, {}),
        ("bf16[192,64] @ bf16[72,64]^T -> f32", 2, {"then": ""}, {"chunks": 1}),
        ("bf16[128,128] @ s4[64,128]^T group=64 -> bf16", 2, {"then": "add"}, {}),
        ("bf16[64,192]^T @ bf16[72,64]^T -> bf16", 2, {"scatter": True}, {}),
        ("f8e4m3fn[192,128] scale=channel @ f8e4m3fn[48,128]^T scale=channel -> bf16", 2, {}, {}),
        ("f8e4m3fn[160,128] scale=channel @ f8e4m3fn[48,128]^T scale=channel -> bf16", 2, {"scatter": True}, {"tile_m": 128}),
        ("bf16[128,64] @ bf16[72,64]^T -> f32", 4, {"then": "add"}, {"adders": 0}),
        ("bf16[129,128] @ s4[64,128]^T group=64 -> bf16", 3, {"then": ""}, {"adders": 0}),
        ("f8e4m3fn[128,128] scale=channel @ f8e4m3fn[48,128]^T scale=channel -> bf16", 2, {}, {"adders": 0, "tile_m": 128}),
        ("bf16[128,64] @ bf16[64,64]^T -> bf16", 2, {}, {"adders": 0}),
    ],
)
def test_sums_over_ranks_and_what_follows(line, ranks, how, knobs):
    """Rows that all ranks get or each its own, in the types of programs, several calls in turns drawn by lot."""
    p = summed(line, ranks, **how)
    right(plan_for(CANDIDATE, p, FEW), ranks, point(p, **knobs), calls=2, seed=len(line))


@pytest.mark.thin(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("k", "knobs"),
    [
        (128, {"pingpong": True}),
        (128, {"tile_m": 128, "tile_n": 128, "deferred_store": True}),
        (320, {"tile_m": 128, "tile_n": 128, "deferred_store": True, "paced": True}),
    ],
)
def test_tiles_that_are_stored_while_others_are_multiplied(form, k, knobs):
    """Two warpgroups in turns, and results that wait in registers, and leave behind the next tile's first steps or spread over
    all five; what is under way ends as late as it may."""
    scatter, adders = FORMS[form]
    p = summed(f"bf16[192,{k}] @ bf16[256,{k}]^T -> bf16", 2, scatter=scatter, then="")
    right(plan_for(CANDIDATE, p, FEW), 2, point(p, blocks=1, adders=adders, **knobs), seed=1, late=True)


@pytest.mark.conformance
@pytest.mark.parametrize("scatter", [True, False])
def test_kernels_behind_begin_while_the_product_is_at_work(scatter):
    p = summed("bf16[256,64] @ bf16[64,64]^T -> bf16", 2, scatter=scatter)
    right(plan_for(CANDIDATE, p, FEW), 2, point(p), calls=2, seed=2, turns=TURNS, early=True)


@pytest.mark.conformance
@pytest.mark.parametrize("adders", [2, 0])
def test_all_ranks_get_the_same_bits(adders):
    p = summed("bf16[192,64] @ bf16[64,64]^T -> bf16", 3, then="")
    found = results(plan_for(CANDIDATE, p, FEW), 3, point(p, adders=adders), calls=2, seed=5)
    for call in range(2):
        assert all(torch.equal(found[0][call][1][0], found[r][call][1][0]) for r in (1, 2))


def test_a_copy_that_the_product_reads_lives_until_results_have_their_memory(monkeypatch):
    """The kernel behind writes them while the product is at work: they must not lie where the copy did."""
    p = summed("bf16[128,60] @ bf16[64,60]^T -> bf16", 2, scatter=True, then="")  # rows of 120 bytes are no rows for TMA
    plan, given = plan_for(CANDIDATE, p, FEW), random_sources(p, seed=1)
    assert plan.owned.gemm.lhs.source is None
    copied, maker, made, lives = Matrix.copied, launch.maker, [], []

    def watched(self, sources):
        room = copied(self, sources)
        made.append(weakref.ref(room))
        return room

    def watching(types, device):
        make = maker(types, device)

        def results():
            lives.append([room() is not None for room in made] if types else None)
            return make()

        return results

    monkeypatch.setattr(Matrix, "copied", watched)
    monkeypatch.setattr(launch, "maker", watching)
    with emulating(How()) as driver, in_team(VirtualRanks(Mesh.parse("tp=2"), "cpu", LIMIT_S).member(0)):
        driver.queue = []
        run = plan.build(point(p)).prepare({i: given[i] for i, w in enumerate(p.weights) if w})
        made.clear()
        run(given)
    assert lives == [None, [True]]
    assert not any(room() is not None for room in made)


def found_wrong(calls=2, most=8, form="scattered", line=BF16, turns=TURNS, **how):
    """Tell whether some order of ranks shows that results are wrong, or that one waits for ever."""
    scatter, adders = FORMS[form]
    p = summed(line, 2, scatter=scatter, then="")
    plan, at = plan_for(CANDIDATE, p, FEW), point(p, blocks=1, adders=adders)
    return some_order_is_wrong(plan, 2, at, calls, most, MOST_STEPS, limit_s=LIMIT_S, turns=turns, **how)


def test_problems_that_share_memory_have_the_same_slots():
    """A rank may be a call ahead, in another problem's product: what it stores must not lie in the slot before."""

    def slot(c, epoch):
        rooms = (c.tiles, c.ranks * c.part_room), (c.sums, c.sums_room)
        return [(first + epoch * room, first + (epoch + 1) * room) for first, room in rooms if room]

    shapes = [(rows, columns) for rows in (33, 64, 256, 1000, 4096) for columns in (64, 1000, 1024, 8192)]
    for ranks in (2, 3, 4, 8, 16):
        sharing = {}
        for (rows, columns), spread in product(shapes, (False, True)):  # in one shot they lie as scattered
            c = Chunks(ranks, rows, columns, BF16_TYPE, 64, spread)
            sharing.setdefault(c.bytes, []).append(c)
        assert any(len(several) > 1 for several in sharing.values())
        for several in sharing.values():
            for a, b in product(several, several):
                assert not any(max(x, z) < min(y, w) for x, y in slot(a, 0) for z, w in slot(b, 1)), (a, b)


def planted(monkeypatch, module, name, old, new):
    made = getattr(module, name)

    def other(*given):
        text = made(*given)
        whole = text if isinstance(text, str) else "\n".join(text)
        if old not in whole:
            raise RuntimeError(f"{old} is not in {whole}")  # which nobody takes for a fault that was found
        return whole.replace(old, new) if isinstance(text, str) else whole.replace(old, new).split("\n")

    monkeypatch.setattr(module, name, other)


def changed(old, new):
    """A change of the product's machine code alone."""

    def change(ptx):
        if "wgmma" not in ptx:
            return ptx
        found, times = re.subn(old, new, ptx)
        if not times:
            raise RuntimeError(f"{old} is not in the machine code")
        return found

    return change


@pytest.mark.thin(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_that_does_not_wait_is_found(monkeypatch, form):
    planted(monkeypatch, chunks_module, "_wait", "sub.s32 f, f, v;", "mov.b32 f, 0;")
    assert found_wrong(form=form)


@pytest.mark.conformance
def test_a_flag_set_behind_the_first_tile_is_found():
    wide = "bf16[128,64] @ bf16[256,64]^T -> bf16"  # four tiles in a chunk
    assert found_wrong(calls=1, line=wide, change=changed(r"setp.eq.u32 q, c, %r\d+;", "setp.eq.u32 q, c, 0;"))


@pytest.mark.parametrize(
    ("form", "turns"), [("scattered", TURNS), pytest.param("one shot", (1, 200), marks=pytest.mark.conformance)]
)
def test_a_flag_set_before_the_tile_is_in_memory_is_found(form, turns):
    assert found_wrong(change=changed(r"cp.async.bulk.wait_group 0;", ""), late=True, form=form, turns=turns)


@pytest.mark.conformance
def test_a_flag_that_is_never_set_is_found():
    assert found_wrong(calls=1, most=1, change=changed(r"@q st.relaxed.sys.global.b32 \[a\], e;", ""))


@pytest.mark.conformance
@pytest.mark.parametrize("form", ["scattered", "one shot"])
def test_a_flag_with_another_rank_than_the_owner_is_found(monkeypatch, form):
    planted(monkeypatch, epilogue, "_choice", "to0", "to1")
    assert found_wrong(calls=1, most=1, form=form)


@pytest.mark.conformance
@pytest.mark.parametrize("form", ["scattered", "one shot"])
def test_a_tile_with_another_rank_than_the_owner_is_found(monkeypatch, form):
    sent, turned = chunks_module.Chunks.sent, slice(None, None, -1) if form == "scattered" else slice(0, 1)
    monkeypatch.setattr(chunks_module.Chunks, "sent", lambda self, memory: (sent(self, memory)[turned] * 2)[:2])
    assert found_wrong(calls=1, most=1, form=form)


@pytest.mark.conformance
@pytest.mark.parametrize("form", ["scattered", "one shot"])
def test_one_slot_for_all_calls_is_found(monkeypatch, form):
    """A rank that is ahead writes where one that is behind still reads."""
    monkeypatch.setattr(chunks_module.Chunks, "slot", lambda self, room: 0)
    assert found_wrong(calls=3, most=16, form=form)


def test_a_call_that_is_not_counted_is_found(monkeypatch):
    planted(monkeypatch, exchange, "_end", "add.s32 t, $1, 1;", "mov.b32 t, $1;")
    assert found_wrong()


@pytest.mark.conformance
def test_sums_told_behind_the_first_part_are_found(monkeypatch):
    planted(monkeypatch, chunks_module, "_arrival", "setp.eq.u32 q, c, 2;", "setp.eq.u32 q, c, 0;")
    line = "bf16[128,64] @ bf16[192,64]^T -> bf16"  # three parts
    assert found_wrong(calls=1, form="two shots", line=line)


@pytest.mark.conformance
@pytest.mark.parametrize("form", FORMS)
def test_what_keeps_to_the_protocol_passes_the_same_orders(form):
    assert not found_wrong(calls=3, most=3, form=form)


def test_a_rank_that_does_not_come_is_named_to_the_host():
    """The wait ends by itself, that of no other program takes as long, and the host finds which rank it was."""
    p = summed(BF16, 2, scatter=True, then="")
    never = changed(r"@q st.relaxed.sys.global.b32 \[a\], e;", "")
    results(plan_for(CANDIDATE, p, FEW), 2, point(p), seed=1, limit_s=50e-6, change=never)
    assert all(rank in (1, 2) for rank in late[-1])
    results(plan_for(CANDIDATE, p, FEW), 2, point(p), seed=1, limit_s=0, change=never)  # as behind a wait in vain
    assert late[-1] == [0, 0]


@pytest.mark.parametrize(
    ("line", "ranks", "scatter", "why"),
    [
        ("bf16[64,96] @ bf16[32,96]^T -> bf16", 2, True, "64 rows for 2 ranks: 65 and more"),
        ("bf16[129,96] @ bf16[32,96]^T -> bf16", 2, False, "129 rows for 2 ranks: 65 and more, shared out evenly"),
        ("bf16[128,96] @ bf16[33,96]^T -> bf16", 2, False, "rows of 33 columns do not lie one after the other"),
        ("s8[128,96] @ s8[32,96]^T -> s32", 2, False, "add of s32: sums of f32, bf16 or f16"),
        ("bf16[2,64,96] @ bf16[2,96,32] -> bf16", 2, False, "several matrices, scales by blocks"),
    ],
)
def test_what_is_not_stored_by_tiles_is_refused_with_a_sentence(line, ranks, scatter, why):
    assert why in refusal(CANDIDATE, summed(line, ranks, scatter=scatter, then=""), H200)


@pytest.mark.thin(2)
@pytest.mark.parametrize("form", FORMS)
def test_machine_code_has_flags_for_the_system_and_no_multicast(form):
    """The first point of a layer of Llama's on two ranks; nothing spills."""
    scatter, adders = FORMS[form]
    plan = plan_for(CANDIDATE, summed("bf16[512,4096] @ bf16[8192,4096]^T -> bf16", 2, scatter=scatter, then="add"), H200)
    points = [chosen_of(s)[0][1] for s in plan.schedules()]
    own = next(p for p in points if bool(p["adders"]) == bool(adders))
    product = compiled(plan.spec(own.point(TileConfig), own.point(Way))).kernel
    ptx = product.asm["ptx"]
    assert "atom.acq_rel.sys" in ptx and "fence.acq_rel.sys" in ptx and "multimem" not in ptx
    assert re.search(r"cp\.async\.bulk\.wait_group \s*0;", ptx)
    assert needs(product).spills == 0
    assert ".SYS" in assembly(product)
    if adders:
        between = Adders(plan.chunks(own.point(TileConfig), own.point(Way)), adders, H200).build().kernel
        assert "ld.acquire.sys" in between.asm["ptx"] and "multimem" not in between.asm["ptx"]
        assert needs(between).spills == 0


def test_all_rows_go_to_all_ranks_where_few_more_bytes_travel_so():
    """Two ranks send each other all that they have either way."""

    def shots(line, ranks):
        plan = plan_for(CANDIDATE, summed(line, ranks, then=""), H200)
        return {1 if not chosen_of(s)[0][1]["adders"] else 2 for s in plan.schedules()}

    assert shots("bf16[4096,4096] @ bf16[8192,4096]^T -> bf16", 2) == {1, 2}
    assert shots("bf16[128,2048] @ bf16[8192,2048]^T -> bf16", 4) == {1, 2}
    assert shots("bf16[512,2048] @ bf16[8192,2048]^T -> bf16", 4) == {2}


def expected(rows, scatter, tile, way, ranks=2):
    """The time expected of a layer of Llama's in bf16 by a tile and a way."""
    k = 8192 // ranks
    plan = plan_for(CANDIDATE, summed(f"bf16[{rows},{k}] @ bf16[8192,{k}]^T -> bf16", ranks, scatter=scatter, then=""), H200)
    found = next(t for t in plan._tiles(plan.form(way).gemm, way.spare) if (t.tile_m, t.tile_n) == tile)
    return expected_us(plan.spec(found, way), way.adders)


@pytest.mark.parametrize(
    ("rows", "scatter", "way", "measured"),
    [
        (512, True, Way(2, 0, 0), 67),
        (512, False, Way(4, 0, 132), 87),
        (4096, True, Way(4, 0, 0), 440),
        (4096, False, Way(4, 16, 192), 490),
    ],
)
def test_what_was_measured_on_two_gpus_is_about_what_is_expected(rows, scatter, way, measured):
    assert 0.85 * measured < expected(rows, scatter, (128, 256), way) < 1.05 * measured


def test_a_timeline_worked_out_by_hand(monkeypatch):
    """Two rounds of tiles, the first one's chunk with the others while the second is multiplied. 4 µs until the kernel begins,
    10 µs a round, a link of a byte a nanosecond, no memory: times are those of the product and the link alone."""
    p = summed("bf16[256,64] @ bf16[64,64]^T -> bf16", 2, then="")
    plan, at = plan_for(CANDIDATE, p, FEW), chosen_of(point(p, adders=0))[0][1]
    chip = dataclasses.replace(FEW.chip, links=(PeerLink("a link", 1.25, "nobody"),))
    gemm = dataclasses.replace(plan.form(at.point(Way)).gemm, target=dataclasses.replace(FEW, chip=chip))
    spec = dataclasses.replace(plan.spec(at.point(TileConfig), at.point(Way)), plan=gemm)
    monkeypatch.setattr(timeline, "predict_us", lambda work, target: 24.0)
    monkeypatch.setattr(timeline, "memory_us", lambda size, target: 1e-9 * size)
    # A chunk of two tiles has 16,384 bytes, 16.384 µs of the link. The first is there 16.384 µs behind the first round, the
    # second as long behind that.
    assert timeline.expected_us(spec, 0) == pytest.approx(14 + 2 * 16.384 + 2, abs=0.01)


def test_points_are_those_that_are_expected_to_take_least():
    """The first one takes least; without pacing it is offered, too, and so are two shots."""
    plan = plan_for(CANDIDATE, summed("bf16[4096,4096] @ bf16[8192,4096]^T -> bf16", 2, then=""), H200)
    took = [timeline.expected_us(plan.spec(tile, way), way.adders) for tile, way in plan.points]
    (tile, way), ways = plan.points[0], [way for _, way in plan.points]
    assert took[0] == min(took) and len(plan.points) == len({*plan.points}) == len(plan.schedules()) == 8
    assert way.paced and (tile, dataclasses.replace(way, paced=False)) in plan.points[:4]
    assert {bool(w.adders) for w in ways[:3]} == {True, False}
    assert all(t.blocks == H200.cores - w.spare for t, w in plan.points)
