"""Random programs around products: what models do to the operands and the results of a matmul, and what they should not.

Two kinds. In an *exact* one all data are small multiples of powers of two, so that every product of codes and every sum is
exact in whatever order and type it is taken: whatever the rules do, each result must keep each bit. In a *rounded* one scales
and values are arbitrary and transcendental functions occur; results then agree within the rounding of the types.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import torch

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED, S4, S8, S16, S32, U4, U8, DType
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import Attention, Concat, Dequantize, Gather, LayerNorm, Quantize, Select, Slice, Softmax, gemm
from tilewright.ir.ops.functions import narrow_integer

EXTENTS = (1, 2, 3, 4, 6, 8)
FLOATS = (F32, F16, BF16)
CODES = (S8, U8, S4, U4, F8E4M3FN)
EXACT_UNARY = ("relu", "abs", "negate", "floor")
# No floor here, nor codes of what was computed: a jump makes a whole step of any rounding.
ROUNDED_UNARY = ("relu", "abs", "negate", "tanh", "logistic", "gelu", "gelu_tanh", "silu", "exponential")
BINARY = ("add", "subtract", "multiply", "maximum", "minimum")
LARGEST = 4096  # elements of a value


@dataclass
class Program:
    """A graph and the inputs to run it on."""

    graph: Graph
    feeds: dict[str, torch.Tensor]
    exact: bool


@dataclass
class _Builder:
    draw: Callable[[st.SearchStrategy], object]
    exact: bool
    generator: torch.Generator
    pool: list[Node] = field(default_factory=list)
    feeds: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: list[Node] = field(default_factory=list)

    # -- choices

    def pick(self, options):
        return self.draw(st.sampled_from(list(options)))

    def chance(self, of: int) -> bool:
        return self.draw(st.integers(0, of - 1)) == of - 1

    def value(self, where: Callable[[Node], bool]) -> Node | None:
        """A value that fits: one of the last few as a rule, so that chains grow."""
        fitting = [n for n in reversed(self.pool) if where(n)]
        return self.pick(fitting if self.chance(4) else fitting[:3]) if fitting else None

    def keep(self, node: Node) -> None:
        if node not in self.pool and node.tensor.elements <= LARGEST:
            self.pool.append(node)

    # -- data

    def random(self, dtype: DType, shape) -> torch.Tensor:
        if dtype is PRED:
            return torch.rand(shape, generator=self.generator) < 0.5
        if dtype.is_integer:
            low, high = max(int(dtype.min), -(1 << 20)), min(int(dtype.max), 1 << 20)
            wide = torch.randint(low, high + 1, shape, generator=self.generator, dtype=torch.int64)
            return narrow_integer(wide, dtype)
        if self.exact:
            return (torch.randint(-8, 9, shape, generator=self.generator) / 4).to(dtype.to_torch())
        return torch.randn(shape, generator=self.generator).to(dtype.to_torch())

    def scales(self, shape) -> torch.Tensor:
        if self.exact:
            return 2.0 ** -torch.randint(2, 6, shape, generator=self.generator).float()
        return torch.rand(shape, generator=self.generator) * 0.03 + 0.01

    def input(self, dtype: DType, shape) -> Node:
        label = f"x{len(self.inputs)}"
        node = input_(label, dtype, shape)
        self.inputs.append(node)
        self.feeds[label] = self.random(dtype, tuple(shape))
        self.keep(node)
        return node

    def made(self, dtype: DType, shape, constant: bool) -> Node:
        return const(self.random(dtype, tuple(shape)), dtype) if constant else self.input(dtype, shape)

    def shape(self, rank: int) -> tuple[int, ...]:
        return tuple(self.pick(EXTENTS) for _ in range(rank))

    # -- steps: each adds a value to the pool, or does nothing where nothing fits

    def weight(self, k: int, n: int, dtype: DType) -> Node:
        """A [k, n] operand of `dtype`: constant or not, transposed or not, dequantised or not."""
        constant = not self.chance(4)
        turned = self.chance(2)
        shape = (n, k) if turned else (k, n)
        kind = self.pick(("plain", "tensor", "column", "group", "cast"))
        if kind == "plain":
            w = self.made(dtype, shape, constant)
        elif kind == "cast":
            w = convert(self.made(S8, shape, constant), dtype)
        else:
            w = self.dequantized(self.made(self.pick(CODES), shape, constant), dtype, kind, 1 if turned else 0)
        return swap_last(w) if turned else w

    def dequantized(self, codes: Node, dtype: DType, kind: str, k_axis: int) -> Node:
        rank = len(codes.shape)
        k_axis %= rank
        block = None
        if kind == "tensor":
            shape: tuple[int, ...] = ()
        elif kind == "column":
            shape = tuple(1 if a == k_axis else d for a, d in enumerate(codes.shape))
        else:
            block = tuple(self.pick((1, 2, 3)) if a == k_axis else 1 for a in range(rank))
            shape = tuple(-(-d // b) for d, b in zip(codes.shape, block, strict=True))
        src = [codes, const(self.scales(shape))]
        if codes.dtype.is_integer and self.chance(2):
            zero = self.random(codes.dtype, shape)
            src.append(const(zero if not self.chance(3) else torch.zeros_like(zero), codes.dtype))
        return Node(Dequantize(dtype, block), *src)

    def linear(self) -> None:
        x = self.value(lambda n: n.dtype in FLOATS and len(n.shape) >= 2)
        if x is None:
            return
        out = x.dtype if not self.chance(4) else None
        parts = self.pick((1, 1, 1, 2, 3))
        for _ in range(parts):
            self.keep(gemm(x, self.weight(x.shape[-1], self.pick(EXTENTS), x.dtype), out_dtype=out))

    def quantized_linear(self) -> None:
        """Codes times codes, as a quantised model writes it."""
        x = self.value(lambda n: n.dtype in FLOATS and len(n.shape) >= 2 and (self.exact or n in self.inputs))
        if x is None:
            return
        to = self.pick((S8, S8, U8, F8E4M3FN))
        kind = self.pick(("tensor", "tensor", "row"))
        shape = () if kind == "tensor" else (*x.shape[:-1], 1)
        src = [const(self.scales(shape))]
        if to.is_integer and self.chance(2):
            src.append(const(self.random(to, shape), to))
        x = Node(Dequantize(x.dtype), Node(Quantize(to), x, *src), *src)
        for _ in range(self.pick((1, 1, 2, 3))):
            n = self.pick(EXTENTS)
            other = to if to.is_float else self.pick((S8, U8, S4))
            turned = self.chance(2)
            codes = self.made(other, (n, x.shape[-1]) if turned else (x.shape[-1], n), not self.chance(4))
            w = self.dequantized(codes, x.dtype, self.pick(("tensor", "column")), 1 if turned else 0)
            self.keep(gemm(x, swap_last(w) if turned else w, out_dtype=x.dtype))

    def split_linear(self) -> None:
        x = self.value(lambda n: n.dtype in FLOATS and len(n.shape) >= 2)
        if x is None:
            return
        widths = [self.pick((1, 2, 4)) for _ in range(self.pick((2, 3)))]
        y = gemm(x, self.weight(x.shape[-1], sum(widths), x.dtype), out_dtype=x.dtype)
        if self.chance(2):
            y = map_("add", y, const(self.random(x.dtype, (sum(widths),)), x.dtype))
        if self.chance(3):
            y = map_(self.pick(EXACT_UNARY if self.exact else ROUNDED_UNARY), y)
        at = 0
        for w in widths:
            self.keep(slice_(y, -1, at, at + w))
            at += w
        if self.chance(5):
            self.keep(y)

    def integer_linear(self) -> None:
        x = self.value(lambda n: n.dtype in (S8, U8) and len(n.shape) >= 2)
        if x is None:
            x = self.input(self.pick((S8, U8)), self.shape(self.pick((2, 3))))
        k, n = x.shape[-1], self.pick(EXTENTS)
        w = self.made(self.pick((S8, U8)), (k, n), not self.chance(4))
        kind = self.pick(("s32", "narrow", "wrap", "saturate"))
        if kind == "narrow":
            self.keep(gemm(x, w, acc_dtype=self.pick((S8, S16))))
        elif kind == "s32":
            self.keep(gemm(x, w))
        else:
            self.keep(convert(gemm(x, w), self.pick((S8, S16)), kind))

    def product(self) -> None:
        """A product of two computed values; of one with itself, too."""
        a = self.value(lambda n: n.dtype in FLOATS and len(n.shape) >= 2)
        if a is None:
            return
        k = a.shape[-1]
        b = self.value(lambda n: n.dtype is a.dtype and len(n.shape) >= 2 and k in n.shape[-2:])
        if b is None:
            return
        b = b if b.shape[-2] == k and not (b.shape[-1] == k and self.chance(2)) else swap_last(b)
        batches = {s.shape[:-2] for s in (a, b)} - {()}
        if len(batches) > 1:
            b = self.input(a.dtype, (*a.shape[:-2], k, self.pick(EXTENTS)))
        self.keep(gemm(a, b, out_dtype=a.dtype))

    def quantized(self) -> None:
        x = self.value(lambda n: n.dtype in FLOATS and n in self.inputs) if not self.exact else self.value(_is_float)
        if x is None:
            return
        to = self.pick(CODES)
        axis = self.draw(st.integers(-1, len(x.shape) - 1))
        shape = () if axis < 0 else tuple(d if a == axis else 1 for a, d in enumerate(x.shape))
        scale = const(self.scales(shape))
        zero = [const(self.random(to, shape), to)] if to.is_integer and self.chance(2) else []
        codes = Node(Quantize(to), x, scale, *zero)
        self.keep(codes)
        if not self.chance(3):
            self.keep(Node(Dequantize(x.dtype), codes, scale, *zero))

    def dequantized_value(self) -> None:
        x = self.value(lambda n: n.dtype in (*CODES, S32) and bool(n.shape))
        if x is not None:
            self.keep(self.dequantized(x, self.pick(FLOATS), self.pick(("tensor", "column")), len(x.shape) - 1))

    def unary(self) -> None:
        x = self.value(_is_float)
        if x is not None:
            self.keep(map_(self.pick(EXACT_UNARY if self.exact else ROUNDED_UNARY), x))

    def side(self, x: Node) -> Node:
        """Something that broadcasts against x."""
        kind = self.pick(("scalar", "bias", "row", "full", "computed", "stretched"))
        if kind == "computed":
            found = self.value(lambda n: n.dtype is x.dtype and n.shape == x.shape)
            if found is not None:
                return found
            kind = "full"
        rank = len(x.shape)
        if kind == "scalar":
            return const(self.random(x.dtype, ()), x.dtype)
        if kind == "bias":
            return self.made(x.dtype, x.shape[-1:], not self.chance(3))
        if kind == "row":
            return self.made(x.dtype, (*x.shape[:-1], 1) if rank else (), not self.chance(2))
        if kind == "stretched":
            return broadcast(
                self.made(x.dtype, tuple(1 if self.chance(2) else d for d in x.shape), not self.chance(2)), x.shape
            )
        return self.made(x.dtype, x.shape, self.chance(2))

    def binary(self) -> None:
        x = self.value(lambda n: n.dtype in (*FLOATS, S32))
        if x is None:
            return
        fn, side = self.pick(BINARY), self.side(x)
        self.keep(map_(fn, side, x) if self.chance(3) else map_(fn, x, side))

    def broadcast_binary(self) -> None:
        """A value that the function itself stretches."""
        x = self.value(lambda n: n.dtype in FLOATS and n.tensor.elements <= 64)
        if x is not None:
            self.keep(map_(self.pick(BINARY), x, self.made(x.dtype, (self.pick((2, 3)), *x.shape), self.chance(2))))

    def selected(self) -> None:
        x = self.value(lambda n: n.dtype in FLOATS)
        if x is None:
            return
        if self.chance(2) and self.exact:
            mask = map_(self.pick(("greater", "less_equal", "equal")), x, self.side(x))
            self.keep(mask)
        else:
            mask = self.made(PRED, x.shape, self.chance(2))
        a, b = (x, self.side(x)) if self.chance(2) else (self.side(x), x)
        self.keep(Node(Select(), mask, a, b))

    def converted(self) -> None:
        x = self.value(lambda n: n.dtype in (*FLOATS, S32, S16, S8, PRED))
        if x is None:
            return
        if x.dtype in FLOATS:
            to = self.pick((*FLOATS, S8, S32) if self.exact else FLOATS)
        else:
            to = self.pick((*FLOATS, S8, S32))
        self.keep(convert(x, to, self.pick(("wrap", "saturate"))))

    def viewed(self) -> None:
        x = self.value(lambda n: bool(n.shape))
        if x is None:
            return
        rank = len(x.shape)
        kind = self.pick(("transpose", "split", "merge", "slice", "slice", "step", "unsqueeze", "squeeze", "flat"))
        axis = self.draw(st.integers(0, rank - 1))
        d = x.shape[axis]
        if kind == "transpose":
            self.keep(transpose(x, self.draw(st.permutations(range(rank)))))
        elif kind == "split":
            by = self.pick([f for f in (1, 2, 3, 4) if d % f == 0])
            inner = (by, d // by) if self.chance(2) else (d // by, by)
            self.keep(reshape(x, (*x.shape[:axis], *inner, *x.shape[axis + 1 :])))
        elif kind == "merge" and axis + 1 < rank:
            self.keep(reshape(x, (*x.shape[:axis], d * x.shape[axis + 1], *x.shape[axis + 2 :])))
        elif kind == "slice":
            cuts = sorted({0, d, *(self.draw(st.integers(0, d)) for _ in range(2))})
            for a, b in itertools.pairwise(cuts):
                self.keep(slice_(x, axis, a, b))
            if self.chance(6):
                self.keep(slice_(x, axis, d // 2, d // 2))
        elif kind == "step":
            start = tuple(self.draw(st.integers(0, e // 2)) for e in x.shape)
            self.keep(Node(Slice(start, x.shape, tuple(self.pick((1, 1, 2)) for _ in x.shape)), x))
        elif kind == "unsqueeze":
            self.keep(reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])))
        elif kind == "squeeze" and 1 in x.shape and rank > 1:
            gone = x.shape.index(1)
            self.keep(reshape(x, (*x.shape[:gone], *x.shape[gone + 1 :])))
        elif kind == "flat":
            self.keep(reshape(x, (x.tensor.elements,) if self.chance(2) else (1, x.tensor.elements)))

    def joined(self) -> None:
        x = self.value(lambda n: bool(n.shape))
        if x is None:
            return
        axis = self.draw(st.integers(0, len(x.shape) - 1))
        fits = lambda n: n.dtype is x.dtype and len(n.shape) == len(x.shape) and _but(n, axis) == _but(x, axis)  # noqa: E731
        self.keep(Node(Concat(axis), *(self.value(fits) or x for _ in range(self.pick((2, 3))))))

    def mixed(self) -> None:
        """Add an operation that is neither a product nor elementwise."""
        x = self.value(lambda n: n.dtype in FLOATS and len(n.shape) >= 1)
        if x is None:
            return
        kind = self.pick(("sum", "max", "softmax", "norm", "gather") if not self.exact else ("sum", "max", "gather"))
        if kind == "softmax":
            self.keep(Node(Softmax(-1), x))
        elif kind == "norm":
            self.keep(Node(LayerNorm(-1, 1.0, self.chance(2)), x))
        elif kind == "gather" and all(x.shape):
            axis = self.draw(st.integers(0, len(x.shape) - 1))
            d = x.shape[axis]
            first = self.draw(st.integers(-d, d - 1))
            count = self.draw(st.integers(1, d - first % d))
            self.keep(Node(Gather(axis), x, const(list(range(first % d, first % d + count)) if count > 1 else [first], S32)))
        elif kind in ("sum", "max") and x.shape[-1]:
            self.keep(reduce_({"sum": "add", "max": "maximum"}[kind], x, [-1], keepdims=self.chance(2)))

    def attended(self) -> None:
        """An attention whose queries, keys and values are products of one value, as a rule; its result merged again or not."""
        x = self.value(lambda n: n.dtype in FLOATS and len(n.shape) == 2)
        if x is None or self.exact:
            return
        heads, size = self.pick(((1, 2), (2, 1), (2, 2), (4, 2)))
        groups = self.pick([g for g in (1, 2, 4) if heads % g == 0])
        rows = x.shape[0]

        def split(count: int) -> Node:
            y = gemm(x, self.weight(x.shape[1], count * size, x.dtype), out_dtype=x.dtype)
            y = map_("add", y, self.made(x.dtype, (count * size,), True)) if self.chance(2) else y
            return transpose(reshape(y, (rows, count, size)), (1, 0, 2))

        q, k, v = split(heads), split(groups), split(groups)
        if self.chance(3):
            k = Node(Dequantize(x.dtype), self.made(S8, k.shape, False), const(self.scales(())))
        y = Node(Attention(0.5, self.pick(("no", "upper"))), *(reshape(t, (1, *t.shape)) for t in (q, k, v)))
        self.keep(y)
        if self.chance(2):
            self.keep(q)
        if not self.chance(3):
            self.keep(reshape(transpose(y, (0, 2, 1, 3)), (rows, heads * size)))


def _is_float(n: Node) -> bool:
    return n.dtype in FLOATS


def _but(n: Node, axis: int) -> tuple[int, ...]:
    return (*n.shape[:axis], *n.shape[axis + 1 :])


STEPS = (
    *("linear", "linear", "quantized_linear", "quantized_linear", "split_linear", "integer_linear", "product"),
    *("quantized", "dequantized_value", "unary", "binary", "binary", "broadcast_binary", "selected", "converted"),
    *("viewed", "viewed", "joined", "mixed", "attended"),
)


@st.composite
def programs(draw, exact: bool = True, most_steps: int = 14) -> Program:
    """A random program with one to six results."""
    seed = draw(st.integers(0, 1 << 16))
    made = _Builder(draw, exact, torch.Generator().manual_seed(seed))
    made.input(made.pick(FLOATS), made.shape(made.pick((2, 2, 3, 4))))
    made.linear()
    for name in draw(st.lists(st.sampled_from(STEPS), min_size=3, max_size=most_steps)):
        getattr(made, name)()
    read = {s for n in toposort(made.pool) for s in n.src}
    ends = [n for n in reversed(made.pool) if n not in read] or made.pool[-1:]
    outputs = ends[: draw(st.integers(1, 5))]
    if draw(st.integers(0, 3)) == 0:
        outputs.append(draw(st.sampled_from(made.pool)))
    graph = Graph("random", tuple(made.inputs), tuple(outputs), tuple(f"out{i}" for i in range(len(outputs))))
    return Program(graph, made.feeds, exact)
