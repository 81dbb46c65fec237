"""x86-64 with AMX (Sapphire, Emerald and Granite Rapids)."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

INTEL = "Intel 64 and IA-32 Optimization Manual, 20 (AMX) and 2.2: one tile product in 16 cycles; two 512-bit FMA ports"
# vdpbf16ps is left out: slower than widening to f32.
MEASURED = "measured on one core of an Emerald Rapids: 205 Gflop/s of f32, 110 of bf16 by vdpbf16ps"
CACHES = (
    "Intel 64 and IA-32 Optimization Manual, cache parameters of Golden Cove: 48 KB at 128 bytes a cycle, 2 MB sustaining 48"
)

CHIP = Chip(
    name="x86_64_amx",
    kind="cpu",
    requires=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}),
    units=(
        MatrixUnit("s8", "s32", "tdpbssd", 16 * 16 * 64 * 2 // 16, INTEL, (16, 16, 64)),
        MatrixUnit("bf16", "f32", "tdpbf16ps", 16 * 16 * 32 * 2 // 16, INTEL, (16, 16, 32)),
        MatrixUnit("s8", "s32", "vpdpbusd zmm", 2 * 64 * 2, INTEL, (1, 16, 4)),
        MatrixUnit("f32", "f32", "vfmadd231ps zmm", 2 * 16 * 2, MEASURED, (1, 16, 1)),
        MatrixUnit("f64", "f64", "vfmadd231pd zmm", 2 * 8 * 2, INTEL, (1, 8, 1)),
    ),
    notes=("tiles must be asked for by each process; where the system refuses them, this is the chip without",),
    levels=(
        MemoryLevel("L1d", 48 << 10, CACHES, bytes_per_cycle=128),
        MemoryLevel("L2", 2 << 20, CACHES, bytes_per_cycle=48),
    ),
    registers_bytes=10240,
    source="Intel 64 and IA-32 Software Developer's Manual volume 1, vector registers: 32 of 512 bits, 8 tiles of 1 KB",
)
