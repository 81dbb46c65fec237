"""Layouts of the Hopper gemm: accumulators and epilogue subtiles as threads hold them; columns that are halved, permuted and
packed in registers, without moving between threads; the buffers that subtiles take in turn.

`config` is a `spec.KernelConfig`.
"""

# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def mma_layout(columns, config):
    """The layout of an accumulator of so many columns; Triton has no instruction of 256 columns for integers."""
    n = min(columns, config.padded_n.value, 128 if config.integer.value else 256)
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, config.tile_k.value // 4])


@gluon.constexpr_function
def subtile_layout(i, config):
    """A subtile of store i: with `vector_store`, a thread has eight neighbours."""
    columns = config.subtile_n.value[i]
    if not config.vector_store:
        return mma_layout(columns, config)
    rows = config.rows.value
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, c] for c in (32, 64, 128) if c < columns)]
    registers += [[r, 0] for r in (64,) if r < rows]
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.constexpr_function
def row_layout():
    """A subtile whose rows are a warp's each, neighbours of a row neighbouring lanes'."""
    return gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])


@gluon.constexpr_function
def subtile_shape(i, config):
    """Rows and columns of a subtile of store i, the contiguous axis last."""
    shape = [config.rows.value, config.subtile_n.value[i]]
    return shape[::-1] if config.store_m_major.value[i] else shape


@gluon.constexpr_function
def subtile_number(i, j, config):
    """The number of subtile j of store i among those of a tile that TMA writes."""
    given = zip(config.subtile_n.value[:i], config.store_desc.value[:i], strict=True)
    return sum(config.epilogue_n.value // columns for columns, at in given if at >= 0) + j


@gluon.constexpr_function
def writes_by_tma(config):
    """Tell whether TMA writes a store."""
    return max(config.store_desc.value) >= 0


@gluon.constexpr_function
def pending(i, j, config):
    """The number of subtiles that may still be on their way out while one takes its buffer.

    The one before may be leaving; not so if it had the same buffer, as where an odd number makes a tile, or if it is not known
    which one was before, as where a tile has no part in some store.
    """
    odd = subtile_number(len(config.subtile_n.value), 0, config) % 2 == 1
    stores = zip(config.store_extent.value, config.store_desc.value, strict=True)
    same = config.store_buffers.value == 1 or (subtile_number(i, j, config) == 0 and odd)
    return 0 if same or any(extent > 0 for extent, at in stores if at >= 0) else 1


@gluon.jit
def zeros(columns: gl.constexpr, config: gl.constexpr):
    """Sums of nothing, so many columns."""
    return gl.zeros((config.rows, columns), gl.int32 if config.integer else gl.float32, mma_layout(columns, config))


@gluon.jit
def subtiles(parts, columns: gl.constexpr):
    """Parts of columns, halved as often as it takes until each has so many."""
    if parts[0].shape[1] == columns:
        return parts
    else:
        return subtiles(halve_columns(parts), columns)


@gluon.jit
def halve_columns(parts):
    """Left and right half of the columns of each, both of which each thread holds."""
    found = ()
    for i in gl.static_range(len(parts)):
        x = parts[i]
        found = found + x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
    return found


@gluon.jit
def unpermute_columns(x):
    """Columns as they are, where operand rows came in the order that gives a thread eight neighbours."""
    return x.reshape((x.shape[0], x.shape[1] // 32, 4, 4, 2)).permute((0, 1, 3, 2, 4)).reshape((x.shape[0], x.shape[1]))


@gluon.jit
def pack_pairs(x):
    """16-bit columns in pairs that a thread holds, as words."""
    lo, hi = x.reshape((x.shape[0], x.shape[1] // 2, 2)).split()
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [lo, hi], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(w, dtype: gl.constexpr):
    """The columns that `pack_pairs` packed."""
    lo = w.to(gl.int16).to(dtype, bitcast=True)
    hi = (w >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(lo, hi).reshape((w.shape[0], w.shape[1] * 2))


@gluon.jit
def rotate(x, lane):
    """Words of a `row_layout` of 32 columns, each from the lane that it names modulo 32."""
    words = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
        "=r,r,r",
        [x.to(gl.int32, bitcast=True), lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return words.to(x.dtype, bitcast=True)
