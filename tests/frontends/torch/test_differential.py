"""Operators by type and shape over their full range against eager torch; conformance has torch's own samples, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import hardtanh, linear, multi_margin_loss, multilabel_margin_loss, nll_loss, relu6, soft_margin_loss
from torch_samples import FORMS, Form, Sample, compared, own_samples, sample


@pytest.mark.parametrize("form", FORMS[:2])
def test_random_calls_mean_what_torch_means(form: Form) -> None:
    found = compared(list(own_samples(192, seed=FORMS.index(form))), form)
    assert sum(f.status == "right" for f in found) > 110  # of the others most are refused by torch itself
    assert [(f.sample.described(), f.said) for f in found if f.status in ("wrong", "crash")] == []


@functools.cache
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
        zeros = torch.cartesian_prod(*[torch.tensor([0.0, -0.0, -1.0, torch.nan], dtype=dtype)] * 3).T
        for f, args in ((torch.clamp, zeros), (torch.clamp, zeros[:2]), (torch.maximum, zeros[:2]), (torch.minimum, zeros[:2])):
            found.append(sample(f.__name__, f, tuple(args), {}, elementwise=True))
        add(relu6, x)
        add(hardtanh, x, 0.0, 1.0)
        for low, high in ((-1, 1), (-2, 1), (-1, 2)):  # an export leaves out the operator's own bounds
            add(hardtanh, x, low, high)
        for one in (x[0], x[:1], x[:1].reshape(1, 1)):
            add(torch.nansum, one)
            add(torch.sum, one)
        for reduction in ("none", "sum", "mean"):
            zero, one = torch.tensor([[-2.5, -0.0], [2.0, torch.inf]], dtype=dtype), torch.tensor([-0.0, 1.0], dtype=dtype)
            add(nll_loss, zero, torch.tensor([0, 0]), one, reduction=reduction)
            add(nll_loss, zero[0], torch.tensor(0), one, reduction=reduction)
        add(soft_margin_loss, torch.tensor([30.0, -30.0], dtype=dtype), torch.ones(2, dtype=dtype), reduction="none")
        add(torch.addr, torch.zeros(4, 4, dtype=dtype), far, far, alpha=1e-4)
        add(torch.linalg.cross, torch.stack([far[:3], far[:3]]), torch.stack([far[1:], far[:3].flip(0)]))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        zeros, bias = torch.full((3, 40), -0.0, dtype=dtype), torch.tensor([-0.0, 0.0, 1.0], dtype=dtype)
        for x in (zeros, zeros[:, :1], zeros[:, :5]):
            for f in (torch.sum, torch.mean):
                add(f, x, 1)
                add(f, x, 0)
                add(f, x)
        none, across = torch.zeros(2, 0, dtype=dtype), torch.zeros(3, 0, dtype=dtype)
        add(torch.addmm, bias, none, across.T, alpha=-1)
        add(torch.addmm, bias, none, across.T, beta=-2)
        add(torch.addmm, bias, none, across.T, beta=0, alpha=-1)
        add(torch.baddbmm, bias, none[None], across.T[None])
        add(torch.addmv, bias, across, none[0])
        for x in (none, none[0], none[None]):
            add(linear, x, across, bias)
        for values in (
            [1.0, torch.inf],
            [torch.inf, 1.0],
            [2.0, 3.0, -torch.inf],
            [torch.inf, torch.inf],
            [1.0, torch.inf, -torch.inf],
        ):
            for f in (torch.var_mean, torch.std_mean):
                x = torch.tensor(values, dtype=dtype)
                add(f, x)
                add(f, x.expand(2, -1), 1, keepdim=True)
                add(f, x[:, None].expand(-1, 2), 0)
    most = torch.finfo(torch.float32).max
    for values in ([most, most, most], [most, -most / 2, 1.0], [most / 4, -most / 4, most / 4], [most, -most / 2, -most * 0.6]):
        for f in (torch.var, torch.std, torch.var_mean, torch.std_mean):
            add(f, torch.tensor(values))
            add(f, torch.tensor([values]), 1)
            add(f, torch.tensor([values, values]), 1)
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[1.0, torch.inf, 2.0], [torch.inf, -1.0, 0.5]], dtype=dtype)
        add(multi_margin_loss, x, torch.tensor([0, 2]), reduction="none")
        add(multilabel_margin_loss, x, torch.tensor([[0, -1, 1], [1, 2, -1]]), reduction="none")
    for dtype in (torch.float16, torch.bfloat16):
        for x in (torch.zeros(3, 1, dtype=dtype), torch.zeros(2, 3, 1, dtype=dtype)):
            add(torch.matmul, x, -torch.ones_like(x.mT))
        add(torch.prod, torch.tensor([2.0**15, 2.0**15, 2.0**-29], dtype=dtype), 0)
    for values in ([1e308, 1e308, 1e308], [1.7e308, -1.7e308, 8e307, 1.0]):
        for f in (torch.var, torch.std, torch.var_mean, torch.std_mean):
            add(f, torch.tensor(values, dtype=torch.float64), 0)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_ends_of_the_range_are_torchs(form: Form) -> None:
    found = compared(ends_of_the_range(), form)
    assert [(f.sample.described(), f.status, f.said) for f in found if f.status != "right"] == []
