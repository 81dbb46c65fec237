"""A plain Triton gemm, one block of the result at a time."""

import os
from functools import partial

import torch
import triton
import triton.language as tl

from tilewright.candidates.library import kernel_of_call
from tilewright.dtype import BF16, F16, F32
from tilewright.schedule.candidate import CPU, GEMM, GPU, Candidate, FixedPlan, Refusal, Schedule

DEVICES = CPU | GPU if os.environ.get("TRITON_INTERPRET") == "1" else GPU  # its interpreter takes tensors of the CPU


@triton.jit
def gemm(a, b, c, M, N, am, ak, bk, bn, K: tl.constexpr, TILE: tl.constexpr):
    m = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]  # offsets may not fit into 32 bits
    n = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    k = tl.arange(0, TILE).to(tl.int64)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, TILE):
        left = tl.load(a + m * am + (start + k)[None, :] * ak, (m < M) & (start + k < K)[None, :], 0.0)
        right = tl.load(b + (start + k)[:, None] * bk + n * bn, (start + k < K)[:, None] & (n < N), 0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(c + m * N + n, acc, (m < M) & (n < N))


def multiply(a, b, tile):
    c = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    grid = triton.cdiv(c.shape[0], tile), triton.cdiv(c.shape[1], tile)
    gemm[grid](a, b, c, *c.shape, *a.stride(), *b.stride(), K=a.shape[1], TILE=tile)
    return c


def plan(problem, target):
    if problem.lhs.dtype is not problem.rhs.dtype or problem.lhs.dtype not in (F32, F16, BF16) or problem.batch != 1:
        return Refusal("it multiplies two matrices of one type: f32, f16 or bf16")
    if len(problem.acc.shape) != 2 or problem.acc.dtype is not F32:
        return Refusal("it multiplies matrices without batch axes, and adds up in f32")
    return FixedPlan([Schedule.of(tile=64), Schedule.of(tile=32)], partial(build, problem))


def build(problem, schedule):  # the operands' casts and the epilogue are torch's, before and after the product
    return kernel_of_call("example_gemm", schedule, problem, partial(multiply, tile=schedule["tile"]))


CANDIDATE = Candidate("example_gemm", GEMM, DEVICES, 5, plan)
