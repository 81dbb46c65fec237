"""Small ONNX models for tests, read by Tilewright and run beside onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tilewright.frontends import LoadOptions
from tilewright.frontends import onnx as frontend
from tilewright.frontends.onnx.tensors import element_code, from_array, to_numpy
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.verify import verify

Arrays = Mapping[str, np.ndarray]
_rng = np.random.default_rng(23)


def value(name: str, like: np.ndarray | int, shape: Sequence[int | str | None] | None = None) -> onnx.ValueInfoProto:
    """An input or output: typed as an array is, or of an element type and a shape (None: unknown)."""
    if isinstance(like, np.ndarray):
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(like.dtype), like.shape)
    return helper.make_tensor_value_info(name, like, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Arrays | Sequence[onnx.ValueInfoProto],
    outputs: Mapping[str, int],
    constants: Arrays | None = None,
    *,
    opset: int = 21,
    domains: Mapping[str, int] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """A model of these nodes; `outputs` gives each result's element type, shapes are left open."""
    infos = [value(k, v) for k, v in inputs.items()] if isinstance(inputs, Mapping) else list(inputs)
    results = [value(k, t, None) for k, t in outputs.items()]
    weights = [numpy_helper.from_array(v, k) for k, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", infos, results, weights)
    versions = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())]
    return helper.make_model(graph, opset_imports=versions, ir_version=10, functions=list(functions))


def one(op: str, inputs: Arrays, constants: Arrays | None = None, *, out: int | Sequence[int] = 0, **more: object):
    """A model of one node over inputs and constants in the order given, inputs first; `out` is its results' types."""
    opset, domain = int(more.pop("opset", 21)), str(more.pop("domain", ""))  # type: ignore[call-overload]
    names = list(more.pop("order", [*inputs, *(constants or {})]))  # type: ignore[call-overload]
    kinds = [out] if isinstance(out, int) else list(out)
    first = next(iter(inputs.values()))
    kinds = [k or helper.np_dtype_to_tensor_dtype(first.dtype) for k in kinds]
    results = {f"out{i}": k for i, k in enumerate(kinds)}
    node = helper.make_node(op, names, list(results), name="node", domain=domain, **more)
    return model([node], inputs, results, constants, opset=opset, domains={domain: 1} if domain else None)


def read(m: onnx.ModelProto | str, **options: object) -> Graph:
    """The verified graph of a model."""
    return verify(frontend.load(m, LoadOptions(**options)))  # type: ignore[arg-type]


def ours(m: onnx.ModelProto | Graph, feeds: Arrays) -> list[np.ndarray]:
    """Results by the front end and the oracle, as NumPy arrays."""
    graph = m if isinstance(m, Graph) else read(m)
    tensors = {n.op.label: from_array(feeds[n.op.label], n.tensor, n.op.label) for n in graph.inputs}
    results = evaluate(graph, tensors)
    return [to_numpy(r, element_code(n.dtype)) for n, r in zip(graph.outputs, results, strict=True)]


def theirs(m: onnx.ModelProto | str, feeds: Arrays) -> list[np.ndarray]:
    """Results by onnxruntime, its optimisations off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    source = m if isinstance(m, str) else m.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def native(graph: Graph) -> bool:
    """Tell whether nothing is left to torch, or to onnx's reference evaluator."""
    return not any(n.op.name == "call" for n in graph.nodes())


def agrees(m: onnx.ModelProto, feeds: Arrays, *, exact: bool = False, rtol: float = 1e-5, atol: float = 1e-6) -> Graph:
    """Read the model, without a call, and compare every result with onnxruntime's."""
    graph = read(m)
    assert native(graph), graph.notes
    for got, wanted in zip(ours(graph, feeds), theirs(m, feeds), strict=True):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        if exact or wanted.dtype.kind not in "f":
            np.testing.assert_array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)
    return graph


def floats(*shape):
    """Normal values with NaN, infinities, zeros and extremes among them."""
    x = np.asarray(_rng.standard_normal(shape) * 3, np.float32)
    flat = x.reshape(-1)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-40, 3e38], np.float32)
    flat[: special.size] = special[: flat.size]
    return x


def tame(*shape):
    """Normal values."""
    return np.asarray(_rng.standard_normal(shape), np.float32)


def whole(dtype, *shape):
    """Integers over their whole range, its ends among them."""
    limits = np.iinfo(dtype)
    x = _rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    special = np.array([limits.min, limits.max, 0, 1], dtype)
    x.reshape(-1)[: special.size] = special[: x.size]
    return x


FLOAT, INT8, UINT8, INT32, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.BOOL,
)
