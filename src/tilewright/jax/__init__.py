"""Functions of JAX, compiled: `tilewright.jax.jit`.

A function is lowered by `jax.export` for the shapes that it is called with, compiled as any StableHLO program, and called back
by XLA through its foreign function interface. So it stands inside `jax.jit`, `jax.vmap`, `lax.scan` and `shard_map` as a
function of JAX does. Arrays that the function closes over are constants of the program: weights that are packed once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import InputError, MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    from tilewright.program import Program

_DEVICES = {"cpu": ("cpu", "cpu"), "gpu": ("cuda", "CUDA"), "cuda": ("cuda", "CUDA")}  # by platform: ours, the FFI's name
_NARROW = {"int4": "int8", "uint4": "uint8"}  # XLA packs two codes into a byte; programs take one a byte
_compiling = threading.Lock()
_registered: set[str] = set()


class Jitted:
    """A function of JAX that Tilewright compiles: call it as the function itself, inside JAX's transformations too.

    It is compiled once for each set of shapes, dtypes and static arguments, as JAX traces it.

    Attributes:
        programs: the programs compiled so far, oldest first, to `explain()` or `perf()`.
    """

    def __init__(
        self, function: Callable[..., Any], static: dict[str, Any], platform: str | None, options: dict[str, Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self.programs: list[Program] = []
        self._function, self._platform, self._options = function, platform, options
        self._jax = _jax()
        self._traced = self._jax.jit(self._trace, keep_unused=True, **static)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The module that calls the program, lowered: see `jax.jit`'s own `lower`."""
        return self._traced.lower(*args, **kwargs)

    def _trace(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the program, as JAX traces it: arguments are tracers, but for those that are static."""
        tree = self._jax.tree_util
        given, structure = tree.tree_flatten((args, kwargs))
        traced = [i for i, leaf in enumerate(given) if isinstance(leaf, self._jax.core.Tracer)]
        results: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            held = list(given)
            for i, leaf in zip(traced, leaves, strict=True):
                held[i] = leaf
            again, named = tree.tree_unflatten(structure, held)
            found, result = tree.tree_flatten(self._function(*again, **named))
            results[:] = [result]
            return found

        found = self._call(flat, [given[i] for i in traced])
        return tree.tree_unflatten(results[0], found)

    def _call(self, flat: Callable[..., list[Any]], leaves: Sequence[Any]) -> list[Any]:
        """The results of a function of arrays, done by a program that is compiled for them now."""
        jax = self._jax
        device, platform = self._place()
        exported = jax.export.export(jax.jit(flat, keep_unused=True), platforms=(device,))(*leaves)
        key = self._compiled(exported.mlir_module(), device, platform)
        kinds = [(a.shape, a.dtype) for a in exported.out_avals]
        wide = [jax.ShapeDtypeStruct(s, _NARROW.get(str(t), t)) for s, t in kinds]

        @jax.custom_batching.custom_vmap
        def call(*leaves: Any) -> list[Any]:
            carried = [a.astype(_NARROW[str(a.dtype)]) if str(a.dtype) in _NARROW else a for a in leaves]
            found = jax.ffi.ffi_call(_ffi().TARGET, wide)(*carried, **{_ffi().PROGRAM: key})
            return [r.astype(t) if str(t) in _NARROW else r for r, (_, t) in zip(found, kinds, strict=True)]

        @call.def_vmap
        def mapped(size: int, batched: Sequence[bool], *leaves: Any) -> tuple[list[Any], list[bool]]:
            axes = [0 if b else None for b in batched]
            found = self._call(jax.vmap(flat, in_axes=axes, axis_size=size), leaves)
            return found, [True] * len(found)

        @jax.custom_jvp
        def guarded(*leaves: Any) -> list[Any]:
            return call(*leaves)

        @guarded.defjvp
        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            raise UnsupportedError(
                "tilewright.jax.jit computes no derivatives",
                where=getattr(self._function, "__name__", "the function"),
                hint="jax.lax.stop_gradient on what it takes, or jax.jit for the function that is differentiated",
            )

        return guarded(*leaves)

    def _place(self) -> tuple[str, str]:
        """The device a program is compiled for, and the FFI's name of its platform."""
        named = self._platform or self._jax.default_backend()
        if named not in _DEVICES:
            raise InputError(f"no kernels for JAX's platform {named!r}", where="tilewright.jax.jit", hint='platform="cpu"')
        return _DEVICES[named]

    def _compiled(self, text: str, device: str, platform: str) -> str:
        """Compile a module for a device, unless it has been; give the key that calls name it by."""
        from tilewright.compiler import compile

        options = repr(sorted(self._options.items()))
        key = hashlib.sha256("\0".join((text, device, options)).encode()).hexdigest()
        with _compiling:
            if platform not in _registered:
                _ffi().register(self._jax.ffi, platform)
                _registered.add(platform)
            program = _ffi().program(key)
            if program is None:
                program = compile(text, device=device, dims=False, **self._options)
                _ffi().add(key, program)
        if program not in self.programs:
            self.programs.append(program)
        return key


def jit(
    function: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    platform: str | None = None,
    **options: Any,
) -> Any:
    """Compile a function of JAX with Tilewright, in place of XLA; usable as a decorator, with arguments or bare.

    Args:
        function: takes and gives pytrees of arrays.
        static_argnums, static_argnames: as `jax.jit` takes them.
        platform: JAX's platform that it runs on, "cpu" or "cuda"; None is JAX's default.
        options: of `tilewright.compile`, such as `budget_s`, `threads`, `half` or `background`.

    Returns:
        Jitted: call it with the function's arguments. While it is traced it raises UnsupportedError if no graph can express the
            function, and if a derivative is asked for.

    Raises:
        MissingDependencyError: no jax.
        InputError: `function` is none, or the platform is another.
    """
    static = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    if function is None:
        return functools.partial(jit, platform=platform, **static, **options)
    if not callable(function):
        raise InputError(f"{type(function).__name__} is no function", where="tilewright.jax.jit", hint="jit(f)")
    if platform is not None and platform not in _DEVICES:
        raise InputError(f"no kernels for JAX's platform {platform!r}", where="tilewright.jax.jit", hint='platform="cpu"')
    return Jitted(function, static, platform, options)


def _jax() -> Any:
    try:
        for name in ("jax.custom_batching", "jax.export", "jax.ffi", "jax.tree_util"):
            importlib.import_module(name)
        return importlib.import_module("jax")
    except ImportError as error:
        what = "tilewright.jax compiles functions of JAX, which is not installed"
        raise MissingDependencyError(what, where=str(error), hint="pip install jax") from error


def _ffi() -> Any:
    return importlib.import_module("tilewright.jax.ffi")
