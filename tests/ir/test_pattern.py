"""Patterns, and the driver that applies rules: exact counts of readers, convergence, loops named, linear cost."""

import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import feeds, graphs
from values import to_numpy
from work import counting

from tilewright.dtype import F32, F64
from tilewright.errors import RewriteError, TypeMismatchError
from tilewright.ir.build import const, convert, input_, map_, reshape, transpose
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node, Users, toposort
from tilewright.ir.ops import Convert, Gemm, Input, Map, Reduce, Reshape, Softmax, Transpose, gemm
from tilewright.ir.pattern import (
    FREE_STEPS,
    Match,
    Pass,
    Pat,
    Place,
    Rewriting,
    Rule,
    Trace,
    discover,
    graph_pass,
    rewrite,
    rule,
)
from tilewright.ir.verify import verify

x, y = input_("x", F32, (2, 3)), input_("y", F32, (2, 3))


def fn(called, /, *src, **kw):
    """A pattern for a map of one function."""
    return Pat(Map, src or None, where=lambda n: n.op.fn == called, **kw)


def graph_of(*outputs, origins=None):
    inputs = [n for n in toposort(outputs) if isinstance(n.op, Input)]
    return Graph("g", tuple(inputs), outputs, tuple(map(str, range(len(outputs)))), origins or {})


def made(pattern, apply, name="a_rule"):
    return Rule(name, "test", pattern, apply, "")


@rule(fn("negate", fn("negate", Pat(name="x"))), stage="test")
def drop_double_negation(m: Match) -> Node | None:
    """negate(negate(x)) -> x. Exact: yes."""
    return m["x"]


@rule(fn("add", Pat(name="x"), Pat(name="x")), stage="test")
def double(m: Match) -> Node | None:
    """add(x, x) -> multiply(x, 2). Exact: yes."""
    return map_("multiply", m["x"], const(2.0, m["x"].dtype))


# -- patterns


def captures(pattern, node):
    found = {}
    return found if pattern.match(node, found) else None


def test_a_pattern_matches_ops_sources_conditions_and_captures():
    node = map_("add", map_("tanh", x), y)
    assert captures(Pat(), node) == {} and captures(Pat(Map), node) == {} and captures(Pat((Gemm, Map)), node) == {}
    assert captures(Pat(Reshape), node) is None and captures(Pat((Gemm, Reshape)), node) is None
    assert captures(Pat(Map, (Pat(name="a"), Pat(name="b")), name="c"), node) == {"a": node.src[0], "b": y, "c": node}
    assert captures(Pat(Map, (Pat(),)), node) is None and captures(Pat(Map, ()), node) is None
    assert captures(Pat(Map, (Pat(Map, name="a"), ...)), node) == {"a": node.src[0]}
    assert captures(Pat(Map, (...,)), node) == {} and captures(Pat(Map, (Pat(), Pat(), Pat(), ...)), node) is None
    assert captures(Pat(where=lambda n: n.op.fn == "sine"), node) is None
    assert captures(fn("add", fn("tanh", Pat(Input, name="i")), Pat(Input)), node) == {"i": x}
    assert captures(fn("add", Pat(name="a"), Pat(name="a")), node) is None
    assert captures(fn("add", Pat(name="a"), Pat(name="a")), map_("add", x, x)) == {"a": x}


def test_three_dots_may_only_stand_last():
    with pytest.raises(TypeError, match=r"`\.\.\.` may only stand last in a pattern's sources"):
        captures(Pat(Map, (..., Pat())), map_("add", x, y))


# -- the driver


def test_rules_fire_until_none_does_and_the_trace_says_so():
    node = map_("negate", map_("negate", map_("negate", map_("negate", map_("add", x, x)))))
    trace = Trace()
    after = rewrite(graph_of(node), [drop_double_negation, double], trace)
    assert after.outputs == (map_("multiply", x, const(2.0, F32)),)
    assert [s.rule for s in trace.steps] == ["double", "drop_double_negation", "drop_double_negation"]
    assert trace.steps[0].before is map_("add", x, x) and trace.steps[0].after is after.outputs[0]
    assert {s.stage for s in trace.steps} == {"test"} and trace.sweeps == 2
    assert drop_double_negation.doc == "negate(negate(x)) -> x. Exact: yes."


def test_nothing_to_do_gives_the_same_nodes():
    graph = graph_of(map_("tanh", x), x)
    assert rewrite(graph, [drop_double_negation]) == graph and rewrite(graph, []) == graph


def test_a_rule_fires_on_what_a_rule_made():
    split = made(fn("exponential"), lambda m: map_("negate", map_("negate", map_("tanh", m.node.src[0]))), "split")
    assert rewrite(graph_of(map_("exponential", x)), [split, drop_double_negation]).outputs == (map_("tanh", x),)


def test_outputs_and_shared_nodes_are_rewritten_everywhere():
    twice = map_("negate", map_("negate", map_("tanh", x)))
    after = rewrite(graph_of(twice, map_("add", twice, y), twice), [drop_double_negation])
    assert after.outputs == (map_("tanh", x), map_("add", map_("tanh", x), y), map_("tanh", x))


def single(name, wanted=1):
    """negate(f(x)) -> f(negate(x)), if nothing else reads f(x)."""

    def apply(m):
        if m.users.count(m.node.src[0]) != wanted:
            m.refuse(f"read {m.users.count(m.node.src[0])} times")
            return None
        return map_("tanh", map_("sine", m.node.src[0].src[0]))

    return made(fn("negate", fn("tanh")), apply, name)


def test_an_output_counts_as_a_reader():
    inner = map_("tanh", x)
    trace = Trace()
    assert rewrite(graph_of(map_("negate", inner), inner), [single("one")], trace).outputs[0].op.fn == "negate"
    assert [(n.rule, n.why, n.node) for n in trace.near_misses] == [("one", "read 2 times", map_("negate", inner))]
    assert rewrite(graph_of(map_("negate", inner)), [single("one")]).outputs[0].op.fn == "tanh"


def test_a_slot_read_twice_counts_twice():
    inner = map_("tanh", x)
    users = graph_of(map_("add", inner, inner)).users()
    assert users.count(inner) == 2 and len(users[inner]) == 1 and not users.only(inner)


def test_near_misses_are_of_the_final_graph_only():
    """The first sweep refuses at a node that the second no longer has."""
    drop = made(fn("abs"), lambda m: m.node.src[0], "drop_abs")

    def refuse(m):
        m.refuse("only looking")

    look = made(fn("tanh"), refuse, "look")
    trace = Trace()
    after = rewrite(graph_of(map_("tanh", map_("abs", x)), map_("tanh", map_("tanh", y))), [look, drop], trace)
    alive = set(after.nodes())
    assert {n.node for n in trace.near_misses} == {map_("tanh", x), map_("tanh", y), map_("tanh", map_("tanh", y))} <= alive
    assert len(trace.near_misses) == 3


def test_a_rule_that_breaks_the_type_is_named_and_so_is_the_place():
    wrong = made(fn("tanh"), lambda m: convert(m.node, F64), "widen_wrongly")
    graph = graph_of(map_("tanh", x), origins={map_("tanh", x): "layer.1/Tanh"})
    with pytest.raises(RewriteError, match=r"rule widen_wrongly changes the type: f32\[2,3\] -> f64\[2,3\] \(layer.1/Tanh\)"):
        rewrite(graph, [drop_double_negation, wrong])
    with pytest.raises(RewriteError, match=r"rule reshape_wrongly changes the type: f32\[2,3\] -> f32\[6\] \(map\)"):
        rewrite(graph_of(map_("tanh", x)), [made(fn("tanh"), lambda m: reshape(m.node, (6,)), "reshape_wrongly")])


@pytest.mark.parametrize(
    ("apply", "message", "cause"),
    [
        (
            lambda m: Node(Softmax(9), m.node),
            "rule broken failed: axis 9 is not an axis",
            TypeMismatchError,
        ),
        (lambda m: m["nothing"], "rule broken failed: KeyError: 'nothing'", KeyError),
        (lambda m: 1 // 0, "rule broken failed: ZeroDivisionError", ZeroDivisionError),
    ],
)
def test_a_rule_that_fails_is_named(apply, message, cause):
    with pytest.raises(RewriteError, match=message) as caught:
        rewrite(graph_of(map_("tanh", x)), [made(fn("tanh"), apply, "broken")])
    assert isinstance(caught.value.__cause__, cause) and caught.value.where == "map"


def test_two_rules_that_undo_each_other_are_named_at_once():
    there = made(fn("sine"), lambda m: map_("cosine", m.node.src[0]), "there")
    back = made(fn("cosine"), lambda m: map_("sine", m.node.src[0]), "back")
    other = made(fn("abs"), lambda m: m.node.src[0], "innocent")
    graph = graph_of(map_("sine", map_("abs", x)), origins={map_("sine", map_("abs", x)): "wave"})
    with pytest.raises(RewriteError, match=r"converge: (there, back|back, there) \(wave\)\n  try: one of them undoes"):
        rewrite(graph, [there, back, other])


def test_rules_that_undo_each_other_only_from_sweep_to_sweep_are_named():
    trace = Trace()
    there = made(fn("sine"), lambda m: map_("cosine", m.node.src[0]) if trace.sweeps % 2 else None, "there")
    back = made(fn("cosine"), lambda m: None if trace.sweeps % 2 else map_("sine", m.node.src[0]), "back")
    with pytest.raises(RewriteError, match=r"rules do not converge: there, back \(g\)"):
        rewrite(graph_of(map_("tanh", map_("sine", x))), [there, back], trace)
    assert trace.sweeps == 2


def test_a_rule_that_grows_for_ever_is_named():
    grow = made(fn("tanh"), lambda m: map_("tanh", map_("sine", m.node.src[0])), "grow")
    with pytest.raises(RewriteError, match=r"rules do not converge: grow \(map\)"), counting() as calls:
        rewrite(graph_of(map_("tanh", x)), [grow])
    assert calls.count < 1_000_000


def test_a_rule_that_wraps_for_ever_is_named():
    wrap = made(fn("tanh"), lambda m: map_("negate", map_("negate", m.node)), "wrap")
    with pytest.raises(RewriteError, match=r"rules do not converge: wrap"):
        rewrite(graph_of(map_("tanh", x)), [wrap])


def test_a_rule_may_wrap_a_node_once():
    """x -> f(x), guarded by who reads x."""

    def apply(m):
        readers = m.users[m.node]
        return None if all(r is not None and r.op.fn == "abs" for r in readers) else map_("abs", m.node)

    wrap = made(fn("tanh"), apply, "wrap")
    t = map_("tanh", x)
    after = rewrite(graph_of(map_("negate", t), map_("sine", t), t), [wrap])
    assert after.outputs == (map_("negate", map_("abs", t)), map_("sine", map_("abs", t)), map_("abs", t))


def test_a_rule_may_wrap_a_node_whose_wrapping_is_there_already():
    """f(x) reads x; x -> f(x) makes it f(f(x)), and the new f(x) is not confused with the old."""
    fired = []

    def apply(m):
        if fired:
            return None
        fired.append(1)
        assert m.users.count(m.node) == 2
        return map_("abs", m.node)

    t = map_("tanh", x)
    after = rewrite(graph_of(map_("abs", t), map_("sine", t)), [made(fn("tanh"), apply, "wrap")])
    assert after.outputs == (map_("abs", map_("abs", t)), map_("sine", map_("abs", t)))


def test_a_rule_may_return_a_node_that_exists_above_or_beside():
    pick = made(fn("sine"), lambda m: map_("cosine", y), "pick")
    graph = graph_of(map_("tanh", map_("sine", x)), map_("cosine", y), map_("negate", map_("cosine", y)))
    counts = []
    watch = made(fn("negate"), lambda m: counts.append(m.users.count(m.node.src[0])), "watch")
    after = rewrite(graph, [pick, watch])
    assert after.outputs[0] == map_("tanh", map_("cosine", y)) and counts == [3, 3]


def test_origins_go_over_to_what_replaces_a_node_and_to_what_is_made_for_it():
    product = gemm(x, input_("w", F32, (3, 3)))
    top = map_("tanh", map_("negate", map_("negate", product)))
    names = {product: "MatMul", map_("negate", map_("negate", product)): "Neg", top: "Tanh"}
    swap = made(fn("tanh"), lambda m: map_("multiply", map_("sine", m.node.src[0]), y), "swap")
    after = rewrite(graph_of(top, origins=names), [swap, drop_double_negation])
    (out,) = after.outputs
    assert after.origin(out) == after.origin(out.src[0]) == "Tanh" and after.origin(product) == "MatMul"
    assert after.origin(y) == "input" and set(after.origins) <= set(after.nodes())


def test_the_first_of_two_origins_stays_when_nodes_become_one():
    a, b = map_("tanh", x), map_("tanh", map_("negate", map_("negate", x)))
    after = rewrite(graph_of(a, b, origins={a: "first", b: "second"}), [drop_double_negation])
    assert after.outputs[0] is after.outputs[1] and after.origin(a) == "first"


def test_the_origin_of_an_unread_input_stays():
    graph = Graph("g", (x, y), (map_("negate", map_("negate", x)),), ("o",), {y: "unread"})
    after = rewrite(graph, [drop_double_negation])
    assert after.inputs == (x, y) and after.origin(y) == "unread" and after.notes == ()


# -- exact counts


class Checked(Rewriting):
    """Compares its counts with a program written out anew, after everything that happens."""

    def settle(self, place: Place) -> None:
        super().settle(place)
        self.check()

    def replace(self, place: Place, after: Node) -> list[Place]:
        turns = super().replace(place, after)
        self.check()
        return turns

    def check(self) -> None:
        """Everything under the outputs, places told apart from nodes: who reads whom, and how often."""
        wanted: dict[Node, dict[object, int]] = {}
        seen: set[int] = set()
        todo: list[object] = []

        def read(s, reader):
            s = s.settled if isinstance(s, Place) and s.settled is not None else s
            readers = wanted.setdefault(s.node if isinstance(s, Place) else s, {})
            readers[reader] = readers.get(reader, 0) + 1
            if id(s) not in seen:
                seen.add(id(s))
                todo.append(s)

        for root in self._roots:
            read(self._first[root], None)
        while todo:
            one = todo.pop()
            for s in one.src:
                read(s, one)
        for node, readers in wanted.items():
            assert self.count(node) == sum(readers.values()), node
            assert set(self[node]) == {r.node if isinstance(r, Place) else r for r in readers}
            assert node in self
        assert set(self._readers) | set(self._standing) == set(wanted)


def random_rules(dice: random.Random) -> list[Rule]:
    """Rules that keep the type and nothing else: drop, wrap, return something beside, rebuild, swap. Each fires a few times."""
    budget = [dice.randrange(1, 12)]
    known: list[Node] = []

    def choose(m: Match) -> Node | None:
        node = m.node
        known.append(node)
        if not budget[0] or dice.random() < 0.6 or not hasattr(node.type, "dtype") or node.dtype is not F32:
            return None
        same = [n for n in toposort([node]) if n.type == node.type and n is not node]
        beside = [n for n in known if hasattr(n.type, "dtype") and n.type == node.type and node not in toposort([n])]
        makers = [
            lambda: dice.choice(same) if same else None,
            lambda: dice.choice(beside) if beside else None,
            lambda: map_("negate", node),
            lambda: map_("abs", map_("abs", node)),
            lambda: map_("add", node, dice.choice([node, *same, *beside])),
            lambda: map_("tanh", dice.choice(same)) if same else None,
            lambda: map_("maximum", map_("negate", dice.choice(same or [node])), map_("negate", dice.choice(same or [node]))),
        ]
        after = dice.choice(makers)()
        if after is not None and after is not node:
            budget[0] -= 1
        return after

    return [made(Pat(), choose, "anything")]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(max_nodes=8, only=("map", "map", "reshape", "transpose", "concat", "gemm", "broadcast")), st.integers(0, 10**6))
def test_counts_are_exact_after_every_rewrite(graph, seed):
    import tilewright.ir.pattern as pattern

    made_checked: list[Checked] = []

    def checked(*args):
        made_checked.append(Checked(*args))
        made_checked[-1].check()
        return made_checked[-1]

    patch = pytest.MonkeyPatch()
    patch.setattr(pattern, "Rewriting", checked)
    try:
        after = rewrite(graph, random_rules(random.Random(seed)))
    except RewriteError as error:
        assert "do not converge" in error.what  # chance gave back an earlier graph
        return
    finally:
        patch.undo()
    verify(after)
    fresh = Users(after.outputs)
    last = made_checked[-1]
    for node in after.nodes():
        assert last.count(node) == fresh.count(node) and set(last[node]) == set(fresh[node])
    assert [o.type for o in after.outputs] == [o.type for o in graph.outputs]


SOUND = [
    drop_double_negation,
    made(fn("abs", fn("abs", name="inner")), lambda m: m["inner"], "abs_of_abs"),
    made(Pat(Reshape, (Pat(Reshape, name="inner"),)), lambda m: reshape(m["inner"].src[0], m.node.shape), "join_reshapes"),
    made(Pat(Convert, where=lambda n: n.type == n.src[0].type), lambda m: m.node.src[0], "drop_convert"),
    made(
        Pat(Transpose, (Pat(Transpose, name="inner"),)),
        lambda m: transpose(m["inner"].src[0], [m["inner"].op.perm[q] for q in m.node.op.perm]),
        "join_transposes",
    ),
    made(fn("abs", fn("negate", Pat(name="x"))), lambda m: map_("abs", m["x"]), "abs_of_negate"),
    made(
        fn("negate", Pat((Reshape, Transpose), name="view")),
        lambda m: Node(m["view"].op, map_("negate", m["view"].src[0])),
        "negate_before_views",
    ),
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    graphs(max_nodes=12, only=("map", "map", "reshape", "transpose", "convert", "concat")), st.randoms(use_true_random=False)
)
def test_sound_rules_keep_every_bit_in_any_order_and_do_not_grow_the_work(graph, dice):
    shuffled = list(SOUND)
    dice.shuffle(shuffled)
    one, other = rewrite(graph, SOUND), rewrite(graph, shuffled)
    assert one.outputs == other.outputs
    verify(one)
    assert len(one.nodes()) <= len(graph.nodes())
    assert rewrite(one, SOUND) == one
    values = feeds(graph)
    for node, a, b in zip(graph.outputs, evaluate(graph, values), evaluate(one, values), strict=True):
        assert to_numpy(a, node.dtype).tobytes() == to_numpy(b, node.dtype).tobytes()


# -- cost


CALLS_A_NODE = 300  # of two sweeps


def test_seven_thousand_nodes_are_rewritten_in_linear_time():
    node = x
    for i in range(1000):
        node = map_(
            "negate", map_("negate", map_("add", map_("tanh", map_("negate", map_("negate", node))), const(float(i), F32)))
        )
    graph = graph_of(node)
    assert len(graph.nodes()) == 7001
    trace = Trace()
    with counting() as calls:
        after = rewrite(graph, SOUND, trace)
    assert calls.count < CALLS_A_NODE * 7001
    assert len(trace.steps) == 2000 and trace.sweeps == 2 and len(after.nodes()) == 3001


def test_a_deep_chain_that_a_rule_walks_all_the_way_needs_no_recursion():
    """A view at the end of 20,000 operations sinks to their beginning, one rewrite each."""
    sink = made(
        Pat(Reshape, (Pat(Map, name="f"),)),
        lambda m: map_(m["f"].op.fn, reshape(m["f"].src[0], m.node.shape)),
        "sink",
    )
    node = x
    for _ in range(20_000):
        node = map_("negate", node)
    trace = Trace()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        after = rewrite(graph_of(reshape(node, (6,))), [sink], trace)
        emptied = rewrite(graph_of(node), [drop_double_negation])
    finally:
        sys.setrecursionlimit(limit)
    assert len(trace.steps) == 20_000 > FREE_STEPS and after.nodes()[1] is reshape(x, (6,))
    assert emptied.outputs == (x,)


def test_many_rewrites_of_what_everything_reads_stay_linear():
    shared = map_("tanh", x)
    readers = [map_("add", shared, const(float(i), F32)) for i in range(3000)]
    node = readers[0]
    for r in readers[1:]:
        node = map_("maximum", node, map_("negate", map_("negate", r)))
    graph = graph_of(node)
    with counting() as calls:
        rewrite(graph, SOUND)
    assert calls.count < CALLS_A_NODE * len(graph.nodes())


def test_a_guard_for_a_single_reader_fires_down_a_chain_of_100_layers_in_two_sweeps():
    """Each layer's product is read twice until a rule drops one reader; only then may its activation be folded."""
    w = input_("w", F32, (3, 3))
    node = x
    for _ in range(100):
        product = gemm(node, w)
        node = map_("add", map_("negate", map_("negate", product)), map_("tanh", product))
    drop = made(fn("add", Pat(name="a"), fn("tanh", Pat(name="a"))), lambda m: map_("tanh", m["a"]), "drop_residual")
    fold = made(
        fn("tanh", Pat(Gemm, name="g")),
        lambda m: map_("sine", m["g"]) if m.users.only(m["g"]) else None,
        "fold",
    )
    trace = Trace()
    after = rewrite(graph_of(node), [drop_double_negation, drop, fold], trace)
    assert sum(s.rule == "fold" for s in trace.steps) == 100 and trace.sweeps <= 3
    assert sum(n.op.name == "map" for n in after.nodes()) == 100


def test_a_chain_that_unlocks_from_its_end_costs_a_sweep_a_layer_and_still_settles():
    """Layer i may fold only when layer i + 1 has: the worst order there is, more than 100 sweeps of it."""
    tops = []
    node = x
    for i in range(150):
        node = map_("tanh", node) if i else map_("tanh", x)
        tops.append(node)

    def apply(m):
        readers = m.users[m.node]
        return map_("sine", m.node.src[0]) if all(r is None or r.op.fn == "sine" for r in readers) else None

    trace = Trace()
    after = rewrite(graph_of(node), [made(fn("tanh"), apply, "from_the_end")], trace)
    assert trace.sweeps == 151 and all(n.op.fn == "sine" for n in after.nodes()[1:])


# -- finding rules


RULE_FILE = '''
from __future__ import annotations
from dataclasses import dataclass
from tilewright.ir.ops import Map
from tilewright.ir.pattern import Pat, graph_pass, rule

@dataclass(frozen=True)
class Kept:
    value: int

@rule(Pat(Map, where=lambda n: n.op.fn == "{fn}"), stage="test")
def {name}(m):
    """{fn}(x) -> x."""
    return m.node.src[0]

@graph_pass(stage="test")
def {name}_pass(graph, trace):
    """graph -> graph."""
    return graph
'''


def test_a_rule_is_found_by_dropping_a_file_in_a_folder(tmp_path: Path):
    (tmp_path / "drop_relu.py").write_text(RULE_FILE.format(fn="relu", name="drop_relu_for_a_test"))
    (tmp_path / "_helper.py").write_text("raise RuntimeError('not to be run')")
    rules = {r.name: r for r in discover("tilewright.rules", Rule, [tmp_path])}
    own = {r.name for r in discover("tilewright.rules", Rule)}
    assert set(rules) == own | {"drop_relu_for_a_test"} and list(rules) == sorted(rules)
    assert rewrite(graph_of(map_("relu", x)), [rules["drop_relu_for_a_test"]]).outputs == (x,)
    assert "drop_relu_for_a_test_pass" in [p.name for p in discover("tilewright.rules", Pass, [tmp_path])]
    again = {r.name: r for r in discover("tilewright.rules", Rule, [tmp_path])}
    assert again["drop_relu_for_a_test"] is rules["drop_relu_for_a_test"]


def test_two_rules_of_one_name_are_refused(tmp_path: Path):
    (tmp_path / "twin_a.py").write_text(RULE_FILE.format(fn="relu", name="twin_for_a_test"))
    (tmp_path / "twin_b.py").write_text(RULE_FILE.format(fn="abs", name="twin_for_a_test"))
    with pytest.raises(RewriteError, match=r"two rules are named twin_for_a_test \(tilewright.rules.twin_b\)"):
        discover("tilewright.rules", Rule, [tmp_path])


def test_every_rule_of_the_product_says_what_it_does_and_when_it_is_exact():
    for r in (*discover("tilewright.rules", Rule), *discover("tilewright.rules", Pass)):
        assert "->" in r.doc and "Exact" in r.doc, r.name
        assert r.stage


@graph_pass(stage="test")
def sum_to_mean(graph: Graph, trace: Trace) -> Graph:
    """sum(x) -> mean(x). Wrong, and beside the point."""
    found = {n: Node(Reduce("mean", n.op.axes), n.src[0]) for n in graph.nodes() if isinstance(n.op, Reduce)}
    return graph.replace(found)


def test_a_pass_sees_the_whole_graph():
    graph = graph_of(Node(Reduce("add", (0,)), x), origins={Node(Reduce("add", (0,)), x): "Sum"})
    after = sum_to_mean.apply(graph, Trace())
    assert after.outputs == (Node(Reduce("mean", (0,)), x),) and after.origin(after.outputs[0]) == "Sum"
    assert (sum_to_mean.name, sum_to_mean.stage) == ("sum_to_mean", "test")
    assert torch.is_tensor(evaluate(after, [torch.ones(2, 3)])[0])


def test_read_outside():
    a = map_("tanh", x)
    b = map_("sine", a)
    top = map_("negate", b)
    found = []
    look = made(fn("negate"), lambda m: found.append(m.read_outside([a, b])), "look")
    rewrite(graph_of(top), [look])
    rewrite(graph_of(top, map_("abs", a)), [look])
    rewrite(graph_of(top, b), [look])
    assert found == [None, a, b]
