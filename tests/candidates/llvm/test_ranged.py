"""Kernels whose machine code leaves extents open: every number of rows, of keys and of matrices against NumPy, by one code."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attentions import attention
from ranged_code import Code

from tilewright.candidates.llvm.attention.candidate import CANDIDATE as ATTENTION
from tilewright.candidates.llvm.gemm.candidate import CANDIDATE as GEMM
from tilewright.candidates.llvm.gemm.nest import Blocks
from tilewright.candidates.llvm.normalization.candidate import CANDIDATE as NORM
from tilewright.candidates.llvm.runtime import engine
from tilewright.dtype import BF16, F32, PRED, S8, S32
from tilewright.hardware.detect import detect
from tilewright.ir.build import broadcast, convert, input_, map_, reshape, slice_, transpose
from tilewright.ir.dims import Dim, Scope
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Acc, Concat, LayerNorm, Param, gemm
from tilewright.schedule.candidate import Unsupported, kernel_of, plan_for
from tilewright.schedule.problem import FusionProblem, fusion_of, problem_of

CPU = detect("cpu")
pytestmark = pytest.mark.skipif(engine.available() is not None, reason="no kernels are generated here")


def ran(problem, kernel, arrays):
    weights = {i: a for i, (a, w) in enumerate(zip(arrays, problem.weights, strict=True)) if w}
    return kernel.prepare(weights)(arrays)


def random(type_, seed):
    made = torch.Generator().manual_seed(seed)
    if type_.dtype is PRED:
        return torch.rand(type_.shape, generator=made) < 0.7
    if type_.dtype.is_integer:
        return torch.randint(-100, 100, type_.shape, generator=made, dtype=type_.dtype.to_torch())
    return torch.randn(type_.shape, generator=made).to(type_.dtype.to_torch())


def agrees(problem, kernel, *, rtol=2e-5, atol=2e-5):
    arrays = [random(t, 7 + i) for i, t in enumerate(problem.types)]
    found = ran(problem, kernel, arrays)
    roots = problem.roots if isinstance(problem, FusionProblem) else (problem.node,)
    wanted = evaluate_nodes(roots, {n: arrays[n.op.index] for n in toposort(roots) if isinstance(n.op, Param)})
    for a, b in zip(found, wanted, strict=True):
        if a.dtype in (torch.int8, torch.int32, torch.bool):
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize(("dtype", "acc"), [(F32, F32), (BF16, F32), (S8, S32)], ids=str)
def test_a_product_has_any_number_of_rows(dtype, acc):
    def make(batch, rows):
        return problem_of(gemm(input_("a", dtype, (batch, rows, 40)), input_("b", dtype, (40, 56)), acc_dtype=acc))

    code = Code(GEMM, CPU, make, batch=Dim("batch", 1, 64), rows=Dim("rows", 1, 4096))
    for batch, rows in [(1, 1), (1, 2), *((1, m) for m in range(3, 40)), (5, 1), (3, 7), (2, 64), (7, 61), (64, 3)]:
        one, kernel = code.at(batch=batch, rows=rows)
        agrees(one, kernel, rtol=2e-2 if dtype is BF16 else 2e-5)
    assert len(code.codes) <= 4  # few rows stream the weight in other ways


def test_nothing_is_compiled_for_another_number_of_rows(monkeypatch):
    def make(rows):
        return problem_of(gemm(input_("a", F32, (rows, 72)), input_("b", F32, (72, 40)), acc_dtype=F32))

    code = Code(GEMM, CPU, make, rows=Dim("rows", 1, 4096))
    one, kernel = code.at(rows=500)
    agrees(one, kernel)
    monkeypatch.setattr(engine, "object_code", lambda text: pytest.fail("compiled"))
    texts = {kernel_of(_Fixed(kernel), None).text}
    for rows in (77, 78, 123, 1024, 4096):
        one, kernel = code.at(rows=rows)
        agrees(one, kernel)
        texts.add(kernel_of(_Fixed(kernel), None).text)
    assert len(code.codes) == 1
    assert len(texts) == 1


class _Fixed:
    def __init__(self, kernel):
        self.kernel = kernel

    def build(self, _schedule):
        return self.kernel


def test_an_epilogue_writes_heads_and_reads_a_residual_at_any_length():
    def make(batch, length):
        x, w = input_("x", F32, (batch, length, 64)), input_("w", F32, (64, 64))
        acc = Node(Acc(gemm(x, w, acc_dtype=F32).tensor))
        residual, bias = Node(Param(2, acc.tensor)), Node(Param(3, input_("c", F32, (64,)).tensor))
        added = map_("add", map_("add", acc, broadcast(bias, acc.shape)), residual)
        heads = transpose(reshape(added, (batch, length, 4, 16)), (0, 2, 1, 3))
        op = replace(gemm(x, w, acc_dtype=F32).op, stores=(heads,))
        return problem_of(Node(op, x, w, input_("r", F32, acc.shape), input_("c", F32, (64,))))

    code = Code(GEMM, CPU, make, batch=Dim("batch", 1, 8), length=Dim("length", 1, 512))
    for batch, length in [(2, 5), (1, 9), (3, 1), (1, 1), (8, 31), (2, 257)]:
        agrees(*code.at(batch=batch, length=length))


@pytest.mark.parametrize("causal", ["no", "upper", "lower"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_has_any_number_of_queries_and_keys(causal, masked):
    def make(batch, queries, keys):
        mask = (PRED, (batch, 1, 1, keys)) if masked else None
        return problem_of(attention((batch, 2, 1, queries, keys, 24, 24), mask=mask, causal=causal, zero_masked_rows=True))

    code = Code(ATTENTION, CPU, make, batch=Dim("batch", 1, 8), queries=Dim("queries", 1, 512), keys=Dim("keys", 1, 512))
    sizes = [(2, 7, 7), (1, 1, 1), (3, 1, 5), (1, 16, 16), (2, 31, 64), (1, 32, 33), (1, 33, 31), (2, 64, 64), (1, 257, 100)]
    for batch, queries, keys in sizes:
        one, kernel = code.at(batch=batch, queries=queries, keys=keys)
        agrees(one, kernel, rtol=1e-4, atol=1e-5)
    assert len(code.codes) <= 2


def test_norms_and_masks_have_any_number_of_rows_and_columns():
    def norm(batch, length):
        x, w = input_("x", F32, (batch, length, 72)), input_("w", F32, (72,))
        return fusion_of((x, w), (Node(LayerNorm(-1, 1e-5), map_("add", x, x), w),))[0]

    def mask(batch, length):
        x = input_("x", S32, (batch, length))
        return fusion_of((x,), (reshape(convert(x, PRED), (batch, 1, 1, length)),))[0]

    for make in (norm, mask):
        code = Code(NORM, CPU, make, batch=Dim("batch", 1, 64), length=Dim("length", 1, 512))
        for batch, length in [(2, 5), (1, 3), (3, 1), (17, 31), (64, 16), (5, 64), (1, 512)]:
            agrees(*code.at(batch=batch, length=length))
        assert len(code.codes) <= 3


def test_a_norm_of_norms_without_open_extents_runs_in_a_program_that_has_some():
    """Its call gives no extents: with a place for them, what is kept between passes was written elsewhere."""

    def norms(length):
        x, w = input_("x", F32, (3, 17, 64)), input_("w", F32, (64,))
        first = Node(LayerNorm(-1, 1e-5), x, w)
        return fusion_of((x, w), (first, Node(LayerNorm(-1, 1e-5), first, w)))[0]

    agrees(*Code(NORM, CPU, norms, length=Dim("length", 1, 512)).at(length=11))


def test_ranges_are_taken_of_open_extents():
    def cut(length):
        x = input_("x", F32, (length, 8))
        return fusion_of((x,), (map_("negate", slice_(x, 0, 1, length)),))[0]

    def turned(batch, length):
        x, by = input_("x", F32, (batch, length, 4, 16)), input_("by", F32, (length, 16))
        halves = [slice_(x, 3, 0, 8), map_("negate", slice_(x, 3, 8, 16))]
        by = broadcast(reshape(by, (1, length, 1, 16)), x.shape)
        rotated = map_("add", map_("multiply", x, by), Node(Concat(3), halves[1], halves[0]))
        return fusion_of((x, input_("by", F32, (length, 16))), (transpose(rotated, (0, 2, 1, 3)),))[0]

    for make, several in ((cut, False), (turned, True)):
        code = Code(NORM, CPU, make, **({"batch": Dim("batch", 1, 8)} if several else {}), length=Dim("length", 2, 512))
        for batch, length in [(2, 9), (1, 2), (3, 31), (8, 64)]:
            agrees(*code.at(**({"batch": batch} if several else {}), length=length))
        assert len(code.codes) <= 2  # of one element is one that has no step


def _batch_in_k(batch, rows):
    """The product [rows, batch * 64] @ [batch * 64, rows] of x [batch, rows, 64] with itself, read through views."""
    lhs = reshape(transpose(input_("x", F32, (batch, rows, 64)), (1, 0, 2)), (rows, batch * 64))
    node = gemm(lhs, transpose(lhs, (1, 0)), acc_dtype=F32)
    x = Node(Param(0, input_("x", F32, (batch, rows, 64)).tensor))
    lhs = reshape(transpose(x, (1, 0, 2)), (rows, batch * 64))
    return problem_of(Node(replace(node.op, lhs=lhs, rhs=transpose(lhs, (1, 0))), input_("x", F32, (batch, rows, 64))))


def test_rows_that_are_dense_for_one_matrix_alone_are_not_read_in_place_for_several():
    dims = {"batch": Dim("batch", 1, 16), "rows": Dim("rows", 8, 128)}
    points = [*plan_for(GEMM, _batch_in_k(1, 8), CPU).schedules()]
    in_place = next(s for s in points if not s.point(Blocks).pack_lhs)
    with pytest.raises(Unsupported, match="left operand cannot be read where it lies for all extents"):
        Code(GEMM, CPU, _batch_in_k, **dims).at(in_place, batch=1, rows=8)
    code = Code(GEMM, CPU, _batch_in_k, **dims)
    packed = next(s for s in points if s.point(Blocks).pack_lhs)
    for batch, rows in [(1, 8), (1, 9), (2, 8), (3, 17)]:
        agrees(*code.at(packed, batch=batch, rows=rows))


def test_one_pass_over_an_open_k_has_code_of_its_own():
    def make(k):
        return problem_of(gemm(input_("a", F32, (24, k)), input_("b", F32, (k, 56)), acc_dtype=F32))

    schedule = next(iter(plan_for(GEMM, make(128), CPU).schedules()))
    assert schedule.point(Blocks).kc == 128
    code = Code(GEMM, CPU, make, k=Dim("k", 1, 4096))
    for k in (1, 2, 37, 127, 128, 129, 256, 513):
        agrees(*code.at(schedule, k=k))
    short = next(iter(plan_for(GEMM, make(37), CPU).schedules()))
    with pytest.raises(Unsupported, match="passes over an open K would not be of whole packed vectors"):
        Code(GEMM, CPU, make, k=Dim("k", 1, 4096)).at(short, k=81)


def test_a_code_whose_guards_do_not_hold_is_not_taken():
    scope = Scope(strict=True).expect({"rows": 40})
    extent = scope.extent(Dim("rows", 1, 64))
    assert extent != 33
    assert extent > 16
    assert [str(g) for g in scope.failing({"rows": 33})] == ["rows != 33"]
    assert scope.failing({"rows": 9})
    assert not scope.failing({"rows": 34})
    assert np.all([not scope.failing({"rows": m}) for m in range(34, 65)])
