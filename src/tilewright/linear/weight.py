"""A layer's quantised weight where a model reads it as the matrix it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map

from tilewright.dtype import DType
from tilewright.runtime.packing import QuantizedWeight


class LayerWeight(QuantizedWeight):
    """A `QuantizedWeight` that answers as a tensor [out, in] of the scales' type would.

    `dtype` is torch's own here (`code_type` is that of the codes), `device` where the codes are. `@`, an index, every function
    and every attribute of a tensor work on the dequantised matrix, made anew each time: nothing written to it comes back.
    """

    @staticmethod
    def seen(weight: QuantizedWeight) -> LayerWeight:
        """The weight, over the same memory."""
        sides = weight.zero_points, weight.offsets, weight.order
        return LayerWeight(weight.code_type, weight.packed, weight.scales, weight.in_features, weight.group_size, *sides)

    def plain(self) -> QuantizedWeight:
        """The same as a weight alone."""
        sides = self.zero_points, self.offsets, self.order
        return QuantizedWeight(self.code_type, self.packed, self.scales, self.in_features, self.group_size, *sides)

    def _type(self) -> torch.dtype:
        return self.scales.dtype

    def _coded(self, code_type: DType) -> None:
        self.__dict__["_codes"] = code_type

    dtype = property(_type, _coded)  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

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

    requires_grad = False
    grad = None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The weight on another device, as codes; in another type, as a tensor."""
        if len(args) == 1 and not kwargs and isinstance(args[0], (str, torch.device)):
            return LayerWeight.seen(self.plain().to(args[0]))
        return self.tensor().to(*args, **kwargs)

    def tensor(self) -> torch.Tensor:
        """The matrix [out, in]."""
        return self.dequantize(self._type())

    def __matmul__(self, other: torch.Tensor) -> torch.Tensor:
        return self.tensor() @ other

    def __rmatmul__(self, other: torch.Tensor) -> torch.Tensor:
        return other @ self.tensor()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    def __len__(self) -> int:
        return self.out_features

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a quantised weight has no {name!r}")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def dense(x: Any) -> Any:
            return x.tensor() if isinstance(x, LayerWeight) else x

        given, named = cast("tuple[Any, dict[str, Any]]", tree_map(dense, (tuple(args), dict(kwargs or {}))))
        return func(*given, **named)
