"""Operators by type and shape over their full range against eager torch; conformance has torch's own samples, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import hardtanh, relu6, soft_margin_loss
from torch_samples import Sample, compared, own_samples, sample


@pytest.mark.parametrize("rules", [False, True], ids=["as read", "after the rules"])
def test_random_calls_mean_what_torch_means(rules: bool) -> None:
    found = compared(list(own_samples(192, seed=int(rules))), rules)
    assert sum(f.status == "right" for f in found) > 110  # of the others most are refused by torch itself
    assert [(f.sample.described(), f.said) for f in found if f.status in ("wrong", "crash")] == []


def ends_of_the_range() -> list[Sample]:
    """Zeros of either sign at a bound of zero and alone in a sum, and what overflows on the way to a finite end."""
    found: list[Sample] = []

    def add(f: Callable[..., Any], *args: Any, **options: Any) -> None:
        found.append(sample(f.__name__, f, args, options))

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        most = torch.finfo(dtype).max
        x, far = (
            torch.tensor(values, dtype=dtype) for values in ([-0.0, 0.0, -1.0, 7.0, torch.nan], [most / 2, most, 1.5, 0.5])
        )
        for low, high in ((0, 6), (0.0, None), (-0.0, None), (None, 0.0), (None, -0.0), (0.0, -0.0), (0.0, -1.0), (-1.0, -0.0)):
            add(torch.clamp, x, low, high)
        add(relu6, x)
        add(hardtanh, x, 0.0, 1.0)
        for low, high in ((-1, 1), (-2, 1), (-1, 2)):  # an export leaves out the operator's own bounds
            add(hardtanh, x, low, high)
        for one in (x[0], x[:1], x[:1].reshape(1, 1)):
            add(torch.nansum, one)
            add(torch.sum, one)
        add(soft_margin_loss, torch.tensor([30.0, -30.0], dtype=dtype), torch.ones(2, dtype=dtype), reduction="none")
        add(torch.addr, torch.zeros(4, 4, dtype=dtype), far, far, alpha=1e-4)
        add(torch.linalg.cross, torch.stack([far[:3], far[:3]]), torch.stack([far[1:], far[:3].flip(0)]))
    for dtype in (torch.float16, torch.bfloat16):
        add(torch.prod, torch.tensor([2.0**15, 2.0**15, 2.0**-29], dtype=dtype), 0)
    for values in ([1e308, 1e308, 1e308], [1.7e308, -1.7e308, 8e307, 1.0]):
        for f in (torch.var, torch.std, torch.var_mean, torch.std_mean):
            add(f, torch.tensor(values, dtype=torch.float64), 0)
    return found


@pytest.mark.parametrize("rules", [False, True], ids=["as read", "after the rules"])
def test_the_ends_of_the_range_are_torchs(rules: bool) -> None:
    found = compared(ends_of_the_range(), rules)
    assert [(f.sample.described(), f.status, f.said) for f in found if f.status != "right"] == []
