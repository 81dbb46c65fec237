"""Every way to do a gemm, against NumPy in float64 and int64, over every layout that a program may hand it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from gated import gated
from gemm_lines import INTEGERS, Line, Operand, assert_means, lines, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.candidates import split
from tilewright.candidates.library.float_exact import block_k
from tilewright.candidates.split import by_epilogue
from tilewright.dtype import BF16, F16, F32, F64, S8, S32
from tilewright.hardware.detect import chips, detect
from tilewright.hardware.target import Chip, Target
from tilewright.ir.build import convert, input_, map_, slice_
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Acc, Gemm, Param
from tilewright.schedule.candidate import LAST_RESORT, Candidate, Kernel, Schedule, concerns, discover, plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import FusionProblem, Problem, problem_of
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import search
from tilewright.schedule.tuning_database import offered, repeat

CPU = detect("cpu")
AVX2 = replace(CPU, chip=next(c for c in chips() if c.name == "x86_64_avx2"))
VNNI = replace(CPU, chip=next(c for c in chips() if c.name == "x86_64_avx512_vnni"))
BF16_IN_ONEDNN = torch.ops.mkldnn._is_mkldnn_bf16_supported()
FOUND = {c.name: c for c in discover() if "gemm" in c.kinds}
GPU = Target("a GPU", Chip("gpu", "cuda", frozenset(), ()), "cuda", 132, features=frozenset({"cuda", "sm_90"}))


def posed(text, weights=()):
    problem = problem_of(parse(text).outputs[0])
    assert isinstance(problem, Problem)
    return Problem(problem.op, problem.types, tuple(i in weights for i in range(len(problem.types))))


def kernels(problem, target=CPU):
    for candidate in FOUND.values():
        if concerns(candidate, problem, target) and refusal(candidate, problem, target) is None:
            for schedule in itertools.islice(plan_for(candidate, problem, target).schedules(), 2):
                yield candidate, plan_for(candidate, problem, target).build(schedule)


def laid_out(t, kind):
    """The same values, otherwise in memory."""
    if kind == "contiguous" or t.dim() < 2:
        return t.clone()
    *batch, rows, columns = t.shape
    if kind == "transposed":
        return torch.empty(*batch, columns, rows, dtype=t.dtype).transpose(-1, -2).copy_(t)
    if kind == "gaps":
        return torch.empty(*batch, rows + 1, 2 * columns + 3, dtype=t.dtype)[..., 1:, 3::2].copy_(t)
    if kind == "odd address":
        return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)
    if kind == "batch last":
        return torch.empty(rows, columns, *batch, dtype=t.dtype).permute(*range(2, t.dim()), 0, 1).copy_(t)
    assert kind == "unit strides"  # of axes of one element, which torch leaves arbitrary
    strides = [1 if d == 1 else s for d, s in zip(t.shape, t.stride(), strict=True)]
    return t.clone().as_strided(t.shape, strides)


LAYOUTS = ["contiguous", "transposed", "gaps", "odd address", "batch last", "unit strides"]


def same(a, b):
    """Bit for bit."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(lines(plain=True, largest=st.sampled_from([0, 1, 2, 3, 16, 17, 31, 64, 65])), lines()),
    st.integers(0, 1000),
    st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=2),
    st.booleans(),
)
def test_every_candidate_agrees_with_numpy(line, seed, layouts, constant_rhs):
    graph = parse(str(line))
    (node,) = graph.outputs
    if any(s.op.name != "input" for s in node.src):  # sums of codes, which stand outside the gemm
        return
    arrays = line.arrays(seed)
    values = dict(zip(graph.inputs, tensors(line, arrays), strict=True))
    sources = [values[s] for s in node.src]
    sources[:2] = [laid_out(t, kind) for t, kind in zip(sources[:2], layouts, strict=True)]
    b = graph.inputs[1]
    problem = problem_of(node)
    problem = Problem(problem.op, problem.types, tuple(constant_rhs and (s is b or s.op.label[:2] == "b_") for s in node.src))
    tried = set()
    for candidate, kernel in kernels(problem):
        runner = kernel.prepare({i: t for i, t in enumerate(sources) if problem.weights[i]})
        before = [t.clone() for t in sources]
        (result,) = runner(sources)
        assert all(same(x, y) for x, y in zip(before, sources, strict=True)), f"{candidate.name} writes its sources"
        kept = result.clone()
        assert_means(line, arrays, result)
        (again,) = runner([torch.ones_like(t, dtype=torch.uint8).to(t.dtype) for t in sources[:2]] + sources[2:])
        assert same(kept, result), f"{candidate.name} writes a result it gave"
        assert again.shape == result.shape
        tried.add(candidate.name)
    assert "reference" in tried


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 9), (9, 7, 1), (5, 1, 6), (1, 64, 1), (17, 33, 2)])
def test_integer_products_of_any_strides_are_exact(layout, shape):
    m, k, n = shape
    rng = np.random.default_rng(0)
    for batch in ((), (3,)):
        a, b = rng.integers(-128, 128, (*batch, m, k)), rng.integers(-128, 128, (*batch, k, n))
        problem = posed(f"s8[{','.join(map(str, a.shape))}] @ s8[{','.join(map(str, b.shape))}]")
        for _, kernel in kernels(problem):
            sources = [laid_out(torch.from_numpy(x).to(torch.int8), layout) for x in (a, b)]
            np.testing.assert_array_equal(kernel.prepare({})(sources)[0].numpy(), a @ b)


def test_repeated_and_overlapping_operands():
    """Broadcast views have strides of zero, sliding windows overlap."""
    base = torch.randint(-128, 128, (100,), dtype=torch.int8)
    for left in (
        base[:7].expand(5, 7),
        base[:5, None].expand(5, 7),
        base.as_strided((5, 7), (1, 1)),
        base.as_strided((5, 7), (2, 3)),
    ):
        right = base.as_strided((7, 6), (3, 1))
        for text, cast in (("s8[5,7] @ s8[7,6]", torch.int8), ("f32[5,7] @ f32[7,6]", torch.float32)):
            for _, kernel in kernels(posed(text)):
                sources = [t if cast is torch.int8 else base.to(cast).as_strided(t.shape, t.stride()) for t in (left, right)]
                result = kernel.prepare({})(sources)[0]
                assert torch.allclose(result.double(), sources[0].double() @ sources[1].double())


@pytest.mark.parametrize("rows", [2, 17])
def test_integer_products_of_elements_far_apart_are_exact(rows):
    """A search also lays sources out past 2^31 bytes, which oneDNN misreads for few rows."""
    problem = posed(f"s8[{rows},288] @ s8[288,32]")
    why = refusal(FOUND["int_mm"], problem, CPU)
    if why is not None:
        pytest.skip(why)
    decision = search(problem, CPU, budget_s=0, candidates=[FOUND["int_mm"], FOUND["reference"]])
    assert decision.kernel.candidate == "int_mm" and decision.verified


@pytest.mark.parametrize("compute", [F32, F64])
def test_blocks_of_exact_floats_are_as_long_as_they_may_be(compute):
    problem = posed("s8[2,100000] @ s8[100000,2]")
    length = block_k(problem, compute)
    assert length == {F32: 1024, F64: 2**39}[compute]
    assert block_k(posed("u8[2,9] @ u8[9,2]"), compute) * 255 * 255 <= {F32: 2**24, F64: 2**53}[compute]


@pytest.mark.parametrize("k", [1023, 1024, 1025, 2048, 4097])
@pytest.mark.parametrize("value", [(-128, -128), (127, 127), (127, -128), (-127, 127)])
def test_the_largest_sums_are_exact_past_every_block(k, value):
    a, b = torch.full((3, k), value[0], dtype=torch.int8), torch.full((k, 2), value[1], dtype=torch.int8)
    a[0, ::2] = 1
    problem = posed(f"s8[3,{k}] @ s8[{k},2]")
    for _, kernel in kernels(problem):
        assert torch.equal(kernel.prepare({})([a, b])[0].long(), a.long() @ b.long())


def test_sums_past_32_bits_wrap():
    k = 140_000
    a, b = torch.full((1, k), -128, dtype=torch.int8), torch.full((k, 1), -128, dtype=torch.int8)
    assert k * 2**14 > 2**31
    for candidate, kernel in kernels(posed(f"s8[1,{k}] @ s8[{k},1]")):
        assert kernel.prepare({})([a, b])[0].item() == k * 2**14 - 2**32, candidate.name


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("form", ["[{0}] @ {d}[40,24]", "[{0}] @ {d}[24,40]^T"])
@pytest.mark.parametrize("rows", ["9,40", "1,40", "2,3,5,40"])
def test_prepacked_weights_of_onednn(dtype, form, rows):
    text = f"{dtype}{form.format(rows, d=dtype)} + bias:f32, gelu + residual:f32{' -> bf16' if dtype == 'bf16' else ''}"
    problem = posed(text, weights={1, 2})
    if dtype == "bf16":
        assert refusal(FOUND["onednn"], problem, CPU) == (
            "oneDNN's prepacked bf16 linear rounds to bf16, and a store reads the f32 accumulator"
        )
        text = f"bf16{form.format(rows, d=dtype)}, bf16 + bias:f32, gelu + residual:f32 -> bf16"
        problem = posed(text, weights={1, 2})
    why = refusal(FOUND["onednn"], problem, CPU)
    if why is not None:
        assert dtype == "bf16" and not BF16_IN_ONEDNN and "AVX-512" in why
        return
    schedules = plan_for(FOUND["onednn"], problem, CPU).schedules()
    assert [str(s) for s in schedules] == [*(["prepacked=true post=bias+gelu"] if dtype == "f32" else []), "prepacked=true"]
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(t.shape, generator=generator).to(t.dtype.to_torch()) for t in problem.types]
    a, b, bias, residual = (t.double() for t in sources)
    product = a @ (b.T if "^T" in text else b)
    if dtype == "bf16":
        product = product.bfloat16().double()
    wanted = torch.nn.functional.gelu(product + bias) + residual
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == "f32" else {"rtol": 2e-2, "atol": 6e-2}
    for schedule in schedules:
        kernel = plan_for(FOUND["onednn"], problem, CPU).build(schedule)
        assert kernel.packed_bytes == 40 * 24 * (4 if dtype == "f32" else 2)
        runner = kernel.prepare({1: sources[1], 2: sources[2]})
        for layout in LAYOUTS:
            moved = [laid_out(sources[0], layout), *sources[1:]]
            torch.testing.assert_close(runner(moved)[0].double(), wanted, **tolerance)


@pytest.mark.parametrize(
    ("text", "name", "target", "why"),
    [
        ("s8[3,4] @ s8[4,5]", "aten", CPU, "torch.matmul has no s8 x s8 product into s32"),
        ("f32[3,4] @ f32[4,5]", "int_mm", CPU, "torch._int_mm accumulates in s32, not f32"),
        ("s16[3,4] @ s8[4,5]", "int_mm", CPU, "torch._int_mm multiplies s8 by s8, not s16 by s8"),
        ("s8[16,32] @ s8[32,8]", "int_mm", GPU, "torch._int_mm on CUDA needs M > 16 and K and N in multiples of 8"),
        (
            "s8[16,32] @ s8[32,8]",
            "int_mm",
            AVX2,
            "torch._int_mm multiplies one number at a time on processors without AVX-512 or VNNI",
        ),
        ("f32[3,4] @ f32[4,5]", "float_exact", CPU, "float_exact is for integer products"),
        ("s32[3,4] @ s32[4,5]", "float_exact", CPU, "products of s32 and s32 exceed what float64 sums exactly"),
        ("s64[3,4] @ s8[4,5]", "float_exact", CPU, "products of s64 and s8 exceed what float64 sums exactly"),
        ("f16[3,4] @ f16[4,5]", "onednn", CPU, "oneDNN's prepacked linear takes f32 or bf16, not f16 x f16"),
        ("f32[3,4] @ bf16[4,5]", "onednn", CPU, "oneDNN's prepacked linear takes f32 or bf16, not f32 x bf16"),
        (
            "bf16[3,4] @ bf16[4,5]",
            "onednn",
            CPU,
            "oneDNN's prepacked bf16 linear rounds to bf16, and a store reads the f32 accumulator",
        ),
        (
            "f32[3,4] @ f32[4,5]",
            "onednn",
            CPU,
            "the right operand is not one constant matrix, so there is nothing to pack once",
        ),
        (
            "f8e5m2[16,32] @ f8e5m2[32,16]",
            "scaled_mm",
            GPU,
            "cuBLASLt's 8-bit float product takes e4m3fn with e4m3fn or e5m2, not f8e5m2 x f8e5m2",
        ),
        (
            "f8e4m3fn[16,30] @ f8e4m3fn[30,16]",
            "scaled_mm",
            GPU,
            "cuBLASLt's 8-bit float product takes one rhs matrix with K and N in multiples of 16",
        ),
        (
            "f32[3,4] @ f32[4,5]",
            "split",
            CPU,
            "nothing stands between product and store, and no operand is computed, so there is nothing to take apart",
        ),
    ],
)
def test_refusals_are_sentences(text, name, target, why):
    assert refusal(FOUND[name], posed(text), target) == why


def test_refusals_of_empty_and_old():
    assert refusal(FOUND["onednn"], posed("f32[0,4] @ f32[4,5]", weights={1}), CPU) == "an extent is zero"
    old = Target("an old GPU", GPU.chip, "cuda", 80, features=frozenset({"cuda", "sm_80"}))
    assert refusal(FOUND["scaled_mm"], posed("f8e4m3fn[16,16] @ f8e4m3fn[16,16]"), old) == "an old GPU has no 8-bit float unit"


def test_the_reference_refuses_nothing():
    for text in (
        "s64[0,0] @ u64[0,3]",
        "f8e5m2fnuz[2,3] @ f8e5m2[3,4]",
        "s4[2,0] @ s4[0,4] -> u4",
        "f64[1,2] @ f16[2,1] -> s8",
    ):
        problem = posed(text)
        assert refusal(FOUND["reference"], problem, CPU) is None
        kernel = plan_for(FOUND["reference"], problem, CPU).build(
            next(iter(plan_for(FOUND["reference"], problem, CPU).schedules()))
        )
        sources = [torch.zeros(t.shape).to(t.dtype.to_torch()) for t in problem.types]
        assert tuple(kernel.prepare({})(sources)[0].shape) == problem.outputs[0].shape


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_joined_gemms_of_several_stores(dtype):
    """Parts of one product with tails of their own, whether narrowed before or after they are taken."""
    t = {"f32": F32, "bf16": BF16, "f16": F16}[dtype]
    a, b = input_("a", t, (6, 40)), input_("b", t, (40, 12))
    lhs, rhs = Node(Param(0, a.tensor)), Node(Param(1, b.tensor))
    acc = Node(Acc(Gemm(F32, lhs, rhs, ()).acc_type))
    first = convert(slice_(acc, -1, 0, 5), BF16)
    second = map_("tanh", convert(slice_(acc, -1, 5, 12), BF16))
    node = Node(Gemm(F32, lhs, rhs, (first, second)), a, b)
    problem = Problem(node.op, (a.tensor, b.tensor), (False, True))
    x, y = torch.randn(6, 40).to(t.to_torch()), torch.randn(40, 12).to(t.to_torch())
    product = (x.double() @ y.double()).bfloat16()
    used = set()
    for candidate, kernel in kernels(problem):
        one, two = kernel.prepare({1: y})([x, y])
        torch.testing.assert_close(one, product[:, :5], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(two, torch.tanh(product[:, 5:]), rtol=2e-2, atol=1e-2)
        used.add(f"{candidate.name} {kernel.schedule}")
    assert {u.split(" by=")[0] for u in used if u.startswith("split")} == {"split at=stores", "split at=epilogue"}
    assert ("onednn prepacked=true" in used) == (dtype == "f32" or (dtype == "bf16" and BF16_IN_ONEDNN))
    assert ("aten compute=bf16" in used) == (dtype == "bf16")


@pytest.mark.parametrize(
    "text",
    [
        "f32[7,33] @ f32[33,50] + bias, gelu -> bf16",
        "s8[7,33] @ s8[33,50] * scale + bias, silu -> s8 scale=column",
        "s8[2,7,33] @ s8[2,33,50] * 0.5 + residual",
        "bf16[1,8] @ bf16[8,1] * row",
    ],
)
def test_a_product_and_what_follows_it_apart(text):
    """Two problems, the product's result between them, give what the one gives; and there are no more operations."""
    problem = posed(text)
    product, rest = by_epilogue(problem)
    assert product.problem.ops == problem.ops and product.problem.outputs == (problem.acc,)
    assert isinstance(rest.problem, FusionProblem) and rest.problem.outputs == problem.outputs
    sources = random_sources(problem)
    kernel = plan_for(FOUND["split"], problem, CPU).build(Schedule.of(at="epilogue"))
    weights = {i: t for i, t in enumerate(sources) if problem.weights[i]}
    assert check(problem, expect(problem, sources, 0.0), kernel.prepare(weights)(sources)) is None


@pytest.mark.parametrize("kind", [F16, BF16])
def test_what_lies_between_has_the_type_that_all_stores_read(kind):
    """SwiGLU of halves that are converted first: a product that libraries have, and half the bytes."""
    problem = gated(kind, (5,), 64, 16)
    product, rest = by_epilogue(problem)
    assert product.problem.outputs == (replace(problem.acc, dtype=kind),) and rest.problem.outputs == problem.outputs
    assert refusal(FOUND["aten"], product.problem, CPU) is None
    sources = random_sources(problem)
    kernel = plan_for(FOUND["split"], problem, CPU).build(Schedule.of(at="epilogue"))
    run = kernel.prepare({i: t for i, t in enumerate(sources) if problem.weights[i]})
    assert check(problem, expect(problem, sources, 0.0), run(sources)) is None
    (store,) = problem.op.stores
    both = replace(problem, op=replace(problem.op, stores=(store, convert(Node(Acc(problem.acc)), kind))))
    assert by_epilogue(both)[0].problem.outputs == (problem.acc,)  # else nothing were left to do for the second store


def test_sums_of_few_bits_in_a_piece_are_those_of_the_whole(monkeypatch):
    """Else what keeps 14 bits is wrong when it is taken apart, and never competes."""
    problem, inner = posed("s8[16,20] @ s8[20,16] * 0.5 + bias, relu -> s8 scale=tensor"), split.search

    def searched(asked, *given, **more):
        found = inner(asked, *given, **more)
        return replace(found, kernel=replace(found.kernel, roundoff=2.0**-13 if asked.kind == "gemm" else 0.0))

    monkeypatch.setattr(split, "search", searched)
    assert plan_for(FOUND["split"], problem, CPU).build(Schedule.of(at="epilogue")).roundoff == 2.0**-13


def test_products_that_share_a_store_or_skip_the_accumulator():
    a, b = input_("a", S8, (3, 4)), input_("b", S8, (4, 5))
    lhs, rhs = Node(Param(0, a.tensor)), Node(Param(1, b.tensor))
    acc = Node(Acc(Gemm(S32, lhs, rhs, ()).acc_type))
    node = Node(Gemm(S32, lhs, rhs, (acc, acc, Node(Param(0, a.tensor)))), a, b)
    x, y = torch.randint(-128, 128, (3, 4), dtype=torch.int8), torch.randint(-128, 128, (4, 5), dtype=torch.int8)
    for _, kernel in kernels(Problem(node.op, (a.tensor, b.tensor), (False, False))):
        one, two, three = kernel.prepare({})([x, y])
        assert torch.equal(one.long(), x.long() @ y.long()) and torch.equal(one, two) and torch.equal(three, x)


def test_four_bit_codes_take_the_byte_kernels():
    assert refusal(FOUND["int_mm"], posed("s4[5,64] @ s8[64,7]"), VNNI) is None
    assert refusal(FOUND["int_mm"], posed("u4[5,64] @ s8[64,7]"), VNNI) is not None
    assert set(INTEGERS) >= {"s4", "u4"}


def test_candidates_are_found_by_file_name(tmp_path):
    (tmp_path / "shiny.py").write_text(
        "class Shiny:\n    name = 'shiny'\n    kinds = frozenset({'gemm'})\n    devices = frozenset({'cpu'})\n"
        "    ranks = 'one'\n"
        "    preference = 1\n\nCANDIDATE = Shiny()\n"
    )
    (tmp_path / "_hidden.py").write_text("raise RuntimeError('never read')\n")
    (tmp_path / "notes.py").write_text("NOTHING = 1\n")
    found = discover([tmp_path])
    assert found[0].name == "shiny" and [c.name for c in found[1:]] == [c.name for c in discover()]
    assert found[-1].name == "reference" and found[-1].preference == LAST_RESORT
    assert [c.preference for c in found] == sorted(c.preference for c in found)


def test_every_candidate_keeps_the_protocol():
    for candidate in discover():
        assert isinstance(candidate, Candidate)
        assert candidate.kinds <= {"gemm", "attention", "fusion"} and candidate.kinds
        assert candidate.devices <= {"cpu", "cuda"} and candidate.devices
    assert len({c.name for c in discover()}) == len(discover())
    assert isinstance(next(kernels(posed("f32[3,4] @ f32[4,5]")))[1], Kernel)


def test_a_line_with_a_weight_may_be_packed_once():
    line = Line(Operand("f32", (4, 8), False), Operand("s8", (8, 6), False, "scale=channel", True), [], "", [], (), (4, 6, 8))
    problem = posed(str(line), weights={1, 2, 3})
    sources = tensors(line, line.arrays(1))
    for candidate, kernel in kernels(problem):
        runner = kernel.prepare({i: sources[i] for i in (1, 2, 3)})
        junk = [sources[0], *[torch.zeros_like(t) for t in sources[1:]]]
        result = runner(junk if candidate.name != "reference" else sources)[0]
        assert_means(line, line.arrays(1), result)


@pytest.mark.parametrize("text", ["f32[16,24] @ f32[24,40], gelu", "f32[16,24] @ f32[24,40] + bias, relu -> bf16"])
def test_what_was_taken_apart_is_built_again_of_the_same_pieces(text, monkeypatch):
    """The point that a record keeps is enough: there is no other search."""
    problem, split = posed(text), FOUND["split"]
    first = search(problem, CPU, budget_s=0.05, candidates=[split]).kernel
    assert len(str(first.schedule["by"]).split(", ")) == 2
    monkeypatch.setattr("tilewright.candidates.split.search", lambda *_, **__: pytest.fail("it is searched for"))
    again = repeat(problem, CPU, "split", first.schedule, {})
    assert again is not None and again.kernel.schedule == first.schedule
    assert offered(problem, CPU, "split", first.schedule)
    forged = (("at", "stores"), ("by", "nobody, nobody"), ("0.instruction", "none"))
    for name, value in forged:  # what a file from elsewhere may say
        assert not offered(problem, CPU, "split", Schedule(tuple({**dict(first.schedule.knobs), name: value}.items())))
    for name in ("nobody, nobody", "split, split", "sdpa, sdpa"):
        assert repeat(problem, CPU, "split", Schedule.of(at="epilogue", by=name), {}) is None
