"""Chains: consecutive steps of a program on a CPU that are calls of generated kernels, run as one call of machine code.

Between two kernels Python takes as long as a small product, and other threads that want its lock wait for each other. What one
kernel writes for the next lies in memory that is laid out when the chain is made; only values that something else reads are
tensors. Constants are read at addresses that were theirs when the chain was made: before each call a program asks whether they
still are (`watched`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from tilewright.candidates.llvm.runtime.calls import Call, Link, call_of, caller, chained
from tilewright.candidates.llvm.runtime.watch import watch
from tilewright.errors import TypeMismatchError
from tilewright.runtime.replay import Bound
from tilewright.schedule.candidate import Runner

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

Run = Callable[[Sequence["Value"]], "Sequence[Value]"]
MOST_LINKS = 512  # whose pointers lie on the caller's stack
LONGEST_US = 100_000.0  # of kernels' measured times: Python sees to signals between chains


@dataclass(frozen=True)
class KernelRun:
    """The run of a step that is a kernel: values of its part's inputs in, values of the part's outputs out.

    Attributes:
        name: where the step stands in the source.
        runner: the kernel, prepared.
        order: the number among the inputs of each source of the kernel.
        picks: the number among the kernel's results of each output.
        as_given: inputs are sources and outputs are results, one for one.
    """

    name: str
    runner: Runner
    order: tuple[int, ...]
    picks: tuple[int, ...]
    as_given: bool

    def __call__(self, values: Sequence[Value]) -> Sequence[Value]:
        try:
            if self.as_given:
                return self.runner(cast("Sequence[torch.Tensor]", values))
            results = self.runner([cast("torch.Tensor", values[i]) for i in self.order])
        except TypeMismatchError as error:  # an operation that fails for these values: an index out of range
            raise TypeMismatchError(error.what, where=self.name, hint=error.hint) from error
        return [results[i] for i in self.picks]


def generated(step: Bound) -> Call | None:
    """The call of a generated kernel that a step is; None if it is anything else."""
    return call_of(step.run.runner) if isinstance(step.run, KernelRun) else None


def watched(tensors: Sequence[torch.Tensor], steps: Sequence[Bound]) -> Callable[[], object]:
    """A function that tells whether memory of tensors that the steps read moved or shrank since (`watch`)."""
    return watch(tensors, caller() if any(generated(step) is not None for step in steps) else None)


def in_chains(steps: Sequence[Bound], constants: Sequence[Value], times_us: Sequence[float], threads: int) -> list[Bound]:
    """The steps of a program, with a chain in place of those next to each other that can be links of one.

    Chains hold for constants that lie where they do now, and for any state.

    Args:
        steps: in order.
        constants: the value of each slot that is one.
        times_us: how long each step's kernel takes, about.
        threads: threads of each kernel; 0 for as many as the calling thread may use.
    """
    found, links, made, us = list[Bound](), list[tuple[Bound, Call]](), set[int](), 0.0

    def close() -> None:
        nonlocal us
        if links:
            found.append(_chain(links, constants, threads))
        links.clear()
        made.clear()
        us = 0.0

    for step, taken in zip(steps, times_us, strict=True):
        call = generated(step)
        if call is None:
            close()
            found.append(step)
            continue
        # A step that may fail runs once more to say why, on values that are at hand.
        fails_within = call.missed is not None and not made.isdisjoint(step.inputs)
        if fails_within or len(links) == MOST_LINKS or us + taken > LONGEST_US:
            close()
        links.append((step, call))
        made.update(step.outputs)
        us += taken
    close()
    return found


def _chain(called: Sequence[tuple[Bound, Call]], constants: Sequence[Value], threads: int) -> Bound:
    """The chain of steps that are all calls of generated kernels."""
    steps = [step for step, _ in called]
    made = {slot for step in steps for slot in step.outputs}
    sources = [{i: step.inputs[cast("KernelRun", step.run).order[i]] for i in call.shape.read} for step, call in called]
    read = {slot for each in sources for slot in each.values()} - made
    fixed = {slot: value for slot in read if (value := _fixed(constants[slot])) is not None}
    unmade = dict.fromkeys(slot for step in steps for slot in step.inputs if slot not in made and slot not in fixed)
    given = [slot for slot in unmade if slot in read or constants[slot] is None]  # other constants are packed
    free = [slot for step in steps for slot in step.free]
    dead = {*free}
    wanted = [slot for slot in dict.fromkeys(s for step in steps for s in step.outputs) if slot not in dead]
    links, unread = list[Link](), len(constants)
    for (step, call), read_here in zip(called, sources, strict=True):
        results = list(range(unread, unread + len(call.shape.results)))
        unread += len(results)
        for slot, i in zip(step.outputs, cast("KernelRun", step.run).picks, strict=True):
            results[i] = slot
        missed = None if call.missed is None else _again(step, given, constants)
        links.append(Link(call, read_here, results, missed))
    name = steps[0].name if len(steps) == 1 else f"{steps[0].name} to {steps[-1].name}"
    run = cast("Run", chained(links, given, fixed, wanted, threads))
    return Bound(name, run, given, wanted, free)


def _fixed(value: Value) -> torch.Tensor | None:
    """A constant that kernels read where it lies."""
    return value if isinstance(value, torch.Tensor) and not value.is_meta and value.is_contiguous() else None


def _again(step: Bound, given: Sequence[int], constants: Sequence[Value]) -> Callable[[Sequence[Value]], object]:
    """A function of the chain's given values that runs a step by itself, which says which index was out of range."""
    place = {slot: i for i, slot in enumerate(given)}
    kept = {slot: constants[slot] for slot in step.inputs if slot not in place}

    def run(values: Sequence[Value]) -> object:
        return step.run([values[place[slot]] if slot in place else kept[slot] for slot in step.inputs])

    return run
