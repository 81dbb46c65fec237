"""The one thread that may have torch trace a program, and whether torch transforms the one that runs.

`torch.export`, `make_fx` and the compiler that traces with them keep their state in variables of the process. Two threads that
trace at once fail, and leave a state in which every later trace fails, too. Whoever traces holds `TRACING`, for as long as it
holds torch's own stand-ins for tensors. A thread that calls `torch.export` by itself should hold it as well.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch
from torch.autograd import forward_ad


class _Tracing:
    """A lock that a thread may take again, taken after torch was made safe to trace in threads that end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ready = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._ready:
            self._ready = True
            _keep_device_guard()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()


def _keep_device_guard() -> None:
    """Have a thread that does not end install torch's stand-in for the guard of CUDA devices.

    A torch built for CUDA that finds no device installs it whenever it traces, and up to 2.11 it belongs to the thread that
    traces (`ensureCUDADeviceGuardSet` in c10/core/impl/DeviceGuardImplInterface.cpp): the first trace after that thread's end
    reads freed memory.
    """
    install = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)  # pyright: ignore
    if install is None or torch.version.cuda is None or torch.cuda.is_available():
        return
    done = threading.Event()

    def install_and_wait() -> None:
        try:
            install()
        finally:
            done.set()
        threading.Event().wait()

    threading.Thread(target=install_and_wait, name="tilewright-device-guard", daemon=True).start()
    done.wait()
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # pyright: ignore


def transformed() -> bool:
    """Tell whether torch computes derivatives forward now (`torch.autograd.forward_ad`), or runs within a transform of
    `torch.func`, such as `jvp`, `vmap` or `grad`: tensors may stand for others then, or have a tangent."""
    stack: object = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore
    return stack is not None or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


# As `torch.compiler.assume_constant_result`, without importing Dynamo: it asks once, while it traces, and knows that the answer
# belongs to what it traces. It would break the graph here else (torch 2.11), and go on by tracing what runs kernels.
transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_transformed(t: torch.Tensor) -> bool:
    """Tell whether a tensor stands for others or has a tangent (`transformed`)."""
    stands: bool = torch._C._functorch.is_functorch_wrapped_tensor(t)  # pyright: ignore
    return stands or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None)  # pyright: ignore[reportPrivateUsage]


TRACING = _Tracing()
