"""What was done with each product of a program and why: what is folded into it, what is not, who does it, who does not."""

from __future__ import annotations

from msgspec.structs import replace

from tilewright.ir.carrier import CARRIERS
from tilewright.ir.graph import Node
from tilewright.ir.ops import Const, Input, Item
from tilewright.report.findings import FOLDABLE, Reasons, dangling, fallback
from tilewright.report.program import Program, Step, target_name
from tilewright.report.schema import Choice, Explain, Finding, Product, Refusal, Store
from tilewright.report.words import accumulator_words, operand_words, store_words
from tilewright.report.work import describe, op_name
from tilewright.schedule.search import Decision


def explain_program(program: Program, name: str) -> Explain:
    """An account of every product of a compiled program; products that are alike in all but their names stand together."""
    reasons = Reasons(program)
    alike: dict[object, list[Product]] = {}
    for step in program.steps:
        if step.decision is not None:
            product = _product(program, step, step.decision, reasons)
            alike.setdefault(_likeness(product), []).append(product)
    products = [replace(group[0], names=[n for p in group for n in p.names]) for group in alike.values()]
    return Explain(name, target_name(program.target), products, dangling(program, reasons, {}), fallback(program, {}))


def _likeness(product: Product) -> object:
    """What two products share that differ in the names of their weights and neighbours alone."""
    beside = tuple((f.op, f.why) for f in product.beside)
    return product.kind, product.problem, beside, tuple(product.left), product.chosen.candidate, product.chosen.schedule


def _product(program: Program, step: Step, decision: Decision, reasons: Reasons) -> Product:
    node = step.part.nodes[0]  # then the items that pick its results
    graph = program.graph
    return Product(
        names=[step.name],
        kind=step.part.kind,
        problem=describe(step),
        operands=operand_words(node, graph),
        accumulates=accumulator_words(node),
        stores=[Store(steps, writes) for steps, writes in store_words(node, graph)],
        beside=_beside(program, node, reasons),
        left=reasons.near_misses(node),
        chosen=chosen_of(decision),
        measured=decision.measured,
        rejected=refusals_of(decision),
    )


def chosen_of(decision: Decision) -> Choice:
    """The candidate that does a product."""
    return Choice(decision.kernel.candidate, str(decision.kernel.schedule), decision.time_us)


def refusals_of(decision: Decision) -> list[Refusal]:
    """The candidates that do not."""
    return [Refusal(r.candidate, r.why, r.time_us) for r in decision.rejected]


def _beside(program: Program, node: Node, reasons: Reasons) -> list[Finding]:
    """The operations next to a product that are of the kind a product can hold, and why they are not in it."""
    found: dict[Node, Finding] = {}

    def note(neighbour: Node, place: str) -> None:
        if neighbour in found or neighbour.constant or not isinstance(neighbour.op, FOLDABLE):
            return
        where = program.graph.origin(neighbour)
        shown = op_name(neighbour) if where == neighbour.op.name else f"{op_name(neighbour)} {where}"
        found[neighbour] = Finding(
            f"{op_name(neighbour)} -> {neighbour.type}", f"{place}: {shown}", _why(neighbour, place), None
        )

    def _why(neighbour: Node, place: str) -> str:
        said = reasons.near_misses(neighbour)
        if said:
            return "; ".join(said)
        if place == "before":
            return _why_before(neighbour, reasons)
        return reasons.why(neighbour)

    for source in node.src:
        if not isinstance(source.op, (Input, Const, Item, *CARRIERS)):
            note(source, "before")
    for reader in reasons.readers(node):
        if isinstance(reader.op, Item):
            for behind in reasons.readers(reader):
                note(behind, "after")
        else:
            note(reader, "after")
    return list(found.values())


def _why_before(neighbour: Node, reasons: Reasons) -> str:
    """Why something that makes an operand is not read through."""
    readers = len(reasons.readers(neighbour))
    if readers > 1:
        return f"{readers} operations read it, so it is computed once for all of them"
    return (
        "operands are read through views, widening casts and dequantisation; anything else is computed once, not in every tile"
    )
