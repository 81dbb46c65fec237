"""Tilewright: a matrix-multiplication compiler for XLA HLO, ONNX and PyTorch programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright import jax, onnx_backend, ort
    from tilewright.any_shape import AnyShape
    from tilewright.compiler import Quantization, compile
    from tilewright.errors import TilewrightError
    from tilewright.frontends import load
    from tilewright.ir.dims import Dim
    from tilewright.linear.module import Linear
    from tilewright.linear.replace import prepare, quantize_
    from tilewright.m_dispatch import AnyRows, compile_rows
    from tilewright.on_mesh import load_on_mesh
    from tilewright.product import matmul
    from tilewright.program import Program, load_program
    from tilewright.racing import race
    from tilewright.rules.calibrate import scheme
    from tilewright.runtime.checkpoint import read_checkpoint, weights_of
    from tilewright.runtime.executable import Executable
    from tilewright.runtime.quantized_weight import QuantizedWeight, pack

__version__ = "0.1.0"
__all__ = [
    "AnyRows",
    "AnyShape",
    "Dim",
    "Executable",
    "Linear",
    "Program",
    "Quantization",
    "QuantizedWeight",
    "TilewrightError",
    "__version__",
    "compile",
    "compile_rows",
    "jax",
    "load",
    "load_on_mesh",
    "load_program",
    "matmul",
    "onnx_backend",
    "ort",
    "pack",
    "prepare",
    "quantize_",
    "race",
    "read_checkpoint",
    "scheme",
    "weights_of",
]

_HOME = {
    "AnyShape": "tilewright.any_shape",
    "Dim": "tilewright.ir.dims",
    "compile": "tilewright.compiler",
    "Quantization": "tilewright.compiler",
    "scheme": "tilewright.rules.calibrate",
    "load": "tilewright.frontends",
    "load_on_mesh": "tilewright.on_mesh",
    "load_program": "tilewright.program",
    "matmul": "tilewright.product",
    "compile_rows": "tilewright.m_dispatch",
    "race": "tilewright.racing",
    "AnyRows": "tilewright.m_dispatch",
    "Program": "tilewright.program",
    "Executable": "tilewright.runtime.executable",
    "Linear": "tilewright.linear.module",
    "TilewrightError": "tilewright.errors",
    "QuantizedWeight": "tilewright.runtime.quantized_weight",
    "pack": "tilewright.runtime.quantized_weight",
    "quantize_": "tilewright.linear.replace",
    "prepare": "tilewright.linear.replace",
    "read_checkpoint": "tilewright.runtime.checkpoint",
    "weights_of": "tilewright.runtime.checkpoint",
}


def __getattr__(name: str) -> object:
    """Import the public names when first used: torch takes a second to import and `tilewright --help` needs none of it."""
    import importlib

    if name in ("jax", "onnx_backend", "ort"):
        return importlib.import_module(f"tilewright.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
