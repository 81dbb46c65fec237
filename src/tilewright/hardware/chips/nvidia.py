"""Any NVIDIA GPU that torch can reach: the known facts about an architecture without a file of its own or of its generation."""

from tilewright.hardware.chips._nvidia import REGISTERS
from tilewright.hardware.target import Chip, MatrixUnit

CUDA_GUIDE = "CUDA C++ Programming Guide 13.0, arithmetic throughput table: 64 FP32 FMA a cycle and SM on every architecture"

CHIP = Chip(
    name="nvidia",
    kind="cuda",
    requires=frozenset({"cuda"}),
    units=(MatrixUnit("f32", "f32", "ffma", 64 * 2, CUDA_GUIDE, (1, 1, 1)),),
    family=True,
    registers_bytes=REGISTERS,
    shared_bytes=48 << 10,
    source="CUDA C++ Programming Guide 13.0, technical specifications: 64K registers an SM, 48 KB of shared memory",
)
