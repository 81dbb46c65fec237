"""Reading of a saved program: as it was, if its code is to be trusted and fits here; else compiled again from its graph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import torch

from tilewright import plug_ins
from tilewright.candidates import split
from tilewright.candidates.llvm.normalization.candidate import checked
from tilewright.candidates.llvm.runtime import calls, engine, image
from tilewright.candidates.llvm.runtime.run import behind
from tilewright.candidates.triton.saved import launched
from tilewright.errors import LOGGER, InputError, UnsupportedError
from tilewright.frontends.tilewright_text import check_calls
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.account import Account
from tilewright.ir.artefact import Container, Graphs
from tilewright.ir.graph import Graph, Node
from tilewright.ir.pattern import Trace
from tilewright.ir.text import parse
from tilewright.ir.types import TensorType
from tilewright.lowering.pieces import chosen_of
from tilewright.processors import usable
from tilewright.rules.calibrate import Layer
from tilewright.runtime.artefact.format import (
    Chosen,
    Header,
    Kept,
    Machine,
    OfRank,
    SavedLayers,
    SavedProgram,
    SavedStep,
    Whole,
    machine_of,
    made_by,
    numbered,
)
from tilewright.runtime.artefact.sign import signed
from tilewright.runtime.executable import E
from tilewright.runtime.partition import Part
from tilewright.runtime.prepare import chooser, prepare
from tilewright.runtime.steps import Inner, Posed, Step, kernel_step, library_step
from tilewright.schedule.cache import user_cache
from tilewright.schedule.candidate import Kernel, Runner, Schedule, concerns, discover, plan_for
from tilewright.schedule.choice import rejected_of
from tilewright.schedule.problem import AnyProblem, AttentionProblem, FusionProblem, Problem
from tilewright.schedule.recipe import Built, Called, Launched, Prepared, Recipe, Split
from tilewright.schedule.search import Decision
from tilewright.schedule.tuning_database import TuningDatabase
from tilewright.threads import limit, limited, valid_count

if TYPE_CHECKING:
    from tilewright.ir.graph import Value


TRUST = "if you trust the file: trust=True, or --trust; or tilewright.compile(path), which uses its graph alone"


def unpickled(content: bytes, made: type[E]) -> E:
    """The program that `artefact_of` wrote; trusted, as what is unpickled is."""
    return load(Container(Path("a pickle"), content), made, trust=True, device=None, budget_s=0.0)


def load(
    container: Container,
    made: type[E],
    *,
    trust: bool,
    device: str | torch.device | None,
    budget_s: float,
    threads: int | None = None,
) -> E:
    """See `tilewright.load_program`; `made` is the kind of executable that is wanted.

    Raises:
        InputError: the file is damaged, or is of one rank, which `load_of_rank` reads.
    """
    header, wanted = container.decoded(Header), valid_count(threads) or limit()
    if header.of_rank is not None:
        what = f"it is the program of rank {header.of_rank.rank} of the mesh {header.of_rank.mesh}"
        raise InputError(what, where=str(container.path), hint=f'load_on_mesh("model.twp", "{header.of_rank.mesh}")')
    count = wanted or (header.thread_count and min(header.thread_count, usable()))
    with limited(count):  # compiled again, it is for as many
        program = _loaded(container, header, made, trust=trust, device=device, budget_s=budget_s)
    program.threads = count
    return program


def load_of_rank(container: Container, made: type[E], device: str, *, trust: bool) -> tuple[E, OfRank]:
    """The program of one rank, and whose it is.

    Raises:
        InputError: the file is damaged, of no rank, or its code is not signed by this user's key, nor trusted.
        UnsupportedError: it is for another machine or version.
    """
    header = container.decoded(Header)
    if header.of_rank is None:
        raise InputError("it is of one process, not of a rank", where=str(container.path), hint="tilewright.load_program")
    target = detect(device)
    if why := _elsewhere(header, target):
        raise UnsupportedError(why, where=str(container.path), hint="compile the program again, on every rank")
    if not trust and not signed(container):
        what = "code that is not signed by this user's key on this machine"
        raise InputError(what, where=str(container.path), hint=TRUST)
    with limited(header.thread_count or usable()):
        program = _Reader(container, container.decoded(Whole), target, made).whole()
    program.threads = header.thread_count
    return program, header.of_rank


def _loaded(
    container: Container, header: Header, made: type[E], *, trust: bool, device: str | torch.device | None, budget_s: float
) -> E:
    trusted = trust or signed(container)
    target, why = _target(header.machine, device)
    why = why or _elsewhere(header, target)
    if why is None and not trusted:
        what = "code that is not signed by this user's key on this machine"
        raise InputError(what, where=str(container.path), hint=TRUST)
    if why is None:
        try:
            return _Reader(container, container.decoded(Whole), target, made).whole()
        except UnsupportedError as error:
            why = error.what
    LOGGER.warning("%s is compiled again from its graph: %s", container.path, why)
    return _again(container, header.program, target, budget_s, trusted, made)


def kept_in(container: Container) -> Kept:
    """Dependences of a kept program.

    Raises:
        InputError: it is none, or no key of this user signed it.
    """
    if not signed(container):
        raise container.broken("it is not signed by this user's key")
    kept = container.decoded(Whole).kept
    if kept is None:
        raise container.broken("it is no kept program")
    return kept


def restored(container: Container, target: Target, made: type[E]) -> tuple[E, Graph]:
    """A kept program, and the graph as the front end gave it.

    Raises:
        InputError: it does not hold together, or another version of the code made it.
        UnsupportedError: a step has no kernel here.
    """
    whole = container.decoded(Whole)
    why = _elsewhere(whole, target)
    if why is not None or whole.kept is None:
        raise container.broken(why or "it is no kept program")
    with ThreadPoolExecutor(1) as beside:  # digests, while this thread reads text
        checked = beside.submit(container.check, _needed(whole))
        read = container.graph(whole.kept.read or whole.program.source, whole.program, ())
        checked.result()
    program = _Reader(container, whole, target, made).whole()
    if not whole.kept.read:
        program.source = read
    return program, read


def _target(machine: Machine, device: str | torch.device | None) -> tuple[Target, str | None]:
    """Choose where to run, and say why that is not what a program was compiled for, if it is not."""
    if device is not None:
        return detect(device), None
    try:
        return detect(machine.device), None
    except InputError as error:
        return detect("cpu"), error.what


def _elsewhere(header: Header, target: Target) -> str | None:
    """None if a program's kernels are for this machine and version, else the sentence why not."""
    here, there = machine_of(target), header.machine
    if (here.device, here.chip, here.architecture) != (there.device, there.chip, there.architecture):
        return f"it is for {there.name} ({there.chip}, {there.device}), and this is {here.name} ({here.chip}, {here.device})"
    missing = [f for f in there.features if f not in here.features]
    if missing:
        return f"it is for a processor with {', '.join(missing[:3])}"
    return None if header.made_by == made_by() else "another version of Tilewright made it, which calls kernels in another way"


def _again(container: Container, saved: Graphs, target: Target, budget_s: float, trusted: bool, made: type[E]) -> E:
    """A program compiled from its graph as the rules left it."""
    state = container.state(saved)
    source, graph = (container.graph(text, saved, state) for text in (saved.source, saved.graph))
    if not trusted:
        check_calls(graph)
    decide = chooser(graph, target, budget_s, database=TuningDatabase(target, user_cache()))
    within = iter(saved.within)

    def inner(region: Graph) -> E:
        found = next(within, None)
        if found is not None:
            program = _again(container, found, target, 0.0, trusted, made)
            if [n.type for n in (*program.source.inputs, *program.source.outputs)] == [
                n.type for n in (*region.inputs, *region.outputs)
            ]:
                return program
        raise container.broken("a loop in it has another program")

    return prepare(source, graph, target, Trace(), decide, inner, made=made, first=decide.weight, turn=decide.turn)


class _Reader(Generic[E]):
    """Programs of a file, as they were."""

    def __init__(self, container: Container, whole: Whole, target: Target, made: type[E]) -> None:
        self._container, self._target, self._made, self._whole = container, target, made, whole
        container.check(_needed(whole))
        objects = {name: container.tensor(at).numpy().tobytes() for name, at in whole.code.items()}
        if any(hashlib.sha256(content).hexdigest() != name for name, content in objects.items()):
            raise container.broken("machine code under another's name")
        helpers = objects.pop(whole.threads, None)
        if helpers is not None:
            engine.take_threads(lambda known: image.mapped({"threads": helpers}, known)["threads"])
        self._code: Mapping[str, engine.Code] = image.mapped(objects) if objects and helpers is not None else {}
        if objects:
            if whole.caller not in self._code:
                raise container.broken("what calls its machine code is missing")
            calls.take_caller(self._code[whole.caller])

    def __deepcopy__(self, memo: object) -> _Reader[E]:
        return self  # a copy of a program shares the file

    def whole(self) -> E:
        """The program, with what rules and quantising did."""
        made = self.program(self._whole.program)
        if self._whole.account is not None:
            nodes, saved = numbered(made.graph), self._whole.account
            left, rules = ({self._node(nodes, i): said for i, said in each} for each in (saved.left, saved.rules))
            made.told = Account(left, rules)
        if self._whole.quantized is not None:
            made.layers = self._layers(self._whole.quantized)
        return made

    def _layers(self, saved: SavedLayers) -> tuple[Layer, ...]:
        """The products as quantising left them."""
        before, after = (self._roots(text) for text in (saved.before, saved.after))
        if not len(before) == len(after) == len(saved.layers):
            raise self._container.broken("its layers are others")
        try:
            return tuple(
                Layer(
                    x.where, float(x.error), float(x.largest), x.skip_reason, None if x.scale is None else float(x.scale),
                    (float(x.weight_scales[0]), float(x.weight_scales[1])), b, a,
                )
                for x, b, a in zip(saved.layers, before, after, strict=True)
            )  # fmt: skip
        except ValueError as error:
            raise self._container.broken(f"a layer without numbers: {error}") from error

    def program(self, saved: SavedProgram) -> E:
        """One program, and those of its regions."""
        state = self._container.state(saved)
        graph = self._container.graph(saved.graph, saved, state)
        nodes, target = numbered(graph), self._target
        ready: dict[Node, Value] = {}
        for number, name in saved.values:
            node = self._node(nodes, number)
            value = self._container.tensor(name)
            if not isinstance(node.type, TensorType) or self._container.arrays[name].kind.type != node.type:
                raise self._container.broken(f"{name!r} is not {node.type}")
            ready[node] = value.to(target.device)
        for node, kept in zip(graph.inputs[len(graph.inputs) - len(graph.state) :], graph.state, strict=True):
            ready[node] = kept.to(target.device)
        known, within = {*ready, *graph.inputs}, iter(saved.within)
        steps: list[Step] = []
        for step in saved.steps:
            of = partial(self._nodes, nodes)
            part = Part(step.kind, of(step.nodes), of(step.inputs), of(step.outputs))
            for n in part.inputs:
                if n not in known and not n.constant:
                    raise self._container.broken("a step reads what no step has made")
                if n not in known:
                    ready[n] = None  # in a kernel's packed weights
            made = self._step(step, graph, part, ready, within)
            known.update((*part.inputs, *part.outputs))
            steps.append(made)
        if not known.issuperset(graph.outputs):
            raise self._container.broken("no step makes a result")
        made = self._made(graph, graph, target, tuple(steps), Trace(), ready)
        made.read_source(partial(self._container.graph, saved.source, saved, state))
        return made

    def _node(self, nodes: Sequence[Node], number: int) -> Node:
        if not 0 <= number < len(nodes):
            raise self._container.broken(f"there is no node {number}")
        return nodes[number]

    def _nodes(self, nodes: Sequence[Node], numbers: Sequence[int]) -> tuple[Node, ...]:
        return tuple(self._node(nodes, n) for n in numbers)

    def _step(
        self, saved: SavedStep, graph: Graph, part: Part, ready: Mapping[Node, Value], within: Iterator[SavedProgram]
    ) -> Step:
        if saved.chosen is None:
            inner: Inner | None = (lambda _: self.program(next(within))) if saved.within else None
            return library_step(graph, part, self._target, inner)
        posed = Posed.of(part, ready)
        return kernel_step(graph, posed, ready, self._decision(saved.chosen, posed.problem))

    def _decision(self, chosen: Chosen, problem: AnyProblem) -> Decision:
        schedule = Schedule(chosen.knobs)
        kernel = Kernel(
            chosen.candidate,
            schedule,
            partial(self._runner, chosen.recipe, problem, schedule),
            workspace_bytes=chosen.workspace_bytes,
            packed_bytes=chosen.packed_bytes,
            releasable=frozenset(chosen.releasable),
            roundoff=chosen.roundoff,
            parts=chosen.parts,
            place=partial(self._launched, chosen.recipe, problem) if isinstance(chosen.recipe, Launched) else None,
        )
        how = chosen.time_us, rejected_of(chosen), chosen.measured, chosen.verified
        return Decision(problem, kernel, *how, recalled=chosen.measured, provisional=chosen.provisional)

    def _runner(self, recipe: Recipe, problem: AnyProblem, schedule: Schedule, weights: Mapping[int, torch.Tensor]) -> Runner:
        """A runner from its recipe.

        Raises:
            InputError: it does not fit the problem.
            UnsupportedError: a candidate that is to build it cannot.
        """
        if isinstance(recipe, Built):
            return _kernel(recipe, problem, self._target).prepare(weights)
        if isinstance(recipe, Launched):
            return self._launched(recipe, problem, weights)
        if isinstance(recipe, Split):
            if not isinstance(problem, Problem | AttentionProblem):
                raise self._container.broken("what is split is no product")
            pieces = split.pieces_of(problem, schedule)
            named = chosen_of(schedule)
            if not len(pieces) == len(named) == len(recipe.pieces):
                raise self._container.broken("a product is split into other pieces")
            kernels = [
                Kernel(name, point, partial(self._runner, r, p.problem, point))
                for p, (name, point), r in zip(pieces, named, recipe.pieces, strict=True)
            ]
            return split.in_order(pieces, kernels, weights, len(problem.outputs))
        called = recipe if isinstance(recipe, Called) else recipe.call
        call = calls.restored(called, self._code, self._container.tensor, len(problem.types))
        if call.results != problem.outputs:
            raise self._container.broken("a kernel gives other results than its step has")
        if isinstance(recipe, Prepared):
            left, right = (self._expression(text) if text else None for text in (recipe.left, recipe.right))
            return behind(call, left, right, recipe.k_last)
        if isinstance(recipe, Called):
            return calls.bound(call)
        if not isinstance(problem, FusionProblem):
            raise self._container.broken("what picks by indices is no fusion")
        return checked(call, problem)

    def _launched(
        self,
        recipe: Launched,
        problem: AnyProblem,
        weights: Mapping[int, torch.Tensor],
        places: Mapping[int, torch.Tensor] | None = None,
    ) -> Runner:
        memory = self._container.tensor
        return launched(recipe, problem, weights, self._target, memory, self._expression, places)

    def _expression(self, text: str) -> Node:
        (root,) = self._roots(text)
        return root

    def _roots(self, text: str) -> tuple[Node, ...]:
        return parse(text, self._container.literals).outputs


def _needed(whole: Whole) -> list[str]:
    """The arrays that are needed before the first call, code included."""
    return [*whole.code.values(), *_arrays_of(whole.program)]


def _arrays_of(saved: SavedProgram) -> Sequence[str]:
    """The arrays that are needed before the first call."""
    names = [*saved.state, *(name for _, name in saved.values), *(name for p in saved.within for name in _arrays_of(p))]
    for step in saved.steps:
        names += [] if step.chosen is None else _packed(step.chosen.recipe)
    return names


def _packed(recipe: Recipe) -> list[str]:
    if isinstance(recipe, Split):
        return [name for piece in recipe.pieces for name in _packed(piece)]
    if isinstance(recipe, Launched):
        return [recipe.code.binary, *(name for _, name in recipe.held)]
    called = recipe if isinstance(recipe, Called) else None if isinstance(recipe, Built) else recipe.call
    return [called.packed] if called is not None and called.packed else []


def _kernel(recipe: Built, problem: AnyProblem, target: Target) -> Kernel:
    """A kernel that its candidate builds: one that competes here, of its own points. A plug-in's is run where its package is
    installed as it was when the program was saved, and nowhere else."""
    name, schedule = recipe.candidate, Schedule(recipe.knobs)
    found = next((c for c in discover(kind=target.kind) if c.name == name and concerns(c, problem, target)), None)
    package = "" if found is None else found.package
    if recipe.package and not package:
        raise UnsupportedError(f"its kernel {name} is of the package {recipe.package}, which does not plug in here")
    if found is None:
        raise UnsupportedError(f"there is no candidate {name} for {problem}")
    if package and recipe.package != (here := plug_ins.said(package)):
        raise UnsupportedError(f"its kernel {name} is of {recipe.package or 'another package'}, and {here} is installed")
    plan = plan_for(found, problem, target)
    if package and schedule not in plan.schedules():
        raise UnsupportedError(f"{name} has no such point for {problem}: {schedule}")
    return plan.build(schedule)
