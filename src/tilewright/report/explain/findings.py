"""Findings: what fell back, what is unfused, and why something stands beside a product instead of inside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tilewright.ir.anchor import ANCHORS, operands_of
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import (
    ALIASES,
    Attention,
    Call,
    Concat,
    Const,
    Convert,
    Dequantize,
    Input,
    Map,
    Pad,
    Quantize,
    Select,
    maker_of,
)
from tilewright.ir.shown import op_name
from tilewright.report.explain.names import step_names
from tilewright.report.measure.work import describe
from tilewright.report.schema import Finding
from tilewright.report.words import listing
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step
from tilewright.schedule.candidate import LAST_RESORT, discover
from tilewright.schedule.problem import FusionProblem
from tilewright.schedule.search import Decision

_PARTS = {"gemm": "product", "attention": "attention", "fusion": "epilogue"}
FOLDABLE = (Map, Select, Convert, Quantize, Dequantize, Concat, Pad, *ALIASES)


class Reasons:
    """Reasons why operations of a compiled program were not folded, from the rules that saw them or from where they stand."""

    def __init__(self, program: Executable) -> None:
        self._graph, self._account = program.graph, program.account
        self._readers: dict[Node, list[Node]] = {}
        for node in program.graph.nodes():
            for s in dict.fromkeys(node.src):
                self._readers.setdefault(s, []).append(node)

    def near_misses(self, node: Node) -> list[str]:
        """The sentences of rules that recognised the node and left it; of an attention also that it dequantises codes."""
        codes = multiplied_as_floats(node)
        return [*self._account.left.get(node, ()), *([codes] if codes else [])]

    def rules(self, anchor: Node) -> list[str]:
        """The rules that made a gemm or attention what it is, in the order in which they fired."""
        return list(self._account.rules.get(anchor, ()))

    def readers(self, node: Node) -> Sequence[Node]:
        """The readers of a node of the compiled graph."""
        return self._readers.get(node, ())

    def why(self, node: Node) -> str:
        """The sentence why a node that could belong to a product is an operation of its own: which rule nearly fitted, what
        stopped it."""
        said = self.near_misses(node)
        if said:
            return "; ".join(said)
        made_by = [maker_of(s) for s in node.src if not s.constant]
        if not made_by:
            return "it depends on constants alone"
        anchors = [s for s in made_by if isinstance(s.op, ANCHORS)]
        if anchors:
            return self._why_after(node, anchors)
        before = ", ".join(dict.fromkeys(op_name(s) for s in made_by if not isinstance(s.op, Input)))
        stands = f"it follows {before}, which has no epilogue to hold it" if before else "it reads an input of the program"
        after = next((r for r in self._past_views(node) if isinstance(r.op, ANCHORS)), None)
        if after is None:
            return stands if before else f"{stands}, and no product stands before or after it"
        return f"{stands}, and the {after.op.name} after it leaves it: {not_read_through(node)}"

    def _why_after(self, node: Node, anchors: Sequence[Node]) -> str:
        name = anchors[0].op.name
        if isinstance(node.op, (Concat, Pad)):
            return f"no rule writes part of a {op_name(node)}: a {name}'s stores are whole tensors"
        several = [s for s in anchors if len(self.readers(s)) > 1 or s in self._graph.outputs]
        if not several:
            return f"no rule folds {op_name(node)} into a {name} here"
        reads = ", ".join(dict.fromkeys(op_name(r) for r in self._past_views(node)))
        return (
            f"others read the {several[0].op.name} before it, too, so it cannot take its place; "
            f"nor is it stored beside that, as only {reads or 'nothing'} reads it"
        )

    def _past_views(self, node: Node) -> list[Node]:
        """The readers of a value, past views of it."""
        found: list[Node] = []
        pending = list(self.readers(node))
        while pending:
            reader = pending.pop()
            if isinstance(reader.op, ALIASES):
                pending += self.readers(reader)
            else:
                found.append(reader)
        return found


def multiplied_as_floats(node: Node) -> str | None:
    """The sentence that an attention multiplies integer codes as floats, and why; None of anything else."""
    if not isinstance(node.op, Attention):
        return None

    def integer(root: Node) -> bool:
        return any(isinstance(n.op, Dequantize) and n.src[0].dtype.is_integer for n in toposort((root,)))

    names = ("queries", "keys", "values")
    found = [n for n, root in zip(names, operands_of(node), strict=False) if integer(root)]
    said = f"{listing(found)} are integer codes, dequantised and multiplied as floats: no attention kernel multiplies integers"
    return said if found else None


def not_read_through(node: Node) -> str:
    """The sentence why a product's operand is not read through a node that makes it."""
    return f"operands are read through some operations, but {op_name(node)} is no view, dequantisation or widening cast"


def unfused(program: Executable, reasons: Reasons, cost_us: Mapping[int, float]) -> list[Finding]:
    """Steps that only quantise, dequantise, convert or move data; `cost_us` by index of the step."""
    return [
        Finding(describe(step), name, reasons.why(representative(step)), cost_us.get(i))
        for i, (name, step) in enumerate(zip(step_names(program), program.steps, strict=True))
        if step.part.unfused
    ]


def representative(step: Step) -> Node:
    """The node of an unfused step that makes it one."""
    working = [n for n in step.part.nodes if not isinstance(n.op, (*ALIASES, Const))] or list(step.part.nodes)
    return next((n for n in working if isinstance(n.op, Quantize)), working[0])


def fallback(program: Executable, cost_us: Mapping[int, float]) -> list[Finding]:
    """Products on the reference, whole or in part, fusions that no generated kernel takes, kernels that were called wrong,
    operations in the source's own library, and the front end's notes."""
    last_resort = {c.name for c in discover(kind=program.target.kind) if c.preference >= LAST_RESORT}
    found: list[Finding] = []
    for i, (name, step) in enumerate(zip(step_names(program), program.steps, strict=True)):
        if step.decision is not None:
            whys = [_last_resort(step.decision, last_resort, program.target.kind), _wrong(step.decision)]
            found += [Finding(describe(step), name, why, cost_us.get(i)) for why in whys if why is not None]
        calls = [n.op for n in step.part.nodes if isinstance(n.op, Call)]
        if calls:
            op = ", ".join(dict.fromkeys(c.target for c in calls))
            libraries = ", ".join(dict.fromkeys(c.library for c in calls))
            why = f"no operation of the graph expresses it; {libraries} runs it"
            if step.within:
                steps = " and ".join(str(len(p.steps)) for p in step.within)
                why += f" as the data says, its regions as programs of {steps} steps"
            found.append(Finding(op, name, why, cost_us.get(i)))
            found += [x for p in step.within for x in fallback(p, {})]
    found += [Finding("note", program.source.name, note, None) for note in program.source.notes]
    return found


def _last_resort(decision: Decision, last_resort: Collection[str], kind: str) -> str | None:
    """The sentence on what a step leaves to the reference, and what kept all others from it; None if nothing."""
    problem, kernel = decision.problem, decision.kernel
    said = [r for r in decision.rejected if r.time_us is None or not isinstance(problem, FusionProblem)]
    refused = "; ".join(f"{r}: {r.why}" for r in said if r.kind != "untried")
    left = "; ".join(f"{r}: {r.why}" for r in said if r.kind == "untried")
    either = "; ".join(filter(None, (refused, left)))
    if kernel.candidate not in last_resort:
        slow = [_PARTS[what] for what, who in kernel.parts if who in last_resort]
        return (
            f"{kernel.candidate} leaves its {' and '.join(dict.fromkeys(slow))} to the reference ({either})" if slow else None
        )
    if not isinstance(problem, FusionProblem):
        takes = f"no kernel takes it ({refused})" if refused else "no kernel takes it"
        tried = f"no kernel that was tried takes it ({refused})" if refused else "no kernel was tried"
        return f"{tried}; {left}" if left else takes
    unchecked = any(r.kind == "unchecked" for r in said)
    if either and not problem.only_views and (kind == "cpu" or unchecked):
        return f"torch runs it operation by operation ({either})"
    return None


def _wrong(decision: Decision) -> str | None:
    """The sentence that kernels which could have been faster were refused for their results, or for not coming back; or None.

    One that other programs starved is no kernel to report.
    """
    words = {"wrong": "gave other results than the reference", "lost": "crashed or hung"}
    owners = {c.name: c.package for c in discover()}
    found: list[str] = []
    for kind, what in words.items():
        refused = [r for r in decision.rejected if r.kind == kind]
        packages = sorted({owners.get(r.candidate, "") for r in refused})
        report = f"report this to {' and '.join(packages)}" if all(packages) else "report this"
        if refused:
            found.append(f"kernels were refused that {what}; {report} ({'; '.join(f'{r}: {r.why}' for r in refused)})")
    return "; ".join(found) or None
