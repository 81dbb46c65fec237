"""A graph while a sweep of rules rewrites it, sources first, and who reads what in it at every moment."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from tilewright.ir.graph import Node, Users, toposort


class Place:
    """A node of the program whose turn has not come or is not over: what stands there, over what, and who reads it.

    A node cannot be this by itself: while x turns into f(x), the readers of the old x must not be confused with f(x), which
    reads the new one.

    Attributes:
        node: the node there now, over sources that may be rewritten still, until its turn has come.
        settled: the node that it became, once its turn is over.
        origin: the source's name of it, if any.
    """

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
        fresh = _unsettled(after, self._readers)
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
        unread: list[Node] = []
        for s in src:
            readers = self._readers[s]
            readers[place] -= 1
            if not readers[place]:
                del readers[place]
                unread.append(s)
        while unread:
            node = unread.pop()
            if self._readers.get(node, True):
                continue
            del self._readers[node]
            for s in dict.fromkeys(node.src):
                del self._readers[s][node]
                unread.append(s)


def _add(readers: dict[Reader, int], reader: Reader, slots: int) -> None:
    readers[reader] = readers.get(reader, 0) + slots


def _settled(place: Place) -> Node:
    assert place.settled is not None
    return place.settled


def _unsettled(root: Node, settled: Container[Node]) -> list[Node]:
    """Nodes under `root` that are not settled, sources first; below a settled node everything is."""
    if root in settled:
        return []
    order: list[Node] = []
    seen: set[Node] = {root}
    stack: list[tuple[Node, Iterator[Node]]] = [(root, iter(root.src))]
    while stack:
        node, rest = stack[-1]
        for s in rest:
            if s not in seen and s not in settled:
                seen.add(s)
                stack.append((s, iter(s.src)))
                break
        else:
            order.append(node)
            stack.pop()
    return order
