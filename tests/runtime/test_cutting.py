"""Regions that no kernel takes whole: cut where that helps, in an order that runs, with the values that they had."""

import pytest
import torch
from fusions import norm

import tilewright
from tilewright.dtype import F32, S8, S32
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, convert, input_, map_, reduce_, transpose
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Gather, Input, Quantize
from tilewright.runtime.partition import cut, partition, parts_for, readers_of

CPU = detect("cpu")
X, Y = input_("x", F32, (12, 40)), input_("y", F32, (12, 40))
SQUARE, SQUARE2 = input_("q", F32, (24, 24)), input_("r", F32, (24, 24))
IDS = input_("i", S32, (12, 40))


def by_blocks(x):
    """Quantise by blocks, which no row kernel does."""
    return convert(Node(Quantize(S8, (1, 8)), x, map_("abs", input_("s", F32, (12, 5)))), F32)


def graph_of(*roots):
    from tilewright.ir.graph import toposort

    inputs = tuple(n for n in toposort(roots) if isinstance(n.op, Input))
    return Graph("g", inputs, roots, tuple(f"r{i}" for i in range(len(roots))))


PROGRAMS = {
    "sums along both axes of a square": ((norm(transpose(norm(map_("add", SQUARE, SQUARE2)), (1, 0))),), 2, 0),
    "a gather from a norm": ((Node(Gather(1, True), norm(X), map_("modulo", IDS, const(40, S32))),), 2, 0),
    "one value in two arrangements": ((reduce_("mean", map_("tanh", X), (0,)), norm(map_("tanh", X))), None, 0),
    "an operation that none has": ((map_("tanh", by_blocks(map_("exponential", norm(X)))),), 3, 1),
    "a result of a piece in the middle": ((norm(X), by_blocks(norm(X)), map_("silu", by_blocks(norm(X)))), None, 1),
    "two arrangements": ((map_("add", *(lambda y: (y, transpose(y, (1, 0))))(map_("tanh", SQUARE))),), 2, 0),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_what_is_cut_runs_as_it_did(name):
    roots, count, left = PROGRAMS[name]
    graph = graph_of(*roots)
    assert len(partition(graph)) < len(parts_for(graph, CPU))
    program = tilewright.compile(graph, budget_s=0, cache=False)
    torch.manual_seed(0)
    given = [
        torch.randint(-99, 99, n.shape, dtype=torch.int32) if n.dtype is S32 else torch.randn(n.shape) for n in graph.inputs
    ]
    got = program(*given)
    got = list(got) if isinstance(got, (list, tuple)) else [got]
    for mine, wanted in zip(got, evaluate(program.source, given), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
    candidates = [s.decision.kernel.candidate for s in program.steps if s.decision is not None]
    assert candidates.count("reference") == left and "llvm_norm" in candidates
    assert count is None or len(candidates) == count


def test_what_a_kernel_takes_whole_stays_whole():
    graph = graph_of(norm(map_("add", X, Y)))
    assert parts_for(graph, CPU) == partition(graph)


def test_what_no_kernel_takes_a_piece_of_stays_whole():
    graph = graph_of(norm(by_blocks(norm(X))))
    (part,) = partition(graph)
    assert cut(part, readers_of(graph), lambda _: False) == [part]


def test_every_node_has_one_place_and_reads_what_is_done():
    for roots, *_ in PROGRAMS.values():
        graph = graph_of(*roots)
        done = set(graph.inputs)
        parts = parts_for(graph, CPU)
        for part in parts:
            assert set(part.inputs) <= done | {n for n in part.inputs if n.constant}
            assert not done & set(part.nodes)
            done |= set(part.nodes)
        assert set(graph.outputs) <= done
