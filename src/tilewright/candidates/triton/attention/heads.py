"""Operands of an attention for a generated GPU kernel: where they lie, and in which form they meet the matrix unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from tilewright.candidates.triton.expressions.emit import NUMBERED, VIEWS, check
from tilewright.candidates.triton.expressions.printer import FP8
from tilewright.dtype import BF16, F16, F32, DType
from tilewright.ir.anchor import operands_of
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Acc, Attention, Const, Dequantize, Gather, Param, Quantize
from tilewright.ir.ops.attention import causal_shift
from tilewright.lowering.access import Access, of_operand, of_store
from tilewright.lowering.attention import AttentionFacts, facts_of
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import AttentionProblem


@dataclass(frozen=True)
class Codes:
    """8-bit codes with one scale: (code - zero) * scale."""

    dtype: DType
    zero: int
    scale: float


@dataclass(frozen=True)
class Operand:
    """An operand as the kernel reads it.

    Attributes:
        at: its access; the root gives the codes where there are any.
        codes: type, zero point and scale of its codes; None for floats.
    """

    at: Access
    codes: Codes | None

    @property
    def dtype(self) -> DType:
        return self.at.root.dtype

    @property
    def reads_nothing_as_zero(self) -> bool:
        """Say whether what is read as 0 enters the product as 0."""
        shifted = self.codes is not None and self.codes.zero != 0
        return not shifted and all(isinstance(n.op, (Param, Gather, *VIEWS)) for n in toposort((self.at.root,)))


@dataclass(frozen=True)
class Rounded:
    """An expression that rounds acc to 8-bit codes: it divides by one scale, and multiplies by another."""

    codes: Codes
    divisor: float


@dataclass(frozen=True, kw_only=True)
class Heads(AttentionFacts):
    """One attention to generate.

    Attributes:
        group: heads whose queries follow one another as if they were one head's (`by_key_head`).
        q, k, v: the operands.
        mma_dtype: the type in which both products are done: f16 or bf16, or f32. Codes are multiplied as they are.
        scale: factor of the scores, codes' scales included.
        on_scores, on_weights: an expression or a rounding of the scaled scores, and of the softmax.
    """

    q: Operand
    k: Operand
    v: Operand
    mma_dtype: DType
    scale: float
    on_scores: Access | Rounded | None
    on_weights: Access | Rounded | None
    group: int = 1

    @property
    def shift(self) -> int:
        return causal_shift(self.causal, self.queries // self.group, self.keys)

    @property
    def paged(self) -> bool:
        """Tell whether keys or values are picked by a table of blocks."""
        return any(isinstance(n.op, Gather) for n in toposort((self.k.at.root, self.v.at.root)))

    def by_key_head(self) -> Heads:
        """The same attention with a head for each head of keys: the queries of those that share it follow one another, as their
        rows do anyway."""
        fewer, more = self.heads // self.shared, self.queries * self.shared
        return replace(self, heads=fewer, shared=1, queries=more, group=self.group * self.shared)


def heads_of(problem: AttentionProblem, fp8: frozenset[str]) -> Heads:
    """The attention to generate.

    Args:
        problem: what is asked.
        fp8: types that the hardware converts (`module.exact_fp8`).

    Raises:
        Unsupported: the sentence why there is none.
    """
    op, facts = problem.op, facts_of(problem, check)
    q, k, v, *_ = operands_of(problem.node)
    if any(facts.batch * rows > NUMBERED for rows in (facts.heads * facts.queries, k.shape[1] * facts.keys)):
        raise Unsupported("more than 2^31 rows")
    check((k, v), picks=True)
    codes = [_codes(t) for t in (q, k, v)]
    on_weights = None if op.weights is None else _rounded(op.weights, fp8)
    whole = all(c is not None and c[1].dtype.is_integer for c in codes[:2])  # no score is NaN
    mma_dtype = _mma_dtype_of_codes(op, (q, k, v), codes, isinstance(on_weights, Rounded), fp8)
    if mma_dtype is not None:
        roots = [(t, None) if c is None else c for t, c in zip((q, k, v), codes, strict=True)]
        given = [Operand(of_operand(root, columns_last=True), c) for root, c in roots]
        scale = op.scale * math.prod(o.codes.scale for o in given[:2] if o.codes is not None)
    else:
        given = [Operand(of_operand(t, columns_last=True), None) for t in (q, k, v)]
        narrow = q.dtype is k.dtype is v.dtype and q.dtype in (F16, BF16)
        mma_dtype, scale = q.dtype if narrow else F32, op.scale
    return Heads(
        **vars(facts),
        q=given[0],
        k=given[1],
        v=given[2],
        mma_dtype=mma_dtype,
        scale=scale,
        on_scores=None if op.scores is None else _rounded(op.scores, fp8, integers=whole),
        on_weights=on_weights,
    )


def _mma_dtype_of_codes(
    op: Attention, operands: Sequence[Node], codes: Sequence[tuple[Node, Codes] | None], rounded: bool, fp8: frozenset[str]
) -> DType | None:
    """The type in which codes are multiplied as they are, scaled afterwards: each is held by f16 and by bf16, and so is its
    difference from a zero point. None where operands are multiplied as they were dequantised."""
    types = {t.dtype for t in operands}
    if rounded:  # weights are codes, too
        return F16 if all(codes) and types == {F32} else None
    mma_dtype = types.pop()
    held = mma_dtype is F16 or (
        mma_dtype is BF16 and all(c is None or c[1].dtype not in FP8 or c[1].dtype.name in fp8 for c in codes)
    )
    return mma_dtype if held and not types and any(codes) and op.scores is None and op.weights is None else None


def number(n: Node) -> float | None:
    """The value of a constant that is one number."""
    return float(n.op.data.tensor().reshape(()).item()) if isinstance(n.op, Const) and n.tensor.elements == 1 else None


def _meaning(n: Node) -> Codes | None:
    """The codes, scale and zero point of a dequantisation of 8-bit codes by the same numbers everywhere; None for any other
    node."""
    if not isinstance(n.op, Dequantize) or n.op.block is not None or n.dtype not in (F16, BF16, F32):
        return None
    source, numbers = n.src[0].dtype, [number(s) for s in n.src[1:]]
    if None in numbers:
        return None
    scale, zero = (*cast("list[float]", numbers), 0.0)[:2]
    eight = source in FP8 or (source.is_integer and source.bits == 8)
    return Codes(source, int(zero), scale) if eight and n.src[1].dtype is F32 and 0 < scale < float("inf") else None


def _codes(root: Node) -> tuple[Node, Codes] | None:
    """An operand's codes under its views, and their meaning."""
    at = root
    while isinstance(at.op, VIEWS):
        at = at.src[0]
    meaning = _meaning(at)
    return None if meaning is None else (substitute((root,), {at: at.src[0]})[0], meaning)


def _rounded(root: Node, fp8: frozenset[str], *, integers: bool = True) -> Access | Rounded:
    """An inner expression; a rounding to codes and back if it is nothing else, and has a short form: to fp8 types that the
    hardware converts, and to `integers`."""
    meaning = _meaning(root)
    if meaning is None or not (meaning.dtype.name in fp8 or (integers and meaning.dtype.is_integer)):
        return of_store(root)
    code = root.src[0]
    if isinstance(code.op, Quantize) and isinstance(code.src[0].op, Acc) and code.src[2:] == root.src[2:]:
        divisor = number(code.src[1])
        saturates = code.op.overflow == "saturate" or code.dtype.is_integer
        if divisor is not None and 2.0**-60 < divisor < 2.0**60 and saturates and code.op.block is None:
            return Rounded(meaning, divisor)
    return of_store(root)
