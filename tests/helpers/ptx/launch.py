"""A candidate's kernel, built for a Hopper that is not there and run by the machine; the candidate's own launcher starts it."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from ptx.bulk import TensorMap
from ptx.decode import Program
from ptx.machine import How, Machine
from ptx.memory import Global
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import plan_for
from tilewright.schedule.sample import random_sources

BEFORE_ARGUMENTS = 8  # of what Triton passes to its launcher in C: attributes, scratch memory, metadata, hooks
LISTED = 2  # from Triton 3.7 on: what types they are of, before them, who are one tuple
SWIZZLE_BYTES = (0, 32, 64, 128)
DONE = object()


class Emulated(Target):
    """A GPU whose memory is the CPU's."""

    @property
    def device(self) -> str:
        return "cpu"


H200 = Emulated("NVIDIA H200", CHIP, "cuda", 132, features=frozenset({"cuda", "sm_90"}))


@lru_cache(maxsize=64)
def program(ptx: str, fine: bool = False) -> Program:
    """A text, decoded once."""
    return Program(ptx, fine=fine)


def run(ptx: str, grid: Sequence[int], arguments: Sequence[Any], shared_bytes: int = 0, how: How | None = None) -> None:
    """A launch to its end.

    Args:
        ptx: a module with one kernel.
        grid: blocks.
        arguments: numbers, addresses of tensors that live, tensor maps.
        shared_bytes: dynamic shared memory of a block.
        how: see there.
    """
    machine(ptx, grid, arguments, shared_bytes, how).run()


def machine(ptx: str, grid: Sequence[int], arguments: Sequence[Any], shared_bytes: int = 0, how: How | None = None) -> Machine:
    """A launch that has not begun, of the arguments of `run`."""
    how = how or How()
    made = program(how.change(ptx) if how.change else ptx, how.seed is not None)
    memory = Global()
    given = [*arguments, *[0] * (len(made.kernel.params) - len(arguments))]  # scratch memory, of which there is none
    addresses = [a for a, size in zip(given, made.kernel.params.values(), strict=True) if size == 8 and a > 1 << 20]
    memory.add([*addresses, *(a.address for a in given if isinstance(a, TensorMap))])
    return Machine(made, grid, given, memory, shared_bytes, how)


def together(streams: Sequence[Sequence[Any]], seed: int, turns: Sequence[int] = (1, 1, 3, 40)) -> None:
    """Launches of several streams to their end: those of each in order, in turns drawn by lot, of so many rounds, at times. One
    that may be early begins as soon as the one ahead lets it."""
    rng = random.Random(seed)
    waiting = [[*launches] for launches in streams]
    running: list[list[tuple[Any, Iterator[None]]]] = [[] for _ in waiting]
    while any(waiting) or any(running):
        at = rng.choice([i for i, r in enumerate(running) if r or waiting[i]])
        mine = running[at]
        for _ in range(rng.choice(turns)):
            if waiting[at] and _may_begin(waiting[at][0], [launch for launch, _ in mine]):
                launch = waiting[at].pop(0)
                if isinstance(launch, Machine):
                    launch.begin(mine[-1][0] if mine else None)
                mine.append((launch, launch.rounds()))
            if not mine:
                break
            n = rng.randrange(len(mine)) if len(mine) > 1 else 0
            if next(mine[n][1], DONE) is DONE:
                mine.pop(n)


def _may_begin(launch: Any, ahead: Sequence[Any]) -> bool:
    """Tell whether a launch may begin while others of its stream are under way, the last one right ahead of it."""
    if not ahead:
        return True
    early = isinstance(launch, Machine) and launch.early and launch not in ahead
    return early and isinstance(ahead[-1], Machine) and ahead[-1].grants


@cache
def _listed() -> bool:
    """Tell whether Triton's launcher takes a kernel's arguments as one tuple, and what comes with that."""
    from triton.backends.nvidia import driver

    return hasattr(driver, "annotate_arguments")


class _Driver:
    """A driver that answers what Triton asks of a device.

    Attributes:
        launched: kernels, and the arguments of each.
        queue: launches in order, to be run later (`together`); None if each runs at once.
    """

    def __init__(self, how: How) -> None:
        self.how = how
        self.launched: list[tuple[Any, tuple[Any, ...]]] = []
        self.queue: list[Machine] | None = None
        made = "fill_tma_descriptor_tiled" if _listed() else "fill_tma_descriptor"
        self.utils = SimpleNamespace(**{made: self._descriptor})

    @staticmethod
    def _descriptor(
        address: int,
        swizzle: int,
        size: int,
        _kind: int,
        box: Sequence[int],
        shape: Sequence[int],
        strides: Sequence[int],
        padding: int,
    ) -> TensorMap:
        assert padding == 0
        return TensorMap(address, SWIZZLE_BYTES[swizzle], size, tuple(box), tuple(shape), tuple(strides))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Triton's launcher of a kernel: it closes over the one that takes descriptors ready, as Triton's does."""

        def launcher(x: int, y: int, z: int, _stream: int, kernel: Any, *rest: Any) -> None:
            arguments = rest[BEFORE_ARGUMENTS:]
            if _listed():
                *_types, arguments = arguments
                assert len(_types) == LISTED
            self.launched.append((kernel, tuple(arguments)))
            made = machine(kernel.asm["ptx"], (x, y, z), arguments, kernel.metadata.shared, self.how)
            made.early = self.how.early and bool(kernel.metadata.launch_pdl)
            if self.queue is None:
                made.run()
            else:
                self.queue.append(made)

        def start(*given: Any) -> None:
            launcher(*given)

        made = SimpleNamespace(launch=start, launch_cooperative_grid=False, launch_pdl=metadata.launch_pdl)
        if _listed():
            made.arg_annotations = made.kernel_signature = None
        return made


@contextmanager
def emulating(how: How) -> Generator[_Driver]:
    """While this lasts, kernels that are launched run here, and torch's new tensors hold no numbers."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    made = _Driver(how)
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        t = empty(*args, **kwargs)
        if t.device.type == "cpu" and t.numel():
            t.untyped_storage().fill_(255)
        return t

    def handles(kernel: Any) -> None:
        kernel._run = made.launcher_cls(kernel.src, kernel.metadata)
        kernel.module, kernel.function = kernel, kernel

    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    cuda = {
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: stream,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, fake in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        stack.enter_context(patch.object(torch, "empty", poisoned))
        stack.enter_context(patch.object(CompiledKernel, "run", property(lambda k: (handles(k), k._run)[1])))
        before = driver._active
        driver.set_active(made)  # pyright: ignore
        try:
            yield made
        finally:
            driver._active = before


def emulate(
    candidate: Any,
    problem: Any,
    schedule: Any,
    sources: Sequence[torch.Tensor] | None = None,
    target: Target = H200,
    **how: Any,
) -> list[torch.Tensor]:
    """A candidate's results on the CPU's tensors.

    Args:
        candidate, problem, schedule: what is built, as in `schedule.candidate.Candidate`.
        sources: of the problem; random ones if none are given.
        target: a device whose memory is the CPU's.
        how: see `How`.
    """
    sources = random_sources(problem) if sources is None else list(sources)
    weights = {i: sources[i] for i, w in enumerate(problem.weights) if w}
    with emulating(How(**how)):
        run = plan_for(candidate, problem, target).build(schedule).prepare(weights)
        return list(run(sources))
