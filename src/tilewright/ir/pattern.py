"""Rewrite rules: what to look for (`Pat`), what to do (`@rule`), and the driver that applies them and keeps them honest.

A rule sees a match and returns a node that means the same, or None. It never follows uses, substitutes or counts readers
by itself: `Match.users` and the driver do. A rule that recognised the place but had to leave it says so with
`Match.refuse(sentence)`; reports show these near misses. What a rule of another package refuses no rule folds (`Trace.held`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tilewright import deadline, plug_ins
from tilewright.discovery import modules
from tilewright.errors import RewriteError, TilewrightError, say
from tilewright.ir.dims import asking
from tilewright.ir.expression import ELEMENTWISE, REARRANGE
from tilewright.ir.graph import Graph, Node, Op, Users, toposort
from tilewright.ir.ops import Call, Concat, Pad, Slice
from tilewright.ir.types import TensorType

# Rewrites at one place, or sweeps, before rules are taken to fire for ever: far more than any that settle need.
FREE_STEPS = 1000
STEPS_A_NODE = 10
HELD = (*ELEMENTWISE, *REARRANGE, Slice, Concat, Pad)  # what a product could fold, and a refusal of a plug-in keeps out of it


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
        """Tell whether `node` fits; fills `captured`.

        Raises:
            TypeError: `...` stands elsewhere than last in the sources.
        """
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
    """A place where a pattern matched, as a rule is given it: the node, the captured nodes by name, and who reads what."""

    def __init__(self, node: Node, captured: dict[str, Node], users: Users) -> None:
        self.node = node
        self.users = users
        self.refusal: str | None = None
        self._captured = captured

    def __getitem__(self, name: str) -> Node:
        return self._captured[name]

    def read_outside(self, inside: Iterable[Node]) -> Node | None:
        """A node of `inside` that something other than `inside` and the matched node reads; None if there is none.

        A rule that replaces the matched node by one that does the work of all `inside` must find none: what is read outside
        would stay, and its work be done twice. `inside` are nodes that the matched node is computed from.
        """
        within = dict.fromkeys(inside)
        for node in within:
            if any(reader is not self.node and reader not in within for reader in self.users[node]):
                return node
        return None

    def refuse(self, why: str) -> None:
        """Leave the node as it is and record, in a sentence, what stopped the rule.

        A rule of ours speaks for itself, and another may fold the node. A refusal by a rule of another package holds for all
        rules and for all later stages, where the node is one of `HELD`.
        """
        self.refusal = why


@dataclass(frozen=True)
class Rule:
    """A named rewrite. `name` reads as a sentence; `doc` is `before -> after`, where it holds, whether it is exact. `package`
    is that of a plug-in, "" of ours."""

    name: str
    stage: str
    pattern: Pat
    apply: Callable[[Match], Node | None]
    doc: str
    package: str = ""


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
    package: str = ""


def graph_pass(*, stage: str) -> Callable[[Callable[[Graph, Trace], Graph]], Pass]:
    """Make a function over the whole graph a pass. It runs after the rules of its stage have settled."""

    def decorate(f: Callable[[Graph, Trace], Graph]) -> Pass:
        return Pass(f.__name__, stage, f, f.__doc__ or "")

    return decorate


R = TypeVar("R", Rule, Pass)


def discover(package: str, kind: type[R], extra: Iterable[Path] = ()) -> list[R]:
    """Every `Rule` (or `Pass`) defined in the modules of `package`, by name; `extra` folders are searched, too, and so are
    other packages, by entry points of a group of that name. Those of other packages come first, so that they meet what ours
    would rewrite; one whose name is taken is left out.

    Raises:
        RewriteError: two have the same name.
    """
    found: dict[str, R] = {}
    for module in modules(package, extra):
        for v in vars(module).values():
            if isinstance(v, kind) and found.setdefault(v.name, v) is not v:
                raise RewriteError(f"two rules are named {v.name}", where=module.__name__, hint="a report names a rule")
    seen = {id(v) for v in found.values()}
    for v, plug_in in plug_ins.loaded(package, (Rule, Pass)):
        if not isinstance(v, kind) or id(v) in seen or v.name in _left_out:  # one that a module imports from another; broken
            continue
        seen.add(id(v))
        if found.setdefault(v.name, v) is v:
            found[v.name] = replace(v, package=plug_in.package)
        else:
            plug_in.leave_out(f"two rules are named {v.name}")
    return sorted(found.values(), key=lambda r: (not r.package, r.name))


_left_out: set[str] = set()  # names of rules of other packages that are broken


def without_broken(rules: Sequence[R], error: RewriteError) -> list[R]:
    """The rules but for those of other packages by which an error may have come about, which this process uses no more; a
    warning names them.

    Raises:
        RewriteError: the same, as none of the rules that it names is another package's.
    """
    broken = [r for r in rules if r.package and r.name in error.rules]
    if not broken:
        raise error
    for r in broken:
        say(f"plug-in {r.package}: the rule {r.name} is left out: {error.what}")
        _left_out.add(r.name)
    return [r for r in rules if r not in broken]


@dataclass(frozen=True)
class Step:
    """One rewrite that happened: `rule` turned `before` into `after`."""

    rule: str
    stage: str
    before: Node
    after: Node


@dataclass(frozen=True)
class NearMiss:
    """A rule that recognised `node` and left it, and why; `where` is what the source called the node. `held`: no rule may
    fold it any more."""

    rule: str
    node: Node
    why: str
    where: str
    held: bool = False


@dataclass
class Trace:
    """A record of rewrites. Near misses are those of each rewrite's last sweep: what stood unfolded when it settled, and why;
    and those of nodes that are held.

    Notes are on time that was over. `held` has the operations that rules of other packages refused, by the opaque calls that
    stand for them in the graph while rules and passes run, so that none sees into them (`released`).
    """

    steps: list[Step] = field(default_factory=list[Step])
    near_misses: list[NearMiss] = field(default_factory=list[NearMiss])
    sweeps: int = 0
    notes: list[str] = field(default_factory=list[str])
    held: dict[Op, Op] = field(default_factory=dict[Op, Op])

    def hold(self, node: Node) -> Node:
        """The opaque call that stands for a node of `HELD`."""
        assert isinstance(node.type, TensorType)
        call = Call("", node.op.name, repr(node.op), (node.type,))
        self.held[call] = node.op
        return Node(call, *node.src)


def released(graph: Graph, trace: Trace) -> Graph:
    """The graph with the operations that a trace holds in the place of the calls that stand for them."""
    if not trace.held:
        return graph
    pattern = Pat(Call, where=lambda n: n.op in trace.held)
    return rewrite(graph, [Rule("release", "", pattern, lambda m: Node(trace.held[m.node.op], *m.node.src), "")])


def over(trace: Trace, rule: str) -> None:
    """Note that the time for rules was over in, or before, one of them."""
    if not trace.notes:
        trace.notes.append(f"the time for rules was over at {rule.replace('_', ' ')}: what follows is compiled as it stood")


def rewrite(graph: Graph, rules: Sequence[Rule], trace: Trace | None = None, *, until: deadline.End = deadline.NEVER) -> Graph:
    """Apply `rules` everywhere, sources first, until none fires. Origins go over to the nodes that replace theirs.

    Each rewrite is checked to keep the node's type. A sweep is linear in the graph for rules that look a bounded distance; a
    rule that waits for another to fire further on costs another sweep. A rule gives the same answer for the same match and
    readers: a graph that comes back after a sweep will come back for ever.

    Once `until` has passed, also within a rule, none is applied any more; the graph stays valid, and the
    trace says so.

    A rule of another package that does what raises an error is left out, with a warning, and the graph rewritten without it.
    What such a rule refuses stands in the graph as an opaque call, until it is `released`.

    Raises:
        RewriteError: a rule changed a type, failed, or the rules do not converge; names the rule.
    """
    trace = trace if trace is not None else Trace()
    before = len(trace.steps), len(trace.near_misses), len(trace.notes)
    while True:
        try:
            return _rewritten(graph, rules, trace, until)
        except RewriteError as error:
            rules = without_broken(rules, error)
        for said, count in zip((trace.steps, trace.near_misses, trace.notes), before, strict=True):
            del said[count:]


def _rewritten(graph: Graph, rules: Sequence[Rule], trace: Trace, until: deadline.End) -> Graph:
    driver = _Driver(graph, rules, trace, until)
    outputs = list(graph.outputs)
    seen: dict[tuple[Node, ...], int] = {}
    earlier = len(trace.near_misses)
    while True:
        trace.sweeps += 1
        trace.near_misses[earlier:] = [m for m in trace.near_misses[earlier:] if m.held]
        done = len(trace.steps)
        seen[tuple(outputs)] = done
        outputs = driver.sweep(outputs)
        if len(trace.steps) == done:
            alive = set(toposort((*outputs, *graph.inputs)))
            return graph.with_outputs(outputs, {n: o for n, o in driver.origins.items() if n in alive})
        since = seen.get(tuple(outputs))
        if since is not None:
            raise _endless(trace, since, graph.name)
        if len(seen) > driver.limit:
            raise _endless(trace, done, graph.name)


def _endless(trace: Trace, since: int, where: str) -> RewriteError:
    """Rules that will not stop firing, named by the steps from number `since` on."""
    names = tuple(dict.fromkeys(s.rule for s in trace.steps[since:][-50:]))
    what = f"rules do not converge: {', '.join(names)}"
    return RewriteError(what, where=where, hint="one of them undoes another", rules=names)


class _Driver:
    def __init__(self, graph: Graph, rules: Sequence[Rule], trace: Trace, until: deadline.End) -> None:
        self.trace = trace
        self._until = until
        self.origins = dict(graph.origins)
        self.limit = FREE_STEPS
        self._rules = rules
        self._by_op: dict[type[Op], list[Rule]] = {}

    def sweep(self, outputs: Sequence[Node]) -> list[Node]:
        """Each place in its turn: rules fire there until none does, at what they put below it first."""
        program = Rewriting(outputs, self.origins)
        self.limit = max(self.limit, FREE_STEPS + STEPS_A_NODE * len(program))
        for first in program:
            before = len(self.trace.steps)
            turns = [first]
            while turns:
                place = turns.pop()
                node = program.arrive(place)
                after = self._fire(node, place.origin, program)
                if after is None:
                    program.settle(place)
                else:
                    turns.extend(reversed(program.replace(place, after)))
                    if len(self.trace.steps) - before > self.limit:
                        raise _endless(self.trace, before, place.origin or node.op.name)
                if place.origin is not None and place.settled is not None:
                    self.origins.setdefault(place.settled, place.origin)
        return program.results()

    def _fire(self, node: Node, origin: str | None, users: Users) -> Node | None:
        kind, where = type(node.op), origin or node.op.name
        rules = self._by_op.get(kind)
        if rules is None:
            rules = [r for r in self._rules if r.pattern.op is None or issubclass(kind, r.pattern.op)]
            self._by_op[kind] = rules
        for r in rules:
            captured: dict[str, Node] = {}
            if not r.pattern.match(node, captured):
                continue
            if self._until.passed():
                over(self.trace, r.name)
                return None
            m = Match(node, captured, users)
            asking(f"the rule {r.name}")
            try:
                with deadline.until(self._until):
                    after = r.apply(m)
            except deadline.OverrunError:
                over(self.trace, r.name)
                return None
            except Exception as error:
                what = error.what if isinstance(error, TilewrightError) else f"{type(error).__name__}: {error}"
                raise RewriteError(f"rule {r.name} failed: {what}", where=where, rules=(r.name,)) from error
            if after is None:
                if m.refusal is not None:
                    held = bool(r.package) and isinstance(node.op, HELD)
                    self.trace.near_misses.append(NearMiss(r.name, node, m.refusal, where, held))
                    if held:
                        return self.trace.hold(node)
                continue
            if after is node:
                continue
            if after.type != node.type:
                what = f"rule {r.name} changes the type: {node.type} -> {after.type}"
                raise RewriteError(what, where=where, rules=(r.name,))
            self.trace.steps.append(Step(r.name, r.stage, node, after))
            return after
        return None


class Place:
    """A node of the program whose turn has not come or is not over: what stands there, over what, and who reads it.

    A node cannot be this by itself: while x turns into f(x), the readers of the old x must not be confused with f(x), which
    reads the new one.

    Attributes:
        node: the node there now, over sources that may be rewritten still, until its turn has come.
        settled: the node that it became, once its turn is over.
        origin: the source's name of it, if any.
    """

    node: Node
    origin: str | None
    src: tuple[Place | Node, ...]

    __slots__ = ("node", "origin", "readers", "settled", "src")

    def __init__(self, node: Node, src: tuple[Place | Node, ...], origin: str | None) -> None:
        self.node = node
        self.src = src
        self.origin = origin
        self.readers: dict[Reader, int] = {}
        self.settled: Node | None = None


Reader = Place | Node | None


class Rewriting(Users):
    """The readers of each node while a sweep is under way.

    The program at any moment is the nodes settled so far, below the places still to come. Counts are exact for it, with one
    lag: two places that will turn out to be the same node are two readers until then.
    """

    def __init__(self, roots: Sequence[Node], origins: dict[Node, str]) -> None:
        super().__init__(())
        self._roots = roots
        self._readers: dict[Node, dict[Reader, int]] = {}  # of settled nodes
        self._standing: dict[Node, list[Place]] = {}  # places, by the node that stands there
        self._first: dict[Node, Place] = {}
        for node in toposort(roots):
            self._first[node] = self._place(node, tuple(self._first[s] for s in node.src), origins.get(node))
        for root in roots:
            _add(self._first[root].readers, None, 1)

    def __iter__(self) -> Iterator[Place]:
        """The places of the graph as it was, sources first."""
        return iter(list(self._first.values()))

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, node: Node) -> Sequence[Node | None]:
        return tuple(dict.fromkeys(r.node if isinstance(r, Place) else r for readers in self._all(node) for r in readers))

    def __contains__(self, node: Node) -> bool:
        return node in self._readers or node in self._standing

    def count(self, node: Node) -> int:
        return sum(sum(readers.values()) for readers in self._all(node))

    def _all(self, node: Node) -> Iterator[dict[Reader, int]]:
        if node in self._readers:
            yield self._readers[node]
        for place in self._standing.get(node, ()):
            yield place.readers

    def results(self) -> list[Node]:
        """The nodes that the roots became, when every place is settled."""
        return [_settled(self._first[root]) for root in self._roots]

    def arrive(self, place: Place) -> Node:
        """The node of a place whose turn has come: its sources are settled, and it stands over them."""
        src = [_settled(s) if isinstance(s, Place) else s for s in place.src]
        node = place.node.with_src(src)
        self._stand(place, node)
        return node

    def settle(self, place: Place) -> None:
        """No rule fires at the place: what stands there is part of the result."""
        node = place.node
        if node in self._readers:
            self._unread(node.src, place)
        else:
            self._readers[node] = {}
            for s in dict.fromkeys(node.src):
                self._readers[s][node] = self._readers[s].pop(place)
        self._finish(place, node)

    def replace(self, place: Place, after: Node) -> list[Place]:
        """A rule fired: `after` is to stand at the place. Returns the places whose turn must come for that, sources first,
        the place itself last; none when `after` is settled already."""
        before = place.node.src
        fresh = toposort((after,), self._readers)
        if not fresh:
            self._finish(place, after)
            self._unread(before, place)
            return []
        inner: dict[Node, Place] = {}
        for node in fresh[:-1]:
            origin = place.origin if node.src else None  # a constant or an input comes from nowhere
            inner[node] = self._place(node, tuple(inner.get(s, s) for s in node.src), origin)
        place.src = tuple(inner.get(s, s) for s in after.src)
        self._stand(place, after)
        self._count_reads(place)
        self._unread(before, place)
        return [*inner.values(), place]

    def _place(self, node: Node, src: tuple[Place | Node, ...], origin: str | None) -> Place:
        place = Place(node, src, origin)
        self._standing.setdefault(node, []).append(place)
        self._count_reads(place)
        return place

    def _stand(self, place: Place, node: Node) -> None:
        if place.node is not node:
            self._leave(place)
            place.node = node
            self._standing.setdefault(node, []).append(place)

    def _leave(self, place: Place) -> None:
        here = self._standing[place.node]
        here.remove(place)
        if not here:
            del self._standing[place.node]

    def _count_reads(self, place: Place) -> None:
        for s in place.src:
            if isinstance(s, Place):
                _add(s.readers, place, 1)
            else:
                _add(self._readers[s], place, 1)

    def _finish(self, place: Place, node: Node) -> None:
        for reader, slots in place.readers.items():
            _add(self._readers[node], reader, slots)
        self._leave(place)
        place.settled = node

    def _unread(self, src: Sequence[Node], place: Place) -> None:
        """The place no longer reads these settled nodes; what nothing reads any more leaves the program, and so on down."""
        orphans: list[Node] = []
        for s in src:
            readers = self._readers[s]
            readers[place] -= 1
            if not readers[place]:
                del readers[place]
                orphans.append(s)
        while orphans:
            node = orphans.pop()
            if self._readers.get(node, True):
                continue
            del self._readers[node]
            for s in dict.fromkeys(node.src):
                del self._readers[s][node]
                orphans.append(s)


def _add(readers: dict[Reader, int], reader: Reader, slots: int) -> None:
    readers[reader] = readers.get(reader, 0) + slots


def _settled(place: Place) -> Node:
    assert place.settled is not None
    return place.settled
