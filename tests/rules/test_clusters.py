"""A norm of rows is stored by the product before it, for targets whose blocks hold whole rows together, and for no others."""

from dataclasses import replace

import pytest
import torch
from ptx import H200
from rule_checks import assert_exact, assert_no_growth, fired, gemms, graph_of, kinds, staged, traffic

from tilewright.compiler import CLUSTERS, STAGES, optimise
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, S8
from tilewright.hardware.clusters import has_clusters, row_tiles
from tilewright.hardware.detect import detect
from tilewright.ir.anchor import stores_of
from tilewright.ir.build import const, convert, input_, map_, reduce_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, LayerNorm, Quantize, gemm
from tilewright.ir.pattern import Trace
from tilewright.rules.clusters import FEWEST_ROWS, RULE

ROWS, WIDTH = (8, FEWEST_ROWS // 8), 128


def weights(*shape, scale=1.0, kind=F16):
    drawn = torch.Generator().manual_seed(sum(shape))
    return const((torch.randn(*shape, generator=drawn) * scale).to(kind.to_torch()))


def codes(x, to=F8E4M3FN):
    return Node(Quantize(to), convert(x, F32), const(0.03, F32))


def linear(x, width, to=F8E4M3FN):
    """A quantised layer."""
    w = Node(Quantize(to), weights(x.shape[-1], width, scale=0.05, kind=F32), const(0.001, F32))
    a, b = Node(Dequantize(F32), codes(x, to), const(0.03, F32)), Node(Dequantize(F32), w, const(0.001, F32))
    return convert(map_("add", gemm(a, b, out_dtype=F32), weights(width, kind=F32)), F16)


def normed(x, center=True):
    return Node(LayerNorm(len(x.shape) - 1, 1e-5, center=center), x, *[weights(x.shape[-1])] * (2 if center else 1))


def halves(rows=ROWS, width=WIDTH, depth=64, kind=F16):
    """A product of 16 bits, and what is added to it."""
    product = gemm(input_("x", kind, (*rows, depth)), weights(depth, width, kind=kind), out_dtype=kind)
    return map_("add", product, input_("residual", kind, (*rows, width)))


def post_norm(layers=2, to=F8E4M3FN):
    x = input_("x", F16, (*ROWS, WIDTH))
    for _ in range(layers):
        x = normed(map_("add", linear(x, WIDTH, to), x))
        x = normed(map_("add", linear(map_("gelu", linear(x, 2 * WIDTH, to)), WIDTH, to), x))
    return graph_of(convert(x, F32))


def pre_norm():
    x = input_("x", F16, (*ROWS, WIDTH))
    for _ in range(2):
        x = map_("add", linear(normed(x, center=False), WIDTH), x)
    return graph_of(x)


@pytest.mark.parametrize("to", [F8E4M3FN, S8], ids=str)
def test_layers_are_products_alone(to):
    before = post_norm(to=to)
    plain, trace = optimise(before), Trace()
    after = optimise(before, trace, clusters=True)
    assert kinds(plain).count("norm") == 4 and kinds(after) == ["quantize", *["gemm"] * 6]
    assert_exact(plain, after)
    assert_no_growth(plain, after)
    assert traffic(after) < traffic(plain)
    assert [len(stores_of(n)) for n in gemms(after)] == [2, 1, 2, 2, 1, 1]
    assert {s.stage for s in trace.steps if s.rule == RULE} == {CLUSTERS}


def test_what_others_read_is_stored_too():
    plain = optimise(pre_norm())
    after = optimise(pre_norm(), clusters=True)
    assert kinds(plain) == ["norm", "gemm", "norm", "gemm"] and kinds(after) == ["norm", "gemm", "gemm"]
    assert_exact(plain, after)
    assert_no_growth(plain, after)
    assert [s.op.name for s in stores_of(gemms(after)[0])] == ["map", "quantize"]


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
def test_halves_are_normalised(kind):
    x = halves(kind=kind)
    graph = graph_of(Node(LayerNorm(2, 1e-5), x))
    after = staged(graph, *STAGES, CLUSTERS)
    assert kinds(after) == ["gemm"]
    assert_exact(staged(graph, *STAGES), after)


SUM = halves()
WIDE = normed(SUM)
STAYS = {
    "few rows": normed(halves((4, 8))),
    "rows that no blocks have whole": normed(halves(width=4096)),
    "rows of odd lengths": normed(halves(width=100)),
    "operands of f32": Node(LayerNorm(2, 1e-5), halves(kind=F32)),
    "a norm of more than the last axis": Node(LayerNorm(1, 1e-5), halves()),
    "two norms": map_("add", WIDE, Node(LayerNorm(2, 1e-3), SUM)),
    "codes with a scale for each row": Node(
        Quantize(F8E4M3FN),
        convert(WIDE, F32),
        map_("divide", reduce_("maximum", map_("abs", convert(WIDE, F32)), [2], keepdims=True), const(448.0, F32)),
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_does_not_fit_stays(name):
    assert fired(graph_of(STAYS[name]), RULE, *STAGES, CLUSTERS) == 0


def test_what_a_later_product_adds_is_read_from_memory():
    later = map_("add", WIDE, gemm(WIDE, weights(WIDTH, WIDTH), out_dtype=F16))
    after = staged(graph_of(later), *STAGES, CLUSTERS)
    assert kinds(after) == ["gemm", "gemm"]
    assert_exact(staged(graph_of(later), *STAGES), after)


def test_it_says_why_a_norm_stays():
    trace = Trace()
    optimise(graph_of(STAYS["codes with a scale for each row"]), trace, clusters=True)
    assert [m.why for m in trace.near_misses if m.rule == RULE] == ["reduce reads it in a step of its own"]
    trace = Trace()
    optimise(graph_of(STAYS["two norms"]), trace, clusters=True)
    assert [m.why for m in trace.near_misses if m.rule == RULE] == ["2 norms follow one product"]


def test_other_targets_see_nothing_of_it():
    assert CLUSTERS not in STAGES and fired(post_norm(), RULE) == 0
    assert has_clusters(H200) and not has_clusters(detect("cpu"))
    assert not has_clusters(replace(H200, features=frozenset({"cuda", "sm_80"})))


def test_rows_in_equal_tiles():
    assert row_tiles(768) == [(256, 3), (192, 4), (96, 8)]
    assert row_tiles(1024) == [(256, 4), (128, 8)] and row_tiles(2048) == [(256, 8)]
    assert row_tiles(64) == [(64, 1)] and row_tiles(4096) == row_tiles(100) == []
