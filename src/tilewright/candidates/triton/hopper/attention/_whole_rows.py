# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
# ruff: noqa: RUF005, SIM113  (it has neither stars in tuples nor enumerate)
"""Attention on Hopper whose warpgroups hold all scores of 64 queries in registers, a tile.

With a whole row at hand the softmax is done once: no maximum is carried along and nothing is scaled again. The products are
asynchronous: the scores' maximum is sought while the next keys are multiplied, and the weights of some keys are worked out
while those before them meet their values.

`whole_rows`: a block is one warpgroup, which copies a head's keys and values to shared memory and takes some of its tiles. Two
share a multiprocessor, one at its exponentials while the other has the matrix unit. `persistent`: one warp
brings the keys and values of a block's next head by TMA while two warpgroups multiply those of this one. They take every other
tile of a head, and have its queries brought themselves, into the place of those that they have multiplied.

`config`, `group`, `first`, `keys` and generated functions are constants everywhere.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.candidates.triton.hopper._pipeline import barriers, pipeline
from tilewright.candidates.triton.hopper.attention import kernel
from tilewright.candidates.triton.hopper.attention._parts import (
    CHUNK,
    HIDDEN,
    PRODUCER_REGISTERS,
    ROWS,
    allocate,
    apply_mask_of_keys,
    base_of,
    first_rows,
    fragment,
    in_powers_of_2,
    inverse_of,
    load_rows,
    mask_of_keys,
    multiply_chunk,
    weights_of,
)
from tilewright.candidates.triton.runtime._gluon import barrier, pin, reinterpret

GROUPS = gl.constexpr(kernel.GROUPS)
STAGES = gl.constexpr(kernel.STAGES)

# -- a head's keys in chunks


@gluon.constexpr_function
def chunks(keys):
    """The number of chunks that so many keys are."""
    return (keys + CHUNK.value - 1) // CHUNK.value


@gluon.constexpr_function
def extent(keys, i):
    """Keys of a chunk, with zeros after the last up to a multiple of `ROWS`."""
    return min(CHUNK.value, (keys + ROWS.value - 1) // ROWS.value * ROWS.value - i * CHUNK.value)


@gluon.constexpr_function
def ragged(config, i):
    """Tell whether some keys of a head's chunk do not exist."""
    padded = (config.keys.value + ROWS.value - 1) // ROWS.value * ROWS.value
    return min((i + 1) * CHUNK.value, padded) > config.keys.value


@gluon.constexpr_function
def keys_of(config, count):
    """Keys of a head's first chunks."""
    return min(config.keys.value, count * CHUNK.value)


@gluon.constexpr_function
def dtype(name):
    return getattr(gl, name)


# -- parts of a tile


@gluon.jit
def begin_of(part, parts: gl.constexpr, first: gl.constexpr):
    """The first of a part's tiles from tile `first` on; parts take tiles in turn."""
    if parts == 1:
        return first
    elif first == 0:
        return part
    else:
        return first + (part + (parts - first % parts) % parts) % parts


@gluon.jit
def as_product(buffer, config):
    """Codes in shared memory as the matrix unit takes them."""
    if config.stored == config.product:
        return buffer
    else:
        return reinterpret(buffer, dtype(config.product), buffer.shape, buffer.layout)


@gluon.jit
def apply_mask(scores, i: gl.constexpr, head, tile, whole, scales, side, config, mask):
    """Scores of a chunk, masked by what lies in memory. `whole`: of each chunk, whether a key padding mask hides none of it."""
    layout: gl.constexpr = scores.type.layout
    size: gl.constexpr = scores.shape[1]
    if config.additive_bias:
        read = mask_of(layout, size, i, head, tile, side, config, mask)
        scores = gl.fma(scores, scales[2], in_powers_of_2(read))
    elif config.masked and (not config.key_padding_mask or whole[i] == 0):
        scores = gl.where(mask_of(layout, size, i, head, tile, side, config, mask), scores, config.hidden)
    return scores


@gluon.jit
def mask_of(layout: gl.constexpr, size: gl.constexpr, i: gl.constexpr, head, tile, side, config, mask):
    """The mask of a chunk of keys; of one row where it is the same for all queries."""
    keys = i * CHUNK + gl.arange(0, size, gl.SliceLayout(0, layout))
    if config.key_padding_mask:
        queries = gl.arange(0, 1, gl.SliceLayout(1, layout))
    else:
        queries = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return mask(head, queries, keys, i * CHUNK + size > config.keys, side)


@gluon.jit
def shows_all(size: gl.constexpr, i: gl.constexpr, head, side, config, mask):
    """Tell whether a mask that is the same for all queries hides no key of a chunk."""
    shown = mask_of(fragment(size, dtype(config.product)), size, i, head, 0, side, config, mask)
    return gl.min(shown.to(gl.int32), 1).sum(0)


@gluon.jit
def apply_causal(scores, i: gl.constexpr, tile, first: gl.constexpr, config):
    """Minus infinity where there is no key, `hidden` where causality hides one; the first query of tile `first` may see all."""
    layout: gl.constexpr = scores.type.layout
    size: gl.constexpr = scores.shape[1]
    if config.causal and first * ROWS + config.shift < i * CHUNK + size - 1:
        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        place = gl.arange(0, size, gl.SliceLayout(0, layout))
        scores = gl.where((row + (config.shift - i * CHUNK))[:, None] >= place[None, :], scores, config.hidden)
    if i * CHUNK + size > config.keys:
        place = gl.arange(0, size, gl.SliceLayout(0, layout))
        scores = gl.where((place < config.keys - i * CHUNK)[None, :], scores, HIDDEN)
    return scores


@gluon.jit
def masked_scores(
    q, k, keys: gl.constexpr, first: gl.constexpr, head, tile, bias, stage, whole, scales, side, out: gl.constexpr, config, mask
):
    """Scores of all chunks, masked, and the largest of each row, laid out as rows of the result.

    `bias`: masks of keys in shared memory, those of a head at a stage; None where masks are read from memory.
    """
    asked = ()
    for i in gl.static_range(chunks(keys)):
        asked = asked + (multiply_chunk(q, k[i], extent(keys, i)),)
    scores = ()
    row_max = 0.0
    for i in gl.static_range(chunks(keys)):
        s = warpgroup_mma_wait(chunks(keys) - 1 - i, deps=(asked[i],))
        if bias is None:
            s = apply_mask(s, i, head, tile, whole, scales, side, config, mask)
        else:
            row = first_rows(bias.index(stage * config.chunks + i), s.shape[1])
            if not config.hides or whole[i] == 0:
                s = apply_mask_of_keys(s, row, scales, config)
        s = apply_causal(s, i, tile, first, config)
        chunk_max = gl.convert_layout(gl.max(s, 1), gl.SliceLayout(1, out))
        row_max = chunk_max if i == 0 else gl.maximum(row_max, chunk_max)
        scores = scores + (s,)
    return scores, row_max


@gluon.jit
def begin_sums(out: gl.constexpr, mma_dtype: gl.constexpr, config):
    """The result, and the sums of weights, as the matrix unit or the lanes add them up."""
    acc = warpgroup_mma_init(gl.zeros([ROWS, config.width], gl.float32, out))
    if config.ones:
        return acc, warpgroup_mma_init(gl.zeros([ROWS, 8], gl.float32, fragment(8, mma_dtype)))
    else:
        return acc, 0.0


@gluon.jit
def multiply_values(acc, sums, scores, base, v, ones, i: gl.constexpr, scales, out: gl.constexpr, config):
    """The weights of a chunk meet its values, and are added up."""
    mma_dtype: gl.constexpr = v.dtype
    size: gl.constexpr = scores.shape[1]
    p = weights_of(scores, gl.convert_layout(base, gl.SliceLayout(1, scores.type.layout)), scales, config)
    if not config.ones:
        row_sum = gl.convert_layout(gl.sum(p, 1), gl.SliceLayout(1, out))
        if i == 0:
            sums = row_sum
        else:
            sums = sums + row_sum
    weights = gl.convert_layout(p.to(mma_dtype), gl.DotOperandLayout(0, out, 2))
    acc = warpgroup_mma(weights, first_rows(v, size), acc, use_acc=i > 0, is_async=True)
    if config.ones:
        beside = ones
        if size != CHUNK:
            beside = ones.slice(0, size, dim=1)
        weights = gl.convert_layout(p.to(mma_dtype), gl.DotOperandLayout(0, fragment(8, mma_dtype), 2))
        sums = warpgroup_mma(weights, beside.permute((1, 0)), sums, use_acc=i > 0, is_async=True)
    return acc, sums


@gluon.jit
def finish(acc, sums, head, tile, scales, side, out: gl.constexpr, config, epilogue):
    """The result of a tile, over the sums of its weights, leaves."""
    if config.ones:
        result, sums = warpgroup_mma_wait(0, deps=(acc, sums))
        row_sum = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, out))
    else:
        result = warpgroup_mma_wait(0, deps=(acc,))
        row_sum = sums
    epilogue(result, inverse_of(row_sum, scales, config), head, tile, side)


@gluon.jit
def ones_of(mma_dtype: gl.constexpr, config):
    """Ones, by which weights are multiplied to be added up."""
    ones = allocate(mma_dtype, 8, CHUNK)
    ones.store(gl.full([8, CHUNK], 1.0, mma_dtype, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
    fence_async_shared()
    return ones


# -- blocks of one head


@gluon.jit
def wait_for_copies():
    """Wait until all threads' copies have come and the matrix unit sees them."""
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def attend_tile(tile, head, q, k, v, ones, whole, scales, side, run: gl.constexpr, config, load_q, mask, epilogue):
    """Work out the results of a tile, 64 queries of `q`, over all keys that tiles of its run see; copy the block's next tile
    into `q` meanwhile. `whole` and `ones` are those of `masked_scores` and `ones_of`."""
    out: gl.constexpr = fragment(config.width, v[0].dtype)
    keys: gl.constexpr = config.runs[run][2]
    follows: gl.constexpr = config.runs[run][0] + config.splits < config.tiles

    # Prologue: all scores, masked, and the largest of each row.
    scores, row_max = masked_scores(
        as_product(q, config), k, keys, config.runs[run][0], head, tile, None, 0, whole, scales, side, out, config, mask
    )
    if follows:
        if config.runs[run][1] + config.splits < config.tiles or tile + config.splits < config.tiles:
            load_q(q, head, tile + config.splits, ROWS, config.queries % ROWS > 0, side)
        async_copy.commit_group()

    # Mainloop: weights, chunk by chunk.
    base = base_of(row_max, scales, config.masked)
    acc, sums = begin_sums(out, v[0].dtype, config)
    for i in gl.static_range(chunks(keys)):
        acc, sums = multiply_values(acc, sums, scores[i], base, v[i], ones, i, scales, out, config)
    if follows:
        wait_for_copies()
    finish(acc, sums, head, tile, scales, side, out, config, epilogue)


@gluon.jit
def whole_rows(scales, side, config, load_q, load_k, epilogue, load_v=None, read_v=None, as_floats=None, mask=None):
    """`scales` and the generated functions are those of `kernel.py`, `side` what they read and write. Values that are codes
    become floats on their way (`read_v`, `as_floats`); others are copied (`load_v`)."""
    gdc_launch_dependents()
    gdc_wait()
    mma_dtype: gl.constexpr = dtype(config.mma_dtype)
    program = gl.program_id(0)
    head = program // config.splits
    part = program % config.splits
    key_head = head // config.shared
    stored = allocate(dtype(config.stored), ROWS, config.depth)
    k = ()
    v = ()
    for i in gl.static_range(config.chunks):
        k = k + (allocate(dtype(config.stored), extent(config.keys, i), config.depth),)
        v = v + (allocate(mma_dtype, extent(config.keys, i), config.width),)
    if config.ones:
        ones = ones_of(mma_dtype, config)
    else:
        ones: gl.constexpr = None

    codes = ()
    if read_v is not None:
        for i in gl.static_range(config.chunks):
            codes = codes + (read_v(key_head, i, extent(config.keys, i), ragged(config, i), side),)
    load_q(stored, head, part, ROWS, config.queries % ROWS > 0, side)
    products = ()
    for i in gl.static_range(config.chunks):
        load_k(k[i], key_head, i, extent(config.keys, i), ragged(config, i), side)
        products = products + (as_product(k[i], config),)
    for i in gl.static_range(config.chunks):
        if read_v is not None:
            v[i].store(as_floats(codes[i]))
        else:
            load_v(v[i], key_head, i, extent(config.keys, i), ragged(config, i), side)
    async_copy.commit_group()
    whole = ()
    if config.hides:
        for i in gl.static_range(config.chunks):  # read again where it is needed, as registers are full
            whole = whole + (shows_all(extent(config.keys, i), i, head, side, config, mask),)
    wait_for_copies()

    # Tiles go to blocks in turn.
    n: gl.constexpr = config.splits
    for run in gl.static_range(len(config.runs)):
        for tile in range(begin_of(part, n, config.runs[run][0]), config.runs[run][1] + 1, n):
            attend_tile(tile, head, stored, products, v, ones, whole, scales, side, run, config, load_q, mask, epilogue)


# -- persistent blocks


@gluon.jit
def reversed_head(item, config):
    """Heads from the last to the first: what the product before wrote last is still in the L2 cache."""
    return config.heads - 1 - item


@gluon.jit
def persistent_producer(k_desc, v_desc, k_ring, v, v_full, v_empty, bias, m_full, side, config, k_at, v_at, mask):
    """Bring the keys and values of each of this block's heads, chunk by chunk, and leave their padding mask in `bias`."""
    size: gl.constexpr = extent(config.keys, 0)
    n = 0
    for item in range(gl.program_id(0), config.heads, gl.num_programs(0)):
        head = reversed_head(item, config)
        key_head = head // config.shared
        pipe_write = k_ring.state(n)
        stage = pipe_write.stage
        k_ring.acquire(pipe_write)
        k_ring.expect(pipe_write, config.chunks * size * config.depth * k_desc.dtype.primitive_bitwidth // 8)
        for i in gl.static_range(config.chunks):
            chunk = k_ring.buffers[0].index(stage * config.chunks + i)
            k_ring.load(pipe_write, k_desc, k_at(key_head, i * CHUNK, side), chunk)
        mbarrier.wait(v_empty.index(stage), pipe_write.phase ^ 1)
        for i in gl.static_range(config.chunks):
            load_rows(stage * config.chunks + i, key_head, i * CHUNK, v_desc, v, v_full, size, config.width, v_at, side)
        if config.key_padding_mask:
            for i in gl.static_range(config.chunks):
                row = mask_of_keys(head, i * CHUNK, size, i * CHUNK + size > config.keys, side, config, mask)
                bias.index(stage * config.chunks + i).store(row)
            mbarrier.arrive(m_full.index(stage), count=1)
        n += 1


@gluon.jit
def persistent_tile(
    group, item, tile, following, pipe_read, q_phase, rings, bias, ones, whole, scales, side, first, keys, config, q_at,
    mask, epilogue,
):  # fmt: skip
    """A tile of queries, of which all see no more than `keys`, and causality cuts nothing that tile `first` sees; the phase of
    the next queries."""
    q_desc, q, q_full, k_ring, v, v_full, _ = rings
    out: gl.constexpr = fragment(config.width, v.dtype)
    head = reversed_head(item, config)
    stage = pipe_read.stage

    # Prologue: all scores, masked, and the largest of each row.
    mbarrier.wait(q_full.index(group), q_phase)
    own = pin(stage)  # places are worked out anew: as invariants of the loop they would fill registers
    k = ()
    for i in gl.static_range(chunks(keys)):
        k = k + (k_ring.buffers[0].index(own * config.chunks + i),)
    scores, row_max = masked_scores(
        q.index(group), k, keys, first, head, tile, bias, stage, whole, scales, side, out, config, mask
    )

    # The next queries may come, after a head's last tile its keys may go.
    barrier()
    more = tile + 2 < config.tiles
    k_ring.release(pipe_read, more == 0)
    ahead = gl.where(more, item, item + gl.num_programs(0))
    tile_ahead = gl.where(more, tile + 2, following)
    if ahead < config.heads:
        row = tile_ahead * ROWS
        load_rows(group, reversed_head(ahead, config), row, q_desc, q, q_full, ROWS, config.depth, q_at, side)

    # Mainloop: weights, chunk by chunk.
    base = base_of(row_max, scales, config.masked)
    own = pin(stage)
    acc, sums = begin_sums(out, v.dtype, config)
    for i in gl.static_range(chunks(keys)):
        mbarrier.wait(v_full.index(stage * config.chunks + i), pipe_read.phase)
        acc, sums = multiply_values(acc, sums, scores[i], base, v.index(own * config.chunks + i), ones, i, scales, out, config)
    finish(acc, sums, head, tile, scales, side, out, config, epilogue)
    return q_phase ^ 1


@gluon.jit
def persistent_consumer(group, rings, bias, m_full, ones, scales, side, config, q_at, mask, epilogue):
    """Work out every other tile of each of this block's heads; `rings` are the operands and their barriers."""
    q_desc, q, q_full, k_ring, _, v_full, v_empty = rings
    n = 0
    q_phase = 0
    first = reversed_head(gl.program_id(0), config)
    load_rows(group, first, group * ROWS, q_desc, q, q_full, ROWS, config.depth, q_at, side)
    for item in range(gl.program_id(0), config.heads, gl.num_programs(0)):
        pipe_read = k_ring.state(n)
        stage = pipe_read.stage
        if config.tiles % 2 == 1:  # who begins with the first tile takes one more
            start = (group + n) % 2
            following = 1 - start
        else:
            start = group
            following = group
        n += 1

        # Which chunks keep all of their keys, and up to which one keys are kept.
        seen = 1
        if config.equal_rows:  # of a head that sees nothing, all keys have weight
            seen = config.chunks
        whole = ()
        if config.key_padding_mask:
            mbarrier.wait(m_full.index(stage), pipe_read.phase)
            if not config.additive_bias:
                for i in gl.static_range(config.chunks):
                    row = first_rows(bias.index(stage * config.chunks + i), extent(config.keys, i))
                    own = row.load(gl.BlockedLayout([row.shape[0] // 32], [32], [4], [0]))
                    whole = whole + (gl.min(own, 0) > 0,)
                    if i > 0 or config.equal_rows:
                        seen = gl.where(gl.max(own, 0) > 0, i + 1, seen)
        k_ring.wait(pipe_read)
        if config.hides and not config.causal:
            for some in gl.static_range(1, config.chunks + 1):
                if seen == some:
                    for tile in range(start, config.tiles, 2):
                        q_phase = persistent_tile(
                            group, item, tile, following, pipe_read, q_phase, rings, bias, ones, whole, scales, side,
                            0, keys_of(config, some), config, q_at, mask, epilogue,
                        )  # fmt: skip
        else:
            for run in gl.static_range(len(config.runs)):
                for tile in range(begin_of(start, 2, config.runs[run][0]), config.runs[run][1] + 1, 2):
                    q_phase = persistent_tile(
                        group, item, tile, following, pipe_read, q_phase, rings, bias, ones, whole, scales, side,
                        config.runs[run][0], config.runs[run][2], config, q_at, mask, epilogue,
                    )  # fmt: skip
        for i in gl.static_range(config.chunks):  # those that no tile saw have come, too, before others take their place
            mbarrier.wait(v_full.index(stage * config.chunks + i), pipe_read.phase)
        barrier()
        mbarrier.arrive(v_empty.index(stage))


@gluon.jit
def persistent(q_desc, k_desc, v_desc, scales, side, config, q_at, k_at, v_at, epilogue, mask=None):
    """`scales` and the generated functions are those of `kernel.py`, `side` what they read and write."""
    size: gl.constexpr = extent(config.keys, 0)
    q = allocate(q_desc.dtype, ROWS, config.depth, GROUPS)
    k = allocate(k_desc.dtype, size, config.depth, STAGES * config.chunks)
    v = allocate(v_desc.dtype, size, config.width, STAGES * config.chunks)
    if config.key_padding_mask:
        bias = gl.allocate_shared_memory(gl.float32, [STAGES * config.chunks, size], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        bias: gl.constexpr = None
    if config.ones:
        ones = ones_of(v_desc.dtype, config)
    else:
        ones: gl.constexpr = None
    q_full = barriers(GROUPS, 1)
    k_ring = pipeline((k,), STAGES, 1, GROUPS)
    v_full = barriers(STAGES * config.chunks, 1)  # values come chunk by chunk, and go head by head
    v_empty = barriers(STAGES, GROUPS)
    if config.key_padding_mask:
        m_full = barriers(STAGES, 1)
    else:
        m_full: gl.constexpr = None
    gdc_launch_dependents()
    gdc_wait()
    rings = (q_desc, q, q_full, k_ring, v, v_full, v_empty)
    gl.warp_specialize(
        [
            (persistent_consumer, (0, rings, bias, m_full, ones, scales, side, config, q_at, mask, epilogue)),
            (persistent_consumer, (1, rings, bias, m_full, ones, scales, side, config, q_at, mask, epilogue)),
            (persistent_producer, (k_desc, v_desc, k_ring, v, v_full, v_empty, bias, m_full, side, config, k_at, v_at, mask)),
        ],
        [4, 1],
        [240, PRODUCER_REGISTERS],
    )
