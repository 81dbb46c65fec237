"""The quantisation method "tilewright" of transformers: its configuration, and its part in loading and saving."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from tilewright.errors import InputError, TilewrightError, TypeMismatchError, check_type
from tilewright.ir.safetensors import TensorFile
from tilewright.linear.loaded import take_over_
from tilewright.linear.module import Linear
from tilewright.linear.replace import Replaced, is_linear, is_transposed, maker, matrix, quantize_, why_not

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationMethod

METHOD = "tilewright"
MIXED = "mixed"  # the scheme of a model whose layers were quantised otherwise: its tensors tell


class TilewrightConfig(QuantizationConfigMixin):  # pyright: ignore[reportUntypedBaseClass]
    """A quantisation by Tilewright, as `from_pretrained(..., quantization_config=)` takes it and `config.json` keeps it.

    Args:
        scheme: as for `tilewright.quantize_`, such as "w4g64".
        modules_to_not_convert: layers that stay in float, by names, beginnings or ends of names, or patterns, as transformers
            has them: `["lm_head"]`.

    Raises:
        InputError: there is no such scheme.
    """

    def __init__(self, scheme: str = "w4g64", modules_to_not_convert: Sequence[str] | None = None, **unknown: object) -> None:
        check_type(scheme, str, "scheme", '"w4g64"')
        unknown.pop("quant_method", None)
        if unknown:
            hint = "TilewrightConfig(scheme, modules_to_not_convert)"
            raise InputError(f"a configuration with {', '.join(sorted(unknown))}", hint=hint)
        if scheme != MIXED:
            maker(scheme)
        self.quant_method = cast("QuantizationMethod", METHOD)
        self.scheme = scheme
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)


class TilewrightQuantizer(HfQuantizer):
    """Quantises each weight as it is loaded, so that the float model is never whole in memory; reads and writes what is
    quantised already."""

    quantization_config: TilewrightConfig
    requires_calibration = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be done.

        Raises:
            InputError: layers are to stay on a disk, or "mixed" is asked for of a float model.
        """
        placed = kwargs.get("device_map")
        if isinstance(placed, dict) and "disk" in cast("dict[str, object]", placed).values():
            raise InputError("quantised layers that stay on a disk", hint="a device_map of devices with memory")
        if self.quantization_config.scheme == MIXED and not self.pre_quantized:
            raise InputError(f"the scheme {MIXED!r} says nothing of how to quantise", hint='TilewrightConfig("w4g64")')

    @property
    def quantized_element_size(self) -> float:
        """Bytes of a weight's element, its scale left out."""
        scheme = self.quantization_config.scheme
        return 0.5 if scheme.removeprefix("a8")[1:2] == "4" else 1.0

    def _stays(self, model: PreTrainedModel, name: str, module: torch.nn.Module) -> bool:
        """Tell whether a layer stays in float."""
        parent = model.get_submodule(name.rpartition(".")[0])
        linear = cast("torch.nn.Linear", module)
        asked = should_convert_module(name, self.quantization_config.modules_to_not_convert)
        return not asked or isinstance(module, Linear) or why_not(name, linear, parent, None) is not None

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Tell whether a parameter is the weight of a layer to quantise."""
        name, _, last = param_name.rpartition(".")
        module = model.get_submodule(name)
        linear = isinstance(module, torch.nn.Linear) and last == "weight"
        return linear and not self.pre_quantized and not self._stays(model, name, module)

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that transformers applies to such a parameter once it is read."""
        return _Quantize(self)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        """Put layers without data where the files hold quantised ones.

        Raises:
            InputError: a file holds a layer that the model lacks, or a part of one alone.
        """
        if self.pre_quantized:
            known: Any = model
            modules, tied = dict(model.named_modules()), cast("dict[str, str]", model.all_tied_weights_keys)
            for name, state in _layers_of(model, self, [Path(file) for file in checkpoint_files or ()]):
                if name in modules:  # not the head's, where the model has none: transformers reports it
                    _put(model, name, _without_data(name, modules[name], state))
                    tied.pop(f"{name}.weight", None)
                    ignored = known._keys_to_ignore_on_load_unexpected or ()
                    known._keys_to_ignore_on_load_unexpected = {*ignored, rf"(^|\.){re.escape(name)}\.weight$"}  # read here
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Quantise layers whose weights were in no file by their own name: those tied to others, and those of other classes."""
        if not self.pre_quantized:
            quantize_(model, self.quantization_config.scheme, filter=lambda name, module: not self._stays(model, name, module))
        tied = cast("dict[str, str]", model.all_tied_weights_keys)
        for name in [n for n, m in model.named_modules() if isinstance(m, Linear)]:
            tied.pop(f"{name}.weight", None)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Leave the state dict as it is."""
        return None, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Put float layers of the model's own classes in the place of quantised ones."""
        with torch.device("meta"):
            own = type(model)(model.config)
        for name, module in list(model.named_modules()):
            if isinstance(module, Linear):
                dense: Any = own.get_submodule(name)
                weight = module.weight.dequantize(dtype or module.float_type)
                dense.weight = torch.nn.Parameter(weight.t().contiguous() if is_transposed(dense) else weight, False)
                dense.bias = module.bias
                _put(model, name, dense.train(module.training))
        return model

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] - what others return
        """Say that `save_pretrained` may be called."""
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] - what others return
        """Tell transformers that gradients pass through the layers, for adapters beside them; the weights are constant."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Tell transformers that `torch.compile` takes the model: a layer is one operation."""
        return True


register_quantization_config(METHOD)(TilewrightConfig)
register_quantizer(METHOD)(TilewrightQuantizer)


class _Quantize(ConversionOps):
    """Put a quantised layer in the place of the one whose weight was read."""

    def __init__(self, quantizer: TilewrightQuantizer) -> None:
        self.make = maker(quantizer.quantization_config.scheme)

    @torch.no_grad()
    def convert(
        self,
        input_dict: Mapping[str, torch.Tensor | list[torch.Tensor]],
        *args: Any,
        model: PreTrainedModel | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, list[torch.Tensor]]:
        """Take weights by their whole names; nothing is left to put in place."""
        assert model is not None
        left: dict[str, list[torch.Tensor]] = {}
        for full, value in input_dict.items():
            name = full.rpartition(".")[0]
            module = cast("torch.nn.Linear", model.get_submodule(name))
            weight = value[0] if isinstance(value, list) else value
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
            made = self.make(name, module)
            if isinstance(made, str):
                left[full] = [weight]
                continue
            _put(model, name, made)
            if missing_keys is not None:
                missing_keys.discard(full)
        return left


def _put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, module)


def _layers_of(
    model: PreTrainedModel, quantizer: TilewrightQuantizer, files: Sequence[Path]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The quantised layers of files by the model's names for them, with the tensors of each; all but the text without data.

    Raises:
        InputError: the files are in another format.
    """
    others = [file for file in files if file.suffix != ".safetensors"]
    if others:
        raise InputError(f"{others[0].name} is no safetensors file", hint="model.save_pretrained(folder)")
    mapping = get_model_conversion_mapping(model, None, quantizer)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    known = model.state_dict()
    found: dict[str, dict[str, torch.Tensor]] = {}
    for file in map(TensorFile, files):
        for key in file.names:
            layer, _, last = key.rpartition(".")
            if last == "weight" and file.dtype(key) is torch.uint8:
                found.setdefault(layer, {})[last] = file.tensor(key)
            elif last not in ("weight", "bias"):
                found.setdefault(layer, {})[last] = torch.empty(file.shape(key), dtype=file.dtype(key), device="meta")
    for layer, state in found.items():
        if "packed" in state:
            renamed, _ = rename_source_key(f"{layer}.weight", renamings, converters, model.base_model_prefix, known)
            yield renamed.rpartition(".")[0], state


def _without_data(name: str, linear: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Linear:
    """Make the layer that takes a linear one's place, on the meta device, of the shapes that its tensors have in a file.

    Raises:
        InputError: it is no linear layer, or the tensors are none of one.
        TypeMismatchError: extents do not fit together.
    """
    if not is_linear(linear):
        what = f"the files hold a quantised linear layer where the model has a {type(linear).__name__}"
        raise InputError(what, where=name, hint="the class that the folder was saved from")
    dense, bias = matrix(linear), cast("torch.Tensor | None", linear.bias)
    try:
        made = Linear.from_state({**state, **({} if bias is None else {"bias": bias})}, dense.shape[1], float_type=dense.dtype)
    except TilewrightError as error:
        raise type(error)(error.what, where=name, hint=error.hint) from error
    if made.out_features != dense.shape[0]:
        shapes = f"{[made.out_features, made.in_features]} for a layer of {list(dense.shape)}"
        raise TypeMismatchError(f"a weight of shape {shapes}", where=name, hint="the model that the folder was saved from")
    return made


def accelerate_(model: torch.nn.Module, *, threads: int | None = None) -> Replaced:
    """Replace layers that another tool quantised by `tilewright.Linear`, in place, with the same weights: those of GPTQModel,
    AutoAWQ, compressed-tensors, torchao, and transformers' fp8. A model of transformers is then saved as `savable_` says.

    Args:
        model: what `from_pretrained` gave, before its first call (compressed-tensors makes floats of its weights then), or any
            module that holds such layers.
        threads: what the layers' `threads` is to be.

    Returns:
        Replaced: what was replaced, what was not, and why.

    Raises:
        InputError: the model holds no such layer, or is itself one.
    """
    from transformers import PreTrainedModel

    replaced = take_over_(model, threads=threads)
    if replaced.layers and isinstance(model, PreTrainedModel):
        savable_(model)
    return replaced


def savable_(model: PreTrainedModel) -> PreTrainedModel:
    """Have `save_pretrained` write a folder that `from_pretrained` reads, of a model that `tilewright.quantize_` or
    `tilewright.accelerate_` was given.

    Returns:
        The model.

    Raises:
        InputError: it is no model of transformers, or holds no layer of ours.
    """
    from transformers import PreTrainedModel

    check_type(model, PreTrainedModel, "model", "a model of transformers")
    if not any(isinstance(m, Linear) for m in model.modules()):
        raise InputError("the model holds no tilewright.Linear", hint="tilewright.quantize_(model) first")
    config = TilewrightConfig(MIXED)
    quantizer = TilewrightQuantizer(config, pre_quantized=True)
    for name, value in (("hf_quantizer", quantizer), ("quantization_method", METHOD), ("is_quantized", True)):
        setattr(model, name, value)
    quantizer.postprocess_model(model)
    return model
