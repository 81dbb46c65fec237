"""Calls that run graphs as the data says, loops and conditionals, with programs compiled of those graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from tilewright.ir.ops import Call, Item
from tilewright.runtime.arrays import separate
from tilewright.runtime.partition import Part

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from tilewright.ir.graph import Graph, Node, Value
    from tilewright.runtime.executable import Executable

Runner = Callable[["Sequence[Value]"], "Sequence[Value]"]
Inner = Callable[["Graph"], "Executable"]
"""Compiles the graph of a region for the device of the program around it."""


def graphs_of(op: Call) -> Sequence[Graph]:
    """Graphs of the regions that a call runs as the data says; of most calls none."""
    regions = getattr(op.reader(), "regions", None)
    return regions(op) if regions is not None else ()


def with_regions(part: Part, inner: Inner) -> tuple[Runner, tuple[Executable, ...]] | None:
    """Runner of a call, and the programs of its regions; None for a call that has none."""
    calls = [n for n in part.nodes if isinstance(n.op, Call)]
    if len(calls) != 1 or not all(n is calls[0] or _result_of(n, calls[0]) for n in part.outputs):
        return None
    op, sources = cast("Call", calls[0].op), calls[0].src
    graphs = graphs_of(op)
    if not graphs:
        return None
    library = cast("ModuleType", op.reader())
    programs = tuple(inner(g) for g in graphs)
    order = [part.inputs.index(s) for s in sources]
    picked = [n.op.index if isinstance(n.op, Item) else 0 for n in part.outputs]
    constants = frozenset[int]().union(*(p.constant_memory for p in programs))  # which a result must not be

    def run(values: Sequence[Value]) -> Sequence[Value]:
        given = [cast("torch.Tensor", values[i]) for i in order]
        results = separate(library.run_regions(op, given, [p.run for p in programs]), (), constants)
        return [results[i] for i in picked]

    return run, programs


def _result_of(node: Node, call: Node) -> bool:
    return isinstance(node.op, Item) and node.src[0] is call
