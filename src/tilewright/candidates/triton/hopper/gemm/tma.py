"""Arrays that TMA reads and writes a box at a time, of up to five axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from tilewright.candidates.triton.runtime.launch import Start
from tilewright.candidates.triton.runtime.versions import tensor_map
from tilewright.ir.extent import extent_at
from tilewright.lowering.access import AccessMap, StridedDigit
from tilewright.schedule.recipe import MachineCode, Parts, TensorMap

ALIGNED = 16  # bytes, of addresses and of every stride but the last
AXES = 5
MOST_KEPT = 256  # argument lists by address; a program's addresses repeat
TMA_TYPES = {"bf16": "bf16", "f16": "fp16", "s8": "i8", "u8": "i8", "f8e4m3fn": "fp8e4nv", "f8e5m2": "fp8e5"}


@dataclass(frozen=True)
class TmaView:
    """An array, and the boxes in which TMA moves it.

    Attributes:
        offset: its first element, in elements from the address.
        shape, strides: in elements, outer first; the last stride is 1.
        box: extents of a box along each axis.
        element_bytes: bytes of an element.
        digits: of a result, for each axis whose digit its coordinate is: of the number of the matrix, row or column.
        m_major: rows of a result are its contiguous axis.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_bytes: int
    digits: tuple[tuple[str, int, int | None], ...] = ()
    m_major: bool = False

    def coordinates(self, b: str, row: str, column: str, spelt: Callable[[int], str] = str) -> list[str]:
        """The coordinates, in a kernel's text, of the box that starts at a row of a matrix of the batch and at a column, with
        extents as they are `spelt` there."""
        names = {"b": b, "row": row, "column": column}
        found: list[str] = []
        for name, inner, extent in self.digits:
            part = names[name] if inner == 1 else f"{names[name]} // {spelt(inner)}"
            found.append(part if extent is None else f"({part}) % {spelt(extent)}")
        return found

    def at(self, values: Mapping[str, int]) -> TmaView:
        """The array for values of the dims that its extents leave open, by name."""
        shape, strides = (tuple(extent_at(x, values) for x in some) for some in (self.shape, self.strides))
        return replace(self, offset=extent_at(self.offset, values), shape=shape, strides=strides)

    def map(self, meta: Mapping[str, Any]) -> TensorMap:
        """The arguments of a descriptor of the array. `meta`: what Triton says of the descriptor's boxes."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        dtype, size = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["elem_size"]
        offset = self.offset * self.element_bytes
        return TensorMap(offset, dtype, meta["swizzle"], size, tuple(meta["block_size"]), self.shape, self.strides)


def _made(m: TensorMap, address: int) -> list[object]:
    """A kernel's arguments for the array at an address: its descriptor, extents and strides."""
    from triton.runtime import driver

    made = tensor_map(driver.active.utils)(  # pyright: ignore[reportAttributeAccessIssue]
        address + m.offset_bytes, m.swizzle, m.element_bytes, m.dtype, [*m.box], [*m.shape], [*m.strides], 0
    )
    return [made, *m.shape, *m.strides]


def with_descriptors(start: Start, views: Sequence[TmaView], metas: Sequence[Mapping[str, Any]]) -> Start:
    """A start that is given addresses where `start` takes, first of all, descriptors of arrays, which are made once for them.

    Args:
        start: a kernel's.
        views: the arrays that lie at the first addresses.
        metas: what Triton says of each of their descriptors' boxes.
    """
    maps, launch = tuple(view.map(meta) for view, meta in zip(views, metas, strict=True)), start.run
    count = len(maps)

    @lru_cache(MOST_KEPT)
    def descriptors(*addresses: int) -> list[object]:
        return [x for m, address in zip(maps, addresses, strict=True) for x in _made(m, address)]

    def describe(parts: Parts) -> MachineCode | None:
        code = start.describe(parts)
        return None if code is None else msgspec.structs.replace(code, maps=maps)

    return Start(lambda *addresses: launch(*descriptors(*addresses[:count]), *addresses[count:]), describe)


def descriptor(kind: str, box: Iterable[int], *, plain: bool = False) -> str:
    """Triton's type of a TMA descriptor of boxes of an array; `plain`: without swizzle in shared memory."""
    from triton.experimental.gluon import language as gl

    extents = list(box)
    element = gl.dtype(re.sub(r"^([iu])(?=\d)", lambda m: {"i": "int", "u": "uint"}[m[1]], kind))
    layout = gl.NVMMASharedLayout.get_default_for(extents, element)
    if plain:
        layout = gl.NVMMASharedLayout(0, element.primitive_bitwidth, len(extents))
    return f"tensordesc<{kind}{extents},{layout!r}>"


def tma_view(place: AccessMap, batch: int, M: int, columns_extent: int, rows: int, columns: int, size: int) -> TmaView | None:
    """A result as TMA writes it in boxes of `rows` x `columns` elements of `size` bytes, None where it cannot."""
    split = by_batch(place.rows, M, batch)
    if split is None:
        return None
    batches, own = split
    axes: list[tuple[StridedDigit, str, int]] = []
    for terms, name, most, extent in ((own, "row", rows, M), (place.columns, "column", columns, columns_extent)):
        if not terms or terms[0].inner != 1 or (len(terms) > 1 and terms[0].extent % most):
            return None
        covered = 1
        for i, term in enumerate(terms):
            if term.inner != covered:
                return None
            covered *= term.extent
            axes.append((term, name, most if i == 0 else 1))
        if covered != extent:
            return None
    axes += [(term, "b", 1) for term in batches]
    axes.sort(key=lambda a: -a[0].stride)
    strides = [t.stride for t, _, _ in axes]
    aligned = all(s * size % ALIGNED == 0 for s in strides[:-1]) and place.offset * size % ALIGNED == 0
    box = tuple(p for _, _, p in axes)
    if strides[-1] != 1 or not aligned or len(axes) > AXES or box[-1] * size < ALIGNED:
        return None
    whole = {"b": batch, "row": M, "column": columns_extent}
    digits = tuple((name, t.inner, None if t.inner * t.extent == whole[name] else t.extent) for t, name, _ in axes)
    m_major = axes[-1][1] == "row"
    return TmaView(place.offset, tuple(t.extent for t, _, _ in axes), tuple(strides), box, size, digits, m_major)


def by_batch(terms: Sequence[StridedDigit], M: int, batch: int) -> tuple[list[StridedDigit], list[StridedDigit]] | None:
    """Digits of a row number over the whole batch as digits of the matrix and digits of the row in it."""
    outer: list[StridedDigit] = []
    inner: list[StridedDigit] = []
    for t in terms:
        if t.inner >= M:
            outer.append(replace(t, inner=t.inner // M))
        elif t.inner * t.extent <= M:
            inner.append(t)
        elif M % t.inner == 0:
            within = M // t.inner
            inner.append(replace(t, extent=within))
            outer.append(StridedDigit(t.extent // within, 1, t.stride * within))
        else:
            return None
    if batch > 1 and not outer:
        return None
    return outer, inner
