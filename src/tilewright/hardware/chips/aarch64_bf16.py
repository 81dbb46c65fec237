"""AArch64 with the bfloat16 and 8-bit matrix extensions of Armv8.6 (Neoverse V1 and N2, Graviton 3 and 4)."""

from tilewright.hardware.target import Chip, MatrixUnit

NEOVERSE = "Arm Neoverse V1 Software Optimization Guide, 3.20 to 3.22: four 128-bit FMLA, SDOT or BFDOT a cycle"

CHIP = Chip(
    name="aarch64_bf16",
    kind="cpu",
    requires=frozenset({"asimd", "asimddp", "bf16"}),
    units=(
        MatrixUnit("s8", "s32", "sdot v.4s", 4 * 16 * 2, NEOVERSE),
        MatrixUnit("bf16", "f32", "bfdot v.4s", 4 * 8 * 2, NEOVERSE),
        MatrixUnit("f32", "f32", "fmla v.4s", 4 * 4 * 2, NEOVERSE),
        MatrixUnit("f64", "f64", "fmla v.2d", 4 * 2 * 2, NEOVERSE),
        MatrixUnit("s8", "s32", "mla v.4s", 2 * 4 * 2, NEOVERSE),
    ),
    notes=("bfmmla and smmla do twice as much, on 2 x 2 blocks that no kernel here is laid out for",),
)
