"""The text of a Hopper gemm in Gluon: one warp brings tiles of both operands into a ring of stages in shared memory by TMA,
warpgroups multiply them and write results, and blocks stay for as many tiles as there are for each.

Each warpgroup owns rows of the block's tile; all read the same tile of the right operand, and none waits for another. Where
what becomes of a sum takes long, they own every other tile instead (`pingpong`) and take turns: while one multiplies, the other
one writes. A tile that is done leaves a piece of columns at a time: 128 bytes of a row, which is what TMA stores with the
widest swizzle.
"""

from __future__ import annotations

from tilewright.candidates.triton.expressions.casts import in_memory
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.hopper.brief import Brief
from tilewright.candidates.triton.hopper.gemm import split
from tilewright.candidates.triton.hopper.gemm.form import FRAGMENT, Blocks
from tilewright.candidates.triton.hopper.gemm.loads import Loads
from tilewright.candidates.triton.hopper.gemm.parts import PROLOGUE, STAGE_OF
from tilewright.candidates.triton.hopper.ptx import EDITION
from tilewright.candidates.triton.hopper.w4 import bytes as in_bytes
from tilewright.candidates.triton.hopper.w4 import stage
from tilewright.candidates.triton.hopper.w4.stage import Coded
from tilewright.candidates.triton.runtime.versions import within

PRODUCER_REGISTERS = 24
CODED_REGISTERS, CODED_MATH_REGISTERS = 40, 232  # where words are asked for as well
MATH_REGISTERS = 240  # of 64K in all, two warpgroups of 128 threads beside the producer's


class Writer(Loads):
    """Writes a form as a module's text, with the kernel `gemm`.

    Args:
        form: of the kernel.
        pointer: what the kernel calls the memory of a source, and of a store that has no TMA view.
    """

    @property
    def arguments(self) -> list[str]:
        """Of the kernel, in order, but for numbers."""
        return [*self.descriptors, *self.pointers, *self.scratch, *self.extents]

    def write(self) -> Written:
        """The module."""
        narrow = within() and self.form.tile_n < self.form.shape_n
        first = [PROLOGUE, *([STAGE_OF] if narrow else [])]
        if self.form.coded:
            first.append((in_bytes if self.form.coded.deep > 1 else stage).prologue(self.form.coded))
        text = "\n\n".join([*first, self._load(), self._math(), self._entry()]) + "\n"
        return Written(text, self.numbers)

    # -- the warpgroups that multiply

    def _math(self) -> str:
        f, t = self.form, Text("gl")
        arguments = ["g: gl.constexpr", *self.descriptors[self._operands :], *self._left, "b_bufs", "c_bufs", *self._barriers]
        arguments += [*self.pointers, *self.scratch, *self.extents]
        t.do(f"L: gl.constexpr = {f.fragment(f.shape_n // len(self._sums))}")
        for columns in sorted({o.columns for o in f.outs}):
            t.do(f"L{columns}: gl.constexpr = {self._piece_layout(columns)}")
        self._tiles(t)
        if f.split > 1:
            split.begin(t, f)
        if f.coded:
            (in_bytes if f.coded.deep > 1 else stage).begin(t, f.coded)
        if f.blocks and f.chained:  # scales are read before the first products, which wait for those that load
            t.do("gdc_wait()")
        t.do("s = 0")
        t.do("phase = 0")
        t.do("last = 0")
        if f.fetches:
            t.do("came = 0")
        if f.hold:
            t.do("held_b = B")  # nothing to write yet: TMA drops what lies outside
            t.do("held_row = M")
            t.do("held_col = 0")
            kind = f"gl.{in_memory(f.outs[0].access.root.dtype)}"
            t.do(f"none = gl.zeros(({f.rows}, {f.outs[0].columns}), {kind}, L{f.outs[0].columns})")
            for j in range(f.pieces):
                t.do(f"w{j} = pack(none)")
        if f.pingpong:
            t.do("at = g * nk")
        if f.pingpong or self._turns:
            t.do("turn = 1 - g")
        with t.block(self._each_tile(pingpong=f.pingpong)):
            if f.pingpong:
                t.do(f"s = at % {f.num_stages}")
                t.do(f"phase = at // {f.num_stages} % 2")
                t.do("at += 2 * nk")
                t.do("mbarrier.wait(turns.index(g), turn)")
                t.do("turn = turn ^ 1")
            if f.blocks:
                self._tile_by_blocks(t, f.blocks)
            elif f.coded and f.coded.deep > 1:
                self._tile_by_groups(t, f.coded)
            else:
                self._tile(t)
        if f.hold:
            for j in range(f.pieces):
                self._write(t, f.outs[0], 0, j, self._unpacked(f"w{j}"), "held_")
        if f.split > 1:
            split.end(t)
        if any(o.view for o in f.outs):
            t.do("tma.store_wait(0)")
        self.numbers = t.numbers
        return self._function("math", [*arguments, *self.numbers], t)

    def _tile(self, t: Text) -> None:
        """All of K, and what becomes of the sums."""
        f = self.form
        acc = "int32" if f.acc.is_integer else "float32"
        t.do(f"acc = warpgroup_mma_init(gl.zeros(({f.rows}, {f.shape_n}), gl.{acc}, L))")
        if f.streamed:
            self._which(t)
        ahead = f.pieces if f.hold else 0 if f.streamed else 1  # steps that need not know which tile it is
        if f.coded and ahead:
            t.do("k = 0")
        for j in range(ahead):
            self._step(t, use=str(j > 0), free=j > 0)
            if f.hold:
                self._write(t, f.outs[0], 0, j, self._unpacked(f"w{j}"), "held_")
        if not f.streamed:
            self._which(t)
        self._where(t)
        if f.fetches:
            self._fetch(t, 0)
        later = "k > k0" if f.streamed else "True"
        with t.block("for k in range(k0, k1):" if f.streamed else f"for k in range({ahead}, nk):"):
            self._step(t, use=later, free=later if f.streamed else True)
        self._finish(t)

    def _where(self, t: Text) -> None:
        """Where a tile's rows and columns begin."""
        f = self.form
        t.do("b = pin(b)")
        t.do(f"row = pin(pm{'' if f.pingpong else f' * {f.groups} + g'}) * {f.rows}")
        t.do(f"col = pin(pn) * {f.width}{f' + rank * {f.own_n}' if f.split > 1 else ''}")
        self._choose(t)

    def _tile_by_blocks(self, t: Text, blocks: Blocks) -> None:
        """Sums of 128 products each, times the scales of their rows and columns, added up in f32: as exact as the scales are,
        where the tensor cores keep 14 bits of a sum. While one warpgroup multiplies by scales the other one has the cores."""
        f = self.form
        self._which(t)
        self._where(t)
        (down, along), (across, below) = blocks.lhs_strides, blocks.rhs_strides
        t.do(f"y = row + gl.arange(0, {f.rows}, gl.SliceLayout(1, L))")
        t.do(f"at = p{blocks.lhs} + y * {down}")
        t.do(f"beside = p{blocks.rhs} + col // 128 * {across}")
        t.do("of_rows = gl.load(at, mask=y < M, other=0.0)")
        t.do("of_columns = gl.load(beside)")
        t.do(f"r = gl.zeros(({f.rows}, {f.shape_n}), gl.float32, L)")
        with t.block("for k in range(0, nk):"):
            t.do(f"acc = warpgroup_mma_init(gl.zeros(({f.rows}, {f.shape_n}), gl.float32, L))")
            self._step(t, use="False", free=False)
            t.do(f"next_rows = gl.load(at + (k + 1) * {along}, mask=(y < M) & (k + 1 < nk), other=0.0)")
            t.do(f"next_columns = gl.load(beside + (k + 1) * {below}, mask=k + 1 < nk, other=0.0)")
            t.do("part = warpgroup_mma_wait(0, deps=(acc,))")
            t.do("mbarrier.arrive(empty.index(last))")
            t.do("r = gl.fma(part, (of_rows * of_columns)[:, None], r)")
            t.do("of_rows, of_columns = next_rows, next_columns")
        self._stores(t, {})

    def _tile_by_groups(self, t: Text, coded: Coded) -> None:
        """Sums of a group's products times its scales, added up in f32. While one warpgroup makes bytes of codes, or multiplies
        by scales, the other one has the tensor cores."""
        f = self.form
        self._which(t)
        self._where(t)
        for part in self._sums:
            t.do(f"{part} = gl.zeros(({f.rows}, {f.shape_n // len(self._sums)}), gl.float32, L)")
        steps = ("k0", "k1") if f.streamed else ("0", "nk")
        in_bytes.products(t, coded, f.tile_m, f.shape_n, f.num_stages, self._right("of"), steps)
        if f.streamed:
            self._gather(t)
            with t.block("if done:"):
                self._stores(t, {})
        else:
            self._stores(t, {})

    def _piece_layout(self, columns: int) -> str:
        f = self.form
        if not f.rhs.widened:
            return f.fragment(columns)
        registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, c] for c in (32, 64, 128) if c < columns)]
        registers += [[r, 0] for r in (64,) if r < f.rows]
        lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
        return f"gl.DistributedLinearLayout({registers}, {lanes}, {warps}, [], [{f.rows}, {columns}])"

    def _step(self, t: Text, *, use: str, free: bool | str) -> None:
        """One step along K; the stage of the step before is free then."""
        f = self.form
        a, b = f"a_bufs.index({'s' if f.pingpong else f's * {f.groups} + g'})", self._right("s")
        a = a if f.lhs.along_k else f"{a}.permute((1, 0))"
        b = f"{b}.permute((1, 0))" if f.rhs.along_k else b
        t.do("mbarrier.wait(ready.index(s), phase)")
        if f.coded:
            a = stage.convert(t, f.coded, f.tile_m)
        t.do(f"acc = warpgroup_mma({a}, {b}, acc, use_acc={use}, is_async=True)")
        # Codes are made numbers in registers that products under way may still read: the other warpgroup multiplies meanwhile.
        under_way = 0 if f.coded else 1
        if free is not False or f.coded:
            t.do(f"acc = warpgroup_mma_init(warpgroup_mma_wait({under_way}, deps=(acc,)))")
        if free is not False:
            t.do(f"mbarrier.arrive(empty.index(last){'' if free is True else f', pred={free}'})")
        t.do("last = s")
        t.do(f"s, phase = advance(s, phase, {f.num_stages})")

    def _right(self, s: str) -> str:
        """The right operand's part of a stage, as it lies."""
        f = self.form
        b = f"b_bufs.index({s} * {f.units})"
        if f.units == 1:
            return b
        shape = [f.shape_n, f.tile_k] if f.rhs.along_k else [f.tile_k, f.shape_n]  # its parts follow one another
        if within():
            return self._within(s, shape)
        return f"{b}._reinterpret(b_bufs.dtype, {shape}, b_bufs.layout)"

    def _within(self, s: str, shape: list[int]) -> str:
        """The same as a part of the whole ring, as if it held as many stages of Triton's columns as fit: where a stage of fewer
        columns begins is put right in the PTX."""
        f = self.form
        count = f.num_stages * f.tile_n // f.shape_n
        at = s if f.tile_n == f.shape_n else f"stage_of({s})"
        return f"b_bufs._reinterpret(b_bufs.dtype, {[count, *shape]}, b_bufs.layout).index({at})"

    def _finish(self, t: Text) -> None:
        """What remains of a tile once its products are asked for."""
        f = self.form
        ahead: dict[tuple[int, int], Brief] = {}
        if f.streamed:
            t.do("r = warpgroup_mma_wait(0, deps=(acc,))")
            t.do("mbarrier.arrive(empty.index(last))")
            self._gather(t)
            with t.block("if done:"):
                self._stores(t, ahead)
            return
        self._ahead(t, ahead, 0, 0)
        if f.pingpong:
            t.do("mbarrier.arrive(turns.index(1 - g))")
        t.do("r = warpgroup_mma_wait(0, deps=(acc,))")
        if f.split > 1:
            split.exchange(t, f)
        else:
            t.do("mbarrier.arrive(empty.index(last))")
        if f.fetches:
            self._fetched(t)
        self._stores(t, ahead)

    def _gather(self, t: Text) -> None:
        """Of a tile that several blocks have shares of, the last one adds up all in order; the others are done with it."""
        f = self.form
        element, columns = "int32" if f.acc.is_integer else "float32", f.shape_n // len(self._sums)
        t.do("done = True")
        with t.block("if j >= whole:"):
            t.do("q = t - D")
            t.do("c_first = ((q * nk + 1) * G - 1) // total")
            t.do("c_last = ((q * nk + nk) * G - 1) // total")
            with t.block("if c_last > c_first:"):
                self._in_lanes(t)
                t.do("slot = 2 * c + gl.where((c == c_first) & (begin // nk != q), 1, 0)")
                place = f"partial + {self._of_pair('slot')}.to(gl.int64) * {f.tile_m * f.shape_n} + inside"
                for i, part in enumerate(self._sums):
                    t.do(f"gl.store({place} + {i * f.rows * columns}, {part})")
                t.do("gl.thread_barrier()")
                counter = f"arrived + {self._of_pair('q')} * {f.groups} + g"
                t.do(f'n = gl.atomic_add({counter}, 1, sem="acq_rel", scope="gpu")')
                t.do("done = n == c_last - c_first")
                with t.block("if done:"):
                    t.do(f"gl.store({counter}, 0)")
                    t.do("gl.thread_barrier()")
                    for part in self._sums:
                        t.do(f"{part} = gl.zeros(({f.rows}, {columns}), gl.{element}, L)")
                    with t.block("for p in range(c_first, c_last + 1):"):
                        t.do("at = 2 * p + gl.where((p == c_first) & ((p * total // G) // nk != q), 1, 0)")
                        source = f"partial + {self._of_pair('at')}.to(gl.int64) * {f.tile_m * f.shape_n} + inside"
                        for i, part in enumerate(self._sums):
                            t.do(f'{part} += gl.load({source} + {i * f.rows * columns}, cache_modifier=".cg")')

    def _in_lanes(self, t: Text) -> None:
        """Where elements of a part go: those that the threads hold in one register follow one another, thread by thread.

        Of an element's row, bits 0 to 2 and 4 to 5 tell the thread; of its column, bits 1 to 2 (PTX ISA 9.0, 9.7.15.5.1).
        """
        f = self.form
        t.do(f"y = gl.arange(0, {f.rows}, gl.SliceLayout(1, L))")
        t.do(f"x = gl.arange(0, {f.shape_n // len(self._sums)}, gl.SliceLayout(0, L))")
        own = f"(y & 7) * 4 + ((y >> 4) & 3) * 32 + ((y >> 3) & 1) * 256 + (y >> 6) * {64 * f.shape_n}"
        t.do(f"across = ((x >> 1) & 3) + (x & 1) * 128 + (x >> 3) * 512 + g * {f.rows * f.shape_n}")
        t.do(f"inside = ({own})[:, None] + across[None, :]")

    def _of_pair(self, number: str) -> str:
        """A number that both blocks of a pair have, as one of the block's own."""
        return f"({number} * 2 + gl.program_id(0) % 2)" if self.form.paired else number

    # -- the kernel

    def _entry(self) -> str:
        f, t = self.form, Text("gl")
        # What is rewritten later, and how: kernels that differ in that must differ in text.
        t.do(f'"""{f.lhs.dtype} x {f.rhs.dtype}{", in pairs" * f.paired}, {f.tile_n} columns, rewritten by {EDITION}"""')
        lhs, rhs = f"gl.{FRAGMENT[f.lhs.dtype.name]}", f"gl.{FRAGMENT[f.rhs.dtype.name]}"
        for name, kind, side, count, rows in (
            *([] if f.coded else [("a_bufs", lhs, f.lhs, f.num_stages * f.parts, f.rows)]),
            ("b_bufs", rhs, f.rhs, f.num_stages * f.units, f.unit),
        ):
            shape = [rows, f.tile_k] if side.along_k else [f.tile_k, rows]
            layout = f"gl.NVMMASharedLayout.get_default_for({shape}, {kind})"
            t.do(f"{name} = gl.allocate_shared_memory({kind}, [{count}, {shape[0]}, {shape[1]}], {layout})")
        if f.coded:
            stage.allocate(t, f.coded, f.tile_m, f.num_stages)
        c_bufs = "b_bufs"  # no store goes through shared memory
        if f.out_bytes:
            c_bufs = "c_bufs"
            layout = f"gl.NVMMASharedLayout.get_default_for([{f.rows}, 128], gl.int8)"
            t.do(f"c_bufs = gl.allocate_shared_memory(gl.int8, [{f.leaving * f.groups}, {f.rows}, 128], {layout})")
        counts = {"ready": 1, "empty": f.parts * (2 if f.paired else 1)}
        for name in counts:
            t.do(f"{name} = gl.allocate_shared_memory(gl.int64, [{f.num_stages}, 1], mbarrier.MBarrierLayout())")
        with t.block(f"for i in gl.static_range({f.num_stages}):"):
            for name, count in counts.items():
                t.do(f"mbarrier.init({name}.index(i), count={count})")
        for name in self._barriers[2:]:
            several, arrivals = (1, f.split * f.groups) if name == "done" else (f.groups, 1)
            t.do(f"{name} = gl.allocate_shared_memory(gl.int64, [{several}, 1], mbarrier.MBarrierLayout())")
            with t.block(f"for i in gl.static_range({several}):"):
                t.do(f"mbarrier.init({name}.index(i), count={arrivals})")
        if f.split > 1:
            split.mark(t)
        common = [*self.descriptors[self._operands :], *self._left, "b_bufs", c_bufs, *self._barriers]
        common += [*self.pointers, *self.scratch, *self.extents, *self.numbers]
        parts = [f"(math, ({', '.join([str(g), *common])},))" for g in range(f.groups)]
        parts.append(f"(load, ({', '.join([*self._loads, *self.extents])},))")
        math, load = (CODED_MATH_REGISTERS, CODED_REGISTERS) if f.coded else (MATH_REGISTERS, PRODUCER_REGISTERS)
        registers = [math] * (f.groups - 1) + [load]
        warps = [4] * (f.groups - 1) + [1]
        t.do(f"gl.warp_specialize([{', '.join(parts)}], {warps}, {registers})")
        return self._function("gemm", [*self.arguments, *self.numbers], t)
