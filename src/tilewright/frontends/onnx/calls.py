"""Operators that no node of the graph expresses: kept as ONNX wrote them, run by onnx's own reference evaluator.

A call's payload is a serialised one-node model (base64), complete in itself: attributes, subgraphs, the opsets in force,
and the element type of each input. Types of results come from onnx's shape inference; what it cannot tell before the
program runs is `opaque`. Extents that are open have names in it, by which inference follows them; where it needs a
number, the program is read for each one anew.
"""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.frontends import refuse_interpreted
from tilewright.frontends.onnx.files import SHOWN, has_external_data, malformed, quoted, with_text
from tilewright.frontends.onnx.functions import names_inside, operators_of
from tilewright.frontends.onnx.mended import loop_operator, resize_operator
from tilewright.frontends.onnx.tensors import array_type, element_code, element_type, from_array, to_numpy
from tilewright.ir.build import const, items
from tilewright.ir.extent import hint_of, is_open
from tilewright.ir.graph import Node
from tilewright.ir.known import RANDOM
from tilewright.ir.ops import Call
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import onnx

# The shape of their result depends on data, and is never larger than that data.
_SHRINKING = frozenset({"Compress", "NonZero", "Unique"})
_REMEDIES = {
    "com.microsoft": "save it from onnxruntime with fewer optimisations (ORT_ENABLE_BASIC), or quantise it as QDQ",
    "com.microsoft.nchwc": "it was saved for one machine: save it with ORT_ENABLE_EXTENDED instead of ORT_ENABLE_ALL",
}


@dataclass(frozen=True)
class CallSite:
    """A node about to become a call.

    Attributes:
        proto: the node, complete: attribute references resolved, no external data in its attributes.
        sources: of its inputs, None where absent.
        captured: names that its subgraphs read from outside, and their nodes.
        opsets: version of each domain in force.
        functions: local functions that its subgraphs may call.
        where: for messages.
        listed: the elements of small sources that follow from shapes and constants, some of them open extents.
    """

    proto: onnx.NodeProto
    sources: Sequence[Node | None]
    captured: Mapping[str, Node]
    opsets: Mapping[str, int]
    functions: Sequence[onnx.FunctionProto]
    where: str
    listed: Callable[[Node], Sequence[float] | None] = lambda _: None


def call(site: CallSite, known: Mapping[Node, torch.Tensor], declared: dict[Node, onnx.TypeProto]) -> list[Node | None]:
    """Results of the node, evaluated by a call (None where it names none).

    Args:
        site: the node.
        known: values of sources that follow from shapes and constants.
        declared: ONNX's own type of each opaque node; those of new ones are added.

    Raises:
        UnsupportedError: the reference evaluator does not know the operator.
        InputError: the node is malformed.
    """
    if site.proto.op_type != "Constant":
        refuse_interpreted(f"operator {quoted(site.proto.op_type)}", site.where)
    model, sources = _model_of(site, declared)
    payload = base64.b64encode(model.SerializeToString(deterministic=True)).decode()
    _refuse_unknown(payload, site)
    inferred = _inferred(model, sources, known, site.where)
    names = [o.name for o in model.graph.output]
    opened = {str(d): d for s in sources for d in s.tensor.shape if is_open((d,))}
    types = [_concrete(inferred.get(n), site.where, opened) for n in names]
    types = types if None not in types else _told(site, types, inferred, names) or types
    if None in types and (opened or any(is_open(site.listed(s) or ()) for s in sources)):
        for number in (hint_of, operator.index):  # which leaves a guard, where numbers are what it takes
            numbers = _with_numbers(site, model, sources, known, number)
            inferred = _inferred(*numbers, site.where)
            found = [_concrete(inferred.get(n), site.where) for n in names]
            if None in found:
                break
            types = found
    target = site.proto.op_type if not site.proto.domain else f"{site.proto.domain}.{site.proto.op_type}"
    if target in _SHRINKING and any(t is None for t in types) and all(s in known for s in sources):
        values = evaluate(Call("onnx", target, payload, (TensorType(OPAQUE, ()),) * len(names)), [known[s] for s in sources])
        results = [const(_typed(v, site.where)) for v in values]
    else:
        op = Call("onnx", target, payload, tuple(t or TensorType(OPAQUE, ()) for t in types))
        results = items(Node(op, *sources))
        for name, node, type in zip(names, results, types, strict=True):
            if type is None and name in inferred:
                declared[node] = inferred[name]
    by_name = dict(zip(names, results, strict=True))
    return [by_name.get(o) if o else None for o in model.graph.node[0].output]


def _typed(value: object, where: str) -> torch.Tensor:
    type = array_type(value)
    if type is None:
        raise UnsupportedError("a constant of a type only known at run time", where=where)
    return from_array(value, type, where)


def _model_of(site: CallSite, declared: Mapping[Node, onnx.TypeProto]) -> tuple[onnx.ModelProto, list[Node]]:
    """The one-node model and its inputs' nodes, in order. Names are made up, so that equal calls are equal."""
    import onnx

    model = onnx.ModelProto(ir_version=10)
    for domain, version in sorted(site.opsets.items()):
        model.opset_import.add(domain=domain, version=version)
    node = model.graph.node.add()
    node.CopyFrom(site.proto)
    node.doc_string = ""
    del node.metadata_props[:]
    model.graph.name = "call"
    # Two draws are not one: a node that draws keeps its name in the payload.
    draws = bool(operators_of(node) & RANDOM)
    node.name = f"{site.proto.name} {site.proto.output[0] if site.proto.output else ''}" if draws else ""
    reserved = names_inside(node)
    sources: dict[Node, str] = {}
    del node.input[:]
    for source in site.sources:
        if source is None:
            node.input.append("")
            continue
        node.input.append(sources.setdefault(source, _fresh(f"x{len(sources)}", reserved)))
    for i, name in enumerate(site.proto.output):
        node.output[i] = _fresh(f"y{i}", reserved) if name else ""
    used = [(n, s) for s, n in sources.items()] + list(site.captured.items())
    for name, source in used:
        _declare(model.graph.input.add(name=name), source, declared)
    for name in node.output:
        if name:
            model.graph.output.add(name=name)
    if site.captured or any(a.HasField("g") or a.graphs for a in node.attribute):
        model.functions.extend(site.functions)
    return model, [s for _, s in used]


def _fresh(name: str, reserved: set[str]) -> str:
    while name in reserved:
        name += "_"
    return name


def _declare(info: onnx.ValueInfoProto, source: Node, declared: Mapping[Node, onnx.TypeProto]) -> None:
    type = source.tensor
    if type.dtype is not OPAQUE:
        info.type.tensor_type.elem_type = element_code(type.dtype)
        info.type.tensor_type.shape.SetInParent()
        for d in type.shape:
            info.type.tensor_type.shape.dim.add(**({"dim_param": str(d)} if is_open((d,)) else {"dim_value": d}))
    elif source in declared:
        info.type.CopyFrom(declared[source])


def _inferred(
    model: onnx.ModelProto, sources: Sequence[Node], known: Mapping[Node, torch.Tensor], where: str
) -> dict[str, onnx.TypeProto]:
    """Types of the model's outputs as onnx infers them, with the known inputs given as constants.

    What a subgraph gives may change its shape from one turn to the next, which strict inference takes for an error.
    """
    import onnx
    from onnx import numpy_helper, shape_inference

    loose = any(a.HasField("g") for a in model.graph.node[0].attribute)
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    for info, source in zip(model.graph.input, sources, strict=True):
        if source in known:
            array = to_numpy(known[source], element_code(source.dtype))
            probe.graph.initializer.append(numpy_helper.from_array(array, info.name))
    try:
        done = shape_inference.infer_shapes(probe, check_type=not loose, strict_mode=not loose, data_prop=True)
    except Exception as error:  # an unregistered C++ exception type among them
        detail = " ".join(str(error).split())
        detail = detail.rpartition("]")[2].strip() or detail
        raise malformed(f"onnx refuses this node: {detail[:120]}", where) from error
    return {o.name: o.type for o in done.graph.output if o.HasField("type")}


def _with_numbers(
    site: CallSite,
    model: onnx.ModelProto,
    sources: Sequence[Node],
    known: Mapping[Node, torch.Tensor],
    number: Callable[[int], int],
) -> tuple[onnx.ModelProto, Sequence[Node], Mapping[Node, torch.Tensor]]:
    """The model and the values that are known, with numbers for open extents."""
    import onnx

    fixed, values = onnx.ModelProto(), dict(known)
    fixed.CopyFrom(model)
    for info, source in zip(fixed.graph.input, sources, strict=True):
        if source.dtype is OPAQUE:
            continue
        for said, d in zip(info.type.tensor_type.shape.dim, source.tensor.shape, strict=True):
            said.dim_value = number(d)
        listed = site.listed(source)
        if listed is not None and is_open(listed):
            values[source] = torch.tensor([number(cast("int", v)) for v in listed]).reshape(source.shape)
    return fixed, sources, values


def _told(
    site: CallSite, types: Sequence[TensorType | None], inferred: Mapping[str, onnx.TypeProto], names: Sequence[str]
) -> list[TensorType | None] | None:
    """Types of results whose extents operands say, which inference does not follow where these are open: as many as `TopK` is
    to find, the sizes that `Resize` is to give, or its source's times whole scales. None of another operator."""
    given = [None if s is None else site.listed(s) for s in site.sources]
    attributes = {a.name: a for a in site.proto.attribute}
    x = site.sources[0] if site.sources else None
    if site.proto.domain or x is None:
        return None
    shape = [*x.tensor.shape]
    if site.proto.op_type == "TopK" and len(given) > 1 and given[1]:
        shape[attributes["axis"].i if "axis" in attributes else -1] = cast("int", given[1][0])
    elif site.proto.op_type == "Resize" and not {"axes", "keep_aspect_ratio_policy"} & attributes.keys():
        sizes, scales = (given[i] if len(given) > i else None for i in (3, 2))
        if not sizes and not (scales and len(scales) == len(shape) and all(math.floor(s) == s for s in scales)):
            return None
        shape = [*cast("list[int]", sizes)] if sizes else [d * int(s) for d, s in zip(shape, scales or (), strict=True)]
    else:
        return None
    dtypes = [element_type(inferred[n].tensor_type.elem_type, site.where) for n in names]
    return [t or TensorType(d, tuple(shape)) for t, d in zip(types, dtypes, strict=True)]


def _concrete(type: onnx.TypeProto | None, where: str, opened: Mapping[str, int] | None = None) -> TensorType | None:
    if type is None or not type.HasField("tensor_type") or not type.tensor_type.HasField("shape"):
        return None
    dims = type.tensor_type.shape.dim
    dtype = element_type(type.tensor_type.elem_type, where) if type.tensor_type.elem_type else OPAQUE
    found = [d.dim_value if d.HasField("dim_value") else (opened or {}).get(d.dim_param, -1) for d in dims]
    return None if dtype is OPAQUE or any(d < 0 for d in found) else TensorType(dtype, tuple(found))


@dataclass(frozen=True)
class _Session:
    """A one-node model ready to run: its inputs' names and element types (0: opaque)."""

    evaluator: Any
    inputs: tuple[tuple[str, int], ...]


@lru_cache(maxsize=512)
def _session(payload: str) -> _Session:
    import onnx
    from google.protobuf.message import DecodeError
    from onnx.reference import ReferenceEvaluator

    try:
        model = with_text(onnx.ModelProto.FromString(base64.b64decode(payload, validate=True)), "call")
    except (ValueError, DecodeError) as error:
        raise InputError("the payload of a call is no ONNX model", where="call") from error
    if has_external_data(model):
        raise InputError("the payload of a call has data outside itself", where="call", hint="embed the tensor's data")
    inputs = tuple((i.name, i.type.tensor_type.elem_type) for i in model.graph.input)
    return _Session(ReferenceEvaluator(model, new_ops=[loop_operator(), resize_operator()]), inputs)


def _refuse_unknown(payload: str, site: CallSite) -> None:
    what = site.proto.op_type + (f" of domain {quoted(site.proto.domain)}" if site.proto.domain else "")
    try:
        _session(payload)
    except Exception as error:  # NotImplementedError, RuntimeContextError, KeyError, … by operator
        detail = (str(error).splitlines() or [type(error).__name__])[0][:SHOWN]
        raise UnsupportedError(
            f"operator {what} is not modelled, and onnx's reference evaluator cannot run it: {detail}",
            where=site.where,
            hint=_REMEDIES.get(site.proto.domain, "export the model with standard ONNX operators"),
        ) from error


def check_payload(call: Call, operands: int) -> None:
    """See that a payload is a model that stands for itself and that the evaluator can run.

    Raises:
        InputError: it is malformed, refers to files, or takes another number of operands.
        UnsupportedError: the evaluator does not know an operator.
    """
    try:
        session = _session(call.payload)
    except InputError as error:
        raise InputError(error.what, where=call.target, hint=error.hint) from error
    except Exception as error:
        detail = (str(error).splitlines() or [type(error).__name__])[0][:SHOWN]
        raise UnsupportedError(f"onnx's reference evaluator cannot run it: {detail}", where=call.target) from error
    if len(session.inputs) != operands:
        raise InputError(f"{operands} operands for a payload that takes {len(session.inputs)}", where=call.target)


def evaluate(call: Call, values: Sequence[object]) -> list[object]:
    """Results of a call: torch tensors where its types say so, else whatever the evaluator gave.

    Raises:
        TypeMismatchError: the evaluator failed, or gave another type than was inferred.
    """
    session = _session(call.payload)
    feeds: dict[str, object] = {}
    for (name, code), value in zip(session.inputs, values, strict=True):
        feeds[name] = to_numpy(value, code) if isinstance(value, torch.Tensor) else value
    try:
        with np.errstate(all="ignore"):
            results = session.evaluator.run(None, feeds)
    except Exception as error:  # whatever its Python operators raise
        detail = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise TypeMismatchError(f"onnx's reference evaluator failed: {detail}", where=call.target) from error
    out: list[object] = []
    for result, declared in zip(results, call.types, strict=True):
        if declared.dtype is OPAQUE:
            out.append(result)
            continue
        try:
            out.append(from_array(result, declared, call.target))
        except InputError as error:
            raise TypeMismatchError(
                f"the reference evaluator gave what was not inferred: {error.what}", where=call.target
            ) from error
    return out


def constant(tensor: onnx.TensorProto, where: str, declared: dict[Node, onnx.TypeProto]) -> Node:
    """A constant of an element type that Tilewright lacks, as a call."""
    import onnx

    node = onnx.NodeProto(op_type="Constant", output=["y"])
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    site = CallSite(node, (), {}, {"": onnx.defs.onnx_opset_version()}, (), where)
    return cast("Node", call(site, {}, declared)[0])
