"""x86-64 with AVX2 and FMA (Haswell, Zen and later): the family every newer x86-64 falls back to."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

INTEL_GUIDE = "Intel Intrinsics Guide 3.6.9; two 256-bit FMA ports (Intel 64 and IA-32 Optimization Manual, 2.4)"
CACHES = "Intel 64 and IA-32 Optimization Manual, cache parameters of Haswell: 32 KB at 64 bytes a cycle, 256 KB at 64"

CHIP = Chip(
    name="x86_64_avx2",
    kind="cpu",
    requires=frozenset({"avx2", "fma", "f16c"}),
    units=(
        MatrixUnit("f32", "f32", "vfmadd231ps ymm", 2 * 8 * 2, INTEL_GUIDE, (1, 8, 1)),
        MatrixUnit("f64", "f64", "vfmadd231pd ymm", 2 * 4 * 2, INTEL_GUIDE, (1, 4, 1)),
        MatrixUnit("s8", "s32", "vpmaddwd ymm", 2 * 16 * 2, INTEL_GUIDE, (1, 8, 2)),
    ),
    notes=("vpmaddubsw takes bytes and is twice as fast, but saturates its 16-bit sums: exact only below 2**15",),
    family=True,
    levels=(
        MemoryLevel("L1d", 32 << 10, CACHES, bytes_per_cycle=64),
        MemoryLevel("L2", 256 << 10, CACHES, bytes_per_cycle=64),
    ),
    registers_bytes=512,
    source="Intel 64 and IA-32 Software Developer's Manual volume 1, vector registers: 16 of 256 bits",
)
