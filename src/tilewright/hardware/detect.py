"""Which machine this is: the CPU from the operating system, GPUs from the driver through torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from tilewright.discovery import modules
from tilewright.errors import InputError
from tilewright.hardware.target import Chip, Target

# Linux, Documentation/arch/x86/xstate.rst; asm/prctl.h; asm/unistd_64.h; Intel SDM volume 1, 13.1
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
SYSFS_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


def chips(extra: Iterable[Path] = ()) -> list[Chip]:
    """Every chip with a data file, the most demanding first, families last; `extra` folders are searched too."""
    found = [m.CHIP for m in modules("tilewright.hardware.chips", extra) if hasattr(m, "CHIP")]
    return sorted(found, key=lambda c: (c.family, -len(c.requires), c.name))


def match(kind: str, features: frozenset[str], extra: Iterable[Path] = ()) -> Chip | None:
    """The most demanding chip of this kind whose every requirement is met."""
    return next((c for c in chips(extra) if c.kind == kind and c.requires <= features), None)


@cache
def cpu() -> Target:
    """The processor at hand."""
    text = _read(Path("/proc/cpuinfo"))
    features = _permitted(frozenset(_field(text, "flags").split() or _field(text, "Features").split()))
    name = _field(text, "model name") or platform.processor() or platform.machine()
    chip = match("cpu", features)
    if chip is None:  # no /proc/cpuinfo (macOS, Windows): the architecture's baseline
        baseline = "aarch64" if platform.machine().lower() in ("arm64", "aarch64") else "x86_64"
        chip = next(c for c in chips() if c.name == baseline)
    return Target(name, chip, "cpu", _usable_cores(), features=features, caches_bytes=_caches(), exact_match=not chip.family)


def _permitted(features: frozenset[str]) -> frozenset[str]:
    """The features without those of AMX, unless the system lets this process use its tiles: they must be asked for, once."""
    if "amx_tile" not in features or _granted(XTILEDATA):
        return features
    return frozenset(f for f in features if not f.startswith("amx_"))


def _granted(component: int) -> bool:
    try:
        return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, component) == 0
    except (OSError, AttributeError):
        return False


@cache
def gpu(index: int = 0) -> Target:
    """One CUDA device.

    Raises:
        InputError: there is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise InputError(f"no CUDA device {index}: torch sees {count}", hint="device='cpu'")
    p = torch.cuda.get_device_properties(index)
    features = frozenset({"cuda", f"sm_{p.major}{p.minor}"})
    chip = match("cuda", features)
    assert chip is not None
    caches = {"L2": int(p.L2_cache_size), "shared": int(p.shared_memory_per_block_optin)}
    return Target(p.name, chip, "cuda", p.multi_processor_count, index, features, caches, exact_match=not chip.family)


def detect(device: str | torch.device) -> Target:
    """The target that `device` names: a torch device, or its name.

    Raises:
        InputError: not a device Tilewright knows, or not present.
    """
    m = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", str(device))
    if m is None:
        raise InputError(f"unknown device {device!r}", hint="cpu, cuda or cuda:0")
    return cpu() if m[1] == "cpu" else gpu(int(m[2] or 0))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _field(text: str, key: str) -> str:
    m = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", text, re.MULTILINE)
    return m[1].strip() if m else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _caches() -> dict[str, int]:
    """Sizes of the first core's data and unified caches."""
    found: dict[str, int] = {}
    for folder in sorted(SYSFS_CACHE.glob("index*")):
        kind, level, size = (_read(folder / f).strip() for f in ("type", "level", "size"))
        m = re.fullmatch(r"(\d+)([KM]?)", size)
        if m and kind in ("Data", "Unified"):
            found[f"L{level}{'d' if kind == 'Data' else ''}"] = int(m[1]) << {"": 0, "K": 10, "M": 20}[m[2]]
    return found
