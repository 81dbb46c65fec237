# type: ignore  (what is jitted is Triton's language, whose calls are not Python's)
"""A ring of stages in shared memory, between the warp that has TMA fill them and the warpgroups that read them (CUTLASS's
`PipelineTmaAsync`).

A stage is one slice of each of `buffers`. Its full barrier turns over once all bytes that are expected have come, its empty
barrier once every consumer has released it. Who goes from stage to stage keeps a `PipelineState`, or a step that counts them
all, of which `state` makes one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.candidates.triton.runtime._gluon import aggregate_of, reinterpret, tma_load


@aggregate_of
class PipelineState:
    """A stage of a ring of `stages`, and its full barrier's phase, the parity of the round; the empty one's is the other."""

    stage: gl.tensor
    phase: gl.tensor
    stages: gl.constexpr

    @gluon.jit
    def advance(self):
        """The state after this one."""
        last = self.stage == self.stages - 1
        stage, phase = gl.where(last, 0, self.stage + 1), gl.where(last, self.phase ^ 1, self.phase)
        return PipelineState(stage, phase, self.stages)


@aggregate_of
class Pipeline:
    """Buffers of `stages` slices each, and the barriers of both sides."""

    buffers: gl.tuple
    full_barriers: gl.shared_memory_descriptor
    empty_barriers: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.jit
    def state(self, step=0):
        """The state at a step."""
        step = gl.to_tensor(step)
        return PipelineState(step % self.stages, step // self.stages % 2, self.stages)

    @gluon.jit
    def acquire(self, state):
        """The producer waits until all consumers have released a stage."""
        mbarrier.wait(self.empty_barriers.index(state.stage), state.phase ^ 1)

    @gluon.jit
    def expect(self, state, nbytes: gl.constexpr):
        """The producer says how many bytes TMA brings to a stage that it has acquired."""
        mbarrier.expect(self.full_barriers.index(state.stage), nbytes)

    @gluon.jit
    def load(self, state, desc, coordinates, buffer):
        """The producer has TMA bring a box to a buffer that belongs to a stage."""
        box = reinterpret(buffer, desc.dtype, desc.block_type.shape, desc.layout)
        tma_load(desc, coordinates, self.full_barriers.index(state.stage), box)

    @gluon.jit
    def commit(self, state):
        """The producer has written to a stage itself: one more arrival (`producers` of `pipeline`)."""
        mbarrier.arrive(self.full_barriers.index(state.stage), count=1)

    @gluon.jit
    def wait(self, state, pred=True):
        """A consumer waits until a stage is full."""
        mbarrier.wait(self.full_barriers.index(state.stage), state.phase, pred=pred)

    @gluon.jit
    def release(self, state, pred=True):
        """A consumer is done with a stage, if `pred`."""
        mbarrier.arrive(self.empty_barriers.index(state.stage), pred=pred)


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
