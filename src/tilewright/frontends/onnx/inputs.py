"""Shapes of a model's inputs, with the extents it leaves open bound to numbers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tilewright.dtype import OPAQUE, PRED
from tilewright.errors import InputError, counted
from tilewright.frontends import LoadOptions
from tilewright.frontends.onnx.files import quoted
from tilewright.frontends.onnx.tensors import checked_shape, element_type
from tilewright.ir.build import broadcast, const
from tilewright.ir.graph import Node
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import onnx

_UNTYPED = TensorType(OPAQUE, ())


def input_types(inputs: Sequence[onnx.ValueInfoProto], options: LoadOptions) -> list[TensorType]:
    """The concrete type of each input; `opaque` for a sequence, a string and the like.

    A symbolic extent (`dim_param`) has one value everywhere: that which `options.input_dims` gives it in any input, else
    `options.batch` if it is some input's first axis.

    Raises:
        InputError: an extent stays open, is given two values, or contradicts the model.
    """
    unknown = set(options.input_dims) - {i.name for i in inputs}
    if unknown:
        names = ", ".join(quoted(i.name) for i in inputs[:8])
        raise InputError(f"no input is called {quoted(sorted(unknown)[0])}", hint=f"the inputs are {names}")
    symbols: dict[str, int] = {}
    for info in inputs:  # each of these binds what those before it left open
        given = options.input_dims.get(info.name)
        if given is not None and info.type.HasField("tensor_type"):
            _match(info, given, symbols)
    if options.batch is not None:
        for info in inputs:
            dims = info.type.tensor_type.shape.dim
            if dims and dims[0].dim_param and info.name not in options.input_dims:
                symbols.setdefault(dims[0].dim_param, options.batch)
    for info in inputs:
        seen, dims = options.seen_dims.get(info.name), info.type.tensor_type.shape.dim
        if seen is not None and len(seen) == len(dims):
            for dim, value in zip(dims, seen, strict=True):
                if dim.dim_param:
                    symbols.setdefault(dim.dim_param, value)
    return [_type(i, options, symbols) for i in inputs]


def _match(info: onnx.ValueInfoProto, given: Sequence[int], symbols: dict[str, int]) -> None:
    """Learn the symbols of one input from the shape given for it."""
    where = f"input {quoted(info.name)}"
    if not info.type.tensor_type.HasField("shape"):
        return
    dims, hint = info.type.tensor_type.shape.dim, _hint(info, symbols)
    if len(dims) != len(given):
        raise InputError(f"{counted(len(given), 'extent')} given, the model has {len(dims)}", where=where, hint=hint)
    for axis, (dim, value) in enumerate(zip(dims, given, strict=True)):
        if is_closed(dim) and dim.dim_value != value:
            raise InputError(
                f"axis {axis} is {dim.dim_value} in the model, not {value}", where=where, hint="export the model with that size"
            )
        if dim.dim_param and symbols.setdefault(dim.dim_param, value) != value:
            raise InputError(
                f"{quoted(dim.dim_param)} is given as {symbols[dim.dim_param]} and as {value}",
                where=where,
                hint=hint,
            )


def _type(info: onnx.ValueInfoProto, options: LoadOptions, symbols: Mapping[str, int]) -> TensorType:
    where = f"input {quoted(info.name)}"
    if not info.type.HasField("tensor_type"):
        return _UNTYPED
    dtype = element_type(info.type.tensor_type.elem_type, where)
    if dtype is OPAQUE:
        return _UNTYPED
    given = options.input_dims.get(info.name)
    seen = options.seen_dims.get(info.name)
    if not info.type.tensor_type.HasField("shape"):
        given = seen if given is None else given
        if given is None:
            raise InputError("its shape is not in the model", where=where, hint=_hint(info, symbols))
        return TensorType(dtype, checked_shape(list(given), where))
    shape: list[int] = []
    for axis, dim in enumerate(info.type.tensor_type.shape.dim):
        value = dim.dim_value if is_closed(dim) else symbols.get(dim.dim_param)
        if value is None and given is not None:
            value = given[axis]
        if value is None:
            value = _open(dim.dim_param or f"{info.name}.{axis}", options)
        if value is None and axis == 0 and options.batch is not None and not dim.dim_param:
            value = options.batch
        if value is None and seen is not None and len(seen) == len(info.type.tensor_type.shape.dim):
            value = seen[axis]
        if value is None and info.name in options.fixed:
            value = 1
        if value is None:
            called = f" ({quoted(dim.dim_param)})" if dim.dim_param else ""
            raise InputError(f"axis {axis}{called} has no size", where=where, hint=_hint(info, symbols))
        shape.append(value)
    return TensorType(dtype, checked_shape(shape, where))


def _open(name: str, options: LoadOptions) -> int | None:
    """The extent of a name that is to stay open: a dim, or what exporters write of dims, such as "past + seq"."""
    found = options.open_extent(name)
    terms = [part.strip() for part in name.split("+")]
    if len(terms) > 1 and (found is None or options.dims is True) and all(t.isidentifier() or t.isdecimal() for t in terms):
        parts = [int(t) if t.isdecimal() else options.open_extent(t) for t in terms]
        return None if any(p is None for p in parts) else sum(p for p in parts if p is not None)
    return found


def _hint(info: onnx.ValueInfoProto, symbols: Mapping[str, int]) -> str:
    """A line that works when it is copied, with 1 for each extent that neither the model nor its symbol gives."""
    dims = info.type.tensor_type.shape.dim
    if not info.type.tensor_type.HasField("shape"):
        return f"--input-dim {shlex.quote(f'@{info.name}')} and then its extents (input_dims=…)"
    sizes = " ".join(str(d.dim_value if is_closed(d) else symbols.get(d.dim_param, 1)) for d in dims)
    wanted = f"--input-dim {shlex.quote(f'@{info.name}')} {sizes}".replace("\n", " ")[:120]
    return f"{wanted} (or other sizes; input_dims=…), --batch 1 (batch=1) for first axes, or bounds: --dim (dims=…)"


def symbolic(inputs: Sequence[onnx.ValueInfoProto]) -> bool:
    """Tell whether some tensor input leaves an extent open."""
    return any(
        not i.type.tensor_type.HasField("shape") or any(not is_closed(d) for d in i.type.tensor_type.shape.dim)
        for i in inputs
        if i.type.HasField("tensor_type")
    )


def is_closed(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Tell whether an extent is given as a number; exporters write -1 for one that is not."""
    return dim.HasField("dim_value") and dim.dim_value != -1


def check_fixed(inputs: Sequence[onnx.ValueInfoProto], options: LoadOptions) -> None:
    """See that what is to be fixed is there.

    Raises:
        InputError: no input has that name.
    """
    unknown = sorted(set(options.fixed) - {i.name for i in inputs})
    if unknown:
        names = ", ".join(quoted(i.name) for i in inputs[:8])
        raise InputError(f"no input is called {quoted(unknown[0])}", where="fixed, --fix", hint=f"the inputs are {names}")


def fixed_value(name: str, type: TensorType, value: bool | float) -> Node:
    """An input of one element as a constant.

    Raises:
        InputError: it has several elements, or its type does not hold the value.
    """
    where = f"input {quoted(name)}"
    if type.dtype is OPAQUE or type.elements != 1:
        raise InputError(f"only an input of one element can be fixed, this is {type}", where=where)
    dtype = type.dtype
    fits = value in (0, 1) if dtype is PRED else dtype.is_float or (value == int(value) and dtype.min <= value <= dtype.max)
    if not fits:
        raise InputError(f"{value!r} is no value of {dtype}", where=where, hint="true or false" if dtype is PRED else None)
    return broadcast(const(bool(value) if dtype is PRED else value if dtype.is_float else int(value), dtype), type.shape)
