"""Contenders of a module, each in a process of its own: `tilewright.report.measure.rounds` for benchmarks.

A module of contenders has a frozen dataclass `Case` and `CONTENDERS`, which holds for each name a function from a case to a
function that runs it once. One process serves one contender for all cases, so that a library is started once.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.report.measure import rounds as turns
from tilewright.report.measure.rounds import compete, ratio, serve

__all__ = ["Process", "compete", "ratio"]


class Process(turns.Process):
    """One contender, waiting for its turns."""

    def __init__(self, module: str, name: str, threads: int):
        counts = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu"}
        super().__init__(name, [sys.executable, __file__, module, name], counts)

    def take(self, case: Any, result: Path | None = None) -> str | None:
        """None once it has run the case, an instance of its module's `Case`; else why it cannot."""
        return super().take(asdict(case), result)


if __name__ == "__main__":
    contenders = importlib.import_module(sys.argv[1])
    serve(
        lambda case: contenders.CONTENDERS[sys.argv[2]](contenders.Case(**case)),
        pick=lambda result: result[0] if isinstance(result, (list, tuple)) else result,
    )
