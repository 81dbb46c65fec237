"""Memory in which a wrong kernel shows: filled with NaN before use, watched on both sides, and rows more than 2 GiB apart.

All bytes are 0xFF, which is NaN in every float type and -1 in every signed integer. A result that is not written, or is added
to after a multiplication by zero, then holds NaN; so does a sum over an element beyond a source's end.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SIDE_BYTES = 4096
BYTE = 0xFF
FAR_BYTES = 1 << 31  # where offsets of 32 bits end

_poisoners: list[Callable[[], None]] = []
_preparing = False


@contextlib.contextmanager
def preparing() -> Generator[None]:
    """Runners that are prepared in here are for examination: they ask torch for all memory, so that `Watch` sees it."""
    global _preparing
    _preparing = True
    try:
        yield
    finally:
        _preparing = False


def visible() -> bool:
    """Tell whether what is prepared now must ask torch for its memory."""
    return _preparing


def before_runs(poison: Callable[[], None]) -> None:
    """Have `poison` called before each run of a kernel that is examined: it fills free memory of an allocator with 0xFF."""
    _poisoners.append(poison)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A dense tensor of NaN, with 4 KiB of the same before and behind it in its storage."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.full((size + 2 * SIDE_BYTES,), BYTE, dtype=torch.uint8, device=device)
    return raw[SIDE_BYTES : SIDE_BYTES + size].view(dtype).view(tuple(shape))


def guarded(t: torch.Tensor) -> torch.Tensor:
    """A dense copy with watched memory on both sides."""
    return allocate(t.shape, t.dtype, t.device).copy_(t)


def intact(t: torch.Tensor) -> bool:
    """Tell whether nobody wrote beside a tensor that `allocate` made, or a view of one."""
    raw = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())  # pyright: ignore[reportUnknownMemberType]
    return bool((raw[:SIDE_BYTES] == BYTE).all()) and bool((raw[-SIDE_BYTES:] == BYTE).all())


def otherwise_laid_out(t: torch.Tensor) -> torch.Tensor:
    """The same values with the last two axes exchanged in memory and one element, NaN, between rows."""
    if t.dim() < 2:
        return guarded(t)
    *batch, rows, columns = t.shape
    return allocate((*batch, columns, rows + 1), t.dtype, t.device)[..., :rows].transpose(-1, -2).copy_(t)


def with_wide_strides(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The same values with the parts along the first axis so far from one another that the last lies past 2^31 bytes.

    Those of one extent along it lie in turns, in one allocation, since a GPU takes long for new memory of such a size. On a CPU
    only the pages that hold something take memory. None where there is one part, or too little memory.
    """
    together: dict[int, list[tuple[int, int]]] = {}
    for place, t in enumerate(tensors):
        axis = next((i for i, extent in enumerate(t.shape) if extent > 1), None)
        if axis is not None and axis < t.dim() - 1 and t.numel():
            together.setdefault(t.shape[axis], []).append((place, axis))
    found: list[torch.Tensor | None] = [None] * len(tensors)
    for extent, some in together.items():
        inner = [tensors[place].nbytes // extent for place, _ in some]
        begins = [0, *itertools.accumulate(size + -size % mmap.PAGESIZE for size in inner)]
        step = max(-(-FAR_BYTES // (extent - 1)), begins[-1])
        step += -step % mmap.PAGESIZE
        device = tensors[some[0][0]].device
        try:
            raw = (
                _sparse(step * extent) if device.type == "cpu" else torch.empty(step * extent, dtype=torch.uint8, device=device)
            )
        except (OSError, RuntimeError, ValueError):
            continue
        for (place, axis), begin in zip(some, begins, strict=False):
            t = tensors[place]
            dense = torch.empty(t.shape, device="meta").stride()
            strides = [step // t.itemsize if i == axis else s for i, s in enumerate(dense)]
            found[place] = raw.view(t.dtype).as_strided(t.shape, strides, begin // t.itemsize).copy_(t)
    return found


def _sparse(size: int) -> torch.Tensor:
    """Memory of which no page exists before it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Watch(TorchDispatchMode):
    """A mode in which memory that is asked of torch without contents comes from `allocate`."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _UNWRITTEN or given.layout != torch.strided or given.device.type == "meta":
            return given
        if not given.is_contiguous() or given.is_quantized or given.is_pinned():
            return given
        made = allocate(given.shape, given.dtype, given.device)
        self._made.append(made.detach())  # which stays on this memory, whatever `made` is set to
        return made

    def intact(self) -> bool:
        """Tell whether nobody wrote beside what was given out since this was last asked."""
        made, self._made = self._made, []
        return all(intact(t) for t in made)


_UNWRITTEN: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


def poison(types: Sequence[tuple[tuple[int, ...], torch.dtype]], device: str) -> None:
    """Fill free memory that an allocator is likely to hand out next for tensors of these types."""
    for call in _poisoners:
        call()
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in types for _ in range(2)]
    held = [torch.full((size,), BYTE, dtype=torch.uint8, device=device) for size in sizes]
    del held
