"""Summary of a program and of a run of it, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tilewright.ir.graph import Graph, label_of
from tilewright.ir.ops import Const
from tilewright.report.program import target_name, tensor_types
from tilewright.report.schema import Output, Port, Quantized, Read, Saved
from tilewright.schedule.recipe import described

if TYPE_CHECKING:
    from tilewright.ir.graph import Value
    from tilewright.runtime.executable import Executable


def summarise(graph: Graph, name: str) -> Read:
    """Counts of a program as it was read."""
    nodes = graph.nodes()
    ops = Counter(n.op.name for n in nodes)
    return Read(
        program=name,
        inputs=[Port(label_of(n), str(n.type)) for n in graph.inputs],
        outputs=[Port(label, str(n.type)) for label, n in zip(graph.output_names, graph.outputs, strict=True)],
        nodes=len(nodes),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        constant_bytes=sum(n.tensor.size_bytes for n in nodes if isinstance(n.op, Const)),
        notes=list(graph.notes),
    )


def saved(program: Executable, name: str, path: Path, quantized: Quantized | None) -> Saved:
    """The summary of a program that was saved."""
    rebuilt = [
        "the source's own library" if s.decision is None else s.decision.kernel.candidate
        for s in program.steps
        if s.part.kind != "write" and (s.runner is None or not described(s.runner))
    ]
    steps, size = len(program.steps), path.stat().st_size
    built_by = list(dict.fromkeys(rebuilt))
    return Saved(name, target_name(program.target), str(path), size, steps, steps - len(rebuilt), built_by, quantized)


def comments(report: Read) -> str:
    """The counts as comments, to stand above the textual form."""
    ops = ", ".join(f"{name} {count:,}" for name, count in report.ops.items())
    lines = [f"{report.program}: {report.nodes:,} nodes, constants of {report.constant_bytes:,} bytes", ops]
    lines += [f"note: {note}" for note in report.notes]
    return "".join(f"// {' '.join(line.split())}\n" for line in lines if line)


def outputs(graph: Graph, results: Sequence[Value]) -> list[Output]:
    """A line for each result of a program; on a mesh `results` may be whole where the graph has a rank's part."""
    found: list[Output] = []
    for name, node, value in zip(graph.output_names, graph.outputs, results, strict=True):
        types = tensor_types(node)
        if isinstance(value, torch.Tensor) and len(types) == 1 and value.dim() == types[0].rank:
            types = [types[0].with_shape(value.shape)]
        found.append(_output(name, ", ".join(map(str, types)), value))
    return found


def _output(name: str, type: str, value: Value) -> Output:
    if not isinstance(value, torch.Tensor):
        return Output(name, type, None, None, None, None, 0, 0)
    wide = value.detach().cpu().double()
    finite = wide[wide.isfinite()]
    nans, infinities = int(wide.isnan().sum()), int(wide.isinf().sum())
    if not finite.numel():
        return Output(name, type, None, None, None, None, nans, infinities)
    low, high = (float(x) for x in torch.aminmax(finite))
    return Output(name, type, low, high, float(finite.mean()), float(finite.square().mean().sqrt()), nans, infinities)
