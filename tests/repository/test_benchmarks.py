"""Benchmarks are run by hand: what they import must still be there when they are."""

import os
import subprocess
import sys

from paths import ROOT

FOLDER = ROOT / "benchmarks"


def test_every_benchmark_can_be_imported():
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    code = f"import importlib\nfor name in {names}:\n    importlib.import_module(name)\n"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert names and ran.returncode == 0, ran.stderr[-2000:]
