"""A compiled program held against the oracle: every step on the inputs it has in the program, and the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from msgspec.structs import replace

from tilewright.dtype import BF16, F32
from tilewright.hardware.load import uncrowded
from tilewright.ir.evaluate import accumulate_in_float64, evaluate, evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import ALIASES, Acc, Const, Input, Item, Param
from tilewright.ir.types import TensorType
from tilewright.report.explain.names import step_names
from tilewright.report.measure.compare import Gap, Tolerances, element_gap, exact_gap, rms_gap, tolerated_gap
from tilewright.report.measure.inputs import Feed
from tilewright.report.measure.perf import PROGRESS, bind
from tilewright.report.measure.work import candidate_of, describe
from tilewright.report.program import restored, target_name, tensor_types
from tilewright.report.schema import Comparison, Verify
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import FusionProblem, fusion_of
from tilewright.schedule.spot_check import spot_check

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

# Roundings a fusion may differ by, of its result's type and of f32, in which most of it is computed; relative to the largest.
NARROW_ROUNDINGS, WIDE_ROUNDINGS = 16, 64
PROGRAM_ROUNDINGS = 16
PROGRAM_RMS = (1e-3, 0.25)
MOVES = (Input, Const, Param, Acc, *ALIASES)


def verify_program(
    program: Executable,
    name: str,
    feeds: Sequence[Feed],
    tolerances: Tolerances | None = None,
    progress: PROGRESS | None = None,
    *,
    steps: bool = True,
) -> Verify:
    """Compare every step with the oracle on the same inputs, then the outputs with the oracle's for the program as read.

    Integers computed from integers must be equal. What a kernel makes of floats lies within the bound that its sums and steps
    allow, what torch does operation by operation within a few roundings of its result's type. End to end the errors of every
    step add up and a quantisation turns the smallest of them into a whole code, so there the root mean square of the error is
    judged: a few roundings of the coarsest type a float passes through. With `steps` False only that is done: kernels were each
    held against the oracle when they were chosen.
    """
    tolerances = tolerances or Tolerances()
    inputs = bind(program, feeds)
    rows: list[Comparison] = []
    names = step_names(program)

    def compare(step: Step, values: list[Value]) -> None:
        name = names[len(rows)]
        if progress is not None:
            progress(len(rows), len(program.steps), name)
        known = [program.value(n) if v is None else v for n, v in zip(step.part.inputs, values, strict=True)]
        rows.append(replace(compare_step(step, known, tolerances), name=name))

    with restored(program) as before:
        results = program.run(inputs, compare if steps else None)
        if program.target.kind != "cpu":  # as it is launched from the second call on, not step by step
            results = [program.run(inputs) for _ in range(2)][-1]
        ends = _end_to_end(program, [*inputs, *before.values()], [*results, *program.state.values()], tolerances)
    first = next((r for r in (*rows, *ends) if not r.ok), None)
    return Verify(name, target_name(program.target), first is None, first, rows, ends, [f.shown for f in feeds])


@uncrowded()
def compare_step(step: Step, values: Sequence[Value], tolerances: Tolerances | None = None) -> Comparison:
    """One step held against the oracle on given inputs."""
    judge = _by_operations if candidate_of(step) == "torch" or step.decision is None else _by_kernel
    try:
        gaps = judge(step, values, tolerances or Tolerances())
    except RuntimeError as error:  # a kernel that cannot take what the program hands it is a wrong kernel
        gaps = [Gap(0.0, 0.0, f"failed: {(str(error).splitlines() or [''])[0][:160]}")]
    return _comparison(step.name, step.part.kind, describe(step), candidate_of(step), gaps)


def spot_compare(step: Step, values: Sequence[Value], within_s: float) -> tuple[Comparison, int]:
    """Some elements of a product's or attention's results held against the oracle, drawn once it has run; and how many of
    each. Largest errors are not known of them.

    Args:
        step: one of whose problem elements can be looked at (`sampled`).
        values: what it reads.
        within_s: seconds for it, beside those of the first few elements.
    """
    assert step.decision is not None
    given = dict(zip(step.part.inputs, values, strict=True))
    sources = [cast("torch.Tensor", given[s]).cpu() for s in step.part.nodes[0].src]
    results = {
        output.op.index if isinstance(output.op, Item) else 0: cast("torch.Tensor", result).cpu()
        for output, result in zip(step.part.outputs, step.run(values), strict=True)
    }
    why, count = spot_check(step.decision.problem, sources, results, within_s, step.decision.kernel.roundoff)
    return _comparison(step.name, step.part.kind, describe(step), candidate_of(step), [Gap(0.0, 0.0, why)]), count


def _comparison(name: str, kind: str, problem: str, candidate: str, gaps: Sequence[Gap]) -> Comparison:
    worst = max(gaps, key=lambda g: (g.why is not None, g.ratio, g.bound), default=Gap(0.0, 0.0))
    return Comparison(name, kind, problem, candidate, worst.error, worst.bound, worst.why is None, worst.why)


def _by_kernel(step: Step, values: Sequence[Value], tolerances: Tolerances) -> list[Gap]:
    assert step.decision is not None
    problem = step.decision.problem
    fused = isinstance(problem, FusionProblem)
    given = dict(zip(step.part.inputs, values, strict=True))
    taken = fusion_of(step.part.inputs, step.part.outputs)[1] if fused else step.part.nodes[0].src
    sources = [cast("torch.Tensor", given[s]).cpu() for s in taken]
    expected = expect(problem, sources, step.decision.kernel.roundoff)
    results = list(expected.reference)  # a store that nothing reads is not given, and not judged
    for i, (output, given_back) in enumerate(zip(step.part.outputs, step.run(values), strict=True)):
        picked = i if fused else output.op.index if isinstance(output.op, Item) else 0
        result = cast("torch.Tensor", given_back)
        destination = problem.destinations[i] if isinstance(problem, FusionProblem) and problem.destinations else None
        if destination is not None:
            result = result.narrow(destination.axis, destination.start, results[picked].shape[destination.axis])
        results[picked] = result.cpu()
    why = check(problem, expected, results)
    shapes = [tuple(t.shape) for t in results] == [tuple(t.shape) for t in expected.reference]
    if not shapes or any(g.dtype != r.dtype for g, r in zip(results, expected.reference, strict=True)):
        return [Gap(0.0, 0.0, why)]
    if tolerances.given:
        types = [t.dtype.is_float for t in problem.outputs]
        pairs = zip(results, expected.reference, types, strict=True)
        return [tolerated_gap(g, r, tolerances) if is_float else exact_gap(g, r) for g, r, is_float in pairs]
    bounds = zip(results, expected.reference, expected.low, expected.high, strict=True)
    gaps = [element_gap(g, r, low, high) for g, r, low, high in bounds]
    worst = max(gaps, key=lambda g: g.ratio)
    return [Gap(worst.error, worst.bound, why)]


def _by_operations(step: Step, values: Sequence[Value], tolerances: Tolerances) -> list[Gap]:
    got = _tensors(step.run(values))
    on_cpu = {n: _on_cpu(v) for n, v in zip(step.part.inputs, values, strict=True)}
    with accumulate_in_float64():
        wanted = _tensors(evaluate_nodes(step.part.outputs, on_cpu))
    types = [t for n in step.part.outputs for t in tensor_types(n) if t.dtype.kind != "opaque"]
    from_floats = any(t.dtype.is_float for n in step.part.inputs for t in tensor_types(n))
    return [_fusion_gap(g, r, t, from_floats, tolerances) for g, r, t in zip(got, wanted, types, strict=True)]


def _fusion_gap(got: torch.Tensor, reference: torch.Tensor, t: TensorType, from_floats: bool, tolerances: Tolerances) -> Gap:
    if t.dtype.is_float and tolerances.given:
        return tolerated_gap(got, reference, tolerances)
    if not t.dtype.is_float and not from_floats:
        return exact_gap(got, reference)
    r = reference.double()
    if t.dtype.is_float:
        finite = r.abs()[r.isfinite()]
        largest = float(finite.amax()) if finite.numel() else 0.0
        # Of 8 bits, which nothing is computed in, one rounding may fall the other way beside those of a wider type.
        narrow, last = (BF16.epsilon, t.dtype.epsilon) if t.dtype.bits <= 8 else (t.dtype.epsilon, 0.0)
        slack = max(NARROW_ROUNDINGS * narrow, WIDE_ROUNDINGS * F32.epsilon) * (r.abs() + largest) + last * r.abs()
    else:
        slack = torch.ones_like(r)  # a rounding that falls the other way
    return element_gap(got, reference, r - slack, r + slack)


@uncrowded()
def _end_to_end(
    program: Executable, inputs: Sequence[torch.Tensor], results: Sequence[Value], tolerances: Tolerances
) -> list[Comparison]:
    source = program.source
    wanted = evaluate(source, [t.cpu() for t in inputs], float64=True)
    rows: list[Comparison] = []
    for name, node, got, reference in zip(source.output_names, source.outputs, results, wanted, strict=True):
        if isinstance(got, torch.Tensor) and isinstance(reference, torch.Tensor):
            rows.append(output_comparison(name, node, got.cpu(), reference, tolerances))
    return rows


def output_comparison(name: str, node: Node, got: torch.Tensor, reference: torch.Tensor, tolerances: Tolerances) -> Comparison:
    """A result of a whole program held against the oracle's; `node` computes it in the program as it was read."""
    return _comparison(name, "output", str(node.type), "the whole program", [_output_gap(node, got, reference, tolerances)])


def _output_gap(node: Node, got: torch.Tensor, reference: torch.Tensor, tolerances: Tolerances) -> Gap:
    if got.shape != reference.shape or got.dtype != reference.dtype:
        return Gap(0.0, 0.0, f"it is {got.dtype}{list(got.shape)}, {node.type} wanted")
    coarsest = coarsest_rounding(node)
    if coarsest is None:
        return exact_gap(got, reference)
    if tolerances.given and node.tensor.dtype.is_float:
        return tolerated_gap(got, reference, tolerances)
    return rms_gap(got, reference, rms_bound(coarsest))


def rms_bound(coarsest: float) -> float:
    """The bound on the error of a whole program, of which the coarsest relative rounding is given."""
    low, high = PROGRAM_RMS
    return min(max(low, PROGRAM_ROUNDINGS * coarsest), high)


def coarsest_rounding(root: Node) -> float | None:
    """The largest relative rounding among the floats, and the integers made of floats, behind a value; None without floats."""
    found: float | None = None
    for node in _with_regions(toposort((root,))):
        if isinstance(node.op, MOVES):
            continue
        floats = any(t.dtype.is_float for s in node.src for t in tensor_types(s))
        for t in tensor_types(node):
            if t.dtype.is_float:
                found = max(found or 0.0, t.dtype.epsilon)
            elif floats and t.dtype.is_integer:
                found = max(found or 0.0, 1 / t.dtype.max)
            elif floats:
                found = found or 0.0
    return found


def _with_regions(nodes: Iterable[Node]) -> Iterable[Node]:
    for node in nodes:
        for roots in node.op.regions().values():
            yield from toposort(roots)
        yield node


def _tensors(values: Iterable[Value]) -> list[torch.Tensor]:
    """The tensors among values, those of tuples too, on the CPU; opaque values are left out."""
    found: list[torch.Tensor] = []
    for v in values:
        if isinstance(v, tuple):
            found += _tensors(cast("tuple[Value, ...]", v))
        elif isinstance(v, torch.Tensor):
            found.append(v.cpu())
    return found


def _on_cpu(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(_on_cpu(v) for v in cast("tuple[Value, ...]", value))
    return value.cpu() if isinstance(value, torch.Tensor) else value
