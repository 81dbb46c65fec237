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

# GHz that no processor and no GPU runs at. By their data sheets Intel's Core i9-14900KS reaches 6.2, NVIDIA's RTX 5080 2.62.
TOO_FAST = {"cpu": 6.5, "cuda": 3.5}


def targets() -> list[Target]:
    """The CPU, then every CUDA device that torch reaches."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [detect("cpu"), *(detect(f"cuda:{i}") for i in range(count))]


def describe_machine(found: list[Target], *, remeasure: bool = False) -> Devices:
    """Every device with its measured ceilings: read back where this machine measured them before, else measured now."""
    return Devices([describe(with_ceilings(t, remeasure=remeasure)) for t in found])


def describe(t: Target) -> Device:
    """One device with the rates that its target has: none before they are measured."""
    units = [
        Unit(u.operand, u.acc, u.instruction, u.ops_per_cycle, _rounded(t.peak_gops.get(u.operand)), u.source)
        for u in t.chip.units
    ]
    named = {u.operand for u in t.chip.units}
    clock = _clock_ghz(t)
    believed = clock is None or clock < TOO_FAST[t.kind]
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
        clock_ghz=_rounded(clock) if believed else None,
        doubt="" if clock is None or believed else _doubt(t, clock),
        assumed=[] if t.exact_match and believed else _assumed(t),
    )


def _clock_ghz(t: Target) -> float | None:
    """The least clock in GHz at which the chip's operations a cycle give the measured rates; None where none was measured."""
    first = {u.operand: u for u in reversed(t.chip.units)}
    rates = [t.peak_gops[operand] / (u.ops_per_cycle * t.cores) for operand, u in first.items() if operand in t.peak_gops]
    return max(rates, default=None)


def _doubt(t: Target, clock: float) -> str:
    """The sentence why a description whose operations a cycle mean such a clock is not this chip's."""
    return (
        f"at these operations a cycle the measured rates would take a clock of {clock:.1f} GHz, which nothing runs at; a core "
        f"does more in a cycle than {t.chip.name} says, and what the cost model expects of kernels is off"
    )


def _assumed(t: Target) -> list[str]:
    """The numbers that a chip's description gives and this machine does not, with their sources."""
    units = dict.fromkeys(u.source for u in t.chip.units)
    rated = [x for x in t.chip.levels if x.bytes_per_cycle or (x.gbps and x.name != "memory")]
    sized = [x for x in t.chip.levels if x.name != "memory" and x.name not in t.caches_bytes]
    found = [f"operations a cycle, as in: {'; '.join(units)}"]
    for what, levels in (("rates of", rated), ("sizes of", sized)):
        if levels:
            sources = dict.fromkeys(x.source for x in levels)
            found.append(f"{what} {', '.join(x.name for x in levels)}, as in: {'; '.join(sources)}")
    return found


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 1)
