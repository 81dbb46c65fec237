"""Rows as every generator must compute what stands between products: norms, softmaxes, quantising, views, tables.

A case is a name and a function that gives problems, each a tuple of results over inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fusions import by_row, norm

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED, S8, S32, S64, U8, DType
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Concat, Dequantize, Gather, LayerNorm, Pad, Quantize, Select, Softmax

Problems = list[tuple[Node, ...]]
FLOATS = (F32, BF16, F16)


def norms_and_softmaxes(dtype: DType, length: int) -> Problems:
    x, residual = (input_(name, dtype, (5, length)) for name in "xr")
    scale, bias = (input_(name, dtype, (length,)) for name in "sb")
    total = map_("add", x, residual)
    return [
        (norm(x, scale, bias),),
        (total, norm(total, scale, bias)),
        (norm(x, scale, center=False),),
        (Node(Softmax(1), x),),
        (reduce_("mean", x, (1,)), reduce_("maximum", x, (1,), True)),
    ]


def quantising_ends_a_row(length: int) -> Problems:
    x, residual, code = *(input_(name, F32, (6, length)) for name in "xr"), input_("c", S8, (6, length))
    scale, bias = (input_(name, F32, (length,)) for name in "sb")
    step, zero = input_("q", F32, ()), input_("z", U8, ())
    total = norm(map_("add", x, residual), scale, bias)
    return [
        (Node(Quantize(S8), total, step),),
        (total, Node(Quantize(U8), total, step, zero)),
        (convert(total, F16), Node(Quantize(F8E4M3FN), total, step)),
        by_row(total),
        by_row(map_("gelu", x)),
        by_row(map_("gelu", x), F8E4M3FN),
        (norm(map_("add", Node(Dequantize(F32), code, step), x), scale, bias),),
    ]


def rounded_in_one_result_alone() -> Problems:
    """A value that is rounded in one result keeps its digits in the other."""
    x = map_("gelu", input_("x", F32, (6, 100)))
    return [(convert(x, BF16), x), (x, convert(x, BF16))]


def rows_through_views() -> Problems:
    x, head = input_("x", F32, (3, 4, 50)), input_("h", F32, (4, 1))
    normed = Node(LayerNorm(1, 1e-6), x)
    return [
        (map_("tanh", transpose(x, (0, 2, 1))),),
        (Node(Softmax(1), x),),
        (reshape(Node(Softmax(2), map_("multiply", x, head)), (12, 50)), x),
        (map_("multiply", map_("silu", slice_(x, 2, 0, 25)), slice_(x, 2, 25, 50)),),
        (map_("add", x, transpose(input_("y", F32, (50, 4, 3)), (2, 1, 0))),),
        (normed, Node(Quantize(S8), reshape(normed, (12, 50)), const(0.02, F32))),
        (reduce_("add", map_("exponential", x), (0, 1, 2)),),
        (broadcast(map_("exponential", input_("t", F32, (4, 1))), (3, 4, 50)), x),
    ]


def integers_and_tests() -> Problems:
    a, b = input_("a", S32, (7, 130)), input_("b", S8, (7, 130))
    mask, either = convert(input_("m", S64, (1, 130)), PRED), input_("p", PRED, (7, 1))
    return [
        (map_("add", a, convert(b, S32)), map_("greater", a, convert(b, S32))),
        (reduce_("add", a, (1,)), reduce_("minimum", b, (1,), True), reduce_("maximum", b, (1,), True)),
        (Node(Select(), map_("and", mask, either), input_("x", F32, ()), const(-1e9, F32)),),
        (convert(convert(a, F32), BF16),),
    ]


def single_elements_are_picked(dtype: DType) -> Problems:
    table, one, each = input_("t", dtype, (3, 41)), input_("i", S64, (29,)), input_("e", S32, (2, 29))
    left, by = input_("l", dtype, (3, 4, 41)), input_("k", S64, (3, 4, 30))
    return [
        (Node(Gather(1), table, one),),
        (Node(Gather(1, True), table, each), Node(Gather(0, True), table, input_("f", S64, (5, 20)))),
        (Node(Gather(0), input_("v", dtype, (17,)), input_("j", U8, (4, 33))),),
        (Node(Gather(2, True), left, by),),
    ]


def rows_are_picked_from_a_table() -> Problems:
    ids, table, place = input_("i", S64, (2, 9)), input_("t", F32, (33, 50)), input_("p", F32, (9, 50))
    total = map_("add", Node(Gather(0), table, ids), place)
    return [(total, norm(total)), (map_("tanh", Node(Gather(1), input_("t3", F32, (3, 8, 20)), input_("k", S32, (5,)))),)]


def an_index_is_computed_beside_what_it_picks() -> Problems:
    """Positions are computed so, and the rows of a mixture of experts."""
    order, hidden, scale = input_("o", S64, (30,)), input_("h", F32, (7, 40)), input_("s", F32, (30, 1))

    def picked(by: Node, axis: int = 0) -> Node:
        return Node(Gather(axis), hidden, by)

    rows = picked(map_("modulo", order, const(7, S64)))
    turned = Node(Gather(0), map_("multiply", input_("m", F32, (30, 40)), scale), map_("modulo", order, const(30, S64)))
    sums = reduce_("add", input_("n", S64, (9, 40)), (1,))
    return [
        (map_("multiply", rows, scale), norm(rows)),
        (turned,),
        (picked(map_("remainder", map_("abs", order), const(40, S64)), 1),),
        (map_("add", picked(map_("modulo", sums, const(7, S64))), input_("r", F32, (9, 40))),),
        (map_("add", *(picked(map_("modulo", order, const(n, S64))) for n in (5, 6))),),
    ]


def numbers_around_what_is_worked_out(dtype: DType) -> Problems:
    x, fill = input_("x", dtype, (3, 5, 18)), input_("f", dtype, ())
    y = map_("maximum", x, input_("y", dtype, (18,)))
    v = map_("maximum", input_("v", dtype, (4,)), input_("w", dtype, (4,)))
    low_and_high = [((0, 0, 1), (0, 0, 0)), ((0, 1, 2), (0, 2, 1)), ((0, -1, 2), (1, 0, -3)), ((0, 0, 0), (0, 0, 0))]
    return [(Node(Pad(*ends, (0, 0, 0)), y, fill),) for ends in low_and_high] + [(Node(Pad((1,), (2,), (0,)), v, fill),)]


def a_norm_is_padded() -> Problems:
    y = norm(input_("x", F32, (6, 40)))
    padded = Node(Pad((0, 0), (2, 0), (0, 0)), y, const(0.0, F32))
    return [(y, padded), (reshape(padded, (2, 4, 40)),)]


def codes_of_a_rotation_and_their_sums() -> Problems:
    """A quantised model rotates queries so: each value is a code in between, and the product asks for sums of codes."""
    turn, step = input_("c", F32, (6, 64)), const(0.02, F32)

    def coded(value: Node) -> Node:
        return Node(Dequantize(F32), Node(Quantize(U8), value, step, const(120, U8)), step, const(120, U8))

    x = coded(input_("x", F32, (2, 6, 64)))
    halves = [coded(map_("negate", coded(slice_(x, 2, 32, 64)))), coded(slice_(x, 2, 0, 32))]
    turned = coded(map_("multiply", coded(Node(Concat(2), *halves)), turn))
    code = Node(Quantize(U8), coded(map_("add", coded(map_("multiply", x, turn)), turned)), step, const(128, U8))
    return [(code, reduce_("add", convert(code, S32), (2,), True)), (code, reduce_("maximum", convert(code, S32), (2,)))]


def indices_are_computed(dtype: DType) -> Problems:
    a, b, n = input_("a", dtype, (5, 37)), input_("b", dtype, (37,)), const(3, dtype)
    chosen = Node(Select(), map_("equal", a, b), map_("power", a, n), map_("shift_left", b, n))
    return [
        (map_("add", map_("multiply", a, b), map_("modulo", a, n)), map_("divide", a, b), map_("less", a, b)),
        (chosen, map_("remainder", b, a)),
        tuple(reduce_(fn, a, (1,)) for fn in ("add", "maximum", "minimum", "multiply", "and", "or")),
        (convert(a, F32), convert(map_("not_equal", a, n), dtype), convert(a, S64)),
    ]


def integers_of_floats(dtype: DType) -> Problems:
    return [(convert(convert(input_("b", dtype, (37,)), F32), dtype),)]


def any_or_all_hold() -> Problems:
    p = input_("p", PRED, (6, 35))
    return [tuple(reduce_(fn, p, (1,)) for fn in ("and", "or", "add", "multiply", "maximum", "minimum"))]


def softplus_elu_and_rotary_angles(dtype: DType) -> Problems:
    x = input_("x", dtype, (5, 70))
    return [
        (map_("log_plus_one", map_("exponential", x)), map_("exponential_minus_one", x)),
        (map_("sine", x), map_("cosine", x)),
        (Node(Softmax(1, True), x),),
    ]


EACH: dict[Callable[..., Problems], Sequence[DType]] = {
    single_elements_are_picked: (F32, BF16, S64, PRED),
    numbers_around_what_is_worked_out: (F32, F16, S64, PRED),
    indices_are_computed: (S64, S32, U8),
    integers_of_floats: (S64, S32, U8),
    softplus_elu_and_rotary_angles: FLOATS,
}
ONCE: tuple[Callable[[], Problems], ...] = (
    rounded_in_one_result_alone, rows_through_views, integers_and_tests, rows_are_picked_from_a_table,
    an_index_is_computed_beside_what_it_picks, a_norm_is_padded, codes_of_a_rotation_and_their_sums, any_or_all_hold,
)  # fmt: skip


def cases(lengths: Sequence[int]) -> dict[str, Callable[[], Problems]]:
    """All cases by name, those of norms and of quantising with rows of these lengths."""
    made: dict[str, Callable[[], Problems]] = {
        f"norms_and_softmaxes {dtype} {length}": partial(norms_and_softmaxes, dtype, length)
        for dtype in FLOATS
        for length in lengths
    }
    made |= {f"quantising_ends_a_row {length}": partial(quantising_ends_a_row, length) for length in lengths}
    made |= {f"{case.__name__} {dtype}": partial(case, dtype) for case, dtypes in EACH.items() for dtype in dtypes}
    return made | {case.__name__: case for case in ONCE}
