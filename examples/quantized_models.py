"""Quantise an ONNX model's matmuls: QuantizeLinear and DequantizeLinear pairs around every MatMul and Gemm.

The result has the structure that onnxruntime.quantization.quantize_static writes for `op_types_to_quantize=["MatMul",
"Gemm"]`, and for the integer types the same scales, zero points and codes (a test compares them). The pairs are placed
here and not by that tool because of what it does to the models of `models.py`:

- Its only calibration for fp8 fits a normal distribution and cuts at about 4.5 standard deviations. Attention
  probabilities are not normal: the 1.0 in a causal model's first row became 0.08, and the logits of DistilGPT2 (1 x 128,
  random weights) were off by 86 % at the first position and by 21 % overall. Mapping a tensor's largest magnitude to
  the type's, as here, leaves 9 %.
- It has no e4m3fnuz.
- It takes a transposed weight (DistilGPT2's output projection is the token embedding, transposed) for an activation,
  to be quantised anew in every run.
- It took 20 s for BERT in int8 on two cores, where this takes 2.

Scales follow the QuantizeLinear and DynamicQuantizeLinear pages of the ONNX operator documentation: the range widened
to hold zero; symmetric, scale = max|x| / q_max; else scale = (max - min) / (q_max - q_min), zero point =
round(q_min - min / scale).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model_files import require
from tilewright.errors import InputError

Array = np.ndarray[Any, Any]
QUANTIZED_OPS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Scheme:
    """A quantised model's way to store its tensors.

    Attributes:
        activation, weight: the stored types.
        symmetric: whether activations have no zero point. Weights never have one.
        per_channel: whether a weight has one scale for each output channel, or one in all.
    """

    activation: np.dtype[Any]
    weight: np.dtype[Any]
    symmetric: bool
    per_channel: bool


_INT8, _UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
_E4M3FN, _E4M3FNUZ = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz)

SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(_INT8, _INT8, symmetric=True, per_channel=True),
    "int8-asymmetric": Scheme(_INT8, _INT8, symmetric=False, per_channel=True),
    "uint8": Scheme(_UINT8, _INT8, symmetric=False, per_channel=True),
    "fp8": Scheme(_E4M3FN, _E4M3FN, symmetric=True, per_channel=False),
    "fp8-fnuz": Scheme(_E4M3FNUZ, _E4M3FNUZ, symmetric=True, per_channel=False),
}


def type_range(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The least and greatest finite value of an integer or fp8 type."""
    info = np.iinfo(dtype) if dtype.kind in "iu" else ml_dtypes.finfo(dtype)
    return float(info.min), float(info.max)


def quantization_parameters(low: Array, high: Array, dtype: np.dtype[Any], *, symmetric: bool) -> tuple[Array, Array]:
    """Scale (f32) and zero point (`dtype`) of tensors, or channels, whose values lie in [low, high]; elementwise."""
    low = np.minimum(np.asarray(low, np.float64), 0.0)
    high = np.maximum(np.asarray(high, np.float64), 0.0)
    q_low, q_high = type_range(dtype)
    scale = np.maximum(-low, high) / q_high if symmetric else (high - low) / (q_high - q_low)
    flat = scale < np.finfo(np.float32).tiny
    scale = np.where(flat, 1.0, scale)
    zero_point = np.zeros_like(scale) if symmetric else np.where(flat, 0.0, np.rint(q_low - low / scale))
    return scale.astype(np.float32), zero_point.astype(dtype)


def encode(values: Array, scale: Array, dtype: np.dtype[Any]) -> Array:
    """Codes of f32 `values`, zero point 0: round to nearest even, saturate. `scale` broadcasts against `values`."""
    codes = values / scale
    if dtype.kind in "iu":
        np.rint(codes, out=codes)
    return np.clip(codes, *type_range(dtype), out=codes).astype(dtype)


def calibrate(source: Path, tensors: Iterable[str], feeds: Iterable[Mapping[str, Array]]) -> dict[str, tuple[float, float]]:
    """The least and greatest value that each of `tensors` takes over `feeds`, as onnxruntime computes them.

    Raises:
        InputError: a tensor took a value that is not finite, so no scale holds it.
    """
    onnx, runtime = require("onnx"), require("onnxruntime")
    model = onnx.load(source, load_external_data=False)
    names = list(tensors)
    nodes, wanted = list(model.graph.node), set(names)
    del model.graph.node[:]

    def see(tensors: Iterable[str]) -> None:
        for tensor in wanted.intersection(tensors):
            for op in ("ReduceMin", "ReduceMax"):
                model.graph.node.append(onnx.helper.make_node(op, [tensor], [f"{tensor}/{op}"], keepdims=0))
                model.graph.output.append(onnx.helper.make_tensor_value_info(f"{tensor}/{op}", onnx.TensorProto.FLOAT, []))

    # Each tensor is seen right behind what makes it, and the runtime keeps that order: otherwise all would live to the end.
    see(value.name for value in model.graph.input)
    for node in nodes:
        model.graph.node.append(node)
        see(node.output)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = runtime.ExecutionOrder.PRIORITY_BASED
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(source.parent.resolve()))
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    extrema_names = [f"{name}/{op}" for op in ("ReduceMin", "ReduceMax") for name in names]
    extrema = np.array([session.run(extrema_names, dict(feed)) for feed in feeds])
    lows, highs = extrema[:, : len(names)].min(axis=0), extrema[:, len(names) :].max(axis=0)
    bad = [name for name, low, high in zip(names, lows, highs, strict=True) if not np.isfinite((low, high)).all()]
    if bad:
        raise InputError(
            f"{len(bad)} activations are not finite, so they cannot be quantised", where=f"{source.name}: {bad[0]}"
        )
    return {name: (float(low), float(high)) for name, low, high in zip(names, lows, highs, strict=True)}


def quantize(source: Path, scheme: Scheme, feeds: Sequence[Mapping[str, Array]]) -> Any:
    """The quantised form of a float model, as a ModelProto with every tensor in memory.

    Args:
        source: an ONNX file; the second operand of a MatMul or Gemm is an activation, an initialiser, or an
            initialiser transposed.
        scheme: the types to store.
        feeds: inputs by name to calibrate with.
    """
    onnx = require("onnx")
    model = onnx.load(source, load_external_data=False)
    writer = _Writer(model.graph, source, scheme)
    writer.rewrite(calibrate(source, writer.activations(), feeds))
    onnx.external_data_helper.load_external_data_for_model(model, str(source.parent))
    return model


class _Writer:
    """Places the pairs in one graph. Names are those that onnxruntime's tool gives."""

    def __init__(self, graph: Any, source: Path, scheme: Scheme) -> None:
        self.onnx = require("onnx")
        self.graph = graph
        self.source = source
        self.scheme = scheme
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.transposes = {
            node.output[0]: node for node in graph.node if node.op_type == "Transpose" and node.input[0] in self.initializers
        }
        self.matmuls = [node for node in graph.node if node.op_type in QUANTIZED_OPS]
        self.nodes: list[Any] = []
        self.renamed: dict[str, str] = {}
        self.weight_scales: dict[str, Array] = {}
        self.activation_scales: dict[str, Array] = {}
        self.biases: set[str] = set()

    def activations(self) -> list[str]:
        """The tensors to put between a pair: operands that are no weight, and results; each once, in graph order."""
        used = (name for node in self.matmuls for name in (*node.input[:2], *node.output))
        return [name for name in dict.fromkeys(used) if name not in self.initializers and name not in self.transposes]

    def rewrite(self, ranges: Mapping[str, tuple[float, float]]) -> None:
        """Quantise the graph in place."""
        scheme = self.scheme
        names = list(ranges)
        low, high = np.array([ranges[name] for name in names]).reshape(-1, 2).T
        scales, zero_points = quantization_parameters(low, high, scheme.activation, symmetric=scheme.symmetric)
        for name, scale, zero_point in zip(names, scales, zero_points, strict=True):
            self.activation_scales[name] = scale
            self.store(f"{name}_scale", scale)
            self.store(f"{name}_zero_point", zero_point)

        outputs = {value.name for value in self.graph.output}
        for value in self.graph.input:
            if value.name in ranges:
                self.pair(value.name, value.name, f"{value.name}_DequantizeLinear_Output")
        for node in self.graph.node:
            if node.op_type in QUANTIZED_OPS:
                self.quantize_constants(node)
            for i, name in enumerate(node.input):
                node.input[i] = self.renamed.get(name, name)
            self.nodes.append(node)
            for i, name in enumerate(node.output):
                if name in ranges and name in outputs:  # the program's result keeps its name
                    node.output[i] = f"{name}_QuantizeLinear_Input"
                    self.pair(name, node.output[i], name)
                elif name in ranges:
                    self.pair(name, name, f"{name}_DequantizeLinear_Output")
        self.finish()

    def pair(self, name: str, source: str, result: str) -> None:
        """source -> QuantizeLinear -> DequantizeLinear -> result; whoever reads `name` from here on reads `result`."""
        codes, parameters = f"{name}_QuantizeLinear_Output", (f"{name}_scale", f"{name}_zero_point")
        for op, operand, out in (("QuantizeLinear", source, codes), ("DequantizeLinear", codes, result)):
            self.nodes.append(self.onnx.helper.make_node(op, [operand, *parameters], [out], name=f"{name}_{op}"))
        self.renamed[name] = result

    def quantize_constants(self, node: Any) -> None:
        """Point a matmul's constant operands at the DequantizeLinear of their codes."""
        weight = node.input[1]
        if weight not in self.initializers and weight not in self.transposes:
            return
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        if weight not in self.weight_scales:
            self.quantize_weight(weight, axis=0 if transposed else 1)
        node.input[1] = f"{weight}_DequantizeLinear_Output"
        # As in an integer matmul proper, the bias is added to the s32 accumulator, in its unit. An fp8 matmul
        # accumulates in f32, and its bias stays as it is.
        if len(node.input) == 3 and node.input[2] in self.initializers and self.scheme.weight.kind in "iu":
            unit = self.activation_scales[node.input[0]] * self.weight_scales[weight]
            bias = node.input[2]
            codes = encode(self.array(bias).astype(np.float64), unit.astype(np.float64), np.dtype(np.int32))
            # The unit is this node's own, so a second reader of the same bias needs codes of its own.
            name = f"{bias}_{node.output[0]}" if bias in self.biases else bias
            self.biases.add(bias)
            zero_point = np.zeros(unit.shape, np.int32)
            node.input[2] = self.dequantized(name, codes, unit, zero_point, axis=0, prefix=f"{name}_quantized")

    def quantize_weight(self, weight: str, axis: int) -> None:
        values, dtype = self.array(weight), self.scheme.weight
        over = tuple(i for i in range(values.ndim) if i != axis) if self.scheme.per_channel else None
        low, high = values.min(axis=over), values.max(axis=over)
        scale, zero_point = quantization_parameters(low, high, dtype, symmetric=True)
        aligned = np.expand_dims(scale, over) if over is not None else scale
        self.weight_scales[weight] = scale
        self.dequantized(weight, encode(values, aligned, dtype), scale, zero_point, axis, prefix=weight)

    def dequantized(self, name: str, codes: Array, scale: Array, zero_point: Array, axis: int, prefix: str) -> str:
        """Store a constant's codes, and its parameters under `prefix`, and append their DequantizeLinear; its result."""
        parts = {f"{name}_quantized": codes, f"{prefix}_scale": scale, f"{prefix}_zero_point": zero_point}
        for part, values in parts.items():
            self.store(part, values)
        result, attributes = f"{name}_DequantizeLinear_Output", {"axis": axis} if scale.ndim else {}
        node = self.onnx.helper.make_node(
            "DequantizeLinear", list(parts), [result], name=f"{name}_DequantizeLinear", **attributes
        )
        self.nodes.append(node)
        return result

    def array(self, name: str) -> Array:
        """The values of an initialiser, or of a transposed one."""
        transpose = self.transposes.get(name)
        if transpose is not None:
            permutation = next((tuple(a.ints) for a in transpose.attribute if a.name == "perm"), None)
            return np.ascontiguousarray(self.array(transpose.input[0]).transpose(permutation))
        # A copy, because reading a tensor's external data would bring it into the model, where it is not needed.
        tensor = self.onnx.TensorProto()
        tensor.CopyFrom(self.initializers[name])
        return self.onnx.numpy_helper.to_array(tensor, base_dir=str(self.source.parent))

    def store(self, name: str, values: Array) -> None:
        self.graph.initializer.append(self.onnx.numpy_helper.from_array(np.asarray(values), name))

    def finish(self) -> None:
        """Replace the nodes, and drop what only quantised constants were read for."""
        read = {name for node in self.nodes for name in node.input}
        nodes = [node for node in self.nodes if node.output[0] not in self.transposes or node.output[0] in read]
        read = {name for node in nodes for name in node.input}
        tensors = [tensor for tensor in self.graph.initializer if tensor.name in read]
        for field, kept in ((self.graph.node, nodes), (self.graph.initializer, tensors)):
            del field[:]
            field.extend(kept)
