"""Random well-formed graphs over every operation, small enough to evaluate in a millisecond, with what breaks code among them:
extents 0 and 1 and primes, no axes at all, every type, shared nodes, several outputs.

`graphs()` draws a graph; `feeds(graph, seed)` gives it inputs. With `calls=True` opaque calls occur too, which only their own
library could evaluate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from values import ALL, constant, random_array, random_value

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, OPAQUE, PRED, S4, S8, S16, S32, S64, U4, U8, DType
from tilewright.ir.build import broadcast, convert, expand_dims, input_, items, map_, reshape, slice_, transpose
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import (
    FUNCTIONS,
    Acc,
    Attention,
    Call,
    Concat,
    Const,
    Convert,
    Dequantize,
    Gather,
    Gemm,
    Iota,
    LayerNorm,
    Pad,
    Param,
    Quantize,
    Reduce,
    Select,
    Slice,
    Softmax,
)
from tilewright.ir.types import TensorType

EXTENTS = (0, 1, 1, 2, 3, 5, 7)
LARGEST = 512  # elements of a value
ODD_NAMES = ("x", "w", "a b", 'quo"te', "back\\slash", "naïve→", "new\nline", "// no comment", "{%0}")
NAMES = st.one_of(st.sampled_from(ODD_NAMES), st.text(max_size=4))
SCALES = (F32, F16, BF16)
Draw = Callable[[st.SearchStrategy], object]


@dataclass
class _Builder:
    draw: Draw
    calls: bool
    pool: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)

    def pick(self, options: Sequence):
        return self.draw(st.sampled_from(list(options)))

    def shape(self, low: int = 0, high: int = 3) -> tuple[int, ...]:
        drawn = self.draw(st.lists(st.sampled_from(EXTENTS), min_size=low, max_size=high))
        while math.prod(max(d, 1) for d in drawn) > LARGEST:
            drawn[drawn.index(max(drawn))] = 1
        return tuple(drawn)

    def leaf(self, d: DType, shape: Sequence[int]) -> Node:
        """An input, a constant (sometimes a named one, sometimes a large one by reference), or a count."""
        shape, kind = tuple(shape), self.pick(("input", "input", "const", "named", "iota"))
        if kind == "input" or (kind == "iota" and (not shape or d is PRED)):
            self.inputs.append(input_(f"{self.draw(NAMES)}.{len(self.inputs)}", d, shape))
            return self.inputs[-1]
        if kind == "iota":
            return Node(Iota(d, shape, self.draw(st.integers(-len(shape), len(shape) - 1))))
        seed = self.draw(st.integers(0, 5))
        if kind == "const":
            return constant(random_array(d, shape, np.random.default_rng(seed), 0.3), d)
        t = TensorType(d, shape)
        return Node(Const(Literal(t, random_value(t, seed), self.draw(NAMES))))

    def value(self, fits: Callable[[Node], bool] = lambda n: True) -> Node | None:
        """A value that fits: one of the last few as a rule, so that chains grow."""
        fitting = [n for n in reversed(self.pool) if fits(n)]
        return self.pick(fitting if self.draw(st.booleans()) else fitting[:3]) if fitting else None

    def beside(self, x: Node) -> Node:
        """Something of x's type that broadcasts against it without growing it."""
        shape = [self.pick((d, 1)) for d in x.shape][self.draw(st.integers(0, len(x.shape))) :]
        known = self.value(lambda n: n.dtype is x.dtype and n.shape in (tuple(shape), x.shape))
        return known if known is not None and self.draw(st.booleans()) else self.leaf(x.dtype, shape)

    def floating(self, x: Node) -> Node:
        return x if x.dtype.is_float else convert(x, self.pick((F32, F16, F64)))

    # One method an operation. Each gets some value and gives a node made from it.

    def op_map(self, x: Node) -> Node:
        fn = self.pick([name for name, f in FUNCTIONS.items() if x.dtype.kind in f.kinds])
        args = [x, *(self.beside(x) for _ in range(FUNCTIONS[fn].arity - 1))]
        return map_(fn, *self.draw(st.permutations(args)))

    def op_select(self, x: Node) -> Node:
        pred = self.value(lambda n: n.dtype is PRED and n.shape == x.shape) or self.leaf(PRED, x.shape)
        return Node(Select(), pred, *self.draw(st.permutations([x, self.beside(x)])))

    def op_convert(self, x: Node) -> Node:
        return Node(Convert(self.pick(ALL), self.pick(("wrap", "saturate", "ieee"))), x)

    def scale(self, x: Node, codes: DType) -> tuple[tuple[int, ...] | None, list[Node]]:
        """A block and a scale (and zero point) for x: per tensor, per axis, or per block."""
        way = self.pick(("tensor", "axis", "block")) if x.shape else "tensor"
        block = None
        if way == "tensor":
            shape: tuple[int, ...] = ()
        elif way == "axis":
            axis = self.pick(range(len(x.shape)))
            shape = tuple(d if a == axis else 1 for a, d in enumerate(x.shape))
        else:
            block = tuple(self.pick((1, 2, 3, max(d, 1))) for d in x.shape)
            shape = tuple(-(-d // b) for d, b in zip(x.shape, block, strict=True))
        zero = [self.leaf(codes, shape)] if codes.is_integer and self.draw(st.booleans()) else []
        return block, [self.leaf(self.pick(SCALES), shape), *zero]

    def op_quantize(self, x: Node) -> Node | None:
        if x.dtype is PRED:
            return None
        d = self.pick((S4, U4, S8, U8, S16, S32, F8E4M3FN))
        block, rest = self.scale(x, d)
        return Node(Quantize(d, block, self.pick(("saturate", "wrap"))), x, *rest)

    def op_dequantize(self, x: Node) -> Node | None:
        if x.dtype is PRED:
            return None
        block, rest = self.scale(x, x.dtype)
        return Node(Dequantize(self.pick((F32, F16, BF16, F64)), block), x, *rest)

    def op_reshape(self, x: Node) -> Node:
        n = x.tensor.elements
        splits = [(d, n // d) for d in (1, 2, 3, 5, 7) if n % d == 0] if n else [(0, 3), (2, 0)]
        return reshape(x, self.pick([(n,), (1, n), *splits, x.shape[::-1], (1, *x.shape)]))

    def op_transpose(self, x: Node) -> Node:
        return transpose(x, self.draw(st.permutations(range(len(x.shape)))))

    def op_slice(self, x: Node) -> Node:
        cuts = []
        for d in x.shape:
            start = self.draw(st.integers(0, d))
            cuts.append((start, self.draw(st.integers(start, d)), self.pick((1, 1, 2, 3))))
        return Node(Slice(*(tuple(c[i] for c in cuts) for i in range(3))), x)

    def op_pad(self, x: Node) -> Node:
        edges = [(self.draw(st.integers(-1, 2)), self.draw(st.integers(0, 2)), self.pick((0, 0, 1))) for _ in x.shape]
        edges = [(max(lo, 0) if d == 0 else lo, hi, i) for d, (lo, hi, i) in zip(x.shape, edges, strict=True)]
        return Node(Pad(*(tuple(e[i] for e in edges) for i in range(3))), x, self.leaf(x.dtype, ()))

    def op_concat(self, x: Node) -> Node | None:
        if not x.shape:
            return None
        axis = self.draw(st.integers(-len(x.shape), len(x.shape) - 1))
        at = axis % len(x.shape)
        near = self.value(
            lambda n: n.dtype is x.dtype and n.shape[:at] == x.shape[:at] and n.shape[at + 1 :] == x.shape[at + 1 :]
        )
        other = self.leaf(x.dtype, (*x.shape[:at], self.pick((0, 1, 2)), *x.shape[at + 1 :]))
        parts = [x, self.pick([n for n in (near, x, other) if n is not None and len(n.shape) == len(x.shape)])]
        return Node(Concat(axis), *self.draw(st.permutations(parts)))

    def op_broadcast(self, x: Node) -> Node:
        return broadcast(x, [*self.shape(0, 1), *(self.pick((1, 2, 3)) if d == 1 else d for d in x.shape)])

    def op_gather(self, x: Node) -> Node | None:
        axis = self.draw(st.integers(-len(x.shape), len(x.shape) - 1)) if x.shape else 0
        if not x.shape or x.shape[axis] == 0:
            return None
        elementwise = self.draw(st.booleans())
        shape = tuple(1 if a == axis % len(x.shape) else d for a, d in enumerate(x.shape)) if elementwise else self.shape(0, 1)
        low = -x.shape[axis]
        index = np.random.default_rng(len(self.pool)).integers(low, x.shape[axis], shape)
        return Node(Gather(axis, elementwise), x, constant(index, S64))

    def op_reduce(self, x: Node) -> Node:
        wrong = ("and", "or") if x.dtype.is_float else ("mean",)
        fn = self.pick([f for f in ("add", "multiply", "maximum", "minimum", "and", "or", "mean") if f not in wrong])
        axes = sorted(self.draw(st.sets(st.integers(0, len(x.shape) - 1)))) if x.shape else []
        return Node(Reduce(fn, tuple(axes), self.draw(st.booleans())), x)

    def op_softmax(self, x: Node) -> Node | None:
        if not x.shape:
            return None
        return Node(
            Softmax(self.draw(st.integers(-len(x.shape), len(x.shape) - 1)), self.draw(st.booleans())), self.floating(x)
        )

    def op_layer_norm(self, x: Node) -> Node | None:
        if not x.shape:
            return None
        x = self.floating(x)
        axis = self.draw(st.integers(-len(x.shape), len(x.shape) - 1))
        sides = [self.leaf(x.dtype, x.shape[axis % len(x.shape) :]) for _ in range(self.pick((0, 1, 2)))]
        epsilon = self.pick((0.0, 1e-5, 1e-12, 1, 0.1))
        return Node(LayerNorm(axis, epsilon, self.draw(st.booleans())), x, *sides)

    def op_gemm(self, x: Node) -> Node | list[Node] | None:
        """x, as stored or through a view or a dequantisation, times a weight; one or several stores."""
        if x.dtype is PRED:
            return None
        if len(x.shape) < 2:
            x = expand_dims(reshape(x, (x.tensor.elements,)), 1, 2)
        k, n = x.shape[-1], self.pick((0, 1, 2, 3, 5))
        other = self.pick((x.dtype, *((S8, U8, S4, S32) if x.dtype.is_integer else SCALES)))
        src = [x]
        lhs, rhs = Node(Param(0, x.tensor)), None
        way = self.pick(("plain", "transposed", "grouped", "cast"))
        if way == "grouped" and x.dtype.is_float:
            group = self.pick((1, 2, max(k, 1)))
            code, scale = self.leaf(self.pick((S4, U4, S8)), (k, n)), self.leaf(F32, (-(-k // group), n))
            src += [code, scale]
            rhs = Node(Dequantize(F32, (group, 1)), *(Node(Param(i + 1, s.tensor)) for i, s in enumerate(src[1:])))
        else:
            shape = (n, k) if way == "transposed" else (k, n)
            src.append(self.leaf(other, shape))
            rhs = Node(Param(1, src[1].tensor))
            if way == "transposed":
                rhs = transpose(rhs, (1, 0))
            if way == "cast":
                rhs = convert(rhs, S16 if other.is_integer else F32)
        acc_dtype = self.pick((S32, S8, S64) if x.dtype.is_integer else (F32, F32, F64, F16))
        acc = Node(Acc(Gemm(acc_dtype, lhs, rhs, ()).acc_type))
        stores = [self.store(acc, src) for _ in range(self.pick((1, 1, 1, 2, 3)))]
        return items(make_gemm(acc_dtype, lhs, rhs, stores, src))

    def store(self, acc: Node, src: list[Node]) -> Node:
        """A tail over a range of acc: elementwise steps, maybe a conversion or quantisation, maybe a view."""
        value = acc
        if self.pick((False, False, True)) and acc.shape[-1] > 1:
            start = self.draw(st.integers(0, acc.shape[-1] - 1))
            value = slice_(value, -1, start, self.draw(st.integers(start, acc.shape[-1])))
        for _ in range(self.pick((0, 1, 2))):
            if self.draw(st.booleans()):
                value = map_(self.pick(("relu", "negate", "abs")), value)
            else:
                side = self.leaf(value.dtype, self.pick([value.shape[-1:], (), value.shape]))
                src.append(side)
                value = map_(self.pick(("add", "multiply", "maximum")), value, Node(Param(len(src) - 1, side.tensor)))
        end = self.pick(("plain", "convert", "quantize"))
        if end == "convert":
            value = convert(value, self.pick((S8, BF16, F32)), self.pick(("wrap", "saturate")))
        elif end == "quantize":
            src.append(self.leaf(F32, ()))
            value = Node(Quantize(S8), value, Node(Param(len(src) - 1, src[-1].tensor)))
        return transpose(value, self.draw(st.permutations(range(len(value.shape))))) if self.draw(st.booleans()) else value

    def op_attention(self, x: Node) -> Node | list[Node]:
        b, heads, groups, s, t, dim, dv = (self.pick((1, 1, 2, 3)) for _ in range(7))
        d = self.pick((F32, F16, F64))
        src = [self.leaf(d, shape) for shape in ((b, heads * groups, s, dim), (b, heads, t, dim), (b, heads, t, dv))]
        if self.draw(st.booleans()):
            src.append(self.leaf(self.pick((PRED, F32)), self.pick([(s, t), (b, 1, 1, t), ()])))
        causal, zero = self.pick(("no", "upper", "lower")), self.draw(st.booleans())
        scale = self.pick((1, 0.125, 0.7))
        if self.draw(st.booleans()):
            return Node(Attention(scale, causal, zero), *src)
        operands = tuple(Node(Param(i, n.tensor)) for i, n in enumerate(src))
        inner = Node(Acc(TensorType(F64 if d is F64 else F32, (b, heads * groups, s, t))))
        result = Node(Acc(TensorType(d, (b, heads * groups, s, dv))))
        scores = self.pick((None, map_("negate", inner)))
        weights = self.pick((None, map_("multiply", inner, inner)))
        stores = self.pick(((), (convert(result, BF16),), (result, map_("relu", result))))
        return items(Node(Attention(scale, causal, zero, operands, scores, weights, stores), *src))

    def op_call(self, x: Node) -> list[Node]:
        types = [TensorType(self.pick((F32, S64)), self.shape()) for _ in range(self.pick((1, 1, 2, 3)))]
        if self.draw(st.booleans()):
            types.append(TensorType(OPAQUE, ()))
        call = Node(Call("nobody", self.draw(NAMES), self.draw(st.text()), tuple(types)), x)
        return [n for n in items(call) if n.dtype is not OPAQUE]


OPERATIONS = [name for name in vars(_Builder) if name.startswith("op_")]


@st.composite
def graphs(draw: Draw, max_nodes: int = 10, calls: bool = False, only: Sequence[str] = ()) -> Graph:
    """A verified graph. `only` names the operations that may occur ("gemm", "map", …); all by default."""
    b = _Builder(draw, calls)
    chosen = [f"op_{name}" for name in only] or [name for name in OPERATIONS if calls or name != "op_call"]
    for _ in range(b.pick((1, 2, 3))):
        b.pool.append(b.leaf(b.pick((F32, F32, F16, BF16, S8, S32, *ALL)), b.shape()))
    for _ in range(draw(st.integers(0, max_nodes))):
        x = b.value()
        made = getattr(b, b.pick(chosen))(x)
        for node in made if isinstance(made, list) else [made]:
            if node is not None and node.tensor.elements <= LARGEST:
                b.pool.append(node)
    outputs = draw(st.lists(st.sampled_from(b.pool), min_size=1, max_size=3))
    if draw(st.booleans()):
        outputs[-1] = b.pool[-1]
    graph = Graph(draw(NAMES), (), tuple(outputs), tuple(draw(NAMES) for _ in outputs))
    read = [n for n in graph.nodes() if n.op.name == "input"]
    unread = [n for n in b.inputs if n not in read and draw(st.booleans())]
    origins = {n: draw(NAMES) for n in graph.nodes() if draw(st.booleans())}
    notes = tuple(draw(st.lists(NAMES, max_size=2)))
    return Graph(graph.name, (*read, *unread), graph.outputs, graph.output_names, origins, notes)


def feeds(graph: Graph, seed: int = 0, special: float = 0.0) -> dict[str, torch.Tensor]:
    """Random inputs; a share of them extreme."""
    return {n.op.label: random_value(n.tensor, seed + i, special) for i, n in enumerate(graph.inputs)}
