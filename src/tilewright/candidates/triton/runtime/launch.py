"""Calls of a kernel that takes its sources' memory and its results': pointers alone, on torch's current stream; and counters of
blocks that are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.hardware.target import Target
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Runner
from tilewright.schedule.guard import visible

ALIGNED = 16
SPARE = 32  # streams and captured calls whose counters are made beforehand


def caller(
    read: Sequence[int],
    outputs: Sequence[TensorType],
    launch: Callable[..., None],
    weights: Mapping[int, torch.Tensor],
    target: Target,
    places: Mapping[int, torch.Tensor] | None = None,
) -> Runner:
    """A function that runs a kernel.

    Args:
        read: the sources whose memory it takes, in order.
        outputs: its results' types.
        launch: starts it on the current device, given all pointers.
        weights: sources that do not change, by number.
        target: the device.
        places: memory for some results, by number, instead of new one at each call.
    """
    constant = {i: dense(t) for i, t in weights.items() if i in read}
    fixed = [constant[i].data_ptr() if i in constant else 0 for i in read]
    given = [(at, i) for at, i in enumerate(read) if i not in constant]
    placed = sorted((places or {}).items())
    make = maker([t for i, t in enumerate(outputs) if i not in dict(placed)], target.device)

    def run(sources: Sequence[torch.Tensor], _kept: object = constant) -> list[torch.Tensor]:  # by its address alone
        pointers, _copies = addresses(fixed, given, sources)
        made = make()
        for i, place in placed:
            made.insert(i, place)
        launch(*pointers, *[t.data_ptr() for t in made])
        return made

    return on(target.index, run)


def addresses(
    fixed: list[int], given: Sequence[tuple[int, int]], sources: Sequence[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """The addresses of a kernel's arguments: `fixed`, with those of sources in their places (place and source, each in
    `given`), of a copy where one is not dense or not on a multiple of `ALIGNED`; and the copies, which must live until it is
    launched."""
    found, copies = fixed.copy(), list[torch.Tensor]()
    for at, i in given:
        t = sources[i]
        found[at] = address = t.data_ptr()
        if address % ALIGNED or not t.is_contiguous():
            copies.append(dense(t))
            found[at] = copies[-1].data_ptr()
    return found, copies


def on(index: int, run: Runner) -> Runner:
    """A runner whose calls make a device the current one where it is not."""

    def there(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if torch.cuda.current_device() == index:
            return run(sources)
        with torch.cuda.device(index):
            return run(sources)

    return there


def maker(types: Sequence[TensorType], device: str) -> Callable[[], list[torch.Tensor]]:
    """New tensors of these types at each call, with nothing in them, on a device, which is the current one.

    They come as Inductor's code asks for memory, in a third of the time of `torch.empty`, past all that watches torch.
    """
    results = [(t.shape, torch.empty(t.shape, device="meta").stride(), t.dtype.to_torch()) for t in types]
    quick: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    if quick is None or device == "cpu" or visible():
        return lambda: [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype in results]
    return lambda: [quick(shape, strides, dtype) for shape, strides, dtype in results]


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
        device: the GPU of the counters.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = -(-4 * count // ALIGNED) * ALIGNED // 4, device
        self._of_stream: dict[int, torch.Tensor] = {}
        self._made = self._zeros(SPARE)  # kept: graphs know it by its address
        self._spare = list(self._made.unbind())
        torch.cuda.current_stream(device).synchronize()  # no graph waits for it

    def take(self) -> torch.Tensor:
        """The counters for a call that is about to be launched on the current stream of the device, which is the current
        one."""
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
