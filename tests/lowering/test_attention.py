"""Facts of an attention, which generators for CPUs and for GPUs read alike."""

import pytest
from attentions import attention

from tilewright.dtype import F64, PRED
from tilewright.lowering.attention import facts_of
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import problem_of


def test_extents_masks_and_what_is_checked():
    node, seen = attention((2, 4, 2, 13, 33, 24, 40), mask=(PRED, (2, 1, 1, 33)), causal="lower"), []
    found = facts_of(problem_of(node), seen.extend)
    assert (found.batch, found.heads, found.shared) == (2, 4, 2)
    assert (found.queries, found.keys, found.depth, found.width, found.shift) == (13, 33, 24, 40, 20)
    assert found.mask is not None and found.mask.root.shape == (2, 4, 13, 33)
    assert [s.root.shape for s in found.stores] == [(2, 4, 13, 40)]
    assert [n.shape for n in seen] == [(2, 4, 13, 24), (2, 1, 1, 33), (2, 4, 13, 40)], "no keys, no values"


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (attention((1, 1, 1, 0, 4, 8, 8)), "an extent is zero"),
        (attention((1, 1, 1, 3, 4, 8, 8), F64), "computes in f32, not f64"),
    ],
)
def test_what_no_generator_does(node, why):
    with pytest.raises(Unsupported, match=why):
        facts_of(problem_of(node), lambda _: None)
