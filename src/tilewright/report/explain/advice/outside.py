"""Advice on what runs outside products: in torch or the source's own library, or as a step that only converts or moves data."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.frontends import GRAPH_BREAK
from tilewright.ir.ops import Call
from tilewright.ir.shown import op_name
from tilewright.report.explain.advice.case import UNKNOWN, Case, Found, Saving
from tilewright.report.explain.advice.products import names_in_f64
from tilewright.report.explain.findings import representative
from tilewright.report.explain.folded import done_by, why_not
from tilewright.report.program import tensor_types
from tilewright.runtime.steps import Step
from tilewright.schedule.candidate import MATRIX_LIBRARIES, discover
from tilewright.schedule.search import OVER


def operations_outside(case: Case) -> Iterator[Found]:
    """Steps that run operation by operation in torch, on the reference, or in the source's own library."""
    kind = case.program.target.kind
    for i, step in enumerate(case.program.steps):
        by = done_by(step)
        if step.part.kind == "view" or by == "generated":
            continue
        if _cut_short(step):
            why = "a generated kernel was not tried: the time for choosing was over"
            change = "give the search more time (--budget 60, budget_s=60), or ask again: what was decided is kept"
            saving = case.above_limit(i)
            yield Found("search-cut-short", "the search ended before it came to some kernels", why, change, (i,), saving)
        if by == "library" or _cut_short(step) or names_in_f64(step):  # which is a kind of advice of its own
            continue
        calls = list(dict.fromkeys(n.op for n in step.part.nodes if isinstance(n.op, Call)))
        if calls:
            names, library = ", ".join(c.target for c in calls), ", ".join(dict.fromkeys(c.library for c in calls))
            title = f"{names} runs in {library}"
            change = f"write {names} in operations that have kernels, or take it out of what is compiled"
        else:
            title = f"{'a product' if step.part.kind in ('gemm', 'attention') else 'a fusion'} runs in torch"
            change = "change what the reason names: its type, its extents, or the operation that has no kernel"
        yield Found("runs-in-torch", title, why_not(step, kind), change, (i,), case.whole([i]))


def _cut_short(step: Step) -> bool:
    """Tell whether there was no time to try the generated kernels of a step."""
    rejected = () if step.decision is None else step.decision.rejected
    generated = {c.name for c in discover() if c.preference < MATRIX_LIBRARIES.start}
    return any(r.candidate in generated and r.kind == "untried" and r.why == OVER for r in rejected)


def graph_breaks(case: Case) -> Iterator[Found]:
    """Places behind which torch.compile broke the model's graph off, so that another graph begins."""
    program = case.program
    size = sum(t.size_bytes for o in program.graph.outputs for t in tensor_types(o))
    for note in program.source.notes:
        if not note.startswith(GRAPH_BREAK):
            continue
        at, _, why = note.removeprefix(GRAPH_BREAK).partition(": ")
        saving = UNKNOWN
        if case.ceilings is not None and case.ceilings.read_gbps:
            us = 2 * size / case.ceilings.read_gbps / 1e3
            saving = Saving(us, f"{size / 1e6:,.2f} MB are written and read again at the break; Python between is not counted")
        change = "take what breaks the graph out of forward: a print, .item(), a branch on values, a call of another library"
        title = "torch.compile breaks the graph"
        said = f"{why}; nothing is fused across the break, and Python runs between the two graphs"
        yield Found("graph-break", title, said, change, (len(program.steps) - 1,), saving, where=(at,))


def unfused_steps(case: Case) -> Iterator[Found]:
    """Steps that only quantise, dequantise, convert or move data."""
    for i, step in enumerate(case.program.steps):
        if step.part.unfused and done_by(step) != "fallback":
            node = representative(step)
            title = f"{op_name(node)} is a step of its own"
            change = f"let one product alone read or write what it makes, or leave the {op_name(node)} out"
            yield Found("unfused-step", title, case.reasons.why(node), change, (i,), case.whole([i]))
