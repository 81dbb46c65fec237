"""Protocols of a compiled program, as reports read it.

Reports and the runtime stand on one floor and do not import each other: these protocols are what they agree on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tilewright.hardware.target import Target
from tilewright.ir.graph import Graph, Node
from tilewright.ir.pattern import Trace
from tilewright.ir.types import TensorType
from tilewright.schedule.search import Decision

if TYPE_CHECKING:
    from tilewright.ir.graph import Value


class Part(Protocol):
    """Nodes that run together."""

    @property
    def kind(self) -> str: ...
    @property
    def nodes(self) -> tuple[Node, ...]: ...
    @property
    def inputs(self) -> tuple[Node, ...]: ...
    @property
    def outputs(self) -> tuple[Node, ...]: ...
    @property
    def unfused(self) -> bool: ...


class Step(Protocol):
    """A part of the plan and what runs it; a call into the source's own library has no decision. `within`: programs of its
    regions, if it is a loop or conditional."""

    @property
    def name(self) -> str: ...
    @property
    def part(self) -> Part: ...
    @property
    def run(self) -> Callable[[Sequence[Value]], Sequence[Value]]: ...
    @property
    def decision(self) -> Decision | None: ...
    @property
    def within(self) -> Sequence[Program]: ...


class Program(Protocol):
    """A compiled program."""

    @property
    def source(self) -> Graph: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def target(self) -> Target: ...
    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def trace(self) -> Trace: ...
    @property
    def launched(self) -> str | None: ...
    @property
    def state(self) -> Mapping[str, torch.Tensor]: ...

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]: ...

    def run(
        self, inputs: Sequence[torch.Tensor], observe: Callable[[Step, list[Value]], None] | None = None
    ) -> list[Value]: ...


@contextlib.contextmanager
def restored(program: Program) -> Generator[Mapping[str, torch.Tensor]]:
    """A context that gives copies of a program's state, which afterwards is as it was before."""
    before = {name: t.clone() for name, t in program.state.items()}
    try:
        yield before
    finally:
        with torch.no_grad():
            for name, t in program.state.items():
                t.copy_(before[name])


def target_name(target: Target) -> str:
    """The machine in one line: what it calls itself, the chip it was taken for, and how many cores or SMs."""
    return f"{target.name} ({target.chip.name}, {target.cores} {'cores' if target.kind == 'cpu' else 'SMs'})"


def tensor_types(node: Node) -> tuple[TensorType, ...]:
    """The types of a node's results."""
    return (node.type,) if isinstance(node.type, TensorType) else node.type.items
