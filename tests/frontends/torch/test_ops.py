"""Every ATen operator that has a meaning in the graph, against eager torch."""

from __future__ import annotations

import importlib
from functools import cache

import pytest
import torch
from against_torch import Together, agree, read
from torch_op_cases import GROUPS, INF, NAN

from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F16, S32, DType
from tilewright.frontends.torch import types as _torch_range
from tilewright.frontends.torch.call import find_operator
from tilewright.frontends.torch.registry import TRANSLATIONS
from tilewright.ir.evaluate import evaluate
from tilewright.ir.ops import Reduce

CASES = [(group, name) for group, (cases, _, _) in GROUPS.items() for name in cases]


@cache
def together(group: str) -> Together | Exception:
    """A group read at once, or what went wrong, so that a failure too happens only once."""
    try:
        return Together(GROUPS[group][0])
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore:(var|std).*degrees of freedom is <= 0")  # which one of the cases is about
@pytest.mark.parametrize(("group", "name"), CASES, ids=[f"{g}: {n}" for g, n in CASES])
def test_an_operator_means_what_torch_means(group: str, name: str) -> None:
    read = together(group)
    if isinstance(read, Exception):
        raise read
    _, ulps, depth = GROUPS[group]
    read.agree(name, ulps=ulps, depth=depth)
    assert read.calls(name) == []


@pytest.mark.parametrize("source", [F16, BF16])
@pytest.mark.parametrize("target", [F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ])
def test_every_16_bit_float_becomes_the_8_bit_float_that_torch_gives(source: DType, target: DType) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source.to_torch())
    graph = read(lambda a: a.to(target.to_torch()), x)
    (given,) = evaluate(graph, [x])
    wanted = x.to(target.to_torch())
    assert torch.equal(torch.isnan(given.float()), torch.isnan(wanted.float()))
    numbers = ~torch.isnan(wanted.float())
    assert torch.equal(given.view(torch.uint8)[numbers], wanted.view(torch.uint8)[numbers])


def test_an_8_bit_float_takes_part_through_a_wider_one() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    agree(lambda a: (a.to(torch.float32) * 2, a.to(torch.bfloat16), a.to(torch.float8_e5m2)), codes, ulps=0)


def test_a_float_outside_32_bits_saturates_as_an_integer_and_the_graph_says_so() -> None:
    x = torch.tensor([3e9, -3e9, NAN, INF, 2.9, -2.9])
    graph = read(lambda a: (a.to(torch.int32), a.to(torch.int8)), x)
    wide, narrow = evaluate(graph, [x])
    assert wide.tolist() == [2**31 - 1, -(2**31), 0, 2**31 - 1, 2, -2]
    assert narrow.tolist()[2:] == [0, -1, 2, -2]
    assert any("saturates where torch leaves it undefined" in note for note in graph.notes)


@pytest.mark.parametrize("target", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_a_float_in_32_bits_keeps_its_low_bits_as_a_narrower_integer(target: torch.dtype) -> None:
    x = torch.tensor([-0.5, -1.0, -3.7, -129.0, -200.0, 255.9, 256.0, 300.0, -32769.0, 70000.0, -70000.0, -(2.0**31), 2.0**30])
    for wide in (x, x.double(), x.bfloat16(), x.clamp(-(2.0**15), 2.0**15).half()):
        agree(lambda a: a.to(target), wide, ulps=0)


def test_what_is_clamped_to_an_integers_range_becomes_it_at_once() -> None:
    def at_once(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            a.round().clamp(-128, 127).to(torch.int8),
            (a.sigmoid() * 255).to(torch.uint8),
            (a.clamp(0, 1) * 255 + 0.5).floor().view(-1).bfloat16().clamp(max=255).to(torch.uint8),
        )

    x = torch.linspace(-300, 300, 77)
    assert not [n for n in read(at_once, x).nodes() if n.dtype is S32]
    agree(at_once, x, ulps=0)
    wraps = read(lambda a: (a.sigmoid() * 257).to(torch.uint8), x)  # 257 is 1
    assert [n for n in wraps.nodes() if n.dtype is S32]


def test_a_range_is_found_once_for_what_many_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded, found = _torch_range._rounded, list[object]()

    def counted(*given: object) -> object:
        found.append(given)
        assert len(found) < 100
        return rounded(*given)  # type: ignore[arg-type]

    def doubled(a: torch.Tensor) -> torch.Tensor:
        a = a.sigmoid()
        for _ in range(20):
            a = a * a + a * 0.5
        return a.to(torch.int8)

    monkeypatch.setattr(_torch_range, "_rounded", counted)
    agree(doubled, torch.linspace(-3, -1, 9), ulps=0)


def test_a_number_too_large_for_an_8_bit_float_may_be_any() -> None:
    x = torch.tensor([-200.0, 3.0])
    f8 = lambda a: a.clamp(-1e9, 100.0).to(torch.float8_e4m3fnuz).float()  # noqa: E731
    agree(lambda a: torch.minimum(torch.tensor(255.0), f8(a)).to(torch.uint8), x, ulps=0)
    agree(lambda a: (a > 0).float().mul(255).to(torch.uint8), x, ulps=0)


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float16, 2), (torch.float64, 0), (torch.bfloat16, 3), (torch.float32, 3)])
def test_a_deviation_of_any_size_is_one_pass_more(dtype: torch.dtype, passes: int) -> None:
    """Means, squares, and the furthest distance where those squares may leave f32; f64 is left to torch."""
    for f in (lambda a: a.std(1), lambda a: a.var(1)):
        assert len([n for n in read(f, torch.ones(3, 5, dtype=dtype)).nodes() if isinstance(n.op, Reduce)]) == passes


def test_every_translation_is_of_an_operator_that_torch_has() -> None:
    importlib.import_module("tilewright.linear.op")  # which defines one of them
    assert all(str(find_operator(name, "")) == name for name in TRANSLATIONS)
    assert len(TRANSLATIONS) > 200
