"""Kernels for 4-bit weights: codes decoded in registers from one stream that is read from its start to its end.

A panel of the packed weights is, for each group of K: its columns' scales, their zero points if there are any, and then a word
of 32 bits a column for every 8 of K. Where the instruction takes pairs along K, a column has two words for every 16, one of the
even and one of the odd, and its scale twice. Two vectors of lanes then make one of pairs. The left operand, the tiles and the
epilogue are those of the dense nest. Codes that are multiplied unchanged are looked up in pairs: a column's word has the even
ones in its low half, the odd ones in its high half.

Where many rows meet a panel, a thread decodes it once into memory of its own, and the dense micro-kernel multiplies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tilewright.candidates.llvm.expressions.printer import Printer
from tilewright.candidates.llvm.expressions.text import Function, Int, vec
from tilewright.candidates.llvm.gemm.kernel import Block, GemmWriter
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, Nest, rounded
from tilewright.dtype import F32, DType
from tilewright.ir.few_bits import four_bit_floats

CODES = 8  # in a word
# How far ahead the stream is prefetched, in bytes, and into which cache: for one row, which waits for memory, and for several,
# which must find it at hand. Each loses a tenth to a third with what the other takes.
READING, COMPUTING = (2048, 2), (4096, 1)
WIDE = 16  # lanes for which there is an instruction that looks a code's value up
ORDER = tuple(range(CODES))  # where in a word each of 8 neighbours along K is kept
PAIRED = (0, 4, 1, 5, 2, 6, 3, 7)  # the same, of pairs
TWICE = 0xC8643210  # of a magnitude 0, 0.5, 1, 1.5, 2, 3, 4, 6 of f4e2m1fn, by its three bits
Sides = list[list[str]]  # scales of a group and its zero points, each vectors of columns


@dataclass(frozen=True)
class GroupedNest(Nest):
    """A nest whose right operand is codes of 4 bits, scaled by groups along K.

    Attributes:
        group: elements of K that share a scale; a multiple of 8. The last group may be shorter.
        signed: codes are -8 to 7, else 0 to 15.
        zeros: each group has a zero point, which is taken off its codes first.
        rounded_to: the type of the weights, to which each is rounded once it is scaled.
        floats: codes are f4e2m1fn.
        decoded: a panel is decoded before its tiles are multiplied; else each tile decodes it as it goes.
    """

    group: int = 0
    signed: bool = True
    zeros: bool = False
    rounded_to: DType = F32
    decoded: bool = False
    floats: bool = False

    @property
    def group_count(self) -> int:
        """Groups along K."""
        return -(-self.K // self.group)

    @property
    def group_rows(self) -> int:
        """Words of a column in a group of the stream: scales, zero points and codes."""
        return self.side_rows + self.group // CODES

    @property
    def side_rows(self) -> int:
        """Words of a column in a group that are scales and zero points."""
        return self.words * (1 + self.zeros)

    @property
    def by_pairs(self) -> bool:
        """Codes are looked up two at a time: they are multiplied as they are, and sums are scaled."""
        return self.dot.k == 2 and self.rounded_to is F32

    @property
    def words(self) -> int:
        """Vectors of words from which one operand of the instruction is made."""
        return 1 if self.by_pairs else self.dot.k

    @property
    def rhs_panel_bytes(self) -> int:
        return self.group_count * self.group_rows * self.nr * 4

    @property
    def thread_bytes(self) -> int:
        return rounded(self.rhs_bytes_over(self.K)) if self.decoded else super().thread_bytes

    @cached_property
    def prefetch_distance(self) -> int:
        return 0  # kernels prefetch their own stream

    def prefetch(self, f: Function, at: str) -> None:
        """Prefetch what follows the words of a panel's columns at an address."""
        ahead, cache = READING if self.M == 1 else COMPUTING
        for i in range(0, self.nr * 4 * self.words, CACHE_LINE):
            f.prefetch(f.at(at, ahead + i), level=cache)

    def by_panel(self, of_columns: torch.Tensor) -> torch.Tensor:
        """Values of the weight's columns [N, ...] in the order of panels, filled up with zeros: [columns, ...]."""
        halves = of_columns.unflatten(0, (-1, self.stored))
        filled = of_columns.new_zeros(len(halves), self.rhs_panels * self.width, *of_columns.shape[1:])
        filled[:, : self.stored] = halves
        return filled.unflatten(1, (-1, self.width)).transpose(0, 1).flatten(0, 2)

    def packed(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """The stream of codes [columns, K], scales and zero points [columns, groups], all by panel."""
        sides = [s.float().contiguous() for s in (scales, zeros) if s is not None]
        return packed_stream(self, codes.to(torch.int32), sides, PAIRED if self.by_pairs else ORDER)


def packed_stream(nest: GroupedNest, codes: torch.Tensor, sides: Sequence[torch.Tensor], order: Sequence[int]) -> torch.Tensor:
    """The stream, s32[panels, groups, words, columns], from codes s32[columns, K] and what precedes them in each
    group, [columns, groups] of 4 bytes each. `order`: where in its word each of 8 neighbours of a column is kept."""
    columns, lanes, span = len(codes), nest.words, CODES * nest.words
    words = torch.zeros(columns, nest.group_count, nest.group // span, lanes, dtype=torch.int32)
    of_column = words.view(columns, -1, lanes)[:, : nest.K // span]
    for i, place in enumerate(order):
        for lane in range(lanes):
            of_column[:, :, lane] |= (codes[:, i * lanes + lane :: span] & 15) << 4 * place
    stream = torch.zeros(nest.rhs_panels, nest.group_count, nest.group_rows, nest.nr, dtype=torch.int32)
    for i, side in enumerate(sides):
        values = side.view(torch.int32).view(nest.rhs_panels, nest.nr, nest.group_count).permute(0, 2, 1)
        values = values.repeat_interleave(lanes, dim=2).view(nest.rhs_panels, nest.group_count, lanes, nest.nr)
        stream[:, :, i * lanes : (i + 1) * lanes] = values
    by_word = words.view(nest.rhs_panels, nest.nr, nest.group_count, nest.group // span, lanes).permute(0, 2, 3, 1, 4)
    stream[:, :, nest.side_rows :] = by_word.reshape(nest.rhs_panels, nest.group_count, nest.group // CODES, nest.nr)
    return stream


class GroupedWriter(GemmWriter):
    """Writes a `GroupedNest`; its right operand is always packed before."""

    nest: GroupedNest

    def _fuses_epilogue(self) -> bool:
        """Say no where tiles decode as they go: those micro-kernels fill tiles."""
        return self.nest.decoded and super()._fuses_epilogue()

    def _pack_rhs(self, name: str = "pack_rhs", counter: int = 0) -> None:
        self._phase(name).finish()
        if self.nest.decoded:
            self._decode()

    def _decode(self) -> None:
        """decode(b, out): a panel of the stream as the dense micro-kernel reads it.

        Signed codes are taken as 8 more, which is subtracted as part of the zero point: one shift a code, for processors that
        shift one vector at a time.
        """
        n, d = self.nest, self.nest.dot
        nv, line, row_bytes = n.nv, d.lanes * 4, n.nr * 4
        floats, i32 = vec(d.lanes, "float"), vec(d.lanes, "i32")
        f = Function(self.module, "decode", [("ptr", "b"), ("ptr", "out")])
        casts = Printer(f, d.lanes)
        with f.loop(0, n.group_count) as outer:
            group = f.at("%b", f.mul(outer.index, n.group_rows * row_bytes))
            base = f.mul(outer.index, n.group)
            sides = [[f.load(floats, f.at(group, (i * nv + j) * line), line) for j in range(nv)] for i in range(1 + n.zeros)]
            scales, *zeros = sides
            if n.signed:
                above = "splat (float 8.0)"
                zeros = [[f.v(f"fadd {floats} {z}, {above}") for z in zeros[0]] if n.zeros else [above] * nv]
            most = f.div(f.min(n.group, f.sub(n.K, base)), CODES) if n.K % n.group else n.group // CODES
            with f.loop(0, most) as word:
                at = f.at(group, f.mul(f.add(word.index, n.side_rows), row_bytes))
                out = f.at("%out", f.mul(f.add(base, f.mul(word.index, CODES)), row_bytes))
                loaded = [f.load(i32, f.at(at, j * line), line) for j in range(nv)]
                if n.signed:
                    loaded = [f.v(f"xor {i32} {w}, splat (i32 {0x88888888 - (1 << 32)})") for w in loaded]
                for step in range(CODES):
                    for j in range(nv):
                        code = f.v(f"lshr {i32} {loaded[j]}, splat (i32 {4 * step})")
                        value = (
                            self._float(f, loaded[j], step)
                            if n.floats
                            else f.v(f"uitofp {i32} {f.v(f'and {i32} {code}, splat (i32 15)')} to {floats}")
                        )
                        if zeros:
                            value = f.v(f"fsub {floats} {value}, {zeros[0][j]}")
                        value = f.v(f"fmul {floats} {value}, {scales[j]}")
                        if n.rounded_to is not F32:
                            value = casts.convert(casts.convert(value, F32, n.rounded_to), n.rounded_to, F32)
                        f.store(floats, value, f.at(out, step * row_bytes + j * line), line)
        f.finish()

    def _pc_loop(self, f: Function, block: Block) -> None:
        if self.nest.decoded:
            own = self._scratch(f, f.add(self.nest.threads_at, f.mul("%thread", self.nest.thread_bytes)))
            f.call("decode", ("ptr", block.rhs), ("ptr", own))
            block = replace(block, rhs=own)
        super()._pc_loop(f, block)

    def _micro_kernel(self, rows: int, *, fresh: bool) -> None:
        """tile of the result = lhs micro-panel x weight panel.

        A group's sums are scaled when they are complete; totals stay in the tile where there are no registers for them. Weights
        that are rounded once they are scaled are scaled as they are decoded.
        """
        assert fresh, "K is never cut"
        if self.nest.decoded:
            super()._micro_kernel(rows, fresh=fresh)
            return
        n, d = self.nest, self.nest.dot
        nv, line, row_bytes = n.nv, n.dot.lanes * 4, n.nr * 4
        f, floats, folded = self._micro_function(rows), vec(d.lanes, "float"), n.rounded_to is not F32
        casts = Printer(f, d.lanes)
        row_at = [f.mul("%stride", m) for m in range(rows)]
        span = CODES * n.words

        def products(index: Int, group: str, base: Int, sides: Sides, acc: Sequence[str]) -> list[str]:
            at = f.at(group, f.mul(f.add(f.mul(index, n.words), n.side_rows), row_bytes))
            loaded = [f.load(vec(d.lanes, "i32"), f.at(at, j * line), line) for j in range(nv * n.words)]
            n.prefetch(f, at)
            a = f.at("%a", f.mul(f.add(base, f.mul(index, span)), 4 // d.k))
            after = list(acc)
            for step in range(span // d.k):
                right = [self._decoded(f, word, step) for word in loaded]
                if n.zeros:
                    right = [f.v(f"fsub {floats} {w}, {z}") for w, z in zip(right, sides[1], strict=True)]
                if folded:
                    right = [f.v(f"fmul {floats} {w}, {s}") for w, s in zip(right, sides[0], strict=True)]
                if n.words == 2:  # rounds both
                    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
                    both = zip(right[::2], right[1::2], strict=True)
                    right = [f.intrinsic(name, d.operand, (floats, high), (floats, low)) for low, high in both]
                elif n.rounded_to is not F32:
                    right = [casts.convert(casts.convert(w, F32, n.rounded_to), n.rounded_to, F32) for w in right]
                for m in range(rows):
                    word = f.splat(d.lanes, "i32", f.load("i32", f.at(f.at(a, row_at[m]), 4 * step), 1))
                    left = f.v(f"bitcast {vec(d.lanes, 'i32')} {word} to {d.operand}")
                    for j in range(nv):
                        after[m * nv + j] = d.emit(f, after[m * nv + j], left, right[j])
            return after

        self._sum_groups(f, rows, folded or 2 * rows * nv <= d.registers - 8, products)

    def _micro_function(self, rows: int) -> Function:
        args = [("ptr", "a"), ("i64", "stride"), ("ptr", "b"), ("ptr", "tile"), ("i64", "groups")]
        return Function(self.module, f"micro_{rows}", args)

    def _sum_groups(
        self,
        f: Function,
        rows: int,
        resident: bool,
        products: Callable[[Int, str, Int, Sides, Sequence[str]], list[str]],
        first: Callable[[Int, Sides], list[str]] | None = None,
        row_scale: Callable[[int, Int], str] | None = None,
        *,
        by_group: bool = True,
    ) -> None:
        """Add up the groups of a panel in the result tile, and finish the function.

        Args:
            f: the micro-kernel.
            rows: rows of the tile.
            resident: there are registers for totals beside a group's sums; else they stay in the tile.
            products: the sums with the products of a vector of words: of its number in the group, the group's address and first
                element of K, its scales and zero points, and the sums before.
            first: the sums that a group starts from, of its number, its scales and zero points; zeros if not given.
            row_scale: a row's scale for a group, if rows have scales.
            by_group: those differ from group to group; else totals are scaled by them.
        """
        n, d = self.nest, self.nest.dot
        nv, line, count, floats = n.nv, d.lanes * 4, rows * n.nv, vec(d.lanes, "float")
        folded, wide, zeros = n.rounded_to is not F32, nv * n.words, ["zeroinitializer"] * count
        if not resident:
            for i in range(count):
                f.store(floats, "zeroinitializer", f.at("%tile", i * line), line)
        with f.loop(0, n.group_count, 1, [(floats, z) for z in zeros] if resident else []) as outer:
            group = f.at("%b", f.mul(outer.index, n.group_rows * n.nr * 4))
            base = f.mul(outer.index, n.group)
            sides = [
                [f.load(d.accumulator, f.at(group, (i * wide + j) * line), line) for j in range(wide)]
                for i in range(n.side_rows // n.words)
            ]
            start = first(outer.index, sides) if first else outer.carried if folded else zeros
            span = CODES * n.words
            most = f.div(f.min(n.group, f.sub(n.K, base)), span) if n.K % n.group else n.group // span
            with f.loop(0, most, 1, [(d.accumulator, x) for x in start]) as inner:
                inner.next = products(inner.index, group, base, sides, inner.carried)
            totals = list(inner.carried)
            scales = sides[0] if d.acc is F32 else [f.v(f"bitcast {d.accumulator} {s} to {floats}") for s in sides[0]]
            for m in range(0 if folded else rows):
                factor = row_scale(m, outer.index) if row_scale and by_group else ""
                for i, scale in enumerate(scales, m * nv):
                    if d.acc is not F32:
                        totals[i] = f.v(f"sitofp {d.accumulator} {totals[i]} to {floats}")
                    if factor:
                        totals[i] = f.v(f"fmul {floats} {totals[i]}, {factor}")
                    place = f.at("%tile", i * line)
                    before = outer.carried[i] if resident else f.load(floats, place, line)
                    fma = (floats, totals[i]), (floats, scale), (floats, before)
                    totals[i] = f.intrinsic(f"llvm.fma.v{d.lanes}f32", floats, *fma)
                    if not resident:
                        f.store(floats, totals[i], place, line)
            outer.next = totals if resident else []
        rescaled = row_scale is not None and not by_group
        for i in range(count) if resident or rescaled else ():
            place = f.at("%tile", i * line)
            value = outer.carried[i] if resident else f.load(floats, place, line)
            if row_scale and rescaled:
                value = f.v(f"fmul {floats} {value}, {row_scale(i // nv, 0)}")
            f.store(floats, value, place, line)
        f.finish()

    def _decoded(self, f: Function, word: str, step: int) -> str:
        """The values of codes `step` of a vector of words, as the instruction takes them."""
        n, d = self.nest, self.nest.dot
        i32, floats = vec(d.lanes, "i32"), vec(d.lanes, "float")
        values = [c - 16 if n.signed and c > 7 else c for c in range(16)]
        if n.floats:
            values = four_bit_floats(torch.device("cpu")).view(torch.float8_e4m3fn).float().tolist()
            if d.lanes != WIDE:
                return self._float(f, word, step)
        if d.lanes != WIDE:
            if n.signed:
                high = f.v(f"shl {i32} {word}, splat (i32 {28 - 4 * step})")
                code = f.v(f"ashr {i32} {high}, splat (i32 28)")
            else:
                code = f.v(f"and {i32} {f.v(f'lshr {i32} {word}, splat (i32 {4 * step})')}, splat (i32 15)")
            return f.v(f"sitofp {i32} {code} to {floats}")
        index = f.v(f"lshr {i32} {word}, splat (i32 {4 * step})") if step else word
        if n.by_pairs:  # of an index its low 5 bits count: what stands above a code does not
            pairs = vec(2 * d.lanes, "i16")
            bits = [torch.tensor(float(v)).bfloat16().view(torch.int16).item() for v in values]
            table = f"<{', '.join(f'i16 {b}' for b in (*bits, *bits))}>"
            found = f.intrinsic(
                "llvm.x86.avx512.permvar.hi.512", pairs, (pairs, table), (pairs, f.v(f"bitcast {i32} {index} to {pairs}"))
            )
            return f.v(f"bitcast {pairs} {found} to {d.operand}")
        table = f"<{', '.join(f'float {float(v):.1f}' for v in values)}>"
        return f.intrinsic("llvm.x86.avx512.permvar.sf.512", floats, (floats, table), (i32, index))

    def _float(self, f: Function, word: str, step: int) -> str:
        """The values of f4e2m1fn codes `step` of a vector of words. Twice a magnitude is a whole number below 16; shifting a
        word of eight of them looks it up."""
        lanes = self.nest.dot.lanes
        i32, floats = vec(lanes, "i32"), vec(lanes, "float")
        at = f.v(f"lshr {i32} {word}, splat (i32 {4 * step - 2})") if step else f.v(f"shl {i32} {word}, splat (i32 2)")
        shifted = f.v(f"lshr {i32} splat (i32 {TWICE - (1 << 32)}), {f.v(f'and {i32} {at}, splat (i32 28)')}")
        size = f.v(f"uitofp {i32} {f.v(f'and {i32} {shifted}, splat (i32 15)')} to {floats}")
        half = f.v(f"bitcast {floats} {f.v(f'fmul {floats} {size}, splat (float 0.5)')} to {i32}")
        high = f.v(f"shl {i32} {word}, splat (i32 {28 - 4 * step})")
        signed = f.v(f"or {i32} {half}, {f.v(f'and {i32} {high}, splat (i32 {-(1 << 31)})')}")
        return f.v(f"bitcast {i32} {signed} to {floats}")
