"""Random models of one operator of onnxruntime's own domain, over its attributes, optional inputs and types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_models import FLOAT, model

Arrays = dict[str, np.ndarray]
# A query that may see nothing has scores near mask_filter_value, -10000, where f32 steps by 1e-3.
MASKED = 4e-3


@dataclass(frozen=True)
class Case:
    """A model of one node, what to feed it, and by how many codes or how much an element may differ.

    Attributes:
        unspecified: of a result, elements that the operator leaves open.
    """

    model: onnx.ModelProto
    feeds: Arrays
    rtol: float = 1e-4
    atol: float = 1e-5
    codes: int = 0
    unspecified: Mapping[int, np.ndarray] | None = None


CASES: dict[str, Callable[[np.random.Generator], Case]] = {}


def _case(f: Callable[[np.random.Generator], Case]) -> Callable[[np.random.Generator], Case]:
    CASES[f.__name__.strip("_")] = f
    return f


def _model(
    op: str,
    given: Sequence[tuple[str, np.ndarray | None, bool]],
    outputs: Sequence[int],
    *,
    domain: str = "com.microsoft",
    operators: int = 21,
    imported: bool = True,
    **attributes: object,
) -> tuple[onnx.ModelProto, Arrays]:
    """A model of a node whose inputs are (name, value or None if absent, constant); outputs: element types, 0 for none."""
    names = [n if v is not None else "" for n, v, _ in given]
    while names and not names[-1]:
        names.pop()
    results = [f"y{i}" if t else "" for i, t in enumerate(outputs)]
    node = helper.make_node(op, names, results, name="node", domain=domain, **attributes)
    feeds = {n: v for n, v, c in given if v is not None and not c}
    constants = {n: v for n, v, c in given if v is not None and c}
    kinds = {f"y{i}": t for i, t in enumerate(outputs) if t}
    domains = {domain: 1} if domain and imported else None
    return model([node], feeds, kinds, constants, opset=operators, domains=domains), feeds


def _codes(r: np.random.Generator, dtype: type, shape: Sequence[int]) -> np.ndarray:
    limits = np.iinfo(dtype)
    return r.integers(limits.min, limits.max, tuple(shape), dtype=dtype, endpoint=True)


def _weights(r: np.random.Generator, dtype: type, shape: Sequence[int]) -> np.ndarray:
    """Codes of weights. Signed ones have 7 bits: before VNNI, x86 adds 8-bit products in pairs that saturate at 16 bits, and
    onnxruntime lets them (it asks for models quantised with `reduce_range` there).
    """
    codes = _codes(r, dtype, shape)
    return codes >> 1 if codes.dtype == np.int8 else codes


def _zero(r: np.random.Generator, dtype: type, shape: Sequence[int] = ()) -> np.ndarray:
    return _codes(r, dtype, shape)


def _scale(r: np.random.Generator, shape: Sequence[int] = (), top: float = 0.1) -> np.ndarray:
    return np.asarray(r.uniform(0.002, top, tuple(shape)), np.float32)


def _maybe(r: np.random.Generator, value: np.ndarray) -> np.ndarray | None:
    return value if r.random() < 0.6 else None


def _extents(r: np.random.Generator, count: int, *, top: int = 7) -> tuple[int, ...]:
    return tuple(int(r.integers(1, top + 1)) for _ in range(count))


def _kind(dtype: type) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _float(r: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(r.standard_normal(shape), np.float32)


def _binary(op: str, r: np.random.Generator) -> Case:
    dtype = r.choice([np.uint8, np.int8])
    shape = _extents(r, int(r.integers(1, 4)))
    other = tuple(d if r.random() < 0.7 else 1 for d in shape)[int(r.integers(0, len(shape))) :]
    a, b = (_codes(r, dtype, s) for s in ((shape, other) if r.random() < 0.5 else (other, shape)))
    given = [
        ("a", a, False),
        ("as", _scale(r), True),
        ("az", _zero(r, dtype), True),
        ("b", b, r.random() < 0.3),
        ("bs", _scale(r), True),
        ("bz", _zero(r, dtype), True),
        ("cs", _scale(r, top=0.4), True),
        ("cz", _maybe(r, _zero(r, dtype)), True),
    ]
    return Case(*_model(op, given, [_kind(dtype)]), codes=1)


for _name in ("QLinearAdd", "QLinearMul"):
    CASES[_name] = functools.partial(_binary, _name)


def _unary(op: str, r: np.random.Generator) -> Case:
    dtype = r.choice([np.uint8, np.int8])
    more: dict[str, object] = {}
    shape = _extents(r, int(r.integers(1, 4)))
    z = _zero(r, dtype)
    if op == "QLinearLeakyRelu":
        more["alpha"] = float(r.choice([0.01, 0.5, 0.0]))
    if op == "QLinearSoftmax":
        z = np.array(np.iinfo(dtype).min, dtype)  # past the last code onnxruntime wraps here
        more = {"axis": int(r.integers(-len(shape), len(shape))), "opset": int(r.choice([11, 13]))}
    given = [
        ("x", _codes(r, dtype, shape), False),
        ("xs", _scale(r), True),
        ("xz", _zero(r, dtype), True),
        ("ys", _scale(r, top=0.1) + np.float32(1 / 255), True),
        ("yz", z, True),
    ]
    return Case(*_model(op, given, [_kind(dtype)], **more), codes=1)


for _name in ("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax"):
    CASES[_name] = functools.partial(_unary, _name)


@_case
def QLinearConcat(r: np.random.Generator) -> Case:
    dtype = r.choice([np.uint8, np.int8])
    shape = list(_extents(r, int(r.integers(1, 4))))
    axis = int(r.integers(-len(shape), len(shape)))
    given: list[tuple[str, np.ndarray | None, bool]] = [("ys", _scale(r), True), ("yz", _zero(r, dtype), True)]
    for i in range(int(r.integers(1, 4))):
        shape[axis] = int(r.integers(1, 5))
        given += [
            (f"x{i}", _codes(r, dtype, shape), False),
            (f"s{i}", _scale(r), True),
            (f"z{i}", _zero(r, dtype), True),
        ]
    return Case(*_model("QLinearConcat", given, [_kind(dtype)], axis=axis), codes=1)


@_case
def QLinearWhere(r: np.random.Generator) -> Case:
    dtype = r.choice([np.uint8, np.int8])
    shape = _extents(r, 3)
    given = [
        ("c", r.random(shape) < 0.5, False),
        ("x", _codes(r, dtype, shape), False),
        ("xs", _scale(r), True),
        ("xz", _zero(r, dtype), True),
        ("y", _codes(r, dtype, tuple(d if r.random() < 0.7 else 1 for d in shape)), False),
        ("ys", _scale(r), True),
        ("yz", _zero(r, dtype), True),
        ("zs", _scale(r), True),
        ("zz", _zero(r, dtype), True),
    ]
    return Case(*_model("QLinearWhere", given, [_kind(dtype)]), codes=1)


@_case
def QLinearGlobalAveragePool(r: np.random.Generator) -> Case:
    dtype = r.choice([np.uint8, np.int8])
    given = [
        ("x", _codes(r, dtype, _extents(r, 4)), False),
        ("xs", _scale(r), True),
        ("xz", _zero(r, dtype), True),
        ("ys", _scale(r), True),
        ("yz", _zero(r, dtype), True),
    ]
    return Case(*_model("QLinearGlobalAveragePool", given, [_kind(dtype)], channels_last=int(r.integers(0, 2))), codes=1)


@_case
def QLinearAveragePool(r: np.random.Generator) -> Case:
    dtype = r.choice([np.uint8, np.int8])
    n, c, h, w = _extents(r, 4)
    last = int(r.integers(0, 2))
    shape = (n, h + 4, w + 4, c) if last else (n, c, h + 4, w + 4)
    given = [
        ("x", _codes(r, dtype, shape), False),
        ("xs", _scale(r), True),
        ("xz", _zero(r, dtype), True),
        ("ys", _scale(r), True),
        ("yz", _zero(r, dtype), True),
    ]
    more = {"kernel_shape": [2, 3], "strides": [int(r.integers(1, 3)), 1], "pads": [1, 0, 0, int(r.integers(0, 2))]}
    more["count_include_pad"] = int(r.integers(0, 2))
    return Case(*_model("QLinearAveragePool", given, [_kind(dtype)], channels_last=last, **more), codes=1)


@_case
def NhwcMaxPool(r: np.random.Generator) -> Case:
    dtype = r.choice([np.uint8, np.int8])
    x = _codes(r, dtype, (int(r.integers(1, 3)), 6, 7, int(r.integers(1, 5))))
    more = {"kernel_shape": [2, 3], "strides": [int(r.integers(1, 3)), 1], "pads": [1, 0, 0, int(r.integers(0, 2))]}
    return Case(*_model("NhwcMaxPool", [("x", x, False)], [_kind(dtype)], **more))


@_case
def FusedConv(r: np.random.Generator) -> Case:
    n, c, m = _extents(r, 3)
    activation = str(r.choice(["Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "HardSigmoid"]))
    params = {"LeakyRelu": [0.2], "Clip": [-0.3, 0.5], "HardSigmoid": [0.3, 0.4]}.get(activation)
    z = _float(r, n, m, 5, 4) if r.random() < 0.4 else None
    given = [
        ("x", _float(r, n, c, 7, 6), False),
        ("w", _float(r, m, c, 3, 3), True),
        ("b", _float(r, m) if z is not None or r.random() < 0.6 else None, True),
        ("z", z, False),
    ]
    more = {} if params is None else {"activation_params": params}
    return Case(*_model("FusedConv", given, [FLOAT], activation=activation, **more))


@_case
def QGemm(r: np.random.Generator) -> Case:
    m, k, n = _extents(r, 3, top=20)
    ta, tb = int(r.integers(0, 2)), int(r.integers(0, 2))
    dtype, weight = (np.uint8, r.choice([np.uint8, np.int8])) if r.random() < 0.7 else (np.int8, np.int8)
    columns = r.random() < 0.5
    coded = r.random() < 0.6
    c_shape = [(n,), (1, n), (m, n), (m, 1), (1,)][int(r.integers(0, 5))]
    given = [
        ("a", _codes(r, dtype, (k, m) if ta else (m, k)), False),
        ("as", _scale(r), True),
        ("az", _zero(r, dtype), True),
        ("b", _weights(r, weight, (n, k) if tb else (k, n)), r.random() < 0.7),
        ("bs", _scale(r, (n,) if columns else ()), True),
        ("bz", _zero(r, weight, (n,) if columns else ()), True),
        ("c", _maybe(r, r.integers(-9000, 9000, c_shape).astype(np.int32)), True),
        ("ys", _scale(r, top=4) if coded else None, True),
        ("yz", _zero(r, dtype) if coded else None, True),
    ]
    alpha = float(r.choice([1.0, 0.5]))
    out = _kind(dtype) if coded else FLOAT
    return Case(*_model("QGemm", given, [out], transA=ta, transB=tb, alpha=alpha), codes=1)


@_case
def MatMulIntegerToFloat(r: np.random.Generator) -> Case:
    m, k, n = _extents(r, 3, top=20)
    batch = _extents(r, int(r.integers(0, 2)))
    dtype, weight = (np.uint8, r.choice([np.uint8, np.int8])) if r.random() < 0.7 else (np.int8, np.int8)
    columns = (n,) if r.random() < 0.5 else ()
    given = [
        ("a", _codes(r, dtype, (*batch, m, k)), False),
        ("b", _weights(r, weight, (k, n)), r.random() < 0.7),
        ("as", _scale(r), False),
        ("bs", _scale(r, columns), True),
        ("az", _maybe(r, _zero(r, dtype)), False),
        ("bz", _maybe(r, _zero(r, weight, columns)), True),
        ("bias", _maybe(r, _float(r, n)), True),
    ]
    return Case(*_model("MatMulIntegerToFloat", given, [FLOAT]))


@_case
def DynamicQuantizeMatMul(r: np.random.Generator) -> Case:
    m, k, n = _extents(r, 3, top=20)
    weight = r.choice([np.uint8, np.int8])
    columns = (n,) if r.random() < 0.5 else ()
    given = [
        ("a", _float(r, *_extents(r, int(r.integers(0, 2))), m, k), False),
        ("b", _weights(r, weight, (k, n)), r.random() < 0.7),
        ("bs", _scale(r, columns), True),
        ("bz", _maybe(r, _zero(r, weight, columns)), True),
        ("bias", _maybe(r, _float(r, n)), True),
    ]
    return Case(*_model("DynamicQuantizeMatMul", given, [FLOAT]), rtol=1e-3, atol=1e-2)


def _norm(op: str, r: np.random.Generator) -> Case:
    n, s, h = _extents(r, 3, top=9)
    simplified = "Simplified" in op
    shapes = [(n, s, h)] if simplified or n == 1 else [(n, s, h), (1, s, h), (s, h)]
    skip = shapes[int(r.integers(0, len(shapes)))]
    given = [("x", _float(r, n, s, h), False), ("skip", _float(r, *skip), False), ("g", _float(r, h), True)]
    if not simplified:
        given.append(("beta", _maybe(r, _float(r, h)), True))
    given.append(("bias", _maybe(r, _float(r, h)), True))
    epsilon = float(r.choice([1e-12, 1e-5, 0.1]))
    return Case(*_model(op, given, [FLOAT, 0, 0, FLOAT if r.random() < 0.5 else 0], epsilon=epsilon), rtol=1e-3, atol=1e-4)


for _name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
    CASES[_name] = functools.partial(_norm, _name)


@_case
def SimplifiedLayerNormalization(r: np.random.Generator) -> Case:
    shape = _extents(r, 3)
    axis = int(r.integers(-3, 3))
    given = [("x", _float(r, *shape), False), ("g", _float(r, *shape[axis:]), True)]
    outputs = [FLOAT, FLOAT] if r.random() < 0.3 else [FLOAT]
    m, feeds = _model(
        "SimplifiedLayerNormalization", given, outputs, domain="", operators=int(r.choice([13, 17])), axis=axis, epsilon=1e-3
    )
    return Case(m, feeds)


@_case
def LayerNormalization(r: np.random.Generator) -> Case:
    """Below operator set 17, where onnxruntime takes it all the same."""
    shape = _extents(r, 3)
    axis = int(r.integers(-3, 3))
    given = [("x", _float(r, *shape), False)] + [(k, _float(r, *shape[axis:]), True) for k in "gb"]
    m, feeds = _model("LayerNormalization", given, [FLOAT], domain="", operators=int(r.choice([11, 13, 16])), axis=axis)
    return Case(m, feeds, rtol=1e-3, atol=1e-4)


@_case
def EmbedLayerNormalization(r: np.random.Generator) -> Case:
    n, s, h = _extents(r, 3)
    segments = r.random() < 0.6
    ids = r.integers(0, 11, (n, s)).astype(np.int32)
    given = [
        ("ids", ids, False),
        ("seg", r.integers(0, 2, (n, s)).astype(np.int32) if segments else None, False),
        ("we", _float(r, 11, h), True),
        ("pe", _float(r, 9, h), True),
        ("se", _float(r, 2, h) if segments else None, True),
        ("g", _float(r, h), True),
        ("b", _float(r, h), True),
        ("mask", _maybe(r, r.integers(0, 2, (n, s)).astype(np.int32)), False),
        ("pos", _maybe(r, r.integers(0, 9, (int(r.choice([1, n])), s)).astype(np.int32)), False),
    ]
    outputs = [FLOAT, TensorProto.INT32, FLOAT if r.random() < 0.5 else 0]
    return Case(*_model("EmbedLayerNormalization", given, outputs, epsilon=1e-5), rtol=1e-3, atol=1e-4)


@_case
def FusedMatMul(r: np.random.Generator) -> Case:
    m, k, n = _extents(r, 3)
    batch = _extents(r, int(r.integers(0, 3)), top=3)
    ta, tb = int(r.integers(0, 2)), int(r.integers(0, 2))
    more = {"transA": ta, "transB": tb, "alpha": float(r.choice([1.0, 0.125, -2.0]))}
    a, b = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))
    if len(batch) == 1 and r.random() < 0.5:
        for name, shape in (("A", a), ("B", b)):
            if r.random() < 0.5:
                more[f"transBatch{name}"] = 1
                moved = (shape[0], *batch, shape[1])
                a, b = (moved, b) if name == "A" else (a, moved)
            else:
                a, b = ((*batch, *a), b) if name == "A" else (a, (*batch, *b))
    else:
        a, b = (*batch, *a), (b if r.random() < 0.3 else (*batch, *b))
    given = [("a", _float(r, *a), False), ("b", _float(r, *b), r.random() < 0.5)]
    return Case(*_model("FusedMatMul", given, [FLOAT], **more))


@_case
def FusedGemm(r: np.random.Generator) -> Case:
    m, k, n = _extents(r, 3)
    activation = str(r.choice(["Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid"]))
    more = {"LeakyRelu": {"activation_alpha": 0.2}, "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.4}}
    given = [("a", _float(r, m, k), False), ("b", _float(r, k, n), True), ("c", _maybe(r, _float(r, n)), True)]
    return Case(*_model("FusedGemm", given, [FLOAT], activation=activation, alpha=0.5, **more.get(activation, {})))


def _gelu(op: str, r: np.random.Generator) -> Case:
    shape = _extents(r, 3, top=9)
    given = [("x", _float(r, *shape) * 4, False)]
    if op == "BiasGelu" or (op == "FastGelu" and r.random() < 0.5):
        given.append(("b", _float(r, shape[-1]), True))
    more = {"alpha": float(r.choice([1.0, 1.702]))} if op == "QuickGelu" else {}
    return Case(*_model(op, given, [FLOAT], imported=bool(r.random() < 0.5), **more), rtol=1e-4, atol=2e-6)


for _name in ("Gelu", "BiasGelu", "FastGelu", "QuickGelu"):
    CASES[_name] = functools.partial(_gelu, _name)


def _masks(r: np.random.Generator, n: int, s: int, t: int, *, single: bool = True) -> np.ndarray | None:
    form = int(r.integers(0, 6 if single else 5))
    if form == 0:
        return None
    if form == 1:
        return r.integers(1, t + 1, n).astype(np.int32)
    if form == 2:
        ends = r.integers(1, t + 1, n)
        return np.concatenate([ends, r.integers(0, ends)]).astype(np.int32)
    if form == 5:  # one number for all the keys hides none of them
        return r.integers(0, 2, (int(r.choice([1, n])), 1)).astype(np.int32)
    return r.integers(0, 2, (n, t) if form == 3 else (n, s, t)).astype(np.int32)


def _masked(r: np.random.Generator) -> dict[str, object]:
    """Attributes of an attention: a scale, and the number of a hidden score, near which f32 may tell no two apart."""
    more: dict[str, object] = {"scale": 0.3} if r.random() < 0.3 else {}
    if r.random() < 0.4:
        more["mask_filter_value"] = float(np.finfo(np.float32).min) if r.random() < 0.5 else -5.0
    return more


def _score_bias(r: np.random.Generator, n: int, heads: int, s: int, t: int) -> np.ndarray:
    """Numbers to add to scores, for all or for each of the batch and the heads; sometimes as low as those of a mask."""
    bias = _float(r, int(r.choice([1, n])), int(r.choice([1, heads])), s, t)
    if r.random() < 0.3:
        bias[r.random(bias.shape) < 0.5] = r.choice([-np.inf, np.finfo(np.float32).min, -1e4])
    return bias


@_case
def Attention(r: np.random.Generator) -> Case:
    n, s, heads, size, hidden = (*_extents(r, 3, top=4), int(r.choice([2, 4, 8])), int(r.choice([3, 8])))
    past = int(r.integers(1, 5)) if r.random() < 0.4 else 0
    value_size = size if past or r.random() < 0.6 else size * 2
    sizes = [heads * size, heads * size, heads * value_size]
    given = [
        ("x", _float(r, n, s, hidden), False),
        ("w", _float(r, hidden, sum(sizes)), True),
        ("b", _float(r, sum(sizes)), True),  # onnxruntime ends the process where there is none
        ("m", _masks(r, n, s, s + past), False),
        ("p", _float(r, 2, n, heads, past, size) if past else None, False),
        ("ab", None if past else _maybe(r, _score_bias(r, n, heads, s, s)), False),
    ]
    more: dict[str, object] = {"num_heads": heads, "unidirectional": int(r.integers(0, 2))}
    if sizes[2] != sizes[0] or r.random() < 0.2:
        more["qkv_hidden_sizes"] = sizes
    present = FLOAT if past or (value_size == size and r.random() < 0.2) else 0
    return Case(*_model("Attention", given, [FLOAT, present], **more, **_masked(r)), rtol=1e-3, atol=MASKED)


@_case
def QAttention(r: np.random.Generator) -> Case:
    n, s, heads, size, hidden = (*_extents(r, 3, top=4), 4, int(r.choice([3, 8])))
    width = 3 * heads * size
    columns = (width,) if r.random() < 0.5 else ()
    weight = r.choice([np.uint8, np.int8])
    past = int(r.integers(1, 5)) if r.random() < 0.4 else 0
    given = [
        ("x", _codes(r, np.uint8, (n, s, hidden)), False),
        ("w", _weights(r, weight, (hidden, width)), True),
        ("b", _float(r, width), True),
        ("xs", _scale(r, top=0.02), True),
        ("ws", _scale(r, columns, top=0.02), True),
        ("m", _masks(r, n, s, s + past), False),
        ("xz", _zero(r, np.uint8), True),
        ("wz", _zero(r, weight, columns), True),
        ("p", _float(r, 2, n, heads, past, size) if past else None, False),
    ]
    more = {"num_heads": heads, "unidirectional": int(r.integers(0, 2))}
    return Case(*_model("QAttention", given, [FLOAT, FLOAT if past else 0], **more, **_masked(r)), rtol=1e-3, atol=MASKED)


@_case
def MultiHeadAttention(r: np.random.Generator) -> Case:
    n, s, heads, size = (*_extents(r, 3, top=4), int(r.choice([2, 4, 8])))
    past = int(r.integers(1, 5)) if r.random() < 0.3 else 0
    t = s if r.random() < 0.5 else int(r.integers(1, 7))
    split = not past and r.random() < 0.2
    value_size = size if past or split or r.random() < 0.7 else size * 2
    whole = t + past
    mask = _masks(r, n, s, whole, single=False)
    if mask is not None and mask.ndim == 1 and mask.shape[0] != n:
        mask = None
    key = _float(r, n, heads, t, size) if split else _float(r, n, t, heads * size)
    value = _float(r, n, heads, t, value_size) if split else _float(r, n, t, heads * value_size)
    given = [
        ("q", _float(r, n, s, heads * size), False),
        ("k", key, False),
        ("v", value, False),
        ("b", None if split else _maybe(r, _float(r, heads * (2 * size + value_size))), True),
        ("m", mask, False),
        ("ab", _maybe(r, _score_bias(r, n, heads, s, whole)), False),
        ("pk", _float(r, n, heads, past, size) if past else None, False),
        ("pv", _float(r, n, heads, past, size) if past else None, False),
    ]
    more: dict[str, object] = {"num_heads": heads, "unidirectional": int(r.integers(0, 2)), **_masked(r)}
    presents = [FLOAT] * 2 if past or r.random() < 0.2 else []
    return Case(*_model("MultiHeadAttention", given, [FLOAT, *presents], **more), rtol=1e-3, atol=MASKED)


@_case
def RotaryEmbedding(r: np.random.Generator) -> Case:
    n, s, heads = _extents(r, 3, top=4)
    size = int(r.choice([4, 8, 16]))
    part = size // 2 if r.random() < 0.4 else 0
    turned = part or size
    x = _float(r, n, heads, s, size) if r.random() < 0.4 else _float(r, n, s, heads * size)
    table = _float(r, 12, turned // 2), _float(r, 12, turned // 2)
    positions = r.integers(0, 12, (n, s)) if r.random() < 0.5 else r.integers(0, 12 - s, 1)
    given = [("x", x, False), ("p", positions.astype(np.int64), False), ("c", table[0], True), ("s", table[1], True)]
    more = {"interleaved": int(r.integers(0, 2)), "rotary_embedding_dim": part, "num_heads": heads if part else 0}
    return Case(*_model("RotaryEmbedding", given, [FLOAT], **more))


@_case
def GroupQueryAttention(r: np.random.Generator) -> Case:
    groups, size, s = int(r.integers(1, 4)), int(r.choice([8, 16, 32])), int(r.integers(1, 6))
    heads = groups * int(r.integers(1, 4))
    first = r.random() < 0.4
    n = int(r.integers(1, 4)) if first or s == 1 else 1
    past = 0 if first else int(r.integers(1, 6))
    whole = s + past
    counts = np.full(n, whole - 1) if first or s > 1 else r.integers(0, whole, n)
    counts[0] = whole - 1
    held = int(r.choice([past, whole + 2])) if not first else int(r.choice([0, whole + 2]))
    packed = r.random() < 0.4
    rotary = int(size > 8 and r.random() < 0.6)
    turned = size // 2 if r.random() < 0.6 else 8  # pairs of a head that are turned
    places = r.integers(0, 11, (n, s)) if rotary and r.random() < 0.4 else None
    given = [
        ("q", _float(r, n, s, (heads + (2 * groups if packed else 0)) * size), False),
        ("k", None if packed else _float(r, n, s, groups * size), False),
        ("v", None if packed else _float(r, n, s, groups * size), False),
        ("pk", _float(r, n, groups, held, size), False),
        ("pv", _float(r, n, groups, held, size), False),
        ("n", counts.astype(np.int32), False),
        ("t", np.array(whole, np.int32), True),
        ("c", _float(r, 16, turned) if rotary else None, True),
        ("s", _float(r, 16, turned) if rotary else None, True),
        ("pos", places, False),
        ("ab", _float(r, int(r.choice([1, n])), int(r.choice([1, heads])), s, whole) if r.random() < 0.3 else None, False),
        ("sink", _float(r, heads) if r.random() < 0.2 else None, False),
    ]
    more: dict[str, object] = {"num_heads": heads, "kv_num_heads": groups, "do_rotary": rotary}
    if r.random() < 0.3:
        more["local_window_size"] = int(r.integers(1, 5))
    elif r.random() < 0.2:
        more["causal"] = 0
    if r.random() < 0.3:
        more["softcap"] = 2.0
    if r.random() < 0.2 and given[11][1] is None:
        more["smooth_softmax"] = 1
    if rotary and r.random() < 0.5:
        more["rotary_interleaved"] = 1
    if r.random() < 0.3:
        more["scale"] = 0.3
    total = max(held, whole)
    beyond = np.arange(total)[None, None, :, None] > counts[:, None, None, None]
    open_ = np.broadcast_to(beyond, (n, groups, total, size))
    m, feeds = _model("GroupQueryAttention", given, [FLOAT] * 3, **more)
    return Case(m, feeds, rtol=1e-3, atol=1e-4, unspecified={1: open_, 2: open_})


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., n] as bytes, low bits first."""
    each = 8 // bits
    short = -codes.shape[-1] % each
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)]).astype(np.uint8)
    apart = codes.reshape(*codes.shape[:-1], -1, each)
    return (apart << (np.arange(each) * bits).astype(np.uint8)).sum(-1).astype(np.uint8)


@_case
def MatMulNBits(r: np.random.Generator) -> Case:
    bits, block = int(r.choice([2, 4, 8])), int(r.choice([16, 32, 64]))
    m, n, k = int(r.integers(1, 6)), int(r.integers(1, 9)), int(r.integers(1, 5)) * block - int(r.choice([0, 0, 3]))
    groups = -(-k // block)
    codes = r.integers(0, 1 << bits, (n, groups, block))
    form = int(r.integers(0, 3))
    zero = None
    if form == 1:
        zero = _packed(r.integers(0, 1 << bits, (n, groups)), bits)
    elif form == 2 and bits == 4:
        zero = np.asarray(r.uniform(0, 15, (n, groups)), np.float32)
    given = [
        ("a", _float(r, *_extents(r, int(r.integers(0, 2))), m, k), False),
        ("b", _packed(codes, bits), True),
        ("s", _scale(r, (n, groups)), True),
        ("z", zero, True),
        ("g", r.integers(0, groups, k).astype(np.int32) if bits == 4 and form != 1 and r.random() < 0.4 else None, True),
        ("bias", _maybe(r, _float(r, n)), True),
    ]
    m_, feeds = _model("MatMulNBits", given, [FLOAT], N=n, K=k, bits=bits, block_size=block, accuracy_level=0)
    return Case(m_, feeds, rtol=1e-3, atol=1e-3)


@_case
def GatherBlockQuantized(r: np.random.Generator) -> Case:
    import ml_dtypes

    block = 16
    shape = [int(r.integers(1, 7)), int(r.integers(1, 4)) * block]
    if r.random() < 0.4:
        shape.insert(0, int(r.integers(1, 4)))
    rank = len(shape)
    index = _extents(r, int(r.integers(0, 3)), top=4)
    form = int(r.integers(0, 4))
    more: dict[str, object] = {"block_size": block, "quantize_axis": rank - 1}
    if form == 3:
        dtype = r.choice([ml_dtypes.int4, ml_dtypes.uint4])
        low, high = (-8, 8) if dtype is ml_dtypes.int4 else (0, 16)
        axis = int(r.integers(0, rank))
        data = r.integers(low, high, shape).astype(dtype)
        blocks = [*shape[:-1], -(-shape[-1] // block)]
        zero = r.integers(low, high, blocks).astype(dtype)
    else:
        bits = (2, 4, 8)[form]
        axis = 0
        blocks = [*shape[:-1], shape[-1] // block]
        data = _packed(r.integers(0, 1 << bits, shape), bits)
        zero = _packed(r.integers(0, 1 << bits, blocks), bits)
        more["bits"] = bits
    extent = shape[axis]
    given = [
        ("d", data, True),
        ("i", r.integers(-extent, extent, index).astype(np.int64), False),
        ("s", _scale(r, blocks), True),
        ("z", _maybe(r, zero), True),
    ]
    return Case(*_model("GatherBlockQuantized", given, [FLOAT], gather_axis=axis, **more))
