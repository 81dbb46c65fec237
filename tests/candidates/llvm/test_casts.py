"""Casts in generated kernels: conversions, quantising and dequantising, exactly as the oracle, on every 8- and 16-bit
value, at ties, ends, NaN and infinity; and what they refuse."""

import itertools

import numpy as np
import pytest
import torch
from llvm_map import run_expression
from values import ALL, assert_same, every_value, from_numpy, random_array, specials, to_numpy

from tilewright.candidates.llvm.expressions.printer import FP8
from tilewright.candidates.llvm.expressions.vector import check
from tilewright.dtype import BF16, F8E5M2, F16, F32, F64, S4, S8, S16, S32, S64, U4, U8, U16, U32, U64, DType
from tilewright.ir.build import convert
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Convert, Dequantize, Map, Param, Quantize
from tilewright.ir.ops.functions import FUNCTIONS
from tilewright.ir.types import TensorType
from tilewright.lowering.access import Unsupported
from tilewright.lowering.scalar.wide import FUNCTIONS as WIDE

REACHED = [d for d in ALL if d.bits <= 32 and d.name not in ("f8e5m2fnuz", "f4e2m1fn")]  # which are read, not written
WRITTEN = [d for d in FP8 if d.name != "f4e2m1fn"]
VECTOR_FLOATS = [BF16, F16, F32]


def halfway(target: DType) -> np.ndarray:
    """f32 values on and beside the middle between neighbours of a narrow float."""
    values = every_value(target).astype(np.float32)
    values = np.sort(values[np.isfinite(values)]).astype(np.float64)
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    return np.concatenate([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))])


def table(values: np.ndarray, dtype: DType) -> torch.Tensor:
    """Repeat values to fill rows of 20 columns, one vector and a part of one."""
    return from_numpy(np.resize(values.ravel(), (-(-values.size // 20), 20)), dtype)


def samples(source: DType, target: DType | None = None) -> torch.Tensor:
    """Every value of a narrow type; of a wide one specials, random bits, and what rounds hard."""
    if source.bits <= 16:
        return table(every_value(source), source)
    rng = np.random.default_rng(7)
    held = np.int32 if source.kind != "uint" else np.uint32
    parts = [specials(source), rng.integers(0, 2**32, 40_000, dtype=np.uint32).view(held).view(source.to_numpy())]
    parts.append(random_array(source, (20_000,), rng))
    whole = np.arange(-70_000, 70_000)
    parts.append(
        (whole / 2 if source.is_float else whole if source.kind == "int" else whole + 70_000).astype(source.to_numpy())
    )
    if source is F32 and target in (BF16, F16, *FP8):
        parts.append(halfway(target))
    if source.is_integer:  # beside the places where a float of 8, 11 or 24 bits has to round
        powers = 2 ** np.arange(8, 31)[:, None] + (2 ** np.arange(8, 31)[:, None] >> np.array([8, 9, 11, 12, 24])[None])
        near = powers.reshape(-1, 1) + np.arange(-2, 3)
        parts.append(near.flatten().astype(source.to_numpy()))
        parts.append((-near.flatten()).astype(source.to_numpy()))
    return table(np.concatenate(parts), source)


def param(index: int, t: torch.Tensor, dtype: DType) -> Node:
    return Node(Param(index, TensorType(dtype, tuple(t.shape))))


def assert_agrees(root: Node, given: dict[Node, torch.Tensor]) -> None:
    """The generated function and the oracle, bit for bit but for which NaN."""
    (wanted,) = evaluate_nodes([root], given)
    assert_gives(root, given, to_numpy(wanted, root.dtype))


def assert_gives(root: Node, given: dict[Node, torch.Tensor], wanted: np.ndarray) -> None:
    got = run_expression(root, list(given.values()))
    shown = [to_numpy(t, n.dtype) for n, t in given.items()]
    assert_same(to_numpy(got, root.dtype), wanted, *shown)


def refusal(root: Node) -> str | None:
    try:
        check([root])
    except Unsupported as why:
        return str(why)
    return None


@pytest.mark.parametrize("source", ALL, ids=str)
def test_every_conversion_is_exact_or_refused_with_a_sentence(source):
    done = []
    for target, overflow in itertools.product(ALL, ("wrap", "saturate")):
        x = samples(source, target)
        p = param(0, x, source)
        root = Node(Convert(target, overflow), p)
        why = refusal(root)
        if why is not None:
            assert str(target) in why or str(source) in why, why
            continue
        assert_agrees(root, {p: x})
        done.append(target)
    wanted = REACHED if source in REACHED else []
    assert set(wanted) <= set(done), f"refused: {set(wanted) - set(done)}"


@pytest.mark.parametrize("source", [BF16, F16, F32, S32, S8], ids=str)
@pytest.mark.parametrize("target", [S8, U8, S4, U4, S16, U16], ids=str)
def test_quantize_is_exact(source, target):
    x = samples(source)
    for scale, zero in itertools.product((0.5, 0.0078125, 1 / 3, 3e38, 1e-40), (None, 0, int(target.min), 5, int(target.max))):
        given = {param(0, x, source): x, param(1, torch.empty(()), F32): torch.tensor(scale)}
        if zero is not None:
            given[param(2, torch.empty(()), target)] = torch.tensor(zero, dtype=target.to_torch())
        assert_agrees(Node(Quantize(target), *given), given)


@pytest.mark.parametrize("source", [BF16, F16, F32, S32, S8], ids=str)
@pytest.mark.parametrize("target", [*WRITTEN, F16, BF16, F32], ids=str)
def test_quantize_to_a_float_converts_the_quotient(source, target):
    x = samples(source, target)
    for scale, overflow in itertools.product((1.0, 1 / 3, 3e38, 1e-40), ("saturate", "ieee")):
        given = {param(0, x, source): x, param(1, torch.empty(()), F32): torch.tensor(scale)}
        assert_agrees(Node(Quantize(target, overflow=overflow), *given), given)


def test_quantize_rounds_half_to_even_and_saturates():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -1e9, float("inf"), -float("inf"), float("nan")]])
    given = {param(0, x, F32): x, param(1, torch.empty(()), F32): torch.tensor(1.0)}
    got = run_expression(Node(Quantize(S8), *given), list(given.values()))
    assert got.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, 127, -128, 0]]


def test_quantize_with_a_scale_for_each_column_and_a_zero_point_for_each_row():
    rng = np.random.default_rng(3)
    x = from_numpy(random_array(F32, (37, 21), rng), F32)
    scale = torch.rand(21) + 0.01
    zero = torch.randint(0, 256, (37, 1), dtype=torch.uint8)
    given = {param(0, x, F32): x, param(1, scale, F32): scale, param(2, zero, U8): zero}
    assert_agrees(Node(Quantize(U8), *given), given)


@pytest.mark.parametrize("source", FP8, ids=str)
@pytest.mark.parametrize("target", VECTOR_FLOATS, ids=str)
def test_dequantize_of_a_float_is_its_product_with_the_scale(source, target):
    x = samples(source)
    for scale_type, scale in itertools.product((F32, BF16, F16), (0.3337, 1.0, 1e-7)):
        given = {param(0, x, source): x, param(1, torch.empty(()), scale_type): torch.tensor(scale).to(scale_type.to_torch())}
        assert_agrees(Node(Dequantize(target), *given), given)


@pytest.mark.parametrize("source", [S4, U4, S8, U8, S16, U16], ids=str)
@pytest.mark.parametrize("target", VECTOR_FLOATS, ids=str)
def test_dequantize_is_exact(source, target):
    x = samples(source)
    for scale_type, zero in itertools.product((F32, BF16, F16), (None, int(source.min), 3, int(source.max))):
        scale = torch.tensor(0.3337).to(scale_type.to_torch())
        given = {param(0, x, source): x, param(1, scale, scale_type): scale}
        if zero is not None:
            given[param(2, torch.empty(()), source)] = torch.tensor(zero).to(source.to_torch())
        assert_agrees(Node(Dequantize(target), *given), given)


@pytest.mark.parametrize("source", [S32, U32], ids=str)
def test_dequantize_of_32_bits_rounds_them_to_f32(source):
    """There is no zero point; a difference from one would have to be exact, and is refused."""
    x = torch.tensor([0, 1, -1, 2**24 + 1, -(2**24) - 3, 2**31 - 1, -(2**31), 123456789], dtype=torch.int64)
    x = (x.abs() if source is U32 else x).to(source.to_torch()).reshape(2, 4)
    scale = torch.tensor(0.3337)
    given = {param(0, x, source): x, param(1, scale, F32): scale}
    assert_agrees(Node(Dequantize(F32), *given), given)
    with pytest.raises(Unsupported, match=f"dequantizing {source}"):
        check([Node(Dequantize(F32), *given, param(2, torch.empty(()), source))])


def test_a_code_quantised_and_dequantised_at_once_is_what_it_would_be_through_memory():
    x = samples(F32)
    for target, zero in ((S8, 0), (U8, 128), (S8, -7)):
        given = {param(0, x, F32): x, param(1, torch.empty(()), F32): torch.tensor(0.37)}
        given[param(2, torch.empty(()), target)] = torch.tensor(zero, dtype=target.to_torch())
        _, scale, point = given
        assert_agrees(Node(Dequantize(F32), Node(Quantize(target), *given), scale, point), given)


def test_what_has_no_vectors_is_refused():
    x = param(0, torch.empty(4, 8), F32)
    s = param(1, torch.empty(()), F32)
    blocks = param(1, torch.empty(4, 2), F32)
    codes = param(0, torch.empty(4, 8), S8)
    for root, word in (
        (Node(Convert(F64), x), "f64 has no vector form"),
        (Node(Quantize(S32), x, s), "quantizing to s32"),
        (Node(Quantize(S8, (1, 4)), x, blocks), "by blocks"),
        (Node(Dequantize(F32, (1, 4)), codes, blocks), "by blocks"),
        (Node(Map("sine"), param(0, torch.empty(4, 8, dtype=torch.float8_e5m2), F8E5M2)), "sine of f8e5m2"),
        (convert(param(0, torch.empty(4, 8, dtype=torch.int64), S64), BF16), "s64 has no vector form"),
    ):
        with pytest.raises(Unsupported, match=word):
            check([root])


ROUNDED = {"exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "silu", "tanh", "erf", "erfc", "gelu",
           "gelu_tanh"}  # fmt: skip
EXACT = sorted(set(FUNCTIONS) - ROUNDED - (set(WIDE) - {"remainder"}))
ON_INTEGERS = ("modulo", "power")  # where they are exact, too


def larger(a, b):
    """IEEE 754-2019 maximum, whose zeros are ordered, as torch's are not."""
    return np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b)) if a.dtype.kind == "f" else np.maximum(a, b)


def smaller(a, b):
    return -larger(-a, -b) if a.dtype.kind == "f" else np.minimum(a, b)


# Where torch is not exact itself: its square root is off in the last place on some processors.
BY_NUMPY = {
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "maximum": larger,
    "minimum": smaller,
    "clamp": lambda low, x, high: smaller(larger(low, x), high),
}


@pytest.mark.parametrize("fn", [*EXACT, *ON_INTEGERS])
def test_elementwise_functions_that_round_once_are_exact_on_every_type(fn):
    done = 0
    for dtype in (*REACHED, S64, U64):
        if dtype.kind not in FUNCTIONS[fn].kinds or (fn in ON_INTEGERS and dtype.is_float):
            continue
        rng = np.random.default_rng(11)
        arity = FUNCTIONS[fn].arity
        ends = specials(dtype)
        columns = [np.concatenate([c.ravel(), random_array(dtype, (2000,), rng)]) for c in np.meshgrid(*[ends] * arity)]
        given = {}
        for i, column in enumerate(columns):
            t = table(column, dtype)
            given[param(i, t, dtype)] = t
        root = Node(Map(fn), *given)
        why = refusal(root)
        if why is not None:
            assert str(dtype) in why, why
            continue
        if fn in BY_NUMPY:
            wide = [to_numpy(t, dtype).astype(np.float32 if dtype.is_float else dtype.to_numpy()) for t in given.values()]
            with np.errstate(all="ignore"):
                assert_gives(root, given, BY_NUMPY[fn](*wide).astype(dtype.to_numpy()))
        else:
            assert_agrees(root, given)
        done += 1
    assert done, f"{fn} is refused for every type"
