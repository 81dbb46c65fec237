"""Bodies of operators that are defined by other operators, and the protobufs that stand inside a node."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import InputError
from tilewright.frontends.onnx.files import DataFiles, malformed, quoted
from tilewright.frontends.onnx.scope import plain_domain
from tilewright.frontends.onnx.tensors import element_code, embedded_tensor
from tilewright.ir.graph import Node

if TYPE_CHECKING:
    import onnx

Key = tuple[str, str]  # domain and name of an operator


def definition(schema: Any, opset: int, node: onnx.NodeProto, sources: Sequence[Node | None]) -> onnx.FunctionProto | None:
    """The function that ONNX defines an operator as, for these source types; None if it defines none.

    `schema` is an `onnx.defs.OpSchema`, whose stub leaves these methods out.
    """
    import onnx

    version = _nearest(schema.function_opset_versions, opset)
    if version is not None:
        return onnx.FunctionProto.FromString(_serialised(schema.get_function_with_opset_version(version)))
    version = _nearest(schema.context_dependent_function_opset_versions, opset)
    if version is None:
        return None
    types: list[bytes] = []
    for source in sources:
        type = onnx.TypeProto()
        if source is not None:
            type.tensor_type.elem_type = element_code(source.dtype)
            type.tensor_type.shape.SetInParent()
            for d in source.shape:
                type.tensor_type.shape.dim.add(dim_value=d)
        types.append(type.SerializeToString())
    body = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), types)
    return onnx.FunctionProto.FromString(body) if body else None


def _nearest(versions: Sequence[int], opset: int) -> int | None:
    """The operator set to take a body from: the model's or the last before it, else the first after (same meaning)."""
    return max((v for v in versions if v <= opset), default=min(versions, default=None))


def _serialised(body: bytes | onnx.FunctionProto) -> bytes:
    return body if isinstance(body, bytes) else body.SerializeToString()


def resolved(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto], absent: set[str]) -> onnx.NodeProto:
    """A function's node as this use of the function has it.

    References to the function's attributes become the attributes themselves (one that is not given is left out), also
    within subgraphs, and inputs that the caller left out become absent.
    """
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for inner in with_inner_nodes(copy):
        for i, name in enumerate(inner.input):
            if name in absent:
                inner.input[i] = ""
        found: list[onnx.AttributeProto] = []
        for attribute in inner.attribute:
            if not attribute.ref_attr_name:
                found.append(attribute)
            elif attribute.ref_attr_name in attributes:
                given = onnx.AttributeProto()
                given.CopyFrom(attributes[attribute.ref_attr_name])
                given.name = attribute.name
                found.append(given)
        if any(a.ref_attr_name for a in inner.attribute):
            del inner.attribute[:]
            inner.attribute.extend(found)
    return copy


DEEPEST = 48  # functions and branches inside each other
MOST_NODES = 200_000  # after functions are read in place: a few lines can stand for very many


def check_expansion(nodes: Sequence[onnx.NodeProto], functions: Mapping[Key, onnx.FunctionProto], where: str) -> None:
    """Count what `nodes` become once local functions are read in place, without reading them.

    Raises:
        InputError: a function calls itself, calls go too deep, or there are too many nodes.
    """
    sizes: dict[Key, int] = {}

    def size(nodes: Sequence[onnx.NodeProto], inside: tuple[Key, ...]) -> int:
        if len(inside) > DEEPEST:
            raise InputError(f"functions nested more than {DEEPEST} deep", where=where, hint="flatten the model")
        total = 0
        for node in (inner for n in nodes for inner in with_inner_nodes(n)):
            key = (plain_domain(node.domain), node.op_type)
            function = functions.get(key)
            if function is not None and key in inside:
                raise malformed(f"function {quoted(key[1])} calls itself", where)
            if function is not None and key not in sizes:
                sizes[key] = size(function.node, (*inside, key))
            total += sizes.get(key, 1)
        return total

    total = size(nodes, ())
    if total > MOST_NODES:
        raise InputError(
            f"{total:.1e} nodes once functions are read in place", where=where, hint=f"at most {MOST_NODES} are read"
        )


def self_contained(node: onnx.NodeProto, files: DataFiles, where: str) -> onnx.NodeProto:
    """A copy of the node, with the external data of tensors in its attributes and subgraphs brought inside.

    Raises:
        InputError: such data is missing or lies outside the model's folder.
    """
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for inner in with_inner_nodes(copy):
        for attribute in inner.attribute:
            tensors = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
            for graph in _graphs(attribute):
                tensors.extend(graph.initializer)
            for tensor in tensors:
                if tensor.data_location == onnx.TensorProto.EXTERNAL:
                    tensor.CopyFrom(embedded_tensor(tensor, files, where))
    return copy


def free_names(node: onnx.NodeProto) -> set[str]:
    """Names that the node's subgraphs read and do not define."""
    free: set[str] = set()
    for graph in (g for a in node.attribute for g in _graphs(a)):
        used = {o.name for o in graph.output}
        defined = {t.name for t in graph.initializer} | {i.name for i in graph.input}
        for inner in graph.node:
            used.update(inner.input)
            used |= free_names(inner)
            defined.update(inner.output)
        free |= used - defined - {""}
    return free


def in_order(nodes: Sequence[onnx.NodeProto]) -> Sequence[onnx.NodeProto]:
    """The nodes with each after those it reads, in their own order as far as that goes; as they are if they form a cycle."""
    maker = {o: i for i, n in enumerate(nodes) for o in n.output if o}
    needs = [{maker[name] for name in (*n.input, *free_names(n)) if name in maker} for n in nodes]
    if all(j < i for i, found in enumerate(needs) for j in found):
        return nodes
    readers: dict[int, list[int]] = {}
    for i, found in enumerate(needs):
        for j in found:
            readers.setdefault(j, []).append(i)
    missing = [len(found) for found in needs]
    ready = [i for i, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[onnx.NodeProto] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(nodes[i])
        for reader in readers.get(i, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    return order if len(order) == len(nodes) else nodes


def names_inside(node: onnx.NodeProto) -> set[str]:
    """Every name that the node's subgraphs mention."""
    inner = [n for n in with_inner_nodes(node) if n is not node]
    return {name for n in inner for name in (*n.input, *n.output)} | free_names(node)


def operators_of(node: onnx.NodeProto) -> set[str]:
    """The operator types of the node and of those in its subgraphs."""
    return {n.op_type for n in with_inner_nodes(node)}


def _graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def with_inner_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The node, and those in its subgraphs, however deep."""
    yield node
    for attribute in list(node.attribute):
        for graph in _graphs(attribute):
            for inner in graph.node:
                yield from with_inner_nodes(inner)
