"""`take_over_`: layers that other tools quantised and loaded, replaced by `tilewright.Linear`.

These are GPTQModel, AutoAWQ, compressed-tensors, torchao and transformers (fp8). None of them need be installed: layers are
told by their tensors and their classes' names.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from tilewright.errors import InputError, TilewrightError, check_type
from tilewright.linear.module import Linear, meets_codes
from tilewright.linear.replace import Replaced, report
from tilewright.runtime.checkpoint import Checkpoint
from tilewright.runtime.quantized_weight import QuantizedWeight
from tilewright.runtime.torchao_weights import from_torchao, is_torchao, parts_of, quantizes_activations
from tilewright.threads import valid_count

# Layers whose words are as in files; others of GPTQModel and AutoAWQ have put them in the order of their own kernels.
AS_STORED = frozenset({"TorchLinear", "TorchQuantLinear", "TritonV2Linear", "TritonV2QuantLinear"}) | frozenset(
    {"AwqTorchLinear", "AwqTorchQuantLinear", "AwqGEMMLinear", "AwqGEMMQuantLinear", "AwqGEMMTritonLinear", "WQLinear_GEMM"}
)
_SELF = "layer"  # what a module's own tensors are read as


class _Held:
    """A module's own tensors, as those of a file."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {f"{_SELF}.{name}": t for name, t in tensors.items()}

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype | None:
        return self._tensors[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def take_over_(model: torch.nn.Module, *, threads: int | None = None) -> Replaced:
    """Replace layers that another tool quantised by `tilewright.Linear`, in place.

    Weights are the same, bit for bit. Activations are quantised where the tool does it to 8 bits by rows as they come, and
    otherwise left as they are.

    Args:
        model: any module that holds such layers, with data.
        threads: what the layers' `threads` is to be.

    Returns:
        Replaced: what was replaced, what was not, and why.

    Raises:
        InputError: the model holds no such layer, or is itself one.
    """
    check_type(model, torch.nn.Module, "model", "a torch.nn.Module that holds quantised layers")
    valid_count(threads)
    made: MutableMapping[torch.nn.Module, Linear | str] = WeakKeyDictionary()
    layers, skipped, before = dict[str, Linear](), dict[str, str](), 0
    usual = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1), None)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, Linear):
            continue
        if module not in made:
            found = _read(module)
            if found is None:
                continue
            made[module] = found if isinstance(found, str) else _layer(module, *found, usual)
            before += 0 if isinstance(found, str) else sum(t.nbytes for n, t in _own(module).items() if n != "bias")
        new = made[module]
        if isinstance(new, str):
            skipped[name] = new
            continue
        if not name:
            raise InputError("a quantised layer cannot be replaced in itself", hint="the module that holds it")
        new.threads = threads
        layers[name] = new
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, new)
    if not layers and not skipped:
        hint = "a model that GPTQModel, AutoAWQ, compressed-tensors or torchao quantised; tilewright.quantize_ for a float one"
        raise InputError("the model holds no layer that another tool quantised", hint=hint)
    return report(model, layers, skipped, before)


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers."""
    held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {name: t for name, t in held if isinstance(t, torch.Tensor)}  # pyright: ignore[reportUnnecessaryIsInstance]


def _layer(module: torch.nn.Module, weight: QuantizedWeight, eight: bool, usual: torch.dtype | None) -> Linear:
    """The layer of a weight, with the bias of the module that it was read from."""
    bias = _own(module).get("bias")
    float_type = bias.dtype if bias is not None else usual
    return Linear(weight, bias, quantize_activations=eight and meets_codes(weight), float_type=float_type).train(
        module.training
    )


def _read(module: torch.nn.Module) -> tuple[QuantizedWeight, bool] | str | None:
    """A quantised layer's weight, and whether activations are quantised to 8 bits; why it is not read; None if it is none."""
    own = _own(module)
    weight = own.get("weight")
    try:
        if weight is not None and is_torchao(weight):
            kind, data, facts = parts_of(weight)
            return from_torchao(kind, data, facts), quantizes_activations(facts)
        checkpoint = Checkpoint([_Held(own)], _configuration(module))
        kind = checkpoint.layers.get(_SELF)
        if kind is None:
            scheme = getattr(module, "quantization_scheme", None)
            return "its weight is in floats again: take it over before its first call" if scheme is not None else None
        if any(t.is_meta for t in own.values()):
            return "its tensors have no data yet"
        of = type(module).__name__
        if "qweight" in own and of not in AS_STORED:
            return f"a {of}, whose words may be in the order of its own kernel: load it with GPTQModel's backend TORCH"
        if getattr(module, "adapter", None) is not None:
            return f"a {of} with an adapter"
        return checkpoint.weight(_SELF), checkpoint.quantizes_activations(_SELF)
    except TilewrightError as error:
        return error.what


def _configuration(module: torch.nn.Module) -> dict[str, object]:
    """The entries of a checkpoint's configuration that a module's own attributes stand for."""
    said: dict[str, object] = {}
    scheme = cast("Any", getattr(module, "quantization_scheme", None))
    if scheme is not None and hasattr(scheme, "model_dump"):
        said["config_groups"] = {"own": {**scheme.model_dump(mode="json"), "targets": [_SELF]}}
    block = cast("Any", getattr(module, "block_size", None))
    if block is not None:
        said["weight_block_size"] = list(block) if isinstance(block, (list, tuple)) else [block, block]
    zeros = getattr(module, "qzero_format", None)
    if callable(zeros):
        said["qzero_format"] = zeros()
    return said
