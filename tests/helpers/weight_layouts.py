"""Weights as other tools lay them out, drawn and packed by definition."""

import torch


def words(fields, bits):
    """Fields [rows, n] as s32 [rows, ceil(n * bits / 32)], the first in the lowest bits."""
    held = 32 // bits
    rows, count = fields.shape
    made = torch.zeros(rows, -(-count // held), dtype=torch.int64)
    for column in range(count):
        made[:, column // held] |= fields[:, column].long() << bits * (column % held)
    return torch.where(made > 2**31 - 1, made - 2**32, made).to(torch.int32)


def drawn(seed, out, columns, group, bits):
    """Codes [out, in], zero points [out, groups] and scales [out, groups] of a weight whose values lie around 0."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    zeros = torch.randint(1 << bits - 1, (1 << bits - 1) + 2, (out, groups), generator=generator)
    zeros[0, 0] = 3
    spread = torch.randn(out, columns, generator=generator) * (1 << bits) / 6
    codes = (spread.round() + zeros.repeat_interleave(group, 1)[:, :columns]).clamp(0, (1 << bits) - 1).long()
    return codes, zeros, torch.rand(out, groups, generator=generator).half() + 0.01


def dense(codes, zeros, scales, group, at=None):
    """(code - zero) * scale by group; `at` is the group of each input."""
    at = torch.arange(codes.shape[1]) // group if at is None else at.long()
    return (codes - zeros[:, at]).float() * scales[:, at].float()
