"""Limits of this processor: each dot instruction on registers alone, and reading memory, at a number of threads."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import torch

from tilewright import deadline
from tilewright.candidates.llvm.expressions.text import Function, Module, vec
from tilewright.candidates.llvm.gemm import amx as tiles
from tilewright.candidates.llvm.gemm.dots import DOTS, Dot
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.calls import write_entries
from tilewright.hardware.ceilings import Loops
from tilewright.hardware.target import Chip, Target
from tilewright.threads import count

X86 = platform.machine().lower() in ("x86_64", "amd64")
STEPS, TASKS = 12_500, 16  # of a task, and tasks of a thread: they even out who comes late
LEAST_S, SETTLED_S, ROUNDS = 1.0, 0.1, 9  # new threads find cores of their own in the first; those that have need the second
LANES = 16  # of 32 bits, in the reading loop

_settled = set[int]()  # numbers of threads that have found cores


def loops(target: Target) -> Loops | None:
    """The loops that measure a target, by operand type; None where no code is generated for it."""
    if target.kind != "cpu" or engine.available() is not None:
        return None
    threads = count()
    return Loops(
        {name: lambda dot=dot: peak_gops(dot, threads) for name, dot in dots(target.chip).items()},
        lambda memory: read_gbps(memory, threads),
    )


def dots(chip: Chip) -> dict[str, Dot]:
    """A chip's instructions, the best for each type of its units."""
    return {unit.operand: DOTS[unit.instruction][0] for unit in reversed(chip.units) if unit.instruction in DOTS}


def _text(cpu: str, features: str, write: Callable[[Function, str, str], None]) -> str:
    """A module of python(memory, tasks, threads): what `write` writes, of the memory and a task's number, for each task."""
    module = Module()
    f = Function(module, "worker", [("ptr", "arguments"), ("i64", "thread")])
    memory, tasks = f.load("ptr", "%arguments", 8), f.load("i64", f.at("%arguments", 8), 8)
    with f.tasks(f.at("%arguments", CACHE_LINE), tasks) as task:
        write(f, memory, task)
    f.finish()
    write_entries(module, 2, 1)
    return module.text(cpu, features)


def peak_gops(dot: Dot, threads: int) -> float:
    """1e9 operations a second of one instruction that never waits: as many accumulators as the registers hold."""
    if dot.tile > 1:
        return _tile_gops(dot, threads)
    accumulators = dot.registers * 3 // 4
    memory = torch.zeros(4096 * (threads + 2), dtype=torch.uint8)
    ops = 2 * dot.lanes * dot.k * accumulators * STEPS * TASKS * threads
    return ops / _seconds(peak_text(dot, accumulators, *engine.host()), memory, threads) / 1e9


def peak_text(dot: Dot, accumulators: int, cpu: str, features: str) -> str:
    """The loop that `peak_gops` times, for a processor in LLVM's words."""

    def write(f: Function, memory: str, _: str) -> None:
        x, y = f.load(dot.operand, memory), f.load(dot.operand, f.at(memory, 64))
        with f.loop(0, STEPS, 1, [(dot.accumulator, "zeroinitializer")] * accumulators) as loop:
            loop.next = []
            for acc in loop.carried:  # an operand that may be another each time: nothing is done once for all
                x = f.v(f'call {dot.operand} asm sideeffect "", "=v,0"({dot.operand} {x})') if X86 else x
                loop.next.append(dot.emit(f, acc, x, y))
        out = f.at(memory, f.add(4096, f.mul("%thread", 4096)))
        for i, acc in enumerate(loop.carried):
            f.store(dot.accumulator, acc, f.at(out, 64 * i))

    return _text(cpu, features, write)


def _tile_gops(dot: Dot, threads: int) -> float:
    """The same of an instruction on tiles, two by two."""

    def write(f: Function, memory: str, _: str) -> None:
        tiles.configure(f, dot, 2 * dot.tile)
        for i in range(4):
            number, place = ("i8 immarg", str(tiles.LEFT + i)), ("ptr", f.at(memory, 1024 * i))
            f.intrinsic("llvm.x86.tileloadd64", "void", number, place, ("i64", str(tiles.ROW_BYTES)))
        with f.loop(0, STEPS):
            for i in range(2):
                for j in range(2):
                    dot.emit(f, str(2 * i + j), str(tiles.LEFT + i), str(tiles.RIGHT + j))
        tiles.release(f)

    ops = 2 * dot.lanes * dot.k * dot.tile * dot.tile * 4 * STEPS * TASKS * threads
    memory = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    return ops / _seconds(_text(*engine.host(), write), memory, threads) / 1e9


def read_gbps(memory: torch.Tensor, threads: int) -> float:
    """1e9 bytes a second of `memory`, which no cache holds, read once by all threads together. Its first page is written."""
    t, share = vec(LANES, "i32"), (memory.nbytes - 4096) // (TASKS * threads) // 4096 * 4096

    def write(f: Function, memory: str, task: str) -> None:
        start = f.at(memory, f.add(4096, f.mul(task, share)))
        with f.loop(0, share, 1024, [(t, "zeroinitializer")] * 16) as loop:
            at = f.at(start, loop.index)
            loop.next = [f.v(f"add {t} {acc}, {f.load(t, f.at(at, 64 * i))}") for i, acc in enumerate(loop.carried)]
        total = loop.carried[0]
        for other in loop.carried[1:]:
            total = f.v(f"xor {t} {total}, {other}")
        f.store(t, total, f.at(memory, f.mul(f.rem("%thread", 64), 64)))  # what nobody reads; that lanes are kept

    return share * TASKS * threads / _seconds(_text(*engine.host(), write), memory, threads) / 1e9


def _seconds(text: str, memory: torch.Tensor, threads: int) -> float:
    """The least seconds of a call, over long enough that new threads have found cores of their own.

    Raises:
        OverrunError: the time of the work around it is over.
    """
    run, times = engine.function(text), list[float]()
    least_s = SETTLED_S if threads in _settled else LEAST_S
    _settled.add(threads)
    began = time.perf_counter()
    while time.perf_counter() - began < least_s or len(times) < ROUNDS:
        start = time.perf_counter()
        run(memory.data_ptr(), TASKS * threads, threads)
        times.append(time.perf_counter() - start)
        deadline.check()
    return min(times)


LOOPS = loops
