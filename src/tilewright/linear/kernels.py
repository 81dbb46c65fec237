"""Kernels that multiply by one quantised weight, for certain numbers of rows, to which all others are padded or cut."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import torch

from tilewright.compiler import optimise
from tilewright.dtype import F32, DType, from_torch
from tilewright.errors import InputError
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import input_
from tilewright.ir.few_bits import quantised_linear
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Const
from tilewright.ir.types import TensorType
from tilewright.m_dispatch import MOST_ROWS, AnyRows, compile_rows
from tilewright.runtime.quantized_weight import QuantizedWeight
from tilewright.schedule.buckets import Buckets
from tilewright.schedule.search import Progress

FEW_ROWS = 32  # for which kernels on Hopper scale sums rather than weights
MOST_ROWS_OF_A_CPU = 512  # where a row costs the same in any number of them, and checking a kernel takes seconds

Run = Callable[[Sequence[torch.Tensor]], Sequence[object]]


@dataclass(frozen=True)
class Signature:
    """All that a kernel depends on but the rows: layers of one signature share what was decided.

    Attributes:
        shape: [out, in] of the weight.
        codes, scales: their types.
        group_size: codes that share a scale.
        parts: whether there are zero points, and offsets.
        activations, bias: types of the input and of the bias (None if there is none).
        quantize_activations: activations are quantised to 8 bits, a scale a row, before they are multiplied.
        device: the device that runs it.
    """

    shape: tuple[int, int]
    codes: DType
    scales: DType
    group_size: int
    parts: tuple[bool, bool]
    activations: DType
    bias: DType | None
    quantize_activations: bool
    device: str

    @staticmethod
    def of(
        weight: QuantizedWeight, activations: torch.dtype, bias: torch.dtype | None, *, quantize_activations: bool
    ) -> Signature:
        """The signature of a product.

        Raises:
            InputError: activations or bias are no floats of 16, 32 or 64 bits.
        """
        types = from_torch(activations), None if bias is None else from_torch(bias)
        for what, t in zip(("activations", "a bias"), types, strict=True):
            if t is not None and not (t.is_float and 16 <= t.bits <= 64):
                raise InputError(f"{what} of {t} for a quantised weight", hint="f16, bf16, f32 or f64")
        return Signature(
            weight.shape,
            weight.code_type,
            from_torch(weight.scales.dtype),
            weight.group_size,
            (weight.zero_points is not None, weight.offsets is not None),
            *types,
            quantize_activations,
            str(weight.packed.device),
        )


def graph_at(signature: Signature, weight: Callable[[], QuantizedWeight]) -> Callable[[int], Graph]:
    """The product as a program for each number of rows: inputs x [rows, in] and bias [out], result [rows, out] of x's type.

    `weight` is asked for when a constant is read, and unpacked for that alone. For few rows weights are not rounded to x's type
    once they are scaled, where a kernel scales sums of codes instead: that is more exact, and faster (`keeps_digits`).
    """
    out, inner = signature.shape
    groups = -(-inner // signature.group_size)

    def constant(t: DType, shape: tuple[int, ...], label: str, load: Callable[[QuantizedWeight], torch.Tensor | None]) -> Node:
        def loaded() -> torch.Tensor:
            value = load(weight())
            assert value is not None
            return value.detach()

        return Node(Const(Literal(TensorType(t, shape), loaded, label)))

    zeros, offsets = signature.parts
    codes = constant(signature.codes, (out, inner), "codes", lambda w: w.codes)
    scale = constant(signature.scales, (out, groups), "scales", lambda w: w.scales)
    zero = constant(signature.codes, (out, groups), "zero_points", lambda w: w.zero_points) if zeros else None
    shift = constant(F32, (out, groups), "offsets", lambda w: w.offsets) if offsets else None

    def at(rows: int) -> Graph:
        x = input_("x", signature.activations, (rows, inner))
        bias = None if signature.bias is None else input_("bias", signature.bias, (out,))
        y = quantised_linear(
            x,
            codes,
            scale,
            signature.group_size,
            zero_point=zero,
            offset=shift,
            bias=bias,
            quantize_activations=signature.quantize_activations,
        )
        graph = Graph("linear", (x,) if bias is None else (x, bias), (y,), ("y",))
        return optimise(graph, excess_precision=True) if keeps_digits(signature, rows) else graph

    return at


def keeps_digits(signature: Signature, rows: int) -> bool:
    """Tell whether weights stay as they are once they are scaled, though x has fewer digits: 4-bit ones, for few rows, on
    Hopper."""
    few = rows <= FEW_ROWS and signature.codes.bits == 4 and not signature.quantize_activations
    return few and "sm_90" in detect(signature.device).features


@cache
def rungs(most: int) -> tuple[int, ...]:
    """Numbers of rows that kernels are made for: 1 to 8, a few up to 64; from there the powers of two for a CPU, which cuts
    more rows into such pieces, and for a GPU steps of an eighth or less, to which rows are filled up."""
    small = [r for r in (*range(1, 9), 16, 24, 32, 48, 64) if r <= most]
    if most <= MOST_ROWS_OF_A_CPU:
        return *small, *(1 << i for i in range(7, most.bit_length()))
    large = [(8 + i) << shift for shift in range(3, most.bit_length() - 4) for i in range(1, 9)]
    return *small, *(r for r in large if r <= most)


def pieces(rows: int, most: int) -> list[tuple[int, int]]:
    """The rows to do at a time, with the rung for each piece."""
    steps, found = rungs(most), list[tuple[int, int]]()
    while rows:
        at = bisect_left(steps, rows)
        if at == len(steps) or (most <= MOST_ROWS_OF_A_CPU and steps[at] != rows and rows > 64):
            at -= 1
        count = min(rows, steps[at])
        found.append((count, steps[at]))
        rows -= count
    return found


_tables: dict[Signature, Buckets] = {}


class Kernels:
    """Kernels for one weight and one type of activations.

    Attributes:
        signature: what they depend on.
    """

    def __init__(self, signature: Signature, weight: Callable[[], QuantizedWeight]) -> None:
        self.signature = signature
        target = detect(signature.device)
        self._gpu, self._most = target.kind != "cpu", most_rows(target)
        self._rows = AnyRows(graph_at(signature, weight), _tables.get(signature), target)
        self._ready: dict[int, Run] = {}
        self._making = threading.Lock()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, in] by the weight, [rows, out], in memory of its own.

        Raises:
            InputError: a CUDA graph is being captured, and there is no kernel for so many rows yet.
        """
        rows = x.shape[0]
        side = () if bias is None else (bias,)
        run = self._ready.get(rows)
        if run is not None:
            return self._result(run, (x, *side))
        if not rows:
            return x.new_empty((0, self.signature.shape[0]))
        cut = pieces(rows, self._most)
        results: list[torch.Tensor] = []
        start = 0
        for count, rung in cut:
            part = x[start : start + count]
            if rung > count:
                part = torch.cat((part, x.new_zeros((rung - count, x.shape[1]))))
            results.append(self._result(self.at(rung), (part, *side))[:count])
            start += count
        return results[0] if len(results) == 1 else torch.cat(results)

    @staticmethod
    def _result(run: Run, values: Sequence[torch.Tensor]) -> torch.Tensor:
        (result,) = run(values)
        assert isinstance(result, torch.Tensor)
        return result

    def at(self, rung: int) -> Run:
        """The kernel for so many rows; made, checked and kept the first time."""
        run = self._ready.get(rung)
        if run is not None:
            return run
        if self._gpu and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"a CUDA graph is being captured, and no kernel is ready for {rung} rows",
                hint="run the module once with so many rows before, or call its prepare()",
            )
        with self._making:
            if rung not in self._ready:
                self._ready[rung] = _elsewhere(self._made, rung) if self._gpu else self._made(rung)
            return self._ready[rung]

    def _made(self, rung: int) -> Run:
        program = self._rows.at(rung)
        program.own_graphs = False  # from the next line on
        program.drop_weights()  # what is packed is needed no more: the codes can be unpacked again
        return program.run

    def candidates(self) -> dict[int, str]:
        """The candidate that multiplies, by the rows of each kernel that is ready."""
        found: dict[int, str] = {}
        for rung in sorted(self._ready):
            steps = [s for s in self._rows.at(rung).steps if s.decision is not None]
            found[rung] = max((s.decision.kernel for s in steps if s.decision), key=lambda k: k.packed_bytes).candidate
        return found


def _elsewhere(make: Callable[[int], Run], rung: int) -> Run:
    """Make a kernel in a thread of its own: what it allocates outlives the call, and torch may have turned this thread to
    memory that it takes back afterwards (when it warms up what it will capture)."""

    def made() -> Run:
        with torch.no_grad():
            run = make(rung)
        torch.cuda.synchronize()
        return run

    with ThreadPoolExecutor(1) as other:
        return other.submit(made).result()


def tune(signature: Signature, weight: QuantizedWeight, *, budget_s: float = 30.0, progress: Progress | None = None) -> Buckets:
    """Measure which kernels serve which rows of a signature; kernels made from now on go by that.

    Raises:
        InputError: no time.
    """
    bare = replace(signature, parts=(signature.parts[0], False))  # what is added for offsets is another product
    last = most_rows(detect(signature.device))
    program = compile_rows(
        graph_at(bare, lambda: weight), last=last, device=signature.device, budget_s=budget_s, progress=progress
    )
    assert program.table is not None
    _tables[signature] = program.table
    return program.table


def most_rows(target: Target) -> int:
    """Rows that are multiplied at once, at most."""
    return MOST_ROWS_OF_A_CPU if target.kind == "cpu" else MOST_ROWS
