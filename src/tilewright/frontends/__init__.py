"""Readers of programs, one file each, found by file name.

A front end module defines

    accepts(program: object) -> bool          is this mine? cheap; looks at a suffix, a magic number, a type
    load(program: object, options: LoadOptions) -> Graph
    evaluate_call(call: Call, values: Sequence[object]) -> Sequence[object]     only if it makes `call` nodes
    regions(call: Call) -> Sequence[Graph]    graphs that a call runs as the data says; empty for most calls. May be left out
    run_regions(call, values, runs: Sequence[Callable]) -> Sequence[object]     the call, its regions run by what is given
    check_call(call: Call, sources: Sequence[Tensor | None]) -> Sequence[Tensor]
                                             raises unless a file may bring that call; tensors on the meta device, no data in
                                             them; what it gives may be left out where no other call needs to know

It reads and never optimises: what the source says is what the graph says.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import cast

from tilewright.digests import stamp_of
from tilewright.discovery import in_turn, modules
from tilewright.errors import InputError, UnsupportedError, check_type
from tilewright.frontends._local import over_whole
from tilewright.frontends._plan import as_mesh
from tilewright.ir.dims import Dim, Scope, as_dim, spelt
from tilewright.ir.graph import Graph
from tilewright.ir.mesh import Mesh
from tilewright.ir.ops import Input
from tilewright.ir.types import TensorType, TupleType
from tilewright.ir.verify import mesh_axes, verify

ALLOW_CALLS = "if you trust the file: --allow-calls, or LoadOptions(allow_calls=True)"
MOST_OPERATIONS = 50_000
MOST_BYTES = 1 << 33
_UNTRUSTED: ContextVar[bool] = ContextVar("untrusted", default=False)
_BESIDE: ContextVar[dict[Path, tuple[int, ...]] | None] = ContextVar("beside", default=None)
GRAPH_BREAK = "graph break: "  # begins a note of a graph behind which torch.compile breaks off, with where and why
SUFFIXES = ".hlo, .txt of HLO, .mlir, .stablehlo, .onnx, .tw or .twp"


@dataclass(frozen=True)
class LoadOptions:
    """Options of a reader, beside the program.

    Attributes:
        input_dims: shape of an input by name, where the program leaves it open (or to override its symbolic extents).
        batch: value of a symbolic first axis that nothing else binds.
        example_inputs: tensors to trace a PyTorch module with: positional ones, or a mapping of keyword arguments.
        allow_calls: let a `.tw` file name any operator of torch, and with any arguments: it can then read this process's memory
            and end it. Without, it may name those that cannot.
        untrusted: read what a stranger wrote: fewer operations (`MOST_OPERATIONS`), fewer bytes (`MOST_BYTES` for all values
            together), and no operation that the source's own interpreter would run, since nothing bounds its time.
        fixed: value of an input of one element by name: it becomes a constant of the program (ONNX), so that an `If` on it is
            read as the branch it takes.
        seen_dims: shape of an array at hand for an input by name: it binds what nothing else binds.
        dims: extents that stay open, by the name that the program has for them, each a `Dim` or its bounds `(low, high)`; True
            leaves all open that the program does.
        scope: where the open extents are kept, with what reading took for granted about them (`ir/dims.py`).
        follow_links: read data beside an ONNX model through any symbolic link; else only through those that stay in the model's
            folder, or in the Hugging Face cache that holds it.
        mesh: the ranks that are to run the program, a `Mesh` or its words, "dp=2,tp=4"; None reads it for one device.
        plan: how tensors are to lie on the mesh, by names of inputs, in the words of `frontends/_plan.py`; of torch modules
            also by names of parameters and modules, these in the words of `frontends/torch/placed.py`. "auto": a module's own.

    Raises:
        InputError: a shape is none, an extent no whole number, or negative; a fixed value is no number.
    """

    input_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    batch: int | None = None
    example_inputs: Sequence[object] | Mapping[str, object] | None = None
    allow_calls: bool = False
    untrusted: bool = False
    fixed: Mapping[str, bool | float] = field(default_factory=dict[str, "bool | float"])
    seen_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    follow_links: bool = False
    dims: Mapping[str, object] | bool = False
    scope: Scope = field(default_factory=Scope)
    mesh: Mesh | None = None
    plan: Mapping[str, object] | str | None = None

    def __post_init__(self) -> None:
        check_type(self.input_dims, Mapping, "input_dims", '{"x": (1, 128)}')
        object.__setattr__(self, "mesh", as_mesh(self.mesh))
        if self.plan != "auto":
            check_type(self.plan, (Mapping, type(None)), "plan", '{"layers.*.wq": "colwise", "x": "[tp, ]"}, or "auto"')
        if self.plan and self.mesh is None:
            raise InputError("a plan is given, and no mesh for it", where="plan", hint='mesh="tp=4"')
        check_type(self.dims, (Mapping, bool), "dims", '{"batch": (1, 64), "seq": (1, 512)}')
        if isinstance(self.dims, Mapping):
            for name in self.dims:
                check_type(name, str, "a name in dims", '{"batch": (1, 64)}; of an input\'s axis, {"x.0": (1, 64)}')
            object.__setattr__(self, "dims", {name: as_dim(name, given) for name, given in self.dims.items()})
        check_type(self.fixed, Mapping, "fixed", '{"use_cache_branch": True}')
        for name, value in self.fixed.items():
            check_type(value, (bool, int, float), f"fixed value of {name!r}", "True, False or a number")
        for name, shape in self.input_dims.items():
            check_type(shape, Iterable, f"input_dims of {name!r}", "an extent for each axis")
        given = {name: tuple(shape) for name, shape in self.input_dims.items()}
        object.__setattr__(self, "input_dims", given)
        for name, extents in {**given, "batch": () if self.batch is None else (self.batch,)}.items():
            for extent in extents:
                if not hasattr(extent, "__index__") or extent < 0:
                    raise InputError(f"{extent!r} is no extent", where=name, hint="a whole number, 0 or more")

    def plan_of_names(self) -> Mapping[str, object]:
        """The plan of a program that has none of its own.

        Raises:
            InputError: it asks for the program's own.
        """
        if isinstance(self.plan, str):
            raise InputError("the program has no plan of its own", where="plan", hint='{"x": "[tp, ]"}')
        return self.plan or {}

    def open_extent(self, name: str) -> int | None:
        """The extent of this name in the program, where it is to stay open; None where it is not."""
        if isinstance(self.dims, bool):
            return self.scope.extent(Dim(spelt(name))) if self.dims else None
        given = self.dims.get(name)
        return None if given is None else self.scope.extent(cast("Dim", given))


@contextlib.contextmanager
def files_beside() -> Generator[dict[Path, tuple[int, ...]]]:
    """The files that are read beside the program's own within the block (`note_file`), with their stamps."""
    found: dict[Path, tuple[int, ...]] = {}
    token = _BESIDE.set(found)
    try:
        yield found
    finally:
        _BESIDE.reset(token)


def note_file(path: Path, descriptor: int) -> None:
    """Note that a program's data come from a file that was opened."""
    found = _BESIDE.get()
    if found is not None:
        found[path.absolute()] = stamp_of(os.fstat(descriptor))


def untrusted() -> bool:
    """Tell whether the program that is being read is a stranger's (`LoadOptions.untrusted`)."""
    return _UNTRUSTED.get()


def refuse_interpreted(what: str, where: str | None = None) -> None:
    """See that a stranger's program needs no interpreter.

    Raises:
        UnsupportedError: it is such a program.
    """
    if untrusted():
        hint = "if you trust the program: without untrusted; on the command line --untrusted runs it in a process with limits"
        raise UnsupportedError(f"{what} is run by an interpreter, whose time nothing bounds", where=where, hint=hint)


def _within_limits(graph: Graph) -> Graph:
    """The graph of a stranger's program, if it is small enough.

    Raises:
        InputError: it is not.
    """
    if untrusted():
        count = total = 0
        for node in graph.nodes():
            count += 1
            types = node.type.items if isinstance(node.type, TupleType) else (node.type,)
            total += sum(t.size_bytes for t in types)
        if count > MOST_OPERATIONS:
            raise InputError(f"{count:,} operations, and an untrusted program may have {MOST_OPERATIONS:,}", where=graph.name)
        if total > MOST_BYTES:
            what = f"values of {total / 2**30:,.1f} GiB, and an untrusted program may have {MOST_BYTES >> 30}"
            raise InputError(what, where=graph.name, hint="smaller shapes")
    return graph


def discover(extra: Sequence[Path] = ()) -> list[ModuleType]:
    """Every front end module, in file-name order; `extra` folders are searched after the package's own."""
    return modules(__name__, extra, "accepts")


def load(program: object, options: LoadOptions | None = None) -> Graph:
    """Read a program: a path, HLO or StableHLO text, an ONNX ModelProto, an ExportedProgram or nn.Module, or a Graph.

    Raises:
        InputError: no such file, or nothing reads it; malformed contents; it fixes other shapes than those asked for.
    """
    check_type(options, (LoadOptions, type(None)), "options", "tilewright.frontends.LoadOptions(batch=1), or None")
    options = options or LoadOptions()
    if options.untrusted and options.allow_calls:
        raise InputError("untrusted and allow_calls exclude each other", hint="leave one out")
    token = _UNTRUSTED.set(options.untrusted)
    try:
        return _within_limits(_read(program, options))
    finally:
        _UNTRUSTED.reset(token)


def _read(program: object, options: LoadOptions) -> Graph:
    if isinstance(program, str) and not program.strip():
        raise InputError("the program is empty", hint="a path, or HLO or StableHLO text")
    if isinstance(program, Graph):
        return as_asked(_on_mesh(verify(program), options), options)
    if isinstance(program, Path) or (isinstance(program, str) and "\n" not in program and not _is_line(program)):
        program = _existing(Path(program))
    for module in in_turn(__name__, defining="accepts"):  # torch's imports half a second, and comes last
        if module.accepts(program):
            graph = verify(module.load(program, options))
            return as_asked(graph if graph.mesh == options.mesh else _on_mesh(graph, options), options)
    if isinstance(program, Path):
        raise InputError(f"nothing here reads {program}", hint=f"a file is told by its suffix: {SUFFIXES}")
    hint = "HLO or StableHLO text, ONNX, a torch ExportedProgram or nn.Module"
    raise InputError(f"nothing here reads type {type(program).__name__}", hint=hint)


def _on_mesh(graph: Graph, options: LoadOptions) -> Graph:
    """A program of a source that knows of no meshes, on the one that is asked for, with its inputs placed as planned.

    Raises:
        InputError: a plan is given for a program that says itself how it lies, or names what it has not.
    """
    if options.mesh is None or graph.mesh is not None or mesh_axes(graph.outputs):
        if options.plan:
            raise InputError("the program says itself how it lies on a mesh", where="plan", hint="leave the plan out")
        return graph
    return verify(over_whole(graph, options.mesh, options.plan_of_names()))


def as_asked(graph: Graph, options: LoadOptions) -> Graph:
    """The graph, seen to have the shapes that were asked for: a program may fix others.

    Raises:
        InputError: an input of that name is missing or of another shape, or `batch` is no input's first axis.
    """
    types = {n.op.label: n.type for n in graph.inputs if isinstance(n.op, Input) and isinstance(n.type, TensorType)}
    left = sorted(set(options.fixed) & set(types))
    if left:
        raise InputError(
            f"the input {left[0]!r} cannot be fixed here", where="fixed, --fix", hint="only inputs of ONNX models can"
        )
    for name, shape in options.input_dims.items():
        if name not in types:
            hint = f"one of {', '.join(types)}" if types else "there are none"
            raise InputError(f"no input is called {name!r}", where="input_dims, --input-dim", hint=hint)
        if types[name].shape != shape:
            raise InputError(
                f"input {name!r} cannot be {list(shape)}: the program fixes it to {types[name]}",
                where="input_dims, --input-dim",
            )
    if options.batch is not None and not any(t.shape[:1] == (options.batch,) for t in types.values()):
        hint = f"leave it out; the inputs are {', '.join(map(str, types.values())) or 'none'}"
        raise InputError(f"a batch of {options.batch} is for a first axis left open, and no input has one", hint=hint)
    return graph


def _is_line(text: str) -> bool:
    """Tell whether a single line is a whole program, and no path: it ends in a brace, and a front end reads it."""
    return text.rstrip().endswith("}") and any(module.accepts(text) for module in discover())


def _existing(path: Path) -> Path:
    shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}…"
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path
        what = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte
        what = "no such file"
    except OSError as error:
        what = f"cannot be opened ({error.strerror})"
    raise InputError(f"{what}: {shown}", hint=f"a file ending in {SUFFIXES}")
