"""A machine that runs PTX, for tests of generated GPU kernels where there is no GPU.

`emulate` builds a candidate's kernel and runs it on the CPU's tensors; `How` says in what order, and how late copies and
products end.
"""

from ptx.launch import H200, Emulated, emulate, emulating, run, together
from ptx.machine import Deadlock, How
from ptx.memory import Fault

__all__ = ["H200", "Deadlock", "Emulated", "Fault", "How", "emulate", "emulating", "run", "together"]
