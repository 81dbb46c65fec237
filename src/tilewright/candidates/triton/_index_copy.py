# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""The kernel of `index_copy.py`: a block copies so many elements of y to x, for each array."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def index_copy(positions, side, CONFIG):
    """Elements of each pair (x, y) in `side`: x[o, positions[c], i] = y[o, c, i]."""
    if CONFIG.dependent:
        gdc_launch_dependents()
        gdc_wait()
    offsets = tl.program_id(0) * CONFIG.block + tl.arange(0, CONFIG.block)
    inside = offsets < CONFIG.total
    i, row = offsets % CONFIG.inner, offsets // CONFIG.inner
    c, o = row % CONFIG.count, row // CONFIG.count
    at = tl.load(positions + c, mask=inside, other=0)
    if CONFIG.wraps:
        at = tl.where(at < 0, at + CONFIG.extent, at)
    tl.device_assert((at >= 0) & (at < CONFIG.extent), "a position out of range", mask=inside)
    into = (o * CONFIG.extent + at.to(tl.int32)) * CONFIG.inner + i
    for array in tl.static_range(CONFIG.arrays):
        value = tl.load(side[2 * array + 1] + offsets, mask=inside)
        tl.store(side[2 * array] + into, value, mask=inside)
