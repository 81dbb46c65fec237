"""Steps captured in CUDA graphs, so that a whole program is a launch or two and not one a step.

Consecutive steps are one graph; a step that cannot be captured (it waits for the host, or is a call into the source's own
library) runs by itself between two graphs. A graph's outside inputs are copied to memory of its own first. Its results are
copied out, so that they are the caller's own. The graphs of a program share one pool of memory, in which a value's place is
taken again once its last reader has run. The last steps run by themselves where copying their results would take longer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tilewright.errors import TilewrightError
from tilewright.runtime.arrays import address
from tilewright.schedule.capture import CudaGraphs

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

SWITCH = "TILEWRIGHT_CUDA_GRAPH"
LEAST_CAPTURED = 2  # steps, before those that run by themselves: a graph of one would save nothing
HOST_US = 5.0  # a step launched from Python by itself, at least
COPY_BYTES_PER_US = 1.5e6  # read and written: what copying inputs in and results out goes at on a slower GPU

# Runs steps once, and gives their values and what does the same again into the same memory.
Record = Callable[[Callable[[], "list[Value]"]], "tuple[list[Value], Callable[[], None]]"]


@dataclass(frozen=True)
class Bound:
    """A step over slots.

    Attributes:
        name: where it stands in the source.
        run: values of its inputs in, values of its outputs out.
        inputs, outputs: the slots it reads and writes.
        free: slots that are dead afterwards.
        alone: why it cannot be captured, where that is known beforehand.
    """

    name: str
    run: Callable[[Sequence[Value]], Sequence[Value]]
    inputs: list[int]
    outputs: list[int]
    free: list[int]
    alone: str | None = None

    def __call__(self, values: list[Value]) -> None:
        results = self.run([values[s] for s in self.inputs])
        for at, slot in enumerate(self.outputs):
            values[slot] = results[at]
        del results
        for slot in self.free:
            values[slot] = None


def results_last(steps: Sequence[Bound], outputs: Collection[int], result_bytes: Sequence[int]) -> list[Bound]:
    """The steps, of which the last run by themselves where their results are the program's own and so large that copying them
    out of a graph would take longer than a launch: then they write to the caller's memory at once.

    Args:
        steps: in order.
        outputs: slots of the program's results.
        result_bytes: of each step.
    """
    found = list(steps)
    for i in reversed(range(LEAST_CAPTURED, len(steps))):
        own = steps[i].alone is None and all(slot in outputs for slot in steps[i].outputs)
        if not own or 2 * result_bytes[i] / COPY_BYTES_PER_US <= HOST_US:
            break
        why = f"a graph would have its results of {result_bytes[i] / 1e6:.0f} MB copied"
        found[i] = replace(steps[i], alone=why)
    return found


@dataclass(frozen=True)
class _Segment:
    """Steps in one graph: the memory of its own that it reads, how to launch it, and the values it leaves."""

    copies: list[tuple[int, torch.Tensor]]
    replay: Callable[[], None]
    leaves: list[tuple[int, Value]]

    def __call__(self, values: list[Value]) -> None:
        for slot, own in self.copies:
            value = values[slot]
            assert isinstance(value, torch.Tensor)
            own.copy_(value)
        self.replay()
        for slot, value in self.leaves:
            values[slot] = value


class Replay:
    """A program's steps as graphs.

    Attributes:
        alone: the steps that run by themselves, by number, and why.
        graphs: number of CUDA graphs.
        copied_bytes: bytes of their own memory for copies of what they read from outside.
    """

    copied_bytes: int
    alone: dict[int, str]
    graphs: int

    def __init__(
        self,
        steps: Sequence[Bound],
        start: Sequence[Value],
        inputs: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[int],
        record: Record,
    ) -> None:
        """Capture `steps`, running them with `inputs` on the way.

        Args:
            steps: in order.
            start: the value of each slot before the first step: constants.
            inputs: slots and values of the program's inputs.
            outputs: slots of its results.
            record: captures a graph; whatever it raises came from a step.
        """
        self._start, self._inputs, self._outputs = list(start), [slot for slot, _ in inputs], list(outputs)
        self._own: set[int] = set()  # slots whose values lie in memory of ours
        self._memory: set[int] = set()  # where that begins, by storage: a step that runs by itself may give a view of it
        self.copied_bytes = 0
        self._pieces: list[_Segment | Bound] = []
        self.alone = {i: s.alone for i, s in enumerate(steps) if s.alone is not None}
        values = list(start)
        for slot, tensor in inputs:
            values[slot] = tensor
        at = 0
        while at < len(steps):
            if at in self.alone:
                steps[at](values)
                self._own.difference_update(steps[at].outputs)
                self._pieces.append(steps[at])
                at += 1
                continue
            stop = next((i for i in range(at, len(steps)) if i in self.alone), len(steps))
            failed = self._capture(steps[at:stop], values, record)
            if failed is None:
                at = stop
            else:
                self.alone[at + failed[0]] = failed[1]
        self.graphs = sum(isinstance(p, _Segment) for p in self._pieces)

    def _capture(self, steps: Sequence[Bound], values: list[Value], record: Record) -> tuple[int, str] | None:
        """Add a graph of `steps` and run it; or which of them cannot be captured, and why."""
        given: list[Value] = list(values)
        copies: list[tuple[int, torch.Tensor]] = []
        for slot in dict.fromkeys(s for step in steps for s in step.inputs):
            value = values[slot]
            if isinstance(value, torch.Tensor) and value is not self._start[slot] and slot not in self._own:
                with torch.inference_mode(False):  # else no call outside of it could write it
                    given[slot] = own = torch.empty_like(value, memory_format=torch.contiguous_format)
                copies.append((slot, own.copy_(value)))
        reached = 0

        def run() -> list[Value]:
            nonlocal reached
            now = list(given)
            for reached, step in enumerate(steps):  # noqa: B007 - read where a step fails
                step(now)
            return now

        try:
            after, replay = record(run)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return reached, (str(error).splitlines() or [""])[0][:160] or type(error).__name__
        made = dict.fromkeys(s for step in steps for s in step.outputs if after[s] is not None)
        segment = _Segment(copies, replay, [(slot, after[slot]) for slot in made])
        self._own.update(made)
        self._memory.update(address(v) for slot in made if isinstance(v := after[slot], torch.Tensor))
        self.copied_bytes += sum(own.nbytes for _, own in copies)
        self._pieces.append(segment)
        segment(values)
        return None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Value]:
        """The results for other inputs, of the same types."""
        values = list(self._start)
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            values[slot] = tensor
        for piece in self._pieces:
            piece(values)
        return [self._separate(values[s]) for s in self._outputs]

    def _separate(self, value: Value) -> Value:
        """A value in memory that no later call writes."""
        return value.clone() if isinstance(value, torch.Tensor) and address(value) in self._memory else value


class OnDevice:
    """The launches of a program on a CUDA device: step by step the first time, as graphs from the second on.

    Calls from several threads and streams follow each other, since graphs have one memory.

    Attributes:
        words: the sentence on how it is launched.
        graph_bytes: memory of the graphs.
    """

    graph_bytes: int
    words: str

    def __init__(
        self,
        device: str,
        steps: Sequence[Bound],
        start: list[Value],
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        allowed: bool = True,
    ):
        self._device, self._steps, self._start, self._inputs, self._outputs = device, steps, start, inputs, outputs
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None  # the last call's work
        self._replay: Replay | None = None
        self._calls, self.graph_bytes = 0, 0
        self._refused = _switched_off(steps) if allowed else "step by step: it is part of another program"
        self.words = self._refused or "step by step until the second call"

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Value] | None:
        """The results; None if the steps are to be run one by one."""
        if self._refused is not None or torch.cuda.is_current_stream_capturing():  # the caller makes a graph of its own
            return None
        with self._lock:
            if self._refused is not None:  # by a call that this one waited for
                return None
            stream = torch.cuda.current_stream(self._device)
            if self._replay is None:
                self._calls += 1
                if self._calls < 2 or not self._captured(inputs):
                    return None
            assert self._replay is not None and self._done is not None
            stream.wait_event(self._done)
            try:
                return self._replay(inputs)
            finally:  # where a step refuses its inputs, what ran before it is still to be waited for
                self._done.record(stream)

    def _captured(self, inputs: Sequence[torch.Tensor]) -> bool:
        copied = 2 * sum(t.nbytes for t in inputs)
        if copied / COPY_BYTES_PER_US > HOST_US * len(self._steps):
            self._refuse(f"step by step: copying its inputs for a CUDA graph costs more than {len(self._steps)} launches")
            return False
        record = CudaGraphs(self._device)
        try:
            replay = Replay(self._steps, self._start, list(zip(self._inputs, inputs, strict=True)), self._outputs, record)
        except TilewrightError:  # a step that runs by itself refuses these inputs
            raise
        except Exception as error:
            self._refuse(f"step by step: {(str(error).splitlines() or [type(error).__name__])[0][:160]}")
            return False
        self.graph_bytes = record.bytes + replay.copied_bytes
        if replay.graphs == 0:
            name, why = self._steps[0].name, replay.alone[0]
            self._refuse(f"step by step: no step can be part of a CUDA graph ({name}: {why})")
            return False
        self._replay, self._done = replay, torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(self._device))
        count = len(self._steps) - len(replay.alone)
        graphs = "one CUDA graph" if replay.graphs == 1 else f"{replay.graphs} CUDA graphs"
        self.words = f"{count} of {len(self._steps)} steps in {graphs} of {self.graph_bytes / 1e6:.0f} MB" + "".join(
            f"; {self._steps[i].name} by itself: {why}" for i, why in replay.alone.items()
        )
        return True

    def _refuse(self, words: str) -> None:
        self._refused = self.words = words


def _switched_off(steps: Sequence[Bound]) -> str | None:
    """The sentence why there is no CUDA graph whatever the inputs are; None if there may be one."""
    if os.environ.get(SWITCH) == "0":
        return f"step by step: {SWITCH} is 0"
    if len(steps) < 2:
        return "step by step: a CUDA graph of one step would save nothing"
    return None
