"""4-bit codes as the left operand of the gemm of `hopper/gemm/_kernel.py`: TMA brings words of the weight beside a tile of the
other operand, and the warps that multiply dequantise theirs in registers.

A block of 64 rows of the weight by 64 of K is packed in the order of the matrix unit's left fragment (`pack.py`): what a thread
reads, 16 bytes, is what it multiplies. Halves left in shared memory instead, by warps of their own, took 1.4 times as long as
the products: shared memory is as busy as the tensor cores. Where the other operand has 8 bits codes are made bytes, and sums
of a group's products are scaled before they are added up (`scaled_sums`).

`config` is a `tiles.PackedConfig`; words of codes, of scales and maybe of zero points are numbers 0, 1 and 2 of its tuples.
"""

# ruff: noqa: RUF005 (Triton has no starred tuples)
# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait

from tilewright.candidates.triton.hopper._pipeline import PipelineState
from tilewright.candidates.triton.hopper.gemm._kernel import run
from tilewright.candidates.triton.hopper.gemm._layouts import halve_columns, mma_layout
from tilewright.candidates.triton.hopper.gemm._operand import right_fragment
from tilewright.candidates.triton.hopper.w4._kernel import both_rows, named
from tilewright.candidates.triton.runtime._gluon import aggregate_of, reinterpret

BLOCK = gl.constexpr(64)
STEP = gl.constexpr(128)  # elements of K of a step: a row of a stage of bytes
WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0]))
OF_ROWS = gl.constexpr(gl.SliceLayout(2, gl.SliceLayout(4, WORDS.value)))
OF_ALL_ROWS = gl.constexpr(gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, WORDS.value))))


@aggregate_of
class PackedOperand:
    """The left operand as packed words; see `TmaOperand` for what the gemm asks of it."""

    descs: gl.tuple
    buffers: gl.tuple
    boxes: gl.constexpr
    early: gl.constexpr
    scaled: gl.constexpr
    config: gl.constexpr

    @gluon.jit
    def load_early(self, ring, scheduler):
        """Has TMA bring words of a block's first steps: constants, which are loaded before the kernel ahead has ended. Gives
        the number of steps."""
        first, last, _ = scheduler.tile_range(0, 1)
        b, m, _, k0, k1 = scheduler.tile(first)
        early = gl.where(first < last, gl.minimum(self.config.num_stages, k1 - k0), 0)
        phase = 0  # of the ring's first round, which these are
        for stage in range(early):
            self.load(ring, PipelineState(stage, phase, ring.stages), 0, b, m, k0 + stage, scheduler.problem)
        return early

    @gluon.jit
    def load(self, ring, pipe_write, box: gl.constexpr, b, m, k, problem):
        """Has TMA bring the words of tile m for step k."""
        config: gl.constexpr = self.config
        for i in gl.static_range(len(self.descs)):
            if i == 0:
                at = [m * (config.tile_m // BLOCK), k * config.packed_boxes[i][1], 0]
            else:
                run_words = config.packed_run[i]
                at = [m * (config.tile_m // 16), k * config.packed_needed[i] // run_words * (8 * run_words)]
            ring.load(pipe_write, self.descs[i], at, self.buffers[i].index(pipe_write.stage))

    @gluon.jit
    def fragment(self, stage, group: gl.constexpr, k, layout: gl.constexpr):
        """The tile of halves that a warpgroup multiplies, from the words of a stage."""
        config: gl.constexpr = self.config
        by_thread: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
        words = as_array(self.buffers[0].index(stage), (config.tile_m // BLOCK, 128, 4)).index(group).load(by_thread)
        given = (gl.convert_layout(words.reshape((4, 8, 4, 2, 2)), WORDS, assert_trivial=True),)
        for i in gl.static_range(1, len(self.descs)):
            beside = by_rows(self.read_beside(stage, i, group))
            given = given + (beside_codes(words_of_step(beside, k, steps_of_copy(i, config), 1), config),)
        return tile_from_words(given, gl.DotOperandLayout(0, layout, 2), config)

    @gluon.jit
    def read(self, stage, group: gl.constexpr):
        """A warpgroup's words in a stage: those of codes, for each block along K, and those beside them."""
        config: gl.constexpr = self.config
        halves: gl.constexpr = config.packed_bits // 4
        deep: gl.constexpr = config.k_blocks
        by_thread: gl.constexpr = gl.BlockedLayout([1, halves, 1, 4], [1, 1, 32, 1], [4, 1, 1, 1], [3, 2, 1, 0])
        codes = as_array(self.buffers[0].index(stage), (config.tile_m // BLOCK * deep, 4, halves, 32, 4))
        words, beside = (), ()
        for block in gl.static_range(deep):
            words = words + (codes.index(group * deep + block).load(by_thread),)
        for i in gl.static_range(1, len(self.descs)):
            beside = beside + (self.read_beside(stage, i, group),)
        return words, beside

    @gluon.jit
    def read_beside(self, stage, i: gl.constexpr, group: gl.constexpr):
        """Words of scales (i = 1) or zero points (2) for a warpgroup's rows."""
        runs: gl.constexpr = self.config.packed_runs[i]
        run_words: gl.constexpr = self.config.packed_run[i]
        layout: gl.constexpr = gl.BlockedLayout([1, runs, 1, run_words], [1, 1, 8, 4], [4, 1, 1, 1], [3, 2, 1, 0])
        shape: gl.constexpr = (self.config.tile_m // BLOCK, 4, runs, 8, run_words)
        return as_array(self.buffers[i].index(stage), shape).index(group).load(layout)

    @gluon.jit
    def scaled_sums(self, mainloop, pipe_read, order, order_phase, k0, k1, group: gl.constexpr):
        """Sums of a group's products times its scales, added up in f32. While one warpgroup makes bytes of codes, or multiplies
        by scales, the other one has the tensor cores; those that take turns issue products of a group in turn.

        While a block is multiplied the next one's codes are made bytes, and words of the next step are read, after the last one
        those that are there. (Bytes made for the next step would be moved on where products in flight read theirs: ptxas would
        let each end before the next one starts.)
        """
        config: gl.constexpr = self.config
        ring = mainloop.ring
        columns: gl.constexpr = config.padded_n
        at_once: gl.constexpr = config.columns_at_once
        each: gl.constexpr = config.promote
        width: gl.constexpr = min(config.promote, BLOCK)  # of K, of one product
        layout: gl.constexpr = mma_layout(at_once, config)
        sums = ()
        for _ in gl.static_range(columns // at_once):
            sums = sums + (gl.zeros((config.rows, at_once), gl.float32, layout),)
        ring.wait(pipe_read)
        held = self.read(pipe_read.stage, group)
        for k in range(k0, k1):
            beside = ()
            for i in gl.static_range(1, len(self.descs)):
                beside = beside + (words_of_step(by_rows(held[1][i - 1]), k, steps_of_copy(i, config), 1),)
            rows = ()
            for g in gl.static_range(STEP // each):
                rows = rows + (scales_of_rows(nth_part(beside[0], g, config.k_blocks * config.block_scales), layout, config),)
            made = (dequantized_bytes(held[0], beside, 0, config),)
            pipe_read, pipe_release = pipe_read.advance(), pipe_read
            found = ()
            for i in gl.static_range(columns // at_once):
                r = sums[i]
                for g in gl.static_range(STEP // each):
                    if config.ordered:
                        mbarrier.wait(order.index(group), order_phase)
                        order_phase = order_phase ^ 1
                    acc = warpgroup_mma_init(gl.zeros((BLOCK, at_once), named(config.product_dtype).value, layout))
                    for p in gl.static_range(each // width):
                        a = tile_from_bytes(made[(g * each + p * width) // BLOCK], g * each + p * width, width, layout, config)
                        b = right_fragment(mainloop.right, pipe_release.stage, config)
                        if at_once < columns:
                            b = b.slice(i * at_once, at_once, dim=0)
                        b = b.slice(g * each + p * width, width, dim=1).permute((1, 0))
                        acc = warpgroup_mma(a, b, acc, use_acc=p > 0, is_async=True)
                        if config.ordered and (p + 1) * width == each:
                            mbarrier.arrive(order.index(1 - group))
                        if i + 1 == columns // at_once and g * each + (p + 1) * width == STEP:
                            ring.wait(pipe_read, k + 1 < k1)
                            stage = gl.where(k + 1 < k1, pipe_read.stage, pipe_release.stage)
                            following = self.read(stage, group)
                        elif i == 0 and (g * each + (p + 1) * width) % BLOCK == 0 and g * each + (p + 1) * width < STEP:
                            made = made + (dequantized_bytes(held[0], beside, (g * each + (p + 1) * width) // BLOCK, config),)
                    part = warpgroup_mma_wait(0, deps=(acc,))
                    if i + 1 == columns // at_once and (g + 1) * each == STEP:
                        ring.release(pipe_release)
                    r = scaled_sum(part, rows[g], r, at_once < columns)
                found = found + (r,)
            sums = found
            held = following
        return sums, pipe_read, order_phase


@gluon.jit
def as_array(buffer, shape: gl.constexpr):
    """Contiguous words in shared memory as an array."""
    order: gl.constexpr = contiguous_last(shape)
    return reinterpret(buffer, gl.int32, shape, gl.SwizzledSharedLayout(1, 1, 1, order))


@gluon.constexpr_function
def contiguous_last(shape):
    """The order of the axes of an array of arrays whose first axis is indexed: the last one is contiguous."""
    return list(range(len(shape) - 2, -1, -1))


@gluon.constexpr_function
def steps_of_copy(i, config):
    """The number of steps along K whose words one copy brings."""
    return config.packed_run.value[i] * config.packed_runs.value[i] // config.packed_needed.value[i]


@gluon.jit
def words_of_step(x, k, count: gl.constexpr, divided: gl.constexpr):
    """The words of step k among those of `count` steps, which follow one another along the last axis."""
    if count > 1:
        return words_of_step(every_other(x, k // divided, count), k, count // 2, 2 * divided)
    else:
        return x


@gluon.jit
def every_other(x, k, count: gl.constexpr):
    """The words of every other one of `count` steps: those whose number is even like k or odd like k."""
    x = x.reshape((x.shape[0], x.shape[1], count, x.shape[2] // count)).permute((0, 1, 3, 2))
    even, odd = x.reshape((x.shape[0], x.shape[1], x.shape[2], count // 2, 2)).split()
    return gl.where(k % 2 == 0, even, odd).permute((0, 1, 3, 2)).reshape((x.shape[0], x.shape[1], count // 2 * x.shape[2]))


@gluon.jit
def nth_part(x, i: gl.constexpr, count: gl.constexpr):
    """The i-th of `count` equal parts of the last axis."""
    if count == 1:
        return x
    else:
        x = nth_part(x, i // 2, count // 2)
        return x.reshape((x.shape[0], x.shape[1], 2, x.shape[2] // 2)).permute((0, 1, 3, 2)).split()[i % 2]


@gluon.jit
def by_rows(words):
    """Words [4, runs, 8, run] as the words of each pair of rows: [4, 8, runs * run]."""
    runs: gl.constexpr = words.shape[1] * words.shape[3]
    return words.permute((0, 2, 1, 3)).reshape((4, 8, runs))


@gluon.jit
def beside_codes(words, config: gl.constexpr):
    """A word for each pair of rows (and half of a block along K) beside each of their words of codes."""
    if config.block_scales == 1:
        words = gl.convert_layout(words.reshape((4, 8)), OF_ALL_ROWS, assert_trivial=True)[:, :, None, None, None]
    else:
        words = gl.convert_layout(words, OF_ROWS, assert_trivial=True)[:, :, None, :, None]
    return words + gl.zeros((4, 8, 4, 2, 2), gl.int32, WORDS)


@gluon.jit
def tile_from_words(given, layout: gl.constexpr, config: gl.constexpr):
    """Words of a block, and those beside them, as a tile [64, 64] of halves as the matrix unit takes it."""
    x = gl.inline_asm_elementwise(
        config.convert_asm,
        config.convert_operands,
        given,
        dtype=(named(config.mma_dtype).value,) * 8,
        is_pure=True,
        pack=2,
    )
    even = gl.join(gl.join(x[0], x[4]), gl.join(x[2], x[6]))
    odd = gl.join(gl.join(x[1], x[5]), gl.join(x[3], x[7]))
    tile = gl.join(even, odd).permute((0, 7, 1, 3, 5, 6, 2, 4)).reshape((64, 64))
    return gl.convert_layout(tile, layout, assert_trivial=True)


@gluon.jit
def dequantized_bytes(words, beside, block: gl.constexpr, config: gl.constexpr):
    """Words of a block, and its zero points if there are any, as bytes of both rows, which wait four to a word."""
    words = words[block]
    if config.packed_bits == 8:
        first, second = words.reshape((4, 2, 8, 4, 2, 2)).permute((0, 2, 3, 4, 5, 1)).split()
        given = (gl.convert_layout(first, WORDS, assert_trivial=True), gl.convert_layout(second, WORDS, assert_trivial=True))
    else:
        given = (gl.convert_layout(words.reshape((4, 8, 4, 2, 2)), WORDS, assert_trivial=True),)
    if len(beside) == 2:
        given = given + (beside_codes(nth_part(beside[1], block, config.k_blocks), config),)
    return gl.inline_asm_elementwise(
        config.convert_asm, config.convert_operands, given, dtype=(gl.int32, gl.int32), is_pure=True, pack=4
    )


@gluon.jit
def tile_from_bytes(made, at: gl.constexpr, width: gl.constexpr, layout: gl.constexpr, config: gl.constexpr):
    """Such words as a tile [64, 64] of bytes as the matrix unit takes it, or the half of it that begins at column `at` of K."""
    own: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    x = gl.inline_asm_elementwise(
        config.spread_asm, config.spread_operands, made, dtype=(named(config.mma_dtype).value,) * 8, is_pure=True, pack=4
    )
    even = gl.join(gl.join(x[0], x[4]), gl.join(x[2], x[6]))
    odd = gl.join(gl.join(x[1], x[5]), gl.join(x[3], x[7]))
    tile = gl.join(even, odd).permute((0, 7, 1, 5, 6, 2, 3, 4)).reshape((64, 64))
    tile = gl.convert_layout(tile, own, assert_trivial=True)
    if width < BLOCK:
        tile = gl.convert_layout(halve_columns((tile,))[at % BLOCK // width], own, assert_trivial=True)
    return tile


@gluon.jit
def scales_of_rows(x, layout: gl.constexpr, config: gl.constexpr):
    """Words of scales as the scales of a tile's rows."""
    if config.scale_dtype == "float32":
        rows = x.to(gl.float32, bitcast=True)
    else:
        low, high = both_rows(x, named(config.scale_dtype))
        rows = gl.join(low.reshape((4, 8)), high.reshape((4, 8)))
    rows = (rows * config.factor).permute((0, 2, 1)).reshape((64,))
    return gl.convert_layout(rows, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def scaled_sum(part, rows, r, in_order: gl.constexpr):
    """Sums plus a group's products times its scales; `in_order`: LLVM would compute those of all columns at once."""
    if in_order:
        asm: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
        given = [part.to(gl.float32), rows[:, None], r]
        return gl.inline_asm_elementwise(asm, "=f,f,f,f", given, dtype=gl.float32, is_pure=False, pack=1)
    else:
        return gl.fma(part.to(gl.float32), rows[:, None], r)


@gluon.jit
def packed_gemm(
    operands, arguments, side, config: gl.constexpr, begin: gl.constexpr, load: gl.constexpr, visit: gl.constexpr,
    place: gl.constexpr, aux_place: gl.constexpr, choose: gl.constexpr, put: gl.constexpr, lines: gl.constexpr,
):  # fmt: skip
    """The gemm of packed codes and an operand that TMA brings as it lies, first of `operands`; see `run` and `Epilogue` of
    `gemm._kernel`."""
    descs, buffers = (), ()
    for i in gl.static_range(1, len(operands)):
        descs = descs + (operands[i],)
        buffers = buffers + (stages_for(operands[i], config),)
    left = PackedOperand(descs, buffers, 1, True, config.k_blocks > 1, config)
    functions: gl.constexpr = (begin, load, visit, place, aux_place, choose, put, lines)
    run(left, operands[0], arguments, side, functions, config)


@gluon.jit
def stages_for(desc, config: gl.constexpr):
    """Shared memory for the stages of what a descriptor's copies bring."""
    shape: gl.constexpr = with_stages(desc.block_type.shape, config)
    return gl.allocate_shared_memory(gl.int32, shape, desc.layout)


@gluon.constexpr_function
def with_stages(box, config):
    """The shape of a box for each stage."""
    return [config.num_stages.value, *box]
