"""Whole models on a CUDA device, and the kernels between their products: `pytest -m gpu` there. CI has none."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attentions import SHAPES, attention, quantised
from fusions import by_row, norm
from fusions import problem_of as fusion_problem
from in_threads import in_threads

import tilewright
from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, F16, F32, PRED, S8, S32, S64, U8
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, convert, input_, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, Gather, Param, Quantize, Select, Softmax
from tilewright.report.measure.inputs import make_feeds
from tilewright.report.measure.perf import measure
from tilewright.report.measure.verify import verify_program
from tilewright.runtime.replay import SWITCH
from tilewright.schedule.bench import Bench
from tilewright.schedule.candidate import Schedule, plan_for, refusal
from tilewright.schedule.problem import problem_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

if torch.cuda.is_available():
    from tilewright.candidates.triton.attention import candidate as triton_attention
    from tilewright.candidates.triton.hopper.attention import candidate as hopper_attention
    from tilewright.candidates.triton.hopper.attention.candidate import points
    from tilewright.candidates.triton.normalization import candidate as triton_norm

    GPU = detect("cuda")


def right(problem, candidate, points):
    """Points all over a candidate's space agree with the oracle, in guarded memory."""
    assert refusal(candidate, problem, GPU) is None
    bench = Bench(problem, GPU, {}, watched=True)
    space = list(plan_for(candidate, problem, GPU).schedules())
    for i, schedule in enumerate(space[:: max(len(space) // points, 1)]):
        why = bench.attempt(i, candidate, schedule).why
        assert why is None, f"{problem} {schedule}: {why}"


class Block(torch.nn.Module):
    """A layer as transformers have it, with a mask and an embedding before it."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.table = torch.nn.Embedding(50, width)
        self.heads, self.q, self.k = heads, torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.v, self.o = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)

    def forward(self, ids):
        x = self.table(ids)
        b, t, w = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.first(x + self.o(mixed.transpose(1, 2).reshape(b, t, w)))
        return self.second(x + self.down(torch.nn.functional.gelu(self.up(x)))), x


def block(dtype=torch.float16, tokens=24, **options):
    torch.manual_seed(0)
    module = Block().to(dtype).eval()
    ids = torch.randint(0, 50, (3, tokens))
    return module.cuda(), tilewright.compile(module.cpu(), example_inputs=(ids,), device="cuda", budget_s=0.5, **options)


def close(got, wanted):
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g.cpu().float(), w.cpu().float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("graphs", ["1", "0"])
def test_a_model_gives_the_same_with_and_without_graphs(graphs, monkeypatch):
    monkeypatch.setenv(SWITCH, graphs)
    module, program = block()
    module.cuda()
    kept = []
    for seed in range(4):
        ids = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.no_grad():
            wanted = module(ids)
        got = program(ids)
        close(got, wanted)
        kept.append((got, [t.clone() for t in got]))
    assert all(torch.equal(a, b) for got, before in kept for a, b in zip(got, before, strict=True))
    if graphs == "1":
        assert "in one CUDA graph of" in program.launched and program.graph_bytes > 0
    else:
        assert program.launched == f"step by step: {SWITCH} is 0"
    assert {s.decision.kernel.candidate for s in program.steps if s.part.kind == "norm"} <= {"triton_norm", "reference"}


def test_streams_and_threads_do_not_meet():
    module, program = block()
    module.cuda()
    inputs = [torch.randint(0, 50, (3, 24)).cuda() for _ in range(8)]
    with torch.no_grad():
        wanted = [module(i) for i in inputs]
    for i in inputs[:2]:
        program(i)
    torch.cuda.synchronize()
    results = [None] * len(inputs)

    def work(at):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results[at] = program(inputs[at])
            torch.cuda.current_stream().synchronize()

    in_threads(len(inputs), work)
    for got, want in zip(results, wanted, strict=True):
        close(got, want)


def test_a_callers_own_graph_takes_the_steps_in():
    module, program = block()
    ids = torch.randint(0, 50, (3, 24)).cuda()
    for _ in range(3):
        program(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = program(ids)
    ids.copy_(torch.randint(0, 50, (3, 24)))
    graph.replay()
    with torch.no_grad():
        close(results, module.cuda()(ids))


def test_a_library_s_step_is_captured_with_the_others():
    class Sorted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x):
            y = torch.sort(torch.nn.functional.layer_norm(self.a(x), (16,)), dim=-1).values
            return torch.nn.functional.layer_norm(self.b(y), (16,))

    module, x = Sorted().eval(), torch.randn(4, 16)
    program = tilewright.compile(module, example_inputs=(x,), device="cuda", budget_s=0.3)
    for _ in range(4):
        x = torch.randn(4, 16)
        with torch.no_grad():
            torch.testing.assert_close(program(x).cpu(), module(x), rtol=1e-3, atol=1e-4)
    assert program.launched.startswith("5 of 5 steps in one CUDA graph")


def test_a_step_that_waits_for_the_host_is_left_out_of_the_graph():
    """Breaking a capture costs the steps before and after nothing, and the device stays usable."""
    from tilewright.runtime.replay import Bound, CudaGraphs, Replay

    x = torch.randn(8, 8, device="cuda")
    steps = [
        Bound("a", lambda v: [v[0] @ v[0]], [0], [1], []),
        Bound("waits", lambda v: [v[0] * float(v[0].sum().cpu())], [1], [2], [1]),
        Bound("b", lambda v: [v[0] + 1], [2], [3], [2]),
    ]
    values = [x, None, None, None]
    for step in steps:  # libraries make their handles, which no capture may
        step(values)
    replay = Replay(steps, [None] * 4, [(0, x)], [3], CudaGraphs("cuda:0"))
    assert list(replay.alone) == [1] and replay.graphs == 2, replay.alone
    for _ in range(3):
        x = torch.randn(8, 8, device="cuda")
        (got,) = replay([x])
        torch.testing.assert_close(got, (x @ x) * (x @ x).sum() + 1)
    torch.empty(1 << 26, device="cuda").zero_()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


def test_verify_and_perf_of_a_model():
    _, program = block(torch.float32)
    feeds = make_feeds(program.source)
    verified = verify_program(program, "block", feeds)
    assert verified.verified, verified.first_difference
    assert "in one CUDA graph of" in program.launched  # what was held against the oracle last
    report = measure(program, "block", feeds, GPU, iterations=5).report
    assert any(s.startswith("Launched ") and "CUDA graph" in s for s in report.summary), report.summary
    assert report.total_us < 3 * sum(s.time_us for s in report.steps)
    ids = feeds[0].value
    close([program(ids)[0]], [evaluate(program.source, [ids])[0]])


def test_an_index_out_of_range_ends_the_program():
    """Torch's own lookup does the same: the device stops, and no memory beside the table is read."""
    code = """
import torch, tilewright
table = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.LayerNorm(64)).eval()
program = tilewright.compile(table, example_inputs=(torch.zeros(4, 3, dtype=torch.int64),), device="cuda", budget_s=0.3)
program(torch.full((4, 3), 49)); torch.cuda.synchronize(); print("right", program.steps[0].decision.kernel.candidate)
program(torch.full((4, 3), 50)); torch.cuda.synchronize(); print("wrong")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert "right" in done.stdout and "wrong" not in done.stdout and "assert" in done.stderr, done.stdout + done.stderr


def regions():
    for dtype, lengths in ((F32, (1, 1000)), (F16, (7, 768)), (BF16, (64, 5000))):
        for length in lengths:
            x, residual = (input_(name, dtype, (37, length)) for name in "xr")
            (scale, bias), step = (input_(name, dtype, (length,)) for name in "sb"), input_("q", F32, ())
            total = map_("add", x, residual)
            y = norm(total, scale, bias)
            yield fusion_problem(total, y, Node(Quantize(F8E4M3FN), y, step))
            yield fusion_problem(Node(Softmax(1), x))
            yield fusion_problem(*by_row(convert(norm(x, scale, center=False), F32), S8 if dtype is F16 else F8E4M3FN))
    x = input_("x", F32, (3, 4, 50))
    yield fusion_problem(map_("tanh", transpose(x, (0, 2, 1))))
    yield fusion_problem(map_("multiply", map_("silu", slice_(x, 2, 0, 25)), slice_(x, 2, 25, 50)))
    yield fusion_problem(reshape(Node(Softmax(2), x), (12, 50)), x)
    a, b = input_("a", S32, (7, 130)), input_("b", S8, (7, 130))
    yield fusion_problem(map_("add", a, convert(b, S32)), map_("greater", a, convert(b, S32)))
    yield fusion_problem(reduce_("add", a, (1,)), reduce_("minimum", b, (1,), True))
    mask = map_("and", convert(input_("m", S64, (1, 130)), PRED), input_("p", PRED, (7, 1)))
    yield fusion_problem(Node(Select(), mask, input_("x", F32, ()), const(-1e9, F32)))
    code, step, zero = input_("c", U8, (700, 1001)), input_("q", F32, ()), input_("z", U8, ())
    value = map_("gelu", Node(Dequantize(F32), code, step, zero))
    yield fusion_problem(Node(Quantize(U8), value, step, zero))
    ids, table, place = input_("i", S64, (2, 9)), input_("t", F16, (33, 50)), input_("p", F16, (9, 50))
    yield fusion_problem(norm(map_("add", Node(Gather(0), table, ids), place)))


def test_regions_agree_with_the_oracle():
    for problem in regions():
        right(problem, triton_norm.CANDIDATE, 2)


@pytest.mark.parametrize(("dtype", "causal"), [(BF16, "no"), (F16, "upper"), (F32, "lower"), (F16, "lower")])
def test_attentions_agree_with_the_oracle(dtype, causal):
    for shape in (*SHAPES[:2], (2, 4, 2, 200, 300, 64, 64), (1, 2, 1, 130, 130, 128, 128)):
        right(problem_of(attention(shape, dtype, causal=causal, zero_masked_rows=True)), triton_attention.CANDIDATE, 2)
    for mask, extents in ((PRED, (2, 1, 1, 300)), (F32, (1, 4, 200, 300))):
        node = attention((2, 4, 2, 200, 300, 64, 64), dtype, mask=(mask, extents), causal=causal)
        right(problem_of(node), triton_attention.CANDIDATE, 2)


def whole_rows(node):
    """The attention by Hopper's kernel, if this is one."""
    if "sm_90" in GPU.features:
        right(problem_of(node), hopper_attention.CANDIDATE, 4)


@pytest.mark.parametrize(("dtype", "causal"), [(F16, "no"), (BF16, "upper"), (F16, "lower")])
def test_attentions_whose_blocks_stay_agree_with_the_oracle(dtype, causal):
    """There are more heads than multiprocessors, so that blocks go on to others, and fewer; and odd numbers of tiles."""
    if "sm_90" not in GPU.features:
        return
    nodes = [
        attention((2, 4, 2, 70, 300, 64, 64), dtype, causal=causal),
        attention((50, 8, 4, 177, 197, 64, 32), dtype, causal=causal),
    ]
    for mask, extents in ((PRED, (60, 1, 1, 300)), (F32, (1, 6, 200, 300)), (BF16, (60, 1, 1, 300))):
        nodes.append(attention((60, 6, 6, 200, 300, 64, 64), dtype, mask=(mask, extents), causal=causal, zero_masked_rows=True))
    nodes += [attention(shape, dtype, causal=causal) for shape in ((8, 8, 2, 450, 1000, 64, 64), (4, 4, 4, 333, 700, 128, 128))]
    for node in nodes:
        problem = problem_of(node)
        bench = Bench(problem, GPU, {}, watched=True)
        found = points(hopper_attention.supported_heads(problem), GPU.cores, 227 << 10)
        for i, point in enumerate(p for p in found if p.by_tma):
            why = bench.attempt(i, hopper_attention.CANDIDATE, Schedule.of_point(point)).why
            assert why is None, (problem, point, why)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("causal", ["no", "upper", "lower"])
def test_attentions_of_whole_rows_agree_with_the_oracle(dtype, causal):
    for shape in (
        (2, 4, 2, 70, 300, 64, 64),
        (1, 2, 1, 130, 130, 32, 80),
        (2, 3, 1, 1, 65, 64, 64),
        (1, 2, 1, 200, 256, 128, 128),
    ):
        whole_rows(attention(shape, dtype, causal=causal, zero_masked_rows=True))
    for mask, extents in ((PRED, (2, 1, 1, 300)), (PRED, (1, 1, 200, 300)), (F32, (1, 4, 200, 300)), (BF16, (2, 1, 1, 300))):
        whole_rows(attention((2, 4, 2, 200, 300, 64, 64), dtype, mask=(mask, extents), causal=causal, zero_masked_rows=True))


@pytest.mark.parametrize(("dtype", "codes"), [(F16, F8E4M3FN), (BF16, F8E5M2)], ids=str)
@pytest.mark.parametrize("values", [True, False])
def test_attentions_of_codes_agree_with_the_oracle(dtype, codes, values):
    for shape, causal in (((2, 4, 2, 70, 300, 64, 64), "no"), ((1, 2, 1, 200, 200, 128, 48), "upper")):
        plain = attention(shape, dtype, causal=causal, zero_masked_rows=True)
        src, operands = list(plain.src), []
        for i, s in enumerate(plain.src):
            src[i] = input_("qkv"[i], codes if values or i < 2 else dtype, s.shape)
            leaf = Node(Param(i, src[i].tensor))
            operands.append(leaf if leaf.dtype is dtype else Node(Dequantize(dtype), leaf, const(0.02, F32)))
        node = Node(replace(plain.op, operands=tuple(operands)), *src)
        right(problem_of(node), triton_attention.CANDIDATE, 2)
        whole_rows(node)


def test_quantised_attention_agrees_with_the_oracle():
    for shape in ((2, 3, 1, 20, 37, 16, 24), (2, 4, 1, 128, 128, 64, 64), (2, 4, 1, 384, 384, 64, 64)):
        right(problem_of(quantised(shape)), triton_attention.CANDIDATE, 3)
