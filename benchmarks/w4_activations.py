"""Activations that 4-bit weights are multiplied by in `w4_gpu.py`: what is posed, how they are quantised, int8 beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tilewright.compiler import optimise
from tilewright.dtype import F8E4M3FN, F16, F32, S4, S32
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, input_, map_
from tilewright.ir.few_bits import quantised_linear
from tilewright.ir.fused import Result, Side, fused_gemm
from tilewright.ir.graph import Graph, Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Input
from tilewright.linear.kernels import FEW_ROWS
from tilewright.schedule.candidate import discover, plan_for
from tilewright.schedule.problem import FusionProblem, Problem, fusion_of, problem_of

Run = Callable[[], object]
KINDS = ("f16", "e4m3", "s8")
LIMIT = {"f16": 3e-4, "s8": 3e-4, "e4m3": 2e-3}  # of relative errors; tensor cores add up 8-bit floats in 14 bits


def problem(kind: str, rows: int, outs: int, k: int, group: int) -> Problem:
    """x [rows, k] by codes [outs, k] with a scale of f16 for each group, an f16 result.

    f16 x is as `tilewright.Linear` poses it: few rows leave the scaled weights unrounded. So is s8 x ("a8w4"): codes with a
    scale a row; e4m3 x is the same with 8-bit floats.
    """
    if kind == "f16":
        line = f"f16[{rows},{k}] @ s4[{outs},{k}]^T group={group} -> f16"
        (node,) = optimise(parse(line), excess_precision=rows <= FEW_ROWS).outputs
    else:
        node = _coded(kind, rows, outs, k, group)
    p = problem_of(node)
    assert isinstance(p, Problem)
    return Problem(p.op, p.types, tuple(isinstance(s.op, Input) and s.op.label.startswith("b") for s in node.src))


def _coded(kind: str, rows: int, outs: int, k: int, group: int) -> Node:
    """The gemm of a layer whose activations have 8 bits; its sources are codes of x, their scales, the weight's, its scales."""
    codes, scale = input_("b", S4, (outs, k)), input_("b_scale", F16, (outs, k // group))
    if kind == "s8":
        x = input_("x", F16, (rows, k))
        inputs, y = (x, codes, scale), quantised_linear(x, codes, scale, group, quantize_activations=True)
    else:
        x, of_rows = input_("x", F8E4M3FN, (rows, k)), input_("x_scale", F32, (rows, 1))
        y = fused_gemm(Side(x, scale=of_rows), Side(codes, True, scale, None, (1, group)), Result(F16))
        inputs = x, of_rows, codes, scale
    (node,) = optimise(Graph("linear", inputs, (y,), ("y",))).outputs
    return node


def quantising(rows: int, k: int) -> FusionProblem:
    """x f16 [rows, k] to s8 codes and a scale a row, as a layer poses it."""
    node = _coded("s8", rows, 64, k, k)
    codes, scale = node.src[:2]
    inputs = [n for n in Graph("x", (), (codes,), ("y",)).nodes() if isinstance(n.op, Input)]
    return fusion_of(inputs, (codes, scale))[0]


def rescaling(rows: int, outs: int) -> FusionProblem:
    """Sums s32 [rows, outs] by scales [rows, 1] and [outs], as f16."""
    sums, of_rows, of_columns = input_("acc", S32, (rows, outs)), input_("x", F32, (rows, 1)), input_("w", F32, (outs,))
    scaled = map_("multiply", map_("multiply", convert(sums, F32), of_rows), of_columns)
    (y,) = optimise(Graph("rescaling", (sums, of_rows, of_columns), (convert(scaled, F16),), ("y",))).outputs
    return fusion_of((sums, of_rows, of_columns), (y,))[0]


def fusions(kind: str, rows: int, outs: int, k: int) -> list[FusionProblem]:
    """The fusions that run beside the products."""
    return [quantising(rows, k), rescaling(rows, outs)] if kind == "s8" else []


@cache
def _generator() -> Any:
    return next(c for c in discover() if c.name == "triton_norm")


def compile_fusion(p: FusionProblem, target: Target) -> None:
    """Compile a fusion's first point, so that Triton's cache has it."""
    plan_for(_generator(), p, target).compile(next(iter(plan_for(_generator(), p, target).schedules())))


def fusion(p: FusionProblem, target: Target) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """The first kernel that is generated for a fusion."""
    return plan_for(_generator(), p, target).build(next(iter(plan_for(_generator(), p, target).schedules()))).prepare({})


@dataclass(frozen=True)
class Activations:
    """x, and how a product reads it.

    Attributes:
        x: f16 [rows, k].
        quantise: makes the product's first sources of x.
        given: those.
        value: what they stand for, in float64.
    """

    x: torch.Tensor
    quantise: Callable[[], list[torch.Tensor]]
    given: list[torch.Tensor]
    value: torch.Tensor

    @staticmethod
    def of(kind: str, x: torch.Tensor, target: Target) -> Activations:
        """e4m3 codes are x rounded, as a library that takes them unscaled has them, with scales that were known before."""
        if kind == "f16":
            return Activations(x, lambda: [x], [x], x.double())
        if kind == "e4m3":
            scales = torch.rand((len(x), 1), device=x.device) + 0.5
            quantise: Callable[[], list[torch.Tensor]] = lambda: [x.to(torch.float8_e4m3fn), scales]  # noqa: E731
        else:
            run = fusion(quantising(*x.shape), target)
            quantise = lambda: list(run([x]))  # noqa: E731
        given = quantise()
        codes, scales = given
        if kind == "s8":
            wanted = (x.float().abs().amax(1, keepdim=True) / 127).double()
            off = float(((codes.double() * wanted - x.double()).abs() / wanted).max())
            if not (off < 0.51 and torch.allclose(scales.double(), wanted, rtol=1e-6)):
                raise ValueError(f"x is quantised wrong: by {off:.2f} of a step")
        return Activations(x, quantise, given, codes.double() * scales.double())


def int8(a: Activations, weights: Sequence[torch.Tensor], target: Target) -> dict[str, list[Run]]:
    """`torch._int_mm` with a weight of s8 [outs, k] and a scale a row: x quantised as ours is, and sums rescaled by a generated
    kernel; and the product alone, which leaves s32."""
    outs, rows = weights[0].shape[0], len(a.x)
    rescale = fusion(rescaling(rows, outs), target)
    scales = torch.rand(outs, device=a.x.device) * 0.001

    def whole(w: torch.Tensor) -> object:
        codes, of_rows = a.quantise()
        return rescale([torch.ops.aten._int_mm(codes, w.T), of_rows, scales])

    def bare(w: torch.Tensor) -> object:
        return torch.ops.aten._int_mm(a.given[0], w.T)

    return {"int8": [lambda w=w: whole(w) for w in weights], "int8 bare": [lambda w=w: bare(w) for w in weights]}
