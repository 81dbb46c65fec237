"""Write the mixed-input problem as ONNX: 4-bit weights times f16 activations (NVIDIA/cutlass, issue 1549).

    python examples/mixed_input.py --out models --check

The thread's m=3584 n=16 k=8192 with groups of 64 names the weight's rows first. As rows times columns it is

    f16[16,8192] @ s4[3584,8192]^T group=64 -> f16[16,3584]

sixteen tokens through one linear layer. Two files say it in the two ways that tools write it, with the same codes and
scales:

    matmulnbits        com.microsoft MatMulNBits: the weight as u4[N, K/64, 64], stored off by 8, two codes to a byte
    dequantizelinear   DequantizeLinear of s4[K, N] in blocks of 64 along K (opset 21), then MatMul; taken at its word
                       it rounds each dequantised weight to f16, which the other form leaves open
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from model_files import read_parameters, require, reuse_or_write, run_model, source_digest
from tilewright.errors import InputError, TilewrightError

Array = np.ndarray[Any, Any]
OPSET = 21
IR_VERSION = 10
SOURCES = tuple(Path(__file__).with_name(f"{name}.py") for name in ("mixed_input", "model_files"))


def write_mixed_input(
    form: str,
    out_dir: str | Path,
    *,
    M: int = 16,
    N: int = 3584,
    K: int = 8192,
    group_size: int = 64,
    seed: int = 0,
) -> Path:
    """Write one form of the problem unless it is there already, and return its path.

    The model takes `activations` f16[M, K] and gives `result` f16[M, N].

    Args:
        form: a key of `FORMS`.
        out_dir: made if missing; each model gets a folder in it.
        M, N, K: tokens, outputs and inputs of the layer.
        group_size: how many weights along K share a scale; a power of two from 16 up that divides K.
        seed: of the weights and scales.

    Raises:
        InputError: an unknown form, or sizes that do not fit together.
        MissingDependencyError: onnx is not installed.
    """
    if form not in FORMS:
        raise InputError(f"unknown form {form!r}", hint=f"one of {', '.join(FORMS)}")
    if min(M, N, K) < 1 or seed < 0:
        raise InputError(f"M, N, K and seed are {M}, {N}, {K} and {seed}", hint="extents from 1 up, a seed from 0 up")
    if group_size < 16 or group_size & (group_size - 1) or K % group_size:
        raise InputError(f"groups of {group_size} along K = {K}", hint="a power of two from 16 up that divides K")
    onnx = require("onnx")
    sizes = {"M": M, "N": N, "K": K, "group_size": group_size, "seed": seed}
    parameters = {"form": form, **sizes, "versions": {"onnx": onnx.__version__}, "source": source_digest(SOURCES)}
    name = f"mixed-input-{form}"
    path = Path(out_dir) / f"{name}-m{M}-n{N}-k{K}-g{group_size}-seed{seed}" / f"{name}.onnx"

    def build(_: Path) -> Any:
        nodes, tensors = FORMS[form](*random_weight(N, K, group_size, seed))
        half = onnx.TensorProto.FLOAT16
        graph = onnx.helper.make_graph(
            nodes,
            name,
            [onnx.helper.make_tensor_value_info("activations", half, [M, K])],
            [onnx.helper.make_tensor_value_info("result", half, [M, N])],
            [onnx.numpy_helper.from_array(values, key) for key, values in tensors.items()],
        )
        domains = {node.domain for node in nodes}
        imports = [onnx.helper.make_opsetid(domain, 1 if domain else OPSET) for domain in sorted(domains | {""})]
        return onnx.helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="tilewright")

    return reuse_or_write(path, parameters, build)


def random_weight(N: int, K: int, group_size: int, seed: int) -> tuple[Array, Array]:
    """Codes s8[N, K], uniform over -8 ... 7, and scales f16[N, K / group_size], such that results are of order one."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-8, 8, (N, K), np.int8)
    spread = float(np.arange(-8, 8).std()) * np.sqrt(K)
    scales = generator.uniform(0.5, 1.5, (N, K // group_size)) / spread
    return codes, scales.astype(np.float16)


def random_activations(path: str | Path, seed: int = 1000) -> Array:
    """Activations f16[M, K] for a written model, normally distributed."""
    made = read_parameters(Path(path))
    return np.random.default_rng(seed).standard_normal((made["M"], made["K"])).astype(np.float16)


def expected_result(path: str | Path, activations: Array) -> Array:
    """The exact product, in f64, of `activations` and the weight that a written model stands for."""
    made = read_parameters(Path(path))
    codes, scales = random_weight(made["N"], made["K"], made["group_size"], made["seed"])
    weight = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), made["group_size"], axis=1)
    return activations.astype(np.float64) @ weight.T


def _matmul_nbits(codes: Array, scales: Array) -> tuple[list[Any], dict[str, Array]]:
    N, K = codes.shape
    groups = scales.shape[1]
    unsigned = (codes + 8).astype(np.uint8).reshape(N, groups, K // groups)
    packed = unsigned[..., 0::2] | (unsigned[..., 1::2] << 4)
    node = require("onnx").helper.make_node(
        "MatMulNBits",
        ["activations", "weight_codes", "weight_scales"],
        ["result"],
        domain="com.microsoft",
        K=K,
        N=N,
        bits=4,
        block_size=K // groups,
    )
    return [node], {"weight_codes": packed, "weight_scales": scales.reshape(-1)}


def _dequantize_linear(codes: Array, scales: Array) -> tuple[list[Any], dict[str, Array]]:
    make_node = require("onnx").helper.make_node
    block_size = codes.shape[1] // scales.shape[1]
    nodes = [
        make_node("DequantizeLinear", ["weight_codes", "weight_scales"], ["weight"], axis=0, block_size=block_size),
        make_node("MatMul", ["activations", "weight"], ["result"]),
    ]
    return nodes, {"weight_codes": codes.T.astype(ml_dtypes.int4), "weight_scales": np.ascontiguousarray(scales.T)}


FORMS: dict[str, Callable[[Array, Array], tuple[list[Any], dict[str, Array]]]] = {
    "matmulnbits": _matmul_nbits,
    "dequantizelinear": _dequantize_linear,
}


def relative_error(path: str | Path) -> float:
    """|onnxruntime's result - exact| / |exact| (Frobenius) on random activations.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
    """
    activations = random_activations(path)
    got, want = run_model(path, {"activations": activations}), expected_result(path, activations)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@click.command(help="Write the 4-bit weights x f16 activations problem as two ONNX files.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("models"), show_default=True)
@click.option("--check", is_flag=True, help="Run each file with onnxruntime and print its error against the exact product.")
def main(out: Path, check: bool) -> None:
    """Write both forms and print one line for each."""
    try:
        for form in FORMS:
            path = write_mixed_input(form, out)
            line = f"{path}  {path.stat().st_size / 1e6:.1f} MB"
            click.echo(f"{line}  relative error {relative_error(path):.1e}" if check else line)
    except (TilewrightError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
