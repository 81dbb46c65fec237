"""x86-64 with AVX2 and the 256-bit VNNI (Alder Lake and later client cores)."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

INTEL = "Intel 64 and IA-32 Optimization Manual, 2.2: vpdpbusd ymm on two ports; two 256-bit FMA ports"
CACHES = (
    "Intel 64 and IA-32 Optimization Manual, cache parameters of Golden Cove: 48 KB at 96 bytes a cycle, 1280 KB sustaining 48"
)

CHIP = Chip(
    name="x86_64_avx_vnni",
    kind="cpu",
    requires=frozenset({"avx2", "fma", "f16c", "avx_vnni"}),
    units=(
        MatrixUnit("s8", "s32", "vpdpbusd ymm", 2 * 32 * 2, INTEL, (1, 8, 4)),
        MatrixUnit("f32", "f32", "vfmadd231ps ymm", 2 * 8 * 2, INTEL, (1, 8, 1)),
        MatrixUnit("f64", "f64", "vfmadd231pd ymm", 2 * 4 * 2, INTEL, (1, 4, 1)),
    ),
    notes=("vpdpbusd multiplies u8 by s8: signed operands need a correction by row sums",),
    levels=(
        MemoryLevel("L1d", 48 << 10, CACHES, bytes_per_cycle=96),
        MemoryLevel("L2", 1280 << 10, CACHES, bytes_per_cycle=48),
    ),
    registers_bytes=512,
    source="Intel 64 and IA-32 Software Developer's Manual volume 1, vector registers: 16 of 256 bits",
)
