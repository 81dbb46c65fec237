"""Attention: two products and a softmax that belong in one kernel, carrying operands and stores as a gemm does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch

from tilewright.dtype import F32, F64, PRED
from tilewright.errors import TypeMismatchError
from tilewright.ir.evaluate import evaluate_nodes, float64_gemms
from tilewright.ir.factor import Factor, aligned
from tilewright.ir.graph import Node, Op, toposort
from tilewright.ir.ops.rounding import to_float
from tilewright.ir.ops.shape import broadcastable
from tilewright.ir.ops.source import Acc, Param
from tilewright.ir.types import TensorType, TupleType, Type

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

Causal = Literal["no", "upper", "lower"]
# In the place of a score that is hidden: below every score, and equal weights are what a row of nothing else has.
DROWNED = -(2.0**100)


def causal_shift(causal: Causal, queries: int, keys: int) -> int:
    """The last key that the first query sees, by the corner of the scores from which the triangle is drawn."""
    return keys - queries if causal == "lower" else 0


def pairs_seen(causal: Causal, queries: int, keys: int) -> int:
    """The number of pairs of a query and a key that causality leaves: a triangle, or one with a rectangle beside it."""
    if causal == "no":
        return queries * keys
    if queries > keys:  # the last ones see every key, or the first ones none
        return keys * (keys + 1) // 2 + (keys * (queries - keys) if causal == "upper" else 0)
    return queries * (queries + 1) // 2 + (queries * (keys - queries) if causal == "lower" else 0)


@dataclass(frozen=True)
class Attention(Op):
    """softmax(scale * q @ k^T + mask) @ v, with q [B, Hq, S, D], k [B, Hk, T, D], v [B, Hk, T, Dv] and maybe a mask.

    Hk divides Hq (grouped queries). The mask broadcasts to [B, Hq, S, T]: pred keeps where true, a float is added. `causal`
    "upper" lets query i see keys 0…i, "lower" keys 0…i + T - S. A row that may see nothing gives 0 when
    `zero_masked_rows`, has equal weights for all keys when `equal_masked_rows` (as the least number of the type in the place of
    hidden scores makes them), and else gives NaN. Computed in f32 (f64 for f64); the result has q's type.
    Source: Vaswani et al. 2017 (arXiv 1706.03762).

    Attributes:
        operands: q, k, v[, mask] as expressions over the sources; the sources themselves when empty.
        scores: expression over acc, the scaled product in f32 before the mask (a quantised model rounds here).
        weights: expression over acc, the softmax in f32.
        stores: expressions over acc, the result [B, Hq, S, Dv] in q's type; the result itself when empty.
    """

    scale: float
    causal: Causal = "no"
    zero_masked_rows: bool = False
    operands: tuple[Node, ...] = ()
    scores: Node | None = None
    weights: Node | None = None
    stores: tuple[Node, ...] = ()
    equal_masked_rows: bool = False

    def regions(self) -> dict[str, tuple[Node, ...]]:
        """The expressions by attribute name, those that are absent as ()."""
        found = {
            "operands": self.operands,
            "scores": () if self.scores is None else (self.scores,),
            "weights": () if self.weights is None else (self.weights,),
            "stores": self.stores,
        }
        return {label: roots for label, roots in found.items() if roots}

    def operand_types(self, src: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """Types of q, k, v and maybe the mask."""
        return tuple(o.tensor for o in self.operands) or tuple(src)

    def result_type(self, src: Sequence[TensorType]) -> TensorType:
        """Type of acc in the stores.

        Raises:
            TypeMismatchError: the operands do not fit.
        """
        operands = self.operand_types(src)
        if len(operands) not in (3, 4):
            raise TypeMismatchError(f"attention takes q, k, v and maybe a mask, not {len(operands)} operands")
        q, k, v = operands[:3]
        fits = q.rank == k.rank == v.rank == 4 and q.dtype.is_float and k.dtype.is_float and v.dtype.is_float
        fits = fits and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]
        if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise TypeMismatchError(f"attention over q {q}, k {k}, v {v}")
        scores = (*q.shape[:3], k.shape[2])
        if len(operands) == 4:
            mask = operands[3]
            if not ((mask.dtype is PRED or mask.dtype.is_float) and broadcastable(mask.shape, scores)):
                raise TypeMismatchError(f"attention mask {mask} does not broadcast to {list(scores)}")
        return q.with_shape((*q.shape[:3], v.shape[3]))

    def infer(self, *src: TensorType) -> Type:
        result = self.result_type(src)
        inner = TensorType(F64 if result.dtype is F64 else F32, (*result.shape[:3], self.operand_types(src)[1].shape[2]))
        for label, roots in self.regions().items():
            acc = result if label == "stores" else inner
            for leaf in toposort(roots):
                op = leaf.op
                if isinstance(op, Param) and not (0 <= op.index < len(src) and src[op.index] == op.type):
                    raise TypeMismatchError(f"param {op.index} of {label} is {op.type}; the source is not", where="attention")
                if isinstance(op, Acc) and label == "operands":
                    raise TypeMismatchError("an operand of attention reads its own accumulator", where="attention")
                if isinstance(op, Acc) and op.type != acc:
                    raise TypeMismatchError(f"{label} read acc as {op.type}; it is {acc}", where="attention")
        for label, root in (("scores", self.scores), ("weights", self.weights)):
            if root is not None and root.type != inner:
                raise TypeMismatchError(f"{label} must stay {inner}, not become {root.type}", where="attention")
        types = tuple(s.tensor for s in self.stores) or (result,)
        return types[0] if len(types) == 1 else TupleType(types)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        """Batches and heads of an attention over its sources as they are, and queries, unless it is causal."""
        if self.regions():
            return ()
        q, k = node.src[0].tensor, node.src[1].tensor
        scores = q.with_shape((*q.shape[:3], k.shape[2]))
        masks = [[f.axes[0] for f in aligned(scores, [m.tensor])] for m in node.src[3:]]
        batch, heads, queries = (tuple(m[axis] for m in masks) for axis in range(3))
        found = [Factor((0, 0, 0, *batch), 0), Factor((1, 1, 1, *heads), 1)]
        return (*found, Factor((2, None, None, *queries), 2)) if self.causal == "no" else tuple(found)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        product = to_float(self.product(node, src), self.result_type([s.tensor for s in node.src]).dtype)
        stored = self._region(self.stores, src, product) if self.stores else [product]
        return stored[0] if len(stored) == 1 else tuple(stored)

    def product(self, node: Node, src: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result [B, Hq, S, Dv] before it is rounded to q's type: f32, or f64 where that is computed in."""
        result = self.result_type([s.tensor for s in node.src])
        compute = torch.float64 if result.dtype is F64 or float64_gemms() else torch.float32
        operands = [self._region((o,), src, None)[0] for o in self.operands] or list(src)
        q, k, v = (t.to(compute) for t in operands[:3])
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) if groups != 1 else t for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.scores is not None:
            scores = self._region((self.scores,), src, scores)[0].to(compute)
        scores = self.masked(scores, operands[3] if len(operands) == 4 else None)
        weights = self.softmax(scores)
        if self.weights is not None:
            weights = self._region((self.weights,), src, weights)[0].to(compute)
        return weights @ v

    def masked(
        self, scores: torch.Tensor, mask: torch.Tensor | None, first: int = 0, queries: int | None = None
    ) -> torch.Tensor:
        """Scores [B, Hq, S, T] with minus infinity where the mask or causality hides a key, a float mask added; or those of the
        rows from `first` on, of `queries` in all."""
        if mask is not None:
            keeps = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, float("-inf")) if keeps else scores + mask.to(scores.dtype)
        if self.causal != "no":
            s, t = scores.shape[-2:]
            last = torch.arange(first, first + s, device=scores.device)[:, None]
            last = last + causal_shift(self.causal, s if queries is None else queries, t)
            scores = scores.masked_fill(torch.arange(t, device=scores.device) > last, float("-inf"))
        return scores

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Weights of masked scores [B, Hq, S, T]: those of rows that see nothing are as the attributes say."""
        weights = torch.softmax(scores, -1)
        if self.zero_masked_rows or self.equal_masked_rows:
            share = 1 / max(scores.shape[-1], 1) if self.equal_masked_rows else 0.0
            weights = weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), share)
        return weights

    @property
    def hidden(self) -> float:
        """The number that stands for a hidden score in kernels."""
        return DROWNED if self.equal_masked_rows else float("-inf")

    def _region(
        self,
        roots: Sequence[Node],
        src: Sequence[torch.Tensor],
        acc: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Expressions of this op for given sources and accumulator."""
        values: dict[Node, Value] = {}
        for leaf in toposort(roots):
            if isinstance(leaf.op, Param):
                values[leaf] = src[leaf.op.index]
            elif isinstance(leaf.op, Acc):
                values[leaf] = acc
        return cast("list[torch.Tensor]", evaluate_nodes(roots, values))
