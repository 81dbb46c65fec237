"""Kernels that are machine code already, started through the CUDA driver: those of a saved program, without Triton.

Names are the driver's (CUDA Driver API 13: 6.14 modules, 6.23 launches, 6.28 tensor maps). A kernel is given what Triton's
own launcher gives it: descriptors with their extents and strides, pointers, numbers, and null for each kind of scratch memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from tilewright.errors import InputError, UnsupportedError
from tilewright.schedule.recipe import MachineCode, TensorMap

SCRATCH_POINTERS = 2  # global and profile scratch, which Triton's kernels take last
MAP_BYTES, MAP_ALIGNED = 128, 128
SHARED_BYTES = 48 << 10  # dynamic shared memory that a kernel has without being asked
MOST_KEPT = 256  # descriptors by address; a program's addresses repeat
INVALID_VALUE, INVALID_CONTEXT = 1, 201
STATIC_SHARED, MOST_SHARED = 1, 8  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, ..._MAX_DYNAMIC_SHARED_SIZE_BYTES
OPTIN_SHARED = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
PREFER_SHARED, DEPENDENT_LAUNCH, PROMOTION_128B = 1, 6, 2  # CU_FUNC_CACHE_..., CU_LAUNCH_ATTRIBUTE_..., CU_TENSOR_MAP_L2_...


class Attribute(ctypes.Structure):
    """`CUlaunchAttribute` with a number as its value."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def driver() -> Any:
    """The CUDA driver.

    Raises:
        UnsupportedError: there is none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(f"there is no CUDA driver: {error}") from error


def check(status: int, what: str) -> None:
    """See that the driver did what it was asked for.

    Raises:
        UnsupportedError: it did not; the sentence has its own name for the reason.
    """
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        raise UnsupportedError(f"the CUDA driver {what}: {(name.value or b'error %d' % status).decode()}")


def starter(code: MachineCode, content: bytes, pointers: int, device: int) -> Callable[..., None]:
    """A function of addresses that starts a kernel on torch's current stream of a device, which is the current one.

    Args:
        code: the launch.
        content: the cubin.
        pointers: number of addresses, those of the arrays behind descriptors first.
        device: where it is loaded.

    Raises:
        InputError: the kernel takes other arguments.
        UnsupportedError: the driver does not take the cubin.
    """
    cuda = driver()
    torch.cuda.current_stream(device)  # torch's context is the device's
    _use_context(device)
    function = _loaded(content, code.entry, code.shared_bytes, device)
    places: list[int] = []  # of descriptors
    values: list[tuple[int, Any]] = []  # what never changes, by place
    sizes: list[int] = []
    for m in code.maps:
        places.append(len(sizes))
        values += [(len(sizes) + 1 + i, ctypes.c_int32(n)) for i, n in enumerate(m.shape)]
        values += [(len(sizes) + 1 + len(m.shape) + i, ctypes.c_int64(n)) for i, n in enumerate(m.strides)]
        sizes += [MAP_BYTES, *[4] * len(m.shape), *[8] * len(m.strides)]
    first, plain = len(sizes), pointers - len(code.maps)
    sizes += [8] * plain
    kinds = [ctypes.c_int32(n) if isinstance(n, int) else ctypes.c_float(n) for n in code.numbers]
    values += [(len(sizes) + i, n) for i, n in enumerate(kinds)]
    sizes += [*[4] * len(kinds), *[8] * SCRATCH_POINTERS]
    _check_arguments(function, sizes)
    attribute = Attribute(DEPENDENT_LAUNCH, 0, 1)
    word = ctypes.sizeof(ctypes.c_uint64)

    def make() -> tuple[Config, Any, Any, Any]:
        """Room for the arguments of one launch."""
        cells, arguments = (ctypes.c_uint64 * len(sizes))(), (ctypes.c_void_p * len(sizes))()
        for at, value in values:
            ctypes.memmove(ctypes.byref(cells, at * word), ctypes.byref(value), ctypes.sizeof(value))
        for at in range(len(sizes)):
            arguments[at] = ctypes.addressof(cells) + at * word
        block = (ctypes.c_uint * 3)(code.threads, 1, 1)
        grid, attributes = (ctypes.c_uint * 3)(*code.grid), ctypes.pointer(attribute)
        config = Config(grid, block, code.shared_bytes, None, attributes, int(code.early))
        return config, ctypes.byref(config), cells, arguments

    @lru_cache(MOST_KEPT)
    def descriptors(*addresses: int) -> list[Any]:
        return [encoded(m, address) for m, address in zip(code.maps, addresses, strict=True)]

    spare = [make()]  # of no call: calls from several threads take one each
    count, launch, stream = len(code.maps), cuda.cuLaunchKernelEx, _stream_of(device)

    def start(*addresses: int) -> None:
        room = spare.pop() if spare else make()
        config, pointer, cells, arguments = room
        made = descriptors(*addresses[:count]) if count else ()
        for at, m in zip(places, made, strict=True):
            arguments[at] = ctypes.addressof(m)
        cells[first : first + plain] = addresses[count:]
        config.stream = stream(device)
        status = launch(pointer, function, arguments, None)
        if status == INVALID_CONTEXT:  # a thread in which torch has done nothing yet
            _use_context(device)
            status = launch(pointer, function, arguments, None)
        spare.append(room)
        check(status, f"cannot start {code.entry}")

    return start


def encoded(m: TensorMap, address: int) -> Any:
    """A descriptor of an array at an address, as Triton makes it: with zeros outside, brought into L2 by 128 bytes.

    Raises:
        UnsupportedError: the driver refuses it.
    """
    room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNED)
    made = (ctypes.c_byte * MAP_BYTES).from_buffer(room, -ctypes.addressof(room) % MAP_ALIGNED)
    rank = len(m.shape)
    extents = (ctypes.c_uint64 * rank)(*reversed(m.shape))
    strides = (ctypes.c_uint64 * rank)(*(m.element_bytes * s for s in reversed(m.strides[:-1])))
    box, steps = (ctypes.c_uint32 * rank)(*reversed(m.box)), (ctypes.c_uint32 * rank)(*[1] * rank)
    at = ctypes.c_void_p(address + m.offset_bytes)
    how = 0, m.swizzle, PROMOTION_128B, 0  # interleave; fill
    status = driver().cuTensorMapEncodeTiled(made, m.dtype, rank, at, extents, strides, box, steps, *how)
    check(status, f"takes no boxes {list(m.box)} of an array {list(m.shape)}")
    return made


def _use_context(device: int) -> None:
    """Make the device's context the thread's, if it has none."""
    cuda, context = driver(), ctypes.c_void_p()
    check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "has no context")
    if not context:
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "has no context")
        check(cuda.cuCtxSetCurrent(context), "has no context")


@lru_cache(maxsize=4096)
def _loaded(content: bytes, entry: str, shared_bytes: int, device: int) -> Any:
    """A function of a cubin, loaded on a device for good."""
    cuda, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), content), f"does not take the machine code of {entry}")
    found = cuda.cuModuleGetFunction(ctypes.byref(function), module, entry.encode())
    check(found, f"finds no {entry} in its machine code")
    if shared_bytes > SHARED_BYTES:
        most, own = ctypes.c_int(), ctypes.c_int()
        check(cuda.cuDeviceGetAttribute(ctypes.byref(most), OPTIN_SHARED, device), "does not know its shared memory")
        check(cuda.cuFuncGetAttribute(ctypes.byref(own), STATIC_SHARED, function), "does not know a kernel's shared memory")
        check(cuda.cuFuncSetCacheConfig(function, PREFER_SHARED), "gives no shared memory")
        check(cuda.cuFuncSetAttribute(function, MOST_SHARED, most.value - own.value), "gives no shared memory")
    return function


def _check_arguments(function: Any, sizes: Sequence[int]) -> None:
    """See that a kernel takes arguments of these sizes; drivers before 12.4 do not tell."""
    ask = getattr(driver(), "cuFuncGetParamInfo", None)
    if ask is None:
        return
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for at, wanted in enumerate((*sizes, 0)):
        status = ask(function, ctypes.c_size_t(at), ctypes.byref(offset), ctypes.byref(size))
        taken = 0 if status == INVALID_VALUE else size.value
        if status not in (0, INVALID_VALUE) or taken != wanted:
            what = f"a saved kernel takes {taken} bytes as argument {at}, and {wanted} are given"
            raise InputError(what, hint="save the program again")


def _stream_of(device: int) -> Callable[[int], int]:
    quick: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # pyright: ignore[reportPrivateUsage]
    return quick or (lambda index: torch.cuda.current_stream(index).cuda_stream)
