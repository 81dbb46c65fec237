# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""Attention in plain Triton: a tile of one head's queries a program, the scores never leave the registers.

Keys and values come by tiles. Without a rounding of its weights the softmax is carried along (`online`: Milakov and Gimelshein
2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Weights that are rounded must be known first: either all scores of a
row are `held`, or they are computed `twice`.

`config` is a `kernel.KernelConfig`, `factors` are what scores are multiplied by to be powers of two, and its opposite. What
depends on the program is generated (`kernel.py`), and reads pointers and numbers of `side`; if `ragged`, some of a tile's rows
do not exist:

- `load_q(rows, row_mask, ragged, side)`, `load_k`, `load_v`: a tile of an operand, as it is multiplied.
- `score(x, head, rows, row_mask, keys, key_mask, ragged, side)`: a tile of scores from what the product left.
- `round_weights(weights, inverse, rows, row_mask, keys, key_mask, ragged, side)`: weights as they are multiplied,
  if `rounds_weights`.
- `store(acc, rows, row_mask, side)`: what becomes of a tile's result.
"""

# ruff: noqa: RUF005 (Triton has no starred tuples)
import triton
import triton.language as tl

HIDDEN = tl.constexpr(float("-inf"))


@triton.jit
def attention(factors, side, config, load_q, load_k, load_v, score, store, round_weights=None):
    program = tl.program_id(0)
    head = program // config.tiles
    tile = program % config.tiles
    if config.causal:  # what sees most keys first
        tile = config.tiles - 1 - tile
    _, rows, row_mask = queries_of(head, tile, config)
    q = load_q(rows, row_mask, config.short, side)
    end = config.keys
    if config.causal and not config.equal_rows:
        end = tl.minimum((tile + 1) * config.tile_m + config.shift, config.keys)
    if config.scores == "online":
        acc = online(q, end, head, tile, factors, side, config, load_k, load_v, score)
    elif config.scores == "held":
        acc = held(q, head, tile, factors, side, config, load_k, load_v, score, round_weights)
    else:
        acc = twice(q, end, head, tile, factors, side, config, load_k, load_v, score, round_weights)
    store(acc, rows, row_mask, side)


@triton.jit
def queries_of(head, tile, config):
    """A tile's queries, their rows among all heads', and which of them exist."""
    m = tile * config.tile_m + tl.arange(0, config.tile_m)
    return m, head * config.queries + m, m < config.queries


@triton.jit
def keys_of(head, start, config):
    """A tile's keys, their rows among all heads', and which of them exist."""
    t = start + tl.arange(0, config.tile_n)
    return t, head // config.shared * config.keys + t, t < config.keys


# -- the three ways


@triton.jit
def online(q, end, head, tile, factors, side, config, load_k, load_v, score):
    """Weights unrounded: sums are brought to each new maximum."""
    ragged: tl.constexpr = config.ragged
    acc = tl.zeros([config.tile_m, config.width], tl.float32)
    row_max, row_sum = nothing_seen(config)
    for start in range(0, end, config.tile_n):
        scores = scores_of(q, start, ragged, head, tile, side, config, load_k, score)
        weights, alpha, row_max = carry(scores, row_max, factors, config)
        row_sum = row_sum * alpha + tl.sum(weights, 1)
        acc = acc * alpha[:, None]
        acc = multiply_values(weights, start, ragged, head, acc, side, config, load_v)
    return acc * inverse_of(row_sum, config)[:, None]


@triton.jit
def twice(q, end, head, tile, factors, side, config, load_k, load_v, score, round_weights):
    """The maximum and the sum of each row first, then its weights one tile after another."""
    ragged: tl.constexpr = config.ragged
    row_max, row_sum = nothing_seen(config)
    for start in range(0, end, config.tile_n):
        scores = scores_of(q, start, ragged, head, tile, side, config, load_k, score)
        weights, alpha, row_max = carry(scores, row_max, factors, config)
        row_sum = row_sum * alpha + tl.sum(weights, 1)
    inverse, base = inverse_of(row_sum, config), base_of(row_max, config)
    acc = tl.zeros([config.tile_m, config.width], tl.float32)
    for start in range(0, end, config.tile_n):
        scores = scores_of(q, start, ragged, head, tile, side, config, load_k, score)
        weights = weights_of(scores, base, factors, config)
        weights = rounded(weights, inverse, start, ragged, head, tile, side, config, round_weights)
        acc = multiply_values(weights, start, ragged, head, acc, side, config, load_v)
    return acc


@triton.jit
def held(q, head, tile, factors, side, config, load_k, load_v, score, round_weights):
    """All scores of a row at once, in registers; tiles that a causal mask hides are not left out."""
    scores, weights = (), ()
    for i in tl.static_range(config.chunks):
        ragged = (i + 1) * config.tile_n > config.keys
        scores = scores + (scores_of(q, i * config.tile_n, ragged, head, tile, side, config, load_k, score),)
    row_max = tl.max(scores[0], 1)
    for i in tl.static_range(1, config.chunks):
        row_max = tl.maximum(row_max, tl.max(scores[i], 1))
    base = base_of(row_max, config)
    for i in tl.static_range(config.chunks):
        weights = weights + (weights_of(scores[i], base, factors, config),)
    row_sum = tl.sum(weights[0], 1)
    for i in tl.static_range(1, config.chunks):
        row_sum = row_sum + tl.sum(weights[i], 1)
    inverse = inverse_of(row_sum, config)
    acc = None
    for i in tl.static_range(config.chunks):
        x, start = weights[i], i * config.tile_n
        if config.rounds_weights:
            x = rounded(x, inverse, start, start + config.tile_n > config.keys, head, tile, side, config, round_weights)
        acc = multiply_values(x, start, start + config.tile_n > config.keys, head, acc, side, config, load_v)
    if not config.rounds_weights:
        acc = acc * inverse[:, None]
    return acc


# -- their parts


@triton.jit
def nothing_seen(config):
    """The largest score of each row and the sum of its weights, before there are any."""
    return tl.full([config.tile_m], HIDDEN, tl.float32), tl.zeros([config.tile_m], tl.float32)


@triton.jit
def scores_of(q, start, ragged: tl.constexpr, head, tile, side, config, load_k, score):
    """Scores of a tile of keys; minus infinity where there is no key, `hidden` where a query does not see one."""
    m, rows, row_mask = queries_of(head, tile, config)
    keys, key_rows, key_mask = keys_of(head, start, config)
    k = load_k(key_rows, key_mask, ragged, side)
    x = tl.dot(q, tl.trans(k), input_precision=config.precision if config.exact else None)
    x = score(x, head, rows, row_mask, keys, key_mask, ragged, side)
    if config.causal:
        if config.group > 1:
            m = m % config.own_queries
        x = tl.where(m[:, None] + config.shift >= keys[None, :], x, config.hidden)
    if ragged:
        x = tl.where(key_mask[None, :], x, HIDDEN)
    return x


@triton.jit
def base_of(row_max, config):
    """The score of each row that others are compared with: the largest, if the row is not fully masked."""
    if config.masks_rows:
        row_max = tl.where(row_max == HIDDEN, 0.0, row_max)
    return row_max


@triton.jit
def weights_of(scores, base, factors, config):
    """e^(scores - base), both as the product left them where nothing but a scale is done to them."""
    if config.exact:
        return tl.exp(scores - base[:, None])
    elif config.as_left:
        return tl.exp2(tl.fma(scores, factors[0], (base * factors[1])[:, None]))
    else:
        return tl.exp2((scores - base[:, None]) * factors[0])


@triton.jit
def carry(scores, row_max, factors, config):
    """A tile's weights with respect to the highest score so far, what becomes of earlier ones, and that score."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = base_of(new_max, config)
    weights = weights_of(scores, base, factors, config)
    alpha = tl.exp(row_max - base) if config.exact else tl.exp2((row_max - base) * factors[0])
    return weights, alpha, new_max


@triton.jit
def inverse_of(row_sum, config):
    """The inverse of the sum of a row's weights."""
    inverse = tl.div_rn(1.0, row_sum)
    if config.zero_rows:
        inverse = tl.where(row_sum == 0.0, 0.0, inverse)
    return inverse


@triton.jit
def rounded(weights, inverse, start, ragged: tl.constexpr, head, tile, side, config, round_weights):
    """Weights as they enter the second product, where an expression is applied to them."""
    _, rows, row_mask = queries_of(head, tile, config)
    keys, _, key_mask = keys_of(head, start, config)
    return round_weights(weights, inverse, rows, row_mask, keys, key_mask, ragged, side)


@triton.jit
def multiply_values(weights, start, ragged: tl.constexpr, head, acc, side, config, load_v):
    """Weights of a tile times its values, added to `acc`."""
    _, key_rows, key_mask = keys_of(head, start, config)
    v = load_v(key_rows, key_mask, ragged, side)
    return tl.dot(weights.to(v.dtype), v, acc, input_precision=config.precision if config.exact else None)
