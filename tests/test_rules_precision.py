"""The rule that leaves out roundings inside a kernel: where it fires, what it changes, and that nobody gets it unasked."""

import pytest
import torch

from tilewright import compile
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F16, F32, S8
from tilewright.ir.build import convert, input_, map_
from tilewright.ir.carrier import stores_of
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, toposort
from tilewright.ir.ops import Convert, Gemm, gemm


def _program(narrow, out=None):
    a, b, bias = input_("a", F32, (5, 32)), input_("b", F32, (32, 7)), input_("bias", F32, (7,))
    rounded = convert(convert(gemm(a, b), narrow), F32)
    result = map_("add", rounded, bias)
    return Graph("precision", (a, b, bias), (result if out is None else convert(result, out),), ("y",))


def _roundings(graph):
    (carrier,) = [n for n in graph.nodes() if isinstance(n.op, Gemm)]
    return sum(isinstance(n.op, Convert) for n in toposort(stores_of(carrier)))


@pytest.mark.parametrize("narrow", [F16, BF16])
def test_a_rounding_between_steps_is_dropped_only_when_asked(narrow):
    graph = _program(narrow)
    assert _roundings(optimise(graph)) == 2
    dropped = optimise(graph, excess_precision=True)
    assert _roundings(dropped) == 0 and len(dropped.nodes()) <= len(optimise(graph).nodes())
    rng = torch.Generator().manual_seed(0)
    feeds = {n.op.label: torch.randn(*n.shape, generator=rng) for n in graph.inputs}
    exact = feeds["a"].double() @ feeds["b"].double() + feeds["bias"].double()
    errors = [float((evaluate(g, feeds)[0].double() - exact).abs().max()) for g in (graph, dropped)]
    assert errors[1] < errors[0] / 100


def test_what_is_stored_and_what_was_meant_to_be_8_bits_stays():
    stored = optimise(_program(F16, F16), excess_precision=True)
    assert stored.outputs[0].dtype is F16 and _roundings(stored) == 1
    assert _roundings(optimise(_program(S8), excess_precision=True)) == 2


def test_compile_takes_it():
    graph = _program(BF16)
    a, b, bias = torch.randn(5, 32), torch.randn(32, 7), torch.randn(7)
    plain = compile(graph, budget_s=0)(a, b, bias)
    more = compile(graph, budget_s=0, excess_precision=True)(a, b, bias)
    exact = (a.double() @ b.double() + bias.double()).float()
    assert torch.allclose(more, exact, atol=1e-4) and not torch.allclose(plain, exact, atol=1e-4)
