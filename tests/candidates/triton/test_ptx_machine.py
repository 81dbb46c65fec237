"""The machine that runs PTX: arithmetic against exact numbers, lanes that part and meet, and faults that it must find."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx import Deadlock, Fault, How, run
from ptx.numbers import cast, fma, to_bf16
from ptx.text import Unknown

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0, .param .u64 .ptr .global .align 1 k_param_1)
.reqntid {threads}
{{
  .reg .pred %p<20>; .reg .b16 %rs<20>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
  ld.param.b64 %rd1, [k_param_0]; ld.param.b64 %rd2, [k_param_1];
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
"""


def ran(body, given=None, threads=32, shared_bytes=256, **how):
    """Run a body, and give the word that each thread leaves at `%rd5`; `%rd4` points to its input word, `%r1` is its number."""
    given = torch.arange(threads, dtype=torch.int32) if given is None else given
    out = torch.full((threads,), -1, dtype=torch.int32)
    text = HEAD.format(threads=threads) + body + "\n ret;\n}"
    run(text, (1,), [given.data_ptr(), out.data_ptr()], shared_bytes, How(**how))
    return out


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("prmt.b32 %r3, %r2, %r2, 0x0123;", lambda x: int.from_bytes(x.to_bytes(4, "little"), "big")),
        ("prmt.b32 %r3, %r2, 0, 0x4448;", lambda x: 255 if x >> 7 & 1 else 0),
        ("lop3.b32 %r3, %r2, 0x0f0f0f0f, 0x64006400, 0xea;", lambda x: x & 0x0F0F0F0F | 0x64006400),
        ("lop3.b32 %r3, %r2, %r1, 0xff00, 0x1e;", None),
        ("bfe.u32 %r3, %r2, 5, 7;", lambda x: x >> 5 & 127),
        ("bfe.s32 %r3, %r2, 5, 3;", lambda x: ((x >> 5 & 7) ^ 4) - 4),
        ("bfi.b32 %r3, 0x55, %r2, 9, 8;", lambda x: x & ~(255 << 9) | 0x55 << 9),
        ("shf.r.wrap.b32 %r3, %r2, %r2, 8;", lambda x: x >> 8 | x << 24),
        ("shl.b32 %r3, %r2, 40;", lambda x: 0),
        ("shr.s32 %r3, %r2, 40;", lambda x: -1 if x >> 31 else 0),
        ("mul.hi.s32 %r3, %r2, 0x12345678;", lambda x: (x - (x >> 31 << 32)) * 0x12345678 >> 32),
        ("div.s32 %r3, %r2, -7;", lambda x: -int(Fraction(x - (x >> 31 << 32), 7))),
        ("rem.s32 %r3, %r2, 7;", lambda x: int(math.fmod(x - (x >> 31 << 32), 7))),
        ("mad.lo.s32 %r3, %r2, 3, 5;", lambda x: 3 * x + 5),
        ("popc.b32 %r3, %r2;", lambda x: x.bit_count()),
        ("cvt.s32.s8 %r3, %r2;", lambda x: ((x & 255) ^ 128) - 128),
        ("cvt.sat.s8.s32 %r3, %r2;", lambda x: max(min(x - (x >> 31 << 32), 127), -128)),
    ],
)
def test_integers(line, wanted):
    given = torch.randint(-(1 << 31), 1 << 31, (32,)).to(torch.int32)
    got = ran(f"ld.global.b32 %r2, [%rd4]; {line} st.global.b32 [%rd5], %r3;", given)
    for i, (x, y) in enumerate(zip(given.tolist(), got.tolist(), strict=True)):
        x &= 0xFFFFFFFF
        bits = [0x1E >> (4 * (x >> b & 1) + 2 * (i >> b & 1) + (0xFF00 >> b & 1)) & 1 for b in range(32)]
        exact = wanted(x) if wanted else sum(b << n for n, b in enumerate(bits))
        assert (y - exact) % (1 << 32) == 0, (x, y)


def exactly(value, kind):
    """The nearest number of a type to a fraction, ties to even."""
    mantissa, least = {np.float16: (11, -24), np.float32: (24, -149)}[kind]
    exponent = max(math.frexp(float(value))[1] - mantissa, least) if value else 0
    scaled = value / Fraction(2) ** exponent
    return float(round(scaled) * Fraction(2) ** exponent)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_a_fused_sum_is_rounded_once(kind):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(4000).astype(kind) for _ in range(2))
    exponents = rng.integers(-20, 10, 4000)
    z = (rng.choice([-1, 1], 4000) * 2.0**exponents).astype(kind)
    # half way between two numbers but for what is lost in f64: that decides
    x[0], y[0], z[0] = (1 + 2**-12, 1 + 2**-12, 2.0**-60) if kind is np.float32 else (1 + 2**-5, 1 + 2**-6, 2.0**-24)
    got = fma(x, y, z, kind)
    for a, b, c, r in zip(x, y, z, got, strict=True):
        assert float(r) == exactly(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)), kind)


@pytest.mark.parametrize(("kind", "torch_kind"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_eight_bit_floats_are_torch_s(kind, torch_kind):
    largest = torch.finfo(torch_kind).max
    x = torch.cat([torch.randn(4000) * 10 ** torch.linspace(-6, 2, 4000), torch.tensor([0.0, -0.0, largest])]).clamp(
        -largest, largest
    )
    codes = torch.arange(256, dtype=torch.uint8)
    x = torch.cat([x, codes.view(torch_kind).float()[:120]])
    x = torch.cat([x, (x[-120:-1] + x[-119:]) / 2])  # ties
    got = cast(f"{kind}x2", "f32", frozenset({"rn", "satfinite"}))(np.zeros(len(x), np.uint32), x.numpy().view(np.uint32))
    assert (got.astype(np.uint8) == x.to(torch_kind).view(torch.uint8).numpy()).all()
    back = cast("f16", kind, frozenset({"rn"}))(codes.numpy())
    assert np.array_equal(back.view(np.float16), codes.view(torch_kind).half().numpy(), equal_nan=True)
    assert cast("e4m3x2", "f32", frozenset({"satfinite"}))(*[np.float32([1e9]).view(np.uint32)] * 2)[0] == 0x7E7E


def test_bf16_is_torch_s_also_of_f64():
    x = torch.randn(5000, dtype=torch.float64)
    tie = torch.tensor([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40], dtype=torch.float64)
    got = to_bf16(torch.cat([x, tie]).numpy())
    assert (
        got[:5000] == x.float().bfloat16().view(torch.int16).numpy().view(np.uint16)
    ).mean() > 0.999  # f32 between rounds a few twice
    assert got[5000:].tolist() == [0x3F81, 0x3F80, 0x3F81]


def test_lanes_part_and_meet():
    body = """
      mov.b32 %r3, 0; and.b32 %r4, %r1, 3; mov.b32 %r5, 0;
      $LOOP:
      setp.ge.u32 %p1, %r5, %r4;
      @%p1 bra $END;
      add.s32 %r3, %r3, 10; add.s32 %r5, %r5, 1;
      bra.uni $LOOP;
      $END:
      shfl.sync.bfly.b32 %r6, %r3, 1, 31, -1;
      st.global.b32 [%rd5], %r6;
    """
    for how in ({}, {"apart": True}, {"seed": 3}):
        assert ran(body, threads=64, **how).tolist() == [10 * ((i ^ 1) & 3) for i in range(64)]


EXCHANGE = """
  shl.b32 %r3, %r1, 2; mov.b32 %r4, global_smem; add.s32 %r5, %r4, %r3; xor.b32 %r6, %r5, 128;
  ld.global.b32 %r2, [%rd4]; st.shared.b32 [%r5], %r2; {barrier} ld.shared.b32 %r7, [%r6]; st.global.b32 [%rd5], %r7;
"""


def test_a_missing_barrier_shows_in_some_order():
    right = [i ^ 32 for i in range(64)]
    assert all(ran(EXCHANGE.format(barrier="bar.sync 0;"), threads=64, seed=s).tolist() == right for s in range(6))
    assert any(ran(EXCHANGE.format(barrier=""), threads=64, seed=s).tolist() != right for s in range(6))


COPY = """
  shl.b32 %r3, %r1, 2; mov.b32 %r4, global_smem; add.s32 %r5, %r4, %r3;
  cp.async.ca.shared.global [%r5], [%rd4], 4; cp.async.commit_group;
  {wait} bar.sync 0; ld.shared.b32 %r7, [%r5]; st.global.b32 [%rd5], %r7;
"""


def test_a_copy_that_nobody_waits_for_is_found_where_it_comes_late():
    fine = COPY.format(wait="cp.async.wait_group 0;")
    assert ran(fine, late=True).tolist() == list(range(32))
    assert ran(COPY.format(wait=""), late=False).tolist() == list(range(32))
    with pytest.raises(Fault, match="where a copy is under way") as found:
        ran(COPY.format(wait=""), late=True)
    assert "ld.shared.b32 %r7" in found.value.__notes__[0]


@pytest.mark.parametrize(
    ("body", "error", "why"),
    [
        ("setp.lt.u32 %p1, %r1, 32; @%p1 bra $A; ret; $A: bar.sync 0, 64;", Deadlock, "block 0, warp 0.*barrier 0.*bar.sync"),
        ("add.s64 %rd6, %rd4, 8; ld.global.b32 %r2, [%rd6];", Fault, "where no tensor is|bytes .* of Tensor"),
        ("add.s64 %rd6, %rd1, 2; ld.global.b32 %r2, [%rd6];", Fault, "no multiple of 4"),
        ("mov.b32 %r2, global_smem; ld.shared.b32 %r3, [%r2+100000];", Fault, "shared memory of block 0"),
        ("mov.b32 %r2, global_smem; mbarrier.arrive.shared.b64 _, [%r2];", Fault, "no barrier was set up"),
        ("bar.sync 0, 32;", Fault, "64 threads at barrier 0"),
        ("wavefront.sync;", Unknown, "wavefront"),
    ],
)
def test_faults_are_told(body, error, why):
    with pytest.raises(error, match=why):
        ran(body, threads=64)


BARRIER = """
  mov.b32 %r2, global_smem; setp.eq.u32 %p1, %r1, 0;
  @%p1 mbarrier.init.shared.b64 [%r2], {count}; bar.sync 0;
  setp.lt.u32 %p2, %r1, {arrive}; @%p2 mbarrier.arrive.shared.b64 _, [%r2];
  $W: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0; @!%p3 bra $W;
  st.global.b32 [%rd5], %r1;
"""


def test_barriers_in_shared_memory_count():
    assert ran(BARRIER.format(count=40, arrive=40), threads=64).tolist() == list(range(64))
    with pytest.raises(Deadlock, match="1 arrivals"):
        ran(BARRIER.format(count=41, arrive=40), threads=64)
    with pytest.raises(Fault, match="arrivals at the barrier"):
        ran(BARRIER.format(count=39, arrive=40), threads=64)
