"""AMD Zen and Zen+ (family 17h, models below 30h): AVX2 in halves of 128 bits."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

GUIDE = "AMD, Software Optimization Guide for Family 17h Models 00h-2Fh (55723)"
AMD = f"{GUIDE}, 2.11: 128-bit units, two of which do FMA, one multiplies 16 bits"
CACHES = f"{GUIDE}, 2.6: two 128-bit loads a cycle; L2 to L1 32 bytes a cycle"

CHIP = Chip(
    name="x86_64_zen1",
    kind="cpu",
    requires=frozenset({"avx2", "fma", "f16c"}),
    named=r"AuthenticAMD family 23 model (\d|[1-3]\d|4[0-7])$",
    units=(
        MatrixUnit("f32", "f32", "vfmadd231ps ymm", 2 * 8, AMD, (1, 8, 1)),
        MatrixUnit("f64", "f64", "vfmadd231pd ymm", 2 * 4, AMD, (1, 4, 1)),
        MatrixUnit("s8", "s32", "vpmaddwd ymm", 2 * 8, AMD, (1, 8, 2)),
    ),
    notes=("an instruction on 256 bits is two of 128: 8-bit codes are multiplied as fast as f32, not faster",),
    levels=(
        MemoryLevel("L1d", 32 << 10, CACHES, bytes_per_cycle=32),
        MemoryLevel("L2", 512 << 10, CACHES, bytes_per_cycle=32),
    ),
    registers_bytes=512,
    source="AMD64 Architecture Programmer's Manual volume 1, vector registers: 16 of 256 bits",
)
