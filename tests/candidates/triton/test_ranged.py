"""GPU kernels whose machine code leaves extents open, on the emulated H200: right at odd lengths, and built a few times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attentions import attention
from ptx import H200, How, emulating
from ranged_code import Code
from w4_problems import posed

from tilewright.candidates.triton.attention.candidate import CANDIDATE as ATTENTION
from tilewright.candidates.triton.expressions.text import OPEN, Text, UnknownError
from tilewright.candidates.triton.gemm.candidate import CANDIDATE as GEMM
from tilewright.candidates.triton.hopper.attention.candidate import CANDIDATE as HOPPER_ATTENTION
from tilewright.candidates.triton.hopper.gemm.candidate import CANDIDATE as HOPPER
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.space import tile_configs
from tilewright.candidates.triton.hopper.w4.candidate import CANDIDATE as W4
from tilewright.candidates.triton.normalization.candidate import CANDIDATE as NORM
from tilewright.candidates.triton.runtime import module
from tilewright.dtype import BF16, F16, F32, PRED, S32
from tilewright.ir.build import broadcast, convert, input_, map_, reshape, slice_, transpose
from tilewright.ir.dims import Dim, Scope
from tilewright.ir.graph import Node
from tilewright.ir.instance import nodes_at
from tilewright.ir.ops import Acc, Concat, LayerNorm, Param, Softmax, gemm
from tilewright.schedule.candidate import Schedule, Unsupported, plan_for
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import fusion_of, problem_of
from tilewright.schedule.sample import random_sources

BATCH, LENGTH = Dim("batch", 1, 8), Dim("length", 1, 512)
QUERIES, KEYS = Dim("queries", 1, 512), Dim("keys", 1, 512)
ODD = [(2, 17), (1, 1), (1, 2), (3, 1), (1, 127), (2, 128), (1, 129)]


@pytest.fixture(autouse=True)
def emulated():
    with emulating(How()):
        yield


@pytest.fixture
def builds(monkeypatch):
    """The signatures of kernels that Triton compiled in this test."""
    built = []
    real = module.compiled

    def compiled(function, signature, arch, **options):
        built.append(signature)
        return real(function, signature, arch, **options)

    module._machine_code.cache_clear()
    monkeypatch.setattr(module, "compiled", compiled)
    return built


class _Opened(nodes_at):
    """Nodes with an extent in place of a number."""

    def __init__(self, number, extent):
        self.number, self.extent = number, extent
        super().__init__((), {})

    def at(self, value):
        return self.extent if type(value) is int and value == self.number else super().at(value)

    def _type(self, t):
        return t.with_shape(map(self.at, t.shape))


def with_rows(problem, rows):
    """A problem [61, K] @ [K, N] with another number of rows, which may be open."""
    at = _Opened(61, rows).at
    return replace(problem, op=at(problem.op), types=at(problem.types))


def agrees(problem, kernel):
    """Run a kernel of the problem, with the weights that it has, and compare every element with the oracle's bounds."""
    sources = random_sources(problem)
    run = kernel.prepare({i: sources[i] for i, w in enumerate(problem.weights) if w})
    results = list(run(sources))
    assert check(problem, expect(problem, sources, kernel.roundoff), results) is None


def linear(dtype, out, *, heads=0):
    """x [batch, length, 96] @ w [96, out] + bias + residual; or its columns as heads, [batch, heads, length, out / heads]."""

    def make(batch, length):
        x, w, c = input_("x", dtype, (batch, length, 96)), input_("w", dtype, (96, out)), input_("c", dtype, (out,))
        node = gemm(x, w, acc_dtype=F32)
        acc, bias = Node(Acc(node.tensor)), convert(Node(Param(2, c.tensor)), F32)
        added = map_("add", acc, broadcast(bias, acc.shape))
        if heads:
            store = transpose(reshape(added, (batch, length, heads, out // heads)), (0, 2, 1, 3))
            found = problem_of(Node(replace(node.op, stores=(convert(store, dtype),)), x, w, c))
        else:
            r = input_("r", dtype, acc.shape)
            store = map_("add", added, convert(Node(Param(3, r.tensor)), F32))
            found = problem_of(Node(replace(node.op, stores=(convert(store, dtype),)), x, w, c, r))
        return replace(found, weights=tuple(i in (1, 2) for i in range(len(found.types))))

    return make


@pytest.mark.parametrize("heads", [0, 2])
def test_a_product_on_hopper_has_any_number_of_rows(heads, builds):
    code = Code(HOPPER, H200, linear(BF16, 128, heads=heads), batch=BATCH, length=LENGTH)
    for batch, length in ODD:
        agrees(*code.at(batch=batch, length=length))
    assert len(builds) == len(code.codes) <= (2 if heads else 1)  # TMA writes heads whose rows are whole tiles


@pytest.mark.thin(2)
@pytest.mark.parametrize("knob", ["stream_k", "split_k", "pingpong", "multicast"])
def test_whoever_multiplies_a_tile_there_may_be_any_number_of_them(knob):
    def make(rows):
        made = problem_of(gemm(input_("a", BF16, (rows, 1024)), input_("b", BF16, (1024, 256)), acc_dtype=F32))
        return replace(made, weights=(False, True))

    rows, cores = {"pingpong": (700, 2), "split_k": (100, 6)}.get(knob, (300, 6))
    target = replace(H200, cores=cores)
    legal = tile_configs(plan_of(make(rows), target))
    point = next(p for p in legal if getattr(p, knob) > (knob == "split_k"))
    code = Code(HOPPER, target, make, rows=Dim("rows", 1, 4096))
    for m in (rows, 1, 129, 190):
        one, kernel = code.at(Schedule.of_point(point), rows=m)
        agrees(one, kernel)
        blocks = kernel.schedule["blocks"]
        assert isinstance(blocks, int) and (blocks > 0 if knob == "split_k" else 0 < blocks <= cores)  # a cluster has a tile
    assert len(code.codes) == 1


def test_matrices_that_a_batch_has_each_its_own_of_may_be_one():
    """A descriptor steps over matrices whose rows do not lie along K, also where there is one of them."""

    def make(batch, length, depth):
        return problem_of(
            gemm(input_("a", BF16, (batch, length, depth)), input_("b", BF16, (batch, depth, length)), acc_dtype=F32)
        )

    code = Code(HOPPER, H200, make, batch=BATCH, length=LENGTH, depth=Dim("depth", 1, 512))
    for batch, length, depth in ((1, 128, 64), (2, 136, 24), (1, 8, 16), (2, 16, 16)):
        agrees(*code.at(batch=batch, length=length, depth=depth))
    assert len(code.codes) == 1


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_a_product_of_plain_triton_has_any_number_of_rows(dtype, builds):
    code = Code(GEMM, H200, linear(dtype, 64, heads=2), batch=BATCH, length=LENGTH)
    for batch, length in ODD:
        agrees(*code.at(batch=batch, length=length))
    assert len(builds) == len(code.codes) == 1


def test_parts_of_k_are_added_up_for_any_number_of_tiles():
    def make(batch, rows, k):
        a, b = input_("a", F16, (batch, rows, k)), input_("b", F16, (batch, k, 40))
        return problem_of(gemm(a, b, acc_dtype=F32))

    schedules = plan_for(GEMM, make(1, 16, 1024), H200).schedules()
    schedule = next(s for s in schedules if s["split_k"] == 4)
    code = Code(GEMM, H200, make, batch=BATCH, rows=Dim("rows", 1, 256), k=Dim("k", 16, 4096, 8))
    for batch, rows, k in [(1, 16, 1024), (2, 17, 1000), (3, 1, 72)]:
        agrees(*code.at(schedule, batch=batch, rows=rows, k=k))
    assert len(code.codes) <= 2  # rows of K begin at multiples of 16 elements or do not


def _norm(batch, length):
    x, w = input_("x", BF16, (batch, length, 72)), input_("w", F32, (72,))
    return fusion_of((x, w), (convert(Node(LayerNorm(-1, 1e-5), convert(x, F32), w), BF16),))[0]


def _mask(batch, length):
    x = input_("x", S32, (batch, length))
    return fusion_of((x,), (reshape(convert(x, PRED), (batch, 1, 1, length)),))[0]


def _softmax(batch, length):
    return fusion_of((x := input_("x", F32, (batch, 3, length)),), (Node(Softmax(-1), x),))[0]


def _turned(batch, length):
    x, by = input_("x", BF16, (batch, length, 2, 16)), input_("by", BF16, (512, 16))
    halves = [slice_(x, 3, 0, 8), map_("negate", slice_(x, 3, 8, 16))]
    rows = broadcast(reshape(slice_(by, 0, 0, length), (1, length, 1, 16)), x.shape)
    turned = map_("add", map_("multiply", x, rows), Node(Concat(3), halves[1], halves[0]))
    return fusion_of((x, by), (transpose(turned, (0, 2, 1, 3)),))[0]


# With the number of codes for the shapes of `ODD`.
FUSIONS = {"norm": (_norm, 1), "mask": (_mask, 1), "rotary": (_turned, 1), "softmax": (_softmax, 4)}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", FUSIONS)
def test_fusions_have_any_number_of_rows(name, builds):
    make, most = FUSIONS[name]
    code = Code(NORM, H200, make, batch=BATCH, length=LENGTH)
    for batch, length in ODD:
        agrees(*code.at(batch=batch, length=length))
    assert len(builds) <= most


def _attention(dtype, causal, masked, *, per_query=False):
    def make(batch, queries, keys):
        mask = (PRED, (batch, 1, queries if per_query else 1, keys)) if masked else None
        shape = (batch, 4, 2, queries, keys, 32, 32)
        return problem_of(attention(shape, dtype, mask=mask, causal=causal, zero_masked_rows=True))

    return make


SIZES = [(2, 17, 17), (1, 1, 1), (3, 1, 5), (1, 127, 127), (2, 128, 128), (1, 129, 129), (1, 65, 300)]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("causal", "masked"), [("no", True), ("no", False), ("upper", False), ("lower", True)])
def test_attention_on_hopper_has_any_number_of_queries_and_keys(causal, masked, builds):
    code = Code(HOPPER_ATTENTION, H200, _attention(BF16, causal, masked), batch=BATCH, queries=QUERIES, keys=KEYS)
    for batch, queries, keys in SIZES:
        agrees(*code.at(batch=batch, queries=queries, keys=keys))
    assert len(builds) <= 4  # up to 64 queries or more; masks that are read 16 keys at a time or not


@pytest.mark.parametrize(("dtype", "masked", "per_query"), [(F32, True, True), (F16, False, False)])
def test_attention_of_plain_triton_has_any_number_of_queries_and_keys(dtype, masked, per_query, builds):
    make = _attention(dtype, "no" if masked else "upper", masked, per_query=per_query)
    code = Code(ATTENTION, H200, make, batch=BATCH, queries=QUERIES, keys=KEYS)
    for batch, queries, keys in SIZES:
        agrees(*code.at(batch=batch, queries=queries, keys=keys))
    assert len(builds) <= 2


def test_few_queries_share_any_number_of_keys():
    def make(batch, keys):
        return problem_of(attention((batch, 4, 2, 1, keys, 32, 32), F16))

    schedule = next(s for s in plan_for(ATTENTION, make(1, 512), H200).schedules() if dict(s.knobs).get("split_kv", 1) > 1)
    code = Code(ATTENTION, H200, make, batch=BATCH, keys=Dim("keys", 1, 4096))
    for batch, keys in [(1, 512), (3, 1), (2, 129), (1, 700)]:
        agrees(*code.at(schedule, batch=batch, keys=keys))
    assert len(code.codes) == 1


FEW_ROWS = (
    "f16[61,512] @ s4[72,512]^T group=64 + bias -> f16",
    "bf16[61,512] @ u4[96,512]^T group=32 zero_point -> f32",
    "s8[61,512] scale=channel @ s4[100,512]^T group=64 + bias -> f16",
)


@pytest.mark.thin(2)
@pytest.mark.parametrize("line", FEW_ROWS)
def test_weights_of_4_bits_meet_any_number_of_rows(line, builds):
    code = Code(W4, H200, lambda rows: with_rows(posed(line), rows), rows=Dim("rows", 1, 64))
    for rows in (1, 2, 7, 8, 9, 16, 17, 31, 33):
        one = with_rows(posed(line), rows)
        point = next(s for s in plan_for(W4, one, H200).schedules() if "tile_m" not in dict(s.knobs))
        before = len(builds)  # those of points that are looked at before they are offered
        agrees(*code.at(point, rows=rows))
        assert len(builds) - before <= 1
    assert len(code.codes) <= 4  # up to 8, 16, 32, and 64 rows


def test_tiles_of_weights_of_4_bits_meet_any_number_of_rows(builds):
    def make(rows):
        return with_rows(posed("bf16[61,512] @ s4[256,512]^T group=64 -> bf16"), rows)

    schedules = plan_for(W4, make(200), H200).schedules()
    point = next(s for s in schedules if "tile_m" in dict(s.knobs))
    code = Code(W4, H200, make, rows=Dim("rows", 1, 4096))
    before = len(builds)  # points whose code is looked at
    for rows in (200, 34, 127, 129, 300):
        agrees(*code.at(point, rows=rows))
    assert len(builds) - before == len(code.codes) == 1


def test_what_holds_no_open_extent_is_refused():
    per_query = _attention(BF16, "no", True, per_query=True)
    whole_rows = next(iter(plan_for(HOPPER_ATTENTION, per_query(1, 64, 64), H200).schedules()))
    with pytest.raises(Unsupported, match="its keys do not pass through shared memory"):
        Code(HOPPER_ATTENTION, H200, per_query, batch=BATCH, queries=QUERIES, keys=KEYS).at(
            whole_rows, batch=1, queries=64, keys=64
        )
    rows = Scope(strict=True).expect({"rows": 1 << 19}).extent(Dim("rows", 1, 1 << 20))
    with pytest.raises(Unsupported, match="is not counted in 31 bits"):
        Text().extent(rows * (1 << 14))
    with pytest.raises(UnknownError, match="known when its kernel runs"):
        OPEN + 1
