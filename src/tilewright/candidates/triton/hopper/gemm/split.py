"""The text of a tile whose sums several blocks of a cluster have parts of: each has a share of K, sends every other one its
part of that one's columns, and finishes its own columns.

Sums are written where the ring was, which nobody needs any more once all are done, and copied from block to block in one piece.
Addresses stand in the text as names that `_hopper_ptx.split` replaces, for Gluon has none of shared memory.
"""

from __future__ import annotations

from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.gemm.form import Form
from tilewright.candidates.triton.hopper.gemm.stores import Pieces
from tilewright.candidates.triton.hopper.ptx import MARKED

MARKS = {"a_bufs": MARKED + 1, "b_bufs": MARKED + 2}  # arrivals of barriers that are none: they tell where the ring is
BARRIERS = ("done", "came")  # the cluster's warpgroups are done with what lies there; a warpgroup has got all parts
WRITE = "{ .reg .b32 here; mov.u32 here, RING; add.u32 here, here, $5; mov.u32 $0, 0; st.shared.v4.b32 [here], {$1,$2,$3,$4}; }"
READ = "{ .reg .b32 here; mov.u32 here, RING; add.u32 here, here, $4; ld.shared.v4.b32 {$0,$1,$2,$3}, [here]; }"
# By the thread whose number is 0: from where, to where, which barrier, in which block.
SEND = (
    "{ .reg .pred p; .reg .b32 from, there, full; setp.eq.u32 p, $1, 0; mov.u32 $0, 0; "
    "mov.u32 from, RING; add.u32 from, from, $2; mov.u32 there, RING; add.u32 there, there, $3; "
    "mov.u32 full, CAME; add.u32 full, full, $4; "
    "mapa.shared::cluster.u32 there, there, $5; mapa.shared::cluster.u32 full, full, $5; "
    "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [from], BYTES, [full]; }"
)


def mark(t: Text) -> None:
    """Says where the ring is."""
    for name, number in MARKS.items():
        at = f"{name}.index(0)._reinterpret(gl.int64, [1], mbarrier.MBarrierLayout())"
        t.do(f"mbarrier.init({at}, count={number})")


def room_bytes(tile: int, split: int) -> int:
    """Of the ring, what an exchange takes: a tile of so many sums, and what comes from the cluster's other blocks."""
    return 4 * tile * (2 * split - 1) // split


def begin(t: Text, f: Form) -> None:
    """How much comes from others."""
    t.do(f"LS: gl.constexpr = {f.fragment(f.own_n)}")
    t.do(f"mbarrier.expect(came.index(g), {_bytes(f) * (f.split - 1)})")


def exchange(t: Text, f: Form) -> None:
    """Sums r of a part of K, of all columns, become those of all of K, of the block's own columns: the same on every run.

    Of an element's row, bits 0 to 2 and 4 to 5 tell the thread; of its column, bits 1 to 2; the other bits tell which of the
    thread's registers it is (PTX ISA 9.0, 9.7.15.5.1): four go together, 16 bytes beside those of the next thread.
    """
    register, kind = ("r", "int32") if f.acc.is_integer else ("f", "float32")
    size = _bytes(f)
    t.do("mbarrier.arrive(done.index(0))")
    t.do(f"y = gl.arange(0, {f.rows}, gl.SliceLayout(1, LS))")
    t.do(f"x = gl.arange(0, {f.own_n}, gl.SliceLayout(0, LS))")
    t.do("lane = ((y & 7) * 4 + ((y >> 4) & 3) * 32)[:, None] + ((x >> 1) & 3)[None, :]")
    t.do("place = lane * 16 + (x >> 3)[None, :] * 2048")
    t.do(f"own = g * {size * f.split}")
    t.do(f"others = {f.groups * size * f.split} + g * {size * (f.split - 1)}")
    t.do("mbarrier.wait(done.index(0), 0)")
    pieces = Pieces(t, f.shape_n, widened=False)
    for to in range(f.split):
        part = pieces.take(to, f.own_n, "LS")
        _asm(t, "", WRITE, f"=r,{_four(register)},{_four('r')}", f"{part}, place + own + {to * size}", "int8", 4)
    t.do("fence_async_shared()")
    t.do("gl.thread_barrier()")
    t.do("i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))")
    for j in range(1, f.split):
        t.do(f"to = (rank + {j}) % {f.split}")
        there = f"others + {(f.split - j - 1) * size}"
        numbers = ", ".join(f"i * 0 + {n}" for n in (f"own + to * {size}", there, "g * 8", "to"))
        _asm(t, "", SEND.replace("BYTES", str(size)), "=r,r,r,r,r,r", f"i, {numbers}", "int32", 1)
    t.do("mbarrier.wait(came.index(g), 0)")
    t.do("mbarrier.arrive(done.index(0))")
    for source in range(f.split):
        came = f"others + ({source + f.split - 1} - rank) % {f.split} * {size}"
        t.do(f"at = gl.where(rank == {source}, own + {source * size}, {came})")
        operands = f"{_four(f'={register}')},{_four('r')}"
        _asm(t, "r = " if source == 0 else "r += ", READ, operands, "place + at", kind, 4)


def end(t: Text) -> None:
    """A block stays until all have got what it sent."""
    t.do("mbarrier.wait(done.index(0), 1)")


def _asm(t: Text, to: str, body: str, operands: str, arguments: str, kind: str, pack: int) -> None:
    t.do(f'{to}gl.inline_asm_elementwise("{body}", "{operands}", [{arguments}], dtype=gl.{kind}, is_pure=False, pack={pack})')


def _four(register: str) -> str:
    return ",".join([register] * 4)


def _bytes(f: Form) -> int:
    """Of one block's part of another's columns, a warpgroup's rows."""
    return f.rows * f.own_n * 4
