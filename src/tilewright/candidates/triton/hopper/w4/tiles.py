"""Gemms of more rows with weights of 4 bits, by Hopper's kernel of large tiles. The weight is its left operand, and the warps
that multiply dequantise the codes (`_operand.py`). So rows and columns of the result exchange places."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from tilewright.candidates.triton.hopper.gemm import plan as hopper_plan
from tilewright.candidates.triton.hopper.gemm import space as hopper_space
from tilewright.candidates.triton.hopper.gemm.kernels import Plan
from tilewright.candidates.triton.hopper.gemm.spec import Argument, KernelConfig, KernelSpec, spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.hopper.gemm.tma import TmaView, descriptor
from tilewright.candidates.triton.hopper.w4.convert import (
    byte_factor,
    byte_type,
    dequantize_to_bytes,
    dequantize_to_halves,
    flip_signs,
    spread_rows,
)
from tilewright.candidates.triton.hopper.w4.pack import packed_weights
from tilewright.candidates.triton.hopper.w4.plan import BLOCK, PackedGemm, Weights, left_of
from tilewright.candidates.triton.runtime.module import Built
from tilewright.dtype import F8E4M3FN, F32, S8, S32
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, swap_last
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Gemm
from tilewright.lowering.access import Access, contiguous
from tilewright.schedule.candidate import Runner, Unsupported
from tilewright.schedule.cost import Work, predict_us
from tilewright.schedule.problem import Problem

FEWEST_ROWS = 33
MOST_TRIED, FEWER_TRIED = 8, 2  # points, and those of a second packing
FEWEST_ROWS_OF_BYTES = 17
FEWEST_EXPANDED = 128  # columns: nothing was measured with fewer
WIDTHS = (64, 128, 256)  # columns of a tile, as Triton knows them
MOST_COLUMNS = 128  # of bytes that are multiplied at once: there are registers for sums of a group, beside those of all
STEP = 128  # of K: a row of a stage of bytes
NAMES = ("codes_desc", "scale_desc", "zero_desc")
FLOATS = {"f8e4m3fn": "float8e4nv", "f8e5m2": "float8e5", "bf16": "bfloat16", "f16": "float16", "f32": "float32"}
GLUON_NAMES = {"s8": "int8", "u8": "int8", **FLOATS}
TILE_ROWS = 128  # of the weight, a block of codes to each of two warpgroups
PRODUCT_CYCLES = 2.0  # of a column of a step along K and 64 rows
HALVES_CYCLES = 540.0  # until a warpgroup has made those of a step, the words waited for and read (fitted on an H200)
WORD_BYTES = 40  # of a row and block along K, scales included; of 8-bit codes less than twice as many
# Of bytes. Cycles were fitted to 166 kernels for 38 problems of 64 to 4096 rows on an H200, launched one after the other:
# predictions of what lies behind a launch are within 5 % (root mean square), the first choice, in the
# 33 where it was measured, at most 7 % slower than the best.
BEGIN_CYCLES = 1880.0  # beside what kernels of numbers take from a launch until the first products
STEP_CYCLES = 194.0  # of a step while nothing is multiplied: words read, products begun and ended
BETWEEN = 0.69  # of the instructions that make bytes and scale sums, of both warpgroups: the part that no product hides
FIXUP_CYCLES = 4860.0  # until a part of a tile is written and counted, and the last block may add up
PART_CYCLES = 0.088  # of an element of each part, and of the sum, in tiles of 128 columns; in proportion to the columns
MANY_PARTS = 8  # of a tile, from which each costs more: 16 of them took 3.5 us longer than what stands above says
FURTHER_PART_CYCLES = 775.0
UNEVEN = 1.15  # of a share's steps, where blocks have parts of two tiles: neighbours are elsewhere along K


@dataclass(frozen=True, kw_only=True)
class PackedConfig(KernelConfig):
    """The constants where the left operand is packed (`_operand.py`); their tuples are of codes, scales and zero points."""

    k_blocks: int  # blocks along K of a step
    packed_bits: int  # of a code as it is stored
    block_scales: int  # scales of a row along a block
    packed_boxes: tuple[tuple[int, ...], ...]  # words that TMA brings at a time
    packed_run: tuple[int, ...]  # words of a pair of rows that lie together (`pack.paired_rows`)
    packed_runs: tuple[int, ...]  # of which a step needs so many
    packed_needed: tuple[int, ...]  # words of a pair of rows for a step
    convert_asm: str  # the statement that makes numbers of words, and its constraints
    convert_operands: str
    spread_asm: str  # that by which bytes wait as words
    spread_operands: str
    promote: int  # products along K that are added up before their sum is scaled
    columns_at_once: int  # that are multiplied
    factor: float  # what sums of a group's products are too small by
    mma_dtype: str  # what codes become
    product_dtype: str  # of products before they are scaled
    scale_dtype: str


def promotion(weights: PackedGemm) -> int:
    """Products of bytes along K that are added up before their sum is scaled."""
    group = weights.weights.group
    return STEP if group % STEP == 0 or group == weights.K else weights.weights.scale_k


@dataclass(frozen=True)
class PackedSpec(KernelSpec):
    """A kernel whose left operand is packed: words of codes, scales and zero points come after the problem's own sources.

    Attributes:
        weights: the product as it is for few rows.
    """

    weights: PackedGemm

    kernel: ClassVar[str] = "tilewright.candidates.triton.hopper.w4._operand.packed_gemm"

    @cached_property
    def row_words(self) -> list[int]:
        """Words of scales and zero points that a pair of rows has in all, after a place for codes."""
        w, scales = self.weights.weights, self.weights.K // self.weights.weights.scale_k
        stored = 3 if w.zero is not None and not self.tile.expanded else 2
        return [0, scales * (2 if w.scales is F32 else 1), scales][:stored]

    @cached_property
    def operands(self) -> tuple[Argument, ...]:
        """The other operand, then the words."""
        config, rows, first = self.config, self.weights.packed_rows, len(self.plan.problem.types)
        shapes = [(rows // BLOCK, self.weights.K // BLOCK * config.packed_bits * 2, BLOCK)]
        shapes += [(rows // 16, 8 * words) for words in self.row_words[1:]]
        views = [TmaView(0, s, contiguous(s), box, 4) for s, box in zip(shapes, config.packed_boxes, strict=True)]
        return super().operands[1], *(
            Argument(name, descriptor("i32", view.box, plain=True), view, source=first + i)
            for i, (name, view) in enumerate(zip(NAMES, views, strict=False))
        )

    @cached_property
    def config(self) -> PackedConfig:
        """The kernel's constants."""
        base, w, operand = super().config, self.weights.weights, self.weights.operand
        zeros, k_blocks, bits = w.zero is not None, 16 // operand.bits, 8 if base.expanded else w.kind.bits
        if k_blocks == 1:
            rounded, scale_k = w.rounded, w.scale_k
            made = dequantize_to_halves(w.kind, operand, zeros=zeros, rounded=rounded, scale_k=scale_k, steps=2, slots=2)
        elif base.expanded:
            made = flip_signs()
        else:
            made = dequantize_to_bytes(operand, w.kind, zeros=zeros, scale_k=w.scale_k)
        run = [math.gcd(4, n) for n in self.row_words]
        needed = [n * k_blocks * BLOCK // self.weights.K for n in self.row_words]
        runs = [max(n // r, 1) for n, r in zip(needed, run, strict=True)]
        boxes = [(base.tile_m // 16, 8 * r * n) for r, n in zip(run, runs, strict=True)]
        boxes = (base.tile_m // BLOCK, k_blocks * bits * 2, BLOCK), *boxes[1:]
        # A warpgroup asks for products when the other one has asked for its own where that was faster on an H200 (floats in 256
        # columns: up to 5 %; integers are up to 10 % slower), and with codes as bytes, which were measured so alone.
        ordered = base.expanded or (base.padded_n > MOST_COLUMNS and not operand.is_integer)
        changed: dict[str, Any] = {
            "ordered": k_blocks > 1 and bool(ordered),
            "stage_bytes": sum(4 * math.prod(box) for box in boxes) + base.tile_n * 128,
            "consumer_registers": 232,
            "producer_registers": 40,
        }
        return PackedConfig(
            **vars(base) | changed,
            k_blocks=k_blocks,
            packed_bits=bits,
            block_scales=BLOCK // w.scale_k,
            packed_boxes=boxes,
            packed_run=tuple(run),
            packed_runs=tuple(runs),
            packed_needed=tuple(needed),
            convert_asm=made.text,
            convert_operands=made.constraints,
            spread_asm=spread_rows().text,
            spread_operands=spread_rows().constraints,
            promote=promotion(self.weights),
            columns_at_once=min(base.padded_n, MOST_COLUMNS),
            factor=byte_factor(operand, w.kind, zeros=zeros),
            mma_dtype=GLUON_NAMES[(operand if k_blocks == 1 else byte_type(operand)).name],
            product_dtype="int32" if operand.is_integer else "float32",
            scale_dtype=GLUON_NAMES[w.scales.name],
        )


@dataclass(frozen=True)
class Tiles(Plan):
    """The transposed product, in the terms of Hopper's kernel.

    Attributes:
        weights: the product as it is for few rows.
    """

    weights: PackedGemm
    name: ClassVar[str] = "hopper_w4"

    def spec(self, tile: TileConfig) -> PackedSpec:
        """The kernel of a tile configuration; integers are added up in f32, which holds them (`plan.py`)."""
        base = super().spec(tile)
        return PackedSpec(base.plan, tile, F32, base.stores, self.weights)

    @cached_property
    def tiles(self) -> list[TileConfig]:
        """The most promising tile configurations."""
        operand, promote, widths = self.weights.operand, promotion(self.weights), WIDTHS
        of_bytes = operand.bits == 8
        if of_bytes and promote != STEP:  # there are registers for sums of a group, beside those of all
            widths = (64,) if promote < BLOCK and not operand.is_integer else (64, 128)
        most = hopper_space.STREAM_K_ELEMENTS * (2 if of_bytes else 1)  # of bytes half is added at a time
        found = hopper_space.tile_configs(self.gemm, most)
        able = [t for t in found if t.tile_n in widths and t.tile_m == TILE_ROWS]
        able = [t for t in able if not (t.pingpong or t.deferred_store or t.vector_store or t.split_k > 1)]
        able = [t for t in able if of_bytes or not t.multicast]
        if of_bytes:
            if self.weights.weights.kind.bits == 4 and not self.gemm.rhs.dtype.is_integer:  # integers gained 3 % at most
                able += [replace(t, expanded=True) for t in able if t.tile_n >= FEWEST_EXPANDED]
            # A ring has room for more codes than of a step's numbers, or for fewer.
            able = [replace(t, num_stages=hopper_space.ring_stages(self.spec(t))) for t in able]
        able.sort(key=lambda t: float(predict_us(self.work_of(t), self.gemm.target)))
        first = [[t for t in able if t.expanded is expanded] for expanded in (None, True)]
        return first[0][:MOST_TRIED] + first[1][:FEWER_TRIED]

    def work_of(self, tile: TileConfig) -> Work:
        """The work of a kernel: as with numbers, but for steps along K. Of two warpgroups one makes halves while the other one
        multiplies; bytes are made, and sums scaled, by both at a time."""
        plan, of_bytes, alone = self.gemm, self.weights.operand.bits == 8, replace(tile, stream_k=0)
        others = hopper_space.work(spec_of(replace(plan, K=0), alone if of_bytes else tile))
        groups, workers = tile.tile_m // 64, tile.blocks // (2 if tile.multicast else 1)
        cycles, shares = 0.0, tile.stream_k / workers
        products = tile.tile_n * groups * PRODUCT_CYCLES
        words = tile.tile_m * plan.tile_k // 64 * (WORD_BYTES + (32 if tile.expanded else 0))
        through_shared = (groups + 1) * tile.tile_n * 128 + 2 * words
        if of_bytes:
            config = self.spec(tile).config  # instructions: bytes made, sums scaled; those that make them floats took no time
            instructions = config.convert_asm.count(";") * config.k_blocks + tile.tile_n // 2 * STEP // config.promote
            step = products + STEP_CYCLES + BETWEEN * groups * instructions
            cycles += BEGIN_CYCLES
            if tile.stream_k:
                parts = workers / tile.stream_k
                uneven = not parts.is_integer()  # a block has parts of two tiles
                cycles += FIXUP_CYCLES * (1 + uneven) + PART_CYCLES * (parts + 1) * tile.tile_m * tile.tile_n**2 / 128
                cycles += FURTHER_PART_CYCLES * max(parts - MANY_PARTS, 0.0)
                shares *= UNEVEN if uneven else 1
        else:
            step = max(products, tile.tile_n * PRODUCT_CYCLES + HALVES_CYCLES)
        step = max(step, through_shared / hopper_space.SHARED_BYTES_PER_CYCLE)
        cycles += (-(-(plan.tiles(tile) - tile.stream_k) // workers) + shares) * plan.k_tiles * step
        return replace(others, phases=tuple(replace(p, cycles=p.cycles + cycles) for p in others.phases))

    def packing(self, spec: KernelSpec) -> tuple[int, frozenset[int]]:
        """Bytes of packed weights, and the sources that they are made of."""
        weights = self.weights
        return weights.packed_bytes(expanded=bool(spec.tile.expanded)), weights.weights.sources

    def prepare(self, spec: KernelSpec, built: Built, weights: Mapping[int, torch.Tensor]) -> Runner:
        """A function that runs a kernel, its weights packed."""
        w, first = self.weights.weights, len(self.gemm.problem.types)
        packed = packed_weights(w.values(weights), w, self.weights.operand, expanded=bool(spec.tile.expanded))
        return super().prepare(spec, built, {**weights, **{first + i: t for i, t in enumerate(packed)}})


def tiles_of(problem: Problem, target: Target, weights: PackedGemm) -> Tiles | None:
    """The transposed product; None where this is no way to do it."""
    w, of_bytes = weights.weights, weights.operand.bits == 8
    if (
        weights.up is not None
        or w.rounded == of_bytes
        or not (w.kind.bits == 4 or (w.kind is S8 and w.scale and w.zero is None and weights.operand.is_integer))
        or weights.rows < (FEWEST_ROWS_OF_BYTES if of_bytes else FEWEST_ROWS)
    ):
        return None
    try:
        plan = hopper_plan.plan_of(_of_codes(problem, w) if of_bytes else problem, target)
    except Unsupported:
        return None
    if plan.up is not None or plan.batch > 1 or plan.lhs.source is None:
        return None
    (store, *others) = weights.stores
    if others or store.columns_extent != plan.N or not plan.lhs.along_k or store.root.dtype.size_bytes(1) != 2:
        return None  # a subtile of the transposed result is as wide as the swizzle in 16 bits alone
    across = Access(store.root, store.views, store.columns, store.rows)
    turned = replace(plan, problem=problem, M=plan.N, N=plan.M, lhs=plan.rhs, rhs=plan.lhs, stores=(across,))
    return Tiles(turned, weights)


def _of_codes(problem: Problem, weights: Weights) -> Problem:
    """The product of the codes themselves, of 8 bits both: where they lie."""
    x, _ = left_of(problem)
    kind, acc = (S8, S32) if x.dtype.is_integer else (F8E4M3FN, F32)
    codes = convert(weights.codes, kind)
    op = Gemm(acc, x, swap_last(codes) if weights.k_contiguous else codes, ())
    return replace(problem, op=replace(op, stores=(Node(Acc(op.acc_type)),)))
