"""The demo says what is wrong with its arguments before minutes of work."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import demo


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--only", "nothing"],
            "none of xla_s8, xla_s32, mixed_input, linear_gelu, bert, bert_int8, distilgpt2 starts with 'nothing'",
        ),
        (["--only", "bert", "--only", ":"], "starts with ':'"),
        (["--json", "none/rows.json"], "cannot be written: No such file or directory (none/rows.json)"),
        (["--out", "file/models"], "Not a directory: 'file/models'"),
    ],
)
def test_arguments_that_cannot_be(given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(demo, "run_program", never)
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = CliRunner().invoke(demo.main, given)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
