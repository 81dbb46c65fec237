"""Constant folding: numbers, and operands that change nothing, known before the program runs."""

from __future__ import annotations

from typing import cast

import torch

from tilewright.dtype import PRED, DType
from tilewright.ir.build import broadcast, const
from tilewright.ir.constant import scalar_value
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Const, Convert, Map, Reshape, Select, Transpose
from tilewright.ir.pattern import Match, Pat, rule

_ONE_EACH = (Map, Select, Convert, Reshape, Transpose)


@rule(Pat(_ONE_EACH, where=lambda n: all(isinstance(s.op, Const) and s.tensor.elements == 1 for s in n.src)), stage="canonical")
def compute_numbers_beforehand(m: Match) -> Node | None:
    """f(constant, …) -> constant

    Where: every operand is one element, so the result is one too. Larger constants stay: a weight is a reference to its
    source's memory, and what is quantised is to be found so. Exact: yes, it is what would be computed.
    """
    return const(cast("torch.Tensor", evaluate_nodes([m.node], {})[0]), m.node.dtype)


@rule(Pat(Select), stage="canonical")
def select_what_is_known_to_be_selected(m: Match) -> Node | None:
    """select(true, a, b) -> a; select(false, a, b) -> b

    Where: the predicate is one known value everywhere. Exact: yes.
    """
    known = scalar_value(m.node.src[0])
    return None if known is None else broadcast(m.node.src[1 if known else 2], m.node.shape)


@rule(Pat(Map, where=lambda n: len(n.src) == 2), stage="canonical")
def drop_operand_that_changes_nothing(m: Match) -> Node | None:
    """x * 1 | x / 1 | maximum(x, lowest) | minimum(x, highest) | and(x, true) | or(x, false) -> x; x + 0 | x - 0 of integers

    Where: the other operand is that number everywhere; on either side where the function commutes. Exact: yes; floats keep
    their additions of zero, since -0.0 + 0.0 is 0.0.
    """
    op = m.node.op
    assert isinstance(op, Map)
    wanted = _neutral(op.fn, m.node.src[0].dtype)
    if wanted is None:
        return None
    for kept, other in ((0, 1), (1, 0))[: 1 if op.fn in ("divide", "subtract") else 2]:
        value = scalar_value(m.node.src[other])
        if value is not None and value == wanted:
            return broadcast(m.node.src[kept], m.node.shape)
    return None


def _neutral(fn: str, dtype: DType) -> float | int | bool | None:
    """The number that `fn` of type `dtype` leaves its other operand alone for."""
    if dtype is PRED:
        return {"and": True, "multiply": True, "minimum": True, "or": False, "add": False, "maximum": False}.get(fn)
    if fn in ("multiply", "divide"):
        return 1
    if fn in ("add", "subtract"):
        return 0 if dtype.is_integer else None
    if fn == "maximum":
        return float("-inf") if dtype.is_float else int(dtype.min)
    if fn == "minimum":
        return float("inf") if dtype.is_float else int(dtype.max)
    return None
