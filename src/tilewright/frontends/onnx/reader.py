"""Walking an ONNX graph: names to nodes, one operator after another, shapes concrete all the way.

Each operator is read by its converter; failing that by its own definition as an ONNX function; failing that it becomes a
call. Local functions, and the branch that an `If` is known to take, are read in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, TilewrightError, TypeMismatchError, UnsupportedError, counted
from tilewright.frontends.onnx import calls
from tilewright.frontends.onnx.files import SHOWN, DataFiles, Span, quoted
from tilewright.frontends.onnx.functions import (
    DEEPEST,
    definition,
    free_names,
    in_order,
    resolved,
    self_contained,
    with_inner_nodes,
)
from tilewright.frontends.onnx.known import KnownValues
from tilewright.frontends.onnx.node import OpNode, Unmodelled, converter_of
from tilewright.frontends.onnx.rewritten import rewritten
from tilewright.frontends.onnx.scope import Context, Scope, opsets_of, plain_domain
from tilewright.frontends.onnx.tensors import checked_shape, embedded_tensor, tensor_literal
from tilewright.frontends.onnx.versions import modern, refuse_changed
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Const, Input
from tilewright.ir.types import TupleType

if TYPE_CHECKING:
    import onnx

# What a malformed node trips in a converter, in torch, or in onnx's C++: one line for the user either way.
_MALFORMED = (ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)

# What onnxruntime's tools put into ONNX's own domain although it is not there, or not yet in the operator set that they name.
_NOT_ONNXS = frozenset({("", "SimplifiedLayerNormalization")})
_TAKEN_EARLY = frozenset({"LayerNormalization"})


@dataclass(frozen=True)
class _Site:
    """One node of the model and where it stands."""

    proto: onnx.NodeProto
    domain: str
    name: str
    sources: tuple[Node | None, ...]
    scope: Scope
    context: Context

    @property
    def where(self) -> str:
        return f"{self.proto.op_type} node {quoted(self.name)}"

    @property
    def key(self) -> tuple[str, str]:
        return (self.domain, self.proto.op_type)

    @property
    def reads_opaque(self) -> bool:
        return any(s is not None and s.dtype is OPAQUE for s in self.sources)


class Reader:
    """Reads nodes into one graph.

    Attributes:
        origins: what each node was called in the model.
        notes: sentences for the user.
        functions: the model's own, by domain and name.
    """

    def __init__(self, files: DataFiles, functions: Sequence[onnx.FunctionProto]) -> None:
        self.origins: dict[Node, str] = {}
        self.notes: list[str] = []
        self._declared: dict[Node, onnx.TypeProto] = {}
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
                self._node(_Site(proto, plain_domain(proto.domain), name, sources, scope, context))
            except TilewrightError:
                raise
            except _MALFORMED as error:
                detail = (str(error).splitlines() or [""])[0][:SHOWN]
                raise InputError(
                    f"malformed {quoted(proto.op_type)}: {type(error).__name__} {detail}",
                    where=where,
                    hint="export the model again",
                ) from error

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

    def _node(self, site: _Site) -> None:
        proto = site.proto
        function = self.functions.get(site.key)
        if function is not None:
            results = self._function(site, function, opsets_of(function.opset_import))
        else:
            results = self._operator(site)
        for i, output in enumerate(proto.output):
            if not output:
                continue
            node = results[i] if i < len(results) else None
            if node is None:
                raise UnsupportedError(f"{proto.op_type} has no result {i}", where=site.where, hint="export the model again")
            if not isinstance(node.type, TupleType):
                checked_shape(list(node.shape), site.where)
            self.bind(site.scope, output, node, f"{site.name} {proto.op_type}")

    def _operator(self, site: _Site) -> Sequence[Node | None]:
        """Results by converter, else by the operator's definition as a function, else by a call."""
        if site.key == ("", "If"):
            chosen = self._branch(site)
            if chosen is not None:
                return chosen
        if site.key in _NOT_ONNXS:
            site = replace(site, domain="com.microsoft")
        schema = self._schema(site)
        body = rewritten(self._op_node(site, 1))
        if body is not None:
            return self._function(site, body, opsets_of(body.opset_import))
        version = schema.since_version if schema is not None else site.context.version_of(site.domain, site.where)
        try:
            convert = converter_of(site.domain, site.proto.op_type, version)
            if site.reads_opaque and site.proto.op_type != "Identity":
                raise Unmodelled("it reads a value whose type is known only at run time")
            converted = convert(self._op_node(site, version))
            return [converted] if isinstance(converted, Node) else converted
        except TypeMismatchError as error:
            return self._call(site, error.what, error)
        except Unmodelled as unmodelled:
            expanded = self._by_definition(site, schema) if schema is not None else None
            reason = _why_open(site) if site.key == ("", "If") else unmodelled.reason
            return expanded if expanded is not None else self._call(site, reason, None)

    def _op_node(self, site: _Site, version: int) -> OpNode:
        return OpNode(
            op_type=site.proto.op_type,
            domain=site.domain,
            name=site.name,
            version=version,
            sources=site.sources,
            outputs=tuple(site.proto.output),
            attributes={a.name: a for a in site.proto.attribute},
            known=self._known,
            literal=lambda t: self.tensor(t, site.where),
        )

    def _schema(self, site: _Site) -> onnx.defs.OpSchema | None:
        """The definition in force; None for a domain that onnx does not describe."""
        from onnx import defs

        opset = site.context.version_of(site.domain, site.where)
        try:
            return defs.get_schema(site.proto.op_type, max_inclusive_version=opset, domain=site.domain)
        except defs.SchemaError:
            if site.domain:
                return None
            if site.proto.op_type in _TAKEN_EARLY:
                return defs.get_schema(site.proto.op_type, domain="")
            raise UnsupportedError(
                f"no operator {quoted(site.proto.op_type)} in ONNX's operator set {opset}",
                where=site.where,
                hint="upgrade the onnx package, or export the model again",
            ) from None

    def _by_definition(self, site: _Site, schema: onnx.defs.OpSchema) -> Sequence[Node | None] | None:
        """Results by the function that ONNX defines this operator as; None if not all of it can be modelled."""
        if site.reads_opaque or site.key in site.context.inside:
            return None
        opset = site.context.version_of(site.domain, site.where)
        body = definition(schema, opset, site.proto, site.sources)
        if body is None:
            return None
        notes = len(self.notes)
        defaults = [a.default_value for a in schema.attributes.values() if a.default_value.name]
        try:
            results = self._function(site, body, {**site.context.opsets, **opsets_of(body.opset_import)}, defaults)
            if len(self.notes) == notes:
                return results
        except (TypeMismatchError, UnsupportedError):
            pass  # a part that is not modelled: one call of the whole is better than several of its parts
        del self.notes[notes:]
        return None

    def _function(
        self,
        site: _Site,
        function: onnx.FunctionProto,
        opsets: dict[str, int],
        defaults: Sequence[onnx.AttributeProto] = (),
    ) -> list[Node | None]:
        """Results of a function's body, read in place."""
        if site.key in site.context.inside:
            raise InputError(f"function {quoted(function.name)} calls itself", where=site.where, hint="export the model again")
        scope = Scope(None, function.node)
        absent = set(function.input)
        for name, source in zip(function.input, site.sources, strict=False):
            if source is not None:
                scope.bind(name, source, site.where)
                absent.discard(name)
        given = {a.name: a for a in [*defaults, *function.attribute_proto, *site.proto.attribute]}
        nodes = [resolved(n, given, absent) for n in function.node]
        self.read(nodes, scope, Context(opsets, (*site.context.inside, site.key)))
        return [scope.find(o) for o in function.output]

    def _branch(self, site: _Site) -> list[Node | None] | None:
        """Results of the branch an `If` takes, where its condition follows from shapes; None where it does not."""
        condition = site.sources[0] if site.sources else None
        value = self._known(condition) if condition is not None and condition.dtype is not OPAQUE else None
        if value is None or value.numel() != 1:
            return None
        wanted = "then_branch" if bool(value.reshape(()).item()) else "else_branch"
        graph = next((a.g for a in site.proto.attribute if a.name == wanted), None)
        if graph is None:
            raise InputError(f"If lacks its {wanted}", where=site.where, hint="export the model again")
        inner = Scope(site.scope, graph.node)
        for t in graph.initializer:
            self.bind(inner, t.name, self.tensor(t, f"initializer {quoted(t.name)}"), t.name)
        self.read(graph.node, inner, replace(site.context, inside=(*site.context.inside, site.key)))
        return [inner.get(o.name, site.where) for o in graph.output]

    def _call(self, site: _Site, reason: str, mismatch: TypeMismatchError | None) -> Sequence[Node | None]:
        """Results by onnx's reference evaluator, unless onnx itself finds the node's types wrong."""
        captured = {n: site.scope.get(n, site.where) for n in sorted(free_names(site.proto))}
        present = {*(s for s in site.sources if s is not None), *captured.values()}
        known = {s: v for s in present if s.dtype is not OPAQUE and (v := self._known(s)) is not None}
        proto = self_contained(site.proto, self._files, site.where)
        proto.domain = site.domain
        functions = tuple(self.functions.values())
        sources, opsets = site.sources, site.context.opsets
        schema = None if site.domain else self._schema(site)
        if schema is not None:
            proto, sources, opsets, version = modern(proto, schema.since_version, sources, known, opsets)
            refuse_changed(proto, version, site.where)
            for inner in with_inner_nodes(proto):
                if inner is not proto and not plain_domain(inner.domain):
                    refuse_changed(inner, _version_in(inner, opsets), site.where)
            known.update({s: v for s in sources if s is not None and (v := self._known(s)) is not None})
        try:
            results = calls.call(calls.CallSite(proto, sources, captured, opsets, functions, site.where), known, self._declared)
        except InputError:
            if mismatch is None:
                raise
            raise TypeMismatchError(mismatch.what, where=site.where, hint=mismatch.hint) from mismatch
        label = site.proto.op_type + (f" of domain {quoted(site.domain)}" if site.domain else "")
        self.notes.append(f"{label} (node {quoted(site.name)}) runs in onnx's reference evaluator: {reason}")
        return results


def _version_in(node: onnx.NodeProto, opsets: Mapping[str, int]) -> int:
    """Version of the definition of an operator of ONNX's own; 0 if there is none."""
    from onnx import defs

    try:
        return defs.get_schema(node.op_type, max_inclusive_version=opsets.get("", 1)).since_version
    except defs.SchemaError:
        return 0


def _why_open(site: _Site) -> str:
    """The sentence why neither branch of an `If` is read, and what to do about it."""
    condition = site.sources[0] if site.sources else None
    inputs = [n.op.label for n in toposort([condition]) if isinstance(n.op, Input)] if condition is not None else []
    if not inputs:
        return "its condition is known only at run time"
    named = ", ".join(quoted(name) for name in inputs[:3])
    advice = f"; a plan for one branch: --fix {inputs[0]}=true (fixed=…)" if len(inputs) == 1 else ""
    return f"its condition depends on {counted(len(inputs), 'input')} ({named}){advice}".replace("\n", " ")
