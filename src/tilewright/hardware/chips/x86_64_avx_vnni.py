"""x86-64 with AVX2 and the 256-bit VNNI (Alder Lake and later client cores)."""

from tilewright.hardware.target import Chip, MatrixUnit

INTEL = "Intel 64 and IA-32 Optimization Manual, 2.2: vpdpbusd ymm on two ports; two 256-bit FMA ports"

CHIP = Chip(
    name="x86_64_avx_vnni",
    kind="cpu",
    requires=frozenset({"avx2", "fma", "f16c", "avx_vnni"}),
    units=(
        MatrixUnit("s8", "s32", "vpdpbusd ymm", 2 * 32 * 2, INTEL),
        MatrixUnit("f32", "f32", "vfmadd231ps ymm", 2 * 8 * 2, INTEL),
        MatrixUnit("f64", "f64", "vfmadd231pd ymm", 2 * 4 * 2, INTEL),
    ),
    notes=("vpdpbusd multiplies u8 by s8: signed operands need a correction by row sums",),
)
