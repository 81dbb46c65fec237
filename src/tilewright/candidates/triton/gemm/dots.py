"""Choice of the dot that multiplies a pair of types on an architecture, and what has to be done to the operands and the
sums."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.candidates.triton.expressions.printer import FP8
from tilewright.candidates.triton.runtime.module import Arch
from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F16, F32, S4, S8, S32, U4, U8, DType
from tilewright.schedule.candidate import Unsupported

# Ada and Hopper keep about 14 bits of a sum of 8-bit float products (DeepSeek-V3 Technical Report, arXiv 2412.19437, 3.3.2):
# it is added up in f32 as often as cuBLASLt does.
SHORT_SUMS = (89, 90)
PROMOTE_EVERY = 128
MOST_CODES = (1 << 17) - 256  # (-128)^2 times 2^17 is 2^31, and the last step reaches past the end
SHORT_SUM_BITS, SHORT_SUM_ROUNDOFF = 14, 2.0**-13
TF32_ROUNDOFF = 2.0**-10  # of both operands together
FIRST_WITH_UNITS = 80
NATIVE_FP8: dict[int | str, tuple[DType, ...]] = {
    **dict.fromkeys((89, 90, 100, 103, 120, "gfx950"), (F8E4M3FN, F8E5M2)),
    "gfx942": (F8E4M3FNUZ, F8E5M2FNUZ),
}


@dataclass(frozen=True)
class Dot:
    """The way in which a tile is multiplied.

    Attributes:
        operand: type of both operands there (of 8-bit floats the right one may be another).
        unit: the type whose matrix unit does it, as chips name it.
        acc: type of the sums.
        lhs_flips, rhs_flips: u8 multiplied as s8: 128 is taken off, and 128 times the other operand's sums added.
        precision: that of f32 products, by Triton's name; empty for other types.
        promote: sums are carried over to f32 after so many products; 0 for never.
        roundoff: see `Kernel.roundoff`.
    """

    operand: DType
    unit: str
    acc: DType
    lhs_flips: bool = False
    rhs_flips: bool = False
    precision: str = ""
    promote: int = 0
    roundoff: float = 0.0


def choose(lhs: DType, rhs: DType, acc: DType, depth: int, arch: Arch, *, tf32: bool = False) -> Dot:
    """The dot for operands of these types, `depth` of them along K; f32 rounded to 10 bits of fraction where `tf32` allows it.

    Raises:
        Unsupported: a sentence.
    """
    if arch.backend == "cuda" and arch.capability < FIRST_WITH_UNITS:
        raise Unsupported(f"Triton uses no matrix unit before sm_{FIRST_WITH_UNITS}")
    if acc is S32:
        codes = (S4, U4, S8, U8)
        if lhs not in codes or rhs not in codes:
            raise Unsupported(f"Triton multiplies integers of 8 bits, not {lhs} x {rhs}")
        if depth >= MOST_CODES:
            raise Unsupported(f"sums of {depth} products could leave 32 bits, where Triton's dot does not wrap")
        return Dot(S8, "s8", S32, lhs is U8, rhs is U8)
    if acc is not F32:
        raise Unsupported(f"generated kernels add up in f32 or s32, not {acc}")
    pair = {lhs, rhs}
    native = NATIVE_FP8.get(arch.name, ())
    if pair <= set(native) and (lhs is rhs or arch.backend == "cuda"):
        short = arch.capability in SHORT_SUMS
        unit = (F8E4M3FNUZ if F8E4M3FNUZ in native else F8E4M3FN).name
        promote, roundoff = (PROMOTE_EVERY, SHORT_SUM_ROUNDOFF) if short else (0, 0.0)
        return Dot(lhs, unit, F32, promote=promote, roundoff=roundoff)
    if pair <= {F16, *FP8}:
        return Dot(F16, "f16", F32)
    if pair <= {BF16, *FP8}:
        return Dot(BF16, "bf16", F32)
    if pair <= {F32, F16, BF16, *FP8}:
        if tf32 and arch.backend == "cuda":
            return Dot(F32, "tf32", F32, precision="tf32", roundoff=TF32_ROUNDOFF)
        return Dot(F32, "f32", F32, precision="ieee")
    raise Unsupported(f"{lhs} x {rhs} has no dot")
