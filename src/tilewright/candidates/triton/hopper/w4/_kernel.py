"""The gemm of few rows with weights of 4 or 8 bits, in Gluon: memory is what it waits for, so words of codes go from there
straight to registers, are made halves, and multiplied by `mma.sync` or `wgmma`.

A block owns 16 rows of the weights for each of its row warps and tiles, and a part of K that its other warps share; blocks of a
cluster have parts of K of the same rows (split-K). Warps ask for words (`Weights`) some loads ahead of their use, the first
ones before the kernel ahead has ended (`prologue`). The other operand lies in shared memory, a chunk of K at a time
(`copy_chunk`), 64 columns (128 bytes) a row, swizzled as `wgmma` and `ldmatrix` want it. `mainloop` multiplies. Sums of a
block's warps meet in shared memory, those of a cluster's blocks in that of the block that finishes them (`reduce`): in the same
order on every run. Clusters may stay for several row tiles (`again`).

Values are tensors of one element a thread, since Gluon's own products let neither warps share K nor codes be made halves on
their way: what it has no word for is PTX, for one thread or for the warps it names. Warps read what they asked for themselves,
so there is no ring of stages (`hopper/_pipeline.py`). `config` is a `form.KernelConfig`, `store` the program's own function.
"""

# ruff: noqa: RUF005, SIM113 (Triton has neither stars in tuples nor enumerate)
# Jitted functions are not Python's.
# pyright: basic, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.candidates.triton.hopper.w4 import form
from tilewright.candidates.triton.runtime._gluon import aggregate_of, barrier, statement

X_AT = gl.constexpr(form.X_AT)
BARRIER_AT = gl.constexpr(form.BARRIER_AT)
STEPS = gl.constexpr(4)  # of 16 columns in a block of 64


# -- what Gluon has no word for

syncwarp = statement(
    "bar.warp.sync 0xffffffff;"
)  # ptxas would move all loads to where their words are used: they stay before it
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
def products_asm(columns, subs, sums_in, small, config):
    """Products of rows by so many columns over a block of K, as sums of each of `subs` groups. In: 16 registers of the left
    operand, `fragments` of the right one or where it lies (`wgmma`, in 16 bytes), and sums if they go on. Codes that are
    `small` come with factors for the right one's sums, which are multiplied as TF32.

    The upper half of a descriptor (PTX ISA 9.0, 9.7.15.5.1.2) says rows of 128 bytes, swizzled, eight of them 1024 bytes apart
    from the next eight.
    """
    wide, half, n, eights, each = config.wide.value, config.half.value, columns // 2, columns // 8, STEPS.value // subs
    left, right = n * subs, n * subs + 16
    added = right + columns
    sums = right + 1 if wide else added + (subs * (eights + 2) if small else 0)
    kind, lines = f"f32.{half}.{half}", ["{ .reg .f32 z; mov.f32 z, 0f00000000; .reg .b32 u; .reg .pred q; .reg .b64 e;"]
    lines += [f"mov.f32 ${i}, ${sums + i};" for i in range(n if sums_in else 0)]
    lines += ["wgmma.fence.sync.aligned;"] if wide else []
    for step in range(STEPS.value):
        sub, goes_on = step // each, sums_in or step % each > 0
        a = ",".join(f"${left + 4 * step + i}" for i in range(4))
        if wide:
            d = ",".join(f"${sub * n + i}" for i in range(n))
            lines.append(
                f"add.s32 u, ${right}, {2 * step}; mov.b64 e, {{u, {1 << 30 | 64:#x}}}; setp.ne.b32 q, {goes_on:d}, 0;"
            )
            lines.append(f"wgmma.mma_async.sync.aligned.m64n{columns}k16.{kind} {{{d}}}, {{{a}}}, e, q, 1, 1, 0;")
            continue
        for j in range(eights):
            d = ",".join(f"${sub * n + 4 * j + i}" for i in range(4))
            before, x = d if goes_on else "z,z,z,z", right + 8 * j + 2 * step
            if small and step % each == 0:
                factors = f"${added + subs * eights + 2 * sub},${added + subs * eights + 2 * sub + 1}"
                lines.append(f"mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {{{d}}}, {{{factors}}},")
                lines.append(f"{{${added + sub * eights + j}}}, {{{before}}};")
                before = d
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.{kind}.f32 {{{d}}}, {{{a}}}, {{${x},${x + 1}}}, {{{before}}};")
    lines += ["wgmma.commit_group.sync.aligned;"] if wide else []
    lines += ["wgmma.wait_group.sync.aligned 0;"] if wide and config.lag.value == 0 else []
    return "\n".join([*lines, "}"])


@gluon.jit
def multiply(a, x, acc, config: gl.constexpr):
    """Products that go on from `acc`, unless that is empty; by `wgmma` they are under way until `wgmma_wait`."""
    subs: gl.constexpr = 1 if len(acc) > 0 else config.subs
    outs: gl.constexpr = config.columns // 2 * subs
    asm: gl.constexpr = products_asm(config.columns, subs, len(acc) > 0, config.small, config)
    kinds: gl.constexpr = "=&f," * outs + "r," * (15 + len(x)) + "r" + ",f" * len(acc)
    return gl.inline_asm_elementwise(asm, kinds, a + x + acc, dtype=(gl.float32,) * outs, is_pure=False, pack=1)


@gluon.constexpr_function
def in_place(count):
    """Constraints of so many sums, which stay in their registers."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)])


@gluon.jit
def wgmma_wait(left: gl.constexpr, products):
    """Products but the last so many groups have ended, these among them."""
    asm: gl.constexpr = f"wgmma.wait_group.sync.aligned {left};"
    count: gl.constexpr = len(products)
    return gl.inline_asm_elementwise(asm, in_place(count), products, dtype=(gl.float32,) * count, is_pure=False, pack=1)


# -- who does what


@aggregate_of
class Block:
    """Who a thread is: its number in the block and the warp, the warp's rows and its part of K, whose first block of 64 columns
    is `first`, the cluster's number and the block's in it (`rank`); and where shared memory begins."""

    tid: gl.tensor
    lane: gl.tensor
    row_warp: gl.tensor
    k_warp: gl.tensor
    first: gl.tensor
    cluster: gl.tensor
    rank: gl.tensor
    base: gl.tensor
    config: gl.constexpr


@gluon.jit
def begin(config: gl.constexpr):
    """The block; barriers of the cluster are set up."""
    tid = gl.arange(0, 32 * config.warps, threads(config))
    base = shared_base()
    warp = tid // 32
    k_warp = warp // config.row_warps
    rank = gl.program_id(0) % config.cluster
    if config.cluster > 1:
        mbarriers_init(base + BARRIER_AT, (tid == 0).to(gl.int32))
        for i in gl.static_range(2 if config.again else 1):
            mbarrier_expect(base + (BARRIER_AT + 8 * i), config.sums * 4, (tid == 0).to(gl.int32))
        cluster_arrive()
    first = (rank * config.k_warps + k_warp) * config.depth
    cluster = gl.program_id(0) // config.cluster
    return Block(tid, tid % 32, warp % config.row_warps, k_warp, first, cluster, rank, base, config)


@gluon.constexpr_function
def threads(config):
    """An element a thread."""
    return gl.BlockedLayout([1], [32], [config.warps.value], [0])


# -- weights


@aggregate_of
class Weights:
    """Words of codes, of scales and maybe of zero points: streams 0, 1 and 2 of `config.streams`, each read by a warp along K
    in loads that are asked for some loads ahead of their use. What is held is a queue of words for each stream."""

    pointers: gl.tuple
    block: Block
    config: gl.constexpr

    @gluon.jit
    def offsets(self, row_tile):
        """Where the words of a warp's row tile begin, of each stream."""
        config: gl.constexpr = self.config
        block = self.block
        # Which 16 rows a warp's first tile has; others follow it, with wgmma those of four warps at a time.
        sixteen = row_tile * (config.out_tile // 16) + block.row_warp * (1 if config.wide else config.tiles)
        if config.row_tiles * config.out_tile > config.packed_rows:  # rows past those that are packed are the last ones again
            sixteen = gl.minimum(sixteen, config.packed_rows // 16 - config.tiles)
        size: gl.constexpr = 32 * config.stream_words[0]  # of 16 rows by 64 columns
        first = block.first if config.stream_even[0] else 0
        found = ((sixteen // 4 * config.blocks + first) * (4 * size) + sixteen % 4 * size + block.lane * 4,)
        for s in gl.static_range(1, len(self.pointers)):
            along = block.first * (config.stream_words[s] * 8) if config.stream_even[s] else 0
            down = sixteen * (8 * config.blocks * config.stream_words[s])
            found = found + (down + along + block.lane // 4 * config.stream_run[s],)
        return found

    @gluon.jit
    def pointers_at(self, offsets):
        """Pointers to the words there."""
        found = ()
        for s in gl.static_range(len(self.pointers)):
            found = found + (self.pointers[s] + offsets[s],)
        return found

    @gluon.jit
    def load(self, s: gl.constexpr, first: gl.constexpr, last: gl.constexpr, here, there, more):
        """Words of a stream's loads from one number to another, of what begins at `here`: past the end of that of what begins
        at `there`, if there is `more`."""
        config: gl.constexpr = self.config
        total: gl.constexpr = loads_at_once(s, config)
        words = ()
        for number in gl.static_range(first, last):
            if number < total or config.again or config.turns > 1:
                at = here[s] if number < total else there[s]
                if config.stream_even[s]:
                    at += load_at(s, number % total, config)
                else:
                    at += self.uneven(s, number % total)
                words = words + load_words(at, () if number < total else (more,), config.stream_width[s], s == 0)
        return words

    @gluon.jit
    def after(self, s: gl.constexpr, kb: gl.constexpr, tile: gl.constexpr, last: gl.constexpr, here, there, more):
        """Words that follow those under way, when those of some tiles of block kb are needed no more."""
        first: gl.constexpr = load_after(s, kb, tile, self.config)
        return self.load(s, first, load_after(s, kb, last, self.config), here, there, more)

    @gluon.jit
    def uneven(self, s: gl.constexpr, number: gl.constexpr):
        """`load_at` if warps do not have as much of K each: past the last block it is the last one again."""
        config: gl.constexpr = self.config
        place: gl.constexpr = load_place(s, number, config)
        run: gl.constexpr = config.stream_run[s]
        kb = gl.minimum(self.block.first + place[0], config.blocks - 1)
        if s == 0:
            return kb * (128 * config.stream_words[0]) + (place[1] + place[2] * 32)
        else:
            i = kb * config.stream_words[s] + place[2]
            return place[1] + i // run * (run * 8) + i % run


@gluon.constexpr_function
def loads_at_once(s, config):
    """Loads of a stream for the blocks that are written out."""
    return len(config.stream_loads.value[s])


@gluon.constexpr_function
def load_place(s, number, config):
    """A load's first block, where its tile of 16 rows begins, and its first word (`Stream`)."""
    return config.stream_loads.value[s][number]


@gluon.constexpr_function
def load_at(s, number, config):
    """Words from the first one of a warp's row tile to those of a load."""
    kb, down, word = load_place(s, number, config)
    each, run = config.stream_words.value[s], config.stream_run.value[s]
    i = kb * each + word
    return down + (kb * 128 * each + word * 32 if s == 0 else i // run * run * 8 + i % run)


@gluon.constexpr_function
def word_at(s, kb, tile, config):
    """Where in the queue the words of a tile's block begin."""
    each, blocks = config.stream_words.value[s], config.stream_blocks.value[s]
    return (kb // blocks * config.tiles.value + tile) * blocks * each + kb % blocks * each


@gluon.constexpr_function
def load_after(s, kb, tile, config):
    """The load that is asked for when words of the tiles of block kb before this one are needed no more, so that as many stay
    under way."""
    loads = config.stream_words.value[s] * config.stream_blocks.value[s] // config.stream_width.value[s]  # of a tile
    return (kb // config.stream_blocks.value[s] * config.tiles.value + tile) * loads + config.stream_ahead.value[s]


# -- the other operand


@gluon.constexpr_function
def block_at(kb, config):
    """Bytes from the warp's first block of the other operand to block kb: chunks alternate."""
    chunk, block = divmod(kb, config.chunk_depth.value)
    return chunk % 2 * config.chunk_bytes.value + block * config.columns.value * 128


@gluon.jit
def piece(number: gl.constexpr, chunk, block):
    """A piece of 16 bytes that a thread copies of a chunk: its row, its number along K, its place in shared memory, and whether
    there is one."""
    config: gl.constexpr = block.config
    each: gl.constexpr = config.pieces  # in 64 columns
    own: gl.constexpr = config.chunk_depth * each  # of a warp along K
    i = block.tid + number * (32 * config.warps)
    if each == 8:
        row = i // (config.k_warps * own)
        at = i % (config.k_warps * own)
        swizzled = at ^ row
    else:  # eight threads have pieces of two rows, which lie in different banks
        row = i // each % config.rows
        at = i // (each * config.rows) * each + i % each
        swizzled = (at * 2) ^ row
    along = at
    if config.chunks > 1:
        along = at // own * (config.depth * each) + at % own + chunk * own
    to = at // each * (config.columns * 128) + row * 128 + (swizzled & 7) * 16
    there = (i < config.rows * config.k_warps * own).to(gl.int32)
    source = block.rank * (config.k_warps * config.depth * each) + along
    return row, source, block.base + X_AT + chunk % 2 * config.chunk_bytes + to, there


@gluon.constexpr_function
def pieces_of(config):
    """Pieces of a chunk that a thread copies."""
    pieces = config.rows.value * config.k_warps.value * config.chunk_depth.value * config.pieces.value
    return -(-pieces // (32 * config.warps.value))


@gluon.jit
def copy_chunk(x, chunk, block, pred):
    """Asks for a chunk of the block's part of K, if at all. Rows that the operand does not have stay what they are."""
    config: gl.constexpr = block.config
    each: gl.constexpr = config.pieces
    for number in gl.static_range(pieces_of(config)):
        row, source, to, there = piece(number, chunk, block)
        nbytes = 16
        if not config.stream_even[0]:  # zeros past the end of K
            nbytes = gl.where(source < config.blocks * each, 16, 0)
        if pred is not None:
            there = there * pred
        cp_async(to, (x + (row * (config.blocks * 64) + source * (64 // each))).to(gl.int64), nbytes, there)
    cp_async_commit()


@gluon.jit
def wait_chunk(chunk, left: gl.constexpr, block):
    """A chunk is there, for all warps, but for so many that were asked for after it."""
    config: gl.constexpr = block.config
    if left == 0:
        cp_async_wait_all()
    else:
        cp_async_wait_but_one()
    if config.pieces < 8:
        widen: gl.constexpr = config.widen_asm + " mov.b32 $0, 0;"
        for number in gl.static_range(pieces_of(config)):
            _, _, at, there = piece(number, chunk, block)
            gl.inline_asm_elementwise(widen, "=r,r,r", [at, there], dtype=gl.int32, is_pure=False, pack=1)
    if config.wide:
        fence_async_shared()
    barrier()


@gluon.jit
def next_chunk(x, chunk: gl.constexpr, block):
    """A chunk is there, and the one before it makes room for the next one."""
    last: gl.constexpr = block.config.chunks - 1
    if chunk > 0 and chunk < last:
        barrier()
        copy_chunk(x, chunk + 1, block, None)
    wait_chunk(chunk, 1 if chunk < last else 0, block)


@gluon.jit
def add_up(block):
    """Sums of the other operand along K, shared out among the warps."""
    config: gl.constexpr = block.config
    units: gl.constexpr = config.k_warps * config.depth * config.columns // 8
    for r in gl.static_range((units + config.warps - 1) // config.warps):
        add_up_unit(gl.minimum(block.tid // 32 + r * config.warps, units - 1), block)
    barrier()


@gluon.jit
def add_up_unit(unit, block):
    """Sums of a block of 64 columns and 8 rows, of each scale: in three parts of 11 bits that add up to them, as TF32 holds
    them."""
    config: gl.constexpr = block.config
    eights: gl.constexpr = config.columns // 8
    lane = block.lane
    line = lane % 8
    at = block.base + X_AT + unit // eights * (config.columns * 128) + unit % eights * 1024 + line * 128
    words = ldmatrix(at + ((lane // 8) ^ line) * 16) + ldmatrix(at + ((lane // 8 + 4) ^ line) * 16)
    to = block.base + config.sums_at + unit // eights * config.sums_each + unit % eights * 128
    to += lane % 4 * 32 + lane // 4 * 4
    one = gl.full([32 * config.warps], config.one, gl.int32, threads(config))
    asm: gl.constexpr = products_asm(8, config.subs, False, False, config)
    constraints: gl.constexpr = "=&f," * (4 * config.subs) + "r," * 23 + "r"
    given = (one,) * 16 + words
    d = gl.inline_asm_elementwise(asm, constraints, given, dtype=(gl.float32,) * (4 * config.subs), is_pure=False, pack=1)
    for sub in gl.static_range(config.subs):
        for e in gl.static_range(2):
            high = top_bits(d[4 * sub + e])
            low = d[4 * sub + e] - high
            part = gl.where(lane // 4 == 2, low - top_bits(low), 0.0)  # the last of four columns is zero
            part = gl.where(lane // 4 == 0, high, gl.where(lane // 4 == 1, top_bits(low), part))
            st_shared(to + (sub * (config.columns * 16) + e * 16), part, (lane < 16).to(gl.int32))


@gluon.jit
def top_bits(value):
    """What TF32 holds of a number."""
    return (value.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def zeros(count: gl.constexpr, config: gl.constexpr):
    """So many sums of nothing."""
    return (gl.zeros([32 * config.warps], gl.float32, threads(config)),) * count


@gluon.jit
def fragments(at, sums_at, block):
    """A block of 64 columns of the other operand, so far from the warp's first one: where it lies, as `wgmma` is told, or 8
    words for each 8 rows, as `mma` takes them; and, if need be, a word of their sums for each scale and 8 rows."""
    config: gl.constexpr = block.config
    lane = block.lane
    line = lane % 8
    own = block.base + X_AT + block.k_warp * (config.chunk_depth * config.columns * 128) + at
    words = ()
    if config.wide:
        words = (own >> 4,)
    else:
        near = own + line * 128 + ((lane // 8) ^ line) * 16
        far = own + line * 128 + ((lane // 8 + 4) ^ line) * 16
        for j in gl.static_range(config.columns // 8):
            words = words + ldmatrix(near + j * 1024) + ldmatrix(far + j * 1024)
    if config.small:
        sums = block.base + config.sums_at + block.k_warp * (config.depth * config.sums_each) + lane * 4 + sums_at
        for i in gl.static_range(config.sums_each // 128):
            words = words + (ld_shared_b32(sums + i * 128),)
    return words


# -- products


@gluon.jit
def halves(words, beside, config: gl.constexpr):
    """The left operand's registers of a block, four a step, of words of codes, scales and maybe zero points."""
    if config.rounded:
        words = words + beside[0]
    if config.zeros and not config.small:
        words = words + beside[1]
    asm: gl.constexpr = config.halves_asm
    return gl.inline_asm_elementwise(asm, config.halves_operands, words, dtype=(gl.int32,) * 16, is_pure=False, pack=1)


@gluon.jit
def both_rows(word, dtype: gl.constexpr):
    """Values of rows g and g + 8 that share a word, in f32."""
    low = word.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    high = (word >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return low, high


@gluon.constexpr_function
def named(dtype):
    """Gluon's type of a name."""
    return getattr(gl, dtype)


@gluon.jit
def scaled(products, scales, sub: gl.constexpr, acc, config: gl.constexpr):
    """Sums of a group's products times its scales join the others."""
    if config.scale_dtype == "float32":
        low = scales[2 * sub].to(gl.float32, bitcast=True)
        high = scales[2 * sub + 1].to(gl.float32, bitcast=True)
    else:
        low, high = both_rows(scales[sub], named(config.scale_dtype))
    if config.small:
        low = low * config.enlarged[0]
        high = high * config.enlarged[1]
    found = ()
    for i in gl.static_range(len(acc)):
        found = found + (fma(products[i], high if i % 4 // 2 else low, acc[i]),)
    return found


@gluon.jit
def excess(beside, config: gl.constexpr):
    """What codes of both rows are too large by, where they are multiplied as they stand in their words, negative: it is
    multiplied by sums of the other operand."""
    found = ()
    for sub in gl.static_range(config.subs):
        if config.zeros:
            low, high = both_rows(beside[1][sub], gl.float16)
            low = gl.fma(low, config.excess[0], config.excess[2])
            high = gl.fma(high, config.excess[1], config.excess[3])
        else:
            low = gl.full([32 * config.warps], config.excess[0], gl.float32, threads(config))
            high = gl.full([32 * config.warps], config.excess[1], gl.float32, threads(config))
        found = found + (low.to(gl.int32, bitcast=True), high.to(gl.int32, bitcast=True))
    return found


@gluon.jit
def finish(sums, tile: gl.constexpr, products, scales, left: gl.constexpr, config: gl.constexpr):
    """Products that are under way, but for so many that were asked for later, end and join a tile's sums."""
    n: gl.constexpr = config.columns // 2
    if config.lag > 0:
        products = wgmma_wait(left, products)
    if config.rounded:
        acc = products
    else:
        acc = sums[tile * n : (tile + 1) * n]
        for sub in gl.static_range(config.subs):
            acc = scaled(products[sub * n : (sub + 1) * n], scales, sub, acc, config)
    return sums[0 : tile * n] + acc + sums[(tile + 1) * n : len(sums)]


@gluon.jit
def blocks(held, sums, x, at, here, there, more, weights):
    """Multiplies the blocks of 64 columns that are written out: the part of K of a tile, or of one turn of a loop. Gives the
    words that are held then, and sums.

    Args:
        held: words under way, of each stream.
        sums: of all tiles.
        x: the other operand.
        at: where the first block lies from the first one of the warp's part of a chunk, in bytes.
        here, there: pointers to the words that are multiplied, and to those that will be next, if there is `more`.
    """
    config: gl.constexpr = weights.config
    block = weights.block
    n: gl.constexpr = config.columns // 2
    codes, beside = held[0], held
    under_way, scales = (), ()
    for kb in gl.static_range(config.body):
        if config.turns == 1 and kb > 0 and kb % config.chunk_depth == 0:
            next_chunk(x, kb // config.chunk_depth, block)
        else:
            syncwarp()
        fragment = fragments(at + block_at(kb, config), kb * config.sums_each, block)
        for tile in gl.static_range(config.tiles):
            words = codes[word_at(0, kb, tile, config) : word_at(0, kb, tile, config) + config.stream_words[0]]
            own = ()
            for s in gl.static_range(1, len(beside)):
                own = own + (beside[s][word_at(s, kb, tile, config) : word_at(s, kb, tile, config) + config.stream_words[s]],)
            a = halves(words, own, config)
            codes = codes + weights.after(0, kb, tile, tile + 1, here, there, more)
            if (config.lag == 1 or config.rounded) and len(under_way) > 0:
                sums = finish(sums, (tile + config.tiles - 1) % config.tiles, under_way, scales, 0, config)
            acc = sums[tile * n : (tile + 1) * n] if config.rounded else ()
            if config.small:
                started = multiply(a, fragment + excess(own, config), acc, config)
            else:
                started = multiply(a, fragment, acc, config)
            if config.lag == 2 and not config.rounded and len(under_way) > 0:
                sums = finish(sums, (tile + config.tiles - 1) % config.tiles, under_way, scales, 1, config)
            under_way, scales = started, own[0]
            if config.lag == 0 or (kb + 1 == config.body and tile + 1 == config.tiles):
                sums = finish(sums, tile, under_way, scales, 0, config)
                under_way = ()
        for s in gl.static_range(1, len(beside)):
            if (kb + 1) % config.stream_blocks[s] == 0 or kb + 1 == config.body:
                following = beside[s] + weights.after(s, kb, 0, config.tiles, here, there, more)
                beside = beside[0:s] + (following,) + beside[s + 1 : len(beside)]
    held = (codes[loads_at_once(0, config) * config.stream_width[0] : len(codes)],)
    for s in gl.static_range(1, len(beside)):
        held = held + (beside[s][loads_at_once(s, config) * config.stream_width[s] : len(beside[s])],)
    return held, sums


# -- a tile


@gluon.jit
def prologue(x, weights):
    """The first row tile's first words, and the other operand; `soon`: the next kernel may start when this one has."""
    config: gl.constexpr = weights.config
    block = weights.block
    at = weights.pointers_at(weights.offsets(block.cluster))
    held = (weights.load(0, 0, config.early, at, at, 0),)
    for s in gl.static_range(1, len(at)):
        held = held + (weights.load(s, 0, config.stream_ahead[s], at, at, 0),)
    gdc_wait()
    if config.soon:
        gdc_launch_dependents()
    for chunk in gl.static_range(min(config.chunks, 2)):
        copy_chunk(x, chunk, block, None)
    syncwarp()
    rest = weights.load(0, config.early, config.stream_ahead[0], at, at, 0)
    held = (held[0] + rest,) + held[1 : len(held)]
    next_chunk(x, 0, block)
    if config.small:
        add_up(block)
    return held


@gluon.jit
def mainloop(held, row_tile, x, weights):
    """A warp's sums of a row tile, and the words that are held for the next one."""
    config: gl.constexpr = weights.config
    block = weights.block
    sums = zeros(config.tiles * config.columns // 2, config)
    offsets = weights.offsets(row_tile)
    after, further = offsets, 0
    if config.again:
        after = weights.offsets(row_tile + config.clusters)
        further = (row_tile + config.clusters < config.row_tiles).to(gl.int32)
    if config.turns == 1:
        here, there = weights.pointers_at(offsets), weights.pointers_at(after)
        held, sums = blocks(held, sums, x, 0, here, there, further, weights)
    elif config.chunks == 1:
        held, sums = turns(held, sums, x, 0, offsets, after, further, weights)
    else:
        for chunk in range(config.chunks):
            held, sums = turns(held, sums, x, chunk, offsets, after, further, weights)
            barrier()
            copy_chunk(x, chunk + 2, block, (chunk + 2 < config.chunks).to(gl.int32))
            wait_chunk(chunk + 1, 1, block)
    return held, sums


@gluon.jit
def turns(held, sums, x, chunk, offsets, after, further, weights):
    """The loop over a chunk of K, some blocks at a time."""
    config: gl.constexpr = weights.config
    count: gl.constexpr = config.turns // config.chunks
    size: gl.constexpr = config.columns * 128
    none = gl.program_id(1)  # 0, but the compiler does not know: written out, a short loop takes too many registers
    for within in range(count + none):
        turn = chunk * count + within
        inside = turn < config.turns - 1
        there = ()
        for s in gl.static_range(len(offsets)):
            at = offsets[s] + (turn + 1) * (config.body * config.stream_words[s] * (32 * 4 if s == 0 else 8))
            if config.again:
                at = gl.where(inside, at, after[s])
            there = there + (at,)
        there = weights.pointers_at(there)
        more = gl.where(inside, 1, further)
        at = within * (config.body * size) + chunk % 2 * config.chunk_bytes
        held, sums = blocks(held, sums, x, at, there, there, more, weights)
    return held, sums


# -- sums of all of K


@gluon.jit
def send(at, four, to, bar, pred, block):
    """Sums at a place of the block's tile, in bytes, go to the block that finishes them."""
    own: gl.constexpr = block.config.sums * 4 // block.config.cluster
    st_async(to + block.rank * own + (at & (own - 1)), at // own, four[0], four[1], four[2], four[3], bar, pred)


@gluon.jit
def reduce(sums, count, block):
    """Adds up what a block's warps, and the cluster's blocks, have of K: where in shared memory the sums of the rows that the
    block finishes lie, how far apart the parts of which there are `parts` (`of_own_rows`).

    Args:
        sums: a warp's.
        count: row tiles before this one.
    """
    config: gl.constexpr = block.config
    eights: gl.constexpr = config.columns // 8
    split: gl.constexpr = config.cluster > 1
    quarters: gl.constexpr = config.sums // 4
    thread = thread_number(block.tid)  # registers are scarce until here
    base = shared_base()
    corner = (thread & 31) * 16
    down = (thread // 32) & (config.row_warps - 1)
    along = thread // (32 * config.row_warps)
    bar = base + BARRIER_AT + (count & 1) * 8
    sent = base + config.sent_at + (count & 1) * (config.sums * 4)
    barrier()  # all have read what lay here, and what came for the row tile before
    if split and config.direct and not config.again:
        cluster_wait()
    for tile in gl.static_range(config.tiles):
        if config.wide:
            sixteen = down + tile * config.row_warps
        else:
            sixteen = down * config.tiles + tile
        for j in gl.static_range(eights):
            at = (sixteen * eights + j) * 512 + corner
            four = sums[(tile * eights + j) * 4 : (tile * eights + j + 1) * 4]
            if config.direct:
                send(at, four, sent, bar, 1, block)
            else:
                to = base + config.parts_at + along * (config.sums * 4) + at
                st_shared_v4(to, four[0], four[1], four[2], four[3])
    if not config.direct:
        barrier()
        if split and not config.again:
            cluster_wait()
        if split:
            for r in gl.static_range((quarters + 32 * config.warps - 1) // (32 * config.warps)):
                i = thread + r * (32 * config.warps)
                pred = (i < quarters).to(gl.int32)
                i = gl.minimum(i, quarters - 1)
                four = ld_shared_v4(base + config.parts_at + i * 16)
                for k in gl.static_range(1, config.k_warps):
                    more = ld_shared_v4(base + (config.parts_at + k * config.sums * 4) + i * 16)
                    four = (four[0] + more[0], four[1] + more[1], four[2] + more[2], four[3] + more[3])
                send(i * 16, four, sent, bar, pred, block)
    if split:
        mbarrier_wait(bar, (count >> 1) & 1)
        if config.again:
            mbarrier_expect(bar, config.sums * 4, (thread == 0).to(gl.int32))


@gluon.jit
def of_own_rows(place, count, config: gl.constexpr):
    """What is at a place of each part of the rows that a block finishes, in bytes, added up."""
    base = shared_base()
    if config.cluster > 1:
        at = base + config.sent_at + (count & 1) * (config.sums * 4) + place
        apart: gl.constexpr = config.sums * 4 // config.cluster
        parts: gl.constexpr = config.cluster
    else:
        at = base + config.parts_at + place
        apart: gl.constexpr = config.sums * 4
        parts: gl.constexpr = config.k_warps
    found = ld_shared(at)
    for part in gl.static_range(1, parts):
        found += ld_shared(at + part * apart)
    return found


@gluon.constexpr_function
def of_results(config):
    """Results of a block, columns by rows, as threads hold them: neighbours along the first axis."""
    lanes = min(32, config.own_outs.value)
    down = max(min(config.warps.value, config.own_outs.value // lanes), 1)
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [down, config.warps.value // down], [0, 1])


@gluon.jit
def epilogue(row_tile, count, block, side, store: gl.constexpr):
    """The block's rows of the tile leave: a column of the results after the other along the first axis; where two rows make
    one, which a lane held both (`pack.in_turn`), the other one is `second`."""
    config: gl.constexpr = block.config
    layout: gl.constexpr = of_results(config)
    r = gl.arange(0, config.own_outs, gl.SliceLayout(1, layout))
    c = gl.arange(0, config.columns, gl.SliceLayout(0, layout))
    if config.halves == 1:
        of_rows = r // 16 * (config.columns * 16) + r % 8 * 16 + r // 8 % 2 * 2
    else:
        of_rows = r // 8 * (config.columns * 16) + r % 8 * 16
    of_columns = c // 8 * 128 + c % 8 // 2 * 4 + c % 2
    place = (of_rows[:, None] + of_columns[None, :]) * 4
    y = of_own_rows(place, count, config)
    outs = row_tile * (config.out_tile // config.halves) + block.rank * config.own_outs + r
    if config.halves == 1:
        store(y, y, c, outs, side)
    else:
        store(y, of_own_rows(place + 8, count, config), c, outs, side)


# -- the kernel


@gluon.jit
def gemm(x, words, side, config: gl.constexpr, store: gl.constexpr):
    """
    Args:
        x: the other operand, rows of K.
        words: of codes, scales and maybe zero points (`pack.py`).
        side: what `store` reads and writes: pointers and numbers.
        config: see `form.KernelConfig`.
        store: the program's function of sums (and `second`), of rows of the other operand and of columns of the results.
    """
    rows: gl.constexpr = config.shared_bytes // 512
    room = gl.allocate_shared_memory(gl.int32, [rows, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    room.index(0).store(gl.zeros([128], gl.int32, threads(config)))  # else there is none
    block = begin(config)
    weights = Weights(words, block, config)
    held = prologue(x, weights)
    if config.again:
        if config.cluster > 1:
            cluster_wait()
        count = 0
        for row_tile in range(block.cluster, config.row_tiles, config.clusters):
            held, sums = mainloop(held, row_tile, x, weights)
            if not config.soon:
                gdc_launch_dependents()
            reduce(sums, count, block)
            epilogue(row_tile, count, block, side, store)
            count += 1
    else:
        _, sums = mainloop(held, block.cluster, x, weights)
        if not config.soon:
            gdc_launch_dependents()
        reduce(sums, 0, block)
        epilogue(block.cluster, 0, block, side, store)
    room._keep_alive()  # it is addressed by hand
