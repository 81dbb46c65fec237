"""Explanation of each product of a program: what is folded into it, what is not and why, who does it, who does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.ir.anchor import ANCHORS, operands_of
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import ALIASES, Const, Input, Item, Param
from tilewright.ir.shown import op_name
from tilewright.report.explain.choices import chosen_of, mispredictions, provisional_words, rejected_of
from tilewright.report.explain.findings import FOLDABLE, Reasons, fallback, not_read_through, unfused
from tilewright.report.explain.words import accumulator_words, operand_words, store_words
from tilewright.report.measure.inputs import Feed
from tilewright.report.measure.perf import bind
from tilewright.report.measure.verify import compare_step
from tilewright.report.measure.work import counts, describe, steps_per_layer, work_of
from tilewright.report.program import target_name, tensor_types
from tilewright.report.schema import Comparison, Explain, Finding, Gemm, Product, Quantized, Store
from tilewright.runtime.executable import Executable, Step
from tilewright.schedule.search import Decision
from tilewright.versions import untried

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

# Steps that hold elementwise work before and after their own.
HOLDING = ("norm", "softmax", "reduce")


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
    alike: dict[object, list[Product]] = {}
    for step in program.steps:
        if step.decision is not None and step.decision.problem.kind != "fusion":
            product = _product(program, step, step.decision, reasons, ceilings)
            alike.setdefault(_likeness(product), []).append(product)
    products = [replace(group[0], names=[n for p in group for n in p.names]) for group in alike.values()]
    cost = {i: round(work_of(s).limit_us(ceilings), 3) for i, s in enumerate(program.steps)} if ceilings is not None else {}
    return Explain(
        noise=provisional_words(s.decision for s in program.steps if s.decision is not None),
        program=name,
        target=target_name(program.target),
        products=products,
        unfused=unfused(program, reasons, cost),
        fallback=fallback(program, cost),
        steps=counts(program.steps),
        steps_per_layer=steps_per_layer(program.steps),
        quantized=quantized,
        notes=untried(),
    )


def account(program: Executable, name: str, feeds: Sequence[Feed]) -> Gemm:
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
    )


def _likeness(product: Product) -> object:
    """A key that two products share if they differ only in their constants and in the names of their weights and neighbours."""
    problem = re.sub(r"\b\d+\.\d+(e[-+]?\d+)?|\b\d+e[-+]?\d+", "constant", product.problem)
    beside = tuple((f.op, f.why) for f in product.beside)
    return product.kind, problem, beside, tuple(product.left), product.chosen.candidate, product.chosen.schedule


def _product(program: Executable, step: Step, decision: Decision, reasons: Reasons, ceilings: Target | None) -> Product:
    node = step.part.nodes[0]  # then the items that pick its results
    graph = program.graph
    work = work_of(step)
    chosen = chosen_of(decision, ceilings)
    rejected = rejected_of(decision, ceilings)
    return Product(
        names=[step.name],
        kind=step.part.kind,
        problem=describe(step),
        operands=operand_words(node, graph),
        accumulates=accumulator_words(node),
        stores=[Store(steps, writes) for steps, writes in store_words(node, graph)],
        beside=_beside(program, node, reasons, ceilings),
        left=reasons.near_misses(node),
        chosen=chosen,
        measured=decision.measured,
        rejected=rejected,
        rules=reasons.rules(node),
        limit_us=None if ceilings is None else round(work.limit_us(ceilings), 3),
        memory_bound=ceilings is not None and work.memory_bound(ceilings),
        mispredicted=mispredictions(chosen, rejected),
    )


def _beside(program: Executable, node: Node, reasons: Reasons, ceilings: Target | None) -> list[Finding]:
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
        where = program.graph.origins.get(neighbour, "")
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
    if ceilings is None or isinstance(node.op, ALIASES):
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
