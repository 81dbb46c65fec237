"""Programs of JAX with shardings, by three texts each, on eight simulated ranks, against what JAX computes on eight devices."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sharded_jax
import torch

from tilewright.errors import UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.ir.evaluate import evaluate_mesh
from tilewright.ir.graph import label_of

pytestmark = pytest.mark.conformance
# What Shardy does not partition, or partitions along parts of axes; and results of XLA whose placement is lost.
SAID = re.compile(
    r"Shardy, as jaxlib has it, cannot partition the program|do not lie along axes of the mesh|the program does not say how|"
    r"no meaning for complex numbers|custom call to 'lapack"
)
READ = 145  # of the texts below, at least


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sharded")
    subprocess.run([sys.executable, sharded_jax.__file__, str(made)], check=True, timeout=300)
    return made


def arrays(file: Path, kind: str) -> list[torch.Tensor]:
    held = np.load(file)
    found = (held[name] for name in sorted(held.files, key=lambda n: int(n.lstrip("inout"))) if name.startswith(kind))
    return [torch.from_numpy(v).view(torch.bfloat16) if v.dtype == np.uint16 else torch.from_numpy(v) for v in found]


def test_ranks_together_compute_what_jax_does(folder: Path) -> None:
    outcomes: list[bool] = []
    for file in sorted(folder.glob("*.npz")):
        inputs, results = arrays(file, "in"), arrays(file, "out")
        for suffix in (".mlir", ".hlo", ".partitioned.hlo"):
            text = file.with_suffix(suffix)
            try:
                graph = load(text, LoadOptions(mesh=sharded_jax.MESH))  # type: ignore[arg-type]
            except UnsupportedError as error:
                assert SAID.search(str(error)), (text.name, str(error))
                outcomes.append(False)
                continue
            assert graph.mesh is not None
            given = zip(graph.inputs, graph.placements, inputs, strict=False)
            split = {label_of(n): lies.split(value, graph.mesh) for n, lies, value in given}
            found = evaluate_mesh(graph, [{n: s[r] for n, s in split.items()} for r in range(8)], graph.mesh)
            left = graph.placements[len(graph.inputs) :]
            assert len(left) == len(results), text.name
            for i, (lies, wanted) in enumerate(zip(left, results, strict=True)):
                joined = lies.joined([f[i] for f in found], graph.mesh)  # type: ignore[misc]
                rtol = 2e-2 if wanted.dtype is torch.bfloat16 else 1e-4
                torch.testing.assert_close(joined, wanted, rtol=rtol, atol=1e-4, msg=lambda m, t=text: f"{t.name}: {m}")
            outcomes.append(True)
    assert len(outcomes) == 3 * len([*folder.glob("*.npz")]) and sum(outcomes) >= READ
