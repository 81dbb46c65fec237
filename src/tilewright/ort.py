"""onnxruntime's session by compiled programs: `tilewright.ort.InferenceSession` in place of `onnxruntime.InferenceSession`.

A session takes and gives what onnxruntime's Python API does: NumPy arrays by name (`run`), values that stay on a device
(`run_with_ort_values`), memory that is bound beforehand (`io_binding`). A model that leaves extents open is compiled once for
any shapes (`AnyShape`), and for single shapes where that cannot be. onnxruntime itself is not needed.

Source of the interface: onnxruntime 1.31, `onnxruntime_inference_collection.py`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tilewright.any_shape import AnyShape
from tilewright.compiler import compile
from tilewright.dtype import OPAQUE, DType, from_torch
from tilewright.dtype import from_numpy as numpy_dtype
from tilewright.errors import LOGGER, InputError, UnsupportedError, check_type
from tilewright.frontends.onnx.files import open_model, parsed
from tilewright.frontends.onnx.inputs import is_closed
from tilewright.frontends.onnx.tensors import element_code, element_type
from tilewright.ir.state import caller_inputs
from tilewright.ir.types import TensorType
from tilewright.runtime.arrays import address, at_address, from_numpy, from_user, separate, to_numpy

if TYPE_CHECKING:
    import onnx

    from tilewright.ir.graph import Node
    from tilewright.program import Program

__all__ = ["IOBinding", "InferenceSession", "ModelMetadata", "NodeArg", "OrtValue"]

_SHAPES = 16  # programs of single shapes that a session keeps
_PROVIDERS = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "cuda"}


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a model.

    Attributes:
        name: what the model calls it.
        type: as onnxruntime spells it: "tensor(float)", "seq(tensor(int64))".
        shape: extents: numbers, names of open ones, or None.
    """

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class ModelMetadata:
    """Facts that a model's producer wrote into it; see onnx.proto."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str] = field(default_factory=dict[str, str])


class OrtValue:
    """An array on a device, or a value that is no array (a sequence, strings)."""

    def __init__(self, value: object, dtype: DType | None = None) -> None:
        """`value`: a tensor, or what is none; `dtype`: its element type, where the tensor's own does not say it (4 bits)."""
        self._value = value
        self._dtype = dtype if dtype is not None else from_torch(value.dtype) if isinstance(value, torch.Tensor) else OPAQUE

    @staticmethod
    def ortvalue_from_numpy(array: np.ndarray, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """A copy of an array on a device."""
        dtype = numpy_dtype(array.dtype)
        return OrtValue(from_numpy(array, dtype).to(_device(device_type, device_id), copy=True), dtype)

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """Memory for an array on a device, with whatever is in it; the type is NumPy's or a number of ONNX's."""
        dtype = _dtype(element_type)
        return OrtValue(torch.empty(tuple(shape), dtype=dtype.to_torch(), device=_device(device_type, device_id)), dtype)

    @property
    def value(self) -> object:
        """The tensor, or what is none."""
        return self._value

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor.

        Raises:
            InputError: the value is none.
        """
        if not isinstance(self._value, torch.Tensor):
            raise InputError(f"{type(self._value).__name__} is no tensor", where="OrtValue", hint="OrtValue.value")
        return self._value

    def numpy(self) -> np.ndarray:
        """A copy as a NumPy array, of ml_dtypes' type where NumPy has none."""
        return to_numpy(self.tensor.clone(), self._dtype)

    def shape(self) -> list[int]:
        """The extents."""
        return list(self.tensor.shape)

    def element_type(self) -> int:
        """The element type's number in ONNX."""
        return element_code(self._dtype)

    def data_type(self) -> str:
        """The type, as `NodeArg.type` has it."""
        return f"tensor({_spelt(element_code(self._dtype))})"

    def device_name(self) -> str:
        """The kind of device: "cpu" or "cuda"."""
        return self.tensor.device.type

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.tensor.data_ptr()

    def tensor_size_in_bytes(self) -> int:
        """Bytes of the elements."""
        return self.tensor.nbytes

    def has_value(self) -> bool:
        """Tell whether there is a value: an optional one may be missing."""
        return self._value is not None

    def is_tensor(self) -> bool:
        """Tell whether it is an array."""
        return isinstance(self._value, torch.Tensor)

    def is_tensor_sequence(self) -> bool:
        """Tell whether it is a sequence."""
        return isinstance(self._value, list)

    def is_sparse_tensor(self) -> bool:
        """Tell whether it is sparse, which none is."""
        return False

    def update_inplace(self, array: np.ndarray) -> None:
        """Write an array of the same shape and type over it."""
        _fill(self.tensor, from_numpy(array, numpy_dtype(array.dtype)), "OrtValue.update_inplace")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> object:
        return self.tensor.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


class IOBinding:
    """Memory for the inputs and outputs of a session, bound before `run_with_iobinding`."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs: dict[str, object] = {}
        self._outputs: dict[str, torch.Tensor | str] = {}  # memory, or a device
        self._results: dict[str, OrtValue] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """Read an input from a NumPy array."""
        self._inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Read an input from contiguous memory at an address, which must outlive the binding."""
        kind = TensorType(_dtype(element_type), tuple(shape))
        self._inputs[name] = at_address(buffer_ptr, kind, _device(device_type, device_id))

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Read an input from a value."""
        self._inputs[name] = _taken(ortvalue)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Write an output to contiguous memory at an address, or, without one, to new memory on a device."""
        place = _device(device_type, device_id)
        if buffer_ptr is None:
            self._outputs[name] = place
            return
        if shape is None or element_type is None:
            raise InputError("an address without shape and element type", where=f"output {name!r}", hint="give both")
        self._outputs[name] = at_address(buffer_ptr, TensorType(_dtype(element_type), tuple(shape)), place)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Write an output into a value's memory."""
        if not isinstance(ortvalue, OrtValue):
            hint = "tilewright.ort.OrtValue.ortvalue_from_shape_and_type"
            raise InputError(
                f"the memory of a {type(ortvalue).__name__} cannot be written", where=f"output {name!r}", hint=hint
            )
        self._outputs[name] = ortvalue.tensor

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs, and the results in them."""
        self._outputs.clear()
        self._results.clear()

    def synchronize_inputs(self) -> None:
        """Wait until what writes the inputs is done."""
        self._session.wait()

    def synchronize_outputs(self) -> None:
        """Wait until the results are there."""
        self._session.wait()

    def get_outputs(self) -> list[OrtValue]:
        """The results of the last run, in the order in which outputs were bound."""
        return [self._results[name] for name in self._outputs if name in self._results]

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Copies of the results of the last run as NumPy arrays."""
        return [r.numpy() if r.is_tensor() else r.value for r in self.get_outputs()]

    def run(self) -> None:
        """Run the session on what is bound."""
        places = {name: p if isinstance(p, str) else p.device.type for name, p in self._outputs.items()}
        found = self._session.values(list(places), self._inputs)
        for (name, place), (value, dtype) in zip(self._outputs.items(), found, strict=True):
            if isinstance(place, torch.Tensor):
                _fill(place, value, f"output {name!r}")
                value = place
            elif isinstance(value, torch.Tensor):
                value = value.to(place)
            self._results[name] = OrtValue(value, dtype)


class InferenceSession:
    """A model ready to run, as onnxruntime's class of this name.

    `program` is what was compiled, to `explain()` or `perf()`.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | PathLike[str] | onnx.ModelProto,
        sess_options: Any = None,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """Compile a model.

        Args:
            path_or_bytes: a file, the bytes of one, or a ModelProto.
            sess_options: an `onnxruntime.SessionOptions`, or anything with `intra_op_num_threads`; the rest is not looked at.
            providers: the first of `CPUExecutionProvider` and `CUDAExecutionProvider` (with `device_id` among its options) says
                the device; the CPU if there are none. Others are passed over, and said.
            provider_options: options of each provider, in order.
            options: of `tilewright.compile`: `budget_s`, `background=True` for a session that is there at once, `half`, …

        Raises:
            InputError: the model is missing or malformed, or no provider is one of those.
            UnsupportedError: no graph can express the model.
        """
        check_type(path_or_bytes, (str, bytes, PathLike, _proto()), "path_or_bytes", '"model.onnx", or its bytes')
        self._providers = _chosen(providers, provider_options)
        options.setdefault("device", next(iter(self._providers.values())))
        threads = getattr(sess_options, "intra_op_num_threads", 0)
        if threads:
            options.setdefault("threads", threads)
        self._sess_options, self._options = sess_options, options
        self._source: object = parsed(path_or_bytes, "the bytes given") if isinstance(path_or_bytes, bytes) else path_or_bytes
        path = isinstance(self._source, (str, PathLike))
        model = open_model(Path(cast("str", self._source))).model if path else cast("onnx.ModelProto", self._source)
        constants = {t.name for t in model.graph.initializer}
        self._inputs = [_argument(i) for i in model.graph.input if i.name not in constants]
        self._overridable = [_argument(i) for i in model.graph.input if i.name in constants]
        notes = {p.key: p.value for p in model.metadata_props}
        named = model.producer_name, model.graph.name, model.domain, model.doc_string, model.graph.doc_string
        version = model.model_version if model.HasField("model_version") else (1 << 63) - 1  # as onnxruntime has it
        self._meta = ModelMetadata(*named, version, notes)
        self._lock = threading.RLock()
        self._kept: OrderedDict[tuple[tuple[int, ...], ...], Program] = OrderedDict()
        self._any: Program | AnyShape | None = None
        if not any(not isinstance(e, int) for i in self._inputs for e in i.shape):
            self._any = compile(self._source, **options)
        else:
            try:
                self._any = compile(self._source, dims=True, **options)
            except (InputError, UnsupportedError) as error:
                LOGGER.info("%s is compiled for each shape: %s", self._meta.graph_name or "the model", error.what)
        known = self._any.source.outputs if self._any is not None else [None] * len(model.graph.output)
        names = {e for i in self._inputs for e in i.shape}
        self._outputs = [_result(o, node, names) for o, node in zip(model.graph.output, known, strict=False)]

    @property
    def program(self) -> Program | AnyShape | None:
        """The program; the last one, where each shape has its own; None if it was not called yet."""
        return self._any if self._any is not None else next(reversed(self._kept.values()), None)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None) -> list[Any]:
        """Run the model.

        Args:
            output_names: the results that are wanted; all if None or empty.
            input_feed: NumPy arrays, tensors, numbers or lists by name.
            run_options: not looked at.

        Returns:
            list: NumPy arrays, the caller's own; of ml_dtypes' types where NumPy has none.

        Raises:
            InputError: an input is missing, unknown, or of another type or shape; no result has that name.
        """
        found = self.values(output_names, input_feed)
        return [to_numpy(v, dtype) if isinstance(v, torch.Tensor) else v for v, dtype in found]

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[OrtValue]:
        """Run the model on values, and leave results on the device."""
        found = self.values(output_names, {name: _taken(v) for name, v in input_dict_ort_values.items()})
        return [OrtValue(v, dtype) for v, dtype in found]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[Sequence[Any], Any, str], None],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """Run the model in a thread, which calls `callback(results, user_data, error)`; the error is "" if all went well."""

        def work() -> None:
            try:
                results, error = self.run(output_names, input_feed), ""
            except Exception as found:
                results, error = list[Any](), str(found)
            callback(results, user_data, error)

        threading.Thread(target=work, name="tilewright session", daemon=True).start()

    def io_binding(self) -> IOBinding:
        """A new binding of memory to inputs and outputs."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run the model on what is bound."""
        check_type(iobinding, IOBinding, "iobinding", "session.io_binding()")
        iobinding.run()

    def values(self, output_names: Sequence[str] | None, feed: Mapping[str, object]) -> list[tuple[object, DType]]:
        """The results as tensors on the session's device (or what is none), with their element types."""
        known = [o.name for o in self._outputs]
        for name in output_names or ():
            if name not in known:
                raise InputError(f"no output is called {name!r}", where="output_names", hint=f"one of {', '.join(known)}")
        given = self._checked(feed)
        program = self._program_for(given)
        values: list[Any] = []
        for node in caller_inputs(program.graph):
            name = cast("Any", node.op).label
            value = given[name]
            values.append(value if node.dtype is OPAQUE else from_user(value, node.tensor, name, program.target.device))
        borrowed = [address(v) for v in values if isinstance(v, torch.Tensor)]
        results = separate(program.run(values), borrowed, program.constant_memory)
        found = dict(zip(known, zip(results, (n.dtype for n in program.graph.outputs), strict=False), strict=True))
        return [cast("tuple[object, DType]", found[name]) for name in output_names or known]

    def wait(self) -> None:
        """Wait until the device is done."""
        if self._options["device"] != "cpu":
            torch.cuda.synchronize(self._options["device"])

    def get_inputs(self) -> list[NodeArg]:
        """The inputs, without those that initializers give."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The outputs."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Inputs that initializers give; here they are constants."""
        return list(self._overridable)

    def get_modelmeta(self) -> ModelMetadata:
        """Metadata that the model's producer wrote into it."""
        return self._meta

    def get_providers(self) -> list[str]:
        """The provider in use."""
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of the provider in use."""
        return {n: {"device_id": d.partition(":")[2] or "0"} if d != "cpu" else {} for n, d in self._providers.items()}

    def get_session_options(self) -> Any:
        """The `sess_options` that were given."""
        return self._sess_options

    def disable_fallback(self) -> None:
        """Do nothing: a session never changes its provider by itself."""

    def enable_fallback(self) -> None:
        """Do nothing: a session never changes its provider by itself."""

    def _checked(self, feed: Mapping[str, object]) -> dict[str, object]:
        """The inputs by name, each an array or a value that is none."""
        names = [i.name for i in self._inputs]
        for name in feed:
            if name not in names:
                fixed = any(name == i.name for i in self._overridable)
                why = "is a constant here" if fixed else "is unknown"
                raise InputError(
                    f"input {name!r} {why}", where="input_feed", hint=f"the inputs are {', '.join(names) or 'none'}"
                )
        missing = [i for i in self._inputs if i.name not in feed]
        if missing:
            what = f"no value for {missing[0].name!r}"
            raise InputError(what, where="input_feed", hint=f"it is {missing[0].type} of shape {missing[0].shape}")
        return {i.name: _array(feed[i.name], i) for i in self._inputs}

    def _program_for(self, given: Mapping[str, object]) -> Program:
        """The program for inputs of these shapes."""
        shapes = {n: tuple(v.shape) for n, v in given.items() if isinstance(v, (np.ndarray, np.generic, torch.Tensor))}
        program = self._any
        if program is not None and not isinstance(program, AnyShape):
            return program
        if program is not None:
            try:
                return program.at(**program.values_of((), given))
            except InputError as error:  # beyond a bound, or of another rank: what it says of one shape is to the point
                LOGGER.debug("compiled for one shape: %s", error.what)
        key = tuple(shapes.get(i.name, ()) for i in self._inputs)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = compile(self._source, input_dims=self._open(shapes), dims=False, **self._options)
                if len(self._kept) > _SHAPES:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
            return found

    def _open(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of inputs that leave extents open."""
        open_ = {i.name for i in self._inputs if i.type.startswith("tensor") and any(not isinstance(e, int) for e in i.shape)}
        return {name: shape for name, shape in shapes.items() if name in open_ or not self._argument(name).shape}

    def _argument(self, name: str) -> NodeArg:
        return next(i for i in self._inputs if i.name == name)


def _proto() -> type:
    import onnx

    return onnx.ModelProto


def _chosen(
    providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None, options: Sequence[Mapping[str, Any]] | None
) -> dict[str, str]:
    """The first provider that there is kernels for, with the device that it names."""
    wanted = list(providers or ["CPUExecutionProvider"])
    for i, one in enumerate(wanted):
        name, given = (one, {}) if isinstance(one, str) else one
        given = given or (options[i] if options is not None and i < len(options) else {})
        kind = _PROVIDERS.get(name)
        if kind is None or (kind == "cuda" and not torch.cuda.is_available() and len(wanted) > i + 1):
            LOGGER.warning("the provider %s is passed over", name)
            continue
        return {name: "cpu" if kind == "cpu" else f"cuda:{int(given.get('device_id', 0))}"}
    raise InputError(f"no kernels for {', '.join(map(str, wanted))}", where="providers", hint="CPUExecutionProvider")


def _argument(info: onnx.ValueInfoProto) -> NodeArg:
    tensor = info.type.tensor_type
    dims = tensor.shape.dim if info.type.HasField("tensor_type") else ()
    shape = [int(d.dim_value) if is_closed(d) else d.dim_param or None for d in dims]
    return NodeArg(info.name, _type_name(info.type), shape)


def _result(info: onnx.ValueInfoProto, node: Node | None, names: set[int | str | None]) -> NodeArg:
    """An output, with the shape that the program has found where the model does not say it: numbers, names of open extents of
    inputs, None for what is computed from these."""
    said = _argument(info)
    if node is None or info.type.tensor_type.HasField("shape") or not isinstance(node.type, TensorType) or node.dtype is OPAQUE:
        return said
    shape = cast("Sequence[object]", node.tensor.shape)
    return replace(said, shape=[e if isinstance(e, int) else str(e) if str(e) in names else None for e in shape])


def _type_name(kind: onnx.TypeProto) -> str:
    """A type as onnxruntime spells it."""
    if kind.HasField("sequence_type"):
        return f"seq({_type_name(kind.sequence_type.elem_type)})"
    if kind.HasField("optional_type"):
        return f"optional({_type_name(kind.optional_type.elem_type)})"
    if kind.HasField("map_type"):
        return f"map({_spelt(kind.map_type.key_type)},{_type_name(kind.map_type.value_type)})"
    return f"tensor({_spelt(kind.tensor_type.elem_type)})"


def _spelt(code: int) -> str:
    import onnx

    return onnx.TensorProto.DataType.Name(cast("Any", code)).lower()


def _dtype(given: Any) -> DType:
    """An element type by its number in ONNX, or as NumPy's."""
    return element_type(given, "element_type") if isinstance(given, int) else numpy_dtype(np.dtype(given))


def _device(kind: str, index: int) -> str:
    if kind not in ("cpu", "cuda"):
        raise InputError(f"no device {kind!r}", where="device_type", hint='"cpu" or "cuda"')
    return kind if kind == "cpu" else f"{kind}:{index}"


def _taken(value: Any) -> object:
    """The array in a value: one of ours, or of onnxruntime's."""
    return value.value if isinstance(value, OrtValue) else value.numpy() if hasattr(value, "numpy") else value


def _array(value: object, argument: NodeArg) -> object:
    """A value as an array, if the input is one; numbers and lists take the input's type."""
    value = _taken(value) if isinstance(value, OrtValue) or type(value).__name__ == "OrtValue" else value
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) or not argument.type.startswith("tensor"):
        return np.asarray(value) if isinstance(value, np.generic) else value
    import onnx

    if isinstance(value, (bool, int, float, list, tuple)) and argument.type != "tensor(string)":
        code = onnx.TensorProto.DataType.Value(argument.type[len("tensor(") : -1].upper())
        return np.asarray(value, element_type(code, argument.name).to_numpy())
    return value


def _fill(memory: torch.Tensor, value: object, where: str) -> None:
    """Write a result into bound memory.

    Raises:
        InputError: the memory is for another shape or type.
    """
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (memory.shape, memory.dtype):
        what = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"{what} into memory for {memory.dtype}{list(memory.shape)}", where=where, hint="bind what it is")
    memory.copy_(value)
