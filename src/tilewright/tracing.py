"""The one thread that may have torch trace a program.

`torch.export`, `make_fx` and the compiler that traces with them keep what is under way in variables of the process: two threads
at once fail, and leave it so that every later trace fails, too. Whoever traces holds `TRACING`, for as long as it holds torch's
own stand-ins for tensors. A thread that calls `torch.export` by itself should hold it as well.
"""

from __future__ import annotations

import threading

TRACING = threading.RLock()
