"""A kernel's instructions as Python: straight stretches of them become functions of a unit (`machine.Unit`).

What is arithmetic becomes an expression of arrays; what touches memory or other threads is a call of a function bound to its
operands. A stretch ends where another one may begin: at labels, branches, and before whatever waits.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx import arithmetic, numbers
from ptx.machine import EXIT, PARAMETER_BYTES, PARAMETERS, PARTED, Unit, special
from ptx.memory import SHARED_BASE
from ptx.numbers import FLOATS, SIGNED, UNSIGNED, bits_of
from ptx.text import Imm, Instruction, Kernel, Label, Mem, Operand, Pair, Reg, Sink, Special, Sym, Unknown, Vec, parse

FLOATING = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}
IGNORED = re.compile(r"(membar|setmaxnreg|prefetch|prefetchu|nanosleep|bar\.warp|pragma|discard|applypriority|createpolicy)\b")
OPERATORS = {"and": "&", "or": "|", "xor": "^"}
ONLY_INTEGERS = {"and", "or", "xor", "not", "shl", "shr", "popc", "clz", "brev", "cnot", "sad", "rem"}


def full(u: Unit, value: Any) -> np.ndarray:
    """A value that no lane has different."""
    return np.full(u.n, value)


def select(which: np.ndarray, new: np.ndarray, old: np.ndarray | None) -> np.ndarray:
    """A register that some lanes wrote."""
    return np.where(which, new, new ^ new if old is None else old)


def branch(u: Unit, which: np.ndarray, there: int, here: int) -> int:
    """The step at which a unit goes on, or PARTED where its lanes part."""
    if which.all():
        return there
    if not which.any():
        return here
    u.parts = [(which, there), (~which, here)]
    return PARTED


def branch_list(u: Unit, which: np.ndarray, targets: list[int]) -> int:
    """The same for `brx.idx`."""
    if (which == which[0]).all():
        return targets[int(which[0])]
    u.parts = [(which == v, targets[int(v)]) for v in np.unique(which)]
    return PARTED


class Program:
    """A kernel's text as functions.

    Args:
        ptx: the text.
        fine: every access to memory begins a stretch, so that others may come between any two.
    """

    def __init__(self, ptx: str, *, fine: bool = False) -> None:
        from ptx.instructions import COMPLEX, WAITS  # they decode operands by means of this module

        self.kernel: Kernel = parse(ptx)
        self._complex, self._waits, self._fine = COMPLEX, WAITS, fine
        self.names: dict[str, Any] = {
            **{f"u{n}": UNSIGNED[8 * n] for n in (1, 2, 4, 8)},
            **{f"i{n}": SIGNED[8 * n] for n in (1, 2, 4, 8)},
            **{f"f{n}": FLOATS[f"f{8 * n}"] for n in (2, 4, 8)},
            "np": np,
            "full": full,
            "select": select,
            "branch": branch,
            "branch_list": branch_list,
            "special": special,
        }
        self.steps: list[Callable[[Unit], int]] = []
        self.meets: dict[int, int | None] = {}
        self._first: list[int] = []
        self.unwritten = self._unwritten()
        self._make()

    def said(self, step: int) -> str:
        """The last instruction before a step, and the first in it."""
        code = self.kernel.code
        at = self._first[step] if step < len(self._first) else len(code)
        return " | ".join(code[i].text for i in (at - 1, at) if 0 <= i < len(code))

    def _unwritten(self) -> dict[int, str]:
        """Registers that are read and that no instruction writes, and their kinds: LLVM does so where any value will do."""

        def registers(op: Operand) -> list[Reg]:
            if isinstance(op, Reg):
                return [op]
            parts = op.items if isinstance(op, Vec) else (op.left, op.right) if isinstance(op, Pair) else ()
            return [r for x in parts for r in registers(x)]

        code = self.kernel.code
        written = {r.number for i in code for o in i.operands[:1] for r in registers(o)}
        return {r.number: r.kind for i in code for o in i.operands[1:] for r in registers(o) if r.number not in written}

    # -- stretches

    def _make(self) -> None:
        code = self.kernel.code
        starts = {0, *self.kernel.labels.values()}
        for i, ins in enumerate(code):
            root = ins.op.split(".")[0]
            if root in ("bra", "brx", "ret", "exit"):
                starts.add(i + 1)
            elif self._waiting(ins):
                starts |= {i, i + 1}
            elif self._fine and root in self._complex:
                starts.add(i)
        firsts = sorted(s for s in starts if s < len(code))
        self._first = [*firsts, len(code)]
        self._step_of = {f: n for n, f in enumerate(firsts)} | {len(code): len(firsts)}
        lines: list[str] = []
        follow: list[list[int]] = []
        for n, f in enumerate(firsts):
            lines.append(f"def s{n}(u):\n R = u.R")
            end = firsts[n + 1] if n + 1 < len(firsts) else len(code)
            follow.append([])
            ended = False
            for ins in code[f:end]:
                try:
                    more = self._instruction(ins, n + 1, follow[-1])
                except Unknown as e:
                    raise Unknown(f"{e} in: {ins.text}") from None
                lines += [f" {x}  # {ins.text}" for x in more]
                ended = ins.op.split(".")[0] in ("bra", "brx", "ret", "exit")
            if not ended or follow[-1][-1:] == [-2]:
                follow[-1] = [x for x in follow[-1] if x != -2]
                follow[-1].append(n + 1)
            if not ended:
                lines.append(f" return {n + 1}")
        lines.append(f"def s{len(firsts)}(u):\n return {EXIT}")
        source = "\n".join(lines)
        name = f"<ptx {self.kernel.name} {id(self)}>"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        exec(compile(source, name, "exec"), self.names)
        self.steps = [self.names[f"s{n}"] for n in range(len(firsts) + 1)]
        self._meeting_places(follow)

    def _waiting(self, ins: Instruction) -> bool:
        return any(ins.op.startswith(w) for w in self._waits)

    def _meeting_places(self, follow: list[list[int]]) -> None:
        """Find for each stretch the place where all paths from it come together: its nearest postdominator."""
        end = len(follow)
        after: list[int] = [-1] * end + [end]
        changed = True

        def nearest(x: int, y: int) -> int:
            seen: set[int] = set()
            while x != -1:
                seen.add(x)
                x = after[x] if x != end else -1
            while y not in seen:
                y = after[y]
            return y

        order = self._order(follow)
        while changed:
            changed = False
            for n in order:
                known = [s for s in follow[n] if s == end or after[s] != -1]
                if not known:
                    continue
                new = known[0]
                for s in known[1:]:
                    new = nearest(new, s)
                if after[n] != new:
                    after[n], changed = new, True
        self.meets = {n: after[n] for n in range(end) if after[n] not in (-1, end)}

    @staticmethod
    def _order(follow: list[list[int]]) -> list[int]:
        """Stretches, those that follow before those that they follow."""
        found: list[int] = []
        seen = {0}
        stack = [(0, iter(follow[0]))]
        while stack:
            n, rest = stack[-1]
            for s in rest:
                if s < len(follow) and s not in seen:
                    seen.add(s)
                    stack.append((s, iter(follow[s])))
                    break
            else:
                stack.pop()
                found.append(n)
        return found

    # -- operands

    def bound(self, thing: Any) -> str:
        """A name for something in the functions."""
        name = f"k{len(self.names)}"
        self.names[name] = thing
        return name

    def value(self, op: Operand, t: str) -> str:
        """An operand as an array of a type: an expression."""
        bits = 32 if t == "pred" else bits_of(t)
        if isinstance(op, Reg):
            if op.kind == "pred":
                return f"~R[{op.number}]" if op.negated else f"R[{op.number}]"
            text = f"R[{op.number}]"
            if int(op.kind) > bits or int(op.kind) < bits:
                text += f".astype(u{bits // 8})"
            return text + self._seen(t)
        if isinstance(op, Imm):
            return self.bound(self._number(op, t))
        if isinstance(op, Special):
            return f'special(u, "{op.name}")' + (f".astype(u{bits // 8})" if bits != 32 else "") + self._seen(t)
        if isinstance(op, Sym):
            return self.bound(UNSIGNED[bits](self.address(op) & (1 << bits) - 1))  # 32 bits: of shared memory
        if isinstance(op, Vec):  # `mov.b32 d, {a, b}`
            each = bits // len(op.items)
            parts = [
                f"({self.value(x, f'b{each}')}.astype(u{bits // 8}) << u{bits // 8}({i * each}))"
                for i, x in enumerate(op.items)
            ]
            return " | ".join(parts)
        raise Unknown(f"operand {op}")

    @staticmethod
    def _seen(t: str) -> str:
        if t in FLOATS:
            return f".view(f{bits_of(t) // 8})"
        if t == "f16x2":
            return ".view(u2).view(f2)"
        if t == "bf16x2" or t in ("s16x2", "u16x2"):
            return ".view(u2)" if t[0] != "s" else ".view(i2)"
        return f".view(i{bits_of(t) // 8})" if t[0] == "s" else ""

    @staticmethod
    def _number(op: Imm, t: str) -> Any:
        bits = bits_of(t)
        if t.endswith("x2"):
            pair = np.array([op.value & (1 << bits) - 1], UNSIGNED[bits]).view(UNSIGNED[bits // 2])
            if pair[0] != pair[1]:
                raise Unknown("a constant of two different halves")
            return pair[0].view(FLOATS["f16"]) if t == "f16x2" else pair[0]
        value = op.value
        if op.bits == 64 and bits == 32:
            raise Unknown("an f64 where an f32 should be")
        made = UNSIGNED[bits](value & (1 << bits) - 1)
        if t in FLOATS:
            return made.view(FLOATS[t])
        return made.view(SIGNED[bits]) if t[0] == "s" else made

    def address(self, op: Sym) -> int:
        """The address of a parameter, or one in shared memory."""
        names = list(self.kernel.params)
        if op.name in names:
            return PARAMETERS + names.index(op.name) * PARAMETER_BYTES + op.offset
        return SHARED_BASE + op.offset

    def place(self, op: Operand, bits: int) -> str:
        """The address in brackets."""
        assert isinstance(op, Mem)
        base = self.value(op.base, f"u{bits}")
        if op.offset:
            base = f"({base} + {self.bound(UNSIGNED[bits](op.offset & (1 << bits) - 1))})"
        return self.spread(base)

    @staticmethod
    def spread(text: str) -> str:
        """An expression as an array, be it of constants alone; `v` are arrays that a line before it made."""
        return text if re.search(r"R\[|\bu,|\bv\b", text) else f"full(u, {text})"

    def guard(self, ins: Instruction) -> str:
        """The mask of lanes that do it, or None."""
        return "None" if ins.guard is None else self.value(ins.guard, "pred")

    def put(self, ins: Instruction, to: Operand, text: str, t: str) -> list[str]:
        """A register's new value, of a type, where the guard holds."""
        if isinstance(to, Sink):
            return [text]
        assert isinstance(to, Reg), to
        text = self.spread(text)
        if t != "pred":
            bits = bits_of(t)
            if t[0] in "sf" or t == "f16x2" or (t.endswith("x2") and bits == 32):
                text = f"({text}).view(u{bits // 8})"
            if int(to.kind) != bits:
                if t[0] == "s" and bits < int(to.kind):
                    text = f"({text}).view(i{bits // 8}).astype(i{int(to.kind) // 8}).view(u{int(to.kind) // 8})"
                else:
                    text = f"({text}).astype(u{int(to.kind) // 8})"
        if ins.guard is not None:
            text = f"select({self.guard(ins)}, {text}, R[{to.number}])"
        return [f"R[{to.number}] = {text}"]

    # -- instructions

    def _instruction(self, ins: Instruction, after: int, follow: list[int]) -> list[str]:
        root, *mods = [x for x in re.split(r"\.|::", ins.op) if x]
        if IGNORED.match(ins.op):
            return []
        if root in ("bra", "brx", "ret", "exit"):
            return self._jump(root, ins, after, follow)
        if root in self._complex:
            return self._complex[root](self, ins, mods)
        return self._plain(root, mods, ins)

    def _jump(self, root: str, ins: Instruction, after: int, follow: list[int]) -> list[str]:
        if root == "brx":
            which, targets = ins.operands
            assert isinstance(targets, Label)
            steps = [self._step_of[self.kernel.labels[x]] for x in self.kernel.targets[targets.name]]
            follow += steps
            return [f"return branch_list(u, {self.value(which, 'u32')}, {self.bound(steps)})"]
        end = self._step_of[len(self.kernel.code)]
        to = end
        if root == "bra":
            (label,) = ins.operands
            assert isinstance(label, Label), label
            to = self._step_of[self.kernel.labels[label.name]]
        follow.append(to)
        if ins.guard is None:
            return [f"return {to}"]
        follow.append(-2)
        return [f"return branch(u, {self.guard(ins)}, {to}, {after})"]

    def _plain(self, root: str, mods: list[str], ins: Instruction) -> list[str]:
        ops, t = ins.operands, mods[-1] if mods else ""
        if root == "mov":
            return self._move(ins, t)
        if root == "cvta":
            return self.put(ins, ops[0], self.value(ops[1], "u64"), "u64")
        if root == "cvt" and mods[:2] == ["pack", "sat"]:
            given = ", ".join([self.value(o, "s32") for o in ops[1:3]] + [self.value(ops[3], "b32")])
            return self.put(ins, ops[0], f"{self.bound(arithmetic.packed(mods[2]))}({given})", "b32")
        if root == "cvt":
            return self._cast(ins, mods)
        if root in ("setp", "set"):
            return self._compare(root, ins, mods)
        if root == "selp":
            x, y, p = (self.value(o, k) for o, k in zip(ops[1:], (f"b{bits_of(t)}", f"b{bits_of(t)}", "pred"), strict=True))
            return self.put(ins, ops[0], f"np.where({p}, {x}, {y})", f"b{bits_of(t)}")
        if t == "pred":
            text = {"and": "({} & {})", "or": "({} | {})", "xor": "({} ^ {})", "not": "~{}"}[root]
            return self.put(ins, ops[0], text.format(*(self.value(o, "pred") for o in ops[1:])), "pred")
        if root in ("lop3", "prmt", "bfe", "bfi", "shf"):
            return self._bits(root, ins, mods)
        if t in FLOATING and root not in ONLY_INTEGERS:
            of = self.bound(arithmetic.floating(root, mods, t))
            inner = "u16x2" if t == "bf16x2" else t
            return self.put(ins, ops[0], f"{of}({', '.join(self.value(o, t) for o in ops[1:])})", inner)
        if root in ("shl", "shr"):
            of = self.bound(arithmetic.integer(root, mods, t))
            return self.put(ins, ops[0], f"{of}({self.value(ops[1], t)}, {self.value(ops[2], 'u32')})", t)
        lanes = t.removesuffix("x2")
        of = self.bound(arithmetic.integer(root, mods, lanes))
        result = t
        types = [t] * (len(ops) - 1)
        if "wide" in mods:
            result = f"{t[0]}{2 * bits_of(t)}"
            types[2:] = [result] * len(types[2:])
        if root in ("popc", "clz"):
            result = "u32"
        return self.put(
            ins, ops[0], f"{of}({', '.join(self.value(o, k) for o, k in zip(ops[1:], types, strict=True))})", result
        )

    def _move(self, ins: Instruction, t: str) -> list[str]:
        to, of = ins.operands
        if t == "pred":
            text = f"np.full(u.n, {bool(of.value)})" if isinstance(of, Imm) else self.value(of, "pred")
            return self.put(ins, to, text, "pred")
        kind = f"b{bits_of(t)}"
        if isinstance(to, Vec):
            bits = bits_of(t) // len(to.items)
            value = self.value(of, kind)
            lines: list[str] = []
            for i, x in enumerate(to.items):
                part = f"({value} >> u{bits_of(t) // 8}({i * bits})).astype(u{bits // 8})"
                lines += [] if isinstance(x, Sink) else self.put(ins, x, part, f"b{bits}")
            return lines
        return self.put(ins, to, self.value(of, kind), kind)

    def _cast(self, ins: Instruction, mods: list[str]) -> list[str]:
        to, of = mods[-2:]
        if mods[0] == "pack":
            return self._pack(ins, mods)
        made = self.bound(numbers.cast(to, of, frozenset(mods[:-2])))
        given = ", ".join(self.value(o, f"b{bits_of(of)}") for o in ins.operands[1:])
        bits = bits_of(to)
        return self.put(ins, ins.operands[0], f"{made}({given})", to if to[0] == "s" and len(to) < 4 else f"b{bits}")

    def _pack(self, ins: Instruction, mods: list[str]) -> list[str]:
        """`cvt.pack.sat.to.s32{.b32} d, a, b{, c}`: a and b beside one another, c's lower part above."""
        to = mods[2]
        made, bits = self.bound(numbers.cast(to, "s32", frozenset({"sat"}))), bits_of(to)
        a, b = (f"{made}({self.value(o, 'b32')}).astype(u4)" for o in ins.operands[1:3])
        text = f"(({a} << u4({bits})) | {b})"
        if len(ins.operands) > 3:
            text = f"({text} | ({self.value(ins.operands[3], 'b32')} << u4({2 * bits})))"
        return self.put(ins, ins.operands[0], text, "b32")

    def _compare(self, root: str, ins: Instruction, mods: list[str]) -> list[str]:
        t, ops = mods[-1], ins.operands
        of = self.bound(arithmetic.compared(mods[0], t))
        text = f"{of}({self.value(ops[1], t)}, {self.value(ops[2], t)})"
        if root == "set":
            kind = mods[-2]
            one = {"f32": "u4(0x3f800000)", "f16": "u2(0x3c00)", "bf16": "u2(0x3f80)"}.get(
                kind, f"u{bits_of(kind) // 8}(-1 % (1 << {bits_of(kind)}))"
            )
            if len(ops) > 3 or kind.endswith("x2"):
                raise Unknown(ins.text)
            return self.put(ins, ops[0], f"np.where({text}, {one}, {one} ^ {one})", f"b{bits_of(kind)}")
        both = ops[0] if isinstance(ops[0], Pair) else Pair(ops[0], Sink())
        joined = next((m for m in mods[1:-1] if m in ("and", "or", "xor")), None)
        lines = [f"v = {self.spread(text)}"]
        tail = f" {OPERATORS[joined]} {self.value(ops[3], 'pred')}" if joined else ""
        for to, sign in ((both.left, ""), (both.right, "~")):
            lines += [] if isinstance(to, Sink) else self.put(ins, to, f"({sign}v{tail})", "pred")
        return lines

    def _bits(self, root: str, ins: Instruction, mods: list[str]) -> list[str]:
        ops, t = ins.operands, mods[-1]
        given = [self.value(o, t if i < (2 if root == "bfi" else 1) else "u32") for i, o in enumerate(ops[1:])]
        if root == "lop3":
            table = ops[4]
            assert isinstance(table, Imm)
            return self.put(ins, ops[0], f"{self.bound(arithmetic.logic(table.value))}({', '.join(given[:3])})", t)
        if root == "prmt":
            if mods[-1] != "b32" or len(mods) > 1:
                raise Unknown(ins.text)
            if isinstance(ops[3], Imm):
                return self.put(ins, ops[0], f"{self.bound(arithmetic.permuted_by(ops[3].value))}({given[0]}, {given[1]})", t)
            return self.put(ins, ops[0], f"{self.bound(arithmetic.permuted)}({', '.join(given)})", t)
        if root == "bfe":
            of = arithmetic.field(t[0] == "s", bits_of(t))
        else:
            of = arithmetic.inserted if root == "bfi" else arithmetic.funnel(mods)
        return self.put(ins, ops[0], f"{self.bound(of)}({', '.join(given)})", t)
