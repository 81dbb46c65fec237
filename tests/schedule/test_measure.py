"""The judge of kernels: what it must accept, what it must reject, and how it times."""

import math
from dataclasses import replace

import pytest
import torch

from tilewright import compiler
from tilewright.hardware.detect import detect
from tilewright.hardware.load import Sample
from tilewright.ir.notation import parse
from tilewright.runtime import prepare
from tilewright.schedule import budget, measure
from tilewright.schedule.expected import check, expect
from tilewright.schedule.guard import guarded, poison, with_wide_strides
from tilewright.schedule.measure import Cold, Pace, examine, last_cache_bytes, time_interleaved
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources


def posed(text: str) -> Problem:
    problem = problem_of(parse(text).outputs[0])
    assert isinstance(problem, Problem)
    return problem


def judged(text: str, kernel, seed: int = 0, prepare=None):
    """The verdict on `kernel(sources) -> result`, where sources are a, b and then what the line names."""
    problem = posed(text)
    sources = random_sources(problem, seed)
    if prepare is not None:
        prepare(sources)
    return check(problem, expect(problem, sources), [kernel(sources)])


def in_blocks(length, order=1):
    """A product that adds up K in blocks, in either direction."""

    def product(a, b):
        k = a.shape[-1]
        starts = range(0, k, length)
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for at in starts if order > 0 else reversed(starts):
            total += a[..., at : at + length].float() @ b[..., at : at + length, :].float()
        return total

    return product


def one_by_one(a, b):
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total += a[:, k : k + 1].float() * b[k : k + 1].float()
    return total


PRODUCTS = {"library": lambda a, b: a.float() @ b.float(), "blocks of 16": in_blocks(16), "backwards": in_blocks(64, -1)}
LENGTHS = [1, 2, 3, 7, 31, 64, 257, 1024, 3001, 8192]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("k", LENGTHS)
def test_right_products_of_any_length_and_order_are_accepted(name, k):
    product = PRODUCTS[name]
    for dtype in ("f32", "bf16", "f16"):
        assert judged(f"{dtype}[17,{k}] @ {dtype}[{k},19]", lambda s: product(s[0], s[1])) is None


@pytest.mark.parametrize("k", [1, 5, 300, 4000])
def test_a_sum_in_strict_order_is_accepted_even_for_data_of_one_sign(k):
    def of_one_sign(sources):
        sources[0].abs_()
        sources[1].abs_()

    assert judged(f"f32[9,{k}] @ f32[{k},11]", lambda s: one_by_one(s[0], s[1])) is None
    assert judged(f"f32[9,{k}] @ f32[{k},11]", lambda s: one_by_one(s[0], s[1]), prepare=of_one_sign) is None


def exp2_silu(x):
    return x / (1 + torch.exp2(-x * 1.4426950408889634))


RIGHT_EPILOGUES = {
    "+ bias, gelu": lambda p, s: (p + s[2]) * 0.5 * (1 + torch.erf((p + s[2]) * math.sqrt(0.5))),
    ", gelu_tanh": lambda p, s: 0.5 * p * (1 + torch.tanh(0.7978845608028654 * (p + 0.044715 * p * p * p))),
    ", silu": lambda p, s: exp2_silu(p),
    ", logistic": lambda p, s: 0.5 * (1 + torch.tanh(p / 2)),
    ", relu + residual": lambda p, s: torch.where(p > 0, p, torch.zeros(())) + s[2],
    "* scale + bias": lambda p, s: torch.addcmul(s[3].double(), p.double(), s[2].double()).float(),  # a fused multiply-add
    ", maximum(-1.5), minimum(2)": lambda p, s: p.clamp(-1.5, 2),
    "* row, tanh": lambda p, s: torch.tanh(p * s[2]),
    ", abs, sqrt": lambda p, s: p.abs().sqrt(),
    ", exponential": lambda p, s: torch.exp2(p * 1.4426950408889634),
    ", cosine": lambda p, s: p.cos(),
    "- 0.25, negate": lambda p, s: 0.25 - p,
}


@pytest.mark.parametrize("steps", RIGHT_EPILOGUES)
@pytest.mark.parametrize("k", [1, 33, 500, 4096])
def test_right_epilogues_are_accepted_however_they_are_written(steps, k):
    product, finish = in_blocks(32), RIGHT_EPILOGUES[steps]
    assert judged(f"f32[23,{k}] @ f32[{k},29] {steps}", lambda s: finish(product(s[0], s[1]), s)) is None
    to_bf16 = judged(f"f32[23,{k}] @ f32[{k},29] {steps} -> bf16", lambda s: finish(product(s[0], s[1]), s).bfloat16())
    assert to_bf16 is None


def quantised(p, scale, zero=0.0, low=-128, high=127):
    return (torch.round(p / scale) + zero).clamp(low, high)


@pytest.mark.parametrize("k", [1, 64, 4096])
def test_right_quantised_results_are_accepted(k):
    def kernel(s):
        p = in_blocks(32)(s[0], s[1])
        return quantised(torch.relu(p + s[2]), s[3], s[4].float()).to(torch.int8)

    assert judged(f"bf16[31,{k}] @ bf16[{k},37] + bias:f32, relu -> s8 scale=column zero_point", kernel) is None


def test_right_integer_results_are_accepted_to_the_last_bit():
    wide = lambda s: s[0].long() @ s[1].long()  # noqa: E731
    assert judged("s8[33,1000] @ s8[1000,17]", lambda s: wide(s).int()) is None
    assert judged("s8[33,1000] @ s8[1000,17] -> s8", lambda s: wide(s).to(torch.int8)) is None
    assert judged("u8[33,1000] @ s8[1000,17] -> s8 saturate", lambda s: wide(s).clamp(-128, 127).to(torch.int8)) is None
    assert judged("s8[33,1000] @ s8[1000,17] -> f32", lambda s: wide(s).float()) is None
    scaled = "s8[33,1000] scale=channel @ s8[1000,17] scale=channel + bias, gelu -> bf16"
    gelu = torch.nn.functional.gelu
    reordered = lambda s: gelu(wide(s).float() * (s[2] * s[3]) + s[4].float()).bfloat16()  # noqa: E731
    assert judged(scaled, reordered) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps", ["", "+ bias, relu", ", gelu", ", tanh", "-> bf16", "-> s8 scale=tensor"])
def test_data_that_is_no_number_is_no_excuse_and_no_crime(bad, steps):
    def plant(sources):
        sources[0][2, 5] = bad
        sources[1][7, 3] = bad

    problem = posed(f"f32[8,40] @ f32[40,9] {steps}")
    sources = random_sources(problem)
    plant(sources)
    expected = expect(problem, sources)
    right = expected.reference[0]
    assert check(problem, expected, [right.clone()]) is None
    wrong = right.clone()
    wrong[2, 1] = 77 if right[2, 1] != 77 else 76
    assert "1 of 72 elements differ, first at [2, 1]" in str(check(problem, expected, [wrong]))
    if steps == "":
        assert not right[2].isfinite().any() and right[0, :3].isfinite().all()


@pytest.mark.parametrize("finish", ["relu", "gelu"])
def test_tolerance_for_a_coarse_function_hides_no_dropped_precision(finish):
    """A gelu that bf16 rounds may be less exact than f32; its product may not, and nothing else may."""
    torch.manual_seed(0)
    f = getattr(torch.nn.functional, finish)

    def verdicts(k, change, after):
        problem = posed(f"f32[256,{k}] @ f32[{k},256], {finish} -> bf16")
        a, b = sources = random_sources(problem)
        expected = expect(problem, sources)
        right = f((a.double() @ b.double()).float())
        assert check(problem, expected, [right.bfloat16()]) is None
        return check(problem, expected, [after(f((change(a).double() @ change(b).double()).float())).bfloat16()])

    coarse = lambda t: t * (1 + 2.0**-16 * (2 * torch.rand_like(t) - 1))  # noqa: E731
    assert (verdicts(16, lambda t: t, coarse) is None) == (finish == "gelu")
    assert verdicts(4096, ten_bits, lambda t: t) is not None


@pytest.mark.parametrize(("finish", "bits"), [("gelu", 8), ("gelu_tanh", 8), ("silu", 0)])
def test_tolerance_for_a_function_that_is_quantised_at_once_is_what_is_said(finish, bits):
    """A gelu of which fp8 codes are made may be 2^-8 off, not 2^-5; no other function may."""
    torch.manual_seed(0)
    problem = posed(f"f32[256,16] @ f32[16,256], {finish} -> f8e4m3fn scale=tensor")
    a, b, scale = sources = random_sources(problem)
    expected = expect(problem, sources)
    value = expect(posed(f"f32[256,16] @ f32[16,256], {finish}"), [a, b]).reference[0].float()

    def verdict(off):
        changed = value * (1 + off * (2 * torch.rand_like(value) - 1))
        return check(problem, expected, [(changed / scale).clamp(-448, 448).to(torch.float8_e4m3fn)])

    assert verdict(0.0) is None
    assert (verdict(2.0**-9) is None) == bool(bits)
    assert verdict(2.0**-5) is not None


def ten_bits(t):
    """Rounded to 10 bits of mantissa, as TF32 does."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def bf16_sum(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for at in range(0, a.shape[1], 32):
        total = (total.float() + a[:, at : at + 32].float() @ b[at : at + 32].float()).bfloat16()
    return total


@pytest.mark.parametrize("k", [1, 4, 64, 1024, 12288])
@pytest.mark.parametrize("steps", ["", "+ bias, gelu", ", silu"])
def test_dropped_precision_is_rejected(k, steps):
    finish = {
        "": lambda p, s: p,
        "+ bias, gelu": lambda p, s: torch.nn.functional.gelu(p + s[2]),
        ", silu": lambda p, s: torch.nn.functional.silu(p),
    }[steps]
    text = f"f32[24,{k}] @ f32[{k},40] {steps}"
    assert judged(text, lambda s: finish(s[0] @ s[1], s)) is None
    for drop in (
        lambda s: ten_bits(s[0]) @ ten_bits(s[1]),
        lambda s: (s[0].bfloat16() @ s[1].bfloat16()).float(),
        lambda s: s[0].half().float() @ s[1].half().float(),
        lambda s: bf16_sum(s[0], s[1]).float(),
    ):
        assert judged(text, lambda s, drop=drop: finish(drop(s), s)) is not None


@pytest.mark.parametrize("k", [64, 1024, 8192])
def test_dropped_precision_is_rejected_behind_a_narrow_result(k):
    text = f"bf16[64,{k}] @ bf16[{k},64] -> bf16"
    assert judged(text, lambda s: (s[0].float() @ s[1].float()).bfloat16()) is None
    assert judged(text, lambda s: bf16_sum(s[0], s[1])) is not None
    truncated = lambda s: ((s[0].float() @ s[1].float()).view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()  # noqa: E731
    assert judged(text, truncated) is not None
    halves = f"f32[64,{k}] @ f32[{k},64] -> s8 scale=row"
    right = lambda s, p: quantised(p, s[2]).to(torch.int8)  # noqa: E731
    assert judged(halves, lambda s: right(s, s[0] @ s[1])) is None
    assert judged(halves, lambda s: right(s, (s[0].bfloat16() @ s[1].bfloat16()).float())) is not None


def bad_tail(p):
    p[..., -1] = p[..., -2]
    return p


def bad_row(p):
    p[-1] += 1
    return p


INT = "s8[33,300] @ s8[300,33]"
WRONG = {
    "tail column": ("f32[33,65] @ f32[65,17]", lambda s: bad_tail(s[0] @ s[1])),
    "transposed": ("f32[33,65] @ f32[65,33]", lambda s: (s[0] @ s[1]).T),
    "one NaN": ("f32[33,65] @ f32[65,33]", lambda s: (s[0] @ s[1]).index_fill(1, torch.tensor([3]), math.nan)),
    "last k left out": ("f32[33,65] @ f32[65,33]", lambda s: s[0][:, :-1] @ s[1][:-1]),
    "last k left out, long": ("f32[33,8192] @ f32[8192,33]", lambda s: s[0][:, :-1] @ s[1][:-1]),
    "last k left out, bf16": ("bf16[33,1024] @ bf16[1024,33] -> bf16", lambda s: s[0][:, :-1] @ s[1][:-1]),
    "zeros": ("f32[33,65] @ f32[65,33]", lambda s: torch.zeros(33, 33)),
    "one off": (INT, lambda s: bad_row((s[0].long() @ s[1].long()).int())),
    "16-bit sums": (INT, lambda s: (s[0].long() @ s[1].long()).short().int()),
    "saturated pairs": (INT, lambda s: (s[0].long() @ s[1].long()).clamp(-(2**15), 2**15 - 1).int()),
    "sums in f32": ("s8[33,2001] @ s8[2001,33]", lambda s: (s[0].float() @ s[1].float()).int()),
    "saturates": (f"{INT} -> s8", lambda s: (s[0].long() @ s[1].long()).clamp(-128, 127).to(torch.int8)),
    "wraps": (f"{INT} -> s8 saturate", lambda s: (s[0].long() @ s[1].long()).to(torch.int8)),
    "unsigned as signed": ("u8[33,300] @ s8[300,33]", lambda s: (s[0].view(torch.int8).long() @ s[1].long()).int()),
    "bf16 scale": (
        f"{INT} * scale -> bf16",
        lambda s: ((s[0].long() @ s[1].long()).bfloat16() * s[2].bfloat16() * 1.02).bfloat16(),
    ),
    "fp8 scale": (
        f"{INT} * scale -> f8e4m3fn",
        lambda s: ((s[0].long() @ s[1].long()) * s[2] * 1.1).to(torch.float8_e4m3fn),
    ),
    "bias left out": ("f32[33,4096] @ f32[4096,33] + bias", lambda s: s[0] @ s[1]),
    "bias left out, quantised": (
        f"{INT} * scale + bias -> s8 scale=tensor",
        lambda s: quantised((s[0].long() @ s[1].long()) * s[2], s[4]).to(torch.int8),
    ),
    "integer bias left out": (
        f"{INT} + bias:s32, relu -> u8 scale=tensor",
        lambda s: quantised(torch.relu(s[0].long() @ s[1].long()).float(), s[3], 0, 0, 255).to(torch.uint8),
    ),
    "floor": (f"{INT} -> s8 scale=tensor", lambda s: torch.floor((s[0].long() @ s[1].long()) / s[2]).clamp(-128, 127).char()),
    "truncate": (f"{INT} -> s8 scale=tensor", lambda s: ((s[0].long() @ s[1].long()) / s[2]).clamp(-128, 127).char()),
    "floor of floats": (
        "f32[33,65] @ f32[65,33] -> s8 scale=tensor",
        lambda s: torch.floor(s[0] @ s[1] / s[2]).clamp(-128, 127).char(),
    ),
    "zero point inside": (
        "f32[33,65] @ f32[65,33] -> u8 scale=tensor zero_point",
        lambda s: (quantised(s[0] @ s[1], s[2], 0, 0, 255) + s[3].float()).clamp(0, 255).to(torch.uint8),
    ),
    "relu drops NaN": ("f32[9,65] @ f32[65,9] * scale, sqrt, relu", lambda s: (s[0] @ s[1] * s[2]).sqrt().nan_to_num(0.0)),
    "tanh for erf": ("f32[99,65] @ f32[65,99], gelu", lambda s: torch.nn.functional.gelu(s[0] @ s[1], approximate="tanh")),
    "residual twice": ("f32[9,65] @ f32[65,9] + residual", lambda s: s[0] @ s[1] + 2 * s[2]),
    "row for column": ("f32[9,65] @ f32[65,9] + bias", lambda s: s[0] @ s[1] + s[2][:, None]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_rejected(name):
    text, kernel = WRONG[name]
    why = judged(text, kernel)
    assert why is not None and why.startswith("the result is wrong: ")


def test_half_away_from_even_is_seen_where_ties_occur():
    """Every other code is a tie if the scale is a power of two."""

    def even(sources):
        sources[2].fill_(2.0)

    text = "s8[40,1] @ s4[1,50] -> s8 scale=tensor"
    product = lambda s: (s[0].long() @ s[1].long()) / 2  # noqa: E731
    assert judged(text, lambda s: product(s).round().clamp(-128, 127).char(), prepare=even) is None
    away = lambda s: (product(s).sign() * torch.floor(product(s).abs() + 0.5)).clamp(-128, 127).char()  # noqa: E731
    assert "elements differ" in str(judged(text, away, prepare=even))


def test_results_of_another_form_are_rejected_in_words():
    problem = posed("f32[3,4] @ f32[4,5] -> bf16")
    expected = expect(problem, random_sources(problem))
    assert check(problem, expected, []) == "gave 0 results, 1 wanted"
    assert check(problem, expected, [torch.zeros(5, 3, dtype=torch.bfloat16)]) == (
        "the result is torch.bfloat16[5, 3], bf16[3,5] wanted"
    )
    assert check(problem, expected, [torch.zeros(3, 5)]) == "the result is torch.float32[3, 5], bf16[3,5] wanted"


def test_each_type_can_be_judged():
    for a, out in [
        ("s8", t) for t in ("u16", "s16", "u32", "u64", "s64", "u4", "s4", "f16", "f64", "f8e5m2", "f8e4m3fnuz", "pred")
    ]:
        problem = posed(f"{a}[5,6] @ {a}[6,7] -> {out}")
        expected = expect(problem, random_sources(problem))
        right = expected.reference[0]
        assert check(problem, expected, [right.clone()]) is None, out
        other = right.clone().view(torch.uint8)
        other[0, 0] ^= 1
        assert check(problem, expected, [other.view(right.dtype)]) is not None, out


def test_sampled_sources_let_every_part_be_seen():
    problem = posed("s8[64,2000] @ s8[2000,64] * scale + bias + residual -> s8 scale=tensor")
    sources = random_sources(problem)
    result = expect(problem, sources).reference[0]
    assert len(result.unique()) > 100 and float((result.abs() == 127).float().mean()) < 0.2
    product = ((sources[0].long() @ sources[1].long()) * sources[2].double()).std()
    for side in sources[3:5]:
        assert 0.2 < float(side.double().std() / product) < 5


def test_sources_are_random_never_zeros_and_repeat_with_their_seed():
    problem = posed("f16[4,64] @ s4[64,8] group=32 zero_point + bias -> f16")
    first, again, other = random_sources(problem), random_sources(problem), random_sources(problem, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert all(t.count_nonzero() for t in first)
    assert first[1].min() == -8 and first[1].max() == 7


def examined(text: str, runner):
    problem = posed(text)
    sources = random_sources(problem)
    before = [t.clone() for t in sources]
    fault = examine(problem, expect(problem, sources), runner, sources)
    assert all(torch.equal(t, was) for t, was in zip(sources, before, strict=True))  # for those that are examined next
    return None if fault is None else fault.why


def test_a_runner_is_examined_beyond_one_result():
    text = "f32[9,33] @ f32[33,17]"
    fresh = lambda s: [s[0] @ s[1]]  # noqa: E731
    assert examined(text, fresh) is None

    kept = []

    def stale(s):
        if not kept:
            kept.append(s[0] @ s[1])
        return kept

    assert "elements differ" in examined(text, stale)

    memory = torch.empty(9, 17)
    assert examined(text, lambda s: [torch.mm(s[0], s[1], out=memory)]) == (
        "a result changed when it ran again: it gives memory that it writes later"
    )

    def writes(s):
        result = s[0] @ s[1]
        s[0].zero_()
        return [result]

    assert examined(text, writes) == "it writes its sources"

    def bump(s):
        result = s[0] @ s[1]
        s[1].view(torch.int32).bitwise_xor_(1)  # below what the check of the result could see
        return [result]

    assert examined(text, bump) == "it writes its sources"

    def ignores_strides(s):
        rows, columns = s[0].shape
        return [torch.as_strided(s[0], (rows, columns), (columns, 1)) @ s[1]]

    assert examined(text, ignores_strides).endswith("(only when its sources are not contiguous)")


def wide(s):
    """The product with every element's place worked out, as a kernel has it, in 64 bits."""
    return [s[0] @ s[1]]


def offsets_of_32_bits(s):
    """Element offsets worked out in 32 bits and wrapped: right up to 2^31 bytes."""
    rows, columns = s[0].shape
    down, across = (stride * s[0].itemsize for stride in s[0].stride())
    offsets = (torch.arange(rows)[:, None] * down + torch.arange(columns) * across).to(torch.int32).long()
    inside = torch.where(offsets < 0, torch.zeros_like(offsets), offsets) // s[0].itemsize
    flat = torch.as_strided(s[0], (int(inside.max()) + 1,), (1,))
    return [flat[inside] @ s[1]]


def bad_columns(s):
    """The tail of N, which no whole vector covers, is left as the memory was."""
    out = torch.empty(s[0].shape[0], s[1].shape[1])
    whole = out.shape[1] // 16 * 16
    out[:, :whole] = s[0] @ s[1][:, :whole]
    return [out]


def zero_times_what_was_there(s):
    """beta = 0 as a multiplication: right as long as the result's memory holds numbers."""
    out = torch.empty(s[0].shape[0], s[1].shape[1])
    return [out * 0 + s[0] @ s[1]]


class Racing:
    """Its second thread comes late, once in a while."""

    def __init__(self):
        self.calls = 0

    def __call__(self, s):
        self.calls += 1
        out = s[0] @ s[1]
        if self.calls == 5:
            out[-1] = out[0]
        return [out]


class Stale:
    """Writes its result once, into memory that it keeps."""

    def __init__(self):
        self.out = None

    def __call__(self, s):
        if self.out is None:
            self.out = s[0] @ s[1]
        return [self.out.clone()]


class Remembering:
    """Hands out the result that it gave for these addresses."""

    def __init__(self):
        self.held = {}

    def __call__(self, s):
        at = tuple(t.data_ptr() for t in s)
        if at not in self.held:
            self.held[at] = s[0] @ s[1]
        return [self.held[at].clone()]


def one_beyond(s):
    """Whole vectors are written, the last of them past the end of the result."""
    out = torch.empty(s[0].shape[0], s[1].shape[1])
    out.copy_(s[0] @ s[1])
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(7.0)
    return [out]


def one_beyond_a_source(s):
    if s[0].is_contiguous() and s[0].storage_offset() + s[0].numel() < s[0].untyped_storage().nbytes() // 4:
        torch.as_strided(s[0], (1,), (1,), s[0].storage_offset() + s[0].numel()).fill_(7.0)
    return [s[0] @ s[1]]


PLANTED = {
    "bad tail": (lambda: bad_columns, "elements differ"),
    "bad index": (lambda: lambda s: [s[0] @ s[1].roll(1, 0)], "elements differ"),
    "NaN through beta = 0": (lambda: zero_times_what_was_there, "elements differ"),
    "stale output": (Stale, "elements differ"),
    "result kept by address": (Remembering, measure.KEEPS),
    "offsets of 32 bits": (lambda: offsets_of_32_bits, "(only when its sources reach past 2^31 bytes)"),
    "race": (Racing, "it gave other results when it ran again"),
    "writes past its result": (lambda: one_beyond, "it writes beside its results"),
    "writes past its source": (lambda: one_beyond_a_source, "it writes beside its sources"),
}


@pytest.mark.parametrize("shape", ["f32[9,33] @ f32[33,17]", "f32[128,65] @ f32[65,49]", "f32[40,1000] @ f32[1000,33]"])
@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name, shape):
    kernel, why = PLANTED[name]
    problem = posed(shape)
    sources = [guarded(t) for t in random_sources(problem)]
    expected = expect(problem, sources)
    assert why in examine(problem, expected, kernel(), sources, exactly=True).why
    assert examine(problem, expected, wide, sources, exactly=True) is None


def test_a_kernel_that_is_far_slower_than_the_fastest_is_not_examined_to_the_end(monkeypatch):
    passed_s = 0.0

    class Clock(measure.Threads):
        def timed(self, run):
            start = passed_s
            run()
            return Sample(*[passed_s - start] * 2, 0.0)

    monkeypatch.setattr(measure, "Threads", Clock)
    monkeypatch.setattr(measure, "SLOW_S", 0.05)
    problem, calls = posed("f32[9,33] @ f32[33,17]"), []
    sources = [guarded(t) for t in random_sources(problem)]
    expected, pace = expect(problem, sources), Pace()

    def slow(s):
        nonlocal passed_s
        calls.append(None)
        passed_s += 0.06
        return wide(s)

    assert examine(problem, expected, slow, sources, pace=pace) is None  # nothing is faster yet
    assert pace.fastest_s == pytest.approx(0.06) and len(calls) == 7
    assert examine(problem, expected, wide, sources, pace=pace) is None and pace.fastest_s == 0
    pace.fastest_s, calls[:] = 0.01, []
    fault = examine(problem, expected, slow, sources, pace=pace)
    assert (fault.kind, fault.why) == ("slower", "slower: a run took 60 ms, 6.0 times the fastest so far")
    assert len(calls) == 3
    pace.fastest_s = 0.059
    assert examine(problem, expected, slow, sources, pace=pace) is None


def test_each_planted_mistake_looks_right_when_it_runs_once():
    """So it is the examination that finds them: only a wrong index shows in one result on fresh memory of zeros."""
    problem = posed("f32[128,65] @ f32[65,48]")
    sources = random_sources(problem)
    expected = expect(problem, sources)
    for name in PLANTED.keys() - {"bad index", "writes past its result", "writes past its source"}:
        assert check(problem, expected, PLANTED[name][0]()(sources)) is None or name == "NaN through beta = 0", name


def test_sources_far_apart_take_little_memory_and_hold_the_same():
    given = [torch.randn(shape) for shape in ((128, 65), (1, 3, 4, 5), (2, 7), (2, 9, 1 << 9), (2, 3))]
    given.append(torch.arange(14, dtype=torch.int8).reshape(2, 7))
    made = with_wide_strides(given)
    for t, far in zip(given, made, strict=True):
        assert torch.equal(far, t)
        span = sum((extent - 1) * stride for extent, stride in zip(far.shape, far.stride(), strict=True)) * t.itemsize
        assert 1 << 31 <= span < 1 << 32
    assert len({t.untyped_storage().data_ptr() for t in made}) == 3, "those of as many parts are together"
    assert with_wide_strides([torch.randn(7), torch.randn(1, 7), torch.randn(0, 7)]) == [None] * 3


def test_free_memory_is_poisoned_before_each_run():
    from tilewright.candidates.llvm.runtime import scratch as _scratch

    block = _scratch.take(1000)
    block[2].zero_()
    _scratch.give(block)
    large = _scratch.maker((1 << 19,), torch.float32)
    kept = large().fill_(3.0)
    address = kept.data_ptr()
    del kept
    poison([], "cpu")
    assert bool((block[2] == 0xFF).all())
    again = large()
    assert again.data_ptr() == address and bool(again.isnan().all())


class Clock:
    """Time that passes only when a run says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measure.Threads, "timed", lambda _, run: self.timed(run))

    def timed(self, run):
        """A call for which nothing waited, whatever else the machine does meanwhile."""
        start = self.now
        run()
        return Sample(self.now - start, self.now - start, 0.0)

    def run(self, *seconds):
        """A run that takes the given times in turn, the last one ever after; counts its calls."""

        def run():
            self.now += seconds[min(run.calls, len(seconds) - 1)]
            run.calls += 1

        run.calls = 0
        return run


def microseconds(race):
    return [race.us(i) for i in race.laps]


def test_hopeless_runs_cost_one_call(monkeypatch):
    clock = Clock(monkeypatch)
    fast, hopeless, slower = clock.run(0.01), clock.run(0.09), clock.run(0.02)
    times = time_interleaved([fast, hopeless, slower], "cpu", budget_s=0.1)
    assert microseconds(times) == pytest.approx([10_000, 90_000, 20_000])
    assert hopeless.calls == 1 and fast.calls == slower.calls > 3


def test_one_interruption_does_not_make_a_run_hopeless(monkeypatch):
    clock = Clock(monkeypatch)
    interrupted, steady = clock.run(0.009, 0.0002), clock.run(0.0005)
    assert microseconds(time_interleaved([interrupted, steady], "cpu", budget_s=0.01)) == pytest.approx([200, 500])


def test_medians_and_the_budget(monkeypatch):
    clock = Clock(monkeypatch)
    uneven = clock.run(0.004, 0.001, 0.009, 0.001, 0.001)
    assert microseconds(time_interleaved([uneven], "cpu", budget_s=0.012)) == pytest.approx([1000])
    assert clock.now < 0.02
    long = clock.run(10.0)
    time_interleaved([long], "cpu", budget_s=0.001)
    assert long.calls == 4  # one to look, three to have a median
    endless = clock.run(0.0)
    time_interleaved([endless], "cpu", budget_s=1.0)
    assert endless.calls == 201


def test_weights_are_put_out_of_the_caches_before_each_timed_call():
    happened = []
    time_interleaved([lambda: happened.append("run")], "cpu", budget_s=0.0, before=lambda: happened.append("cold"))
    assert happened == ["cold", "run"] * 4
    target = replace(detect("cpu"), caches_bytes={"L1d": 1 << 15, "L2": 1 << 20, "L3": 1 << 25})
    assert last_cache_bytes(target) == 1 << 25
    given = torch.ones(3, 5, dtype=torch.bfloat16).t()
    cold = Cold(target, [given, torch.ones(4)], [False, True])
    cold()
    assert cold._other.nbytes == 2 << 25


def test_a_program_larger_than_the_caches_is_measured_with_cold_weights(monkeypatch):
    asked = []

    def search(*given, **named):
        asked.append(named.get("cold", False))
        return real(*given, **(named | {"budget_s": 0}))

    real = budget.search
    monkeypatch.setattr(budget, "search", search)
    for size, cold in ((1 << 20, True), (1 << 40, False)):
        monkeypatch.setattr(prepare, "last_cache_bytes", lambda target, size=size: size)
        asked.clear()
        compiler.compile(torch.nn.Linear(600, 600), example_inputs=(torch.ones(2, 600),), budget_s=60.0, cache=False)
        assert set(asked) == {cold}
