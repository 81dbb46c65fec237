"""Denormal bf16 numbers in products: kept, or counted as zero as the processor's own instruction does (docs/lab-notes)."""

from __future__ import annotations

import pytest
import torch

import tilewright
from tilewright.dtype import BF16, F32
from tilewright.ir.build import input_
from tilewright.ir.graph import Graph
from tilewright.ir.ops import gemm


@pytest.mark.parametrize("k", [1, 2, 32, 64])
def test_a_denormal_counts_for_itself_or_for_nothing(k: int) -> None:
    a, b = input_("a", BF16, (3, k)), input_("b", BF16, (k, 5))
    program = tilewright.compile(Graph("g", (a, b), (gemm(a, b, acc_dtype=F32),), ("y",)), budget_s=0)
    x, w = torch.zeros(3, k, dtype=torch.bfloat16), torch.zeros(k, 5, dtype=torch.bfloat16)
    x[:, 0], w[0] = 1e-39, 1e38
    exact = float(x[0, 0].double() * w[0, 0].double())
    given = program(x, w)
    assert isinstance(given, torch.Tensor) and exact > 0.09
    flushed, kept = given == 0, (given - exact).abs() < 1e-6
    assert bool((flushed | kept).all()) and bool(flushed.all() or kept.all()), given
    x[:, 0] = 2.0**-126  # the smallest that is none
    assert torch.equal(program(x, w), (x.double() @ w.double()).float())
