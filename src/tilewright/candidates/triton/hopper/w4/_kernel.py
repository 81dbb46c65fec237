"""The gemm of few rows of activations (x) with weights of 4 or 8 bits, in Gluon. Memory limits it: words of codes go from there
straight to registers, are dequantised to halves, and multiplied by `mma.sync` or `wgmma`.

A block has 16 rows of the weights for each of its row warps and warp tiles, and a part of K that its other warps share; blocks
of a cluster have parts of K of the same rows (split-K). Warps load words (`Weights`) some loads ahead of their use, the first
ones before the kernel ahead has ended (`prologue`). Activations lie in shared memory, a chunk of K at a time (`copy_chunk`), 64
columns (128 bytes) a row, swizzled as `wgmma` and `ldmatrix` want it. `mainloop` multiplies. Sums of a block's warps meet in
shared memory, those of a cluster's blocks in that of the block that finishes them (`reduce`): in the same order on every run.
Clusters may have several row tiles (`persistent`).

Values are tensors of one element a thread, since Gluon's own products let neither warps share K nor codes be dequantised on
their way: what it has no word for is PTX, for one thread or for the warps it names. Warps read what they loaded themselves, so
there is no ring of stages (`hopper/_pipeline.py`). `config` is a `KernelConfig`, `store` the program's own function.
"""

# ruff: noqa: RUF005, SIM113 (Triton has neither stars in tuples nor enumerate)
# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.candidates.triton.hopper.w4 import kernel_config
from tilewright.candidates.triton.runtime._gluon import aggregate_of, barrier, statement

X_AT = gl.constexpr(kernel_config.X_AT)
BARRIER_AT = gl.constexpr(kernel_config.BARRIER_AT)
STEPS = gl.constexpr(4)  # steps of 16 columns in a block of 64
ENLARGED = gl.constexpr(kernel_config.ENLARGED)
ONES = gl.constexpr(0x3C003C00)  # two ones in f16


# -- what Gluon has no word for

syncwarp = statement("bar.warp.sync 0xffffffff;")  # loads stay before it: ptxas would move them to where words are used
shared_base = statement("mov.u32 $0, global_smem;", found="r")
thread_number = statement("mov.u32 $0, %tid.x; // $1", "r", "r")
ldmatrix = statement("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "r", "rrrr")
ld_shared = statement("ld.shared.f32 $0, [$1];", "r", "f")
ld_shared_b32 = statement("ld.shared.b32 $0, [$1];", "r", "r")
ld_shared_v4 = statement("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "r", "ffff")
st_shared = statement("{ .reg .pred q; setp.ne.b32 q, $3, 0; @q st.shared.f32 [$1], $2; }", "rfr")
st_shared_v4 = statement("st.shared.v4.f32 [$1], {$2,$3,$4,$5};", "rffff")
# Copies 16 bytes to shared memory, if at all ($4), of which so many are read ($3); the others become zero.
cp_async = statement("{ .reg .pred q; setp.ne.b32 q, $4, 0; @q cp.async.cg.shared.global [$1], [$2], 16, $3; }", "rlrr")
cp_async_commit = statement("cp.async.commit_group;")
cp_async_wait_all = statement("cp.async.wait_group 0;")  # at Triton's own wait all threads meet
cp_async_wait_but_one = statement("cp.async.wait_group 1;")
# Two barriers of the cluster, one for every other row tile: an arrival, and as many bytes as come from all of its blocks.
mbarriers_init = statement(
    "{ .reg .pred q; setp.ne.b32 q, $2, 0; @q mbarrier.init.shared.b64 [$1], 1; @q mbarrier.init.shared.b64 [$1+8], 1; "
    "fence.mbarrier_init.release.cluster; }",
    "rr",
)
mbarrier_expect = statement(
    "{ .reg .pred q; setp.ne.b32 q, $3, 0; @q mbarrier.arrive.expect_tx.shared.b64 _, [$1], $2; }", "rrr"
)
mbarrier_wait = statement("{ .reg .pred q; L: mbarrier.try_wait.parity.shared.b64 q, [$1], $2; @!q bra L; }", "rr")
fma = statement("fma.rn.f32 $0, $1, $2, $3;", "fff", "f")  # LLVM would do those of all blocks at once
cluster_arrive = statement("barrier.cluster.arrive.relaxed.aligned;")
cluster_wait = statement("barrier.cluster.wait.aligned;")
# Four sums ($3 to $6) to the shared memory of a block of the cluster ($2), whose barrier ($7) counts their bytes.
st_async = statement(
    "{ .reg .pred q; .reg .b32 r, m; setp.ne.b32 q, $8, 0; mapa.shared::cluster.u32 r, $1, $2; "
    "mapa.shared::cluster.u32 m, $7, $2; "
    "@q st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [r], {$3,$4,$5,$6}, [m]; }",
    "rrffffrr",
)


@gluon.constexpr_function
def load_asm(count, once, sometimes):
    """A load of so many words; `once`: they are not read again soon; `sometimes`: where the last operand is not zero.

    It is no load of constants, which ptxas would move to where its words are used.
    """
    words, vector = {1: ("$0", ""), 2: ("{$0,$1}", ".v2"), 4: ("{$0,$1,$2,$3}", ".v4")}[count]
    load = f"ld.global{'.L1::no_allocate' if once else '.nc'}{vector}.b32 {words}, [${count}];"
    return f"{{ .reg .pred q; setp.ne.b32 q, ${count + 1}, 0; @q {load} }}" if sometimes else load


@gluon.jit
def load_words(pointer, pred, count: gl.constexpr, once: gl.constexpr):
    """Neighbouring words as a tuple, if there is no `pred` or it is not zero."""
    asm: gl.constexpr = load_asm(count, once, len(pred) > 0)
    kinds: gl.constexpr = "=r," * count + "l" + ",r" * len(pred)
    given = (pointer.to(gl.int64),) + pred
    return gl.inline_asm_elementwise(asm, kinds, given, dtype=(gl.int32,) * count, is_pure=False, pack=1)


@gluon.constexpr_function
def products_asm(columns, groups, sums_in, subnormal, config):
    """The statement that multiplies rows by so many columns over a block of K: sums for each of `groups` that share scales. In:
    16 registers of the left operand, `fragments` of the right one or where it lies (`wgmma`, in 16 bytes), and sums if they go
    on. `subnormal` codes come with factors for the right one's sums, which are multiplied as TF32.

    The upper half of a descriptor (PTX ISA 9.0, 9.7.15.5.1.2) says rows of 128 bytes, swizzled, eight of them 1024 bytes apart
    from the next eight.
    """
    wgmma, half, n, eights, each = config.wgmma.value, config.half.value, columns // 2, columns // 8, STEPS.value // groups
    left, right = n * groups, n * groups + 16
    added = right + columns
    sums = right + 1 if wgmma else added + (groups * (eights + 2) if subnormal else 0)
    kind, lines = f"f32.{half}.{half}", ["{ .reg .f32 z; mov.f32 z, 0f00000000; .reg .b32 u; .reg .pred q; .reg .b64 e;"]
    lines += [f"mov.f32 ${i}, ${sums + i};" for i in range(n if sums_in else 0)]
    lines += ["wgmma.fence.sync.aligned;"] if wgmma else []
    for step in range(STEPS.value):
        group, goes_on = step // each, sums_in or step % each > 0
        a = ",".join(f"${left + 4 * step + i}" for i in range(4))
        if wgmma:
            d = ",".join(f"${group * n + i}" for i in range(n))
            lines.append(
                f"add.s32 u, ${right}, {2 * step}; mov.b64 e, {{u, {1 << 30 | 64:#x}}}; setp.ne.b32 q, {goes_on:d}, 0;"
            )
            lines.append(f"wgmma.mma_async.sync.aligned.m64n{columns}k16.{kind} {{{d}}}, {{{a}}}, e, q, 1, 1, 0;")
            continue
        for j in range(eights):
            d = ",".join(f"${group * n + 4 * j + i}" for i in range(4))
            before, x = d if goes_on else "z,z,z,z", right + 8 * j + 2 * step
            if subnormal and step % each == 0:
                factors = f"${added + groups * eights + 2 * group},${added + groups * eights + 2 * group + 1}"
                lines.append(f"mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {{{d}}}, {{{factors}}},")
                lines.append(f"{{${added + group * eights + j}}}, {{{before}}};")
                before = d
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.{kind}.f32 {{{d}}}, {{{a}}}, {{${x},${x + 1}}}, {{{before}}};")
    lines += ["wgmma.commit_group.sync.aligned;"] if wgmma else []
    lines += ["wgmma.wait_group.sync.aligned 0;"] if wgmma and config.in_flight.value == 0 else []
    return "\n".join([*lines, "}"])


@gluon.jit
def multiply(a, x, acc, config: gl.constexpr):
    """Products that go on from `acc`, unless that is empty; by `wgmma` they are in flight until `wgmma_wait`."""
    groups: gl.constexpr = 1 if len(acc) > 0 else config.block_scales
    count: gl.constexpr = config.columns // 2 * groups
    asm: gl.constexpr = products_asm(config.columns, groups, len(acc) > 0, config.subnormal, config)
    kinds: gl.constexpr = "=&f," * count + "r," * (15 + len(x)) + "r" + ",f" * len(acc)
    return gl.inline_asm_elementwise(asm, kinds, a + x + acc, dtype=(gl.float32,) * count, is_pure=False, pack=1)


@gluon.constexpr_function
def in_place(count):
    """Constraints of `count` sums that stay in their registers."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)])


@gluon.jit
def wgmma_wait(left: gl.constexpr, products):
    """Wait until all products but the last `left` groups have ended, those of `products` among them."""
    asm: gl.constexpr = f"wgmma.wait_group.sync.aligned {left};"
    count: gl.constexpr = len(products)
    return gl.inline_asm_elementwise(asm, in_place(count), products, dtype=(gl.float32,) * count, is_pure=False, pack=1)


# -- who does what


@aggregate_of
class Block:
    """A thread's place: its number in the block and the warp, the warp's number along rows and along K, the first block of 64
    columns of its part of K, the cluster's number and the block's in it (`rank`); where shared memory begins; and how many rows
    of activations there are, where that is open."""

    tid: gl.tensor
    lane: gl.tensor
    row_warp: gl.tensor
    k_warp: gl.tensor
    first: gl.tensor
    cluster: gl.tensor
    rank: gl.tensor
    base: gl.tensor
    x_rows: gl.tensor
    config: gl.constexpr


@gluon.jit
def begin(x_rows, config: gl.constexpr):
    """The thread's `Block`. Sets up the barriers of the cluster."""
    tid = gl.arange(0, 32 * config.warps, threads(config))
    base = shared_base()
    warp = tid // 32
    k_warp = warp // config.row_warps
    rank = gl.program_id(0) % config.cluster
    if not config.open_rows:
        x_rows = rank  # nobody asks
    if config.cluster > 1:
        mbarriers_init(base + BARRIER_AT, (tid == 0).to(gl.int32))
        for i in gl.static_range(2 if config.persistent else 1):
            mbarrier_expect(base + (BARRIER_AT + 8 * i), config.cta_sums * 4, (tid == 0).to(gl.int32))
        cluster_arrive()
    first = (rank * config.k_warps + k_warp) * config.warp_blocks
    cluster = gl.program_id(0) // config.cluster
    return Block(tid, tid % 32, warp % config.row_warps, k_warp, first, cluster, rank, base, x_rows, config)


@gluon.constexpr_function
def threads(config):
    """The layout of one element a thread."""
    return gl.BlockedLayout([1], [32], [config.warps.value], [0])


# -- weights


@aggregate_of
class Weights:
    """Words of codes, of scales and maybe of zero points (`config.streams`), each read by a warp along K in loads that are
    issued ahead of their use. What is in flight is a queue of words for each stream."""

    pointers: gl.tuple
    block: Block
    config: gl.constexpr

    @gluon.jit
    def offsets(self, row_tile):
        """The offsets of the words of a warp's row tile in each array, in words."""
        config: gl.constexpr = self.config
        block = self.block
        sixteen = row_tile * (config.cta_rows // 16) + block.row_warp * config.warp_tiles  # its first tile of 16 rows
        if config.row_tiles * config.cta_rows > config.packed_rows:  # rows past those that are packed are the last ones again
            sixteen = gl.minimum(sixteen, config.packed_rows // 16 - config.warp_tiles)
        size: gl.constexpr = 32 * config.streams[0].words  # of 16 rows by 64 columns
        first = block.first if config.streams[0].even else 0
        found = ((sixteen // 4 * config.blocks + first) * (4 * size) + sixteen % 4 * size + block.lane * 4,)
        for s in gl.static_range(1, len(self.pointers)):
            along = block.first * (config.streams[s].words * 8) if config.streams[s].even else 0
            down = sixteen * (8 * config.blocks * config.streams[s].words)
            found = found + (down + along + block.lane // 4 * config.streams[s].run,)
        return found

    @gluon.jit
    def pointers_at(self, offsets):
        """The pointers to the words at such offsets."""
        found = ()
        for s in gl.static_range(len(self.pointers)):
            found = found + (self.pointers[s] + offsets[s],)
        return found

    @gluon.jit
    def load(self, s: gl.constexpr, first: gl.constexpr, last: gl.constexpr, here, there, more):
        """Issues loads `first` to `last` of a stream, whose words begin at `here`: loads past those of the unrolled blocks are
        of the words that begin at `there`, if there is `more`."""
        config: gl.constexpr = self.config
        stream: gl.constexpr = config.streams[s]
        total: gl.constexpr = len(stream.loads)
        words = ()
        for number in gl.static_range(first, last):
            if number < total or config.persistent or config.iterations > 1:
                at = here[s] if number < total else there[s]
                if stream.even:
                    at += stream.loads[number % total].offset
                else:
                    at += self.uneven(s, number % total)
                words = words + load_words(at, () if number < total else (more,), stream.width, s == 0)
        return words

    @gluon.jit
    def load_next(self, s: gl.constexpr, kb: gl.constexpr, tile: gl.constexpr, last: gl.constexpr, here, there, more):
        """Issues the loads that take the place of those of tiles `tile` to `last` of block kb, whose words are needed no
        more."""
        first: gl.constexpr = load_after(s, kb, tile, self.config)
        return self.load(s, first, load_after(s, kb, last, self.config), here, there, more)

    @gluon.jit
    def uneven(self, s: gl.constexpr, number: gl.constexpr):
        """The offset of a load where warps do not have as much of K each: past the last block it is the last one again."""
        stream: gl.constexpr = self.config.streams[s]
        place: gl.constexpr = stream.loads[number]
        kb = gl.minimum(self.block.first + place.block, self.config.blocks - 1)
        if s == 0:
            return kb * (128 * stream.words) + (place.tile + place.word * 32)
        else:
            i = kb * stream.words + place.word
            return place.tile + i // stream.run * (stream.run * 8) + i % stream.run


@gluon.constexpr_function
def word_at(s, kb, tile, config):
    """The number of words in the queue before those of a tile's block."""
    stream = config.streams.value[s]
    group, block = divmod(kb, stream.blocks)
    return ((group * config.warp_tiles.value + tile) * stream.blocks + block) * stream.words


@gluon.constexpr_function
def load_after(s, kb, tile, config):
    """The load that is issued when words of the tiles of block kb before this one are needed no more, so that as many stay in
    flight."""
    stream = config.streams.value[s]
    loads = stream.words * stream.blocks // stream.width  # of a tile
    return (kb // stream.blocks * config.warp_tiles.value + tile) * loads + stream.prefetch


# -- activations


@gluon.constexpr_function
def block_at(kb, config):
    """The offset of block kb from the warp's first block of activations, in bytes: chunks alternate."""
    chunk, block = divmod(kb, config.chunk_blocks.value)
    return chunk % 2 * config.chunk_bytes.value + block * config.columns.value * 128


@gluon.jit
def vector(number: gl.constexpr, chunk, block):
    """A vector of 16 bytes that a thread copies of a chunk: its row, its number along K, its address in shared memory, and
    whether there is one."""
    config: gl.constexpr = block.config
    each: gl.constexpr = config.x_vectors  # in 64 columns
    own: gl.constexpr = config.chunk_blocks * each  # of a warp along K
    i = block.tid + number * (32 * config.warps)
    if each == 8:
        row = i // (config.k_warps * own)
        at = i % (config.k_warps * own)
        swizzled = at ^ row
    else:  # eight threads have vectors of two rows, which lie in different banks
        row = i // each % config.rows
        at = i // (each * config.rows) * each + i % each
        swizzled = (at * 2) ^ row
    along = at
    if config.k_chunks > 1:
        along = at // own * (config.warp_blocks * each) + at % own + chunk * own
    to = at // each * (config.columns * 128) + row * 128 + (swizzled & 7) * 16
    exists = i < config.rows * config.k_warps * own
    if config.open_rows:
        exists = exists & (row < block.x_rows)
    there = exists.to(gl.int32)
    source = block.rank * (config.k_warps * config.warp_blocks * each) + along
    return row, source, block.base + X_AT + chunk % 2 * config.chunk_bytes + to, there


@gluon.constexpr_function
def vectors_of(config):
    """The number of vectors of a chunk that a thread copies."""
    vectors = config.rows.value * config.k_warps.value * config.chunk_blocks.value * config.x_vectors.value
    return -(-vectors // (32 * config.warps.value))


@gluon.jit
def copy_chunk(x, chunk, block, pred):
    """Issues the copy of a chunk of the block's part of K where `pred`. Rows past the last one stay what they are."""
    config: gl.constexpr = block.config
    each: gl.constexpr = config.x_vectors
    for number in gl.static_range(vectors_of(config)):
        row, source, to, there = vector(number, chunk, block)
        nbytes = 16
        if not config.even:  # zeros past the end of K
            nbytes = gl.where(source < config.blocks * each, 16, 0)
        if pred is not None:
            there = there * pred
        cp_async(to, (x + (row * (config.blocks * 64) + source * (64 // each))).to(gl.int64), nbytes, there)
    cp_async_commit()


@gluon.jit
def wait_chunk(chunk, left: gl.constexpr, block):
    """Wait, in all warps, until a chunk is there, and all but `left` of those whose copies were issued after it."""
    config: gl.constexpr = block.config
    if left == 0:
        cp_async_wait_all()
    else:
        cp_async_wait_but_one()
    if config.x_vectors < 8:
        widen: gl.constexpr = config.widen + " mov.b32 $0, 0;"
        for number in gl.static_range(vectors_of(config)):
            _, _, at, there = vector(number, chunk, block)
            gl.inline_asm_elementwise(widen, "=r,r,r", [at, there], dtype=gl.int32, is_pure=False, pack=1)
    if config.wgmma:
        fence_async_shared()
    barrier()


@gluon.jit
def next_chunk(x, chunk: gl.constexpr, block):
    """Wait for a chunk, and have the next one copied to where the one before it was."""
    last: gl.constexpr = block.config.k_chunks - 1
    if chunk > 0 and chunk < last:
        barrier()
        copy_chunk(x, chunk + 1, block, None)
    wait_chunk(chunk, 1 if chunk < last else 0, block)


@gluon.jit
def sum_x(block):
    """Sums of the activations along K, shared out among the warps."""
    config: gl.constexpr = block.config
    units: gl.constexpr = config.k_warps * config.warp_blocks * config.columns // 8
    for r in gl.static_range((units + config.warps - 1) // config.warps):
        sum_x_unit(gl.minimum(block.tid // 32 + r * config.warps, units - 1), block)
    barrier()


@gluon.jit
def sum_x_unit(unit, block):
    """Sums of a block of 64 columns and 8 rows, for each scale: in three parts of 11 bits that add up to them, as TF32 holds
    them."""
    config: gl.constexpr = block.config
    eights: gl.constexpr = config.columns // 8
    lane = block.lane
    line = lane % 8
    at = block.base + X_AT + unit // eights * (config.columns * 128) + unit % eights * 1024 + line * 128
    words = ldmatrix(at + ((lane // 8) ^ line) * 16) + ldmatrix(at + ((lane // 8 + 4) ^ line) * 16)
    to = block.base + config.x_sums_at + unit // eights * config.x_sums_block_bytes + unit % eights * 128
    to += lane % 4 * 32 + lane // 4 * 4
    one = gl.full([32 * config.warps], ONES, gl.int32, threads(config))
    groups: gl.constexpr = config.block_scales
    asm: gl.constexpr = products_asm(8, groups, False, False, config)
    constraints: gl.constexpr = "=&f," * (4 * groups) + "r," * 23 + "r"
    given = (one,) * 16 + words
    d = gl.inline_asm_elementwise(asm, constraints, given, dtype=(gl.float32,) * (4 * groups), is_pure=False, pack=1)
    for group in gl.static_range(groups):
        for e in gl.static_range(2):
            high = tf32(d[4 * group + e])
            low = d[4 * group + e] - high
            part = gl.where(lane // 4 == 2, low - tf32(low), 0.0)  # the last of four columns is zero
            part = gl.where(lane // 4 == 0, high, gl.where(lane // 4 == 1, tf32(low), part))
            st_shared(to + (group * (config.columns * 16) + e * 16), part, (lane < 16).to(gl.int32))


@gluon.jit
def tf32(value):
    """A number cut to the bits that TF32 holds."""
    return (value.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def zeros(count: gl.constexpr, config: gl.constexpr):
    """The number 0 `count` times, to start sums from."""
    return (gl.zeros([32 * config.warps], gl.float32, threads(config)),) * count


@gluon.jit
def fragments(at, sums_at, block):
    """A block of 64 columns of the activations, `at` bytes from the warp's first one: where it lies, as `wgmma` is told, or 8
    words for each 8 rows, as `mma.sync` takes them; and for subnormal codes a word of their sums for each scale and 8 rows."""
    config: gl.constexpr = block.config
    lane = block.lane
    line = lane % 8
    own = block.base + X_AT + block.k_warp * (config.chunk_blocks * config.columns * 128) + at
    words = ()
    if config.wgmma:
        words = (own >> 4,)
    else:
        near = own + line * 128 + ((lane // 8) ^ line) * 16
        far = own + line * 128 + ((lane // 8 + 4) ^ line) * 16
        for j in gl.static_range(config.columns // 8):
            words = words + ldmatrix(near + j * 1024) + ldmatrix(far + j * 1024)
    if config.subnormal:
        sums = (
            block.base + config.x_sums_at + block.k_warp * (config.warp_blocks * config.x_sums_block_bytes) + lane * 4 + sums_at
        )
        for i in gl.static_range(config.x_sums_block_bytes // 128):
            words = words + (ld_shared_b32(sums + i * 128),)
    return words


# -- products


@gluon.jit
def dequantize(words, beside, config: gl.constexpr):
    """The left operand's registers of a block, four a step, from words of codes, scales and maybe zero points."""
    if config.rounded:
        words = words + beside[0]
    if config.zeros and not config.subnormal:
        words = words + beside[1]
    asm: gl.constexpr = config.dequantize
    return gl.inline_asm_elementwise(asm.text, asm.constraints, words, dtype=(gl.int32,) * 16, is_pure=False, pack=1)


@gluon.jit
def both_rows(word, dtype: gl.constexpr):
    """The values of rows g and g + 8 that share a word, in f32."""
    low = word.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    high = (word >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return low, high


@gluon.constexpr_function
def named(dtype):
    """The Gluon type of a name."""
    return getattr(gl, dtype)


@gluon.jit
def add_scaled(products, scales, group: gl.constexpr, acc, config: gl.constexpr):
    """Add sums of a group's products, times its scales, to the others."""
    if config.scale_dtype == "float32":
        low = scales[2 * group].to(gl.float32, bitcast=True)
        high = scales[2 * group + 1].to(gl.float32, bitcast=True)
    else:
        low, high = both_rows(scales[group], named(config.scale_dtype))
    if config.subnormal:
        low = low * ENLARGED[0]
        high = high * ENLARGED[1]
    found = ()
    for i in gl.static_range(len(acc)):
        found = found + (fma(products[i], high if i % 4 // 2 else low, acc[i]),)
    return found


@gluon.jit
def correction(beside, config: gl.constexpr):
    """The numbers that subnormal codes of both rows are too large by, negative, to be multiplied by sums of the activations."""
    found = ()
    for group in gl.static_range(config.block_scales):
        if config.zeros:
            low, high = both_rows(beside[1][group], gl.float16)
            low = gl.fma(low, config.correction[0], config.correction[2])
            high = gl.fma(high, config.correction[1], config.correction[3])
        else:
            low = gl.full([32 * config.warps], config.correction[0], gl.float32, threads(config))
            high = gl.full([32 * config.warps], config.correction[1], gl.float32, threads(config))
        found = found + (low.to(gl.int32, bitcast=True), high.to(gl.int32, bitcast=True))
    return found


@gluon.jit
def finish(sums, tile: gl.constexpr, products, scales, left: gl.constexpr, config: gl.constexpr):
    """Add products, once they have ended, to a tile's sums; `left` groups that were issued later stay in flight."""
    n: gl.constexpr = config.columns // 2
    if config.in_flight > 0:
        products = wgmma_wait(left, products)
    if config.rounded:
        acc = products
    else:
        acc = sums[tile * n : (tile + 1) * n]
        for group in gl.static_range(config.block_scales):
            acc = add_scaled(products[group * n : (group + 1) * n], scales, group, acc, config)
    return sums[0 : tile * n] + acc + sums[(tile + 1) * n : len(sums)]


@gluon.jit
def multiply_blocks(queues, sums, x, at, here, there, more, weights):
    """Multiply the blocks of 64 columns that are unrolled: a tile's part of K, or that of one iteration of a loop. Gives the
    words that are in flight then, and sums.

    Args:
        queues: words in flight, of each stream.
        sums: sums of all tiles.
        x: the activations.
        at: bytes from the first block of the warp's part of a chunk to the first block.
        here, there: pointers to the words that are multiplied, and to those that will be next.
        more: there are such.
        weights: the packed weight, as the block reads it.
    """
    config: gl.constexpr = weights.config
    block = weights.block
    n: gl.constexpr = config.columns // 2
    tiles: gl.constexpr = config.warp_tiles
    started, scales = (), ()
    for kb in gl.static_range(config.body):
        if config.iterations == 1 and kb > 0 and kb % config.chunk_blocks == 0:
            next_chunk(x, kb // config.chunk_blocks, block)
        else:
            syncwarp()
        fragment = fragments(at + block_at(kb, config), kb * config.x_sums_block_bytes, block)
        for tile in gl.static_range(tiles):
            own = ()
            for s in gl.static_range(len(queues)):
                own = own + (queues[s][word_at(s, kb, tile, config) : word_at(s, kb, tile, config) + config.streams[s].words],)
            a = dequantize(own[0], own[1 : len(own)], config)
            following = queues[0] + weights.load_next(0, kb, tile, tile + 1, here, there, more)
            queues = (following,) + queues[1 : len(queues)]
            if (config.in_flight == 1 or config.rounded) and len(started) > 0:
                sums = finish(sums, tile, started, scales, 0, config)
            acc = sums[tile * n : (tile + 1) * n] if config.rounded else ()
            before = started
            if config.subnormal:
                started = multiply(a, fragment + correction(own[1 : len(own)], config), acc, config)
            else:
                started = multiply(a, fragment, acc, config)
            if config.in_flight == 2 and not config.rounded and len(before) > 0:
                sums = finish(sums, tile, before, scales, 1, config)
            scales = own[1]
            if config.in_flight == 0 or kb + 1 == config.body:
                sums = finish(sums, tile, started, scales, 0, config)
                started = ()
        for s in gl.static_range(1, len(queues)):
            if (kb + 1) % config.streams[s].blocks == 0 or kb + 1 == config.body:
                following = queues[s] + weights.load_next(s, kb, 0, tiles, here, there, more)
                queues = queues[0:s] + (following,) + queues[s + 1 : len(queues)]
    left = ()
    for s in gl.static_range(len(queues)):
        left = left + (queues[s][len(config.streams[s].loads) * config.streams[s].width : len(queues[s])],)
    return left, sums


# -- a row tile


@gluon.jit
def prologue(x, weights):
    """Load the first words of the first row tile, and activations. By `launch_early` the next kernel may be launched once the
    one before has ended."""
    config: gl.constexpr = weights.config
    block = weights.block
    at = weights.pointers_at(weights.offsets(block.cluster))
    queues = (weights.load(0, 0, config.early_prefetch, at, at, 0),)
    for s in gl.static_range(1, len(at)):
        queues = queues + (weights.load(s, 0, config.streams[s].prefetch, at, at, 0),)
    gdc_wait()
    if config.launch_early:
        gdc_launch_dependents()
    for chunk in gl.static_range(min(config.k_chunks, 2)):
        copy_chunk(x, chunk, block, None)
    syncwarp()
    rest = weights.load(0, config.early_prefetch, config.prefetch, at, at, 0)
    next_chunk(x, 0, block)
    if config.subnormal:
        sum_x(block)
    return (queues[0] + rest,) + queues[1 : len(queues)]


@gluon.jit
def mainloop(queues, row_tile, x, weights):
    """A warp's sums of a row tile, and the words that are in flight for the next one."""
    config: gl.constexpr = weights.config
    block = weights.block
    sums = zeros(config.warp_tiles * config.columns // 2, config)
    offsets = weights.offsets(row_tile)
    after, further = offsets, 0
    if config.persistent:
        after = weights.offsets(row_tile + config.clusters)
        further = (row_tile + config.clusters < config.row_tiles).to(gl.int32)
    if config.iterations == 1:
        here, there = weights.pointers_at(offsets), weights.pointers_at(after)
        queues, sums = multiply_blocks(queues, sums, x, 0, here, there, further, weights)
    elif config.k_chunks == 1:
        queues, sums = multiply_chunk(queues, sums, x, 0, offsets, after, further, weights)
    else:
        for chunk in range(config.k_chunks):
            queues, sums = multiply_chunk(queues, sums, x, chunk, offsets, after, further, weights)
            barrier()
            copy_chunk(x, chunk + 2, block, (chunk + 2 < config.k_chunks).to(gl.int32))
            wait_chunk(chunk + 1, 1, block)
    return queues, sums


@gluon.jit
def multiply_chunk(queues, sums, x, chunk, offsets, after, further, weights):
    """The loop over a chunk of K; words after the last ones begin at `after`, if there are `further` ones."""
    config: gl.constexpr = weights.config
    count: gl.constexpr = config.iterations // config.k_chunks
    size: gl.constexpr = config.columns * 128
    none = gl.program_id(1)  # 0, but the compiler does not know: unrolled, a short loop takes too many registers
    for within in range(count + none):
        number = chunk * count + within
        inside = number < config.iterations - 1
        there = ()
        for s in gl.static_range(len(offsets)):
            at = offsets[s] + (number + 1) * (config.body * config.streams[s].words * (32 * 4 if s == 0 else 8))
            if config.persistent:
                at = gl.where(inside, at, after[s])
            there = there + (at,)
        there = weights.pointers_at(there)
        more = gl.where(inside, 1, further)
        at = within * (config.body * size) + chunk % 2 * config.chunk_bytes
        queues, sums = multiply_blocks(queues, sums, x, at, there, there, more, weights)
    return queues, sums


# -- sums of all of K


@gluon.jit
def send(at, four, to, bar, pred, block):
    """Send four sums, which are `at` bytes into the block's tile, to the block that finishes them."""
    own: gl.constexpr = block.config.cta_sums * 4 // block.config.cluster
    st_async(to + block.rank * own + (at & (own - 1)), at // own, four[0], four[1], four[2], four[3], bar, pred)


@gluon.jit
def reduce(sums, count, block):
    """Bring sums over the parts of K to the block that finishes their rows, where `total` adds them up.

    Args:
        sums: a warp's sums.
        count: the cluster's row tiles before this one.
        block: the block that has them.
    """
    config: gl.constexpr = block.config
    eights: gl.constexpr = config.columns // 8
    split: gl.constexpr = config.cluster > 1
    quarters: gl.constexpr = config.cta_sums // 4
    thread = thread_number(block.tid)  # registers are scarce until here
    base = shared_base()
    corner = (thread & 31) * 16
    down = (thread // 32) & (config.row_warps - 1)
    along = thread // (32 * config.row_warps)
    bar = base + BARRIER_AT + (count & 1) * 8
    sent = base + config.received_at + (count & 1) * (config.cta_sums * 4)
    barrier()  # all have read what lay here, and what arrived for the row tile before
    if split and config.sends_directly and not config.persistent:
        cluster_wait()
    for tile in gl.static_range(config.warp_tiles):
        sixteen = down * config.warp_tiles + tile
        for j in gl.static_range(eights):
            at = (sixteen * eights + j) * 512 + corner
            four = sums[(tile * eights + j) * 4 : (tile * eights + j + 1) * 4]
            if config.sends_directly:
                send(at, four, sent, bar, 1, block)
            else:
                to = base + config.partials_at + along * (config.cta_sums * 4) + at
                st_shared_v4(to, four[0], four[1], four[2], four[3])
    if not config.sends_directly:
        barrier()
        if split and not config.persistent:
            cluster_wait()
        if split:
            for r in gl.static_range((quarters + 32 * config.warps - 1) // (32 * config.warps)):
                i = thread + r * (32 * config.warps)
                pred = (i < quarters).to(gl.int32)
                i = gl.minimum(i, quarters - 1)
                four = ld_shared_v4(base + config.partials_at + i * 16)
                for k in gl.static_range(1, config.k_warps):
                    more = ld_shared_v4(base + (config.partials_at + k * config.cta_sums * 4) + i * 16)
                    four = (four[0] + more[0], four[1] + more[1], four[2] + more[2], four[3] + more[3])
                send(i * 16, four, sent, bar, pred, block)
    if split:
        mbarrier_wait(bar, (count >> 1) & 1)
        if config.persistent:
            mbarrier_expect(bar, config.cta_sums * 4, (thread == 0).to(gl.int32))


@gluon.jit
def total(place, count, config: gl.constexpr):
    """The sum over the parts of K of what is `place` bytes into the rows that a block finishes."""
    base = shared_base()
    if config.cluster > 1:
        at = base + config.received_at + (count & 1) * (config.cta_sums * 4) + place
        stride: gl.constexpr = config.cta_sums * 4 // config.cluster
        parts: gl.constexpr = config.cluster
    else:
        at = base + config.partials_at + place
        stride: gl.constexpr = config.cta_sums * 4
        parts: gl.constexpr = config.k_warps
    found = ld_shared(at)
    for part in gl.static_range(1, parts):
        found += ld_shared(at + part * stride)
    return found


@gluon.constexpr_function
def out_layout(config):
    """The layout of a block's results, columns by rows: neighbours along the first axis."""
    lanes = min(32, config.cta_outs.value)
    down = max(min(config.warps.value, config.cta_outs.value // lanes), 1)
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [down, config.warps.value // down], [0, 1])


@gluon.jit
def epilogue(row_tile, count, block, side, store: gl.constexpr):
    """Store the block's part of the row tile, columns of the results along the first axis. Where two rows of the weights make
    one (`pack.in_turn`), the other one's sum is `up`."""
    config: gl.constexpr = block.config
    layout: gl.constexpr = out_layout(config)
    r = gl.arange(0, config.cta_outs, gl.SliceLayout(1, layout))
    c = gl.arange(0, config.columns, gl.SliceLayout(0, layout))
    if config.accumulators == 1:
        of_rows = r // 16 * (config.columns * 16) + r % 8 * 16 + r // 8 % 2 * 2
    else:
        of_rows = r // 8 * (config.columns * 16) + r % 8 * 16
    of_columns = c // 8 * 128 + c % 8 // 2 * 4 + c % 2
    place = (of_rows[:, None] + of_columns[None, :]) * 4
    y = total(place, count, config)
    outs = row_tile * (config.cta_rows // config.accumulators) + block.rank * config.cta_outs + r
    up = y
    if config.accumulators > 1:
        up = total(place + 8, count, config)
    store(y, up, c, outs, side)


# -- the kernel


@gluon.jit
def gemm(x, words, x_rows, side, config: gl.constexpr, store: gl.constexpr):
    """The kernel.

    Args:
        x: activations [rows, K].
        words: pointers to the words of codes, scales and maybe zero points (`pack.py`).
        x_rows: rows of the activations, where the configuration leaves them open.
        side: pointers and numbers that `store` takes.
        config: see `KernelConfig`.
        store: the program's function of sums (and `up`), rows of the activations and columns of the results.
    """
    rows: gl.constexpr = config.shared_bytes // 512
    room = gl.allocate_shared_memory(gl.int32, [rows, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    room.index(0).store(gl.zeros([128], gl.int32, threads(config)))  # else there is none
    block = begin(x_rows, config)
    weights = Weights(words, block, config)
    queues = prologue(x, weights)
    if config.persistent:
        if config.cluster > 1:
            cluster_wait()
        count = 0
        for row_tile in range(block.cluster, config.row_tiles, config.clusters):
            queues, sums = mainloop(queues, row_tile, x, weights)
            if not config.launch_early:
                gdc_launch_dependents()
            reduce(sums, count, block)
            epilogue(row_tile, count, block, side, store)
            count += 1
    else:
        _, sums = mainloop(queues, block.cluster, x, weights)
        if not config.launch_early:
            gdc_launch_dependents()
        reduce(sums, 0, block)
        epilogue(block.cluster, 0, block, side, store)
    room._keep_alive()  # it is addressed by hand
