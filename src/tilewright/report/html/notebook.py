"""A program as a notebook shows it: a line, its steps, the graph as a picture; nothing is measured for it."""

from __future__ import annotations

from html import escape

from tilewright.report.explain.names import step_names
from tilewright.report.html.picture import picture
from tilewright.report.measure.work import candidate_of, describe
from tilewright.report.words import count, us
from tilewright.runtime.executable import Executable

MOST_STEPS = 60
PROBLEM = 120  # characters of one


def notebook(program: Executable) -> str:
    """The view as HTML that stands in somebody's page: no style or script of its own; names of the program are escaped."""
    rows: list[str] = []
    for i, (name, step) in enumerate(zip(step_names(program)[:MOST_STEPS], program.steps, strict=False)):
        problem, decision = describe(step), step.decision
        shown = problem if len(problem) <= PROBLEM else f"{problem[: PROBLEM - 1]}…"
        time = "" if decision is None or decision.time_us is None else us(decision.time_us)
        cells = (str(i), name, step.part.kind, shown, candidate_of(step), time)
        rows.append(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in cells)}</tr>")
    heads = "".join(f"<th>{h}</th>" for h in ("", "step", "kind", "problem", "candidate", "µs when it was chosen"))
    more = len(program.steps) - MOST_STEPS
    rest = f"<p>{count(more, 'more step')}: <code>program.steps</code></p>" if more > 0 else ""
    return (
        f"<p><code>{escape(repr(program))}</code></p><details><summary>{count(len(program.steps), 'step')}</summary>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>{rest}</details>"
        f"<details><summary>graph</summary>{picture(program.graph, program.graph.name)}</details>"
    )
