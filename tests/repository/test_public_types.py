"""Types of public names, as a user's type checker sees them: a part of `make types`, as pyright takes a quarter of a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright

# Generators, and the command line, which no user's program imports; classes whose bases transformers leaves untyped.
INTERNAL = ("candidates", "lowering", "cli", "integrations")

pytest.importorskip("pyright")


@pytest.mark.conformance
def test_every_public_name_has_a_type() -> None:
    assert (Path(tilewright.__file__).parent / "py.typed").is_file()
    # Pyright asks the first Python on the path where packages are, and knows nothing of an editable install's import hook.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(tilewright.__file__).parents[1])}
    command = [sys.executable, "-m", "pyright", "--verifytypes", "tilewright"]
    command += ["--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=found)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = [s for s in symbols if s["isExported"] and s["name"].split(".")[1] not in INTERNAL]
    assert {f"tilewright.{name}" for name in tilewright.__all__} - {s["name"] for s in public} == {"tilewright.__version__"}
    unknown = {s["name"]: [d["message"] for d in s["diagnostics"]] for s in public if not s["isTypeKnown"]}
    assert not unknown, json.dumps(unknown, indent=1)
