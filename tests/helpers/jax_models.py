"""Programs in JAX for the front ends to read: what a user would lower, not a list of operators."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any


def mlp(params: list[tuple[Array, Array]], x: Array) -> Array:
    """Dense layers with tanh-gelu between them, and a softmax."""
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = params[-1]
    return jax.nn.softmax(x @ w + b)


def mlp_inputs(dims: tuple[int, ...] = (32, 61, 64, 10), rows: int = 7) -> tuple[list[tuple[Array, Array]], Array]:
    rng = np.random.default_rng(1)
    params = [(_weight(rng, i, o), _weight(rng, o)) for i, o in pairwise(dims)]
    return params, _weight(rng, rows, dims[0]) * 10


def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain + bias


def transformer_block(p: dict[str, Any], x: Array, *, exact: bool, heads: int = 4) -> Array:
    """Pre-norm attention with a causal mask, then a gelu (exact or by tanh) network, each around a residual."""
    batch, tokens, width = x.shape
    y = layer_norm(x, *p["norm1"])
    qkv = (y @ p["qkv"] + p["qkv_bias"]).reshape(batch, tokens, 3, heads, width // heads)
    q, k, v = (qkv[:, :, i] for i in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(batch, tokens, width)
    x = x + mixed @ p["out"] + p["out_bias"]
    y = jax.nn.gelu(layer_norm(x, *p["norm2"]) @ p["up"] + p["up_bias"], approximate=not exact)
    return x + y @ p["down"] + p["down_bias"]


def block_inputs(width: int = 32, batch: int = 2, tokens: int = 9) -> tuple[dict[str, Any], Array]:
    rng = np.random.default_rng(0)
    norm = (1 + _weight(rng, width), _weight(rng, width))
    weights = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params: dict[str, Any] = {"norm1": norm, "norm2": norm}
    for name, shape in weights.items():
        params[name], params[f"{name}_bias"] = _weight(rng, *shape), _weight(rng, shape[-1])
    return params, _weight(rng, batch, tokens, width) * 10


def quantised_dot(x: Array, w: Array, x_scale: Array, w_scale: Array) -> Array:
    """Activations quantised on the way in, s8 by s8 to s32, scaled per column on the way out."""
    codes = jnp.clip(jnp.round(x / x_scale), -128, 127).astype(jnp.int8)
    acc = lax.dot_general(codes, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return acc.astype(jnp.float32) * x_scale * w_scale


def quantised_inputs() -> tuple[Array, ...]:
    rng = np.random.default_rng(2)
    codes = rng.integers(-128, 128, (67, 48), dtype=np.int8)
    return _weight(rng, 16, 67) * 30, codes, np.float32(0.05), abs(_weight(rng, 48))


def _weight(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * 0.1).astype(np.float32)


def quantised_mlp(seed: int = 0, width: int = 64, inner: int = 160) -> Any:
    """An MLP of s8 codes: activations are quantised per row as it runs, weights per column before."""
    keys = jax.random.split(jax.random.key(seed), 4)
    first, second = (
        jax.random.randint(k, s, -128, 128).astype(jnp.int8)
        for k, s in zip(keys, ((width, inner), (inner, width)), strict=False)
    )
    scales = [jnp.abs(jax.random.normal(k, (n,))) / 500 for k, n in zip(keys[2:], (inner, width), strict=True)]

    def dense(x: Array, weight: Array, scale: Array) -> Array:
        step = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        quantised = jnp.clip(jnp.round(x / step), -128, 127).astype(jnp.int8)
        return jnp.matmul(quantised, weight, preferred_element_type=jnp.int32).astype(jnp.float32) * step * scale

    return lambda x: dense(jax.nn.gelu(dense(x, first, scales[0])), second, scales[1])
