"""Description of this machine: devices, the chips they were taken for, and what they were seen to reach."""

from __future__ import annotations

import re

import torch

from tilewright.hardware.ceilings import with_ceilings
from tilewright.hardware.detect import cpu, detect
from tilewright.hardware.target import Target
from tilewright.report.schema import Device, Devices, Unit

# Of the many features a processor reports, those that decide which matrix instructions and conversions there are.
MATTERS = re.compile(
    r"sse2|avx2?|fma|f16c|avx_vnni\w*|avx_ne_convert|avx512(f|bw|vl|_vnni|_bf16|_fp16)|amx_\w+"
    r"|asimd|asimdhp|asimddp|i8mm|bf16|sve\w*|sme2?"
)


def targets() -> list[Target]:
    """The CPU, then every CUDA device that torch reaches."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [detect("cpu"), *(detect(f"cuda:{i}") for i in range(count))]


def describe_machine(found: list[Target], *, remeasure: bool = False) -> Devices:
    """Every device with its measured ceilings: read back where this machine measured them before, else measured now."""
    return Devices([_device(with_ceilings(t, remeasure=remeasure)) for t in found])


def _device(t: Target) -> Device:
    units = [
        Unit(u.operand, u.acc, u.instruction, u.ops_per_cycle, _rounded(t.peak_gops.get(u.operand)), u.source)
        for u in t.chip.units
    ]
    named = {u.operand for u in t.chip.units}
    matters = [f for f in t.features if t.kind == "cuda" or MATTERS.fullmatch(f)]
    return Device(
        device=t.device,
        name=t.name,
        chip=t.chip.name,
        exact_match=t.exact_match,
        cores=cpu().cores if t.kind == "cpu" else t.cores,
        used_cores=t.cores,
        features=sorted(matters),
        caches_bytes=dict(t.caches_bytes),
        units=units,
        other_gops={name: round(rate, 1) for name, rate in t.peak_gops.items() if name not in named},
        read_gbps=round(t.read_gbps, 1),
        copy_gbps=round(t.copy_gbps, 1),
        notes=list(t.chip.notes),
        noise=t.noise,
    )


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 1)
