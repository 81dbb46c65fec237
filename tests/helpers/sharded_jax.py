"""JAX programs with shardings on eight devices of the host, in a process of their own: texts, inputs and results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MESH = "dp=2,tp=4"


def cases() -> dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], str]], list[Any]]]:
    """Functions with shapes and dtypes of their inputs, and the shardings of these."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    both, rows, columns = P("dp", "tp"), P("dp", None), P(None, "tp")

    def held(x: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def attention(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = ((x @ w).reshape(b, s, 8, 4).transpose(0, 2, 1, 3) for w in (wq, wk, wv))
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), q @ k.swapaxes(-1, -2) / 2.0, -1e9)
        return (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(b, s, 32) @ wo + x

    def mapped(f: Any, given: Any, left: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=left, check_vma=False)

    x, f32 = (8, 16), "float32"
    one = [(x, f32)]
    w = [(x, f32), ((16, 32), f32), ((32, 16), f32)]
    qkv = [((4, 6, 16), f32), *[((16, 32), f32)] * 3, ((32, 16), f32)]
    found: dict[str, Any] = {
        "mlp": (lambda x, w, v: jnp.tanh(x @ w) @ v, w, [rows, columns, P("tp", None)]),
        "rows of all": (lambda x, w, v: held(jax.nn.gelu(x @ w) @ v, ("dp", "tp"), None), w, [rows, columns, P("tp", None)]),
        "weights by rows": (lambda x, w, v: jax.nn.relu(x @ w) @ v, w, [rows, P("tp", None), P(None, "tp")]),
        "s8": (
            lambda x, w: lax.dot(x, w, preferred_element_type=jnp.int32),
            [((8, 16), "int8"), ((16, 32), "int8")],
            [P("dp", "tp"), P("tp", None)],
        ),
        "bf16": (lambda x, w: x @ w, [((8, 16), "bfloat16"), ((16, 32), "bfloat16")], [rows, columns]),
        "attention": (attention, qkv, [P("dp"), columns, columns, columns, P("tp", None)]),
        "norm": (lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5), one, [both]),
        "softmax": (lambda x: jax.nn.softmax(x, 0), one, [both]),
        "constant": (lambda x: x + jnp.arange(128.0).reshape(8, 16), one, [both]),
        "constraint": (lambda x: held(jnp.exp(held(x, "tp", None)), None, ("dp", "tp")), one, [both]),
        "transpose": (lambda x: x.T.reshape(4, 4, 8) * 2, one, [both]),
        "merge": (lambda x: (x.reshape(128) + 1).reshape(16, 8), one, [both]),
        "pad": (lambda x: jnp.pad(x, ((1, 3), (2, 2))), one, [both]),
        "concatenate": (lambda x: jnp.concatenate([x, x * 2], 0), one, [both]),
        "slice": (lambda x: x[1:7, 3:11], one, [both]),
        "strided": (lambda x: x[::2, ::4] + 1, one, [both]),
        "reverse": (lambda x: x[::-1], one, [both]),
        "sort": (lambda x: jnp.sort(x, 1), one, [both]),
        "argmax": (lambda x: jnp.argmax(x, 1), one, [both]),
        "cumsum": (lambda x: jnp.cumsum(x, 1), one, [both]),
        "reduce": (lambda x: (x.sum(), x.max(0), x.min(1), jnp.prod(x, 1)), one, [both]),
        "iota": (lambda x: x * lax.broadcasted_iota(jnp.float32, x.shape, 1), one, [both]),
        "dynamic slice": (lambda x: lax.dynamic_slice(x, (x[0, 0].astype(int), 2), (4, 8)), one, [both]),
        "update": (lambda x: lax.dynamic_update_slice(x, x[:2, :4] * 3, (3, 5)), one, [both]),
        "at": (lambda x: x.at[2, 3].add(5.0), one, [both]),
        "lookup": (lambda t, i: t[i], [((64, 16), f32), ((8,), "int32")], [columns, P("dp")]),
        "where": (lambda x: jnp.where(x > 0, x, held(x * 2, "tp", "dp")), one, [both]),
        "branch": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x * 2, x), one, [both]),
        "batched": (
            lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
            [((4, 8, 16), f32), ((4, 16, 8), f32)],
            [P("tp", "dp"), P("tp")],
        ),
        "elementwise": (lambda x: lax.erf(x) + lax.lgamma(jnp.abs(x) + 1) + lax.tan(x) + lax.square(x), one, [both]),
        "ring": (
            mapped(lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)]) + lax.axis_index("tp"), both, both),
            one,
            [P()],
        ),
        "collectives": (
            mapped(
                lambda x: (
                    lax.all_gather(x, "tp", axis=1, tiled=True),
                    lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
                    lax.all_to_all(x, "tp", split_axis=0, concat_axis=1, tiled=True),
                    lax.pmax(x, "dp"),
                    lax.pmean(x, ("dp", "tp")),
                ),
                both,
                (rows, both, P(("dp", "tp"), None), columns, P()),
            ),
            one,
            [P()],
        ),
        "partly manual": (
            jax.shard_map(
                lambda x, w: lax.psum(x @ w, "tp"),
                mesh=mesh,
                in_specs=(columns, P("tp", None)),
                out_specs=P(),
                axis_names={"tp"},
            ),
            [(x, f32), ((16, 8), f32)],
            [both, P("tp", None)],
        ),
    }
    found |= {
        "convolution": (
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME"),
            [((4, 8, 8, 8), f32), ((16, 8, 3, 3), f32)],
            [P("dp", "tp"), P(None, "tp")],
        ),
        "convolution of space": (
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME"),
            [((4, 8, 8, 8), f32), ((16, 8, 3, 3), f32)],
            [P("dp", None, "tp"), P()],
        ),
        "convolution by outputs": (
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID"),
            [((4, 8, 8, 8), f32), ((16, 8, 3, 3), f32)],
            [P("dp"), P("tp")],
        ),
        "convolution of groups": (
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=8),
            [((4, 8, 8, 8), f32), ((8, 1, 3, 3), f32)],
            [P("dp", "tp"), P("tp")],
        ),
        "cholesky": (
            lambda x: jnp.linalg.cholesky(x @ x.swapaxes(-1, -2) + 8 * jnp.eye(8)),
            [((4, 8, 8), f32)],
            [P("tp", "dp")],
        ),
        "cholesky of parts": (
            lambda x: jnp.linalg.cholesky(x @ x.swapaxes(-1, -2) + 8 * jnp.eye(8)),
            [((4, 8, 8), f32)],
            [P(None, "dp", "tp")],
        ),
        "triangular solve": (
            lambda a, b: lax.linalg.triangular_solve(jnp.tril(a) + 4 * jnp.eye(8), b, left_side=True, lower=True),
            [((8, 8), f32), ((8, 16), f32)],
            [both, both],
        ),
        "fft": (lambda x: jnp.abs(jnp.fft.rfft(x, axis=1)), one, [both]),
        "sort rows": (lambda x: jnp.sort(x, 0), one, [P(None, "tp")]),
        "argsort": (lambda x: jnp.argsort(x, 1), one, [P("tp", None)]),
        "top k": (lambda x: lax.top_k(x, 3), one, [P("tp", None)]),
        "top k of parts": (lambda x: lax.top_k(x, 3), one, [both]),
        "along an axis": (
            lambda x, i: jnp.take_along_axis(x, i, 1),
            [((8, 16), f32), ((8, 4), "int32")],
            [P("dp", None), P("dp")],
        ),
        "along a split axis": (lambda x, i: jnp.take_along_axis(x, i, 1), [((8, 16), f32), ((8, 4), "int32")], [both, P("dp")]),
        "roll": (lambda x: jnp.roll(x, 3, 1), one, [both]),
        "tile": (lambda x: jnp.tile(x, (2, 3)), one, [both]),
        "repeat": (lambda x: jnp.repeat(x, 2, 1), one, [both]),
        "concat1": (lambda x: jnp.concatenate([x, x[:, :3], x * 2], 1), one, [both]),
        "stack": (lambda x: jnp.stack([x, x + 1], 1).reshape(16, 16), one, [both]),
        "segments": (lambda x, i: jax.ops.segment_sum(x, i, 4), [((8, 16), f32), ((8,), "int32")], [P(None, "tp"), P()]),
        "segments of parts": (lambda x, i: jax.ops.segment_sum(x, i, 4), [((8, 16), f32), ((8,), "int32")], [both, P("dp")]),
        "update of rows": (lambda x: lax.dynamic_update_slice(x, x[:2] * 3, (3, 0)), one, [P(None, "tp")]),
        "rows at data": (
            lambda x, i: lax.dynamic_slice(x, (i[0], 0), (4, 16)),
            [((8, 16), f32), ((1,), "int32")],
            [P(None, "tp"), P()],
        ),
        "pool": (
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"),
            [((4, 8, 8, 8), f32)],
            [P("dp", None, "tp")],
        ),
        "pool with halo": (
            lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 3, 3), (1, 1, 1, 1), "SAME"),
            [((4, 8, 8, 8), f32)],
            [P("dp", None, "tp")],
        ),
        "gradient of a pool": (
            lambda x: jax.grad(
                lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") ** 2).sum()
            )(x),
            [((4, 8, 8, 8), f32)],
            [P("dp", None, "tp")],
        ),
        "clip": (lambda x: jnp.clip(x, -0.5, 0.5), one, [both]),
        "all": (lambda x: (x > 0).all(1), one, [both]),
        "any": (lambda x: (x > 1).any(0), one, [both]),
        "mean and variance": (lambda x: jnp.var(x, 0) + jnp.mean(x), one, [both]),
        "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), one, [both]),
        "outer": (lambda a, b: a[:, None] * b[None, :], [((8,), f32), ((16,), f32)], [P("dp"), P("tp")]),
        "matvec": (lambda a, b: a @ b, [((8, 16), f32), ((16,), f32)], [both, P("tp")]),
        "another order": (
            lambda a, b: held(a @ b, "tp", "dp"),
            [((8, 16), f32), ((16, 8), f32)],
            [P("dp", None), P(None, "tp")],
        ),
        "both axes along K": (
            lambda a, b: a @ b,
            [((8, 16), f32), ((16, 8), f32)],
            [P(None, ("dp", "tp")), P(("dp", "tp"), None)],
        ),
        "diag": (lambda a: jnp.diagonal(a @ a.T), one, [both]),
        "tri": (lambda x: jnp.tril(x), one, [both]),
        "eye": (lambda x: x @ jnp.eye(16), one, [both]),
        "scan": (lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(16), x)[1], one, [P(None, "tp")]),
        "map": (lambda x: lax.map(lambda r: jnp.tanh(r) * 2, x), one, [both]),
        "standardise": (lambda x: jax.nn.standardize(x, axis=0), one, [both]),
        "flatten": (lambda x: x.reshape(-1)[3:100], one, [both]),
        "split": (lambda x: jnp.split(x, 4, 1), one, [both]),
        "half": (lambda x: jnp.split(x, 2, 0)[1] * 2, one, [both]),
        "integers": (lambda x: (x.astype(jnp.int32) << 2) // 3, one, [both]),
        "bits of s32": (lambda x: lax.bitcast_convert_type(x, jnp.int32), one, [both]),
        "bits of s8": (lambda x: lax.bitcast_convert_type(x, jnp.int8), one, [both]),
        "random": (lambda x: x + jax.random.uniform(jax.random.key(0), (8, 16)), one, [both]),
        "reversed": (lambda x: x[:, ::-1] + x, one, [both]),
        "precision": (lambda x: lax.reduce_precision(x, 5, 10), one, [both]),
    }
    return {name: (f, kinds, [NamedSharding(mesh, s) for s in specs]) for name, (f, kinds, specs) in found.items()}


def write(folder: Path) -> None:
    """Write for each case its StableHLO, its HLO, and what XLA's partitioner makes of it, and arrays."""
    import jax
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    for name, (f, kinds, shardings) in cases().items():
        inputs = [
            rng.integers(0, 7, s).astype(d) if d.startswith("int") else rng.standard_normal(s).astype(getattr(ml_dtypes, d, d))
            for s, d in kinds
        ]
        lowered = jax.jit(f, in_shardings=tuple(shardings)).lower(*inputs)
        compiled = lowered.compile()
        place = folder / name.replace(" ", "_")
        place.with_suffix(".mlir").write_text(lowered.as_text())
        place.with_suffix(".hlo").write_text(lowered.as_text(dialect="hlo"))
        place.with_suffix(".partitioned.hlo").write_text(compiled.as_text())
        results = jax.tree.leaves(compiled(*(jax.device_put(v, s) for v, s in zip(inputs, shardings, strict=True))))
        arrays = {f"in{i}": v for i, v in enumerate(inputs)} | {f"out{i}": np.asarray(v) for i, v in enumerate(results)}
        np.savez(
            place.with_suffix(".npz"),
            **{n: v.view(np.uint16) if v.dtype == ml_dtypes.bfloat16 else v for n, v in arrays.items()},
        )


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    write(Path(sys.argv[1]))
