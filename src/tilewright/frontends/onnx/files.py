"""Opening an ONNX model and the data files beside it, trusting neither.

`onnx.checker` accepts offsets past the end of a file, negative lengths and sizes that overflow, so everything here is
checked again before memory is touched. Files are mapped, never read: a weight costs nothing until something uses it.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from tilewright.errors import InputError
from tilewright.frontends import note_file
from tilewright.frontends.onnx.wire import strip_weights

if TYPE_CHECKING:
    import onnx

DEEPEST_MESSAGE = 100  # protobuf's own limit when it parses
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
SHOWN = 60  # characters of a name from a file that a message repeats


def quoted(name: str | bytes) -> str:
    """A name from a file, fit for one line of a message."""
    text = repr(name)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…'"


def malformed(what: str, where: str, hint: str = "export the model again") -> InputError:
    """An error to raise: the model does not say what ONNX has it say."""
    return InputError(what, where=where, hint=hint)


@dataclass(frozen=True)
class Span:
    """`size` bytes at `offset` of a mapped file."""

    data: mmap.mmap
    offset: int
    size: int


@dataclass(frozen=True)
class ModelFile:
    """A parsed model, the mapped bytes of each of its graph's initializers that were cut out, and its data files."""

    model: onnx.ModelProto
    embedded: tuple[Span | None, ...]
    files: DataFiles


def open_model(path: Path, *, follow_links: bool = False) -> ModelFile:
    """The model at `path`, its weights left in the file; `follow_links` as `LoadOptions` has it.

    Raises:
        InputError: missing, not a regular file, empty, or not an ONNX model.
    """
    data = _mapped(path.name, _opened(path), str(path))
    if data is None:
        raise InputError(f"the file is empty: {path}", hint="export the model again")
    if data[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise InputError(f"a git-lfs pointer, not the model it stands for: {path}", hint="git lfs pull")
    stripped = strip_weights(memoryview(data))
    model = parsed(stripped.model, str(path))
    embedded = tuple(Span(data, s[0], s[1] - s[0]) if s else None for s in stripped.spans)
    return ModelFile(model, embedded, DataFiles(path.parent, follow_links=follow_links))


def parsed(data: bytes | memoryview, where: str) -> onnx.ModelProto:
    """A ModelProto from its serialised form.

    Raises:
        InputError: it is not one.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.ModelProto.FromString(data)  # pyright: ignore[reportArgumentType] # takes any buffer
    except (DecodeError, RecursionError) as error:
        detail = (str(error).splitlines() or ["malformed"])[0][:SHOWN]
        raise malformed(f"not an ONNX model, or a damaged one: {detail}", where) from error
    return with_text(model, where)


def with_text(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """The model itself, if it has a graph and its names are text (protobuf gives bytes for those that are not).

    Raises:
        InputError: it has not, or one is not.
    """
    if not model.HasField("graph"):
        raise InputError("not an ONNX model: it holds no graph", where=where, hint="a file written by an ONNX exporter")
    stack: list[tuple[Any, int]] = [(model, 0)]
    while stack:
        message, depth = stack.pop()
        if depth > DEEPEST_MESSAGE:
            raise InputError("graphs nested too deep", where=where, hint="flatten the model")
        if message.DESCRIPTOR.name == "TensorProto":  # listing its fields would copy its data
            strings = [message.name, *(t for e in message.external_data for t in (e.key, e.value))]
        else:
            strings = []
            for field, value in message.ListFields():
                several = (value,) if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value
                if field.type == field.TYPE_STRING:
                    strings.extend(several)
                elif field.type == field.TYPE_MESSAGE:
                    stack.extend((m, depth + 1) for m in several)
        wrong = next((t for t in strings if not isinstance(t, str)), None)
        if wrong is not None:
            raise malformed(f"a name that is not text: {quoted(wrong)}", where)
    return model


def has_external_data(model: onnx.ModelProto) -> bool:
    """Tell whether a tensor anywhere in a model, graphs within nodes and local functions included, lies in a file of its
    own."""
    stack: list[Any] = [model]
    while stack:
        message = stack.pop()
        if message.DESCRIPTOR.name == "TensorProto":
            if message.external_data or message.data_location == message.EXTERNAL:
                return True
            continue
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                stack.extend((value,) if hasattr(value, "ListFields") else value)
    return False


class DataFiles:
    """The files in a model's folder that its tensors refer to."""

    def __init__(self, folder: Path | None, *, follow_links: bool = False) -> None:
        self._folder = folder
        self._follow_links = follow_links
        self._maps: dict[str, mmap.mmap | None] = {}

    def span(self, tensor: onnx.TensorProto, size: int, where: str) -> Span | None:
        """The place of the `size` bytes of `tensor`; None if `size` is 0.

        Raises:
            InputError: no such file, outside the model's folder, or the bytes do not lie inside it.
        """
        entries = {e.key: e.value for e in tensor.external_data}
        location = entries.get("location", "")
        offset = _number(entries.get("offset", "0"), "offset", where)
        stated = entries.get("length")
        if stated is not None and _number(stated, "length", where) != size:
            raise malformed(f"external data of {stated} bytes for a tensor of {size}", where)
        data = self._map(location, where)
        held = len(data) if data is not None else 0
        if offset + size > held:
            if data is not None and data[: len(_LFS_POINTER)] == _LFS_POINTER:
                raise InputError(f"{quoted(location)} is a git-lfs pointer, not the data", where=where, hint="git lfs pull")
            raise InputError(
                f"bytes {offset} to {offset + size} wanted from {quoted(location)}, which has {held}",
                where=where,
                hint="the data file is truncated or not this model's: copy it again",
            )
        return Span(data, offset, size) if data is not None and size else None

    def _map(self, location: str, where: str) -> mmap.mmap | None:
        if location not in self._maps:
            descriptor = self._inside(location, where)
            if self._folder is not None:
                note_file(self._folder / location, descriptor)
            self._maps[location] = _mapped(location, descriptor, where)
        return self._maps[location]

    def _inside(self, location: str, where: str) -> int:
        """A descriptor of a file under the folder.

        A symbolic link is followed if it ends in the model's own tree, or as the Hugging Face cache has them; the end is then
        opened without following any.
        """
        if self._folder is None:
            raise InputError(
                f"the model's weights are in {quoted(location)} but its folder is not known",
                where=where,
                hint="pass the path of the .onnx file instead of a ModelProto",
            )
        parts = PurePosixPath(location).parts
        windows = PureWindowsPath(location)
        outside = location.startswith(("/", "\\")) or windows.drive or ".." in parts or ".." in windows.parts
        if not parts or outside or "\0" in location:
            raise InputError(
                f"external data at {quoted(location)}, outside the model's folder",
                where=where,
                hint="only files beside the model are read: export it again, or move the data there",
            )
        if self._follow_links:
            return _opened(self._folder / location)
        root, parts = _without_links(self._folder, parts)
        try:
            folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise _cannot_open(error, location, where) from error
        try:
            for part in parts[:-1]:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError as error:
            raise _cannot_open(error, location, where) from error
        finally:
            os.close(folder)


def _without_links(folder: Path, parts: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """Place where a file of the folder really is: a folder that may be read and a path in it, where links lead to one.

    These are the folder itself, and of a Hugging Face cache (…/snapshots/REVISION, its files links into …/blobs) the blobs.
    """
    try:
        end, root = (folder / Path(*parts)).resolve(), folder.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return folder, parts
    blobs = [p.parent / "blobs" for p in (root, *root.parents) if p.name == "snapshots"]
    for allowed in (root, *(b.resolve() for b in blobs if not b.is_symlink())):
        if end.is_relative_to(allowed) and end != allowed:
            return allowed, end.relative_to(allowed).parts
    return folder, parts


def _number(text: str, what: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise InputError(f"external data with {what} {quoted(text)}", where=where, hint=f"the {what} is a number of bytes")
    return int(text)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise _cannot_open(error, str(path), "") from error


def _cannot_open(error: OSError, name: str, where: str) -> InputError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        what = f"{quoted(name)} is or passes through a symbolic link that leaves the model's folder, or is not a file"
        hint = "put the file itself beside the model, or follow_links=True (--follow-links)"
        return InputError(what, where=where or None, hint=hint)
    what = f"cannot open {quoted(name)}: {error.strerror or error}"
    return InputError(what, where=where or None, hint="is it there, and may you read it?")


def _mapped(name: str, descriptor: int, where: str) -> mmap.mmap | None:
    """The file mapped copy-on-write (torch wants writable memory; nothing here writes); None if it is empty."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{quoted(name)} is not a regular file", where=where, hint="a file on disk")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) if status.st_size else None
    finally:
        os.close(descriptor)
