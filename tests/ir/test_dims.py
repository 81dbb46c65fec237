"""Open extents: arithmetic and comparisons against whole numbers, and graphs with them against graphs without."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compiler import optimise
from tilewright.dtype import F32, S64
from tilewright.errors import InputError, TypeMismatchError
from tilewright.ir.build import broadcast, concat, const, convert, extents, input_, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.dims import Dim, Scope, as_dim, named, solve
from tilewright.ir.evaluate import evaluate
from tilewright.ir.extent import Extent, bounds_of, extent_at
from tilewright.ir.graph import Graph, Node
from tilewright.ir.instance import dims_of, instance, values_for
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Const, Iota, LayerNorm, Pad, Reshape, Select, Slice, Softmax, gemm
from tilewright.ir.text import parse, print_with_literals
from tilewright.ir.types import TensorType
from tilewright.ir.verify import verify

BATCH, SEQ = Dim("batch", 1, 64), Dim("seq", 1, 512, 4)
VALUES = st.fixed_dictionaries({"batch": st.integers(1, 64), "seq": st.integers(1, 128).map(lambda k: 4 * k)})


def opened():
    """A scope, and its extents batch and seq."""
    scope = Scope()
    return scope, scope.extent(BATCH), scope.extent(SEQ)


@st.composite
def calculations(draw, depth=4):
    """A function from (batch, seq) to a whole number, made of sums, products, quotients, remainders and choices."""
    if depth == 0 or draw(st.booleans()):
        which = draw(st.sampled_from(["batch", "seq", "number"]))
        number = draw(st.integers(-3, 70))
        return {"batch": lambda b, s: b, "seq": lambda b, s: s, "number": lambda b, s: number}[which]
    one, two = draw(calculations(depth - 1)), draw(calculations(depth - 1))
    by = draw(st.integers(1, 16))
    return draw(
        st.sampled_from(
            [
                lambda b, s: one(b, s) + two(b, s),
                lambda b, s: one(b, s) - two(b, s),
                lambda b, s: one(b, s) * two(b, s),
                lambda b, s: one(b, s) // by,
                lambda b, s: one(b, s) % by,
                lambda b, s: -(-one(b, s) // by),
                lambda b, s: one(b, s) * s // s,
                lambda b, s: max(one(b, s), two(b, s)),
                lambda b, s: min(one(b, s), two(b, s)),
                lambda b, s: one(b, s) if one(b, s) < two(b, s) else by,
                lambda b, s: len(range(max(one(b, s), 0) % 50)),
            ]
        )
    )


@settings(max_examples=500)
@given(calculations(), VALUES)
def test_what_is_computed_with_extents_is_what_numbers_give_where_all_guards_hold(calculation, values):
    scope, b, s = opened()
    found = calculation(b, s)
    wanted = calculation(values["batch"], values["seq"])
    if not scope.failing(values) and all(g.holds(values) for g in scope.assumed):
        assert extent_at(found, values) == wanted
        low, high = bounds_of(found)
        assert low <= wanted <= high
    assert extent_at(found, scope.hints) == calculation(scope.hints["batch"], scope.hints["seq"])
    assert not scope.failing(scope.hints)


@settings(max_examples=300)
@given(calculations(), calculations(), VALUES)
def test_a_comparison_is_right_wherever_its_guards_hold(one, two, values):
    scope, b, s = opened()
    x, y = one(b, s), two(b, s)
    answers = (x == y, x < y, x >= y)
    assumed = all(g.holds(values) for g in scope.assumed)
    if scope.failing(values) or not assumed or extent_at(x, values) == extent_at(y, values):
        return  # that two extents differ is taken for granted
    a, b = (f(values["batch"], values["seq"]) for f in (one, two))
    assert answers == (a == b, a < b, a >= b)


@settings(max_examples=500)
@given(calculations(2), calculations(2), st.integers(0, 9), st.integers(0, 2).map(lambda k: 4 * k))
def test_divisors_may_be_negative_or_be_zero_for_some_values(one, two, batch, seq):
    scope = Scope()
    b, s = scope.extent(Dim("batch", 0, 9)), scope.extent(Dim("seq", 0, 8, 4))
    values = {"batch": batch, "seq": seq}
    try:
        found = divmod(one(b, s), two(b, s))
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            divmod(*(f(*(scope.hints[n] for n in values)) for f in (one, two)))
        return
    if scope.failing(values) or not all(g.holds(values) for g in (*scope.assumed, *scope.differing)):
        return
    wanted = divmod(one(batch, seq), two(batch, seq))
    assert tuple(extent_at(x, values) for x in found) == wanted
    assert all(low <= x <= high for (low, high), x in zip(map(bounds_of, found), wanted, strict=True))


def test_numbers_of_other_kinds_leave_guards():
    for of in (lambda n: n == 7.0, lambda n: n in (7.0,), lambda n: n**-1, lambda n: round(n, -1)):
        scope = Scope().expect({"n": 7})
        n = scope.extent(Dim("n", 1, 100))
        assert of(n) == of(7)
        assert "n == 7" in map(str, scope.guards)
    assert n != 7.5
    assert n**2 == n * n


def test_what_bounds_and_divisibility_decide_leaves_no_guard():
    scope, b, s = opened()
    assert b < 65
    assert b * s * 3 != b * s * 2
    assert b * s * 768 // (b * 12) == s * 64
    assert s % 4 == 0
    assert s % 2 == 0
    assert s * 2 != 7
    assert 4 * s + 2 != 4 * b + 1
    assert (s * b + b) // (s + 1) == b
    assert -1 not in (b, s)
    assert b != 1
    assert b > 1
    assert b * s < b * s * s
    assert not scope.guards


def test_what_needs_the_number_itself_is_guarded():
    scope, b, s = opened()
    assert len(range(b)) == scope.hints["batch"]
    assert [str(g) for g in scope.guards] == [f"batch == {scope.hints['batch']}"]
    assert torch.zeros(s).shape[0] == scope.hints["seq"]
    assert scope.failing({"batch": scope.hints["batch"], "seq": scope.hints["seq"] + 4})
    assert s < 400
    assert "seq < 400" in map(str, scope.guards)
    assert scope.failing({**scope.hints, "seq": 400})


def test_extents_that_agree_by_chance_are_taken_to_differ_but_for_none():
    scope = Scope().expect({"n": 31})
    n = scope.extent(Dim("n", 0, 100))
    assert n != 64
    assert not scope.guards
    assert [str(d) for d in scope.differing] == ["n != 64"]
    assert n != 0
    assert "n != 0" in map(str, scope.guards)


def test_hints_are_primes_unlike_each_other_and_a_dim_of_one_value_is_a_number():
    scope = Scope()
    a, b, c = (scope.extent(Dim(x, 1, 4096)) for x in "abc")
    hints = [e.hint for e in (a, b, c)]
    assert len({*hints}) == 3
    assert all(h % p for h in hints for p in range(2, math.isqrt(h) + 1))
    assert scope.extent(Dim("d", 5, 7, 3)) == 6
    assert type(scope.extent(Dim("e", 3, 3))) is int


def test_what_is_no_dim_is_refused():
    with pytest.raises(InputError, match="no extent lies from 5 to 3"):
        Dim("n", 5, 3)
    with pytest.raises(InputError, match="no extent lies from 5 to 7 in steps of 4"):
        Dim("n", 5, 7, 4)
    with pytest.raises(InputError, match="'f32' cannot name a dim"):
        Dim("f32")
    with pytest.raises(InputError, match="gives no bounds"):
        as_dim("n", "many")
    with pytest.raises(InputError, match=r"it is given as n 1\.\.4 and as n 1\.\.5"):
        scope = Scope()
        scope.extent(Dim("n", 1, 4))
        scope.extent(Dim("n", 1, 5))
    assert as_dim("a b", (1, 8, 2)) == Dim("a_b", 1, 8, 2)
    assert as_dim("n", 8) == Dim("n", 1, 8)


def test_extents_of_two_readings_do_not_mix():
    _, b, _ = opened()
    _, other, _ = opened()
    with pytest.raises(InputError, match="extents of two readings meet"):
        _ = b + other


def test_shapes_say_what_dims_are():
    _, b, s = opened()
    assert solve([("x", (b, s + 1), (3, 9)), ("y", (b * s,), (24,))]) == {"batch": 3, "seq": 8}
    assert named(b) == "batch"
    assert named(b * 2) is None
    with pytest.raises(InputError, match=r"axis 0 is 24, and batch\*seq is 32 here"):
        solve([("x", (b, s), (4, 8)), ("y", (b * s,), (24,))])
    with pytest.raises(InputError, match=r"axis 1 is 6, outside seq 1\.\.512 multiple_of=4"):
        solve([("x", (b, s), (4, 6))])
    with pytest.raises(InputError, match="axis 0, batch\\*seq, leaves batch, seq open"):
        solve([("y", (b * s,), (24,))])
    with pytest.raises(InputError, match="axis 0 is 5, the program has 7"):
        solve([("y", (7,), (5,))])


HIDDEN, HEADS = 8, 2
_weight = torch.arange(HIDDEN * HIDDEN, dtype=torch.float32).reshape(HIDDEN, HIDDEN).sin()
WEIGHT = Node(Const(Literal(TensorType(F32, (HIDDEN, HIDDEN)), _weight)))
STEPS = {
    "heads": lambda x, b, s: reshape(
        transpose(reshape(x, (b, s, HEADS, HIDDEN // HEADS)), (0, 2, 1, 3)), (b * HEADS, s * HIDDEN // HEADS)
    ),
    "product": lambda x, b, s: reshape(gemm(reshape(x, (b * s, HIDDEN)), WEIGHT), (b, s, HIDDEN)),
    "attention": lambda x, b, s: gemm(Node(Softmax(2), gemm(x, transpose(x, (0, 2, 1)))), x),
    "causal": lambda x, b, s: gemm(
        Node(
            Softmax(2),
            Node(
                Select(),
                map_("greater_equal", Node(Iota(S64, (s, s), 0)), Node(Iota(S64, (s, s), 1))),
                gemm(x, transpose(x, (0, 2, 1))),
                const(-1e30, F32),
            ),
        ),
        x,
    ),
    "norm": lambda x, b, s: Node(
        LayerNorm(-1, 1e-5), x, broadcast(const(2.0, F32), (HIDDEN,)), broadcast(const(1.0, F32), (HIDDEN,))
    ),
    "tail": lambda x, b, s: concat([slice_(x, 1, 1, s), slice_(x, 1, 0, 1)], 1),
    "half": lambda x, b, s: concat([slice_(x, 1, s // 2, s), slice_(x, 1, 0, s // 2)], 1),
    "pad": lambda x, b, s: slice_(Node(Pad((0, 2, 0), (0, s, 0), (0, 0, 0)), x, const(0.5, F32)), 1, 1, s + 1),
    "mean": lambda x, b, s: map_(
        "subtract", x, map_("divide", reduce_("add", x, [1], keepdims=True), convert(extents([s], single=True), F32))
    ),
    "place": lambda x, b, s: map_("add", x, reshape(Node(Iota(F32, (s,), 0)), (1, s, 1))),
    "flat": lambda x, b, s: reshape(map_("tanh", reshape(x, (b * s * HIDDEN,))), (b, s, HIDDEN)),
}


def program(names, b, s):
    """A graph of these steps, one after the other."""
    x = y = input_("x", F32, (b, s, HIDDEN))
    for name in names:
        y = STEPS[name](y, b, s)
        y = reshape(y, (b, s, HIDDEN))
    return Graph("steps", (x,), (y,), ("y",))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 9))
def test_an_instance_is_the_graph_read_at_those_extents_before_rules_and_equal_after(names, b, s):
    scope = Scope()
    graph = verify(program(names, scope.extent(Dim("b", 1, 64)), scope.extent(Dim("s", 1, 99))))
    values = {"b": b, "s": s}
    assert values_for([("x", graph.inputs[0].tensor)], {"x": (b, s, HIDDEN)}, "g") == values
    plain = program(names, b, s)
    if not scope.failing(values):
        assert verify(instance(graph, values)).outputs[0].type == plain.outputs[0].type
    fast = optimise(graph)
    if scope.failing(values):
        assert s <= 2 or {"causal", "attention", "half"} & {*names}, list(map(str, scope.failing(values)))
        return
    x = torch.randn(b, s, HIDDEN, generator=torch.Generator().manual_seed(0))
    (wanted,) = evaluate(plain, [x])
    for g in (instance(graph, values), instance(fast, values)):
        (found,) = evaluate(verify(g), [x])
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_a_text_with_dims_is_read_back(name):
    scope = Scope()
    graph = program([name], scope.extent(Dim("b", 1, 64)), scope.extent(Dim("s", 1, 99)))
    text, literals = print_with_literals(graph)
    again = parse(text, literals, scope)
    assert again.outputs[0] is graph.outputs[0]
    apart = parse(text, literals)
    assert dims_of(apart).dims == scope.dims
    assert print_with_literals(apart, dict(literals))[0] == text


def test_a_guard_is_read_back_and_a_text_that_has_none_such_refused():
    text = """graph "g" {
  dim n low=2 high=9 multiple_of=2 hint=6
  guard n*2 >= 8
  %0 = input label="x" type=f32[n,(n div 4)] : f32[n,(n div 4)]
  return "y" %0
}
"""
    graph = parse(text)
    scope = dims_of(graph)
    assert scope.hints == {"n": 6}
    assert scope.dims == {"n": Dim("n", 2, 9, 2)}
    assert [str(g) for g in scope.guards] == ["n*2 >= 8"]
    for wrong, why in (
        ("[n,(n div 4)]", "[m]"),
        ("guard n*2 >= 8", "guard n*2"),
        ("low=2", "low=20"),
        ("n div 4", "n div 0"),
    ):
        with pytest.raises(InputError, match=r"a dim wanted|>= wanted|no extent lies|may divide by nothing"):
            parse(text.replace(wrong, why))


def test_extents_as_numbers_are_a_constant_once_they_are_known():
    _scope, b, s = opened()
    node = extents([b, s * 2, 3])
    assert isinstance(node.op.values[0], Extent)
    graph = Graph("g", (input_("x", F32, (b, s)),), (node,), ("n",))
    (found,) = evaluate(instance(graph, {"batch": 2, "seq": 8}), [torch.zeros(2, 8)])
    assert found.tolist() == [2, 16, 3]
    assert instance(graph, {"batch": 2, "seq": 8}).outputs[0] is const(torch.tensor([2, 16, 3]))


def test_what_does_nothing_for_these_extents_is_left_out():
    _scope, b, s = opened()
    x = input_("x", F32, (b, s))
    y = Node(Slice((0, 0), (b, 4), (1, 1)), Node(Reshape((b, s)), x))
    graph = Graph("g", (x,), (y,), ("y",))
    made = instance(graph, {"batch": 2, "seq": 4})
    assert made.outputs[0] is made.inputs[0]


def test_extents_of_other_terms_that_are_equal_broadcast_together():
    """Halves of an extent, one rounded up: equal where it is even, which a guard says."""
    scope = Scope().expect({"n": 8})
    n = scope.extent(Dim("n", 1, 64))
    x = input_("x", F32, (n, 4))
    halves = slice_(x, 0, 0, n // 2), slice_(x, 0, n // 2, n)
    assert map_("add", *halves).shape == (n // 2, 4)
    assert not scope.failing({"n": 12}) and scope.failing({"n": 9})
    with pytest.raises(TypeMismatchError, match="do not broadcast together"):
        map_("add", x, slice_(x, 0, 0, n // 2))


def test_common_factors_decide_and_a_strict_scope_guards_what_it_takes_to_differ():
    scope, batch, seq = opened()
    assert seq * 8 != 8
    assert seq * 12 <= batch * seq * 12
    assert not scope.guards
    assert not scope.differing
    strict = Scope(strict=True).expect({"batch": 5, "seq": 20})
    batch, seq = strict.extent(BATCH), strict.extent(SEQ)
    assert seq != 16
    assert [str(g) for g in strict.guards] == ["seq != 16"]
    assert strict.failing({"batch": 1, "seq": 16})
