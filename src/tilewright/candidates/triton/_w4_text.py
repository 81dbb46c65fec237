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

from tilewright.candidates.triton import _w4_asm as asm
from tilewright.candidates.triton._emit import Tile
from tilewright.candidates.triton._hopper_brief import Brief
from tilewright.candidates.triton._module import GLUON_IMPORTS
from tilewright.candidates.triton._text import Text, Written
from tilewright.candidates.triton._w4_asm import Asm
from tilewright.candidates.triton._w4_form import BARRIER_AT, X_AT, Form, Point
from tilewright.candidates.triton._w4_loads import Stream, of_codes, of_rows
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
        leaves = {n for a in form.plan.stores for n in toposort((a.root,)) if isinstance(n.op, Param)}
        self.sides = sorted({pointer(n) for n in leaves}, key=lambda n: int(n[1:]))
        self.given = ["x", "codes", "scales", *(["zeros"] if form.plan.weights.zero is not None else [])]
        self.outs = [f"o{i}" for i in range(len(form.plan.stores))]
        self.text = Text("gl")
        self._statements: dict[Asm, str] = {}

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
        constants = "\n".join(
            f"{name} = gl.constexpr({a.text!r})\n{name}_C = gl.constexpr({a.constraints!r})"
            for a, name in self._statements.items()
        )
        head = f'    """clusters of {p.cluster}, {f.columns} rows"""'
        body = f"@gluon.jit\ndef gemm({', '.join([*self.arguments, *t.numbers])}):\n{head}\n{t}"
        return Written(f"{GLUON_IMPORTS}\n{constants}\n\n\n{body}\n", t.numbers)

    # -- statements

    def _do(self, a: Asm, *arguments: str) -> None:
        self.text.do(self._call(a, arguments, "gl.int32", pure=False))

    def some(self, a: Asm, kind: str, count: int, *arguments: str, pure: bool = False) -> list[str]:
        """Writes a statement; names of a statement's results."""
        t = self.text
        names = [f"r{len(t.lines)}_{i}" for i in range(count)]
        types = f"(gl.{kind},) * {count}" if count > 1 else f"gl.{kind}"
        t.do(f"{', '.join(names)} = {self._call(a, arguments, types, pure=pure)}")
        return names

    def assign(self, a: Asm, kind: str, names: list[str], *arguments: str) -> None:
        """Writes a statement whose results have these names, which may have had other values before."""
        types = f"(gl.{kind},) * {len(names)}" if len(names) > 1 else f"gl.{kind}"
        self.text.do(f"{', '.join(names)} = {self._call(a, arguments, types, pure=False)}")

    def _call(self, a: Asm, arguments: tuple[str, ...], types: str, *, pure: bool) -> str:
        name = self._statements.setdefault(a, f"A{len(self._statements)}")
        given = ", ".join(arguments)
        return f"gl.inline_asm_elementwise({name}, {name}_C, [{given}], dtype={types}, is_pure={pure}, pack=1)"

    # -- who does what

    def _place(self) -> None:
        f, p, t = self.form, self.form.point, self.text
        w = p.warps
        t.do(f"LANES: gl.constexpr = gl.BlockedLayout([1], [32], [{w}], [0])")
        words = f.shared_bytes // 512
        t.do(f"room = gl.allocate_shared_memory(gl.int32, [{words}, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))")
        t.do("room.index(0).store(gl.zeros([128], gl.int32, LANES))")  # else there is none
        t.do(f"tid = gl.arange(0, {32 * w}, LANES)")
        (base,) = self.some(asm.BASE, "int32", 1, "tid")
        t.do(f"base = {base}")
        t.do("lane = tid % 32")
        t.do("warp = tid // 32")
        t.do(f"row_warp = warp % {p.row_warps}")
        t.do(f"k_warp = warp // {p.row_warps}")
        t.do(f"cluster = gl.program_id(0) // {p.cluster}")
        t.do(f"part = gl.program_id(0) % {p.cluster}")
        if p.cluster > 1:
            self._do(asm.BARRIERS, f"base + {BARRIER_AT}", "(tid == 0).to(gl.int32)")
            for i in range(2 if f.again else 1):
                self._expect(f"base + {BARRIER_AT + 8 * i}", "tid")
            self._do(asm.ARRIVE, "tid")
        t.do(f"first = (part * {p.k_warps} + k_warp) * {p.depth}")
        t.do(f"zero = gl.zeros([{32 * w}], gl.float32, LANES)")
        self.product = f.product
        self.codes = of_codes(f, self.assign)
        self.beside = [of_rows("scales", f, self.product.scale_words, self.assign)]
        if f.plan.weights.zero is not None:
            self.beside.append(of_rows("zeros", f, self.product.subs, self.assign))

    def _expect(self, barrier: str, thread: str) -> None:
        self._do(asm.EXPECT, barrier, f"({thread} == 0).to(gl.int32)", f"{thread} * 0 + {self.form.sums * 4}")

    def _bases(self, row_tile: str, name: str) -> None:
        """Where the words of a warp's row tile begin."""
        f, p, t = self.form, self.form.point, self.text
        # Which 16 rows a warp's first tile has; others follow it, with wgmma those of four warps at a time.
        t.do(f"sixteen = ({row_tile}) * {p.out_tile // 16} + row_warp * {1 if p.wide else p.tiles}")
        block = 128 * f.code_loads
        first = "first" if f.even else "0"
        t.do(f"codes_{name} = codes + ((sixteen // 4 * {f.blocks} + {first}) * {4 * block} + sixteen % 4 * {block} + lane * 4)")
        for stream, _ in self.beside:
            each = self.product.scale_words if stream.name == "scales" else self.product.subs
            run = math.gcd(4, f.blocks * each)
            along = f"first * {each * 8}" if f.even and p.depth * each % run == 0 else "0"
            within = f"sixteen * {8 * f.blocks * each} + {along} + lane // 4 * {run}"
            t.do(f"{stream.name}_{name} = {stream.name} + ({within})")

    def _once(self) -> None:
        """What is asked for before the first of several row tiles, and what stays for all of them."""
        p, t = self.form.point, self.text
        self._bases("cluster", "at")
        self._begin()
        self._turn(0)
        if p.cluster > 1:
            self._do(asm.ARRIVED, "tid")
        t.do("count = 0")

    def _begin(self) -> None:
        """The first row tile's first loads, and the other operand."""
        p = self.form.point
        self.codes.start(0, p.early)
        for stream, _ in self.beside:
            stream.start(0, stream.ahead)
        self._do(asm.AFTER, "tid")
        for c in range(min(p.chunks, 2)):
            self._copy(c)
        self._do(asm.IN_STEP, "tid")
        self.codes.start(p.early, p.ahead)
        self._other_addresses()

    def _tile(self) -> None:
        """A row tile."""
        f, p, t = self.form, self.form.point, self.text
        self._bases("row_tile", "at")
        if f.again:
            self._bases(f"row_tile + {p.clusters}", "next")
            t.do(f"more = gl.where(row_tile + {p.clusters} < {f.row_tiles}, tid * 0 + 1, 0)")
        else:
            self._begin()
        sums = self._multiply()
        self._do(asm.NEXT, "tid")
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
                self._turn(kb // f.chunk_depth)
            else:
                self._do(asm.IN_STEP, "tid")
            other = self._other(kb)
            for i in range(p.tiles):
                at = (kb * p.tiles + i) * f.code_loads
                loads = range(at, at + f.code_loads)
                codes = [w for u in loads for w in self.codes.of(u)]
                own = [w for stream, blocks in self.beside for w in _words_of(stream, blocks, kb, i, p)]
                mine = slice(i * product.sums, (i + 1) * product.sums)
                given = *codes, *own, *sums[mine], *other
                sums[mine] = self.some(statement, "float32", product.sums, *given, pure=not product.wide)
                for u in loads:
                    self.codes.used(u)
            for stream, blocks in self.beside:
                if (kb + 1) % blocks == 0 or kb + 1 == p.depth:
                    loads_of = stream.total // -(-p.depth // blocks)
                    for u in range(kb // blocks * loads_of, (kb // blocks + 1) * loads_of):
                        stream.used(u)
        return sums

    def _turn(self, chunk: int) -> None:
        """The chunk is there, and the one before it makes room for the next one."""
        p = self.form.point
        if chunk and chunk + 1 < p.chunks:
            self._do(asm.MEET, "tid")
            self._copy(chunk + 1)
        self._do(asm.COPIED[1 if chunk + 1 < p.chunks else 0], "tid")
        if p.wide:
            self._do(asm.FENCE, "tid")
        self._do(asm.MEET, "tid")
        if self.form.small:
            self._add_up()
            self._do(asm.MEET, "tid")

    def _add_up(self) -> None:
        """Sums of the other operand along K, shared out among the warps."""
        f, p, t = self.form, self.form.point, self.text
        subs, eights = self.product.subs, f.columns // 8
        units = f.local_blocks * eights
        statement = asm.other_sums(f.plan.operand, subs)
        for r in range(-(-units // p.warps)):
            unit = t.v(
                f"warp + {r * p.warps}" if (r + 1) * p.warps <= units else f"gl.minimum(warp + {r * p.warps}, {units - 1})"
            )
            at = f"base + {X_AT} + {unit} // {eights} * {f.columns * 128} + {unit} % {eights} * 1024 + line * 128"
            words = [
                w for far in (0, 4) for w in self.some(asm.FRAGMENTS, "int32", 4, f"{at} + ((lane // 8 + {far}) ^ line) * 16")
            ]
            found = self.some(statement, "float32", 2 * subs, *words, "lane")
            to = f"base + {f.sums_at} + {unit} // {eights} * {subs * f.columns * 16} + {unit} % {eights} * 128"
            to = t.v(f"{to} + lane % 4 * 32 + lane // 4 * 4")
            for i, value in enumerate(found):
                there = "(lane < 16).to(gl.int32)"
                self._do(asm.WRITE_4, f"{to} + {i // 2 * f.columns * 16 + i % 2 * 16}", there, value)

    def _copy(self, chunk: int) -> None:
        """A chunk of the other operand's part of K into shared memory; rows that it does not have stay what they are."""
        f, p, t = self.form, self.form.point, self.text
        threads, own = 32 * p.warps, f.chunk_depth * 8  # pieces of 16 bytes, of a warp along K
        pieces = p.k_warps * own
        total = f.plan.rows * pieces
        for r in range(-(-total // threads)):
            i = t.v(f"tid + {r * threads}" if r else "tid + 0")
            row, piece = t.v(f"{i} // {pieces}"), t.v(f"{i} % {pieces}")
            there = t.v(f"({i} < {total}).to(gl.int32)" if (r + 1) * threads > total else "tid * 0 + 1")
            along = f"{piece} // {own} * {p.depth * 8} + {piece} % {own} + {chunk * own}" if p.chunks > 1 else piece
            source = t.v(f"part * {f.local_blocks * 8} + {along}")
            size = t.v("tid * 0 + 16" if f.even else f"gl.where({source} < {f.blocks * 8}, 16, 0)")  # zeros past the end of K
            to = f"{piece} // 8 * {f.columns * 128} + {row} * 128 + ((({piece} ^ {row}) & 7) * 16)"
            at = t.v(f"base + {X_AT + chunk % 2 * f.chunk_bytes} + {to}")
            self._do(asm.COPY, at, f"(x + ({row} * {f.plan.K} + {source} * 8)).to(gl.int64)", there, size)
        self._do(asm.COPYING, "tid")

    def _other_addresses(self) -> None:
        f, p, t = self.form, self.form.point, self.text
        t.do(f"own = base + {X_AT} + k_warp * {f.chunk_depth * f.columns * 128}")
        if not p.wide:
            t.do("line = lane % 8")
            if f.small:
                each = p.depth * self.product.subs * f.columns * 16
                t.do(f"own_sums = base + {f.sums_at} + k_warp * {each} + lane * 4")
            t.do("near = own + line * 128 + ((lane // 8) ^ line) * 16")
            t.do("far = own + line * 128 + ((lane // 8 + 4) ^ line) * 16")

    def _other(self, kb: int) -> list[str]:
        """The other operand's part of a block of K: its fragments, or where it lies as `wgmma` is told."""
        f, p, t = self.form, self.form.point, self.text
        at = kb // f.chunk_depth % 2 * f.chunk_bytes + kb % f.chunk_depth * f.columns * 128
        if p.wide:
            return [t.v(f"(own + {at}) >> 4")]
        words: list[str] = []
        for j in range(f.columns // 8):
            for half in ("near", "far"):
                words += self.some(asm.FRAGMENTS, "int32", 4, f"{half} + {at + j * 1024}")
        if f.small:
            subs = self.product.subs
            for i in range(subs):
                for j in range(f.columns // 8):
                    own = (kb * subs + i) * f.columns * 16 + j * 128
                    words += self.some(asm.READ_WORD, "int32", 1, f"own_sums + {own}")
        return words

    # -- sums of a tile

    def _gather(self, sums: list[str]) -> None:
        """Leaves the block's own part of the tile as `y`."""
        f, p, t = self.form, self.form.point, self.text
        own = f.sums // p.cluster
        (late,) = self.some(asm.THREAD, "int32", 1, "tid")  # registers are scarce until here
        t.do(f"thread = {late}")
        t.do("corner = (thread & 31) * 16")
        t.do(f"down = (thread >> 5) & {p.row_warps - 1}")
        t.do(f"along = thread >> {(32 * p.row_warps).bit_length() - 1}")
        t.do(f"barrier = base + {BARRIER_AT}{' + (count & 1) * 8' if f.again else ''}")
        t.do(f"sent = base + {f.sent_at}{f' + (count & 1) * {f.sums * 4}' if f.again else ''}")
        self._do(asm.MEET, "thread")  # all have read what lay here, and what came for the row tile before
        if f.direct:
            if not f.again:
                self._do(asm.ARRIVED, "thread")
            for at, four in self._pieces(sums):
                self._send(t.v(f"{at} + corner"), own, "thread * 0 + 1", four)
            self._own(own)
            return
        for at, four in self._pieces(sums):
            self._do(asm.WRITE_16, f"base + {f.parts_at} + along * {f.sums * 4} + {at} + corner", *four)
        self._do(asm.MEET, "thread")
        if p.cluster > 1:
            if not f.again:
                self._do(asm.ARRIVED, "thread")
            threads = 32 * p.warps
            for r in range(-(-f.sums // 4 // threads)):
                i = t.v(f"thread + {r * threads}")
                there = "thread * 0 + 1"
                if (r + 1) * threads > f.sums // 4:
                    there = t.v(f"({i} < {f.sums // 4}).to(gl.int32)")
                    i = t.v(f"gl.minimum({i}, {f.sums // 4 - 1})")
                found = self.some(asm.READ_16, "float32", 4, f"base + {f.parts_at} + {i} * 16")
                for k in range(1, p.k_warps):
                    more = self.some(asm.READ_16, "float32", 4, f"base + {f.parts_at + k * f.sums * 4} + {i} * 16")
                    found = [t.v(f"{a} + {b}") for a, b in zip(found, more, strict=True)]
                self._send(t.v(f"{i} * 16"), own, there, found)
        self._own(own)

    def _pieces(self, sums: list[str]) -> list[tuple[str, list[str]]]:
        """A warp's sums of 16 rows and 8 columns, and where in the block's tile they go, in bytes."""
        f, p = self.form, self.form.point
        blocks = f.columns // 8
        found: list[tuple[str, list[str]]] = []
        for i in range(p.tiles):
            sixteen = f"(down + {i * p.row_warps})" if p.wide else f"(down * {p.tiles} + {i})"
            for j in range(blocks):
                at = i * blocks + j
                found.append((f"({sixteen} * {blocks} + {j}) * 512", sums[at * 4 : at * 4 + 4]))
        return found

    def _send(self, at: str, own: int, there: str, four: list[str]) -> None:
        """Sums at a place of the block's tile, in bytes, to the block that finishes them."""
        to = f"sent + part * {own * 4} + ({at} & {own * 4 - 1})"
        self._do(asm.SEND, to, f"{at} >> {(own * 4).bit_length() - 1}", there, *four, "barrier")

    def _own(self, own: int) -> None:
        """The block's rows of the tile, added up, a row of the weights after the other along the first axis."""
        f, p, t = self.form, self.form.point, self.text
        if p.cluster > 1:
            self._do(asm.COME, "barrier", "thread * 0 + (count >> 1 & 1)" if f.again else "thread * 0")
            if f.again:
                self._expect("barrier", "thread")
        lanes = min(32, f.own_rows)
        down = max(min(p.warps, f.own_rows // lanes), 1)
        t.do(f"L: gl.constexpr = gl.BlockedLayout([1, 1], [{lanes}, {32 // lanes}], [{down}, {p.warps // down}], [0, 1])")
        t.do(f"r = gl.arange(0, {f.own_rows}, gl.SliceLayout(1, L))")
        t.do(f"c = gl.arange(0, {f.columns}, gl.SliceLayout(0, L))")
        t.do(f"of_rows = r // 16 * {f.columns * 16} + r % 8 * 16 + r // 8 % 2 * 2")
        t.do("of_columns = c // 8 * 128 + c % 8 // 2 * 4 + c % 2")
        t.do("inside = of_rows[:, None] + of_columns[None, :]")
        (base,) = self.some(asm.BASE, "int32", 1, "inside")
        first = f"{f.sent_at}{f' + (count & 1) * {f.sums * 4}' if f.again else ''}" if p.cluster > 1 else str(f.parts_at)
        for d in range(p.cluster if p.cluster > 1 else p.k_warps):
            size = own if p.cluster > 1 else f.sums
            (value,) = self.some(asm.READ_4, "float32", 1, f"{base} + {first} + {d * size * 4} + inside * 4")
            t.do(f"y = {value}" if d == 0 else f"y += {value}")

    def _stores(self) -> None:
        f, p, t = self.form, self.form.point, self.text
        t.do(f"outs = row_tile * {p.out_tile} + part * {f.own_rows} + r")
        row_mask = None
        if f.columns != f.plan.rows:
            t.do(f"c_mask = c < {f.plan.rows}")
            row_mask = "c_mask"
        column_mask = None
        if f.plan.outs % p.out_tile:
            t.do(f"outs_mask = outs < {f.plan.outs}")
            column_mask = "outs_mask"
        tile = Tile("c", "outs", f.plan.outs, row_mask, column_mask, "y", across=True)
        for i, access in enumerate(f.plan.stores):
            Brief(t, tile, self.pointer, {}).store(access, f"o{i}")


def _words_of(stream: Stream, blocks: int, kb: int, tile: int, p: Point) -> list[str]:
    """The words of a block of K and a tile: a part of one load's, or several loads'."""
    parts = stream.total // (-(-p.depth // blocks) * p.tiles)
    at = (kb // blocks * p.tiles + tile) * parts
    each = stream.wide * parts // blocks
    found = [w for u in range(at, at + parts) for w in stream.of(u)]
    return found[kb % blocks * each : (kb % blocks + 1) * each]
