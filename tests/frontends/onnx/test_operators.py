"""Random cases of ONNX operators, by type, operator set and attributes, against onnxruntime or onnx's own evaluator."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx_models import ours, read, theirs
from onnx_operators import OPERATORS, Drawn, draw

from tilewright.compiler import optimise
from tilewright.errors import TilewrightError

SEEDS = 4


def reference(case: Drawn) -> list[np.ndarray] | None:
    """onnxruntime's results; onnx's evaluator's where it has no kernel; None where neither runs the model."""
    try:
        return theirs(case.model, case.feeds)
    except Exception:  # whatever its kernels raise
        from onnx.reference import ReferenceEvaluator

        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [np.asarray(v) for v in ReferenceEvaluator(case.model).run(None, case.feeds)]
        except Exception:  # likewise
            return None


def check(op: str, seed: int, *, rules: bool = False) -> str:
    """ "right", "refused" (with a typed error), or "no reference".

    Raises:
        AssertionError: another result.
    """
    case = draw(op, seed)
    wanted = reference(case)
    if wanted is None:
        return "no reference"
    try:
        graph = read(case.model)
        got = ours(optimise(graph) if rules else graph, case.feeds)
    except TilewrightError:
        return "refused"
    for g, w in zip(got, wanted, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        if w.dtype.kind == "f" and not case.exact:
            tolerance = case.steps * 4 * float(np.finfo(w.dtype).eps)
            np.testing.assert_allclose(
                g.astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=f"{op} {seed}"
            )
        else:
            np.testing.assert_array_equal(g, w, err_msg=f"{op} {seed}")
    return "right"


@pytest.mark.parametrize("op", OPERATORS)
def test_as_onnxruntime_computes_it(op):
    assert [check(op, seed, rules=seed % 2 == 0) for seed in range(SEEDS)].count("refused") <= SEEDS // 2
