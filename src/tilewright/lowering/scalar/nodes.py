"""Elementwise nodes of an expression on a target: which have a form, and that form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.dtype import F4E2M1FN, DType
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Const, Convert, Dequantize, Gather, Map, Param, Quantize, Select
from tilewright.lowering.access import too_wide
from tilewright.lowering.scalar import conversions, functions
from tilewright.lowering.scalar.values import FP8, Builder
from tilewright.schedule.candidate import Unsupported


@dataclass(frozen=True)
class Forms:
    """The operations that a target has forms for.

    Attributes:
        name: the name of a form, in refusals.
        lacks: types that no value has.
        of_fp8: functions of fp8 have forms.
        to_64_bits: so have conversions of floats to 64-bit integers.
    """

    name: str
    lacks: frozenset[DType]
    of_fp8: bool
    to_64_bits: bool

    def check(self, roots: Sequence[Node], *, blocks: bool = False, picks: bool = False) -> None:
        """Refuse expressions of which a node has no form; `blocks`: scales may be given by blocks; `picks`: slices may be
        picked from a source.

        Raises:
            Unsupported: it names what has none.
        """
        for n in toposort(roots):
            from_source = isinstance(n.op, Gather) and isinstance(n.src[0].op, Param) and not n.op.elementwise
            if not (picks and from_source):
                self.check_node(n, blocks=blocks)

    def check_node(self, n: Node, *, blocks: bool = False) -> None:
        """Refuse a node that has no form; `blocks`: scales may be given by blocks.

        Raises:
            Unsupported: it names what has none.
        """
        op, source = n.op, n.src[0].dtype if n.src else n.dtype
        if n.dtype in self.lacks:
            self._refuse(f"{n.dtype}")
        wide = too_wide(n)
        if wide is not None:
            self._refuse(f"{wide}")
        if isinstance(op, (Quantize, Dequantize)) and op.block is not None and not blocks:
            what = f"quantizing to {n.dtype}" if isinstance(op, Quantize) else f"dequantizing {source}"
            self._refuse(f"{what} by blocks")
        if isinstance(op, Map):
            if not functions.has_form(op.fn, source):
                self._refuse(op.fn)
            if source.bits == 4 or (source in FP8 and not self.of_fp8):
                self._refuse(f"{op.fn} of {source}")
        elif isinstance(op, Const):
            if n.tensor.elements != 1:
                self._refuse("a table of constants")
        elif isinstance(op, (Convert, Quantize)) and op.dtype is F4E2M1FN and source is not F4E2M1FN:
            self._refuse(f"rounding to {op.dtype}")
        elif isinstance(op, Convert):
            if source.is_float and n.dtype.is_integer and n.dtype.bits > 32 and not self.to_64_bits:
                self._refuse(f"converting a float to {n.dtype}")
        elif isinstance(op, Quantize):
            if op.dtype.bits > (32 if op.dtype.is_float else 16):
                self._refuse(f"quantizing to {op.dtype}")
        elif isinstance(op, Dequantize):
            most = 32 if len(n.src) == 2 else 16  # the difference from a zero point has to be exact
            if source.is_integer and source.bits > most:
                self._refuse(f"dequantizing {source}")
        elif not isinstance(op, (*VIEWS, Select, Param, Acc)):
            self._refuse(op.name)

    def _refuse(self, what: str) -> None:
        raise Unsupported(f"{what} has no {self.name}")


class NodeBuilder(Builder):
    """A builder that writes nodes out, given the names of their sources' values."""

    def convert(self, value: str, source: DType, target: DType, *, saturate: bool = False) -> str:
        """`Convert`'s meaning: the name of a value of another type."""
        return conversions.convert(self.named(value, source), source, target, saturate=saturate).name

    def prepare(self, n: Node, names: Mapping[Node, str], *, multiplied: bool = False) -> None:
        """See `conversions.prepare`."""
        given = {s: self.named(names[s], s.dtype) for s in n.src if s in names}
        conversions.prepare(n, given, multiplied=multiplied)

    def elementwise(
        self, n: Node, args: Sequence[str], *, repeats: bool = True, form: tuple[Sequence[float], float] | None = None
    ) -> str:
        """The name of the value of a node that is elementwise.

        Args:
            n: the node.
            args: its sources' values.
            repeats: a quantisation's scale varies along one axis at most.
            form: of a gelu, the polynomial that gives all digits that are needed, and up to where.
        """
        op, values = n.op, [self.named(a, s.dtype) for a, s in zip(args, n.src, strict=True)]
        if isinstance(op, Convert):
            return self.convert(args[0], n.src[0].dtype, n.dtype, saturate=op.overflow == "saturate")
        if isinstance(op, Select):
            return self.select(*values).name  # pyright: ignore[reportArgumentType]
        if isinstance(op, Quantize):
            return conversions.quantize(n, *values, repeats=repeats).name
        if isinstance(op, Dequantize):
            return conversions.dequantize(n, *values).name
        assert isinstance(op, Map)
        dtype = n.src[0].dtype
        return (functions.apply(op.fn, dtype, values) if form is None else functions.gelu_at_once(values[0], dtype, form)).name
