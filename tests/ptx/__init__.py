"""A machine that runs PTX, for tests of generated GPU kernels where there is no GPU."""

from ptx.machine import Deadlock
from ptx.memory import Fault
from ptx.run import H200, Emulated, How, emulate, emulating

__all__ = ["H200", "Deadlock", "Emulated", "Fault", "How", "emulate", "emulating"]
