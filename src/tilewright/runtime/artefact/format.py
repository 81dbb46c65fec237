"""Manifest of a saved program: the machine and the code that it is for, its steps, kernels and values by name."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import platform
import re
import sys
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from tilewright.candidates.llvm.runtime import pool
from tilewright.hardware.target import DeviceKind, Target
from tilewright.ir.artefact import Graphs, Manifest
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.runtime.partition import Kind as PartKind
from tilewright.schedule.problem import ProblemKind
from tilewright.schedule.recipe import Recipe
from tilewright.schedule.record import Choice

# What LLVM generates code for, as /proc/cpuinfo names it. Other features say how the machine is run: `hypervisor`.
_INSTRUCTIONS = re.compile(
    "avx|sse|ssse|fma|f16c|bmi|abm|popcnt|movbe|amx|v?aes|gfni|v?pclmul|sha|adx|cx16|asimd|sve|sme|i8mm|bf16|fp|atomics"
)
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


class Chosen(Choice, frozen=True, kw_only=True):
    """A step's kernel and how it was chosen: fields of `Kernel` and `Decision`."""

    measured: bool
    verified: bool
    workspace_bytes: int
    packed_bytes: int
    releasable: tuple[int, ...]
    roundoff: float
    parts: tuple[tuple[ProblemKind, str], ...]
    recipe: Recipe


class SavedStep(msgspec.Struct, frozen=True):
    """A step: its nodes, inputs and outputs by number (`numbered`), its kernel, and how many programs it has within."""

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


class OfRank(msgspec.Struct, frozen=True):
    """A program that is one rank's.

    Attributes:
        mesh: the ranks, as `Mesh.parse` reads them.
        rank: whose program it is.
        together: a word that the files of all ranks have, and no others.
    """

    mesh: str
    rank: int
    together: str


class Header(Manifest, frozen=True):
    """The part of a manifest that every version has.

    Attributes:
        made_by: digest of the code that calls kernels.
        machine: what it is for.
        thread_count: threads for its calls on a CPU, if it was compiled for a number of them.
        of_rank: whose it is, of a program on a mesh.
    """

    made_by: str
    machine: Machine
    thread_count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    of_rank: OfRank | None = None


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


def numbered(graph: Graph) -> list[Node]:
    """A graph's nodes in the order of its text."""
    return toposort((*graph.inputs, *graph.outputs))


def machine_of(target: Target) -> Machine:
    """The machine of a target, as files say it."""
    architecture = f"{platform.machine()} {sys.byteorder}"
    features = sorted(f for f in target.features if target.kind != "cpu" or _INSTRUCTIONS.match(f))
    return Machine(target.name, target.chip.name, target.kind, architecture, tuple(features))


@cache
def made_by() -> str:
    """The SHA-256 digest of the code that calls kernels."""
    digest = hashlib.sha256()
    for name in _VERSIONED:
        digest.update(Path(inspect.getfile(importlib.import_module(name))).read_bytes())
    digest.update(pool.text().encode() if pool.why_not() is None else b"")
    return digest.hexdigest()
