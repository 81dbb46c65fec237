"""Any AArch64: Advanced SIMD is part of the architecture."""

from tilewright.hardware.target import Chip, MatrixUnit

NEOVERSE = "Arm Neoverse N1 Software Optimization Guide, 3.19: two 128-bit FMLA a cycle"

CHIP = Chip(
    name="aarch64",
    kind="cpu",
    requires=frozenset({"asimd"}),
    units=(
        MatrixUnit("f32", "f32", "fmla v.4s", 2 * 4 * 2, NEOVERSE),
        MatrixUnit("f64", "f64", "fmla v.2d", 2 * 2 * 2, NEOVERSE),
        MatrixUnit("s8", "s32", "mla v.4s", 4 * 2, NEOVERSE),
    ),
    family=True,
)
