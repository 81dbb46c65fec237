# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""A ring of stages in shared memory, between the warp that has TMA fill them and the warpgroups that read them (CUTLASS's
`PipelineTmaAsync`).

A stage is one slice of each of `buffers`. Its full barrier turns over once all bytes that are expected have come, its empty
barrier once every consumer has released it. Who goes from stage to stage keeps a step that counts them all
(`position`), or a stage with its phase (`advance`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.candidates.triton.runtime._gluon import aggregate_of, reinterpret, tma_load


@aggregate_of
class Pipeline:
    """Buffers of `stages` slices each, and the barriers of both sides."""

    buffers: gl.tuple
    full_barriers: gl.shared_memory_descriptor
    empty_barriers: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.jit
    def position(self, step):
        """The stage of a step, and the parity of its barriers in this round."""
        return step % self.stages, step // self.stages % 2

    @gluon.jit
    def advance(self, stage, phase):
        """The position after this one."""
        last = stage == self.stages - 1
        return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)

    @gluon.jit
    def acquire(self, stage, phase):
        """The producer waits until all consumers have released a stage."""
        mbarrier.wait(self.empty_barriers.index(stage), phase ^ 1)

    @gluon.jit
    def expect(self, stage, nbytes: gl.constexpr):
        """The producer says how many bytes TMA brings to a stage that it has acquired."""
        mbarrier.expect(self.full_barriers.index(stage), nbytes)

    @gluon.jit
    def load(self, stage, desc, coordinates, buffer):
        """The producer has TMA bring a box to a buffer that belongs to a stage."""
        box = reinterpret(buffer, desc.dtype, desc.block_type.shape, desc.layout)
        tma_load(desc, coordinates, self.full_barriers.index(stage), box)

    @gluon.jit
    def commit(self, stage):
        """The producer has written to a stage itself: one more arrival (`producers` of `pipeline`)."""
        mbarrier.arrive(self.full_barriers.index(stage), count=1)

    @gluon.jit
    def wait(self, stage, phase, pred=True):
        """A consumer waits until a stage is full."""
        mbarrier.wait(self.full_barriers.index(stage), phase, pred=pred)

    @gluon.jit
    def release(self, stage, pred=True):
        """A consumer is done with a stage, if `pred`."""
        mbarrier.arrive(self.empty_barriers.index(stage), pred=pred)


@gluon.jit
def barriers(stages: gl.constexpr, count: gl.constexpr):
    """Barriers in shared memory, each of which turns over after `count` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def pipeline(buffers, stages: gl.constexpr, producers: gl.constexpr, consumers: gl.constexpr):
    """A ring over these buffers, whose stages get so many arrivals: of producers (1 for TMA's bytes), and of consumers."""
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):  # in turns: Triton has all threads meet between two of one array
        mbarrier.init(full.index(i), count=producers)
        mbarrier.init(empty.index(i), count=consumers)
    return Pipeline(buffers, full, empty, stages)
