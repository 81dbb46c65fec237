# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""The gemm in plain Triton: tiles of a grid flattened over the batch, `tl.dot` along K, the epilogue in registers.

When K is split, every part leaves its sums in a workspace, and the block that comes last adds them up in order: results are the
same on every run. With `swap_ab` the dot multiplies the transposes: rows of the right operand run down its tile.

`config` is a `kernel.KernelConfig`. What depends on the program is generated (`kernel.py`), and reads pointers and numbers of
`side`:

- `load_lhs(rows, row_mask, k, k_mask, k0, side)`, `load_rhs(…)`: these rows of an operand at columns k0 + k, in the dot's type.
- `store(i, acc, up, rows, row_mask, columns, column_mask, side)`: computes and writes a tile of result i; `acc` and `up` are
  sums of the left and the right half of the columns, a gate's and an up projection's, if `accumulators` is 2.
- `amax(i, …)`, of the same arguments: the largest magnitude of a tile of result i, as its bits.
"""

# ruff: noqa: SIM114 (one condition is known before the kernel runs, the other is not)
import triton
import triton.language as tl

AT_ONCE = tl.constexpr(256)  # largest magnitudes of tiles that are compared at a time


@triton.jit
def gemm(sums, tile_amaxes, counters, amaxes, side, config, load_lhs, load_rhs, store, amax=None):
    """`sums`, `tile_amaxes` and `counters` are the workspace, `amaxes` the results that are largest magnitudes."""
    block = tl.program_id(0)
    part = 0
    if config.split_k > 1:
        part = block % config.split_k
        block = block // config.split_k
    matrix, tile_row, tile_column = locate(block, config)
    rows, row_mask = lhs_rows(matrix, tile_row, config)
    if config.swap_ab:
        first, first_mask = rhs_rows(matrix, tile_column, config)
        acc = mainloop(part, first, first_mask, rows, row_mask, side, config, load_rhs, load_lhs)
    else:
        second, second_mask = rhs_rows(matrix, tile_column, config)
        acc = mainloop(part, rows, row_mask, second, second_mask, side, config, load_lhs, load_rhs)
    if config.split_k == 1:
        epilogue(acc, block, rows, row_mask, tile_column, tile_amaxes, counters, amaxes, side, config, store, amax)
    else:
        own, inside = place_of_sums(block, sums, config)
        tl.store(own + part * (config.tile_m * config.tile_n) + inside, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + block, 1, sem="acq_rel") == config.split_k - 1:
            acc = add_parts(own, inside, config)
            tl.store(counters + block, 0)
            epilogue(acc, block, rows, row_mask, tile_column, tile_amaxes, counters, amaxes, side, config, store, amax)


# -- which tile is whose


@triton.jit
def locate(block, config):
    """A block's matrix of the batch, tile row and tile column: `group_m` tile rows go together, so that neighbours share
    operands in the cache."""
    matrix = 0
    if config.batched:
        matrix = block // (config.down * config.across)
        block = block % (config.down * config.across)
    if config.one_row:
        return matrix, 0, block
    elif config.one_column:
        return matrix, block, 0
    else:
        first_row = block // (config.group_rows * config.across) * config.group_rows
        height = config.group_rows
        if config.uneven_groups:
            height = tl.minimum(config.down - first_row, config.group_rows)
        inside = block % (config.group_rows * config.across)
        return matrix, first_row + inside % height, inside // height


@triton.jit
def lhs_rows(matrix, tile_row, config):
    """Rows of the left operand, and of the results, that a tile has, and which of them exist."""
    m = tile_row * config.tile_m + tl.arange(0, config.tile_m)
    return matrix * config.M + m, m < config.M


@triton.jit
def rhs_rows(matrix, tile_column, config):
    """Rows of the right operand, the columns of the product: of both halves as many, if they meet in the results."""
    n = tl.arange(0, config.tile_n)
    if config.accumulators == 1:
        n = tile_column * config.width + n
        return matrix * config.N + n, n < config.stored
    else:
        of_half = tile_column * config.width + n % config.width
        return matrix * config.N + (of_half + n // config.width * config.stored), of_half < config.stored


# -- the product


@triton.jit
def mainloop(part, first, first_mask, second, second_mask, side, config, load_first, load_second):
    """Sums of a part of K for the rows of the dot's first and second operand.

    The unit multiplies signed bytes: unsigned ones are loaded less 128, and what they lack is added afterwards.
    """
    kind: tl.constexpr = tl.int32 if config.integer else tl.float32
    acc = tl.zeros((first.shape[0], second.shape[0]), dtype=kind)
    if config.second_unsigned:
        first_sums = tl.zeros((first.shape[0],), dtype=tl.int32)
    if config.first_unsigned:
        second_sums = tl.zeros((second.shape[0],), dtype=tl.int32)
    k = tl.arange(0, config.tile_k)
    for at in tl.range(0, config.part_depth, config.tile_k):
        k0 = part * config.part_depth + at
        k_mask = k < config.K - k0
        a = load_first(first, first_mask, k, k_mask, k0, side)
        b = load_second(second, second_mask, k, k_mask, k0, side)
        if config.second_unsigned:
            first_sums += tl.sum(a.to(tl.int32), axis=1)
        if config.first_unsigned:
            second_sums += tl.sum(b.to(tl.int32), axis=0)
        if config.promote > 0:
            acc += tl.dot(a, b, out_dtype=kind, max_num_imprecise_acc=config.promote)
        else:
            acc = tl.dot(a, b, acc, input_precision=config.precision, out_dtype=kind)
    if config.second_unsigned:
        acc += (first_sums * 128)[:, None]
    if config.first_unsigned:
        acc += (second_sums * 128)[None, :]
    if config.first_unsigned and config.second_unsigned:
        acc += 128 * 128 * config.part_depth
    return acc


# -- sums of parts of K


@triton.jit
def place_of_sums(block, sums, config):
    """The place of the sums of a tile's first part, and that of each element in those of a part."""
    across: tl.constexpr = config.tile_m if config.swap_ab else config.tile_n
    down: tl.constexpr = config.tile_n if config.swap_ab else config.tile_m
    if config.wide_sums:
        block = block.to(tl.int64)
    inside = tl.arange(0, down)[:, None] * across + tl.arange(0, across)[None, :]
    return sums + block * (config.split_k * config.tile_m * config.tile_n), inside


@triton.jit
def add_parts(own, inside, config):
    """The sums of all parts, in order."""
    acc = tl.load(own + inside, cache_modifier=".cg")
    for i in tl.static_range(1, config.split_k):
        acc += tl.load(own + i * (config.tile_m * config.tile_n) + inside, cache_modifier=".cg")
    return acc


# -- what becomes of sums


@triton.jit
def epilogue(acc, block, rows, row_mask, tile_column, tile_amaxes, counters, amaxes, side, config, store, amax):
    """Results of a tile: those of a range of columns where the tile has part in it."""
    columns = tile_column * config.width + tl.arange(0, config.width)
    column_mask = columns < config.stored
    up = acc
    if config.accumulators == 2:
        if config.swap_ab:
            acc, up = acc.reshape((2, config.width, config.tile_m)).permute((1, 2, 0)).split()
        else:
            acc, up = acc.reshape((config.tile_m, 2, config.width)).permute((0, 2, 1)).split()
    first = tile_column * config.width
    for i in tl.static_range(config.results):
        if config.store_amax[i] >= 0:
            found = amax(i, acc, up, rows, row_mask, columns, column_mask, side)
            tl.store(tile_amaxes + config.store_amax[i] * config.tiles + block, found)
        elif config.store_whole[i]:
            store(i, acc, up, rows, row_mask, columns, column_mask, side)
        elif (first < config.store_last[i]) & (first + config.width > config.store_first[i]):
            store(i, acc, up, rows, row_mask, columns, column_mask, side)
    if len(amaxes) > 0:
        reduce_amaxes(tile_amaxes, counters + config.tiles * (config.split_k > 1), amaxes, config)


@triton.jit
def reduce_amaxes(tile_amaxes, counter, amaxes, config):
    """The block whose tile is the last to be done finds the largest magnitudes of all, in an order that makes no difference."""
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == config.tiles - 1:
        for i in tl.static_range(len(amaxes)):
            most = tl.zeros((AT_ONCE,), dtype=tl.int32)
            for first in range(0, config.tiles, AT_ONCE):
                at = first + tl.arange(0, AT_ONCE)
                here = tile_amaxes + i * config.tiles + at
                most = tl.maximum(most, tl.load(here, mask=at < config.tiles, other=0, cache_modifier=".cg"))
            tl.store(amaxes[i], tl.max(most, axis=0).to(tl.float32, bitcast=True))
        tl.store(counter, 0)
