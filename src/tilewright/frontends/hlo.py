"""The HLO front end: XLA's own text, before or after optimisation, as `--xla_dump_to` and JAX print it.

XLA's parser (in jaxlib) turns it into StableHLO, which the walk of that front end reads: nested fusions and calls are inlined,
bitcasts are given their meaning from the layouts on either side, names in the metadata become origins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.frontends.stablehlo import jaxlib
from tilewright.frontends.stablehlo.read import read_module, source_text
from tilewright.frontends.stablehlo.scaled_dot import as_custom_calls
from tilewright.frontends.stablehlo.shardings import groups_spelt_out
from tilewright.frontends.stablehlo.structure import ELIDED
from tilewright.ir.graph import Graph

_HEADER = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*HloModule\b", re.DOTALL)
_PEEK = 4096
# A computation without a module around it, which XLA's parser takes as well.
_BARE = re.compile(
    r"(?:\s|//[^\n]*\n|/\*.*?\*/)*(?:ENTRY\s+)?%?[\w.\-]+\s*(?:\([^\n]*\)\s*->[^\n]*)?\{[^\n]*(?:\n|$)", re.DOTALL
)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?[\w.\-]+\s*=\s*\(?\w+\[[^\n]*\s[\w\-]+\(", re.MULTILINE)
# `%constant.1 = f32[64,64]{1,0} constant({...})`: XLA reads the dots as made-up values.
_ELIDED = re.compile(
    r"^(?P<head>\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*[^=\n]*?)\bconstant\(\s*\{\s*\.\.\.\s*\}\s*\)", re.MULTILINE
)
_ENTRY = re.compile(r"^ENTRY\b.*?^\}", re.MULTILINE | re.DOTALL)
_PARTITIONED = re.compile(r"^ENTRY\s+%?[\w.\-]*_spmd\b", re.MULTILINE)  # as XLA's partitioner calls what it made
_UNCONVERTED = ("scan",)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_ASSIGNMENT = re.compile(r"^\s*(?P<root>ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*(?P<rest>.*)")


def accepts(program: object) -> bool:
    """Tell whether `program` is a path ending in .hlo, or text (or a .txt file) that begins with `HloModule` or a
    computation."""
    if isinstance(program, Path):
        if program.suffix.lower() != ".txt":
            return program.suffix.lower() == ".hlo"
        with program.open("rb") as file:
            return _is_hlo(file.read(_PEEK).decode(errors="replace"))
    return isinstance(program, str) and _is_hlo(program)


def _is_hlo(text: str) -> bool:
    return _HEADER.match(text[:_PEEK]) is not None or _is_bare(text[:_PEEK])


def _is_bare(text: str) -> bool:
    """Tell whether text is computations with no `HloModule` line: a name, a brace, instructions."""
    return _BARE.match(text) is not None and _INSTRUCTION.search(text) is not None


def with_header(text: str, where: str) -> str:
    """Give HLO text its `HloModule` line, which XLA's parser wants, if it has none.

    Raises:
        InputError: it is no HLO.
    """
    if _HEADER.match(text) is not None:
        return text
    if not _is_bare(text):
        what = "HLO text begins with HloModule or a computation"
        raise InputError(what, where=where, hint="StableHLO goes in a .mlir file")
    return f"HloModule main {text}"  # on the same line, so that places in messages are the text's own


def load(program: object, options: LoadOptions) -> Graph:
    """The graph of a module's entry computation.

    An input is called as its parameter is (`Arg_0.1`), an output as the root instruction or, of a tuple, its operands. A layout
    that is not row-major is noted and otherwise ignored: shapes are logical. A constant that the text leaves out
    (`constant({...})`) becomes an input of that name.

    Raises:
        InputError: malformed or truncated text.
        UnsupportedError: custom calls or types that nothing expresses, or collectives without a mesh.
        MissingDependencyError: no jaxlib.
    """
    text, where = source_text(program)
    text = with_header(text, where)
    prepared = _ELIDED.sub(
        rf'\g<head>custom-call(), custom_call_target="{ELIDED}\g<name>"', as_custom_calls(groups_spelt_out(text))
    )
    if re.search(r"\bconstant\([^)\n]*\.\.\.", prepared):
        hint = "print it with XLA_FLAGS=--xla_dump_large_constants"
        raise InputError("a constant is left out in part of the text", where=where, hint=hint)
    try:
        module = jaxlib.parse(jaxlib.hlo_to_stablehlo(prepared, where), where)
    except InputError as error:
        raise _unknown(error, text, where) or error from None
    _keep_counts(module, text)
    entry = _ENTRY.search(prepared)
    instructions = _instructions(entry.group(0) if entry else prepared)
    return read_module(
        module,
        "",
        where,
        options,
        _parameters(instructions),
        _results(instructions),
        text,
        local=_PARTITIONED.search(text) is not None,
    )


def _keep_counts(module: Any, text: str) -> None:
    """Keep the numbers of devices that a module's first line says, which XLA's converter drops, where StableHLO has them."""
    head = text[: text.find("\n") if "\n" in text else len(text)]
    for word, name in (("replica_count", "mhlo.num_replicas"), ("num_partitions", "mhlo.num_partitions")):
        count = re.search(rf"\b{word}=(\d+)", head)
        if count is not None:
            with module.context:
                module.operation.attributes[name] = jaxlib.api().ir.IntegerAttr.get(
                    jaxlib.api().ir.IntegerType.get_signless(32), int(count.group(1))
                )


def _unknown(error: InputError, text: str, where: str) -> UnsupportedError | None:
    """The operation by name, where XLA's converter has none for it and calls it unknown."""
    found = re.search(r"(?:\"(?P<name>[^\"]+)\": )?unregistered operation 'mhlo\.unknown'", error.what)
    if found is None:
        return None
    made = {i.name: i.opcode for i in _instructions(text)}
    known = next((o for o in made.values() if o in _UNCONVERTED), None)  # within a fusion, too, which the message names
    opcode = known or made.get(found["name"] or "", "an operation")
    what = f"{opcode} has no form in StableHLO and is not read"
    return UnsupportedError(what, where=f"{where}, {found['name']}", hint="write it with other operations")


@dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    operands: str
    is_root: bool


def _instructions(computation: str) -> list[_Instruction]:
    """The instructions of one computation, as far as names go: `name = type opcode(operands)`."""
    found: list[_Instruction] = []
    for line in _COMMENT.sub("", computation).splitlines():
        said = _ASSIGNMENT.match(line)
        if said is None:
            continue
        head, _, operands = said["rest"][_type_end(said["rest"]) :].strip().partition("(")
        found.append(_Instruction(said["name"], head.strip(), operands.partition(")")[0], said["root"] is not None))
    return found


def _type_end(text: str) -> int:
    """The index at which the type that `text` begins with ends: at a space outside all brackets."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == " " and depth == 0:
            return i
    return len(text)


def _parameters(instructions: Sequence[_Instruction]) -> list[str]:
    """Names of the parameters, in order."""
    found = {int(i.operands): i.name for i in instructions if i.opcode == "parameter" and i.operands.isdigit()}
    return [found[n] for n in sorted(found)]


def _results(instructions: Sequence[_Instruction]) -> list[str]:
    """The name of the root instruction or, where it is a tuple, those of its operands."""
    root = next((i for i in instructions if i.is_root), None)
    if root is None or root.opcode != "tuple":
        return [root.name] if root else []
    return re.findall(r"%?([\w.\-]+)(?=\s*(?:,|$))", root.operands)
