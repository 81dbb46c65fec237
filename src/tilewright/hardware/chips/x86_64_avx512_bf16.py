"""x86-64 with AVX-512, VNNI and BF16 (Zen 4, Cooper Lake, Sapphire Rapids without its tiles)."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

ZEN4 = "AMD Software Optimization Guide for Zen 4 (57647) 2.11: two 256-bit pipes, one 512-bit operation a cycle"
CACHES = "AMD Software Optimization Guide for Zen 4 (57647), load-store unit and caches: 32 KB, two 256-bit loads a cycle; 1 MB"
HOT_CHIPS = (
    "AMD Next Generation Zen 4 Core, Hot Chips 35 (2023), cache hierarchy: 32 bytes a cycle between levels; 32 MB of L3 a die"
)

CHIP = Chip(
    name="x86_64_avx512_bf16",
    kind="cpu",
    requires=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}),
    units=(
        MatrixUnit("s8", "s32", "vpdpbusd zmm", 64 * 2, ZEN4, (1, 16, 4)),
        MatrixUnit("bf16", "f32", "vdpbf16ps zmm", 32 * 2, ZEN4, (1, 16, 2)),
        MatrixUnit("f32", "f32", "vfmadd231ps zmm", 16 * 2, ZEN4, (1, 16, 1)),
        MatrixUnit("f64", "f64", "vfmadd231pd zmm", 8 * 2, ZEN4, (1, 8, 1)),
    ),
    notes=("vpdpbusd multiplies u8 by s8: signed operands need a correction by row sums",),
    levels=(
        MemoryLevel("L1d", 32 << 10, CACHES, bytes_per_cycle=64),
        MemoryLevel("L2", 1 << 20, HOT_CHIPS, bytes_per_cycle=32),
        MemoryLevel("L3", 32 << 20, HOT_CHIPS, bytes_per_cycle=32),
    ),
    registers_bytes=2048,
    source="Intel 64 and IA-32 Software Developer's Manual volume 1, vector registers: 32 of 512 bits",
)
