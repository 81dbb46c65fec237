"""The gemm kernel of Hopper, in Gluon: persistent and warp-specialised, as CUTLASS's cooperative and ping-pong kernels are.

One warp (`producer`) brings tiles of both operands into a ring of stages in shared memory by TMA; warpgroups (`consumer`)
multiply them (`mainloop`) and write results (`epilogue`); blocks stay for as many tiles as there are for each
(`TileScheduler`). Each warpgroup owns rows of the block's tile; all read the same tile of the right operand, and none waits
for another. Where what becomes of a sum takes long, they own every other tile instead (`pingpong`) and take turns: while one
multiplies, the other one writes. A tile that is done leaves a piece of columns at a time: 128 bytes of a row, which is what TMA
stores with the widest swizzle.

`config` is a `form.KernelConfig`; what becomes of a sum is the program's own and comes as generated functions (`Epilogue`).
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

# -- tiles


@aggregate_of
class Problem:
    """Matrices of the batch and their extents; tiles from number `whole_tiles` on are shared out along K, if `streamed`."""

    B: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    whole_tiles: gl.tensor


@aggregate_of
class TileScheduler:
    """Which tiles, and which steps along K of them, are a block's (or a cluster's).

    Whole tiles go round the `workers`. If `streamed`, the last ones are shared out evenly along K (stream-K): a worker has the
    steps from `begin` to `end` of all of theirs, in `shares` tiles after `whole` of its own. If `split` among the blocks of a
    cluster, each has the `steps` from `first_step` on of every tile.
    """

    problem: Problem
    down: gl.tensor
    across: gl.tensor
    steps: gl.tensor
    first_step: gl.tensor
    tiles: gl.tensor
    worker: gl.tensor
    workers: gl.tensor
    whole: gl.tensor
    shares: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    config: gl.constexpr

    @gluon.jit
    def span(self, turn: gl.constexpr, turns: gl.constexpr):
        """The range of numbers, each of which `tile` tells a tile of; warpgroups that take turns have every other tile."""
        if self.config.streamed:
            return 0, self.whole + self.shares, 1
        else:
            return self.worker + turn * self.workers, self.tiles, turns * self.workers

    @gluon.jit
    def rank(self):
        """The block's number in its cluster."""
        return gl.program_id(0) % self.config.cluster

    @gluon.jit
    def tile(self, j):
        """A tile's matrix of the batch, its row and column among tiles, and its steps along K from one to another."""
        t, k0, k1 = self.number(j)
        if self.config.paired:  # two blocks have two tiles, one below the other
            b, m, n = rasterise(t, gl.cdiv(self.down, 2), self.across, max(self.config.group_m // 2, 1))
            return b, m * 2 + self.rank(), n, k0, k1
        else:
            b, m, n = rasterise(t, self.down, self.across, self.config.group_m)
            return b, m, n, k0, k1

    @gluon.jit
    def number(self, j):
        """A tile's number, and its steps along K."""
        nk = self.steps
        if self.config.streamed:
            first = gl.maximum(self.begin, (self.begin // nk + (j - self.whole)) * nk)
            k0 = first % nk
            k1 = gl.minimum(nk, k0 + self.end - first)
            own = j < self.whole
            t = gl.where(own, self.worker + j * self.workers, self.problem.whole_tiles + first // nk)
            return t, gl.where(own, 0, k0), gl.where(own, nk, k1)
        else:
            return j, 0, nk


@gluon.jit
def tile_scheduler(problem, config: gl.constexpr):
    """The scheduler of a problem."""
    down = gl.cdiv(problem.M, config.tile_m)
    across = gl.cdiv(problem.N, config.width)
    steps = gl.cdiv(problem.K, config.tile_k)
    tiles = problem.B * (gl.cdiv(down, 2) if config.paired else down) * across
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    if config.cluster > 1:
        worker = worker // config.cluster
        workers = workers // config.cluster
    first_step, whole, shares, begin, end = 0, 0, 0, 0, 0
    if config.split > 1:
        rank = gl.program_id(0) % config.split
        first_step = rank * steps // config.split
        steps = (rank + 1) * steps // config.split - first_step
    if config.streamed:
        total = (tiles - problem.whole_tiles) * steps
        begin = worker * total // workers
        end = (worker + 1) * total // workers
        whole = gl.maximum(gl.cdiv(problem.whole_tiles - worker, workers), 0)
        shares = gl.where(end > begin, (end - 1) // steps - begin // steps + 1, 0)
    return TileScheduler(problem, down, across, steps, first_step, tiles, worker, workers, whole, shares, begin, end, config)


@gluon.jit
def rasterise(t, down, across, group_m: gl.constexpr):
    """Tile number -> matrix, tile row, tile column: in groups of `group_m` tile rows, so that blocks at work share operands."""
    b = t // (down * across)
    r = t % (down * across)
    group = r // (group_m * across)
    r = r % (group_m * across)
    rows = gl.minimum(down - group * group_m, group_m)
    return b, group * group_m + r % rows, r // rows


# -- operands


@aggregate_of
class TmaOperand:
    """An operand whose tiles TMA brings as they lie, `parts` boxes of `rows` rows to a stage.

    It is read along K (K is contiguous) or holds a stage transposed; TMA steps over matrices of the batch along an axis of
    their own (`batched`), or one matrix is `shared` by all of the batch, or rows of all matrices follow one another. It is not
    asked for `early`, before the kernel ahead has ended, nor are its sums `scaled` as they are made.
    """

    desc: tma.tensor_descriptor
    buffers: gl.shared_memory_descriptor
    rows: gl.constexpr
    parts: gl.constexpr
    tile_k: gl.constexpr
    along_k: gl.constexpr
    batched: gl.constexpr
    shared: gl.constexpr
    early: gl.constexpr
    scaled: gl.constexpr

    @gluon.jit
    def load_box(self, ring, stage, part, b, extent, row, k):
        """Has TMA bring a part of a stage: rows from `row` on of a matrix of `extent` rows, step k along K."""
        along = k * self.tile_k
        if self.along_k and self.batched:
            at = [b, row, along]
        elif self.along_k:
            at = [row if self.shared else b * extent + row, along]
        elif self.batched:
            at = [b, along, row]
        else:  # rows of other matrices would follow along K: there is one
            at = [along, row]
        ring.load(stage, self.desc, at, self.buffers.index(stage * self.parts + part))

    @gluon.jit
    def load(self, ring, stage, part: gl.constexpr, b, m, k, problem):
        """Has TMA bring a part of the left operand's tile m."""
        self.load_box(ring, stage, part, b, problem.M, m * (self.parts * self.rows) + part * self.rows, k)

    @gluon.jit
    def fragment(self, stage, part: gl.constexpr, k, layout: gl.constexpr):
        """What a warpgroup multiplies, in shared memory."""
        tile = self.buffers.index(stage * self.parts + part)
        if self.along_k:
            return tile
        else:
            return tile.permute((1, 0))


@gluon.jit
def tma_operand(desc, rows: gl.constexpr, parts: gl.constexpr, side: gl.constexpr, config: gl.constexpr):
    """The operand behind a descriptor, which lies as `side` says (along K, batched, shared), and room for its stages."""
    shape: gl.constexpr = (rows, config.tile_k) if side[0] else (config.tile_k, rows)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, desc.dtype)
    buffers = gl.allocate_shared_memory(desc.dtype, (config.num_stages * parts, shape[0], shape[1]), layout)
    return TmaOperand(desc, buffers, rows, parts, config.tile_k, side[0], side[1], side[2], False, False)


@gluon.jit
def load_right(right, ring, stage, b, n, k, N, config: gl.constexpr):
    """Has TMA bring a tile of the right operand: of a pair of blocks each brings half of it to both.

    Where sums of two halves of the operand's columns meet, a tile has as many of both.
    """
    own: gl.constexpr = right.parts // 2 if config.paired else right.parts
    of_half: gl.constexpr = right.parts // 2
    for i in gl.static_range(own):
        unit = gl.program_id(0) % 2 * own + i if config.paired else i
        if config.halves == 1:
            right.load_box(ring, stage, unit, b, N, n * config.tile_n + unit * right.rows, k)
        else:
            half = gl.program_id(0) % 2 if config.paired else i // of_half
            row = half * N + n * config.width + i % of_half * right.rows
            right.load_box(ring, stage, unit, b, 2 * N, row, k)


@gluon.jit
def right_fragment(right, stage, config: gl.constexpr):
    """The right operand's tile of a stage, as it lies; Triton is told of `shape_n` columns, the next power of two."""
    shape: gl.constexpr = (config.shape_n, config.tile_k) if right.along_k else (config.tile_k, config.shape_n)
    if right.parts == 1:
        return right.buffers.index(stage)
    elif config.within:  # a part of the whole ring, as if it held as many stages of Triton's columns as fit
        count: gl.constexpr = config.num_stages * config.tile_n // config.shape_n
        ring = reinterpret(right.buffers, right.buffers.dtype, (count, shape[0], shape[1]), right.buffers.layout)
        return ring.index(stage if config.tile_n == config.shape_n else stage_of(stage))
    else:
        return reinterpret(right.buffers.index(stage * right.parts), right.buffers.dtype, shape, right.buffers.layout)


@gluon.jit
def stage_of(stage):
    """A stage's number where the PTX finds it, which puts right where a stage of fewer columns begins (`ptx.narrowed`)."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1; // stage", "=r,r", [stage], dtype=gl.int32, is_pure=True, pack=1)


# -- the warp that loads and the warpgroups that multiply


@aggregate_of
class Mainloop:
    """Both operands, the ring their tiles come through, and products of them."""

    left: base_value
    right: TmaOperand
    ring: Pipeline
    config: gl.constexpr

    @gluon.jit
    def zeros(self):
        """Sums of nothing."""
        return warpgroup_mma_init(zeros(self.config.shape_n, self.config))

    @gluon.jit
    def step(self, acc, stage, phase, release, part: gl.constexpr, k, use_acc, frees: gl.constexpr, pred=True):
        """Asks for the products of step k along K, of a part of the left operand. If it `frees`, those of the step before end
        first, whose stage, `release`, is given back where `pred`. Gives the next step's acc, stage, phase and release."""
        self.ring.wait(stage, phase)
        a = self.left.fragment(stage, part, k, fragment(self.config.shape_n, self.config))
        b = right_fragment(self.right, stage, self.config)
        if self.right.along_k:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)
        if self.left.early:  # in registers, which products under way still read: the other warpgroup multiplies meanwhile
            acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(acc,)))
        elif frees:
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        if frees:
            self.ring.release(release, pred)
        following, parity = self.ring.advance(stage, phase)
        return acc, following, parity, stage

    @gluon.jit
    def by_blocks(self, stage, phase, part: gl.constexpr, scales, tile, M, steps):
        """Sums of 128 products each, times the scales of their rows and columns, added up in f32: as exact as the scales are,
        where the tensor cores keep 14 bits of a sum. While one warpgroup multiplies by scales the other one has the cores."""
        config: gl.constexpr = self.config
        strides: gl.constexpr = config.block_strides
        y = tile.row + gl.arange(0, config.rows, gl.SliceLayout(1, fragment(config.shape_n, config)))
        at = scales[0] + y * strides[0]
        beside = scales[1] + tile.col // 128 * strides[2]
        of_rows = gl.load(at, mask=y < M, other=0.0)
        of_columns = gl.load(beside)
        r = zeros(config.shape_n, config)
        for k in range(steps):
            acc, stage, phase, release = self.step(self.zeros(), stage, phase, 0, part, k, False, False)
            next_rows = gl.load(at + (k + 1) * strides[1], mask=(y < M) & (k + 1 < steps), other=0.0)
            next_columns = gl.load(beside + (k + 1) * strides[3], mask=k + 1 < steps, other=0.0)
            products = warpgroup_mma_wait(0, deps=(acc,))
            self.ring.release(release)
            r = gl.fma(products, (of_rows * of_columns)[:, None], r)
            of_rows, of_columns = next_rows, next_columns
        return (r,), stage, phase


@gluon.jit
def producer(mainloop, problem):
    """The warp that fills the ring with the tiles of both operands, all that a block's consumers will read."""
    config: gl.constexpr = mainloop.config
    left, right, ring = mainloop.left, mainloop.right, mainloop.ring
    if config.chained:
        gdc_launch_dependents()
        if not left.early:
            gdc_wait()
    scheduler = tile_scheduler(problem, config)
    early, asked, stage, phase = 0, 0, 0, 0
    if left.early:
        early = left.load_early(ring, scheduler)
        if config.chained:
            gdc_wait()
    first, last, every = scheduler.span(0, 1)
    for j in range(first, last, every):
        b, m, n, k0, k1 = scheduler.tile(j)
        for k in range(k0, k1):
            ring.acquire(stage, phase)
            ring.expect(stage, config.stage_bytes)
            along = scheduler.first_step + k
            if left.early:
                if asked >= early:
                    left.load(ring, stage, 0, b, m, along, problem)
                asked += 1
            else:
                left.load(ring, stage, 0, b, m, along, problem)
            load_right(right, ring, stage, b, n, along, problem.N, config)
            if left.parts == 2:
                left.load(ring, stage, 1, b, m, along, problem)
            stage, phase = ring.advance(stage, phase)
    if config.paired:  # a block stays until the other one has read all that it was sent, and has said so
        for _ in gl.static_range(config.num_stages):
            ring.acquire(stage, phase)
            stage, phase = ring.advance(stage, phase)


@gluon.jit
def consumer(group: gl.constexpr, mainloop, epilogue, turns, scratch, scales, problem):
    """A warpgroup that multiplies, and writes results, of all the block's tiles or of every other one."""
    config: gl.constexpr = mainloop.config
    left, ring = mainloop.left, mainloop.ring
    part: gl.constexpr = 0 if config.pingpong else group
    scheduler = tile_scheduler(problem, config)
    if config.split > 1:
        mbarrier.expect(epilogue.cluster_came.index(group), (config.split - 1) * config.rows * config.own_n * 4)
    if config.by_blocks and config.chained:  # scales are read before the first products, which wait for those that load
        gdc_wait()
    stage, phase, release = 0, 0, 0
    came = 0  # parity of the barrier of what TMA brings for the epilogue
    at = group * scheduler.steps
    turn = 1 - group
    held = epilogue.nothing()
    none = 0
    waiting = Tile(problem.B, problem.M, none, none, none, ())  # nothing to write yet: TMA drops what lies outside
    first, last, every = scheduler.span(group if config.pingpong else 0, 2 if config.pingpong else 1)
    for j in range(first, last, every):
        if config.pingpong:
            stage, phase = ring.position(at)
            at += 2 * scheduler.steps
            mbarrier.wait(turns.index(group), turn)
            turn = turn ^ 1
        if config.streamed or config.by_blocks or left.scaled:
            b, m, n, k0, k1 = scheduler.tile(j)
            tile = epilogue.tile(b, m, n, group)
            if config.by_blocks:
                sums, stage, phase = mainloop.by_blocks(stage, phase, part, scales, tile, problem.M, k1)
            elif left.scaled:
                sums, stage, phase, turn = left.scaled_sums(mainloop, stage, phase, turns, turn, k0, k1, group)
            else:
                acc = mainloop.zeros()
                for k in range(k0, k1):
                    acc, stage, phase, release = mainloop.step(acc, stage, phase, release, part, k, k > k0, True, k > k0)
                sums = (warpgroup_mma_wait(0, deps=(acc,)),)
                ring.release(release)
            if config.streamed:
                sums, done = fixup(sums, scheduler, j, scratch, group, config)
                if done:
                    epilogue.store_alone(sums, tile, group)
            else:
                epilogue.store_alone(sums, tile, group)
        else:
            # Prologue: steps that need not know which tile it is.
            acc = mainloop.zeros()
            for k in gl.static_range(config.ahead):
                acc, stage, phase, release = mainloop.step(acc, stage, phase, release, part, k, k > 0, k > 0)
                if config.hold:
                    epilogue.write_held(held, waiting, k, group)
            b, m, n, k0, k1 = scheduler.tile(j)
            tile = epilogue.tile(b, m, n, group)
            if config.fetches:
                epilogue.fetch(0, tile, group)
            # Mainloop.
            for k in range(config.ahead, k1):
                acc, stage, phase, release = mainloop.step(acc, stage, phase, release, part, k, True, True)
            # Epilogue.
            begun, loaded = epilogue.load_ahead(tile)
            if config.pingpong:
                mbarrier.arrive(turns.index(1 - group))
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if config.split > 1:
                acc = reduce_over_cluster(acc, epilogue, scheduler.rank(), group, config)
            else:
                ring.release(release)
            if config.fetches:
                came = epilogue.wait_fetched(came, group)
            held, came = epilogue.store((acc,), tile, begun, loaded, came, group)
            waiting = Tile(tile.b, tile.row, tile.col, none, tile.first, ())
    if config.hold:
        for k in gl.static_range(config.pieces):
            epilogue.write_held(held, waiting, k, group)
    if config.split > 1:  # a block stays until all have got what it sent
        mbarrier.wait(epilogue.cluster_done.index(0), 1)
    if config.stores_by_tma:
        tma.store_wait(0)


@gluon.jit
def zeros(columns: gl.constexpr, config: gl.constexpr):
    """Sums of nothing, so many columns."""
    return gl.zeros((config.rows, columns), gl.int32 if config.integer else gl.float32, fragment(columns, config))


@gluon.jit
def pin(x):
    """A number that is computed here: LLVM would sink it to where the tensor cores wait for it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


# -- what becomes of sums


@aggregate_of
class Tile:
    """Where a tile's results are: matrix, first row, first column; and of a store that stands for several which one it is, its
    first column there, and its pointers."""

    b: gl.tensor
    row: gl.tensor
    col: gl.tensor
    which: gl.tensor
    first: gl.tensor
    chosen: gl.tuple


@aggregate_of
class Epilogue:
    """What becomes of a tile's sums, a piece of columns at a time: through `buffers` to where TMA writes it, or straight to
    addresses of the program's own.

    Functions that are generated from the program, of store i and a piece whose first column is `first` (`gemm/epilogue.py`):

    - `begin(i, side, tile, layout)` reads what all pieces of a tile need, `load(i, side, tile, begun, first, layout)` the rest.
    - `visit(i, acc, near, side, tile, begun, loaded, first, layout)` gives the piece's value (or stores it, where TMA cannot);
      `near` has the sums of the right half of the columns and what TMA fetched, where there are such.
    - `place(i, b, row, column)`, `fetched_place(b, row, column)` are a piece's coordinates in TMA's arrays.
    - `choose(side, col)` tells which of stores that differ in their addresses alone a column is in; see `Tile`.
    """

    descs: gl.tuple
    fetched_descs: gl.tuple
    side: gl.tuple
    buffers: gl.shared_memory_descriptor
    fetched_barriers: gl.shared_memory_descriptor
    cluster_done: gl.shared_memory_descriptor
    cluster_came: gl.shared_memory_descriptor
    begin: gl.constexpr
    load: gl.constexpr
    visit: gl.constexpr
    place: gl.constexpr
    fetched_place: gl.constexpr
    choose: gl.constexpr
    config: gl.constexpr

    @gluon.jit
    def tile(self, b, m, n, group: gl.constexpr):
        """A warpgroup's part of a tile."""
        config: gl.constexpr = self.config
        b = pin(b)
        row = pin(m if config.pingpong else m * config.groups + group) * config.rows
        col = pin(n) * config.width
        if config.split > 1:
            col += gl.program_id(0) % config.split * config.own_n
        if config.alike:
            which, own, chosen = self.choose(self.side, col)
            return Tile(b, row, col, which, own, chosen)
        else:
            which = 0
            return Tile(b, row, col, which, col, ())

    @gluon.jit
    def load_ahead(self, tile):
        """What a tile's first piece reads, asked for before its sums are there."""
        return self.load_first(0, tile, tile.first)

    @gluon.jit
    def load_first(self, i: gl.constexpr, tile, first, always: gl.constexpr = False):
        """What all pieces of a store read, and one; not ahead where a tile may have no part in it."""
        layout: gl.constexpr = piece_layout(i, self.config)
        if always or self.config.store_everywhere[i]:
            begun = self.begin(i, self.side, tile, layout)
            return begun, self.load(i, self.side, tile, begun, first, layout)
        else:
            return (), ()

    @gluon.jit
    def load_next(self, i: gl.constexpr, j: gl.constexpr, tile, begun):
        """What the piece after piece j of store i reads."""
        columns: gl.constexpr = self.config.store_columns[i]
        if j + 1 == self.config.own_n // columns:
            if i + 1 < len(self.config.store_columns.value):
                return self.load_first(i + 1, tile, tile.first)
            else:
                return (), ()
        elif self.config.store_everywhere[i]:
            at = tile.first + (j + 1) * columns
            return begun, self.load(i, self.side, tile, begun, at, piece_layout(i, self.config))
        else:
            return (), ()

    @gluon.jit
    def store_alone(self, sums, tile, group: gl.constexpr):
        """A tile's results, nothing of which was read ahead."""
        begun, loaded = self.load_ahead(tile)
        self.store(sums, tile, begun, loaded, 0, group)

    @gluon.jit
    def store(self, sums, tile, begun, loaded, came, group: gl.constexpr):
        """A tile's results. Gives those that wait in registers, and the parity of what TMA fetches next."""
        config: gl.constexpr = self.config
        if config.widened:
            sums = (in_order(sums[0]),)
        held = ()
        for i in gl.static_range(len(config.store_columns.value)):
            pieces = in_pieces(sums, config.store_columns[i])
            for j in gl.static_range(config.own_n // config.store_columns[i]):
                begun_next, loaded_next = self.load_next(i, j, tile, begun)
                near = ()
                if config.halves == 2:
                    near = near + (self.piece(pieces, i, config.own_n // config.store_columns[i] + j),)
                if config.fetches:
                    if j >= config.leaving:
                        self.fetch(j, tile, group)
                        came = self.wait_fetched(came, group)
                    near = near + (self.room(i, j, self.fetched_descs[0].dtype, group).load(piece_layout(i, config)),)
                x = self.piece(pieces, i, j)
                if config.store_everywhere[i]:
                    held = self.store_piece(held, x, near, i, j, tile, begun, loaded, group)
                else:
                    self.store_if_inside(x, near, i, j, tile, group)
                begun, loaded = begun_next, loaded_next
        return held, came

    @gluon.jit
    def piece(self, pieces, i: gl.constexpr, j: gl.constexpr):
        """Piece j of store i, as threads hold it."""
        return gl.convert_layout(pieces[j], piece_layout(i, self.config), assert_trivial=not self.config.widened)

    @gluon.jit
    def store_if_inside(self, x, near, i: gl.constexpr, j: gl.constexpr, tile, group: gl.constexpr):
        """A piece of a store of some of the result's columns."""
        columns: gl.constexpr = self.config.store_columns[i]
        begins: gl.constexpr = self.config.store_first[i]
        at = tile.col + j * columns
        if (at + columns > begins) & (at < begins + self.config.store_extent[i]):
            begun, loaded = self.load_first(i, tile, at, True)
            self.store_piece((), x, near, i, j, tile, begun, loaded, group)

    @gluon.jit
    def store_piece(self, held, x, near, i: gl.constexpr, j: gl.constexpr, tile, begun, loaded, group: gl.constexpr):
        """A piece's value to where it belongs; or to those that are held, which it gives."""
        at = tile.first + j * self.config.store_columns[i]
        value = self.visit(i, x, near, self.side, tile, begun, loaded, at, piece_layout(i, self.config))
        if self.config.hold:
            return held + (pack(value),)
        else:
            if self.config.store_by_tma[i] >= 0:
                self.write(value, i, j, tile, group)
            return held

    # -- by way of shared memory

    @gluon.jit
    def box(self, i: gl.constexpr, j: gl.constexpr, desc, group: gl.constexpr):
        """Where piece j of store i stands in shared memory, as a descriptor's box."""
        box = self.buffers.index(group * self.config.leaving + slot(i, j, self.config))
        return reinterpret(box, desc.dtype, desc.block_type.shape, desc.layout)

    @gluon.jit
    def room(self, i: gl.constexpr, j: gl.constexpr, dtype: gl.constexpr, group: gl.constexpr):
        """The same as rows and columns."""
        shape: gl.constexpr = piece_shape(i, self.config)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
        room = self.buffers.index(group * self.config.leaving + slot(i, j, self.config))
        room = reinterpret(room, dtype, shape, layout)
        if self.config.store_across[i]:
            return room.permute((1, 0))
        else:
            return room

    @gluon.jit
    def write(self, value, i: gl.constexpr, j: gl.constexpr, tile, group: gl.constexpr):
        """A piece to where TMA writes it."""
        config: gl.constexpr = self.config
        desc = self.descs[config.store_by_tma[i]]
        if not config.fetches:  # else its place was free before the operand came
            tma.store_wait(pending(i, j, config))
        self.room(i, j, desc.dtype, group).store(gl.convert_layout(value, piece_layout(i, config)))
        fence_async_shared()
        at = self.place(i, tile.b, tile.row, tile.first + (j * config.store_columns[i] - config.store_first[i]))
        if config.alike:
            for k in gl.static_range(len(self.descs)):
                if tile.which == k:
                    tma_store(self.descs[k], at, self.box(i, j, self.descs[k], group))
        else:
            tma_store(desc, at, self.box(i, j, desc, group))

    @gluon.jit
    def nothing(self):
        """What is held before there is a result."""
        held = ()
        if self.config.hold:
            shape: gl.constexpr = (self.config.rows, self.config.store_columns[0])
            none = gl.zeros(shape, self.descs[0].dtype, piece_layout(0, self.config))
            for _ in gl.static_range(self.config.pieces):
                held = held + (pack(none),)
        return held

    @gluon.jit
    def write_held(self, held, tile, j: gl.constexpr, group: gl.constexpr):
        """A piece that waited in registers while the next tile's first products were asked for."""
        self.write(unpack(held[j], self.descs[0].dtype), 0, j, tile, group)

    @gluon.jit
    def fetch(self, first: gl.constexpr, tile, group: gl.constexpr):
        """Has TMA bring what pieces of a tile read, from a first one on as many as there is room for, once that is free."""
        last: gl.constexpr = first + 1 if first > 0 else self.config.leaving
        desc = self.fetched_descs[0]
        came = self.fetched_barriers.index(group)
        tma.store_wait(self.config.leaving - 1 if first > 0 else 0)
        mbarrier.expect(came, (last - first) * desc.block_type.nbytes)
        for j in gl.static_range(first, last):
            at = self.fetched_place(tile.b, tile.row, tile.col + j * self.config.store_columns[0])
            tma_load(desc, at, came, self.box(0, j, desc, group))

    @gluon.jit
    def wait_fetched(self, came, group: gl.constexpr):
        """Waits for it; gives the barrier's next parity."""
        mbarrier.wait(self.fetched_barriers.index(group), came)
        return came ^ 1


@gluon.jit
def in_pieces(parts, columns: gl.constexpr):
    """Parts of columns, halved as often as it takes until each has so many."""
    if parts[0].shape[1] == columns:
        return parts
    else:
        return in_pieces(halved(parts), columns)


@gluon.jit
def halved(parts):
    """Left and right half of the columns of each, both of which each thread holds."""
    found = ()
    for i in gl.static_range(len(parts)):
        x = parts[i]
        found = found + x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
    return found


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


# -- sums that several blocks have parts of


@gluon.jit
def fixup(sums, scheduler, j, scratch, group: gl.constexpr, config: gl.constexpr):
    """Of a tile that several workers have shares of (stream-K), the last one adds up all in order; the others are done with it.

    Gives the sums, and whether the tile is this worker's to store. Parts lie in memory as threads hold them: what they have in
    one register follows one another, thread by thread. Of an element's row, bits 0 to 2 and 4 to 5 tell the thread; of its
    column, bits 1 to 2 (PTX ISA 9.0, 9.7.15.5.1).
    """
    partial, arrived = scratch[0], scratch[1]
    columns: gl.constexpr = sums[0].shape[1]
    layout: gl.constexpr = sums[0].type.layout
    done = True
    if j >= scheduler.whole:
        t = scheduler.number(j)[0]
        nk, c, G = scheduler.steps, scheduler.worker, scheduler.workers
        total = (scheduler.tiles - scheduler.problem.whole_tiles) * nk
        q = t - scheduler.problem.whole_tiles
        first = ((q * nk + 1) * G - 1) // total
        last = ((q * nk + nk) * G - 1) // total
        if last > first:
            y = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
            x = gl.arange(0, columns, gl.SliceLayout(0, layout))
            own = (y & 7) * 4 + ((y >> 4) & 3) * 32 + ((y >> 3) & 1) * 256 + (y >> 6) * (64 * config.shape_n)
            across = ((x >> 1) & 3) + (x & 1) * 128 + (x >> 3) * 512 + group * (config.rows * config.shape_n)
            inside = own[:, None] + across[None, :]
            slot = 2 * c + gl.where((c == first) & (scheduler.begin // nk != q), 1, 0)
            to = partial + of_pair(slot, config).to(gl.int64) * (config.tile_m * config.shape_n) + inside
            for i in gl.static_range(len(sums)):
                gl.store(to + i * (config.rows * columns), sums[i])
            barrier()
            counter = arrived + of_pair(q, config) * config.groups + group
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
                    source = partial + of_pair(at, config).to(gl.int64) * (config.tile_m * config.shape_n) + inside
                    found = added(found, source, config.rows * columns)
                sums = found
    return sums, done


@gluon.jit
def added(sums, source, apart: gl.constexpr):
    """Sums and those that another block left in memory."""
    found = ()
    for i in gl.static_range(len(sums)):
        found = found + (sums[i] + gl.load(source + i * apart, cache_modifier=".cg"),)
    return found


@gluon.jit
def of_pair(number, config: gl.constexpr):
    """A number that both blocks of a pair have, as one of the block's own."""
    if config.paired:
        return number * 2 + gl.program_id(0) % 2
    else:
        return number


# Gluon has no addresses of shared memory: `ptx.split` replaces RING and CAME, and finds rings by what looks like barriers of
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
        "mov.u32 full, CAME; add.u32 full, full, $4; "
        "mapa.shared::cluster.u32 there, there, $5; mapa.shared::cluster.u32 full, full, $5; "
        f"@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [from], {nbytes}, [full]; }}"
    )


@gluon.jit
def mark(buffers, number: gl.constexpr):
    """Says where a ring is."""
    at = reinterpret(buffers.index(0), gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(at, count=MARKED + number)


@gluon.jit
def reduce_over_cluster(acc, epilogue, rank, group: gl.constexpr, config: gl.constexpr):
    """Sums of a part of K, of all columns, become those of all of K, of the block's own columns: the same on every run.

    Each block of a cluster has a share of K, sends every other one its part of that one's columns, and finishes its own. Sums
    are written where the ring was, which nobody needs any more once all are done, and copied from block to block in one piece.
    Of an element's row, bits 0 to 2 and 4 to 5 tell the thread; of its column, bits 1 to 2; the other bits tell which of the
    thread's registers it is (PTX ISA 9.0, 9.7.15.5.1): four go together, 16 bytes beside those of the next thread.
    """
    split: gl.constexpr = config.split
    size: gl.constexpr = config.rows * config.own_n * 4  # of one block's part of another's columns
    layout: gl.constexpr = fragment(config.own_n, config)
    own: gl.constexpr = group * (size * split)
    others: gl.constexpr = config.groups * size * split + group * (size * (split - 1))
    written: gl.constexpr = "=r,r,r,r,r,r,r,r,r" if config.integer else "=r,f,f,f,f,r,r,r,r"
    read: gl.constexpr = "=r,=r,=r,=r,r,r,r,r" if config.integer else "=f,=f,=f,=f,r,r,r,r"
    done = epilogue.cluster_done.index(0)
    mbarrier.arrive(done)
    y = gl.arange(0, config.rows, gl.SliceLayout(1, layout))
    x = gl.arange(0, config.own_n, gl.SliceLayout(0, layout))
    lane = ((y & 7) * 4 + ((y >> 4) & 3) * 32)[:, None] + ((x >> 1) & 3)[None, :]
    place = lane * 16 + (x >> 3)[None, :] * 2048
    mbarrier.wait(done, 0)
    parts = in_pieces((acc,), config.own_n)
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
    mbarrier.wait(epilogue.cluster_came.index(group), 0)
    mbarrier.arrive(done)
    acc = zeros(config.own_n, config)
    for source in gl.static_range(split):
        came = others + (source + split - 1 - rank) % split * size
        at = gl.where(rank == source, own + source * size, came)
        part = gl.inline_asm_elementwise(READ, read, [place + at], dtype=acc.dtype, is_pure=False, pack=4)
        acc = part if source == 0 else acc + part
    return acc


# -- how threads hold columns, and where pieces stand


@gluon.constexpr_function
def fragment(columns, config):
    """So many columns as products leave them."""
    m, n, k = config.instruction.value
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [m, min(columns, n), k])


@gluon.constexpr_function
def piece_layout(i, config):
    """A piece of store i: if `widened`, a thread has eight neighbours."""
    columns = config.store_columns.value[i]
    if not config.widened:
        return fragment(columns, config)
    rows = config.rows.value
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, c] for c in (32, 64, 128) if c < columns)]
    registers += [[r, 0] for r in (64,) if r < rows]
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.constexpr_function
def piece_shape(i, config):
    """Rows and columns of a piece of store i, the contiguous axis last."""
    shape = [config.rows.value, config.store_columns.value[i]]
    return shape[::-1] if config.store_across.value[i] else shape


@gluon.constexpr_function
def number(i, j, config):
    """Of piece j of store i among those of a tile that TMA writes."""
    given = zip(config.store_columns.value[:i], config.store_by_tma.value[:i], strict=True)
    return sum(config.own_n.value // columns for columns, at in given if at >= 0) + j


@gluon.constexpr_function
def slot(i, j, config):
    """Which of a warpgroup's places in shared memory piece j of store i has; they alternate."""
    return number(i, j, config) % config.leaving.value


@gluon.constexpr_function
def pending(i, j, config):
    """How many pieces may still be on their way out while one takes its place.

    The one before may be leaving; not so if it had the same place, as where an odd number makes a tile, or if it is not known
    which one was before, as where a tile has no part in some store.
    """
    odd = number(len(config.store_columns.value), 0, config) % 2 == 1
    stores = zip(config.store_everywhere.value, config.store_by_tma.value, strict=True)
    same = config.leaving.value == 1 or (number(i, j, config) == 0 and odd)
    return 0 if same or not all(everywhere for everywhere, at in stores if at >= 0) else 1


# -- the kernel


@gluon.jit
def gemm(
    a_desc, b_desc, descs, fetched_descs, scratch, scales, problem, side, config: gl.constexpr,
    begin: gl.constexpr, load: gl.constexpr, visit: gl.constexpr, place: gl.constexpr, fetched_place: gl.constexpr,
    choose: gl.constexpr,
):  # fmt: skip
    """The gemm of two operands that TMA brings as they lie; see `run` and `Epilogue`."""
    left = tma_operand(a_desc, config.rows, config.parts, config.left, config)
    functions: gl.constexpr = (begin, load, visit, place, fetched_place, choose)
    run(left, b_desc, descs, fetched_descs, scratch, scales, problem, side, functions, config)


@gluon.jit
def run(left, b_desc, descs, fetched_descs, scratch, scales, problem, side, functions: gl.constexpr, config: gl.constexpr):
    """The gemm of any left operand: an aggregate with `load`, `parts`, `fragment` (or `scaled_sums`, if `scaled`), and if
    `early` with `load_early`, as `TmaOperand` has them.

    Args:
        left: the left operand.
        b_desc: the right operand.
        descs: of the stores that TMA writes.
        fetched_descs: of what it fetches for the epilogue, at most one.
        scratch: room for parts of sums, and counters of those that have come, if `streamed`.
        scales: pointers to scales of both operands, if `by_blocks`.
        problem: the fields of `Problem`.
        side: what the program's functions read: pointers and numbers.
        functions: see `Epilogue`.
        config: see `form.KernelConfig`.
    """
    right = tma_operand(b_desc, config.unit, config.units, config.right, config)
    buffers = right.buffers
    if config.out_bytes > 0:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, 128], gl.int8)
        buffers = gl.allocate_shared_memory(gl.int8, [config.leaving * config.groups, config.rows, 128], layout)
    ring = pipeline((), config.num_stages, 1, config.parts * (2 if config.paired else 1))
    fetched, turns, done, came = ring.full_barriers, ring.full_barriers, ring.full_barriers, ring.full_barriers
    if config.fetches:
        fetched = barriers(config.groups, 1)
    if config.turns:
        turns = barriers(config.groups, 1)
    if config.split > 1:
        done = barriers(1, config.split * config.groups)
        came = barriers(config.groups, 1)
        mark(left.buffers, 1)
        mark(right.buffers, 2)
    whole_tiles = problem[4]
    problem = Problem(problem[0], problem[1], problem[2], problem[3], whole_tiles)
    epilogue = Epilogue(
        descs, fetched_descs, side, buffers, fetched, done, came,
        functions[0], functions[1], functions[2], functions[3], functions[4], functions[5], config,
    )  # fmt: skip
    mainloop = Mainloop(left, right, ring, config)
    multiplies = (mainloop, epilogue, turns, scratch, scales, problem)
    if config.groups == 2:
        gl.warp_specialize(
            [(consumer, (0,) + multiplies), (consumer, (1,) + multiplies), (producer, (mainloop, problem))],
            [4, 1],
            [config.consumer_registers, config.producer_registers],
        )
    else:
        gl.warp_specialize([(consumer, (0,) + multiplies), (producer, (mainloop, problem))], [1], [config.producer_registers])
