"""Calls of a kernel that takes its sources' memory and its results': pointers alone, on torch's current stream; and counters of
blocks that are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tilewright.hardware.target import Target
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Runner

ALIGNED = 16
SPARE = 32  # streams and captured calls whose counters are made beforehand


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


class Counters:
    """Numbers that a call of a kernel finds at zero and leaves at zero.

    Calls on one stream follow one another and share them. A call that is captured has its own, since its graph may run beside
    other graphs and other calls; they are made beforehand, as long as there are some, for clearing them is a step of the graph.

    Args:
        count: numbers of 32 bits that a call needs.
        device: where.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = -(-4 * count // ALIGNED) * ALIGNED // 4, device
        self._of_stream: dict[int, torch.Tensor] = {}
        self._made = self._zeros(SPARE)  # kept: graphs know it by its address
        self._spare = list(self._made.unbind())
        torch.cuda.current_stream(device).synchronize()  # no graph waits for it

    def take(self) -> torch.Tensor:
        """For a call that is about to be launched on the current stream of the device, which is the current one."""
        if torch.cuda.is_current_stream_capturing():
            return self._fresh()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if stream not in self._of_stream:
            self._of_stream[stream] = self._fresh()  # what is allocated now may be of a pool that others empty
        return self._of_stream[stream]

    def _fresh(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else self._zeros()

    def _zeros(self, *several: int) -> torch.Tensor:
        return torch.zeros((*several, self._count), dtype=torch.int32, device=self._device)
