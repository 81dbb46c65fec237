# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""What the kernels of attention on Hopper have in common: shared memory, products and their layouts, the parts of a softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from tilewright.candidates.triton.attention.kernel import LOG2_E
from tilewright.candidates.triton.hopper.attention import sizes
from tilewright.candidates.triton.runtime._gluon import reinterpret, tma_load

ROWS = gl.constexpr(sizes.ROWS)
CHUNK = gl.constexpr(sizes.WIDEST)  # keys of a product
TO_POWERS_OF_2 = gl.constexpr(LOG2_E)
HIDDEN = gl.constexpr(float("-inf"))
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
def base_of(row_max, scales, blind: gl.constexpr):
    """What is added to scores as powers of two, so that the largest of a row becomes one. `blind`: a row may see no key."""
    if blind:
        row_max = gl.where(row_max == HIDDEN, 0.0, row_max)
    return row_max * scales[1]


@gluon.jit
def weights_of(scores, base, scales, config, in_order: gl.constexpr = False):
    """Scores as weights, the largest of a row one."""
    if config.added:
        powers = scores + base[:, None]
    else:
        powers = gl.fma(scores, scales[0], base[:, None])
    if in_order:
        return ex2_in_order(powers)
    else:
        return ex2(powers)


@gluon.jit
def inverse_of(row_sum, scales, config):
    """What a result is multiplied by; zero for queries that saw no key, where that is asked for."""
    inverse = scales[3] / row_sum
    if config.zero_rows:
        inverse = gl.where(row_sum == 0.0, 0.0, inverse)
    return inverse


@gluon.jit
def rooms(kind: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Shared memory for so many matrices, as the matrix unit takes them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return gl.allocate_shared_memory(kind, [count, rows, columns], layout)


@gluon.jit
def head_of(buffer, keys: gl.constexpr):
    """The first rows of a buffer."""
    if buffer.shape[0] == keys:
        return buffer
    else:
        return buffer.slice(0, keys)


@gluon.jit
def multiply_chunk(q, k, size: gl.constexpr):
    """Asks for the scores of a chunk of keys."""
    zeros = gl.zeros([ROWS, size], gl.float32, fragment(size, q.dtype))
    return warpgroup_mma(q, head_of(k, size).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def load_queries(group, head, row, q_desc, q, q_full, config, q_at):
    """Has TMA bring a warpgroup's queries, once those before them are multiplied."""
    mbarrier.expect(q_full.index(group), ROWS * config.depth * q_desc.dtype.primitive_bitwidth // 8)
    box = reinterpret(q.index(group), q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    tma_load(q_desc, q_at(head, row), q_full.index(group), box)
