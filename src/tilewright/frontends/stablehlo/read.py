"""Reading a parsed module into a graph: the text, open extents, the walk. Both the HLO and the StableHLO reader end here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.frontends._local import placed
from tilewright.frontends._plan import as_placement
from tilewright.frontends.stablehlo import collective, control, dot, elementwise, index, jaxlib, reduce, shape, structure
from tilewright.frontends.stablehlo.extents import open_shapes
from tilewright.frontends.stablehlo.shardings import as_said, may_say, placements, said, spell
from tilewright.frontends.stablehlo.walk import Walk, replicas
from tilewright.ir.graph import Graph
from tilewright.ir.mesh import Mesh, Placement

# Each registers the lowerings of its topic as it is imported.
TOPICS = (collective, control, dot, elementwise, index, reduce, shape, structure)


def is_exported(program: object) -> bool:
    """Tell whether a program is a `jax.export.Exported`, of which nothing is imported here."""
    return hasattr(program, "mlir_module") and hasattr(program, "in_avals")


def source_text(program: object) -> tuple[str, str]:
    """The text of a program given as a path, as the text itself or as what `jax.export` gives, and what messages call it.

    Raises:
        InputError: the file cannot be read, is no text, or is empty.
    """
    if is_exported(program):
        return str(cast("Any", program).mlir_module()), f"the export of {getattr(program, 'fun_name', 'a function')!r}"
    if not isinstance(program, Path):
        return str(program), "the text given"
    try:
        text = program.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError("not a text file", where=str(program), hint="print the module as text") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(program)) from None
    if not text.strip():
        raise InputError("the file is empty", where=str(program), hint="print the module again")
    return text, str(program)


def read_module(
    module: Any,
    asm: str,
    where: str,
    options: LoadOptions,
    labels: Sequence[str] = (),
    output_names: Sequence[str] = (),
    text: str | None = None,
    *,
    local: bool = False,
) -> Graph:
    """The graph of a parsed module.

    Args:
        module: as jaxlib parsed it; open extents are bound in place.
        asm: its text, for names of arguments and bytes of constants.
        where: the file, for messages.
        options: open extents.
        labels: names of the arguments, where another text has them.
        output_names: names of the results, likewise.
        text: of the program, where that is another one than `asm`.
        local: the program is one rank's, even where its operations do not tell.

    Raises:
        InputError: no entry function, or dimensions that do not fit an argument.
        UnsupportedError: something that no graph expresses.
    """
    walk = Walk(module, asm, where)
    names, types = walk.signature(labels)
    if options.mesh is not None and any(not getattr(t, "has_static_shape", True) for t in types) and options.dims:
        raise UnsupportedError("extents stay open on a mesh", where=where, hint="input_dims= or batch= for one shape")
    if options.dims and any(not getattr(t, "has_static_shape", True) for t in types):
        return walk.graph(names, output_names, open_shapes(dict(zip(names, types, strict=True)), asm, options, where))
    wanted = _bound_types(dict(zip(names, types, strict=True)), options, where)
    if wanted != [str(t) for t in types]:
        problem = jaxlib.bind_arguments(module, wanted)
        if problem:
            raise UnsupportedError(f"its shapes cannot be bound: {problem}", where=where, hint="lower it with concrete shapes")
        walk = Walk(module, asm, where)
    if options.mesh is not None:
        return _on_mesh(module, asm, where, options, names, output_names, local=local)
    found = said(module, walk.entry()[0]) if may_say(text or asm) else None
    if found is not None and found.parts:
        hint = f"--mesh {found.mesh or 'tp=2'} (mesh=…)"
        raise UnsupportedError("it computes over parts of several devices, and a program runs on one", where=where, hint=hint)
    graph = walk.graph(names, output_names)
    return graph if found is None else replace(graph, notes=(*graph.notes, *found.notes(names, graph.output_names)))


def _on_mesh(
    module: Any,
    asm: str,
    where: str,
    options: LoadOptions,
    names: Sequence[str],
    output_names: Sequence[str],
    *,
    local: bool,
) -> Graph:
    """The graph of one rank: of a program that says how values are split, as Shardy has it, or of one that is partitioned. Of a
    program that says nothing the graph over whole tensors."""
    mesh = cast("Mesh", options.mesh)
    entry, function = Walk(module, asm, where).entry()
    replicas(module, mesh, where)
    plan, ranks = dict(options.plan_of_names()), [int(getattr(a.type, "rank", 0)) for a in function.block().arguments]
    given = {
        i: as_placement(plan.pop(name), ranks[i], mesh, f"plan of {name!r}") for i, name in enumerate(names) if name in plan
    }
    found = said(module, entry)
    if not (local or found or found.local or plan or given):  # it says nothing: how it lies is for others to find
        return replace(Walk(module, asm, where).graph(names, output_names), mesh=mesh)
    if not local and not found.local:
        if plan:
            hint = f"its inputs are {', '.join(names)}"
            raise InputError(f"the plan places {next(iter(plan))!r}, which is no input", where=where, hint=hint)
        spell(module, entry, mesh, where, given)
        made = jaxlib.partitioned(module, where)
        graph = Walk(made, asm, where, mesh).graph(names, output_names)
        parts, left = placements(made, entry, where)
        more = [Placement.whole(n.tensor.rank) for n in graph.inputs[len(parts) :]]  # constants that the text leaves out
        return replace(graph, mesh=mesh, placements=(*parts, *more, *left))
    arguments, results = as_said(module, entry, mesh, where)
    graph = Walk(module, asm, where, mesh).graph(names, output_names)
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    unknown = [name for name in plan if name not in outputs]
    if unknown:
        hint = f"its inputs are {', '.join(names)}, its results {', '.join(outputs)}"
        raise InputError(f"the plan places {unknown[0]!r}, which is neither input nor result", where=where, hint=hint)
    told = {name: as_placement(p, outputs[name].tensor.rank, mesh, f"plan of {name!r}") for name, p in plan.items()}
    by_name = {names[i]: p for i, p in {**arguments, **given}.items()}
    return placed(graph, mesh, by_name, {**{graph.output_names[i]: p for i, p in results.items()}, **told})


def _bound_types(types: Mapping[str, Any], options: LoadOptions, where: str) -> list[str]:
    """The arguments' MLIR types with open extents bound: by name, and open first axes by the batch."""
    unknown = sorted(set(options.input_dims) - set(types))
    if unknown:
        hint = f"its inputs are {', '.join(types)}"
        raise InputError(f"dimensions are given for {unknown[0]!r}, which is no input", where=where, hint=hint)
    bound: list[str] = []
    for name, raw in types.items():
        open_axes = [a for a in range(raw.rank) if raw.is_dynamic_dim(a)] if getattr(raw, "has_rank", False) else []
        given = options.input_dims.get(name)
        if not open_axes and given is None:
            bound.append(str(raw))
            continue
        extents = [None if a in open_axes else int(raw.get_dim_size(a)) for a in range(raw.rank)]
        if given is None:
            given = [options.batch if a == 0 and e is None else e for a, e in enumerate(extents)]
        if len(given) != len(extents) or any(e not in (None, g) for e, g in zip(extents, given, strict=True)):
            raise InputError(
                f"dimensions {list(given)} do not fit input {name!r}, which is {raw}",
                where=where,
                hint="an extent for each axis, as it is where it is known",
            )
        if any(g is None or g < 0 for g in given):
            hint = (
                f"--input-dim @{name} with an extent for each axis (input_dims=…), --batch (batch=…), or bounds: --dim (dims=…)"
            )
            raise UnsupportedError(f"input {name!r} is {raw}, whose extents are open", where=where, hint=hint)
        bound.append(f"tensor<{''.join(f'{d}x' for d in given)}{raw.element_type}>")
    return bound
