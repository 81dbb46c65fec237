"""Softmax attention, however it is spelt, as the one operation that says so."""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.dtype import F32, F64, DType
from tilewright.ir.axes import Placed, axes_of, layout_of
from tilewright.ir.build import broadcast, const, convert, map_, reshape
from tilewright.ir.constant import scalar_value, scaling
from tilewright.ir.expression import Sources
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Attention, Convert, Dequantize, Gemm, Map, Param, Reduce, Select
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.ir.shown import op_name
from tilewright.ir.types import TensorType
from tilewright.rules._attention_mask import DROWNS, HIDES, Masks, causality, sight
from tilewright.rules._attention_parts import Operand, Slots, operand, slots
from tilewright.rules._attention_path import Applied, Found, find
from tilewright.rules._row_statistics import function_of


class _LeftError(Exception):
    """A place that is attention cannot be written as one operation: a sentence why."""


@rule(Pat(Gemm), stage="recognise")
def softmax_between_two_products_is_attention(m: Match) -> Node | None:
    """gemm(softmax(f(scale * gemm(q, k^T)) + mask), v) -> attention(q, k, v, mask)

    The scale may stand on q, on k or on the product; the mask may be added, selected, or causal by construction; f and what
    follows the softmax may round to codes and back (`scores`, `weights`); heads may be merged, repeated for groups of queries,
    or split from a batch of matrices; either product may be transposed; select(is_nan(softmax), 0, softmax) makes blind rows 0.
    Where: float products of plain operands; nothing else reads what stands between; after the mask comes only the softmax.
    Exact: no: scores and weights are not rounded to types narrower than f32 on the way; a finite mask below -1e30 is taken to
    drown every score it is added to, and a causal one that puts -1e9 or less in their place to hide them; and where scores are
    NaN or +inf the guard would give 0, attention gives NaN. Source: Vaswani et al. 2017 (arXiv 1706.03762).
    """
    found = find(m.node)
    if found is None:
        return None
    query, key = (operand(p, m.users, scaled=True) for p in (found.query, found.key))
    value = operand(found.value, m.users, scaled=False)
    by_role = slots(found, key, value)
    if by_role is None:
        return None
    outside = m.read_outside(found.inside)
    if outside is not None:
        m.refuse(f"the {op_name(outside)} inside this attention is also read elsewhere")
        return None
    try:
        return _attention(found, by_role, query, key, value)
    except _LeftError as left:
        m.refuse(str(left))
        return None


def _has_plain_sources(node: Node) -> bool:
    """Tell whether the sources of an attention are its q, k, v and maybe mask as they are, whatever is done to its scores and
    weights; and whether its result is stored as it is."""
    op = node.op
    return isinstance(op, Attention) and not op.operands and not op.stores


@rule(Pat(Attention, where=_has_plain_sources), stage="recognise")
def heads_repeated_for_a_group_are_grouped(m: Match) -> Node | None:
    """attention(q, repeat(k), repeat(v)) -> attention(q, k, v)

    Where: each head of k and v is repeated the same number of times in a row, as a broadcast between reshapes; casts and
    quantisation per tensor behind that move before it. Exact: yes.
    Source: Ainslie et al. 2023 (arXiv 2305.13245).
    """
    k, v = m.node.src[1:3]
    outer = layout_of(k.shape[:3])
    layouts = [(*outer, *layout_of(o.shape[3:])) for o in (k, v)]
    found = [operand(Placed(o, layout), m.users, scaled=False) for o, layout in zip((k, v), layouts, strict=True)]
    heads = axes_of(outer[1:2])
    kept = [[a for a in heads if a in o.axes] for o in found]
    group_is_inner = kept[0] == kept[1] == heads[: len(kept[0])] and len(kept[0]) < len(heads)
    if 0 in (*k.shape, *v.shape) or not group_is_inner:
        return None
    fewer = [o.arranged((outer[0], kept[0], *layout[2:])) for o, layout in zip(found, layouts, strict=True)]
    return Node(m.node.op, m.node.src[0], *fewer, *m.node.src[3:])


@rule(Pat(Attention, where=lambda n: len(n.src) == 4 and _has_plain_sources(n)), stage="recognise")
def causal_mask_is_causality(m: Match) -> Node | None:
    """attention(q, k, v, mask & causal) -> attention(q, k, v, mask) {causal}

    Where: constants, iota and what they make say which keys are seen: those up to the query's own place, counted from the first
    key or from the last, in every batch and head. What else hides keys stays a mask, as do constant biases; one
    that hides nothing goes.
    Exact: yes, but that where a bias of +inf or NaN is added to a hidden score, attention hides it.
    """
    op, (q, k, v, mask) = m.node.op, m.node.src
    assert isinstance(op, Attention)
    causal, left = causality(mask, q.shape[2], k.shape[2])
    if left is mask or "no" not in (op.causal, causal):
        return None
    op = replace(op, causal=op.causal if causal == "no" else causal)
    if left is None and (op.causal == "upper" or q.shape[2] <= k.shape[2]):
        op = replace(op, equal_masked_rows=False)  # every row sees something
    return Node(op, q, k, v, *([] if left is None else [left]))


@rule(Pat(Attention, where=lambda n: len(n.src) == 4 and _has_plain_sources(n)), stage="recognise")
def mask_that_drowns_scores_is_truth_values(m: Match) -> Node | None:
    """attention(q, k, v, select(p, 0, c)) -> attention(q, k, v, p) {equal_masked_rows}

    As transformers masks, with the least number of the type: rows that see nothing have equal weights for all keys, for
    the sum of c and a score is c. Where: c is finite and at most -1e30; the mask is no constant that a kernel knows as causal;
    causality hides nothing beside it. Exact: yes, of finite scores; a hidden score that is NaN or infinite stays hidden.
    """
    op, (q, k, v, mask) = m.node.op, m.node.src
    assert isinstance(op, Attention)
    views: list[Node] = []
    chosen = mask
    while isinstance(chosen.op, VIEWS):
        views.append(chosen)
        chosen = chosen.src[0]
    if op.causal != "no" or not isinstance(chosen.op, Select) or sight(mask, q.shape[2], k.shape[2]) != "other":
        return None
    on, off = (scalar_value(s) for s in chosen.src[1:])
    pair = sorted((math.nan if x is None else x) for x in (on, off))
    if not (-math.inf < pair[0] <= DROWNS and pair[1] == 0):
        return None
    test = chosen.src[0]
    shown = test if on == 0 else test.src[0] if function_of(test) == "not" else map_("not", test)
    shown = broadcast(shown, chosen.shape)
    for view in reversed(views):
        shown = Node(view.op, shown)
    return Node(replace(op, zero_masked_rows=False, equal_masked_rows=True), q, k, v, shown)


@rule(Pat(Attention, where=lambda n: not n.op.regions()), stage="recognise")
def single_queries_that_share_keys_are_rows_of_one_head(m: Match) -> Node | None:
    """attention(q [B, H * g, 1, D], k [B, H, T, D], v) -> reshape(attention(reshape(q) [B, H, g, D], k, v))

    As a model decodes one token: keys and values, of which there are far more, are then read once for a group and not once for
    each of its heads. Where: one query a head; no causality, or one that hides nothing from it. Exact: yes.
    Source: Ainslie et al. 2023 (arXiv 2305.13245).
    """
    op, (q, k, v, *mask) = m.node.op, m.node.src
    assert isinstance(op, Attention)
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1:3]
    sees_all = op.causal == "no" or (op.causal == "lower" and keys > 0)
    if queries != 1 or heads in (0, groups) or not sees_all:
        return None
    if mask and len(mask[0].shape) >= 3 and mask[0].shape[-3] == heads:
        *before, _, _, last = mask[0].shape
        mask = [reshape(mask[0], (*before, groups, heads // groups, last))]
    rows = reshape(q, (batch, groups, heads // groups, q.shape[3]))
    made = Node(replace(op, causal="no"), rows, k, v, *mask)
    return reshape(made, (batch, heads, 1, v.shape[3]))


def _attention(found: Found, by_role: Slots, query: Operand, key: Operand, value: Operand) -> Node:
    q, k, v = (o.arranged(d) for o, d in ((query, by_role.of_query), (key, by_role.of_key), (value, by_role.of_value)))
    q = convert(q, _result_type(q.dtype, found.out_dtype))
    inner = F64 if q.dtype is F64 else F32
    region = Sources([q, k, v])
    acc = Node(Acc(TensorType(inner, (*q.shape[:3], k.shape[2]))))
    scores = _Scores(acc, region, by_role, query.factor * key.factor)
    for applied in found.scores:
        scores.apply(applied)
    weights = _Weights(acc, region, by_role, scores.masks)
    for applied in found.weights:
        weights.apply(applied)
    causal, mask = scores.masks.result()
    op = Attention(scores.scale, causal, weights.zero_masked_rows)
    made = _made(op, [q, k, v] if mask is None else [q, k, v, mask], scores.result(), weights.result(), region)
    return convert(Placed(made, tuple(map(tuple, by_role.of_result))).arranged(found.out), found.out_dtype)


def _result_type(q: DType, out: DType) -> DType:
    """The type of query, and so of the result, from which the product's own type follows by one rounding at most."""
    if q is out or q.bits > out.bits:
        return q
    return out if out.bits > q.bits else F32


def _made(op: Attention, operands: list[Node], scores: Node | None, weights: Node | None, region: Sources) -> Node:
    """The attention, whose sources are its operands alone where no expression reads more."""
    expressions = [e for e in (scores, weights) if e is not None]
    leaves = [region.param(o) for o in operands]
    if not any(isinstance(n.op, Param) for n in toposort(expressions)):
        return Node(replace(op, scores=scores, weights=weights), *operands)
    used = Sources()
    roots = used.rebase([*leaves, *expressions], region.nodes)
    inner = iter(roots[len(operands) :])
    made = replace(
        op,
        operands=tuple(roots[: len(operands)]),
        scores=None if scores is None else next(inner),
        weights=None if weights is None else next(inner),
    )
    return Node(made, *used.nodes)


class _Expression:
    """An expression over acc that grows step by step, computed in acc's type; codes and 8-bit floats keep theirs in between."""

    def __init__(self, acc: Node, sources: Sources, by_role: Slots) -> None:
        self.value = acc
        self.acc = acc
        self._sources = sources
        self._slots = by_role

    def grow(self, applied: Applied) -> None:
        """The step on what there is so far."""
        node, at = applied.step.node, applied.step.at
        if isinstance(node.op, Convert):
            if node.dtype.bits <= 8:
                self.value = Node(node.op, self._wide())
            return
        alike = isinstance(node.op, (Map, Select))
        given = self.value if isinstance(node.op, Dequantize) else self._wide()
        src = [given if i == at else self._side(s, applied.sides[i], alike) for i, s in enumerate(node.src)]
        self.value = Node(Dequantize(self.acc.dtype) if isinstance(node.op, Dequantize) else node.op, *src)

    def result(self) -> Node | None:
        """The expression, or None if it is acc itself."""
        return None if self.value is self.acc else self._wide()

    def _wide(self) -> Node:
        return convert(self.value, self.acc.dtype)

    def _side(self, given: Node, side: Placed | None, alike: bool) -> Node:
        """A source beside the value, laid out as the scores are; of the value's type if the function takes one type."""
        alike = alike and given.dtype.is_float
        number = scalar_value(given)
        if number is not None:
            return const(number, self.acc.dtype if alike else given.dtype)
        if side is None:
            raise _LeftError("its guard against rows that see nothing does not stand right behind the softmax")
        param = self._sources.param(side.arranged(self._slots.of_scores))
        return convert(param, self.acc.dtype) if alike else param


class _Scores(_Expression):
    """The expression on the first product: a scale, an expression, then masks."""

    def __init__(self, acc: Node, sources: Sources, by_role: Slots, scale: float) -> None:
        super().__init__(acc, sources, by_role)
        self.scale = scale
        self.masks = Masks(by_role, acc.dtype)

    def apply(self, applied: Applied) -> None:
        """Take one more step into the expression.

        Raises:
            _LeftError: the operation cannot do it in this place.
        """
        node, at = applied.step.node, applied.step.at
        number = scaling(node)
        other = applied.sides[1 - at] if isinstance(node.op, Map) and len(node.src) == 2 else None
        if isinstance(node.op, Convert) and node.dtype.bits > 8:
            return
        if number is not None and number[0] == at:
            if self.masks.count and not (self.masks.only_hides and number[1] > 0):
                raise _LeftError("its scores are scaled after they are masked")
            self._scaled(applied, number[1])
        elif self.masks.alone:
            raise _LeftError("its causal mask hides scores behind a finite number, and something follows it")
        elif function_of(node) in ("add", "subtract") and other is not None and (at == 0 or function_of(node) == "add"):
            self.masks.add(other, negated=function_of(node) == "subtract")
        elif isinstance(node.op, Select):
            self._selected(applied)
        elif self.masks.count:
            raise _LeftError(f"its scores go through {function_of(node) or node.op.name} after they are masked")
        else:
            self.grow(applied)

    def _scaled(self, applied: Applied, number: float) -> None:
        if self.value is self.acc:
            self.scale *= number
        else:
            self.grow(applied)

    def _selected(self, applied: Applied) -> None:
        node, keeps = applied.step.node, applied.step.at == 1
        fill, side = scalar_value(node.src[2 if keeps else 1]), applied.sides[0]
        if fill is None or side is None:
            raise _LeftError("what it puts in the place of scores is not one number")
        if fill <= DROWNS:
            self.masks.hide(side, fill, keeps=keeps)
        elif not ((fill <= HIDES or fill <= node.dtype.min) and self.masks.hide_if_causal(side, keeps=keeps)):
            if self.masks.count:
                raise _LeftError(f"it puts {fill:g} in the place of scores that are masked already")
            self.grow(applied)


class _Weights(_Expression):
    """The expression on the softmax: a guard against rows that see nothing, then an expression."""

    def __init__(self, acc: Node, sources: Sources, by_role: Slots, masks: Masks) -> None:
        super().__init__(acc, sources, by_role)
        self.zero_masked_rows = False
        self._masks = masks

    def apply(self, applied: Applied) -> None:
        """Take one more step into the expression.

        Raises:
            _LeftError: the operation cannot do it in this place.
        """
        guard = applied.step.is_nan_guard or self._hides_blind_rows(applied)
        if guard and self.value is self.acc:
            self.zero_masked_rows = True
        else:
            self.grow(applied)

    def _hides_blind_rows(self, applied: Applied) -> bool:
        """Tell whether the step is select(max(bias) == -inf, 0, w), for the one mask `bias` that was added."""
        node, test, bias = applied.step.node, applied.sides[0], self._masks.bias
        if not isinstance(node.op, Select) or test is None or bias is None or scalar_value(node.src[1]) != 0:
            return False
        if applied.step.at != 2 or function_of(test.node) != "equal" or scalar_value(test.node.src[1]) != float("-inf"):
            return False
        peak = test.node.src[0]
        if not isinstance(peak.op, Reduce) or peak.op.fn != "maximum" or peak.src[0] is not bias.node or not peak.op.keepdims:
            return False
        rows = [axes_of((d,)) for d in bias.layout]
        reduced = [axes for i, axes in enumerate(rows) if i in peak.op.axes]
        left = [[] if i in peak.op.axes else axes for i, axes in enumerate(rows)]
        return reduced == [self._slots.keys] and [axes_of((d,)) for d in test.layout] == left
