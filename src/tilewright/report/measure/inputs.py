"""Inputs that a program is run on: random data unless told otherwise, never silently constant."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from tilewright.errors import InputError
from tilewright.files import whole_file
from tilewright.ir.anchor import ANCHORS, acc_of, operands_of
from tilewright.ir.build import const
from tilewright.ir.graph import Graph, Node, label_of, substitute
from tilewright.ir.ops import Input, Param
from tilewright.ir.state import caller_inputs
from tilewright.ir.types import TensorType, no_numbers
from tilewright.report.measure.domains import domains
from tilewright.report.program import tensor_types
from tilewright.report.schema import Input as InputRow
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

if TYPE_CHECKING:
    import numpy as np

# Swap, and memory that a virtual machine is given only as it is used, hold more than the machine reports at first.
MEMORY_GROWS = 2
WIDEST = 16  # bytes of an element that an .npz may hold for an input of any type
# A product is checked against its result, both ends of the intervals of two error bounds, and what those become.
CHECKED_BYTES = 8 * 4


@dataclass(frozen=True)
class Feed:
    """A value for an input and what it is."""

    value: object
    shown: InputRow


def make_feeds(
    graph: Graph,
    *,
    seed: int = 0,
    fill0: Sequence[str] = (),
    fill1: Sequence[str] = (),
    given: Mapping[str, object] | None = None,
) -> list[Feed]:
    """A value for each input of `graph` that a caller gives, in order: given, filled with 0 or 1, or random.

    What random means stands in `domains`; a scale or side input of a gemm is sized to what it meets there (`schedule.sample`).

    Raises:
        InputError: a name is no input, or is filled twice; an input is no array of numbers.
    """
    given = given or {}
    labels = {label_of(n): n for n in caller_inputs(graph)}
    for name in (*fill0, *fill1, *given):
        if name not in labels:
            raise no_input(name, labels)
    for name in fill0:
        if name in fill1 or name in given:
            raise InputError(f"input {name!r} is to be filled with 0 and with something else")
    for name in fill1:
        if name in given:
            raise InputError(f"input {name!r} is to be filled with 1 and with something else")
    for name, node in labels.items():
        if node.tensor.dtype.kind == "opaque":
            raise no_numbers(name)
    generator = torch.Generator().manual_seed(seed)
    drawn = domains(graph)
    sized = _side_inputs(graph, seed)
    feeds: list[Feed] = []
    for name, node in labels.items():
        filled = name in fill0 or name in fill1
        if name in given:
            value, data = given[name], "given"
        elif filled:
            data = "zeros" if name in fill0 else "ones"
            value = torch.full(node.shape, int(name in fill1), dtype=torch.int64).to(node.tensor.dtype.to_torch())
        elif node in sized:
            value, data = sized[node], "random, sized to what it meets"
        else:
            value, data = drawn[node].draw(node, generator), str(drawn[node])
        feeds.append(Feed(value, InputRow(name, str(node.type), data, filled)))
    return feeds


def baked(graph: Graph, feeds: Sequence[Feed], names: Collection[str]) -> tuple[Graph, list[Feed]]:
    """The program with these inputs as constants of the values they were fed, and the other inputs' feeds."""
    constants = {
        node: const(cast("torch.Tensor", feed.value), node.tensor.dtype)
        for node, feed in zip(graph.inputs, feeds, strict=True)
        if feed.shown.name in names
    }
    outputs = substitute(graph.outputs, constants)
    inputs = tuple(n for n in graph.inputs if n not in constants)
    rest = [f for f in feeds if f.shown.name not in names]
    return Graph(graph.name, inputs, tuple(outputs), graph.output_names, notes=graph.notes), rest


def _side_inputs(graph: Graph, seed: int) -> dict[Node, torch.Tensor]:
    """Values for the inputs that gemms of the program, as it was read, take beside their operands."""
    found: dict[Node, torch.Tensor] = {}
    for node in graph.nodes():
        if not isinstance(node.op, ANCHORS):
            continue
        operands = {n.op.index for n in map(_leaf, operands_of(node)) if isinstance(n.op, Param)}
        beside = [i for i, s in enumerate(node.src) if i not in operands and isinstance(s.op, Input)]
        if beside:
            values = random_sources(problem_of(node), seed)
            found.update((node.src[i], values[i]) for i in beside)
    return found


def _leaf(operand: Node) -> Node:
    """The stored tensor at the end of an operand's views, casts and dequantisation."""
    while operand.src:
        operand = operand.src[0]
    return operand


def no_input(name: str, labels: Collection[str], where: str | None = None) -> InputError:
    """The error for a name that is no input of the program."""
    return InputError(
        f"no input is called {name!r}", where=where, hint=f"one of {', '.join(labels)}" if labels else "there are none"
    )


def _opaque(node: Node) -> bool:
    return not isinstance(node.type, TensorType) or node.dtype.kind == "opaque"


def check_memory(graph: Graph) -> None:
    """See that the machine could hold the program's values, and what its largest product is checked against.

    Raises:
        InputError: they are far larger than the machine's memory.
    """
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ends = sum(_bytes(t) for n in (*graph.inputs, *graph.outputs) for t in tensor_types(n))
    largest = max((_held(n) for n in graph.nodes()), default=0)
    need = max(ends, largest)
    if need > MEMORY_GROWS * memory:
        raise InputError(
            f"its values and their check need {need / 2**30:,.0f} GiB at least and the machine has {memory / 2**30:,.0f} GiB",
            where=graph.name,
            hint="smaller shapes (--batch, --input-dim)",
        )


def _held(node: Node) -> int:
    if isinstance(node.op, ANCHORS):
        return CHECKED_BYTES * acc_of(node).tensor.elements
    return sum(_bytes(t) for t in tensor_types(node))


def _bytes(t: TensorType) -> int:
    return t.elements * max(t.dtype.bits, 8) // 8


def read_npz(path: Path, graph: Graph, option: str = "--inputs") -> dict[str, object]:
    """The arrays of an .npz file by input name. Types NumPy lacks (bf16, f8) may be raw bytes of their width.

    Raises:
        InputError: no such file, not to be read, not an .npz, or it holds Python objects.
    """
    import numpy as np

    from tilewright.ir.literal_file import UNREADABLE, check_sizes

    try:
        if isinstance(opened := np.load(path, mmap_mode="r", allow_pickle=False), np.ndarray):
            raise ValueError("it is one array without a name, an .npy file")
        with opened as archive:
            if isinstance(archive, np.lib.npyio.NpzFile):
                stored = [n for n in graph.inputs if not _opaque(n)]
                check_sizes(archive, {label_of(n): max(4096, WIDEST * n.tensor.elements) for n in stored})
            arrays = {name: np.asarray(cast("object", archive[name])) for name in archive.files}  # or bytes, for another file
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"no such file: {path}", where=option, hint="an .npz file: numpy.savez(path, name=array, …)") from None
    except (IsADirectoryError, PermissionError) as error:
        hint = "an .npz file: numpy.savez(path, name=array, …)"
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), hint=hint) from error
    except UNREADABLE as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "pickled" in said:  # NumPy's words for any file that it does not know; what they advise runs the file's code
            said = "it is another kind of file, or holds Python objects"
        raise InputError(f"not an .npz of arrays: {said}", where=str(path), hint="numpy.savez(path, name=array, …)") from error
    labels = {label_of(n): n for n in graph.inputs}
    for name, array in arrays.items():
        if name in labels and array.dtype.kind == "V":
            native = labels[name].tensor.dtype.to_numpy()
            if array.dtype.itemsize == native.itemsize:
                arrays[name] = array.view(native)
    return dict(arrays)


def npz_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays in an .npz file by name, without reading their data; none of a file that `read_npz` refuses."""
    from numpy.lib import format as npy

    found: dict[str, tuple[int, ...]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    read = npy.read_array_header_1_0 if npy.read_magic(member) == (1, 0) else npy.read_array_header_2_0
                    found[name.removesuffix(".npy")] = tuple(read(member)[0])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return {}
    return found


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz; either all of it appears under `path` or nothing changes. Types NumPy lacks are raw bytes of their width.

    Raises:
        InputError: the folder is not there or cannot be written.
    """
    from numpy.lib.format import write_array

    with whole_file(path) as draft, zipfile.ZipFile(draft, "w") as archive:
        for name, array in arrays.items():
            native = array.dtype.isbuiltin == 1
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                write_array(file, array if native else array.view(f"V{array.itemsize}"), allow_pickle=False)
