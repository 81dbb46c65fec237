"""Operators by type and shape over their full range against eager torch; conformance has torch's own samples, too."""

from __future__ import annotations

import pytest
from torch_samples import compared, own_samples


@pytest.mark.parametrize("rules", [False, True], ids=["as read", "after the rules"])
def test_random_calls_mean_what_torch_means(rules: bool) -> None:
    found = compared(list(own_samples(192, seed=int(rules))), rules)
    assert sum(f.status == "right" for f in found) > 110  # of the others most are refused by torch itself
    assert [(f.sample.described(), f.said) for f in found if f.status in ("wrong", "crash")] == []
