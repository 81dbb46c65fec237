"""NVIDIA Hopper (H100): wgmma, the tensor memory accelerator, clusters."""

from tilewright.hardware.chips._nvidia import H100, HOPPER, HOPPER_LINKS, HOPPER_NOTES, HOPPER_SOURCE, REGISTERS
from tilewright.hardware.target import Chip, MemoryLevel

CHIP = Chip(
    name="nvidia_h100",
    kind="cuda",
    requires=frozenset({"cuda", "sm_90"}),
    units=HOPPER,
    notes=HOPPER_NOTES,
    levels=(
        MemoryLevel("L2", 50 << 20, H100),
        MemoryLevel("memory", 80 << 30, f"{H100}; HBM3 of the SXM5 board, 3352 GB/s", gbps=3352),
    ),
    links=HOPPER_LINKS,
    sms=132,
    mhz=1830,
    registers_bytes=REGISTERS,
    shared_bytes=227 << 10,
    source=HOPPER_SOURCE,
    named="H[18]00",
)
