"""Advice on quantised models: pairs of QuantizeLinear and DequantizeLinear, and what keeps codes from being multiplied."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.ir.anchor import operands_of, rebuilt, stores_of
from tilewright.ir.expression import depends_on_acc
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import VIEWS, Acc, Attention, Convert, Dequantize, Gemm, Map, Quantize
from tilewright.ir.shown import op_name
from tilewright.report.explain.advice.case import UNKNOWN, Case, Found, Saving
from tilewright.report.explain.findings import multiplied_as_floats
from tilewright.schedule.problem import Operand, Problem

LARGE_BYTES = 1 << 16  # of a weight, so that what rounds its packed form up to whole tiles is small beside it
MULTIPLY_CODES = "multiply codes and scale the accumulator: "  # before what this rule says of a gemm that it left


def pairs_in_epilogues(case: Case) -> Iterator[Found]:
    """Values that are rounded to codes and back between a product and what follows it in the same kernel."""
    for i, _, node in case.products(Gemm, Attention):
        stores = stores_of(node)
        dependent = depends_on_acc(stores)
        for pair in toposort(stores):
            rounded = pair.src[0] if isinstance(pair.op, Dequantize) else None
            if rounded is None or rounded not in dependent or not isinstance(rounded.op, Quantize):
                continue
            value = rounded.src[0]
            if value.dtype is not pair.dtype or not rounded.dtype.is_integer:
                continue
            after = [n for n in toposort(stores) if pair in n.src]
            other = rebuilt(node, operands_of(node), substitute(stores, {pair: value}), node.src)
            before, behind = _before(value, node), _behind(after[0], pair) if after else "the result"
            if behind == "QuantizeLinear":
                kind, title = "quantised-twice", f"a value is quantised twice in a row behind {before}"
                change = "keep one of the two pairs of QuantizeLinear and DequantizeLinear"
            else:
                kind, title = "qdq-in-epilogue", f"a QDQ pair between {before} and {behind}"
                change = f"quantise behind {behind}: leave the QuantizeLinear and DequantizeLinear before it out"
            why = f"each result is rounded to {rounded.dtype} and back before {behind}, which costs time and accuracy"
            yield Found(kind, title, why, change, (i,), case.instead(i, other))


def _before(value: Node, node: Node) -> str:
    """The operation whose result is rounded, in the words of a model; a product's scales are a part of it."""
    what = "MatMul" if isinstance(node.op, Gemm) else "attention"
    while not isinstance(value.op, Acc):
        if isinstance(value.op, Map) and value.op.fn != "multiply":
            return "the bias" if value.op.fn == "add" else op_name(value)
        if isinstance(value.op, Quantize):
            return "QuantizeLinear"
        inner = [s for s in value.src if s in depends_on_acc((value,))]
        if len(inner) != 1:
            return op_name(value)
        value = inner[0]
    return what


def _behind(reader: Node, pair: Node) -> str:
    """The operation that reads a pair's value, in the words of a model."""
    if isinstance(reader.op, Quantize):
        return "QuantizeLinear"
    if isinstance(reader.op, Map) and reader.op.fn == "add":
        other = reader.src[1] if reader.src[0] is pair else reader.src[0]
        return "its bias" if max(other.shape[:-1], default=1) == 1 or _is_row(other) else "the residual"
    return op_name(reader)


def _is_row(node: Node) -> bool:
    """Tell whether a side input is one row, repeated."""
    while isinstance(node.op, (*VIEWS, Convert)):
        node = node.src[0]
    return max(node.shape[:-1], default=1) == 1


def attention_of_codes(case: Case) -> Iterator[Found]:
    """Attention over integer codes, which its kernel multiplies as floats, where other codes would be multiplied as they are.

    On a CPU no codes are, and a model can save nothing: the account of the attention says so alone (`Reasons.near_misses`).
    """
    for i, step, node in case.products(Attention):
        said = multiplied_as_floats(node)
        if said is None or step.decision is None or case.program.target.kind == "cpu":
            continue
        change = "quantise them to fp8, which attention kernels multiply (--fp8 --fp8-attention of a model in float)"
        yield Found("attention-of-codes", "attention over integer codes is multiplied as floats", said, change, (i,), UNKNOWN)


def _arithmetic_us(case: Case, ops: int, operand: str) -> float | None:
    rate = case.ceilings.peak_gops.get(operand) if case.ceilings is not None else None
    return ops / rate / 1e3 if rate else None


def scales_along_k(case: Case) -> Iterator[Found]:
    """Products of codes that are multiplied as floats, since a scale or a zero point varies along K."""
    for i, _, node in case.products(Gemm):
        assert isinstance(node.op, Gemm)
        said = next((s for s in case.reasons.near_misses(node) if s.startswith(MULTIPLY_CODES) and "along K" in s), None)
        if said is None or not all(_quantised(root) for root in operands_of(node)):
            continue
        why = said.removeprefix(MULTIPLY_CODES) + f", so the codes are dequantised first and multiplied in {node.op.lhs.dtype}"
        change = "give the left operand a scale for each row or one for all, and the weight one for each output column"
        saving = _at_rate_of_codes(case, i)
        yield Found("scale-along-k", "a scale along K keeps codes from being multiplied", why, change, (i,), saving)


def _quantised(root: Node) -> bool:
    return any(isinstance(n.op, Dequantize) and n.src[0].dtype.bits <= 8 for n in toposort((root,)))


def _at_rate_of_codes(case: Case, i: int) -> Saving:
    """The saving if a step multiplied s8, by the measured rates of its own type and of that."""
    decision = case.program.steps[i].decision
    if decision is None or case.ceilings is None or not isinstance(decision.problem, Problem):
        return UNKNOWN
    own = case.ceilings.limit_us(decision.problem.ops, 0, decision.problem.lhs.dtype)
    other = _arithmetic_us(case, decision.problem.ops, "s8")
    if not own or not other or other >= own:
        return UNKNOWN
    return case.part(i, 1 - other / own, "the measured rates of both types")


def products_left_in_float(case: Case) -> Iterator[Found]:
    """Products by weights of 8-bit codes whose other operand was not quantised, in a model that multiplies codes elsewhere."""
    problems = {i: s.decision.problem for i, s, _ in case.products(Gemm) if s.decision is not None}
    integer = [i for i, p in problems.items() if isinstance(p, Problem) and p.acc.dtype.is_integer]
    if not integer:
        return
    for i, p in problems.items():
        if not isinstance(p, Problem) or i in integer or case.ceilings is None:
            continue
        weight = _weight_codes(p)
        if weight is None or p.lhs.dequantize is not None:
            continue
        why = (
            f"its weight is codes of {weight.stored.dtype}, its left operand {p.lhs.stored.dtype}, so it is multiplied in "
            f"{p.lhs.dtype}; {len(integer)} other products of this model multiply codes"
        )
        change = "quantise what it reads, too: a QuantizeLinear and DequantizeLinear pair is missing before it"
        title = "a product of a quantised model is left in float"
        yield Found("product-left-in-float", title, why, change, (i,), _at_rate_of_codes(case, i))


def _weight_codes(problem: Problem) -> Operand | None:
    """The right operand, if it is a constant that is stored as integer codes of 8 bits."""
    rhs = problem.rhs
    constant = rhs.source is not None and problem.weights[rhs.source]
    return (
        rhs if constant and rhs.stored.dtype.is_integer and rhs.stored.dtype.bits == 8 and rhs.dequantize is not None else None
    )


def widened_weights(case: Case) -> Iterator[Found]:
    """Constant weights of 8-bit codes that a kernel packs as 16 or 32 bits, where memory sets the time."""
    for i, step, _ in case.products(Gemm):
        decision = step.decision
        if decision is None or case.ceilings is None or not isinstance(decision.problem, Problem):
            continue
        problem, packed = decision.problem, decision.kernel.packed_bytes
        rhs = problem.rhs
        if rhs.source is None or not problem.weights[rhs.source] or rhs.stored.dtype.bits != 8:
            continue
        stored = rhs.stored.size_bytes
        to = 8 * packed / max(rhs.stored.elements, 1)
        read = case.ceilings.read_gbps
        if (
            to < 15
            or not read
            or stored < LARGE_BYTES
            or packed / read / 1e3 < case.ceilings.limit_us(problem.ops, 0, problem.lhs.dtype)
        ):
            continue
        bits = 16 if to < 31 else 32
        why = (
            f"{decision.kernel.candidate} packs its weight of {rhs.stored.dtype} as {bits} bits, since nothing here multiplies "
            f"{problem.lhs.stored.dtype} by {rhs.stored.dtype} as they are; with so few rows the memory sets the time"
        )
        change = "quantise the left operand, too, so that codes are multiplied, or keep the weight in 4 bits (quantize_, --w4)"
        us = (packed - stored) / read / 1e3
        saving = Saving(us, f"{(packed - stored) / 1e6:,.1f} MB less to read a call, at the measured bandwidth")
        yield Found("widened-weight", f"a constant weight of 8 bits is widened to {bits}", why, change, (i,), saving)
