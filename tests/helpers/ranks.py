"""Jobs of several processes for tests, which stand in for torchrun's: each runs one function of a module, and says what it has.

`job` starts the ranks, and `said` waits for what they return. A rank's function is called with the rank; what it returns is
told as JSON on its last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import warm
from paths import ROOT

STARTED_S = 120.0  # for a job on a busy machine
ANSWER = "answer: "


@dataclass
class Rank:
    """One process of a job."""

    process: warm.Program
    answer: object = None

    @property
    def text(self) -> str:
        """Everything that it printed."""
        return self.process.said()[0]


@dataclass
class Job:
    """Processes that run together."""

    ranks: list[Rank]
    folder: tempfile.TemporaryDirectory[str]

    def wait(self, within_s: float = STARTED_S) -> Job:
        """Wait until all have ended; those that have not are killed, which their exit codes show."""
        until = time.monotonic() + within_s
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))
        self.kill()
        for rank in self.ranks:
            last = [line for line in rank.text.splitlines() if line.startswith(ANSWER)]
            rank.answer = json.loads(last[-1][len(ANSWER) :]) if last else None
        return self

    def answers(self) -> list[object]:
        """Wait for what the ranks return; a rank that failed is an error."""
        self.wait()
        for i, rank in enumerate(self.ranks):
            assert rank.process.returncode == 0, f"rank {i} ended with {rank.process.returncode}:\n{rank.text}"
        return [rank.answer for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()


def job(
    function: Callable[..., object], count: int, *given: object, each: Mapping[int, Mapping[str, str]] | None = None
) -> Job:
    """Start a job of `count` ranks, each of which calls a function of a module of the tests with its rank and what is given
    beside it. `each` has more of the environment for some."""
    kept = tempfile.TemporaryDirectory(prefix="tilewright-ranks-")
    folder = Path(kept.name)
    program = (
        "import json, os, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "sys.path[:0] = json.loads(os.environ['RANKS_PATH'])\n"
        "import torch, torch.distributed as dist\n"
        "torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))\n"  # it was imported with another number
        f"from {function.__module__} import {function.__name__} as function\n"
        "rank, count = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        f"dist.init_process_group('gloo', init_method='file://{folder}/store', rank=rank, world_size=count)\n"
        f"print({ANSWER!r} + json.dumps(function(rank, *json.loads(os.environ['RANKS_GIVEN']))), flush=True)\n"
    )
    ranks: list[Rank] = []
    for r in range(count):
        environment = {
            **os.environ,
            "RANK": str(r),
            "LOCAL_RANK": str(r),
            "WORLD_SIZE": str(count),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "RANKS_PATH": json.dumps([str(ROOT / "tests" / "helpers"), str(Path(function.__code__.co_filename).parent)]),
            "RANKS_GIVEN": json.dumps(given),
            "TILEWRIGHT_CACHE": str(folder / "cache"),
            "TILEWRIGHT_WORKER": "0",
            **(each or {}).get(r, {}),
        }
        ranks.append(Rank(warm.start(["-c", program], environment, together=True)))
    return Job(ranks, kept)
