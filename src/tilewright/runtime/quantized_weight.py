"""The one form in which a weight of a few bits is held (`QuantizedWeight`), and the quantiser of float matrices (`pack`).

`weight_formats` makes one of the tensors that another tool wrote, `checkpoint` of a file's layer. None of them knows kernels,
which copy the weight into orders of their own when a program is prepared.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property

import torch

from tilewright.dtype import BF16, F4E2M1FN, F8E4M3FN, F8E5M2, F16, F32, S4, S8, U4, U8, DType, dtype, from_torch
from tilewright.errors import InputError, TypeMismatchError, check_type
from tilewright.ir.few_bits import held_finite, pack_halves, unpack_halves
from tilewright.ir.ops.rounding import to_float
from tilewright.sizes import round_up

CODES = (S4, U4, S8, U8, F4E2M1FN, F8E4M3FN, F8E5M2)
SCALES = (F16, BF16, F32)
NARROW_SCALES = (*SCALES, F8E4M3FN)  # where a factor of all of them gives the range
SMALLEST_SCALE = {F16: 2.0**-18}  # f16 has 6 bits left there: rounding such a scale moves no weight by more than half a step
SMALLEST_NORMAL = 2.0**-126
# Of codes that are floats: half their last bit beside their value, and half their least number.
_HALF_BIT = {"f8e4m3fn": 2.0**-4, "f8e5m2": 2.0**-3, "f4e2m1fn": 2.0**-2}
_HALF_LEAST = {"f8e4m3fn": 2.0**-10, "f8e5m2": 2.0**-17, "f4e2m1fn": 2.0**-2}
_CODES = ", ".join(str(c) for c in CODES[:-1]) + f" or {CODES[-1]}"
NEAR_THE_END = 0.9  # of the largest weight of a type: below, half a step more (at most a 15th) is no infinity


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in] of codes, one scale for every `group_size` of them along `in`.

    Column j multiplies input j, or input `order[j]` where there is an order. A weight is

        (code - zero_point) * scale + offset

    each of the last three one value a group; the last group of a row may be shorter. Where there is a `factor`, a scale is
    that of its group times the factor, or divided by it.

    Attributes:
        dtype: s4, u4, s8, u8, f4e2m1fn, f8e4m3fn or f8e5m2.
        packed: u8 [out, ceil(in / 2)], two 4-bit codes a byte, the first in the low half; 8-bit codes as they are, [out, in].
        scales: f16, bf16 or f32 [out, groups]; f8e4m3fn, too, where there is a factor.
        in_features: columns of the matrix.
        group_size: codes that share a scale.
        zero_points: of the codes' type, 4-bit ones one a byte [out, groups]; None for 0.
        offsets: f32 [out, groups], of formats whose zero points are no whole codes; None for 0.
        order: s64 [in], the input that each column multiplies, of formats that group inputs by importance; None for 0, 1, 2...
        factor: f32 [1], of formats that scale their scales (NVFP4); None for 1.
        divides: scales are divided by the factor.

    Raises:
        TypeMismatchError: extents or types do not fit together, floats have zero points, or a factor stands beside offsets.
        InputError: `group_size` is below 1, a zero point is no code, or the order leaves an input out.
    """

    dtype: DType
    packed: torch.Tensor
    scales: torch.Tensor
    in_features: int
    group_size: int
    zero_points: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    divides: bool = False

    def __post_init__(self) -> None:
        check_type(self.code_type, DType, "dtype", 'tilewright.dtype.S4, U4, S8 or U8; tilewright.pack takes "s4"')
        if self.code_type not in CODES:
            raise TypeMismatchError(f"a weight of {self.code_type} codes", hint=_CODES)
        if self.group_size < 1:
            raise InputError(f"a group of {self.group_size} codes", hint="32, 64, 128 or the whole row")
        rows = self.packed.shape[0] if self.packed.dim() == 2 else -1
        held = -(-self.in_features * self.code_type.bits // 8)
        storage = torch.uint8 if self.code_type.bits == 4 else self.code_type.to_torch()
        _fits("codes", self.packed, (rows, held), (storage,))
        groups = (rows, -(-self.in_features // self.group_size))
        _fits("scales", self.scales, groups, tuple(s.to_torch() for s in (SCALES if self.factor is None else NARROW_SCALES)))
        if self.factor is not None:
            _fits("the factor", self.factor, (1,), (torch.float32,))
            if self.offsets is not None:
                raise TypeMismatchError("a factor of scales beside offsets", hint="multiply the scales by it")
        if self.zero_points is not None:
            if self.code_type.is_float:
                raise TypeMismatchError(f"zero points of {self.code_type} codes", hint="floats have none")
            _fits("zero points", self.zero_points, groups, (self.code_type.to_torch(),))
        if self.offsets is not None:
            _fits("offsets", self.offsets, groups, (torch.float32,))
        if self.order is not None:
            _fits("order", self.order, (self.in_features,), (torch.int64,))

    @staticmethod
    def of(
        codes: torch.Tensor,
        scales: torch.Tensor,
        code_type: DType,
        group_size: int,
        *,
        zero_points: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        divides: bool = False,
    ) -> QuantizedWeight:
        """A weight of codes [out, in] that come one to a byte (or to a wider integer), floats as values of their type.

        Raises:
            InputError: a code or zero point is no value of `code_type`, or the order is no permutation of the inputs.
            TypeMismatchError: extents or types do not fit together.
        """
        if codes.dim() != 2:
            raise TypeMismatchError(f"codes of shape {list(codes.shape)} are no matrix", hint="[out, in]")
        for what, values in (("code", codes), ("zero point", zero_points)):
            if values is not None and values.numel() and not code_type.is_float:
                low, high = (int(v) for v in torch.aminmax(values))
                if low < code_type.min or high > code_type.max:
                    raise InputError(f"a {what} of {low if low < code_type.min else high} is no {code_type}")
        if order is not None and not torch.equal(order.sort().values, torch.arange(codes.shape[1], device=order.device)):
            raise InputError("the order of the inputs leaves some out", hint="a permutation of 0 to in_features - 1")
        narrow = codes.to(code_type.to_torch())
        zeros = None if zero_points is None else zero_points.to(code_type.to_torch()).contiguous()
        packed = pack_halves(narrow) if code_type.bits == 4 else narrow.contiguous()
        sides = zeros, offsets, order, factor, divides
        return QuantizedWeight(code_type, packed, scales.contiguous(), codes.shape[1], group_size, *sides)

    @property
    def code_type(self) -> DType:
        """The type of the codes: `dtype`."""
        return self.dtype

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.packed.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(t.nbytes for t in (self.packed, *self._sides) if t is not None)

    @property
    def _sides(self) -> tuple[torch.Tensor | None, ...]:
        return self.scales, self.zero_points, self.offsets, self.order, self.factor

    @property
    def codes(self) -> torch.Tensor:
        """The codes one to a byte, [out, in], in the type that a graph keeps them in."""
        return unpack_halves(self.packed, self.in_features, self.code_type) if self.code_type.bits == 4 else self.packed

    @cached_property
    def scheme(self) -> str:
        """The scheme's spelling: w4g64, w4g64z, w8."""
        group = "" if self.group_size >= self.in_features else f"g{self.group_size}"
        kind = "f" if self.code_type.is_float else "w"
        shifted = self.zero_points is not None or self.offsets is not None
        return f"{kind}{self.code_type.bits}{group}{'z' if shifted else ''}"

    @property
    def wide_scales(self) -> torch.Tensor:
        """The scales in f32 [out, groups], the factor applied."""
        scales = self.scales.to(torch.float32)
        if self.factor is None:
            return scales
        return scales / self.factor if self.divides else scales * self.factor

    def dequantize(self, to: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix [out, in] in the inputs' own order: computed in f32, each step rounded to it, then rounded to `to`."""
        whole = self.codes.to(torch.float32)
        if self.zero_points is not None:
            whole -= self._spread(self.zero_points.to(torch.float32))
        whole *= self._spread(self.wide_scales)
        if self.offsets is not None:
            whole += self._spread(self.offsets)
        return self._ordered(whole).to(to)

    def quantises(self, matrix: torch.Tensor) -> bool:
        """Tell whether a matrix [out, in] is what these codes stand for: no element is off by more than rounding to a code,
        and to the type of the scales or of 16 bits, explains."""
        own, given = self.dequantize(), matrix.detach().to(self.packed.device, torch.float32)
        step = self._ordered(self._spread(self.wide_scales).abs())
        largest = torch.maximum(own.abs(), given.abs())
        of = self.code_type
        coarse = step / 2 if of.is_integer else torch.maximum(largest * _HALF_BIT[of.name], step * _HALF_LEAST[of.name])
        return bool(((given - own).abs() <= 1.01 * coarse + largest / 128).all())

    def _spread(self, side: torch.Tensor) -> torch.Tensor:
        """Numbers of groups [out, groups], one for each of their codes [out, in]."""
        return side.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]

    def _ordered(self, whole: torch.Tensor) -> torch.Tensor:
        """A matrix in the order of the codes, in the inputs' own."""
        return whole if self.order is None else torch.empty_like(whole).index_copy_(1, self.order, whole)

    def to(self, device: str | torch.device) -> QuantizedWeight:
        """The same on another device."""
        packed, scales, *others = (None if t is None else t.to(device) for t in (self.packed, *self._sides))
        assert packed is not None and scales is not None
        return type(self)(self.code_type, packed, scales, self.in_features, self.group_size, *others, divides=self.divides)

    def __repr__(self) -> str:
        extras = [n for n in ("zero_points", "offsets", "order", "factor") if getattr(self, n) is not None]
        with_ = f" with {', '.join(extras)}" if extras else ""
        scales = from_torch(self.scales.dtype)
        return f"QuantizedWeight({self.code_type}{list(self.shape)}, {scales} scales per {self.group_size}{with_})"


def _fits(what: str, t: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(t.shape) != shape or t.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeMismatchError(
            f"{what} are {str(t.dtype).removeprefix('torch.')}{list(t.shape)}", hint=f"{wanted}{list(shape)} are wanted"
        )


def pack(
    weight: torch.Tensor,
    code_type: str | DType = "s4",
    *,
    group_size: int | None = 64,
    zero_point: bool = False,
    scale_dtype: str | DType | None = None,
) -> QuantizedWeight:
    """Quantise a float matrix [out, in].

    Symmetric: scale = max|w| / largest code, code = round(w / scale). With zero points: low = min(w, 0), high = max(w, 0),
    scale = (high - low) / (largest - smallest code), zero point = round(smallest code - low / scale), code = round(w / scale)
    + zero point. Halves round to even, codes and zero points are clamped, and all is computed in f32 with the scale as rounded
    to `scale_dtype`, so that but for that rounding no weight is off by more than half a step. Near the largest value of the
    weight's type a code may decode to infinity: there the scale is rounded down, and a code that still decodes to infinity is
    moved by one towards zero. Source: Jacob et al. 2018, arXiv 1712.05877, section 3; Nagel et al. 2021, arXiv 2106.08295,
    section 2. Codes that are floats are w / scale rounded to their type.

    Args:
        weight: f16, bf16, f32 or f64 [out, in], as `torch.nn.Linear` keeps it.
        code_type: "s4", "u4", "s8", "u8", "f8e4m3fn", "f8e5m2" or "f4e2m1fn".
        group_size: codes along `in` that share a scale; None for one scale a row.
        zero_point: shift the codes of a group so that its range is covered whatever its sign; u4 and u8 need it.
        scale_dtype: "f16", "bf16" or "f32"; that of the weight if not given, f32 for f64.

    Raises:
        InputError: the weight is no dense float matrix with data, holds infinity or NaN or a value too large for the scale's
            type; there is no such type or group; unsigned codes are asked for without zero points.
    """
    check_type(weight, torch.Tensor, "weight", "a float tensor [out, in]; torch.from_numpy(array), or layer.weight")
    code = _code_type(code_type)
    if weight.is_meta or weight.layout != torch.strided:
        kind = "has no data yet" if weight.is_meta else f"is {str(weight.layout).removeprefix('torch.')}"
        raise InputError(f"the weight {kind}", hint="load it first" if weight.is_meta else "weight.to_dense()")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.element_size() < 2:
        raise InputError(f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)} is no float matrix", hint="[out, in]")
    if code.is_float and zero_point:
        raise InputError(f"{code} codes with zero points", hint="floats have none: zero_point=False")
    if not code.is_signed and not zero_point:
        raise InputError(f"{code} codes without zero points have no negative weights", hint="zero_point=True, or s4")
    if group_size is not None:
        check_type(group_size, int, "group_size", "32, 64, 128, or None for the whole row")
        if group_size < 1:
            raise InputError(f"a group of {group_size} codes", hint="32, 64, 128, or None for the whole row")
    kept = dtype(scale_dtype) if scale_dtype is not None else _scale_of(weight.dtype)
    if kept not in SCALES:
        raise InputError(f"a scale is not kept as {kept}", hint="f16, bf16 or f32")
    rows, columns = weight.shape
    if not weight.numel():
        raise InputError(f"a weight of shape {list(weight.shape)} holds nothing")
    group = columns if group_size is None else min(group_size, columns)
    whole = weight.detach().to(torch.float32)
    filled = round_up(columns, group)
    padded = torch.nn.functional.pad(whole, (0, filled - columns)) if filled > columns else whole
    grouped = padded.reshape(rows, -1, group)
    low, high = (v.clamp(max=0) if i == 0 else v.clamp(min=0) for i, v in enumerate(torch.aminmax(grouped, dim=2)))
    span = (code.max - code.min) / 2
    scale = (high / 2 - low / 2) / span if zero_point else torch.maximum(high, -low) / code.max  # halves: no sum is infinite
    if not bool(torch.isfinite(scale).all()):
        raise InputError("the weight holds infinity or NaN, or spans more than f32", hint="look at what made it")
    scale = scale.clamp(min=SMALLEST_SCALE.get(kept, SMALLEST_NORMAL)).to(kept.to_torch())
    if not bool(torch.isfinite(scale).all()):
        raise InputError(
            f"a weight of {float(whole.abs().max()):g} is too large for a scale of {kept}", hint='scale_dtype="f32"'
        )
    codes, zeros = _encode(grouped, low, scale, code, zero_point=zero_point)
    decoded = torch.float32 if weight.dtype is torch.float64 else weight.dtype
    if float(torch.maximum(high, -low).max()) > torch.finfo(decoded).max * NEAR_THE_END:
        scale = held_finite(scale, (codes - zeros[..., None]).abs().amax(2), decoded)
        codes, zeros = _encode(grouped, low, scale, code, zero_point=zero_point)
        if not code.is_float:
            steps = codes - zeros[..., None]
            codes -= steps.sign() * (steps * scale.to(torch.float32)[..., None]).to(decoded).isinf()
    codes = codes.reshape(rows, filled)[:, :columns].to(code.to_torch())
    return QuantizedWeight.of(codes, scale, code, group, zero_points=zeros if zero_point else None)


def _encode(
    grouped: torch.Tensor, low: torch.Tensor, scale: torch.Tensor, code: DType, *, zero_point: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of weights [rows, groups, group] and zero points [rows, groups], as f32, by scales as rounded."""
    step = scale.to(torch.float32)
    if code.is_float:
        codes = to_float(grouped / step[..., None], code, saturate=True)
        return codes.to(torch.float32), torch.zeros_like(step)
    zeros = (code.min - low / step).round_().clamp_(code.min, code.max) if zero_point else torch.zeros_like(step)
    codes = (grouped / step[..., None]).round_()
    if zero_point:
        codes += zeros[..., None]
    return codes.clamp_(code.min, code.max), zeros


def _code_type(said: str | DType) -> DType:
    """The type of codes that is meant.

    Raises:
        InputError: codes have no such type.
    """
    with contextlib.suppress(InputError):
        found = dtype(said)
        if found in CODES:
            return found
    hint = f'{_CODES}, with group_size beside it; "w4g64" and the like are for tilewright.quantize_'
    raise InputError(f"a weight is not packed as {said}", hint=hint)


def _scale_of(t: torch.dtype) -> DType:
    found = from_torch(t)
    return found if found in SCALES else F32
