"""Kernels for another architecture as programs that qemu-user runs: what LLVM makes for it, on numbers.

A program reads an image of its memory from standard input, calls the kernel's entry as CPython would, and writes it back.
It has what little a kernel is given: integers are their own Python objects, and a parallel region is run by one thread, which
then takes all tasks. Needs qemu-user and, for AArch64, binutils-aarch64-linux-gnu.
"""

import ctypes
import os
import shutil
import struct
import subprocess
import traceback
from pathlib import Path
from typing import Any

from tilewright.candidates.llvm.expressions.printer import size_bytes
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.gemm.nest import Nest
from tilewright.candidates.llvm.runtime.engine import assembly
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access

ARENA, MEMORY = 0x10000000, 1 << 28  # where its memory lies
FENCE = 64  # bytes around every buffer that must stay as they are
POISON = 0x7F

RUNTIME = """
    .section .arena, "aw", @nobits
    .globl arena
arena:
    .zero {memory}
    .bss
    .globl _Py_NoneStruct
_Py_NoneStruct:
    .zero 8
    .text
    .globl _start, tilewright_parallel, tilewright_finished, tilewright_meet, PyLong_AsVoidPtr, PyLong_AsLong
    .globl PyEval_SaveThread, PyEval_RestoreThread, Py_IncRef
"""
# Linux system calls: asm-generic/unistd.h (read 63, write 64, exit 93); asm/unistd_64.h (read 0, write 1, exit 60)
AARCH64 = """
_start:
    ldr x19, =arena
    mov x20, x19
1:  mov x0, #0
    mov x1, x20
    mov x2, #65536
    mov x8, #63
    svc #0
    cmp x0, #0
    b.lt 9f
    add x20, x20, x0
    b.ne 1b
    mov x0, #0
    mov x1, x19
    mov x2, #0
    bl python
2:  mov x0, #1
    mov x1, x19
    sub x2, x20, x19
    mov x8, #64
    svc #0
    cmp x0, #0
    b.le 9f
    add x19, x19, x0
    cmp x19, x20
    b.lt 2b
    mov x0, #0
    mov x8, #93
    svc #0
9:  mov x0, #1
    mov x8, #93
    svc #0
tilewright_parallel:
    mov x2, x0
    mov x0, x1
    mov x1, #0
    br x2
PyEval_SaveThread:
    mov x0, #0
PyLong_AsVoidPtr:
PyLong_AsLong:
tilewright_finished:
tilewright_meet:
PyEval_RestoreThread:
Py_IncRef:
    ret
"""
X86_64 = """
_start:
    movabsq $arena, %rbx
    movq %rbx, %r12
1:  xorl %eax, %eax
    xorl %edi, %edi
    movq %r12, %rsi
    movl $65536, %edx
    syscall
    testq %rax, %rax
    js 9f
    addq %rax, %r12
    testq %rax, %rax
    jnz 1b
    xorl %edi, %edi
    movq %rbx, %rsi
    xorl %edx, %edx
    movabsq $python, %rax
    call *%rax
2:  movl $1, %eax
    movl $1, %edi
    movq %rbx, %rsi
    movq %r12, %rdx
    subq %rbx, %rdx
    syscall
    testq %rax, %rax
    jle 9f
    addq %rax, %rbx
    cmpq %r12, %rbx
    jl 2b
    movl $60, %eax
    xorl %edi, %edi
    syscall
9:  movl $60, %eax
    movl $1, %edi
    syscall
tilewright_parallel:
    movq %rdi, %rax
    movq %rsi, %rdi
    xorl %esi, %esi
    jmp *%rax
PyEval_SaveThread:
    xorl %eax, %eax
    ret
PyLong_AsVoidPtr:
PyLong_AsLong:
    movq %rdi, %rax
tilewright_finished:
tilewright_meet:
PyEval_RestoreThread:
Py_IncRef:
    ret
"""
# By the triple's first word: its start, what assembles, what links, and the emulator
MACHINES = {
    "aarch64": (
        AARCH64,
        ["aarch64-linux-gnu-as", "-march=armv8.6-a"],
        ["aarch64-linux-gnu-ld"],
        ["qemu-aarch64", "-cpu", "max"],
    ),
    "x86_64": (X86_64, ["as"], ["ld"], ["qemu-x86_64", "-cpu", "max"]),
}


def missing(architecture: str) -> str | None:
    """Say what is not installed of what runs an architecture's kernels; None if everything is."""
    lacking = [tool for tool, *_ in MACHINES[architecture][1:] if shutil.which(tool) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def sizes(nest: Nest, threads: int) -> list[int]:
    """Bytes behind each pointer of a call."""
    found = [0] * nest.pointers

    def sources(access: Access) -> None:
        for n in toposort((access.root,)):
            if isinstance(n.op, Param):
                found[n.op.index] = n.tensor.elements * size_bytes(n.dtype)

    for access in (nest.lhs, nest.rhs, *nest.stores):
        sources(access)
    for i, store in enumerate(nest.stores):
        found[nest.sources + i] = store.root.tensor.elements * size_bytes(store.root.dtype)
    given = 8 * len(GemmWriter(nest).write().given)
    found[nest.given_at :] = given, nest.scratch(threads), nest.packed_rhs_bytes if nest.constant else 0
    return found


CALLED: list[object] = []


class Program:
    """A kernel as a program: called with addresses in this process, whose memory it is given a copy of."""

    def __init__(self, nest: Nest, triple: str, cpu: str, features: str, folder: Path):
        start, assemble, link, self._emulator = MACHINES[triple.split("-")[0]]
        self._nest, self._file = nest, folder / "kernel"
        kernel = assembly(GemmWriter(nest).write().text(cpu, features), triple, cpu, features)
        for name, text in (("kernel", kernel), ("start", RUNTIME.format(memory=MEMORY) + start)):
            (folder / f"{name}.s").write_text(text)
            run([*assemble, f"{name}.s", "-o", f"{name}.o"], folder)
        run([*link, f"--section-start=.arena={ARENA:#x}", "start.o", "kernel.o", "-o", "kernel"], folder)

        def called(pointers: Any, threads: int, pack: int) -> None:
            try:
                self(*pointers[: nest.pointers], threads, pack)
            except BaseException:  # would be lost on its way through machine code
                traceback.print_exc()
                os._exit(1)

        self._run = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int64, ctypes.c_int64)(called)
        self.__self__ = ctypes.cast(self._run, ctypes.c_void_p).value  # as `engine.function` gives it
        CALLED.append(self)  # by an address, which keeps nothing

    def __call__(self, *given: int) -> None:
        *pointers, threads, pack = given
        image, places = bytearray(8 * len(given)), list[int]()
        for address, size in zip(pointers, sizes(self._nest, threads), strict=True):
            image += bytes([POISON]) * (FENCE + -len(image) % 64)
            places.append(len(image) if address else 0)
            image += ctypes.string_at(address, size) if address else b""
        image += bytes([POISON]) * FENCE
        struct.pack_into(f"<{len(given)}Q", image, 0, *[p and ARENA + p for p in places], threads, pack)
        after = run([*self._emulator, str(self._file)], self._file.parent, bytes(image))
        assert len(after) == len(image)
        writes = {*range(self._nest.sources, self._nest.pointers)} - {self._nest.given_at}
        end = 0
        for i, (address, size, place) in enumerate(zip(pointers, sizes(self._nest, threads), places, strict=True)):
            if address:
                kept = place + size if i not in writes else place
                assert after[end:kept] == image[end:kept], f"wrote before or into pointer {i}"
                end = place + size
                if i in writes:
                    ctypes.memmove(address, after[place:end], size)
        assert after[end:] == image[end:], "wrote past the last buffer"


def run(command: list[str], folder: Path, given: bytes = b"") -> bytes:
    ran = subprocess.run(command, input=given, capture_output=True, cwd=folder, timeout=300)
    assert ran.returncode == 0, f"{' '.join(command)}: exit {ran.returncode}\n{ran.stderr.decode(errors='replace')[-2000:]}"
    return ran.stdout
