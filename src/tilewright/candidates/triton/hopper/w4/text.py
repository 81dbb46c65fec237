"""The text of a gemm of few rows with weights of few bits, in Gluon, one element of a tensor to a thread.

A block owns 16 rows of the weights for each of its row warps and tiles, and a part of K; blocks that share the rows form a
cluster. Weights go straight to registers, as many loads under way as are to be; the other operand lies in shared memory, 64
columns (128 bytes) a row, swizzled as `wgmma` and `ldmatrix` want it. Sums of a block's warps meet in shared memory, those of a
cluster's blocks in the memory of the block that finishes them: in the same order on every run.

What depends on constants alone is asked for before the kernel waits for the one before it (programmatic dependent launch).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

from tilewright.candidates.triton.expressions.emit import Tile
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.hopper.fast_math import FastMath
from tilewright.candidates.triton.hopper.w4 import moves
from tilewright.candidates.triton.hopper.w4.form import BARRIER_AT, Form, Point
from tilewright.candidates.triton.hopper.w4.loads import Rolled, Stream, of_codes, of_rows
from tilewright.candidates.triton.hopper.w4.other import Other
from tilewright.candidates.triton.hopper.w4.statements import Statements
from tilewright.candidates.triton.runtime.module import GLUON_IMPORTS
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param


class Writer:
    """Writes a form as a module's text, with the kernel `gemm`.

    Args:
        form: of the kernel.
        pointer: what the kernel calls the memory of a source.
    """

    def __init__(self, form: Form, pointer: Callable[[Node], str]) -> None:
        self.form, self.pointer = form, pointer
        leaves = {n for a in form.plan.stores for n in toposort((a.root,)) if isinstance(n.op, Param)} - {form.plan.second}
        self.sides = sorted({pointer(n) for n in leaves}, key=lambda n: int(n[1:]))
        self.given = ["x", "codes", "scales", *(["zeros"] if form.plan.weights.zero is not None else [])]
        self.outs = [f"o{i}" for i in range(len(form.plan.stores))]
        self.text = Text("gl")
        self.say = Statements(self.text)

    @property
    def arguments(self) -> list[str]:
        """Of the kernel, but for numbers."""
        return [*self.given, *self.sides, *self.outs]

    def write(self) -> Written:
        """The module."""
        f, p, t = self.form, self.form.point, self.text
        self._place()
        if f.again:
            self._once()
            with t.block(f"for row_tile in range(cluster, {f.row_tiles}, {p.clusters}):"):
                self._tile()
                t.do("count += 1")
        else:
            t.do("row_tile = cluster")
            self._tile()
        t.do("room._keep_alive()")  # it is addressed by hand
        head = f'    """clusters of {p.cluster}, {f.columns} rows"""'
        body = f"@gluon.jit\ndef gemm({', '.join([*self.arguments, *t.numbers])}):\n{head}\n{t}"
        return Written(f"{GLUON_IMPORTS}\n{self.say.constants()}\n\n\n{body}\n", t.numbers)

    # -- who does what

    def _place(self) -> None:
        f, p, t = self.form, self.form.point, self.text
        w = p.warps
        t.do(f"LANES: gl.constexpr = gl.BlockedLayout([1], [32], [{w}], [0])")
        words = f.shared_bytes // 512
        t.do(f"room = gl.allocate_shared_memory(gl.int32, [{words}, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))")
        t.do("room.index(0).store(gl.zeros([128], gl.int32, LANES))")  # else there is none
        t.do(f"tid = gl.arange(0, {32 * w}, LANES)")
        (base,) = self.say.some(moves.BASE, "int32", 1, "tid")
        t.do(f"base = {base}")
        t.do("lane = tid % 32")
        t.do("warp = tid // 32")
        t.do(f"row_warp = warp % {p.row_warps}")
        t.do(f"k_warp = warp // {p.row_warps}")
        t.do(f"cluster = gl.program_id(0) // {p.cluster}")
        t.do(f"part = gl.program_id(0) % {p.cluster}")
        if p.cluster > 1:
            self.say.do(moves.BARRIERS, f"base + {BARRIER_AT}", "(tid == 0).to(gl.int32)")
            for i in range(2 if f.again else 1):
                self._expect(f"base + {BARRIER_AT + 8 * i}", "tid")
            self.say.do(moves.ARRIVE, "tid")
        t.do(f"first = (part * {p.k_warps} + k_warp) * {p.depth}")
        t.do(f"zero = gl.zeros([{32 * w}], gl.float32, LANES)")
        self.product = f.product
        self.other = Other(f, self.say)
        self.rows = rows = {"scales": self.product.scale_words}
        if f.plan.weights.zero is not None:
            rows["zeros"] = self.product.subs
        self.rolled = Rolled(f, rows, self.say.assign, self.say.do) if p.loop else None
        if not self.rolled:
            self.codes = of_codes(f, self.say.assign)
            self.beside = [of_rows(name, f, each, self.say.assign) for name, each in rows.items()]

    def _expect(self, barrier: str, thread: str) -> None:
        self.say.do(moves.EXPECT, barrier, f"({thread} == 0).to(gl.int32)", f"{thread} * 0 + {self.form.sums * 4}")

    def _bases(self, row_tile: str, name: str) -> None:
        """Where the words of a warp's row tile begin."""
        f, p, t = self.form, self.form.point, self.text
        # Which 16 rows a warp's first tile has; others follow it, with wgmma those of four warps at a time.
        t.do(f"sixteen = ({row_tile}) * {p.out_tile // 16} + row_warp * {1 if f.spread else p.tiles}")
        if f.row_tiles * p.out_tile > f.plan.packed_rows:  # rows past those that are packed are the last ones again
            assert p.tiles == 1 or not f.spread
            t.do(f"sixteen = gl.minimum(sixteen, {f.plan.packed_rows // 16 - p.tiles})")
        block = 128 * f.code_loads
        first = "first" if f.even else "0"
        within = f"(sixteen // 4 * {f.blocks} + {first}) * {4 * block} + sixteen % 4 * {block} + lane * 4"
        t.do(f"codes_{name}_words = {within}")
        t.do(f"codes_{name} = codes + codes_{name}_words")
        for stream_name, each in self.rows.items():
            run = math.gcd(4, f.blocks * each)
            along = f"first * {each * 8}" if f.even and p.depth * each % run == 0 else "0"
            within = f"sixteen * {8 * f.blocks * each} + {along} + lane // 4 * {run}"
            t.do(f"{stream_name}_{name}_words = {within}")
            t.do(f"{stream_name}_{name} = {stream_name} + {stream_name}_{name}_words")

    def _once(self) -> None:
        """What is asked for before the first of several row tiles, and what stays for all of them."""
        p, t = self.form.point, self.text
        self._bases("cluster", "at")
        self._begin()
        self.other.turn(0)
        if p.cluster > 1:
            self.say.do(moves.ARRIVED, "tid")
        t.do("count = 0")

    def _begin(self) -> None:
        """The first row tile's first loads, and the other operand."""
        p = self.form.point
        if self.rolled:
            self.rolled.start(0, p.early)
        else:
            self.codes.start(0, p.early)
            for stream, _ in self.beside:
                stream.start(0, stream.ahead)
        self.say.do(moves.AFTER, "tid")
        if p.soon:
            self.say.do(moves.NEXT, "tid")
        for c in range(min(p.chunks, 2)):
            self.other.copy(c)
        self.say.do(moves.IN_STEP, "tid")
        if self.rolled:
            self.rolled.start(p.early, p.ahead)
        else:
            self.codes.start(p.early, p.ahead)
        self.other.addresses()

    def _tile(self) -> None:
        """A row tile."""
        f, p, t = self.form, self.form.point, self.text
        self._bases("row_tile", "at")
        if f.again:
            self._bases(f"row_tile + {p.clusters}", "after" if p.loop else "next")
            t.do(f"{'further' if p.loop else 'more'} = gl.where(row_tile + {p.clusters} < {f.row_tiles}, tid * 0 + 1, 0)")
        else:
            self._begin()
        sums = self._multiply_in_loop(self.rolled) if self.rolled else self._multiply()
        if not p.soon:
            self.say.do(moves.NEXT, "tid")
        self._gather(sums)
        self._stores()

    # -- sums of a warp

    def _multiply(self) -> list[str]:
        """Names of a warp's sums, by tile."""
        f, p = self.form, self.form.point
        product, statement = self.product, self.product.asm()
        sums = ["zero"] * (p.tiles * product.sums)
        for kb in range(p.depth):
            if kb % f.chunk_depth == 0 and not f.again:
                self.other.turn(kb // f.chunk_depth)
            else:
                self.say.do(moves.IN_STEP, "tid")
            chunk, block = divmod(kb, f.chunk_depth)
            at = chunk % 2 * f.chunk_bytes + block * f.columns * 128
            other = self.other.words(f"{at}", f"{kb * f.sums_each}")
            for i in range(p.tiles):
                at = (kb * p.tiles + i) * f.code_loads
                loads = range(at, at + f.code_loads)
                codes = [w for u in loads for w in self.codes.of(u)]
                own = [w for stream, blocks in self.beside for w in _words_of(stream, blocks, kb, i, p)]
                mine = slice(i * product.sums, (i + 1) * product.sums)
                given = *codes, *own, *sums[mine], *other
                sums[mine] = self.say.some(statement, "float32", product.sums, *given, pure=not product.wide)
                for u in loads:
                    self.codes.used(u)
            for stream, blocks in self.beside:
                if (kb + 1) % blocks == 0 or kb + 1 == p.depth:
                    loads_of = stream.total // -(-p.depth // blocks)
                    for u in range(kb // blocks * loads_of, (kb // blocks + 1) * loads_of):
                        stream.used(u)
        return sums

    def _multiply_in_loop(self, rolled: Rolled) -> list[str]:
        """The same, in a loop."""
        f, p, t = self.form, self.form.point, self.text
        product, statement = self.product, self.product.asm()
        sums = [f"sum{i}" for i in range(p.tiles * product.sums)]
        for s in sums:
            t.do(f"{s} = zero")
        turns = rolled.count // p.chunks
        t.do("none = gl.program_id(1)")  # 0, but the compiler does not know: written out, a short loop takes too many registers
        if not f.again:
            self.other.turn(0)
        with ExitStack() as loops:
            if p.chunks > 1:
                loops.enter_context(t.block(f"for chunk in range(0, {p.chunks}):"))
            with t.block(f"for within in range(0, {turns} + none):"):
                t.do(f"turn = chunk * {turns} + within" if p.chunks > 1 else "turn = within")
                rolled.begin(t)
                held = f" + chunk % 2 * {f.chunk_bytes}" if p.chunks > 1 else ""
                t.do(f"other = within * {p.loop * f.columns * 128}{held}")
                under_way: list[tuple[list[str], list[str], slice]] = []

                def end(left: int) -> None:
                    """Products under way but the last so many join their sums."""
                    while len(under_way) > left:
                        products, scales, mine = under_way.pop(0)
                        ended = self.say.some(product.ended(len(under_way)), "float32", product.under_way, *products)
                        if product.rounded:
                            now[mine] = ended
                        else:
                            given = *scales, *ended, *now[mine]
                            now[mine] = self.say.some(product.scaled(), "float32", product.sums, *given, pure=True)

                now = list(sums)
                for kb in range(p.loop):
                    sums_at = f"turn * {p.loop * f.sums_each} + {kb * f.sums_each}"
                    other = self.other.words(f"other + {kb * f.columns * 128}", sums_at)
                    for i in range(p.tiles):
                        codes, own = rolled.codes(kb, i), rolled.beside(kb, i)
                        mine = slice(i * product.sums, (i + 1) * product.sums)
                        if not p.lag:
                            given = *codes, *own, *now[mine], *other
                            now[mine] = self.say.some(statement, "float32", product.sums, *given, pure=not product.wide)
                            rolled.done(kb, i)
                            continue
                        halves = self.say.some(product.made_halves(), "int32", 16, *codes, *own, pure=True)
                        rolled.done(kb, i)
                        if product.rounded or p.lag == 1:
                            end(0)
                        before = now[mine] if product.rounded else []
                        started = self.say.some(product.started(), "float32", product.under_way, *halves, *other, *before)
                        under_way.append((started, own[: product.scale_words], mine))
                        end(1)
                end(0)
                rolled.end()
                for s, n in zip(sums, now, strict=True):
                    t.do(f"{s} = {n}")
            if p.chunks > 1:
                self.say.do(moves.MEET, "tid")
                self.other.copy("(chunk + 2)")
                self.other.arrived("(chunk + 1)", 1)
        return sums

    # -- sums of a tile

    def _gather(self, sums: list[str]) -> None:
        """Leaves the block's own part of the tile as `y`."""
        f, p, t = self.form, self.form.point, self.text
        own = f.sums // p.cluster
        (late,) = self.say.some(moves.THREAD, "int32", 1, "tid")  # registers are scarce until here
        t.do(f"thread = {late}")
        t.do("corner = (thread & 31) * 16")
        t.do(f"down = (thread >> 5) & {p.row_warps - 1}")
        t.do(f"along = thread >> {(32 * p.row_warps).bit_length() - 1}")
        t.do(f"barrier = base + {BARRIER_AT}{' + (count & 1) * 8' if f.again else ''}")
        t.do(f"sent = base + {f.sent_at}{f' + (count & 1) * {f.sums * 4}' if f.again else ''}")
        self.say.do(moves.MEET, "thread")  # all have read what lay here, and what came for the row tile before
        if f.direct:
            if not f.again:
                self.say.do(moves.ARRIVED, "thread")
            for at, four in self._pieces(sums):
                self._send(t.v(f"{at} + corner"), own, "thread * 0 + 1", four)
            self._own(own)
            return
        for at, four in self._pieces(sums):
            self.say.do(moves.WRITE_16, f"base + {f.parts_at} + along * {f.sums * 4} + {at} + corner", *four)
        self.say.do(moves.MEET, "thread")
        if p.cluster > 1:
            if not f.again:
                self.say.do(moves.ARRIVED, "thread")
            threads = 32 * p.warps
            for r in range(-(-f.sums // 4 // threads)):
                i = t.v(f"thread + {r * threads}")
                there = "thread * 0 + 1"
                if (r + 1) * threads > f.sums // 4:
                    there = t.v(f"({i} < {f.sums // 4}).to(gl.int32)")
                    i = t.v(f"gl.minimum({i}, {f.sums // 4 - 1})")
                found = self.say.some(moves.READ_16, "float32", 4, f"base + {f.parts_at} + {i} * 16")
                for k in range(1, p.k_warps):
                    more = self.say.some(moves.READ_16, "float32", 4, f"base + {f.parts_at + k * f.sums * 4} + {i} * 16")
                    found = [t.v(f"{a} + {b}") for a, b in zip(found, more, strict=True)]
                self._send(t.v(f"{i} * 16"), own, there, found)
        self._own(own)

    def _pieces(self, sums: list[str]) -> list[tuple[str, list[str]]]:
        """A warp's sums of 16 rows and 8 columns, and where in the block's tile they go, in bytes."""
        f, p = self.form, self.form.point
        blocks = f.columns // 8
        found: list[tuple[str, list[str]]] = []
        for i in range(p.tiles):
            sixteen = f"(down + {i * p.row_warps})" if f.spread else f"(down * {p.tiles} + {i})"
            for j in range(blocks):
                at = i * blocks + j
                found.append((f"({sixteen} * {blocks} + {j}) * 512", sums[at * 4 : at * 4 + 4]))
        return found

    def _send(self, at: str, own: int, there: str, four: list[str]) -> None:
        """Sums at a place of the block's tile, in bytes, to the block that finishes them."""
        to = f"sent + part * {own * 4} + ({at} & {own * 4 - 1})"
        self.say.do(moves.SEND, to, f"{at} >> {(own * 4).bit_length() - 1}", there, *four, "barrier")

    def _own(self, own: int) -> None:
        """The block's rows of the tile, added up, a column of the results after the other along the first axis; where two rows
        make one, which a lane held both (`pack.in_turn`), the other one is `second`."""
        f, p, t = self.form, self.form.point, self.text
        if p.cluster > 1:
            self.say.do(moves.COME, "barrier", "thread * 0 + (count >> 1 & 1)" if f.again else "thread * 0")
            if f.again:
                self._expect("barrier", "thread")
        lanes = min(32, f.own_outs)
        down = max(min(p.warps, f.own_outs // lanes), 1)
        t.do(f"L: gl.constexpr = gl.BlockedLayout([1, 1], [{lanes}, {32 // lanes}], [{down}, {p.warps // down}], [0, 1])")
        t.do(f"r = gl.arange(0, {f.own_outs}, gl.SliceLayout(1, L))")
        t.do(f"c = gl.arange(0, {f.columns}, gl.SliceLayout(0, L))")
        if f.plan.second is None:
            t.do(f"of_rows = r // 16 * {f.columns * 16} + r % 8 * 16 + r // 8 % 2 * 2")
        else:
            t.do(f"of_rows = r // 8 * {f.columns * 16} + r % 8 * 16")
        t.do("of_columns = c // 8 * 128 + c % 8 // 2 * 4 + c % 2")
        t.do("inside = of_rows[:, None] + of_columns[None, :]")
        (base,) = self.say.some(moves.BASE, "int32", 1, "inside")
        first = f"{f.sent_at}{f' + (count & 1) * {f.sums * 4}' if f.again else ''}" if p.cluster > 1 else str(f.parts_at)
        for name, further in (("y", 0), ("second", 8))[: f.plan.halves]:
            for d in range(p.cluster if p.cluster > 1 else p.k_warps):
                at = d * (own if p.cluster > 1 else f.sums) * 4 + further
                (value,) = self.say.some(moves.READ_4, "float32", 1, f"{base} + {first} + {at} + inside * 4")
                t.do(f"{name} = {value}" if d == 0 else f"{name} += {value}")

    def _stores(self) -> None:
        f, p, t = self.form, self.form.point, self.text
        out_tile = p.out_tile // f.plan.halves
        t.do(f"outs = row_tile * {out_tile} + part * {f.own_outs} + r")
        row_mask = None
        if f.columns != f.plan.rows:
            t.do(f"c_mask = c < {f.plan.rows}")
            row_mask = "c_mask"
        column_mask = None
        if f.plan.outs % out_tile:
            t.do(f"outs_mask = outs < {f.plan.outs}")
            column_mask = "outs_mask"
        near = {} if f.plan.second is None else {f.plan.second: "second"}
        tile = Tile("c", "outs", f.plan.outs, row_mask, column_mask, "y", across=True, near=near)
        for i, access in enumerate(f.plan.stores):
            FastMath(t, tile, self.pointer, {}).store(access, f"o{i}")


def _words_of(stream: Stream, blocks: int, kb: int, tile: int, p: Point) -> list[str]:
    """The words of a block of K and a tile: a part of one load's, or several loads'."""
    parts = stream.total // (-(-p.depth // blocks) * p.tiles)
    at = (kb // blocks * p.tiles + tile) * parts
    each = stream.wide * parts // blocks
    found = [w for u in range(at, at + parts) for w in stream.of(u)]
    return found[kb % blocks * each : (kb % blocks + 1) * each]
