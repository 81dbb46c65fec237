"""Attention on Hopper whose blocks stay: one warp brings the keys and values of a block's next head by TMA while two warpgroups
multiply those of this one.

A tile is what it is in `attend.py`: all scores of 64 queries in a warpgroup's registers. The warpgroups take every
other tile of a head, and have its queries brought themselves, into the place of those that they have multiplied. Chunks of
keys that a mask hides to the last one are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.candidates.triton.attention.heads import Heads
from tilewright.candidates.triton.attention.kernel import LOG2_E, power
from tilewright.candidates.triton.expressions.casts import in_memory
from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.hopper.attention.attend import NATIVE_FP8, NONE, PROLOGUE, WARPS, Writer, chained, pointer_of
from tilewright.candidates.triton.hopper.attention.functions import streamed_arguments
from tilewright.candidates.triton.hopper.attention.sizes import AHEAD, GROUPS, ROWS, WIDEST, Chunk, Point, brought, chunks
from tilewright.dtype import F32, PRED, DType

MATH_REGISTERS, LOADING_REGISTERS = 240, 24  # of 64K in all, for 128 threads each
_MORE = '''\
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def pin(x):
    """The number, worked out here."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
'''
STREAMED = PROLOGUE.replace("\n\n\n@", f"\n{_MORE}\n\n@", 1)


def streamed_text(heads: Heads, point: Point) -> Written:
    """A module with the function `kernel` of descriptors of queries, keys and values, and of `streamed_arguments`."""
    return Streamed(heads, point).kernel()


def operand_rooms(t: Text, rooms: Sequence[tuple[str, int, int, int, DType]]) -> None:
    """Shared memory for operands: of each its name, how many tiles of it, their rows and columns, and the type."""
    for name, count, rows, columns, dtype in rooms:
        shape, kind = [rows, power(columns)], f"gl.{in_memory(dtype)}"
        layout = f"gl.NVMMASharedLayout.get_default_for({shape}, {kind})"
        t.do(f"{name} = gl.allocate_shared_memory({kind}, {[count, *shape]}, {layout})")


class Streamed(Writer):
    """The lines of one kernel."""

    def __init__(self, heads: Heads, point: Point) -> None:
        super().__init__(heads, point)
        views = brought(heads)
        assert views is not None
        self.views, self.arguments = views, streamed_arguments(heads)

    @property
    def barriers(self) -> list[str]:
        """In shared memory, and `rooms`, what else is there: for each warpgroup queries, for each of `AHEAD` heads the rest."""
        return ["q_ready", "k_ready", "k_empty", "v_ready", "v_empty", *["m_ready"] * self.by_keys]

    @property
    def rooms(self) -> list[str]:
        return ["qs", "kb", "vb", *["ms"] * self.by_keys, *["ones"] * self.p.ones]

    def kernel(self) -> Written:
        """The module."""
        load, math = self._load(), self._math()
        numbers, descriptors = self.text.numbers, ["q_desc", "k_desc", "v_desc"]
        both = [*descriptors, *self.rooms, *self.barriers, *self.arguments, *numbers]
        functions = [("load", both, load), ("math", ["g: gl.constexpr", *both], math)]
        functions.append(("kernel", [*descriptors, *self.arguments, *numbers], self._entry(", ".join(both))))
        parts = [f"@gluon.jit\ndef {name}({', '.join(given)}):\n{body}" for name, given, body in functions]
        return Written("\n\n".join([STREAMED, *parts]) + "\n", numbers)

    # -- the warp that loads

    def _each_head(self) -> str:
        return f"for at in range(gl.program_id(0), {self.h.batch * self.h.heads}, gl.num_programs(0)):"

    def _head(self, at: str) -> str:
        """From the last to the first: what the product before wrote last is still in the L2 cache."""
        return f"{self.h.batch * self.h.heads - 1} - ({at})"

    def _load(self) -> Text:
        h, t = self.h, Text("gl", beside=self.text)
        whole = chunks(h.keys)
        t.do("n = 0")
        with t.block(self._each_head()):
            t.do(f"head = {self._head('at')}")
            t.do(f"key_head = head // {h.shared}")
            t.do(f"side = n % {AHEAD}")
            t.do(f"phase = n // {AHEAD} % 2 ^ 1")
            t.do("mbarrier.wait(k_empty.index(side), phase)")
            t.do(f"mbarrier.expect(k_ready.index(side), {len(whole) * self._chunk_bytes(h.k.dtype, h.depth)})")
            for i, c in enumerate(whole):
                self._bring(t, "k", c, "k_ready.index(side)", f"kb.index({self._slot(i)})")
            t.do("mbarrier.wait(v_empty.index(side), phase)")
            for i, c in enumerate(whole):
                ready = f"v_ready.index({self._slot(i)})"
                t.do(f"mbarrier.expect({ready}, {self._chunk_bytes(h.v.dtype, h.width)})")
                self._bring(t, "v", c, ready, f"vb.index({self._slot(i)})")
            if self.by_keys:
                self._bring_mask(t)
            t.do("n += 1")
        return t

    def _slot(self, i: int) -> str:
        return f"side * {len(chunks(self.h.keys))} + {i}"

    def _chunk_bytes(self, dtype: DType, extent: int) -> int:
        return chunks(self.h.keys)[0].extent * power(extent) * dtype.bits // 8

    def _bring(self, t: Text, name: str, c: Chunk, ready: str, into: str) -> None:
        """Has TMA bring a chunk of keys or values."""
        view = self.views["qkv".index(name)]
        where = ", ".join(view.array.coordinates("key_head", str(c.start), "0"))
        box = f"{into}._reinterpret({name}_desc.dtype, {name}_desc.block_type.shape, {name}_desc.layout)"
        t.do(f"tma.async_copy_global_to_shared({name}_desc, [{where}], {ready}, {box})")

    def _bring_mask(self, t: Text) -> None:
        """What is done to the scores of each key: the least of both is taken (infinities), or it is added."""
        h = self.h
        assert h.mask is not None
        t.do("M: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])")
        t.do(f"rows = head * {h.queries} + gl.arange(0, 1, gl.SliceLayout(1, M))")
        for i, c in enumerate(chunks(h.keys)):
            t.do(f"t{i} = {c.start} + gl.arange(0, {chunks(h.keys)[0].extent}, gl.SliceLayout(0, M))")
            ragged = c.start + chunks(h.keys)[0].extent > h.keys
            value = of_mask(t, h, f"t{i}", ragged=ragged)
            t.do(f"ms.index({self._slot(i)}).store(gl.max({value}, 0))")
        t.do("mbarrier.arrive(m_ready.index(side), count=1)")

    def _mask_of(self, i: int, extent: int) -> str:
        part = "" if extent == chunks(self.h.keys)[0].extent else f".slice(0, {extent})"
        return f"ms.index({self._slot(i)}){part}"

    def hide_keys(self, i: int, c: Chunk) -> bool:
        if not self.by_keys:
            return False
        do, score = self.text.do, f"s{c.name}"
        value = f"{self._mask_of(i, c.extent)}.load(gl.SliceLayout(0, L{c.extent}))[None, :]"
        if self.added:
            do(f"{score} = gl.fma({score}, {self.of_scale('scale', self.h.scale * LOG2_E)}, {value})")
            return True
        with self.text.block(f"if whole{i} == 0:"):
            do(f"{score} = gl.minimum({score}, {value})")
        return True

    def _look_at_mask(self) -> None:
        """Which chunks keep all of their keys, and up to which one keys are kept."""
        h, do = self.h, self.text.do
        do("mbarrier.wait(m_ready.index(side), phase)")
        if self.added:
            return
        do("seen = 1")
        for i, c in enumerate(chunks(h.keys)):
            layout = f"gl.BlockedLayout([{c.extent // 32}], [32], [{WARPS}], [0])"
            do(f"m{i} = {self._mask_of(i, c.extent)}.load({layout})")
            do(f"whole{i} = gl.min(m{i}, 0) > 0")
            if i:
                do(f"seen = gl.where(gl.max(m{i}, 0) > 0, {i + 1}, seen)")

    # -- the warpgroups that multiply

    def _math(self) -> Text:
        h, t, do = self.h, self.text, self.text.do
        self._layouts()
        do("n = 0")
        do("came = 0")
        self._ask(self._head("gl.program_id(0)"), "g")
        with t.block(self._each_head()):
            do(f"head = {self._head('at')}")
            do(f"side = n % {AHEAD}")
            do(f"phase = n // {AHEAD} % 2")
            odd = self.tiles % 2
            do(f"start = {'(g + n) % 2' if odd else 'g'}")
            do(f"following = {'1 - start' if odd else 'g'}")
            do("n += 1")
            if self.by_keys:
                self._look_at_mask()
            do("mbarrier.wait(k_ready.index(side), phase)")
            if self.by_keys and not self.added and h.causal == "no":
                for most in range(1, len(chunks(h.keys)) + 1):
                    with t.block(f"if seen == {most}:"), t.block(f"for tile in range(start, {self.tiles}, 2):"):
                        self._tile(0, self.tiles - 1, most)
            else:
                for first, last in self._runs():
                    with t.block(f"for tile in {self._range(first, last)}:"):
                        self._tile(first, last)
            for i, _ in enumerate(chunks(h.keys)):  # those that no tile saw have come, too, before others take their place
                do(f"mbarrier.wait(v_ready.index({self._slot(i)}), phase)")
            do("gl.thread_barrier()")
            do("mbarrier.arrive(v_empty.index(side))")
        return t

    def _range(self, first: int, last: int) -> str:
        begin = f"{first} + (start + {first}) % 2" if first else "start"
        return f"range({begin}, {last + 1}, 2)"

    def _ask(self, head: str, tile: str) -> None:
        """Has TMA bring a tile of queries."""
        q = self.views[0]
        do = self.text.do
        do(f"mbarrier.expect(q_ready.index(g), {ROWS * power(self.h.depth) * self.h.q.dtype.bits // 8})")
        do(f"asked = {head}")
        where = ", ".join(q.array.coordinates("asked", f"({tile}) * {ROWS}", "0"))
        into = "qs.index(g)._reinterpret(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)"
        do(f"tma.async_copy_global_to_shared(q_desc, [{where}], q_ready.index(g), {into})")

    def begin_tile(self) -> None:
        self.text.do("mbarrier.wait(q_ready.index(g), came)")
        self.text.do("came = came ^ 1")
        self.text.do("own = pin(side)")  # places are worked out anew: as invariants of the loop they would fill registers
        for i, c in enumerate(chunks(self.h.keys)):
            part = "" if i == 0 or c.extent == WIDEST else f".slice(0, {c.extent})"
            self.text.do(f"ks{i} = kb.index(own * {len(chunks(self.h.keys))} + {i}){part}")

    def copy_following(self, first: int, last: int) -> bool:
        h, t = self.h, self.text
        t.do("gl.thread_barrier()")
        t.do(f"more = tile + 2 < {self.tiles}")
        t.do("mbarrier.arrive(k_empty.index(side), pred=more == 0)")
        t.do("ahead = gl.where(more, at, at + gl.num_programs(0))")
        t.do("tile_ahead = gl.where(more, tile + 2, following)")
        with t.block(f"if ahead < {h.batch * h.heads}:"):
            self._ask(self._head("ahead"), "tile_ahead")
        return False

    def before_chunk(self, i: int) -> None:
        c, n = chunks(self.h.keys)[i], len(chunks(self.h.keys))
        part = "" if i == 0 or c.extent == WIDEST else f".slice(0, {c.extent})"
        if i == 0:
            self.text.do("its = pin(side)")
        self.text.do(f"vs{i} = vb.index(its * {n} + {i}){part}")
        self.text.do(f"mbarrier.wait(v_ready.index({self._slot(i)}), phase)")

    def _codes(self, name: str, rows: int) -> str:
        return super()._codes("qs.index(g)" if name == "qs" else name, rows)

    # -- the kernel

    def _entry(self, given: str) -> Text:
        h, p, t = self.h, self.p, Text("gl")
        whole = chunks(h.keys)
        count, rows = AHEAD * len(whole), whole[0].extent
        rooms = [("qs", GROUPS, ROWS, h.depth, self.first)]
        rooms += [("kb", count, rows, h.depth, self.first), ("vb", count, rows, h.width, h.unit)]
        operand_rooms(t, rooms)
        if self.by_keys:
            layout = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
            t.do(f"ms = gl.allocate_shared_memory(gl.float32, [{AHEAD * len(whole)}, {whole[0].extent}], {layout})")
        if p.ones:
            self._ones(t)
        for name in self.barriers:
            n = {"q_ready": GROUPS, "v_ready": AHEAD * len(whole)}.get(name, AHEAD)
            t.do(f"{name} = gl.allocate_shared_memory(gl.int64, [{n}, 1], mbarrier.MBarrierLayout())")
            with t.block(f"for i in gl.static_range({n}):"):
                t.do(f"mbarrier.init({name}.index(i), count={GROUPS if name.endswith('empty') else 1})")
        chained(t)
        parts = [*(f"(math, ({g}, {given},))" for g in range(GROUPS)), f"(load, ({given},))"]
        t.do(f"gl.warp_specialize([{', '.join(parts)}], [4, 1], [{MATH_REGISTERS}, {LOADING_REGISTERS}])")
        return t


def of_mask(t: Text, heads: Heads, columns: str, *, ragged: bool) -> str:
    """What is done to the scores of these keys: the least of both is taken (infinities), or it is added to powers of 2."""
    assert heads.mask is not None
    tile = Tile("rows", columns, heads.keys, column_mask=t.v(f"{columns} < {heads.keys}") if ragged else None)
    emitter = Emitter(t, tile, pointer_of, NATIVE_FP8)
    value, dtype = emitter.value(heads.mask), heads.mask.root.dtype
    if dtype is PRED:
        return f"gl.where({value}, float('inf'), {NONE})"
    return f"{emitter.convert(value, dtype, F32)} * {LOG2_E!r}"
