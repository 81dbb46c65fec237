"""The path from IR text to something Python calls: code generation, a cache of object code on disk, and the threads to run it
on.

Object code is kept under the hash of everything it depends on (the text names the processor and its features), with a checksum
of both. So a process that meets a kernel again only loads it. Loading needs no optimiser and no code generator. LLVM itself is
imported when a kernel is first made: saved programs (`image.py`) run without it.

Kernels may be called from several Python threads at once, and in a forked child.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from tilewright.candidates.llvm.expressions.text import MEMORY, PYTHON, THREADS
from tilewright.candidates.llvm.runtime import pool
from tilewright.files import cache_folder, foreign, read_own, write_own
from tilewright.schedule.candidate import Unsupported, generated

METH_NOARGS, METH_O, METH_FASTCALL = 0x04, 0x08, 0x80  # CPython, Include/methodobject.h


def available() -> str | None:
    """None if kernels can be generated and run here, else the sentence why not."""
    try:
        _llvm()
    except ImportError:
        return "kernels for CPUs are generated with llvmlite, which is not installed"
    return pool.why_not()


def require() -> None:
    """See that kernels can be generated and run here.

    Raises:
        Unsupported: the sentence why not.
    """
    why = available()
    if why is not None:
        raise Unsupported(why)


@cache
def _llvm() -> ModuleType:
    """LLVM, ready for the processor at hand.

    Raises:
        ImportError: it is not installed.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def host() -> tuple[str, str]:
    """Name and features of this processor, as LLVM spells them."""
    llvm = _llvm()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@cache
def _initialize_all() -> None:
    llvm = _llvm()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def assembly(text: str, triple: str, cpu: str, features: str) -> str:
    """Machine code as text, for any processor LLVM knows; nothing runs.

    Selecting an instruction that the processor lacks aborts the process (LLVM has no error to return): only emit what the
    chip's data names.
    """
    _initialize_all()
    machine, module = _parsed(text, triple, cpu, features)
    return machine.emit_assembly(module)


def _parsed(text: str, triple: str, cpu: str, features: str) -> tuple[Any, Any]:
    llvm = _llvm()
    target = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True)
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = triple, str(machine.target_data)
    module.verify()
    return machine, module


def object_code(text: str) -> bytes:
    """Machine code of a module for this processor, from the cache on disk or made now."""
    llvm, (cpu, features) = _llvm(), host()
    key = hashlib.sha256("\0".join((text, cpu, features, repr(llvm.llvm_version_info))).encode()).hexdigest()
    file = _folder() / f"{key}.o"
    kept = _read(file, key)
    if kept is not None:
        return kept
    machine, module = _parsed(text, llvm.get_process_triple(), cpu, features)
    code: bytes = machine.emit_object(module)
    _write(file, key, code)
    return code


def _folder() -> Path:
    try:
        folder = cache_folder() / "kernels"
        if foreign(folder) is None:
            return folder
    except OSError:
        pass
    return Path(os.devnull) / "kernels"  # nothing is found there, nothing kept


def _seal(key: str, code: bytes) -> bytes:
    """Seal of code, the text and the processor it was made of: another kernel's object under this name fails it."""
    return hashlib.sha256(key.encode() + code).digest()


def _read(file: Path, key: str) -> bytes | None:
    """A cached object, unless it is missing, damaged, another key's, or could have been written by someone else."""
    try:
        content = read_own(file)
    except OSError:
        return None
    seal, code = content[:32], content[32:]
    return code if _seal(key, code) == seal else None


def _write(file: Path, key: str, code: bytes) -> None:
    """Whole or not at all; a cache that cannot be written is done without."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_own(file, _seal(key, code) + code)
    except OSError:
        return


@cache
def symbols() -> dict[str, int]:
    """Addresses of all functions of the process that kernels may call, by name: those of the thread pool, of the interpreter,
    and of the C library."""
    found = {"_Py_NoneStruct": id(None)} | {name: threads().address(name) for name in THREADS}
    return found | _addresses(PYTHON, ctypes.pythonapi) | _addresses(MEMORY, ctypes.CDLL(None))


def _addresses(names: Iterable[str], library: ctypes.CDLL) -> dict[str, int]:
    return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}


@cache
def _tell_llvm(known: tuple[tuple[str, int], ...]) -> None:
    """Tell LLVM's linker addresses by name."""
    for name, address in known:
        _llvm().add_symbol(name, address)


def for_threads() -> dict[str, int]:
    """Addresses of the functions that the thread pool may call, by name."""
    return _addresses((*pool.LIBRARY, *MEMORY), ctypes.CDLL(None))


_pool: Code | None = None
_starting = threading.Lock()


def threads() -> Code:
    """The thread pool of this process: made when first asked for, if it was not read from a saved program."""
    if _pool is None:
        take_threads(lambda known: _Loaded(object_code(pool.text()), known))
    assert _pool is not None
    return _pool


def take_threads(load: Callable[[Mapping[str, int]], Code]) -> None:
    """Start the thread pool, if it has not been: `load` gives its code, which calls functions by these addresses."""
    global _pool
    with _starting:
        if _pool is None:
            code = load(for_threads())
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(code))  # threads are in it until the very end
            pool.start(code.address)
            _pool = code


RECENT = 64  # functions that stay loaded though nobody holds them: the next program often asks for them again
_recent: deque[Any] = deque(maxlen=RECENT)
_alive: WeakValueDictionary[str, Any] = WeakValueDictionary()


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


@cache
def loaded(text: str) -> Code:
    """A module's machine code, for as long as the process lives."""
    return _Loaded(object_code(text))


def function(text: str) -> Any:
    """A module's `@python` function, taking integers and giving None. With the last reference to it its code goes.

    Its `__self__` is the address of the module's `@run`, for callers in machine code, who keep the function; 0 if it has none.
    """
    generated(text)
    found = _alive.get(text)
    if found is None:
        found = _alive[text] = _Loaded(object_code(text)).function()
    _recent.append(found)
    return found


class Code:
    """Machine code in this process, kept alive by the functions made of it, whose `__module__` it is.

    Attributes:
        object: the relocatable object that it was.
    """

    object: bytes

    def __init__(self) -> None:
        self._definitions: dict[tuple[str, int], _MethodDef] = {}

    def address(self, name: str) -> int:
        """The address of a function; 0 if there is none of that name."""
        raise NotImplementedError

    def bound(self, flags: int, to: object = None, name: str = "python") -> Any:
        """The function of a name as Python calls it by `flags`, with `to` as what it is given first."""
        address = self.address(name)
        assert address, f"the module has no @{name}"
        definition = self._definitions.setdefault((name, flags), _MethodDef(b"kernel", address, flags, None))
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype, make.argtypes = ctypes.py_object, [ctypes.POINTER(_MethodDef), ctypes.py_object, ctypes.py_object]
        return make(ctypes.byref(definition), to, self)  # as its module, which it holds as long as it lives

    def function(self) -> Any:
        """The `@python` function, taking integers; its `__self__` is the address of `@run`."""
        return self.bound(METH_FASTCALL, self.address("run"))


class _Loaded(Code):
    """Machine code that LLVM has linked, with the addresses of what it calls: `symbols`, if none are given."""

    def __init__(self, code: bytes, known: Mapping[str, int] | None = None):
        super().__init__()
        llvm = _llvm()
        _tell_llvm(tuple((symbols() if known is None else known).items()))
        self.object = code
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        return self._engine.get_function_address(name)
