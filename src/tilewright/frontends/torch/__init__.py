"""The PyTorch front end: an `nn.Module` with example inputs, or a `torch.export.ExportedProgram`.

A module is exported (non-strict), made functional and decomposed until only operators remain that have a translation (the
modules of `TOPICS`) or no decomposition; the latter become `call` nodes that torch itself evaluates. Weights are referred to,
not copied. Results agree with torch's up to the rounding of its own kernels. A float becomes an integer of 8 or 16 bits by way
of 32 bits, and keeps the low bits. Where torch is undefined (a float out of the range of 32 bits, of 64 for s64), XLA's rule
holds.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tilewright.errors import TilewrightError, TypeMismatchError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.frontends._local import one_ranks, over_whole
from tilewright.frontends.torch import call as calls
from tilewright.frontends.torch import collective, elementwise, few_bits, index, matmul, placed, quantize, reduce, views
from tilewright.frontends.torch import file_call as file_calls
from tilewright.frontends.torch.aot import Open
from tilewright.frontends.torch.collective import exchanges, on_mesh
from tilewright.frontends.torch.export import arguments, exported, places, program_name, user_inputs
from tilewright.frontends.torch.placed import read_plan, said_twice, whole, without_styles
from tilewright.frontends.torch.reader import Reader
from tilewright.frontends.torch.registry import DependsOnDataError
from tilewright.frontends.torch.symbols import reading, symbols_of
from tilewright.frontends.torch.taken import COMPARED, as_taken, differs_as_traced, note
from tilewright.ir.graph import Graph
from tilewright.ir.mesh import Mesh
from tilewright.ir.ops import Call
from tilewright.tracing import TRACING

# Each registers the translations of its topic as it is imported.
TOPICS = (collective, elementwise, few_bits, index, matmul, placed, quantize, reduce, views)
_PICKLES = (".pt2", ".pt", ".pth")


def accepts(program: object) -> bool:
    """Tell whether `program` is a module, an exported program, or a file that torch writes."""
    if isinstance(program, Path):
        return program.suffix.lower() in _PICKLES
    return isinstance(program, (torch.nn.Module, ExportedProgram, Open))


def load(program: object, options: LoadOptions) -> Graph:
    """The graph of a module or an exported program.

    An input is called as the export calls its placeholder, an output by its place in what the module returns, a node by the
    module it stands in. Symbolic extents of an exported program are bound by `input_dims`, `batch` or example inputs. Where
    a module's Python branches on data, the graph is of the way that the example inputs take, and compares it at each call.

    Raises:
        InputError: example inputs are missing, torch cannot export the module, or a symbolic extent is not bound.
        UnsupportedError: control flow or shapes depend on data; buffers or inputs are changed; a saved file is given.
    """
    if isinstance(program, Path):
        raise UnsupportedError(
            "torch opens its own files by unpickling and evaluating what they hold, so a file could run any code",
            where=str(program),
            hint="if you trust it: tilewright.compile(torch.export.load(path))",
        )
    if isinstance(program, Open):
        return program.graph(options.scope)
    assert isinstance(program, (torch.nn.Module, ExportedProgram))
    if options.untrusted:
        raise UnsupportedError("a module is code of this process, which nothing limits", where=program_name(program))
    with TRACING:
        return _traced(program, options)


def _traced(program: torch.nn.Module | ExportedProgram, options: LoadOptions) -> Graph:
    asked = list[str]()
    try:
        graph = _read(program, options, asked)
        _check_same_traced(program, options, asked)
        return graph
    except DependsOnDataError as refused:
        if not isinstance(program, torch.nn.Module):
            hint = "give the module itself, and example inputs"
            raise UnsupportedError(refused.what, where=refused.where, hint=hint) from refused
        # A refusal of that, too, leaves the way that the example inputs take.
        with contextlib.suppress(TilewrightError), _grouped_experts(program) as any_:
            if any_:
                graph = _read(program, options)
                return replace(graph, notes=(*graph.notes, GROUPED))
        try:
            with as_taken(program, *arguments(options.example_inputs, program)) as learnt:
                graph = _read(program, options, asked, taken=True)
        except Exception as error:
            raise UnsupportedError(f"{refused.what}; {_second(error)}", where=refused.where, hint=refused.hint) from error
    _check_same_traced(program, options, asked)
    return replace(graph, notes=(*graph.notes, *map(note, learnt)))


def _check_same_traced(program: torch.nn.Module | ExportedProgram, options: LoadOptions, asked: Sequence[str]) -> None:
    """See that a module that asks whether it is being traced computes the same if it is.

    Raises:
        UnsupportedError: it does not, on the example inputs, by more than rounding explains.
    """
    if not asked or not isinstance(program, torch.nn.Module):
        return
    apart = differs_as_traced(program, *arguments(options.example_inputs, program))
    if apart > _ROUNDING:
        raise UnsupportedError(
            f"the module computes something else while it is traced: its results differ by {apart:.2g} of the largest number",
            where=program_name(program),
            hint="example inputs on which both agree, such as an attention mask with padding; or, of a model of transformers, "
            'model.set_attn_implementation("eager") before, whose masks are the same either way',
        )


def _second(error: Exception) -> str:
    """The sentence on what stands in the way of the trace that compares at each call, in the words of its error."""
    what = f"{error.what} ({error.where})" if isinstance(error, TilewrightError) and error.where else str(error)
    return f"and the way that the example inputs take cannot be followed: {what}"


_ROUNDING = 0.05  # of the largest number, which halves of other kernels stay below
_EXPERTS = "_experts_implementation"
GROUPED = 'the loop over experts is read as grouped products (set_experts_implementation("grouped_mm")), which take any routing'


@contextlib.contextmanager
def _grouped_experts(module: torch.nn.Module) -> Generator[bool]:
    """A context in which mixtures of transformers that loop over the experts with tokens multiply by groups, which is the same
    function and no way that depends on the data; yields whether there are any. Those that cannot be set so stay as they are."""
    held = [
        (m, m.config, getattr(m.config, _EXPERTS)) for m in module.modules() if hasattr(getattr(m, "config", None), _EXPERTS)
    ]
    loops: list[Any] = [m for m, _, how in held if how == "eager" and hasattr(m, "set_experts_implementation")]
    changed: list[Any] = []
    try:
        for m in loops:
            with contextlib.suppress(Exception):  # models without experts have the method, too
                m.set_experts_implementation("grouped_mm")
                changed.append(m)
        yield bool(changed)
    finally:
        for m in loops:
            with contextlib.suppress(Exception):
                m.set_experts_implementation("eager")
        for _, config, how in held:  # what a model was told, its parts were told with it
            if getattr(config, _EXPERTS) != how:
                setattr(config, _EXPERTS, how)


def _read(
    program: torch.nn.Module | ExportedProgram, options: LoadOptions, asked: list[str] | None = None, *, taken: bool = False
) -> Graph:
    if options.mesh is not None:
        return _on_mesh(program, options, options.mesh, asked, taken=taken)
    ready = exported(program, options, asked, taken=taken)
    inputs, name, scope = user_inputs(ready), program_name(program), vars(options.scope)
    before = {field: copy.copy(value) for field, value in scope.items()}
    try:
        with reading(symbols_of(ready, inputs, options) if options.dims else None):
            graph = Reader(ready, name).read()
    except TypeMismatchError:
        united = dict[str, list[str]]()
        scope.update(before)
        symbols = symbols_of(ready, inputs, options, united) if options.dims is True else None
        if all(len(of) == 1 for of in united.values()):
            raise
        with reading(symbols):
            graph = Reader(ready, name).read()
        # Torch gives each key and each value of a cache a symbol, and does not say that they are equal.
        alike = (f"{' and '.join(of)} are taken for equal, as in the example" for of in united.values() if of[1:])
        graph = replace(graph, notes=(*graph.notes, *alike))
    return replace(graph, places=places(program, ready, options.example_inputs))


def _on_mesh(
    program: torch.nn.Module | ExportedProgram,
    options: LoadOptions,
    mesh: Mesh,
    asked: list[str] | None,
    *,
    taken: bool,
) -> Graph:
    """The graph of a program on a mesh: over whole tensors, which are placed, or of one rank, if it exchanges values."""
    if options.dims:
        raise UnsupportedError("extents stay open on a mesh", where=program_name(program), hint="dims=False")
    module = program if isinstance(program, torch.nn.Module) else torch.nn.Module()
    plan = read_plan(module, mesh, options.plan)
    with whole(module), without_styles(module) as styled, plan.placing():
        ready = exported(program, options, asked, taken=taken)
        with on_mesh(mesh):
            graph = Reader(ready, program_name(program), placed=plan.parameters).read()
    notes = (*graph.notes, *plan.notes, *([said_twice(styled)] if styled else []))
    graph = replace(graph, places=places(program, ready, options.example_inputs), notes=notes)
    return one_ranks(graph, mesh, plan.inputs) if exchanges(graph) else over_whole(graph, mesh, plan.inputs)


def not_repeated(call: Call) -> str | None:
    """The reason why a CUDA graph does not do again what a call does; None if it may be part of one."""
    return calls.not_repeated(call)


def evaluate_call(call: Call, values: Sequence[object]) -> list[torch.Tensor]:
    """Run a `call` node of this front end with torch (see `call.py`)."""
    return calls.evaluate_call(call, values)


def check_call(call: Call, sources: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
    """See that a call is one that a file may bring with it (see `file_call.py`)."""
    return file_calls.check_call(call, sources)


def compares(graph: Graph) -> bool:
    """Tell whether a program compares at each call which way its inputs lead."""
    return any(isinstance(n.op, Call) and n.op.target == COMPARED for n in graph.nodes())


def itself(module: torch.nn.Module, example_inputs: object) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """Runner of the module by torch, on tensors that stand for those of the example inputs, in their order; the results
    lie where the first tensor does."""
    leaves, tree = pytree.tree_flatten(arguments(example_inputs, module))
    homes = {i: leaf.device for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    fixed = [None if i in homes else leaf for i, leaf in enumerate(leaves)]

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        filled = list(fixed)
        for (i, home), x in zip(homes.items(), inputs, strict=True):
            filled[i] = x.to(home)
        args, kwargs = pytree.tree_unflatten(filled, tree)
        results = [t for t in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        return [t.to(inputs[0].device) for t in results] if inputs else results

    return run
