"""Options of verbs that compile a program, and the compilation that they lead to."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from tilewright.cli.errors import BEGAN
from tilewright.cli.given import Given, progress
from tilewright.cli.options import (
    NOT_NEGATIVE,
    W4_GROUP,
    F,
    Whole,
    all_of,
    budget_option,
    cache_option,
    device_option,
    threads_option,
)
from tilewright.cli.ranks import rank
from tilewright.cli.untrusted import is_supervised
from tilewright.digests import begin, limit_bytes, sighted
from tilewright.errors import InputError, say, visible
from tilewright.files import SAVED

if TYPE_CHECKING:
    import torch

    from tilewright.compiler import Quantization
    from tilewright.hardware.target import Target
    from tilewright.ir.graph import Graph
    from tilewright.program import Program
    from tilewright.report.measure.inputs import Feed
    from tilewright.report.schema import Quantized
    from tilewright.rules.calibrate import Layer, Scheme
    from tilewright.runtime.executable import Executable
    from tilewright.runtime.programs import Place
    from tilewright.schedule.tuning_database import TuningDatabase

SCHEMES = ("int8", "fp8", "w4")
PART = 1 / 30  # of the budget, for timing what was compiled
LEAST_S, LONGEST_S = 0.2, 6.0
SOME_S = 1e-3  # of a budget that is used up
MEASURING_S = 8.0  # for the machine's rates at most, where the budget has no end: twice as long as a quiet one takes, and more
RANDOM_SEED = 1001  # of random calibration data: not that of the data a program is run on
RANDOM_WARNING = (
    "calibrated on random inputs: its ranges and its errors say little about real data; give some with --calibration F.npz"
)


@dataclass(frozen=True)
class Compiling:
    """The options that say how to compile a program.

    Attributes:
        device: cpu, cuda or cuda:1.
        budget: seconds from the command to its answer; None takes the default.
        excess_precision: leave out roundings to 16 bits inside a kernel.
        half: f16 or bf16 for an f32 model's products, attention and norms; None to take them as they are.
        scheme: int8, fp8 or w4 to quantise a float model, None to take the program as it is.
        group: elements of K that share a scale, for w4.
        per_row: activations are scaled per row as the program runs.
        fp8_attention: what attention multiplies is quantised, too.
        calibration: .npz files, each a batch of inputs; none: random.
        rtol: products that lose more stay in float.
        dump: folder to write the graph after each stage to.
        cache: read back what was measured before, and keep what is measured now.
        database: the tuning database of `tune`, in place of the usual one.
        after_s: seconds of the budget for what follows compiling.
        trust: run the machine code of a saved program that this user did not sign.
        mesh: this process is one rank of it; None for a program of one process.
    """

    device: str = "cpu"
    budget: float | None = None
    excess_precision: bool = False
    half: str | None = None
    scheme: str | None = None
    group: int = W4_GROUP
    per_row: bool = False
    fp8_attention: bool = False
    calibration: tuple[Path, ...] = ()
    rtol: float | None = None
    dump: Path | None = None
    cache: bool = True
    database: TuningDatabase | None = None
    after_s: float = 0.0
    trust: bool = False
    mesh: str | None = None

    @property
    def budget_s(self) -> float:
        """The budget, or its default."""
        from tilewright.compiler import DEFAULT_BUDGET_S

        return DEFAULT_BUDGET_S if self.budget is None else self.budget


_options = all_of(
    device_option,
    threads_option,
    budget_option,
    click.option("--fp16", is_flag=True, help="Run an f32 model in f16: its products, attention and norms."),
    click.option("--bf16", is_flag=True, help="Run an f32 model in bf16."),
    click.option("--int8", is_flag=True, help="Quantise a float model: s8 weights per column, s8 activations."),
    click.option("--fp8", is_flag=True, help="Quantise a float model: f8e4m3fn weights per column and activations."),
    click.option(
        "--w4",
        type=Whole(min=1),
        metavar="[=GROUP]",
        help="Quantise a float model's weights to s4 by GROUP of K: --w4=128; --w4 alone is --w4=64.",
    ),
    click.option("--per-row", is_flag=True, help="With --int8, --fp8: scale activations per row as the program runs."),
    click.option("--fp8-attention", is_flag=True, help="With --fp8: quantise queries, keys and values of attention, too."),
    click.option(
        "--calibration",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="F.npz",
        help="Inputs by name to calibrate on; repeatable, a batch each. Random data if not given.",
    ),
    click.option(
        "--excess-precision", is_flag=True, help="Keep values unrounded inside a kernel where the program rounds to 16 bits."
    ),
    cache_option,
)
rtol_option = click.option(
    "--rtol", type=NOT_NEGATIVE, metavar="X", help="With --int8, --fp8, --w4: leave layers that lose more in float."
)
trust_option = click.option("--trust", is_flag=True, help="Run the code of a .twp file that was saved elsewhere.")
dump_option = click.option(
    "--dump", type=click.Path(path_type=Path), metavar="DIR", help="Write the graph after each stage as text and as SVG."
)


def compile_options(f: F) -> F:
    """Gather the options above, and `rtol` and `dump` where a verb has them, into one argument `how`."""

    @functools.wraps(f)
    def gathered(*, fp16: bool, bf16: bool, int8: bool, fp8: bool, w4: int | None, **given: Any) -> Any:
        if fp16 and bf16:
            raise InputError("--fp16 and --bf16 exclude each other", where="command line", hint="give one of them")
        named = [name for name, wanted in zip(SCHEMES, (int8, fp8, w4 is not None), strict=True) if wanted]
        if len(named) > 1:
            raise InputError(f"--{named[0]} and --{named[1]} exclude each other", where="command line", hint="give one of them")
        taken = {name: given.pop(name) for name in Compiling.__dataclass_fields__ if name in given}
        half = "f16" if fp16 else "bf16" if bf16 else None
        how = Compiling(half=half, scheme=named[0] if named else None, group=w4 or W4_GROUP, **taken)
        _check(how, rtol_compares="rms_tol" in given)
        return f(how=how, **given)

    return _options(cast("F", gathered))


def _check(how: Compiling, rtol_compares: bool) -> None:
    """See that no option is given that would do nothing; `rtol_compares` where --rtol has another meaning, too."""
    idle = {
        "--calibration": bool(how.calibration),
        "--per-row": how.per_row,
        "--fp8-attention": how.fp8_attention,
        "--rtol": how.rtol is not None and not rtol_compares,
    }
    for name, given in idle.items():
        if given and how.scheme is None:
            raise InputError(
                f"{name} is for quantising",
                where="command line",
                hint="add --fp8" if name == "--fp8-attention" else "add --int8, --fp8 or --w4",
            )
    if how.per_row and how.scheme == "w4":
        raise InputError("--per-row scales activations, and --w4 leaves them in float", where="command line")
    if how.fp8_attention and (how.scheme != "fp8" or how.per_row):
        hint = "leave --per-row out" if how.scheme == "fp8" else "--fp8 in its place"
        raise InputError("--fp8-attention is for --fp8 without --per-row", where="command line", hint=hint)


def kept_of(how: Compiling, what: str = "the kernels that were chosen are kept") -> Callable[[], str]:
    """Say `what` is kept of a command that Ctrl-C ends, or that nothing is, where there is no cache."""

    def words() -> str:
        from tilewright.schedule.cache import user_cache

        return what if how.cache and user_cache() is not None else "nothing is kept"

    return words


def compile_program(graph: Graph, how: Compiling) -> tuple[Executable, Quantized | None]:
    """The program compiled as told, each stage written if that was asked for; and what quantising it chose, if it was.

    Raises:
        InputError: the calibration data or the dump folder is no good.
    """
    from tilewright.compiler import compile
    from tilewright.report.html.picture import Dump

    dump = None if how.dump is None or (how.mesh is not None and rank()) else Dump(how.dump)
    warn_of_random(how)
    budget_s = left_of(how.budget_s, how.after_s)
    what = "calibrating and choosing kernels" if how.scheme else "choosing kernels"
    kept = kept_of(how, "what was measured until then is kept") if how.database is None else None  # `tune` counts them itself
    with progress(what, budget_s or None, kept) as show:
        quantize = None if how.scheme is None else _quantization(graph, how)
        program = compile(
            graph,
            device=how.device,
            budget_s=budget_s,
            quantize=quantize,
            half=how.half,
            excess_precision=how.excess_precision,
            cache=how.database if how.database is not None else how.cache,
            mesh=how.mesh,
            progress=show,
            visit=dump,
        )
    return program, _described(program.layers, how)


def timing_s(budget_s: float, left_s: float = math.inf) -> float:
    """Seconds of a budget, of which so many are left, for timing a program and its steps."""
    return max(LEAST_S, min(LONGEST_S, PART * budget_s, left_s))


def before_timing(how: Compiling) -> Compiling:
    """The options that leave time of the budget for timing what is compiled, and the machine where nobody has yet."""
    from tilewright.hardware.ceilings import MEASURED_S, known
    from tilewright.hardware.detect import detect

    return replace(how, after_s=timing_s(how.budget_s) + (0.0 if known(detect(how.device)) else MEASURED_S))


def warn_of_random(how: Compiling) -> None:
    """Say that calibration data are random, where they are."""
    if how.scheme is not None and not how.calibration:
        click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {RANDOM_WARNING}", err=True)


def left_of(budget_s: float, after_s: float = 0.0) -> float:
    """Seconds left of a budget that counts from the command on, once so many are kept for what follows; of any but 0, which
    leaves nothing out, `SOME_S` at least."""
    return max(SOME_S, ends_of(budget_s) - time.monotonic() - after_s) if budget_s > 0 else 0.0


def ends_of(budget_s: float) -> float:
    """The end of a budget that counts from the command on, on the clock of `time.monotonic`; infinity for one of 0."""
    began = click.get_current_context().find_root().meta.get(BEGAN, time.monotonic())
    return began + budget_s if budget_s > 0 else math.inf


@dataclass(frozen=True)
class Ready:
    """A program that a verb is about, ready to run.

    Attributes:
        program: compiled.
        quantized: what quantising it chose, if it was quantised.
        graph: the program as the front end gave it.
        feeds: a value for each input; none for a verb that runs nothing.
        keep: keeps the program for later processes, if it is not one that was kept. To be called behind the answer.
    """

    program: Executable
    quantized: Quantized | None
    graph: Graph
    feeds: list[Feed]
    keep: Callable[[], None]


def ready(
    given: Given,
    how: Compiling,
    *,
    data: bool = False,
    timed: bool = False,
    after_s: Callable[[Graph], float] = lambda graph: 0.0,
) -> Ready:
    """The program that a verb is about and, with `data`, what it runs on: one that was kept, or read and compiled as told.
    With `timed`, part of the budget is left for timing it; `after_s` says how many seconds for what else follows.

    Raises:
        InputError: as `Given.load`, `Given.feeds` and `program_of`.
    """
    if how.mesh is not None and given.file.suffix.lower() == SAVED:
        return _saved_on_mesh(given, how, data=data)
    place = None if how.dump is not None else _place(given, how)
    found = None if place is None else place.find(how.budget_s)
    if found is not None:
        program, graph = found
        feeds = given.feeds(graph) if data else []
        warn_of_random(how)
        return Ready(program, _described(program.layers, how), graph, feeds, lambda: None)
    with nullcontext() if place is None else place.reading():
        graph = given.load(mesh=how.mesh)
        if how.mesh is not None:
            graph = _placed(graph, how.mesh)
    feeds = given.feeds(graph) if data and how.mesh is None else []
    told = before_timing(how) if timed else how
    program, quantized = program_of(given.file, graph, replace(told, after_s=told.after_s + after_s(graph)))
    if data and how.mesh is not None:
        feeds = _parts(program, given, graph)

    def keep() -> None:
        if place is not None:
            with progress("keeping the program for its next use", kept=lambda: "the report is whole"):
                place.keep(program, graph, how.budget_s)

    return Ready(program, quantized, graph, feeds, keep)


def _saved_on_mesh(given: Given, how: Compiling, *, data: bool) -> Ready:
    """Read this rank's program of those that were saved together, `model.0-of-2.twp` for `model.twp`, and what it runs on.

    Raises:
        InputError: as `load_on_mesh`, or an option would do nothing.
    """
    from tilewright.on_mesh import load_on_mesh
    from tilewright.report.measure.simulate import whole_inputs

    _refuse_idle(given.file, how)
    if given.input_dims or given.batch is not None or given.dims or given.fixed:
        raise InputError("the shapes of a saved program are settled", where=str(given.file), hint="compile its source")
    program = load_on_mesh(given.file, how.mesh, device=how.device, trust=how.trust)
    feeds = _parts(program, given, whole_inputs(program.source)) if data else []
    return Ready(program, None, program.source, feeds, lambda: None)


def _parts(program: Executable, given: Given, graph: Graph) -> list[Feed]:
    """Take this rank's parts of what was given, or drawn for a graph with whole inputs."""
    from tilewright.on_mesh import MeshProgram

    assert isinstance(program, MeshProgram)
    with program.team.working():  # what an input meets may come from other ranks
        return [replace(f, value=program.part(f.shown.name, f.value)) for f in given.feeds(graph)]


def _placed(graph: Graph, mesh: str) -> Graph:
    """A program for a mesh; one over whole tensors that places nothing has the places of `plan_for`, as for `--simulate`."""
    from tilewright.ir.mesh import Mesh
    from tilewright.ir.ops import Place
    from tilewright.ir.verify import mesh_axes
    from tilewright.rules.shard import plan_for

    if graph.local or mesh_axes(graph.outputs) or any(isinstance(n.op, Place) for n in graph.nodes()):
        return graph
    made = plan_for(replace(graph, mesh=Mesh.parse(mesh)))
    if rank() == 0:
        say(made.notes[-1])
    return made


def _place(given: Given, how: Compiling) -> Place[Program] | None:
    """The place of the program among those that are kept; None if it has none."""
    if (
        given.dims
        or how.mesh is not None
        or not how.cache
        or how.database is not None
        or how.trust
        or is_supervised()
        or not given.file.is_file()
    ):
        return None
    from tilewright.hardware.awake import wake

    begin(given.file, limit_bytes())  # while what follows is imported
    wake(how.device)
    from tilewright.hardware.detect import detect
    from tilewright.program import Program
    from tilewright.runtime.programs import place_of

    asked: dict[str, object] = {"half": how.half}  # as `compiler` asks: one process takes what the other kept
    if how.scheme is not None:
        data = [s and s.digest() for s in sighted(how.calibration)]
        if None in data:
            return None
        named = {n: getattr(how, n) for n in ("scheme", "group", "per_row", "fp8_attention", "rtol")}
        asked["quantize"] = {"command": named, "batches": data or RANDOM_SEED}
    return place_of(given.file, given.options(), detect(how.device), Program, excess_precision=how.excess_precision, how=asked)


def _described(layers: Sequence[Layer], how: Compiling) -> Quantized | None:
    """Quantising's choices, as reports have them."""
    if how.scheme is None:
        return None
    from tilewright.report.measure.accuracy import describe_quantization

    data = ", ".join(map(str, how.calibration)) or f"random inputs, seed {RANDOM_SEED}"
    return describe_quantization(_scheme(how), data, layers)


def program_of(file: Path, graph: Graph, how: Compiling) -> tuple[Executable, Quantized | None]:
    """The program of a file: read back where it was saved compiled, else compiled as told (`compile_program`).

    With --untrusted a saved program is compiled from its graph.

    Raises:
        InputError: a saved program cannot be read or is not to be trusted, or an option would do nothing.
    """
    if file.suffix.lower() != SAVED:
        if how.trust:
            raise InputError("--trust is for a saved program", where=str(file), hint=f"a {SAVED} file")
        return compile_program(graph, how)
    if is_supervised():
        return compile_program(graph, how)
    _refuse_idle(file, how)
    from tilewright.program import load_program

    return load_program(file, trust=how.trust, device=how.device, budget_s=left_of(how.budget_s, how.after_s)), None


def _refuse_idle(file: Path, how: Compiling) -> None:
    """See that no option is for what is compiled already.

    Raises:
        InputError: one is.
    """
    idle = {
        "--int8, --fp8 and --w4": how.scheme is not None,
        "--fp16 and --bf16": how.half is not None,
        "--excess-precision": how.excess_precision,
        "--dump": how.dump is not None,
    }
    for names, given in idle.items():
        if given:
            raise InputError(f"{names}: this program is compiled already", where=str(file), hint="compile its source")


def _quantization(graph: Graph, how: Compiling) -> Quantization:
    from tilewright.compiler import Quantization
    from tilewright.report.measure.inputs import make_feeds

    batches = [_batch(graph, path) for path in how.calibration]
    if not batches:
        batches = [_tensors(graph, {f.shown.name: f.value for f in make_feeds(graph, seed=RANDOM_SEED)}, None)]
    return Quantization(_scheme(how), batches, rtol=how.rtol)


def _scheme(how: Compiling) -> Scheme:
    from tilewright.rules.calibrate import scheme

    assert how.scheme is not None
    return scheme(how.scheme, group=how.group, rows="row" if how.per_row else "tensor", attention=how.fp8_attention)


def _batch(graph: Graph, path: Path) -> dict[str, torch.Tensor]:
    """One calibration batch, every input of the program in it."""
    from tilewright.ir.graph import label_of
    from tilewright.report.measure.inputs import no_input, read_npz

    arrays = read_npz(path, graph, option="--calibration")
    names = [label_of(n) for n in graph.inputs]
    for name in arrays:
        if name not in names:
            raise no_input(name, names, where=str(path))
    for name in names:
        if name not in arrays:
            raise InputError(f"no value for input {name!r}", where=str(path), hint="calibration needs every input")
    return _tensors(graph, arrays, path)


def _tensors(graph: Graph, values: Mapping[str, object], path: Path | None) -> dict[str, torch.Tensor]:
    from tilewright.ir.graph import label_of
    from tilewright.runtime.arrays import from_user

    found: dict[str, torch.Tensor] = {}
    for node in graph.inputs:
        name = label_of(node)
        try:
            found[name] = from_user(values[name], node.tensor, name, "cpu")
        except InputError as error:
            raise InputError(error.what, where=f"{error.where} of {path}", hint=error.hint) from None
    return found


def measured_ceilings(program: Executable, times_us: Sequence[float | None] | None = None, *, ends: float = math.inf) -> Target:
    """The program's target with its measured rates. Those that a product was seen to exceed, in the times given for each step
    or else in those that decided, are measured again, which is said. They stay out past `ends`, by `time.monotonic`, and with
    a budget of 0, which has no end, after `MEASURING_S`; that is said, too."""
    from tilewright import deadline
    from tilewright.report.measure import work

    ends = min(ends, time.monotonic() + MEASURING_S)

    bar = progress("measuring the machine") if times_us is None else nullcontext()  # steps are timed under a bar of their own
    with bar, deadline.until(ends):
        target, said = work.measured_ceilings(program, times_us)
    for sentence in said if program.graph.mesh is None or not rank() else ():  # what each rank would say, the first one says
        click.echo(f"note: {visible(sentence)}", err=True)
    return target
