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
    ragged: tl.constexpr = config.keys % config.tile_n > 0
    _, rows, row_mask = queries_of(head, tile, config)
    q = load_q(rows, row_mask, config.queries % config.tile_m > 0, side)
    begin = part * config.chunks // config.split_kv * config.tile_n
    end = tl.minimum((part + 1) * config.chunks // config.split_kv * config.tile_n, config.keys)
    acc = tl.zeros([config.tile_m, config.width], tl.float32)
    row_max, row_sum = nothing_seen(config)
    for start in range(begin, end, config.tile_n):
        scores = scores_of(q, start, ragged, head, tile, side, config, load_k, score)
        weights, alpha, row_max, row_sum = carry(scores, row_max, row_sum, factors, config)
        acc = acc * alpha[:, None]
        acc = multiply_values(weights, start, ragged, head, acc, side, config, load_v)
    return acc, row_max, row_sum


# -- the workspace: sums of every part, rows by columns; behind those of all parts, maxima and sums of weights of each


@triton.jit
def leave(acc, row_max, row_sum, parts, own, config):
    """Writes what a part has found for the rows that exist."""
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
    """A tile's result: the parts brought to the largest score of all, added up, over the sum of all weights."""
    first = block * config.split_kv
    rows, columns = tl.arange(0, config.kept_rows), tl.arange(0, config.width)
    row_max = tl.max(maxima(parts, first, 0, config.padded_parts, rows, config), 0)
    base = base_of(row_max, config)
    acc = tl.zeros([config.at_once, config.kept_rows, config.width], tl.float32)
    row_sum = tl.zeros([config.at_once, config.kept_rows], tl.float32)
    for i in tl.static_range(0, config.split_kv, config.at_once):
        each = i + tl.arange(0, config.at_once)
        there = each < config.split_kv
        place = (first + each)[:, None, None] * (config.kept_rows * config.width)
        place += rows[None, :, None] * config.width + columns[None, None, :]
        sums = tl.load(parts + place, mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        at = statistics_of(parts, first + each, config)[:, None] + config.kept_rows + rows[None, :]
        weights = tl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg")
        before = maxima(parts, first, i, config.at_once, rows, config)
        alpha = tl.exp(before - base[None, :]) if config.exact else tl.exp2((before - base[None, :]) * factors[0])
        acc += sums * alpha[:, :, None]
        row_sum += weights * alpha
    return tl.sum(acc, 0) * inverse_of(tl.sum(row_sum, 0), config)[:, None]


@triton.jit
def maxima(parts, first, i, count: tl.constexpr, rows, config):
    """The largest scores of so many parts from the i-th on, minus infinity for those that do not exist."""
    each = i + tl.arange(0, count)
    at = statistics_of(parts, first + each, config)[:, None] + rows[None, :]
    return tl.load(at, mask=(each < config.split_kv)[:, None], other=float("-inf"), cache_modifier=".cg")
