"""The oracle: runs any graph node by node on torch tensors.

It is the executor of last resort and the reference every kernel is checked against, so it shares no code with a kernel.
Integer gemms are exact; float gemms are computed in float64 on request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from tilewright.errors import InputError, TilewrightError, TypeMismatchError, counted
from tilewright.ir.graph import Graph, Node, label_of, toposort
from tilewright.ir.literal import Literal
from tilewright.ir.mesh import Mesh, simulate
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import torch

    from tilewright.ir.graph import Value

_WIDE: ContextVar[bool] = ContextVar("float64_gemms", default=False)


def float64_gemms() -> bool:
    """Tell whether the evaluation under way wants float gemms accumulated in float64."""
    return _WIDE.get()


@contextlib.contextmanager
def accumulate_in_float64(enabled: bool = True) -> Generator[None]:
    """A context in which every float gemm accumulates in float64 and rounds once to its accumulator type."""
    token = _WIDE.set(enabled)
    try:
        yield
    finally:
        _WIDE.reset(token)


def evaluate(
    graph: Graph,
    feeds: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
    *,
    float64: bool = False,
    visit: Callable[[Node, Value], None] | None = None,
    device: str = "cpu",
) -> list[Value]:
    """The graph's outputs for these inputs.

    Args:
        graph: any verified graph.
        feeds: a tensor for each input, by name or in order; shapes and storage dtypes must be the declared ones. Those that
            are state may be left out: they are read where the program has them, and not written to.
        float64: accumulate float gemms in float64; within `accumulate_in_float64` they are anyway.
        visit: called with every node and its value as soon as it is known.
        device: where to compute; inputs and constants are copied there.

    Raises:
        InputError: an input is missing or of another type.
        TilewrightError: a node failed; says which.
    """
    held = dict(zip([label_of(n) for n in graph.inputs[len(graph.inputs) - len(graph.state) :]], graph.state, strict=True))
    by_name = feeds if isinstance(feeds, Mapping) else _by_order(graph, feeds)
    by_name = {**{name: t.cpu() for name, t in held.items() if name not in by_name}, **by_name}
    bound: dict[Node, Value] = {}
    for node in graph.inputs:
        name = label_of(node)
        if name not in by_name:
            raise InputError(f"no value for input {name!r}", where=graph.name, hint=f"it is {node.type}")
        bound[node] = check_value(by_name[name], node.tensor, f"input {name!r}")
    with accumulate_in_float64(float64 or float64_gemms()):
        if device == "cpu":
            return evaluate_nodes(graph.outputs, bound, visit=visit, origin=graph.origin)
        import torch

        leaves = [n for n in graph.nodes() if not n.src and n not in bound]
        bound.update(zip(leaves, evaluate_nodes(leaves, {}), strict=True))
        there = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in bound.items()}
        with torch.device(device):
            return evaluate_nodes(graph.outputs, there, visit=visit, origin=graph.origin)


def evaluate_mesh(
    graph: Graph, feeds: Sequence[Mapping[str, torch.Tensor]], mesh: Mesh, *, float64: bool = False
) -> list[list[Value]]:
    """Run a program for one rank on every rank of a mesh, all simulated in this process; the outputs, rank by rank.

    Args:
        graph: the program of each rank.
        feeds: the inputs of each rank, by name; state may be left out.
        mesh: the ranks.
        float64: accumulate float gemms in float64.

    Raises:
        InputError: there is not one feed a rank, or an input is missing or of another type.
        TilewrightError: a node failed, or ranks wait for each other for ever.
    """
    if len(feeds) != mesh.size:
        raise InputError(f"{counted(len(feeds), 'feed')} for a mesh of {mesh.size} ranks", where=graph.name)
    run = evaluator(graph.outputs, graph.inputs, graph.origin)

    def of_rank(rank: int) -> list[Value]:
        given = {**_parts_of_state(graph, mesh, rank), **feeds[rank]}
        missing = [label_of(n) for n in graph.inputs if label_of(n) not in given]
        if missing:
            raise InputError(f"no value for input {missing[0]!r}", where=f"{graph.name}, rank {rank}")
        values = [check_value(given[label_of(n)], n.tensor, f"input {label_of(n)!r}, rank {rank}") for n in graph.inputs]
        return run(values)

    with accumulate_in_float64(float64 or float64_gemms()):
        return simulate(mesh, of_rank)


def _parts_of_state(graph: Graph, mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    """A rank's part of each tensor that a program for one rank keeps, by name."""
    state = slice(len(graph.inputs) - len(graph.state), len(graph.inputs))
    kept = zip(graph.inputs[state], graph.placements[state], graph.state, strict=True) if graph.local else ()
    return {label_of(n): lies.part(t.cpu(), mesh, rank) for n, lies, t in kept}


def _by_order(graph: Graph, feeds: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    if len(feeds) not in (len(graph.inputs), len(graph.inputs) - len(graph.state)):
        raise InputError(f"{counted(len(graph.inputs), 'input')} wanted, {len(feeds)} given", where=graph.name)
    return {label_of(n): t for n, t in zip(graph.inputs, feeds, strict=False)}


def check_value(value: torch.Tensor, type: TensorType, where: str) -> torch.Tensor:
    """`value` itself, if it has the declared shape and storage type.

    Raises:
        InputError: it does not.
    """
    if type.dtype.kind == "opaque":
        return value
    if not hasattr(value, "shape"):
        raise InputError(f"a {value.__class__.__name__} given, {type} wanted", where=where)
    if tuple(value.shape) != type.shape:
        raise InputError(f"shape {list(value.shape)} given, {type} wanted", where=where)
    if value.dtype != type.dtype.to_torch():
        raise InputError(f"{value.dtype} given, {type} wanted", where=where, hint=f"pass {type.dtype.to_torch()}")
    return value


def evaluate_nodes(
    roots: Sequence[Node],
    bound: Mapping[Node, Value],
    *,
    visit: Callable[[Node, Value], None] | None = None,
    origin: Callable[[Node], str] | None = None,
) -> list[Value]:
    """The roots' values, given those of `bound` nodes. A value is dropped once its last reader has run.

    Where nothing is bound, constants that lie on a GPU are copied to the CPU, where what the program writes as numbers lies.
    """
    if not bound:
        held = ((n, getattr(n.op, "data", None)) for n in toposort(roots))
        bound = {n: data.tensor().cpu() for n, data in held if isinstance(data, Literal) and data.device != "cpu"}
    return evaluator(roots, list(bound), origin)(list(bound.values()), visit)


def evaluator(
    roots: Sequence[Node], given: Sequence[Node], origin: Callable[[Node], str] | None = None
) -> Callable[..., list[Value]]:
    """A function from the values of `given` nodes (and maybe a `visit`) to those of the roots: what to run in which order, and
    what to drop when, is found out once."""
    order = toposort(roots, frozenset(given))
    slot = {n: i for i, n in enumerate(dict.fromkeys((*given, *order)))}
    last = {slot[s]: i for i, node in enumerate(order) for s in node.src}
    kept = {slot[n] for n in (*roots, *given)}
    dead: list[list[int]] = [[] for _ in order]
    for at, i in last.items():
        if at not in kept:
            dead[i].append(at)
    program = [(n, n.op.evaluate, [slot[s] for s in n.src], slot[n], d) for n, d in zip(order, dead, strict=True)]
    results, blank = [slot[r] for r in roots], [None] * (len(slot) - len(given))

    def run(values: Sequence[Value], visit: Callable[[Node, Value], None] | None = None) -> list[Value]:
        at: list[Value] = [*values, *blank]
        for node, step, src, to, dead in program:
            try:
                value = step(node, [at[s] for s in src])  # type: ignore[misc]
            except TilewrightError:
                raise
            except Exception as error:
                raise TypeMismatchError(
                    f"{node.op.name} -> {node.type} cannot be evaluated: {(str(error).splitlines() or [repr(error)])[0]}",
                    where=origin(node) if origin else node.op.name,
                ) from error
            at[to] = value
            if visit is not None:
                visit(node, value)
            del value
            for s in dead:
                at[s] = None
        return [at[r] for r in results]

    return run
