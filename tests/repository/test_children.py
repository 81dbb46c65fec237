"""Processes that another one starts."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewright.children import ending

LONG = "import time; time.sleep(60)"
CHILD = f"from tilewright import children; children.die_with_parent(); print(1, flush=True); {LONG}"
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.read(1)
print(child.pid, flush=True)
os._exit(0)
"""

NOISY = """
import os
from tilewright import children
with children.answers("w") as out:
    os.write(1, b"noise")
    print("answer", file=out)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_child_ends_with_its_parent():
    done = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, check=True)
    state = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(1000):
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)
    pytest.fail("it goes on")


def test_answers_are_apart_from_what_libraries_print():
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("answer\n", "noise")


@pytest.mark.parametrize(
    ("code", "said"), [("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"), ("exit(3)", "ended with status 3")]
)
def test_the_end_in_words(code, said):
    assert ending(subprocess.run([sys.executable, "-c", code], check=False).returncode) == said
