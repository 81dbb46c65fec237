"""Instructions that touch memory or other threads, each as a call that `decode.Program` writes into its functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx import barriers, bulk, products
from ptx.decode import Program
from ptx.flight import Work
from ptx.machine import AHEAD, WARP, Unit
from ptx.memory import CLUSTER_SHIFT, Fault, Region
from ptx.numbers import UNSIGNED, bits_of, i4, u1, u2, u4, u8
from ptx.text import Imm, Instruction, Mem, Pair, Sink, Sym, Unknown, Vec
from ptx.watch import pieces

Lines = list[str]
Mask = np.ndarray | None


def near(u: Unit, addresses: np.ndarray, cluster: bool) -> list[tuple[Region, Any, np.ndarray]]:
    """The regions in which addresses of shared memory lie: the block's, or with `cluster` any of the cluster's."""
    ranks = addresses >> u4(CLUSTER_SHIFT)
    if not ranks.any():
        return [(u.block.shared, slice(None), addresses)]
    if not cluster:
        raise Fault("an address of another block's shared memory as if it were this one's")
    blocks, found = u.block.cluster.blocks, []
    for r in np.unique(ranks):
        region = u.block.shared if r == 0 else blocks[int(r) - 1].shared
        which = ranks == r
        found.append((region, which, addresses[which] & u4((1 << CLUSTER_SHIFT) - 1)))
    return found


def read(u: Unit, mask: Mask, addresses: np.ndarray, word: type, count: int, space: str) -> np.ndarray:
    """(count, lanes) words, 0 in lanes that read nothing."""
    if mask is not None and not mask.all():
        got = np.zeros((count, u.n), word)
        if mask.any():
            got[:, mask] = _read(u, addresses[mask], word, count, space)
        return got
    return _read(u, addresses, word, count, space)


def _read(u: Unit, addresses: np.ndarray, word: type, count: int, space: str) -> np.ndarray:
    if space == "global":
        return u.block.cluster.machine.memory.read(addresses, word, count)
    parts = near(u, addresses, space == "cluster")
    if len(parts) == 1 and isinstance(parts[0][1], slice):
        u.block.watch.read(pieces(addresses))
        return parts[0][0].read(addresses, word, count)
    got = np.empty((count, len(addresses)), word)
    for region, which, at in parts:
        got[:, which] = region.read(at, word, count)
    return got


def write(
    u: Unit, mask: Mask, addresses: np.ndarray, words: list[np.ndarray], space: str, threads: np.ndarray | None = None
) -> None:
    """Words to each lane's address, of the last lane where several write to one.

    `threads`: that write, if not each lane its own.
    """
    threads = u.threads if threads is None else threads
    if mask is not None and not mask.all():
        if not mask.any():
            return
        addresses, words, threads = addresses[mask], [w[mask] for w in words], threads[mask]
    if space == "global":
        u.block.cluster.machine.memory.write(addresses, words)
        return
    for region, which, at in near(u, addresses, space == "cluster"):
        region.write(at, [w[which] for w in words])
        if region is u.block.shared:
            u.block.watch.write(pieces(at), threads[which])


def _space(mods: list[str]) -> str:
    if "shared" in mods:
        return "cluster" if "cluster" in mods else "shared"
    return "global"


def _vector(mods: list[str]) -> int:
    return next((int(m[1:]) for m in mods if m in ("v2", "v4", "v8")), 1)


def load(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    t = mods[-1]
    to, at = ins.operands[:2]
    if mods[0] == "param":
        assert isinstance(at, Mem) and isinstance(at.base, Sym)
        name, kind = at.base.name, UNSIGNED[bits_of(t)]
        return p.put(
            ins,
            to,
            f"full(u, {kind.__name__}(u.block.cluster.machine.arguments[{name!r}]))".replace("uint", "np.uint"),
            f"b{bits_of(t)}",
        )
    count, bits, space = _vector(mods), bits_of(t), _space(mods)
    address = p.place(at, 64 if space == "global" else 32)
    lines = [f"v = {p.bound(read)}(u, {p.guard(ins)}, {address}, u{bits // 8}, {count}, {space!r})"]
    for i, x in enumerate(to.items if isinstance(to, Vec) else (to,)):
        lines += [] if isinstance(x, Sink) else p.put(ins, x, f"v[{i}]", t if t[0] == "s" and bits < 32 else f"b{bits}")
    return lines


def store(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    if mods[0] == "async":
        return bulk.store_async(p, ins, mods)
    t = mods[-1]
    at, of = ins.operands
    space = _space(mods)
    words = ", ".join(p.spread(p.value(x, f"b{bits_of(t)}")) for x in (of.items if isinstance(of, Vec) else (of,)))
    return [f"{p.bound(write)}(u, {p.guard(ins)}, {p.place(at, 64 if space == 'global' else 32)}, [{words}], {space!r})"]


# -- atomics

CHANGES: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: type(old)(0) if old >= x else old + type(old)(1),
}


def change(u: Unit, mask: Mask, addresses: np.ndarray, how: str, values: list[np.ndarray], space: str) -> np.ndarray:
    """Change memory atomically, lane after lane, and give what stood there."""
    kind = values[0].dtype.type
    words = UNSIGNED[8 * kind().itemsize]
    got = np.zeros(u.n, words)
    for i in range(u.n):
        if mask is not None and not mask[i]:
            continue
        at = addresses[i : i + 1]
        old = _read(u, at, words, 1, space)[0].view(kind)
        if how == "cas":
            new = values[1][i] if old[0] == values[0][i] else old[0]
        else:
            new = CHANGES[how](old[0], values[0][i])
        write(u, None, at, [np.array([new], kind).view(words)], space, u.threads[i : i + 1])
        got[i] = old.view(words)[0]
    return got


def atomic(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    t, space = mods[-1], _space(mods)
    how = next(m for m in mods if m in CHANGES or m == "cas")
    returns = ins.op.startswith("atom")
    at, *values = ins.operands[1:] if returns else ins.operands
    if t.endswith("x2") or t == "bf16":
        raise Unknown(ins.text)
    words = ", ".join(p.spread(p.value(x, t)) for x in values)
    call = (
        f"{p.bound(change)}(u, {p.guard(ins)}, {p.place(at, 64 if space == 'global' else 32)}, {how!r}, [{words}], {space!r})"
    )
    return p.put(ins, ins.operands[0], call, f"b{bits_of(t)}") if returns else [call]


# -- copies of 4 to 16 bytes


def copy(u: Unit, to: np.ndarray, of: np.ndarray, given: np.ndarray, size: int) -> None:
    """`cp.async`: bytes beyond those that are given are zeros."""
    count = size // 4
    words = np.zeros((count, len(to)), u4)
    whole = given >= size
    if whole.any():
        words[:, whole] = _read(u, of[whole], u4, count, "global")
    for i in np.nonzero(~whole & (given > 0))[0]:
        n = int(given[i])
        data = u.block.cluster.machine.memory.read(of[i] + np.arange(n, dtype=u8), u1)[0]
        words[:, i] = np.concatenate([data, np.zeros(size - n, u1)]).view(u4)
    u.block.shared.write(to, list(words))


def start_copy(u: Unit, mask: Mask, to: np.ndarray, of: np.ndarray, size: int, given: np.ndarray | None) -> None:
    some = np.ones(u.n, bool) if mask is None else mask
    given = np.full(u.n, size, u4) if given is None else given
    if not some.any():
        return
    threads, to, of, given = u.threads[some], to[some], of[some], given[some]
    near(u, to, cluster=False)
    watch, at = u.block.watch, pieces(to)
    fenced = u.block.cluster.machine.how.fenced_copies
    if fenced:
        watch.wrote(at, threads)
    if not u.block.cluster.machine.late:
        copy(u, to, of, given, size)
        return
    u.block.shared.write(to, [np.full(len(to), 0xFFFFFFFF, u4)] * (size // 4))
    watch.start(at, fenced=False)

    def come(unit: Unit, to: np.ndarray, of: np.ndarray, given: np.ndarray) -> None:
        watch.end(pieces(to))
        if fenced:
            watch.wrote(pieces(to), unit.threads[:1])
        copy(unit, to, of, given, size)

    u.flight.copies.open.append(Work(threads, (to, of, given), come))


def commit_copies(u: Unit) -> None:
    u.flight.copies.commit()


def finish_copies(u: Unit, left: int, every: bool) -> None:
    if every:
        u.flight.copies.commit()

    def now() -> None:
        for work in u.flight.copies.take(left):
            work.run(u, *work.lanes)

    u.finish(u.flight.copies.due(left), now, "its copies")


def copy_async(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    if "bulk" in mods:
        return bulk.copy_bulk(p, ins, mods)
    if "mbarrier" in mods:
        return [f"{p.bound(finish_copies)}(u, 0, True)", *barriers.arrive_after_copies(p, ins, mods)]
    if mods[-1] == "commit_group":
        return [f"{p.bound(commit_copies)}(u)"]
    if mods[-1] in ("wait_group", "wait_all"):
        left = ins.operands[0] if ins.operands else Imm(0)
        assert isinstance(left, Imm)
        return [f"{p.bound(finish_copies)}(u, {left.value}, {mods[-1] == 'wait_all'})"]
    to, of, size, *given = ins.operands
    assert isinstance(size, Imm)
    size_given = p.spread(p.value(given[0], "u32")) if given else "None"
    return [f"{p.bound(start_copy)}(u, {p.guard(ins)}, {p.place(to, 32)}, {p.place(of, 64)}, {size.value}, {size_given})"]


def fence_proxy(u: Unit) -> None:
    u.block.watch.fence(u.threads)


def fence(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    """A fence between what threads do to memory and what copies and products do; what other fences order is in order here."""
    return [f"{p.bound(fence_proxy)}(u)"] if mods[:2] == ["proxy", "async"] else []


# -- matrices of 8 x 8 halves


def load_matrices(u: Unit, addresses: np.ndarray, count: int, turned: bool) -> list[np.ndarray]:
    lanes = addresses.reshape(u.whole(), WARP)
    found = []
    for i in range(count):
        rows = _read(u, lanes[:, 8 * i : 8 * i + 8].reshape(-1), u4, 4, "shared").T.reshape(-1, 8, 4)
        if turned:
            rows = np.ascontiguousarray(np.ascontiguousarray(rows).view(u2).transpose(0, 2, 1)).view(u4)
        found.append(np.ascontiguousarray(rows).reshape(-1))
    return found


def store_matrices(u: Unit, mask: Mask, addresses: np.ndarray, words: list[np.ndarray], turned: bool) -> None:
    if mask is not None and not mask.any():
        return
    if mask is not None and not mask.all():
        raise Fault("stmatrix by some lanes")
    lanes = addresses.reshape(u.whole(), WARP)
    threads = u.threads.reshape(-1, WARP)[:, :8].reshape(-1)
    for i, w in enumerate(words):
        rows = np.ascontiguousarray(w).reshape(-1, 8, 4)
        if turned:
            rows = np.ascontiguousarray(rows.view(u2).transpose(0, 2, 1)).view(u4)
        write(u, None, lanes[:, 8 * i : 8 * i + 8].reshape(-1), list(rows.reshape(-1, 4).T), "shared", threads)


def load_matrix(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    if "m8n8" not in mods or mods[-1] != "b16" or ins.guard is not None:
        raise Unknown(ins.text)
    to, at = ins.operands
    items = to.items if isinstance(to, Vec) else (to,)
    lines = [f"v = {p.bound(load_matrices)}(u, {p.place(at, 32)}, {len(items)}, {'trans' in mods})"]
    for i, x in enumerate(items):
        lines += p.put(ins, x, f"v[{i}]", "b32")
    return lines


def store_matrix(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    if "m8n8" not in mods or mods[-1] != "b16":
        raise Unknown(ins.text)
    at, of = ins.operands
    words = ", ".join(p.spread(p.value(x, "b32")) for x in (of.items if isinstance(of, Vec) else (of,)))
    return [f"{p.bound(store_matrices)}(u, {p.guard(ins)}, {p.place(at, 32)}, [{words}], {'trans' in mods})"]


# -- lanes of a warp


def shuffled(u: Unit, how: str, x: np.ndarray, by: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`shfl.sync`: the value, and whether it came from a lane in range."""
    lanes, warps = np.arange(WARP), u.whole()
    b = (by & u4(31)).astype(i4).reshape(warps, WARP)
    c = clamp.astype(i4).reshape(warps, WARP)
    segment, limit = c >> 8 & 31, c & 31
    low, high = lanes & segment, (lanes & segment) | (limit & ~segment)
    j = {"up": lanes - b, "down": lanes + b, "bfly": lanes ^ b, "idx": low | (b & ~segment)}[how]
    fine = j >= high if how == "up" else j <= high
    del low
    j = np.where(fine, j, lanes)
    return np.take_along_axis(x.reshape(warps, WARP), j, axis=1).reshape(-1), fine.reshape(-1)


def shuffle(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    to, x, by, clamp, _ = ins.operands
    both = to if isinstance(to, Pair) else Pair(to, Sink())
    given = ", ".join(p.spread(p.value(o, "u32")) for o in (x, by, clamp))
    lines = [f"v = {p.bound(shuffled)}(u, {mods[1]!r}, {given})"]
    lines += p.put(ins, both.left, "v[0]", "b32")
    return lines + ([] if isinstance(both.right, Sink) else p.put(ins, both.right, "v[1]", "pred"))


def reduced(u: Unit, how: str, x: np.ndarray) -> np.ndarray:
    lanes = x.reshape(u.whole(), WARP)
    of = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[how]
    return np.repeat(of.reduce(lanes, axis=1, dtype=x.dtype), WARP)


def reduce(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    if ins.guard is not None or mods[-1][0] == "f":
        raise Unknown(ins.text)
    to, x, _ = ins.operands
    return p.put(ins, to, f"{p.bound(reduced)}(u, {mods[1]!r}, {p.spread(p.value(x, mods[-1]))})", mods[-1])


def voted(u: Unit, how: str, x: np.ndarray) -> np.ndarray:
    lanes = x.reshape(u.whole(), WARP)
    if how == "ballot":
        return np.repeat((lanes.astype(u8) << np.arange(WARP, dtype=u8)).sum(axis=1).astype(u4), WARP)
    got = {"all": lanes.all(axis=1), "any": lanes.any(axis=1), "uni": lanes.all(axis=1) | ~lanes.any(axis=1)}[how]
    return np.repeat(got, WARP)


def vote(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    to, x = ins.operands[:2]
    return p.put(ins, to, f"{p.bound(voted)}(u, {mods[1]!r}, {p.value(x, 'pred')})", mods[-1])


def elected(u: Unit) -> np.ndarray:
    u.whole()
    return u.threads % WARP == 0


def elect(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    to = ins.operands[0]
    both = to if isinstance(to, Pair) else Pair(Sink(), to)
    lines = [] if isinstance(both.left, Sink) else p.put(ins, both.left, "full(u, u4(0))", "b32")
    return lines + p.put(ins, both.right, f"{p.bound(elected)}(u,)", "pred")


def trapped(u: Unit) -> None:
    raise Fault("trap")


def trap(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    return [f"{p.bound(trapped)}(u)"]


def mapped(u: Unit, address: np.ndarray, rank: np.ndarray) -> np.ndarray:
    if (rank >= len(u.block.cluster.blocks)).any():
        raise Fault("mapa: the cluster has no such block")
    return (address & u4((1 << CLUSTER_SHIFT) - 1)) | ((rank + u4(1)) << u4(CLUSTER_SHIFT))


def map_address(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    if "shared" not in mods or mods[-1] != "u32":
        raise Unknown(ins.text)
    to, at, rank = ins.operands
    return p.put(ins, to, f"{p.bound(mapped)}(u, {p.spread(p.value(at, 'u32'))}, {p.spread(p.value(rank, 'u32'))})", "b32")


def follow(u: Unit, mask: Mask, what: str) -> None:
    machine = u.block.cluster.machine
    if mask is not None and not mask.any():
        return
    if what == "launch_dependents":
        machine.granted.add(u.block.number)
    else:
        u.wait(machine.follows, AHEAD)


def dependent(p: Program, ins: Instruction, mods: list[str]) -> Lines:
    """The leave for the launch behind to begin, which any thread of a block gives; and the wait for the launch ahead."""
    return [f"{p.bound(follow)}(u, {p.guard(ins)}, {mods[0]!r})"]


COMPLEX: dict[str, Callable[[Program, Instruction, list[str]], Lines]] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "cp": copy_async,
    "ldmatrix": load_matrix,
    "stmatrix": store_matrix,
    "shfl": shuffle,
    "redux": reduce,
    "vote": vote,
    "elect": elect,
    "mapa": map_address,
    "trap": trap,
    "fence": fence,
    "mma": products.multiply,
    "wgmma": products.group,
    "mbarrier": barriers.mbarrier,
    "bar": barriers.bar,
    "barrier": barriers.bar,
    "griddepcontrol": dependent,
}
WAITS = (
    "bar.sync",
    "barrier.sync",
    "bar.arrive",
    "barrier.arrive",
    "barrier.cluster",
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    "wgmma",
    "cp.async.bulk.wait",
    "cp.async.wait",
    "griddepcontrol.wait",
)
