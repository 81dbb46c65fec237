"""Operations between the ranks of a mesh (`ir/mesh.py`): every rank of a group gives a value, and gets its share of the result.

Each names the mesh axes along which its group lies, and their sizes, so that types are known without the mesh. They may stand
in the expressions of a gemm: an operand read through an all-gather, a store through a reduction.

Narrow floats travel as they are and are reduced in the order of ranks, in f32 or wider, with one rounding: every rank of a
group gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch

from tilewright.dtype import F64
from tilewright.errors import TypeMismatchError, UnsupportedError
from tilewright.ir.factor import Factor, aligned
from tilewright.ir.graph import Node, Op, normalise
from tilewright.ir.mesh import Placement, Result, team
from tilewright.ir.ops.functions import by_bits
from tilewright.ir.ops.norm import Reduce
from tilewright.ir.ops.rounding import to_float
from tilewright.ir.ops.source import Param
from tilewright.ir.types import TensorType, Type, normalize_axis

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

Fn = Literal["add", "multiply", "maximum", "minimum", "and", "or"]


@dataclass(frozen=True)
class Collective:
    """The group of ranks that takes part: attributes of every operation between ranks.

    Attributes:
        over: names of mesh axes; the last one varies fastest within the group.
        sizes: their numbers of ranks.
    """

    name: ClassVar[str]
    arity: ClassVar[int | None] = 1
    meets: ClassVar[bool] = True

    over: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        normalise(self, self.name)
        if len(self.over) != len(self.sizes) or not self.over or len(set(self.over)) != len(self.over):
            raise TypeMismatchError(f"{self.name} over {list(self.over)} of sizes {list(self.sizes)}")
        if any(s < 1 for s in self.sizes):
            raise TypeMismatchError(f"{self.name} over {list(self.over)} of sizes {list(self.sizes)}", hint="1 or more")

    @property
    def ranks(self) -> int:
        """The number of ranks in a group."""
        return math.prod(self.sizes)

    def wire_bytes(self, x: TensorType) -> int:
        """Bytes that each rank receives at least, if every rank gives a value of this type: what it does not hold itself.

        An all-reduce is counted as a reduce-scatter and an all-gather. Source: Thakur et al. 2005, for long messages.
        """
        return x.size_bytes * (self.ranks - 1) // self.ranks

    def _exchanged(self, x: torch.Tensor, fold: Callable[[list[torch.Tensor]], Result]) -> Result:
        """`fold` of what the ranks of the group give, in order."""
        peers = team()
        sizes = dict(peers.mesh.axes)
        if any(sizes.get(name) != size for name, size in zip(self.over, self.sizes, strict=True)):
            wanted = ",".join(f"{n}={s}" for n, s in zip(self.over, self.sizes, strict=True))
            raise UnsupportedError(
                f"{self.name} is over {wanted}, on a mesh of {peers.mesh}", hint="run it on the mesh it is for"
            )
        return peers.exchange(x, self.over, fold)

    def _place(self) -> int:
        """The place of this rank in the group."""
        peers = team()
        return peers.mesh.index(peers.rank, self.over)

    def _part(self, x: TensorType, axis: int) -> TensorType:
        """The type of one rank's part of an axis."""
        at = normalize_axis(axis, x.rank, self.name)
        if at != axis or x.shape[axis] % self.ranks:
            raise TypeMismatchError(f"{self.ranks} ranks do not divide axis {axis} of {x}", where=self.name)
        return x.with_shape(d // self.ranks if i == axis else d for i, d in enumerate(x.shape))

    def _times(self, x: TensorType, axis: int) -> TensorType:
        """The type of all ranks' parts of an axis together."""
        if normalize_axis(axis, x.rank, self.name) != axis:
            raise TypeMismatchError(f"axis {axis} of {x}", where=self.name)
        return x.with_shape(d * self.ranks if i == axis else d for i, d in enumerate(x.shape))


@dataclass(frozen=True)
class AllGather(Collective, Op):
    """Every rank's value, one after the other along `axis`."""

    axis: int = 0

    def wire_bytes(self, x: TensorType) -> int:
        return x.size_bytes * (self.ranks - 1)

    def infer(self, *src: TensorType) -> Type:
        return self._times(src[0], self.axis)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return self._exchanged(src[0], lambda values: by_bits(lambda *x: torch.cat(x, self.axis), *values))


@dataclass(frozen=True)
class AllReduce(Collective, Op):
    """`fn` over the values of all ranks, the same bits on each."""

    fn: Fn = "add"

    def wire_bytes(self, x: TensorType) -> int:
        return 2 * super().wire_bytes(x)

    def infer(self, *src: TensorType) -> Type:
        return _reduced(self.fn, src[0])

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return self._exchanged(src[0], partial(_reduce, self.fn, node.tensor))


@dataclass(frozen=True)
class ReduceScatter(Collective, Op):
    """`fn` over the values of all ranks, of which this rank gets its part along `axis`."""

    fn: Fn = "add"
    axis: int = 0

    def infer(self, *src: TensorType) -> Type:
        return self._part(_reduced(self.fn, src[0]), self.axis)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        whole = self._exchanged(src[0], partial(_reduce, self.fn, node.tensor.with_shape(src[0].shape)))
        extent = node.shape[self.axis]
        return whole.narrow(self.axis, self._place() * extent, extent)


@dataclass(frozen=True)
class AllToAll(Collective, Op):
    """Parts along `split` of all ranks' values, this rank's of each, one after the other along `join`."""

    split: int = 0
    join: int = 0

    def infer(self, *src: TensorType) -> Type:
        return self._times(self._part(src[0], self.split), self.join)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        extent, place = src[0].shape[self.split] // self.ranks, self._place()
        parts = [x.narrow(self.split, place * extent, extent) for x in self._exchanged(src[0], list)]
        return by_bits(lambda *x: torch.cat(x, self.join), *parts)


@dataclass(frozen=True)
class Own(Collective, Op):
    """A part, along `axis`, of what every rank of the group holds whole: this rank's. Nothing travels."""

    meets: ClassVar[bool] = False

    axis: int = 0

    def wire_bytes(self, x: TensorType) -> int:
        return 0

    def infer(self, *src: TensorType) -> Type:
        return self._part(src[0], self.axis)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        extent = node.shape[self.axis]
        return src[0].narrow(self.axis, self._place() * extent, extent)


@dataclass(frozen=True)
class Place(Op):
    """The source itself, a whole tensor, of which this says how it is to lie on the mesh of its graph.

    Attributes:
        splits: for each axis the mesh axes that split it, the first one outermost.
        partial: mesh axes over which ranks hold summands.
    """

    arity: ClassVar[int | None] = 1

    splits: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    @property
    def placement(self) -> Placement:
        """The attributes as a placement."""
        return Placement(self.splits, self.partial)

    def infer(self, *src: TensorType) -> Type:
        if self.placement.rank != src[0].rank:
            raise TypeMismatchError(f"the placement {self.placement} is of {self.placement.rank} axes, {src[0]} is not")
        return src[0]

    def factors(self, node: Node) -> tuple[Factor, ...]:
        return aligned(node.tensor, [node.src[0].tensor])

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return src[0]


def _reduced(fn: Fn, x: TensorType) -> TensorType:
    """The type of `fn` over values of a type, which is that of a reduction of an axis of ranks."""
    found = Reduce(fn, (0,)).infer(x.with_shape((1, *x.shape)))
    assert isinstance(found, TensorType)
    return found


def _reduce(fn: Fn, type: TensorType, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values reduced in order."""
    if type.dtype.is_float and fn in ("add", "multiply"):
        wide = torch.float64 if type.dtype is F64 else torch.float32
        total = values[0].to(wide)
        for value in values[1:]:
            total = total + value.to(wide) if fn == "add" else total * value.to(wide)
        return to_float(total, type.dtype)
    whole = Node(Reduce(fn, (0,)), Node(Param(0, type.with_shape((len(values), *type.shape)))))
    return cast("torch.Tensor", whole.op.evaluate(whole, [by_bits(lambda *x: torch.stack(x), *values)]))
