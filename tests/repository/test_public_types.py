"""Who uses the package with a type checker sees the type of every public name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright

INTERNAL = ("candidates", "lowering", "cli")  # generators, and the command line: nothing that a user's program imports

pytest.importorskip("pyright")


def test_every_public_name_has_a_type() -> None:
    assert (Path(tilewright.__file__).parent / "py.typed").is_file()
    command = [sys.executable, "-m", "pyright", "--verifytypes", "tilewright", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = [s for s in symbols if s["isExported"] and s["name"].split(".")[1] not in INTERNAL]
    assert {f"tilewright.{name}" for name in tilewright.__all__} - {s["name"] for s in public} == {"tilewright.__version__"}
    unknown = {s["name"]: [d["message"] for d in s["diagnostics"]] for s in public if not s["isTypeKnown"]}
    assert not unknown, json.dumps(unknown, indent=1)
