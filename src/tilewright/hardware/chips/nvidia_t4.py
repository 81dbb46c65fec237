"""NVIDIA Turing (T4, RTX 20): tensor cores for 8 and 4 bits."""

from tilewright.hardware.chips._nvidia import REGISTERS
from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

TURING = "NVIDIA Turing GPU Architecture whitepaper WP-09183-001 v01, appendix B (Tesla T4) and 'Tensor Cores'"

CHIP = Chip(
    name="nvidia_t4",
    kind="cuda",
    requires=frozenset({"cuda", "sm_75"}),
    units=(
        MatrixUnit("s4", "s32", "mma.m8n8k32.s32.s4.s4.s32", 4096, TURING, (8, 8, 32)),
        MatrixUnit("s8", "s32", "mma.m8n8k16.s32.s8.s8.s32", 2048, TURING, (8, 8, 16)),
        MatrixUnit("f16", "f32", "mma.m16n8k8.f32.f16.f16.f32", 1024, TURING, (16, 8, 8)),
        MatrixUnit("f32", "f32", "ffma", 128, TURING, (1, 1, 1)),
    ),
    notes=("no bf16; GeForce models add up f16 products in f32 at half this rate",),
    levels=(
        MemoryLevel("L2", 4096 << 10, TURING),
        MemoryLevel("memory", 16 << 30, f"{TURING}; GDDR6, 320 GB/s", gbps=320),
    ),
    sms=40,
    mhz=1590,
    registers_bytes=REGISTERS,
    shared_bytes=64 << 10,
    source=f"{TURING}; 96 KB of L1 and shared memory an SM, at most 64 of them shared",
)
