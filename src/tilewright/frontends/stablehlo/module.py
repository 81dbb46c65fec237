"""A typed view of StableHLO as jaxlib parses it: types, attributes, constants, places in the source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from tilewright.dtype import BY_NAME, F4E2M1FN, F16, F32, F64, OPAQUE, PRED, U8, DType
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends.stablehlo import jaxlib
from tilewright.ir.extent import is_open
from tilewright.ir.ops.functions import narrow_integer
from tilewright.ir.types import Shape, TensorType


def _mlir_name(d: DType) -> str:
    if d.is_integer:
        return f"{'i' if d.is_signed else 'ui'}{d.bits}"
    return "i1" if d is PRED else d.name[:2] + d.name[2:].upper() if d.name.startswith(("f4", "f8")) else d.name


DTYPES: dict[str, DType] = {_mlir_name(d): d for d in BY_NAME.values() if d is not OPAQUE}
MLIR_NAMES: dict[DType, str] = {d: name for name, d in DTYPES.items()}
# Carried as its bits: 2^(e - 127), or NaN. See `_scaled_dot`.
E8M0 = "f8E8M0FNU"
_COMPONENTS = {"complex<f32>": F32, "complex<f64>": F64}
_PLACES = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_type(raw: Any, where: str, shape: Shape | None = None) -> TensorType:
    """The graph's type for an MLIR tensor type; `shape` where that leaves extents open.

    Raises:
        UnsupportedError: an open extent, an element type the graph cannot carry, or no tensor at all.
    """
    text = str(raw) if len(str(raw)) <= 80 else f"{str(raw)[:80]}…"
    if not hasattr(raw, "element_type") or not getattr(raw, "has_rank", True):
        raise UnsupportedError(f"a value of type {text} cannot be carried", where=where, hint="tensors of numbers with a rank")
    element = str(raw.element_type)
    if element not in DTYPES and element != E8M0:
        raise UnsupportedError(
            f"the element type {element} cannot be carried",
            where=where,
            hint=f"one of {' '.join(DTYPES)}, complex<f32> or complex<f64>",
        )
    if shape is not None:
        return TensorType(DTYPES.get(element, U8), shape)
    if not raw.has_static_shape:
        raise UnsupportedError(
            f"{text} has an extent known only at run time",
            where=where,
            hint="--input-dim @NAME D … for each input (input_dims=…), or lower it with concrete shapes",
        )
    return TensorType(DTYPES.get(element, U8), tuple(int(d) for d in raw.shape))


def is_e8m0(raw: Any) -> bool:
    """Tell whether an MLIR type is a tensor of f8e8m0fnu."""
    return str(getattr(raw, "element_type", "")) == E8M0


def component(raw: Any) -> DType | None:
    """The type of the parts of complex elements, or None of any other MLIR type."""
    return _COMPONENTS.get(str(getattr(raw, "element_type", "")))


def carried_types(raw: Any, where: str) -> list[TensorType]:
    """The types of the tensors that carry a value of an MLIR tensor type: two for complex numbers, else one.

    Raises:
        UnsupportedError: see `tensor_type`.
    """
    dtype = component(raw)
    if dtype is None or not raw.has_static_shape:
        return [tensor_type(raw, where)]
    return [TensorType(dtype, tuple(int(d) for d in raw.shape))] * 2


def mlir_type(t: TensorType) -> str:
    """`t` as MLIR spells it, e.g. `tensor<2x3xbf16>`."""
    return f"tensor<{''.join('?x' if is_open((d,)) else f'{d}x' for d in t.shape)}{MLIR_NAMES[t.dtype]}>"


def agree(found: Sequence[TensorType], raw: Any, where: str) -> bool:
    """Tell whether types are those that carry a value of an MLIR tensor type, wherever that says what they are.

    Raises:
        UnsupportedError: see `tensor_type`.
    """
    if getattr(raw, "has_static_shape", True) or not getattr(raw, "has_rank", False) or component(raw) is not None:
        return list(found) == carried_types(raw, where)
    (one,) = found
    fixed = all(raw.is_dynamic_dim(a) or int(raw.get_dim_size(a)) == d for a, d in enumerate(one.shape))
    return one.rank == raw.rank and fixed and one.dtype is tensor_type(raw, where, one.shape).dtype


def attribute_from(x: torch.Tensor, dtype: DType) -> Any:
    """An elements attribute with the bits of `x`, whose logical type is `dtype`; needs a current context."""
    ir = jaxlib.api().ir
    flat = x.detach().cpu().contiguous()
    bits = flat.numpy() if dtype is PRED else flat.view(_BITS[flat.dtype.itemsize]).numpy()
    return ir.DenseElementsAttr.get(bits, type=ir.Type.parse(MLIR_NAMES[dtype]))


def _lent(dtype: DType) -> bool:
    """Tell whether jaxlib lends the memory of an attribute with such elements."""
    return dtype is PRED or (dtype.bits >= 8 and dtype.is_integer) or dtype in (F16, F32, F64)


def is_splat(attribute: Any) -> bool:
    """Tell whether an elements attribute repeats one value."""
    return bool(getattr(attribute, "is_splat", False))


def elements(attribute: Any, type: TensorType, asm: str, where: str) -> torch.Tensor:
    """The value of a dense attribute (its single element, of shape [], when it is a splat).

    Args:
        attribute: `dense<…>` or `dense_resource<…>`.
        type: of the constant.
        asm: text in which a resource's bytes may stand.
        where: for messages.

    Raises:
        InputError: the text leaves the data out.
        UnsupportedError: neither kind of attribute.
    """
    shape = () if is_splat(attribute) else type.shape
    written = str(attribute)[: len("dense_resource<__elided__>")] if not hasattr(attribute, "is_splat") else ""
    if written.startswith("dense_resource<"):
        return _from_bytes(_resource(attribute, asm, where), type, where)
    if written:
        raise UnsupportedError(f"a constant written as {written} is not read", where=where, hint="print it as dense<…>")
    if not _lent(type.dtype):
        return _from_text(attribute, type, where).reshape(shape)
    array = np.asarray(attribute)
    if is_splat(attribute):
        array = array[(0,) * array.ndim] if array.size else np.zeros((), array.dtype)
    return _from_bytes(bytearray(np.ascontiguousarray(array)), type.with_shape(shape), where)


def _resource(attribute: Any, asm: str, where: str) -> bytearray:
    key = re.match(r"dense_resource<\"?(.*?)\"?>", str(attribute))
    name = key.group(1) if key else ""
    found = re.search(rf'^\s*"?{re.escape(name)}"?:\s*"0x([0-9A-Fa-f]*)"', asm, re.MULTILINE)
    if found is None:
        raise InputError(
            f"the data of constant {name!r} was left out of the text", where=where, hint="print the module without eliding"
        )
    return bytearray.fromhex(found.group(1))[4:]  # the first four bytes are an alignment


def _from_bytes(data: bytearray, type: TensorType, where: str) -> torch.Tensor:
    storage = type.dtype.to_torch()
    if len(data) != type.elements * storage.itemsize:
        raise InputError(f"a constant of type {type} has {len(data)} bytes of data", where=where, hint="print the module again")
    if not data:
        return torch.empty(type.shape, dtype=storage)
    if type.dtype is F4E2M1FN:
        values = np.frombuffer(data, type.dtype.to_numpy()).astype(np.float32)
        return torch.from_numpy(values).to(storage).reshape(type.shape)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    t = raw.view(_BITS[storage.itemsize]) if storage.itemsize > 1 else raw
    if type.dtype.bits == 4:
        return narrow_integer(t, type.dtype).reshape(type.shape)
    return (t.bool() if type.dtype is PRED else t.view(storage)).reshape(type.shape)


def _from_text(attribute: Any, type: TensorType, where: str) -> torch.Tensor:
    """An attribute whose memory jaxlib does not lend: bf16, the 8-bit floats and the 4-bit integers."""
    text = str(attribute)
    return _parsed(text[len("dense<") : text.rindex(">", 0, text.rindex(" : "))], type, where, is_splat(attribute))


def complex_elements(op: Operation, type: TensorType) -> tuple[torch.Tensor, torch.Tensor]:
    """Real and imaginary parts of a constant, whose attribute jaxlib only prints: of shape [] where it repeats one number.

    Raises:
        UnsupportedError: no dense attribute.
    """
    printed = str(op.raw.operation.get_asm(print_generic_op_form=True, use_local_scope=True))
    found = re.search(r"value = dense<(.*?)> : tensor<", printed, re.DOTALL)
    if found is None:
        raise UnsupportedError(
            "a complex constant that is not written out is not read", where=op.where, hint="print it as dense<…>"
        )
    body = found.group(1)
    splat = body.startswith("(")
    pairs = _parsed(body, TensorType(type.dtype, (2,) if splat else (*type.shape, 2)), op.where, False)
    pairs = pairs.reshape((2,) if splat else (*type.shape, 2))
    return pairs[..., 0].contiguous(), pairs[..., 1].contiguous()


def _parsed(body: str, type: TensorType, where: str, splat: bool) -> torch.Tensor:
    """Contents of `dense<…>`: bytes in hexadecimal, or numbers in order."""
    if body.startswith('"0x'):
        return _from_bytes(bytearray.fromhex(body[3:-1]), type.with_shape(() if splat else type.shape), where)
    storage = type.dtype.to_torch()
    tokens = cast("list[str]", re.findall(r"[-+.\w]+", body))
    if type.dtype.is_integer:
        return narrow_integer(torch.tensor([int(x) for x in tokens], dtype=torch.int64), type.dtype)
    # A literal in hexadecimal is the element's bits (NaN, infinities); anything else is exact in decimal.
    bits = [int(x, 16) if x.startswith("0x") else None for x in tokens]
    decimal = torch.tensor([0.0 if b is not None else float(x) for x, b in zip(tokens, bits, strict=True)], dtype=torch.float64)
    value = decimal.to(storage) if type.dtype is F64 else decimal.to(torch.float32).to(storage)
    for i, b in enumerate(bits):
        if b is not None:
            wide = torch.tensor([b - (b >> 63 << 64)], dtype=torch.int64).to(_BITS[storage.itemsize])
            value[i : i + 1] = wide.view(storage)
    return value


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an operation: the name it has in its source, if any, and its line in the text."""

    name: str
    line: int

    def __str__(self) -> str:
        return self.name or (f"line {self.line}" if self.line else "")


def place(location: Any) -> Place:
    """The first name and the first line of an MLIR location, which may be made of many: the first few are looked at."""
    names: list[str] = []
    lines: list[int] = []
    stack = [location]
    for _ in range(_PLACES):
        if not stack:
            break
        at = stack.pop(0)
        if hasattr(at, "name_str"):
            names.append(str(at.name_str))
            stack.append(at.child_loc)
        elif hasattr(at, "locations"):
            stack[:0] = list(at.locations)
        elif hasattr(at, "callee"):
            stack.insert(0, at.callee)
        elif hasattr(at, "start_line"):
            lines.append(int(at.start_line) if str(at.filename) in ('"-"', "-") else 0)
    return Place(next((n for n in names if n), ""), next((n for n in lines if n), 0))


class Operation:
    """One MLIR operation, with its attributes decoded on demand."""

    name: str
    place: Place
    raw: Any

    __slots__ = ("_attributes", "name", "place", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.name = str(raw.operation.name)
        self.place = place(raw.location)
        self._attributes: Any = raw.attributes

    @property
    def where(self) -> str:
        """The operation with its name or line, for messages."""
        return f"{self.name} at {self.place}" if str(self.place) else self.name

    @property
    def origin(self) -> str:
        """The source's name of the operation, or the operation and its line, for reports."""
        short = self.name.partition(".")[2]
        return self.place.name or (f"{short} line {self.place.line}" if self.place.line else short)

    @property
    def operands(self) -> list[Any]:
        return list(self.raw.operands)

    @property
    def results(self) -> list[Any]:
        return list(self.raw.results)

    def block(self, region: int = 0) -> Block:
        """The single block of a region.

        Raises:
            UnsupportedError: control flow between blocks.
        """
        blocks = list(self.raw.regions[region].blocks)
        if len(blocks) != 1:
            raise UnsupportedError(
                f"a region of {len(blocks)} blocks cannot be expressed",
                where=self.where,
                hint="lower control flow to stablehlo.while, if or case",
            )
        return Block(blocks[0])

    def has(self, key: str) -> bool:
        return key in self._attributes

    def attribute(self, key: str) -> Any:
        """The attribute as jaxlib gives it.

        Raises:
            InputError: there is none of this name.
        """
        if key not in self._attributes:
            raise InputError(f"attribute {key!r} is missing", where=self.where, hint="print the module again, whole")
        return self._attributes[key]

    def ints(self, key: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """A list of integers, in row-major order when the attribute has several axes."""
        if default is not None and not self.has(key):
            return tuple(default)
        attribute = self.attribute(key)
        if hasattr(attribute, "is_splat"):
            return tuple(int(v) for v in np.asarray(attribute).reshape(-1))
        return tuple(int(v) for v in attribute)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer attribute; `InputError` if it is absent and has no default."""
        if default is not None and not self.has(key):
            return default
        return int(self.attribute(key).value)

    def number(self, key: str) -> float:
        """A float attribute; `InputError` if it is absent."""
        return float(self.attribute(key).value)

    def string(self, key: str, default: str = "") -> str:
        """A string or a symbol's name."""
        return str(self.attribute(key).value) if self.has(key) else default

    def keyword(self, key: str, default: str = "") -> str:
        """The last word of an enumeration attribute: `#stablehlo<comparison_direction EQ>` gives EQ."""
        return re.findall(r"\w+", str(self.attribute(key)))[-1] if self.has(key) else default

    def dimension_numbers(self, kind: str, key: str) -> Any:
        """A structured attribute of StableHLO, by the name of its class."""
        return getattr(jaxlib.api().stablehlo, kind)(self.attribute(key))


class Block:
    """A straight line of operations with arguments; its last operation returns values."""

    raw: Any

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def arguments(self) -> list[Any]:
        return list(self.raw.arguments)

    def operations(self) -> list[Operation]:
        """The block's operations in order; the returning one is last."""
        return [Operation(o) for o in self.raw.operations]
