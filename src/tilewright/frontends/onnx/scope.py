"""Scopes of ONNX nodes: the names they see, the operator versions in force, the functions around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.errors import InputError
from tilewright.frontends.onnx.files import malformed, quoted
from tilewright.ir.graph import Node

if TYPE_CHECKING:
    import onnx


MICROSOFT = "com.microsoft"  # onnxruntime's own domain
# Domains which onnxruntime takes without an import: they have one version.
IMPLIED = frozenset({MICROSOFT, f"{MICROSOFT}.nchwc"})


def plain_domain(domain: str) -> str:
    """The operator domain, its default under one spelling."""
    return "" if domain == "ai.onnx" else domain


def opsets_of(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Version of each operator domain that a model or function imports."""
    return {plain_domain(o.domain): o.version for o in imports}


@dataclass(frozen=True)
class Context:
    """The context of a run of nodes, beside their names.

    Attributes:
        opsets: version of each operator domain in force.
        inside: (domain, name) of the functions and branches being read, outermost first.
    """

    opsets: Mapping[str, int]
    inside: tuple[tuple[str, str], ...] = ()

    def version_of(self, domain: str, where: str) -> int:
        """Version of a domain.

        Raises:
            InputError: the model does not say, or it is no version.
        """
        found = self.opsets.get(domain, 1 if domain in IMPLIED else None)
        if found is None:
            raise InputError(
                f"the model does not say which version of domain {quoted(domain)} it uses",
                where=where,
                hint="add the domain to opset_import",
            )
        if not 0 < found < 1 << 31:
            raise malformed(f"operator set version {found}", where)
        return found


class Scope:
    """Values by name; an inner scope sees the outer one's."""

    def __init__(self, outer: Scope | None, nodes: Iterable[onnx.NodeProto]) -> None:
        """`nodes` are those the scope is for: a use before its definition is a cycle or a wrong order."""
        self._outer = outer
        self._values: dict[str, Node] = {}
        self._defined = frozenset(o for n in nodes for o in n.output if o)

    def find(self, name: str) -> Node | None:
        """The value called `name`, if there is one yet."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope._values:
                return scope._values[name]
            scope = scope._outer
        return None

    def get(self, name: str, where: str) -> Node:
        """The value called `name`.

        Raises:
            InputError: nothing defines it, or only a later node does.
        """
        found = self.find(name)
        if found is not None:
            return found
        scope: Scope | None = self
        while scope is not None:
            if name in scope._defined:
                raise InputError(
                    f"value {quoted(name)} is read before it is made: the nodes form a cycle or stand in the wrong order",
                    where=where,
                    hint="sort the nodes, or export the model again",
                )
            scope = scope._outer
        raise malformed(f"nothing makes the value {quoted(name)}", where)

    def bind(self, name: str, node: Node, where: str) -> None:
        """Give a value its name.

        Raises:
            InputError: the name is taken.
        """
        if name in self._values:
            raise malformed(f"two values are called {quoted(name)}", where)
        self._values[name] = node
