"""How the results of a Hopper gemm leave: worked out a piece of columns at a time, through shared memory by TMA, or straight to
addresses of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewright.candidates.triton._casts import in_memory
from tilewright.candidates.triton._emit import Emitter, Tile
from tilewright.candidates.triton._hopper_form import Form, Out
from tilewright.candidates.triton._text import Text
from tilewright.dtype import PRED
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param

NATIVE_FP8 = frozenset({"f8e4m3fn", "f8e5m2"})


class Brief(Emitter):
    """An emitter that takes the special function unit's own reciprocal and power, a bit less exact than Triton's in 24, and
    flushed to zero where those are below the normal numbers: what x / (1 + e^y) is then is below them as well."""

    def over(self, x: str, y: str) -> str:
        return self.text.v(f"{x} * {self._unit('rcp', y)}")

    def one_more(self, x: str, factor: str) -> str:
        power = self.text.v(f"{self.text.v(f'{x} * {factor}')} * {math.log2(math.e)!r}")
        return self.text.v(f"1.0 + {self._unit('ex2', power)}")

    def _unit(self, name: str, x: str) -> str:
        text = f'"{name}.approx.ftz.f32 $0, $1;", "=f,f"'
        return self.text.v(f"gl.inline_asm_elementwise({text}, [{x}], dtype=gl.float32, is_pure=True, pack=1)")


class Stores:
    """Writes what becomes of a tile.

    Args:
        form: of the kernel.
        pointer: what the kernel calls the memory of a source.
    """

    def __init__(self, form: Form, pointer: Callable[[Node], str]) -> None:
        self.form, self.pointer = form, pointer

    def _scope(self, t: Text, out: Out, j: int) -> Brief:
        """An emitter for piece j of a store."""
        f = self.form
        layout = f"L{out.columns}"
        own = t.v(f"row + gl.arange(0, {f.rows}, gl.SliceLayout(1, {layout}))")
        rows = t.v(f"b * M + {own}")
        columns = t.v(f"col + {j * out.columns} + gl.arange(0, {out.columns}, gl.SliceLayout(0, {layout}))")
        row_mask = None if f.rows_whole else t.v(f"{own} < M")
        column_mask = None if f.columns_whole else t.v(f"{columns} < N")
        tile = Tile(rows, columns, f.columns, row_mask=row_mask, column_mask=column_mask, acc=f"x{j}_{out.columns}")
        return Brief(t, tile, self.pointer, NATIVE_FP8)

    def _ahead(self, t: Text, ahead: dict[tuple[int, int], Brief], i: int, j: int) -> None:
        """Asks for what piece j of store i reads, before it is needed."""
        outs = self.form.outs
        if i == len(outs) or (i, j) in ahead:
            return
        emitter = ahead[i, j] = self._scope(t, outs[i], j)
        access = outs[i].access
        leaves = [n for n in access.views if isinstance(n.op, Param)]
        if self._always(outs[i]):
            emitter.values(leaves, access)

    def _always(self, out: Out) -> bool:
        """Every tile has a part in this store."""
        return out.access.columns_extent == self.form.columns

    def _stores(self, t: Text, ahead: dict[tuple[int, int], Brief]) -> None:
        f = self.form
        pieces = _Pieces(t, f)
        for i, out in enumerate(f.outs):
            count = f.tile_n // out.columns
            for j in range(count):
                following = (i, j + 1) if j + 1 < count else (i + 1, 0)
                self._ahead(t, ahead, i, j)
                self._ahead(t, ahead, *following)
                pieces.take(j, out.columns)
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
        kind = f"c{i}_desc"
        shape = [out.columns, f.rows] if view.across else [f.rows, out.columns]
        n = sum(f.tile_n // o.columns for o in f.outs[:i] if o.view) + j
        raw = f"c_bufs.index(g * {f.leaving} + {n % f.leaving})"
        flat = f"{raw}._reinterpret({kind}.dtype, {shape}, gl.NVMMASharedLayout.get_default_for({shape}, {kind}.dtype))"
        t.do(f"tma.store_wait({self._pending(n)})")
        t.do(f"{flat}{'.permute((1, 0))' if view.across else ''}.store(gl.convert_layout({value}, L{out.columns}))")
        t.do("fence_async_shared()")
        at = view.coordinates(f"{held}b", f"{held}row", f"({held}col + {j * out.columns - out.access.first})")
        boxed = f"{raw}._reinterpret({kind}.dtype, {kind}.block_type.shape, {kind}.layout)"
        t.do(f"tma.async_copy_shared_to_global({kind}, [{', '.join(at)}], {boxed})")

    def _pending(self, n: int) -> int:
        """How many pieces may still be on their way out while the n-th of a tile takes its place.

        Places alternate. The one before may be leaving; not so if it had the same place, as where an odd number makes a tile,
        or if it is not known which one was before, as where a tile has no part in some store.
        """
        f = self.form
        written = [o for o in f.outs if o.view]
        odd = sum(f.tile_n // o.columns for o in written) % 2 == 1
        return 0 if f.leaving == 1 or (n == 0 and odd) or not all(map(self._always, written)) else 1


class _Pieces:
    """The accumulator in pieces of columns, halved as often as it takes."""

    def __init__(self, t: Text, form: Form) -> None:
        self.t, self.form = t, form
        self._known = {(0, form.shape_n): "in_order(r)" if form.rhs.widened else "r"}
        self._taken = set[tuple[int, int]]()

    def take(self, j: int, columns: int) -> None:
        """Makes x{j}_{columns}."""
        if (j, columns) not in self._taken:
            self._taken.add((j, columns))
            trivial = "" if self.form.rhs.widened else ", assert_trivial=True"
            self.t.do(f"x{j}_{columns} = gl.convert_layout({self._half(j, columns)}, L{columns}{trivial})")

    def _half(self, j: int, columns: int) -> str:
        name = self._known.get((j, columns))
        if name is None:
            whole = self._half(j // 2, columns * 2)
            left, right = f"h{j // 2 * 2}_{columns}", f"h{j // 2 * 2 + 1}_{columns}"
            self.t.do(f"{left}, {right} = half({whole})")
            self._known[j // 2 * 2, columns], self._known[j // 2 * 2 + 1, columns] = left, right
            name = self._known[j, columns]
        return name
