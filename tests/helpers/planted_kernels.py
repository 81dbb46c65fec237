"""Generated kernels with a mistake in their machine code: a line or two of LLVM IR changed, as a bug in the generator would.

The seventh is a kernel of its own: it walks strided sources with offsets of 32 bits.
"""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tilewright.candidates.llvm.gemm.candidate import CANDIDATE, source_of
from tilewright.candidates.llvm.runtime import engine
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import Kernel, Schedule, plan_for
from tilewright.schedule.problem import Problem


def changed(function: str, what: str, to: str) -> Callable[[str, int], str]:
    """A pattern in one function of a module replaced; `N` in it stands for the result's columns. It must be there once."""

    def change(text: str, columns: int) -> str:
        start = text.index(f"@{function}(ptr %arguments")
        end = text.index("\n}\n", start)
        body, count = re.subn(what.replace("N", str(columns)), to.replace("N-1", str(columns - 1)), text[start:end])
        assert count == 1, (function, what, count)
        return text[:start] + body + text[end:]

    return change


ONLY_ONCE = """
@ran = internal global i64 0
define void @run(ptr %arguments, i64 %threads, i64 %pack) #0 {
  %before = load i64, ptr @ran
  store i64 1, ptr @ran
  %fresh = icmp eq i64 %before, 0
  br i1 %fresh, label %work, label %done
work:
  call void @really_run(ptr %arguments, i64 %threads, i64 %pack)
  br label %done
done:
  ret void
}
"""


def only_once(text: str, columns: int) -> str:
    """Its result is what lay in memory: right, if the allocator hands out the block that it wrote the first time."""
    assert text.count("define void @run(") == 1
    return text.replace("define void @run(", "define internal void @really_run(").replace(
        "attributes #0", f"{ONLY_ONCE}attributes #0"
    )


MISTAKES: dict[str, Callable[[str, int], str]] = {
    "sound": lambda text, columns: text,
    "bad_tail": changed("store_0_part", r"sub nsw i64 N, %column", "sub nsw i64 N-1, %column"),
    "bad_index": changed("store_0", r"mul nsw i64 (%\w+), N\n", r"mul nsw i64 \1, N-1\n"),
    "missing_store": changed("store_0", r"phi i64 \[0, %entry\]", "phi i64 [1, %entry]"),
    "stale_output": only_once,
    "nan_through_beta_0": changed(
        "store_0",
        r"store (<\d+ x float>) (%\w+), ptr (%\w+), align 1",
        r"%before = load \1, ptr \3, align 1\n  %beta = fmul \1 %before, zeroinitializer\n"
        r"  %both = fadd \1 \2, %beta\n  store \1 %both, ptr \3, align 1",
    ),
    "race": changed("multiply", r"mul nsw i64 %thread,", "mul nsw i64 0,"),  # all threads add up in the first one's memory
}


@dataclass(frozen=True)
class Broken:
    """The generated gemm, with K in several passes, so that partial sums go through each thread's own memory."""

    name: str
    problem: Problem
    target: Target

    @property
    def sound(self):
        return plan_for(CANDIDATE, self.problem, self.target)

    def schedules(self):
        own, deep = self.sound.schedules(), self.sound.problem.K
        return [next(s for s in own if s["kc"] < deep and s["pack_lhs"] and not s["pack_per_thread"] and s["mc"] > s["mr"])]

    def build(self, schedule):
        nest = self.sound.nest_of(schedule)
        source = source_of(nest)
        wrong = source._replace(text=MISTAKES[self.name](source.text, self.sound.problem.N))
        return replace(self.sound.kernel_of(nest, schedule, wrong), candidate=self.name)


STRIDED = """
define void @run(ptr %a, ptr %b, ptr %out, i64 %m, i64 %n, i64 %k, i64 %am, i64 %ak, i64 %bk, i64 %bn) {
entry:
  br label %rows
rows:
  %i = phi i64 [0, %entry], [%i2, %row_done]
  br label %columns
columns:
  %j = phi i64 [0, %rows], [%j2, %column_done]
  br label %sum
sum:
  %l = phi i64 [0, %columns], [%l2, %sum]
  %acc = phi float [0.0, %columns], [%acc2, %sum]
  %a1 = mul i64 %i, %am
  %a2 = mul i64 %l, %ak
  %a3 = add i64 %a1, %a2
  %a4 = NARROW i64 %a3 to OFFSET
  %ap = getelementptr i8, ptr %a, OFFSET %a4
  %b1 = mul i64 %l, %bk
  %b2 = mul i64 %j, %bn
  %b3 = add i64 %b1, %b2
  %b4 = NARROW i64 %b3 to OFFSET
  %bp = getelementptr i8, ptr %b, OFFSET %b4
  %x = load float, ptr %ap
  %y = load float, ptr %bp
  %xy = fmul float %x, %y
  %acc2 = fadd float %acc, %xy
  %l2 = add i64 %l, 1
  %more_l = icmp slt i64 %l2, %k
  br i1 %more_l, label %sum, label %column_done
column_done:
  %o1 = mul i64 %i, %n
  %o2 = add i64 %o1, %j
  %op = getelementptr float, ptr %out, i64 %o2
  store float %acc2, ptr %op
  %j2 = add i64 %j, 1
  %more_j = icmp slt i64 %j2, %n
  br i1 %more_j, label %columns, label %row_done
row_done:
  %i2 = add i64 %i, 1
  %more_i = icmp slt i64 %i2, %m
  br i1 %more_i, label %rows, label %done
done:
  ret void
}
"""


@dataclass(frozen=True)
class Strided:
    """One element after another, of sources in any strides; `offset` is the type that byte offsets are worked out in."""

    name: str
    problem: Problem
    target: Target
    offset: str = "i64"

    def schedules(self):
        return [Schedule()]

    def build(self, schedule):
        problem = self.problem
        narrow = "bitcast" if self.offset == "i64" else "trunc"
        code = engine.loaded(STRIDED.replace("OFFSET", self.offset).replace("NARROW", narrow))
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 7)(code.address("run"))

        def run(sources):
            a, b = sources
            out = torch.empty(problem.M, problem.N)
            call(
                a.data_ptr(),
                b.data_ptr(),
                out.data_ptr(),
                problem.M,
                problem.N,
                problem.K,
                *(4 * s for s in (*a.stride(), *b.stride())),
            )
            return [out]

        return Kernel(self.name, schedule, lambda weights: run)
