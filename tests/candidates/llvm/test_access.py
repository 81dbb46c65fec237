"""Addresses that generated kernels read and write: chains of views against NumPy's own, element by element."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llvm_map import run_expression

from tilewright.dtype import F32, S8, S32
from tilewright.ir.build import broadcast, convert, map_, reshape, slice_, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Acc, Dequantize, Param, Reduce, Slice
from tilewright.ir.types import TensorType
from tilewright.lowering.access import AccessMap, Unsupported, gate_up, of_operand, of_store

EXTENT = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


def param(index, *shape, dtype=F32):
    return Node(Param(index, TensorType(dtype, shape)))


def accumulator(*shape, dtype=F32):
    return Node(Acc(TensorType(dtype, shape)))


def factored(draw, size):
    """A shape of so many elements."""
    shape = []
    while size > 1:
        part = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        shape.append(part)
        size //= part
    return [*shape, *draw(st.sampled_from([[], [1]]))] or [1]


@st.composite
def chains(draw, start, ranges=True):
    """`start` under up to five views."""
    node = start
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["reshape", "transpose", "slice", "broadcast"]))
        if kind == "reshape":
            node = reshape(node, factored(draw, math.prod(node.shape)))
        elif kind == "transpose":
            node = transpose(node, draw(st.permutations(range(len(node.shape)))))
        elif kind == "slice" and ranges:
            axis = draw(st.integers(0, len(node.shape) - 1))
            first = draw(st.integers(0, node.shape[axis] - 1))
            last = draw(st.integers(first + 1, node.shape[axis]))
            step = draw(st.sampled_from([1, 1, 2, 3]))
            starts, stops, steps = [0] * len(node.shape), list(node.shape), [1] * len(node.shape)
            starts[axis], stops[axis], steps[axis] = first, last, step
            node = Node(Slice(tuple(starts), tuple(stops), tuple(steps)), node)
        elif kind == "broadcast" and ranges and math.prod(node.shape) < 600:
            shape = [draw(st.sampled_from([2, 3])) if d == 1 and draw(st.booleans()) else d for d in node.shape]
            more = draw(st.sampled_from([[], [2]]))
            node = broadcast(node, [*more, *shape])
    return node


def places(place: AccessMap, rows: int, columns: int) -> np.ndarray:
    """The address of every row and column."""

    def part(terms, count):
        number = np.arange(count)
        return sum((number // t.inner % t.extent * t.stride for t in terms), np.zeros(count, dtype=np.int64))

    return place.offset + part(place.rows, rows)[:, None] + part(place.columns, columns)[None, :]


def leaf_numbers(root, leaf):
    """The number of the leaf's element that each element of the expression is."""
    (value,) = evaluate_nodes([root], {leaf: torch.arange(math.prod(leaf.shape), dtype=torch.float32).view(leaf.shape)})
    return value.numpy().astype(np.int64)


PLACED = {"operand": 0, "store": 0}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.lists(EXTENT, min_size=1, max_size=4), st.booleans())
def operand_is_found(data, shape, columns_last):
    leaf = param(0, *shape)
    root = data.draw(chains(leaf))
    assume(len(root.shape) >= 2)
    meant = leaf_numbers(root, leaf)
    try:
        access = of_operand(root, columns_last=columns_last)
        place = access.of_leaf(leaf)
    except Unsupported as why:
        assert str(why)
        return
    if not columns_last:
        meant = meant.swapaxes(-1, -2)
    meant = meant.reshape(-1, meant.shape[-1])
    np.testing.assert_array_equal(places(place, *meant.shape), meant)
    PLACED["operand"] += math.prod(root.shape) > 1


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.lists(EXTENT, min_size=2, max_size=4), st.booleans(), st.booleans())
def store_goes_where_it_belongs(data, shape, side, part):
    acc = accumulator(*shape)
    first, last = 0, shape[-1]
    value = acc
    if part:
        first = data.draw(st.integers(0, last - 1))
        last = data.draw(st.integers(first + 1, last))
        value = slice_(acc, -1, first, last)
    root = data.draw(chains(value, ranges=False))
    leaf = None
    if side:  # read against the store's own shape, along some of its axes
        leaf = param(0, *(d if data.draw(st.booleans()) else 1 for d in root.shape))
        root = map_("add", root, leaf if leaf.shape == root.shape else broadcast(leaf, root.shape))
    try:
        access = of_store(root)
    except Unsupported as why:
        assert str(why)
        return
    assert access.first == first and access.columns_extent == last - first
    rows = math.prod(shape[:-1])
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    bound = {acc: numbers} | ({leaf: torch.zeros(leaf.shape)} if leaf is not None else {})
    (went,) = evaluate_nodes([root], bound)
    where = np.empty(math.prod(shape), dtype=np.int64)
    where[went.numpy().astype(np.int64).ravel()] = np.arange(went.numel())
    meant = where.reshape(rows, shape[-1])[:, first:last]
    np.testing.assert_array_equal(places(access.of_result(), rows, last - first), meant)
    if leaf is not None:
        bound = {acc: torch.zeros(shape), leaf: torch.arange(math.prod(leaf.shape)).float().view(leaf.shape)}
        (read,) = evaluate_nodes([root], bound)
        np.testing.assert_array_equal(places(access.of_leaf(leaf), rows, last - first), read.numpy().ravel()[meant])
    PLACED["store"] += math.prod(root.shape) > 1


def test_every_element_of_an_operand_is_found():
    operand_is_found()
    assert PLACED["operand"] > 100


def test_every_element_of_a_store_goes_where_it_belongs():
    store_goes_where_it_belongs()
    assert PLACED["store"] > 100


@pytest.mark.parametrize("lanes", [4, 16, 32])
@pytest.mark.parametrize("shape", [(3, 5, 24), (2, 7, 40), (1, 4, 64)])
def test_vectors_read_and_write_what_views_say(shape, lanes):
    """Heads split and moved, a bias for each head, a residual in the result's order, through generated code."""
    batch, tokens, width = shape
    for heads, first in ((2, 0), (4, 0), (2, 8), (1, 3)):
        acc = accumulator(*shape)
        part = (width - first) // heads * heads
        value = slice_(acc, -1, first, first + part)
        split = transpose(reshape(value, (batch, tokens, heads, part // heads)), (0, 2, 1, 3))
        bias, residual = param(0, heads, 1, part // heads), param(1, *split.shape)
        root = map_("add", map_("multiply", split, broadcast(bias, split.shape)), residual)
        values = [torch.randn(n.shape) for n in (acc, bias, residual)]
        (wanted,) = evaluate_nodes([root], dict(zip((acc, bias, residual), values, strict=True)))
        got = run_expression(root, values[1:], values[0], lanes, of_store(root))
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("lanes", [4, 16, 32])
def test_vectors_read_operands_that_are_transposed_sliced_and_repeated(lanes):
    x, row = param(0, 6, 50, 7), param(1, 50)
    source = transpose(slice_(x, -1, 1, 6), (0, 2, 1))
    root = map_("subtract", source, broadcast(row, source.shape))
    values = [torch.randn(6, 50, 7), torch.randn(50)]
    (wanted,) = evaluate_nodes([root], dict(zip((x, row), values, strict=True)))
    torch.testing.assert_close(run_expression(root, values, None, lanes), wanted, rtol=0, atol=0)


def test_what_has_no_address_is_refused_with_a_sentence():
    acc = accumulator(4, 6)
    x = param(0, 4, 6)
    for root, words in (
        (x, "does not read the accumulator"),
        (slice_(acc, 0, 1, 3), "a range of rows"),
        (Node(Slice((0, 0), (4, 6), (1, 2)), acc), "every other column"),
        (Node(Reduce("add", (1,), True), acc), "reduce has no place"),
        (map_("add", reshape(acc, (6, 4)), reshape(acc, (6, 4))), "does not follow"),
        (map_("add", broadcast(reshape(acc, (1, 4, 6)), (5, 4, 6)), param(1, 5, 4, 6)), "the product does not have"),
    ):
        with pytest.raises(Unsupported, match=words):
            of_store(root)


@pytest.mark.parametrize("first", [0, 4, 8])
def test_a_range_of_what_a_reshape_gave_extents_of_one(first):
    """A bias that several ranges of columns share is such a one."""
    acc, bias = slice_(accumulator(3, 12), 1, first, first + 4), param(0, 12)
    part = slice_(reshape(bias, (1, 12)), 1, first, first + 4)
    access = of_store(map_("add", acc, broadcast(part, (3, 4))))
    assert access.first == first
    assert places(access.of_leaf(bias), 3, 4).tolist() == [list(range(first, first + 4))] * 3


@pytest.mark.parametrize("first", [0, 4, 8])
@pytest.mark.parametrize("repeated", [False, True])
def test_a_range_of_what_is_worked_out_beside_the_sums(first, repeated):
    """Zero points times sums of weights are such: each of several joined products takes its columns of them."""
    acc, zero, sums = slice_(accumulator(3, 12), 1, first, first + 4), param(0), param(1, 1, 12)
    given = map_("multiply", zero if repeated else broadcast(zero, (1, 12)), broadcast(sums, (3, 12)) if repeated else sums)
    root = map_("subtract", acc, slice_(given, 1, first, first + 4))
    access = of_store(root)
    assert access.first == first
    assert places(access.of_leaf(sums), 3, 4).tolist() == [list(range(first, first + 4))] * 3
    assert not places(access.of_leaf(zero), 3, 4).any()


def test_one_value_in_two_arrangements_is_refused():
    acc = accumulator(4, 4)
    with pytest.raises(Unsupported, match="two arrangements"):
        of_store(map_("add", acc, transpose(acc, (1, 0))))


def test_a_scale_given_by_blocks_is_read_at_its_block():
    codes, scale = param(0, 4, 6, dtype=S8), param(1, 2, 3)
    for columns_last in (True, False):
        access = of_operand(Node(Dequantize(F32, (2, 2)), codes, scale), columns_last=columns_last)
        found = places(access.of_leaf(scale), *((4, 6) if columns_last else (6, 4)))
        wanted = np.arange(6).reshape(2, 3).repeat(2, 0).repeat(2, 1)
        assert found.tolist() == (wanted if columns_last else wanted.T).tolist()


def test_a_scale_given_by_blocks_that_end_beyond_an_axis_is_refused():
    codes, scale = param(0, 4, 5, dtype=S8), param(1, 4, 3)
    with pytest.raises(Unsupported, match="by blocks"):
        of_operand(Node(Dequantize(F32, (1, 2)), codes, scale), columns_last=True)


def test_leaves_are_all_placed():
    """Nothing is found out about too late: a store's leaves have their places as soon as it is accepted."""
    acc, bias = accumulator(3, 8, dtype=S32), param(0, 8, dtype=S32)
    root = convert(map_("add", acc, broadcast(bias, (3, 8))), S8)
    access = of_store(root)
    assert set(access.views) == set(toposort((root,)))
    assert places(access.of_leaf(bias), 3, 8).tolist() == [list(range(8))] * 3


def test_two_halves_of_the_columns_are_two_values_over_one():
    acc = accumulator(3, 4, 10)
    left, right = slice_(acc, -1, 0, 5), slice_(acc, -1, 5, 10)
    (store,), second = gate_up((map_("multiply", map_("silu", left), right),), 7)
    assert second.op == Param(7, second.tensor) and second.shape == (3, 4, 5)
    assert store == map_("multiply", map_("silu", accumulator(3, 4, 5)), second)
    assert of_store(store).columns_extent == 5
    uneven = map_("multiply", slice_(acc, -1, 0, 4), slice_(acc, -1, 5, 9))
    thrice = map_("add", left, map_("add", right, slice_(acc, -1, 1, 6)))
    crossed = map_("multiply", slice_(left, -1, 0, 3), slice_(right, -1, 2, 5))
    for others in ((left,), (crossed,), (uneven,), (thrice,), (map_("add", left, right), left), ()):
        assert gate_up(others, 0) is None
