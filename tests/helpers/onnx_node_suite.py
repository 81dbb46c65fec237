"""onnx's own backend node tests, run in memory through the graph and the oracle, or compiled."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tilewright.errors import TilewrightError
from tilewright.frontends import onnx as frontend

# The operators this compiler is about: every case of theirs must pass.
NAMED = (
    "MatMul",
    "Gemm",
    "MatMulInteger",
    "QLinearMatMul",
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "LayerNormalization",
    "Softmax",
    "Gelu",
    "Attention",
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        name: of the case.
        op: operator under test; of an expanded case, the one that was expanded.
        status: "native" (every node read as the graph's own), "torch" (passes with operators of torch), "call" (with the
            reference evaluator's help), "fail".
        reason: of a failure, or why there is a call.
    """

    name: str
    op: str
    status: str
    reason: str


@cache
def cases() -> list[Any]:
    """Every node test case; its data are made here, which takes seconds."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model_tests(kind="node")


def outcomes(
    wanted: Callable[[str], bool] = lambda op: True, prepare: Callable[[Any], Any] | None = None, every: int = 1
) -> list[Outcome]:
    """Outcomes of every n-th case whose operator is wanted; `prepare` makes a model ready, the oracle's if there is none."""
    ops = operators(cases())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare = prepare or frontend.backend().prepare
        return [_outcome(c, ops[c.name], prepare) for c in [c for c in cases() if wanted(ops[c.name])][::every]]


def operators(all_cases: Iterable[Any]) -> dict[str, str]:
    """The operator each case tests, by the case's name."""
    kinds = {c.name: {n.op_type for n in c.model.graph.node} for c in all_cases}
    single = {name: next(iter(k)) for name, k in kinds.items() if len(k) == 1}
    found: dict[str, str] = {}
    for name in kinds:
        base = re.sub(r"_expanded(_ver\d+)?$", "", name)
        found[name] = single.get(base, single.get(name, "several operators"))
    return found


def _outcome(case: Any, op: str, prepare: Callable[[Any], Any]) -> Outcome:
    try:
        prepared = prepare(case.model)
        for inputs, expected in case.data_sets:
            _compare([_value(v) for v in expected], list(prepared.run([_value(v) for v in inputs])), case)
    except (TilewrightError, AssertionError, TypeError, ValueError) as error:
        drawn = "draws random numbers: no two runs agree"
        return Outcome(case.name, op, "fail", drawn if op == "Bernoulli" else _reason(case, error))
    graphs = [graph for graph, _ in prepared.graphs.values()]
    called = sorted({(n.op.library, n.op.target) for g in graphs for n in g.nodes() if n.op.name == "call"})
    status = "native" if not called else "torch" if {library for library, _ in called} == {"torch"} else "call"
    return Outcome(case.name, op, status, ", ".join(target for _, target in called))


def _reason(case: Any, error: Exception) -> str:
    """The failure in a line, and whether onnx's reference evaluator fails the case by itself."""
    detail = " ".join(str(error).split("\n  try:")[0].split())
    if "Pillow" in detail:
        return "needs Pillow, which onnx's reference evaluator asks for"
    alone = _fails_alone(case)
    if alone:
        return f"onnx's reference evaluator does not reproduce it either ({alone})"
    return re.sub(r"\s*\([A-Z]\w* node .*", "", detail)[:160]


def _fails_alone(case: Any) -> str:
    from onnx.reference import ReferenceEvaluator

    try:
        names = [i.name for i in case.model.graph.input]
        for inputs, expected in case.data_sets:
            feeds = dict(zip(names, (_value(v) for v in inputs), strict=True))
            _compare([_value(v) for v in expected], ReferenceEvaluator(case.model).run(None, feeds), case)
    except AssertionError:
        return "another result"
    except Exception as error:  # whatever its operators raise
        return type(error).__name__
    return ""


def _value(v: object) -> object:
    """A case's value as the evaluator's own type."""
    if isinstance(v, onnx.TensorProto):
        return numpy_helper.to_array(v)
    if isinstance(v, onnx.SequenceProto):
        return numpy_helper.to_list(v)
    return numpy_helper.to_optional(v) if isinstance(v, onnx.OptionalProto) else v


def _compare(expected: list[Any], got: list[Any], case: Any) -> None:
    """Compare by the official runner's rule: same shape and dtype, close within the case's own tolerances."""
    from onnx.backend.test.runner import Runner

    assert len(got) == len(expected)
    for e, g in zip(expected, got, strict=True):
        if isinstance(e, list):
            assert isinstance(g, (list, tuple))
            _compare(e, list(g), case)
        elif e is None or g is None:
            assert e is g
        else:
            Runner.assert_similar_outputs([np.asarray(e)], [np.asarray(g)], case.rtol, case.atol)
