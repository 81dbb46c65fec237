"""Calls of torch that a file may make: operators of `allowed`, on arguments that their kernels for shapes alone accept.

Such a kernel has neither storage nor values, so it has nothing to read past. Its results must be as the call declares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import cast

import torch

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, TilewrightError, TypeMismatchError
from tilewright.frontends import ALLOW_CALLS
from tilewright.frontends.torch import call as calls
from tilewright.frontends.torch.allowed import ALLOWED
from tilewright.frontends.torch.types import dtype_of
from tilewright.ir.ops import Call

MOST_BYTES = 1 << 34  # of the results of one call
_NAMED_KINDS = ("ScalarType", "Layout", "MemoryFormat")


def check_call(call: Call, sources: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The results of a file's call for operands of these shapes and types, as tensors without data.

    Args:
        call: as the file has it.
        sources: of its operands, on the meta device; None where only the running program knows a shape.

    Raises:
        InputError: its operator is not allowed, the payload is malformed, an argument is none that a file may give, or the
            results take more than `MOST_BYTES`.
        TypeMismatchError: it fails, or gives other types than it declares.
    """
    if call.target not in ALLOWED:
        raise InputError(f"calls torch's {call.target!r}, which is not among what a file may call", hint=ALLOW_CALLS)
    known = [s for s in sources if s is not None]
    if len(known) < len(sources):
        raise InputError(f"calls torch's {call.target!r} on what has a shape only once the program runs", hint=ALLOW_CALLS)
    return shapes_of_results(call, known)


def shapes_of_results(call: Call, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a call of torch for operands of these shapes and types, as tensors without data.

    Raises:
        InputError: the payload is malformed, an argument is none that a file may give, or the results take more than
            `MOST_BYTES`.
        TypeMismatchError: it fails, or gives other types than it declares.
    """
    operator = calls.find_operator(call.target, call.target)
    args, kwargs = calls.arguments(call, [s.contiguous() for s in sources])  # as they are when it runs
    schema = calls.schema_of(operator)
    named = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    for a in schema.arguments:  # torch reads a number as a type's, and past the last type's something else
        if type(named.get(a.name)) is int and any(kind in str(a.real_type) for kind in _NAMED_KINDS):
            raise InputError(f"a call whose {a.name} is a number", where=call.target, hint='{"torch": "float32"}')
    for value in _flat(list(named.values())):
        _check_argument(value, call.target)
        if isinstance(value, torch.device) and not sources and str(value) not in ("cpu", "cuda"):  # else it is where they are
            raise InputError(f"a call on device {str(value)!r}", where=call.target, hint="cpu")
    if call.target.startswith("aten._fft_") and not _transforms(named):
        raise InputError("a call whose axes, length or scaling no Fourier transform has", where=call.target, hint=ALLOW_CALLS)
    if "batch_norm" in call.target and not _one_a_channel(named):
        raise InputError("a call whose weights are not one for each channel", where=call.target, hint=ALLOW_CALLS)
    if any(type(s) is int and s < 0 for s in _flat([named.get("stride")])):  # torch 2.11 looks when it runs
        raise InputError("a call with a stride below zero", where=call.target, hint=ALLOW_CALLS)
    if named.get("pin_memory"):
        raise InputError("a call that pins memory", where=call.target, hint=ALLOW_CALLS)
    if any(a.name == "device" for a in schema.arguments):
        positional = [a.name for a in schema.arguments][: len(args)]
        if "device" in positional:
            args[positional.index("device")] = torch.device("meta")
        else:
            kwargs["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            results = list(calls.tensors_in(operator(*args, **kwargs)))
    except TilewrightError:
        raise
    except Exception as error:  # whatever a kernel for shapes says
        said = (str(error).splitlines() or [""])[0][:160]
        raise TypeMismatchError(f"cannot be evaluated: {type(error).__name__}: {said}", where=call.target) from error
    if any(t.device.type != "meta" or t.layout is not torch.strided or t.is_quantized for t in results):
        raise InputError("a call whose results are no plain tensors", where=call.target, hint=ALLOW_CALLS)
    if any(t.dim() != len(t.stride()) or _end(t) > t.untyped_storage().nbytes() for t in results):
        raise InputError("a call whose results reach past their memory", where=call.target, hint=ALLOW_CALLS)
    if sum(t.numel() * t.element_size() for t in results) > MOST_BYTES:
        raise InputError(f"a call whose results take more than {MOST_BYTES >> 30} GiB", where=call.target, hint=ALLOW_CALLS)
    calls.check_types(call, results)
    return results


def _transforms(named: Mapping[str, object]) -> bool:
    """Tell whether a Fourier transform's arguments are such as torch's public functions hand on: kernels look at none."""
    x, dims, scaling = named.get("self"), named.get("dim"), named.get("normalization", 0)
    if not isinstance(x, torch.Tensor) or not isinstance(dims, list) or not dims or scaling not in (0, 1, 2):
        return False
    axes = cast("list[object]", dims)
    if not all(type(d) is int and 0 <= d < x.dim() for d in axes) or len(set(axes)) < len(axes) or not x.numel():
        return False
    length = named.get("last_dim_size", 1)
    return type(length) is int and 1 <= length <= 2 * x.shape[cast(int, axes[-1])]


def _one_a_channel(named: Mapping[str, object]) -> bool:
    """Tell whether a norm over batches has so many weights and means: its kernels look at none, and read past fewer."""
    x = named.get("input")
    given = [t for n in ("weight", "bias", "running_mean", "running_var") if isinstance(t := named.get(n), torch.Tensor)]
    return isinstance(x, torch.Tensor) and x.dim() >= 2 and all(t.shape == x.shape[1:2] for t in given)


def _end(t: torch.Tensor) -> int:
    """Bytes of its storage up to the last element that a tensor's strides reach."""
    last = sum((d - 1) * s for d, s in zip(t.shape, t.stride(), strict=True))
    return (int(t.storage_offset()) + last + 1) * t.element_size() if t.numel() else 0


def _flat(values: Sequence[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(cast("Sequence[object]", value))
        else:
            yield value


def _check_argument(value: object, where: str) -> None:
    """See that an argument names no foreign device, layout or type."""
    odd_layout = isinstance(value, torch.layout) and value is not torch.strided
    if odd_layout or (isinstance(value, torch.dtype) and value not in _dtypes()):
        raise InputError(f"a call with {value} among its arguments", where=where, hint=ALLOW_CALLS)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise InputError(f"a call with a number of {value.bit_length()} bits", where=where)


@cache
def _dtypes() -> frozenset[object]:
    """Those of the graph, and complex ones, which opaque values have."""
    every = (v for v in vars(torch).values() if isinstance(v, torch.dtype))
    return frozenset(d for d in every if dtype_of(d) is not OPAQUE) | {torch.complex64, torch.complex128}
