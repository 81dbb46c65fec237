"""load -> rules -> plan -> executable, as a whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import feeds, graphs
from short_shares import shorten

import tilewright
from tilewright.compiler import CANONICAL, STAGES, Quantization, compile, optimise
from tilewright.dtype import BF16, F32, S8
from tilewright.errors import InputError, TypeMismatchError
from tilewright.frontends import load
from tilewright.ir.build import const, convert, input_, map_, slice_, transpose
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Acc, Concat, Dequantize, Gemm, Quantize, gemm
from tilewright.ir.pattern import Trace
from tilewright.schedule.search import Decision


def program(*outputs, inputs, name="g", origins=None):
    return Graph(name, tuple(inputs), tuple(outputs), tuple(f"r{i}" for i in range(len(outputs))), origins or {})


A = input_("a", F32, (6, 32))
W1, W2 = torch.randn(32, 48) / 6, torch.randn(48, 16) / 7
BIAS = torch.randn(48)


def two_layers():
    hidden = map_("gelu", map_("add", gemm(A, const(W1)), const(BIAS)))
    first, second = gemm(A, const(W1)), gemm(hidden, const(W2))
    del first
    return program(second, inputs=(A,), origins={second: "layer2/MatMul", hidden: "layer1/Gelu"})


def test_a_program_is_compiled_whole(monkeypatch):
    shorten(monkeypatch)
    executable = compile(two_layers(), budget_s=100.0)
    x = torch.randn(6, 32)
    wanted = torch.nn.functional.gelu(x.double() @ W1.double() + BIAS.double()) @ W2.double()
    torch.testing.assert_close(executable(x).double(), wanted, rtol=1e-4, atol=1e-5)
    assert [s.part.kind for s in executable.steps] == ["gemm", "gemm"]
    assert executable.steps[-1].name == "layer2/MatMul"
    for step in executable.steps:
        d = step.decision
        assert isinstance(d, Decision) and d.verified and d.measured and d.time_us > 0
        assert {r.candidate for r in d.rejected} >= {"reference", "int_mm", "float_exact", "split"} - {d.kernel.candidate}
    assert executable.source.outputs != executable.graph.outputs and executable.trace.steps


def test_without_a_budget_nothing_is_measured_and_all_is_verified():
    executable = compile(two_layers(), budget_s=0)
    assert all(s.decision.verified and not s.decision.measured and s.decision.time_us is None for s in executable.steps)
    x = torch.randn(6, 32)
    torch.testing.assert_close(executable(x), compile(two_layers(), budget_s=3.0)(x), rtol=1e-4, atol=1e-5)


def test_progress_is_told_before_each_choice():
    told = []
    compile(two_layers(), budget_s=0, progress=lambda *now: told.append(now))
    assert [t[:2] for t in told] == [(0, 2), (1, 2)]
    assert told[0][2].startswith("f32[6,32] @ f32[32,48] + bias:f32, gelu")


def test_stages_are_visited_in_order_and_the_trace_names_its_rules():
    seen, trace = [], Trace()
    optimise(two_layers(), trace, lambda stage, graph: seen.append((stage, len(graph.nodes()))))
    assert [s for s, _ in seen] == list(STAGES)
    assert {s.stage for s in trace.steps} <= {*STAGES, CANONICAL} and trace.sweeps >= len(STAGES)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 100))
def test_rules_keep_the_meaning_of_random_programs(graph, seed):
    """Products are summed in float64; the fused program computes what the program as read does."""
    after = optimise(graph)
    values = feeds(seed)
    for a, b in zip(evaluate(graph, values, float64=True), evaluate(after, values, float64=True), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        close = torch.isclose(a, b, rtol=1e-3, atol=1e-3)
        assert float(close.double().mean()) > 0.9 or not torch.isfinite(a).all()
    assert optimise(after).outputs == after.outputs


def test_what_is_quantised_ends_as_one_kernel_a_product():
    """Codes in, codes out: nothing is unfused between two quantised layers."""
    scale = [const(s, F32) for s in (0.02, 0.01, 0.5, 0.03, 4.0)]

    def layer(x, x_scale, weights, w_scale, out_scale):
        w = Node(Dequantize(F32), const(weights), w_scale)
        y = gemm(Node(Dequantize(F32), x, x_scale), w)
        return Node(Quantize(S8), y, out_scale)

    x = input_("x", S8, (5, 32))
    w1, w2 = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((32, 24), (24, 8)))
    out = layer(layer(x, scale[0], w1, scale[1], scale[2]), scale[2], w2, scale[3], scale[4])
    graph = program(out, inputs=(x,))
    executable = compile(graph, budget_s=0)
    assert [s.part.kind for s in executable.steps] == ["gemm", "gemm"]
    assert not any(s.part.unfused for s in executable.steps)
    codes = torch.randint(-128, 128, (5, 32), dtype=torch.int8)
    wanted, got = evaluate(graph, [codes], float64=True)[0], executable(codes)
    assert (got.int() - wanted.int()).abs().max() <= 1 and float((got == wanted).double().mean()) > 0.95


def test_joined_products_give_their_parts():
    ws = [torch.randn(32, n) for n in (8, 8, 16)]
    outs = [convert(map_("add", gemm(A, const(w)), const(torch.randn(w.shape[1]))), BF16) for w in ws]
    graph = program(*outs, inputs=(A,))
    executable = compile(graph, budget_s=0)
    x = torch.randn(6, 32)
    for got, wanted in zip(executable(x), evaluate(graph, [x], float64=True), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    assert len(executable.steps) == 1 and len(executable.steps[0].part.outputs) == 3


def test_weights_behind_views_are_weights():
    w = torch.randn(40, 32)
    graph = program(gemm(A, transpose(const(w), (1, 0))), gemm(A, slice_(transpose(const(w), (1, 0)), 1, 0, 7)), inputs=(A,))
    executable = compile(graph, budget_s=0)
    assert all(True in s.decision.problem.weights for s in executable.steps if s.decision)
    x = torch.randn(6, 32)
    torch.testing.assert_close(executable(x)[1], x @ w.T[:, :7], rtol=1e-4, atol=1e-4)


def test_wrong_programs_and_arguments_are_typed_errors(tmp_path):
    with pytest.raises(InputError, match=r"no such file: .*missing\.hlo"):
        compile(str(tmp_path / "missing.hlo"))
    with pytest.raises(InputError, match="is a folder"):
        compile(tmp_path)
    with pytest.raises(InputError, match="unknown device 'gpu'"):
        compile(two_layers(), device="gpu")
    undeclared = Graph("g", (), (map_("tanh", A),), ("y",))
    with pytest.raises(TypeMismatchError, match="reads input 'a', which the graph does not declare"):
        compile(undeclared)
    twice = Graph("g", (A, input_("a", F32, (1,))), (A,), ("y",))
    with pytest.raises(TypeMismatchError, match="two inputs share a name"):
        compile(twice)


def test_the_public_names_are_imported_when_used():
    assert tilewright.compile is compile
    assert set(tilewright.__all__) >= {"compile", "matmul", "load", "Executable"} and dir(tilewright) == tilewright.__all__
    with pytest.raises(AttributeError, match="has no attribute 'swish'"):
        _ = tilewright.swish


def test_a_graph_that_reads_one_input_many_times():
    x = input_("x", F32, (8, 8))
    y = gemm(x, transpose(x, (1, 0)))
    graph = program(map_("add", y, x), Node(Concat(0), y, x), inputs=(x,))
    v = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    one, two = compile(graph, budget_s=0)(v)
    np.testing.assert_allclose(one, v @ v.T + v, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(two, np.concatenate([v @ v.T, v]), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(n.op, Acc) for n in graph.nodes()) and any(isinstance(n.op, Gemm) for n in graph.nodes())


@pytest.mark.parametrize(
    "text",
    [
        "HloModule m ENTRY main { ROOT a = f32[2]{0} parameter(0) }",
        "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> { return %a : tensor<2xf32> }",
    ],
)
def test_a_program_on_one_line_is_no_path(text):
    assert [i.shape for i in load(text).inputs] == [(2,)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget_s": float("nan")}, "a budget of nan seconds\n  try: 0 or more"),
        ({"budget_s": -1}, "a budget of -1 seconds"),
        ({"budget_s": "1"}, r"an argument of type str \(budget_s\)\n  try: a number of seconds"),
        ({"quantize": "int8"}, r"an argument of type str \(quantize\)\n  try: tilewright.Quantization"),
        ({"half": "fp16", "budget_s": 0}, "'fp16' is no float of 16 bits\n  try: f16 or bf16"),
    ],
)
def test_arguments_that_mean_nothing(options, said):
    with pytest.raises(InputError, match=said):
        compile(two_layers(), **options)
    with pytest.raises(InputError, match=r'an argument of type str \(scheme\)\n  try: tilewright.scheme\("int8"\)'):
        Quantization("int8", [])


class _Elsewhere(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    where = "cuda:0"

    @property
    def device(self):
        return torch.device(self.where)


def test_a_program_runs_where_its_weights_lie():
    from tilewright import compiler

    w = torch.randn(64, 64)
    x = input_("x", F32, (4, 64))
    here = Graph("g", (x,), (gemm(x, const(w)),), ("y",))
    assert compiler.home(here, None) == "cpu"
    there = Graph("g", (x,), (gemm(x, const(w.as_subclass(_Elsewhere))),), ("y",))
    assert compiler.home(there, (torch.randn(4, 64),)) == "cuda:0"
    assert compiler.home(here, {"x": [torch.randn(4, 64).as_subclass(_Elsewhere)]}) == "cuda:0"
    other = type("Other", (_Elsewhere,), {"where": "cuda:1"})
    with pytest.raises(InputError, match=r'weights and inputs lie on cuda:0 and cuda:1[\s\S]*device="cuda:0"'):
        compiler.home(there, (torch.randn(4, 64).as_subclass(other),))
