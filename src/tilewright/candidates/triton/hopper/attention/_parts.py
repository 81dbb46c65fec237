# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""Parts that the kernels of attention on Hopper share: shared memory, products and their layouts, the steps of a softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from tilewright.candidates.triton.attention.kernel import LOG2_E
from tilewright.candidates.triton.hopper.attention import kernel
from tilewright.candidates.triton.runtime._gluon import reinterpret, tma_load

ROWS = gl.constexpr(kernel.ROWS)
CHUNK = gl.constexpr(kernel.CHUNK)
TO_POWERS_OF_2 = gl.constexpr(LOG2_E)
HIDDEN = gl.constexpr(float("-inf"))
LEAST = gl.constexpr(-3.4028234663852886e38)  # of f32
SHOWN = gl.constexpr(float("inf"))
PRODUCER_REGISTERS = gl.constexpr(24)  # of a thread, of 64K in all


@gluon.constexpr_function
def fragment(columns, dtype):
    """A product of a warpgroup with so many columns, whose operands have this type."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // dtype.primitive_bitwidth])


@gluon.jit
def ex2(x):
    """2^x as the special function unit gives it, 0 below the normal numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ex2_in_order(x):
    """`ex2` that LLVM leaves before waits that follow."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def power_of_2(x, in_order: gl.constexpr):
    """2^x."""
    if in_order:
        return ex2_in_order(x)
    else:
        return ex2(x)


@gluon.jit
def base_of(row_max, scales, masks_rows: gl.constexpr):
    """The number that makes the largest weight of a row one when it is added to scores as powers of two: -`row_max`, scaled; 0
    for a fully masked row, if `masks_rows` says that there may be one."""
    if masks_rows:
        row_max = gl.where(row_max == HIDDEN, 0.0, row_max)
    return row_max * scales[1]


@gluon.jit
def weights_of(scores, base, scales, config, in_order: gl.constexpr = False):
    """Weights of scores, 2^(scaled score + base): the largest of a row is one."""
    if config.additive_bias:
        powers = scores + base[:, None]
    else:
        powers = gl.fma(scores, scales[0], base[:, None])
    return power_of_2(powers, in_order)


@gluon.jit
def inverse_of(row_sum, scales, config):
    """The factor of a result, the scale of values over `row_sum`; zero for queries that saw no key, if `zero_rows`."""
    inverse = scales[3] / row_sum
    if config.zero_rows:
        inverse = gl.where(row_sum == 0.0, 0.0, inverse)
    return inverse


@gluon.jit
def allocate(kind: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, count: gl.constexpr = None):
    """Shared memory for a matrix, or for so many, as the matrix unit takes them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    if count is None:
        return gl.allocate_shared_memory(kind, [rows, columns], layout)
    else:
        return gl.allocate_shared_memory(kind, [count, rows, columns], layout)


@gluon.jit
def first_rows(buffer, keys: gl.constexpr):
    """The first rows of a buffer."""
    if buffer.shape[0] == keys:
        return buffer
    else:
        return buffer.slice(0, keys)


@gluon.jit
def multiply_chunk(q, k, size: gl.constexpr):
    """Issues the product of queries and a chunk of keys."""
    zeros = gl.zeros([ROWS, size], gl.float32, fragment(size, q.dtype))
    return warpgroup_mma(q, first_rows(k, size).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def load_rows(i, head, row, desc, buffers, full, rows: gl.constexpr, columns: gl.constexpr, at, side):
    """Has TMA bring rows of a head, from `row` on, to one of several buffers, whose barrier waits for these bytes alone."""
    mbarrier.expect(full.index(i), rows * columns * desc.dtype.primitive_bitwidth // 8)
    box = reinterpret(buffers.index(i), desc.dtype, desc.block_type.shape, desc.layout)
    tma_load(desc, at(head, row, side), full.index(i), box)


# -- masks that are the same for all queries of a head: the warp that loads leaves them in shared memory beside the keys


@gluon.jit
def in_powers_of_2(bias):
    """A bias of scores as a power of two. What is finite stays so: a row all of whose keys are hidden by the least number of
    f32 has equal weights, as by definition, and no infinities that cancel."""
    power = bias * TO_POWERS_OF_2
    return gl.where((power == HIDDEN) & (bias > HIDDEN), LEAST, power)


@gluon.jit
def mask_of_keys(head, key, size: gl.constexpr, ragged: gl.constexpr, side, config, mask):
    """A row that masks some keys: the least of scores and it is taken, or it is added."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    keys = key + gl.arange(0, size, gl.SliceLayout(0, layout))
    read = mask(head, gl.arange(0, 1, gl.SliceLayout(1, layout)), keys, ragged, side)
    if config.additive_bias:
        return gl.max(in_powers_of_2(read), 0)
    else:
        return gl.max(gl.where(read, SHOWN, config.hidden), 0)


@gluon.jit
def apply_mask_of_keys(scores, row, scales, config):
    """Scores of some keys masked by their row; as powers of two where it is added."""
    layout: gl.constexpr = scores.type.layout
    bias = row.load(gl.SliceLayout(0, layout))[None, :]
    if config.additive_bias:
        return gl.fma(scores, scales[2], bias)
    else:
        return gl.minimum(scores, bias)
