"""Bounds on the distance of a right attention from the one computed in float64.

Its weights are a convex combination, so errors of at most d in the scores make of a weight w something between w e^(-2d) and
w e^(2d): the results move by what large scores lose in f32, however exact all that follows is. Scores that are not scaled, of
heads of 256 or 512, reach hundreds, and three digits of the result are gone with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from tilewright.dtype import F32, F64
from tilewright.ir.anchor import operands_of
from tilewright.ir.evaluate import accumulate_in_float64, evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Map, Param
from tilewright.schedule.intervals import size as size_of
from tilewright.schedule.pieces import most_at_once, pieces
from tilewright.schedule.problem import AttentionProblem, params_of
from tilewright.schedule.reductions import SAFETY

ROUNDINGS = 64  # of a weight and of what is multiplied with it, in the narrowest type on the way
SCORE_ROUNDINGS = 4  # of a score that is there: scaled, masked, the largest taken off, put to the base of the exponential

HOPELESS = 40.0  # an error of a score past which nothing is known of its weight

_Bounds = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attended(problem: AttentionProblem, sources: Sequence[torch.Tensor]) -> _Bounds:
    """The accumulator computed in float64, its errors' bound and their typical size.

    Errors scale with weights @ |v|: T roundings of the sum, those of the weights, which a kernel may round to the operands'
    type, and what those of the scores do.
    """
    op = problem.op
    operands = op.operands or problem.node.src
    plain = replace(op, stores=())
    sized = replace(op, operands=(*operands[:2], Node(Map("abs"), operands[2]), *operands[3:]), stores=())
    bound = dict(zip(problem.node.src, sources, strict=True))
    with accumulate_in_float64():
        acc, size = cast("list[torch.Tensor]", evaluate_nodes([Node(o, *problem.node.src) for o in (plain, sized)], bound))
    acc, size = acc.double(), size.double()
    u, narrow = _roundoff(problem), max(t.dtype.epsilon for t in problem.operands[:3])
    tokens = max(problem.operands[1].shape[2], 1)
    worst = (tokens * u + ROUNDINGS * narrow) * size
    usual = (SAFETY * math.sqrt(tokens) * u + ROUNDINGS / 4 * narrow) * (acc.square() + size.square() / tokens).sqrt()
    values = cast("list[torch.Tensor]", evaluate_nodes(operands_of(problem.node), _as_params(problem, bound)))
    if op.scores is None:
        moved, usually = _moved(problem, values, acc)
    else:
        moved = usually = torch.zeros((), dtype=torch.float64)
    flips = _flips(problem, bound, values)
    return acc, worst + moved + flips, usual + usually + flips


def _roundoff(problem: AttentionProblem) -> float:
    return (F64 if problem.acc.dtype is F64 else F32).epsilon / 2


def _moved(problem: AttentionProblem, operands: Sequence[torch.Tensor], acc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds, worst and typical, on how far errors of the scores move the results; computed a piece of the scores at a time."""
    q, k, v = (t.double() for t in operands[:3])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    keys, squares, values = k.abs(), k.square().sum(-1), size_of(v)
    scores = (*q.shape[:3], k.shape[2])
    mask = operands[3].expand(scores) if len(operands) == 4 else None
    found = torch.empty_like(acc), torch.empty_like(acc)
    for index in pieces(q.shape[:3], max(1, most_at_once(q) // max(scores[3], 1))):
        heads = index[:2]
        hidden, first = None if mask is None else mask[index], index[2].start or 0
        for whole, part in zip(
            found,
            _moved_rows(problem, (q[index], k[heads], keys[heads], squares[heads], values[heads]), acc[index], hidden, first),
            strict=True,
        ):
            whole[index] = torch.minimum(part, 2 * values[heads].amax(-2, keepdim=True)) if scores[3] else part
    return found


def _moved_rows(
    problem: AttentionProblem,
    operands: tuple[torch.Tensor, ...],
    acc: torch.Tensor,
    mask: torch.Tensor | None,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the rows of queries from `first` on, with operands q, k, the sizes of k, the sums of its squares a key, and
    the sizes of v."""
    q, k, keys, squares, values = operands
    op, u, depth = problem.op, _roundoff(problem), max(q.shape[-1], 1)
    plain = q @ k.transpose(-1, -2) * op.scale
    masked = op.masked(plain, mask, first, problem.operands[0].shape[2])
    there = masked.isfinite()
    seen = SCORE_ROUNDINGS * u * size_of(masked)
    most = (depth + 2) * u * abs(op.scale) * (q.abs() @ keys.transpose(-1, -2)) + seen
    walk = q.square().sum(-1)[..., None] * squares[..., None, :] * (op.scale**2 / depth)
    often = math.sqrt(depth) * u * (plain.square() + walk).sqrt() + seen
    most, often = (torch.where(there, e, torch.zeros_like(e)).clamp(max=HOPELESS) for e in (most, often))
    weights = torch.softmax(masked, -1).nan_to_num(0.0)
    # (weights * e^most) / sum(weights * e^-most) is the most that a weight can become.
    least = (weights * torch.exp(-most)).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    worst = (weights * (torch.exp(most) / least - 1)).clamp(min=0.0) @ values
    off = weights * often
    first_order = (off.square() @ values.square()).sqrt() + acc.nan_to_num(0.0).abs() * off.square().sum(
        -1, keepdim=True
    ).sqrt()
    usual = (
        SAFETY * first_order * torch.exp((2 * often).amax(-1, keepdim=True) if often.shape[-1] else often.sum(-1, keepdim=True))
    )
    return worst, torch.minimum(usual, worst)


def _flips(problem: AttentionProblem, bound: Mapping[Node, torch.Tensor], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bounds on how far results move when scores or weights within rounding error of the edge between two codes take the other
    one; 0 where an attention has no inner expression. A score that jumps moves a row's weights by at most twice the jump times
    the largest weight; each change of a weight moves the result by that times the value."""
    op = problem.op
    if op.scores is None and op.weights is None:
        return torch.zeros((), dtype=torch.float64)
    q, k, v = (t.double() for t in operands[:3])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    u, depth = _roundoff(problem), q.shape[3]
    scores = q @ k.transpose(-1, -2) * op.scale
    error = (depth + 2) * u * abs(op.scale) * (q.abs() @ k.abs().transpose(-1, -2))
    scores, jump, jumped = _jumps(problem, op.scores, bound, scores, error)
    weights = torch.softmax(op.masked(scores, operands[3] if len(operands) == 4 else None), -1).nan_to_num(0.0)
    peak = weights.amax(-1, keepdim=True)
    moved = jump * peak * (jumped > 0)
    loose = weights * (ROUNDINGS * F32.epsilon + 2 * error.amax(-1, keepdim=True) + moved)
    _, step, counted = _jumps(problem, op.weights, bound, weights, loose)
    largest = v.nan_to_num(0.0, 0.0, 0.0).abs().amax(-2, keepdim=True)
    return (2 * jump * peak * jumped + step * counted) * largest


def _jumps(
    problem: AttentionProblem, root: Node | None, bound: Mapping[Node, torch.Tensor], values: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """The values of an inner expression at arguments known up to an error, the largest jump they make there, and the number of
    jumps in each row."""
    if root is None:
        return values, 0.0, torch.zeros(*values.shape[:-1], 1, dtype=torch.float64)
    acc = Node(Acc(root.tensor))
    params = _as_params(problem, bound)
    middle, *ends = (
        cast("torch.Tensor", evaluate_nodes((root,), {**params, acc: x})[0]).double()
        for x in (values, values - error, values + error)
    )
    jump = torch.stack([(e - middle).abs() for e in ends]).amax(0)
    return middle, float(jump.max()) if jump.numel() else 0.0, (jump > 0).double().sum(-1, keepdim=True)


def _as_params(problem: AttentionProblem, bound: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
    """The sources as the leaves of the problem's own expressions."""
    return {n: bound[problem.node.src[cast("Param", n.op).index]] for n in params_of(problem)}
