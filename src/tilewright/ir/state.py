"""State: inputs that a program keeps from call to call and writes to, such as a cache of keys and values, as writes.

A front end reads `cache[:, :, at] = new` as a function from the old value to the new one. Where nothing else reads the old
value, the new one may take its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tilewright.dtype import S64
from tilewright.ir.build import const
from tilewright.ir.graph import Graph, Node, Users
from tilewright.ir.ops import Concat, Input, Slice, Write

if TYPE_CHECKING:
    import torch


def in_place(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph with new values of state as writes, where nothing else reads the old value and it is replaced at some positions
    of one axis, or as a whole; any other new value is a result like others, copied over the old one as a call ends.

    Returns:
        tuple: the graph, and the names of those for which neither can be: their positions are data and something else reads the
        old value, or the new one is of another type.
    """
    if not graph.state:
        return graph, ()
    count = len(graph.state)
    kept, new = graph.inputs[-count:], graph.outputs[-count:]
    made, can = _with_writes(graph, set(range(count)))
    if not all(can):  # those that cannot be are left as they were read
        made, can = _with_writes(graph, {i for i, possible in enumerate(can) if possible})
    users = made.users()
    shared = {
        root_of(n)
        for n in made.nodes()
        if isinstance(n.op, Write)
        and (len(users[n.src[0]]) > 1 or (root_of(n) in kept and root_of(n) not in _written_ones(made)))
    }
    failed = [old in shared or n.type != old.type for old, n in zip(kept, new, strict=True)]
    return made, tuple(name for name, bad in zip(graph.output_names[-count:], failed, strict=True) if bad)


def root_of(node: Node) -> Node:
    """The node that a chain of writes begins with."""
    while isinstance(node.op, Write):
        node = node.src[0]
    return node


def _written_ones(graph: Graph) -> set[Node]:
    """The states whose new value is a write to them."""
    count = len(graph.state)
    pairs = zip(graph.inputs[-count:], graph.outputs[-count:], strict=True)
    return {old for old, end in pairs if isinstance(end.op, Write) and root_of(end) is old}


def _with_writes(graph: Graph, chosen: set[int]) -> tuple[Graph, list[bool]]:
    """The graph with the chosen new values as writes, and of which values that is so and may be."""
    count = len(graph.state)
    kept, new = graph.inputs[-count:], graph.outputs[-count:]
    pairs = [(i, old, n) for i, (old, n) in enumerate(zip(kept, new, strict=True)) if i in chosen]
    writes = {n: w for _, old, n in pairs if (w := _written(n, old)) is not None}
    made = graph.replace({n: write for n, write in writes.items() if n is not write})
    ends = [_whole(n, old) if i in chosen else n for i, (old, n) in enumerate(zip(kept, made.outputs[-count:], strict=True))]
    made = made.with_outputs((*made.outputs[:-count], *ends))
    users = made.users()
    can = [
        isinstance(end.op, Write) and end.src[0] is old and len(users[old]) == 1 and not _written_again(end, users)
        for old, end in zip(kept, ends, strict=True)
    ]
    return made, can


def _written_again(node: Node, users: Users) -> bool:
    """Tell whether another write is to take the memory of what a buffer becomes."""
    return any(reader is not None and isinstance(reader.op, Write) and reader.src[0] is node for reader in users[node])


def caller_inputs(graph: Graph) -> tuple[Node, ...]:
    """The inputs that a caller gives: those that the program does not keep."""
    return tuple(n for n in graph.inputs if not is_state(n))


def share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether memory of two tensors may overlap: the spans of their elements do."""
    return meets(span(one), (span(other),))


def meets(mine: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    """Tell whether a span overlaps another one."""
    first, end = mine
    return any(max(first, start) < min(end, last) for start, last in others)


def span(t: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one after its last; the same where it has none."""
    return t.data_ptr(), t.data_ptr() + _reach(t) * t.element_size()


def end_bytes(t: torch.Tensor) -> int:
    """Bytes from where a tensor's storage begins to the end of its last element; 0 where it has none."""
    if t.is_contiguous():  # which tells without a loop
        return int(t.storage_offset()) * t.element_size() + t.nbytes if t.numel() else 0
    return (int(t.storage_offset()) + _reach(t)) * t.element_size() if t.numel() else 0


def _reach(t: torch.Tensor) -> int:
    """Elements from a tensor's first to its last one's end in memory."""
    return 1 + sum((d - 1) * s for d, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def is_state(node: Node) -> bool:
    """Tell whether a node is state, or a write to one."""
    return isinstance(node.op, Write) or (isinstance(node.op, Input) and node.op.mutable)


def _written(new: Node, old: Node) -> Node | None:
    """`new` as a write to `old`: old, some positions of one axis replaced."""
    if isinstance(new.op, Write) and new.src[0] is old:
        return new
    if not isinstance(new.op, Concat):
        return None
    axis, at = new.op.axis % len(new.shape), 0
    replaced: list[tuple[int, Node]] = []
    for part in new.src:
        if not _stays(part, old, axis, at):
            replaced.append((at, part))
        at += part.shape[axis]
    if len(replaced) != 1:
        return None
    ((at, y),) = replaced
    return Node(Write(axis), old, const(list(range(at, at + y.shape[axis])), S64), y)


def _whole(new: Node, old: Node) -> Node:
    """`new` written to all of `old`, if it is no write to it nor what it was."""
    if new is old or new.type != old.type or isinstance(new.op, Write) or 0 in (len(new.shape), *new.shape):
        return new
    return Node(Write(0), old, const(list(range(new.shape[0])), S64), new)


def _stays(part: Node, old: Node, axis: int, at: int) -> bool:
    """Tell whether a piece of a concatenation is what lay at its place."""
    if not isinstance(part.op, Slice) or part.src[0] is not old:
        return False
    start = tuple(at if a == axis else 0 for a in range(len(old.shape)))
    return part.op.start == start and all(step == 1 for step in part.op.step)
