"""torch's operators on torch's own samples of them and on numbers of the full range, against eager torch.

$TILEWRIGHT_CASES is how many cases of each kind are tried (1,000 unless told), $TILEWRIGHT_SEED which.
"""

from __future__ import annotations

import os
from itertools import islice

import pytest
from torch_samples import DTYPES, FORMS, NO_FUNCTIONS, Form, Sample, compared, own_samples, samples_of

pytestmark = pytest.mark.conformance
CASES, SEED = int(os.environ.get("TILEWRIGHT_CASES", "1000")), int(os.environ.get("TILEWRIGHT_SEED", "0"))
TOGETHER = 64
COMPILED = 10  # one in so many again, compiled


def _failures(samples: list[Sample], form: Form) -> list[tuple[str, str]]:
    failed: list[tuple[str, str]] = []
    for start in range(0, len(samples), TOGETHER):
        found = compared(samples[start : start + TOGETHER], form)
        failed += [(f.sample.described(), f.said) for f in found if f.status in ("wrong", "crash")]
    return failed


@pytest.mark.parametrize("form", FORMS)
def test_random_calls_over_the_full_range(form: Form) -> None:
    count = CASES if form != "compiled" else -(-CASES // COMPILED)
    assert _failures(list(own_samples(count, seed=SEED + 2 + FORMS.index(form))), form) == []


@pytest.mark.parametrize("form", ["as read", "compiled"])
def test_samples_of_torchs_own_operator_database(form: Form) -> None:
    pytest.importorskip("expecttest", reason="torch's database of operators imports it")
    from torch.testing._internal.common_methods_invocations import op_db

    def every() -> list[Sample]:
        pairs = [
            (op, d) for d in DTYPES for op in op_db if op.name not in NO_FUNCTIONS.split() and d in op.supported_dtypes("cpu")
        ]
        start = SEED * CASES // 4 % len(pairs)
        step = 1 if form != "compiled" else COMPILED
        return list(islice((s for op, d in pairs[start:] + pairs[:start] for s in samples_of(op, d, 2, SEED)), 0, CASES, step))

    assert _failures(every(), form) == []
