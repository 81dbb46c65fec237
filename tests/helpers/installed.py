"""Packages as pip installs them into a folder: modules, metadata and entry points. Programs that find them run as processes of
their own, since a process looks for plug-ins once."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import warm


def install(
    folder: Path, package: str, modules: Mapping[str, str], points: Mapping[str, Mapping[str, str]], version: str = "0.1"
):
    """Leave the modules (by file name) and metadata of a package with these entry points (by group and name) in a folder."""
    for name, text in modules.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    sections = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items())
    (info / "entry_points.txt").write_text("\n".join(sections))
    return info


def run(program: str, *folders: Path, timeout_s: float = 200, **environment: str) -> tuple[str, str]:
    """Run a program with the folders on Python's path; give what it prints, and what it writes to standard error."""
    path = os.pathsep.join([*map(str, folders), *(p for p in sys.path if p)])
    given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    if "TRITON_INTERPRET" in environment:  # which Triton reads when it is imported
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=timeout_s)
    else:
        done = warm.run(["-c", program], given, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
