"""The architecture that the kernels of this folder are compiled for, and which targets run them."""

from __future__ import annotations

from tilewright.candidates.triton.runtime.module import INSTALL, Arch, installed
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import Unsupported

SM_90 = Arch("cuda", 90, 32)


def require(target: Target) -> None:
    """Refuse a target that does not run these kernels.

    Raises:
        Unsupported: it is no Hopper GPU, or Triton is not installed.
    """
    if "sm_90" not in target.features:
        raise Unsupported("wgmma, TMA and dependent launches as they are used here are Hopper's (sm_90)")
    if not installed():
        raise Unsupported(INSTALL)
