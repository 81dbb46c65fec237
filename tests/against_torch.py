"""Comparing a program read by Tilewright with the same program run eagerly by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from tilewright.dtype import from_torch
from tilewright.frontends import LoadOptions, load
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph


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
    return load(module, LoadOptions(example_inputs=args, **options))


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
    found = [getattr(n.op, "target", "") for n in graph.nodes() if n.op.name == "call"]
    assert sorted(set(found)) == sorted(calls)
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
