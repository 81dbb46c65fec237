"""Generated kernels for what stands between products: right within the oracle's bounds, inside their memory, the same at any
number of threads, and chosen where a model has such work."""

import json
import re
import signal
import sys
from dataclasses import replace

import pytest
import torch
import warm
from fusions import by_row, norm, problem_of
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from paths import SEARCHED
from rotated import turned, turned_in_pairs
from row_cases import FLOATS, cases

import tilewright
from tests.candidates.llvm.test_random import KEPT, fence, guarded
from tilewright.candidates.llvm.normalization import candidate as rows
from tilewright.candidates.llvm.normalization import kernel as _rows
from tilewright.candidates.llvm.runtime import engine
from tilewright.dtype import BF16, F8E5M2, F16, F32, F64, PRED, S4, S8, S32, S64, U8
from tilewright.errors import TypeMismatchError
from tilewright.hardware.detect import chips, detect
from tilewright.ir.build import const, convert, input_, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Concat, Dequantize, Gather, LayerNorm, Pad, Quantize, Select, Softmax, gemm
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.measure import examine
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import search

CPU = detect("cpu")
CASES = cases(lengths=(1, 7, 16, 17, 64, 65, 768, 1000))


def runner(problem):
    assert refusal(rows.CANDIDATE, problem, CPU) is None
    (schedule,) = plan_for(rows.CANDIDATE, problem, CPU).schedules()
    return plan_for(rows.CANDIDATE, problem, CPU).build(schedule).prepare({})


def right(*roots):
    problem = problem_of(*roots)
    sources = random_sources(problem)
    why = examine(problem, expect(problem, sources), runner(problem), sources)
    assert why is None, f"{problem}: {why}"


@pytest.mark.parametrize("case", CASES)
def test_rows(case):
    for roots in CASES[case]():
        right(*roots)


def test_positions_as_sums_of_a_mask_are_sampled_in_range():
    sums, mask, table = input_("c", S64, (2, 9)), input_("m", S64, (2, 9)), input_("t", F32, (12, 40))
    ids = map_("add", map_("multiply", convert(convert(sums, S32), S64), mask), const(1, S64))
    right(norm(map_("add", Node(Gather(0), table, ids), input_("x", F32, (2, 9, 40)))))


def test_constants_that_indices_are_made_with_are_sampled_as_they_are():
    order, by, table = input_("o", S64, (30,)), const([1, 2, 3] * 10, S64), input_("t", F32, (40, 20))
    picked = Node(Gather(0), table, map_("add", map_("divide", order, by), const(7, S64)))
    program = tilewright.compile(Graph("g", (table, order), (map_("tanh", picked),), ("y",)), budget_s=0, cache=False)
    assert [s.decision.kernel.candidate for s in program.steps if s.decision is not None] == ["llvm_norm"]
    values, at = torch.randn(40, 20), torch.arange(30)
    torch.testing.assert_close(program(values, at), values[at // torch.tensor([1, 2, 3] * 10) + 7].tanh())


def test_an_index_out_of_range_is_an_error_in_every_lane():
    ids, table = input_("i", S64, (3, 21)), input_("t", F32, (3, 50))
    problem = problem_of(map_("tanh", Node(Gather(1, True), table, ids)))
    run, sources = runner(problem), random_sources(problem)
    picks = next(t for t in sources if t.dtype == torch.int64)
    values = next(t for t in sources if t.dtype == torch.float32)
    picks[1, 20], picks[2, 0] = -50, -1
    (got,) = run(sources)
    torch.testing.assert_close(got, values.gather(1, picks % 50).tanh())
    for wrong in (50, -51, 1 << 62, -(1 << 63)):
        picks[1, 20] = wrong
        with pytest.raises(TypeMismatchError, match=r"out of (bounds|range)"):
            run(sources)


def test_codes_a_row_apart_take_no_pointers_in_vectors():
    """Sums down columns, and codes that are turned: lanes lie at constant distances."""
    codes, x = input_("c", U8, (4, 64, 64)), input_("x", F32, (4, 32, 64))
    for root in (
        reduce_("add", convert(codes, S32), (1,)),
        transpose(Node(Quantize(U8), x, const(0.05, F32), const(128, U8)), (0, 2, 1)),
    ):
        right(root)
        text = rows.module_text(rows.rows_of(problem_of(root), CPU))
        assert not re.search(r"masked\.(gather|scatter)\.v\d+i8", text)


def test_large_elementwise_regions_are_cut_into_pieces():
    a, b = input_("a", F32, (70, 1001)), input_("b", F32, (70, 1001))
    right(map_("gelu_tanh", map_("add", a, b)))
    right(Node(Quantize(S8), map_("multiply", a, input_("s", F32, (1001,))), const(0.01, F32)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_powers_that_logarithms_give(dtype):
    right(map_("power", map_("abs", input_("x", dtype, (5, 70))), const(0.37, dtype)))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0, 4.0, -0.5, -1.0, -2.0, 0.0, 1.5])
def test_powers_that_products_and_roots_give(exponent):
    x = input_("x", F32, (3, 50))
    right(map_("power", x, const(exponent, F32)))
    infinity, nan = float("inf"), float("nan")
    ends = torch.tensor([0.0, -0.0, infinity, -infinity, nan, 1.0, -1.0, 2.0, -2.0, 1e-45]).repeat(15).reshape(3, 50)
    (got,) = runner(problem_of(map_("power", x, const(exponent, F32))))([ends])
    torch.testing.assert_close(got, ends.pow(torch.full_like(ends, exponent)), equal_nan=True)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_ranges_of_what_is_worked_out_are_worked_out_from_ranges(heads):
    codes, turns = input_("codes", U8, (1, 5, heads * 10)), input_("turns", F32, (1, 1, 5, 10))

    def wide_of(x):
        return Node(Dequantize(F32), x, const(0.03, F32), const(121, U8))

    wide = reshape(wide_of(codes), (1, 5, heads, 10))
    halves = [transpose(slice_(wide, 3, *at), (0, 2, 1, 3)) for at in ((5, 10), (0, 5))]
    rotated = map_("multiply", Node(Concat(3), map_("negate", halves[0]), halves[1]), turns)
    total = map_("add", map_("multiply", transpose(wide, (0, 2, 1, 3)), turns), rotated)
    right(Node(Quantize(U8), total, const(0.05, F32), const(99, U8)))
    right(map_("silu", halves[0]))
    side = input_("side", F32, (heads * 10,))  # has no such shape
    turned = reshape(map_("multiply", wide_of(codes), side), (1, 5, heads, 10))
    if heads > 1:
        assert "range" in str(refusal(rows.CANDIDATE, problem_of(map_("silu", slice_(turned, 3, 5, 10))), CPU))


def test_an_index_counts_from_the_end_and_is_an_error_out_of_range():
    ids, table = input_("i", S64, (2, 9)), input_("t", F32, (33, 50))
    problem = problem_of(map_("tanh", Node(Gather(0), table, ids)))
    run, sources = runner(problem), random_sources(problem)
    picks = next(t for t in sources if t.dtype == torch.int64)
    values = next(t for t in sources if t.dtype == torch.float32)
    picks[0, 0], picks[1, 8] = -1, -33
    (got,) = run(sources)
    torch.testing.assert_close(got[0, 0], values[-1].tanh())
    torch.testing.assert_close(got[1, 8], values[0].tanh())
    for wrong in (33, -34, 2**62, -(2**62)):
        picks[0, 3] = wrong
        with pytest.raises(TypeMismatchError, match=r"gather .* cannot be evaluated: index out of range"):
            run(sources)


def test_an_index_out_of_range_names_its_place():
    ids, table = input_("i", S64, (4,)), const(torch.randn(10, 64))
    root = norm(Node(Gather(0), table, ids))
    program = tilewright.compile(Graph("g", (ids,), (root,), ("y",), {root: "embeddings/Norm"}), budget_s=0)
    assert program.steps[0].decision.kernel.candidate == "llvm_norm"
    with pytest.raises(TypeMismatchError, match=r"index out of range.*\(embeddings/Norm\)"):
        program(torch.tensor([0, 1, 10, 2]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(value):
    x = input_("x", F32, (6, 70))
    scale, bias = input_("s", F32, (70,)), input_("b", F32, (70,))
    for roots in ((norm(x, scale, bias),), (Node(Softmax(1), x),), (reduce_("maximum", x, (1,)), reduce_("add", x, (1,))),
                  (map_("gelu", x), map_("exponential", x)), by_row(x)):  # fmt: skip
        problem = problem_of(*roots)
        sources = random_sources(problem)
        at = next(i for i, t in enumerate(sources) if t.shape == (6, 70))
        sources[at][2, 33] = value
        wanted = expect(problem, sources)
        results = runner(problem)(sources)
        assert check(problem, wanted, results) is None, f"{problem}"
        other = [r for i, r in enumerate(r for result in results for r in result.double()) if i % 6 != 2]
        assert all(torch.isfinite(r).all() for r in other)


def test_a_row_of_minus_infinity_has_no_softmax():
    problem = problem_of(Node(Softmax(1), input_("x", F32, (3, 40))))
    x = torch.randn(3, 40)
    x[1], x[2, :39] = float("-inf"), float("-inf")
    (got,) = runner(problem)([x])
    assert got[1].isnan().all() and torch.equal(got[2], torch.nn.functional.one_hot(torch.tensor(39), 40).float())


def test_the_variance_keeps_its_digits_far_from_zero():
    """Two passes: E[x^2] - E[x]^2 would have none left."""
    problem = problem_of(norm(input_("x", F32, (4, 768))))
    x = torch.randn(4, 768) + 5000
    wanted = expect(problem, [x])
    assert check(problem, wanted, runner(problem)([x])) is None
    shifted = (x.square().mean(1, True) - x.mean(1, True).square()).clamp(min=0)
    assert "differ" in check(problem, wanted, [(x - x.mean(1, True)) * torch.rsqrt(shifted + 1e-5)])


def test_bounds_catch_what_drops_precision():
    x, step = input_("x", F32, (64, 768)), input_("q", F32, ())
    data = torch.randn(64, 768)
    for root in (norm(x), Node(Softmax(1), x), reduce_("add", x, (1,))):
        problem = problem_of(root)
        wanted = expect(problem, [data])
        (narrow,) = expect(problem, [data.bfloat16().float()]).reference
        assert check(problem, wanted, [narrow]) is not None
        assert check(problem, wanted, [wanted.reference[0] * (1 + 1e-4)]) is not None
    problem = problem_of(Node(Quantize(S8), norm(x), step))
    wanted = expect(problem, [data, torch.tensor(0.02)])
    (code,) = wanted.reference
    loose = (wanted.high[0] - wanted.low[0]) > 0
    assert 0 < loose.double().mean() < 0.01 and (wanted.high[0] - wanted.low[0]).max() == 1
    wrong = code.clone()
    wrong[~loose & (code < 100)] += 1
    assert "differ" in check(problem, wanted, [wrong])


@pytest.mark.parametrize(
    ("roots", "why"),
    [
        ((map_("sine", input_("x", F8E5M2, (4, 8))),), "sine of f8e5m2 has no vector form"),
        ((reshape(input_("x", F32, (4, 8)), (8, 4)),), "nothing but views"),
        ((norm(input_("x", F64, (4, 8))),), "f64 has no vector"),
        ((map_("exponential", input_("x", F32, (0, 8))),), "an extent is zero"),
        ((reduce_("multiply", input_("x", F32, (4, 8)), (1,)),), "reducing f32 by multiply has no vector form"),
        ((reduce_("add", input_("x", S4, (4, 8)), (1,)),), "reducing s4 has no vector form"),
        ((norm(Node(Concat(1), input_("x", F32, (4, 8)), input_("y", F32, (4, 3)))),), "concat has no vector form"),
        ((norm(transpose(norm(input_("x", F32, (8, 8))), (1, 0))),), "it reduces along different axes"),
        ((map_("add", *(lambda y: (y, transpose(y, (1, 0))))(map_("tanh", input_("x", F32, (8, 8))))),), "two arrangements"),
        ((map_("exponential", input_("x", F32, ())),), "a handful of numbers"),
        ((Node(Gather(1, True), norm(input_("x", F32, (4, 8))), input_("i", S32, (4, 3))),), "from what is worked out here"),
        ((Node(Pad((1,), (0,), (1,)), map_("tanh", input_("x", F32, (8,))), const(0.0, F32)),), "numbers between elements"),
        ((convert(map_("add", input_("x", S64, (4, 8)), input_("y", S64, (4, 8))), F16),), "s64 has no vector form"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_has_no_kernel_says_why(roots, why):
    said = refusal(rows.CANDIDATE, problem_of(*roots), CPU)
    assert said is not None and why in said


def test_counters_are_one_kernel():
    right(*(map_("add", input_(f"at{i}", S64, (1,) if i % 2 else ()), const(i, S64)) for i in range(9)))


def test_other_machines_are_refused():
    problem = problem_of(norm(input_("x", F32, (4, 8))))
    plain = next(c for c in chips() if c.name == "x86_64")
    assert "names no instruction" in refusal(rows.CANDIDATE, problem, replace(CPU, chip=plain))


# -- random regions between guard pages


@st.composite
def regions(draw):
    """Results over a few sources, of the operations that rows have."""
    length = draw(st.sampled_from((1, 2, 7, 15, 16, 17, 33, 64, 65, 100, 130)))
    lead = draw(st.sampled_from(((1,), (3,), (5,), (2, 3), (4, 1))))
    shape, dtype = (*lead, length), draw(st.sampled_from(FLOATS))
    count = 0

    def source(dtype, shape):
        nonlocal count
        count += 1
        return input_(f"x{count}", dtype, shape)

    def side(t):
        return source(t, draw(st.sampled_from((shape, (length,), (*lead, 1), ()))))

    x = source(dtype, shape)
    made = [x]
    for _ in range(draw(st.integers(1, 5))):
        t = x.dtype
        match draw(st.integers(0, 12)):
            case 11 if length % 2 == 0:
                x = draw(st.sampled_from((turned, turned_in_pairs)))(x, source(t, (length,)), side(t))
            case 12:
                axis = draw(st.integers(0, len(shape) - 1))
                more = source(t, tuple(2 if a == axis else d for a, d in enumerate(shape)))
                made.append(Node(Concat(axis), *draw(st.permutations((x, more)))))
            case 0:
                x = map_(draw(st.sampled_from(("gelu", "silu", "tanh", "erf", "relu", "negate", "abs", "logistic"))), x)
            case 1 | 2:
                x = map_(draw(st.sampled_from(("add", "subtract", "multiply", "maximum"))), x, side(t))
            case 3 | 4:
                more = [source(t, (length,)) for _ in range(draw(st.integers(0, 2)))]
                x = Node(LayerNorm(len(shape) - 1, 1e-3, draw(st.booleans())), x, *more)
            case 5:
                x = Node(Softmax(len(shape) - 1), x)
            case 6:
                reduced = reduce_(draw(st.sampled_from(("add", "mean", "maximum", "minimum"))), x, (len(shape) - 1,), True)
                x = map_("subtract", x, reduced)
                made.append(reduced)
            case 7:
                code = Node(Quantize(S8), x, source(F32, draw(st.sampled_from(((), (*lead, 1))))))
                made.append(code)
            case 8:
                made += by_row(convert(x, F32), draw(st.sampled_from((S8, U8))))
            case 9:
                x = convert(x, draw(st.sampled_from(FLOATS)))
            case _:
                x = map_("add", x, convert(Node(Dequantize(F32), source(S8, shape), source(F32, ())), t))
        made.append(x)
    roots = draw(st.lists(st.sampled_from(made[1:]), min_size=1, max_size=3, unique=True))
    return tuple(reshape(r, (r.tensor.elements,)) if draw(st.integers(0, 5)) == 0 else r for r in roots)


def one(roots, data_seed, at_end, threads, wild, chip):
    problem = problem_of(*roots)
    if refusal(rows.CANDIDATE, problem, chip) is not None:
        return False
    sys.stdout.write(f"{problem} {roots}\n")
    sys.stdout.flush()
    plain = random_sources(problem, data_seed)
    if wild:
        generator = torch.Generator().manual_seed(data_seed)
        for t in plain:
            if t.is_floating_point() and t.numel() > 8:
                at = int(torch.randint(t.numel(), (1,), generator=generator))
                t.view(-1)[at] = (float("nan"), float("inf"), float("-inf"))[data_seed % 3]
    sources = [guarded(t, at_end) for t in plain]
    (schedule,) = plan_for(rows.CANDIDATE, problem, chip).schedules()
    run = plan_for(rows.CANDIDATE, problem, chip).build(schedule).prepare({})
    first = None
    for count in threads:
        torch.set_num_threads(count)
        results = [r.clone() for r in run(sources)]
        if first is None:
            first = results
            why = check(problem, expect(problem, plain), results) if not wild else None
            assert why is None, f"{problem} {roots}: {why}"
        bits = [(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in zip(first, results, strict=True)]
        assert all(torch.equal(a, b) for a, b in bits), f"{problem}: results depend on threads"
    return True


def fenced_one(roots, data_seed, at_end, threads, wild, chip):
    """`one`, with its results and scratch between guard pages and small tasks."""
    fence(rows, at_end)
    rows.ONE_THREAD_WORK, _rows.TASK_ELEMENTS = -1, 64
    done = one(roots, data_seed, at_end, threads, wild, chip)
    assert all(g.intact() for g in KEPT), "wrote beside a buffer"
    KEPT.clear()
    return done


def child(start, count, chip, threads):
    done, target = 0, CPU
    if chip:
        from tests.candidates.llvm.test_random import OLDER

        target = replace(CPU, chip=next(c for c in chips() if c.name == chip))
        rows.module_text = lambda r: rows.RowsWriter(r).write().text(OLDER[chip], "")

    @seed(start)
    @settings(
        max_examples=count, suppress_health_check=list(HealthCheck), phases=[Phase.generate], deadline=None, database=None
    )
    @given(regions(), st.integers(0, 1000), st.booleans(), st.sampled_from(threads), st.sampled_from([False, False, True]))
    def attempt(roots, data_seed, at_end, counts, wild):
        nonlocal done
        done += fenced_one(roots, data_seed, at_end, counts, wild, target)

    attempt()
    return done


def ran_apart(call):
    """A call of this module's in a process of its own, since what strays out of its memory kills the process."""
    begin = f"import faulthandler, sys; faulthandler.enable(); sys.path[:0] = {SEARCHED}"
    begin += "; from tests.candidates.llvm import test_normalization as t"
    code = f"{begin}; sys.stdout.write('DONE ' + str(t.{call}))"
    return warm.run(["-c", code], timeout=1800)


def done_apart(call):
    ran = ran_apart(call)
    last = ran.stdout.strip().splitlines()[-1:] or [""]
    assert ran.returncode == 0, f"at {last[0]}: exit {ran.returncode}\n{ran.stderr[-3000:]}"
    return int(last[0].split()[1])


def run_child(start, count, chip="", threads=((1, 2), (1, 3), (1, 8), (1, 5))):
    return done_apart(f"child({start}, {count}, {chip!r}, {list(threads)})")


def tails_of_pairs():
    """Pairs that are turned, of each number past whole vectors of 8."""
    ends = [(dtype, turned_in_pairs, half) for dtype in (F32, BF16) for half in range(33, 41)]
    for dtype, form, half in ends:
        x, turn = input_("x", dtype, (2, 2 * half)), input_("t", dtype, (2 * half,))
        fenced_one((form(x, turn, input_("s", dtype, ())),), half, True, (1,), False, CPU)
    return len(ends)


def test_masked_tails_of_pairs_stay_inside_their_arrays():
    assert done_apart("tails_of_pairs()") == 16


def overrun():
    """A row that is kept, in scratch memory said to be a cache line shorter than it is."""
    thread_bytes = _rows.Rows.thread_bytes
    _rows.Rows.thread_bytes = property(lambda r: thread_bytes.fget(r) - 64)
    return fenced_one((norm(map_("gelu", input_("x", F32, (3, 128)))),), 0, True, (1,), False, CPU)


def test_a_planted_overrun_of_scratch_memory_is_caught():
    ran = ran_apart("overrun()")
    assert ran.returncode == -signal.SIGSEGV and ran.stdout.startswith("gelu"), ran.stderr


def test_random_regions_between_guard_pages():
    assert run_child(0, 70) > 45


@pytest.mark.parametrize("chip", ["x86_64_avx2"])
def test_kernels_for_older_processors_are_right_as_well(chip):
    from tests.candidates.llvm.test_random import RUNNABLE

    if chip not in RUNNABLE:
        pytest.skip(f"this is no superset of {chip}")
    assert run_child(1, 30, chip) > 20


@pytest.mark.conformance
@pytest.mark.parametrize("start", range(4))
def test_a_thousand_random_regions_on_one_to_eight_threads(start):
    assert run_child(100 + start, 250, threads=(tuple(range(1, 9)),)) > 150


# -- processors at hand or not

SHAPES = {
    "norm": lambda: Node(Quantize(S8), norm(input_("x", F32, (9, 100)), input_("s", F32, (100,))), const(0.1, F32)),
    "residual": lambda: norm(map_("add", input_("x", F16, (9, 100)), input_("y", F16, (9, 100))), center=False),
    "softmax": lambda: Node(Softmax(1), input_("x", BF16, (9, 100))),
    "half": lambda: map_("gelu", input_("x", F16, (9, 100))),
    "dynamic": lambda: by_row(input_("x", F32, (9, 100)), U8)[0],
    "mask": lambda: Node(Select(), convert(input_("m", S64, (1, 100)), PRED), input_("x", F32, (9, 1)), const(0.0, F32)),
    "long": lambda: convert(input_("m", S64, (9, 100)), F32),
    "table": lambda: norm(Node(Gather(0), input_("t", F32, (33, 100)), input_("i", S64, (9,)))),
    "across": lambda: map_("tanh", transpose(input_("x", F32, (20, 30)), (1, 0))),
    "pieces": lambda: Node(Concat(1), input_("x", BF16, (9, 40)), map_("negate", input_("y", BF16, (9, 3)))),
}  # fmt: skip


def assembled():
    """Print the assembly of the shape that each line asks for. LLVM aborts on what it cannot select: it is a process's main."""
    for line in sys.stdin:
        chip, triple, cpu, features, shape = json.loads(line)
        target = replace(CPU, chip=next(c for c in chips() if c.name == chip))
        plan = rows.rows_of(problem_of(SHAPES[shape]()), target)
        text = rows.RowsWriter(plan).write().text(cpu, features)
        sys.stdout.write(json.dumps([engine.assembly(text, triple, cpu, features), plan.each[0].lanes]) + "\n")
        sys.stdout.flush()


def test_every_processor_has_kernels_that_call_nothing_strange():
    from tests.candidates.llvm.test_targets import AS_LLVM_SAYS, INTENDED, strangers

    asked = [[chip, *AS_LLVM_SAYS[chip], shape] for chip in INTENDED for shape in SHAPES]
    code = f"import sys; sys.path[:0] = {SEARCHED}; from tests.candidates.llvm import test_normalization as t; t.assembled()"
    given_ = "".join(json.dumps(a) + "\n" for a in asked)
    ran = warm.run(["-c", code], given=given_, timeout=550)
    made = [json.loads(line) for line in ran.stdout.splitlines()]
    at = asked[min(len(made), len(asked) - 1)]
    assert ran.returncode == 0, f"{at}: exit {ran.returncode}\n{ran.stderr[-2000:]}"
    for (chip, *_, shape), (assembly, lanes) in zip(asked, made, strict=True):
        assert strangers(assembly) == set(), f"{chip}: {shape}"
        assert ("%zmm" in assembly) == (lanes == 16), f"{chip}: {shape}"


# -- in programs


def test_a_layer_s_norms_are_chosen_once_for_all_layers(monkeypatch):
    built = []
    build = rows._build
    monkeypatch.setattr(rows, "_build", lambda problem, *rest: built.append(problem) or build(problem, *rest))
    torch.manual_seed(0)
    h = start = input_("h", F32, (64, 256))
    for layer in range(3):
        scale, bias = const(torch.rand(256) + 0.5), const(torch.randn(256))
        total = norm(map_("add", h, start), scale, bias)
        code = Node(Quantize(S8), total, const(0.02 + 0.01 * layer, F32))
        weight = const(torch.randint(-127, 128, (256, 256), dtype=torch.int8))
        h = map_("multiply", convert(gemm(code, weight), F32), const(1e-4, F32))
    program = tilewright.compile(Graph("g", (start,), (h,), ("y",)), budget_s=2.0)
    steps = [s for s in program.steps if s.decision.problem.kind == "fusion"]
    assert len(steps) == 3 and {s.decision.kernel.candidate for s in steps} == {"llvm_norm"}
    problems = {s.decision.problem for s in steps}  # gemms taken apart build theirs too
    assert steps[1].decision is steps[2].decision and len([p for p in built if p in problems]) == len(problems) == 2
    assert all(s.decision.verified and s.decision.measured for s in steps)


def test_a_fusion_without_a_kernel_says_so():
    from tilewright.report.explain.findings import fallback

    x = input_("x", F32, (40, 64))
    by_blocks = Node(Quantize(S8, (1, 8)), x, input_("s", F32, (40, 8)))
    program = tilewright.compile(Graph("g", by_blocks.src, (by_blocks,), ("y",)), budget_s=0)
    (found,) = fallback(program, {})
    assert found.why.startswith(
        "torch runs it operation by operation (llvm_norm: quantizing to s8 by blocks has no vector form"
    )
    assert fallback(tilewright.compile(Graph("g", (x,), (reshape(x, (64, 40)),), ("y",)), budget_s=0), {}) == []


def test_torch_is_timed_too():
    decision = search(problem_of(norm(input_("x", F32, (64, 256)))), CPU, budget_s=0.05)
    timed = {r.candidate for r in decision.rejected if r.time_us is not None}
    assert decision.measured and {decision.kernel.candidate, *timed} == {"llvm_norm", "reference"}


def test_a_gelu_that_bf16_rounds_has_a_row_kernel():
    """Rows of so many elements that every argument occurs."""
    x = input_("x", F32, (512, 1024))
    program = tilewright.compile(Graph("g", (x,), (convert(map_("gelu", x), BF16),), ("y",)), budget_s=3.0)
    assert program.steps[0].decision.kernel.candidate == "llvm_norm"
