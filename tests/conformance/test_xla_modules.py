"""XLA's own tests: how many modules become products alone, and that what they compute stays the same."""

import pytest
from xla_modules import FILES, FP8, INT4, checkout, everything, modules, outcome, run

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(checkout() is None, reason="XLA_CHECKOUT names no folder that holds xla/"),
]
# Of fp8's: a range beside a narrowed result, operands that are padded or joined; the rest are the tests' own near misses.
ONE_GEMM = {FP8: 57 / 64, INT4: 1.0}
PRODUCTS_ALONE = 0.85


@pytest.mark.parametrize("file", [FP8, INT4])
def test_quantised_modules_are_one_gemm(file):
    outcomes = [outcome(m.text) for m in modules(checkout(), file)]
    assert outcomes and sum(o.one_product for o in outcomes) >= ONE_GEMM[file] * len(outcomes)


def test_modules_with_products_need_no_other_step():
    outcomes = [outcome(m.text) for file in FILES for m in modules(checkout(), file)]
    compiled = [o for o in outcomes if not o.refused]
    assert compiled and sum(o.only_products for o in compiled) >= PRODUCTS_ALONE * len(compiled)


def test_modules_compute_what_xlas_client_computes():
    found = [
        m for m in everything(checkout()) if m.file.endswith(("dot_operation_test.cc", "gemm_fusion_test.cc")) or m.file == FP8
    ]
    verdicts = [(m.name, verdict, why) for m, verdict, why in run(found[::16])]
    assert [v for v in verdicts if v[1] in ("wrong", "untyped", "crash", "slow")] == []
    assert sum(v[1] == "pass" for v in verdicts) >= len(verdicts) // 2
