"""Versions that were tried: one table, which the package's own bounds, CI and the pages agree with."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import chain

import pytest
from cli_programs import FAST, install_ceilings, invoke, write
from paths import ROOT

from tilewright import versions
from tilewright.ir.notation import parse
from tilewright.versions import TRIED, untried

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FIRST, LAST = (int(v.partition(".")[2]) for v in TRIED["python"])
PYTHONS = [f"3.{minor}" for minor in range(FIRST, LAST + 1)]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")


def test_the_package_asks_for_what_was_tried_and_for_nothing_older() -> None:
    wanted = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    asked = {m[1]: m[2] for line in wanted if (m := re.match(r"([\w-]+)>=([\d.]+)", line))}
    assert {name: asked[name] for name in TRIED if name != "python"} == {n: v[0] for n, v in TRIED.items() if n != "python"}
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_continuous_integration_has_every_python_that_is_promised() -> None:
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert json.loads(re.search(r"python: (\[.*\])", WORKFLOW)[1]) == promised  # pyright: ignore[reportOptionalSubscript]
    assert set(PYTHONS) <= set(promised)


def test_the_page_names_the_versions() -> None:
    page = (ROOT / "docs" / "versions.md").read_text("utf-8")
    for name, (first, last) in TRIED.items():
        assert re.search(rf"^\| {name} \| {re.escape(first)} \| {re.escape(last)} \|", page, re.M | re.I), name


def test_a_newer_version_is_said_and_an_older_or_missing_one_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def version(name: str) -> str:
        if name == "jaxlib":
            raise versions.PackageNotFoundError(name)
        return {"torch": "9.1.0a0+cpu", "triton": f"{TRIED['triton'][1]}.7"}.get(name, "0.1")

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(versions.platform, "python_version", lambda: "3.99.1rc2")
    python, torch = untried()
    assert python == f"python 3.99.1rc2 was not tried: the newest that was is {TRIED['python'][1]}"
    assert torch == f"torch 9.1.0a0+cpu was not tried: the newest that was is {TRIED['torch'][1]}"
    install_ceilings(monkeypatch)
    program = write(tmp_path, parse("f32[2,4] @ f32[4,3]"))
    assert json.loads(invoke("explain", program, "--json", *FAST).stdout)["notes"] == [python, torch]
    assert f"Note: {torch}." in " ".join(invoke("explain", program, *FAST).stdout.split())
