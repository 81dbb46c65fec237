"""Peers of generated GPU kernels, for benchmarks/gpu.py: cuBLASLt through torch, XLA through jax, Inductor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from tilewright.ir.graph import toposort
from tilewright.ir.ops import Map
from tilewright.schedule.problem import Problem

Run = Callable[[], object]


def products(problem: Problem, sources: Sequence[torch.Tensor]) -> dict[str, Run]:
    """The library's calls that come nearest to a product of plain operands, by name.

    Those of s8 leave sums in s32: quantising or scaling them would be another kernel, which is not counted.
    """
    left, right = problem.lhs, problem.rhs
    assert left.source is not None and right.source is not None
    a, b = sources[left.source], sources[right.source]
    a, b = a.mT if left.transposed else a, b.mT if right.transposed else b
    sides = [t for i, t in enumerate(sources) if i not in (left.source, right.source)]
    functions = {n.op.fn for n in toposort(problem.op.stores) if isinstance(n.op, Map)}
    if a.dtype == torch.int8:
        if a.dim() == 2:
            return {"cuBLASLt, s32 out": lambda: torch.ops.aten._int_mm(a, b)}
        return {"cuBLASLt, s32 out, one by one": lambda: [torch.ops.aten._int_mm(x, y) for x, y in zip(a, b, strict=True)]}
    if a.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=a.device)
        by_row = len(sides) == 2
        scales = (sides[0].reshape(-1, 1), sides[1].reshape(1, -1)) if by_row else (one, one)
        return {
            f"cuBLASLt, {'fast' if fast else 'exact'} sums": lambda fast=fast: torch.ops.aten._scaled_mm(
                a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            for fast in ((True, False) if not by_row else (True,))
        }
    if "gelu_tanh" in functions and len(sides) == 1:
        return {"cuBLASLt, fused": lambda: torch.ops.aten._addmm_activation(sides[0], a, b, use_gelu=True)}
    if len(sides) == 1:
        return {"cuBLASLt": lambda: torch.addmm(sides[0], a, b)}
    return {"cuBLASLt": lambda: torch.matmul(a, b)}


def inductor(problem: Problem, sources: Sequence[torch.Tensor]) -> dict[str, Run]:
    """torch.compile with max-autotune of the whole problem, epilogue and all."""
    from tilewright.ir.evaluate import evaluate_nodes
    from tilewright.ir.ops import Param

    params = {n.op.index: n for n in toposort(problem.node.src) if isinstance(n.op, Param)}

    def whole(*given: torch.Tensor) -> object:
        return evaluate_nodes((problem.node,), {params[i]: t for i, t in enumerate(given)})

    compiled = torch.compile(whole, mode="max-autotune-no-cudagraphs")
    return {"Inductor": lambda: compiled(*sources)}


def xla_us(a: torch.Tensor, b: torch.Tensor, calls: int = 50) -> float:
    """Microseconds of XLA's better spelling of a batched s8 product with narrow results: s32 sums, converted.

    Of `calls` started one after the other, whose launches the device does not wait for; the best of ten such rows.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.pop("JAX_PLATFORMS", None)
    import jax
    import jax.numpy as jnp

    @jax.jit
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("bik,bjk->bij", x, y, preferred_element_type=jnp.int32).astype(jnp.int8)

    x, y = (jax.device_put(t.cpu().numpy()) for t in (a, b))
    product(x, y).block_until_ready()
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        results = [product(x, y) for _ in range(calls)]
        results[-1].block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best * 1e6 / calls
