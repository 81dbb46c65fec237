"""The largest magnitude of a result is found by the product that stores it, and written without a copy of all magnitudes."""

import pytest
import torch
from rule_checks import (
    assert_exact,
    assert_no_growth,
    assert_order_is_free,
    feeds_of,
    fired,
    gemms,
    graph_of,
    kinds,
    results,
    traffic,
)

from tilewright.compiler import compile, optimise
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, S8, S32
from tilewright.ir.anchor import stores_of
from tilewright.ir.build import const, convert, input_, map_, reshape, swap_last
from tilewright.ir.graph import Node
from tilewright.ir.ops import Quantize, Reduce, gemm
from tilewright.rules.amax import RULE

M, K, N = 61, 33, 70
A, B = input_("a", F32, (M, K)), input_("b", F32, (K, N))
Y = map_("multiply", gemm(A, B), const(0.25))


def amax(x, *axes, fn="maximum", keepdims=False):
    return Node(Reduce(fn, axes or tuple(range(len(x.shape))), keepdims), map_("abs", x))


def largest(x):
    return Node(Reduce("maximum", tuple(range(len(x.shape)))), x)


def codes(y):
    return Node(Quantize(F8E4M3FN), y, const(0.5))


def half(y=Y):
    return convert(y, BF16)


BESIDE = {
    "delayed scaling": (lambda: [codes(Y), amax(Y)], 2),
    "alone": (lambda: [amax(Y)], 1),
    "beside the result": (lambda: [Y, amax(Y)], 2),
    "of a narrow result": (lambda: [half(), amax(half())], 2),
    "narrow, asked for wide": (lambda: [half(), convert(amax(half()), F32)], 2),
    "viewed": (lambda: [swap_last(Y), amax(swap_last(Y))], 2),
    "flat": (lambda: [amax(reshape(Y, (M * N,)))], 1),
    "scaled first": (lambda: [codes(Y), amax(map_("multiply", Y, reshape(input_("s", F32, (1,)), ())))], 2),
    "with a bias": (lambda: [codes(map_("add", Y, input_("v", F32, (N,)))), amax(map_("add", Y, input_("v", F32, (N,))))], 2),
    "of relu": (lambda: [codes(map_("relu", Y)), amax(map_("relu", Y))], 2),
    "of relu, which has no magnitudes below": (lambda: [codes(map_("relu", Y)), largest(map_("relu", Y))], 2),
    "of integers as floats": (lambda: [amax(convert(gemm(input_("p", S8, (M, K)), input_("q", S8, (K, N))), F32))], 1),
    "a batch": (lambda: [amax(gemm(input_("c", F32, (3, 5, K)), input_("d", F32, (3, K, 7))))], 1),
}


@pytest.mark.parametrize("name", BESIDE)
def test_the_largest_is_a_store(name):
    build, stores = BESIDE[name]
    before = graph_of(*build())
    after = assert_order_is_free(before, orders=3)
    assert set(kinds(after)) <= {"gemm", "quantize", "move"} and kinds(after)[0] == "gemm", kinds(after)
    assert len(stores_of(gemms(after)[0])) == stores and fired(before, RULE) == 1
    assert_exact(before, after)
    assert_no_growth(before, after)
    assert traffic(after) < traffic(before)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("special", [None, float("nan"), -float("inf")], ids=str)
def test_kernels_find_it(name, special):
    before = graph_of(*BESIDE[name][0]())
    feeds = feeds_of(before, 2)
    if special is not None and "a" in feeds:
        feeds["a"][-1, -1] = special
    got = compile(before, budget_s=0, cache=False)(**feeds)
    wanted = results(before, feeds)
    for g, w in zip(got if isinstance(got, tuple | list) else [got], wanted, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        if g.dtype != torch.float8_e4m3fn:
            assert torch.allclose(
                g.float(), w.float(), rtol=1e-2 if g.dtype == torch.bfloat16 else 1e-5, atol=1e-5, equal_nan=True
            )


KEPT = {
    "rows": lambda: amax(Y, 1),
    "the least": lambda: amax(Y, fn="minimum"),
    "signed": lambda: Node(Reduce("maximum", (0, 1)), Y),
    "kept axes": lambda: amax(Y, keepdims=True),
    "of f64": lambda: amax(map_("multiply", gemm(input_("e", F64, (M, K)), input_("f", F64, (K, N))), const(1e300, F64))),
    "of integers": lambda: amax(gemm(input_("p", S8, (M, K)), input_("q", S8, (K, N)), acc_dtype=S32)),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_reductions_stay(name):
    before = graph_of(KEPT[name]())
    after = assert_order_is_free(before, orders=3)
    assert fired(before, RULE) == 0 and "reduce" in kinds(after)
    assert_exact(before, after)


def test_every_thread_and_every_size_finds_it():
    """Tiles cut short at the edges, several passes over K, and the largest anywhere."""
    for m, k, n in ((1, 1, 1), (1, 300, 5), (7, 3, 129), (64, 1200, 48), (131, 17, 97)):
        a, b = input_("a", F16 if k == 3 else F32, (m, k)), input_("b", F16 if k == 3 else F32, (k, n))
        run = compile(graph_of(amax(convert(gemm(a, b), F32))), budget_s=0, cache=False)
        for at in range(3):
            left, right = torch.zeros(m, k, dtype=a.dtype.to_torch()), torch.ones(k, n, dtype=a.dtype.to_torch())
            left[(at * 37) % m, (at * 11) % k] = -3.0
            assert run(a=left, b=right).item() == 3.0


def test_the_graph_needs_no_more_than_the_stage():
    assert kinds(optimise(graph_of(codes(Y), amax(Y)))) == ["gemm"]
