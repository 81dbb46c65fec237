"""Any AArch64: Advanced SIMD is part of the architecture."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

NEOVERSE = "Arm Neoverse N1 Software Optimization Guide, 3.19: two 128-bit FMLA a cycle"
CACHES = (
    "Arm Neoverse N1 Software Optimization Guide, pipeline overview: two 128-bit loads a cycle; 64 KB (its reference manual)"
)

CHIP = Chip(
    name="aarch64",
    kind="cpu",
    requires=frozenset({"asimd"}),
    units=(
        MatrixUnit("f32", "f32", "fmla v.4s", 2 * 4 * 2, NEOVERSE, (1, 4, 1)),
        MatrixUnit("f64", "f64", "fmla v.2d", 2 * 2 * 2, NEOVERSE, (1, 2, 1)),
        MatrixUnit("s8", "s32", "mla v.4s", 4 * 2, NEOVERSE, (1, 4, 1)),
    ),
    family=True,
    levels=(MemoryLevel("L1d", 64 << 10, CACHES, bytes_per_cycle=32),),
    registers_bytes=512,
    source="Arm Architecture Reference Manual for A-profile, SIMD and floating-point registers: 32 of 128 bits",
)
