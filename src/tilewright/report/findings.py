"""What fell back, what dangles, and why something stands beside a product instead of inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.carrier import CARRIERS
from tilewright.ir.graph import Node
from tilewright.ir.ops import Call, Concat, Const, Convert, Dequantize, Input, Item, Map, Pad, Quantize, Select
from tilewright.report.program import Program, Step
from tilewright.report.schema import Finding
from tilewright.report.work import VIEWS, describe, op_name
from tilewright.schedule.candidate import LAST_RESORT, discover

FOLDABLE = (Map, Select, Convert, Quantize, Dequantize, Concat, Pad, *VIEWS)


class Reasons:
    """Why operations of a compiled program were not folded, from the rules that saw them or from where they stand."""

    def __init__(self, program: Program) -> None:
        self._graph = program.graph
        self._by_node: dict[Node, dict[str, None]] = {}
        self._by_origin: dict[tuple[str, str], dict[str, None]] = {}
        for miss in program.trace.near_misses:
            sentence = f"{miss.rule.replace('_', ' ')}: {miss.why}"
            self._by_node.setdefault(miss.node, {})[sentence] = None
            # A later stage may have rebuilt the node: what the source called it, and its operation, still name it.
            if miss.where != miss.node.op.name:
                self._by_origin.setdefault((miss.where, op_name(miss.node)), {})[sentence] = None
        self._readers: dict[Node, list[Node]] = {}
        for node in program.graph.nodes():
            for s in dict.fromkeys(node.src):
                self._readers.setdefault(s, []).append(node)

    def near_misses(self, node: Node) -> list[str]:
        """What rules said that recognised the node and left it."""
        found = self._by_node.get(node) or self._by_origin.get((self._graph.origin(node), op_name(node)), {})
        return list(found)

    def readers(self, node: Node) -> Sequence[Node]:
        """Who reads a node of the compiled graph."""
        return self._readers.get(node, ())

    def why(self, node: Node) -> str:
        """Why a node that could belong to a product is an operation of its own."""
        said = self.near_misses(node)
        if said:
            return "; ".join(said)
        made_by = [_behind_items(s) for s in node.src if not s.constant]
        if not made_by:
            return "it depends on constants alone"
        if all(isinstance(s.op, Input) for s in made_by):
            return "it reads an input of the program: no product stands before it whose result it could be part of"
        carriers = [s for s in made_by if isinstance(s.op, CARRIERS)]
        if not carriers:
            before = ", ".join(dict.fromkeys(op_name(s) for s in made_by if not isinstance(s.op, Input)))
            return f"it follows {before}, which has no epilogue to hold it"
        several = [s for s in carriers if len(self.readers(s)) > 1 or s in self._graph.outputs]
        if several:
            return f"the {several[0].op.name} before it is also read by others"
        return f"no rule folds {op_name(node)} into a {carriers[0].op.name} here"


def _behind_items(node: Node) -> Node:
    return node.src[0] if isinstance(node.op, Item) else node


def dangling(program: Program, reasons: Reasons, cost_us: Mapping[int, float]) -> list[Finding]:
    """Steps that only quantise, dequantise, convert or move data; `cost_us` by index of the step."""
    return [
        Finding(describe(step), step.name, reasons.why(_representative(step)), cost_us.get(i))
        for i, step in enumerate(program.steps)
        if step.part.dangling
    ]


def _representative(step: Step) -> Node:
    """The node of a dangling step that makes it one."""
    working = [n for n in step.part.nodes if not isinstance(n.op, (*VIEWS, Const))]
    return working[0] if working else step.part.nodes[0]


def fallback(program: Program, cost_us: Mapping[int, float]) -> list[Finding]:
    """Products on the reference, operations in the source's own library, and the front end's notes."""
    last_resort = {c.name for c in discover() if c.preference >= LAST_RESORT}
    found: list[Finding] = []
    for i, step in enumerate(program.steps):
        if step.decision is not None and step.decision.kernel.candidate in last_resort:
            refused = "; ".join(f"{r.candidate}: {r.why}" for r in step.decision.rejected)
            why = f"no kernel takes it ({refused})" if refused else "no kernel takes it"
            found.append(Finding(describe(step), step.name, why, cost_us.get(i)))
        calls = [n.op for n in step.part.nodes if isinstance(n.op, Call)]
        if calls:
            op = ", ".join(dict.fromkeys(c.target for c in calls))
            libraries = ", ".join(dict.fromkeys(c.library for c in calls))
            found.append(Finding(op, step.name, f"no operation of the graph expresses it; {libraries} runs it", cost_us.get(i)))
    found += [Finding("note", program.source.name, note, None) for note in program.source.notes]
    return found
