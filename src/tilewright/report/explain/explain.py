"""Explanation of each product of a program: what is folded into it, what is not and why, who does it, who does not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replaced
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tilewright.dtype import F32, S8
from tilewright.hardware.target import Target
from tilewright.ir.anchor import ANCHORS, operands_of
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import ALIASES, Const, Input, Item, Param
from tilewright.ir.shown import op_name
from tilewright.report.explain.advice import advise
from tilewright.report.explain.advice.case import Case
from tilewright.report.explain.choices import chosen_of, mispredictions, provisional_words, rejected_of
from tilewright.report.explain.findings import FOLDABLE, Reasons, fallback, multiplied_as_floats, not_read_through, unfused
from tilewright.report.explain.folded import expected_times, fold
from tilewright.report.explain.names import title_of, value_names
from tilewright.report.explain.words import accumulator_words, inner_words, operand_words, store_words
from tilewright.report.measure.inputs import Feed
from tilewright.report.measure.perf import bind
from tilewright.report.measure.traffic import traffic
from tilewright.report.measure.verify import compare_step, spot_compare
from tilewright.report.measure.work import Work, counts, steps_per_layer, work_of
from tilewright.report.program import made_here, target_name, tensor_types
from tilewright.report.schema import Comparison, Explain, Finding, Gemm, Product, Quantized, StepGroup, Store
from tilewright.report.words import ranged, titled, us
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step
from tilewright.schedule.expected import expected_s
from tilewright.schedule.problem import FusionProblem
from tilewright.schedule.search import Decision
from tilewright.schedule.spot_check import sampled
from tilewright.versions import untried

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

# Steps that hold elementwise work before and after their own.
HOLDING = ("norm", "softmax", "reduce")
SPOT_S = 0.1  # for comparing some elements of a product, however late it is


def explain_program(
    program: Executable, name: str, ceilings: Target | None = None, quantized: Quantized | None = None
) -> Explain:
    """An account of every product of a compiled program; products that are alike in all but their names stand together.

    Args:
        program: compiled.
        name: what the report calls it.
        ceilings: the program's target with its measured rates, from which the cost of what is not folded is
            estimated; without them it stays out.
        quantized: what quantising the model chose.
    """
    reasons = Reasons(program)
    folded = fold(program, expected_times(program, ceilings), ceilings)
    called = value_names(program, folded.names)
    products = [_products(program, g, reasons, called, ceilings) for g in folded.groups if g.product is not None]
    rated = ceilings if ceilings is not None and ceilings.read_gbps else None
    cost = {i: round(work_of(s).limit_us(rated), 3) for i, s in enumerate(program.steps)} if rated is not None else {}
    return Explain(
        noise=provisional_words(s.decision for s in program.steps if s.decision is not None),
        limits_noise="" if ceilings is None else ceilings.noise,
        program=name,
        target=target_name(program.target),
        products=products,
        unfused=unfused(program, reasons, cost),
        fallback=fallback(program, cost),
        steps=counts(program.steps),
        steps_per_layer=steps_per_layer(program.steps),
        traffic=traffic(program, reasons.why),
        quantized=quantized,
        notes=untried(),
        made=made_here(),
        counts=folded.counts,
        groups=folded.groups,
        layers=folded.layers,
        advice=advise(Case(program, folded, ceilings, reasons))[0],
    )


def account(program: Executable, name: str, feeds: Sequence[Feed], ends: float = math.inf) -> Gemm:
    """Run the program's steps on `feeds`, compare each with the oracle, and say how its product is done.

    Of a product that was compared as a whole when it was chosen, some elements alone are compared where all would take longer
    than until `ends`, by `time.monotonic`.
    """
    compared: list[Comparison] = []
    elements: list[int] = []

    def compare(step: Step, values: list[Value]) -> None:
        if _takes_longer(step, ends):
            found, count = spot_compare(step, values, max(SPOT_S, ends - time.monotonic()))
            elements.append(count)
        else:
            found = compare_step(step, values)
        compared.append(found)

    program.run(bind(program, feeds), compare)
    decided = ((i, s.decision) for i, s in enumerate(program.steps))
    at, decision = next((i, d) for i, d in decided if d is not None and d.problem.kind != "fusion")
    wrong = next((c for c in compared if not c.ok), None)
    shown = wrong or compared[at]
    return Gemm(
        noise=provisional_words([decision]),
        program=name,
        target=target_name(program.target),
        verified=wrong is None,
        chosen=chosen_of(decision),
        measured=decision.measured,
        rejected=rejected_of(decision),
        error=shown.error,
        bound=shown.bound,
        why=shown.why,
        inputs=[f.shown for f in feeds],
        sampled=min(elements, default=None),
    )


def _takes_longer(step: Step, ends: float) -> bool:
    """Tell whether comparing a step's product as a whole would take longer than until `ends`, and part of it is enough."""
    decision = step.decision
    if decision is None or ends == math.inf or isinstance(decision.problem, FusionProblem):
        return False
    enough = decision.verified and sampled(decision.problem)
    return enough and time.monotonic() + expected_s(decision.problem) > ends


def _products(
    program: Executable, group: StepGroup, reasons: Reasons, called: Mapping[Node, str], ceilings: Target | None
) -> Product:
    """The account of products that are alike: what differs between them is a range, or `c` where it is a number."""
    steps = [program.steps[i] for i in group.steps]
    found = [_product(program, s, s.decision, reasons, called, ceilings) for s in steps if s.decision is not None]
    if len(found) == 1:
        return replace(found[0], name=group.name)
    beside = {(f.op, f.why): f for p in reversed(found) for f in p.beside}
    return replace(
        found[0],
        name=group.name,
        problem=group.problem,
        names=[n for p in found for n in p.names],
        operands=_merged([p.operands for p in found]),
        accumulates=_merged([[p.accumulates] for p in found])[0],
        inside={name: _merged([p.inside[name] for p in found]) for name in found[0].inside},
        stores=[
            Store(_merged([s.steps for s in each]), each[0].writes) for each in zip(*(p.stores for p in found), strict=True)
        ],
        beside=list(beside.values()),
        left=list(dict.fromkeys(line for p in found for line in p.left)),
    )


def _merged(accounts: Sequence[Sequence[str]]) -> list[str]:
    """Lines of several accounts as those of one; those of the first where they differ in more than names and numbers."""
    if len({len(a) for a in accounts}) > 1:
        return list(accounts[0])
    return [ranged([titled(line) for line in lines], most=1) for lines in zip(*accounts, strict=True)]


def _product(
    program: Executable,
    step: Step,
    decision: Decision,
    reasons: Reasons,
    called: Mapping[Node, str],
    ceilings: Target | None,
) -> Product:
    node = step.part.nodes[0]  # then the items that pick its results
    work = work_of(step)
    chosen = chosen_of(decision, ceilings)
    rejected = rejected_of(decision, ceilings)
    return Product(
        names=[step.name],
        kind=step.part.kind,
        problem=title_of(step),
        operands=operand_words(node, called),
        accumulates=accumulator_words(node),
        inside=inner_words(node, called),
        stores=[Store(steps, writes) for steps, writes in store_words(node, called)],
        beside=_beside(program, node, reasons, called, ceilings),
        left=[_with_cost(said, node, work, program.target.kind, ceilings) for said in reasons.near_misses(node)],
        chosen=chosen,
        measured=decision.measured,
        rejected=rejected,
        rules=reasons.rules(node),
        limit_us=None if ceilings is None or not ceilings.read_gbps else round(work.limit_us(ceilings), 3),
        memory_bound=ceilings is not None and work.memory_bound(ceilings),
        mispredicted=mispredictions(chosen, rejected),
    )


def _with_cost(said: str, node: Node, work: Work, kind: str, ceilings: Target | None) -> str:
    """The sentence why something was left. Of an attention that multiplies integer codes as floats, it goes on with what that
    costs, and what can be done."""
    if said != multiplied_as_floats(node):
        return said
    change = "no change of the model saves it" if kind == "cpu" else "fp8 codes are multiplied as they are"
    if ceilings is None or not ceilings.peak_gops:
        return f"{said}; what that costs is not known, as this machine's rates were not measured; {change}"
    more = work.limit_us(ceilings) - replaced(work, dtype=S8).limit_us(ceilings)
    costs = f"that costs {us(more)} µs by this machine's rates" if more > 0 else "by this machine's rates that costs no time"
    return f"{said}; {costs}, and {change}"


def _beside(
    program: Executable, node: Node, reasons: Reasons, called: Mapping[Node, str], ceilings: Target | None
) -> list[Finding]:
    """The operations next to a product that are of the kind a product can hold, and why they are not in it.

    One that stands in the step of a norm, a reduction or the like is folded into that, and not listed.
    """
    found: dict[Node, Finding] = {}
    operands = {n.op.index for n in toposort(operands_of(node)) if isinstance(n.op, Param)}
    elsewhere = {n for step in program.steps if step.part.kind in HOLDING for n in step.part.nodes}

    def note(neighbour: Node, place: str, otherwise: Callable[[Node], str]) -> None:
        foldable = isinstance(neighbour.op, FOLDABLE) and neighbour not in elsewhere
        if neighbour in found or neighbour.constant or not foldable:
            return
        why = "; ".join(reasons.near_misses(neighbour)) or otherwise(neighbour)
        where = called.get(neighbour, "")
        shown = f"{place}, {op_name(neighbour)} {where}".rstrip()
        found[neighbour] = Finding(f"{op_name(neighbour)} -> {neighbour.type}", shown, why, _cost_us(neighbour, ceilings))

    for i, source in enumerate(node.src):
        if not isinstance(source.op, (Input, Const, Item, *ANCHORS)):
            note(source, "before it", lambda n, operand=i in operands: _why_before(n, operand, reasons))
    for reader in reasons.readers(node):
        for behind in reasons.readers(reader) if isinstance(reader.op, Item) else (reader,):
            note(behind, "after it", reasons.why)
    return list(found.values())


def _cost_us(node: Node, ceilings: Target | None) -> float | None:
    """The least time to read what an operation reads and to write what it gives; None for a view, which does neither."""
    if ceilings is None or not ceilings.read_gbps or isinstance(node.op, ALIASES):
        return None
    values = [*(s for s in dict.fromkeys(node.src) if not s.constant), node]
    return round(ceilings.limit_us(0, sum(t.size_bytes for v in values for t in tensor_types(v)), F32), 3)


def _why_before(neighbour: Node, operand: bool, reasons: Reasons) -> str:
    """The sentence why a node that makes an operand or a side input is not read through."""
    readers = len(reasons.readers(neighbour))
    if readers > 1:
        return f"{readers} operations read it, so it is computed once for all of them"
    if operand:
        return f"{not_read_through(neighbour)}; it is computed once, beforehand"
    return "a side input is read as it is; what computes it runs once, beforehand"
