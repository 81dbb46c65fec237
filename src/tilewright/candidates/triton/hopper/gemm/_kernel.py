"""The gemm kernel of Hopper, in Gluon: persistent and warp-specialised, as CUTLASS's cooperative and ping-pong kernels are.

One warp (`producer`) brings tiles of both operands into a ring of stages in shared memory by TMA; warpgroups (`consumer`)
multiply them (`mainloop`) and write results (`epilogue`); blocks stay for as many tiles as there are for each
(`TileScheduler`). Each warpgroup owns rows of the block's tile; all read the same tile of the right operand, and none waits
for another. Where an epilogue takes long, they own every other tile instead (`pingpong`) and take turns: while one multiplies,
the other one writes. A tile that is done leaves an epilogue subtile at a time: 128 bytes of a row, which is what TMA stores
with the widest swizzle.

`config` is a `spec.KernelConfig`; what becomes of a sum is the program's own and comes as generated functions (`Epilogue`).
Integer products in 256 columns, unsigned ones, those of columns that are no power of two, and copies between blocks of a
cluster are written into the PTX afterwards (`hopper/ptx.py`).
"""

# ruff: noqa: RUF005 (Triton has no starred tuples)
# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.candidates.triton.hopper import ptx
from tilewright.candidates.triton.hopper._pipeline import Pipeline, barriers, pipeline
from tilewright.candidates.triton.runtime._gluon import aggregate_of, barrier, base_value, reinterpret, tma_load, tma_store
from tilewright.candidates.triton.runtime.versions import within

STRICT_VIEWS = gl.constexpr(within())  # a view of shared memory may not be larger than what it is a view of

# -- tile scheduler


@aggregate_of
class Problem:
    """Matrices of the batch and their extents; with `stream_k`, tiles from number `whole_tiles` on are shared out along K."""

    B: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    whole_tiles: gl.tensor


@aggregate_of
class TileScheduler:
    """The tiles, and the steps along K of them, that are a block's (or a cluster's).

    Whole tiles go round the `workers`. With `stream_k` the last ones are shared out evenly along K: a worker has the steps from
    `begin` to `end` of all of theirs, in `shares` tiles after `own_tiles` that are whole. With `split_k` each block of a
    cluster has the `k_tiles` from `first_k_tile` on of every tile.
    """

    problem: Problem
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    k_tiles: gl.tensor
    first_k_tile: gl.tensor
    tiles: gl.tensor
    worker: gl.tensor
    workers: gl.tensor
    own_tiles: gl.tensor
    shares: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    config: gl.constexpr

    @gluon.jit
    def tile_range(self, group: gl.constexpr, groups: gl.constexpr):
        """The range of numbers, each of which `tile` tells a tile of; consumers of `pingpong` have every other tile."""
        if self.config.stream_k:
            return 0, self.own_tiles + self.shares, 1
        else:
            return self.worker + group * self.workers, self.tiles, groups * self.workers

    @gluon.jit
    def tile(self, j):
        """A tile's matrix of the batch, its row and column among tiles, and its steps along K from one to another."""
        t, k0, k1 = self.number(j)
        if self.config.multicast:  # two blocks have two tiles, one below the other
            b, m, n = rasterise(t, gl.cdiv(self.tiles_m, 2), self.tiles_n, max(self.config.group_m // 2, 1))
            return b, m * 2 + gl.program_id(0) % 2, n, k0, k1
        else:
            b, m, n = rasterise(t, self.tiles_m, self.tiles_n, self.config.group_m)
            return b, m, n, k0, k1

    @gluon.jit
    def number(self, j):
        """A tile's number, and its steps along K."""
        nk = self.k_tiles
        if self.config.stream_k:
            first = gl.maximum(self.begin, (self.begin // nk + (j - self.own_tiles)) * nk)
            k0 = first % nk
            k1 = gl.minimum(nk, k0 + self.end - first)
            own = j < self.own_tiles
            t = gl.where(own, self.worker + j * self.workers, self.problem.whole_tiles + first // nk)
            return t, gl.where(own, 0, k0), gl.where(own, nk, k1)
        else:
            return j, 0, nk


@gluon.jit
def tile_scheduler(problem, config: gl.constexpr):
    """The scheduler of a problem."""
    tiles_m = gl.cdiv(problem.M, config.tile_m)
    tiles_n = gl.cdiv(problem.N, config.result_n)
    k_tiles = gl.cdiv(problem.K, config.tile_k)
    tiles = problem.B * (gl.cdiv(tiles_m, 2) if config.multicast else tiles_m) * tiles_n
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    if config.cluster > 1:
        worker = worker // config.cluster
        workers = workers // config.cluster
    first_k_tile, own_tiles, shares, begin, end = 0, 0, 0, 0, 0
    if config.split_k > 1:
        rank = gl.program_id(0) % config.split_k
        first_k_tile = rank * k_tiles // config.split_k
        k_tiles = (rank + 1) * k_tiles // config.split_k - first_k_tile
    if config.stream_k:
        total = (tiles - problem.whole_tiles) * k_tiles
        begin = worker * total // workers
        end = (worker + 1) * total // workers
        own_tiles = gl.maximum(gl.cdiv(problem.whole_tiles - worker, workers), 0)
        shares = gl.where(end > begin, (end - 1) // k_tiles - begin // k_tiles + 1, 0)
    return TileScheduler(
        problem, tiles_m, tiles_n, k_tiles, first_k_tile, tiles, worker, workers, own_tiles, shares, begin, end, config
    )


@gluon.jit
def rasterise(t, tiles_m, tiles_n, group_m: gl.constexpr):
    """Tile number -> matrix, tile row, tile column: in groups of `group_m` tile rows, so that blocks at work share operands."""
    b = t // (tiles_m * tiles_n)
    r = t % (tiles_m * tiles_n)
    group = r // (group_m * tiles_n)
    r = r % (group_m * tiles_n)
    rows = gl.minimum(tiles_m - group * group_m, group_m)
    return b, group * group_m + r % rows, r // rows


# -- operands


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


@gluon.jit
def tma_operand(desc, rows: gl.constexpr, boxes: gl.constexpr, side: gl.constexpr, config: gl.constexpr):
    """The operand behind a descriptor, which lies as `side` says (along K, batched, shared), and its stages."""
    shape: gl.constexpr = (rows, config.tile_k) if side[0] else (config.tile_k, rows)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, desc.dtype)
    buffers = gl.allocate_shared_memory(desc.dtype, (config.num_stages * boxes, shape[0], shape[1]), layout)
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
        count: gl.constexpr = config.num_stages * config.tile_n // config.padded_n
        ring = reinterpret(right.buffers, right.buffers.dtype, (count, shape[0], shape[1]), right.buffers.layout)
        return ring.index(stage if config.tile_n == config.padded_n else stage_of(stage))
    else:
        return reinterpret(right.buffers.index(stage * right.boxes), right.buffers.dtype, shape, right.buffers.layout)


@gluon.jit
def stage_of(stage):
    """A stage's number where the PTX finds it, which puts right where a stage of fewer columns begins (`ptx.narrowed`)."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1; // stage", "=r,r", [stage], dtype=gl.int32, is_pure=True, pack=1)


# -- producer warp and consumer warpgroups


@aggregate_of
class Mainloop:
    """Both operands, the ring their tiles come through, and products of them."""

    left: base_value
    right: TmaOperand
    ring: Pipeline
    config: gl.constexpr

    @gluon.jit
    def zeros(self):
        """Accumulators of nothing."""
        return warpgroup_mma_init(zeros(self.config.padded_n, self.config))

    @gluon.jit
    def step(self, acc, pipe_read, pipe_release, box: gl.constexpr, k, use_acc, frees: gl.constexpr, pred=True):
        """Asks for the products of step k along K, of a box of the left operand. If it `frees`, those of the step before end
        first, whose stage, `pipe_release`, is given back where `pred`."""
        self.ring.wait(pipe_read)
        a = self.left.fragment(pipe_read.stage, box, k, mma_layout(self.config.padded_n, self.config))
        b = right_fragment(self.right, pipe_read.stage, self.config)
        if self.right.along_k:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)
        if self.left.early:  # in registers, which products under way still read: the other warpgroup multiplies meanwhile
            acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(acc,)))
        elif frees:
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        if frees:
            self.ring.release(pipe_release, pred)
        return acc

    @gluon.jit
    def block_scaled(self, pipe_read, box: gl.constexpr, scales, tile, M, k_tiles):
        """Sums of 128 products each, times the scales of their rows and columns, added up in f32: as exact as the scales are,
        where the tensor cores keep 14 bits of a sum. While one warpgroup multiplies by scales the other one has the cores."""
        config: gl.constexpr = self.config
        strides: gl.constexpr = config.scale_strides
        y = tile.row + gl.arange(0, config.rows, gl.SliceLayout(1, mma_layout(config.padded_n, config)))
        at = scales[0] + y * strides[0]
        beside = scales[1] + tile.col // 128 * strides[2]
        of_rows = gl.load(at, mask=y < M, other=0.0)
        of_columns = gl.load(beside)
        r = zeros(config.padded_n, config)
        for k in range(k_tiles):
            acc = self.step(self.zeros(), pipe_read, pipe_read, box, k, False, False)
            pipe_read, pipe_release = pipe_read.advance(), pipe_read
            next_rows = gl.load(at + (k + 1) * strides[1], mask=(y < M) & (k + 1 < k_tiles), other=0.0)
            next_columns = gl.load(beside + (k + 1) * strides[3], mask=k + 1 < k_tiles, other=0.0)
            products = warpgroup_mma_wait(0, deps=(acc,))
            self.ring.release(pipe_release)
            r = gl.fma(products, (of_rows * of_columns)[:, None], r)
            of_rows, of_columns = next_rows, next_columns
        return (r,), pipe_read


@gluon.jit
def producer(mainloop, problem):
    """The warp that fills the ring with the tiles of both operands, all that a block's consumers will read."""
    config: gl.constexpr = mainloop.config
    left, right, ring = mainloop.left, mainloop.right, mainloop.ring
    gdc_launch_dependents()
    if not left.early:
        gdc_wait()
    scheduler = tile_scheduler(problem, config)
    early, asked = 0, 0
    pipe_write = ring.state()
    if left.early:
        early = left.load_early(ring, scheduler)
        gdc_wait()
    first, last, every = scheduler.tile_range(0, 1)
    for j in range(first, last, every):
        b, m, n, k0, k1 = scheduler.tile(j)
        for k in range(k0, k1):
            ring.acquire(pipe_write)
            ring.expect(pipe_write, config.stage_bytes)
            along = scheduler.first_k_tile + k
            if left.early:
                if asked >= early:
                    left.load(ring, pipe_write, 0, b, m, along, problem)
                asked += 1
            else:
                left.load(ring, pipe_write, 0, b, m, along, problem)
            load_right(right, ring, pipe_write, b, n, along, problem.N, config)
            if left.boxes == 2:
                left.load(ring, pipe_write, 1, b, m, along, problem)
            pipe_write = pipe_write.advance()
    if config.multicast:  # a block stays until the other one has read all that it was sent, and has said so
        for _ in gl.static_range(config.num_stages):
            ring.acquire(pipe_write)
            pipe_write = pipe_write.advance()


@gluon.jit
def consumer(group: gl.constexpr, mainloop, epilogue, order, scratch, scales, problem):
    """A warpgroup that multiplies, and writes results, of all the block's tiles or of every other one.

    `order` are barriers at which consumers wait for their turn at the tensor cores, where they take turns (CUTLASS's
    `OrderedSequenceBarrier`). A barrier that no ring has, as these, needs no `PipelineState`: its phase alone tells its round.
    """
    config: gl.constexpr = mainloop.config
    left, ring = mainloop.left, mainloop.ring
    box: gl.constexpr = 0 if config.pingpong else group
    scheduler = tile_scheduler(problem, config)
    if config.split_k > 1:
        mbarrier.expect(epilogue.cluster_full.index(group), (config.split_k - 1) * config.rows * config.epilogue_n * 4)
    if config.block_scaled:  # scales are read before the first products, which wait for those that load
        gdc_wait()
    pipe_read = ring.state()
    pipe_release = ring.state()
    aux_phase = 0
    step = group * scheduler.k_tiles
    order_phase = 1 - group
    deferred = epilogue.no_deferred()
    zero = 0
    deferred_tile = Tile(problem.B, problem.M, zero, zero, zero, ())  # nothing to write yet: TMA drops what lies outside
    first, last, every = scheduler.tile_range(group if config.pingpong else 0, 2 if config.pingpong else 1)
    for j in range(first, last, every):
        if config.pingpong:
            pipe_read = ring.state(step)
            step += 2 * scheduler.k_tiles
            mbarrier.wait(order.index(group), order_phase)
            order_phase = order_phase ^ 1
        if config.stream_k or config.block_scaled or left.scaled:
            b, m, n, k0, k1 = scheduler.tile(j)
            tile = epilogue.tile(b, m, n, group)
            if config.block_scaled:
                sums, pipe_read = mainloop.block_scaled(pipe_read, box, scales, tile, problem.M, k1)
            elif left.scaled:
                sums, pipe_read, order_phase = left.scaled_sums(mainloop, pipe_read, order, order_phase, k0, k1, group)
            else:
                acc = mainloop.zeros()
                for k in range(k0, k1):
                    acc = mainloop.step(acc, pipe_read, pipe_release, box, k, k > k0, True, k > k0)
                    pipe_read, pipe_release = pipe_read.advance(), pipe_read
                sums = (warpgroup_mma_wait(0, deps=(acc,)),)
                ring.release(pipe_release)
            if config.stream_k:
                sums, done = fixup(sums, scheduler, j, scratch, group, config)
                if done:
                    epilogue.store_alone(sums, tile, group)
            else:
                epilogue.store_alone(sums, tile, group)
        else:
            # Prologue: steps that need not know which tile it is.
            acc = mainloop.zeros()
            for k in gl.static_range(config.prologue_steps):
                acc = mainloop.step(acc, pipe_read, pipe_release, box, k, k > 0, k > 0)
                pipe_read, pipe_release = pipe_read.advance(), pipe_read
                if config.deferred_store:
                    epilogue.store_deferred(deferred, deferred_tile, k, group)
            b, m, n, k0, k1 = scheduler.tile(j)
            tile = epilogue.tile(b, m, n, group)
            if config.aux_load:
                epilogue.load_aux(0, tile, group)
            # Mainloop.
            for k in range(config.prologue_steps, k1):
                acc = mainloop.step(acc, pipe_read, pipe_release, box, k, True, True)
                pipe_read, pipe_release = pipe_read.advance(), pipe_read
            # Epilogue.
            begun, loaded = epilogue.load_first(0, tile, tile.first)
            if config.pingpong:
                mbarrier.arrive(order.index(1 - group))
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if config.split_k > 1:
                acc = reduce_over_cluster(acc, epilogue, group, config)
            else:
                ring.release(pipe_release)
            if config.aux_load:
                mbarrier.wait(epilogue.aux_barriers.index(group), aux_phase)
                aux_phase = aux_phase ^ 1
            deferred, aux_phase = epilogue.store((acc,), tile, begun, loaded, aux_phase, group)
            deferred_tile = Tile(tile.b, tile.row, tile.col, zero, tile.first, ())
    if config.deferred_store:
        for k in gl.static_range(config.subtiles):
            epilogue.store_deferred(deferred, deferred_tile, k, group)
    if config.split_k > 1:  # a block stays until all have got what it sent
        mbarrier.wait(epilogue.cluster_empty.index(0), 1)
    if config.store_bytes > 0:
        tma.store_wait(0)


@gluon.jit
def zeros(columns: gl.constexpr, config: gl.constexpr):
    """Sums of nothing, so many columns."""
    return gl.zeros((config.rows, columns), gl.int32 if config.integer else gl.float32, mma_layout(columns, config))


@gluon.jit
def pin(x):
    """A number that is computed here: LLVM would sink it to where the tensor cores wait for it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


# -- epilogue


@aggregate_of
class Tile:
    """The place of a tile's results: matrix, first row, first column; and of stores that share an epilogue which one it is, its
    first column there, and its pointers."""

    b: gl.tensor
    row: gl.tensor
    col: gl.tensor
    which: gl.tensor
    first: gl.tensor
    chosen: gl.tuple


@aggregate_of
class Epilogue:
    """The way of a tile's sums, a subtile of columns at a time: through `buffers` to where TMA writes it, or straight to
    addresses of the program's own.

    Functions that are generated from the program, of store i and a subtile whose first column is `first` (`gemm/epilogue.py`):

    - `begin(i, side, tile, layout)` reads what all subtiles need, `load(i, side, tile, begun, first, layout)` the rest.
    - `visit(i, acc, near, side, tile, begun, loaded, first, layout)` gives the subtile's value, or stores it where TMA cannot;
      `near` has the sums of the right half of the columns and what TMA loaded, where there are such.
    - `place(i, b, row, column)`, `aux_place(b, row, column)` are a subtile's coordinates in TMA's arrays.
    - `choose(side, col)` tells which of stores that share an epilogue a column is in; see `Tile`.
    """

    descs: gl.tuple
    aux_descs: gl.tuple
    side: gl.tuple
    buffers: gl.shared_memory_descriptor
    aux_barriers: gl.shared_memory_descriptor
    cluster_empty: gl.shared_memory_descriptor
    cluster_full: gl.shared_memory_descriptor
    begin: gl.constexpr
    load: gl.constexpr
    visit: gl.constexpr
    place: gl.constexpr
    aux_place: gl.constexpr
    choose: gl.constexpr
    config: gl.constexpr

    @gluon.jit
    def tile(self, b, m, n, group: gl.constexpr):
        """A consumer's part of a tile."""
        config: gl.constexpr = self.config
        b = pin(b)
        row = pin(m if config.pingpong else m * config.consumers + group) * config.rows
        col = pin(n) * config.result_n
        if config.split_k > 1:
            col += gl.program_id(0) % config.split_k * config.epilogue_n
        if config.shared_epilogue:
            which, own, chosen = self.choose(self.side, col)
            return Tile(b, row, col, which, own, chosen)
        else:
            which = 0
            return Tile(b, row, col, which, col, ())

    @gluon.jit
    def load_first(self, i: gl.constexpr, tile, first, always: gl.constexpr = False):
        """Reads what all subtiles of a store need, and one; not ahead where a tile may have no part in it."""
        layout: gl.constexpr = subtile_layout(i, self.config)
        if always or self.config.store_extent[i] == 0:
            begun = self.begin(i, self.side, tile, layout)
            return begun, self.load(i, self.side, tile, begun, first, layout)
        else:
            return (), ()

    @gluon.jit
    def load_next(self, i: gl.constexpr, j: gl.constexpr, tile, begun):
        """Reads what the subtile after subtile j of store i needs."""
        columns: gl.constexpr = self.config.subtile_n[i]
        if j + 1 == self.config.epilogue_n // columns:
            if i + 1 < len(self.config.subtile_n.value):
                return self.load_first(i + 1, tile, tile.first)
            else:
                return (), ()
        elif self.config.store_extent[i] == 0:
            at = tile.first + (j + 1) * columns
            return begun, self.load(i, self.side, tile, begun, at, subtile_layout(i, self.config))
        else:
            return (), ()

    @gluon.jit
    def store_alone(self, sums, tile, group: gl.constexpr):
        """A tile's results, nothing of which was read ahead."""
        begun, loaded = self.load_first(0, tile, tile.first)
        self.store(sums, tile, begun, loaded, 0, group)

    @gluon.jit
    def store(self, sums, tile, begun, loaded, aux_phase, group: gl.constexpr):
        """A tile's results. Gives those that wait in registers, and the phase of what TMA loads next."""
        config: gl.constexpr = self.config
        if config.vector_store:
            sums = (unpermute_columns(sums[0]),)
        deferred = ()
        for i in gl.static_range(len(config.subtile_n.value)):
            parts = subtiles(sums, config.subtile_n[i])
            for j in gl.static_range(config.epilogue_n // config.subtile_n[i]):
                begun_next, loaded_next = self.load_next(i, j, tile, begun)
                near = ()
                if config.accumulators == 2:
                    near = near + (self.subtile(parts, i, config.epilogue_n // config.subtile_n[i] + j),)
                if config.aux_load:
                    if j >= config.store_buffers:
                        self.load_aux(j, tile, group)
                        mbarrier.wait(self.aux_barriers.index(group), aux_phase)
                        aux_phase = aux_phase ^ 1
                    near = near + (self.buffer(i, j, self.aux_descs[0].dtype, group).load(subtile_layout(i, config)),)
                x = self.subtile(parts, i, j)
                if config.store_extent[i] == 0:
                    deferred = self.store_subtile(deferred, x, near, i, j, tile, begun, loaded, group)
                else:
                    self.store_if_inside(x, near, i, j, tile, group)
                begun, loaded = begun_next, loaded_next
        return deferred, aux_phase

    @gluon.jit
    def subtile(self, parts, i: gl.constexpr, j: gl.constexpr):
        """Subtile j of store i, as threads hold it."""
        return gl.convert_layout(parts[j], subtile_layout(i, self.config), assert_trivial=not self.config.vector_store)

    @gluon.jit
    def store_if_inside(self, x, near, i: gl.constexpr, j: gl.constexpr, tile, group: gl.constexpr):
        """A subtile of a store of some of the result's columns."""
        columns: gl.constexpr = self.config.subtile_n[i]
        begins: gl.constexpr = self.config.store_first[i]
        at = tile.col + j * columns
        if (at + columns > begins) & (at < begins + self.config.store_extent[i]):
            begun, loaded = self.load_first(i, tile, at, True)
            self.store_subtile((), x, near, i, j, tile, begun, loaded, group)

    @gluon.jit
    def store_subtile(self, deferred, x, near, i: gl.constexpr, j: gl.constexpr, tile, begun, loaded, group: gl.constexpr):
        """A subtile's value to where it belongs; or to those that are deferred, which it gives."""
        at = tile.first + j * self.config.subtile_n[i]
        value = self.visit(i, x, near, self.side, tile, begun, loaded, at, subtile_layout(i, self.config))
        if self.config.deferred_store:
            return deferred + (pack_pairs(value),)
        else:
            if self.config.store_desc[i] >= 0:
                self.write(value, i, j, tile, group)
            return deferred

    # -- by way of shared memory

    @gluon.jit
    def box(self, i: gl.constexpr, j: gl.constexpr, desc, group: gl.constexpr):
        """The buffer of subtile j of store i, as a descriptor's box; they alternate."""
        slot: gl.constexpr = subtile_number(i, j, self.config) % self.config.store_buffers
        buffer = self.buffers.index(group * self.config.store_buffers + slot)
        return reinterpret(buffer, desc.dtype, desc.block_type.shape, desc.layout)

    @gluon.jit
    def buffer(self, i: gl.constexpr, j: gl.constexpr, dtype: gl.constexpr, group: gl.constexpr):
        """The same as rows and columns."""
        shape: gl.constexpr = subtile_shape(i, self.config)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
        slot: gl.constexpr = subtile_number(i, j, self.config) % self.config.store_buffers
        buffer = self.buffers.index(group * self.config.store_buffers + slot)
        buffer = reinterpret(buffer, dtype, shape, layout)
        if self.config.store_m_major[i]:
            return buffer.permute((1, 0))
        else:
            return buffer

    @gluon.jit
    def write(self, value, i: gl.constexpr, j: gl.constexpr, tile, group: gl.constexpr):
        """A subtile to where TMA writes it."""
        config: gl.constexpr = self.config
        desc = self.descs[config.store_desc[i]]
        if not config.aux_load:  # else its buffer was free before the operand came
            tma.store_wait(pending(i, j, config))
        self.buffer(i, j, desc.dtype, group).store(gl.convert_layout(value, subtile_layout(i, config)))
        fence_async_shared()
        at = self.place(i, tile.b, tile.row, tile.first + (j * config.subtile_n[i] - config.store_first[i]))
        if config.shared_epilogue:
            for k in gl.static_range(len(self.descs)):
                if tile.which == k:
                    tma_store(self.descs[k], at, self.box(i, j, self.descs[k], group))
        else:
            tma_store(desc, at, self.box(i, j, desc, group))

    @gluon.jit
    def no_deferred(self):
        """Registers of a deferred tile before there is a result."""
        deferred = ()
        if self.config.deferred_store:
            shape: gl.constexpr = (self.config.rows, self.config.subtile_n[0])
            none = gl.zeros(shape, self.descs[0].dtype, subtile_layout(0, self.config))
            for _ in gl.static_range(self.config.subtiles):
                deferred = deferred + (pack_pairs(none),)
        return deferred

    @gluon.jit
    def store_deferred(self, deferred, tile, j: gl.constexpr, group: gl.constexpr):
        """A subtile that waited in registers while the next tile's first products were asked for."""
        self.write(unpack_pairs(deferred[j], self.descs[0].dtype), 0, j, tile, group)

    @gluon.jit
    def load_aux(self, first: gl.constexpr, tile, group: gl.constexpr):
        """Has TMA bring what subtiles of a tile read, from a first one on as many as there are buffers, once those are free."""
        last: gl.constexpr = first + 1 if first > 0 else self.config.store_buffers
        desc = self.aux_descs[0]
        full = self.aux_barriers.index(group)
        tma.store_wait(self.config.store_buffers - 1 if first > 0 else 0)
        mbarrier.expect(full, (last - first) * desc.block_type.nbytes)
        for j in gl.static_range(first, last):
            at = self.aux_place(tile.b, tile.row, tile.col + j * self.config.subtile_n[0])
            tma_load(desc, at, full, self.box(0, j, desc, group))


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


# -- sums that several blocks have parts of: stream-K, and split-K over a cluster


@gluon.jit
def fixup(sums, scheduler, j, scratch, group: gl.constexpr, config: gl.constexpr):
    """Adds up a tile that several workers have shares of (stream-K), in order: the last of them does, the others are done.

    Gives the sums, and whether the tile is this worker's to store. Parts lie in memory as threads hold them: what they have in
    one register follows one another, thread by thread. Of an element's row, bits 0 to 2 and 4 to 5 tell the thread; of its
    column, bits 1 to 2 (PTX ISA 9.0, 9.7.15.5.1).
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
    """Says where a ring is."""
    at = reinterpret(buffers.index(0), gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(at, count=MARKED + number)


@gluon.jit
def reduce_over_cluster(acc, epilogue, group: gl.constexpr, config: gl.constexpr):
    """Sums of a part of K, of all columns, become those of all of K, of the block's own columns: the same on every run.

    Each block of a cluster has a share of K, sends every other one its part of that one's columns, and finishes its own. Sums
    are written where the ring was, which nobody needs any more once all are done, and copied from block to block in one piece.
    Of an element's row, bits 0 to 2 and 4 to 5 tell the thread; of its column, bits 1 to 2; the other bits tell which of the
    thread's registers it is (PTX ISA 9.0, 9.7.15.5.1): four go together, 16 bytes beside those of the next thread.
    """
    rank = gl.program_id(0) % config.split_k
    split: gl.constexpr = config.split_k
    size: gl.constexpr = config.rows * config.epilogue_n * 4  # of one block's part of another's columns
    layout: gl.constexpr = mma_layout(config.epilogue_n, config)
    own: gl.constexpr = group * (size * split)
    others: gl.constexpr = config.consumers * size * split + group * (size * (split - 1))
    written: gl.constexpr = "=r,r,r,r,r,r,r,r,r" if config.integer else "=r,f,f,f,f,r,r,r,r"
    read: gl.constexpr = "=r,=r,=r,=r,r,r,r,r" if config.integer else "=f,=f,=f,=f,r,r,r,r"
    empty = epilogue.cluster_empty.index(0)
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
    mbarrier.wait(epilogue.cluster_full.index(group), 0)
    mbarrier.arrive(empty)
    acc = zeros(config.epilogue_n, config)
    for source in gl.static_range(split):
        came = others + (source + split - 1 - rank) % split * size
        at = gl.where(rank == source, own + source * size, came)
        part = gl.inline_asm_elementwise(READ, read, [place + at], dtype=acc.dtype, is_pure=False, pack=4)
        acc = part if source == 0 else acc + part
    return acc


# -- layouts and buffers


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
def pending(i, j, config):
    """The number of subtiles that may still be on their way out while one takes its buffer.

    The one before may be leaving; not so if it had the same buffer, as where an odd number makes a tile, or if it is not known
    which one was before, as where a tile has no part in some store.
    """
    odd = subtile_number(len(config.subtile_n.value), 0, config) % 2 == 1
    stores = zip(config.store_extent.value, config.store_desc.value, strict=True)
    same = config.store_buffers.value == 1 or (subtile_number(i, j, config) == 0 and odd)
    return 0 if same or any(extent > 0 for extent, at in stores if at >= 0) else 1


# -- the kernel


@gluon.jit
def gemm(
    operands, arguments, side, config: gl.constexpr, begin: gl.constexpr, load: gl.constexpr, visit: gl.constexpr,
    place: gl.constexpr, aux_place: gl.constexpr, choose: gl.constexpr,
):  # fmt: skip
    """The gemm of two operands that TMA brings as they lie; see `run` and `Epilogue`."""
    left = tma_operand(operands[0], config.rows, config.left_boxes, config.left, config)
    functions: gl.constexpr = (begin, load, visit, place, aux_place, choose)
    run(left, operands[1], arguments, side, functions, config)


@gluon.jit
def run(left, b_desc, arguments, side, functions: gl.constexpr, config: gl.constexpr):
    """The gemm of any left operand: an aggregate with `load`, `boxes`, `fragment` (or `scaled_sums`, if `scaled`), and if
    `early` with `load_early`, as `TmaOperand` and `PackedOperand` (`w4/_operand.py`) have them.

    Args:
        left: the left operand.
        b_desc: the right operand.
        arguments: descriptors of the stores that TMA writes; of what it loads for the epilogue, at most one; for `stream_k`,
            memory for parts of sums, and counters of those that have come; for `block_scaled`, pointers to both operands'
            scales; the fields of `Problem`.
        side: what the program's functions read: pointers and numbers.
        functions: see `Epilogue`.
        config: see `spec.KernelConfig`.
    """
    descs, aux_descs, scratch, scales, extents = arguments
    right = tma_operand(b_desc, config.right_rows, config.tile_n // config.right_rows, config.right, config)
    buffers = right.buffers
    if config.store_bytes > 0:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, 128], gl.int8)
        buffers = gl.allocate_shared_memory(gl.int8, [config.store_buffers * config.consumers, config.rows, 128], layout)
    ring = pipeline((), config.num_stages, 1, config.left_boxes * (2 if config.multicast else 1))
    aux, order, empty, full = ring.full_barriers, ring.full_barriers, ring.full_barriers, ring.full_barriers
    if config.aux_load:
        aux = barriers(config.consumers, 1)
    if config.ordered:
        order = barriers(config.consumers, 1)
    if config.split_k > 1:
        empty = barriers(1, config.split_k * config.consumers)
        full = barriers(config.consumers, 1)
        mark(left.buffers, 1)
        mark(right.buffers, 2)
    whole_tiles = extents[4]
    problem = Problem(extents[0], extents[1], extents[2], extents[3], whole_tiles)
    epilogue = Epilogue(
        descs, aux_descs, side, buffers, aux, empty, full,
        functions[0], functions[1], functions[2], functions[3], functions[4], functions[5], config,
    )  # fmt: skip
    mainloop = Mainloop(left, right, ring, config)
    consumes = (mainloop, epilogue, order, scratch, scales, problem)
    if config.consumers == 2:
        gl.warp_specialize(
            [(consumer, (0,) + consumes), (consumer, (1,) + consumes), (producer, (mainloop, problem))],
            [4, 1],
            [config.consumer_registers, config.producer_registers],
        )
    else:
        gl.warp_specialize([(consumer, (0,) + consumes), (producer, (mainloop, problem))], [1], [config.producer_registers])
