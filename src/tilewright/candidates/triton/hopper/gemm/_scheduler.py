"""The tile scheduler of the Hopper gemm: which tiles of the result, and which steps along K of them, a block works on.

Blocks are persistent, as in CUTLASS's `PersistentTileSchedulerSm90`; with `stream_k` the last tiles are shared out along K, as
in its `PersistentTileSchedulerSm90StreamK` (Osama et al. 2023, arXiv 2301.03598). `config` is a `spec.KernelConfig`.
"""

# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.candidates.triton.runtime._gluon import aggregate_of


@aggregate_of
class Problem:
    """Matrices of the batch and their extents; with `stream_k`, tiles from number `whole_tiles` on are shared out along K; with
    `owners`, rows of a matrix are a rank's, and `whole_tiles` is the number of the one whose tiles come first."""

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
        elif self.config.owners:
            b, m, n = by_chunks(t, self.config)
            return (b + self.problem.whole_tiles) % self.config.owners, m, n, k0, k1
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


@gluon.jit
def by_chunks(t, config: gl.constexpr):
    """Tile number -> number of the owner, tile row, tile column: `chunk_m` tile rows of each owner in turn, then the next ones.
    So all ranks store to another one each at any time, and a chunk of all owners is done as early as may be. With `mixed` these
    rows of all owners are one group: all links are used at any time, and blocks at work share operands as in larger groups."""
    size: gl.constexpr = config.owners * config.chunk_m * config.owner_n
    chunk = t // size
    r = t % size
    rows = gl.minimum(config.owner_m - chunk * config.chunk_m, config.chunk_m)
    if config.owner_m % config.chunk_m == 0:
        rows = config.chunk_m
    if config.mixed:
        return r % config.owners, chunk * config.chunk_m + r // config.owners % rows, r // (config.owners * rows)
    else:
        owner = r // (rows * config.owner_n)
        r = r % (rows * config.owner_n)
        return owner, chunk * config.chunk_m + r % rows, r // rows
