"""The two forms of a program for one rank: sums that every rank gets whole, or rows that ranks share out between products
(`rules/collective.py`). The one that is expected to take less time is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilewright.errors import counted
from tilewright.hardware.links import Links
from tilewright.hardware.target import Target
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Collective
from tilewright.ir.types import TensorType
from tilewright.lowering.stages import Stages
from tilewright.rules.collective import STAY, collectives, sequence_parallel
from tilewright.runtime.partition import decided, parts_for
from tilewright.schedule.cost import least_us, memory_us
from tilewright.schedule.problem import AnyProblem, AttentionProblem, collectives_of

SHARED = "rows are shared out"  # how the note begins


def faster_form(
    local: Graph,
    optimise: Callable[[Graph], Graph],
    target: Target,
    links: Links,
    agreed: Callable[[str], str] = lambda said: said,
) -> Graph:
    """The program of one rank, or the same with its rows shared out between products, where that is expected to be faster.

    Args:
        local: the program of one rank, before rules.
        optimise: applies the rules.
        target: a rank's device; ranks may have other numbers of cores, or other rates.
        links: what operations between ranks take.
        agreed: gives all ranks one note of those that each would add; "" where rows stay whole.
    """
    shared = sequence_parallel(local)
    if shared is local:
        return local
    said = agreed(_why_shared(local, shared, optimise, target, links))
    return replace(shared, notes=(*shared.notes, said)) if said else local


def _why_shared(local: Graph, shared: Graph, optimise: Callable[[Graph], Graph], target: Target, links: Links) -> str:
    """The note on rows that are shared out; "" where that is not expected to be faster."""
    more_us = sum(_met_us(n, links) for n, _, _ in collectives(shared)) - sum(
        _met_us(n, links) for n, _, _ in collectives(local)
    )
    if more_us >= _elementwise_us(local, target):  # more than could ever be saved
        return ""
    whole_us, shared_us = (program_us(optimise(g), target, links) for g in (local, shared))
    if shared_us >= whole_us:
        return ""
    sums = sum(n.op.name == "all_reduce" for n, _, _ in collectives(local))
    took = f"{shared_us:,.0f} for {whole_us:,.0f} µs expected"
    return f"{SHARED} between products, in place of {counted(sums, 'all_reduce')}: {took}"


def program_us(graph: Graph, target: Target, links: Links) -> float:
    """The least time in µs of a program for one rank behind its rules, one step after the other, and nothing hidden behind
    what travels."""
    total = 0.0
    for part in parts_for(graph, target):
        if part.once:
            continue
        if decided(part):
            problem, _ = part.posed
            pieces: list[AnyProblem | Node] = [problem]
            if collectives_of(problem) and not isinstance(problem, AttentionProblem):
                pieces = [s.what for s in Stages(problem).stages]
            total += sum(_met_us(p, links) if isinstance(p, Node) else least_us(p, target) for p in pieces)
        else:
            total += sum(memory_us(_touched(n), target) for n in part.nodes)
    return total


def _met_us(node: Node, links: Links) -> float:
    op = node.op
    assert isinstance(op, Collective)
    return links.time_us(op.name, op.over, op.wire_bytes(node.src[0].tensor)) if op.meets else 0.0


def _elementwise_us(graph: Graph, target: Target) -> float:
    """The time of all operations between products, each by itself: more than they take in kernels."""
    return sum(memory_us(_touched(n), target) for n in graph.nodes() if n.src and not isinstance(n.op, STAY))


def _touched(node: Node) -> int:
    return sum(n.tensor.size_bytes for n in (node, *node.src) if isinstance(n.type, TensorType))
