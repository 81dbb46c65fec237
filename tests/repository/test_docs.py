"""Every code block in the README, the docs and CONTRIBUTING runs; after the language, `no-run` leaves one out, `slow` to
`make conformance`, `triton` where that is not installed; `ranks` has torchrun start two processes, in `make conformance`.
Notebooks run there, too, their cells in order."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm
from paths import ROOT

BLOCK = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, only: str = "") -> list[pytest.param]:
    found, left_out = [], "no-run|ranks" if find_spec("triton") else "no-run|ranks|triton"
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for i, (kind, rest, body) in enumerate(BLOCK.findall(file.read_text())):
            if kind == language and (only in rest.split() if only else not re.search(left_out, rest)):
                marks = [pytest.mark.conformance] if "slow" in rest else []
                found.append(pytest.param(body, id=f"{file.relative_to(ROOT)}-{i}", marks=marks))
    return found


@functools.cache
def cache() -> tempfile.TemporaryDirectory[str]:
    """A folder for what the blocks measure: once for all of them."""
    return tempfile.TemporaryDirectory()


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, or a program of Python (`-c`), in a folder that has the examples and the tests, with ours on the path."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "tests"):
            (Path(folder) / name).symlink_to(ROOT / name)
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TILEWRIGHT_CACHE": os.environ.get("TILEWRIGHT_CACHE", cache().name),
            "OMP_NUM_THREADS": "1",
        }
        if command[0] == "-c":
            return warm.run(command, environment, folder, timeout=500)
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("page", sorted({p.id.rpartition("-")[0] for p in blocks("python")}))
def test_python_blocks(page: str) -> None:
    """Each has names of its own, and all of a page one process: to import torch takes longer than most of them do."""
    bodies = {p.id: p.values[0] for p in blocks("python") if p.id.rpartition("-")[0] == page}
    done = run(["-c", f"for name, body in {bodies!r}.items(): exec(compile(body, name, 'exec'), {{}})"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("body", blocks("sh"))
def test_shell_block(body: str) -> None:
    done = run(["bash", "-euc", body])
    assert done.returncode == 0, done.stderr


@pytest.mark.conformance
@pytest.mark.parametrize("body", blocks("python", "ranks"))
def test_python_blocks_of_two_ranks(body: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(body)
    done = run(["torchrun", "--standalone", "--nproc-per-node", "2", str(tmp_path / "program.py")])
    assert done.returncode == 0, done.stderr


@pytest.mark.conformance
@pytest.mark.parametrize("notebook", sorted((ROOT / "docs").rglob("*.ipynb")), ids=lambda p: p.name)
def test_notebook(notebook: Path) -> None:
    cells = [c for c in json.loads(notebook.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    assert len(cells) > 3 and any(c["outputs"] for c in cells)
    bodies = ["".join(c["source"]) for c in cells]
    done = run(
        [
            "-c",
            f"names = {{}}\nfor i, b in enumerate({bodies!r}): exec(compile(b, f'cell {{i}}', 'exec'), names)",
        ]
    )
    assert done.returncode == 0, done.stderr


def test_there_are_blocks_of_both_kinds() -> None:
    assert len(blocks("python")) >= 5
    assert len(blocks("sh")) >= 1
    assert len(blocks("python", "ranks")) >= 2


def test_every_language_is_known() -> None:
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for kind, _, body in BLOCK.findall(file.read_text()):
            assert kind in ("python", "sh", "text", "json"), f"{file.name}: {kind or 'no language'}: {body[:40]}"
