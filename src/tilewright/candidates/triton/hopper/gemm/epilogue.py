"""The module of a Hopper gemm: its constants and arguments, and the functions generated from its program, which read what
stores read, compute a subtile of the results from its sums, and say where it goes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from tilewright.candidates.triton.expressions.chunks import STATEMENTS
from tilewright.candidates.triton.expressions.emit import Emitter, Tile, pointer_of
from tilewright.candidates.triton.expressions.text import KernelSource, Text
from tilewright.candidates.triton.hopper.fast_math import FastMath
from tilewright.candidates.triton.hopper.gemm.spec import KernelSpec, Store, leaves
from tilewright.candidates.triton.hopper.gemm.tma import TmaView
from tilewright.candidates.triton.hopper.ptx import REWRITE_DIGEST
from tilewright.candidates.triton.runtime import module
from tilewright.dtype import PRED
from tilewright.ir.extent import divides
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param

LATE = frozenset({"acc", "up", "aux"})  # names that a subtile's sums come with


def write(spec: KernelSpec) -> KernelSource:
    """The module of a kernel."""
    config, scales, numbers = spec.config, spec.plan.scales, Text("gl")
    stores = spec.stores[:1] if config.shared_epilogue else spec.stores
    chosen = {n: f"s{k}" for k, n in enumerate(leaves(stores[0], spec.plan.up))} if config.shared_epilogue else {}
    begin, load, visit = zip(*(_visitor(spec, i, s, chosen, numbers) for i, s in enumerate(stores)), strict=True)
    functions = {
        "begin": ("i side tile layout", begin),
        "load": ("i side tile begun first layout", load),
        "visit": ("i acc near side tile begun loaded first layout", visit),
        "place": ("i side b row column", [_coordinates(s.view, numbers) for s in stores]),
        "aux_place": ("side b row column", [_coordinates(stores[0].aux and stores[0].aux[1], numbers)]),
        "choose": ("side col", [_choice(spec, numbers)]),
        "put": ("i value side tile first layout", [_put(spec, i, s, numbers) for i, s in enumerate(stores)]),
        "lines": ("i side", [[f"return {_lines(spec, i, s, numbers)}"] for i, s in enumerate(stores)]),
    }
    descriptors = [a.name for a in spec.arguments if a.view is not None]
    operands = descriptors[: len(spec.operands)]
    by_letter = [[n for n in descriptors[len(operands) :] if n[0] == letter] for letter in "cd"]
    block_scales = [f"p{scales.lhs}", f"p{scales.rhs}"] if scales else []
    problem = [*spec.extents] if config.stream_k or config.owners else [*spec.extents, "0"]
    given = [_tuple(names) for names in (*by_letter, [*spec.scratch], block_scales, problem)]
    return module.instance(
        spec.kernel,
        config,
        [_tuple(operands), _tuple(given)],
        [a.name for a in spec.arguments if a.view is None],
        {name: (_annotated(arguments), _of_each_store(bodies)) for name, (arguments, bodies) in functions.items()},
        numbers.numbers,
        [*spec.scratch, *spec.extents],
        f"rewritten by {REWRITE_DIGEST}{f', statements of {STATEMENTS}' if config.owners else ''}{spec.note}",
    )


def _visitor(
    spec: KernelSpec, i: int, store: Store, chosen: Mapping[Node, str], numbers: Text
) -> tuple[list[str], list[str], list[str]]:
    """Bodies of `begin`, `load` and `visit` for store i: what subtiles of a tile share, what one reads, what it becomes.
    `chosen`: names for what stores that share them read each of its own."""
    plan, access, t = spec.plan, store.access, Text("gl", beside=numbers)
    tile = replace(_tile(spec, store, t), acc="acc", near={} if plan.up is None else {plan.up: "up"})
    near = {} if store.aux is None else {store.aux[0]: "aux"}
    emitter = FastMath(t, tile, lambda n: chosen.get(n) or pointer_of(n), near)
    emitter.values([n for n in access.views if isinstance(n.op, Param) and n not in (plan.up, *near)], access)
    result = emitter.value(access)
    if access.root.dtype is PRED:
        result = t.v(f"{result}.to(gl.uint8)")
    begun, loaded, body = _by_time(t.lines, result)
    names = _unpacked([*chosen.values()], "tile.chosen")
    beside = ["up"] * (plan.up is not None) + ["aux"] * bool(near)
    known = [*names, *_unpacked(begun[0], "begun")]
    return (
        [*names, *begun[1], f"return {_tuple(begun[0])}"],
        [*known, *loaded[1], f"return {_tuple(loaded[0])}"],
        [
            *names,
            *_unpacked(beside, "near"),
            *_unpacked(begun[0], "begun"),
            *_unpacked(loaded[0], "loaded"),
            *body,
            f"return {result}",
        ],
    )


def _tile(spec: KernelSpec, store: Store, t: Text) -> Tile:
    """The rows and columns of a subtile, and which of them exist."""
    plan, config = spec.plan, spec.config
    own = t.v(f"tile.row + gl.arange(0, {config.rows}, gl.SliceLayout(1, layout))")
    columns = t.v(f"first + gl.arange(0, {store.columns}, gl.SliceLayout(0, layout))")
    return Tile(
        t.v(f"tile.b * M + {own}"),
        columns,
        store.access.columns_extent if config.shared_epilogue else plan.N,
        row_mask=t.v(f"{own} < M") if config.some_rows else None,
        column_mask=None if divides(config.result_n, plan.N) else t.v(f"{columns} < N"),
    )


def _put(spec: KernelSpec, i: int, store: Store, numbers: Text) -> list[str]:
    """The body of `put` for store i."""
    if store.view is not None:
        return ["return"]
    t = Text("gl", beside=numbers)
    Emitter(t, _tile(spec, store, t)).store(store.access, f"r{i}", "value")
    return [line.strip() for line in t.lines]


def _lines(spec: KernelSpec, i: int, store: Store, numbers: Text) -> str:
    """The expression that the kernel's `lines` returns for store i: where its rows lie, `()` where none are staged."""
    return f"r{i} + {numbers.stride(store.access.of_result().offset)}, M, N" if spec.config.store_pitch[i] else "()"


def _choice(spec: KernelSpec, numbers: Text) -> list[str]:
    """The body of `choose`: of stores that share an epilogue the one, by the first column, its column there, and its leaves; of
    `owners` the memory, by number."""
    if spec.config.copies > 1:
        return [f"return own, {_tuple([f'to{r}' for r in range(spec.config.copies)])}"]
    if spec.config.owners:
        others = [line for r in range(1, spec.config.owners) for line in (f"if col == {r}:", f"    there = to{r}")]
        return ["there = to0", *others, "return own, (there, )"]
    if not spec.config.shared_epilogue:
        return ["return ()"]
    first, up = spec.stores[0], spec.plan.up
    extent, own = first.access.columns_extent, leaves(first, up)
    names = [f"s{k}" for k in range(len(own))]
    wide = numbers.extent(extent)
    lines = [f"which = col // {wide}", f"own = col - which * {wide}"]
    lines += [f"{name} = {pointer_of(leaf)}" for name, leaf in zip(names, own, strict=True)]
    for i, other in enumerate(spec.stores[1:]):
        lines += [f"if which == {i + 1}:"] * bool(own)
        for name, leaf, its in zip(names, leaves(other, up), own, strict=True):
            further = other.access.of_leaf(leaf).offset - first.access.of_leaf(its).offset
            lines.append(f"    {name} = {pointer_of(leaf)}{f' + {numbers.stride(further)}' if further else ''}")
    return [*lines, f"return which, own, {_tuple(names)}"]


def _tuple(names: Sequence[str]) -> str:
    return f"({''.join(f'{n}, ' for n in names)})"


def _unpacked(names: Sequence[str], whole: str) -> list[str]:
    return [f"{', '.join(names)}, = {whole}"] if names else []


def _coordinates(view: TmaView | None, numbers: Text) -> list[str]:
    return [f"return {_tuple(view.coordinates('b', 'row', 'column', numbers.extent) if view else ())}"]


def _annotated(arguments: str) -> list[str]:
    return [f"{a}: gl.constexpr" if a in ("i", "layout") else a for a in arguments.split()]


def _of_each_store(bodies: Sequence[Sequence[str]]) -> Text:
    """One function's body of those for each store."""
    t = Text("gl")
    for i, body in enumerate(bodies):
        with t.block(f"{'el' * (i > 0)}if i == {i}:") if len(bodies) > 1 else nullcontext():
            for line in body:
                t.do(line)
    return t


Loads = tuple[list[str], list[str]]  # names of values that are read, and the lines that give them


def _by_time(lines: Sequence[str], result: str) -> tuple[Loads, Loads, list[str]]:
    """Lines of a value in those that read what depends on rows alone, those that read what depends on a subtile's columns, and
    the others; arithmetic of addresses stands wherever it is needed."""
    given, level = dict[str, str](), dict[str, int]()  # of each name its expression, and when that is known
    for line in map(str.strip, lines):
        m = re.fullmatch(r"(v\d+) = (.*)", line)
        assert m is not None, line
        words = set(_names(m[2]))
        own = 2 if words & LATE else 1 if "first" in words else 0
        given[m[1]], level[m[1]] = m[2], max([own, *(level[n] for n in words if n in level)])
    begun, loaded = ([n for n in given if "gl.load(" in given[n] and level[n] == when] for when in (0, 1))

    def closure(wanted: Sequence[str], known: set[str]) -> list[str]:
        """Lines, in order, that give what is wanted once some names are known."""
        found, left = set[str](), list(wanted)
        while left:
            name = left.pop()
            if name in given and name not in found and name not in known:
                found.add(name)
                left += _names(given[name])
        return [f"{n} = {given[n]}" for n in given if n in found]

    body = closure(_names(result), {*begun, *loaded})
    return (begun, closure(begun, set())), (loaded, closure(loaded, set(begun))), body


def _names(expression: str) -> list[str]:
    """Names in an expression, those within strings aside."""
    return re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", expression))
