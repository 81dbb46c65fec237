"""NVIDIA Ampere (A100): bf16, TF32, asynchronous copies to shared memory."""

from tilewright.hardware.chips._nvidia import REGISTERS
from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

A100 = "NVIDIA A100 Tensor Core GPU Architecture whitepaper v1.0, tables 1, 2 and 4: dense rates, 108 SMs at 1410 MHz"
A100_80 = "NVIDIA A100 datasheet, June 2021: 80 GB SXM, 2039 GB/s; 40 GB, 1555 GB/s (whitepaper v1.0, table 4)"

CHIP = Chip(
    name="nvidia_a100",
    kind="cuda",
    requires=frozenset({"cuda", "sm_80"}),
    units=(
        MatrixUnit("s4", "s32", "mma.m16n8k64.s32.s4.s4.s32", 8192, A100, (16, 8, 64)),
        MatrixUnit("s8", "s32", "mma.m16n8k32.s32.s8.s8.s32", 4096, A100, (16, 8, 32)),
        MatrixUnit("bf16", "f32", "mma.m16n8k16.f32.bf16.bf16.f32", 2048, A100, (16, 8, 16)),
        MatrixUnit("f16", "f32", "mma.m16n8k16.f32.f16.f16.f32", 2048, A100, (16, 8, 16)),
        MatrixUnit("f64", "f64", "mma.m8n8k4.f64.f64.f64.f64", 128, A100, (8, 8, 4)),
        MatrixUnit("f32", "f32", "ffma", 128, A100, (1, 1, 1)),
    ),
    notes=("TF32 (1024 operations a cycle and SM) drops 13 bits of f32 and is never used unasked",),
    levels=(
        MemoryLevel("L2", 40 << 20, A100),
        MemoryLevel("memory", 80 << 30, A100_80, gbps=2039),
    ),
    sms=108,
    mhz=1410,
    registers_bytes=REGISTERS,
    shared_bytes=163 << 10,
    source=f"{A100}; NVIDIA Ampere GPU Architecture Tuning Guide 13.0, 1.4.1.1: 163 KB of shared memory a block",
    named="A100",
)
