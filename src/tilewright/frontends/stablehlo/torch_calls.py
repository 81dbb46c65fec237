"""Operations that torch computes: convolutions, triangular systems, factors, Fourier transforms, bits.

Each stands as a `call` whose payload is a module of that operation alone. A maker reads the operation's attributes once and
returns a function of tensors, complex ones for complex operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn import functional

from tilewright.dtype import F4E2M1FN, F64, PRED, DType
from tilewright.errors import UnsupportedError
from tilewright.frontends.stablehlo.module import DTYPES, Operation
from tilewright.ir.few_bits import four_bit_floats, half_codes
from tilewright.ir.ops.elementwise import convert_tensor
from tilewright.ir.ops.functions import narrow_integer

Kernel = Callable[..., torch.Tensor]
_COMPLEX_STORAGE = {"complex<f32>": torch.complex64, "complex<f64>": torch.complex128}
_SPATIAL = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def element(value: Any) -> DType | None:
    """The element type of an MLIR value, or None if it is complex."""
    return DTYPES.get(str(value.type.element_type))


def _convolution(op: Operation) -> Kernel:
    """Sums are in f32 (f64 where a type is f64) or exact, modulo the result's width, whatever the operands' type is."""
    q = op.dimension_numbers("ConvDimensionNumbers", "dimension_numbers")
    rank = len(list(q.input_spatial_dimensions))
    source = [int(q.input_batch_dimension), int(q.input_feature_dimension), *q.input_spatial_dimensions]
    weight = [int(q.kernel_output_feature_dimension), int(q.kernel_input_feature_dimension), *q.kernel_spatial_dimensions]
    result = [int(q.output_batch_dimension), int(q.output_feature_dimension), *q.output_spatial_dimensions]
    ones = (1,) * rank
    strides, spread = op.ints("window_strides", ones), op.ints("lhs_dilation", ones)
    gaps, padding = op.ints("rhs_dilation", ones), op.ints("padding", (0, 0) * rank)
    backwards = [i + 2 for i, r in enumerate(op.ints("window_reversal", (0,) * rank)) if r]
    groups, batches = op.integer("feature_group_count", 1), op.integer("batch_group_count", 1)
    lhs, rhs, out = element(op.operands[0]), element(op.operands[1]), element(op.results[0])

    def run(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        x, k = _widened(x, k, lhs, rhs, out)
        x, k = x.permute(source), k.permute(weight).flip(backwards)
        if batches > 1:  # every part of the batch has output channels of its own
            x = x.reshape(batches, x.shape[0] // batches, *x.shape[1:]).movedim(0, 1).flatten(1, 2)
        y = _windows(_padded(x, spread, padding), k, strides, gaps, groups * batches)
        return _narrowed(y.permute([result.index(d) for d in range(rank + 2)]), out)

    return run


def _widened(
    x: torch.Tensor, k: torch.Tensor, lhs: DType | None, rhs: DType | None, out: DType | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands in the type that sums are made in. Products of narrow integers are exact in f64, up to 2**22 of them."""
    if lhs is None or rhs is None or out is None:
        wide = torch.promote_types(x.dtype, k.dtype)
        return x.to(wide), k.to(wide)
    if any(d.is_float for d in (lhs, rhs, out)):
        wide = torch.float64 if F64 in (lhs, rhs, out) else torch.float32
    else:
        taken = k.numel() // max(k.shape[0], 1)
        narrow = max(lhs.bits, rhs.bits) <= 8 or (max(lhs.bits, rhs.bits) <= 16 and taken < 1 << 21)
        wide = torch.float64 if narrow else torch.int64
    return tuple(t.view(torch.int64) if t.dtype is torch.uint64 else t.to(wide) for t in (x, k))  # type: ignore[return-value]


def _narrowed(y: torch.Tensor, out: DType | None) -> torch.Tensor:
    if out is None:
        return y
    if out is PRED:
        return y != 0
    if out.is_integer:
        whole = y if y.dtype is torch.int64 else y.to(torch.int64) if y.dtype is torch.float64 else y
        return narrow_integer(whole, out) if whole.dtype is torch.int64 else convert_tensor(y, DTYPES["f32"], out, "wrap")
    source = DTYPES["f64"] if y.dtype is torch.float64 else DTYPES["f32"]
    return convert_tensor(y, source, out, "ieee" if out.bits == 8 else "wrap")


def _padded(x: torch.Tensor, spread: Sequence[int], padding: Sequence[int]) -> torch.Tensor:
    """[N, C, *spatial] with zeros between its elements and around them; a negative width cuts."""
    for axis, by in enumerate(spread, 2):
        if by > 1 and x.shape[axis]:
            shape = list(x.shape)
            shape[axis] = (shape[axis] - 1) * by + 1
            wide = x.new_zeros(shape)
            wide[(slice(None),) * axis + (slice(None, None, by),)] = x
            x = wide
    for axis in range(len(spread)):
        for width, after in ((padding[2 * axis], False), (padding[2 * axis + 1], True)):
            at, extent = axis + 2, x.shape[axis + 2]
            if width < 0:
                kept = max(extent + width, 0)
                x = x.narrow(at, 0 if after else extent - kept, kept)
            elif width > 0:
                zeros = x.new_zeros([width if a == at else d for a, d in enumerate(x.shape)])
                x = torch.cat([x, zeros] if after else [zeros, x], at)
    return x


def _windows(x: torch.Tensor, k: torch.Tensor, strides: Sequence[int], gaps: Sequence[int], groups: int) -> torch.Tensor:
    """[N, C, *spatial] and [O, C / groups, *window] -> [N, O, *positions]."""
    rank = len(strides)
    reach = [(d - 1) * g + 1 if d else 0 for d, g in zip(k.shape[2:], gaps, strict=True)]
    positions = [max((d - r) // s + 1, 0) if d >= r else 0 for d, r, s in zip(x.shape[2:], reach, strides, strict=True)]
    shape = (x.shape[0], k.shape[0], *positions)
    if 0 in (*x.shape, *k.shape, *shape):
        return x.new_zeros(shape)
    if rank in _SPATIAL:
        return _SPATIAL[rank](x, k, stride=tuple(strides), dilation=tuple(gaps), groups=groups)
    # Windows as a view, for the ranks that torch has no convolution of.
    steps = [x.stride(a + 2) * s for a, s in enumerate(strides)] + [x.stride(a + 2) * g for a, g in enumerate(gaps)]
    seen = x.as_strided((*x.shape[:2], *positions, *k.shape[2:]), (*x.stride()[:2], *steps), x.storage_offset())
    seen = seen.unflatten(1, (groups, -1)).movedim(2, 2 + rank)  # [N, groups, *positions, C, *window]
    rows = seen.flatten(2 + rank).flatten(2, 1 + rank) if rank else seen.flatten(2).unsqueeze(2)
    columns = k.unflatten(0, (groups, -1)).flatten(2)  # [groups, O / groups, C * window]
    return (rows @ columns.mT).transpose(2, 3).reshape(shape)


def _in_wide(run: Kernel, dtype: DType | None) -> Kernel:
    """A function torch has for f32, f64 and complex numbers, for the narrower floats too: computed in f32, rounded once."""

    def apply(*args: torch.Tensor) -> torch.Tensor:
        if dtype is None or dtype.bits >= 32:
            return run(*args)
        return convert_tensor(run(*(a.to(torch.float32) for a in args)), DTYPES["f32"], dtype, "wrap")

    return apply


def _triangular_solve(op: Operation) -> Kernel:
    lower, left, unit = (bool(op.integer(k)) for k in ("lower", "left_side", "unit_diagonal"))
    transposed = op.keyword("transpose_a", "NO_TRANSPOSE")

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if 0 in b.shape or 0 in a.shape:
            return torch.zeros_like(b)
        if transposed != "NO_TRANSPOSE":
            a = a.mH if transposed == "ADJOINT" else a.mT
        upper = lower == (transposed != "NO_TRANSPOSE")
        return torch.linalg.solve_triangular(a, b, upper=upper, left=left, unitriangular=unit)

    return _in_wide(run, element(op.results[0]))


def _cholesky(op: Operation) -> Kernel:
    """The factor of a matrix of which one triangle is read; NaN where it is not positive definite."""
    lower = bool(op.integer("lower", 0))

    def run(a: torch.Tensor) -> torch.Tensor:
        if 0 in a.shape:
            return torch.zeros_like(a)
        # torch takes the lower triangle; the other one is what symmetry makes it
        factor, failed = torch.linalg.cholesky_ex(a if lower else a.mH)
        factor = torch.where(failed[..., None, None] == 0, factor.tril(), torch.nan)
        return factor if lower else factor.mH

    return _in_wide(run, element(op.results[0]))


def _fft(op: Operation) -> Kernel:
    kind, lengths = op.keyword("fft_type"), op.ints("fft_length")
    axes = list(range(-len(lengths), 0))
    name = {"FFT": "fftn", "IFFT": "ifftn", "RFFT": "rfftn", "IRFFT": "irfftn"}.get(kind)
    if name is None:
        raise UnsupportedError(
            f"a Fourier transform of kind {kind} is not read", where=op.where, hint="FFT, IFFT, RFFT or IRFFT"
        )
    transform = cast(Kernel, getattr(torch.fft, name))
    shape = tuple(int(d) for d in op.results[0].type.shape)

    def run(x: torch.Tensor) -> torch.Tensor:
        if 0 in x.shape or 0 in shape:
            return torch.zeros(shape, dtype=x.real.dtype if kind == "IRFFT" else x.dtype.to_complex(), device=x.device)
        return transform(x, s=list(lengths), dim=axes)

    return run


def _bitcast(op: Operation) -> Kernel:
    """The same bytes in row-major order: a wider type takes the last axis in, a narrower one adds an axis, low bits first."""
    source, target = element(op.operands[0]), element(op.results[0])
    shape = tuple(int(d) for d in op.results[0].type.shape)
    widths = [1 if d is PRED else d.bits if d is not None else 8 for d in (source, target)]
    storage = target.to_torch() if target is not None else _COMPLEX_STORAGE[str(op.results[0].type.element_type)]

    def run(x: torch.Tensor) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=storage, device=x.device)
        x = x.contiguous()
        flat = x.as_strided((x.numel(),), (1,))  # of one element, too, whatever its stride says
        if widths[0] < 8:
            flat = half_codes(flat) if widths[0] == 4 else flat.to(torch.uint8)
        if widths[0] == widths[1] < 8:
            return _codes(flat, cast(DType, target)).reshape(shape)
        if widths[0] < 8:
            pieces = flat.to(torch.int64).unflatten(0, (-1, 8 // widths[0]))
            flat = (pieces << torch.arange(0, 8, widths[0], device=x.device)).sum(1).to(torch.uint8)
        if widths[1] < 8:
            whole = flat.view(torch.uint8).to(torch.int64)[:, None]
            pieces = whole >> torch.arange(0, 8, widths[1], device=x.device) & (1 << widths[1]) - 1
            return _codes(pieces, cast(DType, target)).reshape(shape)
        return flat.view(torch.uint8).view(storage).reshape(shape)

    return run


def _codes(bits: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Codes, one to a byte, of bits that are one to an element."""
    if dtype is F4E2M1FN:
        return four_bit_floats(bits.device)[bits.int()].view(dtype.to_torch())
    return bits != 0 if dtype is PRED else narrow_integer(bits, dtype)


def _popcnt(op: Operation) -> Kernel:
    dtype = cast(DType, element(op.results[0]))

    def run(x: torch.Tensor) -> torch.Tensor:
        left = _bits_of(x, dtype)
        count = torch.zeros_like(left)
        for bit in range(dtype.bits):
            count += (left >> bit) & 1
        return narrow_integer(count, dtype)

    return run


def _leading_zeros(op: Operation) -> Kernel:
    dtype = cast(DType, element(op.results[0]))

    def run(x: torch.Tensor) -> torch.Tensor:
        left = _bits_of(x, dtype)
        seen = torch.zeros_like(left)
        count = torch.zeros_like(left)
        for bit in reversed(range(dtype.bits)):
            seen |= (left >> bit) & 1
            count += 1 - seen
        return narrow_integer(count, dtype)

    return run


def _bits_of(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    wide = x.view(torch.int64) if x.dtype is torch.uint64 else x.to(torch.int64)
    return wide if dtype.bits == 64 else wide & ((1 << dtype.bits) - 1)


def _shift(op: Operation) -> Kernel:
    """Shifts of 4-bit codes, and sign-filling ones of unsigned types: on the signed number of the same bits."""
    name = op.name.partition(".")[2]
    dtype = cast(DType, element(op.results[0]))
    signed = DTYPES[f"i{dtype.bits}"]
    low = (1 << dtype.bits) - 1

    def run(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        wide, steps = _bits_of(x, dtype), _bits_of(by, dtype)
        past = (steps < 0) | (steps >= dtype.bits)
        steps = steps.masked_fill(past, 0)
        if name == "shift_right_arithmetic":
            number = narrow_integer(wide, signed).to(torch.int64)
            moved = torch.where(past, number >> 63, number >> steps)
        else:
            moved = wide << steps if name == "shift_left" else wide >> steps
            moved = torch.where(past, 0, moved)
        return narrow_integer(moved & low if dtype.bits < 64 else moved, dtype)

    return run


def _reduce_precision(op: Operation) -> Kernel:
    """Rounded to even to so many bits of exponent and mantissa; past the range infinity, below it zero, as XLA does."""
    exponent, mantissa = op.integer("exponent_bits"), op.integer("mantissa_bits")
    dtype = cast(DType, element(op.results[0]))

    def run(x: torch.Tensor) -> torch.Tensor:
        given = x
        wide = x.to(torch.float64)
        fraction, power = torch.frexp(wide)  # wide = fraction * 2**power, 0.5 <= |fraction| < 1
        scale = 2.0 ** (mantissa + 1)
        rounded = torch.ldexp(torch.round(fraction * scale) / scale, power)
        bias = (1 << exponent - 1) - 1
        # the largest: (2 - 2**-mantissa) * 2**bias; the smallest normal: 2**(1 - bias)
        if bias < 1024:
            largest = (2 - 2.0**-mantissa) * 2.0**bias
            rounded = torch.where(rounded.abs() > largest, torch.copysign(torch.full_like(wide, torch.inf), wide), rounded)
            small = rounded.abs() < 2.0 ** (1 - bias) if bias < 1023 else torch.zeros_like(wide, dtype=torch.bool)
            rounded = torch.where(small, torch.copysign(torch.zeros_like(wide), wide), rounded)
        rounded = torch.where(torch.isfinite(wide) & (wide != 0), rounded, wide)
        if mantissa == 0:  # which leaves NaN nothing to tell it from infinity
            rounded = torch.where(torch.isnan(wide), torch.copysign(torch.full_like(wide, torch.inf), wide), rounded)
        return convert_tensor(rounded, F64, dtype, "wrap") if dtype is not F64 else rounded.reshape(given.shape)

    return run


_COMPLEX: dict[str, Kernel] = {
    "cbrt": lambda z: torch.pow(z, 1 / 3),
    "cosine": torch.cos,
    "divide": torch.div,
    "exponential": torch.exp,
    "exponential_minus_one": torch.expm1,
    "log": torch.log,
    "log_plus_one": torch.log1p,
    "logistic": torch.sigmoid,
    "power": torch.pow,
    "rsqrt": torch.rsqrt,
    "sign": torch.sgn,
    "sine": torch.sin,
    "sqrt": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
    # how a payload takes complex values apart and puts them together
    "complex": torch.complex,
    "imag": torch.imag,
    "real": torch.real,
}
_MAKERS: dict[str, Callable[[Operation], Kernel]] = {
    "bitcast_convert": _bitcast,
    "cholesky": _cholesky,
    "convolution": _convolution,
    "count_leading_zeros": _leading_zeros,
    "fft": _fft,
    "popcnt": _popcnt,
    "reduce_precision": _reduce_precision,
    "shift_left": _shift,
    "shift_right_arithmetic": _shift,
    "shift_right_logical": _shift,
    "triangular_solve": _triangular_solve,
}
COMPUTED = frozenset(_MAKERS)


def maker(op: Operation) -> Callable[[Operation], Kernel] | None:
    """Maker of a kernel for the operation, if torch computes it: complex functions by name, the others above."""
    dialect, _, name = op.name.partition(".")
    if dialect != "stablehlo":
        return None
    if name in _COMPLEX and None in (element(op.operands[0]), element(op.results[0])):
        return lambda _: _COMPLEX[name]
    return _MAKERS.get(name)
