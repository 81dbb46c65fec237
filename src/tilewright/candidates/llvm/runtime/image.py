"""Machine code that is loaded without LLVM: the objects of a saved program, linked and mapped when it is read back.

LLVM's large code model, in which `engine` has kernels made, spells each address as 64 bits of its own (`R_X86_64_64`, System V
ABI for AMD64, 4.4.1). So loading is copying, adding and `mprotect`: nothing is ever writable and executable at once. A shared
library would need a linker to write and a file to be mapped from, and its names would be looked up in the whole process; an
kernel here may call what `engine.symbols` lists and no more.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tilewright.candidates.llvm.runtime.engine import Code, symbols
from tilewright.errors import UnsupportedError
from tilewright.sizes import round_up

X86_64, ABSOLUTE_64, RELOCATABLE = 62, 1, 1  # EM_X86_64, R_X86_64_64, ET_REL
WRITABLE, ALLOCATED, EXECUTABLE = 1, 2, 4  # SHF_*
SYMBOLS, RELOCATED, ZEROED = 2, 4, 8  # SHT_SYMTAB, SHT_RELA, SHT_NOBITS
LEFT_OUT = (".eh_frame", ".note.GNU-stack")  # no exception passes through a kernel
CODE, CONSTANTS, DATA = range(3)  # zones
ALIGNMENT, MOST_BYTES = 64, 1 << 28  # of a section
READ, EXECUTE = 1, 4  # PROT_*


class Mapped(Code):
    """An object in this process. Its functions keep it alive, and with it all that were mapped together."""

    def __init__(self, data: bytes, functions: Mapping[str, int], pages: _Pages) -> None:
        super().__init__()
        self.object, self._functions, self._pages = data, functions, pages

    def address(self, name: str) -> int:
        return self._functions.get(name, 0)


def mapped(objects: Mapping[str, bytes], known: Mapping[str, int] | None = None) -> dict[str, Mapped]:
    """Relocatable objects by name, their code ready to run. They may call `known` addresses by name: `symbols`, if not given.

    Raises:
        UnsupportedError: an object has what is not mapped: another processor's code, addresses of another kind; it calls what
            no kernel may; the system maps no code.
    """
    try:
        read = {name: _Object(data) for name, data in objects.items()}
        return _mapped(read, symbols() if known is None else known)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise UnsupportedError(f"machine code that is no whole object: {error}") from error


def _mapped(objects: Mapping[str, _Object], known: Mapping[str, int]) -> dict[str, Mapped]:
    zones = bytearray(), bytearray(), bytearray()
    places: dict[tuple[str, int], tuple[int, int]] = {}
    for name, o in objects.items():
        for i, zone in o.zones.items():
            places[name, i] = zone, _placed(zones[zone], o.content(i), o.sections[i].alignment)
    pages = _Pages([len(z) for z in zones])
    at = {key: pages.bases[zone] + offset for key, (zone, offset) in places.items()}
    offsets, values = list[int](), list[int]()
    for name, o in objects.items():
        for section, offset, symbol, added in o.relocations():
            if not 0 <= offset <= o.sections[section].size - 8:
                raise ValueError(f"an address at byte {offset} of {o.sections[section].name}")
            if (name, symbol.section) in at:
                if not 0 <= symbol.value + added <= o.sections[symbol.section].size:
                    raise ValueError(f"an address outside {o.sections[symbol.section].name}")
                value = at[name, symbol.section] + symbol.value + added
            elif symbol.section == 0 and symbol.name in known and not added:
                value = known[symbol.name]
            else:
                raise UnsupportedError(f"machine code calls {symbol.name!r}, which no kernel may")
            offsets.append(places[name, section][1] + offset)
            values.append(value)
    code = np.frombuffer(zones[CODE], np.uint8)
    where = np.array(offsets, np.int64).reshape(-1, 1) + np.arange(8)
    code[where] = np.array(values, np.uint64).view(np.uint8).reshape(-1, 8)
    pages.fill(zones)
    return {
        name: Mapped(o.data, {s.name: at[name, s.section] + s.value for s in o.functions()}, pages)
        for name, o in objects.items()
    }


class _Pages:
    """Memory of the zones, one after the other: code that can be run, constants that can be read, data that can be written.

    Attributes:
        bases: the address at which each zone begins.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._starts, end = list[int](), 0
        for size in sizes:
            self._starts.append(end)
            end += round_up(size, mmap.PAGESIZE)
        self._pages = mmap.mmap(-1, max(end, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._held = ctypes.c_char.from_buffer(self._pages)  # while it lives the pages cannot be closed
        self.bases = [ctypes.addressof(self._held) + start for start in self._starts]

    def fill(self, zones: Sequence[bytearray]) -> None:
        """Write the zones; then let the code be run, and neither it nor constants be written."""
        for start, content in zip(self._starts, zones, strict=True):
            self._pages[start : start + len(content)] = bytes(content)
        _, second, third = self._starts
        for start, end, rights in ((0, second, READ | EXECUTE), (second, third, READ)):
            if end > start and _mprotect()(self.bases[CODE] + start, end - start, rights):
                raise UnsupportedError("the system lets this process map no machine code")


@cache
def _mprotect() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def _placed(zone: bytearray, content: bytes, alignment: int) -> int:
    """The offset of content in a zone that it is put behind."""
    if alignment > mmap.PAGESIZE:
        raise UnsupportedError(f"machine code aligned to {alignment} bytes")
    zone.extend(bytes(-len(zone) % max(alignment, ALIGNMENT)))
    at = len(zone)
    zone.extend(content)
    return at


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    start: int
    size: int
    link: int
    info: int
    alignment: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    section: int
    value: int
    exported: bool


class _Object:
    """A relocatable ELF object (System V gABI, chapters 4 and 5).

    Attributes:
        zones: the zone of each section that is mapped, by its number.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        magic, width, order, kind, machine = struct.unpack_from("<4sBB10xHH", data)
        if (magic, width, order, kind, machine) != (b"\x7fELF", 2, 1, RELOCATABLE, X86_64):
            raise UnsupportedError("machine code other than of x86-64 ELF objects")
        (table,) = struct.unpack_from("<Q", data, 0x28)
        count, names = struct.unpack_from("<HH", data, 0x3C)
        rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]
        at = rows[names][4]
        self.sections = [_Section(self._text(at + r[0]), r[1], r[2], r[4], r[5], r[6], r[7], r[8]) for r in rows]
        self.symbols: list[_Symbol] = []
        for s in self.sections:
            if s.size > MOST_BYTES or (s.kind != ZEROED and s.start + s.size > len(data)):
                raise ValueError(f"{s.name} of {s.size} bytes")
            if s.kind == SYMBOLS:
                strings = self.sections[s.link].start
                found = (struct.unpack_from("<IBBHQQ", data, s.start + 24 * i) for i in range(s.size // 24))
                self.symbols = [_Symbol(self._text(strings + n), at, v, i >> 4 == 1) for n, i, _, at, v, _ in found]
        self.zones = {i: zone for i, s in enumerate(self.sections) if (zone := _zone(s)) is not None}

    def _text(self, at: int) -> str:
        return self.data[at : self.data.index(0, at)].decode()

    def content(self, section: int) -> bytes:
        """A section's bytes."""
        s = self.sections[section]
        return bytes(s.size) if s.kind == ZEROED else self.data[s.start : s.start + s.size]

    def functions(self) -> list[_Symbol]:
        """The functions that others may call."""
        found = [s for s in self.symbols if s.exported and self.zones.get(s.section) == CODE]
        if any(not 0 <= s.value < self.sections[s.section].size for s in found):
            raise ValueError("a function outside its section")
        return found

    def relocations(self) -> list[tuple[int, int, _Symbol, int]]:
        """Section and offset of each address that is filled in, what it is the address of, and what is added to that."""
        found: list[tuple[int, int, _Symbol, int]] = []
        for s in self.sections:
            if s.kind != RELOCATED or s.info not in self.zones:
                continue
            for i in range(s.size // 24):
                offset, info, added = struct.unpack_from("<QQq", self.data, s.start + 24 * i)
                if info & 0xFFFFFFFF != ABSOLUTE_64 or self.zones[s.info] != CODE:
                    raise UnsupportedError(
                        f"machine code with an address of kind {info & 0xFFFFFFFF} in {self.sections[s.info].name}"
                    )
                found.append((s.info, offset, self.symbols[info >> 32], added))
        return found


def _zone(s: _Section) -> int | None:
    """The zone of a section; None for one that is not mapped."""
    if not s.flags & ALLOCATED or s.name in LEFT_OUT or not s.size:
        return None
    return CODE if s.flags & EXECUTABLE else DATA if s.flags & WRITABLE else CONSTANTS
