"""Tilewright as a backend of `onnx.backend.base`, which onnx's own test suite and other tools drive.

Here the oracle evaluates the graph that the front end reads, so a test that passes proves the reading;
`tilewright.onnx_backend` runs the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, check_type, counted
from tilewright.frontends import LoadOptions
from tilewright.frontends import onnx as front_end
from tilewright.frontends.onnx.inputs import symbolic
from tilewright.frontends.onnx.tensors import element_code, from_array, to_numpy
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.types import Shape
from tilewright.ir.verify import verify
from tilewright.recent import Recent

MOST = 64  # sets of input shapes, whose graphs are kept
Run = Callable[[Sequence[Any]], Sequence[Any]]  # values of a graph's inputs in, those of its outputs out


def by_the_oracle(graph: Graph) -> Run:
    """Run a graph by evaluating it."""
    return lambda values: evaluate(graph, list(values))


class TilewrightRep(BackendRep):
    """A model ready to run.

    Attributes:
        graphs: one for each of the last `MOST` sets of input shapes, with what runs it.
    """

    def __init__(self, model: onnx.ModelProto, ready: Callable[[Graph], Run] = by_the_oracle) -> None:
        """`ready` gives what runs a graph.

        Raises:
            InputError: it is no model.
        """
        check_type(model, onnx.ModelProto, "model", 'onnx.load("model.onnx")')
        constants = {t.name for t in model.graph.initializer}
        self._model, self._ready = model, ready
        self._inputs = [i for i in model.graph.input if i.name not in constants]
        self.graphs: Recent[tuple[Shape, ...], tuple[Graph, Run]] = Recent(MOST)
        if not symbolic(self._inputs):
            self.graph([])

    def graph(self, inputs: Sequence[object]) -> tuple[Graph, Run]:
        """The graph for inputs of these shapes, or for the model's own if they are not given, and what runs it."""
        shapes = tuple(np.shape(v) if isinstance(v, np.ndarray) else () for v in inputs)  # type: ignore[arg-type]
        dims: Mapping[str, Shape] = {}
        if symbolic(self._inputs):
            named = zip(self._inputs, inputs, shapes, strict=False)
            dims = {i.name: s for i, v, s in named if isinstance(v, np.ndarray) and i.type.HasField("tensor_type")}
        else:
            shapes = ()
        found = self.graphs.find(shapes)
        if found is None:
            graph = verify(front_end.load(self._model, LoadOptions(input_dims=dims)))
            found = self.graphs[shapes] = graph, self._ready(graph)
        return found

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Results as NumPy arrays (or what a `call` gave, for sequences and strings).

        Raises:
            InputError: more or fewer inputs are given than the model takes.
        """
        check_type(inputs, (np.ndarray, Sequence), "inputs", "a list of arrays")
        values = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
        if len(values) != len(self._inputs):
            raise InputError(f"{counted(len(self._inputs), 'input')} wanted, {len(values)} given")
        graph, run = self.graph(values)
        feeds: list[Any] = []
        for node, value in zip(graph.inputs, values, strict=True):
            label = f"input {getattr(node.op, 'label', '')!r}"
            feeds.append(value if node.dtype is OPAQUE else from_array(value, node.tensor, label))
        results = run(feeds)
        return tuple(
            r if node.dtype is OPAQUE else to_numpy(r, element_code(node.dtype))  # type: ignore[arg-type]
            for node, r in zip(graph.outputs, results, strict=True)
        )


class TilewrightBackend(Backend):
    """`onnx.backend.base.Backend` by the front end and the oracle; CPU only."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> TilewrightRep:
        return TilewrightRep(model)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: object = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Results of one node.

        Args:
            node: an ONNX node.
            inputs: arrays, in the order of its inputs that have names.
            device: as `prepare` takes it.
            outputs_info: not looked at.
            kwargs: `opset_version`, the newest unless given; others are for `prepare`.

        Raises:
            InputError: it is no node, or takes other inputs.
        """
        check_type(node, onnx.NodeProto, "node", 'onnx.helper.make_node("Add", ["x", "y"], ["z"])')
        check_type(inputs, (np.ndarray, Sequence), "inputs", "a list of arrays")
        values = [np.asarray(v) for v in ([inputs] if isinstance(inputs, np.ndarray) else inputs)]
        names = list(dict.fromkeys(name for name in node.input if name))
        if len(values) != len(names):
            raise InputError(f"{counted(len(names), 'input')} wanted, {len(values)} given", where=f"{node.op_type} node")
        types = [(helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for v in values]
        infos = [helper.make_tensor_value_info(name, *t) for name, t in zip(names, types, strict=True)]
        results = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        opset = helper.make_opsetid(node.domain, kwargs.pop("opset_version", onnx.defs.onnx_opset_version()))
        model = helper.make_model(helper.make_graph([node], "node", infos, results), opset_imports=[opset])
        return cls.prepare(model, device, **kwargs).run(values)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"
