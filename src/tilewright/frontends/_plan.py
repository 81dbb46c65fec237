"""Meshes and placements in the words of those who have them: ours, torch's, JAX's, and text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from tilewright.errors import InputError, counted
from tilewright.ir.mesh import Mesh, Placement

_TEXT = re.compile(r"\[([\w\s,*]*)\](?:\s+partial\s+([\w\s,]+))?")
_WORDS = 'a Placement, "[tp, ]", torch\'s [Shard(0)], or ("tp", None) as JAX\'s PartitionSpec has it'


def as_mesh(given: object) -> Mesh | None:
    """A mesh given as one, as text ("dp=2,tp=4"), as a mapping of sizes, or as torch's `DeviceMesh` or JAX's `Mesh`.

    Raises:
        InputError: it is none of these, or its axes have no names.
    """
    if given is None or isinstance(given, Mesh):
        return given
    if isinstance(given, str):
        return Mesh.parse(given)
    sizes: Any = given if isinstance(given, Mapping) else getattr(given, "shape", None)
    names: Any = getattr(given, "mesh_dim_names", None)
    if isinstance(sizes, Mapping):
        return Mesh(tuple((str(name), int(size)) for name, size in cast("Mapping[str, int]", sizes).items()))
    if hasattr(given, "mesh_dim_names") and names is None:
        raise InputError("a device mesh whose axes have no names", where="mesh", hint='mesh_dim_names=("tp",)')
    if names is None or sizes is None:
        hint = "\"tp=4\", torch's DeviceMesh or JAX's Mesh"
        raise InputError(f"an argument of type {type(given).__name__}", where="mesh", hint=hint)
    return Mesh(tuple((str(name), int(size)) for name, size in zip(names, sizes, strict=True)))


def as_placement(given: object, rank: int, mesh: Mesh, where: str) -> Placement:
    """The placement of a tensor of `rank` axes, given in one of the words that are read.

    Raises:
        InputError: it is none of them, or not of such a tensor on this mesh.
    """
    found = _read(given, rank, mesh, where)
    if found.rank != rank:
        raise InputError(f"the placement {found} is of {found.rank} axes, the tensor has {rank}", where=where, hint=_WORDS)
    mesh.ranks_of(found.names)
    return found


def _read(given: object, rank: int, mesh: Mesh, where: str) -> Placement:
    if isinstance(given, Placement):
        return given
    if isinstance(given, str):
        text = _TEXT.fullmatch(given.strip())
        if text is None:
            raise InputError(f"no placement: {given!r}", where=where, hint=_WORDS)
        axes = [tuple(re.findall(r"\w+", part)) for part in text[1].split(",")] if rank or text[1].strip() else []
        return Placement(tuple(axes), tuple(re.findall(r"\w+", text[2] or "")))
    each: list[object] = [given] if _is_torch(given) else []
    if not each and isinstance(given, Iterable):
        each = [*cast("Iterable[object]", given)]
    if not each and not isinstance(given, Iterable):
        raise InputError(f"no placement: an argument of type {type(given).__name__}", where=where, hint=_WORDS)
    if each and all(_is_torch(p) for p in each):
        return from_torch(each, rank, mesh, where)
    return Placement(tuple(_names(p, where) for p in (*each, *[None] * (rank - len(each)))))


def _names(given: object, where: str) -> tuple[str, ...]:
    """The mesh axes that split one axis: none, one, or several."""
    several = (given,) if given is None or isinstance(given, str) else given
    names = (
        tuple(n for n in cast("Iterable[object]", several) if n is not None) if isinstance(several, Iterable) else (several,)
    )
    if not all(isinstance(n, str) for n in names):
        raise InputError(f"no placement: {given!r}", where=where, hint=_WORDS)
    return cast("tuple[str, ...]", names)


def _is_torch(given: object) -> bool:
    return callable(getattr(given, "is_shard", None)) and callable(getattr(given, "is_replicate", None))


def from_torch(given: Sequence[Any], rank: int, mesh: Mesh, where: str) -> Placement:
    """The placement that torch's say, of which there is one for each axis of the mesh.

    Raises:
        InputError: there are not as many, one is of another axis than the tensor has, or a kind that is not read.
    """
    names = [name for name, _ in mesh.axes]
    if len(given) != len(names):
        hint = "one for each axis of the mesh"
        raise InputError(f"{counted(len(given), 'placement')} on the mesh {mesh}", where=where, hint=hint)
    splits: list[list[str]] = [[] for _ in range(rank)]
    partial: list[str] = []
    for name, placement in zip(names, given, strict=True):
        kind = type(placement).__name__
        if placement.is_replicate():
            continue
        if kind == "Shard":
            axis = int(placement.dim)
            if not -rank <= axis < rank:
                raise InputError(f"{placement} of a tensor of {rank} axes", where=where, hint="an axis that it has")
            splits[axis % rank].append(name)
        elif kind == "Partial" and getattr(placement, "reduce_op", "sum") == "sum":
            partial.append(name)
        else:
            raise InputError(
                f"the placement {placement} is not read", where=where, hint="Shard, Replicate, or Partial of a sum"
            )
    return Placement(tuple(map(tuple, splits)), tuple(partial))
