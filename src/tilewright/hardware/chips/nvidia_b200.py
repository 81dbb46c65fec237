"""NVIDIA Blackwell (B200): tcgen05 with accumulators in a memory of their own, fp4."""

from tilewright.hardware.chips._nvidia import REGISTERS
from tilewright.hardware.target import Chip, MatrixUnit, MemoryLevel

B200 = "NVIDIA DGX B200 datasheet: 36 PFLOPS of dense fp8 over 8 GPUs, half for bf16; over 148 SMs at 1.86 GHz"
TUNING = (
    "NVIDIA Blackwell Tuning Guide 13.0, 1.4.1.1 and 1.4.2: 227 KB of shared memory a block, 64K registers an SM, 126 MB of L2"
)

CHIP = Chip(
    name="nvidia_b200",
    kind="cuda",
    requires=frozenset({"cuda", "sm_100"}),
    units=(
        MatrixUnit("s8", "s32", "tcgen05.mma.kind::i8", 16384, B200, (128, 256, 32)),
        MatrixUnit("f8e4m3fn", "f32", "tcgen05.mma.kind::f8f6f4 e4m3", 16384, B200, (128, 256, 32)),
        MatrixUnit("f8e5m2", "f32", "tcgen05.mma.kind::f8f6f4 e5m2", 16384, B200, (128, 256, 32)),
        MatrixUnit("bf16", "f32", "tcgen05.mma.kind::f16 bf16", 8192, B200, (128, 256, 16)),
        MatrixUnit("f16", "f32", "tcgen05.mma.kind::f16 f16", 8192, B200, (128, 256, 16)),
        MatrixUnit("f32", "f32", "ffma", 256, B200, (1, 1, 1)),
    ),
    notes=("accumulators live in 256 KB of tensor memory an SM (PTX ISA 9.0, 9.7.16.1)",),
    levels=(
        MemoryLevel("L2", 126 << 20, TUNING),
        MemoryLevel("memory", 180 * 10**9, "NVIDIA DGX B200 datasheet: 1440 GB and 64 TB/s of HBM3e over 8 GPUs", gbps=8000),
    ),
    sms=148,
    mhz=1860,
    registers_bytes=REGISTERS,
    shared_bytes=227 << 10,
    source=f"{B200}; {TUNING}",
    named="B200",
)
