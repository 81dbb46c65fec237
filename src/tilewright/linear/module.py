"""`Linear`: torch's module with a weight of a few bits, and that weight where a model reads it as the matrix it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tilewright.dtype import DType, dtype, from_torch
from tilewright.errors import InputError, check_type
from tilewright.ir.ops.functions import BITS_TYPE
from tilewright.linear.kernels import Kernels, Signature, tune
from tilewright.linear.op import dense_linear, forget, kernels_for, linear, plain_linear
from tilewright.progress import Progress, said
from tilewright.runtime.checkpoint import Checkpoint, read_checkpoint
from tilewright.runtime.quantized_weight import QuantizedWeight, pack
from tilewright.schedule.buckets import Buckets
from tilewright.threads import limited, valid_count
from tilewright.tracing import transformed

_OPTIONAL = ("zero_points", "offsets", "order", "factor")
_MEANING = re.compile(  # what `Linear._meaning` says
    r"(?P<codes>\w+) codes, \w+ scales per (?P<group>[1-9]\d{0,9})(?:(?P<divides>, divided by a factor)|, times a factor)?"
    r"(?P<activations>, activations in 8 bits)?",
    re.ASCII,
)


class LayerWeight(QuantizedWeight):
    """A `QuantizedWeight` that answers as a tensor [out, in] of a float type would.

    `dtype` is torch's own here, that of the layer (`code_type` is that of the codes), `device` where the codes are. Operators,
    an index, every function and every attribute of a tensor work on the dequantised matrix, made anew each time. What writes to
    the weight itself is refused with an InputError; what writes to such a matrix, or to a part of it, changes that alone.
    """

    @staticmethod
    def seen(weight: QuantizedWeight, as_type: torch.dtype | None = None) -> LayerWeight:
        """The weight, over the same memory, as a matrix of a type; by default that of the scales, bf16 for those of 8 bits."""
        sides = weight.zero_points, weight.offsets, weight.order, weight.factor, weight.divides
        seen = LayerWeight(weight.code_type, weight.packed, weight.scales, weight.in_features, weight.group_size, *sides)
        seen.__dict__["_as_type"] = as_type or usual_type(weight)
        return seen

    def plain(self) -> QuantizedWeight:
        """The same as a weight alone."""
        sides = self.zero_points, self.offsets, self.order, self.factor, self.divides
        return QuantizedWeight(self.code_type, self.packed, self.scales, self.in_features, self.group_size, *sides)

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """The type of what the layer multiplies by."""
        return self.__dict__["_as_type"]

    @dtype.setter
    def dtype(self, code_type: DType) -> None:  # by the constructor  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["_codes"] = code_type

    @property
    def code_type(self) -> DType:
        """The type of the codes."""
        return self.__dict__["_codes"]

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.packed.device

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """[out, in]."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def data(self) -> LayerWeight:
        """Itself: there is no gradient to leave behind."""
        return self

    @data.setter
    def data(self, value: object) -> None:
        raise _written("data")

    @property
    def requires_grad(self) -> bool:
        """False: it is constant."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> LayerWeight:
        """Itself, as it is constant.

        Raises:
            InputError: a gradient is asked for.
        """
        if requires_grad:
            raise InputError(
                "a quantised layer's weight has no gradient",
                hint="train the float layer, then tilewright.quantize_; or low-rank weights beside this one",
            )
        return self

    grad = None
    _is_hf_initialized = True  # transformers draws no values at random for what says so

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The weight on another device, as codes; in another type, as a tensor."""
        if len(args) == 1 and not kwargs and isinstance(args[0], (str, torch.device)):
            return LayerWeight.seen(self.plain().to(args[0]), self.dtype)
        return self.tensor().to(*args, **kwargs)

    def tensor(self) -> torch.Tensor:
        """The matrix [out, in]."""
        return self.dequantize(self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _written("an assignment to a part")

    def __len__(self) -> int:
        return self.out_features

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensor())

    def __hash__(self) -> int:
        """The object's identity, as of a tensor, though == compares elements."""
        return object.__hash__(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a quantised weight has no {name!r}")
        return _refusal(name) if name.endswith("_") else getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def dense(x: Any) -> Any:
            return x.tensor() if isinstance(x, LayerWeight) else x

        named = dict(kwargs or {})
        writes = func.__name__.endswith("_") and not func.__name__.endswith("__")  # such as those of torch.nn.init
        target = (*args, *named.values())[:1] if writes else named.get("out")
        if any(isinstance(t, LayerWeight) for t in tree_leaves(target)):
            raise _written(func.__name__)
        given, named = cast("tuple[Any, dict[str, Any]]", tree_map(dense, (tuple(args), named)))
        return func(*given, **named)


def _written(how: str) -> InputError:
    """The refusal of a write to a quantised weight."""
    return InputError(
        f"a quantised layer's weight cannot be written to: {how}",
        hint="write to the float weight, then tilewright.quantize_; or tilewright.Linear(tilewright.pack(matrix)) in its place",
    )


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise _written(name)

    return refuse


def _operator(name: str) -> Callable[..., Any]:
    """A tensor's own operator, on the matrix."""

    def compute(weight: LayerWeight, *others: Any) -> Any:
        return getattr(weight.tensor(), name)(*(o.tensor() if isinstance(o, LayerWeight) else o for o in others))

    return compute


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    for _side in ("", "r"):
        setattr(LayerWeight, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))
    setattr(LayerWeight, f"__i{_name}__", _refusal(f"__i{_name}__"))
for _name in ("neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge", "array"):
    setattr(LayerWeight, f"__{_name}__", _operator(f"__{_name}__"))


def usual_type(weight: QuantizedWeight) -> torch.dtype:
    """The type of a layer of which nothing else is known: that of the scales, bf16 where they have 8 bits."""
    return torch.bfloat16 if weight.scales.itemsize == 1 else weight.scales.dtype


def meets_codes(weight: QuantizedWeight) -> bool:
    """Tell whether activations of 8 bits can be multiplied by a weight: by integers, and by 8-bit floats with a scale a row."""
    return weight.code_type.is_integer or (weight.code_type.bits == 8 and weight.scales.shape[1] == 1)


def numbers_of_rows(rows: int | Iterable[int]) -> list[int]:
    """One number of rows, or several, as a list.

    Raises:
        InputError: one is below 1.
    """
    wanted = [rows] if isinstance(rows, int) else list(rows)
    if any(r < 1 for r in wanted):
        raise InputError(f"no kernel for {min(wanted)} rows", hint="1 or more")
    return wanted


def make_ready(layer: Linear, rows: Sequence[int], dtype: torch.dtype | None) -> None:
    """Make a layer's kernels for so many rows, and run each once."""
    layer.kernels(dtype).prepare(rows)
    for count in rows:
        layer(torch.zeros(count, layer.in_features, dtype=layer.usual(dtype), device=layer.packed.device))


class Linear(torch.nn.Linear):
    """y = x @ weight^T + bias with a quantised weight, for x of any leading axes, in f16, bf16 or f32 (or in f64,
    as `torch.autograd.gradcheck` has it: slowly, by a product of the dequantised weight).

    Kernels are chosen by the number of rows when they first come, verified once for all layers of a shape, and kept; under
    `torch.compile` it is one operation, whatever the shape. A CUDA graph can be captured once the module has run with as many
    rows, or after `prepare`. Its buffers are the weight's tensors as `QuantizedWeight` has them: a state dict holds them and
    the bias, and under the name "weight" a text that says what they mean, whose shape no float layer takes. What kernels pack
    for themselves is made from them, and not saved. Conversions such as `module.half()` touch the bias alone. To others it is a
    `torch.nn.Linear`, whose weight is no parameter.

    Args:
        weight: the quantised weight.
        bias: [out] or None; a parameter stays the same parameter.
        quantize_activations: multiply in 8 bits: each row of x is quantised by its largest magnitude, to s8 or, beside floats,
            to f8e4m3fn.
        threads: threads for calls on a CPU; None is torch's number, but no more than the machine has for this process. An
            attribute that may be set. Where torch compiles or exports the module, torch's number counts.
        float_type: the type that `weight` answers with, and of the activations that `prepare` makes kernels for; that of the
            bias if not given, or else of the scales (bf16 for those of 8 bits).

    Raises:
        InputError: the bias has another extent, or activations of 8 bits meet floats of 4 bits or with scales by groups.
    """

    in_features: int
    out_features: int
    code_type: str
    group_size: int
    scheme: str
    divides: bool
    float_type: torch.dtype

    packed: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    offsets: torch.Tensor | None
    order: torch.Tensor | None
    factor: torch.Tensor | None
    bias: torch.nn.Parameter | None
    threads: int | None = None

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        quantize_activations: bool = False,
        threads: int | None = None,
        float_type: torch.dtype | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)  # pyright: ignore[reportUnknownMemberType] - a float weight is never made
        self.threads = valid_count(threads)
        check_type(weight, QuantizedWeight, "weight", "tilewright.pack(weight), or Linear.from_float(layer)")
        check_type(bias, (torch.Tensor, type(None)), "bias", f"a tensor [{weight.out_features}], or None")
        if bias is not None and tuple(bias.shape) != (weight.out_features,):
            raise InputError(f"a bias of shape {list(bias.shape)}", hint=f"[{weight.out_features}], one a row of the weight")
        if quantize_activations and not meets_codes(weight):
            hint = "8-bit codes with a scale a row (f8), or activations as they are"
            raise InputError(f"8-bit activations beside {weight.code_type} by groups", hint=hint)
        self.float_type = float_type or (usual_type(weight) if bias is None else bias.dtype)
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.divides = weight.divides
        self.code_type, self.group_size = weight.code_type.name, weight.group_size
        self.scheme = f"{'a8' if quantize_activations else ''}{weight.scheme}"
        self.quantize_activations = quantize_activations
        self.register_buffer("packed", weight.packed)
        self.register_buffer("scales", weight.scales)
        for name in _OPTIONAL:
            self.register_buffer(name, getattr(weight, name))
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_float(
        cls,
        module: torch.nn.Linear,
        code_type: str = "s4",
        *,
        group_size: int | None = 64,
        zero_point: bool = False,
        quantize_activations: bool = False,
    ) -> Linear:
        """A module's weight quantised as `tilewright.pack` does, and its bias.

        Raises:
            InputError: as `pack`; it is no linear layer.
        """
        check_type(
            module, torch.nn.Linear, "module", "a torch.nn.Linear; tilewright.Linear(tilewright.pack(weight), bias) else"
        )
        weight = pack(module.weight, code_type, group_size=group_size, zero_point=zero_point)
        made = cls(weight, module.bias, quantize_activations=quantize_activations)
        return made.train(module.training)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint | str | Path, layer: str) -> Linear:
        """A layer of a checkpoint that holds quantised weights.

        Args:
            checkpoint: what `tilewright.read_checkpoint` gives, or a path for it.
            layer: its name there, such as "model.layers.0.mlp.up_proj".

        Raises:
            InputError: there is no such checkpoint or layer, or it is broken.
        """
        read = checkpoint if isinstance(checkpoint, Checkpoint) else read_checkpoint(checkpoint)
        weight = read.weight(layer)
        eight = read.quantizes_activations(layer) and meets_codes(weight)
        return cls(weight, read.bias(layer), quantize_activations=eight)

    @classmethod
    def from_state(
        cls, state: Mapping[str, torch.Tensor], in_features: int, *, float_type: torch.dtype | None = None
    ) -> Linear:
        """A layer of what its state dict holds.

        Args:
            state: the buffers by name, "weight" (the text that says what they mean), and "bias" if there is one. All but the
                text may be on the meta device.
            in_features: columns of the weight, which 4-bit codes fill up to whole bytes.
            float_type: as for the constructor.

        Raises:
            InputError: the text says nothing that is known, or a tensor is missing.
            TypeMismatchError: extents or types do not fit together.
        """
        missing = [n for n in ("weight", "packed", "scales") if n not in state]
        if missing:
            raise InputError(f"a quantised layer without {missing[0]!r}", hint="the state dict of a tilewright.Linear")
        text = (
            bytes(state["weight"].flatten().tolist()).decode(errors="replace") if state["weight"].dtype == torch.uint8 else ""
        )
        said = _MEANING.fullmatch(text)
        if said is None:
            what = f"{text!r} is no meaning of a quantised layer's tensors"
            raise InputError(what, hint="the state dict of a tilewright.Linear, of this version")
        sides = (state.get(n) for n in _OPTIONAL)
        group = int(said["group"])
        weight = QuantizedWeight(
            dtype(said["codes"]), state["packed"], state["scales"], in_features, group, *sides, divides=bool(said["divides"])
        )
        return cls(weight, state.get("bias"), quantize_activations=bool(said["activations"]), float_type=float_type)

    @property
    def weight(self) -> LayerWeight:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight, over the module's own memory; a tensor [out, in] to code that reads one."""
        sides = (self.zero_points, self.offsets, self.order, self.factor, self.divides)
        held = QuantizedWeight(dtype(self.code_type), self.packed, self.scales, self.in_features, self.group_size, *sides)
        return LayerWeight.seen(held, self.float_type)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as torch does. A float weight is taken for this one where it is what was quantised: models tie their
        weights again.

        Raises:
            InputError: the weight is another one.
        """
        if name == "weight":
            own = self.weight
            shaped = isinstance(value, torch.Tensor) and value.shape == own.shape and not value.is_meta
            if not shaped or not own.quantises(value):
                raise InputError(
                    "another weight for a quantised layer",
                    hint="load or tie weights before tilewright.quantize_, or put a new tilewright.Linear in its place",
                )
            return
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - its name here
        """x [..., in] -> [..., out].

        Raises:
            InputError: x is no tensor, has another last axis or is no float; a CUDA graph is captured and no kernel is ready.
        """
        tensor = isinstance(x, torch.Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not tensor or x.shape[-1:] != (self.in_features,):
            check_type(x, torch.Tensor, "x", f"a tensor [..., {self.in_features}]: torch.from_numpy(x) of an array")
            raise InputError(f"x of shape {list(x.shape)}", hint=f"[..., {self.in_features}]")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        held = self._buffers  # torch looks an attribute that is a buffer up in three places, at a microsecond each
        parts = held["packed"], held["scales"], held["zero_points"], held["offsets"], held["order"], held["factor"]
        bias = self._parameters["bias"]
        if transformed():
            weight = self.weight.plain()
            return dense_linear(x, weight, bias, quantize_activations=self.quantize_activations)
        derived = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
        apply = linear if derived else plain_linear
        if self.threads is not None and not torch.compiler.is_compiling():
            with limited(self.threads):
                return apply(x, *parts, bias, self.code_type, self.group_size, self.divides, self.quantize_activations)
        return apply(x, *parts, bias, self.code_type, self.group_size, self.divides, self.quantize_activations)

    def prepare(self, rows: int | Iterable[int], dtype: torch.dtype | None = None) -> Linear:
        """Make the kernels for so many rows now, and not in the first call with them.

        Args:
            rows: one number of rows, or several.
            dtype: of the activations; that of the bias if not given, or else the layer's own.

        Raises:
            InputError: a number of rows below 1.
        """
        wanted = numbers_of_rows(rows)
        with said("preparing the kernels of a quantised layer"):
            make_ready(self, wanted, dtype)
        return self

    def tune(self, dtype: torch.dtype | None = None, *, budget_s: float = 30.0, progress: Progress | None = None) -> Buckets:
        """Measure which kernels serve which numbers of rows, for all layers of this signature, in later processes, too. A table
        that was measured with as much time in the same circumstances is read back.

        Args:
            dtype: of the activations, as for `prepare`.
            budget_s: seconds by the clock for all of it, as for `compile_rows`.
            progress: called with races done, races expected, and what comes next.

        Raises:
            InputError: no time to measure.
        """
        weight = self.weight
        table = tune(
            Signature.of(weight, self.usual(dtype), self._bias_type(), quantize_activations=self.quantize_activations),
            weight,
            budget_s=budget_s,
            progress=progress,
        )
        forget(weight)
        return table

    def candidates(self, dtype: torch.dtype | None = None) -> dict[int, str]:
        """The candidate that multiplies, by the rows of each kernel that is ready."""
        return self.kernels(dtype).candidates()

    def kernels(self, dtype: torch.dtype | None) -> Kernels:
        """Its kernels for activations of a type, the usual one if that is None."""
        return kernels_for(self.weight, self.usual(dtype), self._bias_type(), quantize_activations=self.quantize_activations)

    def _bias_type(self) -> torch.dtype | None:
        return None if self.bias is None else self.bias.dtype

    def usual(self, dtype: torch.dtype | None) -> torch.dtype:
        """The type of activations that is meant: that of the bias if none is given, or else the layer's own."""
        return dtype or (self.float_type if self.bias is None else self.bias.dtype)

    def extra_repr(self) -> str:
        """The text that `repr` shows."""
        said = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{said}, {self.scheme}{', reordered' if self.order is not None else ''}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Linear:
        """Move the weight with the module, but convert none of it: scales travel as their bits."""
        floats = {n: t.dtype for n, t in self._buffers.items() if t is not None and t.is_floating_point()}
        for name, of in floats.items():
            self._buffers[name] = cast("torch.Tensor", self._buffers[name]).view(BITS_TYPE[of.itemsize])
        try:
            super()._apply(cast("Any", fn), recurse)
        finally:
            for name, of in floats.items():
                self._buffers[name] = cast("torch.Tensor", self._buffers[name]).view(of)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load as torch does, but report a "weight" that is a float one, or says that buffers mean something else."""
        held = state_dict.get(f"{prefix}weight")
        if held is None and strict:
            missing_keys.append(f"{prefix}weight")
        elif isinstance(held, torch.Tensor) and held.is_floating_point():
            error_msgs.append(f"{prefix}weight is a float weight: load it before tilewright.quantize_, or quantise it anew")
        elif held is not None:
            said = bytes(held.tolist()).decode(errors="replace")
            if said != self._meaning():
                raise InputError(
                    f"the state dict holds {said}, this module {self._meaning()}",
                    hint="quantise the model as the saved one was",
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        unexpected_keys[:] = [key for key in unexpected_keys if key != f"{prefix}weight"]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the buffers, and under the name of a float weight a text that says what they mean, as bytes: a float layer that
        is given this state dict finds a weight of another shape, where it would otherwise find none and keep its own.
        `from_state` reads the text."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.packed.is_meta:  # without data there is nothing yet that could be taken for a float weight's
            destination[f"{prefix}weight"] = torch.tensor(list(self._meaning().encode()), dtype=torch.uint8)

    def reset_parameters(self) -> None:
        """Refuse to start anew.

        Raises:
            InputError: always, as codes are not drawn at random.
        """
        raise InputError("a quantised layer is not drawn at random", hint="draw the float layer's weights, then quantise it")

    def _meaning(self) -> str:
        activations = ", activations in 8 bits" if self.quantize_activations else ""
        factor = "" if self.factor is None else ", divided by a factor" if self.divides else ", times a factor"
        return f"{self.code_type} codes, {from_torch(self.scales.dtype)} scales per {self.group_size}{factor}{activations}"
