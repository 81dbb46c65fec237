"""NVIDIA Ada (L4): a small board for inference, f32 sums at full rate."""

from tilewright.hardware.chips._nvidia import ADA, ADA_SHARED_BYTES, ADA_TUNING, REGISTERS
from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

L4 = "NVIDIA L4 datasheet, March 2023: 121 TFLOPS of f16, 242 of fp8 and int8, dense; 300 GB/s. Over 58 SMs at 2040 MHz"

CHIP = Chip(
    name="nvidia_l4",
    kind="cuda",
    requires=frozenset({"cuda", "sm_89"}),
    units=(
        MatrixUnit("s8", "s32", "mma.m16n8k32.s32.s8.s8.s32", 2048, L4, (16, 8, 32)),
        MatrixUnit("f8e4m3fn", "f32", "mma.m16n8k32.f32.e4m3.e4m3.f32", 2048, L4, (16, 8, 32)),
        MatrixUnit("f8e5m2", "f32", "mma.m16n8k32.f32.e5m2.e5m2.f32", 2048, L4, (16, 8, 32)),
        MatrixUnit("bf16", "f32", "mma.m16n8k16.f32.bf16.bf16.f32", 1024, L4, (16, 8, 16)),
        MatrixUnit("f16", "f32", "mma.m16n8k16.f32.f16.f16.f32", 1024, L4, (16, 8, 16)),
        MatrixUnit("f32", "f32", "ffma", 256, ADA, (1, 1, 1)),
    ),
    notes=("at 72 W it runs well below 2040 MHz under a long load",),
    levels=(
        MemoryLevel("L2", 48 << 20, "NVIDIA Ada GPU Architecture whitepaper v2.02, appendix C (AD104): 48 MB"),
        MemoryLevel("memory", 24 << 30, L4, gbps=300),
    ),
    sms=58,
    mhz=2040,
    registers_bytes=REGISTERS,
    shared_bytes=ADA_SHARED_BYTES,
    source=f"{L4}; {ADA_TUNING}",
    named=r"\bL4\b",
)
