"""Makes the files beside it: layers of a small model as other tools write them, and what those tools say that they are.

Run with compressed-tensors 0.20 installed (`pip install compressed-tensors`), in this folder. For each format there is a
file of tensors, <format>.safetensors, and an entry of golden.json: the configuration that the tool writes into config.json, the
SHA-256 of each weight's bytes as the tool dequantises it, with its type.
"""

import hashlib
import json
from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from safetensors.torch import save_file

SHAPES = {"model.up": (40, 96), "model.down": (24, 64)}
BLOCKED = {"model.up": (160, 192)}  # the last blocks are cut
TOKEN = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)
FLOAT_TOKEN = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
# What each is called here, its compressor, its weights, and its activations.
ROW, TENSOR, BLOCK = {"strategy": "channel"}, {"strategy": "tensor"}, {"strategy": "block", "block_structure": [128, 128]}
FP8, FP4, INT8 = ({"num_bits": bits, "type": kind} for bits, kind in ((8, "float"), (4, "float"), (8, "int")))
FORMATS = {
    "fp8_row": ("float-quantized", FP8 | ROW, FLOAT_TOKEN),
    "fp8_tensor": ("float-quantized", FP8 | TENSOR, None),
    "fp8_block": ("float-quantized", FP8 | BLOCK, None),
    "int8_row": ("int-quantized", INT8 | ROW, TOKEN),
    "int8_zeros": ("int-quantized", INT8 | {"strategy": "group", "group_size": 32, "symmetric": False}, None),
    "mxfp4": ("mxfp4-pack-quantized", FP4 | {"strategy": "group", "group_size": 32}, None),
    "mxfp8": ("mxfp8-quantized", FP8 | {"strategy": "group", "group_size": 32}, None),
    "nvfp4": ("nvfp4-pack-quantized", FP4 | {"strategy": "tensor_group", "group_size": 16}, None),
    "int4_packed": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
}


def scales(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Scales of a weight by its largest magnitudes, and zero points, as the tool's observers give them."""
    largest = {("float", 8): 448.0, ("float", 4): 6.0, ("int", 8): 127.0, ("int", 4): 7.0}[args.type, args.num_bits]
    out, count = weight.shape
    if args.strategy == "tensor":
        amax = weight.abs().max().reshape(1)
    elif args.strategy == "channel":
        amax = weight.abs().amax(1, keepdim=True)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -count % columns, 0, -out % rows))
        amax = padded.reshape(-(-out // rows), rows, -(-count // columns), columns).abs().amax((1, 3))
    else:
        amax = weight.reshape(out, -1, args.group_size).abs().amax(2)
    if args.strategy == "tensor_group":
        whole = (448 * 6 / weight.abs().max()).float().reshape(1)
        return {"weight_scale": (amax.float() / 6 * whole).to(torch.float8_e4m3fn).float(), "weight_global_scale": whole}
    found = {"weight_scale": (amax.float() / largest).bfloat16()}
    if not args.symmetric:
        found["weight_zero_point"] = torch.randint(-20, 20, found["weight_scale"].shape, dtype=torch.int8)
    return found


def main() -> None:
    torch.manual_seed(0)
    golden = {}
    for name, (kind, given, activations) in FORMATS.items():
        args = QuantizationArgs(**{"symmetric": True, **given})
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
        compressor = BaseCompressor.get_value_from_registry(kind)
        tensors, digests, kinds = {}, {}, {}
        for layer, shape in (BLOCKED if args.block_structure else SHAPES).items():
            weight = (torch.randn(shape) * torch.rand(shape[0], 1)).bfloat16()
            kept = compressor.compress({"weight": weight, **scales(weight, args)}, scheme)
            tensors.update({f"{layer}.{part}": t.detach().contiguous().clone() for part, t in kept.items()})
            dense = compressor.decompress(kept, scheme)["weight"]
            digests[layer] = hashlib.sha256(dense.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            kinds[layer] = str(dense.dtype).removeprefix("torch.")
        save_file(tensors, f"{name}.safetensors")
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=kind)
        golden[name] = {"quantization_config": json.loads(config.model_dump_json()), "sha256": digests, "types": kinds}
    Path("golden.json").write_text(json.dumps(golden, indent=1))


if __name__ == "__main__":
    main()
