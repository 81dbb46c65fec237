"""Graphs of AOTAutograd: functional ATen with numbers that stand for extents, which stay open or are those of one call.

`Open` is such a graph with torch's symbols in it, which the front end reads as a program for ranges. `at` runs the graph on
stand-ins of the shapes that a call has, so that every number is one. Either gives what the reader of exported programs takes.
What a call gives that it only hands through, a number or a view of an argument, is no part of the program (`Given`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import fx
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.frontends.torch.call import schema_of
from tilewright.frontends.torch.export import OTHERWISE
from tilewright.frontends.torch.reader import Reader
from tilewright.frontends.torch.registry import TRANSLATIONS
from tilewright.frontends.torch.symbols import Symbols, dim_of, reading
from tilewright.ir.dims import Dim, Scope, spelt
from tilewright.ir.graph import Graph
from tilewright.tracing import TRACING

COPY = "aten.copy_.default"
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


Views = tuple[tuple[OpOverload, tuple[object, ...], Mapping[str, object]], ...]
"""Operators of torch that give a view, with the arguments behind the tensor, in turn."""


def _seen(x: object, views: Views) -> object:
    for view, rest, named in views:
        x = view(x, *rest, **named)
    return x


def _views_at(views: Views, number: Callable[[object], object]) -> Views:
    return tuple((view, *pytree.tree_map(number, (rest, dict(named)))) for view, rest, named in views)


@dataclass(frozen=True)
class Given:
    """A result that a call hands through: a number, or an argument seen through views.

    Attributes:
        place: of the argument; None: it is `value`.
    """

    place: int | None = None
    value: object = None
    views: Views = ()

    def of(self, args: Sequence[object]) -> object:
        """The result, of the arguments of a call."""
        return self.value if self.place is None else _seen(args[self.place], self.views)

    def at(self, number: Callable[[object], object]) -> Given:
        """The same with numbers for symbols."""
        return replace(self, value=number(self.value), views=_views_at(self.views, number))


@dataclass(frozen=True)
class Made:
    """A result that the program computes, or a view of one.

    Attributes:
        index: among the program's results.
        shape, strides, device: as torch's own kernels would give it.
        order: axes of the program's result, in the order in which they are this one's.
        views: through which it is seen then.
    """

    index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    order: tuple[int, ...] | None = None
    views: Views = ()

    def at(self, number: Callable[[object], object]) -> Made:
        """The same with numbers for symbols."""
        shape, strides = (cast("tuple[int, ...]", tuple(map(number, given))) for given in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides, views=_views_at(self.views, number))

    def of(self, results: Sequence[object]) -> object:
        """The result, of those of the program, in the memory layout that autograd reckons with."""
        found = cast("torch.Tensor", results[self.index])
        if self.order is not None:
            found = found.permute(self.order)
        if found.device != self.device:
            found = found.to(self.device)
        if found.stride() != self.strides and found.numel():
            apart = torch.empty_strided(self.shape, self.strides, dtype=found.dtype, device=found.device)
            found = apart.copy_(found)
        return _seen(found, self.views)


@dataclass(frozen=True)
class _Unnamed:
    """Says that results have no names."""

    out_spec: None = None


@dataclass
class Concrete:
    """A graph for the extents of one call, as far as the reader of exported programs looks at one.

    Attributes:
        graph: functional ATen without symbols; its placeholders are tensors.
        graph_signature: what they are: constants, arrays that change, inputs.
        constants, state_dict: tensors of the constants, and of the arrays that change.
        inputs: places of the program's inputs among the arguments of a call.
        written: places of the arguments that change, in the order of the program's state.
        results: where each result of a call comes from.
    """

    graph: fx.Graph
    graph_signature: ExportGraphSignature
    constants: dict[str, torch.Tensor]
    state_dict: dict[str, torch.Tensor]
    inputs: list[int]
    written: list[int]
    results: list[Given | Made]
    call_spec: _Unnamed = field(default_factory=lambda: _Unnamed())

    def at(self, number: Callable[[object], object]) -> Concrete:
        """The same with numbers for symbols in its results."""
        return replace(self, results=[r.at(number) for r in self.results])


def decompositions(*, derived: bool) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of what the reader has no translation for; `derived`: gradients are wanted.

    Attention on a CPU is then left whole, as its derivative reads what the decomposition does not give.
    """
    table = torch.export.default_decompositions()
    kept = {op: f for op, f in table.items() if str(op) not in TRANSLATIONS.keys() | OTHERWISE and not _implicit(op)}
    if derived:
        kept.pop(_FLASH, None)
    return kept


def whole() -> dict[OpOverload, Callable[..., object]]:
    """Composite operators that a graph without gradients is to hold whole, as the reader translates them; for
    `torch.export`'s own switch of composite operators."""
    table = torch.export.default_decompositions()
    return {cast(OpOverload, op): _left_whole for op in table if str(op) in TRANSLATIONS and _implicit(op)}


def _left_whole(*args: object, **kwargs: object) -> object:
    return NotImplemented


def _implicit(op: Any) -> bool:
    return isinstance(op, OpOverload) and op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def read(module: fx.GraphModule, args: Sequence[object], constant: Collection[int], name: str) -> tuple[Graph, Concrete]:
    """The program of a graph for the shapes of `args`, and how a call of it is made.

    Args:
        module: the graph as AOTAutograd gives it to a compiler.
        args: tensors and numbers of a call; tensors whose places are in `constant` are constants of the program, and those
            that the graph writes to are its state.
        constant: places of arguments that nobody writes to.
        name: the program's.

    Raises:
        UnsupportedError: control flow, random numbers, effects, types no graph holds.
    """
    with TRACING, torch.no_grad():
        concrete = at(module, args, constant)
        return Reader(cast(Any, concrete), name, random=True).read(), concrete


class Open:
    """A graph whose extents stay open, as the front end reads it into any scope: `tilewright.compile(Open(…), dims=True)`.

    Attributes:
        concrete: how a call of it is made; extents in it are torch's symbols.
        name: the program's.
    """

    concrete: Concrete
    name: str

    def __init__(self, module: fx.GraphModule, args: Sequence[object], constant: Collection[int], name: str) -> None:
        """The graph with the arguments of a call, of which those at `constant` are constants (`read`).

        Raises:
            UnsupportedError: it holds what is no functional operator of torch, a symbol that no argument says, or none in the
                shapes of its inputs.
        """
        self.name = name
        self._places = _symbols_of(module)
        holders = [cast("object", n.meta.get("val")) for n in module.graph.nodes if n.op == "placeholder"]
        fakes = next((v.fake_mode for v in holders if isinstance(v, FakeTensor)), None)
        if not self._places or fakes is None or fakes.shape_env is None:
            raise UnsupportedError("no extent of the arguments is open", where=name)
        with TRACING, torch.no_grad(), fakes.shape_env.suppress_guards():
            self.concrete = _Walk(module, args, constant, fakes, {*self._places}).run()
        read = (*self.concrete.inputs, *self.concrete.written)
        if not any(_is_symbolic(d) for place in read for d in cast("torch.Tensor", holders[place]).shape):
            raise UnsupportedError("no extent of the inputs is open", where=name)
        ranges = {s: fakes.shape_env.var_to_range.get(s) for s in self._places}
        self._ranges = {s: r for s, r in ranges.items() if r is not None}
        self._alike: list[dict[Any, int]] = []
        self._example: dict[str, int] = {}

    def expecting(self, args: Sequence[object]) -> Open:
        """The same graph, read with the extents of this call for examples: those that reading takes else, so as not to be equal
        by chance, may be none for which the graph holds."""
        made = copy.copy(self)
        made._example = self.values(args)
        return made

    def alike(self, args: Sequence[object]) -> Open:
        """The same graph with one dim for symbols that are equal in this call, and in all that were given to `alike` before:
        torch gives each key and each value of a cache a symbol, and does not say that they are equal."""
        made = copy.copy(self)
        made._alike = [*self._alike, self._values(args)]
        return made

    @property
    def united(self) -> bool:
        """Tell whether several symbols are one dim."""
        return any(symbol is not one for symbol, one in self._ones().items())

    def holds(self, args: Sequence[object]) -> bool:
        """Tell whether what is taken to be equal (`alike`) is, for the arguments of a call."""
        values = self._values(args)
        return all(values[symbol] == values[one] for symbol, one in self._ones().items())

    def _ones(self) -> dict[Any, Any]:
        """Find for each symbol the one whose dim stands for it: the first of those that it has been equal to so far."""
        if not self._alike:
            return {s: s for s in self._places}
        found: dict[tuple[int, ...], Any] = {}
        return {s: found.setdefault(tuple(v[s] for v in self._alike), s) for s in self._places}

    def _dims(self) -> dict[str, Dim]:
        """The dim of each symbol that is one with others, by its name."""
        together: dict[Any, list[Any]] = {}
        for symbol, one in self._ones().items():
            together.setdefault(one, []).append(symbol)
        found: dict[str, Dim] = {}
        for one, several in together.items():
            dims = [dim_of(str(s), self._ranges.get(s)) for s in several]
            dim = Dim(spelt(str(one)), max(d.low for d in dims), min(d.high for d in dims))
            found |= {str(s): dim for s in several} if len(several) > 1 else {}
        return found

    def graph(self, scope: Scope) -> Graph:
        """The program, its open extents in a scope.

        Raises:
            UnsupportedError: control flow, random numbers, effects, types no graph holds, or torch's own operator is given an
                open extent.
        """
        scope.expect({**self._example, **scope.asked})
        with TRACING, torch.no_grad(), reading(Symbols(scope, self._ranges, self._dims())):
            return Reader(cast(Any, self.concrete), self.name, random=True).read()

    def values(self, args: Sequence[object]) -> dict[str, int]:
        """The values of the dims, by name, that the arguments of a call say."""
        values = self._values(args)
        return {spelt(str(one)): values[one] for one in self._ones().values()}

    def at(self, args: Sequence[object]) -> Concrete:
        """The graph at the extents of a call with these arguments; it serves every call of the same extents."""
        values = self._values(args)

        def number(value: object) -> object:
            return int(value.node.expr.xreplace(values)) if isinstance(value, torch.SymInt) else value

        return self.concrete.at(number)

    def _values(self, args: Sequence[object]) -> dict[Any, int]:
        return {symbol: get(args[place]) for symbol, (place, get) in self._places.items()}


Get = Callable[[Any], int]


def _symbols_of(module: fx.GraphModule) -> dict[Any, tuple[int, Get]]:
    """Find for each of torch's symbols an argument, by its place, and the function that reads the symbol's value off it."""
    found: dict[Any, tuple[int, Get]] = {}
    for place, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        value = cast("object", node.meta.get("val"))
        said: list[tuple[object, Get]] = [(value, int)]
        if isinstance(value, torch.Tensor):
            said = [(d, partial(_extent, axis)) for axis, d in enumerate(value.shape)]
            said += [(d, partial(_stride, axis)) for axis, d in enumerate(value.stride())]
        for d, get in said:
            if _is_symbolic(d) and d.node.expr.is_Symbol:
                found.setdefault(d.node.expr, (place, get))
    return found


def _extent(axis: int, t: torch.Tensor) -> int:
    return t.shape[axis]


def _stride(axis: int, t: torch.Tensor) -> int:
    return t.stride(axis)


def _is_symbolic(d: object) -> TypeGuard[torch.SymInt]:
    """Tell whether an extent is computed from symbols; one that torch found out is a number."""
    return isinstance(d, torch.SymInt) and not d.node.expr.is_Integer


def _hinted(d: object) -> int:
    """An extent for the shapes that a graph was traced with.

    Raises:
        UnsupportedError: it depends on data.
    """
    found = d.node.hint if isinstance(d, torch.SymInt) else d
    if not isinstance(found, int):
        raise UnsupportedError(f"an extent, {d}, depends on data", where="torch.compile")
    return found


class _Walk:
    """Walks a graph once, running it on stand-ins; or as it was traced, with symbols that arguments say."""

    def __init__(
        self,
        module: fx.GraphModule,
        args: Sequence[object],
        constant: Collection[int],
        fakes: FakeTensorMode,
        symbols: Collection[object] | None = None,
    ) -> None:
        self._module, self._args, self._constant = module, args, constant
        self._fakes, self._symbols = fakes, symbols
        self._env: dict[fx.Node, object] = {}  # numbers, and nodes of the graph that is made
        self._place: dict[fx.Node, int] = {}  # of the placeholders that are made
        self.graph = fx.Graph()
        self.specs: list[InputSpec] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.state: dict[str, torch.Tensor] = {}
        self.inputs: list[int] = []
        self._extents: dict[object, fx.Node] = {}  # by torch's expression
        self._written = dict[int, fx.Node]()  # by the place of the argument, what it becomes

    def run(self) -> Concrete:
        changed = _changed(self._module)
        places = iter(range(len(self._args)))
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._env[node] = self._placeholder(node, next(places), node in changed)
            elif node.op == "get_attr":
                self._env[node] = self._attribute(node)
            elif node.op == "call_function":
                self._env[node] = self._operator(node)
            elif node.op == "output":
                return self._ended(cast("Sequence[object]", node.args[0]))
            else:
                raise UnsupportedError(f"a {node.op} has no place in a graph", where=node.name)
        raise UnsupportedError("a graph without results", where="torch.compile")

    def _placeholder(self, node: fx.Node, place: int, changed: bool) -> object:
        value = self._args[place]
        if not isinstance(value, torch.Tensor):
            return value if self._symbols is None else self._known(node.meta["val"], node)
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout is not torch.strided:
            raise UnsupportedError(f"an argument is a {type(value).__name__} of layout {value.layout}", where=node.name)
        kind = InputKind.USER_INPUT
        made = self._made(node, value)
        if changed:
            kind, self.state[made.name] = InputKind.BUFFER, torch.empty_like(value, device="meta")
        elif place in self._constant:
            kind, self.constants[made.name] = InputKind.CONSTANT_TENSOR, value.detach()
        else:
            self.inputs.append(place)
        self._specified(made, kind)
        self._place[made] = place
        return made

    def _attribute(self, node: fx.Node) -> object:
        value: object = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"a {type(value).__name__} has no place in a graph", where=node.name)
        made = self._made(node, value)
        self.constants[made.name] = value.detach()
        self._specified(made, InputKind.CONSTANT_TENSOR)
        return made

    def _made(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        after = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with contextlib.nullcontext() if after is None else self.graph.inserting_before(after):
            made = self.graph.placeholder(node.name)
        if self._symbols is not None and node.op == "placeholder":
            made.meta["val"] = self._known(node.meta["val"], node)
            return made
        with self._fakes:
            made.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made

    def _known(self, value: object, node: fx.Node) -> object:
        """A value as it was traced, whose symbols arguments say.

        Raises:
            UnsupportedError: they do not, or it is a number that is no extent.
        """
        for leaf in pytree.tree_leaves(value):
            numbers = (*leaf.shape, *leaf.stride()) if isinstance(leaf, torch.Tensor) else (leaf,)
            for d in numbers:
                if isinstance(d, (torch.SymFloat, torch.SymBool)):
                    raise UnsupportedError(f"{d} is no extent", where=node.name)
                if isinstance(d, torch.SymInt) and not d.node.expr.free_symbols <= {*(self._symbols or ())}:
                    raise UnsupportedError(f"no argument says what {d} is", where=node.name)
        return value

    def _specified(self, made: fx.Node, kind: InputKind) -> None:
        target = None if kind is InputKind.USER_INPUT else made.name
        kept = True if kind is InputKind.BUFFER else None
        self.specs.append(InputSpec(kind, TensorArgument(made.name), target, kept))

    def _operator(self, node: fx.Node) -> object:
        args, kwargs = cast("tuple[Any, Any]", map_arg((node.args, node.kwargs), lambda n: cast(Any, self._env[n])))
        target = cast("Callable[..., object]", node.target)
        if str(target) == COPY:
            return self._copied(node, *args)
        if target is operator.getitem and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        leaves = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Node)]
        if isinstance(target, OpOverload) and schema_of(target).is_mutable:
            raise UnsupportedError(f"{target} writes to its operand", where=node.name)
        if not isinstance(target, OpOverload) and leaves and target is not operator.getitem:
            raise UnsupportedError(f"{target} has no place in a graph", where=node.name)
        value = self._value(node, target, args, kwargs)
        if not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value)):
            symbolic = any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in pytree.tree_leaves(value))
            if self._symbols is None and leaves and symbolic:
                raise UnsupportedError(f"{target} makes a number that depends on the data", where=node.name)
            return value  # of numbers alone, or a check of them
        args, kwargs = pytree.tree_map(lambda leaf: self._number(leaf, node), (args, kwargs))
        made = self.graph.call_function(cast(Any, target), args, kwargs, name=node.name)
        made.meta = {k: v for k, v in node.meta.items() if k == "nn_module_stack"}
        made.meta["val"] = value
        return made

    def _value(self, node: fx.Node, target: Callable[..., object], args: Any, kwargs: Any) -> object:
        """The value of an operator: what torch gives for stand-ins, or what was seen when the graph was traced."""
        if self._symbols is None:
            given, named = map_arg((args, kwargs), lambda n: n.meta["val"])
            with self._fakes:
                return target(*given, **named)
        value = node.meta.get("val")
        tensors = any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value))
        return self._known(value, node) if tensors or isinstance(value, torch.SymInt) else value

    def _number(self, leaf: object, node: fx.Node) -> object:
        """An argument of an operator; a symbol as a node, which the graph may hold.

        Raises:
            UnsupportedError: it is a number that is no extent.
        """
        if isinstance(leaf, (torch.SymFloat, torch.SymBool)):
            raise UnsupportedError(f"{leaf} is no extent", where=node.name)
        if not isinstance(leaf, torch.SymInt):
            return leaf
        if leaf.node.expr not in self._extents:
            made = self._extents[leaf.node.expr] = self.graph.call_function(operator.index, ())
            made.meta["val"] = leaf
        return self._extents[leaf.node.expr]

    def _copied(self, node: fx.Node, into: object, new: object, *_: object) -> object:
        """The end of a graph in which an argument takes its new value."""
        if not isinstance(into, fx.Node) or into not in self._place or not isinstance(new, fx.Node):
            raise UnsupportedError("a copy that ends no graph", where=node.name)
        self._written[self._place[into]] = new
        return new

    def _ended(self, returned: Sequence[object]) -> Concrete:
        outputs: list[fx.Node] = []
        results: list[Given | Made] = []
        for item in returned:
            value = self._env[item] if isinstance(item, fx.Node) else item
            results.append(self._handed(value) or self._computed(cast(fx.Node, value), outputs))
        specs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in outputs]
        written = [p for p in self._place.values() if p in self._written]
        names = {place: node.name for node, place in self._place.items()}
        changes = [OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(self._written[p].name), names[p]) for p in written]
        made = self.graph.output((*outputs, *(self._written[p] for p in written)))
        made.meta["val"] = None
        signature = ExportGraphSignature(self.specs, [*specs, *changes])
        return Concrete(self.graph, signature, self.constants, self.state, self.inputs, written, results)

    def _handed(self, value: object) -> Given | None:
        """A result that is a number, or a view of an argument that stays as it is; None for any other."""
        if not isinstance(value, fx.Node):
            return Given(value=value)
        base, views = _viewed(value, lambda _: True)
        place = self._place.get(base)
        return None if place is None or place in self._written else Given(place, None, views)

    def _computed(self, value: fx.Node, outputs: list[fx.Node]) -> Made:
        """A result that the program gives, in the order in which its axes lie in memory; a view of it, where that is all."""
        value, views = _viewed(value, lambda base: base not in self._place)
        held = cast("torch.Tensor", value.meta["val"])
        shape, strides = ([*map(_hinted, given)] for given in (held.shape, held.stride()))
        order = sorted(range(held.dim()), key=lambda a: (strides[a], shape[a]), reverse=True)
        back = None
        if order != [*range(held.dim())] and _is_dense([shape[a] for a in order], [strides[a] for a in order]):
            moved = self.graph.call_function(torch.ops.aten.permute.default, (value, order))
            with self._fakes:
                moved.meta["val"] = torch.empty([held.shape[a] for a in order], dtype=held.dtype, device=held.device)
            back, value = tuple(order.index(a) for a in range(len(order))), moved
        if value not in outputs:
            outputs.append(value)
        return Made(outputs.index(value), tuple(held.shape), held.stride(), held.device, back, views)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether elements of these extents follow each other in memory."""
    step = 1
    for n, stride in reversed([*zip(shape, strides, strict=True)]):
        if n != 1 and stride != step:
            return 0 in shape
        step *= n
    return True


def _viewed(value: fx.Node, may_be: Callable[[fx.Node], bool]) -> tuple[fx.Node, Views]:
    """The node of which another is a view, all of its elements, as far as `may_be` allows; and through which operators."""
    views: list[tuple[OpOverload, tuple[object, ...], Mapping[str, object]]] = []
    while isinstance(value.target, OpOverload) and value.target.is_view and isinstance(value.meta["val"], torch.Tensor):
        base, *rest = value.args
        rest, named = map_arg((rest, value.kwargs), lambda n: n.meta["val"] if n.target is operator.index else n)
        whole = isinstance(base, fx.Node) and _count(base) <= _count(value)
        known = not any(isinstance(a, fx.Node) for a in pytree.tree_leaves((rest, named)))
        if not whole or not known or not may_be(cast(fx.Node, base)):
            break
        views.append((value.target, tuple(rest), named))
        value = cast(fx.Node, base)
    return value, tuple(reversed(views))


def _count(node: fx.Node) -> int:
    return math.prod(map(_hinted, node.meta["val"].shape))


def at(module: fx.GraphModule, args: Sequence[object], constant: Collection[int]) -> Concrete:
    """The graph for the shapes of `args`, which are tensors and numbers (`read`).

    Raises:
        UnsupportedError: it holds what is no functional operator of torch.
    """
    return _Walk(module, args, constant, FakeTensorMode()).run()


def written(module: fx.GraphModule) -> set[int]:
    """Places of the arguments that a graph writes to."""
    changed = _changed(module)
    return {i for i, n in enumerate(n for n in module.graph.nodes if n.op == "placeholder") if n in changed}


def _changed(module: fx.GraphModule) -> set[fx.Node]:
    """The placeholders that a graph writes to as it ends."""
    return {cast(fx.Node, n.args[0]) for n in module.graph.nodes if str(n.target) == COPY and isinstance(n.args[0], fx.Node)}
