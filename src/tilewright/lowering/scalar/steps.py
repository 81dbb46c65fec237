"""Quantising by multiplications instead of a division, where a scale is known before a call.

With 1 / s = r + r' + r'', each part the rest rounded to f32, fma(x, r, fma(x, r', x r'')) differs from x / s by at most 2^-48
of its binade before it is rounded. The quotient of two f32 is at least as far from where its own rounding turns, so both round
to the same f32 (Brisebarre and Muller, "Correctly rounded multiplication by arbitrary precision constants", 2008, with one
part more). That holds while neither the parts nor 256 s leave f32's normal range: see `usable`.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch

from tilewright.dtype import F32
from tilewright.ir.graph import Node
from tilewright.ir.ops import VIEWS, Const, Param, Quantize

LEAST, MOST = 2.0**-100, 2.0**76  # scales whose reciprocal's parts are normal
PARTS = 3
PAST = 0.25  # of a step: what lies further beyond the last code is held there, and still becomes that code


def scale_of(n: Node) -> Node | None:
    """The source or the constant that is the one f32 scale of codes of 8 bits; None where values are divided."""
    if not isinstance(n.op, Quantize) or n.dtype.is_float or n.dtype.bits > 8 or n.op.block is not None:
        return None
    scale = n.src[1]
    while isinstance(scale.op, VIEWS):
        (scale,) = scale.src
    known = isinstance(scale.op, (Const, Param)) and scale.tensor.elements == 1 and scale.dtype is F32
    return scale if known else None


def usable(scales: Iterable[torch.Tensor | None]) -> bool:
    """Tell whether all are known, and multiplying gives what dividing by them does."""
    return all(scale is not None and LEAST <= float(scale) <= MOST for scale in scales)


def parts_of(scale: float) -> list[float]:
    """The reciprocal's parts."""
    parts: list[float] = []
    for _ in range(PARTS):
        rest = 1 / Fraction(scale) - sum(map(Fraction, parts))
        parts.append(float(np.float32(float(rest))))
    return parts
