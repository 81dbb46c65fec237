"""4-bit codes as the left operand of a Hopper gemm: how they are stored, and the constants of the kernel that reads them
(`_operand.py`). A block of 64 rows of the weight by 64 of K is packed in the order of the matrix unit's left fragment
(`pack.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.candidates.triton.hopper.gemm.form import FRAGMENT, KernelConfig
from tilewright.candidates.triton.hopper.w4 import bytes as in_bytes
from tilewright.candidates.triton.hopper.w4.asm import halves
from tilewright.candidates.triton.hopper.w4.bytes import BLOCK
from tilewright.candidates.triton.hopper.w4.plan import Weights
from tilewright.dtype import F32, DType

NAMES = ("codes_desc", "scale_desc", "zero_desc")
KERNEL = "tilewright.candidates.triton.hopper.w4._operand.packed_gemm"


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
        operand: type of the other operand: f16, bf16, or one of 8 bits (`bytes.py`).
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
    def buffers(self) -> list[str]:
        """Where they come to."""
        return [f"{name[:-5]}_bufs" for name in self.descriptors]

    @property
    def deep(self) -> int:
        """Blocks along K of a step."""
        return 16 // self.operand.bits

    @property
    def subs(self) -> int:
        """Scales of a row along a block."""
        return BLOCK // self.weights.sub

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
        made = halves(self.operand, w.kind, zeros=w.zero is not None) if self.deep == 1 else in_bytes.made(self)
        held = in_bytes.held()
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
            held_asm=held.text,
            held_operands=held.constraints,
            each=in_bytes.every(self),
            columns_at_once=min(columns, in_bytes.MOST_COLUMNS),
            factor=in_bytes.factor(self),
            made_dtype=FRAGMENT[(self.operand if self.deep == 1 else in_bytes.made_type(self.operand)).name],
            product_dtype="int32" if self.operand.is_integer else "float32",
            scale_dtype="float32" if w.scales is F32 else FRAGMENT[w.scales.name],
            scale_bits=w.scales.bits,
        )

    def turns(self, columns: int) -> bool:
        """Whether warpgroups take turns at the tensor cores."""
        return self.deep > 1 and in_bytes.in_turns(self, columns)
