"""Comparing a program read by Tilewright with the same program run eagerly by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from tilewright.dtype import from_torch
from tilewright.frontends import LoadOptions
from tilewright.frontends import torch as frontend
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import Call
from tilewright.ir.verify import verify


class Of(torch.nn.Module):
    """A function as a module."""

    def __init__(self, f: Callable[..., object]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: torch.Tensor) -> object:
        return self.f(*args)


def read(program: Callable[..., object], *args: object, **options: object) -> Graph:
    """The graph of a module or function traced with these inputs."""
    module = program if isinstance(program, torch.nn.Module) else Of(program)
    return verify(frontend.load(module, LoadOptions(example_inputs=args, **options)))


def close(given: torch.Tensor, wanted: torch.Tensor, *, ulps: float, depth: float = 0.0) -> None:
    """Equal types; equal integers; floats within `ulps` of their own rounding step, plus `depth` steps of the largest value.

    `depth` is for sums: their error is relative to the terms, not to the result.
    """
    assert given.dtype == wanted.dtype
    assert given.shape == wanted.shape
    if not wanted.dtype.is_floating_point:
        assert torch.equal(given, wanted)
        return
    a, b = given.to(torch.float64), wanted.to(torch.float64)
    finite = torch.isfinite(b)
    assert torch.equal(torch.isnan(a), torch.isnan(b))
    assert torch.equal(a[torch.isinf(b)], b[torch.isinf(b)])
    if not finite.any():
        return
    a, b = a[finite], b[finite]
    step = from_torch(wanted.dtype).epsilon
    tiny = torch.finfo(wanted.dtype).smallest_normal * step
    bound = ulps * step * b.abs() + depth * step * b.abs().max() + ulps * tiny
    worst = ((a - b).abs() - bound).argmax()
    assert ((a - b).abs() <= bound).all(), f"{a[worst]} read, {b[worst]} by torch, bound {bound[worst]}"


def agree(
    program: Callable[..., object], *args: torch.Tensor, ulps: float = 2.0, depth: float = 0.0, calls: Sequence[str] = ()
) -> Graph:
    """Read, evaluate and compare with torch; only the operators named in `calls` may be left to torch."""
    graph = read(program, *args)
    found = {n.op.target for n in graph.nodes() if isinstance(n.op, Call)}
    assert sorted(found) == sorted(calls)
    compare(graph, program, args, ulps=ulps, depth=depth)
    return graph


def compare(
    graph: Graph,
    program: Callable[..., object],
    args: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    *,
    ulps: float,
    depth: float,
) -> None:
    """The graph's results on these inputs against torch's."""
    with torch.no_grad():
        wanted = program(**args) if isinstance(args, Mapping) else program(*args)
        given = evaluate(graph, args)
    leaves = [t for t in pytree.tree_leaves(wanted) if isinstance(t, torch.Tensor)]
    assert len(leaves) == len(given) == len(graph.output_names)
    for a, b in zip(given, leaves, strict=True):
        assert isinstance(a, torch.Tensor)
        close(a, b, ulps=ulps, depth=depth)


Case = tuple[Callable[..., object], tuple[torch.Tensor, ...]]


class Cases(torch.nn.Module):
    """Many small programs in one, so that they are traced once."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        super().__init__()
        self.cases = cases

    def forward(self, inputs: dict[str, tuple[torch.Tensor, ...]]) -> dict[str, list[torch.Tensor]]:
        return {name: pytree.tree_leaves(f(*inputs[name])) for name, (f, _) in self.cases.items()}


class Together:
    """The graph of many cases, and each one's nodes and results."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        inputs = {name: args for name, (_, args) in cases.items()}
        self._cases = cases
        self.graph = read(Cases(cases), inputs)
        self._nodes: dict[str, list[Node]] = {name: [] for name in cases}
        self._results: dict[str, list[torch.Tensor]] = {name: [] for name in cases}
        given = evaluate(self.graph, pytree.tree_leaves(inputs))
        for label, node, value in zip(self.graph.output_names, self.graph.outputs, given, strict=True):
            name = label.rsplit(".", 1)[0]
            self._nodes[name].append(node)
            self._results[name].append(value)

    def nodes(self, name: str) -> list[Node]:
        """The nodes of one case."""
        return toposort(self._nodes[name])

    def calls(self, name: str) -> list[str]:
        """The operators of one case that were left to torch."""
        return [n.op.target for n in self.nodes(name) if isinstance(n.op, Call)]

    def agree(self, name: str, *, ulps: float, depth: float = 0.0, against: Case | None = None) -> None:
        """One case's results against torch's, or against another program's."""
        f, args = against or self._cases[name]
        wanted = pytree.tree_leaves(f(*args))
        given = self._results[name]
        assert len(given) == len(wanted)
        for a, b in zip(given, wanted, strict=True):
            close(a, b, ulps=ulps, depth=depth)
