"""PTX of `hopper_w4` around its products: what comes to shared memory and is read there, who waits for whom, and what blocks of
a cluster send each other. Every statement is for one thread, or for the warps it names."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.candidates.triton._w4_asm import Asm


def do(line: str, constraints: Sequence[str]) -> Asm:
    """A statement for its side effect; $0 is nobody's."""
    return Asm(f"{line} mov.b32 $0, 0;", ",".join(["=r", *constraints]))


FRAGMENTS = Asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r")
READ_16 = Asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "=f,=f,=f,=f,r")
READ_4 = Asm("ld.shared.f32 $0, [$1];", "=f,r")


BASE = Asm("mov.u32 $0, global_smem; // $1", "=r,r")
# Of 16 bytes: whether at all, and how many are read; the others become zero.
COPY = do("{ .reg .pred q; setp.ne.b32 q, $3, 0; @q cp.async.cg.shared.global [$1], [$2], 16, $4; }", "rlrr")
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
