"""The path from a kernel's text to what runs: a module, machine code for any architecture (no GPU needed), its needs, a launch.

A kernel has every extent in its text that its problem leaves no choice of, so a call passes pointers, the problem's own numbers
and what its open extents are (`Built.at`). A text is compiled once, however many problems share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import linecache
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Thread
from types import CodeType, ModuleType
from typing import Any, cast

from tilewright.candidates.triton.expressions.text import OPEN, KernelSource, Number, Text
from tilewright.candidates.triton.runtime.launch import Start
from tilewright.candidates.triton.runtime.versions import direct, make_launcher, named
from tilewright.hardware.target import Target
from tilewright.ir.extent import Extent, extent_at
from tilewright.schedule import fork_server
from tilewright.schedule.candidate import Unsupported, generated
from tilewright.schedule.recipe import MachineCode, Parts

IMPORTS = "import triton\nimport triton.language as tl\n"
GLUON_IMPORTS = IMPORTS + "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl\n"
REGISTERS, FRAME, SIZED = 0x2F, 0x11, 4  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE, EIFMT_SVAL in a cubin's section .nv.info
INSTALL = "Triton is not installed: pip install tilewright[gpu]"


@cache
def installed() -> bool:
    """Tell whether Triton can be imported; it is not imported yet."""
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Arch:
    """An architecture that Triton compiles for.

    Attributes:
        backend: "cuda" or "hip".
        name: compute capability (90), or AMD's name of the architecture ("gfx942").
        warp: threads of a warp.
    """

    backend: str
    name: int | str
    warp: int

    @property
    def capability(self) -> int:
        """NVIDIA's compute capability, 0 for others."""
        return self.name if isinstance(self.name, int) else 0


def arch_of(target: Target) -> Arch:
    """The architecture of a device.

    Raises:
        Unsupported: Triton is not installed, or makes nothing for it.
    """
    if not installed():
        raise Unsupported(INSTALL)
    for feature in sorted(target.features) if target.kind == "cuda" else ():
        nvidia, amd = re.fullmatch(r"sm_(\d+)a?", feature), re.fullmatch(r"gfx9[0-9a-f]+", feature)
        if nvidia and int(nvidia[1]) >= 75:
            return Arch("cuda", int(nvidia[1]), 32)
        if amd:
            return Arch("hip", feature, 64)
    raise Unsupported(f"Triton does not compile for {target.name}")


def exact_fp8(arch: Arch) -> frozenset[str]:
    """fp8 types that the architecture's own instructions convert to and from as the graph says."""
    return frozenset({"f8e4m3fn", "f8e5m2"}) if arch.capability >= 89 else frozenset()


class _Loader(InspectLoader):
    """Loads a module from text in memory."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, f"<{fullname}>", "exec")


@lru_cache(maxsize=4096)
def module(text: str) -> ModuleType:
    """The module that a text makes, imports included. Equal texts are one module; nothing is written to a disk."""
    name = f"tilewright_kernel_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    linecache.cache[f"<{name}>"] = len(text), None, text.splitlines(keepends=True), f"<{name}>"  # where Triton reads it
    loader = _Loader(text)
    made = sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=f"<{name}>"))
    made.__file__ = f"<{name}>"
    with named():
        loader.exec_module(made)
    return made


def compiled(function: Any, signature: Mapping[str, str], arch: Arch, **options: object) -> Any:
    """Triton's compiled kernel (`asm`, `metadata`) of a jitted function, for an architecture that need not be at hand.

    Args:
        function: from `module`, decorated with `triton.jit` or `gluon.jit`.
        signature: Triton's type of each argument ("*fp16", "i32"); all pointers are multiples of 16 bytes, and so many are what
            is "i32:16".
        arch: the architecture.
        options: `num_warps`, `num_stages`, `enable_fp_fusion` and the like.

    Raises:
        CompilerError: the installed Triton makes none of it.
    """
    if _warming:
        _warming[0].join()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kind = GluonASTSource if function.is_gluon() else ASTSource
    sixteens = [i for i, t in enumerate(signature.values()) if t.startswith("*") or t.endswith(":16")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in sixteens}
    types = {name: t.removesuffix(":16") for name, t in signature.items()}
    source = kind(fn=function, signature=types, constexprs={}, attrs=attrs)
    with named():
        keyed(function)
        given = {"enable_fp_fusion": True} | options  # the default until 3.9
        made = triton.compile(source, target=GPUTarget(arch.backend, arch.name, arch.warp), options=given)
    for text in ("source", "llir"):  # up to megabytes, for as long as the kernel lives; they are in Triton's cache
        made.asm.pop(text, None)
    return made


_warming: list[Thread] = []


def warm() -> None:
    """Begin to import Triton and to work out the keys of its cache: a digest of all its files, and its assembler's version, for
    which Python is not needed. Who compiles waits for that; together it takes half a second."""
    if installed() and not _warming:
        _warming.append(Thread(target=_warm, name="tilewright warms Triton", daemon=True))
        _warming[0].start()


def _warm() -> None:
    with contextlib.suppress(Exception):  # who compiles meets it again
        importlib.import_module("triton.experimental.gluon.language")
        importlib.import_module("triton.runtime.cache").triton_key()
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        make_backend(GPUTarget("cuda", 90, 32)).hash()


def keyed(function: Any) -> None:
    """Have Triton work out the key of a jitted function after those of the functions that it calls.

    Triton puts the constants that a callee reads into the caller's key only where the callee has a key already
    (`DependenciesFinder._update_hash`, runtime/jit.py). So a kernel would have another key in a process that compiled something
    before, and be compiled again.
    """
    _keyed(function, (), set())


def _keyed(value: Any, names: Iterable[str], seen: set[int]) -> None:
    """The same for all that a value holds: a function, a class of arguments, of a module what has one of the names."""
    from triton.runtime.jit import JITCallable

    if isinstance(value, ModuleType):
        for name in names:
            _keyed(getattr(value, name, None), (), seen)
    elif getattr(value, "__triton_aggregate__", False):
        for each in value.hash_attrs:
            _keyed(each, (), seen)
    elif isinstance(value, JITCallable) and id(value) not in seen:
        seen.add(id(value))
        if getattr(value, "hash", None) is not None:  # those it calls have theirs, too
            return
        mentioned = sorted(_mentioned(value.fn.__code__))
        for name in mentioned:
            _keyed(value.fn.__globals__.get(name), mentioned, seen)
        _ = value.cache_key


def _mentioned(code: CodeType) -> set[str]:
    """The names that code reads, and functions within it."""
    within = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*map(_mentioned, within))


Function = tuple[Sequence[str], Text]  # arguments and body; a body that has `side` among them may name what is in it


def instance(
    kernel: str,
    config: object,
    given: Sequence[str],
    pointers: Sequence[str],
    functions: Mapping[str, Function],
    numbers: Mapping[str, Number],
    scalars: Sequence[str] = (),
    note: str = "",
    *,
    gluon: bool = True,
    extents: Mapping[str, str] | None = None,
) -> KernelSource:
    """A module for one use of a kernel that stands in a source file: its function `kernel` calls that one with a configuration
    and with generated functions, all constants, so that Triton compiles them into one. Triton's cache knows it by the source
    of all files that are called, by the configuration and by the generated text.

    Args:
        kernel: "module.function", called as `function(*given, side, CONFIG, **functions)`, with `side` the tuple of pointers,
            `scalars` and numbers.
        config: a frozen dataclass of numbers, strings and their tuples; its fields are `constexpr` there.
        given: arguments of its own: names, those of the entry's arguments before `pointers` among them, numbers, and their
            tuples.
        pointers: arguments that generated functions alone read.
        functions: generated functions, by the kernel's names for them.
        numbers: arguments that a launch passes last (`Text.numbers`, which all bodies share).
        scalars: arguments between pointers and numbers, which `given` may name, too.
        note: anything else that machine code depends on, such as rewrites of its PTX.
        gluon: the kernel is written in Gluon, else in plain Triton.
        extents: names of the configuration that are open, and the arguments that they are (`Text.extents`).
    """
    path, _, name = kernel.rpartition(".")
    record = type(config)
    side = [*pointers, *scalars, *numbers]
    imports, jit = (GLUON_IMPORTS, "gluon.jit") if gluon else (IMPORTS, "triton.jit")
    lines = [
        f"{imports}from {path} import {name}",
        f"from {record.__module__} import {record.__qualname__}",
        "from tilewright.candidates.triton.runtime._gluon import async_load, constants\n",
        f"CONFIG = constants({config!r})",
    ]
    if extents:
        own_fields = [f.name for f in fields(cast("Any", config)) if f.name in extents]
        config = replace(cast("Any", config), **dict.fromkeys(own_fields, OPEN))
        lines[-2:] = [
            "from tilewright.candidates.triton.expressions.text import OPEN",
            "from tilewright.candidates.triton.runtime._gluon import async_load, constants, opened\n",
            f"CONFIG = constants({config!r})",
            f"Config = opened(CONFIG, {tuple(extents)!r})",
        ]
    for own, (arguments, body) in functions.items():
        unpacked = f"    {', '.join(side)}, = side\n" if "side" in arguments and side else ""
        lines.append(f"\n\n@{jit}\ndef {own}({', '.join(arguments)}):\n{unpacked}{body}")
    entry = dict.fromkeys(n for g in given for n in re.findall(r"[A-Za-z_]\w*", g) if n not in side) | dict.fromkeys(side)
    known = f"Config(CONFIG, {', '.join(extents.values())})" if extents else "CONFIG"
    call = [*given, f"({''.join(f'{x}, ' for x in side)})", known, *(f"{own}={own}" for own in functions)]
    said = f'    """{note}"""\n' if note else ""
    lines.append(f"\n\n@{jit}\ndef kernel({', '.join(entry)}):\n{said}    {name}({', '.join(call)})\n")
    return KernelSource("\n".join(lines), numbers)


@dataclass(frozen=True)
class Built:
    """Machine code, and what a launch passes to it.

    Attributes:
        kernel: Triton's compiled kernel.
        numbers: the last arguments.
        names: names of the arguments before them, where those are not known otherwise.
        text: the module that it was made of.
    """

    kernel: Any
    numbers: tuple[Number, ...]
    names: tuple[str, ...] = ()
    text: str = ""

    def at(self, values: Mapping[str, int]) -> Built:
        """The same code for values of the dims that it leaves open, by name; for the kernel that is being built of it."""
        generated(self.text)
        return replace(self, numbers=tuple(extent_at(n, values) if isinstance(n, Extent) else n for n in self.numbers))


def build(source: KernelSource, pointers: Mapping[str, str], arch: Arch, device: int = 0, **options: int | bool) -> Built:
    """A module's function `kernel` as machine code, compiled once for each device, since it is loaded on one.

    Args:
        source: the module.
        pointers: Triton's type of each argument but numbers.
        arch, options: see `compiled`.
        device: index of the device that runs it.
    """
    generated(source.text)
    kinds = tuple((dict(pointers) | source.signature).items())
    kernel = _machine_code(source.text, kinds, arch, device, tuple(sorted(options.items())))
    return Built(kernel, tuple(source.numbers.values()), text=source.text)


@lru_cache(maxsize=256)
def _machine_code(
    text: str, kinds: tuple[tuple[str, str], ...], arch: Arch, device: int, options: tuple[tuple[str, int | bool], ...]
) -> Any:
    made = compiled(module(text).kernel, dict(kinds), arch, **dict(options))
    if fork_server.in_worker and arch.backend == "cuda":  # which compiles for others that launch
        make_launcher(made)
    return made


@dataclass(frozen=True)
class Needs:
    """Resources of machine code: registers of a thread, bytes of local memory it spills to, bytes of shared memory."""

    registers: int
    spills: int
    shared_bytes: int


def needs(kernel: Any) -> Needs:
    """The resources of a compiled kernel."""
    shared = int(kernel.metadata.shared)
    asm = kernel.asm
    if "cubin" not in asm:
        found = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", asm["amdgcn"])}
        return Needs(found.get("vgpr_count", 0), 4 * found.get("vgpr_spill_count", 0), shared)
    return Needs(*_usage(asm["cubin"]), shared)


@lru_cache(maxsize=256)
def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory, as `cuobjdump --dump-resource-usage` says them, which is a process for each."""
    found = {REGISTERS: 0, FRAME: 0}
    header, at = struct.unpack_from("<Q", cubin, 40)[0], 0
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, header + i * size) for i in range(count)]
    for name, *_, start, length in sections:
        at = sections[names][4] + name
        if cubin[at : cubin.index(0, at)] != b".nv.info":
            continue
        at = start
        while at < start + length:
            form, kind, room = struct.unpack_from("<BBH", cubin, at)
            if form == SIZED and kind in found:
                found[kind] = max(found[kind], struct.unpack_from("<I", cubin, at + 8)[0])  # after the function's number
            at += 4 + (room if form == SIZED else 0)
    return found[REGISTERS], found[FRAME]


def assembly(kernel: Any) -> str:
    """The machine code of a compiled kernel: SASS, or AMD's assembly."""
    return _tool("nvdisasm", kernel.asm["cubin"]) if "cubin" in kernel.asm else kernel.asm["amdgcn"]


def _tool(name: str, binary: bytes, *arguments: str) -> str:
    """The output of one of the tools in Triton's package on machine code."""
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([tool, *arguments, file.name], check=True, capture_output=True, text=True, timeout=60).stdout


def launcher(kernel: Any, grid: Sequence[int], device: int, numbers: Sequence[Number] = ()) -> Start:
    """A kernel's start on torch's current stream of a device, given its arguments; `numbers` come after them.

    Descriptors are made already, and come with their extents and strides. What Triton does on every call (binding, hooks,
    looking the kernel up) is done here once.
    """
    import torch
    from triton.runtime import driver

    with torch.cuda.device(device):
        start = kernel.run  # loads the code
    x, y, z = (*grid, 1, 1)[:3]
    scratch = kernel.metadata.global_scratch_size or getattr(kernel.metadata, "profile_scratch_size", 0)
    if kernel.metadata.target.backend == "cuda" and not scratch:
        describe = partial(_described, kernel, (x, y, z), tuple(numbers))
        with named((AttributeError, KeyError, TypeError)):
            return Start(direct(kernel, start, (x, y, z), device, tuple(numbers)), describe)
    function, packed, ends = kernel.function, kernel.packed_metadata, tuple(numbers)
    stream: Callable[[int], int] = getattr(driver.active, "get_current_stream")  # noqa: B009 (Triton does not declare it)

    def general(*given: object) -> None:
        start(x, y, z, stream(device), function, packed, None, None, None, *given, *ends)

    return Start(general, lambda parts: None)


def _described(kernel: Any, grid: tuple[int, int, int], numbers: tuple[Number, ...], parts: Parts) -> MachineCode | None:
    """A compiled kernel and its launch as data, but for descriptors; None where Triton adds what `cubin.py` does not."""
    import torch

    warps, blocks, shared_bytes = kernel.packed_metadata[:3]
    if blocks != 1 or kernel.metadata.launch_cooperative_grid:
        return None
    binary = parts.bytes(torch.frombuffer(bytearray(kernel.asm["cubin"]), dtype=torch.uint8))
    early = bool(kernel.metadata.launch_pdl)
    return MachineCode(binary, kernel.metadata.name, grid, 32 * warps, shared_bytes, early, (), numbers)
