"""Generated row kernels in Triton's interpreter against the oracle: run by tests/candidates/triton/test_interpreted.py."""

import pytest
import torch
from fusions import by_row, norm, problem_of
from rotated import FORMS as CONCATENATIONS
from triton_map import in_memory, scalars

from tilewright.candidates.triton.expressions.emit import check_node
from tilewright.candidates.triton.normalization.candidate import _power
from tilewright.candidates.triton.normalization.kernel import Tiles, kernel_text, sources_of
from tilewright.candidates.triton.runtime.module import module
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED, S8, S32, S64, U8
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, Gather, Pad, Quantize, Select, Softmax
from tilewright.lowering.reduction_nest import reduction_nests
from tilewright.schedule.expected import check, expect
from tilewright.schedule.sample import random_sources

LENGTHS = (1, 7, 100)


def run(problem, sources, tile_m, parts=1, piece=16):
    """`parts`: of a row that is reduced."""
    several = []
    for nest in reduction_nests(problem.roots, check_node):
        whole = _power(nest.columns)
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


@pytest.mark.thin(4)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_norms_and_softmaxes(length, dtype):
    x, residual = (input_(name, dtype, (5, length)) for name in "xr")
    scale, bias = (input_(name, dtype, (length,)) for name in "sb")
    total = map_("add", x, residual)
    right(total, norm(total, scale, bias))
    right(norm(x, scale, center=False))
    right(Node(Softmax(1), x))
    right(reduce_("mean", x, (1,)), reduce_("maximum", x, (1,), True))


@pytest.mark.thin(4)
@pytest.mark.parametrize("length", LENGTHS)
def test_quantising_ends_a_row(length):
    x, residual = (input_(name, F32, (6, length)) for name in "xr")
    scale, bias, step = input_("s", F32, (length,)), input_("b", F32, (length,)), input_("q", F32, ())
    zero = input_("z", U8, ())
    total = norm(map_("add", x, residual), scale, bias)
    right(total, Node(Quantize(U8), total, step, zero))
    right(convert(total, F16), Node(Quantize(F8E4M3FN), total, step))
    right(*by_row(total))
    right(*by_row(map_("gelu", x), F8E4M3FN))
    code = input_("c", S8, (6, length))
    right(norm(map_("add", Node(Dequantize(F32), code, step), x), scale, bias))


def test_a_value_that_is_rounded_in_one_result_and_not_in_another_keeps_its_digits():
    x = map_("gelu", input_("x", F32, (6, 100)))
    right(convert(x, BF16), x)
    right(x, convert(x, BF16))


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


def test_rows_through_views():
    x, head = input_("x", F32, (3, 4, 50)), input_("h", F32, (4, 1))
    right(map_("tanh", transpose(x, (0, 2, 1))))
    right(reshape(Node(Softmax(2), map_("multiply", x, head)), (12, 50)), x)
    right(map_("multiply", map_("silu", slice_(x, 2, 0, 25)), slice_(x, 2, 25, 50)))
    right(map_("add", x, transpose(input_("y", F32, (50, 4, 3)), (2, 1, 0))))
    right(reduce_("add", map_("exponential", x), (0, 1, 2)))
    right(broadcast(map_("exponential", input_("t", F32, (4, 1))), (3, 4, 50)), x)


@pytest.mark.thin(4)
@pytest.mark.parametrize("form", CONCATENATIONS)
def test_concatenations_are_stored_in_pieces(form):
    right(*CONCATENATIONS[form](), forms=((4, 4),))


def test_integers_and_tests():
    a, b = input_("a", S32, (7, 130)), input_("b", S8, (7, 130))
    right(map_("add", a, convert(b, S32)), map_("greater", a, convert(b, S32)))
    right(reduce_("add", a, (1,)), reduce_("minimum", b, (1,), True), reduce_("maximum", b, (1,), True))
    mask = input_("m", S64, (1, 130))
    right(Node(Select(), map_("and", convert(mask, PRED), input_("p", PRED, (7, 1))), input_("x", F32, ()), const(-1e9, F32)))


def test_nan_reaches_maxima_and_what_they_scale():
    x = input_("x", F32, (6, 100))
    problem = problem_of(reduce_("maximum", x, (1,), True), reduce_("minimum", x, (1,), True), Node(Softmax(1), x))
    (source,) = random_sources(problem)
    source[2, 99], source[4, 0], source[5, 7] = float("nan"), float("-inf"), float("inf")
    high, low, weights = run(problem, [source], 2)
    for got, wanted in ((high, source.amax(1, True)), (low, source.amin(1, True)), (weights, source.softmax(1))):
        torch.testing.assert_close(got, wanted, equal_nan=True)


def test_rows_picked_from_a_table():
    ids, table, place = input_("i", S64, (2, 9)), input_("t", F32, (33, 50)), input_("p", F32, (9, 50))
    total = map_("add", Node(Gather(0), table, ids), place)
    right(total, norm(total))
    right(map_("tanh", Node(Gather(1), input_("t3", F32, (3, 8, 20)), input_("k", S32, (5,)))))
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


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", [S64, U8], ids=str)
def test_indices_are_computed(dtype):
    a, b, n = input_("a", dtype, (5, 37)), input_("b", dtype, (37,)), const(3, dtype)
    right(map_("add", map_("multiply", a, b), map_("modulo", a, n)), map_("divide", a, b), map_("less", a, b))
    right(*(reduce_(fn, a, (1,)) for fn in ("add", "maximum", "minimum", "multiply", "and", "or")))


def test_whether_any_or_all_hold():
    p = input_("p", PRED, (6, 35))
    right(*(reduce_(fn, p, (1,)) for fn in ("and", "or", "add", "multiply", "maximum", "minimum")))
    right(Node(Softmax(1, True), input_("x", F32, (5, 70))))


def test_single_elements_are_picked():
    table, order = input_("t", F32, (3, 41)), input_("o", S64, (30,))
    right(Node(Gather(1), table, input_("i", S64, (29,))), forms=((2, 4),))
    right(Node(Gather(1, True), table, input_("e", S32, (2, 29))), forms=((2, 4),))
    right(Node(Gather(0), input_("p", PRED, (17,)), input_("j", U8, (4, 33))), forms=((2, 4),))
    hidden = input_("h", F32, (7, 40))
    right(norm(Node(Gather(0), hidden, map_("modulo", order, const(7, S64)))), forms=((2, 4),))
    right(map_("tanh", Node(Gather(1), hidden, map_("modulo", order, const(40, S64)))), forms=((2, 4),))


def test_numbers_around_what_is_worked_out():
    x, fill = input_("x", F32, (3, 5, 18)), input_("f", F32, ())
    right(Node(Pad((0, 1, 2), (0, 2, 1), (0, 0, 0)), map_("tanh", x), fill), forms=((2, 4),))
