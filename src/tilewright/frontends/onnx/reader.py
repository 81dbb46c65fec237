"""Walking an ONNX graph: names to nodes, one operator after another, shapes concrete all the way.

Each operator is read by its converter; failing that by its own definition as an ONNX function; failing that it becomes a
call of onnx's evaluator. Local functions, and the branch that an `If` is known to take, are read in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, TilewrightError, TypeMismatchError, UnsupportedError, counted
from tilewright.frontends.onnx import calls
from tilewright.frontends.onnx.files import SHOWN, DataFiles, Span, malformed, quoted
from tilewright.frontends.onnx.functions import (
    DEEPEST,
    definition,
    free_names,
    in_order,
    resolved,
    self_contained,
    with_inner_nodes,
)
from tilewright.frontends.onnx.node import OpNode, converter_of
from tilewright.frontends.onnx.rewritten import rewritten
from tilewright.frontends.onnx.scope import MICROSOFT, Context, Scope, opsets_of, plain_domain
from tilewright.frontends.onnx.tensors import checked_shape, embedded_tensor, tensor_literal
from tilewright.frontends.onnx.versions import modern, refuse_changed
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.dims import asking
from tilewright.ir.graph import Node, toposort
from tilewright.ir.known import KnownValues
from tilewright.ir.ops import Const, Input
from tilewright.ir.types import TupleType

if TYPE_CHECKING:
    import onnx

# What a malformed node trips in a converter, in torch, or in onnx's C++: one line for the user either way.
_MALFORMED = (ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)

# What onnxruntime's tools put into ONNX's own domain although it is not there, or not yet in the operator set that they name.
_NOT_ONNXS = frozenset({("", "SimplifiedLayerNormalization")})
_TAKEN_EARLY = frozenset({"LayerNormalization"})


class Reader:
    """Reads nodes into one graph.

    Attributes:
        origins: what each node was called in the model.
        notes: sentences for the user.
        functions: the model's own, by domain and name.
    """

    functions: dict[tuple[str, str], onnx.FunctionProto]

    def __init__(self, files: DataFiles, functions: Sequence[onnx.FunctionProto]) -> None:
        self.origins: dict[Node, str] = {}
        self.notes: list[str] = []
        self._declared: dict[Node, onnx.TypeProto] = {}
        self._evaluated = 0  # calls of onnx's reference evaluator
        self._known = KnownValues()
        self._files = files
        self.functions = {(plain_domain(f.domain), f.name): f for f in functions}

    def tensor(self, tensor: onnx.TensorProto, where: str, embedded: Span | None = None) -> Node:
        """A tensor of the model as a constant.

        Raises:
            InputError: its shape, type, size and data do not fit together.
        """
        literal = tensor_literal(tensor, self._files, where, embedded)
        if literal is not None:
            return Node(Const(literal))
        return calls.constant(embedded_tensor(tensor, self._files, where), where, self._declared)

    def read(self, nodes: Sequence[onnx.NodeProto], scope: Scope, context: Context) -> None:
        """Read nodes in order, binding their results in `scope`.

        Raises:
            TilewrightError: names the node that is malformed or unsupported.
        """
        if len(context.inside) > DEEPEST:
            place = " in ".join(quoted(name) for _, name in context.inside[:3])
            raise InputError(f"functions or branches nested more than {DEEPEST} deep", where=place, hint="flatten the model")
        for position, proto in enumerate(in_order(nodes)):
            name = proto.name or next((o for o in proto.output if o), f"number {position}")
            where = f"{proto.op_type} node {quoted(name)}"
            try:
                sources = tuple(scope.get(i, where) if i else None for i in proto.input)
                domain = plain_domain(proto.domain)
                known, note = self._known, self.notes.append
                self._node(OpNode(proto, domain, name, sources, scope, context, known, self.tensor, note))
            except TilewrightError:
                raise
            except _MALFORMED as error:
                detail = (str(error).splitlines() or [""])[0][:SHOWN]
                raise malformed(f"malformed {quoted(proto.op_type)}: {type(error).__name__} {detail}", where) from error

    def bind(self, scope: Scope, name: str, node: Node, origin: str) -> None:
        """Name a value, and call it and what it was made of by `origin` in reports."""
        scope.bind(name, node, origin)
        stack = [node]
        while stack:
            n = stack.pop()
            if n not in self.origins:
                self.origins[n] = origin
                stack.extend(n.src)

    def declare(self, node: Node, type: onnx.TypeProto) -> None:
        """Remember what ONNX calls the type of an opaque node, so that it can infer what reads it."""
        if node.dtype is OPAQUE:
            self._declared[node] = type

    def _node(self, op: OpNode) -> None:
        proto = op.proto
        asking(op.where)
        function = self.functions.get(op.key)
        if function is not None:
            results = self._function(op, function, opsets_of(function.opset_import))
        else:
            results = self._operator(op)
        for i, output in enumerate(proto.output):
            if not output:
                continue
            node = results[i] if i < len(results) else None
            if node is None:
                raise UnsupportedError(f"{proto.op_type} has no result {i}", where=op.where, hint="export the model again")
            if not isinstance(node.type, TupleType):
                checked_shape(list(node.shape), op.where)
            self.bind(op.scope, output, node, f"{op.name} {proto.op_type}")

    def _operator(self, op: OpNode) -> Sequence[Node | None]:
        """Results by converter, else by the operator's definition as a function, else by a call."""
        if op.key == ("", "If"):
            chosen = self._branch(op)
            if chosen is not None:
                return chosen
        if op.key in _NOT_ONNXS:
            op = replace(op, domain=MICROSOFT)
        schema = self._schema(op)
        body = rewritten(op)
        if body is not None:
            return self._function(op, body, opsets_of(body.opset_import))
        version = schema.since_version if schema is not None else op.context.version_of(op.domain, op.where)
        try:
            convert = converter_of(op.domain, op.proto.op_type, version)
            if op.reads_opaque and op.proto.op_type != "Identity":
                raise Unmodelled("it reads a value whose type is known only at run time")
            converted = convert(replace(op, version=version))
            return [converted] if isinstance(converted, Node) else converted
        except TypeMismatchError as error:
            return self._call(op, error.what, error)
        except Unmodelled as unmodelled:
            expanded = self._by_definition(op, schema) if schema is not None else None
            reason = _why_open(op) if op.key == ("", "If") else unmodelled.reason
            return expanded if expanded is not None else self._call(op, reason, None)

    def _schema(self, op: OpNode) -> onnx.defs.OpSchema | None:
        """The definition in force; None for a domain that onnx does not describe."""
        from onnx import defs

        opset = op.context.version_of(op.domain, op.where)
        try:
            return defs.get_schema(op.proto.op_type, max_inclusive_version=opset, domain=op.domain)
        except defs.SchemaError:
            if op.domain:
                return None
            if op.proto.op_type in _TAKEN_EARLY:
                return defs.get_schema(op.proto.op_type, domain="")
            raise UnsupportedError(
                f"no operator {quoted(op.proto.op_type)} in ONNX's operator set {opset}",
                where=op.where,
                hint=_of_no_operator(op.proto.op_type, opset),
            ) from None

    def _by_definition(self, op: OpNode, schema: onnx.defs.OpSchema) -> Sequence[Node | None] | None:
        """Results by the function that ONNX defines this operator as; None if not all of it can be modelled."""
        if op.reads_opaque or op.key in op.context.inside:
            return None
        opset = op.context.version_of(op.domain, op.where)
        body = definition(schema, opset, op.proto, op.sources)
        if body is None:
            return None
        notes, evaluated = len(self.notes), self._evaluated
        defaults = [a.default_value for a in schema.attributes.values() if a.default_value.name]
        try:
            results = self._function(op, body, {**op.context.opsets, **opsets_of(body.opset_import)}, defaults)
            if self._evaluated == evaluated:
                return results
        except (TypeMismatchError, UnsupportedError):
            pass  # a part that is not modelled: one call of the whole is better than several of its parts
        del self.notes[notes:]
        return None

    def _function(
        self,
        op: OpNode,
        function: onnx.FunctionProto,
        opsets: dict[str, int],
        defaults: Sequence[onnx.AttributeProto] = (),
    ) -> list[Node | None]:
        """Results of a function's body, read in place."""
        if op.key in op.context.inside:
            raise malformed(f"function {quoted(function.name)} calls itself", op.where)
        scope = Scope(None, function.node)
        absent = set(function.input)
        for name, source in zip(function.input, op.sources, strict=False):
            if source is not None:
                scope.bind(name, source, op.where)
                absent.discard(name)
        given = {a.name: a for a in [*defaults, *function.attribute_proto, *op.proto.attribute]}
        nodes = [resolved(n, given, absent) for n in function.node]
        self.read(nodes, scope, Context(opsets, (*op.context.inside, op.key)))
        return [scope.find(o) for o in function.output]

    def _branch(self, op: OpNode) -> list[Node | None] | None:
        """Results of the branch an `If` takes, where its condition follows from shapes; None where it does not."""
        condition = op.sources[0] if op.sources else None
        value = self._known.listed(condition) if condition is not None and condition.dtype is not OPAQUE else None
        if value is None or len(value) != 1:
            return None
        wanted = "then_branch" if value[0] else "else_branch"
        graph = next((a.g for a in op.proto.attribute if a.name == wanted), None)
        if graph is None:
            raise malformed(f"If lacks its {wanted}", op.where)
        inner = Scope(op.scope, graph.node)
        for t in graph.initializer:
            self.bind(inner, t.name, self.tensor(t, f"initializer {quoted(t.name)}"), t.name)
        self.read(graph.node, inner, replace(op.context, inside=(*op.context.inside, op.key)))
        return [inner.get(o.name, op.where) for o in graph.output]

    def _call(self, op: OpNode, reason: str, mismatch: TypeMismatchError | None) -> Sequence[Node | None]:
        """Results by onnx's reference evaluator, unless onnx itself finds the node's types wrong."""
        captured = {n: op.scope.get(n, op.where) for n in sorted(free_names(op.proto))}
        present = {*(s for s in op.sources if s is not None), *captured.values()}
        known = {s: v for s in present if s.dtype is not OPAQUE and (v := self._known(s)) is not None}
        proto = self_contained(op.proto, self._files, op.where)
        proto.domain = op.domain
        functions = tuple(self.functions.values())
        sources, opsets = op.sources, op.context.opsets
        schema = None if op.domain else self._schema(op)
        if schema is not None:
            proto, sources, opsets, version = modern(proto, schema.since_version, sources, known, opsets)
            refuse_changed(proto, version, op.where)
            for inner in with_inner_nodes(proto):
                if inner is not proto and not plain_domain(inner.domain):
                    refuse_changed(inner, _version_in(inner, opsets), op.where)
            known.update({s: v for s in sources if s is not None and (v := self._known(s)) is not None})
        try:
            site = calls.CallSite(proto, sources, captured, opsets, functions, op.where, self._listed)
            results = calls.call(site, known, self._declared)
        except InputError:
            if mismatch is None:
                raise
            raise TypeMismatchError(mismatch.what, where=op.where, hint=mismatch.hint) from mismatch
        self._evaluated += 1
        label = op.proto.op_type + (f" of domain {quoted(op.domain)}" if op.domain else "")
        self.notes.append(f"{label} (node {quoted(op.name)}) runs in onnx's reference evaluator: {reason}")
        return results

    def _listed(self, node: Node) -> Sequence[float] | None:
        return None if node.dtype is OPAQUE else self._known.listed(node)


def _version_in(node: onnx.NodeProto, opsets: Mapping[str, int]) -> int:
    """Version of the definition of an operator of ONNX's own; 0 if there is none."""
    from onnx import defs

    try:
        return defs.get_schema(node.op_type, max_inclusive_version=opsets.get("", 1)).since_version
    except defs.SchemaError:
        return 0


def _why_open(op: OpNode) -> str:
    """The sentence why neither branch of an `If` is read, and what to do about it."""
    condition = op.sources[0] if op.sources else None
    inputs = [n.op.label for n in toposort([condition]) if isinstance(n.op, Input)] if condition is not None else []
    if not inputs:
        return "its condition is known only at run time"
    named = ", ".join(quoted(name) for name in inputs[:3])
    advice = f"; a plan for one branch: --fix {inputs[0]}=true (fixed=…)" if len(inputs) == 1 else ""
    return f"its condition depends on {counted(len(inputs), 'input')} ({named}){advice}".replace("\n", " ")


def _of_no_operator(name: str, opset: int) -> str:
    """A hint for an operator that the standard domain does not have in an operator set."""
    from onnx import defs

    if opset > defs.onnx_opset_version():
        return f"upgrade the onnx package, which knows operator sets up to {defs.onnx_opset_version()}"
    if not defs.has(name):
        return "ONNX has no such operator: correct its name, or give the node the domain of the package that defines it"
    since = defs.get_schema(name).since_version
    if since > opset:
        return f"export the model for operator set {since}, in which it came"
    return "export the model for an earlier operator set: it was taken out of this one"
