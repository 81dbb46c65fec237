"""Fusions that no kernel takes whole, cut so that what can be generated is, and the rest alone is left to torch.

Nodes join the fusion of what they read as long as a generator takes that; else they begin another. No cycle arises, as a node
joins the last of the fusions that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.hardware.target import Target
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import VIEWS, Const, Write
from tilewright.runtime.partition import Part, decided, part_of, partition, problem_of_part, readers_of
from tilewright.schedule.candidate import LAST_RESORT, discover, refusal
from tilewright.schedule.problem import FusionProblem

Taken = Callable[[FusionProblem], bool]
MOST_NODES = 200  # of a fusion that is cut: each is asked for


def parts_for(graph: Graph, target: Target) -> list[Part]:
    """The graph's parts, those that no candidate of a target takes whole cut; in an order in which they can run."""
    able = [c for c in discover() if "fusion" in c.kinds and target.kind in c.devices and c.preference < LAST_RESORT]

    def taken(problem: FusionProblem) -> bool:
        return any(refusal(c, problem, target) is None for c in able)

    readers = readers_of(graph)
    return [p for part in partition(graph) for p in (cut(part, readers, taken) if able else [part])]


def cut(part: Part, readers: Mapping[Node, set[Node | None]], taken: Taken) -> list[Part]:
    """A part's pieces in an order in which they can run; itself where some kernel takes it whole, or none takes a piece.

    Args:
        part: what is cut, if it is a fusion.
        readers: of each node of the graph; None for a result.
        taken: whether a kernel is generated for a problem.
    """
    if not _may_be_cut(part) or _taken(part, taken):
        return [part]
    groups = _grown(part.nodes, readers, taken)
    parts = [part_of(g, readers, False) for g in groups]
    work = [[n for n in p.nodes if not isinstance(n.op, (*VIEWS, Const))] for p in parts]
    left = sum(len(w) for p, w in zip(parts, work, strict=True) if not _taken(p, taken))
    whole = sum(map(len, work))
    return parts if left < whole and len(parts) <= whole else [part]


def _may_be_cut(part: Part) -> bool:
    if part.once or not decided(part) or not 1 < len(part.nodes) <= MOST_NODES:
        return False
    problem, _ = problem_of_part(part)
    alone = any(isinstance(n.op, Write) for n in part.nodes)
    return isinstance(problem, FusionProblem) and not problem.only_views and not alone


def _taken(part: Part, taken: Taken) -> bool:
    problem, _ = problem_of_part(part)
    return isinstance(problem, FusionProblem) and taken(problem)


def _grown(nodes: Sequence[Node], readers: Mapping[Node, set[Node | None]], taken: Taken) -> list[list[Node]]:
    """Nodes, sources first, in groups of which each reads those before it."""
    groups: list[list[Node]] = []
    at: dict[Node, int] = {}
    seen: set[Node] = set()
    mine = set(nodes)
    waiting: set[Node] = set()  # views of what comes from outside: they go with what reads them first

    def ahead(n: Node) -> list[Node]:
        return [m for s in n.src if s in waiting for m in (*ahead(s), s)]

    def seen_alone() -> dict[Node, set[Node | None]]:
        """Readers among what has been seen, so that what is read later is no result yet."""
        return {m: {r for r in readers[m] if r not in mine or r in seen} for m in seen}

    for n in nodes:
        inside = [at[s] for s in n.src if s in at]
        if isinstance(n.op, VIEWS) and not inside and all(s in waiting or s not in mine for s in n.src):
            waiting.add(n)
            seen.add(n)
            continue
        seen.add(n)
        new = [*dict.fromkeys(ahead(n)), n]
        place = max(inside) if inside else len(groups) - 1
        joins = place >= 0 and (isinstance(n.op, VIEWS) or _taken(part_of([*groups[place], *new], seen_alone(), False), taken))
        if not joins:
            groups.append([])
            place = len(groups) - 1
        groups[place] += new
        at.update(dict.fromkeys(new, place))
        waiting.difference_update(new)
    if waiting:
        groups.append([n for n in nodes if n in waiting])
    return groups
