"""Operands of the Hopper gemm that TMA brings as they lie: their stages in shared memory, and the tiles that are multiplied.

`config` is a `spec.KernelConfig`. Columns that are no power of two are put right in the PTX (`ptx.narrowed`).
"""

# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewright.candidates.triton.runtime._gluon import WHOLE_VIEWS, aggregate_of, reinterpret
from tilewright.candidates.triton.runtime.versions import within

STRICT_VIEWS = gl.constexpr(within())  # a view of shared memory may not be larger than what it is a view of


@aggregate_of
class TmaOperand:
    """An operand whose tiles TMA brings as they lie, `boxes` of `rows` rows to a stage.

    It is read along K (K is contiguous) or holds a stage transposed; TMA steps over matrices of the batch along an axis of
    their own (`batched`), or one matrix is `shared` by all of the batch, or rows of all matrices follow one another.

    `early` and `scaled` are false here: they tell this operand from packed weights, the other left operand of `run`
    (`w4/_operand.py`), which are asked for `early`, before the kernel ahead has ended, and may be `scaled` as they are summed.
    """

    desc: tma.tensor_descriptor
    buffers: gl.shared_memory_descriptor
    rows: gl.constexpr
    boxes: gl.constexpr
    tile_k: gl.constexpr
    along_k: gl.constexpr
    batched: gl.constexpr
    shared: gl.constexpr
    early: gl.constexpr
    scaled: gl.constexpr

    @gluon.jit
    def load_box(self, ring, pipe_write, box, b, extent, row, k):
        """Has TMA bring a box of a stage: rows from `row` on of a matrix of `extent` rows, step k along K."""
        along = k * self.tile_k
        if self.along_k and self.batched:
            at = [b, row, along]
        elif self.along_k:
            at = [row if self.shared else b * extent + row, along]
        elif self.batched:
            at = [b, along, row]
        else:  # rows of other matrices would follow along K: there is one
            at = [along, row]
        ring.load(pipe_write, self.desc, at, self.buffers.index(pipe_write.stage * self.boxes + box))

    @gluon.jit
    def load(self, ring, pipe_write, box: gl.constexpr, b, m, k, problem):
        """Has TMA bring a box of the left operand's tile m."""
        self.load_box(ring, pipe_write, box, b, problem.M, m * (self.boxes * self.rows) + box * self.rows, k)

    @gluon.jit
    def fragment(self, stage, box: gl.constexpr, k, layout: gl.constexpr):
        """The tile that a consumer multiplies, in shared memory."""
        tile = self.buffers.index(stage * self.boxes + box)
        if self.along_k:
            return tile
        else:
            return tile.permute((1, 0))


@gluon.constexpr_function
def spare_rows(rows, config):
    """Rows of the ring's end that no stage has, where the right operand's is seen as stages of Triton's columns as a whole."""
    if not WHOLE_VIEWS or rows != config.tile_n or rows == config.padded_n:
        return 0
    return -config.num_stages * rows % config.padded_n


@gluon.jit
def tma_operand(desc, rows: gl.constexpr, boxes: gl.constexpr, side: gl.constexpr, config: gl.constexpr):
    """The operand behind a descriptor, which lies as `side` says (along K, batched, shared), and its stages."""
    shape: gl.constexpr = (rows, config.tile_k) if side[0] else (config.tile_k, rows)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, desc.dtype)
    spare: gl.constexpr = spare_rows(boxes * rows, config) // rows
    buffers = gl.allocate_shared_memory(desc.dtype, (config.num_stages * boxes + spare, shape[0], shape[1]), layout)
    return TmaOperand(desc, buffers, rows, boxes, config.tile_k, side[0], side[1], side[2], False, False)


@gluon.jit
def load_right(right, ring, pipe_write, b, n, k, N, config: gl.constexpr):
    """Has TMA bring a tile of the right operand; with `multicast` each block of a pair brings half of it to both.

    Where gate and up columns meet, a tile has as many of both.
    """
    own: gl.constexpr = right.boxes // 2 if config.multicast else right.boxes
    of_gate: gl.constexpr = right.boxes // 2
    for i in gl.static_range(own):
        box = gl.program_id(0) % 2 * own + i if config.multicast else i
        if config.accumulators == 1:
            right.load_box(ring, pipe_write, box, b, N, n * config.tile_n + box * right.rows, k)
        else:
            up = gl.program_id(0) % 2 if config.multicast else i // of_gate
            row = up * N + n * config.result_n + i % of_gate * right.rows
            right.load_box(ring, pipe_write, box, b, 2 * N, row, k)


@gluon.jit
def right_fragment(right, stage, config: gl.constexpr):
    """The right operand's tile of a stage, as it lies; Triton is told of `padded_n` columns, the next power of two."""
    shape: gl.constexpr = (config.padded_n, config.tile_k) if right.along_k else (config.tile_k, config.padded_n)
    if right.boxes == 1:
        return right.buffers.index(stage)
    elif STRICT_VIEWS:  # a part of the whole ring, as if it held as many stages of Triton's columns as fit
        count: gl.constexpr = (config.num_stages * config.tile_n + spare_rows(config.tile_n, config)) // config.padded_n
        ring = reinterpret(right.buffers, right.buffers.dtype, (count, shape[0], shape[1]), right.buffers.layout)
        return ring.index(stage if config.tile_n == config.padded_n else stage_of(stage))
    else:
        return reinterpret(right.buffers.index(stage * right.boxes), right.buffers.dtype, shape, right.buffers.layout)


@gluon.jit
def stage_of(stage):
    """A stage's number where the PTX finds it, which puts right where a stage of fewer columns begins (`ptx.narrowed`)."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1; // stage", "=r,r", [stage], dtype=gl.int32, is_pure=True, pack=1)
