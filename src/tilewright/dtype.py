"""Element types, spelt as XLA HLO spells them.

Source of the ranges: OCP 8-bit Floating Point Specification 1.0 (f8e4m3fn, f8e5m2), Graphcore/AMD "8-bit Numerical
Formats for Deep Neural Networks" 2022 (the fnuz forms), OCP Microscaling Formats (MX) Specification 1.0 (f4e2m1fn), IEEE
754-2019 (f16, f32, f64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from tilewright.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch

Kind = Literal["pred", "int", "uint", "float", "opaque"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type; there is one object for each, so `is` compares them.

    Attributes:
        name: HLO spelling.
        kind: family.
        bits: width of one element as stored densely.
        min, max: smallest and largest finite value.
        storage: name of the torch dtype that carries it while a graph is evaluated. 4-bit integers travel one code to a
            byte there (torch has int4 storage but no kernels for it), 4-bit floats as the f8e4m3fn of the same value.
        epsilon: distance from 1.0 to the next larger value, 0 for integers.
        infinite: the type has infinities.
    """

    name: str
    kind: Kind
    bits: int
    min: float | int
    max: float | int
    storage: str
    epsilon: float = 0.0
    infinite: bool = False

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        return (dtype, (self.name,))  # a copy is the same object: types are compared by identity

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_signed(self) -> bool:
        return self.kind in ("int", "float")

    @property
    def accumulator(self) -> DType:
        """The type in which a matmul of this operand type accumulates: s32, f32, or the type itself if wider."""
        if self.is_integer:
            return self if self.bits >= 32 else S32
        return self if self.bits >= 32 else F32

    @property
    def lowest(self) -> float | int:
        """A lower bound of every value: minus infinity where the type has it, else `min`."""
        return -float("inf") if self.infinite else self.min

    @property
    def highest(self) -> float | int:
        """An upper bound of every value: infinity where the type has it, else `max`."""
        return float("inf") if self.infinite else self.max

    def holds(self, value: float) -> bool:
        """Tell whether a number is one of this type's, for floats up to rounding. NaN is one of any float type's."""
        if self.is_float:
            return (value != value and self.bits > 4) or self.min <= value <= self.max or value in (self.lowest, self.highest)
        whole = isinstance(value, int) or value.is_integer()
        return whole and self.min <= value <= self.max

    def size_bytes(self, elements: int) -> int:
        """Bytes that `elements` of this type occupy when stored densely."""
        return (elements * self.bits + 7) // 8

    def to_torch(self) -> torch.dtype:
        """The torch dtype that carries this type during evaluation."""
        import torch

        return cast("torch.dtype", getattr(torch, self.storage))

    def to_numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype (ml_dtypes for the narrow ones) that carries this type in memory, one element an item."""
        import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport] - NumPy knows its types by name from then on
        import numpy as np

        if self is F4E2M1FN:
            return np.dtype("float4_e2m1fn")
        return np.dtype(self.storage.replace("int8", "int4") if self.bits == 4 else self.storage)


def _int(bits: int, storage: str | None = None) -> DType:
    return DType(f"s{bits}", "int", bits, -(1 << bits - 1), (1 << bits - 1) - 1, storage or f"int{bits}")


def _uint(bits: int, storage: str | None = None) -> DType:
    return DType(f"u{bits}", "uint", bits, 0, (1 << bits) - 1, storage or f"uint{bits}")


def _float(name: str, bits: int, largest: float, storage: str, epsilon: float, *, infinite: bool = True) -> DType:
    return DType(name, "float", bits, -largest, largest, storage, epsilon, infinite)


PRED = DType("pred", "pred", 8, 0, 1, "bool")
S4, U4 = _int(4, "int8"), _uint(4, "uint8")
S8, U8, S16, U16, S32, U32, S64, U64 = _int(8), _uint(8), _int(16), _uint(16), _int(32), _uint(32), _int(64), _uint(64)
F4E2M1FN = _float("f4e2m1fn", 4, 6.0, "float8_e4m3fn", 2**-1, infinite=False)
F8E4M3FN = _float("f8e4m3fn", 8, 448.0, "float8_e4m3fn", 2**-3, infinite=False)
F8E4M3FNUZ = _float("f8e4m3fnuz", 8, 240.0, "float8_e4m3fnuz", 2**-3, infinite=False)
F8E5M2 = _float("f8e5m2", 8, 57344.0, "float8_e5m2", 2**-2)
F8E5M2FNUZ = _float("f8e5m2fnuz", 8, 57344.0, "float8_e5m2fnuz", 2**-2, infinite=False)
BF16 = _float("bf16", 16, 3.3895313892515355e38, "bfloat16", 2**-7)
F16 = _float("f16", 16, 65504.0, "float16", 2**-10)
F32 = _float("f32", 32, 3.4028234663852886e38, "float32", 2**-23)
F64 = _float("f64", 64, 1.7976931348623157e308, "float64", 2**-52)
# A value only `call` nodes make and read: strings, sequences, complex numbers, shapes known only at run time.
OPAQUE = DType("opaque", "opaque", 0, 0, 0, "opaque")

_ALL = (PRED, S4, U4, S8, U8, S16, U16, S32, U32, S64, U64)
_ALL_FLOAT = (F4E2M1FN, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, BF16, F16, F32, F64)
BY_NAME: dict[str, DType] = {d.name: d for d in (*_ALL, *_ALL_FLOAT, OPAQUE)}
_ALIASES = {
    **{
        f"{word}{bits}": f"{kind}{bits}"
        for word, kind in (("i", "s"), ("int", "s"), ("ui", "u"), ("uint", "u"))
        for bits in (4, 8, 16, 32, 64)
    },
    **{d.storage: d.name for d in _ALL_FLOAT},  # of two types in one storage the latter
    "float4_e2m1fn": "f4e2m1fn",
    "i1": "pred",
    "bool": "pred",
    "half": "f16",
    "float": "f32",
    "double": "f64",
}


def dtype(name: str | DType) -> DType:
    """The element type called `name`: HLO's spelling, or torch's, NumPy's and MLIR's as aliases.

    Raises:
        InputError: no such type.
    """
    if isinstance(name, DType):
        return name
    key = str(name).removeprefix("torch.").lower()
    found = BY_NAME.get(_ALIASES.get(key, key))
    if found is None:
        known = " ".join(n for n in BY_NAME if n != "opaque")
        raise InputError(f"unknown dtype {name!r}", hint=f"one of {known}")
    return found


def from_torch(t: torch.dtype) -> DType:
    """The element type stored as torch dtype `t` (4-bit types are never inferred: they need to be said)."""
    return dtype(str(t))


def from_numpy(t: np.dtype[np.generic]) -> DType:
    """The element type of NumPy (or ml_dtypes) dtype `t`."""
    return dtype(t.name)
