"""onnxruntime's session by compiled programs: `tilewright.ort.InferenceSession` in place of `onnxruntime.InferenceSession`.

A session takes and gives what onnxruntime's Python API does: NumPy arrays by name (`run`), values that stay on a device
(`run_with_ort_values`), memory that is bound beforehand (`io_binding`). A model that leaves extents open is compiled once for
any shapes (`AnyShape`), and for single shapes where that cannot be. onnxruntime itself is not needed.

Source of the interface: onnxruntime 1.31, `onnxruntime_inference_collection.py`.
"""

from tilewright.ort.binding import IOBinding
from tilewright.ort.options import ExecutionMode, GraphOptimizationLevel, RunOptions, SessionError, SessionOptions
from tilewright.ort.session import (
    InferenceSession,
    ModelMetadata,
    NodeArg,
    get_all_providers,
    get_available_providers,
    get_device,
)
from tilewright.ort.values import OrtValue

__all__ = [
    "ExecutionMode",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "OrtValue",
    "RunOptions",
    "SessionError",
    "SessionOptions",
    "get_all_providers",
    "get_available_providers",
    "get_device",
]
