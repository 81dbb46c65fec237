"""Steps captured in CUDA graphs, so that a whole program is a launch or two and not one a step.

Consecutive steps are one graph; a step that cannot be captured (it waits for the host, or is a call into the source's own
library) runs by itself between two graphs. A graph's outside inputs are copied to memory of its own first. Its results are
copied out, so that they are the caller's own; new values of state are copied over the old ones in the last graph. The graphs of
a program share one pool of memory, in which a value's place is taken again once its last reader has run. The last steps run by
themselves where copying their results would take longer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tilewright.errors import TilewrightError
from tilewright.runtime.arrays import address, copy_over
from tilewright.schedule.capture import CudaGraphs

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

SWITCH = "TILEWRIGHT_CUDA_GRAPH"
UNTRIED = "operations of torch before it could not be captured"
MOST_FAILED = 3  # captures that torch's operations may spoil before the others run by themselves untried
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
        doubtful: an operation of torch's own, which may wait for the host.
    """

    name: str
    run: Callable[[Sequence[Value]], Sequence[Value]]
    inputs: list[int]
    outputs: list[int]
    free: list[int]
    alone: str | None = None
    doubtful: bool = False

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
        first: the results of the run in which they were captured.
        graphs: number of CUDA graphs.
        keeps: the last graph copies new values over the state, and they are no results.
        short: what was said when memory for a graph ran out, behind which steps ran by themselves; None if it sufficed.
        copied_bytes: bytes of their own memory for copies of what they read from outside.
    """

    copied_bytes: int
    alone: dict[int, str]
    first: list[Value]
    graphs: int
    keeps: bool
    short: str | None

    def __init__(
        self,
        steps: Sequence[Bound],
        start: Sequence[Value],
        inputs: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[int],
        record: Record,
        copied: Sequence[torch.Tensor] = (),
    ) -> None:
        """Capture `steps`, running them with `inputs` on the way.

        Args:
            steps: in order.
            start: the value of each slot before the first step: constants.
            inputs: slots and values of the program's inputs.
            outputs: slots of its results; the last are new values of `copied`.
            record: captures a graph; whatever it raises came from a step.
            copied: state whose new values are copied over the old ones behind the last step.
        """
        self.keeps, self.short = False, None
        self._start, self._inputs, self._outputs = list(start), [slot for slot, _ in inputs], list(outputs)
        self._own: set[int] = set()  # slots whose values lie in memory of ours
        self._memory: set[int] = set()  # where that begins, by storage: a step that runs by itself may give a view of it
        self.copied_bytes = 0
        self._pieces: list[_Segment | Bound] = []
        self.alone = {i: s.alone for i, s in enumerate(steps) if s.alone is not None}
        values = list(start)
        for slot, tensor in inputs:
            values[slot] = tensor
        at = spoilt = 0
        while at < len(steps):
            if at in self.alone:
                steps[at](values)
                self._own.difference_update(steps[at].outputs)
                self._pieces.append(steps[at])
                at += 1
                continue
            stop = next((i for i in range(at, len(steps)) if i in self.alone), len(steps))
            failed = None
            try:
                failed = self._capture(steps[at:stop], values, record, copied if stop == len(steps) else ())
            except torch.OutOfMemoryError as error:  # what ran before may have written to state: it is not to run again
                self.short = _said(error)
            if self.short is not None:
                for step in steps[at:]:
                    step(values)
                break
            if failed is None:
                self._pieces[-1](values)
                at = stop
            else:
                self.alone[at + failed[0]] = failed[1]
                spoilt += steps[at + failed[0]].doubtful
                if spoilt == MOST_FAILED:
                    rest = (i for i, s in enumerate(steps) if s.doubtful and i > at + failed[0] and i not in self.alone)
                    self.alone |= dict.fromkeys(rest, UNTRIED)
        self.graphs = sum(isinstance(p, _Segment) for p in self._pieces)
        if self.keeps:
            del self._outputs[-len(copied) :]
        self.first = [self._separate(values[s]) for s in self._outputs]

    def _capture(
        self, steps: Sequence[Bound], values: list[Value], record: Record, copied: Sequence[torch.Tensor]
    ) -> tuple[int, str] | None:
        """Add a graph of `steps`; or which of them cannot be captured, and why. New values are copied over `copied` in it,
        unless some result lies there, which would change with it, or one of them lies elsewhere in each call."""
        given: list[Value] = list(values)
        copies: list[tuple[int, torch.Tensor]] = []
        for slot in dict.fromkeys(s for step in steps for s in step.inputs):
            value = values[slot]
            if isinstance(value, torch.Tensor) and value is not self._start[slot] and slot not in self._own:
                with torch.inference_mode(False):  # else no call outside of it could write it
                    given[slot] = own = torch.empty_like(value, memory_format=torch.contiguous_format)
                copies.append((slot, own.copy_(value)))
        reached, outputs = 0, [*self._outputs]
        fixed = self._own.union((slot for slot, _ in copies), *(step.outputs for step in steps))
        keeps = bool(copied) and all(slot in fixed or self._start[slot] is not None for slot in outputs[-len(copied) :])

        def run() -> list[Value]:
            nonlocal reached
            now = list(given)
            for reached, step in enumerate(steps):  # noqa: B007 - read where a step fails
                step(now)
            made = [v for s in outputs if isinstance(v := now[s], torch.Tensor)] if keeps else []
            if keeps and len(made) == len(outputs) and not {*map(address, copied)} & {*map(address, made)}:
                copy_over(copied, made[-len(copied) :])
                self.keeps = True
            return now

        try:
            after, replay = record(run)
        except Exception as error:
            self.keeps = False
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return reached, _said(error)
        made = dict.fromkeys(s for step in steps for s in step.outputs if after[s] is not None)
        segment = _Segment(copies, replay, [(slot, after[slot]) for slot in made])
        self._own.update(made)
        self._memory.update(address(v) for slot in made if isinstance(v := after[slot], torch.Tensor))
        self.copied_bytes += sum(own.nbytes for _, own in copies)
        self._pieces.append(segment)
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
        copied: Sequence[torch.Tensor] = (),
        state: Sequence[torch.Tensor] = (),
        *,
        allowed: bool = True,
        met: set[int] | None = None,
    ):
        """`state` is all that a call writes to, and `copied` that of it whose new values are copied: what ran is not to run
        again. `met` is shared by launches of the same kernels over other state. It has the threads in which these were
        captured: there the others need not run step by step first, as what libraries make for each thread is made."""
        self._copied, self._met, self._writes = copied, set[int]() if met is None else met, bool(state)
        self._state = [t for t in state if not t.is_inference()]  # whose versions are counted
        self._device, self._steps, self._start, self._inputs, self._outputs = device, steps, start, inputs, outputs
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None  # the last call's work
        self._replay: Replay | None = None
        self._calls, self.graph_bytes = 0, 0
        self._refused = _switched_off(steps) if allowed else "step by step: it is part of another program"
        self.words = self._refused or "step by step until the second call"

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Value] | None:
        """The results, without new values that a graph copied over the state; None if the steps are to be run one by one."""
        if self._refused is not None or torch.cuda.is_current_stream_capturing():  # the caller makes a graph of its own
            return None
        with self._lock:
            if self._refused is not None:  # by a call that this one waited for
                return None
            stream = torch.cuda.current_stream(self._device)
            if self._replay is None:
                self._calls += 1
                early = self._calls < 2 and threading.get_ident() not in self._met
                return None if early else self._captured(inputs)
            assert self._done is not None
            stream.wait_event(self._done)
            try:
                results = self._replay(inputs)
                torch.autograd.graph.increment_version(self._state)  # torch sees no graph's writes; others tell by them
                return results
            finally:  # where a step refuses its inputs, what ran before it is still to be waited for
                self._done.record(stream)

    def _captured(self, inputs: Sequence[torch.Tensor]) -> list[Value] | None:
        copied = 2 * sum(t.nbytes for t in inputs)
        if copied / COPY_BYTES_PER_US > HOST_US * len(self._steps):
            self._refuse(f"step by step: copying its inputs for a CUDA graph costs more than {len(self._steps)} launches")
            return None
        record, given = CudaGraphs(self._device), list(zip(self._inputs, inputs, strict=True))
        try:
            replay = Replay(self._steps, self._start, given, self._outputs, record, self._copied)
        except TilewrightError:  # a step that runs by itself refuses these inputs
            raise
        except Exception as error:
            self._refuse(f"step by step: {_said(error)}")
            if self._writes:
                raise
            return None
        if replay.short is not None:
            self._refuse(f"step by step: {replay.short}")
            return replay.first
        self.graph_bytes = record.bytes + replay.copied_bytes
        if replay.graphs == 0:
            name, why = self._steps[0].name, replay.alone[0]
            self._refuse(f"step by step: no step can be part of a CUDA graph ({name}: {why})")
            return replay.first
        self._replay, self._done = replay, torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(self._device))
        count = len(self._steps) - len(replay.alone)
        graphs = "one CUDA graph" if replay.graphs == 1 else f"{replay.graphs} CUDA graphs"
        self.words = f"{count} of {len(self._steps)} steps in {graphs} of {self.graph_bytes / 1e6:.0f} MB" + "".join(
            f"; {self._steps[i].name} by itself: {why}" for i, why in replay.alone.items()
        )
        self._met.add(threading.get_ident())
        first, replay.first = replay.first, []
        return first

    def _refuse(self, words: str) -> None:
        self._refused = self.words = words


def _said(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [""])[0][:160] or type(error).__name__


def _switched_off(steps: Sequence[Bound]) -> str | None:
    """The sentence why there is no CUDA graph whatever the inputs are; None if there may be one."""
    if os.environ.get(SWITCH) == "0":
        return f"step by step: {SWITCH} is 0"
    if len(steps) < 2:
        return "step by step: a CUDA graph of one step would save nothing"
    return None
