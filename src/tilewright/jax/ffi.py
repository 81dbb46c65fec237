"""Calls from XLA into compiled programs, through XLA's foreign function interface (FFI), with `ctypes` alone.

XLA calls one handler with a frame: addresses of operands and results with their types, attributes, and a table of functions.
The operands become tensors over XLA's own memory, the program runs on XLA's stream (on a GPU) or on the thread that called, and
its results are copied into XLA's buffers there. On a GPU nothing passes through the host's memory, and the host does not wait.

Source of the layouts: `xla/ffi/api/c_api.h`, version 0.3, as jaxlib's wheel carries it (`jax.ffi.include_dir()`). XLA states
the size of each structure in its first field; a frame smaller than what is read here is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from tilewright.errors import InputError, TilewrightError

if TYPE_CHECKING:
    from tilewright.ir.graph import Value
    from tilewright.ir.types import TensorType
    from tilewright.runtime.executable import Executable

TARGET = "tilewright"  # the custom call's name
PROGRAM = "program"  # its attribute: the key of a program
_METADATA = 1  # the extension by which XLA asks a handler for its version
_EXECUTE = 3  # the stage at which a frame has operands
_STRING = 4  # the type of an attribute
_INVALID_ARGUMENT, _INTERNAL = 3, 13  # codes of errors
_MAJOR = 0  # of the interface

_size, _pointer = ctypes.c_size_t, ctypes.c_void_p


class _Version(ctypes.Structure):
    _fields_ = (("struct_size", _size), ("extension", _pointer), ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", _size), ("type", ctypes.c_int), ("next", _pointer))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", _size), ("version", _Version), ("traits", ctypes.c_uint32))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _ErrorCreate(ctypes.Structure):
    _fields_ = (("struct_size", _size), ("extension", _pointer), ("message", ctypes.c_char_p), ("code", ctypes.c_int))


class _ContextGet(ctypes.Structure):
    """The arguments of the functions that read a stream's address or a device's ordinal."""

    _fields_ = (("struct_size", _size), ("extension", _pointer), ("context", _pointer), ("found", _pointer))


class _Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("version", _Version),
        ("internal", _pointer),
        ("error_create", ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(_ErrorCreate))),
        ("error_message", _pointer),
        ("error_destroy", _pointer),
        ("register", _pointer),
        ("stream_get", ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(_ContextGet))),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("dtype", ctypes.c_int),
        ("data", _pointer),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    """Operands or results."""

    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("count", ctypes.c_int64),
        ("types", _pointer),
        ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Bytes(ctypes.Structure):
    _fields_ = (("data", _pointer), ("length", _size))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", _pointer),
        ("count", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(_Bytes))),
        ("items", ctypes.POINTER(_pointer)),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", _pointer),
        ("stage", ctypes.c_int),
        ("operands", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


class _CudaMemory:
    """Bytes of device memory, as torch takes them over (the CUDA array interface, version 3)."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Callee:
    """A program, and the tensors over the buffers that it was called with.

    XLA calls with the same buffers again and again; making a tensor over each takes longer than launching a kernel.
    """

    MOST = 64  # sets of buffers

    def __init__(self, program: Executable) -> None:
        self.program, self.device = program, program.target.device
        self.on_gpu = program.target.kind != "cpu"
        self.inputs = list(program.input_types.values())
        self.outputs = [o.tensor for o in program.graph.outputs]
        self._known: dict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def tensors(self, frame: _Frame) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors over a frame's operands and over its results."""
        key = *_described(frame.operands), None, *_described(frame.results)
        found = self._known.get(key)
        if found is None:
            operands = _tensors(frame.operands, self.inputs, self.device, "operands")
            found = operands, _tensors(frame.results, self.outputs, self.device, "results")
            if len(self._known) >= self.MOST:
                self._known.clear()
            self._known[key] = found
        return found


_programs: dict[str, _Callee] = {}


def add(key: str, program: Executable) -> None:
    """Keep a program for calls that name it: XLA's executables hold the key alone, for as long as they please."""
    _programs[key] = _Callee(program)


def over(address: int | None, kind: TensorType, device: str) -> torch.Tensor:
    """A contiguous tensor over memory at an address of the device. It does not hold the memory."""
    dtype, count = kind.dtype.to_torch(), prod(kind.shape)
    if not count or not address:
        return torch.empty(kind.shape, dtype=dtype, device=device)
    size = count * dtype.itemsize
    if device == "cpu":
        flat = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    else:
        flat = torch.as_tensor(_CudaMemory(address, size), device=device)
    return flat.view(dtype).view(kind.shape)


def _described(buffers: _Buffers) -> list[object]:
    """The address and the shape of each buffer, flat."""
    items = [buffers.items[i].contents for i in range(buffers.count)]
    return [fact for b in items for fact in (b.data, *b.dims[: b.rank])]


def _tensors(buffers: _Buffers, kinds: Sequence[TensorType], device: str, what: str) -> list[torch.Tensor]:
    """The tensors over XLA's buffers, which must have the shapes of a program's inputs or results."""
    found = [buffers.items[i].contents for i in range(buffers.count)]
    shapes = [tuple(b.dims[a] for a in range(b.rank)) for b in found]
    if shapes != [tuple(k.shape) for k in kinds]:
        raise InputError(f"{what} of shapes {shapes}, and the program was compiled for {[tuple(k.shape) for k in kinds]}")
    return [over(b.data, k, device) for b, k in zip(found, kinds, strict=True)]


def _key(attributes: _Attributes) -> str:
    """The key in a frame's attributes."""
    for i in range(attributes.count):
        name = attributes.names[i].contents
        if ctypes.string_at(name.data, name.length) == PROGRAM.encode() and attributes.types[i] == _STRING:
            text = ctypes.cast(attributes.items[i], ctypes.POINTER(_Bytes)).contents
            return ctypes.string_at(text.data, text.length).decode()
    raise InputError(f"a call of {TARGET!r} without its attribute {PROGRAM!r}", hint="call tilewright.jax.jit's function")


def _stream(frame: _Frame) -> int:
    """The address of the CUDA stream that XLA runs the call on."""
    asked = _ContextGet(ctypes.sizeof(_ContextGet), None, frame.context, None)
    if frame.api.contents.stream_get(ctypes.byref(asked)):
        raise InputError("XLA gives no stream for this call", hint="compile for the device that XLA runs on")
    return cast("int | None", asked.found) or 0


def _run(frame: _Frame) -> None:
    """Run the program that a frame names on the frame's operands, into its results."""
    key = _key(frame.attributes)
    callee = _programs.get(key)
    if callee is None:
        hint = "trace the function again: an executable that another process compiled was loaded without it"
        raise InputError(f"no program {key} was compiled in this process", hint=hint)
    operands, results = callee.tensors(frame)
    if not callee.on_gpu:
        _copy(callee.program.run(operands), results)
        return
    stream = torch.cuda.ExternalStream(_stream(frame), callee.device)
    with torch.cuda.stream(stream):
        _copy(callee.program.run(operands), results)


def _copy(values: Sequence[Value], results: Sequence[torch.Tensor]) -> None:
    for result, value in zip(results, values, strict=True):
        result.copy_(cast("torch.Tensor", value))


def _error(api: _Api, code: int, message: str) -> int | None:
    made = _ErrorCreate(ctypes.sizeof(_ErrorCreate), None, message.encode(), code)
    return api.error_create(ctypes.byref(made))


def handle(address: int) -> int | None:
    """Answer XLA's call: its question for the version, or a run of a program.

    Args:
        address: of the frame.

    Returns:
        int | None: the address of an error that XLA owns; None if all went well.
    """
    frame = _Frame.from_address(address)
    asked = frame.extension
    if asked and asked.contents.type == _METADATA:
        # XLA asks for the version that a handler was compiled for. This one reads no field that XLA does not say it has.
        metadata = ctypes.cast(asked, ctypes.POINTER(_MetadataExtension)).contents.metadata.contents
        version = frame.api.contents.version
        metadata.version.major, metadata.version.minor, metadata.traits = _MAJOR, version.minor, 0
        return None
    api = frame.api.contents
    try:
        if frame.struct_size < ctypes.sizeof(_Frame) or api.struct_size < ctypes.sizeof(_Api):
            raise InputError("this jaxlib's calls are laid out in another way", hint="jaxlib 0.10 or newer")
        if frame.stage == _EXECUTE:
            _run(frame)
    except TilewrightError as error:
        return _error(api, _INVALID_ARGUMENT, str(error))
    except Exception as error:  # an exception cannot pass through XLA
        return _error(api, _INTERNAL, f"{type(error).__name__}: {error}")
    return None


HANDLER = ctypes.CFUNCTYPE(_pointer, _pointer)(handle)


def register(jax_ffi: Any, platform: str) -> None:
    """Make the handler known to XLA's platform, "cpu" or "CUDA".

    Args:
        jax_ffi: the module `jax.ffi`.
        platform: as `jax.ffi.register_ffi_target` spells it.
    """
    jax_ffi.register_ffi_target(TARGET, jax_ffi.pycapsule(HANDLER), platform=platform)
