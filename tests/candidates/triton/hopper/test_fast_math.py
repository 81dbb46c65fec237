"""Epilogues of Hopper kernels in few instructions: each argument that there is, through the PTX as it is written."""

import re

import numpy as np
import pytest
import torch
from ptx_halves import run

from tilewright.candidates.triton.expressions.emit import Tile
from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.fast_math import FastMath
from tilewright.dtype import F8E4M3FN, F8E5M2, F16, F32, S8, U8
from tilewright.ir.build import const, convert, map_
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.expression import quantised_at_once
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Quantize
from tilewright.ir.types import TensorType
from tilewright.lowering.access import of_store

ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def quantised(function, to, scale, kind=F16):
    """Codes of a function of the accumulator."""
    acc = Node(Acc(TensorType(F32, (2, 1 << 15))))
    value = map_(function, convert(acc, kind))
    return Node(Quantize(to), value if kind is F32 else convert(value, F32), const(scale, F32))


def text_of(root):
    t = Text("gl")
    FastMath(t, Tile("rows", "columns", 1 << 15, acc="acc"), lambda n: "p", {}).value(of_store(root))
    return t


@pytest.mark.parametrize("off", [0.0, 2.0**-9.9, -(2.0**-9.9)])
@pytest.mark.parametrize("to", [F8E4M3FN, F8E5M2, S8, U8])
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh"])
def test_codes_of_every_f16_are_those_of_values_as_near_as_is_said(function, to, off):
    scale = 0.0217
    root = quantised(function, to, scale)
    text = text_of(root)
    ((asm, given),) = re.findall(r'inline_asm_elementwise\("([^"]*)", "=r,r,r,r,r,r,r", \[v\d+, (\w+)\]', str(text))
    pairs = ALL.reshape(2, 2, -1)
    got = np.stack(
        run(asm, *pairs, text.numbers[given], power=lambda p: (np.exp2(p.astype(np.float64)) * (1 + off)).astype(np.float16))
    ).ravel()
    got = torch.from_numpy(got).view(to.to_torch()).float()
    x = torch.from_numpy(ALL.copy()).double()
    argument = Node(Acc(TensorType(F32, (1 << 16,))))
    exact = evaluate_nodes((map_(function, argument),), {argument: x})[0]
    tolerance = exact.abs() * torch.where(x < 0, 2.0**-6, 2.0**-8) + 2.0**-21
    ends = []
    for value in (exact - tolerance, exact, exact + tolerance):
        code = Node(Quantize(to), argument, const(scale, F32))
        ends.append(evaluate_nodes((code,), {argument: value.float()})[0].float())
    low, meant, high = ends
    same = (got == meant) | (got.isnan() & meant.isnan())
    right = same | ((got >= torch.minimum(low, high)) & (got <= torch.maximum(low, high)))
    assert bool(right.all()), [(float(x[i]), float(got[i]), float(meant[i])) for i in (~right).nonzero().flatten()[:5]]
    assert float(same[x > -3].double().mean()) > 0.97


def test_what_else_reads_a_gelu_keeps_its_digits():
    root = quantised("gelu", S8, 0.1)
    value = root.src[0]
    assert set(quantised_at_once(root).values()) == {value.src[0]}
    assert not quantised_at_once(root, value)
    again = map_("add", Node(root.op, *root.src), convert(map_("abs", value), S8))
    assert not quantised_at_once(again)


@pytest.mark.parametrize(("kind", "scale"), [(F32, 0.1), (F16, 1e-6), (F16, 1e6)])
def test_what_f16_does_not_hold_is_computed_in_f32(kind, scale):
    assert "ex2.approx.ftz.f32" in str(text_of(quantised("gelu", F8E4M3FN, scale, kind)))


@pytest.mark.parametrize("to", [F8E4M3FN, S8, U8])
def test_codes_of_f32_take_no_selection_and_no_division(to):
    text = str(text_of(quantised("gelu", to, 0.1, F32)))
    assert "where" not in text and " / " not in text
    assert ("cvt.pack.sat" in text) == to.is_integer
