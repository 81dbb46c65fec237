"""x86-64 with AVX-512, VNNI and BF16 (Zen 4 and 5, Cooper Lake, Sapphire Rapids without its tiles)."""

from tilewright.hardware.target import Chip, MatrixUnit

ZEN4 = "AMD Software Optimization Guide for Zen 4 (57647) 2.11: two 256-bit pipes, one 512-bit operation a cycle"

CHIP = Chip(
    name="x86_64_avx512_bf16",
    kind="cpu",
    requires=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}),
    units=(
        MatrixUnit("s8", "s32", "vpdpbusd zmm", 64 * 2, ZEN4),
        MatrixUnit("bf16", "f32", "vdpbf16ps zmm", 32 * 2, ZEN4),
        MatrixUnit("f32", "f32", "vfmadd231ps zmm", 16 * 2, ZEN4),
        MatrixUnit("f64", "f64", "vfmadd231pd zmm", 8 * 2, ZEN4),
    ),
    notes=("vpdpbusd multiplies u8 by s8: signed operands need a correction by row sums",),
)
