"""AMD Zen 5 with 512-bit data paths: servers (family 1Ah, models below 20h), desktops (40h to 4Fh), Strix Halo (70h to 7Fh)."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

GUIDE = "AMD, Software Optimization Guide for the Zen5 Microarchitecture (58455)"
PIPES = f"{GUIDE}, 2.11: two 512-bit pipes multiply and add each cycle"
CACHES = f"{GUIDE}, 2.6 and 2.12: 48 KB, two 512-bit loads a cycle; L2 1 MB, 64 bytes a cycle to L1"

CHIP = Chip(
    name="x86_64_zen5",
    kind="cpu",
    requires=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}),
    named=r"AuthenticAMD family 26 model (\d|[12]\d|3[01]|6[4-9]|7\d|11[2-9]|12[0-7])$",
    units=(
        MatrixUnit("s8", "s32", "vpdpbusd zmm", 2 * 64 * 2, PIPES, (1, 16, 4)),
        MatrixUnit("bf16", "f32", "vdpbf16ps zmm", 2 * 32 * 2, PIPES, (1, 16, 2)),
        MatrixUnit("f32", "f32", "vfmadd231ps zmm", 2 * 16 * 2, PIPES, (1, 16, 1)),
        MatrixUnit("f64", "f64", "vfmadd231pd zmm", 2 * 8 * 2, PIPES, (1, 8, 1)),
    ),
    notes=("vpdpbusd multiplies u8 by s8: signed operands need a correction by row sums",),
    levels=(
        MemoryLevel("L1d", 48 << 10, CACHES, bytes_per_cycle=128),
        MemoryLevel("L2", 1 << 20, CACHES, bytes_per_cycle=64),
        MemoryLevel("L3", 32 << 20, CACHES, bytes_per_cycle=32),
    ),
    registers_bytes=2048,
    source="Intel 64 and IA-32 Software Developer's Manual volume 1, vector registers: 32 of 512 bits",
)
