"""Bounds on steps that torch does operation by operation, in each type."""

import pytest
import torch

from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F16, F32
from tilewright.ir.types import TensorType
from tilewright.report.measure.compare import Tolerances
from tilewright.report.measure.verify import _fusion_gap


@pytest.mark.parametrize("d", [F32, BF16, F16, F8E4M3FN, F8E5M2, F8E4M3FNUZ, F8E5M2FNUZ], ids=str)
def test_wrong_results_of_every_type_lie_past_the_bound(d):
    exact = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    reference, t = exact.to(d.to_torch()), TensorType(d, (16, 32))
    slack = 2.0**-7 if d.bits <= 8 else d.epsilon / 2

    def ratio(got):
        return _fusion_gap(got.to(d.to_torch()), reference, t, True, Tolerances()).ratio

    assert ratio(exact * (1 + slack)) <= 1
    for wrong in (torch.zeros(16, 32), exact.roll(1, 1), exact.roll(1, 0), -exact):
        assert ratio(wrong) > 1
