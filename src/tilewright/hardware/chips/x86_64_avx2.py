"""x86-64 with AVX2 and FMA (Haswell, Zen and later): the family every newer x86-64 falls back to."""

from tilewright.hardware.target import Chip, MatrixUnit

INTEL_GUIDE = "Intel Intrinsics Guide 3.6.9; two 256-bit FMA ports (Intel 64 and IA-32 Optimization Manual, 2.4)"

CHIP = Chip(
    name="x86_64_avx2",
    kind="cpu",
    requires=frozenset({"avx2", "fma", "f16c"}),
    units=(
        MatrixUnit("f32", "f32", "vfmadd231ps ymm", 2 * 8 * 2, INTEL_GUIDE),
        MatrixUnit("f64", "f64", "vfmadd231pd ymm", 2 * 4 * 2, INTEL_GUIDE),
        MatrixUnit("s8", "s32", "vpmaddwd ymm", 2 * 16 * 2, INTEL_GUIDE),
    ),
    notes=("vpmaddubsw takes bytes and is twice as fast, but saturates its 16-bit sums: exact only below 2**15",),
    family=True,
)
