"""A GPU woken while torch is imported: starting the driver and making a device's context take it some tenths of a second, in
which Python is free.

Names are those of the CUDA Driver API (6.3 initialization, 6.7 primary contexts). The primary context is the one that torch
uses; it stays for the process, as torch's does.
"""

from __future__ import annotations

import ctypes
import os
import re
from threading import Thread


def wake(device: str) -> Thread | None:
    """Begin to make a CUDA device's context, in a thread of its own; None for another device. Nothing is said of what fails:
    who uses the device meets it again."""
    named = re.fullmatch(r"cuda(?::(\d+))?", device)
    if named is None:
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch has it before it starts the driver
    thread = Thread(target=_context, args=(int(named[1] or 0),), name="tilewright wakes a GPU", daemon=True)
    thread.start()
    return thread


def _context(index: int) -> None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        return
    found, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(found), index) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), found)
