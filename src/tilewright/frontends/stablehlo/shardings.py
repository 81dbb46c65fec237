"""Shardings of a program over a mesh, as StableHLO and HLO say them: found, and spelt in Shardy's one way.

A program says how its values are to be split in attributes of arguments, results and operations, and by operations that do
nothing else. There are four spellings: Shardy's own (`#sdy.sharding<@mesh, [{"tp"}, {}]>`, in HLO a string of its front end),
and those of HLO, where device numbers stand in the order of a tensor's parts, `{devices=[2,2]0,2,1,3}`, or as a transposed
count, `{devices=[2,2]<=[2,2]T(1,0)}`, or as axes with names, `{mesh['a'=2,'b'=2], [{'a'}, {}]}`. Device n is rank n.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends.stablehlo import jaxlib
from tilewright.frontends.stablehlo.elementwise import STANDS_FOR, elementwise_target
from tilewright.ir.mesh import Mesh, Placement

_SAID = re.compile(r"sharding|\bsdy\.|xla\.sdy|SPMDFullToShardShape")
_ANNOTATIONS = ("Sharding", "xla.sdy.Sharding", "xla.sdy.FuncResultSharding")
_CONSTRAINTS = ("sdy.sharding_constraint", "sdy.reshard", "sdy.sharding_group")
_BEGIN, _END = "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"
_OLD = ("SPMDFullToShardShape", "SPMDShardToFullShape")
_BODY = "xla.sdy.manual_computation_body"
_COLLECTIVES = (
    *("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "collective_permute", "collective_broadcast"),
    *("partition_id", "replica_id"),
)
_CALLS = ("func.call", "mhlo.call", "mhlo.fusion", "stablehlo.composite")
_KEYS = ("sdy.sharding", "mhlo.sharding")
_FRONTEND, _WORDS = "mhlo.frontend_attributes", "xla.sdy.sharding"
_MAX_DEPTH = 100
_AGAIN = "print the module again, whole"
_ALL = re.compile(r"\{\s*replicated\s*\}")
_UNREAD = re.compile(r"\{\s*(maximal|unknown|manual|unreduced)\b[^{}]*\}")
_DEVICES = re.compile(
    r"\{\s*devices=\[(?P<tile>[\d,]+)\]"
    r"(?:<=\[(?P<count>[\d,]+)\](?:T\((?P<turn>[\d,]+)\))?|(?P<list>[\d,]+))"
    r"(?P<rest>[^{}]*(?:\{[^{}]*\}[^{}]*)?)\}"
)
_NAMED = re.compile(
    r"\{\s*mesh\[(?P<axes>[^\]]*)\](?:,\s*device_ids=\((?:\[(?P<count>[\d,]+)\]T\((?P<turn>[\d,]+)\)|(?P<list>[\d,\s]*))\))?"
    r",\s*\[(?P<dims>[^\]]*)\](?P<rest>.*)\}",
    re.DOTALL,
)
_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:,\s*device_ids=\((?:\[(?P<count>[\d,]+)\]T\((?P<turn>[\d,]+)\)|(?P<list>[\d,\s]*))\))?\s*\{(?P<over>[^{}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'\s*=\s*(\d+)")
_USED = re.compile(r"'([^']+)'(:\(\d+\)\d+)?")
_ALIKE = frozenset(
    f"stablehlo.{name}" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "tanh")
)


def may_say(text: str) -> bool:
    """Tell whether a text may say anything of shardings."""
    return _SAID.search(text) is not None


@dataclass
class Said:
    """Words of a module on shardings, by where they stand.

    Attributes:
        arguments: what is said of arguments of the entry function, by place.
        results: likewise of its results.
        operations: numbers of operations of which something is said, by name.
        parts: some of it computes over parts, as `shard_map` does.
        local: outside of that, devices exchange values: the program is one device's.
        mesh: the mesh that the module names, in the words of `--mesh`; "" where it names none.
    """

    arguments: dict[int, str]
    results: dict[int, str]
    operations: Counter[str]
    parts: bool
    local: bool
    mesh: str

    def __bool__(self) -> bool:
        return bool(self.arguments or self.results or self.operations or self.parts)

    def notes(self, labels: Sequence[str], outputs: Sequence[str]) -> list[str]:
        """Sentences for who compiles the program for one device, where whole tensors are taken and given."""
        notes = [
            f"input {labels[i]!r} is sharded ({s}) in its source; the whole of it is taken here"
            for i, s in self.arguments.items()
        ]
        notes += [
            f"output {outputs[i]!r} is sharded ({s}) in its source; the whole of it is given here"
            for i, s in self.results.items()
        ]
        if self.operations:
            shown = ", ".join(f"{name} ({count})" for name, count in self.operations.items())
            notes.append(f"shardings of operations are of no use on one device: {shown}")
        how = f"for a program of several ranks give their mesh: --mesh {self.mesh or 'tp=2'} (mesh=…)"
        return [*notes, how] if notes else []


def walk(block: Any) -> Iterator[Any]:
    """The operations of a block and of all regions within it, as jaxlib has them."""
    for op in block.operations:
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from walk(inner)


def _functions(module: Any) -> dict[str, Any]:
    found = (op.operation for op in module.body.operations if op.operation.name == "func.func")
    return {str(f.attributes["sym_name"].value): f for f in found}


def said(module: Any, entry: str) -> Said:
    """Words of a module on shardings."""
    found = Said({}, {}, Counter(), False, False, next((str(m) for m in _meshes(module).values()), ""))
    for name, function in _functions(module).items():
        for side, key in ((found.arguments, "arg_attrs"), (found.results, "res_attrs")) if name == entry else ():
            for i, attrs in enumerate(list(function.attributes[key]) if key in function.attributes else []):
                shown = _shown(attrs)
                if shown is not None and not _ALL.fullmatch(shown) and not shown.startswith("{maximal"):
                    side[i] = shown
        for op in (op for region in function.regions for block in region.blocks for op in walk(block)):
            target = _target(op)
            if op.name == "sdy.manual_computation" or target in (_BEGIN, *_OLD):
                found.parts = True
            elif op.name in _CONSTRAINTS or target in _ANNOTATIONS or _shown(op.attributes) is not None:
                found.operations[target or op.name] += 1
        if not name.startswith(_BODY):
            found.local = found.local or any(_exchanges(b) for region in function.regions for b in region.blocks)
    return found


def _exchanges(block: Any) -> bool:
    """Tell whether operations exchange values between devices, outside of computations over parts."""
    for op in (o.operation for o in block.operations):
        if op.name.partition(".")[2] in _COLLECTIVES and op.name.partition(".")[0] in ("stablehlo", "mhlo"):
            return True
        if op.name != "sdy.manual_computation" and any(_exchanges(b) for r in op.regions for b in r.blocks):
            return True
    return False


def _shown(attributes: Any) -> str | None:
    """A sharding among attributes, as it is written."""
    text = next((str(attributes[key]).strip('"') for key in _KEYS if key in attributes), None)
    if text is None and _FRONTEND in attributes and _WORDS in attributes[_FRONTEND]:
        text = str(attributes[_FRONTEND][_WORDS].value)
    return None if text is None else re.sub(r"^#sdy\.sharding(?:_per_value)?", "", text)


def _target(op: Any) -> str:
    """The target of a custom call; "" of any other operation."""
    known = getattr(op, "name", "").endswith(".custom_call")
    return str(op.attributes["call_target_name"].value) if known else ""


def _meshes(module: Any) -> dict[str, Mesh]:
    """The meshes that a module names.

    Raises:
        UnsupportedError: devices stand in a mesh in another order than counted.
    """
    named = (o.operation.attributes for o in module.body.operations if o.operation.name == "sdy.mesh")
    texts = {str(a["sym_name"].value): str(a["mesh"]) for a in named}
    about = module.operation.attributes
    if _FRONTEND in about and "xla.sdy.meshes" in about[_FRONTEND]:
        texts |= dict(re.findall(r"(\w+) = (#sdy\.mesh<[^>]*>)", about[_FRONTEND]["xla.sdy.meshes"].value))
    found: dict[str, Mesh] = {}
    for name, text in texts.items():
        axes = re.findall(r'"([^"]+)"=(\d+)', text)
        ids = [int(d) for d in re.findall(r"\d+", text.partition("device_ids")[2])]
        if ids != sorted(ids):
            what = f"the mesh {name!r} has its devices in another order than counted: {text[:120]}"
            raise UnsupportedError(what, hint="number the devices in the order of the mesh")
        if axes:
            found[name] = Mesh(tuple((axis, int(size)) for axis, size in axes))
    return found


def groups_by_axes(module: Any, text: str) -> list[list[int]] | None:
    """The groups of devices along whole axes of a mesh that the module names, as an attribute says them; None of any other."""
    found = re.search(r"replica_group_mesh_axes<mesh(?:_name)? = @([\w.]+), axes = \[(.*)\]", text)
    if found is None or "sub_axis" in text:
        return None
    named = (o.operation.attributes for o in module.body.operations if o.operation.name == "sdy.mesh")
    shown = next((str(a["mesh"]) for a in named if str(a["sym_name"].value) == found[1]), "")
    sizes = {axis: int(size) for axis, size in re.findall(r'"([^"]+)"=(\d+)', shown)}
    over = re.findall(r'name = "([^"]+)"', found[2])
    if not sizes or not set(over) <= set(sizes):
        return None
    ids = _numbers(shown.partition("device_ids")[2]) or [*range(math.prod(sizes.values()))]
    names = [*sizes]
    order = [names.index(n) for n in (*(n for n in names if n not in over), *over)]
    grid = np.array(ids).reshape([*sizes.values()]).transpose(order)
    return grid.reshape(-1, math.prod(sizes[n] for n in over)).tolist()


# HLO's spellings.


def groups_spelt_out(text: str) -> str:
    """HLO text whose groups along named axes are groups of device numbers: XLA's converter forgets the devices' order."""
    return _GROUPS.sub(_spelt_out, text)


def _spelt_out(found: re.Match[str]) -> str:
    used = {name: [int(d) for d in re.findall(r"\d+", part)] for name, part in _USED.findall(found["over"])}
    sizes: dict[tuple[str, int], int] = {}
    for name, size in _AXIS.findall(found["axes"]):
        before, own = used.get(name) or (1, int(size))
        sizes |= {(name, 0): before, (name, 1): own, (name, 2): int(size) // (before * own)}
    names, over = [*sizes], [(name, 1) for name in used]
    if not {*over} <= {*names}:
        return found[0]  # XLA's parser says what that is
    order = [names.index(n) for n in (*(n for n in names if n not in over), *over)]
    try:
        grid = _devices(found, math.prod(sizes.values())).reshape([*sizes.values()]).transpose(order)
    except ValueError:
        return found[0]
    rows = grid.reshape(-1, math.prod(sizes[n] for n in over)).tolist()
    return f"replica_groups={{{','.join('{' + ','.join(map(str, row)) + '}' for row in rows)}}}"


def _numbers(text: str | None) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", text or "")]


def _devices(found: re.Match[str], count: int) -> np.ndarray[Any, Any]:
    """Device numbers in the order of parts: listed, or counted and maybe transposed."""
    if found["list"] or not found["count"]:
        return np.array(_numbers(found["list"]) or [*range(count)], np.int64)
    counted = np.arange(math.prod(_numbers(found["count"]))).reshape(_numbers(found["count"]))
    return (counted.transpose(_numbers(found["turn"])) if found["turn"] else counted).reshape(-1)


def _tiles(text: str, where: str) -> tuple[list[np.ndarray[Any, Any]], list[str]] | None:
    """The part that each device has: along every axis of a tensor, then of each kind of subgroup, whose kinds come second.
    None of a tensor that all devices hold whole.

    Raises:
        InputError: the text is no sharding.
        UnsupportedError: it says something that is not read, such as values on one device alone.
    """
    if _ALL.fullmatch(text):
        return None
    named = _NAMED.fullmatch(text)
    found = _DEVICES.fullmatch(text)
    if named:
        tile, kinds, devices = _by_name(named, text, where)
    elif found:
        tile = _numbers(found["tile"])
        subgroups = re.search(r"last_tile_dims=\{([^{}]*)\}", found["rest"])
        kinds = re.findall(r"\w+", subgroups.group(1)) if subgroups else []
        kinds = kinds or (["replicated"] if "last_tile_dim_replicate" in found["rest"] else [])
        try:
            devices = _devices(found, math.prod(tile))
        except ValueError:
            devices = np.array([], np.int64)
    elif _UNREAD.fullmatch(text):
        raise UnsupportedError(
            f"the sharding {text} is not read", where=where, hint="values split over all devices, or whole on all"
        )
    else:
        raise InputError(f"no sharding: {text[:120]}", where=where, hint="{replicated}, or {devices=[2,2]<=[4]}")
    if devices.size != math.prod(tile) or sorted(devices.tolist()) != [*range(devices.size)]:
        raise InputError(f"no sharding: {text[:120]}", where=where, hint="a part for each device, and each device once")
    places = np.empty((devices.size, len(tile)), np.int64)
    places[devices] = np.indices(tile).reshape(len(tile), -1).T
    return [*places.T], kinds


def _by_name(found: re.Match[str], text: str, where: str) -> tuple[list[int], list[str], np.ndarray[Any, Any]]:
    """Parts along each axis and of replicas and summands, the kinds of the latter, and the devices in their order."""
    sizes = {name: int(size) for name, size in _AXIS.findall(found["axes"])}
    used = [_USED.findall(d) for d in re.findall(r"\{([^{}]*)\}", found["dims"])]
    summed = re.search(r"unreduced=\{([^{}]*)\}", found["rest"])
    apart = _USED.findall(summed.group(1)) if summed else []
    inner = [*itertools.chain(*used), *apart]
    if any(part or name not in sizes for name, part in inner):
        raise UnsupportedError(
            f"the sharding {text[:120]} is not read", where=where, hint="whole axes of the mesh that it names"
        )
    names, taken = [*sizes], [name for name, _ in inner]
    rest = [n for n in names if n not in taken]
    order = [names.index(n) for n in (*taken[: len(taken) - len(apart)], *rest, *(n for n, _ in apart))]
    devices = _devices(found, math.prod(sizes.values())).reshape([*sizes.values()]).transpose(order).reshape(-1)
    tile = [math.prod(sizes[name] for name, _ in d) for d in (*used, [(n, "") for n in rest], apart)]
    return tile, ["replicated", "unreduced"], devices


def along(mesh: Mesh, places: np.ndarray[Any, Any]) -> tuple[str, ...] | None:
    """The mesh axes by which ranks are numbered so, the last one fastest; None where there are none.

    Args:
        mesh: the ranks.
        places: a number for each rank, from 0 on.
    """
    count = int(places.max(initial=0)) + 1
    at = [mesh.coordinates(r) for r in range(mesh.size)]
    axes = [(name, size) for name, size in mesh.axes if size > 1]
    for length in range(len(axes) + 1):
        for order in itertools.permutations(axes, length):
            if math.prod(size for _, size in order) == count:
                index = np.zeros(mesh.size, np.int64)
                for name, size in order:
                    index = index * size + [a[name] for a in at]
                if np.array_equal(index, places):
                    return tuple(name for name, _ in order)
    return None


def placed(text: str, rank: int, mesh: Mesh, where: str) -> Placement:
    """The placement that a sharding of HLO means on a mesh, of a tensor of `rank` axes.

    Raises:
        InputError: the text is no sharding, or one of another number of devices.
        UnsupportedError: parts do not lie along axes of the mesh, or it says something that is not read.
    """
    found = _tiles(text, where)
    if found is None:
        return Placement.whole(rank)
    parts, kinds = found
    if len(parts[0]) != mesh.size:
        hint = "a mesh of as many ranks"
        raise InputError(
            f"the sharding {text} is of {len(parts[0])} devices, the mesh {mesh} of {mesh.size}", where=where, hint=hint
        )
    if len(parts) != rank + len(kinds) or not set(kinds) <= {"replicated", "unreduced"}:
        hint = "parts along each axis, and replicas or summands behind them"
        raise UnsupportedError(f"the sharding {text} is not read of a tensor of {rank} axes", where=where, hint=hint)
    summands = [p for p, kind in zip(parts[rank:], kinds, strict=True) if kind == "unreduced"]
    names = [along(mesh, p) for p in (*parts[:rank], *summands)]
    told = [n for n in names if n is not None]
    if len(told) < len(names):
        raise UnsupportedError(
            f"the parts of {text} do not lie along axes of the mesh {mesh}",
            where=where,
            hint="a mesh with an axis for each split",
        )
    return Placement(tuple(told[:rank]), tuple(itertools.chain(*told[rank:])))


def written(placement: Placement, name: str, loose: Sequence[int] = ()) -> str:
    """A placement as Shardy writes it, on the mesh of a name; propagation may split `loose` axes further."""
    dims = [[*(f'"{n}"' for n in names), *(["?"] if i in loose else [])] for i, names in enumerate(placement.splits)]
    shown = ", ".join("{" + ", ".join(d) + "}" for d in dims)
    apart = ", ".join(f'"{n}"' for n in placement.partial)
    return f"#sdy.sharding<@{name}, [{shown}]" + (f", unreduced={{{apart}}}>" if apart else ">")


def placements(module: Any, entry: str, where: str) -> tuple[list[Placement], list[Placement]]:
    """Placements of the arguments and results of a module's entry, as Shardy left them.

    Raises:
        UnsupportedError: one is split by a part of a mesh axis.
    """
    sides = _told(module, entry, where)
    kinds = [[int(t.rank) for t in side] for side in _signature(_functions(module)[entry])]
    first, second = ([p or Placement.whole(r) for p, r in zip(*both, strict=True)] for both in zip(sides, kinds, strict=True))
    return first, second


def _signature(main: Any) -> tuple[list[Any], list[Any]]:
    kinds = jaxlib.api().ir.FunctionType(main.attributes["function_type"].value)
    return list(kinds.inputs), list(kinds.results)


def _told(module: Any, entry: str, where: str) -> list[list[Placement | None]]:
    """The placements that Shardy's attributes of arguments and of results say."""
    main = _functions(module)[entry]
    sides: list[list[Placement | None]] = []
    for key, kinds in zip(("arg_attrs", "res_attrs"), _signature(main), strict=True):
        attrs = list(main.attributes[key]) if key in main.attributes else [{}] * len(kinds)
        sides.append([_placement(a, f"{where}, {key[:3]} {i}") for i, a in enumerate(attrs)])
    return sides


def as_said(module: Any, entry: str, mesh: Mesh, where: str) -> tuple[dict[int, Placement], dict[int, Placement]]:
    """Placements of the arguments and results of a program for one rank, by place, where it says them.

    Raises:
        InputError: what it says is no sharding.
        UnsupportedError: it says something that is not read.
    """
    with module.context, jaxlib.api().ir.Location.unknown():
        speller = _Speller(module, mesh, where)
        speller.sides(speller.functions[entry], {}, whole=False)
        sides = [{i: p for i, p in enumerate(side) if p is not None} for side in _told(module, entry, where)]
    return sides[0], sides[1]


def _placement(attributes: Any, where: str) -> Placement | None:
    if "sdy.sharding" not in attributes:
        return None
    splits, summed = _axes(attributes["sdy.sharding"])
    if any(part for axes in (*splits, summed) for _, part in axes):
        what = f"Shardy splits by a part of a mesh axis: {_shown(attributes)}"
        raise UnsupportedError(what, where=where, hint="a mesh with an axis for each part")
    return Placement(tuple(tuple(name for name, _ in axes) for axes in splits), tuple(name for name, _ in summed))


def _axes(sharding: Any) -> tuple[list[list[tuple[str, bool]]], list[tuple[str, bool]]]:
    """The mesh axes of Shardy's attribute: for each axis of the tensor, and those of summands; and which are parts of axes."""
    sdy = jaxlib.api().sdy
    whole = sdy.TensorShardingAttr(sharding)

    def told(axes: Any) -> list[tuple[str, bool]]:
        refs = [sdy.AxisRefAttr(a) for a in axes]
        return [(str(r.name), r.sub_axis_info is not None) for r in refs]

    splits = [told(sdy.DimensionShardingAttr(d).axes) for d in whole.dimension_shardings]
    return splits, told(whole.unreduced_axes)


# Into Shardy's spelling.


def spell(module: Any, entry: str, mesh: Mesh, where: str, plan: Mapping[int, Placement]) -> None:
    """Bring a module into Shardy's spelling, in place: functions inlined, shardings Shardy's own attributes and operations.

    Args:
        module: as jaxlib parsed it.
        entry: the name of its entry function.
        mesh: the mesh that it is to run on.
        where: the file, for messages.
        plan: how arguments are to lie, by place, whatever the module says.

    Raises:
        InputError: it is for another mesh, or what it says is no sharding.
        UnsupportedError: it says something that is not read, or ranks do not divide an argument or result.
    """
    with module.context, jaxlib.api().ir.Location.unknown():
        _Speller(module, mesh, where).spell(entry, plan)


class _Speller:
    def __init__(self, module: Any, mesh: Mesh, where: str) -> None:
        self.module, self.mesh, self.where = module, mesh, where
        self.ir = jaxlib.api().ir
        self.functions = _functions(module)
        self.name = "mesh"

    def spell(self, entry: str, plan: Mapping[int, Placement]) -> None:
        self._name_mesh()
        main = self.functions[entry]
        (body,) = main.regions[0].blocks
        self._flatten(body, 0)
        for name, function in self.functions.items():
            if name != entry:
                function.erase()
        self.sides(main, plan)
        for op in list(walk(body)):
            self._operation(op)

    def _name_mesh(self) -> None:
        """See that the module has the mesh, and no other."""
        for name, mesh in _meshes(self.module).items():
            if mesh != self.mesh:
                what = f"the program is for a mesh of {mesh}, not of {self.mesh}"
                raise InputError(what, where=self.where, hint=f"--mesh {mesh} (mesh=…)")
            self.name = name
        held = (o.operation for o in self.module.body.operations if o.operation.name == "sdy.mesh")
        if self.name not in {str(o.attributes["sym_name"].value) for o in held}:
            axes = ", ".join(f'"{name}"={size}' for name, size in self.mesh.axes)
            attributes = {
                "sym_name": self.ir.StringAttr.get(self.name),
                "mesh": self.ir.Attribute.parse(f"#sdy.mesh<[{axes}]>"),
            }
            at = self.ir.InsertionPoint.at_block_begin(self.module.body)
            self.ir.Operation.create("sdy.mesh", attributes=attributes, ip=at)

    # Functions: Shardy's partitioner changes the types of one alone.

    def _flatten(self, block: Any, depth: int) -> None:
        """Put bodies of functions, fusions and composites where they are called."""
        self._check_depth(depth)
        self._flatten_each([o.operation for o in block.operations], depth)

    def _check_depth(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            hint = "inline functions, or compile parts"
            raise InputError(f"calls and regions nest more than {_MAX_DEPTH} deep", where=self.where, hint=hint)

    def _body(self, call: Any) -> Any:
        if call.name == "mhlo.fusion":
            (body,) = call.regions[0].blocks
            return body
        name = str(call.attributes["decomposition" if call.name.endswith("composite") else "callee"].value)
        if name not in self.functions:
            raise InputError(f"there is no function called {name!r}", where=self.where, hint=_AGAIN)
        (body,) = self.functions[name].regions[0].blocks
        return body

    def _inline(self, call: Any, depth: int) -> None:
        ends = [u.owner for r in call.results for u in r.uses]
        if any(_target(e) == _END for e in ends):
            self._enclose(call, next(e for e in ends if _target(e) == _END), depth)
            return
        values = dict(zip(self._body(call).arguments, call.operands, strict=True))
        made, results = self._copied(self._body(call), values, self.ir.InsertionPoint(call))
        for result, value in zip(call.results, results, strict=True):
            result.replace_all_uses_with(value)
        call.erase()
        self._flatten_each(made, depth + 1)

    def _flatten_each(self, made: Sequence[Any], depth: int) -> None:
        for op in made:
            if op.name in _CALLS:
                self._check_depth(depth)
                self._inline(op, depth)
            else:
                for region in op.regions:
                    for inner in region.blocks:
                        self._flatten(inner, depth + 1)

    def _copied(self, body: Any, values: dict[Any, Any], at: Any) -> tuple[list[Any], list[Any]]:
        """Copies of a block's operations, and what it returns."""
        made: list[Any] = []
        for op in (o.operation for o in body.operations):
            if op.name.endswith(".return"):
                return made, [values.get(v, v) for v in op.operands]
            copy = op.clone(ip=at)
            _remap(copy, values)
            values.update(zip(op.results, copy.results, strict=True))
            made.append(copy)
        raise InputError("a function returns nothing", where=self.where, hint="return what is to be computed")

    def _enclose(self, call: Any, end: Any, depth: int) -> None:
        """Put `sdy.manual_computation` in place of what HLO has for it: a call between two custom calls."""
        where = f"{self.where}, {_END}"
        places: list[int] = []
        begin: Any = None
        for value in call.operands:
            owner, index = value.owner, getattr(value, "result_number", 0)
            if getattr(owner, "name", "").endswith("get_tuple_element"):
                owner, index = owner.operands[0].owner, int(owner.attributes["index"].value)
            if _target(owner) != _BEGIN or (begin is not None and owner != begin):
                raise InputError("a computation over parts has no beginning", where=where, hint=_AGAIN)
            begin = owner
            places.append(index)
        opening = begin.attributes[_FRONTEND] if begin is not None else {}
        closing = end.attributes[_FRONTEND]
        attributes = {
            "in_shardings": self._parsed(
                opening["xla.sdy.in_shardings"].value if opening else "#sdy.sharding_per_value<[]>", where
            ),
            "out_shardings": self._parsed(closing["xla.sdy.out_shardings"].value, where),
            "manual_axes": self._parsed(closing["xla.sdy.manual_axes"].value, where),
        }
        kinds = _leaves(begin.results) if begin is not None else []
        made = self.ir.Operation.create(
            "sdy.manual_computation",
            results=_leaves(end.results),
            operands=list(begin.operands) if begin is not None else [],
            attributes=attributes,
            regions=1,
            ip=self.ir.InsertionPoint(end),
            loc=call.location,
        )
        block = self.ir.Block.create_at_start(made.regions[0], kinds)
        values = dict(zip(self._body(call).arguments, (block.arguments[i] for i in places), strict=True))
        inner, results = self._copied(self._body(call), values, self.ir.InsertionPoint(block))
        given = dict(zip(call.results, results, strict=True))
        left = [given[v] for v in end.operands]
        self.ir.Operation.create("sdy.return", operands=left, ip=self.ir.InsertionPoint(block), loc=call.location)
        for result in end.results:
            if not hasattr(result.type, "num_types"):
                result.replace_all_uses_with(made.results[result.result_number])
                continue
            for use in [u.owner for u in result.uses]:
                use.results[0].replace_all_uses_with(made.results[int(use.attributes["index"].value)])
                use.erase()
        readers = {v.owner for v in call.operands if v.owner != begin}
        for op in (end, call, *readers, *([begin] if begin is not None else [])):
            op.erase()
        self._flatten_each(inner, depth + 1)

    # Shardings.

    def sides(self, main: Any, plan: Mapping[int, Placement], *, whole: bool = True) -> None:
        """Say of the entry's arguments and results how they lie, in Shardy's attributes. `whole`: they are not parts yet."""
        for key, types in zip(("arg_attrs", "res_attrs"), _signature(main), strict=True):
            given = plan if key == "arg_attrs" else {}
            attrs = list(main.attributes[key]) if key in main.attributes else [self.ir.DictAttr.get({})] * len(types)
            out: list[Any] = []
            for i, (said, kind) in enumerate(zip(attrs, types, strict=True)):
                where = f"{self.where}, {'input' if key == 'arg_attrs' else 'result'} {i}"
                kept = {a.name: a.attr for a in said if a.name not in (*_KEYS, _FRONTEND)}
                planned = self.ir.Attribute.parse(written(given[i], self.name)) if i in given else None
                sharding = planned or self._sharding(said, kind, where)
                if sharding is not None:
                    if whole:
                        self._check(sharding, kind, where)
                    kept["sdy.sharding"] = sharding
                out.append(self.ir.DictAttr.get(kept))
            main.attributes[key] = self.ir.ArrayAttr.get(out)

    def _sharding(self, attrs: Any, kind: Any, where: str) -> Any:
        """The sharding of one value as Shardy's attribute; None where nothing is said."""
        if "sdy.sharding" in attrs:
            return attrs["sdy.sharding"]
        if _FRONTEND in attrs and _WORDS in attrs[_FRONTEND]:
            return self._parsed(attrs[_FRONTEND][_WORDS].value, where)
        if "mhlo.sharding" in attrs:
            placement = placed(attrs["mhlo.sharding"].value, int(kind.rank), self.mesh, where)
            return self.ir.Attribute.parse(written(placement, self.name))
        return None

    def _parsed(self, text: str, where: str) -> Any:
        """An attribute that stands in a string."""
        try:
            return self.ir.Attribute.parse(text)
        except Exception:
            raise InputError(f"no sharding: {text[:120]}", where=where, hint=_AGAIN) from None

    def _check(self, sharding: Any, kind: Any, where: str) -> None:
        """See that ranks divide what an argument or result is split into."""
        for axis, axes in enumerate(_axes(sharding)[0]):
            ranks = self.mesh.ranks_of([name for name, part in axes if not part])
            extent = int(kind.get_dim_size(axis))
            if extent % ranks:
                hint = f"pad the axis to a multiple of {ranks}, or leave it whole"
                raise UnsupportedError(f"{ranks} ranks do not divide an extent of {extent}", where=where, hint=hint)

    def _operation(self, op: Any) -> None:
        target, where = _target(op), f"{self.where}, {op.name}"
        if target in _OLD:
            what = f"a computation over parts as GSPMD writes it ({target}) is not read"
            raise UnsupportedError(what, where=where, hint="lower it for Shardy: jax_use_shardy_partitioner=True")
        shardings = self._shardings(op, where)
        if target in _ANNOTATIONS:
            self._constrain(op, shardings, where)
        elif op.name.partition(".")[0] in ("chlo", "mhlo") and _by_elements(op):
            self._respell(op)
        elif shardings is not None:
            for key in ("mhlo.sharding", _FRONTEND):
                if key in op.attributes:
                    del op.attributes[key]
            op.attributes["sdy.sharding"] = shardings

    def _shardings(self, op: Any, where: str) -> Any:
        """The shardings of an operation's results as Shardy's attribute; None where nothing is said."""
        attrs = op.attributes
        if op.name.startswith("sdy."):
            return None
        if "sdy.sharding" in attrs:
            return attrs["sdy.sharding"]
        if _FRONTEND in attrs and _WORDS in attrs[_FRONTEND]:
            return self._parsed(attrs[_FRONTEND][_WORDS].value, where)
        if "mhlo.sharding" not in attrs:
            return None
        text, kinds = str(attrs["mhlo.sharding"].value), [r.type for r in op.results]
        texts = [text] if len(kinds) == 1 else re.findall(r"\{(?:[^{}]|\{[^{}]*\})*\}", text.strip()[1:-1])
        if not all(hasattr(k, "rank") for k in kinds) or len(texts) != len(kinds):
            raise UnsupportedError(f"a sharding of {len(kinds)} results is not read: {text[:120]}", where=where)
        loose = re.search(r"unspecified_dims=\[([\d,]*)\]", str(attrs["backend_config"]) if "backend_config" in attrs else "")
        axes = _numbers(loose.group(1)) if loose else []
        each = [written(placed(t, int(k.rank), self.mesh, where), self.name, axes) for t, k in zip(texts, kinds, strict=True)]
        inner = ", ".join(e.removeprefix("#sdy.sharding") for e in each)
        return self.ir.Attribute.parse(f"#sdy.sharding_per_value<[{inner}]>")

    def _constrain(self, op: Any, shardings: Any, where: str) -> None:
        """Put Shardy's constraint in place of an annotation that is a custom call."""
        if shardings is None or len(op.operands) != 1 or len(op.results) != 1:
            raise InputError(f"{_target(op)} says no sharding", where=where, hint=_AGAIN)
        (sharding,) = jaxlib.api().sdy.TensorShardingPerValueAttr(shardings).shardings
        self._replace(op, "sdy.sharding_constraint", {"sharding": sharding})

    def _respell(self, op: Any) -> None:
        """Put in place of an elementwise operation, of which Shardy knows no rule, one of which it does, with the other's name.

        A custom call could bring a rule of its own, but where its operands lie otherwise Shardy leaves them so.
        """
        name, kinds = op.name.partition(".")[2], {str(v.type) for v in (*op.operands, *op.results)}
        float_ = str(op.results[0].type.element_type)[0] in "fb"
        stand_in = {1: "stablehlo.tanh", 2: "stablehlo.atan2"}.get(len(op.operands), "")
        if name == "copy":
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        elif name == "square":
            self._replace(op, "stablehlo.multiply", {}, [op.operands[0], op.operands[0]])
        elif f"stablehlo.{name}" in _ALIKE:
            self._replace(op, f"stablehlo.{name}", {})
        elif elementwise_target(op.name, len(op.operands)) is not None and len(kinds) == 1 and float_ and stand_in:
            self._replace(op, stand_in, {STANDS_FOR: self.ir.StringAttr.get(name)})

    def _replace(self, op: Any, name: str, attributes: dict[str, Any], operands: Sequence[Any] = ()) -> None:
        """Put another operation in place of one with one result; its operands are the same where none are given."""
        at, kinds, read = self.ir.InsertionPoint(op), [op.results[0].type], [*operands] or list(op.operands)
        made = self.ir.Operation.create(name, results=kinds, operands=read, attributes=attributes, ip=at, loc=op.location)
        op.results[0].replace_all_uses_with(made.results[0])
        op.erase()


def _remap(op: Any, values: Mapping[Any, Any]) -> None:
    """Make a copy and what its regions hold read other values."""
    for i, v in enumerate(op.operands):
        if v in values:
            op.operands[i] = values[v]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _remap(inner.operation, values)


def _leaves(values: Any) -> list[Any]:
    """The types of values, tuples taken apart."""
    kinds = [v.type for v in values]
    return [t for k in kinds for t in ([k.get_type(i) for i in range(k.num_types)] if hasattr(k, "num_types") else [k])]


def _by_elements(op: Any) -> bool:
    """Tell whether an operation has one result and operands of the same shape, and no region."""
    kinds = [v.type for v in (*op.operands, *op.results)]
    if (
        len(op.results) != 1
        or not op.operands
        or len(op.regions)
        or not all(getattr(k, "has_static_shape", False) for k in kinds)
    ):
        return False
    shapes = {tuple(int(d) for d in k.shape) for k in kinds}
    return len(shapes) == 1 and op.name.partition(".")[2] not in ("bitcast", "custom_call")
