"""Operations that move elements, against NumPy and XLA; every type rule, good and bad."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from values import ALL, INTEGERS, assert_same, constant, random_array, run, value_of

from tilewright.dtype import BF16, F8E4M3FN, F8E5M2FNUZ, F16, F32, OPAQUE, PRED, S4, S8, S32, S64, U4, U8, U16, U64
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import broadcast, expand_dims, input_, items, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Broadcast, Call, Concat, Gather, Iota, Item, Pad, Reshape, Slice, Transpose
from tilewright.ir.types import TensorType, broadcast_shapes, normalize_axis

dtypes = st.sampled_from(ALL)
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=4).map(tuple)
seeds = st.integers(0, 1 << 30)


def array(d, shape, seed=0):
    return random_array(d, shape, np.random.default_rng(seed))


@given(dtypes, shapes, st.data())
def test_reshape_and_transpose(d, shape, data):
    x = array(d, shape)
    perm = data.draw(st.permutations(range(len(shape))))
    moved = run(Transpose(tuple(perm)), (x, d))
    assert_same(moved, x.transpose(perm))
    flat = data.draw(st.sampled_from([(x.size,), (1, x.size, 1), x.shape[::-1]]))
    assert_same(value_of(reshape(transpose(constant(x, d), perm), flat)), x.transpose(perm).reshape(flat))


@given(dtypes, shapes, st.data())
def test_slice(d, shape, data):
    x = array(d, shape)
    cuts = []
    for extent in shape:
        start = data.draw(st.integers(0, extent))
        cuts.append((start, data.draw(st.integers(start, extent)), data.draw(st.integers(1, 4))))
    got = run(Slice(*(tuple(c[i] for c in cuts) for i in range(3))), (x, d))
    assert_same(got, x[tuple(slice(*c) for c in cuts)])


def expand_of(shape, data):
    return (*data.draw(shapes), *(data.draw(st.sampled_from([d, 4])) if d == 1 else d for d in shape))


@given(dtypes, shapes, st.data())
def test_broadcast(d, shape, data):
    x, wide = array(d, shape), expand_of(shape, data)
    assert_same(run(Broadcast(wide), (x, d)), np.broadcast_to(x, wide))


padded_axes = st.tuples(st.sampled_from([0, 1, 2, 5]), st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 2))


@given(dtypes, st.lists(padded_axes, max_size=3))
def test_pad_is_xlas(d, axes):
    """Interior padding first, then edges, negative ones cropping."""
    shape = tuple(a[0] for a in axes)
    low, high, interior = (tuple(a[i] for a in axes) for i in (1, 2, 3))
    extents = [e + max(e - 1, 0) * i + lo + hi for e, lo, hi, i in axes]
    x, value = array(d, shape), array(d, (), 1)
    if any(e < 0 for e in extents):
        with pytest.raises(TypeMismatchError, match=r"pad crops more of .* than there is"):
            run(Pad(low, high, interior), (x, d), (value, d))
        return
    got = run(Pad(low, high, interior), (x, d), (value, d))
    assert got.shape == tuple(extents)
    assert_same(got, padded(x, value, low, high, interior))


def padded(x, value, low, high, interior):
    """StableHLO's definition, element by element: result[i] is x[j] where i = low + j * (interior + 1)."""
    shape = [d + max(d - 1, 0) * i + lo + hi for d, lo, hi, i in zip(x.shape, low, high, interior, strict=True)]
    out = np.full(shape, value, dtype=x.dtype)
    for j in np.ndindex(x.shape):
        i = tuple(lo + k * (s + 1) for k, lo, s in zip(j, low, interior, strict=True))
        if all(0 <= a < d for a, d in zip(i, shape, strict=True)):
            out[i] = x[j]
    return out


@pytest.mark.parametrize("d", [F32, S32, PRED, F16], ids=str)
def test_the_definition_of_pad_above_is_xlas(d):
    x, value = array(d, (3, 4)), array(d, (), 1)
    config = ((-1, 2, 1), (2, -3, 2))
    wanted = np.asarray(lax.pad(x, value, config))
    assert_same(padded(x, value, *zip(*config, strict=True)), wanted)


@given(dtypes, shapes.filter(bool), st.integers(1, 4), st.data())
def test_concat(d, shape, count, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    parts = []
    for i in range(count):
        own = list(shape)
        own[axis] = data.draw(st.sampled_from([0, 1, 3]))
        parts.append(array(d, tuple(own), i))
    assert_same(run(Concat(axis), *((p, d) for p in parts)), np.concatenate(parts, axis))


@given(dtypes, st.sampled_from([S8, S32, S64, U8, U16, U64, U4, S4]), st.data())
def test_gather(d, kind, data):
    shape = data.draw(shapes.filter(bool))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    extent = shape[axis]
    low = -extent if kind.is_signed else 0
    number = st.integers(low, extent - 1)
    x = array(d, shape)
    index_shape = data.draw(shapes.map(lambda s: s[:2])) if extent else (0, 2)
    index = np.array([data.draw(number) for _ in range(int(np.prod(index_shape)))], np.int64).reshape(index_shape)
    got = run(Gather(axis), (x, d), (index.astype(kind.to_numpy()), kind))
    assert_same(got, np.take(x, index, axis))


@given(dtypes, st.data())
def test_gather_of_elements_is_numpys(d, data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3).map(tuple))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    own = [data.draw(st.integers(0, e)) for e in shape]
    own[axis] = data.draw(st.integers(0, 4))
    number = st.integers(-shape[axis], shape[axis] - 1)
    index = np.array([data.draw(number) for _ in range(int(np.prod(own)))], np.int64).reshape(own)
    x = array(d, shape)
    cropped = x[tuple(slice(None) if a == axis % len(shape) else slice(e) for a, e in enumerate(own))]
    got = run(Gather(axis, elementwise=True), (x, d), (index, S64))
    assert_same(got, np.take_along_axis(cropped, index, axis))


@pytest.mark.parametrize("index", [3, -4])
@pytest.mark.parametrize("elementwise", [False, True])
def test_an_index_outside_is_an_error(index, elementwise):
    with pytest.raises(TypeMismatchError, match=r"gather -> f32\[1\] cannot be evaluated: .*"):
        run(Gather(0, elementwise), (np.zeros(3, np.float32), F32), (np.array([index]), S64))


@given(st.sampled_from([d for d in ALL if d is not PRED]), shapes.filter(bool), st.data())
def test_iota(d, shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    line = np.arange(shape[axis]).reshape([-1 if a == axis % len(shape) else 1 for a in range(len(shape))])
    assert_same(value_of(Node(Iota(d, shape, axis))), np.broadcast_to(line, shape).astype(d.to_numpy()))


def test_a_long_iota_wraps_or_rounds_as_convert_does():
    assert value_of(Node(Iota(S4, (20,), 0))).tolist() == [(i + 8) % 16 - 8 for i in range(20)]
    assert value_of(Node(Iota(U4, (20,), 0))).tolist() == [i % 16 for i in range(20)]
    assert value_of(Node(Iota(S8, (300,), 0))).tolist() == [(i + 128) % 256 - 128 for i in range(300)]
    with np.errstate(all="ignore"):
        for d in (F8E4M3FN, F8E5M2FNUZ, BF16, F16):
            wanted = np.arange(600).astype(np.float32).astype(d.to_numpy())
            assert_same(value_of(Node(Iota(d, (600,), 0))), wanted)
    with jax.enable_x64(True):
        assert_same(value_of(Node(Iota(BF16, (3, 300), 1))), np.asarray(lax.broadcasted_iota(BF16.to_numpy(), (3, 300), 1)))


@given(st.lists(shapes, max_size=3))
def test_shapes_broadcast_as_in_numpy(given_shapes):
    try:
        wanted = np.broadcast_shapes(*given_shapes)
    except ValueError:
        with pytest.raises(TypeMismatchError, match=r"shapes \[.*\] and \[.*\] do not broadcast together \(here\)"):
            broadcast_shapes(*given_shapes, where="here")
    else:
        assert broadcast_shapes(*given_shapes) == wanted


def test_short_spellings_drop_what_changes_nothing():
    x = input_("x", F32, (2, 3, 4))
    assert reshape(x, [2, 3, 4]) is transpose(x, [0, 1, 2]) is broadcast(x, [2, 3, 4]) is slice_(x, -1, 0, 4) is x
    assert swap_last(x).shape == (2, 4, 3)
    assert slice_(x, -2, 1, 3).op == Slice((0, 1, 0), (2, 3, 4), (1, 1, 1))
    assert expand_dims(input_("v", F32, (5,)), 1, 3).shape == (1, 5, 1)
    assert items(x) == [x]
    call = Node(Call("a", "b", "", (x.tensor, TensorType(S8, ()))), x)
    assert [i.type for i in items(call)] == [x.type, TensorType(S8, ())]
    assert normalize_axis(-1, 3, "here") == 2


def test_wrong_operands_are_refused():
    x, y, v = input_("x", F32, (2, 3)), input_("y", F32, (3,)), input_("v", F32, ())
    i, s = input_("i", S32, (4,)), input_("s", S8, ())
    call = Node(Call("a", "b", "", (x.tensor, y.tensor)), x)
    for node, message in (
        (lambda: Node(Reshape((7,)), x), r"f32\[2,3\] cannot be reshaped to \[7\]"),
        (lambda: Node(Reshape((-2, -3)), x), r"f32\[2,3\] cannot be reshaped to \[-2, -3\]"),
        (lambda: Node(Reshape((6,))), "reshape takes 1 operand, not 0"),
        (lambda: Node(Transpose((0,)), x), r"\[0\] is no permutation of the axes of f32\[2,3\]"),
        (lambda: Node(Transpose((0, 0)), x), r"\[0, 0\] is no permutation"),
        (lambda: Node(Transpose((0, -1)), x), r"\[0, -1\] is no permutation"),
        (lambda: transpose(x, (0,)), r"\[0\] is no permutation of the axes of f32\[2,3\]"),
        (lambda: swap_last(y), "is no permutation"),
        (lambda: Node(Slice((0,), (1,), (1,)), x), r"slice of f32\[2,3\] needs 2 starts, stops and steps"),
        (lambda: slice_(x, 1, 2, 4), r"slice \[2:4:1\] does not lie in an axis of 3 \(slice of f32\[2,3\]\)"),
        (lambda: slice_(x, 1, 2, 1), r"slice \[2:1:1\] does not lie"),
        (lambda: slice_(x, 1, -1, 3), r"slice \[-1:3:1\] does not lie"),
        (lambda: slice_(x, 2, 0, 1), r"axis 2 is not an axis of a tensor of rank 2 \(slice\)"),
        (lambda: Node(Slice((0, 0), (2, 3), (1, 0)), x), r"slice \[0:3:0\] does not lie"),
        (lambda: Node(Broadcast((2, 4)), x), r"shapes \[2, 3\] and \[2, 4\] do not broadcast together \(broadcast\)"),
        (lambda: Node(Broadcast((3,)), x), r"f32\[2,3\] does not broadcast to \[3\]"),
        (lambda: Node(Broadcast((1, 3)), x), r"f32\[2,3\] does not broadcast to \[1, 3\]"),
        (lambda: Node(Pad((0,), (0,), (0,)), y, s), r"pad of f32\[3\] takes one f32, not s8\[\]"),
        (lambda: Node(Pad((0,), (0,), (0,)), y, y), r"pad of f32\[3\] takes one f32, not f32\[3\]"),
        (lambda: Node(Pad((0,), (0,), (-1,)), y, v), r"pad of f32\[3\] needs 1 lows, highs and interiors"),
        (lambda: Node(Pad((0, 0), (0,), (0,)), y, v), "needs 1 lows, highs and interiors"),
        (lambda: Node(Pad((-2,), (-2,), (0,)), y, v), r"pad crops more of f32\[3\] than there is"),
        (lambda: Node(Pad((0,), (0,), (0,)), y), "pad takes 2 operands, not 1"),
        (lambda: Node(Concat(0)), "concat of nothing"),
        (lambda: Node(Concat(2), x, x), "axis 2 is not an axis of a tensor of rank 2"),
        (lambda: Node(Concat(0), v), "axis 0 is not an axis of a tensor of rank 0"),
        (lambda: Node(Concat(0), x, input_("z", F32, (2, 4))), r"concat along axis 0 of f32\[2,3\], f32\[2,4\]"),
        (lambda: Node(Concat(0), y, v), r"concat along axis 0 of f32\[3\], f32\[\]"),
        (lambda: Node(Concat(1), x, input_("z", F32, (2,))), r"concat along axis 1 of f32\[2,3\], f32\[2\]"),
        (lambda: Node(Concat(0), y, input_("z", F16, (3,))), r"concat along axis 0 of f32\[3\], f16\[3\]"),
        (lambda: Node(Gather(2), x, i), "axis 2 is not an axis of a tensor of rank 2"),
        (lambda: Node(Gather(0), x, y), r"gather takes integer indices, not f32\[3\]"),
        (lambda: Node(Gather(0, True), x, i), r"elementwise gather from f32\[2,3\] with indices s32\[4\]"),
        (
            lambda: Node(Gather(0, True), x, input_("j", S32, (1, 4))),
            r"elementwise gather .* with indices s32\[1,4\]",
        ),
        (lambda: Node(Gather(0), x), "gather takes 2 operands, not 1"),
        (lambda: Node(Iota(S32, (), 0)), "axis 0 is not an axis of a tensor of rank 0"),
        (lambda: Node(Iota(PRED, (2,), 0)), r"iota cannot give pred\[2\]"),
        (lambda: Node(Iota(OPAQUE, (2,), 0)), "iota cannot give opaque"),
        (lambda: Node(Iota(S32, (-1,), 0)), r"iota cannot give s32\[-1\]"),
        (lambda: Node(Iota(S32, (2,), 0), x), "iota takes 0 operands, not 1"),
        (lambda: Node(Item(0), x), r"item takes an operation with several results, not f32\[2,3\]"),
        (lambda: Node(Item(2), call), "result 2 of 2 wanted"),
        (lambda: Node(Item(-1), call), "result -1 of 2 wanted"),
        (lambda: Node(Item(0)), "item takes 1 operand, not 0"),
        (
            lambda: reshape(Node(Reshape((6,)), call), (6,)),
            r"reshape takes tensors, not the tuple \(.*\)\n  try: item",
        ),
        (lambda: call.shape, r"call has several results: \(f32\[2,3\], f32\[3\]\)\n  try: item\(index=…\) picks one"),
    ):
        with pytest.raises(TypeMismatchError, match=message):
            node()


@pytest.mark.parametrize("d", INTEGERS, ids=str)
def test_any_integer_type_can_index(d):
    x = np.arange(4, dtype=np.float32)
    assert run(Gather(0), (x, F32), (np.array([3, 0]).astype(d.to_numpy()), d)).tolist() == [3, 0]
