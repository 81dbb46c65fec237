"""Matrix units: `mma.sync` and `wgmma` (PTX ISA 9.0, 9.7.14 and 9.7.15). Products and their sums are exact, rounded once."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ptx.flight import Held, Started
from ptx.machine import WARP, Block, Unit
from ptx.memory import Fault
from ptx.numbers import bits_of, decoded, f2, f4, f8, i4, u1, u2, u4
from ptx.text import Imm, Instruction, Reg, Unknown, Vec

if TYPE_CHECKING:
    from ptx.decode import Program

SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}  # what the two highest bits of a descriptor say: bytes of a row


def elements(words: np.ndarray, kind: str) -> np.ndarray:
    """Numbers in words, along the last axis."""
    bits = bits_of(kind)
    raw = np.ascontiguousarray(words).view({8: u1, 16: u2, 32: u4}[bits])
    return decoded(kind)(raw).astype(f8)


def rows_of(registers: list[np.ndarray], warps: int) -> np.ndarray:
    """The left operand's words, (warps, 16, words of K): rows g and g + 8 in turns, four words of K a pair."""
    half = len(registers) // 2
    words = np.empty((warps, 16, 4 * half), u4)
    for j in range(half):
        words[:, :8, 4 * j : 4 * j + 4] = registers[2 * j].reshape(warps, 8, 4)
        words[:, 8:, 4 * j : 4 * j + 4] = registers[2 * j + 1].reshape(warps, 8, 4)
    return words


def sums_of(registers: list[np.ndarray], warps: int, kind: str) -> np.ndarray:
    """The accumulator, (warps, 16, columns): of each 8 columns two in each of rows g and g + 8."""
    if kind == "f16":
        pairs = [np.ascontiguousarray(r).view(u2).reshape(-1, 2) for r in registers]
        registers = [half for r in pairs for half in (r[:, 0], r[:, 1])]
    of = {"f16": f2, "f32": f4, "s32": i4}[kind]
    stacked = np.stack([np.ascontiguousarray(r).view(of).reshape(warps, 8, 4) for r in registers])
    j = len(registers) // 4
    return stacked.reshape(j, 2, 2, warps, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(warps, 16, 8 * j)


def registers_of(sums: np.ndarray, kind: str) -> list[np.ndarray]:
    """The other way round."""
    warps, _, columns = sums.shape
    parts = sums.reshape(warps, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, -1)
    parts = np.ascontiguousarray(parts)
    if kind != "f16":
        return list(parts.view(u4))
    pairs = np.ascontiguousarray(parts.reshape(-1, 2, parts.shape[1]).transpose(0, 2, 1)).view(u4)
    return list(pairs.reshape(len(parts) // 2, -1))


def added(product: np.ndarray, before: np.ndarray | None, kind: str) -> np.ndarray:
    """The accumulator after a product."""
    if kind == "s32":
        whole = product.astype(np.int64) + (0 if before is None else before.astype(np.int64))
        return whole.astype(i4)
    total = product if before is None else product + before.astype(f8)
    return total.astype(f2 if kind == "f16" else f4)


def mma(
    u: Unit, kinds: tuple[str, str, str], a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]
) -> list[np.ndarray]:
    warps = u.whole()
    left = elements(rows_of(a, warps), kinds[1])
    right = elements(np.concatenate([x.reshape(warps, 8, 4) for x in b], axis=2), kinds[2])
    product = np.matmul(left, right.transpose(0, 2, 1))
    return registers_of(added(product, sums_of(c, warps, kinds[0]), kinds[0]), kinds[0])


def multiply(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    shape = next(m for m in mods if re.match(r"m\d+n\d+k\d+$", m))
    kinds = mods[-4:]
    if not shape.startswith("m16n8k") or ins.guard is not None or kinds[0] != kinds[3] or kinds[0] not in ("f16", "f32", "s32"):
        raise Unknown(ins.text)
    vectors = [o for o in ins.operands if isinstance(o, Vec)]
    if len(vectors) < len(ins.operands):
        raise Unknown(ins.text)
    d, *given = vectors
    texts = ["[" + ", ".join(p.spread(p.value(x, "b32")) for x in v.items) + "]" for v in given]
    lines = [f"v = {p.bound(mma)}(u, {tuple(kinds[:3])!r}, {', '.join(texts)})"]
    for i, x in enumerate(d.items):
        lines += p.put(ins, x, f"v[{i}]", "b32")
    return lines


# -- products of a warpgroup


@lru_cache(maxsize=4096)
def places(descriptor: int, rows: int, step_bytes: int, turned: bool, width: int) -> np.ndarray:
    """The places of an operand's pieces of 16 bytes, counted in pieces: (rows, pieces of K); `turned`: (K, pieces of rows).

    Args:
        descriptor: what the instruction was given.
        rows: of A, or columns of B.
        step_bytes: of a row along K.
        turned: rows follow one another in memory.
        width: bytes of an element.
    """
    start, lead, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 49 & 7:
        raise Fault("an operand whose rows do not begin with a whole pattern")
    row_bytes = SWIZZLES[descriptor >> 62 & 3]
    if not turned:
        r, b = np.arange(rows)[:, None], np.arange(0, step_bytes, 16)[None, :]
        if row_bytes:
            at = start + r // 8 * stride + r % 8 * row_bytes + b
        else:
            at = start + r // 8 * stride + b // 16 * lead + r % 8 * 16
    else:
        k, n = np.arange(step_bytes // width)[:, None], np.arange(0, rows * width, 16)[None, :]
        if row_bytes:
            at = start + n // row_bytes * lead + n % row_bytes + k % 8 * row_bytes + k // 8 * stride
        else:
            at = start + n // 16 * stride + k % 8 * 16 + k // 8 * lead
    if row_bytes:
        at = at ^ ((at >> 7 & row_bytes // 16 - 1) << 4)
    return at // 16


def operand_pieces(block: Block, descriptor: int, rows: int, kind: str, turned: bool) -> np.ndarray:
    """The places of an operand's pieces in a block's shared memory."""
    at = places(descriptor, rows, 32, turned, bits_of(kind) // 8) - block.shared.base // 16
    if at.min() < 0 or 16 * int(at.max()) + 16 > block.shared.size:
        raise Fault(f"an operand of a product lies beyond {block.shared.name}")
    return at


def operand(block: Block, descriptor: int, rows: int, kind: str, turned: bool) -> np.ndarray:
    """(rows, K) numbers in shared memory."""
    shared, at = block.shared, operand_pieces(block, descriptor, rows, kind, turned)
    width = bits_of(kind) // 8
    pieces = shared.data[: shared.size // 16 * 16].reshape(-1, 16)[at]
    raw = np.ascontiguousarray(pieces).reshape(at.shape[0], -1).view({1: u1, 2: u2, 4: u4}[width])
    numbers = decoded(kind)(raw).astype(f8)
    return numbers.T if turned else numbers


class Product:
    """One `wgmma.mma_async`.

    Attributes:
        columns: of B.
        kinds: of the accumulator, A, B.
        d: registers of the accumulator.
        a: A's registers; None if it is in shared memory.
        signs: of A and B.
        turned: A's or B's rows follow one another in memory.
    """

    def __init__(
        self, columns: int, kinds: tuple[str, str, str], d: list[int], a: list[int] | None, signs: list[int], turned: list[bool]
    ) -> None:
        self.columns, self.kinds, self.d, self.a, self.signs, self.turned = columns, kinds, d, a, signs, turned

    def start(self, u: Unit, a: np.ndarray | None, b: np.ndarray, keeps: np.ndarray) -> None:
        """Begins it. `keeps`: what was in the accumulator before counts."""
        u.whole()
        before = tuple(u.R[i] for i in self.d) if u.one(keeps) else None
        if before is not None and any(x is None for x in before):
            raise Fault("a product adds to registers that nobody wrote")
        read = tuple(u.R[i] for i in self.a) if self.a is not None else (a,)
        at = self.reads(u, read, b)
        if not u.block.cluster.machine.late:
            for x in at:
                u.block.watch.use(x, u.threads)
            for i, x in zip(self.d, self.sums(u, read, b, before), strict=True):
                u.R[i] = x
            return
        marks = tuple(np.full(u.n, 0xFFFFFFFF, u4) for _ in self.d)
        held = Held(u.block.watch, at, u.threads)
        u.flight.products.open.append(Started(self, read, b, before, marks, held))
        for i, x in zip(self.d, marks, strict=True):
            u.R[i] = x

    def reads(self, u: Unit, a: tuple[np.ndarray, ...], b: np.ndarray) -> list[np.ndarray]:
        """Pieces of shared memory of all its operands."""
        found: list[np.ndarray] = []
        for g in np.unique(u.threads // (4 * WARP)):
            mine = u.threads // (4 * WARP) == g
            if self.a is None:
                found.append(operand_pieces(u.block, self._same(a[0][mine]), 64, self.kinds[1], self.turned[0]))
            found.append(operand_pieces(u.block, self._same(b[mine]), self.columns, self.kinds[2], self.turned[1]))
        return found

    def sums(
        self, u: Unit, a: tuple[np.ndarray, ...], b: np.ndarray, before: tuple[np.ndarray, ...] | None
    ) -> list[np.ndarray]:
        """The accumulator's registers: each warp makes its 16 rows."""
        groups = u.threads // (4 * WARP)
        made: list[list[np.ndarray]] = []
        for g in np.unique(groups):
            lanes = np.nonzero(groups == g)[0]
            mine = slice(int(lanes[0]), int(lanes[-1]) + 1)
            warps = u.threads[mine][::WARP] // WARP % 4
            if self.a is None:
                whole = operand(u.block, self._same(a[0][mine]), 64, self.kinds[1], self.turned[0])
                left = whole.reshape(4, 16, -1)[warps]
            else:
                left = elements(rows_of([x[mine] for x in a], len(warps)), self.kinds[1])
            right = operand(u.block, self._same(b[mine]), self.columns, self.kinds[2], self.turned[1])
            product = left @ right.T
            if self.signs[0] * self.signs[1] < 0:
                product = -product
            old = None if before is None else sums_of([x[mine] for x in before], len(warps), self.kinds[0])
            made.append(registers_of(added(product, old, self.kinds[0]), self.kinds[0]))
        return made[0] if len(made) == 1 else [np.concatenate(parts) for parts in zip(*made, strict=True)]

    @staticmethod
    def _same(descriptors: np.ndarray) -> int:
        if not (descriptors == descriptors[0]).all():
            raise Fault("warps of a warpgroup say different places of an operand")
        return int(descriptors[0])


def finish(u: Unit, left: int) -> None:
    """`wgmma.wait_group`: what stood for sums in registers, wherever it was moved to, becomes them."""

    def now() -> None:
        done: dict[int, np.ndarray] = {}
        for s in u.flight.products.take(left):
            before = None if s.before is None else tuple(done.get(id(x), x) for x in s.before)
            done |= zip(map(id, s.marks), s.product.sums(u, s.a, s.b, before), strict=True)
            s.held.free()
            kept.append(s)  # a number that tells an array must not become another one's
        u.R[:] = [done.get(id(x), x) for x in u.R]
        products = u.flight.products

        def settled(s: Started) -> Started:
            return s if s.before is None else replace(s, before=tuple(done.get(id(x), x) for x in s.before))

        u.flight.products = products.mapped(settled)

    kept: list[Started] = []
    u.finish(u.flight.products.due(left), now, "its products")


def commit(u: Unit) -> None:
    if u.block.cluster.machine.late:
        u.flight.products.commit()


def group(p: Program, ins: Instruction, mods: list[str]) -> list[str]:
    if mods[0] == "commit_group":
        return [f"{p.bound(commit)}(u)"]
    if mods[0] == "wait_group":
        (left,) = ins.operands
        assert isinstance(left, Imm)
        return [f"{p.bound(finish)}(u, {left.value})"]
    if mods[0] != "mma_async":
        return []
    shape = re.match(r"m64n(\d+)k\d+$", next(m for m in mods if m.startswith("m64")))
    assert shape is not None
    kinds = tuple(m for m in mods if m in ("f32", "f16", "bf16", "tf32", "s32", "s8", "u8", "e4m3", "e5m2"))
    if ins.guard is not None or len(kinds) != 3:
        raise Unknown(ins.text)
    d, a, b, keeps, *rest = ins.operands
    assert isinstance(d, Vec)
    numbers = [o.value for o in rest if isinstance(o, Imm)]
    signs = numbers[:2] if len(numbers) >= 2 else [1, 1]
    turns = [bool(n) for n in numbers[2:]]
    in_registers = isinstance(a, Vec)
    turned = [False, *turns] if in_registers else turns
    turned += [False] * (2 - len(turned))
    left = [x.number for x in a.items if isinstance(x, Reg)] if isinstance(a, Vec) else None
    product = Product(int(shape[1]), kinds, [x.number for x in d.items if isinstance(x, Reg)], left, signs, turned)  # pyright: ignore
    keep = p.value(keeps, "pred") if isinstance(keeps, Reg) else p.value(keeps, "u32")
    first = "None" if in_registers else p.spread(p.value(a, "u64"))
    return [f"{p.bound(product.start)}(u, {first}, {p.spread(p.value(b, 'u64'))}, {p.spread(keep)})"]
