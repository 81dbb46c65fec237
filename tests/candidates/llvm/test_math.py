"""The generated kernels' functions of floats against float64: every documented bound, and what happens at the ends."""

import math

import pytest
import torch
from llvm_map import LANES, map_arrays

from tilewright.candidates.llvm.expressions.printer import Printer
from tilewright.dtype import F32
from tilewright.ir.ops.functions import FUNCTIONS, evaluate_function
from tilewright.lowering.scalar import functions

INF, NAN = math.inf, math.nan


def logistic(x):
    return torch.where(x >= 0, 1 / (1 + torch.exp(-x)), torch.exp(x) / (1 + torch.exp(x)))


def times(x, weight):
    """x * weight, zero where the weight is: also at -infinity, where the limit is meant."""
    return torch.where(weight == 0, weight * torch.copysign(torch.ones_like(x), x), x * weight)


def gelu_tanh(x):
    return times(x, logistic(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


MEANT = {
    "exp": torch.exp,
    "bounded_exp": torch.exp,
    "logistic": logistic,
    "silu": lambda x: times(x, logistic(x)),
    "tanh": torch.tanh,
    "erf": torch.special.erf,
    "erfc": torch.special.erfc,
    "gelu": lambda x: times(x, 0.5 * torch.special.erfc(x * -math.sqrt(0.5))),
    "gelu_tanh": gelu_tanh,
    "gelu_by_power": lambda x: MEANT["gelu"](x),
}


def gelu_ulps(x):
    """Below -1 what half an ulp of x makes of it."""
    return torch.where(x >= -0.25, 1.8, torch.where(x >= -1, 2.6, 2.6 + x.double() ** 2))


# As documented: (from, ulp), and the absolute error below that.
ULPS = {
    "exp": (-INF, 1.1, 0.0),
    "bounded_exp": (-86.9, 1.1, 2**-125),
    "logistic": (-88, 2.0, 2**-127),
    "silu": (-88, 2.0, 2**-121),
    "tanh": (-INF, 1.4, 0.0),
    "erf": (-INF, 1.0, 0.0),
    "erfc": (-INF, 2.7, 0.0),
    "gelu": (-13.19, gelu_ulps, 2**-126),
    "gelu_tanh": (-1, 2.5, 2**-23),
    "gelu_by_power": (-12.9, 2.0**9.5, 2**-122),
}
BREAKS = (
    0.0,
    0.5,
    0.625,
    0.7074,
    1.0,
    9.2,
    10.06,
    10.3,
    12.9,
    13.13,
    14.4,
    17.3,
    87.0,
    87.4,
    88.0,
    88.722839,
    89.0,
    103.97,
    104.5,
    2.0**-126,
)


def arguments(step):
    """Every `step`-th float, a fine grid where the functions bend, all floats around the places where the code branches."""
    every = torch.arange(-(2**31), 2**31, step, dtype=torch.int64).to(torch.int32).view(torch.float32)
    near = torch.tensor(BREAKS).view(torch.int32)[:, None] + torch.arange(-1024, 1024, dtype=torch.int32)
    around = near.clamp(min=0).view(torch.float32).flatten()
    count = (1 << 30) // step
    x = torch.cat([every, around, -around, torch.linspace(-110, 110, count), torch.linspace(-14, 14, count)])
    return x[torch.isfinite(x)]


def computed(name, x):
    def emit(f, values):
        return getattr(functions, name)(Printer(f, LANES).named(values[0], F32)).name

    return map_arrays(emit, [x], ["float"], "float", torch.float32)


def errors_in_ulp(got, meant):
    """Distance in units of the last place of what is meant; the largest number's last place stands for infinity's."""
    exponent = torch.frexp(meant.abs().clamp(max=2.0**127))[1].double()
    apart = (got.double() - meant).abs() / torch.exp2((exponent - 24).clamp(min=-149))
    same = (got == meant.float()) | (got.isnan() & meant.isnan())
    return torch.where(same, torch.zeros_like(apart), apart)


def assert_bound(name, x):
    got, meant = computed(name, x), MEANT[name](x.double())
    start, ulps, below = ULPS[name]
    apart = errors_in_ulp(got, meant)
    inside = x >= start
    most = ulps(x) if callable(ulps) else torch.full_like(apart, ulps)
    worst = torch.where(inside, apart / most, 0.0).argmax()
    assert apart[worst] <= most[worst] or not inside[worst], (
        f"{name}({x[worst]}) = {got[worst]}, not {meant[worst]}: {apart[worst]} ulp"
    )
    size = x.double().abs() if name == "gelu_tanh" else torch.ones_like(meant)
    tail = torch.where(inside, 0.0, (got.double() - meant).abs() - below * size.clamp(min=1.0))
    worst = tail.argmax()
    assert tail[worst] <= 0, f"{name}({x[worst]}) = {got[worst]}, not {meant[worst]}"


@pytest.mark.parametrize("name", list(MEANT))
def test_error_is_as_documented(name):
    assert_bound(name, arguments(1999))


@pytest.mark.conformance
@pytest.mark.parametrize("name", list(MEANT))
def test_error_is_as_documented_on_forty_million_floats(name):
    for part in arguments(97).split(1 << 22):
        assert_bound(name, part)


def bits(values):
    """Bits of f32 values, for comparing with signs of zero; every NaN is alike."""
    t = torch.as_tensor(values, dtype=torch.float32)
    return torch.where(t.isnan(), NAN, t).view(torch.int32).tolist()


@pytest.mark.parametrize("name", list(MEANT))
def test_nan_infinities_zeros_and_denormals(name):
    tiny = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-140, -(2.0**-130), 2.0**-127])
    x = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 3.4028235e38, -3.4028235e38])
    expected = {
        "exp": [NAN, INF, 0.0, 1.0, 1.0, INF, 0.0],
        "bounded_exp": [NAN, INF, 0.0, 1.0, 1.0, INF, 0.0],
        "logistic": [NAN, 1.0, 0.0, 0.5, 0.5, 1.0, 0.0],
        "silu": [NAN, INF, NAN, 0.0, -0.0, 3.4028235e38, -0.0],
        "tanh": [NAN, 1.0, -1.0, 0.0, -0.0, 1.0, -1.0],
        "erf": [NAN, 1.0, -1.0, 0.0, -0.0, 1.0, -1.0],
        "erfc": [NAN, 0.0, 2.0, 1.0, 1.0, 0.0, 2.0],
        "gelu": [NAN, INF, NAN, 0.0, -0.0, 3.4028235e38, -0.0],
        "gelu_tanh": [NAN, INF, NAN, 0.0, -0.0, 3.4028235e38, -0.0],
        "gelu_by_power": [NAN, INF, NAN, 0.0, 0.0, 3.4028235e38, 0.0],
    }[name]
    assert bits(computed(name, x)) == bits(expected)
    most = 2**9.5 if name == "gelu_by_power" else 1
    assert float(errors_in_ulp(computed(name, tiny), MEANT[name](tiny.double())).max()) <= most


@pytest.mark.parametrize("name", [n for n in MEANT if n in FUNCTIONS])
def test_ends_agree_with_the_oracle(name):
    x = torch.tensor([NAN, INF, -INF, 0.0, -0.0])
    oracle = evaluate_function(FUNCTIONS[name], F32, [x])
    assert torch.equal(oracle.isnan(), computed(name, x).isnan())
    torch.testing.assert_close(computed(name, x), oracle, equal_nan=True)


def test_what_bf16_rounds_is_right_but_for_one_in_a_thousand():
    """Rounding itself hides more: nothing is more than one place off."""
    x = torch.linspace(-12, 5, 1_000_001)
    ours, meant = (v.bfloat16() for v in (computed("gelu_by_power", x), MEANT["gelu"](x.double()).float()))
    apart = (ours.view(torch.int16).int() - meant.view(torch.int16).int()).abs()
    assert int(apart.max()) == 1 and float((apart != 0).float().mean()) < 1e-3


def test_gelu_keeps_the_tail_that_one_plus_erf_loses():
    x = torch.linspace(-12.9, -6, 100_001)
    ours = errors_in_ulp(computed("gelu", x), MEANT["gelu"](x.double())).max()
    torch_s = errors_in_ulp(torch.nn.functional.gelu(x), MEANT["gelu"](x.double())).max()
    assert ours < 200 < 1e6 < torch_s
