"""x86-64 with AVX-512 and VNNI but no BF16 (Cascade Lake, Ice Lake, Tiger Lake)."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

INTEL = "Intel 64 and IA-32 Optimization Manual, 2.5 (Ice Lake): 512-bit FMA and vpdpbusd on ports 0 and 5"
CACHES = (
    "Intel 64 and IA-32 Optimization Manual, cache parameters of Ice Lake: 48 KB at 128 bytes a cycle, 512 KB sustaining 48"
)

CHIP = Chip(
    name="x86_64_avx512_vnni",
    kind="cpu",
    requires=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}),
    units=(
        MatrixUnit("s8", "s32", "vpdpbusd zmm", 2 * 64 * 2, INTEL, (1, 16, 4)),
        MatrixUnit("f32", "f32", "vfmadd231ps zmm", 2 * 16 * 2, INTEL, (1, 16, 1)),
        MatrixUnit("f64", "f64", "vfmadd231pd zmm", 2 * 8 * 2, INTEL, (1, 8, 1)),
    ),
    notes=(
        "vpdpbusd multiplies u8 by s8: signed operands need a correction by row sums",
        "client models have no 512-bit multiplier on port 5, and reach half",
    ),
    levels=(
        MemoryLevel("L1d", 48 << 10, CACHES, bytes_per_cycle=128),
        MemoryLevel("L2", 512 << 10, CACHES, bytes_per_cycle=48),
    ),
    registers_bytes=2048,
    source="Intel 64 and IA-32 Software Developer's Manual volume 1, vector registers: 32 of 512 bits",
)
