"""The gemm notation: every production, every complaint, and that what is printed is read back as the same gemm."""

import re

import numpy as np
import pytest
import torch
from gemm_lines import Line, Operand, assert_means, lines, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.dtype import BF16, F16, F32, F64, S8, S32
from tilewright.errors import InputError, TilewrightError, TypeMismatchError
from tilewright.ir import notation
from tilewright.ir.build import const, convert, input_, map_, slice_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node, toposort
from tilewright.ir.notation import parse
from tilewright.ir.ops import Acc, Concat, Const, Gemm, Param, Reshape, Transpose
from tilewright.ir.shown import show_gemm
from tilewright.ir.types import TensorType
from tilewright.ir.verify import verify


def shown(graph):
    (node,) = graph.outputs
    return show_gemm(node.op)


def run(graph, *values):
    return evaluate(graph, [torch.as_tensor(v) for v in values])[0]


SIDES = "offset, bias, row_bias, residual, scale, column_scale, row_scale, factor, row, a type or a number"
DOCUMENTED = [line.strip() for line in notation.__doc__.split("problem  =")[0].splitlines()[1:] if "@" in line]


def test_the_documented_examples_are_there():
    assert len(DOCUMENTED) == 3 and "group=64" in DOCUMENTED[1]


@pytest.mark.parametrize("text", DOCUMENTED)
def test_documented_examples_parse_and_print_as_they_stand(text):
    graph = verify(parse(text))
    again = parse(shown(graph))
    assert shown(again) == shown(graph)
    assert again.outputs[0].op is not None and again.outputs[0].op == graph.outputs[0].op
    assert shown(graph).replace(":bf16", "") == text


@settings(max_examples=300, deadline=None)
@given(lines(), st.integers(0, 10_000))
def test_a_line_means_what_numpy_makes_of_it(line, seed):
    graph = verify(parse(str(line)))
    inputs = [(re.sub(r"\d+$", "", n.op.label), str(n.dtype), n.shape) for n in graph.inputs]
    assert inputs == [(name, dtype, tuple(shape)) for name, dtype, shape in line.input_types()]
    arrays = line.arrays(seed)
    assert_means(line, arrays, evaluate(graph, tensors(line, arrays), float64=True)[0])


@settings(max_examples=200, deadline=None)
@given(lines(), st.integers(0, 10_000))
def test_what_is_printed_is_read_back_as_the_same(line, seed):
    graph = parse(str(line))
    text = shown(graph)
    if "{" in text:  # zero points of codes: an expression that the notation has no word for
        assert line.codes and (line.a.zero_point or line.b.zero_point)
        return
    again = verify(parse(text))
    assert shown(again) == text
    first, second = graph.outputs[0], again.outputs[0]
    assert first.type == second.type and len(first.src) == len(second.src)
    # A side of one element is printed as a scale whatever its rank: the same values under another shape.
    values = dict(zip(graph.inputs, tensors(line, line.arrays(seed)), strict=True))
    given_again = {n.op.label: values[s].reshape(n.shape) for s, n in zip(first.src, second.src, strict=True)}
    a = evaluate(graph, {n.op.label: v for n, v in values.items()})[0]
    b = evaluate(again, given_again)[0]
    assert torch.equal(a.to(torch.float64).nan_to_num(7), b.to(torch.float64).nan_to_num(7))


@pytest.mark.parametrize("result", ["", "bf16", "s8", "f8e4m3fn"])
def test_the_meaning_test_can_fail(result):
    a, b = Operand("f32", (3, 4), False), Operand("f32", (4, 5), False)
    line = Line(a, b, [("+", "bias"), ("tanh", "")], result, ["scale=tensor"] if result == "s8" else [], (), (3, 5, 4))
    arrays = line.arrays(0)
    right = evaluate(parse(str(line)), tensors(line, arrays))[0]
    assert_means(line, arrays, right)
    wrong = right.double()
    wrong[1, 2] += 3 if result == "s8" else 0.3
    with pytest.raises(AssertionError):
        assert_means(line, arrays, wrong.to(right.dtype))


def test_attributes_of_operands():
    graph = parse("f16[16,128] @ s4[96,128]^T group=64 zero_point")
    assert [(n.op.label, str(n.type)) for n in graph.inputs] == [
        ("a", "f16[16,128]"),
        ("b", "s4[96,128]"),
        ("b_scale", "f16[96,2]"),
        ("b_zero_point", "s4[96,2]"),
    ]
    graph = parse("s8[2,4,6]^T scale=channel @ s8[2,4,5] scale=tensor zero_point")
    assert [str(n.type) for n in graph.inputs] == [
        "s8[2,4,6]",
        "s8[2,4,5]",
        "f32[2,1,6]".replace("2,1", "1,1"),
        "f32[]",
        "s8[]",
    ]
    assert [str(n.type) for n in parse("f8e4m3fn[100,130] block=32x64 @ bf16[130,8]").inputs] == [
        "f8e4m3fn[100,130]",
        "bf16[130,8]",
        "bf16[4,3]",
    ]
    assert [str(n.type) for n in parse("bf16[4,6] @ u8[6,5] zero_point").inputs][2:] == ["u8[]"]


def test_sides_and_results():
    graph = parse("f32[2,3,4] @ f32[4,5] + bias * row - residual:f16 / scale + f32[3,1] + bias -> bf16")
    assert [(n.op.label, str(n.type)) for n in graph.inputs[2:]] == [
        ("bias", "bf16[5]"),
        ("row", "f32[2,3,1]"),
        ("residual", "f16[2,3,5]"),
        ("scale", "f32[]"),
        ("side", "f32[3,1]"),
        ("bias2", "bf16[5]"),
    ]
    graph = parse("s8[3,4] @ s8[4,5] + bias -> u8 scale=row zero_point")
    assert [str(n.type) for n in graph.inputs[2:]] == ["f32[5]", "f32[3,1]", "u8[]"]
    assert str(graph.outputs[0].type) == "u8[3,5]"
    assert parse("f16[3,4] @ f16[4,5] -> f16 acc=f16").outputs[0].op.acc_dtype is F16
    assert parse("float32[3,4] @ double[4,5] -> half").outputs[0].dtype is F16
    assert parse("f32[3, 4]@f32[4 ,5]+bias,relu->bf16").outputs[0].dtype is BF16


def test_sides_are_printed_by_their_roles():
    """The word that stands there says what has a value of its own; the one that is printed says what the value does, too."""
    for words in (("offset", "scale"), ("bias", "column_scale"), ("row_bias", "row_scale", "row"), ("residual", "factor")):
        addend, factor = words[:2]
        for word in words:
            for sign, printed in {"+": addend, "-": addend, "*": factor, "/": factor}.items():
                assert shown(parse(f"f32[3,4] @ f32[4,5] {sign} {word}:f32")) == f"f32[3,4] @ f32[4,5] {sign} {printed}:f32"
    assert shown(parse("f32[3,4] @ f32[4,5], maximum(bias)")) == "f32[3,4] @ f32[4,5], maximum(f32[5])"
    assert shown(parse("f32[3,4] @ f32[4,5], minimum(row)")) == "f32[3,4] @ f32[4,5], minimum(f32[3,1])"


def test_an_operand_is_shown_with_the_shape_that_it_is_read_in():
    left, right = Node(Param(0, TensorType(F32, (1, 3, 4)))), Node(Param(1, TensorType(F32, (5, 4))))
    lhs, rhs = Node(Reshape((3, 4)), left), Node(Transpose((1, 0)), right)
    op = Gemm(F32, lhs, rhs, ())
    assert show_gemm(Gemm(F32, lhs, rhs, (Node(Acc(op.acc_type)),))) == "f32[1,3,4] as 3x4 @ f32[5,4]^T"


def test_numbers():
    x = torch.tensor([[1.0, 2.0]])
    eye = torch.eye(2)
    for text, wanted in {
        "+ 0.5": [1.5, 2.5],
        "- -2": [3, 4],
        "* 1e-3": [1e-3, 2e-3],
        ", maximum(1.5), minimum(1.75)": [1.5, 1.75],
        "/ 4.": [0.25, 0.5],
        "+ inf": [np.inf, np.inf],
        "- nan": [np.nan, np.nan],
        "* -inf": [-np.inf, -np.inf],
        "+ 3:s32": [4, 5],
    }.items():
        np.testing.assert_allclose(run(parse(f"f32[1,2] @ f32[2,2] {text}"), x, eye)[0], np.array(wanted, np.float32))
    third = parse("f32[1,2] @ f32[2,2] * 0.333333343267 + 16777217")
    assert "* 0.33333334 + 1.6777216e+07" in shown(third) or "* 0.33333334 + 16777216" in shown(third)
    integers = parse("s8[1,2] @ s8[2,2] + 2147483647:s32")
    assert integers.outputs[0].dtype is S32 and shown(integers).endswith("+ 2147483647:s32")
    a = torch.tensor([[1, 2]], dtype=torch.int8)
    assert run(integers, a, torch.eye(2, dtype=torch.int8)).tolist() == [[-(2**31), -(2**31) + 1]]


@pytest.mark.parametrize(
    ("text", "what", "column"),
    [
        ("", "the left operand's type wanted, 'the end' found", 1),
        ("   ", "the left operand's type wanted, 'the end' found", 4),
        ("[3,4] @ f32[4,5]", "'[3,4] @ f32[' is not understood", 1),
        ("f32[3,,4] @ f32[4,5]", "'[3,,4] @ f32' is not understood", 4),
        ("f32[3,-4] @ f32[4,5]", "'[3,-4] @ f32' is not understood", 4),
        (f"f32[{'9' * 30},4] @ f32[4,5]", "no extent has 30 digits", 5),
        ("f32 @ f32[4,5]", "the left operand's type wanted, 'f32' found", 1),
        ("g32[3,4] @ f32[4,5]", "unknown dtype 'g32'", 1),
        ("opaque[3,4] @ f32[4,5]", "opaque is no type of numbers", 1),
        ("f32[3,4] f32[4,5]", "@ wanted, 'f32[4,5]' found", 10),
        ("f32[3,4] * f32[4,5]", "@ wanted, '*' found", 10),
        ("f32[3,4] @", "the right operand's type wanted, 'the end' found", 11),
        ("f32[3,4] @ + bias", "the right operand's type wanted, '+' found", 12),
        ("f32[4] @ f32[4,5]", "f32[4] is no matrix", 1),
        ("f32[3,4] @ f32[]", "f32[] is no matrix", 12),
        ("f32[3,4] @ f32[5,6]", "K is 4 on the left and 5 on the right", 12),
        ("f32[3,4] size=2 @ f32[4,5]", "group=, block= or scale= wanted, 'size=2' found", 10),
        ("s8[3,4] group=0 @ f32[4,5]", "'0' is no positive whole number", 9),
        ("s8[3,4] group=x @ f32[4,5]", "'x' is no positive whole number", 9),
        ("s8[3,4] block=2 @ f32[4,5]", "block=2 is not ROWSxCOLUMNS", 9),
        ("s8[3,4] block=2xy @ f32[4,5]", "'y' is no positive whole number", 9),
        ("s8[3,4] scale=row @ f32[4,5]", "scale=row is not scale=tensor or scale=channel", 9),
        ("s8[3,4] group=2 group=4 @ f32[4,5]", "group and group are both given", 17),
        ("s8[3,4] group=2 scale=tensor @ f32[4,5]", "scale and group are both given", 17),
        ("f32[3,4]^T^T @ f32[4,5]", "^T and ^T are both given", 11),
        ("f32[3,4] zero_point @ f32[4,5]", "a zero point needs an integer operand, not f32", 10),
        ("f32[3,4] @ f32[4,5] bias", "a step, '->' or the end wanted, 'bias' found", 21),
        ("f32[3,4] @ f32[4,5] (bias", "a step, '->' or the end wanted, '(' found", 21),
        ("f32[3,4] @ f32[4,5] + ", f"{SIDES} wanted, 'the end' found", 23),
        ("f32[3,4] @ f32[4,5] + column", f"{SIDES} wanted, 'column' found", 23),
        ("f32[3,4] @ f32[4,5] + bias:f31", "unknown dtype 'f31'", 23),
        ("f32[3,4] @ f32[4,5] + -bias", "a number wanted, 'bias' found", 24),
        ("s8[3,4] @ s8[4,5] + 2.5:s32", "2.5 is no s32", 21),
        ("s8[3,4] @ s8[4,5] + 300:s8", "300 is no s8", 21),
        ("s8[3,4] @ s8[4,5] + inf:s32", "inf is no s32", 21),
        ("s8[3,4] @ s8[4,5] + nan:s32", "nan is no s32", 21),
        ("s8[3,4] @ s8[4,5] + -1:u8", "-1 is no u8", 22),
        ("f32[3,4] @ f32[4,5] * 1e39", "1e39 is no f32", 23),
        ("f64[3,4] @ f64[4,5] * 1e400:f64", "1e400 is no f64", 23),
        ("f16[3,4] @ f16[4,5] * 70000:f16", "70000 is no f16", 23),
        ("f32[3,4] @ f32[4,5], swoosh", "the name of an elementwise function wanted, 'swoosh' found", 22),
        ("f32[3,4] @ f32[4,5], clamp", "the name of an elementwise function wanted, 'clamp' found", 22),
        ("f32[3,4] @ f32[4,5], less(2)", "the name of an elementwise function wanted, 'less' found", 22),
        ("f32[3,4] @ f32[4,5], opaque", "opaque is no type of numbers", 22),
        ("f32[3,4] @ f32[4,5], maximum", "( wanted, 'the end' found", 29),
        ("f32[3,4] @ f32[4,5], maximum(1", ") wanted, 'the end' found", 31),
        ("f32[3,4] @ f32[4,5], 3", "the name of a function wanted, '3' found", 22),
        ("f32[3,4] @ f32[4,5] ->", "the result's dtype wanted, 'the end' found", 23),
        ("f32[3,4] @ f32[4,5] -> blob", "unknown dtype 'blob'", 24),
        ("f32[3,4] @ f32[4,5] -> bf16 quickly", "wrap, saturate, scale=, zero_point or acc= wanted, 'quickly' found", 29),
        ("f32[3,4] @ f32[4,5] -> s8 scale=k", "scale=tensor, scale=row, scale=column or acc= wanted, 'scale=k' found", 27),
        ("f32[3,4] @ f32[4,5] -> s8 acc=f99", "unknown dtype 'f99'", 27),
        ("f32[3,4] @ f32[4,5] -> s8 zero_point", "a zero point of the result needs a scale", 27),
        ("f32[3,4] @ f32[4,5] -> s8 scale=row scale=row", "scale is given twice", 37),
        ("f32[3,4] @ f32[4,5] -> s8 wrap saturate", "overflow is given twice", 32),
        ("f32[3,4] @ f32[4,5] -> s8 wrap scale=row", "a quantised result saturates, it cannot wrap", 32),
        ("f32[3,4] @ f32[4,5] -> s8 + bias", "a step, '->' or the end wanted, '+' found", 27),
    ],
)  # fmt: skip
def test_every_complaint_names_its_column(text, what, column):
    with pytest.raises(InputError) as caught:
        parse(text)
    assert caught.value.what == what
    assert caught.value.where == f"column {column} of {text!r}"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("f32[3,4] @ f32[4,5] + bais", "'bias' in place of 'bais'"),
        ("f32[3,4] @ f32[4,5], gellu", "'gelu' in place of 'gellu'"),
        ("f32[3,4] gruop=2 @ f32[4,5]", "'group=' in place of 'gruop=2'"),
        ("f32[3,4] @ f32[4,5] -> s8 scale=tensr", "'scale=tensor' in place of 'scale=tensr'"),
        ("f32[3,4] @ f32[4,5] -> s8 satrate", "'saturate' in place of 'satrate'"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_one_meant(text, hint):
    with pytest.raises(InputError) as caught:
        parse(text)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("f32[2,3,4] @ f32[3,4,5]", "do not broadcast together"),
        ("f32[3,4] @ f32[4,5] + f32[7]", r"side f32[7] does not broadcast to the result [3, 5] (add)"),
        ("f32[3,4] @ f32[4,5] + f32[2,3,5]", "f32[2,3,5] is larger than the result [3, 5]"),
        ("f32[3,4] @ f32[4,5], and(bias)", "and does not take f32"),
        ("f32[3,4] @ f32[4,5] -> f16 scale=tensor", "a result is not quantised to f16"),
        ("f16[3,4] @ s16[4,5]", "f16 does not hold every s16"),
        ("pred[3,4] @ s8[4,5]", "cannot multiply pred by"),
        ("s8[3,4] @ s8[4,5] -> s8 acc=f32", "cannot multiply s8 by s8 into f32"),
        ("f32[3,4] @ f32[4,5] -> f8e4m3fn scale=tensor zero_point", "a zero point of the result of f8e4m3fn"),
    ],
)
def test_types_that_do_not_fit_are_typed_errors(text, what):
    with pytest.raises(TypeMismatchError, match=re.escape(what)):
        parse(text)


@settings(max_examples=300, deadline=None)
@given(st.text("f32s8[]^T@+-*/,()->:= .0123456789bias_point\n\t\"'é∞", max_size=40))
def test_nonsense_is_refused_politely(text):
    try:
        verify(parse(text))
    except TilewrightError as error:
        assert str(error)


def test_printing_what_is_not_parsed():
    a, w1, w2 = input_("a", F32, (6, 4)), input_("v", F32, (4, 2)), input_("w", F32, (4, 3))
    lhs, rhs = Node(Param(0, a.tensor)), Node(Concat(1), Node(Param(1, w1.tensor)), Node(Param(2, w2.tensor)))
    acc = Node(Acc(Gemm(F32, lhs, rhs, ()).acc_type))
    head = Node(Transpose((1, 0, 2)), Node(Reshape((3, 2, 2)), convert(slice_(acc, -1, 0, 2), BF16)))
    tail = map_("tanh", slice_(acc, -1, 2, 5))
    node = make_gemm(F32, lhs, rhs, [head, tail], (a, w1, w2))
    assert show_gemm(node.op) == ("f32[6,4] @ f32[4,2]|f32[4,3] { [0:2] -> bf16 as 3x2x2 (1,0,2); [2:5], tanh }")


def test_the_accumulator_stands_where_it_is_not_the_natural_one():
    a, b = input_("a", S8, (3, 4)), input_("b", S8, (4, 5))
    lhs, rhs = Node(Param(0, a.tensor)), Node(Param(1, b.tensor))
    narrow = Node(Gemm(S8, lhs, rhs, (Node(Acc(Gemm(S8, lhs, rhs, ()).acc_type)),)), a, b)
    assert show_gemm(narrow.op) == "s8[3,4] @ s8[4,5] -> s8 acc=s8"
    again = parse("s8[3,4] @ s8[4,5] -> s8 acc=s8").outputs[0]
    assert again.op == narrow.op


def test_expressions_that_form_no_chain_stand_in_braces():
    a, b = input_("a", F32, (3, 4)), input_("b", F32, (4, 5))
    lhs, rhs = Node(Param(0, a.tensor)), Node(Param(1, b.tensor))
    acc = Node(Acc(Gemm(F32, lhs, rhs, ()).acc_type))
    for store, wanted in (
        (map_("multiply", acc, map_("logistic", acc)), " {multiply(acc, logistic(acc))}"),
        (map_("subtract", const(1.0, F32), acc), " {subtract(const(f32[]{1.0}), acc)}"),
        (convert(map_("add", convert(acc, F64), const(1.0, F64)), F32), ", f64 + 1:f64 -> f32"),
    ):
        node = Node(Gemm(F32, lhs, rhs, (store,)), a, b)
        assert show_gemm(node.op) == f"f32[3,4] @ f32[4,5]{wanted}"


@pytest.mark.parametrize(("word", "value"), [("9007199254740993:s64", 2**53 + 1), ("18446744073709551615:u64", 2**64 - 1)])
def test_large_integers_are_read_to_the_last_digit(word, value):
    (root,) = parse(f"s64[2,2] @ s64[2,2] + {word}" if "s64" in word else f"u64[2,2] @ u64[2,2] + {word}").outputs
    constants = [n for r in root.op.regions()["stores"] for n in toposort((r,)) if isinstance(n.op, Const)]
    assert [int(n.op.data.tensor().numpy()) for n in constants] == [value]
