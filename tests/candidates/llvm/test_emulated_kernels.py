"""GPU kernels with no GPU: generated kernels in the machine that runs PTX, against the oracle, and faults put into them."""

import re
from dataclasses import replace

import pytest
import torch
from gated import of_halves
from ptx import H200, Deadlock, Fault, emulate
from w4_problems import posed

from tilewright.dtype import BF16, F16, S64
from tilewright.ir.build import const, input_, map_, reshape, slice_
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Attention, Concat, Param, Write
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import fusion_of, problem_of
from tilewright.schedule.sample import random_sources

pytest.importorskip("triton")

from tilewright.candidates.triton.gemm import candidate as gemm
from tilewright.candidates.triton.hopper.attention import candidate as hopper_attention
from tilewright.candidates.triton.hopper.gemm import candidate as hopper
from tilewright.candidates.triton.hopper.w4 import candidate as hopper_w4
from tilewright.candidates.triton.hopper.w4 import tiles as _w4_tiles
from tilewright.candidates.triton.normalization import candidate as rows
from tilewright.schedule.candidate import plan_for

FEW = replace(H200, cores=2)  # of an SM or two, so that blocks have several tiles of small matrices
LATE = {"late": True, "seed": 1}


def problem(line):
    return problem_of(parse(line).outputs[0])


def first(candidate, posed_problem, target, **knobs):
    """The first schedule with these knobs, or functions that knobs fulfil."""
    for s in plan_for(candidate, posed_problem, target).schedules():
        found = dict(s.knobs)
        if all(v(found.get(k)) if callable(v) else found.get(k) == v for k, v in knobs.items()):
            return s
    raise AssertionError(f"no schedule with {knobs}")


def wrong(candidate, posed_problem, schedule, target=H200, **how):
    """Say what is wrong with a kernel's results; None if nothing is."""
    sources = random_sources(posed_problem)
    got = emulate(candidate, posed_problem, schedule, sources, target, **how)
    return check(posed_problem, expect(posed_problem, sources), got)


def of_one_token():
    """Four heads that share keys and values, which lie in one array."""
    q, cache = input_("q", BF16, (2, 1, 4, 64)), input_("cache", BF16, (2, 2, 1, 300, 64))
    keys, values = (reshape(slice_(Node(Param(1, cache.tensor)), 0, i, i + 1), (2, 1, 300, 64)) for i in (0, 1))
    return problem_of(Node(Attention(0.125, operands=(Node(Param(0, q.tensor)), keys, values)), q, cache))


def in_a_cache():
    """A rotation by constants, its halves of rows written to a place of a larger array."""
    cache, x = input_("cache", BF16, (3, 9, 64)), input_("x", BF16, (3, 64))
    cosine = const(torch.randn(64).bfloat16())
    turned = Node(Concat(1), map_("negate", slice_(x, 1, 32, 64)), slice_(x, 1, 0, 32))
    new = map_("add", map_("multiply", x, cosine), turned)
    return fusion_of([x, cosine, cache], [Node(Write(1), cache, const([5], S64), reshape(new, (3, 1, 64)))])[0]


KERNELS = {
    "mma.sync and a cluster": (hopper_w4.CANDIDATE, posed("~f16[5,256] @ s4[200,256]^T group=64 + bias -> f16"), H200, {}),
    "halves for wgmma": (hopper_w4.CANDIDATE, posed("~f16[30,512] @ u4[128,512]^T group=64 zero_point -> f16"), H200, {}),
    "codes of 8 bits, SwiGLU": (
        hopper_w4.CANDIDATE,
        of_halves(posed("s8[20,512] scale=channel @ u4[136,512]^T group=32 zero_point -> f32"), out=F16),
        H200,
        {},
    ),
    "4-bit weights, many rows": (
        hopper_w4.CANDIDATE,
        posed("f16[100,192] @ s4[136,192]^T group=64 -> f16"),
        H200,
        {"tile_m": lambda m: m is not None},
    ),
    "4-bit weights made fp8, in pairs": (
        hopper_w4.CANDIDATE,
        posed("f8e4m3fn[66,320] scale=channel @ u4[136,320]^T group=64 zero_point + bias -> bf16"),
        FEW,
        {"multicast": True, "stream_k": 0, "expanded": None},
    ),
    "4-bit weights made bytes in turns, both halves of the columns": (
        hopper_w4.CANDIDATE,
        posed("f8e4m3fn[300,256] scale=channel @ s4[136,256]^T group=128 -> f16"),
        replace(H200, cores=3),
        {"tile_n": 256, "stream_k": lambda n: n, "expanded": None},
    ),
    "4-bit weights as bytes": (
        hopper_w4.CANDIDATE,
        posed("f8e4m3fn[66,320] scale=channel @ u4[136,320]^T group=64 zero_point + bias -> bf16"),
        FEW,
        {"expanded": True},
    ),
    "TMA and wgmma": (
        hopper.CANDIDATE,
        problem("bf16[70,712] @ bf16[712,72] + bias + residual, relu -> bf16"),
        FEW,
        {"multicast": False, "stream_k": 0},
    ),
    "pairs of blocks": (hopper.CANDIDATE, problem("s8[70,300] @ s8[300,80] -> s8"), FEW, {"multicast": True}),
    "attention of one token": (hopper_attention.CANDIDATE, of_one_token(), FEW, {"num_stages": 4, "overlapped": True}),
    "rows in a larger array": (rows.CANDIDATE, in_a_cache(), H200, {}),
    "plain Triton": (gemm.CANDIDATE, problem("f8e4m3fn[20,96] @ f8e5m2[40,96]^T -> f8e4m3fn scale=tensor"), H200, {}),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gives_what_the_oracle_gives(name, monkeypatch):
    monkeypatch.setattr(_w4_tiles, "MOST_TRIED", 1000)  # those of small matrices are not what is ranked first
    candidate, p, target, knobs = KERNELS[name]
    schedule = first(candidate, p, target, **knobs)
    for how in ({}, LATE | {"fenced_copies": candidate not in (gemm.CANDIDATE, rows.CANDIDATE)}):
        assert wrong(candidate, p, schedule, target, **how) is None, how


def without(pattern, instead="", which=None):
    """Every match of a pattern in the PTX, or one of them, replaced."""

    def change(ptx):
        found = list(re.finditer(pattern, ptx))
        assert found, f"no {pattern}"
        for m in reversed(found if which is None else [found[which]]):
            ptx = ptx[: m.start()] + m.expand(instead) + ptx[m.end() :]
        return ptx

    return change


FMA = r"fma\.rn\.f32 %\w+, %\w+, "

# What is done to a kernel's PTX, and how the machine must run for that to show.
FAULTS = {
    "mma.sync and a cluster": [
        ("rows of a fragment exchanged", without(r"(m16n8k16\S+ \{[^}]*\}, \{)(%\w+),(%\w+)", r"\1\3,\2", -1), {}),
        (
            "another row's scale",
            without(rf"({FMA})(%\w+)(, [^;]*;(?:[^;]*{FMA}\2[^;]*;)*[^;]*{FMA})(%\w+)", r"\1\4\3\4", 0),
            {},
        ),
        ("no barrier of the block", without(r"bar\.sync\s+0;"), {"seed": 1}),
        ("no wait for copies", without(r"cp\.async\.wait_group[^;]*;"), {"late": True}),
        ("no wait for the cluster's sums", without(r"mbarrier\.try_wait[^;]*;", "setp.eq.u32 q, 0, 0;"), {}),
        ("no wait until the cluster has begun", without(r"barrier\.cluster\.wait[^;]*;"), {}),
        ("nobody expects bytes", without(r"@q mbarrier\.arrive\.expect_tx[^;]*;"), {}),
    ],
    "halves for wgmma": [
        ("no wait for products", without(r"wgmma\.wait_group[^;]*;"), {"late": True}),
        ("one product more under way", without(r"(wgmma\.wait_group\.sync\.aligned) 0", r"\1 1"), {"late": True}),
        ("another swizzle", without("0x40000040", "0x80000040"), {}),
        ("no fence before products", without(r"fence\.proxy\.async[^;]*;"), {}),
    ],
    "4-bit weights made fp8, in pairs": [
        ("no wait for products", without(r"wgmma\.wait_group[^;]*;"), {"late": True}),
        ("codes of another row", without(r"shr\.u32 t, (%r\d+), 2;", r"shr.u32 t, \1, 6;", 0), {}),
        ("sums of a group go on", without(r"(k32\.f32\.e4m3\.e4m3 [^;]*\}, %rd\d+), 0,", r"\1, 1,"), {}),
    ],
    "codes of 8 bits, SwiGLU": [
        ("codes are made halves before they came", without(r"cp\.async\.wait_group[^;]*;"), {"late": True}),
        ("products before all of them are", without(r"bar\.sync\s+0;"), {"seed": 1}),
        ("products that do not see them", without(r"fence\.proxy\.async[^;]*;"), {"fenced_copies": True}),
        ("one half for the other", without(r"(ld\.shared\.f32 %r\d+, \[%r\d+)\];", r"\1 + 8];", 0), {}),
    ],
    "TMA and wgmma": [
        (
            "products still read what is given back",
            without(r"(wgmma\.wait_group\.sync\.aligned\s+)1", r"\g<1>2"),
            {"late": True},
        ),
        ("no wait for a stage", without(r"mbarrier\.try_wait[^;]*;", "setp.eq.u32 complete, 0, 0;"), {"late": True}),
        ("nobody gives a stage back", without(r"@%p\d+ mbarrier\.arrive\.shared[^;]*;"), {}),
        ("no fence before a store", without(r"fence\.proxy\.async[^;]*;"), {}),
        ("no wait for stores", without(r"cp\.async\.bulk\.wait_group[^;]*;"), {"late": True}),
    ],
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_kernel_is_found(name):
    candidate, p, target, knobs = KERNELS[name]
    schedule = first(candidate, p, target, **knobs)
    unseen = []
    for what, change, how in FAULTS[name]:
        try:
            if wrong(candidate, p, schedule, target, change=change, **how) is None:
                unseen.append(what)
        except (Fault, Deadlock):
            pass
    assert not unseen
