"""Gemms of more rows with weights of 4 bits: Hopper's kernel of large tiles with the weight as its left operand, codes of which
the warps that multiply make numbers (`_operand.py`). Rows and columns of the result have exchanged their places then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.candidates.triton.gemm.dots import SHORT_SUM_BITS, SHORT_SUM_ROUNDOFF
from tilewright.candidates.triton.hopper.gemm import plan as hopper_plan
from tilewright.candidates.triton.hopper.gemm import space as hopper_space
from tilewright.candidates.triton.hopper.gemm.form import FRAGMENT, Form, KernelConfig, size
from tilewright.candidates.triton.hopper.gemm.plan import Plan
from tilewright.candidates.triton.hopper.gemm.run import compiled, runner
from tilewright.candidates.triton.hopper.gemm.space import Point
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
from tilewright.candidates.triton.runtime import module
from tilewright.candidates.triton.runtime.module import Built
from tilewright.dtype import F8E4M3FN, F8E5M2, F32, S8, S32, DType
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, swap_last
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Gemm
from tilewright.lowering.access import Access
from tilewright.schedule.candidate import Kernel, Runner, Schedule, Unsupported
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
KERNEL = "tilewright.candidates.triton.hopper.w4._operand.packed_gemm"
TILE_ROWS = 128  # of the weight, a block of codes to each of two warpgroups
PRODUCT_CYCLES = 2.0  # of a column of a step along K and 64 rows
HALVES_CYCLES = 540.0  # until a warpgroup has made those of a step, the words waited for and read (fitted on an H200)
SHORT_SUMMED = (F8E4M3FN, F8E5M2)
WORD_BYTES = 40  # of a row and block along K, scales included; of 8-bit codes less than twice as many
# Of bytes. Cycles were fitted to 166 kernels for 38 problems of 64 to 4096 rows on an H200, launched one after the other:
# predictions of what lies behind a launch are within 5 % (root mean square), the first choice, in the
# 33 where it was measured, at most 7 % slower than the best.
BEGIN_CYCLES = 1880.0  # beside what kernels of numbers take from a launch until the first products
STEP_CYCLES = 194.0  # of a step while nothing is multiplied: words read, products begun and ended
BETWEEN = 0.69  # of the instructions that make bytes and scale sums, of both warpgroups: the part that no product hides
SHARE_CYCLES = 4860.0  # until a part of a tile is written and counted, and the last block may add up
PART_CYCLES = 0.088  # of an element of each part, and of the sum, in tiles of 128 columns; in proportion to the columns
MANY_PARTS = 8  # of a tile, from which each costs more: 16 of them took 3.5 us longer than what stands above says
FURTHER_PART_CYCLES = 775.0
UNEVEN = 1.15  # of a share's steps, where blocks have parts of two tiles: neighbours are elsewhere along K


@dataclass(frozen=True)
class PackedConfig(KernelConfig):
    """A kernel's constants where the left operand is packed (`_operand.py`).

    Attributes:
        deep: blocks along K of a step.
        packed_bits: of a code as it is stored.
        subs: scales of a row along a block.
        packed_boxes, packed_run, packed_runs, packed_needed: for codes, scales and maybe zero points, see `Coded`.
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
class Coded:
    """The left operand as packed codes.

    Attributes:
        weights: how they stand for numbers, each of which is rounded to an `operand` of 16 bits.
        operand: type of the other operand: f16, bf16, or one of 8 bits.
        first: the number of the source with the codes; scales and maybe zero points are the next ones.
        blocks: of 64 along K.
        ready: codes are stored as the bytes that are multiplied, less their zero points.
    """

    weights: Weights
    operand: DType
    first: int
    blocks: int
    ready: bool = False

    @property
    def kernel(self) -> str:
        """The kernel that reads them."""
        return KERNEL

    @property
    def bits(self) -> int:
        """Of a code as it is stored."""
        return 8 if self.ready else self.weights.kind.bits

    @property
    def zeros(self) -> bool:
        """Zero points are stored, too."""
        return self.weights.zero is not None and not self.ready

    @property
    def descriptors(self) -> tuple[str, ...]:
        """What the kernel calls them."""
        return NAMES[: 3 if self.zeros else 2]

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
        """Of those, how many a step needs."""
        return max(self.needed(name) // self.run(name), 1)

    def box(self, name: str, rows: int) -> list[int]:
        """Words that one copy brings: a step's codes, or what all of a tile's rows have for a step along K, or for some."""
        if name == NAMES[0]:
            return [rows // BLOCK, self.deep * self.bits * 2, BLOCK]
        return [rows // 16, 8 * self.run(name) * self.runs(name)]

    def copied_bytes(self, rows: int) -> int:
        """Of all copies for a step."""
        return sum(4 * math.prod(self.box(n, rows)) for n in self.descriptors)

    def cut(self, name: str, packed: torch.Tensor) -> torch.Tensor:
        """Packed words as copies cut them."""
        return packed.view(packed.shape[0], -1, BLOCK) if name == NAMES[0] else packed.view(packed.shape[0], -1)

    def configured(self, constants: Mapping[str, Any]) -> PackedConfig:
        """The kernel's constants, those of every gemm given."""
        rows, columns, w = constants["tile_m"], constants["shape_n"], self.weights
        beside = self.descriptors[1:]
        made, waiting = self.made, spread_rows()
        return PackedConfig(
            **constants,
            deep=self.deep,
            packed_bits=self.bits,
            subs=self.subs,
            packed_boxes=tuple(tuple(self.box(n, rows)) for n in self.descriptors),
            packed_run=(0, *(self.run(n) for n in beside)),
            packed_runs=(0, *(self.runs(n) for n in beside)),
            packed_needed=(0, *(self.needed(n) for n in beside)),
            convert_asm=made.text,
            convert_operands=made.constraints,
            held_asm=waiting.text,
            held_operands=waiting.constraints,
            each=self.every,
            columns_at_once=min(columns, MOST_COLUMNS),
            factor=byte_factor(self.operand, w.kind, zeros=w.zero is not None),
            made_dtype=FRAGMENT[(self.operand if self.deep == 1 else byte_type(self.operand)).name],
            product_dtype="int32" if self.operand.is_integer else "float32",
            scale_dtype="float32" if w.scales is F32 else FRAGMENT[w.scales.name],
            scale_bits=w.scales.bits,
        )

    @property
    def every(self) -> int:
        """Products of bytes along K that are added up before their sum is scaled."""
        group = self.weights.group
        return STEP if group % STEP == 0 or group == self.blocks * BLOCK else self.weights.scale_k

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of a tile of bytes for which there are registers: beside sums of a group there are those of all."""
        if self.every == STEP:
            return WIDTHS
        return (64,) if self.every < BLOCK and not self.operand.is_integer else (64, 128)

    def turns(self, columns: int) -> bool:
        """Tell whether a warpgroup asks for products when the other one has asked for its own: where that was faster on an H200
        (floats in 256 columns: up to 5 %; integers are up to 10 % slower), and with codes as bytes, which were measured so
        alone."""
        return self.deep > 1 and (self.ready or (columns > MOST_COLUMNS and not self.operand.is_integer))

    @property
    def made(self) -> Asm:
        """The statement that makes numbers of words."""
        w = self.weights
        if self.deep == 1:
            zeros, scale_k = w.zero is not None, w.scale_k
            return dequantize_to_halves(w.kind, self.operand, zeros=zeros, rounded=w.rounded, scale_k=scale_k, steps=2, slots=2)
        return (
            flip_signs()
            if self.ready
            else dequantize_to_bytes(self.operand, w.kind, zeros=w.zero is not None, scale_k=w.scale_k)
        )

    def step_instructions(self, columns: int) -> int:
        """Of a warp and a step along K: bytes made, sums scaled. (That sums of integers are made floats was seen in no
        time.)"""
        return self.made.text.count(";") * self.deep + columns // 2 * STEP // self.every


@dataclass(frozen=True)
class Tiles:
    """The transposed product.

    Attributes:
        weights: the product as it is for few rows.
        gemm: the transposed one, in the terms of Hopper's kernel.
    """

    weights: PlanOfWeights
    gemm: Plan

    @property
    def of_bytes(self) -> bool:
        """Codes are made bytes, not halves."""
        return size(self.gemm.rhs.dtype) == 1

    def coded(self, *, ready: bool = False) -> Coded:
        """The packed left operand: codes, scales and zero points come after the problem's own sources."""
        return Coded(self.weights.weights, self.weights.operand, len(self.gemm.problem.types), self.gemm.K // 64, ready)

    def form(self, point: Point) -> Form:
        """What the text of a point's kernel depends on; integers are added up in f32, which holds them (`plan.py`)."""
        return replace(hopper_space.form_of(self.gemm, point), acc=F32, coded=self.coded(ready=bool(point.ready)))

    def points(self) -> list[Point]:
        """The legal points, the most promising first."""
        of_bytes, target = self.of_bytes, self.gemm.target
        most = 2 * hopper_space.MOST_SHARED if of_bytes else hopper_space.MOST_SHARED  # of which half is added at a time
        found = hopper_space.points(self.gemm, most)
        widths = self.coded().widths if of_bytes else WIDTHS
        able = [p for p in found if p.tile_n in widths and p.tile_m == TILE_ROWS and (of_bytes or not p.paired)]
        able = [p for p in able if not (p.pingpong or p.hold or p.widened or p.split > 1)]
        if of_bytes:
            if self.weights.weights.kind.bits == 4 and not self.gemm.rhs.dtype.is_integer:  # integers gained 3 % at most
                able += [replace(p, ready=True) for p in able if p.tile_n >= FEWEST_READY]
            # A ring has room for more codes than of a step's numbers, or for fewer.
            able = [replace(p, num_stages=hopper_space.ring_stages(self.form(p), target)) for p in able]
        able.sort(key=lambda p: float(predict_us(self.work(p), target)))
        first = [[p for p in able if p.ready is ready] for ready in (None, True)]
        return first[0][:MOST_TRIED] + first[1][:FEWER_TRIED]

    def work(self, point: Point) -> Work:
        """What a point makes the machine do: as with numbers, but for steps along K. Of two warpgroups one makes halves while
        the other one multiplies; bytes are made, and sums scaled, by both at a time."""
        plan, of_bytes, alone = self.gemm, self.of_bytes, replace(point, shared_tiles=0)
        others = hopper_space.work(replace(plan, K=0), alone if of_bytes else point)
        groups, pairs = point.tile_m // 64, 2 if point.paired else 1
        workers, tiles = point.blocks // pairs, -(-plan.M // (point.tile_m * pairs)) * -(-plan.N // point.tile_n)
        cycles, shares = 0.0, point.shared_tiles / workers
        products = point.tile_n * groups * PRODUCT_CYCLES
        words = point.tile_m * plan.tile_k // 64 * (WORD_BYTES + (32 if point.ready else 0))
        through_shared = (groups + 1) * point.tile_n * 128 + 2 * words
        if of_bytes:
            beside = self.coded(ready=bool(point.ready)).step_instructions(point.tile_n)
            step = products + STEP_CYCLES + BETWEEN * groups * beside
            cycles += BEGIN_CYCLES
            if point.shared_tiles:
                parts = workers / point.shared_tiles
                uneven = not parts.is_integer()  # a block has parts of two tiles
                cycles += SHARE_CYCLES * (1 + uneven) + PART_CYCLES * (parts + 1) * point.tile_m * point.tile_n**2 / 128
                cycles += FURTHER_PART_CYCLES * max(parts - MANY_PARTS, 0.0)
                shares *= UNEVEN if uneven else 1
        else:
            step = max(products, point.tile_n * PRODUCT_CYCLES + HALVES_CYCLES)
        step = max(step, through_shared / hopper_space.SHARED_BYTES_PER_CYCLE)
        cycles += (-(-(tiles - point.shared_tiles) // workers) + shares) * -(-plan.K // plan.tile_k) * step
        return replace(others, phases=tuple(replace(p, cycles=p.cycles + cycles) for p in others.phases))

    def machine_code(self, form: Form) -> Built:
        """A point's kernel."""
        assert form.coded is not None
        words = [S32] * len(form.coded.descriptors)
        return compiled(form, (*(t.dtype for t in self.gemm.problem.types), *words), self.gemm.target.index)

    def build(self, name: str, schedule: Schedule) -> Kernel:
        """A kernel for one point."""
        point, weights, count = schedule.point(Point), self.weights, len(self.gemm.problem.types)
        form = self.form(point)
        built = self.machine_code(form)
        w = weights.weights

        def prepare(given: Mapping[int, torch.Tensor]) -> Runner:
            packed = packed_weights(w.values(given), w, weights.operand, ready=bool(point.ready))
            torch.cuda.synchronize(self.gemm.target.device)  # a launch reads weights before what is ahead of it has ended
            return runner(form, built, {**given, **{count + i: t for i, t in enumerate(packed)}})

        read = {int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()}
        return Kernel(
            name,
            schedule,
            prepare,
            workspace_bytes=8 * point.blocks * point.tile_m * point.tile_n if point.shared_tiles else 0,
            packed_bytes=weights.ready_bytes if point.ready else weights.packed_bytes,
            releasable=w.sources - read,
            roundoff=SHORT_SUM_ROUNDOFF if weights.operand in SHORT_SUMMED else 0.0,
            **vars(module.needs(built.kernel)),
        )

    def schedules(self) -> list[Schedule]:
        """The points as reports print them, the most promising first."""
        bits = {"acc_bits": SHORT_SUM_BITS} if self.gemm.rhs.dtype in SHORT_SUMMED else {}
        return [Schedule.of_point(p, **bits) for p in self.points()]


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
    if plan.second is not None or plan.batch > 1 or plan.lhs.source is None:
        return None
    (store, *others) = weights.stores
    if others or store.columns_extent != plan.N or not plan.lhs.along_k or size(store.root.dtype) != 2:
        return None  # a piece of the transposed result is as wide as the swizzle in 16 bits alone
    across = Access(store.root, store.views, store.columns, store.rows)
    turned = replace(plan, problem=problem, M=plan.N, N=plan.M, lhs=plan.rhs, rhs=plan.lhs, stores=(across,))
    return Tiles(weights, turned)


def _of_codes(problem: Problem, weights: Weights) -> Problem:
    """The product of the codes themselves, of 8 bits both: where they lie."""
    x, _ = left_of(problem)
    kind, acc = (S8, S32) if x.dtype.is_integer else (F8E4M3FN, F32)
    codes = convert(weights.codes, kind)
    op = Gemm(acc, x, swap_last(codes) if weights.k_contiguous else codes, ())
    return replace(problem, op=replace(op, stores=(Node(Acc(op.acc_type)),)))
