"""Calls of attention whose operands come by TMA (`stream.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tilewright.candidates.triton.attention.heads import Heads
from tilewright.candidates.triton.hopper.attention.functions import streamed_arguments
from tilewright.candidates.triton.hopper.attention.sizes import brought
from tilewright.candidates.triton.hopper.gemm.run import MOST_KEPT, of_view
from tilewright.candidates.triton.runtime.launch import addresses, dense, maker, on
from tilewright.candidates.triton.runtime.module import Built, launcher
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import Runner
from tilewright.schedule.problem import AttentionProblem


def streamed_caller(
    heads: Heads,
    problem: AttentionProblem,
    built: Built,
    blocks: int,
    target: Target,
    weights: Mapping[int, torch.Tensor],
) -> Runner:
    """What runs a kernel of `streamed_text`.

    Args:
        heads: what it was made for.
        problem: the attention, for its results' types.
        built: its machine code.
        blocks: how many.
        target: the device.
        weights: sources that do not change, by number.
    """
    operands = brought(heads)
    assert operands is not None
    start = launcher(built.kernel, (blocks,), target.index, built.numbers)
    metas = built.kernel.metadata.tensordesc_meta
    sizes = [o.dtype.bits // 8 for o in (heads.q, heads.k, heads.v)]
    arrays = [of_view(o.array, size, meta) for o, size, meta in zip(operands, sizes, metas, strict=True)]
    read = [o.source for o in operands] + [int(n[1:]) for n in streamed_arguments(heads) if n[0] == "p"]
    constant = {i: dense(t) for i, t in weights.items() if i in read}
    fixed = [constant[i].data_ptr() if i in constant else 0 for i in read]
    given = [(at, i) for at, i in enumerate(read) if i not in constant]
    make = maker(problem.outputs, target.device)
    known: dict[tuple[int, ...], list[object]] = {}

    def run(sources: Sequence[torch.Tensor], _kept: object = constant) -> list[torch.Tensor]:  # by its address alone
        found, _copies = addresses(fixed, given, sources)
        made = make()
        brought_from = tuple(found[: len(arrays)])
        descriptors = known.get(brought_from)
        if descriptors is None:
            if len(known) >= MOST_KEPT:
                known.clear()
            descriptors = known[brought_from] = [x for a, at in zip(arrays, brought_from, strict=True) for x in a.at(at)]
        start(*descriptors, *found[len(arrays) :], *[t.data_ptr() for t in made])
        return made

    return on(target.index, run)
