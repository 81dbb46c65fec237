"""Large tensors a piece at a time, so that what is worked out beside a result stays small however large the result is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

PIECE = 1 << 20  # elements: 8 MiB in float64

Index = tuple[slice, ...]


def pieces(shape: Sequence[int]) -> Iterator[Index]:
    """Indices of pieces of a shape, at most PIECE elements each, that cover it in row-major order; all of it if it is small."""
    elements = math.prod(shape)
    if elements <= PIECE:
        yield (slice(None),) * len(shape)
        return
    rows = max(1, PIECE * shape[0] // elements)
    for start in range(0, shape[0], rows):
        for rest in pieces(shape[1:]) if rows == 1 else [(slice(None),) * (len(shape) - 1)]:
            yield (slice(start, start + rows), *rest)


def part(t: torch.Tensor, index: Index) -> torch.Tensor:
    """What a piece of a shape sees of a tensor that broadcasts to it."""
    mine = index[len(index) - t.dim() :]
    return t[tuple(slice(None) if d == 1 else i for d, i in zip(t.shape, mine, strict=True))]


def by_pieces(shape: Sequence[int], f: Callable[..., Sequence[torch.Tensor]], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The results of an elementwise function of tensors that broadcast to `shape`, worked out a piece at a time."""
    found: list[torch.Tensor] = []
    for index in pieces(shape):
        results = f(*(part(t, index) for t in tensors))
        if all(i == slice(None) for i in index):
            return list(results)
        if not found:
            found = [torch.empty(tuple(shape), dtype=r.dtype) for r in results]
        for whole, r in zip(found, results, strict=True):
            whole[index] = r
    return found
