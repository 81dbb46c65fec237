"""A kernel as a source file: two warpgroups add up boxes of two arrays that one warp brings through a ring."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.candidates.triton.hopper._pipeline import pipeline
from tilewright.candidates.triton.runtime._gluon import barrier


@dataclass(frozen=True)
class Summed:
    rows: int
    columns: int
    steps: int
    stages: int


@gluon.jit
def producer(ring, a_desc, b_desc, config: gl.constexpr):
    nbytes: gl.constexpr = 2 * config.rows * config.columns * 4
    pipe_write = ring.state()
    for step in range(config.steps):
        ring.acquire(pipe_write)
        ring.expect(pipe_write, nbytes)
        ring.load(pipe_write, a_desc, [step * config.rows, 0], ring.buffers[0].index(pipe_write.stage))
        ring.load(pipe_write, b_desc, [step * config.rows, 0], ring.buffers[1].index(pipe_write.stage))
        pipe_write = pipe_write.advance()


@gluon.jit
def consumer(group: gl.constexpr, ring, side, config: gl.constexpr, epilogue: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    acc = gl.zeros([config.rows, config.columns], gl.float32, layout)
    for step in range(config.steps):
        pipe_read = ring.state(step)
        ring.wait(pipe_read)
        acc += ring.buffers[0].index(pipe_read.stage).load(layout) + ring.buffers[1].index(pipe_read.stage).load(layout)
        barrier()
        ring.release(pipe_read)
    epilogue(acc, group, layout, side)


@gluon.jit
def summed(a_desc, b_desc, side, config: gl.constexpr, epilogue: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, [config.stages, config.rows, config.columns], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [config.stages, config.rows, config.columns], b_desc.layout)
    ring = pipeline((a, b), config.stages, 1, 2)
    gl.warp_specialize(
        [
            (consumer, (0, ring, side, config, epilogue)),
            (consumer, (1, ring, side, config, epilogue)),
            (producer, (ring, a_desc, b_desc, config)),
        ],
        [4, 1],
        [120, 24],
    )
