"""The left operand of the Hopper gemm where other ranks send most of its rows while the kernel runs.

This rank's own rows are read where they are, through a descriptor of their own, and their tiles come first; then those of the
ranks behind it, in the order in which they send. The warp that has TMA load tiles waits for the flag of the piece that a tile's
last row is in (`runtime/copies.py`): the pieces of a rank come in order. One thread asks for it (acquire, system scope); a
barrier of the warp and a fence between proxies come before TMA reads what the flag stands for (PTX ISA 9.0, 8.11 and 9.7.13.4).
What the epilogue reads of gathered rows, their scales, it reads behind barriers that the same warp arrives at afterwards.

`config` is a `spec.GatheredConfig`.
"""

# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.candidates.triton.hopper.gathered.protocol import WAIT
from tilewright.candidates.triton.hopper.gemm._kernel import run
from tilewright.candidates.triton.hopper.gemm._operand import TmaOperand, tma_operand
from tilewright.candidates.triton.runtime._gluon import aggregate_of, statement

wait_for = statement(WAIT, "lllr")


@gluon.jit
def gathered_gemm(
    operands, arguments, side, config: gl.constexpr, begin: gl.constexpr, load: gl.constexpr, visit: gl.constexpr,
    place: gl.constexpr, aux_place: gl.constexpr, choose: gl.constexpr, put: gl.constexpr, lines: gl.constexpr,
):  # fmt: skip
    """The gemm of `gemm._kernel.gemm` with such a left operand: descriptors of all rows, the right operand, the own rows."""
    whole = tma_operand(operands[0], config.rows, config.left_boxes, config.left, config)
    mine = TmaOperand(
        operands[2], whole.buffers, config.rows, config.left_boxes, config.tile_k,
        config.left[0], config.left[1], config.left[2], False, False,
    )  # fmt: skip
    words, late = arguments[2][config.shared_at], arguments[2][config.shared_at + 1]
    rank = gl.load(words + config.place_word)
    left = GatheredOperand(whole, mine, words, late, rank, config, config.left_boxes, False, False)
    functions: gl.constexpr = (begin, load, visit, place, aux_place, choose, put, lines)
    run(left, operands[1], arguments, side, functions, config)


@aggregate_of
class GatheredOperand:
    """All rows as they come, and this rank's own where they are; `TmaOperand` has what the other fields and methods mean."""

    whole: TmaOperand
    mine: TmaOperand
    words: gl.tensor
    late: gl.tensor
    rank: gl.tensor
    config: gl.constexpr
    boxes: gl.constexpr
    early: gl.constexpr
    scaled: gl.constexpr

    @gluon.jit
    def turned(self, m, tiles_m):
        """The tile row that comes m-th: this rank's own come first."""
        return (m + self.rank * self.config.rank_tiles) % tiles_m

    @gluon.jit
    def wait(self, m):
        """Wait until a tile's rows are there."""
        source = m // self.config.rank_tiles
        if source != self.rank:
            last = (m - source * self.config.rank_tiles + 1) * self.config.tile_m - 1
            flag = self.words + (self.config.flags_word + source * self.config.flags_stride + last // self.config.piece_rows)
            wait_for(flag.to(gl.int64), self.words.to(gl.int64), self.late.to(gl.int64), source)

    @gluon.jit
    def load(self, ring, pipe_write, box: gl.constexpr, b, m, k, problem):
        """Has TMA bring a box of tile m."""
        if m // self.config.rank_tiles == self.rank:
            self.mine.load(ring, pipe_write, box, b, m - self.rank * self.config.rank_tiles, k, problem)
        else:
            self.whole.load(ring, pipe_write, box, b, m, k, problem)

    @gluon.jit
    def fragment(self, stage, box: gl.constexpr, k, layout: gl.constexpr):
        """The tile that a consumer multiplies, in shared memory."""
        return self.whole.fragment(stage, box, k, layout)
