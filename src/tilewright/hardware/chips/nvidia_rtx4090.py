"""NVIDIA Ada (GeForce RTX 4090 and its family): fp8, a large second-level cache; f32 sums at half rate."""

from tilewright.hardware.chips._nvidia import ADA, ADA_SHARED_BYTES, ADA_TUNING, REGISTERS
from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

CHIP = Chip(
    name="nvidia_rtx4090",
    kind="cuda",
    requires=frozenset({"cuda", "sm_89"}),
    units=(
        MatrixUnit("s8", "s32", "mma.m16n8k32.s32.s8.s8.s32", 2048, ADA, (16, 8, 32)),
        MatrixUnit("f8e4m3fn", "f32", "mma.m16n8k32.f32.e4m3.e4m3.f32", 1024, ADA, (16, 8, 32)),
        MatrixUnit("f8e5m2", "f32", "mma.m16n8k32.f32.e5m2.e5m2.f32", 1024, ADA, (16, 8, 32)),
        MatrixUnit("bf16", "f32", "mma.m16n8k16.f32.bf16.bf16.f32", 512, ADA, (16, 8, 16)),
        MatrixUnit("f16", "f32", "mma.m16n8k16.f32.f16.f16.f32", 512, ADA, (16, 8, 16)),
        MatrixUnit("f32", "f32", "ffma", 256, ADA, (1, 1, 1)),
    ),
    notes=("sums kept in f16 are twice as fast, and are never used unasked",),
    levels=(
        MemoryLevel("L2", 72 << 20, ADA),
        MemoryLevel("memory", 24 << 30, f"{ADA}; GDDR6X, 1008 GB/s", gbps=1008),
    ),
    sms=128,
    mhz=2520,
    registers_bytes=REGISTERS,
    shared_bytes=ADA_SHARED_BYTES,
    source=f"{ADA}; {ADA_TUNING}",
    named=r"RTX 40[5-9]0",
)
