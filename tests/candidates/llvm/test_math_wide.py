"""Logarithms, powers, angles and remainders of the generated kernels against float64, ends and signs of zero included."""

import math

import numpy as np
import pytest
import torch
from llvm_map import LANES, map_arrays

from tests.candidates.llvm.test_math import arguments, errors_in_ulp
from tilewright.candidates.llvm.expressions.printer import Printer
from tilewright.dtype import F32
from tilewright.lowering.scalar import functions, wide

INF, NAN = math.inf, math.nan
LARGEST = 3.4028235e38
ENDS = (
    INF,
    -INF,
    NAN,
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    -2.0,
    3.0,
    -3.0,
    0.5,
    -0.5,
    1.5,
    2.0**24 + 2,
    LARGEST,
    -LARGEST,
    2.0**-149,
    -1e-45,
)
MEANT = {
    "exponential_minus_one": (2.0, torch.expm1),
    "log": (1.0, torch.log),
    "log_plus_one": (2.0, torch.log1p),
    "sine": (0.6, torch.sin),
    "cosine": (0.6, torch.cos),
    "tan": (0.6, torch.tan),
    "atan": (0.6, torch.atan),
    "asin": (0.6, torch.asin),
    "acos": (0.6, torch.acos),
    "sinh": (0.6, torch.sinh),
    "cosh": (0.6, torch.cosh),
    "asinh": (0.6, torch.asinh),
    "acosh": (0.6, torch.acosh),
    "atanh": (0.6, torch.atanh),
    "cbrt": (0.6, lambda x: torch.from_numpy(np.cbrt(x.numpy()))),
}


def in_f32(f):
    def apply(a, b):
        with np.errstate(all="ignore"):
            return torch.from_numpy(f(a.float().numpy(), b.float().numpy())).double()

    return apply


OF_TWO = {
    "power": (0.6, torch.pow),
    "atan2": (0.6, torch.atan2),
    "remainder": (0.0, in_f32(np.fmod)),
    "modulo": (0.0, in_f32(np.mod)),
}


def computed(name, *arrays):
    def emit(f, values):
        given = [Printer(f, LANES).named(x, F32) for x in values]
        return (wide.call(name, given) if name in wide.FUNCTIONS else getattr(functions, name)(*given)).name

    return map_arrays(emit, arrays, ["float"] * len(arrays), "float", torch.float32)


def assert_bound(name, most, meant, *arrays):
    got, wanted = computed(name, *arrays), meant(*(a.double() for a in arrays))
    apart = errors_in_ulp(got, wanted).nan_to_num(INF)
    worst = apart.argmax()
    at = [float(a[worst]) for a in arrays]
    assert apart[worst] <= most, f"{name}{at} = {got[worst]}, not {wanted[worst]}: {apart[worst]} ulp"
    wrong = ((wanted == 0) & (got == 0) & (torch.signbit(got) != torch.signbit(wanted))).nonzero()
    assert not len(wrong), f"{name}{[float(a[wrong[0, 0]]) for a in arrays]}: the sign of zero"


def pairs(step):
    x = arguments(step)
    generator = torch.Generator().manual_seed(3)
    a, b = torch.meshgrid(torch.tensor(ENDS), torch.tensor(ENDS), indexing="ij")
    near = torch.randn(20_000, generator=generator) * 5
    whole = torch.randint(-20, 20, (20_000,), generator=generator).float()
    left = torch.cat([x, x.abs(), near, a.flatten()])
    other = torch.randn(len(x), generator=generator) * 3
    return left, torch.cat([x[torch.randperm(len(x), generator=generator)], other, whole, b.flatten()])


@pytest.mark.parametrize("name", list(MEANT))
def test_error_is_as_documented(name):
    assert_bound(name, *MEANT[name], torch.cat([arguments(9973), torch.tensor(ENDS)]))


@pytest.mark.parametrize("name", list(OF_TWO))
def test_error_of_two_arguments_is_as_documented(name):
    assert_bound(name, *OF_TWO[name], *pairs(9973))


@pytest.mark.conformance
@pytest.mark.parametrize("name", list(MEANT))
def test_error_is_as_documented_on_forty_million_floats(name):
    for part in arguments(97).split(1 << 22):
        assert_bound(name, *MEANT[name], part)


@pytest.mark.conformance
@pytest.mark.parametrize("name", list(OF_TWO))
def test_error_of_two_arguments_is_as_documented_on_millions_of_pairs(name):
    assert_bound(name, *OF_TWO[name], *pairs(499))
