"""Reductions of the Hopper gemm, for a tile whose sums are spread over several blocks: those of stream-K go through global
memory, those of split-K through the shared memory of a cluster.

Both add in a fixed order, so that every run gives the same bits. Parts lie as threads hold them: of an element's row, bits 0
to 2 and 4 to 5 tell the thread; of its column, bits 1 to 2; the other bits tell which of the thread's registers it is (PTX ISA
9.0, 9.7.15.5.1). `config` is a `spec.KernelConfig`.
"""

# ruff: noqa: RUF005 (Triton has no starred tuples)
# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewright.candidates.triton.hopper import ptx
from tilewright.candidates.triton.hopper._pipeline import barriers
from tilewright.candidates.triton.hopper.gemm._layouts import mma_layout, subtiles, zeros
from tilewright.candidates.triton.runtime._gluon import aggregate_of, barrier, reinterpret

# -- stream-K


@gluon.jit
def fixup(sums, scheduler, j, scratch, group: gl.constexpr, config: gl.constexpr):
    """Add up a tile that several workers have shares of (stream-K), in order: the last of them does, the others are done.

    Gives the sums, and whether the tile is this worker's to store. Parts lie in memory thread by thread for each register.
    """
    partial, arrived = scratch[0], scratch[1]
    columns: gl.constexpr = sums[0].shape[1]
    layout: gl.constexpr = sums[0].type.layout
    done = True
    if j >= scheduler.own_tiles:
        t = scheduler.number(j)[0]
        nk, c, G = scheduler.k_tiles, scheduler.worker, scheduler.workers
        total = (scheduler.tiles - scheduler.problem.whole_tiles) * nk
        q = t - scheduler.problem.whole_tiles
        first = ((q * nk + 1) * G - 1) // total
        last = ((q * nk + nk) * G - 1) // total
        if last > first:
            y = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
            x = gl.arange(0, columns, gl.SliceLayout(0, layout))
            own = (y & 7) * 4 + ((y >> 4) & 3) * 32 + ((y >> 3) & 1) * 256 + (y >> 6) * (64 * config.padded_n)
            across = ((x >> 1) & 3) + (x & 1) * 128 + (x >> 3) * 512 + group * (config.rows * config.padded_n)
            inside = own[:, None] + across[None, :]
            slot = 2 * c + gl.where((c == first) & (scheduler.begin // nk != q), 1, 0)
            to = partial + of_block(slot, config).to(gl.int64) * (config.tile_m * config.padded_n) + inside
            for i in gl.static_range(len(sums)):
                gl.store(to + i * (config.rows * columns), sums[i])
            barrier()
            counter = arrived + of_block(q, config) * config.consumers + group
            n = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            done = n == last - first
            if done:
                gl.store(counter, 0)
                barrier()
                found = ()
                for _ in gl.static_range(len(sums)):
                    found = found + (zeros(columns, config),)
                for p in range(first, last + 1):
                    at = 2 * p + gl.where((p == first) & ((p * total // G) // nk != q), 1, 0)
                    source = partial + of_block(at, config).to(gl.int64) * (config.tile_m * config.padded_n) + inside
                    found = add_partials(found, source, config.rows * columns)
                sums = found
    return sums, done


@gluon.jit
def add_partials(sums, source, stride: gl.constexpr):
    """Sums and those that another block left in memory."""
    found = ()
    for i in gl.static_range(len(sums)):
        found = found + (sums[i] + gl.load(source + i * stride, cache_modifier=".cg"),)
    return found


@gluon.jit
def of_block(number, config: gl.constexpr):
    """A number that both blocks of a pair have, as one of the block's own."""
    if config.multicast:
        return number * 2 + gl.program_id(0) % 2
    else:
        return number


# -- split-K


@aggregate_of
class ClusterReduction:
    """The barriers of a cluster whose blocks share K.

    `empty` turns over once all of its warpgroups are done with the rings, and again once all have what they were sent; `full`,
    one of each warpgroup, once what the other blocks sent it has come.
    """

    empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    config: gl.constexpr

    @gluon.jit
    def expect(self, group: gl.constexpr):
        """Say how many bytes the other blocks send to a warpgroup."""
        config: gl.constexpr = self.config
        mbarrier.expect(self.full.index(group), (config.split_k - 1) * config.rows * config.epilogue_n * 4)

    @gluon.jit
    def reduce(self, acc, group: gl.constexpr):
        """Sums of a part of K, of all columns, become those of all of K, of the block's own columns.

        Each block sends every other one its part of that one's columns, and finishes its own. Sums are written where the ring
        was, which nobody needs any more once all are done, and copied from block to block in one piece: four registers of a
        thread go together, 16 bytes beside those of the next thread.
        """
        config: gl.constexpr = self.config
        rank = gl.program_id(0) % config.split_k
        split: gl.constexpr = config.split_k
        size: gl.constexpr = config.rows * config.epilogue_n * 4  # of one block's part of another's columns
        layout: gl.constexpr = mma_layout(config.epilogue_n, config)
        own: gl.constexpr = group * (size * split)
        others: gl.constexpr = config.consumers * size * split + group * (size * (split - 1))
        written: gl.constexpr = "=r,r,r,r,r,r,r,r,r" if config.integer else "=r,f,f,f,f,r,r,r,r"
        read: gl.constexpr = "=r,=r,=r,=r,r,r,r,r" if config.integer else "=f,=f,=f,=f,r,r,r,r"
        empty = self.empty.index(0)
        mbarrier.arrive(empty)
        y = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
        x = gl.arange(0, config.epilogue_n, gl.SliceLayout(0, layout))
        lane = ((y & 7) * 4 + ((y >> 4) & 3) * 32)[:, None] + ((x >> 1) & 3)[None, :]
        place = lane * 16 + (x >> 3)[None, :] * 2048
        mbarrier.wait(empty, 0)
        parts = subtiles((acc,), config.epilogue_n)
        for to in gl.static_range(split):
            part = gl.convert_layout(parts[to], layout, assert_trivial=True)
            gl.inline_asm_elementwise(WRITE, written, [part, place + (own + to * size)], dtype=gl.int8, is_pure=False, pack=4)
        fence_async_shared()
        barrier()
        i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        for j in gl.static_range(1, split):
            to = (rank + j) % split
            given = [i, i * 0 + (own + to * size), i * 0 + (others + (split - j - 1) * size), i * 0 + group * 8, i * 0 + to]
            gl.inline_asm_elementwise(sending(size), "=r,r,r,r,r,r", given, dtype=gl.int32, is_pure=False, pack=1)
        mbarrier.wait(self.full.index(group), 0)
        mbarrier.arrive(empty)
        acc = zeros(config.epilogue_n, config)
        for source in gl.static_range(split):
            came = others + (source + split - 1 - rank) % split * size
            at = gl.where(rank == source, own + source * size, came)
            part = gl.inline_asm_elementwise(READ, read, [place + at], dtype=acc.dtype, is_pure=False, pack=4)
            acc = part if source == 0 else acc + part
        return acc

    @gluon.jit
    def finish(self):
        """Stays until all blocks have what this one sent."""
        mbarrier.wait(self.empty.index(0), 1)


@gluon.jit
def cluster_reduction(left, right, config: gl.constexpr):
    """The reduction over blocks whose operands' rings these are."""
    empty = barriers(1, config.split_k * config.consumers)
    full = barriers(config.consumers, 1)
    mark(left.buffers, 1)
    mark(right.buffers, 2)
    return ClusterReduction(empty, full, config)


# Gluon has no addresses of shared memory: `ptx.split` replaces RING and FULL, and finds rings by what looks like barriers of
# more arrivals than MARKED.
MARKED = gl.constexpr(ptx.MARKED)
WRITE = gl.constexpr(
    "{ .reg .b32 here; mov.u32 here, RING; add.u32 here, here, $5; mov.u32 $0, 0; st.shared.v4.b32 [here], {$1,$2,$3,$4}; }"
)
READ = gl.constexpr("{ .reg .b32 here; mov.u32 here, RING; add.u32 here, here, $4; ld.shared.v4.b32 {$0,$1,$2,$3}, [here]; }")


@gluon.constexpr_function
def sending(nbytes):
    """The statement by which thread 0 sends so many bytes: from where, to where, which barrier, which block."""
    return (
        "{ .reg .pred p; .reg .b32 from, there, full; setp.eq.u32 p, $1, 0; mov.u32 $0, 0; "
        "mov.u32 from, RING; add.u32 from, from, $2; mov.u32 there, RING; add.u32 there, there, $3; "
        "mov.u32 full, FULL; add.u32 full, full, $4; "
        "mapa.shared::cluster.u32 there, there, $5; mapa.shared::cluster.u32 full, full, $5; "
        f"@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [from], {nbytes}, [full]; }}"
    )


@gluon.jit
def mark(buffers, number: gl.constexpr):
    """Say where a ring is."""
    at = reinterpret(buffers.index(0), gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(at, count=MARKED + number)
