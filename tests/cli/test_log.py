"""Logging: a program that uses the package decides what becomes of its messages, the command line shows them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from cli_programs import invoke

import tilewright
from tilewright.errors import LOGGER, InputError, say

SRC = Path(tilewright.__file__).parent


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.errors._said", set())


def test_a_program_that_logs_hears_each_line_once_and_standard_error_nothing(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        say("the disk is full\x1b[2J")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("tilewright", logging.WARNING)
    assert record.getMessage() == r"the disk is full\x1b[2J" and capfd.readouterr() == ("", "")


def test_the_command_line_shows_lines_and_leaves_logging_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def described(*_: object, **__: object) -> None:
        say("the disk is full")
        logging.getLogger("tilewright.some.module").info("50 of 100 done\x1b[2J")
        logging.getLogger("tilewright.some.module").debug("detail")
        raise InputError("no")

    monkeypatch.setattr("tilewright.report.explain.machine.describe_machine", described)
    before = (LOGGER.handlers[:], LOGGER.level, LOGGER.propagate)
    lines = invoke("devices").stderr.splitlines()
    assert lines == ["tilewright: the disk is full", r"tilewright: 50 of 100 done\x1b[2J", "error: no"]
    assert not caplog.records and (LOGGER.handlers, LOGGER.level, LOGGER.propagate) == before


def test_the_package_writes_to_standard_error_in_the_command_line_alone() -> None:
    writers = {
        "cli/errors.py", "cli/given.py", "cli/untrusted.py", "cli/verbs.py",
        "schedule/fork_server.py",  # a helper process, whose standard error its parent reads
    }  # fmt: skip
    assert {str(p.relative_to(SRC)) for p in SRC.rglob("*.py") if "sys.stderr" in p.read_text("utf-8")} == writers
