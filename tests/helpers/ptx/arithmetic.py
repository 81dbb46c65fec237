"""Instructions on registers alone, as expressions of arrays: lanes side by side (PTX ISA 9.0, 9.7.1 to 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx.numbers import SIGNED, UNSIGNED, bits_of, flush, fma, from_bf16, to_bf16, u1, u2, u4, u8
from ptx.text import Unknown

Function = Callable[..., np.ndarray]


def _signed(t: str) -> bool:
    return t[0] == "s"


def _on_halves(of: Function) -> Function:
    """A function of bf16 as one of f32, rounded once."""
    return lambda *x: to_bf16(of(*(from_bf16(v) for v in x)))


def _clipped(of: Function) -> Function:
    def to(*x: np.ndarray) -> np.ndarray:
        y = of(*x)
        return np.where(np.isnan(y), y.dtype.type(0), np.clip(y, 0, 1)).astype(y.dtype)

    return to


FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.fmin,
    "max": np.fmax,
    "abs": np.abs,
    "neg": np.negative,
    "copysign": lambda sign, x: np.copysign(x, sign),
    "div": np.divide,
    "sqrt": np.sqrt,
    "rcp": lambda x: (x.dtype.type(1) / x).astype(x.dtype),
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(x.dtype),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(x.dtype),
    "sin": lambda x: np.sin(x.astype(np.float64)).astype(x.dtype),
    "cos": lambda x: np.cos(x.astype(np.float64)).astype(x.dtype),
    "tanh": lambda x: np.tanh(x.astype(np.float64)).astype(x.dtype),
}


def floating(root: str, mods: list[str], t: str) -> Function:
    """The function of an instruction on numbers in f16, f32 or f64, or on bf16's bits."""
    kind = t.removesuffix("x2")
    made = _fused(kind) if root in ("fma", "mad") else _simple(root, mods, kind)
    if "ftz" in mods and kind == "f32":
        made = _flushed(made)
    if "relu" in mods:
        made = _not_negative(made, kind)
    return _clipped(made) if "sat" in mods else made


def _fused(kind: str) -> Function:
    if kind == "f64":
        return lambda x, y, z: x * y + z
    if kind == "bf16":
        return lambda x, y, z: fma(from_bf16(x), from_bf16(y), from_bf16(z), u2)
    to = np.float16 if kind == "f16" else np.float32
    return lambda x, y, z: fma(x, y, z, to)


def _simple(root: str, mods: list[str], kind: str) -> Function:
    found = FLOAT | ({"min": np.minimum, "max": np.maximum} if "NaN" in mods else {})
    if root not in found:
        raise Unknown(f"{root}.{kind}")
    return _on_halves(found[root]) if kind == "bf16" else found[root]


def _flushed(of: Function) -> Function:
    return lambda *x: flush(of(*(flush(v) for v in x)))


def _not_negative(of: Function, kind: str) -> Function:
    if kind == "bf16":
        return lambda *x: (lambda y: np.where(y >> 15, u2(0), y))(of(*x))
    return lambda *x: np.maximum(of(*x), 0)


def _truncated(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y of signed numbers, towards zero."""
    q = np.abs(x.astype(np.int64)) // np.maximum(np.abs(y.astype(np.int64)), 1)
    return np.where((x < 0) != (y < 0), -q, q).astype(np.asarray(x).dtype)


def _high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The upper half of a product of 64-bit numbers."""
    product = [int(a) * int(b) >> 64 for a, b in np.broadcast(x, y)]
    return np.array(product, dtype=object).astype(np.int64 if x.dtype.kind == "i" else u8)


def _times(bits: int, signed: bool, part: str) -> Function:
    wide = (SIGNED if signed else UNSIGNED)[min(2 * bits, 64)]
    own = (SIGNED if signed else UNSIGNED)[bits]
    if part == "wide":
        return lambda x, y: x.astype(wide) * y.astype(wide)
    if part == "hi":
        if bits == 64:
            return _high
        return lambda x, y: ((x.astype(wide) * y.astype(wide)) >> wide(bits)).astype(own)
    return lambda x, y: x * y


def integer(root: str, mods: list[str], t: str) -> Function:
    """The function of an instruction on integers, in arrays of their own type."""
    bits, signed = bits_of(t), _signed(t)
    part = next((m for m in mods if m in ("lo", "hi", "wide")), "lo")
    if root == "mul":
        return _times(bits, signed, part)
    if root == "mad":
        product = _times(bits, signed, part)
        return lambda x, y, z: product(x, y) + z
    if root == "div":
        return _truncated if signed else (lambda x, y: x // np.maximum(y, y.dtype.type(1)))
    if root == "rem":
        return (lambda x, y: x - _truncated(x, y) * y) if signed else (lambda x, y: x % np.maximum(y, y.dtype.type(1)))
    if root in ("shl", "shr"):
        return _shift(root, t)
    if root in ("add", "sub") and "sat" in mods:
        return lambda x, y: np.clip(FLOAT[root](x.astype(np.int64), y), -(1 << 31), (1 << 31) - 1).astype(np.int32)
    if root == "sad":
        return lambda x, y, z: np.where(x < y, y - x, x - y) + z
    found = {
        "add": np.add,
        "sub": np.subtract,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
        "min": np.minimum,
        "max": np.maximum,
        "neg": np.negative,
        "abs": np.abs,
        "cnot": lambda x: (x == 0).astype(x.dtype),
        "popc": lambda x: np.array([int(v).bit_count() for v in x], dtype=u4),
        "clz": lambda x: np.array([bits - int(v).bit_length() for v in x], dtype=u4),
        "brev": lambda x: np.array([int(f"{int(v):0{bits}b}"[::-1], 2) for v in x], dtype=x.dtype),
    }
    if root not in found:
        raise Unknown(f"{root}.{t}")
    return found[root]


def _shift(root: str, t: str) -> Function:
    """Shifts by more than a number has bits leave nothing of it but its sign."""
    bits = bits_of(t)
    kind = (SIGNED if _signed(t) else UNSIGNED)[bits]
    of = np.left_shift if root == "shl" else np.right_shift
    if _signed(t):
        return lambda x, y: of(x, np.minimum(y, u4(bits - 1)).astype(kind))
    return lambda x, y: np.where(y < bits, of(x, np.minimum(y, u4(bits - 1)).astype(kind)), kind(0))


def field(signed: bool, bits: int) -> Function:
    """`bfe`."""

    def extract(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        start, length = start & u4(255), length & u4(255)
        wide = x.astype(SIGNED[64] if signed else u8)
        start = np.minimum(start, bits - 1 if signed else 63)
        if not signed:
            got = (wide >> start.astype(u8)) & ((u8(1) << np.minimum(length, 63).astype(u8)) - u8(1))
            return got.astype(x.dtype)
        length = np.minimum(length, bits - start)
        up = (64 - length.astype(np.int64)).clip(0, 63)
        got = ((wide >> start.astype(np.int64)) << up) >> up
        return np.where(length == 0, 0, got).astype(x.dtype)

    return extract


def inserted(x: np.ndarray, into: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """`bfi`."""
    wide = u8
    mask = ((wide(1) << (length & u4(255)).astype(wide)) - wide(1)) << (start & u4(255)).astype(wide)
    got = (into.astype(wide) & ~mask) | ((x.astype(wide) << (start & u4(255)).astype(wide)) & mask)
    return got.astype(into.dtype)


def funnel(mods: list[str]) -> Function:
    """`shf`: of two words, the lower one first."""
    left, wrap = "l" in mods, "wrap" in mods

    def shift(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        n = (by & u4(31) if wrap else np.minimum(by, u4(32))).astype(u8)
        both = (high.astype(u8) << u8(32)) | low.astype(u8)
        return ((both << n) >> u8(32) if left else both >> n).astype(u4)

    return shift


def logic(table: int) -> Function:
    """`lop3`."""
    known: dict[int, Function] = {
        0xEA: lambda a, b, c: (a & b) | c,
        0x6A: lambda a, b, c: (a & b) ^ c,
        0x96: lambda a, b, c: a ^ b ^ c,
        0xF8: lambda a, b, c: a | (b & c),
        0xC0: lambda a, b, c: a & b,
    }
    if table in known:
        return known[table]

    def general(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        got = (a ^ a) & b & c
        for i in range(8):
            if table >> i & 1:
                got = got | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return got

    return general


def packed(kind: str) -> Function:
    """`cvt.pack.sat` of two s32 to bytes: the first above the second, and these below the low half of a third word."""
    low, high = (-128, 127) if kind == "s8" else (0, 255)

    def pack(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        upper, lower = (np.clip(x, low, high).astype(np.int64) & 255 for x in (a, b))
        return (upper << 8 | lower | (np.asarray(c).astype(np.int64) & 0xFFFF) << 16).astype(u4)

    return pack


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """`prmt`: bytes of two words, or their signs."""
    a, b, selector = (np.ascontiguousarray(x) for x in np.broadcast_arrays(np.atleast_1d(a), b, selector))
    source = np.concatenate([a.view(u1).reshape(-1, 4), b.view(u1).reshape(-1, 4)], axis=1)
    nibbles = (selector[:, None] >> (4 * np.arange(4, dtype=u4))) & u4(15)
    got = np.take_along_axis(source, (nibbles & u4(7)).astype(np.int64), axis=1)
    signs = np.where(got >> 7, u1(255), u1(0))
    return np.ascontiguousarray(np.where(nibbles & u4(8), signs, got)).view(u4).reshape(-1)


def permuted_by(selector: int) -> Function:
    """`prmt` with a fixed selector."""
    picks = [selector >> 4 * i & 15 for i in range(4)]
    if any(p & 8 for p in picks):
        return lambda a, b: permuted(a, b, u4(selector))

    def permute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        n = max(np.size(a), np.size(b))
        source = np.empty((n, 8), u1)
        source[:, :4] = np.atleast_1d(a).view(u1).reshape(-1, 4)
        source[:, 4:] = np.atleast_1d(b).view(u1).reshape(-1, 4)
        return np.ascontiguousarray(source[:, picks]).view(u4).reshape(-1)

    return permute


def compared(how: str, t: str) -> Function:
    """`setp`'s comparisons; those of floats with `u` hold for NaN, too."""
    ordered: dict[str, Function] = {
        "eq": np.equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "lo": np.less,
        "ls": np.less_equal,
        "hi": np.greater,
        "hs": np.greater_equal,
    }
    if "f" not in t:
        return np.not_equal if how == "ne" else ordered[how]
    of = _of_floats(how, ordered)
    if t == "bf16":
        return lambda x, y: of(from_bf16(x), from_bf16(y))
    return of


def _of_floats(how: str, ordered: dict[str, Function]) -> Function:
    if how == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if how == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if how == "ne":
        return lambda x, y: (x != y) & ~(np.isnan(x) | np.isnan(y))
    if how == "neu":
        return np.not_equal
    if how in ordered:
        return ordered[how]
    base = ordered[how[:-1]]
    return lambda x, y: base(x, y) | np.isnan(x) | np.isnan(y)
