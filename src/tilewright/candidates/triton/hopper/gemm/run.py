"""Machine code of a Hopper kernel, and its calls from Python, for which TMA descriptors are made once an address."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from tilewright.candidates.triton.expressions.exchange import SHARED
from tilewright.candidates.triton.hopper.arch import SM_90
from tilewright.candidates.triton.hopper.gemm.epilogue import write
from tilewright.candidates.triton.hopper.gemm.plan import Matrix
from tilewright.candidates.triton.hopper.gemm.spec import KernelSpec
from tilewright.candidates.triton.hopper.gemm.tma import with_descriptors
from tilewright.candidates.triton.hopper.ptx import Rewrite, multicast, narrowed, rewriting, split, unsigned, widest_products
from tilewright.candidates.triton.runtime.launch import caller, pointers
from tilewright.candidates.triton.runtime.module import Built, build, launcher
from tilewright.ir.graph import toposort
from tilewright.ir.mesh import Symmetric
from tilewright.ir.ops import Dequantize, Param
from tilewright.schedule.candidate import Runner
from tilewright.schedule.packed import are_unwritten, packed_once
from tilewright.schedule.recipe import Pointer

OWN = 8  # numbers behind the problem's sources that packed words have (`w4/tiles.py`); copies of operands come after them


def compiled(spec: KernelSpec) -> Built:
    """A kernel's machine code. Once it has run it is loaded on one device."""
    types = {a.name: a.type for a in spec.arguments} | spec.scratch | dict.fromkeys(spec.extents, "i32")
    with rewriting(*_rewrites(spec)):
        return build(
            write(spec),
            types,
            SM_90,
            spec.plan.target.index,
            num_warps=4,
            launch_pdl=True,
            enable_fp_fusion=False,
        )


def _rewrites(spec: KernelSpec) -> list[Rewrite]:
    """Rewrites of a kernel's PTX, in order; all of them follow from its text."""
    config = spec.config
    found: list[Rewrite] = [widest_products] if config.integer and config.padded_n == 256 else []
    if config.tile_n < config.padded_n:
        found.append(partial(narrowed, columns=config.tile_n))
    if any(config.unsigned):
        found.append(partial(unsigned, lhs=config.unsigned[0], rhs=config.unsigned[1]))
    if config.split_k > 1:
        rings = config.num_stages * config.tile_m * 128, config.num_stages * config.tile_n * 128
        found.append(partial(split, blocks=config.split_k, groups=config.consumers, ring_bytes=rings))
    if config.multicast:
        found.append(partial(multicast, right=[a.name for a in spec.operands].index("b_desc")))
    return found


def runner(spec: KernelSpec, built: Built, weights: Mapping[int, torch.Tensor], memory: Symmetric | None = None) -> Runner:
    """A function that runs a kernel on sources; `memory`: of the ranks into whose memory its store goes (`chunks`)."""
    arguments, config, target = spec.arguments, spec.config, spec.plan.target
    extents, outputs, shared = spec.extents, spec.plan.problem.outputs, dict[int, torch.Tensor]()
    if spec.chunks is not None:
        assert memory is not None
        spec.chunks.prepare(memory)
        words = spec.chunks.words(memory)
        shared = dict(enumerate([*spec.chunks.sent(memory), words[memory.own], *words], SHARED))
        extents, outputs = extents | {"next_rank": (memory.own + 1) % spec.chunks.ranks}, ()
    numbers = [*extents.values(), *built.numbers]
    start = launcher(built.kernel, (spec.tile.blocks,), target.index, numbers=numbers)
    views = [a.view for a in arguments if a.view is not None]
    start = with_descriptors(start, views, built.kernel.metadata.tensordesc_meta)
    constant, operands, given = {**weights, **shared}, dict[int, Matrix](), list[Pointer]()
    for at, a in enumerate(arguments):
        if a.result is not None:
            given.append(Pointer("result", a.result))
        elif a.source is not None:
            given.append(Pointer("source", a.source))
        elif a.matrix is not None:
            number = len(spec.plan.problem.types) + OWN + at
            given.append(Pointer("source", number))
            if a.matrix.constant:
                constant[number] = _packed(a.matrix, weights)
            else:
                operands[number] = a.matrix
    if spec.tile.stream_k:
        partial_sums = 2 * spec.tile.blocks * config.tile_m * config.padded_n * spec.acc.size_bytes(1)
        arrivals = spec.tile.stream_k * config.consumers * (2 if config.multicast else 1)
        given += [Pointer("scratch", partial_sums), Pointer("counters", arrivals)]
    given += pointers("source", spec.shared)
    return caller(start, given, len(spec.plan.problem.types), outputs, constant, target, operands=operands)


def _packed(matrix: Matrix, weights: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A constant operand as it lies in memory, copied once: for all instances of a program, and where it is codes, which may be
    dropped and unpacked again."""
    nodes = toposort((matrix.root,))
    read = [weights[n.op.index] for n in nodes if isinstance(n.op, Param)]
    if not any(isinstance(n.op, Dequantize) for n in nodes) and not are_unwritten(read):
        return matrix.copied(weights)
    return packed_once(read, matrix, lambda: matrix.copied(weights))
