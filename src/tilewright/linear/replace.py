"""`quantize_`: the linear layers of a model replaced by quantised ones, in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from tilewright.errors import InputError, TypeMismatchError
from tilewright.linear.module import Linear
from tilewright.runtime.checkpoint import Checkpoint
from tilewright.runtime.packing import QuantizedWeight

SCHEMES = "w4g32, w4g64, w4g128, w8, w8g128; with z for zero points (w4g64z), a8 before for 8-bit activations (a8w4g64)"
_SCHEME = re.compile(r"(?P<coded>a8)?w(?P<bits>[48])(?:g(?P<group>[1-9]\d{0,5}))?(?P<zero>z)?", re.ASCII)

Filter = Callable[[str, torch.nn.Linear], bool]
_Make = Callable[[str, torch.nn.Linear], "Linear | str"]  # what stands for a layer, or why nothing does


@dataclass(frozen=True)
class Replaced:
    """What `quantize_` did.

    Attributes:
        layers: names of the layers that are quantised now, with what each holds.
        skipped: names of the layers that are not, with the reason.
        bytes_before, bytes_after: of the weights of the quantised layers.
    """

    layers: Mapping[str, str]
    skipped: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        saved = f"{self.bytes_before / 1e6:.1f} MB of weights are {self.bytes_after / 1e6:.1f} MB now"
        lines = [f"{len(self.layers)} layers quantised, {len(self.skipped)} not; {saved}"]
        return "\n".join([*lines, *(f"  {name}: {why}" for name, why in self.skipped.items())])


def quantize_(
    model: torch.nn.Module,
    scheme: str | Checkpoint | Mapping[str, QuantizedWeight] = "w4g64",
    *,
    filter: Filter | None = None,
) -> Replaced:
    """Replace the `torch.nn.Linear` modules of a model by `tilewright.Linear`, in place.

    Args:
        model: any module that holds linear layers; parameters stay on their devices.
        scheme: how to quantise float weights: "w4g64" for s4 codes with a scale for 64 of them along the input, "w4g64z" for u4
            codes with zero points as well, "w8" for s8 codes with a scale a row, "a8w4g64" for activations in 8 bits, too. Or a
            checkpoint or a mapping, which holds weights by the names of the layers: those are put in, and no other is changed.
        filter: given a layer's name and module, whether to replace it; all are by default.

    Returns:
        Replaced: what was replaced, what was not, and why.

    Raises:
        InputError: there is no such scheme, a weight holds infinity or NaN, the model is itself one linear layer, or no layer
            has a name of the checkpoint.
        TypeMismatchError: a layer has another shape in the checkpoint.
    """
    if isinstance(model, torch.nn.Linear):
        raise InputError("a linear layer cannot be replaced in itself", hint="tilewright.Linear.from_float(layer)")
    make = _quantised(scheme) if isinstance(scheme, str) else _given(scheme)
    layers, skipped = dict[str, str](), dict[str, str]()
    before = after = 0
    made: dict[int, Linear] = {}  # a module that stands in several places stays one
    for name, parent, attribute, module in list(_linears(model)):
        why = _why_not(name, module, parent, filter)
        made_now = why or made.get(id(module)) or make(name, module)
        if isinstance(made_now, str):
            skipped[name] = made_now
            continue
        if id(module) not in made:
            made[id(module)] = made_now
            before, after = before + module.weight.nbytes, after + made_now.weight.nbytes
        setattr(parent, attribute, made_now)
        layers[name] = made_now.scheme
    if not isinstance(scheme, str) and not layers:
        raise InputError(
            "no layer of the model has a name of the checkpoint", hint=", ".join([*skipped][:3]) or "no linear layer"
        )
    return Replaced(layers, skipped, before, after)


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Linear]]:
    """Every place where one stands, a module in several places as often: its name, its owner, the owner's name for it."""
    owners = dict(model.named_modules(remove_duplicate=False))
    for name, module in owners.items():
        if isinstance(module, torch.nn.Linear):
            path, _, attribute = name.rpartition(".")
            yield name, owners[path], attribute, module


def _why_not(name: str, module: torch.nn.Linear, parent: torch.nn.Module, filter: Filter | None) -> str | None:
    """Why a layer stays as it is, whatever there is to put in its place; None if it need not."""
    if type(module) is not torch.nn.Linear:
        return f"a {type(module).__name__}, whose owner may read its weight"
    if isinstance(parent, torch.nn.TransformerEncoderLayer):
        return "torch.nn.TransformerEncoderLayer reads its weight itself"
    if filter is not None and not filter(name, module):
        return "the filter says no"
    return None


def _quantised(scheme: str) -> _Make:
    said = _SCHEME.fullmatch(scheme)
    if said is None:
        raise InputError(f"no scheme {scheme!r}", hint=SCHEMES)
    bits, zero, coded = said["bits"], said["zero"] is not None, said["coded"] is not None
    group = int(said["group"]) if said["group"] else None

    def make(name: str, module: torch.nn.Linear) -> Linear | str:
        if module.weight.is_meta:
            return "its weight has no data yet"
        if not module.weight.is_floating_point() or module.weight.element_size() < 2:
            return f"its weight is {str(module.weight.dtype).removeprefix('torch.')} already"
        if not module.weight.numel():
            return "its weight is empty"
        try:
            made = Linear.from_float(
                module, f"{'u' if zero else 's'}{bits}", group_size=group, zero_point=zero, quantize_activations=coded
            )
        except InputError as error:
            raise InputError(error.what, where=name, hint=error.hint) from error
        return made

    return make


def _given(weights: Checkpoint | Mapping[str, QuantizedWeight]) -> _Make:
    def make(name: str, module: torch.nn.Linear) -> Linear | str:
        if isinstance(weights, Checkpoint):
            if name not in weights.layers:
                return "no weight of that name is given"
            weight, bias = weights.weight(name), weights.bias(name)
        else:
            if name not in weights:
                return "no weight of that name is given"
            weight, bias = weights[name], None
        if weight.shape != tuple(module.weight.shape):
            shapes = f"{list(weight.shape)} for a layer of {list(module.weight.shape)}"
            raise TypeMismatchError(f"a weight of shape {shapes}", where=name, hint="the model that the checkpoint is of")
        device = module.weight.device
        own = module.bias if bias is None else torch.nn.Parameter(bias.to(device), requires_grad=False)
        return Linear(weight if module.weight.is_meta else weight.to(device), own).train(module.training)

    return make
