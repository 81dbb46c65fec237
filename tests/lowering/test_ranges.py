"""Concatenations inside regions: the same results in pieces without any, each value worked out once, and kernels for them."""

import pytest
import torch
from fusions import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated import FORMS, every_other, heads, of_queries_and_keys, turned, turned_in_pairs
from torch.utils._pytree import tree_leaves

import tilewright
from tests.candidates.llvm.test_normalization import CPU, right
from tilewright.candidates.llvm.expressions.vector import check_node
from tilewright.candidates.llvm.normalization import candidate as rows
from tilewright.dtype import BF16, F16, F32
from tilewright.ir.build import broadcast, const, input_, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.evaluate import evaluator
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Concat, Param
from tilewright.lowering.access import Unsupported
from tilewright.lowering.decompose import decompose
from tilewright.lowering.ranges import MOST, pieces_of
from tilewright.lowering.reduction_nest import MOST_AGAIN, reduction_nests
from tilewright.schedule.candidate import refusal
from tilewright.schedule.sample import random_sources


def work(roots):
    """Elements that are computed."""
    return sum(n.tensor.elements for n in toposort(roots) if not isinstance(n.op, (*VIEWS, Concat, Param)) and n.src)


def put_together(roots):
    """The results from their pieces, and the results, both by the oracle."""
    problem = problem_of(*roots)
    written = decompose(problem.roots)
    pieces = pieces_of(written)
    sources = random_sources(problem)
    given_ = [Node(Param(i, t)) for i, t in enumerate(problem.types)]
    wanted = evaluator(written, given_)(sources)
    made = [torch.full_like(w, float("nan")) for w in wanted]
    for piece, value in zip(pieces, evaluator([p.root for p in pieces], given_)(sources), strict=True):
        assert value.shape == tuple(map(len, piece.ranges))
        made[piece.result].view(piece.shape)[tuple(slice(r.start, r.stop, r.step) for r in piece.ranges)] = value
    return pieces, written, made, wanted


@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_the_results_without_more_work(form):
    pieces, written, made, wanted = put_together(FORMS[form]())
    for got, meant in zip(made, wanted, strict=True):
        torch.testing.assert_close(got, meant)
    roots = [p.root for p in pieces]
    assert not any(isinstance(n.op, Concat) for n in toposort(roots))
    regions = reduction_nests(problem_of(*FORMS[form]()).roots, check_node)
    before, after = work(written), sum(work(r.roots) for r in regions)
    assert after <= before * MOST_AGAIN, f"{form}: {before} elements became {after}"
    assert sum(len(r.roots) for r in regions) == len(pieces)


def repeated_heads(keys, each):
    """Keys turned, then repeated for the query heads that read them, and scaled."""
    x = input_("x", F32, (1, keys, 9, 64))
    y = turned(x, input_("cos", F32, (9, 64)), input_("sin", F32, (9, 64)))
    y = broadcast(reshape(y, (1, keys, 1, 9, 64)), (1, keys, each, 9, 64))
    return map_("multiply", reshape(y, (1, keys * each, 9, 64)), const(0.125, F32))


def test_what_is_repeated_is_computed_once_and_stored_to_each_copy():
    pieces, written, made, wanted = put_together([repeated_heads(2, 4)])
    torch.testing.assert_close(made, wanted)
    assert len(pieces) == 8 and len({p.root for p in pieces}) == 2
    (nest,) = reduction_nests(written, check_node)
    assert {r.shape for r in nest.roots} == {(1, 2, 9, 32)}
    right(repeated_heads(2, 4))


def test_more_copies_than_pieces_are_computed_as_before():
    (nest,) = reduction_nests(problem_of(repeated_heads(1, 12)).roots, check_node)
    assert {r.shape for r in nest.roots} == {(1, 12, 9, 32)}


def test_a_rotation_reads_every_element_once_for_both_halves():
    (nest,) = reduction_nests(problem_of(turned(*heads(BF16, 2, 5, 3, 34))).roots, check_node)
    assert (nest.rows, nest.columns, nest.passes) == (2 * 3 * 5, 17, 1)
    assert len(nest.sources) == 6 and [sorted(nest.sources).count(i) for i in range(3)] == [2, 2, 2], "halves of x, cos, sin"
    assert work(nest.roots) == work(problem_of(turned(*heads(BF16, 2, 5, 3, 34))).roots)


def test_neighbours_that_are_turned_are_read_and_written_as_pairs():
    (nest,) = reduction_nests(problem_of(turned_in_pairs(*heads(BF16, 2, 5, 3, 34))).roots, check_node)
    assert len(nest.read_in_pairs) == len(nest.sources) == 6 and list(nest.written_in_pairs) == [0]
    assert sorted(which for which, _ in nest.read_in_pairs.values()) == [0, 0, 0, 1, 1, 1]
    (other,) = reduction_nests(problem_of(turned(*heads(BF16, 2, 5, 3, 34))).roots, check_node)
    assert not other.read_in_pairs and not other.written_in_pairs


def test_a_pair_that_leaves_its_memory_is_none():
    x = input_("x", F32, (3, 7))
    first, second = (map_("tanh", every_other(x, i)) for i in range(2))
    regions = [reduction_nests(problem_of(root).roots, check_node)[0] for root in (first, second)]
    assert [len(r.read_in_pairs) for r in regions] == [0, 1], "the last of 7 is the first of a pair whose second is not there"
    right(first)
    right(second)


def test_pieces_of_one_size_share_a_nest_and_others_have_their_own():
    assert [r.outputs for r in reduction_nests(problem_of(*of_queries_and_keys()).roots, check_node)] == [(0, 0), (1, 1)]
    assert [len(r.roots) for r in reduction_nests(problem_of(*FORMS["in part"]()).roots, check_node)] == [2, 1]


@st.composite
def programs(draw):
    """A result of views, ranges, concatenations and arithmetic."""
    count = 0

    def source(shape):
        nonlocal count
        count += 1
        return input_(f"x{count}", F32, shape)

    x = source(tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))))
    for _ in range(draw(st.integers(2, 7))):
        axis = draw(st.integers(0, len(x.shape) - 1))
        match draw(st.integers(0, 6)):
            case 0:
                x = transpose(x, draw(st.permutations(range(len(x.shape)))))
            case 1:
                x = Node(
                    Concat(axis),
                    *draw(st.permutations([x, source((*x.shape[:axis], draw(st.integers(1, 3)), *x.shape[axis + 1 :]))])),
                )
            case 2:
                x = map_("add", x, source(tuple(draw(st.sampled_from((1, d))) for d in x.shape)))
            case 3:
                low = draw(st.integers(0, x.shape[axis] - 1))
                x = slice_(x, axis, low, draw(st.integers(low + 1, x.shape[axis])))
            case 4:
                x = reshape(
                    x,
                    draw(
                        st.sampled_from(
                            (
                                (x.tensor.elements,),
                                (1, *x.shape),
                                (*x.shape[:-2], x.shape[-1] * x.shape[-2]) if len(x.shape) > 1 else x.shape,
                            )
                        )
                    ),
                )
            case 5:
                x = Node(Concat(len(x.shape)), *(reshape(y, (*y.shape, 1)) for y in (x, map_("negate", x))))
            case _:
                x = map_("subtract", x, reduce_(draw(st.sampled_from(("mean", "maximum"))), x, (axis,), True))
    return x


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs())
def test_random_pieces_are_the_results(root):
    try:
        _, _, made, wanted = put_together((root,))
    except Unsupported as why:
        assert "into more than" in str(why)
        return
    torch.testing.assert_close(made[0], wanted[0])


def test_results_without_concatenations_may_be_many():
    roots = [map_("tanh", input_(f"x{i}", F32, (2, 8))) for i in range(MOST + 2)]
    (nest,) = reduction_nests(problem_of(*roots).roots, check_node)
    assert len(nest.roots) == MOST + 2


# -- kernels


@pytest.mark.parametrize("form", FORMS)
def test_generated_kernels(form):
    right(*FORMS[form]())


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("turn", [turned, turned_in_pairs])
def test_rotations_of_every_type_at_odd_shapes(turn, dtype):
    for head in (2, 18, 66):
        right(turn(*heads(dtype, 2, 3, 5, head)))


class Attending(torch.nn.Module):
    """Llama's attention with grouped queries, as transformers writes it."""

    def __init__(self, width, heads_, shared, length):
        super().__init__()
        self.head = head = width // heads_
        self.q, self.out = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(width, shared * head, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(length), 500_000.0 ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x):
        one, other = x[..., : self.head // 2], x[..., self.head // 2 :]
        return x * self.cos + torch.cat((-other, one), -1) * self.sin

    def forward(self, x):
        q, k, v = (f(x).view(*x.shape[:2], -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        attend = torch.nn.functional.scaled_dot_product_attention
        y = attend(self.rotated(q), self.rotated(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def test_a_rotation_is_one_step_between_its_product_and_attention():
    torch.manual_seed(0)
    block, x = Attending(64, 4, 2, 9).eval(), torch.randn(2, 9, 64)
    program = tilewright.compile(block, example_inputs=(x,), budget_s=0)
    steps = [s for s in program.steps if not s.part.once]
    assert [s.part.kind for s in steps] == ["gemm", "elementwise", "attention", "gemm"]
    assert steps[1].decision.kernel.candidate == "llvm_norm" and len(steps[1].part.outputs) == 2
    torch.testing.assert_close(torch.as_tensor(program(x)), block(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_onnx_s_rotary_embedding_is_one_step(interleaved):
    """Heads lie side by side, cosines and sines are picked by position, and a part of each head is left as it is."""
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    shapes = {"x": (2, 5, 36), "cos": (50, 4), "sin": (50, 4), "places": (2, 5)}
    types = {"places": onnx.TensorProto.INT64}
    told = [onnx.helper.make_tensor_value_info(n, types.get(n, onnx.TensorProto.FLOAT), s) for n, s in shapes.items()]
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shapes["x"])
    options = {"num_heads": 3, "rotary_embedding_dim": 8, "interleaved": interleaved}
    node = onnx.helper.make_node("RotaryEmbedding", [*shapes], ["y"], **options)
    graph = onnx.helper.make_graph([node], "g", told, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    program = tilewright.compile(model, budget_s=0)
    assert [s.decision.kernel.candidate for s in program.steps if not s.part.once] == ["llvm_norm"]
    values = {n: torch.randn(s).numpy() for n, s in shapes.items()} | {"places": torch.randint(0, 50, (2, 5)).numpy()}
    (wanted,) = ReferenceEvaluator(model).run(None, values)
    got = program(*values.values())
    torch.testing.assert_close(torch.as_tensor(got), torch.from_numpy(wanted))


def test_what_stays_in_one_piece_says_why():
    unequal = Node(Concat(1), input_("x", F32, (4, 8)), input_("y", F32, (4, 3)))
    exponentials = map_("exponential", unequal)
    weights = map_("divide", exponentials, reduce_("add", exponentials, (1,), True))
    assert "concat has no vector form" in refusal(rows.CANDIDATE, problem_of(weights), CPU)
    many = Node(Concat(0), *(input_(f"x{i}", F32, (2, 3)) for i in range(MOST + 1)))
    assert f"into more than {MOST} pieces" in refusal(rows.CANDIDATE, problem_of(map_("tanh", many)), CPU)
    y = map_("tanh", input_("x", F32, (4, 8)))
    twice = problem_of(map_("negate", y), map_("negate", slice_(y, 1, 2, 8)))
    assert "work values out again" in refusal(rows.CANDIDATE, twice, CPU)


@pytest.mark.parametrize("extents", [(6,), (0, 6), (6, 0, 0)])
def test_a_concatenation_with_one_source_of_all_its_elements_ends(extents):
    sources = [input_(f"x{i}", F32, (2, n)) for i, n in enumerate(extents)]
    pieces, _, made, wanted = put_together([map_("tanh", Node(Concat(1), *sources))])
    assert len(pieces) == 1 and torch.equal(made[0], wanted[0])


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_of_one_level_compiles(kind):
    layer, x = kind(8, 8).eval(), torch.randn(3, 2, 8)
    compiled = tilewright.compile(layer, example_inputs=(x,), budget_s=0, cache=False)
    for given_ in (x, torch.randn(3, 2, 8)):
        for got, meant in zip(compiled(given_), tree_leaves(layer(given_)), strict=True):
            torch.testing.assert_close(got, meant)
