"""Accuracy of quantised programs: what quantising chose, and what it lost against the float model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from tilewright.hardware.load import uncrowded
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Gemm
from tilewright.report.measure.inputs import Feed
from tilewright.report.measure.perf import bind
from tilewright.report.schema import Accuracy, Layer, Loss, Quantized
from tilewright.rules.calibrate import Layer as Made
from tilewright.rules.calibrate import Scheme
from tilewright.runtime.executable import Executable

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

SAMPLE_ROWS = 256


def describe_quantization(scheme: Scheme, calibration: str, layers: Sequence[Made]) -> Quantized:
    """Describe what was chosen for every product that has a constant weight; `calibration` says on what data."""
    return Quantized(
        str(scheme),
        calibration,
        [Layer(m.where, _product(m.before), m.skip_reason, m.error, m.scale, *m.weight_scales) for m in layers],
    )


def _product(node: Node) -> str:
    assert isinstance(node.op, Gemm)
    return f"{node.op.lhs.type} @ {node.op.rhs.type}"


def accuracy(source: Graph, program: Executable, layers: Sequence[Made], feeds: Sequence[Feed]) -> Accuracy:
    """The quantised program against the float model it was made from, on the same inputs.

    Args:
        source: the float model, run by the oracle.
        program: compiled from its quantised form; its outputs are what is compared.
        layers: as `quantize` returned them. A layer's error holds what earlier layers lost, too.
        feeds: a value for each input.
    """
    inputs = bind(program, feeds)
    on_cpu = [t.cpu() for t in inputs]
    # Attention may have been recognised first: not all of these are nodes of `source`.
    befores = dict.fromkeys(m.before for m in layers)
    exact, wanted = _sampled(source.with_outputs([*source.outputs, *befores]), on_cpu, set(befores))
    quantized, _ = _sampled(program.source, on_cpu, {m.after for m in layers})
    losses = [Loss(m.where, str(m.before.type), relative_error(quantized[m.after], exact[m.before])) for m in layers]
    named = zip(source.output_names, source.outputs, program.run(inputs), wanted[: len(source.outputs)], strict=True)
    outputs = [
        Loss(name, str(node.type), relative_error(got.cpu(), reference))
        for name, node, got, reference in named
        if isinstance(got, torch.Tensor) and isinstance(reference, torch.Tensor)
    ]
    return Accuracy(losses, outputs)


@uncrowded()
def _sampled(graph: Graph, inputs: Sequence[torch.Tensor], nodes: set[Node]) -> tuple[Mapping[Node, torch.Tensor], list[Value]]:
    """Some rows of what `nodes` give, and the outputs."""
    seen: dict[Node, torch.Tensor] = {}

    def visit(node: Node, value: object) -> None:
        if node in nodes:
            rows = cast("torch.Tensor", value).detach()
            rows = rows.reshape(-1, rows.shape[-1])
            seen[node] = rows[:: max(rows.shape[0] // SAMPLE_ROWS, 1)][:SAMPLE_ROWS].clone()

    return seen, evaluate(graph, inputs, visit=visit)


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """|got - reference| / |reference|, Frobenius; of a reference that is zero, |got|."""
    g, r = got.double(), reference.double()
    size = float(r.norm())
    error = float((g - r).norm())
    return error / size if size else error
