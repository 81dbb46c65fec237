"""Words that a warp reads along K, asked for some time ahead of their use: codes, scales, zero points."""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.w4 import moves
from tilewright.candidates.triton.hopper.w4.asm import Asm
from tilewright.candidates.triton.hopper.w4.form import Form

Some = Callable[..., None]  # writes a statement that assigns names
FEW = 2  # words of a row that a load brings: with more of them registers run out


def words(count: int, *, once: bool, sometimes: bool) -> Asm:
    """A load of several words; `once`: they are not read again soon. `sometimes`: only where the last operand is not zero.

    It is no load of constants, which ptxas would move to where its words are used.
    """
    names = ",".join(f"${i}" for i in range(count))
    given = f"{{{names}}}" if count > 1 else names
    vector = f".v{count}" if count > 1 else ""
    load = f"ld.global{'.L1::no_allocate' if once else '.nc'}{vector}.b32 {given}, [${count}];"
    if sometimes:
        load = f"{{ .reg .pred q; setp.ne.b32 q, ${count + 1}, 0; @q {load} }}"
    return Asm(load, ",".join(["=r"] * count + ["l"] + ["r"] * sometimes))


class Stream:
    """Loads of a row tile in the order of their use, each in a slot of registers of its own until another one takes it.

    Args:
        name: of the argument, and of all that is made here.
        wide: words of a load.
        total: loads of a row tile.
        ahead: loads under way.
        where: of a load's words from where the row tile's begin, as text.
        again: there are further row tiles, whose first loads follow the last ones of this one.
        write: a statement (`Writer.assign`).
    """

    def __init__(
        self, name: str, wide: int, total: int, ahead: int, where: Callable[[int], str], write: Some, *, once: bool, again: bool
    ) -> None:
        self.name, self.wide, self.total, self.ahead = name, wide, total, ahead
        self._where, self._write, self._once, self._again = where, write, once, again
        self._slots = ahead if again else total
        assert total % self._slots == 0

    def of(self, load: int) -> list[str]:
        """Names of a load's words."""
        return [f"{self.name}{load % self._slots}_{i}" for i in range(self.wide)]

    def start(self, first: int, last: int) -> None:
        """The first row tile's loads of these numbers, fewer if there are no more."""
        for load in range(first, min(last, self.total)):
            self._ask(load, "at")

    def used(self, load: int) -> None:
        """Its words are not needed any more: another load takes the slot."""
        following = load + self.ahead
        if following < self.total:
            self._ask(following, "at")
        elif self._again:
            self._ask(following - self.total, "next")

    def _ask(self, load: int, base: str) -> None:
        sometimes = base == "next"
        statement = words(self.wide, once=self._once, sometimes=sometimes)
        address = f"({self.name}_{base} + ({self._where(load)})).to(gl.int64)"
        self._write(statement, "int32", self.of(load), address, *["more"] * sometimes)


def of_codes(form: Form, write: Some) -> Stream:
    """Loads of 16 bytes: one of a tile of 16 rows by 64 columns of 4-bit codes, two of 8-bit ones."""
    p = form.point
    block = 128 * form.code_loads  # words of 16 rows

    def where(load: int) -> str:
        kb, rest = divmod(load, p.tiles * form.code_loads)
        tile, half = divmod(rest, form.code_loads)
        down = tile * form.between // 4 * form.blocks * 4 * block if form.spread else tile * block
        return form.along(kb, 4 * block, down + half * 128)

    total = p.depth * p.tiles * form.code_loads
    return Stream("codes", 4, total, p.ahead, where, write, once=True, again=form.again)


def of_rows(name: str, form: Form, each: int, write: Some) -> tuple[Stream, int]:
    """Loads of what rows have for each so many columns, `each` words for 64 of them; and for how many blocks of 64 a load is.

    Words of eight rows lie together, some of a row after each other (`pack.paired_rows`).
    """
    p, row = form.point, form.blocks * each
    run = math.gcd(4, row)
    even = form.even and p.depth * each % run == 0
    wide = math.gcd(run, max(each, FEW)) if even else math.gcd(run, each)
    blocks = max(wide // each, 1)
    parts = max(each // wide, 1)

    def where(load: int) -> str:
        group, rest = divmod(load, p.tiles * parts)
        tile, part = divmod(rest, parts)
        down = tile * form.between * 8 * row
        if even:
            i = group * blocks * each + part * wide
            return str(down + i // run * run * 8 + i % run)
        i = f"({form.block(group * blocks)} * {each} + {part * wide})"
        return f"{down} + {i} // {run} * {run * 8} + {i} % {run}"

    total = -(-p.depth // blocks) * p.tiles * parts
    ahead = min(total, 2 * p.tiles * parts)
    if total % ahead:
        ahead = total
    return Stream(name, wide, total, ahead, where, write, once=False, again=form.again), blocks


class Rolled:
    """Codes, scales and zero points in a loop over `turn`, a few blocks of 64 columns at a time, the next ones being under way.

    Args:
        rows: words of a row pair for 64 columns, by argument.
    """

    def __init__(self, form: Form, rows: dict[str, int], write: Some, do: Some) -> None:
        p = form.point
        self.form, self._do = form, do
        self.count = p.depth // p.loop
        block = 128 * form.code_loads
        self.loads = p.loop * p.tiles * form.code_loads
        assert form.even and p.depth % p.loop == 0

        def of_codes(load: int) -> str:
            kb, rest = divmod(load, p.tiles * form.code_loads)
            tile, half = divmod(rest, form.code_loads)
            down = tile * form.between // 4 * form.blocks * 4 * block if form.spread else tile * block
            return str(kb * 4 * block + down + half * 128)

        self.stream = Stream("codes", 4, self.loads, self.loads, of_codes, write, once=True, again=True)
        self.strides = {"codes": p.loop * 4 * block}
        self.sides: list[tuple[Stream, int]] = []
        for name, each in rows.items():
            row, words = form.blocks * each, p.loop * each
            run = math.gcd(4, row)
            assert words % run == 0

            def of_row(load: int, words: int = words, run: int = run, row: int = row) -> str:
                tile, i = divmod(load * run, words)
                return str(tile * form.between * 8 * row + i * 8)

            total = p.tiles * words // run
            self.sides.append((Stream(name, run, total, total, of_row, write, once=False, again=True), each))
            self.strides[name] = words * 8

    def start(self, first: int, last: int) -> None:
        """The first loads of these numbers, as many as there are."""
        self.stream.start(first, last)
        for side, _ in self.sides if first == 0 else []:
            side.start(0, side.total)

    def begin(self, text: Text) -> None:
        """Where what follows lies."""
        inside, again = f"turn < {self.count - 1}", self.form.again
        text.do(f"more = gl.where({inside}, tid * 0 + 1, {'further' if again else 0})")
        for name, stride in self.strides.items():
            words = f"{name}_at_words + (turn + 1) * {stride}"
            text.do(f"{name}_next = {name} + {f'gl.where({inside}, {words}, {name}_after_words)' if again else f'({words})'}")

    def codes(self, kb: int, tile: int) -> list[str]:
        """Words of a tile."""
        self._do(moves.IN_STEP, "tid")
        at = (kb * self.form.point.tiles + tile) * self.form.code_loads
        return [w for u in range(at, at + self.form.code_loads) for w in self.stream.of(u)]

    def beside(self, kb: int, tile: int) -> list[str]:
        """Scales and zero points of a tile."""
        found: list[str] = []
        for side, each in self.sides:
            loads = side.total // self.form.point.tiles
            words = [w for u in range(tile * loads, (tile + 1) * loads) for w in side.of(u)]
            found += words[kb * each : (kb + 1) * each]
        return found

    def done(self, kb: int, tile: int) -> None:
        """A tile's codes are not needed any more."""
        at = (kb * self.form.point.tiles + tile) * self.form.code_loads
        for u in range(at, at + self.form.code_loads):
            self.stream.used(u)

    def end(self) -> None:
        """Nor are the scales."""
        for side, _ in self.sides:
            for u in range(side.total):
                side.used(u)
