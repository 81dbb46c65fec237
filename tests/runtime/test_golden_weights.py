"""Layers that other tools wrote (golden/make_golden.py) are, dequantised, bit for bit what those tools say, and multiply so."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import tilewright

GOLDEN = Path(__file__).parent / "golden"
TOLD = json.loads((GOLDEN / "golden.json").read_text())
KINDS = {
    "fp8_row": ("fp8", "f8", True),
    "fp8_tensor": ("fp8", "f8", False),
    "fp8_block": ("fp8", "f8g128", False),
    "int8_row": ("int8", "w8", True),
    "int8_zeros": ("int8", "w8g32z", False),
    "mxfp4": ("fp4", "f4g32", False),
    "mxfp8": ("fp8", "f8g32", False),
    "nvfp4": ("fp4", "f4g16", False),
    "int4_packed": ("compressed-tensors", "w4g32", False),
}


def checkpoint(name: str, folder: Path):
    (folder / "config.json").write_text(json.dumps({"quantization_config": TOLD[name]["quantization_config"]}))
    (folder / "model.safetensors").symlink_to(GOLDEN / f"{name}.safetensors")
    return tilewright.read_checkpoint(folder)


def in_codes(x, code_type):
    """x as 8-bit codes with a scale a row stand for it."""
    amax = x.float().abs().amax(1, keepdim=True)
    if code_type == "s8":
        return (torch.round(x.float() / (amax / 127)) * (amax / 127)).double()
    return (x.float() / (amax / 448)).to(torch.float8_e4m3fn).double() * (amax / 448).double()


def test_every_file_is_looked_at():
    assert set(KINDS) == set(TOLD) == {p.stem for p in GOLDEN.glob("*.safetensors")}


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_dequantised_to_the_bits_of_the_tool_that_made_them(name, tmp_path):
    read, told = checkpoint(name, tmp_path), TOLD[name]
    kind, scheme, activations = KINDS[name]
    assert read.layers == dict.fromkeys(told["sha256"], kind) and read.plain == []
    for layer, digest in told["sha256"].items():
        weight = read.weight(layer)
        dense = weight.dequantize(getattr(torch, told["types"][layer]))
        assert hashlib.sha256(dense.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() == digest
        assert weight.scheme == scheme
        assert read.quantizes_activations(layer) == activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_such_layers_gives_the_dequantised_one_s_results(name, dtype, tmp_path):
    read = checkpoint(name, tmp_path)
    for at, layer in enumerate(read.layers):
        dense = read.weight(layer).dequantize(dtype)
        linear = torch.nn.Linear(*dense.t().shape)
        model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({layer.partition(".")[2]: linear})})
        model.to(dtype).requires_grad_(False)
        report = tilewright.quantize_(model, read, filter=lambda n, m, layer=layer: n == layer)
        assert list(report.layers) == [layer]
        made = model.get_submodule(layer)
        assert made.weight.dtype == dtype
        made.bias = None
        for rows in (1, 5):
            x = torch.randn(rows, dense.shape[1], generator=torch.Generator().manual_seed(at + rows)).to(dtype)
            taken = in_codes(x, made.code_type) if KINDS[name][2] else x.double()
            wanted = taken @ dense.double().t()
            error = (made(x).double() - wanted).abs().max() / wanted.abs().max()
            assert error < {torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype], float(error)
