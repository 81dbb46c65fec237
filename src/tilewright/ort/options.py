"""Options of sessions and of runs, as onnxruntime has them."""

from __future__ import annotations

import json
import operator
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, cast

from tilewright.errors import InputError, UnsupportedError, check_type
from tilewright.files import decoded, write_whole
from tilewright.ort.values import OrtValue

if TYPE_CHECKING:
    import onnx

_EVENTS = 1_000_000  # that a profile keeps, as onnxruntime's does


class SessionError(InputError, ValueError, RuntimeError):
    """An error of a session where onnxruntime raises a ValueError or a RuntimeError."""


class GraphOptimizationLevel(IntEnum):
    """Degrees to which onnxruntime rewrites a graph. Here all rules always apply."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Orders in which onnxruntime runs nodes. Here steps run one after the other."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class _Entries:
    """Options by key, which are kept and not looked at."""

    def __post_init__(self) -> None:
        self._entries: dict[str, str] = {}

    def _add(self, key: str, value: str) -> None:
        self._entries[key] = value

    def _get(self, key: str) -> str:
        if key not in self._entries:
            raise SessionError(f"{type(self).__name__} does not have configuration with key: {key}")
        return self._entries[key]


@dataclass
class SessionOptions(_Entries):
    """Options of a session: `intra_op_num_threads`, `enable_profiling`, values for open extents and for initializers count.

    Attributes:
        intra_op_num_threads: threads for a call; 0 leaves it to `tilewright.compile`.
        enable_profiling: write a file of times at `InferenceSession.end_profiling`.
        profile_file_prefix: what the name of that file begins with.
        others: kept and not looked at.
    """

    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    enable_profiling: bool = False
    profile_file_prefix: str = "onnxruntime_profile_"
    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    execution_order: int = 0
    optimized_model_filepath: str = ""
    logid: str = ""
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    use_deterministic_compute: bool = False
    use_per_session_threads: bool = True
    _dims: dict[str, int] = field(default_factory=dict[str, int], init=False, repr=False)
    _denoted: dict[str, int] = field(default_factory=dict[str, int], init=False, repr=False)
    _initializers: dict[str, OrtValue] = field(default_factory=dict[str, OrtValue], init=False, repr=False)
    _files: dict[str, bytes] = field(default_factory=dict[str, bytes], init=False, repr=False)

    @staticmethod
    def of_model(notes: Mapping[str, str]) -> SessionOptions:
        """Options where none are given: those in a model's metadata, if the environment says so as for onnxruntime.

        Raises:
            SessionError: the metadata hold no options of a session.
        """
        found = SessionOptions()
        if os.environ.get("ORT_LOAD_CONFIG_FROM_MODEL") != "1" or "ort_config" not in notes:
            return found
        try:
            said = decoded(notes["ort_config"], dict[str, Any])["session_options"]
            for one in fields(found):
                if one.init and one.name in said:
                    setattr(found, one.name, type(getattr(found, one.name))(said[one.name]))
        except (ValueError, KeyError, TypeError) as error:
            raise SessionError(f"no options of a session: {error}", where="the model's ort_config") from error
        return found

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Keep an option by key."""
        self._add(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """An option that was kept.

        Raises:
            SessionError: there is none.
        """
        return self._get(key)

    def add_free_dimension_override_by_name(self, name: str, value: int) -> None:
        """Give an open extent of the model a value by its name.

        Raises:
            InputError: the value is no extent.
        """
        self._dims[name] = _extent(name, value)

    def add_free_dimension_override_by_denotation(self, denotation: str, value: int) -> None:
        """Give open extents of the model's inputs a value by what they denote ("DATA_BATCH").

        Raises:
            InputError: the value is no extent.
        """
        self._denoted[denotation] = _extent(denotation, value)

    def add_initializer(self, name: str, ortvalue: Any) -> None:
        """Take a value in place of an initializer of the model.

        Raises:
            InputError: it is no `OrtValue`.
        """
        if not isinstance(ortvalue, OrtValue):
            if not hasattr(ortvalue, "numpy"):
                check_type(ortvalue, OrtValue, f"initializer {name!r}", "tilewright.ort.OrtValue.ortvalue_from_numpy(array)")
            ortvalue = OrtValue.ortvalue_from_numpy(ortvalue.numpy())
        self._initializers[name] = ortvalue

    def add_external_initializers(self, names: Sequence[str], ortvalues: Sequence[Any]) -> None:
        """Take values in place of initializers whose data lie in files."""
        for name, value in zip(names, ortvalues, strict=True):
            self.add_initializer(name, value)

    def add_external_initializers_from_files_in_memory(
        self, names: Sequence[str], contents: Sequence[bytes], lengths: Sequence[int]
    ) -> None:
        """Take bytes in place of the files, by their names in the model, in which initializers lie."""
        for name, content, length in zip(names, contents, lengths, strict=True):
            self._files[name] = bytes(content)[:length]

    def register_custom_ops_library(self, path: str) -> None:
        """Refuse: operators in machine code are not run.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("libraries of custom operators are not run", where=path, hint="write it as a local function")

    def change_model(self) -> bool:
        """Tell whether these options change what a model says."""
        return bool(self._dims or self._denoted or self._initializers or self._files)

    def write_into(self, model: onnx.ModelProto) -> None:
        """Write values for extents and initializers into a model, in place."""
        from onnx import numpy_helper

        graph, named = model.graph, dict(self._dims)
        for info in graph.input:
            for d in info.type.tensor_type.shape.dim:
                if d.denotation in self._denoted and not d.HasField("dim_value"):
                    if d.dim_param:
                        named[d.dim_param] = self._denoted[d.denotation]
                    else:
                        d.dim_value = self._denoted[d.denotation]
        for info in (*graph.input, *graph.value_info, *graph.output):
            for d in info.type.tensor_type.shape.dim:
                if d.dim_param in named:
                    d.dim_value = named[d.dim_param]
        for t in graph.initializer:
            entries = {e.key: e.value for e in t.external_data}
            if t.name in self._initializers:
                t.CopyFrom(numpy_helper.from_array(self._initializers[t.name].numpy(), t.name))
            elif entries.get("location") in self._files:
                held, start = self._files[entries["location"]], int(entries.get("offset", 0))
                t.raw_data = held[start : start + int(entries.get("length", len(held)))]
                t.ClearField("external_data")
                t.data_location = t.DEFAULT


def _extent(name: str, value: object) -> int:
    """A number for an open extent.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or (number := operator.index(cast("int", value))) < 0:
        raise InputError(f"{value!r} is no extent", where=name, hint="a whole number, 0 or more")
    return number


@dataclass
class RunOptions(_Entries):
    """Options of a run, which are kept and not looked at."""

    logid: str = ""
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    only_execute_path_to_fetches: bool = False
    terminate: bool = False

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Keep an option by key."""
        self._add(key, value)

    def get_run_config_entry(self, key: str) -> str:
        """An option that was kept.

        Raises:
            SessionError: there is none.
        """
        return self._get(key)

    def add_active_adapter(self, adapter: object) -> None:
        """Refuse: adapters are not read.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "adapters are not read", where="RunOptions", hint="feed their parameters, which are inputs, to run"
        )


class Profile:
    """Times of what a session does, written as onnxruntime writes them: a trace that chrome://tracing shows.

    Attributes:
        start_ns: when it began, in ns since 1970.
    """

    start_ns: int

    def __init__(self, prefix: str) -> None:
        self.start_ns = time_ns()
        self._zero, self._prefix = perf_counter_ns(), prefix
        self._events: deque[tuple[str, int, int]] = deque(maxlen=_EVENTS)

    def note(self, name: str, begun_ns: int) -> None:
        """Note something that began at a time of `time.perf_counter_ns` and ends now."""
        self._events.append((name, begun_ns - self._zero, perf_counter_ns() - begun_ns))

    def write(self) -> str:
        """Write the file, and give its name."""
        name = f"{self._prefix}_{self.start_ns}.json"
        write_whole(Path(name), "".join(_lines(self._events)).encode())
        return name


def _lines(events: Iterable[tuple[str, int, int]]) -> Iterable[str]:
    yield "[\n"
    mark = ""
    for name, at, took in events:
        one = {"cat": "Session", "pid": os.getpid(), "tid": 0, "dur": took // 1000, "ts": at // 1000, "ph": "X", "name": name}
        yield f"{mark}{json.dumps({**one, 'args': {}})}"
        mark = ",\n"
    yield "\n]\n"
