"""Which stores TMA writes itself, and as what array of up to five axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.lowering.access import AccessMap, StridedDigit

ALIGNED = 16  # bytes, of addresses and of every stride but the last
AXES = 5


@dataclass(frozen=True)
class TmaView:
    """A result as an array whose boxes are pieces of tiles.

    Attributes:
        offset: of its first element.
        shape, strides: in elements, outer first; the last stride is 1.
        box: extents of a piece along each axis.
        across: rows are the contiguous axis.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    digits: tuple[tuple[str, int, int | None], ...]
    across: bool

    def coordinates(self, b: str, row: str, column: str) -> list[str]:
        """Of the piece that starts at a row of a matrix of the batch and at a column of the store, in a kernel's text."""
        names = {"b": b, "row": row, "column": column}
        return [_digit(names[name], inner, extent) for name, inner, extent in self.digits]


def _digit(number: str, inner: int, extent: int | None) -> str:
    part = number if inner == 1 else f"{number} // {inner}"
    return part if extent is None else f"({part}) % {extent}"


def tma_view(place: AccessMap, batch: int, M: int, columns_extent: int, rows: int, columns: int, size: int) -> TmaView | None:
    """A result as TMA writes it in pieces of `rows` x `columns` elements of `size` bytes, None where it cannot."""
    split = by_batch(place.rows, M, batch)
    if split is None:
        return None
    batches, own = split
    axes: list[tuple[StridedDigit, str, int]] = []
    for terms, name, piece, extent in ((own, "row", rows, M), (place.columns, "column", columns, columns_extent)):
        if not terms or terms[0].inner != 1 or (len(terms) > 1 and terms[0].extent % piece):
            return None
        covered = 1
        for i, term in enumerate(terms):
            if term.inner != covered:
                return None
            covered *= term.extent
            axes.append((term, name, piece if i == 0 else 1))
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
    across = axes[-1][1] == "row"
    return TmaView(place.offset, tuple(t.extent for t, _, _ in axes), tuple(strides), box, digits, across)


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
