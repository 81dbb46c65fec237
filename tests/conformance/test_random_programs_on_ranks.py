"""Random programs with random placements on ranks of their own, over gloo: each rank's part of what the whole program gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from meshes import placed_programs
from ranks import job

from tilewright.dtype import F32
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import label_of
from tilewright.ir.mesh import split_feeds
from tilewright.ir.ops import AllReduce, Convert, Quantize, ReduceScatter
from tilewright.ir.text import parse, print_with_literals
from tilewright.rules.shard import localise

pytestmark = pytest.mark.conformance
COUNT = 15
MESHES = {2: ("tp=2",), 4: ("tp=4", "dp=2,tp=2")}


def drawn(meshes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Programs of one rank as texts, with whole inputs and what the whole program gives. The same at every run."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=120 * COUNT,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(placed_programs())
    def collect(drawn):
        graph, feeds = drawn
        assert graph.mesh is not None
        if str(graph.mesh) not in meshes or len(found) >= COUNT:
            return
        local = localise(graph)
        text, literals = print_with_literals(local)
        sums = {n.dtype for n in local.nodes() if isinstance(n.op, (AllReduce, ReduceScatter)) and n.dtype.is_float}
        jumps = any(isinstance(n.op, (Quantize, Convert)) or getattr(n.op, "fn", "") == "floor" for n in graph.nodes())
        told = not literals and (not sums or (sums == {F32} and not jumps))
        if told and any(n.op.meets for n in local.nodes()):
            wanted = evaluate(graph, feeds, float64=True)
            found.append({"text": text, "feeds": feeds, "wanted": wanted, "mesh": str(graph.mesh), "exact": not sums})

    collect()
    return found


def computed(rank: int, folder: str, count: int) -> object:
    """Say how far this rank's parts are off, program by program, and the kernels."""
    import tilewright

    said = []
    for i in range(count):
        given_ = torch.load(Path(folder) / f"{i}.pt", weights_only=True)
        local = parse(given_["text"])
        assert local.mesh is not None
        lies = dict(zip(map(label_of, local.inputs), local.placements, strict=False))
        program = cast("Any", tilewright.compile(local, mesh=given_["mesh"], budget_s=0))
        results = program(**split_feeds(given_["feeds"], lies, local.mesh)[rank])
        results = results if isinstance(results, tuple) else (results,)
        right = True
        for got, whole, placement in zip(results, given_["wanted"], local.placements[len(local.inputs) :], strict=True):
            part = placement.split(whole, local.mesh)[rank]
            if given_["exact"]:
                rtol = atol = 0.0
            else:
                largest = float(whole.double().abs().nan_to_num(0, 0, 0).max()) if whole.numel() else 0.0
                rtol, atol = 1e-5, 1e-5 * largest
            right = right and got.dtype == part.dtype
            right = right and torch.allclose(got.double(), part.double(), rtol=rtol, atol=atol, equal_nan=True)
        kernels = [(s.decision.kernel.candidate, str(s.decision.kernel.schedule)) for s in program.steps if s.decision]
        said.append([right, kernels])
    return said


@pytest.mark.parametrize("count", MESHES)
def test_ranks_give_their_parts_of_random_programs(count, tmp_path):
    found = drawn(MESHES[count])
    assert len(found) == COUNT
    for i, one in enumerate(found):
        torch.save(one, tmp_path / f"{i}.pt")
    first, *others = cast("list[list[Any]]", job(computed, count, str(tmp_path), COUNT).answers())
    for i, one in enumerate(first):
        assert one[0] and all(o[i] == one for o in others), found[i]["text"]
    assert any(name == "sequential" for _, kernels in first for name, _ in kernels)
