"""x86-64 with AVX-512 alone (Skylake-X and Skylake-SP)."""

from tilewright.hardware.target import Chip, MatrixUnit

INTEL = "Intel 64 and IA-32 Optimization Manual, 2.6 (Skylake Server): 512-bit FMA and multiplies on ports 0 and 5"

CHIP = Chip(
    name="x86_64_avx512",
    kind="cpu",
    requires=frozenset({"avx512f", "avx512bw", "avx512vl"}),
    units=(
        MatrixUnit("f32", "f32", "vfmadd231ps zmm", 2 * 16 * 2, INTEL),
        MatrixUnit("f64", "f64", "vfmadd231pd zmm", 2 * 8 * 2, INTEL),
        MatrixUnit("s8", "s32", "vpmaddwd zmm", 2 * 32 * 2, INTEL),
    ),
    notes=("some models have no multiplier on port 5, and reach half",),
)
