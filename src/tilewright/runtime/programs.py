"""Compiled programs kept in the user's cache, so that a second process neither reads, rewrites, calibrates nor packs
(docs/artefacts.md).

A kept program is an artefact (`artefact/`) under the digest of all that decided it (`request`): the bytes of the model, how
it is read, quantised and rounded, the machine, the libraries, all code of the package. It is taken only where compiling would
choose the same kernels: the data files beside the model are the same, nothing was learnt about its problems since
(`standing`), the search had as much time, and no choice was made in noise that could be made in quiet now. Anything else is a
miss, and so is a file that is damaged, or that no key of this user signed.

Large constants of the model are not in the file: whoever asks for them (`verify`) has the front end read the model again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Generic

import msgspec
import torch

from tilewright.digests import LIMIT, Sighting, limit_bytes, sighted
from tilewright.errors import LOGGER, InputError, TilewrightError
from tilewright.files import SAVED, alone, foreign
from tilewright.frontends import LoadOptions, files_beside, load
from tilewright.hardware.target import Target
from tilewright.ir.artefact import Container
from tilewright.ir.graph import Graph
from tilewright.ir.literal import Literal, bits_of
from tilewright.ir.ops import Const
from tilewright.ir.text import print_with_literals
from tilewright.runtime.artefact.format import Kept
from tilewright.runtime.artefact.read import kept_in, restored
from tilewright.runtime.artefact.write import keep
from tilewright.runtime.executable import E, Executable
from tilewright.runtime.prepare import weights_bytes
from tilewright.runtime.program_folder import folder, kept_programs
from tilewright.schedule.cache import user_cache
from tilewright.schedule.key import PACKAGE, circumstances, digest_of, version
from tilewright.schedule.measure import last_cache_bytes
from tilewright.schedule.tuning_database import TuningDatabase

VERSION = 1  # of what a request says
READ = (".onnx", ".hlo", ".mlir", ".stablehlo")  # files whose front ends note what else they read (`files_beside`)
NOT_READ = ("example_inputs", "untrusted", "dims", "scope")  # of `LoadOptions`: with the first three nothing is kept
READERS = ("jax", "jaxlib", "ml_dtypes", "numpy", "onnx", "protobuf")  # libraries by which front ends read
LEAST_BYTES, LEAST_NODES = 16 << 20, 200  # a smaller program, in weights and in operations, compiles as fast as it is read back
KEPT_BPS = 0.8e9  # bytes a second that are digested and written
WAIT_S = 10.0  # for another process that writes
DRAFTS_S = 3600.0  # after which what a process left half-written is removed
FREE = 2.0  # as much room as a program needs has to be left on the disk


def constant_bytes(graph: Graph) -> int:
    """The bytes of a graph's constants."""
    return sum(n.tensor.size_bytes for n in graph.nodes() if isinstance(n.op, Const))


def content(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int], str]]:
    """Tensors as a request says them: type, shape, and digest of the bits."""
    return {
        name: (str(t.dtype), list(t.shape), hashlib.sha256(bits_of(t.detach().cpu()).numpy().data).hexdigest())
        for name, t in tensors.items()
    }


@dataclass(frozen=True)
class Found:
    """A model's file."""

    file: Sighting

    def said(self) -> object:
        """Text for a request: a link's own name is the graph's, and where it leads tells which data lie beside it."""
        path = self.file.path
        return str(path.absolute()), str(path.resolve()), self.file.digest()

    def load(self, options: LoadOptions) -> Graph:
        """Its graph.

        Raises:
            InputError: it is another one now.
        """
        if not self.file.unchanged():
            what = "the model was changed since it was compiled"
            raise InputError(what, where=str(self.file.path), hint="compile it again")
        return load(self.file.path, options)

    def unchanged(self) -> bool:
        """Tell whether it is still what was found."""
        return self.file.unchanged()


@dataclass(frozen=True)
class Text:
    """A program that was given as text."""

    text: str

    def said(self) -> object:
        """Text for a request."""
        return hashlib.sha256(self.text.encode(errors="surrogatepass")).hexdigest()

    def load(self, options: LoadOptions) -> Graph:
        """Its graph."""
        return load(self.text, options)

    def unchanged(self) -> bool:
        """Tell whether it is still what was given."""
        return True


@dataclass
class Place(Generic[E]):
    """The place of one compile's result among the kept programs.

    Attributes:
        program: the model's file, or its text.
        options: how it is read.
        target: where the program runs.
        excess_precision: as `compile` has it.
        made: the kind of executable that is wanted.
        how: what else decides the result, as JSON holds it.
    """

    program: Found | Text
    options: LoadOptions
    target: Target
    excess_precision: bool
    made: type[E]
    how: Mapping[str, object]
    _beside: dict[Path, tuple[int, ...]] = field(default_factory=dict[Path, "tuple[int, ...]"])
    _constants: Mapping[str, Literal] | None = None

    @property
    def request(self) -> str:
        """All that decides the result but data files beside the model, as JSON."""
        read = {f.name: getattr(self.options, f.name) for f in fields(LoadOptions) if f.name not in NOT_READ}
        ours = {k: v for k, v in os.environ.items() if k.startswith("TILEWRIGHT_") and k not in ("TILEWRIGHT_CACHE", LIMIT)}
        said = {
            "version": VERSION, "program": self.program.said(), "read": read,
            "device": self.target.device, "circumstances": circumstances(self.target, excess_precision=self.excess_precision),
            "code": code(), "readers": readers(), "environment": sorted(ours.items()), "how": self.how,
        }  # fmt: skip
        return msgspec.json.encode(said, order="deterministic", enc_hook=repr).decode()

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """Note what the front end reads beside the model in the block."""
        with files_beside() as beside:
            yield
        self._beside = beside

    def find(self, budget_s: float) -> tuple[E, Graph] | None:
        """The program and its graph as the front end gave it, if compiling for `budget_s` seconds would give that program."""
        if limit_bytes() <= 0 or user_cache() is None:
            return None
        request = self.request
        try:
            path = self._path(request)
            if foreign(path) is not None:
                path.unlink()
            if not path.exists():
                return None
        except OSError:
            return None
        try:
            container = Container(path, outside=self.constant)
            kept = kept_in(container)
            if kept.request != request or kept.budget_s < budget_s or not _as_read(kept.files):
                return None
            database = self._database(kept.cold)
            if database.standing(kept.problems) != kept.standing:
                return None
            program, read = restored(container, self.target, self.made)
        except (TilewrightError, OSError) as error:
            LOGGER.warning("%s is not used, and the model compiled: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        if budget_s > 0 and any(s.decision and s.decision.provisional for s in program.steps) and database.quiet():
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return program, read

    def keep(self, program: Executable, read: Graph, budget_s: float) -> None:
        """Keep a program that was compiled in `budget_s` seconds from the graph that the front end gave, if another process
        could take it; what the disk does raises nothing."""
        most = limit_bytes()
        steps = program.steps
        size = weights_bytes([s.part for s in steps])
        small = size < LEAST_BYTES and len(program.graph.nodes()) < LEAST_NODES
        if most <= 0 or size > most or small or not program.finished or program.state or any(s.within for s in steps):
            return
        decisions = [s.decision for s in steps if s.decision is not None]
        cold = size > last_cache_bytes(self.target)
        database = self._database(cold)
        if not all(map(database.holds, decisions)):
            return
        files = None if sum(stamp[2] for stamp in self._beside.values()) > most else self._files()
        if files is None:
            return
        request, problems = self.request, tuple(sorted({digest_of(d.problem) for d in decisions}))
        kept = Kept(request, "", files, budget_s, cold, problems, database.standing(problems))
        try:
            path = self._path(request)
            with alone(path.parent / "lock", WAIT_S) as held:
                if held and not self._there(path, kept):
                    if (free := shutil.disk_usage(path.parent).free) <= FREE * size:
                        what = f"its disk has {free / 2**20:,.1f} MiB free, and {FREE * size / 2**20:,.1f} are wanted"
                        raise InputError(what, where=str(path.parent), hint="TILEWRIGHT_CACHE names another folder")
                    keep(program, read, kept, path)
                    _forget_oldest(path, most)
        except (TilewrightError, OSError) as error:
            LOGGER.info("a program is not kept: %s", error)

    def keeping_s(self, graph: Graph) -> float:
        """Seconds that keeping a program will take, packed weights and all."""
        size = constant_bytes(graph)
        return size / KEPT_BPS if LEAST_BYTES <= size <= limit_bytes() else 0.0

    def _path(self, request: str) -> Path:
        return folder() / f"{hashlib.sha256(request.encode()).hexdigest()}{SAVED}"

    def _database(self, cold: bool) -> TuningDatabase:
        database = TuningDatabase(self.target, user_cache(), excess_precision=self.excess_precision)
        database.of_program(cold=cold)
        return database

    def _files(self) -> tuple[tuple[str, str, str], ...] | None:
        """The data files beside the model with their digests; None if any file is not what was read any more."""
        found: list[tuple[str, str, str]] = []
        for path, sighting in zip(self._beside, sighted(self._beside), strict=True):
            if sighting is None or sighting.stamp != self._beside[path] or not sighting.unchanged():
                return None
            found.append((str(path), os.path.realpath(path), sighting.digest()))
        return tuple(found) if self.program.unchanged() else None

    def _there(self, path: Path, kept: Kept) -> bool:
        """Tell whether another process kept the same, or what had more time, meanwhile."""
        try:
            found = kept_in(Container(path, outside=self.constant))
        except (TilewrightError, OSError):
            return False
        same = (found.request, found.files, found.standing) == (kept.request, kept.files, kept.standing)
        return same and found.budget_s >= kept.budget_s

    def constant(self, name: str) -> torch.Tensor:
        """A large constant of the model, which its front end reads when the first one is asked for.

        Raises:
            InputError: the model is another one now.
        """
        if self._constants is None:
            _, self._constants = print_with_literals(self.program.load(self.options))
        return self._constants[name].tensor()


def place_of(
    program: Path | str,
    options: LoadOptions,
    target: Target,
    made: type[E],
    *,
    excess_precision: bool,
    how: Mapping[str, object],
) -> Place[E] | None:
    """The place of what compiling a file, or a text of several lines, gives; None if that is not kept."""
    if options.untrusted or options.example_inputs is not None or options.dims or limit_bytes() <= 0:
        return None
    if isinstance(program, str) and "\n" in program:
        return Place(Text(program), options, target, excess_precision, made, how)
    path = Path(program)
    with contextlib.suppress(OSError):
        if path.suffix.lower() in READ and path.stat().st_size <= limit_bytes():
            (sighting,) = sighted([path])
            return None if sighting is None else Place(Found(sighting), options, target, excess_precision, made, how)
    return None


def _as_read(files: Sequence[tuple[str, str, str]]) -> bool:
    """Tell whether data files lead where they led, and hold what they held."""
    found = sighted([Path(name) for name, _, _ in files])
    return all(
        s is not None and os.path.realpath(name) == end and s.digest() == digest
        for s, (name, end, digest) in zip(found, files, strict=True)
    )


def _forget_oldest(last: Path, most: int) -> None:
    """Have kept programs take so many bytes at most, the last one aside; remove what was left half-written."""
    known = kept_programs()
    left = sum(size for _, size in known)
    for path, size in known:
        if left > most and path != last:
            path.unlink(missing_ok=True)
            left -= size
    for draft in last.parent.glob(".*.tmp"):
        if time.time() - draft.stat().st_mtime > DRAFTS_S:
            draft.unlink(missing_ok=True)


@cache
def code() -> str:
    """The digest of all files of the package, data included."""
    digest = hashlib.sha256()
    for file in sorted(f for f in PACKAGE.rglob("*.*") if f.suffix != ".pyc" and f.is_file()):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(PACKAGE)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def readers() -> list[tuple[str, str]]:
    """The versions of the libraries by which front ends read."""
    return [(name, version(name)) for name in READERS]
