"""Operators kept as they are: written as a `call` with a JSON payload, and run by torch.

The payload is `{"args": […], "kwargs": {…}}`, positional and keyword arguments of the operator's schema; that of a call that
draws random numbers has its number, `"draw"`, too. JSON values stand for themselves; an object with one key stands for what
JSON lacks: `{"tensor": i}` operand i of the call, `{"extent": i}` the number that operand i is, `{"float": "inf"}`,
`{"torch": "float16"}` a dtype, layout or memory format, `{"device": "cpu"}`, `{"complex": [re, im]}`. Nothing in it is code.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch._ops import OpOverload

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.files import NotJSONError, decoded
from tilewright.frontends.torch.types import dtype_of
from tilewright.ir.build import extents
from tilewright.ir.extent import Extent
from tilewright.ir.graph import Node
from tilewright.ir.ops import Call
from tilewright.ir.types import TensorType

EXACT = 1 << 53  # integers up to here are f64
_MOST_NESTED = 8  # lists of an argument; no schema has so many
_LINEAR = ("linalg_", "_linalg_", "cholesky", "geqrf", "lu_", "ormqr", "triangular_solve")
_ALSO_ON_CPU = (*_LINEAR, "_fft_")  # of aten: MAGMA's have streams of their own, cuFFT's plans are kept for some sizes alone
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
# Modules whose import registers a namespace.
_REGISTERED_BY = {
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
    "tilewright": "tilewright.frontends.torch.recurrence",
}

NO_RANDOM = "model.eval() turns dropout off; what it draws on purpose is to be an input, as `noise` of transformers' ViTMAE"


def call(
    target: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    types: Sequence[TensorType],
    where: str,
    draw: int | None = None,
) -> Node:
    """The operator `target` as a call over the nodes among its arguments.

    Args:
        target, args, kwargs: the operator, "namespace.name.overload", and its arguments.
        types: of its tensor results.
        where: its place, for messages.
        draw: number of the call among those of a program that may draw random numbers, which are not merged as equal ones are;
            None: it may draw none.

    Raises:
        UnsupportedError: it writes to an operand, draws random numbers and may not, or of constants, which would be drawn once
            alone; or an argument is of a kind the payload cannot hold.
    """
    operator = find_operator(target, where)
    if schema_of(operator).is_mutable:
        raise UnsupportedError(f"{target} writes to its operand", where=where)
    draws = torch.Tag.nondeterministic_seeded in operator.tags and not _without_dropout(operator, args)
    if draws and draw is None:
        raise UnsupportedError(f"{target} draws random numbers", where=where, hint=NO_RANDOM)
    nodes: list[Node] = []
    payload: dict[str, object] = {
        "args": [_encode(a, nodes, where) for a in args],
        "kwargs": {k: _encode(v, nodes, where) for k, v in kwargs.items()},
    }
    if draws:
        payload["draw"] = draw
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    made = Node(Call("torch", target, text, tuple(types)), *nodes)
    if draws and made.constant:
        raise UnsupportedError(f"{target} draws random numbers for a constant", where=where, hint="draw them for an input")
    return made


def _without_dropout(operator: OpOverload, args: Sequence[object]) -> bool:
    """Tell whether an operator that drops elements at random, as attention may, is told to drop none."""
    given = {a.name: value for a, value in zip(schema_of(operator).arguments, args, strict=False)}
    named = {a.name for a in schema_of(operator).arguments} & {"dropout_p"}
    return bool(named) and given.get("dropout_p", 0.0) == 0


def find_operator(target: str, where: str) -> OpOverload:
    """The operator spelt "namespace.name.overload".

    Raises:
        UnsupportedError: nothing registered it.
    """
    parts = target.split(".")
    if len(parts) == 3 and parts[0] in _REGISTERED_BY:
        importlib.import_module(_REGISTERED_BY[parts[0]])
    found: object = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    if len(parts) != 3 or not isinstance(found, OpOverload):
        raise UnsupportedError(
            f"torch knows no operator {target!r}", where=where, hint="import the package that registers it first"
        )
    return found


def not_repeated(op: Call) -> str | None:
    """The reason why a CUDA graph does not do again what a call does; None if it may be part of one."""
    namespace, _, name = op.target.partition(".")
    if namespace != "aten":
        return "its code is not torch's own, and may do anything on the CPU"
    if name.startswith(_ALSO_ON_CPU):
        return "torch may compute a part of it on the CPU, or free its plan before the graph"
    operator = find_operator(op.target, op.target)
    if torch.Tag.nondeterministic_seeded in operator.tags and not _without_dropout(operator, _fields(op)[0]):
        return "it draws random numbers"
    if torch.Tag.cudagraph_unsafe in operator.tags:
        return "torch calls it unsafe in a CUDA graph"
    return "it reads a number from a tensor" if '{"extent":' in op.payload else None


def schema_of(operator: OpOverload) -> torch.FunctionSchema:
    """The operator's schema: its arguments, and whether it writes to them."""
    return cast(torch.FunctionSchema, vars(operator)["_schema"])


def _encode(value: object, nodes: list[Node], where: str) -> object:
    if isinstance(value, Node):
        nodes.append(value)
        return {"tensor": len(nodes) - 1}
    if isinstance(value, Extent):
        nodes.append(extents((value,), single=True))
        return {"extent": len(nodes) - 1}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_encode(value.real, nodes, where), _encode(value.imag, nodes, where)]}
    if isinstance(value, (list, tuple)):
        return [_encode(v, nodes, where) for v in cast("Sequence[object]", value)]
    if isinstance(value, _TORCH_CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise UnsupportedError(f"an argument of type {type(value).__name__} cannot be kept", where=where)


def _decode(value: object, tensors: Sequence[torch.Tensor], where: str, depth: int = 0) -> object:
    if depth > _MOST_NESTED:
        raise _malformed(where)
    if isinstance(value, list):
        return [_decode(v, tensors, where, depth + 1) for v in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    if len(cast("dict[str, object]", value)) != 1:
        raise _malformed(where)
    ((kind, content),) = cast("dict[str, object]", value).items()
    if kind == "tensor" and type(content) is int and 0 <= content < len(tensors):
        return tensors[content]
    if kind == "extent" and type(content) is int and 0 <= content < len(tensors) and tensors[content].numel() == 1:
        return int(tensors[content])
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == "complex" and isinstance(content, list):
        parts = [_decode(c, tensors, where, depth + 1) for c in cast("list[object]", content)]
        if len(parts) != 2 or not all(type(c) in (int, float) for c in parts):
            raise _malformed(where)
        return complex(*cast("list[float]", parts))
    if kind == "device":
        # Where the operands are now, which need not be where they were when the program was traced.
        if tensors:
            return tensors[0].device
        try:
            return torch.device(str(content))
        except RuntimeError as error:
            raise _malformed(where) from error
    found = getattr(torch, str(content), None)
    if kind != "torch" or not isinstance(found, _TORCH_CONSTANTS):
        raise _malformed(where)
    return found


def evaluate_call(op: Call, values: Sequence[object]) -> list[torch.Tensor]:
    """Run a call on contiguous operands; its tensor results in order, the other results left out.

    Raises:
        InputError: the payload is malformed, or the operator reads files.
        UnsupportedError: the operator is not registered, or writes to an operand.
        TypeMismatchError: the results are not of the types the call declares.
    """
    operator = find_operator(op.target, op.target)
    if schema_of(operator).is_mutable:
        raise UnsupportedError(f"{op.target} writes to its operand", where=op.target)
    if any(a.name == "filename" for a in schema_of(operator).arguments):
        raise InputError(f"{op.target} reads a file, which a program may not", where=op.target)
    tensors = [cast(torch.Tensor, v).contiguous() for v in values]
    if op.target.startswith("aten.as_strided"):  # whose offset counts from where memory begins
        tensors = [t.clone() if t.storage_offset() else t for t in tensors]
    try:
        results = _called(op, operator, tensors)
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
        results = _called_wider(op, operator, tensors)
        if results is None:
            raise
    check_types(op, results)
    return results


def _called(op: Call, operator: OpOverload, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args, kwargs = arguments(op, tensors)
    run = cast("Callable[..., object]", _lcm) if op.target == "aten.lcm.default" else operator
    with torch.no_grad():
        return list(tensors_in(run(*args, **kwargs)))


def _lcm(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """torch's `lcm`, whose own kernel divides the lowest integer by a gcd of -1, at which a CPU ends the process."""
    wide = torch.result_type(self, other)
    if wide not in (torch.int32, torch.int64):  # narrower ones are divided in 32 bits
        return torch.lcm(self, other)
    a, b = self.to(wide), other.to(wide)
    shared = torch.gcd(a, b)
    odd = (shared == 0) | (shared == -1)
    quotient = torch.div(a, torch.where(odd, 1, shared), rounding_mode="trunc")
    return torch.where(shared == 0, 0, torch.where(shared == -1, -quotient, quotient) * b).abs()


def _called_wider(op: Call, operator: OpOverload, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """A call of what torch has no kernel for here (`histc` of integers, which only its GPU has), on wider operands, its results
    in the declared types; None where that would not be the same: integers past 2^53, or nothing to widen.
    """
    wide: list[torch.Tensor] = []
    for t in tensors:
        if t.dtype is torch.bool or t.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
            wide.append(t)
        elif t.is_floating_point():
            wide.append(t.to(torch.float32))
        elif t.numel() and not -EXACT <= int(t.to(torch.int64).min()) <= int(t.to(torch.int64).max()) <= EXACT:
            return None
        else:
            wide.append(t.to(torch.float64))
    if all(w.dtype is t.dtype for w, t in zip(wide, tensors, strict=True)):
        return None
    try:
        results = _called(op, operator, wide)
    except (RuntimeError, IndexError):  # nor is there one for those, or some are indices
        return None
    if len(results) != len(op.types) or any(t.dtype is OPAQUE for t in op.types):
        return None
    return [r.to(t.dtype.to_torch()) for r, t in zip(results, op.types, strict=True)]


def check_types(op: Call, results: Sequence[torch.Tensor]) -> None:
    """See that results are of the types that the call declares.

    Raises:
        TypeMismatchError: they are not.
    """
    types = [TensorType(dtype_of(t.dtype), tuple(t.shape)) for t in results]
    if len(types) != len(op.types) or any(w.dtype is not OPAQUE and t != w for t, w in zip(types, op.types, strict=True)):
        given, declared = ", ".join(map(str, types)), ", ".join(map(str, op.types))
        raise TypeMismatchError(f"{op.target} gave {given} where {declared} is declared", where=op.target)


def arguments(op: Call, tensors: Sequence[torch.Tensor]) -> tuple[list[object], dict[str, object]]:
    """The operator's positional and keyword arguments.

    Raises:
        InputError: the payload is malformed.
    """
    args, named = _fields(op)
    return (
        [_decode(a, tensors, op.target) for a in args],
        {k: _decode(v, tensors, op.target) for k, v in named.items()},
    )


def _fields(op: Call) -> tuple[list[object], dict[str, object]]:
    """The positional and keyword arguments in a payload, encoded.

    Raises:
        InputError: the payload is malformed.
    """
    try:
        payload = decoded(op.payload, object)
    except NotJSONError:
        payload = None
    fields = cast("dict[str, object]", payload) if isinstance(payload, dict) else {}
    args, kwargs = fields.get("args"), fields.get("kwargs")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise _malformed(op.target)
    return cast("list[object]", args), cast("dict[str, object]", kwargs)


def _malformed(where: str) -> InputError:
    return InputError("the payload of a call is malformed", where=where)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an operator's result, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in cast("Sequence[object]", value):
            yield from tensors_in(v)
