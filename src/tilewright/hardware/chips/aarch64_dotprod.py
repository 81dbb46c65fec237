"""AArch64 with the dot products of Armv8.2 (Neoverse N1, Cortex-A76, Apple M1 and later)."""

from tilewright.hardware.target import Chip, MatrixUnit

NEOVERSE = "Arm Neoverse N1 Software Optimization Guide, 3.19 and 3.21: two 128-bit FMLA or SDOT a cycle"

CHIP = Chip(
    name="aarch64_dotprod",
    kind="cpu",
    requires=frozenset({"asimd", "asimddp"}),
    units=(
        MatrixUnit("s8", "s32", "sdot v.4s", 2 * 16 * 2, NEOVERSE),
        MatrixUnit("f32", "f32", "fmla v.4s", 2 * 4 * 2, NEOVERSE),
        MatrixUnit("f64", "f64", "fmla v.2d", 2 * 2 * 2, NEOVERSE),
        MatrixUnit("s8", "s32", "mla v.4s", 4 * 2, NEOVERSE),
    ),
    notes=("sdot multiplies s8 by s8 and udot u8 by u8; mixed signs go through mla on 32 bits",),
)
