"""PTX text as instructions: names resolved, scopes flattened, registers numbered (PTX ISA 9.0, chapters 4 to 7)."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field


class Unknown(Exception):  # noqa: N818
    """The text holds something that is not known here."""


@dataclass(frozen=True)
class Reg:
    """A register: its number, and "pred" or its bits ("16", "32", "64", "128")."""

    number: int
    kind: str
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """A number; `bits` of a float, 0 of an integer."""

    value: int
    bits: int = 0


@dataclass(frozen=True)
class Sym:
    """A parameter or an array of shared memory, and bytes from it."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Special:
    """`%tid.x` and the like."""

    name: str


@dataclass(frozen=True)
class Vec:
    """Several operands in braces."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Mem:
    """An address: base and bytes, and what else stands in the brackets."""

    base: Operand
    offset: int
    more: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    """`d|p`."""

    left: Operand
    right: Operand


@dataclass(frozen=True)
class Label:
    """A place in the kernel: an instruction's number once all are known."""

    name: str


@dataclass(frozen=True)
class Sink:
    """`_`."""


Operand = Reg | Imm | Sym | Special | Vec | Mem | Pair | Label | Sink


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        op: the opcode with all that follows it after dots.
        operands: in order.
        guard: the predicate under which it is done.
        text: as it stood.
    """

    op: str
    operands: list[Operand]
    guard: Reg | None
    text: str


@dataclass
class Kernel:
    """An entry.

    Attributes:
        params: name, bytes each.
        shared: bytes of each array of shared memory that has a size, and where they are.
        code: instructions.
        labels: name to instruction.
        targets: lists of labels for `brx.idx`.
        registers: how many there are.
        threads, cluster: of a block, blocks of a cluster.
    """

    name: str
    params: dict[str, int]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)
    registers: int = 0
    threads: int = 0
    cluster: int = 1


SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|laneid|warpid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid|cluster_ctarank|cluster_nctarank"
    r"|is_explicit_cluster|smid|nsmid|clock|clock64|globaltimer|dynamic_smem_size|total_smem_size|lanemask_\w+)(\.[xyz])?$"
)
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


def parse(text: str) -> Kernel:
    """The one entry of a text."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"(?m)^\s*\.(loc|file|section)\b[^\n]*$", "", text)
    text = re.sub(r"\{\s*(?:\.param\b[^;]*;\s*)+[^{}]*\bcall\.uni\s+__assertfail\b[^;]*;\s*\}", "", text)  # `trap` follows
    head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", text, flags=re.S)
    if head is None:
        raise Unknown("no entry")
    params: dict[str, int] = {}
    for p in filter(str.strip, head[2].split(",")):
        m = re.search(r"\.[bsuf](8|16|32|64)\b.*?([\w$]+)(?:\[(\d+)\])?\s*$", p.strip())
        if m is None:
            raise Unknown(p)
        params[m[2]] = SIZES[m[1]] * int(m[3] or 1)
    kernel = Kernel(head[1], params)
    if m := re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head[3]):
        kernel.threads = int(m[1])
    if m := re.search(r"\.reqnctapercluster\s+(\d+)", head[3]):
        kernel.cluster = int(m[1])
    _Reader(kernel).read(text[head.end() :])
    return kernel


class _Scope:
    def __init__(self, above: _Scope | None, number: int) -> None:
        self.above, self.number = above, number
        self.registers: dict[str, Reg] = {}
        self.labels: set[str] = set()

    def register(self, name: str) -> Reg | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            scope = scope.above
        return None

    def label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return f"{name}@{scope.number}"
            scope = scope.above
        return None


class _Reader:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.scopes = kernel, 0
        self.later: list[tuple[str, Reg | None, list[str], str, _Scope]] = []
        self.lists: list[tuple[str, list[str], _Scope]] = []

    def read(self, body: str) -> None:
        scope = _Scope(None, 0)
        at, end = 0, len(body)
        while at < end:
            at += len(body[at:]) - len(body[at:].lstrip()) if body[at].isspace() else 0
            if at >= end:
                break
            c = body[at]
            if c == "{":
                self.scopes += 1
                scope = _Scope(scope, self.scopes)
                at += 1
                continue
            if c == "}":
                if scope.above is None:
                    break
                scope = scope.above
                at += 1
                continue
            if c == ";":
                at += 1
                continue
            m = re.compile(r"([\w$%]+):(?!:)").match(body, at)
            if m:
                name = m[1]
                at = m.end()
                n = re.compile(r"\s*\.branchtargets\s+([^;]*);").match(body, at)
                if n:
                    self.lists.append((name, [x.strip() for x in n[1].split(",")], scope))
                    scope.labels.add(name)
                    at = n.end()
                    continue
                scope.labels.add(name)
                self.kernel.labels[f"{name}@{scope.number}"] = len(self.later)
                continue
            stop = body.index(";", at)
            self._statement(body[at:stop].strip(), scope)
            at = stop + 1
        for op, guard, operands, text, where in self.later:
            found = [self._operand(o, where) for o in operands]
            self.kernel.code.append(Instruction(op, found, guard, text))
        for name, labels, where in self.lists:
            self.kernel.targets[f"{name}@{where.number}"] = [where.label(x) or x for x in labels]

    def _statement(self, text: str, scope: _Scope) -> None:
        text = " ".join(text.split())
        if text.startswith(".reg"):
            m = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text)
            assert m is not None
            kind = m[1] if m[1] == "pred" else m[1][1:]
            for name in m[2].split(","):
                n = re.match(r"([\w%$]+)(?:<(\d+)>)?$", name.strip())
                if n is None:
                    raise Unknown(text)
                names = [n[1]] if n[2] is None else [f"{n[1]}{i}" for i in range(int(n[2]))]
                for each in names:
                    scope.registers[each] = Reg(self.kernel.registers, kind)
                    self.kernel.registers += 1
            return
        if text.startswith("."):
            if re.match(r"\.(pragma|loc)\b", text):
                return
            raise Unknown(text)
        guard = None
        rest = text
        m = re.match(r"@(!?)([\w%$]+)\s+(.*)$", text)
        if m:
            found = scope.register(m[2])
            if found is None:
                raise Unknown(text)
            guard, rest = Reg(found.number, "pred", bool(m[1])), m[3]
        op, _, operands = rest.partition(" ")
        self.later.append((op, guard, _split(operands), text, scope))

    def _operand(self, text: str, scope: _Scope) -> Operand:
        text = text.strip()
        if text == "_":
            return Sink()
        if text[0] == "{":
            return Vec(tuple(self._operand(x, scope) for x in _split(text[1:-1])))
        if text[0] == "[":
            first, *more = _split(text[1:-1])
            base, offset = first, 0
            m = re.match(r"(.+?)\s*\+\s*(-?\w+)$", first)
            if m:
                base, offset = m[1], int(m[2], 0)
            return Mem(self._operand(base, scope), offset, tuple(self._operand(x, scope) for x in more))
        if "|" in text:
            left, right = text.split("|")
            return Pair(self._operand(left, scope), self._operand(right, scope))
        if text[0] == "!":
            inner = self._operand(text[1:], scope)
            assert isinstance(inner, Reg)
            return Reg(inner.number, inner.kind, True)
        register = scope.register(text)
        if register is not None:
            return register
        if SPECIAL.match(text):
            return Special(text)
        if m := re.match(r"0[fF]([0-9a-fA-F]{8})$", text):
            return Imm(int(m[1], 16), 32)
        if m := re.match(r"0[dD]([0-9a-fA-F]{16})$", text):
            return Imm(int(m[1], 16), 64)
        if m := re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", text):
            return Imm(int(text.rstrip("U"), 0))
        if re.match(r"-?\d+\.\d+$", text):
            return Imm(struct.unpack("<I", struct.pack("<f", float(text)))[0], 32)
        label = scope.label(text)
        if label is not None:
            return Label(label)
        if m := re.match(r"([A-Za-z_$][\w$]*)\s*(?:\+\s*(\d+))?$", text):
            return Sym(m[1], int(m[2] or 0))
        raise Unknown(text)


def _split(text: str) -> list[str]:
    """Split a text at its commas outside brackets."""
    found, depth, begun = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{") - (c in "]}")
        if c == "," and depth == 0:
            found.append(text[begun:i])
            begun = i + 1
    rest = text[begun:]
    return [x.strip() for x in [*found, rest] if x.strip()]
