"""Assembly of small gemms for a chip at hand or not, one to a line of input: LLVM aborts on what it cannot select, so another
process runs this."""

import json
import sys

from tilewright.candidates.llvm import _engine as engine
from tilewright.candidates.llvm import gemm
from tilewright.candidates.llvm._write import Writer
from tilewright.hardware.detect import chips
from tilewright.hardware.target import Target
from tilewright.ir.notation import parse
from tilewright.schedule.problem import problem_of


def target(name: str) -> Target:
    return Target(name, next(c for c in chips() if c.name == name), "cpu", 8)


def assembled(chip: str, triple: str, cpu: str, features: str, line: str) -> dict[str, object]:
    """The kernel of one product: its assembly, what it multiplies with, and its tile; or why there is none."""
    (node,) = parse(line).outputs
    problem = problem_of(node)
    why = gemm.CANDIDATE.refuse(problem, target(chip))
    if why is not None:
        return {"refused": why}
    schedule = next(iter(gemm.CANDIDATE.schedules(problem, target(chip))))
    nest, _ = gemm.nest_of(problem, schedule, target(chip))
    text = Writer(nest).write().text(cpu, features)
    shown = engine.assembly(text, triple, cpu, features)
    return {"assembly": shown, "instruction": nest.dot.instruction, "mr": nest.blocks.mr, "nv": nest.blocks.nv}


if __name__ == "__main__":
    for asked in sys.stdin:
        sys.stdout.write(json.dumps(assembled(*json.loads(asked))) + "\n")
        sys.stdout.flush()
