"""Large tensors a piece at a time, so that intermediates of a result stay small however large the result is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

PIECE = 1 << 20  # elements: 8 MiB in float64
ON_GPU = 16  # times as many on a GPU, which works on a million in less time than an operation takes to be launched

Index = tuple[slice, ...]


def most_at_once(*tensors: torch.Tensor) -> int:
    """Elements of a piece, where these tensors are."""
    return PIECE if all(t.device.type == "cpu" for t in tensors) else ON_GPU * PIECE


def pieces(shape: Sequence[int], most: int) -> Iterator[Index]:
    """Indices of pieces of a shape, at most so many elements each, that cover it in row-major order; all of a small one."""
    elements = math.prod(shape)
    if elements <= most:
        yield (slice(None),) * len(shape)
        return
    rows = max(1, most * shape[0] // elements)
    for start in range(0, shape[0], rows):
        for rest in pieces(shape[1:], most) if rows == 1 else [(slice(None),) * (len(shape) - 1)]:
            yield (slice(start, start + rows), *rest)


def part(t: torch.Tensor, index: Index) -> torch.Tensor:
    """The part of a broadcast tensor that a piece of the whole shape reads."""
    mine = index[len(index) - t.dim() :]
    return t[tuple(slice(None) if d == 1 else i for d, i in zip(t.shape, mine, strict=True))]


def by_pieces(shape: Sequence[int], f: Callable[..., Sequence[torch.Tensor]], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The results of an elementwise function of tensors that broadcast to `shape`, computed a piece at a time."""
    found: list[torch.Tensor] = []
    for index in pieces(shape, most_at_once(*tensors)):
        results = f(*(part(t, index) for t in tensors))
        if all(i == slice(None) for i in index):
            return list(results)
        if not found:
            found = [torch.empty(tuple(shape), dtype=r.dtype) for r in results]
        for whole, r in zip(found, results, strict=True):
            whole[index] = r
    return found
