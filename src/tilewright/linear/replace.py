"""`quantize_`: the linear layers of a model replaced by quantised ones, in place; `prepare`: their kernels made beforehand."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tilewright.candidates.triton.runtime.module import warm
from tilewright.cycles import young
from tilewright.errors import InputError, TypeMismatchError, check_type
from tilewright.hardware.detect import detect
from tilewright.linear.kernels import compile_first, one_thread
from tilewright.linear.module import Linear, make_ready, meets_codes, numbers_of_rows
from tilewright.progress import said
from tilewright.rules.calibrate import shares
from tilewright.runtime.checkpoint import Checkpoint, some
from tilewright.runtime.quantized_weight import QuantizedWeight, pack
from tilewright.runtime.torchao_weights import is_torchao
from tilewright.schedule.worker import begin
from tilewright.threads import valid_count

SCHEMES = (
    "w4g32, w4g64, w4g128, w8, w8g128 (any group; w4 and w8 have one scale a row); z after for zero points (w4g64z), "
    "a8 before for 8-bit activations (a8w4g64); f8, f8g128, f4g16, f4g32 for codes that are floats, a8f8"
)
_SCHEME = re.compile(r"(?P<activations>a8)?(?P<kind>[wf])(?P<bits>[48])(?:g(?P<group>[1-9]\d{0,5}))?(?P<zero>z)?", re.ASCII)

# Classes that compute what torch.nn.Linear does, by module and name, and those whose weight is [in, out].
LINEAR = frozenset({("transformers.models.falcon.modeling_falcon", "FalconLinear")})
TRANSPOSED = frozenset({("transformers.pytorch_utils", "Conv1D")})

Filter = Callable[[str, torch.nn.Linear], bool]
Make = Callable[[str, torch.nn.Linear], "Linear | str"]  # what stands for a layer, or why nothing does


@dataclass(frozen=True)
class Replaced:
    """The outcome of `quantize_`.

    Attributes:
        layers: names of the layers that are quantised now, with what each holds.
        skipped: names of the layers that are not, with the reason.
        bytes_before, bytes_after: of the weights of the quantised layers, each counted once.
        held: those whose float weight something else in the model holds, too, so that its memory is not given back.
        unused: names of the weights that were given and that no layer of the model took.
        left: every float parameter of two axes or more that the model holds now (embeddings, experts, layers that are not
            quantised), with its bytes, each counted once.
        total: bytes of all such parameters and of the codes and scales of the quantised layers.
    """

    layers: Mapping[str, str]
    skipped: Mapping[str, str]
    bytes_before: int
    bytes_after: int
    held: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    left: Mapping[str, int] = field(default_factory=dict[str, int])
    total: int = 0

    def __str__(self) -> str:
        if not self.layers and not self.skipped:
            return "\n".join(["0 layers quantised: the model holds no torch.nn.Linear", *self._left()])
        saved = f"{self.bytes_before / 1e6:.1f} MB of weights are {self.bytes_after / 1e6:.1f} MB now"
        lines = [f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)} quantised, {len(self.skipped)} not; {saved}"]
        lines += [f"  {name}: {why}" for name, why in self.skipped.items()]
        lines += [f"  {name}: the float weight stays in memory, since another module holds it, too" for name in self.held]
        if self.unused:
            lines.append(f"  no layer of the model took {some(self.unused)}")
        return "\n".join([*lines, *self._left()])

    def _left(self) -> list[str]:
        """The lines on parameters still in float, those of one name in several layers together, the largest share first."""
        if not self.left:
            return []
        whole = max(self.total, 1)
        share = f"{sum(self.left.values()) / whole:.0%}"
        return [f"  left in float: {share} of the bytes of all matrices", *(f"    {line}" for line in shares(self.left, whole))]


def quantize_(
    model: torch.nn.Module,
    scheme: str | Checkpoint | Mapping[str, QuantizedWeight] = "w4g64",
    *,
    filter: Filter | None = None,
    threads: int | None = None,
) -> Replaced:
    """Replace the `torch.nn.Linear` modules of a model by `tilewright.Linear`, in place.

    Args:
        model: any module that holds linear layers; parameters stay on their devices.
        scheme: how to quantise float weights: "w4g64" for s4 codes with a scale for 64 of them along the input, "w4g64z" for u4
            codes with zero points as well, "w8" for s8 codes with a scale a row, "f8" for f8e4m3fn, "f4g32" for f4e2m1fn,
            "a8w4g64" and "a8f8" for activations in 8 bits, too. Or a
            checkpoint or a mapping, which holds weights by the names of the layers: those are put in, and no other is changed.
        filter: given a layer's name and module, whether to replace it; all are by default.
        threads: what the layers' `threads` is to be.

    A weight that several layers share is quantised once, and shared as before. Layers are replaced one by one, so that there
    is never a second copy of the whole model: if one is refused, those before it stay quantised.

    Returns:
        Replaced: what was replaced, what was not, and why.

    Raises:
        InputError: an argument is of another type, there is no such scheme, a weight holds infinity or NaN, the model is itself
            one linear layer, or no layer has a name of the checkpoint.
        TypeMismatchError: a layer has another shape in the checkpoint.
    """
    check_type(model, torch.nn.Module, "model", "a torch.nn.Module that holds linear layers")
    check_type(scheme, (str, Checkpoint, Mapping), "scheme", '"w4g64", or what tilewright.read_checkpoint gives')
    valid_count(threads)
    check_type(filter, (Callable, type(None)), "filter", 'lambda name, module: name != "lm_head"')
    if isinstance(model, torch.nn.Linear):
        raise InputError("a linear layer cannot be replaced in itself", hint="tilewright.Linear.from_float(layer)")
    places = deque(_linears(model))
    given = () if isinstance(scheme, str) else _names(scheme, [name for name, *_ in places])
    make = maker(scheme) if isinstance(scheme, str) else _given(scheme)
    layers, skipped, before = dict[str, Linear](), dict(_alike(model)), 0
    # Weak, so that floats go as they are replaced; a module that stands in several places stays one.
    made: MutableMapping[torch.nn.Linear, Linear] = WeakKeyDictionary()
    floats: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
    total = len(places)
    if any(p.is_cuda for *_, module in places for p in module.parameters(recurse=False)):
        begin()  # what `prepare` will need
        warm()
    with said("quantising linear layers") as progress, young():
        while places:
            name, parent, attribute, module = places.popleft()
            progress(total - len(places) - 1, total, name)
            new = why_not(name, module, parent, filter) or made.get(module) or make(name, module)
            if isinstance(new, str):
                skipped[name] = new
                continue
            if module.weight not in floats:
                floats[module.weight] = name
                before += module.weight.nbytes
            made[module] = layers[name] = new
            new.threads = threads
            setattr(parent, attribute, new)
    shared = {floats[p]: p.nbytes for p in model.parameters() if p in floats}
    unused = tuple(n for n in given if n not in layers)
    return report(model, layers, skipped, before, shared, unused)


def report(
    model: torch.nn.Module,
    layers: Mapping[str, Linear],
    skipped: Mapping[str, str],
    before: int,
    shared: Mapping[str, int] | None = None,
    unused: tuple[str, ...] = (),
) -> Replaced:
    """The outcome for a model whose layers were replaced: `before` bytes of weights by `layers`; `shared` are the floats that
    other modules hold, too, with their bytes."""
    shared = shared or {}
    after = sum({m.packed: m.weight.nbytes for m in layers.values()}.values()) + sum(shared.values())
    schemes = {name: m.scheme for name, m in layers.items()}
    left = _left_in_float(model)
    held = sum({m.packed: m.weight.nbytes for m in model.modules() if isinstance(m, Linear)}.values())
    return Replaced(schemes, skipped, before, after, tuple(shared), unused, left, held + sum(left.values()))


def prepare(model: torch.nn.Module, rows: int | Iterable[int], dtype: torch.dtype | None = None) -> None:
    """Make the kernels of every quantised layer of a model for so many rows now, and not in the first calls with them.

    It does what each layer's `prepare` does. For a GPU what is not known yet is compiled in several processes, while kernels
    that are ready are checked. Nothing is measured.

    Args:
        model: what `quantize_` was given.
        rows: one number of rows, or several.
        dtype: of the activations; by default that of each layer's bias, or else of its scales.

    Raises:
        InputError: a number of rows below 1; the model is no module.
    """
    check_type(model, torch.nn.Module, "model", "a torch.nn.Module that tilewright.quantize_ was given")
    wanted = numbers_of_rows(rows)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    if any(m.packed.is_cuda for m in layers.values()):
        begin()
        warm()
    with said("preparing the kernels of quantised layers") as progress, young(), one_thread():
        forms = {kernels.signature: kernels for kernels in (m.kernels(dtype) for m in layers.values())}
        for device in dict.fromkeys(form.device for form in forms):
            found = [kernels.to_build(wanted) for form, kernels in forms.items() if form.device == device]
            compile_first(chain(*(problems for problems, _ in found)), chain(*(jobs for _, jobs in found)), detect(device))
        for i, (name, layer) in enumerate(layers.items()):
            progress(i, len(layers), name)
            make_ready(layer, wanted, dtype)


def _left_in_float(model: torch.nn.Module) -> dict[str, int]:
    """Every float parameter that is a matrix or several, with its bytes."""
    return {n: p.nbytes for n, p in model.named_parameters() if p.dim() >= 2 and p.is_floating_point() and p.element_size() > 1}


def _names(weights: Checkpoint | Mapping[str, QuantizedWeight], layers: Sequence[str]) -> tuple[str, ...]:
    """The names of the weights that are given; one at least is for a layer of the model.

    Raises:
        InputError: there is none for any, or what is given is no quantised weight.
    """
    if isinstance(weights, Checkpoint):
        names = tuple(weights.layers)
    else:
        names = tuple(weights)
        for name, weight in weights.items():
            check_type(weight, QuantizedWeight, str(name), "tilewright.pack(weight)")
    if not names:
        hint = 'load its weights into the model, then tilewright.quantize_(model, "w4g64")'
        raise InputError("the checkpoint holds no quantised layer", hint=hint)
    if not set(names) & set(layers):
        has = f"the model has {some(layers)}" if layers else "the model holds no torch.nn.Linear"
        raise InputError("no layer of the model has a name of the checkpoint", hint=f"{has}; the checkpoint has {some(names)}")
    return names


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Linear]]:
    """Every place where one stands, a module in several places as often: its name, its owner, the owner's name for it."""
    owners = dict(model.named_modules(remove_duplicate=False))
    for name, module in owners.items():
        if isinstance(module, Linear):
            continue
        if isinstance(module, torch.nn.Linear) or (is_transposed(module) and name):
            path, _, attribute = name.rpartition(".")
            yield name, owners[path], attribute, cast("torch.nn.Linear", module)


def _kind(module: torch.nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def matrix(module: torch.nn.Module) -> torch.Tensor:
    """The weight [out, in] of what is a linear layer, in whatever order it holds it."""
    weight = cast("torch.Tensor", module.weight)
    return weight.detach().t() if is_transposed(module) else weight


def is_transposed(module: torch.nn.Module) -> bool:
    """Tell whether a module computes what a linear layer does and holds its weight as [in, out]."""
    return _kind(module) in TRANSPOSED


def is_linear(module: torch.nn.Module) -> bool:
    """Tell whether a module computes what a linear layer does."""
    return isinstance(module, torch.nn.Linear) or is_transposed(module)


def _alike(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the modules that are no `torch.nn.Linear` and look as if they multiplied by a matrix, and what each is."""
    for name, module in model.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            if is_transposed(module):
                continue
            yield name, f"a {type(module).__name__}, no torch.nn.Linear"


def why_not(name: str, module: torch.nn.Linear, parent: torch.nn.Module, filter: Filter | None) -> str | None:
    """The sentence why a layer stays as it is, whatever there is to put in its place; None if it need not."""
    if type(module) is not torch.nn.Linear and _kind(module) not in LINEAR | TRANSPOSED:
        return f"a {type(module).__name__}, whose owner may read its weight"
    if isinstance(parent, torch.nn.TransformerEncoderLayer):
        return "torch.nn.TransformerEncoderLayer reads its weight itself"
    weight = getattr(module, "weight", None)  # which other tools' layers may lack
    if weight is None or is_torchao(weight):
        of = "another tool" if weight is None else "torchao"
        return f"{of} quantised it: tilewright.integrations.transformers.accelerate_ takes it over"
    if hasattr(module, "_hf_hook"):
        return "accelerate moves its inputs by a hook, which would be lost"
    if module._forward_pre_hooks or module._forward_hooks:  # pyright: ignore[reportPrivateUsage] - there is no other way
        return "it has hooks, which would be lost"
    if filter is not None and not filter(name, module):
        return "the filter says no"
    return None


def maker(scheme: str) -> Make:
    """A function that, of a layer's name and the float layer, makes the quantised one, or says why it makes none.

    Raises:
        InputError: there is no such scheme. When it is called: a weight holds infinity or NaN.
    """
    said = _SCHEME.fullmatch(scheme)
    if said is None:
        path = Path(scheme).suffix or "/" in scheme
        raise InputError(f"no scheme {scheme!r}", hint="tilewright.read_checkpoint(path)" if path else SCHEMES)
    bits, zero, activations = said["bits"], said["zero"] is not None, said["activations"] is not None
    code = f"{'u' if zero else 's'}{bits}" if said["kind"] == "w" else {"4": "f4e2m1fn", "8": "f8e4m3fn"}[bits]
    if said["kind"] == "f" and (zero or (activations and (bits, said["group"]) != ("8", None))):
        raise InputError(f"no scheme {scheme!r}", hint=SCHEMES)
    group = int(said["group"]) if said["group"] else None
    packed: MutableMapping[torch.Tensor, QuantizedWeight] = WeakTensorKeyDictionary()  # a weight that layers share stays one

    def make(name: str, module: torch.nn.Linear) -> Linear | str:
        if module.weight.is_meta:
            return "its weight has no data yet"
        if not module.weight.is_floating_point() or module.weight.element_size() < 2:
            return f"its weight is {str(module.weight.dtype).removeprefix('torch.')} already"
        if not module.weight.numel():
            return "its weight is empty"
        if module.weight not in packed:
            try:
                packed[module.weight] = pack(matrix(module), code, group_size=group, zero_point=zero)
            except InputError as error:
                raise InputError(error.what, where=name, hint=error.hint) from error
        kept, seen = packed[module.weight], module.weight.dtype
        return Linear(kept, module.bias, quantize_activations=activations, float_type=seen).train(module.training)

    return make


def _given(weights: Checkpoint | Mapping[str, QuantizedWeight]) -> Make:
    def make(name: str, module: torch.nn.Linear) -> Linear | str:
        if isinstance(weights, Checkpoint):
            if name not in weights.layers:
                return "no weight of that name is given"
            weight, bias = weights.weight(name), weights.bias(name)
        else:
            if name not in weights:
                return "no weight of that name is given"
            weight, bias = weights[name], None
        own = tuple(matrix(module).shape)
        if weight.shape != own:
            shapes = f"{list(weight.shape)} for a layer of {list(own)}"
            raise TypeMismatchError(f"a weight of shape {shapes}", where=name, hint="the model that the checkpoint is of")
        device = module.weight.device
        with_ = module.bias if bias is None else torch.nn.Parameter(bias.to(device), requires_grad=False)
        kept = weight if module.weight.is_meta else weight.to(device)
        eight = isinstance(weights, Checkpoint) and weights.quantizes_activations(name) and meets_codes(weight)
        return Linear(kept, with_, quantize_activations=eight, float_type=module.weight.dtype).train(module.training)

    return make
