"""Products in pieces that overlap with copies between ranks: ranks in one address space, launches and copies in turns."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from ptx import H200

from tilewright.errors import UnsupportedError
from tilewright.schedule.candidate import Schedule, concerns, discover, plan_for, refusal

pytest.importorskip("triton")

from between_ranks import between, found_wrong, late, results, right

from tilewright.candidates import chunked
from tilewright.candidates.triton.runtime import copies, cubin

PREFERRED = ("hopper", "triton", "triton_norm")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces of few rows, too."""
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 1)
    monkeypatch.setattr(chunked, "FEWEST_OF_PIECE", 1)


def made(line, ranks, op, then="", **point):
    """A plan, how many ranks, and a point with the first point of each piece's first candidate that is generated."""
    plan = chunked.plan(between(line, ranks, op, then), H200)
    chosen = []
    for piece in plan.pieces():
        able = {c.name: c for c in discover(kind="cuda") if concerns(c, piece, H200) and not refusal(c, piece, H200)}
        name = next(n for n in PREFERRED if n in able)
        chosen.append((name, next(iter(plan_for(able[name], piece, H200).schedules()))))
    return plan, ranks, plan.of_pieces(Schedule.of(via="push", **point), chosen)


PLAIN = "bf16[16,64] @ bf16[32,64]^T -> bf16"
FP8 = "f8e4m3fn[16,128] scale=channel @ f8e4m3fn[48,128]^T scale=channel -> bf16"


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    ("line", "ranks", "op", "then", "chunks"),
    [
        (PLAIN, 2, "gather", "", 1),
        (PLAIN, 4, "gather", "", 2),
        (FP8, 2, "gather", "", 2),
        (PLAIN, 2, "scatter", "", 1),
        ("bf16[32,64] @ bf16[32,64]^T -> bf16", 4, "scatter", "norm", 2),
        (PLAIN, 2, "reduce", "", 2),
        ("bf16[32,64] @ bf16[32,64]^T -> bf16", 2, "reduce", "norm", 4),
        (FP8, 4, "reduce", "add", 2),
    ],
)
def test_pieces_together_are_the_whole(line, ranks, op, then, chunks):
    """Rows of one rank after another, several calls, launches and copies in turns drawn by lot."""
    right(*made(line, ranks, op, then, chunks=chunks), calls=3, seed=len(then))


def planted(monkeypatch, name, old, new):
    text = getattr(copies, name)
    assert old in text
    monkeypatch.setattr(copies, name, text.replace(old, new))


CASES = [("gather", 2, 2), ("scatter", 2, 1), ("reduce", 2, 2), ("reduce", 4, 2)]
cases = pytest.mark.parametrize(("op", "ranks", "chunks"), CASES)


@pytest.mark.thin(4)
@cases
def test_what_does_not_wait_is_found(op, ranks, chunks, monkeypatch):
    planted(monkeypatch, "WAIT", "@q ld.acquire.sys.global.b32 f, [a];", "")
    assert found_wrong(*made(PLAIN, ranks, op, chunks=chunks), calls=2)


@pytest.mark.thin(4)
@cases
def test_a_flag_before_its_data_is_found(op, ranks, chunks, monkeypatch):
    send, tell, held = copies.Copies.send, copies.Copies.tell, []
    monkeypatch.setattr(copies.Copies, "send", lambda *given: held.append(given))

    def early(self, rank, flag):
        tell(self, rank, flag)
        while held:
            send(*held.pop())

    monkeypatch.setattr(copies.Copies, "tell", early)
    assert found_wrong(*made(PLAIN, ranks, op, chunks=chunks), calls=2)


@pytest.mark.conformance
def test_flags_on_another_stream_than_their_data_are_found(monkeypatch):
    tell = copies.Copies.tell

    def elsewhere(self, rank, flag):
        lane, self.lane = self.lane, copies.lane("cpu")
        self.lane.follow()
        tell(self, rank, flag)
        self.lane = lane

    monkeypatch.setattr(copies.Copies, "tell", elsewhere)
    assert found_wrong(*made(PLAIN, 2, "gather", chunks=2), calls=2)


@pytest.mark.conformance
def test_memory_that_is_written_while_another_rank_reads_it_is_found(monkeypatch):
    """Calls of one channel, as of a graph that is replayed: then the free flags alone keep a rank from it."""
    monkeypatch.setattr(copies, "CHANNELS", 1)
    given = made(PLAIN, 2, "scatter", chunks=1)
    right(*given, calls=4, seed=3)
    waits = copies.Copies._waits
    never = lambda self, place, count, stride, more, *rest: waits(self, place, count, stride, more or -9, *rest)  # noqa: E731
    monkeypatch.setattr(copies.Copies, "_waits", never)
    assert found_wrong(*given, calls=4, most=40)


@pytest.mark.conformance
def test_a_call_that_is_not_counted_is_found(monkeypatch):
    end = copies._end
    monkeypatch.setattr(copies, "_end", lambda ranks: end(ranks).replace(f"@q st.global.b32 [$1+{copies.EPOCH}], v;", ""))
    assert found_wrong(*made(PLAIN, 2, "gather", chunks=1), calls=5)


def test_a_rank_that_does_not_come_is_named_to_the_host(monkeypatch):
    tell = copies.Copies.tell
    monkeypatch.setattr(copies.Copies, "tell", lambda self, *given: tell(self, *given) if self.own == 0 else None)
    results(*made(PLAIN, 2, "gather", chunks=1), seed=1, limit_s=50e-6)
    assert late[-1] == [2, 0]  # the first rank waited for the second one, and not the other way round
    results(*made(PLAIN, 2, "gather", chunks=1), seed=1, limit_s=0)  # as behind a wait in vain: others are not to blame
    assert late[-1] == [0, 0]


@pytest.mark.parametrize(
    ("line", "ranks", "op", "why"),
    [
        (PLAIN, 17, "reduce", "17 ranks: up to 16"),
        ("bf16[6,64] @ bf16[32,64]^T -> bf16", 4, "reduce", "6 rows are not divided among 4 ranks"),
        ("s8[16,64] @ s8[32,64]^T -> s32", 2, "reduce", "add of s32: sums of f32, bf16 or f16"),
    ],
)
def test_what_is_not_cut_is_refused_with_a_sentence(line, ranks, op, why):
    assert why in refusal(chunked.CANDIDATE, between(line, ranks, op), H200)


def test_few_rows_are_left_to_others(monkeypatch):
    monkeypatch.undo()
    assert "16 rows: of fewer than 256" in refusal(chunked.CANDIDATE, between(PLAIN, 2, "gather"), H200)


def test_machine_code_waits_for_the_system_and_has_no_multicast():
    wait, end = (built.kernel.asm["ptx"] for built in copies.Sizes(4, 1 << 20).machine_code(H200))
    assert "ld.acquire.sys.global" in wait and end.count("st.release.sys.global") == 4
    assert "multimem" not in wait + end


def test_a_lane_copies_by_the_driver_and_says_what_that_refuses(monkeypatch):
    asked, status = [], [0]
    kinds = ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    copy = ctypes.CFUNCTYPE(*kinds)(lambda *given: (asked.append(given), status[0])[1])
    stream = SimpleNamespace(cuda_stream=7, wait_event=lambda e: asked.append(("wait", e)))
    event = SimpleNamespace(record=lambda s: asked.append(("record", s)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(copies, "driver", lambda: None)
    monkeypatch.setattr(ctypes, "CFUNCTYPE", lambda *kinds: lambda named: copy)
    lane = copies.Lane("cuda:0")
    lane.follow()
    lane.copy(1 << 40, 2 << 40, 3 << 32)
    lane.join()
    assert asked == [("record", stream), ("wait", event), (1 << 40, 2 << 40, 3 << 32, 7), ("record", stream), ("wait", event)]
    status[0] = 1
    monkeypatch.setattr(cubin, "driver", lambda: SimpleNamespace(cuGetErrorName=lambda *_: 0))
    with pytest.raises(UnsupportedError, match="the CUDA driver cannot copy between ranks: error 1"):
        lane.copy(1, 2, 3)
