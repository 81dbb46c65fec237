"""Nodes, graphs, and the only places that follow or replace uses.

A `Node` is frozen and hash-consed: building an equal expression twice gives the same object, so `is` decides equality
and common subexpressions never exist. The attributes of a node *are* its operation: an instance of a frozen `Op`
subclass, which also knows the op's type rule and its meaning. Where a node came from (its origin) is kept by the graph,
not by the node: two models may share a node.

Attributes are checked, and normalised by their declared types, when an operation is made. Python holds 1, 1.0 and True equal,
and 0.0 and -0.0, so `Softmax(True)` and `Softmax(1)` would otherwise be one node or two by chance.
"""

from __future__ import annotations

import math
import operator
import re
import threading
import types
import typing
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tilewright import deadline
from tilewright.dtype import DType
from tilewright.errors import TypeMismatchError
from tilewright.ir.extent import plain_index
from tilewright.ir.factor import Factor
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.types import Shape, TensorType, TupleType, Type

if TYPE_CHECKING:
    import torch

    Value = torch.Tensor | tuple["Value", ...] | object


OPS: dict[str, type[Op]] = {}


@dataclass(frozen=True)
class Op:
    """Base of every operation: a frozen attribute class with a type rule and a meaning.

    A subclass is registered under its snake-case name as soon as it is defined; `text.parse` finds it there.
    """

    name: ClassVar[str] = ""
    arity: ClassVar[int | None] = None  # number of sources; None leaves the count to `infer`
    constant_source: ClassVar[bool] = False  # the result depends on the attributes alone
    meets: ClassVar[bool] = False  # it takes values of other ranks, at every call

    def __post_init__(self) -> None:
        normalise(self, self.name)

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        OPS[cls.name] = cls

    def infer(self, *src: TensorType) -> Type:
        """The result's type from the sources' types.

        Raises:
            TypeMismatchError: the sources do not fit this operation.
        """
        raise NotImplementedError

    def infer_types(self, *src: Type) -> Type:
        """The result's type from the sources' types, tuples refused: `Item` alone takes one.

        Raises:
            TypeMismatchError: the sources do not fit this operation.
        """
        tensors: list[TensorType] = []
        for t in src:
            if isinstance(t, TupleType):
                raise TypeMismatchError(f"{self.name} takes tensors, not the tuple {t}", hint="item(index=…) first")
            tensors.append(t)
        return self.infer(*tensors)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        """The result on torch tensors; `node` gives the logical types (4-bit codes travel in bytes)."""
        raise NotImplementedError

    def factors(self, node: Node) -> tuple[Factor, ...]:
        """The loops that ranks may share out. None by default: every rank needs all sources whole."""
        return ()

    def of_part(self, node: Node, shape: Shape, src: Sequence[TensorType]) -> Op:
        """The operation that gives a part of the result, of this shape, from parts of the sources, of these types."""
        return self

    def regions(self) -> dict[str, tuple[Node, ...]]:
        """Expressions this op carries inside itself, by attribute name (a gemm's operands and stores)."""
        return {}

    def region_roots(self) -> list[Node]:
        """The roots of all expressions of `regions`, one after the other."""
        return [root for roots in self.regions().values() for root in roots]


class Node:
    """One operation applied to sources. Never constructed twice for equal arguments."""

    __slots__ = ("__weakref__", "constant", "op", "src", "type")

    op: Op
    src: tuple[Node, ...]
    type: Type
    constant: bool  # depends on constants alone, and on which rank this is

    def __new__(cls, op: Op, *src: Node) -> Node:
        key = (op, src)
        with _LOCK:
            found = _INTERNED.get(key)
        if found is not None:
            return found
        if op.arity is not None and len(src) != op.arity:
            raise TypeMismatchError(f"{op.name} takes {op.arity} operand{'' if op.arity == 1 else 's'}, not {len(src)}")
        made = object.__new__(cls)
        object.__setattr__(made, "op", op)
        object.__setattr__(made, "src", src)
        object.__setattr__(made, "type", op.infer_types(*(s.type for s in src)))
        object.__setattr__(
            made, "constant", op.constant_source or (bool(src) and not op.meets and all(s.constant for s in src))
        )
        with _LOCK:
            return _INTERNED.setdefault(key, made)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Node is frozen; build another instead of setting {name}")

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __reduce__(self) -> tuple[type[Node], tuple[object, ...]]:
        return (Node, (self.op, *self.src))

    def __repr__(self) -> str:
        return f"<{self.op} of {len(self.src)}: {self.type}>"

    @property
    def tensor(self) -> TensorType:
        """The type, of a node with one result.

        Raises:
            TypeMismatchError: it has several.
        """
        if isinstance(self.type, TupleType):
            raise TypeMismatchError(f"{self.op.name} has several results: {self.type}", hint="item(index=…) picks one")
        return self.type

    @property
    def dtype(self) -> DType:
        """The element type of the one result; several are a `TypeMismatchError`."""
        return self.tensor.dtype

    @property
    def shape(self) -> Shape:
        """The extents of the one result; several are a `TypeMismatchError`."""
        return self.tensor.shape

    def with_src(self, src: Sequence[Node]) -> Node:
        """The same operation over other sources (itself, if they are its own)."""
        return self if all(a is b for a, b in zip(self.src, src, strict=True)) else Node(self.op, *src)


_LOCK = threading.Lock()
_INTERNED: weakref.WeakValueDictionary[tuple[Op, tuple[Node, ...]], Node] = weakref.WeakValueDictionary()


def label_of(node: Node) -> str:
    """The name of an input; "" of any other node."""
    return str(getattr(node.op, "label", ""))


def toposort(
    roots: Iterable[Node],
    known: Container[Node] = (),
    sources: Callable[[Node], Iterable[Node]] = operator.attrgetter("src"),
) -> list[Node]:
    """Every node the roots depend on, each after its sources. Iterative: deep graphs do not exhaust the stack.

    Args:
        roots: the nodes to begin with.
        known: nodes that are left out, and with them what only they depend on.
        sources: what a node depends on, if that is not its own sources.

    Raises:
        OverrunError: the time of a rule or candidate that asks is over (`deadline.py`).
    """
    deadline.check()
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if root in seen or root in known:
            continue
        seen.add(root)
        stack.append((root, iter(sources(root))))
        while stack:
            node, rest = stack[-1]
            for s in rest:
                if s not in seen and s not in known:
                    seen.add(s)
                    stack.append((s, iter(sources(s))))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


class Users:
    """The readers of each node, with their counts; leaving the graph is a read. A rule only asks."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self._of: dict[Node, dict[Node | None, int]] = {}
        for node in toposort(roots):
            self._of[node] = {}
            for s in node.src:
                self._read(s, node)
        for root in roots:
            self._read(root, None)

    def __getitem__(self, node: Node) -> Sequence[Node | None]:
        """The distinct readers of `node`; None stands for an output of the graph. While rules run, a reader that has not been
        settled yet may be rebuilt over rewritten sources: look at its op and its type, not at its identity."""
        return tuple(self._of.get(node, ()))

    def __contains__(self, node: Node) -> bool:
        return node in self._of

    def count(self, node: Node) -> int:
        """The number of source slots (and outputs) that read `node`; 0 when it is not in the graph."""
        return sum(self._of.get(node, {}).values())

    def only(self, node: Node) -> bool:
        """Tell whether `node` is read exactly once."""
        return self.count(node) == 1

    def _read(self, node: Node, reader: Node | None) -> None:
        readers = self._of[node]
        readers[reader] = readers.get(reader, 0) + 1


def substitute(roots: Sequence[Node], replacement: Mapping[Node, Node]) -> list[Node]:
    """The roots with every occurrence of a key replaced by its value. A replacement is not itself searched."""
    memo: dict[Node, Node] = {}
    for node in toposort(roots):
        found = replacement.get(node)
        memo[node] = found if found is not None else node.with_src([memo[s] for s in node.src])
    return [memo[r] for r in roots]


@dataclass(frozen=True)
class Graph:
    """A program: named inputs, named outputs, and what each node was called in its source.

    Attributes:
        name: the program's name.
        inputs: `input` nodes in call order; one that nothing reads is still listed.
        outputs: result nodes (never tuples).
        output_names: one a result, as the source calls it.
        origins: a node's name in the source ("layer.3/attention/query MatMul"), for reports.
        notes: sentences that the front end wants a reader to see (an op it could not model, a default it assumed).
        state: tensors that the program keeps from call to call and writes to: values of its last inputs, which no caller gives;
            its last outputs, which no caller gets, are their new values (`ir/state.py`).
        places: names of the positional arguments of the program's own function, where others come before its last input; one
            that is no input's was fixed as the program was read. Empty: they are the inputs, in order.
        mesh: the ranks that run the program; None for one that runs on one device.
        placements: of a program for one rank, how the tensors lie whose parts its inputs, and then its outputs, are. Empty: the
            program is of whole tensors, and `place` nodes say how they are to lie.
    """

    name: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    output_names: tuple[str, ...]
    origins: Mapping[Node, str] = field(default_factory=dict[Node, str], compare=False, hash=False)
    notes: tuple[str, ...] = field(default=(), compare=False, hash=False)
    state: tuple[torch.Tensor, ...] = field(default=(), compare=False, hash=False, repr=False)
    places: tuple[str, ...] = field(default=(), compare=False, hash=False, repr=False)
    mesh: Mesh | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def local(self) -> bool:
        """Tell whether this is the program of one rank, over its parts of the tensors."""
        return bool(self.placements)

    def nodes(self) -> list[Node]:
        """Every node, sources first."""
        return toposort(self.outputs)

    def users(self) -> Users:
        return Users(self.outputs)

    def origin(self, node: Node) -> str:
        """The source's name of a node, or its op's name."""
        return self.origins.get(node, node.op.name)

    def with_outputs(self, outputs: Sequence[Node], origins: Mapping[Node, str] | None = None) -> Graph:
        """The same program with its results computed by other nodes."""
        return replace(self, outputs=tuple(outputs), origins=self.origins if origins is None else origins)

    def replace(self, replacement: Mapping[Node, Node]) -> Graph:
        """The program with every key computed as its value, and origins handed over.

        Keys inside values are replaced too; no value may depend on its own key.
        """
        origins = dict(self.origins)
        settled: dict[Node, Node] = {}
        for node in toposort(self.outputs, sources=lambda n: (replacement[n],) if n in replacement else n.src):
            target = replacement.get(node)
            settled[node] = settled[target] if target is not None else node.with_src([settled[x] for x in node.src])
            if node in self.origins:
                origins.setdefault(settled[node], self.origins[node])
        return self.with_outputs([settled[o] for o in self.outputs], origins)


def attributes(op: Op) -> dict[str, object]:
    """The op's attributes by name, the regions left out, in declaration order."""
    inner = op.regions()
    return {f.name: getattr(op, f.name) for f in fields(op) if f.name not in inner}


Reader = Callable[[Any], object]


class _WrongError(Exception):
    """The value is not of the declared type; says what is."""


def normalise(op: object, op_name: str) -> None:
    """Give each field of a frozen dataclass the plain Python value of its declared type.

    An int becomes a float where a float is declared, a list a tuple, a NumPy number a Python one, -0.0 0.0 (an operation that
    must tell them apart takes the number as a source).

    Raises:
        TypeMismatchError: a value is not of the declared type, or is NaN, which equals nothing and so cannot be an attribute.
    """
    for name, read in _readers(type(op)):
        value = getattr(op, name)
        try:
            plain = read(value)
        except _WrongError as wrong:
            raise TypeMismatchError(f"{op_name}: {name} is {_shown(value)}, not {wrong}") from None
        if plain is not value:
            object.__setattr__(op, name, plain)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@cache
def _readers(cls: type) -> tuple[tuple[str, Reader], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((f.name, _reader(hints[f.name])) for f in fields(cls))


def _reader(hint: Any) -> Reader:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return _one_of(args)
    if origin in (typing.Union, types.UnionType):
        return _either([_reader(a) for a in args])
    if origin is tuple:
        return _tuple_of(_reader(args[0]))
    numbers: dict[Any, Reader] = {bool: _bool, int: _int, float: _float}
    return numbers.get(hint) or _instance_of(hint)


def _bool(value: Any) -> bool:
    if not isinstance(value, np.bool_) and _int(value) not in (0, 1):
        raise _WrongError("true or false")
    return bool(value)


def _int(value: Any) -> int:
    try:
        return plain_index(value)
    except TypeError:
        raise _WrongError("a whole number") from None


def _float(value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _WrongError("a number") from None
    if math.isnan(number):
        raise _WrongError("a number")
    return value if type(value) is float and value else number + 0.0


def _one_of(choices: Iterable[object]) -> Reader:
    known = {c: c for c in choices}

    def read(value: Any) -> object:
        if not isinstance(value, str) or value not in known:
            raise _WrongError(f"one of {', '.join(map(str, known))}")
        return known[value]

    return read


def _either(readers: list[Reader]) -> Reader:
    def read(value: Any) -> object:
        wanted: list[str] = []
        for option in readers:
            try:
                return option(value)
            except _WrongError as wrong:
                wanted.append(str(wrong))
        raise _WrongError(" or ".join(wanted))

    return read


def _tuple_of(read_item: Reader) -> Reader:
    def read(value: Any) -> object:
        if type(value) is not tuple and not isinstance(value, (list, tuple)):
            raise _WrongError("a list")
        items = tuple(map(read_item, typing.cast("Iterable[object]", value)))
        same = type(value) is tuple and all(a is b for a, b in zip(items, typing.cast("tuple[object]", value), strict=True))
        return value if same else items

    return read


def _instance_of(cls: type) -> Reader:
    name = "none" if cls is types.NoneType else f"a {cls.__name__}"

    def read(value: Any) -> object:
        if not isinstance(value, cls):
            raise _WrongError(name)
        return value

    return read
