"""Calls of a kernel that takes its sources' memory and its results': pointers alone, on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tilewright.hardware.target import Target
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Runner

ALIGNED = 16


def caller(
    read: Sequence[int],
    outputs: Sequence[TensorType],
    launch: Callable[..., None],
    weights: Mapping[int, torch.Tensor],
    target: Target,
) -> Runner:
    """What runs a kernel.

    Args:
        read: the sources whose memory it takes, in order.
        outputs: its results' types.
        launch: starts it on the current device, given all pointers.
        weights: sources that do not change, by number.
        target: the device.
    """
    constant = {i: dense(t) for i, t in weights.items() if i in read}
    results = [(t.shape, t.dtype.to_torch()) for t in outputs]
    device = torch.device(target.device)

    def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        held = [constant[i] if i in constant else dense(sources[i]) for i in read]
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in results]
        pointers = [t.data_ptr() for t in (*held, *made)]
        if torch.cuda.current_device() == target.index:
            launch(*pointers)
        else:
            with torch.cuda.device(target.index):
                launch(*pointers)
        return made

    return run


def dense(t: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major order, from a multiple of `ALIGNED` bytes on: itself, or a copy."""
    if t.is_contiguous() and t.data_ptr() % ALIGNED == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)
