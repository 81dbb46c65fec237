"""How tiles of the operands of a Hopper gemm come: which tiles and steps along K are a block's, and what the warp does that
fills the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.candidates.triton.expressions.text import Number, Text
from tilewright.candidates.triton.hopper.gemm import split
from tilewright.candidates.triton.hopper.gemm.form import Form, Side
from tilewright.candidates.triton.hopper.gemm.stores import Stores
from tilewright.candidates.triton.hopper.w4 import stage
from tilewright.candidates.triton.hopper.w4.stage import Coded
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param


class Loads(Stores):
    """Writes what fills the ring.

    Args:
        form: of the kernel.
        pointer: what the kernel calls the memory of a source, and of a store that has no TMA view.
    """

    def __init__(self, form: Form, pointer: Callable[[Node], str]) -> None:
        super().__init__(form, pointer)
        self.numbers: dict[str, Number] = {}
        leaves = {n for o in form.outs for n in toposort((o.access.root,)) if isinstance(n.op, Param)}
        leaves -= {o.fetched[0] for o in form.outs if o.fetched} | {form.second}
        names = {pointer(n) for n in leaves} | {f"r{i}" for i, o in enumerate(form.outs) if o.view is None}
        if form.blocks:
            names |= {f"p{form.blocks.lhs}", f"p{form.blocks.rhs}"}
        self.pointers = sorted(names, key=lambda n: (n[0], int(n[1:])))
        self.descriptors = [
            *(["b_desc", *form.coded.descriptors] if form.coded else ["a_desc", "b_desc"]),
            *(f"c{i}_desc" for i, o in enumerate(form.outs) if o.view),
        ]
        self.descriptors += [f"d{i}_desc" for i, o in enumerate(form.outs) if o.fetched]
        self.scratch = ["partial", "arrived"] if form.streamed else []
        self.extents = ["B", "M", "N", "K", *(["D"] if form.streamed else [])]

    @property
    def _operands(self) -> int:
        """That TMA brings."""
        return 1 + len(self.form.coded.descriptors) if self.form.coded else 2

    @property
    def _barriers(self) -> list[str]:
        own = split.BARRIERS if self.form.split > 1 else ()
        return ["ready", "empty", *["fetched"] * self.form.fetches, *["turns"] * (self.form.pingpong or self._turns), *own]

    # -- what all warps need

    def _tiles(self, t: Text) -> None:
        f = self.form
        t.do(f"nm = gl.cdiv(M, {f.tile_m})")
        t.do(f"nn = gl.cdiv(N, {f.width})")
        t.do(f"nk = gl.cdiv(K, {f.tile_k})")
        # A pair of blocks has two tiles, one below the other.
        t.do(f"tiles = {'B * gl.cdiv(nm, 2) * nn' if f.paired else 'B * nm * nn'}")
        together = f" // {f.cluster}" if f.cluster > 1 else ""
        t.do(f"c = gl.program_id(0){together}")
        t.do(f"G = gl.num_programs(0){together}")
        if f.split > 1:
            t.do(f"rank = gl.program_id(0) % {f.split}")
            t.do(f"k0 = rank * nk // {f.split}")
            t.do(f"nk = (rank + 1) * nk // {f.split} - k0")
        if f.streamed:
            t.do("total = (tiles - D) * nk")
            t.do("begin = c * total // G")
            t.do("end = (c + 1) * total // G")
            t.do("whole = gl.maximum(gl.cdiv(D - c, G), 0)")
            t.do("shares = gl.where(end > begin, (end - 1) // nk - begin // nk + 1, 0)")

    def _each_tile(self, *, pingpong: bool = False) -> str:
        if self.form.streamed:
            return "for j in range(whole + shares):"
        return "for t in range(c + g * G, tiles, 2 * G):" if pingpong else "for t in range(c, tiles, G):"

    @property
    def _steps(self) -> str:
        """Along K, of a tile."""
        return "k0, k1" if self.form.streamed else "nk"

    def _which(self, t: Text) -> None:
        """Where a tile lies, and from which step along K to which it is a block's."""
        f = self.form
        if f.streamed:
            t.do("t, k0, k1 = share(j - whole, D, begin, end, nk)")
            t.do("t = gl.where(j < whole, c + j * G, t)")
            t.do("k0 = gl.where(j < whole, 0, k0)")
            t.do("k1 = gl.where(j < whole, nk, k1)")
        if f.paired:
            t.do(f"b, pm, pn = locate(t, gl.cdiv(nm, 2), nn, {max(f.group_m // 2, 1)})")
            t.do("pm = pm * 2 + gl.program_id(0) % 2")
        else:
            t.do(f"b, pm, pn = locate(t, nm, nn, {f.group_m})")

    # -- the warp that loads

    @property
    def _left(self) -> list[str]:
        """Where the left operand comes to."""
        return self.form.coded.buffers if self.form.coded else ["a_bufs"]

    @property
    def _loads(self) -> list[str]:
        return [*self.descriptors[: self._operands], *self._left, "b_bufs", "ready", "empty"]

    def _load(self) -> str:
        f, t = self.form, Text("gl")
        if f.chained:
            t.do("gdc_launch_dependents()")
            if not f.coded:
                t.do("gdc_wait()")
        self._tiles(t)
        if f.coded:
            self._first_words(t, f.coded)
        t.do("s = 0")
        t.do("phase = 0")
        if f.paired:
            t.do("r = gl.program_id(0) % 2")
        with t.block(self._each_tile()):
            self._which(t)
            with t.block(f"for k in range({self._steps}):"):
                t.do("mbarrier.wait(empty.index(s), phase ^ 1)")
                t.do(f"mbarrier.expect(ready.index(s), {f.stage_bytes})")
                if f.coded:
                    with t.block("if asked >= early:"):
                        stage.copies(t, f.coded, f.tile_m)
                    t.do("asked += 1")
                    self._load_rhs(t)
                for g in range(0 if f.coded else f.parts):
                    at = f.lhs.at("b", "M", f"pm * {f.tile_m} + {g * f.rows}", self._along_k)
                    buffer = self._as_box(f"a_bufs.index(s * {f.parts} + {g})", f.lhs, f.rows, "a_desc")
                    t.do(f"tma.async_copy_global_to_shared(a_desc, {at}, ready.index(s), {buffer})")
                    if g == 0:
                        self._load_rhs(t)
                t.do(f"s, phase = advance(s, phase, {f.num_stages})")
        if f.paired:  # a block stays until the other one has read all that it was sent, and has said so
            with t.block(f"for k in gl.static_range({f.num_stages}):"):
                t.do("mbarrier.wait(empty.index(s), phase ^ 1)")
                t.do(f"s, phase = advance(s, phase, {f.num_stages})")
        return self._function("load", [*self._loads, *self.extents], t)

    def _first_words(self, t: Text, coded: Coded) -> None:
        """Words of a block's first steps: constants, asked for before the kernel ahead has ended."""
        f = self.form
        t.do("j = 0" if f.streamed else "t = c")
        self._which(t)
        first, steps, some = ("k0", "k1 - k0", "whole + shares > 0") if f.streamed else ("0", "nk", "c < tiles")
        t.do(f"early = gl.where({some}, gl.minimum({f.num_stages}, {steps}), 0)")
        t.do("asked = 0")
        with t.block("for s in range(early):"):
            t.do(f"k = {first} + s")
            stage.copies(t, coded, f.tile_m)
        if f.chained:
            t.do("gdc_wait()")

    def _load_rhs(self, t: Text) -> None:
        f = self.form
        own = f.units // 2 if f.paired else f.units
        for i in range(own):
            unit = f"r * {own} + {i}" if f.paired else str(i)
            extent, row = "N", f"pn * {f.tile_n} + ({unit}) * {f.unit}"
            if f.second is not None:
                half = "r" if f.paired else str(i // (f.units // 2))
                extent, row = "2 * N", f"{half} * N + pn * {f.width} + {i % (f.units // 2) * f.unit}"
            at = f.rhs.at("b", extent, row, self._along_k)
            buffer = self._as_box(f"b_bufs.index(s * {f.units} + {unit})", f.rhs, f.unit, "b_desc")
            t.do(f"tma.async_copy_global_to_shared(b_desc, {at}, ready.index(s), {buffer})")

    @property
    def _along_k(self) -> str:
        """The element at which a step begins."""
        return f"{'(k0 + k)' if self.form.split > 1 else 'k'} * {self.form.tile_k}"

    @staticmethod
    def _as_box(buffer: str, side: Side, rows: int, descriptor: str) -> str:
        box = side.box(rows, 0)
        if len(box) == 2:
            return buffer
        return f"{buffer}._reinterpret({descriptor}.dtype, {descriptor}.block_type.shape, {descriptor}.layout)"

    @staticmethod
    def _function(name: str, arguments: Sequence[str], t: Text) -> str:
        return f"@gluon.jit\ndef {name}({', '.join(arguments)}):\n{t}"
