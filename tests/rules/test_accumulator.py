"""Narrow integer accumulators are widened, exactly."""

import numpy as np
import pytest
import torch
from rule_checks import arithmetic, assert_exact, fired, gemms, graph_of, staged

from tilewright.dtype import BF16, F16, F32, S4, S8, S16, S32, S64, U4, U8, U16, U32
from tilewright.ir.build import convert, input_, items, map_, slice_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Convert, Gemm, Param, gemm

RULE = "accumulate_narrow_integers_in_s32"


def product(a_type, b_type, acc, shape=(7, 33, 5), batch=()):
    m, k, n = shape
    return gemm(input_("a", a_type, (*batch, m, k)), input_("b", b_type, (*batch, k, n)), acc_dtype=acc)


@pytest.mark.parametrize("acc", [S8, U8, S16, U16, S4, U4])
@pytest.mark.parametrize(("a", "b"), [(S8, S8), (S8, U8), (U8, U8), (S4, S8), (S16, S16), (S32, S32)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_widening_is_exact_over_the_full_range(acc, a, b, batch):
    before = graph_of(product(a, b, acc, batch=batch))
    after = staged(before, "accumulator")
    (node,) = gemms(after)
    assert node.op.acc_dtype is S32 and node.type == before.outputs[0].type
    assert fired(before, RULE, "accumulator") == 1
    assert arithmetic(after) == arithmetic(before) and len(after.nodes()) == len(before.nodes())
    for seed in range(3):
        assert_exact(before, after, seed)


def test_the_result_is_the_product_modulo_the_width():
    before = graph_of(product(S8, S8, S8))
    feeds = {n.op.label: torch.randint(-128, 128, n.shape, dtype=torch.int8) for n in before.inputs}
    wide = feeds["a"].numpy().astype(np.int64) @ feeds["b"].numpy().astype(np.int64)
    got = evaluate(staged(before), feeds)[0]
    np.testing.assert_array_equal(got.numpy(), wide.astype(np.int8))


def test_both_spellings_become_the_same_node():
    a, b = input_("a", S8, (4, 6)), input_("b", S8, (6, 5))
    narrow = gemm(a, b, acc_dtype=S8)
    wide = convert(gemm(a, b), S8)
    assert staged(graph_of(narrow)).outputs == staged(graph_of(wide)).outputs


def test_every_store_reads_the_narrowed_accumulator():
    a, b = input_("a", S8, (4, 6)), input_("b", S8, (6, 5))
    lhs, rhs = Node(Param(0, a.tensor)), Node(Param(1, b.tensor))
    acc = Node(Acc(Gemm(S8, lhs, rhs, ()).acc_type))
    stores = (map_("negate", acc), slice_(acc, -1, 1, 3), map_("add", acc, acc), lhs)
    node = Node(Gemm(S8, lhs, rhs, stores), a, b)
    before = graph_of(*items(node))
    after = staged(before, "accumulator")
    assert_exact(before, after)
    assert gemms(after)[0].op.acc_dtype is S32


@pytest.mark.parametrize(
    ("a", "acc"), [(S8, S32), (S8, S64), (U8, U32), (F16, F16), (BF16, BF16), (F32, F32), (F16, F32), (S32, S32), (S64, S64)]
)
def test_it_leaves_wide_and_float_accumulators(a, acc):
    before = graph_of(product(a, a, acc))
    assert fired(before, RULE, "accumulator") == 0
    assert staged(before, "accumulator").outputs == before.outputs


def test_a_saturating_narrowing_stays_one():
    """convert(acc, s8, saturate) of a wide accumulator is another program than a narrow accumulator."""
    a, b = input_("a", S8, (4, 60)), input_("b", S8, (60, 5))
    saturating = Node(Convert(S8, "saturate"), gemm(a, b))
    before = graph_of(saturating)
    after = staged(before)
    assert_exact(before, after)
    assert staged(graph_of(convert(gemm(a, b), S8))).outputs != after.outputs
