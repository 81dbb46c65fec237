"""Capturing work on a device in CUDA graphs, and undoing what a capture that fails leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class CudaGraphs:
    """Captures graphs of one device into one pool of memory.

    Attributes:
        bytes: what the pool took of the device's memory.
    """

    bytes: int

    def __init__(self, device: str) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.bytes = 0

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                values = run()
                graph.capture_end()
            except BaseException:
                self._give_up(graph)
                raise
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return values, graph.replay

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that an operation broke. Ending it raises before torch's allocator is told, and the allocator would
        go on to keep memory for that graph, and never give back what it has: it is told here, and the next graph has a pool of
        its own."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(AttributeError, RuntimeError):
            index = torch.device(self._device).index or 0
            torch._C._cuda_endAllocateToPool(index, self._pool)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
            torch._C._cuda_releasePool(index, self._pool)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
        self._pool = torch.cuda.graph_pool_handle()
        with contextlib.suppress(RuntimeError):  # torch's random numbers believe in a capture until one ends well
            ends_well = torch.cuda.CUDAGraph()
            ends_well.capture_begin(capture_error_mode="thread_local")
            torch.zeros((), device=self._device)
            ends_well.capture_end()
