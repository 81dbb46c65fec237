"""Readers of weights that other tools quantised: GPTQ, AWQ, compressed-tensors, 8-bit codes, MX, NVFP4, torch's int4.

Every reader takes the tensors of one layer as they stand in a checkpoint, and gives the same weight, bit for bit, as a
`QuantizedWeight`. `checkpoint` opens the files and calls the reader that fits. Zero points that are the middle code everywhere
are dropped, whatever a label says: the codes are then signed, which costs a kernel less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from tilewright.dtype import F4E2M1FN, S4, S8, U4, U8, from_torch
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.ir.few_bits import unpack_halves
from tilewright.runtime.quantized_weight import QuantizedWeight

# Column of 8 that each 4 bits of a word hold, from the lowest (AutoAWQ 0.2.9, awq/modules/linear/gemm.py)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
ONES = {4: 0x11111111, 8: 0x01010101}  # one in each field of a word
SURE = 0.35  # steps by which codes may lie off their zero points on average, and still tell them from those less one
TILE_ROWS = 64  # rows that torch's packing for CPUs takes at once, at most (64 with AVX-512, 32 with AVX2)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    version: int | None = None,
) -> QuantizedWeight:
    """GPTQ's layers: (code - zero) * scale, groups along `in`.

    Version 1 stores zero points less one, version 2 as they are. Which it is, is read off
    the zero points: of symmetric weights all are the middle code (AutoGPTQ stores 7 for it), of others the codes lie around
    their zero points, not a step above. Source of the layout: AutoGPTQ 0.7.1 (qlinear_cuda_old.py), GPTQModel 7.7
    (utils/model.py).

    Args:
        qweight: s32 [in * bits / 32, out], the lowest bits first along `in`.
        qzeros: s32 [groups, out * bits / 32], the lowest bits first along `out`.
        scales: [groups, out].
        g_idx: s32 [in], the group of each input; with "act order" groups are not runs, and the weight then has an `order`.
        version: 1 or 2, if the zero points do not tell.

    Raises:
        TypeMismatchError: extents or types do not fit together.
        InputError: zero points that do not tell the version and no version, or groups that are not equally large.
        UnsupportedError: neither 4 nor 8 bits.
    """
    _words("qweight", qweight)
    _words("qzeros", qzeros)
    _matrix("scales", scales)
    out = qweight.shape[1]
    bits = 32 * qzeros.shape[1] // max(out, 1)
    if bits not in (4, 8):
        raise UnsupportedError(f"GPTQ weights of {bits} bits", hint="4 or 8 bits")
    held = 32 // bits
    if scales.shape != (qzeros.shape[0], out) or qzeros.shape[1] * held != out:
        raise TypeMismatchError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} are no layer of GPTQ",
            hint=f"[in/{held}, out], [groups, out/{held}] and [groups, out]",
        )
    if not qweight.numel() or not scales.numel():
        raise TypeMismatchError(f"qweight {list(qweight.shape)} and scales {list(scales.shape)} hold no weight")
    codes = _fields(qweight.t(), bits)
    # whole words plus one in each field: where a zero of 0 was stored less one, it borrowed from its neighbour
    as_version = {1: _fields(qzeros + ONES[bits], bits).t(), 2: _fields(qzeros, bits).t()}
    count, groups = codes.shape[1], scales.shape[0]
    order, group = (None, -(-count // groups)) if g_idx is None else _order(g_idx, count, groups)
    codes = codes if order is None else codes[:, order]
    version = version or _version(codes, as_version, group, bits)
    if version not in (1, 2):
        raise InputError(f"GPTQ version {version}", hint="1 or 2")
    return from_unsigned(codes, scales.t(), as_version[version], group, bits, order)


def _version(codes: torch.Tensor, as_version: Mapping[int, torch.Tensor], group: int, bits: int) -> int:
    """Tell whether zero points are stored less one (1) or as they are (2), given what they are in either case.

    Raises:
        InputError: they do not tell.
    """
    for version, zeros in as_version.items():
        if bool((zeros == 1 << bits - 1).all()):
            return version
    mean = int(codes.sum(dtype=torch.int64)) / max(codes.numel(), 1)
    filled = torch.full((codes.shape[1] // group + 1,), group)[: -(-codes.shape[1] // group)]
    filled[-1] = codes.shape[1] - group * (len(filled) - 1)
    share = filled.to(torch.float64) / codes.shape[1]
    found = {v: abs(mean - float((z.to(torch.float64) * share).sum(1).mean())) for v, z in as_version.items()}
    version = min(found, key=found.__getitem__)
    if found[version] > SURE or found[3 - version] < 1 - SURE:
        raise InputError(
            f"codes lie {found[1]:.2f} steps off their zero points as version 1 and {found[2]:.2f} as version 2",
            hint="version=1 or 2; in a config.json beside the files: quantization_config.checkpoint_format gptq or gptq_v2",
        )
    return version


def _order(g_idx: torch.Tensor, count: int, groups: int) -> tuple[torch.Tensor | None, int]:
    """The inputs group by group, None if that is how they stand, and how many a group has.

    Raises:
        TypeMismatchError: it is not one group for each input.
        InputError: groups are missing or differ in size.
    """
    if tuple(g_idx.shape) != (count,) or g_idx.is_floating_point():
        raise TypeMismatchError(f"g_idx {g_idx.dtype}{list(g_idx.shape)}", hint=f"a group for each of {count} inputs")
    index = g_idx.to(torch.int64)
    if bool((index < 0).any()) or bool((index >= groups).any()):
        raise InputError(f"g_idx names groups from {int(index.min())} to {int(index.max())}", hint=f"there are {groups}")
    sizes = torch.bincount(index, minlength=groups)
    size = int(sizes[0])
    if size == 0 or bool((sizes[:-1] != size).any()) or not 0 < int(sizes[-1]) <= size:
        raise InputError(
            f"groups of {int(sizes.min())} to {int(sizes.max())} inputs", hint="quantise again with groups of one size"
        )
    order = torch.argsort(index, stable=True)
    return (None if torch.equal(order, torch.arange(count, device=order.device)) else order), size


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """AWQ's layers (the form "gemm"): (code - zero) * scale, columns interleaved within words (AutoAWQ 0.2.9).

    Args:
        qweight: s32 [in, out / 8], whose 4-bit fields hold columns 0, 2, 4, 6, 1, 3, 5, 7 of 8, the lowest first.
        qzeros: s32 [groups, out / 8], the same way.
        scales: [groups, out].

    Raises:
        TypeMismatchError: extents or types do not fit together.
    """
    _words("qweight", qweight)
    _words("qzeros", qzeros)
    _matrix("scales", scales)
    count, out = qweight.shape[0], 8 * qweight.shape[1]
    groups = scales.shape[0]
    if scales.shape != (groups, out) or qzeros.shape != (groups, qweight.shape[1]) or not groups or count % groups:
        raise TypeMismatchError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} are no layer of AWQ",
            hint="[in, out/8], [groups, out/8] and [groups, out], in a multiple of groups: the form called gemm",
        )
    codes, zeros = (_fields(t, 4, AWQ_COLUMNS).t() for t in (qweight, qzeros))
    return from_unsigned(codes, scales.t(), zeros, count // groups, 4)


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor | None = None,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Layers of compressed-tensors' format "pack-quantized": (code - zero) * scale of signed codes, kept plus 2**(bits - 1).

    Source of the layout: compressed-tensors 0.20, compressors/pack_quantized.

    Args:
        weight_packed: s32 [out, ceil(in * bits / 32)], the lowest bits first along `in`.
        weight_scale: [out, groups], [out, 1] or one value.
        weight_shape: [out, in]; without it `in` fills the words, at 4 bits.
        weight_zero_point: s32 [ceil(out * bits / 32), groups], packed along `out` (or s8 [out, groups] as they are).
        weight_g_idx: the group of each input, -1 for none said.

    Raises:
        TypeMismatchError: extents or types do not fit together.
        UnsupportedError: neither 4 nor 8 bits.
    """
    _words("weight_packed", weight_packed)
    out, words = weight_packed.shape
    shape = (out, words * 8) if weight_shape is None else tuple(int(d) for d in weight_shape.reshape(-1))
    if len(shape) != 2 or shape[0] != out or shape[1] < 1:
        what = f"weight_packed {list(weight_packed.shape)} is no weight of shape {list(shape)}"
        raise TypeMismatchError(what, hint="[out, ceil(in * bits / 32)], and [out, in] as weight_shape")
    count = shape[1]
    bits = next((b for b in (4, 8) if -(-count * b // 32) == words), None)
    if bits is None:
        raise UnsupportedError(f"{count} codes in {words} words of 32 bits", hint="4 or 8 bits a code")
    if not weight_packed.numel() or not weight_scale.numel():
        raise TypeMismatchError(f"weight_packed {list(weight_packed.shape)}, scale {list(weight_scale.shape)} hold no weight")
    middle = 1 << bits - 1
    codes = _fields(weight_packed, bits)[:, :count]
    scale = weight_scale.reshape(1, 1).expand(out, 1) if weight_scale.numel() == 1 else weight_scale
    if scale.dim() != 2 or scale.shape[0] != out or not 0 < scale.shape[1] <= count:
        raise TypeMismatchError(f"weight_scale {list(weight_scale.shape)} for {out} rows", hint="[out, groups]")
    groups = scale.shape[1]
    zeros = torch.full((out, groups), middle, dtype=torch.int32, device=codes.device)
    if weight_zero_point is not None:
        if weight_zero_point.dtype == torch.int32 and weight_zero_point.shape == (-(-out * bits // 32), groups):
            zeros = _fields(weight_zero_point.t(), bits)[:, :out].t()
        elif weight_zero_point.dtype == torch.int8 and weight_zero_point.shape == (out, groups):
            zeros = weight_zero_point.to(torch.int32) + middle
        else:
            raise TypeMismatchError(
                f"weight_zero_point {weight_zero_point.dtype}{list(weight_zero_point.shape)} for {groups} groups of {out} rows",
                hint="packed along the rows in s32, or s8 [out, groups]",
            )
    order, group = None, -(-count // groups)
    if weight_g_idx is not None and not bool((weight_g_idx == -1).all()):
        order, group = _order(weight_g_idx, count, groups)
        codes = codes if order is None else codes[:, order]
    return from_unsigned(codes, scale, zeros, group, bits, order)


def from_codes(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    *,
    block: tuple[int, int] | None = None,
) -> QuantizedWeight:
    """8-bit codes as they are: (code - zero) * scale. Layers of compressed-tensors' formats "float-quantized", "int-quantized"
    and "mxfp8-quantized" (0.20), and of fine-grained fp8 (DeepSeek-V3, transformers' `FineGrainedFP8Config`), whose
    `weight_scale_inv` is the scale all the same.

    Args:
        weight: f8e4m3fn, f8e5m2 or s8 [out, in].
        weight_scale: one value, one a row ([out] or [out, 1]), one a group of a row, or one a block of both axes, where the
            last blocks may be cut; a float, or exponents of e8m0 (also as u8).
        weight_zero_point: s8, as many.
        block: extents [rows, columns] of the blocks; if not given they are of 128 where that fits their number, and equally
            large else.

    Raises:
        TypeMismatchError: extents or types do not fit together.
    """
    if weight.dim() != 2 or not weight.numel() or weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        what = f"weight is {str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}"
        raise TypeMismatchError(what, hint="f8e4m3fn, f8e5m2 or s8 [out, in]")
    out, count = weight.shape
    scale = _floats(weight_scale)
    scale = scale.reshape(-1, 1) if scale.numel() == 1 or scale.shape == (out,) else scale
    if scale.dim() != 2 or not scale.numel():
        raise TypeMismatchError(f"weight_scale {list(weight_scale.shape)} for {[out, count]}", hint="[out, groups], or blocks")
    extents = block or (_extent(out, scale.shape[0]), _extent(count, scale.shape[1]))
    if (-(-out // extents[0]), -(-count // extents[1])) != tuple(scale.shape):
        what = f"weight_scale {list(weight_scale.shape)} for {[out, count]}"
        raise TypeMismatchError(what, hint=f"one for each block of {list(extents)}")
    sides = (s.repeat_interleave(extents[0], dim=0)[:out] for s in (scale, weight_zero_point) if s is not None)
    scales, *zeros = (s.contiguous() for s in sides)
    plain = not zeros or not bool(zeros[0].any())
    return QuantizedWeight.of(
        weight, scales, from_torch(weight.dtype), min(extents[1], count), zero_points=None if plain else zeros[0]
    )


def _extent(count: int, parts: int) -> int:
    """The extent of blocks of which so many cover an axis: 128 as a rule, or as many as all have alike."""
    return 128 if -(-count // 128) == parts and parts > 1 else -(-count // parts)


def from_fp4(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_global_scale: torch.Tensor | None = None,
    *,
    divides: bool = True,
) -> QuantizedWeight:
    """4-bit floats, two a byte, the first in the low half: MXFP4 (a power of two for 32 of them) and NVFP4 (an f8e4m3fn for 16,
    and a factor of all), as compressed-tensors 0.20 writes them ("mxfp4-pack-quantized", "nvfp4-pack-quantized").

    Args:
        weight_packed: u8 [out, in / 2].
        weight_scale: f8e4m3fn or u8 (exponents of e8m0) [out, groups].
        weight_global_scale: f32, one value.
        divides: scales are divided by it; else multiplied.

    Raises:
        TypeMismatchError: extents or types do not fit together.
    """
    if weight_packed.dim() != 2 or weight_packed.dtype != torch.uint8 or not weight_packed.numel():
        what = f"weight_packed is {str(weight_packed.dtype).removeprefix('torch.')}{list(weight_packed.shape)}"
        raise TypeMismatchError(what, hint="u8 [out, in / 2]")
    out, count = weight_packed.shape[0], 2 * weight_packed.shape[1]
    if weight_scale.dim() != 2 or weight_scale.shape[0] != out or not weight_scale.numel() or count % weight_scale.shape[1]:
        raise TypeMismatchError(f"weight_scale {list(weight_scale.shape)} for {[out, count]}", hint="[out, groups]")
    group = count // weight_scale.shape[1]
    factor = None
    if weight_global_scale is not None:
        if weight_global_scale.numel() != 1:
            raise TypeMismatchError(f"weight_global_scale {list(weight_global_scale.shape)}", hint="one value")
        factor = weight_global_scale.reshape(1).to(torch.float32)
    kept = weight_scale.dtype is torch.float8_e4m3fn and factor is not None
    scales = (weight_scale if kept else _floats(weight_scale)).contiguous()
    return QuantizedWeight(F4E2M1FN, weight_packed.contiguous(), scales, count, group, factor=factor, divides=divides)


def _floats(scale: torch.Tensor) -> torch.Tensor:
    """Scales as floats of 16 bits or more: exponents (e8m0, or its bytes) and 8-bit floats as bf16, which holds them."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        code = scale.view(torch.uint8).to(torch.int16)
        bits = torch.where(code == 0, 0x40, torch.where(code == 255, 0x7FC0, code << 7))  # 2**-127 is denormal, 255 is NaN
        return bits.to(torch.int16).view(torch.bfloat16)
    if not scale.is_floating_point():
        raise TypeMismatchError(f"scales of {str(scale.dtype).removeprefix('torch.')}", hint="floats, or exponents as u8")
    return scale.to(torch.bfloat16) if scale.itemsize == 1 else scale


def from_torch_int4(
    packed: torch.Tensor, scales_and_zeros: torch.Tensor, *, shape: tuple[int, int] | None = None
) -> QuantizedWeight:
    """A weight from the operands of `torch.ops.aten._weight_int4pack_mm` (and its form for CPUs): (code - 8) * scale + zero,
    with a real zero.

    The layout for CPUs depends on the processor: it is learnt by packing numbered positions, and packing the result again must
    give the same bytes. Source of that for GPUs: torch 2.11, aten/src/ATen/native/cuda/int4mm.cu.

    Args:
        packed: s32 [out / 8, in / (16 * tiles), 32, tiles / 2] of `_convert_weight_to_int4pack`, or u8 [out, in / 2] of
            `_convert_weight_to_int4pack_for_cpu` on this processor.
        scales_and_zeros: [groups, out, 2].
        shape: [out, in] if it was padded to be packed.

    Raises:
        TypeMismatchError: extents or types do not fit together.
        InputError: bytes that were packed on another kind of processor.
    """
    if scales_and_zeros.dim() != 3 or scales_and_zeros.shape[2] != 2 or not scales_and_zeros.numel():
        raise TypeMismatchError(f"scales and zeros of shape {list(scales_and_zeros.shape)}", hint="[groups, out, 2]")
    if packed.dtype == torch.int32 and packed.dim() == 4 and packed.shape[2] == 32:
        codes = _from_fragments(packed)
    elif packed.dtype == torch.uint8 and packed.dim() == 2:
        codes = _from_cpu_tiles(packed)
    else:
        raise TypeMismatchError(
            f"{packed.dtype}{list(packed.shape)} is not torch's layout of 4-bit weights",
            hint="s32 [out/8, in/(16 tiles), 32, tiles/2], or u8 [out, in/2] from a CPU",
        )
    groups, rows = scales_and_zeros.shape[0], scales_and_zeros.shape[1]
    if rows > codes.shape[0] or codes.shape[1] % groups:
        what = f"{groups} groups of {rows} rows for codes {list(codes.shape)}"
        raise TypeMismatchError(what, hint="scales and zeros [groups, out, 2], in a multiple of groups")
    group = codes.shape[1] // groups
    out, count = shape or (rows, codes.shape[1])
    if out > rows or count > codes.shape[1]:
        what = f"shape {[out, count]} is larger than what is packed, {[rows, codes.shape[1]]}"
        raise TypeMismatchError(what, hint="[out, in] before padding, or none")
    needed = -(-count // group)
    scales, offsets = (scales_and_zeros[:needed, :out, i].t() for i in range(2))
    offsets = offsets.to(torch.float32).contiguous()
    signed = codes[:out, :count].to(torch.int8) - 8
    return QuantizedWeight.of(signed, scales, S4, group, offsets=offsets if bool(offsets.any()) else None)


def _from_fragments(packed: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] of torch's layout for GPUs: a word holds, for one lane of the matrix unit's right operand (m16n8k16, row
    lane / 4), both halves of two tiles of 16 along K, neighbours 16 bits apart."""
    row_tiles, column_tiles, _, pairs = packed.shape
    lane, field = torch.arange(32), torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32)  # field of each value
    value = torch.arange(8)
    along = (lane % 4)[:, None] * 2 + value % 2 + value // 2 % 2 * 8 + value // 4 * 16  # [32, 8] within two tiles
    words = packed.cpu()[..., None] >> 4 * field & 15  # [row tiles, column tiles, 32, pairs, 8]
    codes = torch.empty(row_tiles, 8, column_tiles, pairs, 32, dtype=torch.int32)
    rows = (lane // 4)[:, None].expand(32, 8)
    codes[:, rows, :, :, along] = words.permute(2, 4, 0, 1, 3)
    return codes.reshape(row_tiles * 8, column_tiles * pairs * 32).to(packed.device)


def _from_cpu_tiles(packed: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] of torch's layout for the processor at hand.

    Raises:
        InputError: it was packed elsewhere, or has a shape that torch does not pack.
    """
    out, count = packed.shape[0], 2 * packed.shape[1]
    full = out // TILE_ROWS * TILE_ROWS
    codes = torch.empty(out, count, dtype=torch.int32)
    try:
        for first, last, rows in ((0, full, TILE_ROWS), (full, out, out - full)):
            if last > first:
                tiles = unpack_halves(packed[first:last].cpu(), count, U4).reshape(-1, rows * count)
                places = _cpu_places(rows, count)
                codes[first:last] = torch.empty_like(tiles).index_copy_(1, places, tiles).reshape(-1, count)
        same = torch.equal(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), packed.cpu())
    except RuntimeError as error:
        raise InputError(f"torch packs no weight {[out, count]}: {str(error).splitlines()[0]}") from error
    if not same:
        raise InputError(
            "4-bit weights that were packed on another kind of processor", hint="the codes, or what is packed for a GPU"
        )
    return codes


def _cpu_places(rows: int, count: int) -> torch.Tensor:
    """The source of each 4-bit field of packed [rows, count]: its position in the matrix, found 4 bits of it at a time."""
    places = torch.zeros(rows * count, dtype=torch.int64)
    numbered = torch.arange(rows * count).reshape(rows, count)
    for shift in range(0, max(1, math.ceil(math.log2(rows * count))), 4):
        probe = (numbered >> shift & 15).to(torch.int32)
        seen = torch.ops.aten._convert_weight_to_int4pack_for_cpu(probe, 1)
        places += unpack_halves(seen, count, U4).reshape(-1).to(torch.int64) << shift
    return places


def _words(what: str, t: torch.Tensor) -> None:
    if t.dtype != torch.int32 or t.dim() != 2:
        raise TypeMismatchError(f"{what} is {str(t.dtype).removeprefix('torch.')}{list(t.shape)}", hint="an s32 matrix")


def _matrix(what: str, t: torch.Tensor) -> None:
    if not t.is_floating_point() or t.dim() != 2 or not t.numel():
        raise TypeMismatchError(f"{what} are {str(t.dtype).removeprefix('torch.')}{list(t.shape)}", hint="a float matrix")


def _fields(words: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """The fields of s32 [rows, n], the lowest bits of a word first: u8 [rows, n * 32 / bits]. With an order, the column that
    each field of a word holds."""
    rows, count = words.shape
    low_first = words.reshape(-1).view(torch.uint8).reshape(rows, 4 * count)
    fields = unpack_halves(low_first, 2 * low_first.shape[1], U4) if bits == 4 else low_first
    if order is None:
        return fields
    column = torch.argsort(torch.tensor(order, device=words.device))
    return fields.reshape(rows, count, len(order))[..., column].flatten(1)


def from_unsigned(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int, bits: int, order: torch.Tensor | None = None
) -> QuantizedWeight:
    """Unsigned codes [out, in] with zero points [out, groups]; signed and without, if all are the middle code."""
    middle = 1 << bits - 1
    if bool((zeros == middle).all()):
        return QuantizedWeight.of(codes.to(torch.int16) - middle, scales, S4 if bits == 4 else S8, group, order=order)
    return QuantizedWeight.of(codes, scales, U4 if bits == 4 else U8, group, zero_points=zeros, order=order)
