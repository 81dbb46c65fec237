"""Quantising by multiplications gives the codes that dividing gives, at the values where one may turn into the next."""

import re

import numpy as np
import pytest
import torch

import tilewright
from tests.candidates.llvm.test_normalization import CPU
from tilewright.candidates.llvm.normalization import candidate as rows
from tilewright.candidates.llvm.runtime import engine
from tilewright.dtype import F32, S8, S32, U8
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Quantize, gemm
from tilewright.lowering.scalar.steps import parts_of
from tilewright.schedule.candidate import plan_for
from tilewright.schedule.problem import fusion_of

DIVIDES = re.compile(r"fdiv <\d+ x float>")
# Those whose quotients come nearest to where f32 rounds: the last 16 of a mantissa's bits are near 0.
NEAREST = [2.0**-6 * (1 + (k * 2**16 + d) * 2.0**-23) for k in (0, 1, 77, 127) for d in range(-4, 5)]


def around(scale: float, zero: int, least: int, most: int) -> torch.Tensor:
    """Values on both sides of every place where a code turns into the next, and some that are no number of steps."""
    turns = np.float32(scale) * (np.arange(least - zero - 3, most - zero + 4, dtype=np.float64) + 0.5)
    middle = turns.astype(np.float32).view(np.int32)
    near = np.concatenate([(middle + d).view(np.float32) for d in range(-4, 5)])
    odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-40]
    found = np.concatenate([near, np.array(odd, np.float32)])
    return torch.from_numpy(np.resize(found, -(-len(found) // 32) * 32).reshape(1, -1))


def divided(x: torch.Tensor, scale: torch.Tensor, zero: int, least: int, most: int) -> torch.Tensor:
    codes = torch.nan_to_num((x / scale).round(), nan=-zero, posinf=1e9, neginf=-1e9) + zero
    return codes.clamp(least, most)


def kernel(monkeypatch, dtype, scale, zero, length):
    """The row kernel that quantises by constants, and its text."""
    texts = []
    made = engine.function
    monkeypatch.setattr(engine, "function", lambda text: texts.append(text) or made(text))
    x = input_("x", F32, (1, length))
    step, start = const(scale, F32), const(zero, dtype)
    problem, sources = fusion_of((x, step, start), (Node(Quantize(dtype), x, step, start),))
    weights = {i: s.op.data.tensor() for i, s in enumerate(sources) if s.constant}
    (schedule,) = plan_for(rows.CANDIDATE, problem, CPU).schedules()
    run = plan_for(rows.CANDIDATE, problem, CPU).build(schedule).prepare(weights)
    return lambda value: run([weights.get(i, value) for i in range(len(sources))])[0], texts


@pytest.mark.parametrize(("dtype", "zero"), [(U8, 0), (U8, 131), (U8, 255), (S8, 0), (S8, -7)], ids=str)
def test_codes_are_those_of_a_division(monkeypatch, dtype, zero):
    generator = np.random.default_rng(0)
    scales = [*NEAREST, 2.0**-100, 2.0**76, 1.0, float(np.float32(0.1)), *generator.lognormal(-4, 3, 40).astype(np.float32)]
    length = around(1.0, zero, dtype.min, dtype.max).shape[1]
    run = None
    for scale in scales:
        run, texts = kernel(monkeypatch, dtype, float(scale), zero, length)
        x = around(float(scale), zero, dtype.min, dtype.max)
        want = divided(x, torch.tensor(float(scale)), zero, dtype.min, dtype.max)
        assert torch.equal(run(x).float(), want), scale
        assert len(texts) == 1, "it divides after all"


@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0**-120, 2.0**100, float("inf"), float("nan")])
def test_scales_without_a_reciprocal_are_divided_by(monkeypatch, scale):
    x = torch.tensor([[1.0, -1.0, 0.0, 5e30, float("inf"), 0.25, -0.25, 1e-38] * 4])
    run, texts = kernel(monkeypatch, S8, scale, 3, 32)
    assert torch.equal(run(x).float(), divided(x, torch.tensor(scale), 3, -128, 127))
    assert len(texts) == 2


def test_a_reciprocal_s_parts_add_up_to_it():
    for scale in (0.1, 3.0, 2.0**-100, 1.7e22):
        scale = float(np.float32(scale))
        assert abs(sum(parts_of(scale)) * scale - 1) < 2.0**-52


def test_a_product_s_results_are_quantised_without_dividing(monkeypatch):
    texts = []
    made = engine.function
    monkeypatch.setattr(engine, "function", lambda text: texts.append(text) or made(text))
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (64, 48), generator=generator, dtype=torch.int8)
    a, b = input_("a", U8, (32, 64)), const(codes)
    value = map_("multiply", convert(gemm(a, b, acc_dtype=S32), F32), const(0.0123, F32))
    program = tilewright.compile(
        Graph("product", (a,), (Node(Quantize(U8), value, const(0.37, F32), const(128, U8)),), ("q",)), budget_s=0
    )
    x = torch.randint(0, 256, (32, 64), generator=generator, dtype=torch.uint8)
    exact = (x.long() @ codes.long()).float() * torch.tensor(0.0123)
    assert torch.equal(program(x).float(), divided(exact, torch.tensor(0.37), 128, 0, 255))
    assert any("micro_" in text for text in texts) and not any(DIVIDES.search(text) for text in texts)


def test_a_cube_beside_a_product_takes_no_f64(monkeypatch):
    texts = []
    made = engine.function
    monkeypatch.setattr(engine, "function", lambda text: texts.append(text) or made(text))
    a, b = input_("a", F32, (32, 64)), input_("b", F32, (64, 48))
    program = tilewright.compile(Graph("cube", (a, b), (map_("power", gemm(a, b), const(3.0, F32)),), ("q",)), budget_s=0)
    x, y = torch.randn(32, 64), torch.randn(64, 48)
    assert torch.allclose(program(x, y), (x @ y) ** 3, rtol=1e-4, atol=1e-2)
    assert any("micro_" in text for text in texts) and not any("double>" in text for text in texts)
