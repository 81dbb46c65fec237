"""Names that kernels under `hopper/` still import from here; they are `printer.py`'s."""

from tilewright.candidates.triton.expressions.printer import FP8, FP8_NAMES, NATIVE, in_memory, in_registers, pointer_type

__all__ = ["FP8", "FP8_NAMES", "NATIVE", "in_memory", "in_registers", "pointer_type"]
