"""Hopper's products with long epilogues, on one: `pytest -m gpu` there. CI has none."""

from dataclasses import replace

import pytest
import torch
from gated import gated
from tests.candidates.triton.hopper.test_gemm import alike_heads, heads, layer, problem

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, S8
from tilewright.hardware.detect import detect
from tilewright.ir.build import const
from tilewright.ir.graph import substitute, toposort
from tilewright.ir.ops import Const
from tilewright.schedule.bench import Bench
from tilewright.schedule.candidate import Schedule, plan_for
from tilewright.schedule.sample import random_sources

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]
CASES = {
    "fp8, gelu, codes": lambda: layer(F8E4M3FN, 320, "gelu", F8E4M3FN, rows=(3, 437), depth=400),
    "s8, gelu by tanh, codes": lambda: layer(S8, 512, "gelu_tanh", S8, rows=(5, 300), depth=272),
    "f16, gelu, codes": lambda: layer(F16, 768, "gelu", F8E4M3FN, rows=(2, 700), depth=328),
    "fp8, residual": lambda: layer(F8E4M3FN, 768, rows=(1, 1000), depth=1040),
    "s8, residual": lambda: layer(S8, 384, rows=(4, 333), depth=128),
    "bf16, SwiGLU": lambda: gated(BF16, (700,), 328, 544),
    "f16, SwiGLU and a residual": lambda: gated(F16, (3, 211), 456, 200, side=True),
    "s8, SwiGLU, codes": lambda: gated(S8, (900,), 400, 480, S8),
    "fp8, SwiGLU, codes": lambda: gated(F8E4M3FN, (333,), 272, 352, F8E4M3FN),
    "f16, SwiGLU of a batch": lambda: gated(F16, (190,), 200, 96, batch=(3,)),
    "bf16, few tiles, gelu": lambda: problem("bf16[300,1000] @ bf16[1000,328] + bias, gelu_tanh -> bf16"),
    "fp8, few tiles": lambda: problem("f8e4m3fn[2,100,2064] scale=channel @ f8e4m3fn[2,256,2064]^T scale=channel -> bf16"),
    "s8, few tiles, codes": lambda: problem("s8[77,1040] scale=tensor @ s8[1040,320] scale=channel -> s8 scale=tensor"),
    "s8, heads": heads,
    "s8, heads, shared epilogue": alike_heads,
    "s8, heads with ranges of one bias": lambda: alike_heads(joined=True),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_kernel_agrees_with_the_oracle(name):
    from tilewright.candidates.triton.hopper.gemm.candidate import CANDIDATE
    from tilewright.candidates.triton.hopper.gemm.plan import plan_of
    from tilewright.candidates.triton.hopper.gemm.space import tile_configs

    asked, target = CASES[name](), detect("cuda")
    weights = {i: t.cuda() for i, t in enumerate(random_sources(asked)) if asked.weights[i]}
    kinds = {}
    cores = target.cores if "few tiles" in name else 4  # else a few blocks, of many tiles each
    for p in tile_configs(plan_of(asked, replace(target, cores=cores))):
        kinds.setdefault((p.split_k, p.tile_n, p.pingpong, p.multicast, p.deferred_store, p.vector_store, p.stream_k > 0), p)
    chosen = list(kinds.values())
    if "few tiles" in name:
        chosen = [p for p in chosen if p.split_k > 1]
        assert chosen
    bench = Bench(asked, target, weights, watched=True)
    for i, p in enumerate(chosen[:: -(-len(chosen) // 8)]):
        why = bench.attempt(i, CANDIDATE, Schedule.of_point(p)).why
        assert why is None, f"{p}: {why}"


def test_layers_of_other_scales_run_one_machine_code_and_each_is_right():
    """Their data are drawn on the GPU."""
    from tilewright.candidates.triton.hopper.gemm.candidate import CANDIDATE
    from tilewright.candidates.triton.runtime import module

    target = detect("cuda")
    first = layer(F8E4M3FN, 3072, "gelu", F8E4M3FN, rows=(8, 384))
    misses = []
    for factor in (1.0, 1.7, 0.31):
        scales = [n for n in toposort(first.op.stores) if isinstance(n.op, Const)]
        others = {n: const(n.op.data.tensor().item() * factor, F32) for n in scales}
        problem = replace(first, op=replace(first.op, stores=tuple(substitute(first.op.stores, others))))
        weights = {i: t.cuda() for i, t in enumerate(random_sources(problem)) if problem.weights[i]}
        bench = Bench(problem, target, weights, watched=True)
        assert all(t.is_cuda for t in bench._sources)
        why = bench.attempt(0, CANDIDATE, next(iter(plan_for(CANDIDATE, problem, target).schedules()))).why
        assert why is None, f"{factor}: {why}"
        misses.append(module._machine_code.cache_info().misses)
    assert len(set(misses)) == 1
