"""NVIDIA Blackwell (GeForce RTX 5090 and its family): fp4 and fp8 in warp-wide mma, f32 sums at half rate."""

from tilewright.hardware.chips._nvidia import REGISTERS
from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

RTX = "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1, appendix A (GeForce RTX 5090): dense rates, 170 SMs at 2407 MHz"
TUNING = "NVIDIA Blackwell Tuning Guide 13.0, 1.4.1.1 (12.0): 64K registers an SM, 99 KB of shared memory a block"

CHIP = Chip(
    name="nvidia_rtx5090",
    kind="cuda",
    requires=frozenset({"cuda", "sm_120"}),
    units=(
        MatrixUnit("s8", "s32", "mma.m16n8k32.s32.s8.s8.s32", 2048, RTX, (16, 8, 32)),
        MatrixUnit("f8e4m3fn", "f32", "mma.m16n8k32.f32.e4m3.e4m3.f32", 1024, RTX, (16, 8, 32)),
        MatrixUnit("f8e5m2", "f32", "mma.m16n8k32.f32.e5m2.e5m2.f32", 1024, RTX, (16, 8, 32)),
        MatrixUnit("bf16", "f32", "mma.m16n8k16.f32.bf16.bf16.f32", 512, RTX, (16, 8, 16)),
        MatrixUnit("f16", "f32", "mma.m16n8k16.f32.f16.f16.f32", 512, RTX, (16, 8, 16)),
        MatrixUnit("f32", "f32", "ffma", 256, RTX, (1, 1, 1)),
    ),
    notes=("neither wgmma nor tcgen05; sums kept in f16 are twice as fast, and are never used unasked",),
    levels=(
        MemoryLevel("L2", 96 << 20, RTX),
        MemoryLevel("memory", 32 << 30, f"{RTX}; GDDR7, 1792 GB/s", gbps=1792),
    ),
    sms=170,
    mhz=2407,
    registers_bytes=REGISTERS,
    shared_bytes=99 << 10,
    source=f"{RTX}; {TUNING}",
    named=r"RTX 50[5-9]0",
)
