"""Casts that cancel, and arithmetic that a compiler did in f32 for want of narrower instructions."""

from __future__ import annotations

from tilewright.dtype import BF16, F8E4M3FNUZ, F8E5M2FNUZ, F16, F32, DType
from tilewright.ir.build import const
from tilewright.ir.constant import is_rounding, scalar_value
from tilewright.ir.graph import Node
from tilewright.ir.ops import Broadcast, Convert, Map, Reshape, Select, Transpose
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.ir.shown import op_name

_ELEMENT_BY_ELEMENT = (Map, Select, Reshape, Transpose, Broadcast)


def before_cast(node: Node, dtype: DType) -> Node | None:
    """The node of type `dtype` that was cast to what `node` is; a number is made one, if `dtype` holds it exactly."""
    if isinstance(node.op, Convert) and node.src[0].dtype is dtype:
        return node.src[0]
    number = scalar_value(node)
    if number is None or node.tensor.elements != 1:
        return None
    made = const(number, dtype)
    return made if scalar_value(made) == number else None


def holds(wide: DType, narrow: DType) -> bool:
    """Tell whether every value of `narrow` is one of `wide`, minus zero included."""
    if wide.kind == "opaque" or narrow.kind == "opaque":
        return False
    if wide.is_float:
        if narrow.is_float:
            return wide.bits > narrow.bits and wide not in (F8E4M3FNUZ, F8E5M2FNUZ)
        return max(-narrow.min, narrow.max) <= 2 / wide.epsilon
    return not narrow.is_float and wide.kind != "pred" and wide.min <= narrow.min and narrow.max <= wide.max


@rule(Pat(Convert, (Pat(Convert, name="inner"),)), stage="canonical")
def drop_detour_through_a_wider_type(m: Match) -> Node | None:
    """convert(convert(x, wide), t) -> x, with x of type t

    Where: `wide` holds every value of t (f16 -> f32 -> f16, s8 -> s32 -> s8, u8 -> bf16 -> u8), and floats do not saturate,
    which would make infinity a number; or integers wrap through as many bits (s8 -> u8 -> s8). Exact: yes.
    """
    wide, x = m["inner"].dtype, m["inner"].src[0]
    narrow = x.dtype
    saturates = any(isinstance(n.op, Convert) and n.op.overflow == "saturate" for n in (m.node, m["inner"]))
    held = holds(wide, narrow) and not (saturates and narrow.is_float)
    wrapped = narrow.is_integer and wide.is_integer and wide.bits >= narrow.bits and not saturates
    return x if m.node.dtype is narrow and (held or wrapped) else None


@rule(
    Pat(Convert, (Pat(_ELEMENT_BY_ELEMENT, name="f"),), where=lambda n: n.dtype in (F16, BF16) and is_rounding(n)),
    stage="recognise",
)
def function_between_casts_is_the_function_of_what_is_cast(m: Match) -> Node | None:
    """convert(f(convert(x, f32), …), t) -> f(x, …), with x of type t

    Where: t is f16 or bf16, f is elementwise or a view; numbers among its operands are exact in t; nothing else reads the f32
    result; the outer cast does not saturate. Exact: yes, a function of a narrow float is computed in f32 and rounded once. XLA
    writes this where a machine has no bf16 arithmetic; taken back, activations and norms look as they were written.
    """
    f = m["f"]
    if f.dtype is not F32:
        return None
    src = [s if s.dtype is not F32 else before_cast(s, m.node.dtype) for s in f.src]
    narrow = [s for s in src if s is not None]
    if len(narrow) < len(src) or all(s.dtype is not m.node.dtype for s in narrow):
        return None
    if not m.users.only(f):
        m.refuse(f"the {op_name(f)} is also read in f32")
        return None
    made = Node(f.op, *narrow)
    return made if made.type == m.node.type else None
