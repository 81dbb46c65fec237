# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""Attention in plain Triton for few queries over many keys: the keys of a head are split over programs (flash-decoding: Dao,
Haziza, Massa and Sizov 2023, https://pytorch.org/blog/flash-decoding/).

The queries of all heads that share keys are rows of one tile, so that keys and values are read once for them. A program
carries the softmax along its part of the keys (`_kernel.py` has the steps). It leaves in a workspace its sums of values, and of
each row the largest score and the sum of weights. The program of a tile that comes last brings all parts to the largest score
of all and adds them up, in order: results are the same on every run.

`config` is a `kernel.KernelConfig` with `split_kv`; the generated functions are those of `_kernel.py`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.candidates.triton.attention._kernel import (
    HIDDEN,
    base_of,
    carry,
    inverse_of,
    multiply_values,
    nothing_seen,
    queries_of,
    scores_of,
)


@triton.jit
def split_attention(parts, counters, factors, side, config, load_q, load_k, load_v, score, store):
    """`parts` and `counters` are the workspace; the counters are zero before and after."""
    if config.launch_early:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    part = program % config.split_kv
    block = program // config.split_kv
    head = block // config.tiles
    tile = block % config.tiles
    acc, row_max, row_sum = part_of_keys(part, head, tile, factors, side, config, load_q, load_k, load_v, score)
    if config.split_kv == 1:
        _, rows, row_mask = queries_of(head, tile, config)
        store(acc * inverse_of(row_sum, config)[:, None], rows, row_mask, side)
    else:
        leave(acc, row_max, row_sum, parts, block * config.split_kv + part, config)
        tl.debug_barrier()
        if tl.atomic_add(counters + block, 1, sem="acq_rel") == config.split_kv - 1:
            tl.store(counters + block, 0)
            m = tile * config.tile_m + tl.arange(0, config.kept_rows)
            store(combined(parts, block, factors, config), head * config.queries + m, m < config.queries, side)


@triton.jit
def part_of_keys(part, head, tile, factors, side, config, load_q, load_k, load_v, score):
    """Sums of values, the largest scores and sums of weights over one part of the keys, whole tiles of them."""
    ragged: tl.constexpr = config.ragged
    short: tl.constexpr = config.short
    _, rows, row_mask = queries_of(head, tile, config)
    if not config.copies_queries:
        q = load_q(rows, row_mask, short, side)
    begin = part * config.chunks // config.split_kv * config.tile_n
    end = tl.minimum((part + 1) * config.chunks // config.split_kv * config.tile_n, config.keys)
    acc = tl.zeros([config.tile_m, config.width], tl.float32)
    row_max, _ = nothing_seen(config)
    sums = tl.zeros([config.tile_m, config.tile_n], tl.float32)  # of weights; warps exchange them after the last tile
    for start in range(begin, end, config.tile_n):
        if config.copies_queries:  # what seems to depend on the step is copied with its keys, which do not wait for it
            q = load_q(rows + (start >> 31), row_mask, short, side)
        scores = scores_of(q, start, ragged, head, tile, side, config, load_k, score)
        weights, alpha, row_max = carry(scores, row_max, factors, config)
        sums = sums * alpha[:, None] + weights
        acc = acc * alpha[:, None]
        acc = multiply_values(weights, start, ragged, head, acc, side, config, load_v)
    return acc, row_max, tl.sum(sums, 1)


# -- the workspace: sums of every part, rows by columns; behind those of all parts, maxima and sums of weights of each


@triton.jit
def leave(acc, row_max, row_sum, parts, own, config):
    """Write what a part has found for the rows that exist."""
    rows, columns = tl.arange(0, config.tile_m), tl.arange(0, config.width)
    kept = rows < config.kept_rows
    at = parts + own * (config.kept_rows * config.width)
    tl.store(at + rows[:, None] * config.width + columns[None, :], acc, mask=kept[:, None])
    statistics = statistics_of(parts, own, config)
    tl.store(statistics + rows, row_max, mask=kept)
    tl.store(statistics + config.kept_rows + rows, row_sum, mask=kept)


@triton.jit
def statistics_of(parts, own, config):
    """The place of a part's largest scores, and of its sums of weights behind them."""
    return parts + config.parts * (config.kept_rows * config.width) + own * (2 * config.kept_rows)


@triton.jit
def combined(parts, block, factors, config):
    """A tile's result: the parts brought to the largest score of all, added up, over the sum of all weights.

    A thread has some columns of all parts, four by four, and the maxima and sums of weights of their rows, so that threads
    exchange nothing. All that fits into registers is asked for at once.
    """
    groups: tl.constexpr = config.kept_rows * config.width // 4
    acc = tl.zeros([groups, 4], tl.float32)
    row_max, row_sum = tl.full([groups], HIDDEN, tl.float32), tl.zeros([groups], tl.float32)
    acc, row_max, row_sum = add(acc, row_max, row_sum, parts, block, 0, factors, config)
    for i in tl.range(config.at_once, config.split_kv, config.at_once, num_stages=1):
        acc, row_max, row_sum = add(acc, row_max, row_sum, parts, block, i, factors, config)
    return (acc * inverse_of(row_sum, config)[:, None]).reshape(config.kept_rows, config.width)


@triton.jit
def add(acc, row_max, row_sum, parts, block, i, factors, config):
    """Add `at_once` parts from the i-th on to those before, all brought to the largest score so far."""
    first = block * config.split_kv
    sums, before, weights = (), (), ()
    for j in tl.static_range(config.at_once):  # an array a part: however Triton lays it out, a thread has the same columns
        sums += (sums_of(parts, first, i + j, config),)
    tl.debug_barrier()  # or ptxas would ask for them when it has what follows
    for j in tl.static_range(config.at_once):
        before += (statistic_of(parts, first, i + j, 0, HIDDEN, config),)
        weights += (statistic_of(parts, first, i + j, config.kept_rows, 0.0, config),)
    new_max = row_max
    for j in tl.static_range(config.at_once):
        new_max = tl.maximum(new_max, before[j])
    base = base_of(new_max, config)
    alpha = power_of(row_max - base, factors, config)
    acc, row_sum = acc * alpha[:, None], row_sum * alpha
    for j in tl.static_range(config.at_once):
        each = power_of(before[j] - base, factors, config)
        acc += sums[j] * each[:, None]
        row_sum += weights[j] * each
    return acc, new_max, row_sum


@triton.jit
def power_of(x, factors, config):
    """The factor that brings weights to a larger score."""
    if config.exact:
        return tl.exp(x)
    else:
        return tl.exp2(x * factors[0])


@triton.jit
def sums_of(parts, first, each, config):
    """The sums of a part, zeros for one that does not exist."""
    columns = tl.arange(0, config.kept_rows * config.width // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    place = columns + (first + each) * (config.kept_rows * config.width)
    return tl.load(parts + place, mask=each < config.split_kv, other=0.0, cache_modifier=".cg")


@triton.jit
def statistic_of(parts, first, each, at: tl.constexpr, other: tl.constexpr, config):
    """The largest scores of a part, or the sums of weights behind them, for all columns four by four."""
    row = tl.arange(0, config.kept_rows * config.width // 4) // (config.width // 4)
    place = statistics_of(parts, first + each, config) + at + row
    return tl.load(place, mask=each < config.split_kv, other=other, cache_modifier=".cg")
