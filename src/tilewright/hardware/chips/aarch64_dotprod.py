"""AArch64 with the dot products of Armv8.2 (Neoverse N1, Cortex-A76, Apple M1 and later)."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

NEOVERSE = "Arm Neoverse N1 Software Optimization Guide, 3.19 and 3.21: two 128-bit FMLA or SDOT a cycle"
CACHES = (
    "Arm Neoverse N1 Software Optimization Guide, pipeline overview: two 128-bit loads a cycle; 64 KB (its reference manual)"
)

CHIP = Chip(
    name="aarch64_dotprod",
    kind="cpu",
    requires=frozenset({"asimd", "asimddp"}),
    units=(
        MatrixUnit("s8", "s32", "sdot v.4s", 2 * 16 * 2, NEOVERSE, (1, 4, 4)),
        MatrixUnit("f32", "f32", "fmla v.4s", 2 * 4 * 2, NEOVERSE, (1, 4, 1)),
        MatrixUnit("f64", "f64", "fmla v.2d", 2 * 2 * 2, NEOVERSE, (1, 2, 1)),
        MatrixUnit("s8", "s32", "mla v.4s", 4 * 2, NEOVERSE, (1, 4, 1)),
    ),
    notes=("sdot multiplies s8 by s8 and udot u8 by u8; mixed signs go through mla on 32 bits",),
    levels=(MemoryLevel("L1d", 64 << 10, CACHES, bytes_per_cycle=32),),
    registers_bytes=512,
    source="Arm Architecture Reference Manual for A-profile, SIMD and floating-point registers: 32 of 128 bits",
)
