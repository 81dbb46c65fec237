"""Differences between the versions of Triton, from 3.6 on: how a kernel is started, and the sentence of refusal where a version
cannot compile kernels written for the others. Features decide, not version numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from tilewright.errors import TilewrightError

MADE_FOR = "3.6 to 3.9"


class CompilerError(TilewrightError):
    """The installed Triton makes no machine code of a kernel."""


@contextmanager
def named(what: type[Exception] | tuple[type[Exception], ...] = Exception) -> Generator[None]:
    """Turn what Triton raises meanwhile into one sentence that says which Triton it is.

    Raises:
        CompilerError: for any of these exceptions.
    """
    import triton

    try:
        yield
    except what as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # each function's call site wraps what happened in it
            cause = cause.__cause__
        said = [line.strip() for line in str(cause).splitlines() if line.strip(" ^")][-1:] or [type(cause).__name__]
        raise CompilerError(f"Triton {triton.__version__} cannot compile this (made for {MADE_FOR}): {said[0]}") from error


@cache
def within() -> bool:
    """Tell whether a view of shared memory may not be larger than what it is a view of: since 3.8."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return hasattr(tma, "async_load")


@cache
def whole_views() -> bool:
    """Tell whether a view of shared memory may not be smaller, either, than what it is a view of: in 3.8 alone."""
    from triton.experimental.gluon import language as gl

    return within() and not hasattr(gl.shared_memory_descriptor, "reinterpret")


def tensor_map(utils: Any) -> Callable[..., object]:
    """The function that makes a TMA descriptor of an address, swizzle, bytes and kind of an element, box, extents, strides and
    padding."""
    return utils.fill_tma_descriptor_tiled if hasattr(utils, "fill_tma_descriptor_tiled") else utils.fill_tma_descriptor


def make_launcher(kernel: Any) -> None:
    """Have Triton make its launcher in C of a compiled kernel, which it else does when the kernel is first loaded: a C compiler
    takes 0.3 s for each list of argument types (until 3.7). What fails here fails there, and is told of.

    A launcher looks up the type of TMA descriptors when it is loaded, once for a process: that of the driver's module, which is
    to be there by then. One that found none takes no descriptor as long as the process lives."""
    with suppress(Exception):
        from triton.backends.nvidia import driver

        if getattr(driver, "PyCUtensorMap", driver) is None:
            driver.CudaUtils()
        driver.CudaLauncher(kernel.src, kernel.metadata)


def direct(kernel: Any, start: Any, grid: Sequence[int], device: int, ends: tuple[object, ...]) -> Callable[..., None]:
    """A kernel's start past what Triton does on every call (binding, hooks, descriptors): its launcher in C.

    Args:
        kernel: Triton's compiled and loaded kernel, which has no scratch memory.
        start: Triton's launcher of it.
        grid: blocks along x, y and z.
        device: on whose current stream it starts.
        ends: its last arguments. The others are given on each call; descriptors with their extents and strides, made already.
    """
    from triton.runtime import driver

    launch: Any = start.launch
    if inspect.isfunction(launch):  # it makes descriptors, for the one that takes them
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    x, y, z = grid
    function, packed = kernel.function, kernel.packed_metadata
    together, dependent = start.launch_cooperative_grid, start.launch_pdl
    stream: Callable[[int], int] = getattr(driver.active, "get_current_stream")  # noqa: B009 (Triton does not declare it)
    if not hasattr(start, "arg_annotations"):

        def positional(*given: object) -> None:
            launch(x, y, z, stream(device), function, together, dependent, None, None, packed, None, None, None, *given, *ends)

        return positional
    kinds, packing = start.arg_annotations, start.kernel_signature
    rest = together, dependent, packed, None, None, None, None, None, kinds, packing

    def listed(*given: object) -> None:  # since 3.7
        launch(x, y, z, stream(device), function, *rest, (*given, *ends))

    return listed
