"""The instructions that multiply, with the operands that each takes and the few lines that emit it. Chips name theirs in their
data file.

All work on vectors whose lanes are columns of the result. A lane of the right operand holds `k` neighbours along K of its
column, 4 bytes together; in the left operand every lane holds the same 4 bytes, of one row.

Two kinds have several rows in an accumulator (`tile`). In vector registers (bfmmla, smmla), a lane is as many times longer
along K, and the left operand's lanes are rows. Tile registers (AMX) hold `tile` such vectors each, one after the other along K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tilewright.candidates.llvm.expressions.text import Function, vec
from tilewright.dtype import BF16, F32, S8, S16, S32, U8, DType
from tilewright.hardware.target import Chip

Emit = Callable[[Function, str, str, str], str]


@dataclass(frozen=True)
class Dot:
    """acc[row][lane] += sum over k of lhs[row][k] * rhs[lane][k].

    Attributes:
        instruction: as the chip's data names it.
        lanes: columns of an operand vector.
        registers: vectors the processor has.
        lhs, rhs, acc: types it multiplies and adds up in.
        emit: the accumulator after it, from function, accumulator and both operands, each a vector of its type; or the number
            of a register, for an instruction on tiles.
        tile: rows of the result in an accumulator.
        tile_registers: registers are tiles of as many vectors, which `emit` is given the numbers of.
    """

    instruction: str
    lanes: int
    registers: int
    lhs: DType
    rhs: DType
    acc: DType
    emit: Emit
    tile: int = 1
    tile_registers: bool = False

    @property
    def rows(self) -> int:
        """Rows of the left operand in an operand vector."""
        return 1 if self.tile_registers else self.tile

    @property
    def lane_bytes(self) -> int:
        """Bytes along K in a lane of an operand."""
        return 4 * self.rows

    @property
    def k(self) -> int:
        """Elements of K in a lane."""
        return 8 * self.lane_bytes // self.rhs.bits

    @property
    def steps(self) -> int:
        """Lanes along K that an operand register holds."""
        return self.tile if self.tile_registers else 1

    def most_rows(self, nv: int) -> int:
        """Rows of a tile of `nv` vectors that stay in registers; 0 if not one does.

        Beside the accumulators: a row of the right operand, a vector of the left one, and what an instruction of two steps
        needs; on Arm, whose broadcasts are loads of their own, the one on its way. Tile registers are taken two by two.
        Vectors of several rows are packed, and read, as many at once.
        """
        if self.tile_registers:
            return 2 * self.tile if nv == 2 else 0
        if nv % self.rows:
            return 0
        return max(0, min(24, (self.registers - nv - (2 if self.lanes > 4 else 3)) // nv * self.rows))

    @property
    def vector_bytes(self) -> int:
        """Bytes of an operand vector."""
        return self.lanes * self.lane_bytes

    @property
    def element(self) -> str:
        return {F32: "float", BF16: "bfloat", S16: "i16", S32: "i32"}.get(self.rhs, "i8")

    @property
    def operand(self) -> str:
        """The type of an operand vector."""
        return vec(self.lanes * self.k, self.element)

    @property
    def accumulator(self) -> str:
        return vec(self.lanes * self.rows, self.word)

    @property
    def word(self) -> str:
        """The type of an element of the result."""
        return "float" if self.acc is F32 else "i32"


def _fma(lanes: int, registers: int, instruction: str) -> Dot:
    t = vec(lanes, "float")

    def emit(f: Function, acc: str, lhs: str, rhs: str) -> str:
        return f.intrinsic(f"llvm.fma.v{lanes}f32", t, (t, lhs), (t, rhs), (t, acc))

    return Dot(instruction, lanes, registers, F32, F32, F32, emit)


def _called(instruction: str, lanes: int, registers: int, lhs: DType, rhs: DType, acc: DType, name: str, tile: int = 1) -> Dot:
    """An instruction with an intrinsic of its own that takes (acc, lhs, rhs)."""
    dot = Dot(instruction, lanes, registers, lhs, rhs, acc, lambda f, a, x, y: emit(f, a, x, y), tile)

    def emit(f: Function, a: str, x: str, y: str) -> str:
        return f.intrinsic(name, dot.accumulator, (dot.accumulator, a), (dot.operand, x), (dot.operand, y))

    return dot


PAIRS = "vdpbf16ps zmm"  # where it is, one instruction rounds to bf16 too


def _pairs() -> Dot:
    """bf16 pairs. What all lanes share goes last, where it can be read from memory by the instruction itself."""
    bare = _called(PAIRS, 16, 32, BF16, BF16, F32, "llvm.x86.avx512bf16.dpbf16ps.512")
    return replace(bare, emit=lambda f, acc, x, y: bare.emit(f, acc, y, x))


def _mmla(instruction: str, lhs: DType, rhs: DType, acc: DType, types: str = "") -> Dot:
    """NEON: 2 rows by 8 bytes of K times 8 bytes of K by 2 columns."""
    name = ".".join(["llvm.aarch64.neon", instruction, *([types] if types else [])])
    return _called(f"{instruction} v.4s", 2, 32, lhs, rhs, acc, name, 2)


def _vpdpbusd(lanes: int, registers: int, instruction: str, lhs: DType) -> Dot:
    """u8 by s8: whichever side is unsigned goes first."""
    acc, operand = vec(lanes, "i32"), vec(4 * lanes, "i8")
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"

    def emit(f: Function, a: str, x: str, y: str) -> str:
        first, second = (x, y) if lhs is U8 else (y, x)
        return f.intrinsic(name, acc, (acc, a), (operand, first), (operand, second))

    return Dot(instruction, lanes, registers, lhs, S8 if lhs is U8 else U8, S32, emit)


def _vpmaddwd(lanes: int, registers: int, instruction: str) -> Dot:
    """s16 pairs: exact for all 8-bit operands, where vpmaddubsw would saturate."""
    acc, operand = vec(lanes, "i32"), vec(2 * lanes, "i16")
    name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[lanes]

    def emit(f: Function, a: str, x: str, y: str) -> str:
        return f.v(f"add {acc} {a}, {f.intrinsic(name, acc, (operand, x), (operand, y))}")

    return Dot(instruction, lanes, registers, S16, S16, S32, emit)


def _multiply_add(lanes: int, registers: int, instruction: str) -> Dot:
    acc = vec(lanes, "i32")

    def emit(f: Function, a: str, x: str, y: str) -> str:
        return f.v(f"add {acc} {a}, {f.v(f'mul {acc} {x}, {y}')}")

    return Dot(instruction, lanes, registers, S32, S32, S32, emit)


def _tdp(instruction: str, lhs: DType, rhs: DType, acc: DType) -> Dot:
    """AMX: 16 rows by 64 bytes of K times 16 groups of K by 16 columns."""

    def emit(f: Function, c: str, a: str, b: str) -> str:
        return f.intrinsic(f"llvm.x86.{instruction}", "void", *[("i8 immarg", number) for number in (c, a, b)])

    return Dot(instruction, 16, 8, lhs, rhs, acc, emit, 16, tile_registers=True)


_NEON = "llvm.aarch64.neon"
DOTS: dict[str, tuple[Dot, ...]] = {
    "tdpbssd": (
        _tdp("tdpbssd", S8, S8, S32),
        _tdp("tdpbsud", S8, U8, S32),
        _tdp("tdpbusd", U8, S8, S32),
        _tdp("tdpbuud", U8, U8, S32),
    ),
    "tdpbf16ps": (_tdp("tdpbf16ps", BF16, BF16, F32),),
    "vfmadd231ps zmm": (_fma(16, 32, "vfmadd231ps zmm"),),
    "vfmadd231ps ymm": (_fma(8, 16, "vfmadd231ps ymm"),),
    "fmla v.4s": (_fma(4, 32, "fmla v.4s"),),
    PAIRS: (_pairs(),),
    "bfdot v.4s": (_called("bfdot v.4s", 4, 32, BF16, BF16, F32, f"{_NEON}.bfdot.v4f32.v8bf16"),),
    "bfmmla v.4s": (_mmla("bfmmla", BF16, BF16, F32),),
    "vpdpbusd zmm": (_vpdpbusd(16, 32, "vpdpbusd zmm", S8), _vpdpbusd(16, 32, "vpdpbusd zmm", U8)),
    "vpdpbusd ymm": (_vpdpbusd(8, 16, "vpdpbusd ymm", S8), _vpdpbusd(8, 16, "vpdpbusd ymm", U8)),
    "vpmaddwd zmm": (_vpmaddwd(16, 32, "vpmaddwd zmm"),),
    "vpmaddwd ymm": (_vpmaddwd(8, 16, "vpmaddwd ymm"),),
    "sdot v.4s": (
        _called("sdot v.4s", 4, 32, S8, S8, S32, f"{_NEON}.sdot.v4i32.v16i8"),
        _called("udot v.4s", 4, 32, U8, U8, S32, f"{_NEON}.udot.v4i32.v16i8"),
    ),
    "smmla v.4s": (
        _mmla("smmla", S8, S8, S32, "v4i32.v16i8"),
        _mmla("ummla", U8, U8, S32, "v4i32.v16i8"),
        _mmla("usmmla", U8, S8, S32, "v4i32.v16i8"),
    ),
    "mla v.4s": (_multiply_add(4, 32, "mla v.4s"),),
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A dot for two operands.

    Attributes:
        dot: the instruction.
        shift_sign: the right operand's codes are shifted into the other sign's range (x ^ 0x80: x + 128 as u8, x - 128 as s8).
        compensation: the factor of each row's sum of the left operand that is added to the row's results, to undo the shift;
            0 without one.
    """

    dot: Dot
    shift_sign: bool = False
    compensation: int = 0


def choose(lhs: DType, rhs: DType, acc: DType, chip: Chip) -> Choice | None:
    """The chip's best instruction for a product of these types, None if it has none that is exact for them."""
    units = [[d for d in DOTS.get(u.instruction, ()) if d.acc is acc] for u in chip.units]
    if acc is F32:
        narrow = all(t.is_float and (t is BF16 or t.bits <= 8) for t in (lhs, rhs))  # which bf16 holds
        kinds = [BF16, F32] if narrow else [F32]
        for kind in kinds:
            found = next((d for unit in units for d in unit if d.lhs is kind), None)
            if found is not None and lhs.bits <= 32 >= rhs.bits:
                return Choice(found)
        return None
    if not (lhs.is_integer and rhs.is_integer and max(lhs.bits, rhs.bits) <= 8):
        return None
    signs = tuple(S8 if t.kind == "int" else U8 for t in (lhs, rhs))
    for unit in units:
        exact = next((d for d in unit if (d.lhs, d.rhs) == signs or d.lhs.bits > 8), None)
        if exact is not None:
            return Choice(exact)
        shifted = next((d for d in unit if d.lhs is signs[0]), None)
        if shifted is not None:
            return Choice(shifted, shift_sign=True, compensation=-128 if shifted.rhs is U8 else 128)
    return None
