"""Memory that is bound to a session's inputs and outputs before it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tilewright.errors import InputError, check_type
from tilewright.ir.types import TensorType
from tilewright.ort.options import SessionError
from tilewright.ort.values import OrtValue, device, fill, kind_of, taken
from tilewright.runtime.arrays import at_address

if TYPE_CHECKING:
    from tilewright.ort.session import InferenceSession


class IOBinding:
    """Memory for the inputs and outputs of a session, bound before `run_with_iobinding`."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._taken = {i.name for i in (*session.get_inputs(), *session.get_overridable_initializers())}
        self._given = {o.name for o in session.get_outputs()}
        self._inputs: dict[str, object] = {}
        self._outputs: dict[str, torch.Tensor | str] = {}  # memory, or a device
        self._results: dict[str, OrtValue] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """Read an input from a NumPy array.

        Raises:
            SessionError: the model has no such input.
            InputError: it is no array.
        """
        check_type(arr_on_cpu, (np.ndarray,), f"input {name!r}", "a NumPy array")
        self._inputs[self._input(name)] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Read an input from contiguous memory at an address, which must outlive the binding.

        Raises:
            SessionError: the model has no such input.
            InputError: it is no address, no shape, or there is no such type or device.
        """
        place, where = device(device_type, device_id), f"input {name!r}"
        self._inputs[self._input(name)] = _memory(buffer_ptr, kind_of(element_type, shape, where), place, where)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Read an input from a value.

        Raises:
            SessionError: the model has no such input.
        """
        self._inputs[self._input(name)] = taken(ortvalue)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Write an output to contiguous memory at an address, or, without one, to new memory on a device.

        Raises:
            SessionError: the model has no such output, or an address is given without a shape or an element type.
            InputError: it is no address, no shape, or there is no such type or device.
        """
        name, place = self._output(name), device(device_type, device_id)
        if buffer_ptr is None:
            self._outputs[name] = place
            return
        if shape is None or element_type is None:
            raise SessionError("an address without shape and element type", where=f"output {name!r}", hint="give both")
        where = f"output {name!r}"
        self._outputs[name] = _memory(buffer_ptr, kind_of(element_type, shape, where), place, where)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Write an output into a value's memory.

        Raises:
            SessionError: the model has no such output.
            InputError: it is no `OrtValue`.
        """
        if not isinstance(ortvalue, OrtValue):
            hint = "tilewright.ort.OrtValue.ortvalue_from_shape_and_type"
            raise InputError(
                f"the memory of a {type(ortvalue).__name__} cannot be written", where=f"output {name!r}", hint=hint
            )
        self._outputs[self._output(name)] = ortvalue.tensor

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs, and the results in them."""
        self._outputs.clear()
        self._results.clear()

    def synchronize_inputs(self) -> None:
        """Wait until what writes the inputs is done."""
        self._session.wait()

    def synchronize_outputs(self) -> None:
        """Wait until the results are there."""
        self._session.wait()

    def get_outputs(self) -> list[OrtValue]:
        """The results of the last run, in the order in which outputs were bound."""
        return [self._results[name] for name in self._outputs if name in self._results]

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Copies of the results of the last run as NumPy arrays."""
        return [r.numpy() if r.is_tensor() else r.value for r in self.get_outputs()]

    def run(self) -> None:
        """Run the session on what is bound.

        Raises:
            SessionError: an input is missing or unknown, or no output is bound.
        """
        if not self._outputs:
            raise SessionError("no output is bound", where="IOBinding", hint="bind_output(name)")
        found = self._session.values([*self._outputs], self._inputs)
        for (name, place), (value, dtype) in zip(self._outputs.items(), found, strict=True):
            if isinstance(place, torch.Tensor):
                fill(place, value, f"output {name!r}")
                value = place
            elif isinstance(value, torch.Tensor) and not (place == "cpu" and value.is_cpu):
                value = value.to(place)
            self._results[name] = OrtValue(value, dtype)

    def _input(self, name: str) -> str:
        return _known(name, self._taken, "input")

    def _output(self, name: str) -> str:
        return _known(name, self._given, "output")


def _known(name: object, names: Collection[str], what: str) -> str:
    """A name that the model has.

    Raises:
        SessionError: it has it not.
    """
    if not isinstance(name, str) or name not in names:
        hint = f"one of {', '.join(sorted(names))}"
        raise SessionError(f"no {what} is called {name!r}", where="IOBinding", hint=hint)
    return name


def _memory(address: object, kind: TensorType, place: str, where: str) -> torch.Tensor:
    """Memory at an address of a device.

    Raises:
        InputError: it is none.
    """
    if not isinstance(address, int) or (address <= 0 and kind.elements):
        raise InputError(f"{address!r} is no address", where=where, hint="array.ctypes.data, or tensor.data_ptr()")
    return at_address(address, kind, place)
