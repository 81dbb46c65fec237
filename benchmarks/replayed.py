"""CUDA graphs of kernels that ranks run together: captured, timed, and replayed with delays, so that ranks overtake others."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

VARIANTS = 4  # graphs of each rank, that differ in their delays
LONGEST = 60_000  # cycles of a delay
QUEUED = 10  # replays, behind which is waited: what is queued must not fill a stream's queue, for another rank's is behind it


def captured(run: Callable[[], object], stream: torch.cuda.Stream | None = None) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of a call, and what the call gave, which keeps its memory."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream or torch.cuda.Stream(), capture_error_mode="thread_local"):
        kept = run()
    return graph, kept


def median_us(replay: Callable[[], object], calls: int, rounds: int, before: Callable[[], object] = lambda: None) -> float:
    """µs of one of so many calls of a graph on this rank: the median over rounds, each behind `before`."""
    found: list[float] = []
    for _ in range(rounds):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / calls)
    return statistics.median(found)


def delayed(rng: random.Random, share: float = 0.5, longest: int = LONGEST) -> None:
    """Have this stream wait, drawn by lot: whether, and for how long."""
    if rng.random() < share:
        torch.cuda._sleep(rng.randrange(1, longest))  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]


def wrong_bytes(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The number of bytes that differ, on the device."""
    return (got.view(torch.uint8) != right.view(torch.uint8)).sum()


def replayed(
    graphs: Mapping[int, Sequence[torch.cuda.CUDAGraph]], replays: int, rng: random.Random, late: Callable[[], bool]
) -> str:
    """Replay graphs of each rank of this process, by a stream each, in an order and behind delays drawn by lot.

    Returns:
        str: the reason why it ended early, a rank being `late`; "" if none was.
    """
    streams = {rank: torch.cuda.Stream() for rank in graphs}
    for n in range(replays):
        for rank in rng.sample([*graphs], len(graphs)):
            with torch.cuda.stream(streams[rank]):
                delayed(rng, 0.3, 2 * LONGEST)
                rng.choice(graphs[rank]).replay()
        if n % QUEUED == QUEUED - 1:
            torch.cuda.synchronize()
            if late():
                return f"replay {n}: a rank waited in vain"
    torch.cuda.synchronize()
    return "a rank waited in vain" if late() else ""
