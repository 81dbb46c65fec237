"""The micro-kernel on tiles (AMX): registers of 16 rows of 64 bytes. Two by two of them add up a part of the result.

The packed right operand is made of tiles as it is: 16 groups of K by 16 columns, K's neighbours side by side within 4 bytes. So
is the left operand, packed or not: 64 bytes of K of 16 rows. K is filled up with zeros to whole tiles; rows are not: a tile's
are configured.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18 (tiles, palette 1, TILECFG).
"""

from __future__ import annotations

from tilewright.candidates.llvm.expressions.text import Function, Module
from tilewright.candidates.llvm.gemm.dots import Dot
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, Nest

ROW_BYTES = 64
PALETTE = 1
LEFT, RIGHT = 4, 6  # the first registers of the operands, behind those of the result, two of which share rows


def bands(dot: Dot, rows: int) -> list[int]:
    """Rows of each tile under one another that `rows` of the result take."""
    return [min(dot.tile, rows - at) for at in range(0, rows, dot.tile)]


def configure(f: Function, dot: Dot, rows: int) -> None:
    """Give registers their sizes for a product of `rows` rows; what they hold is lost. It takes as long as a few products."""
    high = bands(dot, rows)
    heights = [high[i // 2] if i // 2 < len(high) else 0 for i in range(LEFT)]
    heights += [*high, *[0] * (RIGHT - LEFT - len(high)), dot.tile, dot.tile]
    widths = b"".join((ROW_BYTES if h else 0).to_bytes(2, "little") for h in heights)
    content = (bytes([PALETTE]).ljust(16, b"\0") + widths).ljust(48, b"\0") + bytes(heights)
    text = "".join(f"\\{byte:02X}" for byte in content.ljust(CACHE_LINE, b"\0"))
    f.module.declarations[f"tiles_{rows}"] = f'@tiles_{rows} = internal constant [{CACHE_LINE} x i8] c"{text}", align 64'
    f.intrinsic("llvm.x86.ldtilecfg", "void", ("ptr", f"@tiles_{rows}"))


def release(f: Function) -> None:
    """Leave the registers empty: a thread that holds tiles is slower to switch from."""
    f.intrinsic("llvm.x86.tilerelease", "void")


def micro(module: Module, nest: Nest, name: str, rows: int, *, fresh: bool) -> None:
    """name(a, stride, b, tile, groups): result tile (+)= lhs tile x rhs panel over `groups` groups of K, as configured."""
    d, nv = nest.dot, nest.nv
    f = Function(module, name, [("ptr", "a"), ("i64", "stride"), ("ptr", "b"), ("ptr", "tile"), ("i64", "groups")])
    high = range(len(bands(d, rows)))
    row_bytes = nest.nr * 4

    def register(number: int) -> tuple[str, str]:
        return ("i8 immarg", str(number))

    def load(number: int, pointer: str, stride: int | str) -> None:
        f.intrinsic("llvm.x86.tileloadd64", "void", register(number), ("ptr", pointer), ("i64", str(stride)))

    places = {(i, j): f.at("%tile", i * d.tile * row_bytes + j * ROW_BYTES) for i in high for j in range(nv)}
    for (i, j), place in places.items():
        if fresh:
            f.intrinsic("llvm.x86.tilezero", "void", register(2 * i + j))
        else:
            load(2 * i + j, place, row_bytes)
    down = f.mul("%stride", d.tile)
    with f.loop(0, "%groups", d.tile) as loop:
        a, b = f.at("%a", f.mul(loop.index, 4)), f.at("%b", f.mul(loop.index, row_bytes))
        for i in high:
            load(LEFT + i, f.at(a, f.mul(down, i)), "%stride")
            for j in range(nv):
                if i == 0:
                    load(RIGHT + j, f.at(b, j * ROW_BYTES), row_bytes)
                d.emit(f, str(2 * i + j), str(LEFT + i), str(RIGHT + j))
    for (i, j), place in places.items():
        f.intrinsic("llvm.x86.tilestored64", "void", register(2 * i + j), ("ptr", place), ("i64", str(row_bytes)))
    f.finish()
