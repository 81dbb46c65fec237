"""PTX of `hopper_w4` around its products: what comes to shared memory and is read there, who waits for whom, and what blocks of
a cluster send each other. Every statement is for one thread, or for the warps it names."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.candidates.triton.hopper.w4.asm import Asm
from tilewright.dtype import F8E4M3FN, F8E5M2, DType


def do(line: str, constraints: Sequence[str]) -> Asm:
    """A statement for its side effect; $0 is nobody's."""
    return Asm(f"{line} mov.b32 $0, 0;", ",".join(["=r", *constraints]))


FRAGMENTS = Asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r")
READ_16 = Asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "=f,=f,=f,=f,r")
READ_4 = Asm("ld.shared.f32 $0, [$1];", "=f,r")


BASE = Asm("mov.u32 $0, global_smem; // $1", "=r,r")
# Of 16 bytes: whether at all, and how many are read; the others become zero.
COPY = do("{ .reg .pred q; setp.ne.b32 q, $3, 0; @q cp.async.cg.shared.global [$1], [$2], 16, $4; }", "rlrr")


def widened(codes: DType) -> Asm:
    """16 codes of 8 bits that lie where eight f16 belong, made f16 there and in the next 16 bytes of a swizzled row: of each
    four neighbours along K those with even numbers, then the others, as weights for them are packed (`pack.py`)."""
    lines = ["{ .reg .pred q; .reg .b32 w<4>, e<4>, o<4>, at; .reg .b16 h0, h1;", "setp.ne.b32 q, $2, 0;"]
    lines += [*(f"mov.b32 w{i}, 0;" for i in range(4)), "@q ld.shared.v4.b32 {w0,w1,w2,w3}, [$1];"]
    for i in range(4):
        if codes is F8E4M3FN:
            lines.append(f"prmt.b32 w{i}, w{i}, 0, 0x3120; mov.b32 {{h0, h1}}, w{i};")
            lines.append(f"cvt.rn.f16x2.e4m3x2 e{i}, h0; cvt.rn.f16x2.e4m3x2 o{i}, h1;")
        elif codes is F8E5M2:  # the upper byte of f16
            lines.append(f"prmt.b32 e{i}, w{i}, 0, 0x2404; prmt.b32 o{i}, w{i}, 0, 0x3414;")
        else:
            word = 0x64806480 if codes.is_signed else 0x64006400  # 1024, or 1024 + 128
            lines += [f"xor.b32 w{i}, w{i}, 0x80808080;"] if codes.is_signed else []
            lines.append(f"prmt.b32 e{i}, w{i}, 0x64646464, 0x4240; prmt.b32 o{i}, w{i}, 0x64646464, 0x4341;")
            lines += [f"mov.b32 at, 0x{word:08x};"] + [f"sub.rn.f16x2 {a}{i}, {a}{i}, at;" for a in ("e", "o")]
    lines.append("@q st.shared.v4.b32 [$1], {e0,e1,e2,e3}; xor.b32 at, $1, 16; @q st.shared.v4.b32 [at], {o0,o1,o2,o3}; }")
    return do("\n".join(lines), "rr")


COPYING = do("cp.async.commit_group; // $1\n", "r")
COPIED = {left: do(f"cp.async.wait_group {left}; // $1\n", "r") for left in (0, 1)}  # all copies but the last so many groups
WRITE_16 = do("st.shared.v4.f32 [$1], {$2,$3,$4,$5};", "rffff")
# Loads stay on their side of it, where ptxas would move them all to where their words are used.
IN_STEP = do("bar.warp.sync 0xffffffff; // $1\n", "r")
THREAD = Asm("mov.u32 $0, %tid.x; // $1", "=r,r")
MEET = do("bar.sync 0; // $1\n", "r")
READ_WORD = Asm("ld.shared.b32 $0, [$1];", "=r,r")
WRITE_4 = do("{ .reg .pred q; setp.ne.b32 q, $2, 0; @q st.shared.f32 [$1], $3; }", "rrf")
FENCE = do("fence.proxy.async.shared::cta; // $1\n", "r")
AFTER = do("griddepcontrol.wait; // $1\n", "r")
NEXT = do("griddepcontrol.launch_dependents; // $1\n", "r")
# Barriers of the cluster: one arrival and as many bytes as come from all of its blocks. The second one is for every other tile.
BARRIERS = do(
    "{ .reg .pred q; setp.ne.b32 q, $2, 0; @q mbarrier.init.shared.b64 [$1], 1; @q mbarrier.init.shared.b64 [$1+8], 1; "
    "fence.mbarrier_init.release.cluster; }",
    "rr",
)
EXPECT = do("{ .reg .pred q; setp.ne.b32 q, $2, 0; @q mbarrier.arrive.expect_tx.shared.b64 _, [$1], $3; }", "rrr")
ARRIVE = do("barrier.cluster.arrive.relaxed.aligned; // $1\n", "r")
ARRIVED = do("barrier.cluster.wait.aligned; // $1\n", "r")
SEND = do(
    "{ .reg .pred q; .reg .b32 r, m; setp.ne.b32 q, $3, 0; mapa.shared::cluster.u32 r, $1, $2; "
    "mapa.shared::cluster.u32 m, $8, $2; "
    "@q st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [r], {$4,$5,$6,$7}, [m]; }",
    "rrrffffr",
)
COME = do("{ .reg .pred q; L: mbarrier.try_wait.parity.shared.b64 q, [$1], $2; @!q bra L; }", "rr")
