"""NVIDIA Hopper (H200): an H100 with more and faster memory."""

from tilewright.hardware.chips._nvidia import H100, HOPPER, HOPPER_LINKS, HOPPER_NOTES, HOPPER_SOURCE, REGISTERS
from tilewright.hardware.target import Chip, MemoryLevel

H200 = "NVIDIA H200 datasheet, November 2024: 141 GB of HBM3e, 4.8 TB/s"

CHIP = Chip(
    name="nvidia_h200",
    kind="cuda",
    requires=frozenset({"cuda", "sm_90"}),
    units=HOPPER,
    notes=HOPPER_NOTES,
    levels=(
        MemoryLevel("L2", 50 << 20, H100),
        MemoryLevel("memory", 141 * 10**9, H200, gbps=4800),
    ),
    links=HOPPER_LINKS,
    sms=132,
    mhz=1830,
    registers_bytes=REGISTERS,
    shared_bytes=227 << 10,
    source=HOPPER_SOURCE,
    named="H200",
)
