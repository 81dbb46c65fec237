"""Tensors of torchao: its own where it is installed, and their parts by its names, whose values are computed here."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

import tilewright
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.runtime.torchao_weights import from_torchao, is_torchao, parts_of, quantizes_activations

GEN = torch.Generator().manual_seed(0)


def ints(low, high, *shape):
    return torch.randint(low, high, shape, generator=GEN, dtype=torch.int8)


def floats(*shape, dtype=torch.float32):
    return torch.rand(shape, generator=GEN).add(0.1).to(dtype)


def spread(scale, group):
    return scale.float().repeat_interleave(group, dim=1)


def test_integers_by_rows_groups_and_the_whole():
    codes = ints(-128, 128, 6, 64)
    for scale, block in ((floats(6, 1), [1, 64]), (floats(6, 2), [1, 32]), (floats(1, 1), [6, 64])):
        weight = from_torchao("Int8Tensor", {"qdata": codes, "scale": scale}, {"block_size": block})
        wanted = codes * spread(scale.expand(6, -1), block[1])
        assert weight.code_type.name == "s8" and torch.equal(weight.dequantize(), wanted)
    zeros = ints(-5, 6, 6, 2)
    weight = from_torchao("Int8Tensor", {"qdata": codes, "scale": floats(6, 2), "zero_point": zeros}, {"block_size": [1, 32]})
    assert torch.equal(weight.zero_points, zeros)


def test_floats_of_8_bits():
    codes, scale = torch.randn(6, 64, generator=GEN).to(torch.float8_e4m3fn), floats(6, 1)
    weight = from_torchao("Float8Tensor", {"qdata": codes, "scale": scale}, {"block_size": [1, 64]})
    assert torch.equal(weight.dequantize(), codes.float() * scale)


@pytest.mark.parametrize(("bits", "code"), [(4, "s4"), (3, "s4"), (8, "s8"), (6, "s8")])
def test_integers_of_few_bits_one_to_a_byte(bits, code):
    half = 1 << bits - 1
    codes, scale = ints(-half, half, 6, 64), floats(6, 2, dtype=torch.bfloat16)
    for zeros in (torch.zeros(6, 2, dtype=torch.int8), ints(-half, half, 6, 2)):
        data = {"qdata": codes, "scale": scale, "zero_point": zeros}
        facts = {"target_dtype": getattr(torch, f"int{bits}"), "block_size": (1, 32)}
        weight = from_torchao("IntxUnpackedToInt8Tensor", data, facts)
        assert weight.code_type.name == code and (weight.zero_points is None) == (not zeros.any())
        assert torch.equal(weight.dequantize(), (codes - spread(zeros, 32)) * spread(scale, 32))


def test_integers_of_4_bits_two_to_a_byte():
    """Torchao calls fbgemm's int4_row_quantize_zp and pack_int4, which make such codes: q * scale + zero, a real number."""
    codes, scale, zeros = ints(-8, 8, 6, 64), floats(2, 6, dtype=torch.bfloat16), floats(2, 6, dtype=torch.bfloat16)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    data = {"qdata": packed, "scale": scale, "zero_point": zeros}
    weight = from_torchao("Int4Tensor", data, {"block_size": [1, 32], "shape": torch.Size((6, 64))})
    assert torch.equal(weight.dequantize(), codes * spread(scale.t(), 32) + spread(zeros.t(), 32))
    plain = from_torchao("Int4Tensor", {**data, "zero_point": torch.zeros_like(zeros)}, {"block_size": [1, 32]})
    assert plain.offsets is None


def swizzle(scale):
    """Tiles of 128 x 4 as cuBLAS describes them: row r, column c of a tile at (r % 32) * 16 + (r / 32) * 4 + c."""
    rows, columns = scale.shape
    out = torch.zeros(-(-rows // 128) * -(-columns // 4) * 512, dtype=torch.uint8)
    wide = -(-columns // 4)
    for r in range(rows):
        for c in range(columns):
            out[(r // 128 * wide + c // 4) * 512 + r % 128 % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale.view(torch.uint8)[
                r, c
            ]
    return out.view(scale.dtype)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("factor", [None, torch.tensor(0.37)])
def test_floats_of_4_bits(swizzled, factor):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed = torch.randint(0, 256, (130, 48), generator=GEN, dtype=torch.uint8)
    scale = floats(130, 6).to(torch.float8_e4m3fn)
    data = {"qdata": packed, "scale": swizzle(scale) if swizzled else scale}
    data |= {} if factor is None else {"per_tensor_scale": factor}
    weight = from_torchao("NVFP4Tensor", data, {"block_size": 16, "is_swizzled_scales": swizzled})
    codes = values[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()]
    wide = scale.float() if factor is None else factor * scale.float()
    assert torch.equal(weight.dequantize(), codes * spread(wide, 16))


def test_mx_floats_of_8_bits():
    codes = torch.randn(6, 64, generator=GEN).to(torch.float8_e4m3fn)
    exponents = torch.randint(100, 140, (6, 2), generator=GEN, dtype=torch.uint8)
    facts = {"block_size": 32, "elem_dtype": torch.float8_e4m3fn, "is_swizzled_scales": False}
    weight = from_torchao("MXTensor", {"qdata": codes, "scale": exponents.view(torch.float8_e8m0fnu)}, facts)
    assert torch.equal(weight.dequantize(), codes.float() * spread(2.0 ** (exponents.float() - 127), 32))


def test_what_is_not_read_is_named():
    codes, scale = ints(-8, 8, 6, 64), floats(6, 1)
    with pytest.raises(UnsupportedError, match=r"(?s)a Int4PreshuffledTensor of torchao.*try: Int8Tensor, Float8Tensor"):
        from_torchao("Int4PreshuffledTensor", {}, {})
    with pytest.raises(InputError, match="a Int8Tensor without scale\n  try: all tensors"):
        from_torchao("Int8Tensor", {"qdata": codes}, {})
    with pytest.raises(UnsupportedError, match="act_pre_scale, which scales activations"):
        from_torchao("Int8Tensor", {"qdata": codes, "scale": scale, "act_pre_scale": scale}, {})
    data = {"qdata": codes, "scale": scale, "zero_point": codes[:, :1]}
    with pytest.raises(UnsupportedError, match="codes of int12\n  try: int1 to int8"):
        from_torchao("IntxUnpackedToInt8Tensor", data, {"target_dtype": "int12", "block_size": [1, 64]})
    with pytest.raises(UnsupportedError, match=r"with blocks of \[2, 64\]"):
        from_torchao("IntxUnpackedToInt8Tensor", data, {"target_dtype": "int4", "block_size": [2, 64]})
    with pytest.raises(TypeMismatchError, match=r"swizzled scales \[6\] for \[6, 4\]\n  try: whole tiles"):
        facts = {"block_size": 32, "is_swizzled_scales": True}
        from_torchao("NVFP4Tensor", {"qdata": codes.view(torch.uint8), "scale": scale[:, 0].to(torch.float8_e4m3fn)}, facts)
    with pytest.raises(TypeMismatchError, match=r"a MXTensor of \[6, 64\] with blocks of None"):
        from_torchao("MXTensor", {"qdata": codes, "scale": scale}, {})


def test_a_file_of_torchao_is_read_without_it(tmp_path):
    """Names and header as `flatten_tensor_state_dict` of torchao 0.18 writes them."""
    codes, scale, bias = ints(-128, 128, 6, 64), floats(6, 1), floats(6)
    said = {"block_size": [1, 64], "dtype": {"_type": "torch.dtype", "_data": "float32"}, "act_quant_kwargs": None}
    header = {"up.weight": json.dumps({"_type": "Int8Tensor", "_data": said, "_tensor_data_names": ["qdata", "scale"]})}
    path = tmp_path / "model.safetensors"
    tensors = {"up._weight_qdata": codes, "up._weight_scale": scale, "up.bias": bias}
    save_file(tensors, path, metadata=header)
    checkpoint = tilewright.read_checkpoint(path)
    assert checkpoint.layers == {"up": "torchao"} and not checkpoint.quantizes_activations("up")
    assert torch.equal(checkpoint.weight("up").dequantize(), codes * scale) and torch.equal(checkpoint.bias("up"), bias)
    save_file(tensors, path)
    with pytest.raises(InputError, match=r"a header that says nothing of torchao's tensor.*\(up\)"):
        tilewright.read_checkpoint(path).weight("up")


def configurations():
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
    from torchao.quantization.granularity import PerAxis, PerGroup

    q = quantization
    return {
        "int8": q.Int8WeightOnlyConfig(),
        "int8 groups": q.Int8WeightOnlyConfig(granularity=PerGroup(32)),
        "int8 both": q.Int8DynamicActivationInt8WeightConfig(),
        "float8": q.Float8WeightOnlyConfig(),
        "int4": q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "int4 asymmetric": q.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=q.MappingType.ASYMMETRIC
        ),
        "int3": q.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerAxis(0)),
        "nvfp4": NVFP4WeightOnlyConfig(),
        "nvfp4 without factor": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
        "mxfp8": MXDynamicActivationMXWeightConfig(),
    }


def test_its_own_tensors_and_files_are_dequantised_as_it_does(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    warnings.simplefilter("ignore")
    for i, (name, config) in enumerate(configurations().items()):
        layer = torch.nn.Sequential(torch.nn.Linear(192, 144, dtype=torch.bfloat16))
        torchao.quantize_(layer, config)
        held = layer[0].weight
        kind, data, facts = parts_of(held)
        assert is_torchao(held) and quantizes_activations(facts) == (name == "int8 both"), name
        weight = from_torchao(kind, data, facts)
        assert torch.equal(weight.dequantize(torch.bfloat16), held.dequantize()), name
        tensors, header = flatten_tensor_state_dict({k: v.detach() for k, v in layer.state_dict().items()})
        path = tmp_path / f"{i}.safetensors"
        save_file(tensors, path, metadata=header)
        checkpoint = tilewright.read_checkpoint(path)
        again = checkpoint.weight("0")
        assert torch.equal(again.dequantize(torch.bfloat16), held.dequantize()), name
        assert checkpoint.quantizes_activations("0") == (name == "int8 both"), name
