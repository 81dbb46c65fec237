"""Programs, machines and kernels for the tests of the command line and its reports."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from tilewright.candidates import reference
from tilewright.dtype import F32, S8, S64
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast, convert, input_, map_, reshape, transpose
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call, Gather, LayerNorm, Quantize, gemm
from tilewright.ir.text import print_graph
from tilewright.ir.types import TensorType
from tilewright.schedule import bench, search
from tilewright.schedule.candidate import Kernel, Runner, Schedule
from tilewright.schedule.problem import AnyProblem

FAST = ("--budget", "0")


def block() -> Graph:
    """A token lookup, a mask, a gemm with bias and relu, a norm, an opaque call, a quantisation of an input, a view."""
    ids, mask = input_("ids", S64, (2, 5)), input_("mask", S64, (2, 5))
    table, w, b = input_("table", F32, (11, 8)), input_("w", F32, (8, 6)), input_("b", F32, (6,))
    x, scale = input_("x", F32, (4, 4)), input_("scale", F32, ())
    kept = broadcast(reshape(convert(mask, F32), (2, 5, 1)), (2, 5, 8))
    hidden = map_("multiply", Node(Gather(0), table, ids), kept)
    product = map_("relu", map_("add", gemm(hidden, w), b))
    norm = Node(LayerNorm(2, 1e-5), product)
    call = Node(Call("fake_library", "Frobnicate", "{}", (TensorType(F32, (2, 5, 6)),)), norm)
    codes = Node(Quantize(S8), x, scale)
    origins = {call: "net/Frobnicate", codes: "net/Quantize", product: "net/Relu"}
    return Graph(
        "block",
        (ids, mask, table, w, b, x, scale),
        (call, codes, transpose(table, (1, 0))),
        ("y", "codes", "turned"),
        origins,
        ("assumed a default",),
    )


def install_fake_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end whose opaque operation doubles its operand, or gives a text."""
    module = types.ModuleType("tilewright.frontends.fake_library")
    module.evaluate_call = lambda call, values: ["text"] if call.target == "Strings" else [2 * values[0]]  # type: ignore[attr-defined]
    module.check_call = lambda call, sources: []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def install_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings out of thin air, so that no test waits for a measurement."""

    def with_ceilings(target: Target, *, remeasure: bool = False) -> Target:
        peaks = {"f32": 200.0 if remeasure else 100.0, "s8": 400.0, "odd": 1.0}
        return replace(target, peak_gops=peaks, read_gbps=10.0, copy_gbps=8.0)

    monkeypatch.setattr("tilewright.hardware.ceilings.with_ceilings", with_ceilings)
    for module in ("explain.machine", "measure.work"):
        monkeypatch.setattr(f"tilewright.report.{module}.with_ceilings", with_ceilings)
    monkeypatch.setattr("tilewright.report.measure.work.with_ceilings", with_ceilings)


class Wrong:
    """A kernel whose first element is off by one."""

    name = "wrong"
    kinds = frozenset({"gemm", "attention"})
    devices = frozenset({"cpu"})
    ranks = "one"
    preference = 1

    def plan(self, problem: AnyProblem, target: Target) -> WrongPlan:
        return WrongPlan(problem)


@dataclass(frozen=True)
class WrongPlan:
    problem: AnyProblem

    def schedules(self) -> Iterable[Schedule]:
        return (Schedule(),)

    def build(self, schedule: Schedule) -> Kernel:
        problem = self.problem

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                value = problem.node.op.evaluate(problem.node, sources)
                results = list(value) if isinstance(value, tuple) else [value]
                results[0].reshape(-1)[0] += 1
                return results

            return run

        return Kernel(Wrong.name, schedule, prepare)


def install_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wrong kernel competes where there is a product, and nobody examines it."""
    monkeypatch.setattr(search, "discover", lambda: [Wrong(), reference.CANDIDATE])
    monkeypatch.setattr(bench, "examine", lambda *given, **more: None)


def write(folder: Path, graph: Graph) -> str:
    """A program as a .tw file."""
    path = folder / f"{graph.name}.tw"
    path.write_text(print_graph(graph))
    return str(path)


def invoke(*args: object, env: Mapping[str, str] | None = None, typed: str | None = None) -> Result:
    """A command line's result; a bug is raised, not swallowed, unless the command line itself reported it."""
    from tilewright.cli.verbs import cli

    return CliRunner().invoke(cli, [str(a) for a in args], env=env, input=typed, prog_name="tilewright")
