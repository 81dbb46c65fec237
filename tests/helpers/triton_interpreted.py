"""Numerics of generated Triton code in its interpreter: run by tests/candidates/triton/test_interpreted.py, which sets
TRITON_INTERPRET=1."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.candidates.llvm.test_casts import FP8, WRITTEN, param, samples, table
from triton_map import run_expression, run_expressions
from values import ALL, assert_same, from_numpy, random_array, specials, to_numpy

from tilewright.candidates.triton.expressions.emit import check
from tilewright.candidates.triton.expressions.text import Text
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, PRED, S4, S8, S16, S32, S64, U4, U8, U16, U32
from tilewright.ir.build import const, convert, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Convert, Dequantize, Map, Quantize, Select
from tilewright.ir.ops.functions import FUNCTIONS
from tilewright.ir.types import TensorType
from tilewright.lowering.access import Unsupported, of_store
from tilewright.lowering.scalar.wide import FUNCTIONS as WIDE

REACHED = [d for d in ALL if d.bits <= 32 and d.name != "f4e2m1fn"]  # which is read, not written
EXACT = ("add", "subtract", "multiply", "maximum", "minimum", "clamp", "relu", "negate", "abs", "floor", "ceil", "trunc",
         "round_half_even", "sign", "is_nan", "is_inf", "is_finite", "and", "or", "xor", "not", "equal", "not_equal", "less",
         "less_equal", "greater", "greater_equal", "round_half_away")  # fmt: skip
CLOSE = ("exponential", "log", "erf", "erfc", "gelu", "gelu_tanh", "logistic", "silu", "tanh", "rsqrt",
         "sqrt", "divide", "exponential_minus_one", "log_plus_one", *WIDE)  # fmt: skip


def sparse(t):
    """The first rows, where special values are, and some of the others."""
    return t if len(t) < 200 else torch.cat([t[:100], t[100::17]])


def refusal(root):
    try:
        check([root])
    except Unsupported as why:
        return str(why)
    return None


def agrees(root, given, zeros=True):
    """Bit for bit but for which NaN and, unless `zeros`, for the sign of zero."""
    (wanted,) = evaluate_nodes([root], given)
    got, wanted = (to_numpy(t, root.dtype) for t in (run_expression(root, list(given.values())), wanted))
    if not zeros and root.dtype.is_float:
        got, wanted = (np.where(x == 0, np.zeros_like(x), x) for x in (got, wanted))
    assert_same(got, wanted, *(to_numpy(t, n.dtype) for n, t in given.items() if t.ndim))


@pytest.mark.thin(4)
@pytest.mark.parametrize("source", ALL, ids=str)
def test_every_conversion_is_exact_or_refused_with_a_sentence(source):
    x = torch.cat([sparse(samples(source, t)) for t in ((BF16, F16, *FP8) if source is F32 else (None,))])
    p = param(0, x, source)
    roots = []
    for target, overflow in itertools.product(ALL, ("wrap", "saturate")):
        root = Node(Convert(target, overflow), p)
        why = refusal(root)
        if why is None:
            roots.append(root)
        else:
            assert str(target) in why or str(source) in why, why
    assert set(REACHED if source in REACHED else []) <= {r.dtype for r in roots}
    got = run_expressions(roots, [x]) if roots else []
    for root, g, w in zip(roots, got, evaluate_nodes(roots, {p: x}), strict=True):
        assert_same(to_numpy(g, root.dtype), to_numpy(w, root.dtype), to_numpy(x, source))


@pytest.mark.thin(4)
@pytest.mark.parametrize("target", [S8, U8, S4, U4, S16, U16, *WRITTEN, F16, BF16, F32], ids=str)
def test_quantize_is_exact(target):
    zeros = (None, int(target.min), 5, int(target.max)) if target.is_integer else (None,) * 4
    cases = [*zip((0.5, 1 / 3, 3e38, 1e-40), zeros, strict=True), (1 / 7, None)]
    for source, (scale, zero) in [*itertools.product((F32, S32), cases), (BF16, cases[1])]:
        x = sparse(samples(source, target))
        given = {param(0, x, source): x, param(1, torch.empty(()), F32): torch.tensor(scale)}
        if zero is not None:
            given[param(2, torch.empty(()), target)] = torch.tensor(zero, dtype=target.to_torch())
        agrees(Node(Quantize(target), *given), given, zeros=target.is_integer)


def test_quantize_with_a_scale_for_each_element_column_or_row():
    rng = np.random.default_rng(3)
    x = from_numpy(random_array(F32, (1537, 21), rng), F32)
    for shape, points in (((1537, 21), (21,)), ((21,), (1537, 1)), ((1537, 1), (1537, 21))):
        scale, zero = torch.rand(shape) + 0.01, torch.randint(0, 256, points, dtype=torch.uint8)
        given = {param(0, x, F32): x, param(1, scale, F32): scale, param(2, zero, U8): zero}
        agrees(Node(Quantize(U8), *given), given)


@pytest.mark.thin(4)
@pytest.mark.parametrize("source", [*FP8, S4, U4, S8, U8, S16, U16, S32, U32], ids=str)
def test_dequantize_is_exact(source):
    x = sparse(samples(source))
    zeros = (None, int(source.min), int(source.max)) if source.is_integer and source.bits <= 16 else (None,)
    for target, zero in itertools.product((F32, BF16, F16), zeros):
        given = {param(0, x, source): x, param(1, torch.empty(()), BF16): torch.tensor(0.3337).bfloat16()}
        if zero is not None:
            given[param(2, torch.empty(()), source)] = torch.tensor(zero).to(source.to_torch())
        agrees(Node(Dequantize(target), *given), given)


@pytest.mark.thin(4)
@pytest.mark.parametrize("fn", sorted(FUNCTIONS))
def test_every_function_is_right_on_every_type_or_refused(fn):
    done = 0
    for dtype in (d for d in (*REACHED, S64) if d.kind in FUNCTIONS[fn].kinds):
        rng = np.random.default_rng(11)
        ends, arity = specials(dtype), FUNCTIONS[fn].arity
        columns = [np.concatenate([c.ravel(), random_array(dtype, (400,), rng)]) for c in np.meshgrid(*[ends] * arity)]
        given = {param(i, table(c, dtype), dtype): table(c, dtype) for i, c in enumerate(columns)}
        root = Node(Map(fn), *given)
        why = refusal(root)
        if why is not None:
            assert str(dtype) in why, why
        elif fn in EXACT or not dtype.is_float:
            agrees(root, given, zeros=False)
            done += 1
        else:
            assert fn in CLOSE
            close(root, given)
            done += 1
    assert done, f"{fn} is refused for every type"


def close(root, given):
    """Tell which elements are within four roundings of the operand's and the result's size (`schedule/intervals.py`)."""
    wide = {param(i, t, F32): t.float() for i, t in enumerate(given.values())}  # torch's own f16 functions lose small numbers
    (wanted,) = evaluate_nodes([Node(Convert(root.dtype), Node(root.op, *wide))], wide)
    got = run_expression(root, list(given.values())).double()
    x = next(iter(given.values())).double()
    wanted, eps = wanted.double(), max(root.dtype.epsilon, 2.0**-23)
    tolerance = (
        4 * eps * (wanted.abs() + x.abs()) + 1e-37 + 2 * float(ml_dtypes.finfo(root.dtype.to_numpy()).smallest_subnormal)
    )
    same = (got == wanted) | (got.isnan() & wanted.isnan()) | ((got - wanted).abs() <= tolerance)
    if root.dtype in FP8:  # a neighbour where the value lies near the middle
        same |= (got - wanted).abs() <= root.dtype.epsilon * wanted.abs()
    at = (~same).nonzero()
    assert same.all(), (
        f"{len(at)} differ: of {[t[tuple(at[0])] for t in given.values()]} {got[tuple(at[0])]}, not {wanted[tuple(at[0])]}"
    )


def test_a_gelu_that_bf16_rounds_at_once_is_a_thirty_second_of_that_rounding_off():
    x = table(np.concatenate([np.linspace(-14, 14, 40_001), specials(F32)]).astype(np.float32), F32)
    p = param(0, x, F32)
    root = convert(map_("gelu", p), BF16)
    (exact,) = evaluate_nodes([Node(Map("gelu"), param(0, x.double(), F64))], {param(0, x.double(), F64): x.double()})
    got = run_expression(root, [x]).double()
    tolerance = (2.0**-8 + 2.0**-14) * exact.abs() + 1e-36  # far out, where the tail ends
    nearest = exact.bfloat16().double()
    assert ((got == nearest) | (got.isnan() & exact.isnan()) | ((got - exact).abs() <= tolerance)).all()
    inside = (x > -12) & x.isfinite()
    assert (got != nearest)[inside].float().mean() < 1 / 16


def acc_of(dtype, shape):
    return Node(Acc(TensorType(dtype, shape)))


@pytest.mark.thin(4)
@pytest.mark.parametrize("across", [False, True])
def test_stores_are_written_where_their_views_say(across):
    """Q, K and V of one product: each with its own scale and type, heads apart, keys transposed, and a residual."""
    batch, rows, heads, each = 2, 5, 3, 7
    width = heads * each
    acc = acc_of(S32, (batch, rows, 3 * width))
    value = torch.randint(-(2**20), 2**20, acc.shape, dtype=torch.int32)
    q_scale, k_scale = torch.rand(width), torch.rand(())
    residual = torch.randn(batch, rows, width).bfloat16()
    params = [param(0, q_scale, F32), param(1, k_scale, F32), param(2, residual, BF16)]
    parts = [convert(slice_(acc, 2, i * width, (i + 1) * width), F32) for i in range(3)]
    q = Node(Quantize(S8), map_("multiply", parts[0], params[0]), params[1])
    q = transpose(reshape(q, (batch, rows, heads, each)), (0, 2, 1, 3))
    k = convert(map_("multiply", parts[1], params[1]), F8E4M3FN, "saturate")
    k = transpose(reshape(k, (batch, rows, heads, each)), (0, 2, 3, 1))
    v = convert(map_("add", map_("multiply", parts[2], const(2.0**-20, F32)), convert(params[2], F32)), BF16)
    roots = [q, k, v]
    wanted = evaluate_nodes(roots, {acc: value, params[0]: q_scale, params[1]: k_scale, params[2]: residual})
    accesses = [of_store(r) for r in roots]
    got = run_expressions(roots, [q_scale, k_scale, residual], value, accesses, (4, 16), across)
    for g, w, root in zip(got, wanted, roots, strict=True):
        assert_same(to_numpy(g, root.dtype), to_numpy(w, root.dtype))


def test_a_selection_by_a_mask_and_a_mask_itself():
    acc = acc_of(F32, (9, 33))
    value, mask = torch.randn(9, 33), torch.rand(9, 33) < 0.5
    chosen = Node(Select(), param(0, mask, PRED), acc, const(-1.5, F32))
    over = map_("greater", chosen, const(0.25, F32))
    for root in (chosen, over, swap_last(map_("not", over))):
        (wanted,) = evaluate_nodes([root], {acc: value, param(0, mask, PRED): mask})
        (got,) = run_expressions([root], [mask], value, [of_store(root)], (16, 16))
        assert torch.equal(got, wanted)


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("scale", "to", "zero"), [(0.0217, U8, 131), (-3.5, S8, None), (1e30, F8E4M3FN, None), (1.0, S8, 1), (0.3, F16, None)]
)
def test_a_number_that_is_an_argument_gives_the_bits_that_a_literal_gives(scale, to, zero, monkeypatch):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [specials(F32), random_array(F32, (300,), rng), rng.standard_normal(300, np.float32) * np.float32(scale) * 99]
    )
    acc = Node(Acc(TensorType(F32, (1, len(x)))))
    value = map_("divide", map_("multiply", acc, const(scale, F32)), const(0.5, F32))
    value = map_("clamp", const(-3e5, F32), value, const(4e4, F32))
    point = [] if zero is None else [const(zero, to)]
    if to is F16:
        roots = [convert(map_("multiply", convert(acc, F16), const(scale, F16)), F32)]
    else:
        codes = Node(Quantize(to), value, const(scale, F32), *point)
        roots = [
            codes,
            Node(Dequantize(F32), codes, const(scale, F32), *point),
            Node(Quantize(to), acc, const(scale, F32), *point),
        ]
    given = torch.from_numpy(x).reshape(1, -1)
    as_arguments = run_expressions(roots, [], given)
    monkeypatch.setattr(Text, "number", lambda self, key, value: repr(value) if np.isfinite(value) else f"float('{value}')")
    for got, wanted, root in zip(as_arguments, run_expressions(roots, [], given), roots, strict=True):
        assert_same(to_numpy(got, root.dtype), to_numpy(wanted, root.dtype))


@pytest.mark.thin(4)
@pytest.mark.parametrize("scale", [0.0, float("nan"), 0.25])
def test_an_integer_over_a_scale_that_is_read_may_be_no_number(scale):
    x = torch.tensor([[0, 1, -7, 2**31 - 1]], dtype=torch.int32)
    acc, given = Node(Acc(TensorType(S32, (1, 4)))), param(0, torch.tensor(scale), F32)
    root = Node(Quantize(S8), map_("multiply", convert(acc, F32), const(0.5, F32)), given)
    (got,) = run_expressions([root], [torch.tensor(scale)], x)
    assert torch.equal(got, evaluate_nodes((root,), {acc: x, given: torch.tensor(scale)})[0])
