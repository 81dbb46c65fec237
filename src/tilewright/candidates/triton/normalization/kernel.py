"""A reduction nest as the text of a Triton kernel: a tile of whole rows a program, kept in registers from load to store.

Where something is reduced, a tile holds all columns of its rows, so that nothing is read twice and each reduction is one step;
where nothing is, it takes a piece of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.exchange import Waits, WaitsByRows
from tilewright.candidates.triton.expressions.printer import in_registers, zero
from tilewright.candidates.triton.expressions.text import KernelSource, Text
from tilewright.candidates.triton.runtime.module import IMPORTS
from tilewright.dtype import F32, PRED
from tilewright.ir.extent import Extent, divides
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Param, Reduce
from tilewright.lowering.access import Access, AccessMap
from tilewright.lowering.reduction_nest import ReductionNest

DEPENDENT_LAUNCH = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
TAKEN_BY_EACH = 2  # parts of the work of a kernel that waits by rows, about
REDUCTIONS = """
@triton.jit
def highest(a, b):  # tl.max passes over NaN
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def lowest(a, b):
    return tl.minimum(a, b, tl.PropagateNan.ALL)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def of_all(a, b):
    return a & b


@triton.jit
def of_any(a, b):
    return a | b
"""
BY_PAIRS = {"multiply": ("product", "*"), "and": ("of_all", "&"), "or": ("of_any", "|")}
OF_TESTS = {"multiply": "and", "minimum": "and", "add": "or", "maximum": "or"}  # what they are of pred


@dataclass(frozen=True)
class Tiles:
    """A reduction nest cut into tiles.

    Attributes:
        nest: the nest to compute.
        tile_m: rows that are worked on at once; a power of two.
        tile_n: columns that are worked on at once; a power of two.
        dependent_launch: the kernel may be launched before the one ahead of it has ended (programmatic dependent launch).
        early: params of the nest that are constants, and are read before that one has ended.
    """

    nest: ReductionNest
    tile_m: int
    tile_n: int
    dependent_launch: bool = False
    early: tuple[Node, ...] = ()

    @cached_property
    def chunks(self) -> int:
        """Parts of a tile's columns: what is reduced is held whole, so that nothing is read twice. Code for open columns serves
        those of as many parts."""
        return int(-(-self.nest.columns // self.tile_n)) if any(self.nest.level.values()) else 1

    @property
    def pieces(self) -> int:
        """Programs that share a row's columns."""
        return -(-self.nest.columns // (self.chunks * self.tile_n))

    @property
    def grid(self) -> int:
        """Programs in all."""
        return -(-self.nest.rows // self.tile_m) * self.pieces


def kernel_text(several: Sequence[Tiles], fp8: frozenset[str], arrival: Waits | None = None, programs: int = 0) -> KernelSource:
    """A module with the function `kernel`, whose programs work on the first nest, then on the next.

    Args:
        several: the nests and their tiles.
        fp8: types that the hardware converts (`module.exact_fp8`).
        arrival: other ranks that send some of the sources, if they do.
        programs: of a kernel that waits by rows, each of which takes parts of the work in turn.
    """
    text, total, read = Text(), sum(tiles.grid for tiles in several), sources_of(several)
    by_rows = arrival if isinstance(arrival, WaitsByRows) else None
    dependent = any(tiles.dependent_launch for tiles in several) or by_rows is not None
    if by_rows is not None:
        by_rows.wait(text, programs)
        text.do("seen = tl.program_id(0) * 0 - 1")
        each = max(total // (TAKEN_BY_EACH * programs), 1)
        by_rows.take(text)
        with text.block(f"while taken < {-(-total // each)}:"):
            with text.block(f"for program in range(taken * {each}, tl.minimum(taken * {each} + {each}, {total})):"):
                _nests(text, several, read, fp8, by_rows)
            by_rows.take(text)
        text.do("gdc_launch_dependents()")  # what is launched early would take room from a rank that is waited for
    else:
        once = arrival if len(several) == 1 else None
        if once is None:
            if arrival is not None:
                if dependent:
                    text.do("gdc_wait()")
                arrival.wait(text, total)  # before what is launched early, which would take room from a rank that is waited for
            if dependent:
                text.do("gdc_launch_dependents()")
        text.do(f"program = {text.extent(total - 1)} - tl.program_id(0)")  # what the kernel ahead wrote last is in the cache
        _nests(text, several, read, fp8, once)
    if arrival is not None:
        arrival.end(text, programs or total)
    imports = f"{IMPORTS}{DEPENDENT_LAUNCH if dependent else ''}"
    given = [] if arrival is None else [*arrival.KINDS]
    arguments = ", ".join([*arguments_of(several), *given, *text.numbers])
    return KernelSource(f"{imports}\n{REDUCTIONS}\n\n@triton.jit\ndef kernel({arguments}):\n{text}\n", text.numbers)


def _nests(
    text: Text, several: Sequence[Tiles], read: Sequence[int], fp8: frozenset[str], arrival: Waits | None = None
) -> None:
    """The work of a program, on one of the nests; `arrival`: waits within it, of a single nest if not by rows."""
    first = 0
    for i, tiles in enumerate(several):
        not_before = f" and program >= {text.extent(first)}" if i else ""
        inside = f"if program < {text.extent(first + tiles.grid)}{not_before}:" if len(several) > 1 else ""
        with text.block(inside) if inside else nullcontext():
            program = text.v(f"program - {text.extent(first)}") if i else "program"
            once = None if isinstance(arrival, WaitsByRows) else arrival
            if isinstance(arrival, WaitsByRows):
                program = _wait(text, tiles, program, read, arrival)
            _Rows(text, tiles, program, str(i), read, fp8).write(once)
        first += tiles.grid


def _wait(text: Text, tiles: Tiles, program: str, read: Sequence[int], arrival: WaitsByRows) -> str:
    """The wait of a nest's program: for its own rows, where it reads what is sent row by row; else for all of them. Gives the
    program's number, in an order in which what comes first is read first."""
    r, sent = tiles.nest, _sent(read, arrival)
    leaves = [n for n in r.nodes if isinstance(n.op, Param) and r.sources[n.op.index] in sent]
    if not leaves:
        return program
    own = all(n not in r.read_in_pairs and _row_by_row(r.access.of_leaf(n), *arrival.extents) for n in leaves)
    if not own or r.rows != arrival.extents[0]:
        arrival.wait_for(text, None, 0)
        return program
    program = arrival.in_order(text, program, tiles.tile_m, tiles.pieces)
    row = text.v(program if tiles.pieces == 1 else f"{program} // {tiles.pieces}")
    arrival.wait_for(text, text.v(f"{row} * {tiles.tile_m}"), tiles.tile_m)
    return program


def _sent(read: Sequence[int], arrival: Waits) -> set[int]:
    """The sources that other ranks send."""
    return {read[int(name[1:])] for name in arrival.pointers}


def _row_by_row(place: AccessMap, rows: int, columns: int) -> bool:
    """Tell whether row i of a kernel reads within row i of a source of so many rows and columns."""
    across = place.offset + sum((t.extent - 1) * t.stride for t in place.columns)
    return [(t.extent, t.inner, t.stride) for t in place.rows] == [(rows, 1, columns)] and across < columns


def arguments_of(several: Sequence[Tiles]) -> list[str]:
    """The names of the kernel's arguments, but for numbers: a pointer for each source that is read, and for each result."""
    results = {i for tiles in several for i in tiles.nest.outputs}
    return [f"p{i}" for i in range(len(sources_of(several)))] + [f"o{i}" for i in sorted(results)]


def sources_of(several: Sequence[Tiles]) -> tuple[int, ...]:
    """The problem's source, by index, that each pointer that is read stands for."""
    return tuple(dict.fromkeys(i for tiles in several for i in tiles.nest.sources))


class _Rows(Emitter):
    """An emitter that knows reductions along the columns, and rows of a table picked by index.

    A value that varies along the columns is one value for each chunk of them, any other a single one. What is every other
    element in memory is read and written as pairs of neighbours.

    Args:
        text: where to.
        tiles: the nest.
        program: its program's number.
        name: sets its names in the text apart.
        read: sources of the kernel.
        fp8: see `Printer`.
    """

    def __init__(self, text: Text, tiles: Tiles, program: str, name: str, read: Sequence[int], fp8: frozenset[str]) -> None:
        r, m, n = tiles.nest, tiles.tile_m, tiles.tile_n
        pieces = text.extent(tiles.pieces)
        piece = "" if pieces == "1" else f"{program} % {pieces} * {n} + "
        rows, row_mask = f"rows{name}", None if divides(m, r.rows) else f"row_mask{name}"
        paired = bool(r.read_in_pairs or r.written_in_pairs)
        here: dict[int, list[Tile]] = {1: [], 2: []}  # names in scope, of each chunk; and where a column is one of a pair
        for i, times in product(range(tiles.chunks), (1, 2) if paired else (1,)):
            end = f"{name}_{i}{'_pairs' * (times - 1)}"
            first = f"{piece}{i * n}"
            text.do(f"columns{end} = {first if times == 1 else f'({first}) * 2'} + tl.arange(0, {times * n})")
            mask = None
            if not divides(n, r.columns) and i == tiles.chunks - 1:
                mask = f"column_mask{end}"
                text.do(f"{mask} = columns{end} < {text.extent(times * r.columns)}")
            here[times].append(Tile(rows, f"columns{end}", times * r.columns, row_mask, mask))
        text.do(f"{rows} = {program}{'' if pieces == '1' else f' // {pieces}'} * {m} + tl.arange(0, {m})")
        if row_mask is not None:
            text.do(f"{row_mask} = {rows} < {text.extent(r.rows)}")

        def pointer(leaf: Node) -> str:
            assert isinstance(leaf.op, Param)
            return f"p{read.index(r.sources[leaf.op.index])}"

        super().__init__(text, here[1][0], pointer, fp8)
        self._here, self._tiles, self._nest, self._shape = here[1], tiles, r, f"({m}, {n})"
        self._of_pairs = dict(zip((tile.columns for tile in here[1]), here[2], strict=False))
        self._split: dict[str, tuple[str, str]] = {}  # pairs that were read, by the name of both
        self.look_at(r.roots)
        self._done: list[dict[Node, str]] = [{} for _ in here[1]]
        self._read = read

    def write(self, arrival: Waits | None = None) -> None:
        """Every value, and the stores of the results. `arrival`: the one wait for what other ranks send, before which all else
        is read."""
        r, early = self._nest, list(self._tiles.early)
        for n in early:
            self._work_out(n)
        if self._tiles.dependent_launch:
            self.text.do("gdc_wait()")
        if arrival is not None:
            sent = _sent(self._read, arrival)
            own = [n for n in r.nodes if isinstance(n.op, Param) and n not in early and r.sources[n.op.index] not in sent]
            for n in own:
                self._work_out(n)
            early += own
            arrival.wait(self.text, self._tiles.grid)
            if self._tiles.dependent_launch:  # no sooner: what is launched would take room from a rank that is waited for
                self.text.do("gdc_launch_dependents()")
        for n in r.nodes:
            if n not in early:
                self._work_out(n)
        seconds = {second for second, _ in r.written_in_pairs.values()}
        for i, (output, root, store) in enumerate(zip(r.outputs, r.roots, r.stores, strict=True)):
            if root not in r.across:
                self.store(store, f"o{output}", self._done[0][root], by_row=True)
                continue
            for tile, values in zip(self._here, self._done, strict=True):
                self.tile = tile
                if i in r.written_in_pairs:
                    second, place = r.written_in_pairs[i]
                    self._store_pairs(place, f"o{output}", values[root], values[r.roots[second]], root)
                elif i not in seconds:
                    self.store(store, f"o{output}", values[root])

    def _work_out(self, n: Node) -> None:
        """A value, once what it is made of is known."""
        r = self._nest
        for tile, values in zip(self._here, self._done if n in r.across else self._done[:1], strict=False):
            self.tile = tile
            values[n] = self._reduce(n) if isinstance(n.op, Reduce) else self._node(n, r.access, values)
        for values in self._done[1:]:
            values.setdefault(n, self._done[0][n])

    def _node(self, n: Node, access: Access, done: dict[Node, str]) -> str:
        if isinstance(n.op, Gather):
            return self._pick(n, access, done[n.src[1]], by_column=n.src[1] in self._nest.across)
        if n in self._nest.tables:
            return ""  # read where it is picked from
        return super()._node(n, access, done)

    def _spread(self, access: Access, place: AccessMap) -> tuple[str | None, str | None]:
        """The offsets of rows and columns; what varies along the columns alone is read as a tile, too, each thread its own
        columns: threads would share out a vector, and exchange it through shared memory."""
        rows, columns = super()._spread(access, place)
        if rows is None and columns is not None:
            columns = self.text.call("broadcast_to", columns, self._shape)
        return rows, columns

    def _leaf(self, n: Node, access: Access) -> str:
        if n not in self._nest.read_in_pairs:
            return super()._leaf(n, access)
        t, (which, place) = self.text, self._nest.read_in_pairs[n]
        at, mask = self._at_pairs(place)
        both = t.call("load", f"{self.pointer(n)} + {at}", *([f"mask={mask}", f"other={zero(n.dtype)}"] if mask else []))
        if both not in self._split:
            apart = t.call("reshape", both, f"({self._tiles.tile_m}, {self._tiles.tile_n}, 2)")
            self._split[both] = (f"{both}_first", f"{both}_second")
            t.do(f"{', '.join(self._split[both])} = tl.split({apart})")
        value = self._split[both][which]
        return t.v(f"{value} != 0") if n.dtype is PRED else value

    def _store_pairs(self, place: AccessMap, pointer: str, first: str, second: str, root: Node) -> None:
        """Values of `root` and of another, each beside the other's."""
        t = self.text
        values = [self.cast(x, "uint8") if root.dtype is PRED else x for x in (first, second)]
        both = t.call("join", *(t.call("broadcast_to", x, self._shape) for x in values))
        at, mask = self._at_pairs(place)
        both = t.call("reshape", both, f"({self._tiles.tile_m}, {2 * self._tiles.tile_n})")
        t.do(f"tl.store({pointer} + {at}, {both}{f', mask={mask}' if mask else ''})")

    def _at_pairs(self, place: AccessMap) -> tuple[str, str | None]:
        """The offsets of pairs, a tile of twice the columns, and the mask of those that exist."""
        t, tile = self.text, self._of_pairs[self.tile.columns]
        most = place.offset + sum((x.extent - 1) * x.stride for x in (*place.rows, *place.columns))
        spelt = self._spelt(place)
        rows = self._digits(tile.rows, place.rows, self._nest.rows, spelt, wide=most >= 1 << 31)
        base = rows if rows is not None and not place.offset else t.v(f"{rows or f'{tile.rows} * 0'} + {spelt(place.offset)}")
        masks = [self.expand(m, a) for a, m in ((0, tile.row_mask), (1, tile.column_mask)) if m is not None]
        mask = self._sum(*masks, sign="&")
        return t.v(f"{self.expand(base, 0)} + {self.expand(tile.columns, 1)}"), mask

    def _reduce(self, n: Node) -> str:
        """Chunk is combined with chunk before lanes and warps meet."""
        assert isinstance(n.op, Reduce)
        t, dtype = self.text, n.dtype
        fn = OF_TESTS.get(n.op.fn, n.op.fn) if dtype is PRED else n.op.fn
        adds, name = fn in ("add", "mean"), "uint" if dtype.kind == "uint" else "int"
        if adds or fn == "or":
            nothing = "0.0" if dtype is F32 else "0"
        elif fn in BY_PAIRS:
            nothing = "1" if fn == "multiply" or dtype is PRED else str(int(dtype.max) if name == "uint" else -1)
        else:
            worst = dtype.lowest if fn == "maximum" else dtype.highest
            nothing = f"float('{float(worst)}')" if dtype is F32 else str(int(worst))
        parts: list[str] = []
        for tile, values in zip(self._here, self._done, strict=True):
            value = t.call("broadcast_to", values[n.src[0]], self._shape)
            if dtype is PRED or (adds and dtype.is_integer):
                value = self.cast(value, f"{name}{max(dtype.bits, 32)}")
            if tile.column_mask is not None:
                value = self.where(t.v(f"{tile.column_mask}[None, :]"), value, nothing)
            parts.append(value)
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            rest = parts[len(parts) & ~1 :]
            if adds or fn in BY_PAIRS:
                parts = [t.v(f"{a} {'+' if adds else BY_PAIRS[fn][1]} {b}") for a, b in pairs] + rest
            else:
                how = ["tl.PropagateNan.ALL"] if dtype is F32 else []
                parts = [t.call(fn, a, b, *how) for a, b in pairs] + rest
        if adds or (fn not in BY_PAIRS and dtype is not F32):
            total = t.call("sum" if adds else fn[:3], parts[0], "axis=1", "keep_dims=True")
        else:
            combine = BY_PAIRS[fn][0] if fn in BY_PAIRS else "highest" if fn == "maximum" else "lowest"
            total = t.call("reduce", parts[0], "1", combine, "keep_dims=True")
        if adds and dtype is F32 and all(tile.column_mask is None for tile in self._here):
            total = t.v(f"{total} + 0.0")  # zeros that are all -0 come to 0
        if fn == "mean":
            return self._mean(total)
        if dtype is PRED:
            return t.v(f"{total} != 0")
        return total if dtype is F32 else self.cast(total, in_registers(dtype))

    def _mean(self, total: str) -> str:
        """A sum over the number of columns, rounded once (see `Printer.quotient`): the mean of equal numbers is that number."""
        n = self._nest.columns
        if isinstance(n, Extent):
            return self.text.call("div_rn", total, self.cast(self.text.extent(n), "float32"))
        near = self.text.v(f"{total} * {1 / n!r}")
        return near if not n & (n - 1) else self.corrected(near, total, repr(float(n)), repr(1 / n))
