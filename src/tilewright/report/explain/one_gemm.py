"""The account of a program that is one product: who does it, checked on random data, and who does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.report.explain.choices import chosen_of, refusals_of
from tilewright.report.measure.inputs import Feed
from tilewright.report.measure.perf import bind
from tilewright.report.measure.verify import compare_step
from tilewright.report.program import Program, Step, target_name
from tilewright.report.schema import Comparison, Gemm

if TYPE_CHECKING:
    from tilewright.ir.graph import Value


def account(program: Program, name: str, feeds: Sequence[Feed]) -> Gemm:
    """Run the program's steps on `feeds`, compare each with the oracle, and say how its product is done."""
    compared: list[Comparison] = []

    def compare(step: Step, values: list[Value]) -> None:
        compared.append(compare_step(step, values))

    program.run(bind(program, feeds), compare)
    decided = ((i, s.decision) for i, s in enumerate(program.steps))
    at, decision = next((i, d) for i, d in decided if d is not None and d.problem.kind != "fusion")
    wrong = next((c for c in compared if not c.ok), None)
    shown = wrong or compared[at]
    return Gemm(
        program=name,
        target=target_name(program.target),
        verified=wrong is None,
        chosen=chosen_of(decision),
        measured=decision.measured,
        rejected=refusals_of(decision),
        error=shown.error,
        bound=shown.bound,
        why=shown.why,
        inputs=[f.shown for f in feeds],
    )
