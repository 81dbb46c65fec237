# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""Attention on Hopper over any number of keys: one warp brings keys and values into rings in shared memory by TMA, two or three
warpgroups multiply them by 64 queries each and carry the largest score along (Dao et al. 2022, arXiv 2205.14135).

While a warpgroup works out the weights of some keys, the matrix unit multiplies those before them by their values; with
ping-pong barriers one warpgroup is at its exponentials while another one has the matrix unit (as in Shah et al. 2024, arXiv
2407.08608). Keys are taken from the last to the first, so that what is cut off comes first. Blocks are persistent.

`config`, `group` and generated functions are constants everywhere.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.candidates.triton.hopper._pipeline import barriers, pipeline
from tilewright.candidates.triton.hopper.attention._parts import (
    CHUNK,
    HIDDEN,
    PRODUCER_REGISTERS,
    ROWS,
    allocate,
    apply_mask_of_keys,
    base_of,
    ex2,
    fragment,
    inverse_of,
    load_rows,
    mask_of_keys,
    multiply_chunk,
    power_of_2,
    weights_of,
)
from tilewright.candidates.triton.runtime._gluon import barrier

# -- rows of scores


@gluon.jit
def reduce_rows(x, reduce: gl.constexpr, config):
    """The largest or the sum of each row; where products overlap, a thread goes through four parts at once: each step waits for
    the one before."""
    if config.overlapped:
        parts = reduce(x.reshape((x.shape[0], x.shape[1] // 8, 8)), 1)
        return gl.convert_layout(reduce(parts, 1), gl.SliceLayout(1, x.type.layout))
    else:
        return reduce(x, 1)


# -- which work is whose


@gluon.jit
def locate(item, config):
    """An item of work: a head, and which part of its queries, a tile for each warpgroup. Where causality makes some parts
    longer, those come first."""
    if config.causal:
        return item % config.heads, config.parts - 1 - item // config.heads
    else:
        return item // config.parts, item % config.parts


@gluon.jit
def chunks_of(part, config):
    """The number of chunks of keys that a part sees."""
    if config.causal:
        last = (part + 1) * (config.groups * ROWS) + config.shift
        return gl.minimum((last + (CHUNK - 1)) // CHUNK, config.chunks)
    else:
        return config.chunks


# -- the warp that loads


@gluon.jit
def shown_keys(head, chunk, side, config, mask):
    """The keys of a chunk, and which of them a mask shows, as a row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    keys = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    return keys[None, :], mask(head, gl.arange(0, 1, gl.SliceLayout(1, layout)), keys, config.ragged, side)


@gluon.jit
def chunks_with_weight(head, part, count, side, config, mask):
    """Chunks up to the last key that a mask shows: those after it are left out. All, where rows of this part may see nothing
    and have equal weights then."""
    some = 0
    while (count > 1) & (some == 0):
        keys, shown = shown_keys(head, count - 1, side, config, mask)
        some = gl.max(gl.max(shown.to(gl.int32), 1), 0)
        count = count - 1 + some
    if config.equal_rows:
        if config.causal:  # a row may see nothing where others see some
            chunk = 0
            first = config.keys
            while (chunk < config.chunks) & (first == config.keys):
                keys, shown = shown_keys(head, chunk, side, config, mask)
                first = gl.min(gl.min(gl.where(shown, keys, config.keys), 1), 0)
                chunk += 1
            count = gl.where(first > part * (config.groups * ROWS) + config.shift, config.chunks, count)
        elif some == 0:
            keys, shown = shown_keys(head, 0, side, config, mask)
            some = gl.max(gl.max(shown.to(gl.int32), 1), 0)
            count = gl.where(some > 0, count, config.chunks)
    return count


@gluon.jit
def announce(counts, step, item, count):
    """The producer tells the consumers which item comes next, and how many chunks of keys it has."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = counts.state(step)
    counts.acquire(slot)
    counts.buffers[0].index(slot.stage).store(gl.zeros([1], gl.int32, one) + item)
    counts.buffers[1].index(slot.stage).store(gl.zeros([1], gl.int32, one) + count)
    counts.commit(slot)


@gluon.jit
def announced(counts, step):
    """A message to a consumer: an item, past the last one at the end, and how many chunks of keys it has."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = counts.state(step)
    counts.wait(slot)
    item = gl.max(counts.buffers[0].index(slot.stage).load(one), 0)
    count = gl.max(counts.buffers[1].index(slot.stage).load(one), 0)
    counts.release(slot)
    return item, count


@gluon.jit
def next_item(item, taken, config):
    """The item after one: the next in turn, or the next that no block has taken. Who counts last leaves the counter at zero."""
    if config.on_demand:
        n = gl.atomic_add(taken, 1, sem="relaxed", scope="gpu")
        if n == config.items - 1:
            gl.store(taken, 0)
        return n + gl.num_programs(0)
    else:
        return item + gl.num_programs(0)


@gluon.jit
def producer(k_desc, v_desc, k_ring, v_ring, counts, taken, side, config, k_at, v_at, mask):
    """Bring the keys and values of every item of this block, last chunk first, and beside the keys their padding mask, worked
    out here. `counts` tells which item comes next, if blocks take them on demand, and how many chunks a mask leaves of it."""
    step = 0
    if config.announces:
        done = 0
        item = gl.program_id(0)
        while item < config.items:
            head, part = locate(item, config)
            count = chunks_of(part, config)
            if config.hides:
                count = chunks_with_weight(head, part, count, side, config, mask)
            announce(counts, done, item, count)
            step = load_item(head, count, step, k_desc, v_desc, k_ring, v_ring, side, config, k_at, v_at, mask)
            done += 1
            item = next_item(item, taken, config)
        announce(counts, done, item, 0)
    else:
        for item in range(gl.program_id(0), config.items, gl.num_programs(0)):
            head, part = locate(item, config)
            count = chunks_of(part, config)
            step = load_item(head, count, step, k_desc, v_desc, k_ring, v_ring, side, config, k_at, v_at, mask)


@gluon.jit
def load_item(head, count, step, k_desc, v_desc, k_ring, v_ring, side, config, k_at, v_at, mask):
    """Bring an item's keys, their mask and its values; the step of the rings after them."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    key_head = head // config.shared
    for j in range(count):
        pipe_write = k_ring.state(step)
        key = (count - 1 - j) * CHUNK
        if config.key_padding_mask:
            hidden = mask_of_keys(head, key, CHUNK, config.ragged, side, config, mask)

        k_ring.acquire(pipe_write)
        k_ring.expect(pipe_write, CHUNK * config.depth * k_desc.dtype.primitive_bitwidth // 8)
        k_ring.load(pipe_write, k_desc, k_at(key_head, key, side), k_ring.buffers[0].index(pipe_write.stage))
        if config.key_padding_mask:
            k_ring.buffers[1].index(pipe_write.stage).store(hidden)
            if config.hides:
                shows_all = (gl.min(hidden, 0) > 0).to(gl.int32)
            else:
                shows_all = (gl.max(gl.abs(hidden), 0) == 0).to(gl.int32)
            k_ring.buffers[2].index(pipe_write.stage).store(gl.zeros([1], gl.int32, one) + shows_all)
            k_ring.commit(pipe_write)

        v_ring.acquire(pipe_write)
        v_ring.expect(pipe_write, CHUNK * config.width * v_desc.dtype.primitive_bitwidth // 8)
        v_ring.load(pipe_write, v_desc, v_at(key_head, key, side), v_ring.buffers[0].index(pipe_write.stage))
        step += 1
    return step


# -- the warpgroups that multiply


@gluon.jit
def load_tile(group, item, q_desc, q, q_full, side, config, q_at):
    """Has TMA bring the queries of an item."""
    head, part = locate(item, config)
    load_rows(group, head, (part * config.groups + group) * ROWS, q_desc, q, q_full, ROWS, config.depth, q_at, side)


@gluon.jit
def multiply_keys(q, k_ring, step, config):
    """Issues the product of queries and a chunk of keys. Gives the stage that those are in, as a state, and it."""
    pipe_read = k_ring.state(step)
    k_ring.wait(pipe_read)
    return pipe_read, multiply_chunk(q, k_ring.buffers[0].index(pipe_read.stage), CHUNK)


@gluon.jit
def wait_for_values(v_ring, step):
    v_ring.wait(v_ring.state(step))


@gluon.jit
def multiply_values(weights, v_ring, step, acc, config):
    """Issues the product of weights and the values of a chunk."""
    if not config.overlapped:
        wait_for_values(v_ring, step)
    return warpgroup_mma(weights, v_ring.buffers[0].index(v_ring.state(step).stage), acc, use_acc=True, is_async=True)


@gluon.jit
def apply_mask(scores, k_ring, stage, scales, config):
    """A mask that is the same for all queries, as it lies beside the keys. Tells whether it left the scores as they were, which
    are powers of two where a bias was added."""
    shows_all = 1
    if config.key_padding_mask:
        shows_all = gl.max(k_ring.buffers[2].index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        if shows_all == 0:
            scores = apply_mask_of_keys(scores, k_ring.buffers[1].index(stage), scales, config)
    return scores, shows_all


@gluon.jit
def max_of(scores, shows_all, scales, config):
    """The largest score of each row, as a power of two where biases are added."""
    row_max = reduce_rows(scores, gl.max, config)
    if config.additive_bias:
        row_max = row_max * gl.where(shows_all != 0, scales[2], 1.0)
    return row_max


@gluon.jit
def chunk_weights(scores, base, shows_all, scales, config):
    """Weights of a chunk's scores, whether or not a bias was added."""
    if config.additive_bias:
        if shows_all != 0:
            powers = gl.fma(scores, scales[2], base[:, None])
        else:
            powers = scores + base[:, None]
        return power_of_2(powers, config.overlapped)
    else:
        return weights_of(scores, base, scales, config, config.overlapped)


@gluon.jit
def apply_causal(scores, tile, chunk, config, first: gl.constexpr):
    """Minus infinity where there is no key, which is in a head's last chunk, the first; `hidden` where causality hides one."""
    layout: gl.constexpr = scores.type.layout
    if config.causal and tile * ROWS + config.shift < chunk * CHUNK + (CHUNK - 1):
        row = tile * ROWS + config.shift + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        place = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        scores = gl.where(row[:, None] >= (chunk * CHUNK + place)[None, :], scores, config.hidden)
    if first and config.ragged and chunk == config.whole_chunks:
        place = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        scores = gl.where((place < config.keys_left)[None, :], scores, HIDDEN)
    return scores


@gluon.jit
def consumer(group, rings, counts, pingpong, scales, side, config, q_at, epilogue):
    """Work at a tile of each item, 64 queries. `rings` are the operands and their barriers."""
    q_desc, q, q_full, _k_ring, _v_ring = rings
    step = 0
    q_phase = 0
    pingpong_phase = 1 if group == 0 else 0
    load_tile(group, gl.program_id(0), q_desc, q, q_full, side, config, q_at)
    if config.announces:
        item, count = announced(counts, 0)
        done = 1
        while item < config.items:
            step, q_phase, pingpong_phase, item, count = attend(
                group, item, count, done, step, q_phase, pingpong_phase, rings, counts, pingpong, scales, side, config, q_at,
                epilogue,
            )  # fmt: skip
            done += 1
    else:
        for item in range(gl.program_id(0), config.items, gl.num_programs(0)):
            _head, part = locate(item, config)
            step, q_phase, pingpong_phase, _following, _count = attend(
                group, item, chunks_of(part, config), 0, step, q_phase, pingpong_phase, rings, counts, pingpong, scales, side,
                config, q_at, epilogue,
            )  # fmt: skip


@gluon.jit
def attend(
    group, item, count, done, step, q_phase, pingpong_phase, rings, counts, pingpong, scales, side, config, q_at, epilogue
):  # fmt: skip
    """Multiply a tile of an item by its keys and values, and hand the result to the epilogue; steps and phases after it, the
    next item and its number of chunks. The softmax is carried along: `row_max` and `row_sum` are those of the chunks so far,
    `alpha` brings earlier weights to a new maximum."""
    q_desc, q, q_full, k_ring, v_ring = rings
    out: gl.constexpr = fragment(config.width, v_ring.buffers[0].dtype)
    operand: gl.constexpr = gl.DotOperandLayout(0, out, 2)
    rows: gl.constexpr = gl.SliceLayout(1, out)
    head, part = locate(item, config)
    tile = part * config.groups + group

    # Prologue: the weights of the last chunk.
    mbarrier.wait(q_full.index(group), q_phase)
    q_phase = q_phase ^ 1
    pipe_read, scores = multiply_keys(q.index(group), k_ring, step, config)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    scores, shows_all = apply_mask(scores, k_ring, pipe_read.stage, scales, config)
    k_ring.release(pipe_read)
    scores = apply_causal(scores, tile, count - 1, config, True)
    row_max = max_of(scores, shows_all, scales, config)
    base = base_of(row_max, scales, config.masked or config.causal)
    if config.pingpong:
        mbarrier.wait(pingpong.index(group), pingpong_phase)
        pingpong_phase = pingpong_phase ^ 1
    p = chunk_weights(scores, base, shows_all, scales, config)
    row_sum = reduce_rows(p, gl.sum, config)
    if config.pingpong:
        mbarrier.arrive(pingpong.index((group + 1) % config.groups))
    weights = gl.convert_layout(p.to(v_ring.buffers[0].dtype), operand)
    acc = warpgroup_mma_init(gl.zeros([ROWS, config.width], gl.float32, out))
    # As the wait for a chunk's values is a loop, ptxas leaves before it what stands there: it would move the wait for the
    # products before up to the exponentials, which are to be worked out meanwhile.
    if config.overlapped:
        wait_for_values(v_ring, step)

    # Mainloop: the scores of a chunk, while the weights of the one before meet their values.
    for j in range(1, count):
        pipe_read, scores = multiply_keys(q.index(group), k_ring, step + j, config)
        acc = multiply_values(weights, v_ring, step + j - 1, acc, config)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        scores, shows_all = apply_mask(scores, k_ring, pipe_read.stage, scales, config)
        k_ring.release(pipe_read)
        scores = apply_causal(scores, tile, count - 1 - j, config, False)
        before = base
        row_max = gl.maximum(row_max, max_of(scores, shows_all, scales, config))
        base = base_of(row_max, scales, config.masked or config.causal)
        alpha = ex2(gl.minimum(base - before, 0.0))  # above zero where no key was seen before
        if config.pingpong:
            mbarrier.wait(pingpong.index(group), pingpong_phase)
            pingpong_phase = pingpong_phase ^ 1
        p = chunk_weights(scores, base, shows_all, scales, config)
        row_sum = row_sum * alpha + reduce_rows(p, gl.sum, config)
        if config.pingpong:
            mbarrier.arrive(pingpong.index((group + 1) % config.groups))
        following = gl.convert_layout(p.to(v_ring.buffers[0].dtype), operand)
        if config.overlapped:
            wait_for_values(v_ring, step + j)
        result = warpgroup_mma_wait(0, deps=(acc,))
        v_ring.release(v_ring.state(step + j - 1))
        acc = warpgroup_mma_init(result * gl.convert_layout(alpha, rows)[:, None])
        weights = following

    # The next queries may come, and the first chunk's weights meet their values.
    barrier()
    if config.announces:
        following, count_ahead = announced(counts, done)
    else:
        following = item + gl.num_programs(0)
        count_ahead = count
    if following < config.items:
        load_tile(group, following, q_desc, q, q_full, side, config, q_at)
    acc = multiply_values(weights, v_ring, step + count - 1, acc, config)
    result = warpgroup_mma_wait(0, deps=(acc,))
    v_ring.release(v_ring.state(step + count - 1))
    step += count

    inverse = inverse_of(gl.convert_layout(row_sum, rows), scales, config)
    epilogue(result, inverse, head, tile, side)
    return step, q_phase, pingpong_phase, following, count_ahead


# -- the kernel


@gluon.jit
def flash(q_desc, k_desc, v_desc, taken, scales, side, config, q_at, k_at, v_at, epilogue, mask=None):
    """`scales` and the generated functions are those of `kernel.py`, `side` what they read and write. If `on_demand`, `taken`
    counts the items that blocks have taken, and is zero before and after."""
    stages: gl.constexpr = config.num_stages
    groups: gl.constexpr = config.groups
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = allocate(q_desc.dtype, ROWS, config.depth, groups)
    k = allocate(k_desc.dtype, CHUNK, config.depth, stages)
    v = allocate(v_desc.dtype, CHUNK, config.width, stages)
    if config.key_padding_mask:
        hidden = gl.allocate_shared_memory(gl.float32, [stages, CHUNK], plain)
        shows_all = gl.allocate_shared_memory(gl.int32, [stages, 1], plain)
        beside = (k, hidden, shows_all)
    else:
        beside = (k,)
    if config.announces:
        count = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
        items = gl.allocate_shared_memory(gl.int32, [2, 1], plain)

    q_full = barriers(groups, 1)
    k_ring = pipeline(beside, stages, 2 if config.key_padding_mask else 1, groups)
    v_ring = pipeline((v,), stages, 1, groups)
    if config.announces:
        counts = pipeline((items, count), 2, 1, groups)
    else:
        counts: gl.constexpr = None
    if config.pingpong:
        pingpong = barriers(groups, 1)
    else:
        pingpong: gl.constexpr = None
    gdc_launch_dependents()
    gdc_wait()

    rings = (q_desc, q, q_full, k_ring, v_ring)
    if groups == 1:
        gl.warp_specialize(
            [
                (consumer, (0, rings, counts, pingpong, scales, side, config, q_at, epilogue)),
                (producer, (k_desc, v_desc, k_ring, v_ring, counts, taken, side, config, k_at, v_at, mask)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif groups == 2:
        gl.warp_specialize(
            [
                (consumer, (0, rings, counts, pingpong, scales, side, config, q_at, epilogue)),
                (consumer, (1, rings, counts, pingpong, scales, side, config, q_at, epilogue)),
                (producer, (k_desc, v_desc, k_ring, v_ring, counts, taken, side, config, k_at, v_at, mask)),
            ],
            [4, 1],
            [240, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, rings, counts, pingpong, scales, side, config, q_at, epilogue)),
                (consumer, (1, rings, counts, pingpong, scales, side, config, q_at, epilogue)),
                (consumer, (2, rings, counts, pingpong, scales, side, config, q_at, epilogue)),
                (producer, (k_desc, v_desc, k_ring, v_ring, counts, taken, side, config, k_at, v_at, mask)),
            ],
            [4, 4, 1],
            [160, 160, PRODUCER_REGISTERS],
        )
