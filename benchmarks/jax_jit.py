"""Functions inside `jax.jit`: compiled by `tilewright.jax.jit` and called back by XLA, beside XLA's own code for them.

    python benchmarks/jax_jit.py [--platform cpu] [--rounds 9] [--budget 10]

Rows are the product of openxla/xla #7117 in both its spellings (16 x 1024^3, s8 to s8), an MLP of s8 codes whose activations
are quantised per row as it runs, and an MLP in bf16. Each call waits for its result; calls of both take turns; a row gives
medians in µs and the ratio, after the results were compared.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import click


def functions(rows: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The functions of JAX that race, by name, each with random arguments."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), 32))

    def codes(*shape: int) -> Any:
        return jax.random.randint(next(keys), shape, -128, 128).astype(jnp.int8)

    def normal(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.random.normal(next(keys), shape).astype(dtype)

    def product(kind: Any) -> Callable[..., Any]:
        return lambda a, b: jnp.einsum("bij,bkj->bik", a, b, preferred_element_type=kind).astype(jnp.int8)

    widths = ((768, 3072), (3072, 768))
    coded = [(codes(*w), jnp.abs(normal(w[1])) / 500) for w in widths]
    floats = [normal(*w, dtype=jnp.bfloat16) / 32 for w in widths]

    def dense(x: Any, weight: Any, scale: Any) -> Any:
        step = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        quantised = jnp.clip(jnp.round(x / step), -128, 127).astype(jnp.int8)
        return jnp.matmul(quantised, weight, preferred_element_type=jnp.int32).astype(jnp.float32) * step * scale

    a, b = codes(16, 1024, 1024), codes(16, 1024, 1024)
    return {
        "#7117, s8": (product(jnp.int8), (a, b)),
        "#7117, s32 + convert": (product(jnp.int32), (a, b)),
        f"s8 MLP, {rows} rows": (lambda x: dense(jax.nn.gelu(dense(x, *coded[0])), *coded[1]), (normal(rows, 768),)),
        f"bf16 MLP, {rows} rows": (
            lambda x: jax.nn.gelu(x @ floats[0]) @ floats[1],
            (normal(rows, 768, dtype=jnp.bfloat16),),
        ),
    }


def median_us(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """The median time of a call of each, in turns of a fifth of a second."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seen in zip(calls, times, strict=True):
            ends = time.perf_counter() + 0.2
            while time.perf_counter() < ends:
                start = time.perf_counter()
                call().block_until_ready()
                seen.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(seen) for seen in times]


@click.command()
@click.option("--platform", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--rows", default=128, show_default=True, help="Of the MLPs.")
@click.option("--budget", default=10.0, show_default=True, help="Seconds for each program.")
def main(platform: str, rounds: int, rows: int, budget: float) -> None:
    """Race functions inside `jax.jit`; exit 1 if results differ."""
    os.environ["JAX_PLATFORMS"] = platform
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    from tilewright.jax import jit

    print(f"{'':24s} {'Tilewright µs':>14s} {'XLA µs':>12s} {'ratio':>8s}")
    equal = True
    for name, (function, given) in functions(rows).items():
        ours, theirs = jax.jit(jit(function, budget_s=budget, platform=platform)), jax.jit(function)
        a, b = (f(*given).astype(jnp.float32) for f in (ours, theirs))
        bound = 0 if name.startswith("#") else 2e-2 * float(jnp.abs(b).max())
        same = float(jnp.abs(a - b).max()) <= bound
        equal &= same
        times = median_us([lambda f=f, given=given: f(*given) for f in (ours, theirs)], rounds)
        print(
            f"{name:24s} {times[0]:14.1f} {times[1]:12.1f} {times[1] / times[0]:7.2f}x {'' if same else 'DIFFERENT'}",
            flush=True,
        )
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
