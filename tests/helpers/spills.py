"""Bytes that a thread spills in kernels which spill nothing with Triton 3.6: later versions bring another ptxas."""

import triton

SPILLED = {
    "attention with a mask": {"3.9": 128},
    "both halves": {"3.9": 16},
    "sixteen rows": {"3.9": 24},
    "bytes in 256 columns": {"3.7": 8, "3.8": 8, "3.9": 72},
}


def most_spilled(what: str) -> int:
    """The bytes that the installed version spills in this kernel."""
    return SPILLED.get(what, {}).get(".".join(triton.__version__.split(".")[:2]), 0)
