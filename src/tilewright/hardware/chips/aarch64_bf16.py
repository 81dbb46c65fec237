"""AArch64 with the bfloat16 products of Armv8.6, where the 8-bit matrix products are not reported."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

NEOVERSE = "Arm Neoverse V1 Software Optimization Guide, 3.20 to 3.22: four 128-bit FMLA, SDOT or BFDOT a cycle"
CACHES = (
    "Arm Neoverse V1 Software Optimization Guide, pipeline overview: three 128-bit loads a cycle; 64 KB (its reference manual)"
)

CHIP = Chip(
    name="aarch64_bf16",
    kind="cpu",
    requires=frozenset({"asimd", "asimddp", "bf16"}),
    units=(
        MatrixUnit("s8", "s32", "sdot v.4s", 4 * 16 * 2, NEOVERSE, (1, 4, 4)),
        MatrixUnit("bf16", "f32", "bfdot v.4s", 4 * 8 * 2, NEOVERSE, (1, 4, 2)),
        MatrixUnit("f32", "f32", "fmla v.4s", 4 * 4 * 2, NEOVERSE, (1, 4, 1)),
        MatrixUnit("f64", "f64", "fmla v.2d", 4 * 2 * 2, NEOVERSE, (1, 2, 1)),
        MatrixUnit("s8", "s32", "mla v.4s", 2 * 4 * 2, NEOVERSE, (1, 4, 1)),
    ),
    levels=(MemoryLevel("L1d", 64 << 10, CACHES, bytes_per_cycle=48),),
    registers_bytes=512,
    source="Arm Architecture Reference Manual for A-profile, SIMD and floating-point registers: 32 of 128 bits",
)
