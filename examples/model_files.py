"""Files of the example models: written once, whole or not at all, each with the parameters that made it inside.

A model gets a folder of its own, `out/<label>/`, because its weights lie beside the graph: one rename then brings both
into place, and a reader never meets a graph without its weights or with another model's.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import InputError, MissingDependencyError

PARAMETERS = "tilewright.example"
"""The key in a model's `metadata_props` under which its parameters stand, as JSON."""

EXTERNAL_BYTES = 1 << 16
"""Tensors at least this long lie in the data file beside the graph."""


def require(module: str) -> Any:
    """Import an optional package.

    Raises:
        MissingDependencyError: it is not installed; the hint names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise MissingDependencyError(
            f"the example models need {error.name}, which is not installed", hint="pip install 'tilewright[examples]'"
        ) from error


def source_digest(files: Sequence[Path]) -> str:
    """A digest of the code that writes a model: an edited writer does not take an earlier one's file for its own."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def reuse_or_write(path: Path, parameters: Mapping[str, object], build: Callable[[Path], Any]) -> Path:
    """Return `path`, first writing it unless a whole model with the same parameters is already there.

    Args:
        path: `out/<label>/<name>.onnx`; the folder holds this model and nothing else.
        parameters: what determines the model; JSON types only.
        build: given an empty folder, returns the ModelProto. External data that it refers to it has already written there.
    """
    stamp = json.dumps(parameters, sort_keys=True)
    if _is_current(path, stamp):
        return path
    folder = path.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    suffix = f"{os.getpid()}-{secrets.token_hex(4)}"
    fresh, stale = (folder.with_name(f".{folder.name}.{kind}-{suffix}") for kind in ("new", "old"))
    fresh.mkdir()
    try:
        model = build(fresh)
        require("onnx").helper.set_model_props(model, {PARAMETERS: stamp})
        # With sorted maps and fixed seeds the same parameters give the same bytes.
        (fresh / path.name).write_bytes(model.SerializeToString(deterministic=True))
        if folder.exists():
            folder.rename(stale)
        try:
            fresh.rename(folder)
        except OSError:
            # Another process brought the same model into place meanwhile; anything else there is a failure.
            if not _is_current(path, stamp):
                raise
    finally:
        for leftover in (fresh, stale):
            shutil.rmtree(leftover, ignore_errors=True)
    return path


def read_parameters(path: Path) -> dict[str, Any]:
    """The parameters that a model was written with.

    Raises:
        InputError: it was not written here.
    """
    stamp = _stamp(require("onnx").load(path, load_external_data=False))
    if stamp is None:
        raise InputError("not a model that these examples wrote", where=str(path))
    return json.loads(stamp)


def run_model(path: str | Path, feeds: Mapping[str, Any]) -> Any:
    """A model's one output by onnxruntime, operator by operator as the file has them.

    Nothing is fused, because onnxruntime's fusions on a CPU round the activations of a 4-bit matmul to s8, and make a
    graph of an fp8 model that it then rejects.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
    """
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, dict(feeds))[0]


def store_tensors(model: Any, folder: Path, file_name: str) -> None:
    """Move the large initialisers of a model held in memory to `folder/file_name`."""
    helper = require("onnx.external_data_helper")
    helper.convert_model_to_external_data(model, location=file_name, size_threshold=EXTERNAL_BYTES)
    # The data file must exist before the helper writes into it, also when every tensor is small.
    (folder / file_name).touch()
    helper.write_external_data_tensors(model, str(folder))


def _stamp(model: Any) -> str | None:
    return next((entry.value for entry in model.metadata_props if entry.key == PARAMETERS), None)


def _is_current(path: Path, stamp: str) -> bool:
    """Tell whether `path` is a model stamped so, with all the bytes of external data that it refers to."""
    if not path.is_file():
        return False
    onnx = require("onnx")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # protobuf's own error class differs between its implementations; unreadable means not current
        return False
    if _stamp(model) != stamp:
        return False
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            data = path.with_name(place["location"])
            if not data.is_file() or data.stat().st_size < int(place["offset"]) + int(place["length"]):
                return False
    return True
