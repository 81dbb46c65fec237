"""Any x86-64: SSE2 is part of the architecture."""

from tilewright.hardware.target import Chip, MatrixUnit

SYSV = "x86-64 psABI: SSE2 is the baseline; a multiply and an add a cycle on 128 bits"

CHIP = Chip(
    name="x86_64",
    kind="cpu",
    requires=frozenset({"sse2"}),
    units=(
        MatrixUnit("f32", "f32", "mulps + addps", 4 * 2, SYSV, (1, 4, 1)),
        MatrixUnit("f64", "f64", "mulpd + addpd", 2 * 2, SYSV, (1, 2, 1)),
    ),
    family=True,
    registers_bytes=256,
    source="x86-64 psABI: 16 registers of 128 bits",
)
