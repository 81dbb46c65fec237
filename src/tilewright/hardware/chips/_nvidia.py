"""Data that several NVIDIA architectures have in common, each number with its source."""

from tilewright.hardware.target import MatrixUnit, PeerLink

REGISTERS = 256 << 10  # CUDA C++ Programming Guide 13.0, technical specifications: 64K 32-bit registers an SM, since 3.0

H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, table 2: dense rates, 132 SMs at 1830 MHz"
HOPPER = (
    MatrixUnit("s8", "s32", "wgmma.m64nNk32.s32.s8.s8", 8192, H100, (64, 256, 32)),
    MatrixUnit("f8e4m3fn", "f32", "wgmma.m64nNk32.f32.e4m3.e4m3", 8192, H100, (64, 256, 32)),
    MatrixUnit("f8e5m2", "f32", "wgmma.m64nNk32.f32.e5m2.e5m2", 8192, H100, (64, 256, 32)),
    MatrixUnit("bf16", "f32", "wgmma.m64nNk16.f32.bf16.bf16", 4096, H100, (64, 256, 16)),
    MatrixUnit("f16", "f32", "wgmma.m64nNk16.f32.f16.f16", 4096, H100, (64, 256, 16)),
    MatrixUnit("f32", "f32", "ffma", 256, H100, (1, 1, 1)),
)
HOPPER_LINKS = (  # of the SXM boards; those of PCIe have NVLink in pairs alone
    PeerLink("NVLink 4", 450.0, f"{H100.partition(',')[0]}, NVLink: 18 links of 25 GB/s a direction"),
    PeerLink("PCIe 5.0 x16", 64.0, f"{H100.partition(',')[0]}, PCIe Gen 5: 64 GB/s a direction"),
)
HOPPER_NOTES = ("shared memory of a block is at most 227 KB (Hopper Tuning Guide 13.0, 1.4.1.1); wgmma takes n of 8 to 256",)
HOPPER_SOURCE = f"{H100}; Hopper Tuning Guide 13.0, 1.4.1.1 and 1.4.2: 227 KB of shared memory a block"

ADA = "NVIDIA Ada GPU Architecture whitepaper v2.02, appendix A (GeForce RTX 4090): dense rates, 128 SMs at 2520 MHz"
ADA_SHARED_BYTES = 99 << 10  # NVIDIA Ada GPU Architecture Tuning Guide 13.0, 1.4.1.1 and 1.4.2.2
ADA_TUNING = "NVIDIA Ada GPU Architecture Tuning Guide 13.0, 1.4.1.1: 64K registers an SM, 99 KB of shared memory a block"
