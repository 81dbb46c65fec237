"""Copies that TMA does, of boxes of arrays and of plain bytes, and stores that tell a barrier (PTX ISA 9.0, 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ptx import barriers
from ptx.flight import Work
from ptx.machine import Block, Unit
from ptx.memory import Fault, Region
from ptx.numbers import bits_of, u1
from ptx.text import Imm, Instruction, Mem, Unknown, Vec
from ptx.watch import PIECE

if TYPE_CHECKING:
    from ptx.decode import Program


@dataclass(frozen=True)
class TensorMap:
    """A tensor map as `cuTensorMapEncodeTiled` is told it.

    Attributes:
        address: of the first element.
        swizzle: bytes of a row of the pattern, 0 for none.
        size: bytes of an element.
        box, shape, strides: outer first; strides in elements.
    """

    address: int
    swizzle: int
    size: int
    box: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.address % 16 or any(s * self.size % 16 for s in self.strides[:-1]) or self.strides[-1] != 1:
            raise Fault(f"TMA does not take an array at {self.address:#x} with strides {self.strides}")
        if any(not 0 < b <= 256 for b in self.box) or self.box[-1] * self.size % 16:
            raise Fault(f"TMA does not take boxes of {self.box}")
        if self.swizzle and self.box[-1] * self.size > self.swizzle:
            raise Fault(f"rows of a box are longer than {self.swizzle} bytes")

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.size

    def elements(self, corner: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Bytes from the address to each element of a box, innermost last, and whether it exists. `corner`: innermost first."""
        at, inside = np.zeros((), np.int64), np.ones((), bool)
        for axis, first in enumerate(reversed(corner)):
            index = first + np.arange(self.box[axis])
            at = at[..., None] + index * self.strides[axis] * self.size
            inside = inside[..., None] & ((index >= 0) & (index < self.shape[axis]))
        return at.reshape(-1), inside.reshape(-1)

    def in_shared(self, address: int) -> np.ndarray:
        """The place in shared memory of each byte of a box."""
        if address % 128:
            raise Fault("TMA's boxes begin at multiples of 128 bytes")
        at = address + np.arange(self.box_bytes)
        if self.swizzle:
            rows = self.box[-1] * self.size
            if rows != self.swizzle:  # rows shorter than the pattern are as far apart as the pattern says
                raise Fault("rows of a box that are shorter than the pattern")
            at = at ^ ((at >> 7 & self.swizzle // 16 - 1) << 4)
        return at


def _bytes(region: Region, at: np.ndarray) -> np.ndarray:
    at = at - region.base
    if len(at) and (at.min() < 0 or at.max() >= region.size):
        raise Fault(f"a copy beyond {region.name}")
    return at


def map_of(u: Unit, address: int) -> TensorMap:
    found = u.block.cluster.machine.tensor_map(address)
    if not isinstance(found, TensorMap):
        raise Fault("no tensor map")
    return found


def box_in(u: Unit, m: TensorMap, corner: Sequence[int]) -> np.ndarray:
    """A box's bytes: zeros where the array has no element."""
    offsets, inside = m.elements(corner)
    got = np.zeros((len(offsets), m.size), u1)
    if inside.any():
        region = u.block.cluster.machine.memory.region(m.address)
        at = _bytes(region, (m.address + offsets[inside])[:, None] + np.arange(m.size))
        got[inside] = region.data[at]
    return got.reshape(-1)


def box_out(u: Unit, m: TensorMap, corner: Sequence[int], data: np.ndarray) -> None:
    offsets, inside = m.elements(corner)
    if not inside.any():
        return
    region = u.block.cluster.machine.memory.region(m.address)
    at = _bytes(region, (m.address + offsets[inside])[:, None] + np.arange(m.size))
    region.data[at] = data.reshape(-1, m.size)[inside]


def begin(u: Unit, block: Block, to: np.ndarray, data: Callable[[], np.ndarray], told: Block, barrier: int) -> None:
    """A copy to shared memory that tells a barrier when it has come."""
    found = told.mbarriers.get(barrier)
    if found is None:
        raise Fault("a copy tells no barrier")
    places = _bytes(block.shared, to)
    at = np.unique(places // PIECE)
    block.watch.written[at] = 0
    block.watch.start(at, fenced=True)
    block.shared.data[places] = 255

    def come() -> None:
        block.watch.end(at)
        block.shared.data[places] = data()
        found.came(len(places))

    u.block.cluster.machine.later(come)


def load_box(
    u: Unit,
    mask: np.ndarray | None,
    to: np.ndarray,
    of: np.ndarray,
    corner: list[np.ndarray],
    barrier: np.ndarray,
    both: np.ndarray | None,
) -> None:
    for i in barriers.lanes(u, mask):
        m = map_of(u, int(of[i]))
        where = [int(c[i].view(np.int32)) for c in corner]
        block, place = barriers.block_of(u, int(to[i]))
        at_block, at = barriers.block_of(u, int(barrier[i]))
        targets: list[tuple[Block, Block]] = [(block, at_block)]
        if both is not None:
            chosen = [b for b in u.block.cluster.blocks if int(both[i]) >> b.rank & 1]
            targets = [(b, b) for b in chosen]
        for b, told in targets:
            begin(u, b, m.in_shared(place), partial(box_in, u, m, where), told, at)


def store_box(u: Unit, mask: np.ndarray | None, to: np.ndarray, corner: list[np.ndarray], of: np.ndarray) -> None:
    for i in barriers.lanes(u, mask):
        m = map_of(u, int(to[i]))
        where = [int(c[i].view(np.int32)) for c in corner]
        out(u, int(i), m.in_shared(int(of[i])), partial(box_out, u, m, where))


def out(u: Unit, lane: int, of: np.ndarray, write: Callable[[np.ndarray], None]) -> None:
    """A copy from shared memory, of a group that a thread waits for."""
    block = u.block
    places = _bytes(block.shared, of)
    at = np.unique(places // PIECE)
    block.watch.hold(at, u.threads[lane : lane + 1])

    def go(_: Unit) -> None:
        block.watch.free(at)
        write(block.shared.data[places])

    if block.cluster.machine.late:
        u.flight.stores.open.append(Work(u.threads[lane : lane + 1], (), go))
    else:
        go(u)


def commit(u: Unit) -> None:
    u.flight.stores.commit()


def finish(u: Unit, left: int) -> None:
    def now() -> None:
        for work in u.flight.stores.take(left):
            work.run(u)

    u.finish(u.flight.stores.due(left), now, "its stores")


def copy_bytes(
    u: Unit,
    mask: np.ndarray | None,
    to: np.ndarray,
    of: np.ndarray,
    size: np.ndarray,
    barrier: np.ndarray | None,
    spaces: tuple[str, str],
) -> None:
    """Bytes between shared memories, or between one and global memory."""
    memory = u.block.cluster.machine.memory
    for i in barriers.lanes(u, mask):
        n, there, here = int(size[i]), int(to[i]), int(of[i])
        if n % 16 or there % 16 or here % 16:
            raise Fault("a copy of no multiple of 16 bytes, or from or to no such place")
        if spaces[0] == "global":
            region = memory.region(there)
            at = _bytes(region, there + np.arange(n))
            out(u, int(i), here + np.arange(n), partial(region.data.__setitem__, at))
            continue
        source_block, place = (None, here) if spaces[1] == "global" else barriers.block_of(u, here)
        region = memory.region(here) if source_block is None else source_block.shared
        source = _bytes(region, place + np.arange(n))
        read = partial(region.data.__getitem__, source)
        if source_block is not None:
            read = _held(source_block, np.unique(source // PIECE), u.threads[i : i + 1], read)
        block, to_place = barriers.block_of(u, there)
        assert barrier is not None
        told, told_at = barriers.block_of(u, int(barrier[i]))
        begin(u, block, to_place + np.arange(n), read, told, told_at)


def _held(block: Block, at: np.ndarray, threads: np.ndarray, read: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """A function that reads pieces of shared memory later; they must stay as they are until then."""
    block.watch.hold(at, threads)

    def now() -> np.ndarray:
        block.watch.free(at)
        return read()

    return now


def copy_bulk(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    """`cp.async.bulk` in all its forms."""
    if "prefetch" in mods:
        return []
    if mods[-1] == "commit_group":
        return [f"{p.bound(commit)}(u)"]
    if "wait_group" in mods:
        (left,) = ins.operands
        assert isinstance(left, Imm)
        return [f"{p.bound(finish)}(u, {left.value})"]
    mask, ops = p.guard(ins), ins.operands

    def value(op: object, t: str = "u32") -> str:
        return p.spread(p.value(op, t))  # pyright: ignore

    if "tensor" in mods:
        if "im2col" in mods or "gather4" in mods:
            raise Unknown(ins.text)
        if mods[mods.index("tensor") + 2] == "shared":  # to shared memory
            to, of, barrier, *more = ops
            assert isinstance(of, Mem) and isinstance(of.more[0], Vec)
            corner = ", ".join(value(c) for c in of.more[0].items)
            both = value(more[0]) if "multicast" in mods else "None"
            given = f"{p.place(to, 32)}, {p.place(of, 64)}, [{corner}], {p.place(barrier, 32)}, {both}"
            return [f"{p.bound(load_box)}(u, {mask}, {given})"]
        to, of = ops[:2]
        assert isinstance(to, Mem) and isinstance(to.more[0], Vec)
        corner = ", ".join(value(c) for c in to.more[0].items)
        return [f"{p.bound(store_box)}(u, {mask}, {p.place(to, 64)}, [{corner}], {p.place(of, 32)})"]
    places = [m for m in mods if m in ("shared", "global")]
    to, of, size, *rest = ops
    texts = [p.place(o, 64 if s == "global" else 32) for o, s in zip((to, of), places, strict=True)]
    barrier = p.place(rest[0], 32) if "mbarrier" in mods else "None"
    return [f"{p.bound(copy_bytes)}(u, {mask}, {texts[0]}, {texts[1]}, {value(size)}, {barrier}, {tuple(places)!r})"]


def tell(u: Unit, mask: np.ndarray | None, to: np.ndarray, words: list[np.ndarray], barrier: np.ndarray) -> None:
    for i in barriers.lanes(u, mask):
        block, place = barriers.block_of(u, int(to[i]))
        told, at = barriers.block_of(u, int(barrier[i]))
        data = np.concatenate([w[i : i + 1] for w in words]).view(u1)
        begin(u, block, place + np.arange(len(data)), partial(np.asarray, data), told, at)


def store_async(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    """`st.async`."""
    to, of, barrier = ins.operands
    t = mods[-1]
    words = ", ".join(p.spread(p.value(x, f"b{bits_of(t)}")) for x in (of.items if isinstance(of, Vec) else (of,)))
    return [f"{p.bound(tell)}(u, {p.guard(ins)}, {p.place(to, 32)}, [{words}], {p.place(barrier, 32)})"]
