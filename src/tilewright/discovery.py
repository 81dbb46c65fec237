"""Finding front ends, rules, candidates and chips by file name: adding one is adding a file."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def modules(package: str, extra: Iterable[Path] = ()) -> list[ModuleType]:
    """Every module of `package` and of its subpackages, in name order, then those of the `extra` folders.

    A name that starts with an underscore is skipped. Import errors are the module's own and are not hidden.
    """
    root = importlib.import_module(package)
    names = sorted(i.name for i in pkgutil.walk_packages(root.__path__, f"{package}.") if "._" not in i.name)
    found = [importlib.import_module(name) for name in names]
    for folder in extra:
        for file in sorted(folder.glob("[!_]*.py")):
            spec = importlib.util.spec_from_file_location(f"{package}.{file.stem}", file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found.append(module)
    return found
