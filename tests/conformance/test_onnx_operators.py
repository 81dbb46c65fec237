"""30,000 random cases of ONNX's operators against onnxruntime or onnx's evaluator, 1 in 100 of them compiled."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import native, read
from onnx_operators import OPERATORS, draw
from tests.frontends.onnx.test_operators import check, reference

import tilewright
from tilewright.errors import TilewrightError

pytestmark = pytest.mark.conformance
CASES = 30_000
EACH = -(-CASES // len(OPERATORS))


@pytest.mark.parametrize("op", OPERATORS)
def test_as_onnxruntime_computes_it(op):
    found = [check(op, seed, rules=seed % 2 == 0) for seed in range(EACH)]
    assert found.count("right") > EACH // 2


@pytest.mark.parametrize("op", OPERATORS)
def test_compiled(op):
    for seed in range(3):
        case = draw(op, seed)
        wanted = reference(case)
        try:
            graph = read(case.model)
        except TilewrightError:
            continue
        if wanted is None or not native(graph) or any(0 in n.shape for n in graph.inputs):
            continue
        program = tilewright.compile(case.model, budget_s=0, cache=False)
        got = program(*(case.feeds[name] for name in program.input_types))
        for g, w in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
            tolerance = max(case.steps, 64) * 4 * (float(np.finfo(w.dtype).eps) if w.dtype.kind == "f" else 0)
            np.testing.assert_allclose(np.asarray(g), w, rtol=tolerance, atol=tolerance, err_msg=f"{op} {seed}")
