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
from tilewright.candidates.triton._text import Text
from tilewright.candidates.triton._w4_asm import Asm
from tilewright.candidates.triton._w4_form import BARRIER_AT, X_AT, Form
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
        return [*self.given, *self.sides, *self.outs]

    def write(self) -> str:
        """The module."""
        f, p, t = self.form, self.form.point, self.text
        self._place()
        sums = self._multiply()
        self._do(asm.NEXT, "tid")
        self._gather(sums)
        self._stores()
        t.do("room._keep_alive()")  # it is addressed by hand
        constants = "\n".join(
            f"{name} = gl.constexpr({a.text!r})\n{name}_C = gl.constexpr({a.constraints!r})"
            for a, name in self._statements.items()
        )
        head = f'    """clusters of {p.cluster}, {f.columns} rows"""'
        body = f"@gluon.jit\ndef gemm({', '.join(self.arguments)}):\n{head}\n{t}"
        return f"{GLUON_IMPORTS}\n{constants}\n\n\n{body}\n"

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
        t.do(f"row_tile = gl.program_id(0) // {p.cluster}")
        t.do(f"part = gl.program_id(0) % {p.cluster}")
        if p.cluster > 1:
            self._do(asm.BARRIER, f"base + {BARRIER_AT}", "(tid == 0).to(gl.int32)", f"tid * 0 + {f.sums * 4}", "tid")
            self._do(asm.ARRIVE, "tid")
        # Which 16 rows a warp's first tile has; others follow it, with wgmma those of four warps at a time.
        each = 1 if p.wide else p.tiles
        t.do(f"sixteen = row_tile * {p.out_tile // 16} + row_warp * {each}")
        t.do(f"first = (part * {p.k_warps} + k_warp) * {p.depth}")

    @property
    def between(self) -> int:
        """Tiles of 16 rows from one of a warp's to the next."""
        return self.form.point.row_warps if self.form.point.wide else 1

    # -- sums of a warp

    def _multiply(self) -> list[str]:
        """Names of a warp's sums, by tile."""
        f, p, t = self.form, self.form.point, self.text
        product = f.product
        loads = self._loads()
        scales, zeros = _Stream(self, "scales", product.scale_words), None
        if f.plan.weights.zero is not None:
            zeros = _Stream(self, "zeros", product.subs)
        taken: dict[int, list[str]] = {}

        def load(u: int) -> None:
            if u < len(loads) and u not in taken:
                taken[u] = loads[u]()

        for u in range(p.early):
            load(u)
        for stream in (scales, zeros):
            if stream:
                stream.start()
        self._do(asm.AFTER, "tid")
        for c in range(min(p.chunks, 2)):
            self._copy(c)
        for u in range(p.ahead):
            load(u)
        self._other_addresses()
        t.do(f"zero = gl.zeros([{32 * p.warps}], gl.float32, LANES)")
        sums = ["zero"] * (p.tiles * product.sums)
        statement = product.asm()
        for kb in range(p.depth):
            if kb % f.chunk_depth == 0:
                self._turn(kb // f.chunk_depth)
            else:
                self._do(asm.IN_STEP, "tid")
            other = self._other(kb)
            for stream in (scales, zeros):
                if stream:
                    stream.advance(kb)
            for i in range(p.tiles):
                codes = self._codes(taken, kb * p.tiles + i)
                own = [w for stream in (scales, zeros) if stream for w in stream.of(kb, i)]
                at = slice(i * product.sums, (i + 1) * product.sums)
                given = *codes, *own, *sums[at], *other
                sums[at] = self.some(statement, "float32", product.sums, *given, pure=not product.wide)
                for h in range(self._halves):
                    load((kb * p.tiles + i) * self._halves + h + p.ahead)
        return sums

    @property
    def _halves(self) -> int:
        """Loads of 16 bytes for a tile."""
        return self.form.plan.weights.kind.bits // 4

    def _codes(self, taken: dict[int, list[str]], tile: int) -> list[str]:
        return [w for h in range(self._halves) for w in taken[tile * self._halves + h]]

    def _loads(self) -> list[Callable[[], list[str]]]:
        """Loads of codes, in the order of their use."""
        f, p, t = self.form, self.form.point, self.text
        block = 512 * self._halves  # words
        row = f"(sixteen // 4 * {f.blocks} + first) * {block} + sixteen % 4 * {block // 4} + lane * 4"
        t.do(f"codes_at = codes + ({row})")
        found: list[Callable[[], list[str]]] = []
        for kb in range(p.depth):
            for i in range(p.tiles):
                for h in range(self._halves):
                    sixteen = i * self.between
                    within = sixteen * block // 4 if not p.wide else sixteen // 4 * f.blocks * block
                    found.append(self._load(kb, within + h * 128, block))
        return found

    def _load(self, kb: int, within: int, block: int) -> Callable[[], list[str]]:
        def load() -> list[str]:
            at = f"{self.block(kb)} * {block} + {within}" if not self.form.even else str(kb * block + within)
            return self.some(asm.LOAD_16, "int32", 4, f"(codes_at + ({at})).to(gl.int64)")

        return load

    def block(self, kb: int) -> str:
        """A block of K relative to the first, of those that exist: past the last one it is the last one again."""
        return self.text.v(f"gl.minimum(first + {kb}, {self.form.blocks - 1}) - first")

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
        if f.direct:
            self._do(asm.ARRIVED, "thread")
            for at, four in self._pieces(sums):
                self._send(t.v(f"{at} + corner"), own, "thread * 0 + 1", four)
            self._do(asm.COME, f"base + {BARRIER_AT}")
            self._own(own)
            return
        self._do(asm.MEET, "thread")  # all have read what lay here
        for at, four in self._pieces(sums):
            self._do(asm.WRITE_16, f"base + {X_AT} + along * {f.sums * 4} + {at} + corner", *four)
        self._do(asm.MEET, "thread")
        if p.cluster > 1:
            self._do(asm.ARRIVED, "thread")
            threads = 32 * p.warps
            for r in range(-(-f.sums // 4 // threads)):
                i = t.v(f"thread + {r * threads}")
                there = "thread * 0 + 1"
                if (r + 1) * threads > f.sums // 4:
                    there = t.v(f"({i} < {f.sums // 4}).to(gl.int32)")
                    i = t.v(f"gl.minimum({i}, {f.sums // 4 - 1})")
                found = self.some(asm.READ_16, "float32", 4, f"base + {X_AT} + {i} * 16")
                for k in range(1, p.k_warps):
                    more = self.some(asm.READ_16, "float32", 4, f"base + {X_AT + k * f.sums * 4} + {i} * 16")
                    found = [t.v(f"{a} + {b}") for a, b in zip(found, more, strict=True)]
                self._send(t.v(f"{i} * 16"), own, there, found)
            self._do(asm.COME, f"base + {BARRIER_AT}")
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
        f = self.form
        to = f"base + {f.sent_at} + part * {own * 4} + ({at} & {own * 4 - 1})"
        self._do(asm.SEND, to, f"{at} >> {(own * 4).bit_length() - 1}", there, *four, f"base + {BARRIER_AT}")

    def _own(self, own: int) -> None:
        """The block's rows of the tile, added up, a row of the weights after the other along the first axis."""
        f, p, t = self.form, self.form.point, self.text
        lanes = min(32, f.own_rows)
        down = max(min(p.warps, f.own_rows // lanes), 1)
        t.do(f"L: gl.constexpr = gl.BlockedLayout([1, 1], [{lanes}, {32 // lanes}], [{down}, {p.warps // down}], [0, 1])")
        t.do(f"r = gl.arange(0, {f.own_rows}, gl.SliceLayout(1, L))")
        t.do(f"c = gl.arange(0, {f.columns}, gl.SliceLayout(0, L))")
        t.do(f"of_rows = r // 16 * {f.columns * 16} + r % 8 * 16 + r // 8 % 2 * 2")
        t.do("of_columns = c // 8 * 128 + c % 8 // 2 * 4 + c % 2")
        t.do("inside = of_rows[:, None] + of_columns[None, :]")
        (base,) = self.some(asm.BASE, "int32", 1, "inside")
        first = f.sent_at if p.cluster > 1 else X_AT
        for d in range(p.cluster if p.cluster > 1 else p.k_warps):
            size = own if p.cluster > 1 else f.sums
            (value,) = self.some(asm.READ_4, "float32", 1, f"{base} + {first + d * size * 4} + inside * 4")
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


class _Stream:
    """Scales or zero points of a lane's rows: words that follow along K, loaded some at a time ahead of their use."""

    def __init__(self, writer: Writer, name: str, words: int) -> None:
        f = writer.form
        self.writer, self.name, self.words = writer, name, words  # words of a block of 64 columns
        total = f.blocks * words
        self.row = total
        start = math.gcd(f.point.depth * words, total)
        self.wide = math.gcd(4, start) if f.even else math.gcd(words, 4)
        self.blocks = max(self.wide // words, 1)  # of a load
        self._known: dict[tuple[int, int], list[str]] = {}
        t = writer.text
        t.do(f"{name}_at = {name} + ((sixteen * 8 + lane // 4) * {total} + first * {words})")

    def start(self) -> None:
        self._load(0)

    def advance(self, kb: int) -> None:
        """Asks for what comes after the block that is at work."""
        if kb % self.blocks == 0:
            self._load(kb + self.blocks)

    def of(self, kb: int, tile: int) -> list[str]:
        return self._known[kb, tile]

    def _load(self, kb: int) -> None:
        f = self.writer.form
        if kb >= f.point.depth:
            return
        for tile in range(f.point.tiles):
            down = tile * self.writer.between * 8 * self.row
            words: list[str] = []
            for at in range(0, self.blocks * self.words, self.wide):
                where = (
                    f"{self.writer.block(kb)} * {self.words} + {down + at}" if not f.even else str(kb * self.words + down + at)
                )
                words += self.writer.some(_words(self.wide), "int32", self.wide, f"({self.name}_at + ({where})).to(gl.int64)")
            for i in range(self.blocks):
                self._known[kb + i, tile] = words[i * self.words : (i + 1) * self.words]


def _words(count: int) -> Asm:
    """Several words of what does not change."""
    if count == 1:
        return Asm("ld.global.nc.b32 $0, [$1];", "=r,l")
    names = ",".join(f"${i}" for i in range(count))
    return Asm(f"ld.global.nc.v{count}.b32 {{{names}}}, [${count}];", ",".join(["=r"] * count + ["l"]))
