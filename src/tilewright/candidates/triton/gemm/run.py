"""Calls of a generated gemm: operands that torch evaluates beforehand, and scratch memory for the sums of parts of K."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tilewright.candidates.triton.gemm.kernel import KernelSpec
from tilewright.candidates.triton.runtime.launch import Counters, caller
from tilewright.candidates.triton.runtime.module import Built, Launch, launcher
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Param
from tilewright.ir.types import TensorType
from tilewright.lowering.access import Access
from tilewright.schedule.candidate import Runner
from tilewright.schedule.packed import packed_once

# Operands that torch evaluated, by one of the weights they are made of and their expression, so that kernels of other sizes
# share them: which tensors at which version, the operand, and the other weights, whose identity must not pass to new ones.
_laid_out: MutableMapping[
    torch.Tensor, dict[tuple[Node, bool], tuple[tuple[tuple[int, int], ...], torch.Tensor, list[torch.Tensor]]]
] = WeakTensorKeyDictionary()


def operands_outside(outside: Mapping[int, Node], rhs: Access, weights: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Constant operands as a kernel reads them, K last, by the number of its argument."""
    right = {n.op.index for n in toposort((rhs.root,)) if isinstance(n.op, Param)}
    return {index: _evaluated(root, weights, turned=index in right) for index, root in outside.items()}


def _evaluated(root: Node, weights: Mapping[int, torch.Tensor], *, turned: bool) -> torch.Tensor:
    values = {n: weights[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param)}
    given = list(values.values())
    versioned = bool(given) and not any(t.is_inference() for t in given)  # what tells that one was written since
    made_of = tuple((id(t), t._version) for t in given) if versioned else ()
    known = _laid_out.get(given[0], {}).get((root, turned)) if versioned else None
    if known is not None and known[0] == made_of:
        return known[1]

    def lay_out() -> torch.Tensor:
        (value,) = evaluate_nodes((root,), values)
        assert isinstance(value, torch.Tensor)
        return (value.transpose(-1, -2) if turned else value).contiguous()

    quantised = any(isinstance(n.op, Dequantize) for n in toposort((root,)))  # codes may be dropped and unpacked again
    result = packed_once(given, ("laid out", root, turned), lay_out) if quantised and given else lay_out()
    own = all(result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in given)
    if versioned and own:  # a view would keep its weight alive for good
        _laid_out.setdefault(given[0], {})[root, turned] = made_of, result, given[1:]
    return result


def runner(spec: KernelSpec, built: Built, constant: Mapping[int, torch.Tensor], target: Target) -> Runner:
    """A function that runs a kernel on sources; `constant`: weights, and operands that stand for some of them."""
    launch = launcher(built.kernel, (spec.config.tiles * spec.point.split_k,), target.index, built.numbers)
    outputs = [TensorType(F32, ()) if i in spec.largest else s.root.tensor for i, s in enumerate(spec.stores)]
    return caller(spec.sources, outputs, _with_room(spec, launch, target) if spec.workspace else launch, constant, target)


def _with_room(spec: KernelSpec, launch: Launch, target: Target) -> Launch:
    """A launch with scratch memory for the sums of the parts of K and the largest of each tile, and counters of parts done."""
    device = torch.device(target.device)
    *sizes, count = spec.workspace.values()
    counters = Counters(count, device)

    def start(*pointers: object) -> None:
        room, done = [torch.empty(size, dtype=torch.float32, device=device) for size in sizes], counters.take()
        launch(*pointers, *(t.data_ptr() for t in room), done.data_ptr())

    return start
