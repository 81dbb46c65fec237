"""Every template once, at odd shapes, for compute-sanitizer:

    python tests/gpu/sanitized.py build
    compute-sanitizer --tool memcheck python tests/gpu/sanitized.py run
    compute-sanitizer --tool racecheck python tests/gpu/sanitized.py run

`run PART` takes the cases whose names have that part. Reports stand between the lines `## name` and `## end name`.
"""

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from attentions import attention as posed_attention
from attentions import quantised
from fusions import by_row, norm
from fusions import problem_of as region_of
from gated import gated, of_halves
from tests.candidates.triton.hopper.test_attention import coded
from tests.candidates.triton.hopper.test_gemm import alike_heads, heads, layer
from tests.candidates.triton.test_attention import flash
from w4_problems import posed

from tilewright.candidates.triton.attention import candidate as attention
from tilewright.candidates.triton.gemm import candidate as gemm
from tilewright.candidates.triton.hopper.attention import candidate as hopper_attention
from tilewright.candidates.triton.hopper.gemm import candidate as hopper
from tilewright.candidates.triton.hopper.gemm import space as hopper_space
from tilewright.candidates.triton.hopper.w4 import candidate as hopper_w4
from tilewright.candidates.triton.normalization import candidate as rows
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED, S8, S64
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, input_, map_
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Gather, Quantize, Softmax
from tilewright.schedule.candidate import Schedule, plan_for, refusal
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

H200 = Target(
    "NVIDIA H200", CHIP, "cuda", 132, features=frozenset({"cuda", "sm_90"}), caches_bytes={"shared": CHIP.shared_bytes}
)
FEW = replace(H200, cores=4)  # a few blocks, of many tiles each

Wanted = Callable[[dict[str, object]], bool]


def gemm_of(line):
    return problem_of(parse(line).outputs[0])


def cases():
    """Name, candidate, problem, which of its points, and the device as the space of points is told of it."""
    turns: Wanted = lambda k: k["pingpong"] and not k["multicast"]  # noqa: E731
    pairs: Wanted = lambda k: k["pingpong"] and k["multicast"]  # noqa: E731
    shared: Wanted = lambda k: k["stream_k"] and not k["multicast"]  # noqa: E731
    first: Wanted = lambda _: True  # noqa: E731
    fp8 = "f8e4m3fn[300,400] @ f8e4m3fn[400,272] * 0.01 + bias:f16 + residual:f16 -> f16"
    up = layer(F8E4M3FN, 320, "gelu", F8E4M3FN, rows=(3, 237), depth=400)
    down = layer(S8, 384, rows=(4, 333), depth=272)
    x, scale, bias, step = (
        input_("x", F16, (1061, 200)),
        input_("s", F16, (200,)),
        input_("b", F16, (200,)),
        input_("q", F32, ()),
    )
    y = norm(x, scale, bias)
    long = norm(input_("x", BF16, (37, 1100)), input_("s", BF16, (1100,)), center=False)
    masked = flash(mask=PRED, extents=(2, 3, 77, 136))
    ids, table, place = input_("i", S64, (7, 9)), input_("t", F16, (33, 50)), input_("p", F16, (9, 50))
    found = [
        ("hopper bf16", hopper, gemm_of("bf16[130,136] @ bf16[136,200] + bias, gelu -> bf16"), first, H200),
        ("hopper batch", hopper, gemm_of("s8[3,200,144] @ s8[3,96,144]^T -> s8"), first, H200),
        ("hopper 256", hopper, gemm_of("s8[300,528] @ s8[528,528]^T -> s8"), lambda k: k["tile_n"] == 256, FEW),
        (
            "hopper 224, multicast",
            hopper,
            gemm_of("s8[300,528] @ s8[528,528]^T -> s8"),
            lambda k: k["tile_n"] == 224 and k["multicast"],
            FEW,
        ),
        ("hopper stream-K", hopper, gemm_of("bf16[257,1288] @ bf16[1288,264] -> f32"), shared, H200),
        (
            "hopper stream-K, multicast",
            hopper,
            gemm_of("bf16[1024,5120] @ bf16[1280,5120]^T -> bf16"),
            lambda k: k["stream_k"] and k["multicast"],
            H200,
        ),
        (
            "hopper cluster split-K",
            hopper,
            gemm_of("bf16[300,1032] @ bf16[1032,264] + bias, gelu -> bf16"),
            lambda k: k["split_k"] == 3 and k["tile_m"] == 128,
            H200,
        ),
        ("hopper cluster split-K, s8", hopper, gemm_of("s8[70,1040] @ s8[1040,272] -> s8"), lambda k: k["split_k"] > 1, H200),
        (
            "hopper fp8 by rows",
            hopper,
            gemm_of("f8e4m3fn[130,400] scale=channel @ f8e4m3fn[400,208] scale=channel -> bf16"),
            first,
            H200,
        ),
        (
            "hopper fp8 by blocks",
            hopper,
            gemm_of("f8e4m3fn[130,400] block=1x128 @ f8e4m3fn[208,400]^T block=128x128 -> bf16"),
            first,
            H200,
        ),
        (
            "hopper fp8 by blocks, residual",
            hopper,
            gemm_of("f8e4m3fn[130,512] block=1x128 @ f8e4m3fn[256,512]^T block=128x128 + residual:bf16 -> bf16"),
            first,
            H200,
        ),
        ("hopper residual deferred", hopper, gemm_of(fp8), lambda k: k["deferred_store"], FEW),
        ("hopper residual by TMA", hopper, down, lambda k: not k["pingpong"] and k["tile_n"] % 64, FEW),
        ("hopper ping-pong, gelu", hopper, up, turns, FEW),
        ("hopper ping-pong, gelu, multicast", hopper, up, pairs, FEW),
        ("hopper ping-pong, residual", hopper, down, turns, FEW),
        ("hopper ping-pong, residual, multicast", hopper, down, pairs, FEW),
        ("hopper SwiGLU, ping-pong, multicast", hopper, gated(BF16, (300,), 328, 272), pairs, FEW),
        ("hopper heads", hopper, heads(), turns, FEW),
        ("hopper heads, shared epilogue", hopper, alike_heads(), turns, FEW),
        ("plain f16", gemm, gemm_of("f16[67,72] @ f16[72,50] + bias, relu -> f16"), first, H200),
        ("plain s8", gemm, gemm_of("s8[33,80] @ s8[80,48] -> s8"), first, H200),
        ("plain split-K", gemm, gemm_of("bf16[64,1032] @ bf16[1032,72] -> f32"), lambda k: k["split_k"] > 1, H200),
        ("plain swapped", gemm, gemm_of("bf16[5,520] @ bf16[520,72] -> bf16"), lambda k: k["swap_ab"], H200),
        ("plain f32", gemm, gemm_of("f32[33,65] @ f32[65,17] + residual"), first, H200),
        ("plain s4", gemm, gemm_of("f16[16,256] @ s4[72,256]^T group=64 -> f16"), first, H200),
        ("rows norm fp8", rows, region_of(y, Node(Quantize(F8E4M3FN), y, step)), first, H200),
        ("rows by row s8", rows, region_of(*by_row(convert(long, F32), S8)), first, H200),
        ("rows gather", rows, region_of(norm(map_("add", Node(Gather(0), table, ids), place))), first, H200),
        ("rows softmax", rows, region_of(Node(Softmax(1), input_("x", F32, (37, 129)))), first, H200),
        ("rows map", rows, region_of(map_("gelu", input_("x", F16, (37, 1300)))), first, H200),
        (
            "attention causal, grouped",
            attention,
            problem_of(posed_attention((2, 4, 2, 70, 130, 64, 64), F16, causal="lower", zero_masked_rows=True)),
            first,
            H200,
        ),
        (
            "attention mask",
            attention,
            problem_of(posed_attention((2, 4, 2, 70, 130, 64, 64), F16, mask=(F32, (1, 4, 70, 130)))),
            first,
            H200,
        ),
        ("attention quantised", attention, problem_of(quantised((1, 2, 1, 130, 130, 64, 64))), first, H200),
        ("hopper_attention mask", hopper_attention, masked, lambda k: "splits" in k, H200),
        ("hopper_attention persistent", hopper_attention, masked, lambda k: k["kernel"] == "persistent", H200),
        ("hopper_attention ring", hopper_attention, masked, lambda k: "groups" in k and not k["overlapped"], H200),
        ("hopper_attention ring, overlapped", hopper_attention, masked, lambda k: k.get("overlapped"), H200),
        ("hopper_attention ring, causal", hopper_attention, flash(causal="upper", extents=(1, 2, 600, 600)), first, H200),
        (
            "hopper_attention causal fp8",
            hopper_attention,
            coded(causal="upper", tokens=136, batch=2, heads=3),
            lambda k: k.get("ones"),
            H200,
        ),
        (
            "hopper_attention f16 odd",
            hopper_attention,
            coded(F8E4M3FN, F16, tokens=272, values=False, batch=2, heads=3),
            first,
            H200,
        ),
        ("hopper_w4 1 row", hopper_w4, posed("~f16[1,2048] @ s4[904,2048]^T group=64 -> f16"), first, H200),
        (
            "hopper_w4 16 rows",
            hopper_w4,
            posed("f16[13,1024] @ u4[520,1024]^T group=32 zero_point + bias, silu -> f16"),
            first,
            H200,
        ),
        ("hopper_w4 64 rows", hopper_w4, posed("~bf16[61,2048] @ s4[300,2048]^T group=128 -> bf16"), first, H200),
        (
            "hopper_w4 SwiGLU of 8-bit rows",
            hopper_w4,
            of_halves(posed("s8[9,1024] scale=channel @ s4[528,1024]^T group=64 -> f32"), out=F16),
            first,
            H200,
        ),
        (
            "hopper_w4 tiles",
            hopper_w4,
            posed("f16[300,1024] @ s4[520,1024]^T group=64 * residual -> f16"),
            lambda k: "tile_m" in k,
            H200,
        ),
    ]
    for name, module, problem, wanted, target in found:
        candidate = module.CANDIDATE
        why = refusal(candidate, problem, target)
        assert why is None, f"{name}: {why}"
        point = next((s for s in _points(candidate, problem, target) if wanted(dict(s.knobs))), None)
        assert point is not None, f"{name}: no such point"
        yield name, candidate, problem, point


def _points(candidate, problem, target) -> Iterable[Schedule]:
    """All of them, where a candidate offers the first few alone."""
    plan = plan_for(candidate, problem, target)
    return map(Schedule.of_point, hopper_space.tile_configs(plan.gemm)) if candidate is hopper.CANDIDATE else plan.schedules()


def build(case):
    """Fill Triton's cache, in a process of its own."""
    name, candidate, problem, schedule = case
    plan_for(candidate, problem, H200).build(schedule)
    return name


def run(part: str) -> None:
    torch.manual_seed(0)
    target = detect("cuda")
    for name, candidate, problem, schedule in cases():
        if part not in name:
            continue
        kernel = plan_for(candidate, problem, target).build(schedule)
        sources = [t.cuda() for t in random_sources(problem)]
        held = getattr(problem, "weights", ())
        step = kernel.prepare({i: sources[i] for i, constant in enumerate(held) if constant})
        print(f"## {name} ({schedule})", flush=True)
        for _ in range(2):  # launches that are chained meet one another
            results = step(sources)
        torch.cuda.synchronize()
        print(f"## end {name} {[tuple(r.shape) for r in results]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "build":
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            for number, _ in enumerate(pool.map(build, list(cases()))):
                print(f"{number + 1} built", flush=True)
    else:
        run(sys.argv[2] if len(sys.argv) > 2 else "")
