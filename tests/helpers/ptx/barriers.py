"""Barriers of a block, of a cluster, and in shared memory (PTX ISA 9.0, 9.7.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx.machine import Block, Unit
from ptx.memory import CLUSTER_SHIFT, Fault
from ptx.text import Imm, Instruction, Mem, Sink, Unknown

if TYPE_CHECKING:
    from ptx.decode import Program

LARGEST = (1 << 20) - 1


class MBarrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    def __init__(self, count: int, name: str) -> None:
        self.count, self.pending, self.bytes, self.phase, self.name = count, count, 0, 0, name

    def expect(self, count: int) -> None:
        self.bytes += count
        if abs(self.bytes) > LARGEST:
            raise Fault(f"{self.name} waits for {self.bytes} bytes")

    def arrive(self, count: int = 1) -> None:
        if count > self.pending:
            raise Fault(f"{count} arrivals at {self.name}, whose phase waits for {self.pending}")
        self.pending -= count
        self._settle()

    def came(self, count: int) -> None:
        self.expect(-count)
        self._settle()

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


def at(u: Unit, address: int) -> MBarrier:
    """The one at an address of the block's or the cluster's shared memory."""
    block, place = block_of(u, address)
    found = block.mbarriers.get(place)
    if found is None:
        raise Fault(f"no barrier was set up at {place} of shared memory of block {block.number[0]}")
    return found


def block_of(u: Unit, address: int) -> tuple[Block, int]:
    rank = address >> CLUSTER_SHIFT
    block = u.block if rank == 0 else u.block.cluster.blocks[rank - 1]
    if block.exited == block.size:
        raise Fault(f"shared memory of block {block.number[0]}, which has ended")
    return block, address & (1 << CLUSTER_SHIFT) - 1


def lanes(u: Unit, mask: np.ndarray | None) -> np.ndarray:
    """The lanes that execute an instruction."""
    return np.arange(u.n) if mask is None else np.nonzero(mask)[0]


def init(u: Unit, mask: np.ndarray | None, addresses: np.ndarray, counts: np.ndarray) -> None:
    for i in lanes(u, mask):
        block, place = block_of(u, int(addresses[i]))
        if place % 8:
            raise Fault("a barrier at no multiple of 8")
        block.mbarriers[place] = MBarrier(int(counts[i]), f"the barrier at {place} of block {block.number[0]}")


def invalid(u: Unit, mask: np.ndarray | None, addresses: np.ndarray) -> None:
    for i in lanes(u, mask):
        block, place = block_of(u, int(addresses[i]))
        if block.mbarriers.pop(place, None) is None:
            raise Fault("there was no barrier")


def arrive(u: Unit, mask: np.ndarray | None, addresses: np.ndarray, counts: np.ndarray | None) -> None:
    where, times = np.unique(addresses[lanes(u, mask)], return_counts=True)
    if counts is None:
        for address, n in zip(where, times, strict=True):
            at(u, int(address)).arrive(int(n))
        return
    for i in lanes(u, mask):
        at(u, int(addresses[i])).arrive(int(counts[i]))


def expect(u: Unit, mask: np.ndarray | None, addresses: np.ndarray, sizes: np.ndarray, arrives: bool) -> None:
    for i in lanes(u, mask):
        barrier = at(u, int(addresses[i]))
        barrier.expect(int(sizes[i]))
        if arrives:
            barrier.arrive()


def wait(u: Unit, mask: np.ndarray | None, addresses: np.ndarray, parities: np.ndarray) -> np.ndarray:
    """Until the phase of a parity is over: `try_wait`, which may take as long as it likes."""
    if mask is not None and u.one(mask) == 0:
        return np.zeros(u.n, bool)
    barrier, parity = at(u, u.one(addresses)), u.one(parities) & 1
    u.wait(
        lambda: barrier.phase & 1 != parity,
        f"phase {parity} of {barrier.name} ({barrier.pending} arrivals, {barrier.bytes} bytes are missing)",
    )
    return np.ones(u.n, bool)


def mbarrier(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    what, ops, mask = mods[0], ins.operands, p.guard(ins)

    def value(i: int) -> str:
        return p.spread(p.value(ops[i], "u32"))

    if what == "init":
        return [f"{p.bound(init)}(u, {mask}, {p.place(ops[0], 32)}, {value(1)})"]
    if what == "inval":
        return [f"{p.bound(invalid)}(u, {mask}, {p.place(ops[0], 32)})"]
    if what == "expect_tx":
        return [f"{p.bound(expect)}(u, {mask}, {p.place(ops[0], 32)}, {value(1)}, False)"]
    if what == "arrive" and "noComplete" not in mods:
        first = 0 if isinstance(ops[0], Mem) else 1
        if first and not isinstance(ops[0], Sink):
            raise Unknown("an arrival whose state is kept")
        if "expect_tx" in mods:
            return [f"{p.bound(expect)}(u, {mask}, {p.place(ops[first], 32)}, {value(first + 1)}, True)"]
        counts = value(first + 1) if len(ops) > first + 1 else "None"
        return [f"{p.bound(arrive)}(u, {mask}, {p.place(ops[first], 32)}, {counts})"]
    if what in ("try_wait", "test_wait") and "parity" in mods:
        return p.put(ins, ops[0], f"{p.bound(wait)}(u, {mask}, {p.place(ops[1], 32)}, {value(2)})", "pred")
    raise Unknown(ins.text)


def arrive_after_copies(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    """`cp.async.mbarrier.arrive`: the copies have come already; without `noinc` the arrival is counted beforehand."""
    if "noinc" not in mods:
        return []
    return [f"{p.bound(arrive)}(u, {p.guard(ins)}, {p.place(ins.operands[0], 32)}, None)"]


# -- of a block and of a cluster


def meet(u: Unit, mask: np.ndarray | None, number: np.ndarray, count: np.ndarray | None, waits: bool) -> None:
    if mask is not None and u.one(mask) == 0:
        return
    which = u.one(number)
    if which > 15:
        raise Fault(f"barrier {which}")
    done = u.block.arrive(which, u.n, None if count is None else u.one(count))
    if waits:
        u.wait(done, f"barrier {which}")


def meet_cluster(u: Unit, what: str) -> None:
    cluster = u.block.cluster
    if what == "arrive":
        u.cluster_turn = cluster.turn
        cluster.arrived += u.n
        cluster.done(cluster.turn)
        return
    turn = u.cluster_turn
    u.wait(lambda: cluster.done(turn), "the cluster")


def bar(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    if mods[0] == "warp":
        return []
    if mods[0] == "cluster":
        if ins.guard is not None:
            raise Unknown(ins.text)
        return [f"{p.bound(meet_cluster)}(u, {mods[1]!r})"]
    what = mods[1] if mods[0] == "cta" else mods[0]
    if what not in ("sync", "arrive"):
        raise Unknown(ins.text)
    ops = ins.operands
    number = p.spread(p.value(ops[0] if ops else Imm(0), "u32"))
    count = p.spread(p.value(ops[1], "u32")) if len(ops) > 1 else "None"
    return [f"{p.bound(meet)}(u, {p.guard(ins)}, {number}, {count}, {what == 'sync'})"]
