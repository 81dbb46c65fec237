"""Every code block in the README and the docs runs. `no-run` after the language leaves one out; `text` is no code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[pytest.param]:
    found = []
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for i, (kind, rest, body) in enumerate(BLOCK.findall(file.read_text())):
            if kind == language and "no-run" not in rest:
                found.append(pytest.param(body, id=f"{file.name}-{i}"))
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    bin_folder = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "TILEWRIGHT_CACHE": os.environ.get("TILEWRIGHT_CACHE", str(tmp_path / "cache")),
    }


@pytest.mark.parametrize("body", blocks("python"))
def test_python_block(body: str, tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", body], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("body", blocks("sh"))
def test_shell_block(body: str, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(["bash", "-euc", body], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_blocks_of_both_kinds() -> None:
    assert len(blocks("python")) >= 5
    assert len(blocks("sh")) >= 1


def test_every_language_is_known() -> None:
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for kind, _, body in BLOCK.findall(file.read_text()):
            assert kind in ("python", "sh", "text", "json"), f"{file.name}: {kind or 'no language'}: {body[:40]}"
