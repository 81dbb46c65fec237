"""Inductor as a candidate: when it is asked, and that what it is given means what the fusion means."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tilewright.candidates.library import inductor
from tilewright.candidates.library.inductor import CANDIDATE
from tilewright.dtype import F16, F32
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast, convert, map_, reduce_, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Schedule, concerns, plan_for, refusal
from tilewright.schedule.problem import FusionProblem

H200 = Target("NVIDIA H200", CHIP, "cuda", 132, features=frozenset({"cuda", "sm_90"}))
X = Node(Param(0, TensorType(F16, (48, 40))))


def fusion(*roots: Node) -> FusionProblem:
    return FusionProblem(roots, (X.tensor,), (False,))


def both_ways() -> FusionProblem:
    """Sums along rows and along columns: no generated kernel has both."""
    rows = reduce_("add", X, [1], keepdims=True)
    columns = reduce_("add", map_("tanh", X), [0], keepdims=True)
    return fusion(convert(map_("add", broadcast(rows, (48, 40)), broadcast(columns, (48, 40))), F32), map_("tanh", X))


def test_it_is_asked_where_no_kernel_is_generated() -> None:
    assert concerns(CANDIDATE, both_ways(), H200) and not concerns(CANDIDATE, both_ways(), detect("cpu"))
    assert refusal(CANDIDATE, both_ways(), H200) is None
    assert refusal(CANDIDATE, fusion(transpose(X, (1, 0))), H200) == "nothing is computed"
    served = refusal(CANDIDATE, fusion(map_("tanh", X)), H200)
    assert served == "triton_norm generates a kernel, and Inductor takes seconds to compile one"


def test_what_it_compiles_means_what_the_fusion_means(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def compile(function: object, **options: object) -> object:
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    problem = both_ways()
    (schedule,) = plan_for(CANDIDATE, problem, H200).schedules()
    run = plan_for(CANDIDATE, problem, detect("cpu")).build(schedule).prepare({})
    for x in (torch.randn(48, 40, dtype=torch.float16), torch.randn(40, 48, dtype=torch.float16).t()):
        got, want = run([x]), evaluate_nodes(problem.roots, {X: x})
        for mine, right in zip(got, want, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=0)
    assert schedule == Schedule() and asked[0]["options"] == {"emulate_precision_casts": True}


@pytest.mark.parametrize("kind", ["none", "own", "open", "link"])
def test_what_it_compiles_lies_where_nobody_else_writes(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"torchinductor_{getpass.getuser()}"
    assert Path(default_cache_dir()) == usual
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        usual.symlink_to(tmp_path / "elsewhere")
    elif kind != "none":
        usual.mkdir(mode=0o700)
        usual.chmod(0o777 if kind == "open" else 0o700)
    inductor.keep_folders_own()
    if kind in ("none", "own"):
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and usual.stat().st_mode & 0o777 == 0o700
    else:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(usual))
    inductor.keep_folders_own()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(usual), "what the user says holds"
