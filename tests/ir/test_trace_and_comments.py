"""Near misses outlive the stage that recorded them; the textual form takes comments."""

from __future__ import annotations

import pytest

from tilewright.dtype import F32
from tilewright.errors import InputError
from tilewright.ir.build import input_, map_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.notation import parse as parse_gemm
from tilewright.ir.ops import Map
from tilewright.ir.pattern import Match, Pat, Trace, rewrite, rule
from tilewright.ir.text import parse, print_graph


@rule(Pat(Map, where=lambda n: getattr(n.op, "fn", "") == "tanh"), stage="first")
def leave_tanh(m: Match) -> Node | None:
    """tanh stays."""
    m.refuse("a tanh is not to be touched")
    return None


@rule(Pat(Map, where=lambda n: getattr(n.op, "fn", "") == "negate"), stage="second")
def drop_negate(m: Match) -> Node | None:
    """negate(x) -> x, which is wrong and beside the point."""
    return m.node.src[0]


def test_near_misses_of_an_earlier_stage_stay_once_each_with_the_source_name():
    x = input_("x", F32, (2,))
    tanh = map_("tanh", map_("negate", x))
    graph = Graph("g", (x,), (tanh,), ("y",), {tanh: "layer.0/Tanh"})
    trace = Trace()
    graph = rewrite(graph, [leave_tanh, drop_negate], trace)  # two sweeps: the second sees the rebuilt tanh
    assert [(n.rule, n.where, n.why) for n in trace.near_misses] == [
        ("leave_tanh", "layer.0/Tanh", "a tanh is not to be touched")
    ]
    rewrite(graph, [drop_negate], trace)
    assert len(trace.near_misses) == 1
    rewrite(graph, [leave_tanh], trace)
    assert len(trace.near_misses) == 2


def test_comments_stand_anywhere_between_tokens_and_never_inside_strings():
    graph = parse_gemm("s8[4,8] @ s8[8,4] -> s8")
    text = print_graph(graph)
    assert parse("// head\n//\n" + text.replace("\n", ' // "tail {\n') + "// end") == graph
    quoted = text.replace("result", "a // b")
    assert parse(quoted).output_names == ("a // b",)


@pytest.mark.parametrize(("text", "line"), [("// x\n\n  ~", 3), ('graph "a" {\n // c\n $', 3), ('graph "a" {\n}\n// c\n$', 4)])
def test_lines_are_counted_through_comments(text: str, line: int):
    with pytest.raises(InputError, match=rf"unexpected '[~$]' \(line {line}\)"):
        parse(text)
