"""The graph of steps as files for tools that draw large graphs: Model Explorer's JSON and Graphviz's DOT, layers as groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.report.explain.step_graph import StepGraph
from tilewright.report.schema import Repeat, StepGroup, encoded
from tilewright.report.words import us

# Of a kind of step: fill, and stroke.
COLOURS = {
    "gemm": ("#dbe9fb", "#0b62c4"),
    "attention": ("#fadfdc", "#b3261e"),
    "norm": ("#dcf1e5", "#1a7f4b"),
    "softmax": ("#ecdffd", "#8a3ffc"),
    "elementwise": ("#f6ecd4", "#8a6100"),
    "quantize": ("#fbdcef", "#c2188b"),
    "reduce": ("#d6eff0", "#00707a"),
    "call": ("#e6e9ec", "#4f5b66"),
    "gather": ("#eaf1cf", "#5b7300"),
}
OTHER = ("#eef0f2", "#59636e")
NARROW_IN, WIDER_IN = 1.6, 3.2  # the width of a box of no time, and what the longest step adds, in inches


def model_explorer(
    graph: StepGraph, groups: Sequence[StepGroup], layers: Sequence[Repeat], times: Sequence[float | None], title: str
) -> bytes:
    """The graph as JSON that Model Explorer opens: a node for each step with its time, a namespace for each layer.

    The format: ai-edge-model-explorer, `input_graph.ts` (GraphCollection).

    Args:
        graph: the steps, and which reads which.
        groups, layers: how they are folded.
        times: of each step, in µs.
        title: of the graph.
    """
    group_of = {step: g for g in groups for step in g.steps}
    layer_of = _layers(graph, layers)
    nodes: list[dict[str, Any]] = [{"id": f"input {name}", "label": name, "namespace": ""} for name, _ in graph.inputs]
    for step, read in graph.reads.items():
        g = group_of[step]
        fill, stroke = COLOURS.get(g.kind, OTHER)
        time = times[step]
        facts = {
            "name": graph.names[step],
            "problem": g.problem,
            "done by": g.candidate,
            "settings": g.schedule,
            "time": "" if time is None else f"{us(time)} µs",
            "limit": "" if g.limit_us is None else f"{us(g.limit_us)} µs",
        }
        sources = [f"input {name}" for name, by in graph.inputs if step in by] + [str(s) for s in read]
        nodes.append(
            {
                "id": str(step),
                "label": g.kind,
                "namespace": layer_of.get(step, ""),
                "attrs": [{"key": key, "value": value} for key, value in facts.items() if value],
                "incomingEdges": [
                    {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
                    for i, source in enumerate(sources)
                ],
                "style": {"backgroundColor": fill, "borderColor": stroke},
            }
        )
    for i, (name, step) in enumerate(graph.results):
        edge = {"sourceNodeId": str(step), "sourceNodeOutputId": "0", "targetNodeInputId": "0"}
        nodes.append({"id": f"result {i} {name}", "label": name, "namespace": "", "incomingEdges": [edge]})
    return encoded({"label": title, "graphs": [{"id": "steps", "nodes": nodes}]})


def dot(
    graph: StepGraph, groups: Sequence[StepGroup], layers: Sequence[Repeat], times: Sequence[float | None], title: str
) -> bytes:
    """The graph as DOT: a box for each step, as wide as its time is long, in a cluster for each layer.

    The language: graphviz.org/doc/info/lang.html.

    Args:
        graph, groups, layers, times, title: as of `model_explorer`.
    """
    group_of = {step: g for g in groups for step in g.steps}
    layer_of = _layers(graph, layers)
    longest = max((t for t in times if t), default=0.0) or 1.0
    lines = [
        f"digraph {_quoted(title)} {{",
        '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=10];',
        '  edge [color="#7a828e"];',
    ]
    inside: dict[str, list[str]] = {}
    for step in graph.reads:
        g = group_of[step]
        fill, stroke = COLOURS.get(g.kind, OTHER)
        time = times[step] or 0.0
        label = f"{g.kind}{f', {us(time)} µs' if time else ''}\n{graph.names[step]}\nby {g.candidate}"
        facts = f"label={_quoted(label)}, tooltip={_quoted(g.problem)}, width={NARROW_IN + WIDER_IN * time / longest:.2f}"
        inside.setdefault(layer_of.get(step, ""), []).append(f's{step} [{facts}, fillcolor="{fill}", color="{stroke}"];')
    for i, (layer, boxes) in enumerate(inside.items()):
        if layer:
            lines += [f"  subgraph cluster_{i} {{", f'    label={_quoted(layer)}; color="#d5dae0"; fontname="sans-serif";']
            lines += [f"    {box}" for box in boxes] + ["  }"]
        else:
            lines += [f"  {box}" for box in boxes]
    for i, (name, by) in enumerate(graph.inputs):
        lines.append(f"  i{i} [label={_quoted(name)}, shape=oval, style=dashed];")
        lines += [f"  i{i} -> s{step};" for step in by]
    lines += [f"  s{source} -> s{step};" for step, read in graph.reads.items() for source in read]
    for i, (name, step) in enumerate(graph.results):
        lines += [f"  r{i} [label={_quoted(name)}, shape=oval, style=dashed];", f"  s{step} -> r{i};"]
    return "\n".join([*lines, "}", ""]).encode(errors="replace")


def _layers(graph: StepGraph, layers: Sequence[Repeat]) -> dict[int, str]:
    """The name of the layer that a step is in."""
    listed = list(graph.reads)
    found: dict[int, str] = {}
    for number, run in enumerate(layers):
        begin = listed.index(run.first)
        before = f"layers {number}/" if len(layers) > 1 else ""
        for j, step in enumerate(listed[begin : begin + run.count * run.length]):
            found[step] = f"{before}layer {(run.number or 0) + j // run.length}"
    return found


def _quoted(text: str) -> str:
    """A string of DOT: characters that no reader could see left out, lines centred."""
    shown = "".join(c for c in text if c.isprintable() or c == "\n")
    return '"' + shown.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
