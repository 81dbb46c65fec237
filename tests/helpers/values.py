"""Test data of every type, with what breaks code among it, and the way between torch and NumPy (ml_dtypes)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from tilewright.dtype import BY_NAME, F4E2M1FN, OPAQUE, PRED, S4, U4, DType
from tilewright.ir.build import const
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, Op
from tilewright.ir.ops.rounding import are_codes
from tilewright.ir.types import TensorType

ALL = tuple(d for d in BY_NAME.values() if d is not OPAQUE)
INTEGERS = tuple(d for d in ALL if d.is_integer)
FLOATS = tuple(d for d in ALL if d.is_float)
NARROW = tuple(d for d in FLOATS if d.bits <= 8)
WIDE = tuple(d for d in FLOATS if d.bits > 8)
_BITS = {8: (torch.uint8, np.uint8), 16: (torch.int16, np.int16)}


def to_numpy(t: torch.Tensor, d: DType) -> np.ndarray:
    """The same values as a NumPy array of `d`'s own type."""
    t = t.detach().contiguous()
    if d is F4E2M1FN:
        return t.float().numpy().astype(d.to_numpy())
    if d in (S4, U4):
        return t.numpy().astype(d.to_numpy())
    if d.is_float and d.to_numpy().type.__module__ == "ml_dtypes":
        as_torch, as_numpy = _BITS[d.bits]
        return t.view(as_torch).numpy().view(as_numpy).view(d.to_numpy())
    return t.numpy()


def from_numpy(a: np.ndarray, d: DType) -> torch.Tensor:
    """The inverse of `to_numpy`."""
    a = np.ascontiguousarray(a).reshape(a.shape)
    if d is F4E2M1FN:
        return torch.from_numpy(a.astype(np.float32)).to(d.to_torch())
    if d in (S4, U4):
        return torch.from_numpy(a.astype(np.int8 if d is S4 else np.uint8))
    if d.is_float and a.dtype.type.__module__ == "ml_dtypes":
        as_torch, as_numpy = _BITS[d.bits]
        return torch.from_numpy(a.view(as_numpy).copy()).view(as_torch).view(d.to_torch())
    return torch.from_numpy(a.copy())


def every_value(d: DType) -> np.ndarray:
    """All bit patterns of a type of at most 16 bits."""
    if d is PRED:
        return np.array([False, True])
    if d is F4E2M1FN:
        return np.arange(16, dtype=np.uint8).view(d.to_numpy())
    if d.bits == 4:
        return np.arange(int(d.min), int(d.max) + 1).astype(d.to_numpy())
    return np.arange(1 << d.bits, dtype=np.uint16 if d.bits == 16 else np.uint8).view(d.to_numpy())


def widened(values: np.ndarray) -> np.ndarray:
    """The values as f64. A NaN may be a signalling one, which NumPy would warn of."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def specials(d: DType) -> np.ndarray:
    """The values where arithmetic goes wrong."""
    if d is PRED:
        return every_value(d)
    if d.is_integer:
        low, high = int(d.min), int(d.max)
        near = {low, low + 1, high, high - 1, high // 2, high // 2 + 1, 0, 1, 2, 3, 7, d.bits, d.bits - 1}
        near |= {-1, -2, -3, -d.bits} if low < 0 else set()
        return np.array(sorted(v for v in near if low <= v <= high), dtype=object).astype(_holder(d)).astype(d.to_numpy())
    tiny = float(ml_dtypes.finfo(d.to_numpy()).smallest_subnormal)
    small = float(ml_dtypes.finfo(d.to_numpy()).tiny)
    positive = [0.0, tiny, 3 * tiny, small, 0.25, 0.5, 1.0, 1.0 + d.epsilon, 1.5, 2.0, 2.5, 3.0, 7.5, float(d.max)]
    with np.errstate(all="ignore"):
        return np.array([*positive, *(-v for v in positive), np.inf, -np.inf, np.nan]).astype(d.to_numpy())


def _holder(d: DType) -> type:
    return np.uint64 if d.kind == "uint" else np.int64


def random_array(d: DType, shape: tuple[int, ...], rng: np.random.Generator, special: float = 0.2) -> np.ndarray:
    """Integers over their full range, floats over several magnitudes, and a share of specials."""
    count = int(np.prod(shape))
    if d is PRED:
        return rng.integers(0, 2, shape).astype(bool)
    if d.is_integer:
        plain = rng.integers(int(d.min), int(d.max), count, dtype=_holder(d), endpoint=True).astype(d.to_numpy())
    else:
        with np.errstate(all="ignore"):
            plain = (rng.standard_normal(count) * 2.0 ** rng.integers(-4, 5, count)).astype(d.to_numpy())
    if special:
        chosen = rng.random(count) < special
        plain[chosen] = rng.choice(specials(d), int(chosen.sum()))
    return plain.reshape(shape)


def random_value(t: TensorType, seed: int, special: float = 0.0) -> torch.Tensor:
    """A random tensor of a type, as evaluation carries it."""
    return from_numpy(random_array(t.dtype, t.shape, np.random.default_rng(seed), special), t.dtype)


def constant(a: np.ndarray, d: DType) -> Node:
    return const(from_numpy(a, d), d)


def run(op: Op, *operands: tuple[np.ndarray, DType]) -> np.ndarray:
    """The oracle's result of one operation on arrays."""
    return value_of(Node(op, *(constant(a, d) for a, d in operands)))


def value_of(node: Node) -> np.ndarray:
    """A node over constants, evaluated; its declared type is checked against what came out."""
    (value,) = evaluate_nodes([node], {})
    assert isinstance(value, torch.Tensor)
    assert tuple(value.shape) == node.shape, f"{node.op.name} says {node.type}, gives {list(value.shape)}"
    assert value.dtype == node.dtype.to_torch(), f"{node.op.name} says {node.type}, gives {value.dtype}"
    assert node.dtype.bits > 4 or are_codes(value, node.dtype), f"{node.op.name} gives what is no {node.dtype}"
    return to_numpy(value, node.dtype)


def same(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Tell where two arrays hold the same value: NaN is NaN, and zeros have the same sign."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    if got.dtype.kind in "iub" or got.dtype.name in ("int4", "uint4"):
        return np.asarray(got == wanted)
    a, b = widened(got), widened(wanted)
    return (np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b)))


def assert_same(got: np.ndarray, wanted: np.ndarray, *inputs: np.ndarray) -> None:
    equal = same(got, wanted)
    if not equal.all():
        at = tuple(np.argwhere(~equal)[0])
        given = [np.broadcast_to(i, got.shape)[at] for i in inputs]
        raise AssertionError(f"{(~equal).sum()} of {equal.size} differ; at {at} of {given}: {got[at]}, not {wanted[at]}")
