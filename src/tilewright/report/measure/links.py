"""Links between the ranks of a mesh: the time of an operation in which next to nothing travels, and the rate of much."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from tilewright.dtype import F32
from tilewright.hardware.link import Link
from tilewright.hardware.links import Links, keep_links, kept_links, key_of, links_for
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.ops import AllGather, AllReduce, Collective, Input, ReduceScatter
from tilewright.ir.types import TensorType
from tilewright.runtime.agreement import times_us
from tilewright.runtime.team import ProcessTeam

LARGE_BYTES = 1 << 22  # that each rank gives: behind it times grow by bytes alone, on links of up to 400 GB/s
CALLS = 20


def links_of(team: ProcessTeam, target: Target, *, measure: bool) -> Links:
    """The costs of operations between ranks, the same on all of them: those that rank 0 has kept, with `measure` else those
    that all measure now, and else the chip's own. All ranks ask together."""
    own = kept_links(key_of(target, str(team.mesh), team.links), target.kind) if team.rank == 0 else []
    found, measure = team.peers.gathered((own, measure), tuple[list[Link], bool], "the links between ranks")[0]
    return links_for(target, links(team, target) if measure and not found else found)


def links(team: ProcessTeam, target: Target) -> list[Link]:
    """The links along each axis of a mesh, and along all of them together, which rank 0 keeps. All ranks of it measure at the
    same time.

    Times are medians of the slowest rank's; bytes are those that each rank receives at least (`Collective.wire_bytes`).
    """
    axes = [(name, size) for name, size in team.mesh.axes if size > 1]
    several = [axes] if len(axes) > 1 else []
    found = [_link(team, op) for over in [*([axis] for axis in axes), *several] for op in _operations(over)]
    if team.rank == 0:
        keep_links(key_of(target, str(team.mesh), team.links), target.kind, found)
    return found


def _operations(axes: Sequence[tuple[str, int]]) -> list[Collective]:
    over, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    return [AllReduce(over, sizes), AllGather(over, sizes), ReduceScatter(over, sizes)]


def _link(team: ProcessTeam, op: Collective) -> Link:
    few, many = op.ranks, LARGE_BYTES // F32.bits * 8 // op.ranks * op.ranks
    latency_us, large_us = (_median_us(team, op, count) for count in (few, many))
    sent = op.wire_bytes(TensorType(F32, (many,)))
    beyond_us = large_us - latency_us
    return Link(op.name, ",".join(op.over), op.ranks, latency_us, sent / beyond_us / 1e3 if beyond_us > 0 else None)


def _median_us(team: ProcessTeam, op: Collective, count: int) -> float:
    assert isinstance(op, AllReduce | AllGather | ReduceScatter)
    node, value = Node(op, Node(Input("x", TensorType(F32, (count,))))), torch.ones(count, device=team.device)
    with team.working():
        times = times_us(team, lambda: team.run(node, value), team.device, calls=CALLS)
    return statistics.median(us for us, _ in times)
