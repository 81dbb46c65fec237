"""The functions that every Hopper kernel's text begins with."""

PROLOGUE = '''\
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def locate(t, nm, nn, GM: gl.constexpr):
    """Tile number -> batch, tile row, tile column: in bands of GM tile rows, so that blocks at work share operands."""
    b = t // (nm * nn)
    r = t % (nm * nn)
    band = r // (GM * nn)
    r = r % (GM * nn)
    h = gl.minimum(nm - band * GM, GM)
    return b, band * GM + r % h, r // h


@gluon.jit
def pin(x):
    """Computed here: LLVM would sink it to where the tensor cores wait for it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def half(x):
    """Left and right half of the columns, both of which each thread holds."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def in_order(x):
    """Columns as they are, where operand rows came in the order that gives a thread eight neighbours."""
    return x.reshape((x.shape[0], x.shape[1] // 32, 4, 4, 2)).permute((0, 1, 3, 2, 4)).reshape((x.shape[0], x.shape[1]))


@gluon.jit
def pack(x):
    """16-bit columns in pairs that a thread holds, as words."""
    lo, hi = x.reshape((x.shape[0], x.shape[1] // 2, 2)).split()
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [lo, hi], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(w, dtype: gl.constexpr):
    """What `pack` packed."""
    lo = w.to(gl.int16).to(dtype, bitcast=True)
    hi = (w >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(lo, hi).reshape((w.shape[0], w.shape[1] * 2))


@gluon.jit
def advance(s, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the parity that its barriers turn to."""
    last = s == STAGES - 1
    return gl.where(last, 0, s + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def share(t, D, begin, end, nk):
    """The t-th of the tiles of which a block has a share of K, from `begin` to `end`: tile, first and last step."""
    first = gl.maximum(begin, (begin // nk + t) * nk)
    k = first % nk
    return D + first // nk, k, gl.minimum(nk, k + end - first)
'''

STAGE_OF = '''\
@gluon.jit
def stage_of(s):
    """A stage's number, where the PTX finds it."""
    asm: gl.constexpr = "mov.b32 $0, $1; // stage"
    return gl.inline_asm_elementwise(asm, "=r,r", [s], dtype=gl.int32, is_pure=True, pack=1)
'''
