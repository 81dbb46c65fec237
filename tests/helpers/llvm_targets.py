"""Assembly of small gemms for a chip at hand or not, one to a line of input: LLVM aborts on what it cannot select, so another
process runs this."""

import json
import sys

from llvm_map import begin, end
from values import ALL

from tilewright.candidates.llvm.expressions.vector import Columns, Vectors, check
from tilewright.candidates.llvm.gemm import candidate as gemm
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.w4 import candidate as w4
from tilewright.compiler import optimise
from tilewright.hardware.detect import chips
from tilewright.hardware.target import Target
from tilewright.ir.build import reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Convert, Input, Map, Param
from tilewright.ir.ops.functions import FUNCTIONS
from tilewright.ir.types import TensorType
from tilewright.lowering.access import Unsupported, of_operand
from tilewright.schedule.candidate import Refusal, planned
from tilewright.schedule.problem import Problem, problem_of


def target(name: str) -> Target:
    return Target(name, next(c for c in chips() if c.name == name), "cpu", 8)


def assembled(chip: str, triple: str, cpu: str, features: str, line: str) -> dict[str, object]:
    """The kernel of one product: its assembly, what it multiplies with, and its tile; or why there is none."""
    (node,) = parse(line).outputs
    problem = problem_of(node)
    plan = planned(gemm.CANDIDATE, problem, target(chip))
    if isinstance(plan, Refusal):
        return {"refused": plan.why}
    nest = plan.nest_of(next(iter(plan.schedules())))
    text = GemmWriter(nest).write().text(cpu, features)
    shown = engine.assembly(text, triple, cpu, features)
    return {"assembly": shown, "instruction": nest.dot.instruction, "tile": nest.dot.tile, "nv": nest.nv}


def of_weights(chip: str, triple: str, cpu: str, features: str, line: str) -> dict[str, object]:
    """The same of a product with constant 4-bit weights."""
    (node,) = optimise(parse(line[1:]), excess_precision=True).outputs if line.startswith("~") else parse(line).outputs
    posed = problem_of(node)
    assert isinstance(posed, Problem)
    constant = tuple(isinstance(s.op, Input) and s.op.label in ("b", "b_scale", "b_zero_point") for s in node.src)
    problem = Problem(posed.op, posed.types, constant)
    plan = planned(w4.CANDIDATE, problem, target(chip))
    if isinstance(plan, Refusal):
        return {"refused": plan.why}
    nest = plan.nest_of(next(iter(plan.schedules())))
    shown = engine.assembly(w4.writer_of(nest).write().text(cpu, features), triple, cpu, features)
    return {"assembly": shown, "instruction": nest.dot.instruction, "tile": 1, "nv": nest.nv}


def everything(lanes: int, triple: str, cpu: str, features: str) -> dict[str, object]:
    """Every function and every conversion on vectors of so many lanes, wherever columns lie."""
    reached = [d for d in ALL if d.bits <= 32 and d.name != "f8e5m2fnuz"]
    module, f, (source, target) = begin(2)
    count = 0
    for dtype in reached:
        x = Node(Param(0, TensorType(dtype, (lanes, 4))))
        made = [Node(Convert(to, how), x) for to in reached for how in ("wrap", "saturate")]
        functions = [fn for fn in sorted(FUNCTIONS) if dtype.kind in FUNCTIONS[fn].kinds]
        made += [Node(Map(fn), *[x] * FUNCTIONS[fn].arity) for fn in functions]
        for root in made:
            try:
                check([root])
            except Unsupported:
                continue
            for access in (
                of_operand(transpose(root, (1, 0)), columns_last=True),
                of_operand(reshape(root, (4, lanes)), columns_last=True),
            ):
                mask = f.first_lanes(lanes, 3)
                vectors = Vectors(f, access, lanes, Columns(0, True, mask), lambda _: source)
                vectors.store(0, vectors.row(0), target)
                count += 1
    return {"assembly": engine.assembly(end(module, f, (cpu, features)), triple, cpu, features), "count": count}


if __name__ == "__main__":
    for asked in sys.stdin:
        chip, *processor, line = json.loads(asked)
        of_line = of_weights if isinstance(line, str) and "4[" in line else assembled
        found = of_line(chip, *processor, line) if isinstance(line, str) else everything(line, *processor)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
