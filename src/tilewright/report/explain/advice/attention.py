"""Advice on attention: masks that hide what kernels could leave out, and softmaxes that a model reads itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewright.ir.anchor import operands_of
from tilewright.ir.constant import repeating_value
from tilewright.ir.expression import outside
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Attention, Gemm, Item, Softmax
from tilewright.report.explain.advice.case import Case, Found
from tilewright.rules.attention import DROWNS

HIDES = -10.0  # exp of it is 4.5e-5: a mask that adds less to every score behind a query means to hide it
ATTENTION = "softmax between two products is attention: "  # before what this rule says of a place that it left
MOST = 1 << 24  # elements of a mask that are looked at


def finite_causal_masks(case: Case) -> Iterator[Found]:
    """Masks that would be causality, were what they add to hidden scores -inf."""
    for i, _, node in case.products(Attention):
        op, operands = node.op, operands_of(node)
        assert isinstance(op, Attention)
        if op.causal != "no" or len(operands) < 4:
            continue
        queries, keys = node.src[0].shape[-2] if not op.operands else operands[0].shape[-2], operands[1].shape[-2]
        mask = outside(operands[3], node.src)
        for part in toposort((mask,)):
            number = _hidden_by(part, queries, keys)
            if number is None:
                continue
            least = "-inf (or torch.finfo(dtype).min)"
            why = (
                f"it adds {number:g} to the scores of later keys, and a score that is larger by {-number:g} than all others "
                "would still be seen, so that no kernel may leave them out"
            )
            change = f"write {least} where the mask hides, or is_causal=True: kernels then skip what is hidden"
            saving = case.part(i, (1 - (queries + 1) / (2 * keys)), "the share of scores that causality leaves out")
            yield Found("finite-causal-mask", "a mask hides causality behind a finite number", why, change, (i,), saving)
            break


def _hidden_by(node: Node, queries: int, keys: int) -> float | None:
    """The largest number that a constant adds to the score of a key behind its query, if that is a finite one that means to
    hide, and 0 to all others; None of anything else."""
    if not node.constant or not node.dtype.is_float or node.shape[-2:] != (queries, keys) or min(queries, keys) < 2:
        return None
    value = repeating_value(node, MOST)
    if value is None or value.shape[-2:] != (queries, keys):
        return None
    wide = value.double()
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    if not bool(later.any()) or not bool((wide.masked_select(~later) == 0).all()):
        return None
    largest = float(wide.masked_select(later).max())
    return largest if DROWNS < largest <= HIDES else None


def kept_scores(case: Case) -> Iterator[Found]:
    """Softmaxes between two products that are also read elsewhere, so that all scores are written to memory."""
    makers = {n: i for i, s in enumerate(case.program.steps) for n in s.part.nodes}
    for i, _, node in case.products(Gemm):
        said = next((s for s in case.reasons.near_misses(node) if s.startswith(ATTENTION) and "also read elsewhere" in s), None)
        softmax = next((s for s in node.src if _made_by_softmax(s, case, makers)), None) if said else None
        if said is None or softmax is None:
            continue
        first = [makers[s] for s in case.program.steps[makers[softmax]].part.inputs if s in makers]
        steps = (*first, makers[softmax], i)
        why = (
            f"{said.removeprefix(ATTENTION)}: every score is written to memory and read, where attention keeps it in registers"
        )
        change = "do not return or read the weights of attention (output_attentions=False, need_weights=False)"
        saving = case.whole([makers[softmax]])
        yield Found("scores-kept", "attention is taken apart, since its weights are read", why, change, steps, saving)


def _made_by_softmax(node: Node, case: Case, makers: dict[Node, int]) -> bool:
    while isinstance(node.op, Item):
        node = node.src[0]
    i = makers.get(node)
    return i is not None and any(isinstance(n.op, Softmax) for n in case.program.steps[i].part.nodes)
