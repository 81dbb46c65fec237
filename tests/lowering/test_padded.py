"""Pads as concatenations and cuts, against the graph's own meaning."""

import pytest
import torch

from tilewright.compiler import compile
from tilewright.dtype import F32
from tilewright.ir.build import const, input_, map_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Pad


@pytest.mark.parametrize("edges", [(2, -2), (-2, 2), (3, -5), (-5, 3), (1, 2), (-1, -1), (0, -3), (7, -3)])
def test_one_side_may_cut_more_than_there_is(edges):
    x = input_("x", F32, (3, 8))
    padded = Node(Pad((edges[0], 0), (edges[1], 0), (0, 0)), x, const(-1.0, F32))
    graph = Graph("g", (x,), (map_("tanh", map_("multiply", padded, padded)),), ("y",))
    given = torch.randn(3, 8)
    found = compile(graph, budget_s=0)(given)
    torch.testing.assert_close(found, evaluate(graph, [given])[0], rtol=1e-5, atol=1e-6)
