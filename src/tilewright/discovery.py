"""Finding front ends, rules, candidates and chips by file name: adding one is adding a file."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from tilewright.errors import InputError


def modules(package: str, extra: Iterable[Path] = ()) -> list[ModuleType]:
    """Every module of `package` and of its subpackages, in name order, then those of the `extra` folders.

    A name that starts with an underscore is skipped. A file of an extra folder becomes a module of `package` under its own
    name, run once however often it is found. Import errors are the module's own and are not hidden.

    Raises:
        InputError: an extra folder is not there, or two files would be the same module.
    """
    root = importlib.import_module(package)
    names = sorted(i.name for i in pkgutil.walk_packages(root.__path__, f"{package}.") if "._" not in i.name)
    found = [importlib.import_module(name) for name in names]
    for folder in extra:
        if not folder.is_dir():
            raise InputError(f"no such folder: {folder}", where=f"searching for modules of {package}")
        found += [_run(f"{package}.{file.stem}", file.resolve()) for file in sorted(folder.glob("[!_]*.py"))]
    return found


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
