"""Registry of the operations that have a meaning in the graph, and the `Site` that a lowering is given.

A lowering is a function of a `Site`: it returns what the operation's results are, or raises `Unmodelled` where it holds no
meaning for this one, which then becomes a `call`. Modules of this folder register lowerings by topic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilewright.errors import UnsupportedError
from tilewright.frontends.stablehlo.extents import filled
from tilewright.frontends.stablehlo.module import Operation, carried_types, tensor_type
from tilewright.ir.extent import plain_index
from tilewright.ir.graph import Node
from tilewright.ir.types import Shape, TensorType

if TYPE_CHECKING:
    from tilewright.frontends.stablehlo.walk import Walk


@dataclass(frozen=True, slots=True)
class Complex:
    """A tensor of complex numbers: the tensors of their real and imaginary parts, of one type."""

    re: Node
    im: Node

    @property
    def shape(self) -> Shape:
        """Extents of either."""
        return self.re.shape


_SHAPED = {"dynamic_reshape": 1, "dynamic_broadcast_in_dim": 1, "dynamic_iota": 0}  # which operand says the shape

# A tuple is a list; a token (an order of effects, no data) is None.
Value = Node | Complex | list["Value"] | None
Lowering = Callable[["Site"], Value]

LOWERINGS: dict[str, Lowering] = {}


@dataclass
class Site:
    """One operation in its program, with the values it reads.

    Attributes:
        op: the operation.
        values: its operands.
        reader: the walk.
    """

    op: Operation
    values: Sequence[Value]
    reader: Walk
    _outs: list[TensorType] = field(default_factory=list[TensorType])

    @property
    def out(self) -> TensorType:
        """Type of the first result."""
        return self.outs[0]

    @property
    def outs(self) -> list[TensorType]:
        """Types of the results.

        Raises:
            UnsupportedError: one is no tensor that the graph can carry.
        """
        if not self._outs:
            self._outs = [tensor_type(r.type, self.op.where, self._open(r.type)) for r in self.op.results]
        return self._outs

    def _open(self, raw: Any) -> Shape | None:
        """The shape of a result whose type leaves extents open: what a dynamic operation's shape operand says, else that of the
        first operand; None where neither fits."""
        if getattr(raw, "has_static_shape", True):
            return None
        name = self.op.name.partition(".")[2]
        if name in _SHAPED:
            extents = self.extents(self.nodes[_SHAPED[name]])
            if extents is None:
                raise self.refuse("its shape is known only at run time", hint="work it out from shapes of inputs alone")
            return filled(raw, extents)
        shapes = [v.shape for v in self.values if isinstance(v, Node)]
        if name == "reduce":
            shapes = [tuple(d for a, d in enumerate(shapes[0]) if a not in self.op.ints("dimensions"))]
        return next((s for shape in shapes if (s := filled(raw, shape)) is not None), None)

    def extents(self, node: Node) -> list[int] | None:
        """The elements of a vector that constants and extents make; None of any other."""
        found = self.reader.known.listed(node)
        return None if found is None else [plain_index(v) for v in found]

    @property
    def carried(self) -> list[list[TensorType]]:
        """Types of what carries each result: one, or two for complex numbers.

        Raises:
            UnsupportedError: one is no tensor that the graph can carry.
        """
        inferred = self.op.name in ("stablehlo.reduce", "stablehlo.sort")  # the others' extents are in their types alone
        shapes = [self._open(r.type) if inferred else None for r in self.op.results]
        return [
            carried_types(r.type, self.op.where) if s is None else [tensor_type(r.type, self.op.where, s)]
            for r, s in zip(self.op.results, shapes, strict=True)
        ]

    @property
    def nodes(self) -> list[Node]:
        """The operands, all of them tensors.

        Raises:
            UnsupportedError: one is a tuple, a token or complex.
        """
        found = [v for v in self.values if isinstance(v, Node)]
        if len(found) != len(self.values):
            if any(isinstance(v, Complex) for v in self.values):
                raise self.refuse("it has no meaning for complex numbers here", hint="write it with real and imaginary parts")
            raise self.refuse("it reads a tuple or a token where tensors are expected")
        return found

    def refuse(self, what: str, hint: str | None = None) -> UnsupportedError:
        """An error about this operation, to be raised."""
        return UnsupportedError(what, where=self.op.where, hint=hint)


def one_or_all(values: list[Value]) -> Value:
    """The results of an operation as its value: a single one by itself."""
    return values[0] if len(values) == 1 else values


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Register a lowering for operations by their full names."""

    def register(f: Lowering) -> Lowering:
        for name in names:
            LOWERINGS[name] = f
        return f

    return register


def lowering(name: str) -> Lowering | None:
    """The lowering of an operation; MHLO's operations mean what StableHLO's and CHLO's of the same name mean."""
    dialect, _, op = name.partition(".")
    names = (name, f"stablehlo.{op}", f"chlo.{op}") if dialect == "mhlo" else (name,)
    return next((LOWERINGS[n] for n in names if n in LOWERINGS), None)
