"""Compiling: load, quantise and halve if asked, rewrite, choose a kernel for each problem within one budget, prepare.

Regions of loops and branches are compiled the same way, as programs of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch.utils._pytree import tree_leaves

from tilewright import deadline
from tilewright.any_shape import AnyShape, Reading
from tilewright.errors import InputError, RewriteError, UnsupportedError, check_type, counted, say
from tilewright.frontends import LoadOptions, load
from tilewright.hardware.detect import detect, one_of
from tilewright.hardware.load import uncrowded
from tilewright.hardware.target import Target
from tilewright.ir.dims import Scope
from tilewright.ir.graph import Graph
from tilewright.ir.instance import dims_of
from tilewright.ir.mesh import Mesh
from tilewright.ir.ops import Call, Const
from tilewright.ir.pattern import Pass, Rule, Trace, discover, over, released, rewrite, without_broken
from tilewright.ir.verify import mesh_axes, verify
from tilewright.program import Program
from tilewright.progress import Progress, said
from tilewright.rules.calibrate import Layer, Scheme, calibrate
from tilewright.rules.calibrate import quantize as quantize_graph
from tilewright.rules.half import half as narrow
from tilewright.rules.half import in_half, recognised
from tilewright.runtime.partition import parts_for
from tilewright.runtime.prepare import chooser, prepare
from tilewright.runtime.programs import Place, content, place_of
from tilewright.runtime.steps import graphs_of
from tilewright.schedule.cache import user_cache
from tilewright.schedule.tuning_database import TuningDatabase
from tilewright.schedule.worker import begin
from tilewright.threads import threaded

# In order. The rules of a stage settle together with the canonical ones, then its passes run; a stage's rules may be applied
# in any order and give the same graph.
STAGES = (
    *(
        "accumulator",
        "recognise",
        "wire",
        "unfuse",
        "epilogue",
        "prologue",
        "product",
        "siblings",
        "tails",
        "computed",
        "carry",
        "rows",
    ),
)
CANONICAL = "canonical"
EXCESS_PRECISION = "precision"  # a stage that runs last, and only when asked for
DEFAULT_BUDGET_S = 20.0
ENOUGH_S = 60.0  # without a budget, for rules, and as much for candidates that take long to refuse: far more than any need
WORKED_S = 0.1  # of a budget, below which no worker is started beforehand: it takes ten times as long to be there
RULES_S = 10.0  # for rules at least, whatever the budget: a graph that is not folded takes longer to choose for
LATE = (
    "{name}: the time was over before {problems} measured, and the first kernel that passed its check was taken. To measure "
    "the rest, compile again or with a larger budget_s, or with background=True, which does it behind the running program"
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
    `within_s` seconds of a processor rules are applied no more (`Trace.notes`)."""
    until = deadline.End.after(within_s)
    trace = trace if trace is not None else Trace()
    rules = discover("tilewright.rules", Rule)
    passes = discover("tilewright.rules", Pass)
    for r in (*rules, *passes):
        if r.package and r.stage not in (*STAGES, EXCESS_PRECISION, CANONICAL):
            say(f"plug-in {r.package}: the rule {r.name} never runs: there is no stage {r.stage!r}, but {', '.join(STAGES)}")
    stages = list(STAGES)
    if graph.local:
        stages.insert(stages.index("rows"), "epilogue")  # what follows a reduction that a product carries by now
    for stage in (*stages, *((EXCESS_PRECISION,) if excess_precision else ())):
        graph = rewrite(graph, [r for r in rules if r.stage in (stage, CANONICAL)], trace, until=until)
        for p in passes:
            if p.stage == stage:
                graph = _passed(p, graph, trace, until) if not p.package else _passed_or_left_out(p, graph, trace, until)
        verify(graph)
        if visit is not None:
            visit(stage, released(graph, trace))
    return verify(released(graph, trace))


def _passed_or_left_out(p: Pass, graph: Graph, trace: Trace, until: deadline.End) -> Graph:
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


def _passed(p: Pass, graph: Graph, trace: Trace, until: deadline.End) -> Graph:
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
    mesh: object = None,
    plan: Mapping[str, object] | str | None = None,
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
    mesh: object = None,
    plan: Mapping[str, object] | str | None = None,
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
            time is over, problems left are chosen in that way, until the program is compiled again, so a compile takes at least
            as long as with 0. Calibration ends after the batch under way.
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
        mesh: the ranks that run the program, each in a process of its own: a torch `DeviceMesh`, or "tp=2" for all ranks that
            torch.distributed knows, or that torchrun started. The program is then one rank's, all ranks compile it at the same
            time, and choose its kernels together (docs/several-devices.md).
        plan: how tensors lie on the mesh, by names of inputs, and of modules and parameters: `{"layers.*.wq": "colwise"}`, with
            styles of `torch.distributed.tensor.parallel`, or "auto" for the module's own `tp_plan` (docs/design/mesh.md).
            Without, as the program says itself: shardings of HLO, DTensor parameters, collectives.
        progress: called before each choice of a kernel with how many are done, how many there are, and the problem; on a GPU
            also before kernels are compiled for all of them.
        visit: called with "source" and the graph as read (and quantised), then with each stage's name and the graph after it.

    Returns:
        Program: call it with arrays; an `AnyShape` where extents stay open, a `MeshProgram` on a mesh.

    Raises:
        InputError: the program cannot be read, the device is not there, weights lie on several, `half` is no float of 16 bits,
            or the budget no time.
        UnsupportedError: it holds control flow or types no graph can express.
        PeerError: another rank of the mesh failed, is gone, or runs in other circumstances.
    """
    check_type(quantize, (Quantization, type(None)), "quantize", 'tilewright.Quantization(tilewright.scheme("int8"), batches)')
    check_type(budget_s, Real, "budget_s", "a number of seconds")
    if not budget_s >= 0:  # or NaN
        raise InputError(f"a budget of {budget_s} seconds", hint="0 or more; 0 measures none")
    budget = deadline.Budget(float(budget_s))
    if mesh is not None:
        asked = [name for name, value in {"dims": dims, "background": background}.items() if value]
        if asked:
            raise UnsupportedError(f"{asked[0]}= on a mesh", where="mesh", hint="one shape, and choosing before the first call")
    ends = budget.ends if budget_s > 0 else None
    with nullcontext(progress) if progress is not None else said("compiling", ends) as progress:
        target = None if device is None else detect(device)
        if budget_s > WORKED_S:
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
        how = quantize, half, cache, threads, progress, visit
        one = _Compile(program, options, budget, ends, target, *how, excess_precision=excess_precision, background=background)
        if mesh is not None:
            return one.on_mesh(mesh, plan, None if device is None else str(device))
        if plan is not None:
            raise InputError("a plan is given, and no mesh for it", where="plan", hint='mesh="tp=4"')
        return one.run()


@dataclass
class _Compile:
    """One compile.

    Attributes:
        program: what is compiled.
        options: how it is read.
        budget: the time for all of it.
        ends: when that is over, by `time.monotonic`; None without a budget.
        target: where the program runs; None until it is read, if nobody said.
        quantize, half, cache, threads, progress, visit, excess_precision, background: as `compile` has them.
        place: its place among the kept programs; None if it is not kept.
        as_read: the graph as the front end gave it.
        all_batches: calibration took all batches.
        late: problems that were not searched, since the time was over.
        first: those of them that took the first kernel.
    """

    program: object
    options: LoadOptions
    budget: deadline.Budget
    ends: float | None
    target: Target | None
    quantize: Quantization | None
    half: str | None
    cache: bool | TuningDatabase
    threads: int | None
    progress: Progress | None
    visit: Callable[[str, Graph], None] | None
    excess_precision: bool
    background: bool
    place: Place[Program] | None = None
    as_read: Graph | None = None
    all_batches: bool = True
    late: int = 0
    first: int = 0

    def run(self) -> Program | AnyShape:
        """Give the program that is kept, else read it and choose its kernels."""
        if self.cache is True and not self.background and self.visit is None and not self.options.dims:
            self.place = self._kept_at(self.target or detect("cpu"))
        found = None if self.place is None else self.place.find(self.budget.seconds)
        if found is not None:
            found[0].threads = self.threads
            return found[0]
        with uncrowded():
            read = self._read(Scope())
        assert self.target is not None
        return self._for_one_shape(read, self.target) if dims_of(read.source) is None else self._for_ranges(read, self.target)

    def on_mesh(self, mesh: object, plan: Mapping[str, object] | str | None, device: str | None) -> Program:
        """Give a program on a mesh: read here, its kernels chosen by all ranks (`on_mesh.py`)."""
        from tilewright.on_mesh import compile_on_mesh  # torch.distributed takes its time to import
        from tilewright.runtime.agreement import facts
        from tilewright.runtime.team import team_of

        team = team_of(mesh, device)
        target = detect(team.device)
        with team.working():
            team.at("the start of a program")
            own = self.cache if isinstance(self.cache, TuningDatabase) else None
            circumstances = facts(target, excess_precision=self.excess_precision, cache=bool(self.cache))
            team.peers.agree(circumstances, "the start of a program")
            together = None
            if self.cache is True and team.rank == 0:
                kept, family = user_cache(), f"{team.mesh} over {team.links}"
                own = TuningDatabase(target, kept, excess_precision=self.excess_precision)
                together = TuningDatabase(target, kept, excess_precision=self.excess_precision, family=family)
            graph = load(self.program, replace(self.options, mesh=team.mesh, plan=plan))
            if (self.quantize or self.half) and (graph.local or mesh_axes(graph.outputs)):
                asked = "half=" if self.quantize is None else "quantize="
                hint = "a program over whole tensors with places, or a plan; or quantise or narrow the program before"
                raise UnsupportedError(f"{asked} of a program of one rank", where=graph.name, hint=hint)
            graph, layers, all_batches = narrowed(graph, self.quantize, self.half, target.device, self.ends)
            if self.visit is not None:
                self.visit("source", graph)

            def rules(graph: Graph, trace: Trace) -> Graph:
                return optimise(graph, trace, self.visit, excess_precision=self.excess_precision)

            own = own if team.rank == 0 else None
            made = compile_on_mesh(graph, team, target, self.budget, rules, self.progress, own, together)
            made.layers, made.finished = tuple(layers), made.finished and all_batches
            return made

    def _kept_at(self, target: Target) -> Place[Program] | None:
        """The place of the program among those that are kept; None for what is no file or text, or cannot be kept."""
        if not isinstance(self.program, (str, Path)):
            return None
        how: dict[str, object] = {"half": self.half}
        if (quantize := self.quantize) is not None:
            how["quantize"] = quantize.scheme.said, quantize.rtol, [content(b) for b in quantize.batches]
        return place_of(self.program, self.options, target, Program, excess_precision=self.excess_precision, how=how)

    def _read(self, scope: Scope) -> Reading:
        """The program read and rewritten, its open extents in a scope."""
        with nullcontext() if self.place is None else self.place.reading():
            self.as_read = load(self.program, replace(self.options, scope=scope))
        source = self.as_read
        self.target = self.target or detect(home(source, self.options.example_inputs))
        if self.quantize is not None and dims_of(source) is not None:
            hint = "input_dims= or batch= for one shape, or a model that holds its quantised weights"
            raise UnsupportedError("extents are open, and quantising runs the program", where=source.name, hint=hint)
        source, layers, self.all_batches = narrowed(source, self.quantize, self.half, self.target.device, self.ends)
        if (axes := mesh_axes(source.outputs)) or source.mesh is not None:
            mesh = str(source.mesh or Mesh(tuple(axes.items())))
            hint = f'compile(…, mesh="{mesh}") in each rank\'s process, or --mesh {mesh}'
            raise UnsupportedError("the program is one of several ranks", where=source.name, hint=hint)
        if self.visit is not None:
            self.visit("source", source)
        trace = Trace()
        graph = self._optimised(source, trace, self.visit)
        found = dims_of(source) or scope
        for sentence in found.numbers:
            say(f"{source.name}: {sentence}")
        source = replace(source, notes=(*source.notes, *trace.notes, *found.numbers))
        return Reading(source, graph, trace, tuple(layers), found)

    def _optimised(self, graph: Graph, trace: Trace, visit: Callable[[str, Graph], None] | None = None) -> Graph:
        within_s = ENOUGH_S if self.ends is None else max(RULES_S, self.budget.left_s())
        return optimise(graph, trace, visit, excess_precision=self.excess_precision, within_s=within_s)

    def _database(self, target: Target, *, ranges: bool = False) -> TuningDatabase | None:
        if self.cache is True:
            return TuningDatabase(target, user_cache(), excess_precision=self.excess_precision, ranges=ranges)
        return self.cache or None

    def _for_ranges(self, read: Reading, target: Target) -> AnyShape:
        """A program whose open extents stay open."""
        database = self._database(target, ranges=True)
        if database is None and target.kind != "cpu":
            database = TuningDatabase(target, None, excess_precision=self.excess_precision, ranges=True)

        def inner(region: Graph) -> Program:
            found = Trace()
            made = self._optimised(region, found)
            return prepare(made, made, target, found, chooser(made, target, 0.0, None, database), inner, made=Program)

        made = AnyShape(
            read,
            self._read,
            target,
            inner=inner,
            budget=self.budget,
            background=self.background,
            database=database,
            threads=self.threads,
        )
        return made.start()

    def _for_one_shape(self, read: Reading, target: Target) -> Program:
        """A program whose extents are numbers: its kernels are chosen within the budget, and it is kept."""
        graph, place, budget = read.graph, self.place, self.budget
        choosing = budget if place is None else budget.part(max(0.0, budget.left_s() - place.keeping_s(graph)))
        database = self._database(target)
        with uncrowded(), deadline.allowing(ENOUGH_S if self.ends is None else budget.left_s()):
            first = deadline.Budget(0.0) if self.background else choosing
            made = self._chosen(read.source, graph, read.trace, target, first, database, self.progress)
        if self.first:
            problems = f"{counted(self.first, 'problem')} {'was' if self.first == 1 else 'were'}"
            say(LATE.format(name=read.source.name, problems=problems))
        made.layers, made.threads = read.layers, self.threads
        if isinstance(self.program, torch.nn.Module):
            made.uncompiled = _uncompiled(self.program, self.options.example_inputs, made)
        if self.background and budget.seconds > 0:
            known = self._database(target)
            made.search_on(lambda: chooser(graph, target, budget.seconds, None, known))
        made.finished = self.all_batches and not read.trace.notes and not self.late
        if place is not None and self.as_read is not None:
            place.keep(made, self.as_read, budget.seconds)
        return made

    def _chosen(
        self,
        source: Graph,
        graph: Graph,
        trace: Trace,
        target: Target,
        budget: deadline.Budget,
        database: TuningDatabase | None,
        progress: Progress | None,
    ) -> Program:
        """A program chosen within a budget; each loop in it, its regions together, has as long as what is around."""
        inside = [len(graphs_of(n.op)) for n in graph.nodes() if isinstance(n.op, Call)] if target.kind == "cpu" else []
        loops, waiting = len([r for r in inside if r]), itertools.count(sum(inside), -1)
        parts = parts_for(graph, target)
        decide = chooser(graph, target, budget.part(budget.left_s() / (1 + loops)), progress, database, parts)

        def inner(region: Graph) -> Program:
            found, share_s = Trace(), budget.left_s() / max(next(waiting), 1)
            made = self._optimised(region, found)
            return self._chosen(region, made, found, target, budget.part(share_s), database, None)

        weight, turn = decide.weight, decide.turn
        made = prepare(source, graph, target, trace, decide, inner, made=Program, first=weight, turn=turn, parts=parts)
        self.late += decide.late
        self.first += decide.first
        return made


def narrowed(
    source: Graph, quantize: Quantization | None, half: str | None, device: str, ends: float | None
) -> tuple[Graph, list[Layer], bool]:
    """The graph quantised and in 16 bits as asked for; what each product lost; and whether all batches were looked at until
    `ends`, by `time.monotonic`."""
    layers, all_batches = list[Layer](), True
    if quantize is not None:
        source = recognised(source) if quantize.scheme.attention is not None else source
        until = math.inf if ends is None else ends
        seen = calibrate(source, quantize.batches, device, until=until)
        source, layers = quantize_graph(source, quantize.scheme, seen, rtol=quantize.rtol, device=device, until=until)
        all_batches = seen.batches == len(quantize.batches)
    if half is not None:
        whole = in_half(source.with_outputs([*source.outputs, *(x.after for x in layers)]), narrow(half))
        after = whole.outputs[len(source.outputs) :]
        layers = [replace(x, after=now) for x, now in zip(layers, after, strict=True)]
        source = whole.with_outputs(whole.outputs[: len(source.outputs)])
    return source, layers, all_batches


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
