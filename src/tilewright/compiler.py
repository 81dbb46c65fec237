"""load -> rules -> plan -> executable, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.frontends import LoadOptions, load
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.carrier import CARRIERS
from tilewright.ir.graph import Graph, Node
from tilewright.ir.pattern import Pass, Rule, Trace, discover, rewrite
from tilewright.ir.verify import verify
from tilewright.rules.calibrate import Scheme, calibrate
from tilewright.rules.calibrate import quantize as quantize_graph
from tilewright.runtime.executable import Executable, prepare
from tilewright.schedule.problem import AnyProblem, problem_of
from tilewright.schedule.search import Decision, search

# In order. The rules of a stage settle together with the canonical ones, then its passes run; a stage's rules may be applied
# in any order and give the same graph.
STAGES = ("accumulator", "recognise", "unfuse", "epilogue", "prologue", "product", "siblings", "tails")
CANONICAL = "canonical"
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


def optimise(graph: Graph, trace: Trace | None = None, visit: Callable[[str, Graph], None] | None = None) -> Graph:
    """The graph after every stage of rules, verified. `visit` sees the graph after each stage, with the stage's name."""
    trace = trace if trace is not None else Trace()
    rules = discover("tilewright.rules", Rule)
    passes = discover("tilewright.rules", Pass)
    for stage in STAGES:
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
    device: str = "cpu",
    batch: int | None = None,
    input_dims: Mapping[str, Sequence[int]] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    quantize: Quantization | None = None,
    progress: Progress | None = None,
) -> Executable:
    """Compile a program for a device.

    Args:
        program: path of an .hlo, .mlir, .stablehlo or .onnx file; HLO or StableHLO text; an ONNX ModelProto; a torch
            ExportedProgram or nn.Module; a Graph.
        example_inputs: to trace an nn.Module with.
        device: "cpu", "cuda" or "cuda:1".
        batch: value of a symbolic first axis.
        input_dims: shape of an input by name, where the program leaves it open.
        budget_s: seconds that measuring kernels may take in all; 0 takes the first verified choice of a heuristic.
        quantize: quantise a float model on the way; `Executable.layers` then says what each product lost.
        progress: called before each choice of a kernel with how many are done, how many there are, and the problem.

    Returns:
        Executable: call it with arrays.

    Raises:
        InputError: the program cannot be read, or the device is not there.
        UnsupportedError: it holds control flow or types no graph can express.
    """
    target = detect(device)
    dims = {name: tuple(shape) for name, shape in (input_dims or {}).items()}
    source = load(program, LoadOptions(dims, batch, example_inputs))
    start, layers = source, ()
    if quantize is not None:
        seen = calibrate(source, quantize.batches)
        start, layers = quantize_graph(source, quantize.scheme, seen, rtol=quantize.rtol)
    trace = Trace()
    graph = optimise(start, trace)
    executable = prepare(source, graph, target, trace, _decider(graph, target, budget_s, progress))
    return replace(executable, layers=tuple(layers))


class _decider:  # noqa: N801 - a function with memory
    """Chooses once for each distinct problem, sharing the budget evenly over those of the graph."""

    def __init__(self, graph: Graph, target: Target, budget_s: float, progress: Progress | None) -> None:
        problems = {problem_of(n) for n in graph.nodes() if isinstance(n.op, CARRIERS)}
        self._target = target
        self._share = budget_s / max(len(problems), 1)
        self._total = len(problems)
        self._progress = progress
        self._known: dict[AnyProblem, Decision] = {}

    def __call__(self, node: Node, weights: Mapping[int, torch.Tensor]) -> Decision:
        problem = problem_of(node)
        if problem not in self._known:
            if self._progress is not None:
                self._progress(len(self._known), self._total, str(problem))
            share = min(self._share, 2.0)
            self._known[problem] = search(problem, self._target, budget_s=share, weights=weights)
        return self._known[problem]
