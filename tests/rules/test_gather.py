"""Picking a run of constant indices is slicing; so a joined product that is taken apart by indices carries what follows it."""

from __future__ import annotations

import pytest
import torch
from rule_checks import (
    assert_close,
    assert_exact,
    assert_no_growth,
    assert_order_is_free,
    fired,
    gemms,
    graph_of,
    kinds,
    staged,
)

from tilewright.dtype import F32, S8, S32, S64
from tilewright.ir.build import const, convert, input_, map_, reshape, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Iota, Quantize, Slice, Softmax, gemm

RULE = "gather_of_a_run_is_a_slice"
X = input_("x", F32, (3, 6, 4))


def picked(indices: list[int] | int | list[list[int]], axis: int = 1, x: Node = X, dtype=S64) -> Node:
    return Node(Gather(axis), x, const(torch.tensor(indices, dtype=dtype.to_torch()), dtype))


@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize(
    "indices", [0, 5, -1, -6, [0], [-1], [0, 1, 2], [1, 3, 5], [4, -1], [0, 5], [[0, 1], [2, 3]], [-6, -5, 2]]
)
def test_a_run_is_sliced(indices, axis):
    before = graph_of(map_("negate", picked(indices, axis)))
    after = staged(before)
    assert_exact(before, after)
    assert fired(before, RULE) == 1
    assert [type(n.op) for n in after.nodes() if isinstance(n.op, (Slice, Gather))] == [Slice]


@pytest.mark.parametrize("indices", [[1, 0], [0, 0], [0, 1, 3], [2, 2, 2], [[0, 1], [1, 2]], [5, 4, 3]])
def test_what_is_no_run_stays(indices):
    before = graph_of(picked(indices))
    assert fired(before, RULE) == 0
    assert_exact(before, staged(before))


@pytest.mark.parametrize("indices", [[6], [4, 6], -7, [5, 6]])
def test_an_index_outside_is_left_to_fail_where_it_did(indices):
    assert fired(graph_of(picked(indices)), RULE) == 0


def test_it_leaves_no_index_computed_ones_and_element_by_element():
    computed = Node(Gather(1), X, convert(map_("relu", input_("i", S32, (2,))), S64))
    none = Node(Gather(1), X, const(torch.zeros(0, dtype=torch.int64), S64))
    each = Node(Gather(1, elementwise=True), X, const(torch.zeros(3, 1, 4, dtype=torch.int64), S64))
    for node in (computed, none, each):
        assert fired(graph_of(node), RULE) == 0


def test_positions_written_as_iota_slice_a_table():
    before = graph_of(Node(Gather(0), input_("table", F32, (10, 4)), Node(Iota(S32, (7,), 0))))
    after = staged(before)
    assert fired(before, RULE) == 1
    assert_exact(before, after)


@pytest.mark.parametrize("quantised", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("split", ["batch first", "sequence first"])
def test_a_joined_product_taken_apart_by_indices_is_one_gemm_with_three_stores(split, quantised):
    """Vision transformers and torch.nn.MultiheadAttention, as exporters write them: qkv.permute(…)[0], […][1], […][2]."""
    g = torch.Generator().manual_seed(0)
    x = input_("x", F32, (2, 5, 8))
    y = map_("add", gemm(x, const(torch.randn(8, 24, generator=g))), const(torch.randn(24, generator=g)))
    if split == "batch first":
        y = transpose(reshape(y, (2, 5, 3, 2, 4)), (2, 0, 3, 1, 4))
        parts = [picked(i, 0, y) for i in range(3)]
    else:
        y = transpose(reshape(y, (2, 5, 3, 8)), (2, 1, 0, 3))
        parts = [transpose(reshape(picked(i, 0, y), (5, 4, 4)), (1, 0, 2)) for i in range(3)]
        parts = [reshape(p, (2, 2, 5, 4)) for p in parts]
    parts = [Node(Quantize(S8), p, const(0.1)) if i in quantised else p for i, p in enumerate(parts)]
    before = graph_of(*parts)
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["gemm"] and len(gemms(after)[0].op.stores) == 3
    assert_exact(before, after)
    assert_no_growth(before, after)
    if not quantised:
        q, k, v = parts
        whole = graph_of(gemm(Node(Softmax(-1), gemm(q, swap_last(k))), v))
        assert kinds(staged(whole)) == ["gemm", "attention"]
        assert_close(whole, staged(whole), 1e-5)
