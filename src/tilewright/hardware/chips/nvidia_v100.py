"""NVIDIA Volta (V100): the first tensor cores."""

from tilewright.hardware.chips._nvidia import REGISTERS
from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

VOLTA = "NVIDIA Tesla V100 GPU Architecture whitepaper WP-08608-001 v1.1, table 1 and 'Tensor Cores': 8 x 64 FMA a cycle and SM"
DP4A = "the same, 'Volta Streaming Multiprocessor': 64 INT32 lanes an SM; a dp4a is 4 products (PTX ISA 9.0, 9.7.1.23)"

CHIP = Chip(
    name="nvidia_v100",
    kind="cuda",
    requires=frozenset({"cuda", "sm_70"}),
    units=(
        MatrixUnit("f16", "f32", "mma.m8n8k4.f32.f16.f16.f32", 1024, VOLTA, (8, 8, 4)),
        MatrixUnit("s8", "s32", "dp4a", 64 * 8, DP4A, (1, 1, 4)),
        MatrixUnit("f32", "f32", "ffma", 128, VOLTA, (1, 1, 1)),
    ),
    notes=("no bf16 and no 8-bit tensor cores",),
    levels=(
        MemoryLevel("L2", 6144 << 10, VOLTA),
        MemoryLevel("memory", 16 << 30, f"{VOLTA}; HBM2, 900 GB/s", gbps=900),
    ),
    sms=80,
    mhz=1530,
    registers_bytes=REGISTERS,
    shared_bytes=96 << 10,
    source=f"{VOLTA}; up to 96 KB of shared memory an SM",
)
