"""`race`: somebody else's functions beside ours: verified, timed in turns, explained."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from tilewright.any_shape import AnyShape
from tilewright.compiler import compile
from tilewright.errors import InputError, UnsupportedError, check_type, say
from tilewright.hardware.load import uncrowded
from tilewright.ir.evaluate import evaluate, evaluate_nodes
from tilewright.ir.graph import Node, label_of
from tilewright.ir.notation import parse
from tilewright.ir.ops import ALIASES, Input, Item
from tilewright.ir.types import TensorType
from tilewright.program import Program, Report
from tilewright.report.explain.explain import explain_program
from tilewright.report.measure.compare import Gap, element_gap, exact_gap, rms_gap
from tilewright.report.measure.inputs import Feed, check_memory, make_feeds
from tilewright.report.measure.perf import bind
from tilewright.report.measure.rounds import ratio
from tilewright.report.measure.verify import coarsest_rounding, rms_bound
from tilewright.report.measure.work import measured_ceilings, work_of
from tilewright.report.program import target_name
from tilewright.report.schema import Contender, Race
from tilewright.schedule.candidate import Schedule
from tilewright.schedule.contest import ContestBench, ContestProblem, Function, contender
from tilewright.schedule.expected import Expected, expect
from tilewright.schedule.fork_server import UnavailableError
from tilewright.schedule.problem import FusionProblem, fusion_of
from tilewright.schedule.race import Race as Laps
from tilewright.schedule.search import TIE_BAND
from tilewright.schedule.worker import HostedBench, carried
from tilewright.threads import threaded

OURS = "tilewright"
BUDGET_S, RACE_S = 20.0, 2.0
LIMIT_S = 30.0  # in which a function that is compiled on its first call has to come back
FURTHEST = 32.0  # times the bound on the root mean square, that the error of one element may be
LEAST = 1e-30

T = TypeVar("T")


@threaded
def race(
    problem: object,
    functions: Sequence[Function] | Mapping[str, Function],
    *,
    example_inputs: Sequence[object] | Mapping[str, object] | None = None,
    inputs: Mapping[str, object] | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    budget_s: float = BUDGET_S,
    race_s: float = RACE_S,
    limit_s: float = LIMIT_S,
    threads: int | None = None,
) -> Report[Race]:
    """Functions of somebody else beside the program that we compile: which are right, by how much, and how fast each is.

    A function takes the problem's inputs, dense tensors on the device, as arguments in their order, and gives its result, or
    several in a tuple; constants of a module or of a graph are its own to hold. It may write neither to its inputs nor beside
    its results. It may not replace functions of torch or `time`, nor leave threads at work.

    All are called on other data, then on the same in that memory and in other memory, and several times more. They take turns
    while they are timed. Before each call the elements of each input are shifted on (on a GPU the inputs count as written to,
    `Tensor._version`), and at the end some elements are others. So what remembers results does its work each time, or is wrong.
    Functions run in a process of their own, so that one that crashes or does not come back is out, and the others go on. Where
    a function cannot be sent there, all run in this process, which `notes` say.

    Args:
        problem: one product in the notation of `tilewright gemm`, such as "f32[64,32] @ f32[32,16] + bias"; a Graph; or
            anything else that `compile` takes.
        functions: in the order of the table, under their own names, or by name.
        example_inputs: to trace an nn.Module with.
        inputs: values of inputs by name; the others are random, scaled to what they meet.
        device: see `compile`.
        seed: of random data.
        budget_s: seconds for compiling ours.
        race_s: seconds for timing all.
        limit_s: seconds that a function may give no sign of life; beyond, it is out.
        threads: threads on a CPU, for all; None is torch's number, but no more than the machine has for this process.

    Returns:
        Report: printed or in a notebook, a table, the reasons why our kernels were chosen, and what is wrong with those that
            are; `facts` is all of it as data (`report.schema.Race`).

    Raises:
        InputError: the problem cannot be read, a function is none, or a name is taken.
        UnsupportedError: the problem keeps state between calls, or gives something else than tensors.
    """
    named = _named(functions)
    for name, seconds in (("race_s", race_s), ("limit_s", limit_s)):
        check_type(seconds, Real, name, "a number of seconds")
        if not 0 < seconds < math.inf:
            raise InputError(f"{seconds} seconds", where=name, hint="more than 0")
    program = compile(_read(problem), example_inputs=example_inputs, device=device, budget_s=budget_s, threads=threads)
    if isinstance(cast("object", program), AnyShape):
        what = "the problem leaves extents open, and functions race at one shape"
        raise UnsupportedError(what, hint="a Graph or example inputs of that shape")
    source = program.source
    if source.state:
        raise UnsupportedError("the problem keeps state between calls, and functions have none", where=source.name)
    if not all(isinstance(n.type, TensorType) for n in (*source.inputs, *source.outputs)):
        raise UnsupportedError("the problem takes or gives something else than tensors", where=source.name)
    check_memory(source)
    feeds = make_feeds(source, seed=seed, given=inputs)
    contest, gaps = _contest(program, feeds, problem)
    entries = [_Entry(OURS, partial(_ours, program)), *(_Entry(name, f) for name, f in named.items())]
    laps, notes = _run(contest, program, entries, race_s, limit_s)
    return _report(program, contest, feeds, entries, laps, gaps, notes)


@dataclass
class _Entry:
    """A contender, what refused it if anything did, and what it gives when it is called again (`ContestBench.results`)."""

    name: str
    function: Function
    why: str | None = None
    results: tuple[list[torch.Tensor], list[torch.Tensor], str | None] | None = None


def _ours(program: Program, *inputs: torch.Tensor) -> object:
    return program.run(inputs)


def _named(functions: object) -> dict[str, Function]:
    """The functions by name.

    Raises:
        InputError: there are none, one is no function, or two would have one name.
    """
    check_type(functions, (Sequence, Mapping), "functions", "a list of functions, or a dictionary of them by name")
    given = cast("Sequence[object] | Mapping[str, object]", functions)
    pairs = list(given.items()) if isinstance(given, Mapping) else [(_name(f), f) for f in given]
    found: dict[str, Function] = {}
    for name, f in pairs:
        if not callable(f):
            raise InputError(f"{name!r} is a {type(f).__name__}, and no function", where="functions")
        if name == OURS or name in found:
            hint = "a dictionary of functions by name"
            raise InputError(f"two contenders are called {name!r}", where="functions", hint=hint)
        found[name] = f
    if not found:
        raise InputError("no function is given", where="functions", hint="compile(...).perf() times ours alone")
    return found


def _name(function: object) -> str:
    while isinstance(function, partial):
        function = cast("partial[object]", function).func
    return str(getattr(function, "__name__", type(function).__name__))


def _read(problem: object) -> object:
    """The problem as `compile` takes it."""
    notation = isinstance(problem, str) and "@" in problem and "\n" not in problem and not Path(problem[:200]).exists()
    return parse(cast("str", problem)) if notation else problem


@uncrowded()
def _contest(
    program: Program, feeds: Sequence[Feed], problem: object
) -> tuple[ContestProblem, Callable[[int, torch.Tensor], tuple[Gap, str]]]:
    """The problem as functions are given it, and how far a result of a number lies from the right one, with the unit of that.

    Where the program is one step, its results have that kernel's bounds. Else they are judged as `verify` judges the results of
    a program: by their root mean square.
    """
    source = program.source
    values = [t.detach().cpu().contiguous() for t in bind(program, feeds)]
    bounded = _by_step(program, values)
    if bounded is not None:
        e = bounded

        def gap(i: int, got: torch.Tensor) -> tuple[Gap, str]:
            r, low, high = e.reference[i], e.low[i], e.high[i]
            judged = exact_gap(got, r) if e.exact[i] else element_gap(got, r, low, high)
            return replace(judged, **_furthest(got, r, low, high)), "element"
    else:
        with torch.no_grad():
            reference = cast("list[torch.Tensor]", evaluate(source, values, float64=True))
        coarsest = [coarsest_rounding(n) for n in source.outputs]
        e = _as_a_whole(reference, coarsest)

        def gap(i: int, got: torch.Tensor) -> tuple[Gap, str]:
            rounding = coarsest[i]
            if rounding is None:
                return exact_gap(got, e.reference[i]), "element"
            return rms_gap(got, e.reference[i], rms_bound(rounding)), "root mean square"

    labels = tuple(label_of(n) for n in source.inputs)
    types = [tuple(n.tensor for n in nodes) for nodes in (source.inputs, source.outputs)]
    name = problem if isinstance(problem, str) and len(problem) <= 200 and "\n" not in problem else source.name
    views = tuple(_is_view(n) for n in source.outputs)
    return ContestProblem(name, labels, types[0], types[1], tuple(values), e, views), gap


def _is_view(node: Node) -> bool:
    """Tell whether a result is an input seen in some way."""
    while isinstance(node.op, ALIASES):
        node = node.src[0]
    return isinstance(node.op, Input)


def _by_step(program: Program, values: Sequence[torch.Tensor]) -> Expected | None:
    """The results of a program of one step with the bounds of its problem; None of any other."""
    step, graph = program.steps[0], program.graph
    if len(program.steps) != 1 or step.decision is None or not set(graph.outputs) <= set(step.part.outputs):
        return None
    problem, part = step.decision.problem, step.part
    fused = isinstance(problem, FusionProblem)
    taken = fusion_of(part.inputs, part.outputs)[1] if fused else part.nodes[0].src

    def expected(device: str) -> Expected:
        given: dict[Node, Any] = {n: v.to(device) for n, v in zip(graph.inputs, values, strict=True)}
        with torch.no_grad(), nullcontext() if device == "cpu" else torch.device(device):
            sources = [t.to(device) for t in cast("list[torch.Tensor]", evaluate_nodes(taken, given))]
            return expect(problem, sources)

    try:
        found = expected(program.target.device)
    except RuntimeError:  # a GPU without the memory, or without an operation of the oracle's
        found = expected("cpu")

    def picked(tensors: Sequence[T]) -> tuple[T, ...]:
        at = [part.outputs.index(n) if fused else n.op.index if isinstance(n.op, Item) else 0 for n in graph.outputs]
        return tuple(tensors[i] for i in at)

    def on_cpu(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(t.cpu() for t in picked(tensors))

    reference, low, high, width = map(on_cpu, (found.reference, found.low, found.high, found.width))
    return Expected(reference, low, high, width, picked(found.exact))


def _furthest(got: torch.Tensor, reference: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> dict[str, float]:
    """The largest error of an element, and what it may be there; a NaN on one side alone is an infinite one."""
    g, r = got.double().reshape(-1), reference.double().reshape(-1)
    off = torch.where((g == r) | (g.isnan() & r.isnan()), torch.zeros_like(g), (g - r).abs().nan_to_num(math.inf, math.inf))
    if not off.numel():
        return {"error": 0.0, "bound": 0.0}
    at = int(off.argmax())
    allowed = max(float(high.double().reshape(-1)[at] - r[at]), float(r[at] - low.double().reshape(-1)[at]))
    return {"error": float(off[at]), "bound": allowed if math.isfinite(allowed) else 0.0}


def _as_a_whole(reference: Sequence[torch.Tensor], coarsest: Sequence[float | None]) -> Expected:
    """Bounds on the mean of the errors, and wide ones on each."""
    low, high, width = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for r, rounding in zip(reference, coarsest, strict=True):
        exact = r.double()
        bound = 0.0 if rounding is None else rms_bound(rounding)
        finite = exact[exact.isfinite()]
        slack = bound * max(float(finite.square().mean().sqrt()) if finite.numel() else 0.0, LEAST)
        off = torch.where(exact.isfinite(), FURTHEST * (slack + bound * exact.abs()), torch.zeros_like(exact))
        low.append(exact - off)
        high.append(exact + off)
        width.append(torch.full_like(exact, slack))
    return Expected(tuple(reference), tuple(low), tuple(high), tuple(width), tuple(c is None for c in coarsest))


def _run(
    contest: ContestProblem, program: Program, entries: Sequence[_Entry], race_s: float, limit_s: float
) -> tuple[Laps, list[str]]:
    """Examine all contenders, and have those that are right take turns; with notes on how that was done."""
    try:
        sent = [carried(e.function) for e in entries]
        return _raced(HostedBench(contest, program.target, {}, limit_s=limit_s), entries, sent, race_s), []
    except UnavailableError as error:
        why = str(error) or "processes of their own are switched off"
    for entry in entries:
        entry.why = entry.results = None
    here = _raced(ContestBench(contest, program.target, {}, watched=True), entries, [None] * len(entries), race_s)
    return here, [f"all ran in this process, where nothing ends one that does not come back: {why}"]


def _raced(bench: ContestBench | HostedBench, entries: Sequence[_Entry], sent: Sequence[bytes | None], race_s: float) -> Laps:
    """The race on a bench.

    Raises:
        UnavailableError: a function arrived at no other process.
    """
    try:
        for key, entry in enumerate(entries):
            attempt = bench.attempt(key, contender(entry.name, entry.function, sent[key]), Schedule())
            entry.why = attempt.why
            if attempt.fault is not None and attempt.fault.kind == "unbuilt":
                raise UnavailableError(f"{entry.name}: {attempt.why}")
            if attempt.fault is not None and attempt.fault.kind == "wrong":
                entry.results = bench.results(key)
        racing = [key for key, entry in enumerate(entries) if entry.why is None]
        laps = bench.times(racing, race_s) if racing else Laps({})
        for key in racing:
            if not laps.laps[key].wall_us:
                entries[key].why = bench.lost[key].why
            else:  # it may have gone wrong while it was timed
                entries[key].results = bench.results(key)
        return laps
    finally:
        bench.close()


def _report(
    program: Program,
    contest: ContestProblem,
    feeds: Sequence[Feed],
    entries: Sequence[_Entry],
    laps: Laps,
    gap: Callable[[int, torch.Tensor], tuple[Gap, str]],
    notes: list[str],
) -> Report[Race]:
    from tilewright.report.text.race_table import print_race

    ceilings, said = measured_ceilings(program)
    for note in said:
        say(note)
    limit_us = sum(work_of(s).limit_us(ceilings) for s in program.steps)
    rows = [_row(key, e, contest, laps, gap, limit_us) for key, e in enumerate(entries)]
    right = [key for key, row in enumerate(rows) if row.right]
    best = min(right, key=laps.us, default=None)
    facts = Race(
        noise=laps.noise,
        limits_noise=ceilings.noise,
        program=contest.name,
        target=target_name(program.target),
        inputs=[f.shown for f in feeds],
        contenders=rows,
        fastest="" if best is None else rows[best].name,
        verdict=_verdict(rows, right, laps),
        limit_us=round(limit_us, 3),
        products=explain_program(program, contest.name, ceilings).products,
        notes=notes,
    )
    return Report(facts, lambda out: print_race(out, facts))


def _row(
    key: int,
    entry: _Entry,
    contest: ContestProblem,
    laps: Laps,
    gap: Callable[[int, torch.Tensor], tuple[Gap, str]],
    limit_us: float,
) -> Contender:
    error, bound, measure, notes = None, None, "", list[str]()
    found = entry.results
    if found is not None and _fit(found[0], contest):
        gaps = [gap(i, t) for i, t in enumerate(found[0])]
        worst, measure = max(gaps, key=lambda g: (g[0].why is not None, g[0].ratio, g[0].bound))
        if worst.why is not None or entry.why is None:  # else it was wrong once, and is right now
            error, bound = worst.error, worst.bound
        if worst.why is not None and entry.why is None:
            entry.why = f"the result is wrong after many calls: {worst.why}"
        if found[2] is not None and entry.why is None:
            entry.why = found[2]
        if not all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True)) and not any(t.isnan().any() for t in found[0]):
            notes.append("its results are not the same to the last bit when it is called again")
        if not all(t.is_contiguous() for t in found[0]):
            notes.append("its result is right, but not dense: whoever reads it may have to copy it")
    right, own, ours = entry.why is None, laps.laps.get(key), laps.laps.get(0)
    if not right or own is None:
        return Contender(
            name=entry.name, right=right, why=entry.why, error=error, bound=bound, measure=measure, notes=notes if right else []
        )
    times = sorted(own.wall_us)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    if len(times) == 1:
        notes.append("it is so much slower than the fastest that it ran once")
    return Contender(
        name=entry.name,
        right=True,
        why=None,
        error=error,
        bound=bound,
        measure=measure,
        low_us=round(low, 3),
        median_us=round(median, 3),
        high_us=round(high, 3),
        rounds=len(times),
        ratio=None if ours is None or not ours.wall_us else round(_ratio(ours.wall_us, own.wall_us), 4),
        peak_fraction=round(limit_us / median, 4) if median > 0 else None,
        notes=notes,
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median ratio over the rounds that both ran; of the medians where one ran once, untimed before."""
    if min(len(ours), len(theirs)) == 1:
        return statistics.median(theirs) / statistics.median(ours)
    return ratio(ours, theirs)


def _fit(results: Sequence[torch.Tensor], contest: ContestProblem) -> bool:
    """Tell whether results have the shapes and types that are due."""
    due = [(t.shape, t.dtype.to_torch()) for t in contest.outputs]
    return [(tuple(t.shape), t.dtype) for t in results] == due


def _verdict(rows: Sequence[Contender], right: Sequence[int], laps: Laps) -> str:
    """The sentence on who is fastest."""
    if not right:
        return "None is right."
    best = min(right, key=laps.us)
    name, times = rows[best].name, f"{rows[best].median_us or 0.0:,.1f} µs"
    others = [key for key in right if key != best]
    if not others:
        return f"{name} alone is right: {times}."
    tied = [key for key in others if not laps.beats(best, key, TIE_BAND)]
    if tied:
        return f"{name} ({times}) cannot be told apart from {' and '.join(rows[k].name for k in tied)}."
    second = min(others, key=laps.us)
    longer = _ratio(laps.laps[best].wall_us, laps.laps[second].wall_us)
    return f"{name} is the fastest: {times}, where {rows[second].name} takes {longer:.2f} times as long."
