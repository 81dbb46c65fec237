"""Finding front ends, rules, candidates and chips by file name: adding one is adding a file."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

from tilewright.errors import InputError

Enter = Callable[[ModuleType], bool]


def modules(
    package: str, extra: Iterable[Path] = (), defining: str | None = None, enter: Enter | None = None
) -> list[ModuleType]:
    """Every module of `package` and of its subpackages, in name order, then those of the `extra` folders.

    With `defining`, only those that define that name are given, and a subpackage whose `__init__` defines it is one such
    module: its own files are not searched. A name that starts with an underscore is skipped. A file of an extra folder becomes
    a module of `package` under its own name, run once however often it is found. With `enter`, the modules of a subpackage of
    which it says no are not imported. Import errors are the module's own and are not hidden.

    Raises:
        InputError: an extra folder is not there, or two files would be the same module.
    """
    return list(in_turn(package, extra, defining, enter))


def in_turn(
    package: str, extra: Iterable[Path] = (), defining: str | None = None, enter: Enter | None = None
) -> Iterator[ModuleType]:
    """The modules that `modules` gives, each imported once it is asked for.

    Raises:
        InputError: an extra folder does not exist.
    """
    for module in _within(importlib.import_module(package), defining, enter):
        if defining is None or hasattr(module, defining):
            yield module
    for folder in extra:
        if not folder.is_dir():
            raise InputError(f"no such folder: {folder}", where=f"searching for modules of {package}")
        for file in sorted(folder.glob("[!_]*.py")):
            module = _run(f"{package}.{file.stem}", file.resolve())
            if defining is None or hasattr(module, defining):
                yield module


def _within(package: ModuleType, defining: str | None, enter: Enter | None) -> Iterator[ModuleType]:
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        yield module
        entered = info.ispkg and (enter is None or enter(module))
        if entered and (defining is None or not hasattr(module, defining)):
            yield from _within(module, defining, enter)


def _run(name: str, file: Path) -> ModuleType:
    known = sys.modules.get(name)
    if known is not None:
        if known.__file__ != str(file):
            raise InputError(f"two files are module {name}: {known.__file__} and {file}", hint="rename one")
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
