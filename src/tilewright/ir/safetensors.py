"""Files in the safetensors format, written, and read in place: a length, a table in JSON, and the tensors' bytes, one after the
other without overlap or hole (no code, so nothing in one can run). Source: the format's description in the safetensors project,
version 0.8."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated

import msgspec
import numpy as np
import torch

from tilewright.errors import InputError, UnsupportedError
from tilewright.files import NotJSONError, decoded
from tilewright.ir.literal import bits_of

MOST_HEADER_BYTES = 100_000_000
ALIGNMENT = 64  # bytes, of tensors in a file: a cache line
_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
# How files of other formats begin, and what to do with one.
_SAVED = "safetensors.torch.save_file(torch.load(path, weights_only=True), new_path)"
_OTHERS = {
    b"PK\x03\x04": ("a zip archive", f"if torch.save wrote it: {_SAVED}"),
    b"\x80\x02": ("a pickle", f"if torch.save wrote it: {_SAVED}"),
    b"GGUF": ("a GGUF file", "a name that ends in .gguf"),
}
_Extent = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct):
    """One tensor: its type, its shape, and where its bytes begin and end after the header."""

    dtype: str
    shape: list[_Extent]
    data_offsets: tuple[_Extent, _Extent]


def has_name(dtype: torch.dtype) -> bool:
    """Tell whether the format has a type."""
    return dtype in _TYPES.values()


def _named_twice(header: bytes) -> str | None:
    """A name that stands twice in an object of a header that was read as JSON."""
    found: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> None:
        names = [name for name, _ in items]
        if len(set(names)) < len(names):
            found.append(next(n for i, n in enumerate(names) if n in names[:i]))

    json.loads(header, object_pairs_hook=pairs)
    return found[0] if found else None


def write_tensors_to(file: IO[bytes], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write dense CPU tensors to an open file. Each begins at a multiple of `ALIGNMENT` bytes of the file: where one does not
    end there, a tensor called "padding.N" follows it."""
    names = {of: name for name, of in _TYPES.items()}
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    contents: list[torch.Tensor | bytes] = []
    for name, t in tensors.items():
        table[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        contents.append(t)
        at += t.nbytes
        if at % ALIGNMENT:
            rest = -at % ALIGNMENT
            padding = f"padding.{len(contents)}"
            table[padding] = {"dtype": "U8", "shape": [rest], "data_offsets": [at, at + rest]}
            contents.append(bytes(rest))
            at += rest
    header = msgspec.json.encode(table)
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    file.write(len(header).to_bytes(8, "little") + header)
    for content in contents:
        file.write(content if isinstance(content, bytes) else bits_of(content).numpy().data)


class TensorFile:
    """The tensors of one file by name; each is read when asked for, and its memory is the file's until somebody writes to it.

    Args:
        path: a .safetensors file.
        content: its bytes, where they are in memory already and `path` is what to call them.

    Raises:
        InputError: there is no such file, or it is none of this format.
    """

    metadata: dict[str, str]

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        self._memory = None if content is None else np.frombuffer(content, np.uint8)
        try:
            held = path.stat().st_size if content is None else len(content)
            with path.open("rb") if content is None else io.BytesIO(content) as file:
                first = file.read(8)
                length = int.from_bytes(first, "little")
                for start, (kind, hint) in _OTHERS.items():
                    if first.startswith(start):
                        raise InputError(f"{kind} is no safetensors file", where=str(path), hint=hint)
                if held < 8 or not 2 <= length <= min(MOST_HEADER_BYTES, held - 8):
                    raise self._broken(f"a header of {length} bytes in a file of {held}")
                header = file.read(length)
        except OSError as error:
            hint = "a .safetensors file on this machine, or a folder of them"
            raise InputError(f"cannot read {path}: {error.strerror}", hint=hint) from error
        try:
            table = decoded(header, dict[str, msgspec.Raw])
            self.metadata = decoded(bytes(table.pop("__metadata__", msgspec.Raw(b"{}"))), dict[str, str])
            self._entries = {name: decoded(bytes(raw), _Entry) for name, raw in table.items()}
        except NotJSONError as error:
            raise self._broken(f"its header is no table of tensors: {error}") from error
        twice = _named_twice(header)
        if twice is not None:
            raise self._broken(f"{twice!r} stands in its header twice")
        self._start, self._held = 8 + length, held - 8 - length
        for name, entry in self._entries.items():
            begin, end = entry.data_offsets
            if not begin <= end <= self._held:
                raise self._broken(f"{name!r} lies at bytes {begin} to {end} of {self._held}")
            of = _TYPES.get(entry.dtype)
            if of is not None and math.prod(entry.shape) * of.itemsize != end - begin:
                raise self._broken(f"{name!r} is {entry.dtype}{entry.shape} in {end - begin} bytes")
        at = 0
        for name, entry in sorted(self._entries.items(), key=lambda e: e[1].data_offsets):
            begin, end = entry.data_offsets
            if begin != at:
                raise self._broken(
                    f"{name!r} begins at byte {begin}, where {'others end' if begin > at else 'others lie'} at {at}"
                )
            at = end
        if at != self._held:
            raise self._broken(f"{self._held - at} bytes behind its last tensor")

    def _broken(self, why: str) -> InputError:
        return InputError(f"no safetensors file: {why}", where=str(self.path), hint="fetch it again")

    @property
    def names(self) -> list[str]:
        """The names of the file's tensors, in the order of the header."""
        return list(self._entries)

    def bytes_of(self, name: str) -> int:
        """The bytes that a tensor takes, without reading it."""
        begin, end = self._entries[name].data_offsets
        return end - begin

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self._entries[name].shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """A tensor's type, without reading it; None where torch has none."""
        return _TYPES.get(self._entries[name].dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            UnsupportedError: torch has no such type.
        """
        entry = self._entries[name]
        if entry.dtype not in _TYPES:
            raise UnsupportedError(f"{name!r} holds {entry.dtype}", where=str(self.path), hint=", ".join(_TYPES))
        begin, end = entry.data_offsets
        if begin == end:
            return torch.empty(entry.shape, dtype=_TYPES[entry.dtype])
        at = self._start + begin
        memory = (
            np.memmap(self.path, np.uint8, "c", at, (end - begin,))
            if self._memory is None
            else self._memory[at : at + end - begin].copy()
        )
        flat = torch.from_numpy(memory)
        of = _TYPES[entry.dtype]
        aligned = flat if memory.ctypes.data % of.itemsize == 0 else flat.clone()
        return aligned.view(of).reshape(entry.shape)
