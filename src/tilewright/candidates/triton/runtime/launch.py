"""Calls of a kernel that takes its sources' memory and its results': pointers alone, on torch's current stream; and counters of
blocks that are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from tilewright.hardware.target import Target
from tilewright.ir.artefact import Kind
from tilewright.ir.literal import bits_of
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Runner, writing
from tilewright.schedule.guard import visible
from tilewright.schedule.problem import FusionProblem
from tilewright.schedule.recipe import Launched, MachineCode, Operand, Parts, Pointer, describe, recipe_of

ALIGNED = 16
AT_ONCE = 1 << 18  # counters that are cleared together: a megabyte
SPARE = 32  # streams and captured calls whose counters are made beforehand


class Copied(Protocol):
    """An operand that torch evaluates and lays out on each call."""

    def copied(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The operand in memory."""
        ...

    def recipe(self, number: int, parts: Parts) -> Operand:
        """The operand as data, of this number as a source."""
        ...


@dataclass(frozen=True)
class Start:
    """A kernel's start on torch's current stream of its device, which is the current one.

    Attributes:
        run: the start, given the addresses of all pointers, which nothing checks.
        describe: the same as data; None of a kernel that the driver alone cannot start.
    """

    run: Callable[..., None]
    describe: Callable[[Parts], MachineCode | None]


def pointers(of: Literal["source", "result", "scratch", "counters"], numbers: Iterable[int]) -> list[Pointer]:
    """Pointers of one kind."""
    return [Pointer(of, number) for number in numbers]


def caller(
    start: Start,
    given: Sequence[Pointer],
    sources: int,
    outputs: Sequence[TensorType],
    weights: Mapping[int, torch.Tensor],
    target: Target,
    *,
    places: Mapping[int, torch.Tensor] | None = None,
    operands: Mapping[int, Copied] | None = None,
) -> Runner:
    """A function that runs a kernel. One without results gives the copies that it reads: results of a kernel at work
    beside it must not lie in their memory.

    Args:
        start: its start.
        given: its pointers, in order.
        sources: number of the problem's sources; what is numbered behind them is a kernel's own.
        outputs: its results' types.
        weights: sources that do not change, by number.
        target: the device.
        places: memory for some results, by number, instead of new one at each call.
        operands: sources that are made on each call, by number.
    """
    copied, device = operands or {}, torch.device(target.device)
    of = {kind: [(at, p.number) for at, p in enumerate(given) if p.of == kind] for kind in ("source", "result", "scratch")}
    constant = {i: dense(weights[i]) for _, i in of["source"] if i in weights}
    fixed = [constant[p.number].data_ptr() if p.of == "source" and p.number in constant else 0 for p in given]
    read = [(at, i) for at, i in of["source"] if i not in constant and i not in copied]
    evaluated = [(at, copied[i]) for at, i in of["source"] if i in copied]
    results, scratch = of["result"], of["scratch"]
    counted = [(at, Counters(p.number, device)) for at, p in enumerate(given) if p.of == "counters"]
    placed = sorted((places or {}).items())
    make = maker([t for i, t in enumerate(outputs) if i not in dict(placed)], target.device)
    launch = start.run

    def run(
        tensors: Sequence[torch.Tensor],
        made: list[torch.Tensor] | None = None,
        _kept: object = constant,  # by its address alone
    ) -> list[torch.Tensor]:
        found, held = addresses(fixed, read, tensors)
        for at, operand in evaluated:
            held.append(operand.copied(tensors))
            found[at] = held[-1].data_ptr()
        if made is None:
            made = make()
            for i, place in placed:
                made.insert(i, place)
        for at, i in results:
            found[at] = made[i].data_ptr()
        for at, size in scratch:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
            found[at] = held[-1].data_ptr()
        for at, counters in counted:
            found[at] = counters.take().data_ptr()
        launch(*found)
        return made if outputs else held

    def recipe(parts: Parts) -> Launched | None:
        code = start.describe(parts)
        if code is None:
            return None
        own = tuple((i, parts.bytes(bits_of(t))) for i, t in constant.items() if i >= sources)
        evaluated = tuple(operand.recipe(i, parts) for i, operand in copied.items())
        return Launched(code, tuple(given), tuple(map(Kind.of, outputs)), own, evaluated)

    def write(tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        on(target.index, lambda given: run(given, [*results]))(tensors)

    return writing(describe(on(target.index, run), recipe), write)


def arrays_of(problem: FusionProblem) -> list[TensorType]:
    """The arrays that a kernel writes: results, or those in which they lie."""
    destinations = problem.destinations or [None] * len(problem.outputs)
    return [t if d is None else t.with_shape(d.shape) for t, d in zip(problem.outputs, destinations, strict=True)]


def parted(problem: FusionProblem, run: Runner) -> Runner:
    """A runner that gives the results, of one that gives the arrays in which they lie."""
    if not problem.destinations:
        return run
    each = [(d, t.shape[d.axis] if d else 0) for t, d in zip(problem.outputs, problem.destinations, strict=True)]

    def parts(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = zip(run(sources), each, strict=True)
        return [a if d is None else a.narrow(d.axis, d.start, extent) for a, (d, extent) in arrays]

    return describe(parts, lambda kept: recipe_of(run, kept))


def addresses(
    fixed: list[int], given: Sequence[tuple[int, int]], sources: Sequence[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """The addresses of a kernel's arguments: `fixed`, with those of sources in their places (place and source, each in
    `given`), of a copy where one is not dense or not on a multiple of `ALIGNED`; and the copies, which must live until it is
    launched."""
    found, copies = fixed.copy(), list[torch.Tensor]()
    for at, i in given:
        t = sources[i]
        found[at] = address = t.data_ptr()
        if address % ALIGNED or not t.is_contiguous():
            copies.append(dense(t))
            found[at] = copies[-1].data_ptr()
    return found, copies


def on(index: int, run: Runner) -> Runner:
    """A runner whose calls make a device the current one where it is not."""

    def there(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if torch.cuda.current_device() == index:
            return run(sources)
        with torch.cuda.device(index):
            return run(sources)

    return there


def maker(types: Sequence[TensorType], device: str) -> Callable[[], list[torch.Tensor]]:
    """New tensors of these types at each call, with nothing in them, on a device, which is the current one.

    They come as Inductor's code asks for memory, in a third of the time of `torch.empty`, past all that watches torch.
    """
    results = [(t.shape, torch.empty(t.shape, device="meta").stride(), t.dtype.to_torch()) for t in types]
    quick: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    if quick is None or device == "cpu" or visible():
        return lambda: [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype in results]
    return lambda: [quick(shape, strides, dtype) for shape, strides, dtype in results]


def dense(t: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major order, from a multiple of `ALIGNED` bytes on: itself, or a copy."""
    if t.is_contiguous() and t.data_ptr() % ALIGNED == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


class Counters:
    """Numbers that a call of a kernel finds at zero and leaves at zero.

    Calls on one stream follow one another and share them. A call that is captured has its own, since its graph may run beside
    other graphs and other calls; they are made beforehand, as long as there are some, for clearing them is a step of the graph.

    Args:
        count: numbers of 32 bits that a call needs.
        device: the GPU of the counters.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = -(-4 * count // ALIGNED) * ALIGNED // 4, device
        self._of_stream: dict[int, torch.Tensor] = {}
        self._made = _zeros(SPARE * self._count, device).view(SPARE, self._count)  # kept: graphs know it by its address
        self._spare = list(self._made.unbind())

    def take(self) -> torch.Tensor:
        """The counters for a call that is about to be launched on the current stream of the device, which is the current
        one."""
        if torch.cuda.is_current_stream_capturing():
            return self._fresh()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if stream not in self._of_stream:
            self._of_stream[stream] = self._fresh()  # what is allocated now may be of a pool that others empty
        return self._of_stream[stream]

    def _fresh(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else torch.zeros(self._count, dtype=torch.int32, device=self._device)


_zeroed: dict[torch.device, torch.Tensor] = {}  # numbers of 32 bits that nobody has taken yet
_taking = threading.Lock()


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    """So many zeros [count] that no graph has to wait for: a piece of what was cleared for many kernels at once, since waiting
    for that is waiting for the device."""
    with _taking:
        left = _zeroed.get(device)
        if left is None or left.numel() < count:
            left = torch.zeros(max(count, AT_ONCE), dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()
        _zeroed[device] = left[count:]
        return left[:count]
