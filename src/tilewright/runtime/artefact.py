"""Saved programs (docs/artefacts.md): a compiled program written to a `.twp` file, and read back without what compiled it.

A file decides what is executed. So its code, and the numbers that the code is called with, are used if a key of this user
signed them or the caller trusts the file; both are checked to fit the graph all the same. On another chip, or with another
version of what calls kernels, nothing of them is used, and the graph is compiled.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import inspect
import io
import os
import platform
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Generic

import msgspec
import torch

from tilewright import plug_ins
from tilewright.candidates import split
from tilewright.candidates.llvm.normalization.candidate import checked
from tilewright.candidates.llvm.runtime import calls, engine, image, pool
from tilewright.candidates.llvm.runtime.run import behind
from tilewright.candidates.triton.saved import launched
from tilewright.dtype import U8
from tilewright.errors import LOGGER, InputError, UnsupportedError, say
from tilewright.files import open_own, whole_file
from tilewright.frontends.tilewright_text import check_calls
from tilewright.hardware.ceilings import cache_folder
from tilewright.hardware.detect import detect
from tilewright.hardware.target import DeviceKind, Target
from tilewright.ir.account import Account
from tilewright.ir.artefact import (
    CONSTANT,
    FORMAT,
    MANIFEST,
    VERSION,
    Array,
    Container,
    Graphs,
    Kind,
    Manifest,
)
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.literal import SMALL_BYTES, Literal, bits_of
from tilewright.ir.pattern import Trace
from tilewright.ir.safetensors import has_name, write_tensors_to
from tilewright.ir.text import parse, print_with_literals
from tilewright.ir.types import TensorType
from tilewright.rules.calibrate import Layer
from tilewright.runtime.executable import E, Executable, Inner, Posed, Step, chooser, kernel_step, library_step, prepare
from tilewright.runtime.partition import Kind as PartKind
from tilewright.runtime.partition import Part
from tilewright.schedule.candidate import Kernel, Runner, Schedule, concerns, discover, plan_for
from tilewright.schedule.problem import AnyProblem, AttentionProblem, FusionProblem, Problem, ProblemKind
from tilewright.schedule.recipe import Built, Called, Launched, Prepared, Recipe, Split, recipe_of
from tilewright.schedule.record import RejectedRecord, Time
from tilewright.schedule.search import Decision, Rejected
from tilewright.schedule.tuning_database import TuningDatabase, user_cache
from tilewright.threads import check, limited, said, usable

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

KEY_BYTES = 32
# What LLVM generates code for, as /proc/cpuinfo names it. Other features say how the machine is run: `hypervisor`.
_INSTRUCTIONS = re.compile(
    "avx|sse|ssse|fma|f16c|bmi|abm|popcnt|movbe|amx|v?aes|gfni|v?pclmul|sha|adx|cx16|asimd|sve|sme|i8mm|bf16|fp|atomics"
)
TRUST = "if you trust the file: trust=True, or --trust; or tilewright.compile(path), which uses its graph alone"
# Modules whose functions and numbers a saved program is made of: one of another version is compiled again.
_VERSIONED = (
    "tilewright.candidates.llvm.runtime.calls",
    "tilewright.candidates.llvm.runtime.image",
    "tilewright.candidates.llvm.runtime.pool",
    "tilewright.candidates.llvm.runtime.run",
    "tilewright.candidates.llvm.runtime.scratch",
    "tilewright.candidates.llvm.normalization.candidate",
    "tilewright.candidates.split",
    "tilewright.candidates.triton.saved",
    "tilewright.candidates.triton.runtime.cubin",
    "tilewright.candidates.triton.runtime.launch",
    "tilewright.schedule.recipe",
)


class Machine(msgspec.Struct, frozen=True):
    """The machine that a program is for.

    Attributes:
        name: marketing name.
        chip: data file that it matched.
        device: "cpu" or "cuda".
        architecture: the processor's, and the byte order.
        features: names of instructions that it reports to have, sorted; of a GPU all that it reports.
    """

    name: str
    chip: str
    device: DeviceKind
    architecture: str
    features: tuple[str, ...]


class Chosen(msgspec.Struct, frozen=True):
    """A step's kernel and how it was chosen: fields of `Kernel` and `Decision`."""

    candidate: str
    knobs: tuple[tuple[str, bool | int | str], ...]
    time_us: Time | None
    measured: bool
    verified: bool
    provisional: str
    rejected: tuple[RejectedRecord, ...]
    workspace_bytes: int
    packed_bytes: int
    releasable: tuple[int, ...]
    roundoff: float
    parts: tuple[tuple[ProblemKind, str], ...]
    recipe: Recipe


class SavedStep(msgspec.Struct, frozen=True):
    """A step: its nodes, inputs and outputs by number (`_numbered`), its kernel, and how many programs it has within."""

    kind: PartKind
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    chosen: Chosen | None = None
    within: int = 0


class SavedProgram(Graphs, frozen=True):
    """A compiled program: values of nodes that it holds ready, and its steps in order; the programs within, in that order."""

    within: tuple[SavedProgram, ...]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen
    values: tuple[tuple[int, str], ...]
    steps: tuple[SavedStep, ...]


class SavedAccount(msgspec.Struct, frozen=True):
    """An account of rules (`Account`), by number of the node."""

    left: tuple[tuple[int, tuple[str, ...]], ...]
    rules: tuple[tuple[int, tuple[str, ...]], ...]


class SavedLayer(msgspec.Struct, frozen=True):
    """A product as quantising left it (`calibrate.Layer`); numbers as Python writes them, since JSON has no NaN."""

    where: str
    error: str
    largest: str
    skip_reason: str | None
    scale: str | None
    weight_scales: tuple[str, str]


class SavedLayers(msgspec.Struct, frozen=True):
    """The quantised products in order, and as texts the graphs whose results they are: in the float model, and quantised."""

    layers: tuple[SavedLayer, ...]
    before: str
    after: str


class Kept(msgspec.Struct, frozen=True):
    """Additions of a program in the user's cache (`programs.py`).

    Attributes:
        request: all that decided the result, as JSON.
        read: text of the graph as the front end gave it, "" if it is the source.
        files: data files beside the model: as it names them, where that leads, their digests.
        budget_s: seconds that compiling had.
        cold: weights come from memory.
        problems: digests of the problems' texts.
        standing: digest of what was known of them.
    """

    request: str
    read: str
    files: tuple[tuple[str, str, str], ...]
    budget_s: float
    cold: bool
    problems: tuple[str, ...]
    standing: str


class Header(Manifest, frozen=True):
    """The part of a manifest that every version has.

    Attributes:
        made_by: digest of the code that calls kernels.
        machine: what it is for.
        thread_count: threads for its calls on a CPU, if it was compiled for a number of them.
    """

    made_by: str
    machine: Machine
    thread_count: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Whole(Header, frozen=True, kw_only=True):
    """A manifest of this version.

    Attributes:
        code: arrays of object code by name.
        caller, threads: names among them of what Python calls kernels through, and of the thread pool; "" if there is no code.
        account: what rules did.
        quantized: what quantising did; None if nothing was quantised.
        kept: of a program in the user's cache.
    """

    code: dict[str, str]
    caller: str
    threads: str
    program: SavedProgram  # pyright: ignore[reportIncompatibleVariableOverride] - frozen
    account: SavedAccount | None = None
    quantized: SavedLayers | None = None
    kept: Kept | None = None


# -- writing


class _Writer:
    """Arrays and code of a program by name (`recipe.Parts`). What has the same bytes is written once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.objects: dict[str, str] = {}
        self.literals: dict[str, Literal] = {}
        self.outside: dict[str, Kind] = {}
        self._entries: dict[str, str] = {}

    def array(self, name: str, t: torch.Tensor, type_: TensorType) -> str:
        """Leave a tensor under a name, which is given back."""
        held = t.detach().cpu().contiguous()
        digest = hashlib.sha256(bits_of(held).numpy().data).hexdigest()
        if digest not in self._entries:
            self._entries[digest] = name
            self.tensors[name] = held if has_name(held.dtype) else bits_of(held)
        self.arrays[name] = Array(self._entries[digest], Kind.of(type_), digest)
        return name

    def bytes(self, memory: torch.Tensor) -> str:
        return self.array(f"packed/{len(self.arrays)}", memory, TensorType(U8, (memory.numel(),)))

    def code(self, content: bytes, known: Mapping[str, int] | None = None) -> str:
        """Leave object code; see `image.mapped`.

        Raises:
            UnsupportedError: it could not be mapped again.
        """
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self.objects:
            image.mapped({digest: content}, known)
            self.objects[digest] = self.bytes(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return digest

    def text(self, roots: Sequence[Node]) -> str:
        return self.graph(Graph("", (), tuple(roots), ("",) * len(roots)))

    def graph(self, graph: Graph) -> str:
        """A graph's text; its large constants are left under their names."""
        text = print_with_literals(graph, self.literals)[0]
        for name, literal in self.literals.items():
            if CONSTANT + name not in self.arrays and name not in self.outside:
                self.array(CONSTANT + name, literal.tensor(), literal.type)
        return text

    def read(self, graph: Graph) -> str:
        """The text of a graph as the front end gave it: what is large is found there again, and not written."""
        text, literals = print_with_literals(graph)
        self.literals |= literals
        self.outside |= {n: Kind.of(v.type) for n, v in literals.items() if v.type.size_bytes > SMALL_BYTES}
        return text

    def program(self, program: Executable) -> SavedProgram:
        """A program's part of the manifest."""
        number, done = {n: i for i, n in enumerate(_numbered(program.graph))}, program.steps  # a search may replace them
        texts = self.graph(program.source), self.graph(program.graph)
        steps = [self._step(step, number) for step in done]
        needed = {*program.graph.outputs}
        for step, saved in zip(done, steps, strict=True):
            kept = saved.chosen is not None and not _built(saved.chosen.recipe)
            needed.update(n for n in step.part.inputs if not (kept and n in step.releasable))
        held = program.graph.inputs[len(program.graph.inputs) - len(program.graph.state) :]
        state = [self.array(f"state/{len(self.arrays)}", program.value(n), n.tensor) for n in held]
        values = [
            (number[n], self.array(f"value/{len(self.arrays)}", program.value(n), n.tensor))
            for n in number
            if n in needed and n.constant
        ]
        return SavedProgram(
            source=texts[0],
            graph=texts[1],
            state=tuple(state),
            places=program.graph.places,
            within=tuple(self.program(p) for step in done for p in step.within),
            values=tuple(values),
            steps=tuple(steps),
        )

    def account(self, program: Executable) -> SavedAccount:
        """The account of the rules."""
        number, told = {n: i for i, n in enumerate(_numbered(program.graph))}, program.account
        left, rules = (tuple((number[n], tuple(s)) for n, s in said.items()) for said in (told.left, told.rules))
        return SavedAccount(left, rules)

    def layers(self, program: Executable) -> SavedLayers | None:
        """The products as quantising left them."""
        if not program.layers:
            return None
        saved = tuple(
            SavedLayer(
                x.where, repr(x.error), repr(x.largest), x.skip_reason, None if x.scale is None else repr(x.scale),
                (repr(x.weight_scales[0]), repr(x.weight_scales[1])),
            )
            for x in program.layers
        )  # fmt: skip
        return SavedLayers(saved, self.text([x.before for x in program.layers]), self.text([x.after for x in program.layers]))

    def _step(self, step: Step, number: Mapping[Node, int]) -> SavedStep:
        part, d = step.part, step.decision
        nodes, inputs, outputs = (tuple(number[n] for n in each) for each in (part.nodes, part.inputs, part.outputs))
        if d is None or step.runner is None:
            return SavedStep(part.kind, nodes, inputs, outputs, within=len(step.within))
        k = d.kernel
        rejected = tuple(RejectedRecord(r.candidate, r.why[:4000], r.time_us, r.schedule.knobs, r.kind) for r in d.rejected)
        try:
            recipe = recipe_of(step.runner, self)
        except UnsupportedError:  # code of a processor for which `image` knows no objects
            recipe = None
        chosen = Chosen(
            k.candidate, k.schedule.knobs, d.time_us, d.measured, d.verified, d.provisional, rejected, k.workspace_bytes,
            k.packed_bytes, tuple(sorted(k.releasable)), k.roundoff, k.parts,
            recipe or Built.of(k),
        )  # fmt: skip
        return SavedStep(part.kind, nodes, inputs, outputs, chosen)


def _built(recipe: Recipe) -> bool:
    """Tell whether a candidate builds any of it again, from the weights."""
    return isinstance(recipe, Built) or (isinstance(recipe, Split) and any(map(_built, recipe.pieces)))


def _numbered(graph: Graph) -> list[Node]:
    """A graph's nodes in the order of its text."""
    return toposort((*graph.inputs, *graph.outputs))


def save(program: Executable, path: Path) -> None:
    """See `Executable.save`."""
    with whole_file(path) as draft, draft.open("wb") as file:
        _write(program, file)


def artefact_of(program: Executable) -> bytes:
    """The bytes of the file that `save` writes."""
    file = io.BytesIO()
    _write(program, file)
    return file.getvalue()


def keep(program: Executable, read: Graph, kept: Kept, path: Path) -> None:
    """Write a program as one that is kept beside the model that it was compiled from; nothing where none can be signed.

    Args:
        read: the graph as the front end gave it. Its large constants stay where they are, in the model.
        kept: what it depends on.

    Raises:
        InputError: the file cannot be written.
        UnsupportedError: the program holds what no file can.
    """
    if _key() is None:
        return
    writer = _Writer()
    text = writer.read(read)
    with whole_file(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _write(program, file, writer, msgspec.structs.replace(kept, read=text))


def _write(program: Executable, file: IO[bytes], writer: _Writer | None = None, kept: Kept | None = None) -> None:
    writer = writer or _Writer()
    saved = writer.program(program)
    account, quantized = writer.account(program), writer.layers(program)
    if kept is not None and kept.read == saved.source:
        kept = msgspec.structs.replace(kept, read="")
    generated = bool(writer.objects)
    caller = writer.code(calls.caller().object) if generated else ""
    threads = writer.code(engine.threads().object, engine.for_threads()) if generated else ""
    whole = Whole(
        version=VERSION,
        arrays=writer.arrays,
        program=saved,
        made_by=_made_by(),
        machine=_machine(program.target),
        code=writer.objects,
        caller=caller,
        threads=threads,
        outside=writer.outside,
        labels={name: v.label for name, v in writer.literals.items() if v.label != name},
        account=account,
        quantized=quantized,
        kept=kept,
        thread_count=program.threads or said(),
    )
    manifest = msgspec.json.encode(whole)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        MANIFEST: hashlib.sha256(manifest).hexdigest(),
        "signature": _signature(manifest, _key()),
    }
    text = torch.frombuffer(bytearray(manifest), dtype=torch.uint8)
    write_tensors_to(file, {MANIFEST: text, **writer.tensors}, metadata)


def _machine(target: Target) -> Machine:
    architecture = f"{platform.machine()} {sys.byteorder}"
    features = sorted(f for f in target.features if target.kind != "cpu" or _INSTRUCTIONS.match(f))
    return Machine(target.name, target.chip.name, target.kind, architecture, tuple(features))


@cache
def _made_by() -> str:
    digest = hashlib.sha256()
    for name in _VERSIONED:
        digest.update(Path(inspect.getfile(importlib.import_module(name))).read_bytes())
    digest.update(pool.text().encode() if pool.why_not() is None else b"")
    return digest.hexdigest()


# -- signing


def _signature(manifest: bytes, key: bytes | None) -> str:
    """The HMAC-SHA-256 of a manifest, in which every array's digest stands; "" without a key."""
    return "" if key is None else hmac.new(key, manifest, hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    """Give the user's key on this machine, made when first asked for; None, said once, where none can be kept to oneself."""
    try:
        file = cache_folder() / "key"
        if not file.exists():
            _make_key(file)
        with os.fdopen(open_own(file, os.O_RDONLY), "rb") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise PermissionError(1, "others can read it", str(file))
            key = opened.read()
    except OSError as error:
        say(f"programs are saved without a signature: the key cannot be kept ({error.strerror}: {error.filename})")
        return None
    if len(key) != KEY_BYTES:
        say(f"programs are saved without a signature: {file} is no key; delete it, and another is made")
        return None
    return key


def _make_key(file: Path) -> None:
    """Make a key, unless another process does so first."""
    descriptor, name = tempfile.mkstemp(dir=file.parent)  # readable by the owner alone
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(name, file)
        except FileExistsError:
            return
    finally:
        Path(name).unlink()


def _signed(container: Container) -> bool:
    if not container.signature:
        return False
    key = _key()
    return key is not None and hmac.compare_digest(_signature(container.manifest, key), container.signature)


# -- reading


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
    """See `tilewright.load_program`; `made` is the kind of executable that is wanted."""
    header, wanted = container.decoded(Header), check(threads) or said()
    count = wanted or (header.thread_count and min(header.thread_count, usable()))
    with limited(count):  # compiled again, it is for as many
        program = _loaded(container, header, made, trust=trust, device=device, budget_s=budget_s)
    program.threads = count
    return program


def _loaded(
    container: Container, header: Header, made: type[E], *, trust: bool, device: str | torch.device | None, budget_s: float
) -> E:
    trusted = trust or _signed(container)
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
    if not _signed(container):
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
    here, there = _machine(target), header.machine
    if (here.device, here.chip, here.architecture) != (there.device, there.chip, there.architecture):
        return f"it is for {there.name} ({there.chip}, {there.device}), and this is {here.name} ({here.chip}, {here.device})"
    missing = [f for f in there.features if f not in here.features]
    if missing:
        return f"it is for a processor with {', '.join(missing[:3])}"
    return None if header.made_by == _made_by() else "another version of Tilewright made it, which calls kernels in another way"


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

    return prepare(source, graph, target, Trace(), decide, inner, first=decide.weight, made=made)


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
            nodes, saved = _numbered(made.graph), self._whole.account
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
        nodes, target = _numbered(graph), self._target
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
        losers = tuple(Rejected(r.candidate, r.kind, r.why, Schedule(r.knobs), r.time_us) for r in chosen.rejected)
        how = chosen.time_us, losers, chosen.measured, chosen.verified
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
            named = split.chosen_of(schedule)
            if not len(pieces) == len(named) == len(recipe.pieces):
                raise self._container.broken("a product is split into other pieces")
            kernels = [
                Kernel(name, point, partial(self._runner, r, p.problem, point))
                for p, (name, point), r in zip(pieces, named, recipe.pieces, strict=True)
            ]
            return split.in_order(pieces, kernels, weights, len(problem.outputs))
        called = recipe if isinstance(recipe, Called) else recipe.call
        call = calls.restored(called, self._code, self._container.tensor, len(problem.types))
        if tuple(call.results) != problem.outputs:
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
