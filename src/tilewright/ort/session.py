"""The session: a compiled model behind onnxruntime's interface."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tilewright.any_shape import AnyShape
from tilewright.compiler import compile
from tilewright.dtype import OPAQUE, DType
from tilewright.errors import LOGGER, InputError, TypeMismatchError, UnsupportedError, check_type
from tilewright.frontends.onnx.files import DataFiles, open_model, parsed
from tilewright.frontends.onnx.inputs import is_closed
from tilewright.frontends.onnx.tensors import element_type, embedded_tensor
from tilewright.hardware.detect import detect
from tilewright.ir.arrays import to_numpy
from tilewright.ir.state import caller_inputs
from tilewright.ir.types import TensorType
from tilewright.ort.binding import IOBinding
from tilewright.ort.options import Profile, SessionError, SessionOptions
from tilewright.ort.values import OrtValue, spelt, strings, taken
from tilewright.recent import Recent
from tilewright.runtime.arrays import Wanted
from tilewright.threads import valid_count

if TYPE_CHECKING:
    import onnx

    from tilewright.ir.graph import Node
    from tilewright.program import Program

_SHAPES = 16  # programs of single shapes that a session keeps
_READY = 64  # sets of shapes whose programs a session finds at once
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


@dataclass(frozen=True)
class _Ready:
    """A program, with what a call asks of it.

    Attributes:
        asked: gives the program where a shape that is met often may get kernels of its own behind the calls (`AnyShape.at`).
        inputs: by name; None for those that are no arrays.
        dtypes: element types of results.
        converted: the same, but None where a tensor's own memory is the array.
    """

    program: Program
    asked: Callable[[], Program] | None
    inputs: list[tuple[str, Wanted | None]]
    dtypes: list[DType]
    converted: list[DType | None]

    @staticmethod
    def of(program: Program, asked: Callable[[], Program] | None) -> _Ready:
        inputs: list[tuple[str, Wanted | None]] = []
        for node in caller_inputs(program.graph):
            name = cast("Any", node.op).label
            opaque = node.dtype is OPAQUE
            inputs.append((name, None if opaque else Wanted(name, node.tensor, program.target.device)))
        dtypes = [n.dtype for n in program.graph.outputs]
        known = program.target.device == "cpu"
        converted = [None if known and d is not OPAQUE and d.to_numpy().isbuiltin == 1 else d for d in dtypes]
        return _Ready(program, asked, inputs, dtypes, converted)


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
            sess_options: `SessionOptions`; of onnxruntime's own, `intra_op_num_threads` and the profile count.
            providers: the first of `CPUExecutionProvider` and `CUDAExecutionProvider` (with `device_id` among its options) says
                the device; the CPU if there are none. Others are passed over, and said.
            provider_options: options of each provider, in order.
            options: of `tilewright.compile`: `budget_s`, `background=True` for a session that is there at once, `half`, …. Open
                extents have no bounds but those in `dims`.

        Raises:
            InputError: the model is missing or malformed, or no provider is one of those.
            UnsupportedError: no graph can express the model.
        """
        check_type(path_or_bytes, (str, bytes, PathLike, _proto()), "path_or_bytes", '"model.onnx", or its bytes')
        if sess_options is not None and not hasattr(sess_options, "intra_op_num_threads"):
            check_type(sess_options, SessionOptions, "sess_options", "tilewright.ort.SessionOptions()")
        unknown = options.keys() - inspect.signature(compile).parameters.keys()
        if unknown:
            hint = "an option of tilewright.compile, such as budget_s"
            raise InputError(f"no option is called {min(unknown)!r}", where="InferenceSession", hint=hint)
        source: Any = parsed(path_or_bytes, "the bytes given") if isinstance(path_or_bytes, bytes) else path_or_bytes
        model: onnx.ModelProto = open_model(Path(source)).model if isinstance(source, (str, PathLike)) else source
        notes = {p.key: p.value for p in model.metadata_props}
        self._sess_options: Any = SessionOptions.of_model(notes) if sess_options is None else sess_options
        if isinstance(sess_options, SessionOptions) and sess_options.change_model():
            source = model = _changed(source, sess_options.write_into)
        self._source = source
        if getattr(self._sess_options, "optimized_model_filepath", ""):
            LOGGER.warning("optimized_model_filepath: no model is written; session.program.save writes the compiled program")
        profiled = getattr(self._sess_options, "enable_profiling", False)
        self._profile, begun = Profile(self._sess_options.profile_file_prefix) if profiled else None, perf_counter_ns()
        self._providers = _chosen(providers, provider_options)
        self._options = options
        self._dims: Any = options.pop("dims", True)
        self._given_dims: Mapping[str, Sequence[int]] = options.pop("input_dims", None) or {}
        threads = getattr(self._sess_options, "intra_op_num_threads", 0)
        if threads:
            options.setdefault("threads", threads)
        valid_count(options.get("threads"))
        constants = {t.name for t in model.graph.initializer}
        self._inputs = [_argument(i) for i in model.graph.input if i.name not in constants]
        ranked = all(i.type.tensor_type.HasField("shape") for i in model.graph.input if i.type.HasField("tensor_type"))
        self._leaves_open = not ranked or any(not isinstance(e, int) for i in self._inputs for e in i.shape)
        self._asked = [(i, i.type.startswith("tensor") and i.type != "tensor(string)") for i in self._inputs]
        self._overridable = [_argument(i) for i in model.graph.input if i.name in constants]
        named = model.producer_name, model.graph.name, model.domain, model.doc_string, model.graph.doc_string
        version = model.model_version if model.HasField("model_version") else (1 << 63) - 1  # as onnxruntime has it
        self._meta = ModelMetadata(*named, version, notes)
        self._results = list(model.graph.output)
        self._lock = threading.RLock()
        self._compile()
        if self._profile is not None:
            self._profile.note("session_initialization", begun)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Refuse to be pickled or copied.

        Raises:
            UnsupportedError: always.
        """
        hint = "another InferenceSession of the same model; session.program.save(path) where no extent is open"
        raise UnsupportedError("a session is neither pickled nor copied", where="InferenceSession", hint=hint)

    def _compile(self) -> None:
        """Compile the model for the device of the provider.

        Raises:
            InputError: there is no such device.
        """
        self._options["device"] = self._options.get("device") or next(iter(self._providers.values()))
        detect(self._options["device"])
        self._kept: Recent[tuple[tuple[int, ...], ...], Program] = Recent(_SHAPES)
        self._ready: Recent[tuple[tuple[int, ...], ...], _Ready] = Recent(_READY)
        self._overridden: dict[frozenset[str], InferenceSession] = {}
        self._any: Program | AnyShape | None = None
        if not self._leaves_open:
            dims = False if self._dims is True else self._dims
            self._any = compile(self._source, dims=dims, input_dims=self._given_dims, **self._options)
        elif self._dims is not False:
            open_ = {"dims": self._dims, "input_dims": self._given_dims}
            try:
                self._any = cast("Program | AnyShape", compile(self._source, **open_, **self._options))
                if isinstance(self._any, AnyShape):
                    self._any.make_first()
            except (InputError, TypeMismatchError, UnsupportedError) as error:
                if self._dims is not True or (error.where or "").partition(" ")[0] in self._options:
                    raise
                LOGGER.info("%s is compiled for each shape: %s", self._meta.graph_name or "the model", error.what)
        known = self._any.source.outputs if self._any is not None else [None] * len(self._results)
        names = {e for i in self._inputs for e in i.shape}
        self._outputs = [_result(o, node, names) for o, node in zip(self._results, known, strict=False)]
        self._places = {o.name: k for k, o in enumerate(self._outputs)}

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
        begun = perf_counter_ns() if self._profile is not None else 0
        ready, picked, results = self._called(output_names, input_feed)
        found: list[Any] = []
        for k in picked:
            value, dtype = results[k], ready.converted[k]
            if dtype is None:
                found.append(cast("torch.Tensor", value).numpy())
            else:
                found.append(to_numpy(value, dtype) if isinstance(value, torch.Tensor) else _shown(value))
        if self._profile is not None:
            self._profile.note("model_run", begun)
        return found

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[OrtValue]:
        """Run the model on values, and leave results on the device.

        Raises:
            InputError: as `run`.
        """
        check_type(input_dict_ort_values, Mapping, "input_dict_ort_values", '{"x": value}')
        found = self.values(output_names, {name: taken(v) for name, v in input_dict_ort_values.items()})
        return [OrtValue(v, dtype) for v, dtype in found]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[Sequence[Any], Any, str], None],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """Run the model in a thread, which calls `callback(results, user_data, error)`; the error is "" if all went well.

        Raises:
            InputError: the callback is no function.
        """
        check_type(callback, (Callable,), "callback", "a function of results, user_data and an error")

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
        ready, picked, results = self._called(output_names, feed)
        return [(results[k], ready.dtypes[k]) for k in picked]

    def _called(
        self, output_names: Sequence[str] | None, feed: Mapping[str, object]
    ) -> tuple[_Ready, Collection[int], Sequence[object]]:
        """The results of a call, the places among them of those that are wanted, and what they are."""
        places = self._places
        if type(feed) is not dict:
            check_type(feed, Mapping, "input_feed", '{"x": array}')
        if isinstance(output_names, str):
            raise InputError("a name, not a list of names", where="output_names", hint=f"[{output_names!r}]")
        try:
            picked = [places[name] for name in output_names] if output_names else places.values()
        except (KeyError, TypeError):
            check_type(output_names, Collection, "output_names", f"{[*places]}, or None for all")
            wrong = next(n for n in output_names or () if not isinstance(cast("object", n), str) or n not in places)
            hint = f"one of {', '.join(places)}"
            raise InputError(f"no output is called {wrong!r}", where="output_names", hint=hint) from None
        if self._overridable:
            fed = frozenset(o.name for o in self._overridable if o.name in feed)
            if fed:
                return self._without(fed)._called(output_names, feed)
        given = self._checked(feed)
        key = tuple([getattr(v, "shape", ()) for v in given.values()])
        ready = self._ready.find(key)
        if ready is None or (ready.asked is not None and ready.asked() is not ready.program):
            ready = self._ready[key] = _Ready.of(*self._program_for(given))
        values: list[Any] = [given[name] if wanted is None else wanted.take(given[name]) for name, wanted in ready.inputs]
        return ready, picked, ready.program.run_apart(values)

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
        """Inputs that initializers give where they are not fed; a program is compiled for each set of them that is."""
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
        """The `sess_options` that were given, or `SessionOptions`."""
        return self._sess_options

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Compile the model for the device of other providers.

        Raises:
            SessionError: no provider has that name.
        """
        for name, _ in map(_named, _listed(providers)):
            if name not in _PROVIDERS:
                raise SessionError(
                    f"Unknown Provider Type: {name}", where="set_providers", hint=f"one of {', '.join(_PROVIDERS)}"
                )
        before, self._providers = self._providers, _chosen(providers, provider_options)
        if list(before.values()) != list(self._providers.values()):
            self._options["device"] = None
            self._compile()

    def end_profiling(self) -> str:
        """Write the times of runs, and give the file's name; "" if the session was made without `enable_profiling`."""
        return "" if self._profile is None else self._profile.write()

    def get_profiling_start_time_ns(self) -> int:
        """The time, in ns since 1970, at which noting times began; 0 if it did not."""
        return 0 if self._profile is None else self._profile.start_ns

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0
    ) -> OrtValue:
        """Memory for an array on a device, as `OrtValue.ortvalue_from_shape_and_type`."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id)

    def disable_fallback(self) -> None:
        """Do nothing: a session never changes its provider by itself."""

    def enable_fallback(self) -> None:
        """Do nothing: a session never changes its provider by itself."""

    def _checked(self, feed: Mapping[str, object]) -> dict[str, object]:
        """The inputs by name, each an array or a value that is none."""
        given: dict[str, object] = {}
        for i, plain in self._asked:
            if i.name in feed:
                value = feed[i.name]
                given[i.name] = value if plain and type(value) is np.ndarray else _array(value, i)
            elif i.type.startswith("optional"):
                given[i.name] = None
            else:
                missing = [i.name for i in self._inputs if i.name not in feed and not i.type.startswith("optional")]
                what = f"Required inputs ({missing}) are missing from input feed ({list(feed)})"
                raise SessionError(what, where="input_feed", hint=f"{i.name!r} is {i.type} of shape {i.shape}")
        if len(feed) > len(given) or not feed.keys() <= given.keys():
            wrong = next(name for name in feed if name not in given)
            hint = f"the inputs are {', '.join(given) or 'none'}"
            raise SessionError(f"input {wrong!r} is unknown", where="input_feed", hint=hint)
        return given

    def _without(self, names: frozenset[str]) -> InferenceSession:
        """A session in which these initializers are inputs."""
        with self._lock:
            if names not in self._overridden:

                def open_(model: onnx.ModelProto) -> None:
                    kept = [t for t in model.graph.initializer if t.name not in names]
                    del model.graph.initializer[:]
                    model.graph.initializer.extend(kept)

                model = _changed(self._source, open_)
                dims = {"dims": self._dims, "input_dims": self._given_dims}
                self._overridden[names] = InferenceSession(model, None, list(self._providers), **dims, **self._options)
            return self._overridden[names]

    def _program_for(self, given: Mapping[str, object]) -> tuple[Program, Callable[[], Program] | None]:
        """The program for inputs of these shapes, and how an instance of a program with open extents is asked for again."""
        shapes = {n: tuple(v.shape) for n, v in given.items() if isinstance(v, (np.ndarray, np.generic, torch.Tensor))}
        program = self._any
        if program is not None and not isinstance(program, AnyShape):
            return program, None
        if program is not None:
            try:
                asked = partial(program.at, **program.values_of((), given))
                return asked(), asked if program.background else None
            except InputError as error:  # beyond a bound, or of another rank: what it says of one shape is to the point
                LOGGER.debug("compiled for one shape: %s", error.what)
        key = tuple(shapes.get(i.name, ()) for i in self._inputs)
        with self._lock:
            found = self._kept.find(key)
            if found is None:
                dims = {**self._given_dims, **self._open(shapes)}
                found = self._kept[key] = compile(self._source, input_dims=dims, dims=False, **self._options)
            return found, None

    def _open(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of inputs that leave extents open."""
        open_ = {i.name for i in self._inputs if i.type.startswith("tensor") and any(not isinstance(e, int) for e in i.shape)}
        return {name: shape for name, shape in shapes.items() if name in open_ or not self._argument(name).shape}

    def _argument(self, name: str) -> NodeArg:
        return next(i for i in self._inputs if i.name == name)


def get_available_providers() -> list[str]:
    """The providers for which there is a device here, best first."""
    return get_all_providers()[not torch.cuda.is_available() :]


def get_all_providers() -> list[str]:
    """The providers that a session takes, best first."""
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]


def get_device() -> str:
    """The kind of device that there is: "GPU" or "CPU"."""
    return "GPU" if torch.cuda.is_available() else "CPU"


def _proto() -> type:
    import onnx

    return onnx.ModelProto


def _chosen(
    providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None, options: Sequence[Mapping[str, Any]] | None
) -> dict[str, str]:
    """The first provider that there is kernels for, with the device that it names."""
    for one in (options, *(options if isinstance(options, Sequence) else ())):
        kinds = (Sequence, type(None)) if one is options else (Mapping,)
        check_type(one, kinds, "provider_options", "[{...}], one for each provider")
    wanted = [_named(one) for one in _listed(providers) or ["CPUExecutionProvider"]]
    for i, (name, given) in enumerate(wanted):
        given = given or (options[i] if options is not None and i < len(options) else {})
        kind = _PROVIDERS.get(name)
        if kind is None or (kind == "cuda" and not torch.cuda.is_available() and len(wanted) > i + 1):
            LOGGER.warning("the provider %s is passed over", name)
            continue
        number = str(given.get("device_id", 0))
        if not number.isdecimal():
            raise InputError(f"device_id={number}", where="provider_options", hint="the number of a device, from 0")
        return {name: "cpu" if kind == "cpu" else f"cuda:{int(number)}"}
    raise InputError(f"no kernels for {', '.join(name for name, _ in wanted)}", where="providers", hint="CPUExecutionProvider")


def _listed(providers: object) -> Sequence[object]:
    """Providers as a list.

    Raises:
        InputError: they are none.
    """
    if isinstance(providers, str):
        raise InputError("a name, not a list of names", where="providers", hint=f"[{providers!r}]")
    check_type(providers, (Sequence, type(None)), "providers", '["CPUExecutionProvider"]')
    return cast("Sequence[object]", providers or ())


def _named(provider: object) -> tuple[str, Mapping[str, Any]]:
    """A provider's name, and its options.

    Raises:
        InputError: it is neither a name nor a pair of these.
    """
    pair = cast("tuple[object, ...]", provider if isinstance(provider, tuple) else (provider, {}))
    if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], Mapping):
        hint = '"CPUExecutionProvider", or ("CUDAExecutionProvider", {"device_id": 0})'
        raise InputError(f"{provider!r} is no provider", where="providers", hint=hint)
    return cast("tuple[str, Mapping[str, Any]]", pair)


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
        return f"map({spelt(kind.map_type.key_type)},{_type_name(kind.map_type.value_type)})"
    return f"tensor({spelt(kind.tensor_type.elem_type)})"


def _array(value: object, argument: NodeArg) -> object:
    """A value as an array, if the input is one; numbers and lists take the input's type."""
    value = taken(value) if isinstance(value, OrtValue) or type(value).__name__ == "OrtValue" else value
    if argument.type == "tensor(string)":
        return strings(value, f"input {argument.name!r}")
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) or not argument.type.startswith("tensor"):
        return np.asarray(value) if isinstance(value, np.generic) else value
    import onnx

    if isinstance(value, (bool, int, float, list, tuple)):
        code = onnx.TensorProto.DataType.Value(argument.type[len("tensor(") : -1].upper())
        try:
            return np.asarray(value, element_type(code, argument.name).to_numpy())
        except (ValueError, TypeError, OverflowError) as error:
            what = f"a {type(value).__name__} is no {argument.type}: {error}"
            raise InputError(what, where=f"input {argument.name!r}", hint="an array") from error
    if not (hasattr(value, "__dlpack__") or hasattr(value, "__array__")):
        raise InputError(f"a {type(value).__name__} is no array", where=f"input {argument.name!r}", hint=argument.type)
    return value


def _shown(value: object) -> object:
    """A result that is no tensor as onnxruntime gives it: strings as objects."""
    return value.astype(object) if isinstance(value, np.ndarray) and value.dtype.kind in "US" else value


def _changed(source: Any, change: Callable[[onnx.ModelProto], None]) -> onnx.ModelProto:
    """A copy of a model, changed, with those of its initializers inside that lie in files."""
    if isinstance(source, (str, PathLike)):
        path = Path(source)
        model, files = parsed(path.read_bytes(), str(path)), DataFiles(path.parent)
    else:
        model, files = copy.deepcopy(source), DataFiles(None)
    change(model)
    for t in model.graph.initializer:
        if t.data_location == t.EXTERNAL:
            t.CopyFrom(embedded_tensor(t, files, f"initializer {t.name!r}"))
    return model
