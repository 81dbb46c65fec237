"""Any NVIDIA GPU that torch can reach: what is known of an architecture without a file of its own."""

from tilewright.hardware.target import Chip, MatrixUnit

CUDA_GUIDE = "CUDA C++ Programming Guide 13.0, arithmetic throughput table: 64 FP32 FMA a cycle and SM on every architecture"

CHIP = Chip(
    name="nvidia",
    kind="cuda",
    requires=frozenset({"cuda"}),
    units=(MatrixUnit("f32", "f32", "ffma", 64 * 2, CUDA_GUIDE),),
    family=True,
)
