"""Saved programs (`.twp`): the container, and the graphs in it. `runtime/artefact/` has the rest: weights as kernels read
them, decisions, machine code.

A `.twp` is a safetensors file. Its tensor `manifest` is JSON that names every array with the digest of its bytes; the file's
metadata hold the digest of the manifest, and a signature. An array is checked before it is used: changed bytes are an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tilewright.dtype import BY_NAME, OPAQUE
from tilewright.errors import InputError
from tilewright.files import NotJSONError, decoded
from tilewright.ir.graph import Graph
from tilewright.ir.literal import Literal, bits_of
from tilewright.ir.safetensors import TensorFile
from tilewright.ir.text import parse
from tilewright.ir.types import TensorType
from tilewright.ir.verify import verify
from tilewright.processors import usable

if TYPE_CHECKING:
    import torch

FORMAT, VERSION = "tilewright program", 1
MANIFEST, CONSTANT = "manifest", "constant/"  # a tensor's name; what names of constants of the graphs begin with
AGAIN = "save the program again"
_WRITE = "`tilewright compile FILE -o F.twp` writes one"
ALIGNMENT = 64
_LARGE_BYTES = 1 << 20  # that another thread may look at

T = TypeVar("T")


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's element type, as HLO writes it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, t: TensorType) -> Kind:
        return cls(t.dtype.name, t.shape)

    @property
    def type(self) -> TensorType:
        """The type itself.

        Raises:
            InputError: there is no such element type.
        """
        if BY_NAME.get(self.dtype, OPAQUE) is OPAQUE or any(d < 0 for d in self.shape):
            raise InputError(f"there is no type {self.dtype}{list(self.shape)}", hint=AGAIN)
        return TensorType(BY_NAME[self.dtype], self.shape)


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array: the tensor of the file that holds it, maybe for others too, its type, and the SHA-256 digest of its bytes."""

    entry: str
    kind: Kind
    sha256: str


class Graphs(msgspec.Struct, frozen=True):
    """A program's graphs as text.

    Attributes:
        source: the graph as read.
        graph: the graph as compiled.
        state: arrays that both keep from call to call.
        places: `Graph.places`.
        within: those of loops and conditionals in it, compiled apart.
    """

    source: str
    graph: str
    state: tuple[str, ...]
    places: tuple[str, ...]
    within: tuple[Graphs, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a manifest that say what is computed; the rest is how.

    Attributes:
        outside: constants that are not in the file, but in the model that it was compiled from: of a kept program alone.
        labels: what the source calls a constant, "" for one that it does not name, where that is not the name in the texts.
    """

    version: int
    arrays: dict[str, Array]
    program: Graphs
    outside: dict[str, Kind] = {}
    labels: dict[str, str] = {}


class Container:
    """The arrays of a saved program, mapped and checked.

    Args:
        path: a .twp file.
        content: its bytes, where they are in memory already and `path` is what to call them.
        outside: gives by name the constants of the model that it was compiled from, where these are not in the file.

    Raises:
        InputError: there is no such file, it is no saved program, or it is damaged.
    """

    def __init__(self, path: Path, content: bytes | None = None, outside: Callable[[str], torch.Tensor] | None = None) -> None:
        self.path = path
        try:
            self._file = TensorFile(path, content)
        except InputError as error:
            if error.where is None:  # it cannot be read
                raise InputError(error.what, hint=f"a .twp file on this machine; {_WRITE}") from error
            raise InputError(f"no saved program: {error.what}", where=error.where, hint=_WRITE) from error
        metadata = self._file.metadata
        if metadata.get("format") != FORMAT or MANIFEST not in self._file.names:
            raise InputError("no saved program", where=str(path), hint=_WRITE)
        if metadata.get("version") != str(VERSION):
            said = metadata.get("version")
            raise InputError(f"version {said} of the format, {VERSION} wanted", where=str(path), hint=AGAIN)
        self.manifest: bytes = self._bytes(MANIFEST)
        self.signature: str = metadata.get("signature", "")
        if hashlib.sha256(self.manifest).hexdigest() != metadata.get(MANIFEST):
            raise self.broken("its manifest was changed")
        parts = self.decoded(Manifest)
        self.arrays: dict[str, Array] = parts.arrays
        if parts.outside and outside is None:
            raise InputError("a kept program, which lacks its model's weights", where=str(path), hint="the model itself")
        for name, array in self.arrays.items():
            t = array.kind.type
            if (
                array.entry not in self._file.names
                or self._file.bytes_of(array.entry) != t.elements * t.dtype.to_torch().itemsize
            ):
                raise self.broken(f"{name!r} is not {t}")
        self._seen: dict[str, torch.Tensor] = {}
        self.literals: dict[str, Literal] = {
            name: Literal(a.kind.type, partial(self.tensor, CONSTANT + name), parts.labels.get(name, name))
            for name, a in ((n[len(CONSTANT) :], a) for n, a in self.arrays.items() if n.startswith(CONSTANT))
        }
        if outside is not None:
            self.literals |= {
                name: Literal(k.type, partial(outside, name), parts.labels.get(name, name)) for name, k in parts.outside.items()
            }

    def broken(self, why: str) -> InputError:
        """The error for a file that does not hold together."""
        return InputError(f"a damaged program: {why}", where=str(self.path), hint=AGAIN)

    def decoded(self, type_: type[T]) -> T:
        """The manifest.

        Raises:
            InputError: it is none of this type.
        """
        try:
            return decoded(self.manifest, type_)
        except NotJSONError as error:
            raise self.broken(f"its manifest is none: {error}") from error

    def check(self, names: Iterable[str]) -> None:
        """See that arrays are what was saved, on as many threads as there are cores.

        Raises:
            InputError: one is not.
        """
        entries = {self._array(name).entry: name for name in names}
        large = [name for entry, name in entries.items() if self._file.bytes_of(entry) >= _LARGE_BYTES]
        with ThreadPoolExecutor(usable()) as threads:
            list(threads.map(self.tensor, large))
        for name in entries.values():
            self.tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """An array, in the file's memory; what is written to it stays in this process.

        Raises:
            InputError: there is none of this name, or its bytes were changed.
        """
        array = self._array(name)
        found = self._seen.get(array.entry)
        if found is None:
            found = bits_of(self._file.tensor(array.entry))
            if hashlib.sha256(found.numpy().data).hexdigest() != array.sha256:
                raise self.broken(f"{name!r} was changed")
            if found.data_ptr() % ALIGNMENT:
                found = _aligned(found)
            self._seen[array.entry] = found
        t = array.kind.type
        return found.view(t.dtype.to_torch()).reshape(t.shape)

    def forget(self, names: Iterable[str]) -> None:
        """Let go of memory: what is asked for again is read and checked again."""
        for name in names:
            self._seen.pop(self._array(name).entry, None)

    def state(self, graphs: Graphs) -> tuple[torch.Tensor, ...]:
        """A copy of what a program keeps from call to call, as it was saved."""
        return tuple(self.tensor(name).clone() for name in graphs.state)

    def graph(self, text: str, graphs: Graphs, state: tuple[torch.Tensor, ...]) -> Graph:
        """One of a program's graphs, with its state, verified.

        Raises:
            InputError: it is none, or its state is another's.
        """
        try:
            found = parse(text, self.literals)
        except InputError as error:
            raise self.broken(str(error)) from error
        if len(state) > min(len(found.inputs), len(found.outputs)):
            raise self.broken("it keeps more from call to call than it has inputs")
        for node, kept in zip(found.inputs[len(found.inputs) - len(state) :], state, strict=True):
            if tuple(kept.shape) != node.shape or kept.dtype != node.dtype.to_torch():
                raise self.broken("what it keeps from call to call has another type")
        return verify(replace(found, state=state, places=graphs.places))

    def _array(self, name: str) -> Array:
        if name not in self.arrays:
            raise self.broken(f"{name!r} is missing")
        return self.arrays[name]

    def _bytes(self, entry: str) -> bytes:
        return bits_of(self._file.tensor(entry)).numpy().tobytes()


def _aligned(flat: torch.Tensor) -> torch.Tensor:
    """A copy of u8 [n] that begins at a cache line."""
    import torch

    room = torch.empty(flat.numel() + ALIGNMENT, dtype=torch.uint8)
    at = -room.data_ptr() % ALIGNMENT
    return room[at : at + flat.numel()].copy_(flat)
