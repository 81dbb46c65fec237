"""The Hopper gemm whose rows come from other ranks while it runs: ranks in one address space, launches and copies in turns."""

from dataclasses import replace

import pytest
from ptx import H200

from tilewright.schedule.candidate import Schedule, refusal

pytest.importorskip("triton")

from between_ranks import between, found_wrong, late, results, right

from tilewright.candidates.triton.hopper.gathered import _operand as operand
from tilewright.candidates.triton.hopper.gathered import candidate, protocol, spec, timeline
from tilewright.candidates.triton.hopper.gemm.run import compiled
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.runtime import copies
from tilewright.candidates.triton.runtime._gluon import statement
from tilewright.candidates.triton.runtime.module import assembly, needs


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few rows, and pieces of them, too."""
    monkeypatch.setattr(candidate, "FEWEST_ROWS", 1)
    monkeypatch.setattr(candidate, "PIECE_BYTES", 1)


SMALLEST = TileConfig(64, 64, 64, 3, 1, False, False, False, False, 2, 0)
PLAIN = "bf16[128,128] @ bf16[128,128]^T -> bf16"
LARGER = "bf16[512,128] @ bf16[160,128]^T + bias, relu -> bf16"
FP8 = "f8e4m3fn[128,128] scale=channel @ f8e4m3fn[128,128]^T scale=channel -> bf16"


def made(line=PLAIN, ranks=2, pieces=1, **changed):
    """A plan, how many ranks, and a point of small tiles, of blocks that stay for several."""
    plan = candidate.plan(between(line, ranks, "gather"), H200)
    tile = replace(SMALLEST, tile_k=plan.product.gemm.tile_k, **changed)
    tile = spec.fitting(tile, plan.rows, H200.cores)
    assert tile is not None
    bits = {"acc_bits": 14} if plan.product.short_sums else {}
    return plan, ranks, Schedule.of_point(tile, pieces=pieces, **bits)


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    ("line", "ranks", "pieces", "changed"),
    [
        (PLAIN, 2, 1, {}),
        (PLAIN, 2, 4, {}),
        ("bf16[256,64] @ bf16[64,64]^T -> f32", 4, 2, {}),
        (FP8, 2, 2, {}),
        (LARGER, 2, 2, {"tile_m": 128, "tile_n": 64, "multicast": True}),
        (LARGER, 2, 4, {"tile_m": 128, "tile_n": 128, "pingpong": True}),
        (PLAIN, 2, 1, {"stream_k": 2}),
        ("bf16[192,64] @ bf16[72,64]^T -> bf16", 3, 1, {}),
    ],
)
def test_rows_that_come_are_multiplied_as_they_come(line, ranks, pieces, changed):
    right(*made(line, ranks, pieces, **changed), calls=3, seed=ranks)


def test_the_first_points_fit_and_give_right_results():
    plan = candidate.plan(between(LARGER, 2, "gather"), H200)
    points = plan.schedules()
    assert all(plan.offers(s) for s in points) and 1 in {s["pieces"] for s in points} <= {1, 2, 4}
    assert all(plan.rows % s.point(TileConfig).tile_m == 0 and s.point(TileConfig).blocks < H200.cores for s in points)
    right(plan, 2, points[0], calls=1, seed=2)


def test_the_product_s_fastest_tile_is_tried_where_it_fits():
    plan = candidate.plan(between(LARGER, 2, "gather"), H200)
    first, second = (Schedule.of_point(tile, pieces=1) for tile in plan.tiles)
    assert {first, second} < {*plan.schedules()}
    fast = replace(plan.tiles[0], num_stages=2)
    took = plan.of_pieces(first, [("hopper", Schedule.of_point(fast))])
    assert took.point(TileConfig) == fast and plan.offers(took)
    full = plan.of_pieces(first, [("hopper", Schedule.of_point(replace(fast, blocks=H200.cores)))])
    assert full.point(TileConfig).blocks == H200.cores - 1  # a multiprocessor is left to others
    assert plan.of_pieces(second, [("hopper", Schedule.of_point(fast))]) == second
    assert plan.of_pieces(first, [("aten", Schedule.of(compute="bf16"))]) == first
    assert plan.of_pieces(first, [("hopper", Schedule.of_point(replace(fast, split_k=2)))]) == first


def test_tiles_of_which_blocks_do_own_ones_first_are_expected_to_hide_the_wait():
    """Half of 512 rows are another rank's: of tiles for one round of blocks half wait. The tile that takes least alone is
    offered, too, and first where its own rows last until the others are there."""
    plan = candidate.plan(between("bf16[512,8192] @ bf16[5120,8192]^T -> bf16", 2, "gather"), H200)
    gemm, sent, (small, pieces), plain = plan.product.gemm, plan.gathered.data_bytes // 2, plan.points[0], plan.tiles[0]
    assert (small.tile_m, small.tile_n, pieces) == (64, 160, 1) and (plain.tile_m, plain.tile_n) == (128, 160)
    took = {tile: timeline.expected_us(gemm, tile, 2, sent, 1) for tile in (small, plain)}
    assert took[small] < 0.95 * took[plain] and 80 < took[plain] < 90  # 84 were measured, and 101 in four pieces
    assert 95 < timeline.expected_us(gemm, plain, 2, sent, 4) < 105
    assert (plain, 1) in plan.points and len(plan.points) <= 12
    many = candidate.plan(between("bf16[4096,8192] @ bf16[5120,8192]^T -> bf16", 2, "gather"), H200)
    assert many.points[0] == (many.tiles[0], 1)


def test_a_tile_waits_for_the_piece_of_its_last_row(monkeypatch):
    """Two tiles of a rank, a piece of rows each, worked out by hand: one block, 1 µs a tile; then a block for each."""
    monkeypatch.setattr(timeline, "predict_us", lambda work, target: 4.0 + 4.0)  # of four tiles, behind the launch
    monkeypatch.setattr(timeline, "came_us", lambda *given: [10.0, 20.0])
    plan = candidate.plan(between("bf16[256,64] @ bf16[64,64]^T -> bf16", 2, "gather"), H200)
    tile = replace(SMALLEST, blocks=1)
    assert timeline.expected_us(plan.product.gemm, tile, 2, 1, 2) == 21.0  # 4 + 2 own, one from 10 on, one from 20 on
    assert timeline.expected_us(plan.product.gemm, replace(tile, blocks=4), 2, 1, 2) == 24.0  # each one tile of 4 µs


def planted(monkeypatch, old, new):
    """Another wait in the kernel."""
    assert old in protocol.WAIT
    text = protocol.WAIT.replace(old, new)
    monkeypatch.setattr(spec, "WAIT", text)  # by which Triton's cache tells it
    monkeypatch.setattr(operand, "wait_for", statement(text, "lllr"))


def test_a_kernel_that_does_not_wait_is_found(monkeypatch):
    planted(monkeypatch, "@q ld.acquire.sys.global.b32 f, [$1];", "")
    assert found_wrong(*made(), calls=2)


@pytest.mark.conformance
def test_a_kernel_that_reads_by_the_number_of_the_last_call_is_found(monkeypatch):
    planted(monkeypatch, "setp.ge.s32 w, f, 0;", "setp.ge.s32 w, f, -2;")
    assert found_wrong(*made(), calls=4)


@pytest.mark.conformance
def test_a_flag_before_its_data_is_found(monkeypatch):
    send, tell, held = copies.Copies.send, copies.Copies.tell, []
    monkeypatch.setattr(copies.Copies, "send", lambda *given: held.append(given))

    def early(self, rank, flag):
        tell(self, rank, flag)
        while held:
            send(*held.pop())

    monkeypatch.setattr(copies.Copies, "tell", early)
    assert found_wrong(*made(), calls=2)


@pytest.mark.conformance
def test_a_wait_for_the_first_piece_alone_is_found(monkeypatch):
    spec_of = candidate.Plan.spec

    def first_alone(self, schedule):
        found = spec_of(self, schedule)
        vars(found)["config"] = replace(found.config, piece_rows=1 << 20)
        return found

    monkeypatch.setattr(candidate.Plan, "spec", first_alone)
    assert found_wrong(*made(pieces=4), calls=2)


@pytest.mark.conformance
def test_memory_that_is_written_while_another_rank_reads_it_is_found(monkeypatch):
    """Calls of one channel, as of a graph that is replayed: then the free flags alone keep a rank from it."""
    monkeypatch.setattr(copies, "CHANNELS", 1)
    given = made()
    right(*given, calls=3, seed=3)
    waits = copies.Copies._waits
    never = lambda self, place, count, stride, more, *rest: waits(self, place, count, stride, more or -9, *rest)  # noqa: E731
    monkeypatch.setattr(copies.Copies, "_waits", never)
    assert found_wrong(*given, calls=3, most=30)


def test_a_rank_that_does_not_send_is_named_to_the_host_and_waited_for_once(monkeypatch):
    tell = copies.Copies.tell
    monkeypatch.setattr(copies.Copies, "tell", lambda self, *given: tell(self, *given) if self.own == 0 else None)
    results(*made(), seed=1, limit_s=50e-6)
    assert late[-1] == [2, 0]
    results(*made(), seed=1, limit_s=0)  # as behind a wait in vain: others are not to blame
    assert late[-1] == [0, 0]


@pytest.mark.parametrize(
    ("line", "ranks", "why"),
    [
        ("bf16[144,64] @ bf16[64,64]^T -> bf16", 2, "no tile has rows of one rank alone, of 72 rows"),
        ("bf16[128,60] @ bf16[60,64] -> bf16", 2, "TMA does not read the rows as they are gathered"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(line, ranks, why):
    assert why in refusal(candidate.CANDIDATE, between(line, ranks, "gather"), H200)


def test_few_rows_and_reductions_are_left_to_others(monkeypatch):
    monkeypatch.undo()
    assert "128 rows of 2 ranks: 256 or more" in refusal(candidate.CANDIDATE, between(PLAIN, 2, "gather"), H200)
    assert "nothing is gathered" in refusal(candidate.CANDIDATE, between(PLAIN, 2, "reduce"), H200)


@pytest.mark.parametrize("line", ["bf16[4096,8192] @ bf16[2560,8192]^T -> bf16"])
def test_machine_code_waits_for_the_system_fences_and_spills_next_to_nothing(line):
    plan = candidate.plan(between(line, 4, "gather"), H200)
    built = compiled(plan.spec(plan.schedules()[0]))
    ptx = built.kernel.asm["ptx"]
    wait = ptx.index("ld.acquire.sys.global")
    assert wait < ptx.index("bar.warp.sync 0xffffffff", wait) < ptx.index("fence.proxy.async;", wait)
    assert "multimem" not in ptx and needs(built.kernel).spills <= 16
    assert "LDG.E.STRONG.SYS" in assembly(built.kernel)
