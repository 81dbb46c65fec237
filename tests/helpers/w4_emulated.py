"""A machine that runs the text of `hopper_w4`'s kernels: Gluon as arithmetic on arrays, an element a thread, and its PTX.

Every instruction of the text is done as the PTX ISA says, products with exact sums rounded once. Threads of a block go in
step, blocks of a cluster in Python threads that meet where the text says so.
"""

import re
import threading

import numpy as np
import torch

APART = 1 << 40  # addresses between one tensor and the next


class Values(np.ndarray):
    """A tensor of Gluon."""

    def to(self, dtype):
        return dtype(self) if callable(dtype) and not isinstance(dtype, type) else self.astype(dtype).view(Values)


def values(x, dtype=None):
    return np.asarray(x, dtype=dtype).view(Values)


class Memory:
    """Tensors of a kernel by address."""

    def __init__(self):
        self.tensors = []

    def add(self, t):
        self.tensors.append(t.reshape(-1).view(torch.uint8).numpy())
        return len(self.tensors) * APART

    def bytes_at(self, address, count):
        t = self.tensors[int(address) // APART - 1]
        at = int(address) % APART
        assert at + count <= len(t), "reads or writes past the end of a tensor"
        return t[at : at + count]


class Pointer:
    def __init__(self, memory, address, dtype):
        self.memory, self.address, self.dtype = memory, address, dtype

    def __add__(self, offset):
        return Pointer(self.memory, self.address + np.asarray(offset, np.int64) * self.dtype.itemsize, self.dtype)

    def to(self, _):
        return values(self.address)


class Language:
    """What `gl` is in the text, for one block."""

    int32, int64, float32, float16 = np.int32, np.int64, np.float32, np.float16
    constexpr = staticmethod(lambda x: x)

    def __init__(self, machine, block):
        self.machine, self.block = machine, block
        bf16 = lambda x: torch.from_numpy(np.asarray(x, np.float32)).to(torch.bfloat16).view(torch.int16).numpy().view(Values)  # noqa: E731
        self.bfloat16 = bf16

    def BlockedLayout(self, *_):
        return None

    SwizzledSharedLayout = SliceLayout = BlockedLayout

    def allocate_shared_memory(self, dtype, shape, layout):
        self.block.shared = np.full(shape[0] * shape[1] * 4, 0xFF, np.uint8)  # NaN wherever nobody wrote
        return self

    def index(self, _):
        return self

    def _keep_alive(self):
        pass

    def store(self, to, value=None, mask=None):
        if value is None:
            return
        address, value = np.broadcast_arrays(to.address, value)
        keep = np.broadcast_to(True if mask is None else mask, address.shape)
        for a, v in zip(address[keep].ravel(), value[keep].ravel(), strict=True):
            to.memory.bytes_at(a, to.dtype.itemsize)[:] = np.frombuffer(v.astype(to.dtype).tobytes(), np.uint8)

    def load(self, source, mask=None, other=0):
        address = np.asarray(source.address)
        keep = np.broadcast_to(True if mask is None else mask, address.shape)
        found = np.zeros(address.shape, source.dtype)
        for i in np.ndindex(address.shape):
            if keep[i]:
                found[i] = np.frombuffer(source.memory.bytes_at(address[i], source.dtype.itemsize).tobytes(), source.dtype)[0]
        return values(found)

    def zeros(self, shape, dtype, layout):
        return values(np.zeros(shape, dtype))

    def arange(self, first, last, layout):
        return values(np.arange(first, last, dtype=np.int32))

    def program_id(self, axis):
        return self.block.number if axis == 0 else 0

    def minimum(self, a, b):
        return values(np.minimum(a, b))

    def fma(self, a, b, c):
        return values((np.multiply(a, b, dtype=np.float64) + c).astype(np.float32))

    def maximum(self, a, b):
        return values(np.maximum(a, b))

    def where(self, c, a, b):
        return values(np.where(c, a, b))

    def inline_asm_elementwise(self, text, constraints, arguments, dtype, is_pure, pack):
        kinds = dtype if isinstance(dtype, tuple) else (dtype,)
        results = self.machine.execute(self.block, text, constraints.split(","), arguments, kinds)
        return results if isinstance(dtype, tuple) else results[0]


class Block:
    def __init__(self, number, threads):
        self.number, self.threads = number, threads
        self.wanted, self.received, self.times, self.armed = (
            {},
            {},
            {},
            {},
        )  # bytes of a barrier, and how often somebody waited for it
        self.copying = [[]]  # groups of copies under way


class Machine:
    """Runs a kernel's module text.

    Args:
        text: of the module; cluster: blocks of a cluster; threads: of a block.
    """

    def __init__(self, text, cluster, threads):
        self.text, self.cluster, self.threads = text, cluster, threads
        self.memory = Memory()
        self.parsed = {}
        self.lock = threading.Lock()

    def run(self, grid, tensors, dtypes):
        pointers = [(self.memory.add(t), np.dtype(d)) for t, d in zip(tensors, dtypes, strict=True)]
        body = re.sub(r"(?m)^(import|from) .*$|^@gluon.jit$", "", self.text)
        for first in range(0, grid, self.cluster):
            self.blocks = [Block(first + i, self.threads) for i in range(self.cluster)]
            self.meeting = threading.Barrier(self.cluster)
            failures = []

            def one(block, failures=failures):
                scope = {"gl": Language(self, block)}
                try:
                    exec(compile(body, "<kernel>", "exec"), scope)
                    scope["gemm"](*(Pointer(self.memory, np.int64(a), d) for a, d in pointers))
                except Exception as error:
                    failures.append(error)
                    self.meeting.abort()

            workers = [threading.Thread(target=one, args=(b,)) for b in self.blocks]
            for w in workers:
                w.start()
            for w in workers:
                w.join()
            real = [f for f in failures if not isinstance(f, threading.BrokenBarrierError)]
            if real:
                raise real[0]

    # -- PTX

    def execute(self, block, text, constraints, arguments, kinds):
        shape = np.broadcast_shapes(*(np.shape(a) for a in arguments))
        outs = len(kinds)
        regs = {}
        for i, (a, c) in enumerate(zip(arguments, constraints[outs:], strict=True)):
            a = np.broadcast_to(np.asarray(a), shape).ravel()
            if c.isdigit():  # the same register as that result
                regs[f"${c}"] = a.astype(np.float32).view(np.uint32)
                continue
            raw = a.astype(np.float32).view(np.uint32) if c == "f" else a.astype(np.int64 if c == "l" else np.int32)
            regs[f"${outs + i}"] = raw.view(np.uint64 if c == "l" else np.uint32)
        count = int(np.prod(shape))
        for line in self._instructions(text):
            Instruction(self, block, regs, count).do(line)
        found = []
        for i, k in enumerate(kinds):
            raw = regs[f"${i}"].view(np.float32 if k is np.float32 else np.int32)
            found.append(values(raw.reshape(shape).copy()))
        return tuple(found)

    def _instructions(self, text):
        known = self.parsed.get(text)
        if known is None:
            text = re.sub(r"//[^\n]*", "", text)
            known = self.parsed[text] = [
                part
                for raw in text.replace("\n", " ").split(";")
                if (part := re.sub(r"^(\{|\}|\s|L:)+(?=[@.a-z]|$)", "", raw).strip()) and not part.startswith(".reg")
            ]
        return known


class Instruction:
    def __init__(self, machine, block, regs, count):
        self.machine, self.block, self.regs, self.count = machine, block, regs, count

    def do(self, line):
        keep = np.ones(self.count, bool)
        m = re.match(r"@(!?)(\w+) (.*)", line)
        if m:
            keep = self.regs[m[2]].astype(bool) ^ bool(m[1])
            line = m[3]
        name, _, rest = line.partition(" ")
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if o.strip()]
        for prefix, method in self.TABLE:
            if name.startswith(prefix):
                return method(self, name, operands, keep)
        raise NotImplementedError(line)

    def get(self, o, dtype=np.uint32):
        o = o.strip("[] ")
        m = re.fullmatch(r"(\S+)\+(\d+)", o)
        if m:
            return self.get(m[1]) + np.uint32(int(m[2]))
        if re.fullmatch(r"0f[0-9a-f]{8}", o):
            return np.full(self.count, int(o[2:], 16), np.uint32).view(dtype)
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", o):
            return np.full(self.count, int(o, 0), np.int64).astype(np.uint64 if dtype == np.uint64 else np.uint32).view(dtype)
        if o == "%tid.x":
            return np.arange(self.count, dtype=np.uint32)
        if o == "global_smem":
            return np.zeros(self.count, np.uint32)
        return self.regs[o].view(dtype)

    def put(self, o, value):
        value = np.ascontiguousarray(value)
        self.regs[o] = value if value.dtype in (np.uint64, np.bool_, np.uint16) else value.view(np.uint32)

    def several(self, o):
        return [x.strip() for x in o.strip("{} ").split(",")]

    # one method an instruction

    def mov(self, name, o, keep):
        if o[0].startswith("{"):
            lo, hi = self.several(o[0])
            word = self.get(o[1])
            self.put(lo, (word & 0xFFFF).astype(np.uint16))
            self.put(hi, (word >> 16).astype(np.uint16))
        elif o[1].startswith("{"):
            lo, hi = (self.get(x).astype(np.uint64) for x in self.several(o[1]))
            self.put(o[0], lo | hi << np.uint64(32))
        else:
            self.put(o[0], self.get(o[1]).copy())

    def cvt(self, name, o, keep):
        self.put(o[0], self.regs[o[1]].view(np.float16).astype(np.float32))

    def cvt_e4m3(self, name, o, keep):
        raw = np.stack([self.regs[o[1]] & 0xFF, self.regs[o[1]] >> 8], -1).astype(np.uint8)
        self.packed(o, torch.float16, torch.from_numpy(raw.reshape(-1)).view(torch.float8_e4m3fn).float())

    def prmt(self, name, o, keep):
        both = np.stack([self.get(o[1]), self.get(o[2])], -1).view(np.uint8)
        pick = int(o[3], 16)
        self.put(o[0], np.stack([both[:, pick >> 4 * i & 7] for i in range(4)], -1).copy().view(np.uint32)[:, 0])

    def shl(self, name, o, keep):
        self.put(o[0], self.get(o[1]) << self.get(o[2]))

    def shr(self, name, o, keep):
        self.put(o[0], self.get(o[1]) >> self.get(o[2]))

    def both(self, name, o, keep):
        self.put(o[0], self.get(o[1]) & self.get(o[2]))

    def xor(self, name, o, keep):
        self.put(o[0], self.get(o[1]) ^ self.get(o[2]))

    def lop3(self, name, o, keep):
        assert o[4] == "0xea"
        self.put(o[0], (self.get(o[1]) & self.get(o[2])) | self.get(o[3]))

    def shf(self, name, o, keep):
        wide = self.get(o[1]).astype(np.uint64) | (self.get(o[2]).astype(np.uint64) << np.uint64(32))
        self.put(o[0], (wide >> np.uint64(int(o[3]))).astype(np.uint32))

    def halves(self, name, o):
        kind = torch.bfloat16 if "bf16x2" in name else torch.float16
        a, b = (torch.from_numpy(self.get(x).copy().view(np.int16)).view(kind).float() for x in o[1:3])
        return kind, a, b

    def packed(self, o, kind, value):
        self.put(o[0], value.to(kind).view(torch.int16).numpy().view(np.uint32))

    def sub(self, name, o, keep):
        kind, a, b = self.halves(name, o)
        self.packed(o, kind, a - b)

    def mul(self, name, o, keep):
        kind, a, b = self.halves(name, o)
        self.packed(o, kind, a * b)

    def fma(self, name, o, keep):
        a, b, c = (self.get(x, np.float32).astype(np.float64) for x in o[1:])
        self.put(o[0], (a * b + c).astype(np.float32))

    def power(self, name, o, keep):
        with np.errstate(over="ignore"):
            self.put(o[0], np.exp2(self.get(o[1], np.float32)))

    def reciprocal(self, name, o, keep):
        self.put(o[0], (1 / self.get(o[1], np.float32)).astype(np.float32))

    def mul_f32(self, name, o, keep):
        self.put(o[0], self.get(o[1], np.float32) * self.get(o[2], np.float32))

    def sub_f32(self, name, o, keep):
        self.put(o[0], self.get(o[1], np.float32) - self.get(o[2], np.float32))

    def selp(self, name, o, keep):
        self.put(o[0], np.where(self.regs[o[3]], self.get(o[1]), self.get(o[2])))

    def setp(self, name, o, keep):
        a, b = self.get(o[1]), self.get(o[2])
        self.put(o[0], a != b if ".ne" in name else a == b)

    def add(self, name, o, keep):
        self.put(o[0], self.get(o[1]) + self.get(o[2]))

    def nothing(self, name, o, keep):
        pass

    def meet(self, name, o, keep):
        self.machine.meeting.wait(20)

    def come(self, name, o, keep):
        """All blocks have sent what they send; it must be what was to come."""
        self.machine.meeting.wait(20)
        block, barrier = self.block, int(self.get(o[1])[0])
        times = block.times[barrier] = block.times.get(barrier, 0) + 1
        assert (self.get(o[2]) == (times + 1) % 2).all(), "not the phase that is due"
        assert block.received[barrier] * block.armed[barrier] == block.wanted[barrier] * times, (
            "not the bytes that were to come"
        )
        self.put(o[0], np.ones(self.count, bool))

    def expect(self, name, o, keep):
        block = self.block
        for i in np.flatnonzero(keep):
            barrier = int(self.get(o[1])[i])
            block.wanted[barrier] = block.wanted.get(barrier, 0) + int(self.get(o[2])[i])
            block.armed[barrier] = block.armed.get(barrier, 0) + 1

    def ld_global(self, name, o, keep):
        to = self.several(o[0]) if o[0].startswith("{") else [o[0]]
        found = np.full((self.count, len(to)), 0xFFFFFFFF, np.uint32)
        addresses = self.get(o[1], np.uint64)
        for i in np.flatnonzero(keep):
            a = addresses[i]
            assert a % (4 * len(to)) == 0
            found[i] = np.frombuffer(self.machine.memory.bytes_at(a, 4 * len(to)).tobytes(), np.uint32)
        for i, r in enumerate(to):
            self.put(r, found[:, i].copy())

    def words(self, address, count, block=None):
        """Views of shared memory."""
        shared = (block or self.block).shared.view(np.uint32)
        assert (address % (4 * count) == 0).all() and (address + 4 * count <= shared.nbytes).all()
        return shared, (address // 4)[:, None] + np.arange(count)

    def ld_shared(self, name, o, keep):
        to = self.several(o[0]) if o[0].startswith("{") else [o[0]]
        shared, at = self.words(np.where(keep, self.get(o[1]).astype(np.int64), 0), len(to))
        for i, r in enumerate(to):
            self.put(r, np.where(keep, shared[at[:, i]], self.regs.get(r, 0)).astype(np.uint32))

    def st_shared(self, name, o, keep):
        values = [self.get(x) for x in self.several(o[1])]
        shared, at = self.words(self.get(o[0]).astype(np.int64)[keep], len(values))
        written = np.stack(values, -1)[keep]
        shared[at] = written
        assert (shared[at] == written).all(), "two threads write different words to one place"

    def ldmatrix(self, name, o, keep):
        address = self.get(o[1]).astype(np.int64).reshape(-1, 4, 8)  # warp, matrix, row
        shared, at = self.words(address.ravel(), 4)
        rows = shared[at].reshape(-1, 4, 8, 4)  # ... words of a row
        for i, r in enumerate(self.several(o[0])):
            self.put(r, rows[:, i].reshape(-1).copy())  # lane = row * 4 + word

    def cp_async(self, name, o, keep):
        to, source, size = self.get(o[0]).astype(np.int64), self.get(o[1], np.uint64), self.get(o[3])
        for t, s, n in zip(to[keep], source[keep], size[keep], strict=True):
            piece = np.zeros(16, np.uint8)
            if n:
                piece[:] = self.machine.memory.bytes_at(s, 16)
            self.block.copying[-1].append((t, piece))

    def commit(self, name, o, keep):
        self.block.copying.append([])

    def arrived(self, name, o, keep):
        """Copies are there no sooner than somebody waits for them."""
        left = len(self.block.copying) - 1 - int(o[0])
        for group in self.block.copying[: max(left, 0)]:
            for t, piece in group:
                self.block.shared[t : t + 16] = piece
        del self.block.copying[: max(left, 0)]

    def mapa(self, name, o, keep):
        self.put(o[0], self.get(o[1]) | (self.get(o[2]) << 24))

    def st_async(self, name, o, keep):
        to = self.get(o[0])
        four = np.stack([self.get(x) for x in self.several(o[1])], -1)
        for i in np.flatnonzero(keep):
            block = self.machine.blocks[to[i] >> 24]
            at = int(to[i] & 0xFFFFFF) // 4
            block.shared.view(np.uint32)[at : at + 4] = four[i]
            barrier = int(self.get(o[2])[i] & 0xFFFFFF)
            with self.machine.lock:
                block.received[barrier] = block.received.get(barrier, 0) + 16

    def fragment(self, registers, operand):
        """The left operand of 16 x 16 of each warp."""
        raw = np.stack([self.get(r) for r in registers], -1).reshape(-1, 8, 4, 2, 2)  # warp g t half row-half
        pair = torch.from_numpy(raw.copy().view(np.int16).reshape(*raw.shape, 2)).view(operand).double().numpy()
        return pair.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)  # row-half g | half t pair

    def tf32(self, name, o, keep):
        """The left operand's rows g and g + 8 of column t, the right one's row t of column g."""
        a = np.stack([self.get(r) for r in self.several(o[1])], 1).reshape(-1, 8, 4, 2).transpose(0, 3, 1, 2).reshape(-1, 16, 4)
        b = self.get(self.several(o[2])[0]).reshape(-1, 8, 4).transpose(0, 2, 1)
        a, b = (np.ascontiguousarray(x & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (a, b))
        self.sums(self.several(o[0]), self.several(o[3]), a @ b)

    def mma(self, name, o, keep):
        operand = torch.bfloat16 if "bf16" in name else torch.float16
        a = self.fragment(self.several(o[1]), operand)
        raw = np.stack([self.get(r) for r in self.several(o[2])], -1).reshape(-1, 8, 4, 2)  # warp n t half
        b = torch.from_numpy(raw.copy().view(np.int16).reshape(*raw.shape, 2)).view(operand).double().numpy()
        b = b.transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
        self.sums(self.several(o[0]), self.several(o[3]), a @ b)

    def sums(self, to, before, product):
        """Registers of sums [warp, 16, 8 j]: of each 8 columns rows g and g + 8, columns 2 t and 2 t + 1."""
        warps, _, columns = product.shape
        p = product.reshape(warps, 2, 8, columns // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(warps * 32, -1)
        for i, r in enumerate(to):
            old = self.get(before[i], np.float32).astype(np.float64) if before else 0.0
            self.put(r, (old + p[:, i]).astype(np.float32))

    def wgmma(self, name, o, keep):
        operand = torch.bfloat16 if "bf16" in name else torch.float16
        columns = int(re.search(r"m64n(\d+)k16", name)[1])
        a = self.fragment(self.several(o[1]), operand)
        described = self.get(o[2], np.uint64).astype(np.uint64)
        use = self.regs[o[3]]
        assert o[4:] == ["1", "1", "0"] and use.all() == use.any()
        products = []
        for warp in range(a.shape[0]):
            of = described[warp * 32 : warp * 32 + 32]
            of_group = described[warp // 4 * 128 : warp // 4 * 128 + 128]
            assert (
                (of_group == of[0]).all() and of[0] >> np.uint64(62) == 1 and (of[0] >> np.uint64(32)) & np.uint64(0x3FFF) == 64
            )
            start = int(of[0] & np.uint64(0x3FFF)) * 16
            n, k = np.meshgrid(np.arange(columns), np.arange(16), indexing="ij")
            at = start + n * 128 + k * 2
            at ^= (at >> 7 & 7) << 4  # 128-byte swizzle of addresses
            raw = np.stack([self.block.shared[at], self.block.shared[at + 1]], -1)
            b = torch.from_numpy(raw.copy().view(np.int16)[..., 0]).view(operand).double().numpy()
            products.append(a[warp] @ b.T)
        self.sums(self.several(o[0]), self.several(o[0]) if use.all() else [], np.stack(products))

    TABLE = (
        ("mov.", mov),
        ("cvt.f32.f16", cvt),
        ("cvt.rn.f16x2.e4m3x2", cvt_e4m3),
        ("prmt.b32", prmt),
        ("shl.b32", shl),
        ("shr.", shr),
        ("and.b32", both),
        ("xor.b32", xor),
        ("lop3.b32", lop3),
        ("shf.r.wrap", shf),
        ("sub.rn.f32", sub_f32),
        ("mul.rn.f32", mul_f32),
        ("selp.f32", selp),
        ("sub.rn.", sub),
        ("mul.rn.", mul),
        ("fma.rn.f32", fma),
        ("setp", setp),
        ("add.s32", add),
        ("ex2.approx", power),
        ("rcp.approx", reciprocal),
        ("ld.global", ld_global),
        ("ld.shared", ld_shared),
        ("st.shared", st_shared),
        ("ldmatrix", ldmatrix),
        ("cp.async.cg", cp_async),
        ("cp.async.commit", commit),
        ("cp.async.wait_group", arrived),
        ("mapa", mapa),
        ("st.async", st_async),
        ("mma.sync.aligned.m16n8k4", tf32),
        ("mma.sync", mma),
        ("wgmma.mma_async", wgmma),
        ("wgmma.", nothing),
        ("bar.", nothing),
        ("bra", nothing),
        ("barrier.cluster.wait", meet),
        ("barrier.cluster.arrive", nothing),
        ("mbarrier.try_wait", come),
        ("mbarrier.init", nothing),
        ("mbarrier.arrive.expect_tx", expect),
        ("fence.", nothing),
        ("griddepcontrol", nothing),
    )
