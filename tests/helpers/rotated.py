"""Regions with concatenations, over inputs: rotary embeddings as programs spell them, caches that grow, joined branches."""

from tilewright.dtype import BF16, F32, DType
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Concat, LayerNorm, Quantize, Slice


def every_other(x: Node, first: int) -> Node:
    rank = len(x.shape)
    return Node(Slice((*(0,) * (rank - 1), first), x.shape, (*(1,) * (rank - 1), 2)), x)


def turned(x: Node, cos: Node, sin: Node) -> Node:
    """x cos + concat(-x2, x1) sin, as Llama's layers have it: x's halves make pairs."""
    half = x.shape[-1] // 2
    ends = map_("negate", slice_(x, -1, half, 2 * half)), slice_(x, -1, 0, half)
    return map_("add", map_("multiply", x, cos), map_("multiply", Node(Concat(len(x.shape) - 1), *ends), sin))


def turned_in_pairs(x: Node, cos: Node, sin: Node) -> Node:
    """The same of neighbours, as GPT-J's layers have it: what stands beside x cos is stacked and flattened."""
    pairs = [reshape(y, (*y.shape, 1)) for y in (map_("negate", every_other(x, 1)), every_other(x, 0))]
    stacked = reshape(Node(Concat(len(x.shape)), *pairs), x.shape)
    return map_("add", map_("multiply", x, cos), map_("multiply", stacked, sin))


def heads(dtype: DType, batch: int, length: int, count: int, head: int, name: str = "q") -> tuple[Node, Node, Node]:
    """Heads as a joined product stores them, seen by head, and the cosines and sines of their places."""
    x = transpose(input_(name, dtype, (batch, length, count, head)), (0, 2, 1, 3))
    cos, sin = (input_(n, dtype, (1, 1, length, head)) for n in ("cos", "sin"))
    return x, cos, sin


def of_queries_and_keys(dtype: DType = BF16, batch: int = 2, length: int = 5, head: int = 16) -> tuple[Node, ...]:
    """Grouped queries and keys, turned by the same angles: one fusion."""
    return tuple(turned(*heads(dtype, batch, length, count, head, name)) for name, count in (("q", 6), ("k", 2)))


def in_part(dtype: DType = F32) -> Node:
    """A rotation of the first 10 of each head's 16 elements (GPT-NeoX, Phi)."""
    x, *_ = heads(dtype, 2, 5, 3, 16)
    cos, sin = (input_(n, dtype, (5, 10)) for n in ("cos", "sin"))
    return Node(Concat(3), turned(slice_(x, 3, 0, 10), cos, sin), slice_(x, 3, 10, 16))


def after_norm(dtype: DType = BF16) -> Node:
    """Each head is normalised before it is turned (Qwen 3): what is summed is summed in halves."""
    x = input_("q", dtype, (2, 5, 3, 32))
    y = Node(LayerNorm(3, 1e-6, False), x, input_("w", dtype, (32,)))
    _, cos, sin = heads(dtype, 2, 5, 3, 32)
    return turned(transpose(y, (0, 2, 1, 3)), cos, sin)


def as_onnx_writes_it(dtype: DType = F32) -> Node:
    """Halves turned each for itself and joined, heads side by side in a row: ONNX's RotaryEmbedding."""
    x = reshape(input_("q", dtype, (2, 5, 30)), (2, 5, 3, 10))
    a, b = slice_(x, 3, 0, 5), slice_(x, 3, 5, 10)
    cos, sin = (input_(n, dtype, (5, 1, 5)) for n in ("cos", "sin"))

    def product(y: Node, by: Node) -> Node:
        return map_("multiply", y, by)

    real = map_("subtract", product(a, cos), product(b, sin))
    return reshape(Node(Concat(3), real, map_("add", product(a, sin), product(b, cos))), (2, 5, 30))


def grown_cache(dtype: DType = F32) -> Node:
    """New keys behind those of a cache."""
    return Node(Concat(2), input_("cache", dtype, (2, 3, 7, 10)), input_("new", dtype, (2, 3, 1, 10)))


def decoding_step(dtype: DType = BF16) -> tuple[Node, ...]:
    """One token's queries and keys are turned, its keys and values put behind those of caches."""
    queries, keys = of_queries_and_keys(dtype, 2, 1, 16)
    values = transpose(input_("v", dtype, (2, 1, 2, 16)), (0, 2, 1, 3))
    caches = (input_(n, dtype, (2, 2, 6, 16)) for n in ("keys", "values"))
    return queries, *(Node(Concat(2), cache, new) for cache, new in zip(caches, (keys, values), strict=True))


def joined_branches() -> tuple[Node, ...]:
    """Branches of several widths, activated and quantised together, and the norm of two of one width."""
    a, b, c = (input_(n, F32, (6, d)) for n, d in zip("abc", (24, 24, 7), strict=True))
    code = Node(Quantize(BF16), map_("silu", Node(Concat(1), a, c, b)), const(0.5, F32))
    return code, Node(LayerNorm(1, 1e-5, True), Node(Concat(1), a, b))


def across_views() -> tuple[Node, ...]:
    """Concatenations of heads under a view that joins them, one within another, and one that is broadcast against."""
    a, b = (input_(n, F32, (2, count, 5, 4)) for n, count in (("a", 3), ("b", 1)))
    joined = reshape(transpose(Node(Concat(1), a, map_("negate", b)), (0, 2, 1, 3)), (2, 5, 16))
    inner = Node(Concat(0), reshape(input_("c", F32, (8,)), (2, 4)), input_("d", F32, (1, 4)))
    outer = Node(Concat(1), map_("exponential", inner), broadcast(input_("e", F32, (3, 1)), (3, 2)))
    return joined, map_("multiply", reshape(outer, (3, 1, 6)), input_("f", F32, (3, 4, 6)))


def extremes_of_halves() -> tuple[Node, ...]:
    """A value quantised by the largest of its row, which lies in either half, and that scale."""
    x = Node(Concat(1), *(map_("tanh", input_(n, F32, (9, 20))) for n in "ab"))
    scale = map_("divide", reduce_("maximum", map_("abs", x), (1,), True), const(127.0, F32))
    return map_("multiply", x, map_("divide", const(1.0, F32), scale)), convert(x, BF16)


FORMS = {
    "halves": lambda: (turned(*heads(BF16, 2, 5, 3, 34)),),
    "pairs": lambda: (turned_in_pairs(*heads(BF16, 2, 5, 3, 34)),),
    "queries and keys": of_queries_and_keys,
    "in part": lambda: (in_part(),),
    "after a norm": lambda: (after_norm(),),
    "as ONNX writes it": lambda: (as_onnx_writes_it(),),
    "a cache that grows": lambda: (grown_cache(),),
    "a decoding step": decoding_step,
    "branches": joined_branches,
    "across views": across_views,
    "extremes of halves": extremes_of_halves,
}
