"""Attention on Hopper over any number of keys: one warp brings keys and values into a ring in shared memory by TMA, two
warpgroups multiply them by 64 queries each and carry the largest score along (Dao et al. 2022, arXiv 2205.14135).

While a warpgroup works out the weights of some keys, the matrix unit multiplies those before them by their values; where the
warpgroups take turns, one is at its exponentials while the other one has the matrix unit (as in Shah et al. 2024, arXiv
2407.08608). Keys are taken from the last to the first, so that what is cut off comes first.
"""

from __future__ import annotations

from tilewright.candidates.triton.attention.heads import Heads
from tilewright.candidates.triton.attention.kernel import LOG2_E, power
from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.hopper.attention.attend import NONE, Writer, chained, pointer_of
from tilewright.candidates.triton.hopper.attention.sizes import ROWS, WIDEST, Point, Ring, brought
from tilewright.candidates.triton.hopper.attention.stream import (
    LOADING_REGISTERS,
    STREAMED,
    of_mask,
    operand_rooms,
    streamed_arguments,
)
from tilewright.candidates.triton.hopper.brief import NATIVE_FP8
from tilewright.dtype import DType

SCANNED = 512  # places of a mask that are read at once
MATH_REGISTERS = {1: 240, 2: 240, 3: 160}  # by warpgroups

OVERLAPPED = '''

@gluon.jit
def ex2_in_order(x):
    """`ex2` that LLVM leaves before waits that follow."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def most(x, L: gl.constexpr):
    """The largest of each row, of which a thread goes through four parts at once: each step waits for the one before."""
    parts = gl.max(x.reshape((x.shape[0], x.shape[1] // 8, 8)), 1)
    return gl.convert_layout(gl.max(parts, 1), gl.SliceLayout(1, L))


@gluon.jit
def added(x, L: gl.constexpr):
    """The sum of each row, likewise."""
    parts = gl.sum(x.reshape((x.shape[0], x.shape[1] // 8, 8)), 1)
    return gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, L))
'''


def flash_text(heads: Heads, ring: Ring) -> Written:
    """A module with the function `kernel` of descriptors of queries, keys and values, and of `streamed_arguments`."""
    return _Flash(heads, ring).kernel()


class _Flash(Writer):
    """The lines of one kernel."""

    def __init__(self, heads: Heads, ring: Ring) -> None:
        super().__init__(heads, Point(1, ones=False, ring=ring))
        views = brought(heads)
        assert views is not None
        self.views, self.arguments, self.stages = views, streamed_arguments(heads), ring.stages
        self.ring = ring
        self.hides = self.by_keys and not self.added  # some keys, the same for all queries
        self.parts = -(-heads.queries // (self.ring.groups * ROWS))
        self.chunks = -(-heads.keys // WIDEST)
        self.ragged = heads.queries % (self.ring.groups * ROWS) != 0
        self.shift = heads.keys - heads.queries if heads.causal == "lower" else 0

    @property
    def barriers(self) -> list[str]:
        """In shared memory, and `rooms`, what else is there: queries of each warpgroup, and stages of the ring."""
        more = ["n_ready", "n_empty"] * self.hides + ["turns"] * self.ring.turns
        return ["q_ready", "k_ready", "k_empty", "v_ready", "v_empty", *more]

    @property
    def rooms(self) -> list[str]:
        return ["qs", "kb", "vb", *["ms"] * self.by_keys, *["whole", "ns"] * self.hides]

    def kernel(self) -> Written:
        """The module."""
        load, math = self._load(), self._math()
        both = ["q_desc", "k_desc", "v_desc", *self.rooms, *self.barriers, *self.arguments, *self.text.numbers]
        entry = ["q_desc", "k_desc", "v_desc", *self.arguments, *self.text.numbers]
        functions = [("load", both, load), ("math", ["g: gl.constexpr", *both], math), ("kernel", entry, self._entry(both))]
        parts = [f"@gluon.jit\ndef {name}({', '.join(given)}):\n{body}" for name, given, body in functions]
        return Written("\n\n".join([STREAMED + OVERLAPPED * self.ring.overlapped, *parts]) + "\n", self.text.numbers)

    def _each_item(self) -> str:
        return f"for item in range(gl.program_id(0), {self.h.batch * self.h.heads * self.parts}, gl.num_programs(0)):"

    def _which(self, item: str) -> tuple[str, str]:
        """An item of work: a head, and which part of its queries, a tile for each warpgroup. Where causality makes some parts
        longer, those come first."""
        heads = self.h.batch * self.h.heads
        if self.h.causal == "no":
            return f"({item}) // {self.parts}", f"({item}) % {self.parts}"
        return f"({item}) % {heads}", f"{self.parts - 1} - ({item}) // {heads}"

    def _locate(self, t: Text) -> None:
        for name, value in zip(("head", "part"), self._which("item"), strict=True):
            t.do(f"{name} = {value}")

    def _count(self, t: Text) -> None:
        """Chunks of keys that the part sees."""
        if self.h.causal == "no":
            t.do(f"count = {self.chunks}")
        else:
            last = f"(part + 1) * {self.ring.groups * ROWS} + {self.shift}"
            t.do(f"count = gl.minimum(({last} + {WIDEST - 1}) // {WIDEST}, {self.chunks})")

    # -- the warp that loads

    def _load(self) -> Text:
        h, t = self.h, Text("gl", beside=self.text)
        t.do("at = 0")
        if self.hides:
            t.do("n = 0")
            t.do("ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])")
        with t.block(self._each_item()):
            self._locate(t)
            self._count(t)
            if self.hides:
                self._tell_count(t)
            t.do(f"key_head = head // {h.shared}")
            with t.block("for j in range(0, count):"):
                t.do(f"stage = at % {self.stages}")
                t.do(f"phase = at // {self.stages} % 2 ^ 1")
                t.do(f"key = (count - 1 - j) * {WIDEST}")
                if self.by_keys:
                    self._read_mask(t)
                for name, extent, dtype in (("k", h.depth, h.k.dtype), ("v", h.width, h.v.dtype)):
                    t.do(f"mbarrier.wait({name}_empty.index(stage), phase)")
                    t.do(f"mbarrier.expect({name}_ready.index(stage), {WIDEST * power(extent) * dtype.bits // 8})")
                    where = ", ".join(self.views["qkv".index(name)].array.coordinates("key_head", "key", "0"))
                    box = f"{name}b.index(stage)._reinterpret"
                    box += f"({name}_desc.dtype, {name}_desc.block_type.shape, {name}_desc.layout)"
                    t.do(f"tma.async_copy_global_to_shared({name}_desc, [{where}], {name}_ready.index(stage), {box})")
                    if name == "k" and self.by_keys:
                        t.do("ms.index(stage).store(mask)")
                        if self.hides:
                            t.do("whole.index(stage).store(gl.zeros([1], gl.int32, ONE) + (gl.min(mask, 0) > 0).to(gl.int32))")
                        t.do("mbarrier.arrive(k_ready.index(stage), count=1)")
                t.do("at += 1")
        return t

    def _tell_count(self, t: Text) -> None:
        """Chunks up to the last key that is seen: those after it are left out."""
        h = self.h
        assert h.mask is not None
        t.do(f"S: gl.constexpr = gl.BlockedLayout([1, {SCANNED // 32}], [1, 32], [1, 1], [1, 0])")
        t.do(f"all_rows = head * {h.queries} + gl.arange(0, 1, gl.SliceLayout(1, S))")
        t.do("last = 0")
        for start in range(0, h.keys, SCANNED):
            t.do(f"all{start} = {start} + gl.arange(0, {SCANNED}, gl.SliceLayout(0, S))")
            ragged = start + SCANNED > h.keys
            tile = Tile("all_rows", f"all{start}", h.keys, column_mask=t.v(f"all{start} < {h.keys}") if ragged else None)
            value = Emitter(t, tile, pointer_of, NATIVE_FP8).value(h.mask)
            t.do(f"last = gl.maximum(last, gl.max(gl.max(gl.where({value}, all{start}[None, :], 0), 1), 0))")
        t.do(f"count = gl.minimum(count, last // {WIDEST} + 1)")
        t.do("mbarrier.wait(n_empty.index(n % 2), n // 2 % 2 ^ 1)")
        t.do("ns.index(n % 2).store(gl.zeros([1], gl.int32, ONE) + count)")
        t.do("mbarrier.arrive(n_ready.index(n % 2), count=1)")
        t.do("n += 1")

    def _hear_count(self) -> None:
        do = self.text.do
        do("mbarrier.wait(n_ready.index(n % 2), n // 2 % 2)")
        do("count = gl.max(ns.index(n % 2).load(ONE), 0)")
        do("mbarrier.arrive(n_empty.index(n % 2))")
        do("n += 1")

    def _read_mask(self, t: Text) -> None:
        """What is done to the scores of each key: the least of both is taken (infinities), or it is added."""
        h = self.h
        assert h.mask is not None
        t.do(f"M: gl.constexpr = gl.BlockedLayout([1, {WIDEST // 32}], [1, 32], [1, 1], [1, 0])")
        t.do(f"rows = head * {h.queries} + gl.arange(0, 1, gl.SliceLayout(1, M))")
        t.do(f"columns = key + gl.arange(0, {WIDEST}, gl.SliceLayout(0, M))")
        value = of_mask(t, h, "columns", ragged=h.keys % WIDEST > 0)
        t.do(f"mask = gl.max({value}, 0)")

    # -- the warpgroups that multiply

    def _math(self) -> Text:
        h, do = self.h, self.text.do
        self._layouts()
        for name in ("at", "came", *["n"] * self.hides):
            do(f"{name} = 0")
        if self.hides:
            do("ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])")
        if self.ring.turns:
            do("turn = 1 if g == 0 else 0")
        self._ask("gl.program_id(0)")
        with self.text.block(self._each_item()):
            self._locate(self.text)
            if self.hides:
                self._hear_count()
            else:
                self._count(self.text)
            do(f"tile = part * {self.ring.groups} + g")
            do("mbarrier.wait(q_ready.index(g), came)")
            do("came = came ^ 1")
            self._products("at", first=True)
            do("s = warpgroup_mma_wait(0, deps=(s,))")
            self._scores_done("count - 1", first=True)
            do(f"top = {self._by_rows('most', 's')}")
            self._base()
            self._turn()
            self._weigh_all()
            do(f"total = {self._by_rows('added', 'e')}")
            self._turned()
            do(f"w = gl.convert_layout(e.to(gl.{self.unit}), A)")
            do(f"acc = warpgroup_mma_init(gl.zeros([{ROWS}, {power(h.width)}], gl.float32, O))")
            self._before_waiting("at")
            with self.text.block("for j in range(1, count):"):
                self._products("at + j", first=False)
                do("s = warpgroup_mma_wait(1, deps=(s,))")
                self._scores_done("count - 1 - j", first=False)
                do("before = base")
                do(f"top = gl.maximum(top, {self._by_rows('most', 's')})")
                self._base()
                do("shrink = ex2(gl.minimum(base - before, 0.0))")  # above zero where no key was seen before
                self._turn()
                self._weigh_all()
                do(f"total = total * shrink + {self._by_rows('added', 'e')}")
                self._turned()
                do(f"following = gl.convert_layout(e.to(gl.{self.unit}), A)")
                self._before_waiting("at + j")
                do("x = warpgroup_mma_wait(0, deps=(acc,))")
                do(f"mbarrier.arrive(v_empty.index((at + j - 1) % {self.stages}))")
                do("x = x * gl.convert_layout(shrink, R)[:, None]")
                do("acc = warpgroup_mma_init(x)")
                do("w = following")
            do("gl.thread_barrier()")
            with self.text.block(f"if item + gl.num_programs(0) < {h.batch * h.heads * self.parts}:"):
                self._ask("item + gl.num_programs(0)")
            self._values("at + count - 1")
            do("x = warpgroup_mma_wait(0, deps=(acc,))")
            do(f"mbarrier.arrive(v_empty.index((at + count - 1) % {self.stages}))")
            do("at += count")
            do("inverse = 1.0 / gl.convert_layout(total, R)")
            if h.zero_masked_rows and h.mask is not None:
                do("inverse = gl.where(gl.convert_layout(total, R) == 0.0, 0.0, inverse)")
            self._store()
        return self.text

    def _ask(self, item: str) -> None:
        """Has TMA bring a tile of queries, once those before it are multiplied."""
        h, do = self.h, self.text.do
        head, part = self._which(item)
        do(f"asked_head = {head}")
        do(f"asked = (({part}) * {self.ring.groups} + g) * {ROWS}")
        do(f"mbarrier.expect(q_ready.index(g), {ROWS * power(h.depth) * h.q.dtype.bits // 8})")
        where = ", ".join(self.views[0].array.coordinates("asked_head", "asked", "0"))
        into = "qs.index(g)._reinterpret(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)"
        do(f"tma.async_copy_global_to_shared(q_desc, [{where}], q_ready.index(g), {into})")

    def _products(self, at: str, *, first: bool) -> None:
        """Asks for the scores of a chunk, and then for what the weights before it make of their values."""
        do = self.text.do
        do(f"stage = ({at}) % {self.stages}")
        do(f"mbarrier.wait(k_ready.index(stage), ({at}) // {self.stages} % 2)")
        q, k = self._codes("qs.index(g)", ROWS), self._codes("kb.index(stage)", WIDEST)
        zeros = f"gl.zeros([{ROWS}, {WIDEST}], gl.float32, L{WIDEST})"
        do(f"s = warpgroup_mma({q}, {k}.permute((1, 0)), {zeros}, use_acc=False, is_async=True)")
        if not first:
            self._values(f"{at} - 1")

    def _values(self, at: str) -> None:
        """Asks for what weights make of the values of a chunk."""
        if not self.ring.overlapped:
            self._values_came(at)
        self.text.do(f"acc = warpgroup_mma(w, vb.index(({at}) % {self.stages}), acc, use_acc=True, is_async=True)")

    def _before_waiting(self, at: str) -> None:
        """As the wait for a chunk's values is a loop, ptxas leaves before it what stands there: it would move the wait for the
        products before up to the exponentials, which are to be worked out meanwhile."""
        if self.ring.overlapped:
            self._values_came(at)

    def _values_came(self, at: str) -> None:
        self.text.do(f"mbarrier.wait(v_ready.index(({at}) % {self.stages}), ({at}) // {self.stages} % 2)")

    def _by_rows(self, function: str, of: str) -> str:
        """The largest or the sum of each row."""
        if self.ring.overlapped:
            return f"{function}({of}, L{WIDEST})"
        return f"gl.{'max' if function == 'most' else 'sum'}({of}, 1)"

    def _scores_done(self, chunk: str, *, first: bool) -> None:
        """Scores are hidden, and their keys given back."""
        h, t = self.h, self.text
        column = f"gl.arange(0, {WIDEST}, gl.SliceLayout(0, L{WIDEST}))"
        if self.by_keys:
            value = f"ms.index(stage).load(gl.SliceLayout(0, L{WIDEST}))[None, :]"
            scale = self.of_scale("scale", h.scale * LOG2_E)
            if self.added:
                t.do(f"s = gl.fma(s, {scale}, {value})")
            else:
                with t.block("if gl.max(whole.index(stage).load(ONE), 0) == 0:"):
                    t.do(f"s = gl.minimum(s, {value})")
        t.do("mbarrier.arrive(k_empty.index(stage))")
        if first and h.keys % WIDEST:
            with t.block(f"if {chunk} == {self.chunks - 1}:"):
                t.do(f"s = gl.where(({column} < {h.keys % WIDEST})[None, :], s, {NONE})")
        if h.causal != "no":
            with t.block(f"if tile * {ROWS} + {self.shift} < ({chunk}) * {WIDEST} + {WIDEST - 1}:"):
                row = f"tile * {ROWS} + {self.shift} + gl.arange(0, {ROWS}, gl.SliceLayout(1, L{WIDEST}))"
                t.do(f"s = gl.where(({row})[:, None] >= (({chunk}) * {WIDEST} + {column})[None, :], s, {NONE})")

    def _base(self) -> None:
        """What is added to scores, so that the largest power of two is one."""
        seen = f"gl.where(top == {NONE}, 0.0, top)" if self.h.mask is not None or self.h.causal != "no" else "top"
        self.text.do(f"base = {seen} * {self.of_scale('opposite', -self.factor)}")

    def _weigh_all(self) -> None:
        factor = self.of_scale("factor", self.factor)
        ex2 = "ex2_in_order" if self.ring.overlapped else "ex2"
        self.text.do(f"e = {ex2}({'s + base[:, None]' if self.added else f'gl.fma(s, {factor}, base[:, None])'})")

    def _turn(self) -> None:
        if self.ring.turns:
            self.text.do("mbarrier.wait(turns.index(g), turn)")
            self.text.do("turn = turn ^ 1")

    def _turned(self) -> None:
        if self.ring.turns:
            self.text.do(f"mbarrier.arrive(turns.index((g + 1) % {self.ring.groups}))")

    # -- the kernel

    def _entry(self, given: list[str]) -> Text:
        h, t = self.h, Text("gl")
        rooms: list[tuple[str, int, int, int, DType]] = [
            ("qs", self.ring.groups, ROWS, h.depth, self.first),
            ("kb", self.stages, WIDEST, h.depth, self.first),
            ("vb", self.stages, WIDEST, h.width, h.unit),
        ]
        operand_rooms(t, rooms)
        if self.by_keys:
            layout = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
            t.do(f"ms = gl.allocate_shared_memory(gl.float32, [{self.stages}, {WIDEST}], {layout})")
        for name, count in (("whole", self.stages), ("ns", 2)):
            if self.hides:
                layout = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
                t.do(f"{name} = gl.allocate_shared_memory(gl.int32, [{count}, 1], {layout})")
        for name in self.barriers:
            n = self.ring.groups if name in ("q_ready", "turns") else 2 if name[0] == "n" else self.stages
            arrivals = self.ring.groups if name.endswith("empty") else 2 if name == "k_ready" and self.by_keys else 1
            t.do(f"{name} = gl.allocate_shared_memory(gl.int64, [{n}, 1], mbarrier.MBarrierLayout())")
            with t.block(f"for i in gl.static_range({n}):"):
                t.do(f"mbarrier.init({name}.index(i), count={arrivals})")
        call, groups = ", ".join(given), self.ring.groups
        registers = [MATH_REGISTERS[groups]] * (groups - 1) + [LOADING_REGISTERS]
        chained(t)
        parts = [*(f"(math, ({g}, {call},))" for g in range(self.ring.groups)), f"(load, ({call},))"]
        t.do(f"gl.warp_specialize([{', '.join(parts)}], {[4] * (groups - 1) + [1]}, {registers})")
        return t
