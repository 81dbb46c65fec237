"""Triton decides once in a process whether it interprets: the tests of triton_interpreted*.py run in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = sorted(p.name for p in HERE.glob("triton_interpreted*.py"))


@pytest.mark.parametrize("file", FILES)
def test_what_the_interpreter_makes_of_generated_code(file):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
