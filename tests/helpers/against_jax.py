"""Comparing a program read from HLO or StableHLO text with what XLA computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from tilewright.dtype import DType, from_numpy
from tilewright.frontends import load
from tilewright.frontends.stablehlo.module import mlir_type
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.ops import Call, Gemm
from tilewright.ir.types import TensorType

_BITS = {1: np.uint8, 2: np.int16}
# Smallest normal numbers of the types that processors flush below; f16 is computed in f32, where its subnormals are normal.
_TINY = {
    "bf16": float(np.finfo(np.float32).tiny),
    "f32": float(np.finfo(np.float32).tiny),
    "f64": float(np.finfo(np.float64).tiny),
}


def to_torch(value: Any) -> torch.Tensor:
    """An array as the tensor that carries it during evaluation."""
    array = np.array(value)
    logical = from_numpy(array.dtype)
    if logical.bits == 4 and logical.is_float:
        return torch.from_numpy(array.astype(np.float32)).to(logical.to_torch())
    if logical.bits == 4:
        return torch.from_numpy(array.astype(np.int8 if logical.kind == "int" else np.uint8))
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_BITS[array.itemsize])).view(logical.to_torch())


def text(kind: str, f: Callable[..., Any], *args: Any) -> str:
    """A function's program as JAX writes it: StableHLO, the same with names, HLO, or HLO as XLA's CPU compiler leaves it."""
    lowered = jax.jit(f, keep_unused=True).lower(*args)
    if kind == "optimised":
        return lowered.compile().as_text()
    return lowered.as_text(dialect="hlo") if kind == "hlo" else lowered.as_text(debug_info=kind == "named")


def xla(module: str, *args: np.ndarray) -> list[np.ndarray]:
    """Run StableHLO text as XLA's CPU compiler compiles it."""
    from jaxlib import xla_client

    devices = jax.devices("cpu")[:1]
    compiled = devices[0].client.compile_and_load(module, xla_client.DeviceList(tuple(devices)), xla_client.CompileOptions())
    with jax.enable_x64(True):
        return [np.asarray(o) for o in compiled.execute([jax.device_put(a, devices[0]) for a in args])]


def run(graph: Graph, *args: Any) -> list[torch.Tensor]:
    """The graph's results for arrays given in order."""
    return evaluate(graph, [to_torch(a) for a in args])


def close(given: torch.Tensor, wanted: np.ndarray, *, ulps: float = 0.0, depth: float = 0.0, what: str = "") -> None:
    """Equal shapes and integers; floats within `ulps` rounding steps of their own value and `depth` of the largest one."""
    logical = from_numpy(wanted.dtype)
    assert tuple(given.shape) == wanted.shape, what
    assert given.dtype == logical.to_torch(), what
    if not logical.is_float:
        other = to_torch(wanted)
        if given.dtype == torch.uint64:
            given, other = given.view(torch.int64), other.view(torch.int64)
        assert torch.equal(given, other), f"{what}: {given.flatten()[:8]} read, {other.flatten()[:8]} by XLA"
        return
    a, b = given.to(torch.float64).numpy(), wanted.astype(np.float64)
    finite = np.abs(b[np.isfinite(b)])
    with np.errstate(invalid="ignore"):
        bound = logical.epsilon * (ulps * np.abs(b) + depth * finite.max(initial=0.0))
        good = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= bound)
        # XLA's CPU code flushes subnormal numbers to zero in some kernels and not in others; ours never do.
        tiny = _TINY.get(logical.name, 0.0)
        good |= (np.abs(a) < tiny) & (b == 0)
    assert good.all(), f"{what}: {a[~good][:5]} read, {b[~good][:5]} by XLA"


def agree(f: Callable[..., Any], *args: Any, kinds: Sequence[str] = ("stablehlo",), **bounds: float) -> dict[str, Graph]:
    """Read every kind of text of `f` and compare its results with JAX's; the graphs."""
    wanted = [np.asarray(o) for o in jax.tree.leaves(jax.jit(f)(*args))]
    graphs: dict[str, Graph] = {}
    for kind in kinds:
        graphs[kind] = load(text(kind, f, *args))
        results = run(graphs[kind], *jax.tree.leaves(args))
        assert len(results) == len(wanted)
        for i, (got, want) in enumerate(zip(results, wanted, strict=True)):
            close(got, want, what=f"{kind} result {i}", **bounds)
    return graphs


def normal(dtype: DType, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Ordinary values: a normal distribution for a float, the whole range for an integer."""
    if dtype.is_float:
        return np.random.default_rng(seed).standard_normal(shape).astype(dtype.to_numpy())
    return sample(dtype, shape, seed)


def sample(dtype: DType, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Values of any type over its whole range, its corner cases first."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    target = dtype.to_numpy()
    if dtype.kind == "pred":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.is_integer:
        low, high = int(dtype.min), int(dtype.max)
        wide = np.uint64 if dtype.name == "u64" else np.int64
        values = rng.integers(low, high, count, endpoint=True, dtype=wide)
        values[count // 2 :] = rng.integers(max(low, -8), min(high, 9), count - count // 2)
        corners = [low, high, 0, 1, low + 1, high - 1, 2, *([-1, -2] if low < 0 else [])][:count]
        values[: len(corners)] = np.array(corners, dtype=wide)
        return values.astype(target).reshape(shape)
    values = rng.standard_normal(count) * 3
    corners = [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, 2.5, -2.5, 300, -300, 1e5, -1e5, 240, 448, 464, 465]
    values[: len(corners)] = corners[:count]
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(target).reshape(shape)


def program(body: str, arguments: dict[str, TensorType], results: dict[str, TensorType]) -> str:
    """A StableHLO module whose main takes these arguments, runs the body and returns these values."""
    takes = ", ".join(f"%{n}: {mlir_type(t)}" for n, t in arguments.items())
    gives = ", ".join(mlir_type(t) for t in results.values())
    values = ", ".join(f"%{n}" for n in results)
    return f"func.func @main({takes}) -> ({gives}) {{\n{body}\nreturn {values} : {gives}\n}}\n"


def gemms(graph: Graph) -> list[Gemm]:
    return [n.op for n in graph.nodes() if isinstance(n.op, Gemm)]


def calls(graph: Graph) -> list[Call]:
    return [n.op for n in graph.nodes() if isinstance(n.op, Call)]
