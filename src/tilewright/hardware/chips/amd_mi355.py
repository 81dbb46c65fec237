"""AMD CDNA 4 (MI355X, MI350X): OCP's fp8, fp6 and fp4, twice CDNA 3's rates on 16 and 8 bits."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

CDNA4 = "AMD CDNA 4 Architecture whitepaper, table 1 (peak FLOPS/clock/CU) and 'Memory'; MI355X: 256 CUs at 2400 MHz"
ISA = "AMD Instinct CDNA 4 ISA reference guide, 3 and 11: 160 KB of LDS and 512 KB of vector and accumulation registers a CU"

CHIP = Chip(
    name="amd_mi355",
    kind="cuda",
    requires=frozenset({"rocm", "gfx950"}),
    units=(
        MatrixUnit("s8", "s32", "v_mfma_i32_32x32x32_i8", 8192, CDNA4, (32, 32, 32)),
        MatrixUnit("f8e4m3fn", "f32", "v_mfma_f32_32x32x64_f8f6f4 e4m3", 8192, CDNA4, (32, 32, 64)),
        MatrixUnit("f8e5m2", "f32", "v_mfma_f32_32x32x64_f8f6f4 e5m2", 8192, CDNA4, (32, 32, 64)),
        MatrixUnit("bf16", "f32", "v_mfma_f32_32x32x16_bf16", 4096, CDNA4, (32, 32, 16)),
        MatrixUnit("f16", "f32", "v_mfma_f32_32x32x16_f16", 4096, CDNA4, (32, 32, 16)),
        MatrixUnit("f32", "f32", "v_mfma_f32_32x32x2_f32", 256, CDNA4, (32, 32, 2)),
        MatrixUnit("f64", "f64", "v_mfma_f64_16x16x4_f64", 128, CDNA4, (16, 16, 4)),
    ),
    levels=(
        MemoryLevel("L2", 4 << 20, f"{CDNA4}; 4 MB for each of the 8 dies"),
        MemoryLevel("L3", 256 << 20, f"{CDNA4}; Infinity Cache"),
        MemoryLevel("memory", 288 * 10**9, f"{CDNA4}; HBM3E, 8 TB/s", gbps=8000),
    ),
    sms=256,
    mhz=2400,
    registers_bytes=512 << 10,
    shared_bytes=160 << 10,
    source=f"{CDNA4}; {ISA}",
)
