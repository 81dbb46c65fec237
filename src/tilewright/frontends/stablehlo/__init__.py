"""The StableHLO front end: MLIR text as JAX, torch-xla or TensorFlow write it, parsed by jaxlib.

Functions, composites and nested regions are inlined. CHLO is read too. Meanings are those of the StableHLO specification:
integers wrap, a float becomes an integer by rounding toward zero and clamping, an integer divided by zero is -1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from tilewright.frontends import LoadOptions, refuse_interpreted
from tilewright.frontends.stablehlo import call as calls
from tilewright.frontends.stablehlo import jaxlib
from tilewright.frontends.stablehlo.control import CONTROL, Run, region_graphs, run_control
from tilewright.frontends.stablehlo.read import is_exported, read_module, source_text
from tilewright.ir.graph import Graph
from tilewright.ir.ops import Call

_SUFFIXES = (".mlir", ".stablehlo")
_OTHERS = re.compile(r'(?:\s|//[^\n]*+)*+(?:HloModule|graph\s+")')  # a graph's own text may hold StableHLO in a payload
_SIGNS = re.compile(r"\b(stablehlo|chlo|func\.func)\b")


def accepts(program: object) -> bool:
    """Tell whether `program` is a path ending in .mlir or .stablehlo, text that mentions a function or StableHLO, or what
    `jax.export` gives."""
    if is_exported(program):
        return True
    if isinstance(program, Path):
        return program.suffix.lower() in _SUFFIXES
    return isinstance(program, str) and not _OTHERS.match(program) and bool(_SIGNS.search(program))


def load(program: object, options: LoadOptions) -> Graph:
    """The graph of a module's entry function: the one called main, or the only public one.

    An input is called as its argument's location or identifier says, else arg0, arg1, …; an output as `jax.result_info` says,
    else result0, result1, … Open extents of arguments are bound by `input_dims` and `batch`, or stay open (`dims`).

    Raises:
        InputError: malformed text, no entry function, or dimensions for an input that is not there.
        UnsupportedError: collectives without a mesh, shapes known only at run time, an element type or operation that nothing
            expresses.
        MissingDependencyError: no jaxlib.
    """
    text, where = source_text(program)
    return read_module(jaxlib.parse(text, where), text, where, options)


def evaluate_call(call: Call, values: Sequence[object]) -> list[torch.Tensor]:
    """Run a `call` node of this front end: control flow, or what torch or StableHLO's interpreter computes."""
    if call.target in CONTROL:
        return run_control(call.payload, call.target, values)
    return calls.evaluate_call(call, values)


def regions(call: Call) -> tuple[Graph, ...]:
    """Graphs of what a loop or conditional runs as the data says, in its own order; none of another call."""
    return region_graphs(call.payload, call.target) if call.target in CONTROL else ()


def run_regions(call: Call, values: Sequence[object], runs: Sequence[Run]) -> list[torch.Tensor]:
    """Run a loop or conditional, each of its regions by what was compiled of its graph."""
    return run_control(call.payload, call.target, values, runs)


def check_call(call: Call, sources: Sequence[object]) -> tuple[()]:
    """See that the interpreter can run a call that a file brings (see `call.py`)."""
    if call.target in CONTROL:  # its regions are read as a program is
        refuse_interpreted(call.target, call.target)
        jaxlib.parse(call.payload, call.target)
    else:
        calls.check_payload(call)
    return ()
