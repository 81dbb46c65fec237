"""Generated kernels for every CPU there is a data file of: the intended instruction makes up the inner loop, nothing is spilled
in it, and nothing outside is called that the process does not have."""

import json
import re
from functools import cache

import pytest
import warm
from paths import HELPERS

from tilewright.candidates.llvm import limits
from tilewright.candidates.llvm.runtime import engine
from tilewright.hardware.detect import chips

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# triple, processor and features in LLVM's words
AS_LLVM_SAYS = {
    "x86_64": (X86, "x86-64", ""),
    "x86_64_avx2": (X86, "haswell", ""),
    "x86_64_zen1": (X86, "znver1", ""),
    "x86_64_avx_vnni": (X86, "alderlake", ""),
    "x86_64_avx512": (X86, "skylake-avx512", ""),
    "x86_64_avx512_vnni": (X86, "icelake-server", ""),
    "x86_64_avx512_bf16": (X86, "znver4", ""),
    "x86_64_zen5": (X86, "znver5", ""),
    "x86_64_amx": (X86, "sapphirerapids", ""),
    "aarch64": (ARM, "generic", "+neon"),
    "aarch64_dotprod": (ARM, "generic", "+neon,+dotprod"),
    "aarch64_bf16": (ARM, "generic", "+neon,+dotprod,+bf16"),
    "aarch64_i8mm": (ARM, "generic", "+neon,+dotprod,+bf16,+i8mm"),
}
FMA = "vfmadd(132|213|231)ps"  # the same but for which register is overwritten
# What each chip multiplies 8-bit codes, bf16 and f32 with.
INTENDED = {
    "x86_64_avx2": ("vpmaddwd", FMA, FMA),
    "x86_64_zen1": ("vpmaddwd", FMA, FMA),
    "x86_64_avx_vnni": ("vpdpbusd", FMA, FMA),
    "x86_64_avx512": ("vpmaddwd", FMA, FMA),
    "x86_64_avx512_vnni": ("vpdpbusd", FMA, FMA),
    "x86_64_avx512_bf16": ("vpdpbusd", "vdpbf16ps", FMA),
    "x86_64_zen5": ("vpdpbusd", "vdpbf16ps", FMA),
    "x86_64_amx": ("tdpb[su][su]d", "tdpbf16ps", FMA),
    "aarch64": ("mla", "fmla", "fmla"),
    "aarch64_dotprod": ("[su]dot", "fmla", "fmla"),
    "aarch64_bf16": ("[su]dot", "bfdot", "fmla"),
    "aarch64_i8mm": ("(s|u|us)mmla", "bfmmla", "fmla"),
}
LINES = {
    "s8[96,96] @ s8[96,96] -> s8 scale=tensor": 0,
    "u8[70,90] @ s8[90,33] -> s32": 0,
    "s8[96,96] @ u8[50,96]^T": 0,
    "u8[5,512] @ u8[512,300]": 0,
    "bf16[96,96] @ bf16[96,96] + bias, gelu_tanh -> bf16": 1,
    "f32[96,96] @ f32[96,96] + bias, gelu -> f32": 2,
    "f32[90,5000] @ f32[5000,100]": 2,  # several passes over K
    "f32[1,256] @ f32[256,512], silu": 2,  # one row
    "f32[6,256] @ f32[256,512]": 2,
    "f32[200,96] @ f32[96,3]": 2,  # one vector of columns
    "f16[40,96] @ f16[96,96] -> f16": 2,
    # much else besides the product: gathers, scatters, every kind of step
    "f16[33,40] @ f16[40,50], silu, tanh, maximum(bias), minimum(row:f16) -> u8 scale=column zero_point": 2,
    "s8[33,40] @ s8[40,50] scale=channel + bias, gelu, sqrt, abs -> f16": 0,
    "f32[33,40]^T @ f32[50,33]^T, relu, negate + residual -> s8 scale=row": 2,
}


def answers(asked):
    """The child's answers; LLVM aborts on what it cannot select, so that is seen as its exit."""
    given = "".join(json.dumps([chip, *AS_LLVM_SAYS[chip], what]) + "\n" for chip, what in asked)
    child = HELPERS / "llvm_targets.py"
    ran = warm.run([str(child)], given=given, timeout=550)
    made = [json.loads(line) for line in ran.stdout.splitlines()]
    at = asked[min(len(made), len(asked) - 1)]
    assert ran.returncode == 0, f"{at}: exit {ran.returncode}\n{ran.stderr[-2000:]}"
    return dict(zip(asked, made, strict=True))


@cache
def all_kernels():
    return answers([(chip, line) for chip in AS_LLVM_SAYS for line in LINES])


def kernels(chip):
    return {line: made for (name, line), made in all_kernels().items() if name == chip}


def functions(assembly):
    """Name and lines of each function, without comments and directives."""
    for found in re.finditer(r"^(\w+):(.*?)^\.Lfunc_end", assembly, re.M | re.S):
        lines = (re.split(r"\s(?:#|//)", line)[0].strip() for line in found[2].splitlines())
        yield found[1], [line for line in lines if line and (line[0] not in ".#/" or line.startswith(".LBB"))]


def innermost_loops(lines):
    """Lines from the target of each backward jump to the jump, where no other loop lies inside."""
    at = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    jumps = [
        (at[t], i) for i, line in enumerate(lines) if (t := line.split()[-1]) in at and at[t] <= i and not line.endswith(":")
    ]
    return [lines[a : b + 1] for a, b in jumps if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in jumps)]


def test_every_chip_is_compiled_for():
    assert {c.name for c in chips() if c.kind == "cpu"} == set(AS_LLVM_SAYS)


def test_x86_64_without_fma_is_refused():
    for line, made in kernels("x86_64").items():
        assert "names no instruction" in made["refused"], line


def stack(lines):
    """The pattern of a reference to the stack in a function; rbp is like any register where it holds no frame."""
    framed = any(re.search(r"movq\s+%rsp, %rbp", x) for x in lines)
    return r"[re]sp\b|\bsp\b|\[x29" + (r"|[re]bp\b" if framed else "")


@pytest.mark.parametrize("chip", list(INTENDED))
def test_inner_loops_are_the_intended_instruction_without_spills(chip):
    for line, made in kernels(chip).items():
        wanted = INTENDED[chip][LINES[line]]
        assert re.fullmatch(wanted, made["instruction"].split()[0]), line
        micro = [(name, lines) for name, lines in functions(made["assembly"]) if name.startswith("micro_")]
        assert micro, line
        for name, lines in micro:
            rows = int(name.split("_")[1])
            loops = innermost_loops(lines)
            assert loops, f"{line}: {name}"
            for loop in loops:
                dots = [x for x in loop if re.match(rf"(\{{vex\}}\s+)?{wanted}\b", x)]
                # one for each row (of tiles: each 16) and vector of the tile, four times where the loop is unrolled
                each = -(-rows // made["tile"]) * made["nv"]
                assert len(dots) in (each, 4 * each), f"{line}: {name} has {len(dots)}"
                spilled = [x for x in loop if re.search(stack(lines), x)]
                assert not spilled, f"{line}: {name}: {spilled}"
                calls = [x for x in loop if re.match(r"callq?\b|blr?\b", x)]
                assert not calls, f"{line}: {name}: {calls}"


@pytest.mark.parametrize("chip", list(INTENDED))
def test_registers_are_the_chip_s_own(chip):
    """No 512-bit register where the chip's instruction has 256, and the other way round."""
    for line, made in kernels(chip).items():
        wide = "%zmm" in made["assembly"]
        assert wide == (made["instruction"].endswith("zmm") or made["instruction"].startswith("tdp")), line


@pytest.mark.parametrize("chip", list(INTENDED))
def test_kernels_call_nothing_that_a_process_might_not_have(chip):
    """Conversions of 16-bit floats, above all, are library calls where a processor lacks them."""
    for line, made in kernels(chip).items():
        assert strangers(made["assembly"]) == set(), line


def strangers(assembly):
    """Symbols it calls, or takes the address of, that are neither its own nor given to it."""
    named = dict(functions(assembly))
    symbol = r"(?:\b(?:callq?|jmp|bl?)\s+|movabsq\s+\$|:abs_g\d(?:_nc)?:|adrp\s+\w+, (?::got:)?)([A-Za-z_]\w*)"
    found = {s for lines in named.values() for text in lines for s in re.findall(symbol, text)}
    own = set(re.findall(r"^(\w+):", assembly, re.M))
    return found - own - set(engine.THREADS) - set(engine.PYTHON) - {"_Py_NoneStruct"}


def test_without_f16c_halves_would_be_library_calls():
    """This is why the chips require it."""
    assert all("f16c" in c.requires for c in chips() if c.name in ("x86_64_avx2", "x86_64_avx_vnni"))
    asked = ["x86_64_avx2", X86, "haswell", "-f16c", "f16[8,8] @ f16[8,8] -> f16"]
    child = HELPERS / "llvm_targets.py"
    ran = warm.run([str(child)], given=json.dumps(asked) + "\n")
    assert strangers(json.loads(ran.stdout)["assembly"]) & {"__truncsfhf2", "__extendhfsf2"}


@pytest.mark.conformance
@pytest.mark.parametrize("chip", list(INTENDED))
def test_every_function_and_conversion_is_made_of_what_the_chip_has(chip):
    lanes = 16 if chip.startswith("x86") else 8
    made = answers([(chip, lanes)])[chip, lanes]
    assert made["count"] > 900
    assert strangers(made["assembly"]) == set()


@pytest.mark.parametrize("chip", ["x86_64_avx2", "x86_64_zen1", "x86_64_avx512"])
def test_a_ceiling_repeats_the_whole_instruction(chip):
    """`vpmaddwd` and an add are two: were the one done once for all accumulators, the add alone would be timed."""
    dot = limits.dots(next(c for c in chips() if c.name == chip))["s8"]
    triple, *cpu = AS_LLVM_SAYS[chip]
    code = engine.assembly(limits.peak_text(dot, 12, *cpu), triple, *cpu)
    assert len(re.findall("vpmaddwd", code)) >= 12
