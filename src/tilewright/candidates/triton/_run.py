"""Calls of a generated gemm: sources as pointers, results and workspace from torch's allocator, on torch's current stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tilewright.candidates.triton._module import launcher
from tilewright.candidates.triton._write import Nest
from tilewright.hardware.target import Target
from tilewright.ir.access import Access
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import Runner

ALIGNED = 16

# Operands that torch evaluated, by one of the weights they are made of, so that kernels of other sizes share them; with the
# other weights, which must not make room for tensors of the same identity.
_laid_out: WeakKeyDictionary[torch.Tensor, dict[object, tuple[torch.Tensor, list[torch.Tensor]]]] = WeakKeyDictionary()


def operands_outside(outside: Mapping[int, Node], rhs: Access, weights: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Constant operands as a kernel reads them, K last, by the number of its argument."""
    right = {n.op.index for n in toposort((rhs.root,)) if isinstance(n.op, Param)}
    return {index: _evaluated(root, weights, turned=index in right) for index, root in outside.items()}


def _evaluated(root: Node, weights: Mapping[int, torch.Tensor], *, turned: bool) -> torch.Tensor:
    values = {n: weights[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param)}
    given = list(values.values())
    key = root, turned, tuple((id(t), t._version) for t in given)
    held = _laid_out.setdefault(given[0], {}) if given else {}
    if key not in held:
        (value,) = evaluate_nodes((root,), values)
        assert isinstance(value, torch.Tensor)
        held[key] = (value.transpose(-1, -2) if turned else value).contiguous(), given[1:]
    return held[key][0]


def runner(nest: Nest, compiled: Any, laid_out: Mapping[int, torch.Tensor], target: Target) -> Runner:
    """What runs a kernel on sources."""
    index, device = target.index, torch.device(target.device)
    launch = launcher(compiled, (nest.tiles * nest.point.split_k,), index)
    outputs = [(s.root.shape, s.root.dtype.to_torch()) for s in nest.stores]
    split = nest.point.split_k
    sums = nest.tiles * split * nest.point.tile_m * nest.point.tile_n
    counters: dict[int, torch.Tensor] = {}
    current = torch.cuda.current_device
    empty = torch.empty

    def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if current() != index:
            with torch.cuda.device(index):
                return run(sources)
        kept = [laid_out[i] if i in laid_out else _readable(sources[i]) for i in nest.sources]  # until the call is queued
        results = [empty(shape, dtype=dtype, device=device) for shape, dtype in outputs]
        pointers = [t.data_ptr() for t in kept]
        pointers += [t.data_ptr() for t in results]
        if split > 1:
            workspace = empty(sums, dtype=torch.float32, device=device)
            stream = torch.cuda.current_stream(device).cuda_stream
            if stream not in counters:  # each call leaves them at zero; calls on one stream follow one another
                counters[stream] = torch.zeros(nest.tiles, dtype=torch.int32, device=device)
            pointers += [workspace.data_ptr(), counters[stream].data_ptr()]
        launch(*pointers)
        return results

    return run


def _readable(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is dense and aligned, else a copy."""
    if not t.is_contiguous():
        t = t.contiguous()
    return t if t.data_ptr() % ALIGNED == 0 else t.clone()
