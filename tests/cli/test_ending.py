"""The command ends its process at once behind its answer: what ends a process is done, its objects are not taken apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, sys, threading, time
import tilewright.__main__ as command

atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
sys.argv = ["tilewright", *sys.argv[1:]]
{before}
try:
    command.command()
finally:
    print("unwound")
"""
BAD = ["read", "no_such_file.onnx"]


def ended(*words, before="", out=subprocess.PIPE):
    script = [sys.executable, "-c", SCRIPT.format(before=before), *words]
    own = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(script, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120, env=own)


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (BAD, 2)])
def test_what_ends_a_process_is_done_and_its_objects_stay(words, code):
    run = ended(*words)
    assert run.returncode == code, run.stderr
    lines = run.stdout.splitlines()
    assert lines[-2:] == ["of a thread", "at exit"] and "unwound" not in lines
    assert ("version" in lines[0]) if code == 0 else ("no_such_file.onnx" in run.stderr)


@pytest.mark.parametrize("watched", ["sys.setprofile(lambda *_: None)", "sys.settrace(lambda *_: None)"])
def test_who_watches_python_sees_its_end(watched):
    run = ended("--version", before=watched)
    assert run.returncode == 0 and run.stdout.splitlines()[-3:] == ["unwound", "of a thread", "at exit"]


def test_a_profile_is_written():
    script = [sys.executable, "-m", "cProfile", "-m", "tilewright", "--version"]
    run = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "function calls" in run.stdout


def test_output_that_cannot_be_written_at_the_end_is_no_success():
    before = "atexit.register(lambda: print('x' * 100))"
    only_late = "import tilewright.cli.verbs; command.main = lambda: sys.exit(0); " + before
    with Path("/dev/full").open("w") as full:
        assert ended(before=only_late, out=full).returncode == 120
