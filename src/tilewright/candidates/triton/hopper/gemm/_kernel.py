"""The gemm kernel of Hopper, in Gluon: persistent and warp-specialised, as CUTLASS's cooperative and ping-pong kernels are.

One warp (`producer`) brings tiles of both operands into a ring of stages in shared memory by TMA; warpgroups (`consumer`)
multiply them (`Mainloop`) and write results (`Epilogue`); blocks stay for as many tiles as there are for each. Each warpgroup
owns rows of the block's tile; all read the same tile of the right operand, and none waits for another. Where an epilogue takes
long, they own every other tile instead (`pingpong`) and take turns: while one multiplies, the other one writes. A tile that is
done leaves an epilogue subtile at a time: 128 bytes of a row, which is what TMA stores with the widest swizzle.

    here                                        in CUTLASS (include/cutlass)
    `gemm`, `run`, `producer`, `consumer`       gemm/kernel/sm90_gemm_tma_warpspecialized_{cooperative,pingpong}.hpp
    `_scheduler.py`                             gemm/kernel/sm90_tile_scheduler.hpp, sm90_tile_scheduler_stream_k.hpp
    `Mainloop`, `_operand.py`                   gemm/collective/sm90_mma_tma_gmma_{ss,rs}_warpspecialized.hpp
    `Epilogue`                                  epilogue/collective/sm90_epilogue_tma_warpspecialized.hpp
    its functions (`gemm/epilogue.py`)          epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp
    `_reduction.py`                             the stream-K scheduler's fixup; split-K over a cluster has no counterpart
    `hopper/_pipeline.py`                       pipeline/sm90_pipeline.hpp: PipelineTmaAsync

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

from tilewright.candidates.triton.expressions import chunks
from tilewright.candidates.triton.hopper._pipeline import Pipeline, barriers, pipeline
from tilewright.candidates.triton.hopper.gemm._layouts import (
    mma_layout,
    pack_pairs,
    pending,
    rotate,
    row_layout,
    subtile_layout,
    subtile_number,
    subtile_shape,
    subtiles,
    unpack_pairs,
    unpermute_columns,
    writes_by_tma,
    zeros,
)
from tilewright.candidates.triton.hopper.gemm._operand import TmaOperand, load_right, right_fragment, tma_operand
from tilewright.candidates.triton.hopper.gemm._reduction import ClusterReduction, cluster_reduction, fixup
from tilewright.candidates.triton.hopper.gemm._scheduler import Problem, tile_scheduler
from tilewright.candidates.triton.runtime._gluon import (
    aggregate_of,
    barrier,
    base_value,
    pin,
    reinterpret,
    statement,
    tma_load,
    tma_store,
)

stores_done = statement(chunks.STORED)
count = statement(chunks.COUNT, "lrr", "r")
publish = statement(chunks.PUBLISH, "llrr")


# -- kernel


@gluon.jit
def gemm(
    operands, arguments, side, config: gl.constexpr, begin: gl.constexpr, load: gl.constexpr, visit: gl.constexpr,
    place: gl.constexpr, aux_place: gl.constexpr, choose: gl.constexpr, put: gl.constexpr, lines: gl.constexpr,
):  # fmt: skip
    """The gemm of two operands that TMA brings as they lie; see `run` and `Epilogue`."""
    left = tma_operand(operands[0], config.rows, config.left_boxes, config.left, config)
    functions: gl.constexpr = (begin, load, visit, place, aux_place, choose, put, lines)
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
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.rows, 128], gl.int8)
    buffers = gl.allocate_shared_memory(gl.int8, [config.store_buffers * config.consumers, config.rows, 128], layout)
    ring = pipeline((), config.num_stages, 1, config.left_boxes * (2 if config.multicast else 1))
    none = ring.full_barriers  # stands for barriers that this kernel does not have
    aux, order, reduction = none, none, ClusterReduction(none, none, config)
    if config.aux_load:
        aux = barriers(config.consumers, 1)
    if config.ordered:
        order = barriers(config.consumers, 1)
    if config.split_k > 1:
        reduction = cluster_reduction(left, right, config)
    whole_tiles = extents[4]
    problem = Problem(extents[0], extents[1], extents[2], extents[3], whole_tiles)
    epilogue = Epilogue(
        descs, aux_descs, side, buffers, aux,
        functions[0], functions[1], functions[2], functions[3], functions[4], functions[5], functions[6],
        functions[7],
        config,
    )  # fmt: skip
    mainloop = Mainloop(left, right, ring, config)
    consumes = (mainloop, epilogue, reduction, order, scratch, scales, problem)
    if config.consumers == 2:
        gl.warp_specialize(
            [(consumer, (0,) + consumes), (consumer, (1,) + consumes), (producer, (mainloop, problem))],
            [4, 1],
            [config.consumer_registers, config.producer_registers],
        )
    else:
        gl.warp_specialize([(consumer, (0,) + consumes), (producer, (mainloop, problem))], [1], [config.producer_registers])


# -- producer warp


@gluon.jit
def producer(mainloop, problem):
    """The warp that fills the ring with the tiles of both operands, all that a block's consumers will read."""
    config: gl.constexpr = mainloop.config
    left, right, ring = mainloop.left, mainloop.right, mainloop.ring
    if config.owners:  # kernels behind begin to wait for tiles once nothing ahead is at work
        gdc_wait()
    gdc_launch_dependents()
    if not left.early and not config.owners:
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
        if config.gathers:
            m = left.turned(m, scheduler.tiles_m)
            left.wait(m)
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


# -- consumer warpgroups


@gluon.jit
def consumer(group: gl.constexpr, mainloop, epilogue, reduction, order, scratch, scales, problem):
    """A warpgroup that multiplies, and writes results, of all the block's tiles or of every other one.

    `order` are barriers at which consumers wait for their turn at the tensor cores, where they take turns (CUTLASS's
    `OrderedSequenceBarrier`). A barrier that no ring has, as these, needs no `PipelineState`: its phase alone tells its round.
    """
    config: gl.constexpr = mainloop.config
    left, ring = mainloop.left, mainloop.ring
    box: gl.constexpr = 0 if config.pingpong else group
    scheduler = tile_scheduler(problem, config)
    if config.split_k > 1:
        reduction.expect(group)
    if config.block_scaled or config.owners:  # scales, or an epoch, are read before those that load have waited
        gdc_wait()
    pipe_read = ring.state()
    pipe_release = ring.state()
    aux_phase = 0
    step = group * scheduler.k_tiles
    order_phase = 1 - group
    deferred = epilogue.no_deferred()
    zero = 0
    stored, stored_row = zero - 1, zero  # owner and first row of the tile whose stores are under way; -1 for none
    deferred_tile = Tile(problem.B, problem.M, zero, zero, zero, ())  # nothing to write yet: TMA drops what lies outside
    if config.owners:
        deferred_tile = Tile(problem.B, problem.M, zero, zero, zero, (zero,))
    behind_each = 0  # steps behind each of those that need not know the tile
    if config.paced:
        behind_each = scheduler.k_tiles // config.prologue_steps - 1
    first, last, every = scheduler.tile_range(group if config.pingpong else 0, 2 if config.pingpong else 1)
    for j in range(first, last, every):
        if config.pingpong:
            pipe_read = ring.state(step)
            step += 2 * scheduler.k_tiles
            mbarrier.wait(order.index(group), order_phase)
            order_phase = order_phase ^ 1
        if config.stream_k or config.block_scaled or left.scaled:  # one thing after the other
            b, m, n, k0, k1 = scheduler.tile(j)
            if config.gathers:
                m = left.turned(m, scheduler.tiles_m)
            tile = epilogue.tile(b, m, n, group)
            if config.block_scaled:
                sums, pipe_read = mainloop.block_scaled(pipe_read, box, scales, tile, problem.M, k1)
            elif left.scaled:
                sums, pipe_read, order_phase = left.scaled_sums(mainloop, pipe_read, order, order_phase, k0, k1, group)
            else:
                sums, pipe_read, pipe_release = mainloop.sums(pipe_read, pipe_release, box, k0, k1)
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
                if config.paced:  # so that a link has taken what was stored by the time its buffer is needed again
                    for _ in range(behind_each):
                        acc = mainloop.step(acc, pipe_read, pipe_release, box, k, True, True)
                        pipe_read, pipe_release = pipe_read.advance(), pipe_read
            b, m, n, k0, k1 = scheduler.tile(j)
            if config.gathers:
                m = left.turned(m, scheduler.tiles_m)
            tile = epilogue.tile(b, m, n, group)
            if config.aux_load:
                epilogue.load_aux(0, tile, group)
            # Mainloop.
            for k in range(config.prologue_steps * (1 + behind_each), k1):
                acc = mainloop.step(acc, pipe_read, pipe_release, box, k, True, True)
                pipe_read, pipe_release = pipe_read.advance(), pipe_read
            # Epilogue.
            begun, loaded = epilogue.load_first(0, tile, tile.first)
            if config.pingpong:
                mbarrier.arrive(order.index(1 - group))
            if config.owners:  # what the tile before stored has long come
                epilogue.publish(stored, stored_row)
                stored, stored_row = tile.b, tile.row
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if config.split_k > 1:
                acc = reduction.reduce(acc, group)
            else:
                ring.release(pipe_release)
            if config.aux_load:
                mbarrier.wait(epilogue.aux_barriers.index(group), aux_phase)
                aux_phase = aux_phase ^ 1
            deferred, aux_phase = epilogue.store((acc,), tile, begun, loaded, aux_phase, group)
            if config.owners:
                deferred_tile = Tile(tile.b, tile.row, tile.col, tile.which, tile.first, tile.chosen)
            else:
                deferred_tile = Tile(tile.b, tile.row, tile.col, zero, tile.first, ())
    if config.deferred_store:
        for k in gl.static_range(config.subtiles):
            epilogue.store_deferred(deferred, deferred_tile, k, group)
    if config.owners:
        epilogue.publish(stored, stored_row)
    if config.split_k > 1:
        reduction.finish()
    if writes_by_tma(config):
        tma.store_wait(0)


# -- mainloop


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
    def sums(self, pipe_read, pipe_release, box: gl.constexpr, k0, k1):
        """Sums of the steps from k0 to k1, and where the ring is read next and was read last."""
        acc = self.zeros()
        for k in range(k0, k1):
            acc = self.step(acc, pipe_read, pipe_release, box, k, k > k0, True, k > k0)
            pipe_read, pipe_release = pipe_read.advance(), pipe_read
        acc = warpgroup_mma_wait(0, deps=(acc,))
        self.ring.release(pipe_release)
        return (acc,), pipe_read, pipe_release

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


# -- epilogue


@aggregate_of
class Tile:
    """The place of a tile's results: matrix, first row, first column; and of stores that share an epilogue which one it is, its
    first column there, and its pointers. With `owners`, which rank's memory it is, and its slot there."""

    b: gl.tensor
    row: gl.tensor
    col: gl.tensor
    which: gl.tensor
    first: gl.tensor
    chosen: gl.tuple


@aggregate_of
class Epilogue:
    """The way of a tile's sums, a subtile of columns at a time, through `buffers`: to where TMA writes it, or row by row to
    addresses of the program's own.

    Functions that are generated from the program, of store i and a subtile whose first column is `first` (`gemm/epilogue.py`):

    - `begin(i, side, tile, layout)` reads what all subtiles need, `load(i, side, tile, begun, first, layout)` the rest.
    - `visit(i, acc, near, side, tile, begun, loaded, first, layout)` gives the subtile's value; `near` has the sums of the
      right half of the columns and what TMA loaded, where there are such.
    - `place(i, side, b, row, column)`, `aux_place(side, b, row, column)` are a subtile's coordinates in TMA's arrays.
    - `put(i, value, side, tile, first, layout)` stores a subtile where TMA cannot.
    - `lines(i, side)` gives the memory of a store that is written by lines, and its rows and columns.
    - `choose(side, col)` tells which of stores that share an epilogue a column is in; see `Tile`. With `owners`, it gives the
      memory of this rank and of those to which tiles of that number go, as words.
    """

    descs: gl.tuple
    aux_descs: gl.tuple
    side: gl.tuple
    buffers: gl.shared_memory_descriptor
    aux_barriers: gl.shared_memory_descriptor
    begin: gl.constexpr
    load: gl.constexpr
    visit: gl.constexpr
    place: gl.constexpr
    aux_place: gl.constexpr
    choose: gl.constexpr
    put: gl.constexpr
    lines: gl.constexpr
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
        elif config.owners:
            words = self.choose(self.side, b)[0]
            slot = gl.load(words, volatile=True) & 1
            return Tile(b, row, col, b, col, (slot,))
        else:
            which = 0
            return Tile(b, row, col, which, col, ())

    @gluon.jit
    def load_first(self, i: gl.constexpr, tile, first, always: gl.constexpr = False):
        """Read what all subtiles of a store need, and one; not ahead where a tile may have no part in it."""
        layout: gl.constexpr = subtile_layout(i, self.config)
        if always or self.config.store_extent[i] == 0:
            begun = self.begin(i, self.side, tile, layout)
            return begun, self.load(i, self.side, tile, begun, first, layout)
        else:
            return (), ()

    @gluon.jit
    def load_next(self, i: gl.constexpr, j: gl.constexpr, tile, begun):
        """Read what the subtile after subtile j of store i needs."""
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
            if config.store_pitch[i] > 0:
                deferred = self.write_lines(deferred, (), i, config.epilogue_n // 32, tile)
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
            elif self.config.store_pitch[i] > 0:
                return self.write_lines(deferred, self.by_rows(value, i, j, 32, group), i, j, tile)
            else:
                value = self.by_rows(value, i, j, self.config.rows, group)[0]
                self.put(i, value, self.side, tile, at, row_layout())
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
            tma.store_wait(pending(i, j, config) * config.copies)
        self.buffer(i, j, desc.dtype, group).store(gl.convert_layout(value, subtile_layout(i, config)))
        fence_async_shared()
        if config.owners:
            at = self.place(i, self.side, tile.chosen[0], tile.row, tile.first + j * config.subtile_n[i])
        else:
            at = self.place(i, self.side, tile.b, tile.row, tile.first + (j * config.subtile_n[i] - config.store_first[i]))
        if config.copies > 1:
            for k in gl.static_range(config.copies):
                tma_store(self.descs[k], at, self.box(i, j, self.descs[k], group))
        elif config.shared_epilogue or config.owners:
            for k in gl.static_range(len(self.descs)):
                if tile.which == k:
                    tma_store(self.descs[k], at, self.box(i, j, self.descs[k], group))
        else:
            tma_store(desc, at, self.box(i, j, desc, group))

    @gluon.jit
    def by_rows(self, value, i: gl.constexpr, j: gl.constexpr, rows: gl.constexpr, group: gl.constexpr):
        """A subtile that TMA cannot write, as where rows begin at odd addresses, in parts of so many rows: the lanes of a warp
        take neighbours of a row, so that what each instruction stores is contiguous."""
        config: gl.constexpr = self.config
        layout: gl.constexpr = row_layout()
        if writes_by_tma(config):
            tma.store_wait(0)
        buffer = self.buffer(i, j, value.dtype, group)
        buffer.store(gl.convert_layout(value, subtile_layout(i, config)))
        parts = ()
        for k in gl.static_range(config.rows // rows):
            parts = parts + (buffer.slice(k * rows, rows).load(layout),)
        return parts

    @gluon.jit
    def write_lines(self, waiting, parts, i: gl.constexpr, j: gl.constexpr, tile):
        """A subtile of 32 words a row to where TMA cannot write it, a whole line of 128 bytes at a time: what begins within a
        line is two requests to L2, and sectors in parts.

        Each row is rotated by as many words as it begins behind a line. Those that belong to its next line wait for the subtile
        after it, and are given; behind the last subtile they are all that is left. Every 32nd row begins at the same word.

        Args:
            waiting: words of the subtile before, none at the first.
            parts: 32 rows each, or none behind the last subtile.
            i, j: numbers of the store and of the subtile.
            tile: the tile of the result.
        """
        config: gl.constexpr = self.config
        pitch: gl.constexpr = config.store_pitch[i]
        last: gl.constexpr = j == config.epilogue_n // 32
        layout: gl.constexpr = row_layout()
        memory, M, N = self.lines(i, self.side)
        first = tile.first + j * 32
        start = memory + ((tile.b * M + tile.row).to(gl.int64) * pitch + first)
        row = gl.arange(0, 32, gl.SliceLayout(1, layout))
        behind = ((start.to(gl.int64) >> 2).to(gl.int32) + row * pitch) & 31
        column = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :] - behind[:, None]
        at = start + ((row * pitch)[:, None] + column)
        exists = column < N - first
        if last:
            exists = exists & (column < 0)
        elif j == 0:
            exists = exists & (column >= 0)
        left = ()
        for k in gl.static_range(config.rows // 32):
            if last:
                value = waiting[k]
            else:
                value = rotate(parts[k], column)
                left = left + (value,)
                if j > 0:
                    value = gl.where(column >= 0, value, waiting[k])
            mask = exists
            if config.some_rows:
                mask = exists & (row < M - tile.row - k * 32)[:, None]
            gl.store(at + k * 32 * pitch, value, mask=mask)
        return left

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
    def publish(self, owner, row):
        """Counts a tile of `owners` that is stored, its part from `row` on, and tells who wants it once a chunk of its rows is
        complete (`expressions/chunks.py`). Every thread waits for its own copies, and then all meet."""
        config: gl.constexpr = self.config
        if owner >= 0:
            stores_done()
            barrier()
            words, there = self.choose(self.side, owner)
            chunk = row // (config.chunk_m * config.tile_m)
            tiles = gl.minimum(config.owner_m - chunk * config.chunk_m, config.chunk_m) * config.owner_n
            counter = config.counters_at + 4 * (chunk * config.owners + owner)
            last = count(words.to(gl.int64), counter, tiles * config.left_boxes - 1)
            flag = config.flags_at + 4 * chunk * (config.owners * config.copies)
            for k in gl.static_range(config.copies):
                publish(words.to(gl.int64), there[k].to(gl.int64), last, flag)

    @gluon.jit
    def load_aux(self, first: gl.constexpr, tile, group: gl.constexpr):
        """Has TMA bring what subtiles of a tile read, from a first one on as many as there are buffers, once those are free."""
        last: gl.constexpr = first + 1 if first > 0 else self.config.store_buffers
        desc = self.aux_descs[0]
        full = self.aux_barriers.index(group)
        tma.store_wait((self.config.store_buffers - 1) * self.config.copies if first > 0 else 0)
        mbarrier.expect(full, (last - first) * desc.block_type.nbytes)
        for j in gl.static_range(first, last):
            at = self.aux_place(self.side, tile.b, tile.row, tile.col + j * self.config.subtile_n[0])
            tma_load(desc, at, full, self.box(0, j, desc, group))
