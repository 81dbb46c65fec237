"""Generated CPU kernels on random problems: right, inside their memory, and the same at any number of threads.

Every buffer a kernel is given ends at a page that must not be touched and starts behind one; results and scratch memory start
out poisoned. A kernel that strays kills the process, so the problems run in a child, which says first what it is about to do.
"""

import ctypes
import ctypes.util
import mmap
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import warm
from emulated import emulated
from gemm_lines import assert_means, lines, tensors
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from other_machine import Program, missing
from paths import SEARCHED

from tests.candidates.llvm.test_targets import AS_LLVM_SAYS
from tilewright.candidates.llvm.expressions.text import Module, Source
from tilewright.candidates.llvm.gemm import candidate as llvm
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.runtime import calls as _call
from tilewright.candidates.llvm.runtime import run as _run
from tilewright.candidates.llvm.runtime.engine import host, require
from tilewright.hardware.detect import chips, detect
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.problem import Problem, problem_of

CPU = detect("cpu")
LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
POISON = 0x7F  # NaN as f32, bf16 and fp8, and a large code


class Guarded:
    """Memory that ends (or starts) at a page nobody may touch."""

    def __init__(self, size: int, at_end: bool):
        pages = -(-max(size, 1) // PAGE)
        self.size = size
        self.map = mmap.mmap(-1, (pages + 2) * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for page in (base, base + (pages + 1) * PAGE):
            assert LIBC.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0
        self.address = base + PAGE + (pages * PAGE - size if at_end else 0)
        ctypes.memset(base + PAGE, POISON, pages * PAGE)

    def intact(self) -> bool:
        """Tell whether what is left of its pages is as it was."""
        inside = self.map[PAGE:-PAGE]
        first = self.address - ctypes.addressof(ctypes.c_char.from_buffer(self.map)) - PAGE
        return not (inside[:first] + inside[first + self.size :]).strip(bytes([POISON]))

    def tensor(self, shape, dtype):
        size = torch.empty(0, dtype=dtype).itemsize * max(1, torch.Size(shape).numel())
        raw = (ctypes.c_uint8 * size).from_address(self.address)
        flat = torch.frombuffer(raw, dtype=torch.uint8)
        flat.keep = self
        KEPT.append(self)
        return flat.view(dtype)[: torch.Size(shape).numel()].view(shape)


KEPT: list[Guarded] = []


def guarded(t: torch.Tensor, at_end: bool) -> torch.Tensor:
    made = Guarded(t.numel() * t.itemsize, at_end).tensor(t.shape, t.dtype)
    return made.copy_(t)


def fenced(at_end: bool):
    """Results and scratch between guard pages."""

    def maker(shape, dtype):
        return lambda: Guarded(torch.Size(shape).numel() * dtype.itemsize, at_end).tensor(shape, dtype)

    def take(size):
        memory = Guarded(-(-size // 64) * 64, at_end)
        KEPT.append(memory)
        return -(-memory.address // 64) * 64, size, memory

    return maker, take


def fence(module, at_end: bool) -> None:
    """A candidate's kernels from now on get results and scratch between guard pages, and threads even where they do not pay.

    Scratch is taken by a module's own runner or by the machine code that calls kernels, which would take little of it from the
    stack.
    """
    maker, take = fenced(at_end)
    for place in (module, _run):
        place.maker, place.take, place.give, place.ONE_THREAD_OPS = maker, take, gone, -1
    _call.USED, _call.ON_STACK = (*_call.USED[: _call.TAKE - 1], take, gone), -1


def gone(scratch) -> None:
    """Scratch memory is used once."""


def poison(line, arrays, data_seed):
    """NaN and infinities in both operands: what does not read them must not feel them."""
    rng = np.random.default_rng(data_seed)
    for operand, array in zip((line.a, line.b), arrays, strict=False):
        if not operand.is_integer and array.size:
            array.reshape(-1)[rng.integers(array.size)] = rng.choice([np.nan, np.inf, -np.inf])


def one(line, data_seed, constant, at_end, threads, target, wild):
    graph = parse(str(line))
    (node,) = graph.outputs
    if any(s.op.name != "input" for s in node.src):
        return False
    arrays = line.arrays(data_seed)
    if wild:
        poison(line, arrays, data_seed)
    values = dict(zip(graph.inputs, tensors(line, arrays), strict=True))
    b = graph.inputs[1]
    problem = problem_of(node)
    weights = tuple(constant and (s is b or s.op.label[:2] == "b_") for s in node.src)
    problem = Problem(problem.op, problem.types, weights)
    if refusal(llvm.CANDIDATE, problem, target) is not None:
        return False
    sys.stdout.write(f"{line}{' constant' if constant else ''}{' wild' if wild else ''}\n")
    sys.stdout.flush()
    sources = [guarded(values[s], at_end) for s in node.src]
    results = []
    points = list(plan_for(llvm.CANDIDATE, problem, target).schedules())
    for schedule in dict.fromkeys((points[0], points[data_seed % len(points)])):  # the best guess, and any other
        run = (
            plan_for(llvm.CANDIDATE, problem, target)
            .build(schedule)
            .prepare({i: t for i, t in enumerate(sources) if weights[i]})
        )
        for count in threads:
            torch.set_num_threads(count)
            (result,) = run(sources)
            assert_means(line, arrays, result)
            results.append(result.clone())
        first = results[-len(threads)].contiguous().view(torch.uint8)
        same = [torch.equal(first, r.contiguous().view(torch.uint8)) for r in results[-len(threads) :]]
        assert all(same), "results depend on threads"
    # Which NaN it is may depend on the order of an instruction's operands, and so on the schedule.
    pairs = [(results[0].double(), r.double()) for r in results[1:]]
    assert all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in pairs), "results depend on the schedule"
    return True


def child(start: int, count: int, chip: str, threads: list[tuple[int, ...]], other_machine: bool = False) -> int:
    done = 0
    target = CPU
    if chip:
        target = replace(CPU, chip=next(c for c in chips() if c.name == chip))
    if other_machine:
        folder = Path(tempfile.mkdtemp())
        llvm.source_of = lambda nest: Source(nest, GemmWriter(nest).write().source("", "").given)
        function = lambda nest: Program(nest, *AS_LLVM_SAYS[chip], folder)  # noqa: E731
        llvm.engine = SimpleNamespace(require=require, function=function)
    elif chip:
        source = emulated if chip in FOREIGN else Module.source
        processor = host() if chip in FOREIGN else (OLDER[chip], "")
        llvm.source_of = lambda nest: source(GemmWriter(nest).write(), *processor)

    @seed(start)
    @settings(
        max_examples=count, suppress_health_check=list(HealthCheck), phases=[Phase.generate], deadline=None, database=None
    )
    @given(
        st.one_of(lines(plain=True, largest=st.sampled_from([0, 1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 130])), lines()),
        st.integers(0, 1000),
        st.booleans(),
        st.booleans(),
        st.sampled_from(threads),
        st.sampled_from([False, False, True]),
    )
    def attempt(line, data_seed, constant, at_end, threads, wild):
        nonlocal done
        fence(llvm, at_end)
        done += one(line, data_seed, constant, at_end, threads, target, wild)
        assert all(g.intact() for g in KEPT), "wrote beside a buffer"
        KEPT.clear()

    attempt()
    if other_machine:
        shutil.rmtree(folder)
    return done


def run_child(
    start: int,
    count: int,
    chip: str = "",
    threads: tuple[tuple[int, ...], ...] = ((1, 2), (1, 3), (1, 8), (1, 5)),
    other_machine: bool = False,
) -> int:
    """Run those of `count` random problems that have a kernel, in another process, and give their number."""
    call = f"t.child({start}, {count}, {chip!r}, {list(threads)}, {other_machine})"
    begin = f"import faulthandler, sys; faulthandler.enable(); sys.path[:0] = {SEARCHED}"
    begin += "; from tests.candidates.llvm import test_random as t"
    code = f"{begin}; sys.stdout.write('DONE ' + str({call}))"
    ran = warm.run(["-c", code], timeout=1800)
    last = ran.stdout.strip().splitlines()[-1:] or [""]
    assert ran.returncode == 0, f"at {last[0]}: exit {ran.returncode}\n{ran.stderr[-3000:]}"
    return int(last[0].split()[1])


# Processors whose kernels this one can run too.
OLDER = {
    "x86_64_avx2": "haswell",
    "x86_64_avx_vnni": "alderlake",
    "x86_64_avx512": "skylake-avx512",
    "x86_64_avx512_vnni": "cascadelake",
    "x86_64_avx512_bf16": "cooperlake",
}
FOREIGN = [c.name for c in chips() if c.name == "x86_64_amx" or c.name.startswith("aarch64")]
RUNNABLE = [c.name for c in chips() if c.name in OLDER and c.requires <= CPU.features and c is not CPU.chip]


def test_random_problems_between_guard_pages():
    assert run_child(0, 60) > 15


@pytest.mark.thin(3)
@pytest.mark.parametrize("chip", RUNNABLE)
def test_kernels_for_older_processors_are_right_as_well(chip):
    assert run_child(1, 30, chip) > 10


@pytest.mark.thin(3)
@pytest.mark.parametrize("chip", FOREIGN)
def test_kernels_for_other_processors_are_right_where_their_instructions_are_emulated(chip):
    assert run_child(2, 30, chip) > 10


@pytest.mark.conformance
@pytest.mark.parametrize("chip", [c for c in FOREIGN if c.startswith("aarch64")] + ["x86_64_avx2"])
def test_kernels_for_other_processors_are_right_in_qemu(chip):
    """The chip's own machine code; `other_machine` says what must be installed."""
    why = missing(AS_LLVM_SAYS[chip][0].split("-")[0])
    if why is not None:
        pytest.skip(why)
    assert run_child(3, 250, chip, other_machine=True) > 80


@pytest.mark.conformance
@pytest.mark.parametrize("start", range(8))
def test_two_thousand_random_problems_on_one_to_eight_threads(start):
    assert run_child(100 + start, 440, threads=(tuple(range(1, 9)),)) > 250


@pytest.mark.conformance
@pytest.mark.parametrize("chip", RUNNABLE + FOREIGN)
def test_a_thousand_random_problems_for_other_processors(chip):
    assert run_child(200, 1000, chip) > 400
