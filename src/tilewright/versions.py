"""Versions of Python and of the packages that machine code, numbers and front ends depend on: which ones were tried.

What differs between versions of Triton stands in `candidates/triton/runtime/versions.py` and, as names of Gluon, in `_gluon.py`
beside it; between operator sets of ONNX in `frontends/onnx/versions.py`. Elsewhere all versions below are treated alike.
"""

from __future__ import annotations

import contextlib
import platform
import re
from importlib.metadata import PackageNotFoundError, version

TRIED: dict[str, tuple[str, str]] = {
    "python": ("3.11", "3.14"),
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "llvmlite": ("0.45", "0.50"),
    "onnx": ("1.21", "1.23"),
    "jaxlib": ("0.10", "0.12"),
}
"""The oldest version of each that is accepted, and the newest that tests ran with; `untried` tells of newer ones."""


def installed() -> dict[str, str]:
    """The version of each of these that is installed here; those that are not are left out."""
    found = {"python": platform.python_version()}
    for name in TRIED:
        if name != "python":
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(name)
    return found


def untried() -> list[str]:
    """A sentence for each installed version that is newer than those that were tried."""
    return [
        f"{name} {here} was not tried: the newest that was is {TRIED[name][1]}"
        for name, here in installed().items()
        if _release(here) > _release(TRIED[name][1])
    ]


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])
