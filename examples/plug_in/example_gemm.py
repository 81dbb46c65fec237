"""A plain Triton gemm, one block of the result at a time."""

import torch
import triton
import triton.language as tl

from tilewright.candidates.library import candidate_of_call


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


DEVICES = {"cuda"} if isinstance(gemm, triton.JITFunction) else {"cpu", "cuda"}  # Triton's interpreter takes tensors of a CPU
CANDIDATE = candidate_of_call("example_gemm", multiply, [{"tile": 64}, {"tile": 32}], DEVICES)
