"""`tilewright::linear`, the operation that torch sees: a function of tensors alone, with a meaning for shapes and a derivative.

Kernels for a weight are kept as long as its packed codes live, and made anew if somebody wrote to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from tilewright.dtype import F8E4M3FN, S8, DType, dtype
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.linear.kernels import Kernels, Signature
from tilewright.runtime.quantized_weight import SMALLEST_NORMAL, QuantizedWeight

BIAS = 5  # of the arguments behind the packed codes
NAME = "tilewright::linear"
SCHEMA = (
    "(Tensor x, Tensor packed, Tensor scales, Tensor? zero_points, Tensor? offsets, Tensor? order, Tensor? factor, "
    "Tensor? bias, str code_type, int group_size, bool divides, bool quantize_activations) -> Tensor"
)
_Use = tuple[torch.dtype, torch.dtype | None, bool]  # types of activations and bias, and whether activations are quantised


@dataclass(frozen=True)
class _Held:
    """Kernels of one weight by their use, and the tensors they were made of as they were then."""

    made_of: tuple[object, ...]
    by_use: dict[_Use, Kernels] = field(default_factory=dict[_Use, Kernels])


_held: MutableMapping[torch.Tensor, _Held] = WeakTensorKeyDictionary()  # by the packed codes
_holding = threading.Lock()


def kernels_for(
    weight: QuantizedWeight, activations: torch.dtype, bias: torch.dtype | None, *, quantize_activations: bool
) -> Kernels:
    """The kernels of a weight, the same ones each time while nobody writes to it.

    Raises:
        InputError: activations or bias are no floats of 16, 32 or 64 bits.
    """
    made_of = _made_of(
        weight.packed,
        (weight.scales, weight.zero_points, weight.offsets, weight.factor),
        (weight.code_type.name, weight.group_size, weight.divides),
    )
    use = activations, bias, quantize_activations
    with _holding:
        held = _held.get(weight.packed)
        if held is None or held.made_of != made_of:
            held = _held[weight.packed] = _Held(made_of)
        if use not in held.by_use:
            held.by_use[use] = Kernels(
                Signature.of(weight, activations, bias, quantize_activations=quantize_activations), _again(weight)
            )
        return held.by_use[use]


def _made_of(packed: torch.Tensor, sides: Sequence[torch.Tensor | None], meaning: tuple[str, int, bool]) -> tuple[object, ...]:
    """The identity of these tensors, as nobody has written to them since, and their meaning."""
    return _version(packed), *(None if t is None else (id(t), _version(t)) for t in sides), meaning


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def forget(weight: QuantizedWeight) -> None:
    """Let go of a weight's kernels and of what is packed for them."""
    with _holding:
        _held.pop(weight.packed, None)


def _again(weight: QuantizedWeight) -> Callable[[], QuantizedWeight]:
    """The weight while its codes live: a kernel that held them would keep them alive for good."""
    codes = TensorWeakRef(weight.packed)
    code_type, scales, columns, group = weight.code_type, weight.scales, weight.in_features, weight.group_size
    sides = weight.zero_points, weight.offsets, None, weight.factor, weight.divides

    def read() -> QuantizedWeight:
        packed = codes()
        if packed is None:
            raise InputError("the weight of these kernels is gone", hint="keep the module while its kernels are used")
        return QuantizedWeight(code_type, packed, scales, columns, group, *sides)

    return read


def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    offsets: torch.Tensor | None,
    order: torch.Tensor | None,
    factor: torch.Tensor | None,
    bias: torch.Tensor | None,
    code_type: str,
    group_size: int,
    divides: bool,
    quantize_activations: bool,
) -> torch.Tensor:
    """x [..., in] by the transpose of a quantised weight [out, in], plus bias [out]: [..., out] of x's type.

    The tensors are those of `QuantizedWeight`; `quantize_activations` quantises x to 8 bits, a scale a row.

    Raises:
        TypeMismatchError: extents or types do not fit together, or they lie on several devices.
        InputError: activations are no floats of 16, 32 or 64 bits; a CUDA graph is captured and no kernel is ready.
        UnsupportedError: torch computes derivatives forward, which this operation has none of.
    """
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage] - torch would take the tangent for zero
        raise UnsupportedError(f"{NAME} has no forward derivative", hint="call the tilewright.Linear, which has one")
    held = _held.get(packed)
    kernels = None
    sides, meaning = (scales, zero_points, offsets, factor), (code_type, group_size, divides)
    if held is not None and held.made_of == _made_of(packed, sides, meaning):
        kernels = held.by_use.get((x.dtype, None if bias is None else bias.dtype, quantize_activations))
    _check(x, packed, bias)
    if kernels is None:
        extras = zero_points, offsets, order, factor, divides
        weight = QuantizedWeight(dtype(code_type), packed, scales, x.shape[-1], group_size, *extras)
        kernels = kernels_for(weight, x.dtype, None if bias is None else bias.dtype, quantize_activations=quantize_activations)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if order is not None:
        rows = rows.index_select(1, order)
    result = kernels(rows, bias)
    if x.dim() == 2 and not result._is_view():  # pyright: ignore[reportPrivateUsage]
        return result
    # Not as a view: autograd lets nobody write to one that an operation of ours made, and models add to it in place.
    return torch.ops.aten._unsafe_view.default(result, (*x.shape[:-1], packed.shape[0]))


def _check(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
    """See that kernels, which read by address, find what they were made for.

    Raises:
        TypeMismatchError: x, the weight and the bias lie on several devices, or the bias has not one element a row.
    """
    if x.device != packed.device:
        raise TypeMismatchError(f"x is on {x.device} and the weight on {packed.device}", hint="module.to(x.device)")
    if bias is None:
        return
    if bias.device != packed.device:
        hint = "module.to(x.device)" if bias.device.type != "meta" else "give it data: its checkpoint had none"
        raise TypeMismatchError(f"the bias is on {bias.device} and the weight on {packed.device}", hint=hint)
    if bias.shape != packed.shape[:1]:
        raise TypeMismatchError(f"a bias of shape {list(bias.shape)}", hint=f"[{packed.shape[0]}], one a row of the weight")


def dense_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, *, quantize_activations: bool
) -> torch.Tensor:
    """The same product by torch's operations on the dequantised weight, each of which knows its derivatives of any order,
    forward and backward, and its batches. Activations that are quantised have the derivative of those that are not, as in
    `linear`."""
    _check(x, weight.packed, bias)
    wide = torch.promote_types(x.dtype, torch.float32) if quantize_activations else x.dtype
    rows = x.to(wide)
    if quantize_activations:
        rows = rows + (_rounded(rows.detach(), F8E4M3FN if weight.code_type.is_float else S8) - rows.detach())
    y = torch.nn.functional.linear(rows, weight.dequantize(wide), None if bias is None else bias.to(wide))
    return y.to(x.dtype)


def _rounded(rows: torch.Tensor, code: DType) -> torch.Tensor:
    """Rows as codes of 8 bits hold them, each with the scale of its largest magnitude."""
    scale = (rows.abs().amax(-1, keepdim=True) / code.max).clamp(min=SMALLEST_NORMAL)
    codes = rows / scale
    whole = codes.round() if code.is_integer else codes.clamp(code.min, code.max).to(code.to_torch()).to(rows.dtype)
    return whole * scale


def _shape(x: torch.Tensor, packed: torch.Tensor, *others: Any) -> torch.Tensor:
    _check(x, packed, others[BIAS])  # torch comes here whenever one of them is a meta tensor
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    x, *parts, bias, code_type, group_size, divides, _ = inputs
    ctx.save_for_backward(*parts)
    ctx.told = tuple(x.shape), code_type, group_size, divides, bias is not None, None if bias is None else bias.dtype


def _derivative(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, through the dequantised weight, and of the bias; the weight is constant."""
    shape, code_type, group_size, divides, biased, bias_dtype = ctx.told
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        packed, *sides = ctx.saved_tensors
        weight = QuantizedWeight(dtype(code_type), packed, sides[0], shape[-1], group_size, *sides[1:], divides=divides)
        of_x = grad @ weight.dequantize(grad.dtype)
    if biased and ctx.needs_input_grad[1 + BIAS + 1]:
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(bias_dtype)
    return of_x, *(None,) * (1 + BIAS), of_bias, None, None, None, None


# The same without a derivative, which torch reaches with one call of Python less: 5 µs.
PLAIN = "tilewright::linear_without_derivative"
_library = torch.library.Library("tilewright", "DEF")  # defined for as long as it lives
for name in (NAME, PLAIN):
    _library.define(f"{name.partition('::')[2]}{SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _linear, "CompositeExplicitAutograd")
    torch.library.register_fake(name, _shape, lib=_library)
torch.library.register_autograd(NAME, _derivative, setup_context=_keep, lib=_library)
linear: Any = torch.ops.tilewright.linear.default
plain_linear: Any = torch.ops.tilewright.linear_without_derivative.default
