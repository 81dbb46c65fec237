"""The other operand of a gemm of few rows: copied to shared memory in chunks along K, 64 columns (128 bytes) a row, swizzled as
`wgmma` and `ldmatrix` want it, and read there."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.candidates.triton.hopper.w4 import moves
from tilewright.candidates.triton.hopper.w4.asm import other_sums
from tilewright.candidates.triton.hopper.w4.form import X_AT, Form
from tilewright.candidates.triton.hopper.w4.statements import Statements


class Other:
    """Writes what concerns it.

    Args:
        form: of the kernel; say: writes statements.
    """

    def __init__(self, form: Form, say: Statements) -> None:
        self.form, self.say, self.text = form, say, say.text

    def copy(self, chunk: int | str) -> None:
        """A chunk of the block's part of K is asked for; as a text it may be none that there is. Rows that the operand does not
        have stay what they are."""
        f, t = self.form, self.text
        for row, source, at, there in self._pieces(chunk):
            past = f"gl.where({source} < {f.blocks * self.each}, 16, 0)"  # zeros past the end of K
            size = t.v("tid * 0 + 16" if f.even else past)
            address = f"(x + ({row} * {f.plan.K} + {source} * {64 // self.each})).to(gl.int64)"
            self.say.do(moves.COPY, t.v(at), address, there, size)
        self.say.do(moves.COPYING, "tid")

    @property
    def each(self) -> int:
        """Pieces of 16 bytes, as the operand is stored, in 64 columns."""
        return self.form.plan.operand.bits // 2

    def _pieces(self, chunk: int | str) -> Iterable[tuple[str, str, str, str]]:
        """The thread's pieces of 16 bytes of a chunk: row, number along K, place in shared memory, and whether there is one."""
        f, p, t = self.form, self.form.point, self.text
        threads, own = 32 * p.warps, f.chunk_depth * self.each  # pieces of a warp along K
        pieces = p.k_warps * own
        total = f.plan.rows * pieces
        for r in range(-(-total // threads)):
            i = t.v(f"tid + {r * threads}" if r else "tid + 0")
            row, piece = t.v(f"{i} // {pieces}"), t.v(f"{i} % {pieces}")
            if self.each < 8:  # eight threads have pieces of two rows, which lie in different banks
                row = t.v(f"{i} // {self.each} % {f.plan.rows}")
                piece = t.v(f"{i} // {self.each * f.plan.rows} * {self.each} + {i} % {self.each}")
            there = t.v(f"({i} < {total}).to(gl.int32)" if (r + 1) * threads > total else "tid * 0 + 1")
            if isinstance(chunk, str):
                there = t.v(f"{there} * gl.where({chunk} < {p.chunks}, tid * 0 + 1, 0)")
            along = f"{piece} // {own} * {p.depth * self.each} + {piece} % {own} + {chunk} * {own}" if p.chunks > 1 else piece
            source = t.v(f"part * {f.local_blocks * self.each} + {along}")
            first = piece if self.each == 8 else f"({piece} * 2)"  # of the pieces in 16 bits
            to = f"{piece} // {self.each} * {f.columns * 128} + {row} * 128 + ((({first} ^ {row}) & 7) * 16)"
            yield row, source, f"base + {X_AT} + {chunk} % 2 * {f.chunk_bytes} + {to}", there

    def arrived(self, chunk: int | str, left: int) -> None:
        """A chunk is there, for all warps: all that were asked for but so many are."""
        self.say.do(moves.COPIED[left], "tid")
        if self.each < 8:
            for _, _, at, there in self._pieces(chunk):
                self.say.do(moves.widened(self.form.plan.operand), at, there)
        if self.form.point.wide:
            self.say.do(moves.FENCE, "tid")
        self.say.do(moves.MEET, "tid")

    def turn(self, chunk: int) -> None:
        """The chunk is there, and the one before it makes room for the next one."""
        p = self.form.point
        further = chunk + 1
        if chunk and further < p.chunks:
            self.say.do(moves.MEET, "tid")
            self.copy(further)
        self.arrived(chunk, min(further, p.chunks - 1) - chunk)
        if self.form.small:
            self._add_up()
            self.say.do(moves.MEET, "tid")

    def _add_up(self) -> None:
        """Sums of the operand along K, shared out among the warps."""
        f, p, t = self.form, self.form.point, self.text
        subs, eights = f.product.subs, f.columns // 8
        units = f.local_blocks * eights
        statement = other_sums(f.plan.half, subs)
        for r in range(-(-units // p.warps)):
            unit = t.v(
                f"warp + {r * p.warps}" if (r + 1) * p.warps <= units else f"gl.minimum(warp + {r * p.warps}, {units - 1})"
            )
            at = f"base + {X_AT} + {unit} // {eights} * {f.columns * 128} + {unit} % {eights} * 1024 + line * 128"
            words = [
                w
                for far in (0, 4)
                for w in self.say.some(moves.FRAGMENTS, "int32", 4, f"{at} + ((lane // 8 + {far}) ^ line) * 16")
            ]
            found = self.say.some(statement, "float32", 2 * subs, *words, "lane")
            to = f"base + {f.sums_at} + {unit} // {eights} * {f.sums_each} + {unit} % {eights} * 128"
            to = t.v(f"{to} + lane % 4 * 32 + lane // 4 * 4")
            for i, value in enumerate(found):
                there = "(lane < 16).to(gl.int32)"
                self.say.do(moves.WRITE_4, f"{to} + {i // 2 * f.columns * 16 + i % 2 * 16}", there, value)

    def addresses(self) -> None:
        """Names of where a warp finds its part."""
        f, p, t = self.form, self.form.point, self.text
        t.do(f"own = base + {X_AT} + k_warp * {f.chunk_depth * f.columns * 128}")
        if not p.wide:
            t.do("line = lane % 8")
            if f.small:
                t.do(f"own_sums = base + {f.sums_at} + k_warp * {p.depth * f.sums_each} + lane * 4")
            t.do("near = own + line * 128 + ((lane // 8) ^ line) * 16")
            t.do("far = own + line * 128 + ((lane // 8 + 4) ^ line) * 16")

    def words(self, at: str, sums_at: str) -> list[str]:
        """A block of 64 columns, so far from the warp's first one: its fragments and, if need be, their sums, or where it lies
        as `wgmma` is told."""
        f, t = self.form, self.text
        if f.point.wide:
            return [t.v(f"(own + {at}) >> 4")]
        words: list[str] = []
        for j in range(f.columns // 8):
            for half in ("near", "far"):
                words += self.say.some(moves.FRAGMENTS, "int32", 4, f"{half} + {at} + {j * 1024}")
        for i in range(f.sums_each // 128 if f.small else 0):  # of a scale and eight columns
            words += self.say.some(moves.READ_WORD, "int32", 1, f"own_sums + {sums_at} + {i * 128}")
        return words
