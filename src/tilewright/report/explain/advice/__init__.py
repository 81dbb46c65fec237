"""Advice: places of the model whose change would save time, found in the compiled program, in µs."""

from __future__ import annotations

import math
import time
from itertools import takewhile

from tilewright.report.explain.advice.attention import finite_causal_masks, kept_scores
from tilewright.report.explain.advice.case import Case, Finder, Found
from tilewright.report.explain.advice.outside import graph_breaks, operations_outside, unfused_steps
from tilewright.report.explain.advice.positions import logits_of_all_positions
from tilewright.report.explain.advice.products import (
    epilogues_in_f64,
    linear_chains,
    mixed_operands,
    products_in_f64,
    shared_weights,
    siblings_apart,
    wasted_tiles,
)
from tilewright.report.explain.advice.quantised import (
    attention_of_codes,
    pairs_in_epilogues,
    products_left_in_float,
    scales_along_k,
    widened_weights,
)
from tilewright.report.schema import Advice
from tilewright.report.words import ranged

FINDERS: tuple[Finder, ...] = (
    operations_outside,
    unfused_steps,
    graph_breaks,
    finite_causal_masks,
    kept_scores,
    pairs_in_epilogues,
    attention_of_codes,
    scales_along_k,
    products_left_in_float,
    widened_weights,
    wasted_tiles,
    products_in_f64,
    epilogues_in_f64,
    mixed_operands,
    siblings_apart,
    shared_weights,
    linear_chains,
    logits_of_all_positions,
)
ALWAYS = ("graph-break",)  # whose cost is more than what is counted
LEAST = 0.002  # of the program's time: what would save less is not worth a change


def advise(case: Case, *, ends: float = math.inf) -> tuple[list[Advice], str]:
    """The changes to the model, what saves most first; places alike are one, and what would save next to nothing is left out.

    Advice whose saving nothing tells stands last.

    Args:
        case: the program with what reports know of it.
        ends: the time by `time.monotonic` after which nothing more is looked for.

    Returns:
        tuple: the advice; and a sentence on what was not looked for, "" if all was.
    """
    alike: dict[tuple[str, str, str], list[Found]] = {}
    left = [*FINDERS]
    while left and time.monotonic() < ends:
        for found in takewhile(lambda _: time.monotonic() < ends, left[0](case)):
            alike.setdefault((found.kind, found.title, found.change), []).append(found)
        if time.monotonic() < ends:  # else it may have been cut short
            del left[0]
    late = f"The time was over: {len(left)} of {len(FINDERS)} kinds of advice were not looked for to the end." if left else ""
    made = [_together(group, case) for group in alike.values()]
    least = LEAST * case.total_us
    worth = (a for a in made if a.saves_us is None or a.kind in ALWAYS or a.saves_us > least)
    return sorted(worth, key=lambda a: -(a.saves_us or 0.0)), late


def _together(group: list[Found], case: Case) -> Advice:
    first = group[0]
    known = [f.saving.us for f in group if f.saving.us is not None]
    steps = sorted({i for f in group for i in f.steps})
    where = dict.fromkeys(w for f in group for w in f.where) or dict.fromkeys(case.folded.names[i] for i in steps)
    biggest = max(group, key=lambda f: f.saving.us or 0.0)
    return Advice(
        kind=first.kind,
        title=first.title,
        where=[ranged(where)],
        steps=steps,
        why=ranged(dict.fromkeys(f.why for f in group), most=1),
        change=first.change,
        saves_us=round(sum(known), 3) if known else None,
        basis=biggest.saving.basis,
    )
