"""load -> rules -> plan -> executable, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.errors import UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.carrier import operands_of, stores_of
from tilewright.ir.graph import Graph, Node, substitute, toposort
from tilewright.ir.ops import Const, Gemm, Input
from tilewright.ir.pattern import Pass, Rule, Trace, discover, rewrite
from tilewright.ir.verify import verify
from tilewright.rules.calibrate import Scheme, calibrate
from tilewright.rules.calibrate import quantize as quantize_graph
from tilewright.runtime.executable import Executable, prepare
from tilewright.runtime.partition import decided, partition, problem_of_part
from tilewright.schedule.candidate import Kernel
from tilewright.schedule.candidate import discover as discover_candidates
from tilewright.schedule.problem import AnyProblem, CarrierProblem, RegionProblem
from tilewright.schedule.schedule import Schedule
from tilewright.schedule.search import Decision, search

# In order. The rules of a stage settle together with the canonical ones, then its passes run; a stage's rules may be applied
# in any order and give the same graph.
STAGES = ("accumulator", "recognise", "unfuse", "epilogue", "prologue", "product", "siblings", "tails")
CANONICAL = "canonical"
EXCESS_PRECISION = "precision"  # a stage that runs last, and only when asked for
DEFAULT_BUDGET_S = 20.0

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Quantization:
    """How to quantise a float model.

    Attributes:
        scheme: types and granularity, from `tilewright.scheme("int8")`, "fp8", "w4" or "w8".
        batches: calibration inputs by name.
        rtol: products that lose more than this (relative error of the result on calibration data) stay in float.
    """

    scheme: Scheme
    batches: Sequence[Mapping[str, torch.Tensor]]
    rtol: float | None = None


def optimise(
    graph: Graph,
    trace: Trace | None = None,
    visit: Callable[[str, Graph], None] | None = None,
    *,
    excess_precision: bool = False,
) -> Graph:
    """The graph after every stage of rules, verified. `visit` sees the graph after each stage, with the stage's name."""
    trace = trace if trace is not None else Trace()
    rules = discover("tilewright.rules", Rule)
    passes = discover("tilewright.rules", Pass)
    for stage in (*STAGES, EXCESS_PRECISION) if excess_precision else STAGES:
        graph = rewrite(graph, [r for r in rules if r.stage in (stage, CANONICAL)], trace)
        for p in passes:
            if p.stage == stage:
                graph = p.apply(graph, trace)
        verify(graph)
        if visit is not None:
            visit(stage, graph)
    return graph


def compile(
    program: object,
    *,
    example_inputs: Sequence[object] | Mapping[str, object] | None = None,
    device: str | torch.device = "cpu",
    batch: int | None = None,
    input_dims: Mapping[str, Sequence[int]] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    quantize: Quantization | None = None,
    excess_precision: bool = False,
    progress: Progress | None = None,
    visit: Callable[[str, Graph], None] | None = None,
) -> Executable:
    """Compile a program for a device.

    Args:
        program: path of an .hlo, .mlir, .stablehlo or .onnx file; HLO or StableHLO text; an ONNX ModelProto; a torch
            ExportedProgram or nn.Module; a Graph.
        example_inputs: to trace an nn.Module with.
        device: "cpu", "cuda" or "cuda:1", or a torch device.
        batch: value of a symbolic first axis.
        input_dims: shape of an input by name, where the program leaves it open.
        budget_s: seconds that measuring kernels may take in all; 0 takes the first verified choice of a heuristic.
        quantize: quantise a float model on the way; `Executable.layers` then says what each product lost.
        excess_precision: keep values that a kernel holds in f32 unrounded where the program rounds them to 16 bits and widens
            them again: the result is not the program's to the last bit, but nearer to the real numbers'.
        progress: called before each choice of a kernel with how many are done, how many there are, and the problem.
        visit: called with "source" and the graph as read (and quantised), then with each stage's name and the graph after it.

    Returns:
        Executable: call it with arrays.

    Raises:
        InputError: the program cannot be read, or the device is not there.
        UnsupportedError: it holds control flow or types no graph can express.
    """
    target = detect(device)
    dims = {name: tuple(shape) for name, shape in (input_dims or {}).items()}
    source, layers = load(program, LoadOptions(dims, batch, example_inputs)), ()
    if quantize is not None:
        seen = calibrate(source, quantize.batches)
        source, layers = quantize_graph(source, quantize.scheme, seen, rtol=quantize.rtol)
    if visit is not None:
        visit("source", source)
    trace = Trace()
    graph = optimise(source, trace, visit, excess_precision=excess_precision)
    executable = prepare(source, graph, target, trace, _decider(graph, target, budget_s, progress))
    return replace(executable, layers=tuple(layers))


class _decider:  # noqa: N801 - a function with memory
    """Chooses once for each distinct problem, sharing the budget evenly over those of the graph.

    Problems that differ in numbers written into their expressions alone (the scales of two layers) are timed once: the others
    take the same candidate and schedule, built and checked for their own numbers.
    """

    def __init__(self, graph: Graph, target: Target, budget_s: float, progress: Progress | None) -> None:
        problems = {problem_of_part(p)[0] for p in partition(graph) if decided(p)}
        self._target = target
        self._share = min(budget_s / max(len({_without_numbers(p) for p in problems}), 1), 2.0)
        self._total = len(problems)
        self._progress = progress
        self._known: dict[AnyProblem, Decision] = {}
        self._alike: dict[object, Decision] = {}

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        if problem not in self._known:
            if self._progress is not None:
                self._progress(len(self._known), self._total, str(problem))
            self._known[problem] = self._chosen(problem, weights)
        return self._known[problem]

    def _chosen(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        key = _without_numbers(problem)
        model = self._alike.get(key)
        if model is not None:
            try:
                same = search(problem, self._target, budget_s=0, candidates=[_Only(model.kernel)], weights=weights)
                return replace(same, time_us=model.time_us, rejected=model.rejected, measured=model.measured)
            except UnsupportedError:  # the winner is not right for these numbers
                pass
        decision = search(problem, self._target, budget_s=self._share, weights=weights)
        self._alike.setdefault(key, decision)
        return decision


def _without_numbers(problem: AnyProblem) -> object:
    """What a problem has in common with those that differ from it in one-element constants alone."""
    if isinstance(problem, RegionProblem):
        return problem  # whose constants are sources
    roots = (*operands_of(problem.node), *stores_of(problem.node))
    numbers = {
        n: Node(Input("number", n.tensor)) for n in toposort(roots) if isinstance(n.op, Const) and n.tensor.elements == 1
    }
    return (type(problem), tuple(substitute(roots, numbers)), problem.types, problem.weights, _inner(problem))


def _inner(problem: CarrierProblem) -> object:
    """What a problem holds beside its operands and stores: all of an attention's own numbers, a product's accumulator."""
    op = problem.op
    return op.acc_dtype if isinstance(op, Gemm) else replace(op, operands=(), stores=())


class _Only:
    """A candidate narrowed to the one schedule that won."""

    preference = 0

    def __init__(self, winner: Kernel) -> None:
        self._candidate = next(c for c in discover_candidates() if c.name == winner.candidate)
        self._schedule = winner.schedule
        self.name = self._candidate.name
        self.kinds = self._candidate.kinds
        self.preference = self._candidate.preference

    def refuse(self, problem: AnyProblem, target: Target) -> str | None:
        return self._candidate.refuse(problem, target)

    def schedules(self, problem: AnyProblem, target: Target) -> Iterable[Schedule]:
        return (self._schedule,)

    def build(self, problem: AnyProblem, schedule: Schedule, target: Target) -> Kernel:
        return self._candidate.build(problem, schedule, target)
