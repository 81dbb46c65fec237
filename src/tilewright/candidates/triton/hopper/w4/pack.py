"""Weights of 4 and 8 bits in the order of the matrix unit's left fragment, so that a load of 16 bytes needs no shuffle.

In a block of 64 rows and 64 columns (K), four warps hold 16 rows each. With g = lane // 4 and t = lane % 4, a lane holds rows g
and g + 8 of its warp's rows. Of each 16 columns it holds columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 (PTX ISA 9.0, 9.7.14.5.8 and
9.7.15.5.1); where the other operand has 8 bits, columns 4 t to 4 t + 3, which then share a register. A lane's part of 16
columns is one word of 4-bit codes, or two words of 8-bit codes. One order serves every number of rows of the other operand:
both matrix instructions (`mma.sync`, `wgmma`) take this fragment, and the fragment of halves takes 8-bit operands made halves
in any order along K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewright.candidates.triton.hopper.w4.plan import BLOCK, ROWS, Weights
from tilewright.dtype import BF16, F16, DType
from tilewright.schedule.packed import all_packed_once

AT_ONCE = 1 << 24  # codes that are packed together: what stands between takes 20 bytes each

# Exponents set over a code's bits make it this number plus the code: of a lane's first row, and of its second.
MAGIC = {(4, "f16"): (16, 256), (8, "f16"): (1024, 1024), (4, "bf16"): (128, 128), (8, "bf16"): (128, 128)}


def packed_weights(
    sources: Sequence[torch.Tensor], weights: Weights, operand: DType, *, expanded: bool = False
) -> list[torch.Tensor]:
    """Codes, scales and maybe zero points as kernels read them, on the sources' device; packed once for all kernels, and there:
    a launch may read them before what is ahead of it has ended.
    `expanded`: codes of 4 bits as the bytes that are multiplied by 8-bit floats, their zero points taken off."""
    w = weights
    form = "hopper_w4", w.kind, w.scale_k, w.group, w.k_contiguous, w.interleaved, operand, expanded
    count = 2 if expanded else weights.tensors

    def pack() -> list[torch.Tensor]:
        made = _all_packed(sources, weights, operand, expanded=expanded)
        if made[0].is_cuda:
            torch.cuda.synchronize(made[0].device)
        return made

    return all_packed_once(sources, form, count, pack)


def _all_packed(sources: Sequence[torch.Tensor], weights: Weights, operand: DType, *, expanded: bool) -> list[torch.Tensor]:
    codes, *sides = sources if weights.k_contiguous else [t.T for t in sources]
    if weights.scale is None:
        sides.insert(0, torch.ones((codes.shape[0], 1), dtype=weights.scales.to_torch(), device=codes.device))
    scales, *zeros = sides
    repeats = codes.shape[1] // scales.shape[1] // weights.scale_k
    codes = codes.view(torch.int8) if codes.dtype == torch.uint8 else codes
    halves = 2 if weights.interleaved else 1
    step = max(AT_ONCE // codes.shape[1] // ROWS, 1) * ROWS // halves
    if expanded:
        own = [z.split(step) for z in zeros]
        found = [ready_bytes(part, [z[i] for z in own]) for i, part in enumerate(codes.split(step))]
        return [torch.cat(found), paired_rows(scales.repeat_interleave(repeats, dim=1))]
    parts = codes.reshape(halves, -1, codes.shape[1]).split(step, dim=1)
    words = torch.cat([packed(in_turn(part), weights.kind, operand) for part in parts])
    scales, *zeros = (in_turn(s.reshape(halves, -1, s.shape[1])) for s in (scales, *zeros))
    result = [words, paired_rows(scales.repeat_interleave(repeats, dim=1))]
    if zeros:
        half = half_of(operand)
        first = torch.tensor(MAGIC[weights.kind.bits, half.name], device=codes.device)
        z = zeros[0].to(torch.int32) + bias(weights.kind, operand)
        z = z + first[torch.arange(z.shape[0], device=z.device) // 8 % 2][:, None]
        result.append(paired_rows(z.to(half.to_torch()).repeat_interleave(repeats, dim=1)))
    return result


def in_turn(parts: torch.Tensor) -> torch.Tensor:
    """Rows of matrices [P, M, N] as those of one [P M', N], eight of each in turn, so that a lane has matching rows of two; M'
    is M filled up to a multiple of 8 if there are several."""
    if len(parts) == 1:
        return parts[0]
    eights = torch.nn.functional.pad(parts, (0, 0, 0, -parts.shape[1] % 8)).unflatten(1, (-1, 8))
    return eights.transpose(0, 1).flatten(0, 2)


def half_of(operand: DType) -> DType:
    """The type of 16 bits that holds every value of an operand: f16 for those of 8 bits."""
    return F16 if operand.bits == 8 else operand


def bias(codes: DType, operand: DType) -> int:
    """The number added to a code so that it is stored as an unsigned number; 0 for 8-bit ones that bf16 reads as they are."""
    if not codes.is_integer or codes.kind == "uint" or (codes.bits == 8 and operand is BF16):
        return 0
    return 1 << (codes.bits - 1)


def places(bits: int, operand: DType) -> tuple[tuple[int, int, int], ...]:
    """The places of the fragment's registers in a word: row half, column half, and the bit of the first of two codes.

    The second code is 16 bits up. With f16, codes of row g become 16 + code by setting an exponent over bits 6 to 9, those of
    row g + 8 become 256 + code at bits 2 to 5; the other column half lies 8 bits further round. bf16 has room for one code.
    """
    if bits == 8:
        return (0, 0, 0), (1, 0, 8)
    if operand is BF16:
        return (0, 0, 0), (1, 0, 4), (0, 1, 8), (1, 1, 12)
    return (0, 0, 6), (1, 0, 2), (0, 1, 14), (1, 1, 10)


def packed(codes: torch.Tensor, kind: DType, operand: DType) -> torch.Tensor:
    """Codes [M, K] as words int32 [M' / 64, K / 64, 4 warps, 1 or 2 halves, 32 lanes, 4 words].

    Args:
        codes: one to an element; K is a multiple of 64, M' is M filled up to a multiple of 256.
        kind: s4, u4, s8 or u8.
        operand: f16 or bf16, which they become before they are multiplied, or an operand of 8 bits.
    """
    m, k = codes.shape
    v = codes.to(torch.int32) + bias(kind, operand)  # bytes of either sign are the same once masked
    v = torch.nn.functional.pad(v & ((1 << kind.bits) - 1), (0, 0, 0, -m % ROWS))
    if operand.bits == 8:
        v = v.view(-1, 4, 2, 8, k // BLOCK, 4, 4, 2, 2).movedim(8, 6)  # m64 warp h g | k64 step t pair half
    else:
        v = v.view(-1, 4, 2, 8, k // BLOCK, 4, 2, 4, 2)  # m64 warp h g | k64 step half t pair
    v = v.permute(0, 4, 1, 3, 7, 5, 2, 6, 8)  # m64 k64 warp g t | step h half pair
    if kind.bits == 4:
        word = _word(v, [(v[..., h, kk, :], at) for h, kk, at in places(4, operand)])  # ... step
        return word.reshape(*word.shape[:3], 1, 32, 4).contiguous()
    words = [_word(v, [(v[..., h, kk, :], at) for h, _, at in places(8, operand)]) for kk in (0, 1)]
    word = torch.stack(words, -1)  # m64 k64 warp g t step half
    word = word.reshape(*word.shape[:3], 32, 2, 4).transpose(3, 4)
    return word.contiguous()


def ready_bytes(codes: torch.Tensor, zeros: Sequence[torch.Tensor]) -> torch.Tensor:
    """Codes of 4 bits [M, K] less their zero points ([M, groups], or none) as words int32
    [M' / 64, K / 64, 4 warps, rows g or g + 8, 32 lanes, 4 steps] of the bytes that are multiplied.

    Those are a sign and a magnitude, which in e4m3 is that number by 2**-9. The highest bit of each is stored as the other one.
    """
    v = codes.to(torch.int16)
    for z in zeros:
        v = v - z.to(torch.int16).repeat_interleave(v.shape[1] // z.shape[1], dim=1)
    v = v.abs() | (v < 0).to(torch.int16) << 7
    v = torch.nn.functional.pad((v ^ 128).to(torch.uint8), (0, 0, 0, -v.shape[0] % ROWS))
    v = v.view(-1, 4, 2, 8, v.shape[1] // BLOCK, 4, 4, 4)  # m64 warp h g | k64 step t byte
    v = v.permute(0, 4, 1, 2, 3, 6, 5, 7).contiguous()  # m64 k64 warp h g t step byte
    return v.view(torch.int32).view(*v.shape[:4], 32, 4)


def _word(v: torch.Tensor, parts: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    word = torch.zeros(v.shape[:6], dtype=torch.int64, device=v.device)
    for pair, at in parts:
        word |= (pair[..., 0].long() << at) | (pair[..., 1].long() << (at + 16))
    word = (word | word >> 32) & 0xFFFFFFFF  # what is past the last bit comes round
    return torch.where(word >> 31 > 0, word - (1 << 32), word).to(torch.int32)


def paired_rows(values: torch.Tensor) -> torch.Tensor:
    """Values [M, G], one a row and group, as words int32 [M' / 16, W / V, 8, V]: what a lane needs of rows g and g + 8.

    16-bit values of both rows are one word, of f32 they are two: a row pair has W of them, of which V = gcd(4, W) lie together.
    """
    m, groups = values.shape
    v = torch.nn.functional.pad(values, (0, 0, 0, -m % ROWS))
    words = v.view(-1, 2, 8, groups).permute(0, 2, 3, 1).contiguous().view(torch.int32).flatten(2)
    run = math.gcd(4, words.shape[2])
    return words.view(*words.shape[:2], -1, run).transpose(1, 2).contiguous()
