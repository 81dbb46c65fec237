"""Comparison of tensors: how far one lies from another, and whether that is too far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerances:
    """Bounds of the user's, for floats alone; None leaves the derived ones.

    Attributes:
        rtol, atol: an element may be off by atol + rtol |reference|.
        rms: the root mean square of the error, relative to the reference's.
    """

    rtol: float | None = None
    atol: float | None = None
    rms: float | None = None

    @property
    def elementwise(self) -> bool:
        """Tell whether the bound of an element was given."""
        return self.rtol is not None or self.atol is not None

    @property
    def given(self) -> bool:
        """Tell whether any was."""
        return self.elementwise or self.rms is not None


@dataclass(frozen=True)
class Gap:
    """The largest error of a tensor, judged by how much of its bound it uses; `why` says what is wrong, if anything is."""

    error: float
    bound: float
    why: str | None = None

    @property
    def ratio(self) -> float:
        """Error over bound."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 else math.inf


def element_gap(got: torch.Tensor, reference: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Gap:
    """The element that uses most of what low…high leaves it. Infinities and NaNs that agree are no error; a NaN in low or high
    means that anything is right there."""
    g, r = got.double().reshape(-1), reference.double().reshape(-1)
    low, high = low.double().reshape(-1), high.double().reshape(-1)
    if not g.numel():
        return Gap(0.0, 0.0)
    tolerance = torch.where((g >= r) | g.isnan(), high - r, r - low).nan_to_num(math.inf, math.inf)
    same = (g == r) | (g.isnan() & r.isnan()) | tolerance.isinf()
    error = torch.where(same, torch.zeros_like(g), (g - r).abs().nan_to_num(math.inf, math.inf))
    ratio = torch.where(error > 0, error / tolerance, torch.zeros_like(error))
    at = int(ratio.argmax()) if bool((ratio > 0).any()) else int(torch.where(tolerance.isinf(), 0.0, tolerance).argmax())
    bound = float(tolerance[at])
    gap = Gap(float(error[at]), bound if math.isfinite(bound) else 0.0)
    wrong = int((~same & (error > tolerance)).sum())
    if wrong:
        place = list(torch.unravel_index(torch.tensor(at), got.shape))
        shown = [int(x) for x in place]
        says = f"{wrong:,} of {g.numel():,} elements differ, most at {shown}: {float(g[at]):.6g} for {float(r[at]):.6g}"
        return Gap(gap.error, gap.bound, says)
    return gap


def exact_gap(got: torch.Tensor, reference: torch.Tensor) -> Gap:
    """Every element must be equal, or both NaN."""
    g, r = got.double(), reference.double()
    differ = (_comparable(got) != _comparable(reference)) & ~(g.isnan() & r.isnan())
    wrong = int(differ.sum())
    if not wrong:
        return Gap(0.0, 0.0)
    error = float((g - r).abs().nan_to_num(math.inf, math.inf).amax())
    at = tuple(int(x) for x in differ.nonzero()[0])
    says = f"{wrong:,} of {got.numel():,} elements differ, first at {list(at)}: {got[at].item()} for {reference[at].item()}"
    return Gap(error, 0.0, says)


def _comparable(t: torch.Tensor) -> torch.Tensor:
    """The tensor in a type torch compares without rounding: unsigned integers as signed ones of their width, 8-bit floats as
    f32."""
    if t.dtype.is_floating_point:
        return t.float() if t.itemsize == 1 else t
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(t.dtype)
    return t.view(signed) if signed is not None else t


def rms_gap(got: torch.Tensor, reference: torch.Tensor, bound: float) -> Gap:
    """The error's root mean square relative to the reference's. NaNs and infinities must stand at the same places."""
    g, r = got.double(), reference.double()
    finite = g.isfinite() & r.isfinite()
    odd = int((~finite & ~(g == r) & ~(g.isnan() & r.isnan())).sum())
    error, size = float((g - r)[finite].norm()), float(r[finite].norm())
    relative = error / size if size else error
    if odd:
        return Gap(math.inf, bound, f"{odd:,} of {g.numel():,} elements are infinite or NaN on one side alone")
    if relative > bound:
        return Gap(relative, bound, f"the error's root mean square is {relative:.3g} of the reference's, {bound:.3g} allowed")
    return Gap(relative, bound)


def tolerated_gap(got: torch.Tensor, reference: torch.Tensor, tolerances: Tolerances) -> Gap:
    """Floats under tolerances of the user's, at least one of which is given."""
    r = reference.double()
    if tolerances.elementwise:
        slack = (tolerances.atol or 0.0) + (tolerances.rtol or 0.0) * r.abs()
        gap = element_gap(got, reference, r - slack, r + slack)
        if gap.why is not None or tolerances.rms is None:
            return gap
    return rms_gap(got, reference, tolerances.rms or 0.0)
