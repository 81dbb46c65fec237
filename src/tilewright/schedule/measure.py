"""Verify first, then time. Nothing that fails its check is ever timed.

Random data (never zeros), poisoned results, medians over interleaved rounds. Error bounds: with u the unit roundoff of the
accumulator, an inner product of length K computed in any order is within K u |a|.|b| of the exact one to first order
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5), and its error is typically sqrt(K) u (Higham and
Mary 2019, doi 10.1137/18M1226312). The first bounds every element; the second, with a factor for safety, bounds the error's
norm, which is what shows a silent drop of precision (TF32 in place of f32 is 1000 times the norm of f32's error).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from tilewright.dtype import F32, DType
from tilewright.ir.carrier import operands_of, stores_of
from tilewright.ir.evaluate import accumulate_in_float64, evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Acc, Dequantize, Map, Param, Quantize
from tilewright.ir.ops.functions import narrow_integer
from tilewright.ir.types import TensorType
from tilewright.schedule.problem import AnyProblem, AttentionProblem, Problem

NORM_SAFETY = 16.0
EPILOGUE_ROUNDINGS = 4
ATTENTION_ROUNDINGS = 64
CANCELLING = frozenset({"add", "subtract", "gelu", "gelu_tanh", "erf", "erfc", "exponential_minus_one"})


def random_tensor(t: TensorType, generator: torch.Generator, *, positive: bool = False) -> torch.Tensor:
    """Random data of a type: integers over their full range, floats normal (or in [0.5, 1.5) if `positive`)."""
    d = t.dtype
    if d.kind == "pred":
        return torch.rand(t.shape, generator=generator) < 0.5
    if d.is_integer:
        low, high = max(int(d.min), -(1 << 40)), min(int(d.max), 1 << 40)
        wide = torch.randint(low, high + 1, t.shape, generator=generator, dtype=torch.int64)
        return narrow_integer(wide, d)
    wide = torch.rand(t.shape, generator=generator) + 0.5 if positive else torch.randn(t.shape, generator=generator)
    return wide.to(d.to_torch())


def random_sources(problem: AnyProblem, seed: int = 0) -> list[torch.Tensor]:
    """Random sources of a problem; a scale is positive."""
    generator = torch.Generator().manual_seed(seed)
    scales = {
        n.op.index
        for q in toposort((*operands_of(problem.node), *stores_of(problem.node)))
        if isinstance(q.op, (Quantize, Dequantize))
        for n in toposort((q.src[1],))
        if isinstance(n.op, Param)
    }
    return [random_tensor(t, generator, positive=i in scales) for i, t in enumerate(problem.types)]


@dataclass(frozen=True)
class Expected:
    """What a gemm must give: for each store the reference and the interval every element must lie in."""

    reference: tuple[torch.Tensor, ...]
    low: tuple[torch.Tensor, ...]
    high: tuple[torch.Tensor, ...]
    norm_bound: float
    exact: bool


def expect(problem: AnyProblem, sources: Sequence[torch.Tensor]) -> Expected:
    """The reference results and their bounds.

    The epilogue is evaluated on the float64 product and on it plus and minus its error bound, its own steps pushed the same
    way: what lies between is within the bound for any epilogue that is monotone over so short a stretch, a quantisation's
    rounding included.
    """
    node = problem.node
    bound = dict(zip(node.src, sources, strict=True))
    with accumulate_in_float64():
        value = evaluate_nodes((node,), bound)[0]
    reference = cast("tuple[torch.Tensor, ...]", value if isinstance(value, tuple) else (value,))
    if problem.acc.dtype.is_integer:
        return Expected(reference, reference, reference, 0.0, True)
    acc64, slack, norm = _product(problem, sources) if isinstance(problem, Problem) else _attention(problem, sources)
    stores = [_stores_at(problem, sources, acc64 + sign * slack, sign) for sign in (-1, 1)]
    low: list[torch.Tensor] = []
    high: list[torch.Tensor] = []
    for i, r in enumerate(reference):
        three = torch.stack([r.double(), stores[0][i].double(), stores[1][i].double()])
        rounding = problem.outputs[i].dtype.epsilon * 1.01 if problem.outputs[i].dtype.is_float else 0.0
        margin = three.abs().nan_to_num(0.0, 0.0, 0.0).amax(0) * rounding
        low.append(three.amin(0) - margin)
        high.append(three.amax(0) + margin)
    return Expected(reference, tuple(low), tuple(high), norm, False)


def _product(problem: Problem, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The product in float64, the bound of each element, and the bound of the error's norm relative to its own."""
    roots = (problem.op.lhs, problem.op.rhs)
    params = {n: sources[n.op.index] for n in toposort(roots) if isinstance(n.op, Param)}
    a, b = (t.double() for t in cast("list[torch.Tensor]", evaluate_nodes(roots, params)))
    u = problem.acc.dtype.epsilon / 2
    return a @ b, (problem.K + 2) * u * (a.abs() @ b.abs()), NORM_SAFETY * math.sqrt(max(problem.K, 1)) * u


def _attention(problem: AttentionProblem, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The same for an attention. Its weights are a convex combination, so errors scale with weights @ |v|: T roundings of the
    sum, and those of the scores and of the weights, which a kernel may round to the operands' type."""
    op = problem.op
    operands = op.operands or problem.node.src
    plain = replace(op, stores=())
    sized = replace(op, operands=(*operands[:2], Node(Map("abs"), operands[2]), *operands[3:]), stores=())
    bound = dict(zip(problem.node.src, sources, strict=True))
    with accumulate_in_float64():
        acc, size = evaluate_nodes([Node(o, *problem.node.src) for o in (plain, sized)], bound)
    u, narrow = F32.epsilon / 2, max(t.dtype.epsilon for t in problem.operands[:3])
    tokens = problem.operands[1].shape[2]
    slack = (tokens * u + ATTENTION_ROUNDINGS * narrow) * cast("torch.Tensor", size).double()
    norm = NORM_SAFETY * math.sqrt(max(tokens, 1)) * u + ATTENTION_ROUNDINGS / 4 * narrow
    return cast("torch.Tensor", acc).double(), slack, norm


def _stores_at(problem: AnyProblem, sources: Sequence[torch.Tensor], acc: torch.Tensor, sign: int) -> list[torch.Tensor]:
    """The stores for another accumulator, every float step of the epilogue pushed by a few roundings in one direction.

    A step's rounding is relative to its result and, where it cancels (a sum, 1 + erf(x) in a gelu), to its operands.
    """
    stores = stores_of(problem.node)
    nodes = toposort(stores)
    values: dict[Node, torch.Tensor] = {}
    for n in nodes:
        if isinstance(n.op, Acc):
            values[n] = acc.to(problem.acc.dtype.to_torch())
        elif isinstance(n.op, Param):
            values[n] = sources[n.op.index]
        else:
            operands = [values[x] for x in n.src]
            value = cast("torch.Tensor", n.op.evaluate(n, operands))
            if isinstance(n.op, Map) and n.dtype.is_float:
                size = value.abs() + sum((t.abs() for t in operands), torch.zeros(())) * (n.op.fn in CANCELLING)
                push = EPILOGUE_ROUNDINGS * max(F32.epsilon, n.dtype.epsilon) * size.nan_to_num(0.0, 0.0, 0.0)
                value = (value + sign * push).to(value.dtype)
            values[n] = value
    return [values[r] for r in stores]


def check(problem: AnyProblem, expected: Expected, results: Sequence[torch.Tensor]) -> str | None:
    """None if the results are right, else a sentence: which store, which element, how far off."""
    if len(results) != len(problem.outputs):
        return f"gave {len(results)} results, {len(problem.outputs)} wanted"
    for i, (got, wanted) in enumerate(zip(results, problem.outputs, strict=True)):
        name = f"store {i}" if len(results) > 1 else "the result"
        if tuple(got.shape) != wanted.shape or got.dtype != wanted.dtype.to_torch():
            return f"{name} is {got.dtype}{list(got.shape)}, {wanted} wanted"
        why = _compare(got.cpu(), expected, i, wanted.dtype)
        if why is not None:
            return f"{name} is wrong: {why}"
    return None


def _compare(got: torch.Tensor, expected: Expected, i: int, d: DType) -> str | None:
    reference = expected.reference[i]
    if expected.exact and not d.is_float:
        wrong = got != reference
    else:
        g, r = got.double(), reference.double()
        if expected.exact:
            inside = (g - r).abs() <= 16 * max(d.epsilon, F32.epsilon) * r.abs()
        else:
            inside = (g >= expected.low[i]) & (g <= expected.high[i])
        wrong = ~(inside | (g == r) | (g.isnan() & r.isnan()))
    count = int(wrong.sum())
    if count:
        at = tuple(int(x) for x in wrong.nonzero()[0])
        return f"{count} of {got.numel()} elements differ, first at {list(at)}: {got[at].item()} for {reference[at].item()}"
    if not expected.exact and d.is_float and got.numel():
        g, r = got.double(), reference.double()
        finite = g.isfinite() & r.isfinite()
        error = float((g - r)[finite].norm() / max(float(r[finite].norm()), 1e-300))
        limit = expected.norm_bound + d.epsilon
        if error > limit:
            return f"relative error {error:.1e} in norm exceeds {limit:.1e}: precision was dropped"
    return None


def synchronize(device: str) -> None:
    """Wait for the device's work; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def time_interleaved(
    runs: Sequence[Callable[[], object]], device: str, *, budget_s: float, min_rounds: int = 3, max_rounds: int = 200
) -> list[float]:
    """Median time of each run in µs, in rounds that take each in turn, within a budget for all together.

    A run slower than the best by far stops taking part after the first round, so a hopeless candidate costs one call.
    """
    first = [_once(f, device) for f in runs]
    times: list[list[float]] = [[] for _ in runs]
    best = min(first)
    start = time.perf_counter()
    for done in range(max_rounds):
        for i, f in enumerate(runs):
            if first[i] <= 8 * best:
                times[i].append(_once(f, device))
        if done + 1 >= min_rounds and time.perf_counter() - start > budget_s:
            break
    return [1e6 * (statistics.median(t) if t else f) for t, f in zip(times, first, strict=True)]


def _once(f: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    f()
    synchronize(device)
    return time.perf_counter() - start
