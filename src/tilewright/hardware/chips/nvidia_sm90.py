"""NVIDIA Hopper (H100, H200, GH200): wgmma."""

from tilewright.hardware.target import Chip, MatrixUnit

H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, table 2: dense rates, 132 SMs at 1830 MHz"

CHIP = Chip(
    name="nvidia_sm90",
    kind="cuda",
    requires=frozenset({"cuda", "sm_90"}),
    units=(
        MatrixUnit("s8", "s32", "wgmma.m64nNk32.s32.s8.s8", 8192, H100),
        MatrixUnit("f8e4m3fn", "f32", "wgmma.m64nNk32.f32.e4m3.e4m3", 8192, H100),
        MatrixUnit("f8e5m2", "f32", "wgmma.m64nNk32.f32.e5m2.e5m2", 8192, H100),
        MatrixUnit("bf16", "f32", "wgmma.m64nNk16.f32.bf16.bf16", 4096, H100),
        MatrixUnit("f16", "f32", "wgmma.m64nNk16.f32.f16.f16", 4096, H100),
        MatrixUnit("f32", "f32", "ffma", 256, H100),
    ),
)
