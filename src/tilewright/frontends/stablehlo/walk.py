"""The walk from a StableHLO module to a graph: functions, regions and fusions inlined, names and notes kept."""

from __future__ import annotations

import re
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.frontends import MOST_OPERATIONS, untrusted
from tilewright.frontends.stablehlo import jaxlib
from tilewright.frontends.stablehlo.call import INTERPRETED, is_callable, make_call, make_module
from tilewright.frontends.stablehlo.complex import is_complex, joined, lower_complex, parts
from tilewright.frontends.stablehlo.module import Block, Operation, agree, carried_types, is_e8m0, place, tensor_type
from tilewright.frontends.stablehlo.registry import Complex, Site, Value, lowering, one_or_all
from tilewright.frontends.stablehlo.scaled_dot import concerns_e8m0, lower_e8m0
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import input_
from tilewright.ir.dims import asking
from tilewright.ir.graph import Graph, Node
from tilewright.ir.known import KnownValues
from tilewright.ir.mesh import Mesh
from tilewright.ir.types import Shape

MAX_OPERATIONS = 1_000_000
MAX_DEPTH = 100
_Scope = ChainMap[Any, Value]
_RETURNS = ("func.return", "stablehlo.return", "mhlo.return")
_MESSAGES = re.compile(r"(send|recv|infeed|outfeed|cross_replica|collective_)")


T = TypeVar("T")


@dataclass(frozen=True)
class Regions:
    """A loop or conditional and its regions.

    Attributes:
        op: the operation.
        inputs: the inputs of the function it stands in.
        operands: the values it reads, computed from the inputs.
        regions: arguments and results of each region; it may read the inputs besides.
    """

    op: Operation
    inputs: list[Node]
    operands: list[Node]
    regions: list[tuple[list[Node], list[Node]]]


class Walk:
    """One module being read.

    Attributes:
        asm: the module's text, where bytes of constants may stand.
        where: the file, for messages.
        elided: inputs that stand for constants whose value the text leaves out, by name.
        notes: sentences for the graph.
        called: operations that became calls, by name and reason.
        count: operations read so far.
        known: values that follow from shapes and small constants alone.
        mesh: the ranks that the program is for; None for one device.
        replicas: how many replicas of the program there are, each on as many ranks.
    """

    count: int
    mesh: Mesh | None
    replicas: int

    def __init__(self, module: Any, asm: str, where: str, mesh: Mesh | None = None) -> None:
        self.mesh = mesh
        self.replicas = 1 if mesh is None else replicas(module, mesh, where)
        self.module = module
        self.asm = asm
        self.where = where
        self.elided: dict[str, Node] = {}
        self.notes: dict[str, None] = {}
        self.called: Counter[tuple[str, str]] = Counter()
        self._functions = [_functions(module)]
        self._origins: dict[Node, str] = {}
        self._expanding: list[Operation] = []
        self._active: list[tuple[int, str | None]] = []
        self._scopes: list[_Scope] = []
        self.count = 0
        self.known: KnownValues = KnownValues()

    def signature(self, labels: Sequence[str]) -> tuple[list[str], list[Any]]:
        """Names and MLIR types of the entry function's arguments; `labels` where they are as many, else the module's names.

        Raises:
            InputError: no entry function.
        """
        arguments = self.entry()[1].block().arguments
        if len(labels) != len(arguments):
            labels = [self._argument_name(a, i) for i, a in enumerate(arguments)]
        return _unique(labels), [a.type for a in arguments]

    def graph(self, labels: Sequence[str], output_names: Sequence[str], shapes: Sequence[Shape] = ()) -> Graph:
        """The graph of the module's entry function.

        Args:
            labels: names of its arguments.
            output_names: names of its results, taken where they are as many.
            shapes: of its arguments, where their types leave extents open.

        Raises:
            InputError: no entry function, or the program calls itself or is too large once inlined.
            UnsupportedError: an operation or a type that cannot be expressed.
        """
        name, entry = self.entry()
        inputs, values = self._arguments(labels, entry.block().arguments, shapes)
        results = self._flat(self._run(name, entry.block(), values), entry.where)
        names = output_names if len(output_names) == len(results) else _result_names(entry, len(results))
        self._note_layouts(labels)
        if self.elided:
            self.note(f"the text leaves out the values of {', '.join(self.elided)}: they are inputs here")
        for (target, reason), times in self.called.items():
            by = "StableHLO's reference interpreter, which is slow" if target[10:] in INTERPRETED else "torch"
            self.note(f"{target} ({times} in all) is evaluated by {by}{f': {reason}' if reason else ''}")
        said = self.module.operation.attributes
        return Graph(
            str(said["sym_name"].value) if "sym_name" in said else name,
            (*inputs, *self.elided.values()),
            tuple(results),
            tuple(_unique(names)),
            self._origins,
            tuple(self.notes),
        )

    # What a lowering may ask for.

    def note(self, sentence: str) -> None:
        """Keep a sentence that a reader should see."""
        self.notes[sentence] = None

    def function(self, name: str, where: str) -> Operation:
        """The function called `name` of the innermost module.

        Raises:
            InputError: there is none.
        """
        found = self._functions[-1].get(name)
        if found is None:
            raise InputError(f"there is no function called {name!r}", where=where, hint="print the module again, whole")
        return found

    def call(self, name: str, args: Sequence[Value], where: str) -> list[Value]:
        """Results of the function called `name`."""
        return self._run(name, self.function(name, where).block(), args)

    def region(self, op: Operation, args: Sequence[Value], index: int = 0) -> list[Value]:
        """Results of one of the operation's regions."""
        return self._run(None, op.block(index), args, self._scopes[-1])

    def outer(self, value: Any) -> Value:
        """The value that an MLIR value has where the operation under way stands."""
        return self._scopes[-1][value]

    def attempt(self, read: Callable[[], T | None]) -> T | None:
        """The result of `read`; if that is None, as if nothing had been read."""
        kept = (dict(self.notes), self.called.copy(), dict(self.elided))
        found = read()
        if found is None:
            self.notes, self.called, self.elided = kept
        return found

    def regions(self, wanted: Collection[str]) -> Regions:
        """The regions of the one operation in `main` whose name is wanted, as graphs.

        Raises:
            InputError: there is none.
        """
        _, entry = self.entry()
        block = entry.block()
        inputs, values = self._arguments([f"given{i}" for i in range(len(block.arguments))], block.arguments)
        scope: _Scope = ChainMap(dict(zip(block.arguments, values, strict=True)))
        self._scopes.append(scope)
        try:
            for op in block.operations():
                operands = [scope[v] for v in op.operands]
                if op.name in wanted:
                    return self._regions(op, inputs, operands, scope)
                if op.name in _RETURNS:
                    break
                scope.update(zip(op.results, self._results(op, operands), strict=True))
        finally:
            self._scopes.pop()
        raise InputError("the payload of a call holds no loop or conditional", where=self.where)

    def _regions(self, op: Operation, inputs: list[Node], operands: list[Value], scope: _Scope) -> Regions:
        made: list[tuple[list[Node], list[Node]]] = []
        for i in range(len(list(op.raw.regions))):
            arguments = op.block(i).arguments
            carried: list[Node] = []
            values: list[Value] = []
            for n, argument in enumerate(arguments):
                types = carried_types(argument.type, op.where)
                nodes = [input_(f"carried{n}.{k}", t.dtype, t.shape) for k, t in enumerate(types)]
                carried += nodes
                values.append(nodes[0] if len(nodes) == 1 else Complex(*nodes))
            made.append((carried, _carried(self._run(None, op.block(i), values, scope))))
        return Regions(op, inputs, _carried(operands), made)

    def expand(self, text: str, args: Sequence[Value], op: Operation) -> list[Value]:
        """The results of another module's `main`, which stands for `op`, with its CHLO operations decomposed.

        Raises:
            UnsupportedError: StableHLO has no decomposition of one.
        """
        module = jaxlib.parse(text, op.where, self.module.context)
        problem = jaxlib.expand_chlo(module)
        if problem:
            raise UnsupportedError(f"StableHLO has no decomposition of it: {problem}", where=op.where)
        self._functions.append(_functions(module))
        self._expanding.append(op)
        try:
            return self.call("main", args, op.where)
        finally:
            self._expanding.pop()
            self._functions.pop()

    def entry(self) -> tuple[str, Operation]:
        """The entry function and its name.

        Raises:
            InputError: there is none, or it has no body.
        """
        functions = self._functions[0]
        public = [n for n, f in functions.items() if f.string("sym_visibility") != "private"]
        if "main" in functions:
            name = "main"
        elif len(public) == 1:
            name = public[0]
        else:
            shown = ", ".join(public[:8]) or "none"
            raise InputError(
                f"no function is called main, and {len(public)} are public: {shown}", where=self.where, hint="name one main"
            )
        entry = functions[name]
        if not list(entry.raw.regions[0].blocks):
            raise InputError(
                f"function {name!r} has no body", where=self.where, hint="print the module with every function's body"
            )
        return name, entry

    # The walk itself.

    def _argument_name(self, argument: Any, index: int) -> str:
        """The source's name of an argument: that of its location, or of the argument it is passed on as (JAX's exports wrap
        their program so), or the identifier that stands where it was parsed."""
        location = argument.location
        if getattr(location, "name_str", ""):
            return str(location.name_str)
        for use in argument.uses:
            user = Operation(use.owner)
            callee = self._functions[0].get(user.string("callee")) if user.name == "func.call" else None
            if callee is not None:
                inner = place(callee.block().arguments[use.operand_number].location)
                if inner.name:
                    return inner.name
        found = _identifier_at(self.asm, location) if hasattr(location, "start_line") else None
        return found or f"arg{index}"

    def _run(self, name: str | None, block: Block, args: Sequence[Value], outer: _Scope | None = None) -> list[Value]:
        """Results of a block; `name` is that of the function it is the body of, `outer` what a region may read besides."""
        key = (len(self._functions), name)
        if name is not None and key in self._active:
            raise InputError(
                f"function {name!r} calls itself", where=self.where, hint="write the recursion as a stablehlo.while"
            )
        if len(self._active) >= MAX_DEPTH:
            raise InputError(
                f"calls and regions nest more than {MAX_DEPTH} deep",
                where=self.where,
                hint="inline functions, or compile parts",
            )
        arguments = block.arguments
        if len(arguments) != len(args):
            raise InputError(f"{len(args)} values are passed where {len(arguments)} are taken", where=name or self.where)
        scope: _Scope = ChainMap(dict(zip(arguments, args, strict=True)), *(outer.maps if outer is not None else ()))
        self._active.append(key)
        self._scopes.append(scope)
        try:
            for op in block.operations():
                operands = [scope[v] for v in op.operands]
                if op.name in _RETURNS:
                    return operands
                for result, value in zip(op.results, self._results(op, operands), strict=True):
                    scope[result] = value
        finally:
            self._active.pop()
            self._scopes.pop()
        raise InputError("a function returns nothing", where=name or self.where, hint="return what is to be computed")

    def _results(self, op: Operation, operands: list[Value]) -> list[Value]:
        self.count += 1
        most = MOST_OPERATIONS if untrusted() else MAX_OPERATIONS
        if self.count > most:
            raise InputError(
                f"the program is more than {most} operations once inlined", where=self.where, hint="compile parts of it"
            )
        site = Site(op, operands, self)
        asking(op.where)
        try:
            value = self._value(site)
        except TypeMismatchError as error:
            where = f"{op.where}: {error.where}" if error.where else op.where
            raise UnsupportedError(error.what, where=where, hint=error.hint) from error
        values = value if isinstance(value, list) and len(op.results) != 1 else [value]
        if len(values) != len(op.results):
            raise UnsupportedError(f"it has {len(op.results)} results, {len(values)} were found", where=op.where)
        for result, v in zip(op.results, values, strict=True):
            nodes = [v] if isinstance(v, Node) else [v.re, v.im] if isinstance(v, Complex) else []
            for node in nodes:
                self._credit(node, op)
            if nodes and not agree([n.tensor for n in nodes], result.type, op.where):
                raise UnsupportedError(f"its result is {nodes[0].type} where the text says {result.type}", where=op.where)
        return values

    def _value(self, site: Site) -> Value:
        """The value of an operation by its lowering, or as one without."""
        lower = lowering(site.op.name)
        try:
            if is_complex(site):
                return lower_complex(site, lower)
            if concerns_e8m0(site):
                return lower_e8m0(site, lower)
            if lower is not None:
                return lower(site)
            reason = ""
        except Unmodelled as unmodelled:
            reason = unmodelled.reason
        return self._unmodelled(site, reason)

    def _unmodelled(self, site: Site, reason: str) -> Value:
        """The value of an operation without a lowering, by its own decomposition or a call; else an error."""
        op = site.op
        dialect, _, name = op.name.partition(".")
        if name == "scan" and op.has("is_reverse") and str(op.attribute("is_reverse")) == "true":
            # whose decomposition, as jaxlib has it, runs forwards
            raise UnsupportedError("a scan from the end is not read", where=op.where, hint="reverse its operands and results")
        if dialect == "chlo":
            return one_or_all(self.expand(make_module(op, self.function, split=False), site.values, op))
        if dialect in ("stablehlo", "mhlo") and _MESSAGES.match(name):
            hint = "read the program as it is before partitioning"
            raise UnsupportedError(f"{name} passes values from device to device, and is not read", where=op.where, hint=hint)
        if name == "ragged_dot":
            hint = "a product for each group, or every row by every group's matrix and a select"
            raise UnsupportedError("ragged-dot, a product of groups of rows, is not read", where=op.where, hint=hint)
        if is_callable(op):
            self.called[op.name, reason] += 1
            return one_or_all(make_call(site))
        what = f"{op.name} has no meaning here, and StableHLO's interpreter cannot run it"
        raise UnsupportedError(what, where=op.where, hint="compute it outside, and make its result an input")

    def _arguments(
        self, labels: Sequence[str], arguments: Sequence[Any], shapes: Sequence[Shape] = ()
    ) -> tuple[list[Node], list[Value]]:
        """An input for each argument, and what it stands for: [..., 2] for complex numbers."""
        inputs: list[Node] = []
        values: list[Value] = []
        for i, (label, argument) in enumerate(zip(labels, arguments, strict=True)):
            where, shape = f"input {label!r}", shapes[i] if shapes else None
            is_open = shape is not None and not argument.type.has_static_shape
            t, *others = [tensor_type(argument.type, where, shape)] if is_open else carried_types(argument.type, where)
            inputs.append(input_(label, t.dtype, (*t.shape, 2) if others else t.shape))
            values.append(parts(inputs[-1]) if others else inputs[-1])
            self._origins[inputs[-1]] = label
            if others:
                self.note(f"input {label!r} is complex in its source: real and imaginary parts are its last axis here")
            if is_e8m0(argument.type):
                self.note(f"input {label!r} is f8e8m0fnu in its source: its bits are taken here, as u8")
        return inputs, values

    def _credit(self, root: Node, op: Operation) -> None:
        """Name the nodes that `op` made: those under its results that have no name yet."""
        origin = (self._expanding[0] if self._expanding else op).origin
        stack = [root]
        while stack:
            node = stack.pop()
            if node not in self._origins:
                self._origins[node] = origin
                stack.extend(node.src)

    def _flat(self, values: Sequence[Value], where: str) -> list[Node]:
        out: list[Node] = []
        for v in values:
            if v is None:
                raise UnsupportedError("a token leaves the program", where=where, hint="return arrays alone")
            if isinstance(v, Complex):
                self.note("results that are complex have real and imaginary parts as their last axis here")
            out.extend(self._flat(v, where) if isinstance(v, list) else [joined(v) if isinstance(v, Complex) else v])
        return out

    def _note_layouts(self, labels: Sequence[str]) -> None:
        """Note where the module says that arguments lie otherwise than row-major."""
        attributes = self.module.operation.attributes
        key = "mhlo.xla_entry_computation_parameter_layouts"
        layouts = list(attributes[key]) if key in attributes else []
        for label, layout in zip(labels, layouts, strict=False):
            order = [int(d) for d in layout] if hasattr(layout, "is_splat") else []
            if order != sorted(order, reverse=True):
                shown = ",".join(map(str, order))
                self.note(f"input {label!r} has layout {{{shown}}} in its source; it is taken and read row-major here")


def replicas(module: Any, mesh: Mesh, where: str) -> int:
    """The number of replicas of a program, each on an equal part of the mesh.

    Raises:
        InputError: it is for another number of devices than the mesh has.
    """
    said = module.operation.attributes
    of, parts = (int(said[k].value) if k in said else 1 for k in ("mhlo.num_replicas", "mhlo.num_partitions"))
    if of * parts not in (1, mesh.size):
        raise InputError(
            f"the program is for {of * parts} devices, the mesh {mesh} has {mesh.size}", where=where, hint="its own mesh"
        )
    return of


def _functions(module: Any) -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for raw in module.body.operations:
        if raw.operation.name == "func.func":
            op = Operation(raw)
            found[op.string("sym_name")] = op
    return found


def _carried(values: Sequence[Value]) -> list[Node]:
    """The tensors that carry values, complex ones as two."""
    return [n for v in values for n in ((v.re, v.im) if isinstance(v, Complex) else (v,)) if isinstance(n, Node)]


def _unique(names: Sequence[str]) -> list[str]:
    """The names, with a number behind each that another has already."""
    seen: set[str] = set()
    out: list[str] = []
    for name in names:
        candidate, n = name, 1
        while candidate in seen:
            candidate, n = f"{name}.{n}", n + 1
        seen.add(candidate)
        out.append(candidate)
    return out


def _identifier_at(asm: str, location: Any) -> str | None:
    """The SSA identifier at a line and column of the text, unless it is a mere number."""
    start = 0
    for _ in range(int(location.start_line) - 1):
        start = asm.find("\n", start) + 1
    found = re.compile(r"%([\w$.\-]+)").match(asm, start + int(location.start_col) - 1)
    return found.group(1) if found and not found.group(1).isdigit() else None


def _result_names(entry: Operation, count: int) -> list[str]:
    """Names of the results: JAX writes them as attributes; else result0, result1, …"""
    attributes = list(entry.attribute("res_attrs")) if entry.has("res_attrs") else []
    names: list[str] = []
    for i in range(count):
        said = attributes[i]["jax.result_info"].value if i < len(attributes) and "jax.result_info" in attributes[i] else ""
        names.append(str(said) or (f"result{i}" if count > 1 else "result"))
    return names
