"""Instructions that this processor lacks, as plain IR: a kernel for another chip runs here, packing, tails, threads and all.

Slow, and no word on the code that LLVM makes for the chip itself: `tests/candidates/llvm/test_targets.py` reads that. Sources:
Intel SDM volume 2 (LDTILECFG, TILELOADD, TILESTORED, TDP*); Arm Architecture Reference Manual, C7.2 (SDOT, UDOT, BFDOT, and as
matrices SMMLA, UMMLA, USMMLA, BFMMLA).
"""

import re

from tilewright.candidates.llvm.expressions.text import Function, Module, Source, vec

THREADS = 64  # that ever call a kernel in this process
ROWS, ROW = 16, 64  # of a tile
TILE, TILES = ROWS * ROW, 8
STATE = TILES * TILE + 64  # the tiles, then the configuration
COLSB, HEIGHTS = 16, 48  # their places in it

# The number of the calling thread: the first place that is its own, or nobody's.
NUMBER = f"""
@tile_owners = internal global [{THREADS} x i64] zeroinitializer
declare i64 @pthread_self()
define i64 @tile_thread() {{
entry:
  %self = call i64 @pthread_self()
  br label %look
look:
  %i = phi i64 [ 0, %entry ], [ %next, %other ]
  %at = getelementptr i64, ptr @tile_owners, i64 %i
  %tried = cmpxchg ptr %at, i64 0, i64 %self seq_cst seq_cst
  %before = extractvalue {{ i64, i1 }} %tried, 0
  %claimed = extractvalue {{ i64, i1 }} %tried, 1
  %own = icmp eq i64 %before, %self
  %mine = or i1 %claimed, %own
  br i1 %mine, label %done, label %other
other:
  %next = add i64 %i, 1
  br label %look
done:
  ret i64 %i
}}
"""

# What LLVM calls to narrow an f32 on a processor without bf16 instructions; no library that the engine sees has it.
TO_BF16 = """
define bfloat @__truncsfbf2(float %x) {
  %bits = bitcast float %x to i32
  %above = lshr i32 %bits, 16
  %odd = and i32 %above, 1
  %half = add i32 %odd, 32767
  %sum = add i32 %bits, %half
  %rounded = lshr i32 %sum, 16
  %quiet = or i32 %above, 64
  %nan = fcmp uno float %x, 0.0
  %chosen = select i1 %nan, i32 %quiet, i32 %rounded
  %word = trunc i32 %chosen to i16
  %y = bitcast i16 %word to bfloat
  ret bfloat %y
}
"""


def emulated(module: Module, cpu: str, features: str) -> Source:
    """The module's source, foreign instructions replaced by functions."""
    text, given = module.source(cpu, features)
    made = Module()
    for name in sorted(set(re.findall(r"@llvm\.((?:x86\.(?:ldtile|tile|tdp)|aarch64\.neon\.)[\w.]*)\(", text))):
        define(made, name)
        text = re.sub(rf"^declare [^\n]*@llvm\.{re.escape(name)}\([^\n]*\n", "", text, flags=re.M)
        text = re.sub(rf"(call [^\n]*)@llvm\.({re.escape(name)})\(([^\n]*)\)", as_call, text)
    kept = [d for n, d in made.declarations.items() if f"@{n}(" not in text.split("define", 1)[0]]
    return Source("\n".join([*kept, NUMBER, *made.functions, TO_BF16, text]), given)


def as_call(found: re.Match[str]) -> str:
    return f"{found[1]}@emulated.{found[2]}({found[3].replace(' immarg', '')})"


def define(module: Module, name: str) -> None:
    kind, _, instruction = name.partition(".")
    if kind == "x86":
        module.declarations["tile_state"] = f"@tile_state = internal global [{THREADS * STATE} x i8] zeroinitializer, align 64"
        {"tdp": multiply}.get(instruction[:3], move)(module, f"emulated.{name}", instruction)
    else:
        neon(module, f"emulated.{name}", instruction.split(".")[1])


def state(f: Function) -> str:
    return f.at("@tile_state", f.mul(f.v("call i64 @tile_thread()"), STATE))


def tile(f: Function, all_: str, number: str) -> str:
    return f.at(all_, f.mul(f.v(f"zext i8 {number} to i64"), TILE))


def configured(f: Function, all_: str, number: str) -> tuple[str, str]:
    """A tile's rows, and the bytes in each."""
    config, n = f.at(all_, TILES * TILE), f.v(f"zext i8 {number} to i64")
    height = f.load("i8", f.at(f.at(config, HEIGHTS), n))
    width = f.load("i16", f.at(f.at(config, COLSB), f.mul(n, 2)))
    return f.v(f"zext i8 {height} to i64"), f.v(f"zext i16 {width} to i64")


def move(module: Module, name: str, instruction: str) -> None:
    row = vec(ROW, "i8")
    args = {"ldtilecfg": ["ptr"], "tilerelease": [], "tilezero": ["i8"]}.get(instruction, ["i8", "ptr", "i64"])
    f = Function(module, name, [(t, f"x{i}") for i, t in enumerate(args)])
    all_ = state(f)
    if instruction in ("ldtilecfg", "tilerelease"):
        with f.loop(0, TILES * TILE, ROW) as loop:
            f.store(row, "zeroinitializer", f.at(all_, loop.index))
        f.store(row, f.load(row, "%x0") if args else "zeroinitializer", f.at(all_, TILES * TILE))
        f.finish()
        return
    own, (height, width) = tile(f, all_, "%x0"), configured(f, all_, "%x0")
    if instruction != "tilestored64":
        with f.loop(0, TILE, ROW) as loop:
            f.store(row, "zeroinitializer", f.at(own, loop.index))
    if instruction != "tilezero":
        with f.loop(0, height) as loop:
            mine, theirs = f.at(own, f.mul(loop.index, ROW)), f.at("%x1", f.mul(loop.index, "%x2"))
            mask = f.first_lanes(ROW, width)
            if instruction == "tileloadd64":
                f.store(row, f.load_where(row, theirs, mask), mine)
            else:
                f.store_where(row, f.load(row, mine), theirs, mask)
    f.finish()


def multiply(module: Module, name: str, instruction: str) -> None:
    f = Function(module, name, [("i8", "c"), ("i8", "a"), ("i8", "b")])
    all_ = state(f)
    height, _ = configured(f, all_, "%c")
    _, width = configured(f, all_, "%a")
    c, a, b = (tile(f, all_, n) for n in ("%c", "%a", "%b"))
    lanes, acc = ROW // 4, vec(ROW // 4, "float" if "bf16" in instruction else "i32")
    with f.loop(0, height) as m, f.loop(0, f.div(width, 4)) as g:
        at = f.at(c, f.mul(m.index, ROW))
        word = f.splat(lanes, "i32", f.load("i32", f.at(a, f.add(f.mul(m.index, ROW), f.mul(g.index, 4)))))
        right = f.load(vec(lanes, "i32"), f.at(b, f.mul(g.index, ROW)))
        signs = (instruction[4] == "s", instruction[5] == "s")
        f.store(acc, dotted(f, lanes, f.load(acc, at), word, right, None if "bf16" in instruction else signs), at)
    f.finish()


def dotted(f: Function, lanes: int, acc: str, a: str, b: str, signed: tuple[bool, bool] | None) -> str:
    """acc + the words' products: of four codes with these signs, or of two bf16."""
    words = vec(lanes, "i32")
    for i in range(2 if signed is None else 4):
        parts: list[str] = []
        for value, sign in zip((a, b), signed or (False, False), strict=True):
            if signed is None:  # a bf16 is the upper half of an f32
                bits = f.v(f"and {words} {value}, splat (i32 -65536)") if i else f.v(f"shl {words} {value}, splat (i32 16)")
                parts.append(f.v(f"bitcast {words} {bits} to {vec(lanes, 'float')}"))
            else:
                high = f.v(f"shl {words} {value}, splat (i32 {24 - 8 * i})")
                parts.append(f.v(f"{'ashr' if sign else 'lshr'} {words} {high}, splat (i32 24)"))
        if signed is None:
            t = vec(lanes, "float")
            acc = f.v(f"fadd {t} {acc}, {f.v(f'fmul {t} {parts[0]}, {parts[1]}')}")
        else:
            acc = f.v(f"add {words} {acc}, {f.v(f'mul {words} {parts[0]}, {parts[1]}')}")
    return acc


def neon(module: Module, name: str, instruction: str) -> None:
    """An instruction on 128 bits: acc[i] += a[i] . b[i], or the 2 x 2 products of two rows by two columns."""
    floats = instruction.startswith("bf")
    acc, operand = vec(4, "float" if floats else "i32"), "<8 x bfloat>" if floats else "<16 x i8>"
    signs = {"s": (True, True), "u": (False, False), "us": (False, True)}.get(re.split("dot|mmla", instruction)[0])
    f = Function(module, name, [(acc, "c"), (operand, "a"), (operand, "b")], acc)
    a, b = (f.v(f"bitcast {operand} {x} to <4 x i32>") for x in ("%a", "%b"))
    total = "%c"
    if instruction.endswith("dot"):
        total = dotted(f, 4, total, a, b, signs)
    else:
        for half in (0, 1):
            left = f.shuffle("<4 x i32>", a, a, [half, half, 2 + half, 2 + half])
            right = f.shuffle("<4 x i32>", b, b, [half, 2 + half, half, 2 + half])
            total = dotted(f, 4, total, left, right, signs)
    f.finish(f"{acc} {total}")
