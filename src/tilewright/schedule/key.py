"""The key of a choice: the problem as text, and the machine, libraries and settings it was made with."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import cast

import torch

from tilewright import plug_ins, threads
from tilewright.hardware.target import Target
from tilewright.ir.graph import Graph, Node, attributes, substitute, toposort
from tilewright.ir.literal import tensor_bytes
from tilewright.ir.ops import Const, Input
from tilewright.ir.text import print_with_literals
from tilewright.schedule.problem import AnyProblem, FusionProblem
from tilewright.schedule.record import Key

PACKAGE = Path(__file__).parent.parent
CHOOSING = ("candidates", "hardware", "ir", "lowering", "schedule")  # folders whose code makes kernels and chooses among them
CODE = (".py", ".ll")
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
# What torch's allocators give: 64 bytes on a CPU (c10/core/alignment.h), 512 on a GPU (c10/cuda/CUDACachingAllocator.h).
ALIGNMENT_BYTES = {"cpu": 64, "cuda": 512}
LIBRARY_VARIABLES = ("ONEDNN_", "DNNL_", "MKL_")
# Seconds that one problem may take, the longest first.
BUDGETS = (("long", 1.0), ("short", 0.0))
UNMEASURED = "none"


def budgets_for(seconds: float) -> tuple[str, ...]:
    """The classes of budget whose decisions will do for a search of so many seconds; its own class is the last.

    Any will do where nothing is to be measured, one that measured nothing for want of another.
    """
    names = tuple(name for name, _ in BUDGETS)
    if seconds <= 0:
        return *names, UNMEASURED
    own = next(i for i, (_, least) in enumerate(BUDGETS) if seconds >= least)
    return names[: own + 1]


def text_of(problem: AnyProblem) -> str:
    """All that distinguishes a problem, but for numbers written into its expressions: one-element constants alone.

    Two layers that differ in a scale have one text. Constants of more elements stand in it as digests of their bits.
    """
    lines = [problem.kind, " ".join(map(str, problem.types)), str(problem.weights)]
    if isinstance(problem, FusionProblem):  # whose constants are sources
        return "\n".join([*lines, *map(str, problem.destinations), _printed(problem.roots)])
    regions = problem.op.regions()
    lines += [f"{name}={value}" for name, value in attributes(problem.op).items()]
    lines += [f"{label} {len(roots)}" for label, roots in regions.items()]
    roots = [r for roots in regions.values() for r in roots]
    stand_in = {n: Node(Input("number", n.tensor)) for n in numbers_of(problem)}
    return "\n".join([*lines, _printed(substitute(roots, stand_in))])


def _printed(roots: Sequence[Node]) -> str:
    text, literals = print_with_literals(Graph("", (), tuple(roots), ("",) * len(roots)))
    digests = [f"{name} {v.type} {hashlib.sha256(tensor_bytes(v.tensor())).hexdigest()}" for name, v in literals.items()]
    return "\n".join([text, *digests])


def digest_of(problem: AnyProblem, *, numbers: bool = False) -> str:
    """The SHA-256 digest of a problem's text, as a key holds it; of the numbers in its expressions, too, if they count."""
    digest = hashlib.sha256(text_of(problem).encode())
    for n in numbers_of(problem) if numbers else ():
        digest.update(f"\0{n.type}".encode() + tensor_bytes(cast("Const", n.op).data.tensor()))
    return digest.hexdigest()


def numbers_of(problem: AnyProblem) -> list[Node]:
    """The one-element constants in a problem's expressions; none of a fusion's, whose text has them."""
    if isinstance(problem, FusionProblem):
        return []
    return [n for n in toposort(problem.op.region_roots()) if isinstance(n.op, Const) and n.tensor.elements == 1]


def circumstances(target: Target, *, excess_precision: bool) -> Key:
    """All of a key but what a program adds: where its weights come from, the class of budget, the problem."""
    caches = " ".join(f"{name}={size}" for name, size in sorted(target.caches_bytes.items()))
    features = hashlib.sha256(" ".join(sorted(target.features)).encode()).hexdigest()[:12]
    return Key(
        chip=target.chip.name,
        processor=f"{target.name}, {caches}, features {features}",
        cores=target.cores,
        threads=threads.count() if target.kind == "cpu" else 0,  # those of a GPU's host choose nothing
        driver=_driver() if target.kind == "cuda" else "",
        toolkit=(torch.version.cuda or torch.version.hip or "") if target.kind == "cuda" else "",
        libraries=_libraries() + _environment() + _plug_ins(),
        tilewright=code_version(),
        numerics=f"excess_precision={excess_precision} {_numerics()}",
        alignment_bytes=ALIGNMENT_BYTES[target.kind],
        cold=False,
        budget="",
        problem="",
    )


@cache
def _libraries() -> str:
    """Versions of what compiles kernels or is a candidate; torch's build names those it contains, and what it found to use."""
    found = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    found += [f"{name} {version(name)}" for name in ("llvmlite", "triton")]
    built = torch.__config__.show()
    contained = re.search(r"MKL-DNN (v\S+)", built)
    found += [f"oneDNN {contained[1]}"] if contained else []
    return ", ".join([*found, f"build {hashlib.sha256(built.encode()).hexdigest()[:12]}"])


def _environment() -> str:
    """A digest of the variables by which users have libraries take other instructions or sums; "" where there are none."""
    given = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(LIBRARY_VARIABLES) and not k.endswith("VERBOSE"))
    return f", environment {hashlib.sha256(chr(0).join(given).encode(errors='replace')).hexdigest()[:12]}" if given else ""


def _plug_ins() -> str:
    """The packages whose candidates, rules and chips take part; "" if there are none."""
    found = plug_ins.packages()
    return f", plug-ins {found}" if found else ""


def version(package: str) -> str:
    """The version of a package that is installed, "none" of one that is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def code_version() -> str:
    """Tilewright's version, and a digest of its code: a change to a kernel's source is another kernel."""
    digest = hashlib.sha256()
    for file in sorted(f for folder in CHOOSING for f in (PACKAGE / folder).rglob("*.*") if f.suffix in CODE):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode())
        digest.update(file.read_bytes())
    return f"{version('tilewright')} {digest.hexdigest()[:12]}"


@cache
def _driver() -> str:
    for file in DRIVERS:
        try:
            return file.read_text(errors="replace").splitlines()[0].strip()
        except (OSError, IndexError):
            continue
    return ""


def _numerics() -> str:
    """torch's switches for lower precision inside products, and for determinism."""
    matmul = torch.backends.cuda.matmul
    switches = {
        "precision": torch.get_float32_matmul_precision,
        "tf32": lambda: matmul.allow_tf32,
        "f16_sums": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "bf16_sums": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "cpu": lambda: torch.backends.mkldnn.matmul.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
        "deterministic": torch.are_deterministic_algorithms_enabled,
    }
    return " ".join(f"{name}={_asked(switch)}" for name, switch in switches.items())


def _asked(switch: Callable[[], object]) -> str:
    try:
        return str(switch())
    except (AttributeError, RuntimeError):  # not in this torch, or set through both of its ways at once
        return "?"
