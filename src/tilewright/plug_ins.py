"""Candidates, rules and chips of other packages, found by their entry points (docs/your-own-kernels.md).

An entry point names an object, or the module that holds it. What is installed in the environment is trusted, as any import is.
A plug-in that cannot be used is left out, with a warning that names its package and says why: it never stops a compile.

Choices depend on which plug-ins there are, so keys hold their packages, with the version and a digest of the code of each
(`packages`). No plug-in is imported for that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from tilewright.errors import say

CANDIDATES, RULES, CHIPS = GROUPS = ("tilewright.candidates", "tilewright.rules", "tilewright.chips")
SWITCH = "TILEWRIGHT_PLUG_INS"  # 0: none is looked for

T = TypeVar("T")


@dataclass(frozen=True)
class PlugIn:
    """An entry point of an installed package.

    Attributes:
        group: one of `GROUPS`.
        name, value: as the package's entry_points.txt has them.
        package, version: of the distribution.
        requires: what the distribution says that it needs.
    """

    group: str
    name: str
    value: str
    package: str
    version: str
    requires: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    def leave_out(self, why: str) -> None:
        """Warn that it, or a part of it, is not used, once a process."""
        say(f"plug-in {self} ({self.group}: {self.name}) is left out: {why}")


@cache
def plug_ins() -> tuple[PlugIn, ...]:
    """The entry points of all groups, in the order of groups, packages and names."""
    if os.environ.get(SWITCH) == "0":
        return ()
    every, found = metadata.entry_points(), list[PlugIn]()
    for point in (p for group in GROUPS for p in every.select(group=group)):
        try:
            dist = point.dist
            assert dist is not None  # it was found by one
            named = dist.name or "a package without a name", dist.version or "", tuple(dist.requires or ())
            found.append(PlugIn(point.group, point.name, point.value, *named))
        except Exception as error:  # what stands in a package's metadata, or does not
            say(f"a plug-in is left out: {point.value} is of a package whose metadata cannot be read ({_said(error)})")
    return tuple(sorted(found, key=lambda p: (GROUPS.index(p.group), p.package, p.name)))


@cache
def loaded(group: str, kinds: tuple[type[T], ...], defining: str = "") -> tuple[tuple[T, PlugIn], ...]:
    """The objects of some kinds that entry points of a group name. Of a module those are meant that it holds: the one called
    `defining`, or all of these kinds."""
    found: list[tuple[T, PlugIn]] = []
    due = " or ".join(k.__name__ for k in kinds)
    for p in plug_ins():
        if p.group != group:
            continue
        try:
            value: object = metadata.EntryPoint(p.name, p.value, p.group).load()
        except (Exception, SystemExit) as error:  # its code may raise anything
            p.leave_out(_said(error))
            continue
        held = [value]
        if isinstance(value, ModuleType):
            held = [v for k, v in vars(value).items() if (k == defining if defining else isinstance(v, kinds))]
            if not held:
                p.leave_out(f"module {p.value} defines no {defining or due}")
        for v in held:
            if isinstance(v, kinds):
                found.append((v, p))
            else:
                p.leave_out(f"{p.value} is a {type(v).__name__}, and no {due}")
    return tuple(found)


def packages() -> str:
    """The packages that plug in, each with its version and a digest of its code and of what else it depends on; "" if there
    are none. Equal texts mean equal plug-ins."""
    return ", ".join(_digests().values())


def said(package: str) -> str:
    """The text of one of these packages; "" if it does not plug in here."""
    return _digests().get(package, "")


@cache
def _digests() -> dict[str, str]:
    """Find each package's version and a digest of: its entry points, all files of the modules that these name, and the versions
    of the packages that it says it needs."""
    found: dict[str, str] = {}
    for package in dict.fromkeys(p.package for p in plug_ins()):
        own = [p for p in plug_ins() if p.package == package]
        digest = hashlib.sha256(repr([(p.group, p.name, p.value) for p in own]).encode())
        for needed in sorted({name[0] for p in own for r in p.requires if (name := re.match(r"[\w.-]+", r))}):
            digest.update(f"{needed} {_version(needed)}\0".encode())
        for file in sorted({f for p in own for f in _files(p.value.partition(":")[0].strip())}):
            try:
                content = file.read_bytes()
            except OSError as error:
                content = str(error).encode()
            digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
        found[package] = f"{own[0]} {digest.hexdigest()[:12]}"
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _files(module: str) -> Iterator[Path]:
    """The files of the package that a module belongs to, found without importing it; a package without `__init__` holds those
    of several distributions, so there only the part is meant that the module lies in."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        places = [Path(spec.origin)] if spec.origin else []
    else:
        places = [Path(p) for p in spec.submodule_search_locations]
    while inner and all(p.is_dir() and not (p / "__init__.py").exists() for p in places):
        name = inner.pop(0)
        places = [q for p in places for q in (p / name, p / f"{name}.py") if q.exists()]
    for place in places:
        for file in place.rglob("*") if place.is_dir() else (place,):
            if file.is_file() and file.suffix != ".pyc":
                yield file


def _said(error: BaseException) -> str:
    """An error in one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__
