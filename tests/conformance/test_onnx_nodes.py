"""All of onnx's node tests, and docs/conformance.md as they leave it."""

from __future__ import annotations

import functools

import onnx
import pytest
from onnx_node_suite import NAMED, Outcome, outcomes

import tilewright.onnx_backend
from report import DOCUMENT, tables, written

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return outcomes()


def test_at_least_95_in_100_pass(found):
    failed = [o for o in found if o.status == "fail"]
    assert len(found) > 1500
    assert len(failed) <= 0.05 * len(found), failed


def test_every_case_of_the_named_operators_passes(found):
    assert [o for o in found if o.op in NAMED and o.status == "fail"] == []


def test_every_failure_is_onnxs_own_or_has_a_reason(found):
    assert all(o.reason for o in found if o.status == "fail")


def test_the_same_cases_pass_compiled(found):
    prepare = functools.partial(tilewright.onnx_backend.prepare, budget_s=0, cache=False)
    compiled = outcomes(prepare=prepare)
    assert {o.name for o in compiled if o.status == "fail"} == {o.name for o in found if o.status == "fail"}


def test_the_document_says_what_happened(found):
    text = DOCUMENT.read_text()
    if f"onnx {onnx.__version__}:" not in text:
        pytest.skip("the document tells of another version of onnx, which has other cases")
    assert text == written(text, tables(found)), "run python tests/conformance/report.py"
