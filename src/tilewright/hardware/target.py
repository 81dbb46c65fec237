"""Machines as data: matrix units and memory levels with their rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tilewright.dtype import DType

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class MatrixUnit:
    """The instruction that multiplies a type.

    Attributes:
        operand: dtype of both operands, HLO spelling.
        acc: accumulator dtype.
        instruction: its mnemonic.
        ops_per_cycle: multiplies plus adds a cycle on one core or SM.
        source: the document that states the rate.
        shape: m, n, k that one instruction multiplies; a vector instruction has one row.
    """

    operand: str
    acc: str
    instruction: str
    ops_per_cycle: int
    source: str
    shape: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class MemoryLevel:
    """A cache, or memory itself.

    Attributes:
        name: "L1d", "L2", "L3" or "memory".
        bytes: its size: of one core's for a processor, of the whole for a GPU.
        source: the document that states size and rate.
        bytes_per_cycle: bytes a cycle that one core reads from it, 0 where unknown.
        gbps: 1e9 bytes a second that all cores or SMs together read from it, 0 where unknown.
    """

    name: str
    bytes: int
    source: str
    bytes_per_cycle: float = 0.0
    gbps: float = 0.0


@dataclass(frozen=True)
class PeerLink:
    """The connection of chips of a kind to each other, or to their host.

    Attributes:
        name: "NVLink 4", "PCIe 5.0 x16".
        gbps: 1e9 bytes a second in each direction, of all of a chip's links together.
        source: the document that states it.
    """

    name: str
    gbps: float
    source: str


@dataclass(frozen=True)
class Chip:
    """One kind of processor: a data file in this folder, found by file name.

    Attributes:
        name: identifier ("x86_64_avx512_vnni").
        kind: device it is reached through.
        requires: features the machine must report, as the operating system or driver names them (all of them).
        units: matrix units, best first for each operand type.
        notes: sentences with their sources that do not fit a number.
        family: stands for every processor of its kind that has no file of its own.
        levels: memories, the nearest first. What the machine reports of their sizes comes before these.
        links: what joins several of them, the fastest first.
        sms: cores, CUs or SMs of the whole chip, 0 where models differ.
        mhz: clock in MHz at which the sources state its rates, 0 where models differ.
        registers_bytes: bytes of registers for vectors and matrices, of one core or SM.
        shared_bytes: bytes of memory that one block of threads may share; 0 on a processor.
        source: the document that states the four numbers before.
        named: pattern of the marketing names it has, of a processor "maker family F model M", where others report the same
            features; empty for all.
    """

    name: str
    kind: DeviceKind
    requires: frozenset[str]
    units: tuple[MatrixUnit, ...]
    notes: tuple[str, ...] = ()
    family: bool = False
    levels: tuple[MemoryLevel, ...] = ()
    links: tuple[PeerLink, ...] = ()
    sms: int = 0
    mhz: int = 0
    registers_bytes: int = 0
    shared_bytes: int = 0
    source: str = ""
    named: str = ""

    def level(self, name: str) -> MemoryLevel | None:
        """A memory by name, None if nothing is known of it."""
        return next((x for x in self.levels if x.name == name), None)


@dataclass(frozen=True)
class Target:
    """The machine at hand.

    Attributes:
        name: marketing name, as the machine reports it.
        chip: the data file it matched.
        kind, index: the torch device.
        cores: threads a CPU kernel may use; SMs on a GPU.
        features: what the machine reports it has.
        caches_bytes: size by level ("L1d", "L2", "L3").
        peak_gops: measured rate by operand dtype, in 1e9 operations a second; empty until measured.
        read_gbps, copy_gbps: measured memory bandwidth in 1e9 bytes a second, 0 until measured.
        exact_match: the chip's file is of this very model, by its name; False where it stands for several.
        noise: why the measured rates are not reliable, "" if they are.
    """

    name: str
    chip: Chip
    kind: DeviceKind
    cores: int
    index: int = 0
    features: frozenset[str] = frozenset()
    caches_bytes: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    peak_gops: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    read_gbps: float = 0.0
    copy_gbps: float = 0.0
    exact_match: bool = True
    noise: str = ""

    @property
    def device(self) -> str:
        """The device's name as torch spells it."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def peak_for(self, dtype: DType) -> float:
        """Measured rate for operands of `dtype` in 1e9 ops/s, or of the nearest wider unit's; 0 while unmeasured."""
        return self.peak_gops.get(self.unit_for(dtype) or "", 0.0)

    def unit_for(self, dtype: DType) -> str | None:
        """The operand type whose measured rate that is; None while unmeasured."""
        return next((name for name in (dtype.name, *wider_units(dtype.name)) if name in self.peak_gops), None)

    def limit_us(self, ops: int, bytes: int, dtype: DType) -> float:
        """The least time the measured ceilings allow for `ops` on `dtype` operands and `bytes` of traffic; 0 unmeasured."""
        peak, bandwidth = self.peak_for(dtype), self.read_gbps
        return max(ops / peak / 1e3 if peak else 0.0, bytes / bandwidth / 1e3 if bandwidth else 0.0)


# Where a chip has no unit for a type, the unit that ends up doing the work after an exact conversion.
_WIDER_UNIT = {
    **dict.fromkeys(("u8", "s4", "u4", "pred"), ("s8",)),
    **dict.fromkeys(("f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz"), ("bf16", "f16", "f32")),
    **dict.fromkeys(("bf16", "f16", "s8", "s16", "u16"), ("f32",)),
    **dict.fromkeys(("s32", "u32", "s64", "u64"), ("f64", "f32")),
}


def wider_units(operand: str) -> tuple[str, ...]:
    """Types whose unit does the work of another's where a chip has none for it, the narrowest first."""
    return _WIDER_UNIT.get(operand, ())
