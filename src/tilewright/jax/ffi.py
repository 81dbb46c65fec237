"""Calls from XLA into compiled programs, through XLA's foreign function interface (FFI), with `ctypes` alone.

XLA calls one handler with a frame: addresses of operands and results with their types, attributes, and a table of functions.
The operands become tensors over XLA's own memory, the program runs on XLA's stream (on a GPU) or on the thread that called, and
its results are copied into XLA's buffers there. On a GPU nothing passes through the host's memory, and the host does not wait.

Source of the layouts: `xla/ffi/api/c_api.h`, version 0.3, as jaxlib's wheel carries it (`jax.ffi.include_dir()`). Each field
of its structures begins a word of 8 bytes (the two numbers of a version share one), so a structure is read as an array of
integers. XLA states the size of each in its first field; a frame smaller than what is read here is refused.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from tilewright.errors import InputError, TilewrightError
from tilewright.recent import Recent
from tilewright.runtime.arrays import at_address

if TYPE_CHECKING:
    from tilewright.ir.graph import Value
    from tilewright.ir.types import TensorType
    from tilewright.program import Program

TARGET = "tilewright"  # the custom call's name
PROGRAM = "program"  # its attribute: the key of a program

_METADATA = 1  # the extension by which XLA asks a handler for its version
_EXECUTE = 3  # the stage at which a frame has operands
_STRING = 4  # the type of an attribute
_INVALID_ARGUMENT, _INTERNAL = 3, 13  # codes of errors
_HALF = 0xFFFFFFFF  # of a word: what a field of 32 bits fills

# Words of XLA_FFI_CallFrame; operands, results and attributes are structures within it.
_FRAME, _EXTENSION, _API, _CONTEXT, _STAGE, _OPERANDS, _RESULTS, _ATTRIBUTES = 21, 1, 2, 3, 4, 5, 10, 15
_COUNT, _ITEMS = 2, 4  # of XLA_FFI_Args and XLA_FFI_Rets, from where they begin
_TYPES, _NAMES, _VALUES = 3, 4, 5  # of XLA_FFI_Attrs, likewise
_DATA, _RANK, _EXTENTS, _BUFFER = 3, 4, 5, 6  # of XLA_FFI_Buffer
_FUNCTIONS, _ERROR_CREATE, _STREAM_GET, _VERSIONS = 11, 6, 10, 4  # of XLA_FFI_Api
_create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def _words(address: int, count: int) -> Any:
    """Memory from an address on, as an array of integers of 64 bits."""
    return (ctypes.c_uint64 * count).from_address(address)


class _Callee:
    """A program, and the tensors over the buffers that it was called with.

    XLA calls with the same buffers again and again; making a tensor over each takes longer than launching a kernel.
    """

    MOST = 64  # sets of buffers

    def __init__(self, program: Program) -> None:
        self.program, self.device = program, program.target.device
        self.on_gpu = program.target.kind != "cpu"
        self.inputs = list(program.input_types.values())
        self.outputs = [o.tensor for o in program.graph.outputs]
        self._known: Recent[tuple[int, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = Recent(self.MOST)

    def tensors(self, frame: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors over a frame's operands and over its results.

        Raises:
            InputError: they have other shapes than the program's inputs or results.
        """
        operands, results = _buffers(frame, _OPERANDS), _buffers(frame, _RESULTS)
        key = tuple(word for buffer in (*operands, *results) for word in buffer)
        found = self._known.find(key)
        if found is None:
            found = _over(operands, self.inputs, self.device, "operands"), _over(results, self.outputs, self.device, "results")
            self._known[key] = found
        return found


_programs: dict[str, _Callee] = {}


def add(key: str, program: Program) -> None:
    """Keep a program for calls that name it: XLA's executables hold the key alone, for as long as they please."""
    _programs[key] = _Callee(program)


def program(key: str) -> Program | None:
    """The program that calls name by a key; None if there is none."""
    found = _programs.get(key)
    return None if found is None else found.program


def _buffers(frame: Any, at: int) -> list[tuple[int, ...]]:
    """The address of each operand or result, its rank and its extents."""
    found: list[tuple[int, ...]] = []
    for item in _words(frame[at + _ITEMS], frame[at + _COUNT]):
        buffer = _words(item, _BUFFER)
        rank = buffer[_RANK]
        found.append((buffer[_DATA], rank, *(_words(buffer[_EXTENTS], rank) if rank else ())))
    return found


def _over(buffers: Sequence[tuple[int, ...]], kinds: Sequence[TensorType], device: str, what: str) -> list[torch.Tensor]:
    """Tensors over XLA's buffers, which must have the shapes of a program's inputs or results."""
    shapes, wanted = [b[2:] for b in buffers], [tuple(k.shape) for k in kinds]
    if shapes != wanted:
        raise InputError(f"{what} of shapes {shapes}, and the program was compiled for {wanted}")
    return [at_address(b[0], k, device) for b, k in zip(buffers, kinds, strict=True)]


def _key(frame: Any) -> str:
    """The key in a frame's attributes."""
    count = frame[_ATTRIBUTES + _COUNT]
    types = (ctypes.c_int * count).from_address(frame[_ATTRIBUTES + _TYPES]) if count else ()
    names, values = (_words(frame[_ATTRIBUTES + at], count) if count else () for at in (_NAMES, _VALUES))
    for kind, name, value in zip(types, names, values, strict=True):
        if kind == _STRING and ctypes.string_at(*_words(name, 2)) == PROGRAM.encode():
            return ctypes.string_at(*_words(value, 2)).decode()
    raise InputError(f"a call of {TARGET!r} without its attribute {PROGRAM!r}", hint="call tilewright.jax.jit's function")


@functools.lru_cache(maxsize=64)
def _external(stream: int, device: str) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(stream, device)


def _stream(frame: Any) -> int:
    """The address of the CUDA stream that XLA runs the call on."""
    asked = (ctypes.c_uint64 * 4)(32, 0, frame[_CONTEXT], 0)
    if _create(_words(frame[_API], _FUNCTIONS)[_STREAM_GET])(ctypes.addressof(asked)):
        raise InputError("XLA gives no stream for this call", hint="compile for the device that XLA runs on")
    return asked[3]


def _run(frame: Any) -> None:
    """Run the program that a frame names on the frame's operands, into its results."""
    key = _key(frame)
    callee = _programs.get(key)
    if callee is None:
        hint = "trace the function again: an executable that another process compiled was loaded without it"
        raise InputError(f"no program {key} was compiled in this process", hint=hint)
    operands, results = callee.tensors(frame)
    if not callee.on_gpu:
        _copy(callee.program.run(operands), results)
        return
    with torch.cuda.stream(_external(_stream(frame), callee.device)):
        _copy(callee.program.run(operands), results)


def _copy(values: Sequence[Value], results: Sequence[torch.Tensor]) -> None:
    for result, value in zip(results, values, strict=True):
        result.copy_(cast("torch.Tensor", value))


def _error(frame: Any, code: int, message: str) -> int | None:
    """The address of an error of XLA's."""
    text = ctypes.c_char_p(message.encode())
    asked = (ctypes.c_uint64 * 4)(32, 0, ctypes.cast(text, ctypes.c_void_p).value or 0, code)
    return _create(_words(frame[_API], _FUNCTIONS)[_ERROR_CREATE])(ctypes.addressof(asked))


def handle(address: int) -> int | None:
    """Answer XLA's call: its question for the version, or a run of a program.

    Args:
        address: of the frame.

    Returns:
        int | None: the address of an error that XLA owns; None if all went well.
    """
    frame = _words(address, _FRAME)
    if frame[_EXTENSION] and _words(frame[_EXTENSION], 4)[1] & _HALF == _METADATA:
        # XLA asks for the version that a handler was compiled for: its own, as this one reads no field that is not there.
        metadata = _words(_words(frame[_EXTENSION], 4)[3], 5)
        metadata[3], metadata[4] = _words(frame[_API], _FUNCTIONS)[_VERSIONS], metadata[4] & ~_HALF  # no traits
        return None
    try:
        if frame[0] < 8 * _FRAME or _words(frame[_API], 1)[0] < 8 * _FUNCTIONS:
            raise InputError("this jaxlib's calls are laid out in another way", hint="jaxlib 0.10 or newer")
        if frame[_STAGE] & _HALF == _EXECUTE:
            _run(frame)
    except TilewrightError as error:
        return _error(frame, _INVALID_ARGUMENT, str(error))
    except Exception as error:  # an exception cannot pass through XLA
        return _error(frame, _INTERNAL, f"{type(error).__name__}: {error}")
    return None


HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(handle)


def register(jax_ffi: Any, platform: str) -> None:
    """Make the handler known to XLA's platform, "cpu" or "CUDA".

    Args:
        jax_ffi: the module `jax.ffi`.
        platform: as `jax.ffi.register_ffi_target` spells it.
    """
    jax_ffi.register_ffi_target(TARGET, jax_ffi.pycapsule(HANDLER), platform=platform)
