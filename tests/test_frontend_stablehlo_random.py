"""Random programs of one StableHLO operation each, against what XLA's CPU compiler makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from against_jax import close, run, xla
from stablehlo_cases import CASES
from tilewright.frontends import load

COUNT = 12


@pytest.mark.parametrize("name", CASES)
def test_an_operation_agrees_with_xla(name: str) -> None:
    for seed in range(COUNT):
        case = CASES[name](np.random.default_rng([seed, len(name)]))
        wanted = xla(case.text, *case.arrays)
        got = run(load(case.text), *case.arrays)
        for result, value in zip(got, wanted, strict=True):
            close(result, value, ulps=case.ulps, depth=case.depth, what=f"seed {seed} of\n{case.text}")
