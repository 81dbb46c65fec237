"""4-bit weights by 8-bit activations: codes are multiplied as they are, sums of a group are exact and scaled when complete.

Weights are kept as 0 to 15, 8 in a word, so that one mask gives each lane 4 neighbours along K; the instruction takes them for
signed or unsigned, whichever the activations leave it. With w the kept codes, z their zero point (8 for signed codes without
one), a the activations and y their zero point, a group's sum is

    sum((a - y)(w - z)) = sum(a w) - z sum(a) - y sum(w - z)

The last two sums are known before, and the accumulator starts from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.candidates.llvm.expressions.text import Function, Int, vec
from tilewright.candidates.llvm.expressions.vector import Columns, Vectors, check
from tilewright.candidates.llvm.gemm.dots import DOTS, Choice
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, rounded
from tilewright.candidates.llvm.w4.kernel import CODES, GroupedNest, GroupedWriter, Sides, packed_stream
from tilewright.dtype import F32, S8, S32, U8
from tilewright.hardware.target import Chip
from tilewright.ir.build import broadcast, convert, reshape
from tilewright.ir.graph import Node
from tilewright.ir.ops import Convert, Dequantize
from tilewright.lowering.access import Access, of_operand
from tilewright.schedule.candidate import Unsupported
from tilewright.sizes import round_up

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # where in a word each of 8 neighbours along K is kept
MOST_GROUP = S32.max // (255 * 15 * 4)


@dataclass(frozen=True)
class RowSide:
    """Scales or zero points of the rows of the left operand.

    Attributes:
        access: their addresses, rows by `columns`.
        columns: values of a row: 1, or one a group.
        group: elements of K that share a value.
    """

    access: Access
    columns: int
    group: int


@dataclass(frozen=True)
class Activations:
    """The left operand as codes: (codes - zero) * scale.

    Attributes:
        codes: the expression of the codes.
        scale, zero: scales and zero points; None for 1 and for 0.
    """

    codes: Node
    scale: RowSide | None
    zero: RowSide | None

    @property
    def group(self) -> int:
        """Elements of K that share scale and zero point; 0 if all of a row do."""
        return max((s.group for s in (self.scale, self.zero) if s is not None and s.columns > 1), default=0)

    @property
    def sides(self) -> tuple[Access, ...]:
        return tuple(s.access for s in (self.scale, self.zero) if s is not None)


def activations(root: Node) -> Activations:
    """The codes, scales and zero points that the left operand is made of.

    Raises:
        Unsupported: it is not 8-bit codes, or their scales vary in another way than by row and group.
    """
    op = root.op
    if not isinstance(op, (Convert, Dequantize)) or root.src[0].dtype not in (S8, U8):
        raise Unsupported("the left operand is not 8-bit codes")
    if root.dtype is not F32:
        raise Unsupported(f"the left operand is rounded to {root.dtype} once it is scaled")
    block = op.block if isinstance(op, Dequantize) else None
    if block is not None and any(extent != 1 for extent in block[:-1]):
        raise Unsupported("the left operand's scales are given for several rows")

    def side(value: Node) -> RowSide:
        check((value,))
        shape = value.shape
        if block is None:
            if shape[-1:] not in ((), (1,)):
                raise Unsupported("the left operand's scale varies along K")
            value = broadcast(reshape(value, (1,) * (len(root.shape) - len(shape)) + shape), (*root.shape[:-1], 1))
        return RowSide(of_operand(value, columns_last=True), value.shape[-1], group)

    group = root.shape[-1] if block is None else block[-1]
    codes, *given = root.src
    sides = [side(convert(s, dtype)) for s, dtype in zip(given, (F32, S32), strict=False)]
    return Activations(codes, sides[0] if sides else None, sides[1] if len(sides) > 1 else None)


def chosen(codes: Node, chip: Chip) -> Choice:
    """The chip's instruction for 8-bit activations by codes 0 to 15.

    Raises:
        Unsupported: it has none that takes them four at a time.
    """
    for unit in chip.units:
        for dot in DOTS.get(unit.instruction, ()):
            if dot.lhs is codes.dtype and dot.acc is S32 and dot.k == 4 and dot.tile == 1:
                return Choice(dot)
    raise Unsupported(f"{chip.name} names no instruction for {codes.dtype} codes with 4-bit weights")


@dataclass(frozen=True)
class CodesNest(GroupedNest):
    """A nest of codes by codes. A packed row of the left operand is its codes and then, 4 bytes each, the sums of each group
    and its scales and zero points.

    Attributes:
        scale, zero: scales and zero points of the left operand; None for 1 and 0.
    """

    scale: RowSide | None = None
    zero: RowSide | None = None

    @property
    def words(self) -> int:
        return 1

    @property
    def side_rows(self) -> int:
        return 1 + self.zeros + (self.zero is not None)

    @property
    def summed(self) -> bool:
        """Sums of the left operand's codes are needed."""
        return self.signed or self.zeros

    @property
    def group_sums_at(self) -> int:
        """The offset of the sums in a packed row, in bytes; those of scales and zero points follow."""
        return rounded(self.K)

    @property
    def scale_at(self) -> int:
        return self.group_sums_at + (rounded(4 * self.group_count) if self.summed else 0)

    @property
    def zero_at(self) -> int:
        return self.scale_at + (0 if self.scale is None else rounded(4 * self.scale.columns))

    @property
    def lhs_stride(self) -> int:
        return self.zero_at + (0 if self.zero is None else rounded(4 * self.zero.columns)) + CACHE_LINE

    def packed(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """See `GroupedNest.packed`. Behind the scales are the zero points, negative, and the negative sums of the codes."""
        above = 8 if self.signed else 0
        kept = codes.to(torch.int32) + above
        sides = [scales.float().contiguous()]
        if zeros is not None:
            sides.append(-(zeros.to(torch.int32) + above))
        if self.zero is not None:
            padded = torch.zeros(len(codes), self.group_count * self.group, dtype=torch.int32)
            padded[:, : self.K] = codes
            held = torch.full((len(codes), self.group_count), self.group, dtype=torch.int32)
            held[:, -1] = self.K - (self.group_count - 1) * self.group
            total = padded.view(-1, self.group_count, self.group).sum(-1, dtype=torch.int32)
            sides.append(-(total if zeros is None else total - held * zeros.to(torch.int32)))
        return packed_stream(self, kept, sides, ORDER)


class CodesWriter(GroupedWriter):
    """Writes a `CodesNest`: its left operand is always packed, and codes are multiplied by codes."""

    nest: CodesNest  # pyright: ignore[reportIncompatibleVariableOverride]

    # -- the left operand

    @property
    def _lhs_tasks(self) -> int:
        return self.nest.M

    def _pack_lhs(self) -> None:
        """pack_lhs(arguments, thread): rows of the left operand, a task each."""
        n = self.nest
        f = self._phase("pack_lhs")
        copies = self._scratch(f, 0)
        with f.tasks(self._counter(f, 1), self._lhs_tasks, self._finished(f)) as row:
            panel, inside = f.div(row, n.blocks.mr), f.rem(row, n.blocks.mr)
            to = f.at(copies, f.add(f.mul(panel, n.lhs_panel_bytes), f.mul(inside, n.lhs_stride)))
            self._each(f, n.lhs, n.K, n.vector, row, to, 1)
            if n.summed:
                self._pack_sums(f, to)
            for side, at in ((n.scale, n.scale_at), (n.zero, n.zero_at)):
                if side is not None:
                    self._each(f, side.access, side.columns, n.dot.lanes, row, f.at(to, at), 4)
        f.finish()

    def _each(self, f: Function, access: Access, count: int, lanes: int, row: str, to: str, size: int) -> None:
        """Store a row's `count` values, of `size` bytes each, one after the other; zeros up to a whole vector."""
        sources = self._sources(f, access)
        type_ = vec(lanes, f"i{8 * size}")

        def some(column: Int, mask: str | None) -> None:
            value = Vectors(f, access, lanes, Columns(column, True, mask), sources).row(row)
            if access.root.dtype is F32:
                value = f.v(f"bitcast {vec(lanes, 'float')} {value} to {type_}")
            if mask is not None:
                value = f.v(f"select {vec(lanes, 'i1')} {mask}, {type_} {value}, {type_} zeroinitializer")
            f.store(type_, value, f.at(to, f.mul(column, size)), 4)

        whole = count // lanes * lanes
        if whole:
            with f.loop(0, whole, lanes) as loop:
                some(loop.index, None)
        if count % lanes:
            some(whole, f.first_lanes(lanes, count - whole))

    def _pack_sums(self, f: Function, to: str) -> None:
        """Store each group's sum of a row's packed codes; times -8 where the accumulator starts from that alone."""
        n, d = self.nest, self.nest.dot
        step = next(s for s in (n.vector, 32, 16, 8) if s <= n.vector and n.group % s == 0)
        by_dot = step == n.vector
        type_, codes = d.accumulator if by_dot else vec(step, "i32"), vec(step, "i8")
        padded = round_up(n.K, n.vector)
        grow = "sext" if d.lhs is S8 else "zext"
        with f.loop(0, n.group_count) as group:
            base = f.mul(group.index, n.group)
            end = f.min(f.add(base, n.group), padded)
            with f.loop(base, end, step, [(type_, "zeroinitializer")]) as loop:
                some = f.load(codes, f.at(to, loop.index), 4)
                if by_dot:
                    loop.next = [d.emit(f, loop.carried[0], some, "splat (i8 1)")]
                else:
                    loop.next = [f.v(f"add {type_} {loop.carried[0]}, {f.v(f'{grow} {codes} {some} to {type_}')}")]
            count = d.lanes if by_dot else step
            total = f.intrinsic(f"llvm.vector.reduce.add.v{count}i32", "i32", (type_, loop.carried[0]))
            if not n.zeros:
                total = f.v(f"mul i32 {total}, -8")
            f.store("i32", total, f.at(to, f.add(f.mul(group.index, 4), n.group_sums_at)), 4)

    # -- the kernel

    def _micro_kernel(self, rows: int, *, fresh: bool) -> None:
        """tile of the result = lhs micro-panel x weight panel.

        Where there are no registers for totals beside sums, they stay in the tile.
        """
        assert fresh, "K is never cut"
        n, d = self.nest, self.nest.dot
        f, i32, nv, line = self._micro_function(rows), vec(d.lanes, "i32"), n.nv, d.lanes * 4

        def spread(type_: str, m: int, at: Int) -> str:
            """4 bytes of a packed row, in every lane."""
            return f.splat(d.lanes, type_, f.load(type_, f.at(f.at("%a", at), m * n.lhs_stride), 4))

        def of(side: RowSide | None, at: int, group: Int, type_: str, m: int) -> str:
            assert side is not None
            place = f.mul(f.div(group, side.group // n.group), 4) if side.columns > 1 else 0
            return spread(type_, m, f.add(place, at))

        def start(m: int, j: int, group: Int, sides: Sides) -> str:
            value = "zeroinitializer"
            if n.summed:
                value = spread("i32", m, f.add(f.mul(group, 4), n.group_sums_at))
                if n.zeros:
                    value = f.v(f"mul {i32} {value}, {sides[1][j]}")
            if n.zero is not None:
                shifted = f.v(f"mul {i32} {of(n.zero, n.zero_at, group, 'i32', m)}, {sides[-1][j]}")
                value = f.v(f"add {i32} {value}, {shifted}") if n.summed else shifted
            return value

        def products(index: Int, group: str, base: Int, _: Sides, acc: Sequence[str]) -> list[str]:
            at, a = f.at(group, f.mul(f.add(index, n.side_rows), n.nr * 4)), f.add(base, f.mul(index, CODES))
            after = list(acc)
            loaded = [f.load(i32, f.at(at, j * line), line) for j in range(nv)]
            n.prefetch(f, at)
            for half in range(2):
                shifted = [f.v(f"lshr {i32} {w}, splat (i32 4)") if half else w for w in loaded]
                masked = [f.v(f"and {i32} {w}, splat (i32 252645135)") for w in shifted]
                right = [f.v(f"bitcast {i32} {w} to {d.operand}") for w in masked]
                for m in range(rows):
                    left = f.v(f"bitcast {i32} {spread('i32', m, f.add(a, 4 * half))} to {d.operand}")
                    for j in range(nv):
                        after[m * nv + j] = d.emit(f, after[m * nv + j], left, right[j])
            return after

        def first(group: Int, sides: Sides) -> list[str]:
            return [start(m, j, group, sides) for m in range(rows) for j in range(nv)]

        def row_scale(m: int, group: Int) -> str:
            return of(n.scale, n.scale_at, group, "float", m)

        resident = 2 * rows * nv + 3 * nv + 2 <= d.registers
        by_group = n.scale is not None and n.scale.columns > 1
        self._sum_groups(f, rows, resident, products, first, row_scale if n.scale else None, by_group=by_group)

    def _accumulated(self, vectors: Vectors, acc: str) -> str:
        return vectors.f.v(f"bitcast {vec(vectors.lanes, 'i32')} {acc} to {vec(vectors.lanes, 'float')}")
