"""Lowerings of operations between devices: those of a partitioned program, of `shard_map`, and what Shardy's partitioner makes.

Groups of devices are read as the axes of the mesh along which they lie. A program that numbers its replicas, or its partitions,
numbers the ranks of the mesh so. Where a rank has a part of its own, it finds it in a table by its number: such a slice of what
all ranks hold is `own`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from tilewright.dtype import U32
from tilewright.errors import InputError
from tilewright.frontends.stablehlo.reduce import ASSOCIATIVE
from tilewright.frontends.stablehlo.registry import Site, Value, lowers, one_or_all
from tilewright.frontends.stablehlo.shardings import along, groups_by_axes
from tilewright.ir.build import broadcast, concat, const, convert, reshape, slice_
from tilewright.ir.evaluate import evaluator
from tilewright.ir.graph import Node, toposort
from tilewright.ir.mesh import Mesh
from tilewright.ir.ops import AllGather, AllReduce, AllToAll, Call, Gather, Own, ReduceScatter, Select
from tilewright.ir.ops.collective import Fn

_MAKERS, _ELEMENTS = 64, 4096  # of a number that depends on the rank and is worked out as the program is read


def _mesh(site: Site) -> Mesh:
    """The mesh of the program.

    Raises:
        UnsupportedError: it is read for one device.
    """
    mesh = site.reader.mesh
    if mesh is None:
        name = site.op.name.partition(".")[2]
        raise site.refuse(f"{name} needs several devices, and a program runs on one", hint="say which: --mesh tp=4 (mesh=…)")
    return mesh


def _how(mesh: Mesh, over: Sequence[str]) -> dict[str, Any]:
    sizes = dict(mesh.axes)
    return {"over": tuple(over), "sizes": tuple(sizes[name] for name in over)}


def _rows(site: Site, mesh: Mesh, by: str) -> list[list[int]]:
    """The groups of ranks that take part together, in order.

    Args:
        site: the operation.
        mesh: the ranks.
        by: what its group's numbers are of: "flattened", "partition", "replica" or "both", as StableHLO's specification has it.
    """
    replicas, partitions = site.reader.replicas, mesh.size // site.reader.replicas
    raw = site.op.attribute("replica_groups")
    shape = getattr(getattr(raw, "type", None), "shape", None)
    if shape is not None and len(list(shape)) == 2:
        numbers = np.broadcast_to(np.asarray(raw), [int(d) for d in shape]).tolist()
    else:
        numbers = groups_by_axes(site.reader.module, str(raw))
    if numbers is None:
        raise site.refuse(f"replica_groups {str(raw)[:80]} are not read", hint="groups of device numbers")
    groups = [[int(d) for d in row if d >= 0] for row in numbers]
    if not any(groups):
        groups = [[*range({"partition": partitions, "flattened": mesh.size}.get(by, replicas))]]
    rows = {
        "flattened": groups,
        "replica": [[r * partitions + p for r in g] for g in groups for p in range(partitions)],
        "partition": [[r * partitions + p for p in g] for g in groups for r in range(replicas)],
        "both": [[r * partitions + p for p in range(partitions) for r in g] for g in groups],
    }[by]
    if sorted(r for row in rows for r in row) != [*range(mesh.size)]:
        raise InputError(
            f"the groups {_shown(groups)} are not of the {mesh.size} ranks of {mesh}", where=site.op.where, hint="its own mesh"
        )
    return rows


def _shown(groups: Sequence[Sequence[int]]) -> str:
    shown = ",".join("{" + ",".join(map(str, g)) + "}" for g in groups[:8])
    return f"{{{shown}{',…' if len(groups) > 8 else ''}}}"


def _over(site: Site, mesh: Mesh, by: str, *, ordered: bool = True) -> tuple[str, ...]:
    """The mesh axes along which an operation's groups lie, in their order; those of a reduction have none.

    Raises:
        UnsupportedError: they lie along none.
    """
    rows = _rows(site, mesh, by)
    rows = rows if ordered else [sorted(row) for row in rows]
    places, groups = np.zeros(mesh.size, np.int64), np.zeros(mesh.size, np.int64)
    for i, row in enumerate(rows):
        places[row], groups[row] = np.arange(len(row)), i
    over = along(mesh, places) if len({len(row) for row in rows}) == 1 else None
    if over is None or any(list(mesh.group(row[0], over)) != row for row in rows):
        first = sorted(rows[0])
        step, count = (first[1] - first[0] if len(first) > 1 else 1), len(first)
        sizes = [s for s in (mesh.size // max(1, step * count), count, step) if s > 1]
        like = ",".join(f"{chr(97 + i)}={s}" for i, s in enumerate(sizes))
        raise site.refuse(
            f"the groups {_shown(rows)} do not lie along axes of the mesh {mesh}",
            hint=f"a mesh along whose axes they do, as {like}",
        )
    return over


def _by(site: Site) -> str:
    """The kind of number that the groups of a reduction or gather hold."""
    if site.op.has("use_global_device_ids"):
        return "flattened"
    return "both" if _channel(site) else "replica"


def _channel(site: Site) -> bool:
    handle = re.search(r"handle = (\d+)", str(site.op.attribute("channel_handle"))) if site.op.has("channel_handle") else None
    return handle is not None and int(handle.group(1)) > 0


def _exchanged(site: Site) -> str:
    """The kind of number that the groups of other operations hold."""
    return "partition" if _channel(site) else "replica"


def _fn(site: Site) -> Fn:
    """The function of a reduction.

    Raises:
        UnsupportedError: it is no single operation of both its arguments.
    """
    block = site.op.block()
    inner = block.operations()
    if len(inner) == 2 and inner[0].name in ASSOCIATIVE and {*inner[0].operands} == {*block.arguments}:
        return ASSOCIATIVE[inner[0].name]
    known = ", ".join(ASSOCIATIVE.values())
    raise site.refuse("it reduces by another function than one of the graph's", hint=f"one of {known}")


@lowers("stablehlo.all_reduce")
def _all_reduce(site: Site) -> Value:
    mesh = _mesh(site)
    over = _over(site, mesh, _by(site), ordered=False)
    fn = _fn(site)
    return one_or_all([Node(AllReduce(**_how(mesh, over), fn=fn), x) if over else x for x in site.nodes])


@lowers("stablehlo.reduce_scatter")
def _reduce_scatter(site: Site) -> Value:
    mesh = _mesh(site)
    over = _over(site, mesh, _by(site))
    axis, fn = site.op.integer("scatter_dimension"), _fn(site)
    return one_or_all([Node(ReduceScatter(**_how(mesh, over), fn=fn, axis=axis), x) if over else x for x in site.nodes])


@lowers("stablehlo.all_gather")
def _all_gather(site: Site) -> Value:
    mesh = _mesh(site)
    over, axis = _over(site, mesh, _by(site)), site.op.integer("all_gather_dim")
    return one_or_all([Node(AllGather(**_how(mesh, over), axis=axis), x) if over else x for x in site.nodes])


@lowers("stablehlo.all_to_all")
def _all_to_all(site: Site) -> Value:
    """`all_to_all x` -> parts of one value; of several operands, as HLO has it, one for each rank."""
    mesh = _mesh(site)
    over = _over(site, mesh, _exchanged(site))
    if not over:
        return one_or_all([*site.values])
    if site.op.has("split_dimension"):
        split, join = site.op.integer("split_dimension"), site.op.integer("concat_dimension")
        return one_or_all([Node(AllToAll(**_how(mesh, over), split=split, join=join), x) for x in site.nodes])
    all_ = concat([reshape(x, (1, *x.shape)) for x in site.nodes], 0)
    moved = Node(AllToAll(**_how(mesh, over), split=0, join=0), all_)
    return one_or_all([reshape(slice_(moved, 0, i, i + 1), x.shape) for i, x in enumerate(site.nodes)])


@lowers("stablehlo.collective_broadcast")
def _collective_broadcast(site: Site) -> Value:
    """The value of each group's first rank, of all that are gathered."""
    mesh, (x,) = _mesh(site), site.nodes
    over = _over(site, mesh, _exchanged(site))
    if not over:
        return x
    site.reader.note(f"{site.op.name.partition('.')[2]} at {site.op.origin} is read as an all-gather")
    gathered = Node(AllGather(**_how(mesh, over), axis=0), reshape(x, (1, *x.shape)))
    return reshape(slice_(gathered, 0, 0, 1), x.shape)


@lowers("stablehlo.collective_permute")
def _collective_permute(site: Site) -> Value:
    """Each rank's value at another rank: gathered along the axes that it crosses, and one taken; zeros where there is none."""
    mesh, (x,) = _mesh(site), site.nodes
    pairs = np.asarray(site.op.attribute("source_target_pairs")).reshape(-1, 2).tolist()
    replicas, partitions = site.reader.replicas, mesh.size // site.reader.replicas
    if _channel(site):
        moves = {r * partitions + t: r * partitions + s for s, t in pairs for r in range(replicas)}
    else:
        moves = {t * partitions + p: s * partitions + p for s, t in pairs for p in range(partitions)}
    if any(not 0 <= r < mesh.size for pair in moves.items() for r in pair):
        what = f"the pairs {_shown(pairs)} are not of the {mesh.size} ranks of {mesh}"
        raise InputError(what, where=site.op.where, hint="its own mesh")
    if all(moves.get(r) == r for r in range(mesh.size)):
        return x
    at = [mesh.coordinates(r) for r in range(mesh.size)]
    over = tuple(name for name, _ in mesh.axes if any(at[s][name] != at[t][name] for t, s in moves.items()))
    site.reader.note(f"collective_permute at {site.op.origin} is read as an all-gather along {', '.join(over)}")
    sources = [mesh.index(moves.get(r, r), over) for r in range(mesh.size)]
    taken = x
    if over:
        gathered = Node(AllGather(**_how(mesh, over), axis=0), reshape(x, (1, *x.shape)))
        taken = reshape(Node(Gather(0), gathered, _table(mesh, torch.tensor(sources))), x.shape)
    if len(moves) == mesh.size:
        return taken
    target = _table(mesh, torch.tensor([r in moves for r in range(mesh.size)]))
    return Node(Select(), broadcast(reshape(target, ()), x.shape), taken, broadcast(const(0, x.dtype), x.shape))


def _table(mesh: Mesh, values: torch.Tensor) -> Node:
    """A rank's own of a table of values, one a rank, as a vector of one element."""
    return Node(Own(**_how(mesh, [name for name, _ in mesh.axes]), axis=0), const(values))


@lowers("stablehlo.partition_id")
def _partition_id(site: Site) -> Value:
    mesh = _mesh(site)
    return _number(mesh, [r % (mesh.size // site.reader.replicas) for r in range(mesh.size)])


@lowers("stablehlo.replica_id")
def _replica_id(site: Site) -> Value:
    mesh = _mesh(site)
    return _number(mesh, [r // (mesh.size // site.reader.replicas) for r in range(mesh.size)])


def _number(mesh: Mesh, of_rank: Sequence[int]) -> Node:
    if len(set(of_rank)) == 1:
        return const(of_rank[0], U32)
    return reshape(convert(_table(mesh, torch.tensor(of_rank)), U32), ())


def by_rank(node: Node, mesh: Mesh | None) -> list[int] | None:
    """The whole number that a scalar is on each rank, where it depends on the rank alone; None of any other."""
    if mesh is None or node.tensor.elements != 1 or not (node.dtype.is_integer or node.dtype.kind == "pred"):
        return None
    made = toposort([node])
    tables = [n for n in made if isinstance(n.op, Own)]
    if not tables or len(made) > _MAKERS or any(not n.src and not n.op.constant_source for n in made):
        return None
    if any(isinstance(n.op, Call) or n.op.meets or n.tensor.elements > _ELEMENTS for n in made):
        return None
    whole = evaluator([t.src[0] for t in tables], [])([])
    run = evaluator([node], tables)
    found: list[int] = []
    for rank in range(mesh.size):
        parts: list[object] = []
        for table, value in zip(tables, whole, strict=True):
            op, extent = cast(Own, table.op), table.shape[cast(Own, table.op).axis]
            parts.append(cast(torch.Tensor, value).narrow(op.axis, mesh.index(rank, op.over) * extent, extent))
        found.append(int(cast(torch.Tensor, run(parts)[0])))
    return found


def own_part(x: Node, axis: int, starts: Sequence[int], size: int, mesh: Mesh) -> Node | None:
    """The slice of an axis that begins at another place on each rank, as `own`, where ranks share the axis out; else None."""
    count = math.ceil(x.shape[axis] / size) if size else 0
    if count * size != x.shape[axis] or any(s % size for s in starts):
        return None
    over = along(mesh, np.array(starts) // size)
    return Node(Own(**_how(mesh, over), axis=axis), x) if over and mesh.ranks_of(over) == count else None
