"""Questions that every test of the rules asks: do the results agree, did the work grow, does the order of the rules matter."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from tilewright.compiler import CANONICAL, STAGES
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import Attention, Gemm, Input, Param
from tilewright.ir.pattern import Pass, Rule, Trace, discover, rewrite
from tilewright.ir.verify import verify
from tilewright.runtime.partition import Part, partition
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_tensor


def graph_of(*outputs: Node) -> Graph:
    """The program that computes `outputs` from every input they read, in the order in which they are read."""
    inputs = tuple(n for n in toposort(outputs) if isinstance(n.op, Input))
    return Graph("g", inputs, outputs, tuple(f"out{i}" for i in range(len(outputs))))


def staged(graph: Graph, *stages: str, shuffle: int | None = None, trace: Trace | None = None) -> Graph:
    """The graph after these stages (all of them if none is named), the rules and passes of each in an order that `shuffle`
    seeds."""
    trace = trace if trace is not None else Trace()
    dice = random.Random(shuffle)
    rules, passes = discover("tilewright.rules", Rule), discover("tilewright.rules", Pass)
    for stage in stages or STAGES:
        chosen = [r for r in rules if r.stage in (stage, CANONICAL)]
        after = [p for p in passes if p.stage == stage]
        if shuffle is not None:
            dice.shuffle(chosen)
            dice.shuffle(after)
        graph = rewrite(graph, chosen, trace)
        for p in after:
            graph = p.apply(graph, trace)
        verify(graph)
    return graph


def fired(graph: Graph, rule: str, *stages: str) -> int:
    """Count how often `rule` fires on the graph."""
    trace = Trace()
    staged(graph, *stages, trace=trace)
    return sum(s.rule == rule for s in trace.steps)


def refusals(graph: Graph, rule: str, *stages: str) -> list[str]:
    """The sentences with which `rule` left places as they are."""
    trace = Trace()
    staged(graph, *stages, trace=trace)
    return [n.why for n in trace.near_misses if n.rule == rule]


def feeds_of(graph: Graph, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs: integers over their full range, floats normal."""
    generator = torch.Generator().manual_seed(seed)
    return {n.op.label: random_tensor(n.tensor, generator) for n in graph.inputs}


def results(graph: Graph, feeds: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The oracle's results, float sums taken in float64: their order then does not show."""
    return evaluate(graph, feeds_of(graph) if feeds is None else feeds, float64=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Every value equal, zeros by sign too, NaN to NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return bool((a == b).all()) if a.dtype not in (torch.uint16, torch.uint32, torch.uint64) else _equal_bytes(a, b)
    x, y = a.to(torch.float64), b.to(torch.float64)
    return bool(((x == y) & (torch.signbit(x) == torch.signbit(y)) | x.isnan() & y.isnan()).all())


def _equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_exact(before: Graph, after: Graph, seed: int = 0) -> None:
    feeds = feeds_of(before, seed)
    for name, a, b in zip(before.output_names, results(before, feeds), results(after, feeds), strict=True):
        assert same_bits(a, b), f"{name}: {a.flatten()[:8].tolist()} became {b.flatten()[:8].tolist()}"


def assert_close(before: Graph, after: Graph, rtol: float, seed: int = 0) -> None:
    """Each result within `rtol` of the largest magnitude of its kind."""
    feeds = feeds_of(before, seed)
    for name, a, b in zip(before.output_names, results(before, feeds), results(after, feeds), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        x, y = a.double(), b.double()
        assert torch.equal(x.isnan(), y.isnan()), f"{name}: NaN elsewhere"
        scale = x.abs().nan_to_num(0, 0, 0).max() if x.numel() else 0
        error = (x - y).abs().nan_to_num(0).max() if x.numel() else 0
        assert error <= rtol * scale, f"{name}: off by {error:.3g} of {scale:.3g}"


def gemms(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes() if isinstance(n.op, Gemm)]


def arithmetic(graph: Graph) -> int:
    """Operations of all products: 2 M N K each."""
    return sum(problem_of(n).ops for n in graph.nodes() if isinstance(n.op, (Gemm, Attention)))


def steps(graph: Graph) -> list[Part]:
    """Steps that run at every call and are more than another look at the same data."""
    return [p for p in partition(graph) if not p.once and p.kind != "view"]


def kinds(graph: Graph) -> list[str]:
    return [p.kind for p in steps(graph)]


def traffic(graph: Graph) -> int:
    """Bytes that the steps read and write at every call, each value once a step; of an operand only what its views leave."""
    return sum(_read_bytes(p) + sum(o.tensor.size_bytes for o in p.outputs) for p in steps(graph))


def _read_bytes(part: Part) -> int:
    node = part.nodes[0]
    if isinstance(node.op, (Gemm, Attention)):
        roots = [r for group in node.op.regions().values() for r in group]
        return sum(_seen(roots, i, s) for i, s in enumerate(node.src))
    return sum(_through(part.nodes, n) for n in part.inputs)


def _seen(roots: Sequence[Node], index: int, source: Node) -> int:
    inner = toposort(roots)
    params = [n for n in inner if isinstance(n.op, Param) and n.op.index == index]
    return _through(inner, params[0]) if params else source.tensor.size_bytes


def _through(nodes: Sequence[Node], value: Node) -> int:
    readers = [n for n in nodes if value in n.src]
    whole = value.tensor.size_bytes
    if readers and all(n.op.name in ("slice", "reshape", "transpose", "broadcast") for n in readers):
        return min(whole, sum(_through(nodes, n) for n in readers))
    return whole


def assert_no_growth(before: Graph, after: Graph, *, bytes_too: bool = True) -> None:
    assert arithmetic(after) <= arithmetic(before), f"{arithmetic(before)} operations became {arithmetic(after)}"
    assert len(steps(after)) <= len(steps(before)), f"{kinds(before)} became {kinds(after)}"
    if bytes_too:
        assert traffic(after) <= traffic(before), f"{traffic(before)} bytes became {traffic(after)}"


def assert_order_is_free(graph: Graph, *stages: str, orders: int = 12) -> Graph:
    """The one graph that every order of the rules within their stages gives."""
    first = staged(graph, *stages)
    for seed in range(orders):
        assert staged(graph, *stages, shuffle=seed).outputs == first.outputs, f"order {seed} gives another graph"
    return first
