"""A CUDA driver that is not there: it reads the memory that `candidates/triton/runtime/cubin.py` hands it, as the real one
would, and runs the PTX that a cubin was made of."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from ptx.bulk import TensorMap
from ptx.launch import SWIZZLE_BYTES, program, run
from ptx.machine import How

SUCCESS, INVALID_VALUE, INVALID_CONTEXT, NO_BINARY = 0, 1, 201, 209
NAMES = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", NO_BINARY: b"CUDA_ERROR_NO_BINARY_FOR_GPU"}
OPTIN = 227 << 10


class Cuda:
    """The functions of libcuda that are called, by their names.

    Args:
        ptx: the text that each cubin was made of.
        how: see there.

    Attributes:
        calls: names of what was called, with what is worth comparing.
        given: the arguments of each launch, as bits or descriptors.
        context: whether the calling thread has one.
    """

    def __init__(self, ptx: Mapping[bytes, str], how: How | None = None) -> None:
        self._ptx, self._how = ptx, how
        self._modules: list[str] = []
        self._maps: dict[bytes, TensorMap] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.given: list[list[Any]] = []
        self.context = False

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = NAMES[status]
        return SUCCESS

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 1 if self.context else None
        return SUCCESS

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.calls.append(("retain", device))
        context._obj.value = 1
        return SUCCESS

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context = context.value == 1
        return SUCCESS

    def cuModuleLoadData(self, module: Any, content: bytes) -> int:
        if content not in self._ptx:
            return NO_BINARY
        self._modules.append(self._ptx[content])
        module._obj.value = len(self._modules)
        return SUCCESS

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        text = self._modules[module.value - 1]
        assert program(text).kernel.name == name.decode()
        function._obj.value = module.value
        return SUCCESS

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (97, 0)
        value._obj.value = OPTIN
        return SUCCESS

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:
        assert attribute == 1
        value._obj.value = 16
        return SUCCESS

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:
        self.calls.append(("cache", config))
        return SUCCESS

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.calls.append(("attribute", attribute, value))
        return SUCCESS

    def _sizes(self, function: Any) -> list[int]:
        return list(program(self._modules[function.value - 1]).kernel.params.values())

    def cuFuncGetParamInfo(self, function: Any, at: Any, offset: Any, size: Any) -> int:
        sizes = self._sizes(function)
        if at.value >= len(sizes):
            return INVALID_VALUE
        size._obj.value = sizes[at.value]
        return SUCCESS

    def cuTensorMapEncodeTiled(
        self,
        made: Any,
        dtype: int,
        rank: int,
        address: Any,
        extents: Any,
        strides: Any,
        box: Any,
        steps: Any,
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        assert ctypes.addressof(made) % 64 == 0 and len(made) == 128
        assert list(steps) == [1] * rank and (interleave, promotion, fill) == (0, 2, 0)
        size = {0: 1, 1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 9: 2}[dtype]
        outer = [s // size for s in reversed(strides[: rank - 1])]
        assert all(s % 16 == 0 for s in strides[: rank - 1])
        shape = tuple(reversed(extents[:rank]))
        found = TensorMap(address.value, SWIZZLE_BYTES[swizzle], size, tuple(reversed(box[:rank])), shape, (*outer, 1))
        self.calls.append(("map", dtype, rank))
        key = len(self._maps).to_bytes(128, "little")
        ctypes.memmove(made, key, 128)
        self._maps[key] = found
        return SUCCESS

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:
        if not self.context:
            return INVALID_CONTEXT
        c = config._obj
        early = [c.attributes[i].id for i in range(c.count) if c.attributes[i].value]
        self.calls.append(("launch", tuple(c.grid), tuple(c.block), c.shared_bytes, early, c.stream))
        given: list[Any] = []
        for size, at in zip(self._sizes(function), arguments, strict=True):
            bits = ctypes.string_at(at, size)
            given.append(self._maps[bits] if size == 128 else int.from_bytes(bits, "little"))
        self.given.append(given)
        text = self._modules[function.value - 1]
        run(text, tuple(c.grid), given, c.shared_bytes, self._how)
        return SUCCESS
