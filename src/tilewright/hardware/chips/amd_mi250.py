"""AMD CDNA 2 (MI250, MI250X, MI210): two dies that the driver shows as two devices."""

from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

CDNA2 = (
    "Introducing AMD CDNA 2 Architecture whitepaper, table 1 (FLOPS/clock/CU) and 'Memory'; MI250: 104 CUs a die at 1700 MHz"
)
ISA = "AMD Instinct MI200 ISA reference guide, 3: 64 KB of LDS and 512 KB of vector and accumulation registers a CU"

CHIP = Chip(
    name="amd_mi250",
    kind="cuda",
    requires=frozenset({"rocm", "gfx90a"}),
    units=(
        MatrixUnit("s8", "s32", "v_mfma_i32_32x32x8i8", 1024, CDNA2, (32, 32, 8)),
        MatrixUnit("bf16", "f32", "v_mfma_f32_32x32x8bf16_1k", 1024, CDNA2, (32, 32, 8)),
        MatrixUnit("f16", "f32", "v_mfma_f32_32x32x8f16", 1024, CDNA2, (32, 32, 8)),
        MatrixUnit("f32", "f32", "v_mfma_f32_32x32x2f32", 256, CDNA2, (32, 32, 2)),
        MatrixUnit("f64", "f64", "v_mfma_f64_16x16x4f64", 256, CDNA2, (16, 16, 4)),
    ),
    notes=("figures are of one of the two dies: a device of its own to the driver",),
    levels=(
        MemoryLevel("L2", 8 << 20, f"{CDNA2}; 8 MB a die"),
        MemoryLevel("memory", 64 << 30, f"{CDNA2}; HBM2e, 1638 GB/s a die", gbps=1638),
    ),
    sms=104,
    mhz=1700,
    registers_bytes=512 << 10,
    shared_bytes=64 << 10,
    source=f"{CDNA2}; {ISA}",
)
