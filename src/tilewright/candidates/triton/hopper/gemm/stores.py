"""How the results of a Hopper gemm leave: worked out a piece of columns at a time, through shared memory by TMA, or straight to
addresses of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.candidates.triton.expressions.casts import in_memory
from tilewright.candidates.triton.expressions.emit import Tile
from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.brief import Brief
from tilewright.candidates.triton.hopper.gemm.alike import alike, leaves
from tilewright.candidates.triton.hopper.gemm.form import Form, Out, size
from tilewright.candidates.triton.hopper.w4 import bytes as in_bytes
from tilewright.dtype import PRED
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param


class Stores:
    """Writes what becomes of a tile.

    Args:
        form: of the kernel.
        pointer: what the kernel calls the memory of a source.
    """

    def __init__(self, form: Form, pointer: Callable[[Node], str]) -> None:
        self.form, self.given, self.pointer = form, pointer, pointer
        self.alike = alike(form.outs, form.tile_n)
        self.outs = form.outs[:1] if self.alike else form.outs  # of which there is code
        if self.alike:
            chosen = {n: f"s{k}" for k, n in enumerate(leaves(form.outs[0], form.second))}
            self.pointer = chosen.__getitem__

    @property
    def _sums(self) -> list[str]:
        """What sums of a tile are called, parts of the columns each."""
        f = self.form
        return in_bytes.parts(f.shape_n) if f.coded and f.coded.deep > 1 else ["r"]

    @property
    def _turns(self) -> bool:
        """Warpgroups ask for products of a group of codes one after the other."""
        f = self.form
        return f.coded is not None and f.coded.deep > 1 and in_bytes.in_turns(f.coded, f.shape_n)

    def _choose(self, t: Text) -> None:
        """Which of stores that are alike a tile belongs to: where its leaves lie, and its first column there."""
        if not self.alike:
            return
        (first, *others), second = self.form.outs, self.form.second
        t.do(f"part = col // {first.access.columns_extent}")
        t.do(f"own = col - part * {first.access.columns_extent}")
        for k, leaf in enumerate(leaves(first, second)):
            t.do(f"s{k} = {self.given(leaf)}")
        for i, other in enumerate(others):
            with t.block(f"if part == {i + 1}:"):
                for k, (leaf, its) in enumerate(zip(leaves(other, second), leaves(first, second), strict=True)):
                    further = other.access.of_leaf(leaf).offset - first.access.of_leaf(its).offset
                    t.do(f"s{k} = {self.given(leaf)}{f' + {further}' if further else ''}")

    def _scope(self, t: Text, out: Out, i: int, j: int) -> Brief:
        """An emitter for piece j of store i."""
        f = self.form
        near = {} if out.fetched is None else {out.fetched[0]: f"d{j}"}
        second = {} if f.second is None else {f.second: f"x{f.width // out.columns + j}_{out.columns}"}
        layout = f"L{out.columns}"
        own = t.v(f"row + gl.arange(0, {f.rows}, gl.SliceLayout(1, {layout}))")
        rows = t.v(f"b * M + {own}")
        first = f"{'own' if self.alike else 'col'} + {j * out.columns}"
        columns = t.v(f"{first} + gl.arange(0, {out.columns}, gl.SliceLayout(0, {layout}))")
        row_mask = None if f.rows_whole else t.v(f"{own} < M")
        column_mask = None if f.columns_whole else t.v(f"{columns} < N")
        width = out.access.columns_extent if self.alike else f.columns
        tile = Tile(rows, columns, width, row_mask=row_mask, column_mask=column_mask, acc=f"x{j}_{out.columns}", near=second)
        return Brief(t, tile, self.pointer, near)

    def _ahead(self, t: Text, ahead: dict[tuple[int, int], Brief], i: int, j: int) -> None:
        """Asks for what piece j of store i reads, before it is needed."""
        outs = self.outs
        if i == len(outs) or (i, j) in ahead:
            return
        emitter = ahead[i, j] = self._scope(t, outs[i], i, j)
        access, fetched = outs[i].access, outs[i].fetched
        known = {self.form.second, fetched and fetched[0]}
        leaves = [n for n in access.views if isinstance(n.op, Param) and n not in known]
        if self._always(outs[i]):
            emitter.values(leaves, access)

    def _always(self, out: Out) -> bool:
        """Every tile has a part in this store."""
        return self.alike or out.access.columns_extent == self.form.columns

    def _stores(self, t: Text, ahead: dict[tuple[int, int], Brief]) -> None:
        f = self.form
        pieces = Pieces(t, f.own_shape_n, self._sums, widened=f.rhs.widened)
        for i, out in enumerate(self.outs):
            count = f.own_n // out.columns
            for j in range(count):
                following = (i, j + 1) if j + 1 < count else (i + 1, 0)
                self._ahead(t, ahead, i, j)
                self._ahead(t, ahead, *following)
                if f.fetches and j >= f.leaving:
                    self._fetch(t, j)
                    self._fetched(t)
                if f.fetches:
                    t.do(f"d{j} = {self._place(out, i, j, 'd')}.load(L{out.columns})")
                for half in range(f.halves):
                    pieces.take(half * count + j, out.columns)
                if self._always(out):
                    self._store(t, ahead[i, j], out, i, j)
                else:
                    first, after = out.access.first, out.access.first + out.access.columns_extent
                    at = f"col + {j * out.columns}"
                    with t.block(f"if ({at} + {out.columns} > {first}) & ({at} < {after}):"):
                        self._store(t, ahead[i, j], out, i, j)

    def _store(self, t: Text, emitter: Brief, out: Out, i: int, j: int) -> None:
        f, access = self.form, out.access
        if f.hold:
            t.do(f"w{j} = pack({emitter.value(access)})")
            if j == f.pieces - 1:
                t.do("held_b, held_row, held_col = b, row, col")
        elif out.view is None:
            emitter.store(access, f"r{i}")
        else:
            value = emitter.value(access)
            if access.root.dtype is PRED:
                value = t.v(f"{value}.to(gl.uint8)")
            self._write(t, out, i, j, value, "")

    def _unpacked(self, words: str) -> str:
        """The value of the one store that waited in registers."""
        return f"unpack({words}, gl.{in_memory(self.form.outs[0].access.root.dtype)})"

    def _write(self, t: Text, out: Out, i: int, j: int, value: str, held: str) -> None:
        """A piece through shared memory to where TMA writes it."""
        f, view = self.form, out.view
        assert view is not None
        if not f.fetches:  # else its place was free before the operand came
            t.do(f"tma.store_wait({self._pending(self._number(out, i, j))})")
        t.do(f"{self._place(out, i, j, 'c')}.store(gl.convert_layout({value}, L{out.columns}))")
        t.do("fence_async_shared()")
        column = "own" if self.alike else f"{held}col"
        at = ", ".join(view.coordinates(f"{held}b", f"{held}row", f"({column} + {j * out.columns - out.access.first})"))
        for k in range(len(f.outs)) if self.alike else (i,):
            copy = f"tma.async_copy_shared_to_global(c{k}_desc, [{at}], {self._boxed(out, i, j, f'c{k}_desc')})"
            t.do(f"if part == {k}: {copy}" if self.alike else copy)

    def _number(self, out: Out, i: int, j: int) -> int:
        """Of piece j of store i among those of a tile."""
        return sum(self.form.own_n // o.columns for o in self.outs[:i] if o.view) + j

    def _raw(self, out: Out, i: int, j: int) -> str:
        """Where a piece stands in shared memory."""
        f = self.form
        return f"c_bufs.index(g * {f.leaving} + {self._number(out, i, j) % f.leaving})"

    def _place(self, out: Out, i: int, j: int, what: str) -> str:
        """The same as rows and columns: of the result ("c"), or of the operand that comes by the same place ("d")."""
        assert out.view is not None
        across, kind = out.view.across, f"{what}{i}_desc"
        shape = [out.columns, self.form.rows] if across else [self.form.rows, out.columns]
        layout = f"gl.NVMMASharedLayout.get_default_for({shape}, {kind}.dtype)"
        return f"{self._raw(out, i, j)}._reinterpret({kind}.dtype, {shape}, {layout}){'.permute((1, 0))' if across else ''}"

    def _boxed(self, out: Out, i: int, j: int, descriptor: str) -> str:
        """The same as a descriptor's box."""
        return f"{self._raw(out, i, j)}._reinterpret({descriptor}.dtype, {descriptor}.block_type.shape, {descriptor}.layout)"

    def _fetch(self, t: Text, first: int) -> None:
        """Has TMA bring what pieces of a tile read, from a first one on as many as there is room for, once that is free."""
        f = self.form
        out, descriptor = f.outs[0], "d0_desc"
        assert out.fetched is not None
        pieces = range(first, min(first + (1 if first else f.leaving), f.pieces))
        t.do(f"tma.store_wait({f.leaving - 1 if first else 0})")
        t.do(f"mbarrier.expect(fetched.index(g), {f.rows * out.columns * size(out.access.root.dtype) * len(pieces)})")
        for j in pieces:
            at = out.fetched[1].coordinates("b", "row", f"(col + {j * out.columns})")
            box = self._boxed(out, 0, j, descriptor)
            t.do(f"tma.async_copy_global_to_shared({descriptor}, [{', '.join(at)}], fetched.index(g), {box})")

    def _fetched(self, t: Text) -> None:
        """Waits for them."""
        t.do("mbarrier.wait(fetched.index(g), came)")
        t.do("came = came ^ 1")

    def _pending(self, n: int) -> int:
        """How many pieces may still be on their way out while the n-th of a tile takes its place.

        Places alternate. The one before may be leaving; not so if it had the same place, as where an odd number makes a tile,
        or if it is not known which one was before, as where a tile has no part in some store.
        """
        f = self.form
        written = [o for o in self.outs if o.view]
        odd = sum(f.own_n // o.columns for o in written) % 2 == 1
        return 0 if f.leaving == 1 or (n == 0 and odd) or not all(map(self._always, written)) else 1


class Pieces:
    """Sums in pieces of columns, halved as often as it takes.

    Args:
        t: the text.
        columns: of all, a power of two.
        parts: what they are called.
        widened: they come as eight neighbours a thread.
    """

    def __init__(self, t: Text, columns: int, parts: Sequence[str] = ("r",), *, widened: bool) -> None:
        self.t, self.widened = t, widened
        self._known = {(i, columns // len(parts)): f"in_order({r})" if widened else r for i, r in enumerate(parts)}
        self._taken = set[tuple[int, int]]()

    def take(self, j: int, columns: int, layout: str = "") -> str:
        """Makes x{j}_{columns}, and gives that name."""
        name = f"x{j}_{columns}"
        if (j, columns) not in self._taken:
            self._taken.add((j, columns))
            trivial = "" if self.widened else ", assert_trivial=True"
            self.t.do(f"{name} = gl.convert_layout({self._half(j, columns)}, {layout or f'L{columns}'}{trivial})")
        return name

    def _half(self, j: int, columns: int) -> str:
        name = self._known.get((j, columns))
        if name is None:
            whole = self._half(j // 2, columns * 2)
            left, right = f"h{j // 2 * 2}_{columns}", f"h{j // 2 * 2 + 1}_{columns}"
            self.t.do(f"{left}, {right} = half({whole})")
            self._known[j // 2 * 2, columns], self._known[j // 2 * 2 + 1, columns] = left, right
            name = self._known[j, columns]
        return name
