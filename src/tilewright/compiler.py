"""Compiling: load, quantise and halve if asked, rewrite, choose a kernel for each problem within one budget, prepare.

Regions of loops and branches are compiled the same way, as programs of their own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch.utils._pytree import tree_leaves

from tilewright import deadline
from tilewright.any_shape import AnyShape, Reading
from tilewright.errors import InputError, RewriteError, UnsupportedError, check_type, counted, say
from tilewright.frontends import LoadOptions, load
from tilewright.hardware.detect import detect, one_of
from tilewright.hardware.target import Target
from tilewright.ir.dims import Scope
from tilewright.ir.graph import Graph, Node
from tilewright.ir.instance import dims_of
from tilewright.ir.ops import Call, Const
from tilewright.ir.pattern import Pass, Rule, Trace, discover, over, rewrite, without_broken
from tilewright.ir.verify import verify
from tilewright.program import Program
from tilewright.progress import Progress, said
from tilewright.rules.calibrate import Scheme, calibrate
from tilewright.rules.calibrate import quantize as quantize_graph
from tilewright.rules.half import half as narrow
from tilewright.rules.half import in_half, recognised
from tilewright.runtime.background import Chooser
from tilewright.runtime.executable import Decide, chooser, graphs_of, prepare
from tilewright.runtime.partition import Part, parts_for
from tilewright.runtime.programs import Place, content, place_of
from tilewright.schedule.tuning_database import TuningDatabase, user_cache
from tilewright.schedule.worker import begin
from tilewright.threads import threaded

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

# In order. The rules of a stage settle together with the canonical ones, then its passes run; a stage's rules may be applied
# in any order and give the same graph.
STAGES = ("accumulator", "recognise", "unfuse", "epilogue", "prologue", "product", "siblings", "tails", "computed")
CANONICAL = "canonical"
EXCESS_PRECISION = "precision"  # a stage that runs last, and only when asked for
DEFAULT_BUDGET_S = 20.0
ENOUGH_S = 60.0  # without a budget, for rules, and as much for candidates that take long to refuse: far more than any need
RULES_S = 10.0  # for rules at least, whatever the budget: a graph that is not folded takes longer to choose for
STOPGAP = (
    "the time was over (budget_s={budget_s:g}): {problems} run on a library or operation by operation for now; "
    "compiling again goes on where this ended, and so does background=True"
)


@dataclass(frozen=True)
class Quantization:
    """The options for quantising a float model.

    Attributes:
        scheme: types and granularity, from `tilewright.scheme("int8")`, "fp8", "w4" or "w8".
        batches: calibration inputs by name.
        rtol: products that lose more than this (relative error of the result on calibration data) stay in float.

    Raises:
        InputError: the scheme is none.
    """

    scheme: Scheme
    batches: Sequence[Mapping[str, torch.Tensor]]
    rtol: float | None = None

    def __post_init__(self) -> None:
        check_type(self.scheme, Scheme, "scheme", 'tilewright.scheme("int8")')


def optimise(
    graph: Graph,
    trace: Trace | None = None,
    visit: Callable[[str, Graph], None] | None = None,
    *,
    excess_precision: bool = False,
    within_s: float = math.inf,
) -> Graph:
    """The graph after every stage of rules, verified. `visit` sees the graph after each stage, with the stage's name. After
    `within_s` seconds rules are applied no more (`Trace.notes`)."""
    until = time.monotonic() + within_s
    trace = trace if trace is not None else Trace()
    rules = discover("tilewright.rules", Rule)
    passes = discover("tilewright.rules", Pass)
    for r in (*rules, *passes):
        if r.package and r.stage not in (*STAGES, EXCESS_PRECISION, CANONICAL):
            say(f"plug-in {r.package}: the rule {r.name} never runs: there is no stage {r.stage!r}, but {', '.join(STAGES)}")
    for stage in (*STAGES, EXCESS_PRECISION) if excess_precision else STAGES:
        graph = rewrite(graph, [r for r in rules if r.stage in (stage, CANONICAL)], trace, until=until)
        for p in passes:
            if p.stage == stage:
                graph = _passed(p, graph, trace, until) if not p.package else _passed_or_left_out(p, graph, trace, until)
        verify(graph)
        if visit is not None:
            visit(stage, graph)
    return graph


def _passed_or_left_out(p: Pass, graph: Graph, trace: Trace, until: float) -> Graph:
    """The graph after a pass of another package; as it was where the pass raises or breaks the graph, which a warning says."""
    try:
        after = _passed(p, graph, trace, until)
        verify(after)
        if [n.type for n in (*after.inputs, *after.outputs)] == [n.type for n in (*graph.inputs, *graph.outputs)]:
            return after
        what = "it changes the types of inputs or results"
    except Exception as error:  # its code may raise anything
        what = f"{type(error).__name__}: {error}"
    without_broken([p], RewriteError(f"it failed: {what}", rules=(p.name,)))
    return graph


def _passed(p: Pass, graph: Graph, trace: Trace, until: float) -> Graph:
    """The graph after a pass; as it was where the time is over."""
    try:
        with deadline.until(until):
            deadline.check()
            return p.apply(graph, trace)
    except deadline.OverrunError:
        over(trace, p.name)
        return graph


@overload
def compile(program: object, *, dims: Mapping[str, object] | Literal[True], **options: Any) -> AnyShape: ...


@overload
def compile(
    program: object,
    *,
    example_inputs: Sequence[object] | Mapping[str, object] | None = None,
    device: str | torch.device | None = None,
    batch: int | None = None,
    input_dims: Mapping[str, Sequence[int]] | None = None,
    fixed: Mapping[str, bool | float] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    quantize: Quantization | None = None,
    half: str | None = None,
    excess_precision: bool = False,
    cache: bool | TuningDatabase = True,
    threads: int | None = None,
    allow_calls: bool = False,
    untrusted: bool = False,
    background: bool = False,
    follow_links: bool = False,
    dims: Literal[False] = False,
    progress: Progress | None = None,
    visit: Callable[[str, Graph], None] | None = None,
) -> Program: ...


@threaded
def compile(
    program: object,
    *,
    example_inputs: Sequence[object] | Mapping[str, object] | None = None,
    device: str | torch.device | None = None,
    batch: int | None = None,
    input_dims: Mapping[str, Sequence[int]] | None = None,
    fixed: Mapping[str, bool | float] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    quantize: Quantization | None = None,
    half: str | None = None,
    excess_precision: bool = False,
    cache: bool | TuningDatabase = True,
    threads: int | None = None,
    allow_calls: bool = False,
    untrusted: bool = False,
    background: bool = False,
    follow_links: bool = False,
    dims: Mapping[str, object] | bool = False,
    progress: Progress | None = None,
    visit: Callable[[str, Graph], None] | None = None,
) -> Program | AnyShape:
    """Compile a program for a device.

    Args:
        program: path of an .hlo, .mlir, .stablehlo, .onnx or .tw file; text of any but .onnx; an ONNX ModelProto; a torch
            ExportedProgram or nn.Module; a Graph.
        example_inputs: to trace an nn.Module with.
        device: "cpu", "cuda" or "cuda:1", or a torch device; None is where the weights and example inputs lie.
        batch: value of a symbolic first axis.
        input_dims: shape of an input by name, where the program leaves it open.
        fixed: value of an input of one element of an ONNX model by name; it is no input any more.
        budget_s: seconds by the clock for all of it: reading, calibrating, rules, building, checking and measuring. 0 takes
            what was measured before, or what the cost model names first and passes its check, and leaves nothing out. Once the
            time is over, problems left are chosen in that way; a tenth later they run on a library or operation by operation,
            until the program is compiled again. Calibration ends after the batch under way.
        quantize: quantise a float model on the way; `Program.layers` then says what each product lost.
        half: "f16" or "bf16": products, attention and norms of an f32 model read and write that type; those that were quantised
            read their codes and write it. Inputs and results of the program keep their types.
        excess_precision: keep values that a kernel holds in f32 unrounded where the program rounds them to 16 bits and widens
            them again: the result is not the program's to the last bit, but nearer to the real numbers'.
        cache: read back what was measured in the same circumstances before, by any process, and keep what is measured now, in
            the user's cache folder ($TILEWRIGHT_CACHE). Kernels that are read back are not timed, and a sample verified. A
            `TuningDatabase` for this device says what else is known, and where decisions are kept. The whole program of a
            model's file is kept, too, and read back where compiling would give the same (docs/artefacts.md).
        threads: threads for the program's calls on a CPU, and for compiling; None is torch's number, but no more than the
            machine has for this process.
        allow_calls: let a `.tw` file call any operator of torch, as only one that is trusted may (`LoadOptions`).
        untrusted: the program is a stranger's: few operations and bytes, and nothing that an interpreter runs (`LoadOptions`).
        follow_links: read an ONNX model's data through links that leave its folder, too (`LoadOptions`).
        background: return at once, with what was measured before or what a budget of 0 takes, and search on in a thread for
            `budget_s` seconds: better kernels replace the first ones between calls, and are kept. Each call runs wholly with
            one set of kernels. `Program.wait` waits for the end of it, and raises what went wrong.
        dims: extents that stay open, by the name that the program has for them, with bounds: `{"batch": (1, 64)}`, or a `Dim`;
            True leaves all open that the program does. The result is then called with any shapes within them (`AnyShape`).
        progress: called before each choice of a kernel with how many are done, how many there are, and the problem; on a GPU
            also before kernels are compiled for all of them.
        visit: called with "source" and the graph as read (and quantised), then with each stage's name and the graph after it.

    Returns:
        Program: call it with arrays; an `AnyShape` where extents stay open.

    Raises:
        InputError: the program cannot be read, the device is not there, weights lie on several, `half` is no float of 16 bits,
            or the budget no time.
        UnsupportedError: it holds control flow or types no graph can express.
    """
    check_type(quantize, (Quantization, type(None)), "quantize", 'tilewright.Quantization(tilewright.scheme("int8"), batches)')
    check_type(budget_s, Real, "budget_s", "a number of seconds")
    if not budget_s >= 0:  # or NaN
        raise InputError(f"a budget of {budget_s} seconds", hint="0 or more; 0 measures none")
    budget = deadline.Budget(float(budget_s))
    ends = budget.ends if budget_s > 0 else None
    with nullcontext(progress) if progress is not None else said("compiling", ends) as progress:
        target = None if device is None else detect(device)
        if budget_s > 0:
            begin()
        options = LoadOptions(
            cast("Mapping[str, tuple[int, ...]]", input_dims or {}),  # which `LoadOptions` sees to
            batch,
            example_inputs,
            allow_calls=allow_calls,
            untrusted=untrusted,
            follow_links=follow_links,
            fixed=fixed or {},
            dims=dims,
        )
        place = None
        if cache is True and not background and visit is None and not dims:
            place = _place(program, options, target or detect("cpu"), quantize, half, excess_precision)
        found = None if place is None else place.find(float(budget_s))
        if found is not None:
            found[0].threads = threads
            return found[0]
        as_read: Graph | None = None
        all_batches = True

        def rules_s() -> float:
            """Seconds for rules that are applied now."""
            return ENOUGH_S if ends is None else max(RULES_S, budget.left_s())

        def reading(scope: Scope) -> Reading:
            """The program read and rewritten, its open extents in a scope."""
            nonlocal as_read, target, all_batches
            with nullcontext() if place is None else place.reading():
                as_read = load(program, replace(options, scope=scope))
            source, layers = as_read, ()
            target = target or detect(home(source, example_inputs))
            if quantize is not None and dims_of(source) is not None:
                hint = "input_dims= or batch= for one shape, or a model that holds its quantised weights"
                raise UnsupportedError("extents are open, and quantising runs the program", where=source.name, hint=hint)
            if quantize is not None:
                source = recognised(source) if quantize.scheme.attention is not None else source
                seen = calibrate(source, quantize.batches, target.device, until=math.inf if ends is None else ends)
                source, layers = quantize_graph(source, quantize.scheme, seen, rtol=quantize.rtol, device=target.device)
                all_batches = seen.batches == len(quantize.batches)
            if half is not None:
                whole = in_half(source.with_outputs([*source.outputs, *(x.after for x in layers)]), narrow(half))
                after = whole.outputs[len(source.outputs) :]
                layers = [replace(x, after=now) for x, now in zip(layers, after, strict=True)]
                source = whole.with_outputs(whole.outputs[: len(source.outputs)])
            if visit is not None:
                visit("source", source)
            trace = Trace()
            graph = optimise(source, trace, visit, excess_precision=excess_precision, within_s=rules_s())
            source = replace(source, notes=(*source.notes, *trace.notes))
            return Reading(source, graph, trace, tuple(layers), dims_of(source) or scope)

        read = reading(Scope())
        assert target is not None
        there = target
        source, graph, trace = read.source, read.graph, read.trace
        choosing = budget if place is None else budget.part(max(0.0, budget.left_s() - place.keeping_s(graph)))
        database = TuningDatabase(target, user_cache(), excess_precision=excess_precision) if cache is True else cache or None
        if dims_of(source) is not None:

            def made_for(
                graph: Graph, trace: Trace, parts: Sequence[Part], decide: Decide, known: dict[Node, Value]
            ) -> Program:
                def inner(region: Graph) -> Program:
                    found = Trace()
                    made = optimise(region, found, excess_precision=excess_precision, within_s=rules_s())
                    return made_for(made, found, parts_for(made, there), chooser(made, there, 0.0, None, database), {})

                return prepare(graph, graph, there, trace, decide, inner, made=Program, parts=parts, known=known)

            def measuring(graph: Graph, parts: Sequence[Part], within_s: float, known: TuningDatabase | None) -> Chooser:
                return chooser(graph, there, within_s if background else budget.part(within_s), None, known, parts)

            return AnyShape(
                read,
                reading,
                made_for,
                measuring,
                target,
                budget_s=float(budget_s),
                background=background,
                database=database,
                threads=threads,
            )
        stopgaps = 0
        with deadline.allowing(ENOUGH_S if ends is None else budget.left_s()):

            def prepared(
                source: Graph, graph: Graph, trace: Trace, budget: deadline.Budget, progress: Progress | None
            ) -> Program:
                """A program chosen within a budget; each loop in it, its regions together, has as long as what is around."""
                nonlocal stopgaps
                inside = [len(graphs_of(n.op)) for n in graph.nodes() if isinstance(n.op, Call)] if there.kind == "cpu" else []
                loops, left = len([r for r in inside if r]), sum(inside)
                parts = parts_for(graph, there)
                decide = chooser(graph, there, budget.part(budget.left_s() / (1 + loops)), progress, database, parts)

                def inner(region: Graph) -> Program:
                    nonlocal left
                    found, left_s = Trace(), budget.left_s()
                    made = optimise(region, found, excess_precision=excess_precision, within_s=rules_s())
                    left, share_s = left - 1, left_s / max(left, 1)
                    return prepared(region, made, found, budget.part(share_s), None)

                made = prepare(source, graph, there, trace, decide, inner, first=decide.weight, made=Program, parts=parts)
                stopgaps += decide.stopgaps
                return made

            executable = prepared(source, graph, trace, deadline.Budget(0.0) if background else choosing, progress)
        if stopgaps:
            say(STOPGAP.format(budget_s=budget_s, problems=counted(stopgaps, "problem")))
        executable.layers, executable.threads = read.layers, threads
        if isinstance(program, torch.nn.Module):
            executable.uncompiled = _uncompiled(program, example_inputs, executable)
        if background and budget_s > 0:
            known = TuningDatabase(target, user_cache(), excess_precision=excess_precision) if cache is True else database
            executable.search_on(lambda: chooser(graph, there, float(budget_s), None, known))
        executable.finished = all_batches and not trace.notes
        if place is not None and as_read is not None:
            place.keep(executable, as_read, float(budget_s))
        return executable


def _place(
    program: object,
    options: LoadOptions,
    target: Target,
    quantize: Quantization | None,
    half: str | None,
    excess_precision: bool,
) -> Place[Program] | None:
    """The place of a program among those that are kept (`programs`); None for what is no file or text, or cannot be kept."""
    if not isinstance(program, (str, Path)):
        return None
    how: dict[str, object] = {"half": half}
    if quantize is not None:
        how["quantize"] = quantize.scheme.said, quantize.rtol, [content(b) for b in quantize.batches]
    return place_of(program, options, target, Program, excess_precision=excess_precision, how=how)


def search_behind(program: Program, budget_s: float, *, cache: bool = True) -> bool:
    """Search better kernels for a program in a thread, as `compile(..., background=True)` does, unless it was done or another
    program's search that began so is under way; tell whether it began."""
    with _one_search:
        if program.search is not None or any(_goes_on(p) for p in _searching):
            return False
        known = TuningDatabase(program.target, user_cache()) if cache else None
        program.search_on(lambda: chooser(program.graph, program.target, budget_s, None, known))
        _searching[:] = [program]
        return True


def _goes_on(program: Program) -> bool:
    try:
        return not program.wait(0)
    except Exception:  # what ended it was logged
        return False


_searching: list[Program] = []
_one_search = threading.Lock()


def _uncompiled(
    module: torch.nn.Module, example_inputs: object, made: Program
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None:
    """Runner of a module itself, for inputs that lead another way than the traced one; None if no step compares ways, or if the
    program keeps copies of the module's buffers, which would no longer agree."""
    from tilewright.frontends.torch import compares, itself

    own = all(a.data_ptr() == b.data_ptr() for a, b in zip(made.source.state, made.state.values(), strict=True))
    return itself(module, example_inputs) if own and compares(made.source) else None


def home(source: Graph, example_inputs: object = None) -> str:
    """Give the device on which a program's weights, buffers and example inputs lie.

    Raises:
        InputError: they lie on several GPUs.
    """
    given = (*source.state, *tree_leaves(example_inputs))
    consts = (n.op.data.device for n in source.nodes() if isinstance(n.op, Const))
    return one_of((*consts, *(str(t.device) for t in given if isinstance(t, torch.Tensor))))
