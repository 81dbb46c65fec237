"""Names of steps as the source gives them: those of the modules whose weights a step reads, else those of its operations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from tilewright.ir.anchor import ANCHORS, operands_of
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import Const, Param, maker_of
from tilewright.report.measure.work import describe
from tilewright.report.words import SHOWN, listing, titled
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step

NAMED_BY_WEIGHTS = ("gemm", "norm", "gather")  # constants of other steps are tables that many share
_INSTRUCTION = re.compile(r"constant(\.\d+)+")  # as HLO numbers its literals: a name of no module
_ATTRIBUTES = re.compile(r"\[[^\[\]]*=.*\]")  # of JAX's primitives


def title_of(step: Step) -> str:
    """The problem that a step solves, with `c` in place of every number that is no extent: equal in layers that are alike."""
    return titled(describe(step))


def step_names(program: Executable) -> list[str]:
    """The name of each step in the model, by index.

    A product is called by the modules whose weights it reads: `encoder.layer.0.attention.self.{query,key}`. What has none is
    called as the source calls it, if that is a path of modules; else by its weights, if it is a norm or a gather, by the module
    around the steps that it reads, or as the source calls it. Weights that several steps read, such as those of an embedding
    that a head is tied to, name none that has a path or weights of its own. Norms with equal weights share one constant. An
    attention whose last view stands in the module of the product behind it is called by the module around those before it.
    """
    graph = program.graph
    made_by = {n: i for i, s in enumerate(program.steps) for n in s.part.nodes}
    found: list[str] = []
    modules: list[list[str]] = []
    constants = [_constants(step) for step in program.steps]
    readers = Counter(n for found in constants for n in found)
    for step, read in zip(program.steps, constants, strict=True):
        path = _path(_origin(step, graph))
        own = _modules([n for n in read if readers[n] == 1])
        if not own and not (path and step.part.kind in NAMED_BY_WEIGHTS):
            own = _modules(read)
        modules.append(own or ([path] if path else []))
        weights = together(own) if own and step.part.kind in NAMED_BY_WEIGHTS else ""
        found.append(weights if weights and (step.part.kind == "gemm" or not path) else path)
    products = {name for name, step in zip(found, program.steps, strict=True) if step.part.kind == "gemm"}
    for i, step in enumerate(program.steps):
        if not found[i] or (step.part.kind == "attention" and found[i] in products):
            read = {made_by[s] for s in _operands(step) if s in made_by} - {i}
            found[i] = _around([m for j in sorted(read) for m in modules[j]]) or found[i] or plain(step.name)
    return found


def value_names(program: Executable, names: Sequence[str]) -> dict[Node, str]:
    """The name of what computes each value: that of the step which gives it, among `names` of all steps; of a value within a
    step as the source calls it."""
    given = {n: name for name, step in zip(names, program.steps, strict=True) for n in step.part.outputs}
    return {**program.graph.origins, **given}


def plain(name: str) -> str:
    """A name of the source without the attributes that JAX writes behind its primitives."""
    return _ATTRIBUTES.sub("", name)


def _operands(step: Step) -> list[Node]:
    """The values that a step works on: of an attention its queries, keys and values, not its mask."""
    node = step.part.nodes[0]
    if not isinstance(node.op, ANCHORS):
        return list(step.part.inputs)
    leaves = {n.op.index: None for root in operands_of(node)[:3] for n in toposort((root,)) if isinstance(n.op, Param)}
    return [node.src[i] for i in leaves]


def _constants(step: Step) -> list[Node]:
    """The weights that a step reads."""
    read = [s for s in step.part.inputs if s.constant]
    return [n for n in toposort(read) if isinstance(n.op, Const)] if read else []


def _modules(constants: Sequence[Node]) -> list[str]:
    """The modules of weights: their labels without the last part; none of a label that has one part alone."""
    labels = [n.op.data.label for n in constants if isinstance(n.op, Const)]
    paths = (label for label in labels if "." in label.strip(".") and not _INSTRUCTION.fullmatch(label))
    return list(dict.fromkeys(path.rpartition(".")[0] for path in paths))


def _origin(step: Step, graph: Graph) -> str:
    node = maker_of(step.part.outputs[-1]) if step.part.outputs else step.part.nodes[0]
    return graph.origins.get(step.part.nodes[0]) or graph.origins.get(node) or step.name.partition(", ")[0]


def _path(origin: str) -> str:
    """The path of modules in an operation's name in the source (`model.layers.0.mlp mul`, `/encoder/layer.0/MatMul MatMul`); ""
    where it has none."""
    name = plain(origin).partition(" ")[0]
    if name.startswith("/"):
        return ".".join(name.strip("/").split("/")[:-1])
    op = origin.partition(" ")[2]  # of torch in small letters, of ONNX in capitals; of StableHLO "line 21"
    return name if op and " " not in op and "/" not in name and ("." in name or op[0].islower()) else ""


def _around(modules: Sequence[str]) -> str:
    """The module that holds all of these; of one alone the module around it; "" if there is none."""
    paths = [m.split(".") for m in dict.fromkeys(modules)]
    return ".".join(paths[0][:-1] if len(paths) == 1 else _prefix(paths)) if paths else ""


def _prefix(paths: Sequence[Sequence[str]]) -> list[str]:
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]


def together(names: Sequence[str]) -> str:
    """Several paths of modules as one: what they share, and what they do not in braces."""
    if len(names) == 1:
        return names[0]
    paths = [n.split(".") for n in names]
    common = _prefix(paths)
    rests = list(dict.fromkeys(".".join(p[len(common) :]) for p in paths))
    if not common or "" in rests:
        return listing(names, SHOWN)
    shown = ",".join(rests[:SHOWN]) + (",…" if len(rests) > SHOWN else "")
    return f"{'.'.join(common)}.{{{shown}}}"
