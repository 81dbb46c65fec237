"""A checkpoint's layers of a few bits, whoever wrote them: GPTQ, AWQ, compressed-tensors, fp8, MX and torchao in safetensors
files, GGUF, and ONNX."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import torch

from tilewright.errors import InputError, TilewrightError, UnsupportedError, check_type
from tilewright.files import NotJSONError, decoded
from tilewright.frontends import LoadOptions, load
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Const, Dequantize
from tilewright.ir.safetensors import TensorFile
from tilewright.runtime.gguf import GgufFile
from tilewright.runtime.quantized_weight import CODES, QuantizedWeight
from tilewright.runtime.torchao_weights import DATA, from_torchao, quantizes_activations
from tilewright.runtime.weight_formats import (
    from_awq,
    from_codes,
    from_compressed_tensors,
    from_fp4,
    from_gptq,
    from_unsigned,
)

INDEX = "model.safetensors.index.json"
FETCH, FOLDER = "fetch the file again", "a folder with model.safetensors, or such a file"
LABELS = {"gptq": 1, "gptq_v2": 2}  # of config.json's quantization_config.checkpoint_format
# What a layer of each format has beside its name; AWQ's and GPTQ's tensors have the same names and other shapes.
_WORDS, _PACKED = ("qweight", "qzeros", "scales"), ("weight_packed", "weight_scale")
_CODES = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.int8: "int8"}  # a layer's "weight", with scales beside it
_SCALES = "weight_scale", "weight_scale_inv"
_LOOKED_UP = "token_embd", "embed_tokens"  # matrices of GGUF files that no layer multiplies by
_TORCHAO = "_weight_"  # begins the names of the parts of a tensor


class Tensors(Protocol):
    """Tensors by name, each read when asked for."""

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype | None: ...

    def tensor(self, name: str) -> torch.Tensor: ...


class Checkpoint:
    """Tensors by name, and layers that stand for quantised weights; each is read when asked for.

    Attributes:
        layers: names of the quantised layers, such as "model.layers.0.mlp.up_proj", with the format of each, or what it lacks.
    """

    layers: dict[str, str]

    def __init__(self, files: Sequence[Tensors], config: Mapping[str, object]) -> None:
        self._file = {name: file for file in files for name in file.names}
        self._config = config
        self.layers = dict(sorted(self._found()))

    def _found(self) -> Iterator[tuple[str, str]]:
        for name, file in self._file.items():
            layer, _, last = name.rpartition(".")
            if isinstance(file, GgufFile):
                multiplies = last == "weight" and len(file.shape(name)) == 2 and not layer.endswith(_LOOKED_UP)
                if multiplies and file.kind(name) is not None:
                    yield layer, f"gguf {file.kind(name)}"
                continue
            if last == _TORCHAO + "qdata":
                yield layer, "torchao"
            parts = next((p for p in (_PACKED, _WORDS) if last == p[0]), ())
            missing = [n for n in parts if f"{layer}.{n}" not in self._file]
            of = _CODES.get(cast("torch.dtype", file.dtype(name))) if last == "weight" else None
            if missing:
                yield layer, f"{last} without {missing[0]}"
            elif of is not None:
                scaled = any(f"{layer}.{s}" in self._file for s in _SCALES)
                yield layer, of if scaled else f"{last} without {_SCALES[0]}"
            elif last == _PACKED[0]:
                halves = file.dtype(name) is torch.uint8
                yield layer, "fp4" if halves else "compressed-tensors"
            elif last == _WORDS[0]:
                shape, scales = (self._file[f"{layer}.{n}"].shape(f"{layer}.{n}") for n in ("qweight", "scales"))
                yield layer, "gptq" if shape[-1:] == scales[-1:] else "awq"

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._file)

    @property
    def plain(self) -> list[str]:
        """The names of tensors that belong to no quantised layer: norms, embeddings, layers that were left as they are."""
        return [name for name in self._file if name.rpartition(".")[0] not in self.layers]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it stands there.

        Raises:
            InputError: there is none of that name.
            UnsupportedError: torch has no such type.
        """
        if name not in self._file:
            raise InputError(f"the checkpoint has no tensor {name!r}", hint=some(self._file))
        return self._file[name].tensor(name)

    def bias(self, layer: str) -> torch.Tensor | None:
        """A layer's bias [out], None if it has none."""
        name = f"{layer}.bias"
        return self.tensor(name) if name in self._file else None

    def weight(self, layer: str) -> QuantizedWeight:
        """A layer's weight.

        Raises:
            InputError: there is no such layer, or its tensors contradict each other.
            TypeMismatchError: extents or types do not fit together.
            UnsupportedError: it has neither 4 nor 8 bits, or is of a kind that is not read.
        """
        if layer not in self.layers:
            raise InputError(f"the checkpoint has no quantised layer {layer!r}", hint=some(self.layers))

        if " without " in self.layers[layer]:
            missing = f"{layer}.{self.layers[layer].rpartition(' ')[2]}"
            raise InputError(self.layers[layer], where=layer, hint=f"{missing}, which another file of the checkpoint may hold")

        def part(name: str) -> torch.Tensor | None:
            return self._file[f"{layer}.{name}"].tensor(f"{layer}.{name}") if f"{layer}.{name}" in self._file else None

        try:
            weight = self._read(layer, part)
            if not bool(torch.isfinite(weight.wide_scales).all()):
                raise InputError("a scale that is not finite", hint="fetch the checkpoint again, or quantise the layer anew")
            return weight
        except TilewrightError as error:
            raise type(error)(error.what, where=layer, hint=error.hint) from error

    def _read(self, layer: str, part: Callable[[str], torch.Tensor | None]) -> QuantizedWeight:
        """A layer by its format, `part` giving its tensors by their last name."""
        kind = self.layers[layer]
        file = self._file.get(f"{layer}.weight")
        if isinstance(file, GgufFile):
            return file.weight(f"{layer}.weight")
        if kind == "torchao":
            of, facts = self._torchao(layer)
            return from_torchao(of, {n: t for n in DATA if (t := part(_TORCHAO + n)) is not None}, facts)
        if kind in _CODES.values():
            scale = part(_SCALES[0]) if f"{layer}.{_SCALES[0]}" in self._file else part(_SCALES[1])
            block = self._said("weight_block_size") or self._group(layer, "weights").get("block_structure")
            return from_codes(
                cast("torch.Tensor", part("weight")),
                cast("torch.Tensor", scale),
                part("weight_zero_point"),
                block=_pair(block),
            )
        if kind == "fp4":
            packed, scale = (cast("torch.Tensor", part(n)) for n in _PACKED)
            return from_fp4(packed, scale, part("weight_global_scale"))
        if kind == "compressed-tensors":
            names = *_PACKED, "weight_shape", "weight_zero_point", "weight_g_idx"
            packed, scale, *others = (part(n) for n in names)
            assert packed is not None and scale is not None
            return from_compressed_tensors(packed, scale, *others)
        qweight, qzeros, scales = (cast("torch.Tensor", part(n)) for n in _WORDS)
        if kind == "awq":
            return from_awq(qweight, qzeros, scales)
        return self._gptq(qweight, qzeros, scales, part("g_idx"))

    def _gptq(
        self, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor | None
    ) -> QuantizedWeight:
        """A GPTQ layer, of the format version that a loaded module says, or its zero points show, or else the label."""
        version = self._said("qzero_format")
        if isinstance(version, int):
            return from_gptq(qweight, qzeros, scales, g_idx, version=version)
        try:
            return from_gptq(qweight, qzeros, scales, g_idx)
        except InputError:
            label = self._said("checkpoint_format")
            if not isinstance(label, str) or label not in LABELS:
                raise
            return from_gptq(qweight, qzeros, scales, g_idx, version=LABELS[label])

    def _torchao(self, layer: str) -> tuple[str, Mapping[str, object]]:
        """The class and the facts of a tensor of torchao's, as its file's header has them.

        Raises:
            InputError: the header says nothing of it.
        """
        file = self._file[f"{layer}.{_TORCHAO}qdata"]
        text = file.metadata.get(f"{layer}.weight", "") if isinstance(file, TensorFile) else ""
        try:
            said = _table(decoded(text, object))
        except NotJSONError as error:
            raise InputError(f"a header that says nothing of torchao's tensor: {error}", hint=FETCH) from error
        facts = dict(_table(said.get("_data")))
        for name, value in facts.items():
            inner = _table(value)
            if inner.get("_type") == "torch.dtype":
                facts[name] = inner.get("_data")
        return str(said.get("_type")), facts

    def _said(self, key: str) -> object:
        """An entry of the configuration of quantised layers; None where there is none."""
        return self._config.get(key)

    def _group(self, layer: str, part: str) -> Mapping[str, object]:
        """The entry of compressed-tensors' configuration for a layer's "weights" or "input_activations"."""
        for group in _table(self._config.get("config_groups")).values():
            targets = _table(group).get("targets")
            named = (str(t) for t in cast("list[object]", targets)) if isinstance(targets, list) else ()
            if any(_means(target, layer) for target in named):
                return _table(_table(group).get(part))
        return {}

    def quantizes_activations(self, layer: str) -> bool:
        """Tell whether the configuration quantises a layer's activations to 8 bits as they come, a scale a row (W8A8), and its
        weight has scales that such codes can be multiplied with."""
        if self.layers.get(layer) == "torchao":
            return quantizes_activations(self._torchao(layer)[1])
        if self.layers.get(layer) not in _CODES.values():
            return False
        said = self._group(layer, "input_activations")
        by_row = said.get("strategy") == "token" and said.get("dynamic") is True and said.get("num_bits") == 8
        return by_row or self._said("quant_method") == "fbgemm_fp8"


def read_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in a .safetensors file, in a folder of them, behind the index of several, or in a .gguf file.

    Raises:
        InputError: there is none, a file is broken, or the index names a file that is missing or outside its folder.
    """
    check_type(path, (str, Path), "path", "a folder, a .safetensors or .gguf file, or the index of several")
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        return Checkpoint([GgufFile(path)], {})
    folder = path if path.is_dir() else path.parent
    index = folder / INDEX if path.is_dir() else path
    if index.suffix == ".json" and index.exists():
        shards = _json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise InputError("an index without a weight_map", where=str(index), hint=FETCH)
        if not shards:
            raise InputError("an index whose weight_map names no file", where=str(index), hint=FETCH)
        names = sorted({str(n) for n in cast("dict[str, object]", shards).values()})
        wrong = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
        if wrong:
            hint = f"fetch the checkpoint whole; missing are {some(wrong)}"
            raise InputError(f"the index names {wrong[0]!r}, which is no file beside it", where=str(index), hint=hint)
        paths = [folder / n for n in names]
    else:
        paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths:
        others = [p.name for p in sorted(path.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf")]
        written = (
            "give its path" if others and others[0].endswith(".gguf") else "write its tensors with safetensors.torch.save_file"
        )
        hint = f"{others[0]} is of another format: {written}" if others else FOLDER
        raise InputError(f"no .safetensors file in {path}", hint=hint)
    return Checkpoint([TensorFile(p) for p in paths], _configuration(folder))


def _configuration(folder: Path) -> dict[str, object]:
    """Settings of quantised layers, from a configuration beside the files."""
    for name in ("config.json", "quantize_config.json"):
        if (folder / name).exists():
            said = _json(folder / name)
            inner = said.get("quantization_config", said)
            if isinstance(inner, dict) and inner:
                return cast("dict[str, object]", inner)
    return {}


def _table(value: object) -> Mapping[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _pair(value: object) -> tuple[int, int] | None:
    """Extents of a block, as a configuration says them."""
    given = cast("list[object]", value) if isinstance(value, list) else []
    whole = [n for n in given if isinstance(n, int) and n > 0]
    return (whole[0], whole[1]) if len(whole) == len(given) == 2 else None


def _means(target: str, layer: str) -> bool:
    """Tell whether a target of compressed-tensors' configuration is a layer: by its class, its name, or a pattern of names."""
    if target.startswith("re:"):
        with contextlib.suppress(re.error):
            return re.match(target[3:], layer) is not None
        return False
    return target == "Linear" or layer == target or layer.endswith(f".{target}")


def _json(path: Path) -> dict[str, object]:
    try:
        return decoded(path.read_bytes(), dict[str, object])
    except (OSError, NotJSONError) as error:
        raise InputError(f"no table in JSON: {error}", where=str(path), hint=FETCH) from error


def some(names: Iterable[object]) -> str:
    """The first names of many, for a message."""
    shown = [str(n) for n in islice(names, 4)]
    return f"{', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''}" if shown else "it has none"


def weights_of(program: object, options: LoadOptions | None = None) -> dict[str, QuantizedWeight]:
    """The constant weights of a few bits in a program, by name: ONNX's MatMulNBits with whole zero points and
    DequantizeLinear in blocks or by row, and the same in any other form.

    Args:
        program: as for `tilewright.compile`: a path, a model, a graph.
        options: as for `tilewright.load`: extents that the program leaves open.

    Raises:
        InputError: the program cannot be read.
        UnsupportedError: it holds no such weight.
    """
    graph = load(program, options)
    found: dict[str, QuantizedWeight] = {}
    for node in graph.nodes():
        weight = _of_node(node)
        if weight is not None:
            name = _name(graph, node)
            found[name if name not in found else f"{name}_{len(found)}"] = weight
    if not found:
        hint = "a model with MatMulNBits, or DequantizeLinear of constants; --w4 quantises a float model"
        raise UnsupportedError("it holds no constant weight of 4 or 8 bits with scales", where=graph.name, hint=hint)
    return found


def _name(graph: Graph, node: Node) -> str:
    """The source's name of the codes, or else of the node that scales them."""
    at = node.src[0]
    while not isinstance(at.op, Const) and at.src:
        at = at.src[0]
    return (at.op.data.label if isinstance(at.op, Const) else "") or graph.origin(node)


def _of_node(node: Node) -> QuantizedWeight | None:
    """The weight that a node dequantises, `in` last: the axis that blocks divide, or that scales do not vary along."""
    op = node.op
    if not isinstance(op, Dequantize) or node.src[0].dtype not in CODES or len(node.shape) != 2 or not node.constant:
        return None
    codes, scales, *zeros = (cast("torch.Tensor", v) for v in evaluate_nodes(node.src, {}))
    code_type = node.src[0].dtype
    if op.block is not None:
        if 1 not in op.block:
            return None
        along, group = (1, op.block[1]) if op.block[0] == 1 else (0, op.block[0])
    else:
        spread = (1,) * (2 - scales.dim()) + tuple(scales.shape)
        if spread[0] * spread[1] == 1 or 1 not in spread:
            return None
        along = 1 if spread[1] == 1 else 0
        group = node.shape[along]
        scales, zeros = scales.reshape(spread), [z.reshape(spread) for z in zeros]
    if along == 0:
        codes, scales, zeros = codes.t(), scales.t(), [z.t() for z in zeros]
    if scales.dtype == torch.float64:
        return None
    return (
        from_unsigned(codes, scales, zeros[0], group, code_type.bits)
        if zeros and not code_type.is_signed
        else QuantizedWeight.of(codes, scales, code_type, group, zero_points=zeros[0] if zeros else None)
    )
