"""x86-64 with AVX-512 alone (Skylake-X and Skylake-SP)."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

INTEL = "Intel 64 and IA-32 Optimization Manual, 2.6 (Skylake Server): 512-bit FMA and multiplies on ports 0 and 5"
CACHES = (
    "Intel 64 and IA-32 Optimization Manual, cache parameters of Skylake Server: 32 KB at 128 bytes a cycle, 1 MB sustaining 52"
)

CHIP = Chip(
    name="x86_64_avx512",
    kind="cpu",
    requires=frozenset({"avx512f", "avx512bw", "avx512vl"}),
    units=(
        MatrixUnit("f32", "f32", "vfmadd231ps zmm", 2 * 16 * 2, INTEL, (1, 16, 1)),
        MatrixUnit("f64", "f64", "vfmadd231pd zmm", 2 * 8 * 2, INTEL, (1, 8, 1)),
        MatrixUnit("s8", "s32", "vpmaddwd zmm", 2 * 32 * 2, INTEL, (1, 16, 2)),
    ),
    notes=("some models have no multiplier on port 5, and reach half",),
    levels=(
        MemoryLevel("L1d", 32 << 10, CACHES, bytes_per_cycle=128),
        MemoryLevel("L2", 1 << 20, CACHES, bytes_per_cycle=52),
    ),
    registers_bytes=2048,
    source="Intel 64 and IA-32 Software Developer's Manual volume 1, vector registers: 32 of 512 bits",
)
