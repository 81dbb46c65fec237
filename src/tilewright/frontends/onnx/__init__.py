"""ONNX models: operator sets 13 to 28 (older and newer ones as far as their operators mean the same).

Every operator that has a meaning in the graph is read as that; one that ONNX itself defines by others is read as those;
any other becomes a `call`, run by onnx's reference evaluator. Weights stay in their files, mapped.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, cast

from tilewright.errors import InputError, MissingDependencyError
from tilewright.frontends import LoadOptions, refuse_interpreted
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call, Input

if TYPE_CHECKING:
    import onnx
    from onnx.backend.base import Backend

OLDEST, NEWEST = 13, 28
_CONVERTERS = (  # whose modules register them
    *("attention", "by_torch", "contrib", "contrib_attention", "elementwise", "matmul", "norm", "pool", "qlinear", "quantize"),
    *("recurrent", "resize", "shape"),
)


def accepts(program: object) -> bool:
    """A path that ends in .onnx or .ONNX, or in .pb or nothing if the file begins as a model does; or a ModelProto."""
    if isinstance(program, (str, Path)):
        suffix = PurePath(program).suffix.lower() if "\n" not in str(program)[:4096] else "?"
        return suffix == ".onnx" or (suffix in ("", ".pb") and _begins_as_model(Path(program)))
    kind = type(program)
    return kind.__name__ == "ModelProto" and kind.__module__.partition(".")[0] == "onnx"


def _begins_as_model(path: Path) -> bool:
    """Tell whether a file's first fields are a ModelProto's: ir_version, then producer, operator sets or graph (onnx.proto)."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(3)
    except (OSError, ValueError):
        return False
    return len(start) == 3 and start[0] == 0x08 and 3 <= start[1] < 64 and start[2] in (0x12, 0x3A, 0x42)


def load(program: object, options: LoadOptions | None = None) -> Graph:
    """The graph of an ONNX model.

    Args:
        program: path of a .onnx file, or a ModelProto that holds its own weights; the graph refers to it, so it must not
            change afterwards.
        options: sizes of the extents that the model leaves open.

    Raises:
        InputError: missing, malformed or hostile; an extent without a size.
        UnsupportedError: an operator that neither the graph nor onnx's reference evaluator knows.
        MissingDependencyError: the onnx package is not installed.
    """
    _require_onnx()
    from tilewright.frontends.onnx.files import DataFiles, ModelFile, open_model, with_text

    if isinstance(program, (str, Path)):
        path = Path(program)
        options = options or LoadOptions()
        return _graph(open_model(path, follow_links=options.follow_links), path.stem, options)
    model = with_text(cast("onnx.ModelProto", program), "the ModelProto")
    return _graph(ModelFile(model, (), DataFiles(None)), model.graph.name or "model", options or LoadOptions())


def evaluate_call(call: Call, values: Sequence[object]) -> Sequence[object]:
    """Results of a call node, by onnx's reference evaluator."""
    _require_onnx()
    from tilewright.frontends.onnx.calls import evaluate

    return evaluate(call, values)


def backend() -> type[Backend]:
    """The class that onnx's backend test suite (or any user of `onnx.backend.base`) drives."""
    _require_onnx()
    from tilewright.frontends.onnx.onnx_backend import TilewrightBackend

    return TilewrightBackend


def _require_onnx() -> None:
    try:
        importlib.import_module("onnx")
    except ImportError as error:
        raise MissingDependencyError("reading ONNX needs the onnx package", hint="pip install 'tilewright[onnx]'") from error
    for topic in _CONVERTERS:
        importlib.import_module(f"tilewright.frontends.onnx.{topic}")


def _graph(file: object, name: str, options: LoadOptions) -> Graph:
    from tilewright.frontends.onnx.files import ModelFile, malformed, quoted
    from tilewright.frontends.onnx.functions import check_expansion
    from tilewright.frontends.onnx.inputs import check_fixed, fixed_value, input_types
    from tilewright.frontends.onnx.reader import Reader
    from tilewright.frontends.onnx.scope import Context, Scope, opsets_of

    assert isinstance(file, ModelFile)
    model = file.model
    graph = model.graph
    if not graph.output:
        raise malformed("the model has no outputs", name)
    if graph.sparse_initializer:
        raise InputError("the model stores sparse weights", where=name, hint="store them dense")
    opsets = opsets_of(model.opset_import) or {"": 1}
    reader = Reader(file.files, model.functions)
    version = opsets.get("", NEWEST)
    if not OLDEST <= version <= NEWEST:
        age = "older" if version < OLDEST else "newer"
        reader.notes.append(f"operator set {version} is {age} than {OLDEST} to {NEWEST}; operators are read where unchanged")
    scope = Scope(None, graph.node)
    constants = {t.name for t in graph.initializer}
    given = [i for i in graph.input if i.name not in constants]
    inputs: list[Node] = []
    check_fixed(given, options)
    for info, type in zip(given, input_types(given, options), strict=True):
        if info.name in options.fixed:
            value = fixed_value(info.name, type, options.fixed[info.name])
            reader.bind(scope, info.name, value, info.name)
            continue
        node = Node(Input(info.name, type))
        reader.bind(scope, info.name, node, info.name)
        reader.declare(node, info.type)
        inputs.append(node)
    for i, tensor in enumerate(graph.initializer):
        embedded = file.embedded[i] if i < len(file.embedded) else None
        node = reader.tensor(tensor, f"initializer {quoted(tensor.name)}", embedded)
        reader.bind(scope, tensor.name, node, tensor.name)
    check_expansion(graph.node, reader.functions, name)
    reader.read(graph.node, scope, Context(opsets))
    outputs = [scope.get(o.name, f"output {quoted(o.name)}") for o in graph.output]
    names = tuple(o.name for o in graph.output)
    return Graph(name, tuple(inputs), tuple(outputs), names, reader.origins, tuple(dict.fromkeys(reader.notes)))


def check_call(call: Call, sources: Sequence[object]) -> tuple[()]:
    """See that a call that a file brings stands for itself and refers to no file (see `calls.py`)."""
    from tilewright.frontends.onnx.calls import check_payload

    refuse_interpreted(f"operator {call.target!r}", call.target)
    check_payload(call, len(sources))
    return ()
