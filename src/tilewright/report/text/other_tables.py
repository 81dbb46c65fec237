"""The shorter reports for people: `compile`, `run`, `verify`, `gemm`, `devices`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tilewright.report.schema import Comparison, Device, Devices, Gemm, OnMesh, Run, Saved, Verify
from tilewright.report.text.explain_text import how, lost_sections, print_traffic
from tilewright.report.text.quantized_table import print_accuracy, print_quantized
from tilewright.report.text.tables import Align, heading, input_lines, line, noise_line, section, table
from tilewright.report.words import EVERY_OUTPUT, count, small
from tilewright.schedule.candidate import labelled

STATISTICS: tuple[tuple[str, Align], ...] = tuple(
    (n, "right") for n in ("minimum", "maximum", "mean", "rms", "NaN", "infinite")
)


def print_run(out: Console, report: Run) -> None:
    """Print what a run gave."""
    line(out, f"{report.program} on {report.target}", style="bold")
    input_lines(out, report.inputs)
    print_quantized(out, report.quantized)
    heading(out, "Outputs")
    made = table(("name", "left"), ("type", "left"), *STATISTICS)
    for o in report.outputs:
        values = [_number(x) for x in (o.minimum, o.maximum, o.mean, o.rms)]
        made.add_row(Text(o.name), Text(o.type), *values, f"{o.nans:,}", f"{o.infinities:,}")
    out.print(made)
    if report.written is not None:
        line(out, f"Written to {report.written}.")


def print_saved(out: Console, report: Saved) -> None:
    """Print what a saved program holds."""
    line(out, f"{report.program} on {report.target}", style="bold")
    print_quantized(out, report.quantized)
    line(out, f"Written to {report.written}: {report.bytes / 1e6:,.1f} MB, {count(report.steps, 'step')}.")
    rest = report.steps - report.complete
    if rest:
        line(out, f"When it is read, {count(rest, 'step')} will be built by {', '.join(report.built_by)}.")


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.6g}"


def print_verify(out: Console, report: Verify) -> None:
    """Print the worst error of each kind of step and of each output, then the verdict."""
    line(out, f"{report.program} on {report.target}", style="bold")
    input_lines(out, report.inputs)
    print_quantized(out, report.quantized)
    if report.mesh is not None:
        _mesh(out, report.mesh)
    out.print()
    made = table(
        ("kind", "left"), ("steps", "right"), ("exact", "right"), ("worst error", "right"), ("bound", "right"), ("at", "left")
    )
    by_kind: dict[str, list[Comparison]] = {}
    for s in report.steps:
        by_kind.setdefault(s.kind, []).append(s)
    for kind, group in by_kind.items():
        worst = max(group, key=_used)
        exact = sum(1 for s in group if s.error == 0 and s.ok)
        made.add_row(kind, f"{len(group):,}", f"{exact:,}", *_worst(worst, worst.name))
    for end in report.end_to_end:
        exact = "1" if end.error == 0 and end.ok else "0"
        error, bound, _ = _worst(end, end.name)
        made.add_row(
            "end to end", "", exact, error, bound, Text(end.name if end.problem == EVERY_OUTPUT else f"output {end.name}")
        )
    out.print(made)
    if report.verified:
        model = " for the quantised model" if report.quantized is not None else ""
        own = [end for end in report.end_to_end if end.problem != EVERY_OUTPUT]
        compared = [(report.steps, "step"), (own, "output")]
        agree = [count(len(found), noun) for found, noun in compared if found]
        s = "" if sum(len(found) for found, _ in compared) != 1 else "s"
        said = f"{' and '.join(agree)} agree{s} with the oracle{model}" if agree else "there was nothing to compare"
        line(out, f"Verified: {said}.")
        if not report.end_to_end:
            line(out, "No output is compared: what the source's own library computes has a shape that depends on the data.")
    if report.source is not None:
        line(out, f"{report.source[0].upper()}{report.source[1:]}.")
    first = report.first_difference
    if first is not None:
        _difference(out, first, [c for c in (*report.steps, *report.end_to_end) if not c.ok])
    print_accuracy(out, report.accuracy)


def _mesh(out: Console, mesh: OnMesh) -> None:
    """Print how tensors lie on a mesh, and what travels."""
    for said in mesh.planned:
        line(out, f"{said[0].upper()}{said[1:]}.")
    if mesh.placements:
        heading(out, "Split")
        for name, lies in mesh.placements.items():
            line(out, f"{name} {lies}", indent=3)
    print_traffic(out, mesh.traffic)


def _worst(c: Comparison, name: str) -> tuple[str, str, Text]:
    """Error, bound and place; a bound that nothing tried says nothing."""
    if c.ok and c.error == 0:
        return "0", "", Text("")
    return small(c.error), small(c.bound), Text(name)


def _used(c: Comparison) -> tuple[bool, float, float]:
    return (not c.ok, c.error / c.bound if c.bound else c.error, c.bound)


def _difference(out: Console, first: Comparison, wrong: Sequence[Comparison]) -> None:
    what = "output" if first.kind == "output" else "step"
    heading(out, f"The first {what} that differs: {first.name}")
    section(out, "Computes", [first.problem])
    section(out, "By", [first.candidate])
    section(out, "Error", [f"{small(first.error)}, bound {small(first.bound)}"])
    section(out, "Why", [first.why or ""])
    if len(wrong) > 1:
        line(out, f"{count(len(wrong) - 1, 'more comparison')} failed.", style="dim")


def print_gemm(out: Console, report: Gemm) -> None:
    """Print who does a product and who does not."""
    noise_line(out, report.noise)
    line(out, f"{report.program} on {report.target}", style="bold")
    input_lines(out, report.inputs)
    out.print()
    chosen = labelled(report.chosen.candidate, report.chosen.schedule)
    section(out, "Done by", [f"{chosen}: {how(report.chosen, report.measured)}"])
    if not report.verified:
        section(out, "NOT verified", [report.why or ""])
    elif report.sampled is not None:
        said = f"{count(report.sampled, 'element')} of each result on random data, drawn once it had run"
        section(out, "Verified", [f"{said}: the budget had no time for all, which were compared when it was chosen"])
    elif report.bound == 0:
        section(out, "Verified", ["exactly equal to the reference on random data"])
    else:
        section(out, "Verified", [f"on random data, worst error {small(report.error)} where {small(report.bound)} is allowed"])
    for title, lines in lost_sections(report.rejected):
        section(out, title, lines)


def print_devices(out: Console, report: Devices) -> None:
    """Print every device."""
    for i, d in enumerate(report.devices):
        if i:
            out.print()
        _device(out, d)
    if report.links:
        heading(out, "Links between ranks")
        made = table(("operation", "left"), ("over", "left"), ("ranks", "right"), ("latency µs", "right"), ("GB/s", "right"))
        for found in report.links:
            rate = "" if found.gbps is None else f"{found.gbps:,.2f}"
            made.add_row(found.operation, found.over, str(found.ranks), f"{found.latency_us:,.1f}", rate)
        out.print(made)


def _device(out: Console, d: Device) -> None:
    line(out, f"{d.device}: {d.name}", style="bold")
    chip = d.chip if d.exact_match else f"{d.chip}, the nearest family: there is no description of this very chip"
    section(out, "Chip", [chip])
    idle = f", of which torch uses {d.used_cores:,}" if d.used_cores < d.cores else ""
    if d.noise:
        section(out, "Rates", [f"not reliable: {d.noise}. They are measured again when the machine is quiet"])
    if d.clock_ghz is not None:
        unless = ", if ops/cycle are right" if d.assumed else ""
        section(out, "Clock", [f"at least {d.clock_ghz:.1f} GHz, by the measured rates{unless}"])
    elif d.doubt:
        section(out, "Clock", [f"not known: {d.doubt}"])
    section(out, "Assumed", d.assumed)
    section(out, "Cores" if d.device == "cpu" else "SMs", [f"{d.cores:,}{idle}"])
    section(out, "Features", [" ".join(d.features) or "none that matter here"])
    caches = ", ".join(f"{name} {_size(size)}" for name, size in d.caches_bytes.items())
    section(out, "Caches" if d.device == "cpu" else "Memories", [caches or "unknown"])
    section(out, "Memory", [f"{d.read_gbps:,.1f} GB/s read, {d.copy_gbps:,.1f} GB/s copied (measured)"])
    made = table(
        ("multiplies", "left"), ("into", "left"), ("instruction", "left"), ("ops/cycle", "right"), ("measured Gop/s", "right")
    )
    for u in d.units:
        rate = "" if u.measured_gops is None else f"{u.measured_gops:,.1f}"
        made.add_row(u.operand, u.acc, Text(u.instruction), f"{u.ops_per_cycle:,}", rate)
    for operand, rate in d.other_gops.items():
        made.add_row(operand, "", "no unit of its own", "", f"{rate:,.1f}")
    out.print(made)
    line(
        out,
        "ops/cycle: of one core, by the chip's description. Gop/s: measured on all cores, of the instruction alone, or of a "
        "library's matmul where no code is generated.",
        style="dim",
    )
    for note in d.notes:
        line(out, f"Note: {note}", style="dim")


def _size(n: int) -> str:
    return f"{n / 2**20:,.0f} MiB" if n >= 1 << 20 else f"{n / 2**10:,.0f} KiB"
