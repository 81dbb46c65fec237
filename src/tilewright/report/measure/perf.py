"""Performance of a program: the time of the whole, and of each step on the values it has there."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilewright.hardware.load import Meter
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, Dequantize, Gemm, LayerNorm, Map, Quantize, Reduce, Select, Softmax
from tilewright.report.explain.advice import advise
from tilewright.report.explain.advice.case import Case
from tilewright.report.explain.choices import (
    attribution,
    attribution_words,
    elsewhere_words,
    fastest_first,
    provisional_words,
    settings,
    way_of,
    ways_of,
    ways_words,
)
from tilewright.report.explain.findings import Reasons, fallback, unfused
from tilewright.report.explain.folded import Time, fold, likeness
from tilewright.report.explain.names import step_names
from tilewright.report.measure.inputs import Feed
from tilewright.report.measure.timing import Rounds, Timer, Times, device_us
from tilewright.report.measure.traffic import between, sent_bytes, traffic, traffic_words
from tilewright.report.measure.work import candidate_of, describe, steps_per_layer, work_of
from tilewright.report.program import made_here, restored, target_name, tensor_types
from tilewright.report.schema import Perf, Quantized, Rejected
from tilewright.report.schema import Step as StepRow
from tilewright.report.words import us
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step
from tilewright.schedule.race import scatter
from tilewright.threads import count

if TYPE_CHECKING:
    from tilewright.ir.graph import Value


WITHIN_S = 6.0
WHOLE = 1 / 3  # of the time, for the whole program
IN_PLACE = 1 / 10  # for its steps in their turn; the rest is for each by itself
MOST_IN_PLACE = 5  # calls
LITTLE = 0.01  # of a time, that needs no words
LATE, LEAST_S = 3.0, 1.0  # times the time for steps, and seconds, after which one step of those that are alike is timed
ADVISING_S = 2.0  # for advice, where the time is over
UNTIMED = "The time was over for {some} of {all} steps: each is taken to be as long as one like it that was timed."
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
    timer: Timer = device_us,
    ends: float = math.inf,
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
        timer: the clock.
        ends: when the time for the report is over, by `time.monotonic`: advice is looked for a little longer at most.
    """
    inputs = bind(program, feeds)
    device = program.target.device
    alone = len(program.steps) == 1 and program.steps[0].decision is not None  # a kernel that is launched by itself
    share = Rounds.of(iterations, (1 - WHOLE - IN_PLACE) * within_s / max(len(program.steps), 1))
    names = step_names(program)
    taken: list[Times] = []
    of_kind: dict[Hashable, Times] = {}
    steps_s = max(LATE * (1 - WHOLE - IN_PLACE) * within_s, LEAST_S) if iterations is None and timer is device_us else math.inf
    late, untimed = math.inf, 0

    def time_step(step: Step, values: list[Value]) -> None:
        nonlocal late, untimed
        late = min(late, time.monotonic() + steps_s)
        known = of_kind.get(likeness(step)) if time.monotonic() > late else None
        if known is not None:
            taken.append(known)
            untimed += 1
            return
        if progress is not None:
            progress(len(taken), len(program.steps), names[len(taken)])
        with program.giving_way():
            taken.append(timer(lambda: step.run(values), device, share, captured=step.decision is not None))
        of_kind[likeness(step)] = taken[-1]

    meter = Meter(device, count())
    with restored(program):
        whole = timer(lambda: program.run(inputs), device, Rounds.of(iterations, WHOLE * within_s), captured=alone)
        turns = timer is device_us and device == "cpu" and time.monotonic() < ends
        in_place = in_place_us(program, inputs, IN_PLACE * within_s) if turns else None
        program.run(inputs, time_step)
    times = [t.median_us for t in taken]
    ceilings = ceilings if check is None else check(times)
    works = [work_of(step) for step in program.steps]
    rows = [_row(*row, ceilings) for row in zip(names, program.steps, taken, strict=True)]
    cost = dict(enumerate(round(us, 3) for us in times))
    decisions = [s.decision for s in program.steps if s.decision is not None]
    choices = ways_of(decisions)
    reasons = Reasons(program)
    folded = fold(program, [Time(round(us, 3), "measured") for us in times], ceilings)
    advice, unlooked = advise(Case(program, folded, ceilings, reasons), ends=max(ends, time.monotonic() + ADVISING_S))
    noise = meter.load().noise or scatter("calls of the program", whole.us)
    steps_us, low_high = round(sum(times), 3), whole.quartiles_us
    report = Perf(
        noise="; ".join(words for words in (noise, provisional_words(decisions)) if words),
        limits_noise=ceilings.noise,
        program=name,
        target=target_name(program.target),
        total_us=round(whole.median_us, 3),
        verified=all(d.verified for d in decisions),
        steps=rows,
        unfused=unfused(program, reasons, cost),
        fallback=fallback(program, cost),
        inputs=[f.shown for f in feeds],
        steps_per_layer=steps_per_layer(program.steps),
        quantized=quantized,
        attribution=attribution(rows),
        summary=[
            *attribution_words(rows, program.target.kind),
            *ways_words(choices),
            *elsewhere_words(decisions),
            *_launched_words(program, whole, taken),
            *traffic_words(rows),
            *([UNTIMED.format(some=untimed, all=len(taken))] if untimed else []),
            *([unlooked] if unlooked else []),
        ],
        choices=choices,
        made=made_here(),
        counts=folded.counts,
        groups=folded.groups,
        layers=folded.layers,
        advice=advice,
        total_low_us=None if low_high is None else round(low_high[0], 3),
        total_high_us=None if low_high is None else round(low_high[1], 3),
        steps_us=steps_us,
        in_place_us=None if in_place is None else round(in_place, 3),
        rest=rest_words(whole, taken, in_place, program.target.kind, noisy=bool(noise)),
        traffic=traffic(program, reasons.why, rows),
    )
    counted = tuple(arithmetic(step, work.ops) for step, work in zip(program.steps, works, strict=True))
    return Measured(report, whole, tuple(w.memory_bound(ceilings) for w in works), counted, ceilings)


def in_place_us(program: Executable, inputs: Sequence[torch.Tensor], within_s: float) -> float:
    """The time in µs of all steps on a CPU, each once in its turn, when the steps before it have had the caches: the sum of
    each one's median over a few calls."""
    times: list[list[float]] = []

    def once(step: Step, values: list[Value]) -> None:
        with program.giving_way():
            start = time.perf_counter()
            step.run(values)
            times[-1].append(1e6 * (time.perf_counter() - start))

    began = time.perf_counter()
    while not times or (len(times) < MOST_IN_PLACE and (time.perf_counter() - began) * (1 + 1 / len(times)) < within_s):
        times.append([])
        program.run(inputs, once)
    return sum(statistics.median(each) for each in zip(*times, strict=True))


def rest_words(whole: Times, steps: Sequence[Times], in_place_us: float | None, kind: str, *, noisy: bool = False) -> str:
    """The words on what a call of the whole program takes beside the sum of its steps, or less than that; "" of a program of
    one step.

    Args:
        whole, steps: timings of both.
        in_place_us: of all steps in their turn; None where that was not timed.
        kind: of the device.
        noisy: other processes had a part in the times.
    """
    rest = whole.median_us - sum(t.median_us for t in steps)
    low, high = whole.quartiles_us or (whole.median_us, whole.median_us)
    if len(steps) < 2:
        return ""
    if abs(rest) <= max(high - low, LITTLE * whole.median_us):
        return "within the spread of single calls"
    if noisy and rest < 0:
        return "the steps, timed one by one, took longer than the program: the machine was busier while they were timed"
    if noisy:
        return "a busy machine does not let its parts be told apart"
    if rest < 0:
        once = (
            "a call wakes threads once, and has no Python between generated kernels"
            if kind == "cpu"
            else "in a call the next one begins before the last one ends"
        )
        return f"steps one by one take longer: {once}"
    if in_place_us is None:
        return "what lies between the steps, and data that other steps have put out of the caches"
    between = min(rest, max(0.0, whole.median_us - in_place_us))
    farther = rest - between
    said = [f"{us(farther)} for data that other steps have put out of the caches"] if farther > LITTLE * rest else []
    said += [f"{us(between)} in Python between the steps"] if between > LITTLE * rest else []
    return ", ".join(said)


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


def _row(name: str, step: Step, times: Times, ceilings: Target) -> StepRow:
    work, us = work_of(step), times.median_us
    sent = sum(sent_bytes(n) for n in between(step))
    waited = statistics.median(times.between_us) if times.between_us else 0.0  # 0: a kernel sends by itself
    limit = work.limit_us(ceilings)
    decision = step.decision
    rejected = () if decision is None else fastest_first(decision.rejected)
    return StepRow(
        name=name,
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
        sent_bytes=sent,
        between_us=round(waited, 3) if sent and waited else None,
        low_us=None if times.quartiles_us is None else round(times.quartiles_us[0], 3),
        high_us=None if times.quartiles_us is None else round(times.quartiles_us[1], 3),
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
