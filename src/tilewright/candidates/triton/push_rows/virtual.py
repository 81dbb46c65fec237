"""Ranks of one process that share a device: kernels that exchange values through memory are checked and timed so where there
are no several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from tilewright.errors import UnsupportedError
from tilewright.ir.graph import Node
from tilewright.ir.mesh import Mesh, Result, Symmetric


@dataclass(frozen=True)
class VirtualRanks:
    """The memory of ranks in one address space.

    Attributes:
        mesh: the ranks.
        device: torch's name of the device that all of them are on.
        limit_s: seconds that a kernel waits for another rank.
    """

    mesh: Mesh
    device: str
    limit_s: float = 5.0
    _memory: dict[tuple[tuple[int, ...], int], tuple[list[torch.Tensor], list[torch.Tensor]]] = field(
        default_factory=dict[tuple[tuple[int, ...], int], tuple[list[torch.Tensor], list[torch.Tensor]]]
    )

    def member(self, rank: int) -> VirtualRank:
        """One of the ranks, as a team (`ir/mesh.py`)."""
        return VirtualRank(self, rank)

    def of_group(self, group: tuple[int, ...], size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Bytes of each rank of a group, and the words that hosts read."""
        if (group, size) not in self._memory:
            buffers = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in group]
            pinned = torch.device(self.device).type == "cuda"
            late = [torch.zeros(1, dtype=torch.int32, pin_memory=pinned) for _ in group]
            self._memory[group, size] = buffers, late
        return self._memory[group, size]

    def late(self) -> list[int]:
        """The ranks that one was waited for in vain, by who waited, one more than their place in the group; 0 for none."""
        return [int(word) for _, words in self._memory.values() for word in words]


class VirtualRank:
    """One of several ranks in an address space. Its kernels meet others' in memory; nothing else travels."""

    def __init__(self, ranks: VirtualRanks, rank: int) -> None:
        self.mesh, self.rank, self._ranks = ranks.mesh, rank, ranks
        self._turns: dict[tuple[tuple[int, ...], int], Iterator[int]] = {}

    def exchange(self, value: torch.Tensor, over: Sequence[str], fold: Callable[[list[torch.Tensor]], Result]) -> Result:
        raise UnsupportedError("virtual ranks run one after the other, and exchange nothing on the host")

    def run(self, node: Node, value: torch.Tensor, *, overwritten: bool = False) -> torch.Tensor:
        raise UnsupportedError("virtual ranks run one after the other, and exchange nothing on the host")

    def symmetric(self, over: Sequence[str], size: int) -> Symmetric:
        group = self.mesh.group(self.rank, tuple(over))
        buffers, late = self._ranks.of_group(tuple(group), size)
        at = group.index(self.rank)
        turns = self._turns.setdefault((tuple(group), size), count())
        return Symmetric(tuple(buffers), at, late[at], limit_s=self._ranks.limit_s, turns=turns)
