"""A program on a mesh of ranks: each runs its own, and their kernels were chosen together.

Inputs and results are this rank's parts, or torch DTensors that hold them.
"""

from __future__ import annotations

import secrets
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from tilewright.deadline import Budget
from tilewright.errors import InputError, UnsupportedError, check_type, say
from tilewright.hardware.detect import detect
from tilewright.hardware.links import Links
from tilewright.hardware.target import Target
from tilewright.ir.artefact import Container
from tilewright.ir.graph import Graph, label_of, toposort
from tilewright.ir.mesh import Mesh, Placement, in_team, team
from tilewright.ir.ops import Collective
from tilewright.ir.pattern import Trace
from tilewright.ir.state import caller_inputs
from tilewright.ir.verify import mesh_axes
from tilewright.program import Program, Report
from tilewright.progress import Progress
from tilewright.report.measure.links import links_of
from tilewright.report.measure.timing import Rounds, Times
from tilewright.report.measure.traffic import between
from tilewright.rules.collective import sequence_parallel
from tilewright.rules.shard import localise
from tilewright.runtime.agreement import Agreed, constants, facts, outline, times_us
from tilewright.runtime.artefact.format import OfRank
from tilewright.runtime.artefact.read import load_of_rank
from tilewright.runtime.artefact.write import save
from tilewright.runtime.calls import digest_of
from tilewright.runtime.executable import Executable
from tilewright.runtime.forms import faster_form
from tilewright.runtime.partition import Part, parts_for
from tilewright.runtime.prepare import prepare
from tilewright.runtime.steps import Step
from tilewright.runtime.team import ProcessTeam, team_of
from tilewright.schedule.tuning_database import TuningDatabase

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement as DTensorPlacement

    from tilewright.ir.graph import Value
    from tilewright.report.schema import Perf


PLACED = "place its weights, or give a plan: docs/several-devices.md"


class MeshProgram(Program):
    """One rank's program on a mesh. Call it on every rank at the same time.

    An input may be a DTensor of the program's mesh and placements, or this rank's part. Results are DTensors if an input was
    one.

    Attributes:
        team: the ranks.
        number: which of the team's programs it is, in the order in which they were compiled.
        alike: by the mesh axes along which values travel the places of inputs that lie whole along them.
        links: what operations between the ranks take.
    """

    team: ProcessTeam
    steps: tuple[Step, ...]
    number: int
    alike: Mapping[tuple[str, ...], Sequence[int]]
    links: Links

    def __post_init__(self) -> None:
        self.steps = tuple(_announced(i, step) for i, step in enumerate(self.steps))
        self.own_graphs = False
        self._wholes, self._parts_of = dict[int, tuple[weakref.ref[torch.Tensor], int]](), 0
        super().__post_init__()

    def __repr__(self) -> str:
        """One line, with the mesh and this rank."""
        return f"{super().__repr__()[:-1]} as rank {self.team.rank} of {self.team.mesh}>"

    @property
    def placements(self) -> dict[str, Placement]:
        """The placements of inputs and results by name: whole on every rank where the program does not say."""
        names = [*map(label_of, self.source.inputs), *self.source.output_names]
        nodes = (*self.source.inputs, *self.source.outputs)
        said = self.source.placements or [Placement.whole(n.tensor.rank) for n in nodes]
        return dict(zip(names, said, strict=True))

    def part(self, name: str, value: object) -> object:
        """The part that this rank takes of an input given whole; a part, and a DTensor, as it is.

        On CPUs it is remembered of which tensor a part is: calls with parts of other tensors on several ranks are refused.

        Raises:
            InputError: it is no input, or of another shape than the input and its part have.
        """
        if name not in self.input_types:
            raise InputError(f"no input {name!r}", where=self.graph.name, hint=f"the inputs are {', '.join(self.input_types)}")
        lies, wanted, mesh = self.placements[name], self.input_types[name].shape, self.team.mesh
        shape = getattr(value, "shape", None)
        if shape is None or hasattr(value, "device_mesh") or tuple(shape) == wanted or not lies.names:
            return value
        full = tuple(d * mesh.ranks_of(names) for d, names in zip(wanted, lies.splits, strict=True))
        if tuple(shape) != full:
            what = f"shape {list(shape)} given, {list(full)} or a part of {list(wanted)} wanted"
            raise InputError(what, where=f"input {name!r}", hint="the whole tensor, or this rank's part of it")
        whole = torch.as_tensor(value)
        found = lies.part(whole, mesh, self.team.rank).clone(memory_format=torch.contiguous_format)
        if whole.device.type == self.target.kind == "cpu":
            at, wholes = id(found), self._wholes
            wholes[at] = weakref.ref(found, lambda _: wholes.pop(at, None)), digest_of([whole]) + 1
        return found

    def _digest_of_wholes(self, given: Mapping[str, object]) -> int:
        """The digest of the tensors of which inputs are parts, those that lie whole left out; 0 where one's is not known."""
        parts = [given.get(name) for name in self.input_types if self.placements[name].names]
        known = [self._wholes.get(id(v)) for v in parts]
        said = [entry[1] for v, entry in zip(parts, known, strict=True) if entry is not None and entry[0]() is v]
        return zlib.crc32(repr(said).encode()) + 1 if said and len(said) == len(parts) else 0

    def joined(self, results: Sequence[Value]) -> list[Value]:
        """The whole results of which all ranks give their parts, on every rank."""
        axes = [name for name, _ in self.team.mesh.axes]
        with self.team.working():
            self.team.at("joining the results")
            found: list[Value] = []
            for name, value in zip(self.source.output_names, results, strict=True):
                lies = self.placements[name]
                if lies.names and isinstance(value, torch.Tensor):
                    value = self.team.exchange(value, axes, lambda parts, lies=lies: lies.joined(parts, self.team.mesh))
                found.append(value)
            return found

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the program, as all ranks do.

        Raises:
            InputError: an input is missing, unknown, or of another shape, type or placement.
            PeerError: another rank failed, is gone, or did not come in time.
        """
        with self.team.working():
            self.team.at(f"a call of {self.graph.name}")
            names = self.graph.places or [*self.input_types]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            meshes = [m for name, v in given.items() if (m := self._mesh_of(name, v)) is not None]
            local = [_local(v) for v in args], {n: _local(v) for n, v in kwargs.items()}
            self._parts_of = self._digest_of_wholes(given)
            results = super().__call__(*local[0], **local[1])
            return self._global(results, meshes[0]) if meshes else results

    def _mesh_of(self, name: str, value: object) -> DeviceMesh | None:
        """The mesh of an input that is a DTensor, placed as the program wants it; None for another input.

        Raises:
            InputError: it lies otherwise.
        """
        found = getattr(value, "device_mesh", None)
        if found is None or name not in self.input_types:
            return None
        wanted = placements_of(self.placements[name], self.team.mesh)
        own, axes = cast("object", getattr(value, "placements", ())), tuple(found.mesh.shape)
        if axes != tuple(size for _, size in self.team.mesh.axes):
            raise InputError(f"input {name!r} lies on a mesh of {list(axes)}, the program is for {self.team.mesh}")
        if tuple(cast("Sequence[object]", own)) != wanted:
            hint = f"x.redistribute(placements={list(wanted)})"
            raise InputError(f"input {name!r} is placed as {own}, the program wants {wanted}", where=self.graph.name, hint=hint)
        return found

    def _global(self, results: object, mesh: DeviceMesh) -> object:
        """Results as DTensors."""
        from torch.distributed.tensor import DTensor

        several = cast("tuple[torch.Tensor, ...]", results if isinstance(results, tuple) else (results,))
        made = tuple(
            DTensor.from_local(t, mesh, placements_of(self.placements[name], self.team.mesh), run_check=False)
            for name, t in zip(self.graph.output_names, several, strict=False)
        )
        return made if isinstance(results, tuple) else made[0]

    def run(self, inputs: Sequence[torch.Tensor], observe: Callable[[Step, list[Value]], None] | None = None) -> list[Value]:
        """Run as `Executable.run` does, in this rank's team."""
        with self.team.working():
            looks = self.target.kind == "cpu"  # a GPU's values are not waited for
            given = {over: digest_of(inputs[i] for i in at) if looks else 0 for over, at in self.alike.items()}
            self.team.begin(self.number, given, self._parts_of)
            self._parts_of = 0
            return super().run(inputs, observe)

    def save(self, path: str | PathLike[str]) -> None:
        """Write this rank's program to a file of its own beside `path` (`file_of`), as all ranks do.

        `tilewright.load_on_mesh` reads them back on as many ranks. What several ranks take part in is built again
        then. State is written as it is now.

        Raises:
            InputError: the file cannot be written, or the program's weights were dropped and are needed.
            PeerError: another rank failed, or could not write its own.
        """
        check_type(path, (str, PathLike), "path", '"model.twp"')
        with self.team.working():
            self.team.at("saving a program")
            together = self.team.peers.gathered(secrets.token_hex(8), str, "saving a program")[0]
            save(self, file_of(path, self.team), OfRank(str(self.team.mesh), self.team.rank, together))
            self.team.peers.gathered(0, int, "the files written")

    def __reduce__(self) -> tuple[Callable[..., Executable], tuple[object, ...]]:
        """Refuse: what is unpickled has no peers.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("a program on a mesh is not pickled", where=self.graph.name, hint="save, and load_on_mesh")

    def perf(self, *args: object, iterations: int | None = None, **inputs: object) -> Report[Perf]:
        """Time the program and each of its steps, as all ranks do: the slowest rank's time of each call. See `Program.perf`.

        Raises:
            InputError: an input is missing or unknown, or `iterations` is less than 1.
        """
        from tilewright.report.measure.inputs import make_feeds
        from tilewright.report.measure.perf import measure
        from tilewright.report.text.perf_table import print_perf

        if iterations is not None and iterations < 1:
            raise InputError(f"{iterations} runs", where="iterations", hint="1 or more, or None")
        with self.team.working():
            values = self.bind([_local(a) for a in args], {n: _local(v) for n, v in inputs.items()}) if args or inputs else ()
            given = {label_of(n): v for n, v in zip(caller_inputs(self.graph), values, strict=False)}
            feeds = make_feeds(self.source, given=given)
            self.measure_links()
            measured = measure(self, self.source.name, feeds, self._ceilings(), iterations=iterations, timer=self.timer)
        return Report(measured.report, lambda out: print_perf(out, measured))

    def measure_links(self) -> None:
        """Measure the links between the ranks, if nobody did before, as all ranks do."""
        with self.team.working():
            self.links = links_of(self.team, self.target, measure=True)

    def timer(self, run: Callable[[], object], device: str, rounds: Rounds, *, captured: bool = False) -> Times:
        """Time calls that all ranks make together (`timing.Timer`)."""
        calls = rounds.most if rounds.least == rounds.most else None
        us, between_us = zip(*times_us(self.team, run, device, within_s=rounds.budget_s, calls=calls), strict=True)
        return Times(list(us), between_us=list(between_us))


def _announced(i: int, step: Step) -> Step:
    """A step that says where this rank is, if others take part in it."""
    if not between(step):
        return step
    place, run = f"step {i} ({step.name})", step.run
    overs = {n.op.over for n in between(step) if isinstance(n.op, Collective)}

    def announced(values: Sequence[Value]) -> Sequence[Value]:
        member = cast("ProcessTeam", team())
        member.at(place)
        if member.device != "cpu":  # where kernels send values, too; on CPUs the team does, and looks by itself
            member.see(overs)
        return run(values)

    return replace(step, run=announced)


def compile_on_mesh(
    graph: Graph,
    team: ProcessTeam,
    target: Target,
    budget: Budget,
    optimise: Callable[[Graph, Trace], Graph],
    progress: Progress | None,
    database: TuningDatabase | None,
    together: TuningDatabase | None,
) -> MeshProgram:
    """The program of this rank, its kernels chosen by all ranks together.

    Args:
        graph: the program over whole tensors, or that of one rank; the same on all but for the values of constants.
        team: the ranks.
        target: this rank's device.
        budget: seconds for choosing.
        optimise: applies the rules.
        progress: told of choices.
        database, together: rank 0's decisions, on problems of one rank and of all.

    Raises:
        PeerError: ranks differ in what they compile, or another one failed.
        InputError: the program is one rank's on another mesh.
    """
    whole = not graph.local and not mesh_axes(graph.outputs)
    values = constants(graph) if whole else "each rank's own"  # a rank's own program has its parts
    graph = of_one_rank(graph, team)
    team.peers.agree({"the program": outline(graph), "the weights": values}, "the program as read")
    if sequence_parallel(graph) is not graph:
        links = links_of(team, target, measure=budget.seconds > 0)

        def of_rank_0(said: str) -> str:
            return team.peers.gathered(said, str, "the form of the program")[0]

        graph = faster_form(graph, lambda local: optimise(local, Trace()), target, links, of_rank_0)
    trace = Trace()
    with in_team(team):
        made = optimise(graph, trace)
        team.peers.agree({"the program after its rules": outline(made)}, "the program after its rules")
        parts = parts_for(made, target)
        between = collectives_in(parts)
        if team.rank == 0 and not between and not any(any(p.splits) for p in graph.placements):
            say(f"nothing of {graph.name} is split over the mesh {team.mesh}: each rank runs all of it ({PLACED})")
        overs = {op.over for op in between}
        team.prepare(overs)
        agreed = Agreed(team, target, budget, progress, database, together)
        program = prepare(graph, made, target, trace, agreed, made=MeshProgram, parts=parts, deal=agreed.deal)
    program.finished = not trace.notes
    bound_to(program, team)
    return program


def load_on_mesh(path: str | PathLike[str], mesh: object, *, device: str | None = None, trust: bool = False) -> MeshProgram:
    """Read this rank's part of a program that was saved on a mesh, ready to run. All ranks do so at the same time.

    Args:
        path: what `save` was given: each rank reads a file of its own beside it, `model.0-of-2.twp` for `model.twp`.
        mesh: the ranks, as `compile` takes them; as many as saved it.
        device: where to run; None is the mesh's.
        trust: run the file's machine code although no key of this user on this machine signed it.

    Returns:
        MeshProgram: results are equal to those of the program that was saved.

    Raises:
        InputError: the file cannot be read, is damaged or of no rank, or its code is not signed and not trusted.
        UnsupportedError: it is for another machine or version.
        PeerError: ranks have files of different programs, or another one failed.
    """
    check_type(path, (str, PathLike), "path", '"model.twp"')
    team = team_of(mesh, device)
    with team.working():
        team.at("loading a program")
        target = detect(team.device)
        team.peers.agree(facts(target, excess_precision=False, cache=False), "loading a program")
        file = file_of(path, team)
        program, whose = load_of_rank(Container(file), MeshProgram, team.device, trust=trust)
        if (whose.mesh, whose.rank) != (str(team.mesh), team.rank):
            what = f"it is the program of rank {whose.rank} of {whose.mesh}, and this is rank {team.rank} of {team.mesh}"
            raise InputError(what, where=str(file))
        team.peers.agree({"the program's files": whose.together}, "the files read")
        bound_to(program, team)
    return program


def bound_to(program: MeshProgram, team: ProcessTeam) -> None:
    """Have a program run in a team, as the next of its programs."""
    overs = {n.op.over for step in program.steps for n in between(step) if isinstance(n.op, Collective)}
    team.prepare(overs)
    program.team, program.number, program.alike = team, len(team.programs), alike(program.graph, overs)
    program.links = links_of(team, program.target, measure=False)
    team.programs.append(program.graph.name)


def file_of(path: str | PathLike[str], team: ProcessTeam) -> Path:
    """The file of this rank: `model.0-of-2.twp` of `model.twp`."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.{team.rank}-of-{team.mesh.size}{whole.suffix}")


def alike(graph: Graph, overs: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    """The places of the inputs that a program of one rank wants whole along all mesh axes of a set, by set. A program that does
    not say how its inputs lie wants none."""
    lies = graph.placements[: len(caller_inputs(graph))]
    return {over: [i for i, p in enumerate(lies) if not {*over} & {*p.names}] for over in overs}


def collectives_in(parts: Sequence[Part]) -> list[Collective]:
    """The operations between ranks of a program's parts, those in the expressions of its products among them."""
    found: list[Collective] = []
    for n in (n for part in parts for n in part.nodes):
        regions = [r for roots in n.op.regions().values() for r in roots]
        found += [m.op for m in (n, *toposort(regions)) if isinstance(m.op, Collective)]
    return found


def of_one_rank(graph: Graph, member: ProcessTeam) -> Graph:
    """The program of one rank, made of one over whole tensors where it is that: on a mesh of any size that has its axes.

    Raises:
        InputError: it is one rank's on another mesh.
        UnsupportedError: it cannot be placed (`rules.shard.localise`).
    """
    mesh, axes = member.mesh, mesh_axes(graph.outputs)
    if graph.local or axes:
        said = graph.mesh or (Mesh(tuple(axes.items())) if any(dict(mesh.axes).get(n) != s for n, s in axes.items()) else mesh)
        if said != mesh:
            what = f"the program of one rank is for {said}, the mesh is {mesh}"
            raise InputError(what, where=graph.name, hint=f"a mesh of {said}")
        return graph
    made = localise(replace(graph, mesh=mesh))
    held = made.placements[len(caller_inputs(made)) : len(made.inputs)]
    parts = [lies.split(t, mesh)[member.rank].clone() for lies, t in zip(held, made.state, strict=True)]
    return replace(made, state=tuple(parts))


def placements_of(placement: Placement, mesh: Mesh) -> tuple[DTensorPlacement, ...]:
    """The placement as DTensor has it: for each mesh axis what it does.

    Raises:
        UnsupportedError: an axis is split by several mesh axes in another order than the mesh's, which DTensor cannot say.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = [name for name, _ in mesh.axes]
    found: dict[str, DTensorPlacement] = dict.fromkeys(placement.partial, Partial())
    for axis, splits in enumerate(placement.splits):
        if [*splits] != sorted(splits, key=names.index):
            raise UnsupportedError(f"DTensor has no {placement} on {mesh}", hint="the mesh's own order of axes")
        found.update(dict.fromkeys(splits, Shard(axis)))
    return tuple(found.get(name, Replicate()) for name in names)


def _local(value: object) -> object:
    """The local part of a DTensor; anything else as it is."""
    return getattr(value, "to_local", lambda: value)() if hasattr(value, "device_mesh") else value
