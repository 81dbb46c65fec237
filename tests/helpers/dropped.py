"""Fake candidates in folders of their own, where a worker process finds them too."""

import os
import textwrap
from pathlib import Path

from tilewright.schedule.candidate import Candidate, discover

TEXT = """
import ctypes, os, signal, sys, time
import torch
from tilewright.schedule.candidate import CPU, GEMM, Candidate, Kernel
from tilewright.schedule.candidate import Schedule

class Fake:
    def schedules(self):
        return [Schedule.of(point=i) for i in range({points})]

    def build(self, schedule):
        calls = []
{build}
        def run(s):
            calls.append(1)
{run}
            return [s[0] @ s[1]]
        return Kernel({name!r}, schedule, lambda weights: run)

def plan(problem, target):
    return Fake()

CANDIDATE = Candidate({name!r}, GEMM, CPU, {preference}, plan)
"""

_counter = iter(range(10_000))


def dropped(within: Path, run: str = "pass", build: str = "pass", preference: int = 20, points: int = 1) -> Candidate:
    """A fake that does a plain product, in a folder of its own; `build` and `run` are what it does before that."""
    name = f"dropped_{os.getpid()}_{next(_counter)}"
    folder = within / name
    folder.mkdir()
    text = TEXT.format(
        name=name,
        preference=preference,
        points=points,
        build=textwrap.indent(textwrap.dedent(build), " " * 8),
        run=textwrap.indent(textwrap.dedent(run), " " * 12),
    )
    (folder / f"{name}.py").write_text(text)
    return next(c for c in discover([folder]) if c.name == name)
