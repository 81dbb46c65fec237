"""Many random cases of each of onnxruntime's own operators, against onnxruntime (MORE_SEEDS each)."""

from __future__ import annotations

import pytest
from onnx_contrib import CASES
from tests.frontends.onnx.test_contrib import check, drawn

pytestmark = pytest.mark.conformance
MORE_SEEDS = 100


@pytest.mark.parametrize("op", CASES)
def test_as_onnxruntime_computes_it(op):
    for seed in range(MORE_SEEDS):
        check(drawn(op, seed))
