"""Triton decides once in a process whether it interprets: the tests of triton_interpreted*.py run in a process of their own."""

import os
import subprocess
import sys

import pytest
from paths import HELPERS, ROOT

pytest.importorskip("triton")
FILES = sorted(map(str, HELPERS.glob("triton_interpreted*.py")))


@pytest.mark.parametrize("of", ["not conformance", pytest.param("conformance", marks=pytest.mark.conformance)])
def test_what_the_interpreter_makes_of_generated_code(of):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", of, *FILES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
