"""AMD CDNA 3 (MI300X): fp8 of the kind without negative zero, a 256 MB cache in front of the memory."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

CDNA3 = "AMD CDNA 3 Architecture whitepaper, table 1 (peak FLOPS/clock/CU) and 'Memory'; MI300X: 304 CUs at 2100 MHz"
ISA = "AMD Instinct MI300 ISA reference guide, 3: 64 KB of LDS and 512 KB of vector and accumulation registers a CU"

CHIP = Chip(
    name="amd_mi300x",
    kind="cuda",
    requires=frozenset({"rocm", "gfx942"}),
    units=(
        MatrixUnit("s8", "s32", "v_mfma_i32_32x32x16_i8", 4096, CDNA3, (32, 32, 16)),
        MatrixUnit("f8e4m3fnuz", "f32", "v_mfma_f32_32x32x16_fp8_fp8", 4096, CDNA3, (32, 32, 16)),
        MatrixUnit("f8e5m2fnuz", "f32", "v_mfma_f32_32x32x16_bf8_bf8", 4096, CDNA3, (32, 32, 16)),
        MatrixUnit("bf16", "f32", "v_mfma_f32_32x32x8_bf16", 2048, CDNA3, (32, 32, 8)),
        MatrixUnit("f16", "f32", "v_mfma_f32_32x32x8_f16", 2048, CDNA3, (32, 32, 8)),
        MatrixUnit("f32", "f32", "v_mfma_f32_32x32x2_f32", 256, CDNA3, (32, 32, 2)),
        MatrixUnit("f64", "f64", "v_mfma_f64_16x16x4_f64", 256, CDNA3, (16, 16, 4)),
    ),
    notes=("its fp8 is e4m3fnuz: bias 8, no negative zero; OCP's e4m3fn must be converted",),
    levels=(
        MemoryLevel("L2", 4 << 20, f"{CDNA3}; 4 MB for each of the 8 dies"),
        MemoryLevel("L3", 256 << 20, f"{CDNA3}; Infinity Cache, 17.2 TB/s", gbps=17200),
        MemoryLevel("memory", 192 << 30, f"{CDNA3}; HBM3, 5.3 TB/s", gbps=5300),
    ),
    sms=304,
    mhz=2100,
    registers_bytes=512 << 10,
    shared_bytes=64 << 10,
    source=f"{CDNA3}; {ISA}",
)
