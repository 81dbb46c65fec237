"""Copies that TMA does, of boxes of arrays and of plain bytes, and stores that tell a barrier (PTX ISA 9.0, 9.7.9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ptx import barriers
from ptx.machine import Block, Unit
from ptx.memory import Fault, Region
from ptx.numbers import bits_of, u1, u4, u8
from ptx.text import Instruction, Mem, Unknown, Vec

if TYPE_CHECKING:
    from ptx.decode import Program


@dataclass(frozen=True)
class TensorMap:
    """What `cuTensorMapEncodeTiled` is told.

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
        """Where each byte of a box goes."""
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


def box_out(u: Unit, m: TensorMap, corner: Sequence[int], data: np.ndarray, how: str | None) -> None:
    offsets, inside = m.elements(corner)
    if not inside.any():
        return
    region = u.block.cluster.machine.memory.region(m.address)
    at = _bytes(region, (m.address + offsets[inside])[:, None] + np.arange(m.size))
    if how is not None:
        raise Unknown("a reduction by TMA")
    region.data[at] = data.reshape(-1, m.size)[inside]


def load_box(u: Unit, mask: np.ndarray | None, to: np.ndarray, of: np.ndarray, corner: list[np.ndarray], barrier: np.ndarray, both: np.ndarray | None) -> None:
    for i in barriers.lanes(u, mask):
        m = map_of(u, int(of[i]))
        data = box_in(u, m, [int(c[i].view(np.int32)) for c in corner])
        block, place = barriers.block_of(u, int(to[i]))
        at_block, at = barriers.block_of(u, int(barrier[i]))
        targets: list[tuple[Block, Block]] = [(block, at_block)]
        if both is not None:
            chosen = [b for b in u.block.cluster.blocks if int(both[i]) >> b.rank & 1]
            targets = [(b, b) for b in chosen]
        for b, told in targets:
            b.shared.data[_bytes(b.shared, m.in_shared(place))] = data
            found = told.mbarriers.get(at)
            if found is None:
                raise Fault("a copy tells no barrier")
            found.came(m.box_bytes)


def store_box(u: Unit, mask: np.ndarray | None, to: np.ndarray, corner: list[np.ndarray], of: np.ndarray, how: str | None) -> None:
    for i in barriers.lanes(u, mask):
        m = map_of(u, int(to[i]))
        shared = u.block.shared
        data = shared.data[_bytes(shared, m.in_shared(int(of[i])))]
        box_out(u, m, [int(c[i].view(np.int32)) for c in corner], data, how)


def copy_bytes(u: Unit, mask: np.ndarray | None, to: np.ndarray, of: np.ndarray, size: np.ndarray, barrier: np.ndarray | None, spaces: tuple[str, str]) -> None:
    """Bytes between shared memories, or between one and global memory."""
    for i in barriers.lanes(u, mask):
        n = int(size[i])
        if n % 16 or int(to[i]) % 16 or int(of[i]) % 16:
            raise Fault("a copy of no multiple of 16 bytes, or from or to no such place")
        ends = []
        for space, address in zip(spaces, (int(to[i]), int(of[i])), strict=True):
            if space == "global":
                region, place = u.block.cluster.machine.memory.region(address), address
            else:
                block, place = barriers.block_of(u, address)
                region = block.shared
            ends.append((region, _bytes(region, place + np.arange(n))))
        (there, there_at), (here, here_at) = ends
        there.data[there_at] = here.data[here_at]
        if barrier is not None:
            barriers.at(u, int(barrier[i])).came(n)


def copy_bulk(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    """`cp.async.bulk` in all its forms."""
    if mods[-1] in ("commit_group",) or "wait_group" in mods or "prefetch" in mods:
        return []
    mask, ops = p.guard(ins), ins.operands

    def value(op: object, t: str = "u32") -> str:
        return p.spread(p.value(op, t))  # pyright: ignore

    if "tensor" in mods:
        if "im2col" in mods or "tile" in mods and "gather4" in mods:
            raise Unknown(ins.text)
        if mods[mods.index("tensor") + 2] == "shared":  # to shared memory
            to, of, barrier, *more = ops
            assert isinstance(of, Mem) and isinstance(of.more[0], Vec)
            corner = ", ".join(value(c) for c in of.more[0].items)
            both = value(more[0]) if "multicast" in mods else "None"
            return [f"{p.bound(load_box)}(u, {mask}, {p.place(to, 32)}, {p.place(of, 64)}, [{corner}], {p.place(barrier, 32)}, {both})"]
        to, of = ops[:2]
        assert isinstance(to, Mem) and isinstance(to.more[0], Vec)
        corner = ", ".join(value(c) for c in to.more[0].items)
        return [f"{p.bound(store_box)}(u, {mask}, {p.place(to, 64)}, [{corner}], {p.place(of, 32)}, None)"]
    places = [m for m in mods if m in ("shared", "global")]
    to, of, size, *rest = ops
    texts = [p.place(o, 64 if s == "global" else 32) for o, s in zip((to, of), places, strict=True)]
    barrier = p.place(rest[0], 32) if "mbarrier" in mods else "None"
    return [f"{p.bound(copy_bytes)}(u, {mask}, {texts[0]}, {texts[1]}, {value(size)}, {barrier}, {tuple(places)!r})"]


def tell(u: Unit, mask: np.ndarray | None, to: np.ndarray, words: list[np.ndarray], barrier: np.ndarray) -> None:
    for i in barriers.lanes(u, mask):
        block, place = barriers.block_of(u, int(to[i]))
        block.shared.write(np.array([place], u4), [w[i : i + 1] for w in words])
        barriers.at(u, int(barrier[i])).came(sum(w.itemsize for w in words))


def store_async(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    """`st.async`."""
    to, of, barrier = ins.operands
    t = mods[-1]
    words = ", ".join(p.spread(p.value(x, f"b{bits_of(t)}")) for x in (of.items if isinstance(of, Vec) else (of,)))
    return [f"{p.bound(tell)}(u, {p.guard(ins)}, {p.place(to, 32)}, [{words}], {p.place(barrier, 32)})"]


_ = u8
