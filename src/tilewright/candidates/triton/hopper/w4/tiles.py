"""Gemms of more rows with weights of 4 bits: Hopper's kernel of large tiles with the weight as its left operand, codes of which
the warps that multiply make numbers (`_operand.py`). Rows and columns of the result have exchanged their places then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from tilewright.candidates.triton.hopper.gemm import plan as hopper_plan
from tilewright.candidates.triton.hopper.gemm import space as hopper_space
from tilewright.candidates.triton.hopper.gemm.run import HopperPlan
from tilewright.candidates.triton.hopper.gemm.spec import Argument, KernelConfig, KernelSpec, TileConfig, spec_of
from tilewright.candidates.triton.hopper.gemm.tma import TmaView, descriptor
from tilewright.candidates.triton.hopper.w4.convert import (
    Asm,
    byte_factor,
    byte_type,
    dequantize_to_bytes,
    dequantize_to_halves,
    flip_signs,
    spread_rows,
)
from tilewright.candidates.triton.hopper.w4.pack import BLOCK, packed_weights
from tilewright.candidates.triton.hopper.w4.plan import Plan as PlanOfWeights
from tilewright.candidates.triton.hopper.w4.plan import Weights, left_of
from tilewright.candidates.triton.runtime.module import Built
from tilewright.dtype import F8E4M3FN, F32, S8, S32, DType
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
FEWEST_READY = 128  # columns: nothing was measured with fewer
WIDTHS = (64, 128, 256)  # columns of a tile, as Triton knows them
MOST_COLUMNS = 128  # of bytes that are multiplied at once: there are registers for sums of a group, beside those of all
STEP = 128  # of K: a row of a stage of bytes
NAMES = ("codes_desc", "scale_desc", "zero_desc")
GLUON_NAMES = {"s8": "int8", "u8": "int8", "f8e4m3fn": "float8e4nv", "f8e5m2": "float8e5", "bf16": "bfloat16", "f16": "float16"}
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
    """A kernel's constants where the left operand is packed (`_operand.py`).

    Attributes:
        deep: blocks along K of a step.
        packed_bits: of a code as it is stored.
        subs: scales of a row along a block.
        packed_boxes, packed_run, packed_runs, packed_needed: for codes, scales and maybe zero points, see `PackedOperand`.
        convert_asm, convert_operands: the statement that makes numbers of words, and its constraints.
        held_asm, held_operands: that by which bytes wait as words.
        each: products along K that are added up before their sum is scaled.
        columns_at_once: columns that are multiplied at once.
        factor: what sums of a group's products are too small by.
        made_dtype, product_dtype, scale_dtype: what codes become, of products before they are scaled, of scales.
        scale_bits: of a scale.
    """

    deep: int
    packed_bits: int
    subs: int
    packed_boxes: tuple[tuple[int, ...], ...]
    packed_run: tuple[int, ...]
    packed_runs: tuple[int, ...]
    packed_needed: tuple[int, ...]
    convert_asm: str
    convert_operands: str
    held_asm: str
    held_operands: str
    each: int
    columns_at_once: int
    factor: float
    made_dtype: str
    product_dtype: str
    scale_dtype: str
    scale_bits: int


@dataclass(frozen=True)
class PackedOperand:
    """The left operand as packed words.

    Attributes:
        weights: how they stand for numbers, each of which is rounded to an `operand` of 16 bits.
        operand: type of the other operand: f16, bf16, or one of 8 bits.
        blocks: of 64 along K.
        ready: codes are stored as the bytes that are multiplied, less their zero points.
    """

    weights: Weights
    operand: DType
    blocks: int
    ready: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code as it is stored."""
        return 8 if self.ready else self.weights.kind.bits

    @property
    def names(self) -> tuple[str, ...]:
        """The kernel's names for arrays of words: codes, scales, zero points if they are stored, too."""
        return NAMES[: 3 if self.weights.zero is not None and not self.ready else 2]

    @property
    def deep(self) -> int:
        """Blocks along K of a step."""
        return 16 // self.operand.bits

    @property
    def subs(self) -> int:
        """Scales of a row along a block."""
        return BLOCK // self.weights.scale_k

    def needed(self, name: str) -> int:
        """Words of a pair of rows for a step."""
        return self.deep * self.subs * (2 if name == NAMES[1] and self.weights.scales is F32 else 1)

    def run(self, name: str) -> int:
        """Words of a pair of rows that lie together (`pack.paired_rows`)."""
        return math.gcd(4, self.blocks * self.needed(name) // self.deep)

    def runs(self, name: str) -> int:
        """Runs of words that a step needs."""
        return max(self.needed(name) // self.run(name), 1)

    def view(self, name: str, packed_rows: int, tile_m: int) -> TmaView:
        """An array of words, and boxes for a step: its codes, or what all of a tile's rows have for a step along K, or for
        some."""
        if name == NAMES[0]:
            shape = packed_rows // BLOCK, self.blocks * self.bits * 2, BLOCK
            box = tile_m // BLOCK, self.deep * self.bits * 2, BLOCK
        else:
            shape = packed_rows // 16, 8 * (self.blocks * self.needed(name) // self.deep)
            box = tile_m // 16, 8 * self.run(name) * self.runs(name)
        return TmaView(0, shape, contiguous(shape), box, 4)

    @property
    def every(self) -> int:
        """Products of bytes along K that are added up before their sum is scaled."""
        group = self.weights.group
        return STEP if group % STEP == 0 or group == self.blocks * BLOCK else self.weights.scale_k

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of a tile for which there are registers: of bytes, beside sums of a group there are those of all."""
        if self.deep == 1 or self.every == STEP:
            return WIDTHS
        return (64,) if self.every < BLOCK and not self.operand.is_integer else (64, 128)

    @property
    def made(self) -> Asm:
        """The statement that makes numbers of words."""
        w, zeros, scale_k = self.weights, self.weights.zero is not None, self.weights.scale_k
        if self.deep == 1:
            return dequantize_to_halves(w.kind, self.operand, zeros=zeros, rounded=w.rounded, scale_k=scale_k, steps=2, slots=2)
        return flip_signs() if self.ready else dequantize_to_bytes(self.operand, w.kind, zeros=zeros, scale_k=scale_k)

    def step_instructions(self, columns: int) -> int:
        """Instructions of a warp and a step along K: bytes made, sums scaled. (That sums of integers are made floats was seen
        in no time.)"""
        return self.made.text.count(";") * self.deep + columns // 2 * STEP // self.every


@dataclass(frozen=True)
class PackedSpec(KernelSpec):
    """A kernel whose left operand is packed: words of codes, scales and zero points come after the problem's own sources."""

    packed: PackedOperand
    packed_rows: int

    kernel: ClassVar[str] = "tilewright.candidates.triton.hopper.w4._operand.packed_gemm"

    @cached_property
    def views(self) -> list[TmaView]:
        """The arrays of words."""
        return [self.packed.view(name, self.packed_rows, self.tile.tile_m) for name in self.packed.names]

    @cached_property
    def operands(self) -> tuple[Argument, ...]:
        first = len(self.plan.problem.types)
        return super().operands[1], *(
            Argument(name, descriptor("i32", view.box, plain=True), view, source=first + i)
            for i, (name, view) in enumerate(zip(self.packed.names, self.views, strict=True))
        )

    @cached_property
    def config(self) -> PackedConfig:
        base, packed, w = super().config, self.packed, self.packed.weights
        made, waiting, beside = packed.made, spread_rows(), packed.names[1:]
        # A warpgroup asks for products when the other one has asked for its own where that was faster on an H200 (floats in 256
        # columns: up to 5 %; integers are up to 10 % slower), and with codes as bytes, which were measured so alone.
        ordered = packed.ready or (base.padded_n > MOST_COLUMNS and not packed.operand.is_integer)
        changed: dict[str, Any] = {
            "ordered": packed.deep > 1 and ordered,
            "stage_bytes": sum(4 * math.prod(view.box) for view in self.views) + base.tile_n * 128,
            "consumer_registers": 232,
            "producer_registers": 40,
        }
        return PackedConfig(
            **vars(base) | changed,
            deep=packed.deep,
            packed_bits=packed.bits,
            subs=packed.subs,
            packed_boxes=tuple(view.box for view in self.views),
            packed_run=(0, *(packed.run(n) for n in beside)),
            packed_runs=(0, *(packed.runs(n) for n in beside)),
            packed_needed=(0, *(packed.needed(n) for n in beside)),
            convert_asm=made.text,
            convert_operands=made.constraints,
            held_asm=waiting.text,
            held_operands=waiting.constraints,
            each=packed.every,
            columns_at_once=min(base.padded_n, MOST_COLUMNS),
            factor=byte_factor(packed.operand, w.kind, zeros=w.zero is not None),
            made_dtype=GLUON_NAMES[(packed.operand if packed.deep == 1 else byte_type(packed.operand)).name],
            product_dtype="int32" if packed.operand.is_integer else "float32",
            scale_dtype="float32" if w.scales is F32 else GLUON_NAMES[w.scales.name],
            scale_bits=w.scales.bits,
        )


@dataclass(frozen=True)
class Tiles(HopperPlan):
    """The transposed product, in the terms of Hopper's kernel.

    Attributes:
        weights: the product as it is for few rows.
    """

    weights: PlanOfWeights
    name: ClassVar[str] = "hopper_w4"

    def packed(self, *, ready: bool = False) -> PackedOperand:
        """The left operand."""
        return PackedOperand(self.weights.weights, self.weights.operand, self.gemm.K // BLOCK, ready)

    def spec(self, tile: TileConfig) -> PackedSpec:
        """The kernel of a tile configuration; integers are added up in f32, which holds them (`plan.py`)."""
        base = super().spec(tile)
        return PackedSpec(base.plan, tile, F32, base.stores, self.packed(ready=bool(tile.ready)), self.weights.packed_rows)

    @cached_property
    def tiles(self) -> list[TileConfig]:
        of_bytes, target = self.weights.operand.bits == 8, self.gemm.target
        most = hopper_space.STREAM_K_ELEMENTS * (2 if of_bytes else 1)  # of bytes half is added at a time
        found = hopper_space.tile_configs(self.gemm, most)
        able = [t for t in found if t.tile_n in self.packed().widths and t.tile_m == TILE_ROWS]
        able = [t for t in able if not (t.pingpong or t.deferred_store or t.vector_store or t.split_k > 1)]
        able = [t for t in able if of_bytes or not t.multicast]
        if of_bytes:
            if self.weights.weights.kind.bits == 4 and not self.gemm.rhs.dtype.is_integer:  # integers gained 3 % at most
                able += [replace(t, ready=True) for t in able if t.tile_n >= FEWEST_READY]
            # A ring has room for more codes than of a step's numbers, or for fewer.
            able = [replace(t, num_stages=hopper_space.ring_stages(self.spec(t))) for t in able]
        able.sort(key=lambda t: float(predict_us(self.work_of(t), target)))
        first = [[t for t in able if t.ready is ready] for ready in (None, True)]
        return first[0][:MOST_TRIED] + first[1][:FEWER_TRIED]

    def work_of(self, tile: TileConfig) -> Work:
        """The work of a kernel: as with numbers, but for steps along K. Of two warpgroups one makes halves while the other one
        multiplies; bytes are made, and sums scaled, by both at a time."""
        plan, of_bytes, alone = self.gemm, self.weights.operand.bits == 8, replace(tile, stream_k=0)
        others = hopper_space.work(spec_of(replace(plan, K=0), alone if of_bytes else tile))
        groups, workers = tile.tile_m // 64, tile.blocks // (2 if tile.multicast else 1)
        cycles, shares = 0.0, tile.stream_k / workers
        products = tile.tile_n * groups * PRODUCT_CYCLES
        words = tile.tile_m * plan.tile_k // 64 * (WORD_BYTES + (32 if tile.ready else 0))
        through_shared = (groups + 1) * tile.tile_n * 128 + 2 * words
        if of_bytes:
            beside = self.packed(ready=bool(tile.ready)).step_instructions(tile.tile_n)
            step = products + STEP_CYCLES + BETWEEN * groups * beside
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
        weights = self.weights
        return weights.packed_bytes(ready=bool(spec.tile.ready)), weights.weights.sources

    def prepare(self, spec: KernelSpec, built: Built, weights: Mapping[int, torch.Tensor]) -> Runner:
        w, first = self.weights.weights, len(self.gemm.problem.types)
        packed = packed_weights(w.values(weights), w, self.weights.operand, ready=bool(spec.tile.ready))
        torch.cuda.synchronize(self.gemm.target.device)  # a launch reads weights before what is ahead of it has ended
        return super().prepare(spec, built, {**weights, **{first + i: t for i, t in enumerate(packed)}})


def tiles_of(problem: Problem, target: Target, weights: PlanOfWeights) -> Tiles | None:
    """The transposed product; None where this is no way to do it."""
    w, of_bytes = weights.weights, weights.operand.bits == 8
    if (
        weights.second is not None
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
