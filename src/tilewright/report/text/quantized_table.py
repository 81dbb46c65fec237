"""Tables of how a model was quantised and what it lost, for people."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from tilewright.report.schema import Accuracy, Layer, Loss, Quantized
from tilewright.report.text.tables import heading, line, table
from tilewright.report.words import count

MOST_LAYERS = 16


def print_quantized(out: Console, report: Quantized | None, *, everything: bool = False) -> None:
    """The choices, layers left in float first, then those that lose most; `everything` lists all."""
    if report is None:
        return
    heading(out, "Quantised")
    if not report.layers:
        line(out, "Nothing: no product of a float with a constant matrix was found.", style="yellow")
        return
    kept = sum(1 for layer in report.layers if layer.skip_reason is not None)
    line(out, f"{report.scheme}; calibrated on {report.calibration}.")
    stay = f", {count(kept, 'layer')} left in float" if kept else ""
    line(out, f"{count(len(report.layers) - kept, 'layer')} quantised{stay}.")
    made = table(
        ("layer", "left"), ("product", "left"), ("error %", "right"), ("activation scale", "right"), ("weight scales", "right")
    )
    made.add_column("", overflow="fold")
    ordered = sorted(report.layers, key=lambda x: (x.skip_reason is None, -_size(x.error)))
    shown = ordered if everything else ordered[: max(MOST_LAYERS, kept)]
    for x in shown:
        scale = "" if x.activation_scale is None else f"{x.activation_scale:.3g}"
        note = Text("" if x.skip_reason is None else f"in float: {x.skip_reason}", style="yellow")
        made.add_row(Text(x.name), Text(x.product), _percent(x.error), scale, _weights(x), note)
    out.print(made)
    _rest(out, len(ordered) - len(shown), everything)


def _weights(x: Layer) -> str:
    low, high = f"{x.weight_scale_min:.3g}", f"{x.weight_scale_max:.3g}"
    return low if low == high else f"{low} to {high}"


def print_accuracy(out: Console, report: Accuracy | None) -> None:
    """Print what the quantised program lost against the float model: the worst layers, and every output."""
    if report is None:
        return
    heading(out, "Accuracy: relative error in norm against the float model")
    made = table(("", "left"), ("name", "left"), ("type", "left"), ("error %", "right"))
    ordered = sorted(report.layers, key=lambda x: -_size(x.error))
    rows: list[tuple[str, Loss]] = [("layer", x) for x in ordered[:MOST_LAYERS]] + [("output", x) for x in report.outputs]
    for kind, x in rows:
        made.add_row(kind, Text(x.name), Text(x.type), _percent(x.error))
    out.print(made)
    _rest(out, len(ordered) - MOST_LAYERS, everything=False)
    line(out, "A layer's error includes what the layers before it lost.", style="dim")


def _rest(out: Console, hidden: int, everything: bool) -> None:
    if hidden > 0 and not everything:
        line(out, f"{count(hidden, 'more layer')} {'loses' if hidden == 1 else 'lose'} less: --json lists all.", style="dim")


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _percent(error: float) -> str:
    return f"{100 * error:.2f}" if math.isfinite(error) else str(error)
