"""Compiled programs as a backend of `onnx.backend.base`: the class `Backend`, and its functions.

Results are NumPy arrays, of `ml_dtypes` types where NumPy has none. A model that leaves shapes open is compiled for each set of
input shapes that it is run with; `tilewright.ort.InferenceSession` compiles such a model once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewright.compiler import compile
from tilewright.errors import InputError
from tilewright.frontends.onnx.onnx_backend import Run, TilewrightBackend, TilewrightRep

if TYPE_CHECKING:
    import onnx

    from tilewright.ir.graph import Graph

__all__ = ["Backend", "prepare", "run_model", "run_node", "supports_device"]

_DEVICE = re.compile(r"CPU|CUDA(?::\d+)?")


class Backend(TilewrightBackend):
    """`onnx.backend.base.Backend` by compiled programs."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> TilewrightRep:
        """A model ready to run.

        Args:
            model: an ONNX model.
            device: "CPU", "CUDA" or "CUDA:1".
            kwargs: options of `tilewright.compile`.

        Raises:
            InputError: there is no such device, or it is no model, or a malformed one.
        """
        if not _named(device):
            raise InputError(f"no device {device!r}", where="onnx_backend.prepare", hint='"CPU", "CUDA" or "CUDA:1"')
        return TilewrightRep(model, _compiled(device.lower(), kwargs))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Tell whether programs run on a device here, by its name in ONNX."""
        return device == "CPU" or (_named(device) and torch.cuda.is_available())


def _named(device: object) -> bool:
    """Tell whether a device has a name of ONNX's."""
    return isinstance(device, str) and _DEVICE.fullmatch(device) is not None


def _compiled(device: str, options: dict[str, Any]) -> Callable[[Graph], Run]:
    def ready(graph: Graph) -> Run:
        program = compile(graph, device=device, dims=False, **options)

        def run(values: Sequence[Any]) -> Sequence[Any]:
            return program.run([v.to(device) if isinstance(v, torch.Tensor) else v for v in values])

        return run

    return ready


prepare: Callable[..., TilewrightRep] = Backend.prepare
"""Compile a model: `prepare(model, device="CPU", **options)` gives what `run(inputs)` is called on."""
run_model: Callable[..., tuple[Any, ...]] = Backend.run_model
"""Compile a model and run it once: `run_model(model, inputs, device="CPU")` gives a tuple of arrays."""
run_node: Callable[..., tuple[Any, ...]] = Backend.run_node
"""Compile one node and run it: `run_node(node, inputs, device="CPU", opset_version=20)` gives a tuple of arrays."""
supports_device: Callable[[str], bool] = Backend.supports_device
"""Tell whether programs run on a device, "CPU", "CUDA" or "CUDA:1", on this machine."""
