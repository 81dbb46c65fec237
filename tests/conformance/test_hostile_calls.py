"""Every operator of torch that a file may call, on random arguments: typed errors or results, and no process that ends."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from forked import outcomes
from hostile_calls import case

from tilewright.frontends.torch.allowed import ALLOWED

CASES = int(os.environ.get("TILEWRIGHT_CASES", "12"))
# Imported and compiled at first use: once here, not in every child.
FIRST = ("aten.add.Tensor", "aten.convolution.default", "aten.sort.default", "aten.linalg_qr.default", "aten.embedding.default")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    torch.set_num_threads(1)
    for target in FIRST:
        for seed in range(4):
            with contextlib.suppress(Exception):
                case(target, seed)()


@pytest.mark.conformance
@pytest.mark.parametrize("letter", sorted({t.split(".")[1][:2] for t in ALLOWED}))
def test_no_allowed_operator_ends_the_process(letter: str) -> None:
    wrong: list[str] = []
    for target in sorted(t for t in ALLOWED if t.split(".")[1].startswith(letter)):
        cases = [case(target, seed) for seed in range(CASES)]
        for seed, outcome in enumerate(outcomes(cases, memory=3 << 30)):
            if outcome.kind in ("crash", "hang", "file"):
                wrong.append(f"{target} {seed}: {outcome.kind} {outcome.what}")
    assert not wrong, "\n".join(wrong)
