"""Writing of a compiled program to a file that runs it again."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
import torch

from tilewright.candidates.llvm.runtime import calls, engine, image
from tilewright.dtype import U8
from tilewright.errors import UnsupportedError
from tilewright.files import whole_file
from tilewright.ir.artefact import CONSTANT, FORMAT, MANIFEST, VERSION, Array, Kind
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import SMALL_BYTES, Literal, bits_of
from tilewright.ir.safetensors import has_name, write_tensors_to
from tilewright.ir.text import print_with_literals
from tilewright.ir.types import TensorType
from tilewright.runtime.artefact.format import (
    Chosen,
    Kept,
    OfRank,
    SavedAccount,
    SavedLayer,
    SavedLayers,
    SavedProgram,
    SavedStep,
    Whole,
    machine_of,
    made_by,
    numbered,
)
from tilewright.runtime.artefact.sign import signature_of, user_key
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step
from tilewright.schedule.choice import choice_of
from tilewright.schedule.recipe import Built, Recipe, Split, recipe_of
from tilewright.threads import limit


class _Writer:
    """Arrays and code of a program by name (`recipe.Parts`). What has the same bytes is written once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.objects: dict[str, str] = {}
        self.literals: dict[str, Literal] = {}
        self.outside: dict[str, Kind] = {}
        self._entries: dict[str, str] = {}

    def array(self, name: str, t: torch.Tensor, type_: TensorType) -> str:
        """Leave a tensor under a name, which is given back."""
        held = t.detach().cpu().contiguous()
        digest = hashlib.sha256(bits_of(held).numpy().data).hexdigest()
        if digest not in self._entries:
            self._entries[digest] = name
            self.tensors[name] = held if has_name(held.dtype) else bits_of(held)
        self.arrays[name] = Array(self._entries[digest], Kind.of(type_), digest)
        return name

    def bytes(self, memory: torch.Tensor) -> str:
        return self.array(f"packed/{len(self.arrays)}", memory, TensorType(U8, (memory.numel(),)))

    def code(self, content: bytes, known: Mapping[str, int] | None = None) -> str:
        """Leave object code; see `image.mapped`.

        Raises:
            UnsupportedError: it could not be mapped again.
        """
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self.objects:
            image.mapped({digest: content}, known)
            self.objects[digest] = self.bytes(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return digest

    def text(self, roots: Sequence[Node]) -> str:
        return self.graph(Graph("", (), tuple(roots), ("",) * len(roots)))

    def graph(self, graph: Graph) -> str:
        """A graph's text; its large constants are left under their names."""
        text = print_with_literals(graph, self.literals)[0]
        for name, literal in self.literals.items():
            if CONSTANT + name not in self.arrays and name not in self.outside:
                self.array(CONSTANT + name, literal.tensor(), literal.type)
        return text

    def read(self, graph: Graph) -> str:
        """The text of a graph as the front end gave it: what is large is found there again, and not written."""
        text, literals = print_with_literals(graph)
        self.literals |= literals
        self.outside |= {n: Kind.of(v.type) for n, v in literals.items() if v.type.size_bytes > SMALL_BYTES}
        return text

    def program(self, program: Executable) -> SavedProgram:
        """A program's part of the manifest."""
        number, done = {n: i for i, n in enumerate(numbered(program.graph))}, program.steps  # a search may replace them
        texts = self.graph(program.source), self.graph(program.graph)
        steps = [self._step(step, number) for step in done]
        needed = {*program.graph.outputs}
        for step, saved in zip(done, steps, strict=True):
            kept = saved.chosen is not None and not _built(saved.chosen.recipe)
            needed.update(n for n in step.part.inputs if not (kept and n in step.releasable))
        held = program.graph.inputs[len(program.graph.inputs) - len(program.graph.state) :]
        now = [program.value(n).clone() for n in held]  # which calls meanwhile do not change
        state = [self.array(f"state/{len(self.arrays)}", t, n.tensor) for t, n in zip(now, held, strict=True)]
        values = [
            (number[n], self.array(f"value/{len(self.arrays)}", program.value(n), n.tensor))
            for n in number
            if n in needed and n.constant
        ]
        return SavedProgram(
            source=texts[0],
            graph=texts[1],
            state=tuple(state),
            places=program.graph.places,
            within=tuple(self.program(p) for step in done for p in step.within),
            values=tuple(values),
            steps=tuple(steps),
        )

    def account(self, program: Executable) -> SavedAccount:
        """The account of the rules."""
        number, told = {n: i for i, n in enumerate(numbered(program.graph))}, program.account
        left, rules = (tuple((number[n], tuple(s)) for n, s in said.items()) for said in (told.left, told.rules))
        return SavedAccount(left, rules)

    def layers(self, program: Executable) -> SavedLayers | None:
        """The products as quantising left them."""
        if not program.layers:
            return None
        saved = tuple(
            SavedLayer(
                x.where, repr(x.error), repr(x.largest), x.skip_reason, None if x.scale is None else repr(x.scale),
                (repr(x.weight_scales[0]), repr(x.weight_scales[1])),
            )
            for x in program.layers
        )  # fmt: skip
        return SavedLayers(saved, self.text([x.before for x in program.layers]), self.text([x.after for x in program.layers]))

    def _step(self, step: Step, number: Mapping[Node, int]) -> SavedStep:
        part, d = step.part, step.decision
        nodes, inputs, outputs = (tuple(number[n] for n in each) for each in (part.nodes, part.inputs, part.outputs))
        if d is None or step.runner is None:
            return SavedStep(part.kind, nodes, inputs, outputs, within=len(step.within))
        k = d.kernel
        try:
            recipe = recipe_of(step.runner, self)
        except UnsupportedError:  # code of a processor for which `image` knows no objects
            recipe = None
        chosen = choice_of(
            d,
            Chosen,
            measured=d.measured,
            verified=d.verified,
            workspace_bytes=k.workspace_bytes,
            packed_bytes=k.packed_bytes,
            releasable=tuple(sorted(k.releasable)),
            roundoff=k.roundoff,
            parts=k.parts,
            recipe=recipe or Built.of(k),
        )
        return SavedStep(part.kind, nodes, inputs, outputs, chosen)


def _built(recipe: Recipe) -> bool:
    """Tell whether a candidate builds any of it again, from the weights."""
    return isinstance(recipe, Built) or (isinstance(recipe, Split) and any(map(_built, recipe.pieces)))


def save(program: Executable, path: Path, of_rank: OfRank | None = None) -> None:
    """See `Executable.save`; `of_rank` is whose program it is, on a mesh."""
    with whole_file(path) as draft, draft.open("wb") as file:
        _write(program, file, of_rank=of_rank)


def artefact_of(program: Executable) -> bytes:
    """The bytes of the file that `save` writes."""
    file = io.BytesIO()
    _write(program, file)
    return file.getvalue()


def keep(program: Executable, read: Graph, kept: Kept, path: Path) -> None:
    """Write a program as one that is kept beside the model that it was compiled from; nothing where none can be signed.

    Args:
        read: the graph as the front end gave it. Its large constants stay where they are, in the model.
        kept: what it depends on.

    Raises:
        InputError: the file cannot be written.
        UnsupportedError: the program holds what no file can.
    """
    if user_key() is None:
        return
    writer = _Writer()
    text = writer.read(read)
    with whole_file(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _write(program, file, writer, msgspec.structs.replace(kept, read=text))


def _write(
    program: Executable,
    file: IO[bytes],
    writer: _Writer | None = None,
    kept: Kept | None = None,
    of_rank: OfRank | None = None,
) -> None:
    writer = writer or _Writer()
    saved = writer.program(program)
    account, quantized = writer.account(program), writer.layers(program)
    if kept is not None and kept.read == saved.source:
        kept = msgspec.structs.replace(kept, read="")
    generated = bool(writer.objects)
    caller = writer.code(calls.caller().object) if generated else ""
    threads = writer.code(engine.threads().object, engine.for_threads()) if generated else ""
    whole = Whole(
        version=VERSION,
        arrays=writer.arrays,
        program=saved,
        made_by=made_by(),
        machine=machine_of(program.target),
        code=writer.objects,
        caller=caller,
        threads=threads,
        outside=writer.outside,
        labels={name: v.label for name, v in writer.literals.items() if v.label != name},
        account=account,
        quantized=quantized,
        kept=kept,
        thread_count=program.threads or limit(),
        of_rank=of_rank,
    )
    manifest = msgspec.json.encode(whole)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        MANIFEST: hashlib.sha256(manifest).hexdigest(),
        "signature": signature_of(manifest, user_key()),
    }
    text = torch.frombuffer(bytearray(manifest), dtype=torch.uint8)
    write_tensors_to(file, {MANIFEST: text, **writer.tensors}, metadata)
