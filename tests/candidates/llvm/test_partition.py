"""Balance of a nest's tasks on 2 to 128 threads, simulated: each thread takes the next task as soon as it is free."""

import heapq
import statistics
from dataclasses import replace

import pytest

from tilewright.candidates.llvm.gemm.dots import choose
from tilewright.candidates.llvm.gemm.space import Product, ranked
from tilewright.dtype import BF16, F32, S8, S32
from tilewright.hardware.detect import chips
from tilewright.hardware.target import Target

# (M, N, K): layers of language models at one to many tokens, experts, squares, odd extents, tall and flat ones.
SHAPES = (
    (1, 4096, 4096), (1, 11008, 4096), (8, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096), (128, 4096, 4096),
    (32, 11008, 4096), (32, 4096, 11008), (128, 1024, 4096), (512, 14336, 4096), (128, 768, 768), (128, 2304, 768),
    (128, 3072, 768), (128, 768, 3072), (512, 768, 768), (512, 3072, 768), (1024, 768, 3072), (1, 50257, 768), (64, 50257, 768),
    (7, 2816, 2048), (19, 1408, 2048), (33, 2048, 1408), (47, 2048, 1408), (4, 14336, 4096), (200, 300, 400), (255, 257, 129),
    (1000, 10, 1000), (10, 1000, 1000), (1000, 1000, 10), (2048, 64, 512), (333, 777, 555), (1536, 1536, 192), (512, 512, 512),
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 3072, 768), (384, 384, 384), (256, 4096, 64), (4096, 256, 64),
    (777, 777, 777),
)  # fmt: skip
THREADS = (2, 3, 6, 16, 48, 128)
KINDS = (
    ("x86_64_avx512_bf16", F32),
    ("x86_64_avx512_bf16", S8),
    ("x86_64_avx2", F32),
    ("x86_64_amx", BF16),
    ("x86_64_amx", S8),
    ("aarch64_bf16", BF16),
    ("aarch64_i8mm", S8),
)
MOST = 1.5  # times the mean that a thread may work
OF_TILES = 1.45  # or so much more than with tasks of one tile each, which is as even as can be
MEAN = 1.13  # over the shapes whose tiles are even enough


def tasks(blocks, rows, columns, batch=1):
    """The work of each task (rows times panels), in the counter's order."""
    if blocks.pack_per_thread:
        return [rows] * batch
    panels, together = -(-columns // blocks.nr), blocks.nc // blocks.nr
    across = [min(together, panels - p) for p in range(0, panels, together)]
    down = [min(blocks.mc, rows - r) for r in range(0, rows, blocks.mc)]
    return [p * r for p in across for r in down] * batch


def imbalance(work, threads):
    """The longest time of a thread over their mean."""
    ends = [0] * threads
    for each in work:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends) * threads / sum(work)


@pytest.mark.thin(3)
@pytest.mark.parametrize(("chip", "dtype"), KINDS)
@pytest.mark.parametrize("threads", THREADS)
def test_no_thread_works_much_longer_than_the_others(chip, dtype, threads):
    chip = next(c for c in chips() if c.name == chip)
    dot = choose(dtype, dtype, S32 if dtype is S8 else F32, chip).dot
    target = Target("", chip, "cpu", threads, caches_bytes={"L1d": 48 << 10, "L2": 2 << 20})
    usual = []
    for i, (m, n, k) in enumerate(SHAPES[:: 1 if threads == 2 else 3]):
        blocks = next(ranked(Product(dot, 1, m, n, k, constant=i % 2 == 0, in_place=True), target))
        found = imbalance(tasks(blocks, m, n), threads)
        least = imbalance(tasks(replace(blocks, mc=blocks.mr, nc=blocks.nr), m, n), threads)
        assert found <= max(MOST, OF_TILES * least), f"{(m, n, k)}: {blocks} {found:.2f}, at least {least:.2f}"
        if least < 1.1:
            usual.append(found)
    assert not usual or statistics.fmean(usual) <= MEAN


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("batch", [2, 8, 12, 16, 96, 100, 384])
def test_many_matrices_are_dealt_out_evenly(batch, threads):
    chip = next(c for c in chips() if c.name == "x86_64_avx512_bf16")
    dot = choose(F32, F32, F32, chip).dot
    for m, n, k in ((128, 128, 64), (128, 64, 128), (1024, 1024, 1024), (1, 128, 128)):
        target = Target("", chip, "cpu", threads)
        blocks = next(ranked(Product(dot, batch, m, n, k, constant=False, in_place=True), target))
        found = imbalance(tasks(blocks, m, n, batch), threads)
        least = imbalance(tasks(replace(blocks, mc=blocks.mr, nc=blocks.nr, pack_per_thread=False), m, n, batch), threads)
        assert found <= max(MOST, OF_TILES * least), f"{(m, n, k)}: {blocks} {found:.2f}, at least {least:.2f}"
