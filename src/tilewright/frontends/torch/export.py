"""Exporting a module or a program to functional ATen of concrete shapes, with torch's complaints in two lines."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, cast

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.frontends.torch.around import (
    NothingMade,
    asking,
    casts_that_change_nothing,
    hooks_kept,
    numbers_refused,
    quiet,
)
from tilewright.frontends.torch.registry import TRANSLATIONS, DependsOnDataError
from tilewright.frontends.torch.symbols import dynamic_shapes

_ALIASED = "expected compiled_fn"  # what torch asserts where two names are of one tensor
_VIOLATED = "Constraints violated"  # of torch.export: its guards do not hold for all extents
# Decompositions that round, or overflow, elsewhere than torch's kernels, which do these in 16 bits from step to step; or that
# multiply by 0 what these leave out, infinity too.
OTHERWISE = {
    f"aten.{name}.default"
    for name in ("addr", "linalg_cross", "multi_margin_loss", "multilabel_margin_loss_forward", "soft_margin_loss")
}
_LOSS = torch.ops.aten.nll_loss_forward.default
_MUTATIONS = {
    OutputKind.PARAMETER_MUTATION: "parameter",
    OutputKind.USER_INPUT_MUTATION: "input",
}


def exported(
    program: ExportedProgram | torch.nn.Module, options: LoadOptions, asked: list[str] | None = None, *, taken: bool = False
) -> ExportedProgram:
    """The program as functional ATen: shapes concrete, only operators kept that have a translation or no decomposition.

    Weights are those of the program: nothing is copied. Places of its source that ask whether it is being traced are added
    to `asked`. `taken`: the module is told what it asks of tensors (`taken.py`).

    Raises:
        InputError: example inputs are missing or do not fit; a symbolic extent is not bound.
        UnsupportedError: control flow or shapes depend on data; the program changes its buffers or inputs.
    """
    table = torch.export.default_decompositions()
    kept = {op: f for op, f in table.items() if str(op) not in TRANSLATIONS.keys() | OTHERWISE}
    kept[_LOSS] = partial(_loss, table[_LOSS])
    if isinstance(program, torch.nn.Module):
        _check_weights(chain(program.named_parameters(), program.named_buffers()))
        args, kwargs = arguments(options.example_inputs, program)
        module, where = program, program_name(program)
        try:
            with asking([] if asked is None else asked), contextlib.nullcontext() if taken else numbers_refused(where):
                traced = _export(module, args, kwargs, where, dims=options.dims)
            return _functional(traced, options, kept)
        except InputError as error:
            if _ALIASED not in str(error):
                raise
        # Buffers that are also attributes of objects, as a cache's are, are told apart by a trace of the Python code alone.
        return _functional(_export(module, args, kwargs, where, strict=True, dims=options.dims), options, kept)
    if (symbolic := _symbolic_inputs(program)) and not options.dims:
        program = _bound(program, symbolic, options)
    return _functional(program, options, kept)


def _loss(f: Callable[..., Any], x: torch.Tensor, target: torch.Tensor, weight: object, reduction: int, ignored: int) -> Any:
    """Loss of classes by torch's decomposition `f`; that of one sample is a sum even unreduced, as in torch's kernel: no -0."""
    return f(x, target, weight, 2 if x.dim() == 1 and not reduction else reduction, ignored)


def _functional(program: ExportedProgram, options: LoadOptions, decompositions: dict[Any, Any]) -> ExportedProgram:
    _check_weights(chain(program.state_dict.items(), program.constants.items()))
    _check_dims(program, options)
    _check_mutations(program)

    def run() -> ExportedProgram:
        with NothingMade():
            return program.run_decompositions(decompositions)

    functional = _translated_errors(run, program_name(program))
    _check_mutations(functional)
    return functional


def _export(
    module: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    where: str,
    *,
    strict: bool = False,
    dims: Mapping[str, object] | bool = False,
) -> ExportedProgram:
    """The module traced: what a cache of transformers holds are results by name. Where torch's own guards are for fewer extents
    than the dims allow, such as that half of one is not 1, they are left to assertions of the program."""

    def run(deferred: bool = False) -> ExportedProgram:
        shapes = dynamic_shapes(module, dims, args, kwargs) if dims else None
        how: dict[str, Any] = {"strict": strict, "prefer_deferred_runtime_asserts_over_guards": deferred}
        with casts_that_change_nothing(), NothingMade():
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, **how)

    try:
        return _translated_errors(run, where)
    except InputError as error:
        if _VIOLATED in error.what:
            return _translated_errors(partial(run, deferred=True), where)
        if "DynamicCache" not in error.what or not _register_cache():
            raise
    return _translated_errors(run, where)


def _register_cache() -> bool:
    """Tell torch what transformers' growing cache is made of; whether that can be told."""
    try:
        from transformers.integrations import executorch  # pyright: ignore
    except Exception:
        return False
    register = getattr(executorch, "register_dynamic_cache_export_support", None)
    if register is None:
        return False
    register()
    return True


def arguments(given: object, module: torch.nn.Module) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword arguments from example inputs: a tensor, a sequence, or a mapping of keywords.

    Raises:
        InputError: none are given.
        UnsupportedError: one is a nested tensor.
    """
    if given is None:
        raise InputError(
            "an nn.Module needs example inputs to be traced with",
            where=type(module).__name__,
            hint="example_inputs=(tensor, …), or a dict of keyword arguments",
        )
    seen: set[int] = set()

    def taken(value: object) -> object:
        """One tensor given twice is two inputs, which torch would trace as one."""
        made = _as_tensor(value)
        twice = isinstance(made, torch.Tensor) and id(made) in seen
        seen.add(id(made))
        return cast("torch.Tensor", made).clone() if twice else made

    if isinstance(given, Mapping):
        named = {k: pytree.tree_map(taken, v) for k, v in cast("Mapping[str, object]", given).items()}
        return _in_order(named, module)
    if isinstance(given, (list, tuple)):
        return tuple(pytree.tree_map(taken, v) for v in cast("Sequence[object]", given)), {}
    return (_as_tensor(given),), {}


def _in_order(named: Mapping[str, object], module: torch.nn.Module) -> tuple[tuple[object, ...], dict[str, object]]:
    """Keyword arguments in the order of the parameters of `forward`, which that of the inputs follows; those that cannot be
    named are positional, those that it takes in `**kwargs` come last."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a callable that does not say
        return (), dict(named)
    unnamed = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    positional = tuple(named[n] for n in itertools.takewhile(named.__contains__, unnamed))
    order = [n for n in parameters if n in named] + [n for n in named if n not in parameters]
    return positional, {n: named[n] for n in order if n not in unnamed[: len(positional)]}


def places(program: torch.nn.Module | ExportedProgram, ready: ExportedProgram, given: object) -> tuple[str, ...]:
    """Names of the positional arguments of `forward`, if not all up to the last input are inputs (`Graph.places`).

    Those of an exported program are what it was exported with; what was given by name then stays so, as for its own module.
    """
    every = user_inputs(ready)
    names = iter(every)
    if isinstance(program, ExportedProgram):
        spec = ready.call_spec.in_spec
        count = spec.children()[0].num_leaves if spec is not None and spec.num_children == 2 else len(every)
        found = [*itertools.islice(names, count), *(f"*{n}" for n in names)]
    else:
        found = _in_places(program, *arguments(given, program), names)
    inputs = [n for n, value in every.items() if isinstance(value, torch.Tensor)]
    return tuple(found) if found[: len(inputs)] != inputs else ()


def _in_places(
    module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object], names: Iterator[str]
) -> list[str]:
    """The names of the tensors of each argument of `forward`; its own name if it was left out."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    found = [n for value in args for n in itertools.islice(names, len(pytree.tree_leaves(value)))]
    taken = dict(zip(kwargs, [[*itertools.islice(names, len(pytree.tree_leaves(v)))] for v in kwargs.values()], strict=True))
    for p in [*parameters][len(args) :]:
        if p.kind is p.VAR_POSITIONAL and taken.keys() - named:
            found.append(f"*{p.name}")
        elif p.name in named or p.kind is p.POSITIONAL_ONLY:
            found += taken.pop(p.name, [p.name])
    return [*found, *chain.from_iterable(taken.values())]


def _as_tensor(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.is_nested:
        hint = "torch.nested.to_padded_tensor, and a mask"
        raise UnsupportedError("an input is a nested tensor, which no graph holds", where="example inputs", hint=hint)
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _translated_errors(run: Callable[[], ExportedProgram], where: str) -> ExportedProgram:
    """`run()`, quietly; what torch raises becomes a typed error with the first line of its message."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    depends = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    try:
        with quiet(), torch.no_grad(), hooks_kept():
            return run()
    except depends as error:
        raise DependsOnDataError(
            f"the program branches or takes a shape on the data: {_first_line(error)}{_cause(error)}",
            where=where,
            hint="torch.where instead of `if`, no .item(), no masks that pick elements",
        ) from error
    except TilewrightError:
        raise
    except Exception as error:
        if "unbacked symbol" in str(error).lower():
            raise DependsOnDataError(
                f"a shape depends on the data: {_first_line(error)}{_cause(error)}",
                where=where,
                hint="select with a mask (torch.where) instead of picking elements (x[x > 0], nonzero, unique)",
            ) from error
        raise InputError(f"torch.export fails: {_first_line(error)}", where=where, hint=_advice(str(error))) from error


def _cause(error: Exception) -> str:
    """The line of the program's own source that torch names: "; caused by models/longformer/modeling_longformer.py:549"."""
    found = re.search(r"Caused by:[^\n]*?\(([^\s():]+):(\d+) in (\w+)\)", str(error))
    if found is None:
        return ""
    path, line, function = found.groups()
    return f"; caused by {'/'.join(path.split('/')[-3:])}:{line} in {function}"


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:200]}" if text else repr(error)[:200]


def _advice(message: str) -> str:
    if "register a pytree" in message:
        if "cache_utils" in message:
            return "return tensors only; a transformers model wants use_cache=False"
        return (
            "return tensors, in tuples or dicts; a dataclass is one of those after torch.export.register_dataclass(its class)"
        )
    if "Guard failed" in message or "Expected input" in message:
        return "extents within the range that the program was exported with (torch.export.Dim)"
    if (fixes := re.search(r"Suggested fixes:\s*\n((?:[ \t]+\S[^\n]*\n)+)", message)) is not None:
        return f"bounds as torch suggests: {'; '.join(line.strip() for line in fixes[1].splitlines())}"
    if "expected compiled_fn" in message or "Aliased inputs" in message:
        return "a buffer that is written to shares memory with another tensor of the module: give each its own"
    return "check that module(*example_inputs) runs, and see torch.export's notes on what it can trace"


def user_inputs(program: ExportedProgram) -> dict[str, object]:
    """Traced value of each user input by placeholder name: a fake tensor, or the Python value it was traced with."""
    named = {getattr(s.arg, "name", "") for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT}
    return {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder" and n.name in named}


def _symbolic_inputs(program: ExportedProgram) -> dict[str, object]:
    """All user inputs, if any has a symbolic extent or is a symbolic number; else none."""
    inputs = user_inputs(program)
    symbolic = any(
        not isinstance(v, int) and (isinstance(v, torch.SymInt) or (isinstance(v, torch.Tensor) and not _is_concrete(v)))
        for v in inputs.values()
    )
    return inputs if symbolic else {}


def _is_concrete(value: torch.Tensor) -> bool:
    return all(type(d) is int for d in value.shape)


def _bound(program: ExportedProgram, inputs: Mapping[str, object], options: LoadOptions) -> ExportedProgram:
    """The program traced again with every symbolic extent bound, from example inputs, `input_dims` or `batch`."""
    given = options.example_inputs
    if given is not None and not isinstance(given, Mapping):
        args, kwargs = arguments(given, program.graph_module)
        return _export(program.module(), args, kwargs, where=program_name(program))
    if given is not None:
        if missing := [name for name in inputs if name not in given]:
            raise InputError(f"no example of input {missing[0]!r}", hint=f"inputs are {', '.join(inputs)}")
        values = [_as_tensor(given[name]) for name in inputs]
    else:
        symbols = _symbols(inputs, options)
        values = [_example(name, value, symbols) for name, value in inputs.items()]
    args, kwargs = pytree.tree_unflatten(values, cast(pytree.TreeSpec, program.call_spec.in_spec))
    return _export(program.module(), args, kwargs, where=program_name(program))


def program_name(program: torch.nn.Module | ExportedProgram) -> str:
    """The class of the module, as far as an export remembers it."""
    if isinstance(program, torch.nn.Module):
        return type(program).__name__
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if not path:
                return str(kind).rsplit(".", 1)[-1]
    return "program"


def _symbols(inputs: Mapping[str, object], options: LoadOptions) -> dict[object, int]:
    """The value of each symbol, from `input_dims`; of symbols that are left in first axes, from `batch`.

    Raises:
        InputError: two inputs bind one symbol differently.
        UnsupportedError: a number among the inputs is symbolic.
    """
    symbols: dict[object, int] = {}
    first: list[object] = []
    for name, value in inputs.items():
        if isinstance(value, torch.SymInt):
            raise UnsupportedError("a number among the inputs is symbolic", where=name, hint="example_inputs=(…)")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        for axis, (d, given) in enumerate(zip_longest(shape, options.input_dims.get(name, ())[: len(shape)])):
            if type(d) is int:
                continue
            if axis == 0:
                first.append(_expression(d))
            if given is not None and symbols.setdefault(_expression(d), given) != given:
                raise InputError(
                    f"input dims do not agree: an extent that is {symbols[_expression(d)]} elsewhere is {given} here",
                    where=f"input {name!r}, axis {axis}",
                    hint=f"the program has one symbol, {_expression(d)}, for both",
                )
    if options.batch is not None:
        for expression in first:
            symbols.setdefault(expression, options.batch)
    return symbols


def _expression(d: object) -> Any:
    """The sympy expression of a symbolic extent."""
    return cast(Any, d).node.expr


def _example(name: str, value: object, symbols: Mapping[object, int]) -> object:
    """A value of an input's type with its symbols bound."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [d if type(d) is int else _expression(d).subs(dict(symbols)) for d in value.shape]
    free = [str(d) for d in shape if not isinstance(d, int) and not getattr(d, "is_Integer", False)]
    if free:
        raise InputError(
            f"extents of an input are symbolic: [{', '.join(map(str, value.shape))}]",
            where=name,
            hint=f"input_dims={{{name!r}: (…)}}, batch=… for the first axis, or example_inputs",
        )
    return torch.zeros([int(d) for d in shape], dtype=value.dtype, device=value.device)


def _check_weights(weights: Iterable[tuple[str, object]]) -> None:
    for name, weight in weights:
        if isinstance(weight, FakeTensor) or (isinstance(weight, torch.Tensor) and weight.device.type == "meta"):
            raise InputError("a weight has no data (meta device)", where=name, hint="load the weights before compiling")


def _check_dims(program: ExportedProgram, options: LoadOptions) -> None:
    inputs = user_inputs(program)
    for name, dims in options.input_dims.items():
        value = inputs.get(name)
        if not isinstance(value, torch.Tensor):
            raise InputError(f"no input {name!r} to give dims to", hint=f"inputs are {', '.join(inputs) or 'none'}")
        if tuple(value.shape) != tuple(dims):
            raise InputError(
                f"the program was traced with {list(value.shape)}, not {list(dims)}",
                where=f"input {name!r}",
                hint="example inputs of that shape, or export with dynamic_shapes",
            )


def _check_mutations(program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind in _MUTATIONS:
            raise changes(_MUTATIONS[spec.kind], spec.target, program_name(program))


def changes(what: str, name: str | None, where: str) -> UnsupportedError:
    """An error to raise: the program changes something in a way that has no place in a graph."""
    hint = "model.eval() for batch norm; replace positions of a buffer, or pass a cache in and return the new one"
    return UnsupportedError(f"the program changes its {what} {name!r}", where=where, hint=hint)
