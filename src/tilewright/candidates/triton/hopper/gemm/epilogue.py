"""What a Hopper gemm's kernel is handed of its program: small functions that read what stores read, compute a piece of a tile's
results from its sums, and say where it goes; the configuration; and the arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilewright.candidates.triton.expressions.emit import Tile, pointer_of
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.hopper.fast_math import FastMath
from tilewright.candidates.triton.hopper.gemm.form import Form, Out, leaves
from tilewright.candidates.triton.hopper.gemm.view import TmaView
from tilewright.candidates.triton.hopper.ptx import EDITION
from tilewright.candidates.triton.runtime import module
from tilewright.dtype import PRED
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param

KERNEL = "tilewright.candidates.triton.hopper.gemm._kernel.gemm"
LATE = frozenset({"acc", "right", "fetched"})  # names that a piece's sums come with


class Program:
    """What a form's kernel is handed.

    Attributes:
        descriptors: arguments that are TMA descriptors, in order.
        pointers: arguments that are pointers to sources, and to results that TMA does not write.
        scratch: room for parts of sums and counters.
        extents: of the problem.
    """

    def __init__(self, form: Form) -> None:
        self.form, self.config = form, form.config
        self.alike = self.config.alike
        self.outs = form.outs[:1] if self.alike else form.outs  # of which there is code
        read = {n for o in form.outs for n in toposort((o.access.root,)) if isinstance(n.op, Param)}
        read -= {o.fetched[0] for o in form.outs if o.fetched} | {form.plan.second}
        names = {pointer_of(n) for n in read} | {f"r{i}" for i, o in enumerate(form.outs) if o.view is None}
        if form.plan.blocks:
            names |= {f"p{form.plan.blocks.lhs}", f"p{form.plan.blocks.rhs}"}
        self.pointers = sorted(names, key=lambda n: (n[0], int(n[1:])))
        self.operands = ["b_desc", *form.coded.descriptors] if form.coded else ["a_desc", "b_desc"]
        self.stored = [f"c{i}_desc" for i, o in enumerate(form.outs) if o.view]
        self.fetched = [f"d{i}_desc" for i, o in enumerate(form.outs) if o.fetched]
        self.descriptors = [*self.operands, *self.stored, *self.fetched]
        self.scratch = ["partial", "arrived"] if self.config.streamed else []
        self.extents = ["B", "M", "N", "K", *(["D"] if self.config.streamed else [])]
        self._numbers = Text("gl")
        first = form.outs[0]
        chosen = {n: f"s{k}" for k, n in enumerate(leaves(first, form.plan.second))} if self.alike else {}
        self._chosen, self._where = list(chosen.values()), chosen

    @property
    def arguments(self) -> list[str]:
        """Of the kernel, in order, but for numbers."""
        return [*self.descriptors, *self.pointers, *self.scratch, *self.extents]

    def write(self) -> Written:
        """The module."""
        form = self.form
        visited = [self._visitor(i, out) for i, out in enumerate(self.outs)]
        functions = {
            "begin": ("i side tile layout", [v[0] for v in visited]),
            "load": ("i side tile begun first layout", [v[1] for v in visited]),
            "visit": ("i acc near side tile begun loaded first layout", [v[2] for v in visited]),
            "place": ("i b row column", [_coordinates(o.view) for o in self.outs]),
            "fetched_place": ("b row column", [_coordinates(o.fetched and o.fetched[1]) for o in self.outs[:1]]),
            "choose": ("side col", [self._choice()]),
        }
        # Kernels that differ in what is rewritten must differ in text.
        note = f"{form.plan.lhs.dtype} x {form.plan.rhs.dtype}, rewritten by {EDITION}"
        scales = f"(p{form.plan.blocks.lhs}, p{form.plan.blocks.rhs})" if form.plan.blocks else "()"
        operands = ["a_desc", "b_desc"] if form.coded is None else ["b_desc", _tuple(form.coded.descriptors)]
        extents = _tuple([*self.extents, *(["0"] if not self.config.streamed else [])])
        return module.instance(
            KERNEL if form.coded is None else form.coded.kernel,
            self.config,
            [*operands, _tuple(self.stored), _tuple(self.fetched), _tuple(self.scratch), scales, extents],
            self.pointers,
            {name: (_annotated(arguments), _of_each_store(bodies)) for name, (arguments, bodies) in functions.items()},
            self._numbers.numbers,
            [*self.scratch, *self.extents],
            note,
        )

    def _visitor(self, i: int, out: Out) -> tuple[list[str], list[str], list[str]]:
        """Bodies of `begin`, `load` and `visit` for store i: what pieces of a tile share, what one reads, what it becomes."""
        plan, config, access, t = self.form.plan, self.config, out.access, Text("gl", beside=self._numbers)
        own = t.v(f"tile.row + gl.arange(0, {config.rows}, gl.SliceLayout(1, layout))")
        rows = t.v(f"tile.b * M + {own}")
        columns = t.v(f"first + gl.arange(0, {out.columns}, gl.SliceLayout(0, layout))")
        tile = Tile(
            rows,
            columns,
            access.columns_extent if self.alike else plan.N,
            row_mask=t.v(f"{own} < M") if plan.M % (config.tile_m * (2 if config.paired else 1)) else None,
            column_mask=t.v(f"{columns} < N") if plan.N % config.width else None,
            acc="acc",
            near={} if plan.second is None else {plan.second: "right"},
        )
        near = {} if out.fetched is None else {out.fetched[0]: "fetched"}
        emitter = FastMath(t, tile, lambda n: self._where.get(n) or pointer_of(n), near)
        emitter.values([n for n in access.views if isinstance(n.op, Param) and n not in (plan.second, *near)], access)
        if out.view is None:
            emitter.store(access, f"r{i}")
            result = None
        else:
            result = emitter.value(access)
            if access.root.dtype is PRED:
                result = t.v(f"{result}.to(gl.uint8)")
        begun, loaded, body = _by_time(t.lines, result)
        chosen = [f"{', '.join(self._chosen)}, = tile.chosen"] if self._chosen else []
        beside = ["right"] * (plan.second is not None) + ["fetched"] * bool(near)
        return (
            [*chosen, *begun[1], f"return {_tuple(begun[0])}"],
            [*chosen, *_unpacked(begun[0], "begun"), *loaded[1], f"return {_tuple(loaded[0])}"],
            [
                *chosen,
                *_unpacked(beside, "near"),
                *_unpacked(begun[0], "begun"),
                *_unpacked(loaded[0], "loaded"),
                *body,
                *([f"return {result}"] if result else []),
            ],
        )

    def _choice(self) -> list[str]:
        """Which of stores that are alike a tile belongs to: where its first column is there, and its leaves lie."""
        if not self.alike:
            return ["return ()"]
        (first, *others), second = self.form.outs, self.form.plan.second
        extent = first.access.columns_extent
        lines = [f"which = col // {extent}", f"own = col - which * {extent}"]
        lines += [f"s{k} = {pointer_of(leaf)}" for k, leaf in enumerate(leaves(first, second))]
        for i, other in enumerate(others):
            pairs = list(zip(leaves(other, second), leaves(first, second), strict=True))
            lines += [f"if which == {i + 1}:"] * bool(pairs)
            for k, (leaf, its) in enumerate(pairs):
                further = other.access.of_leaf(leaf).offset - first.access.of_leaf(its).offset
                lines.append(f"    s{k} = {pointer_of(leaf)}{f' + {further}' if further else ''}")
        return [*lines, f"return which, own, {_tuple(self._chosen)}"]


def _tuple(names: Sequence[str]) -> str:
    return f"({''.join(f'{n}, ' for n in names)})"


def _unpacked(names: Sequence[str], whole: str) -> list[str]:
    return [f"{', '.join(names)}, = {whole}"] if names else []


def _coordinates(view: TmaView | None) -> list[str]:
    return [f"return {_tuple(view.coordinates('b', 'row', 'column') if view else ())}"]


def _annotated(arguments: str) -> list[str]:
    return [f"{a}: gl.constexpr" if a in ("i", "layout") else a for a in arguments.split()]


def _of_each_store(bodies: Sequence[Sequence[str]]) -> Text:
    """One function's body of those for each store."""
    t = Text("gl")
    if len(bodies) == 1:
        for line in bodies[0]:
            t.do(line)
        return t
    for i, body in enumerate(bodies):
        with t.block(f"{'el' * (i > 0)}if i == {i}:"):
            for line in body:
                t.do(line)
    return t


Loads = tuple[list[str], list[str]]  # names of values that are read, and the lines that give them


def _by_time(lines: Sequence[str], result: str | None) -> tuple[Loads, Loads, list[str]]:
    """Lines of a value in those that read what depends on rows alone, those that read what depends on the piece's columns, and
    the others; arithmetic of addresses stands wherever it is needed."""
    given = dict[str, str]()  # of each name its expression
    needs, level = dict[str, list[str]](), dict[str, int]()
    last: list[str] = []
    for line in lines:
        m = re.fullmatch(r"(v\d+) = (.*)", line.strip())
        if m is None:
            last.append(line.strip())
            continue
        name, given[m[1]] = m[1], m[2]
        needs[name] = _names(m[2])
        words = set(needs[name])
        own = 2 if words & LATE else 1 if "first" in words else 0
        level[name] = max([own, *(level[n] for n in words if n in level)])
    reads = [[n for n in given if "gl.load(" in given[n] and level[n] == when] for when in (0, 1)]

    def closure(wanted: Sequence[str], known: set[str]) -> list[str]:
        """Lines, in order, that give what is wanted once some names are known."""
        found, left = set[str](), list(wanted)
        while left:
            name = left.pop()
            if name in given and name not in found and name not in known:
                found.add(name)
                left += needs[name]
        return [f"{n} = {given[n]}" for n in given if n in found]

    begun, known = (reads[0], closure(reads[0], set())), set(reads[0])
    loaded = reads[1], closure(reads[1], known)
    body = closure([*([] if result is None else _names(result)), *(n for x in last for n in _names(x))], known | set(reads[1]))
    return begun, loaded, [*body, *last]


def _names(expression: str) -> list[str]:
    """Names in an expression, those within strings aside."""
    return re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", expression))
