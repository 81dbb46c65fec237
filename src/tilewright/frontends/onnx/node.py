"""One ONNX node as a converter sees it, and the table of converters.

A converter turns one node into nodes of the graph. It says for which versions of the operator's definition it holds, so
that a later one, whose meaning may differ, is never read with an old meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends.onnx.files import malformed, quoted
from tilewright.frontends.onnx.scope import Context, Scope
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.graph import Node
from tilewright.ir.known import KnownValues

if TYPE_CHECKING:
    import onnx

Converted = Node | Sequence[Node | None]
Converter = Callable[["OpNode"], Converted]

# AttributeProto.AttributeType (onnx.proto)
FLOAT, INT, STRING, TENSOR, FLOATS, INTS, STRINGS = 1, 2, 3, 4, 6, 7, 8


@dataclass(frozen=True)
class Definition:
    """A converter and the operator versions (`since_version` of the schema) whose meaning it implements."""

    since: int
    until: int
    convert: Converter


CONVERTERS: dict[tuple[str, str], list[Definition]] = {}


def converts(name: str, since: int, until: int, domain: str = "") -> Callable[[Converter], Converter]:
    """Register a converter for operator `name`, versions `since` to `until`."""

    def register(f: Converter) -> Converter:
        CONVERTERS.setdefault((domain, name), []).append(Definition(since, until, f))
        return f

    return register


def converter_of(domain: str, name: str, version: int) -> Converter:
    """The converter for this version of an operator.

    Raises:
        Unmodelled: none is written for it.
    """
    found = CONVERTERS.get((domain, name))
    if not found:
        raise Unmodelled("no node of the graph expresses it")
    for d in found:
        if d.since <= version <= d.until:
            return d.convert
    raise Unmodelled(f"version {version} of it is not modelled")


@dataclass(frozen=True)
class OpNode:
    """One ONNX node with its sources resolved, and the place where it stands.

    Attributes:
        proto: as the model has it.
        domain: of the operator, its default as "".
        name: what to call the node in messages and reports.
        sources: the nodes it reads; None where an optional input is absent.
        scope, context: the names it sees, and the operator versions in force.
        known: value of a source that follows from shapes and small constants alone, else None.
        read_tensor: makes a constant of a tensor, which messages call by the second argument.
        note: takes a sentence for the user.
        version: version of the operator's definition in force, once that is found.
    """

    proto: onnx.NodeProto
    domain: str
    name: str
    sources: tuple[Node | None, ...]
    scope: Scope
    context: Context
    known: KnownValues
    read_tensor: Callable[[onnx.TensorProto, str], Node]
    note: Callable[[str], object]
    version: int = 1

    @property
    def op_type(self) -> str:
        """The operator's name."""
        return self.proto.op_type

    @property
    def key(self) -> tuple[str, str]:
        """The operator: its domain and name."""
        return (self.domain, self.proto.op_type)

    @cached_property
    def attributes(self) -> Mapping[str, onnx.AttributeProto]:
        """The node's attributes by name."""
        return {a.name: a for a in self.proto.attribute}

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the results, "" where one is not wanted."""
        return tuple(self.proto.output)

    @property
    def reads_opaque(self) -> bool:
        """Tell whether a source's type is known only at run time."""
        return any(s is not None and s.dtype is OPAQUE for s in self.sources)

    def literal(self, tensor: onnx.TensorProto) -> Node:
        """A tensor-valued attribute as a constant."""
        return self.read_tensor(tensor, self.where)

    @property
    def where(self) -> str:
        """The operator and the node's name, for messages."""
        return f"{self.op_type} node {quoted(self.name)}"

    def malformed(self, what: str, hint: str = "export the model again") -> InputError:
        """An error to raise: the node is not as its operator's definition has it."""
        return malformed(what, self.where, hint)

    def refuse(self, what: str, hint: str) -> UnsupportedError:
        """An error to raise: the node asks for what is not read."""
        return UnsupportedError(what, where=self.where, hint=hint)

    def input(self, index: int) -> Node:
        """Required source `index`.

        Raises:
            InputError: it is absent.
        """
        found = self.optional(index)
        if found is None:
            raise self.malformed(f"{self.op_type} lacks its input {index}")
        return found

    def optional(self, index: int) -> Node | None:
        """The source at `index`, None if it is absent."""
        return self.sources[index] if index < len(self.sources) else None

    def wants(self, index: int) -> bool:
        """Tell whether result `index` has a name."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def has(self, attribute: str) -> bool:
        return attribute in self.attributes

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer attribute; `InputError` if it is absent and has no default."""
        return cast("int", self._get(name, INT, "i", default))

    def real(self, name: str, default: float | None = None) -> float:
        """A float attribute; `InputError` if it is absent and has no default."""
        return cast("float", self._get(name, FLOAT, "f", default))

    def text(self, name: str, default: str | None = None) -> str:
        """A string attribute; `InputError` if it is absent and has no default."""
        value = self._get(name, STRING, "s", default)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else cast("str", value)

    def integers(self, name: str, default: Sequence[int] | None = None) -> list[int]:
        """An attribute of integers; `InputError` if it is absent and has no default."""
        return list(cast("Sequence[int]", self._get(name, INTS, "ints", default)))

    def reals(self, name: str) -> list[float]:
        """An attribute of floats; `InputError` if it is absent."""
        return list(cast("Sequence[float]", self._get(name, FLOATS, "floats", None)))

    def strings(self, name: str) -> list[bytes]:
        """An attribute of strings, as bytes; `InputError` if it is absent."""
        return list(cast("Sequence[bytes]", self._get(name, STRINGS, "strings", None)))

    def tensor(self, name: str) -> onnx.TensorProto:
        """A tensor attribute; `InputError` if it is absent."""
        return cast("onnx.TensorProto", self._get(name, TENSOR, "t", None))

    def _get(self, name: str, kind: int, field: str, default: object) -> object:
        found = self.attributes.get(name)
        if found is None:
            if default is None:
                raise self.malformed(f"{self.op_type} lacks attribute {name!r}")
            return default
        if found.type != kind:
            raise self.malformed(f"attribute {name!r} of {self.op_type} has the wrong kind")
        return getattr(found, field)

    def known_ints(self, index: int) -> list[int]:
        """Elements of an integer source that must be known while reading: a shape, axes, a size.

        Raises:
            Unmodelled: its value depends on an input of the model.
        """
        source = self.input(index)
        value = self.known.listed(source)
        if value is None:
            raise Unmodelled(f"its input {index} is known only at run time")
        if not source.dtype.is_integer or source.tensor.rank > 1:
            raise self.malformed(f"input {index} of {self.op_type} is no list of integers")
        return cast("list[int]", value)

    def known_number(self, index: int) -> float | None:
        """A source of one element that is known while reading, maybe an open extent; None if it is not known."""
        source = self.input(index)
        value = self.known.listed(source) if source.tensor.elements == 1 else None
        return None if value is None else value[0]

    def axes(self, index: int, default: Sequence[int] | None = None) -> list[int] | None:
        """Axes given as source `index` (newer versions) or as attribute `axes` (older ones); `default` if neither."""
        if self.optional(index) is not None:
            return self.known_ints(index)
        if self.has("axes"):
            return self.integers("axes")
        return None if default is None else list(default)

    def axis(self, name: str, default: int | None, rank: int) -> int:
        """Attribute `name` as an axis of a rank-`rank` tensor, counted from the front.

        Raises:
            InputError: no such axis.
        """
        return self.normal_axis(self.integer(name, default), rank)

    def normal_axis(self, axis: int, rank: int) -> int:
        """The axis counted from the front.

        Raises:
            InputError: the rank has none such.
        """
        if not -rank <= axis < rank:
            raise self.malformed(f"axis {axis} of a tensor of rank {rank}")
        return axis % rank
