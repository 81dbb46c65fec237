"""Translations of torch's functional collectives (`_c10d_functional`), of a program that is one rank's already."""

from __future__ import annotations

import importlib
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from tilewright.frontends.torch.registry import Site, operators
from tilewright.ir.build import const, map_, reshape, slice_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.mesh import Mesh
from tilewright.ir.ops import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from tilewright.ir.ops.collective import Fn

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)
_FUNCTIONS: dict[str, Fn] = {
    "sum": "add",
    "avg": "add",
    "product": "multiply",
    "max": "maximum",
    "min": "minimum",
    "band": "and",
    "bor": "or",
}


@contextmanager
def on_mesh(mesh: Mesh | None) -> Generator[None]:
    """A context in which the groups of collectives are axes of a mesh."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def exchanges(graph: Graph) -> bool:
    """Tell whether a program exchanges values between ranks: it is one rank's."""
    return any(isinstance(n.op, Collective) for n in graph.nodes())


def _over(site: Site, group: str, size: int | None) -> dict[str, Any]:
    """The mesh axes along which a group of torch's lies, by its ranks; where torch knows none of that name, by their number.

    Raises:
        UnsupportedError: the program is read for one device, or the group lies along no axes.
    """
    mesh = _MESH.get()
    if mesh is None:
        raise site.refuse("needs several ranks, and a program runs on one", hint='say which: mesh="tp=4"')
    ranks: list[int] | None = None
    with suppress(Exception):  # torch says so in several ways where there is no group of that name
        distributed_c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
        ranks = distributed_c10d.get_process_group_ranks(distributed_c10d._resolve_process_group(group))
    sizes = dict(mesh.axes)
    names = [name for name, _ in mesh.axes]
    options = [(n,) for n in names] + ([tuple(names)] if len(names) > 1 else [])
    if ranks is not None:
        fitting = [o for o in options if list(mesh.group(ranks[0], o)) == ranks] if max(ranks) < mesh.size else []
    else:
        fitting = [o for o in options if mesh.ranks_of(o) == size]
    if len(fitting) != 1 and not (ranks is not None and len(ranks) == 1):
        what = f"is of a group of {size if ranks is None else ranks}, which lies along no one axis of the mesh {mesh}"
        raise site.refuse(what, hint="the mesh that the program was made for")
    over = fitting[0] if fitting else ()
    return {"over": over, "sizes": tuple(sizes[n] for n in over)}


def _fn(site: Site, op: str) -> Fn:
    if op not in _FUNCTIONS:
        raise site.refuse(f"reduces by {op!r}, which no graph has", hint=f"one of {', '.join(_FUNCTIONS)}")
    return _FUNCTIONS[op]


def _averaged(x: Node, op: str, how: dict[str, Any]) -> Node:
    """The sum divided by the number of ranks, where an average is asked for."""
    if op != "avg":
        return x
    return map_("divide", x, const(math.prod(how["sizes"]), x.dtype))


@operators("_c10d_functional", "wait_tensor.default")
def wait_tensor(site: Site, tensor: Node) -> Node:
    """Nothing: what is exchanged is there."""
    return tensor


@operators("_c10d_functional", "all_reduce.default", "all_reduce_.default")
def all_reduce(site: Site, input: Node, reduce_op: str, group_name: str) -> Node:
    """`all_reduce`, of an average divided by the number of ranks."""
    how = _over(site, group_name, None)
    return _averaged(Node(AllReduce(**how, fn=_fn(site, reduce_op)), input), reduce_op, how) if how["over"] else input


@operators("_c10d_functional", "all_gather_into_tensor.default")
def all_gather(site: Site, input: Node, group_size: int, group_name: str) -> Node:
    """`all_gather` along the first axis."""
    how = _over(site, group_name, group_size)
    return Node(AllGather(**how, axis=0), input) if how["over"] else input


@operators("_c10d_functional", "reduce_scatter_tensor.default")
def reduce_scatter(site: Site, input: Node, reduce_op: str, group_size: int, group_name: str) -> Node:
    """`reduce_scatter` along the first axis."""
    how = _over(site, group_name, group_size)
    if not how["over"]:
        return input
    return _averaged(Node(ReduceScatter(**how, fn=_fn(site, reduce_op), axis=0), input), reduce_op, how)


@operators("_c10d_functional", "all_to_all_single.default")
def all_to_all(
    site: Site, input: Node, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: str
) -> Node:
    """`all_to_all` of equal parts of the first axis.

    Raises:
        UnsupportedError: parts differ in size.
    """
    how = _over(site, group_name, len(input_split_sizes))
    if len({*input_split_sizes, *output_split_sizes}) > 1:
        raise site.refuse("exchanges parts of other sizes", hint="equal parts")
    return Node(AllToAll(**how, split=0, join=0), input) if how["over"] else input


@operators("_c10d_functional", "broadcast.default")
def broadcast(site: Site, input: Node, src: int, group_name: str) -> Node:
    """The value of one rank of the group, of all that are gathered."""
    how = _over(site, group_name, None)
    if not how["over"]:
        return input
    gathered = Node(AllGather(**how, axis=0), reshape(input, (1, *input.shape)))
    return reshape(slice_(gathered, 0, src, src + 1), input.shape)
