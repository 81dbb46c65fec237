"""Control flow: loops of constant trip counts unrolled, small branches as selections, the rest as calls.

A call's payload is a module whose `main` is the loop or conditional and takes what its regions read from outside. Its regions
become graphs of their own. They run as often as the data says, by the oracle or as a program compiled them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch

from tilewright.errors import InputError
from tilewright.frontends.stablehlo import jaxlib
from tilewright.frontends.stablehlo.call import inside, make_call
from tilewright.frontends.stablehlo.index import known_number
from tilewright.frontends.stablehlo.registry import Complex, Site, Value, lowers, one_or_all
from tilewright.frontends.stablehlo.walk import Regions, Walk
from tilewright.ir.build import broadcast, const, map_
from tilewright.ir.evaluate import evaluate_nodes, evaluator
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Const, Own, Select
from tilewright.ir.types import TensorType

Run = Callable[[Sequence[torch.Tensor]], Sequence[object]]
CONTROL = frozenset({"stablehlo.while", "stablehlo.if", "stablehlo.case"})
MAX_UNROLLED_TRIPS, MAX_UNROLLED_OPERATIONS = 64, 4096
MAX_TRIPS = 1 << 24
MAX_SELECTED_OPERATIONS = 64
_SMALL = 16  # elements of a carried constant that is computed on the way
# What makes a branch dear, or hides how dear it is.
_DEAR = frozenset(
    {
        *("while", "if", "case", "call", "dot", "dot_general", "convolution", "custom_call"),
        *("sort", "fft", "cholesky", "triangular_solve"),
    }
)


@lowers("stablehlo.while", "mhlo.while")
def _while(site: Site) -> Value:
    """Unrolled while the condition is known as the program is read, up to a bound; else a call."""
    unrolled = site.reader.attempt(lambda: _unrolled(site))
    if unrolled is not None:
        return one_or_all(unrolled)
    return _called(site)


def _unrolled(site: Site) -> list[Value] | None:
    state = list(site.values)
    begun = site.reader.count
    for _ in range(MAX_UNROLLED_TRIPS + 1):
        state = [_settled(v) for v in state]
        (condition,) = site.reader.region(site.op, state, 0)
        again = known_number(condition) if isinstance(condition, Node) else None
        if again is None:
            return None
        if not again:
            return state
        if site.reader.count - begun > MAX_UNROLLED_OPERATIONS:
            return None
        state = site.reader.region(site.op, state, 1)
    return None


def _settled(value: Value) -> Value:
    """A small value that constants alone make, as one constant: counters, for the most part."""
    if isinstance(value, Complex):
        return Complex(cast(Node, _settled(value.re)), cast(Node, _settled(value.im)))
    if not isinstance(value, Node) or not value.constant or isinstance(value.op, Const) or value.tensor.elements > _SMALL:
        return value
    if any(isinstance(n.op, Own) for n in toposort([value])):  # another one on each rank
        return value
    (found,) = evaluate_nodes([value], {})
    return Node(Const(Literal(TensorType(value.dtype, value.shape), cast(torch.Tensor, found).contiguous())))


@lowers("stablehlo.if", "mhlo.if", "stablehlo.case", "mhlo.case")
def _branches(site: Site) -> Value:
    """The branch itself where it is known; a selection of all of them where they are small; else a call."""
    (index,) = site.nodes
    count = len(list(site.op.raw.regions))
    known = known_number(index)
    is_if = site.op.name.endswith("if")
    if known is not None:
        taken = (0 if known else 1) if is_if else int(known) if 0 <= known < count else count - 1
        return one_or_all(site.reader.region(site.op, [], taken))
    inner = list(inside(site.op))
    if len(inner) > MAX_SELECTED_OPERATIONS or any(o.name.partition(".")[2] in _DEAR for o in inner):
        return _called(site)
    outcomes = [site.reader.region(site.op, [], i) for i in range(count)]
    results = outcomes[-1]
    for i in reversed(range(count - 1)):
        here = index if is_if else map_("equal", index, const(i, index.dtype))
        results = [_selected(here, a, b) for a, b in zip(outcomes[i], results, strict=True)]
    return one_or_all(results)


def _selected(pred: Node, a: Value, b: Value) -> Value:
    if isinstance(a, Node) and isinstance(b, Node):
        return a if a is b else Node(Select(), broadcast(pred, a.shape), a, b)
    if isinstance(a, Complex) and isinstance(b, Complex):
        return Complex(cast(Node, _selected(pred, a.re, b.re)), cast(Node, _selected(pred, a.im, b.im)))
    if isinstance(a, list) and isinstance(b, list):
        return [_selected(pred, x, y) for x, y in zip(a, b, strict=True)]
    return a


def _called(site: Site) -> Value:
    name = site.op.name.partition(".")[2]
    site.reader.note(f"{name} at {site.op.origin} runs as the data says; a GPU's program leaves its regions to the CPU")
    return one_or_all(make_call(site))


class _Program:
    """A payload's regions, ready to run.

    Attributes:
        op: "while", "if" or "case".
        regions: their graphs. Each reads what the loop carries, of a conditional nothing, and then all that the payload takes.
    """

    def __init__(self, payload: str, target: str) -> None:
        module = jaxlib.parse(payload, target)
        found: Regions = Walk(module, payload, target).regions(CONTROL)
        self.op = found.op.name.partition(".")[2]
        self.types = [n.tensor for n in found.inputs]
        self._before = _Step(found.operands, found.inputs)
        self._steps = [_Step(results, [*given, *found.inputs]) for given, results in found.regions]
        self.regions = tuple(
            Graph(
                f"{self.op} region {i}",
                (*given, *found.inputs),
                tuple(results),
                tuple(f"carried{k}" for k in range(len(results))),
            )
            for i, (given, results) in enumerate(found.regions)
        )

    def constant_memory(self) -> set[int]:
        """Addresses of constants, as which a loop that never runs may have begun, and a branch may end."""
        made = [t for step in (self._before, *self._steps) for t in step.constants()]
        return {t.untyped_storage().data_ptr() for t in made if t.numel()}

    def run(self, given: Sequence[torch.Tensor], where: str, runs: Sequence[Run] = ()) -> list[torch.Tensor]:
        """Results for what the payload takes; each region is run by its own of `runs`, or by the oracle."""
        state, runs = self._before(given), runs or self._steps
        if self.op != "while":
            which = int(state[0])
            last = len(runs) - 1
            taken = runs[(0 if which else 1) if self.op == "if" else which if 0 <= which <= last else last]
            return cast("list[torch.Tensor]", taken(given))
        condition, body = runs
        for _ in range(MAX_TRIPS):
            if not bool(condition([*state, *given])[0]):
                return state
            state = cast("list[torch.Tensor]", body([*state, *given]))
        raise InputError(f"a loop runs more than {MAX_TRIPS} times", where=where, hint="see that its condition ends it")


class _Step:
    """Nodes computed from the values of others, wherever these are."""

    def __init__(self, results: Sequence[Node], given: Sequence[Node]) -> None:
        self._leaves = [n for n in toposort(results) if not n.src and n not in set(given)]
        self._run = evaluator(results, [*given, *self._leaves])
        self._made: dict[torch.device, list[torch.Tensor]] = {}

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device = values[0].device if values else torch.device("cpu")
        if device not in self._made:
            made = [cast(torch.Tensor, v) for v in evaluate_nodes(self._leaves, {})]
            self._made[device] = [v.to(device) for v in made]
        with torch.device(device):
            return cast("list[torch.Tensor]", self._run([*values, *self._made[device]]))

    def constants(self) -> list[torch.Tensor]:
        """Tensors that it has made of nodes that read nothing, on any device."""
        return [t for made in [*self._made.values()] for t in made]


@functools.lru_cache(maxsize=64)
def _program_of(payload: str, target: str) -> _Program:
    return _Program(payload, target)


def region_graphs(payload: str, target: str) -> tuple[Graph, ...]:
    """The graphs of the regions of a loop or conditional, in order.

    Raises:
        InputError: the payload holds none.
        UnsupportedError: a region holds something that cannot be expressed.
    """
    return _program_of(payload, target).regions


def run_control(payload: str, target: str, values: Sequence[object], runs: Sequence[Run] = ()) -> list[torch.Tensor]:
    """Results of a loop or conditional, its regions run by `runs`; by the oracle without.

    Raises:
        InputError: the payload holds none, takes other values, or loops too often.
        UnsupportedError: a region holds something that cannot be expressed.
    """
    program = _program_of(payload, target)
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    given = [(tuple(t.shape), t.dtype) for t in tensors]
    if given != [(t.shape, t.dtype.to_torch()) for t in program.types] or len(tensors) != len(values):
        raise InputError(f"a payload that takes {', '.join(map(str, program.types))} is given other values", where=target)
    results = program.run(tensors, target, runs)
    held = program.constant_memory()
    return [t.clone() if t.untyped_storage().data_ptr() in held else t.contiguous() for t in results]
