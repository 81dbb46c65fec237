"""Any AMD GPU that torch can reach: the known facts about an architecture without a file of its own."""

from tilewright.hardware.target import Chip, MatrixUnit

GCN = "AMD CDNA Architecture whitepaper, table 1: 64 lanes of FP32 FMA a cycle and CU, as in every GCN and CDNA"

CHIP = Chip(
    name="amd",
    kind="cuda",
    requires=frozenset({"rocm"}),
    units=(MatrixUnit("f32", "f32", "v_fma_f32", 128, GCN, (1, 1, 1)),),
    family=True,
    registers_bytes=256 << 10,
    shared_bytes=64 << 10,
    source="AMD Instinct MI100 ISA reference guide, 3 and 11: 64 KB of LDS a CU, 256 KB of vector registers",
)
