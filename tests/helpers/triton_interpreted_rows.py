"""Generated row kernels in Triton's interpreter against the oracle: run by tests/candidates/triton/test_interpreted.py."""

from collections import Counter

import pytest
import torch
from fusions import norm, problem_of
from rotated import FORMS as CONCATENATIONS
from row_cases import cases
from triton_map import in_memory, scalars

from tilewright.candidates.triton.expressions.emit import check_node
from tilewright.candidates.triton.normalization.kernel import Tiles, kernel_text, sources_of
from tilewright.candidates.triton.runtime.module import module
from tilewright.dtype import F32, PRED, S64
from tilewright.ir.build import input_, map_, reduce_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Softmax
from tilewright.lowering.reduction_nest import reduction_nests
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.expected import check, expect
from tilewright.schedule.sample import random_sources
from tilewright.sizes import next_power_of_2

CASES = cases(lengths=(1, 7, 100))


def run(problem, sources, tile_m, parts=1, piece=16):
    """`parts`: of a row that is reduced."""
    several = []
    for nest in reduction_nests(problem.roots, check_node):
        whole = next_power_of_2(nest.columns)
        tile_n = max(whole // parts, 1) if any(nest.level.values()) else min(piece, whole)
        several.append(Tiles(nest, tile_m, tile_n))
    results = [torch.full(t.shape, 77, dtype=torch.uint8).bool() if t.dtype is PRED else poisoned(t) for t in problem.outputs]
    given = [sources[i] for i in sources_of(several)]
    written = kernel_text(several, frozenset())
    kernel = module(written.text).kernel
    grid = sum(t.grid for t in several)
    kernel[(grid,)](*map(in_memory, given), *map(in_memory, results), *scalars(written.numbers))
    return results


def poisoned(t):
    bits = torch.full((max(t.size_bytes, 1),), 0xFF, dtype=torch.uint8)
    return bits.view(t.dtype.to_torch())[: t.elements].reshape(t.shape)


FORMS = ((1,), (4, 8), (2, 4))  # rows of a tile, parts of a row


def right(*roots, forms=FORMS):
    problem = problem_of(*roots)
    sources = random_sources(problem)
    expected = expect(problem, sources)
    for form in forms:
        why = check(problem, expected, run(problem, sources, *form))
        assert why is None, f"{problem}: {form}: {why}"


REFUSED = {"integers_of_floats s64": "converting a float to s64 has no Triton form"}
LONG = ("codes_of_a_rotation_and_their_sums",)


def thinned():
    """Give all cases, of which every fourth of a kind is in the short suite, but for the long ones."""
    seen = Counter()
    for name in CASES:
        kind = name.split()[0]
        yield pytest.param(name, marks=[pytest.mark.conformance] * (seen[kind] % 4 > 0 or name in LONG))
        seen[kind] += 1


@pytest.mark.parametrize("case", thinned())
def test_rows(case):
    for roots in CASES[case]():
        if case in REFUSED:
            with pytest.raises(Unsupported, match=REFUSED[case]):
                right(*roots)
        else:
            right(*roots)


@pytest.mark.thin(4)
@pytest.mark.parametrize("length", [3, 7, 64, 100])
def test_the_mean_of_equal_numbers_is_that_number(length):
    x = input_("x", F32, (3, length))
    source = torch.tensor([[1000.25], [-7.0], [float("inf")]]).expand(3, length).contiguous()
    for form in FORMS:
        (mean,) = run(problem_of(reduce_("mean", x, (1,))), [source], *form)
        assert torch.equal(mean, source[:, 0])
        (normed,) = run(problem_of(norm(x)), [source], *form)
        assert not normed[:2].any() and normed[2].isnan().all()


@pytest.mark.thin(4)
@pytest.mark.parametrize("form", CONCATENATIONS)
def test_concatenations_are_stored_in_pieces(form):
    right(*CONCATENATIONS[form](), forms=((4, 4),))


def test_nan_reaches_maxima_and_what_they_scale():
    x = input_("x", F32, (6, 100))
    problem = problem_of(reduce_("maximum", x, (1,), True), reduce_("minimum", x, (1,), True), Node(Softmax(1), x))
    (source,) = random_sources(problem)
    source[2, 99], source[4, 0], source[5, 7] = float("nan"), float("-inf"), float("inf")
    high, low, weights = run(problem, [source], 2)
    for got, wanted in ((high, source.amax(1, True)), (low, source.amin(1, True)), (weights, source.softmax(1))):
        torch.testing.assert_close(got, wanted, equal_nan=True)


def test_an_index_counts_from_the_end_and_reads_nothing_beside_the_table():
    ids, table = input_("i", S64, (2, 9)), input_("t", F32, (33, 50))
    problem = problem_of(map_("tanh", Node(Gather(0), table, ids)))
    sources = random_sources(problem)
    picks = next(t for t in sources if t.dtype == torch.int64)
    values = next(t for t in sources if t.dtype == torch.float32)
    picks[0, 0], picks[1, 8] = -1, -33
    (got,) = run(problem, sources, 4, piece=64)
    torch.testing.assert_close(got[0, 0], values[-1].tanh())
    torch.testing.assert_close(got[1, 8], values[0].tanh())
    picks[0, 3], picks[0, 4] = 33, -34  # ends the program on a GPU, and reads no memory beside the table anywhere
    (got,) = run(problem, sources, 4, piece=64)
    torch.testing.assert_close(got[0, 3:5], values[:1].tanh().expand(2, 50))
