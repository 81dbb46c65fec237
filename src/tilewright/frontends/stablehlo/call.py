"""Operations that no node expresses: each becomes a `call` whose payload is a module of that operation alone.

Torch computes the operations that it has (`torch_calls.py`). What holds a region of scalar arithmetic is evaluated by
StableHLO's own reference interpreter, which jaxlib carries. The interpreter ends the process on an operation that it does not
know, and on integer division by zero. So only the operations named here ever reach it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import refuse_interpreted
from tilewright.frontends.stablehlo import jaxlib
from tilewright.frontends.stablehlo.module import (
    MLIR_NAMES,
    Operation,
    attribute_from,
    carried_types,
    component,
    elements,
    tensor_type,
)
from tilewright.frontends.stablehlo.order import spelt_out
from tilewright.frontends.stablehlo.registry import Complex, Site, Value
from tilewright.frontends.stablehlo.torch_calls import COMPUTED, Kernel, maker
from tilewright.ir.build import items
from tilewright.ir.graph import Node
from tilewright.ir.ops import FUNCTIONS, Call
from tilewright.ir.types import TensorType

# Operations with a region of scalar arithmetic, which the interpreter runs.
INTERPRETED = frozenset({"map", "reduce", "reduce_window", "scatter", "select_and_scatter", "sort"})
CALLABLE = INTERPRETED | COMPUTED
# Functions of complex numbers that torch lacks.
_COMPLEX_ONLY = frozenset({"stablehlo.atan2", "stablehlo.maximum", "stablehlo.minimum"})
# What may stand in such a region.
_SCALAR = (
    *("bitcast_convert", "count_leading_zeros", "popcnt", "reduce_precision", "complex", "imag", "real"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "round_nearest_afz", "round_nearest_even"),
)
_NOT_FUNCTIONS = ["broadcast_in_dim", "compare", "constant", "convert", "reshape", "return", "select"]
_IN_BODY = INTERPRETED.union(FUNCTIONS, _NOT_FUNCTIONS, _SCALAR)
_CONTROL = ("stablehlo.while", "stablehlo.if", "stablehlo.case")
_DIVISIONS = ("stablehlo.divide", "stablehlo.remainder")
_BITCAST = re.compile(r'"mhlo\.bitcast"\((?P<operand>%[\w#]+)\)[^\n]*? : (?=\(tensor<\w+>\) -> tensor<\w+>)')
_COPY = re.compile(r'"mhlo\.copy"\((?P<operand>%[\w#]+)\)[^\n]*? : (?=\(tensor<\w+>\) -> tensor<\w+>)')
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_NAME = re.compile(r"%[\w$.\-]+(?:#\d+)?")
_DEFINED = re.compile(r"^\s*(%[\w$.\-]+)(?::\d+)? = ", re.MULTILINE)
_BLOCK = re.compile(r"^\s*\^\w+\((.*)\):", re.MULTILINE)
_FUNCTIONS = ("func.func", "func.call", "func.return")
_TENSOR = re.compile(r"tensor<((?:[?\d]+x)+)([\w<>]+?)>(?!>)")


def make_module(op: Operation, function: Callable[[str, str], Operation], *, split: bool = True) -> str:
    """The text of a module whose `main` is the one operation, with the functions that its regions call.

    With `split`, it takes and gives complex numbers as their real and imaginary parts. Made by way of text: a clone of an
    operation outlives the module it is put in, and jaxlib does not keep that alive.

    Raises:
        UnsupportedError: a region reads more than constants from outside.
    """
    printed = _generic(op)
    head = printed.index(f'"{op.name}"(') + len(op.name) + 2
    rest = printed[printed.index(")", head) + 1 :]
    names = ", ".join(f"%in{i}" for i in range(len(op.operands)))
    takes: list[str] = []
    gives: list[tuple[str, str]] = []
    before = [_generic(c) for c in _captured_constants(op)]
    after: list[str] = []
    given = [(f"in{i}", v) for i, v in enumerate(op.operands)]
    outside, undefined = _outside(op), _undefined(rest)
    names_outside = dict(zip(outside, undefined, strict=False))
    reads = captured(op)
    if reads and len(outside) != len(undefined):
        raise UnsupportedError("what its regions read cannot be told by name", where=op.where)
    for i, v in enumerate(reads):
        rest = re.sub(rf"{re.escape(names_outside[v])}(?![\w#.$-])", f"%captured{i}", rest)
        given.append((f"captured{i}", v))
    for name, v in given:
        part = _part(v.type) if split else None
        if part is None:
            takes.append(f"%{name}: {v.type}")
            continue
        takes += [f"%re_{name}: {part}", f"%im_{name}: {part}"]
        before.append(f'%{name} = "stablehlo.complex"(%re_{name}, %im_{name}) : ({part}, {part}) -> {v.type}')
    for i, r in enumerate(op.results):
        part = _part(r.type) if split else None
        if part is None:
            gives.append((f"%out#{i}", str(r.type)))
            continue
        for name in ("real", "imag"):
            gives.append((f"%{name}{i}", part))
            after.append(f'%{name}{i} = "stablehlo.{name}"(%out#{i}) : ({r.type}) -> {part}')
    types, results = ", ".join(t for _, t in gives), ", ".join(n for n, _ in gives)
    lines = [*before, f'%out:{len(op.results)} = "{op.name}"({names}){rest}', *after]
    body = "\n".join(lines)
    text = f"func.func @main({', '.join(takes)}) -> ({types}) {{\n{body}\nfunc.return {results} : {types}\n}}\n"
    called = [_generic(function(n, op.where)) for n in sorted(_callees(op, function, set()))]
    try:
        return str(jaxlib.parse("\n".join([text, *called]), op.where, op.raw.context))
    except InputError as error:
        raise UnsupportedError(f"it cannot stand alone: {error.what}", where=op.where) from None


def _part(raw: Any) -> str | None:
    """The MLIR type of the parts of complex numbers."""
    dtype = component(raw)
    return str(raw).replace(f"complex<{MLIR_NAMES[dtype]}>", MLIR_NAMES[dtype]) if dtype is not None else None


def _generic(op: Operation) -> str:
    """Generic text in which a total order is spelt out, and what XLA's layouts leave in scalar bodies has its meaning."""
    text = op.raw.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
    text = _BITCAST.sub(r'"stablehlo.bitcast_convert"(\g<operand>) : ', text)
    return spelt_out(_COPY.sub(r'"stablehlo.reshape"(\g<operand>) : ', text))


def _captured_constants(op: Operation) -> list[Operation]:
    """Constants that regions of `op` read and that stand outside it, where canonicalisation puts them."""
    makers = {v: Operation(v.owner) for v in _outside(op) if hasattr(v.owner, "operation")}
    return list({m.raw: m for m in makers.values() if m.name == "stablehlo.constant"}.values())


def captured(op: Operation) -> list[Any]:
    """List what regions of a loop or conditional read from outside, but constants; other operations' may read nothing."""
    if op.name not in _CONTROL:
        return []
    return [v for v in _outside(op) if not (hasattr(v.owner, "operation") and Operation(v.owner).name == "stablehlo.constant")]


def _undefined(text: str) -> list[str]:
    """The names that generic text uses and does not define, in the order of their first use, which is that of `_outside`."""
    text = _STRING.sub('""', text)
    defined = set(_DEFINED.findall(text))
    defined.update(name for arguments in _BLOCK.findall(text) for name in _NAME.findall(arguments))
    return [n for n in dict.fromkeys(_NAME.findall(text)) if n.partition("#")[0] not in defined]


def _outside(op: Operation) -> list[Any]:
    """Values that regions of `op` read and that are made outside it, in the order they are met."""
    nested = list(inside(op))
    known = {v for inner in (op, *nested) for r in inner.raw.regions for b in r.blocks for v in b.arguments}
    known.update(v for inner in nested for v in inner.results)
    return list(dict.fromkeys(v for inner in nested for v in inner.operands if v not in known))


def inside(op: Operation) -> Iterator[Operation]:
    """Operations in the regions of `op`, at any depth."""
    for region in op.raw.regions:
        for block in region.blocks:
            for raw in block.operations:
                inner = Operation(raw)
                yield inner
                yield from inside(inner)


def _callees(op: Operation, function: Callable[[str, str], Operation], seen: set[str]) -> set[str]:
    for inner in inside(op):
        name = inner.string("callee") if inner.name == "func.call" else ""
        if name and name not in seen:
            seen.add(name)
            _callees(function(name, inner.where), function, seen)
    return seen


def _runnable(module: Any, where: str) -> Operation:
    """The function `main` of a payload, once nothing in it can end the process that interprets it.

    Raises:
        InputError: there is no main.
        UnsupportedError: an operation outside the known ones, an integer division, or a type that cannot be carried.
    """
    functions = [Operation(raw) for raw in module.body.operations]
    named = {f.string("sym_name"): f for f in functions if f.name == "func.func"}
    for name, f in named.items():
        if name in _callees(f, lambda callee, _: named[callee], set()):
            raise UnsupportedError(f"function {name!r} calls itself", where=where)
    for inner in (i for f in functions for i in inside(f)):
        dialect, _, name = inner.name.partition(".")
        if inner.name not in _FUNCTIONS and not (dialect == "stablehlo" and name in _IN_BODY):
            raise UnsupportedError(f"{inner.name} in a region cannot be interpreted", where=where)
        for value in (*inner.operands, *inner.results):
            t = carried_types(value.type, where)[0]
            if inner.name in _DIVISIONS and not t.dtype.is_float:
                raise UnsupportedError("an integer division in a region cannot be interpreted", where=where)
    if "main" not in named:
        raise InputError("the payload of a call has no main", where=where)
    return named["main"]


def is_callable(op: Operation) -> bool:
    """Tell whether torch or the interpreter can run the operation."""
    dialect, _, name = op.name.partition(".")
    if dialect != "stablehlo":
        return False
    return name in CALLABLE or maker(op) is not None or (op.name in _COMPLEX_ONLY and _part(op.operands[0].type) is not None)


def make_call(site: Site) -> list[Value]:
    """A `call` for the operation: its results.

    Raises:
        UnsupportedError: the interpreter cannot run it.
    """
    op = site.op
    payload = make_module(op, site.reader.function)
    types = site.carried
    if op.name in _CONTROL:
        refuse_interpreted(op.name, op.where)
    else:
        module = jaxlib.parse(_filled(payload, ()), op.where, op.raw.context)
        if _program(module, op.where) is None:
            refuse_interpreted(op.name, op.where)
            _runnable(module, op.where)
    values = [*site.values, *(site.reader.outer(v) for v in captured(op))]
    if not all(isinstance(v, (Node, Complex)) for v in values):
        raise site.refuse("it reads a tuple or a token where tensors are expected")
    sources = [n for v in values for n in ((v.re, v.im) if isinstance(v, Complex) else (v,)) if isinstance(n, Node)]
    made = iter(items(Node(Call("stablehlo", op.name, payload, tuple(t for group in types for t in group)), *sources)))
    return [next(made) if len(group) == 1 else Complex(next(made), next(made)) for group in types]


def _filled(payload: str, shapes: Sequence[Sequence[int]]) -> str:
    """A payload with numbers for extents that it leaves open: those of the first of these shapes that a type fits, else 1."""
    if "?" not in payload:
        return payload

    def filled(found: re.Match[str]) -> str:
        said = found[1].split("x")[:-1]
        fits = (s for s in shapes if len(s) == len(said) and all(w in ("?", str(d)) for w, d in zip(said, s, strict=True)))
        extents = next(fits, [1 if w == "?" else w for w in said])
        return f"tensor<{''.join(f'{d}x' for d in extents)}{found[2]}>"

    return _TENSOR.sub(filled, payload)


@dataclass(frozen=True)
class _Program:
    """The straight line of torch's kernels that a payload's `main` is.

    Attributes:
        types: types of its arguments.
        steps: a kernel each, which values it reads, and which one it gives.
        results: indices of the values that are returned.
    """

    types: tuple[TensorType, ...]
    steps: tuple[tuple[Kernel, tuple[int, ...], int], ...]
    results: tuple[int, ...]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        at = dict(enumerate(tensors))
        for kernel, reads, gives in self.steps:
            at[gives] = kernel(*(at[i] for i in reads))
        return [at[i].contiguous() for i in self.results]


def _program(module: Any, where: str) -> _Program | None:
    """A payload as torch's kernels, or None if it holds something that the interpreter runs."""
    functions = [Operation(raw) for raw in module.body.operations]
    if len(functions) != 1 or functions[0].string("sym_name") != "main":
        return None
    block = functions[0].block()
    at = {value: i for i, value in enumerate(block.arguments)}
    types = tuple(tensor_type(a.type, where) for a in block.arguments)
    steps: list[tuple[Kernel, tuple[int, ...], int]] = []
    for op in block.operations():
        reads = tuple(at[v] for v in op.operands)
        if op.name in ("func.return", "stablehlo.return"):
            return _Program(types, tuple(steps), reads)
        make = maker(op)
        if make is None:
            return None
        (result,) = op.results
        at[result] = len(at)
        steps.append((make(op), reads, at[result]))
    return None


@functools.lru_cache(maxsize=1024)
def _program_of(payload: str, where: str) -> _Program | None:
    return _program(jaxlib.parse(payload, where), where)


def check_payload(call: Call) -> None:
    """See that the payload of a call is one that torch's kernels or the interpreter can run.

    Raises:
        InputError: it is no module, or holds no `main`.
        UnsupportedError: the interpreter cannot run it.
    """
    module = jaxlib.parse(_filled(call.payload, ()), call.target)
    if _program(module, call.target) is None:
        refuse_interpreted(call.target, call.target)
        _runnable(module, call.target)


def evaluate_call(call: Call, values: Sequence[object]) -> list[torch.Tensor]:
    """Run a `call` of this front end: by torch where it computes the operation, else by StableHLO's interpreter, on the CPU.

    Raises:
        InputError: the payload is no module with a `main` that takes these values.
        UnsupportedError: neither can run it.
    """
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    payload = _filled(call.payload, [*(t.shape for t in tensors), *(t.shape for t in call.types)])
    program = _program_of(payload, call.target)
    if program is not None:
        _check_values(program.types, values, call.target)
        return program.run(tensors)
    # A context keeps every constant it ever saw, inputs among them: one for each evaluation.
    module = jaxlib.parse(payload, call.target)
    arguments = _runnable(module, call.target).block().arguments
    types = [tensor_type(a.type, call.target) for a in arguments]
    _check_values(types, values, call.target)
    with module.context:
        inputs = [attribute_from(x, t.dtype) for x, t in zip(tensors, types, strict=True)]
    device = tensors[0].device if tensors else torch.device("cpu")
    results = jaxlib.interpret(module, inputs)
    found = [elements(a, t, "", call.target).expand(t.shape) for a, t in zip(results, call.types, strict=True)]
    return [t.to(device) for t in found]


def _check_values(types: Sequence[TensorType], values: Sequence[object], where: str) -> None:
    if len(types) != len(values):
        raise InputError(f"{len(values)} values for a payload that takes {len(types)} tensors", where=where)
    for value, type in zip(values, types, strict=True):
        given = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else ()
        if given != (type.shape, type.dtype.to_torch()):
            raise InputError(f"a payload that takes {type} is given another value", where=where)
