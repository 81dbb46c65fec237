"""torch's own compiler, Inductor: fusions on a GPU for which no kernel is generated here."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tilewright.files import cache_folder, foreign
from tilewright.hardware.target import Target
from tilewright.ir.evaluate import evaluator
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import (
    FUSION,
    GPU,
    MATRIX_LIBRARIES,
    Candidate,
    FixedPlan,
    Kernel,
    Refusal,
    Schedule,
    concerns,
    discover,
    refusal,
)
from tilewright.schedule.problem import FusionProblem
from tilewright.tracing import TRACING

INDUCTORS = "TORCHINDUCTOR_CACHE_DIR"


def _build(problem: FusionProblem, target: Target, schedule: Schedule) -> Kernel:
    compiled = _compiled(problem, torch.device(target.device))
    called: list[bool] = []

    def run(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with contextlib.nullcontext() if called else TRACING:  # the first call compiles
            results = compiled(*(s.contiguous() for s in sources))  # it would compile anew for other strides
        called[:] = [True]
        return results

    return Kernel(CANDIDATE.name, schedule, lambda weights: run)


def keep_folders_own() -> None:
    """See that Inductor writes what it compiles, and reads it back, where nobody else can write: unless the user names a
    folder, torch takes one in the system's temporary folder, which somebody else may have made first.

    Raises:
        OSError: there is no folder of this user's to take in its place.
    """
    if os.environ.get(INDUCTORS):
        return
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    with contextlib.suppress(OSError):
        usual.mkdir(mode=0o700, exist_ok=True)
    if not usual.is_dir() or foreign(usual) is not None:
        os.environ[INDUCTORS] = str(cache_folder() / "inductor")


def _compiled(problem: FusionProblem, device: torch.device) -> Callable[..., Sequence[torch.Tensor]]:
    """The fusion as one function that Inductor compiles at its first call, rounding wherever the graph rounds."""
    from torch.fx.experimental.proxy_tensor import make_fx

    evaluate = evaluator(problem.roots, [Node(Param(i, t)) for i, t in enumerate(problem.types)])

    def region(*sources: torch.Tensor) -> list[torch.Tensor]:
        return cast("list[torch.Tensor]", evaluate(sources))

    keep_folders_own()
    given = [torch.empty(t.shape, dtype=t.dtype.to_torch(), device=device) for t in problem.types]
    with TRACING, torch.no_grad():
        traced = make_fx(region, tracing_mode="fake")(*given)
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return cast("Callable[..., Sequence[torch.Tensor]]", torch.compile(traced, fullgraph=True, dynamic=False, options=options))


def plan(problem: FusionProblem, target: Target) -> FixedPlan | Refusal:
    """Take fusions that compute something and for which no candidate generates a kernel; else a refusal."""
    if problem.only_views:
        return Refusal("nothing is computed")
    for other in discover():
        generated = concerns(other, problem, target) and other.preference < MATRIX_LIBRARIES.start
        if generated and refusal(other, problem, target) is None:
            return Refusal(f"{other.name} generates a kernel, and Inductor takes seconds to compile one")
    return FixedPlan((Schedule(),), partial(_build, problem, target))


CANDIDATE = Candidate("inductor", FUSION, GPU, 30, plan, slow=True)  # on a CPU it needs a C++ compiler
