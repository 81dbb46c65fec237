"""Gluon for kernels that are source files: its names in the installed Triton, and configuration records as constants.

Whoever imports this has Triton. A name that Gluon changed after 3.6 is bound here once, as its newer name.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from inspect import getmembers
from math import prod
from typing import Any

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core  # pyright: ignore[reportPrivateUsage]
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

from tilewright.candidates.triton.expressions.text import OPEN, UnknownError
from tilewright.candidates.triton.runtime.versions import whole_views


def _either(holder: Any, new: str, old: str) -> Any:
    return getattr(holder, new, None) or getattr(holder, old)


aggregate = _either(core, "aggregate", "_aggregate")
barrier = _either(gl, "barrier", "thread_barrier")
async_load = _either(async_copy, "async_load", "async_copy_global_to_shared")
tma_load = _either(tma, "async_load", "async_copy_global_to_shared")
tma_store = _either(tma, "async_store", "async_copy_shared_to_global")
base_value = core.base_value
WHOLE_VIEWS = whole_views()
_plain: Any = _core._unwrap_if_constexpr  # pyright: ignore[reportPrivateUsage]
_view = _either(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


@_core.builtin
def reinterpret(buffer: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory seen as another type, shape and layout; what is left behind the view is a multiple of its size."""
    if WHOLE_VIEWS:
        kind, extents = _plain(dtype), [int(_plain(extent)) for extent in shape]
        here = prod(map(_plain, buffer.shape)) * buffer.dtype.primitive_bitwidth
        views, rest = divmod(here, prod(extents) * kind.primitive_bitwidth)
        if views > 1 and not rest:
            return _view(buffer, kind, [views, *extents], layout, _semantic=_semantic).index(0, _semantic=_semantic)
    return _view(buffer, dtype, shape, layout, _semantic=_semantic)


def statement(text: str, given: str = "", found: str = "") -> Any:
    """A function of Gluon that is a statement of PTX for each thread, in the order in which it is called. The text's operands
    are results and then arguments, a letter each: `r` (32 bits), `f` (f32), `l` (64 bits); if there is no result $0 is
    nobody's.

    Triton's cache does not know the text: a kernel's own (`module.instance`, `note`) must tell it from others.
    """
    types = [gl.float32 if kind == "f" else gl.int32 for kind in found]
    asm = text if found else f"{text} mov.b32 $0, 0;"
    constraints = ",".join([*(f"={kind}" for kind in found or "r"), *given])

    @_core.builtin
    def call(*arguments: Any, _semantic: Any = None) -> Any:
        dtype = types if len(types) > 1 else gl.int32 if not types else types[0]
        return gl.inline_asm_elementwise(asm, constraints, arguments, dtype, is_pure=False, pack=1, _semantic=_semantic)

    return call


# A 32-bit number that is computed where it is called: LLVM neither moves it into or out of a loop nor sinks it behind waits.
pin = statement("mov.b32 $0, $1;", "r", "r")


def aggregate_of(cls: Any) -> Any:
    """An `aggregate` that is made of its fields in order; what is a `constexpr` among them may be given plain."""
    kinds = dict(cls.__annotations__)

    def __init__(self: Any, *values: Any) -> None:  # noqa: N807
        for name, value in zip(kinds, values, strict=True):
            setattr(self, name, gl.constexpr(value) if kinds[name] is gl.constexpr else value)

    cls.__init__ = gluon.constexpr_function(__init__)
    return aggregate(cls)


def opened(config: Any, names: Sequence[str]) -> Any:
    """An `aggregate` that has what `constants` made, and of these names numbers of the kernel's: it is made of that, and of
    them in order."""
    known = [name for name in vars(_plain(config)) if not name.startswith("_") and name not in names]

    def __init__(self: Any, given: Any, *extents: Any) -> None:  # noqa: N807
        for name in known:
            setattr(self, name, getattr(given, name))
        for name, value in zip(names, extents, strict=True):
            setattr(self, name, value)

    kinds = dict.fromkeys(known, core.constexpr) | dict.fromkeys(names, core.tensor)
    made = {"__init__": gluon.constexpr_function(__init__), "__annotations__": kinds, "__module__": __name__}
    return aggregate(type("Opened", (), made))


class _Constants:
    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        self._name = f"constants_{hashlib.sha256(repr(values).encode()).hexdigest()[:16]}"

    def __repr__(self) -> str:  # Triton's cache knows all values by it, and each function's name has it at every call
        return self._name


def constants(record: Any) -> Any:
    """A frozen dataclass as a `constexpr` whose fields and properties are such, too, so that a kernel computes with them before
    it runs. Without those that are open, or are made of what is (`opened`)."""
    names = [f.name for f in fields(record)] + [n for n, _ in getmembers(type(record), lambda x: isinstance(x, property))]
    values: dict[str, Any] = {}
    for name in names:
        with suppress(UnknownError):
            values[name] = getattr(record, name)
    values = {name: value for name, value in values.items() if value is not OPEN}
    if knobs.runtime.interpret:
        return _Constants(values)
    return gl.constexpr(_Constants({name: gl.constexpr(value) for name, value in values.items()}))
