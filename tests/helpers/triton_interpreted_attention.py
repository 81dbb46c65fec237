"""Generated attention in Triton's interpreter against the oracle: run by tests/candidates/triton/test_interpreted.py."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from attentions import SHAPES, attention, quantised
from triton.runtime import interpreter
from triton_map import in_memory, scalars

from tilewright.candidates.triton.attention.heads import Rounded, heads_of
from tilewright.candidates.triton.attention.kernel import TileConfig, kernel_text, padded_extent, sources_of
from tilewright.candidates.triton.runtime.module import module
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED, S8, U8
from tilewright.ir.build import broadcast, const, input_, map_, reshape, slice_, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Attention, Dequantize, Param, Quantize
from tilewright.ir.types import TensorType
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

NATIVE = frozenset({"f8e4m3fn", "f8e5m2"})
WAYS = ("held", "twice")


def _tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
    """The interpreter makes bounds of loops of arrays of one element, which NumPy 2.4 no longer takes for numbers."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


def _dot(self, a, b, d, precision, imprecise, dot=interpreter.InterpreterBuilder.create_dot):
    """The interpreter multiplies the bits of bf16."""
    a, b = (_widened(x) if x.dtype.scalar.name == "bf16" else x for x in (a, b))
    return dot(self, a, b, d, precision, imprecise)


def _widened(x):
    wide = (x.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, interpreter.tl.float32)


def _converted(given, source, target, rounding, convert=interpreter._convert_float):
    """The interpreter drops the bits that fp8 has no room for; hardware rounds, and holds what is too large."""
    if (source.name, target.name) == ("fp32", "fp8e4nv"):
        held = torch.from_numpy(np.ascontiguousarray(given)).clamp(-448, 448)
        return held.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return convert(given, source, target, rounding)


interpreter._convert_float = _converted
interpreter._patch_lang_tensor = _tensor
interpreter.InterpreterBuilder.create_dot = _dot


def run(problem, sources, point, fp8=NATIVE):
    heads = heads_of(problem, fp8)
    results = []
    for t in problem.outputs:
        bits = torch.full((t.size_bytes,), 0xFF, dtype=torch.uint8)
        results.append(bits.view(t.dtype.to_torch())[: t.elements].reshape(t.shape))
    given = [in_memory(sources[i]) for i in sources_of(heads)]
    grid = heads.batch * heads.heads * -(-heads.queries // point.tile_m)
    written = kernel_text(heads, point, fp8)
    module(written.text).kernel[(grid,)](*given, *map(in_memory, results), *scalars(written.numbers))
    return results


def right(node, ways=("online",), sizes=((16, 16), (32, 16)), fp8=NATIVE, sources=None):
    problem = problem_of(node)
    sources = sources or random_sources(problem)
    expected = expect(problem, sources)
    for way, (tile_m, tile_n) in itertools.product(ways, sizes):
        why = check(problem, expected, run(problem, sources, TileConfig(tile_m, tile_n, 4, 1, way, "ieee"), fp8))
        assert why is None, f"{problem} {way} {tile_m} {tile_n}: {why}"


@pytest.mark.thin(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("causal", "dtype"), [("no", BF16), ("upper", F16), ("lower", F32), ("lower", F16)])
def test_every_shape_and_type(shape, causal, dtype):
    right(attention(shape, dtype, causal=causal, zero_masked_rows=True), sizes=((16, 16),))


@pytest.mark.thin(4)
@pytest.mark.parametrize("causal", ["no", "lower"])
def test_all_scores_of_a_row_may_be_held_at_once(causal):
    right(attention(SHAPES[1], F16, causal=causal), ways=("held",))


@pytest.mark.thin(4)
@pytest.mark.parametrize("mask", [PRED, F32, BF16], ids=str)
@pytest.mark.parametrize("spread", [(0, 0, 0, 1), (1, 0, 1, 1), (0, 1, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0)], ids=str)
def test_masks_of_every_broadcast_shape(mask, spread):
    shape = SHAPES[1]
    extents = (shape[0], shape[1], shape[3], shape[4])
    given = tuple(d if full else 1 for d, full in zip(extents, spread, strict=True))
    right(attention(shape, F16 if sum(spread) % 2 else F32, mask=(mask, given), causal="lower"), sizes=((32, 16),))


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("way", ["online", "held"])
def test_rows_that_see_nothing_and_values_that_are_no_numbers(dtype, zero, way):
    node = attention((1, 2, 1, 3, 5, 8, 4), dtype, mask=(PRED, (1, 1, 3, 5)), zero_masked_rows=zero)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s.shape, generator=generator).to(dtype.to_torch()) for s in node.src[:3])
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[0, 0, 1] = False  # the second query sees nothing
    q[0, 0, 0, 0], k[0, 1, 2, 3], v[0, 1, 4, 0] = float("nan"), float("inf"), float("nan")
    sources = [q, k, v, mask]
    (got,) = run(problem_of(node), sources, TileConfig(16, 16, 4, 1, way, "ieee"))
    wanted = evaluate_nodes((node,), dict(zip(node.src, sources, strict=True)))[0]
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.allclose(got, wanted, atol=2e-3, equal_nan=True)


def test_a_row_that_a_float_mask_hides_whole_is_what_the_oracle_says():
    for lowest in (float("-inf"), torch.finfo(torch.float32).min):
        node = attention((1, 1, 1, 3, 20, 8, 4), F16, mask=(F32, (1, 1, 3, 20)))
        sources = random_sources(problem_of(node))
        sources[3][0, 0, 1] = lowest
        (got,) = run(problem_of(node), sources, TileConfig(16, 16, 4, 1, "online", "ieee"))
        wanted = evaluate_nodes((node,), dict(zip(node.src, sources, strict=True)))[0]
        assert torch.allclose(got, wanted, atol=2e-3, equal_nan=True)


@pytest.mark.thin(4)
@pytest.mark.parametrize("way", WAYS)
def test_codes_are_rounded_where_the_graph_rounds(way):
    node = quantised((2, 3, 1, 20, 37, 16, 24))
    heads = heads_of(problem_of(node), NATIVE)
    assert heads.mma_dtype is F16 and isinstance(heads.on_scores, Rounded) and isinstance(heads.on_weights, Rounded)
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randint(-128, 128, s.shape, dtype=torch.int8, generator=generator) for s in node.src]
    right(node, (way,), sources=sources)


def coded(dtype, zero, shape=(2, 3, 1, 20, 37, 16, 24), mask=True):
    """8-bit codes of any type in, with a zero point or without, and out."""
    batch, heads, _, queries, keys, depth, width = shape
    types = [TensorType(dtype, (batch, heads, n, d)) for n, d in ((queries, depth), (keys, depth), (keys, width))]
    src = [input_(name, t.dtype, t.shape) for name, t in zip("qkv", types, strict=True)]
    point = [] if zero is None else [const(zero, dtype)]
    operands = [Node(Dequantize(F32), Node(Param(i, t)), const(0.02, F32), *point) for i, t in enumerate(types)]
    if mask:
        src.append(input_("m", F32, (batch, 1, 1, keys)))
        operands.append(Node(Param(3, src[3].tensor)))
    inner = Node(Acc(TensorType(F32, (batch, heads, queries, keys))))
    largest = float(dtype.max)

    def rounded(scale, zero=None):
        more = [] if zero is None else [const(zero, dtype)]
        return Node(Dequantize(F32), Node(Quantize(dtype), inner, const(scale, F32), *more), const(scale, F32), *more)

    acc = Node(Acc(TensorType(F32, (batch, heads, queries, width))))
    store = Node(Quantize(dtype), acc, const(4 / largest, F32), *point)
    store = reshape(transpose(store, (0, 2, 1, 3)), (batch, queries, heads * width))
    stores = (store, transpose(map_("tanh", acc), (0, 1, 3, 2)))
    return Node(Attention(0.3, "no", True, tuple(operands), rounded(9 / largest, zero), rounded(1 / largest), stores), *src)


@pytest.mark.thin(4)
@pytest.mark.parametrize(("dtype", "zero"), [(S8, None), (S8, -7), (U8, 128), (F8E4M3FN, None)])
@pytest.mark.parametrize("way", WAYS)
def test_codes_of_every_type(dtype, zero, way):
    node = coded(dtype, zero)
    heads = heads_of(problem_of(node), NATIVE)
    assert heads.mma_dtype is F16 and isinstance(heads.on_scores, Rounded) and isinstance(heads.on_weights, Rounded)
    right(node, (way,), sizes=((16, 16),))


@pytest.mark.thin(4)
@pytest.mark.parametrize(("dtype", "codes"), [(F16, F8E4M3FN), (BF16, F8E4M3FN), (F16, U8)], ids=str)
@pytest.mark.parametrize("values", [True, False])
def test_codes_are_multiplied_as_they_are_where_nothing_is_rounded_on_the_way(dtype, codes, values):
    plain = attention((2, 3, 1, 20, 37, 16, 24), dtype, causal="upper")
    zero = [const(120, codes)] if codes is U8 else []
    src, operands = list(plain.src), []
    for i, s in enumerate(plain.src):
        kind = codes if values or i < 2 else dtype
        src[i] = input_("qkv"[i], kind, s.shape)
        leaf = Node(Param(i, src[i].tensor))
        operands.append(leaf if kind is dtype else Node(Dequantize(dtype), leaf, const(0.02, F32), *zero))
    node = Node(replace(plain.op, operands=tuple(operands)), *src)
    heads = heads_of(problem_of(node), NATIVE)
    assert heads.mma_dtype is dtype and heads.q.codes is not None and (heads.v.codes is not None) == values
    right(node, sizes=((16, 16),))


def test_fp8_that_the_hardware_does_not_convert_is_taken_apart():
    node = coded(F8E4M3FN, None)
    assert heads_of(problem_of(node), frozenset()).mma_dtype is F32
    right(node, ("twice",), sizes=((16, 16),), fp8=frozenset())


def test_operands_that_are_expressions():
    """Scaled by channel and turned: no short form, and nothing but zeros beside a depth that is no power of two."""
    shape = (1, 2, 1, 9, 21, 20, 12)
    plain = attention(shape)
    q, k, v = (Node(Param(i, s.tensor)) for i, s in enumerate(plain.src))
    k = map_("add", map_("multiply", k, const(0.5, F32)), const(1.0, F32))
    v = transpose(transpose(map_("subtract", v, const(2.0, F32)), (0, 1, 3, 2)), (0, 1, 3, 2))
    right(Node(Attention(0.125, "no", False, (q, k, v)), *plain.src))


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 8, 16, 8, 1), (2, 2, 1, 8, 1, 16, 16), (1, 1, 1, 1, 9, 1, 5), (1, 1, 1, 1, 1, 1, 1)], ids=str
)
def test_extents_of_one_fill_a_tile(shape):
    right(attention(shape, F16, causal="lower"), sizes=((16, 16),))


def test_operands_repeated_along_their_rows_or_columns_fill_a_tile():
    shape = (1, 2, 1, 9, 16, 16, 16)
    plain = attention(shape)
    q, k, v = (Node(Param(i, s.tensor)) for i, s in enumerate(plain.src))
    k, v = broadcast(slice_(k, 3, 2, 3), k.shape), broadcast(slice_(slice_(v, 1, 1, 2), 2, 3, 4), v.shape)
    right(Node(Attention(0.125, "no", False, (q, k, v)), *plain.src), sizes=((16, 16),))


def test_sizes_fill_matrix_instructions():
    assert [padded_extent(n) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
