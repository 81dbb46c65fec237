"""Weights of a few bits: quantised as documented, packed and unpacked without losing a bit, refused with a reason."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
from tilewright.dtype import S4, S8, S16, U4, U8
from tilewright.errors import InputError, TypeMismatchError
from tilewright.ir.few_bits import pack_halves, unpack_halves
from tilewright.runtime.quantized_weight import QuantizedWeight, pack

TYPES = {"s4": S4, "u4": U4, "s8": S8, "u8": U8}


def by_hand(weight, code_type, group, zero_point):
    """The documented formula in NumPy, a group at a time: codes, zero points and scales in f64 of f32 steps."""
    low_code, high_code = TYPES[code_type].min, TYPES[code_type].max
    rows, columns = weight.shape
    codes = np.zeros(weight.shape, int)
    scales, zeros = [], []
    for r in range(rows):
        for start in range(0, columns, group):
            w = weight[r, start : start + group].astype(np.float32)
            low, high = min(w.min(), np.float32(0)), max(w.max(), np.float32(0))
            if zero_point:
                scale = (high - low) / np.float32(high_code - low_code)
            else:
                scale = max(high, -low) / np.float32(high_code)
            scale = max(np.float32(scale), np.float32(2.0**-126))
            zero = np.clip(np.rint(low_code - low / scale), low_code, high_code) if zero_point else 0
            codes[r, start : start + group] = np.clip(np.rint(w / scale) + zero, low_code, high_code)
            scales.append(scale)
            zeros.append(zero)
    shape = rows, math.ceil(columns / group)
    return codes, np.array(scales).reshape(shape), np.array(zeros).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([("s4", False), ("s4", True), ("u4", True), ("s8", False), ("s8", True), ("u8", True)]),
    st.integers(1, 9),
    st.integers(1, 70),
    st.sampled_from([1, 2, 7, 8, 16, 64, None]),
    st.integers(0, 2**32 - 1),
)
def test_codes_are_those_of_the_formula(how, rows, columns, group, seed):
    code_type, zero_point = how
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((rows, columns)) * 10 ** rng.uniform(-3, 3)).astype(np.float32)
    weight[rng.random(weight.shape) < 0.1] = 0
    if rng.random() < 0.3:
        weight = np.abs(weight)
    q = pack(torch.from_numpy(weight), code_type, group_size=group, zero_point=zero_point)
    codes, scales, zeros = by_hand(weight, code_type, group or columns, zero_point)
    np.testing.assert_array_equal(q.codes.numpy(), codes)
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    if zero_point:
        np.testing.assert_array_equal(q.zero_points.numpy(), zeros)
    else:
        assert q.zero_points is None
    step = np.repeat(q.scales.numpy(), group or columns, axis=1)[:, :columns]
    assert (np.abs(q.dequantize().numpy() - weight) <= 0.5001 * step + 1e-30).all()
    again = QuantizedWeight.of(q.codes, q.scales, q.dtype, q.group_size, zero_points=q.zero_points)
    assert torch.equal(again.packed, q.packed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(0, 33), st.booleans(), st.integers(0, 2**32 - 1))
def test_halves_round_trip(rows, columns, signed, seed):
    of = S4 if signed else U4
    codes = torch.from_numpy(np.random.default_rng(seed).integers(of.min, of.max + 1, (rows, columns))).to(of.to_torch())
    packed = pack_halves(codes)
    assert packed.shape == (rows, math.ceil(columns / 2))
    assert torch.equal(unpack_halves(packed, columns, of), codes)
    for r in range(rows):
        for c in range(columns):
            assert int(packed[r, c // 2]) >> 4 * (c % 2) & 15 == int(codes[r, c]) & 15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scales_are_of_the_weight_s_type_and_codes_fit_the_rounded_scale(dtype):
    weight = torch.randn(32, 256).to(dtype)
    q = pack(weight, "s4", group_size=32)
    assert q.scales.dtype == (dtype if dtype != torch.float64 else torch.float32)
    step = q.scales.float().repeat_interleave(32, 1)
    best = (weight.float() / step).round().clamp(-8, 7)
    assert torch.equal(q.codes.float(), best)
    assert pack(weight, "s4", scale_dtype="bf16").scales.dtype == torch.bfloat16


def test_small_and_blank_groups_keep_their_size():
    """f16 scales below 2**-18 would lose what makes them a step."""
    weight = torch.zeros(3, 64, dtype=torch.float16)
    weight[1] = torch.linspace(-1, 1, 64).half() * 2**-12
    weight[2, 5] = 2.0**-24
    q = pack(weight, "s4", group_size=64)
    assert torch.equal(q.dequantize()[0], torch.zeros(64))
    assert (q.dequantize()[1] - weight[1].float()).abs().max() <= 0.51 * q.scales[1].float()
    assert torch.isfinite(q.dequantize()).all() and (q.scales > 0).all()


@pytest.mark.parametrize("scales", [None, "f32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", [("s4", False), ("s8", False), ("s4", True), ("u4", True), ("s8", True), ("u8", True)])
def test_the_largest_weights_of_a_type_are_decoded_to_finite_ones(how, dtype, scales):
    code_type, zero_point = how
    most = torch.finfo(dtype).max
    ends = torch.tensor([[1.0, -1.0], [1.0, 0.0], [-1.0, 0.0], [1.0, -0.43], [-1.0, 0.43], [1.0, -0.75], [1.0, 0.99]]).double()
    weight = torch.cat([ends, ends * 0.97, ends * 0.999], dim=1).mul(most).to(dtype)
    q = pack(weight, code_type, group_size=None, zero_point=zero_point, scale_dtype=scales)
    assert torch.isfinite(q.dequantize(dtype)).all()
    step = q.scales.double()
    error = (q.dequantize(dtype).double() - weight.double()).abs()
    # The weight's own rounding is to a part in 256 of it, in bf16.
    assert (error <= (1.0 if zero_point else 0.5) * step + weight.double().abs() / 128).all()
    last = 255 if code_type[1] == "8" else 15
    reach = (weight.double().amax(1).clamp(min=0) - weight.double().amin(1).clamp(max=0)) / last
    wanted = reach if zero_point else weight.double().abs().amax(1) / (last // 2)
    assert ((step[:, 0] / wanted - 1).abs() <= 2 * torch.finfo(q.scales.dtype).eps).all()


def test_a_weight_says_what_it_is():
    q = tilewright.pack(torch.randn(6, 100), "u4", group_size=32, zero_point=True)
    assert isinstance(q, tilewright.QuantizedWeight)
    assert q.shape == (6, 100) and q.out_features == 6 and q.scheme == "w4g32z"
    assert q.nbytes == 6 * 50 + 6 * 4 * 4 + 6 * 4
    assert repr(q) == "QuantizedWeight(u4[6, 100], f32 scales per 32 with zero_points)"
    assert torch.equal(q.to("cpu").dequantize(), q.dequantize())
    assert pack(torch.randn(2, 8), "s8", group_size=None).scheme == "w8"


def test_offsets_and_order_are_part_of_a_weight():
    codes = torch.randint(-8, 8, (4, 10), dtype=torch.int8)
    scales, offsets = torch.rand(4, 3), torch.randn(4, 3)
    order = torch.randperm(10)
    q = QuantizedWeight.of(codes, scales, S4, 4, offsets=offsets, order=order)
    dense = q.dequantize()
    for r in range(4):
        for c in range(10):
            wanted = codes[r, c].float() * scales[r, c // 4] + offsets[r, c // 4]
            assert dense[r, order[c]] == wanted


@pytest.mark.parametrize(
    ("weight", "how", "message"),
    [
        (torch.ones(4, 8), {"code_type": "s16"}, "a weight is not packed as s16"),
        (torch.ones(4, 8), {"code_type": "u4"}, "u4 codes without zero points have no negative weights"),
        (torch.ones(8), {}, r"float32\[8\] is no float matrix"),
        (torch.ones(4, 8, dtype=torch.int8), {}, r"int8\[4, 8\] is no float matrix"),
        (torch.ones(4, 8), {"group_size": 0}, "a group of 0 codes"),
        (torch.ones(4, 8), {"scale_dtype": "f64"}, "a scale is not kept as f64"),
        (torch.ones(0, 8), {}, "holds nothing"),
        (
            torch.ones(4, 8),
            {"code_type": "w4g64"},
            "a weight is not packed as w4g64\n  try: s4, u4, s8, u8, f4e2m1fn, f8e4m3fn or f8e5m2, with group_size",
        ),
        (torch.ones(4, 8), {"code_type": 4}, "a weight is not packed as 4"),
        (torch.ones(4, 8), {"group_size": "64"}, r"an argument of type str \(group_size\)\n  try: 32, 64, 128, or None"),
        (torch.ones(4, 8), {"group_size": True}, r"an argument of type bool \(group_size\)"),
        ([[1.0]], {}, r"an argument of type list \(weight\)\n  try: a float tensor \[out, in\]"),
        (torch.ones(4, 8, device="meta"), {}, "the weight has no data yet\n  try: load it first"),
        (torch.eye(8).to_sparse(), {}, r"the weight is sparse_coo\n  try: weight.to_dense\(\)"),
        (torch.tensor([[1.0, math.nan]]), {}, "the weight holds infinity or NaN"),
        (torch.tensor([[1.0, math.inf]]), {"zero_point": True}, "the weight holds infinity or NaN"),
        (torch.full((1, 8), 1e7), {"scale_dtype": "f16"}, r"a weight of 1e\+07 is too large for a scale of f16"),
    ],
)
def test_what_cannot_be_packed_is_refused(weight, how, message):
    with pytest.raises(InputError, match=message):
        pack(weight, **how)


def test_parts_that_do_not_fit_are_refused():
    codes, scales = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2)
    with pytest.raises(TypeMismatchError, match=r"scales are float32\[4, 2\]\n  try: float16 or bfloat16 or float32\[4, 4\]"):
        QuantizedWeight.of(codes, scales, S4, 16)
    with pytest.raises(TypeMismatchError, match="a weight of s16 codes"):
        QuantizedWeight(S16, codes, scales, 64, 32)
    with pytest.raises(InputError, match=r"an argument of type str \(dtype\)\n  try: tilewright.dtype.S4"):
        QuantizedWeight("s4", codes, scales, 64, 32)
    with pytest.raises(TypeMismatchError, match=r"codes of shape \[4\] are no matrix"):
        QuantizedWeight.of(codes[:, 0], scales, S4, 32)
    with pytest.raises(InputError, match="a code of 9 is no s4"):
        QuantizedWeight.of(codes + 9, scales, S4, 32)
    with pytest.raises(InputError, match="a zero point of -1 is no u4"):
        QuantizedWeight.of(codes, scales, U4, 32, zero_points=torch.full((4, 2), -1))
    with pytest.raises(TypeMismatchError, match=r"zero points are int8\[4, 1\]"):
        QuantizedWeight.of(codes, scales, S4, 32, zero_points=torch.zeros(4, 1))
    with pytest.raises(TypeMismatchError, match=r"offsets are float16\[4, 2\]"):
        QuantizedWeight.of(codes, scales, S4, 32, offsets=torch.zeros(4, 2).half())
    with pytest.raises(InputError, match="the order of the inputs leaves some out"):
        QuantizedWeight.of(codes, scales, S4, 32, order=torch.zeros(64, dtype=torch.int64))
    with pytest.raises(TypeMismatchError, match=r"codes are uint8\[4, 31\]\n  try: uint8\[4, 32\] are wanted"):
        QuantizedWeight(S4, torch.zeros(4, 31, dtype=torch.uint8), scales, 64, 32)
    with pytest.raises(TypeMismatchError, match=r"order are int32\[64\]"):
        QuantizedWeight(S8, codes, scales, 64, 32, order=torch.arange(64, dtype=torch.int32))
    with pytest.raises(InputError, match="a group of 0 codes"):
        QuantizedWeight(S8, codes, scales, 64, 0)
