"""LLVM IR of operations on vectors: types in registers and in memory, and instructions for what algorithms on values ask."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Hashable, Sequence
from typing import TypeGuard

import torch

from tilewright.candidates.llvm.expressions.text import Function, f32, f64, suffix, vec
from tilewright.dtype import BF16, F4E2M1FN, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F16, F32, F64, PRED, S32, U16, U32, DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import Const
from tilewright.lowering.scalar.conversions import rounded_to_bf16
from tilewright.lowering.scalar.functions import ROUND
from tilewright.lowering.scalar.nodes import NodeBuilder
from tilewright.lowering.scalar.values import Body, Fewer, Operand, Value
from tilewright.schedule.candidate import Unsupported

# 16-bit floats are the integers of their bits until they are converted: instruction selection has no masked memory for bfloat,
# and no conversions where the processor lacks the type.
CONVERTED = 16  # floats that an instruction of AVX-512 BF16 rounds
FLOATS = {"f32": "float", "bf16": "i16", "f16": "i16"}
FP8 = (F8E4M3FN, F8E4M3FNUZ, F8E5M2, F4E2M1FN)

# Instructions on floats, signed and unsigned integers.
BINARY = {
    "+": ("fadd", "add", "add"), "-": ("fsub", "sub", "sub"), "*": ("fmul", "mul", "mul"), "/": ("fdiv", "", ""),
    "//": ("", "sdiv", "udiv"), "&": ("", "and", "and"), "|": ("", "or", "or"), "^": ("", "xor", "xor"),
    "<<": ("", "shl", "shl"), ">>": ("", "ashr", "lshr"),
}  # fmt: skip
CONSTANT = re.compile(r"splat \((float|i\d+) (\S+)\)")
COMPARE = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
INTRINSICS = {"abs": "fabs", "round_half_even": "rint", "round_half_away": "round"}


def element(dtype: DType) -> str:
    """The LLVM type of a value in a register; pred is i1 there and a byte in memory.

    Raises:
        Unsupported: f64 is not made for it.
    """
    if dtype.is_float:
        if dtype in FP8:
            return "i8"
        if dtype.name not in FLOATS:
            raise Unsupported(f"{dtype} has no vectors here")
        return FLOATS[dtype.name]
    if dtype is PRED:
        return "i1"
    return f"i{max(dtype.bits, 8)}"


def in_memory(dtype: DType) -> str:
    """The LLVM type of an element in memory."""
    return "i8" if dtype is PRED else element(dtype)


def size_bytes(dtype: DType) -> int:
    """Size of one element as torch keeps it: 4-bit codes and pred take a byte."""
    return max(dtype.bits, 8) // 8


def constant(n: Node) -> str:
    """A one-element constant as a vector of it."""
    assert isinstance(n.op, Const)
    tensor = n.op.data.tensor().reshape(1)
    if n.dtype.is_float and n.dtype is not F32:
        tensor = tensor.view(dtype=torch.uint8 if n.dtype in FP8 else torch.int16)
    value = tensor.item()
    if n.dtype is F32:
        return f"splat (float {f32(float(value))})"
    return f"splat ({element(n.dtype)} {str(bool(value)).lower() if n.dtype is PRED else int(value)})"


def exact_inverse(number: float | None) -> TypeGuard[float]:
    """Tell whether a number is a power of two whose inverse is normal, too: multiplying by that is dividing by it."""
    return number is not None and abs(math.frexp(number)[0]) == 0.5 and 2.0**-126 <= abs(number) <= 2.0**126


class Printer(NodeBuilder):
    """Operations on vectors of `lanes`, emitted into one function."""

    native = frozenset({"trunc", "round_half_even", "round_half_away"})
    multiplies = drops_nan = True

    def __init__(self, f: Function, lanes: int):
        super().__init__()
        self.f, self.lanes, self.known = f, lanes, f.known

    def type(self, dtype: DType) -> str:
        """The LLVM type of a vector of values."""
        return vec(self.lanes, "double" if dtype is F64 else element(dtype))

    def _made(self, dtype: DType, expression: str) -> Value:
        return Value(self, self.f.v(expression), dtype)

    def put(self, operand: Operand, dtype: DType) -> str:
        if isinstance(operand, Value):
            return operand.name
        if dtype is PRED:
            return f"splat (i1 {str(bool(operand)).lower()})"
        if dtype.is_float:
            return f"splat ({f'float {f32(operand)}' if dtype is F32 else f'double {f64(operand)}'})"
        bits, half = int(operand) & (1 << dtype.bits) - 1, 1 << dtype.bits - 1
        return f"splat (i{dtype.bits} {(bits ^ half) - half})"

    def number(self, key: Hashable, value: float, dtype: DType) -> Value:
        """A number that is data of the problem: calls pass it, and the text has it only where code is written for it, as for 0,
        1 and infinities. `key` says what it stands for: equal numbers that mean different things are two."""
        whole = dtype.is_integer
        value = int(value) if whole else ctypes.c_float(value).value
        if not self.f.module.register_lanes or value == 0 or (not whole and (not math.isfinite(value) or abs(value) == 1)):
            return self.constant(value, dtype)
        (bits,) = struct.unpack("=I", struct.pack("=f", value)) if not whole else (int(value) & 0xFFFFFFFF,)
        return Value(self, self.f.number_given(key, value, bits, self.lanes, element(dtype)), dtype)

    def is_number(self, x: Value) -> bool:
        return x.name in self.f.numbers

    def derived(self, how: Hashable, value: float, *of: Operand) -> Value:
        if not any(isinstance(x, Value) and self.is_number(x) for x in of):
            return self.constant(value, F32)
        return self.number((how, *map(self._key, of)), value, F32)

    def _key(self, x: Operand) -> Hashable:
        """The number that calls pass, or the value, of a known operand."""
        return x.name.split(".")[0] if isinstance(x, Value) and self.is_number(x) else self._number(x)

    def _number(self, x: Operand) -> float | None:
        """The number that an operand is, if it is one that calls pass, or a constant of f32 or of integers."""
        if not isinstance(x, Value):
            return x
        if x.name in self.f.numbers:
            return self.f.numbers[x.name]
        found = CONSTANT.fullmatch(x.name)
        if found is None:
            return None
        return struct.unpack(">d", bytes.fromhex(found[2][2:]))[0] if found[1] == "float" else int(found[2])

    def binary(self, op: str, a: Operand, b: Operand) -> Value:
        dtype, x, y = self.type_of(a, b), self._number(a), self._number(b)
        if dtype is F32 and op in ("+", "-", "*") and x is not None and y is not None:
            # Exact in f64 or innocuously rounded twice. As a constant it holds in every block.
            return self.derived(op, x + y if op == "+" else x - y if op == "-" else x * y, a, b)
        if dtype is F32 and op == "/" and isinstance(b, Value) and b.name in self.f.numbers and exact_inverse(y):
            return self.binary("*", a, self.derived("1 /", 1 / y, b))
        name = BINARY[op][0 if dtype.is_float else 1 if dtype.is_signed else 2]
        return self._made(dtype, f"{name} {self.type(dtype)} {self.put(a, dtype)}, {self.put(b, dtype)}")

    def compare(self, op: str, a: Operand, b: Operand) -> Value:
        dtype, how = self.type_of(a, b), COMPARE[op]
        if dtype.is_float:
            name = f"fcmp {'u' if op == '!=' else 'o'}{how}"
        else:
            name = f"icmp {'' if op in ('==', '!=') else 's' if dtype.is_signed else 'u'}{how}"
        return self._made(PRED, f"{name} {self.type(dtype)} {self.put(a, dtype)}, {self.put(b, dtype)}")

    def select(self, mask: Value, a: Operand, b: Operand, dtype: DType | None = None) -> Value:
        dtype = dtype or self.type_of(a, b)
        t = self.type(dtype)
        return self._made(dtype, f"select {self.type(PRED)} {mask.name}, {t} {self.put(a, dtype)}, {t} {self.put(b, dtype)}")

    def negated(self, x: Value) -> Value:
        return self._made(x.dtype, f"fneg {self.type(x.dtype)} {x.name}")

    def call(self, fn: str, *args: Operand) -> Value:
        dtype = self.type_of(*args)
        if fn in ("min", "max") and not dtype.is_float:
            fn = f"{'s' if dtype.is_signed else 'u'}{fn}"
        elif fn in ("at_most", "min", "at_least", "max"):
            x, bound = args if fn in ("min", "max") else reversed(args)  # a NaN fails the comparison: the second is chosen
            return self.select(self.compare("<" if fn in ("at_most", "min") else ">", x, bound), x, bound, dtype)
        return self._intrinsic(f"llvm.{INTRINSICS.get(fn, fn)}", dtype, *args)

    def _intrinsic(self, name: str, dtype: DType, *args: Operand) -> Value:
        t = self.type(dtype)
        return Value(self, self.f.intrinsic(f"{name}.{suffix(t)}", t, *((t, self.put(a, dtype)) for a in args)), dtype)

    def to(self, x: Value, dtype: DType) -> Value:
        source, number = x.dtype, self._number(x)
        if source.is_integer and number is not None and dtype in (F32, S32) and source.bits <= 16:
            whole = int(number) & int(source.max) if source.kind == "uint" else int(number)
            return self.number((dtype, self._key(x)), whole, dtype) if self.is_number(x) else self.constant(whole, dtype)
        if source is BF16:
            return (self.bits(x, U16).to(U32) << 16).bits(F32)
        if dtype is BF16:
            rounds = self.f.module.rounds_bf16 and self.lanes in (CONVERTED, 2 * CONVERTED, 4 * CONVERTED)
            return self._by_instruction(x) if rounds else self.bits(rounded_to_bf16(x), BF16)
        half = vec(self.lanes, "half")
        if source is F16:
            bits = self.f.v(f"bitcast {self.type(F16)} {x.name} to {half}")
            return self._made(F32, f"fpext {half} {bits} to {self.type(F32)}")
        if dtype is F16:
            narrow = self.f.v(f"fptrunc {self.type(F32)} {x.name} to {half}")
            return self._made(F16, f"bitcast {half} {narrow} to {self.type(F16)}")
        width = 1 if source is PRED else source.bits
        if source.is_float:
            how = "fptosi" if not dtype.is_float else "fpext" if dtype.bits > width else "fptrunc"
        elif dtype.is_float:
            how = "sitofp" if source.is_signed else "uitofp"
        elif width == dtype.bits:
            return Value(self, x.name, dtype)
        else:
            how = "trunc" if width > dtype.bits else "sext" if source.is_signed else "zext"
        return self._made(dtype, f"{how} {self.type(source)} {x.name} to {self.type(dtype)}")

    def bits(self, x: Value, dtype: DType) -> Value:
        from_, to = self.type(x.dtype), self.type(dtype)
        return Value(self, x.name if from_ == to else self.f.v(f"bitcast {from_} {x.name} to {to}"), dtype)

    def nearest(self, x: Value) -> tuple[Value, Value]:
        rounded = x + ROUND
        return rounded - ROUND, rounded.bits(S32)

    def truncated(self, x: Value, dtype: DType) -> Value:
        single, to = self.type(F32), self.type(dtype)
        name = f"llvm.{'fptosi' if dtype.is_signed else 'fptoui'}.sat.{suffix(to)}.{suffix(single)}"
        return Value(self, self.f.intrinsic(name, to, (single, x.name)), dtype)

    def quotient(self, x: Value, divisor: Value, target: DType, *, repeats: bool) -> Value:
        return x / divisor

    def cut(self, x: Value) -> Value:
        return self.bits((x.bits(U32) >> 16).to(U16), BF16)

    def _by_instruction(self, x: Value) -> Value:
        """f32 rounded to bf16, 16 of them or 32 at a time."""
        f, single = self.f, self.type(F32)
        count = min(self.lanes, 2 * CONVERTED)
        parts: list[str] = []
        for first in range(0, self.lanes, CONVERTED):
            whole = self.lanes == CONVERTED
            parts.append(x.name if whole else f.shuffle(single, x.name, x.name, range(first, first + CONVERTED)))
        name = f"llvm.x86.avx512bf16.cvtne{'2' if count > CONVERTED else ''}ps2bf16.512"
        bf16, type_ = vec(count, "bfloat"), vec(CONVERTED, "float")
        step = count // CONVERTED
        rounded = [
            f.intrinsic(name, bf16, *((type_, x) for x in reversed(parts[i : i + step]))) for i in range(0, len(parts), step)
        ]
        joined = rounded[0] if len(rounded) == 1 else f.shuffle(bf16, rounded[0], rounded[1], range(self.lanes))
        return self._made(BF16, f"bitcast {vec(self.lanes, 'bfloat')} {joined} to {self.type(BF16)}")

    # -- what some lanes need

    def any(self, mask: Value) -> str:
        """Tell whether a mask has a lane, an i1."""
        return self.f.intrinsic(f"llvm.vector.reduce.or.v{self.lanes}i1", "i1", (self.type(PRED), mask.name))

    def repeat(self, times: int, state: Sequence[Value], body: Body, unless: Fewer | None = None) -> list[Value]:
        f, count = self.f, str(times)
        if unless is not None:
            mask, fewer, other = unless
            any_ = self.any(mask)
            count = f.v(f"select i1 {any_}, i64 {times}, i64 {fewer}")
            state = [a if a is b else self._either(any_, a, b) for a, b in zip(state, other, strict=True)]
        with f.loop(0, count, 1, [(self.type(x.dtype), x.name) for x in state]) as loop:
            carried = [Value(self, name, x.dtype) for name, x in zip(loop.carried, state, strict=True)]
            loop.next = [x.name for x in body(carried)]
        return [Value(self, name, x.dtype) for name, x in zip(loop.carried, state, strict=True)]

    def _either(self, condition: str, a: Value, b: Value) -> Value:
        """One of two vectors, by an i1."""
        t = self.type(a.dtype)
        return self._made(a.dtype, f"select i1 {condition}, {t} {a.name}, {t} {b.name}")

    def entry(self, table: str, numbers: Sequence[float], index: Value) -> Value:
        given = ", ".join(f"double {f64(x)}" for x in numbers)
        self.f.module.declarations[table] = f"@{table} = internal constant [{len(numbers)} x double] [{given}], align 64"
        where = self.f.v(f"getelementptr double, ptr @{table}, {self.type(index.dtype)} {index.name}")
        t, pointers = self.type(F64), vec(self.lanes, "ptr")
        mask, name = (self.type(PRED), "splat (i1 true)"), f"llvm.masked.gather.{suffix(t)}.{suffix(pointers)}"
        given = self.f.intrinsic(name, t, (pointers, where), ("i32 immarg", "8"), mask, (t, "zeroinitializer"))
        return Value(self, given, F64)
