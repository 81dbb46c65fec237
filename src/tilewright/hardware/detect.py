"""Detection of this machine: the CPU from the operating system and LLVM, GPUs from the driver through torch."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from tilewright import plug_ins, threads
from tilewright.discovery import modules
from tilewright.errors import InputError
from tilewright.hardware.target import Chip, Target
from tilewright.processors import affine

# Linux, Documentation/arch/x86/xstate.rst; asm/prctl.h; asm/unistd_64.h; Intel SDM volume 1, 13.1
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
# What /proc/cpuinfo calls differently from LLVM.
FROM_LLVM = {
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
    "neon": "asimd",
    "dotprod": "asimddp",
}
SYSFS_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


def chips(extra: Iterable[Path] = ()) -> list[Chip]:
    """Every chip with a data file, the most demanding first, families last; `extra` folders are searched, too, and so are other
    packages (`plug_ins.py`)."""
    found = [m.CHIP for m in modules("tilewright.hardware.chips", extra, "CHIP")]
    found += [c for c in _plugged_in() if c.name not in {own.name for own in found}]
    return sorted(found, key=lambda c: (c.family, -len(c.requires), c.name))


@cache
def _plugged_in() -> tuple[Chip, ...]:
    """The chips of other packages, but for those that cannot be used."""
    taken, found = {m.CHIP.name for m in modules("tilewright.hardware.chips", defining="CHIP")}, list[Chip]()
    for chip, plug_in in plug_ins.loaded(plug_ins.CHIPS, (Chip,), "CHIP"):
        why = f"there is a chip {chip.name} already" if chip.name in taken else _unusable(chip)
        if why:
            plug_in.leave_out(why)
        else:
            taken.add(chip.name)
            found.append(chip)
    return tuple(found)


def _unusable(chip: Chip) -> str:
    """The words why no machine could be matched with a plug-in's chip; "" if one can."""
    if chip.kind not in ("cpu", "cuda") or type(chip.requires) is not frozenset:
        return "its kind is neither cpu nor cuda, or what it requires is no frozenset"
    try:
        re.compile(chip.named)
    except re.error as error:
        return f"the pattern {chip.named!r} of names that it has is none: {error}"
    return ""


def match(kind: str, features: frozenset[str], extra: Iterable[Path] = (), name: str = "") -> Chip | None:
    """The most demanding chip of this kind whose every requirement is met; of several, the one that the name speaks of. A
    processor's name is its maker, family and model: one of another name is not it, whatever it has."""
    fit = [c for c in chips(extra) if c.kind == kind and c.requires <= features]
    fit = [c for c in fit if kind != "cpu" or not c.named or re.search(c.named, name)]
    best = [c for c in fit if not c.family and c.requires == fit[0].requires]
    return next((c for c in best if c.named and re.search(c.named, name)), fit[0] if fit else None)


def nearest(features: frozenset[str]) -> Chip | None:
    """The chip of the newest architecture of the same generation before a GPU's own: sm_80's for sm_86."""
    own = _generation(features)
    known = [(number, c) for c in chips() if c.kind == "cuda" and (number := _generation(c.requires))]
    older = [(number, c) for number, c in known if own and number[0] == own[0] and number <= own]
    return max(older, key=lambda pair: pair[0])[1] if older else None


def _generation(features: frozenset[str]) -> tuple[str, int] | None:
    """The architecture that features name: sm_86 is (sm_8, 6), gfx942 (gfx9, 0x42)."""
    found = next((m for f in sorted(features) if (m := re.fullmatch(r"(sm_\d+)(\d)|(gfx\d+)([0-9a-f]{2})", f))), None)
    return None if found is None else (found[1] or found[3], int(found[2] or found[4], 16))


@cache
def cpu() -> Target:
    """The processor at hand."""
    text = _read(Path("/proc/cpuinfo"))
    reported = _field(text, "flags").split() or _field(text, "Features").split() or _llvm_features()
    features = _permitted(frozenset(reported))
    name = _field(text, "model name") or platform.processor() or platform.machine()
    chip = match("cpu", features, name=_model(text))
    if chip is None:  # nothing is known of it: the architecture's baseline
        baseline = "aarch64" if platform.machine().lower() in ("arm64", "aarch64") else "x86_64"
        chip = next(c for c in chips() if c.name == baseline)
    return Target(name, chip, "cpu", len(affine()), features=features, caches_bytes=_caches(), exact_match=bool(chip.named))


def _model(text: str) -> str:
    """The processor's maker, family and model, as chips of one model name them."""
    return f"{_field(text, 'vendor_id')} family {_field(text, 'cpu family')} model {_field(text, 'model')}"


def _llvm_features() -> list[str]:
    """The CPU's features as LLVM finds them where the system has no /proc/cpuinfo, in that file's words."""
    import llvmlite.binding as llvm

    try:
        found = llvm.get_host_cpu_features()
    except RuntimeError:  # not on this system
        return []
    return [FROM_LLVM.get(str(name), str(name)) for name, present in found.items() if present]


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
        raise InputError(f"no CUDA device {index}: torch sees {count}", hint="--device cpu (device='cpu')")
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        features = frozenset({"rocm", str(p.gcnArchName).split(":")[0]})
    else:
        features = frozenset({"cuda", f"sm_{p.major}{p.minor}"})
    chip = match("cuda", features, name=p.name)
    assert chip is not None
    exact = not chip.family and (not chip.named or re.search(chip.named, p.name) is not None)
    if chip.family:
        chip = nearest(features) or chip
    caches = {"L2": int(p.L2_cache_size), "shared": int(getattr(p, "shared_memory_per_block_optin", 0) or chip.shared_bytes)}
    return Target(p.name, chip, "cuda", p.multi_processor_count, index, features, caches, exact_match=exact)


def one_of(devices: Iterable[str]) -> str:
    """Give the one device on which tensors lie: the GPU, to which those of the CPU are moved, or the CPU if there is none.

    Raises:
        InputError: they lie on several GPUs.
    """
    gpus = sorted({d for d in devices if d.startswith("cuda")})
    if len(gpus) > 1:
        raise InputError(f"weights and inputs lie on {' and '.join(gpus)}", hint=f'say where to run: device="{gpus[0]}"')
    return gpus[0] if gpus else "cpu"


def detect(device: str | torch.device) -> Target:
    """The target that `device` names: a torch device, or its name. A processor has the cores that kernels' threads may use now.

    Raises:
        InputError: not a device Tilewright knows, or not present.
    """
    m = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", str(device))
    if m is None:
        raise InputError(f"unknown device {device!r}", hint="cpu, cuda or cuda:0")
    if m[1] == "cuda":
        return gpu(int(m[2] or 0))
    return _processor(min(cpu().cores, threads.count()))


@cache
def _processor(cores: int) -> Target:
    """The processor at hand with so many of its cores; the same object each time, by which plans are kept."""
    return cpu() if cores == cpu().cores else replace(cpu(), cores=cores)


def cores_of(target: Target) -> str:
    """Name a target's cores as reports do: "4 cores", "1 of 4 cores" where kernels have fewer threads, "132 SMs"."""
    if target.kind != "cpu":
        return f"{target.cores} SMs"
    every = max(cpu().cores, target.cores)
    return f"{target.cores} of {every} cores" if target.cores < every else f"{every} core{'s' * (every != 1)}"


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
