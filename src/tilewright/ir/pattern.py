"""Rewrite rules: what to look for (`Pat`), what to do (`@rule`), and the driver that applies them and keeps them honest.

A rule sees a match and returns a node that means the same, or None. It never follows uses, substitutes or counts readers
by itself: `Match.users` and the driver do. A rule that recognised the place but had to leave it says so with
`Match.refuse(sentence)`; reports show these near misses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tilewright.discovery import modules
from tilewright.errors import RewriteError, TilewrightError
from tilewright.ir.graph import Graph, Node, Op, Users, toposort

MAX_SWEEPS = 100
MAX_DEPTH = 200


@dataclass(frozen=True)
class Pat:
    """A pattern over one node and, if `src` is given, its sources.

    Attributes:
        op: operation class or classes; None matches any.
        src: patterns of the sources, one each; None leaves them open. A shorter tuple ending in `...` leaves the rest open.
        name: capture the node; the same name twice must be the same node.
        where: further condition on the node.
    """

    op: type[Op] | tuple[type[Op], ...] | None = None
    src: tuple[Pat | object, ...] | None = None
    name: str | None = None
    where: Callable[[Node], bool] | None = None

    def match(self, node: Node, captured: dict[str, Node]) -> bool:
        """Whether `node` fits; fills `captured`."""
        if self.op is not None and not isinstance(node.op, self.op):
            return False
        if self.where is not None and not self.where(node):
            return False
        if self.src is not None:
            wanted = self.src
            if wanted and wanted[-1] is ...:
                wanted = wanted[:-1]
                if len(node.src) < len(wanted):
                    return False
            elif len(wanted) != len(node.src):
                return False
            for pattern, source in zip(wanted, node.src, strict=False):
                if not isinstance(pattern, Pat):
                    raise TypeError("`...` may only stand last in a pattern's sources")
                if not pattern.match(source, captured):
                    return False
        return self.name is None or captured.setdefault(self.name, node) is node


class Match:
    """What a rule is given: the node, the captured nodes by name, and who reads what."""

    def __init__(self, node: Node, captured: dict[str, Node], users: Users) -> None:
        self.node = node
        self.users = users
        self.refusal: str | None = None
        self._captured = captured

    def __getitem__(self, name: str) -> Node:
        return self._captured[name]

    def refuse(self, why: str) -> None:
        """Leave the node as it is and record, in a sentence, what stopped the rule."""
        self.refusal = why


@dataclass(frozen=True)
class Rule:
    """A named rewrite. `name` reads as a sentence; `doc` is `before -> after`, where it holds, whether it is exact."""

    name: str
    stage: str
    pattern: Pat
    apply: Callable[[Match], Node | None]
    doc: str


def rule(pattern: Pat, *, stage: str) -> Callable[[Callable[[Match], Node | None]], Rule]:
    """Make a function a rule. The driver applies the rules of one stage together, in no promised order."""

    def decorate(f: Callable[[Match], Node | None]) -> Rule:
        return Rule(f.__name__, stage, pattern, f, f.__doc__ or "")

    return decorate


@dataclass(frozen=True)
class Pass:
    """A rewrite that must see several nodes at once. As rare as possible; a pattern is easier to read and to trust."""

    name: str
    stage: str
    apply: Callable[[Graph, Trace], Graph]
    doc: str


def graph_pass(*, stage: str) -> Callable[[Callable[[Graph, Trace], Graph]], Pass]:
    """Make a function over the whole graph a pass. It runs after the rules of its stage have settled."""

    def decorate(f: Callable[[Graph, Trace], Graph]) -> Pass:
        return Pass(f.__name__, stage, f, f.__doc__ or "")

    return decorate


R = TypeVar("R", Rule, Pass)


def discover(package: str, kind: type[R], extra: Iterable[Path] = ()) -> list[R]:
    """Every `Rule` (or `Pass`) defined in the modules of `package`, by file name; `extra` folders are searched too."""
    found = {v.name: v for module in modules(package, extra) for v in vars(module).values() if isinstance(v, kind)}
    return [found[name] for name in sorted(found)]


@dataclass(frozen=True)
class Step:
    """One rewrite that happened: `rule` turned `before` into `after`."""

    rule: str
    stage: str
    before: Node
    after: Node


@dataclass(frozen=True)
class NearMiss:
    """A rule that recognised `node` and left it, and why; `where` is what the source called the node."""

    rule: str
    node: Node
    why: str
    where: str


@dataclass
class Trace:
    """What rewrites did. Near misses are those of each rewrite's last sweep: what stood unfolded when it settled, and why."""

    steps: list[Step] = field(default_factory=list[Step])
    near_misses: list[NearMiss] = field(default_factory=list[NearMiss])
    sweeps: int = 0


def rewrite(graph: Graph, rules: Sequence[Rule], trace: Trace | None = None) -> Graph:
    """Apply `rules` everywhere, sources first, until none fires. Origins go over to the nodes that replace theirs.

    Each rewrite is checked to keep the node's type. Cost is linear in the graph for rules that look a bounded distance.

    Raises:
        RewriteError: a rule changed a type, failed, or the rules do not converge; names the rule.
    """
    trace = trace if trace is not None else Trace()
    driver = _Driver(graph, rules, trace)
    outputs: Sequence[Node] = graph.outputs
    earlier = len(trace.near_misses)
    for _ in range(MAX_SWEEPS):
        trace.sweeps += 1
        del trace.near_misses[earlier:]
        done = len(trace.steps)
        outputs = driver.sweep(outputs)
        if len(trace.steps) == done:
            return graph.with_outputs(outputs, {n: o for n, o in driver.origins.items() if n in driver.alive})
    raise RewriteError(
        f"rules still fire after {MAX_SWEEPS} sweeps: {', '.join(s.rule for s in trace.steps[-6:])}",
        where=graph.name,
        hint="one of them undoes another",
    )


class _Driver:
    def __init__(self, graph: Graph, rules: Sequence[Rule], trace: Trace) -> None:
        self.graph = graph
        self.trace = trace
        self.origins = dict(graph.origins)
        self.alive: set[Node] = set()
        self._rules = rules
        self._by_op: dict[type[Op], list[Rule]] = {}
        self._users = Users(())

    def sweep(self, outputs: Sequence[Node]) -> list[Node]:
        self._users = Users(outputs)
        memo: dict[Node, Node] = {}
        for node in toposort(outputs):
            rebuilt = node.with_src([memo[s] for s in node.src])
            self._replace(node, rebuilt)
            memo[node] = self._settle(rebuilt, 0)
        result = [memo[o] for o in outputs]
        self.alive = set(toposort(result))
        return result

    def _settle(self, node: Node, depth: int) -> Node:
        """The node that stands for `node` once no rule fires on it; its sources are settled already."""
        if depth > MAX_DEPTH:
            last = ", ".join(s.rule for s in self.trace.steps[-6:])
            raise RewriteError(f"rules do not converge at one node: {last}", where=self._where(node))
        after = self._fire(node)
        if after is None:
            return node
        local: dict[Node, Node] = {}
        for fresh in self._replace(node, after):
            rebuilt = fresh.with_src([local.get(s, s) for s in fresh.src])
            self._replace(fresh, rebuilt)
            local[fresh] = self._settle(rebuilt, depth + 1)
        return local.get(after, after)

    def _replace(self, old: Node, new: Node) -> list[Node]:
        if old is not new and old in self.origins:
            self.origins.setdefault(new, self.origins[old])
        return self._users.replace(old, new)

    def _where(self, node: Node) -> str:
        """What the source called the node, or the node it replaces."""
        return self.origins.get(node, node.op.name)

    def _fire(self, node: Node) -> Node | None:
        kind = type(node.op)
        rules = self._by_op.get(kind)
        if rules is None:
            rules = [r for r in self._rules if r.pattern.op is None or issubclass(kind, r.pattern.op)]
            self._by_op[kind] = rules
        for r in rules:
            captured: dict[str, Node] = {}
            if not r.pattern.match(node, captured):
                continue
            m = Match(node, captured, self._users)
            try:
                after = r.apply(m)
            except TilewrightError as error:
                raise RewriteError(f"rule {r.name} failed: {error.what}", where=self._where(node)) from error
            if after is None:
                if m.refusal is not None:
                    self.trace.near_misses.append(NearMiss(r.name, node, m.refusal, self._where(node)))
                continue
            if after is node:
                continue
            if after.type != node.type:
                raise RewriteError(f"rule {r.name} changes the type: {node.type} -> {after.type}", where=self._where(node))
            self.trace.steps.append(Step(r.name, r.stage, node, after))
            return after
        return None
