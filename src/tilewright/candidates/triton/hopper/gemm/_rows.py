"""The numbers of each row that a norm in the Hopper gemm takes: mean and deviation, found by the blocks of a cluster together.

Each block has the columns of a tile, and finds the mean of its part of a row and the squared deviations from it. It tells all
blocks of the cluster, itself too, by stores to shared memory that a barrier counts (`st.async`). All combine what came in the
order of columns (Chan, Golub, LeVeque 1979, Updating formulae and a pairwise algorithm for computing sample variances), so
that they get the same bits. CUTLASS has no counterpart. `config` is a `spec.KernelConfig`.

A block writes to places that another one read two tiles before. That one has read them: it sent its numbers of the tile between
the two afterwards, and without those nobody came here. Nobody reads another block's memory, so none need stay for the others.
"""

# ruff: noqa: RUF005 (Triton has no starred tuples)
# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.candidates.triton.hopper._pipeline import barriers
from tilewright.candidates.triton.hopper.gemm._layouts import subtile_layout
from tilewright.candidates.triton.hopper.gemm._reduction import mark
from tilewright.candidates.triton.runtime._gluon import aggregate_of


@aggregate_of
class RowExchange:
    """The barriers of a cluster whose blocks share rows: two of each warpgroup, for every other tile, that turn over once all
    blocks' numbers of the tile's rows have come."""

    full: gl.shared_memory_descriptor
    config: gl.constexpr

    @gluon.jit
    def combined(self, mean, spread, turn, group: gl.constexpr):
        """Mean and squared deviations of whole rows, of those of the block's own columns; of tile number `turn` of the
        warpgroup's."""
        config: gl.constexpr = self.config
        blocks: gl.constexpr = config.row_blocks
        each: gl.constexpr = config.rows * 8  # bytes of a block's numbers
        slot = turn % 2 * config.consumers + group
        mbarrier.expect(self.full.index(slot), blocks * each)
        row = gl.arange(0, config.rows, mean.type.layout)
        here = ((row & 7) + (row >> 4) * 8) * 16 + slot * (blocks * each)  # a thread has rows that are 8 apart: 16 bytes
        given = [here + gl.program_id(0) % blocks * each, row * 0 + slot * 8, mean, spread]
        gl.inline_asm_elementwise(telling(blocks), "=r,=r,r,r,r,r,f,f,f,f", given, dtype=gl.int32, is_pure=False, pack=2)
        mbarrier.wait(self.full.index(slot), turn // 2 % 2)
        means, spreads = (), ()
        for source in gl.static_range(blocks):
            came = gl.inline_asm_elementwise(
                HEAR, "=f,=f,=f,=f,r,r", [here + source * each], dtype=(gl.float32, gl.float32), is_pure=False, pack=2
            )
            means, spreads = means + (came[0],), spreads + (came[1],)
        whole, total = means[0], spreads[0]
        for source in gl.static_range(1, blocks):
            whole += means[source]
            total += spreads[source]
        whole *= 1 / blocks
        if config.norm_center:
            for source in gl.static_range(blocks):
                apart = means[source] - whole
                total = gl.fma(apart * config.tile_n, apart, total)
        return whole, total


@gluon.jit
def row_exchange(config: gl.constexpr):
    """The exchange of a kernel's blocks."""
    full = barriers(2 * config.consumers, 1)
    numbers = gl.allocate_shared_memory(gl.int64, [config.statistics_bytes // 8, 1], mbarrier.MBarrierLayout())
    mark(numbers, 3)
    return RowExchange(full, config)


@gluon.jit
def row_numbers(parts, exchange, turn, group: gl.constexpr, config: gl.constexpr):
    """What a block's own columns, in parts, differ by from their mean; the inverse of each row's deviation, and how far in such
    deviations that mean lies above the row's. Without centring they differ from 0."""
    of_rows: gl.constexpr = gl.SliceLayout(1, subtile_layout(config.aux_store, config))
    mean = gl.zeros((config.rows,), gl.float32, of_rows)
    if config.norm_center:
        total = parts[0]
        for j in gl.static_range(1, len(parts)):
            total += parts[j]
        mean = gl.sum(total, axis=1) * (1 / config.tile_n)
    apart = ()
    spread = parts[0]
    for j in gl.static_range(len(parts)):
        if config.norm_center:
            apart = apart + (parts[j] - mean[:, None],)
        else:
            apart = apart + (parts[j],)
        if j == 0:
            spread = apart[j] * apart[j]
        else:
            spread = gl.fma(apart[j], apart[j], spread)
    spread = gl.sum(spread, axis=1)
    whole = mean
    if config.row_blocks > 1:
        whole, spread = exchange.combined(mean, spread, turn, group)
    rstd = gl.rsqrt(spread * (1 / (config.tile_n * config.row_blocks)) + config.norm_epsilon)
    return apart, rstd, (mean - whole) * rstd


# `ptx.exchanged` replaces NUMBERS and FULL.
HEAR = gl.constexpr(
    "{ .reg .b32 here; mov.u32 here, NUMBERS; add.u32 here, here, $4; ld.shared.v4.f32 {$0,$1,$2,$3}, [here]; }"
)


@gluon.constexpr_function
def telling(blocks):
    """The statement by which the four threads that hold two numbers of two rows tell a block each: at which place, at which
    barrier, the numbers."""
    send = (
        "setp.lt.u32 p, to, BLOCKS; @p mapa.shared::cluster.u32 there, here, to; @p mapa.shared::cluster.u32 told, full, to; "
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {$6,$7,$8,$9}, [told]; "
    )
    every = [send, *(["add.u32 to, to, 4; ", send] if blocks > 4 else [])]
    return (
        "{ .reg .pred p; .reg .b32 to, here, full, there, told; mov.u32 $0, 0; mov.u32 $1, 0; "
        "mov.u32 to, %laneid; and.b32 to, to, 3; mov.u32 here, NUMBERS; add.u32 here, here, $2; "
        f"mov.u32 full, FULL; add.u32 full, full, $4; {''.join(every).replace('BLOCKS', str(int(blocks)))}}}"
    )
