"""Random programs of one StableHLO operation each, against what XLA's CPU compiler makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from against_jax import close, run, to_torch, xla
from stablehlo_cases import CASES, merged

import tilewright
from tilewright.compiler import optimise
from tilewright.frontends import load

COUNT = 12


def check(name: str, seeds: range, compiled: bool = False) -> None:
    """Compare programs, written as one, with XLA: as read, after the rules and maybe as compiled."""
    cases = [CASES[name](np.random.default_rng([seed, len(name)])) for seed in seeds]
    whole = merged(cases)
    wanted = xla(whole.text, *whole.arrays)
    graph = load(whole.text)
    found = [run(graph, *whole.arrays), run(optimise(graph), *whole.arrays)]
    if compiled:
        results = tilewright.compile(graph, budget_s=0, cache=False)(*map(to_torch, whole.arrays))
        found.append(list(results) if isinstance(results, tuple | list) else [results])
    for results in found:
        for case, got, value in zip(cases, results, wanted, strict=True):
            close(got, value, ulps=case.ulps, depth=case.depth, what=case.body)


@pytest.mark.parametrize("name", CASES)
def test_an_operation_agrees_with_xla(name: str) -> None:
    check(name, range(COUNT))


@pytest.mark.conformance
@pytest.mark.parametrize("name", CASES)
def test_many_programs_of_an_operation_agree_with_xla(name: str) -> None:
    for start in range(1000, 3500, 25):
        check(name, range(start, start + 25), compiled=start % 500 == 0)
