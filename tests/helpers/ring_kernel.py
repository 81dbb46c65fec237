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
    stage, phase = 0, 0
    for step in range(config.steps):
        ring.acquire(stage, phase)
        ring.expect(stage, nbytes)
        ring.load(stage, a_desc, [step * config.rows, 0], ring.buffers[0].index(stage))
        ring.load(stage, b_desc, [step * config.rows, 0], ring.buffers[1].index(stage))
        stage, phase = ring.advance(stage, phase)


@gluon.jit
def consumer(group: gl.constexpr, ring, side, config: gl.constexpr, epilogue: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    acc = gl.zeros([config.rows, config.columns], gl.float32, layout)
    for step in range(config.steps):
        stage, phase = ring.position(step)
        ring.wait(stage, phase)
        acc += ring.buffers[0].index(stage).load(layout) + ring.buffers[1].index(stage).load(layout)
        barrier()
        ring.release(stage)
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
