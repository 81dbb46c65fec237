"""Weights packed once in a process: kernels for other extents, and other programs with the same weights, share the copy."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from weakref import WeakValueDictionary

import torch

from tilewright.ir.literal import bits_of

WORDS = 1 << 18  # of 32 bits that are summed together: a megabyte
AT_ONCE = 16  # such sums: what stands between takes 100 MB

Place = tuple[int, int, int]  # of a tensor's elements: its storage, the address of the first, bytes
_unwritten: ContextVar[dict[Place, bytes | None] | None] = ContextVar("unwritten", default=None)
_held: WeakValueDictionary[Hashable, torch.Tensor] = WeakValueDictionary()


def return_memory() -> None:
    """Give back to the system what checks and measurements left free in the C library's heap, where it can."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def packed_once(sources: Sequence[torch.Tensor], form: Hashable, pack: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The memory that `pack` makes of `sources`, or made of the same bits before, if anyone still holds that.

    Args:
        sources: the weights, on any one device. They are hashed (SHA-256, 1.8 GB/s where processors have instructions for it,
            and on a GPU sums at the speed of its memory): an address or an object does not tell whether somebody wrote to it
            since.
        form: everything else that the packed memory depends on: expression, instruction, sizes.
        pack: gives packed memory, which nobody writes again.
    """
    return all_packed_once(sources, form, 1, lambda: [pack()])[0]


def all_packed_once(
    sources: Sequence[torch.Tensor], form: Hashable, count: int, pack: Callable[[], Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The memory of `packed_once`, where `pack` gives `count` tensors."""
    key = (form, *((t.device, t.dtype, tuple(t.shape), _bits(t)) for t in sources))
    found = [t for i in range(count) if (t := _held.get((key, i))) is not None]
    if len(found) < count:
        found = list(pack())
        _held.update({(key, i): t for i, t in enumerate(found)})
    return found


@contextmanager
def unwritten(tensors: Sequence[torch.Tensor], digests: dict[Place, bytes | None] | None = None) -> Generator[None]:
    """A block in which nobody writes to these tensors, which the caller holds: each is hashed once. Blocks that are given the
    same `digests` are one such block: nobody writes between them, either. A tensor that torch moves between them is hashed
    again."""
    known = {} if digests is None else digests
    places = {_place(t) for t in tensors if t.is_contiguous()}
    for place in known.keys() - places:  # where others may lie by now
        del known[place]
    for place in places:
        known.setdefault(place)
    token = _unwritten.set(known)
    try:
        yield
    finally:
        _unwritten.reset(token)


def are_unwritten(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether a block around says that nobody writes to these tensors (`unwritten`): hashing them again costs nothing."""
    known = _unwritten.get() or {}
    return bool(tensors) and all(t.is_contiguous() and _place(t) in known for t in tensors)


def _place(t: torch.Tensor) -> Place:
    return t.untyped_storage()._cdata, t.data_ptr(), t.nbytes  # pyright: ignore[reportPrivateUsage]


def _bits(t: torch.Tensor) -> bytes:
    """A digest of a tensor's bytes."""
    known = _unwritten.get() or {}
    found = known.get(_place(t)) if t.is_contiguous() else None
    if found is None:
        flat = bits_of(t)
        found = hashlib.sha256((flat if flat.device.type == "cpu" else sums(flat).cpu()).numpy().data).digest()
        if t.is_contiguous() and _place(t) in known:
            known[_place(t)] = found
    return found


def sums(flat: torch.Tensor) -> torch.Tensor:
    """128 bits for every megabyte of u8 [n], computed where it is: u8 [16 * megabytes].

    Of 32-bit words x with random 64-bit keys a, the upper half of sum(a x) modulo 2**64, four times over: two megabytes that
    differ agree with a chance below 2**-120, whoever chose them, for the keys are this process's own (multiply-shift of
    vectors: Thorup 2015, "High Speed Hashing for Integers and Strings", arXiv 1504.06804).
    """
    whole = -(-flat.numel() // (4 * WORDS)) * 4 * WORDS
    if flat.numel() < whole:
        flat = torch.cat((flat, flat.new_zeros(whole - flat.numel())))
    found: list[torch.Tensor] = []
    for part in flat.view(torch.int32).reshape(-1, WORDS).split(AT_ONCE):
        words = part.to(torch.int64) & 0xFFFFFFFF
        found.append(torch.stack([(words * key).sum(1) >> 32 for key in _keys(str(flat.device))], 1))
    return torch.cat(found).to(torch.int32).reshape(-1).view(torch.uint8)


@cache
def _keys(device: str) -> torch.Tensor:
    chance = torch.Generator().manual_seed(secrets.randbits(63))
    return torch.randint(-(1 << 63), (1 << 63) - 1, (4, WORDS), dtype=torch.int64, generator=chance).to(device)
