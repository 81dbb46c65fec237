"""The wait of the Hopper gemm's producer warp for rows that another rank sends, as a statement of PTX."""

from __future__ import annotations

from tilewright.candidates.triton.runtime.copies import CALL, LIMIT

# $1 the flag, $2 the own words, $3 the host's word, $4 the rank. After the limit this and all further waits end.
WAIT = (
    "{ .reg .pred q, w; .reg .b32 t, f, v; .reg .b64 x, y, z; mov.u32 t, %laneid; setp.eq.u32 q, t, 0; "
    f"ld.relaxed.gpu.global.b32 v, [$2+{CALL}]; ld.relaxed.gpu.global.b64 z, [$2+{LIMIT}]; mov.u64 x, %globaltimer; "
    "L: mov.b32 f, v; @q ld.acquire.sys.global.b32 f, [$1]; sub.s32 f, f, v; setp.ge.s32 w, f, 0; @w bra D; "
    "mov.u64 y, %globaltimer; sub.s64 y, y, x; setp.lt.s64 w, y, z; @w bra L; "
    "add.s32 t, $4, 1; setp.gt.s64 w, z, 0; @w st.relaxed.sys.global.b32 [$3], t; "
    f"mov.b64 z, 0; st.relaxed.sys.global.b64 [$2+{LIMIT}], z; "
    "D: bar.warp.sync 0xffffffff; fence.proxy.async; }"
)
