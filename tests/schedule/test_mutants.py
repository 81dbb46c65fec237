"""The check of results against mutants: right results of every kind and type with one fault must be refused."""

from dataclasses import replace

import pytest
import torch
from attentions import attention, quantised
from fusions import by_row, norm
from fusions import problem_of as fused

from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F16, F32, F64, PRED, S4, S8, U8
from tilewright.ir.build import const, convert, input_, map_, reduce_
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Param, Quantize, Softmax
from tilewright.schedule.expected import check, expect
from tilewright.schedule.measure import examine
from tilewright.schedule.problem import FusionProblem, Problem, problem_of
from tilewright.schedule.sample import random_sources

EIGHT = (F8E4M3FN, F8E5M2, F8E4M3FNUZ, F8E5M2FNUZ)
FLOATS = (F32, BF16, F16, F64, *EIGHT)
SHAPE = (2, 4, 1, 19, 35, 16, 16)
TILE = 8  # of K, or of keys


def attentions(d):
    mask = (2, 1, 19, 35)
    yield "plain", attention(SHAPE, d)
    yield "grouped", attention((2, 4, 2, 19, 35, 16, 24), d)
    yield "upper", attention(SHAPE, d, causal="upper")
    yield "lower", attention(SHAPE, d, causal="lower")
    yield "masked", attention(SHAPE, d, mask=(PRED, mask))
    yield "added", attention(SHAPE, d, mask=(d, mask))
    yield "zero rows", attention(SHAPE, d, mask=(PRED, mask), zero_masked_rows=True)
    yield "equal rows", attention(SHAPE, d, mask=(PRED, mask), equal_masked_rows=True)


def gemms(d):
    plain = f"{d}[17,72] @ {d}[72,24]"
    lines = [plain, f"{plain} -> {d}", f"{plain} -> s8", f"{plain}, relu -> bf16", f"{d}[17,64] @ s4[24,64]^T group=32 -> {d}"]
    for line in [*lines, *(f"{plain}, {fn} -> {d}" for fn in ("gelu", "logistic", "tanh") if d.is_float)]:
        (node,) = parse(line).outputs
        yield line, node


def steps(d):
    x, y = (input_(name, d, (9, 33)) for name in "xy")
    large = map_("multiply", x, const(1e7 if d is F32 else 30.0, d))
    for fn in ("gelu", "silu", "logistic", "erf", "tanh", "exponential"):
        yield fn, (map_(fn, x),)
    yield "add", (map_("add", x, y),)
    yield "divide", (map_("divide", x, y),)
    yield "of a large one", (map_("logistic", large), map_("erf", large))
    yield "norm", (norm(x),)
    yield "softmax", (Node(Softmax(1), x),)
    yield "reduced", (reduce_("mean", x, (0,)), reduce_("add", x, (1,)))
    yield "codes", (Node(Quantize(S8), convert(map_("add", x, y), F32), const(0.05, F32)),)


def evaluated(problem, sources):
    if isinstance(problem, FusionProblem):
        leaves = {n: sources[n.op.index] for n in problem.nodes if isinstance(n.op, Param)}
        return list(evaluate_nodes(problem.roots, leaves))
    found = problem.op.evaluate(problem.node, sources)
    return list(found) if isinstance(found, tuple) else [found]


def bits(t):
    return t.view(torch.uint8) if t.is_floating_point() and t.element_size() == 1 else t


def exchanged(t, axis):
    """Two neighbours of one slice exchanged."""
    some = bits(t).clone()
    rows = some.reshape(-1, *some.shape[-2:])[0].transpose(0, axis) if some.dim() > 1 else some
    middle = rows.shape[0] // 2
    rows[[middle - 1, middle]] = rows[[middle, middle - 1]]
    return some.view(t.dtype)


def mutants(problem, sources, right):
    """Names and results of kernels with a fault."""
    yield "zeros", [torch.zeros_like(t) for t in right]
    yield "two rows exchanged", [exchanged(t, 0) for t in right]
    yield "two columns exchanged", [exchanged(t, -1) for t in right]
    yield "columns one further", [bits(t).roll(1, -1).view(t.dtype) for t in right]
    if isinstance(problem, Problem):
        lhs = problem.lhs
        assert lhs.source == 0
        short = bits(sources[0]).clone()
        short[..., -TILE:] = 0
        yield "no last tile of K", evaluated(problem, [short.view(lhs.stored.dtype.to_torch()), *sources[1:]])
    elif not isinstance(problem, FusionProblem) and problem.op.causal != "lower" and not problem.op.operands:
        keys = problem.types[1].shape[2] - TILE
        q, k, v, *mask = sources
        few = [q, k[:, :, :keys], v[:, :, :keys], *(m[..., :keys] for m in mask)]
        types = [replace(t, shape=tuple(x.shape)) for t, x in zip(problem.types, few, strict=True)]
        node = Node(problem.op, *(Node(Param(i, t)) for i, t in enumerate(types)))
        yield "no last tile of keys", [problem.op.evaluate(node, few)]


def survivors(name, problem):
    """Faults of a problem's results that are not found; that right ones pass is asserted."""
    sources = random_sources(problem)
    expected, right = expect(problem, sources), evaluated(problem, sources)
    assert check(problem, expected, right) is None, name
    for fault, wrong in mutants(problem, sources, right):
        differs = any(not torch.equal(bits(a), bits(b)) for a, b in zip(wrong, right, strict=True))
        if differs and check(problem, expected, wrong) is None:
            yield name, fault


@pytest.mark.parametrize("d", FLOATS, ids=str)
def test_a_fault_in_an_attention_is_found_in_every_type(d):
    assert [f for name, node in attentions(d) for f in survivors(name, problem_of(node))] == []


@pytest.mark.parametrize("d", [*FLOATS, S8, U8, S4], ids=str)
def test_a_fault_in_a_product_is_found_in_every_type(d):
    assert [f for name, node in gemms(d) for f in survivors(name, problem_of(node))] == []


@pytest.mark.parametrize("d", FLOATS, ids=str)
def test_a_fault_in_a_fusion_is_found_in_every_type(d):
    assert [f for name, roots in steps(d) for f in survivors(name, fused(*roots))] == []


def test_a_fault_among_codes_is_found():
    for problem in (problem_of(quantised((1, 2, 1, 13, 33, 16, 16))), fused(*by_row(input_("x", F32, (9, 33))))):
        assert [*survivors("codes", problem)] == []


@pytest.mark.parametrize("d", [F8E4M3FN, F8E5M2], ids=str)
def test_an_attention_over_8_bits_is_checked_however_many_keys_there_are(d):
    problem = problem_of(attention((1, 2, 1, 3, 1024, 64, 64), d))
    sources = random_sources(problem)
    q, k, v = (t.double() for t in sources[:3])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    weights = (q @ k.transpose(-1, -2) * problem.op.scale).softmax(-1)
    expected = expect(problem, sources)
    for held in (weights, weights.half().double()):
        assert check(problem, expected, [(held @ v).float().to(d.to_torch())]) is None
    for wrong in (torch.zeros_like(weights @ v), weights @ v.roll(1, 2)):
        assert "elements differ" in str(check(problem, expected, [wrong.float().to(d.to_torch())]))


@pytest.mark.parametrize("d", EIGHT, ids=str)
def test_an_attention_over_8_bits_passes_whose_weights_keep_16(d):
    for name, node in attentions(d):
        problem = problem_of(node)
        op, sources = problem.op, random_sources(problem)
        q, k, v = (t.float() for t in sources[:3])
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = op.masked(q @ k.transpose(-1, -2) * op.scale, sources[3] if len(sources) == 4 else None)
        weights = op.softmax(scores).bfloat16().float()
        expected = expect(problem, sources)
        assert check(problem, expected, [(weights @ v).to(d.to_torch())]) is None, name
        wrong = [(weights @ v.roll(1, 2)).to(d.to_torch())]
        assert "elements differ" in str(check(problem, expected, wrong)), name


def test_a_kernel_that_gives_zeros_for_an_attention_over_8_bits_is_not_trusted():
    problem = problem_of(attention(SHAPE, F8E4M3FN))
    sources = random_sources(problem)
    expected = expect(problem, sources)

    def right(given):
        return [problem.op.evaluate(problem.node, given)]

    assert examine(problem, expected, right, sources, watched=False) is None
    fault = examine(problem, expected, lambda given: [torch.zeros_like(t) for t in right(given)], sources, watched=False)
    assert fault is not None and "elements differ" in str(fault)
