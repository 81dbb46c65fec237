"""`compile` writes a program, and the other verbs run what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from cli_programs import FAST, install_ceilings, invoke, write

import tilewright
from tilewright.candidates.llvm.runtime.engine import available
from tilewright.dtype import F32
from tilewright.ir.build import const, input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.literal_file import FILE
from tilewright.ir.ops import gemm
from tilewright.runtime.executable import Executable

pytestmark = pytest.mark.skipif(available() is not None, reason="no kernels for this processor")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_ceilings(monkeypatch)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))


def layer(tmp_path: Path, columns: int) -> Path:
    x = input_("x", F32, (4, 32))
    numbers = np.random.default_rng(0).standard_normal((32, columns)).astype(np.float32)
    np.savez(tmp_path / FILE, **{"f32 constant": numbers})
    weight = const(numbers.tolist(), F32)
    return Path(write(tmp_path, Graph("layer", (x,), (map_("relu", gemm(x, weight)),), ("y",))))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return layer(tmp_path, 8)


def test_a_program_is_compiled_once_and_run_verified_timed_and_explained(program: Path, tmp_path: Path) -> None:
    saved = tmp_path / "layer.twp"
    result = invoke("compile", program, "-o", saved, *FAST)
    assert result.exit_code == 0, result.output
    assert f"Writtento{saved}:0.0MB,1step." in "".join(result.stdout.split())
    runs = [invoke("run", p, "--output", tmp_path / f"{p.suffix[1:]}.npz", *FAST) for p in (program, saved)]
    assert [r.exit_code for r in runs] == [0, 0]
    before, after = (np.load(tmp_path / f"{p.suffix[1:]}.npz")["y"] for p in (program, saved))
    assert (before == after).all()
    verified = invoke("verify", saved)
    assert verified.exit_code == 0 and "Verified: 1 step and 1 output agree" in verified.stdout
    found = json.loads(invoke("perf", saved, "--json", "-n", "2").stdout)
    assert found["steps"][0]["candidate"] == "llvm"
    assert invoke("explain", saved).exit_code == 0
    assert "graph" in invoke("read", saved).stdout


def test_compile_says_what_is_built_when_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = layer(tmp_path, 7)  # for which no other test made a plan
    monkeypatch.setattr("tilewright.candidates.llvm.gemm.candidate.choose", lambda *_: None)
    found = json.loads(invoke("compile", program, "-o", tmp_path / "a.twp", "--json", *FAST).stdout)
    assert found["complete"] < found["steps"] and found["built_by"]
    assert found["bytes"] == (tmp_path / "a.twp").stat().st_size and found["written"] == str(tmp_path / "a.twp")
    text = invoke("compile", program, "-o", tmp_path / "a.twp", *FAST).stdout
    assert f"will be built by {', '.join(found['built_by'])}." in " ".join(text.split())


def test_a_file_that_was_saved_elsewhere_needs_trust(program: Path, tmp_path: Path) -> None:
    saved = tmp_path / "layer.twp"
    invoke("compile", program, "-o", saved, *FAST)
    (tmp_path / "cache" / "key").write_bytes(bytes(32))
    refused = invoke("run", saved)
    assert refused.exit_code == 2 and "--trust" in refused.stderr
    assert invoke("run", saved, "--trust").exit_code == 0
    own = tmp_path / "own.twp"
    assert invoke("compile", saved, "-o", own).exit_code == 2 and not own.exists()
    assert invoke("compile", saved, "-o", own, "--trust").exit_code == 0
    assert invoke("run", own).exit_code == 0, "it is signed by who trusted it"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "layer.twp", "--int8"], "--int8, --fp8 and --w4: this program is compiled already"),
        (["perf", "layer.twp", "--fp16"], "--fp16 and --bf16: this program is compiled already"),
        (["verify", "layer.twp", "--excess-precision"], "--excess-precision: this program"),
        (["explain", "layer.twp", "--dump", "folder"], "--dump: this program"),
        (["run", "PROGRAM", "--trust"], "--trust is for a saved program"),
        (["compile", "PROGRAM", "-o", "layer.out"], "a saved program is told by its suffix"),
        (["compile", "PROGRAM", "-o", "layer.twp", "--dim", "x=1:4"], "a saved program has one shape, and --dim"),
    ],
)
def test_options_that_would_do_nothing_are_errors(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("compile", program, "-o", "layer.twp", *FAST)
    result = invoke(*[str(program) if a == "PROGRAM" else a for a in args])
    assert result.exit_code == 2 and words in " ".join(result.stderr.split()), result.stderr


def test_the_number_of_threads_is_saved_and_another_one_may_be_said(tmp_path, program, monkeypatch):
    """Each command in a thread of its own, which is told the number."""
    saved, seen, run = tmp_path / "layer.twp", [], Executable.run
    monkeypatch.setattr(Executable, "run", lambda self, *given: (seen.append(self.threads), run(self, *given))[1])
    before = torch.get_num_threads()

    def command(*words):
        done = []
        thread = Thread(target=lambda: done.append(invoke(*words)))
        thread.start()
        thread.join()
        torch.set_num_threads(before)
        assert done[0].exit_code == 0, done[0].output

    command("compile", program, "-o", saved, "--threads", "1", *FAST)
    assert tilewright.load_program(saved).threads == 1
    command("run", saved)
    command("run", saved, "--threads", "2")
    assert seen == [1, 2]
