"""Traffic between ranks in a program's steps: bytes, their time by the machine's links, and how long ranks wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.hardware.links import links_for
from tilewright.ir.anchor import ANCHORS
from tilewright.ir.graph import Node
from tilewright.ir.ops import AllReduce, Collective, ReduceScatter
from tilewright.report.explain.names import step_names
from tilewright.report.schema import Step as StepRow
from tilewright.report.schema import Traffic
from tilewright.report.words import count, percent, size_words, us
from tilewright.rules.collective import why_outside
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step
from tilewright.schedule.problem import collectives_of


def between(step: Step) -> list[Node]:
    """The operations of a step in which values travel."""
    found = () if step.decision is None else collectives_of(step.decision.problem)
    return [n for n in found if n.op.meets]


def sent_bytes(node: Node) -> int:
    """The least that each rank sends, which is as much as it receives."""
    assert isinstance(node.op, Collective)
    return node.op.wire_bytes(node.src[0].tensor)


def operation_words(node: Node) -> str:
    """An operation in words, such as `all_reduce of bf16[16,8192] over tp=4`."""
    op = node.op
    assert isinstance(op, Collective)
    over = ", ".join(f"{name}={size}" for name, size in zip(op.over, op.sizes, strict=True))
    fn = f" ({op.fn})" if isinstance(op, (AllReduce, ReduceScatter)) and op.fn != "add" else ""
    return f"{op.name}{fn} of {node.src[0].type} over {over}"


def traffic(program: Executable, why: Callable[[Node], str], steps: Sequence[StepRow] = ()) -> list[Traffic]:
    """List what travels between ranks.

    Args:
        program: compiled; one of ranks knows its `links`.
        why: the reason why an operation that is a step of its own is so, where rules give none.
        steps: as they were timed.
    """
    found: list[Traffic] = []
    outside = why_outside(program.graph, program.trace)
    links = getattr(program, "links", None) or links_for(program.target)
    for i, (name, step) in enumerate(zip(step_names(program), program.steps, strict=True)):
        inside = any(isinstance(n.op, ANCHORS) for n in step.part.nodes)
        whys = [] if inside else [outside.get(n) or why(n) for n in step.part.nodes if n.op.meets]
        met = between(step)
        took = [links.time_us(n.op.name, n.op.over, sent_bytes(n)) for n in met if isinstance(n.op, Collective)]
        exposed = steps[i].between_us if steps else None
        hidden = None if exposed is None else 0.0  # what a team does is waited for where it stands
        for k, (node, link_us) in enumerate(zip(met, took, strict=True)):
            said = whys[k] if k < len(whys) else ""
            times = (exposed, hidden) if k == 0 else (None, None)
            found.append(Traffic(name, operation_words(node), sent_bytes(node), said, i, round(link_us, 3), *times))
    return found


def traffic_words(steps: Sequence[StepRow]) -> list[str]:
    """A sentence on what travels in a program, and how long that takes; none where nothing does."""
    sending = [s for s in steps if s.sent_bytes]
    if not sending:
        return []
    total, spent = sum(s.time_us for s in steps), sum(s.between_us or 0.0 for s in sending)
    sent = size_words(sum(s.sent_bytes for s in sending))
    share = f", {percent(spent / total)} % of the steps' time" if total else ""
    by_kernels = sum(s.between_us is None for s in sending)
    share += f"; in {count(by_kernels, 'step')} kernels send by themselves" if by_kernels else ""
    return [f"Between ranks: {count(len(sending), 'step')}, in which a rank sends {sent}, taking {us(spent)} µs{share}."]
