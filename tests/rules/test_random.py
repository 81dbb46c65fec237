"""Random programs of products, views, casts, codes and elementwise tails: the rules keep what they mean and add no work.

`make test` draws the same 200 each time; `make fuzz` draws 2,000 others each time and prints how to repeat a failure.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import programs
from rule_checks import arithmetic, results, same_bits, staged

from tilewright.compiler import optimise
from tilewright.dtype import BF16, F16, F32
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, toposort
from tilewright.ir.ops import Broadcast, Gemm, Item, Reshape, Slice, Transpose
from tilewright.ir.pattern import Trace
from tilewright.ir.text import print_graph
from tilewright.runtime.partition import partition

FREE = (Item, Reshape, Transpose, Slice, Broadcast)
RTOL = {F32: 1e-4, F16: 2e-2, BF16: 1e-1}  # of the largest magnitude, by the coarsest type that rounds on the way
SCALES = "multiply_codes_and_scale_the_accumulator"


def operations(graph) -> int:
    """Count the nodes that are computed at every call, views aside."""
    return sum(not isinstance(n.op, FREE) for p in partition(graph) if not p.once for n in p.nodes)


def check(program, seed: int) -> None:
    """Values, work, a second run, and whether another order of the rules finds something else."""
    before, trace = program.graph, Trace()
    after = optimise(before, trace)
    shown = f"\n{print_graph(before)}\nbecame\n{print_graph(after)}"
    for output, a, b in zip(before.outputs, results(before, program.feeds), results(after, program.feeds), strict=True):
        terms = 0.0 if program.exact else largest_terms(before, program.feeds, output)
        assert agree(output, a, b, program.exact, terms), f"{a.flatten()[:8].tolist()} became {b.flatten()[:8].tolist()}{shown}"
    assert arithmetic(after) <= arithmetic(before), f"more is multiplied{shown}"
    # Zero points cost a sum of rows and of columns, and a scale each is applied to the result instead of to the operand.
    corrections = 4 * sum(s.rule == SCALES for s in trace.steps)
    assert operations(after) <= operations(before) + corrections, f"more is computed{shown}"
    again = optimise(after)
    assert arithmetic(again) <= arithmetic(after) and operations(again) <= operations(after), f"a second run adds work{shown}"
    other = staged(before, shuffle=seed)
    assert other.outputs == after.outputs, f"another order of the rules gives\n{print_graph(other)}{shown}"


def largest_terms(graph: Graph, feeds, output) -> float:
    """The most that the terms of an output's products may add up to: sums that cancel are as wrong as their terms are large."""
    products = [n for n in toposort((output,)) if isinstance(n.op, Gemm)]
    if not products:
        return 0.0
    given = tuple(s for n in products for s in n.src[:2])
    sizes = [
        float(v.double().abs().nan_to_num(0, 0, 0).max()) if v.numel() else 0.0
        for v in evaluate(output_of(graph, given), feeds)
    ]
    return max(n.op.lhs.shape[-1] * a * b for n, a, b in zip(products, sizes[::2], sizes[1::2], strict=True))


def output_of(graph: Graph, nodes) -> Graph:
    return Graph(graph.name, graph.inputs, nodes, tuple(f"v{i}" for i in range(len(nodes))))


def agree(output, a: torch.Tensor, b: torch.Tensor, exact: bool, terms: float = 0.0) -> bool:
    """Bit for bit (a zero may lose its sign where 0 * -x became 0), or within the rounding of the coarsest type."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = a.double(), b.double()
    if exact:
        return same_bits(x + 0, y + 0)
    rtol = max((RTOL.get(n.dtype, 0) for n in toposort((output,)) if n.dtype), default=0)
    scale = max(float(x.abs().nan_to_num(0, 0, 0).max()), terms / 8) if x.numel() else 0
    return torch.equal(x.isnan(), y.isnan()) and bool(((x - y).abs().nan_to_num(0) <= rtol * scale).all())


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(programs(exact=True), st.integers(0, 1 << 16))
@settings(max_examples=100, derandomize=True, database=None, **QUIET)
def test_exact_programs_keep_every_bit(program, seed):
    check(program, seed)


@given(programs(exact=False), st.integers(0, 1 << 16))
@settings(max_examples=100, derandomize=True, database=None, **QUIET)
def test_rounded_programs_keep_their_values(program, seed):
    check(program, seed)


@pytest.mark.fuzz
@given(programs(exact=True, most_steps=20), st.integers(0, 1 << 16))
@settings(max_examples=1000, **QUIET)
def test_many_exact_programs_keep_every_bit(program, seed):
    check(program, seed)


@pytest.mark.fuzz
@given(programs(exact=False, most_steps=20), st.integers(0, 1 << 16))
@settings(max_examples=1000, **QUIET)
def test_many_rounded_programs_keep_their_values(program, seed):
    check(program, seed)
