"""Recognition of what hides scores from a softmax, however it is written, as one mask or as causality."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Literal, cast

import torch

from tilewright.dtype import PRED, DType
from tilewright.ir.axes import Placed, broadcast_aligned
from tilewright.ir.build import const, convert, map_
from tilewright.ir.constant import repeating_value, scalar_value
from tilewright.ir.dims import scope_of
from tilewright.ir.extent import extent_at
from tilewright.ir.graph import Node
from tilewright.ir.instance import nodes_at
from tilewright.ir.ops import Broadcast, Map, Select
from tilewright.ir.ops.attention import Causal
from tilewright.rules._attention_parts import Slots
from tilewright.rules._row_statistics import function_of

Sight = Literal["upper", "lower", "all", "other"]

# Added to any f32 score below 6e22 this gives the number itself, and next to a visible score its exponential is 0.
DROWNS = -1e30
# Beside a bias up to this, what DROWNS hides is as hidden, and f32 has DROWNS again as their sum.
SMALL = 1e22
# In the place of a score, beside at least one visible score above it by 104 (exp underflows), this hides as -inf does.
HIDES = -1e9
_SIGHT: weakref.WeakKeyDictionary[Node, dict[tuple[int, int], Sight]] = weakref.WeakKeyDictionary()


class Masks:
    """Masks of one attention, put together in the order they apply.

    Attributes:
        value: pred that keeps where true, or float that is added; None while nothing is masked.
        count: how many masks there were.
        bias: the float mask as the program has it and where it lies, while it is the only mask.
        alone: whether the mask stands for the program's only if it stays the only one.
    """

    def __init__(self, slots: Slots, inner: DType) -> None:
        self.value: Node | None = None
        self.count = 0
        self.bias: Placed | None = None
        self.alone = False
        self._slots = slots
        self._inner = inner

    @property
    def only_hides(self) -> bool:
        """Tell whether what is masked is -inf, and nothing else is changed."""
        return self.value is None or self.value.dtype is PRED

    def add(self, side: Placed, *, negated: bool) -> None:
        """scores + side, or scores - side."""
        node = side.node
        if isinstance(node.op, Select) and not negated:
            on, off = scalar_value(node.src[1]), scalar_value(node.src[2])
            lies = broadcast_aligned(node.src[0].shape, side.layout)
            infinite = float("-inf")
            if lies is not None and (on, off) in ((0, infinite), (infinite, 0)):
                self.hide(Placed(node.src[0], lies).without_views(), infinite, keeps=on == 0)
                self.bias = side if self.count == 1 else None
                return
        arranged = side.arranged(self._slots.of_scores)
        arranged = map_("negate", arranged) if negated else arranged
        self._count(side)
        if self.value is None:
            self.value = arranged
        elif self.value.dtype is PRED:
            self.value = Node(Select(), self.value, convert(arranged, self._inner), self._number(float("-inf")))
        else:
            self.value = map_("add", convert(self.value, self._inner), convert(arranged, self._inner))

    def hide(self, side: Placed, fill: float, *, keeps: bool) -> None:
        """select(side, scores, fill) where the predicate `keeps` scores that it is true for; else with the sides exchanged."""
        visible = self._visible(side, keeps)
        self._count(None)
        if fill == float("-inf") and (self.value is None or self.value.dtype is PRED):
            self.value = visible if self.value is None else map_("and", self.value, visible)
            return
        if self.value is None:
            before = self._number(0.0)
        elif self.value.dtype is PRED:
            before = Node(Select(), self.value, self._number(0.0), self._number(float("-inf")))
        else:
            before = convert(self.value, self._inner)
        self.value = Node(Select(), visible, before, self._number(fill))

    def hide_if_causal(self, side: Placed, *, keeps: bool) -> bool:
        """The same with a fill that hides only where a row sees something: done if the mask is first and causal, and each row
        sees something."""
        visible = self._visible(side, keeps)
        seen = sight(visible, *self._extents)
        if self.count or not (seen == "upper" or (seen == "lower" and visible.shape[-1] >= visible.shape[-2])):
            return False
        self._count(None)
        self.value = visible
        self.alone = True
        return True

    def result(self) -> tuple[Causal, Node | None]:
        """Causality and the mask that is left."""
        return ("no", None) if self.value is None else causality(self.value, *self._extents)

    def _visible(self, side: Placed, keeps: bool) -> Node:
        arranged = side.arranged(self._slots.of_scores)
        return arranged if keeps else map_("not", arranged)

    @property
    def _extents(self) -> tuple[int, int]:
        queries, keys = (math.prod(a.extent for a in dim) for dim in (self._slots.queries, self._slots.keys))
        return queries, keys

    def _count(self, bias: Placed | None) -> None:
        self.count += 1
        self.bias = bias if self.count == 1 else None

    def _number(self, value: float) -> Node:
        return const(value, self._inner)


def causality(mask: Node, queries: int, keys: int) -> tuple[Causal, Node | None]:
    """Split a mask over [batch, heads, queries, keys] into causality and the mask that is left, None for none.

    Of predicates that hold together, those that constants make may be causal between them. A mask that is nothing but causal,
    or that and constants far from drowning a score, may hide with a large finite number, too.
    """
    seen = sight(mask, queries, keys)
    if seen != "other":
        return ("no" if seen == "all" else seen), None
    seen, bias = _drowned_beside_a_bias(mask, queries, keys)
    if bias is not None:
        return seen, bias
    together, bias = _apart(mask)
    known = [p for p in together if p.constant]
    rest = [p for p in together if not p.constant]
    seen = sight(_all_of(known), queries, keys) if known else "other"
    if seen == "other":
        return "no", mask
    if bias is not None:
        left = Node(Select(), _all_of(rest), bias, const(float("-inf"), bias.dtype)) if rest else bias
    else:
        left = _all_of(rest) if rest else None
    return ("no" if seen == "all" else seen), left


def _drowned_beside_a_bias(mask: Node, queries: int, keys: int) -> tuple[Causal, Node | None]:
    """Causality and the constant biases beside it, where the mask is their sum and each query sees a key; ("no", None) if not.

    Bloom adds a slope for each head times the key's position, and the least number of the type to what is hidden.
    """
    terms = _terms(mask)
    seen = [sight(t, queries, keys) for t in terms]
    biases = [t for t, how in zip(terms, seen, strict=True) if how == "other"]
    hides = seen.count("upper") + (seen.count("lower") if queries <= keys else 0)
    if hides != 1 or not 0 < len(biases) == len(terms) - 1 or not all(map(_is_small, biases)):
        return "no", None
    return "upper" if "upper" in seen else "lower", reduce(lambda a, b: map_("add", a, b), biases)


def _terms(mask: Node) -> list[Node]:
    """The summands of a float mask, each of which broadcasts to it."""
    if isinstance(mask.op, Broadcast):
        return _terms(mask.src[0])
    if function_of(mask) == "add" and mask.dtype.is_float:
        return [t for s in mask.src for t in _terms(s)]
    return [mask]


def _is_small(bias: Node) -> bool:
    """Tell whether a bias is known to be at most SMALL everywhere."""
    scope = scope_of(bias.shape)
    if not bias.constant or not bias.dtype.is_float or bias.dtype.bits < 16:
        return False
    if scope is None:
        return _all_small(bias)

    def now(values: Mapping[str, int]) -> bool:
        return _all_small(nodes_at((bias,), values)[bias])

    small = now(scope.hints)
    if small:
        scope.found("a bias is far from drowning scores", now)
    return small


def _all_small(bias: Node) -> bool:
    value = repeating_value(bias)
    return value is not None and bool((value.abs() <= SMALL).all())


def _all_of(predicates: Sequence[Node]) -> Node:
    return reduce(lambda a, b: map_("and", a, b), predicates)


def _apart(mask: Node) -> tuple[list[Node], Node | None]:
    """A mask as predicates that hide where any of them does not hold, and what is added where all do, None for nothing."""
    op = mask.op
    if isinstance(op, Broadcast):
        return _apart(mask.src[0])
    if isinstance(op, Map) and op.fn == ("and" if mask.dtype is PRED else "add"):
        (first, one), (second, other) = map(_apart, mask.src)
        return [*first, *second], other if one is None else one if other is None else map_("add", one, other)
    if mask.dtype is PRED:
        return [mask], None
    if isinstance(op, Select):
        on, off = (scalar_value(s) for s in mask.src[1:])
        if off == float("-inf"):
            inner, bias = ([], None) if on == 0 else _apart(mask.src[1])
            return [*_apart(mask.src[0])[0], *inner], bias
        if (on, off) == (float("-inf"), 0):
            return [map_("not", mask.src[0])], None
    return [], mask


def sight(mask: Node, queries: int, keys: int) -> Sight:
    """The keys that a constant mask that broadcasts to [batch, heads, queries, keys] lets be seen: all; keys up to the query's
    own place, counted from the first key ("upper") or from the last ("lower"); anything else, or not constant: "other"."""
    known = _SIGHT.setdefault(mask, {})
    scope = scope_of((queries, keys, *mask.shape))
    if (queries, keys) not in known and scope is not None and mask.constant:

        def now(values: Mapping[str, int]) -> Sight:
            rows, columns = extent_at(queries, values), extent_at(keys, values)
            seen = sight(nodes_at((mask,), values)[mask], rows, columns)
            alike = (
                (found == "lower" and seen == "upper" and rows == columns)
                or (found == "lower" and seen == "all" and rows == 1)
                or (found == "upper" and seen == "all" and columns == 1)
            )
            return cast("Sight", found) if alike else seen

        found: Sight | None = None
        found = now(scope.hints)
        if found != "other":
            scope.found(f"a mask lets {found} be seen", lambda values: now(values) == found)
        known[queries, keys] = found
    if (queries, keys) not in known:
        known[queries, keys] = _sight(mask, queries, keys)
    return known[queries, keys]


def _sight(mask: Node, queries: int, keys: int) -> Sight:
    value = repeating_value(mask) if mask.dtype is PRED or mask.dtype.bits >= 16 else None
    if value is None:
        return "other"
    if mask.dtype is PRED:
        visible = value
    else:
        lowest = max(DROWNS, float(mask.dtype.min))  # f16 has nothing lower than -65504
        visible = value == 0
        blind = ~visible.any(-1, keepdim=True)  # a row of finite numbers has equal weights, where causality gives it none
        if not bool((visible | torch.where(blind, value == float("-inf"), value <= lowest)).all()):
            return "other"
    if bool(visible.all()):
        return "all"
    if math.prod(visible.shape[:-2]) != 1:
        return "other"
    table = visible.reshape((1, 1, *visible.shape)[-2:]).expand(queries, keys)
    full = torch.ones(queries, keys, dtype=torch.bool)
    for kind, diagonal in (("upper", 0), ("lower", keys - queries)):
        if torch.equal(table, full.tril(diagonal)):
            return cast("Sight", kind)
    return "other"
