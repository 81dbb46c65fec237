"""Performance of a program: the time of the whole, and of each step on the values it has there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilewright.hardware.load import Meter
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, Dequantize, Gemm, LayerNorm, Map, Quantize, Reduce, Select, Softmax
from tilewright.report.explain.choices import (
    attribution,
    attribution_words,
    provisional_words,
    settings,
    way_of,
    ways_of,
    ways_words,
)
from tilewright.report.explain.findings import Reasons, fallback, unfused
from tilewright.report.measure.inputs import Feed
from tilewright.report.measure.timing import Rounds, Times, device_us
from tilewright.report.measure.work import candidate_of, describe, steps_per_layer, work_of
from tilewright.report.program import restored, target_name, tensor_types
from tilewright.report.schema import Perf, Quantized, Rejected
from tilewright.report.schema import Step as StepRow
from tilewright.runtime.executable import Executable, Step
from tilewright.schedule.race import scatter
from tilewright.threads import count

if TYPE_CHECKING:
    from tilewright.ir.graph import Value


WITHIN_S = 6.0
WHOLE = 1 / 3  # of the time, for the whole program; the rest for its steps
PROGRESS = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """A performance report and what its table shows beside it.

    Attributes:
        report: what `--json` prints.
        whole: timings of the whole program.
        memory_bound: for each step whether memory, not the matrix unit, sets its limit.
        arithmetic: for each step how many operations it does, products or not.
        ceilings: the machine with its measured rates.
    """

    report: Perf
    whole: Times
    memory_bound: tuple[bool, ...]
    arithmetic: tuple[int, ...]
    ceilings: Target


def measure(
    program: Executable,
    name: str,
    feeds: Sequence[Feed],
    ceilings: Target,
    *,
    iterations: int | None = None,
    within_s: float = WITHIN_S,
    progress: PROGRESS | None = None,
    quantized: Quantized | None = None,
    check: Callable[[Sequence[float]], Target] | None = None,
) -> Measured:
    """Time a program and each of its steps.

    Args:
        program: compiled.
        name: what the report calls it.
        feeds: a value for each input.
        ceilings: the program's target with its measured rates.
        iterations: runs of the whole and of each step; as many as the time allows if None, but five.
        within_s: seconds for all of them.
        progress: called with how many steps are timed, how many there are, and the next one's name.
        quantized: what quantising the model chose, for the report.
        check: told what each step took in µs; gives the ceilings that hold in view of it.
    """
    inputs = bind(program, feeds)
    device = program.target.device
    alone = len(program.steps) == 1 and program.steps[0].decision is not None  # a kernel that is launched by itself
    share = Rounds.of(iterations, (1 - WHOLE) * within_s / max(len(program.steps), 1))
    taken: list[Times] = []

    def time_step(step: Step, values: list[Value]) -> None:
        if progress is not None:
            progress(len(taken), len(program.steps), step.name)
        taken.append(device_us(lambda: step.run(values), device, share, captured=step.decision is not None))

    meter = Meter(device, count())
    with restored(program):
        whole = device_us(lambda: program.run(inputs), device, Rounds.of(iterations, WHOLE * within_s), captured=alone)
        program.run(inputs, time_step)
    times = [t.median_us for t in taken]
    ceilings = ceilings if check is None else check(times)
    works = [work_of(step) for step in program.steps]
    rows = [_row(step, us, ceilings) for step, us in zip(program.steps, times, strict=True)]
    cost = dict(enumerate(round(us, 3) for us in times))
    decisions = [s.decision for s in program.steps if s.decision is not None]
    choices = ways_of(decisions)
    noise = meter.load().noise or scatter("calls of the program", whole.us)
    report = Perf(
        noise="; ".join(words for words in (noise, provisional_words(decisions)) if words),
        program=name,
        target=target_name(program.target),
        total_us=round(whole.median_us, 3),
        verified=all(d.verified for d in decisions),
        steps=rows,
        unfused=unfused(program, Reasons(program), cost),
        fallback=fallback(program, cost),
        inputs=[f.shown for f in feeds],
        steps_per_layer=steps_per_layer(program.steps),
        quantized=quantized,
        attribution=attribution(rows),
        summary=[*attribution_words(rows, program.target.kind), *ways_words(choices), *_launched_words(program, whole, taken)],
        choices=choices,
    )
    counted = tuple(arithmetic(step, work.ops) for step, work in zip(program.steps, works, strict=True))
    return Measured(report, whole, tuple(w.memory_bound(ceilings) for w in works), counted, ceilings)


def _launched_words(program: Executable, whole: Times, steps: Sequence[Times]) -> list[str]:
    """The sentences on how calls reach a GPU, and how many of them a timing takes together."""
    words = [f"Launched {program.launched}."] if program.launched else []
    for what, times in (("the whole program", [whole]), ("steps", steps)):
        several = [t for t in times if t.calls > 1]
        if several:
            most, replayed = max(t.calls for t in several), sum(t.replayed for t in several)
            how = f", {replayed} of {len(several)} replayed as a CUDA graph" if replayed else ""
            words.append(f"Timed between two events of the GPU: {what} up to {most} calls in a row{how}, and pauses between.")
    return words


def bind(program: Executable, feeds: Sequence[Feed]) -> list[torch.Tensor]:
    """The values of the inputs as tensors on the program's device."""
    return program.bind((), {f.shown.name: f.value for f in feeds})


def _row(step: Step, us: float, ceilings: Target) -> StepRow:
    work = work_of(step)
    limit = work.limit_us(ceilings)
    decision = step.decision
    rejected = () if decision is None else decision.rejected
    return StepRow(
        name=step.name,
        kind=step.part.kind,
        problem=describe(step),
        candidate=candidate_of(step),
        schedule="" if decision is None else settings(decision.kernel.schedule),
        time_us=round(us, 3),
        ops=work.ops,
        bytes=work.bytes,
        limit_us=round(limit, 3),
        peak_fraction=round(limit / us, 4) if us > 0 else 0.0,
        rejected=[Rejected(r.candidate, r.why, r.kind, settings(r.schedule)) for r in rejected],
        chosen=way_of(decision) if decision is not None else "",
    )


# Operations an element: subtract, square, two sums, scale, shift, multiply; subtract, exponential, sum, divide.
_PER_ELEMENT = {LayerNorm: 7, Softmax: 4, Quantize: 2, Dequantize: 2, Map: 1, Select: 1}


def arithmetic(step: Step, ops: int) -> int:
    """Operations of a step, `ops` of them those of its products: 0 where it only moves data, or a library's call hides it."""
    if any(isinstance(n.op, (Gemm, Attention)) for n in step.part.nodes):
        return ops
    return sum(_of(n) for n in step.part.nodes)


def _of(node: Node) -> int:
    if isinstance(node.op, Reduce):
        return sum(t.elements for s in node.src for t in tensor_types(s))
    each = next((n for kind, n in _PER_ELEMENT.items() if isinstance(node.op, kind)), 0)
    return each * sum(t.elements for t in tensor_types(node))
