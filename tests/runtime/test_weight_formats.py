"""Layouts of other people's weights, written here field by field as their formats say, and read back to the same numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_layouts import dense, drawn, words

from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.runtime.weight_formats import from_awq, from_compressed_tensors, from_gptq, from_torch_int4

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([4, 8]), st.sampled_from([16, 32, 64]), st.integers(1, 3), st.booleans(), st.sampled_from([1, 2]))
def test_gptq(seed, bits, group, groups, shuffled, version):
    out, columns = 24, group * groups
    codes, zeros, scales = drawn(seed, out, columns, group, bits)
    at = torch.arange(columns) // group
    if shuffled:
        at = at[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    stored = words((zeros - int(version == 1)).t(), bits)
    given_ = words(codes, bits).t(), stored, scales.t(), at.int()
    read = from_gptq(*given_, version=version)
    assert torch.equal(read.dequantize(), dense(codes, zeros, scales, group, at))
    assert (read.order is not None) == (not torch.equal(at, at.sort().values))
    assert read.group_size == group and read.scales.dtype == torch.float16


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.sampled_from([1, 2]), st.booleans())
def test_the_version_of_gptq_is_read_off_the_zero_points(seed, version, symmetric):
    codes, zeros, scales = drawn(seed, 64, 256, 64, 4)
    if symmetric:
        zeros = torch.full_like(zeros, 8)
    stored = words((zeros - int(version == 1)).t(), 4)
    read = from_gptq(words(codes, 4).t(), stored, scales.t())
    assert torch.equal(read.dequantize(), dense(codes, zeros, scales, 64))
    assert (read.zero_points is None) == symmetric
    assert read.dtype.name == ("s4" if symmetric else "u4")


def test_a_zero_point_of_zero_borrows_in_version_1():
    """Whole words were written less one in each field: the field below a borrow is one less."""
    codes, zeros, scales = drawn(0, 8, 64, 64, 4)
    zeros[3] = 0
    stored = words(zeros.t(), 4).long() - 0x11111111
    stored = torch.where(stored < -(2**31), stored + 2**32, stored).int()
    read = from_gptq(words(codes, 4).t(), stored, scales.t(), version=1)
    assert torch.equal(read.dequantize(), dense(codes, zeros, scales, 64))


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.sampled_from([8, 32]), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_awq(seed, group, groups, eights, symmetric):
    out, columns = 8 * eights, group * groups
    codes, zeros, scales = drawn(seed, out, columns, group, 4)
    if symmetric:
        zeros = torch.full_like(zeros, 8)
    interleaved = [8 * i + c for i in range(eights) for c in (0, 2, 4, 6, 1, 3, 5, 7)]
    read = from_awq(words(codes.t()[:, interleaved], 4), words(zeros.t()[:, interleaved], 4), scales.t())
    assert torch.equal(read.dequantize(), dense(codes, zeros, scales, group))
    assert (read.zero_points is None) == symmetric


@settings(max_examples=30, deadline=None)
@given(
    SEEDS,
    st.sampled_from([4, 8]),
    st.integers(1, 19),
    st.integers(9, 90),
    st.sampled_from([8, 16, 999]),
    st.sampled_from("nzwg"),
)
def test_compressed_tensors(seed, bits, out, columns, group, with_):
    group = min(group, columns)
    groups = -(-columns // group)
    group = -(-columns // groups)  # the format knows the number of groups alone
    groups = -(-columns // group)
    codes, zeros, scales = drawn(seed, out, columns, group, bits)
    zeros = zeros if with_ in "zw" else torch.full_like(zeros, 1 << bits - 1)
    at = torch.arange(columns) // group
    stored = {"z": words(zeros.t(), bits).t(), "w": (zeros - (1 << bits - 1)).to(torch.int8)}.get(with_)
    index = {"g": at.int(), "z": torch.full((columns,), -1)}.get(with_)
    read = from_compressed_tensors(words(codes, bits), scales, torch.tensor([out, columns]), stored, index)
    assert torch.equal(read.dequantize(), dense(codes, zeros, scales, group, at))


def test_compressed_tensors_of_one_scale_and_no_shape():
    codes = torch.randint(0, 16, (4, 32))
    read = from_compressed_tensors(words(codes, 4), torch.tensor([0.5]))
    assert torch.equal(read.dequantize(), (codes - 8) * 0.5)
    assert read.zero_points is None and read.group_size == 32


@pytest.mark.parametrize(("out", "columns"), [(16, 64), (48, 96), (64, 32), (80, 128), (192, 64)])
def test_torch_s_own_layout_for_this_processor(out, columns):
    codes = torch.randint(0, 16, (out, columns), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    sides = torch.randn(columns // 32, out, 2).bfloat16()
    read = from_torch_int4(packed, sides)
    assert torch.equal(read.codes.int() + 8, codes)
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(columns).bfloat16(), packed, 32, sides)
    torch.testing.assert_close(read.dequantize(), theirs.t().float(), rtol=2**-7, atol=2**-4)
    whole = from_torch_int4(packed, torch.stack((sides[..., 0], torch.zeros_like(sides[..., 0])), -1))
    assert whole.offsets is None
    cut = from_torch_int4(packed, sides, shape=(out - 3, columns - 5))
    assert torch.equal(cut.dequantize(), read.dequantize()[: out - 3, : columns - 5])


@pytest.mark.parametrize("tiles", [2, 4, 8])
def test_torch_s_own_layout_for_gpus(tiles):
    """The kernel that packs says it lane by lane (aten/src/ATen/native/cuda/int4mm.cu)."""
    out, columns = 24, 2 * tiles * 16
    codes = torch.randint(0, 16, (out, columns))
    packed = torch.zeros(out // 8, columns // (tiles * 16), 32, tiles // 2, dtype=torch.int64)
    for row_tile, column_tile, lane, pair in torch.cartesian_prod(*map(torch.arange, packed.shape)).tolist():
        first = (column_tile * tiles + 2 * pair) * 16 + lane % 4 * 2
        v = [int(codes[row_tile * 8 + lane // 4, first + k]) for k in (0, 1, 8, 9, 16, 17, 24, 25)]
        fields = [v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7]]
        packed[row_tile, column_tile, lane, pair] = sum(f << 4 * i for i, f in enumerate(fields))
    packed = torch.where(packed > 2**31 - 1, packed - 2**32, packed).int()
    read = from_torch_int4(packed, torch.randn(columns // 32, out, 2).bfloat16())
    assert torch.equal(read.codes.int() + 8, codes)


def test_one_word_of_rows_or_groups():
    """Matrices of one column are contiguous whatever their strides say."""
    for out, columns in ((8, 8), (8, 64), (24, 8)):
        codes, zeros, scales = drawn(2, out, columns, 8, 4)
        read = from_compressed_tensors(words(codes, 4), scales, torch.tensor([out, columns]), words(zeros.t(), 4).t())
        assert torch.equal(read.dequantize(), dense(codes, zeros, scales, 8))
        stored = words(zeros.t(), 4)
        assert torch.equal(from_gptq(words(codes, 4).t(), stored, scales.t(), version=2).codes, codes.to(torch.uint8))


def test_what_is_no_such_layout_is_refused():
    codes, zeros, scales = drawn(0, 16, 64, 32, 4)
    packed, stored = words(codes, 4).t(), words(zeros.t(), 4)
    with pytest.raises(TypeMismatchError, match=r"qweight is int64\[8, 16\]\n  try: an s32 matrix"):
        from_gptq(packed.long(), stored, scales.t())
    with pytest.raises(UnsupportedError, match="GPTQ weights of 2 bits"):
        from_gptq(packed, stored[:, :1], scales.t())
    with pytest.raises(TypeMismatchError, match=r"scales \[16, 2\] are no layer of GPTQ"):
        from_gptq(packed, stored, scales)
    with pytest.raises(TypeMismatchError, match=r"scales are int64\[2, 16\]\n  try: a float matrix"):
        from_gptq(packed, stored, scales.t().long())
    with pytest.raises(InputError, match="GPTQ version 3"):
        from_gptq(packed, stored, scales.t(), version=3)
    with pytest.raises(
        InputError, match=r"steps off their zero points as version 1 .* as version 2\n  try: version=1 or 2; in a config.json"
    ):
        from_gptq(words(codes.clamp(min=12), 4).t(), stored, scales.t())
    with pytest.raises(TypeMismatchError, match=r"g_idx torch.int32\[3\]\n  try: a group for each of 64 inputs"):
        from_gptq(packed, stored, scales.t(), torch.zeros(3).int())
    with pytest.raises(InputError, match="g_idx names groups from 0 to 7\n  try: there are 2"):
        from_gptq(packed, stored, scales.t(), (torch.arange(64) // 8).int())
    with pytest.raises(InputError, match="groups of 20 to 44 inputs"):
        from_gptq(packed, stored, scales.t(), (torch.arange(64) >= 20).int())
    with pytest.raises(TypeMismatchError, match="are no layer of AWQ"):
        from_awq(words(codes.t(), 4), words(zeros.t(), 4)[:, :1], scales.t())
    with pytest.raises(
        TypeMismatchError, match=r"weight_packed \[16, 8\] is no weight of shape \[15, 64\]\n  try: \[out, ceil"
    ):
        from_compressed_tensors(words(codes, 4), scales, torch.tensor([15, 64]))
    with pytest.raises(UnsupportedError, match="100 codes in 8 words of 32 bits"):
        from_compressed_tensors(words(codes, 4), scales, torch.tensor([16, 100]))
    with pytest.raises(TypeMismatchError, match=r"weight_scale \[3, 2\] for 16 rows"):
        from_compressed_tensors(words(codes, 4), scales[:3], torch.tensor([16, 64]))
    with pytest.raises(TypeMismatchError, match=r"weight_zero_point torch.int32\[16, 2\] for 2 groups of 16 rows"):
        from_compressed_tensors(words(codes, 4), scales, torch.tensor([16, 64]), zeros.int())
    sides = torch.randn(2, 16, 2).bfloat16()
    with pytest.raises(TypeMismatchError, match=r"scales and zeros of shape \[2, 16\]"):
        from_torch_int4(words(codes, 4), sides[..., 0])
    with pytest.raises(TypeMismatchError, match=r"torch.int32\[16, 8\] is not torch's layout of 4-bit weights"):
        from_torch_int4(words(codes, 4), sides)
    good = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    with pytest.raises(TypeMismatchError, match=r"2 groups of 17 rows for codes \[16, 64\]\n  try: scales and zeros"):
        from_torch_int4(good, torch.randn(2, 17, 2))
    with pytest.raises(
        TypeMismatchError, match=r"shape \[17, 64\] is larger than what is packed, \[16, 64\]\n  try: \[out, in\] before"
    ):
        from_torch_int4(good, sides, shape=(17, 64))
    with pytest.raises(InputError, match=r"torch packs no weight \[15, 64\]"):
        from_torch_int4(good[:15], sides)


def test_weights_packed_on_another_processor_are_told(monkeypatch):
    codes = torch.randint(0, 16, (64, 64), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    from tilewright.runtime import weight_formats

    monkeypatch.setattr(weight_formats, "_cpu_places", lambda rows, count: torch.arange(rows * count))
    with pytest.raises(InputError, match="packed on another kind of processor"):
        from_torch_int4(packed, torch.randn(2, 64, 2))
